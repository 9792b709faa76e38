"""
evaluate.py: log-likelihoods against transformers and by hand, intervals against closed forms, and
lm-evaluation-harness against its own model of the same weights.
"""
import copy
import json
import math
import os

import numpy as np
import pytest
import torch

import convert
import evaluate
import tokenizer
from conftest import refused, script
from model import Apertus, ApertusConfig

TEXTS = ["All human beings are born free and equal in dignity and rights.",
         "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
         "Alle Menschen sind frei und an Würde und Rechten gleich geboren. " * 4]


def apertus(seed=0, **shape):
    """A tiny model for the ids of tokenizer 'byte'."""
    return Apertus(ApertusConfig(vocab_size=320, **shape), seed).eval()


def logp_of(model, ids):
    """ids (T,) -> log p (T, V) of what comes after each of them."""
    with torch.no_grad():
        logits, _ = model(torch.tensor([ids]))
    return logits[0].log_softmax(-1)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluated(folder, *args):
    """Run evaluate.py with --out=FOLDER/out: its output, and the rows of evaluation.json, which has no NaN."""
    done = script("evaluate.py", *args, f"--out={folder / 'out'}")
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "out" / "evaluation.json").read_text(), parse_constant=pytest.fail)
    return done.stdout, found["rows"]


def scores_of(rows):
    return {row["metric"]: row["score"] for row in rows}


@pytest.fixture(scope="module")
def tok():
    return tokenizer.load("byte")


@pytest.fixture(scope="module")
def model():
    return apertus(block_size=96, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=48, init_std=0.2)


@pytest.fixture(scope="module")
def exported(model, tok, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("hf") / "model")
    convert.save_hf(model, folder, tok)
    return folder


@pytest.fixture(scope="module")
def theirs(exported):
    """transformers' model and tokenizer of the same files."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(exported)


def test_a_uniform_model_needs_log2_of_its_vocabulary(tok):
    """Closed form. The end of a document is a token too, and has no byte."""
    flat = apertus(block_size=32, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24, init_std=0.0)
    rows = evaluate.text_scores(flat, tok, [("a", "x" * 99), ("b", "y" * 49)])
    want = {"all": 150 / 148, "a": 100 / 99, "b": 50 / 49}
    assert {row["name"]: row["score"] for row in rows} == pytest.approx({k: math.log2(320) * v for k, v in want.items()})


@pytest.fixture(scope="module")
def narrow():
    return apertus(3, block_size=12, n_layer=1, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=48, init_std=0.3)


def bits_by_hand(model, ids):
    """-log2 p of ids[1:], in fp64 and with one call of the model per token."""
    T = model.config.block_size
    stride = T - T // 2
    model = copy.deepcopy(model).double()
    bits = []
    for i in range(1, len(ids)):
        # Of the strides of half a window, the first from which at most T tokens lead to token i.
        begin = stride * max(0, math.ceil((i - T) / stride))
        logp = logp_of(model, ids[begin:i])[-1]
        bits.append(-logp[ids[i]].item() / math.log(2))
    return bits


def test_texts_of_all_lengths_are_scored_as_the_model_called_token_by_token(narrow, tok, monkeypatch):
    """Sizes of batches, windows and documents that do not divide one another; one text is not in ASCII at all."""
    monkeypatch.setattr(evaluate, "batch_tokens", 31)
    en, fr, de = TEXTS
    texts = ["a", "Würde", fr[:37], en[:12], en[:11], "αξιοπρέπεια", de[:24], en[:13], "b"]
    documents = [("xyz"[i % 3], text) for i, text in enumerate(texts)]
    bits = [sum(bits_by_hand(narrow, evaluate.text_ids(tok, text))) for text in texts]
    rows = evaluate.text_scores(narrow, tok, documents)
    assert [row["name"] for row in rows] == ["all", "x", "y", "z"]
    for row in rows:
        mine = [i for i, (group, _) in enumerate(documents) if row["name"] in ("all", group)]
        size = sum(len(texts[i].encode()) for i in mine)
        assert row["score"] == pytest.approx(sum(bits[i] for i in mine) / size, rel=1e-5)
        assert (row["n"], row["bytes"]) == (len(mine), size)


def test_intervals_over_documents_are_the_jackknifes(model, narrow, tok, monkeypatch):
    """Another estimator of the same variance, of a score and of a paired difference; t(39) = 2.02269."""
    monkeypatch.setattr(evaluate, "against", "the other")
    documents = [("x", TEXTS[i % 3][i:i + 30 + i]) for i in range(40)]
    sizes = np.array([len(text.encode()) for _, text in documents])
    bits, other = (evaluate.document_bits(one, tok, documents) for one in (model, narrow))
    rows = evaluate.text_scores(model, tok, documents, (narrow, tok))[:2]
    assert [row["metric"] for row in rows] == ["bits/byte", "bits/byte above the other"]
    for row, values in zip(rows, (bits, bits - other)):
        score = values.sum() / sizes.sum()
        left_out = (values.sum() - values) / (sizes.sum() - sizes)
        half = 2.02269 * math.sqrt(39 * left_out.var())
        assert row["score"] == pytest.approx(score)
        assert (row["high"] - score, score - row["low"]) == pytest.approx((half, half), rel=0.03)


@pytest.mark.parametrize("right, n, low, high", [
    (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)])
def test_intervals_are_wilsons(right, n, low, high):
    """81 of 263: Newcombe 1998, table I."""
    assert evaluate.wilson(right, n) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@pytest.mark.parametrize("values", [[0, 1], [1, 1], [0.0] * 3, [4.0] * 3, [0.25, 0.75], [3.0, 5.0, 4.0]])
def test_harness_means_get_wilsons_interval_for_shares_and_students_for_all_else(values):
    """The standard error is the harness' own (lm_eval.api.metrics.mean_stderr); t(1) = 12.7062, t(2) = 4.30265."""
    metrics = pytest.importorskip("lm_eval.api.metrics")
    n = len(values)
    score = float(np.mean(values))
    stderr = metrics.mean_stderr(values)
    half = {2: 12.7062, 3: 4.30265}[n] * stderr
    want = evaluate.wilson(sum(values), n) if set(values) <= {0, 1} else (score - half, score + half)
    assert evaluate.harness_interval(score, stderr, n) == pytest.approx(want, abs=1e-4)
    assert evaluate.harness_interval(score, "N/A", n) == evaluate.harness_interval(score, stderr, 1) == (None, None)


