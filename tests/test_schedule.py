"""schedule.py against the published scheduler's values, torch's cosine, published milestones, and a counting loop."""

import json
from pathlib import Path

import pytest
import torch
from conftest import table
from tiny import GOLDEN

from schedule import NEVER, batch_size, cosine, plan_with_decay_at, samples_at, steps_in, wsd

TOTAL, DECAY = 3_662_109_375, 403_905_806
APERTUS_8B = dict(peak=1.1e-4, floor=1.1e-5, warmup=4_096_000, total=TOTAL, decay=DECAY)


def test_the_8b_run_has_the_published_learning_rates():
    """Also if the decay is requested at the planned sample."""
    points = {point["samples"]: point["lr"] for point in json.loads(Path(GOLDEN, "wsd_8b.json").read_text())}
    for decay_at in (None, TOTAL - DECAY):
        assert {s: wsd(s, **APERTUS_8B, decay_at=decay_at) for s in points} == pytest.approx(points, rel=1e-12, abs=0)
    assert wsd(1000 * TOTAL, **APERTUS_8B, decay_at=NEVER) == 1.1e-4


@pytest.mark.parametrize("decay_at", [350, 2100])
def test_a_decay_that_begins_at_another_time_keeps_its_share_and_its_shape(decay_at):
    """The decay stays 30 % of the run: 150 samples after 350, 900 after 2,100; its shape is 1 - sqrt (2405.18392)."""
    total = decay_at * 10 // 7
    assert plan_with_decay_at(decay_at, 1000, 300) == (total, total * 3 // 10)
    rates = {0: 0, 50: 0.5, 100: 1, decay_at: 1, total: 0.1, 10 * total: 0.1}
    for course in (0.2, 0.5, 0.8):
        s = decay_at + int(course * (total - decay_at))
        rates[s] = 0.1 + 0.9 * (1 - course**0.5)
    assert {s: wsd(s, 1.0, 0.1, 100, 1000, 300, decay_at) for s in rates} == pytest.approx(rates)


# Lengths of warm-up and decay in a run of 100 samples with peak 1, where the decay begins, and the rates at samples.
# A decay that begins in the warm-up falls from the rate reached so far, or stays at it if it is below the floor of 0.1.
CURVES = [
    (50, 50, 10, {5: 0.1, 10: 0.2, 15: 0.1 + 0.1 * (1 - 0.5**0.5), 20: 0.1}),
    (50, 50, 2, {1: 0.02, 2: 0.04, 3: 0.04, 4: 0.1}),
    (0, 50, None, {0: 1.0}),
    (10, 0, None, {0: 0, 5: 0.5, 10: 1, 99: 1, 100: 0.1, 1000: 0.1}),
]


@pytest.mark.parametrize("warmup, decay, decay_at, rates", CURVES)
def test_wsd_without_a_phase_and_with_one_inside_another(warmup, decay, decay_at, rates):
    assert {s: wsd(s, 1.0, 0.1, warmup, 100, decay, decay_at) for s in rates} == pytest.approx(rates)
    assert plan_with_decay_at(0, 100, 100) == (100, 100)  # the decay may be the whole run


def test_cosine_is_torchs():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=0.1)
    rates = {0: 0, 5: 0.5, 500: 0.1}
    for s in range(10, 101):
        rates[s] = theirs.get_last_lr()[0]
        optimizer.step()
        theirs.step()
    assert {s: cosine(s, 1.0, 0.1, warmup=10, total=100) for s in rates} == pytest.approx(rates, rel=1e-9)
    assert cosine(0, 1.0, 0.1, warmup=0, total=9) == 1.0


@pytest.mark.parametrize(
    "schedule, lengths", [(wsd, (60, 100, 50)), (wsd, (-1, 100, 0)), (wsd, (0, 100, -1)), (cosine, (101, 100))]
)
def test_phases_that_do_not_fit_into_the_run_are_an_error(schedule, lengths):
    with pytest.raises(ValueError, match="do not fit into total_samples=100: say, for example, --warmup_samples=5 "):
        schedule(0, 1.0, 0.1, *lengths)


# Report Table H.8, which counts iterations from 1; we count from 0. Batch at the start and ramp of the 8B and the 70B;
# step, samples and batch at the end of the warm-up, at the ramp, at the begin of the decay, and at the end.
MILESTONES = """
1024 | 1718272000 | 4000    | 4096000    | 1024
1024 | 1718272000 | 1678000 | 1718272000 | 2048
1024 | 1718272000 | 2429919 | 3258203569 | 2048
1024 | 1718272000 | 2627139 | 3662109375 | 2048
2048 | 1072164864 | 2000    | 4096000    | 2048
2048 | 1072164864 | 523518  | 1072164864 | 4096
2048 | 1072164864 | 1057218 | 3258203569 | 4096
2048 | 1072164864 | 1155828 | 3662109375 | 4096
"""


@pytest.mark.parametrize("row", table(MILESTONES))
def test_the_published_runs_are_at_their_milestones(row):
    start, ramp_at, step, samples, batch = map(int, row)
    assert steps_in(samples, start, ramp_at) == step
    assert batch_size(samples, start, ramp_at) == batch


@pytest.mark.parametrize("start, ramp_at", [(8, None), (8, 0), (8, 64), (8, 67), (1, 5)])
def test_steps_and_samples_are_what_a_loop_counts(start, ramp_at):
    seen = 0
    for step in range(40):
        assert samples_at(step, start, ramp_at) == seen
        batch = batch_size(seen, start, ramp_at)
        assert {steps_in(s, start, ramp_at) for s in range(seen, seen + batch)} == {step}
        seen += batch
