"""
Opt-outs: may this document be used for training? robots.txt, applied retroactively, and the other reservations.

Apertus dropped a page of 2013-2024 if the robots.txt that its host served in January 2025 disallows the page's URL for
any of 15 agents: crawlers that collect for AI, and `*`. It kept pages of hosts whose file it did not have. That cost
8 % of the English and 4 % of the multilingual tokens (report, arXiv 2509.14233, sec. 3). RFC 9309 decides the rule:

    group = all groups that name the agent, merged; otherwise those of `*`; otherwise no rules
    rule  = the longest of the group's patterns that match path?query; allow wins ties; `*` = anything, `$` = the end
    drop  = some agent's rule is a disallow, or its preference for this path forbids training

Each other opt-out removes the document under its own name. (The EU's code of practice for general-purpose models,
copyright chapter, measure 1.3, asks for them. Directive 2019/790, art. 4(3), gives effect to machine-readable
reservations; which of these qualify is not settled, so all are honoured.)

    usage-file, usage-header   train-ai=n in Content-Usage, a line `[/path] train-ai=n` of robots.txt or an HTTP header
                               (IETF, draft-ietf-aipref-attach-05, draft-ietf-aipref-vocab-07); ai-train=no in
                               Content-Signal, in files that Cloudflare writes for its customers (contentsignals.org)
    noai, noimageai, noml      in the header X-Robots-Tag or <meta name="robots">, for all or for one of our agents
                               (DeviantArt 2022, Mojeek; `agent: directive` as in Google's reference). A page with
                               noimageai loses its text too, as in Spawning's library datadiligence
    tdm-file                   /.well-known/tdmrep.json: the first rule whose location matches (TDMRep, W3C community
                               group, final report)
    tdm-header, tdm-meta       tdm-reservation: 1 in a header or <meta>; each overrides the ones before it, so a page
                               with tdm-reservation: 0 is exempt from its host's file
    ai-txt                     /ai.txt (Spawning): robots.txt rules about kinds of files (*.html); a URL without a file
                               extension counts as HTML

Metadata in EPUB and PDF files is not read.

The command below gives the verdict of robots.txt on a page. It reads no other opt-out; prepare.py does:

$ python -m corpus.robots https://example.com/a --robots=robots.txt     # each agent's verdict and the rule behind it
$ python -m corpus.robots https://example.com/a --robots=store.jsonl.gz --missing=deny
$ python prepare.py pages.jsonl --robots=store.jsonl.gz                 # rows of domain, content
$ python prepare.py pages.jsonl --reservations=store.jsonl.gz           # rows of domain, file, content
$ python prepare.py pages.jsonl --reservations=mirror/                  # HOST/ai.txt, HOST/.well-known/tdmrep.json
"""

import sys

if not __package__:
    print("robots.py: start it from the project's root, python -m corpus.robots", file=sys.stderr)
    sys.exit(2)

import ipaddress
import json
import os
import re
import unicodedata
import zlib
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from urllib.parse import quote, unquote, unquote_to_bytes

from corpus.readers import rows_of

paths = []             # URLs to check
robots = ""            # a robots.txt, or a store: folder, .jsonl(.gz, .zst), .parquet
missing = "allow"      # a host whose robots.txt is not in the store: allow or deny
explicit = False       # count only groups that name an AI agent, not those of *

