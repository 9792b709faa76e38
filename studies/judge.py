"""
What a judge's probabilities add to its words: a small judge that was taught a known rule, asked as Apertus' judge was.

No model of this size reads a charter. What it can show is the arithmetic of posttrain/charter.py where the truth is
known. Answers are made of sentences with a weight each ("Ask a doctor." +1.1, "You are stupid." -1.7, most 0), their
quality q is the sum. A sloppy teacher rates them, round(5 + q + noise), and compares pairs, but likes what stands
first: A with probability sigmoid(1.2 (q_a - q_b) + 0.55). A model without pretraining learns that from posttrain/sft.py
in the very prompts of posttrain/charter.py, and then judges new answers.

    weighted score | most probable digit    ties, pair accuracy (a tie counts half), Spearman's rank correlation with q
    both orders | one order                 how often the better of a pair wins, of all pairs and of close ones

The rule is ours, and the sentences of the test occur in training: no value was learnt here. It goes on where it was
stopped; what came out: results/judge/table.md.

$ python -m studies.judge                 # one seed, a quarter of an hour on a core
$ python -m studies.judge --seeds=3
"""

import sys

if __name__ == "__main__" and not __package__:
    print("judge.py: start it from the project's root, python -m studies.judge", file=sys.stderr)
    sys.exit(2)

import itertools
import json
import os
import statistics

import numpy as np
import torch
from tqdm import tqdm

import convert
import tokenizer
from chat import question_and_answer
from configurator import run
from model import Apertus, ApertusConfig
from posttrain import charter
from studies import kit
from tokenizer import read_json

out = "out/judge"               # data and runs
results = "results/judge"       # table.md, results.json
seeds = 1                       # 0, 1, ...: of the data, the initial weights and the order
jobs = 0                        # judges taught at a time; 0 = one for each GPU, or for each CPU core without one
rows = 22400                    # that the judge learns from, half ratings and half pairs
prompts = 150                   # that it judges
answers = 10                    # of each
epochs = 1
batch_size = 32                 # conversations per step
lr = 1e-3
n_embd = 96                     # width of the judge
n_layer = 3

# The rule: what each sentence is worth.
SENTENCES = {
    "Ask a doctor.": 1.1,
    "I may be wrong.": 0.9,
    "Here is why.": 0.8,
    "Both sides have a point.": 0.7,
    "It depends on you.": 0.4,
    "That is a good question.": 0.2,
    "It is Monday.": 0.0,
    "There are many.": 0.0,
    "Some say so.": 0.0,
    "Let us see.": 0.0,
    "Never mind.": -0.3,
    "Everybody knows that.": -0.6,
    "Trust me.": -0.8,
    "I will not answer.": -1.0,
    "Do not ask a doctor.": -1.3,
    "You are stupid.": -1.7,
}
TOPICS = "sleep money work music school rain trains bread cats votes".split()
# Of the teacher: the spread of a rating, in points; what the first place is worth, in nats; and a point, in nats.
NOISE = 0.8
FIRST = 0.55
SHARP = 1.2
CLOSE = 0.5             # a pair whose qualities differ by less is close
CHARTER = "Be kind and honest."
VOCABULARY = "apertus:4096"


# -----------------------------------------------------------------------------
# the rule and its teacher


# Rating and comparing are asked for in the prompts of posttrain/charter.py, word for word: the judge has never seen
# another text, and would not understand one.


def answer(rng):
    """Two to five sentences, and their quality."""
    chosen = rng.choice(list(SENTENCES), rng.integers(2, 6), replace=False)
    return " ".join(chosen), sum(SENTENCES[sentence] for sentence in chosen)


def lesson(rng, k):
    """A conversation in which the teacher rates an answer, or if k is odd compares two."""
    question = f"What about {rng.choice(TOPICS)}?"
    text, q = answer(rng)
    if k % 2:
        other, q_other = answer(rng)
        asked = charter.COMPARE.format(charter=CHARTER, question=question, first=text, second=other)
        # Like large judges, it prefers what it reads first: what asking in both orders is there for.
        p = 1 / (1 + np.exp(-SHARP * (q - q_other) - FIRST))
        said = "A" if rng.random() < p else "B"
    else:
        asked = charter.RATE.format(charter=CHARTER, question=question, response=text)
        rating = round(5 + q + NOISE * rng.normal())
        said = str(min(max(rating, 1), 9))
    return dict(messages=question_and_answer(asked, said))


