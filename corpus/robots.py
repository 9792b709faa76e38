"""
Opt-outs: may this document be trained on? robots.txt, retroactively.

Apertus dropped a page of 2013-2024 if the robots.txt that its host served in January 2025 refuses the page's URL to any
of 15 agents: crawlers that collect for AI, and `*`. A host without a file has not opted out. That cost 8 % of the
English and 4 % of the multilingual tokens (report, arXiv 2509.14233, sec. 3). Which rule applies is RFC 9309:

    group = all groups that name the agent, merged; if there are none, those of `*`; if none of those either, no rules
    rule  = of the group's patterns that match path?query, the longest; allow wins ties; `*` = anything, `$` = the end
    drop  = some agent's rule is a disallow, or its preference for this path is that no model is trained on it

Preferences are lines of the same file, which say what may be done with a page that may be read:

    Content-Usage: [/path] train-ai=n       IETF, draft-ietf-aipref-attach-05 sec. 3, draft-ietf-aipref-vocab-07
    Content-Signal: [/path] ai-train=no     contentsignals.org, in the files that Cloudflare writes for its customers

$ python -m corpus.robots https://example.com/a --robots=robots.txt     # who may read it, and the rule that says so
$ python -m corpus.robots https://example.com/a --robots=store.jsonl.gz --missing=deny
"""

import sys

if __name__ == "__main__" and not __package__:
    print("robots.py: start it from the project's root, python -m corpus.robots", file=sys.stderr)
    sys.exit(2)

import ipaddress
import re
import string
import unicodedata
import zlib
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from urllib.parse import quote, unquote

from tqdm import tqdm

from engine.readers import rows_of

paths = []             # URLs
robots = ""            # a robots.txt, or a store: folder, .jsonl(.gz, .zst), .parquet
missing = "allow"      # what a host without robots.txt means: allow or deny
explicit = False       # only groups that name an AI agent count, not those of *

# The 15 of the published pipeline (swiss-ai/pretrain-data; the report prints 14, without FacebookBot).
AGENTS = ("AI2Bot", "Applebot-Extended", "Bytespider", "CCBot", "CCBot/2.0", "CCBot/1.0", "ClaudeBot",
          "cohere-training-data-crawler", "Diffbot", "FacebookBot", "Meta-ExternalAgent", "Google-Extended", "GPTBot",
          "PanguBot", "*")


# ----------------------------------------------------------------------------------------------------------------------
# the verdict


def verdict(url, store=None, agents=AGENTS, missing="allow", blocked=frozenset(), explicit=False):
    """
    The outcome of a document by its URL. kept + drop = all that came in; an audit counts by the first two words.

        kept:allowed                    the host's robots.txt lets every agent read this URL
        kept:no-robots                  no robots.txt is known for the host: it has not opted out
        kept:unparsable                 what the host serves as robots.txt is none (a web page, prose, rules for nobody)
        kept:bad-url                    the document's URL is not one, so that no host can be asked
        kept:no-url                     the document has no URL (local text)
        drop:robots:AGENT:RULE          refused to this agent by this rule
        drop:usage-file:AGENT:PATH      it may be read, but no model trained on it
        drop:blocked-domain:ENTRY       the host is on a list of blocked domains
        drop:no-robots, drop:unparsable, drop:bad-url           the same, with missing='deny'

    store: open_robots(path) or anything with .get(host) -> str, bytes or None. blocked: blocked_domains(path). missing:
    'allow' (Apertus: silence is no opt-out) or 'deny' (only what a robots.txt allows). Text without a URL is kept.
    ValueError for any other missing.
    """
    if missing not in ("allow", "deny"):
        raise ValueError(f"missing={missing!r}: want 'allow' (no file = no opt-out) or 'deny' (no file = no consent)")
    host = host_key(url)
    entry = _blocking(host, blocked)
    if entry:
        return f"drop:blocked-domain:{entry}"
    robots_txt = store.get(host) if store and host else None
    allowed, reason = may_train_on(url, robots_txt, agents, explicit)
    if missing == "deny" and reason in ("no-robots", "unparsable", "bad-url"):
        allowed = False
    return ("kept:" if allowed else "drop:") + reason


