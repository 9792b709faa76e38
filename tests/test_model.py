"""
model.py against transformers: values that 5.23 stored in tests/golden, and fresh models of Apertus and Llama. Where
transformers has no counterpart: closed forms and published numbers.
"""

import hashlib
import json
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import GOLDEN, SMALL, golden, ids, small, tensors
from torch.testing import assert_close

from engine.files import read_json, read_text
from loss import chunk_loss
from model import XIELU, Apertus, ApertusConfig
from weights.config import HF_NAMES, config_from_hf


def moved(**changes):
    """A small model with moved parameters: fresh norm weights are all 1 and slopes equal, which would hide a mix-up."""
    model = small(**changes)
    torch.manual_seed(0)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return model


def shape(model, **rope):
    """The arguments of transformers' config for our model's shape. rope: its RoPE parameters."""
    named = {theirs: getattr(model.config, ours) for ours, theirs in HF_NAMES.items()}
    return named | dict(pad_token_id=None, rope_parameters=rope)


# -----------------------------------------------------------------------------
# against transformers


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_b"])
def test_logits_loss_and_gradients_are_the_published_ones(name):
    model, io = golden(name)
    assert_close(model(io["idx"]), io["logits"], rtol=1e-5, atol=2e-6)
    loss = model.loss(io["idx"], io["targets"])
    assert_close(loss.double(), io["loss"], rtol=1e-6, atol=0)
    loss.backward()
    # transformers gives the padding id no gradient; here id 3 is a token.
    model.model.embed_tokens.weight.grad[3] = 0
    norms = read_json(f"{GOLDEN}/{name}/grad_norms.json")
    assert {key: model.get_parameter(key).grad.norm() for key in norms} == pytest.approx(norms, rel=1e-3)


