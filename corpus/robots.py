"""
robots.txt, applied retroactively: may this URL be used for training?

Apertus dropped a page of 2013-2024 if the robots.txt that its host served in January 2025 disallows the page's URL for
any of 15 agents: 12 crawlers that collect for AI, two versions of CCBot, and `*`. It kept pages of hosts whose file it
did not have. That cost 8 % of the English and 4 % of the multilingual tokens (report, arXiv 2509.14233, sec. 3).
RFC 9309 decides the rule:

    group = all groups that name the agent, merged; otherwise those of `*`; otherwise no rules
    rule  = the longest of the group's patterns that match path?query; allow wins ties; `*` = anything, `$` = the end
    drop  = some agent's rule is a disallow, or its preference for this path forbids training

All signals; this file reads the first two and corpus/reservations.py the others. (The EU's code of practice for
general-purpose models, copyright chapter, measure 1.3, asks for them. Directive 2019/790, art. 4(3), gives effect to
machine-readable reservations; which of these qualify is not settled, so all are honoured.)

    signal                 state                where it stands         what we read                  what we do not
    Disallow               RFC 9309 (2022)      robots.txt of the port  groups of our agents and *,   behind 500 KiB
                                                                        bans before any User-agent    (counted)
    Content-Usage,         drafts: IETF attach  robots.txt, HTTP        n for train-ai, ai-train,     search, ai-use,
    Content-Signal,        -05, vocab -08;      header                  and for tdm, ai, genai,       ai-input
    Usage-Pref             Cloudflare 2025                              train-genai, bots, all
    X-Robots-Tag,          DeviantArt 2022,     HTTP header, <meta>     noai, noimageai, noml, for    noindex, none
    <meta name=robots>     Mojeek                                       all or one of our agents
    TDMRep                 W3C community group  tdmrep.json, header,    tdm-reservation; <meta>       ODRL policies;
                           (2024)               <meta>                  overrides header, header      EPUB, PDF
                                                                        the file; of 1 and 0 in one
                                                                        of these 1 counts
    ai.txt                 Spawning (2023)      /ai.txt                 groups, as in robots.txt      -
    RSL                    1.0 (Dec. 2025)      License: of robots.txt, prohibits usage of ai-train,  permits, payment
                                                Link, <link>; .xml      train-ai, ai-all, all         (counted); feeds
    -                      -                    -                       -                             network blocks,
                                                                                                      prose, terms

A signal that is almost in its syntax counts, where the will of its writer is plain: upper case, "train_ai = no", "NO
AI", several agents in a line or in quotes, a ban before the first User-agent. Not read as one are `Disallow: "/"`,
`Disallow: all`, `User-agent: all`, two rules in one line, "user-agent=GPTBot", a list with dashes, rules inside of
HTML, "noai: true", names of agents with * in them. What cannot be read is counted (unread, unparsable, unknown), never
taken for consent, and removed with --missing=deny.

Any refusal counts, even next to a permission, except in four orders that standards set: an agent's own group and the
longest rule of it decide (RFC 9309; the same for paths of Content-Usage); of a label that one statement repeats, the
last value counts (RFC 9651); the first rule of tdmrep.json that matches decides; a page's own tdm-reservation overrides
that file, and its <meta> its header (TDMRep).

The command below gives the verdict of robots.txt on a page. It reads no other opt-out; prepare.py does:

$ python -m corpus.robots https://example.com/a --robots=robots.txt     # each agent's verdict and the rule behind it
$ python -m corpus.robots https://example.com/a --robots=store.jsonl.gz --missing=deny
$ python prepare.py pages.jsonl --robots=store.jsonl.gz                 # stores: corpus/stores.py
"""

import sys

if not __package__:
    print("robots.py: start it from the project's root, python -m corpus.robots", file=sys.stderr)
    sys.exit(2)

import re
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from corpus.stores import AGENTS_2026, Store, open_robots, read_agents, versions_of
from corpus.urls import compiled, disallowing, host_key, site_key, split_url

paths = []             # URLs to check
robots = ""            # a robots.txt, or a store: folder, .jsonl(.gz, .zst), .parquet
missing = "allow"      # a host whose robots.txt is not in the store: allow or deny
agents = ""            # as in prepare.py: file of the user agents that count; 2026; "" = the twelve of Apertus and *
snapshots = "any"      # different files of a host: any may refuse, or the last one counts
explicit = False       # count only groups that name an AI agent, not those of *

