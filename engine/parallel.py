"""
One step of training spread over many processes, with the same numbers as on one.

    batch    rank r of R takes samples r B/R ... (r+1) B/R - 1 of every step's B, so every R sees the same data
    loss     a sum over the kept tokens of all ranks, divided by their number, so gradients of ranks and micro-batches
             simply add up
    ddp      every rank holds all weights, gradients and states (20 bytes a parameter); gradients are all-reduced
    fsdp     every rank holds 1/R of them (FSDP2). A block's weights are gathered just before it runs and dropped after
             it; its gradients are reduce-scattered. Weights travel in bf16, gradients in fp32
    hsdp     fsdp inside a node, where links are fast, and one all-reduce of the shards between nodes
    split    with each of these: a long window lies over P neighbouring ranks, T/P positions on each (Split)

If any rank is stopped or meets a NaN, all ranks stop in the same step: the flags travel in the all-reduce of the loss.
All of this is torch's own. What is added here is the order: recompute activations, compile, shard, then initialise each
shard. Tensor and pipeline parallelism, which thousands of GPUs need (python -m tools.plan says from where on), are in
github.com/pytorch/torchtitan.

$ torchrun --nproc_per_node=8 train.py configs/8b.py --parallel=fsdp
$ torchrun --nproc_per_node=8 train.py configs/8b.py configs/long/64k.py --parallel=fsdp --sequence_parallel=8
"""

import contextlib
import logging
import math
import os
import re
import signal
import sys
import threading
import traceback
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from engine.hardware import keep_freed_memory

MODES = ("none", "ddp", "fsdp", "hsdp")


# -----------------------------------------------------------------------------
# the processes


