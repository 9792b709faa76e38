"""Recompute activations in backward instead of keeping them."""

import logging
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def recompute_activations(model, mode):
    """
    Trade compute for memory: drop the tensors that a block's forward pass stores; backward recomputes them.

    cheap      keeps the results of matrices and attention. It recomputes norms and activations, which take no matrix
               product: it halves the memory of a block.
    selective  recomputes the widest matrix too, up, whose result is 5.25 C wide: a quarter of the memory remains.
    full       keeps the input of each block only, and costs one more forward pass: a third more FLOPs.
    """
    if mode == "none":
        return
    wide, narrow = model.config.ffn_width, model.config.n_embd // 4
    products = torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default

    def policy(ctx, op, *args, **kwargs):
        # On a CPU, attention in a short window is two batched products (attention.py).
        keep = "attention" in str(op) or op == torch.ops.aten.bmm.default
        if op in products:
            # Products with a small inner dimension, like those of low-rank matrices, cost little for a large result.
            # Backward does not need the result of the matrix `down`.
            inner, outer = args[1].shape
            keep = narrow < inner != wide and (outer != wide or mode == "cheap")
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    options = dict(use_reentrant=False, preserve_rng_state=False)
    if mode != "full":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        # torch.compile warns there of in-place changes, which a block does not make.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

    def run_in_checkpoint(compute, *args):
        return checkpoint(compute, *args, **options)

    for block in model.model.layers:
        block.recompute = run_in_checkpoint
