"""corpus/cluster.py: datatrove's executors make the tokens that prepare.py makes of the same texts, killed or not."""
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import ROOT, refused, script

pytest.importorskip("datatrove")
import prepare  # noqa: E402
import pyarrow.parquet  # noqa: E402

from corpus import steps  # noqa: E402
from engine.files import lock_file  # noqa: E402

WORDS = [f"w{i}" for i in range(3000)]
HOSTS = ["a.org", "b.org", "c.org", "d.org"]
ROBOTS = [dict(domain="b.org", content="User-agent: GPTBot\nDisallow: /"),
          dict(domain="a.org", content="User-agent: *")]


def rows(n, seed=0):
    rng = random.Random(seed)
    return [dict(id=f"{seed}-{i}", text=" ".join(rng.choices(WORDS, k=rng.randint(60, 120))) + f" mail {i}@x.org",
                 url=f"https://{rng.choice(HOSTS)}/{seed}/{i}", license=rng.choice(["cc0", "mit", "none"]),
                 language=rng.choice(["deu", "fra"]), date=f"20{10 + i % 9}-01-01") for i in range(n)]


def write(path, records):
    path.write_text("".join(json.dumps(row) + "\n" for row in records))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Files with copies of each other's documents, in the order of the input and against it; an empty one, no text."""
    root = tmp_path_factory.mktemp("texts")
    folder = root / "in"
    folder.mkdir()
    every = [rows(80, seed) for seed in range(4)]
    every[3] += [dict(row, id=f"copy {i}") for i, row in enumerate(every[0][:15])]
    every[1] = [dict(row, id=f"early {i}") for i, row in enumerate(every[2][:15])] + every[1]
    for seed, records in enumerate(every):
        write(folder / f"{seed}.jsonl", records)
    (folder / "empty.jsonl").write_text("")
    (folder / "x.txt").write_bytes(b"Gr\xfcezi")
    (folder / "y.pdf").write_bytes(b"%PDF")
    write(root / "robots.jsonl", ROBOTS)
    return root


def flags(root, *more):
    return [f"{root}/in", f"--robots={root}/robots.jsonl", "--keep_licenses=cc0,mit", "--tokenizer=byte",
            "--min_tokens=100", "--source_by=language", *more]


def cluster(out, *args):
    """With one worker, datatrove's local executor runs the tasks in this process, and they set those of prepare.py."""
    before = dict(vars(prepare))
    done = script("corpus.cluster", *args, f"--out={out}", "--workers=1")
    vars(prepare).update(before)
    return done


@pytest.fixture(scope="module")
def alone(texts):
    """What prepare.py makes of them."""
    done = script("prepare.py", *flags(texts), f"--out={texts}/alone/data")
    assert done.returncode == 0, done.stderr
    return texts / "alone" / "data"


def streams(folder):
    """{(source, split): all of its tokens, in order}"""
    meta = json.loads((folder / "meta.json").read_text())
    found = {}
    for name, source in meta["sources"].items():
        for split, part in source.items():
            shards = [np.load(folder / shard["file"]) for shard in part["shards"]]
            found[name, split] = np.concatenate([np.zeros(0, np.uint16), *shards]).tolist()
    return found


def same(folder, alone):
    """Tokens and their order, the list of what is in but for the cuts between shards, what was removed, the audit."""
    assert streams(folder) == streams(alone) and any(map(len, streams(alone).values()))
    lists = [pyarrow.parquet.read_table(one / "kept.parquet").drop_columns(["shard", "offset"]).to_pylist()
             for one in (folder, alone)]
    assert lists[0] == lists[1]
    removed = [Counter(gzip.open(one / "removed.jsonl.gz").readlines()) for one in (folder, alone)]
    assert removed[0] == removed[1]
    reports = [json.loads((one / "report.json").read_text()) for one in (folder, alone)]
    for key in reports[0].keys() - {"run", "outputs"}:
        assert reports[0][key] == reports[1][key], key
    return reports[1]["total"]["removed"]