# The 15 of the published pipeline (swiss-ai/pretrain-data; the report prints 14, without FacebookBot).
AGENTS = [
    "AI2Bot", "Applebot-Extended", "Bytespider", "CCBot", "CCBot/2.0", "CCBot/1.0", "ClaudeBot",
    "cohere-training-data-crawler", "Diffbot", "FacebookBot", "Meta-ExternalAgent", "Google-Extended", "GPTBot",
    "PanguBot", "*",
]
# The entry of a host in a store: a robots.txt (an empty one if the host serves none), something else under that name,
# or nothing: the host was not asked, or its file was not fetched.
FILE_STATES = ("with_file", "unparsable", "unknown")


def agents_of(setting):
    """The agents of --agents: a file of them, "2026", or "" for AGENTS."""
    return read_agents(AGENTS_2026 if setting == "2026" else setting) if setting else AGENTS


# ----------------------------------------------------------------------------------------------------------------------
# the verdict


def verdict(url, store=None, agents=AGENTS, missing="allow", blocked=(), explicit=False):
    """
    (whether a document with this URL is kept, the reason). Reports count by the reason's part before the colon.

        allowed                    robots.txt allows this URL for every agent
        no-url                     the document has no URL, so no file of its host was consulted
        no-robots                  the store has no robots.txt of the site: whether it has opted out is unknown
        unparsable                 the host serves something else as robots.txt: a web page, prose, no user-agent
        bad-url                    the URL is malformed
        robots:AGENT:RULE          dropped: this rule disallows the URL for this agent
        usage-file:AGENT:PATH      dropped: it may be read, but not used for training
        blocked-domain:ENTRY       dropped: the host is on a list of blocked domains

    With missing='deny' no-url, no-robots, unparsable and bad-url are dropped too.

    store: open_robots(path) or anything with .get(site_key(url)) -> str, bytes or None. blocked: blocked_domains(path).
    missing: 'allow' (Apertus kept these pages; RFC 9309 sec. 2.3.1.4 disallows all of a host whose file could not be
    fetched) or 'deny' (keep only URLs that a robots.txt allows); any other value is a ValueError.
    """
    return dated_verdict(url, versions_of(store, site_key(url)), agents, missing, blocked, explicit)[:2]


def dated_verdict(url, files, agents=AGENTS, missing="allow", blocked=(), explicit=False):
    """
    verdict() by the files of the URL's site, the newest first; and whether an older file disallows the URL, but the
    newest does not.
    """
    if missing not in ("allow", "deny"):
        raise ValueError(f"missing={missing!r}: want 'allow' (keep pages whose robots.txt is unknown) or 'deny'")
    # a.example.com is blocked by its own name, by example.com, and by com.
    entry = host_key(url)
    while entry and entry not in blocked:
        entry = entry.partition(".")[2]
    if entry:
        return False, f"blocked-domain:{entry}", False
    newest, *older = files or [None]
    kept, reason = may_train_on(url, newest, agents, explicit)
    for file in older if kept else ():
        allows, refusal = may_train_on(url, file, agents, explicit)
        if not allows:
            return False, refusal, True
    return kept and (missing == "allow" or reason == "allowed"), reason, False


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
    file = parse_robots(robots_txt)
    if file is None:
        return True, "unparsable"
    # A preference about training addresses AI even in a group of `*`, so explicit does not apply.
    reason = (first_refusal("robots", path, file.reading, agents, explicit)
              or first_refusal("usage-file", path, file.training, agents))
    return not reason, reason or "allowed"


def file_state(site, store):
    """One of FILE_STATES: does the store have a robots.txt of this site_key()?"""
    content = store.get(site) if store else None
    if content is None:
        return "unknown"
    return "unparsable" if parse_robots(content) is None else "with_file"


def first_refusal(reason, path, groups, agents, explicit=False):
    """"REASON:AGENT:RULE" of the first of refusals(), or None."""
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


# ----------------------------------------------------------------------------------------------------------------------
# the file

