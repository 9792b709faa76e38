"""
AdEMAMix: Adam with a second, very slow average of the gradient, so that old gradients still count.

    m1    <- b1 m1    + (1 - b1) g             the fast average, Adam's own (a memory of about 10 steps)
    m2    <- b3(t) m2 + (1 - b3(t)) g          the slow one (about 10,000 steps), not bias-corrected
    v     <- b2 v     + (1 - b2) g^2
    theta <- theta - lr [ (m1 / (1 - b1^t) + alpha(t) m2) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay theta ]

Early gradients describe another model, so a long memory warms up: alpha rises linearly from 0, b3 goes from b1 to its
end so that its half-life rises linearly. Apertus: b = (0.9, 0.999, 0.9999), alpha 8, weight decay 0.1 but none on 1-D
parameters, both warm-ups over 100,000 steps. A shorter run must scale them to its own length: at step 3,000 of 100,000
alpha is 0.24, and the run would have been AdamW. Sources: arXiv 2409.03137; Apertus, arXiv 2509.14233 sec. 2.3, app. B.

$ python ademamix.py               # the two warm-ups in numbers, and what bf16 does to a slow average
"""

import math

import torch
from torch.fx.experimental import _config as shapes

from engine.hardware import can_compile


SMALL = 16_384  # elements: tensors up to here are copied together and updated as one
MANY = 3        # tensors in one compiled call. With 2, 3, 4, 6: 6.0, 7.1, 7.7, 9.2 s to compile; 7.8, 5.1, 3.6, 3.5 ms of calls a step of 75


def ademamix(p, g, m1, m2, v, seed, lr, alpha, w1, w2, w3, fix1, fix2, eps, weight_decay, grad_scale):
    """
    One step for one tensor, in place. Eager as it stands; under torch.compile one kernel that reads p, g, m1, m2, v and
    writes p, m1, m2, v once: 36 bytes a parameter in fp32.

    p, g, m1, m2, v: one shape; m1 is None if b1 = 0. The rest are 0-d tensors: Python numbers would be compiled in, but
    lr, alpha and b3 change every step. w = 1 - b, taken before rounding: 1 - 0.9999 in fp32 is off by 1.7e-4 relative.
    fix1 = 1 / (1 - b1^t), fix2 = 1 / sqrt(1 - b2^t).
    """
    g = g.to(v.dtype) * grad_scale             # clipping rides along instead of rewriting every gradient first
    fast = g if m1 is None else m1 + w1 * (g - m1)
    slow = m2 + w3 * (g - m2)
    square = v + w2 * (g * g - v)
    p -= lr * ((fast * fix1 + alpha * slow) / (square.sqrt() * fix2 + eps) + weight_decay * p)

    if m1 is not None:
        m1.copy_(fast)
    m2.copy_(stochastic_bf16(slow, seed) if m2.dtype == torch.bfloat16 else slow)
    v.copy_(square)


def ademamix_many(tensors, *numbers):
    """The same for a list of [p, g, m1, m2, v]: one call."""
    for args in tensors:
        ademamix(*args, *numbers)


def alpha_at(t, alpha, warmup):
    """alpha at step t = 1, 2, ...: linear from 0 over `warmup` steps; None or 0 = no warm-up."""
    return alpha * min(t / warmup, 1.0) if warmup else alpha


def beta3_at(t, beta1, beta3, warmup):
    """b3 at step t = 1, 2, ...: from b1 to b3, linear in the half-life log(1/2) / log(b); None or 0 = no warm-up."""
    if not warmup or t >= warmup:
        return beta3
    start, end = (math.log(0.5) / math.log(b + 1e-8) for b in (beta1, beta3))  # 1e-8 as published, for b1 = 0
    return 0.5 ** (1 / (start + t / warmup * (end - start)))


def stochastic_bf16(x, seed):
    """
    Round fp32 to bf16, up or down at random so that the mean is exact. x any shape, seed a 0-d int32 tensor (the step).

    bf16 keeps 8 bits, and a slow average moves by 1e-4 of the distance: rounded to nearest it is stuck at 0.0312 after
    20,000 gradients of 1, where 0.8647 is right. The noise is a hash of (element, step) (lowbias32, C. Wellons), not a
    generator: nothing to save, a resumed run rounds alike. Elements count within a shard: other world sizes differ.
    """
    h = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) ^ (seed * -1640531527)
    h = (h ^ (h >> 16 & 0xFFFF)) * 0x7FEB352D  # int32 products wrap around; & turns >> into an unsigned shift
    h = (h ^ (h >> 15 & 0x1FFFF)) * -0x7B935975
    noise = (h ^ h >> 16) & 0xFFFF             # uniform over the 16 bits that bf16 drops: a carry rounds up
    return ((x.view(torch.int32) + noise) & -0x10000).view(torch.float32).bfloat16()


