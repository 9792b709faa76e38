"""
train.py --init_from, alone and with --lora_r: a run that begins with the weights of another model, against that model's
own loss, against transformers with PEFT, against the run that was never stopped, and on two ranks against one.
"""
import os
import shutil

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

import convert
from conftest import refused, same, script, weights
from data import TokenDataset
from engine.plot import read_log
from engine.runs import settings_of
from faults.launch import sha_of
from trained import contents

SHAPE = "--block_size=64 --n_layer=2 --n_head=4 --n_kv_head=2 --n_embd=32 --ffn_dim=64".split()
RUN = """--total_samples=64 --warmup_samples=8 --decay_samples=16 --batch_size=8 --micro_batch=4 --lr=1e-3
    --sample_every=0 --lr_floor=1e-4 --dtype=float32 --eval_every=4 --eval_windows=8 --last_eval_windows=8
    --checkpoint_every=2 --keep_checkpoints=0 --compile=False""".split()
ADAPTERS = "--lora_r=4 --lora_alpha=8 --lr=1e-2 --weight_decay=0.5 --rope_theta=50".split()
RUNS = {"continued": [], "adapted": ADAPTERS}


@pytest.fixture(scope="module")
def lab(data):
    """A start model as a run and as a Hugging Face folder, and two runs from it: of all weights and of adapters."""
    root = data.parent
    commands = [["train.py", f"--data={data}", f"--out={root}/start", *SHAPE, *RUN],
                ["convert.py", f"--load={root}/start", f"--save={root}/hf"],
                *(["train.py", *arguments(root, root / name, *args)] for name, args in RUNS.items())]
    for command in commands:
        done = script(*command)
        assert done.returncode == 0, done.stderr
    # It has another name for one id.
    path = shutil.copytree(root / "hf", root / "other") / "tokenizer.json"
    path.write_text(path.read_text().replace("<|user_end|>", "<|other|>"))
    return root


def arguments(root, out, *args, start="start"):
    """It is told nothing of the model's shape."""
    return [f"--data={root}/own", f"--init_from={root}/{start}", f"--out={out}", "--seed=29", *RUN, *args]


def go_on(root, out, *args, **how):
    return script("train.py", *arguments(root, out, *args, **how))


def validation(out):
    return [entry["val_loss"] for entry in read_log(str(out)) if "val_loss" in entry]


def windows(root):
    return TokenDataset(str(root / "own"), "val", 64, 29).batch(0, 8)


def cut_back(out, new):
    """A copy of a run, as if it had been killed before its last two checkpoints."""
    shutil.copytree(out, new)
    os.remove(new / "summary.json")
    for step in (6, 8):
        shutil.rmtree(new / "ckpt" / f"step-0000000{step}")


def test_the_curve_begins_with_the_loss_of_the_start_model_and_everything_else_is_new(lab):
    idx, targets, keep, doc = windows(lab)
    _, nll = convert.load_run(str(lab / "start"))[0](idx, targets, doc=doc, per_token=True)
    first, *steps = read_log(str(lab / "continued"))
    assert first["step"] == first["tokens"] == steps[0]["lr"] == 0
    assert first["val_loss"] == pytest.approx(nll[keep].mean().item(), rel=1e-6)
    assert validation(lab / "continued")[-1] < first["val_loss"]


@pytest.mark.parametrize("name", RUNS)
def test_stopped_and_resumed_from_the_exported_start_it_ends_in_the_same_bits(lab, tmp_path, name):
    cut_back(lab / name, tmp_path / "run")
    done = go_on(lab, tmp_path / "run", *RUNS[name], "--resume", start="hf")
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr
    assert same(weights(tmp_path / "run"), weights(lab / name))
    assert validation(tmp_path / "run") == validation(lab / name)


