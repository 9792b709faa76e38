"""
The common part of the studies: runs in parallel processes, rows of JSON, differences by seed, intervals, tables, plots.

A study is a question, a few arms, some seeds and a measure. It trains one model for each arm and seed, in a folder
whose name is a hash of the run's settings. So the same command skips finished runs and resumes stopped ones, and a run
is never mistaken for one with other settings. Each run ends in a row, a line of JSON; table and plot are made from the
committed rows alone.

    d_s = measure (arm, seed s) - measure (baseline, seed s),      mean d +- t(n - 1) sd d / sqrt(n)

Sources: engine/intervals.py; Holm, Scandinavian Journal of Statistics 6 (1979).
"""

import itertools
import json
import os
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
from engine.files import read_json, sha256_of, write_flushed
from engine.intervals import student

# -----------------------------------------------------------------------------
# runs


def digest(asked):
    """Ten hexadecimal digits that identify the settings of a run: anything that JSON can hold."""
    return sha256_of(asked)[:10]


def run_script(script, args, log, threads=None, device=None):
    """
    Run `python -m script args...` in a process of its own. Returns its exit code and the last line that it printed.

    log: the file for its output. threads: of the CPU; None = $OMP_NUM_THREADS, or one, because several runs share the
    machine. device: the only GPU that it may see; None = all.
    """
    write(log, "")
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    for name, value in dict(OMP_NUM_THREADS=threads, CUDA_VISIBLE_DEVICES=device).items():
        if value is not None:
            env[name] = str(value)
    with open(log, "r+", encoding="utf-8", errors="replace") as f:
        code = subprocess.run([sys.executable, "-m", script, *args], stdout=f, stderr=f, env=env).returncode
        f.seek(0)
        lines = f.read().split("\n")
    return code, next(filter(str.strip, reversed(lines)), "it printed nothing")


def command(script, args):
    """The command that a user would type."""
    how = ["-m", script] if "." in script else [f"{script}.py"]
    return shlex.join(["python", *how, *args])


def call(path, done, script, *args, threads=1, device=None):
    """
    Run one of the scripts, unless the file `done`, the last that it writes, exists.

    Its output goes to PATH.txt, its arguments and seconds to PATH.json. ValueError with its last line if it fails or is
    stopped, or if it was run with other arguments before.
    """
    log, record = f"{path}.txt", f"{path}.json"
    if not os.path.exists(done):
        began = time.perf_counter()
        code, last = run_script(script, args, log, threads, device)
        if code or not os.path.exists(done):
            raise ValueError(f"{command(script, args)} ended with code {code}: {last} ({log}). "
                             "Give the same command again to resume")
        write(record, json.dumps(dict(args=args, wall=round(time.perf_counter() - began))))
    if os.path.exists(record) and read_json(record)["args"] != list(args):
        raise ValueError(f"{os.path.dirname(done)} was made with other settings ({record}): "
                         "delete it, or name another --out")


def train(folder, args, device=None):
    """
    Run train.py into a folder by call(), from its last checkpoint if there is one. args: its config files and flags.

    The output goes to FOLDER.txt, because train.py rejects a folder that holds files of another kind.
    """
    flags = f"--out={folder}", "--resume"
    call(folder, f"{folder}/summary.json", "train", *args, *flags, threads=None, device=device)


def completed(path, names, trained):
    """
    The rows of the file at `path`, after the missing runs: trained(name) -> row, in this process. Each row is written
    when its run ends. ValueError if there is no row, and no run to make one.
    """
    rows = read_rows(path) if os.path.exists(path) else []
    done = [row["name"] for row in rows]
    torch.set_num_threads(1)        # the bits of a run must not depend on the number of cores
    for name in tqdm([name for name in names if name not in done], unit="run", disable=None):
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
    map(work, *columns) in threads: an iterator of the results, in order. work gets one more argument, its device.

    At most at_a_time run at once; 0 = one for each GPU, or for each CPU core where there is no GPU. device: the GPUs in
    turn, or None. After an error or Ctrl-C no further one starts. ValueError for less than 0.
    """
    if at_a_time < 0:
        raise ValueError(f"jobs={at_a_time}: want how many runs at a time, 0 for one on each GPU or core")
    count = torch.cuda.device_count()
    # Only the GPUs that the user leaves visible, by the names that the user gave them.
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices = itertools.cycle(names.split(",") if count else [None])
    return ThreadPoolExecutor(at_a_time or count or os.cpu_count()).map(work, *columns, devices)


# -----------------------------------------------------------------------------
# rows


def write(path, text):
    """Write a file, all or nothing, and make its folder. text: a string, or an iterable of lines."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    write_flushed(path, "".join(text))


