"""Activations that backward recomputes instead of keeping them."""

import logging
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def recompute_activations(model, mode):
    """
    Trade compute for memory: drop the tensors that a block's forward pass stores; backward recomputes them.

    full       keeps the input of each block only, and costs one more forward pass: a third more FLOPs.
    selective  keeps tensors that are expensive to compute and small to store: q, k, v, the output projection and
               attention. It recomputes norms, activations and the widest matrix, up, whose result is 5.25 C wide:
               43 % of the memory of a block.
    """
    if mode == "none":
        return
    wide, narrow = model.config.ffn_width, model.config.n_embd // 4
    products = torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default

    def policy(ctx, op, *args, **kwargs):
        keep = "attention" in str(op)
        if op in products:
            # A product over few numbers, such as a low-rank matrix, is as cheap as its result is large.
            inner, outer = args[1].shape
            keep = wide not in (inner, outer) and inner > narrow
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    how = dict(use_reentrant=False, preserve_rng_state=False)
    if mode == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        # torch.compile warns against changes in place there, and a block makes none.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

    def recomputed(block, *args):
        # A function of ours: Dynamo skips files of torch, and with checkpoint() itself it would skip the whole block.
        return checkpoint(partial(type(block).forward, block), *args, **how)

    for block in model.model.layers:
        block.forward = recomputed.__get__(block)
