"""
One step of training, spread over many processes, in the same numbers.

    batch    rank r of R takes samples r B/R ... (r+1) B/R - 1 of every step's B, so any R sees the same data
    loss     a sum over the kept tokens of all ranks, divided by their number: gradients of ranks and micro-batches simply add up
    ddp      every rank holds all weights, gradients and states (20 bytes a parameter); gradients are all-reduced
    fsdp     every rank holds 1/R of them (FSDP2). A block's weights are gathered just before it runs and dropped after it; its
             gradients are reduce-scattered. Weights travel in bf16, gradients in fp32
    hsdp     fsdp inside a node, where links are fast, and one all-reduce of the shards between nodes

Any rank that is stopped, or meets a NaN, stops all of them in the same step: the flags ride in the all-reduce of the loss. All of this is
torch's own; what is added here is the order of things: recompute activations, compile, shard, then initialise each shard. Tensor and
pipeline parallelism, which thousands of GPUs need (python -m tools.plan says from where on), are in github.com/pytorch/torchtitan.

$ torchrun --nproc_per_node=8 train.py configs/8b.py --parallel=fsdp
"""

import contextlib
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

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from engine.hardware import keep_freed_memory

MODES = ("none", "ddp", "fsdp", "hsdp")


def launched():
    """(rank, ranks, rank on this node, ranks on this node) from torchrun's environment, or from srun's; None without a launcher."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
    if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", 1)) > 1:      # srun starts one process a GPU; they meet at the first node
        env.setdefault("MASTER_ADDR", env.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
        env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000))
        per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or "1"         # "4(x2)": four on each of two
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", 0)), int(re.match(r"\d+", per_node)[0])
    return None


class Ranks:
    """
    The processes of a run: which one this is (rank), of how many (size), and the few things that they tell each other.

    mode: none | ddp | fsdp | hsdp. exact: gradients are added in fp64, so that the order of ranks leaves no trace (1, 2 and 4 processes
    end in the same bits); needs sharding, also of one process. shard: hsdp's ranks that share one copy; 0 = those of a node.
    ValueError for what cannot work, before anything is opened: join() opens.
    """

    def __init__(self, mode="none", exact=False, shard=0):
        if mode not in MODES:
            raise ValueError(f"parallel={mode!r}: there is {', '.join(MODES)}")
        found = launched() if mode != "none" or "WORLD_SIZE" in os.environ else None
        if mode != "none" and not found:
            raise ValueError(f"parallel={mode} wants a launcher: torchrun --nproc_per_node=2 train.py ... --parallel={mode}; "
                             "one process alone is parallel=none")
        self.launched = bool(found)
        self.rank, self.size, self.local, node = found or (0, 1, 0, 1)
        if mode == "none" and self.size > 1:
            raise ValueError(f"{self.size} processes were started and parallel=none is one: say --parallel=ddp or --parallel=fsdp")
        if exact and mode == "ddp":
            raise ValueError("exact=True adds gradients in fp64, which FSDP can and DDP cannot: take --parallel=fsdp")
        self.mode, self.exact, self.joined, self.files = "fsdp" if exact and mode == "none" else mode, exact, False, None
        self.first, self.sharded = self.rank == 0, self.mode in ("fsdp", "hsdp")
        self.shard = (shard or node) if mode == "hsdp" else self.size
        if self.size % self.shard:
            near = nearest_divisors(self.size, self.shard)
            raise ValueError(f"hsdp_shard={self.shard} does not divide {self.size} processes: try {near}")
        self.copies = self.size if self.mode == "ddp" else self.size // self.shard      # ranks that hold the same gradient

    def place(self, device):
        """The device of this rank: cuda becomes cuda:LOCAL_RANK."""
        if self.exact and device == "mps":
            raise ValueError("exact=True adds in fp64, which mps does not have: take --device=cpu, or leave --exact out")
        if self.mode != "none" and device == "mps":
            raise ValueError("device=mps is one GPU for one process: take --parallel=none, or --device=cpu")
        if not self.launched or device != "cuda":
            return device
        if self.local >= torch.cuda.device_count():
            raise ValueError(f"process {self.local} of this node has no GPU of its own: there are {torch.cuda.device_count()}, "
                             f"so --nproc_per_node={torch.cuda.device_count()}")
        return f"cuda:{self.local}"

    def micro_batch(self, batch_size, micro_batch):
        """Samples in memory at once on each rank. ValueError, with the nearest that do, if the batch cannot be split."""
        if batch_size % self.size:
            near, batch = nearest_divisors(batch_size, self.size), max(1, round(batch_size / self.size)) * self.size
            raise ValueError(f"batch_size={batch_size} cannot be split over {self.size} processes: {near} can, or --batch_size={batch}")
        each = batch_size // self.size
        micro = micro_batch if self.exact else min(micro_batch, each)       # the exact mode adds up the same micro-batches everywhere
        if micro < 1 or each % micro:
            here = f"batch_size={batch_size}" if self.size == 1 else f"batch_size={batch_size} over {self.size} processes, {each} each,"
            raise ValueError(f"{here} is not a multiple of micro_batch={micro_batch}: try --micro_batch={math.gcd(each, max(micro, 1))}")
        return micro

    def join(self, device, timeout):
        """Meet the other ranks: nccl on CUDA, gloo on CPU. timeout: seconds that a rank waits for another before it gives up."""
        if torch.device(device).type == "cpu":
            keep_freed_memory()
        if self.mode == "none":
            return
        kind = torch.device(device).type
        if kind == "cuda":
            torch.cuda.set_device(device)
        alone = {} if self.launched else dict(store=dist.HashStore())       # nobody to meet: no network
        wait = timedelta(seconds=timeout)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=wait, rank=self.rank, world_size=self.size, **alone)
        self.files = dist.new_group(backend="gloo", timeout=wait)           # checkpoints, written behind the training: their own line
        self.device, self.joined = device, True
        both = dict(mesh_shape=(self.size // self.shard, self.shard), mesh_dim_names=("copies", "shards"))
        self.mesh = init_device_mesh(kind, **(both if self.mode == "hsdp" else dict(mesh_shape=(self.size,))))
        if self.exact:
            self.before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.set_num_threads(1)                                        # two threads split a sum in two: 1.5e-8 in the weights
            torch.use_deterministic_algorithms(True)

    def add(self, *numbers):
        """Sums over ranks, in fp64, of a few numbers or 0-d tensors: the same floats on every rank."""
        if self.size == 1:
            return [float(x) for x in numbers]
        total = torch.tensor([float(x) for x in numbers], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def leave(self):
        """All are done: nobody goes while another still needs him."""
        if self.joined:
            dist.barrier(self.files)
            dist.destroy_process_group()
            self.joined, self.files = False, None
            if self.exact:
                torch.set_num_threads(self.before[0])
                torch.use_deterministic_algorithms(self.before[1])


def nearest_divisors(n, near):
    """'4 or 6' for n = 12, near = 5: the divisors of n below and above."""
    below = next(d for d in range(min(near, n), 0, -1) if n % d == 0)
    above = next((d for d in range(near, n + 1) if n % d == 0), below)
    return " or ".join(map(str, sorted({below, above})))


# -----------------------------------------------------------------------------
# the model, spread


def spread(model, ranks, device, seed, recompute="none", compiled=False):
    """
    Recompute activations, compile each block, shard, initialise: in this order. Returns what training calls: the model, or DDP's wrapper.

    With ranks.sharded the model comes on the meta device, and only this rank's shards are ever allocated. Initial weights depend on
    (seed, name) alone, so every world size starts from the same ones.
    """
    recompute_activations(model, recompute)
    if compiled:
        model.compile_blocks()
    if ranks.mode == "ddp":
        net = DistributedDataParallel(model)
        net.register_comm_hook(None, add_up)
        return net
    if ranks.sharded:
        shard(model, ranks.mesh, model.dtype, torch.float64 if ranks.exact else torch.float32)
        model.to_empty(device=device)
        init_shards(model, seed)
    return model


def shard(model, mesh, dtype, reduce_dtype=torch.float32):
    """FSDP2: each block, the embedding, and the rest (head, last norm) are gathered for themselves. Gradients are added, not averaged."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard    # a second
    policy = MixedPrecisionPolicy(param_dtype=dtype if dtype == torch.bfloat16 else None, reduce_dtype=reduce_dtype)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if not model.config.tie_embeddings:
        fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):                                  # FSDP's own mean times R would be exact for R = 2^n only
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def drop_gathered(net):
    """After a forward pass that no backward follows: FSDP has kept the outermost weights (head, last norm) gathered for it."""
    if hasattr(net, "reshard"):
        net.reshard()


