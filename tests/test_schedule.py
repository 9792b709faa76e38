"""schedule.py against the published scheduler's values, torch's cosine, published milestones, and a counting loop."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import GOLDEN

from schedule import Plan, cosine, rescale_decay, wsd

TOTAL, DECAY = 3_662_109_375, 403_905_806
APERTUS_8B = dict(lr=1.1e-4, min_lr=1.1e-5, warmup_samples=4_096_000, total_samples=TOTAL, decay_samples=DECAY)


def rates(samples, decay_at, **settings):
    """{samples: learning rate} of a plan with steps of one sample, whose decay begins after decay_at samples."""
    plan = Plan(batch_size=1, decay_at=decay_at, **settings)
    return {s: plan.lr_at(s) for s in samples}


def test_the_8b_run_has_the_published_learning_rates():
    """Also as a plan; and while it is not known when the decay begins, the rate stays at the peak."""
    points = {point["samples"]: point["lr"] for point in json.loads(Path(GOLDEN, "wsd_8b.json").read_text())}
    published = pytest.approx(points, rel=1e-12, abs=0)
    assert {s: wsd(s, 1.1e-4, 1.1e-5, 4_096_000, TOTAL, DECAY) for s in points} == published
    assert rates(points, TOTAL - DECAY, **APERTUS_8B) == published
    assert rates([2_048_000, 1000 * TOTAL], None, **APERTUS_8B) == {2_048_000: 0.55e-4, 1000 * TOTAL: 1.1e-4}


@pytest.mark.parametrize("decay_at", [350, 2100])
def test_a_decay_that_begins_at_another_time_keeps_its_share_and_its_shape(decay_at):
    """The decay stays 30 % of the run: 150 samples after 350, 900 after 2,100; its shape is 1 - sqrt (2405.18392)."""
    total = decay_at * 10 // 7
    assert rescale_decay(decay_at, 1000, 300) == (total, total * 3 // 10)
    want = {0: 0, 50: 0.5, 100: 1, decay_at: 1, total: 0.1, 10 * total: 0.1}
    for course in (0.2, 0.5, 0.8):
        s = decay_at + int(course * (total - decay_at))
        want[s] = 0.1 + 0.9 * (1 - course**0.5)
    plan = dict(lr=1.0, min_lr=0.1, warmup_samples=100, total_samples=1000, decay_samples=300)
    assert rates(want, decay_at, **plan) == pytest.approx(want)
    assert Plan(batch_size=10, decay_at=decay_at, **plan).end == total // 10


# Lengths of warm-up and decay in a run of 100 samples with peak 1, where the decay begins, and the rates at samples.
# A decay that begins in the warm-up falls from the rate reached so far, or stays at it if it is below min_lr = 0.1.
CURVES = [
    (50, 50, 10, {5: 0.1, 10: 0.2, 15: 0.1 + 0.1 * (1 - 0.5**0.5), 20: 0.1, 99: 0.1}),
    (50, 50, 2, {1: 0.02, 2: 0.04, 3: 0.04, 4: 0.04, 99: 0.04}),
    (0, 50, 50, {0: 1.0, 50: 1.0}),
    (10, 0, 100, {0: 0, 5: 0.5, 10: 1, 99: 1, 100: 0.1, 1000: 0.1}),
]


@pytest.mark.parametrize("warmup, decay, decay_at, want", CURVES)
def test_wsd_without_a_phase_and_with_one_inside_another(warmup, decay, decay_at, want):
    plan = dict(lr=1.0, min_lr=0.1, warmup_samples=warmup, total_samples=100, decay_samples=decay)
    assert rates(want, decay_at, **plan) == pytest.approx(want)
    assert rescale_decay(0, 100, 100) == (100, 100)  # the decay may be the whole run


def test_cosine_is_torchs():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=0.1)
    want = {0: 0, 5: 0.5, 500: 0.1}
    for s in range(10, 101):
        want[s] = theirs.get_last_lr()[0]
        optimizer.step()
        theirs.step()
    assert {s: cosine(s, 1.0, 0.1, warmup=10, total=100) for s in want} == pytest.approx(want, rel=1e-9)
    plan = dict(schedule="cosine", lr=1.0, min_lr=0.1, warmup_samples=10, total_samples=100, decay_samples=30)
    assert rates(want, 70, **plan) == pytest.approx(want, rel=1e-9)  # without a decay of its own
    assert cosine(0, 1.0, 0.1, warmup=0, total=9) == 1.0


@pytest.mark.parametrize(
    "schedule, warmup, decay", [("wsd", 60, 50), ("wsd", -1, 0), ("wsd", 0, -1), ("cosine", 101, 0)]
)
def test_phases_that_do_not_fit_into_the_run_are_an_error(schedule, warmup, decay):
    with pytest.raises(ValueError, match="do not fit into total_samples=100: say, for example, --warmup_samples=5 "):
        Plan(batch_size=1, schedule=schedule, warmup_samples=warmup, total_samples=100, decay_samples=decay)


# Report Table H.8, which counts iterations from 1; we count from 0. Batch at the start and ramp of the 8B and the 70B;
# step, samples and batch at the ramp and at the end.
MILESTONES = [
    (1024, 1718272000, 1678000, 1718272000, 2048),
    (1024, 1718272000, 2627139, 3662109375, 2048),
    (2048, 1072164864, 523518, 1072164864, 4096),
    (2048, 1072164864, 1155828, 3662109375, 4096),
]


@pytest.mark.parametrize("start, ramp_at, step, samples, batch", MILESTONES)
def test_the_published_runs_are_at_their_milestones(start, ramp_at, step, samples, batch):
    plan = Plan(batch_size=start, batch_ramp_at=ramp_at, total_samples=TOTAL)
    assert plan.steps_in(samples) == step
    assert plan.samples_of(step)[1] == batch


@pytest.mark.parametrize("start, ramp_at", [(8, 0), (8, 64), (8, 67), (4, 5)])
def test_steps_and_samples_are_what_a_loop_counts(start, ramp_at):
    """Each part of a step follows the one before."""
    plan = Plan(batch_size=start, batch_ramp_at=ramp_at, block_size=7)
    seen = 0
    for step in range(40):
        batch = 2 * start if ramp_at and seen >= ramp_at else start
        assert plan.samples_before(step) == seen
        assert plan.samples_of(step) == (seen, batch)
        assert [plan.samples_of(step, part, 4) for part in range(4)] == [
            (seen + part * batch // 4, batch // 4) for part in range(4)
        ]
        assert {plan.steps_in(s) for s in range(seen, seen + batch)} == {step}
        seen += batch
        assert plan.tokens_after(step) == 7 * seen


def test_a_decay_begins_once_and_the_run_ends_with_it_or_with_its_stage():
    """Ten steps of ten samples, the last three decay. A decay after 40 samples instead of 70 takes 17 instead of 30."""
    settings = dict(batch_size=10, total_samples=100, decay_samples=30, eps=1e-8)
    plan = Plan.from_settings(settings, stage_end=None)
    assert (plan.decay_at, plan.end) == (70, 10)
    assert plan.samples_if_decay_follows(3) == 57  # 40 samples, and 40 * 30 // 70
    assert not plan.begin_decay(7) and not plan.begin_decay(8)
    assert plan.begin_decay(4) and (plan.decay_at, plan.end) == (40, 5)
    assert not plan.begin_decay(5)
    unknown = Plan.from_settings(settings)
    unknown.decay_at = None
    assert unknown.end == math.inf
    assert unknown.begin_decay(9) and unknown.decay_at == 90
    assert Plan.from_settings(settings, stage_end=85).end == 8
    assert not Plan.from_settings(settings | dict(schedule="cosine")).begin_decay(1)
