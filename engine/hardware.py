"""
The parts of this machine, and speed on a CPU. Nothing here changes results.

    pick_device, pick_dtype, can_compile    the meaning of "auto" here, and whether torch.compile can work
    memory_of, free_on_host, vendor_flops   bytes and FLOP/s
    spin_briefly, keep_freed_memory         a faster CPU
    one_row                                 a faster product for decoding

Import this file before torch: libgomp reads the number that spin_briefly sets when torch loads it.
"""

import contextlib
import ctypes
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


def spin_briefly():
    """
    Let a thread of OpenMP that waits for others sleep after 1,000 looks, about 10 microseconds, instead of 300,000.

    If another program uses a core, the thread that shares it is late at every barrier. The others would spin for
    milliseconds and keep it from moving to their cores: 1,000 looks are as fast on an idle machine, and 5 times as fast
    on a busy one (records/README.md). Threads and results stay the same.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = "1000"


spin_briefly()
import torch  # noqa: E402


def at_least_fp32(x):
    """bf16 and fp16 become fp32, fp64 stays: sums and exponentials are computed in this dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide)


# -----------------------------------------------------------------------------
# the meaning of "auto"


def pick_device(device):
    """The name of a device; "auto" is the first of cuda, mps and cpu. ValueError if this machine has no such device."""
    here = ["cpu"]
    if torch.backends.mps.is_available():
        here.insert(0, "mps")
    if torch.cuda.is_available():
        here.insert(0, "cuda")
    if device == "auto":
        return here[0]
    kind, _, _ = device.partition(":")
    if kind in here:
        return device
    why = ""
    if kind == "cuda" and torch.version.cuda:
        why = "; torch finds no GPU: nvidia-smi should list one"
    elif kind == "cuda":
        why = "; this build of torch has no CUDA: pip install torch, without +cpu, brings one that has"
    raise ValueError(f"device={device!r} is not here: there is {', '.join(here)}{why}")


def pick_dtype(dtype, device):
    """
    float32 or bfloat16, as a torch.dtype. "auto" is bf16 on devices that multiply in it.

    These are CPUs with AVX-512 BF16 or AMX, and GPUs but T4 and V100, which emulate bf16 many times slower than fp32.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: there is auto, float32 and bfloat16")
    if dtype != "auto":
        return getattr(torch, dtype)
    has = False
    if device.startswith("cuda"):
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device == "cpu":
        has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has else torch.float32


def can_compile(device):
    """Whether torch.compile finds its tools: a C++ compiler on a CPU, Triton and a C compiler on CUDA."""
    # torch would first compile a program to see whether AVX works: seconds of every start.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    kind = torch.device(device).type
    if kind == "cuda":
        named = os.environ.get("CC")
        c_compilers = [named] if named else ["gcc", "clang"]
        return find_spec("triton") is not None and any(map(shutil.which, c_compilers))
    usual = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX") or usual
    return kind == "cpu" and shutil.which(compiler) is not None


# -----------------------------------------------------------------------------
# a faster CPU


def keep_freed_memory():
    """
    Let malloc keep the memory that a step frees. It would return it to the kernel, which fills every new page with
    zeros: an eighth of a step of the laptop's model.

    Tensors above 32 MB are still returned: that is glibc's upper limit of the first number, which must be set because
    setting the second alone freezes the first at 128 KB. The user's own settings, and other C libraries, stay as they
    are.
    """
    if os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}:
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):        # no glibc
        malloc_option = ctypes.CDLL(None).mallopt
        malloc_option(-3, 2**25)                                         # M_MMAP_THRESHOLD, in bytes
        malloc_option(-1, 2**31 - 1)                                     # M_TRIM_THRESHOLD


def one_row(x, w):
    """
    x (..., K) @ w (N, K).T -> (..., N) for a single row x, as in decoding: to be compiled, and without gradients.

    Such a product reads all of w once, at the pace of the memory, which compiled sums keep and MKL does not. Sums are
    in fp32.
    """
    x32 = x[..., None, :].float()                                        # (..., 1, K)
    # Four places of memory are read 1.3 times as fast as one.
    quarters = w.unflatten(0, (4, -1)) if len(w) % 4 == 0 else w[None]
    sums = [(x32 * part.float()).sum(-1) for part in quarters]           # (..., N / 4) each
    return torch.cat(sums, dim=-1).to(x.dtype)


# -----------------------------------------------------------------------------
# bytes and FLOP/s


class GPU(NamedTuple):
    """A kind of GPU: FLOP/s and bytes as its vendor says; of the vendor's links about 80 and 90 %, as measured."""
    flops: float              # bf16 FLOP/s of a dense matrix product
    memory: float             # bytes
    node_gbs: float = 0.0     # GB/s of one GPU to the others of its node; 0: it has no such link
    net_gbs: float = 0.0      # GB/s of one GPU to other nodes
    per_node: int = 1


# By a part of torch.cuda.get_device_name() in lower case. A GH200 contains H200 as well, so it comes first.
GPUS = {
    "a100": GPU(312e12, 80e9, 240, 22, 8),
    "h100": GPU(989e12, 80e9, 360, 45, 8),
    "gh200": GPU(989e12, 96e9, 360, 22, 4),
    "h200": GPU(989e12, 150.7e9, 360, 45, 8),    # sold as 141 GB; the driver says 143,771 MiB
    "b200": GPU(2250e12, 180e9, 720, 45, 8),
    "l40s": GPU(362e12, 48e9),
    "4090": GPU(165e12, 24e9)}


def vendor_flops(device):
    """bf16 FLOP/s of this machine's GPU; None for another device, and for a GPU that is not in GPUS."""
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name().lower()
    return next((gpu.flops for kind, gpu in GPUS.items() if kind in name), None)


def memory_of(device):
    """Bytes of memory that a device has in all; None if unknown."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    if device == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def free_on_host(proc="/proc", groups="/sys/fs/cgroup"):
    """
    Bytes of main memory that are free; None if unknown (no Linux). A container or a Slurm job has a limit of its own
    (cgroup v2), against which the cache of files does not count.
    """
    def number(path, name):
        """The number after a name in a file."""
        words = Path(path).read_text().replace(":", " ").split()
        return int(words[words.index(name) + 1])

    try:
        free = 1024 * number(f"{proc}/meminfo", "MemAvailable")
    except (OSError, ValueError):
        return None
    # Without a limit there is no file, or it says "max".
    with contextlib.suppress(OSError, ValueError):
        _, _, job = Path(proc, "self", "cgroup").read_text().rpartition("0::")
        group = Path(groups + job.strip())
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text()) - number(group / "memory.stat", "inactive_file")
        free = min(free, limit - used)
    return free
