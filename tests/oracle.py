"""A model that learns by the functions of plain.py: the tests of whole steps compare runs with it."""

import math

import torch
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import convert
import plain


class Plain:
    """The weights of a model in fp64, loaded from a folder or given, and the state of their optimizer."""

    def __init__(self, folder=None, model=None):
        model = model or convert.load_any(str(folder), "cpu", torch.float64)[0]
        config = model.config
        self.shape = config.n_layer, config.n_head, config.n_kv_head
        self.rope = dict(theta=config.rope_theta, scaling=config.rope_scaling)
        self.w = {name: p.detach().double().clone().requires_grad_() for name, p in model.named_parameters()}
        self.start = parameters_to_vector(self.w.values()).detach().clone()
        self.state = {}

    def loss(self, batch):
        return plain.mean_loss(self.w, batch, self.shape, **self.rope)

    def logp(self, ids):
        """log p of each token of ids but the first, given those before it."""
        idx = torch.tensor([ids[:-1]])
        logits = plain.logits(self.w, idx, torch.zeros_like(idx), self.shape, **self.rope)
        return logits[0].log_softmax(-1)[range(len(ids) - 1), ids[1:]]

    @torch.no_grad()
    def update(self, t, warmup, lr, clip, eps, weight_decay, adamw, betas=(0.9, 0.999, 0.99), alpha=8.0):
        """
        Take step t = 1, 2, ... with the gradients that backward() left, clipped by torch.

        Returns the norm of the gradient. clip: the largest norm that is not clipped; 0 = no clipping.
        """
        norm = clip_grad_norm_(self.w.values(), clip or math.inf).item()
        grads = {name: p.grad for name, p in self.w.items()}
        plain.ademamix(self.w, grads, self.state, t, lr, betas, 0 if adamw else alpha, warmup, eps, weight_decay)
        for p in self.w.values():
            p.grad = None
        return norm

    @torch.no_grad()
    def distance(self, trained):
        """The distance of another model's weights to these, as a share of the distance that training moved these."""
        here = parameters_to_vector(self.w.values())
        there = parameters_to_vector(dict(trained.named_parameters())[name] for name in self.w)
        return ((there - here).norm() / (self.start - here).norm()).item()
