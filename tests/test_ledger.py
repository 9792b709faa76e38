"""
The ledger of a data folder: checked, asked, joined, and rid of documents, by python -m corpus.audit, data.py, --remove.
"""
import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT, script
from corpora import BYTE, fill, kept, ledger, refuse, report, rows, streams, text, texts_of, write_lines, written
from corpus.ledger import percent
from data import TokenDataset
from stages import StagedDataset


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """60 documents in two sources, in shards that documents cross."""
    root = tmp_path_factory.mktemp("made")
    write_lines(root / "in.jsonl", rows(60))
    fill(root / "data", root / "in.jsonl", "--source_by=lang", "--shard_tokens=3000", "--val_share=0.2")
    return root


@pytest.fixture
def data(made, tmp_path):
    return shutil.copytree(made / "data", tmp_path / "data")


def ask(folder, *args):
    done = script("corpus.audit", folder, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def flip(raw):
    return raw[:-40] + bytes([raw[-40] ^ 1]) + raw[-39:]


@pytest.mark.parametrize("name, change, says", [
    ("documents.parquet", flip, "another sha256"),
    ("deu_Latn_train_00000.npy", flip, "another sha256"),
    ("report.json", None, "report.json"),
    ("documents.parquet", None, "files again"),
    ("meta.json", lambda raw: raw.replace(b'"eos": ', b'"eos": 1'), "two versions"),
    ("report.json", lambda raw: raw.replace(b'"documents_in": 60', b'"documents_in": 61'), "documents_in")])
def test_the_check_sees_what_is_not_as_it_was_written(data, name, change, says):
    assert "60 documents in = 60 kept + 0 removed" in ask(data)
    raw = (data / name).read_bytes()
    (data / name).unlink()
    if change:
        (data / name).write_bytes(change(raw))
    refuse(says, data, name="corpus.audit")


def test_a_document_is_found_by_its_id_url_or_text_and_nearly(data, tmp_path):
    row, letter = next(row for row in kept(data) if row["id"] == "in.jsonl:d7"), tmp_path / "letter.txt"
    letter.write_text(text(7).replace(" ", "\n"))
    for name in (row["id"], row["url"], text(7), letter):
        said = ask(data, f"--find={name}")
        assert said.startswith(f"in.jsonl:d7 is in {data}, by this")
        assert f"from token {row['offset']:,} of {row['shard']}" in said
    assert "nearly this text, similarity 0.9" in ask(data, f"--find={text(7)} And more.")
    assert "'in.jsonl:d7x' is no id, URL or text of a document in" in ask(data, "--find=in.jsonl:d7x")


def test_the_steps_that_have_read_a_document_are_those_of_the_run(data, tmp_path):
    """A run of train.py in two stages with a mixture, resumed; its windows of 65 tokens are found by their bytes."""
    stages = ("one", ("deu_Latn",), 40, 28), ("two", {"deu_Latn": 1, "roh_Latn": 3}, 9999, 29)
    table, out = tmp_path / "table.py", tmp_path / "run"
    table.write_text(f"stages = {stages}")
    args = ["configs/tiny.py", table, f"--data={data}", f"--out={out}", "--stage=all", "--n_layer=1", "--eval_every=0",
            "--checkpoint_every=2", "--warmup_samples=8", "--decay_samples=8"]
    assert script("train.py", *args, "--total_samples=40").returncode == 0
    assert script("train.py", *args, "--total_samples=80", "--resume").returncode == 0
    idx, targets, *_ = StagedDataset(str(data), stages, 64).batch(0, 80)
    windows = np.concatenate([idx.numpy(), targets.numpy()[:, -1:]], 1).astype(np.uint16)
    places = {name: [stream.astype(np.uint16).tobytes().find(window.tobytes()) // 2 for window in windows]
              for name, stream in streams(data).items()}
    found = set()
    for row in kept(data)[::3]:
        said = ask(data, f"--find={row['id']}", f"--when={out}")
        if row["split"] == "val":
            assert "for validation" in said
            continue
        begin = 3000 * int(row["shard"][-9:-4]) + row["offset"]
        want = sorted({sample // 8 for sample, at in enumerate(places[row["source"], "train"])
                       if at >= 0 and begin - 65 < at < begin + row["tokens"]})
        assert [int(part.split()[-1]) for part in said.split(" (tokens")[:-1]] == want, said
        found.add(len(want))
    assert len(found) > 2


# ----------------------------------------------------------------------------------------------------------------------
# remove


@pytest.mark.parametrize("asked", ["ids", "urls", "hosts", "texts", "robots"])
def test_what_is_left_after_a_removal_is_a_run_without_these_documents(data, tmp_path, asked):
    by_host = asked in ("hosts", "robots")
    gone = [row for i, row in enumerate(rows(60)) if (i % 7 == 3 if by_host else i in (2, 3, 31, 59))]
    path = write_lines(tmp_path / "list.jsonl", dict(
        ids=[dict(id=f"in.jsonl:{row['id']}") for row in gone], urls=[dict(url=row["url"]) for row in gone],
        hosts=[dict(host="host3.example")], texts=[dict(text=row["text"].replace(" ", "  ")) for row in gone],
        robots=[dict(domain="host3.example", content="User-agent: *\nDisallow: /page")])[asked])
    before = ledger(data)
    done = script("prepare.py", f"--remove={path}", f"--out={data}/")
    assert done.returncode == 0 and f"{len(gone)} documents (" in done.stdout, done.stderr
    write_lines(tmp_path / "in.jsonl", [row for row in rows(60) if row not in gone])
    fill(tmp_path / "fresh" / "data", tmp_path / "in.jsonl", "--source_by=lang", "--val_share=0.2")
    for name, stream in streams(tmp_path / "fresh" / "data").items():
        assert stream.tolist() == streams(data)[name].tolist(), name
    assert [row["id"] for row in ledger(data)] == [row["id"] for row in before]
    out = [row["id"] for row in ledger(data) if row["reason"].startswith("withdrawn:") and row["withdrawn"]]
    assert out == [f"in.jsonl:{row['id']}" for row in gone]
    assert all(np.load(data / row["shard"])[row["offset"]] == BYTE.bos for row in kept(data))
    assert report(data)["total"]["removed"]["withdrawn"][0] == len(gone)
    ask(data)
    # And new files do not bring them back.
    write_lines(tmp_path / "again.jsonl", [*gone, *rows(2, 501)])
    fill(tmp_path / "more", tmp_path / "again.jsonl", f"--known={data}")
    assert [row["id"] for row in kept(tmp_path / "more")] == [f"again.jsonl:d{i}" for i in (501, 502)]


def test_an_entry_that_was_never_there_is_named_after_the_others_are_removed(data, tmp_path):
    """Lines of text: an id, a host, an id of no document. The same list again finds nothing to remove."""
    (tmp_path / "list").write_text("in.jsonl:d1\nhost3.example\nin.jsonl:d99\n")
    refuse("'in.jsonl:d99' is not among the kept", f"--remove={tmp_path}/list", f"--out={data}")
    assert "60 documents in = 50 kept + 10 removed" in ask(data)
    refuse("'in.jsonl:d99' is not among the kept", f"--remove={tmp_path}/list", f"--out={data}")
    assert "50 kept" in ask(data)


@pytest.mark.parametrize("content, says", [
    ("in.jsonl:d99", "'in.jsonl:d99' is not among the kept"), ("", "asks for nothing"),
    ("https://host.example/x", "none of it is in"), (None, "no such file"),
    ("\n".join(f"host{i}.example" for i in range(7)), "would have no document")])
def test_a_list_that_cannot_be_followed_is_one_line_and_nothing_is_touched(data, tmp_path, content, says):
    before = written(data)
    if content is not None:
        (tmp_path / "list").write_text(content)
    refuse(says, f"--remove={tmp_path}/list", f"--out={data}")
    assert written(data) == before and not (tmp_path / "data.tmp").exists()


def test_a_disk_that_is_full_leaves_the_old_data_and_the_same_command_then_works(data, tmp_path):
    """No file may have more than 4,000 bytes: a shard has 6,128."""
    (tmp_path / "list").write_text("in.jsonl:d1")
    before, command = written(data), ["prepare.py", f"--remove={tmp_path}/list", f"--out={data}"]
    full = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)))
    assert full.returncode == 2 and "is as it was" in full.stderr and written(data) == before
    assert script(*command).returncode == 0
    assert ask(data).startswith(f"{data}: 60 documents in = 59 kept + 1 removed")


