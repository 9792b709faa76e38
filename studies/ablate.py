"""
Does it help? Train a few arms that differ in one choice, on the same tokens, with several seeds each, and compare them.

    d_s = bits per byte (arm, seed s) - bits per byte (baseline, seed s)         s = 1 .. n

    mean d +- t sd d / sqrt(n), the 95 % interval of Student's t             p = P(|t_{n-1}| > |mean d| sqrt(n) / sd d)

Differences are paired by seed, because runs with the same seed share the order of the data and, where shapes agree, the
initial weights (model.py seeds each tensor by its name). Each arm searches the same learning rates and keeps its best:
an untuned baseline proves nothing. The search has seed 0, which is not reported, because the seed that chose a rate
flatters it. A table of eleven comparisons contains a small p by chance, so each p is followed by its value after
Holm's correction for all comparisons of the table.

The learning rate always falls to a tenth of its peak. A run folder is named after the run's settings, so studies share
runs, and the same command skips finished runs and resumes stopped ones. Protocol: Apertus report (arXiv 2509.14233)
sec. 2.4, Table 3, which has one run for each arm; here the seeds show how much a difference means.

$ python -m studies.ablate swiglu xielu           # two or more arms: five minutes, a table, a plot, and a conclusion
$ python -m studies.ablate adamw ademamix --seeds=5
$ python -m studies.ablate activations            # a study of configs/ablations.toml: an hour, to results/ablations
$ python -m studies.ablate activations --report   # its table and plot again, from the committed runs.jsonl
$ python -m studies.ablate apertus --size=configs/laptop.py    # another size: any config of train.py
$ python -m studies.ablate --overview             # all studies in one table
"""

from studies import kit     # first, since studies.py says how to start a study that was started by its path

import json
import os
import re
import statistics
import sys
import tomllib
from operator import itemgetter, sub

import numpy as np
from tqdm import tqdm

import configurator
import convert
import train
from data import read_meta
from engine import plot
from engine.files import read_text
from engine.intervals import student
from posttrain import attach

paths = []                 # a study of configs/ablations.toml, or two or more arms: values of one setting in ARMS
seeds = 0                  # runs of each arm at its best learning rate; 0 = 5 for a study, 3 for arms
lrs = ()                   # peak learning rates that every arm tries; () = the study's
size = ""                  # a config of train.py: the model and the length of every run; "" = the study's
data = "data/stdlib"       # a folder of prepare.py
out = ""                   # the study's folder is made in here; "" = results/ablations, or out/ablations for arms
runs = "out/ablations"     # run folders: logs and checkpoints, not for committing
jobs = 0                   # runs at a time; 0 = one for each GPU, or for each CPU core without one
report = False             # run nothing: write table and plot from runs.jsonl
overview = False           # run nothing: one table of all studies in results/ablations

SEARCH_SEED = 0            # chooses the learning rates, and is never reported
STUDIES = tomllib.loads(read_text(f"{configurator.ROOT}/configs/ablations.toml"))
STUDY, QUICK = json.loads("""[
    {"seeds": 5, "size": "configs/ablations/size_laptop.py", "out": "results/ablations", "lrs": [5e-4, 1e-3, 2e-3]},
    {"seeds": 3, "size": "configs/ablations/size_quick.py", "out": "out/ablations", "lrs": [1e-3, 2e-3, 4e-3]}
]""")
ARMS = dict(activation="xielu swiglu gelu relu2", optimizer="ademamix adamw", schedule="wsd cosine")

HEAD = (
    "| arm | lr | seeds | bits/byte, mean ± sd | against the baseline | tokens to its loss | tokens | parameters "
    "| s |")
ROW = (
    "| {arm} | {lr} | {seeds} | {bits_per_byte} | {against} | {tokens_to_loss} | {tokens:,} | {parameters:,} "
    "| {seconds:.0f} |")
AGAINST = "{:+.4f} ± {:.4f} (p = {:.3f}, {:.3f})"
METHOD = (
    "Seed 0 chooses each arm's learning rate and is not reported (* = the lowest or highest that was tried). "
    "Differences are paired by seed: mean ± half of the 95 % interval by Student's t (p, and p by Holm for all "
    "comparisons of this table). Tokens to its loss: the share after which an arm has the baseline's last loss.")


