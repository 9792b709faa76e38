"""
A step of training written plainly in fp64: log-probs by log_softmax of all logits, gradients by autograd, then clipping
and the update as the papers have them (AdamW, arXiv 1711.05101; AdEMAMix, 2409.03137, appendix A).
"""
import math

import torch

import convert


class Plain:
    """A model in fp64, and what its optimizer remembers."""

    def __init__(self, folder):
        self.model = convert.load_any(str(folder), "cpu", torch.float64)[0]
        self.begin()

    def begin(self):
        """Remember the weights from which training starts."""
        self.params = dict(self.model.named_parameters())
        self.start = {name: p.detach().clone() for name, p in self.params.items()}
        self.memory = {name: [torch.zeros_like(p) for _ in range(3)] for name, p in self.params.items()}

    def logp(self, ids):
        """log p of each token of ids but the first, given those before it."""
        logp = self.model(torch.tensor([ids[:-1]]))[0][0].log_softmax(-1)
        return logp[range(len(ids) - 1), ids[1:]]

    @torch.no_grad()
    def update(self, t, steps, lr, clip, eps, weight_decay, adamw, betas=(0.9, 0.999, 0.99), alpha=8.0, b3_steps=None):
        """
        Step t = 1, 2, ...: alpha rises over the first `steps`, the half-life of the slow average over b3_steps.

        Returns the norm of the gradient. clip: its largest norm, 0 = any.
        """
        norm = math.sqrt(sum(p.grad.square().sum() for p in self.params.values()))
        scale = min(1, clip / norm) if clip else 1
        b1, b2, b3 = betas
        alpha *= 0 if adamw else min(1, t / steps)
        first, last = (math.log(0.5) / math.log(b) for b in (b1, b3))
        b3 = 0.5 ** (1 / (first + min(1, t / (b3_steps or steps)) * (last - first)))
        for name, p in self.params.items():
            fast, slow, square = self.memory[name]
            g = scale * p.grad
            fast += (1 - b1) * (g - fast)
            slow += (1 - b3) * (g - slow)
            square += (1 - b2) * (g * g - square)
            step = fast / (1 - b1**t) + alpha * slow
            decay = weight_decay * p if p.ndim > 1 else 0
            p -= lr * (step / ((square / (1 - b2**t)).sqrt() + eps) + decay)
            p.grad = None
        return norm

    @torch.no_grad()
    def distance(self, trained):
        """How far another model's weights are from these, as a share of what training has moved."""
        off = moved = 0
        for name, p in trained.named_parameters():
            off += (p - self.params[name]).square().sum()
            moved += (self.start[name] - self.params[name]).square().sum()
        return math.sqrt(off / moved)
