"""
Rules against datatrove's filters (words by white space), numpy's quantiles and the definition of each column rule.

golden/heuristics.jsonl.gz: 800 pages with the faults that the rules look for, and by which rule of each set datatrove
0.10.1 removes them; "fineweb2" are the rules of three sets with LIMITS. tests/test_rules.py of commit 58a600a wrote the
pages, tests/test_heuristics.py of commit ac03345 the verdicts.
"""
import gzip
import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from corpus.rules import (HEURISTICS, TOXICITY, broken, by_language, column_rules, limit_files, listed, score_function,
                          text_rules, top_thresholds, uniform)

with gzip.open(f"{ROOT}/tests/golden/heuristics.jsonl.gz", "rt", encoding="utf-8") as lines:
    PAGES = list(map(json.loads, lines))


def verdict(spec, text, language="eng_Latn"):
    return broken(dict(text=text, language=language), text_rules(spec))


@pytest.mark.parametrize("name", ["gopher", "repetition", "c4", "fineweb"])
def test_verdicts_equal_datatrove(name):
    assert [verdict(name, page["text"]) for page in PAGES] == [page[name] for page in PAGES]
    # A page breaks every rule, but for one that would take half a megabyte.
    rules = {rule for rule, (source, *_) in HEURISTICS.items() if source == name} - {"many-words"}
    assert {page[name] for page in PAGES} == rules | {None}


# In the form of FineWeb-2's files; the numbers are ours.
LIMITS = """
dup_line_frac: 0.25
dup_n_grams: [[5, 0.2], [6, 0.19], [7, 0.18], [8, 0.17], [9, 0.16], [10, 0.15]]
language_score: 0.7
line_punct_thr: 0.3
max_avg_word_length: 6
max_non_alpha_words_ratio: 0.7
min_avg_word_length: 3.5
new_line_ratio: 0.1
stopwords: [the, in, \u00e9t\u00e9]
top_n_grams: [[2, 0.25], [3, 0.22], [4, 0.2]]
"""


@pytest.fixture
def folder(tmp_path):
    """A folder like FineWeb-2's, with the limits of one language."""
    (tmp_path / "xyz_Latn.yml").write_text(LIMITS, encoding="utf-8")
    return str(tmp_path)


def test_with_limits_of_a_language_verdicts_equal_datatrove(folder):
    rules = text_rules(folder)
    for source in ("repetition", "fineweb", "gopher"):
        mine = [rule for rule in rules if HEURISTICS[rule[0]][0] == source]
        names = dict.fromkeys(name for name, _ in mine)
        want = [next((name for name in names if name in page["fineweb2"]), None) for page in PAGES]
        assert [broken(dict(text=page["text"], language="xyz_Latn"), mine) for page in PAGES] == want
    assert limit_files(f"c4, {folder}") == [folder + "/xyz_Latn.yml"]
    # 0 means no limit.
    Path(folder, "abc_Latn.yml").write_text(LIMITS.replace("length: 6", "length: 0"), "utf-8")
    assert verdict(f"{folder},few-words:1,stop-words:0", "Donaudampfschiff.", "abc_Latn") is None


TWO = "Two sentences are here. No more."
GERMAN = "Die W\u00fcrde des Menschen ist unantastbar. Sie zu achten ist Verpflichtung aller staatlichen Gewalt.\n" * 6
# Each line is one word by white space, of 14 characters, and too long for Latin letters.
LINE = "\u4eba\u4eba\u751f\u800c\u81ea\u7531\uff0c\u5728\u5c0a\u4e25\u4e0a\u5e73\u7b49\u3002\n"
CHINESE = "".join(LINE.replace("\u751f", chr(0x4e00 + i)) for i in range(20))
LATIN = re.sub(r"[^\n]", "x", CHINESE)
# The setting, with DIR for the folder; a text, its language, and the rule that it breaks.
CASES = [
    # Limits of the user apply to every language.
    ("c4,sentences:2,DIR", TWO, "deu_Latn", None), ("DIR,sentences:2, c4", TWO, "deu_Latn", None),
    ("c4,DIR", TWO, "deu_Latn", "sentences"), ("DIR,few-words:1,c4", TWO * 2, "xyz_Latn", "stop-words"),
    ("DIR,c4,few-words:1,stop-words:0,sentences:9", TWO, "xyz_Latn", "sentences"),
    # The file replaces the sets, and a language is not a path.
    ("c4,DIR,few-words:1,stop-words:0", "the {", "xyz_Latn", "punctuation"),
    ("lorem-ipsum,DIR", TWO, "../DIR/xyz_Latn", None),
    # English stop words are for English only, and no rule is for code.
    *[("gopher", GERMAN, language, "stop-words") for language in ("eng_Latn", "en-GB")],
    *[("gopher", GERMAN, language, None) for language in ("enm_Latn", "deu_Latn", None)],
    ("gopher", "x", "code", None), ("gopher", "word and the " * 40_000, "en", "many-words"),
    # Rules about words skip scripts without spaces, rules about lines do not; a Chinese full stop ends a sentence.
    ("gopher", CHINESE, "zho_Hans", None), ("long-words", LATIN, "zho_Hans", "long-words"),
    ("long-words", LINE * 2 + LATIN, "en", "long-words"),
    ("punctuation", CHINESE, "en", None), ("punctuation", CHINESE.replace("\u3002", ""), "en", "punctuation")]


