"""
Nothing recompiles after the first call (counted by torch._dynamo), and compiled code computes the same as eager code.
The front end of the compiler decides about compilations, so a quick back end is enough. The optimizer: test_averages.py.
"""
import pytest
import torch
from torch._dynamo.utils import counters

import generate as generate_file
from generate import generate
from goldfish import goldfish_mask
from tiny import ids, small

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


def packed(n):
    """Batch n: (inputs, labels, keep, doc), documents of other lengths in each; one for each row in batch 5."""
    stream = ids(2, 65, seed=n)
    labels = stream[:, 1:].contiguous()
    ends = (labels * 7919 + n) % 97 < (3, 9, 20, 5, 50, 0)[n]
    return stream[:, :-1], labels, goldfish_mask(labels, 4, 13), ends.cumsum(1)


def test_documents_of_any_lengths_do_not_recompile_and_give_the_eager_loss_and_gradients():
    eager, compiled = small(), small()
    for block in compiled.model.layers:
        block.compile(**QUICK)
    compiled.chunk_loss = torch.compile(compiled.chunk_loss, **QUICK)
    warm = []
    for n in range(6):
        losses = []
        for model in (eager, compiled):
            model.zero_grad()
            _, loss = model(*packed(n))
            loss.backward()
            losses.append(loss)
        warm.append(graphs())
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for (name, p), q in zip(eager.named_parameters(), compiled.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)
    assert len(set(warm)) == 1 and warm[0] > 0


def test_compiled_generation_compiles_one_step_says_the_same_and_sees_later_training(monkeypatch):
    """Prompts and outputs of other lengths take the same step, and there is no stale copy of the weights."""
    step = torch.compile(generate_file.next_logits, fullgraph=True, **QUICK)
    monkeypatch.setattr(generate_file, "compiled_step", lambda *args: step)
    model = small()
    said = []
    for seed in (1, 2):
        model.init_weights(seed)
        for prompt, n in (([5, 6, 7], 24), (list(range(40)), 12)):
            said.append(generate(model, [prompt], n, temperature=0, compile=True))
            assert said[-1] == generate(model, [prompt], n, temperature=0)
    assert said[0] != said[2] and graphs() == 1
