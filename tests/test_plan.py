"""
tools/plan.py and tools/tracing.py against measured memory, against a trace of every layer, and against arithmetic: 20
bytes per parameter, two gathers and a reduction.
"""
import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys

import pytest

import torch

from tools import plan, tracing
from conftest import ROOT, script
from model import Apertus, ApertusConfig
from posttrain import lora

SMALL = ApertusConfig(block_size=64, vocab_size=512, n_layer=8, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=336)


ADAPTERS = lora.settings_of(16, 32, "all")

with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
    README = file.read()


@pytest.mark.parametrize("mode", ["none", "full"])
def test_four_layers_say_what_eight_take(mode):
    peak, traffic = tracing.planner(SMALL, tracing.sharded, mode, 8, 8)
    traced, found = tracing.sharded(SMALL, 5, mode, 8, 8)
    most = max(sum(kinds.values()) for kinds in traced.values())
    assert sum(peak(5).values()) == pytest.approx(most, rel=0.01)
    assert traffic == pytest.approx(dict(found))


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("adapters, base", [(None, "fp32"), (ADAPTERS, "nf4")])
def test_four_layers_say_what_eight_take_on_one_gpu(mode, adapters, base):
    config = dataclasses.replace(SMALL, block_size=512)
    peak, _ = tracing.planner(config, tracing.on_one, mode, adapters, base)
    traced, _ = tracing.on_one(config, 5, mode, adapters, base)
    most = max(sum(kinds.values()) for kinds in traced.values())
    assert sum(peak(5).values()) == pytest.approx(most, rel=0.01)


def test_weights_gradients_states_and_traffic_are_the_arithmetic_of_fsdp():
    """
    20 bytes per parameter over the shards. A micro-batch gathers the blocks twice in bf16 and reduces everything once
    in fp32; the head stays gathered between forward and backward.
    """
    config = dataclasses.replace(SMALL, n_layer=3)
    traced, traffic = tracing.sharded(config, 1, "none", 8, 8)
    model, kinds = Apertus(config), traced["forward"]
    n = model.num_params()
    assert kinds["weights"] == pytest.approx(4 * n / 8, rel=0.02)
    assert kinds["states"] == pytest.approx(12 * n / 8, rel=0.02)
    assert kinds["gradients"] == pytest.approx(4 * n / 8, rel=0.02)
    head = 2 * (model.lm_head.weight.numel() + SMALL.n_embd)
    assert traffic["allgather_base"] == pytest.approx(2 * 2 * n - head, rel=0.01)
    assert traffic["reduce_scatter_base"] == pytest.approx(4 * n, rel=0.01)


def test_a_split_window_takes_the_activations_of_a_part_and_four_exchanges():
    """
    Two of H heads, for q and the result, and two of K, for k and v: in bf16, of T/P positions, forward and backward and
    in each recomputation. Stored is what a window of T/P tokens stores, and attention's result before its exchange.
    """
    config = dataclasses.replace(SMALL, n_layer=3, n_kv_head=4, block_size=1024)
    once = 256 * 2 * (config.n_head + config.n_kv_head) * config.head_dim * 2
    for mode, passes in (("none", 2), ("full", 3)):
        traced, traffic = tracing.sharded(config, 1, mode, 8, 8, 4)
        assert traffic["exchange"] == passes * config.n_layer * once
        short, _ = tracing.sharded(dataclasses.replace(config, block_size=256), 1, mode, 8, 8)
        activations = [kinds["forward"]["activations"] for kinds in (traced, short)]
        before_exchange = config.n_layer * 256 * config.n_head * config.head_dim * 2 if mode == "none" else 0
        assert activations[0] == pytest.approx(activations[1] + before_exchange, rel=0.01)


def test_the_table_of_windows_says_what_a_trace_of_the_whole_window_says():
    """On another number of GPUs, and over more of them, than the table's own traces have."""
    long = dataclasses.replace(SMALL, n_kv_head=4, block_size=2048)
    takes = plan.bytes_of_windows(long)
    peak, _ = tracing.planner(long, tracing.sharded, "full", 16, 16, 4)
    assert takes(2048, 4, "full", 16) == pytest.approx(sum(peak(1).values()), rel=0.02)


