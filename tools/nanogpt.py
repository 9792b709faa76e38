"""
The race against nanoGPT's README: characters of Shakespeare, its command for a CPU, its model and batch.

    python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1
        --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000
        --dropout=0.0                                  (1.536M tokens; "a loss of only 1.88")

How many tokens, and how many seconds, until an Apertus of as many parameters is as good as that command's model in the
end? What is the same for both sides: the text, its split (the last tenth validates), the ids (nanoGPT's own, the
characters in order), the batches of a seed to the last character, one thread, and the judge: the mean loss over all
windows of the validation split, each once, where nanoGPT draws 20 batches. What is each side's own:

    nanoGPT    LayerNorm, GELU, learned positions; AdamW, cosine; eager and in fp32, as on a CPU by its command
    ours       RMSNorm, xIELU, QK-norm, RoPE; AdEMAMix, WSD, with the values of configs/recipe.py; compiled, in bf16
               where the processor has it, as train.py does. The head is not tied, but there are no positions to learn

A loss is lowest where a schedule ends, so a run is never cut short: "so many steps" are runs of that length, whose
whole schedule (a twentieth of warm-up) is fitted to it. Both sides choose their rate on the same grid with seed 0,
which is not reported; lengths are then tried from the shortest on, until all seeds of a side reach the target, which is
the mean of the command's own runs. nanoGPT tuned like that is the fair opponent.

Seconds: of the CPU, of this process and the compilers that it starts, so that others' load does not enter; and of a
clock. They begin before the model is made, every run in a new process and with an empty compile cache. Validation does
not count. The sides take turns, and one length of both takes turns with the command, since a machine's pace changes.

$ python -m tools.nanogpt --text=input.txt     # half an hour of one core; goes on where it was stopped
$ python -m tools.nanogpt --report             # table.md and nanogpt.png again from rows.jsonl
"""

import sys

if __name__ == "__main__" and not __package__:
    print("nanogpt.py: start it from the project's root, python -m tools.nanogpt", file=sys.stderr)
    sys.exit(2)

import contextlib
import hashlib
import itertools
import json
import os
import statistics

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from ademamix import build_optimizer
from configurator import config_file, read_config, run
from engine.hardware import can_compile, keep_freed_memory, pick_dtype
from engine.plot import finish, pyplot
from model import Apertus, ApertusConfig
from schedule import wsd
from studies import kit
from tokenizer import read_json
from tools.peers import NanoGPT, nanogpt_batch, nanogpt_optimizer, nanogpt_rate

text = "input.txt"              # tiny Shakespeare, or any text
out = "out/nanogpt"             # ids and runs
results = "results/nanogpt"     # rows.jsonl, table.md, nanogpt.png
seeds = 3                       # that are reported, from 1 on; with 0 the rates are chosen
rates = (1e-3, 2e-3, 4e-3, 8e-3)            # the grid of both sides; goes on while a best one lies at its edge
searched = 600                  # steps of a run of the grid
lengths = (600, 800, 1000, 1200, 1600) # steps that are tried until the target is reached
beside = 800                    # the length that takes turns with the command's runs
eval_every = 200                # steps; the end is always validated, and of the grid nothing else
only = ""                       # one run by itself: side,rate,steps,seed
report = False                  # run nothing: table and picture again from rows.jsonl

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
B, T, L, H, C = 12, 64, 4, 4, 128           # windows of a step, tokens of a window, layers, heads, width
README = dict(side="nanoGPT", lr=1e-3, steps=2000)
NAMES = {"README": "nanoGPT, README", "nanoGPT": "nanoGPT, tuned", "ours": "ours, tuned"}


# -----------------------------------------------------------------------------
# the text


def write_ids(path, folder):
    """
    A text -> train.npy and val.npy, its characters as nanoGPT numbers and splits them, and text.json: how many
    characters, how many kinds of them, and a hash. ValueError, which says where the text is, if it is not here or too
    short.
    """
    if not os.path.isfile(path):
        raise ValueError(f"no text {path!r}: download {URL} and name it, --text=input.txt")
    with open(path, encoding="utf-8") as f:
        characters = f.read()
    kinds = sorted(set(characters))
    number = {character: i for i, character in enumerate(kinds)}
    ids = np.array([number[character] for character in characters], np.uint16)
    cut = int(len(ids) * 0.9)
    if len(ids) < 20 * T:
        raise ValueError(f"{path} has {len(ids):,} characters: want {20 * T} or more, of which a tenth validate")
    os.makedirs(folder, exist_ok=True)
    np.save(f"{folder}/train.npy", ids[:cut])
    np.save(f"{folder}/val.npy", ids[cut:])
    sha256 = hashlib.sha256(characters.encode()).hexdigest()
    kit.write(f"{folder}/text.json", json.dumps(dict(characters=len(ids), kinds=len(kinds), sha256=sha256)))


