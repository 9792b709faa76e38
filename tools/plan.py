"""
Does it fit, and how long does it take? A run on thousands of GPUs, planned on a laptop without any.

    memory     of a GPU: weights, gradients and three states (20 bytes per parameter / shards) + two gathered blocks
               + activations
    compute    of a micro-batch: FLOPs per token * tokens / (peak * MFU)
    links      a micro-batch gathers all weights twice in bf16 and reduces all gradients once in fp32: 8 bytes per
               parameter, whatever its size
    so         tokens per GPU and micro-batch decide whether compute hides the links, and memory decides how many
               tokens there may be

The memory is not a formula. The real model is sharded by the real engine/parallel.py, and one real forward and
backward pass runs under FakeTensor (shapes without data) and a fake process group of any size, while torch's
FSDPMemTracker keeps the books. tests/test_plan.py holds it against measured memory. What is assumed:

- Layers are alike, so 3 and 4 of them are traced and the rest follows on the line.
- Attention counts one document per window; xIELU and norms count as torch.compile fuses them.
- A GPU has its own links alone. NCCL's rings let the GPUs of a node share theirs: where nccl-tests measures more,
  --net_gbs of that is closer.

$ python -m tools.plan configs/70b.py --gpus=512 --gpu=h100
$ python -m tools.plan configs/70b.py --gpus=4096 --batch_size=4096 --gpu=gh200 --parallel=hsdp --hsdp_shard=64
$ python -m tools.plan configs/8b.py --gpus=8 --gpu=h200 --mfu=0.5
"""

import sys

if __name__ == "__main__" and not __package__:
    print("plan.py: start it from the project's root, python -m tools.plan", file=sys.stderr)
    sys.exit(2)

import collections
import contextlib
import dataclasses
import math
import os
import warnings
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

import train
from ademamix import AdEMAMix, param_groups
from configurator import run, settings
from engine.hardware import GPUS
from engine.parallel import nearest_divisors, recompute_activations, shard
from engine.plot import finish, pyplot
from model import XIELU, Apertus, ApertusConfig, RMSNorm, chunk_rows

# A plan is of a run: it has all settings of train.py (python train.py --help), and these.
globals().update(settings(vars(train)))
gpus = 8                   # how many
gpu = "h100"               # a100 | h100 | h200 | gh200 | b200
mfu = 0.40                 # share of the peak that a GPU reaches, waits and recomputation aside (Apertus: 0.30 - 0.34)
reserve = 0.08             # share of the memory that CUDA, NCCL and fragments take
node_gbs = 0.0             # GB/s per GPU, inside a node; 0 = the table's
net_gbs = 0.0              # GB/s per GPU, between nodes; 0 = the table's
picture = "out/plan.png"   # where it is drawn; "" = nowhere

# What FSDPMemTracker calls the kinds of memory that the table shows.
KINDS = {
    "weights": ("Sharded Param",),
    "gradients": ("Sharded Grad",),
    "states": ("OptState",),
    "gathered": ("Unsharded Param", "All Gather"),
    "reducing": ("Unsharded Grad", "Reduce Scatter"),
    "activations": ("Activation",),
    "temporary": ("Temp", "Inputs", "Buffer")}


# -----------------------------------------------------------------------------
# one micro-batch, traced without data


class StoresItsInput(torch.autograd.Function):
    """
    An elementwise layer as torch.compile's partitioner leaves it: backward needs the input only.

    Shapes matter here, values do not.
    """

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x, *weights)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors)


@contextlib.contextmanager
def fused_layers():
    """Within it xIELU and the norms store their input alone."""
    def xielu(self, x):
        return StoresItsInput.apply(x, self.alpha_p, self.alpha_n)

    def norm(self, x):
        return StoresItsInput.apply(x, self.weight)

    with mock.patch.object(XIELU, "forward", xielu), mock.patch.object(RMSNorm, "forward", norm):
        yield


