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
    tensors = [*model.parameters(), *model.buffers()]
    return dict(
        weights=sum(t.nbytes for t in tensors),
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
    takes = held(model, settings["optimizer"], settings["state_dtype"])
    takes = {kind: n / shards for kind, n in takes.items()}
    if ranks.mode == "ddp":
        takes["buckets"] = takes["gradients"]
    # 3 C: embedding, last norm, and gradient of the hidden states.
    takes["activations"] = (c.n_layer * kept[settings["recompute"]] + 3 * C) * positions * size

    # Logits that the loss holds at a time on a GPU, in fp32 and as their gradient.
    head = model.lm_head.weight
    logits = 2**27 if head.requires_grad else 2**26
    in_head = 8 * min(logits, positions * c.vocab_size)
    if head.requires_grad:
        in_head += 6 * head.numel()
    # Activations and 0.7 of their gradients at once; weights in bf16 and their gradients.
    in_block = 1.7 * kept["none"] * positions * size + 8 * trained(model.model.layers[0])
    # FSDP keeps the head gathered meanwhile.
    if shards > 1:
        in_block += 2 * head.numel()
    takes["temporary"] = max(in_head, in_block)
    return takes


def room_on(device):
    """(bytes that a step may take, bytes in all) of a device; None for both if unknown."""
    total = memory_of(device)
    if not total or not device.startswith("cuda"):
        return total, total
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that this process has reserved is free, but for tensors that exist already (a teacher).
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def check_run(run, build):
    """check() of a run of train.py, whose model build(run) makes; on a GPU its line is printed."""
    with torch.device("meta"):
        model = build(run)
    line = check(model, run.config, run.rows, run.shape.block_size, run.ranks, run.device, run.dtype)
    if run.ranks.first and run.device.startswith("cuda"):
        print(line)


def check(model, settings, rows, tokens, ranks, device, dtype):
    """
    One line with the memory of a step and of the device; "" if that is unknown. Arguments as in of_step.

    ValueError, with the sum and the flags to change, if the step takes more than the device has.
    """
    has, total = room_on(device)
    # recompute_activations() rejects other modes.
    if not total or settings["recompute"] not in MODES:
        return ""
    shards = ranks.shard if ranks.sharded else 1

    def takes(rows, shards=shards, **other):
        return of_step(model, settings | other, rows, tokens, ranks, dtype.itemsize, shards)

    kinds = takes(rows)
    parts = [f"{kind} {gb(n)}" for kind, n in kinds.items()]
    need = sum(kinds.values())
    line = f"a step takes about {gb(need)} GB ({', '.join(parts)}), and {device} has {gb(has)}"
    if need <= has:
        return line
    if need <= SHARE * total:
        raise ValueError(f"{line} of its {gb(total)} free: another process is there (nvidia-smi names it)")
    advice = flags_that_fit(takes, settings, rows, shards, SHARE * total)
    if settings["init_from"] and not settings["lora_r"]:
        advice += "; or train adapters, --lora_r=16 --base=bf16"
    raise ValueError(f"{line}: {advice}")


def gb(size):
    return f"{size / 1e9:.1f}"


def flags_that_fit(takes, settings, rows, shards, room):
    """
    The first flags with which a step takes at most `room` bytes, in words. takes: of check().

    A smaller micro-batch comes first, then recomputation, since both change results by rounding alone; then bf16
    states; then more devices.
    """
    dtypes = [settings["state_dtype"]]
    if settings["optimizer"] == "ademamix" and dtypes == ["float32"]:
        dtypes.append("bfloat16")
    modes = MODES[MODES.index(settings["recompute"]):]
    fewer = [n for n in range(rows, 0, -1) if rows % n == 0]
    before = settings | dict(micro_batch=rows)
    for state_dtype, recompute, micro_batch in itertools.product(dtypes, modes, fewer):
        after = dict(state_dtype=state_dtype, recompute=recompute)
        size = sum(takes(micro_batch, **after).values())
        if size <= room:
            after["micro_batch"] = micro_batch
            flags = [f"--{name}={value}" for name, value in after.items() if value != before[name]]
            return f"{' '.join(flags)} takes {gb(size)}"
    for devices in (shards * 2**k for k in range(1, 13)):
        size = sum(takes(1, devices, recompute="full").values())
        if size <= room:
            flags = "--parallel=fsdp --recompute=full --micro_batch=1"
            return f"in shards on {devices} of them, {flags} takes {gb(size)}"
    return "take a shorter --block_size, or a larger device"
