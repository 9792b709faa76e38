"""
Does it help? Train a few arms that differ in one choice, on the same tokens, with several seeds each, and compare them.

    d_s = bits per byte (arm, seed s) - bits per byte (baseline, seed s)         s = 1 .. n

    mean d +- t sd d / sqrt(n), the 95 % interval of Student's t             p = P(|t_{n-1}| > |mean d| sqrt(n) / sd d)

Differences are paired by seed, because runs with the same seed share the order of the data and, where shapes agree, the
initial weights (model.py seeds each tensor by its name). Each arm searches the same learning rates and keeps its best:
an untuned baseline proves nothing. The search has seed 0, which is not reported, because the seed that chose a rate
flatters it. A table of eleven comparisons contains a small p by chance, so each p stands beside its value after Holm's
correction for all comparisons of the table.

The learning rate always falls to a tenth of its peak. A run folder is named after the run's settings, so studies share
runs, and the same command skips finished runs and resumes stopped ones. Protocol: Apertus report (arXiv 2509.14233)
sec. 2.4, Table 3, which has one run for each arm; here the seeds show how much a difference means.

$ python -m studies.ablate swiglu xielu           # two or more arms: five minutes, a table, plots, and a conclusion
$ python -m studies.ablate adamw ademamix --seeds=5
$ python -m studies.ablate activations            # a study of configs/ablations.py: an hour, to results/ablations
$ python -m studies.ablate activations --report   # its table and plots again, from the committed runs.jsonl
$ python -m studies.ablate apertus --size=configs/laptop.py    # another size: any config of train.py
$ python -m studies.ablate --overview             # all studies in one table
"""

import sys

if __name__ == "__main__" and not __package__:
    print("ablate.py: start it from the project's root, python -m studies.ablate", file=sys.stderr)
    sys.exit(2)

import csv
import os
import statistics

import numpy as np
from tqdm import tqdm

import configurator
import convert
import train
from configs.ablations import STUDIES
from data import read_meta
from engine import plot
from engine.intervals import student
from posttrain import attach
from studies import kit

paths = []                 # a study of configs/ablations.py, or two or more arms: values of one setting in ARMS
seeds = 0                  # runs of each arm at its best learning rate; 0 = 5 for a study, 3 for arms
lrs = ()                   # peak learning rates that every arm tries; () = the study's
size = ""                  # a config of train.py: the model and the length of every run; "" = the study's
data = "data/stdlib"       # what prepare.py wrote
out = ""                   # the study's folder is made in here; "" = results/ablations, or out/ablations for arms
runs = "out/ablations"     # run folders: logs and checkpoints, not for committing
jobs = 0                   # runs at a time; 0 = one for each GPU, or for each CPU core without one
report = False             # run nothing: write table and plot from runs.jsonl
overview = False           # run nothing: one table of all studies in results/ablations

SEARCH_SEED = 0            # chooses the learning rates, and is never reported
STUDY = dict(seeds=5, size="configs/ablations/size_laptop.py", out="results/ablations")
QUICK = dict(
    seeds=3, size="configs/ablations/size_quick.py", out="out/ablations", lrs=(1e-3, 2e-3, 4e-3), published="", reading="")
ARMS = dict(activation="xielu swiglu gelu relu2", optimizer="ademamix adamw", schedule="wsd cosine")

HEAD = (
    "| arm | lr | bits/byte, mean ± sd | against the baseline | tokens to its loss | parameters "
    "| gradient norm, median (max) | s |")
ROW = (
    "| {arm} | {lr:g}{edge} | {bpb:.4f} ± {sd:.4f} | {against} | {tokens_to_baseline} | {parameters:,} "
    "| {grad_norm:.2f} ({grad_norm_max:.1f}) | {seconds:.0f} |")
AGAINST = "{difference:+.4f} ± {half_interval:.4f} (p = {p:.3f}, {p_holm:.3f})"
METHOD = (
    "Seed 0 chooses each arm's learning rate and is not reported (* = the lowest or highest that was tried). Differences "
    "are paired by seed: mean ± half of the 95 % interval by Student's t (p, and p by Holm for all comparisons of this "
    "table). Tokens to its loss: the share after which an arm has the baseline's last loss.")


