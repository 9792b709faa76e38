"""
Shared by SFT and QRPO: items, which are conversations or pairs of completions.

A run goes `epochs` times over its items, batch_size of them per step, in micro-batches that the ranks divide among
themselves.
"""

import json
import math
import os

import numpy as np
from tqdm import tqdm

from data import SLOTS, by_epoch, mix_weights
from engine.checkpoint import gather
from engine.files import read_text, write_flushed

# A resumed run may change these settings, because they change no number by more than rounding. The hashes of the data
# (with keep_licenses and decontaminate) and of the rewards must be the same; references have a folder of their own.
FREE = """out data keep_licenses decontaminate rewards references show resume device parallel compile micro_batch pack
rank_every checkpoint_every keep_checkpoints recompute old old_every old_windows"""
# Without adapters, their settings decide nothing.
ADAPTERS = "lora_r lora_alpha lora_on lora_rs base"


def check_settings(script, shape, tok, what):
    """The longest item in tokens. ValueError for settings that cannot work. script: all of them; what: "pairs", ..."""
    tok.check_chat()
    if not 0 <= script["warmup"] <= 1:
        raise ValueError(f"warmup={script['warmup']} is a share of the steps: want 0 to 1")
    for name in ("epochs", "batch_size", "micro_batch"):
        if script[name] < 1:
            raise ValueError(f"{name}={script[name]} must be at least 1")
    if script["max_length"] > shape.block_size:
        raise ValueError(f"max_length={script['max_length']} is beyond the window of the start model, "
                         f"{shape.block_size} tokens: take --max_length={shape.block_size}; longer {what} are "
                         "left out")
    return script["max_length"] or shape.block_size


def decisive(config):
    """The settings that a resumed run may not change."""
    free = FREE.split() + ADAPTERS.split() * (not config["lora_r"])
    return {name: config[name] for name in sorted(config.keys() - free)}


def cached(files, ranks, what, compute, together=False):
    """
    The contents of JSON files. The k-th of them, if it is missing, is written first, with the value of compute(k).

    The ranks share the missing files, and each rank returns all contents. together: all ranks compute equally often,
    because they gather each other's weights; a rank that is done computes the first file again. what: label of the bar.
    """
    mine = [k for k in range(len(files))[ranks.rank::ranks.size] if not os.path.exists(files[k])]
    if together:
        most = max(gather(len(mine), ranks.files))
        mine += [0] * (most - len(mine))
    for k in tqdm(mine, what, delay=2, leave=False, disable=not ranks.is_main):
        write_flushed(files[k], json.dumps(compute(k)), shared=True)
    ranks.all_reduce(0)        # Barrier: no rank reads before every rank has written.
    return list(map(contents, files))


def contents(file):
    """The value in a JSON file. ValueError, one line, if it is damaged."""
    try:
        return json.loads(read_text(file))
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is damaged: delete it, and it will be made again") from None


# -----------------------------------------------------------------------------
# the order of the data and the learning rate, as pure functions of the step


def interleave(slots):
    """
    An even order of SLOTS samples, in which each source has its number of slots. Returns the source of each sample, and
    how many samples of that source come before it, both (SLOTS,).

    Sample k of a source with n slots is placed at (k + 1/2) / n of the order, like packets in fair queueing. So each
    source also has its share, to within a sample or two, of the first few samples.
    """
    source = np.repeat(np.arange(len(slots)), slots)
    before = np.concatenate(list(map(np.arange, slots)))
    order = np.argsort((before + 0.5) / np.repeat(slots, slots), kind="stable")
    return source[order], before[order]


def chosen(step, batch_size, sizes, weights, epochs, seed):
    """
    The items of a step, numbers (at most batch_size,); those of a source follow on those of the source before it.

    sizes, weights: of each source. A run takes epochs * sum(sizes) items, of which each source supplies its share. A
    source is repeated if need be, each time in another order; with one source, each epoch takes every item once. A
    pure function of the step, so that a resumed run and any number of ranks see the same batches.
    """
    slots = mix_weights(dict(enumerate(weights)))
    source, before = interleave([*slots.values()])
    end = min((step + 1) * batch_size, epochs * sum(sizes))
    position = np.arange(step * batch_size, end)
    block, j = np.divmod(position, SLOTS)
    numbers = np.empty_like(position)
    for s, n in enumerate(sizes):
        mine = source[j] == s
        epoch, i = np.divmod(block[mine] * slots[s] + before[j[mine]], n)
        numbers[mine] = sum(sizes[:s]) + by_epoch(epoch, i, n, seed)
    return numbers


def linear(step, steps, warmup):
    """
    The learning rate as a share of its peak: linear up over a share `warmup` of the steps, then linear down.

    This is transformers' "linear" schedule with its zeros just outside the run, at step -1 and at step `steps`, so that
    every step learns, even if the run has only one.
    """
    up = max(1, math.ceil(warmup * steps))
    return min((step + 1) / up, (steps - step) / (steps - up + 1))


def shared(items, rows, ranks):
    """
    This rank's micro-batches of a step's items, `rows` at a time. All ranks get equally many, because sharded ranks
    gather each other's weights: some may be empty, and the caller then runs one that adds nothing.
    """
    parts = [items[begin:begin + rows] for begin in range(0, len(items), rows)]
    each = -(-len(parts) // ranks.size)
    return (parts + [[]] * (each * ranks.size - len(parts)))[ranks.rank::ranks.size]