@pytest.mark.parametrize("spec, text, language, rule", CASES)
def test_which_rules_a_document_meets(folder, spec, text, language, rule):
    language = language and language.replace("DIR", os.path.basename(folder))
    assert verdict(spec.replace("DIR", folder), text, language) == rule


# ----------------------------------------------------------------------------------------------------------------------
# columns

DOC = dict(id="7", text="x" * 100, lang="deu_Latn", license="mit", score="2.5", toxic=0.9977, gap=None, nan="nan")


@pytest.mark.parametrize("asked, reason", [
    (dict(licenses={"mit"}, languages=["deu_Latn"], min_chars=100, max_chars=100), None),
    (dict(licenses={"cc0"}), "license"),
    (dict(languages=["fra_Latn"]), "language"),
    (dict(min_chars=101), "length"),
    (dict(max_chars=99), "length"),
    (dict(top=("score", 2.5)), None),
    (dict(top=("score", {"deu_Latn": 2.6})), "score"),
    (dict(top=("score", {"fra_Latn": 9})), None),
    (dict(top=("gap", 0)), "score"),
    (dict(top=("nan", 0)), "score"),
    (dict(below=("gap", 0)), None),
    (dict(below=("nan", 0)), "above"),
    (dict(below=("toxic", TOXICITY)), "above"),
    (dict(rate={"*": 0}), "rate"),
    (dict(rate={"deu_Latn": 1, "*": 0}), None),
])
def test_column_rules(asked, reason):
    assert broken(DOC, column_rules(**asked)) == reason
    assert len(column_rules(**asked)) == len(asked.keys() - {"max_chars"} or asked)


def test_a_random_rate_keeps_that_share_and_a_smaller_rate_a_subset():
    draws = np.array([uniform(str(i)) for i in range(20_000)])
    assert abs((draws < 0.3135).mean() - 0.3135) < 4 * (0.3135 * 0.6865 / 20_000) ** 0.5

    def drawn(rate, **seed):
        return {i for i in range(500) if not broken({"id": str(i), "text": ""}, column_rules(rate=rate, **seed))}
    assert drawn(0.095) < drawn(0.3135) == drawn(0.3135, seed=42) != drawn(0.3135, seed=1)


def test_settings_are_read():
    assert listed("mit, cc0") == {"mit", "cc0"} and listed("") is None
    assert by_language("rate", "0.3") == 0.3 and by_language("rate", "") is None
    assert by_language("rate", "deu_Latn:1, *:0.3") == {"deu_Latn": 1, "*": 0.3}


def test_thresholds_are_quantiles_of_a_sample_that_does_not_depend_on_the_order():
    rng = random.Random(0)
    docs = [(f"d{i}", rng.choice(["de", "fr"]), rng.gauss(0, 1)) for i in range(5000)]
    for share in (0.1, 0.33):
        for language, threshold in top_thresholds(docs, share).items():
            scores = np.array([score for _, its, score in docs if its == language])
            assert threshold == -np.quantile(-scores, share, method="inverted_cdf")
    german = [doc for doc in docs if doc[1] == "de"]
    lowest = sorted(german, key=lambda doc: uniform(doc[0], seed=0))[:400]
    for same in (german, rng.sample(german, len(german))):
        assert top_thresholds(same, 0.33, sample=400) == top_thresholds(lowest, 0.33)
    # 0.07 * 100 is 7.000000000000001; ties stay.
    assert top_thresholds([(str(i), "de", i) for i in range(100)], 0.07) == {"de": 93}
    assert top_thresholds([(f"d{i}", "rm", 3) for i in range(10)], 0.33) == {"rm": 3.0}


def test_a_score_from_a_file_of_the_user(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("K = 2\ndef score(text):\n    return K * len(text) if text else None\n")
    score = score_function(str(path))
    assert score("abc") == 6.0
    with pytest.raises(ValueError, match="mine.py: .*number.*None"):
        score("")
