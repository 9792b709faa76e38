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
from conftest import script
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
    """evaluate.py with --out=FOLDER/out, which must succeed: its table, and what it wrote into evaluation.json."""
    done = script("evaluate.py", *args, f"--out={folder / 'out'}")
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "out" / "evaluation.json").read_text())


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
    assert [r["group"] for r in rows] == ["all", "a", "b"]
    assert rows[0]["bits_per_byte"] == pytest.approx(math.log2(320) * 150 / 148)
    assert rows[1]["bits_per_byte"] == pytest.approx(math.log2(320) * 100 / 99)


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
    rows = {r["group"]: r for r in evaluate.text_scores(narrow, tok, documents)}
    bits = [bits_by_hand(narrow, [tok.bos, *tok.encode(text), tok.eos]) for text in texts]
    assert list(rows) == ["all", "x", "y", "z"]
    for name, row in rows.items():
        mine = [i for i, (group, _) in enumerate(documents) if name in ("all", group)]
        size = sum(len(texts[i].encode()) for i in mine)
        tokens = sum(len(bits[i]) for i in mine)
        assert row["bits_per_byte"] == pytest.approx(sum(sum(bits[i]) for i in mine) / size, rel=1e-5)
        assert (row["documents"], row["bytes"], row["tokens"]) == (len(mine), size, tokens)


def test_the_interval_over_documents_is_the_jackknifes(model, tok):
    """Another estimator of the same variance; t(39) = 2.02269."""
    documents = [("x", TEXTS[i % 3][i:i + 30 + i]) for i in range(40)]
    bits, _ = evaluate.document_bits(model, tok, documents)
    sizes = np.array([len(text.encode()) for _, text in documents])
    left_out = (bits.sum() - bits) / (sizes.sum() - sizes)
    want = 2.02269 * math.sqrt(39 * left_out.var())
    assert evaluate.text_scores(model, tok, documents)[0]["plus_minus"] == pytest.approx(want, rel=0.03)


@pytest.mark.parametrize("right, n, low, high", [
    (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)])
def test_intervals_are_wilsons(right, n, low, high):
    """81 of 263: Newcombe 1998, table I."""
    assert evaluate.wilson(right, n) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@pytest.mark.parametrize("values", [[0, 1], [1, 1], [0.0] * 3, [0.25, 0.75], [3.0, 5.0, 4.0]])
def test_harness_means_get_wilsons_interval_for_shares_and_students_for_all_else(values):
    """The standard error is the harness' own (lm_eval.api.metrics.mean_stderr); t(1) = 12.7062, t(2) = 4.30265."""
    metrics = pytest.importorskip("lm_eval.api.metrics")
    n = len(values)
    score = float(np.mean(values))
    stderr = metrics.mean_stderr(values)
    half = {2: 12.7062, 3: 4.30265}[n] * stderr
    want = evaluate.wilson(sum(values), n) if set(values) <= {0, 1} else (score - half, score + half)
    assert evaluate.harness_interval(score, stderr, n) == pytest.approx(want, abs=1e-4)


# -----------------------------------------------------------------------------
# tasks


def quiz(question, choices, answer):
    return dict(question=question, choices=choices, answer=answer)


def choice_logp(theirs, context, choice):
    their_model, their_tokenizer = theirs
    begin = len(their_tokenizer(context).input_ids)
    whole = their_tokenizer(context + choice).input_ids
    with torch.no_grad():
        logp = their_model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(logp[i - 1, whole[i]].item() for i in range(begin, len(whole)))


def best_choices(theirs, rows):
    """The number of the likeliest choice of each question by transformers: by the sum, and by the mean per byte."""
    total, norm = [], []
    for row in rows:
        logp = [choice_logp(theirs, row["question"] + "\nAnswer:", " " + choice) for choice in row["choices"]]
        per_byte = [nats / len(choice.encode()) for nats, choice in zip(logp, row["choices"])]
        total.append(int(np.argmax(logp)))
        norm.append(int(np.argmax(per_byte)))
    return total, norm


def shares_of_right(rows, *chosen):
    return [sum(a == row["answer"] for a, row in zip(of_all, rows)) / len(rows) for of_all in chosen]


@pytest.mark.parametrize("answer, want", [(0, 0), (2, 2), ("a", 0), ("C", 2), ("c3", 2)])
def test_an_answer_is_an_index_a_letter_or_the_choice(answer, want):
    assert evaluate.answer_of(dict(choices=["a1", "b2", "c3"], answer=answer), "here") == want


