"""
The hash of a start model's weights: adapters fit no other ones.
"""

import hashlib

from engine import restore


def weights_hash(model):
    """
    A sha256 of the first 64 values of each weight, rounded to bf16: equal for a model in fp32 and in bf16, quantised or
    not. Adapters do not count.
    """
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        # A quantised matrix keeps its first original values.
        tensors = {"weight": module.first} if hasattr(module, "first") else dict(module.named_parameters(recurse=False))
        if path == "lm_head" and model.config.tie_embeddings or ".lora_" in path:
            continue                                       # a tied head is the embedding, which counts once
        for leaf, p in tensors.items():
            p = p.full_tensor() if hasattr(p, "full_tensor") else p     # shards are gathered, one tensor at a time
            digest.update(f"{path.removesuffix('.base')}.{leaf}".encode())
            digest.update(p.detach().flatten()[:64].bfloat16().float().cpu().numpy())
    return digest.hexdigest()

def frozen_hash(model, checkpoint):
    """A hash of the frozen weights, for config.json. ValueError if the checkpoint (path, manifest) has another."""
    start_hash = weights_hash(model)[:16]
    if checkpoint:
        path, manifest = checkpoint
        restore.refuse_changes(path, manifest["config"], dict(start_hash=start_hash))
    return start_hash
