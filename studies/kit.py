"""
What the studies share: scripts run as processes, rows of JSON, differences by seed, means with intervals, tables.

A study trains one model for each arm and seed, in a folder whose name is a hash of everything that was asked of the
run. So the same command skips the runs that are finished and goes on with those that were broken off, and a run is
never taken for one of other settings.
"""

import hashlib
import json
import os
import queue
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from tqdm import tqdm

from engine import plot
from engine.checkpoint import write_flushed
from engine.intervals import half_interval
from tokenizer import read_json


# -----------------------------------------------------------------------------
# runs


def digest(asked):
    """Ten hexadecimal digits that stand for what was asked of a run: anything that JSON can hold."""
    text = json.dumps(asked, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def run_script(script, args, log, threads=None, device=None):
    """
    Run `python -m script args...` in a process of its own. Returns its exit code and the last line that it printed.

    log: the file that its output goes to. threads: of the CPU; None = $OMP_NUM_THREADS, or one, because several runs
    share the machine. device: name of the only GPU that it may see; None = it sees all.
    """
    os.makedirs(os.path.dirname(log), exist_ok=True)
    threads = threads or os.environ.get("OMP_NUM_THREADS", 1)
    env = dict(os.environ, OMP_NUM_THREADS=str(threads))
    if device is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(device)
    command = [sys.executable, "-m", script, *args]
    with open(log, "w", encoding="utf-8") as f:
        code = subprocess.run(command, stdout=f, stderr=f, env=env).returncode
    with open(log, encoding="utf-8", errors="replace") as f:
        lines = f.read().strip().splitlines()
    return code, lines[-1] if lines else "it said nothing"


def command(script, args):
    """What a user would type."""
    how = ["-m", script] if "." in script else [f"{script}.py"]
    return shlex.join(["python", *how, *args])


def call(folder, name, done, script, *args, threads=1):
    """
    Run one of the scripts, unless the file `done`, the last that it writes, says that it has been run.

    What it prints goes to NAME.txt in the folder; its arguments and seconds to NAME.json, which is returned, or {} if
    it was not run from here. ValueError with its last line if it fails, or if it was run with other arguments.
    """
    log, record = f"{folder}/{name}.txt", f"{folder}/{name}.json"
    if not os.path.exists(done):
        began = time.perf_counter()
        code, last = run_script(script, args, log, threads)
        if code:
            raise ValueError(f"{command(script, args)} failed: {last} ({log})")
        wall = round(time.perf_counter() - began)
        write(record, json.dumps(dict(args=args, wall=wall)))
    if not os.path.exists(record):
        return {}
    found = read_json(record)
    if found["args"] != list(args):
        raise ValueError(f"{os.path.dirname(done)} was made with other settings ({record}): "
                         "delete it, or name another --out")
    return found


def finished(folder):
    """
    Has train.py ended in this folder? summary.json is the last that it writes.

    A full disk may have torn that or config.json: then it has not, since --resume writes them again.
    """
    try:
        read_json(f"{folder}/config.json")
        return "val_bpb" in read_json(f"{folder}/summary.json")
    except (OSError, ValueError):
        return False


def train(folder, args, device=None):
    """
    Run train.py into a folder, from the last checkpoint there if any, unless it is finished.

    args: its config files and flags. What it prints goes to FOLDER.txt, because train.py refuses a folder that holds
    other files than a run's. ValueError with its own last line if it fails.
    """
    if finished(folder):
        return
    log = f"{folder}.txt"
    code, last = run_script("train", [*args, f"--out={folder}", "--resume"], log, device=device)
    if code:
        raise ValueError(f"train.py {' '.join(args)} ended with code {code}: {last}. "
                         "The same command tries again where it stopped")


def completed(path, names, trained):
    """
    The rows of the file at `path`, after the runs that it lacks: trained(name) -> row, in this process. Each row is
    written when its run has ended. ValueError if there is no row, and no run to make one.
    """
    rows = read_rows(path) if os.path.exists(path) else []
    done = {row["name"] for row in rows}
    missing = [name for name in names if name not in done]
    if missing:
        torch.set_num_threads(1)        # the bits of a run must not depend on the number of cores
    for name in tqdm(missing, unit="run", disable=None):
        rows.append(trained(name))
        write_rows(path, rows)
    if not rows:
        raise ValueError(f"{path} has no rows, and no run is asked for: want --seeds=1 or more")
    return rows


def flags(settings):
    """{setting: value} as arguments of a script."""
    return [f"--{name}={value}" for name, value in settings.items()]


def in_parallel(at_a_time, work, *columns):
    """
    map(work, *columns) in threads: yields the results in order. work gets one more argument, its device.

    At most at_a_time run at once; 0 = one for each GPU, or for each CPU core where there is no GPU. device: the name
    of a GPU that is free, or None. An error or Ctrl-C ends it: what has not begun is cancelled. ValueError for less
    than 0.
    """
    if at_a_time < 0:
        raise ValueError(f"jobs={at_a_time}: want how many runs at a time, 0 for one on each GPU or core")
    return results_of(at_a_time, work, columns)


def results_of(at_a_time, work, columns):
    """What in_parallel yields; a function of its own, so that the error comes before any bar is drawn."""
    # Of the GPUs that this process may see, as whoever started it has named them.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    gpus = visible.split(",")[:count] if visible else range(count)
    at_a_time = at_a_time or count or os.cpu_count()
    free = queue.SimpleQueue()
    for i in range(at_a_time):
        free.put(gpus[i % count] if count else None)

    def on_free_device(*args):
        device = free.get()
        try:
            return work(*args, device)
        finally:
            free.put(device)

    with ThreadPoolExecutor(at_a_time) as pool:
        yield from pool.map(on_free_device, *columns)


# -----------------------------------------------------------------------------
# what the runs say


def write(path, text):
    """Write a file whole or not at all, and the folders above it. text: a string, or an iterable of lines."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    write_flushed(path, "".join(text))


def write_rows(path, rows):
    """Dicts -> a file with one line of JSON for each."""
    write(path, (json.dumps(row) + "\n" for row in rows))


def read_rows(path):
    """The dicts of a file with one line of JSON for each."""
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.strip()]


def rows_to_report(path, script):
    """The rows of a study that was run earlier. ValueError if there are none."""
    rows = read_rows(path) if os.path.isfile(path) else []
    if not rows:
        raise ValueError(f"no {path}, or nothing in it: run {script} first, without --report")
    return rows


def differences(ours, theirs, value):
    """
    What our rows have above theirs, one number for each seed that both have. value: row -> number.

    What a seed does to both sides cancels: its data, their order and, where shapes agree, the initial weights.
    """
    base = {row["seed"]: value(row) for row in theirs}
    return [value(row) - base[row["seed"]] for row in ours if row["seed"] in base]


def plus_minus(values, spread, spec):
    """Mean ± spread(values) as text in the format spec; of one value the value alone, of none nothing."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{spec}}"
    return mean if len(values) == 1 else f"{mean} ± {spread(values):{spec}}"


def interval(values, digits=2):
    """Mean ± half of its 95 % interval by Student's t, as text."""
    return plus_minus(values, half_interval, f".{digits}f")


def table(head, rows):
    """A Markdown table as lines: its head "| a | b |", a rule, and the rows, which look like the head."""
    return [head, "|---" * (head.count("|") - 1) + "|", *rows]


# -----------------------------------------------------------------------------
# plots


def plot_intervals(path, arms, xlabel, zero=None):
    """
    Write a PNG with a row for each arm: its values as dots, and their mean with its 95 % interval by Student's t.

    arms: {label: values}, the first on top; one value has no interval. zero: where to draw a vertical line, or None.
    """
    figure, axis = plot.pyplot().subplots(figsize=(7, 1 + 0.4 * len(arms)))
    for y, values in enumerate(arms.values()):
        axis.plot(values, [y] * len(values), ".", color="0.6")
        axis.errorbar(statistics.fmean(values), y, xerr=half_interval(values), fmt="o", color="C3", capsize=4)
    axis.set_yticks(range(len(arms)), arms)
    axis.set_ylim(len(arms) - 0.5, -0.5)
    if zero is not None:
        axis.axvline(zero, color="0.5", linewidth=1)
    axis.set_xlabel(xlabel)
    plot.finish(figure, path)


def plot_curves(path, curves, xlabel, ylabel, log_x=False):
    """
    Write a PNG with a line for each arm, the mean over its seeds, and a band from their least to their largest value.

    curves: {label: (x, rows of y)}, with one row for each seed, as long as x. log_x: a logarithmic x-axis.
    """
    figure, axis = plot.pyplot().subplots(figsize=(7, 4))
    for label, (x, rows) in curves.items():
        y = np.array(rows)
        axis.plot(x, y.mean(0), label=label)
        axis.fill_between(x, y.min(0), y.max(0), alpha=0.2)
    axis.set_xscale("log" if log_x else "linear")
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.grid(alpha=0.2)
    axis.legend()
    plot.finish(figure, path)
