"""
What the machine has, and what a CPU needs to be fast. What is computed is in model.py; nothing here changes
it.

    linear(x, w)                      x @ w.T, by the library that is fastest for these shapes on this processor

    pick_device, pick_dtype           what `auto` means on this machine
    keep_freed_memory, can_compile    malloc that keeps what a step frees; whether torch.compile can work here

torch.compile would trip over oneDNN's kernel, which it refuses. It is therefore an operator of its own
(torch.library.custom_op): a name, what it computes, the shape of the result for the compiler, and the gradient.
"""

import contextlib
import ctypes
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A product has K inputs and N outputs.


def at_least_fp32(x):
    """bf16 and fp16 become fp32, fp64 stays: sums and exponentials are computed in this."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide)


@dataclass
class Routes:
    """Ways to the same numbers, to rounding. engine/routes.py times which are the fastest on this CPU."""
    products: str = "torch"         # who multiplies fp32 matrices: torch's own library | onednn
    attention: str = "auto"         # (model.way_on_cpu): formula | kernel | wide
    rows: int = 0                   # of logits in the loss; 0 = model.chunk_rows' rule
    decoding: str = "sums"          # compiled decoding multiplies one row: sums | library


ROUTES = Routes()

# -----------------------------------------------------------------------------
# which library multiplies


def by_onednn(x):
    """Whether oneDNN multiplies x, and not the library that torch takes by itself."""
    # MKL has AVX2 kernels alone for AMD, on some CPUs half as fast as oneDNN (pytorch/builder#504).
    return ROUTES.products == "onednn" and x.device.type == "cpu" and x.dtype == torch.float32


def linear(x, w):
    """x (..., K) @ w (N, K).T -> (..., N), by what is fastest here."""
    rows = x.shape[:-1].numel()
    one_row = x.device.type == "cpu" and rows == 1
    # One row, as in decoding, reads all of w once: memory sets the pace, which compiled sums keep and MKL
    # does not. Sums are in fp32, so fp64 cannot take this way.
    decoding = one_row and torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if decoding and ROUTES.decoding == "sums" and w.is_contiguous() and x.dtype != torch.float64:
        x32 = x[..., None, :].float()                                    # (..., 1, K)
        # One loop over all quarters: four places of memory are read 1.3 times as fast as one.
        quarters = w.unflatten(0, (4, -1)) if len(w) % 4 == 0 else w[None]
        sums = [(x32 * part.float()).sum(-1) for part in quarters]       # (..., N / 4) each
        return torch.cat(sums, dim=-1).to(x.dtype)
    if by_onednn(x) and not one_row:
        return onednn_linear(x, w)
    return F.linear(x, w)


@torch.library.custom_op("apertus::linear", mutates_args=())
def onednn_linear(x: Tensor, w: Tensor) -> Tensor:
    """x (..., K) @ w (N, K).T -> (..., N) in fp32 by oneDNN, of any strides."""
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")


@onednn_linear.register_fake
def _(x, w):
    rows = x.shape[:-1]
    return x.new_empty(*rows, len(w))


def onednn_gradients(ctx, grad):
    """The gradients of x and w from that of the product (..., N)."""
    x, w = ctx.saved_tensors
    g = grad.flatten(0, -2).T                                            # (N, rows)
    h = x.flatten(0, -2).T                                               # (K, rows)
    grad_x = onednn_linear(grad, w.T)
    # oneDNN copies its first argument, so let that be the smaller one.
    if len(g) <= len(h):
        return grad_x, onednn_linear(g, h)
    return grad_x, onednn_linear(h, g).T


def keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


onednn_linear.register_autograd(onednn_gradients, setup_context=keep_inputs)


# -----------------------------------------------------------------------------
# what this machine has


def pick_device(device):
    """The device by name; "auto" is the first of cuda, mps and cpu that is here. ValueError for one that is not."""
    here = ["cpu"]
    if torch.backends.mps.is_available():
        here.insert(0, "mps")
    if torch.cuda.is_available():
        here.insert(0, "cuda")
    if device == "auto":
        return here[0]
    kind = device.split(":")[0]
    if kind not in here:
        why = ""
        if kind == "cuda" and torch.version.cuda:
            why = "; torch finds no GPU: nvidia-smi should list one"
        elif kind == "cuda":
            why = "; this build of torch has no CUDA: pip install torch, without +cpu, brings one that has"
        raise ValueError(f"device={device!r} is not here: there is {', '.join(here)}{why}")
    return device


def pick_dtype(dtype, device):
    """
    float32 or bfloat16, as a torch.dtype. "auto" is bf16 where the device multiplies in it: of CPUs those
    with AVX-512 BF16 or AMX, of GPUs not T4 and V100, which only imitate it, many times slower than fp32.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: there is auto, float32 and bfloat16")
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.startswith("cuda"):
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device == "cpu":
        has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        has = False
    return torch.bfloat16 if has else torch.float32


