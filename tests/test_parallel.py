"""
engine/parallel.py, sequence.py, recompute.py and train.py on several processes: gloo, tiny models, forked from one
warm process (tests/faults/launch.py). Results of many ranks are compared with those of one process.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import ROOT, refused, same, script, weights
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from trained import data, log, steps  # noqa: F401

from engine import exit, parallel, sharding
from engine.recompute import recompute_activations
from model import Apertus, ApertusConfig, Block
from weights import lora

# The learning rate is chaotic on purpose: small differences grow, and the text decides how fast. Goldfish with k = 2
# drops half of the tokens, a different share on each rank. Clipping is off, as it would hide a wrong factor. SwiGLU:
# xIELU's slope jumps left of 0.
CHAOTIC = "--activation=swiglu --lr=1e-2 --goldfish_k=2 --total_samples=80 --n_kv_head=4"
EXACT = "--exact --micro_batch=2 --alpha_warmup=30 --total_samples=40"


def arguments(data, out, args):
    return f"""configs/tiny.py --data={data} --out={out} --n_layer=1 --last_eval_windows=8 --warmup_samples=0
        --decay_samples=0 --checkpoint_every=5 --keep_checkpoints=0 --eval_every=5 {args}""".split()


@pytest.fixture(scope="module")
def train(launch, data):
    """train(ranks, out, args): train, which must succeed. Returns the run folder; 0 ranks: without a launcher."""

    def train(ranks, out, args):
        codes, text = launch(ranks, *arguments(data, out, args), logs=f"{out}.log")
        assert set(codes) == {0}, text[-3000:]
        return out

    return train


@pytest.fixture(scope="module")
def alone(train, data):
    return log(train(0, f"{data}-alone", CHAOTIC))


@pytest.mark.parametrize(
    "ranks, args",
    [
        (4, "--parallel=hsdp --hsdp_shard=2 --micro_batch=2 --recompute=selective --sample_every=9"),
        (4, "--parallel=hsdp --hsdp_shard=2 --recompute=full --sequence_parallel=2 --micro_batch=2"),
    ],
)
def test_every_way_to_spread_a_step_has_the_losses_and_norms_of_one_process(train, alone, tmp_path, ranks, args):
    shared = log(train(ranks, tmp_path / "run", f"{CHAOTIC} {args}"))
    for one, other in zip(alone, shared, strict=True):
        for name, bound in dict(loss=2e-6, val_loss=2e-6, grad_norm=5e-5 * one.get("grad_norm", 0)).items():
            assert other.get(name, 0) == pytest.approx(one.get(name, 0), abs=bound)
        for name in ("step", "tokens", "kept", "lr"):
            assert one.get(name) == other.get(name)


def test_exact_mode_has_the_same_bits_on_1_and_4_ranks(train, tmp_path):
    """test_matrix.py and tests/faults resume such runs on other numbers of ranks."""
    one = train(0, tmp_path / "one", EXACT)
    four = train(4, tmp_path / "four", f"{EXACT} --parallel=hsdp --hsdp_shard=2")
    assert same(weights(one), weights(four))
    losses, same_losses = ([entry["loss"] for entry in log(run, "loss")] for run in (one, four))
    assert losses == same_losses
    assert len(losses) == 5


def test_a_window_over_ranks_has_the_loss_and_all_gradients_of_the_whole_one(launch, tmp_path):
    codes, text = launch(4, script="split.py", logs=tmp_path / "log")
    assert codes == [0] * 4, text[-3000:]


# A script for two ranks; an AssertionError fails the test.
GATHERS = """
import torch
from tiny import small
from torch.utils._python_dispatch import TorchDispatchMode
from engine import sharding
from engine.exit import orderly_exit
from engine.parallel import Ranks, shard_model

class Gathers(TorchDispatchMode):
    number = 0
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.number += "allgather" in str(op)
        return op(*args, **(kwargs or {}))

