"""evaluate.py: log-likelihoods token by token, intervals by closed forms, choices against lm-evaluation-harness."""

import json
import math
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import ROOT
from lab import run
from pytest import approx
from scipy import stats
from tiny import small, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import convert
import evaluate
import scoring
import tokenizer
from engine.files import read_json
from studies.kit import read_rows

TOK = tokenizer.load("byte")
TASKS = f"{ROOT}/tests/golden/tasks"
TEXTS = [row["text"] for row in read_rows(f"{TASKS}/texts.jsonl")]


def evaluated(folder, *args):
    """Run evaluate.py with --out=FOLDER/out. Returns its output and the rows of evaluation.json, which has no NaN."""
    done = run("evaluate.py", *args, f"--out={folder / 'out'}")
    found = json.loads((folder / "out" / "evaluation.json").read_text(), parse_constant=pytest.fail)
    return done.stdout, found["rows"]


def test_results_of_the_same_inputs_are_replaced_and_others_are_kept(lab, tmp_path):
    """Each other option, model or text gives evaluation.json, and the older one a number."""
    texts = f"{TASKS}/texts.jsonl"
    calls = [
        [texts],
        [texts, "--base=int8"],
        [texts, "--base=nf4"],
        [texts, "--dtype=bfloat16"],
        [texts, "--limit=2"],
        [texts, f"--against={lab}/sft"],
        [f"{TASKS}/quiz.jsonl"],
        [f"{TASKS}/quiz.jsonl", "--template={question}{choice}"],
        [texts],
    ]
    for n, call in enumerate(calls):
        for again in range(2):
            said, _ = evaluated(tmp_path, *call, f"--init_from={lab}/hf")
            assert ("kept the results of other texts or options as" in said) == (n > 0 and not again), call
    assert len(list((tmp_path / "out").glob("evaluation-*.json"))) == len(calls) - 1
    assert read_json(tmp_path / "out" / "evaluation-2.json")["base"] == "int8"


def window_of(i, T):
    """Windows begin at multiples of half a window: the begin of the first from which at most T tokens reach token i."""
    stride = T - T // 2
    return stride * max(0, math.ceil((i - T) / stride))


@torch.no_grad()
def bits_by_hand(model, ids):
    """The sum of -log2 p over ids[1:], with one call of the model per token."""
    bits = 0
    for i in range(1, len(ids)):
        logits = model(torch.tensor([ids[window_of(i, model.config.block_size) : i]]))
        bits -= logits[0, -1].log_softmax(-1)[ids[i]].item() / math.log(2)
    return bits


def test_texts_of_all_lengths_are_scored_as_the_model_called_token_by_token(monkeypatch):
    """
    In fp64. Sizes of batches, windows and documents do not divide each other. A text ends in </s>, even if the model's
    own end token is <|assistant_end|>.
    """
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 31)
    monkeypatch.setattr(TOK, "eos", TOK.id_of("<|assistant_end|>"))
    narrow = small(vocab_size=320, block_size=12).double().eval()
    texts = [TEXTS[2][:n] for n in (1, 5, 37, 10, 9, 22, 24, 11, 2)]
    bits = np.array([bits_by_hand(narrow, [TOK.bos, *TOK.encode(text), TOK.id_of("</s>")]) for text in texts])
    sizes = np.array([len(text.encode()) for text in texts])
    documents = list(zip("xyz" * 3, texts))
    rows = evaluate.text_rows(documents, [evaluate.document_bits(narrow, TOK, documents)], "")
    parts = slice(None), *(slice(i, None, 3) for i in range(3))
    for row, name, part in zip(rows, ("all", *"xyz"), parts, strict=True):
        assert (row["name"], row["n"], row["bytes"]) == (name, len(bits[part]), sizes[part].sum())
        assert row["score"] == approx(bits[part].sum() / sizes[part].sum(), rel=1e-5)


