"""
Alignment on a laptop, start to end: a small pretrained model -> SFT -> references -> QRPO, DPO, REBEL, SimPO.

The task has a reward that needs no judge. "Sum 27, first 4" wants digits that add up to 27, the first of them 4; how
many digits is free.

    reward = - |sum of the digits - 27|        - 30 if it is not digits, or begins otherwise;     exact match: reward 0

SFT learns from a sloppy teacher, who picks digits of about the right size and seldom hits the sum. Samples of the SFT
model, scored, are all that the losses get: the same pairs in the same order, no new samples. Each loss has the learning
rate and the beta, of twenty pairs, that gave the best reward on validation prompts (tuning.json, by the code at commit
ac03345). Those runs have a seed and references of their own; the seeds that are reported chose nothing.

What is measured, on test prompts that nothing was trained on or chosen by: reward, exact match, mean quantile among the
reference's completions, KL to the reference in nats (log pi - log ref over the policy's own samples), and length. And
for completions of the reference, log pi/ref against the target that QRPO's formula sets for them: correlation
("agreement") and root mean square difference in nats ("distance"). QRPO predicts where log-ratios land; the others
predict only which of two is larger. What came out: results/align/notes.md.

$ make align                          # or python -m studies.digits: it goes on where it was stopped
$ python sample.py --chat --init_from=out/align/qrpo-s0 --system="Answer with digits."
"""

import sys

if __name__ == "__main__" and not __package__:
    print("digits.py: start it from the project's root, python -m studies.digits", file=sys.stderr)
    sys.exit(2)

import json
import os
import re
import statistics
import time

import numpy as np
import torch
from tqdm import tqdm

import convert
from engine import plot
from generate import generate
from posttrain.losses import beta_log_z, correlation, effective_beta, optimum, quantile
from posttrain.references import sequence_logp, words
from studies import kit
from tokenizer import read_json

out = "out/align"                       # runs, data
results = "results/align"               # table.md, results.json, align.png
tuning = "results/align/tuning.json"    # learning rates and betas, and how each of a grid did on validation prompts
start = ""                              # a pretrained model: run folder, Hugging Face folder, hub name; "" = train one
methods = ""                            # some of METHODS, with commas; "" = all
seeds = 5                               # of references, pairs and their order; pretraining and SFT are done once
workers = 2                             # runs at a time, one thread each
n_conversations = 6000                  # of the sloppy teacher
n_refs = 16                             # samples of the SFT model per prompt
test_prompts = 60                       # of 360; as many more are for validation, and the others are trained on
samples = 8                             # per test prompt, to measure with
epochs = 3                              # over the pairs: one moves the log-ratios a third of the way

SYSTEM = "Answer with digits."
CHUNK = 64              # completions whose log-probs are computed at once

METHODS = ("qrpo", "dpo", "rebel", "simpo")


# -----------------------------------------------------------------------------
# the task


def reward(prompt, completion):
    """
    The graded reward of a text for the prompt "Sum 27, first 4": 0 for an exact match, -30 for what is no answer.

    posttrain/qrpo.py calls it, by --rewards=studies/digits.py.
    """
    total, first = map(int, re.findall(r"\d+", prompt))
    if not re.fullmatch(r"[0-9]+", completion) or completion[0] != str(first):
        return -30.0
    return -float(abs(sum(map(int, completion)) - total))


def tasks():
    """
    All (sum, first digit), shuffled, in three lists: trained on, validation, test.

    Learning rates and betas are chosen on the validation prompts, and nothing is on the test prompts.
    """
    every = [(total, first) for total in range(10, 50) for first in range(1, 10)]
    order = np.random.default_rng(0).permutation(len(every))
    shuffled = [every[i] for i in order]
    n = test_prompts
    return shuffled[: -2 * n], shuffled[-2 * n : -n], shuffled[-n:]


def question(total, first):
    """The messages that ask for a task."""
    return [
        dict(role="system", content=SYSTEM),
        dict(role="user", content=f"Sum {total}, first {first}"),
    ]