# -----------------------------------------------------------------------------
# tasks


def quiz(question, choices, answer):
    return dict(question=question, choices=choices, answer=answer)


@pytest.mark.parametrize("answer, want", [
    (0, "a1"), (2, "B"), ("a", "a1"), ("C", "B"), ("B", "B"), ("b", "c3"), (None, None), (3, None), (-1, None),
    ("D", None), ("no choice", None), (True, None), ([0], None), ("", None)])
def test_an_answer_is_a_choice_a_letter_or_an_index(answer, want):
    row = quiz("?", ["a1", "c3", "B"], answer)
    if want:
        assert evaluate.accepted_answers(row) == [want]
        return
    with pytest.raises(ValueError, match="quiz, question 2: no valid answer"):
        evaluate.asked([quiz("?", ["a", "b"], 0), row], "quiz")


def test_chance_is_the_mean_over_questions_and_a_solved_example_has_the_right_choice(model, tok, monkeypatch):
    monkeypatch.setattr(evaluate, "shots", 2)
    rows = [quiz("1 + 1?", ["3", "2"], "B"), quiz("2 + 2? ", ["4", "5"], "4")]
    rows += [quiz("3?", ["6", "7"], 0), quiz("4?", list("abcd"), "a")]
    asked = []
    scores = evaluate.pair_scores
    monkeypatch.setattr(evaluate, "pair_scores", lambda *how: asked.extend(how[2]) or scores(*how))
    found = evaluate.choice_scores(model, tok, rows, "x")
    context = "1 + 1?\nAnswer: 2\n\n2 + 2?\nAnswer: 4\n\n"
    assert asked == [(f"{context}3?\nAnswer:", f" {c}") for c in "67"] + [(f"{context}4?\nAnswer:", f" {c}") for c in "abcd"]
    for row in found:
        assert (row["n"], row["shots"], row["chance"]) == (2, 2, 0.375)
        assert (row["low"], row["high"]) == evaluate.wilson(2 * row["score"], 2)


def up_to(sequence, stops):
    """A text or a list of ids, cut before the first of the stops that it holds."""
    return sequence[:min((sequence.index(s) for s in stops if s in sequence), default=len(sequence))]


@pytest.fixture
def say(tok, monkeypatch):
    """say(text, ...): every model says these texts and ids after any prompt, up to a stop, which is included."""
    def say(*parts):
        said = sum((tok.encode(part) if isinstance(part, str) else [part] for part in parts), [])

        def generate(model, prompts, n, temperature, stop):
            ids = said[:n]
            return [[*prompt, *ids[:len(up_to(ids, stop)) + 1]] for prompt in prompts]
        monkeypatch.setattr(evaluate, "generate", generate)
    return say


