"""
What checkpoints cost a run, and how long a restart takes.

    cost of a save = time of ten steps with a save - time of the ten steps after them
    overhead       = cost / (checkpoint_every * time of a step)

One save in the laptop run's 390 steps drowns in the noise of a machine. So here there is one in 20, and each is
compared with the steps that follow it: on the wall clock, and in CPU seconds of all threads. The overhead follows for
the config's own checkpoint_every.

$ python tests/faults/overhead.py                    # with the data of `python prepare.py`; 2 minutes
"""
import os
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
    """
    (wall clock, CPU seconds, seconds in Saver.save) at each of 20 * saves steps and some more.

    train.py runs as a user runs it, with a clock.
    """
    times = os.path.abspath(os.path.join(work, "times"))
    samples = 4 * (20 * saves + 40)
    args = [config, f"--data={data}", f"--out={run}", f"--total_samples={samples}"]
    args += "--warmup_samples=8 --decay_samples=8".split()
    args += "--eval_every=100000 --sample_every=0 --checkpoint_every=20".split()
    codes, text = launch(0, *args, fault=f"clock:{times}", logs=run + ".log", limit=900)
    if codes != [0]:
        raise ValueError(f"the run failed: {text[-2000:]}")
    with open(times) as f:
        return [[float(x) for x in line.split()] for line in f]


def restart(run):
    """Seconds from the start of a process to (the end of its first step, its checkpoint verified and loaded or 0)."""
    step_before = max(losses(run), default=-1)
    path = os.path.join(work, "restart.log")
    command = [sys.executable, "train.py", config, f"--data={data}", f"--out={run}", "--resume"]
    env = dict(os.environ, PYTHONUNBUFFERED="1")
    loaded = 0.0
    began = time.perf_counter()
    with open(path, "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=env)
        while max(losses(run), default=-1) <= step_before and process.poll() is None:
            if not loaded and "resumed from" in text_of(path):
                loaded = time.perf_counter() - began
            time.sleep(0.01)
        first_step = time.perf_counter() - began
        process.kill()
        process.wait()
    return first_step, loaded


def text_of(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def print_cost(kind, clock):
    """What a save costs by one clock (its readings at each step), and the overhead of a save every `every` steps."""
    costs, steps = [], []
    # Step 39 is the second to be followed by a save: by then all is compiled.
    for i in range(39, 20 * saves + 20, 20):
        with_save = clock[i + 10] - clock[i]
        without = clock[i + 20] - clock[i + 10]
        costs.append(with_save - without)
        steps.append(without / 10)
    step = statistics.median(steps)
    cost = statistics.median(costs)
    error = statistics.stdev(costs) / len(costs) ** 0.5
    between = every * step
    print(
        f"{kind:5} a step {step * 1e3:.1f} ms, a save {cost * 1e3:.0f} +- {error * 1e3:.0f} ms "
        f"(median of {len(costs)}, standard error); "
        f"every {every} steps: {cost / between:.3%} +- {error / between:.3%}"
    )


def main():
    shutil.rmtree(work, ignore_errors=True)
    os.makedirs(work)
    run = os.path.join(work, "run")
    with Launcher() as launch:
        wall, cpu, in_save = zip(*timed(launch, run))
    print_cost("wall", wall)
    print_cost("CPU", cpu)
    waits = [after - before for before, after in zip(in_save[39:], in_save[40:]) if after > before]
    print(f"of which the loop waits for the copy: {statistics.median(waits) * 1e3:.1f} ms")
    checkpoints = os.path.join(run, "ckpt")
    newest = os.path.join(checkpoints, max(os.listdir(checkpoints)))
    size = sum(entry.stat().st_size for entry in os.scandir(newest))
    print(f"a checkpoint: {size / 1e6:.1f} MB")
    fresh = os.path.join(work, "fresh")
    start, _ = restart(fresh)
    print(f"start to the end of the first step: {start:.1f} s")
    again, loaded = restart(run)
    until_loaded = f"{loaded:.1f} s until the checkpoint is verified and loaded"
    print(f"restart to the end of its first step: {again:.1f} s, of which {until_loaded}")
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