class Traffic(TorchDispatchMode):
    """Bytes by collective: the output of an all-gather, the input of a reduce-scatter, an all-reduce once."""

    def __init__(self):
        super().__init__()
        self.bytes = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Three of five calls ask for the device. They are answered here, which makes a trace much faster.
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if "c10d" in func.namespace:
            leaves = torch.utils._pytree.tree_leaves(args)
            sizes = [x.nbytes for x in leaves if isinstance(x, torch.Tensor)]
            name = func._overloadpacket.__name__.strip("_")
            self.bytes[name] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def trace(config, ranks, shards, rows, mode, dtype=torch.bfloat16, fused=True):
    """
    One micro-batch of `rows` windows on rank 0 of `ranks`, of which `shards` share one copy of the weights.

    mode: of recomputation. Nothing is real but the shapes. At least two layers. Returns {where: {kind: bytes at its
    peak}}, where = forward as a whole, and the embedding, the first and the last two blocks, backward too; and
    {collective: bytes}.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        if shards < ranks:
            mesh = init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("copies", "shards"))
        else:
            mesh = init_device_mesh("cpu", (ranks,))
        with contextlib.ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            if fused:
                stack.enter_context(fused_layers())
            with torch.device("meta"):
                model = Apertus(config)
            model.dtype = dtype
            recompute_activations(model, mode)
            shard(model, mesh, dtype)
            model.to_empty(device="cpu")
            optimizer = AdEMAMix(param_groups(model), compile=False)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    optimizer._new_state(p, group)
                    p.grad = torch.zeros_like(p)           # of the micro-batches before
            idx = torch.zeros(rows, config.block_size, dtype=torch.long)
            tracker, traffic = FSDPMemTracker(model, optimizer), Traffic()
            tracker.track_inputs((idx,))
            with tracker, traffic:
                model(idx, idx, n_tokens=1)[1].backward()
    finally:
        dist.destroy_process_group()
    blocks = model.model.layers
    modules = dict(
        forward=model,
        embedding=model.model.embed_tokens,
        first=blocks[0],
        next=blocks[-2],
        last=blocks[-1])
    peaks = {}
    for where, module in modules.items():
        kinds = peak_in(tracker, module, where == "forward")
        if kinds:
            peaks[where] = kinds
    return peaks, traffic.bytes


def peak_in(tracker, module, forward_only):
    """{kind: bytes} when most memory was taken while a module ran; None if the tracker has not seen it run."""
    if module not in tracker.memory_tracking:
        return None
    states = ("PEAK_FW",) if forward_only else ("PEAK_FW", "PEAK_BW")
    snapshots = [
        next(iter(by_device.values()))
        for state, found in tracker.memory_tracking[module].snapshots.items() if state.name in states
        for by_device in found]
    if not snapshots:
        return None
    most = max(snapshots, key=lambda snapshot: snapshot["Total"])
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    kinds = dict.fromkeys(KINDS, 0)
    for name, size in most.items():
        name = getattr(name, "value", name)                                 # an enum's, or "Total"
        if name in kind_of:
            kinds[kind_of[name]] += size
    return kinds


def planner(config, ranks, shards, mode):
    """
    peak(rows) -> {kind: bytes} at the peak, and {collective: bytes}, from 3 and 4 layers with 1 and 2 windows each.

    What stands in memory while one block runs is a + b layers + c rows + d layers rows. Which block's is the peak
    depends on both, so each keeps its own plane.
    """
    few, more = min(3, config.n_layer), min(4, config.n_layer)
    traced = {}
    for n in {few, more}:
        shallow = dataclasses.replace(config, n_layer=n)
        for rows in (1, 2):
            traced[n, rows] = trace(shallow, ranks, shards, rows, mode)

    def in_depth(get):
        """get(layers) at config.n_layer, on the line through the traced depths."""
        per_layer = get(more) - get(few)
        return get(more) + per_layer * (config.n_layer - more)

    def at(where, kind, rows):
        one, two = (in_depth(lambda n: traced[n, r][0][where][kind]) for r in (1, 2))
        return one + (two - one) * (rows - 1)

    places, collectives = traced[few, 1]

    def peak(rows):
        peaks = [
            {kind: at(where, kind, rows) for kind in KINDS}
            for where in places]
        return max(peaks, key=lambda kinds: sum(kinds.values()))

    traffic = {name: in_depth(lambda n: traced[n, 1][1][name]) for name in collectives}
    return peak, traffic


# -----------------------------------------------------------------------------
# time


def seconds_of(traffic, shards, node, inside, between):
    """
    Seconds that a micro-batch's collectives take if nothing else uses the links.

    node: GPUs of a node; inside, between: GB/s per GPU. The all-reduce between copies, once per step, is not in it.
    """
    speed = (inside if shards <= node else between) * 1e9
    size = sum(traffic.get(name, 0) for name in ("allgather_base", "reduce_scatter_base"))
    return size * (shards - 1) / shards / speed


def recompute_cost(config, mode):
    """
    FLOPs of a step with recomputation as a multiple of those without.

    full runs the forward pass of each block again, selective its matrix `up`.
    """
    again = {
        "none": 0.0,
        "selective": config.n_embd * config.ffn_width,
        "full": per_block(config)}
    forward = per_block(config) * config.n_layer + config.n_embd * config.vocab_size
    return 1 + again[mode] * config.n_layer / (3 * forward)


def per_block(config):
    """Multiplications by matrices in a block's forward pass, per token."""
    attention = (2 * config.n_head + 2 * config.n_kv_head) * config.head_dim
    return config.n_embd * (attention + 2 * config.ffn_width)


