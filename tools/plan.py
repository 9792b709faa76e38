"""
Does it fit, and how long does it take? Pretraining on thousands of GPUs or fine-tuning on one, planned without any.

    memory     of a GPU: weights, gradients and three states (20 bytes per parameter / shards) + two gathered blocks
               + activations. Beside adapters, a frozen weight takes 2 bytes in bf16, 1 in int8, half a byte in NF4
    compute    of a micro-batch: FLOPs per token * tokens / (peak * MFU)
    links      a micro-batch gathers all weights twice in bf16 and reduces all gradients once in fp32: 8 bytes per
               parameter, whatever its size
    windows    over P GPUs (--sequence_parallel): activations divide by P; four all-to-alls per block and direction add
               their time to the compute, since nothing runs beside them
    so         tokens per GPU and micro-batch decide whether compute hides the links, and memory decides how many
               tokens there may be

The memory is not a formula: tools/tracing.py runs the real model without data. A GPU has its own links alone. NCCL's
rings let the GPUs of a node share theirs: where nccl-tests measures more, --net_gbs of that is closer.

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
import functools
import itertools
import math
import os

import numpy as np
from tqdm import tqdm

import convert
import train
from configurator import config_file, read_config, run, settings
from engine.hardware import GPUS
from engine.parallel import nearest_divisors
from engine.plot import finish, pyplot
from loss import chunk_rows
from model import ApertusConfig
from posttrain import lora, qrpo, sft
from posttrain.common import adapters_of, check_base, shapes_of
from tools.tracing import KINDS, on_one, planner, sharded

# A plan is of a run: it has all settings of train.py, posttrain/sft.py and posttrain/qrpo.py, and these.
globals().update(settings(vars(qrpo)) | settings(vars(sft)) | settings(vars(train)))
gpus = 8                   # how many
gpu = "h100"               # a100 | h100 | h200 | gh200 | b200 | l40s | 4090; the last two alone
mfu = 0.40                 # share of the peak that a GPU reaches, waits and recomputation aside (Apertus: 0.30 - 0.34)
reserve = 0.08             # share of the memory that CUDA, NCCL and fragments take
node_gbs = 0.0             # GB/s per GPU, inside a node; 0 = the table's
net_gbs = 0.0              # GB/s per GPU, between nodes; 0 = the table's
picture = "out/plan.png"   # where it is drawn; "" = nowhere
cards = False              # print the table of what can be fine-tuned on which card, and stop
fits = False               # print the table of six commands and the memory that each takes, and stop
long = False               # print the table of the fewest GPUs for windows of 8k to 64k, and stop

# The published models, whose shapes are those of these configs: a plan needs no network.
PUBLISHED = {"swiss-ai/Apertus-8B-": "8b", "swiss-ai/Apertus-70B-": "70b"}


# -----------------------------------------------------------------------------
# what is planned


def published(name):
    """The ApertusConfig of configs/NAME.py, with Apertus' vocabulary."""
    defaults = settings(vars(train))
    return ApertusConfig.of(defaults | read_config(config_file(name)) | dict(vocab_size=131072))


def shape():
    """The ApertusConfig of the run: of --init_from if there is a start model, its window as long as is trained."""
    if not init_from:
        return ApertusConfig.of({**globals(), "vocab_size": vocab_size or 131072})
    found = [name for prefix, name in PUBLISHED.items() if init_from.startswith(prefix)]
    start = published(found[0]) if found else convert.shape_of(init_from)
    if not start:
        raise ValueError(f"init_from={init_from!r} has no config.json: name a run folder, a Hugging Face folder or a "
                         "model of the hub")
    window = start.block_size
    if "block_size" in globals().get("_asked", ()):
        window = block_size
    return dataclasses.replace(start, block_size=max_length or window)


def windows_of_a_group(config):
    """Windows of a step for each group of GPUs that share them. ValueError if windows or batch cannot be split so."""
    P = sequence_parallel
    for name, n in dict(gpus=gpus, n_kv_head=config.n_kv_head, block_size=config.block_size).items():
        if P < 1 or n % P:
            raise ValueError(f"sequence_parallel={P} does not divide {name}={n}: try {nearest_divisors(n, max(P, 1))}. "
                             "Beyond n_kv_head: context parallelism, as in torchtitan")
    groups = gpus // P
    if batch_size % groups:
        those = f"{gpus} GPUs" if P == 1 else f"{groups} groups of {P} GPUs"
        raise ValueError(
            f"batch_size={batch_size} cannot be split over {those}: {nearest_divisors(batch_size, groups)} can. "
            "For more GPUs than samples (70B: the batch doubles at batch_ramp_at) say --batch_size, split windows by "
            "--sequence_parallel, or the model by tensor and pipeline parallelism, as torchtitan does")
    return batch_size // groups


