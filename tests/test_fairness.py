"""studies/fairness.py: closed forms of the Gini coefficient, and what UTF-8 costs."""

import numpy as np
import pytest
from conftest import script
from corpora import write_lines

from studies.fairness import fairness, gini
from tokenizer import load


def test_gini_closed_forms():
    """Gini is half the mean difference between any two costs, relative to the mean."""
    assert gini(np.array([0, 5, 0, 0])) == 3 / 4
    differences, mean = 1 + 3 + 2, 7 / 3
    assert gini(np.array([4, 1, 2])) == pytest.approx(differences / 9 / mean)


def test_costs_are_printed_relative_to_english_or_to_the_first_language(tmp_path):
    """A token is a byte: the Greek text has 8, the English one 4."""
    greek, german, english = (
        dict(lang=lang, text=text) for lang, text in (("el", "αβγδ"), ("de", "ab"), ("en", "abcd"))
    )
    for rows, unit, cost in (([greek, english], "en", "2.00"), ([greek, german], "el", "1.00")):
        printed = script("studies.fairness", write_lines(tmp_path / "t.jsonl", rows), "--names=byte").stdout
        assert f"tokens per document, {unit} = 1:" in printed and f"el           {cost}\n" in printed


def test_bytes_cost_what_utf8_costs():
    documents = [("en", "abcd"), ("en", "ab"), ("el", "αβγδ")]
    cost, by_document, by_byte, bytes_per_token = fairness(load("byte"), documents)
    assert cost == dict(en=3, el=8)
    assert by_document == pytest.approx(5 / 22)
    assert by_byte == 0
    assert bytes_per_token == 1