class AdEMAMix(torch.optim.Optimizer):
    """
    params: tensors, DTensors (FSDP2) or groups of them, see `param_groups`. betas = (b1, b2, b3); b1 = 0 keeps no fast
    average. beta3_warmup, alpha_warmup: in steps, None = none. state_dtype: of m1 and m2; torch.bfloat16 saves 4 of 20
    bytes a parameter (weight, gradient, m1, m2, v) and rounds m2 stochastically. compile: True, False, or None = from a
    million parameters on; below, compiling (seconds) costs more than it saves. ValueError for values out of range.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999, 0.9999), alpha=8.0, eps=1e-8, weight_decay=0.1,
                 beta3_warmup=None, alpha_warmup=None, state_dtype=torch.float32, compile=None):
        if len(betas) != 3 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"betas={betas}: want three numbers in [0, 1), such as (0.9, 0.999, 0.9999)")
        if min(lr, alpha, eps, weight_decay, beta3_warmup or 0, alpha_warmup or 0) < 0:
            raise ValueError(f"lr={lr} alpha={alpha} eps={eps} weight_decay={weight_decay} beta3_warmup={beta3_warmup} "
                             f"alpha_warmup={alpha_warmup}: none may be negative")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype={state_dtype}: want torch.float32 or torch.bfloat16")
        super().__init__(params, dict(lr=lr, betas=betas, alpha=alpha, eps=eps, weight_decay=weight_decay,
                                      beta3_warmup=beta3_warmup, alpha_warmup=alpha_warmup))
        self.state_dtype, self.compile, self.update = state_dtype, compile, None

    @torch.no_grad()
    @shapes.patch(use_duck_shape=False)        # tensors that are equally long in one list need not be in the next: no recompiling
    def step(self, closure=None, grad_scale=1.0):
        """grad_scale: number or 0-d tensor that multiplies every gradient: min(1, clip / norm) clips by the norm."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update = self.update or self._choose_update()
        for group in self.param_groups:
            work = {}                          # parameters that missed no gradient share a step, and so their numbers
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] or self._new_state(p, group) for p in params]
            if states:
                torch._foreach_add_([state["step"] for state in states], 1)
            for p, state in zip(params, states):
                # Weight decay and the slow average move rows without a gradient too, so a sparse one becomes dense.
                g = p.grad.to_dense() if p.grad.is_sparse else p.grad
                args = [p.detach(), g, state.get("exp_avg_fast"), state["exp_avg_slow"], state["exp_avg_sq"]]
                if hasattr(p, "to_local"):     # elementwise, so shards do
                    args = [None if x is None else x.to_local() for x in args]
                if args[0].is_contiguous():    # .data: a view and a whole tensor would be compiled apart
                    args = [None if x is None else x.reshape(-1).data for x in args]
                if args[0].numel():            # a rank beyond the end of an uneven split holds nothing
                    work.setdefault((int(state["step"]), args[4].dtype, args[0].dtype, args[1].dtype), []).append(args)
            for (t, dtype, *_), tensors in work.items():
                self._update_all(tensors, self._numbers(group, t, dtype, grad_scale))
            torch.autograd.graph.increment_version(params)     # .data hides the change: a backward pass of older weights must still fail
        return loss

    def _update_all(self, tensors, numbers):
        """Update a list of [p, g, m1, m2, v]: compiled, MANY in a call, so that one kernel is compiled, for lists of any tensors."""
        flat = [x for x in tensors if x[0].ndim == 1]
        if self.update is ademamix_many or not flat:
            return ademamix_many(tensors, *numbers)
        ademamix_many([x for x in tensors if x[0].ndim > 1], *numbers)                       # transposed: rare, hence eager
        lists, small = [x for x in flat if x[0].numel() > SMALL], [x for x in flat if x[0].numel() <= SMALL]
        if small:                              # gains and scalars: copied together, and back, or their calls cost as much as the matrices'
            columns = [None if column[0] is None else list(column) for column in zip(*small)]
            whole = [None if column is None else torch.cat(column) for column in columns]
            lists.append(whole)
        for _ in range(-len(lists) % MANY):    # the last call is filled up: a shorter list would be another kernel to compile
            lists.append([None if x is None else x.new_zeros(2) for x in lists[0]])
        for i in range(0, len(lists), MANY):
            self.update(lists[i:i + MANY], *numbers)
        for i in (0, 2, 3, 4) if small else ():                                              # all but the gradients
            if columns[i] is not None:
                torch._foreach_copy_(columns[i], whole[i].split([x.numel() for x in columns[i]]))

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)    # casts states to the parameter's dtype; undone here, bf16 loses nothing
        for p, state in self.state.items():
            for name in state.keys() & {"exp_avg_fast", "exp_avg_slow"}:
                state[name] = state[name].to(self._average_dtype(p))

    def _average_dtype(self, p):
        return torch.float64 if p.dtype == torch.float64 else self.state_dtype

    def _new_state(self, p, group):
        """Zeros like p, DTensor for DTensor, so that a distributed checkpoint can save and reshard them with it."""
        state = self.state[p]
        state["step"] = torch.tensor(0.0)      # per parameter and on the CPU, as in torch.optim
        if group["betas"][0]:
            state["exp_avg_fast"] = torch.zeros_like(p, dtype=self._average_dtype(p))
        state["exp_avg_slow"] = torch.zeros_like(p, dtype=self._average_dtype(p))
        state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        return state

    def _numbers(self, group, t, dtype, grad_scale):
        """What step t is to all elements alike, as 0-d tensors: the seed in int32, lr to grad_scale in `dtype`."""
        beta1, beta2, beta3 = group["betas"]
        w3 = 1 - beta3_at(t, beta1, beta3, group["beta3_warmup"])
        numbers = (group["lr"], alpha_at(t, group["alpha"], group["alpha_warmup"]), 1 - beta1, 1 - beta2, w3,
                   1 / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t), group["eps"], group["weight_decay"])
        return [torch.tensor(t, dtype=torch.int32), *(torch.tensor(float(x), dtype=dtype) for x in numbers),
                torch.as_tensor(grad_scale, dtype=dtype)]

    def _choose_update(self):
        params = [p for group in self.param_groups for p in group["params"]]
        if not (sum(p.numel() for p in params) >= 1_000_000 if self.compile is None else self.compile):
            return ademamix_many
        if not can_compile(params[0].device):
            print(f"ademamix: no compiler found for {params[0].device.type}: the update runs eagerly, which is slower")
            return ademamix_many
        return torch.compile(ademamix_many, fullgraph=True, dynamic=True)                    # dynamic: one kernel for every size