def chosen():
    """
    The study on the command line, a dict: a row of configs/ablations.py, or the arms to compare, and its `name`.
    ValueError if there is no such study.
    """
    name = " ".join(paths)
    settings = [setting for setting, arms in ARMS.items() if len(paths) > 1 and {*paths} <= {*arms.split()}]
    if name in STUDIES:
        study = STUDY | STUDIES[name]
    elif settings:
        arms = {arm: f"--{settings[0]}={arm}" for arm in paths}
        study = dict(QUICK, question=f"{settings[0]}: {' or '.join(paths)}?", arms=arms, baseline=paths[0])
    else:
        # A study used to be a file, configs/ablations/NAME.py.
        stem = os.path.basename(name).removesuffix(".py")
        example = stem if stem in STUDIES else "activations"
        raise ValueError(
            f"{name or 'no name'}: there is no such study: type python -m studies.ablate {example} (or "
            f"{', '.join(STUDIES)}), or compare arms: python -m studies.ablate swiglu xielu (or values of one line: "
            f"{'; '.join(ARMS.values())})")
    asked = dict(seeds=seeds, lrs=lrs, size=size, out=out)
    return study | {key: value for key, value in asked.items() if value} | dict(name="-".join(paths))


# -----------------------------------------------------------------------------
# runs


def arguments(study, arm, lr, seed):
    """The arguments of train.py for one run, without its folder. Runs end after as many tokens, not after as long."""
    asked = dict(lr=lr, lr_floor=lr / 10, seed=seed, data=data, minutes=0.0)
    return [study["size"], *study["arms"][arm].split(), *kit.flags(asked)]


def run_folder(argv):
    """
    The run folder, named after all settings of the run and its data.

    ValueError, before the first run, for a setting that train.py does not have or a value of another type.
    """
    settings = configurator.configure(dict(vars(train)), argv, dict(vars(train.shape)), dict(vars(attach)))
    return f"{runs}/{kit.digest([settings, read_meta(data)])}"


def train_all(study, asked, bar):
    """Train each (arm, lr, seed) that is not finished yet, several at a time. Returns the rows of runs.jsonl in order."""
    commands = [arguments(study, *run) for run in asked]
    folders = [run_folder(argv) for argv in commands]
    for _ in kit.in_parallel(jobs, kit.train, folders, commands):
        bar.update()
    return [read_run(folder, *run) | dict(size=study["size"]) for folder, run in zip(folders, asked)]


