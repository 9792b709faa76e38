"""train.py, engine/checkpoint.py, sample.py as a user runs them: whole processes, at the size of configs/tiny.py."""
import glob
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import types

import pytest
import torch

from studies import kit
from engine import checkpoint, memory
import convert
import model as model_file
import train
from ademamix import AdEMAMix
from conftest import ROOT, refused, same, script, weights
from data import TokenDataset
from model import Apertus, ApertusConfig


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    own = tmp_path_factory.mktemp("data") / "own"
    done = script("prepare.py", os.path.join(ROOT, "*.py"), f"--out={own}", "--tokenizer=byte", "--val_share=0.02")
    assert done.returncode == 0, done.stderr
    return str(own)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run of 20 steps that was never stopped."""
    out = str(tmp_path_factory.mktemp("runs") / "whole")
    args = f"--data={data}", f"--out={out}", "--dtype=float32", "--sample_every=20"
    done = script("train.py", "configs/tiny.py", *args, pictures=True)
    assert done.returncode == 0, done.stderr
    return out, done


def log(folder):
    with open(os.path.join(folder, "log.jsonl")) as f:
        return [json.loads(line) for line in f]


def losses(folder):
    return [entry["loss"] for entry in log(folder) if "loss" in entry]


def data_of(folder):
    """The path of the data that a run was trained on."""
    with open(os.path.join(folder, "config.json")) as f:
        return json.load(f)["data"]


def tiny(trained, *args):
    return script("train.py", "configs/tiny.py", f"--data={data_of(trained[0])}", "--dtype=float32", *args)


def test_a_run_folder_has_all_that_design_promises(trained):
    out, done = trained
    assert {"config.json", "log.jsonl", "loss.png", "ckpt", "summary.json"} <= set(os.listdir(out))
    steps = [e for e in log(out) if "loss" in e]
    assert [e["step"] for e in steps] == list(range(20))
    assert {"tokens", "loss", "kept", "grad_norm", "lr", "tok_s", "mfu", "memory_gib"} <= steps[0].keys()
    vocabulary = 320                                                         # of which a fresh model knows nothing
    assert steps[0]["loss"] == pytest.approx(math.log(vocabulary), rel=0.01)
    assert steps[-1]["loss"] < 4.5 and [e["step"] for e in log(out) if "val_bpb" in e] == [9, 19]
    assert steps[0]["lr"] == 0 and max(e["lr"] for e in steps) == pytest.approx(3e-3)
    assert "bits per byte" in done.stdout and "loss.png" in done.stdout


def test_mfu_is_the_share_of_the_peak_of_all_gpus(monkeypatch):
    """Two H100 of 989 TFLOP/s, 48.3 GFLOPs a token: 16,380 tokens per second are 40 % of what they could do."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 40 * 2**30)
    run = types.SimpleNamespace(device="cuda:1", ranks=types.SimpleNamespace(size=2))
    assert train.on_gpu(run, 48.3e9, 16_380) == pytest.approx(dict(mfu=0.4, memory_gib=40), rel=1e-3)


def test_stopped_and_resumed_ends_in_the_same_bits(trained, tmp_path):
    out = tmp_path / "halves"
    shutil.copytree(trained[0], out)
    shutil.rmtree(out / "ckpt" / "step-00000020")                            # as if killed after step 10's checkpoint
    with open(out / "log.jsonl", "a") as f:
        f.write('{"step": 17, "lo')
    done = tiny(trained, f"--out={out}", "--resume")
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr
    assert same(weights(trained[0]), weights(out))
    assert without_times(log(out)) == without_times(log(trained[0]))         # and in the same log, one line a step


def test_weights_that_a_file_fills_are_not_drawn(trained, tmp_path, monkeypatch):
    """A CPU takes minutes to draw the 8B's. A resumed run, and one from another's weights, end in the bits of before."""
    out, begun = tmp_path / "halves", ["--total_samples=24", "--decay_samples=8", f"--init_from={trained[0]}"]
    shutil.copytree(trained[0], out)
    shutil.rmtree(out / "ckpt" / "step-00000020")
    assert tiny(trained, f"--out={tmp_path / 'drawn'}", *begun).returncode == 0

    def draw(name, *args):
        raise AssertionError(f"{name} was drawn")
    monkeypatch.setattr(model_file, "draw", draw)
    for args in ([f"--out={out}", "--resume"], [f"--out={tmp_path / 'not'}", *begun]):
        done = tiny(trained, *args)
        assert done.returncode == 0, done.stderr
    assert same(weights(trained[0]), weights(out))
    assert same(weights(tmp_path / "drawn"), weights(tmp_path / "not"))
    with pytest.raises(AssertionError, match="embed_tokens.weight was drawn"):
        tiny(trained, f"--out={tmp_path / 'new'}")


