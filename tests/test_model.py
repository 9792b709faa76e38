"""
model.py against transformers' Apertus, stored (tests/golden, made by transformers 5.23 on CPU) and freshly made; and
against itself.
"""
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import convert
import generate as generate_file
import model as model_file
from conftest import ROOT
from model import XIELU, Apertus, ApertusConfig, causal_attention, library_attention, masked_attention
from model import rope_frequencies
from generate import KVCache, generate, read, sample_token, stream

GOLDEN = os.path.join(ROOT, "tests", "golden")
SMALL = dict(block_size=64, vocab_size=97, n_layer=2, n_head=6, n_kv_head=2, n_embd=48, ffn_dim=80, init_std=0.1)


def small(**changes):
    return Apertus(ApertusConfig(**{**SMALL, **changes}), seed=1)


def ids(*shape, seed=0, high=97):
    return torch.randint(4, high, shape, generator=torch.Generator().manual_seed(seed))


def tensors(*path):
    """The arrays of a .npz file below tests/golden, by name."""
    arrays = np.load(os.path.join(GOLDEN, *path))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def golden(name):
    return convert.load_hf(os.path.join(GOLDEN, name)), tensors(name, "io.npz")


def cross_entropy(logits, targets, **how):
    """torch's, over all rows of logits (B, T, V)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **how)


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_b"])
def test_logits_loss_and_greedy_tokens_are_the_published_ones(name):
    model, io = golden(name)
    torch.testing.assert_close(model(io["idx"])[0], io["logits"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(io["idx"], io["targets"])[1].double(), io["loss"], rtol=1e-6, atol=0)
    assert torch.equal(generate(model, io["idx"][:, :16], 24, temperature=0)[:, 16:], io["greedy"])


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_b"])
def test_every_gradient_norm_is_the_published_one(name):
    model, io = golden(name)
    cross_entropy(model(io["idx"])[0], io["targets"]).backward()
    # transformers gives the padding id no gradient; to us id 3 is a token.
    model.model.embed_tokens.weight.grad[3] = 0
    with open(os.path.join(GOLDEN, name, "grad_norms.json")) as f:
        for key, norm in json.load(f).items():
            ours = model.get_parameter(key.replace("/", ".")).grad.norm().item()
            # alpha_n's is a sum of terms that cancel to 1 part in 22,000: fp32 keeps three digits, and the fourth
            # depends on the CPU (the fp64 gradient is held to 1e-12 below).
            assert ours == pytest.approx(norm, rel=1e-3 if key.endswith("alpha_n") else 1e-5), key


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_b"])
def test_chunked_loss_has_the_gradients_of_the_full_one_in_fp64(name, monkeypatch):
    model, io = golden(name)
    model.double()
    incoming = 3                                           # a gradient of the loss that is not 1
    loss = cross_entropy(model(io["idx"])[0], io["targets"])
    (incoming * loss).backward()
    full = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(model_file, "chunk_rows", lambda *_: 17)          # chunks that do not divide
    (incoming * model(io["idx"], io["targets"])[1]).backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, full[n], rtol=1e-9, atol=1e-12)


def test_a_frozen_head_has_no_gradient_built_for_it():
    """Of the 8B it would take 2 GB. What the loss keeps for its backward pass are the two gradients."""
    model, io = golden("hf_tiny_a")
    _, loss = model(io["idx"], io["targets"])
    assert [t.shape for t in loss.grad_fn.saved_tensors] == [(io["idx"].numel(), 64), model.lm_head.weight.shape]
    model.lm_head.requires_grad_(False)
    _, loss = model(io["idx"], io["targets"])
    of_h, of_head = loss.grad_fn.saved_tensors
    assert of_h is not None and of_head is None


@pytest.mark.parametrize("V, device, trained, rows", [
    (131_072, "cuda", True, 1024),                         # 0.5 GB in fp32
    (131_072, "cuda", False, 512), (131_072, "cpu", True, 512),         # 268 MB
    (2**14, "cpu", True, 256), (2048, "cpu", True, 2048),  # 16 MB
    (2048, "cuda", False, 2**15), (100, "cpu", True, 2**15), (2**20, "cpu", True, 128),
])
def test_the_logits_held_at_a_time_take_as_much_as_the_page_says(V, device, trained, rows):
    assert model_file.chunk_rows(V, device, trained) == rows


def test_compiled_attention_in_bf16_stays_causal_and_inside_documents():
    """By its formula, which torch.compile takes for short windows: against fp32, to bf16's digits."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 24, 16, generator=generator) for heads in (4, 2, 2))
    doc = torch.tensor([[0] * 10 + [1] * 14, [0] * 3 + [1] * 21])
    want = model_file.causal_attention(q, k, v, doc)
    half = (x.bfloat16() for x in (q, k, v))
    found = torch.compile(model_file.causal_attention, backend="aot_eager")(*half, doc)
    torch.testing.assert_close(found.float(), want, rtol=0, atol=0.03)


