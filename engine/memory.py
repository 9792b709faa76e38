"""
The memory that a training step takes on a device, added up before anything is allocated there.

    weights       4 bytes per parameter; a frozen parameter in its own dtype
    gradients     4 bytes per trained parameter
    states        12 with AdEMAMix, 8 with --state_dtype=bfloat16, 8 with AdamW
                  fsdp and hsdp divide these three by the ranks that share one copy
    buckets       of DDP: the gradients once more
    activations   numbers that backward needs of each block and position, 2 bytes each in bf16:
                  none        2 F + 4 C + 3 Q + 3 K     (C wide, F in the feed-forward, Q and K in queries and keys)
                  selective   2 C + 2 Q + 2 K           (engine/parallel.py)
                  full        C
    temporary     6 bytes per weight of the head, whose gradient is added up in fp32, or one recomputed block

Compared with the peaks of whole 8B steps in torch's allocator on one H200, the sum is 0 to 6 % less, so a step that
fits always starts. Eager torch also keeps the blocks' weights in bf16 for backward, 14 GB of the 8B.
"""

import itertools

import torch

from engine.gpus import memory_of

MODES = ("none", "selective", "full")
# The part of a device that proposed flags may fill: the rest is for CUDA, NCCL, and fragments.
SHARE = 0.92


def trained(module):
    """The number of its trained parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def held(model, optimizer, state_dtype):
    """{weights, gradients, states: bytes} of a model, which may be on the meta device."""
    bytes_of_states = 8 if optimizer == "adamw" or state_dtype == "bfloat16" else 12
    return dict(
        weights=sum(t.nbytes for t in [*model.parameters(), *model.buffers()]),
        gradients=4 * trained(model),
        states=bytes_of_states * trained(model))


def of_step(model, settings, rows, tokens, ranks, size, shards=1):
    """
    {kind: bytes} on each device at the peak of a step.

    model: on the meta device; settings: a dict with optimizer, state_dtype and recompute; rows: windows of a
    micro-batch; tokens: of a window on this rank; size: bytes of an activation; shards: ranks that share one copy.
    """
    c = model.config
    C, F = c.n_embd, c.ffn_width
    Q, K = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    kept = dict(
        none=2 * F + 4 * C + 3 * Q + 3 * K,
        selective=2 * C + 2 * Q + 2 * K,
        full=C)
    positions = rows * tokens
    whole = held(model, settings["optimizer"], settings["state_dtype"])
    takes = {kind: n / shards for kind, n in whole.items()}
    if ranks.mode == "ddp":
        takes["buckets"] = takes["gradients"]
    # 3 C: embedding, last norm, and gradient of the hidden states.
    takes["activations"] = (c.n_layer * kept[settings["recompute"]] + 3 * C) * positions * size

    # Logits that the loss holds at a time on a GPU, in fp32 and as their gradient.
    head = model.lm_head.weight
    logits, gradient = (2**27, 6 * head.numel()) if head.requires_grad else (2**26, 0)
    in_head = 8 * min(logits, positions * c.vocab_size) + gradient
    # Activations and 0.7 of their gradients at once; weights in bf16 and their gradients.
    in_block = 1.7 * kept["none"] * positions * size + 8 * trained(model.model.layers[0])
    # FSDP keeps the head gathered meanwhile.
    if shards > 1:
        in_block += 2 * head.numel()
    takes["temporary"] = max(in_head, in_block)
    return takes


def check_run(run, build):
    """
    Check that a step of a run of train.py fits on its device, and print the sum on a GPU. build(run): the model.

    ValueError, with the sum and the flags to change, if the step takes more than the device has.
    """
    with torch.device("meta"):
        model = build(run)
    settings = run.config
    ranks = run.ranks
    device = run.device
    has = total = memory_of(device)
    # recompute_activations() rejects other modes.
    if not total or settings["recompute"] not in MODES:
        return
    if device.startswith("cuda"):
        # The step can use what this process has freed; a teacher and other processes keep theirs.
        torch.cuda.empty_cache()
        has, _ = torch.cuda.mem_get_info(device)
    shards = ranks.shard if ranks.sharded else 1

    def takes(state_dtype, recompute, rows, shards=shards):
        return of_step(
            model,
            settings | dict(state_dtype=state_dtype, recompute=recompute),
            rows,
            run.val.T,
            ranks,
            run.dtype.itemsize,
            shards)

    now = settings["state_dtype"], settings["recompute"], run.rows
    kinds = takes(*now)
    need = sum(kinds.values())
    parts = ", ".join(f"{kind} {gb(size)}" for kind, size in kinds.items())
    line = f"a step takes about {gb(need)} GB ({parts}), and {device} has {gb(has)}"
    if need > max(has, SHARE * total):
        advice = flags_that_fit(takes, *now, shards, SHARE * total)
        if settings.get("init_from") and not settings["lora_r"]:
            advice += "; or train adapters, --lora_r=16 --base=bf16"
        raise ValueError(f"{line}: {advice}")
    if need > has:
        raise ValueError(f"{line} of its {gb(total)} free: another process is there (nvidia-smi names it)")
    if ranks.first and device.startswith("cuda"):
        print(line)


def gb(size):
    return f"{size / 1e9:.1f}"


def flags_that_fit(takes, state_dtype, recompute, rows, shards, room):
    """
    The first flags with which a step takes at most `room` bytes, in words. takes(state_dtype, recompute, rows, shards):
    its {kind: bytes}.

    A smaller micro-batch comes first, then recomputation, since both change results by rounding alone; then bf16
    states; then more devices.
    """
    dtypes = state_dtype, "bfloat16"
    modes = MODES[MODES.index(recompute):]
    fewer = [n for n in range(rows, 0, -1) if rows % n == 0]
    for state_dtype, recompute, rows in itertools.product(dtypes, modes, fewer):
        size = sum(takes(state_dtype, recompute, rows).values())
        if size <= room:
            return f"--state_dtype={state_dtype} --recompute={recompute} --micro_batch={rows} takes {gb(size)}"
    for doublings in range(1, 13):
        devices = shards * 2**doublings
        size = sum(takes(dtypes[0], "full", 1, devices).values())
        if size <= room:
            return (f"in shards on {devices} of them, --parallel=fsdp --recompute=full --micro_batch=1 "
                    f"takes {gb(size)}")
    return "take a shorter --block_size, or a larger device"
