"""prepare.py --remove: what is asked for goes, the rest keeps its bytes and order, whenever it is killed."""
import gzip
import json
import os
import shutil
import signal

import numpy as np
import pytest

from conftest import refused, script
from corpus import kept, shards, withdraw
from engine.files import sha256
from test_kept import document, kept_rows, prepared, rows, write


def snapshot(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("withdraw")
    extra = [dict(rows(1)[0], id="copy"), dict(id="local", text="A local text, which has no address."),
             dict(id="sub", text="A page of a part of host five.", url="https://www.h5.example/x", license="mit")]
    robots = write(root / "robots.jsonl", [dict(domain="h9.example", content="User-agent: *\nDisallow: /")])
    (root / "probes.txt").write_text("A letter to be planted.\n")
    docs = write(root / "d.jsonl", [*rows(120), *extra])
    return prepared(root / "data", docs, "--shard_tokens=3000", f"--robots={robots}", f"--probes={root / 'probes.txt'}",
                    "--repetitions=3,", "--source_by=lang", "--val_share=0.1")


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "data")
    return tmp_path / "data"


def remove(folder, path):
    return script("prepare.py", f"--out={folder}", f"--remove={path}")


def removed_lines(folder):
    with gzip.open(folder / "removed.jsonl.gz", "rt") as lines:
        return list(map(json.loads, lines))


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def tokens_of(folder):
    """{(id, place among its copies): its tokens}, in the order of the streams."""
    reader, found = kept.Tokens(folder), []
    for row in kept_rows(folder):
        found.append((row["source"], row["split"], row["id"], reader.of(row).tolist()))
    return found


def streams(folder):
    """{(source, split): all tokens}: read from the shards as data.py does."""
    meta = json.loads((folder / "meta.json").read_text())
    return {(name, split): np.concatenate([np.load(folder / shard["file"]) for shard in part["shards"]]).tolist()
            for name, source in meta["sources"].items() for split, part in source.items() if part["shards"]}


def ids(n):
    return "\n".join(f"d.jsonl:d{i}" for i in n)


REFUSAL = json.dumps(dict(domain="h4.example", content="User-agent: GPTBot\nDisallow: /p/1"))
THIRD = {i for i in range(120) if i % 7 == 3}
FOURTH = {i for i in range(120) if i % 7 == 4 and str(i)[0] == "1"}
LISTS = {
    "ids.txt": (ids((5, 6, 50)), {5, 6, 50}, "id"),
    "urls.txt": ("https://h5.example/p/5\nhttps://h5.example/p/12\nhttps://nowhere.example/", {5, 12}, "url"),
    "host.txt": ("h3.example\n", THIRD, "blocked-domain:h3.example"),
    "hosts.jsonl": ('{"host": "H3.example"}\n{"host": "not.there"}\n', THIRD, "blocked-domain:h3.example"),
    "texts.jsonl": (json.dumps(dict(text=document(3).replace("  ", " "))), {3}, "text"),
    "robots.jsonl": (REFUSAL, FOURTH, "robots:GPTBot:/p/1"),
}


