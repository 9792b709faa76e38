"""
A frozen base in 8 or 4 bits, for LoRA (posttrain/lora.py) and for decoding: a quarter of the memory of bf16 in NF4.

    int8    q = round(w / s),  s = max |w| / 127 of each row                        8.01 bits a weight
    nf4     w / max |w| of each 64 weights, rounded to the nearest of 16 values     4.13 bits a weight

The 16 values of NF4 (QLoRA, arXiv 2305.14314) are quantiles of a normal distribution, 8 above zero, 7 below and an
exact zero, so that normally distributed weights use each of them equally often. The maxima are themselves quantised:
their mean is taken off, and 8 bits each remain, with one fp32 scale for 256 of them. bitsandbytes decodes these bits to
the same weights.

                                         bf16     int8     nf4
    relative error of W x, W Gaussian    .002     .009     .09
    bits/byte of a model of 1.9M         +.0001   -.0000   +.0009 (of 1.5584 in fp32, 25 validation documents)

A product needs W in the dtype of the activations. It is made anew for the forward and the backward pass and never
kept: as an operation of its own, since torch.compile would otherwise keep what it finds in both (and does, also for an
autograd.Function). So training saves what quantising saves. Embedding, head, gains and xIELU's scalars stay as they
are. Files are never quantised: the base stays the published one, the adapter PEFT's.

$ python sample.py --init_from=out/laptop --base=int8
$ python evaluate.py data/stdlib --init_from=out/start --base=nf4 --against=out/start      # configs/ablations/start.py
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import Linear

BLOCK = 64      # weights that share a scale in NF4
GROUP = 256     # scales that share a scale
SLAB = 2**16    # blocks that are decoded at once
ROWS = 8        # up to so many rows of activations, a CPU's packed int8 product beats that of the dense matrix


# -----------------------------------------------------------------------------
# int8


def to_int8(w):
    """w (N, K) -> q (N, K) int8 and the scale of each row (N,) fp32, so that w is about q * scale."""
    w = w.float()
    scale = w.abs().amax(1).clamp(min=1e-12) / 127
    q = (w / scale[:, None]).round()
    return q.to(torch.int8), scale


def int8_dense(q, scale, dtype):
    """What to_int8 has kept of w, (N, K) in dtype."""
    w = torch.empty(q.shape, dtype=dtype, device=q.device)
    # A slab at a time: each product is fp32 before it is rounded to dtype, and all of them need not be there at once.
    rows = max(1, SLAB * BLOCK // q.shape[1])
    for out, q, scale in zip(w.split(rows), q.split(rows), scale.split(rows)):
        out.copy_(q * scale[:, None])
    return w


# -----------------------------------------------------------------------------
# NF4

# The quantiles of QLoRA, appendix E: bitsandbytes' table, which is their definition to 7 digits.
CODE = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])


def to_nf4(w):
    """
    w (N, K) -> packed (N K / 2,) uint8, two weights a byte, the first in its high half; maxima (N K / 64,) fp32.

    Blocks run along the rows, and over their ends where K is no multiple of 64. ValueError if N K is none.
    """
    if w.numel() % BLOCK:
        raise ValueError(f"NF4 has blocks of {BLOCK} weights, and a matrix of {tuple(w.shape)} is no multiple of it")
    blocks = w.float().view(-1, BLOCK)
    maxima = blocks.abs().amax(1)
    middles = (CODE[1:] + CODE[:-1]).to(w.device) / 2
    # A block of zeros has no scale; its values are exact zeros whatever they are divided by.
    share = blocks / maxima.clamp(min=1e-30)[:, None]
    index = torch.bucketize(share, middles).to(torch.uint8).view(-1)
    return index[::2] << 4 | index[1::2], maxima


def eight_bit_code():
    """
    The 256 values, -1 to 1, that the maxima may take: more of them, and closer, the nearer to zero.

    In the decade that ends at 10^(i - 6), on each side, the middles of 2^i equal parts; then 0 and 1 (Dettmers,
    arXiv 1511.04561, as bitsandbytes has it).
    """
    values = [0.0, 1.0]
    for i in range(7):
        borders = torch.linspace(0.1, 1, 2**i + 1)
        middles = 10.0**(i - 6) * (borders[:-1] + borders[1:]) / 2
        values += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(values))


MAXIMA_CODE = eight_bit_code()


def to_8_bits(maxima):
    """maxima (n,) -> q (n,) uint8, a scale fp32 for each 256 of them, and the mean () that was taken off first."""
    mean = maxima.mean()
    groups = F.pad(maxima - mean, (0, -len(maxima) % GROUP)).view(-1, GROUP)
    scale = groups.abs().amax(1)
    code = MAXIMA_CODE.to(maxima.device)
    share = groups / scale.clamp(min=1e-30)[:, None]
    q = torch.bucketize(share, (code[1:] + code[:-1]) / 2).to(torch.uint8)
    return q.view(-1)[:len(maxima)].clone(), scale, mean


def of_8_bits(q, scale, mean):
    """What to_8_bits has kept of the maxima, (n,) fp32."""
    group = torch.arange(len(q), device=q.device) // GROUP
    code = MAXIMA_CODE.to(q.device)
    return code[q.int()] * scale[group] + mean


def nf4_dense(packed, maxima, shape, dtype):
    """What to_nf4 has kept of w, of this shape (N, K) in dtype."""
    blocks = torch.empty(len(maxima), BLOCK, dtype=dtype, device=packed.device)
    code = CODE.to(packed.device)
    # As in int8: the indices and values of the largest matrix of the 8B would take 1.1 GB beside it.
    for out, packed, maxima in zip(blocks.split(SLAB), packed.split(SLAB * BLOCK // 2), maxima.split(SLAB)):
        index = torch.stack((packed >> 4, packed & 15), 1)             # (slab * BLOCK / 2, 2)
        values = code[index.view(-1, BLOCK).int()]
        out.copy_(values * maxima[:, None])
    return blocks.view(shape)


# -----------------------------------------------------------------------------
# the product


def dense(parts, shape, dtype):
    """The matrix (N, K) of what Quantised keeps of it: (q, scale), or (packed, q, scale, mean)."""
    if len(parts) == 2:
        return int8_dense(*parts, dtype)
    packed, *kept = parts
    return nf4_dense(packed, of_8_bits(*kept), shape, dtype)


@torch.library.custom_op("apertus::quantised_linear", mutates_args=())
def quantised_linear(x: Tensor, parts: list[Tensor], shape: list[int]) -> Tensor:
    """x (..., K) @ w (N, K).T -> (..., N). parts, shape: of w, as in dense."""
    few = x.device.type == "cpu" and x.shape[:-1].numel() <= ROWS
    if few and len(parts) == 2 and x.dtype == torch.bfloat16:
        # Decoding reads the matrix once for each token, and here in 8 bits.
        q, scale = parts
        rows = x.reshape(-1, x.shape[-1])
        y = torch._weight_int8pack_mm(rows, q, scale.bfloat16())
        return y.view(*x.shape[:-1], -1)
    return F.linear(x, dense(parts, shape, x.dtype))


@quantised_linear.register_fake
def _(x, parts, shape):
    return x.new_empty(*x.shape[:-1], shape[0])


@torch.library.custom_op("apertus::quantised_linear_backward", mutates_args=())
def quantised_linear_backward(grad: Tensor, parts: list[Tensor], shape: list[int]) -> Tensor:
    """The gradient of x (..., K) from that of the product (..., N)."""
    return grad @ dense(parts, shape, grad.dtype)


@quantised_linear_backward.register_fake
def _(grad, parts, shape):
    return grad.new_empty(*grad.shape[:-1], shape[1])


def keep_the_parts(ctx, inputs, output):
    _, parts, ctx.shape = inputs
    ctx.save_for_backward(*parts)


def gradient(ctx, grad):
    parts = list(ctx.saved_tensors)
    return quantised_linear_backward(grad, parts, ctx.shape), [None] * len(parts), None


quantised_linear.register_autograd(gradient, setup_context=keep_the_parts)


class Quantised(Linear):
    """A frozen matrix in 8 or 4 bits. Its parts are buffers, because nothing of it is ever trained."""

    def __init__(self, weight, base):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.bias = None
        # By what a model is known (convert.py: fingerprint).
        self.first = weight.detach().flatten()[:64].clone().float()
        if base == "int8":
            q, scale = to_int8(weight)
            self.register_buffer("q", q)
            self.register_buffer("scales", scale)
        else:
            packed, maxima = to_nf4(weight)
            q, scale, mean = to_8_bits(maxima)
            self.register_buffer("packed", packed)
            self.register_buffer("q", q)
            self.register_buffer("scales", scale)
            self.register_buffer("mean", mean)

    def forward(self, x):
        return quantised_linear(x, list(self._buffers.values()), [self.out_features, self.in_features])

    def dense(self, dtype=torch.float32):
        """The matrix that it stands for, (out, in)."""
        return dense(list(self._buffers.values()), (self.out_features, self.in_features), dtype)


class Counted:
    """A mixin of Apertus that counts the weights in few bits, which are no parameters of torch's."""
    in_bits = 0

    def num_params(self):
        return super().num_params() + self.in_bits

    def flops_per_token(self, T):
        return super().flops_per_token(T) + 4 * self.in_bits


def matrices(model):
    """{name: Linear} of a model's blocks, what is quantised."""
    named = model.named_modules()
    return {n: m for n, m in named if n.startswith("model.layers.") and isinstance(m, Linear)}


@torch.no_grad()
def replace(model, name, weight, base):
    """Put the matrix `weight` of a block in its place in 8 or 4 bits. ValueError for another base than int8 and nf4."""
    if base not in ("int8", "nf4"):
        raise ValueError(f"base={base!r}: there is int8 and nf4, and bf16 or float32 without quantising")
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, Quantised(weight, base))
    if not isinstance(model, Counted):
        model.__class__ = type("Quantised", (Counted, type(model)), {})
    model.in_bits += weight.numel()


def quantise(model, base):
    """
    Replace the matrices of a model's blocks by their 8 or 4 bits: base is int8 or nf4. Changes the model; returns it.
    """
    for name, layer in matrices(model).items():
        replace(model, name, layer.weight, base)
    return model.requires_grad_(False)
