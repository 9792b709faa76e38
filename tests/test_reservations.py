"""corpus/reservations.py: opt-outs beyond robots.txt, by the published examples of those who defined them."""
import gzip
import json

import pytest

from conftest import script
from corpus.reservations import RESERVED, open_reservations, parse_tdmrep, reservation

# What datadiligence 0.1.7 (Spawning) makes of the header, without an agent and as GPTBot: one may train on it, or not.
X_ROBOTS_YES = ["", "noindex", "other, noindex", "GPTBot: all", "somebot: noai", ":,", ":, :, ,;: -:: ", "none",
                "demobot: noai, examplebot: noai, GPTBot: all", "noindex, nofollow"]
X_ROBOTS_NO = ["noai", "noimageai", "other, noai", "GPTBot: noai", "GPTBot:noai", "other, GPTBot: noimageai",
               "all, noai"]
TDM = {"": True, "0": True, "1": False, "other": True, "2": True, " 1": False}


def test_headers_are_read_as_by_datadiligence():
    for said in X_ROBOTS_YES + X_ROBOTS_NO:
        for doc in (dict(x_robots_tag=said), dict(headers={"X-Robots-Tag": said}), dict(metas=[("Robots", said)])):
            assert (reservation(doc) is None) == (said in X_ROBOTS_YES), doc
    for said, may in TDM.items():
        assert (reservation(dict(tdm_reservation=said)) is None) == may
        headers = f"Content-type: text/html\r\nTDM-Reservation: {said}\r\n"
        assert (reservation(dict(headers=headers)) is None) == may


# Does train-ai have the token n as its value in the dictionary that http-sf 1.5.0 (RFC 9651) reads?
USAGE_N = ["train-ai=n", "train-ai=n, search=y", "search=y,\ttrain-ai=n;x=\"1;2\"", "  train-ai=n;a=1;b ",
           "train-ai=y, train-ai=n"]
USAGE_NOT = ["train-ai=n, train-ai=y", "train-ai;allow=n, train-ai=y", "train-ai=y, train-ai, search=n, search=\"n\"",
             "train-ai;has;parameters=\"?\";", "search=n", "train-ai", "train-ai=\"n\"", "train-ai=N", "train-ai=no",
             "train-ai=?0", "train-ai=(n)", "Train-AI=n", "train-ai = n", "x-train-ai=n", "n", ""]


@pytest.mark.parametrize("said", USAGE_N + USAGE_NOT)
def test_a_preference_is_read_as_a_structured_field(said):
    want = "usage-header" if said in USAGE_N else None
    for doc in (dict(content_usage=said), dict(headers={"Content-Usage": said}), dict(headers=f"content-usage:{said}")):
        assert reservation(doc) == want


def test_no_other_preference_takes_a_refusal_back():
    """draft-ietf-aipref-vocab-07 sec. 5.1: disallowed if any statement says so. Cloudflare's word is another one."""
    assert reservation(dict(headers={"Content-Usage": "train-ai=n"}, content_usage="train-ai=y")) == "usage-header"
    assert reservation(dict(headers={"Content-Signal": "search=yes, ai-train=no, ai-input=no"})) == "usage-header"
    assert reservation(dict(headers={"Content-Signal": "search=no, ai-train=yes, ai-input=no"})) is None


@pytest.mark.parametrize("directive", ["noai", "noimageai", "noml"])
def test_each_directive_has_its_own_name_in_any_case(directive):
    assert reservation(dict(x_robots_tag=f"noindex, {directive.upper()}")) == directive
    assert reservation(dict(metas=[("gptbot", f"nofollow, {directive}")])) == directive
    assert reservation(dict(metas=[("googlebot", directive)])) is None


# The second example of the report, section "TDM File on the Origin Server".
EXAMPLE = """[
  {"location": "/directory-a/", "tdm-reservation": 1},
  {"location": "/directory-b/html/", "tdm-reservation": 1, "tdm-policy": "https://provider.com/policies/policy.json"},
  {"location": "/directory-b/images/*.jpg", "tdm-reservation": 0}
]"""
FIRST = '[{"location": "/b/open/", "tdm-reservation": 0}, {"location": "/b", "tdm-reservation": 1}]'
LAST = '[{"location": "/b", "tdm-reservation": 1}, {"location": "/b/open/", "tdm-reservation": 0}]'


def of_host(**files):
    """A store of one host's files."""
    return {name: {"provider.com": files.get(key)} for name, key in (("tdmrep.json", "tdmrep"), ("ai.txt", "ai_txt"))}


