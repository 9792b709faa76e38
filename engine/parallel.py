"""
One step of training on many processes, with the same numbers as on one.

    batch    rank r of R takes samples r B/R ... (r+1) B/R - 1 of every step's B, so the data are the same for every R
    loss     a sum over the kept tokens of all ranks, divided by their number, so gradients of ranks and micro-batches
             add up
    ddp      each rank holds all weights, gradients and states (20 bytes a parameter); gradients are all-reduced once,
             after the last micro-batch
    fsdp     each rank holds 1/R of them (FSDP2). A block's weights are gathered just before it runs and freed after it;
             its gradients are reduce-scattered. Weights travel in bf16 (the embedding in fp32), gradients in fp32
    hsdp     fsdp inside a node, where links are fast, and one all-reduce of the shards between nodes

Flags (stop, save, ...) are agreed in an all-reduce of their own before a step, so all ranks stop in the same step.
Collectives and sharding are torch's. Added here is the order: recompute activations, compile, shard, then fill each
shard. Tensor and pipeline parallelism, which thousands of GPUs need (python -m tools.plan says when), are in
github.com/pytorch/torchtitan.

$ torchrun --nproc_per_node=8 --shutdown-timeout=600 --max-restarts=3 --signals-to-handle=SIGTERM,SIGINT,SIGUSR2 \\
  train.py configs/8b.py --parallel=fsdp --resume
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

import torch
import torch.distributed as dist

# -----------------------------------------------------------------------------
# the processes


def launched():
    """(rank, ranks, rank on this node, ranks on this node) from torchrun or srun; None without a launcher."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return tuple(map(int, (
            env["RANK"], env["WORLD_SIZE"], env.get("LOCAL_RANK", 0), env.get("LOCAL_WORLD_SIZE", 1))))
    ranks = int(env.get("SLURM_NTASKS", 1))
    if "SLURM_PROCID" not in env or ranks == 1:
        return None
    # srun starts one process per GPU and sets no address to meet at. Ranks meet on the first rank's node, the first of
    # "n[01-16]" (srun itself may run on a login node). Their port differs between jobs, and is below those from 32768
    # on, which Linux gives to connections.
    nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", env.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    env.setdefault("MASTER_ADDR", nodes.split(",")[0])
    env.setdefault("MASTER_PORT", f"{20000 + int(env.get('SLURM_JOB_ID', 0)) % 12000}")
    # "4(x2)": four on each of two nodes
    on_this_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))[0]
    return tuple(map(int, (env["SLURM_PROCID"], ranks, env["SLURM_LOCALID"], on_this_node)))


def check_split(what, parts, **wholes):
    """ValueError, one line, if one of these numbers cannot be split into these parts."""
    for name, n in wholes.items():
        if not 0 < parts <= n or n % parts:
            raise ValueError(f"{what}={parts} does not divide {name}={n}: take a divisor of that")


def choose_mode(mode, exact, is_launched, size, node):
    """
    The mode of a run of `size` processes, `node` of them on this node: none | ddp | fsdp | hsdp. ValueError for a mode
    that these processes cannot have.
    """
    if mode == "auto":
        mode = "hsdp" if size > node else "fsdp" if size > 1 else "none"
    if mode != "none" and not is_launched:
        raise ValueError(f"parallel={mode} wants a launcher: torchrun --nproc_per_node=2 train.py ... "
                         f"--parallel={mode}; one process alone is parallel=none")
    if mode == "none" and size > 1:
        raise ValueError(f"{size} processes were started and parallel=none is one: "
                         "say --parallel=ddp or --parallel=fsdp")
    if exact and mode == "ddp":
        raise ValueError("exact=True adds gradients in fp64, which FSDP can and DDP cannot: take --parallel=fsdp")
    # Even one process needs sharding, whose gradients are fp64 before they are added.
    return "fsdp" if exact and mode == "none" else mode


def sum_in_one_order():
    """Let this process add up numbers in the same order in every run."""
    import torch._inductor.config  # here, since it takes half a second

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")     # without it cuBLAS is not deterministic
    torch.set_num_threads(1)                               # two threads split a sum in two, which rounds it differently
    torch.use_deterministic_algorithms(True)
    torch._inductor.config.deterministic = True            # else it times several orders and takes the fastest


