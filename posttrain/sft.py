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
    with any of these            system (a text), tools (a list, or one as JSON), thinking

Until conversations repeat, each loss is measured on ones that the model has not seen: the training curve is then a
held-out curve. In the log, `tokens` and `learnt` are those of the step; `tokens` of train.py are all so far. The
conversations become ids once, in out/<run>/tokens (posttrain/conversations.py). After SIGTERM, SIGUSR2, or `touch
out/<run>/stop`, all ranks stop after the current micro-batch and save; --resume continues.

$ python -m posttrain.sft --data=conversations.jsonl --show        # the first conversations; learnt tokens are green
$ python -m posttrain.sft --init_from=out/laptop --data=conversations.jsonl
$ python -m posttrain.sft --data=chats/,hf://datasets/OWNER/NAME   # both, in one random order
$ python -m posttrain.sft configs/sft_8b.py --data=mixture.jsonl --resume
$ torchrun --nproc_per_node=8 --shutdown-timeout=600 --max-restarts=3 --signals-to-handle=SIGTERM,SIGINT,SIGUSR2 \\
  -m posttrain.sft configs/sft_8b.py --parallel=fsdp --resume     # the same numbers on more ranks
"""

import sys

if __name__ == "__main__" and not __package__:
    print("sft.py: start it from the project's root, python -m posttrain.sft", file=sys.stderr)
    sys.exit(2)

import itertools
import math
from contextlib import suppress
from dataclasses import replace

# Before torch: engine.hardware sets environment variables that torch reads when it loads.
from engine.hardware import parts_to_compile, pick_device, pick_dtype

# isort: split
import numpy as np
import torch

import convert
from ademamix import build_optimizer, optimizer_step
from chat import conversation as as_messages, describe_dropped, learnable
from configurator import run as run_script, settings as read_settings
from engine import memory, restore
from engine.parallel import Ranks, check_finite, orderly_exit, reduce_step
from engine.run import Run, StepInterrupted
from posttrain import common
from posttrain.conversations import first_rows, sources_of, tokenize_data
from posttrain.start import frozen_hash
from train import build_model, conclude

# -----------------------------------------------------------------------------
# the run
out = "out/sft"                 # the run folder
init_from = "out/laptop"        # the start model: run folder, Hugging Face folder or hub name
data = "conversations.jsonl"    # .jsonl, .parquet, folder, glob, hf://datasets/OWNER/NAME; several with commas between
show = False                    # print the first conversations, learnt tokens in green, and stop
resume = False                  # continue from the newest intact checkpoint of this folder
device = "auto"                 # cuda | mps | cpu
dtype = "auto"                  # float32 | bfloat16, of activations; weights and states are fp32
parallel = "auto"               # none | ddp | fsdp | hsdp | auto, as in train.py; all weights of the 8B take 177 GB
compile = False                 # torch.compile of the blocks, best with --pack (few shapes); else xIELU alone, on CUDA
seed = 28                       # seed of the order of conversations
# adapters (posttrain/lora.py)
lora_r = 0                      # rank of the adapters; 0 = no adapters, all weights are trained
lora_alpha = 32.0               # scale of their update: alpha / r
base = "fp32"                   # how frozen weights are stored: fp32 | bf16 | int8 | nf4
recompute = "none"              # activations that backward computes again: none | cheap | selective | full
# layout
max_length = 0                  # tokens; 0 = the model's window. Longer conversations are left out and counted, not cut
pack = False                    # False: one conversation per row, padded, as Apertus; True: several, apart in attention
# the schedule
epochs = 1                      # passes over all conversations, each in an order of its own
batch_size = 512                # conversations per step, packed or not
micro_batch = 4                 # rows in memory at once
warmup = 0.03                   # share of the steps in which the rate rises linearly; then it falls linearly to the end
# the optimizer
optimizer = "ademamix"          # ademamix | adamw
state_dtype = "float32"         # of AdEMAMix's two moments; bfloat16: 4 bytes a parameter less, one rounded at random
lr = 5e-6                       # peak learning rate
betas = (0.9, 0.999, 0.99)      # fast moment, squares, slow moment; AdamW uses the first two
alpha = 8.0                     # weight of the slow moment; alpha and beta3 warm up over the run, at most 100,000 steps
weight_decay = 0.0              # on matrices; never on norm weights and xIELU scalars
grad_clip = 1.0                 # largest global L2 norm of the gradient; 0 = off
# checkpoints
checkpoint_every = 500          # steps; 0 = at the end only
keep_checkpoints = 2            # how many of the newest to keep; 0 = all
# -----------------------------------------------------------------------------


# -----------------------------------------------------------------------------
# conversations as rows of a batch


def pack_rows(conversations, max_length):
    """
    Conversations, laid out in rows of at most max_length tokens: first-fit, from the longest on.

    Packing changes only the padding: attention stays inside a conversation, and RoPE depends on distances alone.
    """
    rows = []
    for conversation in sorted(conversations, key=lambda conversation: -len(conversation[0])):
        for row in rows:
            taken = sum(len(ids) for ids, _ in row)
            if taken + len(conversation[0]) <= max_length:
                row.append(conversation)
                break
        else:
            rows.append([conversation])
    return rows


def collate(rows, device):
    """Rows of conversations -> idx, targets (-1 where nothing is learnt), doc, each (rows, T), padded on the right."""
    T = max(sum(len(ids) for ids, _ in row) for row in rows)
    idx = np.zeros((len(rows), T), np.int64)
    targets, doc = np.full_like(idx, -1), np.full_like(idx, -1)
    for n, row in enumerate(rows):
        ids, loss_mask = map(np.concatenate, zip(*row))
        idx[n, :len(ids)] = ids
        # Position i predicts token i + 1. At the end of a conversation that is <s> of the next, which is not learnt.
        targets[n, :len(ids) - 1] = np.where(loss_mask, ids, -1)[1:]
        doc[n, :len(ids)] = np.repeat(np.arange(len(row)), [len(ids) for ids, _ in row])
    # Not on MPS, which may read the array after it is freed (pytorch issue 189690).
    return torch.from_numpy(np.stack((idx, targets, doc))).to(device, non_blocking="cuda" in device)


def count_tokens(rows):
    """For the log: the tokens of rows, and how many of them are learnt."""
    masks = [loss_mask for row in rows for _, loss_mask in row]
    return dict(tokens=sum(map(len, masks)), learnt=int(sum(mask.sum() for mask in masks)))


# -----------------------------------------------------------------------------
# the loop


def train(run, model, optimizer, conversations, max_length, micro_batch_size):
    """
    Train on all conversations, `epochs` times, or until the user asks to stop.

    All losses of a step are divided by its learnt tokens, so that those of micro-batches and ranks add up.
    """
    ranks = run.ranks
    for step in run.steps():
        batch = [conversations[k] for k in common.item_indices(step, batch_size, len(conversations), epochs, seed)]
        rows = pack_rows(batch, max_length) if pack else [[conversation] for conversation in batch]
        stats = count_tokens(rows)                         # of all ranks
        loss, n_positions = torch.zeros((), device=run.device), 0
        for part in run.micro_batches(model, common.rank_micro_batches(rows, micro_batch_size, ranks)):
            idx, targets, doc = collate(part or rows[:1], run.device)
            if not part:
                targets.fill_(-1)                          # no row is left for this rank: it runs too, and adds nothing
            part_loss = model.loss(idx, targets, doc=doc if pack else None, n_tokens=stats["learnt"])
            part_loss.backward()
            loss += part_loss.detach()
            n_positions += idx.numel() * ranks.size
        losses, norm = reduce_step(model, ranks, loss)     # over all ranks
        check_finite(step, losses, norm)
        lr_now = lr * common.linear(step, run.end, warmup)
        optimizer_step(optimizer, lr_now, norm, grad_clip)

        run.log.step(step, loss=losses[0], seconds=run.step_seconds(), tokens_in_step=n_positions, grad_norm=norm,
                     lr=lr_now, **stats)
        run.save_if_due(step + 1, model, optimizer)


# -----------------------------------------------------------------------------
# from the settings to the run folder


def main():
    if show:
        show_conversations()
        return
    shape, tok, weights = convert.start_of(init_from)
    settings = read_settings(globals())
    longest = common.check_settings(settings, shape, tok, "conversations")
    shape = replace(shape, doc_mask=True, vocab_size=max(shape.vocab_size, tok.vocab_size))
    settings |= read_settings(shape) | common.FIXED | dict(max_length=longest)
    ranks = Ranks(parallel)
    local_device = ranks.local_device(pick_device(device))
    activations, compiled = pick_dtype(dtype, local_device), parts_to_compile(compile, local_device)
    # Weights and states must fit; activations are counted below, when the length of the rows is known.
    outline = build_model(shape, settings, ranks, "meta")
    _, shards = memory.fit_to_memory(outline, settings, ranks, local_device, activations, 0, micro_batch)
    ranks.shard_over(shards)

    with Run(settings, ranks, local_device) as run:
        if resume:                                         # before data are read, which takes minutes
            restore.compare_with_folder(out, common.must_match(settings))
        conversations, dropped, data_hash = tokenize_data(f"{out}/tokens", tok, data, longest, ranks)
        settings |= dict(data_hash=data_hash[:16], tokenizer_hash=tok.hash[:16])
        steps = math.ceil(epochs * len(conversations) / batch_size)
        window = longest if pack else conversations.longest
        micro_batch_size, _ = memory.fit_to_memory(
            outline, settings, ranks, local_device, activations, window, micro_batch, ranks_have_met=True)
        settings |= dict(micro_batch=micro_batch_size)     # checkpoints hold it, since sums round by it
        checkpoint = restore.find_same(
            out, common.must_match(settings), micro_batch_size, steps, ranks.save_group) if resume else None
        model = build_model(shape, settings, ranks, local_device, compiled, weights, fresh=not checkpoint)
        # `compile` is about the blocks: AdEMAMix's update is compiled from a million parameters on in any case.
        opt = build_optimizer(model, optimizer, lr, betas, alpha, weight_decay, warmup=min(steps, 100_000),
                              state_dtype=state_dtype)
        if checkpoint:
            restore.load(checkpoint[0], model, opt)
        if lora_r:
            settings |= dict(start_hash=frozen_hash(model, checkpoint))
        if ranks.is_main:
            convert.remove_old_weights(out)
            convert.write_config(out, settings | dict(chat=True), shape, tok)
            introduce(conversations, dropped, steps)
        run.begin(settings, steps, checkpoint, model.flops_per_token(window))
        with suppress(StepInterrupted):                    # the steps before it are saved below
            train(run, model, opt, conversations, longest, micro_batch_size)
        summary = common.finish(run, model) if run.close(model, opt) else None
        ranks.leave()
        conclude(run, summary)


def introduce(conversations, dropped, steps):
    """Print how large the run is. dropped: [[reason, place]] of the rows that are left out."""
    if dropped:
        print(describe_dropped(dropped, len(conversations), "conversations"))
    print(f"{conversations.tokens:,} tokens, {conversations.learnt:,} of them learnt")
    common.announce(len(conversations), "conversations", steps)


def show_conversations():
    """--show: the first three conversations of each source, or why one of them would be left out."""
    shape, tok, _ = convert.start_of(init_from)
    tok.check_chat()
    for place, row in itertools.chain(*(first_rows(source, 3) for source in sources_of(data))):
        result = learnable(tok, row, max_length or shape.block_size)
        if isinstance(result, str):
            print(f"{place} is left out: {result}")
            continue
        ids, loss_mask = result
        row = as_messages(row)
        has_own_beginning = row["messages"][0]["role"] == "system" or row["tools"]
        begin = 0 if has_own_beginning else ids.index(tok.id_of("<|user_start|>"))
        print(coloured(tok, ids[begin:], loss_mask[begin:]))
        default = f"; the default system message, {begin} tokens, is not shown" if begin else ""
        print(f"{sum(loss_mask)} of {len(ids)} tokens are learnt (green){default}\n")


def coloured(tok, ids, loss_mask):
    """A conversation as a line for the terminal: in grey what is read, in green, with dots between tokens, the rest."""
    # A vocabulary of single bytes has no dots, so that letters and words stay whole.
    has_dots = len(tok.pieces) > 256
    pieces = []
    for _, group in itertools.groupby(range(len(ids)), lambda i: i * loss_mask[i] if has_dots else loss_mask[i]):
        positions = list(group)
        text = tok.decode_bytes(ids[positions[0]:positions[-1] + 1]).decode("utf-8", errors="backslashreplace")
        colour = 32 if loss_mask[positions[0]] else 90
        pieces.append(f"\x1b[{colour}m{text}\x1b[0m".replace("\n", "⏎"))
    return "·".join(pieces)


if __name__ == "__main__":
    with orderly_exit():
        run_script(main, globals())
