"""
What a longer window gives: Apertus pretrains at 4,096 tokens and ends at 65,536, by four short stages, each with a
larger RoPE theta (report sec. 2.5). The same at a size of two cores, from 256 to 1,024:

    short       trained at 256
    raised      goes on from it at 1,024, with theta four times as large
    kept        the same with theta as it was
    long        trained at 1,024 from the start, with the tokens of both

Read are two kinds of text, each by models of its own. Python's standard library: compared are bits per byte by
position, does it use what stands more than 256 tokens behind? And registers, " kova red baba blue kova ...", where up
to 64 keys have colours, which are others in each: who looks the last key up names its colour, who names any has one in
ten right. Looking up wants two layers, one that tells each colour which key stood before it, and one that finds the
key again; a tenth of a million parameters suffice. What decides is the text: of registers with 64 keys alone nothing
was learnt in 10 million tokens, because a model that cannot yet look up gets no better by seeing more of the register.
Of registers with 2 or 4 keys a little attention to any colour pays at once, and from there larger ones are learnt. So
as many tokens are of registers with 2 keys as with 64.

$ python -m studies.length                     # three seeds, half an hour of two cores; then results/length
$ python -m studies.length --report            # table.md again from rows.jsonl
$ python evaluate.py --lookup=100 --window=4096 --init_from=swiss-ai/Apertus-8B-2509       # of any model
"""

import sys

if __name__ == "__main__" and not __package__:
    print("length.py: start it from the project's root, python -m studies.length", file=sys.stderr)
    sys.exit(2)

import os
import random

from tqdm import tqdm

from configurator import run
from engine.intervals import wilson
from generate import generate
from studies import kit
from tokenizer import read_json

out = "out/length"            # data and runs
results = "results/length"    # rows.jsonl, table.md
seeds = 3                     # of the weights and of the order
first_seed = 2                # with 1 the settings were chosen
scale = 1.0                   # of the number of windows; to try whether it runs
jobs = 2                      # runs at a time, a thread each
report = False                # run nothing: table and picture again from rows.jsonl

SHORT, LONG = 256, 1024
THETA = dict(short=5e5, raised=2e6, kept=5e5, long=5e5)
NAMES = dict(short="window 256", raised="1,024, theta 2e6", kept="1,024, theta 5e5", long="1,024 from the start")
ASKED = 100                   # keys at each distance
# For each kind of text: windows of 256 that `short` reads, and of 1,024 that the others read behind it; both rates.
# Tokens of a step.
TEXT = dict(read=6000, more=400, step=1024, lr=2e-3, slow=5e-4, shape={})
TINY = dict(n_layer=2, n_head=2, n_kv_head=1, n_embd=64, ffn_dim=256, optimizer="adamw", betas=(0.9, 0.95, 0.99))
REGISTER = dict(read=32000, more=400, step=4096, lr=1e-3, slow=5e-4, shape=TINY)
SUBJECTS = dict(text=TEXT, register=REGISTER)
SIZES = (2, 4, 8, 16, 32, 64)       # keys of a register
REGISTERS = 110_000                 # in which all models find as many tokens as they read


# ----------------------------------------------------------------------------------------------------------------------
# the register


def some_words():
    """64 words of four letters, the keys of every register."""
    rng = random.Random(0)
    syllables = [a + b for a in "bcdfghjklmnpqrstvwxz" for b in "aeiou"]
    return sorted(rng.sample([a + b for a in syllables for b in syllables], 64))


KEYS = some_words()
COLOURS = "red blue green black white brown grey pink gold silver".split()


def register(rng, size):
    """A text " kova red baba blue kova red ...": so many keys, each named eight times on average, each has a colour."""
    colour = {key: rng.choice(COLOURS) for key in rng.sample(KEYS, size)}
    return "".join(f" {key} {colour[key]}" for key in rng.choices(list(colour), k=8 * size))


def write_registers(path, count):
    """A file of registers, a line each, as prepare.py reads them; the more keys, the rarer."""
    if os.path.exists(path):
        return
    rng = random.Random(1)
    sizes = rng.choices(SIZES, [1 / size for size in SIZES], k=count)
    kit.write_rows(path, (dict(text=register(rng, size)) for size in sizes))


def question(rng, tok, distance):
    """(ids of a register that ends with a key, its colour), which was said `distance` tokens before, and only there."""
    colour = {key: rng.choice(COLOURS) for key in KEYS}
    key = rng.choice(KEYS)
    others = [other for other in KEYS if other != key]
    ids = tok.encode(f" {key} {colour[key]}")
    begin = ids
    while len(ids) < distance:
        other = rng.choice(others)
        ids = ids + tok.encode(f" {other} {colour[other]}")
    return [tok.bos, *begin, *ids[len(begin):], *tok.encode(f" {key}")], colour[key]


def lookup_scores(model, tok, T, n):
    """
    Keys whose colours the model looks up, greedily, at distances of 32, 64, ... tokens up to a window of T.

    n: keys at each distance. Returns a list of dicts: distance, right, n, and low, high of Wilson's 95 % interval.
    ValueError for fewer keys than one, and for a window below 32.
    """
    if n < 1 or T < 32:
        raise ValueError(f"lookup={n} in a window of {T}: want at least one key, and 32 tokens")
    rng = random.Random(7)
    rows = []
    distance = 32
    while distance <= T:
        # The last tokens of a window are for the key and its colour.
        here = min(distance, T - 16)
        asked = [question(rng, tok, here) for _ in range(n)]
        right = 0
        for begin in tqdm(range(0, n, 10), disable=None):
            prompts, colours = zip(*asked[begin:begin + 10])
            new = max(len(tok.encode(f" {colour}")) for colour in colours)
            texts = generate(model, list(prompts), new, temperature=0)
            for prompt, ids, colour in zip(prompts, texts, colours):
                right += tok.decode(ids[len(prompt):]).strip().startswith(colour)
        low, high = wilson(right, n)
        rows.append(dict(distance=here, right=right, n=n, low=low, high=high))
        distance *= 2
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# the runs


