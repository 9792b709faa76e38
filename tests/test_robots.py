"""Opt-outs against RFC 9309, Google and Protego; personal data against ISO 13616, ipaddress and published IBANs."""
import gzip
import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from corpus import pii
from corpus.robots import AGENTS, OUTCOMES, blocked_domains, host_key, may_train_on, open_robots, verdict
from corpus.pii import scrub_pii

ROBOTS_2019 = "../shared/data/robots_2019_top10k.jsonl.gz"


def allowed(robots, agent, path):
    return may_train_on("https://example.com" + path, robots, (agent,))[0]


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


@pytest.mark.parametrize("agent, path, want", [
    ("anybot", "/", True), ("anybot", "/example/", False), ("anybot", "/a.gif", False), ("anybot", "/a.gif?x", True),
    ("anybot", "/publications/x", True), ("foobot", "/", False), ("foobot", "/example/page.html", True),
    ("foobot", "/example/allowed.gif", True), ("foobot", "/publications/", False), ("FooBot/2.1", "/", False),
    ("barbot", "/example/page.html", False), ("bazbot", "/example/page.html", False), ("bazbot", "/a.gif", True),
    ("quxbot", "/example/", True), ("quxbot", "/a.gif", True)])
def test_rfc_9309_example(agent, path, want):
    assert allowed(RFC_5_1, agent, path) is want


@pytest.mark.parametrize("url", ["https://a.org", "https://a.org?x", "https://a.org#x", "a.org"])
def test_a_url_without_a_path_is_the_root(url):            # RFC 3986 sec. 6.2.3
    rule = "/?" if "?" in url else "/$"
    assert may_train_on(url, "User-agent: *\nDisallow: /$\nDisallow: /?") == (False, f"robots:*:{rule}")


def test_rfc_9309_longest_match():                       # sec. 5.2
    robots = "User-Agent: foobot\nAllow: /example/page/\nDisallow: /example/page/disallowed.gif\n"
    assert allowed(robots, "foobot", "/example/page/") and not allowed(robots, "foobot", "/example/page/disallowed.gif")


# RFC 9309 sec. 2.2.2 and 2.2.3: pairs that are the same path, and special characters meant literally.
@pytest.mark.parametrize("rule, path, match", [
    ("/foo/bar?baz=quz", "/foo/bar?baz=quz", True), ("/foo/bar/\u30c4", "/foo/bar/%E3%83%84", True),
    ("/foo/bar/%E3%83%84", "/foo/bar/\u30c4", True), ("/foo/bar/%e3%83%84", "/foo/bar/%E3%83%84", True),
    ("/foo/bar/%62%61%7A", "/foo/bar/baz", True), ("/~x", "/%7Ex", True), ("/%7ex", "/~x", True),
    ("/foo/bar?baz=https://foo.bar", "/foo/bar?baz=https://foo.bar", True), ("/a%2Fb", "/a/b", False),
    ("/file-with-a-%2A.html", "/file-with-a-*.html", True), ("/file-with-a-%2A.html", "/file-with-a-b.html", False),
    ("/path/foo-%24", "/path/foo-$", True), ("/path/foo-%24", "/path/foo-", False), ("/a$b", "/a$b", True)])
def test_rfc_9309_encoding(rule, path, match):
    assert allowed(f"User-agent: *\nDisallow: {rule}", "x", path) is not match


