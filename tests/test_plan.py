"""
tools/plan.py against measured memory, against a trace of every layer, and against arithmetic: 20 bytes per parameter,
two gathers and a reduction.
"""
import dataclasses
import json
import os
import runpy
import subprocess
import sys

import pytest

from tools import plan
from conftest import ROOT, script
from model import ApertusConfig

SMALL = ApertusConfig(block_size=64, vocab_size=512, n_layer=8, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=336)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_four_layers_say_what_eight_take(mode):
    peak, traffic = plan.planner(SMALL, 8, 8, mode)
    traced, found = plan.trace(SMALL, 8, 8, 5, mode)
    most = max(sum(kinds.values()) for kinds in traced.values())
    assert sum(peak(5).values()) == pytest.approx(most, rel=0.01)
    assert traffic == pytest.approx(dict(found))


def test_weights_gradients_states_and_traffic_are_the_arithmetic_of_fsdp():
    """
    20 bytes per parameter over the shards. A micro-batch gathers the blocks twice in bf16 and reduces everything once
    in fp32; the head stays gathered between forward and backward.
    """
    config = dataclasses.replace(SMALL, n_layer=3)
    traced, traffic = plan.trace(config, 8, 8, 1, "none")
    model, kinds = plan.Apertus(config), traced["forward"]
    n = model.num_params()
    assert kinds["weights"] == pytest.approx(4 * n / 8, rel=0.02)
    assert kinds["states"] == pytest.approx(12 * n / 8, rel=0.02)
    assert kinds["gradients"] == pytest.approx(4 * n / 8, rel=0.02)
    head = 2 * (model.lm_head.weight.numel() + SMALL.n_embd)
    assert traffic["allgather_base"] == pytest.approx(2 * 2 * n - head, rel=0.01)
    assert traffic["reduce_scatter_base"] == pytest.approx(4 * n, rel=0.01)


# A step as train.py makes it, with and without recomputation, each in a process of its own. States and gradients are
# written to, because zeros take no memory until then; a step of a small model comes first, so that libraries and code
# are loaded; and the kernel forgets the peak of the initialisation (clear_refs).
MEASURE = """
import os, resource, sys
sys.path.insert(0, {root!r})
import torch
from engine import parallel
from ademamix import AdEMAMix, param_groups
from model import Apertus, ApertusConfig
torch.set_num_threads(1)
def now():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
config = ApertusConfig(**{config!r})
small = ApertusConfig(**dict({config!r}, n_layer=1, n_embd=48, ffn_dim=64, vocab_size=64, block_size=32))
def build(config, mode):
    with torch.device("meta"):
        model = Apertus(config)
    model = parallel.spread(model, ranks, "cpu", 1, mode)
    optimizer = AdEMAMix(param_groups(model), compile=False)
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer._new_state(p, group)
            p.grad = torch.zeros_like(p)
            for t in (p.grad, *optimizer.state[p].values()):
                (t.to_local() if hasattr(t, "to_local") else t).add_(1)
    return model, optimizer
def step(model, rows):
    idx = torch.zeros(rows, model.config.block_size, dtype=torch.long)
    model(idx, idx, n_tokens=1)[1].backward()
for mode in ("none", "full"):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    ranks = parallel.Ranks("none", exact=True)
    ranks.join("cpu", 10)
    ranks.exact = False
    step(build(small, mode)[0], 1)
    before = now()
    model = build(config, mode)
    open("/proc/self/clear_refs", "w").write("5")
    step(model[0], {rows})
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(mode, peak - before, flush=True)
    os._exit(0)
"""
SHAPE = dict(block_size=512, vocab_size=4096, n_layer=3, n_head=6, n_kv_head=2, n_embd=384, ffn_dim=2016)


