"""prepare.py: documents in = kept + removed; the same bytes whatever stops it; nothing of the user's is lost."""
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
from corpora import BYTE, fill, kept, ledger, put, refuse, report, rows, streams, text, texts_of, write_lines, written
from corpus import folder, stages
from corpus.shards import long_parts
from data import read_meta


def side(text):
    """By which a text is for validation, in [0, 1): 64 bits of the BLAKE2b of it with single spaces."""
    digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def place(row):
    """Where a document is in the order: the first 64 bits of the sha256 of its id."""
    return hashlib.sha256(row["id"].encode()).digest()[:8]


# ----------------------------------------------------------------------------------------------------------------------
# the files of the folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus with every reason: (folder, arguments, {id: text} of the readable documents)."""
    every = rows(160)
    every[7]["text"] = every[3]["text"].replace(" ", "  ")
    every[8].update(text=" \n", lang="nothing of it stays")
    # A user's columns, one of which is not UTF-8, and two sources whose names are one in a file name.
    every[12].update(lang="a b", bands="x", shard=5, url="https://e.org/\ud800")
    every[13].update(lang="a-b")
    every[91]["text"] = "Write to ann@example.org or bob@example.org. " + every[91]["text"]
    every[93]["text"] = every[11]["text"] + " One word more."
    found = {f"{'a.jsonl' if i < 100 else 'b.jsonl.gz'}:d{i}": row["text"] for i, row in enumerate(every)}
    alone = {"note.txt": text(500), "code.py": f"# {text(501)} ann@example.org\n"}
    lines = [json.dumps(row) + "\n" for row in every]
    files = dict(alone, **{"a.jsonl": "".join(lines[:100]), "b.jsonl.gz": gzip.compress("".join(lines[100:]).encode()),
                           "bad.txt": b"Gr\xfcezi", "scan.pdf": b"%PDF"})
    root = put(tmp_path_factory.mktemp("corpus"), {f"in/{name}": content for name, content in files.items()})
    rules = dict(domain="host1.example", content="User-agent: GPTBot\nDisallow: /page/1")
    write_lines(root / "robots.jsonl", [rules, dict(domain="host2.example", content="")])
    put(root, {"prompts.txt": " ".join(every[21]["text"].split()[:30])})
    args = [root / "in", f"--robots={root}/robots.jsonl", f"--decontaminate={root}/prompts.txt", "--near_dedup=0.72",
            "--source_by=lang",
            "--keep_rate=deu_Latn:0.5,*:1", "--default_language=und", "--shard_tokens=30000", "--val_share=0.1"]
    fill(root / "out", *args)
    return root / "out", args, found | alone


def test_each_document_is_kept_or_removed_for_a_reason_to_the_byte(corpus):
    out, _, texts = corpus
    found, said, sizes = {row["id"]: row for row in ledger(out)}, report(out), {}
    assert found.keys() == {*texts, "bad.txt"}
    for name, row in found.items():
        size, kind = len(texts.get(name, "").encode()), row["reason"].partition(":")[0]
        assert row["bytes"] == size and not (kind and row["written"] + row["tokens"])
        sizes[kind] = np.add(sizes.get(kind, (0, 0)), (1, size)).tolist()
    total = said["total"]
    assert [total["documents_in"], total["bytes_in"]] == np.sum([*sizes.values()], 0).tolist()
    assert [total["documents"], total["bytes"]] == sizes.pop("") and total["removed"] == sizes
    assert sizes.keys() == {"unreadable", "empty", "robots", "rate", "contaminated", "duplicate", "near-duplicate"}
    assert said["ignored"] == {".pdf": ["scan.pdf"]}
    gone = [row["bytes"] for row in found.values() if row["reason"].startswith("robots:GPTBot:")]
    assert said["robots"]["hosts"] == dict(seen=8, with_file=2, without=6, unparsable=0, blocked=1)
    assert said["robots"]["top_blocked_hosts"] == {"host1.example": [len(gone), sum(gone)]}
    assert f"| host1.example | {len(gone)} | {sum(gone) / 1e6:.2f} |" in (out / "report.md").read_text()
    # Of equal and of nearly equal texts the first in the input stays.
    assert [found[f"a.jsonl:d{i}"]["reason"] for i in (3, 7, 11, 93)] == ["", "duplicate", "", "near-duplicate"]
    assert {"a b", "a-b", "deu_Latn", "none", "nothing of it stays"} < read_meta(str(out))["sources"].keys()


