"""
Alignment on a laptop, start to end: a small pretrained model -> SFT -> references -> QRPO, DPO, REBEL, SimPO.

The task has a reward that needs no judge. "Sum 27, first 4" asks for digits that add up to 27, the first of them 4; how
many digits is free.

    reward = - |sum of the digits - 27|        - 30 if it is not digits, or begins otherwise;     exact match: reward 0

SFT learns from a sloppy teacher, whose digits are of about the right size and seldom hit the sum. The losses get only
samples of the SFT model and their rewards: the same pairs in the same order, no new samples. Each loss has the learning
rate and the beta, of twenty pairs, that gave the best reward on validation prompts (tuning.json, by the code at commit
ac03345). The tuning runs have another seed and other references than the reported ones.

Measured on test prompts, which were used neither to train nor to tune: reward, exact match, mean quantile among the
reference's completions, KL to the reference in nats (log pi - log ref over the policy's own samples), and length. And
for completions of the reference, log pi/ref against the target of QRPO's formula: correlation ("agreement") and root
mean square difference in nats ("distance"). QRPO predicts where log-ratios land; the others predict only which of two
is larger. The results and their reading: results/align/notes.md. Losses: posttrain/qrpo.py, arXiv 2507.08068.

$ make align                          # or python -m studies.align: resumes where it was stopped
$ python -m studies.align --report    # table and plot again, from results.json
$ python sample.py --chat --init_from=out/align/qrpo-s0 --system="Answer with digits."
"""

import sys

if __name__ == "__main__" and not __package__:
    print("align.py: start it from the project's root, python -m studies.align", file=sys.stderr)
    sys.exit(2)

import itertools
import json
import re

import numpy as np
import torch
from tqdm import tqdm

from chat import prompt_ids
from configurator import run
from engine.files import read_json
from generate import generate
from posttrain.losses import beta_log_z, correlation, quantile
from scoring import sequence_logp
from studies import kit
from weights.read import load_any

out = "out/align"                       # runs, data
results = "results/align"               # results.json, table.md, align.png
tuning = "results/align/tuning.json"    # the chosen rates and betas, and the validation results of the whole grid
start = ""                              # a pretrained model: run folder, Hugging Face folder, hub name; "" = train one
seeds = 5                               # each with its references, pairs and order; pretraining and SFT are done once
workers = 2                             # runs at a time, one thread each
n_conversations = 6000                  # answers of the sloppy teacher
n_refs = 16                             # samples of the SFT model per prompt
test_prompts = 60                       # of 360 prompts; 60 others are for validation, the rest for training
samples = 8                             # samples per test prompt, for the measurements
report = False                          # run nothing: table and plot again from results.json

# Two layers on the source of the standard library: a minute or two on two cores.
PRETRAINING = [
    "train", "configs/recipe.py", "--block_size=128", "--n_layer=2", "--ffn_dim=512", "--goldfish_k=0",
    "--batch_size=16", "--micro_batch=16", "--total_samples=9600", "--warmup_samples=480", "--decay_samples=2880",
    "--grad_clip=0.1", "--eval_every=300", "--checkpoint_every=600"]
SFT = [
    "posttrain.sft", "--epochs=2", "--batch_size=64", "--micro_batch=64", "--lr=1e-3", "--optimizer=adamw",
    "--max_length=128", "--val_share=0"]
# Three passes over the pairs: after one, the log-ratios have made a third of their change.
QRPO = [
    "posttrain.qrpo", "--rewards=studies/align.py", "--max_new_tokens=24", "--sample_batch=512", "--pairs=all",
    "--epochs=3", "--batch_size=16", "--micro_batch=16", "--optimizer=adamw", "--warmup=0.1", "--grad_clip=1.0",
    "--max_length=128", "--gamma=0.1"]


# -----------------------------------------------------------------------------
# the task


def reward(prompt, completion):
    """The reward of a text for the prompt "Sum 27, first 4": 0 for an exact match, -30 if it is no answer."""
    total, first = map(int, re.findall(r"\d+", prompt))
    if not re.fullmatch(f"{first}[0-9]*", completion):
        return -30.0
    return -float(abs(sum(map(int, completion)) - total))


def task_row(total, first, *answer):
    """A task as a row: for QRPO, or for SFT if it has an answer."""
    return kit.conversation("Answer with digits.", f"Sum {total}, first {first}", *answer)


