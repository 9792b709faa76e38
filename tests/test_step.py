"""
Whole steps of train.py against the same steps written plainly in fp64 (plain.py): one batch without accumulation, the
loss from the logits, clipping and the optimizer by the formulas of the papers. The model and the masks, which have
their own tests, are the project's (Goldfish, arXiv 2406.10209; Apertus, 2509.14233).
"""

import math

import pytest
import torch
from trained import RUN, SIX_STEPS, data, log  # noqa: F401

import convert
from data import TokenDataset
from engine import restore
from engine.runs import settings_of
from model import Apertus, ApertusConfig
from plain import Plain

T, BATCH, SAMPLES, SEED = 32, 8, 48, 5
VALIDATED = "--eval_every=2 --eval_windows=7 --checkpoint_every=2".split()


def nll(model, idx, targets, doc):
    """The negative log-likelihood of each target, from all logits."""
    logp = model(idx, doc=doc).log_softmax(-1)
    return -logp.gather(-1, targets[..., None])[..., 0]


def learning_rate(s):
    """WSD: 16 samples of warm-up to 1e-2, 16 at the peak, 16 of decay to 1e-3."""
    return 1e-2 * s / 16 if s < 16 else 1e-2 - 9e-3 * math.sqrt(max(0, s - 32) / 16)


def train(plain, windows, clip, adamw=False, warmups=(6, 6), micro=0, ramp=10**9):
    """Train, and yield (loss, norm, share kept, learning rate, tokens) of each step of SIX_STEPS."""
    s = t = 0
    while s < SAMPLES:
        n = BATCH if s < ramp else 2 * BATCH
        t += 1
        idx, targets, keep, doc = windows.batch(s, n)
        parts = zip(nll(plain.model, idx, targets, doc).split(micro or n), keep.split(micro or n))
        loss = torch.stack([part[kept].mean() for part, kept in parts]).mean()
        loss.backward()
        lr = learning_rate(s)
        norm = plain.update(t, warmups[0], lr, clip, 1e-4, 0.5, adamw, (0.8, 0.95, 0.99), 3.0, warmups[1])
        s += n
        yield loss.item(), norm, keep.float().mean().item(), lr, s * T


# Ranks (0: without a launcher) and flags of each run, and the same settings for the plain steps. Gradient norms are
# between 0.5 and 3, so that 0.1 clips every step and 100 none.
RUNS = [
    (0, "--micro_batch=8 --grad_clip=100.0 --alpha_warmup=3 --beta3_warmup=9", dict(clip=100, warmups=(3, 9))),
    (0, "--micro_batch=4 --grad_clip=0.0 --batch_ramp_at=10", dict(clip=0, ramp=10, warmups=(4, 4))),
    (
        4,
        "--micro_batch=2 --grad_clip=0.1 --parallel=ddp --sequence_parallel=2 --n_kv_head=2 --loss_average=micro",
        dict(clip=0.1, micro=2),
    ),
    (2, "--micro_batch=1 --grad_clip=0.1 --parallel=fsdp --batch_ramp_at=10", dict(clip=0.1, ramp=10, warmups=(4, 4))),
    (2, "--micro_batch=2 --grad_clip=0.1 --parallel=ddp --optimizer=adamw", dict(clip=0.1, adamw=True)),
]


@pytest.mark.parametrize("ranks, flags, meaning", RUNS)
def test_steps_and_validation_are_those_of_the_formulas(launch, data, tmp_path, ranks, flags, meaning):
    """
    Loss, norm, share kept, learning rate and tokens of every step, and the final weights: fp32 against fp64.

    Validation reads 7 windows, and 11 at the end, each once: every predictable token, without Goldfish.
    """
    out = tmp_path / "run"
    args = *RUN, *SIX_STEPS, *VALIDATED, f"--seed={SEED}", *flags.split(), f"--data={data}", f"--out={out}"
    codes, text = launch(ranks, *args, logs=f"{out}.log")
    assert set(codes) == {0}, text[-3000:]
    plain = Plain(model=Apertus(ApertusConfig.from_settings(settings_of(out)), SEED).double())
    windows = TokenDataset(data, "train", T, SEED, 3, 5, "product", "stream")
    for entry, want in zip(log(out, "loss"), train(plain, windows, **meaning), strict=True):
        found = [entry[name] for name in ("loss", "grad_norm", "kept", "lr", "tokens")]
        assert found == pytest.approx(want, rel=2e-4)
    assert plain.distance(convert.load_any(str(out))[0]) < 1e-3

    val = TokenDataset(data, "val", T, SEED, goldfish_k=0)
    said = log(out, "val_loss")
    assert len(said) == (entry["step"] + 2) // 2
    windows = [7] * (len(said) - 1) + [11]
    for entry, n in zip(said, windows):
        restore.load(f"{out}/ckpt/step-{entry['step'] + 1:08d}", plain.model.float())
        idx, targets, _, doc = val.batch(0, n)
        loss = nll(plain.model, idx, targets, doc)[idx != val.meta["eos"]].mean().item()
        found = entry["val_loss"], entry["val_bpb"]
        assert found == pytest.approx((loss, val.bits_per_byte(loss)), rel=1e-5)
