"""
Rules against datatrove's filters (words by white space), numpy's quantiles and the definition of each column rule.

golden/heuristics.jsonl.gz: 800 pages with the faults that the rules look for, each with the rule of each set by which
datatrove 0.10.1 removes it; "fineweb2" has the rules of three sets with LIMITS. tests/test_rules.py of commit 58a600a
wrote the pages, tests/test_heuristics.py of commit ac03345 the verdicts.
"""

import gzip
import json
import os
import re

import numpy as np
import pytest
from conftest import ROOT, table
from corpora import put

from corpus import rules
from corpus.rules import HEURISTICS, beyond, broken, by_language, top_thresholds

with gzip.open(f"{ROOT}/tests/golden/heuristics.jsonl.gz", "rt") as lines:
    PAGES = list(map(json.loads, lines))


def verdict(spec, text, language="eng_Latn"):
    return beyond(spec, dict(text=text, language=language))


@pytest.mark.parametrize("name", ["gopher", "repetition", "c4", "fineweb"])
def test_verdicts_equal_datatrove(name):
    assert [verdict(name, page["text"]) for page in PAGES] == [page[name] for page in PAGES]
    # For every rule some page breaks it, except for one that would take a page of half a megabyte.
    rules = {rule for rule, (source, *_) in HEURISTICS.items() if source == name} - {"many-words"}
    assert {page[name] for page in PAGES} == rules | {None}


# In the format of FineWeb-2's files; the numbers are ours.
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
    """A folder like FineWeb-2's, with limits for two languages. A limit of 0 is none."""
    return str(put(tmp_path, {"xyz_Latn.yml": LIMITS, "abc_Latn.yml": LIMITS.replace("length: 6", "length: 0")}))


@pytest.mark.parametrize("source", ["repetition", "fineweb", "gopher"])
def test_with_limits_of_a_language_verdicts_equal_datatrove(folder, source, monkeypatch):
    monkeypatch.setattr(rules, "SETS", {source: rules.SETS[source]})
    for page in PAGES:
        want = next((name for name in HEURISTICS if HEURISTICS[name][0] == source and name in page["fineweb2"]), None)
        assert verdict(folder, page["text"], "xyz_Latn") == want


GERMAN = "Die W\u00fcrde des Menschen ist unantastbar. Sie zu achten ist Verpflichtung aller staatlichen Gewalt.\n" * 6
# By white space each line is one word of 14 characters, too long for a word in Latin letters.
LINE = "\u4eba\u4eba\u751f\u800c\u81ea\u7531\uff0c\u5728\u5c0a\u4e25\u4e0a\u5e73\u7b49\u3002\n"
CHINESE = "".join(LINE.replace("\u751f", chr(0x4E00 + i)) for i in range(20))
LATIN = re.sub(r"[^\n]", "x", CHINESE)
TEXTS = dict(
    two="Two sentences are here. No more.",
    four="Two sentences are here. No more." * 2,
    code="the {",
    x="x",
    ship="Donaudampfschiff.",
    long="word and the " * 40_000,
    german=GERMAN,
    chinese=CHINESE,
    endless=CHINESE.replace("\u3002", ""),
    latin=LATIN,
    mixed=LINE * 2 + LATIN,
)
# The setting, with DIR for the folder; a text, its language, and the rule that it breaks. First: a user's limits apply
# to every language. Then: a language's file replaces the sets, and a language is not a path. Then: English stop words
# are for English only, and no rule is for code. Last: rules about words skip scripts without spaces, rules about lines
# do not; a Chinese full stop ends a sentence.
CASES = """
c4,sentences:2,DIR      | two     | deu_Latn        | None
DIR,sentences:2, c4     | two     | deu_Latn        | None
c4,DIR                  | two     | deu_Latn        | sentences
DIR/,few-words:1,c4     | four    | xyz_Latn        | stop-words
DIR,c4,few-words:1,stop-words:0,sentences:9 | two | xyz_Latn | sentences
DIR,few-words:1,stop-words:0 | ship | abc_Latn     | None
c4,DIR,few-words:1,stop-words:0 | code | xyz_Latn   | punctuation
lorem-ipsum,DIR         | two     | ../DIR/xyz_Latn | None
gopher                  | german  | eng_Latn        | stop-words
gopher                  | german  | en-GB           | stop-words
gopher                  | german  | enm_Latn        | None
gopher                  | german  | deu_Latn        | None
gopher                  | german  |                 | None
gopher                  | x       | code            | None
gopher                  | long    | en              | many-words
gopher                  | chinese | zho_Hans        | None
long-words              | latin   | zho_Hans        | long-words
long-words              | mixed   | en              | long-words
punctuation             | chinese | en              | None
punctuation             | endless | en              | punctuation
"""


@pytest.mark.parametrize("spec, text, language, rule", table(CASES))
def test_which_rules_a_document_meets(folder, spec, text, language, rule):
    language = language.replace("DIR", os.path.basename(folder))
    assert str(verdict(spec.replace("DIR", folder), TEXTS[text], language)) == rule


# ----------------------------------------------------------------------------------------------------------------------
# columns

DOC = dict(id="7", text="x" * 100, lang="deu_Latn", license="mit", score="2.5", toxic=0.9977, gap=None, nan="nan")
# Settings of broken(), and the reason why DOC is removed.
COLUMNS = """
{"licenses": ["mit"], "languages": ["deu_Latn"], "min_chars": 100, "max_chars": 100} | None
{"licenses": ["cc0"]} | license
{"languages": ["fra_Latn"]} | language
{"min_chars": 101} | length
{"max_chars": 99} | length
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
{"rate": {"*": 0}} | rate
{"rate": {"deu_Latn": 1, "*": 0}} | None
{} | None
"""


@pytest.mark.parametrize("asked, reason", table(COLUMNS))
def test_column_rules(asked, reason):
    assert str(broken(DOC, **json.loads(asked))) == reason


def test_a_random_rate_keeps_that_share_and_a_smaller_rate_a_subset():
    def drawn(rate, **seed):
        return {i for i in range(9_000) if not broken(dict(id=str(i)), rate=rate, **seed)}

    few, many = drawn(0.095), drawn(by_language("rate", "0.3135"))
    assert few < many == drawn(0.3135, seed=42) != drawn(0.3135, seed=1)
    assert abs(len(many) / 9_000 - 0.3135) < 4 * (0.3135 * 0.6865 / 9_000) ** 0.5


def test_thresholds_are_quantiles_whatever_the_order():
    """Rounding must not move a quantile: 0.07 * 100 is 7.000000000000001 in floating point."""
    scores = np.random.default_rng(0).normal(size=(2, 2000))
    rows = [*zip([0, 1] * 2000, scores.T.ravel())]
    want = {i: -np.quantile(-some, 0.33, method="inverted_cdf") for i, some in enumerate(scores)}
    assert top_thresholds(rows, 0.33) == top_thresholds(rows[::-1], 0.33) == want
    assert top_thresholds([("de", i) for i in range(100)], 0.07) == {"de": 93}