@pytest.fixture(scope="module")
def measured():
    """
    {mode: bytes that a real step adds}: resident memory, from before the model to the step's peak.

    One process, FSDP2, fp32, eager. malloc gives back what is freed, or the peak would hold what nobody uses.
    """
    program = MEASURE.format(root=ROOT, config=SHAPE, rows=2)
    env = dict(os.environ, OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=env)
    found = dict(line.split() for line in done.stdout.splitlines())
    assert set(found) == {"none", "full"}, done.stderr[-2000:]
    return {mode: int(n) for mode, n in found.items()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of resident memory from /proc")
@pytest.mark.parametrize("mode", ["none", "full"])
def test_predicted_memory_is_that_of_a_real_step(mode, measured):
    traced, _ = plan.trace(ApertusConfig(**SHAPE), 1, 1, 2, mode, dtype=plan.torch.float32, fused=False)
    predicted = max(sum(kinds.values()) for kinds in traced.values())
    print(json.dumps(dict(mode=mode, measured=measured[mode], predicted=predicted)))
    assert predicted == pytest.approx(measured[mode], rel=0.1)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """tools/plan.py as a user runs it, small."""
    def call(*args):
        return script("tools.plan", "configs/tiny.py", f"--picture={tmp_path / 'plan.png'}", *args)
    return call


def test_the_table_the_picture_and_the_advice(quick, tmp_path):
    done = quick("--gpus=8", "--gpu=h100", "--vocab_size=512")
    assert done.returncode == 0, done.stderr
    words = ("weights", "states", "gathered", "activations", "days", "tok/s", "-> --parallel=fsdp --recompute=")
    assert [word for word in words if word not in done.stdout] == []
    # Windows of 64 tokens cannot hide any link.
    assert "communication-bound" in done.stdout and "torchtitan" in done.stdout
    assert (tmp_path / "plan.png").stat().st_size > 5000


@pytest.fixture
def say(monkeypatch):
    """The advice for the 70B's batch of 2,048 windows on 512 GPUs with 73.6 GB. kinds: bytes of the only mode."""
    for key, value in dict(gpus=512, batch_size=2048, block_size=4096, parallel="fsdp").items():
        monkeypatch.setattr(plan, key, value)

    def call(best=None, kinds={}, shards=512, most=4):
        found = {"full": (0, kinds, {})}
        return "\n".join(plan.advice(70e9, found, best, shards, 8, most, 73.6e9))
    return call


def test_where_pure_fsdp_stops_making_sense(say):
    """The links of a micro-batch take as long as the compute of 8,580 tokens: 3 windows, so 682 GPUs."""
    hidden = say(("full", 1.0, 4, False, 8580, 8580))
    assert "--micro_batch=4, 1 of them" in hidden and "makes sense up to 682 GPUs" in hidden and "torchtitan" in hidden
    bound = say(("full", 1.0, 2, True, 8580, 8580), most=2)
    assert "from 8,580 tokens" in bound and "there are 8,192" in bound
    assert "pure FSDP stops making sense" in bound and "torchtitan" in bound


def test_what_to_change_where_nothing_fits(say, monkeypatch):
    """More GPUs or a shorter window where the states alone would fit (2.7 GB of 73.6 do), and wider shards in HSDP."""
    short = say(kinds={"weights": 90e9})
    assert "does not fit, by 16.4 GB" in short and "--gpus=1024" in short and "a shorter --block_size" in short
    monkeypatch.setattr(plan, "parallel", "hsdp")
    short = say(kinds={"weights": 180e9}, shards=8)
    assert "take 175.0 GB" in short and "--hsdp_shard=16" in short and "block_size" not in short


def test_the_published_flops_of_the_70b():
    """6.74e24 for 15T tokens (report, sec. 6), which counts the masked half of attention."""
    found = runpy.run_path(os.path.join(ROOT, "configs", "70b.py"))
    fields = {field.name for field in dataclasses.fields(ApertusConfig)}
    config = ApertusConfig(**{name: found[name] for name in fields & found.keys()})
    with plan.torch.device("meta"):
        flops = plan.Apertus(config).flops_per_token(4096)
    masked = 6 * config.n_layer * config.n_head * config.head_dim * 4096
    assert (flops + masked) * 3_662_109_375 * 4096 == pytest.approx(6.74e24, rel=0.01)


@pytest.mark.parametrize("args, says", [
    (["--gpu=abacus"], "there is a100, h100"), (["--gpus=3"], "2 or 4 can"), (["--gpus=1"], "at least 2 GPUs"),
    (["--gpus=4", "--parallel=hsdp", "--hsdp_shard=3"], "try 2 or 4")])
def test_what_cannot_be_planned_is_told_in_one_line(quick, args, says):
    done = quick(*args)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_the_links_of_the_8b():
    """With bf16 gradients: 42 GB on 8 GPUs are 117 ms at 360 GB/s of NVLink, and 48 GB on 64 are 1.06 s at 45 GB/s."""
    n = 8_053_338_176
    traffic = {"allgather_base": 2 * 2 * n, "reduce_scatter_base": 2 * n}
    assert plan.seconds_of(traffic, 8, 8, 360, 45) == pytest.approx(0.117, rel=0.01)
    assert plan.seconds_of(traffic, 64, 8, 360, 45) == pytest.approx(1.06, rel=0.01)