def launched():
    """
    What torchrun's environment says of this process, or srun's; None without a launcher.

    Returns (rank, ranks, rank on this node, ranks on this node).
    """
    env = os.environ

    def number(key, default=0):
        return int(env.get(key, default))

    if "RANK" in env and "WORLD_SIZE" in env:
        return number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE", 1)
    ranks = number("SLURM_NTASKS", 1)
    if "SLURM_PROCID" in env and ranks > 1:
        # srun starts one process per GPU and names no meeting point. Ranks meet on the node that launched the job, at a
        # port that differs between jobs.
        env.setdefault("MASTER_ADDR", env.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
        env.setdefault("MASTER_PORT", str(20000 + number("SLURM_JOB_ID") % 20000))
        per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or "1"
        on_this_node = int(re.match(r"\d+", per_node)[0])  # of "4(x2)", four on each of two nodes
        return number("SLURM_PROCID"), ranks, number("SLURM_LOCALID"), on_this_node
    return None


class Ranks:
    """
    The processes of a run: the rank of this one, how many there are (size), and the few things that they exchange.

    mode: none | ddp | fsdp | hsdp.
    exact: gradients are added in fp64, so that 1, 2 and 4 processes end in the same bits. It needs sharding, which one
        process then does as well.
    shard: with hsdp, how many ranks share one copy of the model; 0 = those of a node.
    sequence: P, how many neighbouring ranks share one window, which must divide the ranks. A group of P ranks reads the
        same samples, and each computes its own positions of them.
    ValueError for what cannot work. No connection is opened before join().
    """

    def __init__(self, mode="none", exact=False, shard=0, sequence=1):
        if mode not in MODES:
            raise ValueError(f"parallel={mode!r}: there is {', '.join(MODES)}")
        # A single process inside a Slurm job has srun's variables too. Without a mode only torchrun's therefore count.
        found = launched() if mode != "none" or "WORLD_SIZE" in os.environ else None
        if mode != "none" and not found:
            raise ValueError(f"parallel={mode} wants a launcher: torchrun --nproc_per_node=2 train.py ... "
                             f"--parallel={mode}; one process alone is parallel=none")
        self.launched = bool(found)
        self.rank, self.size, self.local, node = found or (0, 1, 0, 1)
        if mode == "none" and self.size > 1:
            raise ValueError(f"{self.size} processes were started and parallel=none is one: "
                             "say --parallel=ddp or --parallel=fsdp")
        if exact and mode == "ddp":
            raise ValueError("exact=True adds gradients in fp64, which FSDP can and DDP cannot: take --parallel=fsdp")
        if sequence < 1 or self.size % sequence:
            near = nearest_divisors(self.size, max(1, sequence))
            raise ValueError(f"sequence_parallel={sequence} does not divide {self.size} processes: try {near}, or "
                             "start a multiple of it, torchrun --nproc_per_node=8 ... --parallel=fsdp")
        if exact and sequence > 1:
            raise ValueError("exact=True gives the same bits on any number of ranks, and sums over a split window "
                             "round otherwise: leave it out, or take --sequence_parallel=1")
        self.sequence = sequence
        # How many groups of ranks read samples of their own, which is this rank's, and its place in that.
        self.groups = self.size // sequence
        self.group, self.part = divmod(self.rank, sequence)
        # What the model exchanges a split window by, from join() on.
        self.split = None
        self.mode = "fsdp" if exact and mode == "none" else mode
        self.exact = exact
        # In which gradients are added.
        self.sum_dtype = torch.float64 if exact else torch.float32
        self.first = self.rank == 0
        self.sharded = self.mode in ("fsdp", "hsdp")
        self.shard = (shard or node) if mode == "hsdp" else self.size
        if self.size % self.shard:
            near = nearest_divisors(self.size, self.shard)
            raise ValueError(f"hsdp_shard={self.shard} does not divide {self.size} processes: try {near}")
        # How many ranks hold the same gradient.
        self.copies = self.size if self.mode == "ddp" else self.size // self.shard
        # The group that checkpoints are written with, from join() to leave().
        self.files = None

    def place(self, device):
        """
        The device of this rank: cuda becomes cuda:LOCAL_RANK, or cuda:0 of one process, since torch.cuda.set_device
        wants a number. ValueError if there is none for it.
        """
        if self.exact and device == "mps":
            raise ValueError("exact=True adds in fp64, which mps does not have: "
                             "take --device=cpu, or leave --exact out")
        if self.mode != "none" and device == "mps":
            raise ValueError("device=mps is one GPU for one process: take --parallel=none, or --device=cpu")
        if device != "cuda":
            return device
        gpus = torch.cuda.device_count()
        if self.local >= gpus:
            raise ValueError(f"process {self.local} of this node has no GPU of its own: there are {gpus}, "
                             f"so --nproc_per_node={gpus}")
        return f"cuda:{self.local}"

    def micro_batch(self, batch_size, micro_batch):
        """Samples in memory at once on each group of ranks. ValueError proposes a near size for one that cannot be."""
        groups = self.groups
        those = f"{groups} processes" if self.sequence == 1 else f"{groups} groups of {self.sequence} processes"
        if batch_size % groups:
            near = nearest_divisors(batch_size, groups)
            batch = max(1, round(batch_size / groups)) * groups
            raise ValueError(f"batch_size={batch_size} cannot be split over {those}: "
                             f"{near} can, or --batch_size={batch}")
        each = batch_size // groups
        # exact adds up the same micro-batches for every number of ranks, so there it is not made smaller.
        micro = micro_batch if self.exact else min(micro_batch, each)
        if micro < 1 or each % micro:
            over = f" over {those}, {each} each," if self.size > 1 else ""
            raise ValueError(f"batch_size={batch_size}{over} is not a multiple of micro_batch={micro_batch}: "
                             f"try --micro_batch={math.gcd(each, max(micro, 1))}")
        return micro

    def check_split(self, **counts):
        """ValueError if one of these numbers, of positions or of heads, cannot be split over the ranks of a window."""
        P = self.sequence
        for name, n in counts.items():
            if n % P:
                raise ValueError(f"{name}={n} cannot be split over sequence_parallel={P} ranks: "
                                 f"{nearest_divisors(n, P)} can")

    def cut(self, idx, targets, keep, doc):
        """This rank's positions of whole windows, (B, T) each -> (B, T/P). Attention needs doc, which stays whole."""
        n = idx.shape[1] // self.sequence
        mine = slice(self.part * n, (self.part + 1) * n)
        return idx[:, mine], targets[:, mine], keep[:, mine], doc

    def join(self, device, timeout):
        """Meet the other ranks: nccl on CUDA, gloo on CPU. timeout: seconds that a rank waits for another."""
        kind = torch.device(device).type
        if kind == "cpu":
            keep_freed_memory()
        if kind == "cuda":
            torch.cuda.set_device(device)
        if self.mode == "none":
            return
        backend = "nccl" if kind == "cuda" else "gloo"
        wait = timedelta(seconds=timeout)
        # A process without a launcher has nobody to meet, and needs no network: a store in its own memory will do.
        store = None if self.launched else dist.HashStore()
        dist.init_process_group(backend, store=store, timeout=wait, rank=self.rank, world_size=self.size)
        # Checkpoints are written by a thread while training goes on. Their messages need a group of their own, or they
        # would mix with those of the step.
        self.files = dist.new_group(backend="gloo", timeout=wait)
        self.device = device
        if self.sequence > 1:
            group, _ = dist.new_subgroups(self.sequence, timeout=wait)
            self.split = Split(self.sequence, self.part, group.group_name)
        if self.mode == "hsdp":
            shape = (self.copies, self.shard)
            self.mesh = init_device_mesh(kind, shape, mesh_dim_names=("copies", "shards"))
        else:
            self.mesh = init_device_mesh(kind, (self.size,))
        if self.exact:
            self.before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
            torch.set_num_threads(1)  # two threads split a sum in two, which rounds it differently
            torch.use_deterministic_algorithms(True)

    def add(self, *numbers):
        """Sums over ranks, in fp64, of a few numbers or 0-d tensors: the same floats on every rank."""
        total = [float(x) for x in numbers]
        if self.size > 1:
            total = torch.tensor(total, dtype=torch.float64, device=self.device)
            dist.all_reduce(total)
            total = total.tolist()
        return total

    def leave(self):
        """Close the connections. Barrier: no rank exits while another still needs it."""
        if not self.files:
            return
        dist.barrier(self.files)
        dist.destroy_process_group()
        self.files = None
        if self.exact:
            threads, deterministic = self.before
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)


