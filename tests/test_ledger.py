"""
The ledger of a data folder: corpus.audit checks and searches it, prepare.py --remove changes it.

golden/reports: small corpora, and their reports, which commit 58a600a wrote first.
"""

import json
import os
import shutil

import pytest
from conftest import ROOT, script, table
from corpora import fill, kept, ledger, put, refuse, report, rows, text, texts_of, write_lines, written
from lab import run
from test_checkpoint import full

from corpus.ledger import FILE, changed, write_ledger
from corpus.report import markdown
from engine.files import sha256

# Shards are shorter than a document; the vocabulary is bytes, in a file; no robots.txt names the hosts.
FLAGS = f"""--source_by=lang --shard_tokens=250 --val_share=0.2 --tokenizer= --train_bpe=320
    --robots={ROOT}/tests/golden/reports/b.robots.jsonl --probes={ROOT}/tests/golden/reports/probes
    --repetitions=(0,3)""".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A data folder of 60 documents in two sources, and planted passages."""
    root = tmp_path_factory.mktemp("made")
    write_lines(root / "in.jsonl", rows(60))
    fill(root / "data", root / "in.jsonl", *FLAGS)
    return root


@pytest.fixture
def data(made, tmp_path):
    return shutil.copytree(made / "data", tmp_path / "data")


def ask(folder, *args):
    return run("corpus.audit", folder, *args).stdout


# ----------------------------------------------------------------------------------------------------------------------
# the report

ARGUMENTS = dict(
    a="DIR/in --keep_licenses=cc0,mit --robots=DIR/a.robots.jsonl --probes=DIR/probes --repetitions=(0,3) "
    "--val_share=0.2",
    b="DIR/b.jsonl --robots=DIR/b.robots.jsonl --pii=False",
    c="DIR/b.jsonl --blocked=DIR/c.blocked --reservations=DIR/c.reservations.jsonl",
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Data folders: a has every part of a report, b unknown hosts, c other stores than of robots.txt."""
    root = shutil.copytree(f"{ROOT}/tests/golden/reports", tmp_path_factory.mktemp("reports") / "reports")
    for name, args in ARGUMENTS.items():
        fill(root / name, "--tokenizer=apertus:4096", *args.replace("DIR", str(root)).split())
    return root


@pytest.mark.parametrize("name", "abc")
def test_a_report_reads_as_before(reports, name):
    page = (reports / name / "report.md").read_text()
    assert page.replace(str(reports), "DIR") == (reports / f"{name}.md").read_text()


SHARES = """
0    | 5     | 0.0 %
1    | 9999  | < 0.1 %
1    | 300   | 0.3 %
9999 | 10000 | > 99.9 %
5    | 5     | 100.0 %
0    | 0     | -
"""


def test_a_share_never_reads_as_nothing_or_all(reports):
    found = report(reports / "a")
    for part, whole, says in table(SHARES):
        found["total"].update(bytes=int(part), bytes_in=int(whole))
        assert f"were kept, {says} of the bytes" in markdown(found)


# ----------------------------------------------------------------------------------------------------------------------
# check and find


# A file, bytes in it, the bytes that replace them, and words of the error.
DAMAGE = """
documents.parquet        | PAR1               | PAR2               | damaged
documents.parquet        | parquet-cpp        | parquet_cpp        | another sha256
deu_Latn_train_00000.npy | fortran_order      | fortran_0rder      | another sha256
meta.json                | "eos": 2           | "eos": 12          | two versions
report.json              | "version": "       | "version": "0      | two versions
report.json              | "documents_in": 60 | "documents_in": 61 | documents_in
report.json              | "removed": {}      | "removed": {"": 0} | removed
"""


@pytest.mark.parametrize("name, old, new, says", table(DAMAGE))
def test_the_check_sees_what_is_not_as_it_was_written(data, name, old, new, says):
    raw = (data / name).read_bytes()
    (data / name).write_bytes(raw.replace(old.encode(), new.encode()))
    refuse(says, data, name="corpus.audit")
    refuse(says, f"--remove={ROOT}/LICENSE", f"--out={data}")


