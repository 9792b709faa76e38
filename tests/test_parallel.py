"""
engine/parallel.py and train.py on several processes: gloo, the smallest sizes, forked from one warm process
(tests/faults/launch.py).

Many times over, to see whether they ever fail:

$ for i in $(seq 20); do python -m pytest -q tests/test_parallel.py tests/faults || break; done
"""
import json
import os
import platform
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import hardware, parallel
from engine.hardware import can_compile
from conftest import ROOT, script
from data import TokenDataset
from faults.launch import losses, sha_of
from faults.suite import Lab
import model as model_file
from model import Apertus, ApertusConfig
from schedule import batch_size, samples_at

CONSTANT = ["--warmup_samples=0", "--decay_samples=0"]
SILENT = ["--checkpoint_every=1000", "--eval_every=1000"]

# 10 steps at a learning rate that is chaotic on purpose: a small difference grows. Goldfish with k = 2 drops half of
# the tokens, and very unequally; there is no clipping, which would hide a factor. SwiGLU, since the slope of the
# published xIELU jumps by alpha_n within 1e-6 left of 0: the order of a sum decides there, and moved the gradient norm
# by 5e-4 to 5e-3 with four of eight seeds (SwiGLU's: 2e-5 at most).
CHAOTIC = ["--activation=swiglu", "--lr=1e-2", "--goldfish_k=2", "--grad_clip=0.0", "--total_samples=80",
           *CONSTANT, *SILENT]


@pytest.fixture(scope="module")
def lab(launch, tmp_path_factory):
    return Lab(launch, tmp_path_factory.mktemp("ranks"))


def trained(lab, ranks, run, *args, **how):
    """What a training run on so many ranks has said; 0: without a launcher. Each must end with exit code 0."""
    common = "configs/tiny.py", f"--data={lab.data}", "--n_layer=1", f"--out={run}"
    codes, text = lab.launch(ranks, *common, *args, logs=run + ".log", **how)
    assert set(codes) == {0}, text[-3000:]
    return text


def ended(lab, ranks, *args, name="run"):
    run = lab.fresh(name)
    trained(lab, ranks, run, "--dtype=float32", *args)
    return run


def entries(run):
    with open(run + "/log.jsonl", encoding="utf-8") as f:
        return [entry for entry in map(json.loads, f) if "loss" in entry]


@pytest.fixture(scope="module")
def alone(lab):
    return entries(ended(lab, 0, *CHAOTIC, name="alone"))


@pytest.mark.parametrize("ranks, args", [
    (2, ["--parallel=ddp"]),
    (4, ["--parallel=ddp", "--micro_batch=1"]),
    (2, ["--parallel=fsdp"]),
    (4, ["--parallel=fsdp", "--micro_batch=1"]),
    (4, ["--parallel=hsdp", "--hsdp_shard=2"]),
    (0, ["--micro_batch=1"]),
    (0, ["--micro_batch=8"]),
    (2, ["--parallel=fsdp", "--recompute=selective"]),
    (2, ["--parallel=ddp", "--sequence_parallel=2", "--micro_batch=2"]),
    (4, ["--parallel=hsdp", "--hsdp_shard=2", "--sequence_parallel=2", "--recompute=full"])])
def test_every_way_to_spread_a_step_gives_the_loss_and_the_norm_of_one_process(lab, alone, ranks, args):
    found = entries(ended(lab, ranks, *CHAOTIC, *args))
    assert len(found) == len(alone) == 10
    for one, other in zip(found, alone):
        assert one["loss"] == pytest.approx(other["loss"], rel=0, abs=2e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert (one["tokens"], one["kept"], one["lr"]) == (other["tokens"], other["kept"], other["lr"])


def test_exact_mode_ends_in_the_same_bits_on_1_2_and_4_processes_and_on_2_copies_of_2_shards(lab):
    args = "--exact", "--micro_batch=2", "--total_samples=240", "--decay_samples=0", *SILENT
    fsdp, hsdp = ["--parallel=fsdp"], ["--parallel=hsdp", "--hsdp_shard=2"]
    ways = enumerate([(0, []), (1, fsdp), (2, fsdp), (4, fsdp), (4, hsdp)])
    runs = [ended(lab, ranks, *args, *how, name=f"exact-{i}") for i, (ranks, how) in ways]
    assert len({sha_of(run) for run in runs}) == 1 and sha_of(runs[0])[1] == 30
    assert all(losses(run) == losses(runs[0]) for run in runs)


def test_exact_mode_in_fp8_ends_in_the_same_bits_on_1_and_2_processes(lab):
    """Scales are made of a micro-batch and of a whole matrix, so they are the same wherever it lies."""
    args = "--exact", "--fp8", "--micro_batch=2", "--total_samples=80", *CONSTANT, *SILENT
    runs = [ended(lab, ranks, *args, *how, name=f"fp8-{ranks}") for ranks, how in ((0, []), (2, ["--parallel=fsdp"]))]
    assert sha_of(runs[0]) == sha_of(runs[1]) and losses(runs[0]) == losses(runs[1])


needs_compiler = pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="no C++ compiler")


