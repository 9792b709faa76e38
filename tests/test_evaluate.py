"""evaluate.py: log-likelihoods against transformers and by hand, intervals against closed forms, lm-evaluation-harness against its own model."""
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
from conftest import ROOT, script
from generate import generate
from model import Apertus, ApertusConfig

TEXTS = ["All human beings are born free and equal in dignity and rights.", "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
         "Alle Menschen sind frei und an Würde und Rechten gleich geboren. " * 4]


@pytest.fixture(scope="module")
def tok():
    return tokenizer.load("byte")


@pytest.fixture(scope="module")
def model():
    return Apertus(ApertusConfig(block_size=96, vocab_size=320, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=48, init_std=0.2)).eval()


@pytest.fixture(scope="module")
def exported(model, tok, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("hf") / "model")
    convert.save_hf(model, folder, tok)
    return folder


@pytest.fixture(scope="module")
def theirs(exported):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval(), transformers.AutoTokenizer.from_pretrained(exported)


def test_bits_of_a_document_are_transformers(model, tok, theirs):
    text = TEXTS[0]
    with torch.no_grad():
        ids = torch.tensor([[*theirs[1](text).input_ids, tok.eos]])
        want = theirs[0](ids, labels=ids).loss.item() * (ids.shape[1] - 1) / math.log(2) / len(text.encode())
    row = evaluate.text_scores(model, tok, [("en", text)])[0]
    assert row["bits_per_byte"] == pytest.approx(want, rel=1e-5) and row["bytes"] == len(text.encode()) and row["tokens"] == len(text) + 1


def test_a_uniform_model_needs_log2_of_its_vocabulary(tok):
    flat = Apertus(ApertusConfig(block_size=32, vocab_size=320, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24, init_std=0.0))
    rows = evaluate.text_scores(flat, tok, [("a", "x" * 99), ("b", "y" * 49)])
    assert [r["group"] for r in rows] == ["all", "a", "b"]
    assert rows[1]["bits_per_byte"] == pytest.approx(math.log2(320) * 100 / 99) and rows[0]["bits_per_byte"] == pytest.approx(math.log2(320) * 150 / 148)


