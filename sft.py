"""
SFT, supervised fine-tuning: from a model of text to one that answers (Apertus report sec. 4).

    loss = - sum over what the assistant says of log p(token | all before it)  /  the number of such tokens in the whole step

A conversation is written in Apertus' chat format (tokenizer.py); system, developer, user and tool texts are read, never learnt. Learnt
is what the model must produce by itself: its words, its thoughts with their brackets, its tool calls - and <|assistant_end|>. The published
template leaves that token out after the last answer, so a model trained on its text as it is never learns to stop there; it is added here.

    <s><|system_start|>…<|system_end|>…<|developer_end|><|user_start|>2+2?<|user_end|><|assistant_start|>4<|assistant_end|>
                                                                                                         ^^^^^^^^^^^^^^^^^^ loss

In one epoch every loss is measured on conversations that the model has not seen: the training curve is a held-out curve.

$ python sft.py --data=conversations.jsonl --show             # the first conversations, what is learnt in green, token by token
$ python sft.py --init_from=out/laptop --data=conversations.jsonl
$ python sft.py configs/sft_8b.py --data=mixture.jsonl --resume
$ torchrun --nproc_per_node=8 sft.py configs/sft_8b.py --parallel=fsdp       # the same numbers on more processes
"""

import dataclasses
import json
import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import checkpoint
import convert
import plot
import rank
import tokenizer
from ademamix import AdEMAMix, can_compile, param_groups
from configurator import run, settings
from data import permute
from parallel import Ranks, drop_gathered, gradients, orderly_exit, pick_device, pick_dtype, shard, square_norm
from tokenizer import chat_pieces, control

# -----------------------------------------------------------------------------
# the run
out = "out/sft"                 # its folder
init_from = "out/laptop"        # the start model: run folder, Hugging Face folder or hub name
data = "conversations.jsonl"    # a line a conversation: {"messages": [{"role", "content"}, ...]}, and if there are "tools", "thinking"
show = False                    # print the first conversations token by token, what is learnt in green, and stop
resume = False                  # go on from the newest intact checkpoint of this folder
device = "auto"                 # cuda | mps | cpu
dtype = "auto"                  # float32 | bfloat16, of activations; weights and states are fp32
parallel = "none"               # none | ddp | fsdp | hsdp, under torchrun (parallel.py): 8B with AdEMAMix is 161 GB, 20 bytes a parameter
compile = False                 # torch.compile: pays on CUDA with pack (few shapes)
seed = 28                       # of the order of conversations
date = "2025-09-02"             # "Current date" where a conversation has no system message; fixed, so that a run can be repeated
# layout
max_length = 4096               # tokens; a longer conversation is dropped and counted, never cut
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
rank_every = 100                # steps between rank diagnostics (rank.py); 0 = never
checkpoint_every = 500          # steps; 0 = at the end only
keep_checkpoints = 2
# -----------------------------------------------------------------------------


# -----------------------------------------------------------------------------
# conversations -> ids, and which of them are learnt


def is_conversation(row):
    return isinstance(row.get("messages"), list) and all(isinstance(m, dict) for m in row["messages"])


def read_rows(path, fits=is_conversation, want="a list `messages` of {role, content}"):
    """The JSON objects of a .jsonl file, all of which must fit. ValueError names the line that is something else, and what is wanted."""
    if not os.path.isfile(path):
        raise ValueError(f"no such file: {path}; want .jsonl, each line a JSON object with {want}")
    rows = []
    with open(path, encoding="utf-8") as f:
        for n, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except ValueError:
                rows.append(None)
            if not isinstance(rows[-1], dict) or not fits(rows[-1]):
                raise ValueError(f"{path}, line {n}: want a JSON object with {want}, got {line.strip()[:60]!r}")
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows


# after whom each may speak
FOLLOWS = {"user": {"", "system", "assistant"}, "assistant": {"user", "tool"}, "tool": {"assistant", "tool"}, "system": {""}}


def fault(messages):
    """Why a conversation cannot be learnt from, or None."""
    before = ""
    for m in messages:
        role, content = m.get("role"), m.get("content")
        if before not in FOLLOWS.get(role, ()):
            return "roles out of order"
        if isinstance(content, dict):
            parts = content.get("blocks", content.get("parts", [content]))
            content = "".join(str(b.get("text", "x")) for b in parts)                           # calls are no text, and count
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


