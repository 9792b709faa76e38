"""
A frozen base model in 8 or 4 bits, for LoRA (posttrain/lora.py) and for decoding. NF4 takes a quarter of bf16's memory.

    int8    q = round(w / s),  s = max |w| / 127 of each row                        8.01 bits a weight
    nf4     w / max |w| of each 64 weights, rounded to the nearest of 16 values     4.25 bits a weight

The 16 values of NF4 (QLoRA, arXiv 2305.14314) are quantiles of a normal distribution, 8 above zero, 7 below and an
exact zero, so that normally distributed weights use each of them equally often. The bits are packed as in bitsandbytes.
The maxima are fp16; in bitsandbytes they may have 8 bits, which saves 3 % more memory but rounds ten times as coarsely.

                                         bf16     int8     nf4
    relative error of W x, W Gaussian    .002     .009     .09
    bits/byte of a model of 1.9M         +.0001   -.0000   +.0009 (of 1.5584 in fp32, 25 validation documents)

Each product decodes W to the dtype of the activations, in the forward pass and again in the backward pass, and stores
it nowhere. The product is a custom operation, because torch.compile would otherwise store the decoded W for the
backward pass. Embedding, head, gains and xIELU's scalars keep their precision. Files are never quantised: the base on
disk is the published one, the adapter is PEFT's.

$ python sample.py --init_from=out/laptop --base=int8
$ python evaluate.py data/stdlib --init_from=out/start --base=nf4 --against=out/start      # configs/ablations/start.py
"""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import Linear

# Shapes: a matrix w is (N, K).

BLOCK = 64      # weights that share a maximum in NF4
SLAB = 2**22    # weights that are decoded at once
ROWS = 8        # up to this number of rows of activations, a CPU's packed int8 product is faster than the dense one

# The quantiles of QLoRA, appendix E, from bitsandbytes' table, which agrees with their definition to 7 digits.
CODE = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])
PAIRS = torch.cartesian_prod(CODE, CODE)        # (256, 2): the two weights in a byte
# PAIRS on a device: copied once, because such a copy waits until the GPU has finished its queue.
pairs_on = functools.cache(PAIRS.to)


def to_int8(w):
    """w -> q (N, K) int8 and the scale of each row (N,) fp32: w is about q * scale."""
    w = w.float()
    scale = w.abs().amax(1).clamp(min=1e-12) / 127
    return (w / scale[:, None]).round().to(torch.int8), scale


def to_nf4(w):
    """
    w -> q (N K / 64, 32) uint8, two weights a byte, the first in its high half; the maxima (N K / 64,) fp16.

    Blocks run along the rows and continue in the next row. ValueError if N K is no multiple of 64.
    """
    if w.numel() % BLOCK:
        raise ValueError(f"NF4 has blocks of {BLOCK} weights, and a matrix of {tuple(w.shape)} is no multiple of it")
    blocks = w.float().view(-1, BLOCK)
    maxima = blocks.abs().amax(1)
    code = CODE.to(w.device)
    share = blocks / maxima.clamp(min=1e-30)[:, None]
    index = torch.bucketize(share, (code[1:] + code[:-1]) / 2).to(torch.uint8)
    return index[:, ::2] << 4 | index[:, 1::2], maxima.half()


def dense(q, scale, shape, dtype):
    """The decoded matrix of this shape and dtype: q and scale as to_int8 or to_nf4 returns them."""
    w = torch.empty(shape, dtype=dtype, device=q.device).view(len(q), -1)
    # In slabs, since the fp32 values of a matrix of the 8B take 0.5 GB.
    rows = max(1, SLAB // w.shape[1])
    for out, q, scale in zip(w.split(rows), q.split(rows), scale.split(rows)):
        values = F.embedding(q.int(), pairs_on(q.device)).flatten(1) if q.dtype == torch.uint8 else q
        torch.mul(values, scale[:, None], out=out)         # in fp32, rounded once
    return w.view(shape)


# -----------------------------------------------------------------------------
# the product


@torch.library.custom_op("apertus::quantised_product", mutates_args=())
def product(x: Tensor, q: Tensor, scale: Tensor, shape: list[int], back: bool) -> Tensor:
    """x (..., K) @ w.T -> (..., N); back: x (..., N) @ w -> (..., K), its gradient. q, scale, shape: as in dense."""
    few = x.is_cpu and x.shape[:-1].numel() <= ROWS and not shape[1] % 16
    if few and not back and q.dtype == torch.int8 and x.dtype == torch.bfloat16:
        # With few rows, memory is the limit: this kernel reads 8 bits a weight and writes no decoded matrix.
        y = torch._weight_int8pack_mm(x.reshape(-1, shape[1]), q, scale.bfloat16())
        return y.view(*x.shape[:-1], -1)
    w = dense(q, scale, shape, x.dtype)
    return x @ w if back else F.linear(x, w)


@product.register_fake
def _(x, q, scale, shape, back):
    return x.new_empty(*x.shape[:-1], shape[back])


def save_for_gradient(ctx, inputs, output):
    _, *parts, ctx.shape, _ = inputs
    ctx.save_for_backward(*parts)


def gradient(ctx, grad):
    return product(grad, *ctx.saved_tensors, ctx.shape, True), None, None, None, None


product.register_autograd(gradient, setup_context=save_for_gradient)


class Quantised(Linear):
    """A frozen matrix in 8 or 4 bits. Its parts are buffers, because they are never trained."""

    def __init__(self, weight, base):
        nn.Module.__init__(self)
        self.out_features, self.in_features = self.shape = weight.shape
        # Original values, by which convert.fingerprint identifies a model.
        self.first = weight.detach().flatten()[:64].clone().float()
        q, scales = to_int8(weight) if base == "int8" else to_nf4(weight)
        self.register_buffer("q", q)
        self.register_buffer("scales", scales)

    def forward(self, x):
        return product(x, self.q, self.scales, self.shape, False)

    def dense(self):
        """The decoded matrix (out, in), in fp32."""
        return dense(self.q, self.scales, self.shape, torch.float32)


class Counted:
    """A mixin of Apertus that also counts the quantised weights, which are buffers and not parameters."""
    in_bits = 0

    def num_params(self):
        return super().num_params() + self.in_bits

    def flops_per_token(self, T):
        return super().flops_per_token(T) + 4 * self.in_bits


def matrices(model):
    """{name: Linear} of the matrices of a model's blocks."""
    named = model.model.layers.named_modules(prefix="model.layers")
    return {name: module for name, module in named if isinstance(module, Linear)}


@torch.no_grad()
def replace(model, name, weight, base):
    """Quantise `weight` and put it in the place of a block's matrix. ValueError if base is not int8 or nf4."""
    if base not in ("int8", "nf4"):
        raise ValueError(f"base={base!r}: want int8 or nf4, or leave it out")
    model.set_submodule(name, Quantised(weight, base))
    if not isinstance(model, Counted):
        model.__class__ = type("Quantised", (Counted, type(model)), {})
    model.in_bits += weight.numel()


def quantise(model, base):
    """Quantise the matrices of a model's blocks: base is int8 or nf4. Changes the model; returns it."""
    for name, layer in matrices(model).items():
        replace(model, name, layer.weight, base)
    return model.requires_grad_(False)
