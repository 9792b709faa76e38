"""
Distillation: a student learns the distribution that a larger model predicts for the next token, not only that token.

    loss = (1 - a) CE + a KL(p || q)                                 means over the kept tokens; a: --distill
    d loss / d logits = (1 - a) (q - onehot(label)) + a (q - p)      p: the teacher's distribution, q: the student's

A label is one of 131,072 ids; p also gives the probabilities of all others. Apertus' Minis were distilled from
the 8B: 0.5B to 4B parameters, 1.7T tokens, a = 0.9 (arXiv 2605.29128), with p stored beforehand. Here the teacher runs
next to its student. That costs a forward pass of the teacher in each step, and no disk.

The logits of a window of 4,096 would take 2.1 GB for each model, so they are never held whole. The teacher's hidden
states are kept for the whole window; its logits are formed for one chunk of rows at a time, together with the
student's, in the loop of loss.py. Three tensors of a chunk's size exist at once; the plain loss has one. Each rank
holds the whole teacher in the dtype of the activations (16 GB for the 8B in bf16), even if the student is sharded.

$ python train.py configs/laptop.py --n_layer=1 --teacher=out/laptop --distill=0.9 --out=out/student
"""

import functools

import torch

from loss import ChunkedCrossEntropy, at_least_fp32

# Shapes: B batch, T time, N = B*T positions, V vocabulary, C width of the student, D width of the teacher.


def log_probabilities(h, w):
    """log softmax(h w.T): h (rows, C), w (V, C) -> (rows, V), at least fp32."""
    z = at_least_fp32(h @ w.T)
    return z.sub_(z.logsumexp(-1, keepdim=True))


def chunk_loss(labels, known, head, h, w, rows, weights, train):
    """
    loss.chunk_loss with two terms, -log q(label) and KL(p || q), both in nats.

    labels (N,); known (N, D), head (V, D): the teacher's hidden states and its head. h (rows, C), w (V, C); rows: which
    of the N positions. weights (rows, 2), of the two terms. Returns the terms (rows, 2) and, if train, the gradient of
    their weighted sum by the logits (rows, V).
    """
    labels = labels[rows, None]
    log_q = log_probabilities(h, w)
    log_p = log_probabilities(known[rows], head)
    p = log_p.exp()
    kl = log_p.sub_(log_q).mul_(p).sum(-1)                 # (rows,)
    terms = torch.stack((-log_q.gather(1, labels)[:, 0], kl), dim=1)
    if not train:
        return terms, None
    of_ce, of_kl = weights.split(1, dim=1)                 # (rows, 1) each
    q = log_q.exp_()
    # Subtract before weighting: where student and teacher agree, the difference is exactly 0.
    p_minus_q = p.sub_(q)
    dz = q.mul_(of_ce).scatter_add_(1, labels, -of_ce)
    return terms, dz.addcmul_(p_minus_q, of_kl, value=-1).to(h.dtype)


class Student:
    """
    A mixin of Apertus that in training also learns from a teacher. teacher: a tuple with the model, which therefore is
    not a submodule; share: of KL in the loss, 0 to 1.

    The teacher reads the same windows, documents and positions. It is frozen, in the dtype of the run.
    """

    def forward(self, idx, targets=None, keep=None, doc=None, n_tokens=None, positions=None, **how):
        """As Apertus.forward; in training it returns {"loss": cross-entropy, "kl": KL} and their weighted sum."""
        if not self.training or targets is None:
            return super().forward(idx, targets, keep, doc, n_tokens=n_tokens, positions=positions, **how)
        teacher, = self.teacher
        with torch.no_grad():
            known = teacher.hidden(idx, doc, positions)    # (B, T, D)
        h = self.hidden(idx, doc, positions)               # (B, T, C)
        # Further rows of the teacher's head are padding.
        head = teacher.lm_head.weight[:self.config.vocab_size]
        both = functools.partial(self.chunk_both, targets.flatten(), known.flatten(0, 1), head)
        weights = at_least_fp32(keep.flatten().to(h.dtype))[:, None] / n_tokens                    # (N, 1)
        shares = weights.new_tensor([1 - self.share, self.share])
        rows = torch.arange(len(weights), device=h.device)
        loss, terms = ChunkedCrossEntropy.apply(h.flatten(0, 1), self.lm_head.weight, rows, weights * shares, both)
        ce, kl = (weights * terms).sum(0)
        return dict(loss=ce, kl=kl), loss


def learn_from(model, teacher, share, compiled):
    """Set a Student's attributes. compiled: compile the teacher's blocks and the loss of a chunk too."""
    model.teacher = (teacher.eval().requires_grad_(False),)
    model.share = share
    model.chunk_both = torch.compile(chunk_loss) if compiled else chunk_loss
    # Static shapes: both models share the code of their blocks, and torch.compile would otherwise make one slower graph
    # for both widths.
    for block in teacher.model.layers if compiled else ():
        block.compile(dynamic=False)