def may_train_on(url, robots_txt, agents=AGENTS, explicit=False):
    """
    (True, reason) if every agent may read url by this robots.txt and train on it, else (False, "robots:AGENT:RULE") or
    (False, "usage-file:AGENT:PATH") for the first agent that the file names, `*` if it names none that it refuses.

    robots_txt: str or bytes; None = the host has none. explicit=True asks only groups that name the agent: with
    agents=AGENTS[:-1] these are the opt-outs from AI alone: of 4,231 real files of 2019, 30 instead of 114 refuse an
    article. Leaving out `*` without it changed none of them: by RFC 9309 an agent that is not named obeys `*`.
    Reasons for True: allowed, no-robots, unparsable, bad-url, no-url. Source: RFC 9309 sec. 2.2; report sec. 3.
    """
    if not url:
        return True, "no-url"
    parts = split_url(url)
    if parts is None:
        return True, "bad-url"
    if robots_txt is None:
        return True, "no-robots"
    groups = parse_robots(robots_txt)
    if groups is None:
        return True, "unparsable"
    refused, kind = refusals(parts[1], groups, agents, explicit), "robots"
    if not refused:
        # What is said about training is meant for AI, also where it is said to `*`: explicit changes nothing.
        groups = parse_robots(robots_txt, usage=True)
        refused, kind = groups and refusals(parts[1], groups, agents), "usage-file"
    if not refused:
        return True, "allowed"
    agent = named_first(refused, groups)
    return False, f"{kind}:{agent}:{refused[agent]}"


def named_first(refused, groups):
    """The first of the refused agents that the file names, `*` if it names none of them."""
    named = [agent for agent in refused if product_token(agent) in groups]
    # The first that is not `*`, which is always named where it refuses.
    return min(named or refused, key="*".__eq__)


def refusals(path, groups, agents=AGENTS, explicit=False):
    """{agent: rule} of the agents that may not read path (from split_url) by these groups (from parse_robots)."""
    if path == "/robots.txt":
        return {}
    # Agents that no group names share the rules of `*`, which are therefore matched once.
    for_all = _decision(() if explicit else groups.get("*", ()), path)
    refused = {}
    for agent in agents:
        token = product_token(agent)
        allow, rule = _decision(groups[token], path) if token in groups else for_all
        if not allow:
            refused[agent] = rule
    return refused


def _decision(rules, path):
    """(allow, rule as written) of the first rule that matches: parse_robots has put the longest in front."""
    for rule in rules:
        if matching(path, rule):
            _, allow, written, *_ = rule
            return allow, written
    return True, None


def matching(path, rule):
    """Does a rule, one of compiled(), match a path from split_url?"""
    *_, start, rest, anchored = rule
    return path.startswith(start) and _goes_on(path, len(start), rest, anchored)


def _goes_on(path, at, rest, anchored):
    """
    Whether the parts between the `*` follow in path from position at on, the last at its end if the rule is anchored.

    The leftmost match of each part in turn needs no backtracking, so /*a*a*a*a*b costs what any rule costs.
    """
    for part in rest:
        at = path.find(part, at)
        if at < 0:
            return False
        at += len(part)
    if not anchored:
        return True
    return path.endswith(rest[-1]) if rest else at == len(path)


# ----------------------------------------------------------------------------------------------------------------------
# URLs

# URLs may be hostile: none of these expressions can match a long text in two ways, so each takes linear time.
# With a scheme, or none before example.com/a; not mailto:x@example.com.
_URL = re.compile(r"(?:(?:(?:https?|ftp):)?//|(?=[^/?#:@\s.]+\.[^/?#:@\s]+(?::\d*)?(?:[/?#]|$)))"
                  r"([^/?#]*)([^#]*)", re.I)
