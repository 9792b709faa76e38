"""
SFT, supervised fine-tuning: from a model of text to one that answers (Apertus report sec. 4).

    loss = - sum over what the assistant says of log p(token | all before it)  /  the number of such tokens per step

A conversation is written in Apertus' chat format (chat.py); system, developer, user and tool texts are read, never
learnt. Learnt is what the model must produce by itself: its words, its thoughts with their brackets, its tool calls,
and <|assistant_end|>. The published template leaves that token out after the last answer, so a model trained on its
text as it is never learns to stop there; it is added here.

    <s><|system_start|>…<|developer_end|><|user_start|>2+2?<|user_end|><|assistant_start|>4<|assistant_end|>
                                                                                          ^^^^^^^^^^^^^^^^^^ loss

A row of the data has one of these forms, recognised by its keys. What does not fit is left out and counted by kind.

    messages                     [{role, content}]: text, OpenAI's text parts, Apertus' blocks; tool_calls, role tool
    conversations                [{from, value}], ShareGPT: system, human, gpt, function_call, observation
    instruction, output, input   Alpaca; its published prompt becomes the user's words
    prompt, completion           two texts, or two lists of messages
    beside them                  system (a text), tools (a list, or one as JSON), thinking, license

In one epoch every loss is measured on conversations that the model has not seen: the training curve is a held-out
curve. The conversations become ids once, in out/<run>/tokens (posttrain/conversations.py). After SIGTERM, SIGUSR2, or a
file named `stop` in the run folder, all ranks save at the end of the step and leave; --resume goes on.

$ python -m posttrain.sft --data=conversations.jsonl --show        # the first ones, token by token, the learnt in green
$ python -m posttrain.sft --init_from=out/laptop --data=conversations.jsonl
$ python -m posttrain.sft --data="{'chats/': 2, 'hf://datasets/OWNER/NAME': 1}"   # two of three are of the first
$ python -m posttrain.sft configs/sft_8b.py --data=mixture.jsonl --resume
$ torchrun --nproc_per_node=8 -m posttrain.sft configs/sft_8b.py --parallel=fsdp     # the same numbers on more ranks
"""

import sys

if __name__ == "__main__" and not __package__:
    print("sft.py: start it from the project's root, python -m posttrain.sft", file=sys.stderr)
    sys.exit(2)

import itertools
import math
import os
import time

import numpy as np
# Before torch, which reads a setting of it when it loads.
from engine.hardware import can_compile, pick_dtype
import torch
from torch.nn.utils.rnn import pad_sequence
import convert
import tokenizer
from ademamix import build_optimizer
from chat import learnable
from configurator import run, settings
from engine import runs
from engine.parallel import orderly_exit, reduce_after, spread, stop_signals
from posttrain import collapse
from posttrain.common import (
    adapters_of, begin, collect, end, joined, linear, progress, save_if_due, slices, start_model,
    update, window,
)
from posttrain.conversations import chosen, described, first_rows, look, tokenized, weights_of
from posttrain.forgetting import due, old_of

# -----------------------------------------------------------------------------
# the run
out = "out/sft"                 # its folder
init_from = "out/laptop"        # the start model: run folder, Hugging Face folder or hub name
data = "conversations.jsonl"    # .jsonl, .parquet, folder, glob, hf://datasets/OWNER/NAME, or {such: weight, ...}
keep_licenses = ""              # only rows whose column `license` is one of these, with commas between
decontaminate = ""              # evaluation prompts, as in prepare.py: a conversation that holds one is left out
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
state_dtype = "float32"         # of AdEMAMix's two averages; bfloat16: 4 bytes a parameter less, rounded at random
lr = 5e-6
betas = (0.9, 0.999, 0.99)      # AdamW uses the first two
alpha = 8.0                     # it and beta3 warm up over the whole run
eps = 1e-8
weight_decay = 0.0
grad_clip = 1.0
rank_every = 100                # steps between diagnoses of collapse (posttrain/collapse.py); 0 = never
# what is forgotten (posttrain/forgetting.py)
old = ""                        # text like the start's: a data folder (what validates there), .txt or .jsonl; "" = none
old_every = 0                   # steps between measurements; 0 = before the first and after the last step only
old_windows = 64                # of the model's window, at most, from as many documents as there are; 0 = all
# what is saved
checkpoint_every = 500          # steps; 0 = at the end only
keep_checkpoints = 2            # of the newest; 0 = all
# -----------------------------------------------------------------------------


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
        return pad_sequence(rows, batch_first=True, padding_value=fill).to(device, non_blocking=True)
    return padded(idx, pad), padded(targets, -1), padded(doc, -1)


