"""
model.py against transformers: values that 5.23 stored in tests/golden, and fresh models of Apertus and Llama. Where
transformers has no word: closed forms and published numbers.
"""
import hashlib
import json
import math
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers

import convert
from loss import chunk_loss
from model import XIELU, Apertus, ApertusConfig
from tiny import GOLDEN, golden, ids, small, tensors


def stored(*path):
    with open(os.path.join(GOLDEN, *path)) as f:
        return json.load(f)


def rope(theta):
    return dict(rope_type="llama3", rope_theta=theta, factor=8.0, original_max_position_embeddings=8192,
                low_freq_factor=1.0, high_freq_factor=4.0)


def shape(config):
    """transformers' names for the shape of an ApertusConfig."""
    return {theirs: getattr(config, ours) for ours, theirs in convert.HF_NAMES.items()} | dict(pad_token_id=None)


def moved(model):
    """Fresh gains are all 1 and xIELU's slopes equal, so that a mix-up would not show."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return model


# -----------------------------------------------------------------------------
# against transformers


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_b"])
def test_logits_loss_and_gradients_are_the_published_ones(name):
    model, io = golden(name)
    torch.testing.assert_close(model(io["idx"])[0], io["logits"], rtol=1e-5, atol=1e-6)
    loss = model(io["idx"], io["targets"])[1]
    torch.testing.assert_close(loss.double(), io["loss"], rtol=1e-6, atol=0)
    loss.backward()
    # transformers gives the padding id no gradient; here id 3 is a token.
    model.model.embed_tokens.weight.grad[3] = 0
    for key, norm in stored(name, "grad_norms.json").items():
        ours = model.get_parameter(key.replace("/", ".")).grad.norm().item()
        # alpha_n's gradient is a sum of terms that cancel to 1 part in 22,000: fp32 keeps three digits.
        assert ours == pytest.approx(norm, rel=1e-3 if key.endswith("alpha_n") else 1e-5), key


@pytest.mark.parametrize("H, K, D, layers, tied, begins", [
    (5, 1, 16, 2, False, (0, 0)),                          # an odd number of heads, multi-query
    (3, 3, 8, 1, True, (7, 100)),                          # multi-head; each row begins elsewhere
    (4, 2, 32, 1, False, (33_000, 9_000)),                 # positions past 8,192 and past 32,768
])
def test_logits_and_all_gradients_are_those_of_a_fresh_transformers_model(H, K, D, layers, tied, begins):
    ours = moved(small(n_layer=layers, n_head=H, n_kv_head=K, n_embd=H * D, rope_theta=12e6, tie_embeddings=tied))
    theirs = transformers.ApertusConfig(**shape(ours.config), rope_parameters=rope(12e6))
    theirs = transformers.ApertusForCausalLM(theirs).eval()
    theirs.load_state_dict(ours.state_dict(), strict=False)          # xIELU's constants are buffers there
    idx = ids(2, 13)
    positions = torch.tensor(begins)[:, None] + torch.arange(13)
    wanted = theirs(idx, position_ids=positions, labels=idx)
    torch.testing.assert_close(ours(idx, positions=positions)[0], wanted.logits, rtol=1e-5, atol=2e-5)
    loss = ours(idx[:, :-1], idx[:, 1:], positions=positions[:, :-1])[1]
    loss.backward()
    wanted.loss.backward()
    torch.testing.assert_close(loss, wanted.loss)
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, theirs.get_parameter(name).grad, rtol=1e-3, atol=1e-5, msg=name)


def test_without_its_three_differences_it_is_transformers_llama():
    """SwiGLU, no QK-norm, plain RoPE, other names of the norms. 56: 2/3 of 80, to a multiple of 8."""
    ours = moved(small(activation="swiglu", qk_norm=False, rope_scaling=0.0))
    theirs = transformers.LlamaConfig(**shape(ours.config) | dict(
        intermediate_size=56, rope_parameters=dict(rope_type="default", rope_theta=500_000.0), rms_norm_eps=1e-5))
    theirs = transformers.LlamaForCausalLM(theirs).eval()
    names = dict(attention_layernorm="input_layernorm", feedforward_layernorm="post_attention_layernorm")
    renamed = {".".join(names.get(part, part) for part in k.split(".")): p for k, p in ours.state_dict().items()}
    theirs.load_state_dict(renamed)
    torch.testing.assert_close(ours(ids(2, 20))[0], theirs(ids(2, 20)).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("i", range(3))
def test_xielu_values_and_gradients_are_transformers(i):
    g = tensors("xielu.npz")
    act = XIELU().double()
    act.alpha_p.data, act.alpha_n.data = g[f"alpha_p_{i}"], g[f"alpha_n_{i}"]
    x = g[f"x_{i}"].clone().requires_grad_()
    y = act(x)
    found = y, *torch.autograd.grad((y * g[f"w_{i}"]).sum(), (x, act.alpha_p, act.alpha_n))
    for ours, key in zip(found, ("y", "dx", "dalpha_p", "dalpha_n")):
        torch.testing.assert_close(ours.detach(), g[f"{key}_{i}"], rtol=1e-12, atol=1e-12)


def test_xielu_in_bf16_is_exact_for_large_inputs_and_keeps_its_input_alone():
    """Against itself in fp64. What autograd keeps is counted by torch's hooks: x, and the two slopes in fp32."""
    act = small().model.layers[0].mlp.act_fn
    kept = {}
    x = torch.linspace(-1e4, 1e4, 2001).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        y = act(x)
    assert sum(t.nbytes for t in kept.values()) <= x.nbytes + 8
    found = torch.autograd.grad(y.float().sum(), [x, *act.parameters()])
    assert all(gradient.isfinite().all() for gradient in found)
    torch.testing.assert_close(y, act.double()(x.double()).bfloat16())


