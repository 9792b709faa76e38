"""
The meaning of "auto" on this machine, and settings that make a CPU faster without changing results.

    pick_device, pick_dtype, can_compile    the meaning of "auto" here, and whether torch.compile can work
    keep_freed_memory                       spares a CPU the zeroing of new memory in every step

Import this file before torch: libgomp reads GOMP_SPINCOUNT, which this file sets, when torch loads it.
"""

import contextlib
import ctypes
import os
import shutil

# Let a thread of OpenMP that waits for others sleep after it has checked 1,000 times, about 10 microseconds, instead of
# 300,000. If another program uses a core, the thread that shares it is late at every barrier. The others would spin for
# milliseconds and keep it from moving to their cores: 1,000 checks are as fast on an idle machine, and 5 times as fast
# on a busy one (records/README.md). Threads and results stay the same.
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "1000"
# On a GPU, segments that can grow leave fewer gaps in memory.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
import torch  # noqa: E402

# -----------------------------------------------------------------------------
# the meaning of "auto"


def pick_device(device):
    """The name of a device; "auto" is the first of cuda, mps and cpu. ValueError if this machine has no such device."""
    works = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    available = [name for name in works if works[name]]
    if device == "auto":
        return available[0]
    if device.split(":")[0] in available:
        return device
    raise ValueError(f"device={device!r} is not here: there is {', '.join(available)}")


def pick_dtype(dtype, device):
    """
    float32 or bfloat16, as a torch.dtype. "auto" is bf16 on devices that multiply in it.

    These are CPUs with AVX-512 BF16, such as all with AMX, and GPUs newer than T4 and V100, which emulate bf16 many
    times slower than fp32.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: there is auto, float32 and bfloat16")
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.startswith("cuda"):
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = device == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def can_compile(device):
    """Whether torch.compile works here, which wants a C++ compiler. Not on MPS, where torch's support is young."""
    # torch would first compile a program to see whether AVX works, which takes seconds at every start.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    compiler = os.environ.get("CXX", "cl" if os.name == "nt" else "g++")
    return "mps" not in str(device) and shutil.which(compiler) is not None


def keep_freed_memory():
    """
    Let malloc keep the memory that a step frees. Else malloc returns it to the kernel, which fills every new page with
    zeros: an eighth of the time of a step of configs/laptop.py.

    Memory of tensors above 32 MB is still returned, since glibc allows no larger M_MMAP_THRESHOLD. It has to be set
    because setting M_TRIM_THRESHOLD alone freezes it at 128 KB. Other C libraries stay as they are.
    """
    with contextlib.suppress(Exception):                                 # no glibc
        malloc_option = ctypes.CDLL(None).mallopt
        malloc_option(-3, 2**25)                                         # M_MMAP_THRESHOLD, in bytes
        malloc_option(-1, 2**31 - 1)                                     # M_TRIM_THRESHOLD
