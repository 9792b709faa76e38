"""
Does it fit, and how long does it take? Pretraining on thousands of GPUs or fine-tuning on one, planned without any.

    memory     of a GPU: the sum of engine/memory.py, by which a run is checked before it starts
    compute    of a micro-batch: FLOPs per token * tokens / (peak * MFU)
    links      a micro-batch gathers all weights twice in bf16 and reduces all gradients once in fp32: 8 bytes per
               parameter, whatever its size. The compute hides them, but for the embedding's, the first and the last
    copies     a micro-batch also moves bytes in the GPU's memory: 14 per trained parameter in shards (out of the
               gathered buffers, 4 twice; gradients into the reduced ones, 6), 24 in a whole one (cast to bf16, 6;
               gradients to fp32, 6, and added, 12); and the recomputed activations are written once more
    windows    over P GPUs (--sequence_parallel): activations divide by P; four all-to-alls per block and direction add
               their time to the compute, since nothing runs meanwhile

So a micro-batch of more tokens spends less on links and copies, and memory decides how many there may be: to recompute
cheap activations and hold twice the tokens may be faster. NCCL's rings let the GPUs of a node share their links: if
nccl-tests measures more, set --net_gbs to that.
A plan is a table with a column for each --recompute, and the flags of the fastest that fits. A run that does not fit
exits with code 2 and names flags with which it does.

$ python -m tools.plan configs/70b.py --gpus=512 --gpu=h100
$ python -m tools.plan configs/70b.py --gpus=4096 --batch_size=4096 --gpu=gh200 --parallel=hsdp --hsdp_shard=64
$ python -m tools.plan configs/3b.py --gpus=4 --gpu=4090
$ python -m tools.plan configs/sft_8b.py --gpus=1 --gpu=4090 --lora_r=16 --base=nf4
$ python -m tools.plan --cards          # the table of cards of docs/posttraining.md
$ python -m tools.plan --long           # the table of how many GPUs hold windows of 8k to 64k
$ python -m tools.plan --fits           # the table of the memory that six commands take
"""

import sys

if __name__ == "__main__" and not __package__:
    print("plan.py: start it from the project's root, python -m tools.plan", file=sys.stderr)
    sys.exit(2)

import itertools

import convert
import train
from configurator import config_file, configure, read_config, run as run_script, settings
from engine.checks import CHOICES
from engine.hardware import GPUS
from engine.memory import MODES, count_trained, format_gb, list_layouts, step_memory
from engine.parallel import Ranks, check_split
from model import ApertusConfig
from posttrain import qrpo, sft
from posttrain.start import check_base

gpus = 8                   # number of GPUs
gpu = "h100"               # a100 | h100 | h100-pcie | h100-nvl | h200 | gh200 | b200 | l40s | 4090 (last two: one node)
mfu = 0.40                 # share of the peak that a GPU reaches, waits and recomputation aside (Apertus: 0.32 - 0.34)
node_gbs = 0.0             # GB/s per GPU, inside a node; 0 = that of engine/hardware.py
net_gbs = 0.0              # GB/s per GPU, between nodes; 0 = that of engine/hardware.py
cards = False              # print which models can be fine-tuned on which card, and stop
fits = False               # print the table of six commands and the memory that each takes, and stop
long = False               # print the table of the fewest GPUs for windows of 8k to 64k, and stop


def copy_settings(*scripts):
    """The globals of scripts, copied, each setting only under the first of them that has it."""
    known, copies = set(), []
    for script in scripts:
        copies.append({name: value for name, value in vars(script).items() if name not in known})
        known |= settings(copies[-1]).keys()
    return copies


