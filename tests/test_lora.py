"""
posttrain/lora.py against real PEFT: golden values that peft computed, and peft itself reading and writing the files.

tests/golden/lora: a tiny ApertusForCausalLM and three adapters, made by peft 0.21.2 and transformers 5.23.0.
"""

import json
import math
import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
import tokenizer
from conftest import ROOT, script
from engine import plot
from engine.parallel import Ranks
from model import Apertus, ApertusConfig, Linear
from posttrain import common, lora, qrpo
from posttrain.references import sequence_logp

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
    lora.merge(model, torch.float64)
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
    assert lora.merge(holder, torch.bfloat16) == pytest.approx(survives, abs=0.02)


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


@pytest.mark.parametrize("excluded", [["v_proj"], "model.layers.*.v_proj", ["model.layers.0.self_attn.v_proj"]])
def test_the_same_matrices_are_left_out_as_by_peft(excluded):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    settings = dict(r=2, lora_alpha=2, target_modules=["q_proj", "v_proj"], exclude_modules=excluded)
    published = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(GOLDEN, "base"))
    names = peft.get_peft_model(published, peft.LoraConfig(**settings)).state_dict()
    theirs = {name.split(".lora_A.")[0].removeprefix(lora.PREFIX) for name in names if ".lora_A." in name}
    assert set(lora.adapted(lora.adapt(base(), settings))) == theirs


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


# -----------------------------------------------------------------------------
# runs of SFT and QRPO, as a user starts them

TINY = dict(block_size=512, vocab_size=320, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=128, init_std=0.1)


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model as a Hugging Face folder, conversations, prompts and a reward."""
    root = tmp_path_factory.mktemp("lora")
    convert.save_hf(Apertus(ApertusConfig(**TINY)), str(root / "model"), tokenizer.load("byte"))
    asked = [dict(role="user", content=f"say {i % 6}") for i in range(24)]
    said = [dict(role="assistant", content="ab"[i % 2] * (1 + i % 5)) for i in range(24)]
    write_rows(root / "chats.jsonl", [dict(messages=list(pair)) for pair in zip(asked, said)])
    # The model is not trained, and seldom ends: what is learnt from are given completions.
    write_rows(root / "prompts.jsonl", [dict(messages=[q], completions=["a", "ab", "cd e"]) for q in asked[:6]])
    (root / "reward.py").write_text("def reward(prompt, completion):\n    return sum(map(ord, completion)) % 97\n")
    return root


def arguments(start, out):
    """The command line of a run of SFT with adapters: 12 steps."""
    return [
        f"--init_from={start / 'model'}", f"--data={start / 'chats.jsonl'}", f"--out={out}", "--batch_size=4",
        "--micro_batch=2", "--epochs=2", "--lr=1e-2", "--dtype=float32", "--rank_every=4", "--checkpoint_every=4",
        "--lora_r=4", "--lora_alpha=8",
    ]


def tune(start, out, *args):
    return script("posttrain.sft", *arguments(start, out), *args)


@pytest.fixture(scope="module")
def tuned(start):
    done = tune(start, start / "tuned")
    assert done.returncode == 0, done.stderr
    return start / "tuned"


def losses(out):
    return [entry["loss"] for entry in plot.read_log(str(out))]


def held(out):
    """The names of the tensors in a run's newest checkpoint."""
    newest = sorted(os.listdir(out / "ckpt"))[-1]
    names = set()
    for file in (out / "ckpt" / newest).glob("*.safetensors"):
        names |= load_file(file).keys()
    return names


def answers(name, **how):
    model, _ = convert.load_any(str(name), **how)
    with torch.no_grad():
        return model(IDX)[0]


def test_a_run_learns_and_its_folder_holds_adapters_alone(start, tuned):
    log = losses(tuned)
    assert len(log) == 12 and sum(log[-3:]) < 0.9 * sum(log[:3])
    assert set(os.listdir(tuned)) >= {"adapter", "ckpt", "config.json"} and not os.path.exists(tuned / "hf")
    assert held(tuned) and all(".lora_" in name for name in held(tuned))


