"""
engine/distill.py and train.py --teacher: the loss and its gradient against torch's own kl_div and cross_entropy on all
logits in fp64, whole runs against those formulas, against the run that was never stopped, and on two ranks against one.
"""
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import convert
import model as model_file
from conftest import ROOT, refused, same, script, weights
from data import TokenDataset
from engine import plot
from engine.distill import Teacher
from model import Apertus, ApertusConfig

SMALL = dict(block_size=64, vocab_size=97, n_head=6, n_kv_head=2, init_std=0.1)


def student():
    return Apertus(ApertusConfig(**SMALL, n_layer=2, n_embd=48, ffn_dim=80), seed=1)


def wider(**changes):
    """A model to learn from: another width and depth."""
    return Apertus(ApertusConfig(**{**SMALL, **changes}, n_layer=3, n_embd=96, ffn_dim=120), seed=2)


def batch(n=0, B=3, T=40):
    """Batch n: idx, targets, keep, doc. Some targets have no label, and Goldfish-like holes take a third."""
    g = torch.Generator().manual_seed(n)
    stream = torch.randint(0, 97, (B, T + 1), generator=g)
    targets = stream[:, 1:].clone()
    targets[torch.rand(B, T, generator=g) < 0.1] = -1
    keep = torch.rand(B, T, generator=g) < 0.67
    doc = (torch.rand(B, T, generator=g) < 0.1).cumsum(1)
    return stream[:, :-1], targets, keep, doc


def plain_terms(model, teacher, idx, targets, keep, doc):
    """Cross-entropy and KL(teacher || model), means over the kept tokens, by torch's functions on all logits."""
    kept = keep & (targets >= 0)
    q = model(idx, doc=doc)[0].log_softmax(-1)[kept]
    with torch.no_grad():
        p = teacher(idx, doc=doc)[0][..., :q.shape[-1]].log_softmax(-1)[kept]
    return F.nll_loss(q, targets[kept]), F.kl_div(q, p, reduction="batchmean", log_target=True)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# -----------------------------------------------------------------------------
# the loss


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("ids", [97, 101])
def test_loss_and_gradients_are_those_of_the_full_logits_in_fp64(share, ids, monkeypatch):
    """A teacher whose head is padded to 101 rows is asked about the 97 ids that there are."""
    monkeypatch.setattr(model_file, "chunk_rows", lambda *_: 17)          # chunks that do not divide
    model, teacher = student().double(), wider(vocab_size=ids).double()
    ce, kl = plain_terms(model, teacher, *batch())
    incoming = 3                                           # a gradient of the loss that is not 1
    (incoming * ((1 - share) * ce + share * kl)).backward()
    want = gradients(model)
    model.zero_grad()
    terms, loss = model(*batch(), teacher=Teacher(teacher, share, 97, compiled=False))
    (incoming * loss).backward()
    torch.testing.assert_close(terms, torch.stack((ce, kl)).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, (1 - share) * ce + share * kl, rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in teacher.parameters())


