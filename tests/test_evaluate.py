"""evaluate.py: log-likelihoods by hand, intervals against closed forms, choices against lm-evaluation-harness."""
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

import evaluate
import tokenizer
from conftest import script
from model import Apertus, ApertusConfig

TOK = tokenizer.load("byte")
TEXTS = ["All human beings are born free and equal in dignity and rights.",
         "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
         "Alle Menschen sind frei und an Würde und Rechten gleich geboren. " * 4]


def apertus(seed, block_size):
    """A tiny model for the ids of tokenizer 'byte'."""
    shape = dict(n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=48, init_std=0.2)
    return Apertus(ApertusConfig(vocab_size=320, block_size=block_size, **shape), seed).eval()


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluated(folder, *args):
    """Run evaluate.py with --out=FOLDER/out: its output, and the rows of evaluation.json, which has no NaN."""
    done = script("evaluate.py", *args, f"--out={folder / 'out'}")
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "out" / "evaluation.json").read_text(), parse_constant=pytest.fail)
    return done.stdout, found["rows"]


@pytest.fixture(scope="module")
def model():
    return apertus(0, 96)


@torch.no_grad()
def bits_by_hand(model, ids):
    """-log2 p of ids[1:] added up, with one call of the model per token."""
    T = model.config.block_size
    stride = T - T // 2
    bits = 0
    for i in range(1, len(ids)):
        # Of the strides of half a window, the first from which at most T tokens lead to token i.
        begin = stride * max(0, math.ceil((i - T) / stride))
        logits, _ = model(torch.tensor([ids[begin:i]]))
        bits -= logits[0, -1].log_softmax(-1)[ids[i]].item() / math.log(2)
    return bits


def test_texts_of_all_lengths_are_scored_as_the_model_called_token_by_token(monkeypatch):
    """
    In fp64. Sizes of batches, windows and documents that do not divide one another; a text ends in </s>, also if the
    model is one for conversations.
    """
    monkeypatch.setattr(evaluate, "batch_tokens", 31)
    monkeypatch.setattr(TOK, "eos", TOK.id_of("<|assistant_end|>"))
    narrow = apertus(3, 12).double()
    en, fr, de = TEXTS
    texts = ["a", "Würde", fr[:37], en[:12], en[:11], "αξιοπρέπεια", de[:24], en[:13], "b"]
    documents = [("xyz"[i % 3], text) for i, text in enumerate(texts)]
    bits = [bits_by_hand(narrow, [TOK.bos, *TOK.encode(text), TOK.id_of("</s>")]) for text in texts]
    rows = evaluate.text_scores(narrow, TOK, documents)
    assert [row["name"] for row in rows] == ["all", "x", "y", "z"]
    for row in rows:
        mine = [i for i, (group, _) in enumerate(documents) if row["name"] in ("all", group)]
        size = sum(len(texts[i].encode()) for i in mine)
        assert row["score"] == pytest.approx(sum(bits[i] for i in mine) / size, rel=1e-5)
        assert (row["n"], row["bytes"]) == (len(mine), size)


def test_the_interval_over_documents_is_the_jackknifes():
    """Another estimator of the same variance; t(39) = 2.02269."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 80, 40)
    bits = 2.0 * sizes + rng.normal(0, 9, 40)
    row = evaluate.bits_row("x", "bits/byte", bits, sizes)
    left_out = (bits.sum() - bits) / (sizes.sum() - sizes)
    half = 2.02269 * math.sqrt(39 * left_out.var())
    low, high = row["score"] - half, row["score"] + half
    assert (row["low"], row["high"]) == pytest.approx((low, high), rel=2e-3)


@pytest.mark.parametrize("values, t", [
    ([0, 1], 0), ([1, 1], 0), ([4.0] * 3, 1), ([0.25, 0.75], 12.7062), ([3, 5, 4], 4.30265)])
def test_harness_means_get_wilsons_interval_for_shares_and_students_for_all_else(values, t):
    """The standard error is the harness' own (lm_eval.api.metrics.mean_stderr). t: the quantile, 0 for a share."""
    metrics = pytest.importorskip("lm_eval.api.metrics")
    n, score, stderr = len(values), float(np.mean(values)), metrics.mean_stderr(values)
    want = (score - t * stderr, score + t * stderr) if t else evaluate.wilson(sum(values), n)
    assert evaluate.harness_interval(score, stderr, n) == pytest.approx(want, abs=1e-4)
    assert evaluate.harness_interval(score, "N/A", n) == evaluate.harness_interval(score, stderr, 1) == (None, None)


