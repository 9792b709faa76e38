"""
What each rank of a split window computes, for test_parallel.py: run on four ranks, it writes what it found to a file.

Every rank knows the whole batch and the whole model, so each holds its own part, P = 2 and P = 4, against the whole.
"""
import json
import sys

import torch
import torch.distributed as dist

from engine import parallel
from model import Apertus, ApertusConfig

CONFIG = ApertusConfig(block_size=32, vocab_size=61, n_layer=2, n_head=8, n_kv_head=4, n_embd=32, ffn_dim=48,
                       init_std=0.3)


def model_of(dtype, recompute="none"):
    model = Apertus(CONFIG).to(dtype)
    parallel.recompute_activations(model, recompute)
    return model


def batch():
    """Two windows: documents end at 5, 21 and 30, so that each of four stretches lies in another mixture of them."""
    draw = torch.Generator().manual_seed(1)
    idx = torch.randint(61, (2, 32), generator=draw)
    doc = torch.zeros(2, 32, dtype=torch.long)
    for end in (5, 21, 30):
        doc[0, end:] += 1
    doc[1, 13:] += 1
    keep = torch.rand(2, 32, generator=draw) < 0.5
    keep[:, 24:] = False                                   # the last quarter has no loss at all
    return idx, (idx + 7) % 61, keep, doc


def step(model, tensors, n_tokens, split=None):
    """The loss and all gradients, of a whole window or of this rank's part."""
    idx, targets, keep, doc = tensors
    loss = model(idx, targets, keep, doc, n_tokens=n_tokens, split=split)[1]
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def difference(found, wanted):
    """The largest difference relative to the largest value of each tensor, over all tensors."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted))


def added_up(tensors, groups):
    """Sums over all ranks, on each of which `groups` groups have computed the same windows."""
    for tensor in tensors:
        dist.all_reduce(tensor)
    return [tensor / groups for tensor in tensors]


def findings(P):
    """{claim: difference} of a window over P of the four ranks."""
    ranks = parallel.Ranks("ddp", sequence=P)
    ranks.join("cpu", 60)
    whole = batch()
    mine = ranks.cut(*whole)
    n_tokens = whole[2].sum().item()
    found = {}
    for dtype in (torch.float32, torch.float64):
        wanted = step(model_of(dtype), whole, n_tokens)
        for recompute in ("none", "full", "selective"):
            part = step(model_of(dtype, recompute), mine, n_tokens, ranks.split)
            found[f"{dtype} {recompute}"] = difference(added_up(part, ranks.groups), wanted)
    model = model_of(dtype)
    model.compile_blocks(backend="eager", fullgraph=True)  # a graph break would be an error
    part = step(model, mine, n_tokens, ranks.split)
    found["compiled"] = difference(added_up(part, ranks.groups), wanted)
    x = torch.randn(2, 4, 8, 4).bfloat16()
    there = ranks.split.by_heads(x)
    found["bf16"] = float(not torch.equal(ranks.split.by_positions(there), x) or there.shape != (2, 4 // P, 8 * P, 4))
    ranks.leave()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    P, path = sys.argv[1:]
    rank, *_ = parallel.launched()
    found = findings(int(P))
    with open(f"{path}.{rank}", "w", encoding="utf-8") as f:
        json.dump(found, f)