# -----------------------------------------------------------------------------
# the run


def main():
    if show:
        return show_conversations()
    with joined(settings(globals()), look) as (ranks, device):
        tune(ranks, device)


def tune(ranks, device):
    adapters = adapters_of(globals())
    model, tok = start_model(init_from, device, pick_dtype(dtype, device), ranks, base, adapters, seed)
    spread(model, ranks, device, recompute, compile and can_compile(torch.device(device)))
    kept = old_of(old, tok, model.config.block_size, old_windows, out)
    longest = window(max_length, model)
    folder = os.path.join(out, "tokens")
    conversations, bad, sha = tokenized(folder, tok, data, longest, date, ranks, keep_licenses, decontaminate)
    weights = weights_of(data)
    n = len(conversations)
    steps = -(-epochs * n // batch_size)
    # The warm-ups of AdEMAMix last as long as the run, as in the report's post-training.
    opt = build_optimizer(
        model, optimizer, lr, betas, alpha, eps, weight_decay,
        alpha_warmup=steps, beta3_warmup=steps, state_dtype=state_dtype,
    )
    notes = described(conversations, bad, weights, epochs)
    config = dict(
        settings(globals()),
        max_length=longest,
        data_hash=sha[:16],
        tokenizer_hash=tok.hash[:16],
        start_hash=model.start[:16],
    )
    start, log = begin(config, model, tok, opt, notes, "conversations", n, steps, ranks, kept)
    # A signal before this point ends the process at once: what is on disk by then is not done again.
    with stop_signals() as signals:
        for step in (bar := progress(start, steps, ranks)):
            began = time.perf_counter()
            numbers = chosen(step, batch_size, conversations.sizes, weights.values(), epochs, seed)
            batch = [conversations[k] for k in numbers]
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
            if due(kept, old_every, done, steps):
                seen |= kept.measure(model, ranks)
            log(step=step, loss=loss, grad_norm=norm, lr=rate,
                tokens=tokens, learnt=n_tokens, tok_s=round(speed), **seen)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)

            # Save, and stop if asked to.
            save_if_due(config, done, done == steps or stopping, model, opt, ranks)
            if stopping:
                break
    end(config, model, tok, done, steps, ranks, kept)


def forward_backward(model, rows, n_tokens, pad, ranks, device):
    """
    The gradients of this rank's micro-batches of a step.

    n_tokens: how many tokens the whole step learns. Returns this rank's part of the loss, and its positions.
    """
    loss, size = torch.zeros((), device=device), 0
    for part, last in slices(len(rows), micro_batch, ranks):
        mine = rows[part]
        idx, targets, doc = tensors(mine or rows[:1], pad, device)
        if not mine:
            targets.fill_(-1)       # an empty micro-batch runs along, and adds nothing
        if not pack:
            doc = None
        reduce_after(model, ranks, last)
        _, part_loss = model(idx, targets, doc=doc, n_tokens=n_tokens)
        part_loss.backward()
        loss += part_loss.detach()
        size += idx.numel()
    return loss, size


def show_conversations():
    """--show: the first three conversations of each source, token by token, or why one of them would be left out."""
    if os.path.isdir(os.path.join(init_from, "ckpt")):
        tok = tokenizer.load_for(init_from)
    else:
        tok = convert.tokenizer_from_hf(convert.local(init_from))
    tok.check_chat()
    rows = itertools.chain(*(first_rows(source, 3) for source in weights_of(data)))
    for place, row in rows:
        found = learnable(tok, row, math.inf, date)
        if isinstance(found, str):
            print(f"{place} is left out: {found}")
            continue
        ids, said = found
        # A token each; single bytes together, so that their letters and words stay whole.
        together = len(tok.pieces) == 256
        runs = itertools.groupby(range(len(ids)), lambda n: said[n] if together else n)
        print("·".join(coloured(tok, ids, said, list(run)) for _, run in runs))
        print(f"{sum(said)} of {len(ids)} tokens are learnt (green)\n")


def coloured(tok, ids, said, run):
    """The tokens of a run for the terminal, green if they are learnt, otherwise grey; a line break stays visible."""
    text = tok.decode_bytes([ids[n] for n in run]).decode("utf-8", errors="backslashreplace")
    text = text.replace("\n", "⏎")
    colour = 32 if said[run[0]] else 90
    return f"\x1b[{colour}m{text}\x1b[0m"


if __name__ == "__main__":
    with orderly_exit():
        run(main, globals())
