"""Bytes and FLOP/s of this machine, and of the GPUs that tools/plan.py knows."""

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch


class GPU(NamedTuple):
    """One model of GPU: FLOP/s by its vendor; links at about 80 and 90 % of the vendor's numbers, as measured."""
    flops: float              # bf16 FLOP/s of a dense matrix product
    memory: float             # bytes that torch reports; a card sold as 80 GB has 79.1 GiB
    node_gbs: float           # GB/s of one GPU to the others of its node; 0: no such link
    net_gbs: float            # GB/s of one GPU to other nodes
    per_node: int             # GPUs of a node


# {part of torch.cuda.get_device_name() in lower case: GPU}. A name that contains another comes first.
GPUS = {
    "a100":      GPU(312e12, 84.9e9, 240, 22, 8),
    "h100-pcie": GPU(756e12, 84.9e9, 50, 22, 8),
    "h100-nvl":  GPU(835e12, 99.9e9, 50, 22, 8),
    "h100":      GPU(989e12, 84.9e9, 360, 45, 8),
    "gh200":     GPU(989e12, 101.4e9, 360, 22, 4),
    "h200":      GPU(989e12, 150.0e9, 360, 45, 8),
    "b200":      GPU(2250e12, 191.4e9, 720, 45, 8),
    "l40s":      GPU(362e12, 47.6e9, 0, 0, 1),
    "4090":      GPU(165e12, 25.2e9, 0, 0, 1),
}


def name_in_table():
    """The name of this machine's GPU in GPUS; None if it is not there."""
    name = torch.cuda.get_device_name().lower()
    return next((known for known in GPUS if known.replace("-", " ") in name), None)


def usage(flops):
    """
    For the log: MFU, the model's FLOP/s as a share of this GPU's peak (None if the GPU is not in GPUS), and the peak
    memory so far.
    """
    name = name_in_table()
    return dict(mfu=flops / GPUS[name].flops if name else None, memory_gib=torch.cuda.max_memory_allocated() / 2**30)


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