@pytest.mark.parametrize("stops, answer", [
    ([";", ","], "one"), ([",", ";"], "one"),
    (["three"], "one, two; "), (["", ";"], "one, two"), ([], "one, two; three"),
])
def test_an_answer_ends_before_the_earliest_of_its_stops_whatever_their_order(model, say, tok, stops, answer):
    say("one, two; three")
    assert evaluate.continue_texts(model, tok, ["a"], stops, 40) == [answer]


def test_exact_match_accepts_any_of_the_answers_and_nothing_else(model, say, tok, monkeypatch):
    answers = [["no", 42], 42, "42", " 42 ", "4", "42 and more", ["a", "b"]]
    rows = [dict(question="?", answer=answer) for answer in answers]
    say(" 42 \n43")
    found, = evaluate.answer_scores(model, tok, rows, "sums")
    assert (found["score"], found["n"], found["chance"]) == (4 / 7, 7, 0.0)
    assert (found["low"], found["high"]) == evaluate.wilson(4, 7)
    monkeypatch.setattr(evaluate, "shots", 5)
    say("a")
    assert evaluate.answer_scores(model, tok, rows, "sums")[0]["score"] == 0.5


def test_a_task_that_cannot_be_scored_is_an_error(model, tok, monkeypatch):
    for choice, says in (("", "adds 0 tokens"), ("x" * 97, "adds 97 tokens to its question: want 1 to 96")):
        with pytest.raises(ValueError, match=says):
            evaluate.pair_scores(model, tok, [("?", choice)])
    with pytest.raises(ValueError, match="leaves no room for a question"):
        evaluate.continue_texts(model, tok, ["?"], [], 95)
    monkeypatch.setattr(evaluate, "shots", 1)
    with pytest.raises(ValueError, match="leaves no question of 1"):
        evaluate.asked([quiz("?", ["a", "b"], 0)], "quiz")


# -----------------------------------------------------------------------------
# the script


def test_one_command_gives_a_table_and_json(exported, tmp_path):
    texts, task = tmp_path / "texts.jsonl", tmp_path / "quiz.jsonl"
    write_rows(texts, [dict(text=t, lang=lang) for t, lang in zip([*TEXTS, *TEXTS[:2], " "], ("en", "fr", "de", "en", "fr", "it"))])
    write_rows(task, [quiz("1 + 1?", ["2", "3"], "2"), dict(question="2 + 2?", answer=4)])
    table, rows = evaluated(tmp_path, texts, task, f"--init_from={exported}")
    assert [(row["name"], row["n"]) for row in rows] == [
        ("all", 5), ("de", 1), ("en", 2), ("fr", 2), ("quiz.jsonl", 1), ("quiz.jsonl", 1), ("quiz.jsonl", 1)]
    # One document has no interval.
    assert rows[1]["low"] is None and f"| de | bits/byte |  | 1 | {len(TEXTS[2].encode())} | {rows[1]['score']:.3f} |  |  |  |" in table
    _, rows = evaluated(tmp_path, texts, f"--init_from={exported}", "--limit=2", "--by=source")
    assert [(row["name"], row["n"]) for row in rows] == [("all", 2), ("texts.jsonl", 2)]


def prepared(folder, *args):
    """A data folder made by prepare.py with half of its documents for validation, and how many these are."""
    done = script("prepare.py", *args, f"--out={folder}", "--val_share=0.5")
    assert done.returncode == 0, done.stderr
    sources = json.loads((folder / "meta.json").read_text())["sources"]
    return str(folder), sum(source["val"]["documents"] for source in sources.values())


def test_validation_documents_are_those_of_every_source_each_once(tmp_path):
    """Three sources of different sizes; what is read back is held against the texts that went in."""
    texts = {}
    files = []
    for source, n in (("one", 7), ("two", 19), ("three", 4)):
        rows = [dict(source=source, text=f"{source} {i}: " + f"Würde {i * 37} " * (i % 5 + 1)) for i in range(n)]
        files.append(tmp_path / f"{source}.jsonl")
        write_rows(files[-1], rows)
        texts |= {row["text"].strip(): source for row in rows}
    data, documents = prepared(tmp_path / "own", *files, "--tokenizer=apertus:400", "--source_by=source")
    # The model's own vocabulary; and another, to whose ids the text is translated.
    for vocabulary in ("apertus:400", "byte"):
        found = list(evaluate.validation_documents(data, tokenizer.load(vocabulary)))
        assert len(set(found)) == len(found) == documents
        assert all(texts[text.strip()] == source for source, text in found)
        assert {source for source, _ in found} == {"one", "two", "three"}