# Heads, kv heads, head dim, layers, ffn, theta, first position.
@pytest.mark.parametrize("H, K, D, L, ffn, theta, past", [
    (5, 1, 16, 2, 70, 5e5, 0),                             # an odd number of heads, multi-query
    (3, 3, 8, 1, 33, 12e6, 0),                             # multi-head
    (2, 1, 8, 1, 64, 12e6, 33_000)])                       # positions past 8,192 and past 32,768
def test_agrees_with_a_fresh_transformers_model(H, K, D, L, ffn, theta, past):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(H)
    rope = dict(rope_type="llama3", rope_theta=theta, factor=8.0, original_max_position_embeddings=8192,
                low_freq_factor=1.0, high_freq_factor=4.0)
    config = transformers.ApertusConfig(
        vocab_size=131, hidden_size=H * D, intermediate_size=ffn, num_hidden_layers=L, num_attention_heads=H,
        num_key_value_heads=K, rope_parameters=rope, pad_token_id=None)
    theirs = transformers.ApertusForCausalLM(config).eval()
    theirs.generation_config.eos_token_id = None           # or its generate stops where ours was not asked to
    # Fresh gains are 1 and scalars are equal: they are moved, or a mix-up would not show.
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.05 * torch.randn_like(p))
    ours = Apertus(convert.config_from_hf(config.to_dict()))
    constants = "act_fn.beta", "act_fn.eps"
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if not k.endswith(constants)})
    idx = ids(1, past + 12, seed=1, high=131)
    with torch.no_grad():
        found, wanted = ours(idx)[0], theirs(idx).logits
        for far in (past // 4, past):
            torch.testing.assert_close(found[:, far:far + 12], wanted[:, far:far + 12], rtol=1e-5, atol=2e-5)
        prompt = idx[:, :10]
        greedy = theirs.generate(prompt, max_new_tokens=8, do_sample=False)
        assert torch.equal(generate(ours, prompt, 8, temperature=0), greedy)


def test_a_long_prompt_read_in_chunks_has_transformers_logits_in_fp32_and_is_as_near_to_them_in_bf16():
    """At positions past 8,192 and past 32,768. In bf16 transformers' own distance to its fp32 is the measure."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    rope = dict(rope_type="llama3", rope_theta=12e6, factor=8.0, original_max_position_embeddings=8192,
                low_freq_factor=1.0, high_freq_factor=4.0)
    config = transformers.ApertusConfig(
        vocab_size=131, hidden_size=8, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, rope_parameters=rope, pad_token_id=None, initializer_range=0.3)
    theirs = transformers.ApertusForCausalLM(config).eval()
    ours = Apertus(convert.config_from_hf(config.to_dict()))
    constants = "act_fn.beta", "act_fn.eps"
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if not k.endswith(constants)})
    idx = ids(1, 33_000, seed=1, high=131)
    lengths = 8_200, 33_000

    def logits(model):
        """Of the last tokens of both prompts: (2, V)."""
        if model is ours:
            return torch.cat([read(ours, idx[:, :n], KVCache(ours, 1, n)) for n in lengths]).float()
        hidden = theirs.model(idx, use_cache=False).last_hidden_state
        return theirs.lm_head(hidden[0, [n - 1 for n in lengths]]).float()

    with torch.no_grad():
        true = logits(theirs)
        torch.testing.assert_close(logits(ours), true, rtol=1e-5, atol=2e-5)
        theirs.bfloat16()
        ours.bfloat16()
        off = (logits(theirs) - true).abs().max()
        assert 0 < (logits(ours) - true).abs().max() < 2 * off < true.abs().max() / 4


@pytest.mark.parametrize("size", [1, 7, 16])
def test_chunks_of_any_size_give_the_tokens_of_prompts_of_any_length(monkeypatch, size):
    """And no mask has more rows than a chunk, so that memory grows with the prompt and not with its square."""
    model, rows = small(block_size=256), []
    prompts = [ids(n, seed=n).tolist() for n in (3, 40, 57)]
    want = generate(model, prompts, 9, temperature=0)
    true = KVCache.attend

    def attend(self, *qkv):
        rows.append(self.mask.shape[-2])
        return true(self, *qkv)
    monkeypatch.setattr(KVCache, "attend", attend)
    monkeypatch.setattr(generate_file, "CHUNK", size)
    assert generate(model, prompts, 9, temperature=0) == want and max(rows) == size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cos_and_sin_of_65536_positions_are_transformers_in_fp32_and_bf16(dtype):
    """The angles of both are in fp32: at position 65,535 an angle in bf16 would be off by a hundred radians."""
    modeling = pytest.importorskip("transformers.models.apertus.modeling_apertus")
    transformers = pytest.importorskip("transformers")
    rope = dict(rope_type="llama3", rope_theta=12e6, factor=8.0, original_max_position_embeddings=8192,
                low_freq_factor=1.0, high_freq_factor=4.0)
    theirs = modeling.ApertusRotaryEmbedding(transformers.ApertusConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, rope_parameters=rope))
    ours = small(n_embd=64, n_head=2, n_kv_head=1, rope_theta=12e6)
    found = ours.rope(torch.zeros(1, 65536), None, dtype)
    wanted = theirs(torch.zeros(1, dtype=dtype), torch.arange(65536)[None])
    assert found[0].shape == (65536, 32) and found[0].dtype == dtype
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other[0], rtol=0, atol=1e-6)


def test_rope_scaling_blends_as_many_frequencies_as_published():
    """Of 64, from the released config: kept, blended, divided by 8."""
    for theta, want in ((5e5, (29, 6, 29)), (1e6, (27, 7, 30)), (4e6, (25, 6, 33)), (12e6, (23, 6, 35))):
        scaled = rope_frequencies(ApertusConfig(rope_theta=theta)).double()
        plain = rope_frequencies(ApertusConfig(rope_theta=theta, rope_scaling=0.0)).double()
        kept, divided = (scaled == plain).sum().item(), (scaled == plain / 8).sum().item()
        assert (kept, 64 - kept - divided, divided) == want


@pytest.mark.parametrize("i", range(3))
def test_xielu_values_and_gradients_are_transformers(i):
    g = tensors("xielu.npz")
    act = XIELU().double()
    act.alpha_p.data, act.alpha_n.data = g[f"alpha_p_{i}"], g[f"alpha_n_{i}"]
    x = g[f"x_{i}"].clone().requires_grad_()
    y = act(x)
    (y * g[f"w_{i}"]).sum().backward()
    for ours, key in ((y, "y"), (x.grad, "dx"), (act.alpha_p.grad, "dalpha_p"), (act.alpha_n.grad, "dalpha_n")):
        torch.testing.assert_close(ours.detach(), g[f"{key}_{i}"], rtol=1e-12, atol=1e-12)


def test_xielu_has_the_values_of_its_closed_form():
    """alpha_p = alpha_n = 0.8, to six digits."""
    act = small(n_layer=1).double().model.layers[0].mlp.act_fn
    x = torch.tensor([-3, -1, -0.1, 0.1, 1, 3], dtype=torch.float64)
    want = torch.tensor([0.139830, -0.205696, -0.046130, 0.058, 1.3, 8.7])
    torch.testing.assert_close(act(x).detach(), want.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_xielu_keeps_its_input_alone_and_has_the_bits_of_its_formula(dtype):
    """What autograd keeps for backward, counted by torch's own hooks: as many bytes as x, and its two scalars."""
    act, found = XIELU(), {}
    with torch.no_grad():
        act.alpha_p.fill_(0.3)
        act.alpha_n.fill_(-1.2)
    for forward in (act, act.formula):
        x = torch.linspace(-4, 4, 1000).to(dtype).requires_grad_()
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
            y = forward(x)
        y.backward(torch.linspace(1, 2, 1000).to(dtype))
        found[forward] = y.detach(), x.grad, act.alpha_p.grad, act.alpha_n.grad
        act.zero_grad()
        size = sum(t.nbytes for t in kept.values())
        assert size <= x.nbytes + 8 if forward is act else size > 3 * x.nbytes
    assert all(map(torch.equal, *found.values()))


@pytest.mark.parametrize("dtype, reach", [(torch.bfloat16, 1e4), (torch.float16, 250.0)])
def test_xielu_stays_finite_in_half_precision(dtype, reach):
    act = XIELU()
    torch.nn.init.constant_(act.alpha_p, 0.2), torch.nn.init.constant_(act.alpha_n, -1.05)
    x = torch.linspace(-reach, reach, 2001).to(dtype).requires_grad_()
    y = act(x)
    y.float().sum().backward()
    assert y.dtype == dtype and all(t.isfinite().all() for t in (y, x.grad, act.alpha_p.grad, act.alpha_n.grad))


@pytest.mark.parametrize("config, changes, want", [
    ("8b", {}, 8_053_338_176), ("70b", {}, 70_599_864_480), ("1b5", {}, 1_510_019_104),
    ("1b5", dict(activation="swiglu", qk_norm=False), 1_510_017_024), ("3b", dict(tie_embeddings=True), 3_215_000_000)])
def test_parameter_counts(config, changes, want):
    """Section 1.6, of the released weights; the 3B has 3.22B tied in the report."""
    import runpy
    import dataclasses
    names = {f.name for f in dataclasses.fields(ApertusConfig)}
    found = runpy.run_path(os.path.join(ROOT, "configs", config + ".py"))
    shape = {k: v for k, v in found.items() if k in names}
    with torch.device("meta"):
        n = Apertus(ApertusConfig(**{**shape, **changes})).num_params()
    assert n == want or config == "3b" and round(n / 1e9, 2) == 3.22 - 0.01 * (n < want)


def test_initialisation_has_the_published_spread():
    """std 0.008944; o_proj and down_proj by 1/sqrt(2L) of it; gains 1; alphas 0.8."""
    model = Apertus(ApertusConfig(vocab_size=512, n_layer=8, n_head=4, n_kv_head=2, n_embd=256, ffn_dim=1024))
    for name, p in model.named_parameters():
        if p.ndim == 2:
            std = 0.008944 / (4 if name.endswith(WRITE_TO_RESIDUAL_STREAM) else 1)
            assert p.std().item() == pytest.approx(std, rel=0.03) and abs(p.mean().item()) < std / 50, name
        elif "alpha" in name:
            assert F.softplus(p).item() + 0.5 * name.endswith("alpha_n") == pytest.approx(0.8, rel=1e-6)
        else:
            assert (p == 1).all()


WRITE_TO_RESIDUAL_STREAM = "o_proj.weight", "down_proj.weight"


def test_initial_weights_do_not_depend_on_what_else_is_built():
    """Ablations start from the same weights where they share a parameter."""
    a = dict(small().named_parameters())
    b = dict(small(activation="gelu", qk_norm=False, n_layer=3).named_parameters())
    shared = [n for n in a.keys() & b.keys() if not n.endswith(WRITE_TO_RESIDUAL_STREAM)]
    assert all(torch.equal(a[n], b[n]) for n in shared)
    assert torch.equal(a["lm_head.weight"], b["lm_head.weight"])
    assert not torch.equal(a["lm_head.weight"], a["model.embed_tokens.weight"])


def test_initial_weights_are_drawn_from_the_hash_of_seed_and_name():
    """A published run starts again only from these bits; 28 is the seed of a model for which none is named."""
    model = Apertus(ApertusConfig(**SMALL))
    for name, p in model.named_parameters():
        if p.ndim == 2:
            digest = hashlib.sha256(f"28:{name}".encode()).digest()
            low_32_bits = int.from_bytes(digest[:4], "little")
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(low_32_bits))
            std = 0.1 / 2 if name.endswith(WRITE_TO_RESIDUAL_STREAM) else 0.1    # 2 = sqrt(2 L)
            assert torch.equal(p, noise * std), name