# -----------------------------------------------------------------------------
# time


GATHERS = "allgather_base", "reduce_scatter_base"


def seconds_of(traffic, shards, node, inside, between, names=GATHERS):
    """
    Seconds that a micro-batch's collectives of these names take among `shards` GPUs if nothing else uses the links.

    node: GPUs of a node; inside, between: GB/s per GPU. The all-reduce between copies, once per step, is not in it.
    """
    if shards == 1:
        return 0.0
    speed = (inside if shards <= node else between) * 1e9
    size = sum(traffic.get(name, 0) for name in names)
    return size * (shards - 1) / shards / speed


def recompute_cost(config, mode, frozen=False):
    """
    FLOPs of a step with recomputation as a multiple of those without.

    full runs the forward pass of each block again, selective its matrix `up`. A step is three forward passes, or two if
    the weights are frozen.
    """
    passes = 2 if frozen else 3
    again = {
        "none": 0.0,
        "selective": config.n_embd * config.ffn_width,
        "full": per_block(config)}
    forward = per_block(config) * config.n_layer + config.n_embd * config.vocab_size
    return 1 + again[mode] * config.n_layer / (passes * forward)


def per_block(config):
    """Multiplications by matrices in a block's forward pass, per token."""
    attention = (2 * config.n_head + 2 * config.n_kv_head) * config.head_dim
    return config.n_embd * (attention + 2 * config.ffn_width)


# -----------------------------------------------------------------------------
# the plan


def gb(size):
    return f"{size / 1e9:.1f}"


def main():
    if cards or fits or long:
        table = table_of_cards() if cards else table_of_fits() if fits else table_of_windows()
        print(*table, sep="\n")
        return
    spec = GPUS.get(gpu)
    if not spec or gpus > 1 and not spec.node_gbs:
        there = [name for name, one in GPUS.items() if gpus == 1 or one.node_gbs]
        raise ValueError(f"gpu={gpu!r}: there is {', '.join(there)}")
    if gpus < 1 or not 0 < mfu <= 1 or not 0 <= reserve < 1:
        raise ValueError(
            f"gpus={gpus} mfu={mfu} reserve={reserve}: want at least 1 GPU, 0 < mfu <= 1 and 0 <= reserve < 1")
    adapters = adapters_of(globals())
    check_base(base, adapters)
    if adapters and gpus > 1 and parallel != "ddp":
        raise ValueError(f"gpus={gpus} parallel={parallel}: adapters are planned for GPUs that hold the base whole: "
                         "take --gpus=1 or --parallel=ddp")
    # Whole models on each GPU, or shards of one.
    whole = gpus == 1 or parallel == "ddp"
    shards = (hsdp_shard or spec.per_node) if parallel == "hsdp" else gpus
    shards = 1 if whole else shards
    if gpus % shards:
        raise ValueError(f"hsdp_shard={shards} does not divide gpus={gpus}: try {nearest_divisors(gpus, shards)}")
    config = shape()
    most = windows_of_a_group(config)
    model = shapes_of(config, adapters, base)
    room, P = spec.memory * (1 - reserve), sequence_parallel
    how = "whole" if whole else "fsdp over" if shards == gpus else f"hsdp, {gpus // shards} copies, over"
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    beside = f", {trained / 1e6:.1f}M of them adapters beside a base in {base}" if adapters else ""
    print(f"{model.num_params() / 1e9:.2f}B parameters{beside}; {batch_size} x {config.block_size} tokens per step, on "
          f"{gpus} x {gpu} ({spec.memory / 1e9:.0f} GB, {reserve:.0%} kept free), {how}{'' if whole else f' {shards}'}"
          f"{f', {P} to a window' if P > 1 else ''}")

    found = {}
    for mode in tqdm(("none", "selective", "full"), desc="tracing", leave=False):
        if whole:
            peak, traffic = planner(config, on_one, mode, adapters, base, P, state_dtype)
        else:
            peak, traffic = planner(config, sharded, mode, gpus, shards, P, state_dtype)
        divisors = [n for n in range(1, most + 1) if most % n == 0]
        rows = max((n for n in divisors if sum(peak(n).values()) <= room), default=0)
        found[mode] = rows, peak(rows or 1), traffic
    print_memory(found, room, config)
    best = print_speed(found, shards, spec, config, model.flops_per_token(config.block_size), bool(adapters))
    lines = advice_for_one(config, found, best, room) if whole else advice(
        model.num_params(), found, best, shards, spec.per_node, most, room)
    for line in lines:
        print(line)
    if picture:
        draw(found, room, spec.memory, picture)
        print(f"the picture: {picture}")


