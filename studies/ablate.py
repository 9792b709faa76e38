"""
Does it help? A study is a few arms that differ in one choice, trained on the same tokens with several seeds each.

    d_s = bits per byte (arm, seed s) - bits per byte (baseline, seed s)         s = 1 .. n

    mean d +- t sd d / sqrt(n), the 95 % interval of Student's t             p = P(|t_{n-1}| > |mean d| sqrt(n) / sd d)

Differences are taken seed by seed, because runs of one seed share the order of the data and, where shapes agree, the
initial weights (model.py seeds each tensor by its name). Each arm searches the same learning rates and keeps its best:
a baseline that is tuned less than its rival proves nothing. The search has a seed of its own, 0, which is not among
those that are reported, because the seed that chose a rate flatters it. And a table of eleven comparisons holds a small
p by chance: Holm's correction, printed beside each p, is right for all comparisons of a table together.

The learning rate always falls to a tenth of its peak. A run's folder is named after what was asked of it, so studies
share the runs that they have in common, finished runs are skipped and broken ones go on. Protocol: Apertus report
(arXiv 2509.14233) sec. 2.4, Table 3, which has one run for each arm; here the seeds say what a difference is worth.

$ python -m studies.ablate configs/ablations/activations.py              # runs, results.csv, table.md, plot.png
$ python -m studies.ablate configs/ablations/activations.py --report     # the files again from the committed runs.jsonl
$ python -m studies.ablate configs/ablations/apertus.py --size=configs/laptop.py  # another size: any config of train.py
$ python -m studies.ablate --overview                                    # every study in one table
"""

import sys

if __name__ == "__main__" and not __package__:
    print("ablate.py: start it from the project's root, python -m studies.ablate", file=sys.stderr)
    sys.exit(2)

import csv
import glob
import math
import os
import statistics
import textwrap

import numpy as np
import torch

import configurator
import train
from configurator import ROOT
from engine import plot
from engine.intervals import student
from model import Apertus, ApertusConfig
from papers import structured_ffn as structured
from posttrain import attach
from studies import kit
from tokenizer import read_json

study = ""                                  # its name; a file in configs/ablations/ sets this and the next six
arms = {}                                   # name -> overrides of train.py: a dict, or a config file as a string
baseline = ""                               # the arm that the others are compared with
lrs = ()                                    # peak learning rates that every arm tries; one: nothing is searched
question = ""                               # one line
published = ""                              # what the report, or whoever claims it, found
reading = ""                                # one paragraph: what our numbers say and do not say
seeds = 5                                   # runs of each arm at its best learning rate: seeds 1, 2, ...
size = "configs/ablations/size_laptop.py"   # a config of train.py: the model and the length of every run
data = "data/stdlib"                        # what prepare.py wrote
out = "results/ablations"                   # the study's folder is made in here
runs = "out/ablations"                      # run folders: logs and checkpoints, not for committing
jobs = 0                                    # runs at a time; 0 = one for each GPU, or for each CPU core without one
report = False                              # run nothing: write table and pictures from runs.jsonl
overview = False                            # run nothing: one table of all studies in `out`

SEARCH_SEED = 0     # chooses the learning rates, and is never reported

# In every picture what Apertus chose is red, and what it replaced is blue. Arms that are not named get any colour.
COLOURS = dict(apertus="C3", xielu="C3", ademamix="C3", wsd="C3",
               llama="C0", swiglu="C0", adamw="C0", cosine="C0",
               gelu="C1", relu2="C2")


# -----------------------------------------------------------------------------
# what a run is


def arguments(arm, lr, seed):
    """The arguments of train.py for one run, without its folder. A config file goes before the flags, which win."""
    asked = {"lr": lr, "lr_floor": lr / 10, "seed": seed, "data": data}
    file = configurator.config_file(size)
    if file and configurator.read_config(file).get("minutes"):
        asked["minutes"] = 0.0      # runs are compared after as many tokens, not after as long
    if isinstance(arm, str):
        return [size, arm, *kit.flags(asked)]
    return [size, *kit.flags({**arm, **asked})]


