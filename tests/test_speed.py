"""
Nothing recompiles after the first call (counted by torch._dynamo), and compiled code computes the same as eager code.
The compiler's front end decides when to recompile, so a quick back end is enough. test_moments.py has the optimizer.
"""

import torch
from tiny import ids, small
from torch._dynamo.testing import CompileCounterWithBackend


def test_documents_of_any_lengths_do_not_recompile_and_give_the_eager_loss_and_gradients():
    torch._dynamo.reset()
    quick = CompileCounterWithBackend("aot_eager")
    eager, compiled = small(), small()
    for block in compiled.model.layers:
        block.compile(backend=quick)
    compiled.chunk_loss = torch.compile(compiled.chunk_loss, backend=quick)
    graphs = set()
    for n in range(6):
        stream = ids(2, 65, seed=n)
        labels = stream[:, 1:].contiguous()
        batch = stream[:, :-1], labels, labels % 4 > 0, (labels % 7 < n).cumsum(1)
        losses = [model.loss(*batch) for model in (eager, compiled)]
        gradients = [torch.autograd.grad(loss, model.parameters()) for loss, model in zip(losses, (eager, compiled))]
        graphs.add(quick.frame_count)
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    assert len(graphs) == 1 and graphs != {0}