def test_another_seed_draws_every_matrix_anew():
    """A generator keeps the low 32 bits of its seed: seeds that differ in others alone must be told apart too."""
    drawn = [dict(Apertus(ApertusConfig(**SMALL), seed).named_parameters()) for seed in (1, 2, 1 + 2**32)]
    matrices = [name for name, p in drawn[0].items() if p.ndim == 2]
    assert len(matrices) == 2 + 2 * 6
    for i, j in ((0, 1), (0, 2), (1, 2)):
        for name in matrices:
            assert (drawn[i][name] != drawn[j][name]).float().mean() > 0.99, (name, i, j)


@pytest.mark.parametrize("form", [dict(ffn="lowrank", ffn_rank=12), dict(ffn="blockshuffle", ffn_blocks=2)])
def test_another_seed_draws_every_factor_of_a_structured_layer_anew(form):
    one, other = (dict(Apertus(ApertusConfig(**SMALL, **form), seed).named_parameters()) for seed in (1, 2))
    factors = [name for name in one if name.endswith((".u", ".v"))]
    assert len(factors) == 4
    assert all((one[name] != other[name]).float().mean() > 0.99 for name in factors)


def test_decoding_with_the_cache_is_the_full_forward_pass():
    model = small()
    idx = ids(3, 30)
    cache, full = KVCache(model, 3, 30), model(idx)[0]
    with torch.no_grad():
        steps = [model.lm_head(model.hidden(part, cache=cache)) for part in idx.split([11, 1, 1, 5, 1, 11], dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=1e-5, atol=1e-5)


def test_prompts_of_different_lengths_decode_as_if_alone():
    model = small()
    prompts = [ids(n, seed=n).tolist() for n in (1, 7, 19)]
    together = generate(model, prompts, 12, temperature=0)
    assert together == [generate(model, [p], 12, temperature=0)[0] for p in prompts]
    for whole, p in zip(together, prompts):                # and as if without a cache
        for i in range(len(p), len(whole)):
            assert model(torch.tensor([whole[:i]]))[0][0, -1].argmax() == whole[i]


def test_generation_ends_at_a_stop_token():
    model = small()
    whole = generate(model, [[5, 6, 7]], 20, temperature=0)[0]
    stop = whole[8]
    assert generate(model, [[5, 6, 7]], 20, temperature=0, stop=(stop,))[0] == whole[:whole.index(stop, 3) + 1]


def test_a_row_that_has_ended_says_its_stop_token_until_all_have():
    model, prompts = small(), ids(4, 3)
    free = generate(model, prompts, 20, temperature=0)[:, 3:].tolist()
    stop = [row[4 + 3 * b] for b, row in enumerate(free)]  # each row meets one of them, at another step
    want = []
    for row in free:
        first = next(i for i, token in enumerate(row) if token in stop)
        want.append(row[:first] + [row[first]] * (20 - first))
    steps = max(next(i for i, token in enumerate(row) if token in stop) for row in want) + 1
    said = torch.stack(list(stream(model, prompts, 20, temperature=0, stop=stop)), 1).tolist()
    assert said == [row[:steps] for row in want]
    assert len({row.index(row[-1]) for row in said}) > 1


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty"):
        generate(small(), [[5, 6], []], 3)


def test_sampling_has_the_probabilities_that_it_claims():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(20000, 1)

    def share(**how):
        generator = torch.Generator().manual_seed(0)
        tokens = sample_token(logits, generator=generator, **how)
        return torch.bincount(tokens, minlength=4) / 20000
    for how, want in (
        (dict(), [0.5, 0.3, 0.15, 0.05]),
        (dict(top_k=2), [0.625, 0.375, 0, 0]),
        (dict(top_p=0.8), [0.625, 0.375, 0, 0]),           # 0.5 + 0.3 is enough
        (dict(top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (dict(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ):
        torch.testing.assert_close(share(**how), torch.tensor(want), rtol=0, atol=0.015)
    assert torch.equal(share(top_k=9), share())            # more than there are


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_heads_that_share_keys_and_heads_that_repeat_them_attend_alike(monkeypatch, shared, masked):
    """And have the gradients of softmax in fp64, to 1e-6 in fp32."""
    monkeypatch.setattr(model_file, "shares_heads", lambda *args: shared)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 12, 8, generator=g, requires_grad=True) for heads in (6, 2, 2))
    i = torch.arange(12)
    mask = (i[:, None] >= i).expand(2, 1, 12, 12).clone()
    if masked:
        mask[1, :, :, :4] &= i[:, None] == i[:4]           # the second row begins with padding, which sees itself
    want = masked_attention(q.double(), k.double(), v.double(), mask)
    y = library_attention(q, k, v, mask if masked else None)
    assert (y - want).abs().max() < 1e-6
    exact = torch.autograd.grad(want.square().sum(), (q, k, v))
    for ours, true in zip(torch.autograd.grad(y.square().sum(), (q, k, v)), exact):
        assert (ours - true).abs().max() < 1e-6 * true.abs().max()


@pytest.mark.parametrize("device, dtype, masked, shared", [
    ("cuda", torch.bfloat16, False, True), ("cuda", torch.float16, False, True),
    ("cuda", torch.bfloat16, True, False), ("cuda", torch.float32, False, False), ("cuda", torch.float32, True, False),
    ("cpu", torch.float32, True, True), ("mps", torch.float32, True, True)])
def test_heads_share_keys_where_a_kernel_can(device, dtype, masked, shared):
    """
    torch's sdp_utils.cpp, whose supports_grouped_query_attention only flash attention has (cuDNN is off): it takes half
    types, and no mask.
    """
    assert model_file.shares_heads(device, dtype, masked) == shared


@pytest.mark.parametrize("device, head_dim, there", [("cuda", 16, True), ("cuda", 14, False), ("cpu", 64, False)])
def test_documents_go_to_flex_attention_where_it_has_a_kernel(device, head_dim, there):
    """torch's _inductor/kernel/flex: "must be at least 16". Other heads have the mask of all pairs, as on a Mac."""
    assert model_file.has_flex(device, head_dim) == there


@pytest.mark.parametrize("device, T, S, fixed, padded, way", [
    ("cuda", 1, 9, False, False, "formula"), ("cuda", 1, 9, True, True, "formula"),
    ("cpu", 1, 9, True, False, "formula"),
    ("cuda", 9, 9, False, False, "causal"), ("cpu", 9, 9, False, False, "causal"),
    ("cuda", 9, 9, False, True, "mask"),                   # padding must not be seen
    ("cuda", 4, 9, False, False, "mask"),                  # the second chunk of a prompt sees all of the first
    ("cpu", 1, 9, False, False, "mask"), ("mps", 1, 9, False, False, "mask")])
def test_new_positions_attend_by_what_they_may_see(device, T, S, fixed, padded, way):
    assert generate_file.way_to_attend(device, T, S, fixed, padded) == way


@pytest.mark.parametrize("ways", [("formula", "formula"), ("causal", "formula"), ("causal", "mask"), ("mask", "mask")])
def test_every_way_to_attend_to_the_cache_is_the_full_forward_pass(monkeypatch, ways):
    """A whole prompt and two tokens, to 1e-6 of the largest number in fp32."""
    taken = []

    def way(device, T, *rest):
        taken.append(ways[T == 1])
        return taken[-1]
    monkeypatch.setattr(generate_file, "way_to_attend", way)
    model = small()
    idx = ids(3, 20)
    cache, full = KVCache(model, 3, 20), model.hidden(idx)
    with torch.no_grad():
        steps = torch.cat([model.hidden(part, cache=cache) for part in idx.split([18, 1, 1], dim=1)], 1)
    assert (steps - full).abs().max() < 1e-6 * full.abs().max()
    assert taken == [ways[0]] * 2 + [ways[1]] * 4          # two layers


def test_prompts_of_one_length_are_not_padded(monkeypatch):
    found = []
    true = generate_file.way_to_attend

    def way(*args):
        found.append(true(*args))
        return found[-1]
    monkeypatch.setattr(generate_file, "way_to_attend", way)
    for prompts, wanted in ((ids(2, 5), "causal"), ([[5, 6], [7, 8]], "causal"), ([[5, 6], [7]], "mask")):
        found.clear()
        generate(small(), prompts, 1)
        assert set(found) == {wanted}


def test_another_first_document_leaves_the_second_exactly_alone():
    doc = torch.tensor([[0] * 20 + [1] * 44])
    a, b = ids(1, 64, seed=1), ids(1, 64, seed=1)
    b[:, :20] = ids(1, 20, seed=2)
    with_mask, without = small(), small(doc_mask=False)
    loss_a, loss_b = (with_mask(x, x, doc=doc, per_token=True)[1] for x in (a, b))
    assert torch.equal(loss_a[:, 20:], loss_b[:, 20:])
    second = with_mask.hidden(a, doc)[:, 20:]
    assert torch.equal(second, with_mask.hidden(b, doc)[:, 20:])
    assert not torch.equal(without.hidden(a, doc)[:, 20:], without.hidden(b, doc)[:, 20:])
    alone = with_mask.hidden(a[:, 20:])
    torch.testing.assert_close(second, alone, rtol=1e-5, atol=1e-5)


def test_every_attention_path_is_softmax_with_a_document_mask():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 32, 8, generator=g, dtype=torch.float64) for heads in (6, 2, 2))
    for x in (q, k, v):
        x.requires_grad_()
    doc = (torch.rand(2, 32, generator=g) < 0.15).cumsum(1)
    i = torch.arange(32)
    mask = (i[:, None] >= i) & (doc[:, None, :, None] == doc[:, None, None, :])
    z = (q @ k.repeat_interleave(3, 1).transpose(-1, -2)) / 8 ** 0.5
    want = z.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(3, 1)
    grads = torch.autograd.grad(want.square().sum(), (q, k, v))
    for y in (causal_attention(q, k, v, doc), masked_attention(q, k, v, mask)):
        torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-10)
        for ours, theirs in zip(torch.autograd.grad(y.square().sum(), (q, k, v)), grads):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    # The path of CUDA, whose forward pass alone runs on a CPU.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    block = create_block_mask(model_file.causal_in_documents(doc), 2, None, 32, 32, device="cpu")
    y = flex_attention(q.detach(), k.detach(), v.detach(), block_mask=block, enable_gqa=True)
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)


