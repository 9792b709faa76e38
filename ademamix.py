"""
AdEMAMix: Adam with a second, very slow average of the gradient, so that old gradients still count.

    m1    <- b1 m1    + (1 - b1) g             the fast average, Adam's own (a memory of about 10 steps)
    m2    <- b3(t) m2 + (1 - b3(t)) g          the slow one (about 10,000 steps), not bias-corrected
    v     <- b2 v     + (1 - b2) g^2
    theta <- theta - lr [ (m1 / (1 - b1^t) + alpha(t) m2) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay theta ]

Early gradients belong to a very different model, so the long memory warms up: alpha rises linearly
from 0, and b3 rises from b1 so that its half-life grows linearly. Apertus: b = (0.9, 0.999, 0.9999),
alpha 8, weight decay 0.1 but none on 1-D parameters, both warm-ups over 100,000 steps. A shorter run
must scale the warm-ups to its own length: at step 3,000 of 100,000 alpha is 0.24, so a run of 3,000
steps would be little more than AdamW.

Sources: arXiv 2409.03137; Apertus, arXiv 2509.14233 sec. 2.3, app. C.
"""

import math
from collections import defaultdict

import torch

# -----------------------------------------------------------------------------
# The update of one tensor


def ademamix(
    p, g, m1, m2, v,
    lr, alpha, w1, w2, w3, fix1, fix2,
    eps, weight_decay, grad_scale,
):
    """
    One step for one tensor, in place.

    p, g, m1, m2, v: the same shape. The rest are 0-d tensors: torch.compile would treat Python numbers as
    constants, but lr, alpha and b3 change every step. w = 1 - b, computed in fp64:
    1 - 0.9999 in fp32 is off by 1.7e-4 relative. fix1 = 1 / (1 - b1^t), fix2 = 1 / sqrt(1 - b2^t).
    """
    # Clipping happens here, where the gradient is read anyway: a separate pass would read it twice.
    g = g.to(v.dtype) * grad_scale
    fast = m1 + w1 * (g - m1)
    slow = m2 + w3 * (g - m2)
    square = v + w2 * (g * g - v)
    mean = fast * fix1 + alpha * slow
    denominator = square.sqrt() * fix2 + eps
    p -= lr * (mean / denominator + weight_decay * p)

    m1.copy_(fast)
    m2.copy_(slow)
    v.copy_(square)


def alpha_at(t, alpha, warmup):
    """alpha at step t = 1, 2, ...: linear from 0 over `warmup` steps; None or 0 = no warm-up."""
    return alpha * min(t / warmup, 1.0) if warmup else alpha


def beta3_at(t, beta1, beta3, warmup):
    """b3 at step t = 1, 2, ...: from b1 to b3, linear in the half-life; None or 0 = no warm-up."""
    if not warmup or t >= warmup:
        return beta3
    start, end = half_life(beta1), half_life(beta3)
    return 0.5 ** (1 / (start + t / warmup * (end - start)))


def half_life(beta):
    """Steps after which a gradient counts half. The 1e-8, as published, allows b1 = 0."""
    return math.log(0.5) / math.log(beta + 1e-8)


# -----------------------------------------------------------------------------
# The optimizer


