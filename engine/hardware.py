"""
What a CPU needs to be fast: which library multiplies, and attention that skips other documents. Plain PyTorch; model.py says what is computed.

    linear(x, w)                      x @ w.T: oneDNN where MKL is slow, a compiled sum where there is one row (decoding), else F.linear
    segment_attention(q, k, v, doc)   causal attention inside documents, one call for each

Both hide something from torch.compile (a kernel that it would refuse, lengths that differ in every batch) behind an operator of their own,
torch.library.custom_op: a name, what it computes, the shapes of the result for the compiler, and the gradient.
"""

import contextlib
import ctypes
import os
import shutil
import sys
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F


def at_least_fp32(x):
    """bf16 and fp16 become fp32, fp64 stays: sums and exponentials are done in this."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def onednn_is_faster():
    """MKL gives AMD's AVX-512 cores its AVX2 kernels: 95 instead of oneDNN's 215 GFLOP/s a core in fp32 (Zen 5; pytorch/builder#504)."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return "AuthenticAMD" in f.read() and torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    except OSError:
        return False


ONEDNN = onednn_is_faster()                                # by the processor's name, not by a race: runs must be repeatable to the bit


def by_onednn(x):
    """Whether oneDNN multiplies x, rather than what torch takes by itself."""
    return ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32


def linear(x, w):
    """x (..., K) @ w (N, K).T by what is fastest here."""
    if x.device.type == "cpu" and x.shape[:-1].numel() == 1:                   # decoding: a walk through memory, at whose speed a sum goes
        if torch.compiler.is_compiling() and not torch.is_grad_enabled() and w.is_contiguous() and x.dtype != torch.float64:
            return (x[..., None, :].float() * w.float()).sum(-1).to(x.dtype)   # MKL takes 1.4 to 2.2 times as long
        return F.linear(x, w)
    return onednn_linear(x, w) if by_onednn(x) else F.linear(x, w)


@torch.library.custom_op("apertus::linear", mutates_args=())
def onednn_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x (..., K) @ w (N, K).T in fp32 by oneDNN, of any strides. Inductor takes the operator inside for frozen weights only."""
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")


@onednn_linear.register_fake
def _(x, w):
    return x.new_empty(*x.shape[:-1], len(w))


def onednn_gradients(ctx, grad):
    x, w = ctx.saved_tensors
    g, h = grad.flatten(0, -2).T, x.flatten(0, -2).T       # (N, rows), (K, rows): oneDNN copies the first, so let that be the smaller
    return onednn_linear(grad, w.T), onednn_linear(g, h) if len(g) <= len(h) else onednn_linear(h, g).T


onednn_linear.register_autograd(onednn_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def documents(doc):
    """Where the documents of ids (B, T) lie: slices (rows, columns) of each; all rows at once if every row is one document."""
    B, T = doc.shape
    cuts = [[0, *(1 + row.diff().nonzero()[:, 0]).tolist(), T] for row in doc]
    if max(map(len, cuts)) == 2:
        return [(slice(0, B), slice(0, T))]
    return [(slice(b, b + 1), slice(start, end)) for b, row in enumerate(cuts) for start, end in zip(row, row[1:])]


def unfilled(q):
    """Room for what segment_attention returns: (B, H, T, D), laid out as (B, T, H, D) for the projection that follows, and (B, H, T)."""
    B, H, T, D = q.shape
    return q.new_empty(B, T, H, D).transpose(1, 2), at_least_fp32(q.new_empty(B, T, H)).transpose(1, 2)


@torch.library.custom_op("apertus::segment_attention", mutates_args=())
def segment_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, doc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Document-masked attention without a mask: one causal call for each document of the batch. Masking then makes attention cheaper instead
    of dearer: work falls with the sum of squared lengths (2-5x less than a T x T mask at 8 documents).
    q (B, H, T, D), k and v (B, K, T, D), doc (B, T) -> (B, H, T, D), and the logsumexp of the scores (B, H, T), for the gradient.
    bf16 is computed in fp32: SDPA's CPU kernel takes twice as long in bf16 for documents of 100 tokens, and as long for 250.
    """
    y, lse = unfilled(q)
    q, k, v = map(at_least_fp32, (q, k, v))
    for b, t in documents(doc):
        y[b, :, t], lse[b, :, t] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q[b, :, t], k[b, :, t], v[b, :, t], is_causal=True)
    return y, lse


