"""
Opt-outs: may this document be trained on? robots.txt, retroactively.

Apertus dropped a page of 2013-2024 if the robots.txt that its host served in January 2025
refuses the page's URL to any of 15 agents: crawlers that collect for AI, and `*`. A host without a file has not opted
out. That cost 8 % of the English and 4 % of the multilingual tokens (report sec. 3). Which rule applies is RFC 9309:

    group = all groups that name the agent, merged; if there are none, those of `*`; if none of those either, no rules
    rule  = of the group's patterns that match path?query, the longest; allow wins ties; `*` = anything, `$` = the end
    drop  = some agent's rule is a disallow

$ python -m corpus.robots https://example.com/a --robots=robots.txt     # who may read it, and the rule that says so
$ python -m corpus.robots https://example.com/a --robots=store.jsonl.gz --missing=deny
"""

import sys

if __name__ == "__main__" and not __package__:
    print("robots.py: start it from the project's root, python -m corpus.robots", file=sys.stderr)
    sys.exit(2)

import io
import ipaddress
import json
import re
import unicodedata
import zlib
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote, unquote

from tqdm import tqdm

from configurator import run

paths = []             # URLs
robots = ""            # a robots.txt, or a store: folder, .jsonl(.gz, .zst), .parquet
missing = "allow"      # what a host without robots.txt means: allow or deny
explicit = False       # only groups that name an AI agent count, not those of *

# The 15 of the published pipeline (swiss-ai/pretrain-data; the report prints 14, without FacebookBot).
AGENTS = ("AI2Bot", "Applebot-Extended", "Bytespider", "CCBot", "CCBot/2.0", "CCBot/1.0", "ClaudeBot",
          "cohere-training-data-crawler", "Diffbot", "FacebookBot", "Meta-ExternalAgent", "Google-Extended", "GPTBot",
          "PanguBot", "*")

# What can become of a document: kept + drop = all that came in. An audit counts by the first two words of the code.
OUTCOMES = {
    "kept:allowed": "the host's robots.txt lets every agent read this URL",
    "kept:no-robots": "no robots.txt is known for the host: it has not opted out",
    "kept:unparsable": "what the host serves as robots.txt is none (a web page, prose, rules for nobody)",
    "kept:bad-url": "the document's URL is not one, so that no host can be asked",
    "kept:no-url": "the document has no URL (local text)",
    "drop:robots": "refused, followed by agent and rule: drop:robots:GPTBot:/private",
    "drop:blocked-domain": "the host is on a list of blocked domains, followed by the entry",
    "drop:no-robots": "as kept:no-robots, but missing='deny'",
    "drop:unparsable": "as kept:unparsable, but missing='deny'",
    "drop:bad-url": "as kept:bad-url, but missing='deny'",
}


_URL = re.compile(r"(?:(?:https?|ftp):)?//([^/?#]*)([^#]*)", re.I)
_NO_SCHEME = re.compile(r"[^/?#:@\s]+\.[^/?#:@\s]+(:\d*)?([/?#]|$)")      # example.com/a, but not mailto:x@example.com
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_NOT_PLAIN = re.compile(r"%[0-9A-Fa-f]{2}|[^!-~]")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def split_url(url):
    """(host, path with query) of a URL, normalised so that equal means same; without fragment. None if it is no URL."""
    return _split_url(url) if isinstance(url, str) else None


@lru_cache(maxsize=4096)                                                  # each URL is asked for several times in a row
def _split_url(url):
    url = url.strip()
    m = _URL.match("//" + url if _NO_SCHEME.match(url) else url)
    host = m and _host(m[1])
    if not host:
        return None
    path = m[2] if m[2].startswith("/") else "/" + m[2]
    return host, _percent(path).replace("*", "%2A").replace("$", "%24")   # as a rule writes them when it means them


def host_key(url):
    """The host of a URL, key of a robots store: lower case, no user, no port, IDN in punycode. None if no URL."""
    parts = split_url(url)
    return parts and parts[0]


def _host(authority):
    host = authority.rpartition("@")[2]                                   # user:password@host:port
    if host.startswith("["):
        address, bracket, port = host[1:].partition("]")
        try:
            return ipaddress.IPv6Address(address).compressed if bracket and not port.strip(":0123456789") else None
        except ValueError:
            return None
    host, _, port = host.partition(":")
    host = unicodedata.normalize("NFKC", unquote(host)).lower().replace("\u3002", ".").removesuffix(".")
    if not host.isascii():  # label by label; Python's "idna" codec is that of 2003: it sends straße.de to strasse.de
        host = ".".join(s if s.isascii() else "xn--" + s.encode("punycode").decode() for s in host.split("."))
    return host if _HOST.fullmatch(host) and not port.strip("0123456789") else None


