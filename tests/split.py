"""
Windows split over ranks (engine/sequence.py): P = 2 or 4 of four ranks share a window, and each compares the result
with the whole window, which it also computes alone. test_parallel.py starts this script and fails on an AssertionError.
"""

import os

import pytest
import torch
import torch.distributed as dist
from tiny import small

from engine import checkpoint
from engine.exit import orderly_exit
from engine.parallel import Ranks, split_batch
from engine.recompute import recompute_activations
from engine.sequence import split_attention

# Two windows. Documents begin at 5, 13, 21 and 30, not at the cuts between ranks; the last quarter has no loss.
IDX = torch.arange(64).view(2, 32) * 7 % 97
DOC = (torch.arange(32) >= torch.tensor([[5, 21, 30], [13, 32, 32]])[..., None]).sum(1)
KEEP = (IDX % 2 == 0) & (torch.arange(32) < 24)
BATCH = IDX, (IDX + 7) % 97, KEEP, DOC


def step(dtype, ranks=None, mode="none", compiled=False):
    """The loss, all gradients and the loss of each token: of whole windows, or with ranks of this rank's part."""
    model, batch, mine = small(n_head=8, n_kv_head=4, n_embd=32).to(dtype), BATCH, slice(None)
    if ranks:
        split_attention(model, ranks)
        batch = split_batch(ranks, *BATCH)
        T = IDX.shape[1] // ranks.sequence_parallel
        mine = slice(ranks.sequence_rank * T, (ranks.sequence_rank + 1) * T)
    recompute_activations(model, mode)
    for block in model.model.layers if compiled else ():
        block.compile(backend="eager", fullgraph=True)  # a graph break would be an error
    loss = model.loss(*batch, n_tokens=KEEP.sum().item())
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    nll = torch.zeros(IDX.shape, dtype=dtype)
    idx, targets, _, *doc_and_positions = batch
    nll[:, mine] = model.nll(idx, targets, *doc_and_positions).to(dtype)
    return [loss.detach(), *gradients, nll]


def check(ranks, dtype, tolerance, *how):
    """Compare sums over ranks with the whole window's tensors. tolerance: share of a tensor's largest value."""
    for part, whole in zip(step(dtype, ranks, *how), step(dtype), strict=True):
        dist.all_reduce(part)
        assert (part / ranks.readers - whole).abs().max() <= tolerance * whole.abs().max()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with orderly_exit():
        ranks = Ranks("hsdp", False, 2, sequence_parallel=2)
        assert (ranks.readers, ranks.reader, ranks.sequence_rank) == (2, ranks.rank // 2, ranks.rank % 2)
        ranks.join("cpu", 60)
        # Else gloo asks for the address of the host's name, which a laptop or a container may lack.
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert ranks.mesh.get_group("shards")._get_backend(torch.device("cpu")).options._timeout.seconds == 60
        quarters = Ranks("ddp", sequence_parallel=4)
        quarters.sequence_group, _ = dist.new_subgroups(4)
        check(ranks, torch.float32, 2e-5)
        check(quarters, torch.float64, 1e-12, "selective")
        for how in (["full"], ["none", True]):
            check(ranks, torch.float64, 1e-12, *how)
        # If one rank cannot make the folder, all ranks raise at once.
        checkpoint.make_folder = str if ranks.is_main else os.readlink
        with pytest.raises(OSError):
            checkpoint.write("nowhere", 1, {}, {}, 0, None, ranks.save_group)
        ranks.leave()
