"""prepare.py and its pipeline: killed and resumed, one process or four, any input format: the same bytes; and nothing lost."""
import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from corpus import readers as documents
from corpus import sift as pipeline
import prepare
from corpus import shards
import tokenizer
from configurator import settings
from conftest import ROOT, script
from data import read_meta
from corpus.readers import batches, check, find

BYTE = tokenizer.load("byte")
WORDS = ("the of and to in is that for with as on was by it from are this be or an at which not have has were but their all one we can "
         "there been if more when will would who so no out up into them then she he do its about other over these some could than").split()


def text(seed, n=120):
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, n)).capitalize() + f".\nNumber {seed}."


def rows(n, first=0):
    return [dict(id=f"d{i}", text=text(i), url=f"https://host{i % 7}.example/page/{i}", lang=("eng_Latn", "deu_Latn", "roh_Latn")[i % 3],
                 license=("cc-by-4.0", "mit")[i % 2], score=i * 37 % 101 / 100, date=f"2024-01-{1 + i % 28:02d}") for i in range(first, first + n)]


def write_jsonl(path, records, opener=open):
    with opener(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    return str(path)


def run(*args):
    done = script("prepare.py", *args)
    assert done.returncode == 0, done.stderr
    return done


def written(folder):
    """{file: bytes} of all that must be the same in two runs."""
    return {f: open(os.path.join(folder, f), "rb").read() for f in sorted(os.listdir(folder)) if f.endswith((".npy", ".gz", "meta.json", "probes.json"))}


def account(folder):
    with open(os.path.join(folder, "report.json"), encoding="utf-8") as f:
        return json.load(f)


def texts_in(folder, splits=("train", "val")):
    """The documents of a folder made with --tokenizer=byte, read from the shards."""
    meta, found = read_meta(folder), []
    for source in meta["sources"].values():
        for split in splits:
            if source[split]["shards"]:
                stream = np.concatenate([np.load(os.path.join(folder, s["file"]), allow_pickle=False) for s in source[split]["shards"]]).astype(np.int64)
                for part in np.split(stream, np.flatnonzero(stream == meta["bos"]))[1:]:
                    found.append(BYTE.decode(part[1:-1]))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# the same bytes


def test_every_format_of_the_same_rows_gives_the_same_documents(tmp_path):
    pa, zstd = pytest.importorskip("pyarrow"), pytest.importorskip("zstandard")
    import pyarrow.parquet
    records, got = rows(60), {}
    for ending in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet"):
        path = tmp_path / f"docs.{ending}"
        if ending == "parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=17)
        else:
            raw = open(write_jsonl(tmp_path / "plain", records), "rb").read()
            path.write_bytes({"jsonl": raw, "jsonl.gz": gzip.compress(raw), "jsonl.zst": zstd.compress(raw)}[ending])
        run(path, f"--out={tmp_path / ending}", "--tokenizer=byte")
        got[ending] = sorted(texts_in(tmp_path / ending))
        total = account(tmp_path / ending)["total"]
        assert total["documents_in"] == 60 and {r["language"] for r in account(tmp_path / ending)["table"]} == {"eng_Latn", "deu_Latn", "roh_Latn"}
    assert got["jsonl"] == sorted(r["text"] for r in records)
    assert all(texts == got["jsonl"] for texts in got.values())


def test_documents_stand_in_the_order_of_the_hash_of_their_ids(tmp_path):
    records = rows(40)
    run(write_jsonl(tmp_path / "docs.jsonl", records), f"--out={tmp_path / 'out'}", "--tokenizer=byte", "--val_share=0.3")
    place = {r["text"]: int.from_bytes(hashlib.sha256(f"docs.jsonl:{r['id']}".encode()).digest()[:8], "big") / 2**64 for r in records}
    assert texts_in(tmp_path / "out", ["val"]) == sorted((t for t in place if place[t] < 0.3), key=place.get)
    assert texts_in(tmp_path / "out", ["train"]) == sorted((t for t in place if place[t] >= 0.3), key=place.get)


def test_of_a_handful_of_documents_the_first_in_the_order_validates(tmp_path):
    records = rows(5)
    run(write_jsonl(tmp_path / "docs.jsonl", records), f"--out={tmp_path / 'out'}", "--tokenizer=byte", "--val_share=1e-9")
    place = {r["text"]: hashlib.sha256(f"docs.jsonl:{r['id']}".encode()).digest() for r in records}
    assert texts_in(tmp_path / "out", ["val"]) == [min(place, key=place.get)]


def test_a_vocabulary_is_learnt_from_the_training_split_alone(tmp_path):
    """Each document repeats a word of its own: those that became one token are of the documents that are trained on."""
    words = {f"w{chr(97 + i)}{chr(122 - i)}qx": i for i in range(20)}
    write_jsonl(tmp_path / "docs.jsonl", [dict(id=i, text=f"{word} " * 50) for word, i in words.items()])
    run(tmp_path / "docs.jsonl", f"--out={tmp_path / 'out'}", "--train_bpe=400", "--val_share=0.5")
    tok = tokenizer.load_for(str(tmp_path / "out"))
    place = {word: int.from_bytes(hashlib.sha256(f"docs.jsonl:{i}".encode()).digest()[:8], "big") / 2**64 for word, i in words.items()}
    learnt = {word for word in words if len(tok.encode(f" {word}")) == 1}
    assert 5 < len(learnt) < 15 and learnt == {word for word in words if place[word] >= 0.5}


FILTERS = ["--near_dedup=0.72", "--keep_rate=0.9", "--min_chars=20", "--source_by=language", "--tokenizer=byte"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """1,500 documents with copies and near-copies, in three files; prompts; a robots store; and the folder they should become."""
    root = tmp_path_factory.mktemp("corpus")
    records = rows(1500)
    for i in range(0, 1500, 50):
        records[i] = dict(records[i], text=records[(i * 7 + 3) % 1500]["text"])                     # exact copies
        records[i + 1] = dict(records[i + 1], text=records[(i * 11 + 5) % 1500]["text"] + " And more.")
    (root / "in").mkdir()
    for k in range(3):
        write_jsonl(root / "in" / f"part{k}.jsonl", records[500 * k:500 * k + 500])
    (root / "prompts.txt").write_text(" ".join(text(11).split()[:30]) + "\n")
    write_jsonl(root / "robots.jsonl", [dict(domain="host3.example", content="User-agent: GPTBot\nDisallow: /page/1\n"),
                                        dict(domain="host5.example", content="<html>")])
    args = [root / "in", f"--robots={root / 'robots.jsonl'}", f"--decontaminate={root / 'prompts.txt'}", *FILTERS]
    run(*args, f"--out={root / 'out'}")
    return root, args


def small_batches(*args, check=True, **more):
    """prepare.py in a process of its own, with batches of 20 kB and buckets of 30 kB instead of 4 and 16 MB."""
    code = ("from corpus import readers\nreaders.BATCH = 20_000\n"
            "import prepare\nfrom configurator import run\nprepare.BUCKET = 30_000\nrun(prepare.main, vars(prepare))")
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
    if check:
        out, err = process.communicate()
        assert process.returncode == 0, err
    return process


def test_one_process_or_three_and_any_size_of_batch_write_the_same_bytes(corpus, tmp_path):
    root, args = corpus
    out = root / "again" / "out"                                                 # the source is named like the folder
    small_batches(*args, f"--out={out}", "--workers=3")
    assert written(out) == written(root / "out")
    a, b = account(out), account(root / "out")
    assert {k: a[k] for k in ("total", "table", "robots", "licenses", "outputs")} == {k: b[k] for k in ("total", "table", "robots", "licenses", "outputs")}
    assert {"robots", "contaminated", "rate", "duplicate", "near-duplicate"} <= a["total"]["removed"].keys()


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.parametrize("after", [4, "tokens"])
def test_killed_in_the_middle_and_started_again_it_writes_the_same_bytes(corpus, tmp_path, after):
    root, args = corpus
    out = tmp_path / "out"
    work = f"{out}.tmp/work"
    first = small_batches(*args, f"--out={out}", "--workers=2", check=False)
    while first.poll() is None:                                                  # until some batches, or some buckets, are done
        if len(glob.glob(f"{work}/*.npz")) >= 4 if after == 4 else glob.glob(f"{work}/*.tokens"):
            break
        time.sleep(0.002)
    first.kill()
    first.communicate(timeout=30)                                                # the pipes close when the last worker is gone too
    assert not out.exists()
    before = {f: os.stat(f).st_mtime_ns for f in glob.glob(f"{work}/*.npz")}
    assert before
    seen = {}
    second = small_batches(*args, f"--out={out}", "--workers=1", check=False)
    while second.poll() is None:
        for f in before:
            with contextlib.suppress(FileNotFoundError):                         # done with, and removed
                seen[f] = os.stat(f).st_mtime_ns
        time.sleep(0.005)
    assert second.returncode == 0, second.stderr.read()
    assert "going on" in second.stdout.read() and all(seen.get(f, t) == t for f, t in before.items())   # what was done is not done again
    assert written(out) == written(root / "out")


def test_other_settings_begin_anew(corpus, tmp_path):
    root, args = corpus
    out = tmp_path / "out"
    work = f"{out}.tmp/work"
    os.makedirs(work)
    with open(f"{work}/plan.json", "w") as f:
        json.dump(dict(key=["of another run"], files=[]), f)
    np.savez(f"{work}/0.npz", place=np.zeros(3))
    open(f"{out}.tmp/{shards.LOCK}", "w").close()                                # or the folder would be the user's
    assert "going on" not in run(*args, f"--out={out}").stdout
    assert written(out) == written(root / "out")


def test_a_run_goes_on_only_with_the_code_that_it_began_with_and_says_which_file_is_absent(tmp_path, monkeypatch, capsys):
    code = tmp_path / "code"
    shutil.copytree(os.path.join(ROOT, "corpus"), code / "corpus")
    for name in ("prepare.py", "tokenizer.py"):
        shutil.copy(os.path.join(ROOT, name), code)
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(prepare, "ROOT", str(code))
    monkeypatch.setattr(prepare, "paths", [str(tmp_path / "a.txt")])
    survey = lambda: prepare.survey(find(prepare.paths), str(tmp_path / "work"), str(tmp_path / "data")) and "going on" in capsys.readouterr().out
    assert (survey(), survey()) == (False, True)
    names = ["prepare.py", "tokenizer.py", *(f"corpus/{name}.py" for name in ("sift", "shards", "readers", "quality", "dedup", "robots", "pii"))]
    for name in names:
        with open(code / name, "a") as f:
            f.write("# changed")
        assert (survey(), survey()) == (False, True)
    for name, value in settings(vars(prepare)).items():
        if name != "paths":
            other = not value if type(value) is bool else value[:-1] if type(value) is tuple else value + type(value)(1)
            monkeypatch.setattr(prepare, name, other)
            assert survey() == (name in ("workers", "strict", "dry_run")), name
    monkeypatch.setattr(prepare, "BACKEND", "another library, whose signatures are others")
    assert (survey(), survey()) == (False, True)
    os.remove(code / "corpus/quality.py")
    with pytest.raises(FileNotFoundError, match="corpus/quality.py"):
        survey()


# ----------------------------------------------------------------------------------------------------------------------
# where it goes: nothing is lost there


def snapshot(root):
    """{path: bytes, or where a link points} of all that is there."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in files + folders:
            path = os.path.join(folder, name)
            found[path] = os.readlink(path) if os.path.islink(path) else open(path, "rb").read() if os.path.isfile(path) else None
    return found


@pytest.fixture
def home(tmp_path):
    """A user's folder: texts to read, notes of their own, a data folder of ours and one with a note in it."""
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("the first text")
    (tmp_path / "texts" / "sub" / "b.txt").write_text("the second text")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.md").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "next.tmp").mkdir()
    (tmp_path / "next.tmp" / "thesis.md").write_text("years of work")
    (tmp_path / "file").write_text("not a folder")
    run(tmp_path / "texts", f"--out={tmp_path / 'data'}", "--tokenizer=byte")
    run(tmp_path / "texts", f"--out={tmp_path / 'noted'}", "--tokenizer=byte")
    (tmp_path / "noted" / "notes.txt").write_text("what I found in these data")
    return tmp_path


def test_an_out_where_something_would_be_lost_is_refused_and_nothing_is_touched(home):
    before = snapshot(home)
    cases = dict(own="thesis.md", link="thesis.md", noted="notes.txt", file="file", next="next.tmp is in the way", texts="to be read") | {"file/x": "cannot be written"}
    cases |= {"own/": "thesis.md", "texts/sub": "to be read", "texts/new": "lies in", "texts/new/": "lies in", "": "to be read"}
    for out, says in cases.items():
        for texts in ("texts", "texts/", "link/../texts"):
            done = script("prepare.py", home / texts, f"--out={home}/{out}", "--tokenizer=byte")
            assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, (out, done.stderr)
            assert snapshot(home) == before, out
    done = script("prepare.py", home / "texts" / "*.txt", f"--out={home}/texts", "--tokenizer=byte")
    assert done.returncode == 2 and snapshot(home) == before


def test_the_working_directory_is_refused_even_where_it_is_ours(home, monkeypatch):
    (home / "data" / "empty").mkdir()
    for here, out in (("data", "."), ("data", ""), ("data/empty", ".."), ("data/empty", "."), ("data", str(home))):
        monkeypatch.chdir(home / here)
        with pytest.raises(ValueError, match="is or holds the working directory"):
            shards.claim(out, [])


def test_data_of_ours_are_replaced_by_whichever_name_and_nothing_else_stays_or_goes(home):
    (home / "texts" / "c.txt").write_text("the third text")
    before = snapshot(home)
    (home / "alias").symlink_to(home / "data")
    (home / "void").mkdir()
    for out in ("data", "data/", "alias", "alias/", "own/../data", "fresh", "void", "deep/er/"):
        run(home / "texts", f"--out={home}/{out}", "--tokenizer=byte")
        assert sorted(texts_in(home / out)) == ["the first text", "the second text", "the third text"], out
        assert (home / "alias").is_symlink() and not [name for name in os.listdir(home) if name.endswith(".tmp") and name != "next.tmp"]
    after = snapshot(home)
    assert {path for path in before if after.get(path) != before[path]} <= {path for path in before if path.startswith(str(home / "data"))}
    run(home / "texts", f"--out={home}/data", "--tokenizer=byte", "--dry_run")
    assert snapshot(home) == after


@pytest.mark.parametrize("fails", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2])
def test_the_old_data_stand_until_the_new_ones_do_wherever_it_is_stopped(home, monkeypatch, fails, at):
    old, (final, tmp, lock) = snapshot(home / "data"), shards.claim(home / "data", [])
    os.makedirs(os.path.join(tmp, "data"))
    open(os.path.join(tmp, "data", "meta.json"), "w").close()
    true, calls = os.rename, []

    def rename(*names):
        calls.append(names)
        if len(calls) == at:
            raise fails
        true(*names)
    with monkeypatch.context() as patch, lock, pytest.raises(type(fails)):
        patch.setattr(shards.os, "rename", rename)
        shards.publish(final, tmp)
    if isinstance(fails, OSError):
        assert snapshot(home / "data") == old
    shards.claim(home / "data", [])[2].close()                                   # the next run, whatever it will do
    assert snapshot(home / "data") == old


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks up what is flushed in /proc")
def test_new_data_are_on_disk_before_they_get_their_name_and_the_name_is_before_the_old_ones_go(home, monkeypatch):
    final, tmp, lock = shards.claim(home / "data", [])
    (tmp / "data").mkdir()
    (tmp / "data" / "train_00000.npy").write_bytes(b"tokens")
    done, fsync, rename, rmtree = [], os.fsync, os.rename, shutil.rmtree
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda old, new: (done.append((str(old), str(new))), rename(old, new)))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: (done.append(f"no {path}"), rmtree(path, **options)))
    with lock:
        shards.publish(final, tmp)
    new, renamed, gone = f"{tmp}/data", (f"{tmp}/data", str(final)), done.index(f"no {tmp}/old")
    assert {f"{new}/train_00000.npy", new} <= set(done[:done.index(renamed)])
    assert str(home) in done[done.index(renamed):gone]


