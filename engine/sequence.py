"""
Split a window of T positions over a group of P neighbouring ranks, T/P positions each, if it is too long for one GPU.

Everything but attention acts on each position by itself. Attention acts on each head by itself, so around it ranks
exchange positions for heads (DeepSpeed-Ulysses, arXiv 2309.14509): each gets all T positions of H/P query heads and of
the K/P key-value heads that these share. The sums are those of one process, and parameters collect gradients over ranks
as over micro-batches. Per block and direction it costs two all-to-alls of (B, H, T/P, D) and two of (B, K, T/P, D).

$ $NODE train.py $(python configs/long.py 8b 64k) --parallel=fsdp --sequence_parallel=8 --resume    # docs/scale.md
"""

import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd

from attention import attend

HEADS, POSITIONS = 1, 2            # dimensions of q, k and v


def exchange(x, ranks, give, take):
    """
    All-to-all within a window's ranks: part j of dimension `give` goes to rank j, and the parts that come are joined
    along dimension `take`.

    give heads, take positions: all heads of this rank's positions (B, H, T/P, D) -> some heads of all (B, H/P, T, D).
    """
    parts = torch.stack(x.chunk(ranks.sequence_parallel, give))    # (P, B, H/P, T/P, D)
    parts = all_to_all_single_autograd(parts, None, None, ranks.sequence_group)
    return torch.cat(parts.unbind(), take)


class WindowAttention:
    """attention.attend over whole windows, of which each rank of a group holds 1/P."""

    def __init__(self, ranks):
        self.ranks = ranks

    def attend(self, q, k, v, documents=None):
        """q, k, v (B, heads, T/P, D), documents: as in attention.attend -> (B, H, T/P, D)."""
        q, k, v = (exchange(x, self.ranks, HEADS, POSITIONS) for x in (q, k, v))
        return exchange(attend(q, k, v, documents), self.ranks, POSITIONS, HEADS)


def split_attention(model, ranks):
    """Let the layers of a model attend to whole windows, of which each rank of a group holds 1/P."""
    ranks.check_window(model.config)
    for block in model.model.layers:
        block.self_attn.attend_across_ranks(WindowAttention(ranks))
