"""distill.py and train.py --teacher: the loss against torch's own functions on all logits in fp64."""

import pytest
import torch
import torch.nn.functional as F
from conftest import refused, script
from lab import pretraining
from tiny import ids, small
from trained import log

import convert
import loss as loss_file
from data import TokenDataset
from distill import Teacher, chunk_loss
from model import Apertus

STUDENT = "--n_layer=1 --dtype=float32 --compile=False --eval_every=0 --last_eval_windows=8".split()


def batch():
    """idx, targets, keep, doc (3, 40): a quarter of the positions has no loss; a document has ten tokens."""
    stream = ids(3, 41)
    keep = ids(3, 40, seed=1) % 4 > 0
    return stream[:, :-1], stream[:, 1:], keep, torch.arange(120).view(3, 40) // 10


def plain_terms(model, teacher, idx, targets, keep, doc):
    """Cross-entropy and KL(teacher || model), means over the kept tokens, by torch's functions on all logits."""
    q = model(idx, doc).log_softmax(-1)[keep]
    with torch.no_grad():
        p = teacher(idx, doc)[..., : q.shape[-1]].log_softmax(-1)[keep]
    return F.nll_loss(q, targets[keep]), F.kl_div(q, p, reduction="batchmean", log_target=True)


def test_loss_and_gradients_are_those_of_the_full_logits_in_fp64(monkeypatch):
    """The teacher's head is padded from 97 to 101 rows. The chunk size does not divide the number of positions."""
    monkeypatch.setattr(loss_file, "chunk_rows", lambda *how: 17)
    model = small().double()
    teacher = object.__new__(Teacher)  # not from a folder, whose weights are not fp64
    vars(teacher).update(model=small(n_embd=96, vocab_size=101).double(), share=0.3, chunk_loss=chunk_loss)
    ce, kl = plain_terms(model, teacher.model, *batch())
    want = torch.autograd.grad(3 * (0.7 * ce + 0.3 * kl), model.parameters())
    loss, terms = teacher.loss(model, *batch(), n_tokens=batch()[2].sum())
    (3 * loss).backward()
    torch.testing.assert_close(terms, torch.stack((ce, kl)).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close([p.grad for p in model.parameters()], list(want), rtol=1e-9, atol=1e-12)


# -----------------------------------------------------------------------------
# runs


def steps(out):
    return [[entry[key] for key in ("loss", "kl", "grad_norm")] for entry in log(out, "kl")]


def learn(lab, out, *args, teacher="hf"):
    return script(*pretraining(lab, out, *STUDENT, f"--teacher={lab / teacher}", *args))


def test_the_first_step_is_that_of_the_formula_kl_falls_and_a_run_keeps_its_teacher(lab, tmp_path):
    run = tmp_path / "run"
    goldfish = "--goldfish_k=3", "--goldfish_h=5", "--goldfish_scope=stream"
    learn(lab, run, *goldfish)
    found = steps(run)
    model = Apertus(convert.load_any(str(run))[0].config, 28).double()
    teacher, _ = convert.load_any(str(lab / "hf"), "cpu", torch.float64)
    first = TokenDataset(str(lab / "data"), "train", 256, 28, 3, 5, "product", "stream").batch(0, 8)
    ce, kl = plain_terms(model, teacher, *first)
    (0.1 * ce + 0.9 * kl).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert found[0] == pytest.approx([ce.item(), kl.item(), norm.item()], rel=1e-5)
    assert found[-1][1] < found[0][1]
    again = *goldfish, "--resume"
    refused(learn(lab, run, *again, "--distill=0.5", teacher="sft"), "distill 0.9 -> 0.5", "teacher_sha256")
    refused(learn(lab, run, *again, teacher="pretrained"), "is finished")