@pytest.mark.parametrize("name", LISTS)
def test_what_is_asked_for_goes_and_the_rest_keeps_its_bytes_and_its_order(folder, tmp_path, name):
    """Byte equality with the old data, out of which the tokens of those documents were taken."""
    content, numbers, reason = LISTS[name]
    (tmp_path / name).write_text(content)
    going = {f"d.jsonl:d{i}" for i in numbers}
    before, old, report = tokens_of(folder), kept_rows(folder), report_of(folder)
    inodes = {file.name: os.stat(file).st_ino for file in folder.glob("*.npy")}
    done = remove(folder, tmp_path / name)
    assert done.returncode == 0, done.stderr
    want = [row for row in before if row[2] not in going]
    assert tokens_of(folder) == want and len(want) == len(before) - len(going)
    by_stream = {}
    for source, split, _, own in want:
        by_stream.setdefault((source, split), []).extend(own)
    assert streams(folder) == by_stream
    # A shard of which nothing goes is the same file. Here are seven and more.
    gone = [row for row in old if row["id"] in going]
    if len(gone) == 1 and gone[0]["offset"] + gone[0]["tokens"] < 3000:
        other = {file.name for file in folder.glob("*.npy") if os.stat(file).st_ino != inodes[file.name]}
        assert other == {gone[0]["shard"]} and len(inodes) > 5
    # What came in is the same, and is kept + removed, counted again from the files.
    after = report_of(folder)
    assert script("corpus.audit", folder).returncode == 0
    assert after["total"]["documents_in"] == report["total"]["documents_in"]
    size, tokens = (sum(row[key] for row in gone) for key in ("bytes", "tokens"))
    assert after["total"]["removed"]["withdrawn"] == [len(gone), size]
    assert after["total"]["tokens"] == report["total"]["tokens"] - tokens
    assert after["pii"]["email"] == report["pii"]["email"] - sum(row["email"] for row in gone)
    # Recorded without the text.
    lines = removed_lines(folder)
    assert {line["id"]: line["reason"] for line in lines if "withdrawn" in line["reason"]} == dict.fromkeys(
        going, f"withdrawn:{reason}")
    (removal,) = after["removals"]
    assert (removal["documents"], removal["tokens"]) == (len(gone), tokens)
    assert removal["sha256"] == sha256(tmp_path / name) and removal["after"] != removal["before"]
    for file, raw in snapshot(folder).items():
        raw = gzip.decompress(raw) if file.endswith(".gz") else raw
        assert b"says to all" not in raw or file.endswith(".npy")


def test_what_has_gone_does_not_come_back(tmp_path):
    """The same files again; other text at the URL, the text elsewhere, the id elsewhere, another page of the host."""
    folder = prepared(tmp_path / "data", write(tmp_path / "d.jsonl", rows(40)), "--val_share=0.2")
    asked = [dict(id="d.jsonl:d1"), dict(url="https://h2.example/p/2"), dict(host="h3.example"), dict(text=document(4))]
    assert remove(folder, write(tmp_path / "asked.jsonl", asked)).returncode == 0
    gone = {1, 2, 3, 4, *range(10, 40, 7)}
    left = {f"d.jsonl:d{i}" for i in range(40)} - {f"d.jsonl:d{i}" for i in gone}
    assert {row["id"] for row in kept_rows(folder)} == left
    again = write(tmp_path / "again.jsonl", [
        dict(id="edited", text="Another text.", url="https://h2.example/p/2"),
        dict(id="elsewhere", text=document(4), url="https://mirror.example/"),
        dict(id="page", text="A new page of a host that has gone.", url="https://h3.example/new"),
        dict(id="new", text="Nobody has asked for this to go.", url="https://h2.example/new")])
    out = tmp_path / "second"
    done = script("prepare.py", tmp_path / "d.jsonl", again, f"--known={folder}", f"--out={out}", "--tokenizer=byte",
                  "--val_share=0")
    assert done.returncode == 0, done.stderr
    assert {row["id"] for row in kept_rows(out)} == {"again.jsonl:new"}
    # Gone before: the nine of the file, and three of the new one.
    assert report_of(out)["total"]["removed"]["withdrawn"][0] == len(gone) + 3


HALF = "\n".join(f"https://h{i % 7}.example/p/{i}" for i in range(1, 120, 2))


@pytest.mark.parametrize("content, says", [
    ("d.jsonl:d5\nd.json:d11", "'d.json:d11' is not in {out}: near it is 'd.jsonl:d11'"),
    ("https://nowhere.example/", "nothing of it is in"),
    (HALF, "would leave no document of source 'deu'"),
    ("", "asks for nothing"),
    ('{"name": "x"}', "row 1: want an id, url, host or text"),
    ('{"id": ', "line 1: not JSON"),
])
def test_a_list_that_cannot_be_followed_is_one_line_and_nothing_is_touched(folder, tmp_path, content, says):
    path = tmp_path / ("list.jsonl" if content.startswith("{") else "list.txt")
    path.write_text(content)
    before = snapshot(folder)
    done = remove(folder, path)
    assert done.returncode == 2 and says.format(out=folder) in done.stderr.splitlines()[-1], done.stderr
    assert snapshot(folder) == before and not os.path.exists(f"{folder}.tmp")


