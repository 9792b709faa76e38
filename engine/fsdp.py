"""Sharding by FSDP2: which parts of a model are gathered together, and in which dtype they travel."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method


def shard(model, mesh, dtype, reduce_dtype=torch.float32):
    """
    FSDP2. Each block is gathered by itself, the embedding too, and the rest (head, last norm) as one.

    dtype: of the weights that travel, if it is bfloat16; reduce_dtype: of the gradients. Gradients are added, not
    averaged: to take FSDP's mean and multiply by R would be exact for R = 2^n only.
    """
    param_dtype = dtype if dtype == torch.bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    parts = [*model.model.layers]
    if not model.config.tie_embeddings:
        parts.append(model.model.embed_tokens)
    for part in [*parts, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    # SFT and QRPO call it by itself: it gathers weights as forward() does.
    register_fsdp_forward_method(model, "hidden")