@pytest.mark.parametrize("n, T", [(2, 8), (9, 8), (10, 8), (57, 8), (300, 96), (97, 96), (98, 97)])
def test_windows_score_every_token_once_with_half_a_window_of_context(n, T):
    ids, seen = list(range(n)), []
    for window, first in evaluate.windows_of(ids, T):
        assert len(window) <= T + 1 and (first >= T // 2 or window[0] == 0)
        seen += window[first:]
    assert seen == ids[1:]


def test_a_text_in_windows_is_scored_as_by_hand(model, tok):
    text = TEXTS[2]
    ids = [tok.bos, *tok.encode(text), tok.eos]
    total = 0.0
    for window, first in evaluate.windows_of(ids, 96):
        with torch.no_grad():
            logp = model(torch.tensor([window[:-1]]))[0][0].log_softmax(-1)
        total -= logp[torch.arange(len(window) - 1), torch.tensor(window[1:])][first - 1:].sum().item()
    assert evaluate.text_scores(model, tok, [("de", text)])[0]["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text.encode()), rel=1e-5)


@pytest.fixture(scope="module")
def narrow():
    return Apertus(ApertusConfig(block_size=12, vocab_size=320, n_layer=1, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=48, init_std=0.3), 3).eval()


def bits_by_hand(model, ids):
    """
    -log2 p of ids[1:], in fp64 and one call of the model a token. Token i sees ids[begin:i] and begin moves by strides of half a window:
    the first that leaves no more than T tokens between them.
    """
    T, model = model.config.block_size, copy.deepcopy(model).double()
    stride, bits = T - T // 2, []
    for i in range(1, len(ids)):
        begin = stride * max(0, math.ceil((i - T) / stride))
        with torch.no_grad():
            logp = model(torch.tensor([ids[begin:i]]))[0][0, -1].log_softmax(-1)
        bits.append(-logp[ids[i]].item() / math.log(2))
    return bits


def test_texts_of_all_lengths_are_scored_as_the_model_called_token_by_token(narrow, tok, monkeypatch):
    """Batches, windows and documents whose sizes do not divide one another; two languages, and one that is not written in ASCII."""
    monkeypatch.setattr(evaluate, "batch_tokens", 31)
    texts = ["a", "Würde", TEXTS[1][:37], TEXTS[0][:12], TEXTS[0][:11], "αξιοπρέπεια", TEXTS[2][:24], TEXTS[0][:13], "b"]
    documents = [(("x", "y", "z")[i % 3], text) for i, text in enumerate(texts)]
    rows = {r["group"]: r for r in evaluate.text_scores(narrow, tok, documents)}
    found = [(group, text, bits_by_hand(narrow, [tok.bos, *tok.encode(text), tok.eos])) for group, text in documents]
    assert list(rows) == ["all", "x", "y", "z"]
    for name, row in rows.items():
        mine = [(text, bits) for group, text, bits in found if name in ("all", group)]
        size = sum(len(text.encode()) for text, _ in mine)
        assert row["bits_per_byte"] == pytest.approx(sum(sum(bits) for _, bits in mine) / size, rel=1e-5)
        assert (row["documents"], row["bytes"], row["tokens"]) == (len(mine), size, sum(len(bits) for _, bits in mine))


@pytest.mark.parametrize("most", [5, 40])
def test_each_window_is_scored_once_and_no_batch_holds_more_than_it_may(narrow, monkeypatch, most):
    """Against one call of the model a window, in fp64; windows of 2 to 13 in no order. One that is longer than a batch goes alone."""
    monkeypatch.setattr(evaluate, "batch_tokens", most)
    draw = np.random.default_rng(0)
    windows = [(draw.integers(0, 320, n).tolist(), int(draw.integers(1, n))) for n in draw.integers(2, 14, 40)]
    sizes, hidden = [], narrow.hidden
    monkeypatch.setattr(narrow, "hidden", lambda idx: sizes.append(idx.shape) or hidden(idx))
    found = evaluate.token_scores(narrow, windows)
    exact = copy.deepcopy(narrow).double()
    del exact.hidden                                                        # the copy has a method of its own again
    for (ids, first), (nll, top) in zip(windows, found, strict=True):
        with torch.no_grad():
            logp = exact(torch.tensor([ids[:-1]]))[0][0].log_softmax(-1)[first - 1:]
        want = torch.tensor(ids[first:])
        np.testing.assert_allclose(nll, -logp.gather(1, want[:, None])[:, 0], rtol=1e-5)
        assert top.tolist() == (logp.argmax(-1) == want).tolist()
    assert sum(rows for rows, _ in sizes) == 40 and all(rows * T <= most or rows == 1 for rows, T in sizes)
    assert len(sizes) <= 12 or most == 5                                    # and is filled


def test_the_likeliest_tokens_are_marked(narrow, tok):
    """What the model itself writes greedily is the likeliest, token by token; with one token exchanged it is not."""
    ids = generate(narrow, [[tok.bos, 70]], 8, temperature=0)[0]
    assert evaluate.token_scores(narrow, [(ids, 2)])[0][1].all()
    other = [*ids[:4], (ids[4] + 1) % 320, *ids[5:]]
    assert not evaluate.token_scores(narrow, [(other, 2)])[0][1][2]


def test_padding_in_a_batch_changes_nothing(model, tok):
    windows = [([tok.bos, *tok.encode(t[:n])], 1) for t, n in zip(TEXTS, (5, 60, 90))]
    for one, (nll, top) in zip(windows, evaluate.token_scores(model, windows)):
        alone, top_alone = evaluate.token_scores(model, [one])[0]
        np.testing.assert_allclose(nll, alone, rtol=1e-5)
        assert (top == top_alone).all()


@pytest.mark.parametrize("right, n, low, high", [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)])
def test_intervals_are_wilsons(right, n, low, high):                        # 81 of 263: Newcombe 1998, table I
    assert evaluate.wilson(right, n) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_the_interval_over_documents_is_the_jackknifes(model, tok):         # another estimator of the same variance
    documents = [("x", TEXTS[i % 3][i:i + 30 + i]) for i in range(40)]
    row = evaluate.text_scores(model, tok, documents)[0]
    alone = [evaluate.text_scores(model, tok, [d])[0] for d in documents]
    bits, sizes = np.array([r["bits_per_byte"] * r["bytes"] for r in alone]), np.array([r["bytes"] for r in alone])
    left_out = (bits.sum() - bits) / (sizes.sum() - sizes)
    assert row["plus_minus"] == pytest.approx(2.02269 * math.sqrt(39 / 40 * ((left_out - left_out.mean()) ** 2).sum()), rel=0.03)    # t(39)


def test_two_documents_have_the_interval_of_one_degree_of_freedom(model, tok):
    """t(1) = 12.7062 as printed in tables; the normal's 1.96 would claim six times too much."""
    documents = [("x", TEXTS[0]), ("x", TEXTS[1])]
    bits = [r["bits_per_byte"] * r["bytes"] for r in (evaluate.text_scores(model, tok, [d])[0] for d in documents)]
    sizes = [len(text.encode()) for _, text in documents]
    ratio = sum(bits) / sum(sizes)
    error = math.sqrt(2 * sum((b - ratio * n) ** 2 for b, n in zip(bits, sizes))) / sum(sizes)
    assert evaluate.text_scores(model, tok, documents)[0]["plus_minus"] == pytest.approx(12.7062 * error, rel=1e-4)


def test_the_quantile_of_many_values_goes_over_into_the_normals():
    """1.95996 (1 + (z^2 + 1) / (4 df)): the first term of the expansion in 1 / df, Abramowitz & Stegun 26.7.5."""
    from engine.intervals import t_quantile
    for df in (1_000, 10_000, 10_001, 10**6):
        assert t_quantile(df) == pytest.approx(1.959964 * (1 + (1.959964**2 + 1) / (4 * df)), rel=2e-4)


@pytest.mark.parametrize("values", [[0, 1], [1, 1], [0.0] * 3, [0.25, 0.75], [3.0, 5.0, 4.0]])
def test_harness_means_get_wilsons_interval_for_shares_and_students_for_all_else(values):
    """The standard error is the harness' own (lm_eval.api.metrics.mean_stderr); t(1) = 12.7062, t(2) = 4.30265."""
    metrics = pytest.importorskip("lm_eval.api.metrics")
    n, score, stderr = len(values), float(np.mean(values)), metrics.mean_stderr(values)
    half = {2: 12.7062, 3: 4.30265}[n] * stderr
    want = evaluate.wilson(sum(values), n) if set(values) <= {0, 1} else (score - half, score + half)
    assert evaluate.harness_interval(score, stderr, n) == (pytest.approx(want[0], abs=1e-4), pytest.approx(want[1], abs=1e-4))
    assert evaluate.harness_interval(score, "N/A", n) is None and evaluate.harness_interval(score, 0.0, 1) is None


# -----------------------------------------------------------------------------
# tasks


def choice_logp(theirs, context, choice):
    with torch.no_grad():
        before, whole = theirs[1](context).input_ids, theirs[1](context + choice).input_ids
        logp = theirs[0](torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(logp[i - 1, whole[i]].item() for i in range(len(before), len(whole)))


def test_choices_are_ranked_by_transformers_log_likelihoods(model, tok, theirs):
    rows = [dict(question=f"What is {i} + 1?", choices=[str(i), str(i + 1), "many", "it depends"], answer=i % 4) for i in range(6)]
    norm = [max(range(4), key=lambda c: choice_logp(theirs, r["question"] + "\nAnswer:", " " + r["choices"][c]) / len(r["choices"][c])) for r in rows]
    total = [max(range(4), key=lambda c: choice_logp(theirs, r["question"] + "\nAnswer:", " " + r["choices"][c])) for r in rows]
    for i, r in enumerate(rows):
        r["answer"] = total[i] if i < 4 else (total[i] + 1) % 4               # four that the model gets right, two that it does not
    found = evaluate.choice_scores(model, tok, rows, "sums")
    assert found["score"] == 4 / 6 and found["n"] == 6 and found["chance"] == 0.25 and found["interval"] == evaluate.wilson(4, 6)
    assert found["score_norm"] == sum(a == r["answer"] for a, r in zip(norm, rows)) / 6


@pytest.mark.parametrize("answer, want", [(0, 0), (2, 2), ("a", 0), ("C", 2), ("B", 1), ("c3", 2), ("a1", 0)])
def test_an_answer_is_an_index_a_letter_or_the_choice(answer, want):
    assert evaluate.answer_of(dict(choices=["a1", "b2", "c3"], answer=answer), "here") == want
    assert evaluate.answer_of(dict(choices=["B", "A"], answer="A"), "here") == 1        # a choice goes before a letter


def test_chance_is_the_mean_over_questions_and_each_score_has_its_own_interval(model, tok, theirs):
    """Questions of 2 and of 4 choices: chance 3/8. Choices in several scripts: per byte is neither per character nor per token of bytes."""
    words = ["ja", "gewiss nicht", "οὐδέν", "да", "人", "yes, of course", "né", "x"]
    rows = [dict(question=f"Frage {i}", choices=[words[(i + j) % 8] for j in range(2 + 2 * (i % 2))], answer=0) for i in range(8)]
    logp = [[choice_logp(theirs, r["question"] + "\nAnswer:", " " + c) for c in r["choices"]] for r in rows]
    total = [max(range(len(row)), key=row.__getitem__) for row in logp]
    norm = [max(range(len(row)), key=lambda j: row[j] / len(r["choices"][j].encode())) for row, r in zip(logp, rows)]
    for i, r in enumerate(rows):
        r["answer"] = norm[i] if i < 5 else (norm[i] + 1) % len(r["choices"])
    right, right_norm = (sum(a == r["answer"] for a, r in zip(chosen, rows)) for chosen in (total, norm))
    assert right_norm == 5 != right
    found = evaluate.choice_scores(model, tok, rows, "words")
    assert found["chance"] == 0.375
    assert (found["score"], found["interval"]) == (right / 8, evaluate.wilson(right, 8))
    assert (found["score_norm"], found["interval_norm"]) == (right_norm / 8, evaluate.wilson(right_norm, 8))


def test_a_solved_example_has_the_right_choice(model, tok, monkeypatch):
    monkeypatch.setattr(evaluate, "shots", 2)
    rows = [dict(question="1 + 1?", choices=["3", "2"], answer="B"), dict(question="2 + 2? ", choices=["4", "5"], answer="4"),
            dict(question="3 + 3?", choices=["6", "7"], answer=0)]
    asked, pair = [], evaluate.pair
    monkeypatch.setattr(evaluate, "pair", lambda tok, context, choice, T: asked.append((context, choice)) or pair(tok, context, choice, T))
    found = evaluate.choice_scores(model, tok, rows, "x")
    assert found["n"] == 1 and found["interval"] == evaluate.wilson(int(found["score"]), 1)
    context = "1 + 1?\nAnswer: 2\n\n2 + 2?\nAnswer: 4\n\n3 + 3?\nAnswer:"
    assert asked == [(context, " 6"), (context, " 7")]


def test_shots_stand_solved_before_the_question_and_are_not_asked(model, tok, monkeypatch):
    monkeypatch.setattr(evaluate, "shots", 1)
    rows = [dict(question="1 + 1?", choices=["2", "3"], answer="A"), dict(question="2 + 2?", choices=["5", "4"], answer=1)]
    assert evaluate.with_shots(rows, lambda r: "2") == [(rows[1], "1 + 1?\nAnswer: 2\n\n2 + 2?\nAnswer:")]
    assert evaluate.choice_scores(model, tok, rows, "x")["n"] == 1
    monkeypatch.setattr(evaluate, "shots", 2)
    with pytest.raises(ValueError, match="leaves no question of 2"):
        evaluate.choice_scores(model, tok, rows, "x")


def test_exact_match_takes_the_first_line_of_the_greedy_answer(model, tok, theirs, monkeypatch):
    monkeypatch.setattr(evaluate, "max_new_tokens", 8)
    with torch.no_grad():
        ids = theirs[1]("Say it\nAnswer:", return_tensors="pt").input_ids
        new = theirs[0].generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1]:].tolist()
    said = theirs[1].decode(new[:new.index(tok.eos)] if tok.eos in new else new, skip_special_tokens=True).split("\n")[0].strip()
    rows = [dict(question="Say it", answer=["no", said or "?"]), dict(question="Say it", answer="something else")]
    assert evaluate.answer_scores(model, tok, rows, "x")["score"] == (0.5 if said else 0.0)


