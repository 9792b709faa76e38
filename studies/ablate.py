"""
Does it help? A study is a few arms that differ in one choice, trained on the same tokens with several seeds each.

    d_s = bits per byte (arm, seed s) - bits per byte (baseline, seed s)         s = 1 .. n

    mean d +- t sd d / sqrt(n), the 95 % interval of Student's t             p = P(|t_{n-1}| > |mean d| sqrt(n) / sd d)

Runs of one seed share the order of the data and, where shapes agree, the initial weights (model.py seeds each tensor by its name), so
differences are taken pair by pair. Each arm searches the same learning rates with seed 0 and keeps its best: a baseline that is tuned
less than its rival proves nothing, and the seed that chose a rate flatters it, so seed 0 is not among those that are reported. Who
compares eleven arms finds a small p by chance: beside each p stands Holm's, which holds for all comparisons of a table together.

The floor is always a tenth of the peak. What is asked decides the name of a run's folder, so studies share the runs that they have in
common, finished runs are skipped, broken ones are resumed. Protocol: report sec. 2.4, Table 3 (arXiv 2509.14233), which has one run an
arm; here the seeds say what a difference is worth.

$ python -m studies.ablate configs/ablations/activations.py                       # a study: runs, results.csv, table.md, plot.png
$ python -m studies.ablate configs/ablations/activations.py --report              # tables and pictures again from the committed runs.jsonl
$ python -m studies.ablate configs/ablations/apertus.py --size=configs/laptop.py  # the same at another size: any config of train.py
$ python -m studies.ablate --overview                                             # every study in one table and one picture
"""

import sys

if __name__ == "__main__" and not __package__:
    print("ablate.py: start it from the project's root, python -m studies.ablate", file=sys.stderr)
    sys.exit(2)

import csv
import glob
import hashlib
import json
import math
import os
import queue
import runpy
import statistics
import subprocess
import textwrap
from concurrent.futures import ThreadPoolExecutor

import configurator
from configurator import ROOT
from engine import plot
from engine.intervals import p_value, t_quantile
from schedule import steps_in
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
jobs = 0                                    # runs at a time; 0 = one a GPU, or one a CPU core
report = False                              # run nothing: write table and pictures from runs.jsonl
overview = False                            # run nothing: one table and one picture of all studies in `out`

SEARCH_SEED = 0                             # chooses the learning rates, and is never reported
COLOURS = dict(apertus="C3", xielu="C3", ademamix="C3", wsd="C3", llama="C0", swiglu="C0", adamw="C0", cosine="C0", gelu="C1", relu2="C2")


# -----------------------------------------------------------------------------
# what a run is


def arguments(arm, lr, seed):
    """The command line of one run of train.py, without its folder. A config file goes before the flags, which win."""
    files, flags = ([arm], {}) if isinstance(arm, str) else ([], arm)
    flags = {**flags, "lr": lr, "lr_floor": lr / 10, "seed": seed, "data": data}
    return [size, *files, *(f"--{key}={value}" for key, value in flags.items())]


def check_arguments(argv):
    """Refuse a setting that train.py does not have, or a value of the wrong kind, before the first run. Returns the values asked for."""
    import train
    namespace = dict(vars(train))
    resolved = configurator.configure(namespace, argv)                      # ValueError with "did you mean"
    named = {arg[2:].split("=")[0] for arg in argv if arg.startswith("--")}
    for file in (arg for arg in argv if not arg.startswith("--")):
        named |= configurator.settings(runpy.run_path(configurator.config_file(file))).keys()
    return {key: resolved[key] for key in sorted(named - {"out"})}


def folder_of(asked):
    """What is asked decides the name, so the same run in two studies is done once, and a changed setting is another run."""
    return os.path.join(runs, hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:10])


def finished(folder):
    """Does the log end with the validation of the last step? What was written after it, a checkpoint, a picture, no study needs."""
    if not plot.has_log(folder) or not os.path.isfile(os.path.join(folder, "config.json")):
        return False
    try:
        config = read_json(os.path.join(folder, "config.json"))
    except ValueError:                                                      # cut by a full disk: train.py --resume writes it again
        return False
    last = (plot.read_log(folder) or [{}])[-1]
    return "val_bpb" in last and last["step"] + 1 == steps_in(config["total_samples"], config["batch_size"], config["batch_ramp_at"] or None)


