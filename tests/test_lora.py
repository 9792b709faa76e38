"""
posttrain/lora.py against real PEFT: golden values that peft computed, and peft itself reading and writing the files.

tests/golden/lora: a tiny ApertusForCausalLM and three adapters, made by peft 0.21.2 and transformers 5.23.0.
"""

import json
import math
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from conftest import ROOT
from model import Linear
from posttrain import lora

GOLDEN = os.path.join(ROOT, "tests", "golden", "lora")
VALUES = np.load(os.path.join(GOLDEN, "io.npz"))
IDX = torch.from_numpy(VALUES["idx"])       # (2, 24)
CASES = ("all", "rs", "gauss")              # all-linear by full names; rsLoRA by suffixes; a regular expression


def base():
    return convert.load_hf(os.path.join(GOLDEN, "base"))


def with_adapter(case):
    model = base()
    settings = lora.load(model, os.path.join(GOLDEN, f"adapter_{case}"))
    return model, settings


@torch.no_grad()
def logits(model):
    return model(IDX)[0]


def close_to(name, atol=1e-5):
    """Is a tensor PEFT's value of this name?"""
    theirs = torch.from_numpy(np.asarray(VALUES[name]))
    return lambda ours: torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_logits_of_pefts_adapter_are_pefts(case):
    model, _ = with_adapter(case)
    close_to(case)(logits(model))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_pefts(case):
    model, _ = with_adapter(case)
    _, loss = model(IDX[:, :-1], IDX[:, 1:])
    loss.backward()
    close_to(f"{case}_loss", atol=1e-6)(loss.detach())
    layers = list(lora.adapted(model).values())
    for part, theirs in zip(("lora_A", "lora_B"), VALUES[f"{case}_grad_norm"]):
        square = sum(getattr(layer, part).weight.grad.square().sum().item() for layer in layers)
        assert math.sqrt(square) == pytest.approx(theirs, rel=1e-6)
    close_to(f"{case}_grad_first_A", atol=1e-6)(layers[0].lora_A.weight.grad)


def test_nothing_frozen_has_a_gradient():
    model, _ = with_adapter("all")
    model(IDX[:, :-1], IDX[:, 1:])[1].backward()
    having = {name for name, p in model.named_parameters() if p.grad is not None}
    assert having == {name for name, _ in model.named_parameters() if ".lora_" in name}


@pytest.mark.parametrize("case", CASES)
def test_without_its_adapter_a_model_is_its_base_bit_for_bit(case):
    model, _ = with_adapter(case)
    with lora.off(model):
        without = logits(model)
    assert torch.equal(without, logits(base()))
    assert not torch.equal(logits(model), without)


def test_the_adapter_is_on_again_after_an_error():
    model, _ = with_adapter("all")
    before = logits(model)
    with pytest.raises(KeyError), lora.off(model):
        raise KeyError
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("case", CASES)
def test_the_merged_matrix_is_pefts_bit_for_bit(case):
    model, _ = with_adapter(case)
    assert lora.merge(model) == pytest.approx(1.0, abs=1e-6)
    first = "o_proj" if case == "gauss" else "q_proj"
    ours = getattr(model.model.layers[0].self_attn, first).weight
    assert torch.equal(ours, torch.from_numpy(VALUES[f"{case}_merged_q0"]))
    close_to(f"{case}_merged")(logits(model))
    assert not lora.adapted(model)


def test_a_merge_in_fp64_gives_the_adapters_logits():
    model = with_adapter("all")[0].double()
    before = logits(model)
    lora.merge(model)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("relative, survives", [(1e-4, 0.06), (1e-3, 0.53), (3e-3, 0.93), (1e-2, 1.0)])
def test_bf16_keeps_the_share_of_an_update_that_its_rounding_allows(relative, survives):
    """Gaussian W: of an update 1e-4 to 1e-2 as large, bf16 weights keep 6, 53, 93 and 100 %."""
    torch.manual_seed(0)
    holder = torch.nn.Module()
    holder.q_proj = Linear(512, 512)
    torch.nn.init.normal_(holder.q_proj.weight)
    lora.adapt(holder, lora.settings_of(16, 16, "q_proj"))
    layer = holder.q_proj
    torch.nn.init.normal_(layer.lora_B.weight)
    size = (layer.lora_B.weight @ layer.lora_A.weight).norm() / layer.weight.norm()
    layer.scale = relative / size.item()
    layer.weight.data = layer.weight.data.bfloat16()
    assert lora.merge(holder) == pytest.approx(survives, abs=0.02)


# -----------------------------------------------------------------------------
# a new adapter


def test_step_0_is_the_base_model_exactly():
    model = lora.adapt(base(), lora.settings_of(4, 8, "all"))
    assert torch.equal(logits(model), logits(base()))
    assert len(lora.adapted(model)) == 2 * 6


