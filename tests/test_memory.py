"""
engine/memory.py against the report's 8B, against tensors after a real step, and against what torch's allocator took on
an H200; and the lines that a run prints.
"""
from types import SimpleNamespace

import pytest
import torch

from ademamix import build_optimizer
from engine import memory
from model import Apertus, ApertusConfig

H200, H100 = 143_771 * 2**20, 81_559 * 2**20           # bytes, by nvidia-smi
ALONE = SimpleNamespace(mode="none", sharded=False, first=True)
NODE = SimpleNamespace(mode="fsdp", sharded=True, shard=8, first=True)
SETTINGS = dict(optimizer="ademamix", state_dtype="float32", recompute="none")
N = 8_053_338_176                                      # parameters of the 8B, of which 131,072 x 4,096 are the head
HEAD = 131_072 * 4_096


@pytest.fixture(scope="module")
def eight():
    with torch.device("meta"):
        return Apertus(ApertusConfig())


@pytest.fixture
def asked(monkeypatch, capsys, eight):
    """asked(bytes of the GPU, rows, settings): the line, or the error, of a run with a step of the 8B in bf16."""
    def ask(has, rows, ranks=ALONE, free=None, device="cuda:0", **settings):
        monkeypatch.setattr(memory, "memory_of", lambda device: has)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free or has, has))
        run = SimpleNamespace(config=SETTINGS | settings, rows=rows, shape=eight.config, ranks=ranks, device=device,
                              dtype=torch.bfloat16)
        try:
            memory.check_run(run, lambda run: eight)
        except ValueError as error:
            return f"error: {error}"
        return capsys.readouterr().out.strip()
    return ask


@pytest.mark.parametrize("optimizer, state_dtype", [
    ("ademamix", "float32"), ("ademamix", "bfloat16"), ("adamw", "float32")])
def test_weights_gradients_and_states_are_those_after_a_step(optimizer, state_dtype):
    model = Apertus(ApertusConfig(block_size=8, vocab_size=64, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=96))
    opt = build_optimizer(
        model, optimizer, 1e-3, (0.9, 0.999, 0.99), 8.0, 1e-8, 0.0, 1, 1, compile=False, state_dtype=state_dtype)
    model.model.embed_tokens.requires_grad_(False)
    model(torch.zeros(1, 8, dtype=torch.long))[0].sum().backward()
    opt.step()
    states = [t for state in opt.state.values() for name, t in state.items() if name != "step"]
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    found = dict(weights=list(model.parameters()), gradients=gradients, states=states)
    wanted = {kind: sum(t.nbytes for t in tensors) for kind, tensors in found.items()}
    assert memory.held(model, optimizer, state_dtype) == wanted


@pytest.mark.parametrize("mode, numbers", [
    ("none", 2 * 21504 + 4 * 4096 + 3 * 4096 + 3 * 1024), ("selective", 4 * 4096 + 2 * 1024), ("full", 4096)])
def test_activations_are_those_of_the_table(eight, mode, numbers):
    takes = memory.of_step(eight, SETTINGS | dict(recompute=mode), 2, 4096, ALONE, 2)
    assert takes["activations"] == 2 * 2 * 4096 * (32 * numbers + 3 * 4096)


def test_the_head_or_a_block_is_the_peak(eight):
    """At most 2^27 logits, at 8 bytes, and 6 bytes a weight; of 64 windows a block has more. A frozen head has less."""
    def temporary(rows, ranks=ALONE, shards=1):
        return memory.of_step(eight, SETTINGS, rows, 4096, ranks, 2, shards)["temporary"]
    assert temporary(1) == 8 * 2**27 + 6 * HEAD
    block = 2 * 21504 * 4096 + 2 * 4096 * 4096 + 2 * 1024 * 4096 + 2 * 4096 + 2 * 128 + 2
    kept = 2 * 21504 + 7 * 4096 + 3 * 1024
    assert temporary(64) == pytest.approx(1.7 * 64 * 4096 * 2 * kept + 8 * block)
    assert temporary(64, NODE, 8) - temporary(64) == pytest.approx(2 * HEAD)
    eight.lm_head.requires_grad_(False)
    assert memory.of_step(eight, SETTINGS, 1, 64, ALONE, 2)["temporary"] > 8 * 64 * 131_072
    eight.model.layers[0].requires_grad_(False)
    assert memory.of_step(eight, SETTINGS, 1, 1024, ALONE, 2)["temporary"] == 8 * 2**26
    eight.requires_grad_(True)