# RFC 9309 sec. 2.5: the minimum that a crawler has to read.
MAX_BYTES = 500 * 1024
# Misspelt names and a missing colon are accepted, as by Google's parser: the intent of "Disalow /" is clear.
# Letters other than ASCII before a line are the rest of a byte-order mark.
_LINE = re.compile(r"""(?ix) [\r\n] [^!-~\r\n]*
    (?: (?P<agent> user [ _-]? agent )
      | (?P<allow> allow )
      | (?P<usage> content-usage | content-signals? | usage-pref )
      | (?P<license> license (?= [ \t]* : [ \t]* (?: [^\s#]* / | [^\s#]+ \.xml ) ) )
      | dis+al+ow | disallaw | diasllow )
    (?: [ \t]* : | [ \t] ) (?P<value> [^#\r\n]* )""")
# Not a robots.txt: a web page, or text other than comments without any line about agents, sitemaps or training.
_OTHER = re.compile(r"""(?isx) \s* <
    | (?! .* [\r\n] [^!-~\r\n]* (?: (?: user [ _-]? agent | sitemap ) [ \t:]
                                   | (?: content-usage | content-signals? | usage-pref ) [ \t]* :
                                   | license [ \t]* : [ \t]* (?: [^\s#]* / | [^\s#]+ \.xml ) ) )
      .* [\r\n] [ \t]* [^#\s]""")
# "CCBot/2.0 (https://...)" -> "CCBot"
_TOKEN = re.compile(r"\*(?!\S)|[A-Za-z0-9_.-]+")


class Robots(NamedTuple):
    """A robots.txt: {agent token: [rule of compiled(), the longest first]} about reading and training, and licences."""

    reading: dict
    training: dict
    licences: list


# Cached because the documents of a host come in clusters.
@lru_cache(maxsize=4096)
def parse_robots(content):
    """
    A robots.txt, str or bytes, as Robots; None if it is something else: a web page, or text without a line about
    agents, sitemaps or training. A byte-order mark is skipped; the official pipeline loses a group to it.
    """
    text = robots_text(content)
    if _OTHER.match(text):
        return None
    lines = [(kind_of_line(m), m["value"].strip()) for m in _LINE.finditer(text)]
    # A licence belongs to no group (RSL 1.0), so it does not end one.
    licences = [value for kind, value in lines if kind == "license"]
    lines = [line for line in lines if line[0] != "license"]
    # RFC 9309 has no rules before the first user-agent: that line may have been lost. A ban there counts for agents
    # without a group of their own, a preference for all.
    reading, before = groups_of(lines, ("allow", "disallow"))
    bans = [rule for rule in before if rule[1]]
    if bans:
        reading.setdefault("*", []).extend(bans)
    training, for_all = groups_of(lines, ("usage",))
    if for_all:
        training.setdefault("*", [])
    for rules in training.values():
        rules += for_all
    for rules in [*reading.values(), *training.values()]:
        rules.sort(key=itemgetter(0))
    return Robots(reading, training, licences)


def kind_of_line(m):
    """The kind of a match of _LINE: agent, allow, disallow, usage or license."""
    return next((kind for kind in ("agent", "allow", "usage", "license") if m[kind]), "disallow")


def groups_of(lines, kinds):
    """({agent token: rules of these kinds}, those before the first user-agent) of lines, [(kind, value)]."""
    groups, before, names, in_rules = {}, [], [], False
    for kind, value in lines:
        if kind == "agent":
            # A user-agent line after a rule begins a new group. RFC 9309 merges all groups of an agent.
            names = [] if in_rules else names
            names += map(product_token, re.split("[,;|]", value))
            for name in names:
                groups.setdefault(name, [])
        # An empty "Disallow:" disallows nothing.
        elif value and kind in kinds:
            rule = preference(value) if kind == "usage" else compiled(kind == "disallow", value)
            for rules in [groups[name] for name in names] if names else [before]:
                rules.append(rule)
        in_rules = kind != "agent"
    return groups, before


def robots_text(content):
    """The text of a robots.txt (str or bytes) after a line break: at most MAX_BYTES, without a byte-order mark."""
    raw = content.encode("utf-8", "replace") if isinstance(content, str) else content
    if len(raw) > MAX_BYTES:
        raw = raw[:end_of_whole_lines(raw)]
    # UTF-16 read as UTF-8 is ASCII with NULs in between.
    return "\n" + raw.decode("utf-8", "replace").replace("\0", "").lstrip("\ufeff\ufffd\u00ef\u00bb\u00bf")


