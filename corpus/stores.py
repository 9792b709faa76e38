"""
Stores of files of hosts (robots.txt; tdmrep.json, ai.txt, license.xml), and lists of domains and of agents.

    --robots=store.jsonl.gz          rows of domain, content, and date if a host has several snapshots
    --robots=mirror/                 HOST.txt, HOST/robots.txt, and files of rows
    --reservations=store.jsonl.gz    rows of domain, file, content, and date
    --reservations=mirror/           HOST/ai.txt, HOST/tdmrep.json, HOST/license.xml, also in HOST/.well-known/
    --blocked=list --agents=list     one a line, or rows of domain and of agent

A domain is a host, or host:8443. Content "" says that the host serves no file; null, that fetching failed: the host
stays unknown. Each file may be compressed, as .gz or .zst. Other files of a folder are named, not read.

Different files of one site are its snapshots. A page is removed if any of them forbids it, because written bans vanish
from robots.txt while hosts block crawlers instead. With snapshots="last" only the newest counts, as for Apertus, which
read the files of January 2025; files of a folder have no date, so the last one by name is the newest. The licences of a
site are several files, each with snapshots of its own.
"""

import os
import re
import zlib
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from corpus.readers import ending, files_of, open_bytes, rows_of
from corpus.urls import host_key, site_key, split_url
from engine.files import in_one_line, sha256, sha256_of

# The files of a store of reservations.
FILES = ("tdmrep.json", "ai.txt", "license.xml")
# Files of rows.
ROWS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
SNAPSHOTS = ("any", "last")
# The settings of prepare.py that name files with the opt-outs of hosts.
SETTINGS = ("robots", "reservations", "blocked")
# The agents of --agents=2026.
AGENTS_2026 = Path(__file__).parent / "agents_2026.txt"


class Store(dict):
    """
    Key -> its different files, compressed in memory: 1 kB per host instead of 4 kB, 1 GB for a million hosts. Read it
    by get(), the newest file, or versions(); store[key] holds the compressed bytes.
    """

    def __init__(self, rows, snapshots="any", ignored=()):
        """
        rows: (key, bytes or None, age). A key is a site_key(), or the site and path of a licence; without one, or
        without a file, a row is skipped. age: what dated() returns; of equal ages the last row is the newest.
        snapshots: "any" keeps all different files, "last" the newest; another value is a ValueError.

        several: the keys with different files. unfetched: those of failed downloads. ignored: {reason: [names]} of
        files and rows that were not read.
        """
        if snapshots not in SNAPSHOTS:
            raise ValueError(f"snapshots={snapshots!r}: want any (each file of a host counts) or last (the newest)")
        self.ignored, self.unfetched, files = dict(ignored), set(), {}
        for number, (key, content, age) in enumerate(rows):
            if key and content is None:
                self.unfetched.add(key)
            elif key:
                ages = files.setdefault(key, {})
                packed = zlib.compress(content, 1)
                ages[packed] = max((age, number), ages.get(packed, ("", 0)))
        self.several = {key for key, ages in files.items() if len(ages) > 1}
        for key, ages in files.items():
            self[key] = sorted(ages, key=ages.get, reverse=True)[:1 if snapshots == "last" else None]

    def versions(self, key):
        """The files of a key, bytes, the newest first. An unknown host is looked up with and without www. as well."""
        return [zlib.decompress(packed) for packed in super().get(self.key_of(key)) or ()]

    def key_of(self, key):
        """The key itself or, if it has no file, the same with or without www."""
        return key if key in self else twin_of(key)

    def join(self, key, keys):
        """Give a key the files of other keys, which are no snapshots of one file. It is unfetched if one of them is."""
        self[key] = [packed for other in keys for packed in super(Store, self).get(other) or ()]
        if not self.several.isdisjoint(keys):
            self.several.add(key)
        if any(map(self.was_not_fetched, keys)):
            self.unfetched.add(key)

    def was_not_fetched(self, key):
        """Whether all downloads of the file of a key have failed."""
        return not self.versions(key) and not self.unfetched.isdisjoint((key, twin_of(key)))

    def get(self, key):
        """The newest file of a key, bytes, or None."""
        return next(iter(self.versions(key)), None)


def twin_of(key):
    """A key with www., or without it."""
    return key[4:] if key.startswith("www.") else "www." + key


def was_not_fetched(store, key):
    """Whether all downloads of a file have failed, by a Store; another store does not know."""
    return bool(key) and isinstance(store, Store) and store.was_not_fetched(key)


def lacks_licence(store, site):
    """Whether a licence of a site is not known, because its downloads have failed."""
    return isinstance(store, Store) and store.key_of(site) in store.unfetched


