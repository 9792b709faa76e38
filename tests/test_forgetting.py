"""posttrain/forgetting.py: a run has lost what evaluate.py finds, and measuring changes no bit of it."""
import json
import os
import shutil

import numpy as np
import pytest

import convert
import evaluate
import tokenizer
from conftest import refused, same, script, weights
from engine import plot
from engine.parallel import Ranks
from model import Apertus, ApertusConfig
from posttrain import forgetting

TINY = dict(block_size=320, vocab_size=320, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64, init_std=0.05)
TOK = tokenizer.load("byte")
TEXTS = ["All human beings are born free. " * 30, "Würde und Rechte", "Tous les êtres humains naissent libres. " * 15]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A start model, conversations, old text."""
    root = tmp_path_factory.mktemp("forgetting")
    convert.save_hf(Apertus(ApertusConfig(**TINY), 3), str(root / "model"), TOK)
    chats = []
    for i in range(8):
        said = dict(system="s", user=f"{i}?", assistant=f"a{i} b")
        chats.append(dict(messages=[dict(role=role, content=content) for role, content in said.items()]))
    write_rows(root / "chats.jsonl", chats)
    write_rows(root / "old.jsonl", [dict(text=text) for text in TEXTS])
    return root


def tune(lab, out, *args):
    """Six steps of SFT."""
    files = [f"--init_from={lab / 'model'}", f"--data={lab / 'chats.jsonl'}", f"--out={out}"]
    how = ["--batch_size=4", "--micro_batch=2", "--lr=1e-2", "--epochs=3", "--checkpoint_every=2", "--dtype=float32"]
    return script("posttrain.sft", *files, *how, "--device=cpu", "--rank_every=0", "--keep_checkpoints=9", *args)


@pytest.fixture(scope="module")
def watched(lab):
    done = tune(lab, lab / "watched", f"--old={lab / 'old.jsonl'}", "--old_every=2", "--old_windows=0")
    assert done.returncode == 0, done.stderr
    return lab / "watched", done.stdout


def summary(out):
    return json.loads((out / "summary.json").read_text())


def test_a_run_measures_before_on_the_way_and_after_and_ends_in_the_same_bits(lab, watched):
    out, _ = watched
    assert tune(lab, lab / "unwatched").returncode == 0
    assert same(weights(out), weights(lab / "unwatched"))
    found = [(entry["step"], entry["old_bpb"]) for entry in plot.read_log(str(out)) if "old_bpb" in entry]
    assert [step for step, _ in found] == [0, 1, 3, 5]
    told = summary(out)
    assert (told["old_before"], told["old_after"]) == pytest.approx((found[0][1], found[-1][1]))


def test_what_was_lost_is_what_evaluate_finds_against_the_start(lab, watched, tmp_path):
    """Mean and interval of the paired differences, by another script from the files of both models."""
    out, said = watched
    models = [f"--init_from={out}", f"--against={lab / 'model'}"]
    done = script("evaluate.py", lab / "old.jsonl", *models, f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "evaluation.json").read_text())["rows"]
    told = summary(out)
    after, above = found[:2]
    assert told["old_lost"] == pytest.approx(above["score"], rel=1e-4) and abs(told["old_lost"]) > 0.01
    assert told["old_plus_minus"] == pytest.approx((above["high"] - above["low"]) / 2, rel=1e-4)
    assert told["old_after"] == pytest.approx(after["score"], rel=1e-6)
    assert f"lost {told['old_lost']:+.3f} ± {told['old_plus_minus']:.3f} bits/byte of" in said


def test_killed_and_resumed_it_compares_with_the_same_start(lab, watched, tmp_path):
    shutil.copytree(watched[0], tmp_path / "run")
    os.remove(tmp_path / "run" / "summary.json")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / "ckpt" / f"step-{step:08d}")
    other = [f"--old={lab / 'old.jsonl'}", "--resume"]
    refused(tune(lab, tmp_path / "run", *other, "--old_windows=2"), "has other windows")
    assert tune(lab, tmp_path / "run", *other, "--old_windows=0").returncode == 0
    assert summary(tmp_path / "run") == summary(watched[0])
    shutil.copytree(lab / "unwatched", tmp_path / "late")
    shutil.rmtree(tmp_path / "late" / "ckpt" / "step-00000006")
    refused(tune(lab, tmp_path / "late", *other), "old.json, which is not there")


def test_every_document_has_its_beginning_among_the_windows_before_any_has_more(lab):
    """Of 96 tokens: the first text has 20 windows, the second one, the third 12. A byte is a token."""
    text = forgetting.Old(str(lab / "old.jsonl"), TOK, 96, 6, "out")
    assert text.owner.tolist() == [0, 1, 2, 0, 2, 0]
    scored = np.bincount(text.owner, [len(ids) - first for ids, first in text.windows])
    assert text.sizes.tolist() == [scored[0], len("Würde und Rechte".encode()), scored[2]]
    model = Apertus(ApertusConfig(**TINY), 3)
    want = evaluate.text_scores(model, TOK, [("", TEXTS[1])])[0]["score"]
    text.measure(model, Ranks())
    assert text.bits[1] / text.sizes[1] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("name, content, says", [
    ("none.txt", None, "no such file or folder"),
    ("blank.txt", " \n", "no text there"),
    ("rows.jsonl", '{"messages": []}\n', 'line 1: want a JSON object with "text"'),
])
def test_what_is_no_text_is_one_line_before_anything_is_trained(lab, tmp_path, name, content, says):
    if content:
        (tmp_path / name).write_text(content)
    refused(tune(lab, tmp_path / "run", f"--old={tmp_path / name}"), says)
    assert not (tmp_path / "run").exists()
