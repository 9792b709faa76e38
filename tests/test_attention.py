"""
engine/attention.py: all ways to attend give the numbers of torch's own attention in fp64, and torch.library.opcheck
finds nothing wrong with the operators' shapes and gradients.
"""
import functools

import pytest
import torch
import torch.nn.functional as F

from engine import attention
from engine.attention import documents, formula_attention, segment_attention
from model import causal_attention


def numbers(*shape, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.requires_grad_()


def with_gradients(f, inputs, dtype):
    """f(*inputs) and its gradients for an incoming one of normal numbers: computed in dtype, as one fp64 tensor."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y = f(*inputs)
    incoming = numbers(*y.shape, seed=9).detach().to(y.dtype)
    found = y, *torch.autograd.grad(y, inputs, incoming)
    return torch.cat([x.detach().double().flatten() for x in found])


def torchs_attention(q, k, v, doc):
    """By torch's SDPA, in fp64 and with a mask."""
    T = q.shape[2]
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    if doc is not None:
        mask = mask & (doc[:, None, :, None] == doc[:, None, None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


# bf16 keeps 8 bits: 2^-8 of the largest, and scores that are rounded before softmax four times that.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("T", [1, 3, 64, 150])           # queries are taken 64 at a time
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("way", ["formula", "kernel", "wide"])
def test_every_way_to_attend_is_torchs_attention_in_fp64(way, documents, T, dtype, tolerance):
    inputs = [numbers(2, heads, T, 16, seed=seed) for seed, heads in enumerate((4, 2, 2))]
    rare = torch.rand(2, T, generator=torch.Generator().manual_seed(5)) < 0.2
    doc = rare.cumsum(1) if documents else None
    true = with_gradients(functools.partial(torchs_attention, doc=doc), inputs, torch.float64)
    ours = with_gradients(functools.partial(causal_attention, doc=doc, way=way), inputs, dtype)
    assert (ours - true).abs().max() <= tolerance * true.abs().max()


def test_wide_rounds_its_result_alone():
    """Half a unit in the last of bf16's 8 bits; the kernel rounds probabilities too."""
    inputs = [numbers(2, heads, 64, 16, seed=seed).detach().bfloat16() for seed, heads in enumerate((4, 2, 2))]
    true = torchs_attention(*(x.double() for x in inputs), None)
    for way, rounds_once in (("wide", True), ("kernel", False)):
        error = (causal_attention(*inputs, way=way).double() - true).abs()
        assert (error <= 2**-8 * true.abs() + 1e-6).all() == rounds_once


def test_what_a_key_collects_from_all_slices_is_added_up_in_fp32(monkeypatch):
    """Of equal scores the i-th query gives each key 1/i: a harmonic number, whose last terms are less than bf16 adds."""
    monkeypatch.setattr(attention, "SLICE", 4)
    zeros = torch.zeros(1, 1, 256, 16, dtype=torch.bfloat16)
    v = torch.zeros_like(zeros).requires_grad_()
    causal_attention(zeros, zeros, v, way="formula").sum().backward()
    shares = 1 / torch.arange(1, 257, dtype=torch.float64)
    want = shares.flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(v.grad[0, 0, :, 0].double(), want, rtol=2**-7, atol=0)


@pytest.mark.parametrize("ids", [[[0] * 12, [3] * 12], [[0] * 5 + [1] * 7, [2, 3] + [4] * 10]])
@pytest.mark.parametrize("operator", [segment_attention, formula_attention])
def test_torch_finds_attention_by_segments_and_by_its_formula_sound(operator, ids, monkeypatch):
    monkeypatch.setattr(attention, "SLICE", 5)
    q, k, v = (numbers(2, heads, 12, 8, seed=heads).float().detach().requires_grad_() for heads in (6, 2, 2))
    torch.library.opcheck(operator, (q, k, v, torch.tensor(ids)))


def test_documents_cover_every_position_once_and_none_crosses_a_border():
    doc = (torch.rand(5, 40, generator=torch.Generator().manual_seed(0)) < 0.2).cumsum(1)
    seen = torch.zeros_like(doc)
    for rows, columns in documents(doc):
        seen[rows, columns] += 1
        assert len(doc[rows, columns].unique()) == 1
    assert (seen == 1).all() and len(documents(doc)) == sum(len(row.unique()) for row in doc)


def test_rows_of_one_document_each_are_one_call_only_if_all_are():
    assert documents(torch.zeros(5, 40)) == [(slice(0, 5), slice(0, 40))]
    one_and_two = torch.tensor([[7, 7, 7], [0, 0, 1]])
    first, second = slice(0, 1), slice(1, 2)
    assert documents(one_and_two) == [(first, slice(0, 3)), (second, slice(0, 2)), (second, slice(2, 3))]
