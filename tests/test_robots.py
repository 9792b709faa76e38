"""Opt-outs against RFC 9309, Google's documentation, the drafts of AIPREF, TDMRep, datadiligence and Protego."""

import gzip
import json
import os
import re

import pytest
from conftest import ROOT, script, table
from corpora import put, write_lines

from corpus.reservations import judge_document, refusal, reservation
from corpus.robots import AGENTS, agents_of, may_train_on, verdict
from corpus.stores import FILES, blocked_domains, open_reservations, open_robots
from corpus.urls import host_key

AI_ROBOTS = os.path.join(ROOT, "..", "shared", "data", "ai_robots.json")
ROBOTS_2019 = os.path.join(ROOT, "..", "shared", "data", "robots_2019_top10k.jsonl.gz")


def allowed(robots, agent, path):
    return may_train_on("https://example.com" + path, robots, (agent,))[0]


# ----------------------------------------------------------------------------------------------------------------------
# robots.txt

# RFC 9309 sec. 5.1, the example file in full.
RFC_5_1 = """
User-Agent: *
Disallow: *.gif$
Disallow: /example/
Allow: /publications/

User-Agent: foobot
Disallow:/
Allow:/example/page.html
Allow:/example/allowed.gif

User-Agent: barbot
User-Agent: bazbot
Disallow: /example/page.html

User-Agent: quxbot
"""
# A robots.txt with ; for line breaks, or the rule of a group for all agents; an agent; paths that it may read; paths
# that it may not. First the RFC's example. Then sec. 2.2.2 and 2.2.3: encoding, and literal special characters. Then
# Google's documentation, "URL matching based on path values" and "Order of precedence for rules": of conflicting rules
# the longest, and then the least restrictive. Last sec. 2.2.1 and 2.2.4, and two leniencies of Google's parser.
CASES = """
RFC | anybot | / /a.gif?x /publications/x | /example/ /a.gif
RFC | foobot | /example/page.html /example/allowed.gif | / /publications/
RFC | FooBot/2.1 | /example/page.html | /
RFC | barbot | /a.gif | /example/page.html
RFC | bazbot | /a.gif | /example/page.html
RFC | quxbot | /example/ /a.gif |
/foo/bar?baz=quz | x | | /foo/bar?baz=quz
/foo/bar/\u30c4 | x | | /foo/bar/%E3%83%84 /foo/bar/%e3%83%84
/foo/bar/%e3%83%84 | x | | /foo/bar/\u30c4 /foo/bar/%E3%83%84
/foo/bar/%62%61%7A | x | | /foo/bar/baz
/~x | x | | /%7Ex
/%7ex | x | | /~x
/foo/bar?baz=https://foo.bar | x | | /foo/bar?baz=https://foo.bar
/a%2Fb | x | /a/b |
/file-with-a-%2A.html | x | /file-with-a-b.html | /file-with-a-*.html
/path/foo-%24 | x | /path/foo- | /path/foo-$
/a$b | x | | /a$b
/ | x | | / /x /x?y
/$ | x | /x /x?y /? | /
/fish | x | /Fish.asp /catfish /?id=fish | /fish /fish.html /fish/salmon.html /fishheads/yummy.html /fish.html?id=any
/fish* | x | /Fish.asp /catfish /?id=fish | /fish /fish.html /fish/salmon.html /fishheads/yummy.html /fish.html?id=any
/fish/ | x | /fish /fish.html /animals/fish/ /Fish/Salmon.asp | /fish/ /fish/?id=any /fish/salmon.htm
/*.php | x | / /windows.PHP /php/ | /index.php /folder/filename.php?parameters /folder/any.php.file.html /filename.php/
/*.php$ | x | /filename.php?parameters /filename.php/ /filename.php5 /windows.PHP | /filename.php /folder/filename.php
/fish*.php | x | /Fish.PHP | /fish.php /fishheads/catfish.php?parameters
/*? | x | /a / | /a? /a?b /?
*/b | x | /ab /a | /b /a/b /a/b/c
fish | x | /fish |
/a*a*a$ | x | /aa /axa /aab | /aaa /axaxa /aaaa
/**a | x | /b | /a /ba
User-agent: x;allow: /p;disallow: / | x | /page |
User-agent: x;allow: /folder;disallow: /folder | x | /folder/page |
User-agent: x;allow: /page;disallow: /*.htm | x | | /page.htm
User-agent: x;allow: /page;disallow: /*.ph | x | /page.php5 |
User-agent: x;allow: /$;disallow: / | x | / |
User-agent: x;allow: /$;disallow: / | x | | /page.htm
User-agent: x;disallow: /x;allow: /x/ | x | | /x
User-agent: x;disallow: /x;allow: /x/ | x | /x/ |
User-agent: x;allow: /x/;disallow: /x/y.gif | x | | /x/y.gif
User-agent: x;disallow:;allow: | x | /x |
User-agent: x;disallow:;disallow: /y | x | /x |
User-agent: x;allow:;disallow: / | x | | /x
User-agent: x;disallow: / | x | /robots.txt |
User-agent: a;Disallow: /x;;User-agent: b;Disallow: /y;;User-agent: a;Disallow: / | a | | /z
User-agent: a;;;User-agent: b;Disallow: / | a | | /z
User-agent: a;Crawl-delay: 3;Sitemap: /s;User-agent: b;Disallow: / | a | | /z
Disallow: /;User-agent: a;Disallow: /y | a | /z |
User-agent: a;Disallow:;User-agent: b;Disallow: / | a | /z |
User-agent: *;Disallow: /;User-agent: a;Allow: / | a | /z |
User-agent: *;Disallow: /;User-agent: a | a | /z |
User-agent: A # theirs;Disallow: / # all | a | | /z
USER-AGENT:A;DISALLOW:/ | a | | /z
User-agent: a/1.0;Disallow: / | a | | /z
User-agent: a-b;Disallow: / | a | /z |
User-agent: a b;Disallow: / | a | | /z
user-agent a;disallow / | a | | /z
useragent: a;dissalow: / | a | | /z
\ufeffUser-agent: *;Disallow: / | a | | /z
"""


@pytest.mark.parametrize("text, agent, yes, no", table(CASES))
def test_rules_are_those_of_the_rfc_and_of_google_in_any_encoding_and_with_any_line_breaks(text, agent, yes, no):
    text = text.replace("RFC", RFC_5_1)
    text = text if "gent" in text.lower() else f"User-agent: *;Disallow: {text}"
    plain, *contents = [text.replace(";", end) for end in ("\n", "\r", "\r\n")]
    contents += [plain, plain.encode() + b"\r# \xff"] + [plain.encode("utf-16")] * text.isascii()
    for content in contents:
        assert all(allowed(content, agent, path) for path in [*yes.split(), "/robots.txt"])
        assert not any(allowed(content, agent, path) for path in no.split())


def test_500_kib_are_read_up_to_a_whole_line():
    """The limit falls after the "/" of /private, so that incomplete line does not count."""
    begin = "User-agent: *\nDisallow: /early\n# ".ljust(500 * 1024 - len("\nDisallow: /"))
    content = begin + "\nDisallow: /private/diary\nDisallow: /late"
    assert [allowed(content, "a", path) for path in ("/early", "/public", "/late")] == [False, True, True]


