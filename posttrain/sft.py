"""
SFT, supervised fine-tuning: from a model of text to one that answers (Apertus report sec. 4).

    loss = - sum over what the assistant says of log p(token | all before it)  /  the number of such tokens per step

A conversation is written in Apertus' chat format (chat.py); system, developer, user and tool texts are read, never
learnt. Learnt is what the model must produce by itself: its words, its thoughts with their brackets, its tool calls,
and <|assistant_end|>. The published template leaves that token out after the last answer, so a model trained on its
text as it is never learns to stop there; it is added here.

    <s><|system_start|>…<|developer_end|><|user_start|>2+2?<|user_end|><|assistant_start|>4<|assistant_end|>
                                                                                          ^^^^^^^^^^^^^^^^^^ loss

In one epoch every loss is measured on conversations that the model has not seen: the training curve is a held-out
curve. The conversations become ids once, in out/<run>/tokens, four bytes a token, which all ranks map. After SIGTERM,
SIGUSR2, or a file named `stop` in the run folder, all ranks save at the end of the step and leave; --resume goes on.

$ python -m posttrain.sft --data=conversations.jsonl --show        # the first ones, token by token, the learnt in green
$ python -m posttrain.sft --init_from=out/laptop --data=conversations.jsonl
$ python -m posttrain.sft configs/sft_8b.py --data=mixture.jsonl --resume
$ torchrun --nproc_per_node=8 -m posttrain.sft configs/sft_8b.py --parallel=fsdp     # the same numbers on more ranks
"""

import sys

if __name__ == "__main__" and not __package__:
    print("sft.py: start it from the project's root, python -m posttrain.sft", file=sys.stderr)
    sys.exit(2)

import functools
import hashlib
import itertools
import json
import math
import os
import time

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import chat
import convert
import tokenizer
from ademamix import build_optimizer
from chat import count, learnable, left_out, numbered_rows, parsed
from configurator import run, settings
from engine import checkpoint, runs
from engine.files import write_flushed
from engine.hardware import can_compile, pick_dtype
from engine.parallel import gradients, orderly_exit, recompute_activations, stop_signals
from posttrain import collapse
from posttrain.common import (
    adapters_of, begin, collect, end, items, joined, linear, progress, save_if_due, slices, start_model, update, window,
)

# -----------------------------------------------------------------------------
# the run
out = "out/sft"                 # its folder
init_from = "out/laptop"        # the start model: run folder, Hugging Face folder or hub name
data = "conversations.jsonl"    # per line {"messages": [{"role", "content"}, ...]} and, if any, "tools", "thinking"
show = False                    # print the first conversations token by token, what is learnt in green, and stop
resume = False                  # go on from the newest intact checkpoint of this folder
device = "auto"                 # cuda | mps | cpu
dtype = "auto"                  # float32 | bfloat16, of activations; weights and states are fp32
parallel = "none"               # none | ddp | fsdp | hsdp, under torchrun; 8B with AdEMAMix: 161 GB, 20 bytes a weight
compile = False                 # torch.compile: pays on CUDA with pack (few shapes)
seed = 28                       # of the order of conversations
date = "2025-09-02"             # "Current date" without a system message; fixed, so that a run can be repeated
# what is trained (posttrain/lora.py)
lora_r = 0                      # rank of the adapters; 0 = no adapters, all weights are trained
lora_alpha = 32.0               # their update counts alpha / r
lora_on = "all"                 # or some of q_proj,k_proj,v_proj,o_proj,up_proj,down_proj
lora_rs = False                 # rank-stabilised: alpha / sqrt(r)
base = "fp32"                   # what frozen weights are held in: fp32 | bf16 | int8 | nf4
recompute = "none"              # activations that backward computes again: none | selective | full
# layout
max_length = 0                  # tokens; 0 = the model's window. What is longer is dropped and counted, never cut
pack = False                    # False: one conversation per row, padded, as Apertus; True: several, apart in attention
# the schedule
epochs = 1
batch_size = 512                # conversations per step, packed or not
micro_batch = 4                 # rows in memory at once
warmup = 0.03                   # share of the steps; linear up, then linear down to the end
# the optimizer
optimizer = "ademamix"          # ademamix | adamw
lr = 5e-6
betas = (0.9, 0.999, 0.99)      # AdamW uses the first two
alpha = 8.0                     # it and beta3 warm up over the whole run
eps = 1e-8
weight_decay = 0.0
grad_clip = 1.0
rank_every = 100                # steps between diagnoses of collapse (posttrain/collapse.py); 0 = never
checkpoint_every = 500          # steps; 0 = at the end only
keep_checkpoints = 2            # of the newest; 0 = all
# -----------------------------------------------------------------------------


