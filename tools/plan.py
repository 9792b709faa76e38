"""
Does it fit, and how long does it take? A run on thousands of GPUs, planned on a laptop without any.

    memory    of one GPU = weights + gradients + three states (16 bytes a parameter more, / shards)  +  two gathered blocks  +  activations
    compute   of a micro-batch = FLOPs a token * tokens / (peak * MFU)
    links     a micro-batch gathers all weights twice in bf16 and reduces all gradients once in fp32: 8 bytes a parameter, whatever its size
    so        tokens a GPU per micro-batch decide whether compute hides the links, and memory decides how many tokens there may be

The memory is not a formula: the real model is sharded by the real engine/parallel.py, and one real forward and backward pass runs under
FakeTensor (shapes without data) and a fake process group of any size, while torch's FSDPMemTracker keeps the books. Layers are alike, so
3 and 4 of them are traced and the rest follows on the line; --whole traces all (70B: some minutes). Attention counts one document a
window; xIELU and norms count as torch.compile fuses them. Links are counted as one GPU's own: NCCL's rings let the GPUs of a node share
theirs, so --net_gbs of what nccl-tests measures, if it is more, is closer. tests/test_plan.py holds the fake against measured memory.

$ python -m tools.plan configs/70b.py --gpus=512 --gpu=h100
$ python -m tools.plan configs/70b.py --gpus=4096 --batch_size=4096 --gpu=gh200 --parallel=hsdp --hsdp_shard=64
$ python -m tools.plan configs/8b.py --gpus=8 --gpu=h200 --mfu=0.5
"""

import sys

if __name__ == "__main__" and not __package__:
    print("plan.py: start it from the project's root, python -m tools.plan", file=sys.stderr)
    sys.exit(2)

import collections
import dataclasses
import math
import os
import warnings

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
from model import XIELU, Apertus, ApertusConfig, RMSNorm, chunk_rows
from engine.parallel import nearest_divisors, recompute_activations, shard

globals().update(settings(vars(train)))   # a plan is of a run: it has all of train.py's settings (python train.py --help), and these
gpus = 8                                  # how many
gpu = "h100"                              # a100 | h100 | h200 | gh200 | b200
mfu = 0.40                                # share of the peak that a GPU reaches, not counting waits and recomputation (Apertus: 0.30 - 0.34)
reserve = 0.08                            # share of the memory that CUDA, NCCL and fragments take
node_gbs = 0.0                            # GB/s a GPU, inside a node; 0 = the table's
net_gbs = 0.0                             # GB/s a GPU, between nodes; 0 = the table's
whole = False                             # trace every layer, instead of 3 and 4
picture = "out/plan.png"                  # where it is drawn; "" = nowhere

# memory (bytes, vendor), bf16 FLOP/s (dense, vendor), GB/s a GPU inside and between nodes (about 80 and 90 % of the vendor's), GPUs a node
GPUS = {"a100": (80e9, 312e12, 240, 22, 8), "h100": (80e9, 989e12, 360, 45, 8), "h200": (141e9, 989e12, 360, 45, 8),
        "gh200": (96e9, 989e12, 360, 22, 4), "b200": (180e9, 2250e12, 720, 45, 8)}

KINDS = {"weights": ("Sharded Param",), "gradients": ("Sharded Grad",), "states": ("OptState",),
         "gathered": ("Unsharded Param", "All Gather"), "reducing": ("Unsharded Grad", "Reduce Scatter"),
         "activations": ("Activation",), "temporary": ("Temp", "Inputs", "Buffer")}


