"""
Multiply the matrices of all blocks in eight bits, which takes Hopper and Ada half the time of bf16.

    y  = x w^T          x and w in e4m3, 3 bits of mantissa:   relative error at most 2^-4
    dx = dy w           dy in e5m2, 2 bits and a wider range:  at most 2^-3
    dw = dy^T x

Each tensor is divided by a scale of its own, max |t| / the largest number of its format, computed anew for every
product ("current scaling"). So there is no history to save, and a run resumes bit-exactly. Numbers of x and w below
1/28,672 of the largest are subnormal. A scale covers the positions of one micro-batch on one device, so another
micro_batch rounds differently. Weights, gradients, communication and the optimizer stay as they are, and so do
embedding, head, norms, activation and attention.

The report tried this with the 8B after 8T tokens (appendix D): 26 % faster, and the loss 0.01 higher at once. It
diverged 300B tokens later, and the run returned to bf16; here --resume --fp8=False does that. After 300 steps of 3.5M
parameters on a CPU, with the same rounding, validation is 0.010 +- 0.011 nats per token higher than in bf16 and
the last 50 training steps 0.011 +- 0.009 (five seeds). It has not run on a GPU.

$ python train.py configs/8b.py --data=data/mine --fp8
"""

import torch
import torch.nn as nn

E4M3 = torch.float8_e4m3fn      # of x and w; the largest number is 448
E5M2 = torch.float8_e5m2        # of gradients; 57,344


def check_fp8(config, positions, device):
    """ValueError if not all products can be in fp8. positions: of a micro-batch on this device."""
    if device.startswith("mps") or device.startswith("cuda") and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"fp8=True wants a GPU that multiplies in it (H100, 4090 and later) and {device} does not: "
                         "leave it out")
    sizes = dict(
        n_embd=config.n_embd,
        ffn_width=config.ffn_width,
        positions_of_a_micro_batch=positions,
        width_of_k_and_v=config.n_kv_head * config.head_dim)
    odd = [f"{name}={n}" for name, n in sizes.items() if n % 16]
    if odd:
        raise ValueError(f"fp8=True wants sizes that 16 divides, unlike {', '.join(odd)}: leave it out")


def quantise(x, kind):
    """x (M, K) -> x / scale in 8 bits (M, K), and the scale () fp32."""
    x = x.float()
    # Zeros stay zeros. nan and inf stay visible, so that the run notices them.
    scale = x.abs().amax().clamp(min=1e-30) / torch.finfo(kind).max
    return (x / scale).to(kind), scale


def product(a, a_scale, b, b_scale, dtype, fast=False):
    """
    a (M, K) @ b (N, K).T -> (M, N) in dtype. GPUs want both to be contiguous along K.

    fast: accumulate with fewer bits, as is usual in the forward pass but not in the backward pass.
    """
    return torch._scaled_mm(a.contiguous(), b.contiguous().T, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


class Product(torch.autograd.Function):
    """x (M, K), w (N, K) -> x @ w.T (M, N); this and both gradients in fp8."""

    @staticmethod
    def forward(ctx, x, w):
        x8, x_scale = quantise(x, E4M3)
        # Save w itself, the parameter: FSDP frees it after the block, whereas a copy in 8 bits would stay.
        ctx.save_for_backward(x8, x_scale, w)
        return product(x8, x_scale, *quantise(w, E4M3), x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad):
        x8, x_scale, w = ctx.saved_tensors
        w8, w_scale = quantise(w, E4M3)
        g8, g_scale = quantise(grad, E5M2)
        grad_x = product(g8, g_scale, w8.T, w_scale, grad.dtype)
        grad_w = product(g8.T, g_scale, x8.T, x_scale, grad.dtype)
        return grad_x, grad_w


class Linear8(nn.Linear):
    """A matrix without bias, with the parameters and names of model.Linear: checkpoints stay the same."""

    def forward(self, x):
        y = Product.apply(x.flatten(0, -2), self.weight.to(x.dtype))
        return y.unflatten(0, x.shape[:-1])


def multiply_in_fp8(model):
    """Make the matrices of all blocks multiply in fp8. The head does not, since its errors would be in the logits."""
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = Linear8
