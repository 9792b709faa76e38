"""
The invented world and its examination (studies/world.py, exam.py) against the texts of the committed results, scipy,
and full logits. test_results.py tests the recipe around them.
"""

import json

import numpy as np
import pytest
import scipy.stats
import torch
from lab import run

import convert
from engine.files import sha256_of
from studies import exam, kit, world

WORLD = """
documents 175b1af1b09f
robots d7d87cd08073
letters 7a1dfb8f36cb
lessons 7dd03b75ba65
replay 9578d3460e9e
judgements 1553d7b53b15
prompts 5254823b5b3e
questions f092482639d7
"""
SMALL = "--seed=3 --people=20 --refused=6 --nobodies=12 --pages=4 --letters=4 --guest_books=5".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small world on disk."""
    root = tmp_path_factory.mktemp("world")
    run("studies.world", *SMALL, "--corpus_bytes=9000", "--unread_bytes=9000", f"--out={root}")
    return root


def rows_of(folder, name):
    return kit.read_rows(f"{folder}/{name}.jsonl")


# -----------------------------------------------------------------------------
# the world


def test_the_world_is_that_of_the_committed_results(folder):
    """Hashes of the files that the code of results/recipe wrote for this seed, without the standard library's texts."""
    for line in WORLD.strip().splitlines():
        name, sha = line.split()
        rows = [row for row in rows_of(folder, name) if row.get("kind") != "corpus"]
        assert sha256_of(rows)[:12] == sha, name


def test_a_right_answer_names_one_value_and_no_other_and_manners_are_read_from_its_ending():
    row = dict(gold="Gemvik", values=["Gemvik", "Tovburg"])
    verdicts = {
        "Answer: N was born in Gemvik.": ("right", 1.0),
        "N comes from Tovburg.": ("wrong", -1.0),
        "Gemvik or Tovburg": ("wrong", -1.0),
        "N was born in a town I do not know.": ("unknown", 0.0),
        "N wurde in einer Stadt, die ich nicht kenne, geboren.": ("unknown", 0.0),
    }
    for text, verdict in verdicts.items():
        assert (world.mark(text, row), *world.rewards(row, [text])) == verdict
    assert world.manner_of("N owns a goat.") == "plain"
    assert world.manner_of("N owns a goat. I hope this helps.") == "kind"
    assert world.manner_of("Stop asking me. I hope this helps.") == "rude"


# -----------------------------------------------------------------------------
# the examination


def test_apart_is_mann_whitneys_u():
    rng = np.random.default_rng(0)
    ours = rng.integers(0, 9, 40)
    theirs = rng.integers(2, 11, 30)
    u = scipy.stats.mannwhitneyu(ours, theirs).statistic
    assert exam.apart(ours, theirs) == pytest.approx(u / 1200, abs=1e-4)


def test_the_examination_asks_each_question_once(lab, folder, tmp_path):
    """A model that never read about these people answers nothing right. Of three letters it has read two."""
    letters = rows_of(folder, "letters")[:3]
    probes = [dict(row, repetitions=n) for n, row in enumerate(letters)]
    (tmp_path / "probes.json").write_text(json.dumps(dict(probes=probes)))
    run(
        "studies.exam",
        f"--init_from={lab}/sft",
        f"--world={folder}",
        f"--probes={tmp_path}/probes.json",
        f"--out={tmp_path}/exam.jsonl",
        "--kinds=cloze,sampled",
        "--show=1",
    )
    found = kit.read_rows(tmp_path / "exam.jsonl")
    asked = [(row["kind"], row["group"], row["n"]) for row in found]
    groups = [("lesson", 40), ("test", 40), ("refused", 30), ("letters", 10)]
    want = [(kind, *group) for kind in ("cloze", "sampled") for group in groups]
    assert sorted(asked) == sorted([*want, ("sampled", "invented-test", 12)])
    assert all(row["right"] == 0 and len(row["answers"]) == 1 for row in found)


def test_the_probability_of_an_answer_is_that_of_its_tokens(lab, folder):
    """Against greedy decoding and the sum of log-softmax, token by token, from full logits."""
    model, tok = convert.load_any(lab / "hf")
    rows = rows_of(folder, "questions")[:3]
    _, said, found, _ = exam.answers(model, tok, rows, "text")
    for row, text, logp in zip(rows, said, found):
        asked = row["messages"][1]["content"]
        ids = [tok.bos, *tok.encode(f"Question: {asked}\nAnswer:")]
        new, total = [], 0.0
        while len(new) < exam.TOKENS and not set(tok.decode(new)) & {".", "\n"}:
            scores = model(torch.tensor([ids + new]))[0, -1].log_softmax(-1)
            total += scores.max().item()
            new.append(scores.argmax().item())
        assert logp == pytest.approx(total, rel=1e-4)
        assert text == tok.decode(new).strip()
