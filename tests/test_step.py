"""
Whole steps of train.py against the same steps written plainly in fp64: one batch without accumulation, the loss from
the logits, clipping and the optimizer by their definitions. Authority: the formulas of the papers (AdEMAMix 2409.03137,
AdamW 1711.05101, Goldfish 2406.10209) and of Apertus' report; the model and the masks, which other tests hold, are
called as they are.
"""
import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F

from engine import checkpoint
import convert
from conftest import script
from data import TokenDataset
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig

T, BATCH, SAMPLES, SEED = 32, 8, 48, 5
# SwiGLU: the slope of the published xIELU jumps just left of 0, where fp32 and fp64 may fall on different sides.
MODEL = ["--activation=swiglu", "--n_layer=1", "--n_embd=32", "--ffn_dim=64", "--n_head=2", "--n_kv_head=1",
         f"--block_size={T}", f"--seed={SEED}", "--dtype=float32"]
SCHEDULE = [f"--batch_size={BATCH}", f"--total_samples={SAMPLES}", "--warmup_samples=16", "--decay_samples=16",
            "--lr=1e-2", "--lr_floor=1e-3"]
OPTIMIZER = ["--betas=(0.8,0.95,0.99)", "--alpha=3.0", "--eps=1e-4", "--weight_decay=0.5"]
GOLDFISH = ["--goldfish_k=3", "--goldfish_h=5"]
ON_THE_WAY = ["--eval_every=2", "--eval_windows=7", "--last_eval_windows=11", "--checkpoint_every=2",
              "--keep_checkpoints=0"]
