"""Opt-outs against RFC 9309, Google's documentation, the drafts of AIPREF, TDMRep, datadiligence and Protego."""
import gzip
import json
import os

import pytest

from conftest import ROOT, refused, script
from corpus.robots import (AGENTS, blocked_domains, host_key, known, may_train_on, open_reservations,
                           open_robots, parse_tdmrep, refusal, reservation, verdict)

ROBOTS_2019 = os.path.join(ROOT, "..", "shared", "data", "robots_2019_top10k.jsonl.gz")


def allowed(robots, agent, path):
    return may_train_on("https://example.com" + path, robots, (agent,))[0]


def write(path, rows):
    """Rows as JSON lines, or in the format that the file's name asks for."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
        return
    if path.suffix == ".zst":
        text = pytest.importorskip("zstandard").compress(text)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


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
# agent, the paths that it may read, those that it may not
RFC_VERDICTS = """
anybot     / /a.gif?x /publications/x                       /example/ /a.gif
foobot     /example/page.html /example/allowed.gif          / /publications/
FooBot/2.1 /example/page.html                               /
barbot     /a.gif                                           /example/page.html
bazbot     /a.gif                                           /example/page.html
quxbot     /example/ /a.gif                                 -
"""


def test_rfc_9309_example():
    for line in RFC_VERDICTS.strip().splitlines():
        agent, rest = line.split(maxsplit=1)
        yes, no = (part.split() for part in rest.split("     ", 1))
        assert all(allowed(RFC_5_1, agent, path) for path in yes), line
        assert not any(allowed(RFC_5_1, agent, path) for path in no if path != "-"), line


# RFC 9309 sec. 2.2.2 and 2.2.3: a rule, a path, and whether they are the same; special characters meant literally.
ENCODED = """
/foo/bar?baz=quz /foo/bar?baz=quz yes
/foo/bar/\u30c4 /foo/bar/%E3%83%84 yes
/foo/bar/%E3%83%84 /foo/bar/\u30c4 yes
/foo/bar/%e3%83%84 /foo/bar/%E3%83%84 yes
/foo/bar/%62%61%7A /foo/bar/baz yes
/~x /%7Ex yes
/%7ex /~x yes
/foo/bar?baz=https://foo.bar /foo/bar?baz=https://foo.bar yes
/a%2Fb /a/b no
/file-with-a-%2A.html /file-with-a-*.html yes
/file-with-a-%2A.html /file-with-a-b.html no
/path/foo-%24 /path/foo-$ yes
/path/foo-%24 /path/foo- no
/a$b /a$b yes
"""


def test_rfc_9309_encoding():
    for line in ENCODED.strip().splitlines():
        rule, path, match = line.split()
        assert allowed(f"User-agent: *\nDisallow: {rule}", "x", path) == (match == "no"), line


# Google's documentation, "URL matching based on path values": a rule, paths that match | other paths.
GOOGLE = """
/          / /x /x?y |
/$         / | /x /x?y /?
/fish      /fish /fish.html /fish/salmon.html /fishheads/yummy.html /fish.html?id=any | /Fish.asp /catfish /?id=fish
/fish*     /fish /fish.html /fish/salmon.html /fishheads/yummy.html /fish.html?id=any | /Fish.asp /catfish /?id=fish
/fish/     /fish/ /fish/?id=any /fish/salmon.htm | /fish /fish.html /animals/fish/ /Fish/Salmon.asp
/*.php     /index.php /folder/filename.php?parameters /folder/any.php.file.html /filename.php/ | / /windows.PHP /php/
/*.php$    /filename.php /folder/filename.php | /filename.php?parameters /filename.php/ /filename.php5 /windows.PHP
/fish*.php /fish.php /fishheads/catfish.php?parameters | /Fish.PHP
/*?        /a? /a?b /? | /a /
*/b        /b /a/b /a/b/c | /ab /a
fish       | /fish
/a*a*a$    /aaa /axaxa /aaaa | /aa /axa /aab
/**a       /a /ba | /b
"""


def test_google_path_table():
    for line in GOOGLE.strip().splitlines():
        rule, paths = line.split(maxsplit=1)
        yes, no = (part.split() for part in paths.split("|"))
        robots = f"User-agent: *\nDisallow: {rule}\n"
        assert not any(allowed(robots, "x", path) for path in yes), line
        assert all(allowed(robots, "x", path) for path in no), line


# The same page, "Order of precedence for rules": of conflicting rules the longest, and then the least restrictive.
PRECEDENCE = """
allow: /p, disallow: / > /page yes
allow: /folder, disallow: /folder > /folder/page yes
allow: /page, disallow: /*.htm > /page.htm no
allow: /page, disallow: /*.ph > /page.php5 yes
allow: /$, disallow: / > / yes
allow: /$, disallow: / > /page.htm no
disallow: /x, allow: /x/ > /x no
disallow: /x, allow: /x/ > /x/ yes
allow: /x/, disallow: /x/y.gif > /x/y.gif no
disallow:, allow: > /x yes
disallow:, disallow: /y > /x yes
allow:, disallow: / > /x no
disallow: / > /robots.txt yes
"""


def test_google_precedence():
    for line in PRECEDENCE.strip().splitlines():
        rules, _, rest = line.partition(" > ")
        path, want = rest.split()
        assert allowed("user-agent: FooBot\n" + rules.replace(", ", "\n"), "FooBot", path) == (want == "yes"), line


# RFC 9309 sec. 2.2.1 and 2.2.4, and two leniencies of Google's parser: a file with ; for line breaks, and whether agent
# a may read /z.
GROUPS = """
User-agent: a;Disallow: /x;;User-agent: b;Disallow: /y;;User-agent: a;Disallow: / > no
User-agent: a;;;User-agent: b;Disallow: / > no
User-agent: a;Crawl-delay: 3;Sitemap: /s;User-agent: b;Disallow: / > no
Disallow: /;User-agent: a;Disallow: /y > yes
User-agent: *;Disallow: /;User-agent: a;Allow: / > yes
User-agent: *;Disallow: /;User-agent: a > yes
User-agent: A # theirs;Disallow: / # all > no
USER-AGENT:A;DISALLOW:/ > no
User-agent: a/1.0;Disallow: / > no
User-agent: a-b;Disallow: / > yes
User-agent: a b;Disallow: / > no
user-agent a;disallow / > no
useragent: a;dissalow: / > no
\ufeffUser-agent: *;Disallow: / > no
# nothing > yes
"""


def test_groups_in_any_encoding_and_with_any_line_breaks():
    for line in GROUPS.strip().splitlines():
        text, want = line.split(" > ")
        contents = [text.replace(";", end) for end in ("\n", "\r", "\r\n")]
        for content in [*contents, contents[0].encode("utf-16"), contents[1].encode() + b"\r# \xff"]:
            assert allowed(content, "a", "/z") == (want == "yes"), content


def test_star_is_one_of_the_agents_and_explicit_asks_only_who_is_named():
    welcome = "User-agent: *\nDisallow: /private\n\n" + "".join(f"User-agent: {a}\n" for a in AGENTS[:-1]) + "Allow: /"
    url, named = "https://a.org/private", AGENTS[:-1]
    assert len(AGENTS) == 15 and may_train_on(url, welcome) == (False, "robots:*:/private")
    assert may_train_on(url, welcome, named) == (True, "allowed")
    silent = "User-agent: *\nDisallow: /private\nUser-agent: GPTBot\nDisallow: /gpt"
    # RFC 9309: an agent that is not named is `*`.
    assert may_train_on(url, silent, named) == (False, "robots:AI2Bot:/private")
    assert may_train_on(url, silent, named, explicit=True) == (True, "allowed")
    # A named agent is reported before `*`.
    assert may_train_on(url, silent + "\nDisallow: /p", AGENTS[::-1]) == (False, "robots:GPTBot:/p")
    assert may_train_on("https://a.org/gpt", silent, named, explicit=True) == (False, "robots:GPTBot:/gpt")


def test_500_kib_are_read_up_to_a_whole_line():
    head = "User-agent: *\n"
    filler = "# " + "x" * 97 + "\n"
    early = head + "Disallow: /early\n" + filler * 5200 + "Disallow: /late\n"
    assert len(early) > 500 * 1024 and not allowed(early, "a", "/early") and allowed(early, "a", "/late")
    # The limit is after the "/" of /private.
    cut = (head + filler * 5119).ljust(500 * 1024 - len("\nDisallow: /"), " ") + "\n"
    assert allowed(cut + "Disallow: /private/diary\n", "a", "/public")


def test_hostile_rules_and_urls_take_linear_time():
    """A matcher that backtracks would take exponential time."""
    rule, path = "/" + "*a" * 2000 + "*b$", "/" + "a" * 50_000
    robots = f"User-agent: *\nDisallow: {rule}\n"
    assert allowed(robots, "x", path) and not allowed(robots, "x", path + "b")
    assert len(parse_tdmrep(json.dumps([{"location": rule, "tdm-reservation": 1}]))) == 1
    spaces = " " * 50_000
    assert may_train_on("https://a.org/", spaces + "\n" + spaces) == (True, "allowed")
    assert reservation(dict(x_robots_tag=f"{spaces}noai{spaces}x", content_usage=f"train-ai={spaces}n")) is None


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
"""
NO_HOSTS = ["mailto:a@b.org", "http://", "http://a b/", "http://a..b/", "http://[::1", "http://a.b:x/", "just words",
            "", None, float("nan"), ["a.org"]]


def test_hosts_are_those_of_the_url_and_of_the_idna_library():
    for line in HOSTS.strip().splitlines():
        url, host = line.split()
        assert host_key(url) == host
    assert [url for url in NO_HOSTS if host_key(url) is not None] == []
    for url in ("https://a.org", "https://a.org?x", "https://a.org#x", "a.org"):
        # RFC 3986 sec. 6.2.3: without a path it is the root.
        rule = "/?" if "?" in url else "/$"
        assert may_train_on(url, "User-agent: *\nDisallow: /$\nDisallow: /?")[1] == f"robots:*:{rule}"
    idna = pytest.importorskip("idna")
    for name in ("fa\u00df.de", "\u03b2\u03cc\u03bb\u03bf\u03c2.com", "\u0645\u062b\u0627\u0644.example",
                 "\u0440\u0444.\u0440\u0444", "\ud55c\uad6d.kr", "A\u0300.org"):
        assert host_key(f"https://{name}/") == idna.encode(name, uts46=True).decode()


# The example of draft-ietf-aipref-attach-05 sec. 3.4.
PREFERENCES = """
User-Agent: *
Allow: /
Disallow: /never/
Content-Usage: train-ai=n
Content-Usage: /ai-ok/ train-ai=y

User-Agent: ExampleBot
Allow: /
Content-Usage: train-ai=y
"""
# Its table: agent, path, reason.
DRAFTS_TABLE = """
* /test usage-file:*:/
* /never/test robots:*:/never/
* /ai-ok/test allowed
ExampleBot /test allowed
ExampleBot /never/test allowed
OtherBot /test usage-file:OtherBot:/
"""
# Lines for *, with ; for line breaks, and the reason for /a/b: Cloudflare's; two for one path, of which n wins; the
# longest path, even without a word on training; wildcards; and a preference ends the user-agent lines of a group.
LINES = """
Content-signal: search=yes,ai-train=no;Allow: / > usage-file:*:/
Content-Signal: search=yes, ai-train=yes, ai-input=no > allowed
content-usage : /a\ttrain-ai=y # yes;CONTENT-USAGE:/a train-ai=n # no > usage-file:*:/a
Content-Usage: /a\ttrain-ai=n;Content-Usage: /a train-ai=y > usage-file:*:/a
Content-Usage: train-ai=n;Content-Usage: /a search=n > allowed
Content-Usage: /*/b$ train-ai=n > usage-file:*:/*/b$
Content-Usage: /*/b/c$ train-ai=n > allowed
Content-Usage: > allowed
# Content-Usage: train-ai=n > allowed
Content-Usage: train-ai=y;User-agent: none;Disallow: / > allowed
"""


def test_preferences_are_those_of_the_drafts_table():
    for line in DRAFTS_TABLE.strip().splitlines():
        agent, path, reason = line.split()
        assert may_train_on("https://a.org" + path, PREFERENCES, (agent,))[1] == reason
    # explicit is about reading only.
    assert may_train_on("https://a.org/test", PREFERENCES, ("OtherBot",), True)[1] == "usage-file:OtherBot:/"
    for line in LINES.strip().splitlines():
        lines, reason = line.split(" > ")
        assert may_train_on("https://a.org/a/b", "User-agent: *\n" + lines.replace(";", "\n"))[1] == reason, line


# To Protego a group of Applebot holds for Applebot-Extended, and a Crawl-delay ends the user-agent lines of a group.
DIFFER = {"bgp.he.net", "www.avsforum.com", "www.vwvortex.com", "www.wordreference.com",
          "bitbucket.org", "www.eventbrite.com", "www.khaleejtimes.com"}


def test_real_files_are_decided_as_protego_does_but_for_seven():
    """A tenth of 4,231 files of 2019, and the seven of all of them that are decided otherwise."""
    if not os.path.exists(ROBOTS_2019):
        pytest.skip("shared/data is not there")
    Protego = pytest.importorskip("protego").Protego
    with gzip.open(ROBOTS_2019, "rt", encoding="utf-8") as lines:
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

ROBOTS = [{"domain": "Example.com", "content": "User-agent: GPTBot\nDisallow: /no\nContent-Usage: /use train-ai=n"},
          {"domain": "null.org", "content": None},
          {"domain": "https://www.b\u00fccher.example/", "content": "User-agent: *\nDisallow: /"},
          {"domain": "page.net", "content": "<html>"}]
# A URL and its outcome; those with a ! are dropped if a missing file means no.
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
http://other.co.uk/ drop:blocked-domain:other.co.uk
"""