def test_without_an_intact_checkpoint_a_restarted_run_begins_with_drawn_weights(trained, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(trained[0], out)
    for folder in glob.glob(f"{out}/ckpt/step-*"):
        os.remove(f"{folder}/manifest.json")
    done = tiny(trained, f"--out={out}", "--resume", "--allow_restart=True")
    assert done.returncode == 0 and "passed over" in done.stdout, done.stderr
    assert same(weights(trained[0]), weights(out))


def test_stages_one_by_one_are_the_run_through_all(tmp_path):
    """Another mixture after 10 of 20 steps, and another order too."""
    for name, word in (("a", "alpha"), ("b", "beta")):
        rows = [json.dumps(dict(text=f"Text {i} has the word {word}. " * 30)) for i in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    data, table, through, parts = (tmp_path / name for name in ("data", "table.py", "through", "parts"))
    texts = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    done = script("prepare.py", *texts, "--source_by=file", "--tokenizer=byte", f"--out={data}")
    assert done.returncode == 0, done.stderr
    rows = '("one", ("a.jsonl",), 80, 28), ("two", {"a.jsonl": 1, "b.jsonl": 3}, 160, 29)'
    table.write_text(f"stages = ({rows})\n", encoding="utf-8")

    def train(out, *args):
        return script("train.py", "configs/tiny.py", table, f"--data={data}", f"--out={out}", *args)

    for out, *args in ((through, "--stage=all"), (parts, "--stage=one"), (parts, "--resume", "--stage=two")):
        done = train(out, *args)
        assert done.returncode == 0, done.stderr
    assert same(weights(through), weights(parts)) and losses(through) == losses(parts)
    refused(train(parts, "--stage=three"), "three")
    refused(train(parts, "--resume"), "is of another run")


@pytest.mark.parametrize("flag", [
    "--activation=swiglu", "--optimizer=adamw", "--goldfish_k=0", "--loss_average=micro", "--schedule=cosine",
    "--batch_ramp_at=80"])
def test_an_ablation_needs_nothing_but_its_flag(trained, tmp_path, flag):
    length = "--total_samples=80", "--warmup_samples=8", "--decay_samples=16"
    done = tiny(trained, f"--out={tmp_path / 'run'}", flag, *length, "--eval_every=5")
    assert done.returncode == 0, done.stderr
    assert log(tmp_path / "run")[-2]["loss"] < 5.6


def test_without_a_compiler_it_says_so_and_runs_eagerly(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = tiny(trained, f"--out={tmp_path / 'run'}", "--compile=True", "--total_samples=24", "--decay_samples=8")
    assert done.returncode == 0 and "no compiler found for cpu" in done.stdout


def test_the_loader_opens_no_second_pool_of_threads(trained, tmp_path, monkeypatch):
    """libgomp lets threads sleep at its barriers once there are more of them than cores."""
    seen, true, before = set(), TokenDataset.batch, torch.get_num_threads()

    def batch(*args):
        seen.add((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return true(*args)
    monkeypatch.setattr(TokenDataset, "batch", batch)
    torch.set_num_threads(2)
    try:
        length = "--total_samples=32", "--warmup_samples=8", "--decay_samples=8"
        assert tiny(trained, f"--out={tmp_path / 'run'}", *length).returncode == 0
    finally:
        torch.set_num_threads(before)
    assert seen == {(False, 1), (True, 2)}                                   # the loader; the training, which evaluates


def test_wandb_gets_every_line_of_the_log_or_its_absence_is_one_line(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)                          # as if it were not installed
    refused(tiny(trained, f"--out={tmp_path / 'none'}", "--wandb_log=True"), "pip install wandb")
    sent = []
    # The service cannot be reached from a test.
    fake = types.SimpleNamespace(
        init=lambda **settings: sent.append(settings["project"]),
        log=lambda entry, step: sent.append(entry))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    done = tiny(trained, f"--out={tmp_path / 'run'}", "--wandb_log", "--total_samples=32", "--decay_samples=8")
    assert done.returncode == 0 and sent == ["nanoapertus", *log(tmp_path / "run")]


FIVE_STEPS = "--total_samples=40", "--warmup_samples=8", "--decay_samples=0", "--last_eval_windows=16"


def test_accumulation_does_not_change_the_step(trained, tmp_path):
    """1 x 8, 2 x 4 and 8 x 1 are the same sum in another order."""
    for micro in (8, 4, 1):
        args = f"--out={tmp_path / str(micro)}", f"--micro_batch={micro}", "--goldfish_k=2"
        assert tiny(trained, *args, *FIVE_STEPS).returncode == 0
    for micro in (4, 1):
        assert losses(tmp_path / str(micro)) == pytest.approx(losses(tmp_path / "8"), abs=2e-5)


def test_averages_in_bf16_are_saved_so_and_a_stopped_run_goes_on_to_the_same_bits(trained, tmp_path):
    """2 bytes a number of both averages and 4 of the squares, by the header of the checkpoint's own files."""
    from safetensors import safe_open
    short = "--state_dtype=bfloat16", "--total_samples=48", "--warmup_samples=8", "--decay_samples=0"
    whole, stopped = str(tmp_path / "whole"), str(tmp_path / "stopped")
    for out, args in ((whole, []), (stopped, ["--checkpoint_every=3"])):
        assert tiny(trained, f"--out={out}", *short, *args).returncode == 0
    shutil.rmtree(f"{stopped}/ckpt/step-00000006")
    os.remove(f"{stopped}/summary.json")
    refused(tiny(trained, f"--out={stopped}", *short, "--resume", "--state_dtype=float32"),
            "is of another run: state_dtype 'bfloat16' -> 'float32'")
    assert tiny(trained, f"--out={stopped}", *short, "--resume").returncode == 0
    assert same(weights(whole), weights(stopped)) and losses(whole) == losses(stopped)
    [file] = glob.glob(f"{stopped}/ckpt/step-00000006/*.safetensors")
    found = {}
    with safe_open(file, framework="pt") as f:
        for name in f.keys():
            found.setdefault(name.partition("/")[0], set()).add(f.get_slice(name).get_dtype())
    assert found == dict(model={"F32"}, exp_avg_fast={"BF16"}, exp_avg_slow={"BF16"}, exp_avg_sq={"F32"}, step={"F32"})


def test_a_run_from_before_the_averages_had_a_dtype_goes_on(trained, tmp_path):
    run = shutil.copytree(trained[0], tmp_path / "run")
    for path in (run / "ckpt").iterdir():
        manifest = checkpoint.read_manifest(str(path))
        del manifest["config"]["state_dtype"]
        (path / "manifest.json").write_text(checkpoint.sealed(manifest))
    more = "--total_samples=168", "--decay_samples=48"
    assert tiny(trained, f"--out={run}", "--resume", *more).returncode == 0


def test_a_run_that_the_device_cannot_hold_is_told_the_sum_before_anything_is_written(trained, tmp_path, monkeypatch):
    """8 layers of 3 x 1024 x 1024 + 2 x 1024 x 4096 and two vocabularies are 93M parameters, of 20 bytes or 16."""
    monkeypatch.setattr(memory, "memory_of", lambda device: 2e9)
    large = "--n_embd=1024", "--ffn_dim=4096", "--n_layer=8"
    refused(tiny(trained, f"--out={tmp_path / 'run'}", *large),
            "a step takes about 2.1 GB (weights 0.4, gradients 0.4, states 1.1, ",
            "and cpu has 2.0: --state_dtype=bfloat16 takes 1.8\n")
    assert not (tmp_path / "run").exists()


def test_a_step_whose_gradient_is_no_number_is_skipped_and_changes_nothing(trained, tmp_path, monkeypatch):
    """The norm of the third step is nan: its weights are the second's, bit for bit, and the run goes on."""
    from engine import parallel
    norms, true = [], parallel.square_norm

    def square_norm(*args):
        norms.append(true(*args))
        return norms[-1] * math.nan if len(norms) == 3 else norms[-1]
    monkeypatch.setattr(parallel, "square_norm", square_norm)
    saves = "--checkpoint_every=1", "--keep_checkpoints=0"
    done = tiny(trained, f"--out={tmp_path}", "--skip_nonfinite=1", *saves, *FIVE_STEPS)
    assert done.returncode == 0, done.stderr
    steps = [e for e in log(tmp_path) if "skipped" in e]
    assert [e["skipped"] for e in steps] == [0, 0, 1, 0, 0] and steps[2]["grad_norm"] is None
    two, three, four = (load_file(tmp_path / "ckpt" / f"step-{n:08d}") for n in (2, 3, 4))
    assert same(two, three) and not same(two, four)


def load_file(folder):
    """The weights of a checkpoint's safetensors files, without the optimizer's."""
    from safetensors.torch import load_file
    found = {}
    for name in os.listdir(folder):
        if name.endswith(".safetensors"):
            found.update(load_file(folder / name))
    return {name: t for name, t in found.items() if name.endswith(".weight") and "exp_avg" not in name}


def test_a_sample_is_drawn_as_often_as_asked_and_fits_the_window(trained, tmp_path, monkeypatch):
    import generate
    asked = []
    monkeypatch.setattr(generate, "generate", lambda model, prompts, n, **how: asked.append(n) or [[*prompts[0], 65]])
    short = ["--total_samples=48", "--warmup_samples=8", "--decay_samples=0"]
    assert tiny(trained, f"--out={tmp_path}", "--sample_every=2", *short).returncode == 0
    assert asked == [64] * 3                                                 # of six steps, a whole window each


def test_a_line_of_the_log_that_is_no_text_is_dropped(tmp_path):
    from engine import runs
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 0}\n\xff\xfe\n{"step": 1}\n{"step": 2}\n')
    runs.cut_log(str(path), 2)
    assert path.read_bytes() == b'{"step": 0}\n{"step": 1}\n'


def test_zero_means_at_the_end_only(trained, tmp_path):
    zeros = "--eval_every=0", "--checkpoint_every=0", "--sample_every=0"
    assert tiny(trained, f"--out={tmp_path}", *zeros).returncode == 0
    entries = log(tmp_path)
    assert [e["step"] for e in entries if "val_bpb" in e] == [entries[-1]["step"]]
    assert len(os.listdir(tmp_path / "ckpt")) == 1


@pytest.mark.parametrize("args, says", [
    (["--lr=1e30", "--grad_clip=0.0"], "Stopped before the update; the last checkpoint"),
    (["--vocab_size=131072"], "made by a tokenizer of 320 ids"),
    (["--block_size=10000000"], "lower block_size"),
    (["--n_head=3"], "n_embd=64 is not divisible by n_head=3"),
    (["--n_kv_head=3"], "n_head=4 is not divisible by n_kv_head=3"),
    (["--n_embd=36", "--n_head=4"], "is odd"),
    (["--data=/nowhere"], "no data in '/nowhere'"),
    (["--micro_batch=3"], "not a multiple of micro_batch=3"),
    (["--optimizer=sgd"], "there is ademamix and adamw"),
    (["--state_dtype=float16"], "there is float32 and bfloat16"),
    (["--state_dtype=bfloat16", "--optimizer=adamw"], "take --optimizer=ademamix"),
    (["--schedule=linear"], "there is wsd and cosine"),
    (["--decay_samples=1000"], "do not fit into total"),
    (["--device=cuda"] if not torch.cuda.is_available() else ["--device=tpu"], "is not here"),
    (["--dtype=float16"], "there is auto, float32 and bfloat16"),
    (["--n_layers=1"], "did you mean 'n_layer'"),
])
def test_what_cannot_work_is_told_in_one_line(trained, tmp_path, args, says):
    done = tiny(trained, f"--out={tmp_path / 'run'}", *args)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("train.py: ") and says in last and "Traceback" not in done.stderr


@pytest.mark.parametrize("args, says", [
    (["--keep_checkpoints=-1"], "keep_checkpoints=-1: want how many of the newest to keep, or 0 to keep all"),
    (["--total_samples=7"], "total_samples=7 is less than one step of batch_size=8"),
    (["--total_samples=80", "--decay_samples=100"],
     "(10 steps): say --total_samples=80 --warmup_samples=4 --decay_samples=24"),
    (["--steps=10"], "10 steps of batch_size=8 are --total_samples=80 --warmup_samples=4 --decay_samples=24")])
def test_a_length_that_cannot_be_is_answered_with_what_to_type(trained, tmp_path, args, says):
    refused(tiny(trained, f"--out={tmp_path / 'run'}", *args), says)
    assert not (tmp_path / "run").exists()


def test_what_it_says_to_type_runs(trained, tmp_path):
    said = tiny(trained, "--total_samples=24", f"--out={tmp_path / 'run'}").stderr
    done = tiny(trained, *said.split(": say ")[1].split(), f"--out={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert [e["step"] for e in log(tmp_path / "run") if "loss" in e] == [0, 1, 2]


def interrupted(split):
    """TokenDataset.batch, but a batch of this split is answered by an interrupt: the run ends as if it were killed."""
    true = TokenDataset.batch

    def batch(self, *args):
        if self.split == split:
            raise KeyboardInterrupt
        return true(self, *args)
    return batch


@pytest.mark.parametrize("ramp, samples", [(0, 1_000_000), (500_000, 1_000_000), (999_999, 1_000_000)])
def test_epochs_count_the_samples_of_the_batch_ramp(trained, tmp_path, monkeypatch, ramp, samples):
    """62,500 steps of 8 and 31,250 of 16 are a million samples, and 93,750 steps of 8 are not."""
    windows = TokenDataset(data_of(trained[0]), "train", 64).n_windows
    monkeypatch.setattr(TokenDataset, "batch", interrupted("train"))         # the line comes before the first step
    done = tiny(trained, f"--out={tmp_path / 'run'}", "--total_samples=1000000", f"--batch_ramp_at={ramp}")
    assert done.returncode == 130 and f"so {samples / windows:.1f} epochs" in done.stdout


def without_times(entries):
    return [{k: v for k, v in e.items() if k not in ("tok_s", "seconds")} for e in entries]


def test_the_last_save_comes_before_the_last_validation_which_is_made_up_for(trained, tmp_path, monkeypatch):
    """
    The 8B's validation takes long, and a stage's end must not be lost to it. After a kill there only the validation is
    done again.
    """
    out = tmp_path / "run"
    with monkeypatch.context() as m:
        m.setattr(TokenDataset, "batch", interrupted("val"))
        assert tiny(trained, f"--out={out}", "--eval_every=0").returncode == 130
    assert checkpoint.steps_in(out / "ckpt") == [10, 20] and not (out / "summary.json").exists()
    assert not kit.finished(out)
    done = tiny(trained, f"--out={out}", "--eval_every=0", "--resume")
    assert done.returncode == 0 and kit.finished(out), done.stderr
    whole = [e for e in log(trained[0]) if "loss" in e or e["step"] == 19]   # which was also validated after 10 steps
    assert without_times(log(out)) == without_times(whole)
    assert json.loads((out / "summary.json").read_text())["val_bpb"] == log(out)[-1]["val_bpb"]


@pytest.mark.parametrize("torn", ["", '{"val_bpb": 1', "null", "[]", '{"val_bpb": 2.0}'])
def test_a_torn_summary_is_written_again_and_the_log_has_one_validation_of_the_last_step(trained, tmp_path, torn):
    out = tmp_path / "run"
    shutil.copytree(trained[0], out)
    (out / "summary.json").write_text(torn)
    (out / "config.json").write_text('{"n_la')                               # cut by the same full disk
    assert not kit.finished(out)
    done = tiny(trained, f"--out={out}", "--sample_every=20", "--resume")
    assert done.returncode == 0, done.stderr
    assert without_times(log(out)) == without_times(log(trained[0]))
    ours, whole = (json.load(open(os.path.join(folder, "summary.json"))) for folder in (out, trained[0]))
    assert without_times([ours]) == without_times([whole])
    assert json.loads((out / "config.json").read_text())["n_layer"] == 2


@pytest.mark.parametrize("torn", [
    '{"step": 3, "loss": 5.{"step": 4, "loss": 5.1}\n', "\0\0\0\0\n", "null\n", '{"tokens": 3}\n'])
def test_a_torn_line_of_the_log_does_not_stop_a_resume(trained, tmp_path, torn):
    out = tmp_path / "run"
    shutil.copytree(trained[0], out)
    shutil.rmtree(out / "ckpt" / "step-00000020")
    lines = (out / "log.jsonl").read_text().splitlines(True)
    (out / "log.jsonl").write_text("".join(lines[:3]) + torn + "".join(lines[3:]))
    done = tiny(trained, f"--out={out}", "--resume")
    assert done.returncode == 0, done.stderr
    assert without_times(log(out)) == without_times(log(trained[0]))


def test_the_last_validation_is_bounded(trained, tmp_path, monkeypatch):
    seen, true = [], TokenDataset.batch

    def batch(self, first, n):
        if self.split == "val":
            seen.append((first, n))
        return true(self, first, n)
    monkeypatch.setattr(TokenDataset, "batch", batch)
    args = ["--total_samples=24", "--warmup_samples=0", "--decay_samples=0", "--eval_every=0"]
    assert tiny(trained, f"--out={tmp_path / 'few'}", *args, "--last_eval_windows=6").returncode == 0
    assert seen == [(0, 4), (2, 4)]
    seen.clear()
    assert tiny(trained, f"--out={tmp_path / 'all'}", *args, "--last_eval_windows=0").returncode == 0
    windows = TokenDataset(data_of(trained[0]), "val", 64).n_windows
    assert seen[-1] == (windows - 4, 4) and len(seen) == -(-windows // 4)


@pytest.mark.parametrize("flag, says", [
    ("--optimizer=adamw", "optimizer 'ademamix' -> 'adamw'"),
    ("--batch_ramp_at=80", "batch_ramp_at 0 -> 80"),
    ("--batch_size=16", "batch_size 8 -> 16"),
    ("--seed=3", "seed 28 -> 3"),
    ("--qk_norm=False", "qk_norm"),
    ("--rope_theta=1e4", "rope_theta"),
    ("--tie_embeddings", "tie_embeddings"),
    ("--doc_mask=False", "doc_mask")])
def test_a_run_is_not_resumed_as_another(trained, flag, says):
    before = log(trained[0])
    done = tiny(trained, f"--out={trained[0]}", "--resume", "--total_samples=320", flag)
    refused(done, "is of another run", says)
    assert log(trained[0]) == before


def test_a_run_is_not_overwritten_and_a_finished_one_not_gone_on_with(trained):
    before = open(os.path.join(trained[0], "log.jsonl")).read()
    for args, says in (
            ([], "--resume goes on with it"),
            (["--resume"], "is finished"),
            (["--resume", "--n_layer=3"], "n_layer 2 -> 3")):
        done = tiny(trained, f"--out={trained[0]}", *args)
        assert done.returncode == 2 and says in done.stderr
    assert open(os.path.join(trained[0], "log.jsonl")).read() == before


# -----------------------------------------------------------------------------
# checkpoints that lie


def flip(path, at, bit=3):
    raw = bytearray(open(path, "rb").read())
    raw[at % len(raw)] ^= 1 << bit
    open(path, "wb").write(raw)


@pytest.mark.parametrize("damage", [
    lambda folder: flip(shard(folder), 12345),
    lambda folder: flip(shard(folder), -1),
    lambda folder: os.truncate(shard(folder), 5000),
    lambda folder: os.remove(shard(folder)),
    lambda folder: flip(os.path.join(folder, "manifest.json"), 40),
    lambda folder: os.truncate(os.path.join(folder, "manifest.json"), 0)])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(trained, tmp_path, damage, capsys):
    shutil.copytree(os.path.join(trained[0], "ckpt"), tmp_path / "ckpt")
    damage(str(tmp_path / "ckpt" / "step-00000020"))
    assert checkpoint.newest_intact(tmp_path / "ckpt")[1]["step"] == 10
    assert "passed over" in capsys.readouterr().out
    damage(str(tmp_path / "ckpt" / "step-00000010"))
    with pytest.raises(ValueError, match="no checkpoint .* is intact"):
        checkpoint.newest_intact(tmp_path / "ckpt")


def shard(folder):
    return next(os.path.join(folder, f) for f in os.listdir(folder) if f.endswith(".safetensors"))


def test_a_pickled_or_foreign_checkpoint_is_refused_and_nothing_runs(trained, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)
    out = tmp_path / "run"
    shutil.copytree(trained[0], out)
    for step in ("step-00000010", "step-00000020"):
        torch.save({"x": Evil()}, shard(out / "ckpt" / step))
    done = script("sample.py", f"--init_from={out}")
    assert done.returncode == 2 and "no checkpoint" in done.stderr and not (tmp_path / "executed").exists()
    # The same files under a manifest whose hashes hold.
    last, pickled = out / "ckpt" / "step-00000020", shard(out / "ckpt" / "step-00000020")
    manifest = checkpoint.verified(os.path.join(trained[0], "ckpt", "step-00000020"))
    manifest["files"] = {os.path.basename(pickled): checkpoint.sha256(pickled)}
    checkpoint.write_flushed(last / "manifest.json", checkpoint.sealed(manifest))
    done = script("sample.py", f"--init_from={out}")
    assert done.returncode == 2 and "not readable as safetensors" in done.stderr
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_of_another_shape_names_the_difference(trained):
    path, _ = checkpoint.newest_intact(os.path.join(trained[0], "ckpt"))
    config = convert.load_run(trained[0])[0].config
    other = Apertus(ApertusConfig(**{**vars(config), "ffn_dim": 96}))
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj.weight is \(64, 160\) there and \(64, 96\) here"):
        checkpoint.load(path, other)


def test_optimizer_states_come_back_bit_for_bit(tmp_path):
    config = ApertusConfig(block_size=8, vocab_size=33, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24)
    def fresh():
        model = Apertus(config)
        return model, AdEMAMix(model.parameters(), lr=1e-2, beta3_warmup=5, alpha_warmup=5, compile=False)
    def step(model, opt, i):
        idx = torch.arange(8)[None] + i
        model(idx, idx + 1)[1].backward()
        opt.step()
        opt.zero_grad()
    a, opt_a = fresh()
    for i in range(4):
        step(a, opt_a, i)
    path = checkpoint.save(str(tmp_path), 4, a, opt_a, dict(note="x"))
    b, opt_b = fresh()
    checkpoint.load(path, b, opt_b)
    for i in range(4, 8):
        step(a, opt_a, i), step(b, opt_b, i)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs to mount a small tmpfs")
def test_a_full_disk_keeps_the_old_checkpoint(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", small], capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    try:
        model = torch.nn.Linear(128, 256)                                    # 131 kB: fits once, not twice
        opt = torch.optim.SGD(model.parameters())
        checkpoint.save(str(small), 1, model, opt, {})
        with pytest.raises(OSError, match="checkpoint of step 2 was not written"):
            checkpoint.save(str(small), 2, torch.nn.Linear(256, 512), opt, {})
        assert os.listdir(small) == ["step-00000001"] and checkpoint.newest_intact(small)[1]["step"] == 1
    finally:
        subprocess.run(["umount", small])


def test_only_the_newest_checkpoints_stay(tmp_path):
    model = torch.nn.Linear(2, 2)
    for step in range(1, 6):
        checkpoint.save(str(tmp_path), step, model, torch.optim.SGD(model.parameters()), {}, keep=2)
    assert checkpoint.steps_in(tmp_path) == [4, 5]


# -----------------------------------------------------------------------------
# sampling


def test_samples_are_repeatable_and_streaming_prints_the_same_text(trained):
    args = f"--init_from={trained[0]}", "--start=def ", "--max_new_tokens=40", "--seed=3"
    one, again = script("sample.py", *args), script("sample.py", *args)
    assert one.returncode == 0 and one.stdout == again.stdout and one.stdout.startswith("def "), one.stderr
    several = script("sample.py", f"--init_from={trained[0]}", "--num_samples=3", "--max_new_tokens=10")
    assert several.stdout.count("-" * 40) == 3


def test_chat_answers_until_an_empty_line(trained):
    done = script("sample.py", f"--init_from={trained[0]}", "--chat", "--max_new_tokens=8", stdin="hi\nand you?\n\n")
    assert done.returncode == 0 and len(done.stdout) > 2, done.stderr