def greedy_by_hand(model, ids, n, eos):
    new = []
    for _ in range(n):
        with torch.no_grad():
            new.append(model(torch.tensor([[*ids, *new]]))[0][0, -1].argmax().item())
        if new[-1] == eos:
            break
    return new


def test_answers_are_the_greedy_tokens_up_to_the_first_stop(model, tok, monkeypatch):
    """Five contexts in batches of two; one is too long and loses its beginning, so that context and answer fit into the window."""
    monkeypatch.setattr(evaluate, "batch_tokens", 2 * 96)
    contexts = ["Say it", "Question: why?\nAnswer:", TEXTS[2][:200], "x", TEXTS[1][:50]]
    control, whole = {i for name, i in tok.special.items() if name not in tokenizer.IN_TEXT}, []
    for context in contexts:
        new = greedy_by_hand(model, [tok.bos, *tok.encode(context)][-(96 - 12):], 12, tok.eos)
        whole.append(tok.decode([i for i in new if i not in control]))
    assert len(set(whole)) > 3
    for stops in (["\n"], [whole[0][3], whole[1][2], whole[4][1]], [], [""]):
        texts = [text[:min((text.index(s) for s in stops if s and s in text), default=len(text))] for text in whole]
        assert evaluate.continue_texts(model, tok, contexts, stops, 12) == texts


