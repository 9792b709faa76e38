"""
The memory that a training step takes on a device, added up before anything is allocated there.

    weights       4 bytes per parameter; a frozen parameter in its own dtype
    gradients     4 bytes per trained parameter; with --exact 8 bytes more, which are not divided
    states        12 with AdEMAMix, 8 with --state_dtype=bfloat16, 8 with AdamW
                  fsdp and hsdp divide these three by the ranks that share one copy
    activations   numbers that backward needs of each block and position, 2 bytes each in bf16:
                  none        2 F + 7 C + 3 K     (C: n_embd, F: width of the feed-forward, K: width of all key heads)
                  cheap       F + 4 C + 2 K       (engine/recompute.py; SwiGLU's gate is F more in both)
                  selective   4 C + 2 K
                  full        C
    temporary     the larger of the loss (a chunk of logits, and 6 bytes per weight of the head, whose gradient is
                  summed in fp32) and one block in backward
    beyond        memory of the device that torch's allocator does not count: CUDA, and gaps between its blocks. 6 % of
                  the sum, 16 % in shards: the largest shares in whole steps of the 8B and 1.5B on a stand-in for CUDA

A step fits if the sum is at most the device's memory; tools/plan.py uses the same sum, and names settings that fit.
Without `beyond` it is between 3 % more and 6 % less than the peaks of whole compiled 8B steps in torch's allocator on a
stand-in for an H200. Eager blocks, as in fine-tuning, take more: where all weights are trained, their weights in bf16
are kept for backward, 14 GB; and without a compiler xIELU's fp32 tensors are not fused, 0.5 MB for each position of the
8B in memory.
"""

import shlex
import sys

import torch

from engine.hardware import memory_of, name_in_table

MODES = ("none", "cheap", "selective", "full")


