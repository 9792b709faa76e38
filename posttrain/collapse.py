"""
Is the representation collapsing? SFT and QRPO log these numbers about the last layer.

Reward can rise while the features collapse into fewer and fewer directions. A model in that state stops learning.

    s = singular values of the last hidden states H (N tokens, C features), not centred       p = s / sum(s)
    effective rank    exp(-sum p log p)                                 Roy & Vetterli 2007
    PCA-99 % rank     the fewest directions that hold 99 % of sum(s^2)
    srank             the fewest directions that hold 99 % of sum(s)    Kumar et al. 2021
    feature rank      the number of s / sqrt(N) above .01               Lyle et al. 2022
    torch rank        the number of s above rounding errors, as torch.linalg.matrix_rank counts
    stable rank       sum(s^2) / max(s)^2
    dead units        the share of the last layer's xIELU inputs that are above 0 for no token
    pre-activation    the mean L2 norm of these inputs over tokens: it grows before the rank falls

Source: arXiv 2405.00662 and its code, which has the first five ranks and dead units. papers/ppo_collapse.py measures
PPO with the same functions. RMSNorm fixes the norm of H, so the norm that is logged is that of the xIELU inputs.

$ python -m posttrain.sft --init_from=out/laptop --rank_every=100        # rank_* in log.jsonl, every 100 steps
"""

import math

import torch

from engine.parallel import drop_gathered

RANKS = "effective", "pca99", "srank", "feature", "torch", "stable"


def spectrum(h):
    """
    {name: rank} of h (N, C), fp32 or fp64, by the definitions above.

    All lie in [0, min(N, C)]. They are 0 if h is zero, and nan if h is not finite.
    """
    finite = h.isfinite().all()
    if not finite or not h.any():
        return dict.fromkeys(RANKS, 0 if finite else math.nan)
    s = torch.linalg.svdvals(h.cpu() if h.is_mps else h)                # descending; torch 2.13 has no kernel for MPS
    energy = s.square()
    ranks = (
        torch.special.entr(s / s.sum()).sum().exp(),
        fewest(energy),
        fewest(s),
        (s / len(h) ** 0.5 > 0.01).sum(),
        (s > max(h.shape) * torch.finfo(h.dtype).eps * s[0]).sum(),
        energy.sum() / energy[0],
    )
    return {name: rank.item() for name, rank in zip(RANKS, ranks)}


def fewest(values):
    """The number of leading values, sorted from large to small, that make up 99 % of their sum."""
    return (values.cumsum(0) < 0.99 * values.sum()).sum() + 1


def dead_units(h):
    """(units,) bool: the columns of h (samples, units) that are never above 0. The same before and after ReLU."""
    return (h <= 0).all(0)


@torch.no_grad()
def diagnose(model, idx, keep):
    """
    The numbers above for token ids idx (B, T): {name in the log: number}.

    keep (B, T) bool: the positions that count. rank_tokens is their number N: with fewer than C of them
    the rank measures the batch, not the model.
    """
    inputs = []
    up = model.model.layers[-1].mlp.up_proj
    # Eager: a compiled forward pass would skip the hook.
    with torch.compiler.set_stance("force_eager"), up.register_forward_hook(lambda *call: inputs.append(call[-1])):
        h = model.hidden(idx)           # (B, T, C)
    drop_gathered(model)
    z = inputs[0][keep].float()         # (N, ffn_dim)
    return dict(
        rank_tokens=len(z),
        **{f"rank_{name}": rank for name, rank in spectrum(h[keep].float()).items()},
        dead_units=dead_units(z).float().mean().item(),
        preactivation=z.norm(dim=-1).mean().item(),
    )
