"""
Does it fit, and how long does it take? Pretraining on thousands of GPUs or fine-tuning on one, planned without any.

    memory     of a GPU: the sum of engine/memory.py, by which a run is checked before it starts
    compute    of a micro-batch: FLOPs per token * tokens / (peak * MFU)
    links      a micro-batch gathers all weights twice in bf16 and reduces all gradients once in fp32: 8 bytes per
               parameter, whatever its size
    windows    over P GPUs (--sequence_parallel): activations divide by P; four all-to-alls per block and direction add
               their time to the compute, since nothing runs beside them

So tokens per GPU and micro-batch decide whether compute hides the links, and memory decides how many tokens there may
be. NCCL's rings let the GPUs of a node share their links: where nccl-tests measures more, --net_gbs of that is closer.

$ python -m tools.plan configs/70b.py --gpus=512 --gpu=h100
$ python -m tools.plan configs/70b.py --gpus=4096 --batch_size=4096 --gpu=gh200 --parallel=hsdp --hsdp_shard=64
$ python -m tools.plan configs/sft_8b.py --gpus=1 --gpu=4090 --lora_r=16 --base=nf4
$ python -m tools.plan --cards          # README's table of what can be fine-tuned on which card
$ python -m tools.plan --long           # and of how many GPUs hold windows of 8k to 64k
$ python -m tools.plan --fits           # and of what fits where: six commands
"""

import sys

if __name__ == "__main__" and not __package__:
    print("plan.py: start it from the project's root, python -m tools.plan", file=sys.stderr)
    sys.exit(2)

import dataclasses
import itertools
from types import SimpleNamespace

import convert
import train
from configurator import config_file, read_config, run, settings
from engine import memory
from engine.gpus import GPUS
from engine.parallel import nearest_divisors
from model import ApertusConfig
from posttrain import attach, lora, qrpo, sft
from posttrain.common import adapters_of, check_base, shapes_of

# A plan is of a run: it has all settings of train.py, posttrain/sft.py and posttrain/qrpo.py, and these.
globals().update(settings(vars(qrpo), vars(sft), vars(attach), vars(train), train.shape))
gpus = 8                   # how many
gpu = "h100"               # a100 | h100 | h200 | gh200 | b200 | l40s | 4090; the last two alone
mfu = 0.40                 # share of the peak that a GPU reaches, waits and recomputation aside (Apertus: 0.30 - 0.34)
reserve = 0.08             # share of the memory that CUDA, NCCL and fragments take
node_gbs = 0.0             # GB/s per GPU, inside a node; 0 = the table's
net_gbs = 0.0              # GB/s per GPU, between nodes; 0 = the table's
cards = False              # print the table of what can be fine-tuned on which card, and stop
fits = False               # print the table of six commands and the memory that each takes, and stop
long = False               # print the table of the fewest GPUs for windows of 8k to 64k, and stop

# The published models, whose shapes are those of these configs: a plan needs no network.
PUBLISHED = {"swiss-ai/Apertus-8B-": "8b", "swiss-ai/Apertus-70B-": "70b"}
ADAPTERS = lora.settings_of(16, 32, "all")


# -----------------------------------------------------------------------------
# the run


def published(name):
    """The ApertusConfig of configs/NAME.py, with Apertus' vocabulary."""
    defaults = settings(vars(train), train.shape)
    return ApertusConfig.of(defaults | read_config(config_file(name)) | dict(vocab_size=131072))


def shape():
    """The ApertusConfig of the run: of --init_from if there is a start model, its window as long as is trained."""
    if not init_from:
        return ApertusConfig.of(globals() | dict(vocab_size=vocab_size or 131072))
    found = [name for prefix, name in PUBLISHED.items() if init_from.startswith(prefix)]
    start = published(found[0]) if found else convert.shape_of(init_from)
    if not start:
        raise ValueError(f"init_from={init_from!r} has no config.json: name a run folder, a Hugging Face folder or a "
                         "model of the hub")
    window = block_size if "block_size" in globals().get("_asked", ()) else start.block_size
    return dataclasses.replace(start, block_size=max_length or window)