def test_hostile_rules_and_urls_take_linear_time():
    """A matcher that backtracks would take exponential time."""
    rule, path, spaces = "/" + "*a" * 2000 + "*b$", "/" + "a" * 50_000, " " * 50_000
    robots = f"User-agent: *\nDisallow: {rule}\n"
    assert allowed(robots, "x", path) and not allowed(robots, "x", path + "b")
    assert may_train_on("https://a.org/", spaces + "\n" + spaces) == (True, "allowed")
    assert not reservation(
        dict(
            x_robots_tag=f"{spaces}noindex{spaces}x",
            content_usage=f"train-ai={spaces}y",
            link=f"<{spaces}>;{spaces}rel" * 9,
            url=f"//{''.join(map(chr, range(0x4E00, 0x9E00)))}",
        )
    )
    deep = "[" * 100_000
    assert not reservation(
        dict(headers=f"{deep[:900]}{']' * 900}", url="https://a.org/"), dict.fromkeys(FILES, {"a.org": deep})
    )


# The last hosts are by the package idna: encode(name, uts46=True).
HOSTS = """
https://Example.COM:443/a example.com
http://user:pw@example.com/ example.com
example.com/a example.com
HTTP://example.com. example.com
//example.com example.com
http://www.example.com?x www.example.com
http://[2001:DB8:0:0::1]:8080/ 2001:db8::1
http://192.0.2.7:80/ 192.0.2.7
http://b\u00fccher.example/ xn--bcher-kva.example
http://stra\u00dfe.de/ xn--strae-oqa.de
http://\u4f8b\u3048\u3002jp/ xn--r8jz45g.jp
http://fa\u00df.de xn--fa-hia.de
http://\u03b2\u03cc\u03bb\u03bf\u03c2.com xn--nxasmm1c.com
http://\u0645\u062b\u0627\u0644.example xn--mgbh0fb.example
http://\u0440\u0444.\u0440\u0444 xn--p1ai.xn--p1ai
http://\ud55c\uad6d.kr xn--3e0b707e.kr
http://A\u0300.org xn--0ca.org
"""
NO_HOSTS = [
    "mailto:a@b.org",
    "http://",
    "http://a b/",
    "http://a..b/",
    "http://[::1",
    "http://a.b:x/",
    "just words",
    "",
    None,
    float("nan"),
    ["a.org"],
]


def test_hosts_are_those_of_the_url_and_of_the_idna_library():
    for line in HOSTS.split("\n"):
        url, _, host = line.partition(" ")
        assert host_key(url) == (host or None)
    assert {host_key(url) for url in NO_HOSTS} == {None}
    for url in ("https://a.org", "https://a.org?x", "https://a.org#x", "a.org"):
        # RFC 3986 sec. 6.2.3: an empty path is the root.
        assert not may_train_on(url, f"User-agent: *\nDisallow: {'/?' if '?' in url else '/$'}")[0]


STAR = "User-agent: *;Disallow: /private;"
SILENT = STAR + "User-agent: GPTBot;Disallow: /gpt;"
WELCOME = STAR + "".join(f"User-agent: {agent};" for agent in AGENTS[:-1]) + "Allow: /"
# The example of draft-ietf-aipref-attach-05 sec. 3.4.
DRAFT = """User-Agent: *;Allow: /;Disallow: /never/;Content-Usage: train-ai=n;Content-Usage: /ai-ok/ train-ai=y;;
    User-Agent: ExampleBot;Allow: /;Content-Usage: train-ai=y""".replace("\n", "")
# Agents; a path; a robots.txt with ; for line breaks; the reason. First RFC 9309: the * group holds for agents without
# their own, and the reason names a named agent before *. Then the draft's table and other preferences: Cloudflare's
# line; two for one path, of which n wins; the longest path, even if it says nothing on training; wildcards; a
# preference ends the user-agent lines of a group; explicit concerns reading only. Then statements that miss the syntax
# by a hair: a preference before the first user-agent, or in a file of nothing else, is about all agents; the line of
# draft-thomson-aipref-sup-00; names with commas. Last, pages that are no robots.txt, and files without rules.
REASONS = f"""
all | /private | {WELCOME} | robots:*:/private
named | /private | {WELCOME} | allowed
named | /private | {SILENT} | robots:AI2Bot:/private
explicit | /private | {SILENT} | allowed
reversed | /private | {SILENT}Disallow: /p | robots:GPTBot:/p
explicit | /private | {SILENT}Disallow: /p | robots:GPTBot:/p
* | /test | {DRAFT} | usage-file:*:/
* | /never/test | {DRAFT} | robots:*:/never/
* | /ai-ok/test | {DRAFT} | allowed
ExampleBot | /test | {DRAFT} | allowed
ExampleBot | /never/test | {DRAFT} | allowed
OtherBot | /test | {DRAFT} | usage-file:OtherBot:/
explicit | /test | {DRAFT} | usage-file:AI2Bot:/
all | /a/b | User-agent: *;Content-signal: search=yes,ai-train=no;Allow: / | usage-file:*:/
all | /a/b | User-agent: *;Content-Signal: search=yes, ai-train=yes, ai-input=no | allowed
all | /a/b | User-agent: *;content-usage : /a\ttrain-ai=y # yes;CONTENT-USAGE:/a train-ai=n # no | usage-file:*:/a
all | /a/b | User-agent: *;Content-Usage: /a\ttrain-ai=n;Content-Usage: /a train-ai=y | usage-file:*:/a
all | /a/b | User-agent: *;Content-Usage: train-ai=n;Content-Usage: /a search=n | allowed
all | /a/b | User-agent: *;Content-Usage: /*/b$ train-ai=n | usage-file:*:/*/b$
all | /a/b | User-agent: *;Content-Usage: /*/b/c$ train-ai=n | allowed
all | /a/b | User-agent: *;Content-Usage: | allowed
all | /a/b | User-agent: *;Content-Usage: ai-train=n | usage-file:*:/
all | /a/b | Content-Usage: train-ai=n;User-agent: GPTBot;Disallow:;Content-Usage: train-ai=y | usage-file:GPTBot:/
Mine | /a/b | Content-Signal: ai-train=no;;User-agent: Mine;Disallow: | usage-file:Mine:/
all | /a/b | Content-Usage: /a TRAIN-AI = N | usage-file:*:/a
all | /a/b | Usage-Pref: search=y, tdm=n | usage-file:*:/
all | /a/b | User-agent: Some, GPTBot, Other;Disallow: /a | robots:GPTBot:/a
all | /a | User-agent: "GPTBot";Disallow: /a | robots:GPTBot:/a
all | /a | User-agent: Some\\x3b ClaudeBot;Disallow: /a | robots:ClaudeBot:/a
all | /a | User-agent: Some\\x7cClaudeBot;Disallow: /a | robots:ClaudeBot:/a
all | /a | User_agent: GPTBot;Disallow: /;;User-agent: Some;Allow: / | robots:GPTBot:/
all | /a | \u00ef\u00bb\u00bfUser-agent: *;Disallow: /;;User-agent: Some;Disallow: | robots:*:/
all | /a | User-agent: Some;Allow: /;\u00ef\u00bb\u00bfUser-agent: GPTBot;Disallow: / | robots:GPTBot:/
all | /a | ?x User-agent: GPTBot;Disallow: /;;User-agent: Some;Allow: / | robots:*:/
GPTBot | /a | Disallow: /;;User-agent: GPTBot;Allow: /b | allowed
all | /a | User-agent: *;Content-Signals: search=yes, ai_train=no | usage-file:*:/
all | /a | Content-Usage: train_ai=n | usage-file:*:/
all | /a/b | License: https://a.org/license.xml | allowed
all | /a/b | License: MIT | unparsable
all | /a/b | User-agent: *;# Content-Usage: train-ai=n | allowed
all | /a/b | User-agent: *;Content-Usage: train-ai=y;User-agent: none;Disallow: / | allowed
all | /x | <html><body>User-agent: *;Disallow: / | unparsable
all | /x | \ufeff ;<!DOCTYPE html> | unparsable
all | /x | Not found | unparsable
all | /x | Disallow: / | unparsable
all | /x | | allowed
all | /x | # none | allowed
all | /x | Sitemap: https://a.org/s.xml | allowed
all | /x | # x;; sitemap: /s;other | allowed
"""