def keep_freed_memory():
    """
    Let malloc keep what a step frees for the next one. It would give it back to the kernel, which has to
    make every page anew, filled with zeros: an eighth of a step of the laptop's model.

    Tensors above 32 MB are still given back: that is glibc's own upper limit, set here because to set one
    of the two numbers freezes the other at 128 KB. Other C libraries have no such option. The user's own
    settings are kept.
    """
    if os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}:
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc
        malloc_option = ctypes.CDLL(None).mallopt
        malloc_option(-3, 2**25)  # M_MMAP_THRESHOLD, in bytes
        malloc_option(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def can_compile(device):
    """Whether torch.compile has what it needs: a C++ compiler on the CPU, Triton and a C compiler on CUDA."""
    # torch would first compile a program to see whether AVX works: seconds of every start.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if device.type == "cuda":
        named = os.environ.get("CC")
        c_compilers = [named] if named else ["gcc", "clang"]
        return find_spec("triton") is not None and any(map(shutil.which, c_compilers))
    usual = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX") or usual
    return device.type == "cpu" and shutil.which(compiler) is not None


# -----------------------------------------------------------------------------
# kinds of GPU


class GPU(NamedTuple):
    """
    A kind of GPU. Its vendor says FLOP/s and bytes; the links are what is left of the vendor's, about 80
    and 90 %.
    """
    flops: float              # bf16 FLOP/s of a dense matrix product
    memory: float             # bytes
    node_gbs: float = 0.0     # GB/s of one GPU to the others of its node; 0: it has no such link
    net_gbs: float = 0.0      # GB/s of one GPU to other nodes
    per_node: int = 1


# By what torch.cuda.get_device_name() contains, in lower case. A GH200 is called H200 as well, so it stands
# first.
GPUS = {
    "a100": GPU(312e12, 80e9, 240, 22, 8),
    "h100": GPU(989e12, 80e9, 360, 45, 8),
    "gh200": GPU(989e12, 96e9, 360, 22, 4),
    "h200": GPU(989e12, 150.7e9, 360, 45, 8),    # sold as 141 GB; the driver says 143,771 MiB
    "b200": GPU(2250e12, 180e9, 720, 45, 8),
    "l40s": GPU(362e12, 48e9),
    "4090": GPU(165e12, 24e9)}


def memory_of(device):
    """Bytes of memory that a device has in all; None where that is not known."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    if device == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def free_on_host(proc="/proc", groups="/sys/fs/cgroup"):
    """
    Bytes of main memory that may still be taken; None where that is not known (no Linux). A container or a job of
    Slurm has a limit of its own (cgroup v2), against which the cache of files does not count.
    """
    def text(path):
        with open(path, encoding="utf-8") as f:
            return f.read()

    try:
        sizes = dict(line.split(":") for line in text(f"{proc}/meminfo").splitlines())
        free = 1024 * int(sizes["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):
        return None
    # No such limit: there is no file, or it says "max".
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        group = groups + text(f"{proc}/self/cgroup").split("0::")[1].strip()
        taken = dict(line.split() for line in text(f"{group}/memory.stat").splitlines())
        used = int(text(f"{group}/memory.current")) - int(taken["inactive_file"])
        free = min(free, int(text(f"{group}/memory.max")) - used)
    return free


def vendor_flops(device):
    """
    bf16 FLOP/s of this machine's GPU as its vendor says; None for another device, and for a GPU that is not
    in GPUS.
    """
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name().lower()
    for kind, gpu in GPUS.items():
        if kind in name:
            return gpu.flops
    return None
