"""
Rules against datatrove's filters (words by white space), numpy's quantiles and the definition of each column rule.

golden/heuristics.json: {set: {rule: [seeds]}}, the pages of page(0) to page(1499) that datatrove 0.10.1 removes.
tests/test_heuristics.py of commit ac03345 wrote it.
"""
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

# Of the golden pages; all of them take seconds.
PAGES = 800
SETS = ("gopher", "repetition", "c4", "fineweb")
WORDS = ("the of and to in is that for with as on was by it house river mountain yesterday written because between "
         "people something different language U.S.A. a.m. J. Bach O'Neil well-known 1848 12 3.14 "
         "\u00e9t\u00e9 na\u00efve Stra\u00dfe \u0434\u043e\u043c be have I x").split()
ODD = ("# #", "...", "\u2026", "7 8 9 10", "a b c", "{", "lorem ipsum", "JavaScript", "We use cookies", "x" * 40,
       "\u2014", "!!!", "Donaudampfschifffahrtsgesellschaft", "- -")


def page(seed):
    """A random web page with the faults that the rules look for: few or many words, lists, repeated parts."""
    rng = random.Random(seed)
    words = rng.sample(WORDS, rng.choice((3, 12, len(WORDS))))
    odd = rng.choice(ODD)
    often = rng.choice((0, 0, 2, 5, 12, 40))
    end = rng.choice((".", ".", "?", "", "...", "\u3002", " "))
    bullet = rng.choice(("", "", "", "- ", "\u2022x "))
    lines = []
    for _ in range(rng.choice((1, 4, 9, 30))):
        length = rng.choice((1, 3, 8, 25))
        line = " ".join(odd if rng.randrange(100) < often else rng.choice(words) for _ in range(length))
        lines.append((bullet if rng.randrange(20) else "") + line + (end if rng.randrange(20) else ""))
    # Repeated lines, and repeated runs of words.
    for _ in range(rng.choice((0, 0, 1, 2, 4, 8))):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    run = " ".join(rng.choice(words) for _ in range(rng.randrange(2, 16)))
    for _ in range(rng.choice((0, 0, 2, 3, 5))):
        at = rng.randrange(len(lines))
        lines[at] = f"{lines[at]} {run} {rng.choice(words)}"
    # If no sentence ends a line, datatrove counts one for the last abbreviation in it, and we do not.
    lines = [line if re.search(r"(?<![A-Z])[.?\u3002]$", line) else re.sub(r"([A-Z])\.", r"\1", line) for line in lines]
    return rng.choice(("\n", "\n", "\n\n", "\r\n")).join(lines) + rng.choice(("", "\n"))


def golden(name):
    """{rule: [seeds]} of the first PAGES."""
    with open(os.path.join(ROOT, "tests", "golden", "heuristics.json"), encoding="utf-8") as f:
        rules = json.load(f)[name]
    below = {rule: [seed for seed in seeds if seed < PAGES] for rule, seeds in rules.items()}
    return {rule: seeds for rule, seeds in below.items() if seeds}


def removed(rules, language):
    """{rule: [seeds]} of the pages that break one of the rules."""
    gone = {}
    for seed in range(PAGES):
        reason = broken(dict(text=page(seed), language=language), rules)
        gone.setdefault(reason, []).append(seed)
    gone.pop(None)
    return gone


@pytest.mark.parametrize("name", SETS)
def test_verdicts_equal_datatrove(name):
    assert removed(text_rules(name), "eng_Latn") == golden(name)


def test_a_golden_page_breaks_every_rule():
    """Except many-words, which would take a page of half a megabyte."""
    assert {rule for name in SETS for rule in golden(name)} == HEURISTICS.keys() - {"many-words"}
    assert verdict("gopher", "word and the " * 40_000) == "many-words"


def verdict(spec, text, language="eng_Latn"):
    return broken(dict(text=text, language=language), text_rules(spec))


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
    got = {}
    for source in ("repetition", "fineweb", "gopher"):
        got |= removed([rule for rule in text_rules(folder) if HEURISTICS[rule[0]][0] == source], "xyz_Latn")
    assert got == golden("fineweb2")
    assert limit_files(f"c4, {folder}") == [folder + "/xyz_Latn.yml"]
    # 0 means no limit.
    Path(folder, "abc_Latn.yml").write_text(LIMITS.replace("length: 6", "length: 0"), "utf-8")
    assert verdict(f"{folder},few-words:1,stop-words:0", "Donaudampfschiff.", "abc_Latn") is None


def test_limits_of_the_user_apply_to_every_language(folder):
    text = "Two sentences are here. No more."
    for spec in (f"c4,sentences:2,{folder}", f"{folder},sentences:2, c4"):
        assert verdict(spec, text, "deu_Latn") is None
        assert verdict(f"{folder},few-words:1,{spec}", text + text, "xyz_Latn") == "stop-words"
    assert verdict(f"c4,{folder}", text, "deu_Latn") == "sentences"
    assert verdict(f"{folder},c4,few-words:1,stop-words:0,sentences:9", text, "xyz_Latn") == "sentences"
    # The file replaces the sets, and a language is not a path.
    assert verdict(f"c4,{folder},few-words:1,stop-words:0", "the {", "xyz_Latn") == "punctuation"
    assert verdict(f"lorem-ipsum,{folder}", text, f"../{os.path.basename(folder)}/xyz_Latn") is None
    assert text_rules("") == []


