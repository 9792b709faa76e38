"""
Does it help? Train a few arms that differ in one choice, on the same tokens, with several seeds each, and compare them.

    d_s = bits per byte (arm, seed s) - bits per byte (baseline, seed s)         s = 1 .. n

    mean d +- t sd d / sqrt(n), the 95 % interval of Student's t             p = P(|t_{n-1}| > |mean d| sqrt(n) / sd d)

Differences are paired by seed, because runs with the same seed share the order of the data and, where shapes agree, the
initial weights (model.py seeds each tensor by its name). Each arm searches the same learning rates and keeps its best:
an untuned baseline proves nothing. The search has seed 0, which is not reported, because the seed that chose a rate
flatters it. A table of eleven comparisons may contain a small p by chance, so each p is followed by its value after
Holm's correction for all comparisons of the table.

The learning rate always falls to a tenth of its peak. A run folder is named after the run's settings and the code that
trains it, so studies share runs, the same command skips finished runs and resumes stopped ones, and after a change of
model.py it trains all runs again, next to the old ones. Protocol: Apertus report (arXiv 2509.14233) sec. 2.4, Table 3,
which has one run for each arm; here the seeds show how much a difference means.

$ python -m studies.ablate swiglu xielu           # two or more arms: five minutes, a table, a plot, and a conclusion
$ python -m studies.ablate adamw ademamix --seeds=5
$ python -m studies.ablate activations            # a study of configs/ablations.toml: an hour, to results/ablations
$ python -m studies.ablate activations --report   # its table and plot again, from the committed runs.jsonl
$ python -m studies.ablate apertus --size=configs/laptop.py    # another size: any config of train.py
$ python -m studies.ablate --overview             # all studies in one table
"""

import sys

if __name__ == "__main__" and not __package__:
    print("ablate.py: start it from the project's root, python -m studies.ablate", file=sys.stderr)
    sys.exit(2)

import glob
import math
import os
import shlex
import statistics
import tomllib

import numpy as np
from safetensors import safe_open
from tqdm import tqdm

import configurator
import train
from data import read_meta
from engine import checkpoint, plot
from engine.files import read_json, read_text, sha256_of
from engine.intervals import student
from papers import structured_ffn
from studies import kit

paths = []                 # a study of configs/ablations.toml, or two or more arms: values of one setting in ARMS
seeds = 0                  # runs of each arm at its best learning rate; 0 = 5 for a study, 3 for arms
lrs = ()                   # peak learning rates that every arm tries; () = the study's
size = ""                  # a config of train.py, and flags: the model and the length of a run; "" = the study's
data = "data/stdlib"       # a folder of prepare.py
out = ""                   # where the study's folder is made; "" = results/ablations, or out/ablations for arms
runs = "out/ablations"     # run folders: logs and checkpoints, not for committing
jobs = 0                   # runs at a time; 0 = one for each GPU, or for each CPU core without one
report = False             # run nothing: write table and plot from runs.jsonl
overview = False           # run nothing: one table of all studies in results/ablations

STUDIES = tomllib.loads(read_text(f"{configurator.ROOT}/configs/ablations.toml"))
# Defaults of the studies there, each of which has a `question` and may have `published` results and our `reading`.
STUDY = dict(
    seeds=5, size="configs/ablations/size_laptop.py", out="results/ablations", lrs=[5e-4, 1e-3, 2e-3],
    data="data/stdlib", published="", reading="")
# The same of a comparison of arms, which need no study, and the setting of train.py of which they are values.
# 0.25M tokens, and not compiled: compiling takes longer than it saves in a run of a minute, 50 s a run on one core.
QUICK = STUDY | dict(
    seeds=3, out="out/ablations", lrs=[1e-3, 2e-3, 4e-3],
    size="configs/laptop.py --total_samples=960 --warmup_samples=48 --decay_samples=288 --eval_every=60 "
         "--sample_every=0 --checkpoint_every=0 --dtype=float32 --compile=False")
ARMS = dict(
    xielu="activation", swiglu="activation", gelu="activation", relu2="activation",
    ademamix="optimizer", adamw="optimizer",
    wsd="schedule", cosine="schedule")
# The script that trains an arm, and where its settings are: structured layers have a script of their own.
SCRIPTS = {
    "train": [train, train.shape],
    "papers.structured_ffn": [structured_ffn, train, train.shape],
}

