"""engine/cores.py: threads by the seconds of other programs, which the kernel and a process of our own count."""
import os
import subprocess
import sys

import pytest
import torch

from engine import cores


@pytest.fixture
def free(monkeypatch):
    """A Cores of four threads on four cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    yield cores.Cores()
    torch.set_num_threads(before)


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="Linux alone counts there")
def test_another_process_counts_and_our_own_does_not():
    """A child burns half a second of CPU before we wait for it: it is another's until os.times() has it as ours."""
    free = cores.Cores()
    _, before = free.look()
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    _, during = free.look()
    child.communicate(b"\n")
    _, after = free.look()
    assert during - before > 0.4 and during - after > 0.2


def test_as_many_threads_as_cores_are_free(free, monkeypatch):
    """Seconds on the clock, and of others since: 2.1 cores of 4 are busy, then 3.9, then none."""
    looks = iter([(10.0, 21.0), (20.0, 60.0), (30.0, 60.0), (40.0, 60.4)])
    free.seen = 0.0, 0.0
    monkeypatch.setattr(free, "look", lambda: next(looks))
    for says, threads in (("use 2.1 cores: 2 of 4", 2), ("1 of 4", 1), ("4 of 4", 4), ("", 4)):
        said = free.take()
        assert says in said
        assert bool(says) == bool(said)
        assert torch.get_num_threads() == threads


def test_the_users_number_of_threads_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert cores.cores_for("cpu") is None
    monkeypatch.delenv("OMP_NUM_THREADS")
    with torch._inductor.config.patch("cpp.dynamic_threads", False):
        assert cores.cores_for("cuda:0") is None
        assert isinstance(cores.cores_for("cpu"), cores.Cores)
        assert torch._inductor.config.cpp.dynamic_threads
