"""A model in shards over ranks (FSDP2), and its initial weights. Imported where it is needed: it takes seconds."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard, distribute_tensor
from tqdm import tqdm


def shard(model, ranks):
    """
    Shard by FSDP2. Each block is gathered by itself, the embedding too, and the rest (head, last norm) as one.

    Gradients are added, not averaged: FSDP's mean times R would be exact for R = 2^n only.
    """
    reduce_dtype = torch.float64 if ranks.exact else torch.float32
    parts = [*model.model.layers, model]
    embedding = model
    if not model.config.tie_embeddings:
        embedding = model.model.embed_tokens
        parts.insert(0, embedding)
    for part in parts:
        # A look-up's gradient is summed in the dtype of its weight: bf16 would lose most of a frequent token's.
        param_dtype = None if part is embedding else model.dtype
        fully_shard(part, mesh=ranks.mesh, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    # SFT and QRPO call hidden() directly: registered, it gathers weights as forward() does.
    register_fsdp_forward_method(model, "hidden")


@torch.no_grad()
def draw(model, seed):
    """
    The values of model.init_weights(seed), in shards: each rank draws some of the tensors whole and scatters them. One
    core draws 45 million numbers a second, so eight draw the 8B in half a minute.
    """
    # Large tensors first, so that in each round all ranks draw for about the same time.
    params = sorted(model.named_parameters(), key=lambda pair: -pair[1].numel())
    mesh = params[0][1].device_mesh["shards"]
    me, size = mesh.get_local_rank(), mesh.size()
    for first in tqdm(range(0, len(params), size), "initial weights", delay=2, disable=dist.get_rank() > 0):
        # The last round may have no tensor for this rank.
        for name, p in params[first + me:first + me + 1]:
            mine = model.initial(name, p.shape, seed).to(p.device, p.dtype)
        for k, (_, p) in enumerate(params[first:first + size]):
            whole = mine if k == me else torch.empty(p.shape, device=p.device)
            p.to_local().copy_(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=k).to_local())