def unescaped(robots):
    """A robots.txt of REASONS: ; is a line break, \\x3b a semicolon, \\x7c a bar."""
    return robots.replace(";", "\n").replace("\\x3b", ";").replace("\\x7c", "|")


@pytest.mark.parametrize("who, path, robots, reason", table(REASONS))
def test_the_reason_names_the_agent_and_its_rule(who, path, robots, reason):
    named = AGENTS[:-1]
    agents = dict(all=AGENTS, named=named, explicit=named, reversed=AGENTS[::-1]).get(who, [who])
    found = may_train_on(f"https://a.org{path}", unescaped(robots), agents, who == "explicit")
    assert found == (reason in ("allowed", "unparsable"), reason)


# Protego applies Applebot's group to Applebot-Extended, and ends a group's user-agent lines at a Crawl-delay.
DIFFER = set(
    "bgp.he.net www.avsforum.com www.vwvortex.com www.wordreference.com bitbucket.org www.eventbrite.com "
    "www.khaleejtimes.com".split()
)


def test_real_files_are_decided_as_protego_does_but_for_seven():
    """A tenth of 4,231 files of 2019, and the seven of all files where we differ."""
    if not os.path.exists(ROBOTS_2019):
        pytest.skip("shared/data is not there")
    Protego = pytest.importorskip("protego").Protego
    with gzip.open(ROBOTS_2019, "rt") as lines:
        rows = list(map(json.loads, lines))
    differ = set()
    for row in rows[::10] + [row for row in rows if row["domain"] in DIFFER]:
        # Protego does not skip the byte-order mark.
        peer = Protego.parse(row["robots"].lstrip("\ufeff"))
        for path in ("/", "/news/2019/title", "/images/a.png?x=1"):
            url = f"https://{row['domain']}{path}"
            if may_train_on(url, row["robots"])[0] != all(peer.can_fetch(url, agent) for agent in AGENTS):
                differ.add(row["domain"])
    assert differ == DIFFER


# ----------------------------------------------------------------------------------------------------------------------
# stores and outcomes

ROBOTS = r"""
{"domain": "Example.com", "content": "User-agent: GPTBot\nDisallow: /no\nContent-Usage: /use train-ai=n"}
{"domain": "null.org", "content": null}
{"domain": "https://www.b\u00fccher.example:443/", "content": "User-agent: *\nDisallow: /"}
{"domain": "page.net", "content": "<html>"}
{"domain": "https://page.net:8080", "content": ""}
"""
# A URL and its outcome; those with a ! are dropped with --missing=deny.
OUTCOMES = """
http://EXAMPLE.com:80/no drop:robots:GPTBot:/no
http://www.example.com/no drop:robots:GPTBot:/no
http://example.com/use drop:usage-file:GPTBot:/use
http://example.com/yes kept:allowed
http://b\u00fccher.example/ drop:robots:*:/
http://null.org/ kept:no-robots !
http://page.net/ kept:unparsable !
nourl kept:bad-url !
https://a.b.BAD.com:8/x drop:blocked-domain:bad.com
http://notbad.com/ kept:no-robots !
http://bad.com.evil.org/ kept:no-robots !
http://com/ kept:no-robots !
http://page.net:8080/ kept:allowed
https://example.com:8443/no kept:no-robots !
https://example.com:443/no drop:robots:GPTBot:/no
https://example.com:80/no kept:no-robots !
http://other.co.uk/ drop:blocked-domain:other.co.uk
"""


def test_a_store_in_every_form_gives_the_same_outcomes(tmp_path):
    """
    The store is a file of rows, or a folder of files and rows; blocked domains are lines or rows. The file of another
    port is of another site (RFC 9309 sec. 2.3).
    """
    example, _, third, *pages = ROBOTS.strip().splitlines()
    put(
        tmp_path,
        {
            "s.jsonl": ROBOTS,
            "folder/example.com.txt": json.loads(example)["content"],
            "folder/www.xn--bcher-kva.example/robots.txt": json.loads(third)["content"],
            "folder/more.jsonl": "\n".join(pages),
            "blocked": "# list\nBad.com\n\nwww.other.co.uk # why\n",
            "blocked.jsonl": '{"domain": "Bad.com", "why": "#"}\n{"domain": "other.co.uk", "why": "#"}',
        },
    )
    for name, list_of_hosts in (("s.jsonl", "blocked"), ("folder", "blocked.jsonl")):
        store = open_robots(tmp_path / name)
        blocked = blocked_domains(tmp_path / list_of_hosts)
        for line in OUTCOMES.strip().splitlines():
            url, outcome, *silent = line.split()
            fate, _, reason = outcome.partition(":")
            assert verdict(url, store, blocked=blocked) == (fate == "kept", reason)
            assert verdict(url, store, blocked=blocked, missing="deny") == (fate == "kept" and not silent, reason)
    assert verdict("", store) == (True, "no-url") and verdict(None, store, missing="deny") == (False, "no-url")


def test_the_command_prints_each_agent_and_the_rule(tmp_path):
    (tmp_path / "robots.txt").write_text("User-agent: GPTBot\nDisallow: /a\nUser-agent: *\nDisallow: /")
    how = f"--robots={tmp_path}/robots.txt", "--explicit"
    out = script("corpus.robots", "https://example.com/a", "https://example.com/b", *how).stdout.splitlines()
    assert out[14::15] == ["drop:robots:GPTBot:/a", "kept:allowed"]
    assert [line.split() for line in out if "refused by" in line] == ["GPTBot refused by Disallow: /a".split()]
    (tmp_path / "agents").write_text("Other\nGPTBot")
    out = script("corpus.robots", "https://example.com/a", how[0], f"--agents={tmp_path}/agents").stdout
    assert [line.split() for line in out.splitlines()] == [
        "Other refused by Disallow: /".split(),
        "GPTBot refused by Disallow: /a".split(),
        ["drop:robots:GPTBot:/a"],
    ]
    assert script("corpus.robots", "a.org").stdout.startswith("unknown: no robots.txt was named (--robots); prepare.py")
    rows = [dict(domain="b.org", content=content) for content in ("", "# none")]
    store = f"--robots={write_lines(tmp_path / 's.jsonl', rows)}"
    assert " has different files of b.org: any of them may refuse" in script("corpus.robots", "b.org", store).stdout
    assert "b.org: the newest counts" in script("corpus.robots", "b.org", store, "--snapshots=last").stdout
    assert " has no robots.txt of b.org:8443; prepare.py" in script("corpus.robots", "b.org:8443/a", store).stdout
    out = script("corpus.robots", "a.org", store, "--missing=deny").stdout
    assert out.startswith("unknown: ") and out.endswith(" of a.org; prepare.py --missing=deny removes it\n")


