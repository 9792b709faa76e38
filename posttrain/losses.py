"""
The preference losses: QRPO's regression onto the quantile of a reward (arXiv 2507.08068), and DPO, REBEL and SimPO on
the same pairs. The formulas, and when to use which: posttrain/qrpo.py.

All losses take tensors (..., 2), the better completion of a prompt first, and return one number per pair (...):

    logp          log-probs of the whole completion under the policy, in nats

and `known`, the values that do not depend on the policy:

    ref           log-probs under the reference model
    reward        the raw reward
    q             R_q: the quantile of the reward among the references
    length        tokens of the completion, or 1 for no normalisation by length
    beta          of this completion: beta / |y|, limited (effective_beta)
    beta_log_z    beta log Z of this completion
    tokens        of the completion, for the log
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

BETA = dict(qrpo=0.003, dpo=0.03, rebel=1e-4, simpo=2.5)    # the middle of the paper's grids
# The largest beta / |y|. Only in the released code, to bound the norm of the gradient; it matters below 50 tokens.
BETA_MAX = 0.1


@dataclass
class Known:
    """The values of pairs that do not depend on the policy, as above: tensors (pairs, 2)."""
    ref: torch.Tensor
    reward: torch.Tensor
    q: torch.Tensor
    length: torch.Tensor
    beta: torch.Tensor
    beta_log_z: torch.Tensor
    tokens: torch.Tensor

    def select(self, indices):
        """The values of some of the pairs."""
        return Known(*(getattr(self, field.name)[list(indices)] for field in fields(self)))


# -----------------------------------------------------------------------------
# the quantile of a reward, and the partition function that follows from it


def quantile(reward, ref_rewards, loo=False):
    """
    R_q, the share of reference rewards that are <= reward. reward (...), ref_rewards (n,) or (..., n) -> (...).

    Numbers are taken as tensors. Unbiased for any n if the references are independent: n = 1 is noisy, not wrong.
    loo (leave one out): reward is one of the n references and is not compared with itself; counting it, as the released
    scripts do, adds (1 - R_q) / n (n = 3: .167 on average).
    """
    ref_rewards = torch.as_tensor(ref_rewards)
    reward = torch.as_tensor(reward, dtype=ref_rewards.dtype)
    itself = 1 if loo else 0
    n = ref_rewards.shape[-1] - itself
    count = (ref_rewards <= reward[..., None]).sum(-1) - itself
    return count.to(torch.promote_types(reward.dtype, torch.float32)) / n


def beta_log_z(beta):
    """
    beta log Z with Z = E exp(R_q / beta) for R_q uniform on (0, 1), exact for every beta > 0.

    It is also the share of the reference's completions whose log-prob must fall, since their R_q is below it: 77 % at
    beta .1, 98 % at .003. So most of the better completions of pairs fall too.

    beta: a number or a tensor; returns the same kind. Source: arXiv 2507.08068, table 4.
    """
    if not isinstance(beta, torch.Tensor):
        return beta_log_z(torch.tensor(beta, dtype=torch.float64)).item()
    # beta log(beta (e^(1/beta) - 1)), written without overflow. Both official codes drop the last term: no difference
    # below beta = .05, wrong by .46 at beta = 1.
    return beta * beta.log() + 1 + beta * torch.log(-torch.expm1(-1 / beta))


def discrete_beta_log_z(ref_quantiles, beta):
    """
    beta log Z with Z = mean_j exp(R_j / beta) over a prompt's own references. ref_quantiles (..., n), beta (...).

    For rewards that tie: pass or fail has two quantiles, which are not uniform on (0, 1). If 25 % pass, at beta .1, the
    targets with the uniform Z add up to a probability of 3.1, which no policy can reach. The price: with few references
    the minimiser is biased, which it is not with the uniform Z. Not in the paper.
    """
    log_sum = torch.logsumexp(ref_quantiles / beta[..., None], -1)
    return beta * (log_sum - math.log(ref_quantiles.shape[-1]))


# -----------------------------------------------------------------------------
# the losses


def qrpo_loss(logp, known, beta, gamma):
    target = known.q - known.beta_log_z
    log_ratio = logp - known.ref
    return (target - known.beta * log_ratio).square().mean(-1)


def dpo_loss(logp, known, beta, gamma):
    log_ratio = (logp - known.ref) / known.length
    return -F.logsigmoid(beta * better_minus_worse(log_ratio))


def rebel_loss(logp, known, beta, gamma):
    target = better_minus_worse(known.reward) / beta
    log_ratio = (logp - known.ref) / known.length
    return (target - better_minus_worse(log_ratio)).square()


def simpo_loss(logp, known, beta, gamma):
    margin = better_minus_worse(logp / known.length)
    return -F.logsigmoid(beta * (margin - gamma))


# In capitals, because a dict in small letters would become a setting of the script that imports it.
LOSSES = dict(qrpo=qrpo_loss, dpo=dpo_loss, rebel=rebel_loss, simpo=simpo_loss)


def better_minus_worse(x):
    return x[..., 0] - x[..., 1]


def effective_beta(length, beta, beta_max):
    """beta / |y|, at most beta_max (0 = no limit), length a tensor: at 20 tokens Apertus' 5 / 20 becomes .1."""
    return (torch.full_like(length, beta) / length).clamp(max=beta_max or math.inf)


# -----------------------------------------------------------------------------
# numbers for the log


def correlation(x, y):
    """Pearson's r of x and y, each (n,); 0 if either does not vary, like the log-ratios of step 0."""
    return F.cosine_similarity(x - x.mean(), y - y.mean(), dim=0, eps=1e-12).item()
