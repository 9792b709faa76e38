"""
What people would otherwise run, for tools/bench.py to race against.

    peer                    what it is                                            its name in a race
    hugging_face(ours)      transformers' Apertus, with our weights               hf
    NanoGPT(config)         nanoGPT's model of the same width and depth           nanoGPT compile
    nanogpt_optimizer(...)  its AdamW, and nanogpt_rate(...) its schedule         (tools/nanogpt.py)
    nanogpt_batch(...)      nanoGPT's loader                                      nanoGPT
    loop_ademamix(...)      AdEMAMix as its authors wrote it                      per-tensor loop
    published_mask(...)     the Goldfish mask by Apertus' own expression          published

Each is written as its source has it, and none is tuned by us. All but nanoGPT's compute what ours does, and
tools/bench.py checks that before it believes a time. nanoGPT's model is another one: bench.py compares its speed alone,
tools/nanogpt.py what it learns.
"""

import functools
import itertools
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from ademamix import param_groups
from schedule import cosine

# Letters: B batch, T time, C width, H heads, V words of the vocabulary, h labels that a Goldfish hash sees.


def hugging_face(ours):
    """
    transformers' ApertusForCausalLM with the weights of `ours`, in fp32 and on the same device.

    It has no end-of-text token, or generate() might stop before it has made all tokens that are timed.
    """
    import transformers
    import convert
    transformers.logging.set_verbosity_error()
    settings = convert.config_to_hf(ours.config)
    config = transformers.ApertusConfig(
        **settings,
        attn_implementation="sdpa",
        pad_token_id=3)
    with ours.lm_head.weight.device:
        theirs = transformers.ApertusForCausalLM(config).float()
    weights = theirs.state_dict() | ours.state_dict()
    theirs.load_state_dict(weights)
    theirs.generation_config.eos_token_id = None
    return theirs


# -----------------------------------------------------------------------------
# nanoGPT: model.py and train.py of github.com/karpathy/nanoGPT, with bias=False, its faster setting

linear = functools.partial(nn.Linear, bias=False)
layer_norm = functools.partial(nn.LayerNorm, bias=False)


class GPTBlock(nn.Module):
    """
    A block of GPT-2: layer norms without bias, one matrix for q, k and v, GELU, and an MLP of width 4 C.

    x (B, T, C) -> (B, T, C).
    """

    def __init__(self, C, H):
        super().__init__()
        self.H = H
        self.ln_1 = layer_norm(C)
        self.c_attn = linear(C, 3 * C)
        self.attn_proj = linear(C, C)
        self.ln_2 = layer_norm(C)
        self.c_fc = linear(C, 4 * C)
        self.c_proj = linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.c_attn(self.ln_1(x))                    # (B, T, 3C)
        q, k, v = (
            part.view(B, T, self.H, -1).transpose(1, 2)    # (B, H, T, C/H)
            for part in qkv.split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2)                              # (B, T, H, C/H)
        y = y.reshape(B, T, C)
        x = x + self.attn_proj(y)
        hidden = self.c_fc(self.ln_2(x))                   # (B, T, 4C)
        hidden = F.gelu(hidden)
        return x + self.c_proj(hidden)


class NanoGPT(nn.Module):
    """
    nanoGPT with the width, depth, heads and vocabulary of an ApertusConfig.

    idx (B, T), targets (B, T), -100 where there is none -> the mean loss. Initial weights: N(0, 0.02), and what writes
    to the residual stream 1/sqrt(2L) of that; torch's random numbers.
    """

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.wte = nn.Embedding(config.vocab_size, C)
        self.wpe = nn.Embedding(config.block_size, C)
        self.h = nn.ModuleList()
        for _ in range(config.n_layer):
            block = GPTBlock(C, config.n_head)
            self.h.append(block)
        self.ln_f = layer_norm(C)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                to_residual = name.endswith("_proj.weight")
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if to_residual else 0.02)

    def logits(self, idx):
        """idx (B, T) -> (B, T, V)."""
        T = idx.shape[1]
        positions = self.wpe.weight[:T]
        x = self.wte(idx) + positions                      # (B, T, C)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        head = self.wte.weight
        return x @ head.T                                  # (B, T, V)

    def forward(self, idx, targets):
        logits = self.logits(idx)
        logits = logits.flatten(0, 1)
        targets = targets.flatten()
        return F.cross_entropy(logits, targets)

    def flops_per_token(self, T):
        """As Apertus.flops_per_token counts: wte is the head as well and multiplies, wpe is a look-up."""
        matrices = sum(
            p.numel() for p in self.parameters()
            if p.ndim > 1)
        matrices -= self.wpe.weight.numel()
        attention = len(self.h) * self.wte.embedding_dim * T
        return 6 * matrices + 6 * attention