@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz", "s.jsonl.zst", "s.parquet", "folder"])
def test_a_store_in_every_form_gives_the_same_outcomes(name, tmp_path):
    path = tmp_path / name
    if name == "folder":
        (path / "www.xn--bcher-kva.example").mkdir(parents=True)
        (path / "example.com.txt").write_text(ROBOTS[0]["content"])
        (path / "www.xn--bcher-kva.example" / "robots.txt").write_text(ROBOTS[2]["content"])
        write(path / "more.jsonl", ROBOTS[3:])
    else:
        write(path, ROBOTS)
    (tmp_path / "blocked.txt").write_text("# list\nBad.com\n\nwww.other.co.uk # why\n")
    write(tmp_path / "blocked.jsonl", [{"domain": "Bad.com", "why": "#7"}, {"domain": "www.other.co.uk", "why": "#8"}])
    blocked = blocked_domains(tmp_path / "blocked.txt")
    assert blocked == blocked_domains(tmp_path / "blocked.jsonl")
    store = open_robots(str(path))
    assert len(store) == 3
    for line in OUTCOMES.strip().splitlines():
        url, outcome, *silent = line.split()
        strict = outcome.replace("kept", "drop") if silent else outcome
        assert verdict(url, store, blocked=blocked) == outcome
        assert verdict(url, store, blocked=blocked, missing="deny") == strict
        why = refusal(dict(url=url), dict(store=store, blocked=blocked, missing="deny"))
        assert why == (strict[5:] if strict.startswith("drop") else None)
    assert verdict(None, store, missing="deny") == verdict("", store) == "kept:no-url"
    hosts = {host: known(host, store) for host in ("example.com", "www.page.net", "null.org")}
    assert hosts == {"example.com": "with", "www.page.net": "unparsable", "null.org": "without"}
    assert known("example.com", None) == "without"