def teacher(rng, total, first):
    """
    A sloppy answer: 4 to 8 digits of about the right size, which is (total - first) / (n - 1) each, give or take 2.

    There are more digits if that many nines would be too few.
    """
    rest = total - first
    n = max(rng.integers(4, 9), 1 - rest // -9)
    digits = rng.normal(rest / (n - 1), 2, n - 1).round().clip(0, 9).astype(int)
    return f"{first}{''.join(map(str, digits))}"


def write_data():
    """The teacher's conversations for SFT, the prompts for the losses, and the test prompts."""
    tasks = np.random.default_rng(0).permutation([*itertools.product(range(10, 50), range(1, 10))]).tolist()
    train = tasks[:-2 * test_prompts]
    rng = np.random.default_rng(1)
    drawn = (train[rng.integers(len(train))] for _ in range(n_conversations))
    kit.write_rows(f"{out}/conversations.jsonl", (task_row(*task, teacher(rng, *task)) for task in drawn))
    kit.write_rows(f"{out}/prompts.jsonl", itertools.starmap(task_row, train))
    kit.write_rows(f"{out}/test.jsonl", itertools.starmap(task_row, tasks[-test_prompts:]))


# -----------------------------------------------------------------------------
# the runs


def train_reference():
    """Pretrain a small model, unless there is a `start`, and fine-tune it on the teacher's answers."""
    if not start:
        kit.call(f"{out}/data", f"{out}/data/meta.json", "prepare", f"--out={out}/data", "--tokenizer=apertus:1024")
        kit.train(f"{out}/pretrained", [*PRETRAINING, f"--data={out}/data"])
    pretrained = start or f"{out}/pretrained"
    kit.train(f"{out}/sft", [*SFT, f"--init_from={pretrained}", f"--data={out}/conversations.jsonl"])


def align(seed, device):
    """Train a run for each loss. The first one samples the references, which the others share."""
    for loss, chosen in read_json(tuning)["chosen"].items():
        kit.train(f"{out}/{loss}-s{seed}", [
            *QRPO, f"--init_from={out}/sft", f"--data={out}/prompts.jsonl", f"--references={out}/references-s{seed}",
            f"--n_refs={n_refs}", f"--seed={seed}", f"--loss={loss}", f"--length_norm={loss == 'simpo'}",
            f"--lr={chosen['lr']}", f"--beta={chosen['beta']}"], device)


# -----------------------------------------------------------------------------
# measuring


def complete(model, tok, n, seed):
    """
    n completions of each test prompt, sampled with this seed.

    Returns a list of (prompt ids, completion ids), and their rewards (prompts, n) as a float64 tensor.
    """
    tasks = [row for row in kit.read_rows(f"{out}/test.jsonl") for _ in range(n)]
    prompts = [prompt_ids(tok, row) for row in tasks]
    torch.manual_seed(seed)
    texts = generate(model, prompts, 24, stop=(tok.id_of("<|assistant_end|>"),))
    completions = [(prompt, ids[len(prompt):]) for prompt, ids in zip(prompts, texts)]
    rewards = [reward(row["messages"][1]["content"], tok.words(ids)) for row, (_, ids) in zip(tasks, completions)]
    return completions, torch.tensor(rewards, dtype=float).view(-1, n)


@torch.no_grad()
def measure():
    """{run: its numbers}, the SFT model included. All log-ratios are of the same completions of the SFT model."""
    chosen = read_json(tuning)["chosen"]
    beta = chosen["qrpo"]["beta"]
    reference, tok = load_any(f"{out}/sft")
    ref_completions, ref_rewards = complete(reference, tok, n_refs, 1000)
    ref_logp = sequence_logp(reference, ref_completions)
    # The log-ratios of QRPO's formula, (prompts * n_refs,), from the quantiles among the prompt's other references.
    target = (quantile(ref_rewards.T, ref_rewards, loo=True).T.flatten() - beta_log_z(beta)) / beta
    rows = {}
    for name in tqdm(["sft", *(f"{loss}-s{seed}" for loss in chosen for seed in range(seeds))], "measuring"):
        model, _ = load_any(f"{out}/{name}")
        completions, rewards = complete(model, tok, samples, 2000)
        ratio = sequence_logp(model, ref_completions).double() - ref_logp
        numbers = dict(
            reward=rewards,
            exact=rewards == 0,
            malformed=rewards == -30,
            quantile=quantile(rewards.T, ref_rewards),
            kl=sequence_logp(model, completions) - sequence_logp(reference, completions),
            length=[len(completion) for _, completion in completions],
            agreement=correlation(target, ratio),
            error=(ratio - target).square().mean().sqrt(),
        )
        rows[name] = {key: torch.as_tensor(values, dtype=float).mean().item() for key, values in numbers.items()}
    return rows


def main():
    path = f"{results}/results.json"
    if seeds < 1:
        raise ValueError(f"--seeds={seeds}: want at least 1")
    if not report:
        write_data()
        train_reference()
        list(tqdm(kit.in_parallel(workers, align, range(seeds)), "seeds", seeds))
        kit.write(path, json.dumps(dict(rows=measure()), indent=1))
    runs = kit.group((name.split("-")[0], key, value) for name, row in read_json(path)["rows"].items()
                     for key, value in row.items())
    rewards = {loss.upper(): numbers["reward"] for loss, numbers in runs.items()}
    kit.plot_intervals(
        f"{results}/align.png",
        rewards,
        "reward on test prompts: 0 for the right sum, -1 for each unit off (line: SFT alone)",
        *rewards["SFT"])
    gains = {loss: kit.interval(np.subtract(numbers["reward"], runs["sft"]["reward"]), 3)
             for loss, numbers in runs.items() if loss != "sft"}
    listed = ", ".join(f"{gain} by {loss.upper()}" for loss, gain in gains.items())
    n = max(len(numbers["reward"]) for numbers in runs.values())
    lead = f"Reward gained over SFT, mean ± half of the 95 % interval over {n} seeds of one model: {listed}."
    kit.publish(f"{results}/table.md", f"{lead}\n\n" + kit.pivot("| ± 95 % over seeds", runs.items(), 3))


if __name__ == "__main__":
    run(main, globals())
