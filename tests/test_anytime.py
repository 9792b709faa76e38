"""
A run that ends when one likes: --minutes, a file named cooldown, SIGUSR1, and more samples after the end. Held by runs
that were planned so from the start, whose schedule test_schedule.py holds; on several ranks by tests/faults.
"""

import itertools
import json
import os
import shutil
import signal
import time

import pytest

from conftest import ROOT, refused, same, script, weights
from engine import checkpoint, parallel, plot

# 20 steps of 8 samples, of which the first 2 warm up and the last 6 decay: 30 %.
RUN = """
    configs/tiny.py --n_layer=1 --n_embd=32 --ffn_dim=64 --n_head=2 --n_kv_head=1 --block_size=32 --alpha_warmup=20
    --beta3_warmup=20 --eval_every=0 --last_eval_windows=4 --checkpoint_every=5 --keep_checkpoints=0 --micro_batch=8
""".split()
PEAK = 3e-3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    own = tmp_path_factory.mktemp("anytime") / "data"
    done = script("prepare.py", os.path.join(ROOT, "*.py"), f"--out={own}", "--tokenizer=byte", "--val_share=0.02")
    assert done.returncode == 0, done.stderr
    return own


def ran(data, out, *args):
    return script("train.py", *RUN, f"--data={data}", f"--out={out}", *args)


def trained(data, out, *args):
    """The folder of a run that has ended well."""
    done = ran(data, out, *args)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """As planned, with one checkpoint kept: the newest, and the last from before the decay."""
    return trained(data, tmp_path_factory.mktemp("anytime") / "whole", "--keep_checkpoints=1")


MORE = "--resume", "--total_samples=320", "--decay_samples=96"


@pytest.fixture(scope="module")
def twice(data, tmp_path_factory):
    return trained(data, tmp_path_factory.mktemp("anytime") / "twice", *MORE[1:])


def log(out):
    """{step: (loss, rate)}"""
    return {entry["step"]: (entry["loss"], entry["lr"]) for entry in plot.read_log(str(out)) if "loss" in entry}


def steps(out):
    return checkpoint.steps_in(out / "ckpt")


def equal(one, other):
    return same(weights(one), weights(other)) and log(one) == log(other)


def in_each_step(monkeypatch, does):
    """does(0), does(1), ... in the steps of the next run, behind the place where a step looks for requests."""
    true, count = parallel.square_norm, itertools.count()

    def square_norm(*args):
        does(next(count))
        return true(*args)
    monkeypatch.setattr(parallel, "square_norm", square_norm)


def asks_in(monkeypatch, step, out, how="file"):
    """Ask for the decay in this step, so that the next one sees it."""
    def does(now):
        if now == step and how == "file":
            (out / "cooldown").touch()
        if now == step and how == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
    in_each_step(monkeypatch, does)


def killed_after(run, new, step):
    """A copy of a run, as if it had been killed after the checkpoint of this step."""
    shutil.copytree(run, new)
    os.remove(new / "summary.json")
    for later in steps(new):
        if later > step:
            shutil.rmtree(new / "ckpt" / f"step-{later:08d}")
    return new


# -----------------------------------------------------------------------------
# begun now


@pytest.fixture(scope="module")
def planned(data, tmp_path_factory):
    """30 % of the run behind 64 samples at the peak: 27, and so 91 in all."""
    out = tmp_path_factory.mktemp("anytime") / "planned"
    return trained(data, out, "--total_samples=91", "--decay_samples=27")


@pytest.mark.parametrize("how", ["file", "signal"])
def test_asked_for_its_decay_a_run_is_the_one_that_was_planned_with_it(data, planned, tmp_path, monkeypatch, how):
    asks_in(monkeypatch, 6, tmp_path / "run", how)
    done = ran(data, tmp_path / "run")
    assert done.returncode == 0 and "step      8   the decay begins, 3 steps" in done.stdout, done.stderr
    assert equal(tmp_path / "run", planned) and steps(tmp_path / "run") == [5, 8, 10, 11]
    assert not (tmp_path / "run" / "cooldown").exists()