def chosen():
    """
    The study on the command line, a dict: a table of configs/ablations.toml, or the arms to compare; its `name`, the
    `folder` of its results, and `asked`: the numbers that replace its own. ValueError if there is none.
    """
    name = "-".join(paths)
    settings = [setting for setting, arms in ARMS.items() if {*paths} <= {*arms.split()}]
    if name in STUDIES:
        study = STUDY | STUDIES[name]
    elif len({*paths}) > 1 and settings:
        arms = {arm: f"--{settings[0]}={arm}" for arm in paths}
        study = QUICK | dict(question=f"{settings[0]}: {' or '.join(paths)}?", arms=arms)
    else:
        raise ValueError(
            f"{' '.join(paths) or 'no name'}: there is no such study: name one of {', '.join(STUDIES)}, or two or more "
            f"values of {' or '.join(ARMS)}: python -m studies.ablate swiglu xielu")
    asked = {key: value for key, value in dict(seeds=seeds, lrs=lrs, size=size).items() if value}
    # Other numbers than the committed ones get a folder of their own, and no reading.
    results = out or (QUICK if asked else study)["out"]
    return study | asked | dict(name=name, asked=asked, folder=f"{results}/{name}")


# -----------------------------------------------------------------------------
# runs


def planned(study, arm, lr, seed):
    """
    The folder of a run, named after all of its settings and its data, and its arguments of train.py.

    All runs have the same number of tokens, so none ends by the clock. ValueError for a setting that train.py does not
    have or a value of another type.
    """
    flags = kit.flags(dict(lr=lr, lr_floor=lr / 10, seed=seed, data=data, minutes=0.0))
    argv = [study["size"], *study["arms"][arm].split(), *flags]
    settings = configurator.configure(dict(vars(train)), argv, dict(vars(train.shape)), dict(vars(attach)))
    return f"{runs}/{kit.digest([settings, read_meta(data)])}", argv


def train_all(study, asked, bar):
    """
    Train each (arm, lr, seed) that is not finished yet, several at a time. Returns the rows of runs.jsonl in order.

    ValueError if a setting does not exist, before the first run, or if train.py fails; finished runs stay finished.
    """
    plan = [planned(study, *run) for run in asked]
    # Two arms may ask for the same run, and two processes must not write into one folder.
    distinct = dict(plan)
    for _ in kit.in_parallel(jobs, kit.train, distinct, distinct.values()):
        bar.update()
    return [read_run(folder, *run) for (folder, _), run in zip(plan, asked)]


def read_run(folder, arm, lr, seed):
    """The row of runs.jsonl of a finished run. tokens, val_bpb: one entry for each validation, in bits per byte."""
    numbers = itemgetter("tokens", "val_bpb", "seconds")
    tokens, val_bpb, seconds = zip(*(numbers(entry) for entry in plot.entries(folder) if "val_bpb" in entry))
    model, _ = convert.load_any(folder)
    return dict(
        arm=arm,
        lr=lr,
        seed=seed,
        tokens=tokens,
        val_bpb=val_bpb,
        parameters=model.num_params(),
        seconds=seconds[-1])


def final(run):
    """The last validation of a run, in bits per byte."""
    return run["val_bpb"][-1]


def run_study(study):
    """Search each arm's learning rate, then train the reported seeds at it. Returns the rows of runs.jsonl."""
    arms, lrs = study["arms"], study["lrs"]
    best = dict.fromkeys(arms, lrs[0])
    search = [(arm, lr, SEARCH_SEED) for lr in lrs for arm in arms if len(lrs) > 1]
    reported = [(arm, seed) for seed in range(1, study["seeds"] + 1) for arm in arms]
    for arm in arms:
        planned(study, arm, lrs[0], SEARCH_SEED)           # its errors come before the bar
    with tqdm(desc=study["name"], total=len(search) + len(reported), unit="run") as bar:
        searched = train_all(study, search, bar)
        # From the worst to the best, so that the best stays.
        best |= {run["arm"]: run["lr"] for run in sorted(searched, key=final, reverse=True)}
        return searched + train_all(study, [(arm, best[arm], seed) for arm, seed in reported], bar)


# -----------------------------------------------------------------------------
# tables


def share_of_tokens(tokens, curve, goal):
    """
    The share of its tokens after which a curve, straight between its points, is first at or below `goal`, as text.
    """
    for i, y in enumerate(curve):
        if y <= goal:
            two = slice(max(0, i - 1), i + 1)
            return f"{np.interp(-goal, -curve[two], tokens[two]) / tokens[-1]:.0%}"
    return "never"


