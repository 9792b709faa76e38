"""
The rules of Gopher, C4 and FineWeb against datatrove's filters, whose words were taken by white space.

golden/heuristics.json: {set: {rule: [seeds]}}, which of page(0) to page(PAGES - 1) datatrove 0.10.1 removes, and why.
Where datatrove is installed it is asked again, about the same pages and about real ones.
"""
import gzip
import json
import os
import random
import re
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import prepare
from conftest import ROOT, script
from corpus import heuristics
from corpus.heuristics import RULES, Limits, measures, reason, stays

# What datatrove calls the rule.
NAMES = {
    "gopher_short_doc": "few-words",
    "gopher_long_doc": "many-words",
    "gopher_below_avg_threshold": "short-words",
    "gopher_above_avg_threshold": "long-words",
    "gopher_too_many_hashes": "hashes",
    "gopher_too_many_ellipsis": "ellipses",
    "gopher_too_many_bullets": "bullets",
    "gopher_too_many_end_ellipsis": "cut-lines",
    "gopher_below_alpha_threshold": "letters",
    "gopher_enough_stop_words": "stop-words",
    "dup_para_frac": "same-paragraphs",
    "dup_para_char_frac": "same-paragraph-chars",
    "dup_line_frac": "same-lines",
    "dup_line_char_frac": "same-line-chars",
    **{f"top_{n}_gram": f"top-{n}-gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"same-{n}-grams" for n in range(5, 11)},
    "lorem_ipsum": "lorem-ipsum",
    "curly_bracket": "curly-brackets",
    "too_few_sentences": "sentences",
    "line_punct_ratio": "punctuation",
    "short_line_ratio": "short-lines",
    "char_dup_ratio": "same-chars",
    "list_ratio": "line-breaks",
}
PAGES = 1500
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
    with open(os.path.join(ROOT, "tests", "golden", "heuristics.json"), encoding="utf-8") as f:
        return json.load(f)


def by_rule(verdict, pages=PAGES):
    """{rule: [seeds]} of the pages that go by a verdict, a function of the text."""
    gone = {}
    for seed in range(pages):
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


@pytest.fixture
def datatrove(monkeypatch):
    """{set: text -> the name of our rule, or None} by datatrove's own filters, and those with LIMITS as fineweb2."""
    pytest.importorskip("datatrove")
    from datatrove.data import Document
    from datatrove.pipeline.filters import c4_filters, fineweb_quality_filter
    from datatrove.pipeline.filters import gopher_quality_filter, gopher_repetition_filter
    from datatrove.utils.word_tokenizers import WhitespaceTokenizer
    tokenizer = WhitespaceTokenizer()

    def sentences(text, language=None):
        # As split_into_parts cuts them; a text without an end of a sentence is one.
        return list(tokenizer.span_tokenize(text)) or [text]

    for module in (gopher_quality_filter, gopher_repetition_filter, fineweb_quality_filter):
        monkeypatch.setattr(module, "split_into_words", lambda text, language=None: text.split())
    monkeypatch.setattr(c4_filters, "split_into_sentences", sentences)
    filters = (
        gopher_quality_filter.GopherQualityFilter(),
        gopher_repetition_filter.GopherRepetitionFilter(),
        # As FineWeb ran it; and citations stay, since we change no page.
        c4_filters.C4QualityFilter(filter_no_terminal_punct=False, remove_citations=False),
        fineweb_quality_filter.FineWebQualityFilter(),
    )

    def asked(one):
        def verdict(text):
            said = one.filter(Document(text=text, id=""))
            return None if said is True else NAMES[said[1]]
        return verdict

    # As FineWeb-2's pipeline passes them on.
    limits = yaml.safe_load(LIMITS)
    shared = ("max_avg_word_length", "min_avg_word_length", "max_non_alpha_words_ratio")
    fineweb2 = (
        gopher_repetition_filter.GopherRepetitionFilter(
            dup_para_frac=0, dup_line_char_frac=0, dup_para_char_frac=0, dup_line_frac=limits["dup_line_frac"],
            top_n_grams=limits["top_n_grams"], dup_n_grams=limits["dup_n_grams"]),
        fineweb_quality_filter.FineWebQualityFilter(
            short_line_thr=999, char_duplicates_ratio=0.1, line_punct_thr=limits["line_punct_thr"],
            new_line_ratio=limits["new_line_ratio"]),
        gopher_quality_filter.GopherQualityFilter(
            stop_words=limits["stopwords"], **{name: limits[name] for name in shared}),
    )
    return {**dict(zip(SETS, map(asked, filters))), "fineweb2": list(map(asked, fineweb2))}


def test_the_golden_file_is_what_datatrove_says(datatrove):
    """The first 200 pages: all of them take seconds."""
    for name in SETS:
        verdict = datatrove[name]
        said = {rule: [seed for seed in seeds if seed < 200] for rule, seeds in golden()[name].items()}
        assert by_rule(verdict, 200) == {rule: seeds for rule, seeds in said.items() if seeds}


@pytest.mark.parametrize("name", ["us_speeches", "pydocs_ita_Latn", "gesetze_de"])
def test_the_verdicts_about_real_pages_are_those_of_datatrove(name, datatrove):
    path = Path(ROOT, "..", "shared", "data", f"{name}.jsonl")
    if not path.is_file():
        pytest.skip("shared/data is not there")
    with open(path, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines][:60]
    # datatrove's C4 takes a second a megabyte.
    texts = [text for text in texts if len(text) < 30_000]
    assert len(texts) > 20
    for kind in SETS:
        assert [ours(kind, text) for text in texts] == list(map(datatrove[kind], texts))


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


def test_the_golden_verdicts_of_fineweb_2_are_what_datatrove_says(datatrove):
    """The first 200 pages."""
    got = {}
    for verdict in datatrove["fineweb2"]:
        got.update(by_rule(verdict, 200))
    said = {rule: [seed for seed in seeds if seed < 200] for rule, seeds in golden()["fineweb2"].items()}
    assert got == {rule: seeds for rule, seeds in said.items() if seeds}


def test_a_language_without_a_file_meets_what_else_is_named(folder):
    limits = Limits(f"c4,sentences:2,{folder}")
    assert limits.of("deu_Latn")[0] == {"lorem-ipsum": 0, "curly-brackets": 0, "sentences": 2}
    own, stops = limits.of("xyz_Latn")
    # One's own limit holds everywhere.
    assert own["sentences"] == 2 and "curly-brackets" not in own and own["long-words"] == 6
    assert stops == {"the", "in", "\u00e9t\u00e9"}
    # A language is no path.
    assert limits.of("../configs/xyz_Latn") == limits.of("deu_Latn")


@pytest.mark.parametrize("line, zero", [
    ("dup_line_frac: 0.25", "same-lines"), ("max_avg_word_length: 6", "long-words")])
def test_a_limit_of_0_is_none_as_in_datatrove(folder, line, zero):
    Path(folder, "abc_Latn.yml").write_text(LIMITS.replace(line, line.split()[0] + " 0"), encoding="utf-8")
    limits = Limits(folder)
    assert limits.of("xyz_Latn")[0].keys() - limits.of("abc_Latn")[0].keys() == {zero}


def test_a_run_does_not_go_on_with_other_limits(folder, monkeypatch):
    """What prepare.py goes on by are the files that it names, and a changed one is another input."""
    monkeypatch.setattr(prepare, "sha256", lambda path: seen.append(str(path)) or "")
    seen = []
    monkeypatch.setattr(prepare, "heuristics", f"c4, {folder}")
    monkeypatch.setattr(prepare, "standard_library", list)
    prepare.survey([], f"{folder}/work", f"{folder}/data")
    assert os.path.join(folder, "xyz_Latn.yml") in seen


@pytest.mark.parametrize("damage", ["stopwords: 3", "line_punct_thr: much", "]["])
def test_a_damaged_file_of_limits_is_one_line(folder, tmp_path, damage):
    Path(folder, "bad_Latn.yml").write_text(f"{LIMITS}\n{damage}", encoding="utf-8")
    (tmp_path / "d.jsonl").write_text(json.dumps(dict(text="a b", lang="bad_Latn")))
    done = script("prepare.py", tmp_path / "d.jsonl", f"--heuristics={folder}", f"--out={tmp_path / 'out'}")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "bad_Latn.yml is damaged, or no file of" in done.stderr.splitlines()[-1]


# ----------------------------------------------------------------------------------------------------------------------
# what is ours


def test_the_limits_are_those_of_the_papers():
    """Gopher, A.1.1 and table A1; FineWeb, 3.6 and its published pipeline; C4, 2.2."""
    limits = {name: rule.limit for name, rule in RULES.items()}
    assert [limits[f"same-{n}-grams"] for n in range(5, 11)] == [0.15, 0.14, 0.13, 0.12, 0.11, 0.10]
    assert [limits[f"top-{n}-gram"] for n in (2, 3, 4)] == [0.20, 0.18, 0.16]
    assert (limits["few-words"], limits["many-words"], limits["sentences"]) == (50, 100_000, 5)


def test_a_page_of_too_many_words():
    text = "word and the " * 40_000
    assert ours("gopher", text) == "many-words" and ours("gopher", text[:1_000]) is None


@pytest.mark.parametrize("setting, want", [
    ("", {}),
    ("c4", {"lorem-ipsum": 0, "curly-brackets": 0, "sentences": 5}),
    ("sentences", {"sentences": 5}),
    # One's own limit stays, wherever it stands.
    ("sentences:2, c4", {"lorem-ipsum": 0, "curly-brackets": 0, "sentences": 2}),
    ("c4,sentences:2", {"lorem-ipsum": 0, "curly-brackets": 0, "sentences": 2}),
])
def test_sets_and_rules_and_limits_of_ones_own(setting, want):
    assert Limits(setting).named == want


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


def test_a_long_text_is_judged_by_its_first_million_characters():
    good = " ".join(f"word{i} and the" for i in range(20_000)) + "\n"
    assert len(good) < heuristics.LONG
    assert ours("curly-brackets", good + "a { b") == "curly-brackets"
    assert ours("curly-brackets", good + " " * heuristics.LONG + "a { b") is None
    assert ours("gopher,repetition,c4,fineweb", " " * heuristics.LONG + "a { b") is None


def test_the_command_shows_what_each_rule_takes(tmp_path):
    """A line a rule: the share that it takes by itself, the share that is its by the order, and what stays."""
    with open(tmp_path / "d.jsonl", "w", encoding="utf-8") as f:
        f.writelines(json.dumps(dict(text=page(seed), lang="eng_Latn")) + "\n" for seed in range(200))
    said = script("corpus.heuristics", tmp_path / "d.jsonl", "--heuristics=c4").stdout.splitlines()
    gone = {rule: sum(seed < 200 for seed in seeds) for rule, seeds in golden()["c4"].items()}
    for line, rule in zip(said[1:], ("lorem-ipsum", "curly-brackets", "sentences"), strict=False):
        name, _, _, alone, first, *quantiles = line.split()
        assert name == rule and first == f"{gone[rule] / 200:.1%}" and len(quantiles) == 3
        assert float(alone[:-1]) >= float(first[:-1])
    assert said[-1] == f"{200 - sum(gone.values())} of 200 documents stay"


@pytest.mark.parametrize("unit", ["a ", "A.", "...", "\n- ", "\u4eba\u3002", "a b c d e f\n", "{", "x"])
def test_hostile_text_takes_linear_time(unit):
    names = RULES.keys()
    seconds = []
    for size in (10_000, 40_000):
        text = unit * (size // len(unit))
        began = time.process_time()
        list(measures(text, names, heuristics.STOP_WORDS))
        seconds.append(time.process_time() - began)
    assert seconds[1] < 12 * seconds[0] + 0.05


def test_prepare_keeps_what_no_set_removes_and_all_code(tmp_path):
    """Of datatrove's verdicts: FineWeb is the four sets, one after the other."""
    pages = [dict(id=seed, text=page(seed), lang="eng_Latn") for seed in range(400)]
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
    gone = {str(seed) for rules in sets for seeds in rules.values() for seed in seeds if seed < 400}
    assert removed.keys() == gone and 0 < len(gone) < 400
    # The audit has a row for each rule.
    counts = {rule: n for rule, (n, _) in json.loads((out / "report.json").read_text())["total"]["removed"].items()}
    assert counts == Counter(removed.values())
    assert f"| short-lines: {RULES['short-lines'].says} (fineweb) | {counts['short-lines']} |" in (
        (out / "report.md").read_text())
