"""
What does fine-tuning cost? Learning rate x rank: what is gained of a new text, and what is lost of the old one.

    gained = bits per byte of held-out answers of the new text, before - after        higher is better
    lost   = bits per byte of old text, after - before (posttrain/forgetting.py)      lower is better

The known case: of the LoRA runs on Apertus-8B in github.com/davmels/peft_apertus those at a rate of 1e-3 had the lowest
loss, and hardly answered another test any more. One also reads that adapters protect what a base knows. Here both sides
stand beside each other, with full fine-tuning as a third.

A rate does not mean the same at another rank, since the update counts s = alpha / r, nor for all weights. Arms are
therefore compared where they have lost equally much, in the picture on the right, and not at equal rates.

A small Apertus that has read the standard library learns conversations cut from another text: a line is what the user
says, the lines behind it are the answer. The text's end is held out. Every run sees the same conversations once, in an
order of its seed. Adapters are on all six matrices of a block; full fine-tuning trains embedding and head as well.

$ python -m studies.forget shakespeare.txt                # it goes on where it was stopped
$ python -m studies.forget --report                       # table and picture again from results/forget/rows.jsonl
"""

import sys

if __name__ == "__main__" and not __package__:
    print("forget.py: start it from the project's root, python -m studies.forget", file=sys.stderr)
    sys.exit(2)

import math
import os
import statistics

import numpy as np
import torch
from tqdm import tqdm

import chat
import convert
import evaluate
from engine import plot
from engine.files import read_text
from posttrain import lora
from studies import kit
from tokenizer import read_json

paths = []                              # the new text, one .txt file
start = ""                              # the base: run folder, Hugging Face folder or hub name; "" = train `size`
size = "configs/ablations/start.py"     # a config of train.py
data = "data/stdlib"                    # the old text: what prepare.py wrote
ranks = (0, 1, 16, 64)                  # of the adapters; 0 = all weights are trained
lrs = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
seeds = 3                               # of the order and of the adapters' initial values
alpha = 32.0                            # of the adapters
characters = 300                        # of a conversation, to the next line break
conversations = 1200                    # to learn from, the first ones
held_out = 150                          # of the text's end, to measure what is gained
batch_size = 8                          # conversations per step
old_windows = 128                       # of the old text
runs = "out/forget"                     # run folders
out = "results/forget"                  # rows.jsonl, table.md, forget.png
jobs = 0                                # runs at a time; 0 = one for each GPU, or for each CPU core without one
report = False                          # run nothing: table and picture from rows.jsonl


# -----------------------------------------------------------------------------
# the data


def cut(text):
    """Conversations made from a text, in order: each of about `characters`, its first line the user's."""
    rows = []
    lines = []
    for line in filter(None, map(str.strip, text.splitlines())):
        lines.append(line)
        if len(lines) > 1 and sum(map(len, lines)) >= characters:
            system = dict(role="system", content="Go on.")
            user = dict(role="user", content=lines[0])
            answer = dict(role="assistant", content="\n".join(lines[1:]))
            rows.append(dict(messages=[system, user, answer]))
            lines = []
    return rows


def split(path):
    """The conversations that are learnt from, and those that are held out. ValueError if the text is too short."""
    rows = cut(read_text(path))
    if len(rows) < conversations + held_out:
        raise ValueError(f"{path} gives {len(rows)} conversations of {characters} characters, and {conversations} + "
                         f"{held_out} are asked for: lower --conversations, or take a longer text")
    return rows[:conversations], rows[-held_out:]


# -----------------------------------------------------------------------------
# a run


def arguments(base, file, rank, lr, seed):
    """
    The arguments of posttrain/sft.py for one run, without its folder. Optimizer and schedule are its own: AdEMAMix, a
    short warm-up, then linear to the end.
    """
    return kit.flags(dict(
        init_from=base,
        data=file,
        old=data,
        old_windows=old_windows,
        lora_r=rank,
        lora_alpha=alpha,
        lr=lr,
        seed=seed,
        batch_size=batch_size,
        micro_batch=batch_size,
        rank_every=0,
        checkpoint_every=0,
        dtype="float32"))


def tune(argv, folder, device=None):
    """
    Run SFT into a folder, unless it is finished. Returns whether it has ended: a run whose loss is no number stops.

    ValueError with its last line if anything else goes wrong.
    """
    failed = f"{folder}/diverged.txt"
    if not os.path.exists(f"{folder}/summary.json") and not os.path.exists(failed):
        log = f"{folder}/output.txt"
        code, last = kit.run_script("posttrain.sft", [*argv, f"--out={folder}", "--resume"], log, device=device)
        if code and "Stopped before the update" in last:
            kit.write(failed, last)
        elif code:
            raise ValueError(f"posttrain.sft {' '.join(argv)} ended with code {code}: {last}. "
                             "The same command tries again where it stopped")
    return not os.path.exists(failed)


def answer_bits(model, tok, rows):
    """
    Bits of the answers of conversations and their bytes: two arrays (n,).

    As in training, the end of an answer is a token of it. It has no byte.
    """
    windows = []
    for row in rows:
        ids, said = chat.render(tok, row, "2025-09-02")
        # What is beyond the model's window was never learnt either.
        windows.append((ids[:model.config.block_size + 1], said.index(True)))
    bits = []
    for window in windows:
        [(nll, _)] = evaluate.token_scores(model, [window])
        bits.append(nll.sum() / math.log(2))
    sizes = [len(row["messages"][-1]["content"].encode()) for row in rows]
    return np.array(bits), np.array(sizes)


