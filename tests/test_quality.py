"""Selection against numpy's quantiles."""
import random

import numpy as np
import pytest

from corpus import quality
from corpus.quality import TopShare, column_reason, uniform


@pytest.mark.parametrize("share", [0.1, 0.33, 1.0])
def test_the_top_share_of_each_language_is_kept(share):
    rng = np.random.default_rng(0)
    docs = [(f"d{i}", rng.choice(["de", "fr"]), rng.normal()) for i in range(3000)]
    first = TopShare(share)
    for doc in docs:
        first.add(*doc)
    for language, threshold in first.thresholds().items():
        scores = np.array([s for _, l, s in docs if l == language])
        assert threshold == -np.quantile(-scores, share, method="inverted_cdf")


def test_a_sample_is_the_same_in_any_order():
    rng = random.Random(0)
    docs = [(f"d{i}", "de", rng.gauss(0, 1)) for i in range(5000)]
    whole, shuffled = TopShare(0.33, sample=400), TopShare(0.33, sample=400)
    for doc in docs:
        whole.add(*doc)
    for doc in rng.sample(docs, len(docs)):
        shuffled.add(*doc)
    assert whole.thresholds() == shuffled.thresholds()
    kept = np.mean([s >= whole.thresholds()["de"] for _, _, s in docs])
    # Four standard errors of 400 drawn.
    assert abs(kept - 0.33) < 4 * (0.33 * 0.67 / 400) ** 0.5


def test_equal_scores_lose_no_language():
    first = TopShare(0.33)
    for i in range(10):
        first.add(f"d{i}", "rm", 3)
    assert first.thresholds() == {"rm": 3.0}
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        TopShare(33)


DOC = dict(id="7", text="x" * 100, lang="deu_Latn", license="mit", score=2.5, toxic=0.9977, gap=None, odd="0.1")


@pytest.mark.parametrize("rules, reason", [
    (dict(licenses={"mit"}, languages=["deu_Latn"], min_chars=100, max_chars=100), None),
    (dict(licenses={"cc0"}), "license"),
    (dict(languages=["fra_Latn"]), "language"),
    (dict(min_chars=101), "length"),
    (dict(max_chars=99), "length"),
    (dict(top=("score", 2.5)), None),
    (dict(top=("score", {"deu_Latn": 2.6})), "score"),
    (dict(top=("score", {"fra_Latn": 9})), None),
    (dict(top=("gap", 0)), "score"),
    (dict(top=("odd", 0.5)), "score"),
    (dict(top=("odd", 0.1)), None),
    (dict(below=("gap", 0)), None),
    (dict(below=("toxic", quality.TOXICITY)), "above"),
    (dict(below=("toxic", 0.9978)), None),
    (dict(rate={"*": 0}), "rate"),
    (dict(rate={"deu_Latn": 1, "*": 0}), None),
])
def test_rules_on_columns(rules, reason):
    assert column_reason(DOC, **rules) == reason


def test_a_nan_fails_and_a_missing_column_or_a_score_that_is_no_number_is_one_line():
    assert column_reason(dict(DOC, score="nan"), top=("score", 0)) == "score"
    with pytest.raises(ValueError, match="^no column quality in the data; it has id, text, lang.*$"):
        column_reason(DOC, top=("quality", 1))
    for odd in ("high", [0.9], {}):
        with pytest.raises(ValueError, match="^column score: .* where a number was expected$"):
            column_reason(dict(DOC, score=odd), below=("score", 0.5))


def drawn(rate, **seed):
    """Which of 500 documents a random rate keeps."""
    return {i for i in range(500) if column_reason({"id": str(i), "text": ""}, rate=rate, **seed) is None}


def test_the_random_rate_is_the_rate_a_smaller_one_keeps_a_subset_and_another_seed_others():
    draws = np.array([uniform(str(i)) for i in range(20_000)])
    assert abs((draws < 0.3135).mean() - 0.3135) < 4 * (0.3135 * 0.6865 / 20_000) ** 0.5
    assert drawn(0.095) < drawn(0.3135) == drawn(0.3135, seed=42) != drawn(0.3135, seed=1)
