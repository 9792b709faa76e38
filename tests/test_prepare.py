"""prepare.py: killed and resumed, one process or four, any input format: the same bytes; and nothing is lost."""
import contextlib
import glob
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import prepare
import tokenizer
from configurator import settings
from conftest import ROOT, script
from corpus import shards
from data import read_meta
from engine import readers
from engine.inputs import find
from engine.readers import batches, check
from test_readers import data_set  # noqa: F401

BYTE = tokenizer.load("byte")
WORDS = ("the of and to in is that for with as on was by it from are this be or an at which not have has were but "
         "their all one we can there been if more when will would who so no out up into them then she he do its about "
         "other over these some could than").split()
LANGUAGES = ("eng_Latn", "deu_Latn", "roh_Latn")


def text(seed, n=120):
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, n)).capitalize() + f".\nNumber {seed}."


def row(i):
    columns = dict(lang=LANGUAGES[i % 3], license=("cc-by-4.0", "mit")[i % 2], score=i * 37 % 101 / 100)
    url = f"https://host{i % 7}.example/page/{i}"
    return dict(id=f"d{i}", text=text(i), url=url, date=f"2024-01-{1 + i % 28:02d}", **columns)


def rows(n, first=0):
    return [row(i) for i in range(first, first + n)]


def write_jsonl(path, records, opener=open):
    with opener(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    return str(path)


def write_parquet(path, records, **options):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), path, **options)


def run(*args):
    done = script("prepare.py", *args)
    assert done.returncode == 0, done.stderr
    return done


def fill(out, *args):
    """prepare.py ARGS into the folder `out`, with bytes as tokens."""
    return run(*args, f"--out={out}", "--tokenizer=byte")


def refused(says, *args):
    """prepare.py ARGS ends with exit code 2 and an error that says so, without a traceback. Returns the error."""
    done = script("prepare.py", *args)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def written(folder):
    """{file: bytes} of all that must be the same in two runs."""
    kept = (".npy", ".gz", "meta.json", "probes.json")
    return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.name.endswith(kept)}


def account(folder):
    with open(os.path.join(folder, "report.json"), encoding="utf-8") as f:
        return json.load(f)


def texts_in(folder, splits=("train", "val")):
    """The documents of a folder made with --tokenizer=byte, read from the shards."""
    meta, found = read_meta(folder), []
    for source in meta["sources"].values():
        for split in splits:
            files = [os.path.join(folder, shard["file"]) for shard in source[split]["shards"]]
            shards = [np.load(file, allow_pickle=False) for file in files]
            stream = np.concatenate([np.zeros(0, np.int64), *shards])
            documents = np.split(stream, np.flatnonzero(stream == meta["bos"]))[1:]
            found += [BYTE.decode(document[1:-1]) for document in documents]
    return found


def split_texts(folder):
    """The documents for training, and those for validation."""
    return texts_in(folder, ["train"]), texts_in(folder, ["val"])


def side(text):
    """By which a document validates, in [0, 1): 64 bits of the BLAKE2b of its text with single spaces."""
    digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def place(doc_id):
    """Where a document stands in the order, in [0, 1): the first 64 bits of the sha256 of its id."""
    return int.from_bytes(hashlib.sha256(doc_id.encode()).digest()[:8], "big") / 2**64


# ----------------------------------------------------------------------------------------------------------------------
# the same bytes


@pytest.mark.parametrize("by", ["text", "id"])
def test_documents_stand_in_the_order_of_the_hash_of_their_ids_and_validate_by_that_of_their_texts(tmp_path, by):
    """Or by that of their ids, as in the default corpus."""
    records = rows(40)
    fill(tmp_path / "out", write_jsonl(tmp_path / "docs.jsonl", records), "--val_share=0.3", f"--split_by={by}")
    places = {r["text"]: place(f"docs.jsonl:{r['id']}") for r in records}
    ordered = sorted(places, key=places.get)
    train, val = split_texts(tmp_path / "out")
    number = side if by == "text" else places.get
    assert val == [text for text in ordered if number(text) < 0.3]
    assert train == [text for text in ordered if number(text) >= 0.3] and min(len(train), len(val)) > 5
    # The report says with which settings that was.
    asked = dict(out=str(tmp_path / "out"), tokenizer="byte", val_share=0.3, pii=True)
    assert asked.items() <= account(tmp_path / "out")["run"]["settings"].items()


