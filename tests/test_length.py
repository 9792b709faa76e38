"""studies/length.py: registers, questions and their marks; the arms read equally many tokens."""
import random

import pytest

from studies import length
from tokenizer import load


def test_in_a_register_each_key_has_one_colour_and_another_in_another_register():
    rng = random.Random(3)
    seen = set()
    for _ in range(40):
        words = length.register(rng, 4).split()
        pairs = set(zip(words[::2], words[1::2]))
        assert len(words) == 64 and len(pairs) == len(dict(pairs)) <= 4
        seen |= pairs
    assert len(seen) > 64


def looked_up(text):
    key, colour, *between, asked = text.split()
    assert asked == key and key not in between
    return colour


def test_a_reader_of_the_text_looks_up_all_colours_at_each_distance(monkeypatch):
    """In place of a model. The distance is exact up to the last pair, of 12 bytes at most."""
    tok = load("byte")
    back = []

    def generate(model, prompts, new, temperature):
        [ids] = prompts
        back.append(len(ids) - 1 - len(" kova"))
        return [ids + tok.encode(f" {looked_up(tok.decode(ids[1:]))}")[:new]]
    monkeypatch.setattr(length, "generate", generate)
    rows = length.lookup_scores(None, tok, 256, 9)
    assert [(row["distance"], row["right"]) for row in rows] == [(32, 9), (64, 9), (128, 9), (240, 9)]
    assert all(0 <= n - rows[i // 9]["distance"] < 12 for i, n in enumerate(back))


@pytest.mark.parametrize("kind, step", [("text", 1024), ("register", 4096)])
def test_from_the_start_as_many_tokens_are_read_as_before_and_after_an_extension(kind, step):
    read = {}
    for arm in length.ARMS:
        args = dict(arg.lstrip("-").split("=", 1) for arg in length.flags(kind, arm, 2)[1:])
        read[arm] = int(args["total_samples"]) * int(args["block_size"])
        assert int(args["batch_size"]) * int(args["block_size"]) == step
    assert read["short"] + read["raised"] == read["long"] == read["short"] + read["kept"]
