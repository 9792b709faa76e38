"""
Opt-outs and personal data: may this document be trained on, and what must be removed from it.

robots.txt, retroactively. Apertus dropped a page of 2013-2024 if the robots.txt that its host served in January 2025
refuses the page's URL to any of 15 agents: crawlers that collect for AI, and `*`. A host without a file has not opted
out. That cost 8 % of the English and 4 % of the multilingual tokens (report sec. 3). Which rule applies is RFC 9309:

    group = all groups that name the agent, merged; if there are none, those of `*`; if none of those either, no rules
    rule  = of the group's patterns that match path?query, the longest; allow wins ties; `*` = anything, `$` = the end
    drop  = some agent's rule is a disallow

Personal data. E-mail, IP and IBAN become <email-pii>, <ip-pii>, <iban-pii>: three words of the Apertus vocabulary (37,
38, 36). Every search starts at what is rare in prose (@, dots between digits, two colons, two digits) and looks at a
bounded window around it, so the time is linear in the text, whatever the text is.

$ python -m corpus.robots https://example.com/a --robots=robots.txt     # who may read it, and the rule that says so
$ python -m corpus.robots https://example.com/a --robots=store.jsonl.gz --missing=deny
$ python -m corpus.robots page.txt docs.jsonl                           # what would be scrubbed from them
$ echo "mail me: a@b.org" | python -m corpus.robots --scrub             # the text without it
"""

import sys

if not __package__:
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


TAGS = {"email": "<email-pii>", "ip": "<ip-pii>", "iban": "<iban-pii>"}