# The 15 of the published pipeline (swiss-ai/pretrain-data; the report prints 14, without FacebookBot).
AGENTS = [
    "AI2Bot", "Applebot-Extended", "Bytespider", "CCBot", "CCBot/2.0", "CCBot/1.0", "ClaudeBot",
    "cohere-training-data-crawler", "Diffbot", "FacebookBot", "Meta-ExternalAgent", "Google-Extended", "GPTBot",
    "PanguBot", "*",
]
# The opt-outs other than robots.txt: {reason: its text in the report}.
RESERVED = {
    "noai": "the page or its headers forbid AI training",
    "noimageai": "the same, for images",
    "noml": "the same, in Mojeek's word",
    "tdm-file": "reserved by the host's tdmrep.json",
    "tdm-header": "reserved by the header tdm-reservation",
    "tdm-meta": "reserved by the page's <meta> tdm-reservation",
    "usage-header": "the header Content-Usage or Content-Signal forbids training",
    "usage-file": "the same, in the host's robots.txt",
    "ai-txt": "disallowed by the host's ai.txt",
}
# What a store has of a host: a robots.txt (an empty one if the host serves none), something else under that name, or
# nothing: the host was not asked, or its file was not fetched.
FILE_STATES = ("with_file", "unparsable", "unknown")
# The files of a store of reservations, and the columns of a document that are read.
FILES = ("tdmrep.json", "ai.txt")
COLUMNS = ("headers", "x_robots_tag", "content_usage", "tdm_reservation", "meta_robots", "meta_tdm_reservation")


# ----------------------------------------------------------------------------------------------------------------------
# the decision about a document


def refusal(doc, robots=None, reservations=None):
    """
    Why a document may not be used for training, as the ledger has it ("robots:AGENT:RULE", "noai"); None if it may.

    doc: dict with url and the fields of reservation(). robots: keyword arguments of verdict(), whose agents count for
    all opt-outs; None skips robots.txt. reservations: open_reservations(path) or None. The statements of the document
    itself always count.
    """
    robots = robots or {}
    kept, reason = verdict(doc.get("url"), **robots)
    return reservation(doc, reservations, robots.get("agents", AGENTS)) if kept else reason


def verdict(url, store=None, agents=AGENTS, missing="allow", blocked=(), explicit=False):
    """
    (whether a document with this URL is kept, the reason). Reports count by the reason's part before the colon.

        allowed                    robots.txt allows this URL for every agent
        no-url                     the document has no URL, so no file of its host was consulted
        no-robots                  the store has no robots.txt of the host: whether it has opted out is unknown
        unparsable                 the host serves something else as robots.txt: a web page, prose, no user-agent
        bad-url                    the URL is malformed
        robots:AGENT:RULE          dropped: this rule disallows the URL for this agent
        usage-file:AGENT:PATH      dropped: it may be read, but not used for training
        blocked-domain:ENTRY       dropped: the host is on a list of blocked domains

    With missing='deny' no-url, no-robots, unparsable and bad-url are dropped too.

    store: open_robots(path) or anything with .get(host) -> str, bytes or None. blocked: blocked_domains(path).
    missing: 'allow' (Apertus kept these pages; RFC 9309 sec. 2.3.1.4 disallows all of a host whose file could not be
    fetched) or 'deny' (keep only URLs that a robots.txt allows); any other value is a ValueError.
    """
    if missing not in ("allow", "deny"):
        raise ValueError(f"missing={missing!r}: want 'allow' (keep pages whose robots.txt is unknown) or 'deny'")
    # a.example.com is blocked by its own name, by example.com, and by com.
    host = entry = host_key(url)
    while entry and entry not in blocked:
        entry = entry.partition(".")[2]
    if entry:
        return False, f"blocked-domain:{entry}"
    kept, reason = may_train_on(url, store.get(host) if store and host else None, agents, explicit)
    return kept and (missing == "allow" or reason == "allowed"), reason


def may_train_on(url, robots_txt, agents=AGENTS, explicit=False):
    """
    (True, reason) if this robots.txt lets every agent read the URL and train on it, else (False, reason).

    robots_txt: str or bytes, "" if the host has none; None = unknown. explicit=True counts only groups that name the
    agent: with agents=AGENTS[:-1], only opt-outs from AI. Of 4,231 files of 2019, 30 instead of 114 then disallow an
    article. Reasons: allowed, no-robots, unparsable, bad-url, no-url; robots:AGENT:RULE or usage-file:AGENT:PATH for
    the first agent that the file names, `*` if it names no other. Source: RFC 9309 sec. 2.2; report sec. 3.
    """
    if not url:
        return True, "no-url"
    host, path = split_url(url)
    if not host:
        return True, "bad-url"
    if robots_txt is None:
        return True, "no-robots"
    groups = parse_robots(robots_txt)
    if groups is None:
        return True, "unparsable"
    # A preference about training addresses AI even in a group of `*`, so explicit does not apply.
    reason = (first_refusal("robots", path, groups, agents, explicit)
              or first_refusal("usage-file", path, parse_robots(robots_txt, True), agents))
    return not reason, reason or "allowed"