def test_loss_is_the_mean_over_kept_tokens_and_adds_up_over_micro_batches():
    model = small().double()
    idx, targets = ids(4, 16), ids(4, 16, seed=1)
    keep = torch.rand(4, 16, generator=torch.Generator().manual_seed(2)) < 0.6
    nll = cross_entropy(model(idx)[0], targets, reduction="none").view(4, 16)
    torch.testing.assert_close(model(idx, targets, keep)[1], nll[keep].mean())
    torch.testing.assert_close(model(idx, targets, keep, per_token=True)[1], nll)
    parts = [model(idx[i:i + 1], targets[i:i + 1], keep[i:i + 1], n_tokens=keep.sum())[1] for i in range(4)]
    torch.testing.assert_close(sum(parts), nll[keep].mean())
    hidden = targets.clone()
    hidden[~keep] = -1
    torch.testing.assert_close(model(idx, hidden)[1], nll[keep].mean())
    torch.testing.assert_close(model(idx, hidden, torch.ones_like(keep))[1], nll[keep].mean())
    nothing = model(idx, targets, torch.zeros_like(keep))[1]
    nothing.backward()
    assert nothing == 0 and all(p.grad.abs().max() == 0 for p in model.parameters())


def test_logits_in_the_thousands_have_torchs_loss_and_gradient():
    """Their exponentials are no numbers in any dtype; those of their distances from the largest are."""
    h, w = torch.eye(3), torch.tensor([[2000.0, 1999, -3000], [5, -5000, -5000.5], [-4000, -4001, -9]])
    targets, weights = torch.tensor([1, 0, 0]), torch.tensor([0.25, 0.5, 0.25])
    nll, dz = model_file.chunk_loss(h, w.T.contiguous(), targets, weights, True)
    z = w.double().requires_grad_()
    want = F.cross_entropy(z, targets, reduction="none")
    torch.testing.assert_close(nll.double(), want.detach(), rtol=1e-6, atol=0)
    exact, = torch.autograd.grad(want @ weights.double(), z)
    torch.testing.assert_close(dz.double(), exact, rtol=1e-5, atol=1e-8)
    assert torch.equal(model_file.chunk_loss(h, w.T.contiguous(), targets, weights, False)[0], nll)


