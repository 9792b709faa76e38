"""
Faults injected into runs. After each one the final weights must be those of an undisturbed run.

$ make faults                                          # all of it, and 500 kills more than the record has
$ python tests/faults/suite.py --kills=20              # fewer, and nothing is recorded
$ python -m pytest tests/faults                        # the short form, also in `make test`

Every fault is a function of the laboratory and of how often to try; its docstring is its row of the table, fault and
outcome. It raises AssertionError where a promise is broken, and returns how often it has tried. All runs are exact
(fp64 sums), so "the same" is one sha256 of all weights, on any number of processes.
"""
import functools
import glob
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(os.path.dirname(HERE)), os.path.dirname(HERE)]

import trained  # noqa: E402
from faults.launch import Launcher, losses, sha_of  # noqa: E402

kills = 500          # kill -9
record = ""          # a folder: keep the results there (faults.json), and write its table.md; "" = print them only

class Lab:
    """A folder, a corpus, a launcher, and an undisturbed run."""

    def __init__(self, launch, folder):
        self.launch, self.folder = launch, str(folder)
        self.data = trained.corpus(self.fresh("text"))

    def fresh(self, name):
        """A free path in the laboratory's folder."""
        path = os.path.join(self.folder, name)
        shutil.rmtree(path, ignore_errors=True)
        return path

    def start(self, run, ranks, *more, fault=""):
        """A Trial that resumes a run on these ranks; ranks = 0: plain `python train.py`."""
        args = [*trained.RUN, "--exact", "--micro_batch=2", f"--data={self.data}", f"--out={run}", "--resume", *more]
        if ranks:
            args.append("--parallel=fsdp")
        return self.launch.start(ranks, *args, fault=fault and f"faults.suite.{fault}", logs=run + ".log")

    @functools.cached_property
    def whole(self):
        """(sha256 and step, {step: loss}) of the undisturbed run, on one process."""
        run = self.fresh("whole")
        said(self.start(run, 0))
        return sha_of(run), losses(run)

    def stopped(self):
        """A copy of that run, as if it had been killed after step 10."""
        assert self.whole
        run = trained.killed_after(f"{self.folder}/whole", self.fresh("stopped"), 10)
        log = Path(run, "log.jsonl")
        log.write_text("".join(log.read_text().splitlines(True)[:10]))
        return run

    def must_end_well(self, run, ranks):
        """Resume a run, without a fault: it ends with the weights and the losses of the whole run."""
        text = said(self.start(run, ranks))
        assert (sha_of(run), losses(run)) == self.whole
        return text


def said(trial, code=0):
    """The output of a run, which ends with this exit code on all ranks."""
    codes, text = trial.wait(), trial.text()
    assert set(codes) == {code} and "Traceback" not in text, (codes, text[-3000:])
    return text


def kill(lab, times, worlds=(1, 2, 4)):
    """kill -9 of one or all ranks at any moment, launches on 1, 2 or 4 | identical weights"""
    killed = 0
    while killed < times:
        run, seen, ended = lab.fresh("kill"), {}, False
        while not ended:
            trial = lab.start(run, random.choice(worlds))
            moment, in_save = time.monotonic() + 4 * random.random(), random.random() < 0.4
            while killed < times and None in trial.codes() and time.monotonic() < moment:
                if in_save and glob.glob(run + "/ckpt/*.tmp"):
                    break
                time.sleep(0.003)
            if killed < times:
                trial.kill(random.choice([trial.pids, trial.pids[-1:]]))
            codes = trial.wait(grace=1)
            killed += -9 in codes
            for step, loss in losses(run).items():
                assert seen.setdefault(step, loss) == loss, "a step had two losses"
            # A run that was killed in its last moments is finished already.
            ended = not any(codes) or "is finished" in trial.text()
            assert ended or -9 in codes, (codes, trial.text()[-3000:])
        assert (sha_of(run), seen) == lab.whole
    return killed


