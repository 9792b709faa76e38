"""
Whole steps of train.py, on any number of ranks, against the same steps in fp64 by plain.py: one batch without
accumulation, the loss from all logits. The windows and their masks, which have their own tests, are those of data.py.
"""

import re

import pytest
import torch
from conftest import script
from oracle import Plain
from trained import RUN, SIX_STEPS, data, log  # noqa: F401

import convert
import loop
import plain
from data import TokenDataset
from engine import restore
from model import Apertus

T, BATCH, SAMPLES, SEED = 32, 8, 48, 5
VALIDATED = "--eval_every=2 --eval_windows=7 --checkpoint_every=2".split()


def train(oracle, windows, clip, adamw=False, warmup=6, micro=0, ramp=10**9):
    """Train, and yield (loss, norm, share kept, learning rate, tokens) of each step of SIX_STEPS."""
    s = t = 0
    while s < SAMPLES:
        n = BATCH if s < ramp else 2 * BATCH
        t += 1
        batch = windows.batch(s, n)
        parts = zip(*(tensor.split(micro or n) for tensor in batch))
        loss = torch.stack([oracle.loss(part) for part in parts]).mean()
        loss.backward()
        lr = plain.wsd(s, peak=1e-2, min_lr=1e-3, warmup=16, total=48, decay=16)
        norm = oracle.update(t, warmup, lr, clip, 1e-8, 0.5, adamw, (0.8, 0.95, 0.99), 3.0)
        s += n
        yield loss.item(), norm, batch.keep.float().mean().item(), lr, s * T


# Ranks and flags of each run, and the same settings for the plain steps. Gradient norms are between 0.5 and 3, so that
# 0.1 clips every step. A single rank: test_pairs.py.
RUNS = [
    (
        4,
        "--micro_batch=2 --grad_clip=0.1 --parallel=ddp --sequence_parallel=2 --n_kv_head=2 --loss_average=micro",
        dict(clip=0.1, micro=2),
    ),
    (2, "--micro_batch=1 --grad_clip=0.1 --parallel=fsdp --batch_ramp_at=10", dict(clip=0.1, ramp=10, warmup=4)),
    (2, "--micro_batch=2 --grad_clip=0.1 --parallel=ddp --optimizer=adamw", dict(clip=0.1, adamw=True)),
]


@pytest.mark.parametrize("ranks, flags, meaning", RUNS)
def test_steps_and_validation_are_those_of_the_formulas(launch, data, tmp_path, ranks, flags, meaning):
    """
    Loss, norm, share kept, learning rate and tokens of every step, and the final weights: fp32 against fp64.

    Validation reads 7 windows, and 11 at the end, each once: every predictable token, without Goldfish.
    """
    out = tmp_path / "run"
    how = *RUN, *SIX_STEPS, *VALIDATED, f"--seed={SEED}", "--activation=xielu"
    args = *how, *flags.split(), f"--data={data}", f"--out={out}"
    codes, text = launch(ranks, *args, logs=f"{out}.log")
    assert set(codes) == {0}, text[-3000:]
    model = convert.load_any(str(out))[0]
    oracle = Plain(model=Apertus(model.config, SEED))
    windows = TokenDataset(data, "train", T, SEED, 3, 5, "product", "stream")
    for entry, want in zip(log(out, "loss"), train(oracle, windows, **meaning), strict=True):
        found = [entry[name] for name in ("loss", "grad_norm", "kept", "lr", "tokens")]
        assert found == pytest.approx(want, rel=2e-4)
    assert oracle.distance(model) < 1e-3

    val = TokenDataset(data, "val", T, SEED, goldfish_k=0)
    said = log(out, "val_loss")
    assert len(said) == (entry["step"] + 2) // 2
    windows = [7] * (len(said) - 1) + [11]
    for entry, n in zip(said, windows):
        restore.load_checkpoint(f"{out}/ckpt/step-{entry['step'] + 1:08d}", model)
        idx, targets, _, doc = val.batch(0, n)
        loss = Plain(model=model).loss((idx, targets, idx != val.meta["eos"], doc)).item()
        found = entry["val_loss"], entry["val_bpb"]
        assert found == pytest.approx((loss, val.bits_per_byte(loss)), rel=1e-5)


def test_the_loop_on_one_page_has_the_losses_and_norms_of_train(data, tmp_path, capsys):
    assert script("train.py", "configs/tiny.py", f"--data={data}", f"--out={tmp_path}").returncode == 0
    loop.main(data)
    printed = re.findall(r"step +(\d+) +loss ([\d.]+) +gradient norm ([\d.]+)", capsys.readouterr().out)
    steps = [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in log(tmp_path, "loss")]
    assert len(steps) == 20
    assert [tuple(map(float, row)) for row in printed] == [pytest.approx(step, rel=5e-4) for step in steps]
