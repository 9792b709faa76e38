"""
posttrain/quantised.py against bitsandbytes (golden values: packed bytes, maxima, decoded weights), dense products, and
what torch.compile keeps for the backward pass.
"""

import copy
import dataclasses
import json
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import convert
import tokenizer
from conftest import ROOT, script
from model import Apertus, ApertusConfig
from posttrain import lora
from posttrain.quantised import (
    CODE, Quantised, eight_bit_code, int8_dense, nf4_dense, of_8_bits, quantise, to_8_bits, to_int8, to_nf4,
)

# bitsandbytes 0.50.2, quantize_4bit(w, blocksize=64, quant_type="nf4") of w (200, 128), without and with double
# quantisation.
BITSANDBYTES = np.load(os.path.join(ROOT, "tests", "golden", "nf4.npz"))
CONFIG = ApertusConfig(
    block_size=32, vocab_size=128, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=128, init_std=0.1,
)


def golden(name):
    return torch.from_numpy(BITSANDBYTES[name])


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


def test_nf4_is_bitsandbytes_bit_for_bit():
    packed, maxima = to_nf4(golden("w"))
    assert torch.equal(CODE, golden("code"))
    assert torch.equal(packed, golden("packed")) and torch.equal(maxima, golden("maxima"))
    assert torch.equal(nf4_dense(packed, maxima, (200, 128), torch.float32), golden("decoded"))


def test_double_quantised_weights_are_decoded_as_by_bitsandbytes_bit_for_bit():
    """compress_statistics=True; 400 maxima, so that the second group of 256 is not full."""
    assert torch.equal(eight_bit_code(), golden("double_code"))
    maxima = of_8_bits(golden("double_q"), golden("double_scale"), golden("double_mean"))
    decoded = nf4_dense(golden("packed"), maxima, (200, 128), torch.float32)
    assert torch.equal(decoded, golden("double_decoded"))


