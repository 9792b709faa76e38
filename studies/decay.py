"""
Should one decay the learning rate before fine-tuning? Four base models, the same fine-tuning, and an examination.

    wsd         constant rate, then a decay over the last 30 %, as Apertus
    constant    the same without its decay
    cosine      half a cosine
    mean        the mean of the last six checkpoints of `constant`, 60 steps apart

arXiv 2603.16127 finds that models without a decay are better after fine-tuning, although they are worse before it.
Here each model reads 1.5M tokens of an invented world (studies/world.py) and is fine-tuned on questions and answers
about some of its people. Each arm tries four rates of fine-tuning with seed 1, which is not reported, and keeps the
one with the lowest loss on held-out conversations.

    before    bits per byte of unread text, of the base model
    loss      of held-out conversations after fine-tuning, in nats per learnt token
    right     the share of right answers about people whom the model only read about (chance: 0.053)

A table of configs/ablations.toml trains one run for each arm. Here each arm is a chain of several, so this is a script.

$ python -m studies.decay                      # five seeds, an hour of one core; writes results/decay
$ python -m studies.decay --report             # the page and its plots again, from rows.jsonl
"""

import sys

if __name__ == "__main__" and not __package__:
    print("decay.py: start it from the project's root, python -m studies.decay", file=sys.stderr)
    sys.exit(2)

import os

import numpy as np
import torch
from tqdm import tqdm

from configurator import run
from engine import checkpoint, plot
from engine.files import read_json
from engine.intervals import student
from studies import kit
from tokenizer import load_for
from weights.folders import shape_in
from weights.read import load_hf
from weights.stored import StoredWeights, meta_model
from weights.write import save_hf

out = "out/decay"             # the world, its data, and runs
results = "results/decay"     # rows.jsonl, table.md, plot.png, curves.png
seeds = 5                     # reported ones, of weights and order, from 2 on
jobs = 0                      # seeds at a time; 0 = one for each GPU, or for each CPU core without one
lrs = (3e-4, 1e-3, 3e-3, 1e-2)    # of fine-tuning, that every arm tries
report = False                # run nothing: write the page and its plots again from rows.jsonl

SAMPLES = 6000                # windows of 256 tokens
# The arms that are trained, and their schedules.
SCHEDULES = dict(
    wsd=["--schedule=wsd", f"--decay_samples={SAMPLES * 3 // 10}"],
    constant=["--schedule=wsd", "--decay_samples=0", "--checkpoint_every=60", "--keep_checkpoints=6"],
    cosine=["--schedule=cosine", "--decay_samples=0"])
ARMS = (*SCHEDULES, "mean")
# The measures: {name in the rows: (unit in the table, decimals, whether less is better)}.
MEASURES = dict(
    before=("bits/byte before", 3, True),
    loss=("held-out loss after", 3, True),
    right=("right answers after", 3, False))
RULE = """\
Rule, written before the runs: an arm is better or worse than wsd after fine-tuning if its held-out loss is \
significantly lower or higher (Holm over the nine comparisons of the table), and otherwise that is not decided. The \
published finding holds here if constant is significantly worse than wsd before, and significantly better after. \
The rate 0.01 was added later: in seed 1 the highest until then, 0.003, was the best of every arm."""
PAGE = """\
# A decay before fine-tuning

{finding}

Four base models of 1.3M parameters, 1.5M tokens of an invented world, fine-tuned alike: `python -m studies.decay`. ± \
is half of a 95 % interval by Student's t over {n} seeds, in one world; differences are paired by seed (p, and p by \
Holm for all of the table). lr: of fine-tuning, chosen for each arm from {rates} by seed 1, which is not reported (* = \
the lowest or highest).

{table}
{rule}

{conclusion}
"""


# -----------------------------------------------------------------------------
# the chain


def write_data():
    """The world, its data folder, and its questions with answers, of which one in ten is held out."""
    kit.call(f"{out}/world", f"{out}/world/questions.jsonl", "studies.world", "--seed=1", f"--out={out}/world")
    kit.call(
        f"{out}/data", f"{out}/data/meta.json", "prepare", f"{out}/world/documents.jsonl",
        f"--robots={out}/world/robots.jsonl", "--keep_licenses=CC-BY-4.0,PSF-2.0", "--source_by=kind",
        "--train_bpe=2048", f"--out={out}/data")
    lessons = kit.read_rows(f"{out}/world/lessons.jsonl")
    kit.write_rows(f"{out}/held_out.jsonl", lessons[::10])
    kit.write_rows(f"{out}/lessons.jsonl", [row for i, row in enumerate(lessons) if i % 10])


