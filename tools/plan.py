"""
Does it fit, and how long does it take? Pretraining on thousands of GPUs or fine-tuning on one, planned without any.

    memory     of a GPU: the sum of engine/memory.py, by which a run is checked before it starts
    compute    of a micro-batch: FLOPs per token * tokens / (peak * MFU)
    links      a micro-batch gathers all weights twice in bf16 and reduces all gradients once in fp32: 8 bytes per
               parameter, whatever its size
    windows    over P GPUs (--sequence_parallel): activations divide by P; four all-to-alls per block and direction add
               their time to the compute, since nothing runs meanwhile

So tokens per GPU and micro-batch decide whether compute hides the links, and memory decides how many tokens there may
be. NCCL's rings let the GPUs of a node share their links: if nccl-tests measures more, set --net_gbs to that.
A run that does not fit exits with code 2 and names flags with which it does. The row `shards` is how many GPUs share a
copy of the weights, as a run chooses it; `fits` is the largest micro-batch, 0 if none fits; compute_s and links_s are
seconds of a micro-batch.

$ python -m tools.plan configs/70b.py --gpus=512 --gpu=h100
$ python -m tools.plan configs/70b.py --gpus=4096 --batch_size=4096 --gpu=gh200 --parallel=hsdp --hsdp_shard=64
$ python -m tools.plan configs/sft_8b.py --gpus=1 --gpu=4090 --lora_r=16 --base=nf4
$ python -m tools.plan --cards          # the table of cards of docs/posttraining.md
$ python -m tools.plan --long           # the table of how many GPUs hold windows of 8k to 64k
$ python -m tools.plan --fits           # the table of the memory that six commands take
"""

import sys

if __name__ == "__main__" and not __package__:
    print("plan.py: start it from the project's root, python -m tools.plan", file=sys.stderr)
    sys.exit(2)

import contextlib
import itertools

import convert
import train
from configurator import config_file, configure, read_config, run, settings
from engine.gpus import GPUS
from engine.memory import MODES, gb, of_step, trained, ways_of
from engine.parallel import check_split
from model import ApertusConfig
from posttrain import attach, qrpo, sft
from posttrain.start import adapters_of, check_base, shapes_of

# A plan has all settings of the run, those of train.py, posttrain/sft.py and posttrain/qrpo.py, and these.
globals().update(settings(vars(qrpo), vars(sft), vars(attach), vars(train), train.shape))
gpus = 8                   # number of GPUs
gpu = "h100"               # a100 | h100 | h100-pcie | h100-nvl | h200 | gh200 | b200 | l40s | 4090 (last two: 1 GPU)
mfu = 0.40                 # share of the peak that a GPU reaches, waits and recomputation aside (Apertus: 0.32 - 0.34)
node_gbs = 0.0             # GB/s per GPU, inside a node; 0 = the table's
net_gbs = 0.0              # GB/s per GPU, between nodes; 0 = the table's
cards = False              # print which models can be fine-tuned on which card, and stop
fits = False               # print the table of six commands and the memory that each takes, and stop
long = False               # print the table of the fewest GPUs for windows of 8k to 64k, and stop

DEFAULTS = settings(globals())


# -----------------------------------------------------------------------------
# the run


def shape():
    """The ApertusConfig of the run: that of the start model (--init_from), if any, with the window that is trained."""
    if not init_from:
        return ApertusConfig.from_settings(globals() | dict(vocab_size=vocab_size or 131072))
    # The published models have the shapes of these configs: a plan needs no network.
    known = [size for size in ("8b", "70b") if init_from.startswith(f"swiss-ai/Apertus-{size.upper()}-")]
    start = ApertusConfig.from_settings(read_config(config_file(known[0]))) if known else convert.shape_of(init_from)
    window = block_size if "block_size" in _asked else start.block_size
    start.block_size = max_length or window
    return start


def build(command=None):
    """The model of the run, on the meta device. command: words behind the script's name, to plan that run instead."""
    if command:
        globals().update(DEFAULTS)
        configure(globals(), command.split())
    return shapes_of(shape(), adapters_of(globals()), base)


def shares():
    """The least and most GPUs that share one copy of the weights, as in a run. ValueError: an unknown --parallel."""
    if parallel not in train.KINDS["parallel"].split(", "):
        raise ValueError(f"parallel={parallel!r}: there is {train.KINDS['parallel']}")
    if gpus == 1 or parallel == "ddp":
        return 1, 1
    if parallel == "fsdp":
        return gpus, gpus
    return hsdp_shard or min(gpus, GPUS[gpu].per_node), hsdp_shard or gpus


