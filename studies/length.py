"""
What a longer window gives: Apertus pretrains at 4,096 tokens and ends at 65,536, by four short stages with a larger RoPE
theta each (report sec. 2.5). The same at a size of two cores, from 256 to 1,024, in two questions:

    text        bits per byte by position: does it use what stands more than 256 tokens behind?
    register    "kova=57": a key and its number, asked for again later. Right answers over the distance to them

    short       trained at 256
    raised      goes on from it at 1,024, with theta four times as large
    kept        the same with theta as it was
    long        trained at 1,024 from the start, with the tokens of both

Attention learns to look a key up all at once, and late: the register's model has two layers, 0.5M parameters, and at 5
of its 8 million tokens it knows nothing of it. One with 1.4M parameters that has read mainly prose does not learn it at
all (studies/recipe.py): 1 of 1,800 keys, repeated after 32 to 900 tokens.

$ python -m studies.length                     # three seeds, half an hour of two cores; then results/length
$ python -m studies.length --report            # table.md and length.png again from rows.jsonl
$ python evaluate.py --lookup=100 --window=1024 --init_from=out/length/register-2/long    # of any model
"""

import sys

if __name__ == "__main__" and not __package__:
    print("length.py: start it from the project's root, python -m studies.length", file=sys.stderr)
    sys.exit(2)

import json
import os
import random
import statistics

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
# Windows of 256 that `short` reads, and of 1,024 that the others read behind it; tokens of a step; rates of both.
TEXT = dict(config="configs/recipe.py", short=6000, more=400, step=1024, lr=2e-3, slow=5e-4)
REGISTER = dict(config="configs/recipe.py", short=32000, more=2000, step=2048, lr=2e-3, slow=1e-3)
SHAPE = dict(n_layer=2, n_embd=128, ffn_dim=384)


# ----------------------------------------------------------------------------------------------------------------------
# the register


def line(rng):
    """(key, value) of a line: four letters of 10,000, and a number of two digits."""
    key = "".join(rng.choice("bcdfghjklmnpqrstvwxz") + rng.choice("aeiou") for _ in range(2))
    return key, str(rng.randrange(10, 100))


def register(rng, size):
    """A text of about so many characters: lines key=value, of which half repeat one before, near ones more often."""
    lines = []
    while 8 * len(lines) < size:
        again = lines and rng.random() < 0.5
        # As many between 1 and 2 lines back as between 50 and 100.
        back = int(len(lines) ** rng.random())
        lines.append(lines[-back] if again else line(rng))
    return "".join(f"{key}={value}\n" for key, value in lines)


def question(rng, tok, distance):
    """(ids of a prompt that ends with a key, its value): the line that says it ends `distance` tokens before."""
    key, value = line(rng)
    before = [line(rng) for _ in range(3)]
    head = tok.encode("".join(f"{a}={b}\n" for a, b in [*before, (key, value)]))
    tail = []
    asked = tok.encode(f"{key}=")
    while len(tail) + len(asked) < distance:
        other, number = line(rng)
        if other != key:
            tail += tok.encode(f"{other}={number}\n")
    return [tok.bos, *head, *tail[len(tail) + len(asked) - distance:], *asked], value


def lookup_scores(model, tok, T, n):
    """
    Keys that the model looks up, greedily, at distances of 32, 64, ... tokens up to a window of T.

    n: keys at each distance. Returns a list of dicts: distance, right, n, and low, high of Wilson's 95 % interval.
    """
    rng = random.Random(7)
    rows = []
    distance = 32
    # A question has four lines before the distance begins.
    while distance + 48 <= T:
        asked = [question(rng, tok, distance) for _ in range(n)]
        right = 0
        for begin in range(0, n, 10):
            prompts, values = zip(*asked[begin:begin + 10])
            new = max(len(tok.encode(value)) for value in values)
            texts = generate(model, list(prompts), new, temperature=0)
            for prompt, ids, value in zip(prompts, texts, values):
                right += tok.decode(ids[len(prompt):]).startswith(value)
        low, high = wilson(right, n)
        rows.append(dict(distance=distance, right=right, n=n, low=low, high=high))
        distance *= 2
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# the runs


def begin():
    """The data of both questions: {name: folder}."""
    rng = random.Random(1)
    file = f"{out}/register.jsonl"
    if not os.path.exists(file):
        rows = (dict(id=i, text=register(rng, 2100)) for i in range(max(200, round(8000 * scale))))
        kit.write(file, (json.dumps(row) + "\n" for row in rows))
    folders = dict(text=f"{out}/text-data", register=f"{out}/register-data")
    how = ["--tokenizer=byte", "--pii=False", f"--out={folders['register']}"]
    kit.call(out, "register", f"{folders['register']}/meta.json", "prepare", file, *how)
    kit.call(out, "text", f"{folders['text']}/meta.json", "prepare", f"--out={folders['text']}", "--train_bpe=4096")
    return folders