def windows_of_a_group(config):
    """Windows of a step for each group of GPUs that share them. ValueError if windows or batch cannot be split so."""
    P = sequence_parallel
    for name, n in dict(gpus=gpus, n_kv_head=config.n_kv_head, block_size=config.block_size).items():
        if P < 1 or n % P:
            raise ValueError(f"sequence_parallel={P} does not divide {name}={n}: try {nearest_divisors(n, max(P, 1))}")
    groups = gpus // P
    if batch_size % groups:
        raise ValueError(f"batch_size={batch_size} cannot be split over {groups} groups of {P} GPUs: "
                         f"{nearest_divisors(batch_size, groups)} can; or say another --batch_size")
    return batch_size // groups


def bytes_of(model, mode, rows=1, shards=1, P=1, states="float32", copies=False):
    """
    {kind: bytes} on each GPU at the peak of a step in bf16.

    model: on the meta device; mode: of recomputation; rows: windows of a micro-batch; shards: GPUs that share one copy
    of the weights; P: GPUs that share a window; copies: whole models are kept alike by DDP.
    """
    how = dict(optimizer="ademamix", state_dtype=states, recompute=mode)
    ranks = SimpleNamespace(mode="ddp" if copies else "none")
    return memory.of_step(model, how, rows, model.config.block_size // P, ranks, 2, shards)


# -----------------------------------------------------------------------------
# time


def seconds_of(size, sharing, per_node, inside, between):
    """
    Seconds that collectives of so many bytes take among the GPUs that share them, if nothing else uses the links.

    inside, between: GB/s per GPU in a node of per_node, and beyond.
    """
    speed = inside if sharing <= per_node else between
    return size * (sharing - 1) / sharing / (speed * 1e9) if sharing > 1 else 0.0


def per_block(config):
    """Multiplications by matrices in a block's forward pass, per token."""
    attention = (2 * config.n_head + 2 * config.n_kv_head) * config.head_dim
    return config.n_embd * (attention + 2 * config.ffn_width)


def recompute_cost(config, mode, frozen=False):
    """
    FLOPs of a step with recomputation as a multiple of those without.

    full runs the forward pass of each block again, selective its matrix `up`. A step is three forward passes, or two if
    the weights are frozen.
    """
    again = dict(none=0, selective=config.n_embd * config.ffn_width, full=per_block(config))
    forward = per_block(config) * config.n_layer + config.n_embd * config.vocab_size
    return 1 + again[mode] * config.n_layer / ((2 if frozen else 3) * forward)


def exchanged(config, rows, P, mode):
    """Bytes that a GPU sends to those with which it shares windows: q, k, v and the result, forward and backward."""
    passes = 3 if mode == "full" else 2
    heads = 2 * (config.n_head + config.n_kv_head) * config.head_dim
    return passes * config.n_layer * rows * config.block_size // P * heads * 2


# -----------------------------------------------------------------------------
# the plan


def gb(size):
    return f"{size / 1e9:.1f}"


def check_gpus(shards, adapters):
    """ValueError, one line, for GPUs that cannot run this."""
    usable = [name for name, one in GPUS.items() if gpus == 1 or one.node_gbs]
    if gpu not in usable:
        raise ValueError(f"gpu={gpu!r}: there is {', '.join(usable)}")
    if gpus < 1 or not 0 < mfu <= 1 or not 0 <= reserve < 1:
        raise ValueError(
            f"gpus={gpus} mfu={mfu} reserve={reserve}: want at least 1 GPU, 0 < mfu <= 1 and 0 <= reserve < 1")
    check_base(base, adapters)
    if adapters and shards > 1:
        raise ValueError(f"gpus={gpus} parallel={parallel}: adapters are planned for GPUs that hold the base whole: "
                         "take --gpus=1 or --parallel=ddp")
    if gpus % shards:
        raise ValueError(f"hsdp_shard={shards} does not divide gpus={gpus}: try {nearest_divisors(gpus, shards)}")


def main():
    for asked, table in ((cards, table_of_cards), (fits, table_of_fits), (long, table_of_windows)):
        if asked:
            print(*table(), sep="\n")
            return
    shards = gpus
    if gpus == 1 or parallel == "ddp":
        shards = 1
    elif parallel == "hsdp" and gpu in GPUS:
        shards = hsdp_shard or GPUS[gpu].per_node
    adapters = adapters_of(globals())
    check_gpus(shards, adapters)
    spec, config = GPUS[gpu], shape()
    most = windows_of_a_group(config)
    model = shapes_of(config, adapters, base)
    room = spec.memory * (1 - reserve)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{model.num_params() / 1e9:.2f}B parameters, {trained / 1e6:,.1f}M of them trained"
          f"{f', adapters beside a base in {base}' if adapters else ''}; {batch_size} x {config.block_size} tokens per "
          f"step, on {gpus} x {gpu} ({spec.memory / 1e9:.0f} GB), {shards} to a copy of the weights, "
          f"{sequence_parallel} to a window\n")
    plans = [plan_of(mode, model, spec, shards, most, room) for mode in memory.MODES]
    print_memory(plans, room)
    # The length of a fine-tuning is that of its conversations, which a plan does not read.
    print_speed(plans, 0 if max_length else total_samples * config.block_size)
    print(*advice(plans, spec, shards, most, room), sep="\n")


