"""
train.py --init_from with --lora_r: a run that starts from the weights of another model, against transformers with PEFT.
Without adapters: test_pairs.py.
"""

import shutil

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import refused, script
from safetensors.torch import load_file
from trained import contents, log

import convert
from data import TokenDataset

RUN = """--total_samples=40 --warmup_samples=8 --decay_samples=16 --batch_size=8 --micro_batch=4 --lr=1e-3 --seed=29
    --sample_every=0 --min_lr=1e-4 --dtype=float32 --eval_every=4 --eval_windows=8 --last_eval_windows=8
    --checkpoint_every=2 --keep_checkpoints=0 --compile=False""".split()
ADAPTERS = "--lora_r=4 --lora_alpha=8 --lr=1e-2 --weight_decay=0.5 --rope_theta=50".split()


def go_on(lab, out, *args, start="pretrained"):
    """Run train.py --init_from. No flag gives the model's shape."""
    return script("train.py", f"--data={lab}/data", f"--init_from={lab}/{start}", f"--out={out}", *RUN, *args)


@pytest.fixture(scope="module")
def runs(lab, tmp_path_factory):
    """A run of adapters from the pretrained model."""
    root = tmp_path_factory.mktemp("runs")
    done = go_on(lab, root / "adapted", *ADAPTERS)
    assert done.returncode == 0, done.stderr
    return root


def validation(out):
    return [entry["val_loss"] for entry in log(out, "val_loss")]


def windows(lab):
    return TokenDataset(str(lab / "data"), "val", 256, 29).batch(0, 8)


@torch.no_grad()
def test_peft_computes_the_loss_that_the_run_ends_with(lab, runs):
    """
    transformers with the run's RoPE and PEFT's adapter computes the validation loss. A frozen weight that the weight
    decay of 0.5 had changed would change it. Checkpoints hold only adapters.
    """
    config = transformers.AutoConfig.from_pretrained(lab / "hf")
    config.rope_parameters["rope_theta"] = 50.0
    published = transformers.AutoModelForCausalLM.from_pretrained(lab / "hf", config=config, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(published.eval(), runs / "adapted" / "adapter")
    idx, targets, keep, doc = windows(lab)
    mask = (doc[:, :, None] == doc[:, None]).tril()[:, None]
    want = F.cross_entropy(model(idx, attention_mask=mask).logits[keep], targets[keep]).item()
    assert validation(runs / "adapted")[-1] == pytest.approx(want, rel=1e-5)
    assert convert.load_any(str(runs / "adapted"))[0].config.rope_theta == 50
    for file in (runs / "adapted" / "ckpt").glob("step-*/*.safetensors"):
        assert all(".lora_" in name for name in load_file(file))


def test_a_vocabulary_that_differs_in_one_id_is_an_error_of_the_start_and_of_a_teacher(lab, tmp_path):
    path = shutil.copytree(lab / "hf", tmp_path / "other") / "tokenizer.json"
    path.write_text(path.read_text().replace("<|user_end|>", "<|other|>"))
    for flag in ("--init_from", "--teacher"):
        done = go_on(lab, tmp_path / "run", f"{flag}={tmp_path}/other")
        refused(done, "another vocabulary", f"--load={tmp_path}/other")


def test_a_longer_run_of_adapters_from_another_start_moves_no_checkpoint(lab, tmp_path):
    """The run would continue from before its decay, but the frozen weights of its start are others now."""
    run, start, adapters = tmp_path / "run", tmp_path / "start", [f"--init_from={tmp_path}/start", *ADAPTERS]
    start.symlink_to(lab / "pretrained")
    assert go_on(lab, run, *adapters).returncode == 0
    before, longer = contents(run), ["--resume", "--total_samples=80", *adapters]
    start.unlink()
    start.symlink_to(lab / "sft")
    refused(go_on(lab, run, *longer), "was trained on other weights than those of")
    refused(go_on(lab, run, *longer, "--lora_alpha=4"), "lora_alpha 8.0 -> 4.0")
    refused(go_on(lab, run, *longer, f"--init_from={lab}/hf"), "init_from")
    assert contents(run) == before
    start.unlink()
    start.symlink_to(lab / "hf")
    done = go_on(lab, run, *longer)
    assert done.returncode == 0 and "continues from before its decay" in done.stdout, done.stderr