def test_run_adapter_and_merged_model_are_one(start, tuned, tmp_path):
    """Within the rounding of fp32: the sum W x + s B A x, or of the matrices before the product."""
    want = answers(tuned)
    assert torch.equal(answers(tuned / "adapter"), want)
    assert not torch.allclose(answers(start / "model"), want, atol=1e-2)
    done = script("convert.py", f"--load={tuned}", f"--save={tmp_path / 'hf'}", "--merge")
    assert done.returncode == 0 and "100.0% of the adapters' update survives" in done.stdout, done.stderr
    torch.testing.assert_close(answers(tmp_path / "hf"), want, rtol=1e-4, atol=1e-5)


def test_a_merge_into_bf16_says_what_survives(tuned, tmp_path):
    done = script("convert.py", f"--load={tuned / 'adapter'}", f"--save={tmp_path}", "--merge", "--dtype=bfloat16")
    share = float(re.search(r"merged: ([\d.]+)% of the adapters' update", done.stdout)[1])
    assert done.returncode == 0 and 50 < share < 101
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_an_export_of_adapters_wants_to_be_told_to_merge(tuned, tmp_path):
    done = script("convert.py", f"--load={tuned}", f"--save={tmp_path / 'hf'}")
    assert done.returncode == 2 and "--merge adds the adapters" in done.stderr


