"""AdEMAMix's compiled update against the eager one, and rounding in bf16 against its expectation."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import ademamix
from ademamix import AdEMAMix, stochastic_bf16
from engine.hardware import can_compile

has_compiler = pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="no C++ compiler")
# Matrices, vectors and a single number. 5003 and 7 x 3 leave a remainder in each vector register.
SHAPES = [(64, 80), (5003,), (80, 64), (128, 64), (7, 3), (500, 16), (1,)]


def trained(compile, **options):
    """Parameters after five steps with random gradients: one is transposed, one misses its first gradient."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES] + [torch.nn.Parameter(torch.randn(9, 5).T)]
    sizes = [p.numel() for p in params]
    how = dict(betas=(0.9, 0.999, 0.99), alpha_warmup=10, beta3_warmup=10, compile=compile)
    opt = AdEMAMix(params, **how | options)
    for t in range(5):
        # In every other step gradients are views of one buffer, as FSDP's are; in the others they are separate tensors.
        for p, part in zip(params, torch.randn(sum(sizes)).split(sizes)):
            p.grad = part.view(p.shape) if t % 2 else part.view(p.shape).clone()
        if t == 0:
            params[4].grad = None
        opt.param_groups[0]["lr"] = 0.01 / (t + 1)
        opt.step(grad_scale=1 / (t + 1))
    return params, [dict(opt.state[p]) for p in params]


@pytest.fixture(autouse=True)
def fresh():
    """Drop the update that another test has compiled or patched."""
    ademamix.compiled_update.cache_clear()
    yield
    ademamix.compiled_update.cache_clear()


@pytest.mark.parametrize(
    "backend, options",
    [
        ("aot_eager", {}),
        ("aot_eager", dict(betas=(0.0, 0.999, 0.99))),
        pytest.param("inductor", dict(state_dtype=torch.bfloat16), marks=[has_compiler, pytest.mark.slow]),
    ],
)
def test_compiled_it_is_eager_to_rounding_and_three_graphs_serve_all_sizes_and_steps(monkeypatch, backend, options):
    """Graphs: vectors, numbers, transposed matrices. In bf16 to the rounding of the moments."""
    torch._dynamo.reset()
    counter, compile = CompileCounterWithBackend(backend), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile(f, backend=counter, **how))
    eager, one = trained(False, **options)
    # Torch's headers are needed once, and precompiling takes longer.
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        fused, two = trained(True, **options)
    bound = dict(rtol=1e-2, atol=1e-2) if backend == "inductor" else dict(rtol=1e-6, atol=1e-7)
    torch.testing.assert_close((fused, two), (eager, one), **bound)
    assert counter.frame_count == 3
    # Each update raises the version counter, so that autograd rejects a backward pass through older weights.
    assert min(p._version for p in fused) >= 4
    # Noise depends on the element and the step, so only moments within fp32 rounding of it are rounded differently.
    differs = torch.cat([(a["exp_avg_slow"] != b["exp_avg_slow"]).flatten() for a, b in zip(one, two)])
    assert backend != "inductor" or differs.float().mean() < 1e-3


def test_without_a_compiler_it_runs(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    AdEMAMix([p], 0.1, compile=True).step()
    assert p.max() < 1


# -----------------------------------------------------------------------------
# bf16


def rounded(x, step):
    return stochastic_bf16(x, torch.tensor(step, dtype=torch.int32))


def test_stochastic_rounding_is_right_on_average_and_repeats_itself():
    """1 + 3/1024 lies between 1 and 1 + 8/1024 in bf16, so it is rounded up with probability 3/8."""
    x = torch.full((1 << 16,), 1 + 3 / 1024)
    share = torch.stack([rounded(x, step) > 1 for step in range(16)]).float()
    assert abs(share.mean() - 3 / 8) < 4 * (15 / 64 / share.numel()) ** 0.5
    assert abs(torch.corrcoef(share[:2])[0, 1]) < 4 / 256
    assert rounded(x, 5).equal(rounded(x, 5))
    exact = torch.randn(1000).bfloat16()
    assert rounded(exact.float(), 1).equal(exact)


def test_the_step_rounds_the_slow_moment_at_random_and_anew_each_time():
    """The slow moment is the exact one, rounded with the step as the seed; the fast one is rounded to nearest."""
    p = torch.nn.Parameter(torch.zeros(4096))
    opt = AdEMAMix([p], betas=(0.9, 0.999, 0.99), state_dtype=torch.bfloat16)
    slow = torch.zeros(4096).bfloat16()
    p.grad = torch.full_like(p, 1 + 3 / 1024)
    for step in (1, 2, 3):
        opt.step()
        exact = slow + torch.tensor(1 - 0.99) * (p.grad - slow)
        _, fast, slow, squares = (x.clone() for x in opt.state[p].values())
        assert slow.equal(rounded(exact, step))
        assert not slow.equal(rounded(exact, 0))
    assert fast.dtype == torch.bfloat16
    assert squares.dtype == torch.float32