class Sayer(Apertus):
    """Says what it was told to, after any prompt."""

    def generate(self, prompts, n, temperature, stop):
        ids = [*self.said[:n]]
        return [[*prompt, *ids[:next((i + 1 for i, x in enumerate(ids) if x in stop), len(ids))]] for prompt in prompts]


@pytest.fixture
def sayer(model, tok, monkeypatch):
    """sayer(text, ...): a model that says these texts and ids."""
    monkeypatch.setattr(evaluate, "generate", lambda model, *args, **how: model.generate(*args, **how))

    def make(*parts):
        one = Sayer(model.config)
        one.said = sum((tok.encode(part) if isinstance(part, str) else [part] for part in parts), [])
        return one
    return make


def test_exact_match_accepts_any_of_the_answers_and_nothing_else(sayer, tok, monkeypatch):
    rows = [dict(question="?", answer=answer) for answer in (["no", 42], 42, "42", " 42 ", "4", "42 and more", ["a", "b"])]
    found = evaluate.answer_scores(sayer(" 42 \n43"), tok, rows, "sums")
    assert (found["score"], found["n"], found["chance"]) == (4 / 7, 7, 0.0) and found["interval"] == evaluate.wilson(4, 7)
    monkeypatch.setattr(evaluate, "shots", 5)
    assert evaluate.answer_scores(sayer("a"), tok, rows, "sums")["score"] == 0.5
    with pytest.raises(ValueError, match="leaves no room for a question"):
        evaluate.continue_texts(sayer("a"), tok, ["?"], [], 95)