def teacher(rng, total, first):
    """
    A sloppy answer: 4 to 8 digits of about the right size, which is (total - first) / (n - 1) each, give or take 2.

    There are more digits where 8 nines would be too few.
    """
    rest = total - first
    fewest = 1 + -(-rest // 9)
    n = max(int(rng.integers(4, 9)), fewest)
    digits = rng.normal(rest / (n - 1), 2.0, n - 1)
    digits = digits.round().clip(0, 9).astype(int)
    return "".join(map(str, [first, *digits]))


def write_data():
    """The teacher's conversations for SFT, and the prompts for the losses."""
    rng = np.random.default_rng(1)
    train, _, _ = tasks()
    conversations = []
    for _ in range(n_conversations):
        task = train[rng.integers(len(train))]
        answer = dict(role="assistant", content=teacher(rng, *task))
        conversations.append(dict(messages=[*question(*task), answer]))
    kit.write_rows(f"{out}/conversations.jsonl", conversations)
    prompts = [dict(messages=question(*task)) for task in train]
    kit.write_rows(f"{out}/prompts.jsonl", prompts)


# -----------------------------------------------------------------------------
# the runs


def call(name, done, script, *args, threads=1):
    """kit.call into the folder `out`."""
    return kit.call(out, name, done, script, *args, threads=threads)


def pretrain_and_sft():
    """Returns the folder of the SFT model."""
    pretrained = start
    if not start:
        pretrained = f"{out}/pretrained"
        call("prepare", "data/align/meta.json", "prepare", "--out=data/align", "--tokenizer=apertus:1024")
        call(
            "pretrained", f"{pretrained}/summary.json", "train", "configs/align.py",
            f"--out={pretrained}",
            "--resume",
            threads=workers,
        )
    sft = f"{out}/sft"
    call(
        "sft", f"{sft}/hf/config.json", "posttrain.sft",
        f"--init_from={pretrained}",
        f"--data={out}/conversations.jsonl",
        f"--out={sft}",
        "--resume",
        "--epochs=2",
        "--batch_size=64",
        "--micro_batch=64",
        "--lr=1e-3",
        "--optimizer=adamw",
        "--max_length=128",
        threads=workers,
    )
    return sft


def align(runs, sft):
    """
    posttrain/qrpo.py for runs {name: (loss, lr, beta, seed)}.

    Runs of one seed share their references: the first of each seed makes them, before the others begin.
    """
    began = time.perf_counter()

    def one(name, device):
        loss, lr, beta, seed = runs[name]
        call(
            name, f"{out}/{name}/hf/config.json", "posttrain.qrpo",
            f"--init_from={sft}",
            f"--data={out}/prompts.jsonl",
            "--rewards=studies/digits.py",
            f"--out={out}/{name}",
            f"--references={out}/references-s{seed}",
            f"--seed={seed}",
            f"--n_refs={n_refs}",
            "--max_new_tokens=24",
            "--sample_batch=512",
            "--pairs_per_prompt=0",
            f"--epochs={epochs}",
            "--batch_size=16",
            "--micro_batch=16",
            f"--lr={lr}",
            "--optimizer=adamw",
            "--warmup=0.1",
            "--grad_clip=1.0",
            "--max_length=128",
            "--resume",
            f"--loss={loss}",
            f"--beta={beta}",
            f"--length_norm={loss == 'simpo'}",
            "--beta_max=0",
            "--gamma=0.1",
        )
        print(f"{name} after {time.perf_counter() - began:.0f} s", flush=True)

    # Reversed, so that of the names of a seed the first stays.
    first = {seed: name for name, (_, _, _, seed) in reversed(runs.items())}.values()
    others = [name for name in runs if name not in first]
    for names in (first, others):
        list(kit.in_parallel(workers, one, names))


def seconds(names):
    """{name: {"wall": seconds}} of those that were run from here."""
    records = {name: f"{out}/{name}.json" for name in names}
    return {
        name: {"wall": read_json(path)["wall"]}
        for name, path in records.items()
        if os.path.isfile(path)
    }


# -----------------------------------------------------------------------------
# measuring


def complete(model, tok, tests, n, seed):
    """
    n completions of each test prompt, by the seed.

    Returns a list of (prompt ids, completion ids), and their rewards (prompts, n) as a float64 tensor.
    """
    asked = [task for task in tests for _ in range(n)]
    prompts = [tok.chat(question(*task), add_generation_prompt=True)[1] for task in asked]
    end = tok.special["<|assistant_end|>"]
    generator = torch.Generator().manual_seed(seed)
    ids = generate(model, prompts, 24, stop=(end,), generator=generator)
    said = [(prompt, full[len(prompt) :]) for prompt, full in zip(prompts, ids)]
    rewards = []
    for task, (_, completion) in zip(asked, said):
        prompt = question(*task)[-1]["content"]
        rewards.append(reward(prompt, words(tok, completion)))
    return said, torch.tensor(rewards, dtype=torch.float64).view(-1, n)


@torch.no_grad()
def logp(model, said):
    """Log-probabilities of completions, in nats: a list of (prompt ids, completion ids) -> (len(said),) float64."""
    parts = [sequence_logp(model, said[i : i + CHUNK]) for i in range(0, len(said), CHUNK)]
    return torch.cat(parts).double()


def measure(runs, sft, tests, beta):
    """
    {name: numbers} of the SFT model and of runs {name: (loss, lr, beta, seed)}, on the prompts of `tests`.

    All are held against the same completions of the SFT model. beta: of the formula that log-ratios are compared with;
    a qrpo run is compared with the formula of its own beta.
    """
    reference, tok = convert.load_any(sft)
    ref_said, ref_rewards = complete(reference, tok, tests, n_refs, 1000)
    ref_logp = logp(reference, ref_said)                                     # (prompts * n_refs,)
    # Each completion's quantile among the other references of its prompt.
    q = quantile(ref_rewards.T, ref_rewards, loo=True).T.flatten()

    def one(name, device):
        loss, _, its_beta, _ = runs.get(name, ("sft", 0, beta, 0))
        b = effective_beta(q, 1.0, its_beta if loss == "qrpo" else beta, 0.0)
        target = (q - beta_log_z(b)) / b
        model, ratio = reference, torch.zeros_like(ref_logp)
        if name != "sft":
            model, _ = convert.load_any(f"{out}/{name}")
            ratio = logp(model, ref_said) - ref_logp
        said, rewards = complete(model, tok, tests, samples, 2000)
        kl = logp(model, said) - logp(reference, said)
        return dict(
            reward=rewards.mean().item(),
            exact=(rewards == 0).double().mean().item(),
            malformed=(rewards == -30).double().mean().item(),
            quantile=quantile(rewards.T, ref_rewards).mean().item(),
            kl=kl.mean().item(),
            length=statistics.fmean(len(y) for _, y in said),
            agreement=correlation(target, ratio),
            error=(ratio - target).square().mean().sqrt().item(),
            points=[[round(x, 4), round(y, 3)] for x, y in zip(q.tolist(), ratio.tolist())],
        )

    names = ["sft", *runs]
    # One thread for each model that is measured, as many models as `workers` at a time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measured = kit.in_parallel(workers, one, names)
    rows = dict(zip(names, tqdm(measured, "measuring", len(names), unit="model")))
    torch.set_num_threads(threads)
    return rows


def runs_of(method, rows):
    """The rows of a loss, one for each seed."""
    return [row for name, row in rows.items() if name.rpartition("-s")[0] == method]


# What table.md says of a model, and how it is printed.
COLUMNS = dict(
    reward=".2f",
    exact=".1%",
    quantile=".3f",
    kl=".2f",
    length=".2f",
    agreement=".2f",
    error=".2f",
)


def table(rows, beta):
    """Markdown: mean and, over seeds, standard deviation. beta: of the closed form's line."""
    lines = []
    for method in ["sft", *METHODS]:
        runs = [rows["sft"]] if method == "sft" else runs_of(method, rows)
        if not runs:
            continue
        cells = []
        for key, spec in COLUMNS.items():
            values = [r[key] for r in runs]
            if method == "sft" and key == "agreement":
                values = []     # All its log-ratios are 0.
            cells.append(kit.plus_minus(values, statistics.stdev, spec))
        lines.append(f"| {method} | {' | '.join(cells)} |")
    best = optimum(beta)
    lines.append(f"| closed form, beta {beta:g} | | | {best['quantile']:.3f} | {best['kl']:.2f} | | 1 | 0 |")
    head = "| | reward | exact match | mean quantile | KL (nats) | length | agreement | distance (nats) |"
    return "\n".join(kit.table(head, lines)) + "\n"


def draw(rows, beta, picture):
    """
    Left and middle: log-ratios of the reference's completions over the quantile of their reward, for QRPO and DPO.

    QRPO's formula says where they belong; the mean is over completions of one quantile. Right: reward over KL.
    """
    figure, axes = plot.pyplot().subplots(1, 3, figsize=(14, 4.4))
    t = np.linspace(0, 1, 50)
    for axis, method in zip(axes, ("qrpo", "dpo")):
        for n, row in enumerate(runs_of(method, rows)):
            x, y = np.array(row["points"]).T
            if n == 0:
                axis.scatter(x, y, s=5, alpha=0.25, color="C0", label="held-out completions, seed 0")
            levels = np.unique(x)
            means = [y[x == level].mean() for level in levels]
            axis.plot(levels, means, ".-", color="C0", lw=1, label="" if n else "mean, one line a seed")
        formula = f"(R_q - beta log Z) / beta, beta = {beta:g}"
        axis.plot(t, (t - beta_log_z(beta)) / beta, color="C3", label=formula)
        axis.set(
            title=f"{method.upper()}: log pi/ref of the reference's completions",
            xlabel="quantile of their reward",
            ylabel="log-ratio (nats)",
            ylim=(-9, 5),
        )
    for n, method in enumerate(METHODS):
        for k, row in enumerate(runs_of(method, rows)):
            axes[2].scatter(row["kl"], row["reward"], color=f"C{n}", label="" if k else method)
    axes[2].scatter(0, rows["sft"]["reward"], color="black", marker="x", label="sft")
    axes[2].set(
        title="reward on test prompts, one point a seed",
        xlabel="KL to the reference (nats)",
        ylabel="reward",
    )
    for axis in axes:
        axis.legend()
        axis.grid(alpha=0.2)
    plot.finish(figure, picture)


# -----------------------------------------------------------------------------


def main():
    began = time.perf_counter()
    names = methods.split(",") if methods else list(METHODS)
    if set(names) - set(METHODS) or not 1 <= test_prompts < 180:
        raise ValueError(f"methods={methods!r}, test_prompts={test_prompts}: "
                         f"there is {', '.join(METHODS)}; and 1 to 179 of 360 prompts")
    write_data()
    sft = pretrain_and_sft()
    print(f"pretrained and SFT after {time.perf_counter() - began:.0f} s", flush=True)
    chosen = read_json(tuning)["chosen"]
    lacks = {"qrpo", *names} - chosen.keys()
    if lacks:
        raise ValueError(f"{tuning} has no beta for {', '.join(sorted(lacks))}")
    runs = {
        f"{method}-s{seed}": (method, chosen[method]["lr"], chosen[method]["beta"], seed)
        for method in names
        for seed in range(seeds)
    }
    align(runs, sft)
    beta = chosen["qrpo"]["beta"]
    rows = measure(runs, sft, tasks()[2], beta)
    text = table(rows, beta)
    kit.write(f"{results}/table.md", text)
    draw(rows, beta, f"{results}/align.png")
    for row in rows.values():
        del row["points"]
    wall = seconds(["prepare", "pretrained", "sft", *runs])
    numbers = dict(rows=rows, chosen=chosen, seconds=wall)
    kit.write(f"{results}/results.json", json.dumps(numbers, indent=1))
    print(text + f"{time.perf_counter() - began:.0f} s; the picture: {results}/align.png")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
