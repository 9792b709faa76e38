"""
train.py as a user runs it: what it learns, where it resumes, what it refuses, when it ends. test_step.py holds its
steps to the same steps in fp64.
"""
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import types

import pytest
import torch

from conftest import refused, same, script, weights
from data import TokenDataset
from engine import checkpoint, parallel, restore
from trained import contents, data, equal, killed_after, log, ran, steps, trained  # noqa: F401

FEW = "--total_samples=24", "--warmup_samples=0", "--decay_samples=0"


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """20 steps that nothing happened to, validated after 10 of them and at the end."""
    return trained(data, tmp_path_factory.mktemp("runs") / "whole", "--eval_every=10")


# -----------------------------------------------------------------------------
# what it learns

SIX_STEPS = """
    --alpha_warmup=0 --beta3_warmup=0 --total_samples=48 --warmup_samples=16 --decay_samples=16 --lr=1e-2
    --lr_floor=1e-3 --betas=(0.8,0.95,0.99) --alpha=3.0 --eps=1e-4 --weight_decay=0.5 --last_eval_windows=11
""".split()
PINNED = """
                                             4.464658  2.163763  0.699219  4.424336
    --micro_batch=1                          4.464658  2.163763  0.699219  4.424336
    --exact                                  4.464658  2.163763  0.699219  4.424336
    --grad_clip=100.0                        4.084115  1.990556  0.699219  4.019135
    --grad_clip=0.0                          4.084115  1.990556  0.699219  4.019135
    --grad_clip=0.0 --optimizer=adamw        4.257890  1.979913  0.699219  4.213185
    --optimizer=adamw                        4.605942  2.071100  0.699219  4.587082
    --loss_average=micro                     4.464794  2.154028  0.699219  4.423547
    --batch_ramp_at=10                       5.202073  1.981478  0.683594  4.902627
    --schedule=cosine                        4.659912  1.971441  0.699219  4.654846
    --alpha_warmup=3 --beta3_warmup=9        4.314020  2.256878  0.699219  4.274270
    --goldfish_k=0                           4.446989  2.019386  0.976563  4.278494
    --qk_norm=False --tie_embeddings         4.346888  1.976975  0.699219  4.307749
    --state_dtype=bfloat16                   4.464725  2.164497  0.699219  4.424359
""".strip("\n").splitlines()


@pytest.mark.parametrize("row", PINNED, ids=lambda row: " ".join(row.split()[:-4]))
def test_the_sixth_step_is_the_one_that_was_proved(data, tmp_path, row):
    """
    Loss, gradient norm, kept tokens, and the loss over 11 windows after it: of commit ac03345, whose steps are those of
    the formulas in fp64.
    """
    *flags, loss, norm, kept, val = row.split()
    trained(data, tmp_path, *SIX_STEPS, *flags)
    *_, last, end = log(tmp_path)
    found = last["loss"], last["grad_norm"], last["kept"], end["val_loss"]
    assert found == pytest.approx([*map(float, (loss, norm, kept, val))], rel=1e-5)
    assert last["tokens"] == end["tokens"] == 48 * 32


def test_a_run_folder_holds_all_that_was_promised(data, tmp_path):
    """WSD of 2 samples up and 6 down, the loss of a fresh model over 320 ids, and the last step but one."""
    done = script("train.py", "configs/tiny.py", f"--data={data}", f"--out={tmp_path}", "--sample_every=20",
                  "--block_size=32", pictures=True)
    assert done.returncode == 0 and "bits per byte" in done.stdout and "ckpt" in os.listdir(tmp_path), done.stderr
    found = log(tmp_path, "loss")
    assert [e["step"] for e in found] == [*range(20)] and [e["step"] for e in log(tmp_path, "val_bpb")] == [9, 19]
    assert found[0]["loss"] == pytest.approx(math.log(320), rel=0.01) and found[-1]["loss"] < 4.5
    rates = [0, 1.5e-3, *[3e-3] * 13, *(3e-3 - 2.7e-3 * math.sqrt(i / 6) for i in range(1, 6))]
    assert [e["lr"] for e in found] == pytest.approx(rates)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["val_bpb"] == log(tmp_path)[-1]["val_bpb"] and summary["tokens"] == 160 * 32
    settings = json.loads((tmp_path / "config.json").read_text())
    assert (settings["n_embd"], settings["vocab_size"], settings["lr"]) == (64, 320, 3e-3)
    assert (tmp_path / "loss.png").stat().st_size > 10_000 and "9,481 tokens, so 0.5 epochs" in done.stdout