@segment_attention.register_fake
def _(q, k, v, doc):
    return unfilled(q)


@torch.library.custom_op("apertus::segment_attention_backward", mutates_args=())
def segment_attention_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, doc: torch.Tensor, y: torch.Tensor,
                               lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    out = tuple(torch.empty_like(t) for t in (q, k, v))
    inputs = [at_least_fp32(x) for x in (grad, q, k, v, y, lse)]
    for b, t in documents(doc):
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*(x[b, :, t] for x in inputs), dropout_p=0.0, is_causal=True)
        for whole, part in zip(out, parts):
            whole[b, :, t] = part
    return out


@segment_attention_backward.register_fake
def _(grad, q, k, v, doc, y, lse):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


segment_attention.register_autograd(lambda ctx, grad, _: (*segment_attention_backward(grad, *ctx.saved_tensors), None),
                                    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output))


def pick_device(device):
    """The device that is asked for; of "auto", the first of cuda, mps and cpu that is here. ValueError for one that is not."""
    have = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    if device != "auto" and not have.get(device.split(":")[0]):
        raise ValueError(f"device={device!r} is not here: there is {', '.join(k for k, v in have.items() if v)}")
    return next(k for k, v in have.items() if v) if device == "auto" else device


def pick_dtype(dtype, device):
    """float32 or bfloat16, as a torch.dtype; of "auto", bf16 where the device multiplies in it (of CPUs: AVX-512 BF16 or AMX)."""
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: there is auto, float32 and bfloat16")
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.startswith("cuda"):                                           # T4 and V100 only imitate it, many times slower than fp32
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has = device == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.bfloat16 if has else torch.float32


def keep_freed_memory():
    """
    Let malloc keep what a step frees for the next one, instead of giving it back to the kernel, which zeroes it anew page by page: a step
    of the laptop's model takes 140 ms instead of 160, with a fifth of the system time. Tensors above 32 MB are given back as ever (glibc's
    limit, set here because setting one number freezes the other at 128 KB). Only glibc has this; who sets its variables is left alone.
    """
    if os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}:
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):           # other C libraries, and Windows
        malloc_option = ctypes.CDLL(None).mallopt
        malloc_option(-3, 2**25)                                            # M_MMAP_THRESHOLD, in bytes
        malloc_option(-1, 2**31 - 1)                                        # M_TRIM_THRESHOLD


def can_compile(device):
    """Whether torch.compile has what it needs on this machine: a C++ compiler on the CPU, Triton on CUDA."""
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # or torch first compiles a program to see if AVX works: 4 s
    if device.type == "cuda":
        return find_spec("triton") is not None
    cxx = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return device.type == "cpu" and shutil.which(cxx) is not None


# -----------------------------------------------------------------------------
# kinds of GPU


class GPU(NamedTuple):
    """A kind of GPU. Its vendor says FLOP/s and bytes; the links are what is left of the vendor's, about 80 and 90 %."""
    flops: float              # bf16 FLOP/s of a dense matrix product
    memory: float             # bytes
    node_gbs: float = 0.0     # GB/s of one GPU to the others of its node; 0: it has no such link
    net_gbs: float = 0.0      # GB/s of one GPU to other nodes
    per_node: int = 1


# By what torch.cuda.get_device_name() contains, in lower case. A GH200 is called H200 as well, so it stands first.
GPUS = {
    "a100": GPU(312e12, 80e9, 240, 22, 8),
    "h100": GPU(989e12, 80e9, 360, 45, 8),
    "gh200": GPU(989e12, 96e9, 360, 22, 4),
    "h200": GPU(989e12, 141e9, 360, 45, 8),
    "b200": GPU(2250e12, 180e9, 720, 45, 8),
    "l40s": GPU(362e12, 48e9),
    "4090": GPU(165e12, 24e9)}


def vendor_flops(device):
    """bf16 FLOP/s of this machine's GPU as its vendor says; None for another device, and for a GPU that is not in GPUS."""
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name().lower()
    return next((gpu.flops for kind, gpu in GPUS.items() if kind in name), None)
