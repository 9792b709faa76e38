"""
Whole steps of train.py against the same steps written plainly in fp64: one batch without accumulation, the loss from
the logits, clipping and the optimizer by the formulas of the papers (AdEMAMix 2409.03137, AdamW 1711.05101, Goldfish
2406.10209, Apertus 2509.14233). The model and the masks, which other tests hold, are called as they are.
"""
import json
import math

import pytest
import torch.nn.functional as F

import convert
from conftest import script
from data import TokenDataset
from engine import restore
from model import Apertus, ApertusConfig

T, BATCH, SAMPLES, SEED = 32, 8, 48, 5
# SwiGLU: the slope of the published xIELU jumps just left of 0, where fp32 and fp64 may fall on different sides.
COMMON = f"""configs/tiny.py --activation=swiglu --n_layer=1 --n_embd=32 --ffn_dim=64 --n_head=2 --n_kv_head=1
    --block_size={T} --seed={SEED} --dtype=float32 --batch_size={BATCH} --total_samples={SAMPLES} --warmup_samples=16
    --decay_samples=16 --lr=1e-2 --lr_floor=1e-3 --betas=(0.8,0.95,0.99) --alpha=3.0 --eps=1e-4 --weight_decay=0.5
    --goldfish_k=3 --goldfish_h=5 --eval_every=2 --eval_windows=7 --last_eval_windows=11 --checkpoint_every=2
    --keep_checkpoints=0""".split()


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


def learning_rate(s):
    """1e-2 by WSD with 16 samples of warm-up, 16 of decay to 1e-3, of 48 in all."""
    return 1e-2 * s / 16 if s < 16 else 1e-2 - 9e-3 * math.sqrt(max(0, s - 32) / 16)


def beta3_at(t, warmup):
    """Linear in the half-life from 0.8's to 0.99's (AdEMAMix, appendix A; 1e-8 as published)."""
    first, last = (math.log(0.5) / math.log(b + 1e-8) for b in (0.8, 0.99))
    return 0.5 ** (1 / (first + t / warmup * (last - first))) if t < warmup else 0.99


def plain_steps(model, windows, clip, adamw=False, warmups=(6, 6), micro=0, ramp=10**9):
    """Train a model in fp64, step by step; yields (loss, norm, share kept, learning rate, tokens) of each."""
    states, s, t = {}, 0, 0
    while s < SAMPLES:
        n, t = BATCH * (2 if s >= ramp else 1), t + 1
        idx, targets, keep, doc = windows.batch(s, n)
        logits = model(idx, doc=doc)[0]
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        means = [(part * kept).sum() / kept.sum() for part, kept in zip(nll.split(micro or n), keep.split(micro or n))]
        loss = sum(means) / len(means)
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
        lr = learning_rate(s)
        alpha, b3 = 3 * min(t / warmups[0], 1), beta3_at(t, warmups[1])
        for p in model.parameters():
            g = p.grad * (min(1, clip / norm) if clip else 1)
            m1, m2, v = states.get(p, (0, 0, 0))
            m1, m2, v = 0.8 * m1 + 0.2 * g, b3 * m2 + (1 - b3) * g, 0.95 * v + 0.05 * g * g
            states[p] = m1, m2, v
            direction = m1 / (1 - 0.8**t) + (0 if adamw else alpha * m2)
            update = direction / ((v / (1 - 0.95**t)).sqrt() + 1e-4)
            p.data -= lr * (update + (0.5 * p.data if p.ndim > 1 else 0))
        s += n
        yield loss.item(), norm, keep.float().mean().item(), lr, s * T


# The ranks (0: without a launcher) and flags of each run, and what they mean to the plain steps. The norms lie between
# 0.5 and 3: 0.1 clips each step, 100 none.
RUNS = [
    (0, "--micro_batch=8 --grad_clip=100.0 --alpha_warmup=3 --beta3_warmup=9", dict(clip=100, warmups=(3, 9))),
    (0, "--micro_batch=4 --grad_clip=0.0 --batch_ramp_at=10", dict(clip=0, ramp=10, warmups=(4, 4))),
    (0, "--micro_batch=2 --grad_clip=0.1 --loss_average=micro", dict(clip=0.1, micro=2)),
    (4, "--micro_batch=2 --grad_clip=0.1 --parallel=ddp --sequence_parallel=2 --n_kv_head=2", dict(clip=0.1)),
    (2, "--micro_batch=1 --grad_clip=0.1 --parallel=fsdp --batch_ramp_at=10", dict(clip=0.1, ramp=10, warmups=(4, 4))),
    (2, "--micro_batch=2 --grad_clip=0.1 --parallel=ddp --optimizer=adamw", dict(clip=0.1, adamw=True)),
]


@pytest.mark.parametrize("ranks, flags, meaning", RUNS, ids=lambda x: x if isinstance(x, str) else "")
def test_steps_and_validation_are_those_of_the_formulas(launch, data, tmp_path, ranks, flags, meaning):
    """
    Loss, norm, share kept, learning rate and tokens of every step, and where the weights went: fp32 against fp64.

    Validation is over 7 windows on the way and 11 at the end, each once, every predictable token, without Goldfish.
    """
    out = tmp_path / "run"
    codes, text = launch(ranks, *COMMON, *flags.split(), f"--data={data}", f"--out={out}", logs=f"{out}.log")
    assert set(codes) == {0}, text[-3000:]
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    found = [(e["loss"], e["grad_norm"], e["kept"], e["lr"], e["tokens"]) for e in log if "loss" in e]
    config = ApertusConfig.of(json.loads((out / "config.json").read_text()))
    model, begin = Apertus(config, SEED).double(), Apertus(config, SEED)
    wanted = list(plain_steps(model, TokenDataset(data, "train", T, SEED, 3, 5, "product", "stream"), **meaning))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert one == pytest.approx(other, rel=2e-4)
    ended = dict(convert.load_run(str(out))[0].named_parameters())
    for (name, p), first in zip(model.named_parameters(), begin.parameters()):
        want, got = p.detach() - first, ended[name].detach() - first
        assert (got - want).norm() < 1e-3 * want.norm(), name

    val = TokenDataset(data, "val", T, SEED, goldfish_k=0)
    idx, targets, _, doc = val.batch(0, 11)
    said = [entry for entry in log if "val_loss" in entry]
    assert len(said) == (len(wanted) + 1) // 2
    for entry, windows in zip(said, [7] * (len(said) - 1) + [11]):
        restore.load(str(out / "ckpt" / f"step-{entry['step'] + 1:08d}"), begin.float())
        logits = begin.double()(idx, doc=doc)[0]
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        predictable = idx[:windows] != val.meta["eos"]
        assert entry["val_loss"] == pytest.approx(nll[:windows][predictable].mean().item(), rel=1e-5)
        assert entry["val_bpb"] == pytest.approx(val.bits_per_byte(entry["val_loss"]))


def test_the_data_would_show_a_wrong_step(data):
    """Several documents in a window, Goldfish that drops, kept tokens that differ between micro-batches."""
    idx, _, keep, doc = TokenDataset(data, "train", T, SEED, 3, 5, "product", "stream").batch(0, SAMPLES)
    assert (doc[:, -1] > doc[:, 0]).float().mean() > 0.5
    assert 0.05 < 1 - keep[idx != 256].float().mean() < 0.6
    assert len(set(keep.view(-1, 2 * T).sum(1).tolist())) > 5