def plan_of(mode, model, spec, shards, most, room):
    """
    The plan with this mode of recomputation, as a namespace: rows of the largest micro-batch that fits (0: none does),
    bytes by kind and their total, tokens of a GPU, seconds of compute and of links, and tokens per second of all GPUs.
    """
    config, P = model.config, sequence_parallel
    copies = shards == 1 and gpus > 1
    inside, between = node_gbs or spec.node_gbs, net_gbs or spec.net_gbs

    def takes(rows):
        return bytes_of(model, mode, rows, shards, P, state_dtype, copies)
    divisors = [n for n in range(1, most + 1) if most % n == 0]
    fitting = max((n for n in divisors if sum(takes(n).values()) <= room), default=0)
    rows = fitting or 1
    tokens = rows * config.block_size / P
    frozen = not model.lm_head.weight.requires_grad
    flops = model.flops_per_token(config.block_size) * recompute_cost(config, mode, frozen)
    compute = tokens * flops / (spec.flops * mfu)
    compute += seconds_of(exchanged(config, rows, P, mode), P, spec.per_node, inside, between)
    links = seconds_of(8 * model.num_params(), shards, spec.per_node, inside, between)
    kinds = takes(rows)
    return SimpleNamespace(
        mode=mode,
        rows=fitting,
        kinds=kinds,
        total=sum(kinds.values()),
        tokens=tokens,
        compute=compute,
        links=links,
        speed=gpus * tokens / max(compute, links),
    )


def print_memory(plans, room):
    """The table of memory, a line for each mode of recomputation."""
    heads = [*plans[0].kinds, "total"]
    print(f"{'GB per GPU':12}{'micro':>6}" + "".join(f"{head:>13}" for head in heads))
    for plan in plans:
        sizes = "".join(f"{gb(size):>13}" for size in [*plan.kinds.values(), plan.total])
        print(f"{plan.mode:12}{plan.rows or 1:6}{sizes}  {'fits' if plan.rows else 'does NOT fit'} in {gb(room)}")


def print_speed(plans, length):
    """The table of times of a micro-batch at `mfu` of the peak. length: tokens of the run, 0 if that is not known."""
    print(f"\nat {mfu:.0%} MFU {'tokens':>10}{'compute':>10}{'links':>9}{'tok/s':>12}{'days':>10}")
    for plan in plans:
        days = f"{length / plan.speed / 86400:,.1f}" if length else "-"
        print(f"{plan.mode:12}{plan.tokens:9,.0f}{plan.compute:9.2f}s{plan.links:8.2f}s{plan.speed:12,.0f}{days:>10}"
              f"{'' if plan.rows else '  (if it fitted)'}")
    print()


