"""
Faults injected into runs. After each one the final weights must be those of an undisturbed run.

$ make faults                                          # all faults, with 500 kills
$ python tests/faults/suite.py --kills=20              # fewer kills, and no record
$ python -m pytest tests/faults                        # the short form, part of `make test`

A broken promise raises AssertionError. All runs use --exact (fp64 sums), so they are bit-exact on any number of
processes.
"""

import itertools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import trained  # noqa: E402
from conftest import same, weights  # noqa: E402
from faults.launch import Trial  # noqa: E402

from engine import checkpoint, parallel, restore  # noqa: E402

kills = 100  # how often runs are killed by SIGKILL
record = ""  # folder for the results (faults.json, table.md); "" = only print them

# The fault of the last rank of two, in step 12 or in all saves; exit codes; words of the output; flags.
DISTURBANCES = [
    ("full disk", "2", "(failed 3 times in a row", "--checkpoint_every=3"),
    ("nan", "2", "step 12: loss", ""),
    ("inf", "2", "Stopped before the update", ""),
    ("SIGTERM in the first micro-batch", "0", "stopped as asked after step 12, saved", ""),
    ("SIGTERM", "0", "stopped as asked after step 13, saved", ""),
    ("SIGUSR2", "0", "stopped as asked after step 13, saved", ""),
    ("SIGUSR1", "0", "the decay begins", "--total_samples=400 --decay_samples=100"),
    ("slow save", "0", "(failure 1 of 3; training continues", "--checkpoint_every=3 --timeout=20"),
    ("SIGSTOP", "1 -9", "lost another rank", "--timeout=3"),
]


class Lab:
    """A folder with a corpus and the undisturbed run of one process."""

    def __init__(self, folder):
        self.folder = folder
        self.data = trained.corpus(f"{folder}/text")
        self.whole = self.fresh()
        said(self.start(self.whole, 0))

    def fresh(self):
        """A path below the folder that does not exist yet."""
        return Path(tempfile.mkdtemp(dir=self.folder), "run")

    def start(self, run, ranks, *more, fault=bool):
        """A Trial that starts or resumes a run on these ranks; 0 ranks: plain `python train.py`."""
        flags = f"--exact --resume --micro_batch=2 --data={self.data} --out={run}".split()
        return Trial(ranks, *trained.RUN, *flags, *more, fault=fault, logs=f"{run}.log")

    def stopped(self):
        """A copy of the undisturbed run, as if it had been killed after step 10."""
        return trained.killed_after(self.whole, self.fresh(), 10)

    def must_end_well(self, run):
        """Resume a run without a fault, on 1, 2 or 4 ranks. Its weights must be the whole run's. Returns the output."""
        text = said(self.start(run, random.choice([1, 2, 4])))
        assert same(weights(run), weights(self.whole))
        return text


def said(trial, codes="0"):
    """The output of a run. Asserts that each rank ends with one of these exit codes."""
    found, text = trial.wait()
    assert set(map(str, found)) <= set(codes.split()) and "Traceback" not in text, (found, text[-3000:])
    return text


def kill(lab, times):
    """Kill one or all ranks, at any moment or during a save."""
    while times > 0:
        run = lab.fresh()
        for _ in range(3):
            trial = lab.start(run, random.choice([1, 2, 4]))
            moment = time.monotonic() + 4 * random.random()
            in_save = random.random() < 0.4
            while time.monotonic() < moment and not (in_save and any(run.glob("ckpt/*.tmp"))):
                time.sleep(0.003)
            for process in random.choice([trial.processes, trial.processes[-1:]]):
                process.kill()
            codes, _ = trial.wait(grace=1)
            times -= -9 in codes
        # A run may have finished just before it was killed.
        (run / "summary.json").unlink(missing_ok=True)
        lab.must_end_well(run)


def flip_bits(lab, times):
    """A flipped bit in any file of a checkpoint is noticed, and the checkpoint before it is used."""
    run = lab.stopped()
    newest = run / "ckpt" / "step-00000010"
    for _ in range(times):
        path = random.choice([*newest.iterdir()])
        before = path.read_bytes()
        after = bytearray(before)
        after[random.randrange(len(after))] ^= 1 << random.randrange(8)
        path.write_bytes(after)
        with pytest.raises(OSError):
            restore.verified(newest)
        path.write_bytes(before)
    path.write_bytes(after)  # the last flipped bit stays
    assert f"resumed from {run}/ckpt/step-00000005" in lab.must_end_well(run)


def disturbance(lab, how, codes, words, flags):
    """A run that meets one of DISTURBANCES prints its words; if it ended early, it resumes to the same weights."""
    run = lab.stopped()
    text = said(lab.start(run, 2, *flags.split(), fault=partial(disturb, how)), codes)
    assert words in text, text
    if not (run / "summary.json").exists():
        lab.must_end_well(run)


def disturb(how):
    if how == "full disk":
        # Only files of a checkpoint are larger than 20 kB. The error is EFBIG instead of ENOSPC.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        return
    if how == "slow save":
        parallel.SAVE_WAITS = 0.1  # two seconds
    if os.environ["RANK"] == "0":
        return
    if how == "slow save":
        waits = iter([4])
        make_folder = checkpoint.make_folder
        checkpoint.make_folder = lambda path: (time.sleep(next(waits, 0)), make_folder(path))
        return
    fault, _, early = how.partition(" in ")
    # Each rank has two micro-batches, before which set_gradient_sync() is called, and square_norm() once a step.
    name, call = ("set_gradient_sync", 4) if early else ("square_norm", 2)
    true, calls = getattr(parallel, name), itertools.count()

    def disturbed(*args, **how):
        result = true(*args, **how)
        if next(calls) != call:
            return result
        if not fault.startswith("SIG"):
            return float(fault)
        signal.raise_signal(getattr(signal, fault))
        return result

    setattr(parallel, name, disturbed)


HEAD = """# Faults injected into runs

{:,} faults, and a run that one of them ends resumes to identical weights each time: no step is lost.

`make faults`, all runs on the CPU with gloo in exact mode; "identical" means that all weights are bit-exact.

| fault | times | steps lost | outcome |
|---|---:|---:|---|"""


def main():
    if record:
        Path(record).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(folder)
        kill(lab, kills)
        flip_bits(lab, 1000)
        for row in DISTURBANCES:
            disturbance(lab, *row)
    counts = {"kill -9 of one or all ranks, launches on 1, 2 or 4": kills, "one bit of any file": 1000}
    counts |= {f"{how} {flags}": 1 for how, _, _, flags in DISTURBANCES}
    rows = [(*count, 0, "a run that it ends resumes to identical weights") for count in counts.items()]
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    page = "\n".join([HEAD.format(sum(counts.values())), *lines, ""])
    print(page)
    if record:
        Path(record, "faults.json").write_text(json.dumps(dict(suite=dict(rows=rows)), indent=1))
        Path(record, "table.md").write_text(page)


if __name__ == "__main__":
    from configurator import run

    run(main, globals())
