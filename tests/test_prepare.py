"""prepare.py: documents in = kept + removed; the same bytes whatever stops it; nothing of the user's is lost."""
import csv
import glob
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import prepare
import tokenizer
from configurator import settings
from conftest import ROOT, script
from corpora import BYTE, fill, kept, ledger, refuse, report, rows, streams, text, texts_of, write_lines, written
from corpus import folder, stages
from corpus.shards import long_parts
from data import read_meta


def side(text):
    """By which a text is for validation, in [0, 1): 64 bits of the BLAKE2b of it with single spaces."""
    digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def place(doc_id):
    """Where a document is in the order, in [0, 1): the first 64 bits of the sha256 of its id."""
    return int.from_bytes(hashlib.sha256(doc_id.encode()).digest()[:8], "big") / 2**64


# ----------------------------------------------------------------------------------------------------------------------
# what is in the folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Every format and every reason: (arguments, {id: text} of the readable documents)."""
    root = tmp_path_factory.mktemp("corpus")
    texts = root / "in"
    texts.mkdir()
    every = rows(240)
    every[7]["text"] = every[3]["text"].replace(" ", "  ")
    every[8]["text"] = " \n"
    every[93]["text"] = every[11]["text"] + " One word more."
    every[91]["text"] = "Write to ann@example.org or bob@example.org. " + every[91]["text"]
    write_lines(texts / "a.jsonl", every[:100])
    with gzip.open(texts / "b.jsonl.gz", "wt") as f:
        f.writelines(json.dumps(row) + "\n" for row in every[100:160])
    (texts / "c.json").write_text(json.dumps(every[160:200], indent=1))
    with open(texts / "d.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, every[0])
        writer.writeheader()
        writer.writerows(every[200:])
    (texts / "note.txt").write_text(text(500))
    (texts / "code.py").write_text(f"# {text(501)} ann@example.org\n")
    (texts / "bad.txt").write_bytes(b"Gr\xfcezi")
    (texts / "scan.pdf").write_bytes(b"%PDF")
    write_lines(root / "robots.jsonl", [
        dict(domain="host1.example", content="User-agent: GPTBot\nDisallow: /page/1"), dict(domain="host2.example", content="")])
    (root / "prompts.txt").write_text(" ".join(every[21]["text"].split()[:30]))
    args = [texts, f"--robots={root}/robots.jsonl", "--keep_rate=deu_Latn:0.5,*:1", "--default_language=und", "--near_dedup=0.72", f"--decontaminate={root}/prompts.txt",
            "--source_by=lang", "--shard_tokens=30000", "--val_share=0.1"]
    names = [f"{file}:{row['id']}" for file, n in (("a.jsonl", 100), ("b.jsonl.gz", 60), ("c.json", 40), ("d.csv", 40))
             for row in every[sum((100, 60, 40)[:("a.jsonl", "b.jsonl.gz", "c.json", "d.csv").index(file)]):][:n]]
    found = dict(zip(names, [row["text"] for row in every]))
    found["note.txt"], found["code.py"] = (texts / "note.txt").read_text(), (texts / "code.py").read_text()
    fill(root / "out", *args)
    return root, args, found


def test_each_document_is_kept_or_removed_for_a_reason_to_the_byte(corpus):
    root, _, texts = corpus
    found = {row["id"]: row for row in ledger(root / "out")}
    assert found.keys() == {*texts, "bad.txt"}
    assert all(row["bytes"] == len(texts[name].encode()) for name, row in found.items() if name in texts)
    reasons = Counter(row["reason"].split(":")[0] for row in found.values())
    assert {"unreadable", "empty", "robots", "rate", "contaminated", "duplicate", "near-duplicate"} <= reasons.keys()
    total = report(root / "out")["total"]
    assert total["documents_in"] == len(found) and total["documents"] == reasons.pop("")
    assert {reason: n for reason, (n, _) in total["removed"].items()} == reasons
    assert total["bytes_in"] == sum(len(one.encode()) for one in texts.values())
    assert total["bytes_in"] == total["bytes"] + sum(size for _, size in total["removed"].values())
    assert report(root / "out")["ignored"] == {".pdf": ["scan.pdf"]}
    robots, gone = report(root / "out")["robots"], [row for row in found.values() if row["reason"].startswith("robots:GPTBot:")]
    assert robots["hosts"] == dict(seen=7, with_file=2, without=5, unparsable=0, blocked=1)
    lost = [len(gone), sum(row["bytes"] for row in gone)]
    assert robots["top_blocked_hosts"] == {"host1.example": lost} and robots["removed_by_agent"] == {"GPTBot": lost}
    page = (root / "out" / "report.md").read_text()
    assert f"| host1.example | {lost[0]} | {lost[1] / 1e6:.2f} |" in page and f"GPTBot {lost[0]}" in page
    assert "scan.pdf" in page and "1 could not be read" in page
    # Of equal and of nearly equal texts the first in the input stays.
    for first, second, why in (("a.jsonl:d3", "a.jsonl:d7", "duplicate"), ("a.jsonl:d11", "a.jsonl:d93", "near-duplicate")):
        assert found[second]["reason"] == why and found[first]["reason"] == ""


def test_the_tokens_of_a_row_are_its_text_and_the_order_and_the_split_are_hashes(corpus):
    root, _, texts = corpus
    kept_rows, every = kept(root / "out"), streams(root / "out")
    at = Counter()
    for row in sorted(kept_rows, key=lambda row: place(row["id"])):
        stream = row["source"], row["split"]
        ids = every[stream][at[stream]:at[stream] + row["tokens"]]
        shard = int(row["shard"][-9:-4])
        assert at[stream] == 30_000 * shard + row["offset"]
        at[stream] += row["tokens"]
        assert (ids[0], ids[-1], len(ids)) == (BYTE.bos, BYTE.eos, row["tokens"])
        plain = texts[row["id"]]
        if row["email"]:
            plain = plain.replace("ann@example.org", "<email-pii>").replace("bob@example.org", "<email-pii>")
        assert BYTE.decode(ids[1:-1].tolist()) == plain and row["written"] == len(plain.encode())
        assert row["split"] == ("val" if side(texts[row["id"]]) < 0.1 else "train")
    assert {name: len(stream) for name, stream in every.items()} == dict(at)
    for (source, split), n in at.items():
        part = read_meta(str(root / "out"))["sources"][source][split]
        mine = [row for row in kept_rows if (row["source"], row["split"]) == (source, split)]
        assert part["tokens"] == n and part["documents"] == len(mine)
        assert part["bytes"] == sum(row["written"] for row in mine)
    # Code keeps its addresses.
    assert {row["id"]: row["email"] for row in kept_rows if row["email"]} == {"a.jsonl:d91": 2}


def test_any_workers_any_groups_and_a_kill_give_the_same_bytes(corpus, tmp_path, monkeypatch):
    root, args, _ = corpus
    once = written(root / "out")
    monkeypatch.setattr(stages, "GROUP", 3000)
    monkeypatch.setattr(stages, "BUCKET", 5000)
    # The only source would be named like the folder.
    fill(tmp_path / "out", *args)
    assert written(tmp_path / "out") == once
    small = f"from corpus import stages\nimport prepare, sys\nstages.GROUP = 3000\nstages.BUCKET = 5000\nprepare.SMALL = 0\n" \
            "from configurator import run\nrun(prepare.main, vars(prepare))"
    for n, (workers, place) in enumerate(((3, "sift/4.json"), (2, "tokens/3.json"), (1, ""))):
        process = subprocess.Popen(
            [sys.executable, "-c", small, *map(str, args), f"--out={tmp_path}/killed", "--tokenizer=byte", f"--workers={workers}"],
            cwd=ROOT, env=dict(os.environ, PYTHONPATH=ROOT), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while n < 2 and process.poll() is None and not glob.glob(f"{tmp_path}/killed.tmp/work/{place}"):
            time.sleep(0.002)
        if n < 2:
            process.send_signal(signal.SIGKILL)
            # The pipes close when the last worker has ended too.
            process.communicate(timeout=30)
            assert not (tmp_path / "killed").exists()
    said, err = process.communicate()
    assert process.returncode == 0 and "resuming" in said, err
    assert written(tmp_path / "killed") == once and not (tmp_path / "killed.tmp").exists()


def test_a_run_resumes_only_with_the_settings_that_decide_what_it_writes(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(prepare, "paths", [str(tmp_path / "a.txt")])
    inputs = prepare.find(prepare.paths)[0]
    key = prepare.key_of(settings(vars(prepare)), inputs)
    for name, value in settings(vars(prepare)).items():
        if name in ("paths", "heuristics"):
            continue
        changed = not value if type(value) is bool else value[:-1] if type(value) is tuple else value + type(value)(1)
        with monkeypatch.context() as patch:
            patch.setattr(prepare, name, changed)
            same = prepare.key_of(settings(vars(prepare)), inputs) == key
        assert same == (name in ("workers", "strict", "dry_run")), name
    os.utime(tmp_path / "a.txt", (1, 1))
    assert prepare.key_of(settings(vars(prepare)), inputs) != key


def test_a_few_documents_or_one_still_leave_something_to_validate(tmp_path):
    write_lines(tmp_path / "few.jsonl", [dict(text=one) for one in (text(1), text(2), text(1).upper(), text(3))])
    fill(tmp_path / "few", tmp_path / "few.jsonl", "--val_share=1e-9")
    least = min((text(1), text(2), text(1).upper(), text(3)), key=side)
    assert texts_of(tmp_path / "few")["val"] == [least]
    one = text(4, 900).replace("\n", " ")
    (tmp_path / "one.txt").write_text(one)
    fill(tmp_path / "one", tmp_path / "one.txt", "--val_share=0.1")
    train, val = (part[0] for part in texts_of(tmp_path / "one").values())
    assert train + val == one and 0.05 < len(val) / len(train) < 0.15
    assert report(tmp_path / "one")["total"]["documents"] == 1 and script("corpus.audit", tmp_path / "one").returncode == 0


def test_a_vocabulary_is_learnt_from_the_training_split_alone(tmp_path):
    """Each document repeats a word of its own: those that became a token are of documents that are trained on."""
    words = [f"w{chr(97 + i)}{chr(122 - i)}qx" for i in range(20)]
    write_lines(tmp_path / "in.jsonl", [dict(text=f"{word} " * 50) for word in words])
    done = script("prepare.py", tmp_path / "in.jsonl", f"--out={tmp_path}/out", "--train_bpe=400", "--val_share=0.5")
    assert done.returncode == 0, done.stderr
    tok = tokenizer.load_for(str(tmp_path / "out"))
    learnt = [word for word in words if len(tok.encode(f" {word}")) == 1]
    assert learnt == [word for word in words if side(f"{word} " * 50) >= 0.5] and 5 < len(learnt) < 15


def test_probes_are_planted_as_often_as_promised_and_the_controls_nowhere(tmp_path):
    passages = [text(i, 30) for i in range(900, 906)]
    write_lines(tmp_path / "probes.jsonl", [dict(text=one) for one in passages])
    write_lines(tmp_path / "in.jsonl", [*rows(30), dict(text=passages[0])])
    fill(tmp_path / "out", tmp_path / "in.jsonl", f"--probes={tmp_path}/probes.jsonl", "--repetitions=(0,3)")
    said = json.loads((tmp_path / "out" / "probes.json").read_text())["probes"]
    seen = Counter(one for part in texts_of(tmp_path / "out").values() for one in part)
    assert {one["text"]: one["repetitions"] for one in said} == {one: seen[one] for one in passages}
    assert sorted(seen[one] for one in passages) == [0, 0, 0, 3, 3, 3]
    assert all(BYTE.decode(one["ids"]) == one["text"] for one in said)
    assert report(tmp_path / "out")["total"]["documents"] == 30 and script("corpus.audit", tmp_path / "out").returncode == 0


def test_reading_stops_at_max_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "GROUP", 1000)
    for name in "abc":
        write_lines(tmp_path / f"{name}.jsonl", rows(10, 10 * ord(name)))
    fill(tmp_path / "out", *(tmp_path / f"{name}.jsonl" for name in "abc"), "--max_bytes=3000")
    assert report(tmp_path / "out")["total"]["documents"] == 10 and report(tmp_path / "out")["total"]["written"] >= 3000
    problems = [file["problem"] for file in report(tmp_path / "out")["inputs"]]
    assert problems == [None, *["not read: --max_bytes was reached"] * 2]


def test_scores_of_a_column_or_of_the_users_own_function_choose_the_best_of_each_language(tmp_path):
    (tmp_path / "score.py").write_text("def score(text): return -len(text)")
    write_lines(tmp_path / "in.jsonl", rows(60))
    for how, key in ((["--score_field=score"], lambda row: row["score"]),
                     ([f"--score={tmp_path}/score.py"], lambda row: -len(row["text"]))):
        fill(tmp_path / "out", tmp_path / "in.jsonl", "--keep_top=0.2", *how)
        want = set()
        for lang in ("deu_Latn", "roh_Latn"):
            mine = sorted((row for row in rows(60) if row["lang"] == lang), key=key, reverse=True)
            want |= {row["id"] for row in mine if key(row) >= key(mine[5])}
        assert {row["id"].split(":")[1] for row in kept(tmp_path / "out")} == want


def test_bounds_on_tokens_count_begin_and_end(tmp_path):
    write_lines(tmp_path / "in.jsonl", [dict(id=n, text="x" * n) for n in range(1, 12)])
    fill(tmp_path / "out", tmp_path / "in.jsonl", "--min_tokens=6", "--max_tokens=9")
    assert sorted(row["tokens"] for row in kept(tmp_path / "out")) == [6, 7, 8, 9]
    assert {row["reason"] for row in ledger(tmp_path / "out")} == {"", "tokens"}


def test_one_document_is_no_duplicate_of_its_own_end_and_a_users_columns_are_theirs(tmp_path):
    write_lines(tmp_path / "in.jsonl", [dict(text=text(1), bands="x", metas=5, url="https://e.org/\ud800", source="a b"),
                                       dict(text=text(1), source="a-b")])
    said = fill(tmp_path / "out", tmp_path / "in.jsonl", "--near_dedup=0.72")
    assert "2 documents in = 1 kept + 1 duplicate" in said and [row["split"] for row in kept(tmp_path / "out")] == ["train", "val"]
    fill(tmp_path / "two", tmp_path / "in.jsonl", "--dedup=False", "--source_by=source", "--val_share=0")
    assert {row["shard"] for row in kept(tmp_path / "two")} == {"a-b_train_00000.npy", "a-b-1_train_00000.npy"}


def test_killed_between_two_renames_the_same_command_finishes(home):
    kill = ("import os, signal, sys\nn, true = int(sys.argv.pop(1)), os.rename\ndef rename(*names):\n    global n\n    true(*names)\n"
            "    n -= 1\n    if not n: os.kill(os.getpid(), signal.SIGKILL)\nos.rename = rename\n"
            "from configurator import run\nimport prepare\nrun(prepare.main, vars(prepare))")
    (home / "list").write_text("a.txt")
    for name in "cde":
        (home / "texts" / f"{name}.txt").write_text(f"the text of {name}")
    for at, args in ((1, [home / "texts"]), (2, [home / "texts"]), (1, [f"--remove={home}/list"])):
        args = [*map(str, args), f"--out={home}/data", "--tokenizer=byte"]
        done = subprocess.run([sys.executable, "-c", kill, str(at), *args], cwd=ROOT, capture_output=True)
        assert done.returncode == -signal.SIGKILL
        fill(home / "data", *args[:1])
        assert not (home / "data.tmp").exists()
    assert len(kept(home / "data")) == 4


def test_what_has_been_known_is_a_duplicate_and_a_dry_run_leaves_nothing(tmp_path):
    write_lines(tmp_path / "old.jsonl", rows(40))
    write_lines(tmp_path / "new.jsonl", rows(40, 20))
    fill(tmp_path / "old", tmp_path / "old.jsonl")
    said = fill(tmp_path / "new", tmp_path / "new.jsonl", f"--known={tmp_path}/old", "--dry_run")
    assert "| duplicate: the same text was kept before | 20 |" in said
    assert sorted(os.listdir(tmp_path)) == ["new.jsonl", "old", "old.jsonl"]


# ----------------------------------------------------------------------------------------------------------------------
# nothing of the user's is lost


def snapshot(root):
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(Path(root).rglob("*"))}


@pytest.fixture
def home(tmp_path):
    """A user's folder: texts, notes, a data folder of ours and one with a note in it."""
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("the first text")
    (tmp_path / "texts" / "sub" / "b.txt").write_text("the second text")
    for name in ("own", "next.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.md").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "file").write_text("not a folder")
    for name in ("data", "noted"):
        fill(tmp_path / name, tmp_path / "texts")
    (tmp_path / "noted" / "notes.txt").write_text("what I found in these data")
    return tmp_path