# ----------------------------------------------------------------------------------------------------------------------
# join


def test_joined_folders_are_one_ledger_of_shards_that_stay_where_they_are(made, tmp_path):
    a, b, c, both = made / "data", tmp_path / "b", tmp_path / "c", tmp_path / "both"
    fill(b, write_lines(tmp_path / "b.jsonl", rows(30, 50)), "--source_by=lang", "--val_share=0.2")
    done = script("data.py", a, b, f"--join={both}")
    assert "there before: 10; texts for training and for validation: 0" in done.stdout, done.stderr
    assert sorted(os.listdir(both)) == ["documents.parquet", "meta.json", "report.json", "report.md"]
    assert list(TokenDataset(str(both), "train", 8).meta["sources"]) == [
        "deu_Latn", "roh_Latn", "b/deu_Latn", "b/roh_Latn"]
    assert {split: texts_of(a)[split] + texts_of(b)[split] for split in ("train", "val")} == texts_of(both)
    assert "90 documents in = 90 kept" in ask(both)
    assert "of source b/" in ask(both, "--find=b.jsonl:d77")
    refuse("was joined from other folders", f"--remove={tmp_path}/b.jsonl", f"--out={both}")
    # To the joined folder more is joined, and nothing else is replaced.
    fill(c, write_lines(tmp_path / "c.jsonl", rows(4, 90)))
    assert script("data.py", both, c, f"--join={both}/").returncode == 0
    assert "94 documents in = 94 kept" in ask(both)
    fill(tmp_path / "bpe", tmp_path / "c.jsonl", "--tokenizer=apertus:4096")
    for says, *args in [("which prepare.py did not write", both, c, f"--join={b}"),
                        ("--join wants the folders", both, f"--join={tmp_path}/d"),
                        ("named twice", c, f"{c}/", f"--join={tmp_path}/d"),
                        ("the same --tokenizer", both, tmp_path / "bpe", f"--join={tmp_path}/d")]:
        refuse(says, *args, name="data.py")