# user:password@[IPv6]:port or user:password@host:port
_AUTHORITY = re.compile(r"(?:.*@)?(?:\[([^\]@]*)\][:0-9]*|([^:@]*)(?::[0-9]*)?)", re.S)
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
# A whole label that is not ASCII.
_FOREIGN = re.compile(r"(?<![^.])[^.]*[^.\0-\x7f][^.]*")
_NOT_PLAIN = re.compile(r"%[0-9A-Fa-f]{2}|[^!-~]")
_UNRESERVED = frozenset(string.ascii_letters + string.digits + "-._~")


def split_url(url):
    """(host, path with query) of a URL, normalised so that equal means same; without fragment. None if it is no URL."""
    return _split_url(url) if isinstance(url, str) else None


# Cached because a document's URL is asked for several times in a row.
@lru_cache(maxsize=4096)
def _split_url(url):
    m = _URL.match(url.strip())
    host = m and _host(m[1])
    if not host:
        return None
    path = _percent("/" + m[2].removeprefix("/"))
    # A rule has * and $ escaped where it means the characters themselves.
    return host, path.replace("*", "%2A").replace("$", "%24")


def host_key(url):
    """The host of a URL, key of a robots store: lower case, no user, no port, IDN in punycode. None if no URL."""
    parts = split_url(url)
    return parts and parts[0]


def _host(authority):
    """The host of what stands between // and the path, normalised; None if there is none."""
    m = _AUTHORITY.fullmatch(authority)
    if not m:
        return None
    address, host = m.groups()
    if host is None:
        try:
            return ipaddress.IPv6Address(address).compressed
        except ValueError:
            return None
    host = unicodedata.normalize("NFKC", unquote(host)).lower()
    host = host.replace("\u3002", ".").removesuffix(".")
    # Punycode label by label: Python's "idna" codec is that of 2003, which sends straße.de to strasse.de.
    if not host.isascii():
        host = _FOREIGN.sub(lambda label: "xn--" + label[0].encode("punycode").decode(), host)
    return host if _HOST.fullmatch(host) else None


def _percent(s):
    """RFC 9309 sec. 2.2.2: %7E and ~ are the same, %c3 and %C3, and e-acute and %C3%A9."""
    return _NOT_PLAIN.sub(_escape, s)


def _escape(m):
    """A match of _NOT_PLAIN, a character or an escape, in the one form that both have."""
    if len(m[0]) == 1:
        return quote(m[0], errors="replace")
    c = chr(int(m[0][1:], 16))
    return c if c in _UNRESERVED else m[0].upper()


# ----------------------------------------------------------------------------------------------------------------------
# robots.txt

# RFC 9309 sec. 2.5: the least that a crawler has to read.
MAX_BYTES = 500 * 1024
# Google's parser reads misspelt names and a missing colon too: a site that writes "Disalow /" has made itself clear.
_KEYS = "user[ -]?agent|allow|dis+al+ow|disallaw|diasllow|sitemap|content-usage|content-signal"
_LINE = re.compile(rf"^[ \t]*({_KEYS})(?:[ \t]*:|[ \t])([^#\n]*)", re.I | re.M)
# "CCBot/2.0 (https://...)" -> "CCBot"
_TOKEN = re.compile(r"\*(?!\S)|[A-Za-z0-9_.-]+")


@lru_cache(maxsize=4096)
def product_token(agent):
    """What names an agent in a user-agent line: lower case, no version (RFC 9309 sec. 2.2.1). None if nothing does."""
    m = _TOKEN.match(agent.strip())
    return m and m[0].lower()


