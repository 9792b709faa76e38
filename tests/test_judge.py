"""studies/judge.py against the published judge's figures, and run small from its lessons to its table."""
import json
import os

import numpy as np
import pytest

from conftest import ROOT, refused, script
from studies import judge

with open(os.path.join(ROOT, "tests", "golden", "charter.json"), encoding="utf-8") as f:
    QWEN = json.load(f)["qwen3_32b_nine_degradations"]


@pytest.mark.parametrize("way", ["weighted", "rounded"])
def test_ties_pair_accuracy_best_found_and_spearman_are_the_published(way):
    """Of Qwen3-32B on five of the fifty published prompts: expected digits, and the same rounded."""
    found = []
    for sample in QWEN["samples"]:
        scores = sample["scores"] if way == "weighted" else np.round(sample["scores"])
        found.append(judge.agreement(scores, sample["ground_truth"]))
    mean, want = judge.average(found), QWEN["these_five"][way]
    assert mean["tied"] == pytest.approx(want["tied_pairs"], abs=1e-9)
    assert mean["pairs"] == pytest.approx(want["pair_accuracy"], abs=1e-9)
    assert mean["best"] == pytest.approx(want["top1"], abs=1e-9)
    assert mean["spearman"] == pytest.approx(want["spearman_mean"], abs=1e-9)
    assert sum(one["spearman"] is not None for one in found) == want["spearman_defined"]


def test_a_bias_for_the_first_place_costs_one_order_and_not_both():
    """Closed form: a perfect judge with a bias of 1 nat errs in one of two orders where qualities differ by less."""
    truth = np.array([0.4, -0.4, 2.0, -2.0])
    found = judge.of_pairs(np.stack([truth, truth, truth + 1, -truth + 1], 1))
    assert found["both"] == dict(right=1.0, close=1.0, first=0.5)
    assert found["one"] == dict(right=0.75, close=0.5, first=0.75)
    assert (found["n"], found["n_close"], found["bias"]) == (4, 2, 1.0)


def test_the_teacher_follows_its_rule():
    """Ratings are 5 + q with noise, clipped; of two answers of one quality the first wins in sigmoid(.55)."""
    rng = np.random.default_rng(0)
    off, first = [], []
    for k in range(4000):
        [asked, said] = judge.lesson(rng, k)["messages"]
        parts = asked["content"].split("RESPONSE")[1:]
        q = [sum(worth * (text in part) for text, worth in judge.SENTENCES.items()) for part in parts]
        # "Do not ask a doctor." has no capital A: no sentence is a part of another.
        if k % 2 and abs(q[0] - q[1]) < 0.15:
            first.append(said["content"] == "A")
        elif not k % 2 and abs(q[0]) < 1.5:
            off.append(int(said["content"]) - 5 - q[0])
    assert np.mean(first) == pytest.approx(1 / (1 + np.exp(-judge.FIRST)), abs=0.1) and len(first) > 100
    assert np.mean(off) == pytest.approx(0, abs=0.08) and np.std(off) == pytest.approx(0.85, abs=0.08)


def test_it_runs_from_lessons_to_the_table_and_does_nothing_twice(tmp_path):
    how = [f"--out={tmp_path / 'out'}", f"--results={tmp_path / 'results'}", "--rows=64", "--prompts=2", "--answers=5",
           "--n_embd=16", "--n_layer=1"]
    done = script("studies.judge", *how)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "results" / "table.md").read_text()
    assert table in done.stdout and table.count("\n| ") == 6 and "20 pairs among the five best" in table
    model = tmp_path / "out" / "s0" / "judge" / "hf" / "model.safetensors"
    before = model.stat().st_mtime_ns
    assert script("studies.judge", *how).returncode == 0 and model.stat().st_mtime_ns == before
    assert (tmp_path / "results" / "table.md").read_text() == table
    refused(script("studies.judge", *how[:2], "--rows=65"), "was made with other settings")
