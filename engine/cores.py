"""
A faster CPU: how many cores a run has for itself, and memory that stays with the process.

OpenMP's threads wait for each other at every barrier. With one of two cores busy elsewhere, two threads are several
times slower than one: records/README.md has the numbers. So a compiled run on a CPU looks every few steps, and uses as
many threads as there are free cores. The number of threads changes the order of sums, and so their last bits:
OMP_NUM_THREADS fixes it, and nothing is looked at.
"""

import contextlib
import ctypes
import os
import time

import torch
import torch._inductor.config


def cores_for(device):
    """The Cores of a compiled run, or None: on a GPU, if the user has fixed the threads, or without Linux' /proc."""
    if device != "cpu" or "OMP_NUM_THREADS" in os.environ or not os.path.exists("/proc/stat"):
        return None
    # Otherwise compiled kernels keep the number of threads that they were compiled with.
    torch._inductor.config.cpp.dynamic_threads = True
    return Cores()


class Cores:
    def __init__(self):
        self.all = torch.get_num_threads()
        self.seen = self.look()

    def look(self):
        """Seconds on the clock, and CPU seconds of all other processes of this machine."""
        with open("/proc/stat", encoding="utf-8") as f:
            user_nice_system = map(int, f.readline().split()[1:4])
        busy = sum(user_nice_system) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy - sum(os.times()[:4])

    def take(self):
        """Use as many threads as cores were free since the last look. Returns a line that says so, "" for no change."""
        then, before = self.seen
        time.sleep(max(0.0, then + 0.5 - time.perf_counter()))  # /proc/stat counts hundredths of seconds
        now, others = self.seen = self.look()
        share = (others - before) / (now - then)
        threads = min(self.all, max(1, round(os.cpu_count() - share)))
        if threads == torch.get_num_threads():
            return ""
        torch.set_num_threads(threads)
        return f"other programs use {share:.1f} cores: {threads} of {self.all} threads from here on"


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