def test_the_ramp_counts_in_epochs_and_rates(data, tmp_path):
    """Steps of 8, 8, 16, 16 samples from 10 samples on: 48 of the 296 windows."""
    done = ran(data, tmp_path, *FEW, "--total_samples=48", "--batch_ramp_at=10", "--lr_floor=0.0", "--decay_samples=16")
    windows = TokenDataset(data, "train", 32).n_windows
    assert f"4 steps of 8 x 32 tokens per step; data: 9,481 tokens, so {48 / windows:.1f} epochs" in done.stdout
    assert [e["lr"] for e in log(tmp_path, "loss")] == [3e-3] * 4
    assert [e["tokens"] // 32 for e in log(tmp_path, "loss")] == [8, 16, 32, 48]


def test_of_zeros_and_numbers_of_windows(data, tmp_path, monkeypatch):
    """eval_every, checkpoint_every = 0: at the end only. The windows of a validation: 6 in batches of 4, each once."""
    seen, true = [], TokenDataset.batch

    def batch(self, first, n):
        # The loader opens no second pool of threads: libgomp lets threads sleep once there are more of them than cores.
        main = threading.current_thread() is threading.main_thread()
        seen.append((first, n) if not self.goldfish[0] else (main, torch.get_num_threads()))
        return true(self, first, n)
    monkeypatch.setattr(TokenDataset, "batch", batch)
    torch.set_num_threads(2)
    try:
        trained(data, tmp_path / "few", *FEW, "--checkpoint_every=0", "--last_eval_windows=6")
    finally:
        torch.set_num_threads(1)
    assert set(seen[:-2]) == {(False, 1)} and seen[-2:] == [(0, 4), (2, 4)]
    assert steps(tmp_path / "few") == [3] and len(log(tmp_path / "few", "val_loss")) == 1
    seen.clear()
    trained(data, tmp_path / "all", *FEW, "--last_eval_windows=0", "--eval_every=2", "--eval_windows=3")
    windows = TokenDataset(data, "val", 32).n_windows
    ours = [at for at in seen if type(at[0]) is int]
    assert ours[0] == (0, 3) and ours[-1] == (windows - 4, 4) and len(ours) == 1 + -(-windows // 4)
    assert [e["step"] for e in log(tmp_path / "all", "val_loss")] == [1, 2]


def test_a_sample_is_drawn_as_often_as_asked_and_fits_the_window(data, tmp_path, monkeypatch):
    import generate
    asked = []

    def noted(model, prompts, n, **how):
        asked.append((n, model.training, how["temperature"], how["top_p"]))
        return [[1, 65]]
    monkeypatch.setattr(generate, "generate", noted)
    trained(data, tmp_path, "--sample_every=3", *FEW, "--total_samples=40")
    assert asked == [(32, False, 0.8, 0.95)] * 2           # after step 3 and at the end


@pytest.mark.parametrize("allowed, bad, says", [
    (1, [3], ""),
    (0, [3], "step 2: loss 5.\\d+, gradient norm nan. Stopped before the update"),
    (1, [1, 3, 4], "step 3: loss 5.\\d+, gradient norm nan, after 1 skipped steps. Stopped before the update")])
def test_a_step_whose_gradient_is_no_number_changes_nothing(data, tmp_path, monkeypatch, allowed, bad, says):
    """The norm of these steps is nan, and so many in a row are allowed."""
    norms, true = [], parallel.square_norm

    def square_norm(*args):
        norms.append(true(*args))
        return norms[-1] * (math.nan if len(norms) in bad else 1)
    monkeypatch.setattr(parallel, "square_norm", square_norm)
    done = ran(data, tmp_path, f"--skip_nonfinite={allowed}", "--checkpoint_every=1", *FEW, "--total_samples=40")
    if says:
        assert done.returncode == 2 and re.search(says, done.stderr), done.stderr
        assert steps(tmp_path) == [*range(1, bad[-1])] and len(log(tmp_path)) == bad[-1] - 1
        return
    found = log(tmp_path, "loss")
    assert [e["skipped"] for e in found] == [0, 0, 1, 0, 0]
    assert found[2]["grad_norm"] is found[2]["loss"] is None and found[2]["lr"] == 3e-3
    two, three, four = (weights(killed_after(tmp_path, tmp_path / f"to{n}", n)) for n in (2, 3, 4))
    assert same(two, three) and not same(two, four)


# -----------------------------------------------------------------------------
# where it resumes


@pytest.mark.parametrize("torn", ['{"step": 3, "loss": 5.{"step": 4}', "\0\0\0", "null", '{"tokens": 3}', "[" * 9999])
def test_killed_and_resumed_ends_in_the_same_bits_and_the_same_log(data, whole, tmp_path, monkeypatch, torn):
    """Killed after step 12 with step 10 saved, files torn as by a full disk. No weights are drawn to be replaced."""
    run = killed_after(whole, tmp_path / "run", 10)
    lines = (run / "log.jsonl").read_text().splitlines(True)
    (run / "log.jsonl").write_text("".join([*lines[:3], torn + "\n", *lines[3:13]]) + '{"step": 12, "lo')
    (run / "config.json").write_text('{"n_la')
    with monkeypatch.context() as m:
        m.setattr("model.Apertus.init_weights", None)
        done = ran(data, run, "--eval_every=10", "--resume")
    assert done.returncode == 0 and f"resumed from {run}/ckpt/step-00000010" in done.stdout, done.stderr
    assert equal(run, whole) and log(run) == log(whole)
    assert json.loads((run / "config.json").read_text())["n_layer"] == 1


@pytest.mark.parametrize("torn", [None, "", '{"val_bpb": 1', "null", '{"val_bpb": 2.0}', '{"tokens": 4096}'])
def test_killed_after_its_last_save_a_run_makes_up_for_the_validation_alone(data, whole, tmp_path, torn):
    """The 8B's validation takes long. summary.json comes last, so a torn one is written again."""
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "summary.json").unlink()
    if torn is not None:
        (run / "summary.json").write_text(torn)
    before = contents(run / "ckpt")
    trained(data, run, "--eval_every=10", "--resume")
    assert log(run) == log(whole) and contents(run / "ckpt") == before
    assert json.loads((run / "summary.json").read_text())["tokens"] == 160 * 32
    refused(ran(data, run, "--resume"), "is finished: all 20 steps are done", "--init_from=")


def test_the_last_save_comes_before_the_last_validation(data, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    true = TokenDataset.batch

    def batch(self, *args):
        if not self.goldfish[0]:
            raise Killed
        return true(self, *args)
    monkeypatch.setattr(TokenDataset, "batch", batch)
    with pytest.raises(Killed):
        ran(data, tmp_path, *FEW, "--eval_every=3")
    assert steps(tmp_path) == [3] and not (tmp_path / "summary.json").exists()


def test_without_an_intact_checkpoint_a_run_stops_or_starts_over_if_it_may(data, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    for path in (run / "ckpt").iterdir():
        (path / "manifest.json").unlink()
    refused(ran(data, run, "--resume"), "no checkpoint in", "is intact (4 damaged)", "--allow_restart")
    done = ran(data, run, "--resume", "--allow_restart", "--eval_every=10")
    assert done.returncode == 0 and "passed over" in done.stdout and equal(run, whole) and log(run) == log(whole)


def test_stages_one_by_one_are_the_run_through_all(data, tmp_path):
    """Another mixture after 10 of 20 steps, and another order too. Only stages that have begun must be the same."""
    table = '"two", {"a.jsonl": 1, "b.jsonl": 3}, 160, 29'
    for name, row in (("table", table), ("other", table.replace("29", "30"))):
        (tmp_path / f"{name}.py").write_text(f'stages = ("one", ("a.jsonl",), 80, 28), ({row})\n', encoding="utf-8")
    through, parts = tmp_path / "through", tmp_path / "parts"
    trained(data, through, tmp_path / "table.py", "--stage=all")
    trained(data, parts, tmp_path / "other.py", "--stage=one")
    assert steps(parts) == [5, 10] and (parts / "summary.json").exists()
    trained(data, parts, tmp_path / "table.py", "--stage=two", "--resume")
    assert equal(parts, through)
    refused(ran(data, parts, tmp_path / "table.py", "--stage=three"), "three")
    refused(ran(data, parts, "--resume"), "is of another run", "stage True -> False")


PROGRAM = """
import train
from configurator import run
from engine.parallel import orderly_exit
from train import Apertus

def build(run):
    class Tasted(Apertus):
        def forward(self, *args, **kwargs):
            more, loss = super().forward(*args, **kwargs)
            if "n_tokens" in kwargs:
                more = dict(taste=loss.detach() * 0 + self.now[0] + self.now[1] / 10)
            return more, loss
    return Tasted(run.shape, seed=None)

if __name__ == "__main__":
    with orderly_exit():
        run(lambda: train.main(build, dict(taste=train.seed, other=1), ["taste"]), vars(train), train.shape)
"""


def test_another_script_trains_its_model_with_this_loop(data, launch, tmp_path):
    """Its terms are logged, summed over micro-batches 0 and 1 of each step, and its settings decide what may resume."""
    (tmp_path / "tasted.py").write_text(PROGRAM)
    args = [*"configs/tiny.py --n_layer=1 --n_embd=32 --ffn_dim=64 --block_size=32".split(), *FEW, f"--data={data}"]
    for seed, code, more in ((28, 0, []), (29, 2, ["--resume", "--total_samples=32"])):
        codes, text = launch(0, *args, *more, f"--out={tmp_path / 'run'}", f"--seed={seed}", logs=tmp_path / "log",
                             script=tmp_path / "tasted.py")
        assert codes == [code], text
    assert "taste 28 -> 29" in text
    assert [e["taste"] for e in log(tmp_path / "run", "loss")] == pytest.approx([0.1, 2.1, 4.1])


# -----------------------------------------------------------------------------
# what it refuses: in one line, before anything is built or written

REFUSED = """
    --vocab_size=131072                         | made by a tokenizer of 320 ids
    --block_size=10000000                       | lower block_size
    --n_head=3                                  | n_embd=32 is not divisible by n_head=3
    --n_embd=36 --n_head=4                      | is odd
    --data=/nowhere                             | no data in '/nowhere'
    --micro_batch=3                             | not a multiple of micro_batch=3 on each of 1 processes: try --batch_size=6
    --batch_size=0                              | must be at least 1
    --optimizer=sgd                             | there is ademamix and adamw
    --state_dtype=float16                       | there is float32 and bfloat16
    --state_dtype=bfloat16 --optimizer=adamw    | use --optimizer=ademamix
    --schedule=linear                           | schedule='linear': there is wsd and cosine
    --loss_average=mean                         | loss_average='mean': there is step and micro
    --decay_samples=1000                        | do not fit into total_samples=160 (20 steps): say --total_samples=160
    --schedule=cosine --warmup_samples=200      | warmup=200
    --total_samples=7                           | total_samples=7 is less than one step of batch_size=8
    --steps=10                                  | did you mean 'total_samples'
    --device=tpu                                | is not here
    --dtype=float16                             | there is auto, float32 and bfloat16
    --n_layers=1                                | did you mean 'n_layer'
    --stage=one                                 | stage='one', but there is no table of stages: name a config
    --parallel=ddp                              | wants a launcher
    --wandb_log                                 | pip install wandb
    --keep_checkpoints=-1                       | keep_checkpoints=-1: want how many
    --minutes=-1                                | it wants a positive number
    --minutes=1e999                             | it wants a positive number
    --minutes=5 --schedule=cosine               | schedule=wsd
    --minutes=5 --warmup_samples=0 --decay_samples=160    | a decay shorter than total_samples
""".strip().splitlines()


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.split("|")[0].strip())
def test_what_cannot_work_is_told_in_one_line(data, tmp_path, monkeypatch, row):
    monkeypatch.setitem(sys.modules, "wandb", None)        # as if it were not installed
    command, words = map(str.strip, row.split("|"))
    refused(ran(data, tmp_path / "run", *command.split()), "train.py: ", words)
    assert not (tmp_path / "run" / "ckpt").exists() and not (tmp_path / "run" / "log.jsonl").exists()


OTHERS = """
    --state_dtype=bfloat16           | state_dtype 'float32' -> 'bfloat16'
    --optimizer=adamw                | optimizer 'ademamix' -> 'adamw'
    --batch_ramp_at=80               | batch_ramp_at 0 -> 80
    --batch_size=16                  | batch_size 8 -> 16
    --seed=3                         | seed 28 -> 3
    --qk_norm=False --doc_mask=False | doc_mask True -> False; qk_norm True -> False
    --n_layer=3                      | n_layer 1 -> 3
""".strip().splitlines()


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.split("|")[0].strip())
def test_a_run_is_not_resumed_as_another(data, whole, row):
    command, words = map(str.strip, row.split("|"))
    before = contents(whole)
    done = ran(data, whole, "--resume", "--total_samples=320", *command.split())
    refused(done, f"{whole}/ckpt/step-00000020 is of another run", *words.split("; "))
    assert contents(whole) == before | {f"{whole}/.lock": contents(whole)[f"{whole}/.lock"]}


@pytest.mark.parametrize("files, resume, says", [
    (["config.json", "model.safetensors"], [], "holds files that are not of a run (config.json)"),
    (["config.json"], ["--resume"], "holds files that are not of a run"),
    (["meta.json", ".lock"], ["--resume"], "holds files that are not of a run"),
    (["log.jsonl"], [], "already holds a run: --resume continues it"),
    (["ckpt/step-00000005/manifest.json"], [], "already holds a run"),
])
def test_a_folder_that_is_neither_empty_nor_a_run_stays_as_it_is(data, tmp_path, files, resume, says):
    """An exported model, {"mine": 1}, data, and a run without --resume: unchanged byte for byte."""
    for name in files:
        os.makedirs(os.path.dirname(tmp_path / name), exist_ok=True)
        (tmp_path / name).write_text('{"mine": 1}')
    before = contents(tmp_path)
    refused(ran(data, tmp_path, *resume), says, "--out")
    assert contents(tmp_path) == before


# -----------------------------------------------------------------------------
# the rest


def test_without_a_compiler_it_says_so_and_runs_eagerly(data, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = ran(data, tmp_path, "--compile", *FEW)
    assert done.returncode == 0 and "no compiler found for cpu" in done.stdout


def test_wandb_gets_every_line_of_the_log(data, tmp_path, monkeypatch):
    """The service cannot be reached from a test: its two functions are noted."""
    sent = []
    fake = types.SimpleNamespace(
        init=lambda **how: sent.append((how["project"], how["name"], how["config"]["n_layer"])),
        log=lambda entry, step: sent.append({k: v for k, v in entry.items() if k not in ("tok_s", "seconds")}))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    trained(data, tmp_path / "run", "--wandb_log", *FEW)
    assert sent == [("nanoapertus", "run", 1), *log(tmp_path / "run")]


# -----------------------------------------------------------------------------
# when it ends: asked for its decay, in time, or longer than planned. Held by runs that were planned so from the start,
# whose schedule test_schedule.py holds; on several ranks by tests/faults

MORE = "--resume", "--total_samples=320", "--decay_samples=96"


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """runs("--flag"): the folder of a run that was planned so, each made once."""
    made = {}

    def run(*args):
        if args not in made:
            made[args] = trained(data, tmp_path_factory.mktemp("planned") / "run", *args)
        return made[args]
    return run


def in_each_step(monkeypatch, does):
    """does(0), does(1), ... in the steps of the next run, behind the place where a step looks for requests."""
    true, count = parallel.square_norm, itertools.count()

    def square_norm(*args):
        does(next(count))
        return true(*args)
    monkeypatch.setattr(parallel, "square_norm", square_norm)


def asks_in(monkeypatch, step, out, signalled=False):
    """Ask for the decay in this step, so that the next one sees it."""
    def does(now):
        if now == step and signalled:
            os.kill(os.getpid(), signal.SIGUSR1)
        elif now == step:
            (out / "cooldown").touch()
    in_each_step(monkeypatch, does)


# 30 % of the run behind 64 samples at the peak: 27, and so 91 in all.
PLANNED = "--total_samples=91", "--decay_samples=27"


@pytest.mark.parametrize("signalled", [False, True])
def test_asked_for_its_decay_a_run_is_the_one_that_was_planned_with_it(data, runs, tmp_path, monkeypatch, signalled):
    """And so it is when it is killed in that decay."""
    run = tmp_path / "run"
    with monkeypatch.context() as m:
        asks_in(m, 6, run, signalled)
        done = ran(data, run)
    assert done.returncode == 0 and "step      8   the decay begins, 3 steps" in done.stdout, done.stderr
    assert equal(run, runs(*PLANNED)) and steps(run) == [5, 8, 10, 11] and not (run / "cooldown").exists()
    assert equal(trained(data, killed_after(run, tmp_path / "again", 8), "--resume"), run)


def test_its_begin_is_on_disk_before_the_first_step_of_the_decay(data, tmp_path, monkeypatch):
    """A kill in that step would otherwise be followed by another begin, and the step would have two rates."""
    seen, true = {}, checkpoint.write

    def slowly(*args):
        time.sleep(0.2)
        return true(*args)

    def does(step):
        seen[step] = steps(tmp_path), (tmp_path / "cooldown").exists()
        assert len(log(tmp_path)) == step                  # and each step's line, for a killed run
        if step == 6:
            (tmp_path / "cooldown").touch()
    monkeypatch.setattr(checkpoint, "write", slowly)
    in_each_step(monkeypatch, does)
    trained(data, tmp_path, "--checkpoint_every=0")
    assert seen[7] == ([], True) and seen[8] == ([8], False)


@pytest.mark.parametrize("step, flags", [(15, ()), (2, ("--schedule=cosine", "--total_samples=64"))])
def test_a_rate_that_falls_already_is_not_changed(data, runs, tmp_path, monkeypatch, step, flags):
    with monkeypatch.context() as m:
        asks_in(m, step, tmp_path)
        done = ran(data, tmp_path, *flags)
    assert f"step {step + 2:6}   asked for its decay, but the rate falls already" in done.stdout, done.stderr
    assert equal(tmp_path, runs(*flags)) and not (tmp_path / "cooldown").exists()


def test_a_file_of_yesterday_is_meant_for_a_resumed_run_and_not_for_a_new_one(data, runs, tmp_path):
    (tmp_path / "cooldown").touch()
    assert equal(trained(data, tmp_path), runs()) and not (tmp_path / "cooldown").exists()
    run = killed_after(runs(), tmp_path / "run", 10)
    (run / "cooldown").touch()
    done = ran(data, run, "--resume")
    assert done.returncode == 0 and "step     11   the decay begins, 4 steps" in done.stdout, done.stderr


def test_a_file_named_stop_ends_a_run_that_resumes_to_the_same_bits(data, runs, tmp_path):
    (tmp_path / "stop").touch()
    done = ran(data, tmp_path)
    assert done.returncode == 0 and "stopped as asked after step 1, saved" in done.stdout, done.stderr
    assert steps(tmp_path) == [1] and not {"stop", "summary.json"} & set(os.listdir(tmp_path))
    assert equal(trained(data, tmp_path, "--resume"), runs())


# -----------------------------------------------------------------------------
# begun in time


def clocked(monkeypatch, first, each):
    """A clock by which the first step of a run takes so many seconds, each later one so many, and nothing else any."""
    now = [0.0]

    def does(step):
        now[0] += each if step else first
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    in_each_step(monkeypatch, does)


@pytest.fixture(scope="module")
def minute(data, tmp_path_factory):
    """A minute: 31 s for the first step, and 29 steps of a second."""
    with pytest.MonkeyPatch.context() as m:
        clocked(m, 31.0, 1.0)
        return trained(data, tmp_path_factory.mktemp("anytime") / "minute", "--minutes=1")


def test_a_minute_at_a_steady_pace_is_the_run_of_so_many_samples(minute, runs):
    """30 steps, and 30 % of them decay."""
    assert equal(minute, runs("--total_samples=240", "--decay_samples=72")) and len(log(minute, "loss")) == 30
    assert '"seconds": 60,' in (minute / "summary.json").read_text()


@pytest.mark.parametrize("step, seconds", [(10, 1.0), (21, 100.0)])
def test_a_resumed_run_has_the_time_that_is_left_until_its_decay(data, minute, tmp_path, monkeypatch, step, seconds):
    """Ten steps have taken 40 of 60 seconds; at a second each, 20 more are left. Behind step 21 no clock is asked."""
    run = killed_after(minute, tmp_path / "run", step)
    clocked(monkeypatch, seconds, seconds)
    assert equal(trained(data, run, "--minutes=1", "--resume"), minute)


def test_with_more_minutes_a_run_goes_on_from_before_its_decay(data, minute, runs, tmp_path, monkeypatch):
    """51 seconds and 21 steps were gone when it began: 70 seconds leave 19 steps."""
    run = shutil.copytree(minute, tmp_path / "run")
    with monkeypatch.context() as m:
        clocked(m, 1.0, 1.0)
        trained(data, run, f"--minutes={70 / 60}", "--resume")
    assert equal(run, runs(*MORE[1:]))


def test_of_minutes_and_samples_the_one_said_last_counts(data, tmp_path):
    """And time for less than a step is a run of one."""
    by_samples = "--total_samples=24", "--decay_samples=8"
    (tmp_path / "five.py").write_text("minutes = 5.0\n", encoding="utf-8")
    for name, args, length in (
            ("flag", ["--minutes=5", *by_samples], 3),
            ("file", [tmp_path / "five.py", *by_samples], 3),
            ("time", [*by_samples, "--minutes=1e-6"], 1)):
        out = trained(data, tmp_path / name, *args)
        assert len(log(out, "loss")) == length and (out / "summary.json").exists()
    assert '"minutes": 0.0' in (tmp_path / "flag" / "config.json").read_text()


# -----------------------------------------------------------------------------
# longer than planned


def test_with_more_samples_a_run_is_the_one_that_was_planned_longer_and_keeps_what_was_decayed(data, runs, tmp_path):
    """With one checkpoint kept, the last from before the decay is kept beside it."""
    run = shutil.copytree(runs("--keep_checkpoints=1"), tmp_path / "run")
    assert steps(run) == [10, 20]
    (run / "cooldown").touch()                             # it came too late, and is not meant for the longer run
    (run / "ckpt" / "decayed-00000020").mkdir()            # of an extension before this one
    done = ran(data, run, *MORE)
    assert done.returncode == 0 and "continues from before its decay" in done.stdout, done.stderr
    assert equal(run, runs(*MORE[1:]))
    aside, before = run / "ckpt" / "decayed-00000020-again", runs("--keep_checkpoints=1")
    assert restore.verified(aside)["step"] == 20
    for name in ("log.jsonl", "summary.json"):
        assert (aside / name).read_bytes() == (before / name).read_bytes()


@pytest.mark.parametrize("flags, step, decayed", [(PLANNED, 10, True), ((), 15, True), ((), 10, False)])
def test_killed_and_given_more_samples_it_is_the_longer_run_too(data, runs, tmp_path, flags, step, decayed):
    run = killed_after(runs(*flags), tmp_path / "run", step)
    assert equal(trained(data, run, *MORE), runs(*MORE[1:]))
    assert ("decayed" in str(os.listdir(run / "ckpt"))) == decayed


@pytest.mark.parametrize("args, says", [
    (MORE, "its rate falls since step 14, and no checkpoint from before that is left"),
    (["--resume", "--total_samples=120"], "its rate has begun to fall: resume with its own total_samples and minutes"),
    (["--resume", "--minutes=1e-6"], "its rate has begun to fall"),
])
def test_a_run_that_cannot_be_longer_is_told_and_nothing_is_moved(data, runs, tmp_path, args, says):
    run = killed_after(runs(), tmp_path / "run", 20)
    for step in (5, 10):
        shutil.rmtree(run / "ckpt" / f"step-{step:08d}")
    before = contents(run)
    refused(ran(data, run, *args), says)
    assert {**contents(run), f"{run}/.lock": 0} == {**before, f"{run}/.lock": 0}