with orderly_exit():
    ranks = Ranks("fsdp")
    ranks.join("cpu", 60)
    with torch.device("meta"):
        model = small(n_layer=3)
    shard_model(model, ranks, "cpu")
    sharding.draw(model, 1)
    idx = torch.arange(64).view(2, 32)
    for _ in range(2):
        with Gathers() as gathers:
            model.loss(idx, idx + 1).backward()
        assert gathers.number == 8, gathers.number
    ranks.leave()
"""


def test_a_micro_batch_gathers_the_embedding_and_the_head_once_and_each_block_twice(launch, tmp_path):
    """By hand, for three blocks, in two steps: the head stays gathered until backward, which needs no embedding."""
    (tmp_path / "gathers.py").write_text(GATHERS)
    codes, text = launch(2, script=tmp_path / "gathers.py", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]


# A script for four ranks; an AssertionError fails the test.
SAVES = """
import os, sys
import safetensors
import torch
from engine import checkpoint, restore, sharding
from engine.exit import orderly_exit
from engine.parallel import Ranks, shard_model
from tiny import small

opened, safe_open = [], safetensors.safe_open
def counted(filename, **how):
    opened.append(os.path.basename(filename))
    return safe_open(filename, **how)
safetensors.safe_open = counted

with orderly_exit():
    ranks = Ranks("hsdp", hsdp_shard=2)
    ranks.join("cpu", 60)
    with torch.device("meta"):
        model = small()
    shard_model(model, ranks, "cpu")
    sharding.draw(model, 1)
    tensors = checkpoint.tensors_of(model)
    checkpoint.write(sys.argv[1], 1, tensors, {}, 1, 0, ranks.save_group)
    path = f"{sys.argv[1]}/step-00000001"
    files = {name[:11] for name in os.listdir(path) if name.startswith("shard")}
    assert files == {"shard-00001", "shard-00002"}, files
    before = [t.to_local().clone() for t in tensors.values()]
    for p in model.parameters():
        p.detach().to_local().zero_()
    opened.clear()
    restore.load_checkpoint(path, model, group=ranks.save_group)
    assert all(t.to_local().equal(old) for t, old in zip(tensors.values(), before))
    own = {f"shard-0000{1 + ranks.rank % 2}"}
    assert ranks.is_main or {name[:11] for name in opened} == own, opened
    ranks.leave()
"""


def test_one_copy_of_the_model_writes_a_checkpoint_and_one_rank_opens_all_its_files(launch, tmp_path):
    """Two copies of two ranks: each rank but the first opens the files that hold its rows."""
    (tmp_path / "saves.py").write_text(SAVES)
    codes, text = launch(4, tmp_path / "ckpt", script=tmp_path / "saves.py", logs=tmp_path / "log")
    assert codes == [0] * 4, text[-2000:]


# The launcher's number of processes, the flags, and words of the error.
REFUSED = [
    (2, "--parallel=none", "2 processes were started and parallel=none is one"),
    (2, "--parallel=ddp --exact", "take --parallel=fsdp"),
    (2, "--parallel=fsdp --exact --micro_batch=8", "not a multiple of micro_batch=8 on each of 2 processes"),
    (3, "--parallel=fsdp", "micro_batch=4 on each of 3 processes"),
    (4, "--parallel=hsdp --hsdp_shard=3", "hsdp_shard=3 does not divide processes=4: take a"),
    (4, "--parallel=fsdp --sequence_parallel=0", "sequence_parallel=0 does not divide"),
    (4, "--parallel=fsdp --sequence_parallel=4 --n_kv_head=2", "sequence_parallel=4 does not divide n_kv_head=2: take"),
    (2, "--parallel=fsdp --sequence_parallel=2 --block_size=63", "does not divide block_size=63"),
    (2, "--parallel=fsdp --sequence_parallel=2 --exact", "sums over a split window round differently"),
]


@pytest.mark.parametrize("ranks, args, says", REFUSED)
def test_what_cannot_work_is_told_before_any_process_is_met(data, monkeypatch, tmp_path, ranks, args, says):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(os, "_exit", sys.exit)
    refused(script("train.py", *arguments(data, tmp_path / "run", args)), says)


def test_torchruns_restarts_on_several_nodes_want_stores_of_their_own(monkeypatch):
    """Its agents count their restarts apart, so that a prefix by that count would differ."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ValueError, match="only with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        parallel.open_store(several_nodes=True, wait=None)