# -----------------------------------------------------------------------------
# conversations on disk: made into ids once, four bytes a token, and mapped by every rank

SAID = np.uint32(1 << 31)       # the top bit of an id: the assistant must produce it itself
PART = 2**26                    # bytes of text that become one file


class Conversations:
    """
    conversations[k] -> (ids, said), two arrays (T,), int64 and bool. parts: what tokenize() has written for each file.

    Ranks share the pages of the files; what each of them holds itself is 8 bytes a conversation.
    """

    def __init__(self, parts):
        lengths = [part["lengths"] for part in parts]
        self.files = [part["file"] for part in parts]
        # Tokens before each file, and before each conversation.
        self.borders = np.cumsum([0, *map(sum, lengths)])
        self.starts = np.cumsum([0, *itertools.chain(*lengths)])
        self.tokens = int(self.starts[-1])

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, k):
        begin, end = self.starts[k:k + 2]
        file = np.searchsorted(self.borders, begin, "right") - 1
        before = self.borders[file]
        tokens = mapped(self.files[file])[begin - before:end - before]
        ids = tokens & ~SAID
        return ids.astype(np.int64), tokens >= SAID


@functools.lru_cache(64)        # files open at a time
def mapped(file):
    return np.memmap(file, "<u4", "r")


def tokenized(folder, tok, path, max_length, date, ranks):
    """
    The conversations of a .jsonl file that can be learnt from, as Conversations; {reason: (count, first line)} of the
    others; how many tokens are learnt; the file's sha256.

    Each rank takes its share of the file. For PART bytes of text it leaves folder/KEY-N.ids, and when that is whole
    KEY-N.json; KEY is a hash of all that decides an id. A killed run therefore keeps what is done, and nothing stale is
    read. ValueError: a line that is no conversation, or nothing to learn from.
    """
    sha = checkpoint.sha256(path) if ranks.first else ""
    sha = checkpoint.everyone(sha, ranks.files)[0]
    # The files that decide the format, and which turns are learnt, are part of the key.
    code = [checkpoint.sha256(file) for file in (__file__, chat.__file__, tokenizer.__file__)]
    decisive = repr((sha, tok.hash, max_length, date, code))
    key = hashlib.sha256(decisive.encode()).hexdigest()[:16]
    os.makedirs(folder, exist_ok=True)
    size = os.path.getsize(path)
    starts = range(0, size, PART)
    names = [os.path.join(folder, f"{key}-{n:05d}") for n in range(len(starts))]
    with tqdm(
        total=size // ranks.size,
        desc="tokenizing",
        unit="B",
        unit_scale=True,
        delay=2,
        leave=False,
        disable=not ranks.first,
    ) as bar:
        for n in range(ranks.rank, len(names), ranks.size):
            if not os.path.exists(names[n] + ".json"):
                tokenize(names[n], tok, path, starts[n], max_length, date, bar)
    ranks.add(0)        # Barrier: no rank reads before every rank has written.
    parts, bad, lines, learnt = [], {}, 0, 0
    for name in names:
        part = tokenizer.read_json(name + ".json")
        for why, (times, line) in part["bad"].items():
            count(bad, why, lines + line, times)
        lines += part["lines"]
        learnt += part["learnt"]
        parts.append(dict(part, file=name + ".ids"))
    conversations = Conversations(parts)
    if not len(conversations):
        raise ValueError(f"{path}: {left_out(bad, 0, 'conversations')}" if bad else f"{path} is empty")
    return conversations, bad, learnt, sha


