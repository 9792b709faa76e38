"""
AdEMAMix: Adam with a second, very slow average of the gradient, so that old gradients still count.

    m1    <- b1 m1    + (1 - b1) g             the fast average, Adam's own (a memory of about 10 steps)
    m2    <- b3(t) m2 + (1 - b3(t)) g          the slow one (about 10,000 steps), not bias-corrected
    v     <- b2 v     + (1 - b2) g^2
    theta <- theta - lr [ (m1 / (1 - b1^t) + alpha(t) m2) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay theta ]

Early gradients describe another model, so a long memory warms up: alpha rises linearly from 0, b3
goes from b1 to its end so that its half-life rises linearly. Apertus: b = (0.9, 0.999, 0.9999),
alpha 8, weight decay 0.1 but none on 1-D parameters, both warm-ups over 100,000 steps. A shorter run
must scale them to its own length: at step 3,000 of 100,000 alpha is 0.24, and the run would have
been AdamW.

Sources: arXiv 2409.03137; Apertus, arXiv 2509.14233 sec. 2.3, app. B.

$ python ademamix.py               # the two warm-ups in numbers, and what bf16 does to a slow average
"""

import math
from collections import defaultdict

import torch
from torch.fx.experimental import _config as shapes
from torch.utils.dlpack import from_dlpack, to_dlpack

from engine.hardware import can_compile

# -----------------------------------------------------------------------------
# The update of one tensor


def ademamix(
    p, g, m1, m2, v,
    seed, lr, alpha,
    w1, w2, w3, fix1, fix2,
    eps, weight_decay, grad_scale,
):
    """
    One step for one tensor, in place. Eager as it stands; under torch.compile one kernel that reads
    p, g, m1, m2, v and writes p, m1, m2, v once: 36 bytes a parameter in fp32.

    p, g, m1, m2, v: one shape; m1 is None if b1 = 0. The rest are 0-d tensors: Python numbers would
    be compiled in, but lr, alpha and b3 change every step. w = 1 - b, taken before rounding: 1 - 0.9999
    in fp32 is off by 1.7e-4 relative. fix1 = 1 / (1 - b1^t), fix2 = 1 / sqrt(1 - b2^t).
    """
    # Clipping happens here, where the gradient is read anyway, and not by a pass of its own.
    g = g.to(v.dtype) * grad_scale
    fast = g if m1 is None else m1 + w1 * (g - m1)
    slow = m2 + w3 * (g - m2)
    square = v + w2 * (g * g - v)
    mean = fast * fix1 + alpha * slow
    spread = square.sqrt() * fix2 + eps
    p -= lr * (mean / spread + weight_decay * p)

    if m1 is not None:
        m1.copy_(fast)
    if m2.dtype == torch.bfloat16:
        slow = stochastic_bf16(slow, seed)
    m2.copy_(slow)
    v.copy_(square)


def ademamix_many(rows, *numbers):
    """One step for a list of rows [p, g, m1, m2, v]: under torch.compile a single call."""
    for row in rows:
        ademamix(*row, *numbers)


def alpha_at(t, alpha, warmup):
    """alpha at step t = 1, 2, ...: linear from 0 over `warmup` steps; None or 0 = no warm-up."""
    return alpha * min(t / warmup, 1.0) if warmup else alpha


def beta3_at(t, beta1, beta3, warmup):
    """b3 at step t = 1, 2, ...: from b1 to b3, linear in the half-life; None or 0 = no warm-up."""
    if not warmup or t >= warmup:
        return beta3
    start = half_life(beta1)
    end = half_life(beta3)
    return 0.5 ** (1 / (start + t / warmup * (end - start)))


def half_life(beta):
    """Steps after which a gradient counts half. The 1e-8 is published: it makes b1 = 0 possible."""
    return math.log(0.5) / math.log(beta + 1e-8)


def stochastic_bf16(x, seed):
    """
    Round fp32 to bf16, up or down at random so that the mean is exact. x any shape, seed a 0-d int32
    tensor (the step). Returns bf16 of x's shape.

    bf16 keeps 8 bits, and a slow average moves by 1e-4 of the distance: rounded to nearest it is stuck
    at 0.0312 after 20,000 gradients of 1, where 0.8647 is right. The noise is a hash of (element, step)
    (lowbias32, C. Wellons) instead of a generator's, so there is no state to save and a resumed run
    rounds alike. Elements are counted within a shard, so other world sizes round differently.
    """
    element = torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    h = element.view(x.shape) ^ (seed * -1640531527)
    # int32 products wrap around, as the hash wants; the masks turn >> into its unsigned shift.
    h = (h ^ (h >> 16 & 0xFFFF)) * 0x7FEB352D
    h = (h ^ (h >> 15 & 0x1FFFF)) * -0x7B935975
    # Uniform over the 16 bits that bf16 drops: where the sum carries into the others, x is rounded up.
    noise = (h ^ h >> 16) & 0xFFFF
    bits = (x.view(torch.int32) + noise) & -0x10000
    return bits.view(torch.float32).bfloat16()