def test_killed_in_such_a_decay_it_ends_in_the_same_bits(data, planned, tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        asks_in(m, 6, tmp_path / "run")
        trained(data, tmp_path / "run")
    killed_after(tmp_path / "run", tmp_path / "again", 8)
    assert equal(trained(data, tmp_path / "again", "--resume"), planned)


def test_the_begin_is_on_disk_before_the_first_step_of_the_decay(data, tmp_path, monkeypatch):
    """A kill in that step would otherwise be followed by another begin, and the step would have two rates."""
    seen, true = {}, checkpoint.write

    def slowly(*args):
        time.sleep(0.2)
        return true(*args)

    def does(step):
        seen[step] = steps(tmp_path / "run")
        if step == 6:
            (tmp_path / "run" / "cooldown").touch()
    monkeypatch.setattr(checkpoint, "write", slowly)
    in_each_step(monkeypatch, does)
    trained(data, tmp_path / "run", "--checkpoint_every=0")
    assert seen[7] == [] and seen[8] == [8]


def test_in_the_warmup_it_falls_from_there(data, tmp_path, monkeypatch):
    """Seen in the second step of a warm-up of ten, after 16 of 80 samples: a fifth of the peak, for 16 more samples."""
    asks_in(monkeypatch, 0, tmp_path)
    trained(data, tmp_path, "--total_samples=160", "--warmup_samples=80", "--decay_samples=80", "--lr_floor=0.0")
    rates = [rate / PEAK for _, rate in log(tmp_path).values()]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.2 * (1 - 0.5 ** 0.5)])


def test_asked_again_in_the_decay_it_changes_nothing(data, whole, tmp_path, monkeypatch):
    asks_in(monkeypatch, 15, tmp_path / "run")
    done = ran(data, tmp_path / "run")
    assert done.returncode == 0 and "step     17   asked for its decay, but the rate falls already" in done.stdout
    assert equal(tmp_path / "run", whole) and not (tmp_path / "run" / "cooldown").exists()


def test_a_cosine_has_none_to_begin_and_says_so(data, tmp_path, monkeypatch):
    asks_in(monkeypatch, 2, tmp_path / "asked")
    eight = "--schedule=cosine", "--total_samples=64"
    done = ran(data, tmp_path / "asked", *eight)
    assert done.returncode == 0 and "the rate falls already" in done.stdout
    assert equal(tmp_path / "asked", trained(data, tmp_path / "plain", *eight))


def test_a_file_of_yesterday_is_not_meant_for_a_run_of_today(data, whole, tmp_path):
    (tmp_path / "cooldown").touch()
    assert equal(trained(data, tmp_path), whole) and not (tmp_path / "cooldown").exists()


def test_a_file_that_a_killed_run_has_not_seen_is_meant_for_the_resumed_one(data, whole, tmp_path):
    run = killed_after(whole, tmp_path / "run", 10)
    (run / "cooldown").touch()
    done = ran(data, run, "--resume")
    assert done.returncode == 0 and "step     11   the decay begins, 4 steps" in done.stdout, done.stderr


# -----------------------------------------------------------------------------
# begun in time


def clocked(monkeypatch, first, each):
    """A clock by which the first step of a run takes so many seconds, each later one so many, and nothing else any."""
    now = [0.0]

    def does(step):
        now[0] += each if step else first
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    in_each_step(monkeypatch, does)


@pytest.fixture(scope="module")
def minute(data, tmp_path_factory):
    """A minute: 31 s for the first step, and 29 steps of a second."""
    out = tmp_path_factory.mktemp("anytime") / "minute"
    with pytest.MonkeyPatch.context() as m:
        clocked(m, 31.0, 1.0)
        return trained(data, out, "--minutes=1")


def test_a_minute_at_a_steady_pace_is_the_run_of_so_many_samples(data, minute, tmp_path):
    """30 steps, and 30 % of them decay."""
    thirty = "--total_samples=240", "--decay_samples=72"
    assert equal(minute, trained(data, tmp_path / "run", *thirty)) and len(log(minute)) == 30
    assert plot.read_json(f"{minute}/summary.json")["seconds"] == 60


def test_a_resumed_run_has_the_time_that_is_left(data, minute, tmp_path, monkeypatch):
    """Ten steps have taken 40 of 60 seconds; at a second each, 20 more are left."""
    run = killed_after(minute, tmp_path / "run", 10)
    clocked(monkeypatch, 1.0, 1.0)
    assert equal(trained(data, run, "--minutes=1", "--resume"), minute)