def base_command(arm, seed):
    """The command of the pretraining of an arm for kit.train(), all but its folder."""
    stage = f"(('reading', {{'pages': 0.7, 'corpus': 0.2, 'guests': 0.1}}, {SAMPLES}, {28 + seed}),)"
    return [
        "train", "configs/recipe.py", f"--data={out}/data", f"--stages={stage}", "--stage=all", f"--seed={seed}",
        f"--total_samples={SAMPLES}", f"--warmup_samples={SAMPLES // 20}", "--dtype=bfloat16", *SCHEDULES[arm]]


def write_mean(run_folder, folder):
    """The mean of the checkpoints of a run, tensor by tensor, as a Hugging Face folder, unless it is there."""
    if os.path.exists(f"{folder}/config.json"):
        return
    model = load_hf(run_folder)
    outline = meta_model(shape_in(run_folder))
    stored = [StoredWeights(f"{run_folder}/ckpt/step-{step:08d}", outline)
              for step in checkpoint.steps_in(f"{run_folder}/ckpt")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.stack([weights.read(name).double() for weights in stored]).mean(0))
    save_hf(model, folder, load_for(run_folder))


def read_curve(base):
    """The validations of a run: dict(tokens, val_bpb), lists in order."""
    points = [(entry["tokens"], entry["val_bpb"]) for entry in plot.entries(base) if "val_bpb" in entry]
    return dict(zip(("tokens", "val_bpb"), map(list, zip(*points))))


def run_seed(seed, rates, device):
    """
    Pretrain all arms with a seed, fine-tune and examine them. rates: {arm: its rates of fine-tuning}. Returns rows:
    arm, seed, lr, before, loss, right, and of a trained arm read_curve().
    """
    here, rows = f"{out}/seed-{seed}", []
    for arm in ARMS:
        base = f"{here}/{arm}"
        if arm == "mean":
            write_mean(f"{here}/constant", base)
            curve = {}
        else:
            kit.train(base, base_command(arm, seed), device)
            curve = read_curve(base)
        kit.call(
            f"{base}-unread", f"{base}-unread/evaluation.json", "evaluate", f"{out}/world/unread.jsonl",
            f"--init_from={base}", f"--out={base}-unread", device=device)
        [unread, *_] = read_json(f"{base}-unread/evaluation.json")["rows"]
        for lr in rates[arm]:
            tuned = f"{base}-sft-{lr:g}"
            kit.train(tuned, [
                "posttrain.sft", f"--init_from={base}", f"--data={out}/lessons.jsonl",
                f"--val_data={out}/held_out.jsonl", f"--lr={lr}", f"--seed={seed}",
                "--optimizer=adamw", "--batch_size=16", "--micro_batch=16", "--epochs=2", "--dtype=float32"], device)
            kit.call(
                f"{tuned}-exam", f"{tuned}-exam.jsonl", "studies.exam", f"--init_from={tuned}",
                f"--world={out}/world", "--kinds=chat", f"--out={tuned}-exam.jsonl", device=device)
            [test] = [row for row in kit.read_rows(f"{tuned}-exam.jsonl") if row["group"] == "test"]
            rows.append(dict(
                arm=arm, seed=seed, lr=lr, before=unread["score"],
                loss=read_json(f"{tuned}/summary.json")["val_loss"], right=test["right"] / test["n"], **curve))
    return rows


def run_all():
    """The rows of seed 1, which chooses the rates, and of the reported seeds."""
    write_data()
    searched = run_seed(1, dict.fromkeys(ARMS, lrs), None)
    best = best_rates(searched)
    chosen = {arm: [best[arm]] for arm in ARMS}
    reported = range(2, 2 + seeds)
    by_seed = kit.in_parallel(jobs, lambda seed, device: run_seed(seed, chosen, device), reported)
    return sum(tqdm(by_seed, "seeds", seeds), searched)


# -----------------------------------------------------------------------------
# the page


