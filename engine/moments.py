"""
AdEMAMix's moments in bf16: they save 4 of 20 bytes of memory a parameter (weight, gradient, m1, m2, v).
"""

import torch


def stochastic_bf16(x, step):
    """
    Round fp32 to bf16, up or down at random so that the mean is exact. x any shape, step a 0-d tensor on the CPU.

    bf16 has 8 bits of precision, and the slow moment moves by 1e-4 of the distance: rounded to nearest it stops at
    0.0312 after 20,000 gradients of 1, where 0.8647 is right. The noise is a hash of (element, step) (lowbias32, C.
    Wellons), so there is no random state to save, and a resumed run rounds alike. Elements are counted within a shard,
    so other world sizes round differently.
    """
    element = torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    h = element.view(x.shape) ^ (step.int() * -1640531527)
    # int32 products wrap around, as the hash needs; the masks turn >> into its unsigned shift.
    h = (h ^ (h >> 16 & 0xFFFF)) * 0x7FEB352D
    h = (h ^ (h >> 15 & 0x1FFFF)) * -0x7B935975
    # Uniform over the 16 bits that bf16 drops: where the sum carries into the others, x is rounded up.
    noise = (h ^ h >> 16) & 0xFFFF
    bits = (x.view(torch.int32) + noise) & -0x10000
    return bits.view(torch.float32).bfloat16()