def test_files_that_are_no_robots_txt_are_unparsable():
    for content in ("<html><body>User-agent: *\nDisallow: /", "\ufeff \n<!DOCTYPE html>", "Not found", "Disallow: /"):
        assert may_train_on("https://a.org/x", content) == (True, "unparsable")
    for content in ("", "# none", "Sitemap: https://a.org/s.xml", "# x\n\n sitemap: /s\nother"):
        assert may_train_on("https://a.org/x", content) == (True, "allowed")


@pytest.mark.parametrize("name, content, message", [
    ("s.jsonl", b"", "no robots.txt in it"),
    ("s.jsonl", b'{"host": "a.org", "text": "x"}\n', "content or robots; it has host, text"),
    ("s.parquet", b"PAR1 not really", "damaged"),
    ("s.csv", b"a,b", "or a folder of"),
])
def test_a_bad_store_raises_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        open_robots(tmp_path / name)


def test_the_command_prints_each_agent_and_the_rule(tmp_path):
    (tmp_path / "robots.txt").write_text("User-agent: GPTBot\nDisallow: /a\n")
    done = script("corpus.robots", "https://example.com/a", f"--robots={tmp_path / 'robots.txt'}")
    out = done.stdout.splitlines()
    assert len(out) == 16 and out[-1] == "drop:robots:GPTBot:/a"
    assert [line.split()[0] for line in out[:-1] if "refused by" in line] == ["GPTBot"]
    refused(script("corpus.robots", "https://example.com/a", "--robots=nowhere.txt"), "nowhere.txt")
    (tmp_path / "words.txt").write_text("the\nquick\n")
    with pytest.raises(ValueError, match="'the', 'quick'"):
        blocked_domains(tmp_path / "words.txt")
    with pytest.raises(ValueError, match="missing='no'"):
        verdict("https://a.org/", missing="no")