def test_older_joined_and_missing_data_and_inputs_beside_it_are_one_line(made, folder, tmp_path):
    path, both = tmp_path / "ids.txt", tmp_path / "both"
    path.write_text(ids([5]))
    refused(remove(tmp_path / "nowhere", path), "has no meta.json")
    refused(remove(folder, tmp_path / "nothing.txt"), "no such file")
    refused(script("prepare.py", path, f"--out={folder}", f"--remove={path}"), "leave")
    assert script("data.py", made, folder, f"--join={both}", "--block_size=64").returncode == 0
    refused(remove(both, path), "not of a data folder")
    os.remove(folder / "kept.parquet")
    refused(remove(folder, path), "older format")


MOMENTS = [(withdraw, "without"), (withdraw, "write_flushed"), (withdraw, "rewrite_kept"), (withdraw, "add_removed"),
           (os, "rename"), (shards, "flush"), (shards, "clear"), (os, "remove")]


def stopped(folder, asked, after, told):
    """In a process of its own: follow the list, and die before the call number `after` of MOMENTS. Killed or not."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    calls = []

    def dying(name, true):
        def call(*args, **options):
            calls.append(name)
            told.write_text(" ".join(calls))
            if len(calls) > after:
                os.kill(os.getpid(), signal.SIGKILL)
            return true(*args, **options)
        return call
    for module, name in MOMENTS:
        setattr(module, name, dying(name, getattr(module, name)))
    os._exit(remove(folder, asked).returncode)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork and SIGKILL")
def test_killed_at_any_moment_there_is_the_old_data_or_the_new_whole(made, tmp_path):
    asked, told = tmp_path / "ids.txt", tmp_path / "calls"
    asked.write_text(ids((5, 6, 50)))

    def contents(folder):
        return {name: raw for name, raw in snapshot(folder).items() if name.endswith((".npy", "meta.json", ".parquet"))}
    shutil.copytree(made, tmp_path / "new")
    assert not stopped(tmp_path / "new", asked, 1000, told)
    old, want, calls = contents(made), contents(tmp_path / "new"), told.read_text().split()
    at, seen = calls.index("rename"), set()
    for after in (0, 5, calls.index("rewrite_kept"), calls.index("write_flushed") + 1, *range(at - 1, len(calls) + 1)):
        folder = tmp_path / f"at{after}" / "data"
        shutil.copytree(made, folder)
        killed = stopped(folder, asked, after, told)
        # Killed between two renames, the old data wait for the next start, which puts them back.
        whole = folder if folder.is_dir() else folder.parent / "data.tmp" / "old"
        found = contents(whole)
        assert found in (old, want), after
        seen.add((killed, found == want, whole == folder))
        if found == old:
            assert remove(folder, asked).returncode == 0
        assert contents(folder) == want
        shutil.rmtree(folder.parent)
    assert {(True, False, True), (True, False, False), (True, True, True), (False, True, True)} == seen


def test_a_run_resumes_only_where_it_has_not_read_data_from_which_documents_went(folder, tmp_path):
    (tmp_path / "ids.txt").write_text(ids((5, 6, 50)))
    table = tmp_path / "table.py"
    table.write_text('stages = (("one", ("none",), 24, 28), ("two", ("eng", "deu"), 9999, 29))')
    args = ["configs/tiny.py", table, "--stage=all", "--n_layer=1", "--eval_every=0", "--warmup_samples=0",
            "--decay_samples=0", "--block_size=16"]
    for samples in (24, 48):
        # The first 24 samples are of a source from which nothing goes.
        shutil.copytree(folder, tmp_path / str(samples))
        own = [*args, f"--data={tmp_path / str(samples)}", f"--out={tmp_path / f'run{samples}'}"]
        done = script("train.py", *own, f"--total_samples={samples}")
        assert done.returncode == 0, done.stderr
        assert remove(tmp_path / str(samples), tmp_path / "ids.txt").returncode == 0
        done = script("train.py", *own, "--total_samples=64", "--resume")
        if samples == 24:
            assert done.returncode == 0, done.stderr
    refused(done, "of another run: data_hash", "windows are numbered anew")
    said = script("corpus.audit", tmp_path / "48", "--find=d.jsonl:d7", f"--when={tmp_path / 'run48'}")
    refused(said, "no longer what the run")