def usable(tok, rows, max_length, date=None, where=""):
    """-> [(ids, said)] of the conversations that can be learnt from, and {reason: (count, first line)} of the others."""
    good, bad = [], {}
    for n, row in enumerate(tqdm(rows, "tokenizing", unit="conv", disable=len(rows) < 2000, leave=False), 1):
        why = fault(row["messages"])
        if not why:
            try:
                ids, said = render(tok, row, date)
            except ValueError as e:
                why = str(e)
        if not why and len(ids) > max_length:
            why = f"more than max_length={max_length} tokens"
        if why:
            bad[why] = (bad.get(why, (0, n))[0] + 1, bad.get(why, (0, n))[1])
        else:
            good.append((ids, said))
    if not good:
        reasons = "; ".join(f"{count} {why} (first in line {n})" for why, (count, n) in bad.items())
        raise ValueError(f"{where}: none of {len(rows)} conversations can be learnt from: {reasons}")
    return good, bad


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
            idx[b, t:t + len(ids)] = torch.tensor(ids)
            doc[b, t:t + len(ids)] = n
            learnt = torch.where(torch.tensor(said), torch.tensor(ids), -1)
            targets[b, t:t + len(ids) - 1] = learnt[1:]    # position i predicts token i + 1 of the same conversation
            t += len(ids)
    return idx, targets, doc


# -----------------------------------------------------------------------------
# what a run needs besides its lesson; qrpo.py uses the same


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


def export(out, model, tok, ranks):
    """out/hf for transformers. Shards are read back from the last checkpoint, whole, by one process."""
    if ranks.first:
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
    if tok.vocab_size != model.config.vocab_size:
        sizes = f"the model has {model.config.vocab_size} ids and its tokenizer {tok.vocab_size}"
        raise ValueError(f"{name}: {sizes}: they do not belong together")
    missing = [t for t in ("<|user_start|>", "<|assistant_start|>", "<|assistant_end|>") if t not in tok.special]
    if missing:
        raise ValueError(f"{name}: its tokenizer has no {', '.join(missing)}: chat needs Apertus' special tokens")
    model.dtype = dtype
    return model, tok


def claim_folder(out, resume, ranks):
    """Refuse a run folder that holds a run already, unless it is to be gone on with; the first process looks, before any writes."""
    if ranks.first and not resume and (os.path.exists(os.path.join(out, "ckpt")) or plot.has_log(out)):
        raise ValueError(f"{out} already holds a run: --resume goes on with it, --out=ANOTHER starts one beside it")
    os.makedirs(out, exist_ok=True)
    if ranks.size > 1:
        dist.barrier()


def describe_run(out, config, model, tok, ranks):
    """config.json of a run folder: all settings, the model's shape, the vocabulary by name, or as a file beside it if it was trained."""
    if not ranks.first:
        return
    config = {**config, **dataclasses.asdict(model.config), "chat": True}
    if tok.hash == tokenizer.load("byte").hash:
        config["tokenizer"] = "byte"
    elif tok.n_special == len(tokenizer.SMALL):
        text = json.dumps({"pattern": tokenizer.PATTERN, "pieces": [tokenizer.base64.b64encode(p).decode() for p in tok.pieces]}, indent=0)
        checkpoint.write_flushed(os.path.join(out, "tokenizer.json"), text)
        config["tokenizer"] = "tokenizer.json"
    elif tok.hash == tokenizer.load("apertus").hash:
        config["tokenizer"] = "apertus"
    else:
        raise ValueError("the start model's tokenizer is neither Apertus' nor one of this project's: its run could not be read again")
    checkpoint.write_flushed(os.path.join(out, "config.json"), json.dumps(config, indent=1))


def build_optimizer(model, name, lr, betas, alpha, eps, weight_decay, steps):
    groups = param_groups(model, weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas[:2], eps=eps)
    if name != "ademamix":
        raise ValueError(f"optimizer={name!r}: there is ademamix and adamw")
    return AdEMAMix(groups, lr=lr, betas=betas, alpha=alpha, eps=eps, weight_decay=weight_decay, beta3_warmup=steps, alpha_warmup=steps,
                    compile=None if can_compile(next(model.parameters()).device) else False)


def go_on(out, model, opt, config, same, ranks):
    """Load the newest intact checkpoint, if its run had the same settings. Returns the step to go on with; 0 if there is none."""
    found = checkpoint.newest_intact(os.path.join(out, "ckpt"), ranks.files)
    if not found:
        return 0
    path, manifest = found
    had = manifest["config"]
    changed = [f"{k} {had.get(k)!r} -> {config[k]!r}" for k in same if json.dumps(had.get(k)) != json.dumps(config[k])]
    if changed:
        raise ValueError(f"{path} is of another run: {'; '.join(changed)}")
    checkpoint.load(path, model, opt)
    return manifest["step"]


def open_log(out, start, ranks):
    """A function that appends a line to log.jsonl; lines of steps that will be done again are cut off first."""
    if not ranks.first:
        return lambda **entry: None
    path, kept = os.path.join(out, "log.jsonl"), []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            kept = [line for line in f if line.endswith("\n") and json.loads(line)["step"] < start]     # a kill may tear the last one
    checkpoint.write_flushed(path + ".tmp", "".join(kept))
    os.replace(path + ".tmp", path)
    file = open(path, "a", encoding="utf-8")

    def log(**entry):
        file.write(json.dumps(entry) + "\n")
        file.flush()
    return log


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


