"""evaluate.py: log-likelihoods token by token, intervals by closed forms, choices against lm-evaluation-harness."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from lab import run
from tiny import small, write_rows

import evaluate
import tokenizer

TOK = tokenizer.load("byte")
TEXTS = [
    "All human beings are born free and equal in dignity and rights.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "Alle Menschen sind frei und an Würde und Rechten gleich geboren. " * 4,
]


def evaluated(folder, *args):
    """Run evaluate.py with --out=FOLDER/out. Returns its output and the rows of evaluation.json, which has no NaN."""
    done = run("evaluate.py", *args, f"--out={folder / 'out'}")
    found = json.loads((folder / "out" / "evaluation.json").read_text(), parse_constant=pytest.fail)
    return done.stdout, found["rows"]


@pytest.fixture(scope="module")
def model():
    return small(vocab_size=320, block_size=96)


@torch.no_grad()
def bits_by_hand(model, ids):
    """The sum of -log2 p over ids[1:], with one call of the model per token."""
    T = model.config.block_size
    stride = T - T // 2
    bits = 0
    for i in range(1, len(ids)):
        # Windows begin at multiples of half a window: take the first from which at most T tokens reach token i.
        begin = stride * max(0, math.ceil((i - T) / stride))
        logits = model(torch.tensor([ids[begin:i]]))
        bits -= logits[0, -1].log_softmax(-1)[ids[i]].item() / math.log(2)
    return bits


def test_texts_of_all_lengths_are_scored_as_the_model_called_token_by_token(monkeypatch):
    """
    In fp64. Sizes of batches, windows and documents do not divide each other. A text ends in </s>, even if the model's
    own end token is <|assistant_end|>.
    """
    monkeypatch.setattr(evaluate, "batch_tokens", 31)
    monkeypatch.setattr(TOK, "eos", TOK.id_of("<|assistant_end|>"))
    narrow = small(vocab_size=320, block_size=12).double().eval()
    texts = [TEXTS[1][:n] for n in (1, 5, 37, 10, 9, 22, 24, 11, 2)]
    bits = np.array([bits_by_hand(narrow, [TOK.bos, *TOK.encode(text), TOK.id_of("</s>")]) for text in texts])
    sizes = np.array([len(text.encode()) for text in texts])
    rows = evaluate.text_scores(narrow, TOK, list(zip("xyz" * 3, texts)))
    parts = slice(None), *(slice(i, None, 3) for i in range(3))
    for row, name, part in zip(rows, ("all", *"xyz"), parts, strict=True):
        assert (row["name"], row["n"], row["bytes"]) == (name, len(bits[part]), sizes[part].sum())
        assert row["score"] == pytest.approx(bits[part].sum() / sizes[part].sum(), rel=1e-5)


def test_the_interval_over_documents_is_the_jackknifes():
    """The jackknife is another estimator of the same variance; t(39) = 2.02269."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 80, 40)
    bits = 2.0 * sizes + rng.normal(0, 9, 40)
    row = evaluate.bits_row("x", "bits/byte", bits, sizes)
    left_out = (bits.sum() - bits) / (sizes.sum() - sizes)
    half = 2.02269 * math.sqrt(39 * left_out.var())
    assert row["high"] - row["score"] == pytest.approx(half, rel=2e-3)
    assert row["score"] - row["low"] == pytest.approx(half, rel=2e-3)


# -----------------------------------------------------------------------------
# tasks


def quiz(question, choices, answer):
    return dict(question=question, choices=choices, answer=answer)


def test_chance_is_the_mean_over_questions_and_a_solved_example_has_the_right_choice(model, monkeypatch):
    """An answer is a letter, a choice or an index. After two examples two questions remain; the second is answered."""
    monkeypatch.setattr(evaluate, "shots", 2)
    rows = [
        quiz("1 + 1?", ["3", "2"], "b"),
        quiz("2 + 2? ", ["5", "4"], "4"),
        quiz("3?", ["6", "7"], 0),
        quiz("4?", list("abcd"), "D"),
    ]
    context = "1 + 1?\nAnswer: 2\n\n2 + 2?\nAnswer: 4\n\n"
    first, second = evaluate.questions_of(rows, "x")
    assert first == (f"{context}3?\nAnswer:", ["6"], ["6", "7"])
    assert second == (f"{context}4?\nAnswer:", ["d"], list("abcd"))
    for row in evaluate.choice_scores(model, TOK, rows, "x"):
        found = [row[key] for key in ("n", "shots", "chance", "low", "high")]
        assert found == [2, 2, 0.375, *evaluate.wilson(1, 2)]


@pytest.fixture
def say(monkeypatch):
    """say(ids): generate() returns these ids, to the first stop token, for any prompt; say.prompts: the prompts."""

    def say(ids):
        def generate(model, prompts, n, temperature, stop):
            say.prompts = prompts
            end = next((i for i, token in enumerate(ids[:n]) if token in stop), n)
            return [[*prompt, *ids[: end + 1]] for prompt in prompts]

        monkeypatch.setattr(evaluate, "generate", generate)

    return say


