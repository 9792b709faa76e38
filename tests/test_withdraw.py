"""prepare.py --remove: what is asked for goes, the rest keeps its bytes and order, whenever it is killed."""
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT, refused, script
from corpus import kept
from engine.files import sha256
from test_kept import ADDRESS, document, kept_rows, prepared, rows, write


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
LISTS = {
    "ids.txt": (ids((5, 6, 50)), {5, 6, 50}, "withdrawn:id"),
    "urls.txt": ("https://h5.example/p/5\nhttps://h5.example/p/12\nhttps://nowhere.example/", {5, 12}, "withdrawn:url"),
    "host.txt": ("h3.example\n", {i for i in range(120) if i % 7 == 3}, "withdrawn:blocked-domain:h3.example"),
    "hosts.jsonl": ('{"host": "H3.example"}\n{"host": "not.there"}\n', {i for i in range(120) if i % 7 == 3},
                    "withdrawn:blocked-domain:h3.example"),
    "texts.jsonl": (json.dumps(dict(text=document(3).replace("  ", " "))), {3}, "withdrawn:text"),
    "robots.jsonl": (REFUSAL, {i for i in range(120) if i % 7 == 4 and str(i)[0] == "1"},
                     "withdrawn:robots:GPTBot:/p/1")}


@pytest.mark.parametrize("name", LISTS)
def test_what_is_asked_for_goes_and_the_rest_keeps_its_bytes_and_its_order(folder, tmp_path, name):
    content, numbers, reason = LISTS[name]
    (tmp_path / name).write_text(content)
    going = {f"d.jsonl:d{i}" for i in numbers}
    before, old, report = tokens_of(folder), kept_rows(folder), report_of(folder)
    done = remove(folder, tmp_path / name)
    assert done.returncode == 0, done.stderr
    # Byte equality with the old data, out of which the tokens of those documents were taken.
    want = [row for row in before if row[2] not in going]
    assert tokens_of(folder) == want and len(want) == len(before) - len(going)
    by_stream = {}
    for source, split, _, own in want:
        by_stream.setdefault((source, split), []).extend(own)
    assert streams(folder) == by_stream
    # The account: what came in is the same, and is kept + removed, counted again from the files.
    after, gone = report_of(folder), [row for row in old if row["id"] in going]
    assert script("corpus.audit", folder).returncode == 0
    assert after["total"]["documents_in"] == report["total"]["documents_in"]
    size, tokens = (sum(row[key] for row in gone) for key in ("bytes", "tokens"))
    assert after["total"]["removed"]["withdrawn"] == [len(gone), size]
    assert after["total"]["tokens"] == report["total"]["tokens"] - tokens
    for kind in ("email", "ip"):
        assert after["pii"][kind] == report["pii"][kind] - sum(row[kind] for row in gone)
    meta = json.loads((folder / "meta.json").read_text())
    for split in meta["sources"].values():
        for part in split.values():
            assert part["tokens"] == sum(shard["tokens"] for shard in part["shards"])
    # Recorded without the text.
    with gzip.open(folder / "removed.jsonl.gz", "rt") as f:
        lines = [json.loads(line) for line in f]
    assert {line["id"]: line["reason"] for line in lines if "withdrawn" in line["reason"]} == dict.fromkeys(going, reason)
    (removal,) = after["removals"]
    assert (removal["documents"], removal["tokens"]) == (len(gone), tokens)
    assert removal["sha256"] == sha256(tmp_path / name) and removal["after"] == meta["version"] != removal["before"]
    assert f"| withdrawn: asked for or refused after the data were made (--remove) | {len(gone)} |" in \
        (folder / "report.md").read_text()
    for file, raw in snapshot(folder).items():
        raw = gzip.decompress(raw) if file.endswith(".gz") else raw
        assert ADDRESS.encode() not in raw and b"says to all" not in raw or file.endswith(".npy")
    assert "came in and was removed: withdrawn" in script("corpus.audit", folder, f"--find={gone[0]['id']}").stdout