def test_the_interval_over_documents_is_the_jackknifes():
    """The jackknife is another estimator of the same variance; t(39) = 2.02269."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 80, 40)
    bits = 2.0 * sizes + rng.normal(0, 9, 40)
    row = scoring.bits_row("x", "bits/byte", bits, sizes)
    left_out = (bits.sum() - bits) / (sizes.sum() - sizes)
    half = 2.02269 * math.sqrt(39 * left_out.var())
    assert row["high"] - row["score"] == approx(half, rel=2e-3)
    assert row["score"] - row["low"] == approx(half, rel=2e-3)


# -----------------------------------------------------------------------------
# multiple choice


def quiz(question, choices, answer):
    return dict(question=question, choices=choices, answer=answer)


def test_an_answer_is_a_letter_a_choice_or_an_index_and_chance_the_mean_over_questions():
    """The difference to another model is paired by question."""
    rows = quiz("1 + 1? ", ["3", "2"], "b"), quiz("2 + 2?", ["5", "4"], "4"), quiz("3?", list("6789"), 0)
    questions = [evaluate.read_question(row, "") for row in rows]
    assert [right for *_, right in questions] == ["2", "4", "6"]
    hits, baseline = np.array([[1, 1, 0], [1, 0, 0]]), np.array([[0, 1, 0], [1, 1, 0]])
    rows = list(evaluate.choice_rows("x", questions, [hits, baseline], "other"))
    for measure in range(2):
        share, difference = rows[2 * measure : 2 * measure + 2]
        right = int(hits[measure].sum())
        found = [share[key] for key in ("n", "score", "chance", "low", "high")]
        assert found == [3, right / 3, approx(5 / 12), *evaluate.wilson(right, 3)]
        low, high = stats.ttest_rel(hits[measure], baseline[measure]).confidence_interval()
        assert (difference["low"], difference["high"]) == approx((low, high), rel=1e-5)


@pytest.mark.parametrize(
    "choices, answer, right",
    [
        ([3, 2], 1, "2"),
        ([3, 2], 3, "3"),
        ([3, 2], "B", "2"),
        ([0, 1], 1, "1"),
        (["1", "0"], "1", "1"),
        (["1", "0"], 1, "0"),
        ([2, 1], 1, "1"),
        ([1, 2], 1, None),
        ([True, False], 1, None),
    ],
)
def test_a_number_is_an_index_as_for_lm_eval_and_refused_if_it_is_another_choice_too(choices, answer, right):
    if right:
        assert evaluate.read_question(quiz("?", choices, answer), "")[1:] == (list(map(str, choices)), right)
    else:
        with pytest.raises(ValueError, match="row 3: the answer 1 is a choice, and the index of another, .*letter"):
            evaluate.read_question(quiz("?", choices, answer), "row 3")


def test_a_long_question_loses_its_beginning():
    """Bytes are tokens, so we know which ones stay: the last before the choice."""
    context = "".join(map(chr, range(40, 120))) * 2
    assert evaluate.encode_pair(TOK, context, " ab", 96) == (TOK.encode(context[-94:] + " ab"), 94)
    assert evaluate.encode_pair(TOK, "?", " ab", 4) == ([TOK.bos, *TOK.encode("? ab")], 2)


# -----------------------------------------------------------------------------
# the script


def test_one_command_gives_a_table_and_json(lab, tmp_path):
    texts = tmp_path / "texts.jsonl"
    lines = zip([*TEXTS[:4], "\ud800", " "], ("en", "fr", "fr", "de", "en", "it"))
    write_rows(texts, [*(dict(text=text, lang=lang) for text, lang in lines), quiz("1 + 1?", ["2", "3"], "2")])
    table, rows = evaluated(tmp_path, texts, f"--init_from={lab}/hf")
    counts = dict(all=5, de=1, en=2, fr=2)
    assert [(row["name"], row["n"]) for row in rows] == [*counts.items(), *[("texts.jsonl", 1)] * 2]
    # One document has no interval.
    assert f"| de | bits/byte | 1 | {len(TEXTS[3].encode())} | {rows[1]['score']:.3f} |  |  |  |" in table
    for _ in range(2):
        table, few = evaluated(tmp_path, texts, f"--init_from={lab}/hf", "--limit=2", "--by=source")
    assert [(row["name"], row["n"]) for row in few] == [("all", 2), ("texts.jsonl", 2)]
    # The table does not repeat the only group; results of other options are kept, those of the same are replaced.
    assert "| texts.jsonl |" in table and "| all |" not in table
    [older] = (tmp_path / "out").glob("evaluation-*.json")
    assert read_json(older)["rows"] == rows


@torch.no_grad()
def costs_by_transformers(folder, chats):
    """The nats of the tokens that the assistant says in conversations, a list for each, with one call per token."""
    model, tok = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    nats = []
    for messages in chats:
        encoded = tok.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        # The published template leaves the last turn open.
        ids = [*encoded["input_ids"], tok.convert_tokens_to_ids("<|assistant_end|>")]
        nats.append([])
        for i, is_learnt in enumerate([*encoded["assistant_masks"], 1]):
            if is_learnt:
                begin = window_of(i, 256)
                logits = model(torch.tensor([ids[begin:i]])).logits[0, -1]
                nats[-1].append(-logits.log_softmax(-1)[ids[i]].item())
    return nats


def test_the_loss_of_conversations_is_that_of_transformers_over_what_the_assistant_says(lab, tmp_path):
    """
    Also of a conversation longer than the window of 256, in windows that overlap by half. A prompt without an answer is
    left out and counted.
    """
    system, question = dict(role="system", content="x"), dict(role="user", content="say it")
    answers = [dict(role="assistant", content=text) for text in ("aé", "bbb", "a" * 200)]
    chats = [[system, question, answers[0], question, answers[1]], [system, question, answers[2]]]
    write_rows(tmp_path / "chats.jsonl", [dict(messages=messages) for messages in ([system, question], *chats)])
    said, rows = evaluated(tmp_path, tmp_path / "chats.jsonl", f"--init_from={lab}/sft", f"--against={lab}/hf")
    assert "left out 1 of 3 conversations: 1 no assistant turn (first in row 1)" in said
    ours, others = (costs_by_transformers(f"{lab}/{name}", chats) for name in ("sft", "hf"))
    n, n_bytes = sum(map(len, ours)), 3 + 3 + 200
    nats, other_nats = (sum(map(sum, costs)) for costs in (ours, others))
    bits = nats / math.log(2) / n_bytes
    wanted = dict(loss=nats / n, bits=bits, difference=bits - other_nats / math.log(2) / n_bytes)
    assert [row["score"] for row in rows] == approx([*wanted.values()], rel=1e-4)
    metrics = ["loss", "bits/byte", f"bits/byte above {lab}/hf"]
    assert [(row["metric"], row["n"]) for row in rows] == [(metric, 2) for metric in metrics]
    assert rows[0]["tokens"] == n and rows[1]["bytes"] == n_bytes


def test_a_conversation_beside_a_text_is_counted_since_the_text_is_scored(lab, tmp_path):
    write_rows(
        tmp_path / "rows.jsonl",
        [dict(text="a", prompt="b", completion="c"), dict(text="d", messages=[]), dict(text="e")],
    )
    printed, rows = evaluated(tmp_path, tmp_path / "rows.jsonl", f"--init_from={lab}/hf")
    assert f"{tmp_path}/rows.jsonl: 2 of 3 rows have a text and a conversation: the text is scored\n" in printed
    assert {(row["metric"], row["n"]) for row in rows} == {("bits/byte", 3)}


def test_a_file_that_a_model_was_fine_tuned_on_is_said(lab, tmp_path):
    shutil.copy(lab / "chats.jsonl", tmp_path)
    for file, says in {lab / "chats.jsonl": True, tmp_path / "chats.jsonl": False}.items():
        printed, _ = evaluated(tmp_path, file, f"--init_from={lab}/hf", f"--against={lab}/sft", "--limit=1")
        assert (f"{file}: {lab}/sft was fine-tuned on it\n" in printed) == says
        assert f"{lab}/hf was" not in printed


def test_rewards_are_means_of_four_answers_of_each_model(lab, tmp_path):
    """A call of the reward sees ours, then the other's. A model against itself has the same answers."""
    (tmp_path / "r.py").write_text("def rewards(row, completions): return range(8)")
    how = f"{lab}/prompts.jsonl", f"--init_from={lab}/sft", f"--against={lab}/sft"
    _, rows = evaluated(tmp_path, *how, f"--rewards={tmp_path}/r.py")
    assert [(row["metric"], row["n"], row["score"]) for row in rows] == [
        ("reward", 6, 1.5),
        (f"reward above {lab}/sft", 6, -4),
    ]
    _, rows = evaluated(tmp_path, *how, f"--rewards={lab}/reward.py:one")
    assert rows[0]["score"] > 1 and rows[1]["score"] == 0
    _, [row] = evaluated(tmp_path, *how, "--against=", f"--rewards={lab}/reward.py:one", "--limit=4")
    assert row["n"] == 4 and row["low"] < row["score"] < row["high"]