# -----------------------------------------------------------------------------
# the plan


def gb(size):
    return f"{size / 1e9:.1f}"


def main():
    kinds_of_gpu = [name for name, spec in GPUS.items() if spec.node_gbs]
    if gpu not in kinds_of_gpu:
        raise ValueError(f"gpu={gpu!r}: there is {', '.join(kinds_of_gpu)}")
    if gpus < 2 or not 0 < mfu <= 1 or not 0 <= reserve < 1:
        raise ValueError(
            f"gpus={gpus} mfu={mfu} reserve={reserve}: want at least 2 GPUs, 0 < mfu <= 1 and 0 <= reserve < 1")
    spec = GPUS[gpu]
    shards = (hsdp_shard or spec.per_node) if parallel == "hsdp" else gpus
    if gpus % shards:
        raise ValueError(f"hsdp_shard={shards} does not divide gpus={gpus}: try {nearest_divisors(gpus, shards)}")
    if batch_size % gpus:
        raise ValueError(
            f"batch_size={batch_size} cannot be split over {gpus} GPUs: {nearest_divisors(batch_size, gpus)} can. "
            "For more GPUs than samples (70B: the batch doubles at batch_ramp_at) say --batch_size, or split the model "
            "by tensor and pipeline parallelism, as torchtitan does")
    config = ApertusConfig.of({**globals(), "vocab_size": vocab_size or 131072})
    with torch.device("meta"):
        model = Apertus(config)
    room, most = spec.memory * (1 - reserve), batch_size // gpus
    how = "fsdp" if shards == gpus else f"hsdp, {gpus // shards} copies,"
    print(f"{model.num_params() / 1e9:.2f}B parameters, {batch_size} x {block_size} tokens per step, on {gpus} x {gpu} "
          f"({spec.memory / 1e9:.0f} GB, {reserve:.0%} kept free), {how} over {shards}")

    found = {}
    for mode in tqdm(("none", "selective", "full"), desc="tracing", leave=False):
        peak, traffic = planner(config, gpus, shards, mode)
        divisors = [n for n in range(1, most + 1) if most % n == 0]
        rows = max((n for n in divisors if sum(peak(n).values()) <= room), default=0)
        found[mode] = rows, peak(rows or 1), traffic
    print_memory(found, room, config)
    best = print_speed(found, shards, spec, config, model.flops_per_token(block_size))
    for line in advice(model.num_params(), found, best, shards, spec.per_node, most, room):
        print(line)
    if picture:
        draw(found, room, spec.memory, picture)
        print(f"the picture: {picture}")


def print_memory(found, room, config):
    """The table of memory. found: {mode of recomputation: (windows that fit, {kind: bytes}, traffic)}."""
    print("\nGB on each GPU at the moment of the peak, with the largest micro-batch that fits\n")
    heads = "".join(f"{kind:>12}" for kind in KINDS)
    print(f"{'recompute':12}{'micro':>6}{heads}{'total':>9}  of {gb(room)}")
    for mode, (rows, kinds, _) in found.items():
        sizes = "".join(f"{gb(size):>12}" for size in kinds.values())
        fits = "fits" if rows else "does NOT fit"
        print(f"{mode:12}{rows or 1:6}{sizes}{gb(sum(kinds.values())):>9}  {fits}")
    chunk = chunk_rows(config.vocab_size, "cuda") * config.vocab_size * 4
    print(f"\nlogits: a chunk of {gb(chunk)} GB (in the peak if it is there), where all of them would be "
          f"{gb(block_size * config.vocab_size * 4)} GB a window")