# ----------------------------------------------------------------------------------------------------------------------
# other reservations

# datadiligence 0.1.7 (Spawning) allows these headers, without an agent and as GPTBot, and rejects those after the |.
X_ROBOTS = """; noindex; other, noindex; GPTBot: all; somebot: noai; :,; :, :, ,: -:: ; none; noindex, nofollow;
demobot: noai, examplebot: noai, GPTBot: all | noai; noimageai; other, noai; GPTBot: noai; GPTBot:noai;
other, GPTBot: noimageai; all, noai"""
TDM = {"": None, "0": None, "1": "tdm-header", "other": None, "2": None, " 1": "tdm-header"}
# The dictionary of http-sf 1.5.0 (RFC 9651) has the token n for train-ai in these, and not in those after the |.
USAGE = r"""train-ai=n /
train-ai=n, search=y / search=y, train-ai=n;x="1;2" /   train-ai=n;a=1;b / train-ai=y,train-ai=n
| train-ai=n, train-ai=y / train-ai;allow=n, train-ai=y / train-ai=y, train-ai, search=n, search="n" /
train-ai;has;parameters="?"; / search=n / train-ai / train-ai="n" / train-ai=N / train-ai=no /
train-ai=?0 / train-ai=n x / train-ai=(n) / Train-AI=n / train-ai = n / x-train-ai=n / n /"""


