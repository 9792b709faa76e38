"""schedule.py against the published scheduler's values, torch's cosine, published milestones, a loop that counts."""

import json
import os

import pytest
import torch

from conftest import ROOT, script
from schedule import NEVER, batch_size, begun_at, cosine, samples_at, steps_in, wsd

APERTUS_8B = dict(peak=1.1e-4, floor=1.1e-5, warmup=4_096_000, total=3_662_109_375, decay=403_905_806)
TOTAL = APERTUS_8B["total"]
DECAY_BEGINS = TOTAL - APERTUS_8B["decay"]
RAMP_8B = dict(start=1024, ramp_at=1_718_272_000)
RAMP_70B = dict(start=2048, ramp_at=1_072_164_864)


def test_the_8b_run_has_the_published_learning_rates_also_if_its_decay_was_asked_for_as_planned():
    with open(os.path.join(ROOT, "tests", "golden", "wsd_8b.json")) as f:
        for point in json.load(f):
            rate = wsd(point["samples"], **APERTUS_8B)
            assert rate == pytest.approx(point["lr"], rel=1e-12, abs=0)
            assert rate == wsd(point["samples"], **APERTUS_8B, decay_at=DECAY_BEGINS)


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


def test_a_run_without_a_planned_decay_stays_at_the_peak():
    rates = {wsd(s, **APERTUS_8B, decay_at=NEVER) for s in (4_096_000, TOTAL, 1000 * TOTAL)}
    assert rates == {1.1e-4}


def test_a_decay_that_begins_in_the_warmup_falls_from_the_rate_reached_so_far():
    """After a fifth of the warm-up from a fifth of the peak; after a twentieth it stays there, below the floor."""
    plan = dict(peak=1.0, floor=0.1, warmup=100, total=1000, decay=500)
    assert [wsd(s, **plan, decay_at=20) for s in (10, 20, 40)] == pytest.approx([0.1, 0.2, 0.1])
    assert wsd(30, **plan, decay_at=20) == pytest.approx(0.1 + 0.1 * (1 - 0.5**0.5))
    assert [wsd(s, **plan, decay_at=5) for s in (4, 5, 7, 9)] == pytest.approx([0.04, 0.05, 0.05, 0.05])


def test_wsd_without_warmup_or_without_decay():
    assert wsd(0, 1.0, 0.1, warmup=0, total=100, decay=50) == 1.0
    constant = [wsd(s, 1.0, 0.1, warmup=10, total=100, decay=0) for s in (0, 5, 10, 99, 100, 1000)]
    assert constant == [0, 0.5, 1, 1, 0.1, 0.1]
    assert wsd(60, 1.0, 0.0, warmup=40, total=100, decay=60) == pytest.approx(1 - (20 / 60) ** 0.5)
    # All of the run may be the decay.
    assert begun_at(0, 100, 100) == (100, 100)


def test_cosine_is_torchs():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-4)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=3e-5)
    for s in range(10, 101):
        assert cosine(s, 3e-4, 3e-5, warmup=10, total=100) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()
    assert cosine(100, 3e-4, 3e-5, warmup=10, total=100) == cosine(500, 3e-4, 3e-5, warmup=10, total=100) == 3e-5
    assert cosine(5, 3e-4, 3e-5, warmup=10, total=100) == pytest.approx(1.5e-4)
    assert cosine(0, 1.0, 0.1, warmup=0, total=9) == 1.0


@pytest.mark.parametrize("bad", [dict(warmup=60, decay=50), dict(warmup=-1), dict(decay=-1), dict(warmup=101)])
def test_phases_that_do_not_fit_into_the_run_are_an_error(bad):
    with pytest.raises(ValueError, match="do not fit into total=100"):
        wsd(0, 1.0, 0.1, **dict(warmup=0, total=100, decay=0) | bad)
    if "decay" not in bad:
        with pytest.raises(ValueError, match="do not fit into total=100"):
            cosine(0, 1.0, 0.1, total=100, **bad)


def test_published_milestones():
    """Report Table F.7, which counts iterations from 1; here from 0."""
    assert samples_at(1_678_000, **RAMP_8B) == 1_718_272_000
    assert samples_at(523_518, **RAMP_70B) == 1_072_164_864
    for ramp, last, warm in ((RAMP_8B, 2_627_139, 4000), (RAMP_70B, 1_155_828, 2000)):
        assert steps_in(TOTAL, **ramp) == last and steps_in(APERTUS_8B["warmup"], **ramp) == warm
    assert steps_in(DECAY_BEGINS, **RAMP_8B) + 1 == 2_429_920
    batches = [batch_size(s, **RAMP_8B) for s in (0, 1_718_271_999, 1_718_272_000, TOTAL)]
    assert batches == [1024, 1024, 2048, 2048]


def test_the_command_prints_the_published_milestones():
    """Steps and batches as above; the decay begins at 13.35T of 15T tokens; halfway 1 - sqrt(1/2) is left."""
    eight, seventy = script("schedule.py").stdout.strip().split("\n\n")
    rows = {row.split()[0]: row.split()[1:] for row in eight.splitlines()[1:]}
    columns = zip(*rows.values())
    steps, _, tokens, batches, rates = columns
    assert list(rows) == ["begin", "warm", "ramp", "decay", "half", "end"]
    assert steps == ("0", "4,000", "1,678,000", "2,429,919", "2,528,529", "2,627,139")
    assert tokens == ("0.000T", "0.017T", "7.038T", "13.346T", "14.173T", "15.000T")
    assert batches == ("1024", "1024", "2048", "2048", "2048", "2048")
    half = 1.1e-5 + 9.9e-5 * (1 - 0.5**0.5)
    assert list(map(float, rates)) == pytest.approx([0, 1.1e-4, 1.1e-4, 1.1e-4, half, 1.1e-5], rel=1e-4)
    last = seventy.splitlines()[-1].split()
    assert last == ["end", "1,155,828", "3,662,109,375", "15.000T", "4096", "1.0000e-06"]


@pytest.mark.parametrize("start, ramp_at", [(8, None), (8, 0), (8, 64), (8, 67), (1, 5)])
def test_steps_and_samples_are_what_a_loop_counts(start, ramp_at):
    seen = 0
    for step in range(40):
        assert samples_at(step, start, ramp_at) == seen
        batch = batch_size(seen, start, ramp_at)
        assert {steps_in(s, start, ramp_at) for s in range(seen, seen + batch)} == {step}
        seen += batch