def test_peft_reads_the_adapter_of_a_run(start, tuned):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    published = transformers.AutoModelForCausalLM.from_pretrained(start / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(published, tuned / "adapter")(IDX).logits
    torch.testing.assert_close(theirs, answers(tuned), rtol=0, atol=1e-4)


def test_stopped_and_resumed_a_run_ends_in_the_same_bits(start, tuned, tmp_path):
    shutil.copytree(tuned, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "adapter")
    shutil.rmtree(sorted((tmp_path / "run" / "ckpt").iterdir())[-1])
    done = tune(start, tmp_path / "run", "--resume")
    assert done.returncode == 0, done.stderr
    assert torch.equal(answers(tmp_path / "run"), answers(tuned)) and losses(tmp_path / "run") == losses(tuned)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_do_what_one_does(launch, start, tuned, tmp_path, parallel):
    """ddp from the start; fsdp goes on with what one process left when it was killed, and gathers the same files."""
    if parallel == "fsdp":
        shutil.copytree(tuned, tmp_path / "two")
        shutil.rmtree(tmp_path / "two" / "adapter")
        for step in ("step-00000008", "step-00000012"):
            shutil.rmtree(tmp_path / "two" / "ckpt" / step, ignore_errors=True)
    args = (*arguments(start, tmp_path / "two"), "--resume", f"--parallel={parallel}")
    codes, text = launch(2, *args, script="posttrain.sft", logs=tmp_path / "log")
    assert codes == [0, 0], text
    assert losses(tmp_path / "two") == pytest.approx(losses(tuned), rel=1e-5)
    # Where a gradient is nearly 0, its sign, and so an early step of the optimizer, hangs on the order of a sum.
    off = answers(tmp_path / "two") - answers(tuned)
    moved = answers(tuned) - answers(start / "model")
    assert off.norm() <= 1e-4 * moved.norm(), (off.norm(), moved.norm())
    assert torch.equal(answers(tmp_path / "two" / "adapter"), answers(tmp_path / "two"))
    assert held(tmp_path / "two") == held(tuned)


SHARDS = """
import sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from posttrain import common, lora
from engine.parallel import Ranks, orderly_exit

with orderly_exit():
    first = ranks = Ranks("fsdp")
    ranks.join("cpu", 60)
    adapters = lora.settings_of(3, 8, "all")
    for folder, base, shards in zip(sys.argv[1::3], sys.argv[2::3], map(int, sys.argv[3::3])):
        if shards:
            # Two copies of one shard, or one copy of two, among the processes that have met already.
            ranks = Ranks("hsdp", shard=shards)
            shape = ranks.copies, ranks.shard
            ranks.device, ranks.mesh = "cpu", init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
        how = dict(base=base, adapters=adapters, seed=5)
        model, _ = common.start_model(folder, "cpu", torch.float32, ranks, **how)
        whole, _ = common.start_model(folder, "cpu", torch.float32, **how)
        want = dict(whole.named_parameters())
        names = [n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), want[n])]
        kinds = sorted({f"{p.dtype} {p.requires_grad} {'.lora_' in n}" for n, p in model.named_parameters()})
        here = sum(p.to_local().numel() for p in model.parameters())
        share = here / sum(p.numel() for p in want.values())
        idx = torch.arange(12).view(1, 12)
        for each in model, whole:
            each(idx, idx)[1].backward()
        for name, p in model.named_parameters():
            assert (p.grad is None) == (want[name].grad is None) == (".lora_" not in name)
            if p.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), 2 * want[name].grad, rtol=1e-5, atol=1e-7)
        norm = torch.stack([p.grad.norm() for p in whole.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(common.collect(model, ranks, 1e9), 2 * norm.item(), rtol=1e-5, atol=0)
        with lora.off(model), lora.off(whole), torch.no_grad():
            assert torch.equal(model.hidden(idx), whole.hidden(idx))
        same = model.start == whole.start
        print(f"rank {ranks.rank}, {ranks.mode}: {names} differ, {share:.2f} here, {same}, {kinds}", flush=True)
    first.leave()
"""


def test_base_and_adapters_lie_in_shards_and_only_adapters_have_gradients(launch, start, tuned, tmp_path):
    """
    Two ranks; rank 3, which two do not divide. The base in its own dtype, adapters in fp32; both ranks run the same
    tokens, so the sum of their gradients, and its norm, is twice that of one process. hsdp: as two copies each of which
    is whole, and as one copy in two shards.
    """
    program = tmp_path / "shards.py"
    program.write_text(SHARDS)
    cases = ("bf16", 0), ("fp32", 0), ("bf16", 1), ("bf16", 2)
    args = [arg for case in cases for arg in (start / "model", *case)]
    codes, text = launch(2, *args, script=program, logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    half, whole = ["0.50", "0.50"], ["1.00", "1.00"]
    for base, mode, shares in (("bfloat16", "fsdp", half), ("float32", "fsdp", half), ("bfloat16", "hsdp", whole + half)):
        kinds = sorted([f"torch.{base} False False", "torch.float32 True True"])
        found = re.findall(rf"rank \d, {mode}: \[\] differ, (\d.\d\d) here, True, {re.escape(str(kinds))}", text)
        assert sorted(found) == sorted(shares), text


def test_bits_are_not_sharded(start):
    ranks = SimpleNamespace(mode="fsdp", sharded=True)
    with pytest.raises(ValueError, match="int8 keeps bits beside their scales: --parallel=ddp"):
        common.start_model(str(start / "model"), "cpu", torch.float32, ranks, "int8", dict(r=4))


@pytest.mark.parametrize("changed", ["--lora_r=2", "--lora_alpha=4", "--lora_on=q_proj", "--lora_rs=True"])
def test_a_run_does_not_go_on_with_other_adapters(start, tuned, changed):
    done = tune(start, tuned, "--resume", changed)
    assert done.returncode == 2 and changed[2:].split("=")[0] in done.stderr


@pytest.mark.parametrize("base", ["int8", "nf4", "bf16"])
def test_a_run_on_a_small_base_learns_and_is_loaded_in_any_dtype(start, tuned, tmp_path, base):
    """The start is known again by its values in bf16 and in fp32."""
    done = tune(start, tmp_path / "run", f"--base={base}", "--recompute=full")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(tuned), rel=0.1)
    for dtype in (None, torch.bfloat16):
        assert torch.equal(answers(tmp_path / "run", dtype=dtype), answers(tmp_path / "run" / "adapter", dtype=dtype))


def test_recomputing_changes_no_bit(start, tuned, tmp_path):
    for mode in ("full", "selective"):
        done = tune(start, tmp_path / mode, f"--recompute={mode}")
        assert done.returncode == 0 and losses(tmp_path / mode) == losses(tuned), done.stderr


def test_a_quantised_base_is_not_trained(start, tmp_path):
    done = tune(start, tmp_path / "run", "--lora_r=0", "--base=nf4")
    assert done.returncode == 2 and "--lora_r=16 trains adapters beside frozen weights in nf4" in done.stderr


@pytest.mark.parametrize("more", [[], ["--lora_r=0"]])
def test_adapters_are_no_start_for_another_run(start, tuned, tmp_path, more):
    """A second adapter would take the place of the first one, and full fine-tuning would train the adapter alone."""
    for folder in (tuned, tuned / "adapter"):
        done = tune(start, tmp_path / "run", f"--init_from={folder}", *more)
        assert done.returncode == 2 and "holds adapters" in done.stderr and "--merge" in done.stderr, done.stderr


def test_an_adapter_whose_base_has_changed_is_refused(start, tuned, tmp_path):
    other = Apertus(ApertusConfig(**TINY), seed=29)
    convert.save_hf(other, str(tmp_path / "model"), tokenizer.load("byte"))
    shutil.copytree(tuned / "adapter", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = {**json.loads(path.read_text()), "base_model_name_or_path": str(tmp_path / "model")}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="was trained on other weights than those of"):
        convert.load_any(str(tmp_path / "adapter"))
    path.write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(ValueError, match="is an adapter of .*gone"):
        convert.load_any(str(tmp_path / "adapter"))


def test_a_run_of_adapters_whose_base_has_changed_is_refused(start, tuned, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tuned, run)
    convert.save_hf(Apertus(ApertusConfig(**TINY), seed=29), str(tmp_path / "model"), tokenizer.load("byte"))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "init_from": str(tmp_path / "model")}))
    with pytest.raises(ValueError, match="was trained on other weights than those of .*model today"):
        convert.load_any(str(run))