def check():
    """ValueError, one line, for a run that cannot be planned."""
    if gpu not in GPUS:
        raise ValueError(f"gpu={gpu!r}: there is {', '.join(GPUS)}")
    if gpus > 1 and not GPUS[gpu].node_gbs:
        raise ValueError(f"gpu={gpu} has no link to others: take --gpus=1, or --gpu=h100")
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu={mfu}: want a share of the peak, between 0 and 1")
    config, P = shape(), sequence_parallel
    check_split("sequence_parallel", P, gpus=gpus, n_kv_head=config.n_kv_head, block_size=config.block_size)
    check_split("gpus/sequence_parallel", gpus // P, batch_size=batch_size)
    check_split("hsdp_shard", shares()[0], gpus=gpus)
    check_base(base, adapters_of(globals()))
    if lora_r and shares()[0] > 1:
        raise ValueError(f"gpus={gpus} parallel={parallel}: adapters are planned for GPUs that hold the base whole: "
                         "take --gpus=1 or --parallel=ddp")


# -----------------------------------------------------------------------------
# the plan


def peak(model, shards=0, **flags):
    """
    {kind: bytes} and their total on each GPU at the peak of a step in bf16. shards: GPUs that share a copy, 0 = the
    least of shares(); flags: settings to change before.
    """
    globals().update(flags)
    return of_step(model, globals(), model.config.block_size // sequence_parallel, shards=shards or shares()[0])


def seconds_of(size, sharing):
    """Seconds that collectives of `size` bytes take among the GPUs that share them, if nothing else uses the links."""
    spec = GPUS[gpu]
    speed = (node_gbs or spec.node_gbs) if sharing <= spec.per_node else (net_gbs or spec.net_gbs)
    return size * (sharing - 1) / sharing / (speed * 1e9) if sharing > 1 else 0.0


def flops_of(model):
    """FLOPs per token of a step, recomputation included: full runs all blocks again, selective their matrix `up`."""
    c = model.config
    step = model.flops_per_token(c.block_size)
    # A step costs three forward passes through the matrices, or two if they are frozen.
    passes = 3 if model.lm_head.weight.requires_grad else 2
    forward = model.flops_per_token(0) / passes
    again = dict(
        selective=2 * c.n_layer * c.n_embd * c.ffn_width,
        full=forward - 2 * c.n_embd * c.vocab_size)
    return step * (1 + again.get(recompute, 0) / (passes * forward))


def plan_of(model, mode):
    """
    The plan with this mode of recomputation, {what: number}: GB of a GPU by kind; GPUs that share a copy of the
    weights; the largest micro-batch that fits, 0 if none does, and its tokens; seconds of compute and of links;
    tokens/s of all GPUs, and days of the run.
    """
    spec, c, window = GPUS[gpu], model.config, model.config.block_size
    ways = ways_of(*shares(), batch_size * sequence_parallel // gpus)
    sizes = {way: peak(model, way[0], recompute=mode, micro_batch=way[1]) for way in ways}
    fitting = [way for way in ways if sizes[way]["total"] <= spec.memory]
    way = shards, rows = (fitting or ways[-1:])[0]
    tokens = rows * window // sequence_parallel
    # GPUs that share a window exchange q, k, v and the result in bf16, forward and backward; with full recomputation
    # forward twice.
    exchanged = (3 if mode == "full" else 2) * c.n_layer * tokens * 4 * (c.n_head + c.n_kv_head) * c.head_dim
    compute = tokens * flops_of(model) / (spec.flops * mfu) + seconds_of(exchanged, sequence_parallel)
    links = seconds_of(8 * model.num_params(), shards)
    speed = gpus * tokens / max(compute, links)
    found = {kind: size / 1e9 for kind, size in sizes[way].items()} | dict(shards=shards, fits=rows * bool(fitting),
        tokens=tokens, compute_s=compute, links_s=links, tokens_per_s=speed)
    # The length of fine-tuning depends on its conversations, which a plan does not read.
    return found if max_length else found | dict(days=total_samples * window / speed / 86400)


def flags_that_fit():
    """The first flags with which the run fits by its own plan: more GPUs, adapters, another GPU, both."""
    before = settings(globals())
    changes = [dict(gpus=gpus * 2**n, parallel="fsdp") for n in range(11)]
    adapters = [dict(lora_r=16, base=base) for base in ("bf16", "int8", "nf4") if init_from]
    changes += adapters + [dict(gpu=gpu) for gpu in GPUS]
    changes += [dict(gpu=gpu) | change for gpu in GPUS for change in adapters]
    for change in changes:
        globals().update(before | change)
        with contextlib.suppress(ValueError):
            check()
            if plan_of(build(), "full")["fits"]:
                return " ".join(f"--{name}={value}" for name, value in change.items())
    return "a shorter window"


def main():
    for asked, table in ((cards, table_of_cards), (fits, table_of_fits), (long, table_of_windows)):
        if asked:
            return print(*table(), sep="\n")
    check()
    model = build()
    print(f"{model.num_params() / 1e9:.2f}B parameters, {trained(model) / 1e6:,.1f}M of them trained, "
          f"{model.config.vocab_size:,} ids{f', adapters on a base in {base}' if lora_r else ''}; "
          f"{batch_size} x {model.config.block_size} tokens per step, on {gpus} x {gpu} of {gb(GPUS[gpu].memory)} GB, "
          f"{sequence_parallel} to a window; at {mfu:.0%} of the peak\n")
    plans = {mode: plan_of(model, mode) for mode in MODES}
    print(f"{'GB, recompute':14}" + "".join(f"{mode:>14}" for mode in MODES))
    for what in plans["none"]:
        print(f"{what:14}" + "".join(f"{plan[what]:14,.2f}" for plan in plans.values()))

    fitting = [mode for mode in MODES if plans[mode]["fits"]]
    if not fitting:
        raise ValueError(f"does not fit: it takes {plans['full']['total']:.1f} GB, and there are "
                         f"{gb(GPUS[gpu].memory)}: take {flags_that_fit()}")
    mode = max(fitting, key=lambda mode: plans[mode]["tokens_per_s"])
    best = plans[mode]
    print(f"\n-> --parallel={parallel} --recompute={mode} --micro_batch={best['fits']}")
    if best["links_s"] > best["compute_s"]:
        print("-> communication-bound: the links take longer than the compute that hides them. Take --parallel=hsdp "
              "where a node holds the model, else tensor and pipeline parallelism (github.com/pytorch/torchtitan; "
              "Apertus: TP 4, PP 8 at 4,096 GPUs)")


# -----------------------------------------------------------------------------
# the tables of docs/scale.md and docs/posttraining.md, a line at a time


def table_of_fits():
    """The memory that six commands take of each GPU."""
    yield "GB at the peak  configs/"
    for command in (
            "8b.py 8b_one_gpu.py --gpus=1 --gpu=h200",
            "8b.py --parallel=fsdp --gpus=8 --gpu=h200",
            "8b.py --parallel=fsdp --micro_batch=2 --gpus=8 --gpu=h100",
            "sft_8b.py --parallel=fsdp --pack --compile --gpus=8 --gpu=h200",
            "1b5.py --gpus=1 --gpu=h100",
            "continue_8b.py --lora_r=64 --base=bf16 --recompute=full --gpus=1 --gpu=4090"):
        yield f"{gb(peak(build(command))['total']):>14}  {command}"


def table_of_cards():
    """
    GB that fine-tuning a published model takes at the peak, and the smallest card that has them: one window of 4,096
    tokens, recompute=full.
    """
    yield "GB at the peak, of which card   all weights  LoRA on bf16          int8           NF4"
    for name in ("8b", "70b"):
        line = f"{name.upper():29}"
        for held in ("", "--lora_r=16 --base=bf16", "--lora_r=16 --base=int8", "--lora_r=16 --base=nf4"):
            model = build(f"sft_{name} --gpus=1 --micro_batch=1 --recompute=full {held}")
            size = peak(model)["total"]
            card = next((f" of {card}" for card in (16, 24, 40, 80, 141) if size <= card * 1e9), "")
            line += f"{gb(size) + card:>14}"
        yield line


def table_of_windows():
    """
    The fewest GPUs, in nodes of 8, that hold a published model in shards and windows of 8k to 64k; with the least
    recomputation that fits there, and then the fewest GPUs to a window.
    """
    yield "GPUs / P to a window                8k               16k               32k               64k"
    for name, card, gpu in (("8b", 80, "h100"), ("8b", 141, "h200"), ("70b", 80, "h100"), ("70b", 141, "h200")):
        model = build(f"{name} --micro_batch=1 --parallel=fsdp")
        line = f"{name.upper():4}{card:4} GB each    "
        for model.config.block_size in (8192, 16384, 32768, 65536):
            ways = itertools.product((8 * 2**n for n in range(10)), MODES, (1, 2, 4, 8))
            fitting = (f"{n} / {P} {mode}" for n, mode, P in ways
                       if peak(model, gpus=n, recompute=mode, sequence_parallel=P)["total"] <= GPUS[gpu].memory)
            line += f"{next(fitting):>18}"
        yield line


if __name__ == "__main__":
    run(main, globals())
