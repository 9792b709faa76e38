"""studies/length.py: what is asked of a register is in it; the arms read as much; the page is that of the rows."""
import os
import random

import pytest

from conftest import ROOT
from studies import kit, length
from tokenizer import load


def colours_of(text):
    """{key: its colours, in order} of a register."""
    found = {}
    words = text.split()
    for key, colour in zip(words[::2], words[1::2]):
        found.setdefault(key, []).append(colour)
    return found


@pytest.mark.parametrize("size", length.SIZES)
def test_in_a_register_each_key_has_one_colour_and_another_in_another_text(size):
    rng = random.Random(3)
    texts = [colours_of(length.register(rng, size)) for _ in range(40)]
    assert all(len(set(colours)) == 1 for text in texts for colours in text.values())
    assert all(sum(map(len, text.values())) == 8 * size and len(text) <= size for text in texts)
    assert max(map(len, texts)) == size and len(set(length.KEYS)) == 64
    assert {key for text in texts for key in text} == set(length.KEYS) or size < 16
    assert len({colours[0] for text in texts for colours in text.values()}) == len(length.COLOURS)


@pytest.mark.parametrize("distance", [32, 100, 1008])
def test_a_key_is_asked_for_as_many_tokens_behind_its_colour_as_is_said_and_stands_there_alone(distance):
    tok = load("byte")
    rng = random.Random(distance)
    for _ in range(5):
        ids, colour = length.question(rng, tok, distance)
        text = tok.decode(ids[1:])
        key = text.split()[-1]
        assert text.count(f" {key}") == 2 and text.startswith(f" {key} {colour} ")
        asked = len(tok.encode(f" {key}"))
        assert 0 <= len(ids) - 1 - asked - distance < len(" kova yellow")


def answering(tok, answer):
    """What generate() would return if a model gave answer(text of the prompt)."""
    def generate(model, prompts, new, temperature):
        return [[*ids, *tok.encode(f" {answer(tok.decode(ids[1:]))}")[:new]] for ids in prompts]
    return generate


def looked_up(text):
    *known, key = text.split()
    return known[known.index(key) + 1]


@pytest.mark.parametrize("answer, right", [(looked_up, 20), (lambda text: "purple", 0)])
def test_who_looks_up_has_all_right_at_all_distances_and_who_says_another_colour_none(monkeypatch, answer, right):
    tok = load("byte")
    monkeypatch.setattr(length, "generate", answering(tok, answer))
    rows = length.lookup_scores(None, tok, 256, 20)
    assert [row["distance"] for row in rows] == [32, 64, 128, 240]
    assert all(row["right"] == right and row["n"] == 20 and row["low"] <= right / 20 <= row["high"] for row in rows)


@pytest.mark.parametrize("kind", length.SUBJECTS)
def test_from_the_start_as_many_tokens_are_read_as_before_and_after_an_extension(kind):
    read = {}
    for arm in length.NAMES:
        args = dict(arg.lstrip("-").split("=") for arg in length.flags(kind, arm, 2)[1:])
        read[arm] = int(args["total_samples"]) * int(args["block_size"])
        assert int(args["batch_size"]) * int(args["block_size"]) == length.SUBJECTS[kind]["step"]
        assert args.get("init_from", "").endswith(f"{kind}/seed-2/short") == (arm in ("raised", "kept"))
    assert read["short"] + read["raised"] == read["long"] and read["raised"] == read["kept"]


def test_the_committed_tables_are_those_of_the_committed_rows():
    folder = os.path.join(ROOT, "results", "length")
    rows = kit.read_rows(f"{folder}/rows.jsonl")
    with open(f"{folder}/table.md", encoding="utf-8") as f:
        assert f.read() == length.table_md(rows)
    assert [(row["seed"], row["arm"]) for row in rows] == [(seed, arm) for seed in (2, 3, 4) for arm in length.NAMES]
    tokens = dict(short=6000 * 256, raised=400 * 1024, kept=400 * 1024, long=1900 * 1024)
    assert all(row["tokens"] == tokens[row["arm"]] for row in rows)
    read = dict(short=32000 * 256, raised=400 * 1024, kept=400 * 1024, long=8400 * 1024)
    assert all(row["register_tokens"] == read[row["arm"]] for row in rows)
