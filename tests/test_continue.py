"""
train.py --init_from, alone and with --lora_r: a run that begins with the weights of another model, against that model's
own loss, against transformers with PEFT, against the run that was never stopped, and on two ranks against one.
"""

import os
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import convert
import tokenizer
from conftest import refused, same, script, weights
from data import TokenDataset
from engine import plot
from engine.runs import settings_of
from faults.launch import sha_of
from trained import contents

SHAPE = (
    "--block_size=64 --n_layer=2 --n_head=4 --n_kv_head=2 --n_embd=32 --ffn_dim=64".split()
)
RUN = """--total_samples=64 --warmup_samples=8 --decay_samples=16 --batch_size=8 --micro_batch=4 --lr=1e-3
    --sample_every=0 --lr_floor=1e-4 --dtype=float32 --eval_every=4 --eval_windows=8 --last_eval_windows=8
    --checkpoint_every=2 --keep_checkpoints=0 --compile=False""".split()
ADAPTERS = [
    "--lora_r=4",
    "--lora_alpha=8",
    "--lr=1e-2",
    "--weight_decay=0.5",
    "--rope_theta=50",
]


@pytest.fixture(scope="module")
def lab(data):
    """A start model as a run and as a Hugging Face folder, and two runs from it: of all weights and of adapters."""
    root = data.parent
    done = script("train.py", f"--data={data}", f"--out={root / 'start'}", *SHAPE, *RUN)
    assert done.returncode == 0, done.stderr
    assert (
        script("convert.py", f"--load={root / 'start'}", f"--save={root / 'hf'}").returncode
        == 0
    )
    for name, args in (("continued", []), ("adapted", ADAPTERS)):
        done = go_on(root, root / name, *args)
        assert done.returncode == 0, done.stderr
    return root


def arguments(root, out, *args, start="start"):
    """It is told nothing of the model's shape."""
    return [
        f"--data={root / 'own'}",
        f"--init_from={root / start}",
        f"--out={out}",
        "--seed=29",
        *RUN,
        *args,
    ]


def go_on(root, out, *args, **how):
    return script("train.py", *arguments(root, out, *args, **how))


def validation(out):
    return [entry["val_loss"] for entry in plot.read_log(str(out)) if "val_loss" in entry]


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
    first, *steps = plot.read_log(str(lab / "continued"))
    assert first["step"] == first["tokens"] == 0
    assert first["val_loss"] == pytest.approx(nll[keep].mean().item(), rel=1e-6)
    assert [entry["step"] for entry in steps if "loss" in entry] == list(
        range(8)
    ) and steps[0]["lr"] == 0
    assert validation(lab / "continued")[-1] < first["val_loss"]


@pytest.mark.parametrize("name, args", [("continued", []), ("adapted", ADAPTERS)])
def test_stopped_and_resumed_from_the_exported_start_it_ends_in_the_same_bits(
    lab, tmp_path, name, args
):
    cut_back(lab / name, tmp_path / "run")
    done = go_on(lab, tmp_path / "run", *args, "--resume", start="hf")
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr
    assert same(weights(tmp_path / "run"), weights(lab / name))
    assert validation(tmp_path / "run") == validation(lab / name)


