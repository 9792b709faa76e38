"""
Before a run of several GPUs: the speed of each rank, and room for checkpoints. It takes seconds; a slow GPU or link
that nobody notices costs days, since all ranks wait for the slowest.
"""

import shutil
import socket
import statistics
import time

import torch
import torch.distributed as dist

from engine.checkpoint import gather
from engine.memory import count_trained, format_gb

SLOW = 0.9      # a rank is slow below this share of the median


def check(model, settings, ranks, device):
    """
    Print how fast the ranks of several GPUs multiply and add up tensors, and name slow ranks. ValueError if the disk
    has no room for a checkpoint. model: on the meta device; settings: a dict.
    """
    if ranks.size == 1 or not device.startswith("cuda"):
        return
    speeds = dict(
        tflops=multiply(device, torch.bfloat16, width=8192, seconds=5.0) / 1e12,
        all_reduce_gbs=add_up(ranks, device, size=2**28, times=20) / 1e9)
    report(gather(dict(speeds, host=socket.gethostname()), ranks.save_group), ranks)
    check_disk(model, settings, shutil.disk_usage(settings["out"]).free)


def multiply(device, dtype, width, seconds):
    """FLOP/s of products of square matrices, measured for some seconds."""
    a, b = torch.randn(2, width, width, device=device, dtype=dtype)
    a @ b                                                  # warms up
    products, start = 0, synchronise(device)
    while (now := synchronise(device)) - start < seconds:
        for _ in range(10):
            a @ b
        products += 10
    return 2 * width**3 * products / (now - start)


def add_up(ranks, device, size, times):
    """Bytes/s that a rank sends while all ranks add up `size` bytes in rings."""
    message = torch.zeros(size // 4, device=device)
    dist.all_reduce(message)                               # the first one connects
    start = synchronise(device)
    for _ in range(times):
        dist.all_reduce(message)
    return times * 2 * size * (ranks.size - 1) / ranks.size / (synchronise(device) - start)


def synchronise(device):
    """The time in seconds once the device has done all of its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def report(speeds, ranks):
    """Print the medians over ranks, and each rank below SLOW of them. speeds: {name: number, host: text} of each."""
    if not ranks.is_main:
        return
    medians = {name: statistics.median(speed[name] for speed in speeds) for name in ("tflops", "all_reduce_gbs")}
    print(f"{ranks.size} ranks: matrix products {medians['tflops']:.1f} TFLOP/s, all-reduce "
          f"{medians['all_reduce_gbs']:.1f} GB/s (medians)")
    for rank, speed in enumerate(speeds):
        slow = [f"{name} {speed[name]:.1f}" for name, median in medians.items() if speed[name] < SLOW * median]
        if slow:
            print(f"rank {rank} on {speed['host']} is slow: {', '.join(slow)}; all ranks wait for it")


def check_disk(model, settings, free):
    """ValueError if a checkpoint takes more bytes than are free."""
    states = 8 if settings["optimizer"] == "adamw" or settings["state_dtype"] == "bfloat16" else 12
    size = count_trained(model) * (4 + states)
    if free < size:
        raise ValueError(f"{settings['out']}: a checkpoint takes {format_gb(size)} GB, and {format_gb(free)} are free: "
                         "free some, or take another --out")
