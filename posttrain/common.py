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

from data import by_epoch
from engine.checkpoint import gather
from engine.checks import check_values
from engine.files import read_text, write_flushed
from posttrain.start import save_adapter

# Settings of train.py for which SFT and QRPO have no flag.
FIXED = dict(
    timeout=7200,               # seconds: a rank may sample references while another waits for it
    checkpoint_minutes=30.0,
    hsdp_shard=0)
# A resumed run may change these settings, because they change no number by more than rounding. The hashes of the data
# and of the rewards must be the same; references have a folder of their own.
FREE = {
    *FIXED, "out", "data", "rewards", "references", "show", "resume", "device", "parallel", "compile", "micro_batch",
    "pack", "checkpoint_every", "keep_checkpoints", "recompute",
}
FEW_STEPS = 20
# Without adapters, their settings decide nothing.
OF_ADAPTERS = {"lora_r", "lora_alpha", "base"}


def check_settings(settings, shape, tok, items):
    """
    ValueError for settings that cannot work. Returns the tokens of the longest item.

    settings: a dict; shape, tok: of the start model; items: their name in error messages, "conversations" or "pairs".
    """
    tok.check_chat()
    check_values(settings)
    if not 0 <= settings["warmup"] <= 1:
        raise ValueError(f"warmup={settings['warmup']} is a share of the steps: want 0 to 1")
    for name in ("epochs", "batch_size", "micro_batch"):
        if settings[name] < 1:
            raise ValueError(f"{name}={settings[name]} must be at least 1")
    if settings["max_length"] > shape.block_size:
        raise ValueError(f"max_length={settings['max_length']} is beyond the window of the start model, "
                         f"{shape.block_size} tokens: take --max_length={shape.block_size}; longer {items} are "
                         "left out")
    return settings["max_length"] or shape.block_size


def must_match(settings):
    """The settings that a resumed run may not change, {name: value}."""
    free = FREE if settings["lora_r"] else FREE | OF_ADAPTERS
    return {name: settings[name] for name in sorted(settings.keys() - free)}


def announce(n_items, items, steps):
    """Print how many items (their name, plural) and steps a run has, and a warning if the steps are too few."""
    print(f"{n_items} {items}, {steps} step{'s' * (steps != 1)}")
    if steps < FEW_STEPS:
        fitting = max(1, n_items // FEW_STEPS)
        print(f"warning: fewer than {FEW_STEPS} steps hardly change a model: take --batch_size={fitting}, "
              "more --epochs, and for a small model a higher --lr (docs/posttraining.md)")


def finish(run, model):
    """After the last save of a finished run: the adapters. Returns the summary."""
    if run.settings["lora_r"]:
        save_adapter(run, model)
    if run.ranks.is_main:
        print(f"{run.out}: talk to it with python sample.py --chat --init_from={run.out}")
    return dict(steps=run.done)


# -----------------------------------------------------------------------------
# results on disk


def cached(files, ranks, label, compute, together=False):
    """
    The contents of JSON files. The k-th of them, if it is missing, is written first, with the value of compute(k).

    The ranks share the missing files, and each rank returns all contents. together: all ranks compute equally often,
    because they gather each other's weights; a rank that is done computes the first file again. label: of the bar.
    """
    missing = [k for k in range(len(files))[ranks.rank::ranks.size] if not os.path.exists(files[k])]
    if together:
        missing += [0] * (max(gather(len(missing), ranks.save_group)) - len(missing))
    for k in tqdm(missing, label, delay=2, leave=False, disable=not ranks.is_main):
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


def item_indices(step, batch_size, n_items, epochs, seed):
    """
    Which items a step takes, (at most batch_size,). Each epoch takes every item once, in an order of its own.

    A pure function of the step, so that a resumed run and any number of ranks see the same batches.
    """
    end = min((step + 1) * batch_size, epochs * n_items)
    epoch, i = np.divmod(np.arange(step * batch_size, end), n_items)
    return by_epoch(epoch, i, n_items, seed)


def linear(step, steps, warmup):
    """
    The learning rate as a share of its peak: linear up over a share `warmup` of the steps, then linear down.

    This is transformers' "linear" schedule with its zeros just outside the run, at step -1 and at step `steps`, so that
    every step learns, even if the run has only one.
    """
    up = max(1, math.ceil(warmup * steps))
    return min((step + 1) / up, (steps - step) / (steps - up + 1))


def rank_micro_batches(items, size, ranks):
    """
    This rank's micro-batches of a step's items, `size` at a time. All ranks get equally many, because sharded ranks
    gather each other's weights: some may be empty, and the caller then runs one that adds nothing.
    """
    parts = [items[begin:begin + size] for begin in range(0, len(items), size)]
    per_rank = math.ceil(len(parts) / ranks.size)
    return (parts + [[]] * (per_rank * ranks.size - len(parts)))[ranks.rank::ranks.size]