def train_one(argv, folder, device):
    """Train, or go on with what was begun; nothing to do if it is finished. ValueError with train.py's own last line if it fails."""
    if finished(folder):
        return
    os.makedirs(folder, exist_ok=True)
    env = dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    if device is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(device)
    with open(os.path.join(folder, "output.txt"), "w", encoding="utf-8") as f:
        command = [sys.executable, os.path.join(ROOT, "train.py"), *argv, f"--out={folder}", "--resume"]
        code = subprocess.run(command, stdout=f, stderr=f, env=env).returncode
    if code:
        with open(os.path.join(folder, "output.txt"), encoding="utf-8") as f:
            last = (f.read().strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"train.py {' '.join(argv)} ended with code {code}: {last}. The same command tries again where it stopped")


def train_all(todo):
    """todo: list of (argv, folder). One run at a time on each GPU, or `jobs` of one thread each on the CPU."""
    import torch
    gpus = torch.cuda.device_count()
    width = jobs or gpus or os.cpu_count()
    devices = queue.Queue()
    for i in range(width):
        devices.put(i % gpus if gpus else None)

    def one(job):
        device = devices.get()
        try:
            train_one(*job, device)
        finally:
            devices.put(device)
            print(f"  {job[1]}: {' '.join(a for a in job[0] if a.startswith('--'))}", flush=True)

    with ThreadPoolExecutor(width) as pool:
        for _ in pool.map(one, {folder: (argv, folder) for argv, folder in todo}.values()):
            pass