# -----------------------------------------------------------------------------
# The optimizer: which tensors are updated together. A row is [p, g, m1, m2, v] of one parameter.

# A call of a compiled kernel has a price of its own, so tensors of at most SMALL elements (gains and
# scalars) are joined and updated as one, and MANY tensors share a call. A larger MANY saves calls, but
# takes longer to compile. What WIDE does not divide goes to the small ones. Joining copies: from some
# 4,096 elements on, it takes longer than what it saves.
SMALL = 4_096
MANY = 3
WIDE = 16


def each(f, row):
    """f of each tensor of a row; a fast average that is None (b1 = 0) stays None."""
    return [None if x is None else f(x) for x in row]


def local_row(p, state):
    """The row of a parameter, as this rank's plain tensors."""
    # Weight decay and the slow average move elements without a gradient too, so a sparse one becomes dense.
    g = p.grad.to_dense() if p.grad.is_sparse else p.grad
    averages = state.get("exp_avg_fast"), state["exp_avg_slow"], state["exp_avg_sq"]
    row = [p, g, *averages]
    # DTensors: the update is elementwise, so each rank applies it to its own shard.
    if hasattr(p, "to_local"):
        row = each(lambda x: x.to_local(), row)
    return row


def in_rows(x):
    """
    The same memory in rows of WIDE, a length that torch.compile takes for fixed: a kernel that knows none moves one
    number at a time on a GPU, and this one 16 bytes at once. .data, because torch.compile would compile a view and a
    whole tensor apart.
    """
    rows = from_its_start(x).reshape(-1, WIDE).data
    torch._dynamo.mark_static(rows, 1)
    return rows


def joined_up(column):
    """1-D tensors one after the other, with zeros up to the next row, and two rows at least: for one torch.compile
    would make another kernel."""
    n = sum(x.numel() for x in column)
    zeros = column[0].new_zeros(max(2 * WIDE - n, -n % WIDE))
    return torch.cat([*column, zeros])


def from_its_start(x):
    """
    The same memory as a tensor that begins where its storage does.

    FSDP's gradients are parts of one buffer, and torch.compile would compile apart those that begin at its start.
    """
    return from_dlpack(to_dlpack(x.detach())) if x.storage_offset() else x


