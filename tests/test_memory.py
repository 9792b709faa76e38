"""
engine/memory.py against a real step, what torch's allocator took of an H200, and the arithmetic of the report's 8B; and
what a run says before it allocates.
"""
import os
from types import SimpleNamespace

import pytest
import torch

from ademamix import build_optimizer
from conftest import ROOT
from configurator import read_config
from engine import memory
from model import Apertus, ApertusConfig
from posttrain import lora
from posttrain.common import shapes_of
from tools import plan

EIGHT = plan.published("8b")
H200, H100 = 143_771 * 2**20, 81_559 * 2**20           # what nvidia-smi says they have
ALONE = SimpleNamespace(mode="none", sharded=False)
NODE = SimpleNamespace(mode="fsdp", sharded=True, shard=8)


@pytest.mark.parametrize("optimizer, state_dtype", [
    ("ademamix", "float32"), ("ademamix", "bfloat16"), ("adamw", "float32")])
def test_weights_gradients_and_states_are_those_of_a_step(optimizer, state_dtype):
    """After one real step: the bytes of the parameters, of their gradients and of all states but the step."""
    model = Apertus(ApertusConfig(block_size=8, vocab_size=64, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=96))
    opt = build_optimizer(
        model, optimizer, 1e-3, (0.9, 0.999, 0.99), 8.0, 1e-8, 0.0, 1, 1, compile=False, state_dtype=state_dtype)
    model(torch.zeros(1, 8, dtype=torch.long))[0].sum().backward()
    opt.step()
    states = [t for state in opt.state.values() for name, t in state.items() if name != "step"]
    found = dict(weights=list(model.parameters()), gradients=[p.grad for p in model.parameters()], states=states)
    wanted = {kind: sum(t.nbytes for t in tensors) for kind, tensors in found.items()}
    assert memory.held(model, optimizer, state_dtype) == wanted


def asked(monkeypatch, has, rows, ranks=ALONE, shape=EIGHT, adapters=None, base="fp32", **settings):
    """What check() says of a step of bf16 on a device of so many bytes; an error as its text."""
    monkeypatch.setattr(memory, "memory_of", lambda device: has)
    config = dict(optimizer="ademamix", state_dtype="float32", recompute="none", init_from="", lora_r=0) | settings
    model = shapes_of(shape, adapters, base)
    try:
        return memory.check(model, config, rows, shape.block_size, ranks, "gpu", torch.bfloat16)
    except ValueError as error:
        return f"refused: {error}"


def test_the_8b_does_not_fit_on_one_gpu_and_the_flags_that_it_is_told_do(monkeypatch):
    """20 bytes for each of 8,053,338,176 parameters are 161.1 GB of the 150.8 that an H200 has, and 16 are 128.9."""
    said = asked(monkeypatch, H200, 4)
    assert said.startswith("refused: a step takes about 245.8 GB (weights 32.2, gradients 32.2, states 96.6, ")
    assert "gpu has 150.8: --state_dtype=bfloat16 --recompute=selective --micro_batch=1 takes 138.1" in said
    now = dict(state_dtype="bfloat16", recompute="selective")
    assert asked(monkeypatch, H200, 1, **now).startswith("a step takes about 138.1 GB")


def test_what_an_allocator_took_of_one_h200_is_never_refused(monkeypatch):
    """GiB that torch's own allocator reached for whole 8B steps, of 140.4: the sum is less, and by at most 6 %."""
    for how, rows, took in (
            (dict(optimizer="adamw", recompute="full"), 1, 129.4),
            (dict(state_dtype="bfloat16", recompute="full"), 1, 128.4),
            (dict(state_dtype="bfloat16", recompute="full"), 4, 132.4),
            (dict(state_dtype="bfloat16", recompute="selective"), 2, 137.0)):
        said = asked(monkeypatch, H200, rows, **how)
        summed = float(said.split("about ")[1].split()[0]) / 2**30 * 1e9
        assert 0.94 * took < summed < took


def test_eight_gpus_of_80_gb_want_a_micro_batch_of_two(monkeypatch):
    assert asked(monkeypatch, H100, 4, NODE).endswith("gpu has 85.5: --micro_batch=2 takes 64.4")
    assert asked(monkeypatch, H100, 2, NODE).startswith("a step takes about 64.4 GB")
    assert asked(monkeypatch, H200, 4, NODE).startswith("a step takes about")


def test_where_no_flag_helps_it_says_how_many_gpus_do_and_of_a_start_model_adapters(monkeypatch):
    said = asked(monkeypatch, H100, 4)
    assert said.endswith("in shards on 4 of them, --parallel=fsdp --recompute=full --micro_batch=1 takes 45.7")
    said = asked(monkeypatch, 24e9, 4, init_from="swiss-ai/Apertus-8B-2509")
    assert said.endswith("; or train adapters, --lora_r=16 --base=bf16")
    adapters = lora.settings_of(16, 32, "all")
    said = asked(monkeypatch, 24e9, 1, adapters=adapters, base="bf16", lora_r=16, init_from="x", recompute="full")
    assert said.startswith("a step takes about 19.1 GB")
    assert asked(monkeypatch, 1e9, 1).endswith("take a shorter --block_size, or a larger device")
    assert asked(monkeypatch, None, 4) == ""               # how much a device has may not be known


def test_another_process_on_the_gpu_is_told_from_a_gpu_too_small(monkeypatch):
    """A teacher that this process holds already is no other process, but what it takes is gone."""
    monkeypatch.setattr(memory, "memory_of", lambda device: 100e9)
    model, config = shapes_of(plan.published("1b5")), dict(
        optimizer="ademamix", state_dtype="float32", recompute="full", init_from="", lora_r=0)
    for name, value in dict(reserved=5e9, allocated=4e9).items():
        monkeypatch.setattr(torch.cuda, f"memory_{name}", lambda device, value=value: value)
    free = [90e9]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 100e9))

    def check():
        return memory.check(model, config, 1, 4096, ALONE, "cuda:0", torch.bfloat16)
    assert check().endswith("and cuda:0 has 91.0")
    free[0] = 20e9
    with pytest.raises(ValueError, match="cuda:0 has 21.0 of its 100.0 free: another process is there .nvidia-smi"):
        check()


def test_ddp_sends_gradients_in_buckets_of_its_own():
    config = dict(optimizer="ademamix", state_dtype="float32", recompute="full")
    model = shapes_of(EIGHT)
    alone, ddp = (
        memory.of_step(model, config, 1, 4096, SimpleNamespace(mode=mode), 2) for mode in ("none", "ddp"))
    assert sum(ddp.values()) - sum(alone.values()) == 4 * 8_053_338_176


def test_the_config_for_one_gpu_fits_there_and_leaves_room(monkeypatch):
    """Behind configs/8b.py and configs/continue_8b.py, whose other settings it must not touch."""
    found = read_config(os.path.join(ROOT, "configs", "8b_one_gpu.py"))
    settings = {name: found[name] for name in ("state_dtype", "recompute")}
    said = asked(monkeypatch, H200, found["micro_batch"], **settings)
    assert float(said.split("about ")[1].split()[0]) < 0.92 * H200 / 1e9
    assert found.keys() == {"out", "state_dtype", "recompute", "micro_batch", "eval_every", "checkpoint_every"}