@pytest.mark.parametrize("args", [
    ["--parallel=ddp"], ["--parallel=fsdp", "--sequence_parallel=2"], ["--parallel=hsdp", "--hsdp_shard=1"],
    ["--parallel=fsdp", "--fp8"],
    pytest.param(["--parallel=ddp", "--compile"], marks=needs_compiler),
    pytest.param(["--parallel=fsdp", "--compile"], marks=needs_compiler)], ids=" ".join)
def test_two_processes_killed_and_resumed_end_in_the_same_bits(lab, args):
    """
    Eager, and compiled: blocks and optimizer. k steps, a new start from the checkpoint, n - k steps: the weights and
    losses of n.
    """
    warmups = "--alpha_warmup=10", "--beta3_warmup=10"
    args = [*args, "--total_samples=96", "--checkpoint_every=6", "--eval_every=1000", *warmups]
    whole = ended(lab, 2, *args, name="whole")
    run = lab.fresh("half")
    shutil.copytree(whole, run)
    shutil.rmtree(run + "/ckpt/step-00000012")             # as if killed after the checkpoint of step 6
    os.remove(run + "/summary.json")
    text = trained(lab, 2, run, "--dtype=float32", *args, "--resume")
    assert "step-00000006" in text and "running eagerly" not in text, text[-2000:]
    assert sha_of(run) == sha_of(whole) and losses(run) == losses(whole) and len(losses(run)) == 12


@pytest.mark.parametrize("P", [2, 4])
def test_a_window_over_ranks_has_the_loss_and_all_gradients_of_the_whole_one(launch, tmp_path, P):
    """
    Four ranks: documents cross the cuts, ranks keep unequal numbers of tokens, one of them none. 2e-5 of the largest in
    fp32, 1e-12 in fp64, with every recomputation, and traced by torch.compile without a graph break (tests/split.py).
    """
    codes, text = launch(4, P, tmp_path / "found", script=f"{ROOT}/tests/split.py", logs=tmp_path / "log")
    assert codes == [0] * 4, text[-3000:]
    for rank in range(4):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        assert len(found) == 8
        for claim, off in found.items():
            assert off <= (2e-5 if "float32" in claim else 1e-12), (claim, off)


def test_killed_and_resumed_with_another_split_it_ends_in_the_loss_of_one_process(lab):
    """30 steps with Goldfish by window: over 4 ranks until kill -9 of one, then over 2. The last loss to 2e-5."""
    run, alone = lab.fresh("split"), lab.fresh("whole")
    warmups = "--alpha_warmup=30", "--beta3_warmup=30"
    args = ["--n_kv_head=4", "--activation=swiglu", "--goldfish_scope=window", "--goldfish_k=3", "--parallel=fsdp",
            *CONSTANT, *SILENT, *warmups, "--total_samples=240", "--checkpoint_every=5"]
    trained(lab, 0, alone, *args, "--parallel=none")
    common = "configs/tiny.py", f"--data={lab.data}", "--n_layer=1", f"--out={run}", *args
    trial = lab.launch.start(4, *common, "--sequence_parallel=4", logs=run + ".log", fault="slow:0.02")
    while max(losses(run), default=0) < 12:
        assert None in trial.codes(), trial.text()[-3000:]
        time.sleep(0.02)
    trial.kill(trial.pids[2:3])
    trial.wait()
    text = trained(lab, 2, run, *args, "--sequence_parallel=2", "--resume")
    assert "resumed from" in text and "2 to a window" in text
    found, wanted = losses(run), losses(alone)
    assert len(found) == 30 and found[29] == pytest.approx(wanted[29], rel=0, abs=2e-5)
    one, other = (json.loads(open(f"{folder}/summary.json").read()) for folder in (run, alone))
    assert one["val_loss"] == pytest.approx(other["val_loss"], rel=0, abs=2e-5)


