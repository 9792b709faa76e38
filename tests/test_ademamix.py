"""ademamix.py against apple/ml-ademamix (golden trajectories), the report's warm-up values, and torch's optimizers."""

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ademamix import AdEMAMix, alpha_at, beta3_at, build_optimizer, param_groups
from conftest import script

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "ademamix.json").read_text())


def run(case, dtype=torch.float64, reload_at=None, scale=1.0):
    """The 60 golden gradients through the optimizer: the parameters after each, and the published ones."""
    with np.load(GOLDEN / "ademamix.npz", allow_pickle=False) as f:
        init, grads, want = (torch.from_numpy(f[f"{name}_{case}"]) for name in ("init", "grads", "params"))
    params = [torch.nn.Parameter(t.clone().to(dtype)) for t in init.split([35, 11, 1])]
    opt, got = AdEMAMix(params, **CASES[case]), []
    for t, g in enumerate(grads):
        if t == reload_at:
            old, opt = opt, AdEMAMix(params, **CASES[case])
            opt.load_state_dict(old.state_dict())
        for p, part in zip(params, (g / scale).split([35, 11, 1])):
            p.grad = part.clone().to(dtype)
        opt.step(grad_scale=torch.tensor(scale))
        got.append(torch.cat([p.detach().clone() for p in params]))
    return torch.stack(got), want


@pytest.mark.parametrize("case", range(3))
def test_sixty_steps_are_the_published_ones(case):
    got, want = run(case)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    single, _ = run(case, torch.float32)
    assert (single - want).norm() <= 1e-6 * want.norm()


def test_scaling_in_the_step_is_scaling_the_gradient():
    torch.testing.assert_close(run(0, scale=0.25)[0], run(0)[1], rtol=1e-12, atol=1e-12)


def test_the_warmups_are_those_of_the_report():
    """Over 100,000 steps (report app. B); the golden values of beta3 are those of the published scheduler."""
    want = {1: 0.90098833, 10: 0.90907658, 1000: 0.99090099, 50_000: 0.99980022, 100_000: 0.9999, 200_000: 0.9999}
    assert {t: round(beta3_at(t, 0.9, 0.9999, 100_000), 8) for t in want} == want
    assert [alpha_at(t, 8.0, 100_000) for t in (1, 3000, 100_000, 200_000)] == [8e-5, 0.24, 8.0, 8.0]
    assert alpha_at(1, 8.0, None) == alpha_at(1, 8.0, 0) == 8.0 and beta3_at(1, 0.9, 0.99, 0) == 0.99


def test_by_default_it_has_the_published_settings():
    """Report table of hyperparameters, and the optimizer's paper for lr and eps; no warm-up."""
    want = dict(lr=1e-3, betas=(0.9, 0.999, 0.9999), alpha=8.0, eps=1e-8, weight_decay=0.1, beta3_warmup=None,
                alpha_warmup=None)
    group = AdEMAMix([torch.nn.Parameter(torch.ones(3))]).param_groups[0]
    assert {name: group[name] for name in want} == want


def test_loaded_and_copied_it_continues_with_the_same_bits():
    """By load_state_dict, deepcopy and pickle, as torch's optimizers; also with averages in bf16."""
    assert torch.equal(run(0, torch.float32)[0], run(0, torch.float32, reload_at=23)[0])
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    opt = AdEMAMix([p], 0.1, state_dtype=torch.bfloat16)
    opt.step()
    copies = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
    opt.step()
    for other in copies:
        q = other.param_groups[0]["params"][0]
        q.grad = torch.ones(3, 3)
        other.step()
        assert q is not p and torch.equal(p, q)
        assert all(torch.equal(x, other.state[q][name]) for name, x in opt.state[p].items())


def test_states_of_parameters_in_bf16_are_fp32():
    p = torch.nn.Parameter(torch.ones(3).bfloat16())
    opt = AdEMAMix([p])
    assert {x.dtype for x in opt.new_state(p).values()} == {torch.float32}


def test_a_missing_gradient_leaves_its_parameter_and_its_clock_alone():
    a, b, fresh = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    opt, late = AdEMAMix([a, b], 0.1), AdEMAMix([fresh], 0.1)
    for t in range(4):
        a.grad = torch.ones(3)
        if t == 2:
            assert torch.equal(b, torch.ones(3)) and b not in opt.state
            b.grad = fresh.grad = torch.ones(3)
        opt.step()
        late.step()
    assert opt.state[a]["step"] == 4 and opt.state[b]["step"] == 2
    assert torch.equal(fresh, b) and not torch.equal(a, b)