def test_an_out_where_something_would_be_lost_is_refused_and_nothing_is_touched(home):
    before = snapshot(home)
    for out, says in {
            "own": "thesis.md", "link": "thesis.md", "noted": "notes.txt", "file": "file", "next": "next.tmp exists",
            "file/x": "cannot be written", "texts": "an input", "texts/sub": "an input", "": "an input", "texts/new/": "lies in",
    }.items():
        refuse(says, home / "texts", f"--out={home}/{out}", "--tokenizer=byte")
        assert snapshot(home) == before, out
    for args, says in (
            ([home / "nothing"], "no such file"),
            ([home / "texts", "--text_field=body", f"--known={home}/own"], "not a data folder"),
            ([home / "texts", "--min_tokens=5"], "--tokenizer=apertus"),
            ([home / "texts", "--val_share=2"], "a part of 1"),
            ([home / "texts", "--missing=maybe"], "allow or deny"),
            ([home / "texts", "--split_by=luck"], "text, id"),
            ([home / "texts", "--near_dedup=2"], "0.3 to 0.95"),
            ([home / "texts", "--heuristics=no-such"], "no-such"),
            ([home / "file", "--strict"], "unknown kind of file"),
            ([home / "texts", f"--score={home}/file"], "file")):
        refuse(says, *args, f"--out={home}/fresh")
        assert snapshot(home) == before, args


