"""engine/averages.py: the compiled update against the eager one; rounding in bf16 against its expectation."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ademamix import AdEMAMix
from engine import averages
from engine.averages import stochastic_bf16
from engine.hardware import can_compile

compiler = pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="no C++ compiler")
# Whole rows, a large tensor with a remainder, small ones, a scalar.
SHAPES = [(64, 80), (5003,), (7, 3), (1,), (128, 64)]


def trained(steps=5, betas=(0.9, 0.999, 0.99), **options):
    """Parameters after some steps with random gradients: one is transposed, one misses its first gradient."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    params.append(torch.nn.Parameter(torch.randn(9, 5).T))
    opt = AdEMAMix(params, 0.01, betas, alpha_warmup=10, beta3_warmup=10, **options)
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = torch.randn_like(p) if t or i != 2 else None
        opt.param_groups[0]["lr"] = 0.01 / (t + 1)
        opt.step(grad_scale=1 / (t + 1))
    return params, opt


@pytest.fixture(autouse=True)
def fresh():
    """No update that another test has compiled, or patched."""
    averages.updater.cache_clear()
    yield
    averages.updater.cache_clear()


@compiler
@pytest.mark.parametrize("options", [{}, dict(betas=(0.0, 0.999, 0.99)), dict(state_dtype=torch.bfloat16)])
def test_compiled_it_is_eager_to_rounding(options):
    """In bf16 to that of the averages: elements are counted in each row, so the noise differs where rows are joined."""
    eager, one = trained(compile=False, **options)
    fused, two = trained(compile=True, **options)
    bound = dict(rtol=1e-2, atol=1e-2) if "state_dtype" in options else dict(rtol=1e-6, atol=1e-7)
    for p, q in zip(eager, fused):
        torch.testing.assert_close(p, q, **bound)
        torch.testing.assert_close(dict(one.state[p]), dict(two.state[q]), **bound)


def test_moving_schedules_and_new_sizes_compile_nothing_new(monkeypatch):
    counter, compile = CompileCounterWithBackend("eager"), torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(averages, "can_compile", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend=counter, **options))
    trained(compile=True)
    # As FSDP's: gradients that are parts of one buffer.
    p = [torch.nn.Parameter(torch.randn(n, 16)) for n in (300, 400, 300, 500)]
    opt = AdEMAMix(p, compile=True)
    for _ in range(2):
        for x, g in zip(p, torch.randn(1500, 16).split([300, 400, 300, 500])):
            x.grad = g
        opt.step()
    assert counter.frame_count == 1


def test_a_step_between_forward_and_backward_is_noticed_by_autograd(monkeypatch):
    monkeypatch.setattr(averages, "can_compile", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad, loss = torch.ones(3, 3), (p * p).sum()
    AdEMAMix([p], 0.1, compile=True).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_a_compiler_it_says_so_and_runs(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    AdEMAMix([p], 0.1, compile=True).step()
    assert p.max() < 1 and capsys.readouterr().out.startswith("ademamix: no compiler found for cpu")


# -----------------------------------------------------------------------------
# bf16


def rounded(x, step):
    return stochastic_bf16(x, torch.tensor(step, dtype=torch.int32))


def test_stochastic_rounding_is_right_on_average_and_repeats_itself():
    """The neighbours of 1 + 3/1024 in bf16 are 1 and 1 + 8/1024: it is rounded up with probability 3/8."""
    x = torch.full((1 << 16,), 1 + 3 / 1024)
    share = torch.stack([rounded(x, step) > 1 for step in range(16)]).float()
    deviation = (15 / 64 / share.numel()) ** 0.5
    assert abs(share.mean() - 3 / 8) < 4 * deviation
    assert abs(torch.corrcoef(share[:2])[0, 1]) < 4 / 256
    assert torch.equal(rounded(x, 5), rounded(x, 5)) and not torch.equal(rounded(x, 5), rounded(x, 6))
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(rounded(exact.float(), 1), exact)


def test_a_slow_average_survives_bf16():
    """1 - 0.999^2,000 = 0.8648; rounded to nearest it stops where a step is less than half a unit of the last place."""
    slow, nearest = torch.zeros(512).bfloat16(), torch.zeros(512).bfloat16()
    for t in range(2_000):
        slow = rounded(slow + 1e-3 * (1 - slow.float()), t)
        nearest.copy_(nearest + 1e-3 * (1 - nearest.float()))
    assert abs(slow.float().mean() - 0.8648) < 0.01
    assert abs(nearest[0] - 0.25) < 1e-3


def test_the_step_rounds_the_slow_average_at_random_and_anew_each_time():
    """In bf16 it is the exact average, rounded with the step's number as the seed; the fast one to nearest."""
    p = torch.nn.Parameter(torch.zeros(4096))
    opt = AdEMAMix([p], betas=(0.9, 0.999, 0.99), state_dtype=torch.bfloat16)
    slow = torch.zeros(4096).bfloat16()
    for step in (1, 2, 3):
        p.grad = torch.full((4096,), 1 + 3 / 1024)
        opt.step()
        exact = slow + torch.tensor(1 - 0.99) * (p.grad - slow)
        slow = opt.state[p]["exp_avg_slow"].clone()
        assert torch.equal(slow, rounded(exact, step)) and not torch.equal(slow, rounded(exact, 0))
    state = opt.state[p]
    assert state["exp_avg_fast"].dtype == torch.bfloat16 and state["exp_avg_sq"].dtype == torch.float32
