"""ademamix.py against apple/ml-ademamix (golden trajectories), the report's warm-up values, and torch's optimizers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import refused, same, script, table, weights
from tiny import GOLDEN, tensors
from trained import RUN, data  # noqa: F401

from ademamix import AdEMAMix, alpha_at, beta3_at, build_optimizer
from configurator import literal
from engine import memory
from model import Apertus, ApertusConfig

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


# -----------------------------------------------------------------------------
# Muon


def orthogonal(m, steps=5):
    """Newton-Schulz in fp64 by the formula of the blog post: X <- a X + (b A + c A A) X, A = X X^T."""
    x = m / m.norm()
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_muon_takes_the_matrices_of_the_blocks_by_its_formula_and_adamw_the_rest():
    """
    Three steps of a small model against fp64: Muon's updates to 2 %, since torch iterates in bf16, and a weight of
    AdamW to 1e-6. The bytes of all states are those of engine/memory.py, and zero_grad() reaches both parts.
    """
    model = Apertus(ApertusConfig(64, 97, 1, 2, 1, 32, 48), seed=28)
    name, other = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"
    opt = build_optimizer(model, "muon", 1e-2, (0.9, 0.95, 0.99), 2.0, 0.1, 10)
    p, q = (model.get_parameter(key).detach().double() for key in (name, other))
    first, buffer, m, v = p.clone(), torch.zeros_like(p), torch.zeros_like(q), torch.zeros_like(q)
    for t in (1, 2, 3):
        torch.manual_seed(t)
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        scale = 0.5 / t**2  # a constant one would cancel in AdamW
        g, h = (scale * model.get_parameter(key).grad.double() for key in (name, other))
        opt.step(lr=2e-2, grad_scale=scale)
        buffer = 0.95 * buffer + 0.05 * g
        p = p * (1 - 2e-2 * 0.1) - 2e-2 * 0.2 * max(p.shape) ** 0.5 * orthogonal((0.05 * g + 0.95 * buffer).mT).mT
        m, v = 0.9 * m + 0.1 * h, 0.95 * v + 0.05 * h * h
        q = q * (1 - 2e-2 * 0.1) - 2e-2 * m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    assert (model.get_parameter(name) - p).norm() < 0.02 * (p - first).norm()
    assert torch.allclose(model.get_parameter(other).double(), q, atol=1e-6)
    tensors = [t for state in opt.state.values() for key, t in state.items() if key != "step"]
    settings = dict(optimizer="muon", state_dtype="float32")
    assert sum(t.nbytes for t in tensors) == memory.state_bytes(model, settings)
    opt.zero_grad()
    assert all(weight.grad is None for weight in model.parameters())


def test_a_run_with_muon_resumes_to_the_same_bits_and_refuses_shards(data, tmp_path):
    """Its second half again, from the checkpoint of step 10."""
    flags = [*RUN, f"--data={data}", "--optimizer=muon"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert script("train.py", *flags, f"--out={whole}").returncode == 0
    shutil.copytree(whole, resumed)
    for step in (15, 20):
        shutil.rmtree(resumed / "ckpt" / f"step-{step:08d}")
    done = script("train.py", *flags, f"--out={resumed}", "--resume")
    assert done.returncode == 0 and "step-00000010" in done.stdout, done.stderr
    assert same(weights(whole), weights(resumed))
    refused(
        script("train.py", *flags, "--parallel=fsdp", f"--out={tmp_path}/new"), "optimizer=muon needs whole matrices"
    )
    assert not (tmp_path / "new").exists()