class AdEMAMix(torch.optim.Optimizer):
    """
    params: tensors, DTensors (FSDP2) or groups of them, see `param_groups`. betas = (b1, b2, b3).
    beta3_warmup, alpha_warmup: in steps, None = none. state_dtype: of m1 and m2. compile: True, False, or
    None = from a million parameters on; below that, compiling takes longer than it saves. ValueError for
    values out of range.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999, 0.9999),
        alpha=8.0,
        eps=1e-8,
        weight_decay=0.1,
        beta3_warmup=None,
        alpha_warmup=None,
        state_dtype=torch.float32,
        compile=None,
    ):
        if len(betas) != 3 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"betas={betas}: want three numbers in [0, 1), such as (0.9, 0.999, 0.9999)")
        group = dict(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay)
        if min(group.values()) < 0:
            raise ValueError(f"{group}: want no negative number")
        super().__init__(params, group | dict(betas=betas, beta3_warmup=beta3_warmup, alpha_warmup=alpha_warmup))
        if compile is None:
            compile = sum(p.numel() for group in self.param_groups for p in group["params"]) >= 1_000_000
        # torch.optim keeps `defaults` when an optimizer is copied or pickled.
        self.defaults.update(state_dtype=state_dtype, compile=compile)

    @torch.no_grad()
    def step(self, closure=None, grad_scale=1.0):
        """
        One step for every parameter that has a gradient. closure: unused; torch's functions pass None.

        grad_scale: number or 0-d tensor that multiplies every gradient: min(1, clip / norm) clips by the norm.
        """
        # Imported here, to keep this file about the method. updater() applies ademamix() to each row, compiled and with
        # small rows joined. It rounds a slow average in bf16 stochastically, by a hash of the element and t.
        from engine.averages import updater
        from engine.parallel import local

        for group in self.param_groups:
            # Parameters with the same number of steps t share the scalars of the update.
            alike = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p] or self.new_state(p)
                state["step"] += 1
                averages = (state[name] for name in ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq"))
                # The update is elementwise, so each rank applies it to its own shard of a DTensor.
                row = [local(x) for x in (p, p.grad, *averages)]
                # If a tensor is split unevenly, the last ranks may hold none of it.
                if row[0].numel():
                    alike[int(state["step"]), row[-1].dtype].append(row)
            beta1, beta2, beta3 = group["betas"]
            for (t, dtype), rows in alike.items():
                numbers = (
                    group["lr"],
                    alpha_at(t, group["alpha"], group["alpha_warmup"]),
                    1 - beta1,
                    1 - beta2,
                    1 - beta3_at(t, beta1, beta3, group["beta3_warmup"]),
                    1 / (1 - beta1**t),
                    1 / math.sqrt(1 - beta2**t),
                    group["eps"],
                    group["weight_decay"],
                    grad_scale,
                )
                numbers = [torch.as_tensor(x, dtype=dtype) for x in numbers]
                update = updater(ademamix, rows[0][0].device, self.defaults["compile"])
                update(rows, torch.tensor(t, dtype=torch.int32), numbers)

    def new_state(self, p):
        """
        States of zeros, DTensors if p is one, so that a distributed checkpoint saves and reshards them with p. The
        squares are fp32 or more, the averages state_dtype (fp64 if p is).
        """
        square = torch.promote_types(p.dtype, torch.float32)
        average = square if square == torch.float64 else self.defaults["state_dtype"]
        self.state[p] = dict(
            step=torch.tensor(0.0),  # per parameter and on the CPU, as in torch.optim
            exp_avg_fast=torch.zeros_like(p, dtype=average),
            exp_avg_slow=torch.zeros_like(p, dtype=average),
            exp_avg_sq=torch.zeros_like(p, dtype=square))
        return self.state[p]


# -----------------------------------------------------------------------------
# The optimizer of a model


def param_groups(model, weight_decay=0.1):
    """
    Two groups for AdEMAMix or AdamW, as in Apertus: matrices, including the embedding and the head, with
    weight_decay; RMSNorm and q/k gains and xIELU scalars (shape (1,)) without: a gain that decays to 0
    switches its channel off.
    """
    matrices, gains = [], []
    for p in model.parameters():
        if p.requires_grad:
            (matrices if p.ndim >= 2 else gains).append(p)
    return [dict(params=matrices, weight_decay=weight_decay), dict(params=gains, weight_decay=0.0)]


def build_optimizer(
    model, name, lr, betas, alpha, eps, weight_decay, alpha_warmup, beta3_warmup, compile=None, state_dtype="float32"
):
    """
    The optimizer of a model by name: "ademamix", or for comparison "adamw", which uses the first two betas.

    Warm-ups in steps. compile: as in AdEMAMix. state_dtype: of AdEMAMix' two averages, a string.
    """
    groups = param_groups(model, weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr, betas[:2], eps, fused=True)
    dtype = getattr(torch, state_dtype)
    return AdEMAMix(groups, lr, betas, alpha, eps, weight_decay, beta3_warmup, alpha_warmup, dtype, compile)