def test_a_step_between_forward_and_backward_is_noticed_by_autograd():
    """As with torch.optim: backward would use the new weights."""
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad, loss = torch.ones(3, 3), (p * p).sum()
    AdEMAMix([p], 0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_it_compiles_from_a_million_parameters_on_or_as_it_is_told():
    """Only the choice is looked at, test_averages.py has the compiled update."""
    for n, told, compiled in (
            (1_000_000, None, True), (999_999, None, False), (9, True, True), (2_000_000, False, False)):
        params = [torch.nn.Parameter(torch.zeros(n - 1)), torch.nn.Parameter(torch.zeros(1))]
        assert AdEMAMix(params, compile=told).defaults["compile"] == compiled


def test_weight_decay_spares_gains_and_scalars_and_frozen_parameters_are_left_out():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.RMSNorm(4), torch.nn.Linear(4, 4).requires_grad_(False))
    decay, spared = param_groups(model)
    assert decay == dict(params=[model[0].weight], weight_decay=0.1)
    assert spared["weight_decay"] == 0.0 and list(map(id, spared["params"])) == [id(model[0].bias), id(model[1].weight)]


def test_an_optimizer_is_built_by_name():
    model = torch.nn.Linear(3, 4)
    common = 0.1, (0.9, 0.99, 0.999), 5.0, 1e-6, 0.2, 7, 9
    adamw = build_optimizer(model, "adamw", *common)
    ours = build_optimizer(model, "ademamix", *common, True, "bfloat16")
    for opt in (adamw, ours):
        assert [group["weight_decay"] for group in opt.param_groups] == [0.2, 0.0]
        assert opt.param_groups[0]["lr"] == 0.1 and opt.param_groups[1]["eps"] == 1e-6
    assert type(adamw) is torch.optim.AdamW and adamw.param_groups[0]["betas"] == (0.9, 0.99)
    want = dict(betas=common[1], alpha=5.0, alpha_warmup=7, beta3_warmup=9, state_dtype=torch.bfloat16, compile=True)
    assert {name: ours.defaults[name] for name in want} == want
    for name, dtype in (("sgd", "float32"), ("adamw", "bfloat16"), ("ademamix", "float16")):
        with pytest.raises(ValueError, match="there is|use --optimizer=ademamix"):
            build_optimizer(model, name, *common, state_dtype=dtype)


def test_shards_move_like_whole_tensors_and_go_through_a_distributed_checkpoint():
    """FSDP on one rank, where the state is of DTensors; torch's own functions save and load it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        def made():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.RMSNorm(7))
            return model, AdEMAMix(model.parameters(), 0.01, alpha_warmup=4, beta3_warmup=4)

        def train(model, opt, steps):
            for t in steps:
                model(torch.full((2, 5), t + 1.0).cumsum(1)).pow(2).sum().backward()
                opt.step()
                opt.zero_grad()
            return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]

        def sharded():
            model = fully_shard(made()[0], mesh=dist.init_device_mesh("cpu", (1,)))
            return model, AdEMAMix(model.parameters(), 0.01, alpha_warmup=4, beta3_warmup=4)

        (model, opt), (again, other) = sharded(), sharded()
        want = train(*made(), range(6))
        train(model, opt, range(3))
        slow = opt.state[model[0].weight]["exp_avg_slow"]
        assert isinstance(slow, DTensor) and slow.placements == model[0].weight.placements
        again.load_state_dict(model.state_dict())
        set_optimizer_state_dict(again, other, copy.deepcopy(get_optimizer_state_dict(model, opt)))
        for pair in ((model, opt), (again, other)):
            assert all(map(torch.equal, train(*pair, range(3, 6)), want))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("bad", [
    {"betas": (0.9, 0.999)}, {"betas": (0, 0, 1.0)}, {"betas": (-0.1, 0.9, 0.9)}, {"lr": -1.0}, {"eps": -1e-9}])
def test_a_wrong_setting_is_an_error_that_names_it(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AdEMAMix([torch.nn.Parameter(torch.ones(1))], **bad)


def test_the_command_prints_the_warmups_of_the_report():
    rows = [line.split() for line in script("ademamix.py").stdout.splitlines()[1:]]
    assert rows[3] == ["1,000", "0.0800", "0.99090099", "75.8", "steps"]
    assert rows[-1] == ["100,000", "8.0000", "0.99990000", "6931.8", "steps"]