def print_speed(found, shards, spec, config, flops):
    """
    The table of times. spec: the GPU; flops: FLOPs per token.

    Returns what advice() wants of the fastest mode that fits, or None: (mode, tokens per second, windows, whether the
    links are slower than compute, the tokens per GPU from which on they are not, and those between nodes).
    """
    inside, between = node_gbs or spec.node_gbs, net_gbs or spec.net_gbs
    print(f"\nper micro-batch and GPU, at {mfu:.0%} MFU, {inside:.0f} GB/s inside a node and {between:.0f} between\n")
    print(f"{'recompute':12}{'tokens':>8}{'compute':>10}{'traffic':>10}{'links':>9}    {'bound by':10}"
          f"{'tok/s/GPU':>10}{'tok/s':>12}{'days':>9}{'MFU':>7}")
    best = None
    run_tokens = total_samples * block_size
    for mode, (rows, kinds, traffic) in found.items():
        tokens = (rows or 1) * block_size
        computed = spec.flops * mfu / (flops * recompute_cost(config, mode))                # tokens per second
        compute = tokens / computed
        links = seconds_of(traffic, shards, spec.per_node, inside, between)
        speed = gpus * tokens / max(compute, links)
        print(f"{mode:12}{tokens:8,}{compute:9.2f}s{gb(sum(traffic.values())):>8}GB{links:8.2f}s    "
              f"{'links' if links > compute else 'compute':10}{speed / gpus:10,.0f}{speed:12,.0f}"
              f"{run_tokens / speed / 86400:9,.1f}{flops * speed / gpus / spec.flops:7.1%}"
              f"{'' if rows else '   (if it fitted)'}")
        if rows and (best is None or speed > best[1]):
            across = seconds_of(traffic, shards, 0, inside, between)
            best = mode, speed, rows, links > compute, links * computed, across * computed
    masked = 6 * config.n_layer * config.n_head * config.head_dim * block_size
    print(f"\n{run_tokens / 1e12:.2f}T tokens are {flops * run_tokens:.3g} FLOPs, "
          f"{(flops + masked) * run_tokens:.3g} as the report counts (the pairs that the causal mask hides included)")
    return best


def advice(parameters, found, best, shards, node, most, room):
    """
    Yield lines: what to set, and what to change if it does not fit or waits for its links.

    best: of print_speed(). node: GPUs of a node. most: windows of a step per GPU. room: bytes of a GPU.
    """
    if best is None:
        short = min(sum(kinds.values()) for _, kinds, _ in found.values()) - room
        held = 20 * parameters / shards
        more = f"Take more GPUs (--gpus={2 * gpus}) or larger ones"
        if parallel == "hsdp":
            more = f"Shard wider: --hsdp_shard={2 * shards}, or --parallel=fsdp"
        if held <= room:
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
            why = f"The batch has no more for each GPU (--batch_size={most * gpus})"
        instead = f", --parallel=hsdp --hsdp_shard={node} if that fits" if pure and gpus > node else ""
        yield (f"-> communication-bound: compute hides the links from {needed:,.0f} tokens per GPU and micro-batch on, "
               f"and here there are {rows * block_size:,}. {why}, so {'pure FSDP' if pure else 'sharding alone'} stops "
               f"making sense at this size: fewer GPUs{instead}, or tensor and pipeline parallelism, which are left to "
               "github.com/pytorch/torchtitan (Apertus: TP 4, PP 8 at 4,096 GPUs)")
    elif pure:
        windows = math.ceil(needed_across / block_size)
        yield (f"-> pure FSDP makes sense up to {max(gpus, batch_size // windows):,} GPUs at this batch: between nodes "
               f"compute hides the links from {needed_across:,.0f} tokens per GPU and micro-batch on, "
               f"{windows} windows. Beyond, tensor and pipeline parallelism: github.com/pytorch/torchtitan")


def draw(found, room, memory, path):
    """Bars of the memory on each GPU by recomputation and kind; lines: what fits, and what the GPU has."""
    figure, axis = pyplot().subplots(figsize=(9, 2.6), layout="constrained")
    names = [f"{mode}, micro-batch {rows or 1}" for mode, (rows, _, _) in found.items()]
    left = np.zeros(len(names))
    for kind in KINDS:
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
        ncols=len(KINDS),
        loc="lower center",
        bbox_to_anchor=(0.5, 1))
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    finish(figure, path)


if __name__ == "__main__":
    run(main, globals())