def test_bf16_keeps_the_loss_and_its_sums_in_fp32():
    """h and logits have 8 bits; log Z and the mean have fp32's 24."""
    model = small(block_size=2048)
    model.dtype = torch.bfloat16
    idx, targets = ids(1, 1003), ids(1, 1003, seed=1)      # 1 / 1003 in bf16 is off by 0.2 %
    h, w = model.hidden(idx).detach()[0], model.lm_head.weight.detach().bfloat16()
    nll = F.cross_entropy((h @ w.T).double(), targets[0], reduction="none")
    torch.testing.assert_close(model(idx, targets, per_token=True)[1][0].double(), nll, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model(idx, targets)[1].double(), nll.mean(), rtol=1e-6, atol=0)


def test_bf16_sums_the_gradient_of_the_head_over_chunks_in_fp32():
    h, head = torch.full((4096, 4), 1.0).bfloat16(), torch.zeros(8, 4, requires_grad=True)
    every = torch.arange(4096) % 8                         # of each label as many: dz = 1/8 - (label), which bf16 holds
    labels, weights = every * (every < 4), torch.ones(4096)
    loss, nll = model_file.ChunkedCrossEntropy.apply(h, head, labels, weights, 8, model_file.chunk_loss)
    loss.backward()
    assert not nll.requires_grad                           # its gradient is not written: better none than a wrong one
    label_counts = torch.tensor([4096 * 5 / 8, *3 * [512.0], *4 * [0.0]])
    want = (512 - label_counts)[:, None].expand(8, 4)      # whole numbers, which fp32 adds exactly
    assert torch.equal(head.grad, want)


