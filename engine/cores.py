"""
How many cores a run has for itself.

OpenMP's threads wait for each other at every barrier. With one of two cores busy elsewhere, two threads are several
times slower than one: records/README.md has the numbers. So a compiled run on a CPU looks every few steps, and uses as
many threads as there are free cores. The number of threads changes the order of sums, and so their last bits:
OMP_NUM_THREADS fixes it, and nothing is looked at.
"""

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