# Google's documentation of robots.txt, "URL matching based on path values": rule, what it matches, what it does not.
@pytest.mark.parametrize("rule, yes, no", [
    ("/", "/ /x /x?y", ""),
    ("/$", "/", "/x /x?y /?"),
    ("/fish", "/fish /fish.html /fish/salmon.html /fishheads /fishheads/yummy.html /fish.html?id=any",
     "/Fish.asp /catfish /?id=fish /desert/fish"),
    ("/fish*", "/fish /fish.html /fish/salmon.html /fishheads /fishheads/yummy.html /fish.html?id=any",
     "/Fish.asp /catfish /?id=fish /desert/fish"),
    ("/fish/", "/fish/ /fish/?id=any /fish/salmon.htm", "/fish /fish.html /animals/fish/ /Fish/Salmon.asp"),
    ("/*.php",
     "/index.php /filename.php /folder/filename.php /folder/filename.php?parameters /folder/any.php.file.html "
     "/filename.php/", "/ /windows.PHP /php/ /index?php"),
    ("/*.php$", "/filename.php /folder/filename.php",
     "/filename.php?parameters /filename.php/ /filename.php5 /windows.PHP"),
    ("/fish*.php", "/fish.php /fishheads/catfish.php?parameters", "/Fish.PHP"),
    ("/*?", "/a? /a?b /?", "/a /"), ("*/b", "/b /a/b /a/b/c", "/ab /a"), ("fish", "", "/fish"),
    ("/a*a*a$", "/aaa /axaxa /aaaa", "/aa /axa /aab"), ("/**a", "/a /ba", "/b")])
def test_google_path_table(rule, yes, no):
    robots = f"User-agent: *\nDisallow: {rule}\n"
    assert [p for p in yes.split() if allowed(robots, "x", p)] == []
    assert [p for p in no.split() if not allowed(robots, "x", p)] == []


# The same page, "Order of precedence for rules": of conflicting rules the longest, and then the least restrictive.
@pytest.mark.parametrize("rules, path, want", [
    ("allow: /p\ndisallow: /", "/page", True), ("allow: /folder\ndisallow: /folder", "/folder/page", True),
    ("allow: /page\ndisallow: /*.htm", "/page.htm", False), ("allow: /page\ndisallow: /*.ph", "/page.php5", True),
    ("allow: /$\ndisallow: /", "/", True), ("allow: /$\ndisallow: /", "/page.htm", False),
    ("disallow: /x\nallow: /x/", "/x", False), ("disallow: /x\nallow: /x/", "/x/", True),
    ("disallow:\nallow:", "/x", True),
    ("disallow:", "/x", True), ("disallow:\ndisallow: /y", "/x", True), ("allow:\ndisallow: /", "/x", False),
    ("disallow: /", "/robots.txt", True)])
def test_google_precedence(rules, path, want):
    assert allowed("user-agent: FooBot\n" + rules, "FooBot", path) is want


# Groups: RFC 9309 sec. 2.2.1 and 2.2.4, and the two leniencies that Google documents in its parser.
@pytest.mark.parametrize("robots, agent, want", [
    ("User-agent: a\nDisallow: /x\n\nUser-agent: b\nDisallow: /y\n\nUser-agent: a\nDisallow: /", "a", False),  # merged
    ("User-agent: a\n\n\nUser-agent: b\nDisallow: /", "a", False),                # blank lines do not end a group
    ("User-agent: a\nCrawl-delay: 3\nSitemap: /s\nUser-agent: b\nDisallow: /", "a", False),     # nor do other records
    ("Disallow: /\nUser-agent: a\nDisallow: /y", "a", True),                      # rules of nobody
    ("User-agent: *\nDisallow: /\nUser-agent: a\nAllow: /", "a", True),           # the own group instead of `*`
    ("User-agent: *\nDisallow: /\nUser-agent: a", "a", True),                     # also when it is empty
    ("User-agent: GPTBot # theirs\nDisallow: / # all", "gptbot", False),
    ("USER-AGENT:GPTBOT\nDISALLOW:/", "GPTBot", False),
    ("User-agent: CCBot/1.0\nDisallow: /", "CCBot/2.0", False),                   # the version is no part of the token
    ("User-agent: Applebot\nDisallow: /", "Applebot-Extended", True),             # nor is a prefix the token
    ("User-agent: foo bar\nDisallow: /", "foo", False),
    ("user-agent FooBot\ndisallow /", "FooBot", False), ("useragent: a\ndissalow: /", "a", False),
    ("User-agent: *\rDisallow: /\r", "a", False), ("User-agent: *\r\nDisallow: /\r\n", "a", False),
    ("\ufeffUser-agent: *\nDisallow: /", "a", False), (b"\xef\xbb\xbfUser-agent: *\nDisallow: /", "a", False),
    ("User-agent: *\nDisallow: /".encode("utf-16"), "a", False), (b"User-agent: *\n# \xff\nDisallow: /", "a", False),
    ("", "a", True), ("# nothing", "a", True)])