def versions_of(store, key):
    """The files, newest first, that a store has of a key: a Store, or anything with .get(key); [] without a store."""
    if not store or not key:
        return []
    if isinstance(store, Store):
        return store.versions(key)
    content = store.get(key)
    return [] if content is None else [content]


def open_robots(path, snapshots="any"):
    """
    A Store of robots.txt by site, from a .jsonl, .jsonl.gz, .jsonl.zst or .parquet file with the columns domain and
    content (or robots), or a folder. swiss-ai/fineweb-robots-txt-files-compressed is a parquet. ValueError if it is
    empty, something else or not there.
    """
    ignored = {}
    rows = hosts_files(path, {"robots.txt"}, [("content", "robots")], ["file"], ignored)
    store = Store(((site, content, age) for site, _, content, age in rows), snapshots, ignored)
    store.ignored = ignored                                # it was empty before the rows were read
    if not store:
        raise ValueError(f"{path}: no robots.txt in it; want *{', *'.join(ROWS)} with rows of domain, content, or a "
                         f"folder of HOST.txt, HOST/robots.txt{not_read(ignored)}")
    return store


def open_reservations(path, snapshots="any"):
    """
    {file of FILES: Store} from a .jsonl(.gz, .zst) or .parquet of domain, file, content, or a folder. The keys of
    license.xml are the site, and also the site and path of the licence, which may be on another host: its file is then
    the URL. ValueError if it is empty or something else.
    """
    ignored, rows, keys_of = {}, {file: [] for file in FILES}, {}
    for site, name, content, age in hosts_files(path, set(FILES), [("content",), ("file",)], [], ignored):
        file = kind_of_reservation(name)
        if not file:
            raise ValueError(f"{path}: want domain, content and file, {', '.join(FILES[:-1])} or {FILES[-1]} (or the "
                             f"URL of a licence); found the file {name!r}")
        key = site
        if site and file == FILES[-1]:
            key = licence_key(name if "//" in name else f"//{site}/{name.lstrip('/')}") or f"{site} {name}"
            keys_of.setdefault(site, set()).add(key)
        rows[file].append((key, content, age))
    if not any(rows.values()):
        raise ValueError(f"{path}: want domain, content and file, {', '.join(FILES[:-1])} or {FILES[-1]}; found no "
                         f"opt-outs{not_read(ignored)}")
    stores = {file: Store(rows[file], snapshots, ignored) for file in FILES}
    for site, keys in keys_of.items():
        stores[FILES[-1]].join(site, sorted(keys))
    return stores


def kind_of_reservation(name):
    """Which of FILES a file is, by its name or URL; None if it is another one."""
    name = str(name).lower()
    known = next((file for file in FILES if name.rpartition("/")[2] == file), None)
    return known or (FILES[-1] if name.endswith(".xml") or "//" in name else None)


def licence_key(url):
    """The key of a licence in a store: its site and path. None if it is no URL."""
    site, (_, path) = site_key(url), split_url(url)
    return site and site + path


def not_read(ignored):
    """The end of a message: the files that were ignored; "" without any."""
    return "; not read: " + ", ".join(names[0] for names in ignored.values()) if ignored else ""


# ----------------------------------------------------------------------------------------------------------------------
# rows and folders


def hosts_files(path, meant, columns, wrong, ignored):
    """
    Yield (site, name of the file or "", content, age) of a file of ROWS, or of the files of a folder.

    meant: the names of files that are read. columns: of the content, and of the name of the file if rows have one.
    wrong: as in rows_of(). ignored: {reason: [names]}, which gets the others. ValueError if the path does not exist, a
    content is no text, or a date cannot be read.
    """
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file or folder")
    for file in files_of(str(path)):
        name = os.path.relpath(file, path)
        if file.lower().endswith(ROWS):
            names = ("domain", "host"), *columns
            # others: the name of the file, if `columns` asks for it
            for domain, content, *others, date in rows_of(file, *names, errors="replace", wrong=wrong, last="date"):
                domain, site = as_text(domain), site_of(as_text(domain))
                if not site:
                    ignored.setdefault("no host", []).append(domain[:100])
                yield site, *map(as_text, others or [""]), as_bytes(content, domain), dated(date, domain)
        elif os.path.isdir(path):
            site, inside = place_of(name)
            with in_one_line(file):
                content = open_bytes(dict(path=file)).read() if site and is_meant(inside, meant) else None
            # An .xml of another name counts if it speaks of RSL.
            if content is None or (inside not in meant and b"rsl" not in content.lower()):
                ignored.setdefault(ending(name), []).append(name)
            else:
                yield site, inside, content, ""


def site_of(domain):
    """The site_key() of a domain of a row: a host, host:port, an IPv6 address or a URL. None for anything else."""
    return next(filter(None, map(site_key, (domain, f"//{domain}", f"//[{domain}]"))), None) if domain else None


