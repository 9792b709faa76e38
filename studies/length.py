"""
A longer window: Apertus pretrains at 4,096 tokens and ends at 65,536, by four short stages, each with a larger RoPE
theta (report, arXiv 2509.14233, sec. 2.5). This study does the same on two cores, from 256 to 1,024 tokens:

    short       trained at 256
    raised      short, continued at 1,024 with a theta four times as large
    kept        short, continued at 1,024 with the same theta
    long        trained at 1,024 from the start, on as many tokens as short and a continuation together

Each arm trains two models. One reads Python's standard library: bits per byte by position show whether it uses text
more than 256 tokens back. The other reads registers, " kova red baba blue kova red ...", in which 2 to 64 keys have
colours. Colours differ between registers, so the colour of the last key must be looked up; a guess is right one time
in ten. A look-up takes two layers: one tells each colour which key stood before it, the other finds the key again.
Small registers are more frequent, so that all sizes have the same number of tokens. Registers of 64 keys alone teach
nothing in 10 million tokens: a model that cannot look up yet gains nothing from the rest of a register.

$ python -m studies.length                     # three seeds, half an hour on two cores; writes results/length
$ python -m studies.length --report            # table.md again, from rows.jsonl
$ python evaluate.py --lookup=100 --window=4096 --init_from=swiss-ai/Apertus-8B-2509       # any model
"""

import random

import numpy as np
from tqdm import tqdm

from configurator import run
from engine.files import read_json
from engine.intervals import wilson
from generate import generate
from studies import kit  # first: a study started by its path gets studies/studies.py here, which prints the command

out = "out/length"            # data and runs
results = "results/length"    # rows.jsonl, table.md
seeds = 3                     # of weights and order, from 2 on: seed 1 chose the settings
jobs = 2                      # seeds at a time, one thread each
report = False                # run nothing: write table.md again from rows.jsonl

ARMS = "short raised kept long".split()
# For kit.follow(): the run, the file that it writes last, the script, its arguments. The vocabulary of the registers
# has one piece for each key and each colour.
DATA = """
{out}/data/text {out}/data/text/meta.json prepare --out={out}/data/text --train_bpe=4096 ;
{out}/data/register {out}/data/register/meta.json prepare --out={out}/data/register --train_bpe=1000
{out}/registers.jsonl
"""
# The same in pieces: a run joins four of these lines, and a fifth evaluates it. The learning rate rises over a tenth
# of the windows and falls over a third.
COMMANDS = dict(line.split(": ") for line in """
train: {run} {run}/summary.json train configs/recipe.py --goldfish_k=0 --data={out}/data/{kind} --seed={seed}
text: --lr=2e-3 --min_lr=2e-4
register: --lr=1e-3 --min_lr=1e-4 --optimizer=adamw --betas=(0.9,0.95,0.99) --n_layer=2 --n_head=2 \
--n_kv_head=1 --n_embd=64 --ffn_dim=256
text short: --batch_size=4 --micro_batch=4 --total_samples=6000 --warmup_samples=600 --decay_samples=2000
text raised: --batch_size=1 --micro_batch=1 --total_samples=400 --warmup_samples=40 --decay_samples=133
text kept: --batch_size=1 --micro_batch=1 --total_samples=400 --warmup_samples=40 --decay_samples=133
text long: --batch_size=1 --micro_batch=1 --total_samples=1900 --warmup_samples=190 --decay_samples=633
register short: --batch_size=16 --micro_batch=16 --total_samples=32000 --warmup_samples=3200 --decay_samples=10656
register raised: --batch_size=4 --micro_batch=4 --total_samples=400 --warmup_samples=40 --decay_samples=132
register kept: --batch_size=4 --micro_batch=4 --total_samples=400 --warmup_samples=40 --decay_samples=132
register long: --batch_size=4 --micro_batch=4 --total_samples=8400 --warmup_samples=840 --decay_samples=2800
short: --block_size=256 --rope_theta=5e5 --out={run} --resume
raised: --block_size=1024 --rope_theta=2e6 --lr=5e-4 --min_lr=5e-5 --init_from={out}/{kind}/seed-{seed}/short \
--out={run} --resume
kept: --block_size=1024 --rope_theta=5e5 --lr=5e-4 --min_lr=5e-5 --init_from={out}/{kind}/seed-{seed}/short \
--out={run} --resume
long: --block_size=1024 --rope_theta=5e5 --out={run} --resume
evaluate text: ; {run}-evaluated {run}/evaluation.json evaluate --init_from={run} --window=1024 --by_position=128
evaluate register: ; {run}-evaluated {run}/evaluation.json evaluate --init_from={run} --window=1024 --lookup=100
""".strip().splitlines())
HEAD = """\
# A longer window, at the size of a laptop

`python -m studies.length` (`studies/length.py`), {} seeds; ± is half of the 95 % interval by Student's t. Upper rows:
bits per byte of validation text by position in a window of 1,024. Lower rows: share of the colours looked up (chance:
0.1). Arms: *short* is trained at a window of 256; *raised* (theta 2e6) and *kept* (theta 5e5) continue it at 1,024;
*long* is trained at 1,024 from the start. Differences are paired by seed, so their intervals are narrower.

"""


# -----------------------------------------------------------------------------
# the register

KEYS = """
bafo bija ceqo daga daje dico dofo duxu faho fano fefo femu fiwe give giwu goju guci jeja jona kato keji kucu kuze
lebu lili liri mefi miru muko muru nave neva nilo noho nucu nupo pize pore qode raju reju roxa sedo sino soku tika
toco tofa tuqe vafe vawe viro vogi vote wale wiha woze wuwu xaje xani xese xizo zapo zoqe
""".split()
COLOURS = "red blue green black white brown grey pink gold silver".split()


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


def measured(seed, device):
    """Train and evaluate the arms of a seed, in order, because two of them continue the first. Returns their rows."""
    rows = []
    for arm in ARMS:
        found = []
        for kind in ("text", "register"):
            run = f"{out}/{kind}/seed-{seed}/{arm}"
            how = " ".join(COMMANDS[key] for key in ("train", kind, f"{kind} {arm}", arm, f"evaluate {kind}"))
            kit.follow(how, run=run, out=out, kind=kind, seed=seed)
            found += read_json(f"{run}/evaluation.json")["rows"]
        rows.append(dict(
            arm=arm,
            seed=seed,
            scores={row["name"]: row["score"] for row in found if row["metric"] != "bits/byte"}))
    return rows


def main():
    path = f"{results}/rows.jsonl"
    if not report:
        rng = random.Random(1)
        # The same number of tokens of each size.
        kit.write_rows(f"{out}/registers.jsonl", (
            dict(text=register(rng, size))
            for size in rng.choices([2, 4, 8, 16, 32, 64], [32, 16, 8, 4, 2, 1], k=110_000)))
        kit.follow(DATA, out=out)
        found = kit.in_parallel(jobs, measured, range(2, 2 + seeds))
        kit.write_rows(path, sum(tqdm(found, "seeds", seeds), []))
    rows = kit.read_rows(path)
    scores = kit.grouped((place, row["arm"], score) for row in rows for place, score in row["scores"].items())
    for found in scores.values():
        found["raised - kept"] = np.subtract(found["raised"], found["kept"])
    kit.publish(f"{results}/table.md", HEAD.format(len(rows) // len(ARMS)) + kit.pivot("|", scores.items(), 3))


if __name__ == "__main__":
    run(main, globals())