# A plan has all settings of train.py, posttrain/sft.py and posttrain/qrpo.py as well. Functions below get the settings
# of the run that they plan as `run`, a dict.
OF_RUN = [ApertusConfig(**vars(train.shape)), *copy_settings(train, sft, qrpo)]
DEFAULTS = settings(globals(), *OF_RUN)
# {key of plan_run(): its row in the table, with the unit}
ROWS = dict(
    weights="weights, GB of a GPU",
    gradients="gradients, GB",
    states="optimizer states, GB",
    activations="activations, GB",
    temporary="loss or one block, GB",
    beyond="CUDA and gaps, GB",
    total="total, GB",
    shards="GPUs that share the weights",
    fits="windows in memory at once",
    tokens="their tokens on a GPU",
    compute_s="their compute, seconds",
    links_s="their links, seconds",
    copies_s="their copies, seconds",
    tokens_per_s="tokens/s of all GPUs",
    days="the whole run")


# -----------------------------------------------------------------------------
# the run


def read_command(command):
    """(settings, ApertusConfig) of a run, from words behind the name of its script, such as "8b --gpus=64"."""
    run = dict(DEFAULTS)
    set_by_user = configure([run], command.split())
    return run, shape_of(run, set_by_user)


def shape_of(run, set_by_user):
    """
    The ApertusConfig of a run, with the window that it trains: that of its start model (--init_from), if any.

    set_by_user: names of settings; the window is the start model's unless it is among them.
    """
    name = run["init_from"]
    if not name:
        return ApertusConfig.from_settings(run | dict(vocab_size=run["vocab_size"] or 131072))
    # The published models have the shapes of these configs: a plan needs no network.
    published = [size for size in ("8b", "70b") if name.startswith(f"swiss-ai/Apertus-{size.upper()}-")]
    if published:
        config = ApertusConfig.from_settings(read_config(config_file(published[0])))
    else:
        config = convert.shape_of(name)
    window = run["block_size"] if "block_size" in set_by_user else config.block_size
    config.block_size = run["max_length"] or window
    return config


def build_model(run, config):
    """The model of a run, on the meta device."""
    return train.build_model(config, run, Ranks(), "meta")


def count_shards(run):
    """The least and most GPUs that share one copy of the weights, as in a run."""
    if run["gpus"] == 1 or run["parallel"] == "ddp":
        return 1, 1
    if run["parallel"] == "fsdp":
        return run["gpus"], run["gpus"]
    return run["hsdp_shard"] or min(run["gpus"], GPUS[run["gpu"]].per_node), run["hsdp_shard"] or run["gpus"]