def summary(rows):
    """
    A dict for each arm, a line of table.md. The first arm is the baseline.

    bits_per_byte: mean and standard deviation over seeds of the last validation. differences: from the baseline, by
    seed; student: their mean, half of its 95 % interval and its p-value. lr ends in * if it is the lowest or the
    highest that was tried, so a better one may lie beyond. tokens_to_loss: share_of_tokens for the last loss of the
    baseline. curve: tokens and means of the validations.
    """
    table = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        rates = [row["lr"] for row in rows if row["arm"] == arm]
        runs = [row for row in rows if row["arm"] == arm and row["seed"] != SEARCH_SEED]
        tokens, lr = runs[0]["tokens"], runs[0]["lr"]
        curve = np.mean([run["val_bpb"] for run in runs], 0)
        ends = list(map(final, runs))
        if not table:
            base, goal = ends, curve[-1]
        differences = list(map(sub, ends, base))        # by seed, in whose order the rows are
        table.append(runs[0] | dict(
            against="" if table else "baseline",
            lr=f"{lr:g}{'' if min(rates) < lr < max(rates) else '*'}",
            seeds=len(runs),
            bits_per_byte=kit.interval(ends, 4, statistics.stdev),
            differences=differences,
            student=student(differences),
            tokens_to_loss=share_of_tokens(tokens, curve, goal),
            curve=(tokens, curve),
            tokens=tokens[-1],
            seconds=statistics.fmean(run["seconds"] for run in runs)))
    return table


def table_md(table):
    """The rows of summary() as a Markdown table. Adds p_holm, for all of its comparisons, and `against` to the rows."""
    compared = [row for row in table if not row["against"]]
    for row, p_holm in zip(compared, kit.holm([row["student"][2] for row in compared])):
        row["p_holm"] = p_holm
        row["against"] = AGAINST.format(*row["student"], p_holm)
    return "\n".join(kit.table(HEAD, map(ROW.format_map, table)))


def conclusion(row, baseline):
    """The conclusion from a row of summary(), in a sentence. baseline: the name of that arm."""
    difference, half, _ = row["student"]
    low, high = difference - half, difference + half
    said = f"no difference between {row['arm']} and {baseline} can be seen: it is {low:+.3f} to {high:+.3f}"
    if row["p_holm"] < 0.05:
        near, far = sorted((abs(low), abs(high)))
        said = f"{row['arm']} is {'lower' if high < 0 else 'higher'} than {baseline} by {near:.3f} to {far:.3f}"
    return f"{row['seeds']} seeds, {row['parameters']:,} parameters, {row['tokens']:,} tokens: {said} bits per byte."


def write_report(study):
    """Write table.md, plot.png and curves.png of a study from its runs.jsonl, and print the table."""
    folder, asked = study["folder"], study["asked"]
    table = summary(kit.read_rows(f"{folder}/runs.jsonl"))
    baseline = table[0]["arm"]
    paragraphs = [f"# {study['name']}", study["question"], METHOD, table_md(table)]
    if "reading" in study and not asked:
        paragraphs += [" ".join(f"{key.title()}: {study[key]}".split()) for key in ("published", "reading")]
    else:
        paragraphs += [conclusion(row, baseline) for row in table[1:]]
    paragraphs.append(f"Command: `{kit.command('studies.ablate', [*paths, *kit.flags(asked)])}`\n")
    kit.publish(f"{folder}/table.md", "\n\n".join(paragraphs))
    arms = {row["arm"]: row["differences"] for row in table[1:]}
    kit.plot_intervals(f"{folder}/plot.png", arms, f"bits per byte above {baseline} (less is better)", zero=0)
    curves = {row["arm"]: row["curve"][1] for row in table}
    kit.plot_curves(f"{folder}/curves.png", table[0]["curve"][0], curves, "tokens", "validation, bits per byte")


def write_overview(folder):
    """Write all studies of a folder as one table, overview.md, with Holm's p over all of its lines, and print it."""
    table = []
    for name in STUDIES:
        path = f"{folder}/{name}/runs.jsonl"
        if os.path.isfile(path):
            rows = summary(kit.read_rows(path))
            table += [row | dict(arm=f"{name}: {row['arm']}") for row in rows]
    if not table:
        raise ValueError(f"no studies in {folder}: run one first, python -m studies.ablate activations")
    kit.publish(f"{folder}/overview.md", table_md(table) + "\n")


def main():
    if overview:
        return write_overview(out or STUDY["out"])
    study = chosen()
    if not report:
        kit.write_rows(f"{study['folder']}/runs.jsonl", run_study(study))
    write_report(study)


if __name__ == "__main__":
    # A study used to be a file, whose path still names it.
    sys.argv = [re.sub(r"^configs/ablations/(.*)\.py$", r"\1", arg) for arg in sys.argv]
    configurator.run(main, globals())
