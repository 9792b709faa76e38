"""
Quality by rules: what three papers found wrong with pages of the web, as one table of measures and limits.

    gopher        too few words, too many symbols, lists, no stop words     Rae et al. 2021, arXiv 2112.11446, A.1.1
    repetition    lines, paragraphs and n-grams that come again             the same, table A1
    c4            lorem ipsum, code, fewer than five sentences              Raffel et al. 2020, arXiv 1910.10683, 2.2
    fineweb       lists of short lines without punctuation                  Penedo et al. 2024, arXiv 2406.17557, 3.6

A page that is beyond one limit goes, and the audit counts it under the name of that rule. FineWeb is all four, one
after the other, as datatrove has them, whose verdicts these are where a word is what stands between white space. By
spaCy's words and sentences, which FineWeb took, 98.5 (c4) to 100 % (fineweb) of 1,473 English pages have the same fate.
Here the rules judge pages and change none: C4 also took single lines out of the pages that it kept.

The limits were chosen for English. FineWeb-2 has its own for 1,929 languages, in a folder with a file for each: where
it is named, a document of these languages meets the rules of FineWeb-2 (no C4) with the limits and the stop words of
its language. Without it stop words are asked of English alone. A script without spaces has no words here: of it only
what is known of lines is asked.

$ python -m corpus.heuristics docs.jsonl                                   # what each rule would take, and quantiles
$ python -m corpus.heuristics docs.jsonl --heuristics=gopher,long-words:14
$ python prepare.py docs.jsonl --heuristics=gopher,repetition,c4,fineweb --out=data/mine
$ git clone https://github.com/huggingface/fineweb-2
$ python prepare.py docs.jsonl --heuristics=gopher,repetition,c4,fineweb,fineweb-2/configs --out=data/mine
"""

import sys

if __name__ == "__main__" and not __package__:
    print("heuristics.py: start it from the project's root, python -m corpus.heuristics", file=sys.stderr)
    sys.exit(2)

import difflib
import glob
import math
import os
import re
from array import array
from collections import Counter, defaultdict, namedtuple
from functools import lru_cache

import numpy as np
import regex

from corpus.dedup import LONG
from engine.files import read_text
from engine.readers import each_document

paths = []                # files and folders of documents, as prepare.py reads them
heuristics = "gopher,repetition,c4,fineweb"     # sets, rules, rule:limit, a folder of FineWeb-2's, with commas
text_field = "text"       # the column or field that holds the text

# The set, the rule, the values with which a page stays, and what the others have.
TABLE = """
gopher     few-words            >= 50      too few words
gopher     many-words           <= 100000  too many words
gopher     short-words          >= 3       words too short on average
gopher     long-words           <= 10      words too long on average
gopher     hashes               <= 0.1     too many # for its words
gopher     ellipses             <= 0.1     too many ellipses for its words
gopher     bullets              <= 0.9     too many lines begin with a bullet
gopher     cut-lines            <= 0.3     too many lines end with an ellipsis
gopher     letters              >= 0.8     too many words without a letter
gopher     stop-words           >= 2       too few stop words of its language
repetition same-paragraphs      <= 0.3     paragraphs that come again
repetition same-paragraph-chars <= 0.2     characters in paragraphs that come again
repetition same-lines           <= 0.3     lines that come again
repetition same-line-chars      <= 0.2     characters in lines that come again
repetition top-2-gram           <= 0.2     characters in one pair of words
repetition top-3-gram           <= 0.18    characters in one run of 3 words
repetition top-4-gram           <= 0.16    characters in one run of 4 words
repetition same-5-grams         <= 0.15    characters in runs of 5 words that come again
repetition same-6-grams         <= 0.14    characters in runs of 6 words that come again
repetition same-7-grams         <= 0.13    characters in runs of 7 words that come again
repetition same-8-grams         <= 0.12    characters in runs of 8 words that come again
repetition same-9-grams         <= 0.11    characters in runs of 9 words that come again
repetition same-10-grams        <= 0.1     characters in runs of 10 words that come again
c4         lorem-ipsum          <= 0       lorem ipsum
c4         curly-brackets       <= 0       a curly bracket
c4         sentences            >= 5       too few sentences
fineweb    punctuation          >= 0.12    too few lines end a sentence
fineweb    short-lines          <= 0.67    too many lines of at most 30 characters
fineweb    same-chars           <= 0.01    too many characters in lines that come again
fineweb    line-breaks          <= 0.3     too many line breaks for its words
"""
Rule = namedtuple("Rule", "source sign limit says")