def print_memory(found, room, config):
    """The table of memory. found: {mode of recomputation: (windows that fit, {kind: bytes}, traffic)}."""
    kinds_seen = [kind for kind in KINDS if any(kinds[kind] for _, kinds, _ in found.values())]
    print("\nGB on each GPU at the moment of the peak, with the largest micro-batch that fits\n")
    heads = "".join(f"{kind:>12}" for kind in kinds_seen)
    print(f"{'recompute':12}{'micro':>6}{heads}{'total':>9}  of {gb(room)}")
    for mode, (rows, kinds, _) in found.items():
        sizes = "".join(f"{gb(kinds[kind]):>12}" for kind in kinds_seen)
        fits = "fits" if rows else "does NOT fit"
        print(f"{mode:12}{rows or 1:6}{sizes}{gb(sum(kinds.values())):>9}  {fits}")
    chunk = chunk_rows(config.vocab_size, "cuda") * config.vocab_size * 4
    print(f"\nlogits: a chunk of {gb(chunk)} GB (in the peak if it is there), where all of them would be "
          f"{gb(config.block_size * config.vocab_size * 4)} GB a window")


def print_speed(found, shards, spec, config, flops, frozen):
    """
    The table of times. spec: the GPU; flops: FLOPs per token; frozen: only adapters are trained.

    Returns what advice() wants of the fastest mode that fits, or None: (mode, tokens per second, windows, whether the
    links are slower than compute, the tokens per GPU from which on they are not, and those between nodes).
    """
    inside, between = node_gbs or spec.node_gbs, net_gbs or spec.net_gbs
    links_are = f", {inside:.0f} GB/s inside a node and {between:.0f} between" if shards > 1 else ""
    print(f"\nper micro-batch and GPU, at {mfu:.0%} MFU{links_are}\n")
    print(f"{'recompute':12}{'tokens':>8}{'compute':>10}{'traffic':>10}{'links':>9}    {'bound by':10}"
          f"{'tok/s/GPU':>10}{'tok/s':>12}{'MFU':>7}{'days':>9}")
    best = None
    # The length of a fine-tuning is that of its conversations, which a plan does not read.
    run_tokens = 0 if max_length else total_samples * config.block_size
    for mode, (rows, kinds, traffic) in found.items():
        tokens = (rows or 1) * config.block_size / sequence_parallel
        computed = spec.flops * mfu / (flops * recompute_cost(config, mode, frozen))        # tokens per second
        traffic = traffic | dict(exchange=traffic.get("exchange", 0) * (rows or 1))
        compute = tokens / computed
        compute += seconds_of(traffic, sequence_parallel, spec.per_node, inside, between, ["exchange"])
        links = seconds_of(traffic, shards, spec.per_node, inside, between)
        speed = gpus * tokens / max(compute, links)
        days = f"{run_tokens / speed / 86400:9,.1f}" if run_tokens else f"{'-':>9}"
        print(f"{mode:12}{tokens:8,.0f}{compute:9.2f}s{gb(sum(traffic.values())):>8}GB{links:8.2f}s    "
              f"{'links' if links > compute else 'compute':10}{speed / gpus:10,.0f}{speed:12,.0f}"
              f"{flops * speed / gpus / spec.flops:7.1%}{days}{'' if rows else '   (if it fitted)'}")
        if rows and (best is None or speed > best[1]):
            across = seconds_of(traffic, shards, 0, inside, between)
            best = mode, speed, rows, links > compute, links * computed, across * computed
    if run_tokens:
        masked = 6 * config.n_layer * config.n_head * config.head_dim * config.block_size
        print(f"\n{run_tokens / 1e12:.2f}T tokens are {flops * run_tokens:.3g} FLOPs, "
              f"{(flops + masked) * run_tokens:.3g} as the report counts (the pairs that the causal mask hides "
              "included)")
    return best


