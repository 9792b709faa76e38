"""
This machine, settings that make its CPU faster without changing results, and the GPUs that tools/plan.py knows.

    pick_device, pick_dtype                 the meaning of "auto" here
    can_compile, parts_to_compile           whether torch.compile can work, and what it compiles in fine-tuning
    keep_freed_memory                       spares a CPU the zeroing of new memory in every step
    GPUS, usage                             FLOP/s of GPUs, and how much of them a run uses
    memory_of, free_on_host                 bytes of memory

Import this file before torch: libgomp reads GOMP_SPINCOUNT, which this file sets, when torch loads it.
"""

import contextlib
import ctypes
import os
import re
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

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
    driver = f"; this torch wants a driver for CUDA {torch.version.cuda} (nvidia-smi)" if torch.version.cuda else ""
    raise ValueError(f"device={device!r} is not here: there is {', '.join(available)}{driver}")


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
    """
    Whether torch.compile works here, which wants a C++ compiler and, for Triton on CUDA, the headers of Python. Not on
    MPS, where torch's support is young.
    """
    # torch would first compile a program to see whether AVX works, which takes seconds at every start.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    compiler = os.environ.get("CXX", "cl" if os.name == "nt" else "g++")
    has_headers = "cuda" not in str(device) or os.path.exists(f"{sysconfig.get_path('include')}/Python.h")
    return "mps" not in str(device) and shutil.which(compiler) is not None and has_headers


def parts_to_compile(compile, device):
    """
    The parts of a model that torch.compile compiles in fine-tuning, as in parallel.distribute(): all, "activations" or
    nothing. Batches of many shapes would compile blocks again and again; xIELU is compiled once for all shapes.
    """
    if not can_compile(device):
        return False
    return compile or device.startswith("cuda") and "activations"


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


# -----------------------------------------------------------------------------
# FLOP/s and bytes


class GPU(NamedTuple):
    """One model of GPU: FLOP/s by its vendor; links at about 80 and 90 % of the vendor's numbers, as measured."""
    flops: float              # bf16 FLOP/s of a dense matrix product
    memory: float             # bytes that torch reports; a card sold as 80 GB has 79.1 GiB
    memory_gbs: float         # GB/s of its memory: 90 % of the vendor's number, which a copy reaches
    node_gbs: float           # GB/s of one GPU to the others of its node
    net_gbs: float            # GB/s of one GPU to other nodes; 0: no usual network
    per_node: int             # GPUs of a node


# {part of torch.cuda.get_device_name() in lower case: GPU}. A name that contains another comes first.
GPUS = {
    "a100":      GPU(312e12, 84.9e9, 1835, 240, 22, 8),
    "h100-pcie": GPU(756e12, 84.9e9, 1800, 50, 22, 8),
    "h100-nvl":  GPU(835e12, 99.9e9, 3545, 50, 22, 8),
    "h100":      GPU(989e12, 84.9e9, 3015, 360, 45, 8),
    "gh200":     GPU(989e12, 101.4e9, 3600, 360, 22, 4),
    "h200":      GPU(989e12, 150.0e9, 4320, 360, 45, 8),
    "b200":      GPU(2250e12, 191.4e9, 7200, 720, 45, 8),
    # 24 GB/s is what NCCL counts on from PCIe 4.0 x16. The driver of a 4090 has no peer-to-peer: what it sends crosses
    # PCIe twice, through main memory.
    "l40s":      GPU(362e12, 47.6e9, 778, 24, 0, 8),
    "4090":      GPU(165e12, 25.2e9, 907, 12, 0, 8),
}


def name_in_table():
    """The name of this machine's GPU in GPUS; None if it is not there."""
    name = torch.cuda.get_device_name().lower()
    return next((known for known in GPUS if known.replace("-", " ") in name), None)


def usage(flops):
    """
    For the log: MFU, the model's FLOP/s as a share of this GPU's peak (None if the GPU is not in GPUS), and the peaks
    of allocated memory and of the memory that torch reserves for it, gaps included.
    """
    name = name_in_table()
    return dict(
        mfu=flops / GPUS[name].flops if name else None,
        memory_gib=torch.cuda.max_memory_allocated() / 2**30,
        reserved_gib=torch.cuda.max_memory_reserved() / 2**30)


def memory_of(device):
    """Bytes of memory that a device has in all, for each rank; None if unknown."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    # Windows has no sysconf.
    if device == "cpu" and hasattr(os, "sysconf"):
        # All ranks of a node share it.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return None


def free_on_host():
    """
    Bytes of main memory that are free; None if unknown (no Linux). A container or a Slurm job has a limit of its own
    (cgroup v2), in which inactive file cache counts as free.
    """
    def read_number(path, label=""):
        """The first number behind a label in a file."""
        return int(re.search(rf"{label}\s*(\d+)", Path(path).read_text())[1])

    free = None
    # Without a limit there is no file, or it says "max".
    with contextlib.suppress(OSError, TypeError):
        free = 1024 * read_number("/proc/meminfo", "MemAvailable:")
        _, _, job = Path("/proc/self/cgroup").read_text().rpartition("0::")
        group = f"/sys/fs/cgroup{job.strip()}"
        limit = read_number(f"{group}/memory.max") - read_number(f"{group}/memory.current")
        free = min(free, limit + read_number(f"{group}/memory.stat", "inactive_file"))
    return free