def check_arguments(argv):
    """
    {name: value} of the settings that the arguments of train.py and their config files name.

    ValueError, before the first run, for a setting that train.py does not have or a value of the wrong kind.
    """
    resolved = configurator.configure(dict(vars(train)), argv, dict(vars(train.shape)), dict(vars(attach)))
    named = set()
    for arg in argv:
        if arg.startswith("--"):
            named.add(arg[2:].split("=")[0])
        else:
            named |= configurator.read_config(configurator.config_file(arg)).keys()
    return {key: resolved[key] for key in named - {"out"}}


def train_all(asked):
    """
    Train each (arm, lr, seed) that is not finished yet, several at a time. Returns the lines of runs.jsonl in order.

    ValueError if an arm asks for what train.py does not have, before the first run, or if train.py fails: the runs that
    are finished by then stay so.
    """
    commands = {}
    folders = []
    for arm, lr, seed in asked:
        argv = arguments(arms[arm], lr, seed)
        # The same run in two studies is done once, and a changed setting makes another run.
        folder = f"{runs}/{kit.digest(check_arguments(argv))}"
        folders.append(folder)
        # By folder: two arms may ask for the same run, and two processes must not write into one folder.
        commands[folder] = argv
    trained = kit.in_parallel(jobs, kit.train, commands, commands.values())
    for folder, argv, _ in zip(commands, commands.values(), trained):
        print(f"  {folder}: {' '.join(arg for arg in argv if arg.startswith('--'))}", flush=True)
    return [read_run(folder, *run) for folder, run in zip(folders, asked)]