def advice_for_one(config, found, best, room):
    """Yield a line: what to set, or what would fit where nothing does. best: of print_speed(); room: bytes of a GPU."""
    if best:
        mode, _, rows, *_ = best
        yield f"-> --recompute={mode} --micro_batch={rows}"
        return
    takes = min(sum(kinds.values()) for _, kinds, _ in found.values())
    what = "take a larger GPU, or shard the model over several"
    # Adapters are for a model that is trained already.
    for holding in ("bf16", "int8", "nf4") if init_from else ():
        peak, _ = planner(config, on_one, "full", lora.settings_of(16, 32, "all"), holding)
        needs = sum(peak(1).values())
        if needs <= room:
            what = f"--lora_r=16 --base={holding} --recompute=full --micro_batch=1 takes {gb(needs)}"
            break
    yield f"-> does not fit: it takes {gb(takes)} GB, and there are {gb(room)}: {what}"


def six_commands():
    """
    Yield (GPUs, flags, bytes at the peak on each). tests/test_dryrun.py holds them against what torch's allocator took.
    """
    eight, small = published("8b"), published("1b5")
    adapters = lora.settings_of(64, 32, "all")
    node = sharded, "none", 8, 8
    rows = (
        ("1 x 141", "8b.py 8b_one_gpu.py", 1, eight, on_one, "selective", None, "fp32", 1, "bfloat16"),
        ("8 x 141", "8b.py --parallel=fsdp", 4, eight, *node),
        ("8 x 80", "8b.py --parallel=fsdp --micro_batch=2", 2, eight, *node),
        ("8 x 141", "sft_8b.py --parallel=fsdp --pack --compile", 4, eight, *node),
        ("1 x 80", "1b5.py", 3, small, on_one, "none"),
        ("1 x 24", "continue_8b.py --lora_r=64 --base=bf16 --recompute=full", 1, eight, on_one, "full",
         adapters, "bf16"))
    for gpus, flags, windows, config, *args in rows:
        peak, _ = planner(config, *args)
        yield gpus, flags, sum(peak(windows).values())


def table_of_fits():
    """The lines of README's table: what six commands take of each GPU."""
    yield "GB at the peak  of GPUs    configs/"
    for gpus, flags, most in tqdm(six_commands(), total=6, desc="tracing", unit="command", leave=False):
        yield f"{gb(most):>14}  {gpus:9}  {flags}"


CARDS = (16, 24, 40, 80, 141)           # GB of the usual cards


def table_of_cards():
    """
    The lines of README's table: GB that fine-tuning a published model takes at the peak, and the card that has them.

    One window of 4,096 tokens, recompute=full. `reserve` of a card is kept free.
    """
    heads = "all weights", "LoRA on bf16", "int8", "NF4"
    yield "GB at the peak, of which card" + "".join(f"{head:>14}" for head in heads)
    adapters = lora.settings_of(16, 32, "all")
    ways = (None, "fp32"), (adapters, "bf16"), (adapters, "int8"), (adapters, "nf4")
    for name in ("8b", "70b"):
        config = dataclasses.replace(published(name), block_size=4096)
        line = f"{name.upper():29}"
        for trained, holding in ways:
            peak, _ = planner(config, on_one, "full", trained, holding)
            most = sum(peak(1).values())
            enough = [f" of {card}" for card in CARDS if most <= card * 1e9 * (1 - reserve)]
            line += f"{gb(most) + ''.join(enough[:1]):>14}"
        yield line


def table_of_windows():
    """
    The lines of README's table: the fewest GPUs, in nodes of 8, that hold a published model in shards and windows of 8k
    to 64k; with the least recomputation that fits there, and then the fewest GPUs to a window.
    """
    lengths = [8192, 16384, 32768, 65536]
    yield "GPUs / P to a window" + "".join(f"{T // 1024:>17}k" for T in lengths)
    bar = tqdm(total=4 * len(lengths), desc="tracing", unit="cell", leave=False)
    for name in ("8b", "70b"):
        config = published(name)
        held = 20 * shapes_of(config).num_params()
        takes = bytes_of_windows(config)
        for card in (80, 141):
            line = f"{name.upper():4}{card:4} GB each    "
            for T in lengths:
                line += f"{fewest(takes, held, T, card * 1e9 * (1 - reserve)):>18}"
                bar.update()
            yield line
    bar.close()