# -----------------------------------------------------------------------------
# tasks


def quiz(question, choices, answer):
    return dict(question=question, choices=choices, answer=answer)


@pytest.mark.parametrize("answer, want", [
    (0, "a1"), (2, "B"), ("a", "a1"), ("C", "B"), ("B", "B"), (3, None), (-1, None), ("no choice", None), (True, None)])
def test_an_answer_is_a_choice_a_letter_or_an_index(answer, want):
    row = quiz("?", ["a1", "c3", "B"], answer)
    assert evaluate.accepted_answers(row) == ([want] if want else [])


def test_chance_is_the_mean_over_questions_and_a_solved_example_has_the_right_choice(model, monkeypatch):
    monkeypatch.setattr(evaluate, "shots", 2)
    rows = [quiz("1 + 1?", ["3", "2"], "B"), quiz("2 + 2? ", ["4", "5"], "4")]
    rows += [quiz("3?", ["6", "7"], 0), quiz("4?", list("abcd"), "a")]
    context = "1 + 1?\nAnswer: 2\n\n2 + 2?\nAnswer: 4\n\n"
    prompts = f"{context}3?\nAnswer:", f"{context}4?\nAnswer:"
    assert evaluate.asked(rows, "x") == [(prompts[0], ["6"], ["6", "7"]), (prompts[1], ["a"], list("abcd"))]
    for row in evaluate.choice_scores(model, TOK, rows, "x"):
        assert (row["n"], row["shots"], row["chance"]) == (2, 2, 0.375)
        assert (row["low"], row["high"]) == evaluate.wilson(2 * row["score"], 2)


@pytest.fixture
def say(monkeypatch):
    """say(ids): every model says these ids after any prompt, up to a stop, which is included; say.prompts: those."""
    def say(ids):
        def generate(model, prompts, n, temperature, stop):
            say.prompts = prompts
            end = next((i for i, token in enumerate(ids[:n]) if token in stop), n)
            return [[*prompt, *ids[:end + 1]] for prompt in prompts]
        monkeypatch.setattr(evaluate, "generate", generate)
    return say


def test_exact_match_accepts_any_of_the_answers_and_nothing_else(model, say):
    answers = [["no", 42], 42, "42", " 42 ", "4", "42 and more", ["a", "b"]]
    rows = [dict(question="?", answer=answer) for answer in answers]
    # Control tokens are no part of the answer.
    say([TOK.id_of("<|user_start|>"), *TOK.encode(" 42 \n43"), TOK.eos, *TOK.encode("no")])
    found, = evaluate.answer_scores(model, TOK, rows, "sums")
    assert (found["score"], found["n"], found["chance"]) == (4 / 7, 7, 0.0)
    say([*TOK.encode("a"), TOK.eos, *TOK.encode("b")])
    assert evaluate.answer_scores(model, TOK, rows, "sums")[0]["score"] == 1 / 7


def test_a_long_context_loses_its_beginning_in_choices_and_in_questions(model, say):
    """Bytes are tokens: the last ones before the choice, and before the room for the answer, are known."""
    context = "".join(map(chr, range(40, 120))) * 2
    assert evaluate.pair(TOK, context, " ab", 96) == (TOK.encode(context[-94:] + " ab"), 94)
    assert evaluate.pair(TOK, "?", " ab", 4) == ([TOK.bos, *TOK.encode("? ab")], 2)
    say(TOK.encode("1"))
    evaluate.answer_scores(model, TOK, [dict(question=context, answer=1)], "sums")
    room = 96 - evaluate.max_new_tokens
    assert say.prompts == [TOK.encode(f"{context}\nAnswer:")[-room:]]


# -----------------------------------------------------------------------------
# the script