COMMON = ["configs/tiny.py", *MODEL, *SCHEDULE, *OPTIMIZER, *GOLDFISH, *ON_THE_WAY]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of 5 to 60 bytes, so that most windows of 32 hold several."""
    root = tmp_path_factory.mktemp("step")
    lines = [f"Line {i} tells of " + " ".join(str(i * j % 97) for j in range(i * 7 % 23)) for i in range(400)]
    rows = [json.dumps(dict(text=line[:5 + i * 13 % 56])) for i, line in enumerate(lines)]
    (root / "lines.jsonl").write_text("\n".join(rows), encoding="utf-8")
    done = script("prepare.py", root / "lines.jsonl", "--tokenizer=byte", "--val_share=0.2", f"--out={root / 'data'}")
    assert done.returncode == 0, done.stderr
    return str(root / "data")


@pytest.fixture(scope="module")
def trained(launch, data, tmp_path_factory):
    """trained(2, "--flag"): the folder of a run on so many ranks (0: without a launcher), each command run once."""
    root, known = tmp_path_factory.mktemp("runs"), {}

    def run(ranks, *flags):
        if (ranks, flags) not in known:
            out = root / str(len(known))
            codes, text = launch(ranks, *COMMON, *flags, f"--data={data}", f"--out={out}", logs=f"{out}.log")
            assert set(codes) == {0}, text[-3000:]
            known[ranks, flags] = out
        return known[ranks, flags]
    return run


def entries(out, key):
    with open(out / "log.jsonl", encoding="utf-8") as f:
        return [entry for entry in map(json.loads, f) if key in entry]


def learning_rate(s):
    """1e-2 by WSD with 16 samples of warm-up, 16 of decay to 1e-3, of 48 in all."""
    if s < 16:
        return 1e-2 * s / 16
    return 1e-2 - 9e-3 * math.sqrt(max(0, s - 32) / 16)


def beta3_at(t, b1, b3, warmup):
    """Linear in the half-life from b1's to b3's (AdEMAMix, appendix A; 1e-8 as published)."""
    half_lives = [math.log(0.5) / math.log(b + 1e-8) for b in (b1, b3)]
    at = half_lives[0] + min(t / warmup, 1) * (half_lives[1] - half_lives[0])
    return 0.5 ** (1 / at) if t < warmup else b3


def plain_steps(data, out, clip=0.1, adamw=False, warmups=(6, 6), micro=0, ramp=10**9):
    """The steps of a run in fp64, by their definitions: (model, [(loss, norm, kept, lr, tokens) of each step])."""
    with open(out / "config.json", encoding="utf-8") as f:
        config = json.load(f)
    model = Apertus(ApertusConfig(**{f.name: config[f.name] for f in dataclasses.fields(ApertusConfig)}), SEED).double()
    windows = TokenDataset(data, "train", T, SEED, 3, 5, "product", "stream")
    states, said, s, t = {}, [], 0, 0
    b1, b2, b3 = 0.8, 0.95, 0.99
    while s < SAMPLES:
        n, t = BATCH * (2 if s >= ramp else 1), t + 1
        idx, targets, keep, doc = windows.batch(s, n)
        logits = model(idx, doc=doc)[0]
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        groups = zip(nll.split(micro or n), keep.split(micro or n))
        means = [(losses * kept).sum() / kept.sum() for losses, kept in groups]
        loss = sum(means) / len(means)
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
        lr = learning_rate(s)
        said.append((loss.item(), norm, keep.float().mean().item(), lr, (s + n) * T))
        alpha, slow = 3 * min(t / warmups[0], 1), beta3_at(t, b1, b3, warmups[1])
        for p in model.parameters():
            g = p.grad * (min(1, clip / norm) if clip else 1)
            m1, m2, v = states.get(p, (0, 0, 0))
            m1, m2, v = b1 * m1 + (1 - b1) * g, slow * m2 + (1 - slow) * g, b2 * v + (1 - b2) * g * g
            states[p] = m1, m2, v
            direction = m1 / (1 - b1**t) + (0 if adamw else alpha * m2)
            update = direction / ((v / (1 - b2**t)).sqrt() + 1e-4)
            p.data -= lr * (update + (0.5 * p.data if p.ndim > 1 else 0))
        s += n
    return model, said


# Runs whose validation is looked at too: with and without warm-ups of their own, and on two ranks.
PLAIN = ["--micro_batch=2", "--grad_clip=0.1"]
WARMED = ["--micro_batch=8", "--grad_clip=100.0", "--alpha_warmup=3", "--beta3_warmup=9"]
TWO_RANKS = ["--micro_batch=2", "--grad_clip=0.1", "--parallel=ddp", "--optimizer=adamw"]

# The ranks and flags of each run, and what they mean to the plain steps. The norms lie between 0.5 and 3: 0.1 clips
# each step, 100 none.
RUNS = [
    (0, PLAIN, dict(clip=0.1)),
    (0, WARMED, dict(clip=100, warmups=(3, 9))),
    (0, ["--micro_batch=4", "--grad_clip=0.0", "--batch_ramp_at=10"], dict(clip=0, ramp=10, warmups=(4, 4))),
    (0, ["--micro_batch=2", "--grad_clip=0.1", "--loss_average=micro"], dict(clip=0.1, micro=2)),
    (0, ["--micro_batch=2", "--grad_clip=0.1", "--optimizer=adamw"], dict(clip=0.1, adamw=True)),
    (0, ["--micro_batch=2", "--grad_clip=100.0", "--optimizer=adamw"], dict(clip=100, adamw=True)),
    (4, ["--micro_batch=2", "--grad_clip=0.1", "--parallel=ddp", "--sequence_parallel=2", "--n_kv_head=2",
         "--loss_average=micro"], dict(clip=0.1, micro=2)),
    (2, ["--micro_batch=1", "--grad_clip=0.1", "--parallel=fsdp", "--batch_ramp_at=10"],
     dict(clip=0.1, ramp=10, warmups=(4, 4))),
    (2, TWO_RANKS, dict(clip=0.1, adamw=True)),
]


@pytest.mark.parametrize("ranks, flags, meaning", RUNS, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_the_steps_are_those_of_the_formulas(data, trained, ranks, flags, meaning):
    """Loss, norm, share kept and learning rate of every step, and where the weights went: fp32 against fp64."""
    out = trained(ranks, *flags)
    model, said = plain_steps(data, out, **meaning)
    found = [(e["loss"], e["grad_norm"], e["kept"], e["lr"], e["tokens"]) for e in entries(out, "loss")]
    assert len(found) == len(said)
    for one, other in zip(found, said):
        assert one == pytest.approx(other, rel=2e-4)
    begin = dict(Apertus(model.config, SEED).named_parameters())
    ended = dict(convert.load_run(str(out))[0].named_parameters())
    for name, p in model.named_parameters():
        want, got = p.detach() - begin[name], ended[name].detach() - begin[name]
        assert (got - want).norm() < 1e-3 * want.norm(), name


@pytest.mark.parametrize("ranks, flags", [(0, PLAIN), (0, WARMED), (2, TWO_RANKS)])
def test_validation_is_the_mean_over_the_windows_asked_for_each_once(data, trained, ranks, flags):
    """
    7 windows on the way and 11 at the end, of batches of 2 and 8 and on two ranks: each once, every predictable token,
    no Goldfish.
    """
    out = trained(ranks, *flags)
    found = entries(out, "val_loss")
    assert [e["step"] for e in found] == [1, 3, 5]
    val, model = TokenDataset(data, "val", T, SEED, goldfish_k=0), convert.load_run(str(out))[0]
    idx, targets, _, doc = val.batch(0, 11)
    for entry, windows in zip(found, (7, 7, 11)):
        checkpoint.load(str(out / "ckpt" / f"step-{entry['step'] + 1:08d}"), model.float())
        logits = model.double()(idx, doc=doc)[0]
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        predictable = idx[:windows] != eos_of(data)
        assert entry["val_loss"] == pytest.approx(nll[:windows][predictable].mean().item(), rel=1e-5)
        assert entry["val_bpb"] == pytest.approx(val.bits_per_byte(entry["val_loss"]))


def eos_of(data):
    with open(f"{data}/meta.json", encoding="utf-8") as f:
        return json.load(f)["eos"]


def test_the_data_exercise_what_the_steps_are_to_show(data):
    """
    Several documents in a window, Goldfish that drops, kept tokens that differ between micro-batches: else a wrong
    step would look right.
    """
    idx, targets, keep, doc = TokenDataset(data, "train", T, SEED, 3, 5, "product", "stream").batch(0, SAMPLES)
    assert (doc[:, -1] > doc[:, 0]).float().mean() > 0.5
    eos = (idx == eos_of(data)).float().mean()
    assert 0.05 < 1 - keep.float().mean() - eos < 0.6
    assert len(set(keep.view(-1, 2 * T).sum(1).tolist())) > 5
    without_context = (idx != eos_of(data)) & goldfish_mask(targets, 3, 5)
    assert not torch.equal(keep, without_context)