# Cached because the documents of a host come in clusters; 4,096 of them, each asked for its preferences too.
@lru_cache(maxsize=8192)
def parse_robots(content, usage=False):
    """
    {agent token: [(length, allow, rule as written, its start, parts behind each *, whether the last must be the end)]},
    the longest rule first.

    content: str or bytes. None if it is no robots.txt: a web page, or lines but no user-agent and no sitemap line.
    Bytes that are no UTF-8 are replaced. A byte-order mark is skipped; the official pipeline loses a group to it.
    usage: instead of what may be read, what may be trained on; {} where no line is about that.
    """
    text = _text(content)
    if usage and "content-" not in text.lower():
        return {}
    if text.lstrip().startswith("<"):
        return None
    groups, names, in_rules, known = {}, [], False, False
    for key, value in _LINE.findall(text):
        # The first letter tells user-agent, sitemap, allow and disallow apart.
        kind, value = key[0].lower(), value.strip()
        known = known or kind in "us"
        if kind == "u":
            # A user-agent line after a rule begins a new group.
            if in_rules:
                names, in_rules = [], False
            names.append(product_token(value))
            # An agent that was named before goes on with its group: RFC 9309 merges them.
            groups.setdefault(names[-1], [])
        elif kind in "adc":
            in_rules = True
            # An empty "Disallow:" refuses nothing.
            if not value or usage != (kind == "c"):
                continue
            rule = usage_rule(value) if usage else (kind == "a", value)
            for name in names:
                groups[name].append(rule)
    if not known and re.search(r"^[ \t]*[^#\s]", text, re.M):
        return None
    groups = {name: compiled(rules) for name, rules in groups.items()}
    if usage:
        # Of two preferences for the same path the one that refuses counts, where for reading it is the one that allows.
        for rules in groups.values():
            rules.sort(key=lambda rule: (-rule[0], rule[1]))
    return groups


def usage_rule(value):
    """(may one train, path) of a Content-Usage or Content-Signal line; no path is that of all."""
    path, *said = (value if value.startswith("/") else f"/ {value}").split(None, 1)
    return not forbids_training("".join(said)), path


def forbids_training(said):
    """
    Does a preference, in a line of robots.txt or in a header, say train-ai=n or ai-train=no?

    said: NAME=VALUE;PARAMETERS with commas between, the last of a name counts (draft-ietf-aipref-vocab-07 sec. 6.5); or
    None. That the rest is no dictionary of RFC 9651 is not looked for: a comma too many takes no refusal back.
    """
    values = {}
    for member in str(said or "").split(","):
        name, _, value = member.partition(";")[0].strip().partition("=")
        values[name] = value
    return values.get("train-ai") == "n" or values.get("ai-train") == "no"


def _text(content):
    """The first MAX_BYTES of a robots.txt as str, with \\n between the lines."""
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    lines = raw[:MAX_BYTES].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    # Cut behind a whole line: "/private/x" cut to "/" would refuse everything.
    if len(raw) > MAX_BYTES:
        lines = lines.rpartition(b"\n")[0] or lines
    # UTF-16 that is read as UTF-8 is ASCII with NULs in between.
    text = lines.decode("utf-8", "replace").replace("\0", "")
    return text.lstrip("\ufeff\ufffd")


def compiled(rules):
    """[(allow, rule as written)] -> the tuples of parse_robots, the longest first, of equally long ones allow first."""
    tuples = []
    for allow, written in rules:
        pattern = _percent(written)
        start, *rest = pattern.removesuffix("$").replace("$", "%24").split("*")
        tuples.append((len(pattern), allow, written, start, rest, pattern.endswith("$")))
    tuples.sort(key=itemgetter(0, 1), reverse=True)
    return tuples


# ----------------------------------------------------------------------------------------------------------------------
# stores of robots.txt and lists of domains

STORES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_unpacked = lru_cache(maxsize=4096)(zlib.decompress)


class RobotsStore:
    """Host -> robots.txt. Contents lie deflated in memory, equal ones once: 1 kB a host (of 4 kB), 1 GB a million."""

    def __init__(self, rows):
        """rows: (host, str or bytes); of two for a host the later one counts."""
        self._files, once = {}, {}
        for host, content in rows:
            content = content.encode("utf-8", "replace") if isinstance(content, str) else content
            packed = zlib.compress(content, 1)
            self._files[host] = once.setdefault(packed, packed)

    def __len__(self):
        return len(self._files)

    def get(self, host):
        """bytes or None. A host that is not known is tried with and without www., which serve the same file."""
        twin = host[4:] if host.startswith("www.") else "www." + host
        packed = self._files.get(host) or self._files.get(twin)
        return packed and _unpacked(packed)