def nearest_divisors(n, near):
    """'4 or 6' for n = 12, near = 5: the divisors of n below and above."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    below = max(d for d in divisors if d <= near)
    above = min((d for d in divisors if d >= near), default=below)
    return " or ".join(map(str, sorted({below, above})))


# -----------------------------------------------------------------------------
# one window, spread over them


@torch.library.custom_op("apertus::exchange", mutates_args=())
def exchange(x: Tensor, group: str) -> Tensor:
    """
    All-to-all within a group of P ranks, by its name: x[j] goes to rank j, and y[i] is what rank i has sent.
    x, y (P, ...).

    An operator of its own, so that torch.compile has a name for it and breaks no graph.
    """
    y = x.new_empty(x.shape)
    ranks = dist.distributed_c10d._resolve_process_group(group)
    dist.all_to_all_single(y, x.contiguous(), group=ranks)
    return y


@exchange.register_fake
def _(x, group):
    return x.new_empty(x.shape)


def exchange_back(ctx, grad):
    """The gradient of y[i] goes back to rank i: the exchange is its own transpose."""
    return exchange(grad, ctx.group), None


def keep_group(ctx, inputs, output):
    ctx.group = inputs[1]


exchange.register_autograd(exchange_back, setup_context=keep_group)


class Split(NamedTuple):
    """
    A window of T positions over a group of ranks, which hold T/P positions each. Attention alone needs them all, and it
    needs no other head: so ranks exchange positions for heads around it (DeepSpeed-Ulysses, arXiv 2309.14509).

    Per block and direction it costs two all-to-alls of (B, H, T/P, D) and two of (B, K, T/P, D). P must divide K, the
    number of key-value heads, and T.
    """
    size: int                       # P
    rank: int                       # which of the P stretches of a window this rank holds
    group: str                      # its name in torch.distributed

    def by_heads(self, x):
        """All heads of this stretch (B, H, T/P, D) -> some heads of the whole window (B, H/P, T, D)."""
        x = x.unflatten(1, (self.size, -1))                # (B, P, H/P, T/P, D)
        x = exchange(x.transpose(0, 1), self.group)        # (P, B, H/P, T/P, D)  by stretch
        return x.movedim(0, 2).flatten(2, 3)               # (B, H/P, T, D)

    def by_positions(self, x):
        """And back: (B, H/P, T, D) -> (B, H, T/P, D)."""
        x = x.unflatten(2, (self.size, -1))                # (B, H/P, P, T/P, D)
        x = exchange(x.movedim(2, 0), self.group)          # (P, B, H/P, T/P, D)  by heads
        return x.transpose(0, 1).flatten(1, 2)             # (B, H, T/P, D)


# -----------------------------------------------------------------------------
# the model, spread over them


def spread(model, ranks, device, seed, recompute="none", compiled=False):
    """
    Recompute activations, compile each block, shard, initialise: in this order. Returns what training calls: the model,
    or DDP's wrapper of it.

    With ranks.sharded the model comes on the meta device, and memory is allocated for this rank's shards only. Initial
    weights depend on (seed, name) alone, so they are the same for every number of ranks; without a seed the shards stay
    unfilled. A model that comes in shards with its weights (posttrain/common.py) keeps them.
    """
    recompute_activations(model, recompute)
    if compiled:
        model.compile_blocks()
    if ranks.mode == "ddp":
        # DDP's own way with torch.compile cuts a block where a bucket of gradients is full, into three graphs. A block
        # is as small a part as one would send, so its gradients may as well come at its end.
        torch._dynamo.config.optimize_ddp = False
        # A quantised base keeps its bits in buffers, which never change: they are not sent with every forward pass.
        net = DistributedDataParallel(model, broadcast_buffers=False)
        net.register_comm_hook(None, add_up)
        return net
    if ranks.sharded and next(model.parameters()).is_meta:
        shard(model, ranks.mesh, model.dtype, ranks.sum_dtype)
        model.to_empty(device=device)
        if seed is not None:
            init_shards(model, seed)
    return model


def shard(model, mesh, dtype, reduce_dtype=torch.float32):
    """
    FSDP2. Each block is gathered by itself, the embedding too, and the rest (head, last norm) as one.

    dtype: of the weights that travel, if it is bfloat16; reduce_dtype: of the gradients. Gradients are added, not
    averaged: to take FSDP's mean and multiply by R would be exact for R = 2^n only.

    Adapters and the frozen bf16 matrices beside them are gathered in one message, as bytes if their dtypes differ. Only
    what is trained must be of one dtype, and only that is reduced.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # slow to import, seldom needed

    param_dtype = dtype if dtype == torch.bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    parts = [*model.model.layers]
    if not model.config.tie_embeddings:
        parts.append(model.model.embed_tokens)
    for part in [*parts, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def drop_gathered(net):
    """Free what FSDP keeps gathered for a backward pass (head, last norm). Call it after a forward pass without one."""
    if hasattr(net, "reshard"):
        net.reshard()


def add_up(_, bucket):
    """DDP's communication hook: the sum of a bucket's gradients over ranks, where DDP itself would take the mean."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@torch.no_grad()
def init_shards(model, seed):
    """
    Apertus.init_weights for a model that no rank could hold: one parameter at a time is drawn whole on the CPU, cut,
    and forgotten.
    """
    def whole_parameters():
        for name, p in model.named_parameters():
            full = torch.empty(p.shape, dtype=p.dtype, device="cpu")
            yield name, full  # init_weights fills it before it asks for the next
            place(p, full)

    stand_in = SimpleNamespace(config=model.config, initial=model.initial, named_parameters=whole_parameters)
    type(model).init_weights(stand_in, seed)


@torch.no_grad()
def place(p, rows):
    """
    Copy a whole tensor into a parameter, or this rank's rows into its shard of it. rows: the tensor, or a slice of a
    safetensors file, of which no other row is read.
    """
    if not hasattr(p, "to_local"):
        p.copy_(rows[:])
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    if shape[0]:
        first = offset[0]
        p.to_local().copy_(rows[first:first + shape[0]])


def recompute_activations(model, mode):
    """
    Trade compute for memory: drop what a block's forward stored, and compute it again when backward needs it.

    full       keeps the input of each block only, and costs one more forward pass: a third more FLOPs.
    selective  keeps what is expensive to compute and small to store: q, k, v, the output projection and attention.
               Computed again are norms, activations and the widest matrix, up, whose result is 5.25 C wide: 43 % of
               what a block stores.
    python -m tools.plan says what each saves. ValueError for another mode.
    """
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"recompute={mode!r}: there is none, selective and full")
    if mode == "none":
        return
    wide = model.config.ffn_width
    # The rank of adapters (posttrain/lora.py): their second product is as large as the matrix's, and cheap.
    rank = max((p.shape[0] for name, p in model.named_parameters() if name.endswith("lora_A.weight")), default=0)
    aten = torch.ops.aten
    # Which dimension of the second factor its result has: oneDNN (engine/hardware.py) takes a weight as it is.
    products = {aten.mm.default: 1, aten._scaled_mm.default: 1, torch.ops.apertus.linear.default: 0}
    attention = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.apertus.segment_attention.default,
        torch.ops.higher_order.flex_attention}

    def policy(ctx, op, *args, **kwargs):
        narrow = False
        if op in products:
            inner, outer = args[0].shape[-1], args[1].shape[products[op]]
            narrow = wide not in (inner, outer) and inner > rank
        keep = narrow or op in attention
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    how = dict(use_reentrant=False, preserve_rng_state=False)
    if mode == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        # torch.compile warns that nothing may be changed in place there, and in a block nothing is.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

    def recomputed(block, *args):
        # A function of ours: Dynamo skips files of torch, and with checkpoint() itself it would skip the whole block.
        return checkpoint(partial(type(block).forward, block), *args, **how)

    for block in model.model.layers:
        block.forward = recomputed.__get__(block)


# -----------------------------------------------------------------------------
# one step, spread over them


@contextlib.contextmanager
def gradients(net, ranks, last):
    """
    Around forward and backward of a micro-batch. last: it is the last one of this step.

    DDP communicates in the last one only. FSDP reduces after each, because a rank that kept whole gradients until the
    last would need 282 GB at 70B. In exact mode it does wait, since micro-batches must first be added in fp64.
    """
    if isinstance(net, DistributedDataParallel) and not last:
        with net.no_sync():
            yield
        return
    if ranks.sharded:
        net.set_requires_gradient_sync(last or not ranks.exact)
        net.set_requires_all_reduce(last)  # between the nodes of hsdp: once per step
    yield


def square_norm(model, ranks):
    """This rank's part of the squared L2 norm of all gradients, as a float. ranks.add() of it is the whole."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if ranks.sharded:
        grads = [g.to_local() for g in grads]
    if ranks.exact:
        return sum(g.double().square().sum() for g in grads).item() / ranks.copies
    norm = torch.nn.utils.get_total_norm(grads).item()
    return norm * norm / ranks.copies


# -----------------------------------------------------------------------------
# the end of a process


@contextlib.contextmanager
def stop_signals(names=("SIGTERM", "SIGUSR2")):
    """
    A list that fills when SIGTERM or SIGUSR2 arrives, or others of these names (on GPUs not SIGUSR1, which NCCL uses).
    The loop reads it between steps.

    The handler must do no more, since it may interrupt an all-reduce. A signal to one rank ends all of them, and
    torchrun, with exit code 0. torchrun itself passes a SIGTERM on to its ranks. It passes SIGUSR2 on only with
    --signals-to-handle, and then exits with 1 whatever they return; without, it dies of it and the ranks run on.
    """
    caught = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in names:
            if hasattr(signal, name):  # Windows has no SIGUSR1 and no SIGUSR2
                number = getattr(signal, name)
                before[number] = signal.signal(number, lambda received, frame: caught.append(received))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# What gloo and NCCL say in the RuntimeError of a rank whose peer is gone.
LOST = re.compile("gloo|NCCL|Connection closed by peer|Connection reset|[Tt]imed out")


@contextlib.contextmanager
def orderly_exit():
    """
    Around a script's run(): its exit code survives, and a rank that has lost another says so in one line.

    A process that a launcher started leaves by os._exit, because gloo's threads may abort an interpreter that shuts
    down in the usual way, with exit code -6.
    """
    found = launched()
    code = 1
    try:
        yield
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if not found:
            raise
    except BaseException as e:
        if not found:
            raise
        if isinstance(e, RuntimeError) and LOST.search(str(e)):
            print(f"rank {found[0]}: lost another rank ({str(e).strip().splitlines()[0][-120:]}). It died, or did not "
                  "answer within --timeout. What it said is the cause; --resume goes on from the last checkpoint",
                  file=sys.stderr)
        else:
            traceback.print_exc()
    finally:
        if dist.is_initialized() and not found:
            dist.destroy_process_group()
    if found:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
