"""
SFT, supervised fine-tuning: from a model of text to one that answers (Apertus report sec. 4).

    loss = - sum over the assistant's tokens of log p(token | all before it)  /  the number of such tokens per step

A conversation is written in Apertus' chat format (chat.py); system, developer, user and tool texts are read, never
learnt. The model learns its own part: its words, its thoughts with their brackets, its tool calls, and
<|assistant_end|>. The published template leaves that token out after the last answer, and a model trained on that
text does not learn to stop there; so it is added here.

    <s><|system_start|>…<|developer_end|><|user_start|>2+2?<|user_end|><|assistant_start|>4<|assistant_end|>
                                                                                          ^^^^^^^^^^^^^^^^^^ loss

A row of the data has one of these forms, recognised by its keys. Other rows are left out and counted by reason.

    messages                     [{role, content}]: text, OpenAI's text parts, Apertus' blocks; tool_calls, role tool
    conversations                [{from, value}], ShareGPT: system, human, gpt, function_call, observation
    instruction, output, input   Alpaca; its published prompt becomes the user's words
    prompt, completion           two texts, or two lists of messages
    with any of these            system (a text), tools (a list, or one as JSON), thinking, license

Until conversations repeat, each loss is measured on ones that the model has not seen: the training curve is then a
held-out curve. The conversations become ids once, in out/<run>/tokens (posttrain/conversations.py). After SIGTERM,
SIGUSR2, or `touch out/<run>/stop`, all ranks stop after the current micro-batch and save; --resume continues.

$ python -m posttrain.sft --data=conversations.jsonl --show        # the first conversations; learnt tokens are green
$ python -m posttrain.sft --init_from=out/laptop --data=conversations.jsonl
$ python -m posttrain.sft --data="{'chats/': 2, 'hf://datasets/OWNER/NAME': 1}"   # two of three are from chats/
$ python -m posttrain.sft configs/sft_8b.py --data=mixture.jsonl --resume
$ torchrun --nproc_per_node=8 -m posttrain.sft configs/sft_8b.py --parallel=fsdp     # the same numbers on more ranks
"""

import itertools
import os

import numpy as np
import torch

import convert
from ademamix import build_optimizer
from chat import describe_dropped, learnable
from configurator import run as run_script, settings
from engine import restore

# Before torch: engine.hardware sets environment variables that torch reads when it loads.
from engine.hardware import can_compile, pick_device, pick_dtype
from engine.parallel import Ranks, orderly_exit
from engine.run import Run
from posttrain import (
    collapse,
    common,  # first: a script started by its path gets posttrain/posttrain.py here
    start,
)
from posttrain.conversations import first_rows, tokenized, weights_of
from posttrain.forgetting import Old

# -----------------------------------------------------------------------------
# the run
out = "out/sft"                 # the run folder
init_from = "out/laptop"        # the start model: run folder, Hugging Face folder or hub name
data = "conversations.jsonl"    # .jsonl, .parquet, folder, glob, hf://datasets/OWNER/NAME, or {such: weight, ...}
keep_licenses = ""              # only rows whose column `license` is one of these, with commas between
decontaminate = ""              # file of evaluation prompts (prepare.py): conversations that contain one are left out
show = False                    # print the first conversations token by token, learnt tokens in green, and stop
resume = False                  # continue from the newest intact checkpoint of this folder
device = "auto"                 # cuda | mps | cpu
dtype = "auto"                  # float32 | bfloat16, of activations; weights and states are fp32
parallel = "auto"               # none | ddp | fsdp | hsdp | auto, as in train.py; the 8B with AdEMAMix takes 161 GB
compile = False                 # torch.compile: worth it on CUDA with --pack, which makes few shapes
seed = 28                       # seed of the order of conversations
date = "2025-09-02"             # "Current date" of the default system message; fixed, so that a run can be repeated
# adapters (posttrain/lora.py)
lora_r = 0                      # rank of the adapters; 0 = no adapters, all weights are trained
lora_alpha = 32.0               # scale of their update: alpha / r
lora_on = "all"                 # matrices with adapters: all, or some of q_proj,k_proj,v_proj,o_proj,up_proj,down_proj
lora_rs = False                 # rank-stabilised: scale by alpha / sqrt(r)
base = "fp32"                   # how frozen weights are stored: fp32 | bf16 | int8 | nf4
recompute = "none"              # activations that backward computes again: none | cheap | selective | full
# layout
max_length = 0                  # tokens; 0 = the model's window. Longer conversations are left out and counted, not cut
pack = False                    # False: one conversation per row, padded, as Apertus; True: several, apart in attention
# the schedule
epochs = 1
batch_size = 512                # conversations per step, packed or not
micro_batch = 4                 # rows in memory at once
warmup = 0.03                   # share of the steps in which the rate rises linearly; then it falls linearly to the end
# the optimizer
optimizer = "ademamix"          # ademamix | adamw
state_dtype = "float32"         # of AdEMAMix's two averages; bfloat16: 4 bytes a parameter less, one rounded at random
lr = 5e-6
betas = (0.9, 0.999, 0.99)      # fast average, squares, slow average; AdamW uses the first two
alpha = 8.0                     # the slow average's weight; alpha and beta3 warm up over the run, at most 100,000 steps
eps = 1e-8
weight_decay = 0.0
grad_clip = 1.0
rank_every = 100                # steps between diagnoses of collapse (posttrain/collapse.py); 0 = never
# forgetting (posttrain/forgetting.py)
old = ""                        # text like the start model's data: .txt, .jsonl, or a data folder's validation split
old_every = 0                   # steps between measurements; 0 = before the first and after the last step only
old_windows = 64                # windows of that text, at most, spread over its documents; 0 = all
# checkpoints
checkpoint_every = 500          # steps; 0 = at the end only
keep_checkpoints = 2            # how many of the newest to keep; 0 = all
# -----------------------------------------------------------------------------