def test_a_dry_run_prints_the_report_and_leaves_nothing(corpus, tmp_path):
    said = fill(tmp_path / "out", *corpus[1], "--dry_run")
    assert "| duplicate: the same text was kept before | 1 |" in said and os.listdir(tmp_path) == []


def test_the_tokens_of_a_row_are_its_text_and_the_order_and_the_split_are_hashes(corpus):
    out, _, texts = corpus
    every, at = streams(out), Counter()
    for row in sorted(kept(out), key=place):
        stream, plain = (row["source"], row["split"]), texts[row["id"]]
        ids = every[stream][at[stream]:at[stream] + row["tokens"]]
        assert at[stream] == 30_000 * int(row["shard"][-9:-4]) + row["offset"]
        at[stream] += row["tokens"]
        assert (ids[0], ids[-1], len(ids)) == (BYTE.bos, BYTE.eos, row["tokens"])
        assert row["split"] == ("val" if side(plain) < 0.1 else "train")
        for address in ("ann@example.org", "bob@example.org") * (row["email"] > 0):
            plain = plain.replace(address, "<email-pii>")
        assert BYTE.decode(ids[1:-1].tolist()) == plain and row["written"] == len(plain.encode())
    assert {name: len(stream) for name, stream in every.items() if len(stream)} == dict(at)
    # Code keeps its addresses.
    assert {row["id"]: row["email"] for row in kept(out) if row["email"]} == {"a.jsonl:d91": 2}


