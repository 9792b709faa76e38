"""engine/attention.py against torch's own attention in fp64, and torch.library.opcheck on the operator."""

import pytest
import torch
import torch.nn.functional as F

from engine import attention
from engine.attention import attend_on_cpu

BOTH = pytest.mark.parametrize("formula", [True, False], ids=["formula", "segments"])


@pytest.fixture
def ways(monkeypatch):
    """ways(formula): choose the formula or one kernel call per document. Slices of 16 queries cut short windows too."""
    monkeypatch.setattr(attention, "SLICE", 16)
    return lambda formula: monkeypatch.setattr(attention, "by_formula", lambda q: formula)


def qkv(T, dtype=torch.float32):
    """Two windows of T positions, as the model has them: q (2, 4, T, 8), k and v (2, 2, T, 8)."""
    torch.manual_seed(T)
    return [torch.randn(2, T, heads, 8, dtype=dtype).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]


def documents_of(T):
    torch.manual_seed(T)
    return (torch.rand(2, T) < 0.2).cumsum(1)


def torchs_attention(q, k, v, doc):
    seen = (doc[:, None, :, None] == doc[:, None, None, :]).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def with_gradients(attend, inputs, doc):
    """attend(*inputs, doc) and the gradients of its squares, as one fp64 tensor."""
    y = attend(*inputs, doc)
    found = y, *torch.autograd.grad(y.square().sum(), inputs)
    return torch.cat([x.detach().double().flatten() for x in found])


# bf16 keeps 8 bits, an error of 2^-8 of the largest value; scores rounded before softmax make it four times that.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("T", [1, 37])
@BOTH
def test_attention_and_its_gradients_are_torchs_in_fp64(ways, formula, T, dtype, tolerance):
    ways(formula)
    inputs = qkv(T, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    for doc in (documents_of(T), None):
        true = with_gradients(torchs_attention, wide, torch.zeros(2, T) if doc is None else doc)
        ours = with_gradients(attend_on_cpu, inputs, doc)
        assert (ours - true).abs().max() <= tolerance * true.abs().max()


@pytest.mark.parametrize(
    "dtype, T, formula", [(torch.bfloat16, 512, True), (torch.bfloat16, 513, False), (torch.float32, 64, False)]
)
def test_the_formula_is_for_short_windows_in_bf16_and_keeps_probabilities(dtype, T, formula):
    y, *kept = attention.attention(None, *qkv(T, dtype))
    slices = [(2, 4, 64, end) for end in range(64, 513, 64)]
    assert [x.shape for x in kept] == (slices if formula else [(2, 4, T)])
    assert y.transpose(1, 2).is_contiguous()


def test_a_key_adds_up_gradients_of_all_slices_in_fp32(ways):
    """With equal scores query i gives each key 1/i. Added in bf16, the last terms of these sums would be lost."""
    zeros = torch.zeros(1, 1, 512, 8, dtype=torch.bfloat16)
    v = torch.zeros_like(zeros).requires_grad_()
    attend_on_cpu(zeros, zeros, v).sum().backward()
    shares = 1 / torch.arange(1, 513, dtype=torch.float64)
    want = shares.flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(v.grad[0, 0, :, 0].double(), want, rtol=2**-7, atol=0)


@BOTH
def test_torch_finds_no_fault_with_the_operator(ways, formula):
    """Shapes, strides and gradients, on which torch.compile relies."""
    ways(formula)
    torch.library.opcheck(attention.attention, (documents_of(20), *qkv(20)))
