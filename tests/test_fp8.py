"""engine/fp8.py: products against fp64 products of numbers rounded to eight bits by hand, and which matrices use it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine import fp8
from engine.recompute import recompute_activations
from model import Apertus, ApertusConfig, Linear

# Bits of mantissa, exponent of the smallest normal number, and the largest number: the OCP's 8-bit formats, table 1.
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
SHAPE = ApertusConfig(block_size=32, vocab_size=64, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=48)


def normal(*shape, seed, spread=1.0):
    """Signed log-normal numbers. At spread 3 the median is 1/20,000 of the largest of thousands."""
    torch.manual_seed(seed)
    return torch.randn(shape).sign() * torch.exp(spread * torch.randn(shape))


def matrix(w):
    """A layer that multiplies by w (N, K) in eight bits."""
    linear = Linear(*w.shape[::-1])
    linear.weight.data = w
    return fp8.Linear8(linear)


def rounded(x, form):
    """x (fp64) scaled to the format's largest number, rounded half to even in the format, and scaled back."""
    bits, least, largest = form
    scale = (x.float().abs().max() / largest).double()
    z = x.double() / scale
    step = torch.exp2(z.abs().log2().floor().clamp(min=least) - bits)
    return (z / step).round() * step * scale


@pytest.mark.parametrize("spread, size", [(0.3, 1.0), (3.0, 1e-18), (0.3, 1e18)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_three_products_are_those_of_numbers_rounded_by_hand(spread, size, compiled):
    """Also compiled, as one graph. fp32 sums are within 1e-6. Without scales 1e-18 would be 0 and 1e18 infinite."""
    x = size * normal(2, 24, 32, seed=0, spread=spread)
    grad = normal(2, 24, 64, seed=2, spread=spread)
    linear = matrix(normal(64, 32, seed=1, spread=spread))
    call = torch.compile(linear, fullgraph=True, backend="aot_eager") if compiled else linear
    y = call(x.requires_grad_())
    y.backward(grad)
    x8, w8, g8 = rounded(x.detach(), E4M3), rounded(linear.weight.detach(), E4M3), rounded(grad, E5M2)
    products = x8 @ w8.T, g8 @ w8, g8.flatten(0, 1).T @ x8.flatten(0, 1)
    for ours, true in zip((y, x.grad, linear.weight.grad), products):
        assert (ours - true).abs().max() <= 1e-6 * true.abs().max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_stay_visible_and_zeros_stay_zeros(bad):
    x, linear = torch.zeros(16, 16), matrix(torch.eye(16))
    assert linear(x).eq(0).all()
    x[3, 5] = bad
    assert linear(x).isnan().any()


@pytest.mark.parametrize("mode, again", [("none", 0), ("selective", 1 / 2), ("full", 1)])
def test_all_matrices_of_blocks_multiply_in_eight_bits_and_are_recomputed_like_others(mode, again):
    """
    FLOPs by hand: two layers 32 wide, at 32 positions; q and o are 32 wide, k and v 16, up and down 48. Each matrix has
    one product forward and two backward, the head none in eight bits. up and down are half of all weights.
    """
    model = Apertus(SHAPE)
    before, model.dtype = [*model.parameters()], torch.bfloat16
    fp8.multiply_in_fp8(model, 32, "cpu")
    recompute_activations(model, mode)
    idx = torch.arange(32).view(1, 32)
    with FlopCounterMode(display=False) as counter:
        model.loss(idx, idx).backward()
    weights = 2 * 32 * 32 + 2 * 16 * 32 + 2 * 32 * 48
    assert counter.flop_counts["Global"][torch.ops.aten._scaled_mm] == 2 * 2 * 32 * weights * (3 + again)
    for p, same in zip(before, model.parameters(), strict=True):
        assert p is same
        assert p.grad.isfinite().all()
        assert p.grad.dtype == torch.float32


def test_a_gpu_before_ada_is_an_error(monkeypatch):
    """Compute capability 8.9 is the first whose tensor cores have these formats (CUDA's programming guide)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    fp8.check_fp8(SHAPE, 32, "cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ValueError, match="^fp8=True wants a GPU that multiplies in it .* and cuda:0 does not"):
        fp8.check_fp8(SHAPE, 32, "cuda:0")
