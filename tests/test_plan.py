"""tools/plan.py against arithmetic, and README's tables against what it prints."""
import itertools
import os

import pytest

from conftest import ROOT, refused, script
from engine.gpus import GPUS
from model import ApertusConfig
from posttrain.common import shapes_of
from tools import plan

SMALL = ApertusConfig(block_size=64, vocab_size=512, n_layer=8, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=336)
EIGHT = shapes_of(plan.published("8b"))
PARAMETERS = 8_053_338_176


@pytest.fixture(autouse=True)
def published_run(monkeypatch):
    """The 8B's run on 8 GPUs."""
    settings = dict(gpus=8, sequence_parallel=1, parallel="fsdp", state_dtype="float32", mfu=0.4)
    for name, value in settings.items():
        monkeypatch.setattr(plan, name, value)


@pytest.mark.parametrize("table, lines", [(plan.table_of_fits, 7), (plan.table_of_cards, 2), (plan.table_of_windows, 3)])
def test_the_tables_in_the_readme_are_what_is_planned(table, lines):
    """Of cards and windows the lines of the 8B: 80 layers of the 70B take seconds."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        assert "\n".join(itertools.islice(table(), lines)) in f.read()


def test_recomputing_costs_the_forward_pass_again():
    """In full that of all blocks, of a step of three passes, or of two where the weights are frozen."""
    width, depth = SMALL.n_embd, SMALL.n_layer
    block = 3 * width * width + 2 * width * SMALL.ffn_dim
    forward = depth * block + width * SMALL.vocab_size
    assert plan.recompute_cost(SMALL, "none") == 1
    for mode, again in dict(full=block, selective=width * SMALL.ffn_dim).items():
        for frozen, passes in ((False, 3), (True, 2)):
            cost = 1 + depth * again / (passes * forward)
            assert plan.recompute_cost(SMALL, mode, frozen) == pytest.approx(cost, rel=1e-12)


def test_the_links_of_the_8b():
    """With bf16 gradients: 42 GB on 8 GPUs are 117 ms at 360 GB/s of NVLink, and 48 GB on 64 are 1.06 s at 45 GB/s."""
    assert plan.seconds_of(6 * PARAMETERS, 8, 8, 360, 45) == pytest.approx(0.117, rel=0.01)
    assert plan.seconds_of(6 * PARAMETERS, 64, 8, 360, 45) == pytest.approx(1.06, rel=0.01)
    assert plan.seconds_of(6 * PARAMETERS, 1, 8, 360, 45) == 0


def test_the_slower_of_compute_and_links_decides_the_speed(monkeypatch):
    """
    An H100 at 40 % of 989 TFLOP/s does 8,187 tokens of 48.3 GFLOPs a second, and 8 of them 8 times as many. Over links
    of 3.6 GB/s, 7/8 of 8 bytes a parameter take 15.7 s for each two windows.
    """
    found = plan.plan_of("none", EIGHT, GPUS["h100"], 8, 2, 73.6e9)
    assert found.rows == 2 and found.compute > found.links
    assert found.speed == pytest.approx(8 * 0.4 * 989e12 / EIGHT.flops_per_token(4096), rel=1e-9)
    monkeypatch.setattr(plan, "node_gbs", 3.6)
    found = plan.plan_of("none", EIGHT, GPUS["h100"], 8, 2, 73.6e9)
    seconds = 7 / 8 * 8 * PARAMETERS / 3.6e9
    assert found.speed == pytest.approx(8 * 2 * 4096 / seconds, rel=1e-9)
    [fits, bound] = plan.advice([found], GPUS["h100"], 8, 2, 73.6e9)
    assert "--recompute=none --micro_batch=2" in fits and "there are 8,192" in bound


def test_a_window_over_gpus_adds_four_exchanges_to_each_block(monkeypatch):
    """q and the result have H heads, k and v K: in bf16, T/P positions, forward and backward, in full once more."""
    once = 64 // 4 * (2 * 4 + 2 * 2) * 16 * 2
    assert plan.exchanged(SMALL, 3, 4, "none") == 2 * 8 * 3 * once
    assert plan.exchanged(SMALL, 3, 4, "full") == 3 * 8 * 3 * once
    alone = plan.plan_of("none", EIGHT, GPUS["h100"], 8, 1, 73.6e9)
    monkeypatch.setattr(plan, "sequence_parallel", 4)
    split = plan.plan_of("none", EIGHT, GPUS["h100"], 8, 1, 73.6e9)
    sent = 3 / 4 * plan.exchanged(EIGHT.config, 1, 4, "none") / 360e9
    assert split.compute == pytest.approx(alone.compute / 4 + sent, rel=1e-9)
    assert split.kinds["activations"] == alone.kinds["activations"] / 4


def test_the_fewest_gpus_then_the_least_recomputation_then_the_smallest_split(monkeypatch):
    """By hand: 160 bytes in shards, and 64, half or a tenth of that for a window, over the GPUs that share it."""
    part = dict(none=1, selective=0.5, full=0.1)

    def bytes_of(model, mode, rows, gpus, P):
        return dict(all=160 / gpus + 64 / P * part[mode])
    monkeypatch.setattr(plan, "bytes_of", bytes_of)
    wanted = {100: "8 / 1 none", 60: "8 / 2 none", 28: "8 / 8 none", 25: "8 / 8 selective", 22: "8 / 4 full",
              15: "16 / 8 selective", 0.5: "-"}
    assert {room: plan.fewest(EIGHT, 4096, room) for room in wanted} == wanted


def test_the_commands_plan_a_run_on_many_gpus_and_a_fine_tuning_on_one():
    """The shape is that of the published start model, without a network."""
    done = script("tools.plan", "configs/8b.py", "--gpus=128")
    assert done.returncode == 0 and "-> --parallel=fsdp --recompute=selective --micro_batch=8\n" in done.stdout
    one = ["configs/sft_8b.py", "--gpus=1", "--gpu=4090"]
    done = script("tools.plan", *one, "--lora_r=16", "--base=nf4")
    assert "39.8M of them trained, adapters beside a base in nf4" in done.stdout
    assert "-> --parallel=none --recompute=selective --micro_batch=2" in done.stdout
    done = script("tools.plan", *one)
    assert "does not fit: it takes 166.5 GB, and there are 22.1: take --gpus=2 --parallel=fsdp" in done.stdout


@pytest.mark.parametrize("args, says", [
    (["--gpu=abacus"], "there is a100, h100"),
    (["--gpus=3"], "2 or 4 can"),
    (["--gpus=0"], "at least 1 GPU"),
    (["--base=nf4"], "--lora_r=16"),
    (["--gpus=8", "--parallel=fsdp", "--lora_r=4"], "--gpus=1 or --parallel=ddp"),
    (["--gpus=2", "--gpu=4090"], "there is a100, h100"),
    (["--gpus=8", "--sequence_parallel=3"], "sequence_parallel=3 does not divide gpus=8: try 2 or 4"),
    (["--gpus=8", "--sequence_parallel=4"], "does not divide n_kv_head=2: try 2"),
    (["--gpus=4", "--parallel=hsdp", "--hsdp_shard=3"], "try 2 or 4"),
])
def test_what_cannot_be_planned_is_told_in_one_line(args, says):
    refused(script("tools.plan", "configs/tiny.py", *args), says)
