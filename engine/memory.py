"""
What a training step takes of a device, added up before anything is allocated there.

    weights       4 bytes a parameter, of which a frozen one has what it is held in
    gradients     4 bytes a trained one
    states        12 of AdEMAMix, 8 with --state_dtype=bfloat16, 8 of AdamW
                  fsdp and hsdp divide these three by the ranks that share one copy
    activations   what backward needs of each block, 2 bytes a number in bf16, times the positions of a micro-batch:
                  none        2 F + 4 C + 3 Q + 3 K     (C wide, F in the feed-forward, Q and K in queries and keys)
                  selective   2 C + 2 Q + 2 K           (see engine/parallel.py)
                  full        C
    temporary     6 bytes a weight of the head, whose gradient is added up in fp32, or one block that is computed again

This was within 5 % of a trace of the real model, and is less than torch's allocator takes, so that nothing is refused
that fits. On one device without recomputation eager torch keeps 14 GB more of the 8B for backward, its weights in bf16,
which torch.compile need not.
"""

import itertools

import torch

from engine.hardware import memory_of

MODES = ("none", "selective", "full")
# The part of a device that flags are proposed for: the rest is for CUDA, NCCL, and memory in pieces.
SHARE = 0.92


def held(model, optimizer, state_dtype):
    """{weights, gradients, states: bytes} of a model, which may be on the meta device."""
    trained = numbers_in(model)
    bytes_of_states = 12
    if optimizer == "adamw" or state_dtype == "bfloat16":
        bytes_of_states = 8
    weights = [*model.parameters(), *model.buffers()]
    return dict(
        weights=sum(t.nbytes for t in weights),
        gradients=4 * trained,
        states=bytes_of_states * trained,
    )


def numbers_in(module):
    """How many numbers of it are trained."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def of_step(model, settings, rows, tokens, ranks, size, shards=1):
    """
    {kind: bytes} on each device at the peak of a step.

    model: on the meta device; settings: of the run, by name, of which optimizer, state_dtype and recompute count; rows:
    windows of a micro-batch; tokens: of a window on this rank; size: bytes of an activation; shards: ranks that share
    one copy.
    """
    c = model.config
    C = c.n_embd
    Q = c.n_head * c.head_dim
    K = c.n_kv_head * c.head_dim
    kept = dict(
        none=2 * c.ffn_width + 4 * C + 3 * Q + 3 * K,
        selective=2 * C + 2 * Q + 2 * K,
        full=C,
    )
    positions = rows * tokens
    # Of a block in each layer; and embedding, last norm and gradient of the hidden states.
    activations = c.n_layer * kept[settings["recompute"]] + 3 * C
    head = model.lm_head.weight
    # As model.chunk_rows() has it on a GPU.
    most = 2**27 if head.requires_grad else 2**26
    in_head = 8 * min(most, positions * c.vocab_size)
    if head.requires_grad:
        in_head += 6 * head.numel()
    # Activations and their gradients, of which 0.7 are there at once; and weights in bf16 and their gradients.
    in_block = 1.7 * kept["none"] * positions * size
    in_block += 8 * numbers_in(model.model.layers[0])
    # FSDP keeps the head gathered meanwhile.
    if shards > 1:
        in_block += 2 * head.numel()

    takes = held(model, settings["optimizer"], settings["state_dtype"])
    takes = {kind: n / shards for kind, n in takes.items()}
    # What DDP sends gradients in.
    if ranks.mode == "ddp":
        takes["buckets"] = takes["gradients"]
    takes["activations"] = activations * positions * size
    takes["temporary"] = max(in_head, in_block)
    return takes


def check(model, settings, rows, tokens, ranks, device, dtype):
    """
    A line that says what a step takes and what the device has; "" where that is not known.

    ValueError if it is less: with the sum, and the flags that close the gap. Arguments as in of_step.
    """
    total = memory_of(device)
    # Of another mode recompute_activations() says that there is none.
    if not total or settings["recompute"] not in MODES:
        return ""
    has = total
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        # What this process holds for later is free, and a teacher may be there already.
        has = free + torch.cuda.memory_reserved(device)
        has -= torch.cuda.memory_allocated(device)
    shards = ranks.shard if ranks.sharded else 1

    def takes(rows, shards=shards, **other):
        return of_step(model, settings | other, rows, tokens, ranks, dtype.itemsize, shards)

    kinds = takes(rows)
    need = sum(kinds.values())
    parts = [f"{kind} {gb(n)}" for kind, n in kinds.items()]
    line = f"a step takes about {gb(need)} GB ({', '.join(parts)}), and {device} has {gb(has)}"
    if need <= has:
        return line
    room = SHARE * total
    if need <= room:
        raise ValueError(f"{line} of its {gb(total)} free: another process is there (nvidia-smi names it)")
    now = {name: settings[name] for name in ("state_dtype", "recompute")}
    found = flags_that_fit(takes, now | dict(micro_batch=rows), settings["optimizer"], room)
    found = found or shards_that_fit(takes, shards, room)
    if settings["init_from"] and not settings["lora_r"]:
        found += "; or train adapters, --lora_r=16 --base=bf16"
    raise ValueError(f"{line}: {found}")


def gb(size):
    return f"{size / 1e9:.1f}"


def flags_that_fit(takes, now, optimizer, room):
    """
    The flags by which a step comes below `room` bytes, "" if none do. takes: of check(); now: what is set.

    A smaller micro-batch comes first, then recomputation, since they change no number but by rounding.
    """
    states = [now["state_dtype"]]
    if optimizer == "ademamix" and states == ["float32"]:
        states.append("bfloat16")
    modes = MODES[MODES.index(now["recompute"]):]
    rows = now["micro_batch"]
    fewer = [n for n in range(rows, 0, -1) if rows % n == 0]
    for state_dtype, mode, n in itertools.product(states, modes, fewer):
        size = sum(takes(n, state_dtype=state_dtype, recompute=mode).values())
        if size <= room:
            then = dict(state_dtype=state_dtype, recompute=mode, micro_batch=n)
            flags = [f"--{name}={value}" for name, value in then.items() if value != now[name]]
            return f"{' '.join(flags)} takes {gb(size)}"
    return ""


def shards_that_fit(takes, shards, room):
    """Over how many devices a step comes below `room` bytes, in words. takes: of check()."""
    for n in (2**k for k in range(1, 13)):
        size = sum(takes(1, shards * n, recompute="full").values())
        if size <= room:
            flags = "--parallel=fsdp --recompute=full --micro_batch=1"
            return f"in shards on {shards * n} of them, {flags} takes {gb(size)}"
    return "take a shorter --block_size, or a larger device"