def nanogpt_optimizer(model, lr):
    """Its AdamW, as config/train_shakespeare_char.py sets it, and as nanoGPT makes it on a CPU: not fused."""
    return torch.optim.AdamW(param_groups(model, 0.1), lr=lr, betas=(0.9, 0.99))


def nanogpt_rate(step, steps, peak, warmup):
    """get_lr of nanoGPT: the rate of a step (0-based). From peak / (warmup + 1) up, then a cosine to peak / 10."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return cosine(step, peak, peak / 10, warmup, steps)


def nanogpt_batch(path, B, T, n):
    """
    Batch n by get_batch of nanoGPT: idx, targets (B, T) int64, cut at random places out of the tokens in a .npy file.

    n: a number, or several, as numpy takes for a seed. There are no document ids and no masks. The file is opened anew
    for each batch, as nanoGPT does.
    """
    data = np.load(path, mmap_mode="r", allow_pickle=False)
    generator = np.random.default_rng(n)
    last = len(data) - T
    starts = generator.integers(0, last, B)                # (B,)

    def window(i):
        ids = data[i:i + T].astype(np.int64)
        return torch.from_numpy(ids)

    idx = torch.stack([window(i) for i in starts])
    targets = torch.stack([window(i + 1) for i in starts])
    return idx, targets


# -----------------------------------------------------------------------------
# AdEMAMix and the Goldfish mask


def loop_ademamix(params, lr, betas, alpha, eps, weight_decay):
    """
    step() that updates `params` by their gradients with AdEMAMix, its warm-ups done.

    Tensor by tensor and operation by operation, as in the reference. Source: github.com/apple/ml-ademamix.
    """
    b1, b2, b3 = betas
    averages = []
    for p in params:
        triple = [torch.zeros_like(p) for _ in range(3)]
        averages.append(triple)
    steps = itertools.count(1)

    @torch.no_grad()
    def step():
        t = next(steps)
        correction_1 = 1 - b1**t
        correction_2 = 1 - b2**t
        for p, (m1, m2, v) in zip(params, averages):
            g = p.grad
            m1.mul_(b1).add_(g, alpha=1 - b1)
            m2.mul_(b3).add_(g, alpha=1 - b3)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            denominator = v.sqrt() / correction_2**0.5
            denominator.add_(eps)
            update = m1 / correction_1 + alpha * m2
            update = update / denominator
            update.add_(p, alpha=weight_decay)
            p.add_(-lr * update)
    return step


@functools.cache
def published_table():
    """(1,000,003,) fp32 in [0, 1): what a product of labels, modulo its length, is looked up in."""
    generator = torch.Generator()
    generator.manual_seed(2971215073)
    return torch.rand(1_000_003, generator=generator)


def published_mask(labels, k=50, h=50):
    """
    True where the loss keeps a label: labels (B, T) int64 -> (B, T) bool, as goldfish_mask in goldfish.py.

    Source: apply_goldfish in swiss-ai/Megatron-LM.
    """
    keep = torch.ones_like(labels, dtype=torch.bool)
    windows = labels.unfold(-1, h, 1)                      # (B, T-h+1, h)
    products = windows.prod(dim=-1)                        # (B, T-h+1)
    key = products % 1_000_003
    draws = published_table()[key]
    forgotten = draws < 1 / k
    keep[:, h - 1:] = ~forgotten
    return keep
