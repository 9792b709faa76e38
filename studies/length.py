"""
What a longer window gives: Apertus pretrains at 4,096 tokens and ends at 65,536, by four short stages, each with a
larger RoPE theta (report sec. 2.5). The same at a size of two cores, from 256 to 1,024, on Python's standard library:

    short       trained at 256
    raised      goes on from it at 1,024, with theta four times as large
    kept        the same with theta as it was
    long        trained at 1,024 from the start, with the tokens of both

Compared are bits per byte by position: does it use what stands more than 256 tokens behind? And a look-up: in a
register, " kova red baba blue kova ...", 64 keys have colours, which are others in each text; who looks the last key
up names its colour, who names any has one in ten right. None of these models looks up, and neither did any that was
trained on registers alone, two layers of 64 or 128 wide, for 3 to 10 million tokens: see LOG.md.

$ python -m studies.length                     # three seeds, a quarter of an hour of two cores; then results/length
$ python -m studies.length --report            # table.md and length.png again from rows.jsonl
$ python evaluate.py --lookup=100 --window=4096 --init_from=swiss-ai/Apertus-8B-2509       # of any model
"""

import sys

if __name__ == "__main__" and not __package__:
    print("length.py: start it from the project's root, python -m studies.length", file=sys.stderr)
    sys.exit(2)

import random
import statistics

from tqdm import tqdm

from configurator import run
from engine.intervals import wilson
from engine.plot import finish, pyplot
from generate import generate
from studies import kit
from tokenizer import read_json

out = "out/length"            # data and runs
results = "results/length"    # rows.jsonl, table.md, length.png
seeds = 3                     # of the weights and of the order
first_seed = 2                # with 1 the settings were chosen
scale = 1.0                   # of the number of windows; to try whether it runs
jobs = 2                      # runs at a time, a thread each
report = False                # run nothing: table and picture again from rows.jsonl

SHORT, LONG = 256, 1024
THETA = dict(short=5e5, raised=2e6, kept=5e5, long=5e5)
NAMES = dict(short="window 256", raised="1,024, theta 2e6", kept="1,024, theta 5e5", long="1,024 from the start")
ASKED = 100                   # keys at each distance
STEP = 1024                   # tokens of a step
# Windows of 256 that `short` reads, and of 1,024 that the others read behind it; the rates of both.
READ, MORE = 6000, 400
LR, SLOW = 2e-3, 5e-4


# ----------------------------------------------------------------------------------------------------------------------
# the register


def some_words():
    """64 words of four letters, the keys of every register."""
    rng = random.Random(0)
    syllables = [a + b for a in "bcdfghjklmnpqrstvwxz" for b in "aeiou"]
    return sorted(rng.sample([a + b for a in syllables for b in syllables], 64))


KEYS = some_words()
COLOURS = "red blue green black white brown grey pink gold silver".split()


def register(rng, entries):
    """A text " kova red baba blue kova red ...": each key has a colour of its own, another one in each text."""
    colour = {key: rng.choice(COLOURS) for key in KEYS}
    return "".join(f" {key} {colour[key]}" for key in rng.choices(KEYS, k=entries))


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
        for begin in tqdm(range(0, n, 10), f"{here:,} tokens back", leave=False, disable=None):
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