@pytest.mark.parametrize("activation, formula", [("gelu", F.gelu), ("relu2", lambda x: x.clamp(min=0) ** 2)])
def test_other_activations_are_their_formulas(activation, formula):
    mlp = small(activation=activation).model.layers[0].mlp
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mlp(x), formula(x @ mlp.up_proj.weight.T) @ mlp.down_proj.weight.T)


# -----------------------------------------------------------------------------
# attention


def test_a_document_in_a_window_is_that_document_alone():
    """And not a bit of it depends on the one before."""
    doc = torch.tensor([[0] * 20 + [1] * 44])
    one = ids(1, 64, seed=1)
    other = torch.cat((ids(1, 20, seed=2), one[:, 20:]), dim=1)
    model, without = small(), small(doc_mask=False)
    second = model.hidden(one, doc)[:, 20:]
    assert torch.equal(second, model.hidden(other, doc)[:, 20:])
    torch.testing.assert_close(second, model.hidden(one[:, 20:]), rtol=1e-5, atol=1e-5)
    assert torch.equal(without.hidden(one, doc), without.hidden(one))
    assert not torch.equal(without.hidden(one, doc)[:, 20:], second)


def test_in_bf16_far_positions_are_told_apart():
    """Angles of thousands of radians have no fraction left in bf16."""
    model, idx = small(n_layer=1), ids(1, 2000)
    exact = model.hidden(idx)[:, 1000:]
    model.dtype = torch.bfloat16
    found = model.hidden(idx)
    assert found.dtype == torch.bfloat16
    assert (found[:, 1000:].float() - exact).norm() < 0.02 * exact.norm()


# -----------------------------------------------------------------------------
# loss


def test_the_loss_is_the_mean_over_kept_tokens_and_adds_up_over_micro_batches():
    model = small().double()
    idx, targets = ids(4, 16), ids(4, 16, seed=1)
    keep = torch.rand(4, 16, generator=torch.Generator().manual_seed(2)) < 0.6
    logits = model(idx)[0]
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(4, 16)
    assert torch.equal(model(idx, last=True)[0], logits[:, -1])
    built = []                                             # whether gradients were
    model.chunk_loss = lambda *args: built.append(args[-1]) or chunk_loss(*args)
    torch.testing.assert_close(model(idx, targets, keep, per_token=True)[1], nll)
    assert built == [False]
    for chosen in ((targets, keep), (targets.masked_fill(~keep, -1), torch.ones_like(keep))):
        torch.testing.assert_close(model(idx, *chosen)[1], nll[keep].mean())
    rows = zip(idx.split(1), targets.split(1), keep.split(1))
    parts = [model(*row, n_tokens=keep.sum())[1] for row in rows]
    torch.testing.assert_close(sum(parts), nll[keep].mean())
    nothing = model(idx, targets.fill_(-1))[1]
    nothing.backward()
    assert nothing == 0 and all(p.grad.abs().max() == 0 for p in model.parameters())


