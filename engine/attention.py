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

import torch

from model import at_least_fp32, attend

# Letters: B batch, T time, H query heads, K kv heads, D head dim, R queries of a slice, S keys that they may see.

kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_on_cpu(q, k, v, doc=None):
    """
    softmax(q k^T / sqrt(D)) v, causal and inside documents: (B, H, T, D), in memory as (B, T, H, D).

    q (B, H, T, D); k and v (B, K, T, D); doc (B, T), equal inside a document, None if every row is one document.
    """
    return attention(doc, q, k, v)[0]


def attend_on(model, device):
    """Let the layers of a model attend by attend_on_cpu if the device is a CPU, else as model.py does."""
    chosen = attend_on_cpu if str(device) == "cpu" else attend
    for block in model.model.layers:
        block.self_attn.attend = chosen


def by_formula(q):
    """Whether the formula is faster than segments for q (B, H, T, D)."""
    return q.dtype == torch.bfloat16 and q.shape[2] <= 512


def unfilled(doc, q, k, v):
    """
    Memory for the results of the operator: [y (B, H, T, D), *kept].

    kept, for the gradient: with segments the logsumexp of the scores (B, H, T), with the formula the probabilities
    (B, H, R, S) of each slice.
    """
    B, H, T, D = q.shape
    # The projection that follows reads (B, T, H D) without a copy.
    y = q.new_empty(B, T, H, D).transpose(1, 2)
    if not by_formula(q):
        return [y, at_least_fp32(q.new_empty(B, H, T))]
    ends = [*range(SLICE, T, SLICE), T]
    return [y, *(q.new_empty(B, H, end - start, end) for start, end in zip([0, *ends], ends))]


# -----------------------------------------------------------------------------
# by torch's kernel, document by document


def by_segments(attend, doc, inputs, outputs):
    """
    Write attend(*inputs) into `outputs`, all (B, heads, T, ...): for each document by itself, (1, heads, length, ...),
    or for all rows at once, if each is one document.
    """
    # For short documents in bf16 the kernel takes half the time if they are converted to fp32.
    if doc is not None:
        inputs = map(at_least_fp32, inputs)
    tensors = [*inputs, *outputs]
    parts = [tensors]
    if doc is not None and doc.diff().any():
        parts = []
        for b, row in enumerate(doc):
            borders = 1 + row.diff().nonzero()[:, 0]
            parts += zip(*(x[b:b + 1].tensor_split(borders, dim=2) for x in tensors))
    n = len(outputs)
    for views in parts:
        found = attend(*views[:-n], 0.0, True)                           # no dropout, causal
        torch._foreach_copy_(views[-n:], found)


# -----------------------------------------------------------------------------
# by the formula, slice by slice

#     z = q k^T / sqrt(D)        p = softmax(z)                       y = p v
#     dp = dy v^T                dz = p (dp - sum over keys of p dp)
#     dq = dz k / sqrt(D)        dk = dz^T q / sqrt(D)                dv = p^T dy

# Queries of a slice. Their scores fit in the cache; fewer queries would make the matrix products slower.
SLICE = 64


def grouped(x, K):
    """x (B, H, R, D) -> (B K, H/K R, D): heads that share a key-value head are the rows of one matrix."""
    return x.reshape(len(x) * K, -1, x.shape[3])


def slices(q, k, v, kept):
    """
    Yield each slice as matrices of a product, for all heads at once: `rows`, the numbers of its queries; its
    probabilities (B K, H/K R, S), in their place in `kept`; its queries (B K, H/K R, D); the keys and the values that
    they may see (B K, S, D).
    """
    K = k.shape[1]
    keys, values = grouped(k, K), grouped(v, K)
    for p in kept:
        R, S = p.shape[2:]
        rows = slice(S - R, S)
        yield rows, grouped(p, K), grouped(q[:, :, rows], K), keys[:, :S], values[:, :S]


def formula(doc, q, k, v, y, *kept):
    """Write the output into y, and the probabilities of each slice into `kept`."""
    B, H, T, D = q.shape
    seen = torch.ones(B, T, T, dtype=torch.bool).tril_()
    if doc is not None:
        seen &= doc[:, :, None] == doc[:, None]
    # Adding a bias is faster than filling in through a mask that all heads share.
    bias = torch.where(seen, 0.0, -torch.inf).to(q.dtype)[:, None]       # (B, 1, T, T)
    for rows, p, queries, keys, values in slices(q, k, v, kept):
        S = rows.stop
        p.baddbmm_(queries, keys.mT, beta=0, alpha=D ** -0.5)
        p.view(B, H, -1, S).add_(bias[:, :, rows, :S])
        torch.softmax(p, -1, out=p)
        y[:, :, rows] = torch.bmm(p, values).view_as(q[:, :, rows])


def formula_backward(gradients, grad, q, k, v, y, *kept):
    """Write the gradients of q, k and v into `gradients`; grad: that of the output."""
    grad_q, grad_k, grad_v = gradients
    B, K, T, D = k.shape
    # The gradient of a key is a sum over its own and all later slices, in fp32.
    sum_k, sum_v = torch.zeros(2, B * K, T, D)
    for rows, p, queries, keys, values in slices(q, k, v, kept):
        incoming = grouped(grad[:, :, rows], K)                          # (B K, H/K R, D)
        grad_p = torch.bmm(incoming, values.mT)
        grad_z = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype)
        grad_q[:, :, rows] = torch.bmm(grad_z, keys).view_as(q[:, :, rows])
        sum_k[:, :rows.stop] += torch.bmm(grad_z.mT, queries)
        sum_v[:, :rows.stop] += torch.bmm(p.mT, incoming)
    grad_q *= D ** -0.5
    grad_k.copy_((sum_k * D ** -0.5).view_as(k))
    grad_v.copy_(sum_v.view_as(v))


# -----------------------------------------------------------------------------
# the operator


@torch.library.custom_op(
    "apertus::attention", mutates_args=(), schema="(Tensor? doc, Tensor q, Tensor k, Tensor v) -> Tensor[]")
def attention(doc, q, k, v):
    """[y, *kept] of unfilled(); arguments of attend_on_cpu."""
    results = unfilled(doc, q, k, v)
    if by_formula(q):
        formula(doc, q, k, v, *results)
    else:
        by_segments(kernel, doc, [q, k, v], results)
    return results


def unfilled_gradients(doc, saved):
    """Memory for the results of attention_backward."""
    return [torch.empty_like(x) for x in saved[1:4]]


@torch.library.custom_op(
    "apertus::attention_backward", mutates_args=(), schema="(Tensor? doc, Tensor[] saved) -> Tensor[]")
def attention_backward(doc, saved):
    """The gradients of q, k and v; saved: that of the output, q, k, v, and the operator's results."""
    gradients = unfilled_gradients(doc, saved)
    if by_formula(saved[1]):
        formula_backward(gradients, *saved)
    else:
        by_segments(kernel_backward, doc, saved, gradients)
    return gradients


def gradients_of(ctx, gradients):
    """Gradients of doc (none), q, k and v. Of the results only the output has one."""
    doc, *saved = ctx.saved_tensors
    found = attention_backward(doc, [gradients[0], *saved])
    return None, *found


attention.register_fake(unfilled)
attention_backward.register_fake(unfilled_gradients)
attention.register_autograd(
    gradients_of, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output))