def _percent(s):
    """RFC 9309 sec. 2.2.2: %7E and ~ are the same, %c3 and %C3, and e-acute and %C3%A9."""
    def one(m):
        if len(m[0]) == 1:
            return quote(m[0], errors="replace")
        c = chr(int(m[0][1:], 16))
        return c if c in _UNRESERVED else m[0].upper()
    return _NOT_PLAIN.sub(one, s)


MAX_BYTES = 500 * 1024                                                    # RFC 9309 sec. 2.5: the least that is read
# Google's parser reads misspelt names and a missing colon too: a site that writes "Disalow /" has made itself clear.
_KEYS = "user[ -]?agent|allow|dis+al+ow|disallaw|diasllow|sitemap"
_LINE = re.compile(rf"^[ \t]*({_KEYS})(?:[ \t]*:|[ \t])([^#\n]*)", re.I | re.M)
_TOKEN = re.compile(r"\*(?!\S)|[A-Za-z0-9_.-]+")                          # "CCBot/2.0 (https://...)" -> "CCBot"


@lru_cache(maxsize=4096)
def product_token(agent):
    """What names an agent in a user-agent line: lower case, no version (RFC 9309 sec. 2.2.1). None if nothing does."""
    m = _TOKEN.match(agent.strip())
    return m and m[0].lower()


@lru_cache(maxsize=4096)                                                  # documents of a host come in clusters
def parse_robots(content):
    """
    {agent token: [(allow, rule as written, parts between the *, must end there), ...] with the longest rule first}.

    content: str or bytes. None if it is no robots.txt: a web page, or lines but no user-agent and no sitemap line.
    Bytes that are no UTF-8 are replaced. A byte-order mark is skipped; the official pipeline loses a group to it.
    """
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    if len(raw) > MAX_BYTES:  # up to the last whole line: "/private/x" cut to "/" would refuse everything
        cut = max(raw.rfind(b"\n", 0, MAX_BYTES), raw.rfind(b"\r", 0, MAX_BYTES))
        raw = raw[:cut if cut > 0 else MAX_BYTES]
    text = raw.decode("utf-8", "replace").replace("\0", "")               # UTF-16 read as UTF-8 is ASCII and NULs
    text = text.lstrip("\ufeff\ufffd").replace("\r\n", "\n").replace("\r", "\n")
    if text.lstrip().startswith("<"):
        return None
    groups, names, in_rules, known = {}, [], False, False
    for key, value in _LINE.findall(text):
        key, value = key[0].lower(), value.strip()                        # u s a d
        known = known or key in "us"
        if key == "u":
            if in_rules:                                                  # after a rule it starts a new group
                names, in_rules = [], False
            names.append(product_token(value))
            groups.setdefault(names[-1], [])                              # the same agent again: one merged group
        elif key in "ad":
            in_rules = True
            for name in names:
                if value:                                                 # "Disallow:" refuses nothing
                    groups[name].append((key == "a", value))
    if not known and re.search(r"^[ \t]*[^#\s]", text, re.M):
        return None
    return {name: _compile(rules) for name, rules in groups.items()}


def _compile(rules):
    rules = sorted(((_percent(rule), allow, rule) for allow, rule in rules), key=lambda r: (-len(r[0]), not r[1]))
    return [(allow, rule, [part.replace("$", "%24") for part in p.removesuffix("$").split("*")], p.endswith("$"))
            for p, allow, rule in rules]


def _matches(parts, end, path):
    """Leftmost match of each part in turn: `*` needs no backtracking, so /*a*a*a*a*b costs what any rule costs."""
    first, *middle = parts
    if not path.startswith(first):
        return False
    if not middle:
        return not end or len(path) == len(first)
    at = len(first)
    for part in middle[:-1]:
        at = path.find(part, at)
        if at < 0:
            return False
        at += len(part)
    last = middle[-1]
    return path.find(last, at) >= 0 if not end else path.endswith(last) and len(path) - len(last) >= at