@pytest.mark.parametrize(
    "column, value, says",
    [("offset", 7, "do not begin where"), ("shard", None, "do not begin where"), ("tokens", 7, "hold other documents")],
)
def test_the_check_counts_the_documents_in_the_shards(data, monkeypatch, column, value, says):
    """One row of the ledger is wrong, although its hash is the one in the report."""
    recorded = report(data)["outputs"]["ledger"]
    monkeypatch.setattr("corpus.report.sha256", lambda path: recorded if path.endswith(FILE) else sha256(path))
    wrong = changed(data, lambda row: row["id"] == "in.jsonl:d7" and row.update({column: value}))
    write_ledger(data / "new", wrong)
    (data / "new").replace(data / FILE)
    refuse(says, data, name="corpus.audit")


def test_a_document_is_found_by_its_id_url_or_text_and_nearly(data, tmp_path):
    row = next(row for row in kept(data) if row["id"] == "in.jsonl:d7")
    letter = tmp_path / "letter.txt"
    letter.write_text(text(7).replace(" ", "\n"))
    passage = " ".join(text(7).split()[20:28])
    names = [("id", row["id"]), ("id", "d7"), ("URL", "http://www.HOST0.example:80/page/7/#top"), ("text", text(7))]
    for how, name in (*names, ("text", letter), ("passage", passage), ("passage", "Number 7.")):
        said = ask(data, f"--find={name}")
        assert said.startswith(f"in.jsonl:d7 is in {data}, by this {how}: {row['tokens']} tokens of source roh_Latn, ")
        assert said.endswith(f"from token {row['offset']:,} of {row['shard']}, {row['url']}, mit, roh_Latn\n")
    assert "nearly this text, similarity 0.9" in ask(data, f"--find={text(7)} And more.")
    assert ask(data, "--find=Host3.example").startswith(
        "Host3.example is the host of 9 documents that came in; kept: 9\n"
    )


# --find, and words of the answer if nothing is found.
MISSING = f"""
in.jsonl:d7x   | 'in.jsonl:d7x' is no id, URL, host or text of a document in
in.jsonl:d7x   | data, nor a part of one
the            | it was not searched: it has fewer than 5 bytes
{ROOT}/LICENSE | /LICENSE is not in
"""


@pytest.mark.parametrize("find, says", table(MISSING))
def test_an_answer_says_what_was_not_found(data, find, says):
    assert says in ask(data, f"--find={find}")


def test_a_duplicate_names_the_document_that_has_its_text(tmp_path):
    put(tmp_path, {f"in/{name}.txt": text(i) for i, name in enumerate("abc")} | {"in/again.txt": text(1)})
    fill(tmp_path / "out", tmp_path / "in")
    removed, stays = ask(tmp_path / "out", "--find=b.txt").splitlines()
    assert removed == "b.txt came in and was removed: duplicate of again.txt "
    assert stays.startswith(f"again.txt is in {tmp_path}/out, by the text of b.txt: ")


def test_a_page_that_opted_out_names_the_copy_that_stays(tmp_path):
    """Of three pages the last has the text of the first."""
    pages = [dict(text=text(i % 2), url=f"https://host{i}.example/") for i in range(3)]
    put(tmp_path, {"list": "host0.example"})
    fill(tmp_path / "out", write_lines(tmp_path / "in.jsonl", pages), f"--blocked={tmp_path}/list")
    host, removed, stays = ask(tmp_path / "out", "--find=host0.example").splitlines()
    assert host.endswith("kept: 0") and removed.startswith("in.jsonl line 1 came in and was removed: blocked-domain:")
    assert stays.startswith(f"in.jsonl line 3 is in {tmp_path}/out, by the text of in.jsonl line 1: ")
    said = script("prepare.py", f"--remove={tmp_path}/list", f"--out={tmp_path}/out").stdout
    assert "\n1 text of the list kept under another id, such as in.jsonl line 3: " in said


