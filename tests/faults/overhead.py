"""
What checkpoints cost a run, and how long a restart takes.

    cost of a save = time of ten steps with a save - time of the ten steps after them
    overhead       = cost / (checkpoint_every * time of a step)

One save in the laptop run's 390 steps drowns in the noise of a machine, so here there is one in 20, and each is compared with the steps that
follow it: on the wall clock, and in CPU seconds of all threads. The overhead follows for the config's own checkpoint_every.

$ python tests/faults/overhead.py                    # with the data of `python prepare.py`; 2 minutes
"""
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(os.path.dirname(HERE)), os.path.dirname(HERE)]

from faults.launch import ROOT, Launcher, losses  # noqa: E402

config = "configs/laptop.py"
data = "data/stdlib"
saves = 20           # one every 20 steps
every = 390          # steps between saves of the real run: configs/laptop.py
work = "out/overhead"


def timed(launch, run):
    """(wall clock, CPU seconds, seconds in Saver.save) at each of 20 * saves steps and some more: train.py as a user runs it, with a clock."""
    times = os.path.abspath(os.path.join(work, "times"))
    codes, text = launch(0, config, f"--data={data}", f"--out={run}", f"--total_samples={4 * (20 * saves + 40)}", "--warmup_samples=8",
                         "--decay_samples=8", "--eval_every=100000", "--sample_every=0", "--checkpoint_every=20", fault=f"clock:{times}",
                         logs=run + ".log", limit=900)
    if codes != [0]:
        raise ValueError(f"the run failed: {text[-2000:]}")
    with open(times) as f:
        return [[float(x) for x in line.split()] for line in f]


def restart(run):
    """Seconds from the start of a process to the end of its first step, and to the checkpoint being verified and loaded, if there is one."""
    before, began, loaded, log = max(losses(run), default=-1), time.perf_counter(), 0.0, os.path.join(work, "restart.log")
    with open(log, "w") as out:
        process = subprocess.Popen([sys.executable, "train.py", config, f"--data={data}", f"--out={run}", "--resume"], cwd=ROOT, stdout=out, stderr=out,
                                   env=dict(os.environ, PYTHONUNBUFFERED="1"))
        while max(losses(run), default=-1) <= before and process.poll() is None:
            if not loaded and re.search("resumed from", open(log, encoding="utf-8").read()):
                loaded = time.perf_counter() - began
            time.sleep(0.01)
        first = time.perf_counter() - began
        process.kill()
        process.wait()
    return first, loaded


def main():
    shutil.rmtree(work, ignore_errors=True)
    os.makedirs(work)
    run = os.path.join(work, "run")
    with Launcher() as launch:
        at = timed(launch, run)
    for what, k in (("wall", 0), ("CPU", 1)):
        costs, steps = [], []
        for i in range(39, 20 * saves + 20, 20):                             # step 39 is the second to be followed by a save: all is compiled
            costs.append((at[i + 10][k] - at[i][k]) - (at[i + 20][k] - at[i + 10][k]))
            steps.append((at[i + 20][k] - at[i + 10][k]) / 10)
        cost, step, error = statistics.median(costs), statistics.median(steps), statistics.stdev(costs) / len(costs) ** 0.5
        print(f"{what:5} a step {step * 1e3:.1f} ms, a save {cost * 1e3:.0f} +- {error * 1e3:.0f} ms (median of {len(costs)}, standard error); "
              f"every {every} steps: {cost / (every * step):.3%} +- {error / (every * step):.3%}")
    waits = [b[2] - a[2] for a, b in zip(at[39:], at[40:]) if b[2] > a[2]]
    print(f"of which the loop waits for the copy: {statistics.median(waits) * 1e3:.1f} ms")
    newest = os.path.join(run, "ckpt", sorted(os.listdir(os.path.join(run, "ckpt")))[-1])
    print(f"a checkpoint: {sum(os.path.getsize(os.path.join(newest, f)) for f in os.listdir(newest)) / 1e6:.1f} MB")
    print("start to the end of the first step: {:.1f} s".format(restart(os.path.join(work, "fresh"))[0]))
    print("restart to the end of its first step: {:.1f} s, of which {:.1f} s until the checkpoint is verified and loaded".format(*restart(run)))
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