def read_run(folder, arm, lr, seed):
    """
    The row of runs.jsonl of a finished run. tokens, val_bpb: one entry for each validation, in bits per byte.

    The gradients of fresh weights are large in every arm, so their norms leave the first tenth of the steps out.
    """
    entries = plot.read_log(folder)
    validations = [e for e in entries if "val_bpb" in e]
    norms = [e["grad_norm"] for e in entries if "grad_norm" in e]
    norms = norms[len(norms) // 10 :]
    model, _ = convert.load_any(folder)
    return dict(
        arm=arm,
        lr=lr,
        seed=seed,
        tokens=[e["tokens"] for e in validations],
        val_bpb=[e["val_bpb"] for e in validations],
        grad_norm_median=statistics.median(norms),
        grad_norm_max=max(norms),
        parameters=model.num_params(),
        seconds=validations[-1]["seconds"])


def final(run):
    """The last validation of a run, in bits per byte."""
    return run["val_bpb"][-1]


def run_study(study):
    """Search each arm's learning rate, then train the reported seeds at it. Returns the rows of runs.jsonl."""
    arms, lrs, every = study["arms"], study["lrs"], range(1, study["seeds"] + 1)
    search = [(arm, lr, SEARCH_SEED) for lr in lrs for arm in arms if len(lrs) > 1]
    with tqdm(desc=study["name"], total=len(search) + len(arms) * len(every), unit="run") as bar:
        searched = train_all(study, search, bar)
        score = {(run["arm"], run["lr"]): final(run) for run in searched}
        best = {arm: min(lrs, key=lambda lr: score.get((arm, lr))) for arm in arms}
        bar.write(f"learning rates: {best}")
        return searched + train_all(study, [(arm, best[arm], seed) for seed in every for arm in arms], bar)


# -----------------------------------------------------------------------------
# tables


def share_of_tokens(tokens, curve, goal):
    """
    The share of its tokens after which a curve is first at or below `goal`, as text; it is straight between validations.
    """
    for i, y in enumerate(curve):
        if y <= goal:
            two = slice(max(0, i - 1), i + 1)
            return f"{np.interp(-goal, -curve[two], tokens[two]) / tokens[-1]:.0%}"
    return "never"


def summary(rows, baseline):
    """
    A dict for each arm, the baseline first: a line of results.csv and table.md.

    bpb, sd: mean and standard deviation over seeds of the last validation. differences, difference, half_interval, p:
    from the baseline, by seed. edge: "*" if the learning rate is the lowest or the highest that was tried, so a better
    one may lie beyond.
    """
    table = []
    for arm in dict.fromkeys([baseline, *(row["arm"] for row in rows)]):
        tried = [row for row in rows if row["arm"] == arm]
        group = [row for row in tried if row["seed"] != SEARCH_SEED]
        rates = [row["lr"] for row in tried]
        first = group[0]
        curve = np.mean([row["val_bpb"] for row in group], 0)
        if arm == baseline:
            base, goal = group, curve[-1]
        differences = kit.differences(group, base, final)
        difference, half_interval, p = student(differences)
        table.append(dict(
            arm=arm,
            lr=first["lr"],
            edge="" if min(rates) < first["lr"] < max(rates) else "*",
            seeds=len(group),
            tokens=first["tokens"][-1],
            parameters=first["parameters"],
            bpb=curve[-1],
            sd=np.std([final(row) for row in group], ddof=len(group) > 1),
            differences=differences,
            difference=difference,
            half_interval=half_interval,
            p=p,
            against="baseline",
            tokens_to_baseline=share_of_tokens(first["tokens"], curve, goal),
            grad_norm=statistics.median(row["grad_norm_median"] for row in group),
            grad_norm_max=max(row["grad_norm_max"] for row in group),
            seconds=statistics.fmean(row["seconds"] for row in group)))
    return table


def compare(table):
    """The rows of a table that are no baselines, after Holm's p and the text `against` are added to them."""
    compared = [row for row in table if any(row["differences"])]
    for row, p_holm in zip(compared, kit.holm([row["p"] for row in compared])):
        row["p_holm"] = p_holm
        row["against"] = AGAINST.format(**row)
    return compared


def conclusion(row, baseline):
    """One sentence that says what may be concluded from a row against the baseline (a row)."""
    low, high = (row["difference"] + sign * row["half_interval"] for sign in (-1, 1))
    said = f"{row['seeds']} seeds, {row['parameters']:,} parameters, {row['tokens'] / 1e6:.2f}M tokens: "
    if row["p_holm"] < 0.05:
        less, more = sorted((abs(low), abs(high)))
        said += (f"{row['arm']} is {'lower' if high < 0 else 'higher'} than {baseline['arm']} by {less:.3f} to "
                 f"{more:.3f} bits per byte at this size.")
    else:
        said += (f"no difference between {row['arm']} and {baseline['arm']} can be seen (95 % interval: {low:+.3f} to "
                 f"{high:+.3f} bits per byte).")
    if row["edge"] or baseline["edge"]:
        said += " A best learning rate is at the edge of the grid, so a wider --lrs may change this."
    return said


def write_report(study, folder):
    """results.csv, table.md and plot.png of a study folder, from its runs.jsonl. Returns the text of table.md."""
    rows = kit.rows_to_report(f"{folder}/runs.jsonl", "studies.ablate")
    baseline, *others = table = summary(rows, study["baseline"])
    compare(table)
    with open(f"{folder}/results.csv", "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, others[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    kit.plot_intervals(
        f"{folder}/plot.png", {row["arm"]: row["differences"] for row in others},
        f"bits per byte above {baseline['arm']} (below 0 is better)", zero=0)
    text = "\n\n".join([
        f"# {study['name']}",
        study["question"],
        f"{baseline['seeds']} seeds, {baseline['tokens'] / 1e6:.2f}M tokens. {METHOD}",
        "\n".join(kit.table(HEAD, [ROW.format(**row) for row in table])),
        f"Published: {study['published']}",
        f"Reading: {study['reading'] or ' '.join(conclusion(row, baseline) for row in others)}",
        f"Command: `python -m studies.ablate {' '.join(paths)} --seeds={baseline['seeds']} --size={rows[0]['size']}`\n"])
    kit.write(f"{folder}/table.md", text)
    return text


def overview_md(folder):
    """All studies of a folder as one Markdown table. Holm's p is over all of its lines."""
    table = []
    for name, study in STUDIES.items():
        path = f"{folder}/{name}/runs.jsonl"
        if os.path.isfile(path):
            table += [row | dict(arm=f"{name}: {row['arm']}") for row in summary(kit.read_rows(path), study["baseline"])]
    if not table:
        raise ValueError(f"no studies in {folder}: run one first, python -m studies.ablate activations")
    compare(table)
    return "\n".join(kit.table(HEAD, [ROW.format(**row) for row in table])) + "\n"


def main():
    if overview:
        folder = out or STUDY["out"]
        text = overview_md(folder)
        kit.write(f"{folder}/overview.md", text)
    else:
        study = chosen()
        folder = f"{study['out']}/{study['name']}"
        if not report:
            kit.write_rows(f"{folder}/runs.jsonl", run_study(study))
        text = write_report(study, folder)
    print(text)


if __name__ == "__main__":
    # Studies used to be files in configs/; as a path, such a name reaches chosen(), which says what to type.
    sys.argv = [arg.removeprefix("configs/") for arg in sys.argv]
    configurator.run(main, globals())
