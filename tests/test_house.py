"""Structure of the project: no hidden flow, imports in one direction, style, sizes, how scripts start."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, refused
from counts import METHOD, count_hidden, hidden_places, import_places, product_files, read_imports
from test_safety import read

import train
from configurator import settings

PRODUCT = product_files()
LIMITS = "tests/limits.json"


# -----------------------------------------------------------------------------
# what may not grow


def measure():
    """{what tests/limits.json limits: its size today}."""
    return {
        "settings in train.py --help": len(settings(vars(train), train.shape)),
        "lines of train.py": len(read("train.py").splitlines()),
        "lines of README": len(read("README.md").splitlines()),
        **count_hidden(),
        **{f"imports: {kind}": len(places) for kind, places in import_places().items()},
    }


def test_nothing_is_larger_than_its_limit():
    sizes, limits = measure(), json.loads(read(LIMITS))
    assert sizes.keys() == limits.keys()
    larger = {name: f"{size}, limit {limits[name]}" for name, size in sizes.items() if size > limits[name]}
    assert not larger, f"{larger}\n{import_places()}\n" + "\n".join(map(str, hidden_places()))


def git(*args):
    return subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True).stdout


def test_limits_only_fall():
    """Today's are at most those of each committed version."""
    today = json.loads(read(LIMITS))
    for commit in git("log", "--format=%H", "--", LIMITS).split():
        before = json.loads(git("show", f"{commit}:{LIMITS}"))
        assert {name for name in before.keys() & today.keys() if today[name] > before[name]} == set()


@pytest.mark.parametrize("command", [["check"], ["format", "--check", "tests"]], ids=" ".join)
def test_style(command):
    """ruff.toml lists the rules and the reasons for its exceptions."""
    done = subprocess.run([sys.executable, "-m", "ruff", *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


# -----------------------------------------------------------------------------
# imports


def test_the_files_of_the_method_run_in_a_folder_of_their_own(tmp_path):
    """They need no other file of the project."""
    for file in METHOD:
        shutil.copy(Path(ROOT, file), tmp_path)
    code = """
import torch, plain
from ademamix import build_optimizer
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig
from schedule import Plan
model = Apertus(ApertusConfig(block_size=8, vocab_size=32, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=32))
ids = torch.arange(18).view(2, 9)
model.loss(ids[:, :-1], ids[:, 1:], goldfish_mask(ids[:, 1:], 50, 4)).backward()
plan = Plan(batch_size=2, lr=1e-3, total_samples=8, decay_at=8)
build_optimizer(model, "ademamix", 1e-3, (0.9, 0.999, 0.9999), 8.0, 0.1, 4).step(lr=plan.lr_at(1), grad_scale=0.1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_papers_attach_to_nothing():
    """The core does not know them, not even inside a function."""
    users = {file for file, used in read_imports().items() if any(name.startswith("papers/") for name in used)}
    assert {file for file in users if not file.startswith(("papers", "studies", "tools"))} == set()


# -----------------------------------------------------------------------------
# scripts

SCRIPTS = [file for file in PRODUCT if os.sep in file and '__name__ == "__main__"' in read(file)]


@pytest.mark.parametrize("file", SCRIPTS)
def test_a_script_started_by_its_path_says_from_where_to_start_it(file, tmp_path):
    command = [sys.executable, os.path.join(ROOT, file), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    module = file.removesuffix(".py").replace(os.sep, ".")
    refused(done, f"from the project's root, python -m {module}")