def test_tokens_of_removed_documents_are_estimated_at_the_rate_of_their_language(tmp_path):
    found = [dict(id=i, text=letter * 90 + str(i), lang=lang, license="mit" if i % 2 else "no")
             for i, (letter, lang) in enumerate([("a", "x"), ("a", "x"), ("ä", "y"), ("ä", "y")] * 3)]
    write_lines(tmp_path / "in.jsonl", found)
    fill(tmp_path / "out", tmp_path / "in.jsonl", "--keep_licenses=mit", "--tokenizer=apertus:4096")
    for row in report(tmp_path / "out")["table"]:
        rate = row["tokens"] / row["bytes"]
        assert row["tokens_removed_about"]["license"] == pytest.approx(rate * row["removed"]["license"][1], rel=0.02)


def test_a_store_that_knows_none_of_the_hosts_says_so_and_joined_folders_add_up(tmp_path):
    for name, host in (("a", "other.example"), ("b", "host1.example"), ("c", "host1.example")):
        pages = write_lines(tmp_path / f"{name}.jsonl", rows(20, ord(name)))
        store = write_lines(tmp_path / "robots.jsonl", [dict(domain=host, content="User-agent: *\nDisallow: /")])
        fill(tmp_path / name, pages, f"--robots={store}")
        assert ("The store knows none" in (tmp_path / name / "report.md").read_text()) == (name == "a")
    assert script("data.py", *(tmp_path / name for name in "abc"), f"--join={tmp_path}/all").returncode == 0
    *parts, joined = (report(tmp_path / name) for name in ("a", "b", "c", "all"))
    removed = np.sum([part["total"]["removed"]["robots"] for part in parts[1:]], 0).tolist()
    assert joined["total"]["removed"] == dict(robots=removed)
    assert joined["robots"]["removed_by_agent"] == {"*": removed}
    assert joined["robots"]["top_blocked_hosts"] == {"host1.example": removed}
    assert joined["robots"]["hosts"]["seen"] == sum(part["robots"]["hosts"]["seen"] for part in parts)


def test_a_share_never_reads_as_nothing_or_all():
    assert [percent(*pair) for pair in ((0, 5), (1, 9999), (1, 3), (9999, 10000), (5, 5), (0, 0))] == [
        "0.0 %", "< 0.1 %", "33.3 %", "> 99.9 %", "100.0 %", "-"]