def test_a_rank_takes_the_gpu_of_its_number_on_this_node(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ranks = parallel.Ranks()
    assert [*map(ranks.local_device, ("cuda", "cpu", "mps"))] == ["cuda:0", "cpu", "mps"]
    ranks.local_rank = 1
    with pytest.raises(ValueError, match="process 1 of this node has no GPU of its own: there are 1"):
        ranks.local_device("cuda")
    with pytest.raises(ValueError, match="device=mps is one GPU for one process, without fp64"):
        parallel.Ranks(exact=True).local_device("mps")


def test_an_error_of_nccl_is_a_lost_rank_if_it_says_so():
    """nccl.h: ncclRemoteError. All other errors keep their traceback, since their cause is in its later lines."""
    assert exit.LOST.search("NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error")
    assert not exit.LOST.search("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO")


# Each rank writes down that all have met. In the first round the second one dies while the first hangs.
MEETS = """
import os, sys, time
from engine.exit import orderly_exit
from engine.parallel import Ranks
with orderly_exit():
    ranks = Ranks("ddp")
    ranks.join("cpu", 20)
    assert ranks.all_reduce(1) == [2]
    with open(f"{sys.argv[1]}/met-{ranks.rank}", "a") as file:
        print("met", file=file)
    if open(file.name).read() == "met\\n":
        time.sleep(1)
        os.kill(os.getpid(), 9 * ranks.rank)
        time.sleep(100)
    ranks.leave()
"""


@pytest.mark.slow
def test_two_nodes_meet_again_after_the_rank_of_one_has_died(tmp_path):
    """Two agents of torchrun on this machine, of which the second counts no restart."""
    (tmp_path / "meets.py").write_text(MEETS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        _, port = free.getsockname()
    command = f"""-m torch.distributed.run --nnodes=2 --nproc_per_node=1 --max-restarts=1 --rdzv_backend=c10d
        --rdzv_endpoint=localhost:{port} {tmp_path}/meets.py {tmp_path}"""
    env = dict(PYTHONPATH=ROOT, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", GLOO_SOCKET_IFNAME="lo")
    agents = [subprocess.Popen([sys.executable, *command.split()], env=os.environ | env) for _ in range(2)]
    assert [agent.wait(100) for agent in agents] == [0, 0]
    assert [(tmp_path / f"met-{rank}").read_text() for rank in (0, 1)] == ["met\n" * 2] * 2


# A save of the 8B writes 129 GB; torchrun kills 30 seconds after SIGTERM unless --shutdown-timeout says otherwise.
SLOW_SAVE = """
import runpy, time
from engine import checkpoint
def write(*args, write=checkpoint.write):
    time.sleep(40)
    write(*args)
checkpoint.write = write
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.fixture
def torchrun(tmp_path):
    """torchrun(script, *args): the documented line, on two ranks: its process, and a function that reads its log."""
    page = Path(ROOT, "docs/scale.md").read_text()
    [node] = re.findall('^NODE="(.*)"$', page, re.M)
    [line] = [line for line in page.splitlines() if "train.py configs/node.py" in line]
    line = line.replace("$NODE", node)
    start_of_line = line.partition("train.py")[0].replace("=8", "=2").replace("out/node", f"{tmp_path}/run")
    start_of_line = start_of_line.replace(" torchrun ", f" {sys.executable} -m torch.distributed.run ")
    started = []

    def start(script, *args):
        with open(tmp_path / "log", "w") as out:
            command = [*start_of_line.split(), script, *args]
            env = os.environ | dict(PYTHONPATH=ROOT)
            how = dict(cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
            started.append(subprocess.Popen(command, **how))
        return started[-1], (tmp_path / "log").read_text

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_torchrun_waits_for_a_save_of_forty_seconds(data, tmp_path, torchrun):
    train = arguments(data, tmp_path / "run", "--total_samples=99999 --parallel=fsdp --checkpoint_every=0")
    (tmp_path / "slow.py").write_text(SLOW_SAVE)
    process, text = torchrun(tmp_path / "slow.py", *train)
    while "10/" not in text():
        assert process.poll() is None, text()
        time.sleep(1)
    os.killpg(process.pid, signal.SIGTERM)  # and nothing starts it again
    process.wait(90)
    assert "stopped as asked after step" in text(), text()
    [saved] = steps(tmp_path / "run")
    done = script("train.py", *train, "--parallel=none", "--resume", f"--total_samples={8 * saved + 8}")
    assert done.returncode == 0 and steps(tmp_path / "run") == [saved, saved + 1]


# The second rank dies in step 9, and once started again in step 19.
DIES = """
import os, runpy, signal
from engine.run import Run
def begin_step(self, begin_step=Run.begin_step):
    step = begin_step(self)
    if self.ranks.rank == 1 and step in (9, 19) and not os.path.exists(f"{self.out}-died-{step}"):
        open(f"{self.out}-died-{step}", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return step
Run.begin_step = begin_step
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_whose_rank_has_died_twice_ends_as_if_undisturbed(data, tmp_path, torchrun):
    how = "--exact --micro_batch=2 --total_samples=200"
    (tmp_path / "dies.py").write_text(DIES)
    train = arguments(data, tmp_path / "run", f"{how} --parallel=fsdp --resume")
    process, text = torchrun(tmp_path / "dies.py", *train)
    assert process.wait(120) == 0 and text().count("resumed from") == 2, text()
    whole = script("train.py", *arguments(data, tmp_path / "whole", how))
    assert whole.returncode == 0 and same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


# -----------------------------------------------------------------------------
# a model of two layers in this process

SMALL = ApertusConfig(block_size=8, vocab_size=33, n_layer=2, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24)
IDX = torch.arange(16).view(2, 8)


@pytest.fixture
def one_shard():
    """The ranks of a single process in exact mode."""
    ranks = parallel.Ranks(exact=True)
    ranks.join("cpu", 10)
    assert torch.are_deterministic_algorithms_enabled() and torch._inductor.config.deterministic
    yield ranks
    ranks.leave()
    torch.use_deterministic_algorithms(False)
    torch._inductor.config.deterministic = False


@pytest.mark.parametrize("exact, dtype", [(True, torch.float32), (False, torch.bfloat16)])
def test_fsdp_sends_weights_in_the_activations_dtype_and_adds_after_each_micro_batch_unless_exact(
    one_shard, exact, dtype
):
    """
    Gradients are bit-exact with one process, also the embedding's, where adding a frequent token in bf16 loses much. A
    rank that kept unsharded gradients until the last micro-batch would need 282 GB at 70B.
    """
    with torch.device("meta"):
        model = Apertus(SMALL)
    model.dtype = dtype
    parallel.shard_model(model, one_shard, "cpu")
    sharding.draw(model, 5)
    whole = Apertus(SMALL, 5)
    whole.dtype = dtype
    pairs = [*zip(model.parameters(), whole.parameters())]
    assert all(p.full_tensor().equal(q) for p, q in pairs)
    sent, added = set(), []
    model.model.layers[0].register_forward_pre_hook(lambda block, _: sent.update(p.dtype for p in block.parameters()))
    one_shard.exact = exact
    for last in (False, True):
        parallel.set_gradient_sync(model, one_shard, last)
        for some in model, whole:
            some.loss(IDX % 4, IDX).backward()
        added.append(all(p.grad is not None for p in model.parameters()))
    assert added == [not exact, True] and sent == {dtype}
    for p, q in pairs:
        assert p.grad.full_tensor().equal(q.grad)


class Work(TorchDispatchMode):
    """Counts matrix products, by the shape of the right factor, and calls of attention."""

    def __init__(self):
        super().__init__()
        self.done = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.mm.default:
            self.done[tuple(args[1].shape)] += 1
        self.done["attention"] += "attention" in str(op) or op == torch.ops.aten.bmm.default
        return op(*args, **(kwargs or {}))


def gradients(model):
    model.loss(IDX, (IDX + 1) % 33, doc=IDX // 5).backward()
    return [p.grad for p in model.parameters()]


MODES = "none", "cheap", "selective", "full"


def test_what_each_mode_recomputes_and_that_gradients_keep_their_bits():
    """By hand, for a block 16 wide with two query heads, one key head, up and down 24 wide, an adapter of rank 4."""
    done, grads = {}, {}
    for mode in MODES:
        adapters = dict(r=4, lora_alpha=8, target_modules=["q_proj"])
        model = lora.add_lora(Apertus(SMALL), adapters).requires_grad_()
        lora.init_lora(model, 3)
        recompute_activations(model, mode)
        with Work() as work:
            grads[mode] = gradients(model)
        done[mode] = work.done
    again = {(4, 16)}
    for mode, more in zip(MODES[1:], ([], [(16, 24)], [(16, 16), (16, 8), (16, 4), "attention"])):
        again |= {*more}
        assert set(done[mode] - done["none"]) == again
        assert all(map(torch.equal, grads["none"], grads[mode]))


def test_recomputed_blocks_are_compiled_whole():
    """torch.compile skips torch's own files: a bare checkpoint() around a block would compile 7 of 47 operations."""
    sizes = []
    for mode in ("none", "selective", "full"):
        torch._dynamo.reset()
        model, backend = Apertus(SMALL), EagerAndRecordGraphs()
        recompute_activations(model, mode)
        for block in model.model.layers:
            block.compile(backend=backend)
        gradients(model)
        sizes.append(
            sum(
                len(part.graph.nodes)
                for graph in backend.graphs
                for part in graph.modules()
                if isinstance(part, torch.fx.GraphModule)
            )
        )
    torch._dynamo.reset()
    assert min(sizes) >= sizes[0] > 40


@pytest.mark.slow
def test_blocks_in_shards_that_are_recomputed_compile_once_for_training_validation_and_samples(
    data, tmp_path, monkeypatch
):
    """One rank in shards (--exact), two micro-batches a step; validation and a sample follow the second step."""
    backend, compile_module = CompileCounterWithBackend("aot_eager"), torch.nn.Module.compile
    monkeypatch.setattr(Block, "compile", lambda self, **how: compile_module(self, backend=backend, **how))
    for compiled in (True, False):
        flags = f"""{CHAOTIC} --exact --total_samples=32 --n_layer=2 --recompute=cheap --eval_every=2 --sample_every=2
            --optimizer=adamw --lr=1e-4 --checkpoint_every=0 --compile={compiled}"""
        done = script("train.py", *arguments(data, tmp_path / str(compiled), flags))
        assert done.returncode == 0, done.stderr
    assert backend.frame_count == 1
    torch._dynamo.reset()
    for one, other in zip(*(log(tmp_path / name) for name in ("True", "False")), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
def test_without_compiled_blocks_xielu_is_compiled_once_for_all_lengths():
    """With each mode of recomputation. Sums over more than 4,096 numbers, which inductor splits on a CPU."""
    for mode in MODES:
        torch._dynamo.reset()
        counters.clear()
        model, eager = Apertus(SMALL), Apertus(SMALL)
        for some, parts in (model, "activations"), (eager, False):
            parallel.compile_model(some, mode, parts)
        for T in (90, 128, 100):
            idx = torch.arange(2 * T).view(2, T) % 33
            for some in model, eager:
                some.loss(idx, (idx + 1) % 33).backward()
            for one, other in zip(model.parameters(), eager.parameters()):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
        assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_a_block_with_a_break_in_its_graph_is_an_error(monkeypatch):
    monkeypatch.setattr("model.attend", print)
    model = Apertus(SMALL)
    parallel.compile_model(model, compiled=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(IDX)