def read_table():
    """{rule: Rule}, in the order of the table."""
    rules = {}
    for line in TABLE.strip().splitlines():
        source, name, sign, limit, says = line.split(maxsplit=4)
        rules[name] = Rule(source, sign, float(limit), says)
    return rules


RULES = read_table()
# Where no spaces stand between words, nothing is known of words.
OF_WORDS = {"hashes", "ellipses", "letters", "line-breaks"}
OF_WORDS |= {name for name in RULES if "-words" in name or "-gram" in name}
# What FineWeb-2 asks of every language alike, and under which names its files have the limits of one.
OF_FINEWEB2 = {"few-words": 50, "many-words": 100_000, "hashes": 0.1, "ellipses": 0.1, "bullets": 0.9, "cut-lines": 0.3,
               "stop-words": 2, "same-chars": 0.1}
IN_FINEWEB2 = {"same-lines": "dup_line_frac", "short-words": "min_avg_word_length", "long-words": "max_avg_word_length",
               "letters": "max_non_alpha_words_ratio", "punctuation": "line_punct_thr", "line-breaks": "new_line_ratio"}
STOP_WORDS = frozenset("the be to of and that have with".split())
ENGLISH = re.compile(r"en(g|glish)?([_-]|$)", re.I)
# Lines about the page itself, which C4 does not count.
POLICY = re.compile("terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")
# Unicode's sentence terminals, whatever the script: re has no such property.
TERMINAL = regex.compile(r"\p{Sentence_Terminal}")
# A period behind a capital is one of U.S.A. or of J. S. Bach.
SENTENCE = regex.compile(r"(?!(?<=\p{Lu})\.)\p{Sentence_Terminal}+")
UNSPACED = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]")


class Limits:
    """
    What a setting like 'gopher,long-words:14,fineweb-2/configs' asks of a document.

    own: limits of the user. named: {rule: limit} for any language. folder: of FineWeb-2's files, or "". ValueError for
    a name or a limit that is none.
    """

    def __init__(self, setting):
        self.folder = ""
        self.own = {}
        sets = {rule.source for rule in RULES.values()}
        asked = set()
        for part in filter(None, map(str.strip, setting.split(","))):
            name, colon, number = part.partition(":")
            if name in sets | RULES.keys():
                asked.add(name)
            elif limit_files(part):
                self.folder = part
            else:
                near = difflib.get_close_matches(name, [*sets, *RULES], 3, 0.4)
                raise ValueError(f"heuristics: there is no {part!r}; want {', '.join(near or sorted(sets))}, "
                                 "or a folder of FineWeb-2's limits, LANGUAGE.yml")
            if colon and name in asked:
                self.own[name] = own_limit(part, name, number)
        self.named = {name: rule.limit for name, rule in RULES.items() if asked & {name, rule.source}}
        self.named.update(self.own)

    def of(self, language):
        """({rule: limit}, stop words) for a document in this language, "" if it does not say."""
        if self.folder and re.fullmatch(r"\w+", language):
            theirs = fineweb2(f"{self.folder}/{language}.yml")
            if theirs:
                limits, stops = theirs
                return {**limits, **self.own}, stops
        limits = dict(self.named)
        if not ENGLISH.match(language):
            limits.pop("stop-words", None)
        return limits, STOP_WORDS


def limit_files(setting):
    """The files of FineWeb-2's limits, like deu_Latn.yml, in the folders that a setting names."""
    folders = [part.strip() for part in setting.split(",")]
    return [file for folder in folders if folder for file in sorted(glob.glob(f"{glob.escape(folder)}/*_*.yml"))]


@lru_cache(None)
def fineweb2(path):
    """({rule: limit}, stop words) of a file of FineWeb-2's, None where there is none. ValueError if it is another."""
    import yaml
    if not os.path.isfile(path):
        return None
    try:
        said = yaml.safe_load(read_text(path))
        # As in datatrove, a limit of 0 is none.
        limits = {name: float(said[theirs]) for name, theirs in IN_FINEWEB2.items() if said[theirs]}
        limits.update({f"top-{n}-gram": float(share) for n, share in said["top_n_grams"]})
        limits.update({f"same-{n}-grams": float(share) for n, share in said["dup_n_grams"]})
        stops = frozenset(map(str, said["stopwords"]))
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{path} is damaged, or no file of FineWeb-2's limits ({' '.join(str(e).split())})") from None
    return {**OF_FINEWEB2, **limits}, stops