# A rank waits so many times longer for files of another than for its numbers, since file systems are slower than links.
SAVE_WAITS = 10


class Ranks:
    """
    The processes of a run: the rank of this one, how many there are (size), and the few things that they exchange.

    mode: none | ddp | fsdp | hsdp, or auto: none without a launcher, fsdp on one node, hsdp on several. exact: add
    gradients in fp64, so that 1, 2 and 4 processes end bit-exact; it needs sharding, even with one process. An fp32
    number has 24 bits and fp64 has 53, so sums of a few fp32 numbers are exact in any order, unless their magnitudes
    differ by more than 2^26. shard: with
    hsdp, how many ranks share one copy of the model; 0 = those of a node. P: neighbouring ranks that read the same
    samples and share each window. ValueError for settings that cannot work. No connection is opened before join().
    """

    def __init__(self, mode="none", exact=False, shard=0, P=1):
        # A single process inside a Slurm job has srun's variables too. With mode none only torchrun's count.
        ids = launched() if mode != "none" or "WORLD_SIZE" in os.environ else None
        self.rank, self.size, self.local, node = ids or (0, 1, 0, 1)
        self.node = node                                   # ranks on this node
        self.mode = choose_mode(mode, exact, is_launched=bool(ids), size=self.size, node=node)
        self.exact = exact
        self.is_main = self.rank == 0
        self.sharded = self.mode in ("fsdp", "hsdp")
        # How many ranks share one copy of the weights, and how many copies there are.
        self.shard = self.replicas = 1
        self.shard_over(dict(fsdp=self.size, hsdp=shard or node).get(self.mode, 1))
        # Which samples this rank reads: those of `group`, one of `groups`. P neighbours that share each window are one
        # group, in which this rank computes slice `window_slice` of the positions (engine/sequence.py).
        check_split("sequence_parallel", P, processes=self.size)
        if exact and P > 1:
            raise ValueError("exact=True is bit-exact on any number of ranks, and sums over a split window "
                             "round differently: leave it out, or take --sequence_parallel=1")
        self.P, self.groups = P, self.size // P
        self.group, self.window_slice = divmod(self.rank, P)
        # From join() to leave(): the process groups that write checkpoints, agree on flags and share a window; the
        # mesh, the device.
        self.save_group = self.flag_group = self.window_group = self.mesh = self.device = self.save_wait = None

    def shard_over(self, shard):
        """Let this number of ranks share one copy of the weights. Before join()."""
        check_split("hsdp_shard", shard, processes=self.size)
        self.shard, self.replicas = shard, self.size // shard

    def local_device(self, device):
        """The device of this rank: cuda becomes cuda:LOCAL_RANK. ValueError if it has no GPU."""
        if device == "mps" and self.mode != "none":
            raise ValueError("device=mps is one GPU for one process, without fp64: take --device=cpu, or leave "
                             "--parallel and --exact out")
        if device != "cuda":
            return device
        gpus = torch.cuda.device_count()
        # With srun --gpus-per-task=1 each process sees one GPU, its own.
        if gpus == 1 and "SLURM_GPUS_PER_TASK" in os.environ:
            return "cuda:0"
        if self.local >= gpus:
            raise ValueError(f"process {self.local} of this node has no GPU of its own: there are {gpus}, "
                             f"so --nproc_per_node={gpus}")
        return f"cuda:{self.local}"

    def micro_batch(self, batch_size, micro_batch):
        """Samples in memory at once on each rank. ValueError if the batch cannot be split like that."""
        if batch_size < 1 or micro_batch < 1:
            raise ValueError(f"batch_size={batch_size} and micro_batch={micro_batch} must be at least 1")
        # exact adds up the same micro-batches for every number of ranks, so they are never made smaller.
        micro = micro_batch if self.exact else min(micro_batch, max(1, batch_size // self.groups))
        if batch_size % (micro * self.groups):
            raise ValueError(f"batch_size={batch_size} is not a multiple of micro_batch={micro_batch} on each of "
                             f"{self.groups} processes")
        return micro

    def join(self, device, timeout):
        """Meet the other ranks: nccl on CUDA, gloo on CPU. timeout: seconds that a rank waits for another."""
        kind = torch.device(device).type
        if kind == "cuda":
            torch.cuda.set_device(device)
        if self.mode == "none":
            return
        if self.size == self.node and os.name == "posix":
            # By default gloo looks up the host's name, and laptops and containers often have one without an address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        wait = timedelta(seconds=timeout)
        # A single process needs no network: a store in its own memory will do.
        store = dist.HashStore() if self.size == 1 else self.store(wait)
        backend = "nccl" if kind == "cuda" else "gloo"
        # Of all groups: also of those that a mesh makes, which has no setting for it (pytorch issue 119613).
        dist.distributed_c10d.default_pg_timeout = dist.distributed_c10d.default_pg_nccl_timeout = wait
        dist.init_process_group(backend, None, wait, self.size, self.rank, store)
        self.save_wait = SAVE_WAITS * wait
        self.renew_save_group()
        self.flag_group = dist.new_group(backend="gloo")
        self.device = device
        shape = (self.replicas, self.shard) if self.mode == "hsdp" else (self.size,)
        self.mesh = dist.init_device_mesh(kind, shape, mesh_dim_names=("replicas", "shards")[-len(shape):])
        if self.P > 1:
            self.window_group, _ = dist.new_subgroups(self.P)
        if self.exact:
            sum_in_one_order()

    def store(self, wait):
        """
        Where ranks find each other's addresses. torchrun has one for all its restarts, in which new ranks would find
        the addresses of dead ones (pytorch issue 135712), so each restart has a prefix of its own.
        """
        if self.size != self.node and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and \
                os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
            # Agents of several nodes count their restarts apart.
            raise ValueError("torchrun restarts ranks of several nodes only with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
                             "in the environment: set it, or take --max-restarts=0")
        store, _, _ = next(dist.rendezvous("env://", timeout=wait))
        return dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    def renew_save_group(self):
        """
        Connect the threads that write checkpoints while training continues. A timeout breaks gloo's connections, so
        they are made anew after a failed save. Every rank must call this.
        """
        if self.mode != "none":
            self.save_group = dist.new_group(backend="gloo", timeout=self.save_wait)

    def all_reduce(self, *numbers):
        """Sums over ranks, in fp64, of a few numbers or 0-d tensors: the same floats on every rank."""
        total = torch.tensor([float(x) for x in numbers], dtype=torch.float64)
        if self.size > 1:
            total = total.to(self.device)
            dist.all_reduce(total)
        return total.tolist()

    def any_rank(self, **flags):
        """{name: whether it is set on any rank}. On the CPU, since a GPU would first finish all queued kernels."""
        if self.size > 1:
            counts = torch.tensor([float(flag) for flag in flags.values()])
            dist.all_reduce(counts, group=self.flag_group)
            flags = dict(zip(flags, map(bool, counts.tolist())))
        return flags

    def leave(self):
        """Close the connections. Barrier: no rank exits while another still needs it."""
        if not self.save_group:
            return
        dist.barrier(self.save_group)
        dist.destroy_process_group()
        self.save_group = None


# -----------------------------------------------------------------------------
# the model, on all of them


def distribute(model, ranks, device, recompute="none", compiled=False):
    """
    Recompute activations, compile each block (or, with compiled="activations", xIELU alone), shard: in this order.
    Changes the model.

    A model to be sharded is on the meta device, and memory is allocated for this rank's shards only. A model that has
    memory is not sharded again.
    """
    from engine.recompute import recompute_activations  # here, since only a run needs it

    recompute_activations(model, recompute)
    if compiled == "activations":
        model.compile_activations()
    elif compiled:
        model.compile_parts()
    if ranks.sharded and next(model.parameters()).is_meta:
        from engine.sharding import shard
        shard(model, ranks)
        model.to_empty(device=device)


def local(t):
    """The tensor, or this rank's shard of a DTensor."""
    return t.to_local() if hasattr(t, "to_local") else t


def drop_gathered(model):
    """
    Free the weights that FSDP keeps gathered for a backward pass (head, last norm). Call it after a forward pass
    without one, or the next checkpoint finds other tensors than the optimizer knows.
    """
    if hasattr(model, "reshard"):
        model.reshard()


# -----------------------------------------------------------------------------
# one step, on all of them


def split_batch(ranks, idx, targets, keep, doc):
    """
    The positions of a batch (B, T) that this rank computes if P ranks share each window, and their numbers (T/P,):
    arguments of Apertus.loss. doc stays whole, since attention needs it.
    """
    numbers = torch.arange(idx.shape[1], device=idx.device)
    idx, targets, keep, numbers = (x.chunk(ranks.P, -1)[ranks.window_slice] for x in (idx, targets, keep, numbers))
    return idx, targets, keep, doc, numbers


def set_gradient_sync(model, ranks, is_last):
    """
    Say before a micro-batch whether sharded gradients are added over ranks after it. is_last: it ends the step.

    FSDP adds them after each micro-batch, because a rank that kept whole gradients until the last would need 282 GB at
    70B. With --exact it waits for the last, since micro-batches must first be added in fp64. Between the nodes of hsdp
    they are added after the last.
    """
    if ranks.sharded:
        model.set_requires_gradient_sync(is_last or not ranks.exact)
        model.set_requires_all_reduce(is_last)


def gradients(model):
    """All gradients as a list; for sharded parameters, this rank's rows."""
    return [local(p.grad) for p in model.parameters() if p.grad is not None]


def reduce_step(model, ranks, sums):
    """
    Add up gradients and some numbers over all ranks, once a step. sums: the numbers of this rank, losses or log-probs,
    of any shape. Returns their sums, a list of floats, and the L2 norm of the gradient, all the same on every rank.
    """
    if ranks.mode == "ddp":                                # FSDP has added its gradients
        for grad in gradients(model):
            dist.all_reduce(grad)
    *sums, square = ranks.all_reduce(*sums.view(-1), square_norm(model, ranks))
    return sums, math.sqrt(square)


def check_finite(step, losses, norm):
    """ValueError if a loss or the gradient's norm is not finite. To be called before the update."""
    if not math.isfinite(sum(losses) + norm):
        raise ValueError(f"step {step}: loss {losses[0]}, gradient norm {norm}. Stopped before the update, so no "
                         "checkpoint holds it. Try a lower --lr, a longer warm-up, or --dtype=float32")


def square_norm(model, ranks):
    """
    This rank's part of the squared L2 norm of all gradients, a float.

    Summed in fp64: in fp32 the norms of shards and of whole tensors differ by 2e-6, and so do clipped updates.
    """
    grads = gradients(model)
    # MPS has no fp64.
    dtype = torch.float32 if grads[0].is_mps else torch.float64
    norms = torch.stack(torch._foreach_norm(grads, dtype=dtype))
    return norms.square().sum().item() / ranks.replicas


# -----------------------------------------------------------------------------
# the end of a process


def catch_signals(*names):
    """
    A list that fills when one of these signals arrives. The loop reads it between micro-batches; the handler must do no
    more, since it may interrupt an all-reduce.

    A signal to one rank ends all of them, and torchrun, with exit code 0. torchrun passes a SIGTERM on to its ranks,
    and kills them after --shutdown-timeout, 30 seconds by default: too few to save the 8B. It passes SIGUSR2 on only
    with --signals-to-handle; without that, it dies and the ranks continue.
    """
    caught = []
    # Windows has no SIGUSR1 and SIGUSR2. Only the main thread may set handlers, not a notebook's worker.
    for name in names:
        if hasattr(signal, name) and threading.current_thread() is threading.main_thread():
            signal.signal(getattr(signal, name), lambda received, frame: caught.append(received))
    return caught


# What gloo and NCCL say in the RuntimeError of a rank whose peer is gone.
LOST = re.compile(
    ".{0,90}(gloo|remote process|was aborted|Connection closed by peer|Connection reset|[Tt]ime(d |)out).{0,90}")


@contextlib.contextmanager
def orderly_exit():
    """
    Around a script's run(): its exit code survives, and a rank that has lost another prints one line.

    A process that a launcher started leaves by os._exit, because gloo's threads may abort a normal shutdown of the
    interpreter with exit code -6.
    """
    found, code = launched(), 1
    try:
        yield
        code = 0
    except BaseException as e:
        if not found:
            raise
        if isinstance(e, SystemExit):
            code = e.code or 0
        elif isinstance(e, RuntimeError) and (lost := LOST.search(str(e))):
            print(f"rank {found[0]}: lost another rank ({lost[0]}). It died, or did not answer within --timeout. Its "
                  "message is the cause; --resume continues from the last checkpoint", file=sys.stderr)
        else:
            traceback.print_exc()
    finally:
        if found:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        if dist.is_initialized():
            dist.destroy_process_group()