def file_state(host, store):
    """One of FILE_STATES: does the store have a robots.txt of this host key?"""
    content = store.get(host) if store else None
    if content is None:
        return "unknown"
    return "unparsable" if parse_robots(content) is None else "with_file"


# ----------------------------------------------------------------------------------------------------------------------
# rules and paths

# Marks the start and end of a path, and of a pattern anchored there. No URL contains a line break: it is written %0A.
EDGE = "\n"


def first_refusal(reason, path, groups, agents, explicit=False):
    """"REASON:AGENT:RULE" of the first of refusals(); None if there is none."""
    return next((f"{reason}:{agent}:{rule}" for agent, rule in refusals(path, groups, agents, explicit)), None)


def refusals(path, groups, agents, explicit=False):
    """
    Yield (agent, rule) of the agents that may not read path (from split_url) by these groups (from parse_robots):
    agents that the file names, then `*`, then the others.
    """
    if not groups or path == "/robots.txt":
        return
    # Agents that no group names share the rules of `*`, which are therefore matched once.
    for_all = "" if explicit else disallowing(groups.get("*", ()), path)
    for agent in sorted(agents, key=lambda agent: (product_token(agent) not in groups, agent == "*")):
        name = product_token(agent)
        rule = disallowing(groups[name], path) if name in groups else for_all
        if rule:
            yield agent, rule


def disallowing(rules, path):
    """The first of the rules (from compiled) that matches path, as written, if it disallows; otherwise ""."""
    path = EDGE + path + EDGE
    for _, disallows, written, parts in rules:
        at = 0
        # The leftmost match of each part needs no backtracking: /*a*a*a*a*b takes linear time, like any pattern.
        for part in parts:
            at = path.find(part, at)
            if at < 0:
                break
            at += len(part)
        else:
            return written if disallows else ""
    return ""


def compiled(disallows, written, strict=False):
    """
    (rank, disallows, written, parts) of a rule: paths that match contain the parts, in this order.

    Rules are sorted by rank, the longest first. Of equally long ones, those that allow come first, with strict those
    that disallow.
    """
    pattern = percent(written)
    # The space marks the end of the pattern, in which percent() writes a space as %20.
    bound = f"{EDGE}{pattern} ".replace("$ ", EDGE).rstrip(" ")
    rank = (disallows != strict) - 2 * len(pattern)
    return rank, disallows, written, bound.replace("$", "%24").split("*")


# ----------------------------------------------------------------------------------------------------------------------
# URLs

# URLs may be hostile: these expressions are unambiguous, so each takes linear time.
# With a scheme, or without one before example.com/a (not mailto:x@example.com); then user:password@, [IPv6]:port or
# host:port, and the path.
_URL = re.compile(r"(?i)(?:(?:(?:https?|ftp):)?//|(?=[^/?#:@\s.]+\.[^/?#:@\s]+(?::\d*)?(?:[/?#]|$)))"
                  r"(?:[^/?#]*@)?(?:\[([^\]@/?#]*)\][:0-9]*|([^:@/?#]*)(?::[0-9]*)?)(?![^/?#])([^#]*)")
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
# A whole label that is not ASCII. Longer ones are no host, and to encode them would take quadratic time.
_FOREIGN = re.compile(r"(?<![^.])(?=[^.]{1,63}(?![^.]))[^.]*[^.\0-\x7f][^.]*")
_NOT_PLAIN = re.compile(r"(?:%[0-9A-Fa-f]{2}|[^!-~])+")


def host_key(url):
    """The host of a URL, the key of a store: lower case, no user, no port, IDN in punycode. None if it has no host."""
    return split_url(url)[0]


