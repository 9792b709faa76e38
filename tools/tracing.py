"""
The memory of a training step, from the real model and without any data.

One forward and backward pass of the real model runs under FakeTensor: every tensor has a shape and no memory, and a
tracker keeps the books of what would be alive at once. Two ways, for tools/plan.py:

    on_one(...)     a GPU that holds the whole model, or a frozen base in bf16, 8 or 4 bits and adapters beside it
    sharded(...)    rank 0 of a fake process group of any size, its shards made by the real engine/parallel.py

tests/test_plan.py holds both against measured memory. Layers are alike, so 3 and 4 of them are traced and the rest
follows on the line (planner). xIELU and norms count as torch.compile fuses them, attention one document per window.
"""

import collections
import contextlib
import dataclasses
import functools
import warnings
import weakref
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ademamix import AdEMAMix, param_groups
from engine.parallel import Split, recompute_activations, shard
import model as models
from model import XIELU, RMSNorm, chunk_rows
from posttrain import quantised
from posttrain.common import shapes_of

# The kinds of memory that a plan shows, and what FSDPMemTracker calls them.
KINDS = {
    "weights": ("Sharded Param",),
    "gradients": ("Sharded Grad",),
    "states": ("OptState",),
    "gathered": ("Unsharded Param", "All Gather"),
    "reducing": ("Unsharded Grad", "Reduce Scatter"),
    "activations": ("Activation",),
    "temporary": ("Temp", "Inputs", "Buffer")}