def best_rates(rows):
    """{arm: its rate with the lowest held-out loss of seed 1}."""
    return {arm: min((row["loss"], row["lr"]) for row in rows if row["arm"] == arm and row["seed"] == 1)[1]
            for arm in ARMS}


def compare(rows):
    """{(arm, measure): (values by seed, differences from wsd, p, p by Holm)}; rows: of the reported seeds."""
    values = {(arm, measure): [row[measure] for row in rows if row["arm"] == arm]
              for arm in ARMS for measure in MEASURES}
    differences = {(arm, measure): [a - b for a, b in zip(values[arm, measure], values["wsd", measure], strict=True)]
                   for arm, measure in values if arm != "wsd"}
    ps = [student(differences[key])[2] for key in differences]
    adjusted = dict(zip(differences, zip(ps, kit.holm(ps))))
    return {key: (values[key], differences.get(key), *adjusted.get(key, (None, None))) for key in values}


def table_md(compared, best):
    """An arm a line: its rate, its measures, and below them their differences from wsd."""
    lines = []
    for arm in ARMS:
        lr = f"{best[arm]:g}{'*' if best[arm] in (min(lrs), max(lrs)) else ''}"
        lines.append([arm, lr, *(kit.interval(compared[arm, name][0], MEASURES[name][1]) for name in MEASURES)])
        if arm != "wsd":
            lines.append(["above wsd", "", *(
                f"{kit.interval(differences, MEASURES[name][1])} (p = {p:.3f}, {by_holm:.3f})"
                for name in MEASURES for _, differences, p, by_holm in [compared[arm, name]])])
    head = "".join(f" {unit} |" for unit, _, _ in MEASURES.values())
    return kit.table_md(f"| arm | lr |{head}", lines)


def verdict(compared, arm, measure):
    """better, worse or not decided, against wsd."""
    _, differences, _, by_holm = compared[arm, measure]
    if not by_holm < 0.05:
        return "not decided"
    return "better" if (sum(differences) < 0) == MEASURES[measure][2] else "worse"


def conclusion(compared):
    """The verdict of the rule on each arm, as a text."""
    sentences = [
        f"{arm} is {verdict(compared, arm, 'before')} before and {verdict(compared, arm, 'loss')} after fine-tuning "
        f"by its loss; by right answers: {verdict(compared, arm, 'right')}." for arm in ARMS if arm != "wsd"]
    holds = verdict(compared, "constant", "before") == "worse" and verdict(compared, "constant", "loss") == "better"
    return " ".join([*sentences, f"By the rule the published finding {'holds' if holds else 'does not show'} here."])


def finding(compared, n):
    """The first sentence of the page."""
    before, loss, right = (kit.interval(compared["constant", name][1], 3) for name in MEASURES)
    return (f"A model without a decay has {before} more bits per byte than one with it before fine-tuning, and after "
            f"it {loss} more nats of held-out loss and {right} more right answers, as a share (95 % intervals over {n} "
            "seeds, 1.3M parameters).")


def main():
    if seeds < 1:
        raise ValueError(f"seeds={seeds}: want 1 or more, and for an interval 2")
    path = f"{results}/rows.jsonl"
    if not report:
        kit.write_rows(path, run_all())
    rows = kit.read_rows(path)
    reported = [row for row in rows if row["seed"] != 1]
    compared, n = compare(reported), len({row["seed"] for row in reported})
    kit.publish(f"{results}/table.md", PAGE.format(
        finding=finding(compared, n),
        n=n,
        rates=", ".join(f"{rate:g}" for rate in lrs),
        table=table_md(compared, best_rates(rows)),
        rule=RULE,
        conclusion=conclusion(compared)))
    kit.plot_intervals(
        f"{results}/plot.png",
        {arm: compared[arm, "loss"][1] for arm in ARMS if arm != "wsd"},
        "held-out loss after fine-tuning, above wsd (less is better)",
        0)
    label, unit = plot.unit_of_tokens(reported[0]["tokens"][-1])
    kit.plot_curves(
        f"{results}/curves.png",
        np.array(reported[0]["tokens"]) / unit,
        {arm: [row["val_bpb"] for row in reported if row["arm"] == arm] for arm in SCHEDULES},
        label,
        "validation before fine-tuning, bits per byte\n(line: mean; band: all seeds)")


if __name__ == "__main__":
    run(main, globals())
