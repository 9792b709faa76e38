"""engine/run.py with a loop of its own, as each script has one: a stop between two micro-batches, and the saves."""

import signal

import pytest
import torch
from conftest import same
from trained import steps

from ademamix import build_optimizer
from engine import restore, runs
from engine.parallel import Ranks
from engine.run import Run

END = 4
PARTS = torch.arange(42.0).view(3, 2, 7) / 42


def train(out, ask=lambda: None, at=None, resume=False):
    """
    Train a matrix for END steps of three micro-batches, and return its weights, {name: tensor}. ask() is called in the
    micro-batch `at`, (step, number).
    """
    torch.manual_seed(1)
    model = torch.nn.Linear(7, 5)
    optimizer = build_optimizer(model, "adamw", 0.1, (0.9, 0.99), 8.0, 0.1, 5, compile=False)
    settings = dict(
        out=str(out), resume=resume, checkpoint_every=0, checkpoint_minutes=0, keep_checkpoints=0, timeout=9
    )
    with Run(settings, Ranks(), "cpu") as run:
        checkpoint = restore.newest_intact(f"{out}/ckpt") if resume else None
        if checkpoint:
            restore.load_checkpoint(checkpoint[0], model, optimizer)
        run.begin(settings, END, checkpoint, flops_per_token=0)
        loop(run, model, optimizer, ask, at)
        assert run.close(model, optimizer) == (run.done == END)
    return dict(model.named_parameters())


def loop(run, model, optimizer, ask, at):
    while run.done < run.end:
        step = run.begin_step()
        loss = 0.0
        for i, part in enumerate(PARTS):
            if run.agree().stop:
                return
            run.show_micro_batch(i, len(PARTS))
            if (step, i) == at:
                ask()
            part_loss = model(part + step).square().sum()
            part_loss.backward()
            loss += part_loss.item()
        optimizer.step(lr=0.1)
        optimizer.zero_grad()
        run.log.step(step, loss, run.step_seconds(), 42)
        run.save_if_due(step + 1, model, optimizer)
        run.end_step()


def saved(out, step):
    """The weights of a checkpoint."""
    model = torch.nn.Linear(7, 5)
    restore.load_checkpoint(f"{out}/ckpt/step-{step:08d}", model)
    return dict(model.named_parameters())


@pytest.fixture
def ask(request, tmp_path):
    """Ask the process to stop: by a signal, or by a file in the run folder."""
    if request.param == "file":
        return (tmp_path / "run" / "stop").touch
    return lambda: signal.raise_signal(getattr(signal, request.param))


@pytest.mark.parametrize("ask", ["SIGTERM", "SIGUSR2", "file"], indirect=True)
def test_a_stop_between_two_micro_batches_saves_the_weights_before_the_step(tmp_path, ask):
    """They are those of a run that stops after step 2, in its last micro-batch. Resumed, both end bit-exact."""
    run, late, whole = tmp_path / "run", tmp_path / "late", train(tmp_path / "whole")
    train(run, ask, at=(2, 0))
    train(late, lambda: (late / "stop").touch(), at=(1, 2))
    assert steps(run) == steps(late) == [2]
    assert same(saved(run, 2), saved(late, 2)) and not same(saved(run, 2), whole)
    assert not (run / "stop").exists()
    assert same(train(run, resume=True), whole) and same(train(late, resume=True), whole)
    assert steps(run) == [2, END]


def test_until_the_loop_begins_a_signal_ends_the_process_at_once(tmp_path):
    """Sampling of references may take hours before it, and would not look at a caught one."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    settings = dict(out=f"{tmp_path}/run/", resume=False, keep_checkpoints=0, timeout=9)
    with Run(settings, Ranks(), "cpu") as run:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        run.begin(settings, END, None, flops_per_token=0)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL and run.out == f"{tmp_path}/run"


def test_ctrl_c_says_what_is_on_disk(tmp_path, capsys):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", lambda: signal.raise_signal(signal.SIGINT), at=(2, 0))
    assert "run: interrupted after 2 steps, 0 of them on disk; --resume continues\n" in capsys.readouterr().out


def test_a_stop_in_the_first_step_saves_nothing(tmp_path):
    train(tmp_path / "run", lambda: (tmp_path / "run" / "stop").touch(), at=(0, 1))
    assert steps(tmp_path / "run") == []
    assert same(train(tmp_path / "run", resume=True), train(tmp_path / "whole"))


def test_a_start_from_a_run_that_has_not_ended_is_said(tmp_path):
    (tmp_path / "run" / "ckpt").mkdir(parents=True)
    assert "has not ended" in runs.note_unfinished(tmp_path / "run")
    (tmp_path / "run" / "summary.json").touch()
    assert runs.note_unfinished(tmp_path / "run") == ""


def test_resuming_a_folder_without_a_checkpoint_is_said(tmp_path, capsys):
    """The user may have named another folder."""
    assert restore.find_same(str(tmp_path), {}, (), 5, None) is None
    assert capsys.readouterr().out == f"{tmp_path} has no checkpoint: a new run begins\n"