def split_url(url):
    """(host, path with query) of a URL, normalised so that equivalent URLs are equal. None, None if it is no URL."""
    m = isinstance(url, str) and _URL.match(url.strip())
    if not m:
        return None, None
    address, host, path = m.groups()
    if address is None:
        # The time of normalize() is quadratic in a run of accents. A longer host is none after it either.
        host = unicodedata.normalize("NFKC", unquote(host)[:2_000]).lower()
        host = host.replace("\u3002", ".").removesuffix(".")
        # Encoded label by label, because Python's "idna" codec (IDNA 2003) maps straße.de to strasse.de.
        if not host.isascii():
            host = _FOREIGN.sub(lambda label: "xn--" + label[0].encode("punycode").decode(), host)
        if not _HOST.fullmatch(host):
            return None, None
    else:
        try:
            host = ipaddress.IPv6Address(address).compressed
        except ValueError:
            return None, None
    path = percent("/" + path.removeprefix("/"))
    # Rules write * and $ as %2A and %24 if they mean the characters themselves.
    return host, path.replace("*", "%2A").replace("$", "%24")


def percent(text):
    """RFC 9309 sec. 2.2.2: %7E becomes ~, %c3 becomes %C3, and e-acute becomes %C3%A9."""
    return _NOT_PLAIN.sub(lambda m: quote(unquote_to_bytes(m[0].encode("utf-8", "replace")), safe=""), text)


# ----------------------------------------------------------------------------------------------------------------------
# robots.txt

# RFC 9309 sec. 2.5: the minimum that a crawler has to read.
MAX_BYTES = 500 * 1024
# Misspelt names and a missing colon are accepted, as by Google's parser: the intent of "Disalow /" is clear.
_LINE = re.compile(r"(?i)[\r\n][ \t]*(?:(user[ -]?agent)|(allow)|(content-usage|content-signal)|dis+al+ow|disallaw|"
                   r"diasllow)(?:[ \t]*:|[ \t])([^#\r\n]*)")
# Not a robots.txt: a web page, or text other than comments without any user-agent or sitemap line.
_OTHER = re.compile(r"(?is)\s*<|(?!.*[\r\n][ \t]*(?:user[ -]?agent|sitemap)[ \t:]).*[\r\n][ \t]*[^#\s]")
# "CCBot/2.0 (https://...)" -> "CCBot"
_TOKEN = re.compile(r"\*(?!\S)|[A-Za-z0-9_.-]+")


@lru_cache(maxsize=4096)
def product_token(agent):
    """The name of an agent in a user-agent line: lower case, no version (RFC 9309 sec. 2.2.1). None without a name."""
    m = _TOKEN.match(agent.strip())
    return m and m[0].lower()


# Cached because the documents of a host come in clusters: 4,096 files, each parsed for reading and for training.
@lru_cache(maxsize=8192)
def parse_robots(content, usage=False):
    """
    {agent token: [rule of compiled(), the longest first]} of a robots.txt, str or bytes.

    None if it is something else: a web page, or text without any user-agent or sitemap line. A byte-order mark is
    skipped; the official pipeline loses a group to it. usage: return the rules about training, not those about reading.
    """
    text = robots_text(content)
    if _OTHER.match(text):
        return None
    # Most files state no preference about training.
    if usage and "content-" not in text.lower():
        return {}
    groups, current, in_rules = {}, [], False
    for user, allow, about_training, value in _LINE.findall(text):
        value = value.strip()
        if user:
            # A user-agent line after a rule begins a new group. RFC 9309 merges all groups of an agent.
            current = [] if in_rules else current
            current.append(groups.setdefault(product_token(value), []))
        # An empty "Disallow:" disallows nothing.
        elif value and usage == bool(about_training):
            rule = preference(value) if usage else compiled(not allow, value)
            for rules in current:
                rules.append(rule)
        in_rules = not user
    for rules in groups.values():
        rules.sort(key=itemgetter(0))
    return groups


