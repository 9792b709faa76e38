"""
The common part of the studies: runs in parallel processes, rows of JSON, differences by seed, intervals, tables, plots.

A study is a question, a few arms, some seeds and a measure. It trains one model for each arm and seed, in a folder
whose name is a hash of the run's settings. So the same command skips finished runs and resumes stopped ones, and a run
is never mistaken for one with other settings, or one trained by other code. Each run ends in a row, a line of JSON;
table and plot are made from the committed rows alone.

    d_s = measure (arm, seed s) - measure (baseline, seed s),      mean d +- t(n - 1) sd d / sqrt(n)

Sources: engine/intervals.py; Holm, Scandinavian Journal of Statistics 6 (1979).
"""

import ast
import functools
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from configurator import ROOT
from engine import plot
from engine.files import lock, make_folder, read_json, read_text, sha256_of, write_flushed
from engine.intervals import student

# Exit codes of a run that was asked to stop: by the file `stop`, Ctrl-C or SIGTERM. It has not failed.
STOPPED = {0, 130, 143, -signal.SIGINT, -signal.SIGTERM}


# -----------------------------------------------------------------------------
# runs


def command(script, args):
    """The command that a user would type. script: the name of a module."""
    program = f"-m {script}" if "." in script else f"{script}.py"
    return f"python {program} {shlex.join(args)}"


@functools.cache
def parse_source(text):
    """The hash of a Python source without comments and layout, and the modules that it may import."""
    tree, modules = ast.parse(text), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return sha256_of(ast.unparse(tree)), modules


def read_sources(script, *args, root=""):
    """
    {file: hash} of a script, of the config files among its arguments, and of the files of this project that these
    import, directly or not. root: another checkout of this project, to read it there; "" = this one.
    """
    root, sources = root or ROOT, {}
    modules = [script, *(arg.removesuffix(".py") for arg in args)]
    for module in modules:                          # which grows in the loop
        file = f"{module.replace('.', '/')}.py"
        if file not in sources and os.path.exists(f"{root}/{file}"):
            sources[file], imported = parse_source(read_text(f"{root}/{file}"))
            modules += imported
    return sources


def list_changes(sources, others):
    """The first files of read_sources() that are missing in `others` or have another hash there, as a text."""
    files = sorted(file for file in sources if sources[file] != others.get(file))
    return ", ".join(files[:3] + [f"{len(files) - 3} more"] * (len(files) > 3))


class RunFailed(ValueError):
    """A script that ended with an error of its own, not because it was stopped. last_line: of its output."""

    def __init__(self, message, last_line):
        super().__init__(message)
        self.last_line = last_line


def run_process(command, file, env, folder=None):
    """
    Run a command, with its output in an open file. Returns its exit code, and the seconds of CPU that it and its own
    child processes took. folder: where it starts; None = here.
    """
    process = subprocess.Popen(command, stdout=file, stderr=file, env=env, cwd=folder)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


def check_origin(folder, record, before, origin):
    """ValueError if the record of a folder, `before`, has other arguments or sources than the run to be made."""
    if before["args"] != origin["args"]:
        raise ValueError(f"{folder} was made with other settings ({record}): delete it, or name another --out")
    if changes := list_changes(origin["sources"], before.get("sources", {})):
        raise ValueError(f"{folder} was made before a change of {changes}: delete it, or name another --out")


def call(path, done, script, *args, device=None, root=""):
    """
    Run `python -m script args...` in a process of its own, unless the file `done`, the last that it writes, exists.

    Its output goes to PATH.txt; its arguments, hashes of its sources, its seconds and its seconds of CPU go to
    PATH.json. If another study has started it, wait for that: studies share runs. It has $OMP_NUM_THREADS threads, or
    one, because several runs share the machine. device: the only GPU that it may see; None = all. root: another
    checkout of this project, whose script runs; paths are absolute then.
    ValueError with its last line if it fails (RunFailed) or is stopped, or if the folder of `done` was made with other
    arguments or by other sources.
    """
    record, folder = f"{path}.json", os.path.dirname(done)
    origin = dict(args=list(args), sources=read_sources(script, *args, root=root))
    before = dict(cpu_seconds=0)
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    if device:
        env["CUDA_VISIBLE_DEVICES"] = device
    make_folder(os.path.dirname(path) or ".")
    with lock(f"{path}.txt", "", wait=True) as f:
        if os.path.exists(record) and os.path.exists(folder):
            before = read_json(record)
            check_origin(folder, record, before, origin)
        if os.path.exists(done):
            return
        start = time.perf_counter()
        f.truncate(0)
        write(record, json.dumps(origin))
        code, cpu_seconds = run_process([sys.executable, "-m", script, *args], f, env, root or None)
        f.seek(0)
        last = f.read().strip().split("\n")[-1] or "it printed nothing"
        # A process that was killed with this one has left no seconds: then the sum is not known.
        known = before.get("cpu_seconds")
        total = None if known is None else round(known + cpu_seconds, 1)
        write(record, json.dumps(origin | dict(wall=round(time.perf_counter() - start), cpu_seconds=total)))
    if code or not os.path.exists(done):
        message = f"{command(script, args)} ended with code {code}: {last} ({path}.txt)"
        if code in STOPPED:
            raise ValueError(f"{message}. If it was stopped, give the same command again")
        raise RunFailed(message, last)


def train(folder, command, device=None, root=""):
    """
    Train into a folder by call(), from its last checkpoint if there is one.

    command: a list of train.py or another script that trains ("train", "posttrain.sft"), its config files and flags.
    The output goes to FOLDER.txt, because train.py rejects a folder that holds files of another kind. root: of call().
    """
    call(folder, f"{folder}/summary.json", *command, f"--out={folder}", "--resume", device=device, root=root)