def open_robots(path):
    """
    A RobotsStore from a .jsonl, .jsonl.gz, .jsonl.zst or .parquet file with the columns domain and content (or robots),
    a folder of these, or of HOST.txt or HOST/robots.txt. swiss-ai/fineweb-robots-txt-files-compressed is a parquet.
    ValueError if it is empty or something else; OSError if it is not there.
    """
    path = Path(path)
    rows = tqdm(_robots_rows(path), desc=f"robots from {path.name}", unit=" hosts", disable=None, leave=False)
    store = RobotsStore(rows)
    if not len(store):
        raise ValueError(f"{path}: no robots.txt in it; want rows of domain, content, or HOST.txt, HOST/robots.txt")
    return store


def blocked_domains(path):
    """
    frozenset of domains from a text file (one per line, # comments), or a .jsonl(.gz/.zst) or .parquet with a column
    domain, as the published swiss-ai/robots-txt-blocked-domains-*. example.com also blocks a.b.example.com.
    ValueError if it holds none, or something else.
    """
    domains = set()
    for domain, in rows_of(str(path), ("domain",), comments=True):
        host = _host(domain.strip()) if isinstance(domain, str) else None
        if host is None or "." not in host:
            raise ValueError(f"{path}: {domain!r} is not a domain; want one per line, or a column 'domain'")
        domains.add(host.removeprefix("www."))
    if not domains:
        raise ValueError(f"{path}: no domain in it; want one per line, or a column 'domain'")
    return frozenset(domains)


def _blocking(host, blocked):
    """The entry that blocks a host: of a.example.com itself, then example.com, then com; nothing if none does."""
    while host and host not in blocked:
        host = host.partition(".")[2]
    return host


def _robots_rows(path):
    """Yield (host, content) from whatever open_robots takes."""
    if path.is_dir():
        for file in sorted([*path.glob("*.txt"), *path.glob("*/robots.txt")]):
            host = _host(file.stem if file.parent == path else file.parent.name)
            if host:
                yield host, file.read_bytes()
    yield from store_rows(path, ("content", "robots"))


def store_rows(path, *columns):
    """
    Yield (host, values of these columns) of each row of a file of STORES, or of all of these in a folder. The last one
    is a file's content: rows in which it is null, because the crawler got none, are passed over.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(STORES))
    elif not path.name.endswith(STORES):
        raise ValueError(f"{path}: not a store of hosts' files; want a folder or a file that ends in "
                         f"{', '.join(STORES)}")
    for file in files:
        for host, *values in rows_of(str(file), ("domain", "host"), *columns, errors="replace"):
            host = host_key(host if "//" in str(host) else f"//{host}")
            if host and isinstance(values[-1], (str, bytes)):
                yield host, *values


# ----------------------------------------------------------------------------------------------------------------------
# the command


def show(url):
    """Print for each agent whether it may read a URL, by which rule, and whether a group names it; then the verdict."""
    parts = split_url(url)
    if parts is None:
        raise ValueError(f"{url!r} is not a URL; want https://host/path")
    host, path = parts
    store = {}
    if Path(robots).is_dir() or robots.endswith(STORES):
        store = open_robots(robots)
    elif robots:
        with open(robots, "rb") as f:
            store = {host: f.read()}
    agents = AGENTS[:-1] if explicit else AGENTS
    groups = parse_robots(store.get(host) or b"") or {}
    refused = refusals(path, groups, agents, explicit)
    for agent in agents:
        says = f"refused by  Disallow: {refused[agent]}" if agent in refused else "allowed"
        named = "named" if product_token(agent) in groups else "not named"
        print(f"{agent:30s} {says:50s} {named}")
    print(verdict(url, store, agents, missing, explicit=explicit))


def main():
    if not paths:
        raise ValueError("name one or more URLs: python -m corpus.robots https://example.com/a --robots=robots.txt")
    for url in paths:
        show(url)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