def test_a_shard_of_which_nothing_goes_is_the_same_file(folder, tmp_path):
    row = next(row for row in kept_rows(folder) if row["offset"] + row["tokens"] < 2000 and row["source"] == "deu")
    (tmp_path / "ids.txt").write_text(row["id"])
    before = {file.name: os.stat(file).st_ino for file in folder.glob("*.npy")}
    assert remove(folder, tmp_path / "ids.txt").returncode == 0
    other = {file.name for file in folder.glob("*.npy") if os.stat(file).st_ino != before[file.name]}
    assert other == {row["shard"]} and len(before) > 5


def test_removed_twice_is_removed_at_once(made, folder, tmp_path):
    both = tmp_path / "both"
    shutil.copytree(made, both)
    for name, numbers in (("a.txt", (1, 2, 30)), ("b.txt", (60, 61, 3)), ("all.txt", (1, 2, 30, 60, 61, 3))):
        (tmp_path / name).write_text(ids(numbers))
    assert remove(folder, tmp_path / "a.txt").returncode == remove(folder, tmp_path / "b.txt").returncode == 0
    assert remove(both, tmp_path / "all.txt").returncode == 0
    one, other = json.loads((folder / "meta.json").read_text()), json.loads((both / "meta.json").read_text())
    assert one == other and kept_rows(folder) == kept_rows(both)
    assert len(report_of(folder)["removals"]) == 2


@pytest.mark.parametrize("how", ["--add", "--known"])
def test_what_has_gone_does_not_come_back(tmp_path, how):
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
    os.mkdir(tmp_path / "more")
    os.replace(again, tmp_path / "more" / "again.jsonl")
    out = folder if how == "--add" else tmp_path / "second"
    flag = how if how == "--add" else f"{how}={folder}"
    files = [tmp_path / "d.jsonl", tmp_path / "more" / "again.jsonl"]
    # A single document, which stays of --known, would be cut in two to validate.
    val = 0.2 if how == "--add" else 0
    done = script("prepare.py", *files, flag, f"--out={out}", "--tokenizer=byte", f"--val_share={val}")
    assert done.returncode == 0, done.stderr
    added = {row["id"] for row in kept_rows(out)} - left
    assert added == {"again.jsonl:new"}
    before = 40 if how == "--add" else 0
    counts = report_of(out)["total"]
    # Gone before, and again: the nine of the file, and three of the new one.
    assert counts["removed"]["withdrawn"][0] == len(gone) * (2 if before else 1) + 3
    assert counts["documents_in"] == before + 44


@pytest.mark.parametrize("content, says", [
    ("d.jsonl:d5\nd.json:d11", "'d.json:d11' is not in {out}: near it is 'd.jsonl:d11'"),
    ("h3.exmple", "'h3.exmple' is not in {out}: near it is 'h3.example'"),
    ("https://nowhere.example/", "nothing of it is in"),
    ("\n".join(f"https://h{i % 7}.example/p/{i}" for i in range(1, 120, 2)), "would leave no document of source 'deu'"),
    ("", "asks for nothing"),
    ('{"name": "x"}', "row 1: want an id, url, host or text"),
    ('{"id": ', "line 1: not JSON"),
    ('{"domain": "a.example"}', "row 1: want an id")])
def test_a_list_that_cannot_be_followed_is_one_line_and_nothing_is_touched(folder, tmp_path, content, says):
    path = tmp_path / ("list.jsonl" if content.startswith("{") else "list.txt")
    path.write_text(content)
    before = snapshot(folder)
    done = remove(folder, path)
    assert done.returncode == 2 and says.format(out=folder) in done.stderr.splitlines()[-1], done.stderr
    assert snapshot(folder) == before and not os.path.exists(f"{folder}.tmp")


def test_older_joined_and_missing_data_and_inputs_beside_it_are_one_line(made, folder, tmp_path):
    (tmp_path / "ids.txt").write_text(ids([5]))
    refused(remove(tmp_path / "nowhere", tmp_path / "ids.txt"), "has no meta.json")
    refused(remove(folder, tmp_path / "nothing.txt"), "no such file")
    refused(script("prepare.py", tmp_path / "ids.txt", f"--out={folder}", f"--remove={tmp_path / 'ids.txt'}"), "leave")
    both = tmp_path / "both"
    assert script("data.py", made, folder, f"--join={both}", "--block_size=64").returncode == 0
    done = remove(both, tmp_path / "ids.txt")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    os.remove(folder / "kept.parquet")
    refused(remove(folder, tmp_path / "ids.txt"), "older format")
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


