"""tools/plan.py against arithmetic, and the tables of docs/ against its output."""

import itertools
import re
from pathlib import Path

import pytest
from conftest import ROOT, refused, script
from lab import run

from model import ApertusConfig
from tools import plan

PARAMETERS = 8_053_338_176


def planned(mode, command):
    """(plan, model) of the 8B with these flags."""
    run, config = plan.read_command(f"8b {command}")
    model = plan.build_model(run, config)
    return plan.plan_run(run, model, mode), model


def test_the_table_of_cards_in_docs_posttraining_is_what_is_planned():
    """Only the line of the 8B: the 70B's 80 layers take seconds."""
    page = Path(ROOT, "docs", "posttraining.md").read_text()
    assert "\n".join(itertools.islice(plan.table_of_cards(), 2)) in page


def test_the_plan_in_docs_scale_has_lines_of_the_plan():
    _, page = (
        Path(ROOT, "docs", "scale.md").read_text().split("$ python -m tools.plan configs/node.py --gpus=8 --gpu=h100\n")
    )
    quoted = page.partition("\n```")[0].splitlines()
    printed = "\n".join(plan.describe_plan(*plan.read_command("node --gpus=8 --gpu=h100"))).splitlines()
    # In their order; "..." stands for the lines between.
    rest = iter(printed)
    assert len(quoted) > 10 and all(line in rest for line in quoted if line != "...")


def test_a_small_plan_has_no_zeros_and_each_setting_a_meaning():
    lines = "".join(plan.describe_plan(*plan.read_command("laptop --n_layer=2 --vocab_size=4096 --gpus=1 --gpu=4090")))
    # The run of 1,440 steps takes 0.237 seconds, so 5 minutes are 1,712 of them.
    assert (
        "0.97M parameters" in lines
        and "0.2 seconds" in lines
        and "-> in 5 minutes: 1,825,254 steps, 1.87B tokens" in lines
    )
    assert not re.search(r"(?m)^  --\S+ *$", run("tools.plan", "--help").stdout)


@pytest.mark.parametrize("mode, again", [("none", 0), ("selective", 4096 * 21504), ("full", 4096 * 53_248)])
def test_compute_is_the_flops_of_a_step_and_of_what_is_computed_again(mode, again):
    """
    A block has 4,096 x (2 x 21,504 + 10,240) weights, in `up`, `down` and attention. A step takes three passes over 32
    blocks and the head, plus causal attention.
    """
    found, _ = planned(mode, "--mfu=0.5")
    forward = 4096 * (32 * 53_248 + 131_072)
    step = 6 * forward + 6 * 32 * 4096 * 4096
    cost = 1 + 32 * again / (3 * forward)
    assert found["compute_s"] == pytest.approx(found["tokens"] * step * cost / (989e12 * 0.5), rel=1e-9)


# Gathers and reductions of a micro-batch: 8 bytes a parameter, but 6 of the head's 131,072 x 4,096.
SENT = 8 * PARAMETERS - 2 * 131_072 * 4096
EXPOSED = 8 * 131_072 * 4096


def test_the_slower_of_compute_and_links_decides_the_speed():
    """
    One copy on a node: 7/8 of the bytes at NVLink's 360 GB/s, of which the embedding's add to the compute. At 3.6 GB/s
    they take longer than the compute. Copies: 14 bytes a parameter. A step has 16 micro-batches and one update.
    """
    fast, model = planned("none", "--gpus=8 --batch_size=256")
    assert model.num_params() == PARAMETERS and fast["fits"] == 2
    assert fast["links_s"] == pytest.approx(7 / 8 * SENT / 360e9)
    assert fast["copies_s"] == pytest.approx(14 * PARAMETERS / 3015e9)
    assert fast["step_s"] == pytest.approx(40 * PARAMETERS / 8 / 3015e9)
    part = fast["compute_s"] + fast["copies_s"] + 7 / 8 * EXPOSED / 360e9
    assert fast["tokens_per_s"] == pytest.approx(256 * 4096 / (16 * part + fast["step_s"]))
    slow, _ = planned("none", "--gpus=8 --node_gbs=3.6 --batch_size=256")
    assert slow["tokens_per_s"] == pytest.approx(256 * 4096 / (16 * slow["links_s"] + slow["step_s"]))
    assert slow["days"] == pytest.approx(15e12 / slow["tokens_per_s"] / 86400)