def test_what_comes_after_the_end_and_control_tokens_are_no_words(sayer, tok):
    control = tok.special["<|assistant_start|>"]
    said = evaluate.continue_texts(sayer("a", control, "b", tok.eos, "c"), tok, ["?"], [], 20)
    assert said == ["ab"]


@pytest.mark.parametrize("answer", [None, 4, -1, "E", "no choice", True, [0]])
def test_a_task_without_a_valid_answer_is_told(model, tok, answer):
    with pytest.raises(ValueError, match="quiz, question 2: no valid answer"):
        evaluate.choice_scores(model, tok, [dict(question="?", choices=["a", "b"], answer=0), dict(question="?", choices=["a", "b", "c", "d"], answer=answer)], "quiz")


@pytest.mark.parametrize("answer", [None, "", [], {"a": 1}])
def test_a_generation_task_without_an_answer_is_told(model, tok, answer):
    with pytest.raises(ValueError, match="question 1: no valid answer"):
        evaluate.answer_scores(model, tok, [dict(question="?", answer=answer)], "sums")


@pytest.mark.parametrize("choice, says", [("", "adds no token"), ("x" * 97, "97 tokens, more than the model's window of 96")])
def test_a_choice_that_cannot_be_scored_whole_is_told(tok, choice, says):
    with pytest.raises(ValueError, match=says):
        evaluate.pair(tok, "?", choice, 96)