_LATIN = "".join(map(chr, [*range(0xC0, 0xD7), *range(0xD8, 0xF7), *range(0xF8, 0x250)]))   # müller@ is one name
_ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_WORD = frozenset(_ALNUM + "_")                                           # not isalnum(): Chinese has no spaces
_HEX = "0123456789abcdefABCDEF"
_TLD = rf"(?:xn--[A-Za-z0-9-]{{2,59}}|[A-Za-z{_LATIN}]{{2,24}})"
_DOMAIN = re.compile(rf"@(?:[A-Za-z0-9{_LATIN}-]{{1,63}}\.){{1,9}}{_TLD}")
_QUAD = re.compile(r"\.\d{1,3}\.\d{1,3}\.\d{1,3}", re.A)
# Two colons inside of an address, or 2001:: at its end. "Example::" and std::abs, of which code is full, are not looked at any closer.
_COLONS = re.compile(r":(?:[0-9A-Fa-f]{1,4}:(?=[0-9A-Fa-f:.])|:(?<![G-Zg-z_]::)(?:(?=[0-9A-Fa-f:.])|(?<=[0-9A-Fa-f]{4}::)))")
_CHECK_DIGITS = re.compile(r"\d\d(?<=[A-Za-z]{2}\d\d)", re.A)             # 140 MB/s; letters first: 45 MB/s
_VERSION = re.compile(r"\b(?:v|ver|version[a-z]*|release|rev|build|firmware)\W{0,3}\Z", re.I)
_BASE36 = str.maketrans({c: str(int(c, 36)) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"})
_SEPARATORS = frozenset(" -\u00a0\u202f")

# Length by country (SWIFT IBAN registry): where a number ends cannot be told from the text.
IBAN_LENGTH = {entry[:2]: int(entry[2:]) for entry in """
    AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20 EG29 ES24
    FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32
    LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24
    RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30""".split()}


def scrub_pii(text):
    """
    (text with TAGS in place of personal data, {"email": n, "ip": n, "iban": n}). str of any length; linear time.

    Private, loopback and documentation addresses go too, as in the official pipeline; :: and ::1 stay. Section numbers
    of four parts read like addresses and go as well: "Ziffer 6.3.1.1", 167 times in 6 MB of German law.
    """
    pieces, counts, at = [], dict.fromkeys(TAGS, 0), 0
    for start, end, kind in find_pii(text):
        pieces += text[at:start], TAGS[kind]
        counts[kind] += 1
        at = end
    return "".join([*pieces, text[at:]]) if pieces else text, counts


def find_pii(text):
    """[(start, end, kind), ...] in order and without overlap: the one that starts first, then the longer."""
    spans, last = [], 0
    found = [*_emails(text), *_ipv4s(text), *_ipv6s(text), *_ibans(text)]
    for start, end, kind in sorted(found, key=lambda span: (span[0], -span[1])):
        if start >= last:
            spans.append((start, end, kind))
            last = end
    return spans


def _run(text, i, chars):
    """(start, end) of the run of chars around position i, at most 64 to each side."""
    left, right = text[max(0, i - 64):i], text[i:i + 64]
    return i - len(left) + len(left.rstrip(chars)), i + len(right) - len(right.lstrip(chars))


def _emails(text):
    for m in _DOMAIN.finditer(text):
        start, _ = _run(text, m.start(), _ALNUM + _LATIN + "._%+-")       # RFC 5321: a local part has at most 64
        start = m.start() - len(text[start:m.start()].lstrip("."))
        if start < m.start():                                             # @name.com is a handle, not an address
            yield start, m.end(), "email"


def _ipv4s(text):
    at = 0
    while m := _QUAD.search(text, at):
        start, end = _run(text, m.start(), _ALNUM + "_.")                 # a whole word: not v1.2.3.4, 1.2.3.4.5
        word = text[start:end].strip(".")
        start = text.index(word, start)
        if _is_address(ipaddress.IPv4Address, word) and not _VERSION.search(text[max(0, start - 16):start]):
            yield start, start + len(word), "ip"
        at = max(end, m.end())


def _ipv6s(text):
    at = 0
    while m := _COLONS.search(text, at):
        start, end = _run(text, m.start(), _HEX + ":.")
        at = max(end, m.end())
        lone = text[start] == ":" != text[start + 1:start + 2]            # "IP:2001:db8::1"
        if not lone and text[max(0, start - 1):start] in _WORD or text[end:end + 1] in _WORD:
            continue                                                      # std::vector, a::b
        word = text[start + lone:end].rstrip(".")
        word = word[:-1] if word.endswith(":") and not word.endswith("::") else word
        # a[::2] and 12::30 read as addresses too: want a group of four digits, or more than two colons.
        plausible = word.count(":") > 2 or any(len(group) == 4 for group in word.split(":"))
        if plausible and any(c.isdigit() for c in word) and _is_address(ipaddress.IPv6Address, word):
            yield start + lone, start + lone + len(word), "ip"


def _is_address(kind, word):
    try:
        kind(word)
    except ValueError:
        return False
    return True


def _ibans(text):
    for m in _CHECK_DIGITS.finditer(text):
        start = m.start() - 2
        length = IBAN_LENGTH.get(text[start:start + 2].upper())
        if length is None or text[max(0, start - 1):start] in _WORD:
            continue
        for width in (length, length + (length - 1) // 4):                # compact, or groups of four
            number = text[start:start + width]
            if width > length and set(number[4::5]) <= _SEPARATORS:
                number = "".join(number[i:i + 4] for i in range(0, width, 5))
            if len(number) == length and _mod97(number) == 1 and text[start + width:start + width + 1] not in _WORD:
                yield start, start + width, "iban"
                break


def _mod97(number):
    """ISO 13616: first four to the end, A = 10 ... Z = 35, modulo 97: 1 if valid. 0 if not letters and digits."""
    if not (number.isascii() and number.isalnum()):
        return 0
    return int((number[4:] + number[:4]).upper().translate(_BASE36)) % 97


def _show_url(url, robots, agents, missing, explicit):
    parts = split_url(url)
    if parts is None:
        raise ValueError(f"{url!r} is not a URL; want https://host/path")
    is_store = robots and (Path(robots).is_dir() or robots.endswith(STORES))
    store = open_robots(robots) if is_store else {parts[0]: Path(robots).read_bytes()} if robots else None
    content = store.get(parts[0]) if store is not None else None
    groups = (parse_robots(content) if content is not None else None) or {}
    refused = refusals(parts[1], groups, agents, explicit)
    for agent in agents:
        named = "named" if product_token(agent) in groups else "not named"
        print(f"{agent:30s} {'refused by  Disallow: ' + refused[agent] if agent in refused else 'allowed':50s} {named}")
    print(verdict(url, store, agents, missing, explicit=explicit))


def _show_file(path):
    total = dict.fromkeys(TAGS, 0)
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            for start, end, kind in find_pii(line):
                total[kind] += 1
                print(f"{path}:{number}:{start + 1}: {TAGS[kind]:12s} {line[start:end]}")
    print(f"{path}: " + ", ".join(f"{n} {kind}" for kind, n in total.items()))


def main():
    import argparse
    parser = argparse.ArgumentParser(description="May one train on a URL; what would be scrubbed from a file.")
    parser.add_argument("inputs", nargs="*", help="URLs (with --robots) and text files")
    parser.add_argument("--robots", help="a robots.txt, or a store: folder, .jsonl(.gz/.zst), .parquet")
    parser.add_argument("--missing", default="allow", help="what a host without robots.txt means: allow or deny")
    parser.add_argument("--agents_no_star", action="store_true", help="only groups that name an AI agent")
    parser.add_argument("--scrub", action="store_true", help="standard input to standard output, without personal data")
    args = parser.parse_args()
    agents = AGENTS[:-1] if args.agents_no_star else AGENTS
    try:
        if args.scrub:
            sys.stdin.reconfigure(errors="replace")
            for line in sys.stdin:
                sys.stdout.write(scrub_pii(line)[0])
        for item in args.inputs:
            if "://" in item:
                _show_url(item, args.robots, agents, args.missing, args.agents_no_star)
            else:
                _show_file(item)
        if not args.scrub and not args.inputs:
            parser.print_help()
    except (ValueError, OSError) as e:
        parser.exit(2, f"robots.py: {e}\n")


if __name__ == "__main__":
    main()