def advice(plans, spec, shards, most, room):
    """Yield lines: what to set, and what to change if it does not fit or waits for its links."""
    best = max((plan for plan in plans if plan.rows), key=lambda plan: plan.speed, default=None)
    if not best:
        wider = f"--hsdp_shard={2 * shards}" if 1 < shards < gpus else f"--gpus={2 * gpus} --parallel=fsdp"
        yield (f"-> does not fit: it takes {gb(min(plan.total for plan in plans))} GB, and there are {gb(room)}: take "
               f"{wider}, windows over several GPUs (--sequence_parallel={2 * sequence_parallel}), a shorter "
               "--block_size, or adapters beside a published model (--lora_r=16 --base=nf4)")
        return
    how = parallel if shards == 1 else "fsdp" if shards == gpus else "hsdp"
    added = "" if best.rows == most else f"; a step adds up {most // best.rows} of them on each GPU"
    yield f"-> --parallel={how} --recompute={best.mode} --micro_batch={best.rows}{added}"
    if best.links > best.compute:
        hidden = best.tokens * best.links / best.compute
        fewer = f", --parallel=hsdp --hsdp_shard={spec.per_node}" if shards == gpus > spec.per_node else ""
        yield (f"-> communication-bound: compute hides the links from {hidden:,.0f} tokens per GPU and micro-batch on, "
               f"and here there are {best.tokens:,.0f}. Take fewer GPUs{fewer}, or tensor and pipeline parallelism "
               "(github.com/pytorch/torchtitan; Apertus: TP 4, PP 8 at 4,096 GPUs)")


# -----------------------------------------------------------------------------
# README's tables, a line at a time


def table_of_fits():
    """What six commands take of each GPU."""
    eight, small = shapes_of(published("8b")), shapes_of(published("1b5"))
    adapted = shapes_of(published("8b"), lora.settings_of(64, 32, "all"), "bf16")
    yield "GB at the peak  of GPUs    configs/"
    for gpus, flags, model, *how in (
            ("1 x 141", "8b.py 8b_one_gpu.py", eight, "selective", 1, 1, 1, "bfloat16"),
            ("8 x 141", "8b.py --parallel=fsdp", eight, "none", 4, 8),
            ("8 x 80", "8b.py --parallel=fsdp --micro_batch=2", eight, "none", 2, 8),
            ("8 x 141", "sft_8b.py --parallel=fsdp --pack --compile", eight, "none", 4, 8),
            ("1 x 80", "1b5.py", small, "none", 3),
            ("1 x 24", "continue_8b.py --lora_r=64 --base=bf16 --recompute=full", adapted, "full")):
        yield f"{gb(sum(bytes_of(model, *how).values())):>14}  {gpus:9}  {flags}"


def table_of_cards():
    """
    GB that fine-tuning a published model takes at the peak, and the smallest card that has them, `reserve` kept free:
    one window of 4,096 tokens, recompute=full.
    """
    yield "GB at the peak, of which card   all weights  LoRA on bf16          int8           NF4"
    for name in ("8b", "70b"):
        line = f"{name.upper():29}"
        for held in ("fp32", "bf16", "int8", "nf4"):
            model = shapes_of(published(name), None if held == "fp32" else ADAPTERS, held)
            most = sum(bytes_of(model, "full").values())
            card = next((f" of {card}" for card in (16, 24, 40, 80, 141) if most <= card * 1e9 * (1 - reserve)), "")
            line += f"{gb(most) + card:>14}"
        yield line


def table_of_windows():
    """
    The fewest GPUs, in nodes of 8, that hold a published model in shards and windows of 8k to 64k; with the least
    recomputation that fits there, and then the fewest GPUs to a window.
    """
    lengths = [8192, 16384, 32768, 65536]
    yield "GPUs / P to a window" + "".join(f"{T // 1024:>17}k" for T in lengths)
    for name in ("8b", "70b"):
        model = shapes_of(published(name))
        for card in (80, 141):
            cells = "".join(f"{fewest(model, T, card * 1e9 * (1 - reserve)):>18}" for T in lengths)
            yield f"{name.upper():4}{card:4} GB each    {cells}"


def fewest(model, T, room):
    """A cell of the table: for windows of T tokens on GPUs with so many bytes."""
    model.config.block_size = T
    for gpus, mode, P in itertools.product((8 * 2**n for n in range(10)), memory.MODES, (1, 2, 4, 8)):
        if sum(bytes_of(model, mode, 1, gpus, P).values()) <= room:
            return f"{gpus} / {P} {mode}"
    return "-"


if __name__ == "__main__":
    run(main, globals())