@pytest.mark.parametrize("name, split", [("continued", []), ("adapted", ["--sequence_parallel=2"])])
def test_two_ranks_begin_and_end_as_one(launch, lab, tmp_path, name, split):
    args = arguments(lab, tmp_path / "run", *RUNS[name], *split, "--parallel=fsdp", start="hf")
    codes, text = launch(2, *args, logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    assert validation(tmp_path / "run") == pytest.approx(validation(lab / name), abs=2e-5)


def test_in_exact_mode_two_ranks_resume_adapters_of_one_to_its_bits(launch, lab, tmp_path):
    args = *ADAPTERS, "--exact", "--base=bf16"
    assert go_on(lab, tmp_path / "one", *args).returncode == 0
    cut_back(tmp_path / "one", tmp_path / "two")
    args = arguments(lab, tmp_path / "two", *args, "--parallel=fsdp", "--resume")
    codes, text = launch(2, *args, logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    assert sha_of(tmp_path / "two") == sha_of(tmp_path / "one")


@torch.no_grad()
def test_peft_computes_the_loss_that_the_run_ends_with(lab):
    """
    transformers' model, given the run's RoPE, with PEFT's reading of the adapter, on the validation windows. A weight
    decay of 0.5 would be seen, had it met anything frozen. Checkpoints hold adapters alone.
    """
    config = transformers.AutoConfig.from_pretrained(lab / "hf")
    config.rope_parameters["rope_theta"] = 50.0
    published = transformers.AutoModelForCausalLM.from_pretrained(lab / "hf", config=config, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(published.eval(), lab / "adapted" / "adapter")
    idx, targets, keep, doc = windows(lab)
    mask = (doc[:, :, None] == doc[:, None]).tril()[:, None]
    want = F.cross_entropy(model(idx, attention_mask=mask).logits[keep], targets[keep]).item()
    assert validation(lab / "adapted")[-1] == pytest.approx(want, rel=1e-5)
    for file in (lab / "adapted" / "ckpt").glob("step-*/*.safetensors"):
        assert all(".lora_" in name for name in load_file(file))


@pytest.mark.parametrize("args, warned", [
    ("--block_size=128", True),
    ("--block_size=128 --rope_theta=1e6 --doc_mask=False", False),
    ("--block_size=32", False),
])
def test_window_and_rope_may_change(lab, tmp_path, args, warned):
    done = go_on(lab, tmp_path / "run", *args.split(), "--total_samples=24")
    assert done.returncode == 0 and ("has seen 64 at once" in done.stdout) == warned, done.stderr
    found = settings_of(tmp_path / "run")
    assert f"--block_size={found['block_size']}" in args and found["n_embd"] == 32
    assert (found["rope_theta"] == 1e6) == (not found["doc_mask"]) == ("rope" in args)


@pytest.mark.parametrize("args, says", [
    ("--init_from=nowhere", "is neither a folder here"),
    ("--init_from=ROOT/own", "no config.json"),
    ("--init_from=ROOT/other", "'<|user_end|>' there and '<|other|>' in the model"),
    ("--init_from=ROOT/adapted/adapter", "holds adapters"),
    ("--n_embd=64", "n_embd=64, but"),
    ("--init_from= --lora_r=4", "name it with --init_from"),
    ("--base=bf16", "their rank, --lora_r=16"),
    ("--lora_r=4 --self_guided=0.5", "freezes the matrices"),
    ("--lora_r=4 --lora_on=head", "all or some of q_proj"),
    ("--lora_r=4 --base=fp8", "there is fp32, bf16, int8, nf4"),
    ("--out=COPY --resume", "is of another run"),
    ("--out=COPY --resume --lora_r=4 --rope_theta=50", "lora_alpha 8.0 -> 32.0"),
    ("--out=COPY --resume --lora_r=4 --lora_alpha=8 --rope_theta=50 --init_from=ROOT/continued", "start_hash"),
])
def test_what_cannot_work_is_told_in_one_line(lab, tmp_path, args, says):
    cut_back(lab / "adapted", tmp_path / "copy")
    args = args.replace("ROOT", str(lab)).replace("COPY", str(tmp_path / "copy")).split()
    refused(go_on(lab, tmp_path / "run", *args), says)
    assert not (tmp_path / "run" / "ckpt").exists()


def test_a_longer_run_of_adapters_from_another_start_moves_no_checkpoint(lab, tmp_path):
    """It would continue from before its decay, but the frozen weights are other ones."""
    run = shutil.copytree(lab / "adapted", tmp_path / "run")
    before, longer = contents(run / "ckpt"), ["--resume", "--total_samples=128", *ADAPTERS]
    refused(go_on(lab, run, *longer, start="continued"), "start_hash")
    assert contents(run / "ckpt") == before and (run / "summary.json").exists()
    done = go_on(lab, run, *longer)
    assert done.returncode == 0 and "continues from before its decay" in done.stdout, done.stderr