def own_limit(part, name, number):
    """The number behind the colon of a part like few-words:20. ValueError where it is none, or not one rule's."""
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if math.isnan(limit) or name not in RULES:
        raise ValueError(f"heuristics: {part!r}: want a rule and its limit, like few-words:20")
    return limit


def stays(name, value, limit):
    """Whether a page with this value stays by a rule."""
    return value >= limit if RULES[name].sign == ">=" else value <= limit


def reason(text, language, limits):
    """The first rule that a page breaks, or None. text: its first million characters count. limits: Limits."""
    limits, stops = limits.of(language)
    for name, value in measures(text, limits.keys(), stops):
        if not stays(name, value, limits[name]):
            return name
    return None


Page = namedtuple("Page", "text words stops")


def measures(text, names, stops):
    """
    Yield (rule, value) for the rules that are named and that can be asked of a text. stops: the stop words.

    Cheap sets come first, and nothing is computed before it is asked for: most pages that go cost little.
    """
    text = text[:LONG]
    page = Page(text, text.split(), stops)
    if not page.words:
        return
    begin = text[:1000]
    # Where it is a fifth of the characters, a script without spaces has more than half of the words.
    if 5 * len(UNSPACED.findall(begin)) > len(begin):
        names = names - OF_WORDS
    sets = {RULES[name].source for name in names}
    for measure in (fineweb, gopher, c4, repetition):
        if measure.__name__ in sets:
            for name, value in measure(page):
                if name in names:
                    yield name, value


# ----------------------------------------------------------------------------------------------------------------------
# the sets: each yields (rule, value) of a page, in the order in which datatrove looks


def share(holds, parts):
    """The part of `parts` for which holds(part)."""
    return sum(map(holds, parts)) / len(parts)


def fineweb(page):
    text = page.text
    lines = [line for line in text.split("\n") if line.strip()]
    # Of each line the last character.
    ends = "".join(line[-1] for line in lines)
    breaks = text.count("\n")
    _, characters = again(lines)
    yield "punctuation", len(TERMINAL.findall(ends)) / len(lines)
    yield "short-lines", share(lambda line: len(line) <= 30, lines)
    yield "same-chars", characters / (len(text) - breaks)
    yield "line-breaks", breaks / len(page.words)


def gopher(page):
    text, words = page.text, page.words
    # A dash between two words is none.
    plain = [word for word in words if has(str.isalnum, word)]
    yield "few-words", len(plain)
    yield "many-words", len(plain)
    length = sum(map(len, plain)) / max(len(plain), 1)
    yield "short-words", length
    yield "long-words", length
    yield "hashes", text.count("#") / len(words)
    ellipses = text.count("...") + text.count("\u2026")
    yield "ellipses", ellipses / len(words)
    lines = text.splitlines()
    yield "bullets", share(lambda line: line.lstrip().startswith(("\u2022", "-")), lines)
    yield "cut-lines", share(lambda line: line.rstrip().endswith(("...", "\u2026")), lines)
    yield "letters", share(lambda word: has(str.isalpha, word), words)
    yield "stop-words", len(page.stops.intersection(words))


def has(kind, word):
    """Whether a word has a character of a kind. Most words are of that kind from end to end, which is soon known."""
    return kind(word) or any(map(kind, word))


def c4(page):
    lorem = curly = sentences = 0
    for line in page.text.splitlines():
        words = line.split()
        # Counted are lines of three words at least, none of which has more than a thousand characters.
        if len(words) < 3 or len(max(words, key=len)) > 1000:
            continue
        lower = line.lower()
        lorem += "lorem ipsum" in lower
        if "javascript" in lower:
            continue
        curly += "{" in line
        if not POLICY.search(lower):
            sentences += max(1, len(SENTENCE.findall(line)))
    yield "lorem-ipsum", lorem
    yield "curly-brackets", curly
    yield "sentences", sentences