def test_of_a_handful_of_documents_the_one_of_the_least_hash_validates_with_its_copies(tmp_path):
    records = rows(5) + [dict(r, id=f"again {r['id']}") for r in rows(5)]
    path = write_jsonl(tmp_path / "docs.jsonl", records)
    fill(tmp_path / "out", path, "--val_share=1e-9", "--dedup=False")
    first = min(records, key=lambda r: side(r["text"]))
    assert split_texts(tmp_path / "out")[1] == [first["text"]] * 2


def test_a_vocabulary_is_learnt_from_the_training_split_alone(tmp_path):
    """Each document repeats a word of its own: those that became a token are of documents that are trained on."""
    words = [f"w{chr(97 + i)}{chr(122 - i)}qx" for i in range(20)]
    write_jsonl(tmp_path / "docs.jsonl", [dict(id=i, text=f"{word} " * 50) for i, word in enumerate(words)])
    run(tmp_path / "docs.jsonl", f"--out={tmp_path / 'out'}", "--train_bpe=400", "--val_share=0.5")
    tok = tokenizer.load_for(str(tmp_path / "out"))
    learnt = [word for word in words if len(tok.encode(f" {word}")) == 1]
    assert learnt == [word for i, word in enumerate(words) if side(f"{word} " * 50) >= 0.5]
    assert 5 < len(learnt) < 15


def test_a_bucket_of_tokens_holds_the_documents_of_that_many(tmp_path):
    """
    Counted in the shards, begin and end included, where an address of 17 letters is one token (chat.py's vocabulary):
    the texts of 4 to 12 letters, and what is left out is in the account.
    """
    texts = ["x" * n for n in range(1, 30)] + ["to anna@example.org 1234"]
    write_jsonl(tmp_path / "in.jsonl", [dict(id=str(i), text=text) for i, text in enumerate(texts)])
    fill(tmp_path / "out", tmp_path / "in.jsonl", "--min_tokens=6", "--max_tokens=14")
    found = texts_in(tmp_path / "out")
    assert sorted(map(len, found))[:9] == list(range(4, 13)) and len(found) == 10
    assert any("<email-pii> 1234" in text for text in found)
    total = account(tmp_path / "out")["total"]
    assert total["documents_in"] == 30 and total["removed"]["tokens"][0] == 20


FILTERS = ["--near_dedup=0.72", "--keep_rate=0.9", "--min_chars=20", "--source_by=language", "--tokenizer=byte"]


def copied(i):
    """Which documents are copied to places i and i + 1, the second with an addition."""
    return (i * 7 + 3) % 1500, (i * 11 + 5) % 1500


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """1,500 documents with copies and near-copies, in three files; prompts; a robots store; what they should become."""
    root = tmp_path_factory.mktemp("corpus")
    records = rows(1500)
    for i in range(0, 1500, 50):
        exact, near = (records[j]["text"] for j in copied(i))
        records[i] = dict(records[i], text=exact)
        records[i + 1] = dict(records[i + 1], text=near + " And more.")
    (root / "in").mkdir()
    for k in range(3):
        write_jsonl(root / "in" / f"part{k}.jsonl", records[500 * k:500 * k + 500])
    (root / "prompts.txt").write_text(" ".join(text(11).split()[:30]) + "\n")
    refusal = dict(domain="host3.example", content="User-agent: GPTBot\nDisallow: /page/1\n")
    write_jsonl(root / "robots.jsonl", [refusal, dict(domain="host5.example", content="<html>")])
    args = [root / "in", f"--robots={root / 'robots.jsonl'}", f"--decontaminate={root / 'prompts.txt'}", *FILTERS]
    run(*args, f"--out={root / 'out'}")
    return root, args


# Batches of 20 kB and buckets of 30 kB instead of 4 and 16 MB.
SMALL_BATCHES = """
from engine import readers
readers.BATCH = 20_000
import prepare
from configurator import run
prepare.BUCKET = 30_000
run(prepare.main, vars(prepare))
"""


