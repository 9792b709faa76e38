"""ademamix.py against apple/ml-ademamix (golden trajectories), the report's warm-up values, and torch's optimizers."""

import json
from pathlib import Path

import pytest
import torch
from conftest import table
from tiny import GOLDEN, tensors

from ademamix import AdEMAMix, alpha_at, beta3_at
from configurator import literal

CASES = json.loads(Path(GOLDEN, "ademamix.json").read_text())


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_sixty_steps_are_the_published_ones(case, dtype, tolerance):
    """With scaled gradients, and with a second optimizer that loads the states after step 23."""
    arrays = tensors("ademamix.npz")
    init, grads, want = (arrays[f"{name}_{case}"] for name in ("init", "grads", "params"))
    params = [torch.nn.Parameter(t.to(dtype)) for t in init.split([35, 11, 1])]
    opt, got = AdEMAMix(params, **CASES[case]), []
    for t, g in enumerate(4 * grads):
        if t == 23:
            states, opt = opt.state_dict(), AdEMAMix(params, **CASES[case])
            opt.load_state_dict(states)
        for p, part in zip(params, g.split([35, 11, 1])):
            p.grad = part.to(dtype)
        opt.step(grad_scale=torch.tensor(0.25))
        got.append(torch.cat([p.detach() for p in params]))
    assert (torch.stack(got) - want).norm() <= tolerance * want.norm()


def test_the_warmups_are_those_of_the_report():
    """Over 100,000 steps (report app. C); the golden values of beta3 are those of the published scheduler."""
    want = {1: 0.90098833, 10: 0.90907658, 1000: 0.99090099, 50_000: 0.99980022, 100_000: 0.9999, 200_000: 0.9999}
    assert {t: round(beta3_at(t, 0.9, 0.9999, 100_000), 8) for t in want} == want
    assert [alpha_at(t, 8.0, 100_000) for t in (1, 3000, 100_000, 200_000)] == pytest.approx(
        [8e-5, 0.24, 8.0, 8.0], rel=1e-12
    )
    assert alpha_at(1, 8.0, None) == alpha_at(1, 8.0, 0) == 8.0
    assert beta3_at(1, 0.9, 0.99, 0) == 0.99


def one(**how):
    """A parameter with a gradient, and its optimizer."""
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones_like(p)
    return p, AdEMAMix([p], **how)


def test_by_default_it_has_the_published_settings():
    """The report's table of hyperparameters; lr and eps from the optimizer's paper; no warm-up."""
    want = dict(
        lr=1e-3, betas=(0.9, 0.999, 0.9999), alpha=8.0, eps=1e-8, weight_decay=0.1, beta3_warmup=None, alpha_warmup=None
    )
    assert want.items() <= one()[1].param_groups[0].items()


WRONG = """
betas | (0.9, 0.999)
betas | (0, 0, 1.0)
betas | (-0.1, 0.9, 0.9)
lr    | -1.0
eps   | -1e-9
"""


@pytest.mark.parametrize("name, value", table(WRONG))
def test_a_wrong_setting_is_an_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=name):
        one(**{name: literal(value)})