def count_trained(module):
    """The number of trained parameters of a module."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def step_memory(model, settings, tokens, size=2, shards=1):
    """
    {part: bytes} on each device at the peak of a step, and their total.

    model: on the meta device; settings: a dict with optimizer, state_dtype, recompute, exact and micro_batch;
    tokens: of a window on this rank; size: bytes of an activation; shards: ranks that share one copy of the weights.
    """
    c = model.config
    C, F, K = c.n_embd, c.ffn_width, c.n_kv_head * c.head_dim
    gate = F * (c.activation == "swiglu")
    kept = dict(
        none=2 * F + gate + 7 * C + 3 * K,
        cheap=F + gate + 4 * C + 2 * K,
        selective=4 * C + 2 * K,
        full=C)
    positions = settings["micro_batch"] * tokens
    n = count_trained(model)
    n_here = n / shards
    exact = settings.get("exact", False)                   # in shards, even if there is only one
    parts = dict(
        weights=sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) / shards,
        # FSDP keeps those of --exact whole, in fp64, until the last micro-batch.
        gradients=4 * n_here + 8 * n * exact,
        states=n_here * (8 if settings["optimizer"] == "adamw" or settings["state_dtype"] == "bfloat16" else 12),
        # 3 C: embedding, last norm, and gradient of the hidden states.
        activations=(c.n_layer * kept[settings["recompute"]] + 3 * C) * positions * size)

    # Logits that the loss holds at a time on a GPU, in fp32 and as their gradient; half as many if the head is frozen.
    head = model.lm_head.weight
    in_head = 8 * min(2**26 << head.requires_grad, positions * c.vocab_size) + 6 * head.requires_grad * head.numel()
    # All activations of the block with 0.7 of their gradients; its weights in bf16 and their gradients.
    in_block = 1.7 * kept["none"] * positions * size + 8 * count_trained(model.model.layers[0])
    beyond = 0.06
    if shards > 1 or exact:
        in_block += 2 * head.numel()                       # FSDP keeps the head gathered meanwhile
        beyond = 0.16
    parts["temporary"] = max(in_head, in_block)
    parts["beyond"] = beyond * sum(parts.values())
    return parts | dict(total=sum(parts.values()))


def list_layouts(least, most, micro_batch):
    """
    [(ranks that share a copy of the weights, samples in memory at once)], the fastest first. least: ranks that share a
    copy at least, as in one node; most: at most; micro_batch: samples as the user has set them.

    A copy inside a node comes first, since the links between nodes are slow. Beyond it, many samples come first, since
    weights are gathered once for all of them.
    """
    return sorted([(shards, n) for n in range(micro_batch, 0, -1) if not micro_batch % n
                   for shards in range(least, most + 1, least) if not most % shards],
                  key=lambda layout: layout[0] > least)


def fit_to_memory(model, settings, ranks, device, dtype, window, micro_batch, ranks_have_met=False):
    """
    Choose (samples in memory at once, ranks that share a copy of the weights) so that a step fits on its device.

    model: on the meta device; window: tokens of a sample; micro_batch: samples as the user has set them. If they do not
    fit, fewer are in memory at once (not with --exact); with hsdp and no hsdp_shard, more ranks share a copy. On a GPU
    it prints the sum. ValueError, with the sum and the command that plans this run, if nothing fits; or if fewer fit
    than set and the loss is a mean over micro-batches.
    ranks_have_met: a second check, of windows whose length was unknown before; this process may hold the model already.
    """
    total = free = memory_of(device)
    if not total:
        return micro_batch, ranks.shard
    if device.startswith("cuda") and not ranks_have_met:
        # The step can use memory that this process has freed, but not that of a teacher or of other processes. Add the
        # 1 GB that CUDA itself takes in this process, since the sum counts it too.
        torch.cuda.empty_cache()
        free = min(total, torch.cuda.mem_get_info(device)[0] + 1e9)

    # Ranks of one group share each window.
    tokens = window * ranks.groups // ranks.size

    def memory_with(shards, micro_batch):
        return step_memory(model, settings | dict(micro_batch=micro_batch), tokens, dtype.itemsize, shards)

    may_share = ranks.mode == "hsdp" and not ranks_have_met and not settings["hsdp_shard"]
    most = ranks.size if may_share else ranks.shard
    layouts = [(shards, n) for shards, n in list_layouts(ranks.shard, most, micro_batch)
               if n == micro_batch or not ranks.exact]
    # Chosen by the device's whole memory, not by the free part, since all ranks must choose the same.
    fitting = (layout for layout in layouts if memory_with(*layout)["total"] <= total)
    shards, micro_batch = next(fitting, layouts[0])
    parts = memory_with(shards, micro_batch)
    line = (f"GB that a step takes, with micro_batch={micro_batch} and a copy of the model on {shards}: "
            f"{', '.join(f'{part} {format_gb(size)}' for part, size in parts.items())}; "
            f"{device} has {format_gb(free)} of {format_gb(total)} free")
    if parts["total"] > free:
        raise ValueError(f"{line}. For settings that fit, run: {plan_command(model, settings, ranks, device, window)}")
    if ranks.is_main and tokens and device.startswith("cuda"):
        print(line)
    check_average(settings, micro_batch)
    return micro_batch, shards


def check_average(settings, micro_batch):
    """ValueError if the loss is a mean over micro-batches and they are smaller than set."""
    if settings.get("loss_average") == "micro" and micro_batch != settings["micro_batch"]:
        raise ValueError(f"loss_average=micro averages over micro-batches, and micro_batch={settings['micro_batch']} "
                         f"has no room: take --micro_batch={micro_batch}, or --loss_average=step")


def format_gb(size):
    return f"{size / 1e9:.1f}"


def plan_command(model, settings, ranks, device, window):
    """The command that plans the run of this process: its own command line, for tools/plan.py."""
    flags = dict(gpus=ranks.size)
    if device.startswith("cuda") and name_in_table():
        flags["gpu"] = name_in_table()
    if not settings.get("init_from"):
        flags["vocab_size"] = model.config.vocab_size      # that of the data, which a plan does not read
    if "max_length" in settings and window:
        flags["max_length"] = window                       # the longest conversation
    return shlex.join(["python", "-m", "tools.plan", *sys.argv[1:], *(f"--{name}={n}" for name, n in flags.items())])