def param_groups(model, weight_decay=0.1):
    """
    Two groups for AdEMAMix or AdamW, as Apertus: matrices, the embedding and the head among them, with weight_decay;
    RMSNorm and q/k gains and xIELU scalars (shape (1,)) without: pulling a gain towards 0 switches its channel off.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    return [dict(params=[p for p in params if p.ndim >= 2], weight_decay=weight_decay),
            dict(params=[p for p in params if p.ndim < 2], weight_decay=0.0)]


def build_optimizer(model, name, lr, betas, alpha, eps, weight_decay, alpha_warmup, beta3_warmup, compile=None):
    """
    The optimizer of a model by name: "ademamix", or "adamw" for comparison, which uses the first two betas.

    Warm-ups in steps; compile: as in AdEMAMix, but False where there is no compiler. ValueError: another name.
    """
    groups = param_groups(model, weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas[:2], eps=eps, fused=True)
    if name != "ademamix":
        raise ValueError(f"optimizer={name!r}: there is ademamix and adamw")
    if not can_compile(next(model.parameters()).device):
        compile = False
    return AdEMAMix(groups, lr=lr, betas=betas, alpha=alpha, eps=eps, alpha_warmup=alpha_warmup, beta3_warmup=beta3_warmup,
                    compile=compile)


if __name__ == "__main__":
    print("    step   alpha    beta3     half-life   (warm-ups over 100,000 steps, as Apertus)")
    for t in (1, 10, 100, 1_000, 10_000, 50_000, 100_000):
        b = beta3_at(t, 0.9, 0.9999, 100_000)
        print(f"{t:8,} {alpha_at(t, 8.0, 100_000):7.4f} {b:.8f} {math.log(0.5) / math.log(b):9.1f} steps")

    exact, nearest, stochastic = torch.zeros(4096), torch.zeros(4096).bfloat16(), torch.zeros(4096).bfloat16()
    for t in range(20_000):                    # a gradient of 1 at every step: the average must approach 1
        exact += 1e-4 * (1 - exact)
        nearest.copy_(nearest + 1e-4 * (1 - nearest.float()))
        stochastic = stochastic_bf16(stochastic + 1e-4 * (1 - stochastic.float()), torch.tensor(t, dtype=torch.int32))
    print(f"\nslow average of 20,000 gradients of 1 (exact {1 - 0.9999**20_000:.4f}): fp32 {exact.mean():.4f}, "
          f"bf16 to nearest {nearest[0]:.4f}, bf16 stochastic {stochastic.float().mean():.4f}")