def test_shards_divide_what_is_held_and_ddp_sends_gradients_in_buckets(eight):
    whole = memory.of_step(eight, SETTINGS, 1, 4096, ALONE, 2)
    assert [whole[kind] for kind in ("weights", "gradients", "states")] == [4 * N, 4 * N, 12 * N]
    parts = memory.of_step(eight, SETTINGS, 1, 4096, NODE, 2, 8)
    assert parts["states"] == 12 * N / 8
    ddp = memory.of_step(eight, SETTINGS, 1, 4096, SimpleNamespace(mode="ddp"), 2)
    assert sum(ddp.values()) - sum(whole.values()) == 4 * N


@pytest.mark.parametrize("rows, took, how", [
    (1, 129.4, dict(optimizer="adamw", recompute="full")),
    (1, 128.4, dict(state_dtype="bfloat16", recompute="full")),
    (4, 132.4, dict(state_dtype="bfloat16", recompute="full")),
    (2, 137.0, dict(state_dtype="bfloat16", recompute="selective"))])
def test_the_sum_is_at_most_6_percent_less_than_an_allocator_took(asked, rows, took, how):
    """GiB that torch's allocator reached for whole 8B steps on an H200, all of which ran."""
    summed = float(asked(H200, rows, **how).split("about ")[1].split()[0]) * 1e9 / 2**30
    assert 0.94 * took < summed < took


def test_the_error_names_flags_with_which_the_8b_fits(asked):
    """20 bytes for each of 8,053,338,176 parameters are 161.1 GB of the 150.8 that an H200 has, and 16 are 128.9."""
    said = asked(H200, 4)
    assert said.startswith("error: a step takes about 245.8 GB (weights 32.2, gradients 32.2, states 96.6, ")
    assert said.endswith("cuda:0 has 150.8: --state_dtype=bfloat16 --recompute=selective --micro_batch=1 takes 138.1")
    now = dict(state_dtype="bfloat16", recompute="selective")
    assert asked(H200, 1, **now).startswith("a step takes about 138.1 GB")
    for rows in (4, 6):
        assert asked(H100, rows, NODE).endswith(": --state_dtype=float32 --recompute=none --micro_batch=2 takes 64.4")
    assert asked(H100, 2, NODE).startswith("a step takes about 64.4 GB")
    assert asked(H200, 8, optimizer="adamw", recompute="selective").endswith("=selective --micro_batch=1 takes 138.1")


def test_the_error_names_more_devices_or_adapters_where_no_flag_helps(asked, eight):
    shards = "in shards on 4 of them, --parallel=fsdp --recompute=full --micro_batch=1 takes 45.7"
    assert asked(H100, 4).endswith(shards)
    start = dict(init_from="swiss-ai/Apertus-8B-2509")
    assert asked(H100, 4, **start, lora_r=0).endswith(f"{shards}; or train adapters, --lora_r=16 --base=bf16")
    assert asked(H100, 4, **start, lora_r=16).endswith(shards)
    assert asked(1e9, 1).endswith("take a shorter --block_size, or a larger device")
    assert asked(None, 4, device="mps") == asked(1e9, 1, recompute="some") == ""


def test_memory_that_another_process_has_taken_is_named(asked):
    assert asked(200e9, 1, free=190e9, recompute="full").endswith("and cuda:0 has 190.0")
    said = asked(200e9, 1, free=120e9, recompute="full")
    assert said.endswith("cuda:0 has 120.0 of its 200.0 free: another process is there (nvidia-smi names it)")


def test_the_line_is_printed_once_and_for_gpus_alone(asked):
    others = SimpleNamespace(mode="fsdp", sharded=True, shard=8, first=False)
    assert asked(H100, 2, NODE) and asked(H100, 2, others) == asked(H200, 1, NODE, device="cpu") == ""
