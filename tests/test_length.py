"""studies/length.py: registers, questions and their marks; the arms read equally many tokens; the committed page."""
import random

import pytest

from studies import kit, length
from tokenizer import load


@pytest.mark.parametrize("size", [2, 64])
def test_in_a_register_each_key_has_one_colour_and_another_in_another_register(size):
    rng = random.Random(3)
    seen = set()
    for _ in range(40):
        words = length.register(rng, size).split()
        pairs = set(zip(words[::2], words[1::2]))
        assert len(words) == 16 * size and len(pairs) == len(dict(pairs)) <= size
        seen |= pairs
    assert len(seen) > 40 and {colour for _, colour in seen} == set(length.COLOURS) and len(dict(seen)) <= 64


def looked_up(text):
    key, colour, *between, asked = text.split()
    assert asked == key and key not in between
    return colour


@pytest.mark.parametrize("answer, right", [(looked_up, 20), (lambda text: "purple", 0)])
def test_a_look_up_is_right_at_each_distance_and_another_colour_wrong(monkeypatch, answer, right):
    """A reader of the text in place of a model. The distance is exact up to the last pair, of 12 bytes at most."""
    tok = load("byte")
    back = []

    def generate(model, prompts, new, temperature):
        back.extend(len(ids) - 1 - len(" kova") for ids in prompts)
        return [[*ids, *tok.encode(f" {answer(tok.decode(ids[1:]))}")[:new]] for ids in prompts]
    monkeypatch.setattr(length, "generate", generate)
    rows = length.lookup_scores(None, tok, 256, 20)
    assert [row["distance"] for row in rows] == [32, 64, 128, 240]
    assert all(row["right"] == right and row["n"] == 20 for row in rows)
    assert all(0 <= n - row["distance"] < 12 for row, some in zip(rows, zip(*[iter(back)] * 20)) for n in some)


@pytest.mark.parametrize("kind, step", [("text", 1024), ("register", 4096)])
def test_from_the_start_as_many_tokens_are_read_as_before_and_after_an_extension(kind, step):
    read = {}
    for arm in length.ARMS:
        args = dict(arg.lstrip("-").split("=", 1) for arg in length.flags(kind, arm, 2)[1:])
        read[arm] = int(args["total_samples"]) * int(args["block_size"])
        assert int(args["batch_size"]) * int(args["block_size"]) == step
        assert args.get("init_from", "").endswith(f"{kind}/seed-2/short") == (arm in ("raised", "kept"))
    assert read["short"] + read["raised"] == read["long"] and read["raised"] == read["kept"]


def test_the_committed_page_is_that_of_the_committed_rows():
    rows = kit.read_rows("results/length/rows.jsonl")
    with open("results/length/table.md", encoding="utf-8") as f:
        assert f.read() == length.table_md(rows)
    assert [(row["seed"], row["arm"]) for row in rows] == [(seed, arm) for seed in (2, 3, 4) for arm in length.ARMS]