def test_exact_match_accepts_any_of_the_answers_and_nothing_else(model, say):
    """The answer ends with its first line or the end token, and control tokens do not belong to it."""
    answers = [["no", 42], 42, "42", " 42 ", "4", "42 and more", ["a", "b"]]
    rows = [dict(question="?", answer=answer) for answer in answers]
    say([TOK.id_of("<|user_start|>"), *TOK.encode(" 42 \n43"), TOK.eos, *TOK.encode("no")])
    (found,) = evaluate.answer_scores(model, TOK, rows, "sums")
    assert (found["score"], found["n"], found["chance"]) == (4 / 7, 7, 0.0)


def test_a_long_context_loses_its_beginning_in_choices_and_in_questions(model, say):
    """Bytes are tokens, so we know which ones stay: the last before the choice, or before the answer's room."""
    context = "".join(map(chr, range(40, 120))) * 2
    assert evaluate.pair(TOK, context, " ab", 96) == (TOK.encode(context[-94:] + " ab"), 94)
    assert evaluate.pair(TOK, "?", " ab", 4) == ([TOK.bos, *TOK.encode("? ab")], 2)
    say(TOK.encode("1"))
    evaluate.answer_scores(model, TOK, [dict(question=question, answer=1) for question in (context, "?")], "sums")
    assert say.prompts == [
        TOK.encode(f"{context}\nAnswer:")[evaluate.max_new_tokens - 96 :],
        [TOK.bos, *TOK.encode("?\nAnswer:")],
    ]


# -----------------------------------------------------------------------------
# the script


def test_one_command_gives_a_table_and_json(lab, tmp_path):
    texts, task = tmp_path / "texts.jsonl", tmp_path / "quiz.jsonl"
    write_rows(
        texts, [dict(text=t, lang=lang) for t, lang in zip([*TEXTS, "\ud800", " "], ("en", "fr", "de", "en", "it"))]
    )
    write_rows(task, [quiz("1 + 1?", ["2", "3"], "2"), dict(question="2 + 2?", answer=4)])
    table, rows = evaluated(tmp_path, texts, task, f"--init_from={lab}/hf")
    assert [(row["name"], row["n"]) for row in rows] == [
        ("all", 4),
        ("de", 1),
        ("en", 2),
        ("fr", 1),
        *[("quiz.jsonl", 1)] * 3,
    ]
    # One document has no interval.
    assert f"| de | bits/byte |  | 1 | {len(TEXTS[2].encode())} | {rows[1]['score']:.3f} |  |  |  |" in table
    how = "--limit=2 --by=source --window=64 --by_position=64 --lookup=1".split()
    _, rows = evaluated(tmp_path, texts, f"--init_from={lab}/hf", *how)
    names = "all", "texts.jsonl", "0 to 63", "32 tokens back", "48 tokens back"
    assert [(row["name"], row["n"]) for row in rows] == [*zip(names, (2, 2, 2, 1, 1))]


def test_validation_documents_are_those_of_every_source_each_once(lab, tmp_path):
    """
    Three sources of different sizes. The documents read back are the input texts, and --limit of them are scored.
    """
    sizes = dict(one=7, two=19, three=4)
    texts = {f"{name} {i}: " + "Würde " * i: name for name, n in sizes.items() for i in range(n)}
    write_rows(tmp_path / "x.jsonl", [dict(source=source, text=text) for text, source in texts.items()])
    data = str(tmp_path / "own")
    how = "--tokenizer=apertus:400", "--source_by=source", f"--out={data}", "--val_share=0.5"
    run("prepare.py", tmp_path / "x.jsonl", *how)
    counts = {
        source: splits["val"]["documents"]
        for source, splits in evaluate.TokenDataset(data, "val", 1).meta["sources"].items()
    }
    # The model has another vocabulary, so the text is tokenized again.
    found = evaluate.validation_documents(data)
    assert len({*found}) == len(found)
    assert all(texts[text] == source for source, text in found)
    assert Counter(source for source, _ in found) == counts
    _, rows = evaluated(tmp_path, data, f"--init_from={lab}/hf", "--limit=9")
    assert rows[0]["n"] == 9


def test_the_harness_runs_a_local_task_file(lab, tmp_path, monkeypatch):
    """The harness is the authority for our own scores of the same rows, by a model with adapters."""
    pytest.importorskip("lm_eval")
    from scipy import stats

    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    model = f"--init_from={lab}/adapted"
    harness = "--harness_path=tests/golden/quiz", "--harness=own_quiz"
    _, ours = evaluated(tmp_path, "tests/golden/quiz/quiz.jsonl", model)
    _, few = evaluated(tmp_path, model, *harness, "--shots=3", "--limit=20")
    assert [(row["n"], row["shots"]) for row in few] == [(20, 3)] * 3
    _, theirs = evaluated(tmp_path, model, *harness)
    theirs = {row["metric"]: row for row in theirs}
    for own, metric in zip(ours, ("acc,none", "acc_bytes,none"), strict=True):
        n, share = own["n"], own["score"]
        half = stats.t.ppf(0.975, n - 1) * (share * (1 - share) / (n - 1)) ** 0.5
        found = [theirs[metric][key] for key in ("n", "score", "low", "high")]
        assert found == pytest.approx([n, share, share - half, share + half])
