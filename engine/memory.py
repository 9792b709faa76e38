"""
The memory that a training step takes on a device, added up before anything is allocated there.

    weights       4 bytes per parameter; a frozen parameter in its own dtype
    gradients     4 bytes per trained parameter; in shards with --exact 8 bytes more, which are not divided
    states        12 with AdEMAMix, 8 with --state_dtype=bfloat16, 8 with AdamW
                  fsdp and hsdp divide these three by the ranks that share one copy
    activations   numbers that backward needs of each block and position, 2 bytes each in bf16:
                  none        2 F + 7 C + 3 K     (C: n_embd, F: width of the feed-forward, K: width of all key heads)
                  cheap       F + 4 C + 2 K       (engine/recompute.py)
                  selective   4 C + 2 K
                  full        C
    temporary     the larger of the loss (a chunk of logits, and 6 bytes per weight of the head, whose gradient is
                  summed in fp32) and one block in backward
    beyond        memory of the device that torch's allocator does not count: CUDA, and gaps between its blocks. 6 % of
                  the sum, 16 % in shards: the largest shares in whole steps of the 8B and 1.5B on a stand-in for CUDA

A step fits if the sum is at most the device's memory; tools/plan.py uses the same sum. Without `beyond` it is between
3 % more and 6 % less than the peaks of whole compiled 8B steps in torch's allocator on a stand-in for an H200. Eager
torch takes more: xIELU's fp32 tensors are not fused, 0.5 MB for each position of the 8B in memory, and, where all
weights are trained, the blocks' weights in bf16 are kept for backward, 14 GB.
"""

import itertools
import os
import sys

import torch

from engine.gpus import memory_of

MODES = ("none", "cheap", "selective", "full")