class AdEMAMix(torch.optim.Optimizer):
    """
    params: tensors, DTensors (FSDP2) or groups of them, see `param_groups`. betas = (b1, b2, b3);
    b1 = 0 keeps no fast average. beta3_warmup, alpha_warmup: in steps, None = none. state_dtype: of m1
    and m2; torch.bfloat16 saves 4 of 20 bytes a parameter (weight, gradient, m1, m2, v) and rounds m2
    stochastically. compile: True, False, or None = from a million parameters on; below, compiling
    (seconds) costs more than it saves. ValueError for values out of range.
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
        numbers = dict(
            lr=lr,
            alpha=alpha,
            eps=eps,
            weight_decay=weight_decay,
            beta3_warmup=beta3_warmup,
            alpha_warmup=alpha_warmup,
        )
        for name, value in numbers.items():
            if value is not None and value < 0:
                raise ValueError(f"{name}={value}: want a number that is not negative")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype={state_dtype}: want torch.float32 or torch.bfloat16")
        super().__init__(params, dict(numbers, betas=betas))
        self.state_dtype = state_dtype
        self.compile = compile
        self.update = None  # ademamix_many or the same compiled, chosen at the first step

    @torch.no_grad()
    # Tensors of equal length in one call may differ in the next. "Duck shapes" would take equal lengths for
    # one variable, and recompile when they differ.
    @shapes.patch(use_duck_shape=False)
    def step(self, closure=None, grad_scale=1.0):
        """
        One step for every parameter that has a gradient. Returns the closure's loss, or None.

        grad_scale: number or 0-d tensor that multiplies every gradient: min(1, clip / norm) clips by the norm.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update = self.update or self._choose_update()
        for group in self.param_groups:
            self._step_group(group, grad_scale)
        return loss

    def _step_group(self, group, grad_scale):
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        states = [self.state[p] or self._new_state(p, group) for p in params]
        torch._foreach_add_([state["step"] for state in states], 1)
        # Parameters that missed no gradient share a step number t, and with it the numbers of the update.
        alike = defaultdict(list)
        for param, state in zip(params, states):
            row = local_row(param, state)
            p, g, _, _, v = row
            # A rank beyond the end of an uneven split holds nothing.
            if p.numel():
                key = int(state["step"]), v.dtype, p.dtype, g.dtype
                alike[key].append(row)
        for (t, dtype, *_), rows in alike.items():
            numbers = self._numbers(group, t, dtype, grad_scale)
            self._update_rows(rows, numbers)
        # .data hides the change from autograd, but a backward pass through the old weights must still fail.
        torch.autograd.graph.increment_version(params)

    def _update_rows(self, rows, numbers):
        """Update all rows, compiled: MANY in a call, so that one kernel serves lists of any length."""
        if self.update is ademamix_many:
            return ademamix_many(rows, *numbers)
        wide, small = [], []
        for row in rows:
            p = row[0]
            n = p.numel()
            # What is updated in rows; the rest is joined with that of others.
            whole = n - n % WIDE if n > SMALL else 0
            if not all(x is None or x.is_contiguous() for x in row):
                # What is transposed has no 1-D view. That is rare, hence eager.
                ademamix(*row, *numbers)
            elif whole == n:
                wide.append(each(in_rows, row))
            else:
                flat = each(lambda x: x.reshape(-1), row)
                small.append(each(lambda x: x[whole:], flat))
                if whole:
                    wide.append(each(lambda x: in_rows(x[:whole]), flat))
        columns = list(zip(*small))
        joined = [None if column[0] is None else joined_up(column) for column in columns]
        if small:
            wide.append(each(in_rows, joined))
        # Zeros fill up the last call: a shorter list would be another kernel to compile.
        while len(wide) % MANY:
            zeros = each(lambda x: in_rows(x.new_zeros(2 * WIDE)), wide[0])
            wide.append(zeros)
        for i in range(0, len(wide), MANY):
            self.update(wide[i : i + MANY], *numbers)
        # What was joined goes back to its tensors, except for the gradients, which have not changed.
        sizes = [row[0].numel() for row in small]
        for i, whole in enumerate(joined):
            if i != 1 and whole is not None:
                torch._foreach_copy_(columns[i], whole[: sum(sizes)].split(sizes))

    def _numbers(self, group, t, dtype, grad_scale):
        """What step t is to all elements alike, as 0-d tensors: the seed in int32, lr to grad_scale in `dtype`."""
        beta1, beta2, beta3 = group["betas"]
        beta3 = beta3_at(t, beta1, beta3, group["beta3_warmup"])
        numbers = (
            group["lr"],
            alpha_at(t, group["alpha"], group["alpha_warmup"]),
            1 - beta1,
            1 - beta2,
            1 - beta3,
            1 / (1 - beta1**t),
            1 / math.sqrt(1 - beta2**t),
            group["eps"],
            group["weight_decay"],
            grad_scale,
        )
        seed = torch.tensor(t, dtype=torch.int32)
        tensors = [torch.as_tensor(x, dtype=dtype) for x in numbers]
        return [seed, *tensors]

    def _choose_update(self):
        params = [p for group in self.param_groups for p in group["params"]]
        compile = self.compile
        if compile is None:
            compile = sum(p.numel() for p in params) >= 1_000_000
        device = params[0].device
        if compile and not can_compile(device):
            print(f"ademamix: no compiler found for {device.type}: the update runs eagerly, which is slower")
            compile = False
        if not compile:
            return ademamix_many
        # dynamic: one kernel for tensors of every size.
        return torch.compile(ademamix_many, fullgraph=True, dynamic=True)

    def _average_dtype(self, p):
        return torch.float64 if p.dtype == torch.float64 else self.state_dtype

    def _new_state(self, p, group):
        """Zeros like p, DTensor for DTensor, so that a distributed checkpoint can save and reshard them with it."""
        average_dtype = self._average_dtype(p)
        square_dtype = torch.promote_types(p.dtype, torch.float32)
        state = self.state[p]
        state["step"] = torch.tensor(0.0)  # per parameter and on the CPU, as in torch.optim
        if group["betas"][0]:
            state["exp_avg_fast"] = torch.zeros_like(p, dtype=average_dtype)
        state["exp_avg_slow"] = torch.zeros_like(p, dtype=average_dtype)
        state["exp_avg_sq"] = torch.zeros_like(p, dtype=square_dtype)
        return state

    def __getstate__(self):
        """What a copy keeps, by copy.deepcopy or pickle; it chooses its update anew."""
        return super().__getstate__() | dict(state_dtype=self.state_dtype, compile=self.compile, update=None)

    def load_state_dict(self, state_dict):
        """As torch.optim's, which casts every state to its parameter's dtype: the averages keep their own."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            for name in state.keys() & {"exp_avg_fast", "exp_avg_slow"}:
                state[name] = state[name].to(self._average_dtype(p))


# -----------------------------------------------------------------------------
# The optimizer of a model


def param_groups(model, weight_decay=0.1):
    """
    Two groups for AdEMAMix or AdamW, as Apertus: matrices, the embedding and the head among them, with
    weight_decay; RMSNorm and q/k gains and xIELU scalars (shape (1,)) without: pulling a gain towards 0
    switches its channel off.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.ndim >= 2]
    vectors = [p for p in params if p.ndim < 2]
    return [
        dict(params=matrices, weight_decay=weight_decay),
        dict(params=vectors, weight_decay=0.0),
    ]