def test_groups_and_encodings(robots, agent, want):
    assert allowed(robots, agent, "/z") is want


def test_star_is_one_of_the_agents_and_explicit_asks_only_who_is_named():
    welcome = "User-agent: *\nDisallow: /private\n\n" + "".join(f"User-agent: {a}\n" for a in AGENTS[:-1]) + "Allow: /"
    url = "https://a.org/private"
    assert len(AGENTS) == 15 and may_train_on(url, welcome) == (False, "robots:*:/private")
    assert may_train_on(url, welcome, AGENTS[:-1]) == (True, "allowed")
    silent = "User-agent: *\nDisallow: /private\nUser-agent: GPTBot\nDisallow: /gpt"
    assert may_train_on(url, silent, AGENTS[:-1]) == (False, "robots:AI2Bot:/private")       # RFC: not named = `*`
    assert may_train_on(url, silent, AGENTS[:-1], explicit=True) == (True, "allowed")
    assert may_train_on(url, silent) == (False, "robots:*:/private")
    # An agent that is named goes before `*`.
    assert may_train_on(url, silent + "\nDisallow: /p") == (False, "robots:GPTBot:/p")
    assert may_train_on("https://a.org/gpt", silent, AGENTS[:-1], explicit=True) == (False, "robots:GPTBot:/gpt")


@pytest.mark.parametrize("content, reason", [
    (None, "no-robots"), ("", "allowed"), ("# only a comment", "allowed"), ("Sitemap: https://a.org/s.xml", "allowed"),
    ("<html><body>User-agent: *\nDisallow: /", "unparsable"), ("\ufeff \n<!DOCTYPE html>", "unparsable"),
    ("Not found", "unparsable"), ("Disallow: /", "unparsable")])
def test_what_is_no_robots_file_is_told_apart(content, reason):
    assert may_train_on("https://a.org/x", content) == (True, reason)


def test_500_kib_are_read_up_to_a_whole_line():
    head = "User-agent: *\n"
    filler = "# " + "x" * 97 + "\n"
    early = head + "Disallow: /early\n" + filler * 5200 + "Disallow: /late\n"
    assert len(early) > 500 * 1024 and not allowed(early, "a", "/early") and allowed(early, "a", "/late")
    cut = (head + filler * 5119).ljust(500 * 1024 - len("\nDisallow: /"), " ") + "\n"   # the limit falls after the "/"
    assert allowed(cut + "Disallow: /private/diary\n", "a", "/public")


def test_a_pathological_rule_and_a_long_url_are_decided():      # exponential for a backtracking matcher
    robots = "User-agent: *\nDisallow: /" + "*a" * 2000 + "*b$\n"
    assert allowed(robots, "x", "/" + "a" * 100_000) and not allowed(robots, "x", "/" + "a" * 100_000 + "b")


@pytest.mark.parametrize("url, host", [
    ("https://Example.COM:443/a", "example.com"), ("http://user:pw@example.com/", "example.com"),
    ("example.com/a", "example.com"),
    ("HTTP://example.com.", "example.com"), ("//example.com", "example.com"),
    ("http://www.example.com?x", "www.example.com"),
    ("http://[2001:DB8:0:0::1]:8080/", "2001:db8::1"), ("http://192.0.2.7:80/", "192.0.2.7"),
    ("http://b\u00fccher.example/", "xn--bcher-kva.example"), ("http://xn--bcher-kva.example", "xn--bcher-kva.example"),
    ("http://stra\u00dfe.de/", "xn--strae-oqa.de"), ("http://\u4f8b\u3048\u3002jp/", "xn--r8jz45g.jp"),
    ("mailto:a@b.org", None), ("http://", None), ("http://a b/", None), ("http://a..b/", None), ("http://[::1", None),
    ("http://a.b:x/", None), ("just words", None), ("", None), (None, None), (float("nan"), None)])
def test_hosts(url, host):
    assert host_key(url) == host


