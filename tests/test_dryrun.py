"""
tests/dryrun/: what it refuses, and its committed summary against tools/plan.py. Where .gpuenv is (make gpu-dry), also
that it notices what it is for.
"""
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from conftest import ROOT

DRYRUN = os.path.join(ROOT, "tests", "dryrun", "dryrun.py")
GPU_PYTHON = os.path.join(ROOT, ".gpuenv", "bin", "python")
with_cuda = pytest.mark.skipif(
    not os.path.exists(os.path.join(ROOT, ".gpuenv", "ready")) or not shutil.which("gcc"),
    reason="wants .gpuenv (make gpu-dry) and gcc")


def dryrun(*args, python=sys.executable, **env):
    return subprocess.run([python, DRYRUN, *args], capture_output=True, text=True, cwd=ROOT, env=os.environ | env)


@pytest.mark.parametrize("args, env, says", [
    (["nothing"], {}, "has no section 'nothing': there is "),
    (["--blocks"], {}, "does not know --blocks: there is --config="),
    (["--config=configs/tiny.py --gpus=none"], {}, "--gpus=none --mib=143771: want positive numbers"),
    (["blocks"], dict(PATH=""), "wants gcc"),
    pytest.param(["blocks"], {}, "is written for torch 2.11 with CUDA, and this is 2.",
                 marks=pytest.mark.skipif(torch.version.cuda is not None, reason="this is")),
])
def test_what_cannot_be_done_is_refused_in_one_line(args, env, says):
    done = dryrun(*args, **env)
    assert done.returncode == 2 and done.stdout == ""
    line, = done.stderr.strip().splitlines()
    assert says in line


# -----------------------------------------------------------------------------
# what was seen, which is committed


def records():
    with open(os.path.join(ROOT, "records", "dryrun", "sections.jsonl"), encoding="utf-8") as file:
        return {row["section"]: row for row in map(json.loads, file)}


def test_every_section_is_in_the_summary_and_nothing_is_wrong():
    sys.path.insert(0, os.path.dirname(DRYRUN))
    try:
        from dryrun import SECTIONS
    finally:
        sys.path.pop(0)
    found = records()
    assert [section.name for section in SECTIONS] == list(found)
    assert not any(row["wrong"] for row in found.values())


def test_readmes_table_of_memory_is_what_torchs_allocator_took():
    """GB at the peak of three whole steps, by torch's own books on the pretended GPU: within 5 %, six times."""
    found = records()
    names = "8b-one-gpu", "8b-8xh200", "8b-8xh100", "sft-8b-packed", "1b5", "lora-8b"
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        table = file.read().split("tools.plan --fits\n")[1].split("```")[0]
    # That they are what is planned: test_plan.py.
    planned = [float(line.split()[0]) for line in table.splitlines()[1:]]
    took = [found[name]["facts"]["gib"] * 2**30 / 1e9 for name in names]
    assert len(planned) == 6 and planned == pytest.approx(took, rel=0.05)


# -----------------------------------------------------------------------------
# where the environment is


@with_cuda
def test_whom_attention_asks_and_how_wide_the_optimizer_loads():
    done = dryrun("attention", "optimizer", python=GPU_PYTHON)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 3 sections as they should be" in done.stdout


@with_cuda
def test_a_run_that_does_not_fit_is_wrong():
    """60 million parameters take 1.2 GB with gradients and states; the device has 1 GiB."""
    flags = "configs/tiny.py --n_embd=1024 --n_head=16 --ffn_dim=4096 --n_layer=6 --mib=1024"
    done = dryrun(f"--config={flags}", python=GPU_PYTHON)
    assert done.returncode == 1
    assert "WRONG" in done.stdout and ("does not fit" in done.stdout or "a step takes about" in done.stdout)
