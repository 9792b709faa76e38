"""
The rules of Gopher, C4, FineWeb and FineWeb-2 against datatrove's filters, whose words were taken by white space.

golden/heuristics.json: {set: {rule: [seeds]}}, which of page(0) to page(1499) datatrove 0.10.1 removes, and why. It was
written by tests/test_heuristics.py of commit ac03345, which also asks datatrove about real pages.
"""
import gzip
import json
import os
import random
import re
import time
from collections import Counter

import pytest

from conftest import ROOT, script
from corpus import heuristics
from corpus.heuristics import RULES, Limits, measures, reason, stays

# How many of the golden pages are judged here: all take seconds.
PAGES = 800
SETS = ("gopher", "repetition", "c4", "fineweb")
WORDS = ("the of and to in is that for with as on was by it house river mountain yesterday written because between "
         "people something different language U.S.A. a.m. J. Bach O'Neil well-known 1848 12 3.14 "
         "\u00e9t\u00e9 na\u00efve Stra\u00dfe \u0434\u043e\u043c be have I x").split()
ODD = ("# #", "...", "\u2026", "7 8 9 10", "a b c", "{", "lorem ipsum", "JavaScript", "We use cookies", "x" * 40,
       "\u2014", "!!!", "Donaudampfschifffahrtsgesellschaft", "- -")


def page(seed):
    """A page of the web that one rule or another may not like: few or many words, lists, parts that come again."""
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
    # Lines, and runs of words, that come again.
    for _ in range(rng.choice((0, 0, 1, 2, 4, 8))):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    run = " ".join(rng.choice(words) for _ in range(rng.randrange(2, 16)))
    for _ in range(rng.choice((0, 0, 2, 3, 5))):
        at = rng.randrange(len(lines))
        lines[at] = f"{lines[at]} {run} {rng.choice(words)}"
    # Where a line ends with no sentence, datatrove counts one for the last abbreviation in it, and we do not.
    lines = [line if re.search(r"(?<![A-Z])[.?\u3002]$", line) else re.sub(r"([A-Z])\.", r"\1", line) for line in lines]
    return rng.choice(("\n", "\n", "\n\n", "\r\n")).join(lines) + rng.choice(("", "\n"))


def ours(name, text):
    """Our verdict about an English page by one of the four sets."""
    return reason(text, "eng_Latn", Limits(name))


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
    """A folder like FineWeb-2's, of one language."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "xyz_Latn.yml").write_text(LIMITS, encoding="utf-8")
    return str(tmp_path / "configs")


def golden():
    """{set: {rule: [seeds]}} of the first PAGES."""
    with open(os.path.join(ROOT, "tests", "golden", "heuristics.json"), encoding="utf-8") as f:
        sets = json.load(f)
    found = {}
    for name, rules in sets.items():
        below = {rule: [seed for seed in seeds if seed < PAGES] for rule, seeds in rules.items()}
        found[name] = {rule: seeds for rule, seeds in below.items() if seeds}
    return found


def by_rule(verdict):
    """{rule: [seeds]} of the pages that go by a verdict, a function of the text."""
    gone = {}
    for seed in range(PAGES):
        gone.setdefault(verdict(page(seed)), []).append(seed)
    gone.pop(None)
    return gone


@pytest.mark.parametrize("name", SETS)
def test_the_verdicts_are_those_of_datatrove(name):
    assert by_rule(lambda text: ours(name, text)) == golden()[name]


def test_every_rule_is_met_by_a_page_of_the_golden_file():
    """Only many-words is not: it would take a page of half a megabyte."""
    met = {rule for name in SETS for rule in golden()[name]}
    assert met == RULES.keys() - {"many-words"}


def by_set(folder):
    """Our verdicts with LIMITS, by one set of rules after the other."""
    limits, stops = Limits(folder).of("xyz_Latn")

    def asked(source):
        names = {name for name in limits if RULES[name].source == source}
        return lambda text: next(
            (name for name, value in measures(text, names, stops) if not stays(name, value, limits[name])), None)
    return [asked(source) for source in ("repetition", "fineweb", "gopher")]


def test_with_limits_of_a_language_the_verdicts_are_those_of_fineweb_2(folder):
    got = {}
    for verdict in by_set(folder):
        got.update(by_rule(verdict))
    assert got == golden()["fineweb2"]
    # No rule that FineWeb-2 left out, and each that it has but for many words.
    left_out = {name for name, rule in RULES.items() if rule.source == "c4" or "paragraph" in name}
    assert RULES.keys() - got.keys() == left_out | {"short-lines", "same-line-chars", "many-words"}


def test_a_language_without_a_file_meets_what_else_is_named(folder):
    limits = Limits(f"c4,sentences:2,{folder}")
    assert limits.of("deu_Latn")[0] == {"lorem-ipsum": 0, "curly-brackets": 0, "sentences": 2}
    own, stops = limits.of("xyz_Latn")
    # One's own limit holds everywhere.
    assert own["sentences"] == 2 and "curly-brackets" not in own and own["long-words"] == 6
    assert stops == {"the", "in", "\u00e9t\u00e9"}
    # A language is no path.
    assert limits.of("../configs/xyz_Latn") == limits.of("deu_Latn")


# ----------------------------------------------------------------------------------------------------------------------
# what is ours


def test_a_page_of_too_many_words():
    text = "word and the " * 40_000
    assert ours("gopher", text) == "many-words" and ours("gopher", text[:1_000]) is None


def test_sets_and_rules_and_limits_of_ones_own():
    """One's own limit stays, wherever it stands."""
    c4 = {"lorem-ipsum": 0, "curly-brackets": 0, "sentences": 5}
    assert Limits("").named == {} and Limits("c4").named == c4 and Limits("sentences").named == {"sentences": 5}
    for setting in ("sentences:2, c4", "c4,sentences:2"):
        assert Limits(setting).named == c4 | {"sentences": 2}