def test_the_fewest_gpus_then_the_least_recomputation_then_the_smallest_split():
    """By hand: 160 bytes in shards, and 64, half or a tenth of that for a window, over the GPUs that share it."""
    part = dict(none=1, selective=0.5, full=0.1)

    def takes(T, P, mode, gpus):
        return 160 / gpus + T / P * part[mode]
    wanted = {100: "8 / 1 none", 60: "8 / 2 none", 28: "8 / 8 none", 25: "8 / 8 selective", 22: "8 / 4 full",
              15: "16 / 8 selective", 0.5: "-"}
    assert {room: plan.fewest(takes, 160, 64, room) for room in wanted} == wanted


@pytest.mark.parametrize("base, bits", [("bf16", 16), ("int8", 8), ("nf4", 4 + 8 / 64 + 32 / 64 / 256)])
def test_a_frozen_base_and_its_adapters_on_one_gpu_are_arithmetic(base, bits):
    """
    A weight of a block in so many bits (a row of int8 has 32 more), embedding and head in 16; adapters have 20 bytes a
    number: r (in + out) for each of six matrices.
    """
    traced, _ = tracing.on_one(SMALL, 1, "full", ADAPTERS, base)
    C, kv = SMALL.n_embd, SMALL.n_embd // 2
    shapes = [(C, C), (kv, C), (kv, C), (C, C), (SMALL.ffn_dim, C), (C, SMALL.ffn_dim)]
    blocks = SMALL.n_layer * sum(n * k * bits + (32 * n if base == "int8" else 0) for n, k in shapes) / 8
    outside = 2 * 2 * SMALL.vocab_size * C
    numbers = SMALL.n_layer * 16 * sum(n + k for n, k in shapes)
    for kinds in traced.values():
        assert kinds["weights"] == pytest.approx(blocks + outside + 4 * numbers, rel=0.01)
        assert kinds["gradients"] == 4 * numbers
        assert kinds["states"] == pytest.approx(12 * numbers, rel=0.001)


# A step as train.py and sft.py make it, with and without recomputation, each in a process of its own. States and
# gradients are written to, because zeros take no memory until then; a step of a small model comes first, so that
# libraries and code are loaded; and the kernel forgets the peak of the initialisation (clear_refs).
MEASURE = """
import os, resource, sys
sys.path.insert(0, {root!r})
import torch
from engine import parallel
from ademamix import AdEMAMix, param_groups
from model import Apertus, ApertusConfig
from posttrain import lora, quantised
torch.set_num_threads(1)
def now():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
config = ApertusConfig(**{config!r})
small = ApertusConfig(**dict({config!r}, n_layer=1, n_embd=48, n_head=3, n_kv_head=1, ffn_dim=64, vocab_size=64,
                             block_size=32))
def build(config, mode, what):
    if what == "fsdp":
        with torch.device("meta"):
            model = Apertus(config)
        model = parallel.spread(model, ranks, "cpu", 1, mode)
    else:
        model = Apertus(config)
        if what == "nf4":
            quantised.quantise(model, "nf4")
        if what != "full":
            lora.adapt(model, {adapters!r})
        parallel.recompute_activations(model, mode)
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
for what, mode, rows in {cases!r}:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    ranks = parallel.Ranks("none", exact=True)
    ranks.join("cpu", 10)
    ranks.exact = False
    step(build(small, mode, what)[0], 1)
    before = now()
    model = build(config, mode, what)
    open("/proc/self/clear_refs", "w").write("5")
    step(model[0], rows)
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(what, mode, rows, peak - before, flush=True)
    os._exit(0)
"""
SHAPE = dict(block_size=512, vocab_size=4096, n_layer=2, n_head=6, n_kv_head=2, n_embd=384, ffn_dim=2016)
# Adapters take little: with more windows, what the libraries themselves take (15 MB) does not decide.
CASES = [(what, mode, rows) for what, rows in dict(fsdp=2, full=2, nf4=6).items() for mode in ("none", "full")]