def bytes_of_windows(config):
    """
    takes(T, P, mode, gpus): bytes on each of so many GPUs at the peak, P of which share a window of T tokens.

    Traced on 8: weights, gradients and states divide by the GPUs, and the rest depends on T/P.
    """
    @functools.cache
    def traced(tokens, P, mode):
        window = dataclasses.replace(config, block_size=tokens * P)
        peak, _ = planner(window, sharded, mode, 8, 8, P)
        return peak(1)

    def takes(T, P, mode, gpus):
        kinds = traced(T // P, min(P, 2), mode)
        held = sum(kinds[kind] for kind in ("weights", "gradients", "states"))
        return sum(kinds.values()) - held + held * 8 / gpus
    return takes


def fewest(takes, held, T, room):
    """A cell of the table. takes: of bytes_of_windows(); held: bytes that the GPUs share; room: bytes of each."""
    enough = (8 * 2**n for n in range(10) if held / (8 * 2**n) < room)
    for gpus, mode, P in itertools.product(enough, ("none", "selective", "full"), (1, 2, 4, 8)):
        if takes(T, P, mode, gpus) <= room:
            return f"{gpus} / {P} {mode}"
    return "-"


def advice(parameters, found, best, shards, node, most, room):
    """
    Yield lines: what to set, and what to change if it does not fit or waits for its links.

    best: of print_speed(). node: GPUs of a node. most: windows of a step per GPU. room: bytes of a GPU.
    """
    if best is None:
        short = min(sum(kinds.values()) for _, kinds, _ in found.values()) - room
        held = (16 if state_dtype == "bfloat16" else 20) * parameters / shards
        more = f"Take more GPUs (--gpus={2 * gpus}) or larger ones"
        if parallel == "hsdp":
            more = f"Shard wider: --hsdp_shard={2 * shards}, or --parallel=fsdp"
        if held <= room:
            wider = 2 * sequence_parallel
            more += f", windows over {wider} GPUs (--sequence_parallel={wider})"
            if n_kv_head % wider:
                more += f", which {n_kv_head} kv heads do not allow: context parallelism (torchtitan) does"
            more += ", or a shorter --block_size"
        yield f"-> does not fit, by {gb(short)} GB: weights, gradients and states take {gb(held)} GB. {more}"
        return
    mode, _, rows, bound, needed, needed_across = best
    pure = shards == gpus
    yield (f"-> --parallel={'fsdp' if pure else 'hsdp'} --recompute={mode} --micro_batch={rows}, "
           f"{most // rows} of them accumulate")
    if bound:
        why = "More do not fit"
        if rows == most:
            why = f"The batch has no more for each GPU (--batch_size={batch_size})"
        instead = f", --parallel=hsdp --hsdp_shard={node} if that fits" if pure and gpus > node else ""
        yield (f"-> communication-bound: compute hides the links from {needed:,.0f} tokens per GPU and micro-batch on, "
               f"and here there are {rows * block_size // sequence_parallel:,}. {why}, so "
               f"{'pure FSDP' if pure else 'sharding alone'} stops making sense at this size: fewer GPUs{instead}, or "
               "tensor and pipeline parallelism, which are left to github.com/pytorch/torchtitan "
               "(Apertus: TP 4, PP 8 at 4,096 GPUs)")
    elif pure:
        windows = math.ceil(needed_across * sequence_parallel / block_size)
        widest = max(gpus, batch_size * sequence_parallel // windows)
        yield (f"-> pure FSDP makes sense up to {widest:,} GPUs at this batch: between nodes "
               f"compute hides the links from {needed_across:,.0f} tokens per GPU and micro-batch on, "
               f"{windows} windows. Beyond, tensor and pipeline parallelism: github.com/pytorch/torchtitan")


def draw(found, room, memory, path):
    """Bars of the memory on each GPU by recomputation and kind; lines: what fits, and what the GPU has."""
    figure, axis = pyplot().subplots(figsize=(9, 2.6), layout="constrained")
    names = [f"{mode}, micro-batch {rows or 1}" for mode, (rows, _, _) in found.items()]
    left = np.zeros(len(names))
    seen = [kind for kind in KINDS if any(kinds[kind] for _, kinds, _ in found.values())]
    for kind in seen:
        sizes = np.array([kinds[kind] for _, kinds, _ in found.values()]) / 1e9
        axis.barh(names, sizes, left=left, label=kind)
        left += sizes
    axis.axvline(room / 1e9, color="black", linewidth=1)
    axis.axvline(memory / 1e9, color="black", linewidth=1, linestyle=":")
    axis.invert_yaxis()
    axis.set_xlabel(f"GB on each of {gpus} x {gpu}; line: what fits")
    axis.legend(
        fontsize=8,
        frameon=False,
        ncols=len(seen),
        loc="lower center",
        bbox_to_anchor=(0.5, 1))
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    finish(figure, path)


if __name__ == "__main__":
    run(main, globals())