def test_rows_against_another_model_are_the_differences_of_the_scores(lab, tmp_path):
    files = f"{TASKS}/texts.jsonl", f"{TASKS}/quiz.jsonl"
    ours, others = (evaluated(tmp_path, *files, f"--init_from={lab}/{name}")[1] for name in ("sft", "pretrained"))
    _, rows = evaluated(tmp_path, *files, f"--init_from={lab}/sft", f"--against={lab}/pretrained")
    assert rows[::2] == ours
    for row, one, other in zip(rows[1::2], ours, others, strict=True):
        assert (row["name"], row["metric"]) == (one["name"], f"{one['metric']} above {lab}/pretrained")
        assert row["score"] == approx(one["score"] - other["score"])


def test_validation_documents_are_those_of_every_source_each_once(lab, tmp_path, monkeypatch):
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
        for source, splits in scoring.TokenDataset(data, "val", 1).meta["sources"].items()
    }
    # The model has another vocabulary, so the text is tokenized again.
    found = scoring.validation_documents(data)
    assert len({*found}) == len(found)
    assert all(texts[text] == source for source, text in found)
    assert Counter(source for source, _ in found) == counts
    _, rows = evaluated(tmp_path, data, f"--init_from={lab}/hf", "--limit=9")
    assert rows[0]["n"] == 9
    # A run that was trained on two folders.
    monkeypatch.setattr(evaluate, "settings_of", lambda run: dict(data=f"{data},{lab}/data"))
    documents, *_ = evaluate.own_data("run", True, "lang", 0)
    assert documents == found + scoring.validation_documents(lab / "data")