def test_headers_are_read_as_by_the_reference_libraries():
    yes, no = (part.split(";") for part in X_ROBOTS.split("|"))
    for said in yes + no:
        for doc in (dict(x_robots_tag=said), dict(headers={"X-Robots-Tag": said}), dict(metas=[("Robots", said)])):
            assert (reservation(doc) is None) == (said in yes), doc
    for said, want in TDM.items():
        assert reservation(dict(tdm_reservation=said)) == want
        assert reservation(dict(headers=f"Content-type: text/html\r\nTDM-Reservation: {said}\r\n")) == want
    n, others = (part.split(" /") for part in USAGE.split("|"))
    for said in n + others:
        for doc in (dict(content_usage=said), dict(headers={"Content-Usage": said})):
            assert reservation(doc) == ("usage-header" if said in n else None), doc


# A document's statements and its reason, in JSON. Directives in any case; an agent's <meta>; draft-ietf-aipref-vocab-07
# sec. 5.1: no other preference withdraws one. Cloudflare's word; headers in any form (RFC 9110 sec. 5.3); numbers
# as pandas writes them; no headers at all.
STATEMENTS = """
{"x_robots_tag": "noindex, NOML"} noml
{"metas": [["gptbot", "nofollow, noimageai"]]} noimageai
{"metas": [["googlebot", "noai"], ["", "noai"]]} None
{"headers": {"Content-Usage": "train-ai=n"}, "content_usage": "train-ai=y"} usage-header
{"headers": {"Content-Signal": "search=yes, ai-train=no, ai-input=no"}} usage-header
{"headers": {"Content-Signal": "search=no, ai-train=yes, ai-input=no"}} None
{"headers": "HTTP/1.1 200 OK\\r\\nX-Robots-Tag: noindex\\r\\nx-robots-tag : noai\\r\\n"} noai
{"headers": [["X-Robots-Tag", "noai"]]} noai
{"headers": {"X-Robots-Tag": ["noindex", "noai"]}} noai
{"headers": "[[\\"x-robots-tag\\", \\"noai\\"]]"} noai
{"headers": "{\\"x-robots-tag\\": \\"noai\\"}"} noai
{"headers": [1, ["x"], null], "url": 5} None
{"headers": "{", "url": ["x"]} None
{"headers": "5"} None
{"tdm_reservation": 1.0} tdm-header
{"tdm_reservation": 0.0} None
{"tdm_reservation": NaN} None
{"meta_tdm_reservation": [1]} tdm-meta
{"content_usage": ["search=y", "train-ai=n"]} usage-header
"""


