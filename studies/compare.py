"""
The results of a study, from its rows: a table, a verdict on each arm, and a page of Markdown.

    d_s = bits per byte (arm, seed s) - bits per byte (baseline, seed s)         s = 1 .. n

A verdict is one of four. With p by Holm below 0.05 an arm is better or worse. Else it is level if the 95 % interval
lies within +-LEVEL, and not decided if it does not: then the page says how many seeds would decide it.
"""

import hashlib
import math
import statistics

import numpy as np

from engine.intervals import student, t_quantile
from studies import kit

# A difference is level if its 95 % interval lies within +- LEVEL bits per byte: half a percent of a loss of 2.
LEVEL = 0.01

HEAD = """\
| arm | lr | seeds | bits/byte | against the baseline | tokens to its loss | tokens | parameters | CPU s |
|---|---|---|---|---|---|---|---|---|
"""
ROW = """\
| {arm} | {lr} | {seeds} | {bits_per_byte} | {against} | {tokens_to_loss} | {total:,} | {parameters:,} \
| {cpu_seconds} |
"""
PAGE = """\
# {name}

{finding}

Question: {question}

Seed 0 chooses each arm's learning rate and is not reported (* = the lowest or highest that was tried). ± is half of a \
95 % interval by Student's t over seeds, on one validation text{documents}. Differences are paired by seed, so their \
intervals are narrower (p, and p by Holm for all comparisons of this table). Tokens to its loss: the share of its \
tokens after which an arm reaches the baseline's last loss.

{table}
{conclusion}

Command: {command}. Size: {size}. Data: {data}.
"""


def final_bpb(row):
    """The last validation of a run, in bits per byte; infinite if the run has failed."""
    return math.inf if row.get("error") else row["val_bpb"][-1]


def reported_runs(rows):
    """
    {arm: {seed: row}} of the reported runs, the baseline first, without arms of which a run has failed. ValueError if
    the baseline is one of those, or an arm has other seeds or other tokens than the baseline.
    """
    names = list(dict.fromkeys(row["arm"] for row in rows))
    arms = {name: [row for row in rows if row["arm"] == name and row["seed"]] for name in names}
    arms = {name: runs for name, runs in arms.items() if runs and not list_failures(runs)}
    if names[0] not in arms:
        raise ValueError(" ".join(list_failures([row for row in rows if row["arm"] == names[0]])))
    for name, runs in arms.items():
        check_pairs(name, runs, names[0], arms[names[0]])
    return {name: {row["seed"]: row for row in runs} for name, runs in arms.items()}


def check_pairs(name, runs, baseline, baseline_runs):
    """ValueError if the runs of an arm have other seeds or other tokens than those of the baseline."""
    seeds, wanted = (sorted(row["seed"] for row in rows) for rows in (runs, baseline_runs))
    if seeds != wanted:
        raise ValueError(f"{name} has seeds {seeds}, {baseline} {wanted}: differences are of runs with the same seed")
    tokens = {row["seed"]: row["tokens"] for row in baseline_runs}
    if any(row["tokens"] != tokens[row["seed"]] for row in runs):
        raise ValueError(f"{name} was validated after other numbers of tokens than {baseline}: "
                         "differences are of runs of the same length")


def summarise(rows):
    """
    A dict for each arm, a line of table.md. The first arm is the baseline.

    bits_per_byte: mean and half of its 95 % interval over seeds, last validation. differences: from the baseline,
    by seed; student: their mean, half of its 95 % interval and its p-value. lr ends in * and `edge` is a word if it is
    the lowest or the highest that was tried, so a better one may lie beyond. curves: (seeds, n), of n validations.
    tokens_to_loss: the share of the tokens after which the lowest validation of their mean so far reaches the
    baseline's last one, by interpolation. cpu_seconds: the mean of a run as a text, "-" where rows have none.
    """
    table = []
    for arm, runs in reported_runs(rows).items():
        rates = [row["lr"] for row in rows if row["arm"] == arm]
        first = next(iter(runs.values()))
        tokens, lr = first["tokens"], first["lr"]
        edges = {min(rates): "lowest", max(rates): "highest"} if len({*rates}) > 1 else {lr: "only"}
        curves = np.array([runs[seed]["val_bpb"] for seed in sorted(runs)], float)      # (seeds, n)
        curve = curves.mean(0)
        lowest = np.minimum.accumulate(curve)
        ends = curves[:, -1]
        if not table:
            base, goal = ends, curve[-1]
        seconds = [run.get("cpu_seconds") for run in runs.values()]
        table.append(first | dict(
            against="" if table else "baseline",
            lr=f"{lr:g}{'*' if lr in edges else ''}",
            edge=edges.get(lr, ""),
            seeds=len(runs),
            bits_per_byte=kit.interval(ends, 4),
            differences=ends - base,
            student=student(ends - base),
            tokens_to_loss=f"{np.interp(-goal, -lowest, tokens) / tokens[-1]:.0%}" if lowest[-1] <= goal else "never",
            curves=curves,
            total=tokens[-1],
            cpu_seconds="-" if None in seconds else f"{statistics.fmean(seconds):.0f}"))
    return table


