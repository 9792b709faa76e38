"""
Attention on a CPU, causal and inside documents. Both ways have the numbers of model.py's masked_attention, to
rounding; engine/routes.py times which is faster.

    segment_attention(q, k, v, doc)   torch's kernel, one call for each document: no mask, and no work outside
    formula_attention(q, k, v, doc)   matrix products and softmax, a slice of the queries at a time

torch.compile would trip over both: over documents, whose lengths differ in every batch, and over slices, for each of
which it writes kernels of their own. Each is therefore an operator (torch.library.custom_op): a name, what it
computes, the shapes of the results for the compiler, and the gradient.
"""

import math

import torch
from torch import Tensor

from engine.hardware import at_least_fp32

# Letters: B batch, T time, H query heads, K kv heads, D head dim, R queries of a slice, S keys that they may see.

# -----------------------------------------------------------------------------
# by torch's kernel

attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def documents(doc):
    """
    Where the documents lie. doc: (B, T) ids, equal inside a document; None: every row is one. Returns
    [(slice of rows, slice of columns)]: all rows at once if every row is one document, else one pair per
    document.
    """
    if doc is None:
        return [(slice(None), slice(None))]
    B, T = doc.shape
    cuts = []
    for row in doc:
        borders = 1 + row.diff().nonzero()[:, 0]
        cuts.append([0, *borders.tolist(), T])
    if max(map(len, cuts)) == 2:
        return [(slice(0, B), slice(0, T))]
    found = []
    for b, row in enumerate(cuts):
        this_row = slice(b, b + 1)
        for start, end in zip(row, row[1:]):
            found.append((this_row, slice(start, end)))
    return found


def widened(x, wide):
    return at_least_fp32(x) if wide else x


def unfilled(q):
    """
    Memory for the two results of segment_attention of q (B, H, T, D): the output, of the same shape, and
    the logsumexp (B, H, T). The output lies in memory as (B, T, H, D), which the projection that follows
    reads without a copy.
    """
    B, H, T, D = q.shape
    y = q.new_empty(B, T, H, D)
    lse = at_least_fp32(q.new_empty(B, T, H))
    return y.transpose(1, 2), lse.transpose(1, 2)


@torch.library.custom_op("apertus::segment_attention", mutates_args=())
def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc: Tensor | None,
    wide: bool = True,
) -> tuple[Tensor, Tensor]:
    """
    Document-masked attention without a mask: one causal call for each document of the batch.

    q (B, H, T, D), k and v (B, K, T, D), doc (B, T), None: each row is one document. Returns (B, H, T, D),
    and for the gradient the logsumexp of the scores (B, H, T). A T x T mask would make attention slower;
    this makes it faster, since work falls with the sum of squared lengths. wide: bf16 is computed in fp32,
    which SDPA's CPU kernel does in half the time for short documents.
    """
    y, lse = unfilled(q)
    inputs = [widened(x, wide) for x in (q, k, v)]
    for rows, columns in documents(doc):
        inside = rows, slice(None), columns                              # of all heads
        mine = (x[inside] for x in inputs)
        y[inside], lse[inside] = attend(*mine, is_causal=True)
    return y, lse


@segment_attention.register_fake
def _(q, k, v, doc, wide=True):
    return unfilled(q)