# -----------------------------------------------------------------------------
# the script


def test_one_command_gives_table_json_and_bars(exported, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(dict(text=t, lang=lang)) + "\n" for t, lang in zip(TEXTS * 2, ("en", "fr", "de") * 2)))
    (tmp_path / "quiz.jsonl").write_text(json.dumps(dict(question="1 + 1?", choices=["2", "3"], answer="2")) + "\n")
    done = script("evaluate.py", tmp_path / "texts.jsonl", tmp_path / "quiz.jsonl", f"--init_from={exported}", f"--out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    found = json.load(open(tmp_path / "out" / "evaluation.json"))
    assert [r["group"] for r in found["texts"]] == ["all", "de", "en", "fr"] and found["tasks"][0]["n"] == 1
    assert "| fr | 2 |" in done.stdout and "chance" in done.stdout and os.path.getsize(tmp_path / "out" / "evaluation.png") > 5000


def test_a_runs_own_validation_gives_the_bits_per_byte_of_its_text(tmp_path):
    assert script("prepare.py", os.path.join(ROOT, "s*", "*.py"), f"--out={tmp_path / 'own'}", "--tokenizer=byte", "--val_share=0.5").returncode == 0
    assert sum(s["val"]["documents"] for s in json.load(open(tmp_path / "own" / "meta.json"))["sources"].values()) > 1
    done = script("train.py", "configs/tiny.py", f"--data={tmp_path / 'own'}", f"--out={tmp_path / 'run'}", "--total_samples=16", "--decay_samples=0", "--checkpoint_every=2", "--dtype=float32")
    assert done.returncode == 0, done.stderr
    done = script("evaluate.py", f"--init_from={tmp_path / 'run'}", "--limit=1")
    assert done.returncode == 0, done.stderr
    found = json.load(open(tmp_path / "run" / "evaluation.json"))["texts"]
    assert found[0]["documents"] == 1 and 5 < found[0]["bits_per_byte"] < 9    # two steps in: log2(320) = 8.3


def test_validation_documents_are_those_of_every_source_each_once(tmp_path, tok):
    """Three sources of different sizes; what is read back is held against the texts that went in."""
    texts = {}
    for source, n in (("one", 7), ("two", 19), ("three", 4)):
        rows = [dict(source=source, text=f"{source} {i}: " + f"Würde {i * 37} " * (i % 5 + 1)) for i in range(n)]
        (tmp_path / f"{source}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        texts |= {row["text"].strip(): source for row in rows}
    done = script("prepare.py", *(tmp_path / f"{name}.jsonl" for name in ("one", "two", "three")), f"--out={tmp_path / 'own'}",
                  "--tokenizer=apertus:400", "--val_share=0.5", "--source_by=source")
    assert done.returncode == 0, done.stderr
    meta = json.load(open(tmp_path / "own" / "meta.json"))
    assert len(meta["sources"]) == 3
    for vocabulary in ("apertus:400", "byte"):                              # the model's own; and another, to whose ids the text is translated
        found = list(evaluate.validation_documents(str(tmp_path / "own"), tokenizer.load(vocabulary)))
        assert len(set(found)) == len(found) == sum(s["val"]["documents"] for s in meta["sources"].values())
        for source, text in found:
            assert texts[text.strip()] == source
        assert len({source for source, _ in found}) == 3


def test_limit_and_groups_of_the_command(exported, tmp_path):
    rows = [dict(text=t, lang=lang, source=str(i)) for i, (t, lang) in enumerate(zip([*TEXTS, " ", "Ende"], ("en", "fr", "de", "de", "de")))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps(dict(text=TEXTS[0])) + "\n")
    (tmp_path / "book.txt").write_text(TEXTS[1])

    def groups(*args):
        files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "book.txt")]
        done = script("evaluate.py", *files, f"--init_from={exported}", f"--out={tmp_path / 'out'}", *args)
        assert done.returncode == 0, done.stderr
        return {r["group"]: r["documents"] for r in json.load(open(tmp_path / "out" / "evaluation.json"))["texts"]}

    assert groups() == {"all": 6, "en": 1, "fr": 1, "de": 2, "b.jsonl": 1, "book.txt": 1}              # a blank text is none
    assert groups("--by=source", "--limit=2") == {"all": 4, "0": 1, "1": 1, "b.jsonl": 1, "book.txt": 1}