def test_a_run_on_the_data_after_a_removal_has_not_read_the_document(lab, tmp_path):
    """The run is another one, whose config.json names these data."""
    after = shutil.copytree(lab / "data", tmp_path / "data")
    put(tmp_path, {"list": "pages.jsonl line 1"})
    run("prepare.py", f"--remove={tmp_path}/list", f"--out={after}")
    config = shutil.copytree(lab / "pretrained", tmp_path / "run") / "config.json"
    words = {f"{lab}/data": f"{after}", report(lab / "data")["version"]: report(after)["version"]}
    for old, new in words.items():
        config.write_text(config.read_text().replace(old, new))
    find = "--find=pages.jsonl line 1", f"--when={tmp_path}/run"
    assert f"none of the 10 steps of {tmp_path}/run has read it\n" in ask(after, *find)
    refuse("ask that folder", shutil.copytree(after, tmp_path / "copy"), *find, name="corpus.audit")


# ----------------------------------------------------------------------------------------------------------------------
# remove


# Newer robots.txt files of hosts 5 and 6 (in new.jsonl host 6 names only an agent that does not count), and a list of
# documents and a host.
ASKED = {
    "list.jsonl": f"""
{{"id": "in.jsonl:d2"}}
{{"url": "https://host2.example/page/30"}}
{{"text": {json.dumps(text(58).replace(" ", "  "))}}}
{{"id": null, "host": "host3.example"}}
""",
    "new.jsonl": r"""
{"domain": "host5.example", "robots": "User-agent: GPTBot\nDisallow: /page"}
{"domain": "host6.example", "robots": "User-agent: Other\nDisallow: /page"}
""",
    "robots/host6.example.txt": "User-agent: GPTBot\nDisallow: /page/6",
}


def test_what_is_left_after_removals_is_a_run_without_these_documents(data, tmp_path):
    """Removed by id, URL, text and host, and by newer robots.txt files, for the agents of the first run."""
    every = rows(60)
    put(tmp_path, ASKED)
    for name, n in (("list.jsonl", 12), ("new.jsonl", 8), ("robots", 1)):
        assert f": {n} document" in run("prepare.py", f"--remove={tmp_path}/{name}", f"--out={data}/").stdout
    gone = [row for i, row in enumerate(every) if i in (2, 6, 30, 58) or i % 7 in (3, 5)]
    fill(tmp_path / "fresh", write_lines(tmp_path / "in.jsonl", [row for row in every if row not in gone]), *FLAGS)
    assert texts_of(data) == texts_of(tmp_path / "fresh")
    assert "60 documents in = 39 kept + 21 removed" in ask(data)
    assert (data / "probes.json").exists()
    out = [row for row in ledger(data) if row["split"] is row["offset"] is None]
    assert [row["id"] for row in out] == [f"in.jsonl:{row['id']}" for row in gone]
    assert report(data)["total"]["tokens_removed_about"] == dict(withdrawn=sum(row["tokens"] for row in out))


# Begins with a byte-order mark, and a row's own id. One URL is of no document here; probe/1 is a planted passage.
LIST = """\ufeffd1 # opted out
# in May
 www.Host3.example

http://www.HOST1.example/page/29/#top\t
https://host9.example/page/29
in.jsonl:d99
probe/1"""


def test_an_entry_that_was_never_there_is_named_after_the_others_are_removed(data, tmp_path, monkeypatch):
    """
    The same list a second time finds nothing to remove. Where hard links fail, shards are copied.
    """
    monkeypatch.setattr(os, "link", full)
    (tmp_path / "list").write_text(LIST)
    unmatched = ["https://host9.example/page/29", "in.jsonl:d99", "probe/1"]
    for after in ("The documents of all other entries were removed", "Nothing was removed"):
        refuse(
            f"list: no kept document of {data} matches {str(unmatched)[1:-1]}. {after}",
            f"--remove={tmp_path}/list",
            f"--out={data}",
        )
        assert "60 documents in = 49 kept + 11 removed" in ask(data)
    out = [row for row in ledger(data) if row["withdrawn"]]
    (removal,) = report(data)["removals"]
    path, tokens = f"{tmp_path}/list", sum(row["tokens"] for row in out)
    assert (removal["date"], removal["file"], removal["sha256"]) == (out[0]["withdrawn"], path, sha256(path))
    assert (removal["documents"], removal["tokens"], removal["reasons"]) == (11, tokens, dict(host=9, id=1, url=1))
    said = ask(data, f"--find={text(1)}")
    assert said.startswith("in.jsonl:d1 came in and was removed: withdrawn:id, https://host1.example/page/1, mit")
    (tmp_path / "more").write_text(next(row["id"] for row in ledger(data) if not row["reason"]))
    fill(data, f"--remove={tmp_path}/more")
    assert [removal["documents"] for removal in report(data)["removals"]] == [11, 1]