def read_run(folder, arm, lr, seed):
    """One line of runs.jsonl from a finished run's log: its validation curve, and what it cost."""
    import inspect

    import torch

    from model import Apertus, ApertusConfig
    entries = plot.read_log(folder)
    val = [e for e in entries if "val_bpb" in e]
    steps = [e for e in entries if "loss" in e]
    if not val or not steps or val[-1]["step"] != steps[-1]["step"]:
        raise ValueError(f"{folder}: log.jsonl does not end with a validation: delete the folder and run the study again")
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    with torch.device("meta"):
        model = Apertus(ApertusConfig(**{name: config[name] for name in inspect.signature(ApertusConfig).parameters if name in config}))
    tail = steps[-max(1, len(steps) // 20):]
    warm = [e["grad_norm"] for e in steps[len(steps) // 10:]]               # the first steps' norms say nothing
    return dict(arm=arm, lr=lr, seed=seed, size=size, parameters=model.num_params(), steps=len(steps), batch_tokens=steps[0]["tokens"],
                flops=model.flops_per_token(config["block_size"]) * val[-1]["tokens"], seconds=val[-1]["seconds"],
                tokens=[e["tokens"] for e in val], val_bpb=[round(e["val_bpb"], 5) for e in val],
                train_loss=round(statistics.fmean(e["loss"] for e in tail), 5), grad_norm_median=round(statistics.median(warm), 4),
                grad_norm_max=round(max(warm), 4), data_hash=config["data_hash"][:10])


def run_study():
    """Each arm's learning rate by the search seed, then the reported seeds at it. Returns the lines of runs.jsonl."""
    def do(asked):
        """Train each (arm, lr, seed) that is not finished; returns their rows."""
        jobs = []
        for name, lr, seed in asked:
            argv = arguments(arms[name], lr, seed)
            jobs.append((argv, folder_of(check_arguments(argv))))
        train_all(jobs)
        return [read_run(folder, *run) for (_, folder), run in zip(jobs, asked)]

    searched, best = [], dict.fromkeys(arms, lrs[0])
    if len(lrs) > 1:
        print(f"{study}: {len(arms)} arms x {len(lrs)} learning rates, seed {SEARCH_SEED}")
        searched = do([(name, lr, SEARCH_SEED) for lr in lrs for name in arms])
        best = best_lrs(searched)
    print(f"{study}: learning rates {best}; seeds 1 to {seeds}")
    return searched + do([(name, best[name], seed) for seed in range(1, seeds + 1) for name in arms])


# -----------------------------------------------------------------------------
# what the runs say


def best_lrs(searched):
    """{arm: its learning rate of the lowest final validation}, from the runs of the search seed."""
    best = {}
    for r in searched:
        if r["arm"] not in best or r["val_bpb"][-1] < best[r["arm"]]["val_bpb"][-1]:
            best[r["arm"]] = r
    return {arm: r["lr"] for arm, r in best.items()}


def reported(rows):
    """{arm: its runs by seed}, without those of the search: what is compared."""
    groups = {}
    for r in sorted(rows, key=lambda r: r["seed"]):
        if r["seed"] != SEARCH_SEED:
            groups.setdefault(r["arm"], []).append(r)
    return {arm: groups[arm] for arm in dict.fromkeys(r["arm"] for r in rows)}


def differences(ours, theirs):
    """Runs of two arms -> what ours ends above theirs, in bits per byte, one number for each seed that both have."""
    base = {r["seed"]: r["val_bpb"][-1] for r in theirs}
    return [r["val_bpb"][-1] - base[r["seed"]] for r in ours if r["seed"] in base]


def paired(ours, theirs):
    """Runs of two arms -> (mean difference, half of its 95 % interval, p, n). The two in the middle are nan for one seed."""
    d = differences(ours, theirs)
    if len(d) < 2:
        return statistics.fmean(d) if d else math.nan, math.nan, math.nan, len(d)
    mean, error = statistics.fmean(d), statistics.stdev(d) / math.sqrt(len(d))
    t = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    return mean, t_quantile(len(d) - 1) * error, p_value(t, len(d) - 1), len(d)


def holm(ps):
    """
    The p-values of several comparisons -> the same, adjusted so that the chance of any false one below alpha is alpha (Holm 1979):
    the i-th smallest of n times n - i + 1, none smaller than the one before it.
    """
    adjusted, most = list(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        most = max(most, min(1.0, ps[i] * (len(ps) - rank)))
        adjusted[i] = most
    return adjusted


def mean_curve(group):
    """[(tokens, mean bits per byte over the seeds)] at the evaluations that all runs have."""
    everywhere = [t for t in group[0]["tokens"] if all(t in r["tokens"] for r in group)]
    return [(t, statistics.fmean(r["val_bpb"][r["tokens"].index(t)] for r in group)) for t in everywhere]


def share_of_tokens(curve, goal):
    """The share of its tokens after which a mean curve first is at or below `goal`, linear between evaluations; None if never."""
    before = None
    for t, y in curve:
        if y <= goal:
            if before and before[1] > y:
                t = before[0] + (t - before[0]) * (before[1] - goal) / (before[1] - y)
            return t / curve[-1][0]
        before = (t, y)
    return None


def summary(rows, baseline):
    """One dict an arm, the baseline first: what results.csv and table.md say."""
    hashes = {r["data_hash"] for r in rows}
    if len(hashes) > 1:
        raise ValueError(f"runs on different data ({', '.join(sorted(hashes))}) cannot be compared: run the study again with one --data")
    groups = reported(rows)
    if baseline not in groups:
        raise ValueError(f"baseline={baseline!r} is no arm of the runs: there is {', '.join(groups)}")
    base, table = groups[baseline], []
    for arm in sorted(groups, key=lambda a: a != baseline):
        group = groups[arm]
        final = [r["val_bpb"][-1] for r in group]
        rates = sorted({r["lr"] for r in rows if r["arm"] == arm})
        mean, half, p, n = paired(group, base)
        table.append(dict(
            arm=arm,
            lr=group[0]["lr"],
            lr_at_edge=len(rates) > 1 and group[0]["lr"] in (rates[0], rates[-1]),
            seeds=n,
            bpb=statistics.fmean(final),
            sd=statistics.stdev(final) if len(final) > 1 else math.nan,
            difference=None if arm == baseline else mean,
            half_interval=None if arm == baseline else half,
            p=None if arm == baseline else p,
            tokens_to_baseline=share_of_tokens(mean_curve(group), mean_curve(base)[-1][1]),
            train_loss=statistics.fmean(r["train_loss"] for r in group),
            grad_norm=statistics.median(r["grad_norm_median"] for r in group),
            grad_norm_max=max(r["grad_norm_max"] for r in group),
            parameters=group[0]["parameters"],
            steps=group[0]["steps"],
            tokens=group[0]["tokens"][-1],
            flops=group[0]["flops"],
            seconds=statistics.fmean(r["seconds"] for r in group)))
    for row, p in zip(table[1:], holm([row["p"] for row in table[1:]])):
        row["p_holm"] = p
    table[0].update(tokens_to_baseline=1.0, p_holm=None)
    return table


def difference_md(row, p_holm):
    """A difference to the baseline as text: mean, 95 % interval, p alone and among all comparisons of the table."""
    if row["seeds"] < 2:
        return f"{row['difference']:+.4f} (one seed)"
    return f"{row['difference']:+.4f} ± {row['half_interval']:.4f} (p = {row['p']:.3f}, {p_holm:.3f})"


def reach_md(share):
    return "never" if share is None else f"{share:.0%}"


def table_md(rows):
    """The study as Markdown. A pure function of the runs: a test writes it again from the committed ones and compares."""
    table = summary(rows, baseline)
    first, many = table[0], max(r["seeds"] for r in table)
    rates = sorted({r["lr"] for r in rows if r["seed"] == SEARCH_SEED})
    search = f"Each arm's learning rate is the best of {', '.join(f'{lr:g}' for lr in rates)} with seed {SEARCH_SEED}, which is not " \
             "reported (* = at the edge of what was tried)." if rates else "One learning rate for all, not searched."
    lines = [f"# {study}", "", question, "",
             f"{first['parameters'] / 1e6:.2f}M parameters (baseline), {first['steps']} steps of {rows[0]['batch_tokens']:,} tokens = "
             f"{first['tokens'] / 1e6:.2f}M tokens, {many} seeds. {search} Differences are paired by seed: mean ± half of the 95 % "
             f"interval by Student's t (p, and p by Holm for all {len(table) - 1} comparisons of this table).", "",
             "| arm | lr | bits/byte, mean ± sd | against the baseline | tokens to its loss | parameters | train loss "
             "| gradient norm, median (max) | FLOPs | s |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for r in table:
        lines.append("| " + " | ".join((
            r["arm"],
            f"{r['lr']:g}{'*' if r['lr_at_edge'] else ''}",
            f"{r['bpb']:.4f} ± {r['sd']:.4f}",
            "baseline" if r["difference"] is None else difference_md(r, r["p_holm"]),
            reach_md(r["tokens_to_baseline"]),
            f"{r['parameters']:,}",
            f"{r['train_loss']:.3f}",
            f"{r['grad_norm']:.2f} ({r['grad_norm_max']:.1f})",
            f"{r['flops']:.2e}",
            f"{r['seconds']:.0f}")) + " |")
    lines += ["", f"Published: {published}", "", f"Reading: {reading or 'none written yet.'}", "",
              f"Command: `python -m studies.ablate configs/ablations/{study}.py --seeds={many} --size={rows[0]['size']}`", ""]
    return "\n".join(lines)


def draw(rows, picture):
    """Validation bits per byte over tokens: thin seeds, bold mean, the arm's name at its line, the last third again beside it."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = reported(rows)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", width_ratios=(3, 2))
    for axis, whole in zip(axes, (True, False)):
        ends = []
        for n, (arm, group) in enumerate(groups.items()):
            colour = COLOURS.get(arm, plt.get_cmap("tab20")(n % 20))
            cut = 0 if whole else mean_curve(group)[-1][0] * 2 / 3 - 1
            for r in group:
                x, y = zip(*((t / 1e6, y) for t, y in zip(r["tokens"], r["val_bpb"]) if t >= cut))
                axis.plot(x, y, color=colour, alpha=0.35, linewidth=0.7)
            x, y = zip(*((t / 1e6, y) for t, y in mean_curve(group) if t >= cut))
            axis.plot(x, y, color=colour, linewidth=2)
            ends.append((y[-1], x[-1], arm, colour))
        low, high = axis.get_ylim()
        at = -math.inf
        for y, x, arm, colour in sorted(ends):                              # names one above the other where lines end close together
            at = max(y, at + (high - low) * 0.05)
            axis.annotate(f" {arm} {y:.3f}", (x, y), (x, at), color=colour, fontsize=9, va="center", annotation_clip=False)
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("million tokens")
        axis.set_xlim(right=axis.get_xlim()[1] + (axis.get_xlim()[1] - axis.get_xlim()[0]) * (0.25 if whole else 0.4))
    axes[0].set_ylabel("validation, bits per byte")
    axes[1].set_title("the last third", fontsize=10)
    axes[0].set_title(f"{textwrap.fill(question, 64)}\n{len(next(iter(groups.values())))} seeds (thin), mean (bold)", fontsize=10)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def write_report(folder):
    """results.csv, table.md and plot.png of a study folder from its runs.jsonl."""
    path = os.path.join(folder, "runs.jsonl")
    if not os.path.isfile(path):
        raise ValueError(f"no {path}: run the study first, without --report")
    with open(path, encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    table = summary(rows, baseline)
    with open(os.path.join(folder, "results.csv"), "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in table)
    text = table_md(rows)
    with open(os.path.join(folder, "table.md"), "w", encoding="utf-8") as f:
        f.write(text)
    draw(rows, os.path.join(folder, "plot.png"))
    return text


def finished_studies():
    """(name, its config file's values, its rows) of every study in `out`, by name."""
    found = []
    for path in sorted(glob.glob(os.path.join(out, "*", "runs.jsonl"))):
        name = os.path.basename(os.path.dirname(path))
        with open(path, encoding="utf-8") as f:
            rows = [json.loads(line) for line in f]
        found.append((name, runpy.run_path(os.path.join(ROOT, "configs", "ablations", name + ".py")), rows))
    if not found:
        raise ValueError(f"no studies in {out}: run one first, python -m studies.ablate configs/ablations/activations.py")
    return found


def overview_md():
    """All studies as one Markdown table, a line for each arm against its baseline: the README's. p is Holm's, over all lines."""
    found = [(name, config["baseline"], row) for name, config, rows in finished_studies()
             for row in summary(rows, config["baseline"])[1:]]
    lines = ["| study | against | seeds | bits/byte, paired difference ± 95 % interval (p, p by Holm) | tokens to the baseline's loss "
             "| parameters, tokens |",
             "|---|---|---|---|---|---|"]
    for (name, base, r), p_holm in zip(found, holm([r["p"] for _, _, r in found])):
        lines.append("| " + " | ".join((
            f"{name}: {r['arm']}",
            base,
            str(r["seeds"]),
            difference_md(r, p_holm),
            reach_md(r["tokens_to_baseline"]),
            f"{r['parameters'] / 1e6:.2f}M, {r['tokens'] / 1e6:.2f}M")) + " |")
    return "\n".join(lines) + "\n"


def draw_overview(picture):
    """All studies in one picture: each arm's difference to its baseline, a dot a seed, a bar for the 95 % interval of the mean."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = []
    for _, config, rows in finished_studies():
        groups, base = reported(rows), config["baseline"]
        lines += [(f"{arm} against {base}", group, groups[base]) for arm, group in groups.items() if arm != base]
    figure, axis = plt.subplots(figsize=(8, 1 + 0.42 * len(lines)), layout="constrained")
    for y, (label, ours, theirs) in enumerate(reversed(lines)):
        d = differences(ours, theirs)
        mean, half, _, n = paired(ours, theirs)
        if n > 1:
            axis.plot([mean - half, mean + half], [y, y], color="grey", linewidth=5, alpha=0.35, solid_capstyle="butt")
        axis.plot(d, [y] * len(d), "o", color="C3" if mean > 0 else "C0", markersize=4)
        axis.plot([mean], [y], "|", color="black", markersize=13)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(lines)), [label for label, _, _ in reversed(lines)], fontsize=9)
    axis.set_xlabel("bits per byte against the baseline, same seed (left: better than it)\na dot a seed; bar: 95 % interval of the mean", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main():
    if overview:
        text = overview_md()
        with open(os.path.join(out, "overview.md"), "w", encoding="utf-8") as f:
            f.write(text)
        draw_overview(os.path.join(out, "overview.png"))
        print(f"{text}\nwrote {os.path.join(out, 'overview.md')} and overview.png")
        return
    if not study or baseline not in arms or len(arms) < 2:
        have = ", ".join(sorted(os.path.basename(p) for p in glob.glob(os.path.join(ROOT, "configs", "ablations", "*.py"))))
        raise ValueError(f"name a study, as in python -m studies.ablate configs/ablations/activations.py (there: {have}); "
                         "it sets study, arms and a baseline among them")
    folder = os.path.join(out, study)
    if not report:
        if seeds < 1 or not lrs:
            raise ValueError(f"seeds={seeds}, lrs={lrs}: want at least one of each")
        for name in arms:
            for lr in lrs:
                check_arguments(arguments(arms[name], lr, 1))
        rows = run_study()
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "runs.jsonl"), "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
    print(write_report(folder))


if __name__ == "__main__":
    configurator.run(main, globals())