def test_once_begun_the_decay_of_a_killed_run_asks_no_clock(data, minute, tmp_path, monkeypatch):
    run = killed_after(minute, tmp_path / "run", 21)
    clocked(monkeypatch, 100.0, 100.0)
    assert equal(trained(data, run, "--minutes=1", "--resume"), minute)


def test_with_more_minutes_a_run_goes_on_from_before_its_decay(data, minute, twice, tmp_path, monkeypatch):
    """51 seconds and 21 steps were gone when it began: 70 seconds leave 19 steps."""
    shutil.copytree(minute, tmp_path / "run")
    clocked(monkeypatch, 1.0, 1.0)
    trained(data, tmp_path / "run", f"--minutes={70 / 60}", "--resume")
    assert equal(tmp_path / "run", twice)


def test_time_for_less_than_a_step_is_a_run_of_one(data, tmp_path):
    trained(data, tmp_path, "--minutes=1e-6")
    assert len(log(tmp_path)) == 1 and (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("args, says", [
    (["--minutes=-1"], "minutes=-1.0: want how long to train"),
    (["--minutes=1e999"], "minutes=inf: want how long"),
    (["--minutes=five"], "minutes wants float"),
    (["--minutes=5", "--schedule=cosine"], "wants schedule=wsd"),
    (["--minutes=5", "--warmup_samples=0", "--decay_samples=160"], "a decay shorter than total_samples"),
    (["--stages=(('a', ('x',), 160, 28),)", "--stage=a", "--minutes=5"], "no stage"),
])
def test_minutes_that_cannot_be_are_told_in_one_line(data, tmp_path, args, says):
    refused(ran(data, tmp_path / "run", *args), says)
    assert not (tmp_path / "run").exists()


def test_of_minutes_and_samples_the_one_said_last_counts(data, tmp_path):
    by_samples = "--total_samples=24", "--decay_samples=8"
    (tmp_path / "five.py").write_text("minutes = 5.0\n", encoding="utf-8")
    assert len(log(trained(data, tmp_path / "flag", "--minutes=5", *by_samples))) == 3
    assert len(log(trained(data, tmp_path / "file", tmp_path / "five.py", *by_samples))) == 3
    assert len(log(trained(data, tmp_path / "time", *by_samples, "--minutes=1e-6"))) == 1
    assert json.loads((tmp_path / "flag" / "config.json").read_text())["minutes"] == 0


# -----------------------------------------------------------------------------
# gone on with


@pytest.fixture(scope="module")
def longer(data, whole, tmp_path_factory):
    """The finished run, with one checkpoint from before its decay: asked for its decay too late, and gone on with."""
    assert steps(whole) == [10, 20]
    out = tmp_path_factory.mktemp("anytime") / "longer"
    shutil.copytree(whole, out)
    (out / "cooldown").touch()
    return trained(data, out, *MORE)


def test_with_more_samples_a_run_is_the_one_that_was_planned_longer(longer, twice):
    assert equal(longer, twice)


def test_what_was_decayed_is_set_aside_whole(whole, longer):
    aside = longer / "ckpt" / "decayed-00000020"
    assert checkpoint.verified(str(aside))["step"] == 20
    assert (aside / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()
    assert (aside / "summary.json").read_text() == (whole / "summary.json").read_text()


def test_killed_in_the_decay_and_given_more_samples_it_is_the_longer_run_too(data, planned, twice, tmp_path):
    run = killed_after(planned, tmp_path / "run", 10)
    assert equal(trained(data, run, *MORE), twice)


@pytest.mark.parametrize("args, says", [
    (MORE, "no checkpoint from before that is left"),
    (["--resume", "--total_samples=120"], "its rate has begun to fall: go on with its own total_samples and minutes"),
    (["--resume", "--minutes=1e-6"], "its rate has begun to fall"),
])
def test_what_cannot_go_on_is_told_and_nothing_is_moved(data, whole, tmp_path, args, says):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "ckpt" / "step-00000010")
    refused(ran(data, run, *args), says)
    assert os.listdir(run / "ckpt") == ["step-00000020"] and log(run) == log(whole)
