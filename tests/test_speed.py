"""
What speed rests on.

Nothing recompiles once it is warm (counted by torch._dynamo), and the fast paths compute what the plain ones do.
"""
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
    """
    A compiler that has seen nothing.

    Its front end decides what is recompiled. What the back end makes of a graph does not matter here, so the tests take
    a quick one.
    """
    forget()
    yield
    torch._dynamo.reset()


def forget():
    torch._dynamo.reset()
    counters.clear()


def graphs():
    return counters["stats"]["unique_graphs"]


def apertus(**more):
    return Apertus(ApertusConfig(**SMALL, **more))


def packed(n, B=2, T=64):
    """Batch n: (inputs, labels, keep, doc), documents of other lengths in each."""
    g = np.random.default_rng(n)
    stream = torch.from_numpy(g.integers(0, 97, (B, T + 1)))
    labels = stream[:, 1:]
    share_of_ends = 0.05 + 0.1 * (n % 3)
    ends = torch.from_numpy(g.random((B, T)) < share_of_ends)
    keep = goldfish_mask(labels.contiguous(), 4, 13)
    return stream[:, :-1], labels, keep, ends.cumsum(1)


def backward(model, batch):
    _, loss = model(*batch)
    loss.backward()


def graphs_of_packed_training(dtype):
    """Graphs after the first step, and after thirteen more with documents of other lengths and with a single one."""
    forget()
    model = apertus()
    model.dtype = dtype
    model.compile_blocks(backend="aot_eager")
    backward(model, packed(0))
    warm = graphs()
    for n in (*range(1, 12), 13):
        backward(model, packed(n))
    model(*packed(99))
    one_document = packed(5)
    one_document[3].zero_()
    backward(model, one_document)
    return warm, graphs()


def test_documents_of_any_lengths_do_not_recompile():
    """In fp32 and bf16: one block's graphs (fp32: before and after attention), not one a layer, and the loss's."""
    # What other tests compiled leaves traces, two graphs more, so this is counted in a new process.
    with multiprocessing.get_context("spawn").Pool(1) as new_process:
        counts = new_process.map(graphs_of_packed_training, [torch.float32, torch.bfloat16])
    for warm, after in counts:
        assert 0 < warm <= 3
        assert after == warm


def test_compiled_blocks_give_the_loss_and_gradients_of_eager_ones():
    eager, compiled = apertus(), apertus()
    compiled.compile_blocks(backend="aot_eager")
    for n in range(3):
        for m in (eager, compiled):
            m.zero_grad()
            backward(m, packed(n))
        for (name, p), q in zip(eager.named_parameters(), compiled.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_compiling_one_model_leaves_the_others_eager():
    eager, compiled = apertus(), apertus()
    compiled.compile_blocks(backend="aot_eager")
    backward(eager, packed(0))
    assert graphs() == 0


def test_the_optimizer_does_not_recompile_as_its_schedules_move_and_equals_the_eager_one(monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile(f, backend="aot_eager", **how))
    # Small ones are updated as one. They and 19 large ones come as lists of three, in which other lengths are equal,
    # the last one filled up.
    sizes = [(1,), (7,), (33, 5), (33, 5)]
    sizes += [(130, 130 + n // 3) for n in range(12)]
    sizes += [(140, 130 + n % 5) for n in range(7)]
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size, generator=g)) for size in sizes]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    fused = AdEMAMix(params, alpha_warmup=10, beta3_warmup=10, compile=True)
    plain = AdEMAMix(copies, alpha_warmup=10, beta3_warmup=10, compile=False)
    for t in range(6):
        for p, q in zip(params, copies):
            p.grad = q.grad = torch.randn(p.shape, generator=g)
        for opt in (fused, plain):
            opt.param_groups[0]["lr"] = 1e-3 * (t + 1)
            opt.step(grad_scale=1 / (t + 1))
        if t == 0:
            warm = graphs()
    # One graph, of three tensors: not one for each tensor, nor one for each step.
    assert graphs() == warm == 1
    for p, q in zip(params, copies):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        for name, state in fused.state[p].items():
            torch.testing.assert_close(state, plain.state[q][name], rtol=1e-6, atol=1e-7)


