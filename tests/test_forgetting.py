"""
posttrain/forgetting.py: what runs lose, against evaluate.py, torch's kl_div and merged matrices; measuring changes no
number of a run.
"""
import json
import math
import os
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import convert
import evaluate
import tokenizer
from conftest import ROOT, script
from engine import plot
from engine.parallel import Ranks
from model import Apertus, ApertusConfig
from posttrain import forgetting, lora

TINY = dict(block_size=320, vocab_size=320, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64, init_std=0.05)
TOK = tokenizer.load("byte")
TEXTS = ["All human beings are born free. " * 30, "Würde und Rechte", "Tous les êtres humains naissent libres. " * 15]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A start model, conversations, old text as rows and as a data folder."""
    root = tmp_path_factory.mktemp("forgetting")
    convert.save_hf(Apertus(ApertusConfig(**TINY), 3), str(root / "model"), TOK)
    say = lambda role, content: dict(role=role, content=content)
    rows = [dict(messages=[say("system", "s"), say("user", f"{i}?"), say("assistant", f"a{i} b")]) for i in range(8)]
    write_rows(root / "chats.jsonl", rows)
    write_rows(root / "old.jsonl", [dict(text=text) for text in TEXTS])
    quiz = [dict(question=f"{i}?", choices=[f"a{i} b", f"{'ZqXy'[i % 4]}{i}zQ"], answer=0) for i in range(9)]
    write_rows(root / "choices.jsonl", quiz)
    write_rows(root / "quiz.jsonl", [*quiz, dict(question="0?", answer=["x", "y"])])
    files = [os.path.join(ROOT, name) for name in ("model.py", "data.py", "train.py")]
    assert script("prepare.py", *files, f"--out={root / 'data'}", "--tokenizer=byte").returncode == 0
    return root


def arguments(lab, out):
    return [
        f"--init_from={lab / 'model'}", f"--data={lab / 'chats.jsonl'}", f"--out={out}", "--batch_size=4",
        "--micro_batch=2", "--lr=1e-2", "--epochs=3", "--checkpoint_every=2", "--dtype=float32", "--device=cpu",
        "--rank_every=0", "--keep_checkpoints=9", "--lora_r=2",
    ]


def watching(lab):
    return [f"--old={lab / 'old.jsonl'}", "--old_every=2", "--old_windows=5", f"--task={lab / 'quiz.jsonl'}"]


def tune(lab, out, *args):
    return script("posttrain.sft", *arguments(lab, out), *args)


@pytest.fixture(scope="module")
def watched(lab):
    done = tune(lab, lab / "watched", *watching(lab))
    assert done.returncode == 0, done.stderr
    return lab / "watched", done.stdout


@pytest.fixture(scope="module")
def unwatched(lab):
    assert tune(lab, lab / "unwatched").returncode == 0
    return lab / "unwatched"


def log(out):
    entries = plot.read_log(str(out))
    for entry in entries:
        entry.pop("tok_s", None)
    return entries


def measured(out):
    """[(step, bits per byte, KL)] of the old text in a log."""
    return [(entry["step"], entry["old_bpb"], entry["old_kl"]) for entry in log(out) if "old_bpb" in entry]


def summary(out):
    return json.loads((out / "summary.json").read_text())


def weights(out):
    return dict(convert.load_run(str(out))[0].named_parameters())


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def refused(done, *says):
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and all(word in last for word in says), done.stderr


def old(path, most=0, T=320, out="out"):
    return forgetting.Old(str(path), TOK, T, most, str(out))


def adapted(seed=0):
    """A tiny model with adapters that change it."""
    model = lora.adapt(Apertus(ApertusConfig(**TINY), seed), lora.settings_of(3, 6.0, "q_proj,up_proj,down_proj"))
    torch.manual_seed(seed)
    for layer in lora.adapted(model).values():
        torch.nn.init.normal_(layer.lora_B.weight, std=0.3)
    return model


# -----------------------------------------------------------------------------
# what is measured


def test_all_of_a_text_has_the_bits_per_byte_that_evaluate_has(lab):
    """Which are transformers' (tests/test_evaluate.py). Also where batches are of one window."""
    model = Apertus(ApertusConfig(**TINY), 3)
    want = evaluate.text_scores(model, TOK, [("", text) for text in TEXTS])[0]["bits_per_byte"]
    whole = old(lab / "old.jsonl")
    for whole.size in (1, 4):
        assert whole.measure(model, Ranks())["old_bpb"] == pytest.approx(want, rel=1e-6)
    assert whole.sizes.tolist() == [len(text.encode()) for text in TEXTS]


