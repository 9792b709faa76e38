"""
A longer window: Apertus pretrains at 4,096 tokens and ends at 65,536, by four short stages, each with a larger RoPE
theta (report, arXiv 2509.14233, sec. 2.5). This study does the same on two cores, from 256 to 1,024 tokens:

    short       trained at 256
    raised      short, continued at 1,024 with a theta four times as large
    kept        short, continued at 1,024 with the same theta
    long        trained at 1,024 from the start, on the total tokens of short and a continuation

Each arm trains two models. One reads Python's standard library: bits per byte by position show whether it uses text
more than 256 tokens back. The other reads registers, " kova red baba blue kova red ...", in which 2 to 64 keys have
colours. Colours differ between registers, so the colour of the last key must be looked up; a guess is right one time
in ten. A look-up takes two layers: one tells each colour which key stood before it, the other finds the key again.
Small registers are more frequent, so that all sizes have the same number of tokens. Registers of 64 keys alone teach
nothing in 10 million tokens: a model that cannot look up yet gains nothing from the rest of a register.

$ python -m studies.length                     # three seeds, half an hour on two cores; writes results/length
$ python -m studies.length --report            # table.md again, from rows.jsonl
$ python -m studies.context --lookup=100 --window=4096 --init_from=swiss-ai/Apertus-8B-2509    # any model
"""

import sys

if __name__ == "__main__" and not __package__:
    print("length.py: start it from the project's root, python -m studies.length", file=sys.stderr)
    sys.exit(2)

import random

import numpy as np
from tqdm import tqdm

from configurator import run
from engine.intervals import wilson
from generate import generate
from studies import kit

out = "out/length"            # data and runs
results = "results/length"    # rows.jsonl, table.md
seeds = 3                     # of weights and order, from 2 on: seed 1 chose the settings
jobs = 2                      # seeds at a time, one thread each
report = False                # run nothing: write table.md again from rows.jsonl

# The window and theta of each arm.
ARMS = dict(short=(256, "5e5"), raised=(1024, "2e6"), kept=(1024, "5e5"), long=(1024, "5e5"))
CONTINUED = ("raised", "kept")      # arms that start with the weights of `short`
# The model and optimizer of each text, and how studies/context.py measures it.
MODEL = dict(
    text=["--lr=2e-3", "--min_lr=2e-4"],
    register=[
        "--lr=1e-3", "--min_lr=1e-4", "--optimizer=adamw", "--betas=(0.9,0.95,0.99)",
        "--n_layer=2", "--n_head=2", "--n_kv_head=1", "--n_embd=64", "--ffn_dim=256"])
MEASURE = dict(text="--by_position=128", register="--lookup=100")
# Windows: of a step, of the run, of its warm-up (a tenth), of its decay (a third).
WINDOWS = {
    ("text", "short"): (4, 6000, 600, 2000),
    ("text", "raised"): (1, 400, 40, 133),
    ("text", "kept"): (1, 400, 40, 133),
    ("text", "long"): (1, 1900, 190, 633),
    ("register", "short"): (16, 32000, 3200, 10656),
    ("register", "raised"): (4, 400, 40, 132),
    ("register", "kept"): (4, 400, 40, 132),
    ("register", "long"): (4, 8400, 840, 2800),
}
HEAD = """\
# A longer window, at the size of a laptop

At positions 896 to 1,023 a model trained at a window of 256 has {0[short]} bits per byte, continued at 1,024 it has
{0[raised]} with a raised theta and {0[kept]} with the same (95 % intervals over {1} seeds).

`python -m studies.length` (`studies/length.py`), {1} seeds; ± is half of the 95 % interval by Student's t. Upper rows:
bits per byte of validation text by position in a window of 1,024. Lower rows: share of the colours looked up (chance:
0.1). Arms: *short* is trained at a window of 256; *raised* (theta 2e6) and *kept* (theta 5e5) continue it at 1,024;
*long* is trained at 1,024 from the start. Differences are paired by seed, so their intervals are narrower.

"""


# -----------------------------------------------------------------------------
# the register

KEYS = [
    "bafo", "bija", "ceqo", "daga", "daje", "dico", "dofo", "duxu", "faho", "fano", "fefo", "femu", "fiwe", "give",
    "giwu", "goju", "guci", "jeja", "jona", "kato", "keji", "kucu", "kuze", "lebu", "lili", "liri", "mefi", "miru",
    "muko", "muru", "nave", "neva", "nilo", "noho", "nucu", "nupo", "pize", "pore", "qode", "raju", "reju", "roxa",
    "sedo", "sino", "soku", "tika", "toco", "tofa", "tuqe", "vafe", "vawe", "viro", "vogi", "vote", "wale", "wiha",
    "woze", "wuwu", "xaje", "xani", "xese", "xizo", "zapo", "zoqe"]
COLOURS = ["red", "blue", "green", "black", "white", "brown", "grey", "pink", "gold", "silver"]