def test_one_process_at_a_time_writes_a_folder(home):
    lock = shards.claim(f"{home}/data", [])[2]
    for out in ("data", "data/"):
        done = script("prepare.py", home / "texts", f"--out={home}/{out}", "--tokenizer=byte")
        assert done.returncode == 2 and f"another prepare.py is writing there (process {os.getpid()})" in done.stderr
    lock.close()
    run(home / "texts", f"--out={home}/data", "--tokenizer=byte")


def test_a_lock_that_its_owner_has_removed_meanwhile_is_none(tmp_path):
    """Opened before the owner ended and locked after: another process may have made the folder anew, with a lock of its own."""
    for again in (False, True):
        with open(tmp_path / "lock", "a+") as lock:
            os.remove(tmp_path / "lock")
            if again:
                (tmp_path / "lock").touch()
            with pytest.raises(ValueError, match="has just finished there"):
                shards.hold(lock, "out")


def test_a_file_system_without_locks_is_told_and_used(home, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def none(*args):
        raise OSError(38, "Function not implemented")
    monkeypatch.setattr(fcntl, "flock", none)
    assert "has no locks (Function not implemented)" in run(home / "texts", f"--out={home}/data", "--tokenizer=byte").stdout


# ----------------------------------------------------------------------------------------------------------------------
# what goes, and why


def test_opt_outs_go_with_their_reason_and_never_their_text(corpus):
    root, _ = corpus
    with gzip.open(root / "out" / "removed.jsonl.gz", "rt", encoding="utf-8") as f:
        removed = [json.loads(line) for line in f]
    assert {key for row in removed for key in row} <= {"id", "url", "reason"}
    robots = [row for row in removed if row["reason"].startswith("robots")]
    assert robots and all(row["reason"] == "robots:GPTBot:/page/1" and "host3.example/page/1" in row["url"] for row in robots)
    block = account(root / "out")["robots"]
    assert block["hosts"] == dict(seen=7, with_file=1, without=5, unparsable=1, blocked=1) and block["removed_by_agent"]["GPTBot"][0] == len(robots)
    assert {row["id"].split(":d")[1] for row in robots} == {str(i) for i in range(1500) if i % 7 == 3 and str(i).startswith("1")}
    copied = {(i * a + b) % 1500 for i in range(0, 1500, 50) for a, b in ((7, 3), (11, 5))}        # these may stand elsewhere too
    kept = {int(t.rpartition("Number ")[2].split(".")[0]) for t in texts_in(root / "out")}
    assert not kept & {int(row["id"].split(":d")[1]) for row in robots} - copied


def test_of_equal_and_nearly_equal_texts_the_first_in_the_input_stays(tmp_path):
    a, b = text(1), text(2)
    near = a.replace("Number", "The number")
    write_jsonl(tmp_path / "1.jsonl", [dict(id=0, text=a), dict(id=1, text=b), dict(id=2, text=a + " \n")])
    write_jsonl(tmp_path / "2.jsonl", [dict(id=0, text=near), dict(id=1, text=b)])
    run(tmp_path / "1.jsonl", tmp_path / "2.jsonl", f"--out={tmp_path / 'out'}", "--tokenizer=byte", "--near_dedup=0.72")
    assert sorted(texts_in(tmp_path / "out")) == sorted([a, b])
    assert account(tmp_path / "out")["total"]["removed"] == {"duplicate": [2, len(a.encode()) + 2 + len(b.encode())], "near-duplicate": [1, len(near.encode())]}


def test_the_top_third_of_each_language_stays(tmp_path):
    records = rows(300)
    run(write_jsonl(tmp_path / "d.jsonl", records), f"--out={tmp_path / 'out'}", "--tokenizer=byte", "--score_field=score", "--keep_top=0.33")
    for row in account(tmp_path / "out")["table"]:
        scores = sorted((r["score"] for r in records if r["lang"] == row["language"]), reverse=True)
        assert row["documents"] == sum(s >= scores[32] for s in scores)                            # ceil(0.33 * 100), ties stay


def test_licences_languages_lengths_and_rates(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", rows(120))
    run(path, f"--out={tmp_path / 'a'}", "--tokenizer=byte", "--keep_licenses=mit,cc0", "--keep_languages=eng_Latn")
    total = account(tmp_path / "a")["total"]
    assert total["removed"]["license"][0] == 60 and total["removed"]["language"][0] == 40 and total["documents"] == 20
    run(path, f"--out={tmp_path / 'b'}", "--tokenizer=byte", "--keep_rate=eng_Latn:1,*:0")
    assert [(r["language"], r["documents"]) for r in account(tmp_path / "b")["table"] if r["documents"]] == [("eng_Latn", 40)]
    run(path, f"--out={tmp_path / 'c'}", "--tokenizer=byte", "--max_field=score", "--max_value=0.5")
    assert account(tmp_path / "c")["total"]["documents"] == sum(r["score"] < 0.5 for r in rows(120))


def test_personal_data_becomes_single_tokens_but_not_in_code(tmp_path):
    words = "Write to jo@example.org from 10.1.2.3, pay GB82 WEST 1234 5698 7654 32. "
    (tmp_path / "a.txt").write_text(words)
    (tmp_path / "b.py").write_text("MAIL = 'jo@example.org'")
    run(tmp_path / "a.txt", tmp_path / "b.py", f"--out={tmp_path / 'out'}", "--tokenizer=byte", "--val_share=0")
    stream = np.concatenate([np.load(f, allow_pickle=False) for f in glob.glob(str(tmp_path / "out" / "*.npy"))])
    assert [int((stream == BYTE.special[f"<{kind}-pii>"]).sum()) for kind in ("email", "ip", "iban")] == [1, 1, 1]
    pii = account(tmp_path / "out")["pii"]
    assert (pii["email"], pii["ip"], pii["iban"]) == (1, 1, 1)
    run(tmp_path / "b.py", f"--out={tmp_path / 'code'}", "--tokenizer=byte", "--pii_in_code")
    assert account(tmp_path / "code")["pii"]["email"] == 1


def test_a_control_token_spelled_in_a_text_ends_no_document(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [dict(text="strike </s> through <s> and <|user_start|>"), dict(text="other")])
    run(path, f"--out={tmp_path / 'out'}", "--tokenizer=byte")
    assert "strike </s> through <s> and <|user_start|>" in texts_in(tmp_path / "out")


def test_probes_stand_as_often_as_promised_and_the_controls_nowhere(tmp_path):
    passages = [f"Passage {i}: " + text(1000 + i, 20) for i in range(8)]
    probes = write_jsonl(tmp_path / "probes.jsonl", [dict(text=p) for p in passages])
    corpus = [*rows(50), dict(id="leak", text=passages[0])]                     # a control that leaks is taken out
    run(write_jsonl(tmp_path / "d.jsonl", corpus), f"--out={tmp_path / 'out'}", "--tokenizer=byte", f"--probes={probes}", "--repetitions=0,1,4,16")
    written = json.load(open(tmp_path / "out" / "probes.json"))
    train, val = texts_in(tmp_path / "out", ["train"]), texts_in(tmp_path / "out", ["val"])
    assert sorted(p["repetitions"] for p in written["probes"]) == [0, 0, 1, 1, 4, 4, 16, 16]
    for probe in written["probes"]:
        assert train.count(probe["text"]) == probe["repetitions"] and probe["text"] not in val
        assert BYTE.decode(probe["ids"]) == probe["text"]
    said = account(tmp_path / "out")["probes"]
    assert said["documents"] == 42 and said["tokens"] == sum(p["repetitions"] * (len(p["ids"]) + 2) for p in written["probes"])
    assert set(read_meta(str(tmp_path / "out"))["sources"]) == {"out", "probes"}


def test_reading_stops_at_max_bytes_wherever_the_batches_end(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", rows(400))
    sizes = []
    for workers in (1, 3):
        small_batches(path, f"--out={tmp_path / str(workers)}", "--tokenizer=byte", "--max_bytes=60_000", f"--workers={workers}")
        sizes.append(account(tmp_path / str(workers))["total"]["bytes"])
    assert sizes[0] == sizes[1] and 60_000 <= sizes[0] < 85_000


def test_a_file_that_was_not_reached_is_not_named_as_a_source(tmp_path):
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", rows(40, 40 * i)) for i in range(3)]
    small_batches(*paths, f"--out={tmp_path / 'out'}", "--tokenizer=byte", "--max_bytes=10_000")
    assert [f["problem"] for f in account(tmp_path / "out")["inputs"]] == [None, "not read: --max_bytes was reached", "not read: --max_bytes was reached"]
    page = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "Data sources: 0.jsonl. (" in page and "| 2.jsonl (not read" in page and "Nothing was removed." in page and "\u2248 " not in page.split("in = kept")[0]


def test_a_dry_run_prints_the_report_and_leaves_nothing(tmp_path):
    done = run(write_jsonl(tmp_path / "d.jsonl", rows(30)), f"--out={tmp_path / 'out'}", "--tokenizer=byte", "--dry_run")
    assert done.stdout.startswith("# What is in") and "| **kept** | **30** |" in done.stdout and "EU public summary" in done.stdout
    assert os.listdir(tmp_path) == ["d.jsonl"]


# ----------------------------------------------------------------------------------------------------------------------
# bad input


def test_each_thing_that_cannot_be_read_is_counted_named_and_stops_a_strict_run(tmp_path):
    good = b'{"text": "fine"}\n'
    cases = {"latin.txt": "Gr\u00fcezi".encode("latin-1"), "nul.txt": b"a\0b", "torn.jsonl.gz": gzip.compress(good * 1000)[:-20], "bad.jsonl": good + b'{"text": \n',
             "bytes.jsonl": good + b'{"text": "\xff"}\n', "nul.jsonl": b"\0\0\0", "field.jsonl": good + b'{"content": "x"}\n', "list.jsonl": good + b"[1, 2]\n",
             "number.jsonl": good + b'{"text": 5}\n', "deep.jsonl": good + b"[" * 100_000 + b"\n", "torn.parquet": b"PAR1 no", "x.bin": b"x"}
    zstd = pytest.importorskip("zstandard")
    cases["torn.jsonl.zst"] = zstd.compress(good * 1000)[:-9]
    for name, raw in cases.items():
        (tmp_path / name).write_bytes(raw)
        strict = script("prepare.py", tmp_path / name, f"--out={tmp_path / 'strict'}", "--tokenizer=byte", "--strict")
        assert strict.returncode == 2 and name in strict.stderr.splitlines()[-1] and "--strict" in strict.stderr, name
    done = run(*(tmp_path / name for name in cases), f"--out={tmp_path / 'out'}", "--tokenizer=byte")
    with gzip.open(tmp_path / "out" / "removed.jsonl.gz", "rt") as f:
        bad = [json.loads(line) for line in f]
    assert sorted(row["id"].split(":")[0] for row in bad if row["reason"].startswith("unreadable")) == sorted(cases)
    assert account(tmp_path / "out")["total"]["removed"]["unreadable"] == [len(cases), 0] and "skipped 5: a line without JSON text (the first: bad.jsonl:1)" in done.stdout


@pytest.mark.parametrize("args, says", [
    (["--text_field=body"], "they have id, text, url"), (["--keep_licenses=none"], "120 license"), (["--missing=perhaps"], "want 'allow'"),
    (["--keep_rate=lots"], "want a number"), (["--max_field=toxic", "--max_value=0.5"], "no column toxic"), (["--near_dedup=0.1"], "0.3 to 0.95"),
    (["--score_field=quality"], "no column 'quality'"), (["--robots=d.jsonl"], "d.jsonl"), (["--decontaminate=nowhere.txt"], "nowhere.txt"),
    (["--score_field=score", "--keep_top=33"], "above 0 and at most 1"), (["--val_share=2"], "a part of 1"), (["--agents=nowhere"], "nowhere")])
def test_a_setting_that_does_not_fit_is_one_line(tmp_path, args, says):
    path = write_jsonl(tmp_path / "d.jsonl", rows(120))
    done = script("prepare.py", path, f"--out={tmp_path / 'out'}", "--tokenizer=byte", *args)
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_url_that_is_none_is_kept_and_counted_and_stops_a_strict_run(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [dict(text="a b c", url="not a url"), dict(text="d e f", url=["x"]), dict(text="g h i")])
    robots = write_jsonl(tmp_path / "robots.jsonl", [dict(domain="a.org", content="User-agent: *\nDisallow: /")])
    run(path, f"--out={tmp_path / 'out'}", "--tokenizer=byte", f"--robots={robots}")
    outcomes = account(tmp_path / "out")["robots"]["outcomes"]
    assert outcomes == {"kept:bad-url": [2, 10], "kept:no-url": [1, 5]}
    done = script("prepare.py", path, f"--out={tmp_path / 'strict'}", "--tokenizer=byte", "--strict")
    assert done.returncode == 2 and "'not a url' is not a URL" in done.stderr


def test_of_a_single_document_the_end_validates(tmp_path):
    book = "\n".join(f"Line {i} of the book." for i in range(1000))
    (tmp_path / "book.txt").write_text(book)
    run(tmp_path / "book.txt", f"--out={tmp_path / 'out'}", "--tokenizer=byte", "--val_share=0.1")
    (train,), (val,) = texts_in(tmp_path / "out", ["train"]), texts_in(tmp_path / "out", ["val"])
    assert train + val == book and 0.09 < len(val) / len(book) <= 0.1 and val.startswith("Line ")
    assert account(tmp_path / "out")["total"]["documents"] == 1


def test_a_missing_parquet_column_lists_those_present(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    pyarrow.parquet.write_table(pa.table(dict(content=["x"], url=["y"])), tmp_path / "d.parquet")
    done = script("prepare.py", tmp_path / "d.parquet", f"--out={tmp_path / 'out'}", "--tokenizer=byte")
    assert done.returncode == 2 and "no column 'text'; it has content, url" in done.stderr


def test_files_of_one_name_in_two_folders_are_both_there(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(f"in {folder}")
    assert [name for name, _ in find([str(tmp_path / "a"), str(tmp_path / "b")])] == ["x.txt", "b/x.txt"]
    with pytest.raises(ValueError, match="both be called"):
        (tmp_path / "c").mkdir()
        os.rename(tmp_path / "b", tmp_path / "c" / "a")
        find([str(tmp_path / "a"), str(tmp_path / "c" / "a"), str(tmp_path / "c" / "a" / "x.txt"), str(tmp_path / "a")] + [write_x(tmp_path)])


def write_x(tmp_path):
    (tmp_path / "d" / "a").mkdir(parents=True)
    (tmp_path / "d" / "a" / "x.txt").write_text("third")
    return str(tmp_path / "d" / "a")


def test_of_a_single_document_and_its_copies_the_end_validates_and_no_copy_is_there(tmp_path):
    """The copies lie in the spool too: only the text of the document that stays may be cut."""
    book = "\n".join(f"Line {i} of the book." for i in range(1000))
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(book)
    run(*(tmp_path / f"{name}.txt" for name in "abc"), f"--out={tmp_path / 'out'}", "--tokenizer=byte", "--val_share=0.1")
    (train,), (val,) = texts_in(tmp_path / "out", ["train"]), texts_in(tmp_path / "out", ["val"])
    assert train + val == book and account(tmp_path / "out")["total"]["removed"]["duplicate"][0] == 2


# ----------------------------------------------------------------------------------------------------------------------
# memory and pieces


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_batches_hold_whole_lines_with_their_numbers(tmp_path, size, monkeypatch):
    monkeypatch.setattr(documents, "BATCH", size)
    lines = [b"x" * (i % 40) for i in range(100)] + [b"last without end"]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines))
    file = check("d.jsonl", str(tmp_path / "d.jsonl"))
    got = []
    for _, pieces, seen in batches([file]):
        for i, first, raw in pieces:
            assert i == 0 and first == len(got)
            got += raw.split(b"\n")[:-1] if raw.endswith(b"\n") else raw.split(b"\n")
    assert got == lines and seen == file["bytes"]


def test_small_files_share_a_batch_up_to_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BATCH", 100)
    for i, n in enumerate((30, 30, 30, 30, 70, 101, 99, 1, 1)):
        (tmp_path / f"{i}.txt").write_bytes(b"x" * n)
    files = [check(name, path) for name, path in find([str(tmp_path)])]
    assert [[i for i, _, _ in pieces] for _, pieces, _ in batches(files)] == [[0, 1, 2], [3, 4], [5], [6, 7], [8]]


def test_a_row_is_called_by_its_own_id_or_by_its_number_in_the_file(tmp_path):
    """An id of 0 is one; rows are counted over row groups and over blocks of lines; script and language are joined once."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    records = [dict(text=f"t{i}", language=("deu", "deu_Latn")[i % 2], language_script="Latn") for i in range(7)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet", row_group_size=3)
    write_jsonl(tmp_path / "j.jsonl", records)
    write_jsonl(tmp_path / "k.jsonl", [dict(text="a", id=5), dict(text="b", id=0), dict(text="c", id=""), dict(text="d", id=None)])
    files = [check(name, path) for name, path in find([str(tmp_path)])]
    docs = [doc for _, pieces, _ in batches(files) for doc in documents.documents(files, pieces)]
    assert [doc["id"] for doc in docs] == [f"j.jsonl:{i}" for i in range(7)] + [f"k.jsonl:{i}" for i in (5, 0, "", 3)] + [f"p.parquet:{i}" for i in range(7)]
    assert {doc["language"] for doc in docs if "k.jsonl" not in doc["id"]} == {"deu_Latn"}


def test_a_handful_ends_with_the_document_that_fills_it():
    docs = [dict(text=text and "x" * text) for text in (100, 100, 100, None, 300, 10)]
    assert [len(some) for some in pipeline.handfuls(iter(docs), size=250)] == [3, 2, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_few_tasks_are_on_their_way_however_many_there_are(workers):
    drawn = []
    tasks = ((n, (n,)) for n in range(100) if not drawn.append(n))
    results = pipeline.ordered(pow, (2,), tasks, workers)
    for n in range(40):
        assert next(results) == (n, 2**n) and len(drawn) <= n + 2 * workers
    results.close()


def test_texts_that_differ_in_an_address_alone_are_two(tmp_path):
    records = [dict(text=f"Write to {name}@example.org") for name in ("jo", "al", "jo")]
    run(write_jsonl(tmp_path / "d.jsonl", records), f"--out={tmp_path / 'out'}", "--tokenizer=byte")
    assert texts_in(tmp_path / "out") == ["Write to <email-pii>"] * 2


def test_row_groups_larger_than_a_slice_are_cut_by_rows(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    records = rows(70)
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), tmp_path / "d.parquet", row_group_size=50)
    monkeypatch.setattr(documents, "SLICE", 4000)
    file = check("d.parquet", str(tmp_path / "d.parquet"))
    pieces = [piece for _, pieces, _ in batches([file]) for piece in pieces]
    assert len(pieces) > 8
    assert [doc["text"] for doc in documents.documents([file], pieces)] == [r["text"] for r in records]


def test_a_long_document_in_parts_has_the_same_tokens():
    tok = tokenizer.load("apertus:4096")
    for path in ("tokenizer.py", "prepare.py"):
        with open(os.path.join(ROOT, path), encoding="utf-8") as f:
            whole = f.read() + "  \n\n \u0301 a\u0301 b\n\tx \u4e2d\u6587 Zw\u00f6lf =\n/foo\n"
        for size in (50, 333, 1000):
            parts = list(shards.long_parts(whole, size))
            assert "".join(parts) == whole and len(parts) > 10
            assert [i for part in parts for i in tok.encode_array(part).tolist()] == tok.encode(whole)


# ----------------------------------------------------------------------------------------------------------------------
# the hub


class Hub:
    """A file system like HfFileSystem over a local folder, whose network fails as often as told."""

    def __init__(self, folder):
        self.folder, self.failures, self.left, self._api = folder, 0, 10**9, self

    def ask(self):
        self.left -= 1
        if self.failures or self.left < 0:
            self.failures = max(0, self.failures - 1)
            raise RuntimeError("connection reset by peer")                      # httpx's errors are no OSErrors either

    def local(self, path):
        self.ask()
        return os.path.join(self.folder, path.split("@")[-1].partition("/")[2] if "@" in path else path)

    def dataset_info(self, repo):
        self.local("")
        return type("Info", (), dict(sha="c0ffee"))

    def glob(self, path):
        return [path[:path.index("@c0ffee/") + 8] + os.path.relpath(f, self.folder) for f in glob.glob(self.local(path))]

    def info(self, path):
        file = self.local(path)
        return dict(size=os.path.getsize(file), lfs=dict(sha256=hashlib.sha256(open(file, "rb").read()).hexdigest()))

    def open(self, path, mode):
        hub = self

        class Remote(io.FileIO):
            def read(self, size=-1):
                hub.ask()
                return super().read(size)
        return Remote(self.local(path))


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    os.makedirs(tmp_path / "hub" / "data")
    for k in range(3):
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows(40, 40 * k)), tmp_path / "hub" / "data" / f"{k}.parquet", row_group_size=10)
    fs = Hub(str(tmp_path / "hub"))
    monkeypatch.setattr(documents, "hub", lambda: fs)
    monkeypatch.setattr(documents.time, "sleep", lambda seconds: None)
    return fs


def test_parquet_on_the_hub_streams_as_the_same_files_would_here(fake_hub, tmp_path):
    fake_hub.failures = 3                                                        # three resets in a row are waited out
    run("hf://datasets/org/name/data/*.parquet", f"--out={tmp_path / 'out'}", "--tokenizer=byte")
    assert sorted(texts_in(tmp_path / "out")) == sorted(r["text"] for r in rows(120))
    files = account(tmp_path / "out")["inputs"]
    assert [f["name"] for f in files] == [f"org/name/data/{k}.parquet" for k in range(3)] and all("@c0ffee/" in f["path"] and f["sha256"] for f in files)


def test_an_interrupted_download_says_so_and_loses_nothing(fake_hub, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BATCH", 5_000)
    fake_hub.left = 14                                                          # then the network is gone, in the middle of a file
    args = ["hf://datasets/org/name/data/*.parquet", f"--out={tmp_path / 'out'}", "--tokenizer=byte"]
    done = script("prepare.py", *args)
    assert done.returncode == 2 and "connection reset" in done.stderr and "goes on where it stopped" in done.stderr and "Traceback" not in done.stderr
    before = len(glob.glob(f"{tmp_path / 'out'}.tmp/work/*.npz"))
    assert before > 2
    fake_hub.left = 10**9
    assert "going on" in run(*args).stdout
    assert sorted(texts_in(tmp_path / "out")) == sorted(r["text"] for r in rows(120))


@pytest.mark.parametrize("path, says", [("hf://datasets/org/name", "want hf://datasets"), ("hf://models/org/name/x.parquet", "want hf://datasets"),
                                        ("hf://datasets/org/name/no/*.parquet", "no file on the hub matches")])
def test_a_hub_path_that_is_none_says_what_it_wants(fake_hub, tmp_path, path, says):
    done = script("prepare.py", path, f"--out={tmp_path / 'out'}", "--tokenizer=byte")
    assert done.returncode == 2 and says in done.stderr