def test_lm_eval_reads_a_run_folder_and_agrees(lab, tmp_path, monkeypatch):
    """
    It is the authority for the same choices, and for bits per byte of the same tokens: BOS is not scored, the end of a
    text is left out.
    """
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    folder = f"{lab}/pretrained"

    def theirs(task, **how):
        tasks = TaskManager(include_path=TASKS, include_defaults=False)
        model = dict(pretrained=folder, **how)
        found = lm_eval.simple_evaluate("hf", model, tasks=[task], task_manager=tasks, device="cpu")
        return found["results"][task], found["samples"][task]

    model, tok = convert.load_any(folder)
    for task, how in ("own_quiz", ()), ("own_continuation", ["--template={question} {choice}"]):
        _, ours = evaluated(tmp_path, f"{TASKS}/quiz.jsonl", f"--init_from={folder}", *how)
        template = read_json(tmp_path / "out" / "evaluation.json")["template"]
        scores, samples = theirs(task)
        assert [row["score"] for row in ours] == approx([scores["acc,none"], scores["acc_bytes,none"]])
        logp = [logp for sample in samples for logp, _ in sample["filtered_resps"]]
        pairs = [
            evaluate.encode_pair(tok, *evaluate.fill_template(template, sample["doc"]["question"], choice), 256)
            for sample in samples
            for choice in sample["doc"]["choices"]
        ]
        assert [-nats.sum() for nats in scoring.token_nats(model, pairs)] == approx(logp, rel=1e-5)

    nats = scoring.token_nats(model, [(scoring.text_ids(tok, text)[:-1], 1) for text in TEXTS])
    bits = sum(map(sum, nats)) / math.log(2)
    found, _ = theirs("own_texts", add_bos_token=False)
    assert found["bits_per_byte,none"] == approx(bits / len("".join(TEXTS).encode()), abs=1e-4)