@pytest.mark.parametrize("tasks, parts", [(3, 4), (9, 1)])
def test_any_number_of_tasks_makes_the_tokens_of_prepare_in_its_order(texts, alone, tmp_path, tasks, parts):
    out = tmp_path / "data"
    done = cluster(out, *flags(texts, f"--tasks={tasks}", f"--parts={parts}", "--shard_tokens=5000"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert same(out, alone).keys() >= {"robots", "license", "duplicate", "unreadable"}
    # The tokens of a document stand where kept.parquet says.
    bos = json.loads((out / "meta.json").read_text())["bos"]
    for row in pyarrow.parquet.read_table(out / "kept.parquet").to_pylist():
        assert np.load(out / row["shard"], mmap_mode="r")[row["offset"]] == bos
    assert script("data.py", out).returncode == 0


def test_killed_in_two_stages_and_started_again_it_makes_the_same(texts, alone, tmp_path):
    out, args = tmp_path / "data", flags(texts, "--tasks=2", "--parts=2")
    command = [sys.executable, "-m", "corpus.cluster", *args, f"--out={out}", "--workers=1"]
    for place in ("keys", "parts"):
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=-3, stderr=-3)
        while process.poll() is None and not (out / "work" / place).exists():
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL and not (out / "meta.json").exists()
    # Another run does not go on in it, and this one does.
    assert "holds another run" in cluster(out, *flags(texts, "--tasks=2", "--parts=3")).stderr
    assert cluster(out, *args).returncode == 0
    same(out, alone)
    refused(cluster(out, *args), "is finished")


def test_of_near_duplicates_in_pairs_the_first_stays_as_in_prepare(tmp_path):
    """Ten pages with one copy each in which a word is another, in other files."""
    (tmp_path / "in").mkdir()
    first, second = rows(60, 1), rows(60, 2)
    for i in range(10):
        second[3 * i]["text"] = first[5 * i]["text"].replace(first[5 * i]["text"].split()[40], "other", 1)
    write(tmp_path / "in" / "a.jsonl", first)
    write(tmp_path / "in" / "b.jsonl", second)
    args = [f"{tmp_path}/in", "--tokenizer=byte", "--near_dedup=0.72"]
    assert script("prepare.py", *args, f"--out={tmp_path}/alone/data").returncode == 0
    assert cluster(tmp_path / "data", *args, "--tasks=2", "--parts=2").returncode == 0
    assert same(tmp_path / "data", tmp_path / "alone" / "data")["near-duplicate"][0] > 5


def test_a_job_of_slurm_is_submitted_for_each_stage_and_waits_for_the_one_before(texts, tmp_path, monkeypatch):
    """Real job scripts, for a stand-in of the command that takes them."""
    sbatch, said = tmp_path / "sbatch", tmp_path / "said"
    sbatch.write_text(f'#!/bin/sh\necho "$@" >> {said}\necho $(wc -l < {said})\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = cluster(tmp_path / "data", *flags(texts, "--tasks=2", "--executor=slurm", "--partition=cpu"))
    assert done.returncode == 0 and "submitted" in done.stdout, done.stderr[-2000:]
    jobs = [line.split() for line in said.read_text().splitlines()]
    stages = [" ".join(job) for job in jobs if job[0].startswith("--export")]
    assert len(stages) == 6 and not any("afterok" in job for job in stages[:1])
    assert all("--dependency=afterok:" in job for job in stages[1:])


def test_keys_are_written_as_datatrove_reads_them(tmp_path):
    from datatrove.io import get_datafolder
    from datatrove.pipeline.dedup.minhash import read_sigs
    keys = np.random.default_rng(1).integers(0, 2**64, (50, 3), np.uint64)
    steps.write_keys(tmp_path, 7, keys)
    for number in range(3):
        file = get_datafolder(str(tmp_path)).open(f"bucket_{number:03d}/00007.minhash.sig")
        found = [(one.sig, one.doc_id) for one in read_sigs(file, 0, steps.keys_of(2))]
        halves = [((int(key) >> 32, int(key) % 2**32), i) for i, key in enumerate(keys[:, number])]
        assert found == sorted(halves)


def test_tasks_have_neighbouring_files_and_all_of_them_once():
    plan = SimpleNamespace(files=list(range(40)), sizes=np.random.default_rng(2).integers(0, 1000, 40).tolist())
    for tasks in (1, 3, 100):
        assert sum((steps.share_of(plan, rank, tasks) for rank in range(tasks)), []) == plan.files


@pytest.mark.parametrize("more, says", [
    ("--tokenizer=", "name the texts and a --tokenizer"),
    ("--max_bytes=5", "--max_bytes looks at all"),
    ("--executor=cloud", "want local, slurm or ray"),
    ("--executor=slurm", "wants --partition"),
    ("--tasks=0", "at least one"),
    ("--missing=perhaps", "want 'allow'"),
    ("--task=3", "did you mean 'tasks'"),
])
def test_what_does_not_fit_is_one_line_and_leaves_nothing(texts, tmp_path, more, says):
    refused(cluster(tmp_path / "data", *flags(texts, more)), says)
    assert not (tmp_path / "data").exists()


def test_a_run_that_failed_is_gone_on_with_by_one_process_while_its_texts_are_the_same(texts, tmp_path):
    shutil.copytree(texts / "in", tmp_path / "in")
    out, args = tmp_path / "data", [f"{tmp_path}/in", "--tokenizer=byte", "--strict"]
    failed = cluster(out, *args)
    last = failed.stderr.splitlines()[-1]
    assert failed.returncode == 2 and "(--strict)" in last and "the same command goes on" in last
    with open(out / "work" / "lock", "a") as lock:
        assert lock_file(lock)
        refused(cluster(out, *args), "another run is at work")
    os.utime(tmp_path / "in" / "0.jsonl", (1, 1))
    refused(cluster(out, *args), "begun with other texts")


def test_data_that_are_not_what_was_counted_are_no_data(texts, tmp_path, monkeypatch):
    """Everything is counted twice."""
    true = steps.take_in
    monkeypatch.setattr(steps, "take_in", lambda audit, part: [true(audit, json.loads(json.dumps(part))) for _ in "12"])
    done = cluster(tmp_path / "data", *flags(texts, "--tasks=1", "--parts=1"))
    assert done.returncode == 2 and not (tmp_path / "data" / "meta.json").exists()


def test_a_folder_of_others_is_left_alone_and_an_empty_one_is_taken(texts, tmp_path):
    for out in ("", "."):
        # The working folder is the project's own.
        refused(cluster(out, *flags(texts)), ". holds something else")
    (tmp_path / "note.txt").write_text("mine")
    refused(cluster(tmp_path, *flags(texts)), "holds something else")
    assert os.listdir(tmp_path) == ["note.txt"]
    os.mkdir(tmp_path / "mine")
    refused(cluster(f"{tmp_path}/mine/", *flags(texts, "--missing=perhaps")), "want 'allow'")
    assert os.listdir(tmp_path / "mine") == []