def run(*args, first=""):
    """Start prepare.py with some lines before it."""
    code = f"{first}\nimport prepare\nfrom configurator import run\nprepare.SMALL = 0\nrun(prepare.main, vars(prepare))"
    return subprocess.Popen([sys.executable, "-c", code, "--tokenizer=byte", *map(str, args)], cwd=ROOT,
                            env=dict(os.environ, PYTHONPATH=ROOT), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


def test_any_workers_any_groups_and_a_kill_give_the_same_bytes(corpus, tmp_path):
    out, args, _ = corpus
    began = set()
    for workers, until in ((3, "sift/1.json"), (2, "tokens/3.json"), (1, "")):
        # A --dry_run that was killed is no dry run when it is resumed without.
        process = run(*args, f"--out={tmp_path}/out", f"--workers={workers}", f"--dry_run={bool(until)}",
                      first="from corpus import stages\nstages.GROUP, stages.BUCKET = 3000, 5000")
        while until and process.poll() is None and not glob.glob(f"{tmp_path}/out.tmp/work/{until}"):
            time.sleep(0.002)
        if until:
            process.send_signal(signal.SIGKILL)
        # The pipes close when the last worker has ended too.
        said, err = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL * bool(until), err
        began |= {os.stat(file).st_ino for file in glob.glob(f"{tmp_path}/out.tmp/work/sift/[0-2].json")}
    # The pieces that were done are not done again.
    assert len(began) == 3
    assert "resuming" in said and written(tmp_path / "out") == written(out) and os.listdir(tmp_path) == ["out"]


def test_a_run_resumes_only_with_the_settings_that_decide_what_it_writes(tmp_path, monkeypatch):
    path = put(tmp_path, {"a.txt": "text"}) / "a.txt"

    def key():
        return prepare.key_of(settings(vars(prepare)), prepare.find([str(path)])[0])
    before = key()
    for name in settings(vars(prepare)).keys() - {"paths", "heuristics"}:
        value = getattr(prepare, name)
        with monkeypatch.context() as patch:
            patch.setattr(prepare, name, not value if type(value) is bool else value * 2 or type(value)(1))
            assert (key() == before) == (name in ("workers", "strict", "dry_run")), name
    os.utime(path, (1, 1))
    assert key() != before


def test_a_few_documents_or_one_still_leave_something_to_validate(tmp_path):
    few, one = [text(1), text(2), text(1).upper(), text(3)], text(4, 900).replace("\n", " ")
    for name, texts in dict(few=few, one=[text(5), one, one], known=[text(5) + "\n"]).items():
        write_lines(tmp_path / f"{name}.jsonl", [dict(text=some) for some in texts])
    fill(tmp_path / "few", tmp_path / "few.jsonl", "--val_share=1e-9")
    assert texts_of(tmp_path / "few")["val"] == [min(few, key=side)]
    fill(tmp_path / "known", tmp_path / "known.jsonl")
    fill(tmp_path / "one", tmp_path / "one.jsonl", "--val_share=0.1", "--near_dedup=0.72", f"--known={tmp_path}/known")
    (train,), (val,) = texts_of(tmp_path / "one").values()
    assert train + val == one and 0.05 < len(val) / len(train) < 0.15
    assert report(tmp_path / "one")["total"]["documents"] == 1
    assert script("corpus.audit", tmp_path / "one").returncode == 0


def test_a_vocabulary_is_learnt_from_the_training_split_alone(tmp_path):
    """Each document repeats a word of its own: those that became a token are of documents that are trained on."""
    words = [f"w{chr(97 + i)}{chr(122 - i)}qx" for i in range(20)]
    write_lines(tmp_path / "in.jsonl", [dict(text=f"{word} " * 50) for word in words])
    fill(tmp_path / "out", tmp_path / "in.jsonl", "--tokenizer=", "--train_bpe=400", "--val_share=0.5")
    # As in `make train`, which installs requirements.txt alone.
    assert {*report(tmp_path / "out")["run"]["packages"]} == {"numpy", "pyarrow", "tiktoken"}
    tok = tokenizer.load_for(str(tmp_path / "out"))
    learnt = [word for word in words if len(tok.encode(f" {word}")) == 1]
    assert learnt == [word for word in words if side(f"{word} " * 50) >= 0.5] and 5 < len(learnt) < 15


def test_probes_are_planted_as_often_as_promised_and_the_controls_nowhere(tmp_path, corpus):
    passages = [text(i, 30) for i in range(900, 906)]
    write_lines(tmp_path / "probes.jsonl", [dict(text=one) for one in passages])
    write_lines(tmp_path / "in.jsonl", [*rows(31, 159), dict(text=passages[0])])
    more = f"--probes={tmp_path}/probes.jsonl", "--repetitions=(0,3)", f"--known={corpus[0]}"
    fill(tmp_path / "out", tmp_path / "in.jsonl", *more)
    said = json.loads((tmp_path / "out" / "probes.json").read_text())["probes"]
    seen = Counter(sum(texts_of(tmp_path / "out").values(), []))
    assert {one["text"]: one["repetitions"] for one in said} == {one: seen[one] for one in passages}
    assert sorted(seen[one] for one in passages) == [0, 0, 0, 3, 3, 3]
    assert all(BYTE.decode(one["ids"]) == one["text"] for one in said)
    assert report(tmp_path / "out")["total"]["documents"] == 30
    assert script("corpus.audit", tmp_path / "out").returncode == 0


def test_reading_stops_at_max_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "GROUP", 1000)
    files = [write_lines(tmp_path / f"{name}.jsonl", rows(10, 10 * ord(name))) for name in "abc"]
    fill(tmp_path / "out", *files, "--max_bytes=3000")
    said = report(tmp_path / "out")
    assert said["total"]["documents"] == 10 and said["total"]["written"] >= 3000
    assert [file["problem"] for file in said["inputs"]] == [None, *["not read: --max_bytes was reached"] * 2]


def test_scores_of_a_column_or_of_the_users_own_function_choose_the_best_of_each_language(tmp_path):
    (tmp_path / "score.py").write_text("def score(text): return -len(text)")
    write_lines(tmp_path / "in.jsonl", rows(60))
    for how, key in (("--score_field=score", lambda row: row["score"]),
                     (f"--score={tmp_path}/score.py", lambda row: -len(row["text"]))):
        fill(tmp_path / "out", tmp_path / "in.jsonl", "--keep_top=0.2", how)
        want = set()
        for mine in rows(60)[::2], rows(60)[1::2]:
            least = sorted(map(key, mine))[-6]
            want |= {f"in.jsonl:{row['id']}" for row in mine if key(row) >= least}
        assert {row["id"] for row in kept(tmp_path / "out")} == want