@pytest.fixture(scope="module")
def measured():
    """
    {(what, mode, windows): bytes that a real step adds}: resident memory, from before the model to the step's peak.

    fp32, eager, of one process: FSDP2, all weights, and adapters beside a base in NF4. malloc gives back what
    is freed, or the peak would hold what nobody uses.
    """
    program = MEASURE.format(root=ROOT, config=SHAPE, adapters=ADAPTERS, cases=CASES)
    env = dict(os.environ, OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=env)
    found = {}
    for line in done.stdout.splitlines():
        what, mode, rows, size = line.split()
        found[what, mode, int(rows)] = int(size)
    assert set(found) == set(CASES), done.stderr[-2000:]
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of resident memory from /proc")
@pytest.mark.parametrize("what, mode, rows", CASES)
def test_predicted_memory_is_that_of_a_real_step(what, mode, rows, measured):
    config = ApertusConfig(**SHAPE)
    adapters, base = (ADAPTERS, "nf4") if what == "nf4" else (None, "fp32")
    if what == "fsdp":
        traced, _ = tracing.sharded(config, rows, mode, 1, 1, dtype=torch.float32, fused=False)
    else:
        traced, _ = tracing.on_one(config, rows, mode, adapters, base, dtype=torch.float32, fused=False)
    predicted = max(sum(kinds.values()) for kinds in traced.values())
    print(json.dumps(dict(what=what, mode=mode, measured=measured[what, mode, rows], predicted=predicted)))
    assert predicted == pytest.approx(measured[what, mode, rows], rel=0.1)


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
    assert "windows over 2 GPUs (--sequence_parallel=2), or" in short
    monkeypatch.setattr(plan, "sequence_parallel", 8)
    assert "over 16 GPUs (--sequence_parallel=16), which 8 kv heads do not allow: context" in say(kinds={"weights": 9e10})
    monkeypatch.setattr(plan, "parallel", "hsdp")
    short = say(kinds={"weights": 180e9}, shards=8)
    assert "take 175.0 GB" in short and "--hsdp_shard=16" in short and "block_size" not in short


def test_the_published_flops_of_the_70b():
    """6.74e24 for 15T tokens (report, sec. 6), which counts the masked half of attention."""
    found = runpy.run_path(os.path.join(ROOT, "configs", "70b.py"))
    fields = {field.name for field in dataclasses.fields(ApertusConfig)}
    config = ApertusConfig(**{name: found[name] for name in fields & found.keys()})
    with torch.device("meta"):
        flops = Apertus(config).flops_per_token(4096)
    masked = 6 * config.n_layer * config.n_head * config.head_dim * 4096
    assert (flops + masked) * 3_662_109_375 * 4096 == pytest.approx(6.74e24, rel=0.01)


@pytest.mark.parametrize("args, says", [
    (["--gpu=abacus"], "there is a100, h100"), (["--gpus=3"], "2 or 4 can"), (["--gpus=0"], "at least 1 GPU"), (["--base=nf4"], "--lora_r=16"),
    (["--gpus=1", "--lora_r=4", "--base=int3"], "there is fp32, bf16, int8, nf4"),
    (["--gpus=8", "--parallel=fsdp", "--lora_r=4"], "--gpus=1 or --parallel=ddp"),
    (["--gpus=2", "--gpu=4090"], "there is a100, h100"),
    (["--gpus=8", "--sequence_parallel=3"], "sequence_parallel=3 does not divide gpus=8: try 2 or 4"),
    (["--gpus=8", "--sequence_parallel=4"], "does not divide n_kv_head=2: try 2. Beyond n_kv_head: context"),
    (["--gpus=4", "--parallel=hsdp", "--hsdp_shard=3"], "try 2 or 4")])
def test_what_cannot_be_planned_is_told_in_one_line(quick, args, says):
    done = quick(*args)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_recomputing_costs_the_forward_pass_again():
    """In full that of all blocks, of a step of three passes, or of two where the weights are frozen."""
    width, depth = SMALL.n_embd, SMALL.n_layer
    block = 2 * width * width + 2 * width * width // 2 + 2 * width * SMALL.ffn_dim
    forward = depth * block + width * SMALL.vocab_size
    assert plan.recompute_cost(SMALL, "none") == 1
    assert plan.recompute_cost(SMALL, "full") == pytest.approx(1 + depth * block / (3 * forward), rel=1e-12)
    assert plan.recompute_cost(SMALL, "full", frozen=True) == pytest.approx(1 + depth * block / (2 * forward), rel=1e-12)
    up = depth * width * SMALL.ffn_dim
    assert plan.recompute_cost(SMALL, "selective") == pytest.approx(1 + up / (3 * forward), rel=1e-12)


