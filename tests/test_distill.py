"""
posttrain/distill.py and train.py --teacher: the loss against torch's own functions on all logits in fp64, and runs
against that formula, against the run that was never stopped, and on two ranks against one.
"""
import os
import shutil

import pytest
import torch
import torch.nn.functional as F

import convert
import loss as loss_file
from conftest import refused, same, script, weights
from data import TokenDataset
from engine.plot import read_log
from model import Apertus
from posttrain.distill import Student, learn_from
from tiny import ids, small


def taught(model, teacher, share):
    model.__class__ = type("Taught", (Student, Apertus), {})
    learn_from(model, teacher, share, compiled=False)
    return model


def batch():
    """idx, targets, keep, doc (3, 40): a third of the positions has no loss."""
    stream, chance = ids(3, 41), torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(0))
    return stream[:, :-1], stream[:, 1:], chance[0] < 0.67, (chance[1] < 0.1).cumsum(1)


def plain_terms(model, teacher, idx, targets, keep, doc):
    """Cross-entropy and KL(teacher || model), means over the kept tokens, by torch's functions on all logits."""
    q = Apertus.forward(model, idx, doc=doc)[0].log_softmax(-1)[keep]
    with torch.no_grad():
        p = teacher(idx, doc=doc)[0][..., :q.shape[-1]].log_softmax(-1)[keep]
    return F.nll_loss(q, targets[keep]), F.kl_div(q, p, reduction="batchmean", log_target=True)


@pytest.mark.parametrize("share, rows", [(0.0, 97), (0.3, 101), (1.0, 97)])
def test_loss_and_gradients_are_those_of_the_full_logits_in_fp64(share, rows, monkeypatch):
    """A head padded to 101 rows is asked about 97 ids, in chunks that do not divide."""
    monkeypatch.setattr(loss_file, "chunk_rows", lambda *how: 17)
    teacher = small(n_embd=96, vocab_size=rows).double()
    model = taught(small().double(), teacher, share)
    ce, kl = plain_terms(model, teacher, *batch())
    want = torch.autograd.grad(3 * ((1 - share) * ce + share * kl), model.parameters())
    terms, loss = model(*batch(), n_tokens=batch()[2].sum())
    (3 * loss).backward()
    torch.testing.assert_close(terms, dict(loss=ce.detach(), kl=kl.detach()), rtol=1e-12, atol=0)
    torch.testing.assert_close([p.grad for p in model.parameters()], list(want), rtol=1e-9, atol=1e-12)


def test_a_teacher_of_the_same_weights_has_nothing_to_teach():
    """KL and its gradient are 0 to the bit."""
    model = taught(small(), small(), 1.0)
    terms, loss = model(*batch(), n_tokens=9)
    loss.backward()
    assert terms["loss"] > 1 and terms["kl"] == loss == 0
    assert not any(p.grad.any() for p in model.parameters())


# -----------------------------------------------------------------------------
# runs

RUN = """--block_size=64 --n_head=4 --n_kv_head=2 --dtype=float32 --compile=False --batch_size=8 --micro_batch=4
    --total_samples=64 --warmup_samples=8 --decay_samples=16 --lr=1e-2 --lr_floor=1e-4 --goldfish_k=3 --goldfish_h=5
    --goldfish_scope=stream --grad_clip=1.0 --sample_every=0 --eval_every=4 --eval_windows=8 --last_eval_windows=8
    --checkpoint_every=2 --keep_checkpoints=0""".split()


@pytest.fixture(scope="module")
def lab(data):
    """A teacher, as a run and as a Hugging Face folder, and its student, next to the data."""
    root = data.parent
    shape = ["--n_layer=2", "--n_embd=48", "--ffn_dim=64"]
    made = [script("train.py", f"--data={data}", f"--out={root / 'teacher'}", *RUN, *shape),
            script("convert.py", f"--load={root / 'teacher'}", f"--save={root / 'hf'}"),
            learn(root, root / "taught")]
    assert [done.returncode for done in made] == [0, 0, 0], made
    return root


def arguments(root, out, *args, teacher="hf"):
    return [f"--data={root / 'own'}", f"--out={out}", *RUN, "--n_layer=1", "--n_embd=32", "--ffn_dim=48",
            f"--teacher={root / teacher}", *args]


def learn(root, out, *args, **how):
    return script("train.py", *arguments(root, out, *args, **how))


def steps(out):
    return [[entry[key] for key in ("loss", "kl", "grad_norm")] for entry in read_log(str(out)) if "kl" in entry]


def test_the_first_step_is_that_of_the_formula_and_kl_falls(lab):
    found = steps(lab / "taught")
    model = Apertus(convert.load_run(str(lab / "taught"))[0].config, 28).double()
    teacher, _ = convert.load_any(str(lab / "hf"), "cpu", torch.float64)
    first = TokenDataset(str(lab / "own"), "train", 64, 28, 3, 5, "product", "stream").batch(0, 8)
    ce, kl = plain_terms(model, teacher, *first)
    (0.1 * ce + 0.9 * kl).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert found[0] == pytest.approx([ce.item(), kl.item(), norm.item()], rel=1e-5)
    assert found[-1][1] < found[0][1]


def test_a_killed_run_ends_in_the_same_bits_and_another_teacher_is_an_error(lab, tmp_path):
    shutil.copytree(lab / "taught", tmp_path / "run", ignore=shutil.ignore_patterns("summary.json", "step-*[68]"))
    refused(learn(lab, tmp_path / "run", "--resume", teacher="taught"), "teacher_hash")
    done = learn(lab, tmp_path / "run", "--resume", teacher="teacher")
    assert "resumed from" in done.stdout, done.stderr
    assert same(weights(tmp_path / "run"), weights(lab / "taught"))
    assert steps(tmp_path / "run") == steps(lab / "taught")


def test_halves_of_windows_on_two_ranks_are_taught_as_one_process(launch, lab, tmp_path):
    args = arguments(lab, tmp_path / "run", "--parallel=fsdp", "--sequence_parallel=2")
    codes, text = launch(2, *args, logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    for one, two in zip(steps(lab / "taught"), steps(tmp_path / "run"), strict=True):
        assert two == pytest.approx(one, abs=2e-5)


def test_the_teacher_sees_the_documents_as_its_student_does(lab, tmp_path):
    """The student chooses the mask: a teacher with its own initial weights, made with a mask, agrees without."""
    frozen = ["--lr=0.0", "--lr_floor=0.0", "--total_samples=24"]
    learn(lab, tmp_path / "twin", *frozen, "--distill=0", "--doc_mask=True")
    learn(lab, tmp_path / "run", *frozen, "--doc_mask=False", teacher=tmp_path / "twin")
    assert [kl for _, kl, _ in steps(tmp_path / "run")] == [0, 0, 0]


def test_a_teacher_that_does_not_fit_is_an_error_before_anything_is_written(lab, tmp_path):
    """The last one has another name for one id."""
    shutil.copytree(lab / "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|user_end|>", "<|other|>"))
    for flag, says in (("--distill=1.1", "between 0 and 1"), ("--block_size=128", "windows of 64 tokens"),
                       (f"--teacher={tmp_path / 'hf'}", "another vocabulary")):
        refused(learn(lab, tmp_path / "run", flag), says)
    assert not os.path.exists(tmp_path / "run")