def end_of_whole_lines(raw):
    """Where the last whole line of the first MAX_BYTES ends: "/private/x" cut to "/" would disallow everything."""
    return raw.rfind(b"\n", 0, MAX_BYTES)


def has_unread_rules(content):
    """Whether a robots.txt (bytes or str) has rules behind the part that is read."""
    raw = content.encode("utf-8", "replace") if isinstance(content, str) else content
    return len(raw) > MAX_BYTES and bool(_LINE.search(raw[end_of_whole_lines(raw):].decode("utf-8", "replace")))


@lru_cache(maxsize=4096)
def product_token(agent):
    """The name of an agent in a user-agent line: lower case, no version (RFC 9309 sec. 2.2.1). None without a name."""
    m = _TOKEN.match(agent.strip(" \t\"'\u201c\u201d"))
    return m and m[0].lower()


def preference(value):
    """The rule of a Content-Usage or Content-Signal line. Without a path it applies to all paths."""
    path, terms = re.match(r"(/\S*)?\s*(.*)", value).groups()
    return compiled(forbids_training(terms), path or "/", strict=True)


# Labels about training: of the drafts of today, of Cloudflare, and of earlier drafts (draft-thomson-aipref-sup-00,
# draft-ietf-aipref-vocab-00 to -04), which sites still serve. A value is n; no, false and ?0 mean it.
_TERM = re.compile(r"""(?ix) (?<! [\w-] )
    ( train[_-]ai | ai[_-]train | train[_-]genai | genai | tdm | ai | bots | all )
    [ \t]* [=:] [ \t]* ["'(]* ( \?0 | [\w-]+ )""")
_NO = ("n", "no", "?0", "0", "false")


def forbids_training(terms):
    """
    Does a preference, in a line of robots.txt or in a header, have a label about training with the value n?

    A label's last value counts (draft-ietf-aipref-vocab-08 sec. 6.5). The rest need not be a dictionary of RFC 9651,
    whose keys are lower case, without spaces around "=" and with commas between members: a syntax error does not
    withdraw an opt-out, and no label withdraws that of another one.
    """
    values = {label.lower().replace("_", "-"): value.lower() for label, value in _TERM.findall(terms)}
    return any(value in _NO for value in values.values())


# ----------------------------------------------------------------------------------------------------------------------
# the command


def main():
    """Print the verdict of robots.txt on each URL."""
    if not paths:
        raise ValueError("name one or more URLs: python -m corpus.robots https://example.com/a --robots=robots.txt")
    for url in paths:
        site = site_key(url)
        if not site:
            raise ValueError(f"{url!r} is not a URL; want https://host/path")
        if robots.endswith(".txt"):
            store = Store([(site, Path(robots).read_bytes(), "")])
        else:
            store = open_robots(robots, snapshots) if robots else Store([])
        print_verdict(url, site, store)


def print_verdict(url, site, store):
    """Print whether each agent may read a URL by its site's robots.txt, and by which rule; then the verdict."""
    counted = [agent for agent in agents_of(agents) if agent != "*" or not explicit]
    files = store.versions(site)
    kept, reason, by_older = dated_verdict(url, files, counted, missing, explicit=explicit)
    if not files:
        why = f"{robots} has no robots.txt of {site}" if robots else "no robots.txt was named (--robots)"
        print(f"unknown: {why}; prepare.py --missing={missing} {'keeps' if kept else 'removes'} it")
        return
    if store.key_of(site) in store.several:
        rule = "the newest counts" if snapshots == "last" else "any of them may refuse (--snapshots=last: the newest)"
        print(f"{robots} has different files of {site}: {rule}")
    for number, content in enumerate(files, 1):
        print(f"file {number} of {len(files)}, the newest first:\n" * (len(files) > 1), end="")
        print_agents(url, parse_robots(content), counted)
    print(f"{'kept' if kept else 'drop'}:{reason}{', by an older file' * by_older}")


def print_agents(url, file, agents):
    """Print whether each agent may read a URL by a file of parse_robots(), and by which rule."""
    refused = dict(refusals(split_url(url)[1], file and file.reading, agents, explicit))
    for agent in agents:
        outcome = f"refused by  Disallow: {refused[agent]}" if agent in refused else "allowed"
        print(f"{agent:30s} {outcome}")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