@pytest.mark.parametrize(
    "H, K, D, layers, tied, begins",
    [
        (5, 1, 16, 2, False, (0, 0)),  # an odd number of heads, multi-query
        (3, 3, 8, 1, True, (7, 100)),  # multi-head; each row begins at another position
        (4, 2, 32, 1, False, (33_000, 9_000)),  # positions past 8,192 and past 32,768
    ],
)
def test_logits_and_all_gradients_are_those_of_a_fresh_transformers_model(H, K, D, layers, tied, begins):
    ours = moved(n_layer=layers, n_head=H, n_kv_head=K, n_embd=H * D, rope_theta=12e6, tie_embeddings=tied)
    config = shape(
        ours,
        rope_type="llama3",
        rope_theta=12e6,
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    theirs = transformers.ApertusForCausalLM(transformers.ApertusConfig(**config)).eval()
    theirs.load_state_dict(ours.state_dict(), strict=False)  # xIELU's constants are buffers there
    idx = ids(2, 13)
    positions = torch.tensor(begins)[:, None] + torch.arange(13)
    wanted = theirs(idx, position_ids=positions, labels=idx)
    assert_close(ours.lm_head(ours.hidden(idx, positions=positions)), wanted.logits, rtol=1e-5, atol=2e-5)
    loss = ours.loss(idx[:, :-1], idx[:, 1:], positions=positions[:, :-1])
    loss.backward()
    wanted.loss.backward()
    assert_close(loss, wanted.loss)
    for name, p in ours.named_parameters():
        assert_close(p.grad, theirs.get_parameter(name).grad, rtol=1e-3, atol=1e-5, msg=name)


def test_without_its_three_differences_it_is_transformers_llama():
    """SwiGLU, no QK-norm, plain RoPE; norms have other names. 56 is 2/3 of 80, rounded to a multiple of 8."""
    ours = moved(activation="swiglu", qk_norm=False, rope_scaling=0.0)
    config = shape(ours, rope_type="default", rope_theta=5e5) | dict(intermediate_size=56, rms_norm_eps=1e-5)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    for name, p in ours.state_dict().items():
        name = name.replace("attention_layernorm", "input_layernorm")
        theirs.get_parameter(name.replace("feedforward_layernorm", "post_attention_layernorm")).data.copy_(p)
    assert_close(ours(ids(2, 20)), theirs(ids(2, 20)).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("i", range(3))
def test_xielu_values_and_gradients_are_transformers(i):
    stored = {key[:-2]: value for key, value in tensors("xielu.npz").items() if key.endswith(f"_{i}")}
    act = XIELU().double()
    act.alpha_p.data, act.alpha_n.data = stored["alpha_p"], stored["alpha_n"]
    x = stored["x"].requires_grad_()
    y = act(x)
    gradients = torch.autograd.grad((y * stored["w"]).sum(), (x, act.alpha_p, act.alpha_n))
    wanted = [stored[key] for key in ("y", "dx", "dalpha_p", "dalpha_n")]
    assert_close([y, *gradients], wanted, rtol=1e-12, atol=1e-12)


def test_xielu_in_bf16_is_exact_for_large_inputs_and_keeps_its_input_alone():
    """Against itself in fp64. By torch's hooks autograd saves only x and the two slopes in fp32."""
    act = small().model.layers[0].mlp.act_fn
    kept = {}
    x = torch.linspace(-1e4, 1e4, 2001).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        y = act(x)
    assert sum(t.nbytes for t in kept.values()) <= x.nbytes + 8
    gradients = torch.autograd.grad(y.float().sum(), [x, *act.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert_close(y, act.double()(x.double()).bfloat16())


@pytest.mark.parametrize("activation, formula", [("gelu", F.gelu), ("relu2", lambda x: x.clamp(min=0) ** 2)])
def test_other_activations_are_their_formulas(activation, formula):
    mlp = small(activation=activation).model.layers[0].mlp
    x = torch.linspace(-3, 3, 48)
    assert_close(mlp(x), formula(x @ mlp.up_proj.weight.T) @ mlp.down_proj.weight.T)


# -----------------------------------------------------------------------------
# attention


def test_a_document_in_a_window_is_that_document_alone():
    """The document before it does not change a bit of it."""
    doc = torch.arange(64).ge(20).long()[None]
    one = ids(1, 64, seed=1)
    other = torch.cat((ids(1, 20, seed=2), one[:, 20:]), dim=1)
    model, without = small(), small(doc_mask=False)
    second = model.hidden(one, doc)[:, 20:]
    assert second.equal(model.hidden(other, doc)[:, 20:])
    assert_close(second, model.hidden(one[:, 20:]), rtol=1e-5, atol=1e-5)
    assert without.hidden(one, doc).equal(without.hidden(one))
    assert not second.equal(without.hidden(one, doc)[:, 20:])


# -----------------------------------------------------------------------------
# loss


def test_the_loss_is_the_mean_over_kept_tokens_and_adds_up_over_micro_batches():
    model = small().double()
    idx, targets = ids(4, 16), ids(4, 16, seed=1)
    keep = ids(4, 16, seed=2) < 60
    logits = model(idx)
    nll = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    assert logits[:, -1].equal(model(idx, last_only=True))
    built = []  # whether gradients were built
    model.chunk_loss = lambda *args: built.append(args[-1]) or chunk_loss(*args)
    assert_close(model.nll(idx, targets), nll.detach())
    assert built == [False]
    # A target below 0 has no loss, whatever keep says.
    for chosen in ((targets, keep), (targets.masked_fill(~keep, -1), keep | True)):
        assert_close(model.loss(idx, *chosen), nll[keep].mean())
    rows = zip(idx.split(1), targets.split(1), keep.split(1))
    parts = [model.loss(*row, n_tokens=keep.sum()) for row in rows]
    assert_close(sum(parts), nll[keep].mean())
    nothing = model.loss(idx, targets.fill_(-1))
    nothing.backward()
    assert nothing == 0
    assert all(p.grad.abs().max() == 0 for p in model.parameters())


def test_in_bf16_positions_and_the_mean_are_in_fp32():
    """Angles of hundreds of radians have no fraction left in bf16, and 1 / 1003 is off by 0.2 %."""
    model = small(n_layer=1)
    idx, targets = ids(2, 1003)
    exact = model.hidden(idx[None])[0]
    model.dtype = torch.bfloat16
    h = model.hidden(idx[None])[0]
    assert h.dtype == torch.bfloat16
    assert (h.float() - exact)[500:].norm() < 0.02 * exact[500:].norm()
    nll = F.cross_entropy((h @ model.lm_head.weight.bfloat16().T).double(), targets)
    assert_close(model.loss(idx[None], targets[None]).double(), nll, rtol=1e-6, atol=0)


# -----------------------------------------------------------------------------
# sizes and initial values


@pytest.mark.parametrize(
    "changes, parameters, flops",
    [
        ({}, 8_053_338_176, 48_318_382_080),
        (dict(tie_embeddings=True), 8_053_338_176 - 131_072 * 4096, 48_318_382_080),
        (dict(n_layer=80, n_head=64, n_embd=8192, ffn_dim=43008), 70_599_864_480, 433_254_825_984),
    ],
)
def test_the_8b_and_the_70b_have_the_published_shape_parameters_and_flops(changes, parameters, flops):
    """
    Section 1.6. FLOPs by hand; with the other half of attention 6.74e24 for the 70B's 15T tokens (section 6). A
    weight costs 2 FLOPs forward, 2 for the gradient of its input, and 2 for its own, which a frozen one lacks.
    """
    published = config_from_hf(json.loads(read_text(f"{GOLDEN}/published_configs.json"))[0]["config"])
    assert ApertusConfig() == replace(published, block_size=4096, rope_theta=5e5, init_std=0.008944)
    with torch.device("meta"):
        model = Apertus(ApertusConfig(**changes))
    assert model.num_params() == parameters
    counted = model.flops_per_token(4096)
    assert counted == flops
    attention = 6 * model.config.n_layer * model.config.n_embd * 4096
    model.requires_grad_(False)
    assert model.flops_per_token(4096) - attention == (counted - attention) * 2 // 3


def test_initial_values_are_drawn_in_threads_from_the_hash_of_seed_and_name(monkeypatch):
    """So they depend on no other module. Norm weights are 1, slopes 0.8; residual matrices have a factor 1/sqrt(2L)."""
    both, initial = threading.Barrier(2, timeout=10), Apertus.initial
    monkeypatch.setattr(Apertus, "initial", lambda *args: (both.wait(), initial(*args))[1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = Apertus(ApertusConfig(**SMALL | dict(n_layer=8, tie_embeddings=True)))  # its seed is 28
    for name, p in model.named_parameters():
        wanted = torch.ones_like(p)
        if "alpha" in name:
            p = F.softplus(p) + 0.5 * name.endswith("alpha_n")
            wanted = torch.tensor([0.8])
        elif p.ndim == 2:
            digest = hashlib.sha256(f"28:{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:4], "little"))
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            wanted = torch.randn(p.shape) * 0.1 / (4 if residual else 1)
        assert_close(p.data, wanted, rtol=1e-6, atol=0)
