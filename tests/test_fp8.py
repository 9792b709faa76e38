"""
engine/fp8.py: three products of numbers that are rounded to eight bits by hand, in fp64; what a run with them keeps.
"""
import shutil
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import refused, same, script, weights
from engine import fp8, parallel
from model import Apertus, ApertusConfig


def numbers(*shape, seed, spread=1.0):
    """Signed log-normal numbers: at spread 3 the middle one is a 20,000th of the largest of thousands."""
    rng = torch.Generator().manual_seed(seed)
    sign = torch.randn(shape, generator=rng).sign()
    return sign * torch.exp(spread * torch.randn(shape, generator=rng))


# Bits of mantissa, exponent of the smallest normal number, and the largest number: the OCP's 8-bit formats, table 1.
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)


def rounded(x, form):
    """x scaled so that its largest is the format's largest, rounded half to even there, and scaled back; in fp64."""
    bits, least, largest = form
    scale = (x.float().abs().max() / largest).double()
    z = x.double() / scale
    exponent = z.abs().log2().floor().clamp(min=least)
    step = torch.exp2(exponent - bits)
    return (z / step).round() * step * scale


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_three_products_are_those_of_numbers_rounded_by_hand(spread, compiled):
    """Compiled into one graph, too. fp32 sums are 1e-6 off the exact ones."""
    x, w = numbers(2, 24, 32, seed=0, spread=spread), numbers(64, 32, seed=1, spread=spread)
    grad = numbers(2, 24, 64, seed=2, spread=spread)
    x.requires_grad_(), w.requires_grad_()
    product = torch.compile(fp8.linear, fullgraph=True, backend="aot_eager") if compiled else fp8.linear
    y = product(x, w)
    y.backward(grad)
    x8, w8, g8 = rounded(x.detach(), E4M3), rounded(w.detach(), E4M3), rounded(grad, E5M2)
    g8_rows, x8_rows = g8.flatten(0, 1), x8.flatten(0, 1)
    for ours, true in ((y, x8 @ w8.T), (x.grad, g8 @ w8), (w.grad, g8_rows.T @ x8_rows)):
        assert (ours - true).abs().max() <= 1e-6 * true.abs().max()


def off(x, form):
    """The most that rounding may move a number: half a unit of its last place."""
    bits, least, largest = form
    relative = 2.0 ** -(bits + 1)
    return (relative * x.abs()).clamp(min=relative * 2.0**least * x.abs().max() / largest)


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_products_are_as_near_to_the_exact_ones_as_their_formats_say(spread):
    """|ab - (a + da)(b + db)| <= |a| db + |b| da + da db, summed; with w = 1 each number is seen by itself."""
    x, grad = numbers(40, 16, seed=3, spread=spread), numbers(40, 16, seed=4, spread=spread)
    for w in (torch.eye(16), numbers(16, 16, seed=5, spread=spread)):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = fp8.linear(a, b)
        y.backward(grad)
        X, W, G = x.double(), w.double(), grad.double()
        dx, dw, dg = off(X, E4M3), off(W, E4M3) * (W != 0), off(G, E5M2)
        for ours, true, most in (
                (y, X @ W.T, X.abs() @ dw.T + dx @ W.abs().T + dx @ dw.T),
                (a.grad, G @ W, G.abs() @ dw + dg @ W.abs() + dg @ dw),
                (b.grad, G.T @ X, G.abs().T @ dx + dg.T @ X.abs() + dg.T @ dx)):
            assert ((ours - true).abs() <= most + 1e-6 * true.abs().max()).all()


@pytest.mark.parametrize("size", [1e-18, 1.0, 1e18])
def test_any_size_keeps_its_largest_number_and_zeros_stay_zeros(size):
    """Without a scale 1e-18 would be 0 and 1e18 infinite."""
    x = size * numbers(16, 16, seed=6)
    y = fp8.linear(x, torch.eye(16))
    assert y.abs().max() == pytest.approx(x.abs().max().item(), rel=1e-6, abs=0)
    assert fp8.linear(torch.zeros(16, 16), x).eq(0).all()


