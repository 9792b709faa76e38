"""studies/length.py: registers, questions and their scores. test_results.py tests its runs and its page."""

import random

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
    """A parser of the prompt replaces the model. Distances are exact to one pair, of 12 bytes at most."""
    tok = load("byte")
    back = []

    def generate(model, prompts, new, temperature):
        [ids] = prompts
        back.append(len(ids) - 1 - len(" kova"))
        return [ids + tok.encode(f" {looked_up(tok.decode(ids[1:]))}")[:new]]

    monkeypatch.setattr(length, "generate", generate)
    rows = [*length.lookup_scores(None, tok, 256, 9)]
    assert [(row["distance"], row["right"]) for row in rows] == [(32, 9), (64, 9), (128, 9), (240, 9)]
    assert all(0 <= n - rows[i // 9]["distance"] < 12 for i, n in enumerate(back))
