"""
weights/quantised.py against bitsandbytes (golden values: packed bytes, maxima, decoded weights), dense products, and
the tensors that torch.compile keeps for the backward pass.
"""

import pytest
import torch
import torch.nn.functional as F
from tiny import small, tensors
from torch.testing import assert_close

import convert
from weights import lora
from weights.quantised import CODE, Quantised, decode, quantise_blocks, to_nf4

# bitsandbytes 0.50.2, quantize_4bit(w, blocksize=64, quant_type="nf4") of w (200, 128), without and with double
# quantisation.
BITSANDBYTES = tensors("nf4.npz")
IDX = torch.arange(32)[None]
both = pytest.mark.parametrize("base", ["int8", "nf4"])


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wide():
    return small(n_embd=64, n_head=4, ffn_dim=128)


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


def test_nf4_is_bitsandbytes_bit_for_bit_and_its_maxima_are_ten_times_as_precise():
    """With compress_statistics=True bitsandbytes stores a maximum in 8 bits; fp16 has 11."""
    w, decoded, maxima = (BITSANDBYTES[name] for name in ("w", "decoded", "maxima"))
    q, halves = to_nf4(w)
    assert CODE.equal(BITSANDBYTES["code"])
    assert q.flatten().equal(BITSANDBYTES["packed"].flatten())
    assert halves.equal(maxima.half())
    assert decode(q, maxima, w.shape, torch.float32).equal(decoded)
    assert 10 * relative(Quantised(w, "nf4").decoded(), decoded) < relative(BITSANDBYTES["double_decoded"], decoded)


@pytest.mark.parametrize("base, error, bits", [("int8", 0.0087, 8 + 32 / 4096), ("nf4", 0.092, 4 + 16 / 64)])
def test_error_and_bits_of_gaussian_weights_are_those_of_the_formats(base, error, bits):
    """With 4,096 columns the error is that of the formats' specification; a row of zeros has none."""
    w = gaussian(512, 4096)
    w[3] = 0
    layer = Quantised(w, base)
    assert relative(layer.decoded(), w) == pytest.approx(error, rel=0.03)
    assert not layer.decoded()[3].any()
    stored = sum(part.nbytes for part in layer.buffers()) * 8 / w.numel()
    assert stored == pytest.approx(bits, rel=1e-4)


@both
def test_value_and_gradient_are_those_of_the_dense_matrix_which_no_compiled_layer_keeps(base):
    layer = Quantised(gaussian(256, 128), base)
    x = gaussian(3, 16, 128, seed=1).requires_grad_()
    want = F.linear(x.relu(), layer.decoded()).square()
    exact = torch.autograd.grad(want.sum(), x)

    def f(x):
        return layer(x.relu()).square()

    for product in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        y = product(x)
        assert_close(y, want)
        assert_close(torch.autograd.grad(y.sum(), x, retain_graph=True), exact)
    kept = {t.dtype for t in y.grad_fn.saved_tensors if t.numel() >= 256 * 128 // 2}
    assert len(kept) == 1 and kept < {torch.int8, torch.uint8}


@pytest.mark.parametrize("rows, K", [(1, 128), (8, 72), (9, 128)])
def test_a_few_rows_in_bf16_are_multiplied_in_8_bits(rows, K):
    """The result is within two of bf16's last bits. torch's own 8-bit product would read beyond a row of 72."""
    layer = Quantised(gaussian(64, K), "int8")
    x = gaussian(rows, K, seed=1).bfloat16()
    found = layer(x)
    assert found.dtype == torch.bfloat16
    assert relative(found.float(), F.linear(x.float(), layer.decoded())) < 2**-7


@both
def test_a_model_keeps_all_but_the_matrices_of_its_blocks(base):
    model, few = wide(), quantise_blocks(wide(), base)
    with pytest.raises(ValueError):
        convert.save_hf(few, "/proc/few")
    parameters, kept = (dict(m.named_parameters()) for m in (model, few))
    assert parameters.keys() - kept.keys() == {n for n, p in parameters.items() if "layers" in n and p.ndim == 2}
    assert all(p.equal(parameters[name]) for name, p in kept.items())
    assert few.num_params() == model.num_params()
    assert relative(few(IDX), model(IDX)) < (0.03 if base == "int8" else 0.3)


def test_an_adapter_on_nf4_trains_and_merges_into_its_decoded_matrix():
    model = lora.add_lora(quantise_blocks(wide(), "nf4"), dict(r=4, lora_alpha=8, target_modules=lora.MATRICES))
    lora.init_lora(model, 1)
    model.loss(IDX, IDX).backward()
    for layer in lora.lora_layers(model).values():
        assert layer.lora_B.weight.grad.any()
        torch.nn.init.normal_(layer.lora_B.weight, std=0.1)
    adapted = model(IDX)
    lora.merge_adapters(model)
    assert_close(model(IDX), adapted, rtol=1e-4, atol=1e-5)
