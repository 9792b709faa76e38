"""
Windows over ranks (engine/sequence.py): each of four ranks holds its part of a window, for P = 2 and 4, against the
whole window, which it computes by itself. Started by test_parallel.py; an AssertionError is a failure there.
"""
import torch
import torch.distributed as dist

from engine.parallel import orderly_exit
from engine.recompute import recompute_activations
from engine.sequence import HEADS, POSITIONS, SplitForward, SplitRanks, exchange, split_attention
from tiny import small


def model_of(dtype, ranks=None):
    """A model; with ranks, one whose windows they share."""
    model = small(n_head=8, n_kv_head=4, n_embd=32).to(dtype)
    if ranks:
        model.__class__ = type("Split", (SplitForward, type(model)), {})
        model.ranks = ranks
        split_attention(model, ranks)
    return model


def batch():
    """Two windows: documents end at 5, 13, 21 and 30, across the cuts; the last quarter has no loss at all."""
    draw = torch.Generator().manual_seed(1)
    idx = torch.randint(97, (2, 32), generator=draw)
    ends = torch.tensor([[5, 21, 30], [13, 32, 32]])
    doc = (torch.arange(32) >= ends[..., None]).sum(1)
    keep = torch.rand(2, 32, generator=draw) < 0.5
    keep[:, 24:] = False
    return idx, (idx + 7) % 97, keep, doc


def step(model, tensors, P=1):
    """The loss and all gradients. Each of the P ranks has counted all tokens of the window."""
    _, loss = model(*tensors, n_tokens=P * tensors[2].sum().item())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def close(found, wanted, times, tolerance):
    """Sums over ranks are `times` those of the whole, to a share of the largest number of each tensor."""
    for a, b in zip(found, wanted, strict=True):
        dist.all_reduce(a)
        off = (a / times - b).abs().max() / b.abs().max()
        assert off <= tolerance, off


def check(ranks):
    tensors = batch()
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        wanted = step(model_of(dtype), tensors)
        for mode in ("none", "full", "selective"):
            part = model_of(dtype, ranks)
            recompute_activations(part, mode)
            close(step(part, tensors, ranks.P), wanted, ranks.groups, tolerance)
    part = model_of(dtype, ranks)
    # Losses come back P times as large, since each rank has counted all tokens.
    nll, whole = (model(*tensors, per_token=True)[1] for model in (part, model_of(dtype)))
    close([nll], [whole], ranks.size, tolerance)
    for block in part.model.layers:
        block.compile(backend="eager", fullgraph=True)     # a graph break would be an error
    close(step(part, tensors, ranks.P), wanted, ranks.groups, tolerance)
    x = torch.randn(2, 4, 8, 4).bfloat16()
    there = exchange(x, ranks, HEADS, POSITIONS)
    assert there.shape == (2, 4 // ranks.P, 8 * ranks.P, 4)
    assert exchange(there, ranks, POSITIONS, HEADS).equal(x)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with orderly_exit():
        halves = SplitRanks(2, "ddp")
        halves.join("cpu", 60)
        check(halves)
        quarters = SplitRanks(4, "ddp")
        quarters.window, _ = dist.new_subgroups(4)
        check(quarters)
        halves.leave()