def test_the_table_says_what_was_measured():
    """Numbers by hand."""
    text = dict(group="de", documents=1234, bytes=9000, tokens=3000, bits_per_byte=1.25, plus_minus=0.5)
    quiz = dict(task="quiz", kind="choice", n=8, shots=2, score=0.5, interval=(0.25, 0.75), score_norm=0.375, interval_norm=(0.125, 0.625), chance=0.25)
    sums = dict(task="sums", kind="exact match", n=9, shots=0, score=0.125, interval=(0.0, 0.5), chance=0.0)
    bleu = dict(task="wmt", kind="harness", n=7, shots=1, metric="bleu,none", score=31.5, stderr=1.0, interval=(29.0, 34.0))
    alone = dict(bleu, metric="ter,none", stderr="N/A", interval=None)
    lines = evaluate.table_md(dict(model="out/x", texts=[text], tasks=[quiz, sums, bleu, alone])).splitlines()
    assert lines == [
        "# out/x", "", "| text | documents | bytes | bytes/token | bits/byte (95 %) |", "|---|---|---|---|---|", "| de | 1,234 | 9,000 | 3.00 | 1.250 ± 0.500 |", "",
        "| task | n | shots | score (95 %) | per byte | chance |", "|---|---|---|---|---|---|",
        "| quiz (choice) | 8 | 2 | 0.500 (0.250 to 0.750) | 0.375 (0.125 to 0.625) | 0.250 |",
        "| sums (exact match) | 9 | 0 | 0.125 (0.000 to 0.500) |  | 0.000 |",
        "| wmt (bleu,none) | 7 | 1 | 31.500 (29.000 to 34.000) | | |", "| wmt (ter,none) | 7 | 1 | 31.500  | | |"]


@pytest.mark.parametrize("content, says", [("{}", "line 1: want a JSON object with \"text\", or"),
                                           ('{"text": "a"}\nno json', "line 2: want a JSON object"), ("", "is empty")])
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


def test_the_harness_gives_our_model_and_the_exported_one_the_same_numbers(model, tok, exported, theirs, tmp_path, monkeypatch):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ours = evaluate.harness_model(model, tok)

    def ask(kind, pairs, **how):
        published = huggingface.HFLM(pretrained=theirs[0], tokenizer=theirs[1], batch_size=4, device="cpu", max_length=96, **how)
        requests = [Instance(request_type=kind, doc={}, arguments=p, idx=0) for p in pairs]
        return getattr(ours, kind)(requests), getattr(published, kind)(requests)

    pairs = [("Question: why?\nAnswer:", " because"), ("", "no context"), ("x" * 200, " cut"), ("x" * 200 + " \n", "cut"), ("a", "b")]
    pairs += [("why?" + end, "because") for end in (" ", "\n", "\t", " \n\t ", "\n\n", "\u00a0", "\x0b", "\u3000")]       # whitespace of all kinds
    pairs += [(" ", "all of it"), ("\n\n", "all of it"), ("x", "y" * 96), ("why?", " a"), ("why?", " a")]
    for ask_for, (mine, mine_greedy), (want, want_greedy) in zip(pairs, *ask("loglikelihood", pairs)):
        assert mine == pytest.approx(want, rel=1e-5) and mine_greedy == want_greedy, ask_for
    for mine, want in zip(*ask("loglikelihood_rolling", [(t,) for t in TEXTS], add_bos_token=False)):      # it would put a second <s> in front
        assert mine == pytest.approx(want, rel=1e-5)
    how = dict(until=["zz"])                                                # without a length: what fits into half of the window
    (mine,) = ours.generate_until([Instance(request_type="generate_until", doc={}, arguments=(TEXTS[0], how), idx=0)])
    assert mine == evaluate.continue_texts(model, tok, [TEXTS[0]], ["zz"], 48)[0]
    with pytest.raises(ValueError, match="decodes greedily"):
        how = dict(do_sample=True, temperature=0.7)
        ours.generate_until([Instance(request_type="generate_until", doc={}, arguments=("a", how), idx=0)])
    ways = [dict(until=["\n"], max_gen_toks=12, do_sample=False), dict(until="e", max_new_tokens=9), dict(until=["zz", "a", "e"], max_tokens=20)]
    for how in ways:
        mine, want = ask("generate_until", [(t[:40], how) for t in TEXTS])
        assert mine == want