def test_data_of_ours_are_replaced_by_whichever_name_and_nothing_else_changes(home):
    (home / "texts" / "c.txt").write_text("the third text")
    before = snapshot(home)
    (home / "alias").symlink_to(home / "data")
    (home / "void").mkdir()
    for out in ("data", "data/", "alias", "own/../data", "fresh", "void", "deep/er/"):
        fill(f"{home}/{out}", home / "texts")
        assert sorted(sum(texts_of(home / out).values(), [])) == ["the first text", "the second text", "the third text"], out
        assert (home / "alias").is_symlink() and list(home.glob("*.tmp")) == [home / "next.tmp"]
    after = snapshot(home)
    assert all(path.startswith(f"{home}/data") for path in before if after.get(path) != before[path])


@pytest.mark.parametrize("fails", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2])
def test_the_old_data_are_there_until_the_new_ones_are_wherever_it_is_stopped(home, monkeypatch, fails, at):
    old = snapshot(home / "data")
    final, tmp, lock = folder.claim(home / "data", [])
    (tmp / "data").mkdir()
    (tmp / "data" / "meta.json").touch()
    true, left = os.rename, [None] * (at - 1)

    def rename(*names):
        if not left:
            raise fails
        left.pop()
        true(*names)
    with monkeypatch.context() as patch, lock, pytest.raises(type(fails)):
        patch.setattr(folder.os, "rename", rename)
        folder.publish(final, tmp)
    # The next run, whatever it will do.
    folder.claim(home / "data", [])[2].close()
    assert snapshot(home / "data") == old


def test_one_process_at_a_time_writes_a_folder(home):
    lock = folder.claim(f"{home}/data", [])[2]
    refuse(f"another prepare.py is writing there (process {os.getpid()})", home / "texts", f"--out={home}/data/")
    lock.close()
    fill(home / "data", home / "texts")


def test_a_long_document_in_parts_has_the_same_tokens():
    tok = tokenizer.load("apertus:4096")
    rng = random.Random(0)
    long = " ".join(text(i) + rng.choice(["\n\n", "\n", " 12,345 ", "  "]) for i in range(80))
    for size in (500, 3001):
        parts = list(long_parts(long, size))
        assert len(parts) > 5 and "".join(parts) == long
        assert np.concatenate([tok.encode_array(part) for part in parts]).tolist() == tok.encode(long)