def test_statements_in_every_form():
    for line in STATEMENTS.strip().splitlines():
        doc, _, want = line.rpartition(" ")
        assert str(reservation(json.loads(doc))) == want, line


# Rules of a tdmrep.json (location, reservation), a path, and the location that reserves it. First the second example of
# the report, section "TDM File on the Origin Server"; "the most specific match is the first in sequence"; its table of
# special characters; other values are errors.
TDMREP = """
[["/a/", 1], ["/b/html/", 1], ["/b/images/*.jpg", 0]] /a/x.pdf /a/
[["/a/", 1], ["/b/html/", 1], ["/b/images/*.jpg", 0]] /b/html/x?y=1 /b/html/
[["/a/", 1], ["/b/html/", 1], ["/b/images/*.jpg", 0]] /b/images/x.jpg None
[["/a/", 1], ["/b/html/", 1], ["/b/images/*.jpg", 0]] /A/x.pdf None
[["/b/open/", 0], ["/b", 1]] /b/open/x None
[["/b", 1], ["/b/open/", 0]] /b/open/x /b
[["/this/exactly$", 1]] /this/exactly /this/exactly$
[["/this/exactly$", 1]] /this/exactly/not None
[["/this/*/then", 1]] /this/and/then/x /this/*/then
[["/path/foo-%24", 1]] /path/foo-$ /path/foo-%24
[["/", 2], ["/x", "1"], [5, 1]] /x /x
"""
# tdm-reservation in a header and in a <meta>, and the reason where the file reserves everything.
SUPERSEDED = """
- - tdm-file:/
0 - None
1 - tdm-header
- 0 None
0 1 tdm-meta
1 0 None
maybe - tdm-file:/
"""
# As Spawning's generator writes it for a site that refuses text and allows images.
AI_TXT = "# Spawning AI\nUser-Agent: *\nDisallow: *.txt\nDisallow: *.html\nDisallow: *.pdf\nAllow: *.jpg\n"


