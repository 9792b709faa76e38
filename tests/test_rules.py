"""Rules about columns against numpy's quantiles and the definition of each rule."""

import json

import numpy as np
import pytest
from conftest import table

from corpus.rules import broken, top_thresholds

DOC = dict(id="7", lang="deu_Latn", license="MIT", score="2.5", toxic=0.9977, gap=None, nan="nan")
# Settings of broken(), and the reason why DOC is removed.
COLUMNS = """
{"licenses": ["cc0", "Mit"], "languages": ["deu_Latn"]} | None
{"licenses": ["cc0"]} | license
{"languages": ["fra_Latn"]} | language
{"top": ["score", 2.5]} | None
{"top": ["score", {"deu_Latn": 2.6}]} | score
{"top": ["score", {"fra_Latn": 9}]} | None
{"top": ["gap", 0]} | score
{"top": ["nan", 0]} | score
{"below": ["gap", 0]} | None
{"below": ["score", 2.6]} | None
{"below": ["score", 2.4]} | above
{"below": ["nan", 0]} | above
{"below": ["toxic", {"deu_Latn": 0.9977}]} | above
{} | None
"""


@pytest.mark.parametrize("settings, reason", table(COLUMNS))
def test_column_rules(settings, reason):
    assert str(broken(DOC, **json.loads(settings))) == reason


def test_thresholds_are_quantiles_whatever_the_order():
    """Rounding must not move a quantile: 0.07 * 100 is 7.000000000000001 in floating point."""
    scores = np.random.default_rng(0).normal(size=(2, 2000))
    rows = [*zip([0, 1] * 2000, scores.T.ravel())]
    want = {i: -np.quantile(-some, 0.33, method="inverted_cdf") for i, some in enumerate(scores)}
    assert top_thresholds(rows, 0.33) == top_thresholds(rows[::-1], 0.33) == want
    assert top_thresholds([("de", i) for i in range(100)], 0.07) == {"de": 93}