def test_bounds_on_tokens_count_begin_and_end(tmp_path):
    write_lines(tmp_path / "in.jsonl", [dict(id=n, text="x" * n) for n in range(1, 12)])
    fill(tmp_path / "out", tmp_path / "in.jsonl", "--min_tokens=6", "--max_tokens=9")
    assert sorted(row["tokens"] for row in kept(tmp_path / "out")) == [6, 7, 8, 9]
    assert {row["reason"] for row in ledger(tmp_path / "out")} == {"", "tokens"}


def test_a_long_document_in_parts_has_the_same_tokens():
    tok, rng = tokenizer.load("apertus:4096"), random.Random(0)
    long = " ".join(text(i) + rng.choice(["\n\n", "\n", " 12,345 ", "  "]) for i in range(80))
    parts = list(long_parts(long, 501))
    assert len(parts) > 50 and "".join(parts) == long
    assert np.concatenate([tok.encode_array(part) for part in parts]).tolist() == tok.encode(long)


# ----------------------------------------------------------------------------------------------------------------------
# nothing of the user's is lost: refusals.txt has what is refused


def snapshot(root):
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(Path(root).rglob("*"))}


@pytest.fixture
def home(tmp_path):
    """A user's folder: texts, and a data folder of ours that was made of them."""
    fill(tmp_path / "data", put(tmp_path, {f"texts/{name}.txt": f"the text of {name}" for name in "ab"}) / "texts")
    return tmp_path


def test_data_of_ours_are_replaced_by_whichever_name_and_nothing_else_changes(home):
    put(home, {"texts/c.txt": "the third text"})
    (home / "void").mkdir()
    (home / "alias").symlink_to(home / "data")
    before = snapshot(home / "texts")
    for out in ("data/", "alias", "texts/../data", "fresh", "void", "deep/er/"):
        fill(f"{home}/{out}", home / "texts")
        assert "the third text" in sum(texts_of(home / out).values(), []), out
        assert (home / "alias").is_symlink() and not list(home.glob("*.tmp"))
    put(home, {"data/notes.txt": "what I found in these data"})
    whole = snapshot(home)
    refuse("notes.txt", home / "texts", f"--out={home}/alias")
    assert snapshot(home) == whole and snapshot(home / "texts") == before


def test_the_old_data_come_back_where_the_new_ones_cannot_take_their_place(home, monkeypatch):
    old, true, calls = snapshot(home / "data"), os.rename, []

    def rename(*names):
        calls.append(names)
        if len(calls) == 2:
            raise KeyboardInterrupt
        true(*names)
    building = folder.building(home / "data", [])
    with pytest.raises(KeyboardInterrupt), building as (final, tmp), monkeypatch.context() as patch:
        (tmp / "data").mkdir()
        patch.setattr(folder.os, "rename", rename)
        folder.publish(final, tmp)
    assert snapshot(home / "data") == old


def test_killed_between_two_renames_the_same_command_finishes(home):
    kill = ("import os, signal\ntrue, names = os.rename, []\n"
            "def rename(*pair):\n    true(*pair)\n    names.append(pair)\n"
            "    if len(names) == {}: os.kill(os.getpid(), signal.SIGKILL)\nos.rename = rename")
    put(home, {"list": "d.txt", **{f"texts/{name}.txt": f"the text of {name}" for name in "cde"}})
    old = snapshot(home / "data")
    for at, asked in ((1, home / "texts"), (2, home / "texts"), (1, f"--remove={home}/list")):
        assert run(asked, f"--out={home}/data", first=kill.format(at)).wait() == -signal.SIGKILL
        # The next run puts the old data back, whatever it will do.
        with folder.building(home / "data", []):
            assert at == 2 or snapshot(home / "data") == old
        fill(home / "data", asked)
        old = snapshot(home / "data")
        assert not (home / "data.tmp").exists()
    assert len(kept(home / "data")) == 4


def test_one_process_at_a_time_writes_a_folder(home):
    with folder.building(f"{home}/data", []):
        refuse(f"another prepare.py is writing there (process {os.getpid()})", home / "texts", f"--out={home}/data/")
    fill(home / "data", home / "texts")