def test_what_is_not_a_number_is_not_hidden():
    for bad in (float("nan"), float("inf")):
        x = numbers(16, 16, seed=7)
        x[3, 5] = bad
        assert fp8.linear(x, torch.eye(16)).isnan().any()


class Products(TorchDispatchMode):
    """Counts products in eight bits, by the shape of what is multiplied with."""

    def __init__(self):
        super().__init__()
        self.done = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten._scaled_mm.default:
            self.done[tuple(sorted(args[1].shape))] += 1
        return op(*args, **(kwargs or {}))


SHAPE = ApertusConfig(block_size=32, vocab_size=64, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=48)


def test_all_matrices_of_blocks_are_in_eight_bits_forward_and_backward_and_recomputed_as_others_are():
    """By hand, of two layers 32 wide at 32 positions: q and o; k and v; up and down."""
    again = {}
    for mode in ("none", "selective", "full"):
        model = Apertus(SHAPE)
        fp8.multiply_in_fp8(model)
        parallel.recompute_activations(model, mode)
        idx = torch.arange(32).view(1, 32)
        with Products() as products:
            loss = model(idx, idx)[1]
            forward = products.done.total()
            loss.backward()
        again[mode] = products.done - again.get("none", Counter())
        assert forward == 6 * 2
    with Products() as products:
        model(idx)                                         # the logits too
    assert products.done.total() == 6 * 2
    assert again["none"].total() == 3 * 6 * 2
    assert again["selective"] == {(32, 48): 4}
    assert again["full"] == {(32, 32): 4, (16, 32): 4, (32, 48): 4}


def trained(data, out, *args):
    args = "--n_layer=1", "--eval_every=0", "--last_eval_windows=8", *args
    return script("train.py", "configs/tiny.py", f"--data={data}", f"--out={out}", *args)


def test_a_run_resumed_has_the_bits_of_one_that_was_not_stopped_and_may_go_back_to_its_dtype(data, tmp_path):
    whole, half, back, plain = (tmp_path / name for name in ("whole", "half", "back", "plain"))
    assert trained(data, whole, "--fp8").returncode == 0
    assert trained(data, plain).returncode == 0
    assert not same(weights(whole), weights(plain))
    for run, fp8_is in ((half, "--fp8"), (back, "--fp8=False")):
        shutil.copytree(whole, run)
        shutil.rmtree(run / "ckpt" / "step-00000020")
        (run / "summary.json").unlink()
        done = trained(data, run, fp8_is, "--resume")
        assert done.returncode == 0 and "step-00000010" in done.stdout, done.stderr
    assert same(weights(half), weights(whole))
    assert not same(weights(back), weights(whole))


@pytest.mark.parametrize("flags, says", [
    (["--n_embd=72", "--n_head=4"], ["n_embd=72", "k_and_v=36", "leave it out"]),
    (["--ffn_dim=168"], ["ffn_width=168", "sizes that 16 divides"]),
    (["--block_size=20", "--micro_batch=2"], ["positions_of_a_micro_batch=40"]),
    (["--ffn=lowrank", "--ffn_rank=16"], ["dense matrices", "ffn=lowrank"])])
def test_what_cannot_be_in_eight_bits_is_refused_before_anything_is_written(data, tmp_path, flags, says):
    refused(trained(data, tmp_path / "run", "--fp8", *flags), "fp8=True", *says)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device, capability, fits", [
    ("cuda:0", (8, 0), False), ("cuda:0", (8, 6), False), ("cuda:0", (8, 9), True), ("cuda", (9, 0), True),
    ("cuda:1", (12, 0), True), ("mps", None, False), ("cpu", None, True)])
def test_gpus_before_ada_and_apples_are_refused(monkeypatch, device, capability, fits):
    """Compute capability 8.9 is the first whose tensor cores have these formats (CUDA's programming guide)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if fits:
        return fp8.check_fp8(SHAPE, 32, device)
    with pytest.raises(ValueError, match=f"^fp8=True wants a GPU that multiplies in it .* and {device} does not"):
        fp8.check_fp8(SHAPE, 32, device)