def as_text(name):
    """A name in a row as text: parquet may hold bytes."""
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name or "")


def as_bytes(content, domain):
    """A file of a row as bytes; None, a failed download, as it is. ValueError if it is no text."""
    if isinstance(content, str):
        return content.encode("utf-8", "replace")
    if not isinstance(content, bytes | None):
        raise ValueError(f"the file of {domain} is a {type(content).__name__}: want a text")
    return content


def dated(date, domain):
    """
    A date as text whose order is that of time: UTC, also where no time zone is given. "" without a date. ValueError for
    a text that is neither ISO 8601 (2026-01-31T10:00:00+02:00, 20260131, 2026-1-31), nor a timestamp of web archives
    (20260131100000), nor the date of HTTP (RFC 9110, sec. 5.6.7).
    """
    # NaN is not equal to itself.
    if date in (None, "") or date != date:
        return ""
    text = as_text(int(date) if isinstance(date, float) else date).strip()
    text = re.sub(r"^(\d{4})-(\d\d?)-(\d\d?)(?!\d)", lambda m: f"{m[1]}-{m[2]:>02}-{m[3]:>02}", text)
    text = re.sub(r"^(\d{8})(\d{6})$", r"\1T\2", text.removesuffix(" UTC"))
    try:
        time = parsedate_to_datetime(text) if text[:3].isalpha() else datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC).isoformat(timespec="microseconds")
    except (ValueError, OverflowError):
        raise ValueError(f"the file of {domain} has the date {date!r}: want a date such as 2026-01-31") from None


def place_of(name):
    """
    (site, the place of a file on it) of a file in a folder, by its name without .gz or .zst. 2026/a.org/robots.txt is
    robots.txt of a.org, and so is a.org.txt. (None, "") if no part of the name is a host.
    """
    *folders, last = re.sub(r"\.(gz|zst)$", "", name.lower()).split(os.sep)
    for i, folder in enumerate(folders):
        if re.search(r"[.:]", folder.lstrip(".")) and site_of(folder):
            return site_of(folder), "/".join([*folders[i + 1:], last]).removeprefix(".well-known/")
    host = last.removesuffix(".txt")
    return (site_of(host), "robots.txt") if host != last and "." in host else (None, "")


def is_meant(inside, meant):
    """Whether a file is one of those that a store holds. A licence may have another name, if it ends in .xml."""
    return inside in meant or FILES[-1] in meant and inside.endswith(".xml")


# ----------------------------------------------------------------------------------------------------------------------
# lists


def blocked_domains(path):
    """
    frozenset of domains from a text file (one per line, # comments), or a .jsonl(.gz/.zst) or .parquet with a column
    domain, as the published swiss-ai/robots-txt-blocked-domains-*. example.com also blocks a.b.example.com.
    ValueError if it is empty or something else.
    """
    rows = rows_of(str(path), ("domain",), comments=True, wrong=["content", "robots"])
    hosts = [(host_key(f"//{domain}") or "", domain) for domain, in rows]
    wrong = [domain for host, domain in hosts if "." not in host or "/" in domain or "@" in domain]
    if wrong or not hosts:
        raise ValueError(f"{path}: want a domain in each line, or a column 'domain', not {wrong or 'an empty file'}")
    return frozenset(host.removeprefix("www.") for host, _ in hosts)


def read_agents(path):
    """
    The agents of a list: one or several a line, with commas between them, or lines of a robots.txt, User-agent: NAME.
    ValueError if it names none.
    """
    lines = rows_of(str(path), ("agent",), comments=True)
    lines = [re.sub(r"(?i)^user[ _-]?agent\s*:", "", str(line)) for line, in lines]
    agents = [agent.strip() for line in lines for agent in line.split(",") if agent.strip()]
    if not agents:
        raise ValueError(f"--agents={path} names no agent: want one a line, or 2026")
    return agents


# ----------------------------------------------------------------------------------------------------------------------
# which files were read


def described_stores(plan):
    """[{setting, path, sha256}] of the stores of a plan, a dict, that exist."""
    paths = {name: plan[name] for name in SETTINGS if plan[name] and os.path.exists(plan[name])}
    return [dict(setting=name, path=path, sha256=sha256_of_store(path)) for name, path in paths.items()]


def check_stores(stores):
    """ValueError if one of these stores, as described_stores() gives them, is not as it was when the run began."""
    for store in stores:
        if not os.path.exists(store["path"]) or sha256_of_store(store["path"]) != store["sha256"]:
            raise ValueError(f"--{store['setting']}={store['path']} has changed while it was read: run this again")


def sha256_of_store(path):
    """The sha256 of a file; of a folder, that of the names and sha256 of its files."""
    if os.path.isfile(path):
        return sha256(path)
    return sha256_of([(os.path.relpath(file, path), sha256(file)) for file in files_of(path)])