def flags(arm, seed):
    """The arguments of train.py for an arm."""
    window = SHORT if arm == "short" else LONG
    goes_on = arm in ("raised", "kept")
    count = round(scale * (MORE if goes_on else READ))
    if arm == "long":
        count = round(scale * (READ * SHORT // LONG + MORE))
    batch = STEP // window
    count -= count % batch
    rate = SLOW if goes_on else LR
    settings = dict(
        data=f"{out}/data",
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
        settings["init_from"] = f"{out}/seed-{seed}/short"
    return ["configs/recipe.py", *kit.flags(settings)]


def examined(arm, seed):
    """A run, trained and measured: a line of rows.jsonl."""
    path = f"{out}/seed-{seed}/{arm}"
    kit.train(path, flags(arm, seed))
    done = f"{path}/measured/evaluation.json"
    how = [f"--by_position={SHORT // 2}", f"--window={LONG}", f"--lookup={ASKED}", f"--out={path}/measured"]
    kit.call(path, "measured", done, "evaluate", f"{out}/data", f"--init_from={path}", *how)
    found = read_json(done)
    tokens = read_json(f"{path}/summary.json")["tokens"]
    return dict(arm=arm, seed=seed, tokens=tokens, positions=found["positions"], lookups=found["lookups"])


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
        "![by position, and by distance](length.png)", "",
        "## Bits per byte of validation text by position in a window of 1,024", ""]
    body = []
    for i, place in enumerate(first["positions"]):
        cells = [kit.interval([row["positions"][i]["bits_per_byte"] for row in arms[arm]], 3) for arm in NAMES]
        body.append(f"| {place['begin']:,} to {place['end'] - 1:,} | {' | '.join(cells)} |")
    lines += kit.table(f"| position | {' | '.join(NAMES.values())} |", body)
    lines += ["", f"## Keys that were looked up, of {ASKED} at each distance and seed (any colour: one in ten)", ""]
    body = []
    for i, one in enumerate(first["lookups"]):
        cells = [kit.interval([row["lookups"][i]["right"] / row["lookups"][i]["n"] for row in arms[arm]])
                 for arm in NAMES]
        body.append(f"| {one['distance']:,} | {' | '.join(cells)} |")
    lines += kit.table(f"| distance in tokens | {' | '.join(NAMES.values())} |", body)
    return "\n".join(lines) + "\n"


def draw(rows, path):
    """Bits per byte by position; right answers by distance. Means of the seeds, and a point for each."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.2))
    places, asked = rows[0]["positions"], rows[0]["lookups"]
    middles = [(place["begin"] + place["end"]) / 2 for place in places]
    distances = [one["distance"] for one in asked]
    for i, (arm, group) in enumerate(by_arm(rows).items()):
        curves = [[place["bits_per_byte"] for place in row["positions"]] for row in group]
        shares = [[one["right"] / one["n"] for one in row["lookups"]] for row in group]
        for axis, x, lines in ((left, middles, curves), (right, distances, shares)):
            axis.plot(x, list(map(statistics.fmean, zip(*lines))), color=f"C{i}", label=NAMES[arm])
            for line in lines:
                axis.plot(x, line, color=f"C{i}", marker=".", linestyle="", alpha=0.5)
    left.set(title="validation text", xlabel="position in the window", ylabel="bits per byte")
    right.set(title="keys looked up", xlabel="tokens since the key was said", ylim=(-0.03, 1.03), xscale="log")
    right.set_xticks(distances, map(str, distances))
    right.axhline(1 / len(COLOURS), color="black", linestyle=":")
    for axis in (left, right):
        axis.axvline(SHORT, color="0.7", linestyle=":")
        axis.grid(alpha=0.2)
    left.legend(fontsize=8)
    finish(figure, path)


def main():
    lines = f"{results}/rows.jsonl"
    if not report:
        if seeds < 1:
            raise ValueError(f"seeds={seeds}: want at least one")
        kit.call(out, "data", f"{out}/data/meta.json", "prepare", f"--out={out}/data", "--train_bpe=4096")

        # `raised` and `kept` go on from `short`.
        def one(seed, device):
            return [examined(arm, seed) for arm in NAMES]
        groups = kit.in_parallel(jobs, one, range(first_seed, first_seed + seeds))
        kit.write_rows(lines, [row for group in tqdm(groups, "seeds", seeds) for row in group])
    rows = kit.rows_to_report(lines, "studies.length")
    kit.write(f"{results}/table.md", table_md(rows))
    draw(rows, f"{results}/length.png")
    print(table_md(rows))


if __name__ == "__main__":
    run(main, globals())