def check(run, config):
    """ValueError, one line, for a run that cannot be planned."""
    gpu, gpus, P = run["gpu"], run["gpus"], run["sequence_parallel"]
    if gpu not in GPUS:
        raise ValueError(f"gpu={gpu!r}: there is {', '.join(GPUS)}")
    if gpus > GPUS[gpu].per_node and not (run["net_gbs"] or GPUS[gpu].net_gbs):
        raise ValueError(f"gpus={gpus}: a node has {GPUS[gpu].per_node} of {gpu}, and no network is usual between such "
                         f"nodes: name its GB/s for each GPU with --net_gbs, or take --gpus={GPUS[gpu].per_node}")
    if not 0 < run["mfu"] <= 1:
        raise ValueError(f"mfu={run['mfu']}: want a share of the peak, between 0 and 1")
    if run["parallel"] not in CHOICES["parallel"]:
        raise ValueError(f"parallel={run['parallel']!r}: there is {', '.join(CHOICES['parallel'])}")
    check_split("sequence_parallel", P, gpus=gpus, n_kv_head=config.n_kv_head, block_size=config.block_size)
    check_split("gpus/sequence_parallel", gpus // P, batch_size=run["batch_size"])
    check_split("hsdp_shard", count_shards(run)[0], gpus=gpus)
    check_base(run)
    if run["lora_r"] and count_shards(run)[0] > 1:
        raise ValueError(f"gpus={gpus} parallel={run['parallel']}: adapters are planned for GPUs that hold the base "
                         "whole: take --gpus=1 or --parallel=ddp")


# -----------------------------------------------------------------------------
# the plan


def peak_memory(run, model, shards=0):
    """
    {part: bytes} and their total on each GPU at the peak of a step in bf16. shards: GPUs that share a copy of the
    weights, 0 = the least of count_shards().
    """
    tokens = model.config.block_size // run["sequence_parallel"]
    return step_memory(model, run, tokens, shards=shards or count_shards(run)[0])


def link_seconds(run, size, n):
    """Seconds that collectives of `size` bytes take among n GPUs, if nothing else uses the links."""
    if n == 1:
        return 0.0
    gpu = GPUS[run["gpu"]]
    speed = (run["node_gbs"] or gpu.node_gbs) if n <= gpu.per_node else (run["net_gbs"] or gpu.net_gbs)
    return size * (n - 1) / n / (speed * 1e9)


def copy_seconds(run, model, shards, recomputed):
    """Seconds of a micro-batch's copies in the GPU's memory. recomputed: bytes of activations."""
    per_parameter = 14 if shards > 1 else 24
    return (per_parameter * count_trained(model) + recomputed) / (GPUS[run["gpu"]].memory_gbs * 1e9)


def flops_per_token(model, recompute):
    """FLOPs per token of a step, recomputation included: full runs all blocks again, selective `up` and `gate`."""
    c = model.config
    step = model.flops_per_token(c.block_size)
    # A step costs three forward passes through the matrices, or two if they are frozen.
    passes = 3 if model.lm_head.weight.requires_grad else 2
    forward = model.flops_per_token(0) / passes
    recomputed = dict(
        none=0,
        cheap=0,
        selective=2 * c.n_layer * c.n_embd * c.ffn_width * (2 if c.activation == "swiglu" else 1),
        full=forward - 2 * c.n_embd * c.vocab_size)
    return step * (1 + recomputed[recompute] / (passes * forward))


def plan_run(run, model, recompute):
    """
    The plan of a run with this mode of recomputation, {row: number}: GB of a GPU by part; GPUs that share a copy of the
    weights; the largest micro-batch that fits, 0 if none does, and its tokens; seconds of compute, links and copies;
    tokens/s of all GPUs, and days of the run.
    """
    gpu, gpus, P = GPUS[run["gpu"]], run["gpus"], run["sequence_parallel"]
    c, window = model.config, model.config.block_size
    layouts = list_layouts(*count_shards(run), run["batch_size"] * P // gpus)
    memory = {(shards, n): peak_memory(run | dict(recompute=recompute, micro_batch=n), model, shards)
              for shards, n in layouts}
    fitting = [layout for layout in layouts if memory[layout]["total"] <= gpu.memory]
    layout = shards, micro_batch = fitting[0] if fitting else layouts[-1]
    tokens = micro_batch * window // P
    # GPUs that share a window exchange q, k, v and the result in bf16, forward and backward; with full recomputation
    # forward twice.
    passes = 3 if recompute == "full" else 2
    exchanged = passes * c.n_layer * tokens * 4 * (c.n_head + c.n_kv_head) * c.head_dim
    compute = tokens * flops_per_token(model, recompute) / (gpu.flops * run["mfu"]) + link_seconds(run, exchanged, P)
    links = link_seconds(run, 8 * model.num_params(), shards)
    kept = peak_memory(run | dict(recompute="none", micro_batch=micro_batch), model, shards)["activations"]
    copies = copy_seconds(run, model, shards, recomputed=kept - memory[layout]["activations"])
    exposed = link_seconds(run, 8 * model.model.embed_tokens.weight.numel(), shards)
    speed = gpus * tokens / (max(compute + copies, links - exposed) + exposed)
    plan = {part: size / 1e9 for part, size in memory[layout].items()}
    plan |= dict(shards=shards, fits=micro_batch if fitting else 0, tokens=tokens, compute_s=compute, links_s=links,
                 copies_s=copies, tokens_per_s=speed)
    # The length of fine-tuning depends on its conversations, which a plan does not read.
    return plan if run["max_length"] else plan | dict(days=run["total_samples"] * window / speed / 86400)


def can_fit(run, config):
    """Whether a run can be planned, and fits with full recomputation."""
    try:
        check(run, config)
    except ValueError:
        return False
    return plan_run(run, build_model(run, config), "full")["fits"] > 0


def flags_that_fit(run, config):
    """
    The first flags with which the run fits by its own plan: more GPUs, adapters, another GPU, both. And, on the same
    GPUs, states in bf16, which come last because they change the optimizer.
    """
    adapters = [dict(lora_r=16, base=base) for base in ("bf16", "int8", "nf4") if run["init_from"]]
    cards = [dict(gpu=gpu) for gpu in GPUS]
    changes = [dict(gpus=run["gpus"] * 2**n, parallel="fsdp") for n in range(11)] + adapters + cards
    changes += [card | adapter for card in cards for adapter in adapters]
    choices = [next((change for change in changes if can_fit(run | change, config)), {})]
    smaller_states = dict(state_dtype="bfloat16")
    if run["optimizer"] == "ademamix" and can_fit(run | smaller_states, config):
        choices.append(smaller_states)
    texts = [" ".join(f"--{name}={value}" for name, value in choice.items()) for choice in choices if choice]
    return ", or ".join(texts) or "a shorter window"


def format_count(n):
    """A number of parameters for people: 8.05B, 0.64B, 16.84M."""
    unit, size = next((unit for unit in (("B", 1e9), ("M", 1e6)) if n >= unit[1] / 10), ("k", 1e3))
    return f"{n / size:.2f}{unit}"


def format_days(days):
    """A duration for people."""
    units = ("days", 1), ("hours", 24), ("minutes", 1440)
    unit, per_day = next((unit for unit in units if days * unit[1] >= 2), ("seconds", 86400))
    return f"{days * per_day:,.1f} {unit}"


def format_cell(key, plan):
    """A cell of the table. Of a plan that does not fit, the rows of memory have numbers."""
    value, fits = plan[key], plan["fits"]
    if key == "fits" and not fits:
        return "does not fit"
    if key in ("tokens", "compute_s", "links_s", "copies_s", "tokens_per_s", "days") and not fits:
        return "-"
    if key == "days":
        return format_days(value)
    if value >= 1000 or type(value) is int:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 0.01 or not value else f"{value:.1g}"


def describe_plan(run, config):
    """
    The lines of a plan: the run, a table with a column for each mode of recomputation, and the flags of the fastest.
    ValueError after the table if nothing fits.
    """
    check(run, config)
    model = build_model(run, config)
    gpu = GPUS[run["gpu"]]
    adapters = f", adapters on a base in {run['base']}" if run["lora_r"] else ""
    assumed = "" if run["vocab_size"] or run["init_from"] else " (Apertus'; else name --vocab_size)"
    yield (f"{format_count(model.num_params())} parameters, {format_count(count_trained(model))} of them trained, "
           f"{config.vocab_size:,} ids{assumed}{adapters}; {run['batch_size']:,} x {config.block_size:,} tokens "
           "per step")
    yield (f"{run['gpus']:,} x {run['gpu']} of {format_gb(gpu.memory)} GB, {run['sequence_parallel']} to a window; "
           f"at {run['mfu']:.0%} of the peak")
    plans = {mode: plan_run(run, model, mode) for mode in MODES}
    yield f"\n{'--recompute=':28}" + "".join(f"{mode:>15}" for mode in MODES)
    for key in plans["none"]:
        yield f"{ROWS[key]:28}" + "".join(f"{format_cell(key, plan):>15}" for plan in plans.values())

    fitting = [mode for mode in MODES if plans[mode]["fits"]]
    if not fitting:
        raise ValueError(f"does not fit: it takes {plans['full']['total']:.1f} GB, and there are "
                         f"{format_gb(gpu.memory)}: take {flags_that_fit(run, config)}")
    mode = max(fitting, key=lambda mode: plans[mode]["tokens_per_s"])
    best = plans[mode]
    yield f"\n-> --parallel={run['parallel']} --recompute={mode} --micro_batch={best['fits']}"
    if run["minutes"]:
        tokens = 60 * run["minutes"] * best["tokens_per_s"]
        steps = int(tokens // (run["batch_size"] * config.block_size))
        yield f"-> in {run['minutes']:,g} minutes: {steps:,} steps, {format_count(tokens)} tokens"
    if best["links_s"] > best["compute_s"]:
        yield ("-> communication-bound: the links take longer than the compute that hides them. Take --parallel=hsdp "
               "where a node holds the model, else tensor and pipeline parallelism (github.com/pytorch/torchtitan; "
               "Apertus: TP 4, PP 8 at 4,096 GPUs)")


# -----------------------------------------------------------------------------
# the tables of docs/scale.md and docs/posttraining.md, a line at a time


def table_of_fits():
    """The memory that six commands take of each GPU."""
    yield "GB at the peak  configs/"
    for command in (
            "8b.py --state_dtype=bfloat16 --recompute=selective --micro_batch=1 --gpus=1 --gpu=h200",
            "8b.py --parallel=fsdp --gpus=8 --gpu=h200",
            "8b.py --parallel=fsdp --recompute=cheap --gpus=8 --gpu=h100",
            "sft_8b.py --parallel=fsdp --pack --compile --gpus=8 --gpu=h200",
            "1b5.py --gpus=1 --gpu=h100",
            "continue_8b.py --lora_r=64 --base=bf16 --recompute=full --gpus=1 --gpu=4090"):
        run, config = read_command(command)
        memory = peak_memory(run, build_model(run, config))
        yield f"{format_gb(memory['total']):>14}  {command}"


def table_of_cards():
    """
    GB that fine-tuning a published model takes at the peak, and the smallest card that has them: one window of 4,096
    tokens, recompute=full.
    """
    yield "GB at the peak, of which card   all weights  LoRA on bf16          int8           NF4"
    for name in ("8B", "70B"):
        line = f"{name:29}"
        for adapters in ("", "--lora_r=16 --base=bf16", "--lora_r=16 --base=int8", "--lora_r=16 --base=nf4"):
            run, config = read_command(
                f"sft_8b --init_from=swiss-ai/Apertus-{name}-2509 --gpus=1 --micro_batch=1 --recompute=full {adapters}")
            size = peak_memory(run, build_model(run, config))["total"]
            card = next((f" of {card}" for card in (16, 24, 40, 80, 141) if size <= card * 1e9), "")
            line += f"{format_gb(size) + card:>14}"
        yield line


def table_of_windows():
    """
    The fewest GPUs, in nodes of 8, that hold a published model in shards and windows of 8k to 64k; with the least
    recomputation that fits there, and then the fewest GPUs to a window.
    """
    yield "GPUs / P to a window                8k               16k               32k               64k"
    for name, card, gpu in (("8b", 80, "h100"), ("8b", 141, "h200"), ("70b", 80, "h100"), ("70b", 141, "h200")):
        run, config = read_command(f"{name} --micro_batch=1 --parallel=fsdp")
        model = build_model(run, config)
        line = f"{name.upper():4}{card:4} GB each    "
        for window in (8192, 16384, 32768, 65536):
            ways = itertools.product((8 * 2**n for n in range(10)), MODES, (1, 2, 4, 8))
            fitting = (f"{gpus} / {P} {mode}" for gpus, mode, P in ways
                       if step_memory(model, run | dict(recompute=mode), window // P, shards=gpus)["total"]
                       <= GPUS[gpu].memory)
            line += f"{next(fitting):>18}"
        yield line


def main(set_by_user):
    run = settings(globals(), *OF_RUN)
    if cards:
        print(*table_of_cards(), sep="\n")
    elif fits:
        print(*table_of_fits(), sep="\n")
    elif long:
        print(*table_of_windows(), sep="\n")
    else:
        for line in describe_plan(run, shape_of(run, set_by_user)):
            print(line)


if __name__ == "__main__":
    run_script(main, globals(), *OF_RUN)