def flags(kind, arm, seed):
    """The arguments of train.py for an arm that reads one kind of text."""
    how = SUBJECTS[kind]
    window = SHORT if arm == "short" else LONG
    goes_on = arm in ("raised", "kept")
    count = round(scale * (how["more"] if goes_on else how["read"]))
    if arm == "long":
        count = round(scale * (how["read"] * SHORT // LONG + how["more"]))
    batch = how["step"] // window
    count -= count % batch
    rate = how["slow"] if goes_on else how["lr"]
    settings = dict(
        data=f"{out}/data/{kind}",
        block_size=window,
        rope_theta=THETA[arm],
        batch_size=batch,
        micro_batch=batch,
        total_samples=count,
        warmup_samples=count // 10 // batch * batch,
        decay_samples=count // 3 // batch * batch,
        lr=rate,
        lr_floor=rate / 10,
        seed=seed,
        goldfish_k=0,
        checkpoint_every=500,
    )
    if goes_on:
        settings["init_from"] = f"{out}/{kind}/seed-{seed}/short"
    return ["configs/recipe.py", *kit.flags(settings | how["shape"])]


def examined(kind, arm, seed, *how):
    """A run, trained and measured by evaluate.py with these flags: the rows it found, and the tokens the run read."""
    path = f"{out}/{kind}/seed-{seed}/{arm}"
    kit.train(path, flags(kind, arm, seed))
    done = f"{path}/measured/evaluation.json"
    kit.call(path, "measured", done, "evaluate", f"--init_from={path}", f"--window={LONG}",
             f"--out={path}/measured", *how)
    return read_json(done)["rows"], read_json(f"{path}/summary.json")["tokens"]


def row(arm, seed):
    """Both models of an arm: a line of rows.jsonl."""
    places, tokens = examined("text", arm, seed, f"{out}/data/text", f"--by_position={SHORT // 2}")
    keys, read = examined("register", arm, seed, f"--lookup={ASKED}", f"{out}/data/register")
    return dict(arm=arm, seed=seed, tokens=tokens, register_tokens=read,
                positions=[row for row in places if "begin" in row],
                lookups=[row for row in keys if "distance" in row])


# ----------------------------------------------------------------------------------------------------------------------
# what came of it


def by_arm(rows):
    return {arm: [row for row in rows if row["arm"] == arm] for arm in NAMES}


def table_md(rows):
    """Both tables: a pure function of the runs."""
    arms = by_arm(rows)
    first = rows[0]
    lines = [
        "# A longer window, at the size of a laptop", "",
        f"What `python -m studies.length` came to; the code is `studies/length.py`. {len(arms['short'])} seeds; ± is "
        "half of the 95 % interval by Student's t.", "",
        "## Bits per byte of validation text by position in a window of 1,024", ""]
    body = []
    for i, place in enumerate(first["positions"]):
        cells = [kit.interval([row["positions"][i]["bits_per_byte"] for row in arms[arm]], 3) for arm in NAMES]
        body.append(f"| {place['begin']:,} to {place['end'] - 1:,} | {' | '.join(cells)} |")
    lines += kit.table(f"| position | {' | '.join(NAMES.values())} |", body)
    lines += ["", f"## Keys that were looked up, of {ASKED} at each distance and seed (any colour: one in ten)", ""]
    body = []
    for i, one in enumerate(first["lookups"]):
        cells = [kit.interval([one["lookups"][i]["right"] / one["lookups"][i]["n"] for one in arms[arm]])
                 for arm in NAMES]
        body.append(f"| {one['distance']:,} | {' | '.join(cells)} |")
    lines += kit.table(f"| distance in tokens | {' | '.join(NAMES.values())} |", body)
    return "\n".join(lines) + "\n"


def main():
    lines = f"{results}/rows.jsonl"
    if not report:
        if seeds < 1:
            raise ValueError(f"seeds={seeds}: want at least one")
        text, registers = f"{out}/data/text", f"{out}/data/register"
        kit.call(out, "text", f"{text}/meta.json", "prepare", f"--out={text}", "--train_bpe=4096")
        # So many pieces that each key and each colour is one.
        write_registers(f"{out}/registers.jsonl", REGISTERS)
        kit.call(out, "registers", f"{registers}/meta.json", "prepare", f"{out}/registers.jsonl", f"--out={registers}",
                 "--train_bpe=1000")

        # `raised` and `kept` go on from `short`.
        def one(seed, device):
            return [row(arm, seed) for arm in NAMES]
        groups = kit.in_parallel(jobs, one, range(first_seed, first_seed + seeds))
        kit.write_rows(lines, [row for group in tqdm(groups, "seeds", seeds) for row in group])
    rows = kit.rows_to_report(lines, "studies.length")
    kit.write(f"{results}/table.md", table_md(rows))
    print(table_md(rows))


if __name__ == "__main__":
    run(main, globals())