def test_hosts_are_those_of_the_idna_library():
    idna = pytest.importorskip("idna")
    for name in ("m\u00fcnchen.de", "fa\u00df.de", "\u03b2\u03cc\u03bb\u03bf\u03c2.com",
                 "\u0645\u062b\u0627\u0644.example",
                 "\u0440\u0444.\u0440\u0444", "\ud55c\uad6d.kr", "caf\u00e9.fr", "A\u0300.org"):
        assert host_key(f"https://{name}/") == idna.encode(name, uts46=True).decode()


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text))
    elif path.suffix == ".zst":
        path.write_bytes(pytest.importorskip("zstandard").compress(text))
    elif path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_bytes(text)


@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz", "s.jsonl.zst", "s.parquet", "folder"])
def test_a_store_in_every_form_gives_the_same_verdicts(name, tmp_path):
    rows = [{"domain": "Example.com", "content": "User-agent: GPTBot\nDisallow: /no"},
            {"domain": "null.org", "content": None},
            {"domain": "https://www.b\u00fccher.example/", "content": "User-agent: *\nDisallow: /"},
            {"domain": "page.net", "content": "<html>"}]
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        (path / "example.com.txt").write_text(rows[0]["content"])
        (path / "www.xn--bcher-kva.example").mkdir()
        (path / "www.xn--bcher-kva.example" / "robots.txt").write_text(rows[2]["content"])
        (path / "page.net.txt").write_text("<html>")
    else:
        write(path, rows)
    store = open_robots(str(path))
    assert len(store) == 3
    assert verdict("http://EXAMPLE.com:80/no", store) == "drop:robots:GPTBot:/no"
    assert verdict("http://www.example.com/no", store) == "drop:robots:GPTBot:/no"           # www. tried
    assert verdict("http://b\u00fccher.example/", store) == "drop:robots:*:/"
    assert verdict("http://example.com/yes", store) == verdict("http://example.com/yes", store,
                                                               missing="deny") == "kept:allowed"
    for url, what in (("http://null.org/", "no-robots"), ("http://page.net/", "unparsable"), ("not a url", "bad-url")):
        assert (verdict(url, store), verdict(url, store, missing="deny")) == ("kept:" + what, "drop:" + what)
    assert verdict(None, store, missing="deny") == verdict("", store) == "kept:no-url"


# The example of draft-ietf-aipref-attach-05 sec. 3.4, and its table.
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


@pytest.mark.parametrize("agent, path, says", [
    ("*", "/test", "usage-file:*:/"), ("*", "/never/test", "robots:*:/never/"), ("*", "/ai-ok/test", "allowed"),
    ("ExampleBot", "/test", "allowed"), ("ExampleBot", "/never/test", "allowed"),
    ("OtherBot", "/test", "usage-file:OtherBot:/")])
def test_preferences_are_those_of_the_drafts_table(agent, path, says):
    for explicit in (False, True) if says != "robots:*:/never/" else (False,):
        assert may_train_on("https://a.org" + path, PREFERENCES, (agent,), explicit) == (says == "allowed", says)


@pytest.mark.parametrize("lines, says", [
    # In the files that Cloudflare writes.
    ("Content-signal: search=yes,ai-train=no\nAllow: /", "usage-file:*:/"),
    ("Content-Signal: search=yes, ai-train=yes, ai-input=no", "allowed"),
    # "The ordering of rules in a group carries no semantics", "these preferences apply separately": n wins.
    ("content-usage : /a\ttrain-ai=y # yes\nCONTENT-USAGE:/a train-ai=n # no", "usage-file:*:/a"),
    ("Content-Usage: /a\ttrain-ai=n\nContent-Usage: /a train-ai=y", "usage-file:*:/a"),
    # The longest path decides, also where it says nothing about training; * and $ are those of every rule.
    ("Content-Usage: train-ai=n\nContent-Usage: /a search=n", "allowed"),
    ("Content-Usage: /*/b$ train-ai=n", "usage-file:*:/*/b$"), ("Content-Usage: /*/b/c$ train-ai=n", "allowed"),
    ("Content-Usage: /b train-ai=n", "allowed"), ("Content-Usage: /a", "allowed"), ("Content-Usage:", "allowed"),
    ("# Content-Usage: train-ai=n", "allowed"),
    # It is a rule, which ends the lines of agents that a group begins with.
    ("Content-Usage: train-ai=y\nUser-agent: none\nDisallow: /", "allowed")])