# -----------------------------------------------------------------------------
# conversations as rows of a batch


def rows_of(conversations, pack, max_length):
    """
    The conversations of a step, laid out in rows: one per row or, with pack, first-fit from the longest on.

    Packing changes only the padding: attention stays inside a conversation, and RoPE depends on distances alone.
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


def tensors(rows, device):
    """Rows of conversations -> idx, targets (-1 where nothing is learnt), doc, each (rows, T), padded on the right."""
    lengths = [[len(ids) for ids, _ in row] for row in rows]
    found = np.full((3, len(rows), max(map(sum, lengths))), -1)
    found[0] = 0
    for n, row in enumerate(rows):
        ids, said = map(np.concatenate, zip(*row))
        T = len(ids)
        # Position i predicts token i + 1. At the end of a conversation that is <s> of the next, which is not learnt.
        learnt = np.where(said, ids, -1)
        found[0, n, :T] = ids
        found[1, n, :T - 1] = learnt[1:]
        found[2, n, :T] = np.repeat(np.arange(len(row)), lengths[n])
    # MPS may read `found` after it is freed (pytorch issue 189690).
    return torch.from_numpy(found).to(device, non_blocking="cuda" in device)


# -----------------------------------------------------------------------------
# the loop


def train(run, model, optimizer, conversations, longest, rows_at_once, text):
    """
    Train on all conversations, `epochs` times. Every rank lays out all rows of a step, and takes its share of them.

    All losses of a step are divided by its learnt tokens, so that those of micro-batches and ranks add up.
    """
    ranks, shares = run.ranks, weights_of(data).values()
    for step in run.steps():
        numbers = common.chosen(step, batch_size, conversations.sizes, shares, epochs, seed)
        rows = rows_of([conversations[k] for k in numbers], pack, longest)
        facts = count(rows) | diagnosis(model, rows, step, run)
        loss, positions = torch.zeros((), device=run.device), 0
        for part in run.micro_batches(model, common.shared(rows, rows_at_once, ranks)):
            idx, targets, doc = tensors(part or rows[:1], run.device)
            if not part:
                targets.fill_(-1)                          # no row is left for this rank: it runs too, and adds nothing
            part_loss = model.loss(idx, targets, doc=doc if pack else None, n_tokens=facts["learnt"])
            part_loss.backward()
            loss += part_loss.detach()
            positions += idx.numel() * ranks.size
        if run.interrupted:                                # asked to stop between two micro-batches: drop this step
            break

        loss, norm = run.reduce(model, loss)
        rate = lr * common.linear(step, run.end, warmup)
        if run.is_finite(step, loss, norm):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step(grad_scale=min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0)
        optimizer.zero_grad()

        run.log_step(step, facts.pop("tokens"), positions, dict(loss=loss), norm, lr=rate, **facts)
        if text and run.validation_due(step + 1, old_every):
            run.log(step=step, **text.measure(model, ranks))
        run.save_if_due(step + 1, model, optimizer)


def count(rows):
    """For the log: the tokens of rows, and how many of them are learnt."""
    _, said = map(np.concatenate, zip(*itertools.chain(*rows)))
    return dict(tokens=len(said), learnt=int(said.sum()))


def diagnosis(model, rows, step, run):
    """For the log, now and then: is the representation collapsing?"""
    if not rank_every or step % rank_every and step + 1 < run.end:
        return {}
    # One conversation per row: eager attention with a mask of documents would store the scores of all positions.
    idx, targets, _ = tensors([[c] for c in itertools.chain(*rows)][:4 * micro_batch], run.device)
    return collapse.diagnose(model, idx, targets >= 0)


# -----------------------------------------------------------------------------
# from the settings to the run folder


def main():
    if show:
        return show_conversations()
    shape, tok, path = convert.start_of(init_from)
    longest = common.check_settings(globals(), shape, tok, "conversations")
    shape.doc_mask, shape.vocab_size = True, max(shape.vocab_size, tok.vocab_size)
    config = settings(globals(), shape) | dict(max_length=longest)
    ranks = Ranks(parallel)
    where = ranks.place(pick_device(device))
    kind, compiled = pick_dtype(dtype, where), compile and can_compile(where)
    text = Old(old, tok, shape.block_size, old_windows, out) if old else None

    with Run(config, ranks, where) as run:
        if resume:                                         # before data are read, which takes minutes
            restore.compare_with_folder(out, common.decisive(config))
        conversations, bad, sha = tokenized(os.path.join(out, "tokens"), tok, data, longest, date, ranks, keep_licenses,
                                            decontaminate)
        config |= dict(data_hash=sha[:16], tokenizer_hash=tok.hash[:16])
        steps = -(-epochs * len(conversations) // batch_size)
        found = restore.find_same(run, common.decisive(config), steps) if resume else None
        window = longest if pack else np.diff(conversations.starts).max()
        rows_at_once = start.check_memory(shape, config, ranks, where, kind, window)
        model = start.build(shape, config, ranks, where, kind, path, compiled, fresh=not found)
        warm = min(steps, 100_000)
        opt = build_optimizer(model, optimizer, lr, betas, alpha, eps, weight_decay, warm, warm, None, state_dtype)
        if found:
            restore.load(found[0], model, opt)
        if text and found:
            text.recall()
        config |= start.hash_of(model, config, found)
        if ranks.is_main:
            convert.describe(out, config | dict(chat=True), shape, tok)
            dropped = [describe_dropped(bad, len(conversations), "conversations")] if bad else []
            print(*dropped, f"{conversations.tokens:,} tokens, {conversations.learnt:,} of them learnt",
                  f"{len(conversations)} conversations, {steps} step{'s' * (steps != 1)}", sep="\n")
        run.open(steps, found, model.flops_per_token(window) / ranks.size)
        if text and not found:
            run.log(step=0, **text.measure(model, ranks))
        train(run, model, opt, conversations, longest, rows_at_once, text)
        if run.close(model, opt):
            start.finish(run, model, config, text)
        run.leave(convert.complete)


def show_conversations():
    """--show: the first three conversations of each source, token by token, or why one of them would be left out."""
    shape, tok, _ = convert.start_of(init_from)
    tok.check_chat()
    for place, row in itertools.chain(*(first_rows(source, 3) for source in weights_of(data))):
        found = learnable(tok, row, max_length or shape.block_size, date)
        if isinstance(found, str):
            print(f"{place} is left out: {found}")
            continue
        ids, said = found
        # One piece per token; a vocabulary of single bytes has one per run, so that letters and words stay whole.
        together = said.__getitem__ if len(tok.pieces) == 256 else None
        shown = []
        for _, run in itertools.groupby(range(len(ids)), together):
            run = list(run)
            text = tok.decode_bytes(ids[run[0]:run[-1] + 1]).decode("utf-8", errors="backslashreplace")
            colour = 32 if said[run[0]] else 90
            shown.append(f"\x1b[{colour}m{text}\x1b[0m".replace("\n", "⏎"))
        print("·".join(shown))
        print(f"{sum(said)} of {len(ids)} tokens are learnt (green)\n")


if __name__ == "__main__":
    with orderly_exit():
        run_script(main, globals())
