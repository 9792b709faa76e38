"""
engine/hardware.py: its operators are what they say in fp64, and torch.library.opcheck finds nothing wrong with their
shapes and gradients.
"""
import os
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from engine import hardware
from engine.hardware import ROUTES, linear, onednn_linear

onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("cuda, mps, first, names", [
    (True, True, "cuda", "cuda, mps, cpu"), (True, False, "cuda", "cuda, cpu"), (False, True, "mps", "mps, cpu"),
    (False, False, "cpu", "cpu")])
def test_auto_is_the_first_of_cuda_mps_and_cpu_that_is_here(monkeypatch, cuda, mps, first, names):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert hardware.pick_device("auto") == first and hardware.pick_device("cpu") == "cpu"
    with pytest.raises(ValueError, match=f"device='tpu:1' is not here: there is {names}$"):
        hardware.pick_device("tpu:1")


@pytest.mark.parametrize("build, says", [(None, "this build of torch has no CUDA: pip install"),
                                         ("13.0", "torch finds no GPU: nvidia-smi should list one")])
def test_without_cuda_it_says_whether_the_build_or_the_gpu_is_missing(monkeypatch, build, says):
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"device='cuda:0' is not here: there is .*; {says}"):
        hardware.pick_device("cuda:0")


@onednn
@pytest.mark.parametrize("rows, n_in, n_out", [
    ((4, 64), 96, 256), ((4, 64), 256, 96), ((7,), 33, 5), ((2, 3, 5), 8, 1)])
def test_onednn_has_the_product_and_its_gradients_to_1e_6(rows, n_in, n_out):
    x, w, grad = numbers(*rows, n_in), numbers(n_out, n_in, seed=1), numbers(*rows, n_out, seed=2)
    results = []
    for product, dtype in ((onednn_linear, torch.float32), (F.linear, torch.float64)):
        a, b = (t.detach().to(dtype).requires_grad_() for t in (x, w))
        y = product(a, b)
        y.backward(grad.to(dtype))
        results.append((y, a.grad, b.grad))
    for ours, true in zip(*results):
        assert (ours - true).abs().max() <= 1e-6 * true.abs().max()


@onednn
def test_onednn_takes_any_strides():
    x, w = numbers(24, 16).T, numbers(24, 40, seed=1).T                   # (16, 24), (40, 24), both by columns
    torch.testing.assert_close(onednn_linear(x, w), x @ w.T, rtol=1e-5, atol=1e-5)


@onednn
def test_onednn_multiplies_many_rows_in_fp32_and_nothing_else(monkeypatch):
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.found |= op is torch.ops.apertus.linear.default
            return op(*args, **(kwargs or {}))

    def by_onednn(rows, dtype):
        calls = Calls()
        calls.found = False
        with calls:
            linear(numbers(*rows, 8).to(dtype), numbers(3, 8, seed=1).to(dtype))
        return calls.found

    monkeypatch.setattr(ROUTES, "products", "onednn")
    assert by_onednn((2, 5), torch.float32) and by_onednn((2,), torch.float32)
    assert not by_onednn((1, 1), torch.float32)
    assert not by_onednn((2, 5), torch.float64) and not by_onednn((2, 5), torch.bfloat16)
    monkeypatch.setattr(ROUTES, "products", "torch")
    assert not by_onednn((2, 5), torch.float32)


@onednn
def test_torch_finds_the_operators_sound():
    torch.library.opcheck(onednn_linear, (numbers(2, 6, 8).requires_grad_(), numbers(5, 8, seed=1).requires_grad_()))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float64, 1e-14)])
def test_one_row_alone_is_the_same_product_compiled_and_not(dtype, tolerance):
    x, w = numbers(1, 1, 96).to(dtype), numbers(64, 96, seed=1).to(dtype)
    want = x.double() @ w.double().T
    with torch.no_grad():
        for product in (linear, torch.compile(linear, backend="aot_eager", fullgraph=True)):
            y = product(x, w)
            assert y.dtype == dtype and (y - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's own figure is in /proc")
def test_the_memory_of_a_cpu_is_the_kernels():
    with open("/proc/meminfo", encoding="utf-8") as f:
        kilobytes = int(re.search(r"MemTotal:\s+(\d+) kB", f.read())[1])
    assert hardware.memory_of("cpu") == pytest.approx(kilobytes * 1024, rel=0.01)
    assert hardware.memory_of("mps") is None


@pytest.mark.parametrize("triton, cc, there, works", [
    (True, None, {"gcc"}, True), (True, None, {"clang"}, True), (True, None, set(), False), (False, None, {"gcc"}, False),
    (True, "mycc", {"mycc"}, True), (True, "mycc", {"gcc"}, False)])
def test_on_cuda_compilation_wants_triton_and_a_c_compiler(monkeypatch, triton, cc, there, works):
    """Triton builds a stub for each kernel by gcc, clang or $CC (triton/runtime/build.py)."""
    monkeypatch.setattr(hardware, "find_spec", lambda name: triton and object() or None)
    monkeypatch.setattr(hardware.shutil, "which", lambda name: f"/usr/bin/{name}" if name in there else None)
    monkeypatch.delenv("CC", raising=False)
    if cc:
        monkeypatch.setenv("CC", cc)
    assert hardware.can_compile(torch.device("cuda")) == works


def test_cudnn_plans_no_attention():
    import model  # noqa: F401
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_what_is_free_is_the_smaller_of_the_machines_and_the_jobs_own(tmp_path):
    """By the kernel's documents: MemAvailable in KiB, and cgroup v2's limit, use and cache, in bytes."""
    proc, group = tmp_path / "proc", tmp_path / "groups" / "job_7"
    os.makedirs(proc / "self")
    os.makedirs(group)

    def free():
        return hardware.free_on_host(str(proc), str(tmp_path / "groups"))
    assert free() is None
    (proc / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:   500 kB\nHugePages_Total:  0\n")
    assert free() == 500 * 1024
    (proc / "self" / "cgroup").write_text("1:cpu:/x\n0::/job_7\n")
    (group / "memory.current").write_text("300000\n")
    (group / "memory.stat").write_text("anon 200000\ninactive_file 90000\n")
    (group / "memory.max").write_text("max\n")
    assert free() == 500 * 1024
    (group / "memory.max").write_text("400000\n")
    assert free() == 400000 - (300000 - 90000)
