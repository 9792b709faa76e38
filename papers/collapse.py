"""
Is a representation collapsing? Ranks of features, and dead units: measures of papers/ppo_collapse.py.

Reward can rise while the features collapse into fewer and fewer directions. A model in that state stops learning.

    s = singular values of features H (N samples, C features), not centred       p = s / sum(s)
    effective rank    exp(-sum p log p)                                 Roy & Vetterli 2007
    PCA-99 % rank     the fewest directions that hold 99 % of sum(s^2)
    srank             the fewest directions that hold 99 % of sum(s)    Kumar et al. 2021
    feature rank      the number of s / sqrt(N) above .01               Lyle et al. 2022
    torch rank        the number of s above rounding errors, as torch.linalg.matrix_rank counts
    stable rank       sum(s^2) / max(s)^2
    dead units        units that are above 0 for no sample

Source: arXiv 2405.00662 and its code, which has the first five ranks and dead units.
"""

import math

import torch

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