def refusals(path, groups, agents=AGENTS, explicit=False):
    """{agent: rule} of the agents that may not read path (from split_url) by these groups (from parse_robots)."""
    applies = lambda rules: next((r for r in rules if _matches(r[2], r[3], path)), None)
    of_all, refused = applies(groups.get("*", ()) if not explicit else ()), {}        # which the agents that no group names share
    for agent in agents if path != "/robots.txt" else ():
        token = product_token(agent)
        rule = applies(groups[token]) if token in groups else of_all
        if rule and not rule[0]:
            refused[agent] = rule[1]
    return refused


def may_train_on(url, robots_txt, agents=AGENTS, explicit=False):
    """
    (True, reason) if every agent may read url by this robots.txt, else (False, "robots:AGENT:RULE") for the first that the
    file names, `*` if it names none of those that it refuses.

    robots_txt: str or bytes; None = the host has none. explicit=True asks only groups that name the agent: with
    agents=AGENTS[:-1] these are the opt-outs from AI alone: of 4,231 real files of 2019, 30 instead of 114 refuse an
    article. Leaving out `*` without it changed none of them: by RFC 9309 an agent that is not named obeys `*`.
    Reasons for True: allowed, no-robots, unparsable, bad-url, no-url. Source: RFC 9309 sec. 2.2; report sec. 3.
    """
    if url is None or url == "":
        return True, "no-url"
    parts = split_url(url)
    if parts is None:
        return True, "bad-url"
    if robots_txt is None:
        return True, "no-robots"
    groups = parse_robots(robots_txt)
    if groups is None:
        return True, "unparsable"
    refused = refusals(parts[1], groups, agents, explicit)
    if not refused:
        return True, "allowed"
    agent = min(refused, key=lambda agent: 1 if agent == "*" else 2 * (product_token(agent) not in groups))   # of equals the first
    return False, f"robots:{agent}:{refused[agent]}"


def verdict(url, store=None, agents=AGENTS, missing="allow", blocked=frozenset(), explicit=False):
    """
    The outcome of a document by its URL: a code of OUTCOMES, "kept:..." or "drop:...".

    store: open_robots(path) or anything with .get(host) -> str, bytes or None. blocked: blocked_domains(path). missing:
    'allow' (Apertus: silence is no opt-out) or 'deny' (only what a robots.txt allows). Text without a URL is kept.
    """
    if missing not in ("allow", "deny"):
        raise ValueError(f"missing={missing!r}: want 'allow' (no file = no opt-out) or 'deny' (no file = no consent)")
    host = host_key(url)
    entry = blocked and host and _suffix(host, blocked)
    if entry:
        return f"drop:blocked-domain:{entry}"
    robots_txt = store.get(host) if store is not None and host else None
    allowed, reason = may_train_on(url, robots_txt, agents, explicit)
    if missing == "deny" and reason in ("no-robots", "unparsable", "bad-url"):
        allowed = False
    return ("kept:" if allowed else "drop:") + reason


STORES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


_unpacked = lru_cache(maxsize=4096)(zlib.decompress)


class RobotsStore:
    """Host -> robots.txt. Contents lie deflated in memory, equal ones once: 1 kB a host (of 4 kB), 1 GB a million."""

    def __init__(self, path):
        self.path, self._files, once = Path(path), {}, {}
        rows = _robots_rows(self.path)
        for host, content in tqdm(rows, desc=f"robots from {self.path.name}", unit=" hosts", disable=None, leave=False):
            content = content.encode("utf-8", "replace") if isinstance(content, str) else content
            packed = zlib.compress(content, 1)
            self._files[host] = once.setdefault(packed, packed)           # of two rows for a host the later one counts
        if not self._files:
            raise ValueError(f"{path}: no robots.txt in it; want rows of domain, content, or HOST.txt, HOST/robots.txt")

    def __len__(self):
        return len(self._files)

    def get(self, host):
        """bytes or None. A host that is not known is tried with and without www., which serve the same file."""
        for name in (host, host[4:] if host.startswith("www.") else "www." + host):
            if name in self._files:
                return _unpacked(self._files[name])
        return None


def open_robots(path):
    """
    A RobotsStore from a .jsonl, .jsonl.gz, .jsonl.zst or .parquet file with the columns domain and content (or robots),
    a folder of these, or of HOST.txt or HOST/robots.txt. swiss-ai/fineweb-robots-txt-files-compressed is a parquet.
    ValueError if it is empty or something else; OSError if it is not there.
    """
    return RobotsStore(path)


