"""loss.py against F.cross_entropy of all logits at once, in fp64."""

import pytest
import torch
import torch.nn.functional as F
from conftest import table
from torch.testing import assert_close

import loss
from configurator import literal
from loss import ChunkedCrossEntropy, chunk_loss, chunk_rows

# Rows of a chunk, of 50 in all; the frozen tensors; rows of the head that are trained in its place.
CHUNKS = """
7  |        |
25 | h      |
25 | head   |
64 | h head |
64 |        |
7  | head   | 1 4 9
25 | h head | 10 0
"""


@pytest.mark.parametrize("rows, frozen, own", table(CHUNKS))
def test_loss_and_gradients_are_those_of_the_full_logits(monkeypatch, frozen, rows, own):
    torch.manual_seed(0)
    rows = int(rows)
    h, head, weights = torch.randn(50, 8).double(), torch.randn(11, 8).double(), torch.rand(50).double()
    targets = torch.arange(50) % 11
    trained = [p.requires_grad_() for name, p in (("h", h), ("head", head)) if name not in frozen.split()]
    ids = torch.tensor([int(n) for n in own.split()])
    own = torch.randn(len(ids), 8).double().requires_grad_() if len(ids) else None
    trained += [own] * len(ids[:1])
    seen = []

    def noted(part, *rest):
        seen.append((len(part), rest[-1]))
        return chunk_loss(part, *rest)

    monkeypatch.setattr(loss, "chunk_rows", lambda *_: rows)
    found, nll = ChunkedCrossEntropy.apply(h, head, targets, weights, noted, own, ids)
    assert max(seen) == (min(rows, 50), bool(trained))
    whole = head if own is None else head.index_copy(0, ids, own)
    each = F.cross_entropy(h @ whole.T, targets, reduction="none")
    assert_close((nll, found), (each.detach(), each @ weights))
    if trained:
        # No gradient is built for a frozen matrix: for the 8B's head it would take 2 GB.
        built = [t.shape for t in found.grad_fn.saved_tensors if t is not None]
        assert built == [p.shape for p in trained] and not nll.requires_grad
        exact = torch.autograd.grad(3 * each @ weights, trained)
        assert_close(torch.autograd.grad(3 * found, trained), exact)


def test_logits_in_the_thousands_have_torchs_loss_and_gradient():
    """Exponentials of the logits overflow in any dtype; those of their distances to the largest do not."""
    z = torch.tensor([[2000.0, 1999, -3000], [5, -5000, -5000.5], [-4000, -4001, -9]])
    targets, weights = torch.tensor([1, 0, 0]), torch.tensor([0.25, 0.5, 0.25])
    found = chunk_loss(torch.eye(3), z.T, targets, weights, True)
    exact = z.double().requires_grad_()
    want = F.cross_entropy(exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(want @ weights.double(), exact)
    assert_close([x.double() for x in found], [want.detach(), gradient], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_bf16_losses_and_the_heads_gradient_are_added_up_in_fp32(monkeypatch, dtype):
    """
    dz is 1/8, minus 1 at the label, which is exact in bf16. Sums over chunks are integers too large for bf16.
    The gradient has the head's dtype.
    """
    monkeypatch.setattr(loss, "chunk_rows", lambda *_: 8)
    h = torch.ones(4104, 4).bfloat16()
    head = torch.zeros(8, 4, dtype=dtype, requires_grad=True)
    labels = torch.arange(4104) % 8
    total, nll = ChunkedCrossEntropy.apply(h, head, labels * (labels < 4), torch.ones(4104), chunk_loss)
    assert_close(nll, torch.full((4104,), 8.0).log())
    total.backward()
    want = 513 - 513 * torch.tensor([5.0, 1, 1, 1, 0, 0, 0, 0])
    assert torch.equal(head.grad, want[:, None].expand(8, 4).to(dtype))


# Logits in fp32: 0.5 GB in the first row, 268 MB in the next two, then 16 MB twice, 268 MB and 0.5 GB.
HELD = """
1024   | 131_072   | cuda | True
512    | 131_072   | cuda | False
512    | 131_072   | cpu  | True
256    | 16_384    | cpu  | True
2048   | 2048      | cpu  | True
32_768 | 2048      | cuda | False
128    | 1_048_576 | cpu  | True
"""


@pytest.mark.parametrize("row", table(HELD))
def test_the_logits_held_at_a_time_take_the_documented_memory(row):
    rows, V, device, trained = map(literal, row)
    assert chunk_rows(V, torch.device(device), trained) == rows