def teach(seed):
    """The folder of a judge that was taught with this seed."""
    # --resume goes on within SFT; what is finished is not done again.
    folder = f"{out}/s{seed}"
    run_folder = f"{folder}/judge"
    settings = dict(
        rows=rows,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        n_embd=n_embd,
        n_layer=n_layer,
    )
    made_from = f"{folder}/settings.json"
    # A judge of other settings would be taken for this one.
    if os.path.exists(made_from) and read_json(made_from) != settings:
        raise ValueError(f"{folder} was made with other settings ({made_from}): delete it, or name another --out")
    if os.path.exists(f"{run_folder}/hf/config.json"):
        return run_folder
    rng = np.random.default_rng(seed)
    kit.write_rows(f"{folder}/conversations.jsonl", (lesson(rng, k) for k in range(rows)))
    kit.write(made_from, json.dumps(settings))
    tok = tokenizer.load(VOCABULARY)
    config = ApertusConfig(
        vocab_size=tok.vocab_size,
        block_size=512,
        n_layer=n_layer,
        n_head=4,
        n_kv_head=2,
        n_embd=n_embd,
        ffn_dim=4 * n_embd,
        init_std=0.02,
    )
    convert.save_hf(Apertus(config, seed), f"{folder}/start", tok)
    code, last = kit.run_script("posttrain.sft", [
        f"--init_from={folder}/start",
        f"--data={folder}/conversations.jsonl",
        f"--out={run_folder}",
        f"--epochs={epochs}",
        f"--batch_size={batch_size}",
        f"--micro_batch={batch_size}",
        f"--lr={lr}",
        f"--seed={seed}",
        "--optimizer=adamw",
        "--checkpoint_every=100",
        "--dtype=float32",
        "--resume",
    ], f"{folder}/sft.txt")
    if code:
        raise ValueError(f"posttrain.sft failed: {last} ({folder}/sft.txt)")
    return run_folder


# -----------------------------------------------------------------------------
# measuring


def average_ranks(values):
    """Ranks 1 ... n; equal values share the mean of theirs."""
    values = np.asarray(values)
    less = (values < values[:, None]).sum(1)
    equal = (values == values[:, None]).sum(1)
    return less + (equal + 1) / 2


def agreement(scores, truth):
    """
    How well scores order answers whose true qualities all differ: dict(tied, share of pairs; pairs, share in the right
    order, ties half; best, whether the truly best is on top, shared with those that tie; spearman, None if undefined).
    """
    s = np.asarray(scores)
    t = np.asarray(truth)
    # Each pair of answers once.
    i, j = np.triu_indices(len(s), 1)
    tied = s[i] == s[j]
    right = np.sign(s[i] - s[j]) == np.sign(t[i] - t[j])
    top = s == s.max()
    # Equal scores for all have no order to be correlated with.
    differ = not top.all()
    return dict(
        tied=tied.mean(),
        pairs=(right + 0.5 * tied).mean(),
        best=top[t.argmax()] / top.sum(),
        spearman=np.corrcoef(average_ranks(s), average_ranks(t))[0, 1] if differ else None,
    )


def new_answers(rng):
    """
    Answers of one prompt, and their qualities. No two are equally good: of those no judge could be right or wrong.
    """
    found = {}
    while len(found) < answers:
        text, q = answer(rng)
        found.setdefault(round(q, 6), text)
    return list(found.values()), list(found)


def average(found):
    """Means of a list of agreements; Spearman's over those that have one."""
    names = found[0] if found else ()
    means = {}
    for name in names:
        values = [float(one[name]) for one in found if one[name] is not None]
        if values:
            means[name] = statistics.fmean(values)
    return means


