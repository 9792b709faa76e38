"""
An optimizer's update in fewer passes and in less memory: compiled, small tensors joined, averages in bf16.

A compiled kernel reads p, g, m1, m2, v and writes p, m1, m2, v once: 36 bytes a parameter in fp32. Averages in bf16
save 4 of 20 bytes of memory a parameter (weight, gradient, m1, m2, v); the slow one is then rounded stochastically.

The update itself comes from outside (ademamix.py): a function of p, g, m1, m2, v and of scalars, elementwise, in
place. A row is the list [p, g, m1, m2, v] of one tensor.
"""

import functools

import torch
from torch._utils import _flatten_dense_tensors as flatten, _unflatten_dense_tensors as unflatten
from torch.fx.experimental import _config as shapes
from torch.utils.dlpack import from_dlpack, to_dlpack

from engine.hardware import can_compile

# Each call of a compiled kernel costs time, so small tensors (gains, scalars) are joined and updated as one, and MANY
# tensors share a call. A larger MANY saves calls, but takes longer to compile; a larger SMALL costs more for copying
# than it saves. A tensor of more than SMALL elements is not joined: it is viewed as rows of WIDE, without a copy.
SMALL = 4_096
MANY = 3
WIDE = 16


@functools.cache
def updater(update, device, compile):
    """
    A function (rows, t, scalars) that applies an elementwise update to a list of rows, in place.

    t, a 0-d int32 tensor, is the number of the step. compile: with torch.compile, if the device has a compiler.
    """

    def many(rows, t, numbers):
        for p, g, m1, m2, v in rows:
            slow = m2.float() if m2.dtype == torch.bfloat16 else m2
            update(p, g, m1, slow, v, *numbers)
            if slow is not m2:
                m2.copy_(stochastic_bf16(slow, t))

    if not compile or not can_compile(device):
        return many
    # dynamic: one kernel for tensors of every size.
    fused = torch.compile(many, fullgraph=True, dynamic=True)

    # Tensors of equal length may have other lengths in the next call: "duck shapes" would treat them as one variable.
    @shapes.patch(use_duck_shape=False)
    def joined(rows, t, numbers):
        wide, small = [], []
        for row in rows:
            n = row[0].numel()
            # Large tensors that are not contiguous, or not a multiple of WIDE, are joined too: they are rare.
            alone = n > SMALL and n % WIDE == 0 and all(x.is_contiguous() for x in row)
            (wide if alone else small).append(row)
        # Zeros fill up whole rows, at least two: torch.compile would compile a single row separately.
        n = sum(row[0].numel() for row in small)
        small.append([x.new_zeros(2 * WIDE - n % WIDE) for x in rows[0]])
        columns = list(zip(*small))
        together = list(map(flatten, columns))
        wide.append(together)
        # Zeros fill up the last call: a shorter list would need another kernel.
        while len(wide) % MANY:
            wide.append([x.new_zeros(2 * WIDE) for x in rows[0]])
        for i in range(0, len(wide), MANY):
            fused([[in_rows(x) for x in row] for row in wide[i : i + MANY]], t, numbers)
        # Joined tensors are copies, so all but the gradients are copied back.
        for i in (0, 2, 3, 4):
            torch._foreach_copy_(columns[i], unflatten(together[i], columns[i]))
        # Autograd does not see changes through .data, but a backward pass through the old weights must still fail.
        torch.autograd.graph.increment_version([row[0] for row in rows])

    return joined


def in_rows(x):
    """
    x viewed as (n / WIDE, WIDE). WIDE is marked static: on a GPU a kernel moves 16 bytes at a time if it knows the
    length of a row, else one number.
    """
    # FSDP's gradients are parts of one buffer. torch.compile would compile again for parts that do not begin at its
    # start, and for views: from_dlpack() and .data hide both.
    if x.storage_offset():
        x = from_dlpack(to_dlpack(x.detach()))
    rows = x.view(-1, WIDE).data
    torch._dynamo.mark_static(rows, 1)
    return rows


# -----------------------------------------------------------------------------
# bf16


def stochastic_bf16(x, seed):
    """
    Round fp32 to bf16, up or down at random so that the mean is exact. x any shape, seed a 0-d int32
    tensor (the step). Returns bf16 of x's shape.

    bf16 has 8 bits of precision, and a slow average moves by 1e-4 of the distance: rounded to nearest it
    stops at 0.0312 after 20,000 gradients of 1, where 0.8647 is right. The noise is a hash of (element,
    step) (lowbias32, C. Wellons), so there is no random state to save, and a resumed run rounds alike.
    Elements are counted within a shard, so other world sizes round differently.
    """
    element = torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    h = element.view(x.shape) ^ (seed * -1640531527)
    # int32 products wrap around, as the hash needs; the masks turn >> into its unsigned shift.
    h = (h ^ (h >> 16 & 0xFFFF)) * 0x7FEB352D
    h = (h ^ (h >> 15 & 0x1FFFF)) * -0x7B935975
    # Uniform over the 16 bits that bf16 drops: where the sum carries into the others, x is rounded up.
    noise = (h ^ h >> 16) & 0xFFFF
    bits = (x.view(torch.int32) + noise) & -0x10000
    return bits.view(torch.float32).bfloat16()