def add_up(_, bucket):
    """DDP's communication hook: the sum of a bucket's gradients over ranks, where DDP itself would take the mean."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


@torch.no_grad()
def init_shards(model, seed):
    """Apertus.init_weights, one parameter at a time: drawn whole (70B: 1.4 GB at most), cut and forgotten. No rank holds the model."""
    from torch.distributed.tensor import distribute_tensor

    def whole_parameters():
        for name, p in model.named_parameters():
            full = torch.empty(p.shape, dtype=p.dtype, device="cpu")
            yield name, full                                                # init_weights fills it
            mine = distribute_tensor(full.to(p.device), p.device_mesh, p.placements, src_data_rank=None)    # None: each cuts, none sends
            p.to_local().copy_(mine.to_local())
    type(model).init_weights(SimpleNamespace(config=model.config, named_parameters=whole_parameters), seed)


def recompute_activations(model, mode):
    """
    Trade memory for compute in backward: wrap each block's forward, so that what it stored is dropped and computed again when needed.

    full keeps each block's input only, and costs one more forward pass: a third more FLOPs. selective keeps what is dear to compute and
    small to store: q, k, v, the output projection and attention; it computes again norms, activations and the widest matrix, up: 43 % of
    what a block stores is 5.25 C wide. python -m tools.plan says what each saves.
    """
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"recompute={mode!r}: there is none, selective and full")
    if mode == "none":
        return
    wide = model.config.ffn_width
    aten = torch.ops.aten
    attention = {aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
                 aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
                 torch.ops.apertus.segment_attention.default, torch.ops.higher_order.flex_attention}

    def policy(ctx, op, *args, **kwargs):
        narrow = op is aten.mm.default and wide not in (args[0].shape[-1], args[1].shape[-1])
        return CheckpointPolicy.MUST_SAVE if narrow or op in attention else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy) if mode == "selective" else noop_context_fn
    for block in model.model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=context)


# -----------------------------------------------------------------------------
# one step, spread


@contextlib.contextmanager
def gradients(net, ranks, last):
    """
    Around forward and backward of a micro-batch; last: of this step's last one. DDP communicates in the last one only. FSDP reduces after
    each, because a rank that kept whole gradients would need 282 GB at 70B; except in exact mode, which adds micro-batches in fp64 first.
    """
    if isinstance(net, DistributedDataParallel) and not last:
        with net.no_sync():
            yield
        return
    if ranks.sharded:
        net.set_requires_gradient_sync(last or not ranks.exact)
        net.set_requires_all_reduce(last)                                   # between hsdp's nodes: once a step
    yield


def square_norm(model, ranks):
    """This rank's part of the squared L2 norm of all gradients; ranks.add() makes it whole."""
    grads = [p.grad.to_local() if ranks.sharded else p.grad for p in model.parameters() if p.grad is not None]
    if ranks.exact:
        return sum(g.double().square().sum() for g in grads).item() / ranks.copies
    norm = torch.nn.utils.get_total_norm(grads).item()
    return norm * norm / ranks.copies


