"""
SFT, supervised fine-tuning: from a model of text to one that answers (Apertus report sec. 4).

    loss = - sum over what the assistant says of log p(token | all before it)  /  the number of such tokens in the whole step

A conversation is written in Apertus' chat format (tokenizer.py); system, developer, user and tool texts are read, never learnt. Learnt
is what the model must produce by itself: its words, its thoughts with their brackets, its tool calls - and <|assistant_end|>. The published
template leaves that token out after the last answer, so a model trained on its text as it is never learns to stop there; it is added here.

    <s><|system_start|>…<|system_end|>…<|developer_end|><|user_start|>2+2?<|user_end|><|assistant_start|>4<|assistant_end|>
                                                                                                         ^^^^^^^^^^^^^^^^^^ loss

In one epoch every loss is measured on conversations that the model has not seen: the training curve is a held-out curve.
The conversations become ids once, in out/<run>/tokens, four bytes a token, which all processes map. SIGTERM, SIGUSR2, or
a file named `stop` in the run folder: all processes save after the step that they are in, and leave; --resume goes on.

$ python -m posttrain.sft --data=conversations.jsonl --show             # the first conversations, what is learnt in green, token by token
$ python -m posttrain.sft --init_from=out/laptop --data=conversations.jsonl
$ python -m posttrain.sft configs/sft_8b.py --data=mixture.jsonl --resume
$ torchrun --nproc_per_node=8 -m posttrain.sft configs/sft_8b.py --parallel=fsdp       # the same numbers on more processes
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
import torch.distributed as dist
from tqdm import tqdm

import chat
import convert
import tokenizer
from ademamix import build_optimizer
from chat import count, learnable, left_out, numbered_rows, odd_line, parsed
from configurator import run, settings
from engine import checkpoint, runs
from engine.hardware import can_compile, pick_device, pick_dtype
from engine.parallel import Ranks, drop_gathered, gradients, orderly_exit, stop_signals
from posttrain import collapse
from posttrain.common import WAIT, collect, describe_run, finish, go_on, items, linear, shares, start_model, too_short, update, window

# -----------------------------------------------------------------------------
# the run
out = "out/sft"                 # its folder
init_from = "out/laptop"        # the start model: run folder, Hugging Face folder or hub name
data = "conversations.jsonl"    # a line a conversation: {"messages": [{"role", "content"}, ...]}, and if there are "tools", "thinking"
show = False                    # print the first conversations token by token, what is learnt in green, and stop
resume = False                  # go on from the newest intact checkpoint of this folder
device = "auto"                 # cuda | mps | cpu
dtype = "auto"                  # float32 | bfloat16, of activations; weights and states are fp32
parallel = "none"               # none | ddp | fsdp | hsdp, under torchrun (engine/parallel.py): 8B with AdEMAMix is 161 GB, 20 bytes a parameter
compile = False                 # torch.compile: pays on CUDA with pack (few shapes)
seed = 28                       # of the order of conversations
date = "2025-09-02"             # "Current date" where a conversation has no system message; fixed, so that a run can be repeated
# layout
max_length = 0                  # tokens; 0 = the model's window. A longer conversation is dropped and counted, never cut
pack = False                    # False: a conversation a row, padded, as Apertus; True: several in a row, attention stops between them
# the schedule
epochs = 1
batch_size = 512                # conversations a step, packed or not
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
rank_every = 100                # steps between rank diagnostics (posttrain/collapse.py); 0 = never
checkpoint_every = 500          # steps; 0 = at the end only
keep_checkpoints = 2            # of the newest; 0 = all
# -----------------------------------------------------------------------------


# -----------------------------------------------------------------------------
# conversations on disk: made into ids once, four bytes a token, and mapped by every process

SAID = np.uint32(1 << 31)               # the top bit of an id: the assistant must produce it itself
PART = 2**26                            # bytes of text that become one file


class Conversations:
    """
    conversations[k] -> (ids, said), arrays of one length. parts: what tokenize() returned for each file. Processes share
    the pages of the files; what each holds itself is 8 bytes a conversation.
    """

    def __init__(self, parts):
        self.files = [part["file"] for part in parts]
        self.ends = [np.cumsum([0, *part["lengths"]]) for part in parts]                # within their file
        self.first = np.cumsum([0, *(len(part["lengths"]) for part in parts)])          # conversations before each file

        self.tokens = int(sum(ends[-1] for ends in self.ends))

    def __len__(self):
        return int(self.first[-1])

    def __getitem__(self, k):
        part = np.searchsorted(self.first, k, "right") - 1
        begin, end = self.ends[part][k - self.first[part]:][:2]
        tokens = mapped(self.files[part])[begin:end]
        return (tokens & ~SAID).astype(np.int64), tokens >= SAID


@functools.lru_cache(64)                # files open at a time
def mapped(file):
    return np.memmap(file, np.dtype("<u4"), "r")


def tokenized(folder, tok, path, max_length, date, ranks):
    """
    The conversations of a .jsonl file that can be learnt from, as Conversations; {reason: (count, first line)} of the
    others; how many tokens are learnt; the file's sha256. ValueError: a line that is none, or nothing to learn from.

    Each process takes its share of the file. For PART bytes of text it leaves folder/KEY-N.ids, and when that is whole
    KEY-N.json; KEY is a hash of all that decides an id. So a killed run is gone on with, and nothing stale is read.
    """
    sha = checkpoint.everyone(checkpoint.sha256(path) if ranks.first else "", ranks.files)[0]
    key = hashlib.sha256(repr((sha, tok.hash, max_length, date)).encode())
    for file in (__file__, chat.__file__, tokenizer.__file__):              # the template, and which turns are learnt
        key.update(checkpoint.sha256(file).encode())
    os.makedirs(folder, exist_ok=True)
    size = os.path.getsize(path)
    names = [os.path.join(folder, f"{key.hexdigest()[:16]}-{n:05d}") for n in range(-(-size // PART))]
    with tqdm(total=size // ranks.size, desc="tokenizing", unit="B", unit_scale=True, delay=2, leave=False,
              disable=not ranks.first) as bar:
        for n in range(ranks.rank, len(names), ranks.size):
            if not os.path.exists(names[n] + ".json"):
                tokenize(names[n], tok, path, n * PART, max_length, date, bar)
    if ranks.size > 1:
        dist.barrier()
    parts, bad, lines, learnt = [], {}, 0, 0
    for name in names:
        with open(name + ".json", encoding="utf-8") as f:
            part = json.load(f)
        for why, (times, line) in part["bad"].items():
            count(bad, why, lines + line, times)
        lines, learnt = lines + part["lines"], learnt + part["learnt"]
        parts.append(dict(part, file=name + ".ids"))
    conversations = Conversations(parts)
    if not len(conversations):
        raise ValueError(f"{path}: {left_out(bad, 0, 'conversations')}" if bad else f"{path} is empty")
    return conversations, bad, learnt, sha


def tokenize(name, tok, path, start, max_length, date, bar):
    """The conversations in the lines that begin in PART bytes of a file, from `start` on -> name.ids, then name.json."""
    tokens, lengths, bad, lines = [], [], {}, 0
    with open(path, "rb") as f:
        if start:
            f.seek(start - 1)
            f.readline()                                                    # began before
        first = f.tell()
        while f.tell() < start + PART and (line := f.readline()):
            lines += 1
            bar.update(len(line))
            if not line.strip():
                continue
            row = parsed(line)
            if row is None:
                f.seek(0)
                raise odd_line(path, f.read(first).count(b"\n") + lines, line)
            found = learnable(tok, row, max_length, date)
            if isinstance(found, str):
                count(bad, found, lines)
            else:
                ids, said = found
                tokens.append(np.array(ids, np.uint32) | SAID * np.array(said, np.uint32))
                lengths.append(len(ids))
    tokens = np.concatenate(tokens) if tokens else np.zeros(0, np.uint32)
    written(name + ".ids", tokens.astype("<u4").tobytes())
    written(name + ".json", json.dumps(dict(lengths=lengths, learnt=int((tokens >= SAID).sum()), bad=bad, lines=lines)).encode())


def written(path, content):
    """A file under its final name, whole or not at all; several processes may write it at once."""
    tmp = f"{path}.{os.urandom(4).hex()}.tmp"
    with open(tmp, "wb") as f:
        f.write(content)
    checkpoint.flush(tmp)
    os.replace(tmp, path)


def colour(tok, ids, said):
    """A conversation for the terminal: learnt tokens green, the others grey, a border between tokens; line breaks stay visible."""
    text = lambda i: tok.decode_bytes([i]).decode("utf-8", errors="backslashreplace").replace("\n", "⏎")
    return "·".join(f"\x1b[{32 if mine else 90}m{text(i)}\x1b[0m" for i, mine in zip(ids, said))


def rows_of(conversations, pack, max_length):
    """
    The conversations of a step, laid out in rows: one each, or first-fit by falling length. Packing changes no number, only the padding:
    attention stays inside a conversation, and RoPE knows distances alone.
    """
    if not pack:
        return [[c] for c in conversations]
    rows = []
    for c in sorted(conversations, key=lambda c: -len(c[0])):
        row = next((r for r in rows if sum(len(ids) for ids, _ in r) + len(c[0]) <= max_length), None)
        if row is None:
            rows.append([c])
        else:
            row.append(c)
    return rows


def tensors(rows, pad):
    """Rows of conversations -> idx, targets (-1 where nothing is learnt), doc, each (rows, T), right-padded."""
    T = max(sum(len(ids) for ids, _ in row) for row in rows)
    idx, targets, doc = torch.full((len(rows), T), pad), torch.full((len(rows), T), -1), torch.full((len(rows), T), -1)
    for b, row in enumerate(rows):
        t = 0
        for n, (ids, said) in enumerate(row):
            ids, said = torch.as_tensor(ids), torch.as_tensor(said)
            idx[b, t:t + len(ids)] = ids
            doc[b, t:t + len(ids)] = n
            learnt = torch.where(said, ids, -1)
            targets[b, t:t + len(ids) - 1] = learnt[1:]    # position i predicts token i + 1 of the same conversation
            t += len(ids)
    return idx, targets, doc


# -----------------------------------------------------------------------------


def main():
    if show:
        return show_conversations()
    checkpoint.check_keep(keep_checkpoints)
    for _ in numbered_rows(data):                                           # a file that is none is told at once
        break
    ranks = Ranks(parallel)
    where = ranks.place(pick_device(device))
    with runs.claim(out, resume, ranks):
        ranks.join(where, WAIT)
        tune(ranks, where)
        ranks.leave()


def tune(ranks, where):
    model, tok = start_model(init_from, where, pick_dtype(dtype, where), ranks)
    longest = window(max_length, model)
    conversations, bad, learnt, sha = tokenized(os.path.join(out, "tokens"), tok, data, longest, date, ranks)
    n = len(conversations)
    steps = -(-epochs * n // batch_size)
    opt = build_optimizer(model, optimizer, lr, betas, alpha, eps, weight_decay, alpha_warmup=steps, beta3_warmup=steps)
    config = dict(settings(globals()), max_length=longest, data_hash=sha[:16], tokenizer_hash=tok.hash[:16])
    start = go_on(out, model, opt, config, ranks) if resume else 0
    if start >= steps:
        raise ValueError(f"{out} is finished: all {steps} steps are done; talk to it: python sample.py --chat --init_from={out}")
    describe_run(out, config, model, tok, ranks)
    if compile and can_compile(torch.device(where)):
        model.compile_blocks()
    if ranks.first:
        if bad:
            print(left_out(bad, n, "conversations"))
        print(f"{n} conversations, {conversations.tokens:,} tokens, {learnt:,} of them learnt; {steps} steps")
        if warning := too_short("conversations", n, epochs, batch_size):
            print(warning)
    log = runs.open_log(out, start, ranks)
    model.train()
    bar = tqdm(range(start, steps), initial=start, total=steps, unit="step", disable=not ranks.first, dynamic_ncols=True)
    with stop_signals() as stop:                                            # before: what is on disk is not done again
        for step in bar:
            began = time.perf_counter()
            batch = [conversations[k] for k in items(step, batch_size, n, epochs, seed)]
            n_tokens = int(sum(said.sum() for _, said in batch))            # learnt, in the whole step
            laid = rows_of(batch, pack, longest)

            # forward and backward; every process takes its micro-batches, and gradients are summed
            loss, size = torch.zeros(()), 0
            for k, last in shares(-(-len(laid) // micro_batch), ranks):
                mine = laid[k * micro_batch:(k + 1) * micro_batch]
                idx, targets, doc = (t.to(where) for t in tensors(mine or laid[:1], tok.pad))
                if not mine:
                    targets.fill_(-1)                                       # runs along, adds nothing
                with gradients(model, ranks, last):
                    _, part = model(idx, targets, doc=doc if pack else None, n_tokens=n_tokens)
                    part.backward()
                loss, size = loss + part.detach().cpu(), size + idx.numel()
            norm = collect(model, ranks, grad_clip)
            loss, stopping = ranks.add(loss, runs.asked_to_stop(out, stop, ranks))
            rate = lr * linear(step, steps, warmup)
            update(opt, step, rate, loss, norm)

            # say what happened
            tok_s, health = round(size * ranks.size / (time.perf_counter() - began)), {}
            if rank_every and (step % rank_every == 0 or step + 1 == steps):
                idx, targets, doc = (t.to(where) for t in tensors(laid[:4 * micro_batch], tok.pad))
                health = collapse.diagnose(model, idx, targets >= 0, doc if pack else None)
                drop_gathered(model)
            log(step=step, tokens=sum(len(ids) for ids, _ in batch), loss=loss, learnt=n_tokens, grad_norm=norm, lr=rate,
                tok_s=tok_s, **health)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            done = step + 1
            if done == steps or stopping or checkpoint_every and done % checkpoint_every == 0:
                checkpoint.save(os.path.join(out, "ckpt"), done, model, opt, dict(config=config), keep_checkpoints,
                                ranks.files)
            if stopping:
                break
    finish(out, model, tok, ranks, done, steps)


def show_conversations():
    """--show: the first three conversations, and why the others among the first would be left out."""
    tok = tokenizer.load_for(init_from) if os.path.isdir(os.path.join(init_from, "ckpt")) else convert.tokenizer_from_hf(convert.local(init_from))
    for n, row in itertools.islice(numbered_rows(data), 3):
        found = learnable(tok, row, math.inf, date)
        if isinstance(found, str):
            print(f"line {n} is left out: {found}")
            continue
        ids, said = found
        print(colour(tok, ids, said) + f"\n{sum(said)} of {len(ids)} tokens are learnt (green)\n")


if __name__ == "__main__":
    with orderly_exit():
        run(main, globals())