def test_errors_name_the_part_and_the_choices(folder):
    for part in ("gofer", "sentences:few", "c4:3"):
        with pytest.raises(ValueError, match=f"there is no '{part}'; want .*gopher.*short-lines"):
            text_rules(f"c4,{part}")
    Path(folder, "xyz_Latn.yml").write_text("stopwords: 3")
    with pytest.raises(ValueError, match="xyz_Latn.yml is damaged"):
        verdict(folder, "text", "xyz_Latn")


GERMAN = "Die W\u00fcrde des Menschen ist unantastbar. Sie zu achten ist Verpflichtung aller staatlichen Gewalt.\n" * 6
CHINESE = "\u4eba\u4eba\u751f\u800c\u81ea\u7531\uff0c\u5728\u5c0a\u4e25\u4e0a\u5e73\u7b49\u3002\n"


def test_stop_words_apply_to_english_only_and_nothing_to_code():
    languages = ("eng_Latn", "en-GB", "enm_Latn", "deu_Latn", None)
    assert [verdict("gopher", GERMAN, language) for language in languages] == ["stop-words"] * 2 + [None] * 3
    assert verdict("gopher", "x", "code") is None


def test_rules_about_words_skip_scripts_without_spaces():
    """Each line is one word by white space, of 14 characters, and too long for Latin letters."""
    text = "".join(CHINESE.replace("\u751f", chr(0x4e00 + i)) for i in range(20))
    assert verdict("gopher", text, "zho_Hans") is None
    assert verdict("long-words", re.sub(r"[^\n]", "x", text), "zho_Hans") == "long-words"
    # Rules about lines apply, and a Chinese full stop ends a sentence.
    assert verdict("punctuation", text) is None
    assert verdict("punctuation", text.replace("\u3002", "")) == "punctuation"


# ----------------------------------------------------------------------------------------------------------------------
# columns

DOC = dict(id="7", text="x" * 100, lang="deu_Latn", license="mit", score="2.5", toxic=0.9977, gap=None)


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
    (dict(below=("gap", 0)), None),
    (dict(below=("toxic", TOXICITY)), "above"),
    (dict(rate={"*": 0}), "rate"),
    (dict(rate={"deu_Latn": 1, "*": 0}), None),
])
def test_column_rules(asked, reason):
    assert broken(DOC, column_rules(**asked)) == reason
    assert len(column_rules(**asked)) == len(asked.keys() - {"max_chars"} or asked)


def test_nan_breaks_both_rules_and_a_bad_column_is_an_error():
    nan = dict(DOC, score="nan")
    assert broken(nan, column_rules(top=("score", 0))) == "score"
    assert broken(nan, column_rules(below=("score", 0))) == "above"
    with pytest.raises(ValueError, match="^no column quality in the data; it has id, text, lang.*$"):
        broken(DOC, column_rules(top=("quality", 1)))
    with pytest.raises(ValueError, match="^no column language or lang in the data; it has text$"):
        broken(dict(text=""), column_rules(languages={"en"}))
    with pytest.raises(ValueError, match="^column score: .* where a number was expected$"):
        broken(dict(DOC, score=[0.9]), column_rules(below=("score", 0.5)))


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
    with pytest.raises(ValueError, match="^rate='much': want a number"):
        by_language("rate", "much")


@pytest.mark.parametrize("share", [0.1, 0.33])
def test_thresholds_keep_the_top_share_of_each_language(share):
    rng = np.random.default_rng(0)
    docs = [(f"d{i}", rng.choice(["de", "fr"]), rng.normal()) for i in range(3000)]
    thresholds = top_thresholds(docs, share)
    for language in ("de", "fr"):
        scores = np.array([s for _, l, s in docs if l == language])
        assert thresholds[language] == -np.quantile(-scores, share, method="inverted_cdf")


def test_a_sample_does_not_depend_on_the_order_and_ties_stay():
    rng = random.Random(0)
    docs = [(f"d{i}", "de", rng.gauss(0, 1)) for i in range(5000)]
    threshold = top_thresholds(docs, 0.33, sample=400)
    lowest = sorted(docs, key=lambda doc: uniform(doc[0], seed=0))[:400]
    assert threshold == top_thresholds(lowest, 0.33) == top_thresholds(rng.sample(docs, len(docs)), 0.33, sample=400)
    assert top_thresholds([(str(i), "de", i) for i in range(100)], 0.07) == {"de": 93}
    assert top_thresholds([(f"d{i}", "rm", 3) for i in range(10)], 0.33) == {"rm": 3.0}
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        top_thresholds([], 33)


def test_a_score_from_a_file_of_the_user(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import math\nK = 2\ndef score(text):\n    return K * len(text) if text else None\n")
    score = score_function(str(path))
    assert score("abc") == 6.0
    with pytest.raises(ValueError, match="mine.py: score.text. returned None, want a number"):
        score("")
    path.write_text("points = 3")
    for name, says in (("mine.py", "has no function score"), ("other.py", "no such file")):
        with pytest.raises(ValueError, match=f"--score=.*{name}: .*{says}"):
            score_function(str(tmp_path / name))
