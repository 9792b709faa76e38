"""
AdEMAMix against apple/ml-ademamix (golden trajectories), the report's warm-up values, torch's own DTensor and
checkpoint.
"""
import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ademamix as module
from ademamix import AdEMAMix, beta3_at, param_groups, stochastic_bf16
from engine.hardware import can_compile

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "ademamix.json").read_text())
compiler = pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="no C++ compiler")


def run(case, dtype=torch.float64, reload_at=None, scale=1.0, **options):
    """The 60 golden gradients through our optimizer: the parameters after each, the published ones, the optimizer."""
    with np.load(GOLDEN / "ademamix.npz", allow_pickle=False) as f:
        init, grads, want = (torch.from_numpy(f[f"{name}_{case}"]) for name in ("init", "grads", "params"))
    split = lambda x: [t.clone().to(dtype) for t in x.split([35, 11, 1])]
    params = [torch.nn.Parameter(t) for t in split(init)]
    opt, got = AdEMAMix(params, **{**CASES[case], **options}), []
    for t, g in enumerate(grads):
        if t == reload_at:
            params = [torch.nn.Parameter(p.detach().clone()) for p in params]
            old, opt = opt, AdEMAMix(params, **{**CASES[case], **options})
            opt.load_state_dict(old.state_dict())
        for p, part in zip(params, split(g / scale)):
            p.grad = part
        opt.step(grad_scale=torch.tensor(scale))
        got.append(torch.cat([p.detach().clone() for p in params]))
    return torch.stack(got), want, opt


@pytest.mark.parametrize("case", range(3))
def test_sixty_steps_are_the_published_ones(case):
    got, want, opt = run(case)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    names = {"step", "exp_avg_slow", "exp_avg_sq"} | ({"exp_avg_fast"} if CASES[case]["betas"][0] else set())
    assert all(set(state) == names for state in opt.state.values())  # b1 = 0 keeps no fast average
    single, _, _ = run(case, torch.float32)
    assert (single - want).norm() <= 1e-6 * want.norm()


def test_scaling_in_the_step_is_scaling_the_gradient():
    torch.testing.assert_close(run(0, scale=0.25)[0], run(0)[1], rtol=1e-12, atol=1e-12)


def test_beta3_warms_up_as_the_report_says():  # for a warm-up over 100,000 steps
    want = {1: .90098833, 10: .90907658, 100: .94996625, 1000: .99090099}
    want |= {10_000: .99900901, 50_000: .99980022, 100_000: .9999}
    assert {t: round(beta3_at(t, 0.9, 0.9999, 100_000), 8) for t in want} == want


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.bfloat16}])
def test_saved_and_loaded_it_goes_on_to_the_same_bits(options):
    straight, _, _ = run(0, torch.float32, **options)
    resumed, _, opt = run(0, torch.float32, reload_at=23, **options)
    assert torch.equal(straight, resumed)
    first = opt.param_groups[0]["params"][0]
    assert opt.state[first]["exp_avg_slow"].dtype == options.get("state_dtype", torch.float32)


def test_a_copy_goes_on_as_its_original_would_as_with_torchs_optimizers():
    p = torch.nn.Parameter(torch.ones(3, 3))
    for make in (lambda: AdEMAMix([p], 0.1, state_dtype=torch.bfloat16), lambda: torch.optim.AdamW([p], 0.1)):
        opt = make()
        p.grad = torch.ones(3, 3)
        opt.step()
        other = copy.deepcopy(opt)
        q = other.param_groups[0]["params"][0]
        q.grad = p.grad.clone()
        for each in (opt, other):
            each.step()
        assert q is not p and torch.equal(p, q)
        assert all(torch.equal(x, other.state[q][name]) for name, x in opt.state[p].items())