@pytest.mark.parametrize("sha256, says", [(full, "is as it was"), (str, "another sha256")])
def test_what_cannot_be_written_leaves_the_data_as_they_were(data, made, tmp_path, monkeypatch, sha256, says):
    """A removal and a new build, with a full disk and with a shard whose hash has changed."""
    monkeypatch.setattr("corpus.folder.sha256", sha256)
    (tmp_path / "list").write_text("in.jsonl:d1")
    before = written(data)
    for asked in (f"--remove={tmp_path}/list", made / "in.jsonl"):
        refuse(says, asked, f"--out={data}")
        assert written(data) == before


# ----------------------------------------------------------------------------------------------------------------------
# a document that is cut, since its source has no other


@pytest.fixture
def cut(tmp_path):
    """A data folder of 20 documents of one source and a longer one of another, of uni.example."""
    longer = "".join(f"{i}: {text(i, 12)}\n" for i in range(200))
    every = [*rows(20), dict(id="letter", text=longer, url="https://uni.example/a", lang="als_Latn", license="cc0")]
    source = write_lines(tmp_path / "in.jsonl", every)
    fill(tmp_path / "data", source, "--source_by=lang", "--val_share=0.1", "--shard_tokens=5000")
    return tmp_path / "data"


def test_a_cut_document_is_found_as_one_also_by_a_passage_across_the_cut(cut):
    """Its first part was read by a run, its last part was not."""
    first, last = (row for row in kept(cut) if row["id"] == "in.jsonl:letter")
    assert (first["split"], last["split"], last["bytes"], last["text"]) == ("train", "val", 0, first["text"])
    run("train.py", "configs/tiny.py", f"--data={cut}", f"--out={cut}.run", "--total_samples=560", "--eval_every=0")
    said = ask(cut, "--find=letter", f"--when={cut}.run").splitlines()
    assert said[0].startswith(
        f"in.jsonl:letter is in {cut}, by this id: {first['tokens']:,} tokens of source als_Latn, train"
    )
    assert said[1].startswith("    read at ")
    assert said[2].startswith(f"in.jsonl:letter (its last part) is in {cut}, by this id: {last['tokens']:,} tokens")
    assert said[3] == f"    for validation: {cut}.run was not trained on it"
    before, after = (texts_of(cut)[split] for split in ("train", "val"))
    passage = max(before, key=len)[-60:] + max(after, key=len)[:60]
    assert "in.jsonl:letter (its last part)" in ask(cut, f"--find={passage}")
    assert "uni.example is the host of 1 document that came in; kept: 1\n" in ask(cut, "--find=uni.example")


@pytest.mark.parametrize("name", ["list", "new.jsonl"])
def test_both_parts_of_a_cut_document_are_removed_as_one_document(cut, tmp_path, name):
    """By its host, and by a newer store of robots.txt."""
    store = json.dumps(dict(domain="uni.example", content="User-agent: GPTBot\nDisallow: /"))
    put(tmp_path, {"list": "uni.example", "new.jsonl": store})
    gone = [row for row in kept(cut) if row["source"] == "als_Latn"]
    said = fill(cut, f"--remove={tmp_path}/{name}")
    tokens = sum(row["tokens"] for row in gone)
    assert f": 1 document ({tokens:,} tokens) removed, 20 stay" in said
    assert "source als_Latn keeps no document for training" in said
    assert not any("uni.example" in (row["url"] or "") for row in kept(cut))
    assert "21 documents in = 20 kept + 1 removed" in ask(cut)
    assert report(cut)["total"]["removed"] == dict(withdrawn=[1, gone[0]["bytes"]])
    (removal,) = report(cut)["removals"]
    assert (report(cut)["cut"], removal["documents"], removal["tokens"]) == (None, 1, tokens)
    assert "letter came in and was removed: withdrawn" in ask(cut, "--find=letter")
