"""
Cross-entropy without the logits of all positions.

    loss = sum_n loss_weights[n] * -log softmax(h[n] @ head.T)[targets[n]]

At V = 131,072 the fp32 logits of one window of 4,096 tokens take 2.1 GB, and the usual loss keeps three copies of
them. Here only one chunk of rows exists at a time. Its gradient, softmax minus one-hot, is computed with its loss in
the forward pass: three matrix products as always, and nothing is computed twice.

Shapes: N = B*T positions, C channels, V vocabulary.
"""

import torch


def at_least_fp32(x):
    """x in fp32, or in fp64 if it is fp64: the precision of sums and exponentials."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def chunk_loss(h, w, targets, loss_weights, with_gradient):
    """One chunk of rows: nll (rows,), and loss_weights * d nll / d logits (rows, V) if with_gradient, else None."""
    z = at_least_fp32(h @ w.T)                             # (rows, V)
    targets = targets[:, None]
    own = z.gather(1, targets)[:, 0]                       # (rows,)  the logits of the targets
    largest = z.amax(-1)
    # In place: one such tensor of the 8B takes 268 MB or more. The sum and the gradient share the exponentials, so
    # torch.compile computes them once, row by row, while the row is in the cache.
    e = z.sub_(largest[:, None]).exp_()
    total = e.sum(-1)                                      # (rows,)
    nll = total.log() + (largest - own)
    if not with_gradient:
        return nll, None
    # Softmax minus one-hot. At the target p - 1 overwrites p, so no fp32 one-hot is filled, added and read again.
    share = loss_weights / total
    dz = e.mul_(share[:, None]).to(h.dtype)
    own_dz = torch.expm1(-nll) * loss_weights              # (rows,)
    return nll, dz.scatter_(1, targets, own_dz[:, None].to(dz.dtype))


def chunk_rows(V, device, trained=True):
    """
    How many rows of logits (rows, V) exist at a time: 512 of 131,072, which take 268 MB in fp32.

    With a small vocabulary on a CPU they take at most 16 MB, which stay in its cache. On a GPU the number is doubled if
    the head is trained, because each chunk reads and writes the head's gradient. It is a power of two, like batch
    sizes: a remainder would be another shape to compile.
    """
    logits = 2**26
    if device.type == "cpu" and V <= 2**14:
        logits = 2**22
    if device.type == "cuda" and trained:
        logits = 2**27
    return max(128, 2 ** ((logits // V).bit_length() - 1))


def add_product(total, a, b):
    """total += a @ b, where total is fp32 and a and b may be bf16; on CUDA without a temporary for the product."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class ChunkedCrossEntropy(torch.autograd.Function):
    """
    h (N, C), head (V, C), targets (N,) int64, loss_weights (N,) fp32 -> loss (), and nll (N,) without gradient.

    chunk_loss: the function above, compiled or not, or one with several loss terms: loss_weights and nll are
    then (N, terms). targets go to it alone: distill.py puts row numbers there. rows (n, C): trained ones, in the place
    of the head's rows row_ids (n,).
    """

    @staticmethod
    def forward(ctx, h, head, targets, loss_weights, chunk_loss, rows=None, row_ids=None):
        w = head.to(h.dtype)
        if rows is not None:
            w = w.index_copy(0, row_ids, rows.to(h.dtype))
        nll = torch.empty_like(loss_weights)
        # A frozen head needs no gradient, which saves 2 GB at the 8B. Validation needs no gradient at all.
        train_h, train_head = ctx.needs_input_grad[:2]
        grad_h = torch.empty_like(h) if train_h else None
        grad_head = at_least_fp32(torch.zeros_like(head)) if train_head else None
        grad_rows = at_least_fp32(torch.zeros_like(rows)) if rows is not None else None
        size = chunk_rows(len(head), h.device, train_head)
        for i in range(0, len(h), size):
            s = slice(i, i + size)
            nll[s], dz = chunk_loss(h[s], w, targets[s], loss_weights[s], any(ctx.needs_input_grad))
            if train_h:
                grad_h[s] = dz @ w                         # (rows, C)
            if train_head:
                add_product(grad_head, dz.T, h[s])         # (V, C)
            if grad_rows is not None and dz is not None:
                add_product(grad_rows, dz[:, row_ids].T, h[s])         # (n, C)
        ctx.save_for_backward(grad_h, grad_head, grad_rows)
        ctx.mark_non_differentiable(nll)
        return (nll * loss_weights).sum(), nll

    @staticmethod
    def backward(ctx, grad, _):
        grad_h, grad_head, grad_rows = ctx.saved_tensors
        if grad_h is not None:
            grad_h = grad_h * grad.to(grad_h.dtype)
        if grad_head is not None:
            # In place, since a copy takes 2 GB at the 8B. Autograd therefore raises in a second backward pass. Autograd
            # also casts the gradient to the dtype of the head.
            grad_head = grad_head.mul_(grad)
        if grad_rows is not None:
            grad_rows = grad_rows * grad
        return grad_h, grad_head, None, None, None, grad_rows, None
