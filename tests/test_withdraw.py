"""prepare.py --remove as a steward uses it: the meaning of a line, removals, reasons, and the published report."""

import hashlib
import itertools
import re
import shutil

import pytest
from conftest import refused, script
from corpora import fill, kept, ledger, put, refuse, report, text, write_lines, written
from lab import run

from corpus.robots import verdict
from data import read_meta, warn_if_changed
from engine import parallel

# Pages of two hosts, of a third one in a robots.txt alone, and of a source with one document for validation.
URLS = """
https://uni.example/~jane/papers
https://uni.example/~jane/papers/1
https://uni.example/~jane2
https://www.uni.example/news?from=/~jane/
https://blog.uni.example/
https://uni.example.org/
https://solo.example
https://solo.example/a
https://solo.example/b/c
""".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    rows = [dict(text=text(i), url=url) for i, url in enumerate(URLS)]
    fill(root / "data", write_lines(root / "in.jsonl", rows), "--val_share=0.3")
    return root


@pytest.fixture
def data(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copy") / "data"


def removal(data, *lines, dry_run=False):
    """The finished command that removes what these lines name."""
    put(data.parent, {"list": "\n".join(lines)})
    return script("prepare.py", f"--remove={data.parent}/list", f"--out={data}", *["--dry_run"] * dry_run)


def stay(data):
    return {row["url"] for row in kept(data)}


def test_an_email_address_takes_no_host(data):
    for address in ("jane.doe@uni.example", "mailto:jane.doe@uni.example", "https://jane@uni.example"):
        refused(removal(data, address), "Nothing was removed")
    rows = write_lines(data.parent / "rows.jsonl", [dict(host="jane.doe@uni.example")])
    refuse("Nothing was removed", f"--remove={rows}", f"--out={data}")
    put(data.parent, {"blocked": "jane.doe@uni.example"})
    blocked = f"--blocked={data.parent}/blocked", f"--out={data.parent}/other"
    refuse("'jane.doe@uni.example'", data.parent / "in.jsonl", *blocked)


def test_an_email_address_is_searched_in_the_texts_although_its_host_is_known(tmp_path):
    code = [dict(text=f"{text(0)} bob@uni.example", url="https://uni.example/a", lang="code"), dict(text=text(1))]
    fill(tmp_path / "data", write_lines(tmp_path / "in.jsonl", code))
    found = script("corpus.audit", tmp_path / "data", "--find=bob@uni.example").stdout
    assert found.startswith(f"in.jsonl line 1 is in {tmp_path}/data, by this passage: ")
    fill(tmp_path / "text", write_lines(tmp_path / "in.jsonl", [row | dict(lang="eng") for row in code]))
    absent = script("corpus.audit", tmp_path / "text", "--find=bob@uni.example").stdout
    assert absent.startswith("'bob@uni.example' is no id") and "has replaced e-mail addresses" in absent


def test_a_slash_or_a_scheme_alone_names_nothing(tmp_path):
    """Not the documents without a URL either."""
    rows = [dict(text=text(0)), dict(text=text(1), url="https://"), dict(text=text(2), url="https://uni.example/")]
    fill(tmp_path / "data", write_lines(tmp_path / "in.jsonl", rows))
    before = written(tmp_path / "data")
    for line in ("/", "//", "http://", "https://", "///"):
        refused(removal(tmp_path / "data", line), f"matches '{line}'. Nothing was removed")
        refused(script("corpus.audit", tmp_path / "data", f"--find={line}"), f"find='{line}' names nothing")
    assert written(tmp_path / "data") == before


MEANINGS = {
    "uni.example": set(URLS[:5]),
    "https://uni.example": set(URLS[:5]),  # no page has this URL
    "//uni.example/": set(URLS[:5]),
    "https://solo.example": {URLS[6]},
    "solo.example/": set(URLS[6:]),
    "uni.example/~jane/": {URLS[0], URLS[1]},
    "HTTPS://WWW.uni.example/%7Ejane/": {URLS[0], URLS[1]},
    "uni.example/~jane/papers/": {URLS[0], URLS[1]},
    "https://uni.example/~jane/papers/": {URLS[0]},
    "uni.example/~jane/papers": {URLS[0]},
    "uni.example/~jane": set(),
    "https://uni.example/~jan/": set(),
}


@pytest.mark.parametrize("line", MEANINGS)
def test_a_line_takes_a_page_a_host_or_what_is_below(data, line):
    removal(data, line)
    assert {*URLS} - stay(data) == MEANINGS[line]


def test_the_answer_says_how_many_documents_the_other_meaning_has(data):
    exact = "https://solo.example: 1 document by url (this page alone; 3 documents of host solo.example: write "
    assert exact in removal(data, "https://solo.example", dry_run=True).stdout
    site = "https://uni.example: 5 documents by host (no page has exactly this URL; 5 documents of host uni.example)"
    assert site in removal(data, "https://uni.example", dry_run=True).stdout


LIST = "# asked for in May", "solo.example", "in.jsonl line 7", "", "https://uni.example/~jane2", "jane@uni.example"


def test_a_preview_writes_nothing_and_says_by_entry_what_the_removal_says_and_records(data):
    before = written(data)
    shown = removal(data, *LIST, dry_run=True)
    assert written(data) == before and not {path.name for path in data.parent.iterdir()} - {"data", "in.jsonl", "list"}
    done = removal(data, *LIST)
    choice = shown.stdout.partition("would be removed")[0]
    assert re.match(
        """     2  solo.example: 3 documents by host
     3  in.jsonl line 7: 1 document by id
     5  https://uni.example/~jane2: 1 document by url
     6  jane@uni.example: no document .*
removed by: host 2, id 1, url 1
""",
        choice,
    )
    assert done.stdout.startswith(choice) and (shown.returncode, done.returncode) == (2, 2)
    (recorded,) = report(data)["removals"]
    assert recorded["reasons"] == dict(host=2, id=1, url=1)
    by_entry = {entry["number"]: entry["reasons"] for entry in recorded["entries"]}
    assert by_entry == {2: dict(host=3), 3: dict(id=1), 5: dict(url=1), 6: {}}
    assert {row["reason"] for row in ledger(data)} == {"", "withdrawn:host", "withdrawn:id", "withdrawn:url"}


def test_a_report_has_the_number_and_the_sha256_of_an_entry_and_never_its_text(data):
    """Also of one that a report of an older version has in clear text."""
    old = data / "report.json"
    removal(data, "solo.example/a", "jane.doe@home.example")
    address = hashlib.sha256(b"jane.doe@home.example").hexdigest()
    assert [entry["sha256"] for entry in report(data)["removals"][0]["entries"]][1] == address
    (recorded,) = report(data)["removals"]
    recorded.pop("entries")
    clear = recorded | dict(unmatched=["jane.doe@home.example"])
    old.write_text(old.read_text().replace('"removals": [', '"removals": [' + str(clear).replace("'", '"') + ","))
    removal(data, "solo.example/b/c")
    for name in ("report.json", "report.md"):
        page = (data / name).read_text()
        assert "jane.doe" not in page and page.count(address[:16]) == 2


def test_only_what_a_newer_store_refuses_goes(tmp_path):
    """Absence from it, a failed fetch and a web page instead of the file are no withdrawal, with --missing=deny too."""
    hosts = [f"host{i}.example" for i in range(6)]
    rows = [dict(text=text(i), url=f"https://{host}/page") for i, host in enumerate(hosts)]
    every = [dict(domain=host, content="") for host in hosts]
    refusing = "User-agent: GPTBot\nDisallow: /"
    newer = [
        dict(domain=hosts[0], content=refusing),
        dict(domain=hosts[1], content=None),
        dict(domain=hosts[2], content="<html>"),
        dict(domain=hosts[3], content="User-agent: GPTBot\nContent-Usage: train-ai=n\nAllow: /"),
    ]
    store = write_lines(tmp_path / "store.jsonl", every)
    fill(tmp_path / "data", write_lines(tmp_path / "in.jsonl", rows), f"--robots={store}", "--missing=deny")
    write_lines(store, newer)
    said = script("prepare.py", f"--remove={store}", f"--out={tmp_path}/data").stdout
    reasons = {row["url"]: row["reason"] for row in ledger(tmp_path / "data")}
    assert {url for url, reason in reasons.items() if reason} == {rows[0]["url"], rows[3]["url"]}
    assert not verdict(rows[1]["url"], {}, missing="deny")[0]
    assert report(tmp_path / "data")["removals"][0]["reasons"] == {"robots:GPTBot": 1, "usage-file:GPTBot": 1}
    assert "removed by: robots:GPTBot 1, usage-file:GPTBot 1" in said
    assert report(tmp_path / "data")["robots"]["removed_by_agent"] == {"GPTBot": [1, len(text(0))]}
    assert "kept: 3 documents of hosts that the store lacks or could not fetch" in said


def test_the_only_validation_document_of_a_source_can_be_withdrawn(tmp_path):
    rows = [dict(text=text(i), lang=("deu", "roh")[i % 2]) for i in range(8)]
    fill(tmp_path / "data", write_lines(tmp_path / "in.jsonl", rows), "--source_by=lang", "--val_share=0.3")
    out = shutil.copytree(tmp_path / "data", tmp_path / "out")
    val = [row["id"] for row in kept(out) if row["split"] == "val" and row["source"] == "deu"]
    done = removal(out, *val)
    assert done.returncode == 0 and "source deu keeps no document for validation" in done.stdout
    assert {row["id"] for row in kept(tmp_path / "data")} - {row["id"] for row in kept(out)} == {*val}
    assert script("corpus.audit", out).returncode == 0
    refused(removal(out, *(row["id"] for row in kept(out))), "would keep no document", "Nothing was removed")


def test_a_run_whose_data_lose_documents_meanwhile_says_so_at_its_end(tmp_path, monkeypatch, capsys):
    """They are removed in its third step."""
    source = write_lines(tmp_path / "in.jsonl", [dict(text=text(i)) for i in range(40)])
    fill(tmp_path / "data", source, "--val_share=0.1")
    before = read_meta(f"{tmp_path}/data")
    warn_if_changed(f"{tmp_path}/data", before)
    assert not capsys.readouterr().out
    calls, square_norm = itertools.count(), parallel.square_norm

    def removing(*args):
        if next(calls) == 2:
            put(tmp_path, {"list": "in.jsonl line 1\nin.jsonl line 2"})
            fill(tmp_path / "data", f"--remove={tmp_path}/list")
        return square_norm(*args)

    monkeypatch.setattr(parallel, "square_norm", removing)
    said = run(
        "train.py", "configs/tiny.py", f"--data={tmp_path}/data", f"--out={tmp_path}/run", "--eval_every=1"
    ).stdout
    versions = f"it was version {before['version']:.16}, it is now {report(tmp_path / 'data')['version']:.16}."
    assert f"--data={tmp_path}/data has lost 2 documents since this run began: {versions}" in said
    assert (tmp_path / "run" / "summary.json").exists()
