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

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import chat
from engine import checkpoint
import convert
from engine import plot
from posttrain import collapse as rank
import tokenizer
from ademamix import AdEMAMix, param_groups
from engine.hardware import can_compile
from configurator import run, settings
from data import permute
from engine.parallel import Ranks, drop_gathered, gradients, orderly_exit, shard, square_norm, stop_signals
from engine.hardware import pick_device, pick_dtype
from chat import chat_pieces, control

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
# conversations -> ids, and which of them are learnt


def is_conversation(row):
    return isinstance(row.get("messages"), list) and all(isinstance(m, dict) for m in row["messages"])


CONVERSATION = "a list `messages` of {role, content}"


def parsed(line, fits=is_conversation):
    """The JSON object of a line, or None if it is something else or does not fit."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and fits(row) else None


def odd_line(path, n, line, want=CONVERSATION):
    got = line.decode(errors="replace").strip()[:60]
    return ValueError(f"{path}, line {n}: want a JSON object with {want}, got {got!r}")


def numbered_rows(path, fits=is_conversation, want=CONVERSATION):
    """(line, JSON object) of a .jsonl file. ValueError names the line that is something else, and what is wanted."""
    if not os.path.isfile(path):
        raise ValueError(f"no such file: {path}; want .jsonl, each line a JSON object with {want}")
    with open(path, "rb") as f:
        for n, line in enumerate(f, 1):
            if line.strip():
                row = parsed(line, fits)
                if row is None:
                    raise odd_line(path, n, line, want)
                yield n, row


def read_rows(path, fits=is_conversation, want=CONVERSATION):
    """The JSON objects of a .jsonl file, all of which must fit: ValueError as above, and if there are none."""
    rows = [row for _, row in numbered_rows(path, fits, want)]
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows


def normal(message):
    """OpenAI's content, a list of text parts, as their text; any other message as it is."""
    parts = message.get("content")
    if isinstance(parts, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in parts):
        return {**message, "content": "".join(p["text"] for p in parts)}
    return message


# after whom each may speak
FOLLOWS = {"user": {"", "system", "assistant"}, "assistant": {"user", "tool"}, "tool": {"assistant", "tool"}, "system": {""}}


def fault(messages):
    """Why a conversation of normal messages cannot be learnt from, or None."""
    before = ""
    for m in messages:
        role, content = m.get("role"), m.get("content")
        if not isinstance(role, str) or before not in FOLLOWS.get(role, ()):
            return "roles out of order"
        if isinstance(content, dict):
            parts = content.get("blocks", content.get("parts", [content]))
            content = "".join(str(b.get("text", "x")) for b in parts)       # calls are no text, and count
        if not (content or "").strip() and not m.get("tool_calls") and role != "system":
            return "an empty turn"
        before = role
    if not any(m["role"] == "assistant" for m in messages):
        return "no assistant turn"
    return "ends with a tool's output" if before == "tool" else None


def has_thoughts(messages):
    blocks = [b for m in messages if isinstance(m.get("content"), dict) for b in m["content"].get("blocks", ())]
    return any(b.get("type") == "thoughts" for b in blocks)


def render(tok, row, date=None):
    """
    A conversation -> ids, said: said[i] is True where the assistant must produce ids[i] itself. One <s>; <|assistant_end|> also after the
    last answer. "thinking" (default: whether there are thoughts in it) says "Deliberation: enabled". ValueError: what the template cannot
    express.
    """
    messages = row["messages"]
    pieces = chat_pieces(messages, row.get("tools"), row.get("thinking", has_thoughts(messages)), date=date)
    if messages[-1]["role"] == "assistant":
        pieces.append(control("assistant_end", said=True))
    return tok.chat_ids(pieces)


# What odd content meets on its way to ids: a number where text belongs, a picture, a block without its text, half a
# surrogate pair. ODD is the reason that is counted.
ODD_CONTENT = (AttributeError, KeyError, TypeError, ValueError)
ODD = "content that the chat format has no place for: want text or blocks"