def test_gradients_that_are_parts_of_one_buffer_as_fsdps_are_compile_no_second_kernel(monkeypatch):
    """Four to a buffer, of other sizes, so that each place of a call meets one at its start and others further on."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile(f, backend="aot_eager", **how))
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(130 + n, 130, generator=g)) for n in range(12)]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    fused, plain = AdEMAMix(params, compile=True), AdEMAMix(copies, compile=False)
    for i in range(0, 12, 4):
        buffer = torch.randn(sum(p.numel() for p in params[i:i + 4]), generator=g)
        parts = buffer.split([p.numel() for p in params[i:i + 4]])
        for p, q, part in zip(params[i:], copies[i:], parts):
            p.grad = part.view_as(p)
            q.grad = p.grad.clone()
    fused.step()
    plain.step()
    assert graphs() == 1
    for p, q in zip(params, copies):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["exp_avg_fast", "exp_avg_slow", "exp_avg_sq", "grad"])
def test_an_average_or_gradient_in_another_order_of_memory_moves_like_any_other(monkeypatch, name):
    """By columns, as a state that was saved of a transposed parameter."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile(f, backend="aot_eager", **how))
    start = torch.randn(130, 128, generator=torch.Generator().manual_seed(0))
    plain, columns = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    for p in (plain, columns):
        opt = AdEMAMix([p], compile=True)
        for t in range(3):
            p.grad = start + t
            by_columns = lambda x: x.T.contiguous().T
            if p is columns and name == "grad":
                p.grad = by_columns(p.grad)
            elif p is columns and t:
                opt.state[p][name] = by_columns(opt.state[p][name])
            opt.step()
    torch.testing.assert_close(plain, columns, rtol=1e-6, atol=1e-7)


# -----------------------------------------------------------------------------
# Decoding with a cache of fixed shape


def greedy(model, prompts, n, **how):
    return generate(model, prompts, n, temperature=0, **how)


@pytest.fixture
def quick_step(monkeypatch):
    """The compiled step of decoding, by a quick back end."""
    step = torch.compile(generate_file.next_logits, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(generate_file, "compiled_step", lambda device: step)


def test_a_fixed_cache_decodes_like_a_growing_one():
    model = apertus().double()
    rng = np.random.default_rng(0)
    idx = torch.from_numpy(rng.integers(0, 97, (3, 20)))
    start = torch.tensor([0, 3, 6])
    grown = KVCache(model, 3, 20, start)
    fixed = KVCache(model, 3, 32, start)
    with torch.no_grad():
        for cache in (grown, fixed):
            model.hidden(idx[:, :8], cache=cache)
        fixed.fix()
        for i in range(8, 20):
            token = idx[:, i : i + 1]
            want = model.hidden(token, cache=grown)
            torch.testing.assert_close(model.hidden(token, cache=fixed), want, rtol=1e-11, atol=1e-11)


def test_laid_out_for_decoding_the_model_holds_the_same_numbers_and_says_the_same():
    for tie in (False, True):
        model = apertus(tie_embeddings=tie)
        before = {name: p.clone() for name, p in model.named_parameters()}
        said = greedy(model, [[5, 6, 7]], 24)
        lay_out_for_decoding(model)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        mlp = model.model.layers[0].mlp
        assert mlp.up_proj.weight.stride() == (1, 80)
        assert mlp.down_proj.weight.stride() == (80, 1)
        # Rows of the embeddings are looked up, so they stay together, tied or not.
        assert model.model.embed_tokens.weight.is_contiguous()
        assert model.lm_head.weight.is_contiguous() == tie
        assert greedy(model, [[5, 6, 7]], 24) == said


def test_compiled_generation_says_the_same_and_compiles_one_step(quick_step):
    model = apertus()
    # Other prompts and lengths take the same step.
    for prompts, n in (([[5, 6, 7]], 24), ([list(range(40))], 30), ([[9]], 3)):
        assert greedy(model, prompts, n, compile=True) == greedy(model, prompts, n)
    assert graphs() == 1
    sampled = []
    for compiled in (True, False):
        g = torch.Generator().manual_seed(3)
        sampled.append(generate(model, [[5, 6, 7]], 24, generator=g, compile=compiled))
    assert sampled[0] == sampled[1]


def test_training_after_compiled_generation_is_seen_by_it(quick_step):
    """There is no stale copy of the weights."""
    model = apertus()
    before = greedy(model, [[5, 6, 7]], 24, compile=True)
    with torch.no_grad():
        for p in model.parameters():
            g = torch.Generator().manual_seed(p.numel())
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    after = greedy(model, [[5, 6, 7]], 24, compile=True)
    assert after == greedy(model, [[5, 6, 7]], 24)
    assert after != before