def table_md(table):
    """
    The rows of summarise() as a Markdown table, with Holm's p-values over all of its comparisons.

    Adds `p_holm` to each row that is no baseline, and two texts: `against`, a cell of the table, and `conclusion`, a
    sentence that compares it with the first row.
    """
    compared = [row for row in table if not row["against"]]
    for row, p_holm in zip(compared, kit.holm([row["student"][2] for row in compared])):
        difference, half, p = row["student"]
        row["p_holm"] = p_holm
        row["against"] = f"{difference:+.4f} ± {half:.4f} (p = {p:.3f}, {p_holm:.3f})"
        row["conclusion"] = (
            f"{row['seeds']} seeds, {row['parameters']:,} parameters, {row['total']:,} tokens: "
            f"{conclude(row['arm'], table[0]['arm'], difference, half, p_holm)} bits per byte. "
            f"{judge(row['differences'], p_holm)}")
    return HEAD + "".join(map(ROW.format_map, table))


def contrasts_of(table, contrasts):
    """
    The questions that a study has asked before its runs, as a list of dicts with `name`, `differences` and `student`.

    table: of summarise(). contrasts: {name: [arms, others]}, the sum of the last validations of arms minus that of
    others, for each seed: a difference of two arms, or with two arms on each side a difference of differences. Arms
    that have failed take their contrasts with them. Adds `conclusion` and `verdict`, by Holm over all contrasts.
    """
    ends = {row["arm"]: row["curves"][:, -1] for row in table}
    rows = [dict(name=name, differences=sum(ends[arm] for arm in arms) - sum(ends[arm] for arm in others))
            for name, (arms, others) in contrasts.items() if {*arms, *others} <= ends.keys()]
    for row in rows:
        row["student"] = student(row["differences"])
    for row, p_holm in zip(rows, kit.holm([row["student"][2] for row in rows])):
        difference, half, _ = row["student"]
        row["p_holm"] = p_holm
        row["verdict"] = judge(row["differences"], p_holm, ("Below zero.", "Above zero."))
        row["conclusion"] = (
            f"{row['name']}: {difference:+.3f} ± {half:.3f} bits per byte ({len(row['differences'])} seeds, "
            f"{table[0]['total']:,} tokens). {row['verdict']}")
    return rows


def contrasts_md(contrasts):
    """The contrasts as a Markdown table below that of the arms; "" without contrasts."""
    if not contrasts:
        return ""
    lines = [[row["name"], "{:+.4f} ± {:.4f}".format(*row["student"]), f"{row['student'][2]:.3f}, {row['p_holm']:.3f}",
              row["verdict"]] for row in contrasts]
    return "\n" + kit.table_md("| asked before the runs | bits/byte | p, by Holm | verdict |", lines)


def judge(differences, p_holm, words=("Better.", "Worse.")):
    """
    In words: better, worse, level, or not decided, with the number of seeds that would decide it if mean and spread
    stay. differences: by seed, in bits per byte. words: for a significant difference below and above zero.
    """
    mean, half, _ = student(differences)
    if p_holm < 0.05:
        return words[mean > 0]
    if abs(mean) + half <= LEVEL:
        return f"Level: the interval lies within ±{LEVEL} bits per byte."
    # The interval excludes 0 if its half is below |mean|; it lies within +-LEVEL if that is below LEVEL - |mean|.
    wanted = max(abs(mean), LEVEL - abs(mean))
    sd, n = statistics.stdev(differences), len(differences) + 1
    while t_quantile(n - 1) * sd / math.sqrt(n) >= wanted:
        n += 1
    return f"Not decided: if mean and spread stay as they are, {n} seeds decide it."


def list_failures(rows):
    """A sentence for each run that has failed."""
    return [f"{row['arm']} failed at lr {row['lr']:g}, seed {row['seed']}: {row['error']}"
            for row in rows if row.get("error")]


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


def describe_origin(rows, command):
    """
    {command, size, data, documents}: texts of the page, from the rows alone. Old rows have not recorded all of them:
    then the page says "not recorded", and names the command of today.
    """
    row = rows[-1]
    keys = ("command", "size", "data")
    texts = {key: f"`{' '.join(row[key].split())}`" if key in row else "not recorded" for key in keys}
    if "command" not in row:
        texts["command"] += f" (today: `{command}`)"
    if "data_hash" in row and "data" in row:
        texts["data"] += f" ({row['data_hash'][:10]})"
    # Older rows have no number; those of the committed studies are of data/stdlib.
    documents = row.get("val_documents", 25 if row.get("data", "data/stdlib") == "data/stdlib" else None)
    texts["documents"] = f" of {documents} documents" if documents else ""
    return texts


def hash_of(diff):
    """The sha256 of a diff, as sha256sum prints it for changes.diff."""
    return hashlib.sha256(diff.encode()).hexdigest()


def show_diff(diff, most=20):
    """The first lines of the diff of --code in Markdown, and its hash."""
    lines = diff.splitlines()
    if not lines:
        return ["The code is the same: no file that train.py imports differs."]
    rest = f"\n... {len(lines) - most} more lines in changes.diff" * (len(lines) > most)
    return [f"Its code, the diff with sha256 {hash_of(diff)[:16]}:",
            "\n".join(["```diff", *lines[:most]]) + f"{rest}\n```"]