# ----------------------------------------------------------------------------------------------------------------------
# other reservations

# Values of a header that reserve nothing, then after | values that do, separated by /. Authorities: for X-Robots-Tag
# datadiligence 0.1.7 (Spawning), without an agent and as GPTBot; for Content-Usage the token n of train-ai in the
# dictionary of http-sf 1.5.0 (RFC 9651); for TDM-Reservation its report.
HEADERS = {
    "x-robots-tag": """ / noindex / other, noindex / GPTBot: all / somebot: noai / :, / :, :, ,: -:: / none /
        noindex, nofollow / demobot: noai, examplebot: noai, GPTBot: all / demobot: noindex noai / x-noai |
        noai / noimageai / other, noai / GPTBot: noai / GPTBot:noai / other, GPTBot: noimageai / all, noai""",
    "content-usage": """train-ai=n, train-ai=y / train-ai;allow=n, train-ai=y /
        train-ai=y, train-ai, search=n, search="n" / train-ai;has;parameters="?"; / search=n /
        train-ai / x-train-ai=n / n / ai-use=n / ai-input=no / train-ai=y, genai=y, tdm=y |
        train-ai=n / train-ai=n, search=y / search=y, train-ai=n;x="1;2" / train-ai=n;a=1;b / train-ai=y,train-ai=n""",
    "tdm-reservation": " / 0 / other / 2 / false | 1",
}
# Values that the syntax does not have, but whose meaning is plain; and the labels of earlier drafts.
BY_A_HAIR = {
    "x-robots-tag": "noai noimageai / GPTBot: noindex noai / NoAI / no-ai / noindex;noai / NO AI / index, no ai",
    "content-usage": """train-ai="n" / train-ai=N / train-ai=no / train-ai=?0 / train-ai=n x / train-ai=(n) /
        Train-AI=n / train-ai = n / train-ai:n / search=y;train-ai=n / search=y train-ai=n / ai-train=no / train_ai=n /
        ai_train=no / genai=n /
        train-genai=n / tdm=n / ai=n / bots=n / all=n / search=y, all=n""",
    "tdm-reservation": "true / True / 1.0 / 1, 1",
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_are_read_as_by_the_reference_libraries(name):
    free, reserved = (list(map(str.strip, part.split(" /"))) for part in HEADERS[name].split("|"))
    for said in free + reserved + list(map(str.strip, BY_A_HAIR[name].split(" /"))):
        for doc in ({name.replace("-", "_"): said}, {name.title(): said}, dict(headers={name.title(): said})):
            assert (reservation(doc) is None) == (said in free), doc


# As Spawning's generator writes it for a site that disallows text and allows images.
AI_TXT = "# Spawning AI\nUser-Agent: *\nDisallow: *.txt\nDisallow: *.html\nDisallow: *.pdf\nAllow: *.jpg\n"
RESERVES = '[{"location": "/", "tdm-reservation": 1}]'
# A document in JSON and its reason. First its own statements: directives in upper or lower case; an agent's <meta>; a
# preference that no other withdraws (draft-ietf-aipref-vocab-07 sec. 5.1); Cloudflare's word; headers in any form (RFC
# 9110 sec. 5.3); numbers as pandas writes them; no headers. Then with its host's tdmrep.json, a list of location and
# reservation or a text: each statement overrides the ones before it; the report's second example, section "TDM File on
# the Origin Server"; "the most specific match is the first in sequence"; its table of special characters; other values
# are errors. Last with an ai.txt.
DOCUMENTS = """
{"x_robots_tag": "noindex, NOML"} | noml
{"metas": [["gptbot", "nofollow, noimageai"]]} | noimageai
{"headers": "X-Robots-Tag: noai\\r\\nX-Robots-Tag: noindex"} | noai
{"metas": [["googlebot", "noai"], ["", "noai"]]} | None
{"metas": {"Robots": "nofollow, noai"}} | noai
{"metas": [["mybot", "noai"]], "agents": ["MyBot"]} | noai
{"x_robots_tag": "GPTBot: noai", "agents": ["MyBot"]} | None
{"x_robots_tag": "*: noai", "agents": ["MyBot"]} | noai
{"ai_txt": "User-Agent: MyBot\\nDisallow: /", "agents": ["MyBot"]} | ai-txt:MyBot:/
{"headers": {"Content-Usage": "train-ai=n"}, "content_usage": "train-ai=y"} | usage-header
{"headers": {"Content-Signal": "search=yes, ai-train=no, ai-input=no"}} | usage-header
{"headers": {"Content-Signal": "search=no, ai-train=yes, ai-input=no"}} | None
{"headers": "HTTP/1.1 200 OK\\r\\nX-Robots-Tag: noindex\\r\\nx-robots-tag : noai\\r\\n"} | noai
{"headers": [["X-Robots-Tag", "noai"]]} | noai
{"headers": {"X-Robots-Tag": ["noindex", "noai"]}} | noai
{"headers": "[[\\"x-robots-tag\\", \\"noai\\"]]"} | noai
{"headers": "{\\"x-robots-tag\\": \\"noai\\"}"} | noai
{"headers": [{"name": "Server", "value": "x"}, {"name": "X-Robots-Tag", "value": "noai"}]} | noai
{"headers": [{"key": "X-Robots-Tag", "value": ["noindex", "noai"]}]} | noai
{"headers": [{"Name": "X-Robots-Tag", "Value": "noai", "comment": null}]} | noai
{"headers": {"name": "X-Robots-Tag", "value": "noai"}} | noai
{"headers": [{"X-Robots-Tag": "noai"}]} | noai
{"headers": ["HTTP/2 200", "x-robots-tag: noai"]} | noai
{"headers": "X-Robots-Tag: noindex,\\n noai"} | noai
{"http_headers": "[{\\"name\\": \\"tdm-reservation\\", \\"value\\": \\"1\\"}]"} | tdm-header
{"X-Robots-Tag": "noai"} | noai
{"Content-Usage": "train-ai=n"} | usage-header
{"Meta-Robots": "noai"} | noai
{"headers": {"X-Robots-Tag": "googlebot: nofollow\\nX-Robots-Tag: noai"}} | noai
{"headers": {"Content-Signals": "ai-train=no"}} | usage-header
{"usage_pref": "train-ai=n"} | usage-header
{"Usage-Pref": "tdm=n"} | usage-header
{"Content-Signals": "ai-train=no"} | usage-header
{"metas": [{"name": "robots", "content": "noai"}]} | noai
{"metas": [{"charset": "utf-8"}, {"property": "og:x", "content": "x"}, {"name": "GPTBot", "content": "noai"}]} | noai
{"metas": [{"name": null, "http-equiv": "X-Robots-Tag", "content": "noai"}]} | noai
{"metas": "[[\\"robots\\", \\"noai\\"]]"} | noai
{"metas": "{\\"robots\\": \\"noai\\"}"} | noai
{"metas": [{"name": "tdm-reservation", "content": "true"}]} | tdm-meta
{"headers": [1, ["x"], null], "url": 5} | None
{"headers": "{", "url": ["x"]} | None
{"headers": "5"} | None
{"tdm_reservation": 1.0} | tdm-header
{"tdm_reservation": 0.0} | None
{"tdm_reservation": NaN} | None
{"meta_tdm_reservation": [1]} | tdm-meta
{"content_usage": ["search=y", "train-ai=n"]} | usage-header
{"tdm_reservation": "maybe", "tdmrep": [["/", 1]]} | tdm-file:/
{"headers": {"tdm-reservation": 0}, "tdmrep": [["/", 1]]} | None
{"tdm_reservation": 1, "tdmrep": [["/", 1]]} | tdm-header
{"metas": [["tdm-reservation", "0"]], "tdmrep": [["/", 1]]} | None
{"headers": "TDM-Reservation: 0\\r\\n", "metas": [["tdm-reservation", "1"]], "tdmrep": [["/", 1]]} | tdm-meta
{"headers": [["tdm-reservation", "1"]], "meta_tdm_reservation": 0, "tdmrep": [["/", 1]]} | None
{"tdmrep": [["/a/", 1], ["/b/html/", 1], ["/b/images/*.jpg", 0]], "path": "/a/x.pdf"} | tdm-file:/a/
{"tdmrep": [["/a/", 1], ["/b/html/", 1], ["/b/images/*.jpg", 0]], "path": "/b/html/x?y=1"} | tdm-file:/b/html/
{"tdmrep": [["/a/", 1], ["/b/html/", 1], ["/b/images/*.jpg", 0]], "path": "/b/images/x.jpg"} | None
{"tdmrep": [["/a/", 1], ["/b/html/", 1], ["/b/images/*.jpg", 0]], "path": "/A/x.pdf"} | None
{"tdmrep": [["/b/open/", 0], ["/b", 1]], "path": "/b/open/x"} | None
{"tdmrep": [["/b", 1], ["/b/open/", 0]], "path": "/b/open/x"} | tdm-file:/b
{"tdmrep": [["/this/exactly$", 1]], "path": "/this/exactly"} | tdm-file:/this/exactly$
{"tdmrep": [["/this/exactly$", 1]], "path": "/this/exactly/not"} | None
{"tdmrep": [["/this/*/then", 1]], "path": "/this/and/then/x"} | tdm-file:/this/*/then
{"tdmrep": [["/path/foo-%24", 1]], "path": "/path/foo-$"} | tdm-file:/path/foo-%24
{"tdmrep": [["/", 2], ["/x", "1"], [5, 1]], "path": "/x"} | tdm-file:/x
{"tdmrep": "{\\"location\\": \\"/\\", \\"tdm-reservation\\": 1}"} | tdm-file:/
{"tdmrep": "{\\"tdm-reservation\\": true}"} | tdm-file:/
{"tdmrep": [["/", true]]} | tdm-file:/
{"tdmrep": [["x", 1]], "path": "/xyz"} | tdm-file:/x
{"tdmrep": [["https://www.a.org/x", 1]]} | tdm-file:/x
{"tdmrep": [["https://b.org/x", 1]]} | None
{"tdmrep": "[{\\"tdm-reservation\\": \\"1\\"}, {\\"tdm-reservation\\": 0}]"} | tdm-file:/
{"tdmrep": "<html>not found</html>"} | None
{"tdmrep": "5"} | None
{"tdmrep": "[[]]"} | None
{"tdmrep": "\\udcff"} | None
{"ai_txt": AI_TXT, "path": "/a.html"} | ai-txt:*:*.html
{"ai_txt": AI_TXT, "path": "/a/page"} | ai-txt:*:*.html
{"ai_txt": AI_TXT, "path": "/"} | ai-txt:*:*.html
{"ai_txt": AI_TXT, "path": "/a/page?x=.css"} | ai-txt:*:*.html
{"ai_txt": AI_TXT, "path": "/a.d/page"} | ai-txt:*:*.html
{"ai_txt": AI_TXT, "path": "/a.jpg"} | None
{"ai_txt": AI_TXT, "path": "/a.css"} | None
{"ai_txt": AI_TXT, "path": "/a.b/c.css?/page"} | None
{"ai_txt": "User-Agent: GPTBot\\nDisallow: /", "path": "/a.jpg"} | ai-txt:GPTBot:/
{"ai_txt": "User-Agent: *\\nDisallow: /a/page$", "path": "/a/page"} | ai-txt:*:/a/page$
{"ai_txt": "User-Agent: other\\nDisallow: /", "path": "/a.jpg"} | None
{"ai_txt": "<html></html>", "path": "/a.jpg"} | None
{"ai_txt": "User-Agent: other\\nDisallow: /", "tdm_reservation": 1} | tdm-header
"""


# A page that says tdm-reservation: 1 and 0 in one place: any 1 counts. With a value that is neither, 0 exempts no page.
TWICE = """
{"headers": {"TDM-Reservation": "1", "tdm-reservation": "0"}} | tdm-header
{"headers": [["tdm-reservation", "1"], ["tdm-reservation", "0"]]} | tdm-header
{"headers": "tdm-reservation: 1\\ntdm-reservation: 0"} | tdm-header
{"headers": [{"name": "tdm-reservation", "value": "1"}, {"name": "tdm-reservation", "value": "0"}]} | tdm-header
{"http_headers": {"tdm-reservation": 1}, "tdm_reservation": 0} | tdm-header
{"tdm_reservation": 1, "TDM-Reservation": 0} | tdm-header
{"metas": [["tdm-reservation", "1"], ["tdm-reservation", "0"]]} | tdm-meta
{"metas": [["tdm-reservation", "0"], ["tdm-reservation", "1"]]} | tdm-meta
{"meta_tdm_reservation": 1, "metas": {"tdm-reservation": 0}} | tdm-meta
{"headers": [["tdm-reservation", "x"], ["tdm-reservation", "0"]], "tdmrep": [["/", 1]]} | tdm-file:/
"""


@pytest.mark.parametrize("said, want", table(DOCUMENTS) + table(TWICE))
def test_a_document_is_reserved_by_its_statements_and_the_files_of_its_host(said, want):
    doc = dict(path="/x", tdmrep=[], ai_txt=None) | json.loads(said.replace("AI_TXT", json.dumps(AI_TXT)))
    doc.setdefault("url", f"https://a.org{doc['path']}")
    if isinstance(doc["tdmrep"], list):
        doc["tdmrep"] = json.dumps([{"location": place, "tdm-reservation": value} for place, value in doc["tdmrep"]])
    store = {file: {"a.org": doc[column]} for file, column in zip(FILES, ("tdmrep", "ai_txt"))}
    assert str(refusal(doc, dict(agents=doc.get("agents", AGENTS)), store)) == want


# Rows of a store, which may be in files of a folder; snapshots, URL and outcome; ! as in OUTCOMES.
DATED = r"""
{"domain": "a.org", "date": "2026-09-16", "content": ""}
{"domain": "a.org", "date": "2026-07-10", "content": "User-agent: GPTBot\nDisallow: /"}
{"domain": "a.org", "date": "2026-10-01", "content": null}
{"domain": "b.org", "content": "User-agent: *\nDisallow: /b"}
{"domain": "b.org", "content": "User-agent: *\nDisallow: /c"}
{"domain": "c.org", "date": "2025-01-31", "content": "User-agent: *\nDisallow: /"}
{"domain": "c.org", "date": "2026-01-31T10:00:00Z", "content": "<html>"}
"""
BY_DATE = """
any  | a.org/   | drop:robots:GPTBot:/
last | a.org/   | kept:allowed
any  | b.org/b  | drop:robots:*:/b
last | b.org/b  | kept:allowed
any  | b.org/c  | drop:robots:*:/c
last | b.org/c  | drop:robots:*:/c
any  | c.org/c  | drop:robots:*:/
last | c.org/c  | kept:unparsable
"""


@pytest.mark.parametrize("snapshots, url, outcome", table(BY_DATE))
def test_any_snapshot_of_a_host_may_refuse_or_the_newest_alone(tmp_path, snapshots, url, outcome):
    """A failed fetch is no snapshot. Without dates the last row is the newest."""
    store = open_robots(put(tmp_path, {"s.jsonl": DATED}) / "s.jsonl", snapshots)
    fate, _, reason = outcome.partition(":")
    assert verdict(url, store) == (fate == "kept", reason)
    assert store.several == {"a.org", "b.org", "c.org"}


def test_a_snapshot_of_each_file_counts(tmp_path):
    rows = [dict(domain="a.org", file=file, content=content) for file in FILES for content in ("", "{not json}")]
    rows += [
        dict(domain="a.org", file="tdmrep.json", content=RESERVES),
        dict(domain="a.org", file="tdmrep.json", content=""),
    ]
    store = open_reservations(write_lines(tmp_path / "s.jsonl", rows))
    assert reservation(dict(url="a.org/x"), store) == "tdm-file:/"
    assert reservation(dict(url="a.org/x"), open_reservations(tmp_path / "s.jsonl", "last")) is None


# Two dates of snapshots, the earlier one first.
EARLIER = """
2026-09-16 10:00:00+02:00 | 2026-09-16T08:30:00Z
2026-09-16T01:00:00 | 2026-09-16 23:00:00
2026-09-16T12:00:00.5Z | 2026-09-16T12:00:01Z
20260101 | 2026-12-01
2026-9-30 | 2026-10-2
2026-09-16 | 20260916083000
Wed, 01 Jan 2025 00:00:00 GMT | Wed, 16 Sep 2026 00:00:00 GMT
2026-09-16T23:30:00-02:00 | 2026-09-17T02:00:00
"""


@pytest.mark.parametrize("early, late", table(EARLIER))
def test_the_last_snapshot_is_the_latest_in_time(tmp_path, early, late):
    for early_ban in (True, False):
        rows = [(early, early_ban), (late, not early_ban)]
        rows = [dict(domain="a.org", date=date, content="User-agent: *\nDisallow: /" * ban) for date, ban in rows]
        for order in (rows, rows[::-1]):
            store = open_robots(write_lines(tmp_path / "s.jsonl", order), "last")
            assert verdict("a.org/x", store)[0] == early_ban


@pytest.mark.parametrize("date", ["Jan 31", "16.09.2026", "2026-13-01", "Someday, 2026", 20261301])
def test_the_date_of_a_snapshot_is_a_date(tmp_path, date):
    rows = [dict(domain="a.org", content="", date=date)]
    with pytest.raises(ValueError, match=f"a.org has the date {date!r}: want a date such as 2026-01-31"):
        open_robots(write_lines(tmp_path / "s.jsonl", rows))


def test_files_of_a_mirror_are_read_wherever_they_lie_and_the_others_are_named(tmp_path):
    """A file may be compressed. A folder of a day holds the snapshots of that day."""
    ban = "User-agent: *\nDisallow: /"
    put(
        tmp_path,
        {
            "a.org/robots.txt.gz": gzip.compress(ban.encode()),
            "b.org.txt.gz": gzip.compress(ban.encode()),
            "2026-09/c.org/robots.txt": ban,
            "d.org/Robots.TXT": ban,
            "e.org:8443/robots.txt": ban,
            "f.org/tdmrep.json": RESERVES,
            "g.org/.well-known/tdmrep.json.gz": gzip.compress(RESERVES.encode()),
            "h.org/.well-known/ai.txt": AI_TXT,
            "i.org/ai/terms.xml": LICENCE.format("/"),
            "j.org/sitemap.xml": "<urlset/>",
            "robots.txt": ban,
            "README.md": "",
        },
    )
    robots = open_robots(tmp_path)
    assert set(robots) == {"a.org", "b.org", "c.org", "d.org", "e.org:8443"}
    assert sum(map(len, robots.ignored.values())) == 7
    store = open_reservations(tmp_path)
    assert {file: [key for key in store[file] if "/" not in key] for file in FILES} == {
        "tdmrep.json": ["f.org", "g.org"],
        "ai.txt": ["h.org"],
        "license.xml": ["i.org"],
    }
    assert {name for names in store["ai.txt"].ignored.values() for name in names} == {
        "README.md",
        "a.org/robots.txt.gz",
        "b.org.txt.gz",
        "d.org/Robots.TXT",
        "e.org:8443/robots.txt",
        "2026-09/c.org/robots.txt",
        "j.org/sitemap.xml",
        "robots.txt",
    }


def test_agents_may_share_a_line_and_those_of_2026_are_more_than_those_of_apertus(tmp_path):
    (tmp_path / "agents").write_text("Some, Mine # two\nOther\nUser-agent: Zap\n")
    assert agents_of(str(tmp_path / "agents")) == ["Some", "Mine", "Other", "Zap"]
    assert agents_of("") == AGENTS
    assert {*AGENTS, "DeepSeekBot", "anthropic-ai", "img2dataset"} < {*agents_of("2026")}
    ban = "User-agent: DeepSeekBot\nDisallow: /"
    assert [may_train_on("a.org/x", ban, agents_of(of))[0] for of in ("", "2026")] == [True, False]
    # Each is an agent of ai.robots.txt or of Apertus.
    if not os.path.exists(AI_ROBOTS):
        pytest.skip("shared/data is not there")
    with open(AI_ROBOTS) as f:
        known = {name.lower() for name in [*AGENTS, *json.load(f)]}
    assert {agent.lower() for agent in agents_of("2026")} <= known


def test_a_file_with_rules_behind_its_first_500_kib_is_not_fully_read():
    long = "User-agent: *\n" + "# \n" * 200_000
    for end, marks in (("Disallow: /", {"cut"}), ("# Disallow: /", set())):
        store = dict(store={"a.org": long + end})
        assert judge_document(dict(url="a.org/x"), store) == (None, marks)
        assert refusal(dict(url="a.org/x"), store | dict(missing="deny")) == max(marks, default=None)
        of_ai_txt = judge_document(dict(url="a.org/x"), None, {"ai.txt": store["store"]})
        assert of_ai_txt == (None, {"ai-unread"} if marks else set())


# ----------------------------------------------------------------------------------------------------------------------
# RSL

# The guide of rslstandard.org, "Template: Prohibit AI training", as printed, with curly quotes.
GUIDE = """<rsl xmlns="https://rslstandard.org/rsl">
<content url=\u201d/\u201d>
<license>
<prohibits type="usage">train-ai</prohibits>
</license>
</content>
</rsl>"""
LICENCE = """<?xml version="1.0"?><rsl xmlns="https://rslstandard.org/rsl"><content url="{}"><license>
<prohibits type="usage">ai-train</prohibits></license></content></rsl>"""
# Places of <content url>, uses that a licence prohibits (-) or permits (+) there and the kind of payment ($); the path
# of a page; the reason, and the marks. Sections are those of RSL 1.0: 3.3.1 places match as in RFC 9309; 3.4.1
# the uses; 3.5 and 3.6 spaces between uses (commas in drafts); 3.1.1 a prohibition wins over a permission, also that of
# a narrower place.
LICENCES = """
url="/" -ai-train | /x | rsl:/ |
url="/" -ai-all | /x | rsl:/ |
url="/" -search all | /x | rsl:/ |
url="/" -search,train-ai | /x | rsl:/ |
url="/" -search ai-input | /x | None |
url="/y" -all | /x | None |
url="/x/*.pdf$" -all | /x/y.pdf | rsl:/x/*.pdf$ |
url="/x/*.pdf$" -all | /x/y.pdf?z | None |
url="https://a.org/x" -all | /x | rsl:/x |
url="https://www.a.org/x*" -all | /x | rsl:/x* |
url="https://b.org/x" -all | /x | None |
url="" -all | /x | rsl:/ |
-all | /x | rsl:/ |
url="/" +ai-train | /x | None |
url="/" +search | /x | None | rsl-terms
url="/" +ai-train $training | /x | None | rsl-terms
url="/" +all $free | /x | None |
url="/" -all; url="/x" +ai-train | /x | rsl:/ |
"""


def licence_of(line):
    """The <content> elements of a line of LICENCES."""
    elements = []
    for content in line.split(";"):
        url, terms = re.fullmatch(r"\s*(url=\S*)?(.*)", content).groups()
        terms = re.sub(r"-([^+$-][^+$]*)", r'<prohibits type="usage">\1</prohibits>', terms)
        terms = re.sub(r"\+([^$<]*)", r'<permits type="usage">\1</permits>', terms)
        terms = re.sub(r"\$(\w+)", r'<payment type="\1"/>', terms)
        elements.append(f"<content {url or ''}><license>{terms}</license></content>")
    return "".join(elements)


@pytest.mark.parametrize("contents, path, reason, mark", table(LICENCES))
def test_a_licence_that_prohibits_training_removes_the_pages_of_its_place(contents, path, reason, mark):
    """In a namespace of its own, with or without a prefix, and in a feed of RSS."""
    contents = licence_of(contents)
    space = 'xmlns="https://rslstandard.org/rsl"'
    prefixed = re.sub("<(/?)(content|license|permits|prohibits|payment)", r"<\1rsl:\2", contents)
    files = [f"<rsl {space}>{contents}</rsl>", f"<?xml version='1.0' encoding='utf-8'?>\n<RSL>{contents}</RSL>"]
    files.append(f'<rss xmlns:rsl="{space[7:-1]}"><channel>{prefixed}</channel></rss>')
    for file in files:
        for content in (file, file.encode(), "\ufeff" + file):
            found = judge_document(dict(url=f"https://a.org{path}"), None, {"license.xml": {"a.org": content}})
            assert found == (None if reason == "None" else reason, {mark} - {""})


def test_the_template_of_the_guide_is_read_as_it_was_printed_and_other_limits_are_not_about_training():
    store = {"license.xml": {"a.org": GUIDE}}
    assert reservation(dict(url="a.org/x"), store) == "rsl:/"
    store["license.xml"]["a.org"] = GUIDE.replace('"usage"', '"geo"').replace("train-ai", "all")
    assert reservation(dict(url="a.org/x"), store) is None


# What names a licence, and its URL. Links to other licences are for people.
NAMED = """
{"robots": "License: https://l.org/a.xml"} | https://l.org/a.xml
{"robots": "User-agent: *\\nLICENSE : /rsl\\nDisallow: /z"} | https://a.org/rsl
{"robots": "License: //l.org/b?id=1"} | https://l.org/b?id=1
{"robots": "License: license.xml # ours"} | https://a.org/license.xml
{"headers": {"Link": "<https://l.org/a>; rel=\\"license\\"; type=\\"application/rsl+xml\\""}} | https://l.org/a
{"headers": {"Link": "</a.css>; rel=preload, <l.xml>; rel=license"}} | https://a.org/b/l.xml
{"Link": "</rsl>; rel=\\"license nofollow\\""} | https://a.org/rsl
{"links": [{"rel": "license", "href": "/l.xml", "type": "application/rsl+xml"}]} | https://a.org/l.xml
{"links": [["license", "/l.xml"], ["icon", "/i.png"]]} | https://a.org/l.xml
{"links": "[{\\"rel\\": \\"license\\", \\"href\\": \\"https://l.org/rsl.xml\\"}]"} | https://l.org/rsl.xml
{"metas": [{"rel": "license", "href": "/rsl.xml"}, {"name": "x", "content": "y"}]} | https://a.org/rsl.xml
{"links": [{"rel": "license", "href": "https://creativecommons.org/licenses/by/4.0/"}]} | None
{"headers": {"Link": "<https://creativecommons.org/licenses/by/4.0/>; rel=license"}} | None
{"links": [{"REL": "license", "Href": "/l.xml"}]} | https://a.org/l.xml
{"headers": {"Link": "https://l.org/a; rel=license; type=application/rsl+xml"}} | https://l.org/a
{"link": "<a.css>; rel=preload, //l.org/a.xml ; rel=\\"license\\""} | https://l.org/a.xml
"""


@pytest.mark.parametrize("said, licence", table(NAMED))
def test_a_licence_that_is_named_is_read_and_without_its_file_unknown(tmp_path, said, licence):
    doc = dict(url="https://a.org/b/c") | json.loads(said)
    robots = dict(store={"a.org": doc.pop("robots", "")})
    unknown = judge_document(doc, robots)
    assert ("rsl-unknown" in unknown[1]) == (licence != "None") and unknown[0] is None
    assert refusal(doc, robots | dict(missing="deny")) == ("rsl-unknown" if licence != "None" else None)
    for content, reason in (
        (LICENCE.format("/b/"), "rsl:/b/"),
        (LICENCE.format("/x"), None),
        ("<html>", "rsl-unknown"),
    ):
        rows = [dict(domain="l.org", file=licence, content=content), dict(domain="z.org", file="ai.txt", content="")]
        store = open_reservations(write_lines(tmp_path / "s.jsonl", rows[licence == "None" :]))
        want = reason if licence != "None" else None
        assert refusal(doc, robots | dict(missing="deny"), store) == want
        assert refusal(doc, robots, store) == (want if want != "rsl-unknown" else None)


def test_another_or_an_empty_licence_does_not_stand_for_one_that_is_named(tmp_path):
    """Named by robots.txt, the header Link, or <link>; an own license.xml that is empty says nothing either."""
    line, far = "License: https://l.org/a.xml", "https://l.org/a.xml"
    named = [
        (dict(), line),
        (dict(headers=dict(Link=f'<{far}>; rel="license"')), ""),
        (dict(links=[["license", far]]), ""),
        (dict(), "License: /license.xml"),
    ]
    for content in ("", LICENCE.format("/elsewhere")):
        rows = [dict(domain="a.org", file="license.xml", content=content)]
        store = open_reservations(write_lines(tmp_path / "s.jsonl", rows))
        for doc, robots in named[: 3 if content else 4]:
            found = judge_document(dict(url="https://a.org/x") | doc, dict(store={"a.org": robots}), store)
            assert found[0] is None and "rsl-unknown" in found[1]


def test_two_licences_of_a_host_are_no_snapshots_of_one_file(tmp_path):
    """So both count with --snapshots=last, in any order of the rows."""
    rows = [dict(domain="a.org", file=name, content=LICENCE.format(f"/{name[0]}")) for name in ("a.xml", "b.xml")]
    rows.append(dict(domain="a.org", file="https://l.org/c.xml", content=LICENCE.format("/c")))
    for order in (rows, rows[::-1]):
        store = open_reservations(write_lines(tmp_path / "s.jsonl", order), "last")
        found = [judge_document(dict(url=f"https://a.org/{place}"), None, store) for place in "abcd"]
        assert found == [("rsl:/a", set()), ("rsl:/b", set()), ("rsl:/c", set()), (None, set())]
        assert not store["license.xml"].several


# Values of a row in shapes that are not read, and are counted as unread.
UNREAD = r"""
{"headers": "{'X-Robots-Tag': 'noai'}"}
{"headers": "HTTP/1.1 200 OK\\r\\nX-Robots-Tag: noai"}
{"headers": "X-Robots-Tag=noai"}
{"headers": "{\"X-Robots-Tag\": \"no"}
{"headers": [["X-Robots-Tag"]]}
{"headers": ["X-Robots-Tag", "noai"]}
{"headers": [{"n": "X-Robots-Tag", "v": "noai"}]}
{"headers": {"X-Robots-Tag": {"0": "noai"}}}
{"headers": {"X-Robots-Tag": [["noai"]]}}
{"headers": [["X-Robots-Tag", "noindex"], 5]}
{"headers": 5}
{"metas": "<meta name='robots' content='noai'>"}
{"metas": [{"name": "robots", "directives": "noai"}]}
{"metas": [["robots", "noindex", "noai"]]}
{"X-Robots-Tag": {"a": "noai"}}
{"tdm_reservation": "reserved"}
{"links": "<link rel=license href=https://b.org/license.xml>"}
{"links": ["https://b.org/license.xml"]}
{"links": 5}
{"links": [{"url": "https://b.org/license.xml"}]}
{"link": "https://b.org/license.xml"}
{"headers": {"Link": "b.org/license.xml rel=license"}}
{"headers": {"X-Robots-Tag": true}}
{"x_robots_tag": 1}
{"metas": [{"name": ["robots"], "content": ["noai"]}]}
{"metas": [["robots", "index"], [["robots"], "noai"]]}
{"headers": "b'X-Robots-Tag: noai'"}
{"headers": ["b'X-Robots-Tag: noai'"]}
{"headers": {"b'X-Robots-Tag'": "b'noai'"}}
"""


@pytest.mark.parametrize("said", [line for line in UNREAD.strip().splitlines()])
def test_what_cannot_be_read_is_unread_and_not_known(said):
    doc = json.loads(said) | dict(url="https://a.org/x")
    assert judge_document(doc) in [(None, {"unread"}), (None, {"unread", "known"})]
    assert refusal(doc, dict(store={"a.org": ""}, missing="deny")) == "unread"


def test_an_ai_txt_that_is_none_and_a_licence_of_a_page_without_a_url_are_unknown():
    store = {"ai.txt": {"a.org": "Please do not train on us."}}
    assert judge_document(dict(url="a.org/x"), None, store) == (None, {"ai-unread"})
    assert refusal(dict(url="a.org/x"), dict(store={"a.org": ""}, missing="deny"), store) == "ai-unread"
    assert judge_document(dict(url=None, links=[["license", "https://a.org/rsl.xml"]])) == (None, {"rsl-unknown"})


def test_a_tdmrep_json_that_cannot_be_read_is_unknown():
    for content in ("{", "[5]", '[{"location": "/x"}]', '[{"location": ["/"], "tdm-reservation": 1}]', "<html>"):
        store = {"tdmrep.json": {"a.org": content}}
        assert judge_document(dict(url="a.org/x"), None, store) == (None, {"tdm-unread"})
        assert refusal(dict(url="a.org/x"), dict(store={"a.org": ""}, missing="deny"), store) == "tdm-unread"
        # A page that says 0 itself is exempt.
        assert judge_document(dict(url="a.org/x", tdm_reservation=0), None, store) == (None, {"known"})


def test_a_file_that_was_not_fetched_is_unknown_and_one_that_the_store_lacks_is_not(tmp_path):
    """As of robots.txt, a file of an earlier day counts when the fetch of a later one has failed."""
    rows = [dict(domain=f"{mark}.org", file=file, content=None) for mark, file in zip(("tdm", "ai", "rsl"), FILES)]
    rows += [dict(domain="b.org", file=file, content=content) for file in FILES for content in ("", None)]
    rows += [dict(domain="two.org", file=f"/{name}.xml", content=content) for name, content in (("a", ""), ("b", None))]
    store = open_reservations(write_lines(tmp_path / "s.jsonl", rows))
    deny = dict(
        store=dict.fromkeys(("tdm.org", "www.ai.org", "rsl.org", "two.org", "b.org", "c.org"), ""), missing="deny"
    )
    for host, marks in (
        ("tdm.org", {"tdm-unknown"}),
        ("www.ai.org", {"ai-unknown"}),
        ("rsl.org", {"rsl-unknown"}),
        ("two.org", {"rsl-unknown"}),
        ("b.org", set()),
        ("c.org", set()),
    ):
        doc = dict(url=f"https://{host}/x")
        assert judge_document(doc, None, store) == (None, marks)
        assert refusal(doc, deny, store) == (max(marks) if marks else None)
    assert judge_document(dict(url="https://tdm.org/x", tdm_reservation=0), None, store) == (None, {"known"})


def test_reservations_are_rows_or_a_mirror_of_hosts(tmp_path):
    files = ("www.a.org", "tdmrep.json", RESERVES), ("b.org", "/ai.txt", AI_TXT), ("c.org", "ai.txt", None)
    rows = [dict(zip(("domain", "file", "content"), file)) for file in files]
    put(tmp_path / "mirror", {"a.org/.well-known/tdmrep.json": RESERVES, "b.org/ai.txt": AI_TXT})
    for path in (write_lines(tmp_path / "store.jsonl", rows), tmp_path / "mirror"):
        store = open_reservations(path)
        found = [refusal(dict(url=f"https://{host}/x.txt"), None, store) for host, *_ in files]
        assert found == ["tdm-file:/", "ai-txt:*:*.txt", None]
