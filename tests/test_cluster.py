"""corpus/cluster.py: datatrove's executors make the folder that prepare.py makes, to the byte, killed or not."""
import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT, script
from corpora import fill, put, report, rows, write_lines, written

pytest.importorskip("datatrove")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    root = put(tmp_path_factory.mktemp("texts"), {"in/bad.txt": b"Gr\xfcezi", "in/scan.pdf": ""})
    for name in "abc":
        write_lines(root / "in" / f"{name}.jsonl", rows(40, 30 * ord(name)))
    return root


def flags(root):
    return [root / "in", "--near_dedup=0.72", "--source_by=lang", "--shard_tokens=3000",
            "--keep_licenses=cc0,mit", "--train_bpe=400",
            "--tokenizer="]


@pytest.fixture(scope="module")
def alone(texts):
    fill(texts / "alone" / "data", *flags(texts))
    return texts / "alone" / "data"


def test_any_number_of_tasks_makes_the_same_folder_and_makes_it_again(texts, alone, tmp_path):
    for tasks, parts in (1, 5), (5, 1):
        args = [f"--out={tmp_path}/data", f"--tasks={tasks}", f"--parts={parts}", "--workers=1"]
        done = script("corpus.cluster", *flags(texts), *args)
        assert done.returncode == 0, done.stderr[-2000:]
        assert written(tmp_path / "data") == written(alone) and os.listdir(tmp_path) == ["data"]
    ours, theirs = report(tmp_path / "data"), report(alone)
    assert {key for key in ours if ours[key] != theirs[key]} == {"run"}


@pytest.mark.slow
def test_killed_and_started_again_it_makes_the_same(texts, alone, tmp_path):
    command = [sys.executable, "-m", "corpus.cluster", *map(str, flags(texts))]
    command += [f"--out={tmp_path}/data", "--tasks=2", "--workers=2"]
    silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **silent)
    while process.poll() is None and not (tmp_path / "data.tmp" / "work" / "sift").exists():
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "data").exists()
    done = script(*command[2:])
    assert done.returncode == 0, done.stderr[-2000:]
    assert written(tmp_path / "data") == written(alone)


def test_a_job_of_slurm_is_submitted_for_each_stage_and_waits_for_the_one_before(texts, tmp_path, monkeypatch):
    """sbatch is a script that writes down how it was called and answers with a number, as Slurm does."""
    sbatch, said = tmp_path / "sbatch", tmp_path / "said"
    sbatch.write_text(f'#!/bin/sh\necho "$@" >> {said}\necho $(wc -l < {said})\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    args = [*flags(texts), f"--out={tmp_path}/data", "--tasks=7", "--executor=slurm", "--partition=cpu"]
    done = script("corpus.cluster", *args)
    assert done.returncode == 0 and "submitted" in done.stdout, done.stderr[-2000:]
    jobs = [line for line in said.read_text().splitlines() if line.startswith("--export")]
    assert len(jobs) == 9 and "--dependency" not in jobs[0] and all("--dependency=afterok:" in job for job in jobs[1:])
