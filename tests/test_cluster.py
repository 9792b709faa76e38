"""corpus/cluster.py: datatrove's executors make the folder that prepare.py makes, to the byte, killed or not."""

import os

import pytest
from conftest import script
from corpora import fill, put, report, rows, write_lines, written
from lab import run

from corpus import stages

pytest.importorskip("datatrove")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    root = put(tmp_path_factory.mktemp("texts"), {"in/bad.txt": b"Gr\xfcezi", "in/scan.pdf": ""})
    for name in "abc":
        write_lines(root / "in" / f"{name}.jsonl", rows(40, 30 * ord(name)))
    return root


def flags(root):
    how = "--near_dedup=0.72 --source_by=lang --shard_tokens=3000 --keep_licenses=cc0,mit --train_bpe=400 --tokenizer="
    return [f"{root}/in/*", *how.split()]


def test_any_number_of_tasks_makes_the_same_folder_also_after_a_failure(texts, tmp_path, monkeypatch):
    """
    Writing the first shards fails, then the same command resumes. A mistake in the settings leaves no file.
    """
    refused = script("corpus.cluster", *flags(texts), f"--out={tmp_path}/data", "--score_field=fame")
    assert "cluster.py: no column fame" in refused.stderr and not os.listdir(tmp_path)
    fill(texts / "alone" / "data", *flags(texts))
    for tasks, parts in ((5, 1), (1, 5)):
        how = f"--out={tmp_path}/data", f"--tasks={tasks}", f"--parts={parts}", "--workers=1"
        with monkeypatch.context() as patch:
            patch.setattr(stages, "write_shard", None)
            assert "logs say more" in script("corpus.cluster", *flags(texts), *how).stderr
        assert "resuming" in run("corpus.cluster", *flags(texts), *how).stdout
        assert written(tmp_path / "data") == written(texts / "alone" / "data")
    ours, theirs = report(tmp_path / "data"), report(texts / "alone" / "data")
    assert {key for key in ours if ours[key] != theirs[key]} == {"run"}
    assert ours["run"]["date"] >= theirs["run"]["date"] >= "2026"
    assert os.listdir(tmp_path) == ["data"]


def test_no_more_is_sifted_than_max_bytes_needs(tmp_path, monkeypatch):
    """In 12 files of some 5,000 bytes: both tasks together stop where prepare.py stops."""
    (tmp_path / "in").mkdir()
    for i in range(12):
        write_lines(tmp_path / "in" / f"{i:02}.jsonl", rows(10, 90 * i))
    monkeypatch.setattr(stages, "GROUP", 5_000)
    how = f"{tmp_path}/in", "--tokenizer=byte", "--max_bytes=12000"
    fill(tmp_path / "one" / "data", *how)
    pieces, sift = stages.STAGES["sift"]
    sifted = []
    monkeypatch.setitem(stages.STAGES, "sift", (pieces, lambda n, work: sifted.append(n) or sift(n, work)))
    run("corpus.cluster", *how, f"--out={tmp_path}/data", "--tasks=2", "--parts=1", "--workers=1")
    assert written(tmp_path / "data") == written(tmp_path / "one" / "data")
    assert 2 < len(sifted) < 8


def test_a_job_of_slurm_is_submitted_for_each_stage_and_waits_for_the_one_before(texts, tmp_path, monkeypatch):
    """sbatch is a script that writes down how it was called and answers with a number, as Slurm does."""
    sbatch, said = tmp_path / "sbatch", tmp_path / "said"
    sbatch.write_text(f'#!/bin/bash\necho "$@" $(grep array= "${{@: -1}}") >> {said}\necho $(wc -l < {said})\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    how = f"--out={tmp_path}/data --tasks=7 --executor=slurm --partition=cpu".split()
    assert "submitted" in run("corpus.cluster", *flags(texts), *how).stdout
    jobs = [line for line in said.read_text().splitlines() if line.startswith("--export")]
    assert len(jobs) == 9
    assert "--dependency" not in jobs[0]
    assert all("--dependency=afterok:" in job for job in jobs[1:])
    # Three stages are arrays of 7 tasks, without a limit (%N) on how many run at a time.
    assert str(jobs).count("array=0-6'") == 3