def alignment(start, out, *args):
    return [
        f"--init_from={start / 'model'}", f"--data={start / 'prompts.jsonl'}", f"--rewards={start / 'reward.py'}",
        f"--out={out}", "--n_refs=4", "--max_new_tokens=12", "--batch_size=4", "--micro_batch=2", "--lr=1e-2",
        "--epochs=3", "--pairs_per_prompt=0", "--dtype=float32", "--optimizer=adamw", *args,
    ]


def align(start, out, *args):
    return script("posttrain.qrpo", *alignment(start, out, *args))


def test_qrpo_with_adapters_has_its_reference_below_them_and_stores_none(start, tmp_path):
    """At step 0 policy and reference are one, whichever way its log-probs came: the loss of the full run."""
    done = align(start, tmp_path / "lora", "--lora_r=4", f"--references={tmp_path / 'shared'}")
    assert done.returncode == 0, done.stderr
    assert not [name for name in os.listdir(tmp_path / "shared") if name.startswith("logp")]
    full = align(start, tmp_path / "full", f"--references={tmp_path / 'shared'}")
    assert full.returncode == 0, full.stderr
    ours, stored = losses(tmp_path / "lora"), losses(tmp_path / "full")
    assert ours[0] == pytest.approx(stored[0], rel=1e-5) and ours[-1] != ours[0]
    assert os.path.exists(tmp_path / "lora" / "adapter" / "adapter_config.json")


def test_qrpo_in_shards_does_what_one_process_does(launch, start, tmp_path):
    """
    One of the two ranks has no micro-batch, and runs along. References are sampled from the base in bf16: the head is so
    large here that in fp32 other ids would come.
    """
    sharp = Apertus(ApertusConfig(**TINY))
    sharp.lm_head.weight.data.mul_(10)
    convert.save_hf(sharp, str(tmp_path / "sharp"), tokenizer.load("byte"))
    args = f"--init_from={tmp_path / 'sharp'}", "--lora_r=4", "--base=bf16", "--micro_batch=4", "--epochs=1"
    done = align(start, tmp_path / "one", *args)
    assert done.returncode == 0, done.stderr
    args = alignment(start, tmp_path / "two", *args, "--parallel=fsdp", "--device=cpu")
    codes, text = launch(2, *args, script="posttrain.qrpo", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    for stage in ("samples", "rewards"):
        [one], [two] = ((tmp_path / run / "references").glob(stage + "*") for run in ("one", "two"))
        assert one.read_text() == two.read_text()


def test_the_reference_below_trained_adapters_is_the_start_models(start, tuned, monkeypatch):
    """Bit for bit, in the same micro-batches."""
    model, _ = convert.load_any(str(tuned))
    plain, _ = convert.load_any(str(start / "model"))
    texts = [([1, 70, 71], [72, 73]), ([1, 80], [90, 91, 92])]
    batch = [(0, dict(text=texts[0]), dict(text=texts[1]))]
    monkeypatch.setattr(qrpo, "micro_batch", 2)
    found = qrpo.reference_of(model, batch, Ranks("none"))
    with torch.no_grad():
        assert torch.equal(found, sequence_logp(plain, texts).view(1, 2))
        assert not torch.equal(found, sequence_logp(model, texts).view(1, 2))
