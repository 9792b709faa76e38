"""
The fixture `lab`: a small folder with one run of each kind, made once per run of pytest and never changed.

    data/                    the bytes of 40 fixed pages
    chats.jsonl, prompts.jsonl, reward.py
    pretrained/  hf/         a run of train.py, and its export
    sft/  adapted/  qrpo/    SFT of hf/, the same with adapters, and QRPO of sft/
"""

import fcntl
import json

import pytest
from conftest import script

import ademamix

SHAPE = """configs/tiny.py --block_size=256 --n_layer=2 --n_head=4 --n_kv_head=2 --n_embd=32
    --ffn_dim=64 --init_std=0.05""".split()
REWARD = """
def reward(prompt, completion): return sum(map(ord, completion)) % 97 + 1e-3 * len(completion)
def one(prompt, completion): return 1 + len(completion)
def two(prompt, completion): return -1 - len(completion)
def nan(prompt, completion): return float("nan")
def fails(prompt, completion): return 1 / 0
def few(row, completions): return [1]
"""


def pretraining(lab, out, *args):
    """The command line of a run of 10 steps; args come last, so they override."""
    how = f"""--total_samples=80 --warmup_samples=8 --decay_samples=24 --batch_size=8 --micro_batch=4 --sample_every=0
        --data={lab}/data --out={out}"""
    return ["train.py", *SHAPE, *how.split(), *args]


def tuning(lab, out, *args, start="hf"):
    """The command line of 20 steps of SFT on 24 conversations, after which the model gives short answers."""
    how = f"""--batch_size=6 --micro_batch=2 --lr=1e-2 --epochs=5 --checkpoint_every=5 --keep_checkpoints=0
        --optimizer=adamw --dtype=float32 --device=cpu --init_from={lab}/{start} --data={lab}/chats.jsonl --out={out}"""
    return ["posttrain.sft", *how.split(), *args]


def aligning(lab, out, *args, start="sft"):
    """The command line of 12 steps of QRPO on 6 prompts with 6 references each."""
    how = f"""--n_refs=6 --sample_batch=12 --max_new_tokens=40 --batch_size=4 --micro_batch=2 --lr=1e-3
        --pairs=all --checkpoint_every=3 --dtype=float32 --keep_checkpoints=0 --epochs=2 --device=cpu
        --init_from={lab}/{start} --data={lab}/prompts.jsonl --rewards={lab}/reward.py --out={out}"""
    return ["posttrain.qrpo", *how.split(), *args]


ADAPTERS = ["--lora_r=4", "--lora_alpha=8"]


def run(*command, **how):
    done = script(*command, **how)
    assert done.returncode == 0, done.stderr
    return done


def make(lab):
    chats, prompts = [], []
    for i in range(24):
        system, user = dict(role="system", content="x"), dict(role="user", content=f"say {i % 6}")
        answer = dict(role="assistant", content="ab"[i % 2] * (1 + i % 5))
        chats.append(dict(messages=[system, user, answer]))
        prompts.append(dict(messages=[system, user]))
    lab.mkdir(exist_ok=True)
    pages = [dict(text=" ".join(f"page {i} has word {i * j * j % 997}" for j in range(200))) for i in range(40)]
    for name, rows in dict(chats=chats, prompts=prompts[:6], pages=pages).items():
        (lab / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (lab / "reward.py").write_text(REWARD)
    run("prepare.py", lab / "pages.jsonl", f"--out={lab}/data", "--tokenizer=byte", "--val_share=0.05")
    run(*pretraining(lab, lab / "pretrained"))
    run("convert.py", f"--load={lab}/pretrained", f"--save={lab}/hf")
    run(*tuning(lab, lab / "sft"))
    run(*tuning(lab, lab / "adapted", *ADAPTERS))
    run(*aligning(lab, lab / "qrpo"))


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The folder, which all workers of a run of pytest share."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if shared.name.startswith("popen-") else shared) / "lab"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            make(folder)
            (folder / "done").touch()
    return folder


@pytest.fixture
def large_eps(monkeypatch):
    """large_eps(eps): an update that depends on the scale of the gradients, which 1e-8 hides."""

    def change(eps):
        def build_optimizer(*args, **options):
            built = original(*args, **options)
            for group in built.param_groups:
                group["eps"] = eps
            return built

        original = ademamix.build_optimizer
        monkeypatch.setattr(ademamix, "build_optimizer", build_optimizer)

    return change