HEAD = """\
| arm | lr | seeds | bits/byte, mean ± sd | against the baseline | tokens to its loss | tokens | parameters | s |
|---|---|---|---|---|---|---|---|---|
"""
ROW = """\
| {arm} | {lr} | {seeds} | {bits_per_byte} | {against} | {tokens_to_loss} | {total:,} | {parameters:,} \
| {seconds:.0f} |
"""
PAGE = """\
# {name}

{question}

Seed 0 chooses each arm's learning rate and is not reported (* = the lowest or highest that was tried). Differences \
are paired by seed: mean ± half of the 95 % interval by Student's t (p, and p by Holm for all comparisons of this \
table). Tokens to its loss: the share of its tokens after which an arm reaches the baseline's last loss.

{table}
{conclusion}

Command: `{command}`
"""


def choose_study():
    """
    The study on the command line, a dict: a table of configs/ablations.toml, or the arms to compare; its `name`, the
    `folder` of its results, and the `command` that makes them. ValueError if there is no such study.
    """
    name = "-".join(paths)
    settings = {ARMS.get(arm, arm) for arm in paths}
    if name in STUDIES:
        study = STUDY | STUDIES[name]
    elif len(settings) == 1 < len({*paths}):
        [setting] = settings
        arms = {arm: f"--{setting}={arm}" for arm in paths}
        study = QUICK | dict(question=f"{setting}: {' or '.join(paths)}?", arms=arms)
    else:
        raise ValueError(
            f"{' '.join(paths) or 'no name'}: there is no such study: name one of {', '.join(STUDIES)}, or two or more "
            f"values of {' or '.join(dict.fromkeys(ARMS.values()))}: python -m studies.ablate swiglu xielu")
    changes = {key: value for key, value in dict(seeds=seeds, lrs=lrs, size=size, data=data).items()
               if value and value != study[key]}
    if seeds == 1 or seeds < 0:
        raise ValueError(f"seeds={seeds}: want 2 or more, since an interval needs two; 0 = the study's")
    if changes:
        # Results by other settings than the committed ones get another folder, and no reading.
        study |= changes | dict(out=QUICK["out"], reading="")
    return study | dict(
        name=name,
        folder=f"{out or study['out']}/{name}",
        command=kit.command("studies.ablate", paths + [f"--{key}={value}" for key, value in changes.items()]))


# -----------------------------------------------------------------------------
# runs


def plan_run(study, sources, arm, lr, seed):
    """
    The folder of a run, named after all of its settings and its data, then after its sources, and its command: a list
    of script and arguments.

    sources: {script: its kit.read_sources()}. All runs have the same number of tokens, so the clock ends none of them.
    ValueError for a setting that the script does not have or a value of another type.
    """
    arm_args = study["arms"][arm].split()
    script = "papers.structured_ffn" if any(arg.startswith("--ffn=") for arg in arm_args) else "train"
    args = [
        *shlex.split(study["size"]), *arm_args, f"--lr={lr}", f"--min_lr={lr / 10}", f"--seed={seed}", f"--data={data}",
        "--minutes=0.0"]
    spaces = [dict(vars(space)) for space in SCRIPTS[script]]           # copies, which configure() changes
    configurator.configure(spaces, args)
    settings = configurator.settings(*spaces)
    return f"{runs}/{sha256_of([settings, read_meta(data)])[:10]}-{sha256_of(sources[script])[:6]}", [script, *args]


def count_parameters(folder):
    """
    The number of trained parameters of a run, from its newest checkpoint: structured layers are stored as factors, not
    as the dense matrices that convert.py would load.
    """
    newest = checkpoint.steps_in(f"{folder}/ckpt")[-1]
    total = 0
    for file in glob.glob(f"{folder}/ckpt/step-{newest:08d}/*.safetensors"):
        with safe_open(file, "pt") as tensors:
            weights = [name for name in tensors.keys() if name.startswith("model/")]
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in weights)
    return total