def test_one_command_gives_a_table_and_json(lab, tmp_path):
    texts, task = tmp_path / "texts.jsonl", tmp_path / "quiz.jsonl"
    write_rows(texts, [dict(text=t, lang=lang) for t, lang in zip([*TEXTS, "a", " "], ("en", "fr", "de", "en", "it"))])
    write_rows(task, [quiz("1 + 1?", ["2", "3"], "2"), dict(question="2 + 2?", answer=4)])
    table, rows = evaluated(tmp_path, texts, task, f"--init_from={lab}/hf")
    names = [(row["name"], row["n"]) for row in rows]
    assert names == [("all", 4), ("de", 1), ("en", 2), ("fr", 1), *[("quiz.jsonl", 1)] * 3]
    # One document has no interval.
    assert rows[1]["low"] is None and rows[2]["low"] < rows[2]["score"] < rows[2]["high"]
    assert f"| de | bits/byte |  | 1 | {len(TEXTS[2].encode())} | {rows[1]['score']:.3f} |  |  |  |" in table
    _, (other, above, *_) = evaluated(tmp_path, texts, f"--init_from={lab}/sft", f"--against={lab}/hf")
    assert above["score"] == pytest.approx(other["score"] - rows[0]["score"]) and above["score"]
    _, rows = evaluated(tmp_path, texts, f"--init_from={lab}/hf", "--limit=2", "--by=source")
    assert [(row["name"], row["n"]) for row in rows] == [("all", 2), ("texts.jsonl", 2)]


def test_validation_documents_are_those_of_every_source_each_once(tmp_path):
    """Three sources of different sizes; the documents read back are compared with the texts that went in."""
    sizes = dict(one=7, two=19, three=4)
    texts = {f"{name} {i}: " + f"Würde {i * 37} " * (i % 5) + ".": name for name, n in sizes.items() for i in range(n)}
    write_rows(tmp_path / "x.jsonl", [dict(source=source, text=text) for text, source in texts.items()])
    data = str(tmp_path / "own")
    script("prepare.py", tmp_path / "x.jsonl", "--tokenizer=apertus:400", "--source_by=source", f"--out={data}",
           "--val_share=0.5")
    sources = evaluate.TokenDataset(data, "val", 1).meta["sources"]
    counts = {source: splits["val"]["documents"] for source, splits in sources.items()}
    # The model's own vocabulary; and another, to whose ids the text is translated.
    for vocabulary in ("apertus:400", "byte"):
        found = evaluate.validation_documents(data, tokenizer.load(vocabulary))
        assert len({*found}) == len(found) and all(texts[text] == source for source, text in found)
        assert Counter(source for source, _ in found) == counts and len(counts) == 3


# -----------------------------------------------------------------------------
# lm-evaluation-harness


TASK = """
task: own_quiz
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
  - metric: acc_bytes
"""


def test_the_harness_runs_a_local_task_file(lab, tmp_path, monkeypatch):
    """The authority for our own scores of the same rows."""
    pytest.importorskip("lm_eval")
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    words = ["ja", "gewiss nicht", "οὐδέν ἐστι", "да", "人", "yes, of course", "né"]
    rows = [quiz(f"What is {i} + 1?", [words[(i + j) % 7] for j in (0, 1, 3)], i % 7 % 3) for i in range(24)]
    write_rows(tmp_path / "quiz.jsonl", rows)
    (tmp_path / "own_quiz.yaml").write_text(TASK.format(file=tmp_path / "quiz.jsonl"))
    flags = [f"--init_from={lab}/hf", f"--harness_path={tmp_path}", "--harness=own_quiz"]
    _, theirs = evaluated(tmp_path, *flags)
    _, ours = evaluated(tmp_path, tmp_path / "quiz.jsonl", flags[0])
    theirs = {row.pop("metric"): row for row in theirs}
    for own, metric in zip(ours, ("acc,none", "acc_bytes,none"), strict=True):
        for key in ("n", "score", "low", "high"):
            assert theirs[metric][key] == pytest.approx(own[key])
    assert ours[0]["score"] != ours[1]["score"]
    _, found = evaluated(tmp_path, *flags, "--shots=2", "--limit=5")
    assert {(row["n"], row["shots"]) for row in found} == {(5, 2)}
