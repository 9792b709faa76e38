"""tools/bench.py: each race runs at tiny size and writes its record; other results are an error."""

import functools
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from lab import run

from tools import bench

SETUP = bench.Setup(bench.PRESETS["tiny"], "cpu", torch.float32, 28)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Compiling would take half a minute and changes no claim here."""
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.mark.parametrize(
    "mode, other, count", [("train", "hf", 2 * 64), ("decode", "hf", 8), ("optim", "AdamW fused", 0)]
)
def test_a_race_leaves_a_record_whose_rates_follow_from_its_seconds(tmp_path, mode, other, count):
    """Results must agree, also on documents with Goldfish, or the command would end with an error."""
    small = f"--preset=tiny --device=cpu --rounds=3 --tokens=8 --out={tmp_path}"
    done = run("tools.bench", mode, *small.split())
    record = json.loads((tmp_path / f"{mode}-tiny-float32.json").read_text())
    ours, theirs = record["rows"]["ours"], record["rows"][other]
    assert len(theirs["seconds"]) == 3 and f"| {other} | " in done.stdout
    assert record["command"].startswith(f"python -m tools.bench {mode}")
    rate = ours["rate"] * sorted(ours["seconds"])[1]
    # AdamW keeps two averages and AdEMAMix three: a step moves 28 and 36 bytes a parameter.
    wanted = count or theirs["rate"] * sorted(theirs["seconds"])[1] * 36 / 28
    assert rate == pytest.approx(wanted)


def test_ours_is_timed_alone_without_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    run("tools.bench", "train", *f"--impls=none --preset=tiny --device=cpu --rounds=1 --out={tmp_path}".split())
    assert json.loads((tmp_path / "train-tiny-float32.json").read_text())["rows"].keys() == {"ours"}


def test_contestants_share_weights_that_are_drawn_once(monkeypatch):
    """So that memory holds one optimizer, and one core draws 1.5B numbers once."""
    ours = bench.build_model(SETUP)
    assert {*bench.to_hugging_face(ours, "cpu").parameters()} == {*ours.parameters()}
    models = []
    monkeypatch.setattr(bench, "build_model", lambda *_: models.append(ours) or ours)
    bench.train_race(SETUP, ["hf"])
    assert len(models) == 1
    bench.optim_race(SETUP)
    assert len(models) == 2


def test_who_computes_something_else_does_not_race(monkeypatch):
    right, wrong = bench.make_loss, dict(ours=1, hf=1.001)
    monkeypatch.setattr(bench, "make_loss", lambda name, *args: lambda: right(name, *args)() * wrong[name])
    with pytest.raises(ValueError, match="norm of the gradient: hf has .* they do not compute the same"):
        bench.train_race(SETUP, ["hf"])


def test_a_share_is_the_speed_over_that_of_the_probe_and_everybody_has_each_turn():
    """The clock advances by one second per reading, so each call takes one second."""
    turns = []
    calls = {name: functools.partial(turns.append, name) for name in ("ours", "hf", "probe")}
    race = bench.Race(calls, dict(ours=3.0, hf=1.0), calls.pop("probe"), probe_work=4.0, per=2, unit="tok/s")
    rows = bench.run_race(race, rounds=2, now=itertools.count().__next__)
    assert rows["ours"]["share"] == 0.75
    assert rows["ours"]["rate"] == 6
    assert rows["hf"]["ratio"] == [1, 1, 1]
    assert turns == ["probe", "hf", "ours", "ours", "hf", "probe", "probe", "hf", "ours"]


def test_make_gpu_installs_nothing_where_the_imports_are_there(tmp_path):
    """`make -n` prints commands; python3 has json, and there is no .venv."""
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    make = ["make", "-n", "gpu", "PY=.none/python", "IMPORTS=json"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(make, cwd=ROOT, env=os.environ | dict(PATH=path), capture_output=True, text=True)
    assert "\npython3 -m tools.bench train" in done.stdout and "pip" not in done.stdout, done.stderr