def report_changes(commands, sources):
    """
    Print a line if runs with the same settings are there that other sources have trained.

    commands: {folder: command}; sources: {script: its kit.read_sources()}.
    """
    earlier = {}
    for folder, (script, *_) in commands.items():
        records = glob.glob(f"{folder.rpartition('-')[0]}-*.json")
        if records and f"{folder}.json" not in records:
            newest = read_json(max(records, key=os.path.getmtime))
            earlier[folder] = kit.list_changes(sources[script], newest["sources"])
    if earlier:
        tqdm.write(f"{', '.join(sorted({*earlier.values()}))} changed after {len(earlier)} of these runs: "
                   f"they are trained again, and the old ones stay in {runs}")


def train_all(study, sources, wanted, bar):
    """
    Train each (arm, lr, seed) that is not finished yet, several at a time. Returns the rows of runs.jsonl in order:
    tokens and val_bpb have one entry for each validation, in bits per byte.

    ValueError if a setting does not exist, before the first run, if a script fails, or if its sources change while the
    study runs; finished runs stay finished.
    """
    plan = [plan_run(study, sources, *run) for run in wanted]
    # Two arms may want the same run, and two processes must not write into one folder.
    commands = dict(plan)
    report_changes(commands, sources)
    for _ in kit.in_parallel(jobs, kit.train, commands, commands.values()):
        bar.update()
    for folder, (script, *_) in commands.items():
        # The hashes that kit.train() took as the run began.
        if changes := kit.list_changes(sources[script], read_json(f"{folder}.json")["sources"]):
            raise ValueError(f"{changes} changed while the study ran: give the same command again")
    rows = []
    for (arm, lr, seed), (folder, _) in zip(wanted, plan):
        entries = [entry for entry in plot.entries(folder) if "val_bpb" in entry]
        rows.append(dict(
            arm=arm,
            lr=lr,
            seed=seed,
            tokens=[entry["tokens"] for entry in entries],
            val_bpb=[entry["val_bpb"] for entry in entries],
            parameters=count_parameters(folder),
            seconds=entries[-1]["seconds"]))
    return rows


def final_bpb(run):
    """The last validation of a run, in bits per byte."""
    return run["val_bpb"][-1]


def run_study(study):
    """Search each arm's learning rate, then train the reported seeds at it. Returns the rows of runs.jsonl."""
    arms, lrs = study["arms"], study["lrs"]
    sources = {script: kit.read_sources(script) for script in SCRIPTS}
    search = [(arm, lr, 0) for lr in lrs for arm in arms if len(lrs) > 1]
    reported = [(arm, seed) for seed in range(1, study["seeds"] + 1) for arm in arms]
    with tqdm(desc=study["name"], total=len(search + reported), unit="run", delay=1) as bar:
        searched = train_all(study, sources, search, bar)
        # Sorted from the worst to the best: of each arm's rates the dict keeps the last, which is the best.
        best = {row["arm"]: row["lr"] for row in sorted(searched, key=final_bpb, reverse=True)}
        chosen = [(arm, best.get(arm, lrs[0]), seed) for arm, seed in reported]
        return searched + train_all(study, sources, chosen, bar)


# -----------------------------------------------------------------------------
# tables


def summarise(rows):
    """
    A dict for each arm, a line of table.md. The first arm is the baseline.

    bits_per_byte: mean and standard deviation over seeds of the last validation. differences: from the baseline, by
    seed; student: their mean, half of its 95 % interval and its p-value. lr ends in * and `edge` is a word if it is the
    lowest or the highest that was tried, so a better one may lie beyond. curves: (seeds, n), of n validations.
    tokens_to_loss: the share of the tokens after which the lowest validation of their mean so far reaches the
    baseline's last one, by interpolation.
    """
    table = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        rates = [row["lr"] for row in rows if row["arm"] == arm]
        runs = [row for row in rows if row["arm"] == arm and row["seed"]]
        tokens, lr = runs[0]["tokens"], rates[-1]
        edges = {min(rates): "lowest", max(rates): "highest"} if len({*rates}) > 1 else {lr: "only"}
        curves = np.array([run["val_bpb"] for run in runs], float)      # (seeds, n)
        curve = curves.mean(0)
        lowest = np.minimum.accumulate(curve)
        ends = curves[:, -1]
        if not table:
            base, goal = ends, curve[-1]
        table.append(runs[0] | dict(
            against="" if table else "baseline",
            lr=f"{lr:g}{'*' if lr in edges else ''}",
            edge=edges.get(lr, ""),
            seeds=len(runs),
            bits_per_byte=kit.interval(ends, 4, statistics.stdev),
            differences=ends - base,        # by seed: the rows of each arm are in the order of seeds
            student=student(ends - base),
            tokens_to_loss=f"{np.interp(-goal, -lowest, tokens) / tokens[-1]:.0%}" if lowest[-1] <= goal else "never",
            curves=curves,
            total=tokens[-1],
            seconds=statistics.fmean(run["seconds"] for run in runs)))
    return table