def test_a_line_of_preferences(lines, says):
    url = "https://a.org/a/b"
    assert may_train_on(url, f"User-agent: *\n{lines}") == (says == "allowed", says)


def test_every_outcome_is_in_the_table():
    robots = {"a.org": "User-agent: *\nDisallow: /no\nContent-Usage: /use train-ai=n", "h.org": "<html>"}
    urls = ["http://a.org/", "http://a.org/no", "http://a.org/use", "http://h.org/", "http://m.org/", "no url", None]
    urls.append("http://x.bad.org/")
    seen = {":".join(verdict(u, robots, missing=m, blocked={"bad.org"}).split(":")[:2]) for u in urls for m in ("allow",
                                                                                                                "deny")}
    assert seen == set(OUTCOMES)
    with pytest.raises(ValueError, match="want 'allow'"):
        verdict(None, missing="perhaps")


@pytest.mark.parametrize("name", ["b.txt", "b.jsonl", "b.parquet"])
def test_blocked_domains_match_whole_labels(name, tmp_path):
    if name == "b.txt":
        (tmp_path / name).write_text("# list\nExample.com\n\nwww.other.co.uk # why\n")
    else:
        # A # begins a comment in lines of text alone.
        write(tmp_path / name, [{"domain": "Example.com", "why": "#7"}, {"domain": "www.other.co.uk", "why": "#8"}])
    blocked = blocked_domains(tmp_path / name)
    for url in ("http://example.com/", "https://a.b.EXAMPLE.com:8/x"):
        assert verdict(url, blocked=blocked) == "drop:blocked-domain:example.com"
    for url in ("http://badexample.com/", "http://co.uk/", "http://com/", "http://example.com.evil.org/"):
        assert verdict(url, blocked=blocked) == "kept:no-robots"
    assert verdict("http://other.co.uk/", blocked=blocked).startswith("drop:")


@pytest.mark.parametrize("name, content, message", [
    ("s.jsonl", b"", "no robots.txt in it"),
    ("s.jsonl", b'{"host": "a.org", "text": "x"}\n', "content or robots; it has host, text"),
    ("s.jsonl", b"{not json}\n", "damaged"), ("s.jsonl", b"[1]\n", "no column"),
    ("s.parquet", b"PAR1 not really", "damaged"),
    ("s.jsonl.gz", gzip.compress(b'{"domain": "a.org", "content": "x"}\n' * 9999)[:-90], "damaged"),
    ("s.jsonl.gz", b"plain text", "damaged"), ("s.jsonl.zst", b"plain text", "damaged"),
    ("s.csv", b"a,b", "want a folder or a file")])
def test_a_store_that_is_none_says_so_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as e:
        open_robots(tmp_path / name)
    assert "\n" not in str(e.value) and name in str(e.value)


def test_an_empty_folder_a_missing_file_and_a_list_of_words_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no robots.txt in it"):
        open_robots(tmp_path)
    with pytest.raises(OSError):
        open_robots(tmp_path / "none.jsonl")
    (tmp_path / "words.txt").write_text("the\nquick\n")
    with pytest.raises(ValueError, match="'the' is not a domain"):
        blocked_domains(tmp_path / "words.txt")


def test_4231_real_files_are_decided_as_protego_does_but_for_seven():
    if not os.path.exists(ROBOTS_2019):
        pytest.skip("needs shared/data")
    Protego = pytest.importorskip("protego").Protego
    differ, bom = set(), 0
    rows = [json.loads(line) for line in gzip.open(ROBOTS_2019, "rt", encoding="utf-8")]
    for row in rows:
        peer = Protego.parse(row["robots"].lstrip("\ufeff"))                   # it does not skip the byte-order mark
        for path in ("/", "/news/2019/title", "/images/a.png?x=1"):
            url = f"https://{row['domain']}{path}"
            mine = may_train_on(url, row["robots"])[0]
            if mine != all(peer.can_fetch(url, agent) for agent in AGENTS):
                differ.add(row["domain"])
        bom += row["robots"].startswith("\ufeff")
    assert (len(rows), bom) == (4231, 68)
    # There, a group of Applebot holds for Applebot-Extended, and a Crawl-delay ends the user-agent lines of a group.
    prefix = {"bgp.he.net", "www.avsforum.com", "www.vwvortex.com", "www.wordreference.com"}
    crawl_delay = {"bitbucket.org", "www.eventbrite.com", "www.khaleejtimes.com"}
    assert differ == prefix | crawl_delay