def test_a_begins_as_pefts_does_and_differs_by_seed_and_name_alone():
    """kaiming_uniform with a = sqrt(5), PEFT's choice, is uniform in +-1/sqrt(in)."""
    peft = pytest.importorskip("peft")
    holder = torch.nn.Module()
    holder.q_proj = Linear(64, 4096)
    lora.adapt(holder, lora.settings_of(64, 8, "q_proj"), seed=3)
    ours = holder.q_proj.lora_A.weight.flatten()
    config = peft.LoraConfig(r=64, target_modules=["0"])
    theirs = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(64, 4096)), config).state_dict()
    theirs = theirs["base_model.model.0.lora_A.default.weight"].flatten()
    assert ours.abs().max() <= 1 / 8 and theirs.abs().max() <= 1 / 8
    assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.03)

    def values(on, seed):
        model = lora.adapt(base(), lora.settings_of(4, 8, on), seed)
        return {name: layer.lora_A.weight for name, layer in lora.adapted(model).items()}
    all_six, some, other = values("all", 1), values("v_proj,o_proj", 1), values("all", 2)
    assert len(some) == 4 and all(torch.equal(all_six[name], some[name]) for name in some)
    assert not any(torch.equal(all_six[name], other[name]) for name in all_six)
    first, second = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
    assert not torch.equal(all_six[first], all_six[second])


@pytest.mark.parametrize("rank_stabilised, scale", [(False, 32 / 16), (True, 32 / 4)])
def test_the_scale_is_that_of_the_two_papers(rank_stabilised, scale):
    model = lora.adapt(base(), lora.settings_of(16, 32, "q_proj", rank_stabilised))
    assert {layer.scale for layer in lora.adapted(model).values()} == {scale}


@pytest.mark.parametrize("r, on, complaint", [
    (0, "all", "lora_r=0"),
    (4, "q_proj,lm_head", "all or some of q_proj"),
    (4, "q", "all or some of q_proj"),
    (33, "k_proj", "lora_r=33 is larger than model.layers.0.self_attn.k_proj, 32 x 64"),
    (4, "gate_proj", "names no matrix"),
])
def test_a_rank_or_a_matrix_that_cannot_be_is_refused_by_name(r, on, complaint):
    with pytest.raises(ValueError, match=complaint):
        lora.adapt(base(), lora.settings_of(r, 8, on))


# -----------------------------------------------------------------------------
# files


def theirs_on(folder, transformers, peft):
    published = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(GOLDEN, "base"), dtype=torch.float32)
    return peft.PeftModel.from_pretrained(published.eval(), folder)


@pytest.mark.parametrize("rank_stabilised", [False, True])
@pytest.mark.parametrize("on", ["all", "q_proj,down_proj"])
def test_peft_reads_our_files_and_gives_our_logits(tmp_path, on, rank_stabilised):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    settings = lora.settings_of(4, 32, on, rank_stabilised)
    model = lora.adapt(base(), settings)
    for layer in lora.adapted(model).values():
        torch.nn.init.normal_(layer.lora_B.weight, std=0.05)
    lora.save(model, settings, str(tmp_path), "the/base", "0" * 16)
    with torch.no_grad():
        theirs = theirs_on(str(tmp_path), transformers, peft)(IDX).logits
    torch.testing.assert_close(theirs, logits(model), rtol=0, atol=1e-5)
    assert not torch.equal(logits(base()), logits(model))


def test_what_peft_saves_now_we_load_with_its_logits(tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=5, lora_alpha=7, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM",
    )
    published = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(GOLDEN, "base"), dtype=torch.float32)
    theirs = peft.get_peft_model(published.eval(), config)
    theirs.save_pretrained(tmp_path)
    model = base()
    lora.load(model, str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs(IDX).logits, rtol=0, atol=1e-5)


def test_saving_and_loading_changes_no_bit(tmp_path):
    model, settings = with_adapter("rs")
    lora.save(model, settings, str(tmp_path), "", "")
    again = base()
    assert lora.load(again, str(tmp_path)) == settings
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("key, value", [
    ("use_dora", True),
    ("lora_bias", True),
    ("bias", "all"),
    ("rank_pattern", {"q_proj": 4}),
    ("alpha_pattern", {"q_proj": 4}),
    ("layers_to_transform", [0]),
    ("layer_replication", [[0, 1]]),
    ("modules_to_save", ["lm_head"]),
    ("trainable_token_indices", [3]),
    ("target_parameters", ["x"]),
    ("fan_in_fan_out", True),
    ("init_lora_weights", "pissa_niter_4"),
    ("peft_type", "IA3"),
    ("a_key_of_the_future", 1),
])
def test_a_setting_that_changes_a_logit_is_refused_by_name(tmp_path, key, value):
    folder = tmp_path / "adapter"
    shutil.copytree(os.path.join(GOLDEN, "adapter_all"), folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ValueError, match=key):
        lora.load(base(), str(folder))


@pytest.mark.parametrize("change, complaint", [
    (lambda t, name: t.pop(name), "lacks"),
    (lambda t, name: t.update({name + "2": t[name].clone()}), "holds, and this model has no"),
    (lambda t, name: t.update({name: t[name][:, :-1].contiguous()}), r"has shape \(8, 63\)"),
])
def test_an_adapter_of_another_model_is_refused_by_its_first_tensor(tmp_path, change, complaint):
    folder = tmp_path / "adapter"
    shutil.copytree(os.path.join(GOLDEN, "adapter_all"), folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    save_file(tensors, path)
    with pytest.raises(ValueError, match=complaint):
        lora.load(base(), str(folder))