@contextlib.contextmanager
def stop_signals():
    """
    A list that fills when SIGTERM or SIGUSR2 arrives (not SIGUSR1: NCCL takes it). The loop looks at it between steps: a handler must do
    no more, since it may interrupt an all-reduce. One rank's signal ends all ranks, and torchrun, with exit code 0. torchrun itself hands a
    SIGTERM on, SIGUSR2 only with --signals-to-handle (without: it dies and the ranks run on), and then exits with 1 whatever they return.
    """
    caught, before = [], {}
    if threading.current_thread() is threading.main_thread():
        here = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR2") if hasattr(signal, name)]      # Windows has no SIGUSR2
        before = {s: signal.signal(s, lambda number, frame: caught.append(number)) for s in here}
    try:
        yield caught
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out", "timed out")


@contextlib.contextmanager
def orderly_exit():
    """
    Around a script's run(): the exit code survives, and a rank that lost the others says so in one line. A process that was in a group
    leaves by os._exit: gloo's threads abort an interpreter that shuts down in the usual way (4 ranks: exit code -6 in 2 to 4 of 6 runs).
    """
    code = 1
    try:
        yield
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if not launched():
            raise
    except BaseException as e:
        if not launched():
            raise
        if isinstance(e, RuntimeError) and any(word in str(e) for word in LOST):
            print(f"rank {launched()[0]}: lost another rank ({str(e).strip().splitlines()[0][-120:]}). It died, or did not answer within "
                  "--timeout. What it said is the cause; --resume goes on from the last checkpoint", file=sys.stderr)
        else:
            traceback.print_exc()
    finally:
        if dist.is_initialized() and not launched():
            dist.destroy_process_group()
    if launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