def test_what_was_lost_is_what_evaluate_finds_against_the_base(lab, tmp_path):
    """Mean and interval of the paired differences, through two other scripts: models from files, documents whole."""
    done = tune(lab, tmp_path / "run", f"--old={lab / 'old.jsonl'}", "--old_windows=0", "--epochs=1")
    assert done.returncode == 0, done.stderr
    models = [f"--init_from={tmp_path / 'run'}", f"--against={lab / 'model'}"]
    done = script("evaluate.py", lab / "old.jsonl", *models, f"--out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["texts"][0]
    lost = summary(tmp_path / "run")
    assert lost["old_lost"] == pytest.approx(found["above"], rel=1e-4) and abs(lost["old_lost"]) > 0.01
    assert lost["old_plus_minus"] == pytest.approx(found["above_plus_minus"], rel=1e-4)
    assert lost["old_after"] == pytest.approx(found["bits_per_byte"], rel=1e-6)
    assert lost["old_documents"] == 3
    assert f"above {lab / 'model'} (95 %)" in done.stdout and f"{found['above']:+.3f} ±" in done.stdout


def test_a_difference_is_paired_by_document(lab):
    """By hand: the jackknife over documents of the ratio of their differences to their bytes."""
    models = [Apertus(ApertusConfig(**TINY), seed) for seed in (3, 4)]
    documents = [("", text) for text in [*TEXTS, "a", "bc" * 20]]
    row = evaluate.text_scores(models[0], TOK, documents, (models[1], TOK))[0]
    alone = [[evaluate.text_scores(model, TOK, [d])[0] for d in documents] for model in models]
    sizes = np.array([r["bytes"] for r in alone[0]])
    d = np.array([a["bits_per_byte"] - b["bits_per_byte"] for a, b in zip(*alone)]) * sizes
    assert row["above"] == pytest.approx(d.sum() / sizes.sum(), rel=1e-5)
    own = evaluate.text_scores(models[0], TOK, documents)[0]
    assert row["bits_per_byte"] == own["bits_per_byte"] and "above" not in own
    assert row["above_plus_minus"] == pytest.approx(evaluate.ratio(d, sizes)[1], rel=1e-4)
    assert row["above_plus_minus"] != pytest.approx(own["plus_minus"], rel=0.1)


def test_the_divergence_is_torchs_kl_div_over_each_scored_token_once(lab):
    model = adapted()
    text = old(lab / "old.jsonl", most=4)
    total, count = 0.0, 0
    for ids, first in text.windows:
        idx = torch.tensor([ids[:-1]])
        with torch.no_grad():
            p = model(idx)[0][0, first - 1:].double().log_softmax(-1)
            with lora.off(model):
                q = model(idx)[0][0, first - 1:].double().log_softmax(-1)
        total += F.kl_div(q, p, reduction="sum", log_target=True).item()
        count += len(ids) - first
    assert text.measure(model, Ranks())["old_kl"] == pytest.approx(total / count, rel=1e-4)
    assert total / count > 0.01


def test_without_adapters_there_is_no_base_to_diverge_from(lab):
    text = old(lab / "old.jsonl", most=2)
    assert text.measure(Apertus(ApertusConfig(**TINY)), Ranks()).keys() == {"old_bpb"}


def test_the_change_is_that_of_the_merged_matrices():
    model, base = adapted(), Apertus(ApertusConfig(**TINY), 0)
    found = forgetting.change(model)
    lora.merge(model)
    assert list(found) == ["q_proj", "up_proj", "down_proj"]
    for kind, ratio in found.items():
        pairs = [
            (p - base.get_parameter(name), base.get_parameter(name))
            for name, p in model.named_parameters() if kind in name
        ]
        update, whole = (torch.cat([x.flatten() for x in column]).norm() for column in zip(*pairs))
        assert len(pairs) == 2 and ratio == pytest.approx((update / whole).item(), rel=1e-4)


# -----------------------------------------------------------------------------
# which text


def test_every_document_has_its_beginning_among_the_windows_before_any_has_more(lab):
    """Of 96 tokens: the first text has 20 windows, the second one, the third 12."""
    text = old(lab / "old.jsonl", most=6, T=96)
    assert text.owner.tolist() == [0, 1, 2, 0, 2, 0]
    assert len(text.sizes) == 3 and text.sizes[1] == len("Würde und Rechte".encode())
    assert [first for _, first in text.windows[:3]] == [1, 1, 1]
    scored = [len(ids) - first for ids, first in text.windows]
    assert text.sizes[0] == scored[0] + scored[3] + scored[5]


def test_a_bound_takes_documents_from_all_of_the_text_evenly(lab, tmp_path):
    write_rows(tmp_path / "many.jsonl", [dict(text=f"document {i}") for i in range(20)])
    found = forgetting.texts(str(tmp_path / "many.jsonl"), TOK, 7)
    assert found == [f"document {i}" for i in range(0, 20, 3)]
    data = tmp_path / "data"
    args = ["--tokenizer=byte", "--val_share=0.9", "--source_by=file"]
    (tmp_path / "more.jsonl").write_text((tmp_path / "many.jsonl").read_text().replace("document", "another"))
    done = script("prepare.py", tmp_path / "many.jsonl", tmp_path / "more.jsonl", f"--out={data}", *args)
    assert done.returncode == 0, done.stderr
    whole = forgetting.texts(str(data), TOK, 0)
    assert forgetting.texts(str(data), TOK, 5) == whole[::-(-len(whole) // 5)]
    assert {text.split()[0] for text in forgetting.texts(str(data), TOK, 5)} == {"document", "another"}


def test_of_a_huge_text_no_more_is_encoded_than_could_be_asked_for(lab, tmp_path, monkeypatch):
    (tmp_path / "huge.txt").write_text("some words " * 100_000)
    seen = []
    encode = TOK.encode
    monkeypatch.setattr(TOK, "encode", lambda text: (seen.append(len(text)), encode(text))[1])
    text = old(tmp_path / "huge.txt", most=3)
    assert len(text.windows) == 3 and seen == [3 * 320 * forgetting.LETTERS]


def test_the_text_of_a_chat_model_ends_as_that_of_its_base(lab, watched):
    """The end of a chat model's turn is another token than the end of a text."""
    tok = convert.load_run(str(watched[0]))[1]
    assert tok.eos == tok.special["<|assistant_end|>"]
    assert evaluate.text_ids(tok, "abc") == evaluate.text_ids(TOK, "abc") == [TOK.bos, *TOK.encode("abc"), TOK.eos]
    data = str(lab / "data")
    assert list(evaluate.validation_documents(data, tok)) == list(evaluate.validation_documents(data, TOK))
    assert forgetting.Old(data, tok, 320, 9, "out").hash == old(data, 9).hash


# -----------------------------------------------------------------------------
# in a run


def test_the_run_ends_in_the_same_bits_as_without_it(watched, unwatched):
    out, _ = watched
    assert same(weights(out), weights(unwatched))
    more = ("old", "task")
    steps = [{k: v for k, v in entry.items() if not k.startswith(more)} for entry in log(out) if "loss" in entry]
    assert steps == log(unwatched)
    assert {"loss_first", "loss_last", "change"} <= summary(unwatched).keys()


def test_a_run_measures_before_on_the_way_and_after(lab, watched):
    """Of six steps. What it has lost by then is measured on the models themselves."""
    out, said = watched
    found = measured(out)
    assert [step for step, *_ in found] == [0, 1, 3, 5] and "loss" not in log(out)[0]
    start, ended = convert.load_any(str(lab / "model"))[0], convert.load_run(str(out))[0]
    text = old(lab / "old.jsonl", most=5)
    assert found[0][1:] == (pytest.approx(text.measure(start, Ranks())["old_bpb"]), 0)
    after = text.measure(ended, Ranks())
    assert found[-1][1:] == (pytest.approx(after["old_bpb"]), pytest.approx(after["old_kl"])) and after["old_kl"] > 0.01
    told = summary(out)
    assert (told["old_before"], told["old_after"]) == pytest.approx((found[0][1], found[-1][1]))
    assert told["old_lost"] == pytest.approx(found[-1][1] - found[0][1])
    losses = [entry["loss"] for entry in log(out) if "loss" in entry]
    assert (told["loss_first"], told["loss_last"]) == (losses[0], losses[-1])
    line = (f"gained loss {losses[0]:.3f} -> {losses[-1]:.3f} ({losses[-1] - losses[0]:+.3f}); lost "
            f"{found[0][1]:.3f} -> {found[-1][1]:.3f} bits/byte of {lab / 'old.jsonl'} ({told['old_lost']:+.3f} ± ")
    assert line in said and f", 3 documents, KL to the base {after['old_kl']:.3f} nats/token)" in said
    assert "|dW| / |W|: q_proj " in said


def test_the_task_is_asked_before_on_the_way_and_after_as_evaluate_asks_it(lab, watched, tmp_path):
    """Start and end through evaluate.py, from the files: rows with choices and one whose answer must be said."""
    out, said = watched
    asked = [(entry["step"], entry["task"]) for entry in log(out) if "task" in entry]
    assert [step for step, _ in asked] == [0, 1, 3, 5]
    told = summary(out)
    assert told["task"] == str(lab / "quiz.jsonl")
    for when, model, score in (("before", lab / "model", asked[0][1]), ("after", out, asked[-1][1])):
        done = script("evaluate.py", lab / "quiz.jsonl", f"--init_from={model}", f"--out={tmp_path}")
        assert done.returncode == 0, done.stderr
        choice, exact = json.loads((tmp_path / "evaluation.json").read_text())["tasks"]
        right = round(9 * choice["score"] + exact["score"])
        found = told[f"task_{when}"]
        assert found == dict(
            n=10, score=right / 10, interval=list(evaluate.wilson(right, 10)), chance=pytest.approx(0.45))
        assert found["score"] == score and 0 < right < 10
    assert asked[0][1] != asked[-1][1]
    assert f"{lab / 'quiz.jsonl'}: {asked[0][1]:.3f} (" in said and "right of 10, chance 0.450" in said


@pytest.mark.parametrize("content, says", [
    ('{"text": "a"}', "no question there"),
    ('{"question": "a", "choices": ["b", "c"], "answer": 2}', "question 1: no valid answer"),
    ('{"question": "a"}', "question 1: no valid answer"),
    ("{", "line 1"),
])
def test_what_is_no_task_is_told_in_one_line(lab, tmp_path, content, says):
    (tmp_path / "task.jsonl").write_text(content + "\n")
    with pytest.raises(ValueError, match=says) as e:
        forgetting.old_of(str(lab / "old.jsonl"), TOK, 320, 5, "out", str(tmp_path / "task.jsonl"))
    assert "\n" not in str(e.value)


def test_a_task_wants_old_text_beside_it(lab, tmp_path):
    done = tune(lab, tmp_path / "run", f"--task={lab / 'quiz.jsonl'}")
    refused(done, "is asked beside old text: name some with --old")


def test_killed_and_resumed_it_measures_the_same(lab, watched, tmp_path):
    shutil.copytree(watched[0], tmp_path / "run")
    os.remove(tmp_path / "run" / "summary.json")
    for step in ("step-00000004", "step-00000006"):
        shutil.rmtree(tmp_path / "run" / "ckpt" / step)
    done = tune(lab, tmp_path / "run", *watching(lab), "--resume")
    assert done.returncode == 0, done.stderr
    assert log(tmp_path / "run") == log(watched[0]) and summary(tmp_path / "run") == summary(watched[0])


def test_a_run_is_gone_on_with_on_the_same_old_text_or_on_none(lab, watched, unwatched, tmp_path):
    for name, run in (("watched", watched[0]), ("unwatched", unwatched)):
        shutil.copytree(run, tmp_path / name)
        shutil.rmtree(tmp_path / name / "ckpt" / "step-00000006")
    again = [f"--old={lab / 'old.jsonl'}", "--old_windows=4", "--resume"]
    refused(tune(lab, tmp_path / "watched", *watching(lab)[:3], "--resume"), "of another task", f"{lab / 'quiz.jsonl'}")
    refused(tune(lab, tmp_path / "watched", *again), "is of other windows", f"--old={lab / 'old.jsonl'}")
    refused(tune(lab, tmp_path / "unwatched", *again), "was begun without --old")
    assert tune(lab, tmp_path / "watched", "--resume").returncode == 0


@pytest.mark.parametrize("parallel, args", [("ddp", []), ("fsdp", ["--lora_r=0"]), ("fsdp", [])])
def test_two_processes_measure_what_one_does(launch, lab, tmp_path, parallel, args):
    """
    The start model's number is the same float; later ones differ as far as the weights do.

    All windows make one batch, so that one rank has none: in shards it must run along, also below the adapters.
    """
    args = [*args, *watching(lab), "--epochs=1"]
    assert tune(lab, tmp_path / "one", *args).returncode == 0
    two = [*arguments(lab, tmp_path / "two"), *args, f"--parallel={parallel}"]
    codes, text = launch(2, *two, script="posttrain.sft", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    for key in ("old_kl", "change"):
        found = [summary(tmp_path / name).get(key) or 0.0 for name in ("one", "two")]
        assert found[1] == pytest.approx(found[0], abs=1e-5)
    one, two = ([e["old_bpb"] for e in log(tmp_path / name) if "old_bpb" in e] for name in ("one", "two"))
    shares = [[e["task"] for e in log(tmp_path / name) if "old_bpb" in e] for name in ("one", "two")]
    assert shares[0] == shares[1] and len(shares[0]) == 2
    assert len(one) == 2 and two[0] == pytest.approx(one[0], rel=1e-12) and two == pytest.approx(one, abs=1e-5)


def test_more_ranks_than_batches_run_along_and_add_nothing(lab):
    model, text = adapted(), old(lab / "old.jsonl", most=5)
    text.size = 2
    want = text.measure(model, Ranks())
    ranks = Ranks()
    ranks.size = 4
    parts = []
    for ranks.rank in range(4):
        ranks.add = lambda *numbers: (parts.append(numbers), numbers)[1]
        text.measure(model, ranks)
    total = np.sum(parts, 0)
    *bits, kl = total
    assert sum(bits) / text.sizes.sum() == pytest.approx(want["old_bpb"], rel=1e-12)
    assert kl / text.tokens == pytest.approx(want["old_kl"], rel=1e-12)


def test_qrpo_measures_too_and_ends_in_the_same_bits(lab, tmp_path):
    prompt = [dict(role="system", content="s"), dict(role="user", content="q")]
    rows = [dict(messages=prompt, completions=["a" * i, "b" * i], rewards=[1, 2], ref_rewards=[0, 3, 1.5])
            for i in range(1, 5)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    how = [f"--data={tmp_path / 'prompts.jsonl'}", "--n_refs=3", "--batch_size=2", "--lr=1e-3"]
    for name, args in (("with", watching(lab)), ("without", [])):
        done = script("posttrain.qrpo", *arguments(lab, tmp_path / name), *how, *args)
        assert done.returncode == 0, done.stderr
    assert "gained loss" not in done.stdout
    assert same(weights(tmp_path / "with"), weights(tmp_path / "without"))
    assert [step for step, *_ in measured(tmp_path / "with")] == [0, 1, 3, 5]
    assert summary(tmp_path / "with")["old_documents"] == 3


RUN = ["--total_samples=32", "--warmup_samples=8", "--decay_samples=8", "--batch_size=8", "--micro_batch=4",
       "--lr=1e-3", "--lr_floor=1e-4", "--dtype=float32", "--sample_every=0", "--eval_every=2", "--eval_windows=4",
       "--checkpoint_every=2", "--keep_checkpoints=9", "--compile=False", "--block_size=64", "--device=cpu"]


def go_on(lab, out, *args):
    return [f"--data={lab / 'data'}", f"--out={out}", f"--init_from={lab / 'model'}", *RUN, *args]


def test_continued_pretraining_validates_on_old_text_beside_and_ends_in_the_same_bits(launch, lab, tmp_path):
    """On one process, stopped and resumed, and on the shards of two; the window is that of the run."""
    kept, task = f"--old={lab / 'old.jsonl'}", f"--task={lab / 'choices.jsonl'}"
    for name, args in (("with", [kept, task]), ("without", [])):
        done = script("train.py", *go_on(lab, tmp_path / name, *args))
        assert done.returncode == 0, done.stderr
        assert ("gained val_bpb" in done.stdout) == (name == "with")
    with_, without = tmp_path / "with", tmp_path / "without"
    assert same(weights(with_), weights(without))
    found = [(entry["step"], entry["old_bpb"]) for entry in log(with_) if "old_bpb" in entry]
    assert [step for step, _ in found] == [0, 1, 3]
    start = convert.load_any(str(lab / "model"))[0]
    assert found[0][1] == pytest.approx(old(lab / "old.jsonl", most=4, T=64).measure(start, Ranks())["old_bpb"])
    assert summary(with_)["old_after"] == pytest.approx(found[-1][1])

    shutil.copytree(with_, tmp_path / "again")
    os.remove(tmp_path / "again" / "summary.json")
    shutil.rmtree(tmp_path / "again" / "ckpt" / "step-00000004")
    assert script("train.py", *go_on(lab, tmp_path / "again", kept, task, "--resume")).returncode == 0
    again = summary(tmp_path / "again")
    assert {k: v for k, v in again.items() if k != "seconds"} == {
        k: v for k, v in summary(with_).items() if k != "seconds"}

    two = go_on(lab, tmp_path / "two", kept, task, "--parallel=fsdp")
    codes, text = launch(2, *two, script="train", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    assert [e["old_bpb"] for e in log(tmp_path / "two") if "old_bpb" in e] == pytest.approx(
        [value for _, value in found], abs=1e-5)
    one, both = ([e["task"] for e in log(out) if "old_bpb" in e] for out in (with_, tmp_path / "two"))
    assert one == both and len(one) == 3


def test_pretraining_from_scratch_has_nothing_to_forget(lab, tmp_path):
    done = script("train.py", f"--data={lab / 'data'}", f"--old={lab / 'old.jsonl'}", f"--out={tmp_path / 'run'}", *RUN)
    refused(done, "name one with --init_from")
    assert not (tmp_path / "run").exists()


# -----------------------------------------------------------------------------
# what users have, and what they see


@pytest.mark.parametrize("name, content, says", [
    ("none.txt", None, "No such file"),
    ("nothing", None, "No such file"),
    ("blank.txt", " \n", "no text there"),
    ("blank.jsonl", '{"text": " "}\n', "no text there"),
    ("task.jsonl", '{"question": "a", "answer": "b"}\n', "no text there"),
    ("rows.jsonl", '{"messages": []}\n', 'line 1: want a JSON object with "text"'),
    ("empty.jsonl", "", "is empty"),
])
def test_what_is_no_text_is_told_in_one_line_before_anything_is_trained(lab, tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_text(content)
    refused(tune(lab, tmp_path / "run", f"--old={tmp_path / name}"), "sft.py: ", says)
    assert os.listdir(tmp_path / "run") == [".lock"]


def test_a_folder_without_data_is_told(lab, tmp_path):
    refused(tune(lab, tmp_path / "run", f"--old={tmp_path}"), "no meta.json there")


def test_what_was_gained_is_the_first_and_the_last_tenth_or_the_validation(tmp_path):
    rows = [dict(step=step, loss=100 - step) for step in range(30)]
    write_rows(tmp_path / "log.jsonl", [dict(step=0, old_bpb=1.0), *rows, dict(step=29, loss=None)])
    assert forgetting.gained(str(tmp_path)) == ("loss", 99, 72)
    write_rows(tmp_path / "log.jsonl", [dict(step=0, val_bpb=3.0), *rows, dict(step=29, val_bpb=2.0)])
    assert forgetting.gained(str(tmp_path)) == ("val_bpb", 3.0, 2.0)


def test_one_document_has_no_interval_and_the_summary_stays_json(lab, tmp_path):
    (tmp_path / "one.txt").write_text(TEXTS[0])
    text = old(tmp_path / "one.txt", most=2, out=tmp_path)
    text.measure(Apertus(ApertusConfig(**TINY)), Ranks())
    text.remember(0, True)
    assert text.summary()["old_plus_minus"] is None
    write_rows(tmp_path / "log.jsonl", [dict(step=0, loss=1.0)])
    assert "(+0.000, 1 document)" in text.line(str(tmp_path)) and math.isfinite(text.summary()["old_lost"])


def test_the_picture_of_a_run_has_a_panel_for_each_curve_over_steps(watched, unwatched, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plot, "finish", lambda figure, picture: figures.append(figure))
    panels = [("loss", "loss"), *plot.PANELS[1:]]
    for out in (watched[0], unwatched):
        plot.curves([str(out)], str(tmp_path / "x.png"), panels, "step")
    titles = [[axis.get_title() for axis in figure.axes if axis.lines] for figure in figures]
    measured_too = ["old text (bits/byte)", "KL to the base on old text (nats/token)", "task (share of right answers)"]
    both = ["loss", *measured_too, "gradient norm", "learning rate"]
    assert titles == [both, ["loss", "gradient norm", "learning rate"]]
    forgotten = figures[0].axes[1]
    [curve] = forgotten.lines
    assert curve.get_xdata().tolist() == [0, 1, 3, 5] and forgotten.get_xlabel() == "step"
    assert curve.get_ydata().tolist() == [value for _, value, _ in measured(watched[0])]


# -----------------------------------------------------------------------------
# the study: learning rate x rank


@pytest.fixture
def study(lab, tmp_path, monkeypatch):
    """studies/forget.py on a text of two kinds of lines. Its runs are real ones, in this process; (command, runs)."""
    from studies import kit
    calls = []

    def run_script(name, args, log, threads=None, device=None):
        calls.append(args)
        done = script(name, *args)
        return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]

    monkeypatch.setattr(kit, "run_script", run_script)
    lines = [f"Line {i} of a new text, and no more.\n" for i in range(60)]
    (tmp_path / "new.txt").write_text("\n".join(lines))

    def study(*args, text=True):
        where = [f"--start={lab / 'model'}", f"--data={lab / 'old.jsonl'}", f"--runs={tmp_path / 'runs'}",
                 f"--out={tmp_path / 'results'}", "--jobs=1", "--characters=60", "--conversations=8", "--held_out=4"]
        grid = ["--ranks=(0, 2)", "--lrs=(1e-3, 1e-2)", "--seeds=1", "--batch_size=4", "--old_windows=3"]
        return script("studies.forget", *[tmp_path / "new.txt"] * text, *where, *grid, *args, pictures=True)

    return study, calls, tmp_path


def test_the_study_sets_what_was_gained_beside_what_was_lost_and_does_nothing_twice(lab, study):
    run, calls, root = study
    done = run()
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (root / "results" / "rows.jsonl").read_text().splitlines()]
    assert [(row["rank"], row["lr"]) for row in rows] == [(0, 1e-3), (0, 1e-2), (2, 1e-3), (2, 1e-2)]
    assert len(calls) == 4 and all(row["steps"] == 2 for row in rows)
    table = (root / "results" / "table.md").read_text()
    last = rows[-1]
    assert f"| LoRA 2 | 16 | 0.01 | {last['gained']:.3f} | {last['lost']:.3f} | {last['change']:.3f} |" in table
    assert f"| full |  | 0.001 | {rows[0]['gained']:.3f} |" in table

    # One of the runs by hand: the answers in fp64, and the distance of its dense matrices from the start's.
    [folder] = [arg[6:] for arg in calls[1] if arg.startswith("--out=")]
    models = [convert.load_any(name, "cpu", torch.float64)[0] for name in (str(lab / "model"), folder)]
    from studies import forget
    forget.characters, forget.conversations, forget.held_out = 60, 8, 4
    learnt, held = forget.split(str(root / "new.txt"))
    assert len(learnt) == 8 and len(held) == 4 and not any(row in learnt for row in held)
    bits, size = np.zeros(2), 0
    for row in held:
        ids, said = TOK.chat(row["messages"])[1], row["messages"][-1]["content"]
        ids = ids if ids[-1] == TOK.special["<|assistant_end|>"] else [*ids, TOK.special["<|assistant_end|>"]]
        n = len(TOK.encode(said)) + 1
        size += len(said.encode())
        for k, model in enumerate(models):
            with torch.no_grad():
                logp = model(torch.tensor([ids[:-1]]))[0][0].log_softmax(-1)
            bits[k] -= logp.gather(1, torch.tensor(ids[1:])[:, None])[-n:].sum().item() / math.log(2)
    assert rows[1]["gained"] == pytest.approx((bits[0] - bits[1]) / size, rel=1e-4)
    matrices = [torch.cat([p.flatten() for n, p in m.named_parameters() if "_proj" in n]) for m in models]
    want = (matrices[1] - matrices[0]).norm() / matrices[0].norm()
    assert rows[1]["change"] == pytest.approx(want.item(), rel=1e-4)

    before = (root / "results" / "rows.jsonl").read_text()
    assert run().returncode == 0 and len(calls) == 4
    assert run("--report", text=False).returncode == 0 and (root / "results" / "table.md").read_text() == table
    assert (root / "results" / "rows.jsonl").read_text() == before
    assert (root / "results" / "forget.png").stat().st_size > 10_000


def test_a_run_that_diverges_stands_in_the_table_and_another_error_stops_the_study(study):
    run, calls, root = study
    done = run("--lrs=(1e-3, 1e30)", "--ranks=(0,)", "--batch_size=2")
    assert done.returncode == 0, done.stderr
    assert "| full |  | 1e+30 |  |  |  |  | diverged |" in (root / "results" / "table.md").read_text()
    assert run("--lrs=(1e-3, 1e30)", "--ranks=(0,)", "--batch_size=2").returncode == 0 and len(calls) == 2
    refused(run("--ranks=(99,)"), "lora_r=99 is larger than")


@pytest.mark.parametrize("args, says", [
    ([], "name the new text"),
    (["--report"], "run studies.forget first"),
])
def test_the_study_says_what_it_lacks(study, args, says):
    run, calls, _ = study
    refused(run(*args, text=False), says)
    assert calls == []


def test_a_text_that_is_too_short_is_told(study):
    run, calls, _ = study
    refused(run("--conversations=99"), "gives 30 conversations", "99 + 4")
    assert calls == []