def learnable(tok, row, max_length, date=None):
    """A conversation -> (ids, said), or why it cannot be learnt from (str)."""
    try:
        row = {**row, "messages": [normal(m) for m in row["messages"]]}
        why = fault(row["messages"])
        ids, said = ([], []) if why else render(tok, row, date)
    except ODD_CONTENT:
        return ODD
    return why or (f"more than max_length={max_length} tokens" if len(ids) > max_length else (ids, said))


def prompt_ids(tok, row, date=None):
    """A conversation that waits for an answer -> ids that end in <|assistant_start|>, or why it is none (str)."""
    try:
        messages = [normal(m) for m in row["messages"]]
        if not messages:
            return "no messages"
        if messages[-1].get("role") != "user":
            return "its last message is not the user's"
        why = fault([*messages, dict(role="assistant", content="x")])
        return why or tok.chat(messages, row.get("tools"), row.get("thinking", False), add_generation_prompt=True, date=date)[1]
    except ODD_CONTENT:
        return ODD


def count(bad, why, line, times=1):
    """Add to {reason: (count, first line)}."""
    had, first = bad.get(why, (0, line))
    bad[why] = had + times, min(first, line)


def left_out(bad, kept, what):
    """What was left out and why, in one line."""
    n = sum(times for times, _ in bad.values())
    reasons = "; ".join(f"{times} {why} (first in line {line})" for why, (times, line) in bad.items())
    head = f"left out {n} of {n + kept} {what}" if kept else f"none of {n} {what} can be learnt from"
    return f"{head}: {reasons}"


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
# what a run needs besides its lesson; posttrain/qrpo.py uses the same


def join(mode, device):
    """-> (the ranks of this run, this one's device). A rank waits two hours for another: sampling takes as long as it takes."""
    ranks = Ranks(mode)
    device = ranks.place(device)
    ranks.join(device, 7200)
    return ranks, device