@pytest.mark.parametrize("ranks, args", [(0, []), (2, ["--parallel=ddp"])])
def test_the_picture_is_drawn_when_the_summary_is_written_and_the_other_ranks_have_gone(lab, tmp_path, ranks, args):
    """To draw 2.6 million steps may take longer than --timeout: no rank waits for it, and the summary comes first."""
    run, seen = lab.fresh("picture"), tmp_path / "seen"
    trained(lab, ranks, run, "--total_samples=24", *CONSTANT, *args, fault=f"picture:{seen}")
    assert json.loads((tmp_path / "seen").read_text()) == dict(summary=True, waiting=False)


def test_text_is_prepared_trained_on_and_sampled_where_there_is_no_posix(lab, tmp_path):
    """Windows as far as it can be had: fcntl, resource, SIGUSR2, SIGKILL, fork and their like are hidden."""
    text, data, run = tmp_path / "text.txt", tmp_path / "data", tmp_path / "run"
    text.write_text("\n\n".join(f"Line {i} of a text that is read on any system." for i in range(300)))
    for script, *args in (
            ("prepare.py", text, f"--out={data}", "--tokenizer=byte"),
            ("train.py", "configs/tiny.py", f"--data={data}", f"--out={run}", "--total_samples=24", *CONSTANT),
            ("sample.py", f"--init_from={run}", "--max_new_tokens=5")):
        codes, text = lab.launch(0, *args, script=script, logs=tmp_path / script, fault="windows")
        assert codes == [0], text[-3000:]
    assert (run / "summary.json").exists()


def test_a_run_is_alone_in_its_folder_where_there_is_no_posix(lab, tmp_path):
    args = ["configs/tiny.py", f"--data={lab.data}", "--n_layer=1", f"--out={tmp_path / 'run'}",
            "--total_samples=1000000", "--resume"]
    first = lab.launch.start(0, *args, logs=tmp_path / "first", fault="windows")
    try:
        while not losses(tmp_path / "run"):
            assert None in first.codes(), first.text()
        codes, text = lab.launch(0, *args, logs=tmp_path / "second", fault="windows")
    finally:
        first.kill(first.pids)
        first.wait()
    assert codes == [2] and "another run is writing there (process" in text, text


@pytest.mark.parametrize("imitated, real, want", [(True, False, torch.float32), (True, True, torch.bfloat16)])
def test_bf16_that_a_gpu_only_imitates_is_not_chosen(monkeypatch, imitated, real, want):
    """torch says yes of a T4 or V100 unless it is asked for hardware; no CUDA ran here."""
    def supported(including_emulation=True):
        return imitated if including_emulation else real
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert hardware.pick_dtype("auto", "cuda") == hardware.pick_dtype("auto", "cuda:1") == want
    assert hardware.pick_dtype("bfloat16", "cuda") == torch.bfloat16


def test_exact_on_mps_is_told_since_it_has_no_fp64():
    with pytest.raises(ValueError, match="exact=True adds in fp64, which mps does not have: take --device=cpu"):
        parallel.Ranks(exact=True).place("mps")
    assert parallel.Ranks().place("mps") == "mps"