def of_host(tdmrep=None, ai_txt=None):
    """The reservations of one host."""
    return {"tdmrep.json": {"a.org": tdmrep}, "ai.txt": {"a.org": ai_txt}}


def test_a_tdmrep_file_and_the_statements_that_supersede_it():
    for line in TDMREP.strip().splitlines():
        rules, path, want = line.rsplit(maxsplit=2)
        rows = [{"location": location, "tdm-reservation": value} for location, value in json.loads(rules)]
        found = reservation(dict(url=f"https://a.org{path}"), of_host(json.dumps(rows)))
        assert found == (None if want == "None" else f"tdm-file:{want}"), line
    for content in ('{"location": "/", "tdm-reservation": 1}', "<html>not found</html>", "[" * 100_000, b"\xff", "5"):
        assert reservation(dict(url="https://a.org/x"), of_host(content)) is None
    store = of_host('[{"location": "/", "tdm-reservation": 1}]')
    for line in SUPERSEDED.strip().splitlines():
        header, meta, want = line.split()
        columns = dict(tdm_reservation=header, meta_tdm_reservation=meta)
        page = dict(headers={"tdm-reservation": header}, metas=[("tdm-reservation", meta)])
        for doc in (columns, page):
            assert str(reservation(dict(doc, url="https://a.org/x"), store)) == want


def test_an_ai_txt_is_a_robots_txt_about_kinds_of_files():
    cases = "/a.html ! /a/page ! / ! /a/page?x=.css ! /a.d/page ! /a.jpg . /a.css . /a.b/c.css?/page .".split()
    for path, says in zip(cases[::2], cases[1::2]):
        found = reservation(dict(url=f"https://a.org{path}"), of_host(ai_txt=AI_TXT))
        assert found == ("ai-txt:*:*.html" if says == "!" else None), path
    for content, want in (("User-Agent: GPTBot\nDisallow: /", "ai-txt:GPTBot:/"), ("User-Agent: *\nDisallow:", None),
                          ("User-Agent: other\nDisallow: /", None), ("<html></html>", None)):
        assert reservation(dict(url="https://a.org/a.jpg"), of_host(ai_txt=content)) == want


def test_reservations_are_rows_or_a_mirror_of_hosts(tmp_path):
    reserves = '[{"location": "/", "tdm-reservation": 1}]'
    rows = [dict(domain="www.a.org", file="tdmrep.json", content=reserves),
            dict(domain="b.org", file="/ai.txt", content=AI_TXT), dict(domain="c.org", file="ai.txt", content=None)]
    write(tmp_path / "store.jsonl.gz", rows)
    (tmp_path / "mirror" / "a.org" / ".well-known").mkdir(parents=True)
    (tmp_path / "mirror" / "b.org").mkdir()
    (tmp_path / "mirror" / "a.org" / ".well-known" / "tdmrep.json").write_text(reserves)
    (tmp_path / "mirror" / "b.org" / "ai.txt").write_text(AI_TXT)
    for path in ("store.jsonl.gz", "mirror"):
        store = open_reservations(tmp_path / path)
        assert refusal(dict(url="https://www.a.org/x"), None, store) == "tdm-file:/"
        assert reservation(dict(url="https://b.org/x.txt"), store) == "ai-txt:*:*.txt"
        assert reservation(dict(url="https://c.org/x"), store) is None
    for rows in ([], [dict(domain="a.org", file="tdm.json", content=reserves)]):
        write(tmp_path / "bad.jsonl", rows)
        with pytest.raises(ValueError, match="tdmrep.json or ai.txt"):
            open_reservations(tmp_path / "bad.jsonl")