@pytest.mark.parametrize("content, path, reserved", [
    ('[{"location": "/", "tdm-reservation": 1}]', "/any/file.pdf", "/"),
    (EXAMPLE, "/directory-a/x.pdf", "/directory-a/"),
    (EXAMPLE, "/directory-b/html/x?y=1", "/directory-b/html/"),
    (EXAMPLE, "/directory-b/images/x.jpg", None),
    (EXAMPLE, "/directory-c/", None),
    (EXAMPLE, "/Directory-a/x.pdf", None),
    # "The most specific match is the first in sequence."
    (FIRST, "/b/open/x", None),
    (LAST, "/b/open/x", "/b"),
    (FIRST, "/b/x", "/b"),
    # The table of special characters: the end, anything, and a dollar itself.
    ('[{"location": "/this/path/exactly$", "tdm-reservation": 1}]', "/this/path/exactly", "/this/path/exactly$"),
    ('[{"location": "/this/path/exactly$", "tdm-reservation": 1}]', "/this/path/exactly/not", None),
    ('[{"location": "/this/*/then", "tdm-reservation": 1}]', "/this/and/then/x", "/this/*/then"),
    ('[{"location": "/path/foo-%24", "tdm-reservation": 1}]', "/path/foo-$", "/path/foo-%24"),
    # Other values are errors, and the property is unset.
    ('[{"location": "/", "tdm-reservation": 2}]', "/x", None),
    ('[{"location": "/", "tdm-reservation": "1"}]', "/x", "/"),
    ('{"location": "/", "tdm-reservation": 1}', "/x", None),
    ("<html>not found</html>", "/x", None),
    ("[" * 100_000, "/x", None),
    (b"\xff", "/x", None)])
def test_a_file_of_tdmrep_reserves_what_the_report_says(content, path, reserved):
    found = reservation(dict(url=f"https://provider.com{path}"), of_host(tdmrep=content))
    assert found == (reserved and f"tdm-file:{reserved}")


RESERVES = '[{"location": "/", "tdm-reservation": 1}]'


@pytest.mark.parametrize("header, meta, want", [
    (None, None, "tdm-file:/"), ("0", None, None), ("1", None, "tdm-header"), (None, "0", None), ("0", "1", "tdm-meta"),
    ("1", "0", None), ("maybe", "", "tdm-file:/")])
def test_a_header_supersedes_the_file_and_a_meta_the_header_and_silence_changes_nothing(header, meta, want):
    columns = dict(tdm_reservation=header, meta_tdm_reservation=meta)
    page = dict(headers={"tdm-reservation": header}, metas=[("tdm-reservation", meta or "")])
    for doc in (columns, page):
        assert reservation(dict(doc, url="https://provider.com/x"), of_host(tdmrep=RESERVES)) == want


# As Spawning's generator writes it for a site that refuses text and allows images.
AI_TXT = "# Spawning AI\nUser-Agent: *\nDisallow: *.txt\nDisallow: *.html\nDisallow: *.pdf\nAllow: *.jpg\n"


@pytest.mark.parametrize("content, path, want", [
    (AI_TXT, "/a.html", "ai-txt:*:*.html"), (AI_TXT, "/a/page", "ai-txt:*:*.html"), (AI_TXT, "/", "ai-txt:*:*.html"),
    (AI_TXT, "/a.jpg", None), (AI_TXT, "/a/page?x=.css", "ai-txt:*:*.html"), (AI_TXT, "/a.css", None),
    ("User-Agent: *\nDisallow: /", "/a.jpg", "ai-txt:*:/"), ("User-Agent: *\nDisallow:", "/a", None),
    ("User-Agent: GPTBot\nDisallow: /", "/a", "ai-txt:GPTBot:/"), ("User-Agent: other\nDisallow: /", "/a", None),
    ("<html></html>", "/a", None)])
def test_an_ai_txt_is_read_like_robots_txt_about_kinds_of_files(content, path, want):
    assert reservation(dict(url=f"https://provider.com{path}"), of_host(ai_txt=content)) == want


@pytest.mark.parametrize("said", [
    "HTTP/1.1 200 OK\r\nX-Robots-Tag: noindex\r\nx-robots-tag: noai\r\n", [["X-Robots-Tag", "noai"]],
    {"x-robots-tag": "noai"}, {"X-Robots-Tag": ["noindex", "noai"]}, '{"X-Robots-Tag": "noai"}',
    '[["x-robots-tag", "noai"]]'])
def test_headers_may_come_in_any_form(said):
    assert reservation(dict(headers=said)) == "noai"
    for nothing in (None, "", "{", [1, 2], [["x"]], "no colon"):
        assert reservation(dict(headers=nothing, url=5)) is None


@pytest.mark.parametrize("columns, want", [
    (dict(tdm_reservation=1.0), "tdm-header"), (dict(tdm_reservation=float("nan")), None),
    (dict(tdm_reservation=0.0), None), (dict(meta_tdm_reservation=[1]), "tdm-meta"),
    (dict(x_robots_tag=["noindex", "noml"]), "noml"), (dict(content_usage=["search=y", "train-ai=n"]), "usage-header")])