def measure(folder, seed):
    """What the judge in a folder makes of new answers: dict(weighted, digit, pairs)."""
    file = f"{out}/charter.md"
    kit.write(file, CHARTER)
    by = charter.Charter(folder, file, "cpu")
    # Other draws than those it was taught with; the sentences are the same.
    rng = np.random.default_rng(1000 + seed)
    weighted = []
    digit = []
    pairs = []
    for _ in tqdm(range(prompts), f"judge {seed}", unit="prompt"):
        question = f"What about {rng.choice(TOPICS)}?"
        texts, q = new_answers(rng)
        each = [dict(question=question, response=text) for text in texts]
        logp = by.ask(charter.RATE, charter.DIGITS, each)
        scores = charter.expected(logp)[0].numpy()
        weighted.append(agreement(scores, q))
        digit.append(agreement(logp.argmax(-1).numpy(), q))
        # Among the best of a prompt, where comparisons matter and are hard.
        five = np.argsort(-scores)[:5]
        couples = list(itertools.combinations(five, 2))
        by.leads.clear()
        margins = by.margins(question, [(texts[a], texts[b]) for a, b in couples])
        for (a, b), both, leads in zip(couples, margins, by.leads):
            pairs.append((q[a] - q[b], both, *leads))
    return dict(
        seed=seed,
        weighted=average(weighted),
        digit=average(digit),
        **of_pairs(np.array(pairs)),
    )


def of_pairs(found):
    """
    Rows (true difference a - b, margin of both orders, lead of the first with a first, and with b first) -> shares of
    right winners, of all pairs and of close ones, and of pairs that the first named wins.
    """
    truth, both, ab, ba = found.T
    close = np.abs(truth) < CLOSE
    better = truth > 0
    # One order: with a first, or with b; the mean over both ways to ask once.
    ways = np.stack([ab > 0, ba < 0])
    once = (ways == better).mean(0)
    twice = (both > 0) == better

    def shares(right, first):
        of_close = right[close].mean() if close.any() else None
        return dict(right=right.mean(), close=of_close, first=first)

    return dict(
        one=shares(once, np.mean([ab > 0, ba > 0])),
        both=shares(twice, 0.5),
        n=len(truth),
        n_close=int(close.sum()),
        bias=(ab + ba).mean() / 2,
    )


# -----------------------------------------------------------------------------
# report


def report(found):
    """The two tables as lines of Markdown."""
    def cell(way, name):
        values = [row[way][name] for row in found if row[way].get(name) is not None]
        return kit.plus_minus(values, statistics.stdev, ".3f")

    def lines(ways, *keys):
        for way, name in ways.items():
            cells = [cell(way, key) for key in keys]
            yield f"| {name} | {' | '.join(cells)} |"

    n, pairs, close = len(found), found[0]["n"], found[0]["n_close"]
    bias = kit.plus_minus([row["bias"] for row in found], statistics.stdev, ".2f")
    yield f"{n} seed{'s' * (n > 1)}, {prompts} prompts of {answers} new answers each; ± standard deviation over seeds."
    yield ""
    ways = dict(weighted="weighted score", digit="most probable digit")
    rated = lines(ways, "tied", "pairs", "spearman", "best")
    yield from kit.table("| | tied pairs | pair accuracy | Spearman | best found |", rated)
    yield ""
    yield (f"{pairs} pairs among the five best of each prompt, {close} of them closer than {CLOSE} (seed 0). The first "
           f"place is worth {bias} nats; taught were {FIRST}.")
    yield ""
    ways = dict(one="one order", both="both orders")
    compared = lines(ways, "first", "right", "close")
    yield from kit.table("| | first named wins | right winner | of close pairs |", compared)


def main():
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    every = range(seeds)
    # A judge is measured while the next ones learn.
    taught = kit.in_parallel(jobs, lambda seed, device: teach(seed), every)
    found = [measure(folder, seed) for folder, seed in zip(taught, every)]
    kit.write(f"{results}/results.json", json.dumps(found, indent=1, default=float))
    lines = list(report(found))
    kit.write(f"{results}/table.md", "\n".join(lines) + "\n")
    print(*lines, sep="\n")


if __name__ == "__main__":
    run(main, globals())
