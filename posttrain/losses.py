"""
The preference losses: QRPO's regression onto the quantile of a reward (arXiv 2507.08068), and DPO, REBEL, SimPO on the same pairs.
"""

import math
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F


BETA = {"qrpo": 0.003, "dpo": 0.03, "rebel": 1e-4, "simpo": 2.5}                        # the middle of the paper's grids
TRANSFORMS = {"identity": lambda q, n: q,
              "log": lambda q, n: q.clamp(1 / n, 1).log(),                              # a quantile of 0 would be minus infinity
              "normal": lambda q, n: torch.special.ndtri(q.clamp(1 / n, (n - 1) / n))}


def quantile(reward, ref_rewards, loo=False):
    """
    Share of reference rewards that are <= reward. reward (...), ref_rewards (n,) or (..., n); numbers are taken as tensors. -> (...)

    Exact on average for any n if the references are independent: n = 1 is noisy, not wrong. loo: reward is one of the n itself and is
    left out; counting it, as the released scripts do, adds (1 - R_q) / n (n = 3: .167 on average). ValueError: nothing to compare with.
    """
    ref_rewards = torch.as_tensor(ref_rewards)
    reward = torch.as_tensor(reward, dtype=ref_rewards.dtype)
    self_in = int(bool(loo))
    n = ref_rewards.shape[-1] - self_in
    if n < 1:
        raise ValueError("a quantile needs at least one reference reward, and one more with loo")
    return ((ref_rewards <= reward[..., None]).sum(-1) - self_in).to(torch.promote_types(reward.dtype, torch.float32)) / n


def beta_log_z(beta, transform="identity"):
    """
    beta log Z, exact for every beta > 0 (number or tensor; same kind back): Z = E exp(f(R_q) / beta), R_q uniform on (0, 1).

    identity: beta log(beta (e^(1/beta) - 1)), written so that nothing overflows. Both official codes drop the last term,
    log(1 - e^(-1/beta)): no difference below .05, wrong by .46 at beta = 1. log: beta log(beta / (1 + beta)). normal: 1 / (2 beta).
    Source: arXiv 2507.08068, table 4.
    """
    b = torch.as_tensor(beta, dtype=None if isinstance(beta, torch.Tensor) else torch.float64)
    if transform == "identity":
        value = b * b.log() + 1 + b * torch.log(-torch.expm1(-1 / b))
    elif transform == "log":
        value = b * torch.log(b / (1 + b))
    elif transform == "normal":
        value = 1 / (2 * b)
    else:
        raise ValueError(f"transform={transform!r}: there is {', '.join(TRANSFORMS)}")
    return value if isinstance(beta, torch.Tensor) else value.item()


def optimum(beta):
    """
    What perfect QRPO reaches with the identity transform: its mean quantile, KL(pi* || pi_ref) in nats, and the share of the reference's
    completions whose log-prob must fall (R_q below beta log Z). The answer to "why do the chosen ones fall too?": at beta .003, 98 % do.
    """
    mean = -1 / math.expm1(-1 / beta) - beta
    return dict(quantile=mean, kl=(mean - beta_log_z(beta)) / beta, falling=beta_log_z(beta))


def discrete_beta_log_z(ref_quantiles, beta):
    """
    The same with Z = mean_j exp(R_j / beta) over a prompt's own references, whatever their ties. ref_quantiles (..., n), beta (...).

    Pass or fail has two quantiles, not a uniform one: at 25 % passing and beta .1 the uniform Z asks for 3.1 times the probability there
    is, and every completion is told to rise. It costs what the uniform Z gives: for few references the minimiser is biased. Not in the
    paper.
    """
    n = ref_quantiles.shape[-1]
    return beta * (torch.logsumexp(ref_quantiles / beta[..., None], -1) - math.log(n))


def qrpo_loss(pi, ref, reward, q, length=1.0, beta=0.1, beta_max=0.0, log_z=None, transform="identity", **_):
    b = effective_beta(pi, length, beta, beta_max)
    log_z = beta_log_z(b, transform) if log_z is None else log_z
    return (q - log_z - b * (pi - ref)).square().mean(-1)


def dpo_loss(pi, ref, reward, q, length=1.0, beta=0.1, **_):
    return -F.logsigmoid(beta * better_minus_worse((pi - ref) / length))


def rebel_loss(pi, ref, reward, q, length=1.0, beta=0.1, **_):
    return (better_minus_worse(reward) / beta - better_minus_worse((pi - ref) / length)).square()


def simpo_loss(pi, ref, reward, q, length=1.0, beta=2.5, gamma=0.5, **_):
    return -F.logsigmoid(beta * (better_minus_worse(pi / length) - gamma))


def better_minus_worse(x):
    return x[..., 0] - x[..., 1]


def effective_beta(like, length, beta, beta_max):
    """beta / |y|, at most beta_max (0 = no limit), as a tensor like `like`: at 20 tokens Apertus' 5 / 20 = .25 becomes .1."""
    b = torch.full_like(like, beta) / length
    return b.clamp(max=beta_max) if beta_max else b


losses = MappingProxyType(dict(qrpo=qrpo_loss, dpo=dpo_loss, rebel=rebel_loss, simpo=simpo_loss))    # read-only: a table, not a setting


def tie_report(groups, beta):
    """
    groups: (n,) reference rewards a prompt. -> share of tied pairs among them; Z mass, mean of sum_y pi_ref exp(target / beta), which is 1
    if the target can be reached at all. Distinct rewards give about 1 + 1/(2 n beta), since quantiles are multiples of 1/n.
    """
    tied, mass = [], []
    for r in groups:
        n = len(r)
        if n > 1:
            tied.append(((r[:, None] == r).sum().item() - n) / (n * (n - 1)))
            q = quantile(r, r)
            mass.append(torch.exp((q - beta_log_z(beta)) / beta).mean().item())
    return (float(np.mean(tied)), float(np.mean(mass))) if tied else (0.0, 1.0)


def correlation(x, y):
    """Pearson's r; 0 if either does not vary (as every log-ratio at step 0)."""
    x, y = x - x.mean(), y - y.mean()
    scale = (x.norm() * y.norm()).item()
    return (x @ y).item() / scale if scale > 1e-12 else 0.0
