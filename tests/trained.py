"""
Runs of train.py in this process, 27,000 parameters and half a second each, on a text that never changes.
"""
import hashlib
import json
import os
import shutil

import pytest

from conftest import same, script, weights
from engine import checkpoint

# 20 steps of 8 samples, of which the first 2 warm up and the last 6 decay: 30 %. SwiGLU, since the slope of xIELU jumps
# just left of 0, where two CPUs may fall on different sides.
RUN = """
    configs/tiny.py --n_layer=1 --n_embd=32 --ffn_dim=64 --n_head=2 --n_kv_head=1 --block_size=32 --activation=swiglu
    --goldfish_k=3 --goldfish_h=5 --eval_every=0 --last_eval_windows=4 --checkpoint_every=5 --keep_checkpoints=0
    --alpha_warmup=20 --beta3_warmup=20
""".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("text"))


def corpus(root):
    """A data folder: 400 documents of 5 to 60 bytes in two sources. Most windows of 32 hold several of them."""
    os.makedirs(root, exist_ok=True)
    rows = {"a": [], "b": []}
    for i in range(400):
        text = f"Line {i} tells of " + " ".join(str(i * j % 97) for j in range(i * 7 % 23))
        rows["ab"[i % 2]].append(json.dumps(dict(text=text[:5 + i * 13 % 56])))
    for name, lines in rows.items():
        with open(f"{root}/{name}.jsonl", "w", encoding="utf-8") as f:
            f.write("\n".join(lines))
    args = "--source_by=file", "--tokenizer=byte", "--val_share=0.2", f"--out={root}/data"
    done = script("prepare.py", f"{root}/a.jsonl", f"{root}/b.jsonl", *args)
    assert done.returncode == 0, done.stderr
    return f"{root}/data"


def ran(data, out, *args, **how):
    return script("train.py", *RUN, f"--data={data}", f"--out={out}", *args, **how)


def trained(data, out, *args):
    """The folder of a run that has ended well."""
    done = ran(data, out, *args)
    assert done.returncode == 0, done.stderr
    return out


def log(out, key="step"):
    """The entries of log.jsonl that have this key, without the times, which no two runs share."""
    with open(f"{out}/log.jsonl", encoding="utf-8") as f:
        entries = [json.loads(line) for line in f]
    return [{k: v for k, v in e.items() if k not in ("tok_s", "seconds")} for e in entries if key in e]


def steps(out):
    """The steps of a run's checkpoints."""
    return checkpoint.steps_in(f"{out}/ckpt")


def equal(one, other):
    """Whether two runs have logged the same steps and ended in the same bits."""
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
    found = {}
    for root, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(root, name), "rb") as f:
                found[os.path.join(root, name)] = hashlib.sha256(f.read()).hexdigest()
    return found