def test_the_byte_order_mark_changes_the_verdict_of_real_files():
    if not os.path.exists(ROBOTS_2019):
        pytest.skip("needs shared/data")
    Protego = pytest.importorskip("protego").Protego
    rows = [json.loads(line) for line in gzip.open(ROBOTS_2019, "rt", encoding="utf-8")]
    open_for_ccbot = 0
    for row in (row for row in rows if row["robots"].startswith("\ufeff")):
        lines = [line.partition(":") for line in row["robots"].splitlines()]
        rules = [value.strip() for key, _,
                 value in lines if key.lower() == "disallow" and value.strip().startswith("/")]
        urls = [f"https://{row['domain']}" + rule.replace("*", "x").replace("$", "") for rule in rules]
        peer = Protego.parse(row["robots"])                                      # what the official pipeline sees
        may = [may_train_on(url, row["robots"], ("CCBot",))[0] for url in urls]
        open_for_ccbot += any(peer.can_fetch(url, "CCBot") and not ours for url, ours in zip(urls, may))
    assert open_for_ccbot == 29                                                  # of 68: it fails open on these


# The example numbers that the SWIFT registry publishes, one per country: the authority for lengths and check digits.
IBANS = """
    AD1400080001001234567890 AE460090000000123456789 AL35202111090000000001234567 AT483200000012345864
    AZ77VTBA00000000001234567890 BA393385804800211234 BE71096123456769 BG18RZBB91550123456789 BH02CITI00001077181611
    BR1500000000000010932840814P2 BY86AKBB10100000002966000000 CH5604835012345678009 CR23015108410026012345
    CY21002001950000357001234567 CZ5508000000001234567899 DE75512108001245126199 DK9520000123456789
    DO22ACAU00000000000123456789 EE471000001020145685 EG800002000156789012345180002 ES7921000813610123456789
    FI1410093000123458 FO9264600123456789 FR1420041010050500013M02606 GB82WEST12345698765432 GE60NB0000000123456789
    GI04BARC000001234567890 GL8964710123456789 GR9608100010000001234567890 GT20AGRO00000000001234567890
    HR1723600001101234565 HU93116000060000000012345676 IE64IRCE92050112345678 IL170108000000012612345
    IQ20CBIQ861800101010500 IS750001121234563108962099 IT60X0542811101000000123456 JO71CBJO0000000000001234567890
    KW81CBKU0000000000001234560101 KZ563190000012344567 LB92000700000000123123456123
    LC14BOSL123456789012345678901234 LI7408806123456789012 LT601010012345678901 LU120010001234567891
    LV97HABA0012345678910 LY83002048000020100120361 MC5810096180790123456789085 MD21EX000000000001234567
    ME25505000012345678951 MK07200002785123453 MR1300020001010000123456753 MT31MALT01100000000000000000123
    MU43BOMM0101123456789101000MUR NL02ABNA0123456789 NO8330001234567 PK36SCBL0000001123456702
    PL10105000997603123456789123 PS92PALS000000000400123456702 PT50002700000001234567833
    QA54QNBA000000000000693123456 RO09BCYP0000001234567890 RS35105008123123123173 SA4420000001234567891234
    SC52BAHL01031234567890123456USD SE7280000810340009783242 SI56192001234567892 SK8975000000000012345671
    SM76P0854009812123456789123 ST23000200000289355710148 SV43ACAT00000000000000123123 TL380010012345678910106
    TN5904018104004942712345 TR320010009999901234567890 UA903052992990004149123456789 VA59001123000012345678
    VG07ABVI0000000123456789 XK051212012345678906""".split()