def repetition(page):
    text = page.text
    paragraphs = re.split(r"\n{2,}", text.strip())
    lines = re.split(r"\n+", text)
    for name, parts in (("paragraph", paragraphs), ("line", lines)):
        n, characters = again(parts)
        yield f"same-{name}s", n / len(parts)
        yield f"same-{name}-chars", characters / len(text)
    for name, characters in runs(page.words):
        yield name, characters / len(text)


def again(parts):
    """How many parts of a text stood there before, and their characters."""
    once = set(parts)
    characters = sum(map(len, parts)) - sum(map(len, once))
    return len(parts) - len(once), characters


def runs(words):
    """
    Yield (rule, characters) of runs of n words: for n = 2, 3, 4 those of the most frequent one, with its spaces; for
    n = 5 to 10 those of all that come again, none counted twice.

    A run can come again only where its first and its last n - 1 words do. So each n looks only at what the n before
    has left, which is little, and the words are made numbers once.
    """
    table = {}
    numbered = map(table.setdefault, words, range(len(words)))
    ids = np.fromiter(numbered, np.int64, len(words))   # (N,) where an equal word stood first
    ends = np.cumsum([0, *map(len, words)])             # (N + 1,) characters before each word
    equal = ids.copy()                                  # (N,) where a run equal to the one there began first
    at = np.arange(len(words))                          # (M,) where runs begin that may come again
    for n in range(2, min(len(words), 10) + 1):
        candidate = np.zeros(len(words) + 1, bool)
        candidate[at] = True
        at = at[candidate[at + 1]]
        at = at[at + n <= len(words)]
        # The run of n - 1 words and the word behind it, as one number.
        keys = equal[at] * len(words) + ids[at + n - 1]
        _, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        equal[at] = at[first[inverse]]
        if n < 5:
            # Where no run comes again, datatrove takes the first.
            most = counts.max(initial=1)
            begin = at[first[counts == most].min()] if most > 1 else 0
            length = ends[begin + n] - ends[begin] + n - 1
            yield f"top-{n}-gram", most * length
        at = at[counts[inverse] > 1]
        if n > 4:
            yield f"same-{n}-grams", covered(at, equal, ends, n)


def covered(at, equal, ends, n):
    """The characters of runs that stood there before, read from left to right: what overlaps such a run begins none."""
    seen = set()
    free = characters = 0
    for i, run in zip(at.tolist(), equal[at].tolist()):
        if i < free:
            continue
        if run in seen:
            characters += ends[i + n] - ends[i]
            free = i + n
        seen.add(run)
    return characters


# ----------------------------------------------------------------------------------------------------------------------
# the command


def main():
    if not paths:
        raise ValueError("name files of documents: python -m corpus.heuristics docs.jsonl")
    asked = Limits(heuristics)
    values = defaultdict(lambda: array("d"))
    goes = Counter()
    for doc in each_document(paths, text_field):
        language = str(doc.get("language") or "")
        goes[reason(doc["text"], language, asked)] += 1
        limits, stops = asked.of(language)
        for name, value in measures(doc["text"], limits.keys(), stops):
            values[name].extend((value, limits[name]))
    if not goes:
        raise ValueError(f"no text in {', '.join(paths)}")
    print_table(values, goes)


def print_table(values, goes):
    """
    A line for each rule.

    values: {rule: array of what was measured and its limit, by turns}. goes: how many documents a rule takes that those
    before it have left; None is the rule of those that stay.
    """
    total = goes.total()
    print(f"{'rule':22}{'stays if':>16}{'goes':>9}{'goes first':>12}{'1 %':>10}{'50 %':>10}{'99 %':>10}")
    for name in filter(values.__contains__, RULES):
        measured, limits = np.reshape(values[name], (-1, 2)).T
        bad = np.sum(~stays(name, measured, limits))
        low, high = limits.min(), limits.max()
        # Each language may have its own.
        asked = f"{RULES[name].sign} {low:g}" + (f"..{high:g}" if low < high else "")
        quantiles = np.quantile(measured, (0.01, 0.5, 0.99))
        line = f"{name:22}{asked:>16}{bad / total:9.1%}{goes[name] / total:12.1%}"
        print(line + "".join(f"{quantile:10.4g}" for quantile in quantiles))
    print(f"{goes[None]:,} of {total:,} documents stay")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