def read_run(folder, arm, lr, seed):
    """
    One line of runs.jsonl from a finished run's log: its validation curve in bits per byte, and what it cost.

    tokens, val_bpb: lists, one entry for each validation. flops: of the whole run, forward and backward, by the model's
    own count. train_loss: nats per token. ValueError if the log lacks the last validation.
    """
    entries = plot.read_log(folder)
    validations = [e for e in entries if "val_bpb" in e]
    steps = [e for e in entries if "loss" in e]
    if not validations or not steps or validations[-1]["step"] != steps[-1]["step"]:
        raise ValueError(f"{folder}: log.jsonl does not end with a validation: "
                         "delete the folder and run the study again")
    config = read_json(f"{folder}/config.json")
    with torch.device("meta"):
        model = Apertus(ApertusConfig.of(config), seed=None)
        if config.get("ffn", "dense") != "dense":
            structured.build(model, config)
    end = validations[-1]
    # One batch says little about the training loss: the mean of the last twentieth does.
    last_steps = steps[-max(1, len(steps) // 20) :]
    # The gradients of fresh weights are large whatever the arm: the first tenth is left out.
    norms = [e["grad_norm"] for e in steps[len(steps) // 10 :]]
    return dict(
        arm=arm,
        lr=lr,
        seed=seed,
        size=size,
        parameters=model.num_params(),
        steps=len(steps),
        batch_tokens=steps[0]["tokens"],
        flops=model.flops_per_token(config["block_size"]) * end["tokens"],
        seconds=end["seconds"],
        tokens=[e["tokens"] for e in validations],
        val_bpb=[round(e["val_bpb"], 5) for e in validations],
        train_loss=round(statistics.fmean(e["loss"] for e in last_steps), 5),
        grad_norm_median=round(statistics.median(norms), 4),
        grad_norm_max=round(max(norms), 4),
        data_hash=config["data_hash"][:10],
    )


def run_study():
    """Each arm's learning rate by the search seed, then the reported seeds at it. Returns the lines of runs.jsonl."""
    searched = []
    best = dict.fromkeys(arms, lrs[0])
    if len(lrs) > 1:
        print(f"{study}: {len(arms)} arms x {len(lrs)} learning rates, seed {SEARCH_SEED}")
        searched = train_all([(arm, lr, SEARCH_SEED) for lr in lrs for arm in arms])
        best = best_lrs(searched)
    print(f"{study}: learning rates {best}; seeds 1 to {seeds}")
    return searched + train_all([
        (arm, best[arm], seed)
        for seed in range(1, seeds + 1)
        for arm in arms
    ])


# -----------------------------------------------------------------------------
# what the runs say


def final(run):
    """Validation of a run's last step, in bits per byte."""
    return run["val_bpb"][-1]


def by_arm(rows):
    """{arm: its runs}, both in the order of the rows."""
    groups = {}
    for row in rows:
        groups.setdefault(row["arm"], []).append(row)
    return groups


def best_lrs(searched):
    """{arm: the learning rate of its lowest final validation}, from the runs of the search seed."""
    return {arm: min(group, key=final)["lr"] for arm, group in by_arm(searched).items()}


def reported(rows):
    """{arm: its runs} without those of the search: what is compared."""
    return by_arm(row for row in rows if row["seed"] != SEARCH_SEED)


def differences(ours, theirs):
    """Runs of two arms -> what ours ends above theirs, in bits per byte, one number for each seed that both have."""
    return kit.differences(ours, theirs, final)


def paired(ours, theirs):
    """Runs of two arms -> (mean difference, half of its 95 % interval, p, n). Interval and p are nan for one seed."""
    d = differences(ours, theirs)
    return *student(d), len(d)


def holm(ps):
    """
    P-values of several comparisons -> the same, adjusted: the chance of any false one below alpha is at most alpha.

    The i-th smallest of n is multiplied by n - i + 1, and none may be smaller than the one before it (Holm 1979).
    """
    ps = np.array(ps)
    order = ps.argsort()
    times = np.arange(len(ps), 0, -1)
    ps[order] = np.maximum.accumulate(ps[order] * times).clip(max=1)
    return ps.tolist()


def mean_curve(group):
    """[(tokens, mean bits per byte over the seeds)] at the evaluations that all runs have."""
    curves = [dict(zip(r["tokens"], r["val_bpb"])) for r in group]
    shared = [t for t in curves[0] if all(t in curve for curve in curves)]
    return [(t, statistics.fmean(curve[t] for curve in curves)) for t in shared]


def share_of_tokens(curve, goal):
    """
    The share of its tokens after which a mean curve first is at or below `goal`; None if it never is.

    Between two evaluations the curve is taken to be a straight line.
    """
    before_t, before_y = curve[0]
    for t, y in curve:
        if y <= goal:
            if before_y > y:
                t = before_t + (t - before_t) * (before_y - goal) / (before_y - y)
            return t / curve[-1][0]
        before_t, before_y = t, y
    return None


def summary(rows, baseline):
    """
    One dict for each arm, the baseline first: what results.csv and table.md say.

    bpb, sd: mean and standard deviation over seeds of the last validation. difference, half_interval, p, p_holm:
    against the baseline, by seed. tokens_to_baseline: share_of_tokens until the baseline's last validation.
    lr_at_edge: the best learning rate is the lowest or the highest that was tried, so a better one may lie beyond.

    ValueError if the runs have different data, or if none is the baseline's.
    """
    hashes = {r["data_hash"] for r in rows}
    if len(hashes) > 1:
        raise ValueError(f"runs on different data ({', '.join(sorted(hashes))}) cannot be compared: "
                         "run the study again with one --data")
    groups = reported(rows)
    if baseline not in groups:
        raise ValueError(f"baseline={baseline!r} is no arm of the runs: there is {', '.join(groups)}")
    base = groups[baseline]
    goal = mean_curve(base)[-1][1]
    table = []
    for arm in sorted(groups, key=lambda arm: arm != baseline):
        group = groups[arm]
        first = group[0]
        tried = [r["lr"] for r in rows if r["arm"] == arm]
        edges = {min(tried), max(tried)}
        finals = [final(r) for r in group]
        mean, half, p, n = paired(group, base)
        table.append(dict(
            arm=arm,
            lr=first["lr"],
            lr_at_edge=first["lr"] in edges and len(edges) == 2,
            seeds=n,
            bpb=statistics.fmean(finals),
            sd=statistics.stdev(finals) if len(finals) > 1 else math.nan,
            difference=mean,
            half_interval=half,
            p=p,
            tokens_to_baseline=share_of_tokens(mean_curve(group), goal),
            train_loss=statistics.fmean(r["train_loss"] for r in group),
            grad_norm=statistics.median(r["grad_norm_median"] for r in group),
            grad_norm_max=max(r["grad_norm_max"] for r in group),
            parameters=first["parameters"],
            steps=first["steps"],
            tokens=first["tokens"][-1],
            flops=first["flops"],
            seconds=statistics.fmean(r["seconds"] for r in group),
        ))
    compared = table[1:]
    for row, p in zip(compared, holm([row["p"] for row in compared])):
        row["p_holm"] = p
    # The baseline is compared with nothing.
    table[0].update(difference=None, half_interval=None, p=None, tokens_to_baseline=1.0, p_holm=None)
    return table


# -----------------------------------------------------------------------------
# tables


def difference_md(row, p_holm):
    """A difference to the baseline as text: mean, 95 % interval, p alone and among all comparisons of the table."""
    if row["difference"] is None:
        return "baseline"
    if row["seeds"] < 2:
        return f"{row['difference']:+.4f} (one seed)"
    return f"{row['difference']:+.4f} ± {row['half_interval']:.4f} (p = {row['p']:.3f}, {p_holm:.3f})"


def reach_md(row):
    """The share of its tokens after which an arm is as good as the baseline at its end, as text."""
    share = row["tokens_to_baseline"]
    return "never" if share is None else f"{share:.0%}"


def table_md(rows):
    """
    The study as Markdown: what was run, a line for each arm, what was published, and how our numbers read.

    A pure function of the runs, so that a test can write it again from the committed ones and compare.
    """
    table = summary(rows, baseline)
    first = table[0]
    most_seeds = max(r["seeds"] for r in table)
    rates = sorted({r["lr"] for r in rows if r["seed"] == SEARCH_SEED})
    search = "One learning rate for all, not searched."
    if rates:
        search = (f"Each arm's learning rate is the best of {', '.join(f'{lr:g}' for lr in rates)} with seed "
                  f"{SEARCH_SEED}, which is not reported (* = at the edge of what was tried).")
    lines = kit.table(
        "| arm | lr | bits/byte, mean ± sd | against the baseline | tokens to its loss | parameters | train loss "
        "| gradient norm, median (max) | FLOPs | s |",
        (
            f"| {r['arm']} "
            f"| {r['lr']:g}{'*' if r['lr_at_edge'] else ''} "
            f"| {r['bpb']:.4f} ± {r['sd']:.4f} "
            f"| {difference_md(r, r['p_holm'])} "
            f"| {reach_md(r)} "
            f"| {r['parameters']:,} "
            f"| {r['train_loss']:.3f} "
            f"| {r['grad_norm']:.2f} ({r['grad_norm_max']:.1f}) "
            f"| {r['flops']:.2e} "
            f"| {r['seconds']:.0f} |"
            for r in table
        ))
    return "\n".join([
        f"# {study}",
        "",
        question,
        "",
        f"{first['parameters'] / 1e6:.2f}M parameters (baseline), "
        f"{first['steps']} steps of {rows[0]['batch_tokens']:,} tokens = {first['tokens'] / 1e6:.2f}M tokens, "
        f"{most_seeds} seeds. {search} Differences are paired by seed: mean ± half of the 95 % interval by Student's t "
        f"(p, and p by Holm for all {len(table) - 1} comparisons of this table).",
        "",
        *lines,
        "",
        f"Published: {published}",
        "",
        f"Reading: {reading or 'none written yet.'}",
        "",
        f"Command: `python -m studies.ablate configs/ablations/{study}.py "
        f"--seeds={most_seeds} --size={rows[0]['size']}`",
        "",
    ])


def finished_studies():
    """
    (name, its config file's values, its rows) of every study in `out`, by name. ValueError if there are none.

    A config file says what runs.jsonl does not: which arm is the baseline.
    """
    found = []
    for path in sorted(glob.glob(f"{out}/*/runs.jsonl")):
        name = os.path.basename(os.path.dirname(path))
        config = configurator.read_config(f"{ROOT}/configs/ablations/{name}.py")
        found.append((name, config, kit.read_rows(path)))
    if not found:
        raise ValueError(f"no studies in {out}: run one first, "
                         "python -m studies.ablate configs/ablations/activations.py")
    return found


def overview_md():
    """
    All studies as one Markdown table, a line for each arm against its baseline.

    Holm's p is over all of its lines, so it is larger here than in a study's own table.
    """
    found = []
    for name, config, rows in finished_studies():
        base = config["baseline"]
        found += [(name, base, row) for row in summary(rows, base)[1:]]
    adjusted = holm([row["p"] for _, _, row in found])
    return "\n".join(kit.table(
        "| study | against | seeds | bits/byte, paired difference ± 95 % interval (p, p by Holm) "
        "| tokens to the baseline's loss | parameters, tokens |",
        (
            f"| {name}: {row['arm']} "
            f"| {base} "
            f"| {row['seeds']} "
            f"| {difference_md(row, p_holm)} "
            f"| {reach_md(row)} "
            f"| {row['parameters'] / 1e6:.2f}M, {row['tokens'] / 1e6:.2f}M |"
            for (name, base, row), p_holm in zip(found, adjusted)
        ),
    )) + "\n"


# -----------------------------------------------------------------------------
# pictures


def draw(rows, picture):
    """Validation bits per byte over tokens, seeds thin and their mean bold; on the right the last third again."""
    groups = reported(rows)
    n_seeds = len(next(iter(groups.values())))
    figure, axes = plot.pyplot().subplots(1, 2, figsize=(10, 4.2), width_ratios=(3, 2))
    draw_curves(axes[0], groups, begin=0, margin=0.25)
    draw_curves(axes[1], groups, begin=2 / 3, margin=0.4)
    axes[0].set_title(f"{textwrap.fill(question, 64)}\n{n_seeds} seeds (thin), mean (bold)")
    axes[1].set_title("the last third")
    axes[0].set_ylabel("validation, bits per byte")
    plot.finish(figure, picture)


def draw_curves(axis, groups, begin, margin):
    """
    The curves of {arm: runs}, from a share `begin` of their tokens on, with each arm's name at the end of its line.

    The names stand in a margin on the right: `margin` times as wide as the curves.
    """
    other_colours = plot.pyplot().get_cmap("tab20").colors
    ends = []
    for n, (arm, group) in enumerate(groups.items()):
        colour = COLOURS.get(arm, other_colours[n % 20])
        mean = mean_curve(group)
        first = begin * mean[-1][0] - 1
        for r in group:
            curve = zip(r["tokens"], r["val_bpb"])
            draw_line(axis, curve, first, color=colour, alpha=0.35, linewidth=0.7)
        end = draw_line(axis, mean, first, color=colour, linewidth=2)
        ends.append((*end, arm, colour))
    low, high = axis.get_ylim()
    text_y = -math.inf
    for y, x, arm, colour in sorted(ends):
        # Names of lines that end close together stand one above the other.
        text_y = max(y, text_y + (high - low) * 0.05)
        axis.annotate(f" {arm} {y:.3f}", (x, y), (x, text_y),
                      color=colour, fontsize=9, va="center", annotation_clip=False)
    axis.grid(alpha=0.2)
    axis.set_xlabel("million tokens")
    left, right = axis.get_xlim()
    axis.set_xlim(left, right + (right - left) * margin)


def draw_line(axis, curve, first, **style):
    """A curve of (tokens, bits per byte) pairs from `first` tokens on. Returns its end (y, x)."""
    shown = [(t / 1e6, y) for t, y in curve if t >= first]
    x, y = zip(*shown)
    axis.plot(x, y, **style)
    return y[-1], x[-1]


# -----------------------------------------------------------------------------


def write_report(folder):
    """results.csv, table.md and plot.png of a study folder from its runs.jsonl. Returns the text of table.md."""
    rows = kit.rows_to_report(f"{folder}/runs.jsonl", "studies/ablate.py")
    table = summary(rows, baseline)
    path = f"{folder}/results.csv"
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(table[0])
        for row in table:
            writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in row.values())
    text = table_md(rows)
    kit.write(f"{folder}/table.md", text)
    draw(rows, f"{folder}/plot.png")
    return text


def main():
    if overview:
        path = f"{out}/overview.md"
        text = overview_md()
        kit.write(path, text)
        print(f"{text}\nwrote {path}")
        return
    if not study or baseline not in arms or len(arms) < 2:
        files = sorted(os.listdir(f"{ROOT}/configs/ablations"))
        there = ", ".join(file for file in files if file.endswith(".py"))
        raise ValueError("name a study, as in python -m studies.ablate configs/ablations/activations.py "
                         f"(there: {there}); it sets study, arms and a baseline among them")
    folder = f"{out}/{study}"
    if not report:
        if seeds < 1 or not lrs:
            raise ValueError(f"seeds={seeds}, lrs={lrs}: want at least one of each")
        kit.write_rows(f"{folder}/runs.jsonl", run_study())
    print(write_report(folder))


if __name__ == "__main__":
    configurator.run(main, globals())