@pytest.mark.parametrize("form", [str, str.lower, lambda n: " ".join(n[i:i + 4] for i in range(0, len(n), 4)),
                                  lambda n: "\u00a0".join(n.lower()[i:i + 4] for i in range(0, len(n), 4))])
def test_published_ibans_go_whole_in_every_form(form):
    assert len({n[:2] for n in IBANS}) == len(IBANS) >= 75
    text = "".join(f"{form(n)} to {form(n)}, 12 a.\n" for n in IBANS)
    clean, counts = scrub_pii(text)
    assert clean == "<iban-pii> to <iban-pii>, 12 a.\n" * len(IBANS) and counts == {"email": 0, "ip": 0,
                                                                                    "iban": 2 * len(IBANS)}


def test_ibans_between_chinese_characters_go():
    assert scrub_pii(f"\u53f7{IBANS[0]}\u306f")[0] == "\u53f7<iban-pii>\u306f"


def test_ibans_of_every_country_by_iso_13616():
    for country, length in pii.IBAN_LENGTH.items():
        bban = ("1234567890" * 4)[:length - 4]
        digits = "".join(str(int(c, 36)) for c in bban + country + "00")
        check = 98 - int(digits) % 97
        assert scrub_pii(f"({country}{check:02d}{bban})")[0] == "(<iban-pii>)"
        assert scrub_pii(f"({country}{check % 97 + 1:02d}{bban})")[1]["iban"] == 0             # one off: not an IBAN


@pytest.mark.parametrize("text", [
    "XGB82WEST12345698765432", "GB82WEST123456987654321", "GB82 WEST 1234 5698 7654 33", "GB82 WEST 1234 5698 76543 2",
    "be12 pages of text", "ZZ82WEST12345698765432", "GB82.WEST.1234.5698.7654.32", "GB82xWESTx1234x5698x7654x32",
    "GB82  WEST  1234  5698  7654  32"])
def test_what_only_looks_like_an_iban_stays(text):
    assert scrub_pii(text) == (text, {"email": 0, "ip": 0, "iban": 0})


@pytest.mark.parametrize("text, clean", [
    ("a@b.co a@b.co.uk", "<email-pii> <email-pii>"), ("mailto:john.doe+tag@mail.example.org.", "mailto:<email-pii>."),
    ("<o_neil-99%x@a-b.museum>", "<<email-pii>>"), ("m\u00fcller@gr\u00fcn.de", "<email-pii>"),
    ("\u8054\u7cfbinfo@example.com\u3002", "\u8054\u7cfb<email-pii>\u3002"), ("...x@y.zz...", "...<email-pii>..."),
    ("user@xn--bcher-kva.xn--p1ai", "<email-pii>"), ("1.2.3.4@host.org", "<email-pii>"),
    ("\u00d8rsted@s\u00f8.dk", "<email-pii>"), ("2\u00d7a@b.org", "2\u00d7<email-pii>"),
    ("a\u00f7b@c.org", "a\u00f7<email-pii>")])
def test_emails(text, clean):
    assert scrub_pii(text) == (clean, {"email": clean.count("<email-pii>"), "ip": 0, "iban": 0})


@pytest.mark.parametrize("text", ["@handle.com", "a@b", "a@b.c", "a @ b.com", "x@", "@", "f@g.h()"])
def test_what_is_no_email_stays(text):
    assert scrub_pii(text)[0] == text


@pytest.mark.parametrize("text, clean", [
    ("10.0.0.1", "<ip-pii>"), ("at 192.168.1.255.", "at <ip-pii>."), ("http://8.8.8.8:53/", "http://<ip-pii>:53/"),
    ("1.1.1.1,2.2.2.2/24", "<ip-pii>,<ip-pii>/24"), ("\u5730\u57401.2.3.4\u3002", "\u5730\u5740<ip-pii>\u3002"),
    ("2001:db8::1", "<ip-pii>"), ("http://[2001:DB8:0:0:8:800:200C:417A]:80/", "http://[<ip-pii>]:80/"),
    ("fe80::1%eth0", "<ip-pii>%eth0"), ("::ffff:192.0.2.128", "<ip-pii>"), ("IP:2001:db8::7, x", "IP:<ip-pii>, x"),
    ("\u57402001:db8::1\u306f", "\u5740<ip-pii>\u306f"), ("is 2001:db8::.", "is <ip-pii>."),
    ("2001:db8::1: up", "<ip-pii>: up")])