def started(*args):
    """prepare.py in a process of its own, with small batches."""
    command = [sys.executable, "-c", SMALL_BATCHES, *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def small_batches(*args):
    """The same, waited for."""
    process = started(*args)
    _, err = process.communicate()
    assert process.returncode == 0, err


def test_one_process_or_three_and_any_size_of_batch_write_the_same_bytes(corpus, tmp_path):
    root, args = corpus
    # The source is named like the folder.
    out = root / "again" / "out"
    small_batches(*args, f"--out={out}", "--workers=3")
    assert written(out) == written(root / "out")
    again, once = account(out), account(root / "out")
    for part in ("total", "table", "robots", "licenses", "outputs"):
        assert again[part] == once[part]
    assert {"robots", "contaminated", "rate", "duplicate", "near-duplicate"} <= again["total"]["removed"].keys()


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_killed_in_the_middle_and_started_again_it_writes_the_same_bytes(corpus, tmp_path):
    root, args = corpus
    out = tmp_path / "out"
    work = f"{out}.tmp/work"
    first = started(*args, f"--out={out}", "--workers=2")
    while first.poll() is None and len(glob.glob(f"{work}/*.npz")) < 4:
        time.sleep(0.002)
    first.kill()
    # The pipes close when the last worker is gone too.
    first.communicate(timeout=30)
    assert not out.exists()
    before = {file: os.stat(file).st_mtime_ns for file in glob.glob(f"{work}/*.npz")}
    assert before
    second = started(*args, f"--out={out}", "--workers=1")
    while second.poll() is None:
        for file, then in before.items():
            # In the end they are removed.
            with contextlib.suppress(FileNotFoundError):
                assert os.stat(file).st_mtime_ns == then
        time.sleep(0.005)
    said, err = second.communicate()
    assert second.returncode == 0 and "going on" in said, err
    assert written(out) == written(root / "out")


@pytest.fixture
def goes_on(tmp_path, monkeypatch, capsys):
    """goes_on() looks at the input: whether it goes on with what the look before left. .code: a copy of the scripts."""
    def goes_on():
        prepare.survey(find(prepare.paths), str(tmp_path / "work"), str(tmp_path / "data"))
        return "going on" in capsys.readouterr().out
    goes_on.code = tmp_path / "code"
    for name in ("corpus", "engine"):
        shutil.copytree(os.path.join(ROOT, name), goes_on.code / name)
    for name in ("prepare.py", "tokenizer.py"):
        shutil.copy(os.path.join(ROOT, name), goes_on.code)
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(prepare, "ROOT", str(goes_on.code))
    monkeypatch.setattr(prepare, "paths", [str(tmp_path / "a.txt")])
    assert (goes_on(), goes_on()) == (False, True)
    return goes_on


def another(value):
    """A value of the same kind."""
    if type(value) is bool:
        return not value
    return value[:-1] if type(value) is tuple else value + type(value)(1)


def test_a_run_goes_on_only_with_the_settings_that_decide_what_it_writes(goes_on, monkeypatch):
    for name, value in settings(vars(prepare)).items():
        if name != "paths":
            named = dict(encoding="latin-1", heuristics="gopher")
            monkeypatch.setattr(prepare, name, named.get(name) or another(value))
            assert goes_on() == (name in ("workers", "strict", "dry_run")), name


# ----------------------------------------------------------------------------------------------------------------------
# where it goes: nothing is lost there


def snapshot(root):
    """{path: bytes, or where a link points} of all that is there."""
    found = {}
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in files + folders):
            content = path.read_bytes() if path.is_file() else None
            found[str(path)] = os.readlink(path) if path.is_symlink() else content
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
    fill(tmp_path / "data", tmp_path / "texts")
    fill(tmp_path / "noted", tmp_path / "texts")
    (tmp_path / "noted" / "notes.txt").write_text("what I found in these data")
    return tmp_path


# What the refusal names: a file of the user, or what is in the way.
REFUSED = {
    "own": "thesis.md", "link": "thesis.md", "noted": "notes.txt", "file": "file", "next": "next.tmp is in the way",
    "file/x": "cannot be written", "texts": "to be read", "texts/sub": "to be read", "": "to be read",
    "texts/new/": "lies in"}


def test_an_out_where_something_would_be_lost_is_refused_and_nothing_is_touched(home):
    before = snapshot(home)
    for out, says in REFUSED.items():
        for texts in ("texts", "link/../texts"):
            error = refused(says, home / texts, f"--out={home}/{out}", "--tokenizer=byte")
            assert error.count("\n") == 1, (out, error)
            assert snapshot(home) == before, out
    refused("to be read", home / "texts" / "*.txt", f"--out={home}/texts", "--tokenizer=byte")
    assert snapshot(home) == before