def leaves(values):
    """The tensors in nested lists and dicts."""
    return [value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


# -----------------------------------------------------------------------------
# layers whose tensors are those of the compiled model


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


def decoded(layer, dtype):
    """Memory as posttrain/quantised.py takes it for a matrix: for a moment index, value and product of a slab."""
    size = layer.out_features * layer.in_features
    torch.empty(3, min(size, quantised.SLAB * quantised.BLOCK))
    return torch.empty(layer.out_features, layer.in_features, dtype=dtype)


class MakesItsMatrix(torch.autograd.Function):
    """The product with a quantised matrix, in view of a tracker: posttrain/quantised.py hides it in one operation."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return F.linear(x, decoded(layer, x.dtype))

    @staticmethod
    def backward(ctx, grad):
        return grad @ decoded(ctx.layer, grad.dtype), None


@contextlib.contextmanager
def without_data(fused):
    """
    Within it tensors have no memory. fused: as on a GPU; xIELU and the norms store their input alone, the loss takes
    chunks of a GPU's size, and the head's gradient is added up inside the product.
    """
    def rows_on_gpu(V, device, trained=True):
        return chunk_rows(V, "cuda", trained)

    def xielu(self, x):
        return StoresItsInput.apply(x, self.alpha_p, self.alpha_n)

    def norm(self, x):
        return StoresItsInput.apply(x, self.weight)

    def product(self, x):
        return MakesItsMatrix.apply(x, self)

    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(mock.patch.object(quantised.Quantised, "forward", product))
        # Short windows in bf16 would take a CPU's way, which keeps their probabilities.
        stack.enter_context(mock.patch.object(models, "way_on_cpu", lambda q, documents: "kernel"))
        if fused:
            stack.enter_context(mock.patch.object(XIELU, "forward", xielu))
            stack.enter_context(mock.patch.object(RMSNorm, "forward", norm))
            stack.enter_context(mock.patch.object(models, "chunk_rows", rows_on_gpu))
            stack.enter_context(mock.patch.object(models, "add_product", lambda total, a, b: None))
        yield


def optimizer_of(model, state_dtype="float32"):
    """AdEMAMix with its states, and the gradients of the micro-batches before, which are there at the peak."""
    optimizer = AdEMAMix(param_groups(model), state_dtype=getattr(torch, state_dtype), compile=False)
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer._new_state(p, group)
            p.grad = torch.zeros_like(p)
    return optimizer


def window_of(config, rows, P):
    """
    What the model is called with on the first of P ranks that share a window: ids, and the Split or None. Its group
    need not exist, since nothing is sent.
    """
    idx = torch.zeros(rows, config.block_size // P, dtype=torch.long)
    return idx, Split(P, 0, "") if P > 1 else None


class Traffic(TorchDispatchMode):
    """
    Bytes by collective: the output of an all-gather, the input of a reduce-scatter and of an exchange, an all-reduce
    once.
    """

    def __init__(self):
        super().__init__()
        self.bytes = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Three of five calls ask for the device. They are answered here, which makes a trace much faster.
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if "c10d" in func.namespace or func is torch.ops.apertus.exchange.default:
            name = func._overloadpacket.__name__.strip("_")
            self.bytes[name] += max([x.nbytes for x in leaves(args)], default=0)
        return func(*args, **(kwargs or {}))


# -----------------------------------------------------------------------------
# one GPU


class Living(TorchDispatchMode):
    """The bytes that are alive, and the most there were in each place: trunk, head, back."""

    def __init__(self):
        super().__init__()
        self.now = 0
        self.place = "trunk"
        self.most = collections.Counter()
        self.known = WeakIdKeyDictionary()

    def add(self, tensors):
        """Count the memory of tensors, once where they share it, until the last of them is gone."""
        for tensor in leaves(tensors):
            storage = tensor.untyped_storage()
            if storage in self.known:
                continue
            size = storage.nbytes()
            self.known[storage] = size
            self.now += size
            weakref.finalize(storage, self.free, size)
        self.most[self.place] = max(self.most[self.place], self.now)

    def free(self, size):
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # As in Traffic.
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        made = func(*args, **(kwargs or {}))
        self.add(made)
        return made


def on_one(config, rows, mode, adapters=None, base="fp32", P=1, state_dtype="float32", dtype=torch.bfloat16,
           fused=True):
    """
    One micro-batch of `rows` windows on a GPU of its own. mode: of recomputation; adapters, base: as in shapes_of; P:
    how many GPUs share a window.

    Returns {where: {kind: bytes at its peak}} for the blocks going forward, the head, and the blocks going backward;
    and {"exchange": bytes}.
    """
    model = shapes_of(config, adapters, base)
    model.dtype = dtype
    recompute_activations(model, mode)
    living = Living()

    def enter_head(module, args, hidden):
        living.place = "head"
        hidden.register_hook(enter_back)

    def enter_back(grad):
        living.place = "back"

    model.model.norm.register_forward_hook(enter_head)
    with without_data(fused):
        model.to_empty(device="cpu")
        optimizer = optimizer_of(model, state_dtype)
        idx, split = window_of(config, rows, P)
        weights = [*model.parameters(), *model.buffers()]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        states = leaves([*optimizer.state.values()])
        fixed = dict(weights=size_of(weights), gradients=size_of(gradients), states=size_of(states))
        living.add([weights, gradients, states])
        with living, Traffic() as traffic:
            model(idx, idx, n_tokens=1, split=split)[1].backward()
    held = sum(fixed.values())
    places = {}
    for where, most in living.most.items():
        places[where] = dict.fromkeys(KINDS, 0) | fixed | dict(activations=most - held)
    return places, traffic.bytes


def size_of(tensors):
    """Bytes of a list of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


# -----------------------------------------------------------------------------
# many GPUs


def sharded(config, rows, mode, ranks, shards, P=1, state_dtype="float32", dtype=torch.bfloat16, fused=True):
    """
    One micro-batch of `rows` windows on rank 0 of `ranks`, of which `shards` share one copy of the weights, P a window.

    mode: of recomputation. At least two layers. Returns {where: {kind: bytes at its peak}}, where = forward as a whole,
    and the embedding, the first and the last two blocks, backward too; and {collective: bytes}.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        if shards < ranks:
            mesh = init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("copies", "shards"))
        else:
            mesh = init_device_mesh("cpu", (ranks,))
        with without_data(fused):
            model = shapes_of(config)
            model.dtype = dtype
            recompute_activations(model, mode)
            shard(model, mesh, dtype)
            model.to_empty(device="cpu")
            optimizer = optimizer_of(model, state_dtype)
            idx, split = window_of(config, rows, P)
            tracker, traffic = FSDPMemTracker(model, optimizer), Traffic()
            tracker.track_inputs((idx,))
            with tracker, traffic:
                model(idx, idx, n_tokens=1, split=split)[1].backward()
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


# -----------------------------------------------------------------------------
# from a few layers and windows to all of them


def planner(config, trace, *args):
    """
    peak(rows) -> {kind: bytes} at the peak, and {collective: bytes} of one window, from 3 and 4 layers with 1 and 2
    windows each.

    trace: on_one or sharded; args: what follows its rows. What stands in memory in one place is a + b layers + c rows +
    d layers rows. Which place has the peak depends on both, so each keeps its own plane.
    """
    few, more = min(3, config.n_layer), min(4, config.n_layer)

    @functools.cache
    def traced(n, rows):
        shallow = dataclasses.replace(config, n_layer=n)
        return trace(shallow, rows, *args)

    def in_depth(get):
        """get(layers) at config.n_layer, on the line through the traced depths."""
        per_layer = get(more) - get(few)
        return get(more) + per_layer * (config.n_layer - more)

    def at(where, kind, rows):
        if rows > 2:
            one, two = at(where, kind, 1), at(where, kind, 2)
            return one + (two - one) * (rows - 1)
        return in_depth(lambda n: traced(n, rows)[0][where][kind])

    places, collectives = traced(few, 1)

    def peak(rows):
        peaks = [
            {kind: at(where, kind, rows) for kind in KINDS}
            for where in places]
        return max(peaks, key=lambda kinds: sum(kinds.values()))

    traffic = {name: in_depth(lambda n: traced(n, 1)[1][name]) for name in collectives}
    return peak, traffic