def chat_ids_only(tok, row, where, date=None):
    """The prompt of a conversation that waits for an answer -> ids, ending in <|assistant_start|>. ValueError names the line."""
    messages = row["messages"]
    why = fault([*messages, dict(role="assistant", content="x")])
    why = "no messages" if not messages else "its last message is not the user's" if messages[-1].get("role") != "user" else why
    if why:
        raise ValueError(f"{where}: {why}; want system (if any), then user and assistant in turn, ending with user")
    try:
        return tok.chat(messages, row.get("tools"), row.get("thinking", False), add_generation_prompt=True, date=date)[1]
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None


# -----------------------------------------------------------------------------


def main():
    rows = read_rows(data)
    if show:
        return show_conversations(rows)
    ranks, where = join(parallel, pick_device(device))
    claim_folder(out, resume, ranks)
    model, tok = start_model(init_from, where, pick_dtype(dtype, where), ranks)
    conversations, bad = usable(tok, rows, max_length, date, data)
    n = len(conversations)
    steps = -(-epochs * n // batch_size)
    opt = build_optimizer(model, optimizer, lr, betas, alpha, eps, weight_decay, steps)
    fingerprint = tokenizer.hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    config = dict(settings(globals()), data_hash=fingerprint)
    same = ("init_from", "data_hash", "seed", "date", "max_length", "batch_size", "epochs", "optimizer")
    start = go_on(out, model, opt, config, same, ranks) if resume else 0
    if start >= steps:
        raise ValueError(f"{out} is finished: all {steps} steps are done; talk to it: python sample.py --chat --init_from={out}")
    describe_run(out, config, model, tok, ranks)
    if compile and can_compile(torch.device(where)):
        model.compile_blocks()
    if ranks.first:
        for why, (count, first) in bad.items():
            print(f"left out {count} of {len(rows)} conversations: {why} (first in line {first})")
        learnt = sum(map(sum, (said for _, said in conversations)))
        print(f"{n} conversations, {sum(len(ids) for ids, _ in conversations):,} tokens, {learnt:,} of them learnt; {steps} steps")
        if warning := too_short("conversations", n, epochs, batch_size):
            print(warning)
    log = open_log(out, start, ranks)
    model.train()
    bar = tqdm(range(start, steps), initial=start, total=steps, unit="step", disable=not ranks.first, dynamic_ncols=True)
    for step in bar:
        began = time.perf_counter()
        batch = [conversations[k] for k in items(step, batch_size, n, epochs, seed)]
        n_tokens = sum(sum(said) for _, said in batch)                      # learnt, in the whole step
        laid = rows_of(batch, pack, max_length)

        # forward and backward; every process takes its micro-batches, and gradients are summed
        loss, size = torch.zeros(()), 0
        for k, last in shares(-(-len(laid) // micro_batch), ranks):
            mine = laid[k * micro_batch:(k + 1) * micro_batch]
            idx, targets, doc = (t.to(where) for t in tensors(mine or laid[:1], tok.pad))
            if not mine:
                targets.fill_(-1)                                           # runs along, adds nothing
            with gradients(model, ranks, last):
                _, part = model(idx, targets, doc=doc if pack else None, n_tokens=n_tokens)
                part.backward()
            loss, size = loss + part.detach().cpu(), size + idx.numel()
        norm = collect(model, ranks, grad_clip)
        loss, rate = ranks.add(loss)[0], lr * linear(step, steps, warmup)
        update(opt, step, rate, loss, norm)
        tok_s, health = round(size * ranks.size / (time.perf_counter() - began)), {}
        if rank_every and (step % rank_every == 0 or step + 1 == steps):
            idx, targets, doc = (t.to(where) for t in tensors(laid[:4 * micro_batch], tok.pad))
            health = rank.diagnose(model, idx, targets >= 0, doc if pack else None)
            drop_gathered(model)
        log(step=step, tokens=sum(len(ids) for ids, _ in batch), loss=loss, learnt=n_tokens, grad_norm=norm, lr=rate, tok_s=tok_s, **health)
        bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        if step + 1 == steps or checkpoint_every and (step + 1) % checkpoint_every == 0:
            checkpoint.save(os.path.join(out, "ckpt"), step + 1, model, opt, dict(config=config), keep_checkpoints, ranks.files)
    export(out, model, tok, ranks)
    ranks.leave()


def show_conversations(rows):
    """--show: the first three conversations, and why the others among the first would be left out."""
    tok = tokenizer.load_for(init_from) if os.path.isdir(os.path.join(init_from, "ckpt")) else tokenizer.load_hf(convert.local(init_from))
    for n, row in enumerate(rows[:3], 1):
        why = fault(row["messages"])
        if why:
            print(f"line {n} is left out: {why}")
            continue
        ids, said = render(tok, row, date)
        print(colour(tok, ids, said) + f"\n{sum(said)} of {len(ids)} tokens are learnt (green)\n")


if __name__ == "__main__":
    with orderly_exit():
        run(main, globals())