def test_data_of_ours_are_replaced_by_whichever_name_and_nothing_else_stays_or_goes(home):
    (home / "texts" / "c.txt").write_text("the third text")
    before = snapshot(home)
    (home / "alias").symlink_to(home / "data")
    (home / "void").mkdir()
    for out in ("data", "data/", "alias", "alias/", "own/../data", "fresh", "void", "deep/er/"):
        fill(f"{home}/{out}", home / "texts")
        assert sorted(texts_in(home / out)) == ["the first text", "the second text", "the third text"], out
        assert (home / "alias").is_symlink()
        assert list(home.glob("*.tmp")) == [home / "next.tmp"]
    after = snapshot(home)
    changed = [path for path in before if after.get(path) != before[path]]
    assert all(path.startswith(str(home / "data")) for path in changed)
    fill(f"{home}/data", home / "texts", "--dry_run")
    assert snapshot(home) == after


@pytest.mark.parametrize("fails", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2])
def test_the_old_data_stand_until_the_new_ones_do_wherever_it_is_stopped(home, monkeypatch, fails, at):
    old = snapshot(home / "data")
    final, tmp, lock = shards.claim(home / "data", [])
    (tmp / "data").mkdir()
    (tmp / "data" / "meta.json").touch()
    true, left = os.rename, [None] * (at - 1)

    def rename(*names):
        if not left:
            raise fails
        left.pop()
        true(*names)
    with monkeypatch.context() as patch, lock, pytest.raises(type(fails)):
        patch.setattr(shards.os, "rename", rename)
        shards.publish(final, tmp)
    # The next run, whatever it will do.
    shards.claim(home / "data", [])[2].close()
    assert snapshot(home / "data") == old


def test_one_process_at_a_time_writes_a_folder(home):
    lock = shards.claim(f"{home}/data", [])[2]
    says = f"another prepare.py is writing there (process {os.getpid()})"
    for out in ("data", "data/"):
        refused(says, home / "texts", f"--out={home}/{out}", "--tokenizer=byte")
    lock.close()
    fill(home / "data", home / "texts")


# ----------------------------------------------------------------------------------------------------------------------
# what goes, and why