def robots_text(content):
    """The text of a robots.txt (str or bytes) after a line break: at most MAX_BYTES, without a byte-order mark."""
    raw = content.encode("utf-8", "replace") if isinstance(content, str) else content
    if len(raw) > MAX_BYTES:
        # Cut after a whole line: "/private/x" cut to "/" would disallow everything.
        raw = raw[:raw.rfind(b"\n", 0, MAX_BYTES)]
    # UTF-16 read as UTF-8 is ASCII with NULs in between.
    return "\n" + raw.decode("utf-8", "replace").replace("\0", "").lstrip("\ufeff\ufffd")


def preference(value):
    """The rule of a Content-Usage or Content-Signal line. Without a path it applies to all paths."""
    path, terms = re.match(r"(/\S*)?\s*(.*)", value).groups()
    return compiled(forbids_training(terms), path or "/", strict=True)


def forbids_training(terms):
    """
    Does a preference, in a line of robots.txt or in a header, contain train-ai=n or ai-train=no?

    terms: NAME=VALUE;PARAMETERS separated by commas; a name's last value counts (draft-ietf-aipref-vocab-07 sec. 6.5).
    The rest need not be a valid dictionary of RFC 9651: a syntax error does not withdraw an opt-out.
    """
    values = dict(re.findall(r"(?:^|,)\s*(train-ai|ai-train)(?:=([^,;\s]*))?\s*(?=[,;]|$)", terms))
    return values.get("train-ai") == "n" or values.get("ai-train") == "no"


# ----------------------------------------------------------------------------------------------------------------------
# other reservations

# Lines of statements(): Content-Usage, and TDM-Reservation.
_USAGE = re.compile(r"(?im)^content-(?:usage|signal)[ \t]*:(.*)")
_MINING = re.compile(r"(?im)^(?:((?-i:meta))-)?tdm-reservation[ \t]*:[ \t]*([01])[ \t]*$")


def reservation(doc, store=None, agents=AGENTS):
    """
    Why a document may not be used for training: a key of RESERVED, with a file's rule after a colon. None if it may.

    doc: dict with url, any of COLUMNS, and metas, [(name, content)] or {name: content}, of an HTML page. store:
    open_reservations(path), or {file: anything with .get(host) -> str, bytes or None}.
    """
    lines = statements(doc)
    directive = directive_pattern(tuple(agents)).search(lines)
    if directive:
        return directive[1].lower()
    # One preference does not withdraw the opt-out of another (draft-ietf-aipref-vocab-07 sec. 5.1).
    if any(map(forbids_training, _USAGE.findall(lines))):
        return "usage-header"
    host, path = split_url(doc.get("url"))
    tdmrep, ai_txt = (store[file].get(host) or "" if store and host else "" for file in FILES)
    return mining_reservation(lines, tdmrep, path) or (ai_txt and ai_txt_refusal(ai_txt, path, agents)) or None


@lru_cache
def directive_pattern(agents):
    """The pattern of a line of statements() with a directive for all or for one of these agents, a tuple."""
    # What is said to `*` is said to all, whichever agents count.
    names = "|".join({re.escape(product_token(agent) or "*") for agent in [*agents, "*"]})
    # "X-Robots-Tag: directive, agent: directive"
    return re.compile(rf"(?im)^(?:x-robots-tag|meta-robots|meta-(?:{names}))[ \t]*:(?:.*?,)??[ \t]*"
                      rf"(?:(?:(?:{names})[ \t]*)?:[ \t]*)?(noai|noimageai|noml)[ \t]*(?:,|$)")


def mining_reservation(lines, tdmrep, path):
    """The reason of the last statement about text and data mining that counts: tdmrep.json, header, <meta>; or None."""
    location = tdmrep and disallowing(parse_tdmrep(tdmrep), path)
    reason = f"tdm-file:{location}" if location else None
    # Each overrides the ones before it; values other than 0 and 1 change nothing.
    for where, value in _MINING.findall(lines):
        reason = f"tdm-{where or 'header'}" if value == "1" else None
    return reason


