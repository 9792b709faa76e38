"""
A run that is killed, or resumed by another number of ranks, ends like the undisturbed run, for each kind of run. One
process resumes bit-exact. Ranks add in another order, so their losses are only close; with train.py --exact all weights
are bit-exact on any number of ranks too.
"""

import itertools
import json
import random
import signal

import pytest
from conftest import same, script, weights
from lab import ADAPTERS, aligning, pretraining, tuning
from trained import equal, killed_after, log, steps

from engine import parallel

TRAIN = "--checkpoint_every=2 --keep_checkpoints=0"
LORA = " ".join(ADAPTERS)
GUIDED = "--ffn=blockdense --ffn_rank=16 --ffn_blocks=2 --self_guided=0.5 --guide_saving"
# Each kind of run: its flags, how two ranks share it from the start, and how when they resume it. In a step of SFT and
# QRPO the first rank takes all rows, so that the second has none.
KINDS = {
    "pretraining": (TRAIN, "ddp", "fsdp --exact"),
    "continued": (f"{TRAIN} --init_from=LAB/hf --base=bf16 {LORA}", "fsdp --sequence_parallel=2", "fsdp --exact"),
    "distilled": (f"{TRAIN} --n_layer=1 --teacher=LAB/hf", "fsdp --sequence_parallel=2", "fsdp --exact"),
    "guided": (f"{TRAIN} {GUIDED}", "ddp", "fsdp --exact"),
    "sft": ("", "fsdp --micro_batch=6", "ddp"),
    "adapted": (LORA, "ddp", "fsdp"),
    "qrpo": ("", "fsdp --micro_batch=4", "ddp"),
}


def guided(*args):
    """The command line of a run of structured layers."""
    return ["papers.structured_ffn", *pretraining(*args)[1:]]


COMMANDS = dict(guided=guided, sft=tuning, adapted=tuning, qrpo=aligning)
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def run(lab, launch):
    """run(kind, out, *args, parallel): start or resume a run, on two ranks if parallel is given."""

    def run(kind, out, *args, parallel=""):
        more = KINDS[kind][0].replace("LAB", str(lab)).split()
        name, *line = COMMANDS.get(kind, pretraining)(lab, out, *more, *args, "--resume")
        if not parallel:
            done = script(name, *line)
            assert done.returncode == 0, done.stderr
            return out
        codes, said = launch(2, *line, f"--parallel={parallel}", script=name, logs=f"{out}.log")
        assert codes == [0, 0], said[-3000:]
        return out

    return run


@pytest.fixture(scope="module")
def whole(lab, run, tmp_path_factory):
    """whole(kind, *args): the folder of the undisturbed run."""
    made = {(kind,): lab / kind for kind in ("sft", "adapted", "qrpo")}

    def whole(kind, *args):
        if (kind, *args) not in made:
            made[kind, *args] = run(kind, tmp_path_factory.mktemp(kind) / "whole", *args)
        return made[kind, *args]

    return whole


def killed(out, new, places):
    """A copy of a run, as if killed after one of these checkpoints while it wrote a line of its log."""
    place = random.Random(str(out)).choice(places)
    killed_after(out, new, steps(out)[place])
    with open(new / "log.jsonl", "a") as f:
        f.write(json.dumps(log(out)[-1])[:9])
    return new


def losses(out):
    return [entry[name] for entry in log(out) for name in ("loss", "val_loss") if name in entry]


@every_kind
def test_killed_and_resumed_it_ends_in_the_same_bits(whole, run, tmp_path, kind):
    assert equal(run(kind, killed(whole(kind), tmp_path / "run", [0, 1, -2])), whole(kind))


def test_a_signal_within_a_step_of_qrpo_drops_the_step(whole, run, tmp_path, monkeypatch):
    """The signal comes in the fifth micro-batch, where a step has two. Other runs: test_pairs*.py."""
    calls, set_gradient_sync = itertools.count(1), parallel.set_gradient_sync

    def signalled(*args, is_last):
        if next(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
        set_gradient_sync(*args, is_last)

    monkeypatch.setattr(parallel, "set_gradient_sync", signalled)
    out = run("qrpo", tmp_path / "run")
    assert steps(out) == [2]
    assert equal(run("qrpo", out), whole("qrpo"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][1]])
def test_two_ranks_have_the_losses_of_one(whole, run, tmp_path, kind):
    flag, *more = KINDS[kind][1].split()
    two = run(kind, tmp_path / "two", *more, parallel=flag)
    assert losses(two) == pytest.approx(losses(whole(kind)), rel=2e-5, abs=2e-5)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("distilled", "guided"))) for kind in KINDS]
)
def test_from_one_rank_to_two_and_back(whole, run, tmp_path, kind):
    flag, *exact = KINDS[kind][2].split()
    want = whole(kind, *exact)
    two = run(kind, killed(want, tmp_path / "two", [0]), *exact, parallel=flag)
    one = run(kind, killed(two, tmp_path / "one", [1, -2]), *exact)
    assert losses(one) == (losses(want) if exact else pytest.approx(losses(want), rel=2e-5, abs=2e-5))
    assert not exact or same(weights(want), weights(one))
    if kind == "adapted":
        # The adapter that sharded ranks have saved for PEFT.
        assert same(weights(two), weights(two / "adapter"))