def blocked_domains(path):
    """
    frozenset of domains from a text file (one per line, # comments), or a .jsonl(.gz/.zst) or .parquet with a column
    domain, as the published swiss-ai/robots-txt-blocked-domains-*. example.com also blocks a.b.example.com.
    """
    domains = set()
    for row in _rows(Path(path), ("domain",)):
        host = _host(row["domain"].strip()) if isinstance(row["domain"], str) else None
        if host is None or "." not in host:
            raise ValueError(f"{path}: {row['domain']!r} is not a domain; want one per line, or a column 'domain'")
        domains.add(host.removeprefix("www."))
    if not domains:
        raise ValueError(f"{path}: no domain in it; want one per line, or a column 'domain'")
    return frozenset(domains)


def _suffix(host, blocked):
    while host and host not in blocked:                                   # a.example.com, then example.com, then com
        host = host.partition(".")[2]
    return host


def _robots_rows(path):
    files = [path]
    if path.is_dir():
        for file in sorted([*path.glob("*.txt"), *path.glob("*/robots.txt")]):
            host = _host(file.stem if file.parent == path else file.parent.name)
            if host:
                yield host, file.read_bytes()
        files = sorted(file for file in path.iterdir() if file.name.endswith(STORES))
    elif not path.name.endswith(STORES):
        raise ValueError(f"{path}: not a robots store; want a folder or a file that ends in {', '.join(STORES)}")
    for file in files:
        for row in _rows(file, ("domain", "host"), ("content", "robots")):
            host, content = row.values()
            host = host_key(host if "//" in str(host) else f"//{host}")
            if host and isinstance(content, (str, bytes)):                # null: the crawler got no file
                yield host, content


def _rows(file, *columns):
    """
    Dicts with one value per entry of columns, each a tuple of names of which the first that exists is taken. file:
    .parquet, .jsonl(.gz/.zst), or text, whose lines are the only column. ValueError if damaged or without a column.
    """
    import pyarrow as pa                                                  # gzip, zstd, parquet; only a store needs it
    import pyarrow.parquet
    source = pa.OSFile(str(file))
    try:
        if file.name.endswith(".parquet"):
            table = pa.parquet.ParquetFile(source)
            names = [_present(file, keys, table.schema_arrow.names) for keys in columns]
            for batch in table.iter_batches(1024, columns=names):
                for row in batch.to_pylist():
                    yield {name: row[name] for name in names}
            return
        codec = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix)
        source = pa.CompressedInputStream(source, codec) if codec else source
        for number, line in enumerate(io.TextIOWrapper(source, encoding="utf-8", errors="replace"), 1):
            if ".jsonl" not in file.suffixes:
                line = line.partition("#")[0].strip()
                if line:
                    yield {columns[0][0]: line}
            elif line.strip():
                row = json.loads(line)
                row = row if isinstance(row, dict) else {}
                names = [_present(f"{file} line {number}", keys, row) for keys in columns]
                yield {name: row[name] for name in names}
    except (json.JSONDecodeError, pa.ArrowException, OSError) as e:
        raise ValueError(f"{file}: damaged, or not what its name says ({' '.join(str(e).split())})") from None


def _present(where, keys, names):
    for key in keys:
        if key in names:
            return key
    raise ValueError(f"{where}: no column {' or '.join(keys)}; it has {', '.join(names) or 'none'}")




def _content(path):
    with open(path, "rb") as f:
        return f.read()


def _show_url(url, robots, agents, missing, explicit):
    parts = split_url(url)
    if parts is None:
        raise ValueError(f"{url!r} is not a URL; want https://host/path")
    is_store = robots and (Path(robots).is_dir() or robots.endswith(STORES))
    store = open_robots(robots) if is_store else {parts[0]: _content(robots)} if robots else None
    content = store.get(parts[0]) if store is not None else None
    groups = (parse_robots(content) if content is not None else None) or {}
    refused = refusals(parts[1], groups, agents, explicit)
    for agent in agents:
        named = "named" if product_token(agent) in groups else "not named"
        print(f"{agent:30s} {'refused by  Disallow: ' + refused[agent] if agent in refused else 'allowed':50s} {named}")
    print(verdict(url, store, agents, missing, explicit=explicit))


def main():
    if not paths:
        raise ValueError("name one or more URLs: python -m corpus.robots https://example.com/a --robots=robots.txt")
    for url in paths:
        _show_url(url, robots, AGENTS[:-1] if explicit else AGENTS, missing, explicit)


if __name__ == "__main__":
    run(main, globals())
