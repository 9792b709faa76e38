"""
A training run on one page: the files that train.py uses, called in the order of a step. One device, one batch a step,
no checkpoints, no signals. Read it after plain.py, whose method runs here in fast code, and before train.py, which adds
micro-batches, ranks, validation, and a run folder that survives a kill.

$ python prepare.py       # once: Python's standard library as tokens, data/stdlib
$ python loop.py          # the 20 steps of `python train.py configs/tiny.py`, with the same losses
"""

import sys

import torch

from ademamix import AdEMAMix, clip_scale, param_groups
from data import TokenDataset
from model import Apertus, ApertusConfig
from schedule import Plan


def main(folder="data/stdlib"):
    # The order of windows is a function of the seed. Goldfish drops about one target in 50, by a hash of it and the 12
    # tokens before it.
    goldfish = dict(goldfish_k=50, goldfish_h=13, goldfish_hash="product", goldfish_scope="stream")
    data = TokenDataset(folder, "train", block_size=64, seed=28, **goldfish)
    shape = ApertusConfig(vocab_size=data.meta["vocab_size"], block_size=64, n_layer=2, n_head=4, n_kv_head=2,
                          n_embd=64, ffn_dim=160, init_std=0.02)
    model = Apertus(shape, seed=28)
    # Samples are windows: the rate rises over the first 16 of 160, and falls by 1 - sqrt over the last 48.
    plan = Plan(batch_size=8, lr=3e-3, min_lr=3e-4, warmup_samples=16, total_samples=160, decay_samples=48,
                decay_at=112)
    groups = param_groups(model, weight_decay=0.1)         # matrices decay, norm weights and xIELU's scalars do not
    optimizer = AdEMAMix(groups, betas=(0.9, 0.999, 0.99), alpha=2.0, alpha_warmup=plan.end, beta3_warmup=plan.end)

    for step in range(plan.end):
        idx, targets, keep, doc = data.batch(*plan.samples_of(step))    # (8, 64) each
        loss = model.loss(idx, targets, keep, doc)         # the mean over the targets that Goldfish keeps
        loss.backward()
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
        optimizer.step(lr=plan.lr_at(step), grad_scale=clip_scale(norm, 0.1))
        optimizer.zero_grad()
        print(f"step {step:2}   loss {loss.item():.5f}   gradient norm {norm:.4f}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, ValueError) as error:
        print(f"loop.py: {error}", file=sys.stderr)
        sys.exit(2)
