"""
Nothing recompiles after the first call (counted by torch._dynamo), and compiled code computes the same as eager code.
The front end of the compiler decides about compilations, so a quick back end is enough. Optimizer: test_averages.py.
"""
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import generate as generate_file
from generate import generate
from tiny import ids, small


@pytest.fixture
def quick():
    """A back end that counts compiled graphs, of a compiler that has seen nothing."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def test_documents_of_any_lengths_do_not_recompile_and_give_the_eager_loss_and_gradients(quick):
    eager, compiled = small(), small()
    for block in compiled.model.layers:
        block.compile(backend=quick)
    compiled.chunk_loss = torch.compile(compiled.chunk_loss, backend=quick)
    graphs = set()
    for n in range(6):
        stream = ids(2, 65, seed=n)
        labels = stream[:, 1:].contiguous()
        batch = stream[:, :-1], labels, labels % 4 > 0, (labels % 7 < n).cumsum(1)
        losses = [model(*batch)[1] for model in (eager, compiled)]
        gradients = [torch.autograd.grad(loss, model.parameters()) for loss, model in zip(losses, (eager, compiled))]
        graphs.add(quick.frame_count)
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    assert len(graphs) == 1 and graphs != {0}


def test_compiled_generation_compiles_one_step_says_the_same_and_sees_later_training(quick, monkeypatch):
    """Prompts and outputs of other lengths take the same step, and there is no stale copy of the weights."""
    step = torch.compile(generate_file.next_logits, fullgraph=True, backend=quick)
    monkeypatch.setattr(generate_file, "compiled_step", lambda *args: step)
    model = small()
    said = []
    for seed in (1, 2):
        model.init_weights(seed)
        for prompt, n in (([5, 6, 7], 24), (list(range(40)), 12)):
            said.append(generate(model, [prompt], n, temperature=0, compile=True))
            assert said[-1] == generate(model, [prompt], n, temperature=0)
    assert said[0] != said[2] and quick.frame_count == 1