def windows(ids):
    """All whole windows of T ids that do not overlap, and the ids that follow each: two of (n, T) int64."""
    n = (len(ids) - 1) // T
    ids = torch.from_numpy(ids.astype(np.int64))
    return ids[:n * T].view(n, T), ids[1:n * T + 1].view(n, T)


@torch.no_grad()
def judge(logits, idx, targets):
    """Mean loss in nats over windows idx, targets (n, T), of either side's logits(idx). Eager: it compiles nothing."""
    total = 0.0
    with torch.compiler.set_stance("force_eager"):
        for x, y in zip(idx.split(64), targets.split(64)):
            z = logits(x).float().flatten(0, 1)
            total += F.cross_entropy(z, y.flatten(), reduction="sum").item()
    return total / targets.numel()


# -----------------------------------------------------------------------------
# the sides. Each returns its model, logits(idx), and step(n, idx, targets), which is one step of training


def shape(kinds):
    """nanoGPT's shape as an ApertusConfig; an MLP of 4 C without a gate has as many parameters as its."""
    return ApertusConfig(block_size=T, vocab_size=kinds, n_layer=L, n_head=H, n_kv_head=H, n_embd=C, ffn_dim=4 * C,
                         init_std=0.02)


def nanogpt(kinds, lr, steps, seed):
    """nanoGPT by its README; the warm-up of another length is shortened alike."""
    torch.manual_seed(seed)
    model = NanoGPT(shape(kinds))
    optimizer = nanogpt_optimizer(model, lr)

    def step(n, idx, targets):
        for group in optimizer.param_groups:
            group["lr"] = nanogpt_rate(n, steps, lr, steps // 20)
        model(idx, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, model.logits, step


def ours(kinds, lr, steps, seed):
    """A step of train.py, without Goldfish: no passage comes often enough here to be recited."""
    how = read_config(config_file("configs/recipe.py"))
    model = Apertus(shape(kinds), seed)
    model.dtype = pick_dtype("auto", "cpu")
    compiled = can_compile(torch.device("cpu"))
    if compiled:
        model.compile_blocks()
    optimizer = build_optimizer(model, "ademamix", lr, how["betas"], how["alpha"], 1e-8, 0.1, steps, steps, compiled)

    def step(n, idx, targets):
        for group in optimizer.param_groups:
            group["lr"] = wsd(n, lr, lr / 10, steps // 20, steps, 3 * steps // 10)
        model(idx, targets)[1].backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        optimizer.step(grad_scale=min(1.0, how["grad_clip"] / (norm + 1e-6)))
        optimizer.zero_grad(set_to_none=True)
    return model, lambda idx: model(idx)[0], step


SIDES = {"nanoGPT": nanogpt, "ours": ours}


# -----------------------------------------------------------------------------
# a run


def seconds():
    """Seconds so far, (2,): of the CPU, by this process and by compilers that it waited for; and of the clock."""
    times = os.times()
    return np.array([sum(times[:4]), times.elapsed])


def one_run(side, lr, steps, seed):
    """
    Train one side, and return its line of rows.jsonl.

    curve: [steps done, CPU seconds, seconds, validation loss]; first: CPU seconds to the end of the first step, most of
    them compilation; windows: a hash of all that was read.
    """
    # Compiling is done in this process, and not in a pool, whose seconds nobody could count. torch reads this setting,
    # and that of can_compile, when its compiler is imported.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    can_compile(torch.device("cpu"))
    from torch._inductor.utils import fresh_cache
    torch.set_num_threads(1)
    keep_freed_memory()
    kinds = read_json(f"{out}/text.json")["kinds"]
    held_out = windows(np.load(f"{out}/val.npy", allow_pickle=False))
    seen, curve, first = hashlib.sha256(), [], None
    # What is not reported may find compiled what another run of the grid has left.
    with fresh_cache() if seed else contextlib.nullcontext():
        began = seconds()
        model, logits, step = SIDES[side](kinds, lr, steps, seed)
        for n in tqdm(range(steps), f"{side}, {lr:g}", unit="step"):
            idx, targets = nanogpt_batch(f"{out}/train.npy", B, T, [seed, n])
            step(n, idx, targets)
            seen.update(idx.numpy().tobytes() + targets.numpy().tobytes())
            done = n + 1
            first = first or (seconds() - began)[0]
            if done == steps or seed and done % eval_every == 0:
                cpu, wall = seconds() - began
                curve.append([done, round(cpu, 2), round(wall, 2), judge(logits, *held_out)])
                # As if validation had taken no time.
                began = seconds() - [cpu, wall]
    dtype = str(getattr(model, "dtype", None) or torch.float32)[6:]
    return dict(side=side, lr=lr, steps=steps, seed=seed, loss=curve[-1][-1], first=round(first, 2), curve=curve,
                parameters=sum(p.numel() for p in model.parameters()), dtype=dtype, windows=seen.hexdigest()[:10],
                load=round(os.getloadavg()[0], 2), torch=torch.__version__)


def run_of(side, lr, steps, seed):
    """The same in a process of its own, unless it has been run."""
    asked = f"{side},{lr:g},{steps},{seed}"
    folder = f"{out}/{kit.digest([asked, eval_every, read_json(f'{out}/text.json')])}"
    kit.call(folder, "run", f"{folder}/row.json", "tools.nanogpt", f"--only={asked}", f"--out={out}",
             f"--eval_every={eval_every}", f"--results={folder}")
    return read_json(f"{folder}/row.json")


# -----------------------------------------------------------------------------
# the race


def best_rate(rows, side):
    """The rate of the grid's run with the lowest loss."""
    return min((row for row in rows if row["side"] == side and row["seed"] == 0), key=lambda row: row["loss"])["lr"]


def search(run):
    """The grid: both sides at all rates, and at more of them while a best one lies at the edge. Yields rows."""
    rows, tried, new = [], [], list(rates)
    while new:
        for lr in new:
            for side in SIDES:
                rows.append(run(side, lr, searched, 0))
                yield rows[-1]
        tried = sorted([*tried, *new])
        best = {best_rate(rows, side) for side in SIDES}
        new = [2 * tried[-1]] * (tried[-1] in best) + [tried[0] / 2] * (tried[0] in best)


def race(run):
    """
    All runs that the race wants, by run(side, lr, steps, seed) -> row. Yields their rows.

    A length is given up at its first seed that misses the target, since all of them have to reach it.
    """
    rows = []
    for row in search(run):
        rows.append(row)
        yield row
    lr = {side: best_rate(rows, side) for side in SIDES}
    command = []
    for seed in range(1, seeds + 1):
        command.append(run(**README, seed=seed))
        yield command[-1]
        for side in SIDES:
            yield run(side, lr[side], beside, seed)
    target = statistics.fmean(row["loss"] for row in command)
    racing = list(SIDES)
    for steps in lengths:
        missed = set()
        for seed, side in itertools.product(range(1, seeds + 1), racing):
            if side not in missed:
                row = run(side, lr[side], steps, seed)
                yield row
                if row["loss"] > target:
                    missed.add(side)
        racing = [side for side in racing if side in missed]


# -----------------------------------------------------------------------------
# what came of it


def is_of(row, arm):
    """Whether a row is the command's own run, or else one of a tuned side."""
    command = all(row[name] == value for name, value in README.items())
    return row["seed"] > 0 and (command if arm == "README" else row["side"] == arm and not command)


def finishers(rows):
    """{arm: its runs of the shortest length that reached the target with all seeds}, and the target in nats."""
    command = [row for row in rows if is_of(row, "README")]
    target = statistics.fmean(row["loss"] for row in command)
    found = dict(README=command)
    for arm in SIDES:
        of_arm = [row for row in rows if is_of(row, arm)]
        for steps in sorted({row["steps"] for row in of_arm}):
            group = [row for row in of_arm if row["steps"] == steps]
            if len(group) == len(command) and all(row["loss"] <= target for row in group):
                found[arm] = group
                break
    return found, target


def spent(group, column):
    """Mean of CPU seconds (column 1) or of seconds (2) at the end of runs."""
    return statistics.fmean(row["curve"][-1][column] for row in group)


def summary(rows):
    """The race as lines of a table: a pure function of the rows."""
    found, target = finishers(rows)
    base = found["README"]
    lines = []
    for arm, group in found.items():
        first = group[0]
        of = [first["steps"] / base[0]["steps"], *(spent(group, i) / spent(base, i) for i in (1, 2))]
        losses = ", ".join(f"{row['loss']:.4f}" for row in group)
        shares = " | ".join(f"{share:.2f}x" for share in of)
        lines.append(f"| {NAMES[arm]} | {first['lr']:g} | {first['steps']:,} | {first['steps'] * B * T:,} | {losses} | "
                     f"{spent(group, 1):.1f} | {spent(group, 2):.1f} | "
                     f"{statistics.fmean(row['first'] for row in group):.1f} | {shares} |")
    head = ("| to the target | lr | steps | tokens | validation loss, seed by seed | CPU s | s | first step | tokens | "
            "CPU s | s |")
    return kit.table(head, lines)


def table_md(rows):
    """The page of the race: a pure function of the rows."""
    found, target = finishers(rows)
    grid = [row for row in rows if row["seed"] == 0]
    sizes = {row["side"]: f"{row['parameters']:,}" for row in rows}
    dtypes = {row["side"]: row["dtype"] for row in rows}
    loads = [row["load"] for row in rows if row["seed"]]
    lines = [
        "# The race against nanoGPT's README", "",
        f"What `python -m tools.nanogpt` came to; its docstring says what is the same and what is each side's own. "
        f"nanoGPT has {sizes['nanoGPT']} parameters and computes in {dtypes['nanoGPT']}, ours {sizes['ours']} and "
        f"{dtypes['ours']}. The target is {target:.4f} nats a character, the mean of nanoGPT's own command.", "",
        *summary(rows), "",
        "![loss over tokens and over CPU seconds](nanogpt.png)", "",
        "One thread. Each run compiles anew (first step); the last three columns are shares of nanoGPT's README. "
        f"The load was {min(loads):g} to {max(loads):g}: seconds of the clock (s) say little, seconds of the CPU "
        "more, tokens all.", "",
        f"## The grid, {grid[0]['steps']} steps of seed 0, not reported otherwise", ""]
    tried = sorted({row["lr"] for row in grid})
    loss = {(row["side"], row["lr"]): f"{row['loss']:.4f}" for row in grid}
    cells = [f"| {side} | {' | '.join(loss[side, lr] for lr in tried)} |" for side in SIDES]
    lines += kit.table(f"| | {' | '.join(f'{lr:g}' for lr in tried)} |", cells)
    lines += ["", "## The lengths that were tried", ""]
    cells = []
    for arm in SIDES:
        for row in sorted(rows, key=lambda row: (row["steps"], row["seed"])):
            if is_of(row, arm):
                word = "reached" if row["loss"] <= target else "missed"
                cells.append(f"| {NAMES[arm]} | {row['steps']:,} | {row['seed']} | {row['loss']:.4f} | {word} |")
    return "\n".join(lines + kit.table("| | steps | seed | validation loss | |", cells)) + "\n"


def draw(rows, path):
    """Validation loss over tokens and over CPU seconds, a line for each run; a dot where its schedule ends."""
    found, target = finishers(rows)
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for i, (arm, group) in enumerate(found.items()):
        label = f"{NAMES[arm]}: {group[0]['steps']:,} steps"
        for row in group:
            steps, cpu, _, loss = np.transpose(row["curve"])
            for axis, x in ((left, steps * B * T / 1e6), (right, cpu)):
                axis.plot(x, loss, color=f"C{i}", linewidth=1, label=label)
                axis.plot(x[-1], loss[-1], color=f"C{i}", marker="o", markersize=4)
            label = None
    left.set(xlabel="million tokens", ylabel="validation loss (nats a character)", ylim=(target - 0.05, target + 0.9))
    right.set(xlabel="CPU seconds, compilation among them")
    for axis in (left, right):
        axis.axhline(target, color="black", linestyle=":")
        axis.grid(alpha=0.2)
    left.legend()
    finish(figure, path)


def main():
    if only:
        side, lr, steps, seed = only.split(",")
        row = one_run(side, float(lr), int(steps), int(seed))
        return kit.write(f"{results}/row.json", json.dumps(row))
    lines = f"{results}/rows.jsonl"
    if not report:
        if seeds < 1:
            raise ValueError(f"seeds={seeds}: want at least one")
        write_ids(text, out)
        rows = {}
        # How many runs there will be is not known before they are over.
        for row in tqdm(race(run_of), "race", unit=" runs"):
            rows[row["side"], row["lr"], row["steps"], row["seed"]] = row
            kit.write_rows(lines, rows.values())
    rows = kit.rows_to_report(lines, "tools.nanogpt")
    kit.write(f"{results}/table.md", table_md(rows))
    draw(rows, f"{results}/nanogpt.png")
    print(table_md(rows))


if __name__ == "__main__":
    run(main, globals())
