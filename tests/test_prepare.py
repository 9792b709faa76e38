"""prepare.py: documents in = kept + removed; the same bytes whatever stops it; nothing of the user's is lost."""

import glob
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from conftest import ROOT
from corpora import BYTE, fill, kept, ledger, put, refuse, report, rows, streams, text, texts_of, write_lines, written
from lab import run as run_module

import prepare
import tokenizer
from configurator import settings
from corpus import build, folder, stages
from corpus.dedup import fingerprint
from data import read_meta
from engine import files

# ----------------------------------------------------------------------------------------------------------------------
# the files of the folder

# Texts that are empty, equal, nearly equal or contain a prompt; two sources whose names give the same file name; a null
# license; columns of the user's that are not UTF-8; and a text that is in validation by its hash, and would not
# be by the hash of the text without its addresses.
ODD = r"""
{"id": "empty", "text": " \n", "lang": "nothing of it stays"}
{"id": "one", "text": "We walked along the river until the mill came into view and did not speak of the war again"}
{"id": "two", "text": "We walked along the  river until the mill came into view and did not speak of the war again"}
{"id": "near", "text": "We walked along the river until the mill came into view and did not speak of the war again. So"}
{"id": "quiz", "text": "Question: how many legs does a healthy spider have? Answer: eight"}
{"id": "mine", "text": "A text of one.", "lang": "a+b", "bands": "x", "license": "\ud800", "url": "https://e.de/\ud800"}
{"id": "dash", "text": "A text of another.", "lang": "a-b", "license": null, "shard": 5}
{"id": 0, "text": "A text of nobody.", "lang": 0, "license": ""}
{"id": "mail", "text": "Write to eva@example.org or bob@example.org. They know."}
"""
BAN = "User-agent: *\nDisallow: /"
FILES = {
    "in/a.jsonl": ODD,
    "in/bad.txt": b"Gr\xfcezi",
    "in/code.py": "# Ask ann@example.org\nprint(1)\n",
    "in/note.txt": "What was said.",
    "in/scan.pdf": "%PDF",
    "robots.jsonl": r'{"domain": "host1.example", "content": "User-agent: GPTBot\nDisallow: /page/1"}',
    "prompts.txt": "How many legs does a healthy spider have?",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus in which every reason for removal occurs: (folder, arguments, {id: text} of readable documents)."""
    root, every = put(tmp_path_factory.mktemp("corpus"), FILES), rows(150)
    put(root, {"in/b.jsonl.gz": gzip.compress(write_lines(root / "b.jsonl", every).read_bytes())})
    texts = {name: FILES[f"in/{name}"] for name in ("code.py", "note.txt")}
    texts |= {f"a.jsonl:{row['id']}": row["text"] for row in map(json.loads, ODD.strip().splitlines())}
    texts |= {f"b.jsonl.gz:{row['id']}": row["text"] for row in every}
    # A file of an unknown kind that is named counts as an unreadable document.
    rules = f"{root}/in/scan.pdf --robots={root}/robots.jsonl --decontaminate={root}/prompts.txt --near_dedup=0.72"
    rules += " --source_by=lang --max_tokens=510 --shard_tokens=30000 --val_share=.1"
    args = [root / "in", *rules.split()]
    fill(root / "out", *args)
    return root / "out", args, texts


def test_each_document_is_kept_or_removed_for_a_reason_to_the_byte(corpus):
    out, _, texts = corpus
    found = {row["id"]: row for row in ledger(out)}
    total = report(out)["total"]
    sizes = {}
    assert found.keys() == {*texts, "bad.txt", "scan.pdf"}
    for name, row in found.items():
        size = len(texts.get(name, "").encode())
        kind = row["reason"].partition(":")[0]
        assert row["bytes"] == size and not (kind and row["written"] + row["tokens"])
        sizes[kind] = np.add(sizes.get(kind, 0), (1, size)).tolist()
    assert [total["documents_in"], total["bytes_in"]] == np.sum([*sizes.values()], 0).tolist()
    assert [total["documents"], total["bytes"]] == sizes.pop("") and total["removed"] == sizes
    assert sizes.keys() == set("unreadable empty robots tokens contaminated duplicate near-duplicate".split())
    # The first of equal, and of nearly equal, texts in the input stays.
    assert [found[f"a.jsonl:{name}"]["reason"] for name in ("one", "two", "near")] == [
        "",
        "duplicate",
        "near-duplicate",
    ]
    assert {"0", "a+b", "a-b", "deu_Latn", "none", "nothing of it stays"} < read_meta(str(out))["sources"].keys()


def test_the_tokens_of_a_row_are_its_text_and_the_order_and_the_split_are_hashes(corpus):
    out, _, texts = corpus
    every, at = streams(out), Counter()
    for row in sorted(kept(out), key=lambda row: hashlib.sha256(row["id"].encode()).digest()):
        stream, plain = (row["source"], row["split"]), texts[row["id"]]
        assert at[stream] == 30_000 * int(row["shard"][-9:-4]) + row["offset"]
        begin, *ids, end = every[stream][at[stream] : at[stream] + row["tokens"]].tolist()
        at[stream] += row["tokens"]
        assert row["split"] == ("val" if fingerprint(plain) < 0.1 * 2**64 else "train")
        # Code keeps its addresses.
        if row["id"] == "a.jsonl:mail":
            plain = "Write to <email-pii> or <email-pii>. They know."
            assert row["email"] == 2
        assert (begin, BYTE.decode(ids), end) == (BYTE.bos, plain, BYTE.eos)
        assert row["written"] == len(plain.encode())
    assert {name: len(stream) for name, stream in every.items() if len(stream)} == at


def run(*args, first=""):
    """Start prepare.py in a new process that first runs the lines `first`."""
    code = f"{first}\nimport prepare\nfrom configurator import run\nprepare.SMALL = 0\nrun(prepare.main, vars(prepare))"
    return subprocess.Popen(
        [sys.executable, "-c", code, "--tokenizer=byte", *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_any_workers_any_groups_and_a_kill_give_the_same_bytes(corpus, tmp_path):
    """Finished pieces are not done again. A killed --dry_run that resumes without the flag writes the folder."""
    began, work = set(), f"{tmp_path}/out.tmp/work"
    for workers, until in ((3, "sift/1.json"), (2, "tokens/3.json"), (1, "")):
        process = run(
            *corpus[1],
            f"--out={tmp_path}/out",
            f"--workers={workers}",
            f"--dry_run={bool(until)}",
            first="from corpus import stages\nstages.GROUP, stages.BUCKET = 3000, 5000",
        )
        while until and process.poll() is None and not glob.glob(f"{work}/{until}"):
            time.sleep(0.002)
        if until:
            process.send_signal(signal.SIGKILL)
        # communicate() returns when the last worker has closed the pipes too.
        said, err = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL * bool(until), err
        began |= {os.stat(file).st_ino for file in glob.glob(f"{work}/sift/[0-2].json")}
    assert len(began) == 3 and "resuming" in said
    # The row groups of the ledger depend on GROUP, so we compare its rows.
    one, other = (written(out) | {"documents.parquet": ledger(out)} for out in (tmp_path / "out", corpus[0]))
    assert one == other and os.listdir(tmp_path) == ["out"]


def test_a_run_resumes_only_with_the_settings_and_files_that_decide_what_it_writes(tmp_path):
    root = put(tmp_path, {"a.txt": "text", "list": "a.org"})
    plan = settings(vars(prepare)) | dict(blocked=f"{root}/list")

    def key(**changed):
        return build.key_of(plan | changed, build.find([f"{root}/a.txt"])[0])

    before = key()
    assert {name for name in plan if key(**{name: "other"}) == before} == {"workers", "dry_run"}
    os.utime(root / "a.txt", (1, 1))
    assert key() != before


def test_the_default_corpus_is_code_under_its_licence_split_by_a_hash_of_the_ids(tmp_path, monkeypatch):
    """Without tests, tables and other files; addresses in code stay; nothing says that opt-outs count."""
    names = [f"m{i}.py" for i in range(20)]
    put(tmp_path / "lib", {name: f"# {name}: ask ann@example.org" for name in names})
    put(tmp_path / "lib", {"test/a.py": "", "pkg/encodings/b.py": "", "c.txt": "", "bad.py": b"\xff"})
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    assert "opt-outs" not in fill(tmp_path / "out", "--val_share=0.3")
    found = {row["id"]: row for row in ledger(tmp_path / "out")}
    assert found.keys() == {*names, "bad.py"}
    for name, row in found.items():
        assert (row["language"], row["license"], row["email"]) == ("code", "PSF-2.0", 0)
        first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < 0.3 * 2**64
        assert row["split"] == (None if name == "bad.py" else "val" if first else "train")


def test_files_of_the_user_go_to_a_folder_of_their_own(monkeypatch):
    """Not to data/stdlib, unless the user names it."""

    def out(requested):
        return build.configuration(settings(vars(prepare)), requested).out

    assert out([]) == "data/stdlib"
    monkeypatch.setattr(prepare, "paths", ["texts/"])
    assert out(["tokenizer"]) == "data/mine"
    assert out(["out"]) == "data/stdlib"
    monkeypatch.setattr(prepare, "remove", "list")
    assert out([]) == "data/stdlib"


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    file = write_lines(tmp_path / "in.jsonl", rows(9))

    def changing(*args):
        file.write_text(file.read_text() + " ")
        return folder.write_tokens(*args)

    monkeypatch.setattr(stages, "write_tokens", changing)
    refuse("has changed", "--tokenizer=byte", file, f"--out={tmp_path}/out")


@pytest.mark.parametrize("setting", ["robots", "reservations", "blocked"])
def test_a_store_that_is_replaced_while_it_is_read_is_an_error(tmp_path, monkeypatch, setting):
    """Its sha256 in the report would be that of a file that was not used."""
    row = dict(
        domain="a.org", **dict(robots=dict(content=""), reservations=dict(file="ai.txt", content="")).get(setting, {})
    )
    store = write_lines(tmp_path / "store.jsonl", [row])

    def changing(*args):
        write_lines(store, [row | dict(domain="b.org")])
        return folder.write_tokens(*args)

    monkeypatch.setattr(stages, "write_tokens", changing)
    how = write_lines(tmp_path / "in.jsonl", rows(9)), f"--{setting}={store}", f"--out={tmp_path}/out"
    refuse(f"--{setting}={store} has changed while it was read", "--tokenizer=byte", *how)


# A row of headers and <meta> in a parquet, in each of the forms that pyarrow has for them; {} says nothing.
SHAPES = [
    ("headers", pyarrow.list_(pyarrow.struct([("name", "string"), ("value", "string")])), [("X-Robots-Tag", "noai")]),
    ("headers", pyarrow.list_(pyarrow.struct([("key", "binary"), ("value", "binary")])), [(b"x-robots-tag", b"noai")]),
    ("headers", pyarrow.map_("string", "string"), [("X-Robots-Tag", "noai")]),
    ("headers", pyarrow.binary(), b"HTTP/1.1 200 OK\r\nX-Robots-Tag: noai\r\n"),
    ("Response-Headers", pyarrow.string(), '{"x-robots-tag": ["noai"]}'),
    ("metas", pyarrow.list_(pyarrow.struct([("name", "string"), ("content", "string")])), [("robots", "noai")]),
    ("metas", pyarrow.string(), '[["robots", "noai"]]'),
    ("X-Robots-Tag", pyarrow.string(), "noai"),
    ("X-Robots-Tag", pyarrow.binary(), b"noai"),
    ("x_robots_tag", pyarrow.list_(pyarrow.string()), ["noindex", "noai"]),
    ("headers", pyarrow.string(), "{'X-Robots-Tag': 'noai'}"),
]


def test_headers_and_meta_of_a_parquet_are_read_or_counted_as_unread(tmp_path):
    """The last shape, a dict as Python prints it, is not read. URLs may be bytes too."""
    for n, (name, kind, value) in enumerate(SHAPES):
        table = {"text": [text(n), text(99)], "url": [f"https://a.org/{n}".encode(), b"https://b.org/"]}
        kinds = [("text", "string"), ("url", "binary"), (name, kind)]
        columns = pyarrow.table(table | {name: pyarrow.array([value, None], kind)}, pyarrow.schema(kinds))
        (tmp_path / "in" / str(n)).mkdir(parents=True)
        pyarrow.parquet.write_table(columns, tmp_path / "in" / str(n) / f"{n}.parquet")
    robots = write_lines(tmp_path / "robots.jsonl", [dict(domain=host, content="") for host in ("a.org", "b.org")])
    fill(tmp_path / "out", tmp_path / "in", f"--robots={robots}")
    reasons = {row["id"]: row["reason"] for row in ledger(tmp_path / "out") if row["url"].startswith("https://a.org")}
    assert len(reasons) == len(SHAPES) and [*reasons.values()].count("noai") == len(SHAPES) - 1
    counts = report(tmp_path / "out")["robots"]
    assert counts["statements"] == len(SHAPES) - 1
    assert counts["marks"]["unread"] == dict(documents=1, kept=1, hosts=["a.org"])
    assert "1 document of 1 host: headers, <meta> or <link> that cannot be read; kept: 0" in fill(
        tmp_path / "out", tmp_path / "in", f"--robots={robots}", "--missing=deny"
    )
    assert report(tmp_path / "out")["total"]["removed"]["unread"][0] == 1


def test_the_report_names_hosts_with_several_files_and_what_only_an_older_one_refuses(tmp_path):
    """And a folder of a store names the files that it has not read."""
    rows = [
        dict(text=text(n), url=f"https://{host}/{n}")
        for n, host in enumerate(["a.org", "a.org", "b.org", "c.org:8443"])
    ]
    dated = [dict(domain="a.org", date=f"2026-0{n}-01", content=content) for n, content in ((9, ""), (7, BAN))]
    write_lines(put(tmp_path, {"store/notes.md": ""}) / "store" / "s.jsonl", [*dated, dict(domain="b.org", content="")])
    write_lines(tmp_path / "store" / "t.jsonl", [dict(domain="c.org", content="License: https://l.org/l.xml")])
    how = write_lines(tmp_path / "in.jsonl", rows), f"--robots={tmp_path}/store"
    shown = fill(tmp_path / "any", *how)
    assert "--robots: not read: 1 (.md), such as notes.md" in shown
    assert "1 host with different files in a store: any of them may refuse" in shown
    assert "2 documents of 1 host: refused by an older file of the host alone" in shown
    counts = report(tmp_path / "any")["robots"]
    assert counts["marks"]["older"] == dict(documents=2, kept=0, hosts=["a.org"])
    # The file of c.org says nothing of its port 8443.
    assert counts["hosts"]["unknown"] == 1
    assert len(kept(tmp_path / "any")) == 2
    fill(tmp_path / "last", *how, "--snapshots=last")
    assert len(kept(tmp_path / "last")) == 4


def test_rows_without_the_key_of_their_licence_are_removed_where_licences_are_chosen(tmp_path):
    licensed = [dict(text=text(0), license="cc0"), dict(text=text(1), license="CC0"), dict(text=text(2))]
    fill(tmp_path / "out", write_lines(tmp_path / "in.jsonl", licensed), "--keep_licenses=cc0")
    assert [row["reason"] for row in ledger(tmp_path / "out")] == ["", "", "license"]


# ----------------------------------------------------------------------------------------------------------------------
# the only document of a source is cut

POEM = "".join(f"Line {i} of the poem: {text(i, i % 9)}" for i in range(400))


def test_the_last_part_of_the_only_document_is_for_validation_from_the_begin_of_a_line_on(tmp_path):
    """Its copy is removed. The parts, in many shards, are the text again; no other number changes."""
    put(tmp_path, {"in/a.txt": POEM, "in/b.txt": POEM})
    said = fill(tmp_path / "out", tmp_path / "in", "--val_share=0.1", "--shard_tokens=700")
    (train,), (val,) = texts_of(tmp_path / "out").values()
    assert train + val == POEM and train.endswith("\n")
    # One line has less than 80 characters.
    assert abs(len(val) - 0.1 * len(POEM)) < 80
    assert (
        f"1 document is cut, such as a.txt, because the source has no other: the last part ({len(val) / 1000:.1f} kB)"
        in said
    )
    assert "1 document is cut, such as a.txt" in (tmp_path / "out" / "report.md").read_text()
    total = report(tmp_path / "out")["total"]
    assert (total["documents_in"], total["documents"], total["bytes"]) == (2, 1, len(POEM))
    assert (total["written"], total["tokens"]) == (len(POEM), len(POEM) + 4)
    assert "2 documents in = 1 kept + 1 removed" in run_module("corpus.audit", tmp_path / "out").stdout


def test_the_only_document_of_a_source_is_cut_and_the_vocabulary_learns_from_its_first_part(tmp_path):
    """The others are split by their hashes. Planted passages count for no source."""
    every = [dict(text=text(i) * 9, lang="x") for i in range(60)] + [
        dict(text="one word\n" * 900 + "zqzqj " * 2000, lang="y")
    ]
    put(tmp_path, {"probes": "A planted passage."})
    fill(
        tmp_path / "out",
        write_lines(tmp_path / "in.jsonl", every),
        "--tokenizer=",
        "--train_bpe=400",
        "--source_by=lang",
        "--val_share=0.5",
        f"--probes={tmp_path}/probes",
        "--repetitions=(1,)",
    )
    sources = read_meta(str(tmp_path / "out"))["sources"]
    assert [sources["y"][split]["documents"] for split in ("train", "val")] == [1, 1]
    assert sources["probes"]["train"]["documents"] == 1
    rows = [row for row in kept(tmp_path / "out") if row["source"] == "x"]
    assert {row["split"] == "val" for row in rows if fingerprint(text(int(row["id"].split()[-1]) - 1) * 9) < 2**63} == {
        True
    }
    assert len(tokenizer.load_for(str(tmp_path / "out")).encode(" zqzqj")) > 1


# A text, and the part of it that is for validation at --val_share=0.25.
SMALL_TEXTS = [
    ("a", ""),
    ("a" * 28, ""),
    ("a" * 32, "a" * 8),
    ("日本語文" * 5, "文日本語文"),
    ("ab\n" * 12, "ab\n" * 3),
    ("a title\n" + "b" * 92, "b" * 25),
    ("A letter to a person at eva@example.org. Yes.", "<email-pii>. Yes."),
]


@pytest.mark.parametrize("whole, val", SMALL_TEXTS)
def test_a_short_document_is_cut_between_characters_or_stays_whole(tmp_path, whole, val):
    said = fill(tmp_path / "out", put(tmp_path, {"a.txt": whole}) / "a.txt", "--val_share=0.25")
    whole = whole.replace("eva@example.org", "<email-pii>")
    assert texts_of(tmp_path / "out") == dict(train=[whole.removesuffix(val)], val=[val] if val else [])
    assert ("the only document is for training" in said) == (not val)


def test_two_documents_are_not_cut_and_without_a_share_none_is(tmp_path):
    """Whatever the hashes of two documents are, one of them is for validation."""
    inputs = [write_lines(tmp_path / f"{n}.jsonl", [dict(text=text(i)) for i in range(n)] * 2) for n in (1, 2)]
    assert "the only document is for training" in fill(tmp_path / "one", inputs[0], "--val_share=0")
    assert texts_of(tmp_path / "one") == dict(train=[text(0)], val=[])
    fill(tmp_path / "two", inputs[1], "--val_share=0")
    assert sorted(map(len, texts_of(tmp_path / "two").values())) == [1, 1]


def test_one_text_is_enough_to_train_on(tmp_path):
    put(tmp_path, {"input.txt": "".join(text(i) for i in range(330))})
    assert 150_000 < (tmp_path / "input.txt").stat().st_size < 250_000
    run_module("prepare.py", tmp_path / "input.txt", f"--out={tmp_path}/data")
    how = "--total_samples=16", "--warmup_samples=8", "--decay_samples=8", f"--out={tmp_path}/run"
    run_module("train.py", "configs/tiny.py", f"--data={tmp_path}/data", *how)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["val_bpb"] > 0


def test_a_vocabulary_is_learnt_from_some_of_the_training_split_alone(tmp_path, monkeypatch):
    """Each document repeats its own word: only words of training documents may become a token."""
    monkeypatch.setattr(stages, "BUCKET", 1)
    monkeypatch.setattr(stages, "BPE_CHARS", 2000)
    words = [f"w{chr(97 + i)}{chr(122 - i)}qx" for i in range(20)]
    fill(
        tmp_path / "out",
        write_lines(tmp_path / "in.jsonl", [dict(text=f"{word} " * 50) for word in words]),
        "--tokenizer=",
        "--train_bpe=400",
        "--val_share=0.5",
    )
    tok = tokenizer.load_for(str(tmp_path / "out"))
    learnt = {word for word in words if len(tok.encode(f" {word}")) == 1}
    assert learnt < {word for word in words if fingerprint(f"{word} " * 50) >= 2**63}
    # Seven documents of 300 characters exceed BPE_CHARS = 2000.
    assert len(learnt) == 7


def test_probes_are_planted_as_often_as_promised_and_the_controls_nowhere(tmp_path):
    """Also the passage that is a document of the corpus too."""
    passages = [text(i, 30) for i in range(900, 906)]
    write_lines(tmp_path / "probes.jsonl", [dict(text=one) for one in passages])
    fill(
        tmp_path / "out",
        write_lines(tmp_path / "in.jsonl", [*rows(30), dict(text=passages[0])]),
        f"--probes={tmp_path}/probes.jsonl",
        "--repetitions=(0,3)",
    )
    said = json.loads((tmp_path / "out" / "probes.json").read_text())["probes"]
    seen = Counter(sum(texts_of(tmp_path / "out").values(), []))
    promised = {BYTE.decode(one["ids"]): one["repetitions"] for one in said}
    assert promised == {one: seen[one] for one in passages}
    assert sorted(seen[one] for one in passages) == [0, 0, 0, 3, 3, 3]


def test_reading_stops_at_max_bytes(tmp_path, monkeypatch):
    """
    Each text is in two files of 40, and counts once. The first file has 4,942 bytes of text, the third 4,919: together
    exactly --max_bytes.
    """
    monkeypatch.setattr(stages, "GROUP", 11_000)
    inputs = [write_lines(tmp_path / f"{i:02}.jsonl", rows(10, i // 2 * 10)) for i in range(40)]
    fill(tmp_path / "out", *inputs, "--max_bytes=9861")
    assert len(kept(tmp_path / "out")) == 20
    assert {
        file["name"]
        for file in report(tmp_path / "out")["inputs"]
        if file["problem"] != "not read: --max_bytes was reached"
    } == {"00.jsonl", "01.jsonl", "02.jsonl"}


def test_documents_without_a_url_and_files_in_another_encoding_are_counted(tmp_path):
    """With --missing=deny these documents are removed."""
    every = [dict(text=text(i), link=f"https://a.org/{i}" * (i > 1)) for i in range(9)]
    put(tmp_path, {"in/other.txt": "Grüezi".encode("latin-1"), "in/utf-8.txt": "Grüezi mitenand"})
    write_lines(tmp_path / "in" / "a.jsonl", every)
    robots = write_lines(tmp_path / "robots.jsonl", [dict(domain="a.org", content="User-agent: *\nDisallow: /8")])
    how = tmp_path / "in", f"--robots={robots}", "--url_field=link", "--encoding=latin-1"
    printed = fill(tmp_path / "out", *how)
    page = (tmp_path / "out" / "report.md").read_text()
    consulted = "robots.txt of 1 of 1 host; tdmrep.json, ai.txt and license.xml not consulted (--reservations)"
    for says in (
        consulted,
        "4 documents have no URL: not checked",
        "1 file read as latin-1: not UTF-8, such as other.txt",
    ):
        assert says in printed and says in page
    assert files.sha256(robots) in page
    assert {"Grüezi", "Grüezi mitenand"} < {*sum(texts_of(tmp_path / "out").values(), [])}
    fill(tmp_path / "deny", *how, "--missing=deny")
    removed = report(tmp_path / "deny")["total"]["removed"]
    assert (removed["robots"][0], removed["no-url"][0]) == (1, 4)


def test_scores_choose_the_best_of_each_language(tmp_path):
    fill(
        tmp_path / "out",
        write_lines(tmp_path / "in.jsonl", [*rows(60), dict(text="nan.", lang="roh_Latn", score=float("nan"))]),
        "--keep_top=0.19",
        "--score_field=score",
    )
    want = set()
    for language in range(2):
        best = sorted(rows(60)[language::2], key=itemgetter("score"))[-6:]
        want |= {f"in.jsonl:{row['id']}" for row in best}
    assert {row["id"] for row in kept(tmp_path / "out")} == want


def test_bounds_on_tokens_count_begin_and_end(tmp_path):
    """The text repeats token 65,537, which cut to 16 bits would be 1, the begin of a document."""
    fill(
        tmp_path / "out",
        write_lines(tmp_path / "in.jsonl", [dict(text="ウンド" * n) for n in range(1, 12)]),
        "--min_tokens=6",
        "--max_tokens=9",
        "--tokenizer=apertus",
    )
    assert sorted(row["tokens"] for row in kept(tmp_path / "out")) == [6, 7, 8, 9]


# ----------------------------------------------------------------------------------------------------------------------
# no file of the user's is lost; refusals.txt has the errors


def snapshot(root):
    return {path: path.is_file() and path.read_bytes() for path in Path(root).rglob("*")}


@pytest.fixture
def home(tmp_path):
    """A user's folder: texts and data made of them, in a source named `probes`, like planted passages."""
    fill(tmp_path / "probes", put(tmp_path, {f"texts/{name}.txt": f"the text of {name}" for name in "ab"}) / "texts")
    return tmp_path


def test_data_of_ours_are_replaced_by_whichever_name_and_nothing_else_changes(home):
    put(home, {"texts/c.txt": "the third text"})
    (home / "alias").symlink_to(home / "probes")
    before = snapshot(home / "texts")
    for out in ("probes/", "alias", "texts/../probes", "deep/er/"):
        fill(f"{home}/{out}", home / "texts")
        assert "the third text" in sum(texts_of(home / out).values(), [])
        assert (home / "alias").is_symlink() and not list(home.glob("*.tmp"))
    put(home, {"probes/notes.txt": "what I found in these data"})
    whole = snapshot(home)
    refuse("notes.txt", home / "texts", f"--out={home}/alias")
    assert snapshot(home) == whole and snapshot(home / "texts") == before


KILL = """
import os, signal
true, names = os.rename, []
def rename(*pair):
    true(*pair)
    names.append(pair)
    if len(names) == {}:
        os.kill(os.getpid(), signal.SIGKILL)
os.rename = rename
"""


def test_killed_between_two_renames_the_same_command_finishes(home, monkeypatch):
    """A power cut may lose a name that was not flushed, so the last flush is of the folder that holds the data."""
    flushed = []
    monkeypatch.setattr(files, "flush", lambda path: flushed.append(str(path)))
    put(home, {"list": "d.txt", **{f"texts/{name}.txt": f"the text of {name}" for name in "cde"}})
    for at, asked in ((1, home / "texts"), (2, home / "texts"), (1, f"--remove={home}/list")):
        old = snapshot(home / "probes")
        assert run(asked, f"--out={home}/probes", first=KILL.format(at)).wait() == -signal.SIGKILL
        # The next run first puts the old data back.
        with folder.building(home / "probes", []):
            assert at == 2 or snapshot(home / "probes") == old
        fill(home / "probes", asked)
        assert flushed[-1] == str(home)
    assert len(kept(home / "probes")) == 4
    refuse("has withdrawn documents", home / "texts", f"--out={home}/probes")


def test_one_process_at_a_time_writes_a_folder(home):
    with folder.building(f"{home}/probes", []):
        refuse("another process is writing there", home / "texts", f"--out={home}/probes/")