def test_a_ring_over_nodes_has_the_links_of_all_gpus_of_a_node_and_copies_have_one_each():
    """
    An H100 has a link of 45 GB/s to other nodes, eight 360, as NVLink. 16 copies add up 1/8 of the gradients, there and
    back: nccl-tests' bus bandwidth counts (n - 1) / n twice.
    """
    far, _ = planned("none", "--gpus=64 --parallel=fsdp")
    assert far["links_s"] == pytest.approx(63 / 64 * SENT / 360e9)
    copies, _ = planned("none", "--gpus=128")
    update = 40 * PARAMETERS / 8 / 3015e9
    assert copies["step_s"] == pytest.approx(2 * 15 / 16 * 4 * PARAMETERS / 8 / 45e9 + update)
    whole, _ = planned("none", "--gpus=8 --gpu=b200 --parallel=ddp")
    assert whole["step_s"] == pytest.approx(2 * 7 / 8 * 4 * PARAMETERS / 720e9 + 40 * PARAMETERS / 7200e9)


@pytest.mark.parametrize("P", [1, 2, 8])
def test_a_step_computes_each_window_once_however_many_gpus_share_one(P):
    """No plan is faster than the compute of all GPUs at once, and here most of its time is compute."""
    found, _ = planned("none", f"--gpus=8 --batch_size=64 --parallel=fsdp --sequence_parallel={P}")
    fastest = 8 * found["tokens"] / found["compute_s"]
    assert 0.7 * fastest < found["tokens_per_s"] < fastest
    assert found["tokens"] == max(found["fits"], 1) * 4096 // P


@pytest.mark.parametrize(
    "command, flags",
    [
        ("8b", "--recompute=cheap --micro_batch=4"),
        ("node --vocab_size=131072", "--recompute=none --micro_batch=8"),
        ("8b --gpus=1 --gpu=h200 --state_dtype=bfloat16", "--recompute=selective --micro_batch=1"),
    ],
)
def test_the_flags_are_those_of_the_shortest_estimated_time(command, flags):
    """Two windows of the 8B fit without recomputation, and four with it, whose gathers and copies cost half."""
    assert run("tools.plan", *command.split()).stdout.endswith(f"{flags}\n")


def test_recomputed_activations_are_written_once_more():
    """Not kept by `cheap`: 21,504 + 3 x 4,096 + 1,024 numbers of each position and layer, in bf16."""
    found, _ = planned("cheap", "")
    written = 32 * 4 * 4096 * 2 * (21_504 + 3 * 4096 + 1024)
    assert found["copies_s"] == pytest.approx((14 * PARAMETERS + written) / 3015e9)
    whole, _ = planned("none", "--gpus=1 --gpu=b200")
    assert whole["copies_s"] == pytest.approx(24 * PARAMETERS / 7200e9)


@pytest.mark.parametrize("mode, passes", [("none", 2), ("full", 3)])
def test_a_window_over_gpus_adds_four_exchanges_to_each_block(mode, passes):
    """bf16 q and output (32 heads of 128), k and v (8): T/P positions, forward and backward, with `full` once more."""
    alone, _ = planned(mode, "--batch_size=8")
    split, _ = planned(mode, "--batch_size=2 --sequence_parallel=4")
    sent = 3 / 4 * passes * 32 * 1024 * 2 * 2 * (32 + 8) * 128 / 360e9
    assert split["compute_s"] == pytest.approx(alone["compute_s"] / 4 + sent)
    assert split["activations"] == alone["activations"] / 4


@pytest.mark.parametrize("flags, window", [("", 512), ("--block_size=64", 64), ("--block_size=64 --max_length=32", 32)])
def test_the_window_is_that_of_the_start_model_unless_the_user_sets_it(monkeypatch, flags, window):
    monkeypatch.setattr(plan.folders, "shape_of", lambda name: ApertusConfig(block_size=512))
    _, config = plan.read_command(f"--init_from=out/run {flags}")
    assert config.block_size == window


@pytest.mark.parametrize(
    "command, flags",
    [
        ("8b --gpus=1 --gpu=h200", "--gpus=2 --parallel=fsdp, or --state_dtype=bfloat16"),
        ("70b --gpus=8", "--gpus=32 --parallel=fsdp"),
        ("sft_8b --gpus=1 --gpu=4090", "--lora_r=16 --base=bf16"),
        ("1b5 --gpus=1 --gpu=4090", "--gpus=2 --parallel=fsdp"),
    ],
)
def test_what_does_not_fit_exits_with_2_and_flags_with_which_it_does(command, flags):
    refused(script("tools.plan", *command.split()), f": take {flags}\n")
    for choice in flags.split(", or "):
        assert "-> --parallel=" in run("tools.plan", *command.split(), *choice.split()).stdout
