"""studies/explain.py: plots have the numbers of the report, the optimizer and a closed form."""

import numpy as np
import pytest
import torch

from ademamix import AdEMAMix
from studies import explain


def test_the_slow_weights_drawn_are_ademamixs_response_to_one_gradient():
    t, at_step = 30, 12
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = AdEMAMix(
        [p],
        betas=(0.9, 0.999, 0.9999),
        alpha=8.0,
        beta3_warmup=100_000,
        alpha_warmup=100_000,
        compile=False,
        state_dtype=torch.float32,
    )
    for step in range(1, t + 1):
        p.grad = torch.full_like(p, float(step == at_step))
        opt.step()
    slow = opt.state[p]["exp_avg_slow"].item()
    assert explain.slow_weight(t)[t - at_step] == pytest.approx(slow * 8 * t / 100_000, rel=1e-5)


def test_the_schedule_drawn_is_the_8bs():
    """Report Table 1: a rate of 1.1e-4, a tenth of it at the end; 4.19, later 8.39 million tokens a step."""
    x, curves, *_ = explain.wsd()
    assert np.interp([10, 15], x, curves["learning rate: WSD"]) == pytest.approx([1.1, 0.11])
    assert {*curves["batch"].round(3)} == {0.419, 0.839}