def test_in_bf16_far_positions_are_told_apart():
    """Angles of thousands of radians have no fraction left in bf16: the same model in fp32 would attend elsewhere."""
    model, idx = small(block_size=2048, n_layer=1), ids(1, 2000)
    exact = model.hidden(idx)[:, 1000:]
    model.dtype = torch.bfloat16
    off = (model.hidden(idx)[:, 1000:].float() - exact).norm() / exact.norm()
    assert off < 0.02, off


# The most MiB that a step of 4,096 tokens at V = 65,536 takes beyond what one of 64 tokens has taken.
STEP = """
import resource, sys, torch
sys.path.insert(0, sys.argv[1])
from model import Apertus, ApertusConfig
shape = dict(n_layer=1, n_head=1, n_kv_head=1, n_embd=32, ffn_dim=64)
m = Apertus(ApertusConfig(block_size=4096, vocab_size=65536, **shape))
idx = torch.arange(4096)[None]
m(idx[:, :64], idx[:, :64])[1].backward()
m.zero_grad()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
m(idx, idx)[1].backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_the_whole_logits_tensor_never_exists():
    """The fp32 logits alone would be 1,024 MiB; 1,024 rows of them are 256."""
    command = [sys.executable, "-c", STEP, ROOT]
    mib = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(mib) < 800


@pytest.mark.parametrize("changes", [
    dict(activation="swiglu"), dict(activation="gelu"), dict(activation="relu2"), dict(qk_norm=False),
    dict(tie_embeddings=True), dict(rope_scaling=0.0), dict(n_kv_head=1), dict(n_kv_head=6), dict(doc_mask=False)])
def test_every_ablation_is_one_word_and_has_gradients(changes):
    model = small(**changes)
    model(ids(2, 8), ids(2, 8, seed=3))[1].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_swiglu_has_the_parameter_budget_of_the_gate_free_layer():
    assert ApertusConfig(activation="swiglu").ffn_width == 14336                 # Llama 3 8B's

    def count(activation):
        model = small(activation=activation, ffn_dim=120)
        return sum(p.numel() for n, p in model.named_parameters() if "_proj" in n and "mlp" in n)
    assert count("swiglu") == count("gelu")


@pytest.mark.parametrize("changes, says", [
    (dict(n_embd=50), "n_head=6: try n_head=5"),
    (dict(n_kv_head=4), "n_kv_head=4: try n_kv_head=3"),
    (dict(n_embd=18), "= 3 is odd"),
    (dict(activation="silu"), "not one of xielu, swiglu")])
def test_a_shape_that_cannot_be_is_refused_in_one_line(changes, says):
    with pytest.raises(ValueError, match=says):
        ApertusConfig(**{**SMALL, **changes})


def test_flops_are_the_published_ones():
    """6.74e24 for the 70B's 15T tokens (sec. 6), and 7.74e23 for the 8B's."""
    with torch.device("meta"):
        eight = Apertus(ApertusConfig())
        seventy = Apertus(ApertusConfig(n_layer=80, n_head=64, n_embd=8192, ffn_dim=43008))
    assert eight.flops_per_token(4096) == pytest.approx(48.3e9, rel=2e-3)
    assert seventy.flops_per_token(4096) == pytest.approx(433.3e9, rel=2e-3)


def test_frozen_matrices_cost_four_flops_per_token_instead_of_six():
    """2 forward and 2 for the gradient of what went in; none for their own. Attention costs as much as before."""
    model = Apertus(ApertusConfig(block_size=8, vocab_size=96, n_layer=2, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24))
    matrices = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 16 * 24 * 2) + 96 * 16
    attention = 6 * 2 * 2 * 8 * 8
    assert model.flops_per_token(8) == 6 * matrices + attention
    model.requires_grad_(False)
    assert model.flops_per_token(8) == 4 * matrices + attention
    model.lm_head.requires_grad_(True)
    assert model.flops_per_token(8) == 4 * matrices + 2 * 96 * 16 + attention