def ai_txt_refusal(ai_txt, path, agents):
    """"ai-txt:AGENT:RULE" if a host's ai.txt disallows the path for one of the agents, else None."""
    groups = parse_robots(ai_txt)
    # /a/page counts as /a/page.html.
    html = re.sub(r"^([^?]*/[^?/.]*)(\?.*)?$", r"\1.html", path)
    return first_refusal("ai-txt", path, groups, agents) or first_refusal("ai-txt", html, groups, agents)


def has_statements(doc):
    """Whether headers or <meta> came with a document, an empty list too: otherwise it may have lost its opt-outs."""
    return any(doc.get(name) not in (None, "") for name in (*COLUMNS, "metas"))


def statements(doc):
    """
    The headers and <meta> of a document, which may be columns too, as lines of text; the most specific last.

    doc["headers"]: lines of text, JSON, pairs, or a dict.
    """
    headers, metas = doc.get("headers"), doc.get("metas")
    if isinstance(headers, str):
        try:
            headers = json.loads(headers)
        except Exception:                                  # no JSON, or too deep
            headers = headers.replace("\r", "\n")
    columns = [(name.replace("_", "-"), doc[name]) for name in COLUMNS[1:] if name in doc]
    # A user's column may also be called metas: only a list or a dict is ours.
    pairs = metas.items() if isinstance(metas, dict) else metas if isinstance(metas, list) else []
    metas = [f"meta-{as_text(pair, ': ')}" for pair in pairs]
    return as_text([headers, columns, metas], "\n", "\n", ": ")


def as_text(value, separator=", ", *others):
    """
    Nested lists as text: the separator joins the parts of value, the first of the others their parts, and so on. What
    lies too deep for Python has no text.
    """
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, (list, tuple)):
        try:
            return separator.join(as_text(part, *others) for part in value)
        except RecursionError:
            return ""
    # A column of numbers with missing values holds floats: 1.0 for 1.
    return str(int(value) if value in (0, 1) else value).strip()


# Cached because the documents of a host come in clusters.
@lru_cache(maxsize=4096)
def parse_tdmrep(content):
    """[rule of compiled()] of a tdmrep.json, in the file's order; [] if it is something else."""
    try:
        rows = [row for row in json.loads(content) if isinstance(row, dict)]
    except Exception:                                      # the file may hold anything
        return []
    values = [(str(row.get("tdm-reservation")).strip(), str(row.get("location") or "/")) for row in rows]
    return [compiled(value == "1", location) for value, location in values if value in ("0", "1")]


# ----------------------------------------------------------------------------------------------------------------------
# stores of hosts' files, and lists of domains

STORES = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")


# The scheme and the port of a URL.
_PORT = re.compile(r"(?i)\s*(?:(?:(https?|ftp):)?//)?(?:[^/?#]*@)?(?:\[[^/?#]*\]|[^:/?#]*):?0*(\d*)")
PORTS = dict(http=["80"], https=["443"])


class Store(dict):
    """Host -> file, compressed in memory: 1 kB per host instead of 4 kB, 1 GB for a million hosts."""

    def __init__(self, rows):
        """
        rows: (host or URL, str or bytes, ...). "": the host serves no file. Skipped are null, a failed download, so
        that the host stays unknown, and files of a port other than the scheme's, which hold for that port alone (RFC
        9309 sec. 2.3). A host's last row counts; self.several holds the hosts whose rows differ.
        """
        self.several = set()
        for name, content, *_ in rows:
            url = next(filter(host_key, (name, f"//{name}", f"//[{name}]")), None)
            if isinstance(content, str):
                content = content.encode("utf-8", "replace")
            if not isinstance(content, bytes | None):
                raise ValueError(f"the file of {name} is a {type(content).__name__}: want a text")
            if url and content is not None and has_own_port(url):
                host, packed = host_key(url), zlib.compress(content, 1)
                if self.setdefault(host, packed) != packed:
                    self.several.add(host)
                self[host] = packed

    def get(self, host):
        """bytes or None. An unknown host is looked up with and without www., which serve the same file."""
        twin = host[4:] if host.startswith("www.") else "www." + host
        packed = super().get(host) or super().get(twin)
        return packed and zlib.decompress(packed)


