"""posttrain/forgetting.py: a run has lost what evaluate.py finds, and measuring changes no bit of it."""
import json
import os
import shutil

import pytest

import convert
import evaluate
import tokenizer
from conftest import refused, same, script, weights
from engine.files import read_json
from engine.parallel import Ranks
from engine.plot import read_log
from posttrain import forgetting
from tiny import small

TOK = tokenizer.load("byte")
TEXTS = ["All human beings are born free. " * 30, "Würde und Rechte", "Tous les êtres humains naissent libres. " * 15]


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A start model, conversations, old text, and two runs: one with old text, one without."""
    root = tmp_path_factory.mktemp("forgetting")
    convert.save_hf(small(block_size=320, vocab_size=320), str(root / "model"), TOK)
    write_rows(root / "chats.jsonl", [dict(prompt=f"{i}?", completion=f"a{i} b") for i in range(8)])
    write_rows(root / "old.jsonl", [dict(text=text) for text in TEXTS])
    tune(root, root / "unwatched")
    done = tune(root, root / "watched", f"--old={root}/old.jsonl", "--old_every=2", "--old_windows=0")
    assert done.returncode == 0, done.stderr
    (root / "said").write_text(done.stdout)
    return root


def tune(lab, out, *args):
    """Six steps of SFT."""
    how = """--batch_size=4 --micro_batch=2 --lr=1e-2 --epochs=3 --checkpoint_every=2 --dtype=float32 --rank_every=0
        --device=cpu --keep_checkpoints=0"""
    files = f"--init_from={lab}/model --data={lab}/chats.jsonl --out={out}"
    return script("posttrain.sft", *files.split(), *how.split(), *args)


def test_a_run_measures_before_on_the_way_and_after_and_ends_in_the_same_bits(lab):
    assert same(weights(lab / "watched"), weights(lab / "unwatched"))
    found = [(entry["step"], entry["old_bpb"]) for entry in read_log(str(lab / "watched")) if "old_bpb" in entry]
    assert [step for step, _ in found] == [0, 1, 3, 5]
    told = read_json(lab / "watched" / "summary.json")
    assert (told["old_before"], told["old_after"]) == pytest.approx((found[0][1], found[-1][1]))


def test_what_was_lost_is_what_evaluate_finds_against_the_start(lab, tmp_path):
    """Mean and interval of the paired differences, by another script from the files of both models."""
    models = [f"--init_from={lab}/watched", f"--against={lab}/model"]
    assert script("evaluate.py", lab / "old.jsonl", *models, f"--out={tmp_path}").returncode == 0
    after, above, *_ = read_json(tmp_path / "evaluation.json")["rows"]
    told = read_json(lab / "watched" / "summary.json")
    lost, half = told["old_lost"], told["old_plus_minus"]
    assert (lost, half) == pytest.approx((above["score"], (above["high"] - above["low"]) / 2), rel=1e-4)
    assert told["old_after"] == pytest.approx(after["score"], rel=1e-6) and abs(lost) > 0.01
    assert f"lost {lost:+.3f} ± {half:.3f} bits/byte of" in (lab / "said").read_text()


def cut_back(run, new, *steps):
    """A copy of a run without these checkpoints."""
    shutil.copytree(run, new)
    os.remove(new / "summary.json")
    for step in steps:
        shutil.rmtree(new / "ckpt" / f"step-0000000{step}")
    return new


def test_killed_and_resumed_it_compares_with_the_same_start(lab, tmp_path):
    run, late = cut_back(lab / "watched", tmp_path / "run", 4, 6), cut_back(lab / "unwatched", tmp_path / "late", 6)
    other = [f"--old={lab}/old.jsonl", "--resume"]
    refused(tune(lab, run, *other, "--old_windows=2"), "old.json has other windows")
    refused(tune(lab, late, *other), "old.json is not there")
    assert tune(lab, run, *other, "--old_windows=0").returncode == 0
    assert read_json(run / "summary.json") == read_json(lab / "watched" / "summary.json")


def test_every_document_has_its_beginning_among_the_windows_before_any_has_more(lab, tmp_path):
    """Of 96 tokens: the first text has 20 windows, the second one, the third 12. A byte is a token."""
    text = forgetting.Old(str(lab / "old.jsonl"), TOK, 96, 6, tmp_path)
    assert text.owner == (0, 1, 2, 0, 2, 0)
    scored = [len(ids) - first for ids, first in text.windows]
    sizes = [scored[0] + scored[3] + scored[5], len(TEXTS[1].encode()), scored[2] + scored[4]]
    assert text.sizes.tolist() == sizes
    model = small(block_size=320, vocab_size=320)
    text.measure(model, Ranks())
    want = evaluate.text_scores(model, TOK, [("", TEXTS[1])])[0]["score"]
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
