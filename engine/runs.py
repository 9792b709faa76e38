"""
The run folder of train.py, posttrain/sft.py and posttrain/qrpo.py: who may write there, and how a run resumes.

    config.json    all settings, the model's shape and the vocabulary: what sample.py and convert.py need
    log.jsonl      one line per step; a resumed run first removes the lines of steps that it repeats
    ckpt/          the checkpoints (engine/checkpoint.py)
    .lock          held by the process that writes here; the kernel frees it when that process ends, however it ends
    stop           `touch` it, and all ranks leave the current step, save, and exit
    profile        `touch` it, and the next step is traced: trace.json, for chrome://tracing
    cooldown       `touch` it, and train.py begins the decay of its learning rate after the current step
"""

import contextlib
import glob
import json
import os
import shutil
import time

from engine import files
from engine.files import make_folder, read_json, write_flushed


def settings_of(folder):
    """The settings of a run folder, from its config.json."""
    config = read_json(f"{folder}/config.json")
    return config.get("nanoapertus", config)


def claim(out, resume, ranks):
    """
    The lock of the run folder, as a context; only the first rank takes it. Nothing else is written yet.

    ValueError: another run writes there, or the folder holds a run and resume is off, or files of another kind.
    """
    if not ranks.is_main:
        return contextlib.nullcontext()
    found = set(os.listdir(out)) if os.path.isdir(out) else set()
    if "meta.json" in found or found - {"stop", "cooldown", "profile"} and ".lock" not in found:
        raise ValueError(f"{out} holds files that are not of a run ({min(found)}): name another folder with --out")
    if not found & {"log.jsonl", "ckpt"}:
        # The file `cooldown` was meant for an earlier run.
        forget(out, "cooldown")
    elif not resume:
        raise ValueError(f"{out} already holds a run: --resume continues it, --out=ANOTHER starts a new one")
    return lock(out)


def lock(out):
    """
    Make the run folder and lock it for this process. Closing the returned file unlocks it.

    OSError: the folder cannot be written; ValueError: another process has locked it.
    """
    make_folder(out)
    file = files.lock(f"{out}/.lock", f"stop it (touch {out}/stop) or name another --out")
    for killed_save in glob.glob("ckpt/step-[0-9]*.tmp", root_dir=out):
        shutil.rmtree(f"{out}/{killed_save}", ignore_errors=True)
    return file


def entry_of(line):
    """The entry of a line of log.jsonl; None if a kill or a full disk has torn it."""
    try:
        entry = json.loads(line)
        return entry if line.endswith("\n") and type(entry["step"]) is int else None
    except Exception:                                      # of any kind, as damage has
        return None


def open_log(out, start, ranks, validate=False):
    """
    The function that appends an entry to log.jsonl: log(step=..., **values). On other ranks it does nothing.

    Lines of steps from `start` on, which will be repeated, and torn ones are removed first; with validate also the last
    validation before `start`.
    """
    if not ranks.is_main:
        return lambda **entry: None
    path = f"{out}/log.jsonl"
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            kept = [line for line in f
                    if (entry := entry_of(line)) and entry["step"] < start - (validate and "loss" not in entry)]
        write_flushed(path, "".join(kept))
    file = open(path, "a", encoding="utf-8", buffering=1)

    def log(**entry):
        file.write(json.dumps(entry) + "\n")
    return log


def asked(out, run, name):
    """
    Whether this rank is asked to stop, or for the cooldown (`name`): by a signal, which is in the list run.stop or
    run.cooldown, or on the first rank by a file of that name in the run folder.
    """
    return bool(getattr(run, name)) or run.ranks.is_main and os.path.exists(f"{out}/{name}")


def forget(out, *names):
    """Remove the files `stop`, `cooldown` or `profile`: the next start must not obey them again."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{out}/{name}")


class Clock:
    """The seconds of a run, those of earlier processes included, and how many samples fit into its minutes."""

    def __init__(self, minutes, spent):
        self.limit = 60 * minutes
        self.began = time.perf_counter() - spent
        self.marks = []

    def seconds(self):
        return time.perf_counter() - self.began

    def foresee(self, samples):
        """
        How many samples the run will have seen when its minutes are over, at the pace of this process; inf if that is
        not known yet. Call it once in each step, before which the run has seen `samples`.
        """
        now = self.seconds()
        # The first step compiles. The pace, evaluations and saves included, counts from the second on.
        if len(self.marks) < 2:
            self.marks.append((now, samples))
        then, before = self.marks[-1]
        left = max(0, self.limit - now)
        if samples == before:
            return float("inf") if left else samples
        return samples + left * (samples - before) / (now - then)