def has_own_port(url):
    """Whether a URL names no port, or that of its scheme; either if it has no scheme."""
    scheme, port = _PORT.match(url).groups()
    return not port or port in PORTS.get((scheme or "").lower(), ["80", "443"])


def open_robots(path):
    """
    A Store from a .jsonl, .jsonl.gz, .jsonl.zst or .parquet file with the columns domain and content (or robots), a
    folder of these, or of HOST.txt or HOST/robots.txt. swiss-ai/fineweb-robots-txt-files-compressed is a parquet.
    ValueError if it is empty, something else or not there.
    """
    store = Store(hosts_files(path, ["*.txt", "*/robots.txt"], ("content", "robots"), wrong=["file"]))
    if not store:
        raise ValueError(f"{path}: no robots.txt in it; want {', '.join(STORES)} with rows of domain, content, "
                         "or a folder of HOST.txt, HOST/robots.txt")
    return store


def open_reservations(path):
    """
    {file: Store} from a .jsonl(.gz, .zst) or .parquet of domain, file, content, or a folder of these, or of HOST/ai.txt
    and HOST/.well-known/tdmrep.json. ValueError if it is empty or something else.
    """
    rows = list(hosts_files(path, ["*/ai.txt", "*/.well-known/tdmrep.json"], ("content",), ("file",)))
    others = {name for *_, name in rows if not str(name).endswith(FILES)}
    if others or not rows:
        raise ValueError(
            f"{path}: want domain, content and file, {' or '.join(FILES)}; found {others or 'no opt-outs'}")
    return {file: Store(row for row in rows if row[2].endswith(file)) for file in FILES}


def hosts_files(path, patterns, *columns, wrong=()):
    """
    Yield (host, content, file name or other columns): the rows of a file of STORES; for a folder the files that match
    one of the patterns, and the rows of its STORES. Nothing for another kind of file.

    wrong: as in rows_of(). ValueError if there is no such file or folder.
    """
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file or folder")
    path = Path(path)
    files = [path] if path.is_file() else sorted(file for name in [*patterns, *STORES] for file in path.glob(name))
    for file in files:
        if any(map(file.match, STORES)):
            yield from rows_of(str(file), ("domain", "host"), *columns, errors="replace", wrong=wrong)
        elif file != path:
            yield file.relative_to(path).parts[0].removesuffix(".txt"), file.read_bytes(), file.name


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


# ----------------------------------------------------------------------------------------------------------------------
# the command


def main():
    """Print the verdict of robots.txt on each URL."""
    if not paths:
        raise ValueError("name one or more URLs: python -m corpus.robots https://example.com/a --robots=robots.txt")
    for url in paths:
        host = host_key(url)
        if not host:
            raise ValueError(f"{url!r} is not a URL; want https://host/path")
        if robots.endswith(".txt"):
            store = Store([(host, Path(robots).read_bytes())])
        else:
            store = open_robots(robots) if robots else Store([])
        print_verdict(url, store)


def print_verdict(url, store):
    """Print whether each agent may read a URL by its host's robots.txt, and by which rule; then the verdict."""
    host, path = split_url(url)
    agents = AGENTS[:-1] if explicit else AGENTS
    kept, reason = verdict(url, store, agents, missing, explicit=explicit)
    if file_state(host, store) == "unknown":
        why = f"{robots} has no robots.txt of {host}" if robots else "no robots.txt was named (--robots)"
        print(f"unknown: {why}; prepare.py --missing={missing} {'keeps' if kept else 'removes'} it")
        return
    if host in store.several:
        print(f"{robots} has different files of {host}: the last one counts")
    refused = dict(refusals(path, parse_robots(store.get(host)), agents, explicit))
    for agent in agents:
        outcome = f"refused by  Disallow: {refused[agent]}" if agent in refused else "allowed"
        print(f"{agent:30s} {outcome}")
    print(f"{'kept' if kept else 'drop'}:{reason}")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