def test_addresses(text, clean):
    assert scrub_pii(text) == (clean, {"email": 0, "ip": clean.count("<ip-pii>"), "iban": 0})


@pytest.mark.parametrize("text", [
    "300.1.1.1", "1.2.3.456", "v1.2.3.4", "1.2.3.4.5", "version 1.2.3.4", "Version: 2.0.10.1", "build 10.0.19.1",
    "1.2.3.4a", "x1.2.3.4",
    "01.02.03.04", "1.2.3", "12:30:45", "2024-01-01T12:30:45", "std::vector", "a::b", "::", "x[::2]",
    "00:1A:2B:3C:4D:5E", "1:2:3",
    "face::cafe", "12::30", "::1", "1:2:3:4:5:6:7:8:9", "gggg::1", "2001:db8::1x", "2001:db8::1_", "x2001:db8::1"])
def test_versions_times_and_code_are_no_addresses(text):
    assert scrub_pii(text) == (text, {"email": 0, "ip": 0, "iban": 0})


def test_ipv6_is_what_the_standard_library_accepts():
    import ipaddress
    import random
    rng = random.Random(0)
    for _ in range(500):
        zeros = rng.choice([-1, -2**64,
                            2**16 - 1])                              # none, the lower half, all but the ends
        address = ipaddress.IPv6Address(rng.getrandbits(112) & zeros & 2**112 - 1 | 0x2001 << 112)
        for form in (address.compressed, address.exploded, address.compressed.upper()):
            assert scrub_pii(f"from {form} to")[0] == "from <ip-pii> to", form


# 1 MB each. The official e-mail expression needs 23 s for 32 kB of "a/": quadratic, so 6 hours for one of these.
@pytest.mark.parametrize("unit",
                         ["a/", "a@", "a@a.", "a", "@", "1", "1.", "1.1.1.1.", ":", "12:", "a:", "2001:", "GB82",
                          "GB82 WEST ",
                                  "a.a@a-", "\u00fc", "x" * 64 + "@"])
def test_hostile_text_is_returned_as_it_is(unit):
    text = unit * (1_000_000 // len(unit))
    assert scrub_pii(text) == (text, {"email": 0, "ip": 0, "iban": 0})


def test_scrubbing_twice_is_scrubbing_once():
    text = f"a@b.org 1.2.3.4 {IBANS[24]} 2001:db8::1 c@d.ch,e@f.ch " * 50
    clean, counts = scrub_pii(text)
    assert counts == {"email": 150, "ip": 100, "iban": 50}
    assert scrub_pii(clean) == (clean, {"email": 0, "ip": 0, "iban": 0})


def run(module, *args, stdin=""):
    return subprocess.run([sys.executable, "-m", module, *args], input=stdin, capture_output=True, text=True, cwd=ROOT)


def test_the_command_says_which_agent_may_not_read_a_url_and_by_which_rule(tmp_path):
    (tmp_path / "robots.txt").write_text("User-agent: GPTBot\nDisallow: /a\n")
    out = run("corpus.robots", "https://example.com/a", f"--robots={tmp_path / 'robots.txt'}").stdout.splitlines()
    assert len(out) == 16 and out[-1] == "drop:robots:GPTBot:/a"
    assert [line.split()[0] for line in out[:-1] if "refused by" in line] == ["GPTBot"]
    wrong = run("corpus.robots", "https://example.com/a", "--robots=nowhere.txt")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "nowhere.txt" in wrong.stderr


def test_the_command_scrubs_its_input_and_counts_what_a_file_holds(tmp_path):
    assert run("corpus.pii", "--scrub", stdin="mail me: a@b.org\n").stdout == "mail me: <email-pii>\n"
    (tmp_path / "page.txt").write_text("one\ntwo 10.0.0.1\n")
    lines = run("corpus.pii", str(tmp_path / "page.txt")).stdout.splitlines()
    assert lines[-1].endswith("page.txt: 0 email, 1 ip, 0 iban")