@torch.no_grad()
def moved(model, base):
    """|dW| / |W| over the matrices of all blocks; adapters become part of them."""
    lora.merge(model)
    update = whole = 0.0
    for name, p in base.named_parameters():
        if "layers." in name and p.ndim > 1:
            update += (model.get_parameter(name) - p).square().sum().item()
            whole += p.square().sum().item()
    return math.sqrt(update / whole)


def measured(folder, base, before, rows):
    """
    What a finished run has gained and lost.

    base: its start, loaded; rows: the conversations held out; before: their bits with it.
    """
    summary = read_json(f"{folder}/summary.json")
    model, tok = convert.load_ready(folder, "cpu", "float32")
    after, sizes = answer_bits(model, tok, rows)
    gained, half = evaluate.ratio(before - after, sizes)
    return dict(
        gained=gained,
        gained_plus_minus=half,
        new_before=before.sum() / sizes.sum(),
        lost=summary["old_lost"],
        lost_plus_minus=summary["old_plus_minus"],
        old_before=summary["old_before"],
        kl=summary["old_kl"],
        loss=summary["loss_last"],
        change=moved(model, base),
        steps=summary["steps"])


def run_all(path):
    """All runs of the grid that are not finished yet, several at a time. Returns the lines of rows.jsonl."""
    base = start or f"{runs}/base"
    if not start:
        kit.train(base, [size, f"--data={data}", "--minutes=0"])
    model, tok = convert.load_ready(base, "cpu", "float32")
    train, rows = split(path)
    before, _ = answer_bits(model, tok, rows)
    file = f"{runs}/{kit.digest(train)}.jsonl"
    kit.write_rows(file, train)
    grid = [(rank, lr, seed) for seed in range(1, seeds + 1) for rank in ranks for lr in lrs]

    def one(rank, lr, seed, device):
        argv = arguments(base, file, rank, lr, seed)
        folder = f"{runs}/{kit.digest(argv)}"
        row = dict(rank=rank, lr=lr, seed=seed, scale=alpha / rank if rank else None)
        if tune(argv, folder, device):
            row |= measured(folder, model, before, rows)
        return row

    # One thread for each model that is measured.
    torch.set_num_threads(1)
    done = tqdm(kit.in_parallel(jobs, one, *zip(*grid)), "runs", len(grid), unit="run")
    return list(done)


# -----------------------------------------------------------------------------
# what the runs say


def groups(rows):
    """{(rank, lr): its rows that ended}, in the order of the grid."""
    found = {}
    for row in sorted(rows, key=lambda row: (row["rank"], row["lr"])):
        found.setdefault((row["rank"], row["lr"]), []).append(row)
    return {key: [row for row in group if "lost" in row] for key, group in found.items()}


def name_of(rank):
    return f"LoRA {rank}" if rank else "full"


def table_md(rows):
    """The grid as Markdown: mean and 95 % interval over seeds."""
    lines = []
    for (rank, lr), group in groups(rows).items():
        scale = f"{alpha / rank:g}" if rank else ""
        cells = [
            kit.interval([row[key] for row in group], 3)
            for key in ("gained", "lost", "change")
        ]
        kl = kit.interval([row["kl"] for row in group if row["kl"]], 3)
        ended = len(group) or "diverged"
        lines.append(f"| {name_of(rank)} | {scale} | {lr:g} | {' | '.join(cells)} | {kl} | {ended} |")
    head = "| trained | s | rate | gained (bits/byte) | lost (bits/byte) | dW / W | KL (nats/token) | seeds |"
    some = next(row for row in rows if "lost" in row)
    return "\n".join([
        "# Gained and lost, by learning rate and rank",
        "",
        f"{some['steps']} steps. Before: {some['new_before']:.3f} bits per byte of the new text's held-out answers, "
        f"{some['old_before']:.3f} of the old text. ± is the 95 % interval over seeds. KL: to the base, on old text.",
        "",
        *kit.table(head, lines),
        ""])


def draw(rows, picture):
    """What is gained and what is lost over the learning rate, and one over the other; a colour for each rank."""
    figure, axes = plot.pyplot().subplots(1, 3, figsize=(14, 4.4))
    means = {
        key: [statistics.fmean(row[what] for row in group) for what in ("gained", "lost")]
        for key, group in groups(rows).items()
        if group
    }
    for n, rank in enumerate(sorted({rank for rank, _ in means})):
        mine = [(lr, *values) for (r, lr), values in means.items() if r == rank]
        lr, gained, lost = zip(*mine)
        how = dict(color=f"C{n}", marker=".", label=name_of(rank))
        axes[0].plot(lr, gained, **how)
        axes[1].plot(lr, lost, **how)
        axes[2].plot(lost, gained, **how)
    for axis in axes[:2]:
        axis.set(xscale="log", xlabel="learning rate", ylabel="bits per byte")
    axes[0].set(title="gained: held-out answers of the new text")
    axes[1].set(title="lost: the old text")
    axes[2].set(title="at equal forgetting", xlabel="lost (bits per byte)", ylabel="gained (bits per byte)")
    for axis in axes:
        axis.grid(alpha=0.2)
    axes[0].legend()
    plot.finish(figure, picture)


def main():
    if report:
        rows = kit.rows_to_report(f"{out}/rows.jsonl", "studies.forget")
    else:
        if len(paths) != 1:
            raise ValueError("name the new text, one .txt file: python -m studies.forget shakespeare.txt")
        rows = run_all(paths[0])
        kit.write_rows(f"{out}/rows.jsonl", rows)
    text = table_md(rows)
    kit.write(f"{out}/table.md", text)
    draw(rows, f"{out}/forget.png")
    print(f"{text}the picture: {out}/forget.png")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