def trained(module):
    """The number of trained parameters of a module."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def of_step(model, settings, tokens, size=2, shards=1):
    """
    {kind: bytes} on each device at the peak of a step, and their total.

    model: on the meta device; settings: a dict with optimizer, state_dtype, recompute, exact and micro_batch;
    tokens: of a window on this rank; size: bytes of an activation; shards: ranks that share one copy of the weights.
    """
    c = model.config
    C, F, K = c.n_embd, c.ffn_width, c.n_kv_head * c.head_dim
    kept = dict(
        none=2 * F + 7 * C + 3 * K,
        cheap=F + 4 * C + 2 * K,
        selective=4 * C + 2 * K,
        full=C)
    positions = settings["micro_batch"] * tokens
    n = trained(model)
    own = n / shards
    takes = dict(
        weights=sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) / shards,
        # FSDP keeps those of --exact whole, in fp64, until the last micro-batch.
        gradients=4 * own + 8 * n * (settings.get("exact", False) and shards > 1),
        states=own * (8 if settings["optimizer"] == "adamw" or settings["state_dtype"] == "bfloat16" else 12))
    # 3 C: embedding, last norm, and gradient of the hidden states.
    takes["activations"] = (c.n_layer * kept[settings["recompute"]] + 3 * C) * positions * size

    # Logits that the loss holds at a time on a GPU, in fp32 and as their gradient; half as many if the head is frozen.
    head = model.lm_head.weight
    in_head = 8 * min(2**26 << head.requires_grad, positions * c.vocab_size) + 6 * head.requires_grad * head.numel()
    # All activations of the block with 0.7 of their gradients; its weights in bf16 and their gradients.
    in_block = 1.7 * kept["none"] * positions * size + 8 * trained(model.model.layers[0])
    beyond = 0.06
    if shards > 1:
        in_block += 2 * head.numel()                       # FSDP keeps the head gathered meanwhile
        beyond = 0.16
    takes["temporary"] = max(in_head, in_block)
    takes["beyond"] = beyond * sum(takes.values())
    return takes | dict(total=sum(takes.values()))


def ways_of(node, most, rows):
    """
    [(ranks that share a copy of the weights, windows in memory at once)], the fastest first. node: the ranks of a node;
    most: of a copy; rows: windows that were asked for.

    A copy inside a node comes first, since the links between nodes are slow. Beyond it, many windows come first, since
    weights are gathered once for all of them.
    """
    return sorted([(shards, n) for n in range(rows, 0, -1) if not rows % n
                   for shards in range(node, most + 1, node) if not most % shards], key=lambda way: way[0] > node)


def fit_to_memory(model, settings, ranks, device, dtype, window, rows, again=False):
    """
    Make a step fit on its device, and print the sum on a GPU. Returns (windows in memory at once, ranks of a copy).

    model: on the meta device; window: tokens of a window; rows: windows as asked for. If they do not fit, fewer are in
    memory at once (not with --exact); with hsdp and no hsdp_shard, more ranks share a copy. ValueError, with the sum
    and commands that fit, if that is not enough.
    again: a second check for windows whose length was unknown before; ranks have met and may hold the model.
    """
    free = has = memory_of(device)
    if not has:
        return rows, ranks.shard
    if device.startswith("cuda") and not again:
        # The step can use memory that this process has freed, but not that of a teacher or of other processes. Add the
        # 1 GB that CUDA itself takes in this process, since the sum counts it too.
        torch.cuda.empty_cache()
        free = min(has, torch.cuda.mem_get_info(device)[0] + 1e9)
    # Ranks of one group share each window.
    tokens = window * ranks.groups // ranks.size

    def takes(shards, **flags):
        return of_step(model, settings | flags, tokens, dtype.itemsize, shards)

    # Chosen by the device's whole memory, not by the free part, since all ranks must choose the same.
    most = ranks.size if ranks.mode == "hsdp" and not settings["hsdp_shard"] and not again else ranks.shard
    ways = [way for way in ways_of(ranks.shard, most, rows) if way[1] == rows or not ranks.exact]
    fits = (way for way in ways if takes(way[0], micro_batch=way[1])["total"] <= has)
    shards, rows = next(fits, ways[0])
    settings = settings | dict(micro_batch=rows)
    kinds = takes(shards)
    parts = ", ".join(f"{kind} {gb(size)}" for kind, size in kinds.items())
    line = (f"GB that a step takes, with micro_batch={rows} and a copy of the model on {shards}: {parts}; "
            f"{device} has {gb(free)} of {gb(has)} free")
    if kinds["total"] > free:
        advice = "; or ".join(commands_that_fit(takes, settings, shards, free, 12 * (device != "cpu")))
        if settings.get("init_from") and not settings["lora_r"]:
            advice += "; or train adapters, --lora_r=16 --base=bf16"
        raise ValueError(f"{line}: {advice}")
    if ranks.is_main and tokens and device.startswith("cuda"):
        print(line)
    return rows, shards


def gb(size):
    return f"{size / 1e9:.1f}"


def commands_that_fit(takes, settings, shards, room, doublings):
    """
    Commands with which a step takes at most `room` bytes, at most one for each dtype of the states: on the fewest
    devices (`shards` of them, or 2, 4, ... times that, up to 2^doublings; ranks on a CPU share its memory), and there
    the fastest. takes(shards, **flags): as of_step.

    A smaller micro-batch costs least time, then recomputation; both change results by rounding alone. bf16 states are
    the last resort.
    """
    most = settings["micro_batch"]
    found = {}
    # More devices come before bf16 states, since bf16 changes the optimizer.
    for dtype, n, mode, rows in itertools.product(
        [settings["state_dtype"]] + ["bfloat16"] * (settings["optimizer"] == "ademamix"),
        range(1 + doublings),
        MODES[MODES.index(settings["recompute"]):],
        range(most, 0, -1)
    ):
        devices = shards * 2**n
        flags = dict(micro_batch=rows, recompute=mode, state_dtype=dtype)
        # The sum takes milliseconds, so it stops at the first that fits.
        if dtype not in found and not most % rows and takes(devices, **flags)["total"] <= room:
            found[dtype] = command(devices, flags, settings)
    return found.values() or ["take a smaller model, or a shorter --block_size"]


def command(devices, changed, settings):
    """The command line of this process on a number of devices, with some settings changed."""
    script = os.path.relpath(sys.argv[0])
    if "/" in script:
        script = f"-m {script.removesuffix('.py').replace('/', '.')}"
    start = f"torchrun --standalone --nproc_per_node={devices}"
    if devices > 8:
        start = f"torchrun --nnodes={devices // 8} --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500"
    if devices == 1:
        start = "python"
    else:
        changed["parallel"] = "fsdp"
    flags = [f"--{name}={value}" for name, value in changed.items() if value != settings[name]]
    return " ".join([start, script, *sys.argv[1:], *flags])