KILLED = """
import os, sys
from corpus import audit, kept, shards, withdraw
import prepare
from configurator import run
left = int(sys.argv.pop())
audit.picture = lambda *args: None
def slow(module, name):
    true = getattr(module, name)
    def call(*args, **options):
        global left
        left -= 1
        print("before", name, flush=True)
        if left < 0:
            os.kill(os.getpid(), 9)
        return true(*args, **options)
    setattr(module, name, call)
for module, name in ((withdraw, "without"), (withdraw, "write_flushed"), (withdraw, "rewrite_kept"), (os, "rename"),
                     (withdraw, "add_removed"), (shards, "flush"), (shards, "clear"), (os, "remove")):
    slow(module, name)
run(prepare.main, vars(prepare))
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_killed_at_any_moment_there_is_the_old_data_or_the_new_whole(made, tmp_path):
    (tmp_path / "ids.txt").write_text(ids((5, 6, 50)))
    old = {name: raw for name, raw in snapshot(made).items() if name.endswith((".npy", "meta.json", ".parquet"))}

    def stopped(folder, after):
        """A copy of the data, the list followed, killed before so many calls; all calls until then."""
        shutil.copytree(made, folder)
        command = [sys.executable, "-c", KILLED, f"--out={folder}", f"--remove={tmp_path / 'ids.txt'}", str(after)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode < 0, re.findall("before (.*)", done.stdout)
    _, calls = stopped(tmp_path / "new", 1000)
    want = {name: raw for name, raw in snapshot(tmp_path / "new").items() if name in old}
    at = calls.index("rename")
    seen = set()
    for after in (0, 5, calls.index("rewrite_kept"), calls.index("add_removed"), calls.index("write_flushed") + 1,
                  *range(at - 1, len(calls) + 1)):
        folder = tmp_path / f"at{after}" / "data"
        killed, _ = stopped(folder, after)
        # Killed between two renames, the old data wait for the next start, which puts them back.
        whole = folder if folder.is_dir() else folder.parent / "data.tmp" / "old"
        found = {name: raw for name, raw in snapshot(whole).items() if name in old}
        assert found in (old, want), after
        seen.add((killed, found == want, whole == folder))
        if found == old:
            assert remove(folder, tmp_path / "ids.txt").returncode == 0
        assert {name: raw for name, raw in snapshot(folder).items() if name in old} == want
        shutil.rmtree(folder.parent)
    assert {(True, False, True), (True, False, False), (True, True, True), (False, True, True)} == seen


def test_a_run_that_resumes_is_told_what_was_removed_and_which_steps_differ(folder, tmp_path):
    (tmp_path / "ids.txt").write_text(ids((5, 6, 50)))
    table = tmp_path / "table.py"
    table.write_text('stages = (("one", ("none",), 24, 28), ("two", ("eng", "deu"), 9999, 29))')
    args = ["configs/tiny.py", table, f"--data={folder}", "--n_layer=1", "--eval_every=0", "--warmup_samples=0",
            "--decay_samples=0", "--block_size=16"]
    for name, more in (("plain", ()), ("staged", ["--stage=all"])):
        done = script("train.py", *args, f"--out={tmp_path / name}", "--total_samples=48", *more)
        assert done.returncode == 0, done.stderr
    assert remove(folder, tmp_path / "ids.txt").returncode == 0
    tokens = report_of(folder)["removals"][0]["tokens"]
    for name, first, more in (("plain", 0, ()), ("staged", 3, ["--stage=all"])):
        done = script("train.py", *args, f"--out={tmp_path / name}", "--total_samples=64", "--resume", *more)
        refused(done, f"3 documents ({tokens} tokens) on 20", f"all steps from {first} on", f"the {6 - first} of them")
    assert re.search("no longer what the run has read", script("corpus.audit", folder, "--find=d.jsonl:d7",
                                                              f"--when={tmp_path / 'plain'}").stderr)
