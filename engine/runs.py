"""
The run folder of train.py, posttrain/sft.py and posttrain/qrpo.py: who may write there, how a run goes on.

    config.json    all settings, the model's shape and the vocabulary: what sample.py and convert.py need
    log.jsonl      one line per step; lines of steps that will be repeated after a kill are cut off
    old.json       with --old: what the start model knew of old text (posttrain/forgetting.py)
    ckpt/          the checkpoints (engine/checkpoint.py)
    .lock          held by the process that writes here; the kernel releases it when that process ends, however it ends
    stop           `touch` it, and all ranks save after the step that they are in, and leave
    cooldown       `touch` it, and train.py begins the decay of its learning rate after the step that it is in
"""

import contextlib
import json
import math
import os
import shutil
import time

from engine import checkpoint, plot


def claim(out, resume, ranks):
    """
    The lock of the run folder, as a context; only the first rank takes it. Nothing else is written yet.

    ValueError: another run is writing there, or the folder holds a run that is not to be resumed.
    """
    if not ranks.first:
        return contextlib.nullcontext()
    holds_run = os.path.exists(f"{out}/ckpt") or plot.has_log(out)
    if not holds_run:
        # Whoever touched it meant another run.
        forget(out, "cooldown")
    elif not resume:
        raise ValueError(f"{out} already holds a run: --resume goes on with it, --out=ANOTHER starts one beside it")
    return checkpoint.claim(out)


def refuse_another(path, before, now):
    """ValueError naming the differences, if the checkpoint at `path` was made with other settings: {name: value}."""
    changed = []
    for name, value in now.items():
        old = before.get(name)
        # As JSON, in which a checkpoint keeps its settings: a tuple has become a list there.
        if json.dumps(old) != json.dumps(value):
            changed.append(f"{name} {old!r} -> {value!r}")
    if changed:
        raise ValueError(f"{path} is of another run: {'; '.join(changed)}. Take its settings, or another --out")


def open_log(out, start, ranks, validate=False):
    """
    The function that appends an entry to log.jsonl: log(step=..., **values). On other ranks than the first it
    does nothing.

    Steps from `start` on will be done again, so their lines go first; validate: so will the last validation
    before it.
    """
    if not ranks.first:
        return lambda **entry: None
    path = f"{out}/log.jsonl"
    cut_log(path, start, validate)
    file = open(path, "a", encoding="utf-8")

    def log(**entry):
        file.write(json.dumps(entry) + "\n")
        file.flush()
    return log


def cut_log(path, start, validate=False):
    """Drop the lines of steps >= start, and lines that a kill or a full disk has torn: every step then has one line."""
    if not os.path.exists(path):
        return

    def kept():
        with open(path, encoding="utf-8", errors="replace") as f:
            for line in f:
                entry = plot.entry_of(line)
                again = start - 1 if validate and entry and "val_loss" in entry else start
                if entry and entry["step"] < again:
                    yield line

    checkpoint.write_flushed(path, kept())


def asked_to_stop(out, stop, ranks):
    """
    Whether a signal has come (`stop` is no longer empty) or, on the first rank, the folder has a file named
    `stop`.
    """
    return bool(stop) or ranks.first and os.path.exists(f"{out}/stop")


def forget(out, *names):
    """Remove the files named `stop` or `cooldown`: what was done must not be done by the next start as well."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{out}/{name}")


def set_aside(out, step):
    """
    Rename the checkpoints after `step` to ckpt/decayed-N, with the log and the summary so far in the last of them.

    A run that goes on from there will write other ones; nothing is deleted, and nothing else reads that name.
    """
    later = [s for s in checkpoint.steps_in(f"{out}/ckpt") if s > step]
    for s in later:
        aside = f"{out}/ckpt/decayed-{s:08d}"
        os.rename(f"{out}/ckpt/step-{s:08d}", aside)
    if later and plot.has_log(out):
        shutil.copy(f"{out}/log.jsonl", aside)
    if later and os.path.exists(f"{out}/summary.json"):
        os.replace(f"{out}/summary.json", f"{aside}/summary.json")


class Clock:
    """The time of a run, in earlier processes too, and how far it will come in a number of minutes."""

    def __init__(self, minutes, spent):
        self.limit = 60 * minutes
        self.began = time.perf_counter() - spent
        self.marks = []

    def seconds(self):
        return time.perf_counter() - self.began

    def foresee(self, samples):
        """
        How many samples the run will have seen when its minutes are over, at the pace of this process; inf if that is
        not known yet. To be called once in each step, before which it has seen `samples`.
        """
        now = self.seconds()
        # The first step compiles. The pace, evaluations and saves included, counts from the second on.
        if len(self.marks) < 2:
            self.marks.append((now, samples))
        then, before = self.marks[-1]
        left = max(0, self.limit - now)
        if samples == before:
            return math.inf if left else samples
        return samples + left * (samples - before) / (now - then)