@pytest.mark.parametrize("setting, says", [
    ("gofer", "there is no 'gofer'; want gopher"),
    ("xyzzy", "want c4, fineweb, gopher, repetition, or a folder"),
    ("sentences:few", "want a rule and its limit"),
    ("c4:3", "want a rule and its limit"),
])
def test_a_setting_that_cannot_be_is_one_line(tmp_path, setting, says):
    path = tmp_path / "a.txt"
    path.write_text("text")
    for name in ("prepare.py", "corpus.heuristics"):
        done = script(name, path, f"--heuristics={setting}", *([f"--out={tmp_path / 'out'}"] * (name == "prepare.py")))
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr
    assert not (tmp_path / "out").exists()


GERMAN = "Die W\u00fcrde des Menschen ist unantastbar. Sie zu achten ist Verpflichtung aller staatlichen Gewalt.\n" * 6
CHINESE = "\u4eba\u4eba\u751f\u800c\u81ea\u7531\uff0c\u5728\u5c0a\u4e25\u4e0a\u5e73\u7b49\u3002\n"


def test_stop_words_are_asked_of_english_alone():
    limits = Limits("gopher")
    languages = ("en", "eng_Latn", "en-GB", "English", "enm_Latn", "deu_Latn", "")
    asked = [reason(GERMAN, language, limits) for language in languages]
    assert asked == ["stop-words"] * 4 + [None] * 3


def test_words_are_not_asked_of_a_script_without_spaces():
    """Lines of the Universal Declaration: one word by white space, of 14 characters. As many letters are too long."""
    text = "".join(CHINESE.replace("\u751f", chr(0x4e00 + i)) for i in range(20))
    assert reason(text, "zho_Hans", Limits("gopher")) is None
    assert ours("long-words", re.sub(r"[^\n]", "x", text)) == "long-words"
    # What is known of lines is asked, and a Chinese full stop ends one.
    assert ours("punctuation", text) is None and ours("punctuation", text.replace("\u3002", "")) == "punctuation"


@pytest.mark.parametrize("unit", ["a ", "A.", "...", "\n- ", "\u4eba\u3002", "a b c d e f\n", "{", "x"])
def test_hostile_text_takes_linear_time(unit):
    names = RULES.keys()
    seconds = []
    for size in (5_000, 20_000):
        text = unit * (size // len(unit))
        began = time.process_time()
        list(measures(text, names, heuristics.STOP_WORDS))
        seconds.append(time.process_time() - began)
    assert seconds[1] < 12 * seconds[0] + 0.05


def test_prepare_keeps_what_no_set_removes_and_all_code(tmp_path):
    """Of datatrove's verdicts: FineWeb is the four sets, one after the other."""
    pages = [dict(id=seed, text=page(seed), lang="eng_Latn") for seed in range(300)]
    code = [dict(id="code", text="if (a) { b(); }", lang="code")]
    with open(tmp_path / "d.jsonl", "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in pages + code)
    out = tmp_path / "out"
    done = script("prepare.py", tmp_path / "d.jsonl", f"--heuristics={','.join(SETS)}", "--dedup=False",
                  "--tokenizer=byte", f"--out={out}")
    assert done.returncode == 0, done.stderr
    with gzip.open(out / "removed.jsonl.gz", "rt") as lines:
        removed = {row["id"].removeprefix("d.jsonl:"): row["reason"] for row in map(json.loads, lines)}
    sets = [golden()[name] for name in SETS]
    gone = {str(seed) for rules in sets for seeds in rules.values() for seed in seeds if seed < 300}
    assert removed.keys() == gone and 0 < len(gone) < 300
    # The audit has a row for each rule.
    counts = {rule: n for rule, (n, _) in json.loads((out / "report.json").read_text())["total"]["removed"].items()}
    assert counts == Counter(removed.values())
    assert f"| short-lines: {RULES['short-lines'].says} (fineweb) | {counts['short-lines']} |" in (
        (out / "report.md").read_text())