class StoresItsInput(torch.autograd.Function):
    """An elementwise layer as torch.compile's partitioner leaves it: backward needs the input only. Shapes matter here, values do not."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x, *weights)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors)


class Traffic(TorchDispatchMode):
    """Bytes of each kind of collective: the output of an all-gather, the input of a reduce-scatter, an all-reduce once."""

    def __init__(self):
        super().__init__()
        self.bytes = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:                           # three of five calls, and 0.2 ms each further down
            return args[0].fake_device
        if "c10d" in func.namespace:
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.bytes[func._overloadpacket.__name__.strip("_")] += max((t.nbytes for t in tensors), default=0)
        return func(*args, **(kwargs or {}))


def trace(config, ranks, shards, rows, mode, dtype=torch.bfloat16, fused=True):
    """
    One micro-batch of `rows` windows on rank 0 of `ranks`, of which `shards` share one copy of the weights; nothing is real but the shapes.
    Returns {where: {kind: bytes at its peak}}, where = forward as a whole, and the embedding, the first and the last two blocks, backward
    too; and {collective: bytes}. At least two layers.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    plain = XIELU.forward, RMSNorm.forward
    try:
        if fused:
            XIELU.forward = lambda self, x: StoresItsInput.apply(x, self.alpha_p, self.alpha_n)
            RMSNorm.forward = lambda self, x: StoresItsInput.apply(x, self.weight)
        both = dict(mesh_shape=(ranks // shards, shards), mesh_dim_names=("copies", "shards"))
        mesh = init_device_mesh("cpu", **(both if shards < ranks else dict(mesh_shape=(ranks,))))
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
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
                    p.grad = torch.zeros_like(p)                            # of the micro-batches before
            idx = torch.zeros(rows, config.block_size, dtype=torch.long)
            tracker, traffic = FSDPMemTracker(model, optimizer), Traffic()
            tracker.track_inputs((idx,))
            with tracker, traffic:
                model(idx, idx, n_tokens=1)[1].backward()
        blocks, peaks = model.model.layers, {}
        places = dict(forward=model, embedding=model.model.embed_tokens, first=blocks[0], next=blocks[-2], last=blocks[-1])
        for where, module in places.items():
            found = tracker.memory_tracking[module].snapshots if module in tracker.memory_tracking else {}
            states = ("PEAK_FW",) if where == "forward" else ("PEAK_FW", "PEAK_BW")
            snapshots = [next(iter(s.values())) for state in found for s in found[state] if state.name in states]
            if snapshots:
                peak = {k if isinstance(k, str) else k.value: v for k, v in max(snapshots, key=lambda s: s["Total"]).items()}
                peaks[where] = {kind: sum(peak.get(name, 0) for name in names) for kind, names in KINDS.items()}
        return peaks, traffic.bytes
    finally:
        XIELU.forward, RMSNorm.forward = plain
        dist.destroy_process_group()


def planner(config, ranks, shards, mode, whole=False):
    """
    peak(rows) -> {kind: bytes} at the peak, and {collective: bytes}, from 3 and 4 layers with 1 and 2 windows each. What stands in memory
    while one block runs is a + b layers + c rows + d layers rows; which block's is the peak depends on both, so each keeps its own plane.
    """
    depths = (config.n_layer,) if whole or config.n_layer <= 4 else (3, 4)
    traced = {(n, rows): trace(dataclasses.replace(config, n_layer=n), ranks, shards, rows, mode) for n in depths for rows in (1, 2)}

    def in_depth(get):
        if len(depths) == 1:
            return get(depths[0])
        return get(3) + (get(4) - get(3)) * (config.n_layer - 3)

    def peak(rows):
        at = lambda where, kind, r: in_depth(lambda n: traced[n, r][0][where][kind])
        plane = lambda where, kind: at(where, kind, 1) + (at(where, kind, 2) - at(where, kind, 1)) * (rows - 1)
        peaks = [{kind: plane(where, kind) for kind in KINDS} for where in traced[depths[0], 1][0]]
        return max(peaks, key=lambda kinds: sum(kinds.values()))

    return peak, {name: in_depth(lambda n: traced[n, 1][1][name]) for name in traced[depths[0], 1][1]}


def seconds_of(traffic, ranks, shards, node, inside, between):
    """How long a micro-batch's collectives take, if nothing else used the links. The all-reduce between copies, once a step, is not in it."""
    speed = (inside if shards <= node else between) * 1e9
    return sum(traffic.get(k, 0) for k in ("allgather_base", "reduce_scatter_base")) * (shards - 1) / shards / speed


def recompute_cost(config, mode):
    """FLOPs of a step with recomputation, as a multiple of those without: full runs the blocks' forward again, selective their up."""
    again = {"none": 0.0, "selective": config.n_embd * config.ffn_width, "full": per_block(config)}[mode]
    return 1 + again * config.n_layer / (3 * (per_block(config) * config.n_layer + config.n_embd * config.vocab_size))


def per_block(config):
    """Multiplications a token of a block's forward pass, by matrices."""
    return config.n_embd * (2 * config.n_head + 2 * config.n_kv_head) * config.head_dim + 2 * config.n_embd * config.ffn_width


def main():
    if gpu not in GPUS:
        raise ValueError(f"gpu={gpu!r}: there is {', '.join(GPUS)}")
    if gpus < 2 or not 0 < mfu <= 1 or not 0 <= reserve < 1:
        raise ValueError(f"gpus={gpus} mfu={mfu} reserve={reserve}: want at least 2 GPUs, 0 < mfu <= 1 and 0 <= reserve < 1")
    memory, flop_s, inside, between, node = GPUS[gpu]
    inside, between, room = node_gbs or inside, net_gbs or between, memory * (1 - reserve)
    shards = (hsdp_shard or node) if parallel == "hsdp" else gpus
    if gpus % shards:
        raise ValueError(f"hsdp_shard={shards} does not divide gpus={gpus}: try {nearest_divisors(gpus, shards)}")
    own = {f.name: globals()[f.name] for f in dataclasses.fields(ApertusConfig)}
    config = ApertusConfig(**{**own, "vocab_size": vocab_size or 131072})
    if batch_size % gpus:
        near = nearest_divisors(batch_size, gpus)
        raise ValueError(f"batch_size={batch_size} cannot be split over {gpus} GPUs: {near} can. For more GPUs than samples (70B: the batch "
                         "doubles at batch_ramp_at) say --batch_size, or split the model: tensor and pipeline parallelism, as torchtitan does")
    with torch.device("meta"):
        model = Apertus(config)
    flops, parameters, T = model.flops_per_token(block_size), model.num_params(), block_size
    most = batch_size // gpus
    how = "fsdp" if shards == gpus else f"hsdp, {gpus // shards} copies,"
    print(f"{parameters / 1e9:.2f}B parameters, {batch_size} x {T} tokens a step, on {gpus} x {gpu} ({memory / 1e9:.0f} GB, {reserve:.0%} kept "
          f"free), {how} over {shards}")

    modes, found = ("none", "selective", "full"), {}
    for mode in tqdm(modes, desc="tracing", leave=False):
        peak, traffic = planner(config, gpus, shards, mode, whole)
        rows = max((r for r in range(1, most + 1) if most % r == 0 and sum(peak(r).values()) <= room), default=0)
        kinds = peak(rows or 1)
        found[mode] = rows, kinds, traffic

    gb = lambda x: f"{x / 1e9:.1f}"
    print("\nGB on each GPU at the moment of the peak, with the largest micro-batch that fits\n")
    print(f"{'recompute':12}{'micro':>6}" + "".join(f"{kind:>12}" for kind in KINDS) + f"{'total':>9}  of {gb(room)}")
    for mode, (rows, kinds, _) in found.items():
        fits = "fits" if rows else "does NOT fit"
        print(f"{mode:12}{rows or 1:6}" + "".join(f"{gb(kinds[kind]):>12}" for kind in KINDS) + f"{gb(sum(kinds.values())):>9}  {fits}")
    logits = chunk_rows(config.vocab_size, "cuda") * config.vocab_size * 4
    print(f"\nlogits: a chunk of {gb(logits)} GB (in the peak if it is there), where all of them would be {gb(T * config.vocab_size * 4)} GB a window")

    print(f"\nper micro-batch and GPU, at {mfu:.0%} MFU, {inside:.0f} GB/s inside a node and {between:.0f} between\n")
    print(f"{'recompute':12}{'tokens':>8}{'compute':>10}{'traffic':>10}{'links':>9}    {'bound by':10}"
          f"{'tok/s/GPU':>10}{'tok/s':>12}{'days':>9}{'MFU':>7}")
    best = None
    for mode, (rows, kinds, traffic) in found.items():
        tokens = (rows or 1) * T
        compute = flops * tokens * recompute_cost(config, mode) / (flop_s * mfu)
        links = seconds_of(traffic, gpus, shards, node, inside, between)
        speed = gpus * tokens / max(compute, links)
        days = total_samples * T / speed / 86400
        bound = "links" if links > compute else "compute"
        print(f"{mode:12}{tokens:8,}{compute:9.2f}s{gb(sum(traffic.values())):>8}GB{links:8.2f}s    {bound:10}{speed / gpus:10,.0f}"
              f"{speed:12,.0f}{days:9,.1f}{flops * speed / gpus / flop_s:7.1%}" + ("" if rows else "   (if it fitted)"))
        if rows and (best is None or speed > best[1]):
            hidden = flop_s * mfu / (flops * recompute_cost(config, mode))  # tokens a second of links
            best = mode, speed, rows, links > compute, links * hidden, seconds_of(traffic, gpus, shards, 0, inside, between) * hidden
    masked = 6 * config.n_layer * config.n_head * config.head_dim * T       # the report counts the masked half of attention too
    tokens = total_samples * T
    print(f"\n{tokens / 1e12:.2f}T tokens are {flops * tokens:.3g} FLOPs, {(flops + masked) * tokens:.3g} as the report counts "
          "(the pairs that the causal mask hides included)")
    for line in advice(config, parameters, found, best, shards, node, most, room):
        print(line)
    if picture:
        draw(found, room, memory, picture)
        print(f"the picture: {picture}")


def advice(config, parameters, found, best, shards, node, most, room):
    """What to set, and what to change if it does not fit or waits for its links. Yields lines."""
    if best is None:
        short = min(sum(kinds.values()) for _, kinds, _ in found.values()) - room
        held = 20 * parameters / shards
        wider = f"Shard wider: --hsdp_shard={2 * shards}, or --parallel=fsdp"
        more = wider if parallel == "hsdp" else f"Take more GPUs (--gpus={2 * gpus}) or larger ones"
        yield (f"-> does not fit, by {short / 1e9:.1f} GB: weights, gradients and states take {held / 1e9:.1f} GB. "
               + more + ("" if held > room else ", or a shorter --block_size"))
        return
    mode, speed, rows, bound, needed, needed_across = best
    yield f"-> --parallel={'hsdp' if shards < gpus else 'fsdp'} --recompute={mode} --micro_batch={rows}, {most // rows} of them accumulate"
    if bound:
        yield (f"-> communication-bound: compute hides the links from {needed:,.0f} tokens a GPU and micro-batch on, and here there are "
               f"{rows * block_size:,}. "
               + (f"The batch has no more for each GPU (--batch_size={most * gpus}), so " if rows == most else "More do not fit, so ")
               + ("pure FSDP" if shards == gpus else "sharding alone") + " stops making sense at this size: fewer GPUs"
               + (f", --parallel=hsdp --hsdp_shard={node} if that fits" if shards == gpus and gpus > node else "")
               + ", or tensor and pipeline parallelism, which are left to github.com/pytorch/torchtitan (Apertus: TP 4, PP 8 at 4,096 GPUs)")
    elif shards == gpus:                                                    # not yet: where is it?
        each = math.ceil(needed_across / block_size)
        yield (f"-> pure FSDP makes sense up to {max(gpus, batch_size // each):,} GPUs at this batch: between nodes compute hides the links "
               f"from {needed_across:,.0f} tokens a GPU and micro-batch on, {each} windows. Beyond, tensor and pipeline parallelism: "
               "github.com/pytorch/torchtitan")


def draw(found, room, memory, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axis = plt.subplots(figsize=(9, 2.6), layout="constrained")
    names = [f"{mode}, micro-batch {rows or 1}" for mode, (rows, _, _) in found.items()]
    left = [0.0] * len(names)
    for kind in KINDS:
        widths = [kinds[kind] / 1e9 for _, kinds, _ in found.values()]
        axis.barh(names, widths, left=left, label=kind)
        left = [a + b for a, b in zip(left, widths)]
    axis.axvline(room / 1e9, color="black", linewidth=1)
    axis.axvline(memory / 1e9, color="black", linewidth=1, linestyle=":")
    axis.invert_yaxis()
    axis.set_xlabel(f"GB on each of {gpus} x {gpu}; line: what fits")
    axis.legend(fontsize=8, frameon=False, ncols=len(KINDS), loc="lower center", bbox_to_anchor=(0.5, 1))
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    run(main, globals())
