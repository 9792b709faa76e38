"""A model that learns by the functions of plain.py: the tests of whole steps compare runs with it."""

import math
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import convert
import plain
from weights.lora import lora_layers

ACTIVATIONS = dict(xielu=plain.xielu, gelu=lambda x, *_: F.gelu(x), relu2=lambda x, *_: F.relu(x) ** 2)


class Plain:
    """
    The weights of a model in fp64, loaded from a folder or given, and the state of their optimizer. Of a model with
    adapters these alone are trained.
    """

    def __init__(self, folder=None, model=None):
        model = model or convert.load_any(str(folder), "cpu", torch.float64)[0]
        self.config = config = model.config
        self.shape = config.n_layer, config.n_head, config.n_kv_head
        self.rope = dict(theta=config.rope_theta, scaling=config.rope_scaling)
        values = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        self.w = {name: values.pop(name).requires_grad_() for name, p in model.named_parameters() if p.requires_grad}
        self.frozen, self.scales = values, {}
        for name, layer in lora_layers(model).items():
            base = layer.base.decoded() if hasattr(layer.base, "decoded") else values.pop(f"{name}.base.weight")
            self.frozen[f"{name}.weight"], self.scales[name] = base.detach().double(), layer.scale
        self.start = parameters_to_vector(self.w.values()).detach().clone()
        self.state = {}

    def weights(self):
        """The weights that plain.py asks for, {name: p}; None: the model has no such norm or curvature."""
        w = self.frozen | self.w
        for name, scale in self.scales.items():
            w[f"{name}.weight"] = w[f"{name}.weight"] + scale * w[f"{name}.lora_B.weight"] @ w[f"{name}.lora_A.weight"]
        w.setdefault("lm_head.weight", w["model.embed_tokens.weight"])
        optional = "self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n"
        absent = dict.fromkeys(f"model.layers.{i}.{name}" for i in range(self.shape[0]) for name in optional)
        return absent | w

    @contextmanager
    def functions(self):
        """In this context plain.py has the activation of the model, and no norm where that has none."""
        norm = plain.rms_norm
        with (
            patch.object(plain, "xielu", ACTIVATIONS[self.config.activation]),
            patch.object(plain, "rms_norm", lambda x, weight: x if weight is None else norm(x, weight)),
        ):
            yield

    def logits(self, idx, doc):
        with self.functions():
            return plain.logits(self.weights(), idx, doc * self.config.doc_mask, self.shape, **self.rope)

    def loss(self, batch):
        idx, targets, keep, doc = batch
        with self.functions():
            batch = idx, targets, keep, doc * self.config.doc_mask
            return plain.mean_loss(self.weights(), batch, self.shape, **self.rope)

    def divergence(self, teacher, batch):
        """The mean of KL(teacher || model), in nats, over the targets that count. teacher: Plain."""
        idx, _, keep, doc = batch
        doc = doc * self.config.doc_mask
        log_q = self.logits(idx, doc).log_softmax(-1)
        log_p = teacher.logits(idx, doc).detach().log_softmax(-1)
        kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        return (kl * keep).sum() / keep.sum().clamp(min=1)

    def logp(self, ids):
        """log p of each token of ids but the first, given those before it."""
        idx = torch.tensor([ids[:-1]])
        return self.logits(idx, torch.zeros_like(idx))[0].log_softmax(-1)[range(len(ids) - 1), ids[1:]]

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