def shares(n, ranks):
    """
    The micro-batches of a step that are this rank's, of n: (number, last). Sharded ranks gather each other's weights and must all run as
    often, so the number may lie beyond n: an empty one.
    """
    rounds = range(ranks.rank, -(-n // ranks.size) * ranks.size if ranks.sharded else n, ranks.size)
    return [(k, k + ranks.size >= rounds.stop) for k in rounds]


def collect(model, ranks, clip):
    """
    Sum gradients over ranks (FSDP has done so), then clip them by their global norm, which is returned as it was before. Losses were
    divided by the count of the whole step; a rank that had no micro-batch adds zeros.
    """
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if ranks.size > 1 and not ranks.sharded:
            dist.all_reduce(p.grad)
    norm = math.sqrt(ranks.add(square_norm(model, ranks))[0])
    scale = min(1.0, clip / (norm + 1e-6))
    if scale < 1:
        for p in model.parameters():
            p.grad.mul_(scale)
    return norm


def asked_to_stop(out, stop, ranks):
    """Has a signal come, or (the first process looks) a file named `stop` in the run folder?"""
    return bool(stop) or ranks.first and os.path.exists(os.path.join(out, "stop"))


def finish(out, model, tok, ranks, done, steps):
    """
    After the last step: out/hf for transformers. Shards are read back from the last checkpoint, whole, by one process.
    After another, when a signal or `stop` has ended the run: only say so.
    """
    if not ranks.first:
        return
    if os.path.exists(os.path.join(out, "stop")):
        os.remove(os.path.join(out, "stop"))                                # or the next start would stop again
    if done < steps:
        print(f"{out}: stopped as asked after step {done} of {steps}, saved; --resume goes on")
    else:
        tok.eos = tok.special["<|assistant_end|>"]                          # a chat model's text ends where its turn does
        convert.save_hf(convert.load_run(out)[0] if ranks.sharded else model, os.path.join(out, "hf"), tok)
        print(f"{out}: talk to it with python sample.py --chat --init_from={out}; for transformers: {out}/hf")


def start_model(name, device, dtype, ranks=None):
    """
    The start model with fp32 weights, its tokenizer. With sharded ranks (fsdp, hsdp) each of them reads its shards from the files, and none
    ever holds the model (70B: 282 GB). ValueError if model and tokenizer do not belong together or cannot chat.
    """
    def spread(model):                                                      # comes on the meta device, without memory
        shard(model, ranks.mesh, dtype)
        model.to_empty(device=device)
        from torch.distributed.fsdp import register_fsdp_forward_method
        register_fsdp_forward_method(model, "hidden")

    model, tok = convert.load_any(name, device, torch.float32, spread if ranks and ranks.sharded else None)
    missing = [t for t in ("<|user_start|>", "<|assistant_start|>", "<|assistant_end|>") if t not in tok.special]
    if missing:
        raise ValueError(f"{name}: its tokenizer has no {', '.join(missing)}: chat needs Apertus' special tokens")
    model.dtype = dtype
    return model, tok


def claim_folder(out, resume, ranks):
    """
    The lock of the run folder, to be closed at the end; the first process takes it before any of them writes.
    ValueError: another run is writing there, or the folder holds a run that is not to be gone on with.
    """
    lock = nullcontext()
    if ranks.first:
        if not resume and (os.path.exists(os.path.join(out, "ckpt")) or plot.has_log(out)):
            raise ValueError(f"{out} already holds a run: --resume goes on with it, --out=ANOTHER starts one beside it")
        lock = checkpoint.claim(out)
    if ranks.size > 1:
        dist.barrier()
    return lock


def window(max_length, model):
    """max_length, or the model's window for 0. ValueError for more than the model has ever seen at once."""
    limit = model.config.block_size
    if max_length > limit:
        raise ValueError(f"max_length={max_length} is beyond the window of the start model, {limit} tokens: "
                         f"take --max_length={limit}, and what is longer is left out")
    return max_length or limit


def describe_run(out, config, model, tok, ranks):
    """config.json of a run folder: all settings, the model's shape, the vocabulary by name, or as a file beside it if it was trained."""
    if not ranks.first:
        return
    config = {**config, **dataclasses.asdict(model.config), "chat": True, "tokenizer": tokenizer.keep_for(tok, out)}
    checkpoint.write_flushed(os.path.join(out, "config.json"), json.dumps(config, indent=1))


def build_optimizer(model, name, lr, betas, alpha, eps, weight_decay, steps):
    groups = param_groups(model, weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas[:2], eps=eps)
    if name != "ademamix":
        raise ValueError(f"optimizer={name!r}: there is ademamix and adamw")
    return AdEMAMix(groups, lr=lr, betas=betas, alpha=alpha, eps=eps, weight_decay=weight_decay, beta3_warmup=steps, alpha_warmup=steps,
                    compile=None if can_compile(next(model.parameters()).device) else False)


# Settings that a resumed run may change, because they change no number but by rounding. (data and rewards are compared
# by the hash of their content, references by their own settings.json.)
FREE = {"out", "data", "rewards", "references", "show", "resume", "device", "parallel", "compile", "micro_batch", "pack",
        "rank_every", "checkpoint_every", "keep_checkpoints"}


def go_on(out, model, opt, config, ranks):
    """
    Load the newest intact checkpoint. Returns the step to go on with; 0 if there is none. ValueError if its run had
    other settings, FREE ones excepted: names them.
    """
    found = checkpoint.newest_intact(os.path.join(out, "ckpt"), ranks.files)
    if not found:
        return 0
    path, manifest = found
    had = manifest["config"]
    changed = [f"{k} {had.get(k)!r} -> {config[k]!r}" for k in config
               if k not in FREE and json.dumps(had.get(k)) != json.dumps(config[k])]
    if changed:
        raise ValueError(f"{path} is of another run: {'; '.join(changed)}. Take its settings, or another --out")
    checkpoint.load(path, model, opt)
    return manifest["step"]


def open_log(out, start, ranks):
    """A function that appends a line to log.jsonl; lines of steps that will be done again are cut off first."""
    if not ranks.first:
        return lambda **entry: None
    path, kept = os.path.join(out, "log.jsonl"), []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            kept = [line for line in f if step_of(line) < start]
    checkpoint.write_flushed(path, kept)
    file = open(path, "a", encoding="utf-8")

    def log(**entry):
        file.write(json.dumps(entry) + "\n")
        file.flush()
    return log


def step_of(line):
    """The step of a line of log.jsonl; of a line that a kill or a full disk has torn, infinity."""
    entry = parsed(line, fits=lambda entry: isinstance(entry.get("step"), int)) if line.endswith("\n") else None
    return entry["step"] if entry else math.inf


def items(step, batch_size, n, epochs, seed):
    """Which of n items a step takes, each epoch in an order of its own: a pure function of its number, for any number of processes."""
    g = np.arange(step * batch_size, min((step + 1) * batch_size, epochs * n))
    epoch, i = np.divmod(g, n)
    return np.concatenate([permute(i[epoch == e], n, seed, int(e)) for e in np.unique(epoch)])


def update(opt, step, rate, loss, norm):
    """One step of the optimizer at this learning rate. ValueError, before anything changes, if the loss or the gradient is not finite."""
    if not math.isfinite(loss + norm):
        raise ValueError(f"step {step}: loss {loss}, gradient norm {norm}. Stopped before the update; try a lower --lr and --resume")
    for group in opt.param_groups:
        group["lr"] = rate
    opt.step()
    opt.zero_grad(set_to_none=True)


def linear(step, steps, warmup):
    """
    Share of the peak learning rate: linear up over the first `warmup` of the steps, then linear down (transformers' "linear").

    The zeros lie just outside the run, at step -1 and at step `steps`: every step learns, also the only one of a run.
    """
    up = max(1, math.ceil(warmup * steps))
    return min((step + 1) / up, (steps - step) / (steps - up + 1))


def too_short(what, n, epochs, batch_size):
    """A warning if the schedule has fewer than ten steps, with values that give it ten; otherwise an empty string."""
    steps = -(-epochs * n // batch_size)
    if steps >= 10:
        return ""
    fits = f"--batch_size={epochs * n // 10}" if epochs * n >= 10 else f"--batch_size=1 --epochs={-(-10 // n)}"
    return (f"warning: {epochs * n} {what} in batches of {batch_size} make a run of {steps} step{'s' * (steps > 1)}, "
            f"too short for a warm-up and a decay: try {fits}")


# -----------------------------------------------------------------------------


def main():
    if show:
        return show_conversations()
    checkpoint.check_keep(keep_checkpoints)
    for _ in numbered_rows(data):                                           # a file that is none is told at once
        break
    ranks, where = join(parallel, pick_device(device))
    with claim_folder(out, resume, ranks):
        tune(ranks, where)
    ranks.leave()


def tune(ranks, where):
    model, tok = start_model(init_from, where, pick_dtype(dtype, where), ranks)
    longest = window(max_length, model)
    conversations, bad, learnt, sha = tokenized(os.path.join(out, "tokens"), tok, data, longest, date, ranks)
    n = len(conversations)
    steps = -(-epochs * n // batch_size)
    opt = build_optimizer(model, optimizer, lr, betas, alpha, eps, weight_decay, steps)
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
    log = open_log(out, start, ranks)
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
            loss, stopping = ranks.add(loss, asked_to_stop(out, stop, ranks))
            rate = lr * linear(step, steps, warmup)
            update(opt, step, rate, loss, norm)

            # say what happened
            tok_s, health = round(size * ranks.size / (time.perf_counter() - began)), {}
            if rank_every and (step % rank_every == 0 or step + 1 == steps):
                idx, targets, doc = (t.to(where) for t in tensors(laid[:4 * micro_batch], tok.pad))
                health = rank.diagnose(model, idx, targets >= 0, doc if pack else None)
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