@compiler
def test_compiled_is_eager_and_a_state_moves_between_them():
    eager, want, _ = run(0, torch.float32)
    fused, _, opt = run(0, torch.float32, compile=True)
    torch.testing.assert_close(fused, eager, rtol=1e-6, atol=1e-7)
    assert (fused - want).norm() <= 1e-6 * want.norm()
    assert opt.update is not module.ademamix_many
    other = AdEMAMix([torch.nn.Parameter(p.detach().clone()) for p in opt.param_groups[0]["params"]], compile=False)
    other.load_state_dict(opt.state_dict())
    for a, b in zip(opt.state.values(), other.state.values()):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_moving_schedules_and_new_sizes_compile_nothing_new():
    params = [torch.nn.Parameter(torch.randn(n, 3)) for n in (4, 5, 7)]
    opt = AdEMAMix(params, 1e-3, alpha_warmup=10, beta3_warmup=10)
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    opt.update = torch.compile(module.ademamix_many, fullgraph=True, dynamic=True, backend=counter)
    for t in range(12):
        opt.param_groups[0]["lr"] = 1e-3 / (t + 1)
        for p in params:
            p.grad = torch.randn_like(p)
        opt.step(grad_scale=1 / (t + 1))
    assert counter.frame_count == 1


def test_without_a_compiler_it_says_so_and_runs(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    AdEMAMix([p], 0.1, compile=True).step()
    assert p.max() < 1
    assert capsys.readouterr().out.count("\n") == 1


def test_a_missing_gradient_leaves_its_parameter_and_its_clock_alone():
    a, b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    opt = AdEMAMix([a, b], 0.1)
    for t in range(4):
        a.grad, b.grad = torch.ones(3), torch.ones(3) if t >= 2 else None
        opt.step()
        assert t >= 2 or torch.equal(b, torch.ones(3)) and b not in opt.state
    assert opt.state[a]["step"] == 4 and opt.state[b]["step"] == 2
    fresh = torch.nn.Parameter(torch.ones(3))
    late = AdEMAMix([fresh], 0.1)
    for _ in range(2):
        fresh.grad = torch.ones(3)
        late.step()
    assert torch.equal(fresh, b)


def test_a_step_between_forward_and_backward_is_noticed_by_autograd():      # as with torch.optim
    for make in (AdEMAMix, torch.optim.AdamW):
        p = torch.nn.Parameter(torch.ones(3, 3))
        p.grad, loss = torch.ones(3, 3), (p * p).sum()
        make([p], 0.1).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_sparse_gradient_does_what_its_dense_form_does():
    weights = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(10, 4, sparse=sparse)
        opt = AdEMAMix(table.parameters(), 0.1)
        for ids in ([1, 1, 7], [2], [7, 9]):
            table(torch.tensor(ids)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        weights.append(table.weight.detach())
    assert torch.equal(*weights)


def test_a_transposed_parameter_is_updated_like_any_other():
    x = torch.arange(6.0).view(2, 3).T
    t, c = torch.nn.Parameter(x.clone()), torch.nn.Parameter(x.contiguous())
    for p in (t, c):
        p.grad = p.detach().contiguous() + 1
        AdEMAMix([p], 0.1).step()
    assert torch.equal(t, c)


def test_weight_decay_spares_gains_and_scalars():
    model = torch.nn.Module()
    model.up, model.norm = torch.nn.Linear(3, 4, bias=False), torch.nn.RMSNorm(3)
    model.alpha_p = torch.nn.Parameter(torch.ones(1))
    model.frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    decay, spared = param_groups(model)
    assert decay["weight_decay"] == 0.1 and decay["params"] == [model.up.weight]
    assert spared["weight_decay"] == 0.0
    assert set(map(id, spared["params"])) == {id(model.alpha_p), id(model.norm.weight)}


def rounded(x, step):
    return stochastic_bf16(x, torch.tensor(step, dtype=torch.int32))


def test_stochastic_rounding_is_right_on_average_and_repeats_itself():
    x = torch.full((1 << 16,), 1 + 3 / 1024)  # bf16 neighbours are 1 and 1 + 8/1024: up with probability 3/8
    up = lambda step: rounded(x, step) > 1
    share = torch.stack([up(step) for step in range(16)]).float()
    deviation = (15 / 64 / share.numel()) ** 0.5                             # of the mean of 2^20 fair draws
    assert abs(share.mean() - 3 / 8) < 4 * deviation
    assert abs(torch.corrcoef(share[:2])[0, 1]) < 4 / 256                    # two steps do not know of each other
    assert torch.equal(up(5), up(5)) and not torch.equal(up(5), up(6))
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(rounded(exact.float(), 1), exact)


def test_the_step_rounds_the_slow_average_at_random_and_anew_each_time():
    """What is stored in bf16 is the exact average, rounded with the step's number as the seed."""
    p = torch.nn.Parameter(torch.zeros(4096))
    opt = AdEMAMix([p], betas=(0.9, 0.999, 0.99), state_dtype=torch.bfloat16)
    slow = torch.zeros(4096).bfloat16()
    for step in (1, 2, 3):
        p.grad = torch.full((4096,), 1 + 3 / 1024)
        opt.step()
        exact = slow + torch.tensor(1 - 0.99) * (p.grad - slow)
        slow = opt.state[p]["exp_avg_slow"]
        assert torch.equal(slow, rounded(exact, step))
        assert slow.unique().numel() > 1 and not torch.equal(slow, rounded(exact, 0))
        slow = slow.clone()


def test_a_slow_average_survives_bf16():  # 1 - 0.9999^20,000 = 0.8647; rounded to nearest it stops at 0.0312
    slow, nearest = torch.zeros(512).bfloat16(), torch.zeros(512).bfloat16()
    for t in range(20_000):
        slow = rounded(slow + 1e-4 * (1 - slow.float()), t)
        nearest.copy_(nearest + 1e-4 * (1 - nearest.float()))
    assert abs(slow.float().mean() - 0.8647) < 0.01
    assert abs(nearest[0] - 0.0312) < 1e-3


def test_the_command_prints_the_average_beside_its_closed_form(capsys):  # 1 - 0.99^100 = 0.6340
    module.print_rounding(steps=100, w=0.01)
    said = capsys.readouterr().out
    assert "slow average of 100 gradients of 1 (exact 0.6340): fp32 0.6340," in said
    assert float(said.split("stochastic")[1]) == pytest.approx(0.634, abs=0.002)


def test_shards_move_like_whole_tensors_and_go_through_a_distributed_checkpoint(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        made = lambda: (torch.manual_seed(0), torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.RMSNorm(7)))[1]
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        whole, shards, again = made(), fully_shard(made(), mesh=mesh), fully_shard(made(), mesh=mesh)
        opts = [AdEMAMix(param_groups(m), 0.01, alpha_warmup=4, beta3_warmup=4) for m in (whole, shards, again)]

        def train(model, opt, steps):
            for t in steps:
                model(torch.full((2, 5), t + 1.0).cumsum(1)).pow(2).sum().backward()
                opt.step()
                opt.zero_grad()
            return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]

        want = train(whole, opts[0], range(6))
        train(shards, opts[1], range(3))
        state = opts[1].state[shards[0].weight]
        slow = state["exp_avg_slow"]
        assert isinstance(slow, DTensor) and slow.placements == shards[0].weight.placements
        again.load_state_dict(shards.state_dict())
        set_optimizer_state_dict(again, opts[2], copy.deepcopy(get_optimizer_state_dict(shards, opts[1])))
        assert all(map(torch.equal, train(shards, opts[1], range(3, 6)), want))
        assert all(map(torch.equal, train(again, opts[2], range(3, 6)), want))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("bad", [
    {"betas": (0.9, 0.999)}, {"betas": (0, 0, 1.0)}, {"lr": -1.0}, {"state_dtype": torch.half}])
def test_a_wrong_setting_is_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AdEMAMix([torch.nn.Parameter(torch.ones(1))], **bad)