@pytest.mark.parametrize("content, says", [
    ("{}", 'line 1: want a JSON object with "text", or'), ('{"text": 1}', "line 1: want a JSON object"),
    ("", "is empty"), ('{"text": "a"}\nno json', "line 2: want a JSON object"), ('{"text": " "}', "nothing to evaluate"),
    (None, "no such file or folder")])
def test_a_file_that_is_neither_text_nor_task_is_an_error(exported, tmp_path, content, says):
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_text(content)
    refused(script("evaluate.py", path, f"--init_from={exported}", f"--out={tmp_path / 'out'}"), says)


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


@pytest.fixture
def published(theirs, tmp_path, monkeypatch):
    """published(...): the harness' own interface to transformers' model of the same weights, without a network."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    their_model, their_tokenizer = theirs
    fixed = dict(pretrained=their_model, tokenizer=their_tokenizer, batch_size=4, device="cpu", max_length=96)
    return lambda **how: huggingface.HFLM(**fixed, **how)


def ask(interface, kind, *arguments):
    """What one of the harness' interfaces to models answers to requests of a kind."""
    from lm_eval.api.instance import Instance
    return getattr(interface, kind)([Instance(request_type=kind, doc={}, arguments=a, idx=0) for a in arguments])


def test_the_harness_gives_our_model_and_the_exported_one_the_same_numbers(model, tok, published):
    ours, theirs = evaluate.harness_model(model, tok), published()
    pairs = [("Question: why?\nAnswer:", " because"), ("", "no context"), ("a", "b"), ("why?", " a"), ("why?", " a")]
    pairs += [("x" * 200, " cut"), ("x" * 200 + " \n", "cut"), ("x", "y" * 96)]
    # Whitespace of all kinds at the end of the context belongs to the continuation.
    pairs += [("why?" + end, "because") for end in (" ", "\n", "\t", " \n\t ", "\n\n", "\u00a0", "\x0b", "\u3000")]
    pairs += [(" ", "all of it"), ("\n\n", "all of it")]
    found, wanted = (ask(interface, "loglikelihood", *pairs) for interface in (ours, theirs))
    for asked, (logp, greedy), (want, want_greedy) in zip(pairs, found, wanted, strict=True):
        assert logp == pytest.approx(want, rel=1e-5) and greedy == want_greedy, asked

    stops = [dict(until=["\n"], max_gen_toks=12, do_sample=False), dict(until="e", max_new_tokens=9)]
    for how in (*stops, dict(until=["zz", "a", "e"], max_tokens=20)):
        asked = [(text[:40], how) for text in TEXTS]
        assert ask(ours, "generate_until", *asked) == ask(theirs, "generate_until", *asked)


def test_a_harness_task_that_wants_sampling_is_an_error(model, tok):
    pytest.importorskip("lm_eval")
    with pytest.raises(ValueError, match="decodes greedily"):
        ask(evaluate.harness_model(model, tok), "generate_until", ("a", dict(do_sample=True, temperature=0.7)))


def test_the_harness_runs_a_local_task_file(model, tok, exported, published, tmp_path):
    """The same task file with transformers' model, and our own scores of the same rows."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    words = ["ja", "gewiss nicht", "οὐδέν ἐστι", "да", "人", "yes, of course", "né"]
    rows = [quiz(f"What is {i} + 1?", [words[(i + j) % 7] for j in (0, 1, 3)], i % 3) for i in range(12)]
    write_rows(tmp_path / "quiz.jsonl", rows)
    (tmp_path / "own_quiz.yaml").write_text(TASK.format(file=tmp_path / "quiz.jsonl"))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(published(), tasks=["own_quiz"], task_manager=manager)["results"]
    want = {k: results["own_quiz"][k] for k in ("acc,none", "acc_norm,none", "acc_bytes,none")}

    flags = [f"--init_from={exported}", "--harness=own_quiz", f"--harness_path={tmp_path}"]
    _, found = evaluated(tmp_path, *flags)
    assert scores_of(found) == want
    ours = scores_of(evaluate.choice_scores(model, tok, rows, "quiz"))
    assert ours == {"choice": want["acc,none"], "choice per byte": want["acc_bytes,none"]}