def tokenize(name, tok, path, start, max_length, date, bar):
    """
    Write name.ids, then name.json: the conversations in the lines that begin in PART bytes of a file, from `start` on.

    bar: progress in bytes. ValueError names a line that is no conversation.
    """
    tokens = [np.zeros(0, np.uint32)]
    lengths, bad, lines = [], {}, 0
    with open(path, "rb") as f:
        if start:
            # The line that has begun before `start` belongs to the part before. It may end exactly there.
            f.seek(start - 1)
            f.readline()
        while f.tell() < start + PART and (line := f.readline()):
            lines += 1
            bar.update(len(line))
            if not line.strip():
                continue
            row = parsed(line)
            if row is None:
                # Reading the file from its beginning raises with the number that the line has in the whole file.
                for _ in numbered_rows(path):
                    pass
            found = learnable(tok, row, max_length, date)
            if isinstance(found, str):
                count(bad, found, lines)
            else:
                ids, said = np.array(found, np.uint32)
                tokens.append(ids | SAID * said)
                lengths.append(len(ids))
    tokens = np.concatenate(tokens)
    learnt = int((tokens >= SAID).sum())
    stored = tokens.astype("<u4").tobytes()
    write_flushed(name + ".ids", stored, shared=True)
    part = dict(
        lengths=lengths,
        learnt=learnt,
        bad=bad,
        lines=lines,
    )
    write_flushed(name + ".json", json.dumps(part), shared=True)


# -----------------------------------------------------------------------------
# conversations as rows of a batch


def rows_of(conversations, pack, max_length):
    """
    The conversations of a step, laid out in rows: one each, or first-fit by falling length.

    Packing changes no number, only the padding: attention stays inside a conversation, and RoPE knows distances alone.
    """
    if not pack:
        return [[c] for c in conversations]
    rows = []
    for c in sorted(conversations, key=lambda c: -len(c[0])):
        for row in rows:
            taken = sum(len(ids) for ids, _ in row)
            if taken + len(c[0]) <= max_length:
                row.append(c)
                break
        else:
            rows.append([c])
    return rows


def tensors(rows, pad, device="cpu"):
    """Rows of conversations -> idx, targets (-1 where nothing is learnt), doc, each (rows, T), padded on the right."""
    idx, targets, doc = [], [], []
    for row in rows:
        ids, said = map(np.concatenate, zip(*row))
        idx.append(ids)
        # Position i predicts token i + 1. At the end of a conversation that is the <s> of the next, which is not said.
        learnt = np.where(said, ids, -1)
        targets.append(np.append(learnt[1:], -1))
        lengths = [len(ids) for ids, _ in row]
        numbers = np.arange(len(row))
        doc.append(np.repeat(numbers, lengths))

    def padded(rows, fill):
        rows = list(map(torch.from_numpy, rows))
        return pad_sequence(rows, batch_first=True, padding_value=fill).to(device)
    return padded(idx, pad), padded(targets, -1), padded(doc, -1)


# -----------------------------------------------------------------------------
# the run


def main():
    if show:
        return show_conversations()
    with joined(settings(globals())) as (ranks, device):
        tune(ranks, device)


