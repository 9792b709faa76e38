"""
engine/hardware.py and decoding.py against the Linux kernel's files, and products in fp64.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, table

import attention
import model
from configurator import read_config
from engine import decoding, hardware
from engine.log import Log


@pytest.mark.parametrize("names", ["cuda, mps, cpu", "mps, cpu", "cpu"])
def test_auto_is_the_first_of_cuda_mps_and_cpu_that_is_here(monkeypatch, names):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in names)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in names)
    assert hardware.pick_device("auto") == names.partition(",")[0]
    assert hardware.pick_device("cpu") == "cpu"
    missing = "tpu:1" if "cuda" in names else "cuda:0"
    for version, hint in ((None, ""), ("13.0", "; this torch wants a driver for CUDA 13.0 .nvidia-smi.")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(ValueError, match=f"device='{missing}' is not here: there is {names}{hint}$"):
            hardware.pick_device(missing)


def test_configs_for_gpus_never_fall_back_to_a_cpu():
    others = {file.stem for file in Path(ROOT, "configs").glob("*.py") if read_config(file).get("device") != "cuda"}
    assert others == {"laptop", "long", "recipe", "tiny"}


DTYPES = """
auto     | cpu    |             | float32
auto     | cpu    | avx512_bf16 | bfloat16
bfloat16 | cpu    |             | bfloat16
auto     | cuda:0 | emulation   | float32
auto     | cuda:0 | bf16        | bfloat16
auto     | mps    | avx512_bf16 | float32
"""


@pytest.mark.parametrize("dtype, device, has, found", table(DTYPES))
def test_auto_is_bf16_where_the_processor_multiplies_in_it(monkeypatch, dtype, device, has, found):
    """A T4 only emulates bf16."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has == "avx512_bf16")
    gpu = {"emulation": {True}, "bf16": {True, False}}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation in gpu[has])
    assert hardware.pick_dtype(dtype, device) == getattr(torch, found)


COMPILERS = """
cuda:0 |     | g++ Python.h | yes
cuda:0 |     | g++  | no
cuda   |     | Python.h | no
cpu    |     | g++  | yes
cpu    | CXX | g++  | no
cpu    | CXX | mine | yes
mps    |     | g++  | no
"""


@pytest.mark.parametrize("device, variable, there, works", table(COMPILERS))
def test_compilation_wants_a_compiler_and_on_cuda_the_headers_of_python(
    monkeypatch, tmp_path, device, variable, there, works
):
    monkeypatch.setattr(hardware.sysconfig, "get_path", lambda name: str(tmp_path))
    if "Python.h" in there:
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(hardware.shutil, "which", lambda name: name if name in there.split() else None)
    monkeypatch.setattr(hardware.os, "environ", {variable: "mine"})
    assert hardware.can_compile(device) == (works == "yes")
    assert hardware.parts_to_compile(True, device) == (works == "yes")
    assert hardware.parts_to_compile(False, device) == (works == "yes" and "cuda" in device and "activations")


def test_without_them_a_gpu_masks_documents_by_their_ids(monkeypatch):
    monkeypatch.setattr(attention, "HAS_FLEX", False)
    doc = SimpleNamespace(is_cuda=True, shape=(1, 1), device="cuda")
    assert attention.document_mask(doc, 64) is doc


def test_malloc_keeps_freed_memory(monkeypatch):
    """mallopt(3): M_MMAP_THRESHOLD is -3, of at most 32 MB; M_TRIM_THRESHOLD is -1."""
    told = []
    libc = SimpleNamespace(mallopt=lambda *args: told.append(args))
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: libc)
    hardware.keep_freed_memory()
    assert told == [(-3, 32 * 2**20), (-1, 2**31 - 1)]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@torch.no_grad()
def test_a_row_times_a_matrix_is_the_product_in_fp64_compiled_too(dtype, tolerance):
    torch.manual_seed(0)
    linear = torch.nn.Sequential(model.Linear(96, 7))
    decoding.one_row_products(linear)
    x, w = torch.randn(1, 1, 96, dtype=dtype), linear[0].weight.normal_().to(dtype)
    want = x.double() @ w.double().T
    for product in (torch.compile(linear, backend="eager", fullgraph=True), linear):
        y = product(x)
        assert y.dtype == dtype
        assert (y - want).abs().max() <= tolerance * want.abs().max()


def test_free_memory_is_the_smaller_of_the_machines_and_the_jobs(monkeypatch):
    """By the Linux kernel's documents: MemAvailable in KiB, and cgroup v2's limit, use and cache in bytes."""
    assert hardware.free_on_host() is None or hardware.free_on_host() > 0
    there = {
        "/proc/self/cgroup": "1:cpu:/x\n0::/job_7\n",
        "/sys/fs/cgroup/job_7/memory.current": "300000\n",
        "/sys/fs/cgroup/job_7/memory.stat": "anon 200000\ninactive_file 90000\n",
    }
    monkeypatch.setattr(hardware.Path, "read_text", lambda path: there.get(str(path), ""))
    assert hardware.free_on_host() is None
    there["/proc/meminfo"] = "MemTotal:  900 kB\nMemAvailable:   500 kB\nHugePages_Total:  0\n"
    assert hardware.free_on_host() == 500 * 1024
    there["/sys/fs/cgroup/job_7/memory.max"] = "400000\n"
    assert hardware.free_on_host() == 400_000 - (300_000 - 90_000)


# Processes that run, us among them; OMP_NUM_THREADS; cores of ours; cores of the machine
SLEEP = """
1/95 |   | 2 | 2 | 5000
2/95 |   | 2 | 2 | 1000
2/95 | 1 | 2 | 2 | 5000
3/95 |   | 2 | 8 | 5000
8/95 |   | 2 | 8 | 1000
"""


@pytest.mark.parametrize("running, threads, ours, cores, checks", table(SLEEP))
def test_threads_sleep_later_where_each_has_an_idle_core(monkeypatch, running, threads, ours, cores, checks):
    """The fields of /proc/loadavg, by proc_loadavg(5): three averages, running / existing, the newest process."""
    monkeypatch.setattr(hardware.Path, "read_text", lambda path: f"9.15 9.05 9.01 {running} 4711\n")
    monkeypatch.setattr(hardware.os, "environ", {"OMP_NUM_THREADS": threads})
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: set(range(int(ours))))
    monkeypatch.setattr(hardware.os, "cpu_count", lambda: int(cores))
    assert hardware.checks_before_sleep() == int(checks)


@pytest.mark.parametrize("name, flops", [("NVIDIA H100 80GB HBM3", 989e12), ("Tesla T4", None)])
def test_the_flops_of_a_gpu_are_its_vendors_and_the_bar_has_its_memory(tmp_path, monkeypatch, name, flops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4 * 2**30)
    mfu = flops and pytest.approx(1e12 / flops)
    assert hardware.usage(1e12) == dict(mfu=mfu, memory_gib=3.0, reserved_gib=4.0)
    log = Log(str(tmp_path), is_main=True)
    log.open(0, 9, flops_per_token=1e9)
    log.step(0, 2.5, seconds=1.0, tokens_in_step=1000)
    assert str(log.bar).endswith("loss 2.500, 1.0k tok/s, 4.0 GiB]")
    log.close_bar()