def test_chance_is_the_mean_over_questions_and_each_score_has_its_own_interval(model, tok, theirs):
    """Questions of 2 and of 4 choices: chance 3/8. Several scripts, since per byte is not per character."""
    words = ["ja", "gewiss nicht", "οὐδέν", "да", "人", "yes, of course", "né", "x"]
    rows = [quiz(f"Frage {i}", [words[(i + j) % 8] for j in range((2, 4)[i % 2])], 0) for i in range(8)]
    total, norm = best_choices(theirs, rows)
    for i, row in enumerate(rows):
        row["answer"] = norm[i] if i < 5 else (norm[i] + 1) % len(row["choices"])
    score, score_norm = shares_of_right(rows, total, norm)
    assert score_norm == 5 / 8 != score
    found = evaluate.choice_scores(model, tok, rows, "words")
    assert found["chance"] == 0.375
    assert (found["score"], found["interval"]) == (score, evaluate.wilson(8 * score, 8))
    assert (found["score_norm"], found["interval_norm"]) == (score_norm, evaluate.wilson(8 * score_norm, 8))


def test_a_solved_example_has_the_right_choice(model, tok, monkeypatch):
    monkeypatch.setattr(evaluate, "shots", 2)
    rows = [quiz("1 + 1?", ["3", "2"], "B"), quiz("2 + 2? ", ["4", "5"], "4"), quiz("3 + 3?", ["6", "7"], 0)]
    asked = []
    pair = evaluate.pair
    monkeypatch.setattr(evaluate, "pair", lambda tok, *words_T: asked.append(words_T[:2]) or pair(tok, *words_T))
    found = evaluate.choice_scores(model, tok, rows, "x")
    assert found["n"] == 1 and found["interval"] == evaluate.wilson(int(found["score"]), 1)
    context = "1 + 1?\nAnswer: 2\n\n2 + 2?\nAnswer: 4\n\n3 + 3?\nAnswer:"
    assert asked == [(context, " 6"), (context, " 7")]


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
    found = evaluate.answer_scores(model, tok, rows, "sums")
    assert (found["score"], found["interval"]) == (4 / 7, evaluate.wilson(4, 7))
    assert (found["n"], found["chance"]) == (7, 0.0)
    monkeypatch.setattr(evaluate, "shots", 5)
    say("a")
    assert evaluate.answer_scores(model, tok, rows, "sums")["score"] == 0.5


@pytest.mark.parametrize("answer", [None, 4, -1, "E", "no choice", True, [0]])
def test_a_task_without_a_valid_answer_is_told(model, tok, answer):
    rows = [quiz("?", ["a", "b"], 0), quiz("?", ["a", "b", "c", "d"], answer)]
    with pytest.raises(ValueError, match="quiz, question 2: no valid answer"):
        evaluate.choice_scores(model, tok, rows, "quiz")


def test_a_task_that_cannot_be_scored_is_told(model, tok, monkeypatch):
    for choice, says in (("", "adds no token"), ("x" * 97, "97 tokens, more than the model's window of 96")):
        with pytest.raises(ValueError, match=says):
            evaluate.pair(tok, "?", choice, 96)
    with pytest.raises(ValueError, match="leaves no room for a question"):
        evaluate.continue_texts(model, tok, ["?"], [], 95)
    monkeypatch.setattr(evaluate, "shots", 1)
    with pytest.raises(ValueError, match="leaves no question of 1"):
        evaluate.choice_scores(model, tok, [quiz("?", ["a", "b"], 0)], "quiz")


# -----------------------------------------------------------------------------
# the script


def test_one_command_gives_table_json_and_bars(exported, tmp_path):
    texts, task = tmp_path / "texts.jsonl", tmp_path / "quiz.jsonl"
    write_rows(texts, [dict(text=t, lang=lang) for t, lang in zip(TEXTS * 2, ("en", "fr", "de") * 2)])
    write_rows(task, [quiz("1 + 1?", ["2", "3"], "2")])
    table, found = evaluated(tmp_path, texts, task, f"--init_from={exported}")
    assert [r["group"] for r in found["texts"]] == ["all", "de", "en", "fr"] and found["tasks"][0]["n"] == 1
    _, found = evaluated(tmp_path, texts, f"--init_from={exported}", "--limit=2", "--by=source")
    assert [(r["group"], r["documents"]) for r in found["texts"]] == [("all", 2), ("texts.jsonl", 2)]
    assert "| fr | 2 |" in table and "chance" in table


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
    ("{}", 'line 1: want a JSON object with "text", or'), ("", "is empty"),
    ('{"text": "a"}\nno json', "line 2: want a JSON object")])
def test_a_file_that_is_neither_text_nor_task_is_told(exported, tmp_path, content, says):
    (tmp_path / "x.jsonl").write_text(content)
    done = script("evaluate.py", tmp_path / "x.jsonl", f"--init_from={exported}", f"--out={tmp_path / 'out'}")
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


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


def test_a_harness_task_that_wants_sampling_is_refused(model, tok):
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
    assert {r["metric"]: r["score"] for r in found["tasks"]} == want
    ours = evaluate.choice_scores(model, tok, rows, "quiz")
    assert (ours["score"], ours["score_norm"]) == (want["acc,none"], want["acc_bytes,none"])