def flags(task, arm, data, seed, folder):
    """The arguments of train.py for an arm."""
    much = TEXT if task == "text" else REGISTER
    window = SHORT if arm == "short" else LONG
    goes_on = arm in ("raised", "kept")
    count = round(scale * (much["more"] if goes_on else much["short"]))
    if arm == "long":
        count = round(scale * (much["short"] * SHORT // LONG + much["more"]))
    batch = much["step"] // window
    count -= count % batch
    rate = much["slow"] if goes_on else much["lr"]
    settings = dict(
        data=data,
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
        **(SHAPE if task == "register" else {}),
    )
    if goes_on:
        settings["init_from"] = f"{folder}/short"
    return [much["config"], *kit.flags(settings)]


def examined(task, arm, seed, folders):
    """A run, trained and measured: a line of rows.jsonl."""
    folder = f"{out}/{task}-{seed}"
    path = f"{folder}/{arm}"
    kit.train(path, flags(task, arm, folders[task], seed, folder))
    how = [f"--by_position={SHORT // 2}"] if task == "text" else [f"--lookup={ASKED}", "--limit=5"]
    done = f"{path}/measured/evaluation.json"
    kit.call(path, "measured", done, "evaluate", f"--init_from={path}", f"--window={LONG}", *how,
             f"--out={path}/measured", folders[task])
    found = read_json(done)
    return dict(task=task, arm=arm, seed=seed, tokens=read_json(f"{path}/summary.json")["tokens"],
                positions=found["positions"], lookups=found["lookups"])


# ----------------------------------------------------------------------------------------------------------------------
# what came of it


def of_arm(rows, task, arm):
    return [row for row in rows if (row["task"], row["arm"]) == (task, arm)]


def table_md(rows):
    """Both tables: a pure function of the runs."""
    some = of_arm(rows, "text", "short")
    lines = ["# A longer window, at the size of a laptop", "",
             f"What `python -m studies.length` came to; the code is `studies/length.py`. {len(some)} seeds; ± is half of "
             "the 95 % interval by Student's t.", "", "![by position, and by distance](length.png)", "",
             "## Bits per byte of validation text by position in a window of 1,024", ""]
    body = []
    for i, place in enumerate(some[0]["positions"]):
        cells = [kit.interval([row["positions"][i]["bits_per_byte"] for row in of_arm(rows, "text", arm)], 3)
                 for arm in NAMES]
        body.append(f"| {place['begin']:,} to {place['end'] - 1:,} | {' | '.join(cells)} |")
    head = f"| position | {' | '.join(NAMES.values())} |"
    lines += [*kit.table(head, body), "", f"## Keys that were looked up, of {ASKED} at each distance and seed", ""]
    body = []
    for i, one in enumerate(of_arm(rows, "register", "short")[0]["lookups"]):
        cells = [kit.interval([row["lookups"][i]["right"] / row["lookups"][i]["n"]
                               for row in of_arm(rows, "register", arm)]) for arm in NAMES]
        body.append(f"| {one['distance']:,} | {' | '.join(cells)} |")
    return "\n".join([*lines, *kit.table(head.replace("position", "distance in tokens"), body)]) + "\n"


def draw(rows, path):
    """Bits per byte by position; right answers by distance. Means of the seeds, and a point for each."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.2))
    for i, (arm, name) in enumerate(NAMES.items()):
        curves = [[place["bits_per_byte"] for place in row["positions"]] for row in of_arm(rows, "text", arm)]
        places = of_arm(rows, "text", arm)[0]["positions"]
        middles = [(place["begin"] + place["end"]) / 2 for place in places]
        left.plot(middles, list(map(statistics.fmean, zip(*curves))), color=f"C{i}", marker="o", label=name)
        shares = [[one["right"] / one["n"] for one in row["lookups"]] for row in of_arm(rows, "register", arm)]
        distances = [one["distance"] for one in of_arm(rows, "register", arm)[0]["lookups"]]
        right.plot(distances, list(map(statistics.fmean, zip(*shares))), color=f"C{i}", label=name)
        for curve in shares:
            right.plot(distances, curve, color=f"C{i}", marker=".", linestyle="")
    left.set(title="validation text", xlabel="position in the window", ylabel="bits per byte")
    right.set(title="keys looked up", xlabel="tokens since the key was said", ylim=(-0.03, 1.03), xscale="log")
    right.set_xticks(distances, map(str, distances))
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
        folders = begin()
        every = [(task, seed) for seed in range(first_seed, first_seed + seeds) for task in ("register", "text")]

        # `raised` and `kept` go on from `short`.
        def one(asked, device):
            task, seed = asked
            return [examined(task, arm, seed, folders) for arm in NAMES]
        kit.write_rows(lines, [row for group in kit.in_parallel(jobs, one, every) for row in group])
    rows = kit.rows_to_report(lines, "studies.length")
    kit.write(f"{results}/table.md", table_md(rows))
    draw(rows, f"{results}/length.png")
    print(table_md(rows))


if __name__ == "__main__":
    run(main, globals())