def removed_from(folder):
    with gzip.open(folder / "removed.jsonl.gz", "rt", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def test_of_equal_and_nearly_equal_texts_the_first_in_the_input_stays(tmp_path):
    a, b = text(1), text(2)
    near = a.replace("Number", "The number")
    write_jsonl(tmp_path / "1.jsonl", [dict(id=0, text=a), dict(id=1, text=b), dict(id=2, text=a + " \n")])
    write_jsonl(tmp_path / "2.jsonl", [dict(id=0, text=near), dict(id=1, text=b)])
    fill(tmp_path / "out", tmp_path / "1.jsonl", tmp_path / "2.jsonl", "--near_dedup=0.72")
    assert sorted(texts_in(tmp_path / "out")) == sorted([a, b])
    removed = account(tmp_path / "out")["total"]["removed"]
    assert removed == {"duplicate": [2, len(a) + 2 + len(b)], "near-duplicate": [1, len(near)]}


def test_personal_data_becomes_single_tokens_but_not_in_code(tmp_path):
    words = "Write to jo@example.org from 10.1.2.3, pay GB82 WEST 1234 5698 7654 32. "
    (tmp_path / "a.txt").write_text(words)
    (tmp_path / "b.py").write_text("MAIL = 'jo@example.org'")
    fill(tmp_path / "out", tmp_path / "a.txt", tmp_path / "b.py", "--val_share=0")
    files = (tmp_path / "out").glob("*.npy")
    ids = np.concatenate([np.load(file, allow_pickle=False) for file in files]).tolist()
    pii = account(tmp_path / "out")["pii"]
    for kind in ("email", "ip", "iban"):
        assert ids.count(BYTE.special[f"<{kind}-pii>"]) == pii[kind] == 1
    fill(tmp_path / "code", tmp_path / "b.py", "--pii_in_code")
    assert account(tmp_path / "code")["pii"]["email"] == 1


def test_probes_stand_as_often_as_promised_and_the_controls_nowhere(tmp_path):
    passages = [f"Passage {i}: " + text(1000 + i, 20) for i in range(8)]
    probes = write_jsonl(tmp_path / "probes.jsonl", [dict(text=p) for p in passages])
    # The first passage is a control, and the one that leaks: it is taken out.
    corpus = write_jsonl(tmp_path / "d.jsonl", [*rows(50), dict(id="leak", text=passages[0])])
    fill(tmp_path / "out", corpus, f"--probes={probes}", "--repetitions=0,1,4,16")
    content = json.loads((tmp_path / "out" / "probes.json").read_text())
    assert content["tokenizer_hash"] == BYTE.hash
    planted = content["probes"]
    train, val = split_texts(tmp_path / "out")
    # How often each is planted does not follow from its place in the file, as where a list is sorted by length.
    by_hash = sorted(range(8), key=lambda i: place(f"probe/{i}{passages[i]}"))
    assert [probe["text"] for probe in planted] == [passages[i] for i in by_hash]
    assert [probe["repetitions"] for probe in planted] == [0, 1, 4, 16, 0, 1, 4, 16]
    for probe in planted:
        assert train.count(probe["text"]) == probe["repetitions"] and probe["text"] not in val
        assert BYTE.decode(probe["ids"]) == probe["text"]
    said = account(tmp_path / "out")["probes"]
    assert said["documents"] == 42
    assert said["tokens"] == sum(probe["repetitions"] * (len(probe["ids"]) + 2) for probe in planted)
    assert set(read_meta(str(tmp_path / "out"))["sources"]) == {"out", "probes"}


def test_reading_stops_at_max_bytes_and_a_file_that_was_not_reached_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BATCH", 20_000)
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", rows(130, 130 * i)) for i in range(3)]
    for workers in (1, 3):
        out = tmp_path / str(workers)
        fill(out, *paths, "--max_bytes=60_000", f"--workers={workers}")
        report = account(out)
        assert 60_000 <= report["total"]["bytes"] < 85_000
        problems = [file["problem"] for file in report["inputs"]]
        assert problems == [None, *["not read: --max_bytes was reached"] * 2]
    assert account(tmp_path / "1")["total"] == report["total"]


def test_a_dry_run_prints_the_report_and_leaves_nothing(tmp_path):
    page = fill(tmp_path / "out", write_jsonl(tmp_path / "d.jsonl", rows(30)), "--dry_run").stdout
    assert page.startswith("# What is in") and "| **kept** | **30** |" in page
    assert os.listdir(tmp_path) == ["d.jsonl"]


# ----------------------------------------------------------------------------------------------------------------------
# bad input


GOOD = b'{"text": "fine"}\n'
BAD = {
    "latin.txt": "Gr\u00fcezi".encode("latin-1"), "nul.txt": b"a\0b", "nul.jsonl": b"\0\0\0", "x.bin": b"x",
    "bad.jsonl": GOOD + b'{"text": \n', "bytes.jsonl": GOOD + b'{"text": "\xff"}\n',
    "field.jsonl": GOOD + b'{"content": "x"}\n', "number.jsonl": GOOD + b'{"text": 5}\n',
    "list.jsonl": GOOD + b"[1, 2]\n", "deep.jsonl": GOOD + b"[" * 100_000 + b"\n",
    "torn.jsonl.gz": gzip.compress(GOOD * 1000)[:-20], "torn.parquet": b"PAR1 no"}


def test_each_thing_that_cannot_be_read_is_counted_named_and_stops_a_strict_run(tmp_path):
    zstd = pytest.importorskip("zstandard")
    cases = BAD | {"torn.jsonl.zst": zstd.compress(GOOD * 1000)[:-9]}
    for name, raw in cases.items():
        (tmp_path / name).write_bytes(raw)
        error = refused("--strict", tmp_path / name, f"--out={tmp_path / 'strict'}", "--tokenizer=byte", "--strict")
        assert name in error.splitlines()[-1]
    done = fill(tmp_path / "out", *(tmp_path / name for name in cases))
    bad = [row["id"] for row in removed_from(tmp_path / "out") if row["reason"].startswith("unreadable")]
    assert sorted(doc_id.split(":")[0] for doc_id in bad) == sorted(cases)
    assert account(tmp_path / "out")["total"]["removed"]["unreadable"] == [len(cases), 0]
    assert "skipped 3: a line that is no JSON object (the first: bad.jsonl:1)" in done.stdout
    assert "skipped 2: a row without text in its column 'text' (the first: field.jsonl:1)" in done.stdout


@pytest.mark.parametrize("args, says", [
    ("--text_field=body", "they have id, text, url"),
    ("--keep_licenses=none", "120 license"),
    ("--missing=perhaps", "want 'allow'"),
    ("--keep_rate=lots", "want a number"),
    ("--max_field=toxic --max_value=0.5", "no column toxic"),
    ("--near_dedup=0.1", "0.3 to 0.95"),
    ("--score_field=quality", "no column 'quality'"),
    ("--robots=d.jsonl", "d.jsonl"),
    ("--decontaminate=nowhere.txt", "nowhere.txt"),
    ("--score_field=score --keep_top=33", "above 0 and at most 1"),
    ("--val_share=2", "a part of 1"),
    ("--split_by=url", "want text, id"),
    ("--tokenizer= --min_tokens=6", "name it, --tokenizer=apertus"),
    ("--known=nowhere", "has no meta.json"),
    ("--known=nowhere --dedup=False", "leave one of them out"),
    ("--agents=nowhere", "nowhere"),
])
def test_a_setting_that_does_not_fit_is_one_line(tmp_path, args, says):
    path = write_jsonl(tmp_path / "d.jsonl", rows(120))
    error = refused(says, path, f"--out={tmp_path / 'out'}", "--tokenizer=byte", *args.split())
    assert says in error.splitlines()[-1] and not (tmp_path / "out").exists()


BOOK = "\n".join(f"Line {i} of the book." for i in range(1000))


def test_of_a_single_document_and_its_copies_the_end_validates_and_no_copy_is_there(tmp_path):
    """The copies lie in the spool too: only the text of the document that stays may be cut."""
    files = [tmp_path / f"{name}.txt" for name in "abc"]
    for file in files:
        file.write_text(BOOK)
    fill(tmp_path / "out", *files, "--val_share=0.1")
    (train,), (val,) = split_texts(tmp_path / "out")
    assert train + val == BOOK
    assert account(tmp_path / "out")["total"]["removed"]["duplicate"][0] == 2


# ----------------------------------------------------------------------------------------------------------------------
# memory and pieces


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_batches_hold_whole_lines_with_their_numbers(tmp_path, size, monkeypatch):
    monkeypatch.setattr(readers, "BATCH", size)
    lines = [b"x" * (i % 40) for i in range(100)] + [b"last without end"]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines))
    file = check("d.jsonl", str(tmp_path / "d.jsonl"))
    got = []
    for _, pieces, seen in batches([file]):
        for i, first, raw in pieces:
            assert i == 0 and first == len(got)
            got += raw.split(b"\n")[:-1] if raw.endswith(b"\n") else raw.split(b"\n")
    assert got == lines and seen == file["bytes"]