@torch.library.custom_op("apertus::segment_attention_backward", mutates_args=())
def segment_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc: Tensor | None,
    y: Tensor,
    lse: Tensor,
    wide: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from that of y. Shapes as in segment_attention."""
    gradients = tuple(map(torch.empty_like, (q, k, v)))
    inputs = [widened(x, wide) for x in (grad, q, k, v, y, lse)]
    for rows, columns in documents(doc):
        inside = rows, slice(None), columns
        mine = (x[inside] for x in inputs)
        parts = attend_backward(*mine, dropout_p=0.0, is_causal=True)
        for whole, part in zip(gradients, parts):
            whole[inside] = part
    return gradients


@segment_attention_backward.register_fake
def _(grad, q, k, v, doc, y, lse, wide=True):
    return tuple(map(torch.empty_like, (q, k, v)))


def segment_gradients(ctx, grad, grad_lse):
    """lse has no gradient of its own, since only this function reads it; and the ids of documents have none."""
    return *segment_attention_backward(grad, *ctx.saved_tensors, ctx.wide), None, None


def keep_inputs_and_outputs(ctx, inputs, output):
    *tensors, ctx.wide = inputs
    ctx.save_for_backward(*tensors, *output)


segment_attention.register_autograd(segment_gradients, setup_context=keep_inputs_and_outputs)


# -----------------------------------------------------------------------------
# by its formula

#     z = q k^T / sqrt(D)        p = softmax(z)                       y = p v
#     dp = dy v^T                dz = p (dp - sum over keys of p dp)
#     dq = dz k / sqrt(D)        dk = dz^T q / sqrt(D)                dv = p^T dy

# Queries at a time: keys behind them all are left out, and what is computed of their scores is still in the cache when
# it is read again. Fewer would make the matrix products slower.
SLICE = 64


def slices(T):
    """[(slice of queries, slice of the keys that one of them may see)] of T positions."""
    found = []
    for begin in range(0, T, SLICE):
        end = min(begin + SLICE, T)
        found.append((slice(begin, end), slice(0, end)))
    return found


def grouped(x, K):
    """x (B, H, R, D) -> (B K, H/K R, D): the rows of all heads that share a key-value head are those of one matrix."""
    B, H, R, D = x.shape
    return x.reshape(B * K, H // K * R, D)


def shapes_of_p(q, K):
    """The shapes (B K, H/K R, S) of the probabilities, one for each of slices(T); q (B, H, T, D)."""
    B, H, T, _ = q.shape
    shapes = []
    for mine, past in slices(T):
        R = mine.stop - mine.start
        shapes.append((B * K, H // K * R, past.stop))
    return shapes


def in_slices(kept, q, K):
    """The memory `kept` of all probabilities, as the matrices of these shapes."""
    shapes = shapes_of_p(q, K)
    parts = kept.split(list(map(math.prod, shapes)))
    return [part.view(shape) for part, shape in zip(parts, shapes)]


def unfilled_p(q):
    """Memory for the results of formula_attention of q (B, H, T, D): the output, and all probabilities."""
    y, _ = unfilled(q)
    pairs = sum(map(math.prod, shapes_of_p(q, K=1)))                     # as many for any K
    return y, q.new_empty(pairs)


@torch.library.custom_op("apertus::formula_attention", mutates_args=())
def formula_attention(q: Tensor, k: Tensor, v: Tensor, doc: Tensor | None) -> tuple[Tensor, Tensor]:
    """
    softmax(q k^T / sqrt(D)) v, causal and inside documents, a slice of the queries at a time.

    q (B, H, T, D), k and v (B, K, T, D), doc (B, T), None: each row is one document. Returns (B, H, T, D), and for the
    gradient the probabilities, slice behind slice.
    """
    B, H, T, D = q.shape
    K = k.shape[1]
    keys, values = grouped(k, K), grouped(v, K)                          # (B K, T, D)
    later = torch.ones(SLICE, SLICE, dtype=torch.bool).triu(1)
    y, kept = unfilled_p(q)
    for (mine, past), p in zip(slices(T), in_slices(kept, q, K)):
        queries = grouped(q[:, :, mine], K)                              # (B K, H/K R, D)
        p.baddbmm_(queries, keys[:, past].mT, beta=0, alpha=D ** -0.5)   # (B K, H/K R, S)
        by_head = p.view(B, H, -1, past.stop)
        R = by_head.shape[2]
        by_head[..., mine].masked_fill_(later[:R, :R], -math.inf)        # all keys before these are seen
        if doc is not None:
            # Added, since filling a mask that heads share takes longer.
            other = doc[:, None, mine, None] != doc[:, None, None, past]  # (B, 1, R, S)
            bias = torch.zeros_like(other, dtype=p.dtype)
            by_head += bias.masked_fill_(other, -math.inf)
        torch.softmax(p, -1, out=p)
        y[:, :, mine] = torch.bmm(p, values[:, past]).view(B, H, R, D)
    return y, kept


@formula_attention.register_fake
def _(q, k, v, doc):
    return unfilled_p(q)


@torch.library.custom_op("apertus::formula_attention_backward", mutates_args=())
def formula_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from that of the output. Shapes as in formula_attention."""
    B, H, T, D = q.shape
    K = k.shape[1]
    keys, values = grouped(k, K), grouped(v, K)                          # (B K, T, D)
    grad_q = torch.empty_like(q)
    # A key collects from all slices behind it.
    grad_k, grad_v = (at_least_fp32(torch.zeros_like(x)) for x in (keys, values))
    for (mine, past), p in zip(slices(T), in_slices(kept, q, K)):
        queries = grouped(q[:, :, mine], K)                              # (B K, H/K R, D)
        incoming = grouped(grad[:, :, mine], K)
        grad_p = torch.bmm(incoming, values[:, past].mT)                 # (B K, H/K R, S)
        grad_z = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype)
        grad_q[:, :, mine] = torch.bmm(grad_z, keys[:, past]).view(B, H, -1, D)
        grad_k[:, past] += torch.bmm(grad_z.mT, queries)
        grad_v[:, past] += torch.bmm(p.mT, incoming)
    scale = D ** -0.5
    grad_q *= scale
    grad_k *= scale
    return grad_q, grad_k.view(k.shape).to(k.dtype), grad_v.view(v.shape).to(v.dtype)


@formula_attention_backward.register_fake
def _(grad, q, k, v, kept):
    return torch.empty_like(q), q.new_empty(k.shape), q.new_empty(v.shape)


def formula_gradients(ctx, grad, grad_kept):
    """The probabilities have no gradient of their own, since only this function reads them."""
    q, k, v, kept = ctx.saved_tensors
    return *formula_attention_backward(grad, q, k, v, kept), None


def keep_probabilities(ctx, inputs, output):
    q, k, v, _ = inputs
    _, kept = output
    ctx.save_for_backward(q, k, v, kept)


formula_attention.register_autograd(formula_gradients, setup_context=keep_probabilities)