def write_rows(path, rows):
    """Write dicts to a file, one line of JSON for each. ValueError, with the old file kept, without dicts."""
    if not rows:
        raise ValueError(f"{path}: no run is asked for: want --seeds=1 or more")
    write(path, (json.dumps(row) + "\n" for row in rows))


def read_rows(path):
    """The dicts of a file with one line of JSON for each."""
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.strip()]


def rows_to_report(path, script):
    """The rows of an earlier study. ValueError if it has not run."""
    rows = read_rows(path) if os.path.isfile(path) else []
    if not rows:
        raise ValueError(f"no {path}, or nothing in it: run {script} first, without --report")
    return rows


# -----------------------------------------------------------------------------
# statistics


def differences(ours, theirs, value):
    """
    Our rows minus theirs, one number for each seed that both have. value: row -> number.

    A seed's effect on both sides cancels: its data, their order and, where shapes agree, the initial weights.
    """
    base = {row["seed"]: row for row in theirs}
    return [value(row) - value(base[row["seed"]]) for row in ours if row["seed"] in base]


def holm(ps):
    """
    Adjust the p-values of several comparisons, so that the chance of any false one below alpha is at most alpha.

    The i-th smallest of n is multiplied by n - i + 1, and none may be smaller than the one before it (Holm 1979).
    """
    order = np.argsort(ps)
    times = np.arange(len(ps), 0, -1)
    adjusted = np.maximum.accumulate(np.sort(ps) * times).clip(max=1)
    return adjusted[np.argsort(order)].tolist()


def plus_minus(values, spread, spec):
    """Mean ± spread(values) as text in the format spec; one value stands alone, none is ""."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{spec}}"
    return mean if len(values) == 1 else f"{mean} ± {spread(values):{spec}}"


def interval(values, digits=2):
    """Mean ± half of its 95 % interval by Student's t, as text."""
    return plus_minus(values, lambda values: student(values)[1], f".{digits}f")


# -----------------------------------------------------------------------------
# tables and plots


def table(head, rows):
    """The lines of a Markdown table: its head "| a | b |", a rule, and the rows, which look like the head."""
    return [head, "|---" * (head.count("|") - 1) + "|", *rows]


def plot_intervals(path, arms, xlabel, zero=None):
    """
    Write a PNG with a row for each arm: its values as dots, and their mean with its 95 % interval by Student's t.

    arms: {label: values}, the first on top; one value has no interval. zero: where to draw a vertical line, or None.
    """
    figure, axis = plot.pyplot().subplots(figsize=(7, 1.2 + 0.4 * len(arms)))
    for label, values in arms.items():
        axis.plot(values, [label] * len(values), ".", color="0.6")
        axis.errorbar(statistics.fmean(values), label, xerr=student(values)[1], fmt="o", color="C3", capsize=4)
    if zero is not None:
        axis.axvline(zero, color="0.5")
    caption = f"{xlabel}\ndots: seeds; bars: mean and its 95 % interval"
    axis.set(xlabel=caption, ylim=(len(arms) - 0.5, -0.5))
    plot.finish(figure, path)


def plot_curves(path, x, curves, xlabel, ylabel, xscale="linear"):
    """
    Write a PNG with a line for each curve.

    curves: {label: y}, each as long as x or shorter. xscale: linear or log.
    """
    figure, axis = plot.pyplot().subplots(figsize=(7, 4))
    for label, y in curves.items():
        axis.plot(x[:len(y)], y, label=label)
    axis.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale)
    axis.legend()
    plot.finish(figure, path)
