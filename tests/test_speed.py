"""What speed rests on: nothing recompiles once it is warm (counted by torch._dynamo), and the fast paths compute what the plain ones do."""
import multiprocessing

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import generate as generate_file
from ademamix import AdEMAMix
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig
from generate import KVCache, generate, lay_out_for_decoding

SMALL = dict(block_size=64, vocab_size=97, n_layer=3, n_head=6, n_kv_head=2, n_embd=48, ffn_dim=80, init_std=0.1)


@pytest.fixture(autouse=True)
def fresh():
    """The front end decides what is recompiled; what the back end makes of a graph does not matter here, so the tests take a quick one."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


def packed(n, B=2, T=64):
    g = np.random.default_rng(n)
    stream = torch.from_numpy(g.integers(0, 97, (B, T + 1)))
    doc = torch.from_numpy(g.random((B, T)) < 0.05 + 0.1 * (n % 3)).cumsum(1)
    return stream[:, :-1], stream[:, 1:], goldfish_mask(stream[:, 1:].contiguous(), 4, 13), doc


def graphs_of_packed_training(dtype):
    """Graphs after the first step, and after thirteen more with documents of other lengths and with a single one."""
    torch._dynamo.reset(), counters.clear()
    model = Apertus(ApertusConfig(**SMALL))
    model.dtype = dtype
    model.compile_blocks(backend="aot_eager")
    step = lambda n: model(*packed(n))[1].backward()
    step(0)
    warm = graphs()
    for n in range(1, 12):
        step(n)
    step(13), model(*[t[:, :64] if t.ndim > 1 else t for t in packed(99)])
    one_document = packed(5)
    one_document[3].zero_()
    model(*one_document)[1].backward()
    return warm, graphs()


def test_documents_of_any_lengths_do_not_recompile():
    with multiprocessing.get_context("spawn").Pool(1) as fresh_process:      # what other tests compiled leaves traces: two graphs more, once
        for warm, after in fresh_process.map(graphs_of_packed_training, [torch.float32, torch.bfloat16]):
            assert 0 < warm <= 3                           # one block's graphs (fp32: before and after attention), not one a layer, and the loss's
            assert after == warm


def test_compiled_blocks_give_the_loss_and_gradients_of_eager_ones():
    eager, compiled = (Apertus(ApertusConfig(**SMALL)) for _ in range(2))
    compiled.compile_blocks(backend="aot_eager")
    for n in range(3):
        for m in (eager, compiled):
            m.zero_grad()
            m(*packed(n))[1].backward()
        for (name, p), q in zip(eager.named_parameters(), compiled.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_compiling_one_model_leaves_the_others_eager():
    eager, compiled = (Apertus(ApertusConfig(**SMALL)) for _ in range(2))
    compiled.compile_blocks(backend="aot_eager")
    eager(*packed(0))[1].backward()
    assert graphs() == 0


def test_the_optimizer_does_not_recompile_as_its_schedules_move_and_equals_the_eager_one(monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile(f, backend="aot_eager", **how))
    # small ones are updated as one; they and 19 large ones as lists of three, in which other lengths are equal, the last one filled up
    sizes = [(1,), (7,), (33, 5), (33, 5)] + [(130, 130 + n // 3) for n in range(12)] + [(140, 130 + n % 5) for n in range(7)]
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=g)) for s in sizes]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    fused, plain = (AdEMAMix(ps, alpha_warmup=10, beta3_warmup=10, compile=c) for ps, c in ((params, True), (copies, False)))
    for t in range(6):
        for p, q in zip(params, copies):
            p.grad = q.grad = torch.randn(p.shape, generator=g)
        for opt in (fused, plain):
            opt.param_groups[0]["lr"] = 1e-3 * (t + 1)
            opt.step(grad_scale=1 / (t + 1))
        if t == 0:
            warm = graphs()
    assert graphs() == warm == 1                           # of three tensors; not one a tensor, nor one a step
    for p, q in zip(params, copies):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        for name, state in fused.state[p].items():
            torch.testing.assert_close(state, plain.state[q][name], rtol=1e-6, atol=1e-7)


# -----------------------------------------------------------------------------
# decoding with a cache of fixed shape


def test_a_fixed_cache_decodes_like_a_growing_one():
    model = Apertus(ApertusConfig(**SMALL)).double()
    idx = torch.from_numpy(np.random.default_rng(0).integers(0, 97, (3, 20)))
    start = torch.tensor([0, 3, 6])
    grown, fixed = KVCache(model, 3, 20, start), KVCache(model, 3, 32, start)
    with torch.no_grad():
        model.hidden(idx[:, :8], cache=grown), model.hidden(idx[:, :8], cache=fixed)
        fixed.fix()
        for i in range(8, 20):
            want = model.hidden(idx[:, i:i + 1], cache=grown)
            torch.testing.assert_close(model.hidden(idx[:, i:i + 1], cache=fixed), want, rtol=1e-11, atol=1e-11)


def test_laid_out_for_decoding_the_model_holds_the_same_numbers_and_says_the_same():
    for tie in (False, True):
        model = Apertus(ApertusConfig(**SMALL, tie_embeddings=tie))
        before, said = {n: p.clone() for n, p in model.named_parameters()}, generate(model, [[5, 6, 7]], 24, temperature=0)
        lay_out_for_decoding(model)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        mlp = model.model.layers[0].mlp
        assert mlp.up_proj.weight.stride() == (1, 80) and mlp.down_proj.weight.stride() == (80, 1)
        assert model.model.embed_tokens.weight.is_contiguous() and model.lm_head.weight.is_contiguous() == tie    # rows are looked up
        assert generate(model, [[5, 6, 7]], 24, temperature=0) == said


def test_compiled_generation_says_the_same_and_compiles_one_step(monkeypatch):
    step = torch.compile(generate_file.next_logits, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(generate_file, "compiled_step", lambda device: step)
    model = Apertus(ApertusConfig(**SMALL))
    for prompts, n in (([[5, 6, 7]], 24), ([list(range(40))], 30), ([[9]], 3)):              # other prompts and lengths: the same step
        assert generate(model, prompts, n, temperature=0, compile=True) == generate(model, prompts, n, temperature=0)
    assert graphs() == 1
    sampled = [generate(model, [[5, 6, 7]], 24, generator=torch.Generator().manual_seed(3), compile=c) for c in (True, False)]
    assert sampled[0] == sampled[1]


def test_training_after_compiled_generation_is_seen_by_it(monkeypatch):      # no stale copy of the weights
    step = torch.compile(generate_file.next_logits, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(generate_file, "compiled_step", lambda device: step)
    model = Apertus(ApertusConfig(**SMALL))
    before = generate(model, [[5, 6, 7]], 24, temperature=0, compile=True)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    after = generate(model, [[5, 6, 7]], 24, temperature=0, compile=True)
    assert after == generate(model, [[5, 6, 7]], 24, temperature=0) and after != before
