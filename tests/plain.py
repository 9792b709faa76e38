"""
A step of training written plainly in fp64, for the tests of posttrain/sft.py and qrpo.py: log-probs by log_softmax of
all logits, gradients by autograd, then clipping and the update as the papers have them (AdamW, arXiv 1711.05101;
AdEMAMix, 2409.03137).
"""
import math

import convert
import torch


class Plain:
    """A model in fp64, and what its optimizer remembers."""

    def __init__(self, folder):
        self.model = convert.load_any(str(folder), "cpu", torch.float64)[0]
        self.params = dict(self.model.named_parameters())
        self.start = {name: p.detach().clone() for name, p in self.params.items()}
        self.memory = {name: [torch.zeros_like(p) for _ in range(3)] for name, p in self.params.items()}

    def logp(self, ids):
        """log p of each token of ids but the first, given those before it."""
        logits = self.model(torch.tensor([ids[:-1]]))[0][0]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    @torch.no_grad()
    def update(self, t, steps, lr, clip, eps, weight_decay, adamw, betas=(0.9, 0.999, 0.99), alpha=8.0):
        """Step t = 1, 2, ... of `steps`, over all of which alpha and the half-life of the slow average rise."""
        scale = min(1, clip / math.sqrt(sum(p.grad.square().sum() for p in self.params.values())))
        b1, b2, b3 = betas
        from_half, to_half = math.log(0.5) / math.log(b1), math.log(0.5) / math.log(b3)
        b3 = 0.5 ** (1 / (from_half + t / steps * (to_half - from_half)))
        for name, p in self.params.items():
            fast, slow, square = self.memory[name]
            fast += (1 - b1) * (scale * p.grad - fast)
            slow += (1 - b3) * (scale * p.grad - slow)
            square += (1 - b2) * ((scale * p.grad) ** 2 - square)
            step = fast / (1 - b1**t) + (0 if adamw else alpha * t / steps) * slow
            decay = weight_decay * p if p.ndim > 1 else 0
            p -= lr * (step / ((square / (1 - b2**t)).sqrt() + eps) + decay)
            p.grad = None

    @torch.no_grad()
    def distance(self, trained):
        """How far another model's weights are from these, as a share of what training has moved."""
        params = dict(trained.named_parameters())
        off = sum((params[name].double() - p).square().sum() for name, p in self.params.items())
        return math.sqrt(off / sum((p - self.start[name]).square().sum() for name, p in self.params.items()))
