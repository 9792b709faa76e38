"""
Attention on a CPU, causal and inside documents: attend_on_cpu takes the place of Attention.attend there.

    segments   torch's kernel, one call per document: no mask, and no work between documents
    formula    matrix products and softmax, 64 queries at a time: for bf16 in windows of at most 512 tokens

In bf16 a step by the kernel takes 1.1 times as long at T = 256. In fp32 the two differ by little (Zen 3, one thread, a
compiled step of configs/laptop.py: segments take 1.01 to 1.02 times as long), and segments keep no probabilities.

torch.compile would compile the segments anew for every batch, since the lengths of documents differ, and would unroll
the slices of the formula. Both are therefore inside one operator (torch.library.custom_op), which has a name, the
shapes of its results for the compiler, and a gradient.
"""

import math

import torch
from torch import Tensor


# Letters: B batch, T time, H query heads, K kv heads, D head dim, R queries of a slice, S keys that they may see.

kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def at_least_fp32(x):
    """bf16 and fp16 become fp32, fp64 stays: sums and exponentials are computed in this dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide)


def attend_on_cpu(q, k, v, doc=None):
    """
    softmax(q k^T / sqrt(D)) v, causal and inside documents: (B, H, T, D), in memory as (B, T, H, D).

    q (B, H, T, D); k and v (B, K, T, D); doc (B, T), equal inside a document, None if every row is one document.
    """
    y, *_ = attention(q, k, v, doc)
    return y


def attend_on(model, device):
    """Let the layers of a model attend by attend_on_cpu if the device is a CPU, else as model.py does."""
    for block in model.model.layers:
        vars(block.self_attn).pop("attend", None)
        if str(device) == "cpu":
            block.self_attn.attend = attend_on_cpu


def by_formula(q):
    """Whether the formula is faster than segments for q (B, H, T, D)."""
    return q.dtype == torch.bfloat16 and q.shape[2] <= 512


def unfilled(q):
    """
    Memory for the results of the operator: [y (B, H, T, D), *kept].

    kept, for the gradient: by segments the logsumexp of the scores (B, H, T), by the formula the probabilities
    (B, H, R, S) of each slice.
    """
    B, H, T, D = q.shape
    # The projection that follows reads (B, T, H D) without a copy.
    y = q.new_empty(B, T, H, D).transpose(1, 2)
    if not by_formula(q):
        lse = at_least_fp32(q.new_empty(B, T, H))
        return [y, lse.transpose(1, 2)]
    results = [y]
    for start in range(0, T, SLICE):
        end = min(start + SLICE, T)
        results.append(q.new_empty(B, H, end - start, end))
    return results


# -----------------------------------------------------------------------------
# by torch's kernel, document by document


def documents(doc, tensors):
    """
    Yield views of `tensors`, (B, heads, T, ...) each, for one document at a time: (1, heads, length, ...).

    If every row is one document, all rows at once.
    """
    if doc is None or not doc.diff().any():
        yield tensors
        return
    for b, row in enumerate(doc):
        borders = 1 + row.diff().nonzero()[:, 0]
        parts = [x[b:b + 1].tensor_split(borders, dim=2) for x in tensors]
        yield from zip(*parts)


def by_segments(attend, doc, inputs, outputs):
    """Write attend(*inputs) into `outputs`, document by document. All tensors are (B, heads, T, ...)."""
    # The kernel takes half the time in fp32 for short documents in bf16.
    if doc is not None:
        inputs = [at_least_fp32(x) for x in inputs]
    n = len(inputs)
    for views in documents(doc, [*inputs, *outputs]):
        found = attend(*views[:n], 0.0, True)                            # no dropout, causal
        for target, part in zip(views[n:], found):
            target.copy_(part)


# -----------------------------------------------------------------------------
# by the formula, slice by slice

#     z = q k^T / sqrt(D)        p = softmax(z)                       y = p v
#     dp = dy v^T                dz = p (dp - sum over keys of p dp)
#     dq = dz k / sqrt(D)        dk = dz^T q / sqrt(D)                dv = p^T dy

# Queries of a slice. Their scores fit in the cache; fewer queries would make the matrix products slower.
SLICE = 64


def grouped(x, K):
    """x (B, H, R, D) -> (B K, H/K R, D): heads that share a key-value head are the rows of one matrix."""
    B, H, R, D = x.shape
    return x.reshape(B * K, H // K * R, D)


def formula(q, k, v, doc, y, kept):
    """Write the output into y, and the probabilities of each slice into `kept`."""
    B, K, T, D = k.shape
    keys = grouped(k, K)                                                 # (B K, T, D)
    values = grouped(v, K)
    if doc is None:
        doc = torch.zeros(B, T)
    i = torch.arange(T)
    for p in kept:
        R, S = p.shape[2:]
        mine = slice(S - R, S)
        z = grouped(p, K)                                                # (B K, H/K R, S)
        z.baddbmm_(grouped(q[:, :, mine], K), keys[:, :S].mT, beta=0, alpha=D ** -0.5)
        other = doc[:, mine, None] != doc[:, None, :S]                   # (B, R, S)
        later = i[mine, None] < i[:S]
        # Adding a bias is faster than filling in through a mask that all heads share.
        bias = torch.zeros_like(other, dtype=p.dtype)
        bias.masked_fill_(other | later, -math.inf)
        p += bias[:, None]
        torch.softmax(z, -1, out=z)
        y[:, :, mine] = torch.bmm(z, values[:, :S]).view(B, -1, R, D)


def formula_backward(grad, q, k, v, kept, gradients):
    """Write the gradients of q, k and v into `gradients`."""
    B, K, T, D = k.shape
    keys = grouped(k, K)                                                 # (B K, T, D)
    values = grouped(v, K)
    grad_q, grad_k, grad_v = gradients
    # A key collects a sum over all slices behind it.
    sum_k = at_least_fp32(torch.zeros_like(keys))
    sum_v = at_least_fp32(torch.zeros_like(values))
    for p in kept:
        R, S = p.shape[2:]
        mine = slice(S - R, S)
        p = grouped(p, K)                                                # (B K, H/K R, S)
        incoming = grouped(grad[:, :, mine], K)                          # (B K, H/K R, D)
        grad_p = torch.bmm(incoming, values[:, :S].mT)
        grad_z = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype)
        grad_q[:, :, mine] = torch.bmm(grad_z, keys[:, :S]).view(B, -1, R, D)
        sum_k[:, :S] += torch.bmm(grad_z.mT, grouped(q[:, :, mine], K))
        sum_v[:, :S] += torch.bmm(p.mT, incoming)
    scale = D ** -0.5
    grad_q *= scale
    sum_k *= scale
    grad_k.copy_(sum_k.view_as(k))
    grad_v.copy_(sum_v.view_as(v))


# -----------------------------------------------------------------------------
# the operator


@torch.library.custom_op("apertus::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, doc: Tensor | None) -> list[Tensor]:
    """[y, *kept] of unfilled(); arguments of attend_on_cpu."""
    y, *kept = unfilled(q)
    if by_formula(q):
        formula(q, k, v, doc, y, kept)
    else:
        by_segments(kernel, doc, [q, k, v], [y, *kept])
    return [y, *kept]


@attention.register_fake
def _(q, k, v, doc):
    return unfilled(q)


@torch.library.custom_op("apertus::attention_backward", mutates_args=())
def attention_backward(saved: list[Tensor], doc: Tensor | None) -> list[Tensor]:
    """The gradients of q, k and v; saved: that of the output, q, k, v, and the operator's results."""
    grad, q, k, v, _, *kept = saved
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    if by_formula(q):
        formula_backward(grad, q, k, v, kept, gradients)
    else:
        by_segments(kernel_backward, doc, saved, gradients)
    return gradients


@attention_backward.register_fake
def _(saved, doc):
    return [torch.empty_like(x) for x in saved[1:4]]


def keep_inputs_and_results(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def gradients_of(ctx, gradients):
    """Only the output of the results has a gradient, and doc has none."""
    q, k, v, doc, *results = ctx.saved_tensors
    saved = [gradients[0], q, k, v, *results]
    return *attention_backward(saved, doc), None


attention.register_autograd(gradients_of, setup_context=keep_inputs_and_results)