def test_in_bf16_the_mean_is_in_fp32():
    """1 / 1003 in bf16 would be off by 0.2 %."""
    model = small()
    model.dtype = torch.bfloat16
    idx, targets = ids(1, 1003), ids(1, 1003, seed=1)
    h, w = model.hidden(idx)[0], model.lm_head.weight.bfloat16()
    nll = F.cross_entropy((h @ w.T).double(), targets[0])
    torch.testing.assert_close(model(idx, targets)[1].double(), nll, rtol=1e-6, atol=0)


# -----------------------------------------------------------------------------
# sizes and initial values


def test_the_8b_and_the_70b_have_the_published_shape_parameters_and_flops():
    """Section 1.6; 6.74e24 FLOPs for the 70B's 15T tokens (section 6), and 7.74e23 for the 8B's."""
    published = convert.config_from_hf(stored("published_configs.json")[0]["config"])
    assert ApertusConfig() == replace(published, block_size=4096, rope_theta=5e5, init_std=0.008944)
    large = dict(n_layer=80, n_head=64, n_embd=8192, ffn_dim=43008)
    for changes, parameters, flops in (({}, 8_053_338_176, 48.3e9), (large, 70_599_864_480, 433.3e9)):
        with torch.device("meta"):
            model = Apertus(ApertusConfig(**changes))
        assert model.num_params() == parameters
        assert model.flops_per_token(4096) == pytest.approx(flops, rel=2e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_matrices_cost_four_flops_per_token_instead_of_six(tied):
    """2 forward and 2 for the gradient of what went in; none for their own. Attention costs as much as before."""
    model = small(tie_embeddings=tied)
    matrices = 2 * (48 * 48 * 2 + 48 * 16 * 2 + 48 * 80 * 2) + 97 * 48
    attention = 6 * 2 * 48 * 8
    assert model.flops_per_token(8) == 6 * matrices + attention
    model.requires_grad_(False)
    assert model.flops_per_token(8) == 4 * matrices + attention


@pytest.mark.parametrize("seed, changes", [(1 + 2**32, {}), (28, dict(activation="gelu", qk_norm=False, n_layer=8))])
def test_initial_values_are_drawn_from_the_hash_of_seed_and_name(seed, changes):
    """So they depend on nothing else that is built. Gains are 1, both slopes 0.8, residual matrices 1/sqrt(2L)."""
    model = small(seed, **changes)
    if seed == 28:
        model = Apertus(model.config)                      # the default
    for name, p in model.named_parameters():
        if p.ndim == 2:
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.1 / math.sqrt(2 * model.config.n_layer) if residual else 0.1
            torch.testing.assert_close(p.data, torch.randn(p.shape, generator=generator) * std, rtol=1e-6, atol=0)
        elif "alpha" in name:
            assert p.shape == (1,)
            assert F.softplus(p).item() + 0.5 * name.endswith("alpha_n") == pytest.approx(0.8)
        else:
            assert (p == 1).all()


@pytest.mark.parametrize("changes, says", [
    (dict(n_embd=50), "n_head=6: try n_head=5"), (dict(n_kv_head=4), "n_kv_head=4: try n_kv_head=3"),
    (dict(n_kv_head=0), "n_kv_head=0: try n_kv_head=1"), (dict(n_embd=18), "= 3 is odd"),
    (dict(activation="silu"), "not one of xielu, swiglu")])
def test_a_shape_that_cannot_be_is_refused_in_one_line(changes, says):
    with pytest.raises(ValueError, match=says):
        small(**changes)
