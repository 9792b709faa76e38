"""schedule.py against the published scheduler's values, torch's cosine, published milestones, a loop that counts."""
import json, os

import pytest
import torch
from conftest import ROOT
from schedule import NEVER, batch_size, begun_at, cosine, print_milestones, samples_at, steps_in, wsd

APERTUS_8B = dict(peak=1.1e-4, floor=1.1e-5, warmup=4_096_000, total=3_662_109_375, decay=403_905_806)
RAMP_8B, RAMP_70B = dict(start=1024, ramp_at=1_718_272_000), dict(start=2048, ramp_at=1_072_164_864)
TOTAL = APERTUS_8B["total"]


def test_the_8b_run_has_the_published_learning_rates():
    with open(os.path.join(ROOT, "tests", "golden", "wsd_8b.json")) as f:
        for point in json.load(f):
            assert wsd(point["samples"], **APERTUS_8B) == pytest.approx(point["lr"], rel=1e-12, abs=0)


def test_a_decay_that_began_as_planned_is_the_published_one_to_the_last_digit():
    planned = APERTUS_8B["total"] - APERTUS_8B["decay"]
    assert begun_at(planned, APERTUS_8B["total"], APERTUS_8B["decay"]) == (TOTAL, APERTUS_8B["decay"])
    with open(os.path.join(ROOT, "tests", "golden", "wsd_8b.json")) as f:
        for point in json.load(f):
            assert wsd(point["samples"], **APERTUS_8B, decay_at=planned) == wsd(point["samples"], **APERTUS_8B)


@pytest.mark.parametrize("decay_at", [350, 2100])                            # half as long as planned; three times
def test_a_decay_that_began_at_another_time_keeps_its_share_and_its_shape(decay_at):
    """30 % of the run: 150 samples behind 350 at the peak, 900 behind 2,100; 1 - sqrt of its course (2405.18392)."""
    total = decay_at * 10 // 7
    how = dict(peak=1.0, floor=0.1, warmup=100, total=1000, decay=300, decay_at=decay_at)
    assert begun_at(decay_at, 1000, 300) == (total, 3 * total // 10)
    assert [wsd(s, **how) for s in (0, 50, 100, decay_at)] == [0, 0.5, 1, 1]
    for course in (0.25, 0.5, 0.81):
        s = decay_at + course * (total - decay_at)
        assert wsd(s, **how) == pytest.approx(0.1 + 0.9 * (1 - course ** 0.5))
    assert wsd(total, **how) == wsd(10 * total, **how) == 0.1


def test_without_a_begin_the_rate_stays_at_the_peak():
    assert {wsd(s, **APERTUS_8B, decay_at=NEVER) for s in (4_096_000, TOTAL, 1000 * TOTAL)} == {1.1e-4}


def test_a_decay_that_begins_in_the_warmup_falls_from_what_that_has_reached():
    """After a fifth of the warm-up a fifth of the peak; after a twentieth less than the floor, and it rises no more."""
    how = dict(peak=1.0, floor=0.1, warmup=100, total=1000, decay=500)
    assert [wsd(s, **how, decay_at=20) for s in (10, 20, 40)] == pytest.approx([0.1, 0.2, 0.1])
    assert wsd(30, **how, decay_at=20) == pytest.approx(0.1 + 0.1 * (1 - 0.5 ** 0.5))
    assert [wsd(s, **how, decay_at=5) for s in (4, 5, 7, 9)] == pytest.approx([0.04, 0.05, 0.05, 0.05])


def test_wsd_without_warmup_or_decay():
    assert wsd(0, 1.0, 0.1, warmup=0, total=100, decay=50) == 1.0
    constant = [wsd(s, 1.0, 0.1, warmup=10, total=100, decay=0) for s in (0, 5, 10, 99, 100, 1000)]
    assert constant == [0, 0.5, 1, 1, 0.1, 0.1]
    assert wsd(60, 1.0, 0.0, warmup=40, total=100, decay=60) == pytest.approx(1 - (20 / 60) ** 0.5)


def test_cosine_is_torchs():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-4)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=3e-5)
    for s in range(10, 101):
        assert cosine(s, 3e-4, 3e-5, warmup=10, total=100) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()
    assert cosine(5, 3e-4, 3e-5, warmup=10, total=100) == pytest.approx(1.5e-4)
    assert cosine(0, 1.0, 0.1, warmup=0, total=9) == 1.0


@pytest.mark.parametrize("bad", [dict(warmup=60, decay=50), dict(warmup=-1), dict(decay=-1), dict(warmup=101)])
def test_phases_that_do_not_fit_are_refused(bad):
    with pytest.raises(ValueError, match="do not fit into total=100"):
        wsd(0, 1.0, 0.1, **{"warmup": 0, "total": 100, "decay": 0, **bad})


def test_published_milestones():  # report Table F.7 counts iterations from 1, we from 0
    assert samples_at(1_678_000, **RAMP_8B) == 1_718_272_000 and samples_at(523_518, **RAMP_70B) == 1_072_164_864
    assert steps_in(TOTAL, **RAMP_8B) == 2_627_139 and steps_in(TOTAL, **RAMP_70B) == 1_155_828
    assert steps_in(APERTUS_8B["warmup"], **RAMP_8B) == 4000 and steps_in(APERTUS_8B["warmup"], **RAMP_70B) == 2000
    assert steps_in(TOTAL - APERTUS_8B["decay"], **RAMP_8B) + 1 == 2_429_920               # stage 5 of the 8B
    assert [batch_size(s, **RAMP_8B) for s in (0, 1_718_271_999, 1_718_272_000, TOTAL)] == [1024, 1024, 2048, 2048]


def test_the_command_prints_every_corner_of_the_published_curves(capsys):
    """Steps and batches as above; 15.0T tokens, the decay from 13.35T on; half of it later 1 - sqrt(1/2) are left."""
    print_milestones("8B", APERTUS_8B["peak"], **RAMP_8B)
    rows = [line.split() for line in capsys.readouterr().out.strip().splitlines()[1:]]
    assert [row[0] for row in rows] == ["begin", "warm", "ramp", "decay", "half", "end"]
    steps = {row[0]: int(row[1].replace(",", "")) for row in rows}
    assert steps == dict(begin=0, warm=4000, ramp=1_678_000, decay=2_429_919, half=steps["half"], end=2_627_139)
    assert abs(2 * steps["half"] - steps["decay"] - steps["end"]) <= 1
    tokens = {row[0]: row[3] for row in rows}
    assert (tokens["begin"], tokens["ramp"], tokens["decay"], tokens["end"]) == (
        "0.000T", "7.038T", "13.346T", "15.000T")
    assert [row[4] for row in rows] == ["1024", "1024", "2048", "2048", "2048", "2048"]
    half = 1.1e-5 + 9.9e-5 * (1 - 0.5 ** 0.5)
    assert [float(row[5]) for row in rows] == pytest.approx([0, 1.1e-4, 1.1e-4, 1.1e-4, half, 1.1e-5], rel=1e-4)


@pytest.mark.parametrize("start, ramp_at", [(8, None), (8, 0), (8, 64), (8, 67), (1, 5)])
def test_samples_at_is_what_a_loop_would_count(start, ramp_at):
    seen = 0
    for step in range(40):
        assert samples_at(step, start, ramp_at) == seen
        batch = batch_size(seen, start, ramp_at)
        assert all(steps_in(s, start, ramp_at) == step for s in range(seen, seen + batch))
        seen += batch