def test_the_slower_of_compute_and_links_decides_the_speed(monkeypatch, capsys):
    """
    8 H100 at 40 % of 989 TFLOP/s and 48.3 GFLOPs a token: 8,190 tokens per second each, or what the links allow.

    At 360 GB/s they carry 7/8 of 48.3 GB per micro-batch in 0.117 s. Attention as the report counts it, masked pairs
    included, makes 7.73e23 FLOPs of 15T tokens.
    """
    for key, value in dict(gpus=8, mfu=0.4, block_size=4096, max_length=0, total_samples=3_662_109_375).items():
        monkeypatch.setattr(plan, key, value)
    traffic = {"allgather_base": 32.2e9, "reduce_scatter_base": 16.1e9}
    for rows, bound, speed in ((1, "compute", 8 * 8190), (0.1, "links", 8 * 409.6 / 0.1174)):
        found = {"none": (rows, dict.fromkeys(tracing.KINDS, 0), traffic)}
        mode, found, *_ = plan.print_speed(found, 8, plan.GPUS["h100"], ApertusConfig(), 48.3e9, False)
        assert mode == "none" and found == pytest.approx(speed, rel=1e-3)
        said = capsys.readouterr().out
        assert bound in said and "7.73e+23 as the report counts" in said


def test_all_to_alls_come_to_the_compute_of_a_part_of_the_window(monkeypatch, capsys):
    """1,024 tokens on each of 8 H100 take 0.125 s, and three quarters of 48 GB at 360 GB/s 0.1 s."""
    settings = dict(gpus=8, mfu=0.4, max_length=0, total_samples=1000, sequence_parallel=4)
    for key, value in settings.items():
        monkeypatch.setattr(plan, key, value)
    kinds = dict.fromkeys(tracing.KINDS, 0)
    found = {"none": (1, kinds, dict(exchange=48e9)), "full": (0, kinds, {})}
    _, speed, *_ = plan.print_speed(found, 8, plan.GPUS["h100"], ApertusConfig(), 48.3e9, False)
    assert speed == pytest.approx(8 * 1024 / (0.125 + 0.1), rel=1e-3)


def test_what_fits_leaves_the_reserve_free(quick):
    """A model whose weights alone take 1.4 GB of a card of 24: with 95 % kept free, 1.2 GB, it does not fit."""
    args = "--gpus=1", "--gpu=4090", "--vocab_size=131072", "--n_embd=256", "--picture="
    assert "does not fit" in quick(*args, "--reserve=0.95").stdout
    assert "does not fit" not in quick(*args).stdout


@pytest.fixture(scope="module")
def cards():
    return list(plan.table_of_cards())


def test_the_table_of_cards_in_the_readme_is_what_is_traced(cards):
    assert "\n".join(cards) in README


def test_the_table_of_six_commands_in_the_readme_is_what_is_traced():
    assert "\n".join(plan.table_of_fits()) in README


def test_adapters_beside_the_8b_take_what_its_peers_take(cards):
    """At most 19 GB beside bf16, 12.5 beside int8, 9.5 beside NF4; published recipes with 4 bits say 8.7 to 16."""
    peaks = [float(cell.split()[0]) for cell in re.split("  +", cards[1])[2:]]
    assert all(peak <= most for peak, most in zip(peaks, (19, 12.5, 9.5)))


def test_a_fine_tuning_on_one_card(quick, tmp_path):
    """The shape is that of the published start model, without a network; what does not fit is told what would."""
    plan_of = ["configs/sft_8b.py", "--gpus=1", "--gpu=4090"]
    done = script("tools.plan", *plan_of, "--lora_r=16", "--base=nf4", f"--picture={tmp_path / 'plan.png'}")
    assert done.returncode == 0, done.stderr
    assert "39.8M of them adapters beside a base in nf4" in done.stdout and "on 1 x 4090 (24 GB" in done.stdout
    assert "-> --recompute=selective --micro_batch=2" in done.stdout and "days" in done.stdout
    assert (tmp_path / "plan.png").stat().st_size > 5000
    done = script("tools.plan", *plan_of, "--picture=")
    assert "-> does not fit: it takes 166.5 GB, and there are 22.1: " in done.stdout
    assert "--lora_r=16 --base=bf16 --recompute=full --micro_batch=1 takes 18.9" in done.stdout


def test_the_links_of_the_8b():
    """With bf16 gradients: 42 GB on 8 GPUs are 117 ms at 360 GB/s of NVLink, and 48 GB on 64 are 1.06 s at 45 GB/s."""
    n = 8_053_338_176
    traffic = {"allgather_base": 2 * 2 * n, "reduce_scatter_base": 2 * n}
    assert plan.seconds_of(traffic, 8, 8, 360, 45) == pytest.approx(0.117, rel=0.01)
    assert plan.seconds_of(traffic, 64, 8, 360, 45) == pytest.approx(1.06, rel=0.01)
