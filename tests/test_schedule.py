"""schedule.py against the published scheduler's values, torch's cosine, published milestones, a loop that counts."""
import json
import os

import pytest
import torch

from conftest import ROOT, script
from schedule import NEVER, batch_size, begun_at, cosine, samples_at, steps_in, wsd

APERTUS_8B = dict(peak=1.1e-4, floor=1.1e-5, warmup=4_096_000, total=3_662_109_375, decay=403_905_806)
TOTAL = APERTUS_8B["total"]


def test_the_8b_run_has_the_published_learning_rates_also_if_its_decay_was_asked_for_as_planned():
    with open(os.path.join(ROOT, "tests", "golden", "wsd_8b.json")) as f:
        points = json.load(f)
    for point in points:
        rate = wsd(point["samples"], **APERTUS_8B)
        assert rate == pytest.approx(point["lr"], rel=1e-12, abs=0)
        assert rate == wsd(point["samples"], **APERTUS_8B, decay_at=TOTAL - APERTUS_8B["decay"])
    assert wsd(1000 * TOTAL, **APERTUS_8B, decay_at=NEVER) == 1.1e-4


@pytest.mark.parametrize("decay_at", [350, 2100])
def test_a_decay_that_begins_at_another_time_keeps_its_share_and_its_shape(decay_at):
    """30 % of the run: 150 samples behind 350 at the peak, 900 behind 2,100; 1 - sqrt of its course (2405.18392)."""
    total = decay_at * 10 // 7
    plan = dict(peak=1.0, floor=0.1, warmup=100, total=1000, decay=300, decay_at=decay_at)
    assert begun_at(decay_at, 1000, 300) == (total, 3 * total // 10)
    assert [wsd(s, **plan) for s in (0, 50, 100, decay_at)] == [0, 0.5, 1, 1]
    for course in (0.25, 0.5, 0.81):
        s = decay_at + course * (total - decay_at)
        assert wsd(s, **plan) == pytest.approx(0.1 + 0.9 * (1 - course**0.5))
    assert wsd(total, **plan) == wsd(10 * total, **plan) == 0.1


# The lengths of warm-up and decay of 100 samples at a peak of 1, where the decay begins, and the rates at some samples.
# A decay that begins in the warm-up falls from the rate reached so far, or stays there, below the floor of 0.1.
CURVES = [
    (50, 50, 10, {5: 0.1, 10: 0.2, 15: 0.1 + 0.1 * (1 - 0.5**0.5), 20: 0.1}),
    (50, 50, 2, {1: 0.02, 2: 0.04, 3: 0.04, 4: 0.1}),
    (0, 50, None, {0: 1.0}),
    (10, 0, None, {0: 0, 5: 0.5, 10: 1, 99: 1, 100: 0.1, 1000: 0.1}),
]


@pytest.mark.parametrize("warmup, decay, decay_at, rates", CURVES)
def test_wsd_without_a_phase_and_with_one_inside_another(warmup, decay, decay_at, rates):
    assert {s: wsd(s, 1.0, 0.1, warmup, 100, decay, decay_at) for s in rates} == pytest.approx(rates)
    assert begun_at(0, 100, 100) == (100, 100)             # all of the run may be the decay


def test_cosine_is_torchs():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-4)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=3e-5)
    for s in range(10, 101):
        assert cosine(s, 3e-4, 3e-5, warmup=10, total=100) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()
    assert [cosine(s, 1.0, 0.1, warmup=10, total=100) for s in (5, 100, 500)] == [0.5, 0.1, 0.1]
    assert cosine(0, 1.0, 0.1, warmup=0, total=9) == 1.0


@pytest.mark.parametrize("schedule, lengths", [
    (wsd, (60, 100, 50)), (wsd, (-1, 100, 0)), (wsd, (0, 100, -1)), (cosine, (-1, 100)), (cosine, (101, 100))])
def test_phases_that_do_not_fit_into_the_run_are_an_error(schedule, lengths):
    with pytest.raises(ValueError, match="do not fit into total=100"):
        schedule(0, 1.0, 0.1, *lengths)


def test_the_command_prints_the_published_milestones():
    """
    Report Table F.7, which counts iterations from 1; here from 0. The decay begins at 13.35T of 15T tokens; halfway
    1 - sqrt(1/2) is left.
    """
    eight, seventy = script("schedule.py").stdout.strip().split("\n\n")
    begin, *_, half, _ = [line.split() for line in eight.splitlines()[1:]]
    assert float(begin[-1]) == 0 and float(half[-1]) == pytest.approx(1.1e-5 + 9.9e-5 * (1 - 0.5**0.5), rel=1e-4)
    for line in """
        begin 0 0 0.000T 1024 0.0000e+00
        warm 4,000 4,096,000 0.017T 1024 1.1000e-04
        ramp 1,678,000 1,718,272,000 7.038T 2048 1.1000e-04
        decay 2,429,919 3,258,203,569 13.346T 2048 1.1000e-04
        end 2,627,139 3,662,109,375 15.000T 2048 1.1000e-05
    """.strip().splitlines():
        assert line.split() in [row.split() for row in eight.splitlines()]
    rows = [row.split() for row in seventy.splitlines()]
    assert rows[-1] == ["end", "1,155,828", "3,662,109,375", "15.000T", "4096", "1.0000e-06"]
    assert rows[2][:2] == ["warm", "2,000"] and rows[3][:3] == ["ramp", "523,518", "1,072,164,864"]


@pytest.mark.parametrize("start, ramp_at", [(8, None), (8, 0), (8, 64), (8, 67), (1, 5)])
def test_steps_and_samples_are_what_a_loop_counts(start, ramp_at):
    seen = 0
    for step in range(40):
        assert samples_at(step, start, ramp_at) == seen
        batch = batch_size(seen, start, ramp_at)
        assert {steps_in(s, start, ramp_at) for s in range(seen, seen + batch)} == {step}
        seen += batch