def test_any_history_of_world_sizes_takes_every_sample_once_and_in_order():
    """With a batch ramp, for 200 random histories."""
    draw = random.Random(0)
    for _ in range(200):
        start, ramp = 2 ** draw.randrange(3, 6), draw.choice([None, draw.randrange(1, 400)])
        step, taken = 0, []
        while step < 30:                                   # each launch: some steps on some number of ranks
            ranks = 2 ** draw.randrange(0, 4)
            for step in range(step, step + draw.randrange(1, 6)):
                first = samples_at(step, start, ramp)
                n = batch_size(first, start, ramp)
                for rank in range(ranks):                  # as train.py's fetch
                    taken += range(first + rank * (n // ranks), first + (rank + 1) * (n // ranks))
            step += 1
        assert taken == list(range(len(taken)))


def test_the_windows_that_ranks_take_put_together_are_those_of_one_process(lab):
    data = TokenDataset(lab.data, "train", 32)
    parts = zip(*(data.batch(5 + 2 * rank, 2) for rank in range(4)))
    assert all(torch.equal(whole, torch.cat(part)) for whole, part in zip(data.batch(5, 8), parts))


def test_shards_are_initialised_to_the_weights_of_one_process_without_holding_them(monkeypatch):
    config = ApertusConfig(block_size=8, vocab_size=33, n_layer=2, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24)
    ranks = parallel.Ranks("none", exact=True)
    ranks.join("cpu", 10)
    try:
        with torch.device("meta"):
            model = Apertus(config, 5)
        parallel.spread(model, ranks, "cpu", 5)
        whole = dict(Apertus(config, 5).named_parameters())
        assert all(torch.equal(p.full_tensor(), whole[name]) for name, p in model.named_parameters())
    finally:
        ranks.leave()


def test_shards_that_a_checkpoint_fills_are_not_drawn(monkeypatch):
    config = ApertusConfig(block_size=8, vocab_size=33, n_layer=2, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24)
    drawn = []
    monkeypatch.setattr(model_file, "draw", lambda name, shape, *how: drawn.append(name) or torch.zeros(shape))
    ranks = parallel.Ranks("none", exact=True)
    ranks.join("cpu", 10)
    try:
        for seed, count in ((None, 0), (5, 2 + 2 * 6)):     # embedding, head, and six matrices a layer
            with torch.device("meta"):
                model = Apertus(config, seed)
            parallel.spread(model, ranks, "cpu", seed)
            assert len(drawn) == count and not any(p.is_meta for p in model.parameters())
    finally:
        ranks.leave()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_activations_change_no_bit_of_the_gradients(mode):
    config = ApertusConfig(block_size=16, vocab_size=33, n_layer=2, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24)
    idx, doc, grads = torch.arange(32).view(2, 16), torch.arange(32).view(2, 16) // 5, []
    for how in ("none", mode):
        model = Apertus(config)
        parallel.recompute_activations(model, how)
        model(idx, (idx + 1) % 33, doc=doc)[1].backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("mode, at_most", [("selective", 0.62), ("full", 0.35)])
def test_recomputing_stores_less(mode, at_most):
    """Bytes that autograd keeps between forward and backward, of blocks of Apertus' proportions."""
    config = ApertusConfig(block_size=128, vocab_size=64, n_layer=4, n_head=4, n_kv_head=1, n_embd=64, ffn_dim=336)
    kept, idx = {}, torch.zeros(1, 128, dtype=torch.long)
    for how in ("none", mode):
        model, seen = Apertus(config), {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        parallel.recompute_activations(model, how)

        def pack(t):
            if t.untyped_storage().data_ptr() not in weights:
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(idx, idx)[1]
        kept[how] = sum(seen.values())
        loss.backward()
    assert kept[mode] < at_most * kept["none"]


def operations(module):
    """How many operations a captured graph has, with those of the graphs inside it."""
    graphs = [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    return sum(node.op == "call_function" for graph in graphs for node in graph.nodes)


def test_recomputed_blocks_are_compiled_whole_and_change_no_bit_of_the_gradients():
    """
    A graph has no fewer operations with recomputation than without. Where torch's checkpoint() stands around a block
    and nothing of ours around that, 7 of 47 are left: torch.compile skips torch's own files, and all that they call.
    """
    config = ApertusConfig(block_size=16, vocab_size=33, n_layer=2, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24)
    idx, found = torch.arange(32).view(2, 16), {}
    for mode in ("none", "selective", "full"):
        torch._dynamo.reset()
        model, captured = Apertus(config), []

        def backend(graph, inputs):
            captured.append(operations(graph))
            return graph
        parallel.recompute_activations(model, mode)
        model.compile_blocks(backend=backend)
        model(idx, (idx + 1) % 33, doc=idx // 5)[1].backward()
        found[mode] = sum(captured), [p.grad for p in model.parameters()]
    torch._dynamo.reset()
    none, grads = found.pop("none")
    for captured, others in found.values():
        assert captured >= none > 40
        assert all(torch.equal(a, b) for a, b in zip(grads, others))


@torch._dynamo.config.patch(optimize_ddp=True)                # as torch has it
def test_ddp_cuts_no_compiled_block():
    """
    One graph for the blocks and one for the loss. DDP's own way cuts a block where 1 MiB of gradients is full, a matrix
    of the feed-forward here, into three.
    """
    config = ApertusConfig(block_size=8, vocab_size=33, n_layer=2, n_head=2, n_kv_head=1, n_embd=128, ffn_dim=2304)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    graphs, idx = [], torch.arange(8).view(1, 8)
    try:
        model = Apertus(config)
        net = parallel.spread(model, SimpleNamespace(mode="ddp", sharded=False), "cpu", 5)
        model.compile_blocks(backend=lambda graph, inputs: graphs.append(graph) or graph)
        net(idx, idx)[1].backward()
    finally:
        torch.distributed.destroy_process_group()
        torch._dynamo.reset()
    assert len(graphs) == 2


class Work(TorchDispatchMode):
    """Counts what is expensive: products by the shape of what is multiplied with, and attention."""

    def __init__(self):
        super().__init__()
        self.done = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in (torch.ops.aten.mm.default, torch.ops.apertus.linear.default):
            self.done[tuple(sorted(args[1].shape))] += 1
        self.done["attention"] += "attention" in str(op)
        return op(*args, **(kwargs or {}))


def test_selective_computes_only_wide_products_again_and_full_all_of_a_block():
    """By hand, for a block 16 wide with two heads, one of them for keys, and a feed-forward 24 wide."""
    config = ApertusConfig(block_size=8, vocab_size=33, n_layer=2, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24)
    idx, again = torch.arange(8).view(1, 8), {}
    for mode in ("none", "selective", "full"):
        model = Apertus(config)
        parallel.recompute_activations(model, mode)
        with Work() as work:
            model(idx, idx)[1].backward()
        again[mode] = work.done - again.get("none", Counter())
    q_and_out, k_and_v, up_and_down = (16, 16), (8, 16), (16, 24)
    assert set(again["selective"]) == {up_and_down}
    assert set(again["full"]) == {q_and_out, k_and_v, up_and_down, "attention"}


# How many processes a launcher says there are (0: there is none), the flags, and the words of the refusal.
REFUSED = [
    (0, ["--parallel=fsdp"], "wants a launcher: torchrun --nproc_per_node=2"),
    (0, ["--parallel=tp"], "there is none, ddp, fsdp, hsdp"),
    (3, ["--parallel=fsdp"], "batch_size=8 cannot be split over 3 processes: 2 or 4 can, or --batch_size=9"),
    (2, [], "2 processes were started and parallel=none is one"),
    (2, ["--parallel=ddp", "--exact"], "--parallel=fsdp"),
    (2, ["--parallel=fsdp", "--exact", "--micro_batch=8"],
     "4 each, is not a multiple of micro_batch=8: try --micro_batch=4"),
    (4, ["--parallel=hsdp", "--hsdp_shard=3"], "does not divide 4 processes: try 2 or 4"),
    (0, ["--recompute=some"], "there is none, selective and full"),
    (0, ["--sequence_parallel=2"], "does not divide 1 processes: try 1, or start a multiple of it"),
    (4, ["--parallel=fsdp", "--sequence_parallel=0"], "sequence_parallel=0 does not divide 4 processes"),
    (4, ["--parallel=fsdp", "--sequence_parallel=4"], "n_kv_head=2 cannot be split over sequence_parallel=4 ranks: 2"),
    (2, ["--parallel=fsdp", "--sequence_parallel=2", "--block_size=63"], "block_size=63 cannot be split"),
    (6, ["--parallel=fsdp", "--sequence_parallel=2"], "over 3 groups of 2 processes: 2 or 4 can, or --batch_size=9"),
    (2, ["--parallel=fsdp", "--sequence_parallel=2", "--exact"], "sums over a split window round otherwise")]
if not torch.cuda.is_available():
    REFUSED.append((2, ["--parallel=fsdp", "--device=cuda"], "is not here"))


@pytest.mark.parametrize("size, args, says", REFUSED)
def test_what_cannot_work_is_told_before_any_process_is_met(lab, monkeypatch, tmp_path, size, args, says):
    if size:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setattr(parallel.os, "_exit", sys.exit)
    done = script("train.py", "configs/tiny.py", f"--data={lab.data}", f"--out={tmp_path / 'run'}", *args)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_one_process_has_the_first_gpu_by_number(monkeypatch):
    """torch.cuda.set_device takes "cuda:0", and raises for "cuda": so did --exact without torchrun."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for ranks in (parallel.Ranks(exact=True), parallel.Ranks()):
        device = ranks.place("cuda")
        assert torch.device(device).index == 0
        assert ranks.place("cuda:1") == "cuda:1" and ranks.place("cpu") == "cpu"
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    parallel.Ranks().join(device, 10)
    assert taken == ["cuda:0"]


def test_srun_says_who_a_process_is(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    for key, value in dict(
            PROCID="5", NTASKS="8", LOCALID="1", STEP_TASKS_PER_NODE="4(x2)", JOB_ID="123456",
            LAUNCH_NODE_IPADDR="10.0.0.1").items():
        monkeypatch.setenv("SLURM_" + key, value)
    assert parallel.launched() == (5, 8, 1, 4)
    assert os.environ.pop("MASTER_ADDR") == "10.0.0.1"
    assert os.environ.pop("MASTER_PORT") == str(20000 + 123456 % 20000)
    ranks = parallel.Ranks("hsdp")
    os.environ.pop("MASTER_ADDR"), os.environ.pop("MASTER_PORT")
    assert (ranks.rank, ranks.size, ranks.shard, ranks.copies, ranks.first) == (5, 8, 4, 2, False)


def test_one_process_ignores_slurm(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0"), monkeypatch.setenv("SLURM_NTASKS", "8")
    assert (parallel.Ranks().size, parallel.Ranks().launched) == (1, False)
    monkeypatch.setenv("SLURM_NTASKS", "1")                # sbatch sets it for a script that is started without srun
    assert parallel.launched() is None


@pytest.mark.parametrize("n, near, says", [(12, 5, "4 or 6"), (12, 4, "4"), (4, 9, "4"), (7, 2, "1 or 7")])
def test_the_divisors_below_and_above_are_proposed(n, near, says):
    assert parallel.nearest_divisors(n, near) == says


def test_signals_are_noted_between_steps_and_mean_what_they_did_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with parallel.stop_signals() as caught:
        signal.raise_signal(signal.SIGTERM)
        assert caught == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def one_shard(monkeypatch):
    """one_shard(dtype): a model spread by FSDP2 over this one process, and its ranks."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    config = ApertusConfig(block_size=8, vocab_size=33, n_layer=2, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24)
    ranks = parallel.Ranks("none", exact=True)
    ranks.join("cpu", 10)

    def spread(dtype):
        with torch.device("meta"):
            model = Apertus(config, 5)
        model.dtype = dtype
        return parallel.spread(model, ranks, "cpu", 5)
    yield spread
    ranks.leave()


def test_exact_mode_asks_cublas_for_the_workspace_that_makes_it_deterministic(one_shard):
    """:4096:8 and :16:8 are the two that NVIDIA's documentation names; torch refuses to multiply without one."""
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")


@pytest.mark.parametrize("exact", [True, False])
def test_fsdp_reduces_after_each_micro_batch_unless_exact_and_between_nodes_once(one_shard, monkeypatch, exact):
    """A rank that kept whole gradients until the last one would need 282 GB at 70B."""
    net, idx, between_nodes = one_shard(torch.float32), torch.arange(16).view(2, 8), []
    monkeypatch.setattr(type(net), "set_requires_all_reduce", lambda net, on: between_nodes.append(on))
    reduced = []
    for last in (False, True):
        with parallel.gradients(net, SimpleNamespace(sharded=True, exact=exact), last):
            net(idx, idx)[1].backward()
        reduced.append(all(p.grad is not None for p in net.parameters()))
    assert reduced == [not exact, True] and between_nodes == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_travel_in_the_dtype_of_the_activations(one_shard, dtype):
    """In bf16 they are half as many bytes to send and to hold as the fp32 that is trained."""
    net, idx, gathered = one_shard(dtype), torch.arange(16).view(2, 8), set()
    block = net.model.layers[0]
    block.register_forward_pre_hook(lambda *_: gathered.update(p.dtype for p in block.parameters()))
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    net(idx, idx)
    assert gathered == {dtype}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc's malloc")
def test_memory_that_a_step_frees_is_there_for_the_next():
    """
    80 MB, freed and asked for again: the kernel's own count of the pages that it had to make. Without the option they
    are 10,240 of 20,480, each time.
    """
    hardware.keep_freed_memory()
    pages = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(5 << 20) for _ in range(4)]
        pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        del tensors
    assert pages[-1] < 1_000
