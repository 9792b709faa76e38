"""ademamix.py against apple/ml-ademamix (golden trajectories), the report's warm-up values, and torch's optimizers."""

import json
from pathlib import Path

import pytest
import torch
from conftest import table
from tiny import GOLDEN, tensors

from ademamix import AdamW, AdEMAMix, alpha_at, beta3_at, build_optimizer
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


def one(dtype=torch.float32, **how):
    """A parameter with a gradient, and its optimizer."""
    p = torch.nn.Parameter(torch.ones(3, 3, dtype=dtype))
    p.grad = torch.ones_like(p)
    return p, AdEMAMix([p], **how)


def test_by_default_it_has_the_published_settings():
    """The report's table of hyperparameters; lr and eps from the optimizer's paper; no warm-up."""
    want = dict(
        lr=1e-3, betas=(0.9, 0.999, 0.9999), alpha=8.0, eps=1e-8, weight_decay=0.1, beta3_warmup=None, alpha_warmup=None
    )
    assert want.items() <= one()[1].param_groups[0].items()


def test_states_of_parameters_in_bf16_are_fp32():
    p, opt = one(torch.bfloat16)
    opt.step()
    assert {x.dtype for x in opt.state[p].values()} == {torch.float32}


def test_a_missing_gradient_leaves_its_parameter_and_its_clock_alone():
    (a, opt), (b, late) = one(lr=0.1), one(lr=0.1)
    absent = torch.nn.Parameter(torch.ones(3, 3))
    opt.add_param_group(dict(params=[absent]))
    opt.step()
    assert torch.equal(absent, torch.ones(3, 3)) and absent not in opt.state
    absent.grad = b.grad
    opt.step()
    late.step()
    assert torch.equal(absent, b)
    assert not torch.equal(a, b)
    assert opt.state[a]["step"] == 2


COMPILED = """
1_000_000 | None  | True
999_999   | None  | False
9         | True  | True
2_000_000 | False | False
"""


@pytest.mark.parametrize("row", table(COMPILED))
def test_it_compiles_from_a_million_parameters_on_or_as_it_is_told(row):
    """This tests the choice only; test_moments.py tests the compiled update."""
    n, told, compiled = map(literal, row)
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (n - 1, 1)]
    assert AdEMAMix(params, compile=told).defaults["compile"] == compiled


def test_an_optimizer_is_built_by_name_whose_weight_decay_spares_norm_weights_and_scalars():
    """Frozen parameters are left out."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.RMSNorm(4), torch.nn.Linear(4, 4).requires_grad_(False))
    betas = 0.9, 0.99, 0.999
    common = 0.1, betas, 5.0, 0.2, 7
    adamw = build_optimizer(model, "adamw", *common)
    ours = build_optimizer(model, "ademamix", *common, True, "bfloat16")
    matrix, bias, norm_weight, *_ = map(id, model.parameters())
    for opt in (adamw, ours):
        assert [[g["weight_decay"], g["lr"], g["eps"], *map(id, g["params"])] for g in opt.param_groups] == [
            [0.2, 0.1, 1e-8, matrix],
            [0.0, 0.1, 1e-8, bias, norm_weight],
        ]
    assert isinstance(adamw, torch.optim.AdamW) and adamw.defaults["betas"] == betas[:2]
    want = dict(betas=betas, alpha=5.0, alpha_warmup=7, beta3_warmup=7, state_dtype=torch.bfloat16, compile=True)
    assert want.items() <= ours.defaults.items()


def test_adamw_is_torchs_with_scaled_gradients():
    """With a large eps, because Adam's step does not depend on the gradient's scale otherwise."""
    stepped = []
    for optimizer, size, scale in ((AdamW, 1.0, dict(grad_scale=0.25)), (torch.optim.AdamW, 0.25, {})):
        p, absent = (torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2))
        p.grad = size * torch.arange(9.0).view(3, 3)
        optimizer([p, absent], 0.1, eps=1.0).step(**scale)
        stepped.append(p)
    assert torch.equal(*stepped)


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