def test_micro_batches_add_up_by_the_tokens_of_the_step():
    model, teacher = student().double(), Teacher(wider().double(), 0.9, 97, compiled=False)
    whole, loss = model(*batch(), teacher=teacher)
    n = (batch()[2] & (batch()[1] >= 0)).sum()
    rows = zip(*(t.split(1) for t in batch()))
    parts = [model(*row, n_tokens=n, teacher=teacher) for row in rows]
    torch.testing.assert_close(sum(part for part, _ in parts), whole)
    torch.testing.assert_close(sum(part for _, part in parts), loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_who_knows_what_the_teacher_knows_has_nothing_to_learn(dtype):
    """The same weights: KL is 0 and so is its gradient, to the bit."""
    model = student().to(dtype)
    terms, loss = model(*batch(), teacher=Teacher(student().to(dtype), 1.0, 97, compiled=False))
    loss.backward()
    assert terms[0] > 1 and terms[1] == loss == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_terms_are_in_fp32_where_activations_are_in_bf16():
    """Logits have 8 bits; log Z, KL and the means have fp32's 24."""
    model, teacher = student(), wider().bfloat16()
    model.dtype = torch.bfloat16
    idx, targets, keep, doc = batch()
    kept = keep & (targets >= 0)
    h, known = model.hidden(idx, doc).detach()[kept], teacher.hidden(idx, doc).detach()[kept]
    q = (h @ model.lm_head.weight.bfloat16().T).double().log_softmax(-1)
    p = (known @ teacher.lm_head.weight.T).double().log_softmax(-1)
    want = torch.stack((F.nll_loss(q, targets[kept]), F.kl_div(q, p, reduction="batchmean", log_target=True)))
    terms, _ = model(idx, targets, keep, doc, teacher=Teacher(teacher, 0.9, 97, compiled=False))
    torch.testing.assert_close(terms.double(), want, rtol=1e-5, atol=1e-6)


# The most MiB that a step of 4,096 tokens at V = 16,384 takes beyond what one of 64 tokens has taken.
STEP = """
import resource, sys, torch
sys.path.insert(0, sys.argv[1])
from engine.distill import Teacher
from model import Apertus, ApertusConfig
shape = dict(block_size=4096, vocab_size=16384, n_layer=1, n_head=1, n_kv_head=1, ffn_dim=64)
m = Apertus(ApertusConfig(**shape, n_embd=32))
teacher = Teacher(Apertus(ApertusConfig(**shape, n_embd=64)), 0.9, 16384, compiled=False)
idx = torch.arange(4096)[None]
m(idx[:, :64], idx[:, :64], teacher=teacher)[1].backward()
m.zero_grad()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
m(idx, idx, teacher=teacher)[1].backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_neither_tensor_of_logits_ever_exists():
    """In fp32 each would be 256 MiB. Of 256 rows they are 16, and three such tensors live at once."""
    command = [sys.executable, "-c", STEP, ROOT]
    mib = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(mib) < 224


def test_two_widths_are_compiled_each_for_itself_and_only_once(monkeypatch):
    """Student and teacher run the same code: no graph for any width, and none more after the first step."""
    sizes = []

    def backend(graph, inputs):
        for node in graph.graph.find_nodes(op="placeholder"):
            value = node.meta["example_value"]
            sizes.extend(value.shape if isinstance(value, torch.Tensor) else [value])
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile(f, backend=backend, **how))
    torch._dynamo.reset()
    counters.clear()
    model, plain = student(), student()
    model.compile_blocks()
    teacher = Teacher(wider(), 0.9, 97, compiled=True)
    seen = []
    for n in range(4):
        model.zero_grad()
        model(*batch(n), teacher=teacher)[1].backward()
        seen.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert len(set(seen)) == 1 and {48, 96} <= set(sizes) and all(type(size) is int for size in sizes)
    plain(*batch(3), teacher=Teacher(wider(), 0.9, 97, compiled=False))[1].backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)


# -----------------------------------------------------------------------------
# runs


STUDENT = ["--block_size=64", "--n_layer=1", "--n_head=2", "--n_kv_head=2", "--n_embd=16", "--ffn_dim=32"]
RUN = ["--total_samples=64", "--warmup_samples=8", "--decay_samples=16", "--batch_size=8", "--micro_batch=4",
       "--lr=1e-3", "--lr_floor=1e-4", "--dtype=float32", "--sample_every=0", "--eval_every=4", "--eval_windows=8",
       "--last_eval_windows=8", "--checkpoint_every=2", "--keep_checkpoints=9", "--compile=False", "--goldfish_k=3",
       "--goldfish_h=5", "--goldfish_scope=stream", "--init_std=0.1", "--grad_clip=100.0"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Data of short documents, a teacher that train.py has made of them, and the same model as a Hugging Face folder."""
    root = tmp_path_factory.mktemp("distill")
    rng = random.Random(0)
    words = "one two three four five six seven eight nine ten".split()
    # Of 10 to 50 bytes, so that a window of 64 holds several.
    paragraphs = [" ".join(rng.choices(words, k=rng.randrange(3, 10))) for _ in range(600)]
    (root / "texts.jsonl").write_text("\n".join(json.dumps(dict(text=text)) for text in paragraphs), encoding="utf-8")
    prepare = [root / "texts.jsonl", f"--out={root / 'data'}", "--tokenizer=byte", "--val_share=0.2"]
    assert script("prepare.py", *prepare).returncode == 0
    shape = ["--block_size=64", "--n_layer=2", "--n_head=4", "--n_kv_head=2", "--n_embd=32", "--ffn_dim=64"]
    done = script("train.py", f"--data={root / 'data'}", f"--out={root / 'teacher'}", *shape, *RUN)
    assert done.returncode == 0, done.stderr
    assert script("convert.py", f"--load={root / 'teacher'}", f"--save={root / 'hf'}").returncode == 0
    return root


def train(lab, out, *args):
    return script("train.py", f"--data={lab / 'data'}", f"--out={out}", *STUDENT, *RUN, *args)


def learn(lab, out, *args, teacher="teacher"):
    return train(lab, out, f"--teacher={lab / teacher}", *args)


@pytest.fixture(scope="module")
def taught(lab):
    done = learn(lab, lab / "taught")
    assert done.returncode == 0, done.stderr
    return lab / "taught"


def steps(out, *keys):
    return [[entry[key] for key in keys] for entry in plot.read_log(str(out)) if "loss" in entry]


def validation(out):
    return [entry["val_loss"] for entry in plot.read_log(str(out)) if "val_loss" in entry]


def test_the_first_step_is_that_of_the_formula(lab, taught):
    """Both terms over the labels that Goldfish has left, and the norm of the gradient, of two micro-batches."""
    shape = ApertusConfig.of(json.loads((taught / "config.json").read_text()))
    model = Apertus(shape, 28).double()
    teacher = convert.load_any(str(lab / "teacher"), "cpu", torch.float64)[0]
    first = TokenDataset(str(lab / "data"), "train", 64, 28, 3, 5, "product", "stream").batch(0, 8)
    assert not first[2].all()
    ce, kl = plain_terms(model, teacher, *first)
    (0.1 * ce + 0.9 * kl).backward()
    norm = torch.nn.utils.get_total_norm(gradients(model).values())
    found = steps(taught, "loss", "kl", "grad_norm")[0]
    assert found == pytest.approx([ce.item(), kl.item(), norm.item()], rel=1e-5)


def test_it_learns_from_the_teacher_and_validation_stays_cross_entropy(lab, taught):
    kl = [entry for entry, in steps(taught, "kl")]
    assert kl[-1] < kl[0]
    model = convert.load_run(str(taught))[0]
    idx, targets, keep, doc = TokenDataset(str(lab / "data"), "val", 64, 28).batch(0, 8)
    with torch.no_grad():
        _, nll = model(idx, targets, keep, doc, per_token=True)
    assert validation(taught)[-1] == pytest.approx(((nll * keep).sum() / keep.sum()).item(), rel=1e-6)


def test_a_share_of_0_is_the_run_without_a_teacher(lab, tmp_path):
    assert train(lab, tmp_path / "alone").returncode == 0
    done = learn(lab, tmp_path / "none", "--distill=0")
    assert done.returncode == 0, done.stderr
    assert same(weights(tmp_path / "alone"), weights(tmp_path / "none"))
    keys = "loss", "grad_norm", "kept", "lr"
    assert steps(tmp_path / "alone", *keys) == steps(tmp_path / "none", *keys)


def test_a_hugging_face_folder_teaches_the_same(lab, taught, tmp_path):
    assert learn(lab, tmp_path / "run", teacher="hf").returncode == 0
    assert same(weights(tmp_path / "run"), weights(taught))


def cut(taught, run):
    """The taught run as it was when it was stopped after step 4."""
    shutil.copytree(taught, run)
    os.remove(run / "summary.json")
    for step in ("step-00000006", "step-00000008"):
        shutil.rmtree(run / "ckpt" / step)


def test_stopped_and_resumed_it_ends_in_the_same_bits(lab, taught, tmp_path):
    cut(taught, tmp_path / "run")
    done = learn(lab, tmp_path / "run", "--resume", teacher="hf")
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr
    assert same(weights(tmp_path / "run"), weights(taught))
    assert steps(tmp_path / "run", "loss", "kl") == steps(taught, "loss", "kl")
    assert validation(tmp_path / "run") == validation(taught)


def test_another_teacher_or_share_is_refused_and_another_dtype_is_not(lab, taught, tmp_path):
    """Nothing of the run is lost: the same command with its own teacher then goes on."""
    run = tmp_path / "run"
    cut(taught, run)
    refused(learn(lab, run, "--resume", teacher="taught"), "teacher_hash")
    refused(train(lab, run, "--resume"), "teacher_hash")
    refused(learn(lab, run, "--resume", "--distill=0.5"), "distill 0.9 -> 0.5")
    done = learn(lab, run, "--resume", "--dtype=bfloat16")
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr


@pytest.mark.parametrize("parallel", [["--parallel=ddp"], ["--parallel=fsdp", "--sequence_parallel=2"]])
def test_two_processes_learn_as_one(launch, lab, taught, tmp_path, parallel):
    """The second time by halves of each window, the teacher's as well."""
    args = [f"--data={lab / 'data'}", f"--teacher={lab / 'hf'}", f"--out={tmp_path / 'run'}", *STUDENT, *RUN]
    codes, text = launch(2, *args, *parallel, script="train", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    for one, two in zip(steps(taught, "loss", "kl"), steps(tmp_path / "run", "loss", "kl")):
        assert two == pytest.approx(one, abs=2e-5)
    assert validation(tmp_path / "run") == pytest.approx(validation(taught), abs=2e-5)


def test_the_teacher_sees_the_documents_as_its_student_does(lab, tmp_path):
    """Masked or not is the student's choice: a teacher with its student's weights then knows the same."""
    frozen = ["--lr=0.0", "--lr_floor=0.0", "--total_samples=16", "--warmup_samples=0", "--decay_samples=0"]
    assert train(lab, tmp_path / "twin", *frozen).returncode == 0
    for mask in (True, False):
        done = learn(lab, tmp_path / str(mask), *frozen, f"--doc_mask={mask}", teacher=tmp_path / "twin")
        assert done.returncode == 0, done.stderr
        assert steps(tmp_path / str(mask), "kl") == [[0.0], [0.0]]


def test_a_teacher_with_other_ids_is_refused_by_the_first_of_them(lab, tmp_path):
    """The same number of ids is not enough: here two of them have changed places."""
    shutil.copytree(lab / "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer.json"
    saved = json.loads(path.read_text())
    vocab = saved["model"]["vocab"]
    ids = {i: piece for piece, i in vocab.items()}
    vocab[ids[100]], vocab[ids[101]] = 101, 100
    path.write_text(json.dumps(saved))
    refused(learn(lab, tmp_path / "run", teacher=tmp_path / "hf"), "id 100", "another vocabulary", str(tmp_path / "hf"))
    assert not os.path.exists(tmp_path / "run")


@pytest.mark.parametrize("flags, says", [
    (["--teacher=TEACHER", "--distill=1.1"], "between 0 and 1"),
    (["--teacher=TEACHER", "--distill=-0.1"], "between 0 and 1"),
    (["--teacher=TEACHER", "--distill=nan"], "distill wants float"),
    (["--distill=0.9"], "--teacher="),
    (["--teacher=TEACHER", "--block_size=128"], "windows of 64 tokens"),
    (["--teacher=nowhere"], "neither a folder here"),
    (["--teacher=DATA"], "has no tokenizer.json"),
])
def test_what_cannot_teach_is_told_in_one_line_before_anything_is_written(lab, tmp_path, flags, says):
    named = [flag.replace("TEACHER", str(lab / "teacher")).replace("DATA", str(lab / "data")) for flag in flags]
    refused(train(lab, tmp_path / "run", *named), says)
    assert not os.path.exists(tmp_path / "run")
