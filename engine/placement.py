"""
Which process of a run this is, and its share of the samples, of the weights and of this node's devices.

Numbers alone: no connection is opened. engine/parallel.py connects the processes.
"""

import math
import os

import torch


def launched():
    """(rank, ranks, rank on this node, ranks on this node), as torchrun has set them; None without torchrun."""
    names = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    if "WORLD_SIZE" not in os.environ:
        return None
    return tuple(int(os.environ.get(name, default)) for name, default in names.items())


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


class Placement:
    """
    The rank of this process, how many ranks there are (size), and what this one reads and holds.

    mode: none | ddp | fsdp | hsdp, or auto: none without a launcher, fsdp on one node, hsdp on several. exact: add
    gradients in fp64, so that 1, 2 and 4 processes end bit-exact; it needs sharding, even with one process. hsdp_shard:
    how many ranks share one copy of the model; 0 = those of a node. sequence_parallel: neighbouring ranks that
    read the same samples and share each window. ValueError for settings that cannot work.
    """

    def __init__(self, mode, exact, hsdp_shard, sequence_parallel):
        self.rank, self.size, self.local_rank, self.ranks_on_node = launched() or (0, 1, 0, 1)
        self.mode = choose_mode(mode, exact, is_launched=bool(launched()), size=self.size, node=self.ranks_on_node)
        self.is_main = self.rank == 0
        # Gradients and losses. An fp32 number has 24 bits and fp64 has 53, so fp64 sums of a few fp32 numbers are exact
        # in any order, unless their magnitudes differ by more than 2^26.
        self.exact = exact
        self.sum_dtype = torch.float64 if exact else torch.float32
        # Weights: how many ranks share one copy of them, and how many copies there are.
        self.sharded = self.mode in ("fsdp", "hsdp")
        self.shard_size = dict(fsdp=self.size, hsdp=hsdp_shard or self.ranks_on_node).get(self.mode, 1)
        check_split("hsdp_shard", self.shard_size, processes=self.size)
        self.replicas = self.size // self.shard_size
        # Samples: this rank takes the share `reader` of `readers` equal ones. Neighbours that share each window read
        # the same samples, and this one computes slice `sequence_rank` of the positions (engine/sequence.py).
        check_split("sequence_parallel", sequence_parallel, processes=self.size)
        if exact and sequence_parallel > 1:
            raise ValueError("exact=True is bit-exact on any number of ranks, and sums over a split window "
                             "round differently: leave it out, or take --sequence_parallel=1")
        self.sequence_parallel, self.readers = sequence_parallel, self.size // sequence_parallel
        self.reader, self.sequence_rank = divmod(self.rank, sequence_parallel)

    def local_device(self, device):
        """The device of this rank: cuda becomes cuda:LOCAL_RANK. ValueError if it has no GPU."""
        if device == "mps" and self.mode != "none":
            raise ValueError("device=mps is one GPU for one process, without fp64: take --device=cpu, or leave "
                             "--parallel and --exact out")
        if device != "cuda":
            return device
        gpus = torch.cuda.device_count()
        if self.local_rank >= gpus:
            raise ValueError(f"process {self.local_rank} of this node has no GPU of its own: there are {gpus}, "
                             f"so --nproc_per_node={gpus}")
        return f"cuda:{self.local_rank}"

    def check_window(self, shape):
        """ValueError if these ranks cannot share the windows and heads of a model. shape: ApertusConfig."""
        check_split("sequence_parallel", self.sequence_parallel, block_size=shape.block_size, n_kv_head=shape.n_kv_head)

    def check_batch(self, batch_size, micro_batch):
        """ValueError if the batch cannot be split into such micro-batches on each rank."""
        if batch_size < 1 or micro_batch < 1:
            raise ValueError(f"batch_size={batch_size} and micro_batch={micro_batch} must be at least 1")
        share, rest = divmod(batch_size, self.readers)      # of each group of ranks
        if rest or share % micro_batch:
            advice = f": take --micro_batch={math.gcd(share, micro_batch)}" if share and not rest else ""
            raise ValueError(f"batch_size={batch_size} is not a multiple of micro_batch={micro_batch} on each of "
                             f"{self.readers} processes{advice}")
