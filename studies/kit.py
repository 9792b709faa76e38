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
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from tqdm import tqdm

from engine import plot
from engine.files import read_json, read_text, sha256_of, write_flushed
from engine.intervals import student

# -----------------------------------------------------------------------------
# runs


def digest(asked):
    """Ten hexadecimal digits that identify the settings of a run: anything that JSON can hold."""
    return sha256_of(asked)[:10]


def run_script(script, args, log, device=None):
    """
    Run `python -m script args...` in a process of its own. Returns its exit code and the last line that it printed.

    It has $OMP_NUM_THREADS threads, or one, because several runs share the machine. log: the file for its output.
    device: the only GPU that it may see; None = all.
    """
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    if device:
        env["CUDA_VISIBLE_DEVICES"] = device
    write(log, "")
    with open(log, "r+", encoding="utf-8", errors="replace") as f:
        code = subprocess.run([sys.executable, "-m", script, *args], stdout=f, stderr=f, env=env).returncode
        f.seek(0)
        return code, f.read().strip().split("\n")[-1] or "it printed nothing"


def command(script, args):
    """The command that a user would type."""
    how = ["-m", script] if "." in script else [f"{script}.py"]
    return shlex.join(["python", *how, *args])


def call(path, done, script, *args, device=None):
    """
    Run one of the scripts, unless the file `done`, the last that it writes, exists.

    Its output goes to PATH.txt, its arguments and seconds to PATH.json. ValueError with its last line if it fails or is
    stopped, or if it was run with other arguments before.
    """
    log, record = f"{path}.txt", f"{path}.json"
    if not os.path.exists(done):
        began = time.perf_counter()
        code, last = run_script(script, args, log, device)
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
    call(folder, f"{folder}/summary.json", "train", *args, f"--out={folder}", "--resume", device=device)


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
    return read_rows(path)


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
    """Write a text file, all or nothing, and make its folder."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    write_flushed(path, text)


def publish(path, text):
    """Write a page, and print it."""
    write(path, text)
    print(text)


def write_rows(path, rows):
    """Write dicts to a file, one line of JSON for each. ValueError, with the old file kept, without dicts."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not text:
        raise ValueError(f"{path}: no run is asked for: want --seeds=1 or more")
    write(path, text)


def read_rows(path):
    """The dicts of a file with one line of JSON for each. ValueError if it has none."""
    rows = list(map(json.loads, read_text(path).splitlines())) if os.path.exists(path) else []
    if not rows:
        raise ValueError(f"no {path}, or nothing in it: run its study first, without --report")
    return rows


# -----------------------------------------------------------------------------
# statistics


def holm(ps):
    """
    Adjust the p-values of several comparisons, so that the chance of any false one below alpha is at most alpha.

    The i-th smallest of n is multiplied by n - i + 1, and none may be smaller than the one before it (Holm 1979).
    """
    order = np.argsort(ps)
    times = np.arange(len(ps), 0, -1)
    adjusted = np.maximum.accumulate(np.sort(ps) * times).clip(max=1)
    return adjusted[np.argsort(order)].tolist()


def half_interval(values):
    """Half of the 95 % interval of a mean by Student's t."""
    return student(values)[1]


def interval(values, digits=2, margin=half_interval):
    """Mean ± margin(values) as text; one value stands alone, none is ""."""
    return " ± ".join(f"{number(values):.{digits}f}" for number in (statistics.fmean, margin)[:len(values)])


# -----------------------------------------------------------------------------
# tables and plots


def grouped(found):
    """{line: {column: [values]}} of (line, column, value), for pivot()."""
    lines = defaultdict(lambda: defaultdict(list))
    for line, column, value in found:
        lines[line][column].append(value)
    return lines


def table(head, rows):
    """The lines of a Markdown table: its head "| a | b |", a rule, and the rows, which look like the head."""
    return [head, "|---" * (head.count("|") - 1) + "|", *rows]


def pivot(corner, lines, *how):
    """A Markdown table of pairs (line, {column: values}), by interval(values, *how). corner: "| what the lines are"."""
    _, columns = lines[0]
    body = [f"| {line} | {' | '.join(interval(found[column], *how) for column in columns)} |" for line, found in lines]
    return "\n".join(table(f"{corner} | {' | '.join(map(str, columns))} |", body)) + "\n"


def plot_intervals(path, arms, xlabel, zero=None):
    """
    Write a PNG with a row for each arm: its values as dots, and their mean with its 95 % interval by Student's t.

    arms: {label: values}, the first on top; one value has no interval. zero: where to draw a vertical line, or None.
    """
    figure, axis = plot.pyplot().subplots(figsize=(7, 1.2 + 0.4 * len(arms)))
    for label, values in arms.items():
        axis.plot(values, [label] * len(values), ".", color="0.6")
        axis.errorbar(statistics.fmean(values), label, xerr=half_interval(values), fmt="o", color="C3", capsize=4)
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
