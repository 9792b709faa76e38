"""
torch's attention kernels, behind three functions that model.attend and generate.py call.

    masked_attention     scaled_dot_product_attention: causal, or with any mask
    block_attention      flex_attention, for documents on CUDA: it skips blocks of 128 x 128 that the mask excludes
    document_mask        what the two take as a mask
"""

import torch
import torch.nn.functional as F

from engine.hardware import can_compile

# Letters: B batch, T queries, S keys, H query heads, K key-value heads, D head dim.

# On Hopper torch would choose cuDNN's kernel, which plans anew for each length (users report half a second).
torch.backends.cuda.enable_cudnn_sdp(False)
# flex_attention has no backward pass on CPUs. It is compiled whatever --compile says: else it stores all scores.
HAS_FLEX = torch.cuda.is_available() and can_compile("cuda")
if HAS_FLEX:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    create_block_mask = torch.compile(create_block_mask)
    flex_attention = torch.compile(flex_attention)


def masked_attention(q, k, v, mask=None):
    """Attention, causal or where `mask` (B, 1, T, S) is True. q (B, H, T, D), k, v (B, K, S, D) -> (B, H, T, D)."""
    # On CUDA only flash attention shares keys between heads, and it takes 16-bit types without a mask. Other cases
    # repeat the keys: torch would else store the T x S scores of all heads, 2.1 GB at 4,096 positions of the 8B.
    flash = q.dtype.itemsize == 2 and mask is None
    if q.is_cuda and not flash:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


def block_attention(q, k, v, mask):
    """Attention where a BlockMask allows it. q (B, H, T, D), k, v (B, K, T, D) -> (B, H, T, D)."""
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def document_mask(doc, head_dim):
    """The mask for attention inside documents: a BlockMask on CUDA with a compiler, else doc (B, T) itself, or None."""
    # flex_attention's kernel needs a head dim of at least 16.
    if doc is None or not doc.is_cuda or head_dim < 16 or not HAS_FLEX:
        return doc
    B, T = doc.shape

    def sees(b, h, i, j):
        return (i >= j) & (doc[b, i] == doc[b, j])
    return create_block_mask(sees, B, None, T, T, device=doc.device)