def register(rng, size):
    """A text " kova red baba blue kova red ..." of `size` keys, each named eight times on average."""
    colour = {key: rng.choice(COLOURS) for key in rng.sample(KEYS, size)}
    return "".join(f" {key} {colour[key]}" for key in rng.choices(list(colour), k=8 * size))


def question(rng, tok, distance):
    """A register that ends with a key whose colour stands `distance` tokens back, and only there: (ids, the colour)."""
    colour = {key: rng.choice(COLOURS) for key in KEYS}
    key = rng.choice(KEYS)
    others = [other for other in KEYS if other != key]
    ids = [tok.bos, *tok.encode(f" {key} {colour[key]}")]
    while len(ids) <= distance:
        other = rng.choice(others)
        ids += tok.encode(f" {other} {colour[other]}")
    return ids + tok.encode(f" {key}"), colour[key]


def lookup_scores(model, tok, T, n):
    """
    How many colours the model looks up, greedily, at distances of 32, 64, ... tokens up to a window of T.

    n: keys at each distance. Yields dicts: distance, right, n, and low, high of Wilson's 95 % interval.
    ValueError for less than one key, or a window below 32.
    """
    if n < 1 or T < 32:
        raise ValueError(f"--lookup={n} in a window of {T}: want at least one key, and 32 tokens")
    rng = random.Random(7)
    for power in range(5, T.bit_length()):
        # The last tokens of a window are for the key and its colour.
        distance = min(2**power, T - 16)
        right = 0
        for _ in tqdm(range(n), f"{distance} tokens back", disable=None):
            ids, colour = question(rng, tok, distance)
            answer = tok.encode(f" {colour}")
            right += generate(model, [ids], len(answer), temperature=0) == [ids + answer]
        low, high = wilson(right, n)
        yield dict(distance=distance, right=right, n=n, low=low, high=high)


# -----------------------------------------------------------------------------
# the study


def write_data():
    """The registers, and both data folders. The vocabulary of the registers has a piece for each key and colour."""
    rng = random.Random(1)
    # The same number of tokens of each size.
    sizes = rng.choices([2, 4, 8, 16, 32, 64], [32, 16, 8, 4, 2, 1], k=110_000)
    kit.write_rows(f"{out}/registers.jsonl", (dict(text=register(rng, size)) for size in sizes))
    text, registers = f"{out}/data/text", f"{out}/data/register"
    kit.call(text, f"{text}/meta.json", "prepare", f"--out={text}", "--train_bpe=4096")
    kit.call(
        registers, f"{registers}/meta.json", "prepare", f"--out={registers}", "--train_bpe=1000",
        f"{out}/registers.jsonl")


def train_command(text, arm, seed):
    """The command of a run for kit.train(), all but its folder. text: text or register."""
    window, theta = ARMS[arm]
    batch, total, warmup, decay = WINDOWS[text, arm]
    start = ["--lr=5e-4", "--min_lr=5e-5", f"--init_from={out}/{text}/seed-{seed}/short"] if arm in CONTINUED else []
    return [
        "train", "configs/recipe.py", "--goldfish_k=0", f"--data={out}/data/{text}", f"--seed={seed}", *MODEL[text],
        f"--batch_size={batch}", f"--micro_batch={batch}", f"--total_samples={total}", f"--warmup_samples={warmup}",
        f"--decay_samples={decay}", f"--block_size={window}", f"--rope_theta={theta}", *start]


def run_seed(seed, device):
    """Train and measure the arms of a seed, in order, because two of them continue the first. Returns their rows."""
    rows = []
    for arm in ARMS:
        scores = {}
        for text in MODEL:
            run = f"{out}/{text}/seed-{seed}/{arm}"
            kit.train(run, train_command(text, arm, seed), device)
            file = f"{run}/context.jsonl"
            kit.call(
                f"{run}-measured", file, "studies.context", f"--init_from={run}", "--window=1024", MEASURE[text],
                device=device)
            scores |= {row["name"]: row["score"] for row in kit.read_rows(file)}
        rows.append(dict(arm=arm, seed=seed, scores=scores))
    return rows


def main():
    path = f"{results}/rows.jsonl"
    if not report:
        write_data()
        by_seed = kit.in_parallel(jobs, run_seed, range(2, 2 + seeds))
        kit.write_rows(path, sum(tqdm(by_seed, "seeds", seeds), []))
    rows = kit.read_rows(path)
    scores = kit.group((place, row["arm"], score) for row in rows for place, score in row["scores"].items())
    for by_arm in scores.values():
        by_arm["raised - kept"] = np.subtract(by_arm["raised"], by_arm["kept"])
    ends = {arm: kit.interval(values, 3) for arm, values in scores["896 to 1,023"].items()}
    kit.publish(f"{results}/table.md", HEAD.format(ends, len(rows) // len(ARMS)) + kit.pivot("|", scores.items(), 3))


if __name__ == "__main__":
    run(main, globals())