def in_parallel(at_a_time, work, *columns):
    """
    map(work, *columns) in threads: an iterator of the results, in order. work gets one more argument, its device.

    At most at_a_time run at once; 0 = one for each GPU, or for each CPU core where there is no GPU. device: the GPUs in
    turn, or "". After an error or Ctrl-C no further one starts. ValueError for less than 0.
    """
    if at_a_time < 0:
        raise ValueError(f"jobs={at_a_time}: want how many runs at a time, 0 for one on each GPU or core")
    count = torch.cuda.device_count()
    # The GPUs in $CUDA_VISIBLE_DEVICES, by their names there; if it is not set, all.
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return ThreadPoolExecutor(at_a_time or count or os.cpu_count()).map(
        work,
        *columns,
        itertools.cycle(names.split(",")))


# -----------------------------------------------------------------------------
# rows


def write(path, text):
    """Write a text file, all or nothing, and make its folder."""
    make_folder(os.path.dirname(path) or ".")
    write_flushed(path, text)


def publish(path, text):
    """Write a page, and print it."""
    write(path, text)
    print(text)


def write_rows(path, rows):
    """Write dicts to a file, one line of JSON for each. Without dicts: ValueError, and the old file stays."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not text:
        raise ValueError(f"{path}: no run is asked for: want --seeds=1 or more")
    write(path, text)


def read_rows(path):
    """The dicts of a file with one line of JSON for each. ValueError if it is missing or empty."""
    text = read_text(path) if os.path.exists(path) else ""
    if not text:
        raise ValueError(f"no {path}, or nothing in it: run its study first, without --report")
    return list(map(json.loads, text.splitlines()))


def conversation(*texts):
    """A row for SFT or, without an answer, for QRPO: a system message, a question, an answer."""
    roles = ("system", "user", "assistant")
    return dict(messages=[dict(role=role, content=text) for role, text in zip(roles, texts)])


# -----------------------------------------------------------------------------
# statistics


def holm(ps):
    """
    Adjust the p-values of several comparisons, so that the chance of any false one below alpha is at most alpha.

    The i-th smallest of n is multiplied by n - i + 1, and none may be smaller than the one before it (Holm 1979).
    """
    ps = np.array(ps)
    scaled = ps * (ps >= ps[:, None]).sum(1)        # n - i + 1 are at least as large as the i-th
    # With one seed they are all nan, and stay so.
    return [min(scaled[~(ps > p)].max(), 1) for p in ps]


def half_interval(values):
    """Half of the 95 % interval of the mean by Student's t."""
    return student(values)[1]


def interval(values, digits=2, margin=half_interval):
    """Mean ± margin(values) as text; a single value has no margin, and no values give ""."""
    return " ± ".join(f"{number(values):.{digits}f}" for number in (statistics.fmean, margin)[:len(values)])


# -----------------------------------------------------------------------------
# tables and plots


def group(triples):
    """{line: {column: [values]}} of triples (line, column, value), for pivot()."""
    lines = defaultdict(lambda: defaultdict(list))
    for line, column, value in triples:
        lines[line][column].append(value)
    return lines


def table_md(head, lines):
    """A Markdown table. head: its first line; lines: of the others the cells, as texts."""
    rule = "|---" * (head.count("|") - 1) + "|"
    return "\n".join([head, rule, *(f"| {' | '.join(cells)} |" for cells in lines), ""])


def pivot(corner, lines, digits=2, margin=half_interval):
    """
    A Markdown table of pairs (line, {column: values}), whose cells are interval(values, digits, margin).

    All lines have the same columns. corner: the head of the first columns, like "| model".
    """
    lines = list(lines)
    _, columns = lines[0]
    return table_md(f"{corner} | {' | '.join(map(str, columns))} |", (
        [line, *(interval(values, digits, margin) for values in columns.values())] for line, columns in lines))


@contextmanager
def picture(path, width, height):
    """Yield the axis of a new plot of width x height inches, then write it as a PNG."""
    figure, axis = plot.pyplot().subplots(figsize=(width, height))
    yield axis
    plot.finish(figure, path)


def plot_intervals(path, arms, xlabel, *lines):
    """
    Write a PNG with a row for each arm: its values as dots, and their mean with its 95 % interval by Student's t.

    arms: {label: values}, the first on top; one value has no interval. lines: where to draw vertical lines.
    """
    with picture(path, 7, 1.2 + 0.4 * len(arms)) as axis:
        for label, values in arms.items():
            mean, half, _ = student(values)
            axis.plot(values, [label] * len(values), ".", color="0.6")
            axis.errorbar(mean, label, xerr=half, fmt="o", color="C3", capsize=4)
        for line in lines:
            axis.axvline(line, color="0.5")
        axis.set(
            xlabel=f"{xlabel}\ndots: seeds; bars: mean and its 95 % interval",
            ylim=(len(arms) - 0.5, -0.5))


def plot_curves(path, x, curves, xlabel, ylabel, xscale="linear"):
    """
    Write a PNG with a line for each curve.

    curves: {label: y}, each as long as x or shorter; of (seeds, n) the line is the mean, and a band from the lowest to
    the highest seed is around it. xscale: linear or log.
    """
    with picture(path, 7, 4) as axis:
        for label, y in curves.items():
            seeds = np.atleast_2d(y)
            shown = x[:seeds.shape[1]]
            [line] = axis.plot(shown, seeds.mean(0), label=label)
            if len(seeds) > 1:
                axis.fill_between(shown, seeds.min(0), seeds.max(0), color=line.get_color(), alpha=0.2)
        axis.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale)
        axis.legend()