def tune(ranks, device):
    adapters = adapters_of(globals())
    model, tok = start_model(init_from, device, pick_dtype(dtype, device), ranks, base, adapters, seed)
    recompute_activations(model, recompute)
    longest = window(max_length, model)
    folder = os.path.join(out, "tokens")
    conversations, bad, learnt, sha = tokenized(folder, tok, data, longest, date, ranks)
    if compile and can_compile(torch.device(device)):
        model.compile_blocks()
    n = len(conversations)
    steps = -(-epochs * n // batch_size)
    # The warm-ups of AdEMAMix last as long as the run, as in the report's post-training.
    opt = build_optimizer(
        model, optimizer, lr, betas, alpha, eps, weight_decay,
        alpha_warmup=steps, beta3_warmup=steps,
    )
    notes = [left_out(bad, n, "conversations")] if bad else []
    notes.append(f"{conversations.tokens:,} tokens, {learnt:,} of them learnt")
    config = dict(
        settings(globals()),
        max_length=longest,
        data_hash=sha[:16],
        tokenizer_hash=tok.hash[:16],
        start_hash=model.start[:16],
    )
    start, log = begin(config, model, tok, opt, notes, "conversations", n, steps, ranks)
    # A signal before this point ends the process at once: what is on disk by then is not done again.
    with stop_signals() as signals:
        for step in (bar := progress(start, steps, ranks)):
            began = time.perf_counter()
            batch = [conversations[k] for k in items(step, batch_size, n, epochs, seed)]
            rows = rows_of(batch, pack, longest)
            n_tokens = int(sum(said.sum() for _, said in batch))        # learnt, in the whole step

            # Forward and backward; then clip and update. If any rank is asked to stop, all of them do.
            loss, size = forward_backward(model, rows, n_tokens, tok.pad, ranks, device)
            norm = collect(model, ranks, grad_clip)
            loss, stopping = ranks.add(loss, runs.asked_to_stop(out, signals, ranks))
            rate = lr * linear(step, steps, warmup)
            update(opt, step, rate, loss, norm)

            # Say what happened.
            done = step + 1
            speed = size * ranks.size / (time.perf_counter() - began)
            tokens = sum(len(ids) for ids, _ in batch)
            seen = {}
            if rank_every and (step % rank_every == 0 or done == steps):
                some = rows[:4 * micro_batch]
                idx, targets, doc = tensors(some, tok.pad, device)
                seen = collapse.diagnose(model, idx, targets >= 0, doc if pack else None)
            log(step=step, loss=loss, grad_norm=norm, lr=rate,
                tokens=tokens, learnt=n_tokens, tok_s=round(speed), **seen)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)

            # Save, and stop if asked to.
            save_if_due(config, done, done == steps or stopping, model, opt, ranks)
            if stopping:
                break
    end(config, model, tok, done, steps, ranks)


def forward_backward(model, rows, n_tokens, pad, ranks, device):
    """
    The gradients of this rank's micro-batches of a step.

    n_tokens: how many tokens the whole step learns. Returns this rank's part of the loss, and its positions.
    """
    loss, size = torch.zeros(()), 0
    for part, last in slices(len(rows), micro_batch, ranks):
        mine = rows[part]
        idx, targets, doc = tensors(mine or rows[:1], pad, device)
        if not mine:
            targets.fill_(-1)       # an empty micro-batch runs along, and adds nothing
        if not pack:
            doc = None
        with gradients(model, ranks, last):
            _, part_loss = model(idx, targets, doc=doc, n_tokens=n_tokens)
            part_loss.backward()
        loss += part_loss.detach().cpu()
        size += idx.numel()
    return loss, size


def show_conversations():
    """--show: the first three conversations, token by token, or why one of them would be left out."""
    if os.path.isdir(os.path.join(init_from, "ckpt")):
        tok = tokenizer.load_for(init_from)
    else:
        tok = convert.tokenizer_from_hf(convert.local(init_from))
    tok.check_chat()
    for n, row in itertools.islice(numbered_rows(data), 3):
        found = learnable(tok, row, math.inf, date)
        if isinstance(found, str):
            print(f"line {n} is left out: {found}")
            continue
        ids, said = found
        print("·".join(coloured(tok, i, learnt) for i, learnt in zip(ids, said)))
        print(f"{sum(said)} of {len(ids)} tokens are learnt (green)\n")


def coloured(tok, i, learnt):
    """A token for the terminal, green if it is learnt, otherwise grey; a line break stays visible."""
    text = tok.decode_bytes([i]).decode("utf-8", errors="backslashreplace")
    text = text.replace("\n", "⏎")
    colour = 32 if learnt else 90
    return f"\x1b[{colour}m{text}\x1b[0m"


if __name__ == "__main__":
    with orderly_exit():
        run(main, globals())