def flip_bits(lab, times):
    """one bit flipped, in any file of a checkpoint | all found; the one before is used"""
    from engine import restore

    run = lab.stopped()
    newest = Path(run, "ckpt", "step-00000010")
    for _ in range(times):
        restore.verified(newest)
        path = random.choice([*newest.iterdir()])
        before = path.read_bytes()
        after, bit = bytearray(before), random.randrange(8 * len(before))
        after[bit // 8] ^= 1 << bit % 8
        path.write_bytes(after)
        with pytest.raises(OSError):
            restore.verified(newest)
        path.write_bytes(before)
    path.write_bytes(after)                                # the last one stays
    text = lab.must_end_well(run, 2)
    assert "passed over" in text and f"resumed from {run}/ckpt/step-00000005" in text
    return times


def small_disk():
    """In a save no file may grow beyond 20 kB: the write fails, as on a full disk (EFBIG for ENOSPC)."""
    import resource

    from engine import checkpoint
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    write, limits = checkpoint.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoint.write = limited


def disk_full(lab, times):
    """disk full in a save | training continues, stops after k failures; the old checkpoint serves"""
    run = lab.stopped()
    before = trained.contents(run + "/ckpt")
    text = said(lab.start(run, 2, "--save_failures=2", "--checkpoint_every=3", fault="small_disk"), 2)
    assert "training continues" in text and "failed 2 times in a row" in text
    # The save after step 12 fails and training continues; that after 15 fails too, which the next one notices.
    assert trained.contents(run + "/ckpt") == before and max(losses(run)) == 17
    lab.must_end_well(run, 2)
    return 2


def no_number(value):
    """The gradient norm of the last rank is `value` in its fifth step."""
    each_step(lambda step: float(value) if step == 4 and os.environ["RANK"] == "1" else 1)


def slow(seconds):
    """Every step takes longer."""
    each_step(lambda step: time.sleep(float(seconds)) or 1)


def each_step(factor):
    """Call factor(0), factor(1), ... in the steps of a run, and multiply this rank's squared gradient norm by it."""
    from engine import parallel

    true, count = parallel.square_norm, itertools.count()
    parallel.square_norm = lambda *args: true(*args) * factor(next(count))


def not_a_number(lab, times, values=("nan", "inf")):
    """NaN or Inf on one rank | all stop before the update, or skip the step together"""
    for value in values:
        run = lab.stopped()
        assert "Stopped before the update" in said(lab.start(run, 2, fault=f"no_number:{value}"), 2)
        assert max(losses(run)) == 13
        lab.must_end_well(run, 2)
    run = lab.stopped()
    said(lab.start(run, 2, "--skip_nonfinite=1", fault="no_number:nan"))
    assert [step for step, loss in losses(run).items() if loss is None] == [14]
    return len(values) + 1


def asked(lab, ranks, number, *more):
    """A run and its Trial, which was asked after step 11: by a signal to the last rank, or by a file `stop`."""
    run = lab.stopped()
    trial = lab.start(run, ranks, *more, fault="slow:0.1")
    while max(losses(run)) < 11 and None in trial.codes():
        time.sleep(0.01)
    if number:
        trial.kill(trial.pids[-1:], number)
    else:
        Path(run, "stop").touch()
    return run, trial


def signals(lab, times, worlds=(1, 2, 4), ways=(signal.SIGTERM, signal.SIGUSR2, None)):
    """SIGTERM, SIGUSR2, SIGUSR1 to one rank, or a stop file | all ranks obey after the same step"""
    for ranks in worlds:
        for how in ways:
            run, trial = asked(lab, ranks, how)
            assert "stopped as asked" in said(trial) and not os.path.exists(run + "/stop")
            assert sha_of(run)[1] == max(losses(run)) + 1 <= 16
            lab.must_end_well(run, ranks)
        run, trial = asked(lab, ranks, signal.SIGUSR1, "--total_samples=400", "--decay_samples=100")
        assert "the decay begins" in said(trial) and 12 < max(losses(run)) < 30
    return (len(ways) + 1) * len(worlds)


def hang(lab, times):
    """a rank hangs (--timeout=3) | the other says so and ends; resumes to identical weights"""
    run, trial = asked(lab, 2, signal.SIGSTOP, "--timeout=3")
    end = time.monotonic() + 40
    while trial.codes()[0] is None and time.monotonic() < end:
        time.sleep(0.05)
    assert trial.codes()[0] == 1 and "lost another rank" in trial.text() and "Traceback" not in trial.text()
    trial.kill()
    trial.wait()
    lab.must_end_well(run, 2)
    return 1


FAULTS = {kill: None, flip_bits: 1000, disk_full: 1, not_a_number: 1, signals: 1, hang: 1}
HEAD = """# Faults injected into runs

`make faults`, all runs on the CPU with gloo in exact mode; "identical" is one sha256 of all weights.

| fault | times | steps lost | outcome |
|---|---:|---:|---|
"""


def table(found):
    """The table of a record, in Markdown."""
    rows = [row for fault in found.values() for row in fault["rows"]]
    lines = [f"| {' | '.join(map(str, row[:4]))} |\n" for row in rows]
    minutes = sum(fault["seconds"] for fault in found.values()) / 60
    return HEAD + "".join(lines) + f"\n{sum(row[1] for row in rows):,} faults in {minutes:.0f} minutes.\n"


def main():
    kept = Path(record, "faults.json")
    found = json.loads(kept.read_text()) if record and kept.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Launcher(), folder)
        for fault, times in FAULTS.items():
            name, began = fault.__name__, time.monotonic()
            done = fault(lab, times or kills)
            seconds = time.monotonic() - began
            if fault is kill and name in found:            # kills add up
                done += found[name]["rows"][0][1]
                seconds += found[name]["seconds"]
            says, outcome = fault.__doc__.split(" | ")
            found[name] = dict(rows=[[says, done, 0, outcome]], seconds=seconds)
            print(f"{seconds:6.0f} s   {name}: {outcome}", file=sys.stderr, flush=True)
    print(table(found))
    if record:
        os.makedirs(record, exist_ok=True)
        kept.write_text(json.dumps(found, indent=1))
        Path(record, "table.md").write_text(table(found))


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
