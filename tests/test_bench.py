"""tools/bench.py: each race runs at tiny size and leaves its record; who computes something else does not race."""
import json

import pytest
import torch

from conftest import refused, script
from tools import bench


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Without a compiler, which takes half a minute and changes no claim here."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    settings = dict(preset="packed", device="cpu", dtype="float32", clock="cpu", rounds=2)
    for name, value in settings.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setitem(bench.PRESETS, "packed", bench.PRESETS["tiny"])


@pytest.mark.parametrize("mode, other, unit, count", [
    ("train", "hf", "tok/s", 2 * 64),
    ("decode", "hf", "tok/s", 8),
    ("optim", "AdamW fused", "GB/s", None),
])
def test_a_race_leaves_a_record_whose_rates_follow_from_its_seconds(tmp_path, mode, other, unit, count):
    small = ["--preset=tiny", "--device=cpu", "--rounds=3", "--tokens=8", f"--out={tmp_path}"]
    done = script("tools.bench", mode, *small)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / f"{mode}-tiny-float32.json").read_text())
    ours, theirs = record["rows"]["ours"], record["rows"][other]
    ratios = sorted(b / a for a, b in zip(ours["seconds"], theirs["seconds"], strict=True))
    assert theirs["ratio"] == pytest.approx([ratios[1], ratios[0], ratios[2]]) and len(ratios) == 3
    assert f"| {other} | " in done.stdout and record["command"].startswith(f"python -m tools.bench {mode}")
    if count:
        assert ours[unit] == pytest.approx(count / ours["median"])
    else:
        # AdamW keeps two averages, AdEMAMix three: 28 and 36 bytes a parameter.
        assert ours[unit] * ours["median"] * 28 == pytest.approx(theirs[unit] * theirs["median"] * 36)


def test_who_computes_something_else_does_not_race(monkeypatch):
    right = bench.contestant

    def wrong(name, *args):
        model, loss = right(name, *args)
        return model, lambda: loss() * (1.001 if name == "hf" else 1)
    monkeypatch.setattr(bench, "contestant", wrong)
    with pytest.raises(ValueError, match="norm of the gradient: hf has .* they do not compute the same"):
        bench.train()
    with pytest.raises(ValueError, match="hf has nan"):
        bench.agree("loss", dict(ours=2.0, hf=float("nan")), 1e-3)


def test_a_share_is_the_speed_over_that_of_the_probe_and_everybody_has_each_turn(monkeypatch):
    """By a clock that ticks once a reading, each call takes a second."""
    ticks = iter(range(100))
    monkeypatch.setattr(bench, "now", lambda: next(ticks))
    turns = []
    ways = {name: lambda name=name: turns.append(name) for name in ("ours", "hf")}
    rows = bench.race(ways, dict(ours=3.0, hf=1.0), (4.0, lambda: turns.append("probe")))
    assert rows["ours"]["share"] == 0.75 and rows["hf"]["ratio"] == [1, 1, 1] and len(rows["hf"]["seconds"]) == 2
    assert turns == ["probe", "hf", "ours", "ours", "hf", "probe", "probe", "hf", "ours"]


def test_attended_positions_are_those_counted_one_by_one():
    doc = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    seen = [sum(row[j] == row[i] for j in range(i + 1)) - 0.5 for row in doc.tolist() for i in range(6)]
    assert bench.attended(doc, 6) == pytest.approx(sum(seen) / len(seen))
    assert bench.attended(None, 6) == 3


@pytest.mark.parametrize("args, says", [
    (["fly"], "want one of train, decode, optim"),
    (["train", "--preset=huge"], "there is cpu, packed"),
    (["train", "--rounds=0"], "want at least 1"),
    (["train", "--impls=nanoGPT"], "there is hf and hf compile"),
    (["train", "--threads=2", "--device=cpu"], "take --threads=1"),
])
def test_what_cannot_be_measured_is_one_line(args, says):
    refused(script("tools.bench", *args), says)