@pytest.mark.parametrize(
    "one, args",
    [
        ("continued", "--parallel=fsdp"),
        ("adapted", "--parallel=fsdp --sequence_parallel=2"),
    ],
)
def test_two_ranks_begin_and_end_as_one(launch, lab, tmp_path, one, args):
    adapters = ADAPTERS if one == "adapted" else []
    args = arguments(lab, tmp_path / "run", *adapters, *args.split(), start="hf")
    codes, text = launch(2, *args, logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    assert validation(tmp_path / "run") == pytest.approx(validation(lab / one), abs=2e-5)


def test_in_exact_mode_two_ranks_resume_adapters_of_one_to_its_bits(launch, lab, tmp_path):
    args = *ADAPTERS, "--exact", "--base=bf16"
    assert go_on(lab, tmp_path / "one", *args).returncode == 0
    cut_back(tmp_path / "one", tmp_path / "two")
    args = arguments(lab, tmp_path / "two", *args, "--parallel=fsdp", "--resume")
    codes, text = launch(2, *args, logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    assert sha_of(tmp_path / "two") == sha_of(tmp_path / "one")


def test_peft_computes_the_loss_that_the_run_ends_with(lab):
    """
    transformers' model, given the run's RoPE, with PEFT's reading of the adapter, on the validation windows. A weight
    decay of 0.5 would be seen, had it met anything frozen. Checkpoints hold adapters alone.
    """
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.AutoConfig.from_pretrained(lab / "hf")
    config.rope_parameters["rope_theta"] = 50.0
    published = transformers.AutoModelForCausalLM.from_pretrained(
        lab / "hf", config=config, dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(published.eval(), lab / "adapted" / "adapter")
    idx, targets, keep, doc = windows(lab)
    mask = (doc[:, :, None] == doc[:, None]).tril()[:, None]
    with torch.no_grad():
        logits = model(idx, attention_mask=mask).logits
    want = F.cross_entropy(logits[keep], targets[keep]).item()
    assert validation(lab / "adapted")[-1] == pytest.approx(want, rel=1e-5)
    for file in (lab / "adapted" / "ckpt").glob("step-*/*.safetensors"):
        assert all(".lora_" in name for name in load_file(file))


def test_window_and_rope_may_change(lab, tmp_path):
    for k, (args, warned) in enumerate(
        [
            ("--block_size=128", True),
            ("--block_size=128 --rope_theta=1e6 --doc_mask=False", False),
            ("--block_size=32", False),
        ]
    ):
        done = go_on(lab, tmp_path / str(k), *args.split(), "--total_samples=24")
        assert (
            done.returncode == 0 and ("has seen 64 at once" in done.stdout) == warned
        ), done.stderr
    config = settings_of(tmp_path / "1")
    assert (
        config["block_size"],
        config["rope_theta"],
        config["doc_mask"],
        config["n_embd"],
    ) == (128, 1e6, False, 32)


def test_the_first_difference_of_two_vocabularies():
    byte = tokenizer.load("byte")
    names = list(byte.special)
    names[5] = "<other>"
    other, fewer = (
        tokenizer.Tokenizer("x", *how)
        for how in ((byte.pieces, names), (byte.pieces[:-1], byte.special))
    )
    assert tokenizer.first_difference(byte, tokenizer.load("byte")) is None
    assert tokenizer.first_difference(byte, other) == (5, list(byte.special)[5], "<other>")
    assert tokenizer.first_difference(fewer, byte) == (319, None, byte.pieces[-1])


@pytest.mark.parametrize(
    "args, says",
    [
        ("--init_from=nowhere", "is neither a folder here"),
        ("--init_from=ROOT/own", "no config.json"),
        ("--init_from=ROOT/other", "another vocabulary"),
        ("--init_from=ROOT/adapted/adapter", "holds adapters"),
        ("--n_embd=64", "n_embd=64, but"),
        ("--init_from= --lora_r=4", "name it with --init_from"),
        ("--base=bf16", "their rank, --lora_r=16"),
        ("--lora_r=4 --self_guided=0.5", "freezes the matrices"),
        ("--lora_r=4 --lora_on=head", "all or some of q_proj"),
        ("--lora_r=4 --base=fp8", "there is fp32, bf16, int8, nf4"),
        ("--out=COPY --resume", "is of another run"),
        (
            "--out=COPY --resume --lora_r=4 --rope_theta=50",
            "lora_alpha 8.0 -> 32.0",
        ),
        (
            "--out=COPY --resume --lora_r=4 --lora_alpha=8 --rope_theta=50 --init_from=ROOT/continued",
            "start_hash",
        ),
    ],
)
def test_what_cannot_work_is_told_in_one_line(lab, tmp_path, args, says):
    """`other` has another name for one id."""
    if not (lab / "other").exists():
        shutil.copytree(lab / "hf", lab / "other")
        path = lab / "other" / "tokenizer.json"
        path.write_text(path.read_text().replace("<|user_end|>", "<|other|>"))
    cut_back(lab / "adapted", tmp_path / "copy")
    args = args.replace("ROOT", str(lab)).replace("COPY", str(tmp_path / "copy")).split()
    refused(go_on(lab, tmp_path / "run", *args), says)
    assert not (tmp_path / "run" / "ckpt").exists()


def test_a_longer_run_of_adapters_from_another_start_moves_no_checkpoint(lab, tmp_path):
    """It would continue from before its decay, but the frozen weights are other ones."""
    run = shutil.copytree(lab / "adapted", tmp_path / "run")
    before = contents(run / "ckpt")
    done = go_on(lab, run, "--resume", "--total_samples=128", *ADAPTERS, start="continued")
    refused(done, "start_hash")
    assert contents(run / "ckpt") == before and (run / "summary.json").exists()
    done = go_on(lab, run, "--resume", "--total_samples=128", *ADAPTERS)
    assert done.returncode == 0 and "continues from before its decay" in done.stdout, done.stderr
