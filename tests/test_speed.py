"""
What speed rests on: nothing recompiles once it is warm (counted by torch._dynamo), and what is compiled computes what
runs eagerly. The front end of the compiler decides what is recompiled, so a quick back end is enough.
"""
import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import generate as generate_file
from ademamix import AdEMAMix
from generate import generate
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig

SMALL = dict(block_size=64, vocab_size=97, n_layer=2, n_head=6, n_kv_head=2, n_embd=48, ffn_dim=80, init_std=0.1)
QUICK = dict(backend="aot_eager")


@pytest.fixture(autouse=True)
def fresh():
    """A compiler that has seen nothing."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


def packed(n, B=2, T=64):
    """Batch n: (inputs, labels, keep, doc), documents of other lengths in each."""
    generator = np.random.default_rng(n)
    stream = torch.from_numpy(generator.integers(0, 97, (B, T + 1)))
    labels = stream[:, 1:].contiguous()
    ends = torch.from_numpy(generator.random((B, T)) < 0.05 + 0.1 * (n % 3))
    return stream[:, :-1], labels, goldfish_mask(labels, 4, 13), ends.cumsum(1)


def test_documents_of_any_lengths_do_not_recompile_and_give_the_eager_loss_and_gradients():
    """The last batch has one document for each row."""
    eager, compiled = Apertus(ApertusConfig(**SMALL)), Apertus(ApertusConfig(**SMALL))
    for block in compiled.model.layers:
        block.compile(**QUICK)
    compiled.chunk_loss = torch.compile(compiled.chunk_loss, **QUICK)
    for n in range(6):
        *batch, doc = packed(n)
        losses = []
        for model in (eager, compiled):
            model.zero_grad()
            _, loss = model(*batch, doc if n < 5 else doc * 0)
            loss.backward()
            losses.append(loss.item())
        if n == 0:
            warm = graphs()
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for (name, p), q in zip(eager.named_parameters(), compiled.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)
    assert graphs() == warm > 0


def test_the_optimizer_does_not_recompile_as_its_schedules_move_and_equals_the_eager_one(monkeypatch):
    """Tensors of 12 sizes, of which small ones are updated together; rate and scale of the gradient change."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile(f, **how | QUICK))
    generator = torch.Generator().manual_seed(0)
    sizes = [(1,), (7,), (33, 5), (33, 5), *((130, 130 + n // 2) for n in range(9))]
    params = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    fused = AdEMAMix(params, alpha_warmup=10, beta3_warmup=10, compile=True)
    plain = AdEMAMix(copies, alpha_warmup=10, beta3_warmup=10, compile=False)
    for t in range(4):
        for p, q in zip(params, copies):
            p.grad = q.grad = torch.randn(p.shape, generator=generator)
        for optimizer in (fused, plain):
            optimizer.param_groups[0]["lr"] = 1e-3 * (t + 1)
            optimizer.step(grad_scale=1 / (t + 1))
        if t == 0:
            warm = graphs()
    assert graphs() == warm == 1
    for p, q in zip(params, copies):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_compiled_generation_compiles_one_step_says_the_same_and_sees_later_training(monkeypatch):
    """Prompts and outputs of other lengths take the same step, and there is no stale copy of the weights."""
    step = torch.compile(generate_file.next_logits, fullgraph=True, **QUICK)
    monkeypatch.setattr(generate_file, "compiled_step", lambda *args: step)
    model = Apertus(ApertusConfig(**SMALL))
    said = []
    for more in (0.0, 0.1):
        with torch.no_grad():
            for p in model.parameters():
                p += more * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        for prompt, n in (([5, 6, 7], 24), (list(range(40)), 12)):
            said.append(generate(model, [prompt], n, temperature=0, compile=True))
            assert said[-1] == generate(model, [prompt], n, temperature=0)
    assert said[0] != said[2] and graphs() == 1
