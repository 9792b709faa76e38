"""
Runs of train.py in this process on a fixed text, with 27,000 parameters and half a second each.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import same, script, weights
from lab import run

from engine import checkpoint

# 20 steps of 8 samples, of which the first 2 warm up and the last 6 decay: 30 %. SwiGLU, since the slope of xIELU jumps
# just left of 0, where rounding on two CPUs may fall on different sides.
RUN = """
    configs/tiny.py --n_layer=1 --n_embd=32 --ffn_dim=64 --n_head=2 --n_kv_head=1 --block_size=32 --activation=swiglu
    --goldfish_k=3 --goldfish_h=5 --eval_every=0 --last_eval_windows=4 --checkpoint_every=5 --keep_checkpoints=0
    --alpha_warmup=20
""".split()
SIX_STEPS = """
    --alpha_warmup=0 --total_samples=48 --warmup_samples=16 --decay_samples=16 --lr=1e-2
    --min_lr=1e-3 --betas=(0.8,0.95,0.99) --alpha=3.0 --weight_decay=0.5 --last_eval_windows=11
""".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("text"))


def corpus(root, *args):
    """
    Make a data folder with 400 documents of 5 to 60 bytes in two sources. Most windows of 32 hold several documents.
    args: flags of prepare.py.
    """
    os.makedirs(root, exist_ok=True)
    files = [f"{root}/{name}.jsonl" for name in "ab"]
    for first, path in enumerate(files):
        with open(path, "w") as f:
            for i in range(first, 400, 2):
                text = f"Line {i} tells of " + " ".join(str(i * j % 97) for j in range(i * 7 % 23))
                print(json.dumps(dict(text=text[: 5 + i * 13 % 56])), file=f)
    how = f"--source_by=file --tokenizer=byte --val_share=0.2 --out={root}/data"
    run("prepare.py", *files, *how.split(), *args)
    return f"{root}/data"


def ran(data, out, *args, **how):
    return script("train.py", *RUN, f"--data={data}", f"--out={out}", *args, **how)


def trained(data, out, *args):
    """Train, which must succeed. Returns the run folder."""
    done = ran(data, out, *args)
    assert done.returncode == 0, done.stderr
    return out


def log(out, key="step"):
    """The entries of log.jsonl that have this key, without times, which differ between runs."""
    lines = Path(out, "log.jsonl").read_text().splitlines()
    return [timeless(entry) for entry in map(json.loads, lines) if key in entry]


def timeless(entry):
    return {k: v for k, v in entry.items() if k not in ("tok_s", "seconds", "save_seconds", "save_gb")}


def steps(out):
    """The steps of a run's checkpoints."""
    return checkpoint.steps_in(f"{out}/ckpt")


def equal(one, other):
    """Whether two runs have the same log of steps and bit-exact weights."""
    return log(one, "loss") == log(other, "loss") and same(weights(one), weights(other))


def killed_after(run, new, step):
    """A copy of a run, as if it had been killed after the checkpoint of this step."""
    shutil.copytree(run, new)
    os.remove(f"{new}/summary.json")
    for later in steps(new):
        if later > step:
            shutil.rmtree(f"{new}/ckpt/step-{later:08d}")
    return new


def contents(folder):
    """The sha256 of all files of a folder, by name."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