def documents_in(folder):
    files = [check(name, path) for name, path in find([str(folder)])]
    return [doc for _, pieces, _ in batches(files) for doc in readers.documents(files, pieces)]


def test_a_row_is_called_by_its_own_id_or_by_its_number_in_the_file(tmp_path):
    """An id of 0 is one, and so is an empty one; rows are counted over row groups and over blocks of lines."""
    records = [dict(text=f"t{i}") for i in range(7)]
    write_parquet(tmp_path / "p.parquet", records, row_group_size=3)
    write_jsonl(tmp_path / "j.jsonl", records)
    write_jsonl(tmp_path / "k.jsonl", [dict(text="a", id=doc_id) for doc_id in (5, 0, "", None)])
    own = {"j.jsonl": range(7), "k.jsonl": (5, 0, "", 3), "p.parquet": range(7)}
    assert [doc["id"] for doc in documents_in(tmp_path)] == [f"{file}:{i}" for file in own for i in own[file]]


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


def test_parquet_on_the_hub_streams_as_the_same_files_would_here(data_set, tmp_path):  # noqa: F811
    """Of a network that fails at every third question."""
    for k in range(3):
        write_parquet(data_set.folder / "data" / f"{k}.parquet", rows(40, 40 * k), row_group_size=10)
    fill(tmp_path / "out", "hf://datasets/org/name/data/*.parquet")
    assert sorted(texts_in(tmp_path / "out")) == sorted(r["text"] for r in rows(120))
    files = account(tmp_path / "out")["inputs"]
    assert [file["name"] for file in files] == [f"org/name/data/{k}.parquet" for k in range(3)]
    assert all("@c0ffee/" in file["path"] for file in files)