def build_optimizer(
    model,
    name,
    lr,
    betas,
    alpha,
    eps,
    weight_decay,
    alpha_warmup,
    beta3_warmup,
    compile=None,
    state_dtype="float32",
):
    """
    The optimizer of a model by name: "ademamix", or "adamw" for comparison, which uses the first two betas.

    Warm-ups in steps; compile: as in AdEMAMix; state_dtype: of its two averages, float32 or bfloat16. ValueError:
    another name.
    """
    check_states(name, state_dtype)
    groups = param_groups(model, weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(
            groups,
            lr=lr,
            betas=betas[:2],
            eps=eps,
            fused=True,
        )
    if name != "ademamix":
        raise ValueError(f"optimizer={name!r}: there is ademamix and adamw")
    return AdEMAMix(
        groups,
        lr=lr,
        betas=betas,
        alpha=alpha,
        eps=eps,
        alpha_warmup=alpha_warmup,
        beta3_warmup=beta3_warmup,
        state_dtype=getattr(torch, state_dtype),
        compile=compile,
    )


def check_states(name, state_dtype):
    """ValueError unless the optimizer of this name can keep its averages so."""
    if state_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"state_dtype={state_dtype!r}: there is float32 and bfloat16")
    if state_dtype == "bfloat16" and name == "adamw":
        raise ValueError("state_dtype=bfloat16 is of AdEMAMix, which rounds its slow average stochastically: "
                         "take --optimizer=ademamix, or leave it out")


# -----------------------------------------------------------------------------
# The command


def print_warmups(warmup=100_000):
    """alpha and b3 on their way to Apertus' values."""
    print(f"    step   alpha    beta3     half-life   (warm-ups over {warmup:,} steps, as Apertus)")
    for t in (1, 10, 100, 1_000, 10_000, 50_000, warmup):
        alpha = alpha_at(t, 8.0, warmup)
        beta3 = beta3_at(t, 0.9, 0.9999, warmup)
        steps = math.log(0.5) / math.log(beta3)
        print(f"{t:8,} {alpha:7.4f} {beta3:.8f} {steps:9.1f} steps")


def print_rounding(steps=20_000, w=1e-4):
    """The slow average of gradients that are all 1, which must approach 1, kept in three ways."""

    def moved(average):
        return average + w * (1 - average.float())

    fp32 = torch.zeros(4096)
    nearest = fp32.bfloat16()
    stochastic = nearest
    for t in range(steps):
        seed = torch.tensor(t, dtype=torch.int32)
        fp32 = moved(fp32)
        nearest = moved(nearest).bfloat16()
        stochastic = stochastic_bf16(moved(stochastic), seed)
    exact = 1 - (1 - w) ** steps
    print(
        f"\nslow average of {steps:,} gradients of 1 (exact {exact:.4f}): fp32 {fp32.mean():.4f}, "
        f"bf16 to nearest {nearest[0]:.4f}, bf16 stochastic {stochastic.float().mean():.4f}"
    )


if __name__ == "__main__":
    print_warmups()
    print_rounding()
