"""
A step of training written plainly in fp64: log-probs by log_softmax of all logits, gradients by autograd, then torch's
clipping and the update as the papers have them (AdamW, arXiv 1711.05101; AdEMAMix, 2409.03137, appendix A).
"""

import math

import torch
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import convert


class Plain:
    """A model in fp64, loaded from a folder or given, and the averages of its optimizer."""

    def __init__(self, folder=None, model=None):
        self.model = model or convert.load_any(str(folder), "cpu", torch.float64)[0]
        self.params = list(self.model.parameters())
        self.start = parameters_to_vector(self.params).detach()
        self.memory = [torch.zeros(3, *p.shape, dtype=p.dtype) for p in self.params]

    def logp(self, ids):
        """log p of each token of ids but the first, given those before it."""
        logp = self.model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
        return logp[range(len(ids) - 1), ids[1:]]

    @torch.no_grad()
    def update(self, t, steps, lr, clip, eps, weight_decay, adamw, betas=(0.9, 0.999, 0.99), alpha=8.0):
        """
        Take step t = 1, 2, ...: alpha and the half-life of the slow average warm up over `steps`.

        Returns the norm of the gradient. clip: the largest norm that is not clipped; 0 = no clipping.
        """
        norm = clip_grad_norm_(self.params, clip or math.inf).item()
        b1, b2, b3 = betas
        alpha *= 0 if adamw else min(1, t / steps)
        first, last = (math.log(0.5) / math.log(b) for b in (b1, b3))
        b3 = 0.5 ** (1 / (first + min(1, t / steps) * (last - first)))
        for p, (fast, slow, square) in zip(self.params, self.memory):
            fast += (1 - b1) * (p.grad - fast)
            slow += (1 - b3) * (p.grad - slow)
            square += (1 - b2) * (p.grad**2 - square)
            step = fast / (1 - b1**t) + alpha * slow
            decay = weight_decay * p if p.ndim > 1 else 0
            p -= lr * (step / ((square / (1 - b2**t)).sqrt() + eps) + decay)
            p.grad = None
        return norm

    @torch.no_grad()
    def distance(self, trained):
        """The distance of another model's weights to these, as a share of the distance that training moved these."""
        here, there = parameters_to_vector(self.params), parameters_to_vector(trained.parameters())
        return ((there - here).norm() / (self.start - here).norm()).item()