def test_a_column_of_numbers_or_lists_says_the_same(columns, want):
    """As pandas writes numbers of which some are missing, and as RFC 9110 sec. 5.3 joins the values of a field."""
    assert reservation(columns) == want


def test_a_store_is_rows_or_a_mirror_of_hosts(tmp_path):
    rows = [dict(domain="www.provider.com", file="tdmrep.json", content=RESERVES),
            dict(domain="b.org", file="/ai.txt", content=AI_TXT), dict(domain="c.org", file="ai.txt", content=None)]
    with gzip.open(tmp_path / "store.jsonl.gz", "wt") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "mirror" / "provider.com" / ".well-known").mkdir(parents=True)
    (tmp_path / "mirror" / "b.org").mkdir()
    (tmp_path / "mirror" / "provider.com" / ".well-known" / "tdmrep.json").write_text(RESERVES)
    (tmp_path / "mirror" / "b.org" / "ai.txt").write_text(AI_TXT)
    for path in ("store.jsonl.gz", "mirror"):
        store = open_reservations(tmp_path / path)
        assert reservation(dict(url="https://www.provider.com/x"), store) == "tdm-file:/"
        assert reservation(dict(url="https://b.org/x.txt"), store) == "ai-txt:*:*.txt"
        assert reservation(dict(url="https://c.org/x"), store) is None


PAGE = """<html><head><title>{0}</title>{1}</head><body><article><p>The lake number {0} is forty kilometres long, and its
water leaves it through a river, in the middle of the city, where swans are fed by everybody who comes.</p>
<p>In the winter of 1963 it froze over, and for some weeks people walked across it, to the other side.</p></article>
</body></html>"""


KINDS = dict(
    noai=dict(x_robots_tag="noai"),
    usage=dict(content_usage="train-ai=n"),
    robots=dict(url="https://c.org/x"),
    noimageai=dict(headers={"X-Robots-Tag": "noimageai"}),
    noml=dict(meta_robots="noml"),
    header=dict(tdm_reservation="1"),
    meta=dict(meta_tdm_reservation="1"),
    file=dict(url="https://provider.com/x"),
    ai=dict(url="https://b.org/x"),
)
STORE = [dict(domain="provider.com", file="tdmrep.json", content=RESERVES),
         dict(domain="b.org", file="ai.txt", content=AI_TXT)]
ROBOTS = [dict(domain="c.org", content="User-agent: *\nAllow: /\nContent-Usage: train-ai=n")]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_each_kind_is_removed_under_its_own_name_and_stands_in_the_audit(tmp_path):
    """Rows and pages; one document of each kind, and twenty that say nothing."""
    pytest.importorskip("trafilatura")
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [dict(id=name, text=f"a text about {name}", **columns) for name, columns in KINDS.items()]
    rows += [dict(id=f"d{i}", text=f"some text {i}", url=f"https://a{i}.org/") for i in range(20)]
    write(folder / "rows.jsonl", rows)
    (folder / "free.html").write_text(PAGE.format(1, ""))
    (folder / "page.html").write_text(PAGE.format(2, '<META name="robots" content="index, noai">'))
    (folder / "tdm.html").write_text(PAGE.format(3, '<meta name="tdm-reservation" content="1">'))
    write(tmp_path / "store.jsonl", STORE)
    write(tmp_path / "robots.jsonl", ROBOTS)
    done = script("prepare.py", folder, f"--out={tmp_path}/data", "--tokenizer=byte",
                  f"--reservations={tmp_path}/store.jsonl", f"--robots={tmp_path}/robots.jsonl")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "data" / "report.json").read_text())
    removed = {reason: n for reason, (n, _) in report["total"]["removed"].items()}
    assert removed == dict.fromkeys(RESERVED, 1) | {"noai": 2, "tdm-meta": 2}
    assert report["total"]["documents"] == 21
    assert set(report["robots"]["top_blocked_hosts"]) == {"provider.com", "b.org", "c.org"}
    with gzip.open(tmp_path / "data" / "removed.jsonl.gz", "rt") as lines:
        reasons = {row["id"]: row["reason"] for row in map(json.loads, lines)}
    assert reasons["rows.jsonl:file"] == "tdm-file:/" and reasons["rows.jsonl:ai"] == "ai-txt:*:*.html"
    assert reasons["rows.jsonl:robots"] == "usage-file:*:/"


def test_a_rule_of_any_form_takes_linear_time():
    rule = json.dumps([{"location": "/" + "*a" * 2000 + "$", "tdm-reservation": 1}])
    assert len(parse_tdmrep(rule)) == 1
    assert reservation(dict(url="https://provider.com/" + "a" * 100_000 + "b"), of_host(tdmrep=rule)) is None