def test_maxima_are_quantised_as_by_bitsandbytes_but_for_its_rounding():
    """On a CPU it takes the second nearest of two values for a maximum within a hundredth of their middle."""
    q, scale, mean = to_8_bits(golden("maxima"))
    assert torch.equal(scale, golden("double_scale")) and torch.equal(mean, golden("double_mean"))
    others = (q != golden("double_q")).nonzero()[:, 0]
    assert len(others) < 0.02 * len(q)
    ours, theirs = eight_bit_code()[q.int()], eight_bit_code()[golden("double_q").int()]
    share = (golden("maxima") - mean) / scale[torch.arange(len(q)) // 256]
    assert ((share - ours).abs() <= (share - theirs).abs()).all()
    middle = (ours + theirs)[others] / 2
    assert ((share[others] - middle) / middle).abs().max() < 1e-2


def test_the_sixteen_values_are_normal_quantiles():
    """QLoRA, appendix E: 8 and 7 equal steps of probability from 0.9677083 to one half, divided by the largest."""
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(0.9677083, 0.5, 9).double()[:-1])
    below = -normal.icdf(torch.linspace(0.9677083, 0.5, 8).double()[:-1])
    values = torch.cat((above, below, torch.zeros(1).double())).sort().values
    torch.testing.assert_close(CODE.double(), values / values.max(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("base, error", [("int8", 0.0087), ("nf4", 0.092)])
def test_the_error_of_gaussian_weights(base, error):
    """The published table (specification of the formats), 4,096 x 4,096; here 1,024 rows of 4,096."""
    w = gaussian(1024, 4096)
    layer = Quantised(w, base)
    assert relative(layer.dense(), w) == pytest.approx(error, rel=0.03)
    x = gaussian(64, 4096, seed=1)
    assert relative(layer(x), F.linear(x, w)) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("base, bits", [("int8", 8 + 32 / 4096), ("nf4", 4 + 8 / 64 + 32 / 64 / 256)])
def test_a_weight_takes_the_bits_that_the_page_says(base, bits):
    layer = Quantised(gaussian(512, 4096), base)
    stored = sum(part.nbytes for part in layer.buffers()) * 8 / (512 * 4096)
    assert stored == pytest.approx(bits, rel=1e-4)
    assert not list(layer.parameters())


def test_int8_is_off_by_half_a_step_at_most():
    w = gaussian(16, 64)
    q, scale = to_int8(w)
    assert ((int8_dense(q, scale, torch.float32) - w).abs() <= scale[:, None] / 2 + 1e-7).all()
    assert q.abs().amax(1).eq(127).all()


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_zeros_stay_zeros(base):
    w = gaussian(8, 64)
    w[3] = 0
    decoded = Quantised(w, base).dense()
    assert decoded[3].abs().max() < (1e-9 if base == "int8" else 0.01) and decoded.isfinite().all()


def test_nf4_wants_whole_blocks():
    with pytest.raises(ValueError, match=r"blocks of 64 weights, and a matrix of \(3, 63\)"):
        to_nf4(gaussian(3, 63))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_value_and_gradient_are_those_of_the_dense_matrix(base, compiled):
    layer = Quantised(gaussian(64, 128), base)
    product = torch.compile(layer) if compiled else layer
    x = gaussian(3, 16, 128, seed=1).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    y, want = product(x), F.linear(twin, layer.dense())
    torch.testing.assert_close(y, want)
    y.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_compiled_layer_keeps_no_dense_matrix_for_its_backward_pass(base):
    layer = Quantised(gaussian(256, 256), base)

    def f(x):
        return layer(x.relu()).square().sum()
    y = torch.compile(f, fullgraph=True)(gaussian(4, 256, seed=1).requires_grad_())
    kept = [t for t in y.grad_fn.saved_tensors if t.numel() >= 256 * 256 // 2]
    assert kept and all(t.dtype in (torch.int8, torch.uint8) for t in kept)


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_a_few_rows_in_bf16_are_multiplied_in_8_bits(rows):
    """Both ways round in bf16: equal to two of its last bits."""
    layer = Quantised(gaussian(64, 128), "int8")
    x = gaussian(rows, 128, seed=1).bfloat16()
    want = F.linear(x.float(), layer.dense())
    assert layer(x).dtype == torch.bfloat16
    assert relative(layer(x).float(), want) < 2**-7


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_model_keeps_all_but_the_matrices_of_its_blocks(base):
    model = Apertus(CONFIG)
    small = quantise(copy.deepcopy(model), base)
    kept = dict(small.named_parameters())
    gone = {name for name, _ in model.named_parameters()} - kept.keys()
    assert gone == {name for name, p in model.named_parameters() if "layers" in name and p.ndim == 2}
    assert all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in kept.items())
    assert small.num_params() == model.num_params()
    assert small.flops_per_token(32) == model.requires_grad_(False).flops_per_token(32)
    idx = torch.arange(32)[None]
    assert relative(small(idx)[0], model(idx)[0]) < (0.03 if base == "int8" else 0.3)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_an_adapter_trains_on_a_quantised_base_and_merges_into_what_it_stands_for(base):
    model = quantise(Apertus(CONFIG), base)
    lora.adapt(model, lora.settings_of(4, 8, "all"))
    idx = torch.arange(32)[None]
    with torch.no_grad():
        before = model(idx)[0]
    model(idx, idx)[1].backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if ".lora_" in name}
    for layer in lora.adapted(model).values():
        assert layer.lora_B.weight.grad.abs().sum() > 0
        torch.nn.init.normal_(layer.lora_B.weight, std=0.1)
    with torch.no_grad():
        adapted = model(idx)[0]
        lora.merge(model)
        torch.testing.assert_close(model(idx)[0], adapted, rtol=1e-4, atol=1e-5)
    assert not torch.equal(adapted, before) and not any(isinstance(m, Quantised) for m in model.modules())


def test_another_base_is_refused():
    with pytest.raises(ValueError, match="base='int4': there is int8 and nf4"):
        quantise(Apertus(CONFIG), "int4")


@pytest.mark.parametrize("base, most", [("int8", 0.01), ("nf4", 0.2)])
def test_evaluate_says_what_a_model_loses_in_fewer_bits(tmp_path, base, most):
    """Paired with itself in fp32: the difference of both runs' bits per byte. A model that knows nothing loses little."""
    tok = tokenizer.load("byte")
    model = Apertus(dataclasses.replace(CONFIG, vocab_size=tok.vocab_size))
    convert.save_hf(model, str(tmp_path / "model"), tok)
    text = tmp_path / "text.txt"
    text.write_text("Two and two is four, and a seven is no eight. " * 20)

    def bits(*args):
        done = script("evaluate.py", text, f"--init_from={tmp_path / 'model'}", f"--out={tmp_path}", *args)
        assert done.returncode == 0, done.stderr
        with open(tmp_path / "evaluation.json", encoding="utf-8") as f:
            return json.load(f)["texts"][0]
    row = bits(f"--base={base}", f"--against={tmp_path / 'model'}")
    difference = row["bits_per_byte"] - bits()["bits_per_byte"]
    assert row["above"] == pytest.approx(difference, abs=1e-6) and 1e-6 < abs(difference) < most