def test_the_harness_runs_a_local_task_file(model, tok, exported, theirs, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["ja", "gewiss nicht", "οὐδέν ἐστι", "да", "人", "yes, of course", "né"]
    rows = [dict(question=f"What is {i} + 1?", choices=[words[(i + j) % 7] for j in (0, 1, 3)], answer=i % 3) for i in range(12)]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "own_quiz.yaml").write_text(TASK.format(file=tmp_path / "quiz.jsonl"))
    ours = evaluate.choice_scores(model, tok, rows, "quiz")
    done = script("evaluate.py", f"--init_from={exported}", "--harness=own_quiz", f"--harness_path={tmp_path}", f"--out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    mine = {r["metric"]: r["score"] for r in json.load(open(tmp_path / "out" / "evaluation.json"))["tasks"]}
    from lm_eval.tasks import TaskManager
    want = lm_eval.simple_evaluate(huggingface.HFLM(pretrained=theirs[0], tokenizer=theirs[1], batch_size=4, device="cpu", max_length=96), tasks=["own_quiz"],
                                   task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False))["results"]["own_quiz"]
    assert mine == {k: want[k] for k in ("acc,none", "acc_norm,none", "acc_bytes,none")}
    assert (ours["score"], ours["score_norm"]) == (want["acc,none"], want["acc_bytes,none"])         # our own scores of the same rows


def test_a_group_of_harness_tasks_is_reported_beside_its_tasks(model, tok, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [dict(question=f"What is {i} + 1?", choices=[str(i), str(i + 1), "many"], answer=i % 3) for i in range(6)]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for name in ("own_quiz", "other_quiz"):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(file=tmp_path / "quiz.jsonl").replace("own_quiz", name))
    (tmp_path / "both.yaml").write_text("group: both\ntask:\n  - own_quiz\n  - other_quiz\n"
                                        "aggregate_metric_list:\n  - metric: acc\n    weight_by_size: true\n")
    monkeypatch.setattr(evaluate, "harness", "both")
    monkeypatch.setattr(evaluate, "harness_path", str(tmp_path))
    monkeypatch.setattr(evaluate, "limit", 4)
    monkeypatch.setattr(evaluate, "shots", 1)
    found = {(r["task"], r["metric"]): r for r in evaluate.run_harness(model, tok)}
    assert found["both", "acc,none"]["shots"] == 1                          # as --shots asks
    assert found["both", "acc,none"]["n"] == 8 and found["own_quiz", "acc,none"]["n"] == 4
    assert found["both", "acc,none"]["score"] == found["own_quiz", "acc,none"]["score"]
    assert "| both (acc,none) | 8 |" in evaluate.table_md(dict(model="m", texts=[], tasks=list(found.values())))


def test_an_unknown_harness_task_is_told(exported, tmp_path):
    pytest.importorskip("lm_eval")
    done = script("evaluate.py", f"--init_from={exported}", "--harness=no_such_task", f"--harness_path={tmp_path}", f"--out={tmp_path}")
    assert done.returncode == 2 and "no task 'no_such_task'" in done.stderr