def table_md(table):
    """
    The rows of summarise() as a Markdown table, with Holm's p-values over all of its comparisons.

    Adds two texts to each row that is no baseline: `against`, a cell of the table, and `conclusion`, a sentence that
    compares it with the first row.
    """
    compared = [row for row in table if not row["against"]]
    for row, p_holm in zip(compared, kit.holm([row["student"][2] for row in compared])):
        difference, half, p = row["student"]
        row["against"] = f"{difference:+.4f} ± {half:.4f} (p = {p:.3f}, {p_holm:.3f})"
        row["conclusion"] = (
            f"{row['seeds']} seeds, {row['parameters']:,} parameters, {row['total']:,} tokens: "
            f"{conclude(row['arm'], table[0]['arm'], difference, half, p_holm)} bits per byte.")
    return HEAD + "".join(map(ROW.format_map, table))


def list_edges(table):
    """A sentence for each row of summarise() whose learning rate has none that was tried on both sides."""
    return [f"{row['arm']}: {row['lr'].strip('*')} is the {row['edge']} learning rate that was tried, so a better one "
            "may lie beyond: name more with --lrs." for row in table if row["edge"]]


def conclude(arm, baseline, difference, half, p_holm):
    """The comparison of an arm with the baseline in words, without the unit. half: of the 95 % interval."""
    if p_holm < 0.05:
        return (f"{arm} is {'lower' if difference < 0 else 'higher'} than {baseline} "
                f"by {abs(difference) - half:.3f} to {abs(difference) + half:.3f}")
    return (f"no significant difference between {arm} and {baseline}: "
            f"the 95 % interval is {difference - half:+.3f} to {difference + half:+.3f}")


def overview_md(folder):
    """All studies in a folder as one table. ValueError if it has none."""
    table = [row | dict(arm=f"{name}: {row['arm']}") for name in STUDIES
             for path in glob.glob(f"{name}/runs.jsonl", root_dir=folder)
             for row in summarise(kit.read_rows(f"{folder}/{path}"))]
    if not table:
        raise ValueError(f"no studies in {folder}: run one first, python -m studies.ablate activations")
    return table_md(table)


def main():
    """
    Train the missing runs of a study, then write its table.md, plot.png and curves.png from runs.jsonl. --overview:
    write overview.md, all studies as one table, with Holm's p over all of its lines.
    """
    if overview:
        folder = out or STUDY["out"]
        return kit.publish(f"{folder}/overview.md", overview_md(folder))
    study = choose_study()
    folder = study["folder"]
    if not report:
        kit.write_rows(f"{folder}/runs.jsonl", run_study(study))
    baseline, *others = rows = summarise(kit.read_rows(f"{folder}/runs.jsonl"))
    table = table_md(rows)
    # The reading is that of the committed runs, and these are new.
    if study["reading"] and report:
        texts = {key: study[key] for key in ("published", "reading") if study[key]}
        conclusions = [" ".join(f"{key.title()}: {text}".split()) for key, text in texts.items()]
    else:
        conclusions = [row["conclusion"] for row in others] + list_edges(rows)
    kit.publish(f"{folder}/table.md", PAGE.format(**study, table=table, conclusion="\n\n".join(conclusions)))
    kit.plot_intervals(
        f"{folder}/plot.png",
        {row["arm"]: row["differences"] for row in others},
        f"bits per byte above {baseline['arm']} (less is better)",
        0)
    label, unit = plot.unit_of_tokens(baseline["tokens"][-1])
    kit.plot_curves(
        f"{folder}/curves.png",
        np.array(baseline["tokens"]) / unit,
        {row["arm"]: row["curves"] for row in rows},
        label,
        "validation, bits per byte\n(line: mean; band: all seeds)")
    print(f"wrote {folder}/table.md, plot.png and curves.png")


if __name__ == "__main__":
    configurator.run(main, globals())
