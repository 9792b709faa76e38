"""
Rules that select documents. A document is removed by the first rule that it breaks.

Columns. Published corpora come with columns of scores, made by classifiers on the embeddings of a language model.
Apertus selected by them (report, arXiv 2509.14233, sec. 3):

    quality    keep the top 33 % (later 10 %) of a language (Apertus estimates the threshold on 1M documents)
    toxicity   remove the top 5 % of a language; without a score, remove 5 % at random
    others     lists of licences and languages, bounds on the length, a random share of each language

Heuristics. Three papers describe bad web pages by limits on simple statistics:

    gopher        too few words, too many symbols, lists, no stop words     Rae et al. 2021, arXiv 2112.11446, A.1.1
    repetition    repeated lines, paragraphs and n-grams                    the same, table A1
    c4            lorem ipsum, code, fewer than five sentences              Raffel et al. 2020, arXiv 1910.10683, 2.2
    fineweb       lists of short lines without punctuation                  Penedo et al. 2024, arXiv 2406.17557, 3.6

FineWeb applies all four. The verdicts are those of its program, datatrove, with words split at white space. (FineWeb
used spaCy's words and sentences: on 1,473 English pages 98.5 % of the verdicts of c4 and all of fineweb's agree.) C4
also deletes single lines; here a page is kept or removed as a whole.

The limits were chosen for English. FineWeb-2 has limits for 1,929 languages, one file each. If you name its folder, the
rules of FineWeb-2 (without C4) apply to a document in one of these languages, with its limits and stop words. The
English limits apply to all other documents, and only English ones must have English stop words. The rules about words
do not apply to scripts without spaces, such as Chinese.

$ python prepare.py docs.jsonl --heuristics=gopher,repetition,c4,fineweb --out=data/mine
$ python prepare.py docs.jsonl --heuristics=gopher,long-words:14 --out=data/mine
$ git clone https://github.com/huggingface/fineweb-2
$ python prepare.py docs.jsonl --heuristics=gopher,repetition,c4,fineweb,fineweb-2/configs --out=data/mine
"""

import glob
import math
import re
import runpy
from array import array
from functools import lru_cache
from hashlib import blake2b
from operator import ge, lt

import numpy as np
import regex

from engine.files import read_text
from engine.readers import in_one_line

# Set; rule; the sign and limit that an English page must meet; the limit of FineWeb-2, or its key in the file of a
# language; the fault of pages that break the rule.
TABLE = """
column     license              -  -       -         licence not on the list
column     language             -  -       -         language not on the list
column     length               -  -       -         too short or too long
column     score                -  -       -         below the top share of its language
column     above                -  -       -         above the threshold of its language (toxicity)
column     rate                 -  -       -         not drawn (random share)
fineweb    punctuation          >= 0.12    line_punct_thr              too few lines end a sentence
fineweb    short-lines          <= 0.67    -         too many lines of at most 30 characters
fineweb    same-chars           <= 0.01    0.1       too many characters in repeated lines
fineweb    line-breaks          <= 0.3     new_line_ratio              too many line breaks for its words
gopher     few-words            >= 50      50        too few words
gopher     many-words           <= 100000  100000    too many words
gopher     short-words          >= 3       min_avg_word_length         words too short on average
gopher     long-words           <= 10      max_avg_word_length         words too long on average
gopher     hashes               <= 0.1     0.1       too many # for its words
gopher     ellipses             <= 0.1     0.1       too many ellipses for its words
gopher     bullets              <= 0.9     0.9       too many lines begin with a bullet
gopher     cut-lines            <= 0.3     0.3       too many lines end with an ellipsis
gopher     letters              >= 0.8     max_non_alpha_words_ratio   too many words without a letter
gopher     stop-words           >= 2       2         too few stop words of its language
c4         lorem-ipsum          <= 0       -         lorem ipsum
c4         curly-brackets       <= 0       -         a curly bracket
c4         sentences            >= 5       -         too few sentences
repetition same-paragraphs      <= 0.3     -         repeated paragraphs
repetition same-paragraph-chars <= 0.2     -         characters in repeated paragraphs
repetition same-lines           <= 0.3     dup_line_frac               repeated lines
repetition same-line-chars      <= 0.2     -         characters in repeated lines
repetition top-2-gram           <= 0.2     -         characters in one pair of words
repetition top-3-gram           <= 0.18    -         characters in one run of 3 words
repetition top-4-gram           <= 0.16    -         characters in one run of 4 words
repetition same-5-grams         <= 0.15    -         characters in repeated runs of 5 words
repetition same-6-grams         <= 0.14    -         characters in repeated runs of 6 words
repetition same-7-grams         <= 0.13    -         characters in repeated runs of 7 words
repetition same-8-grams         <= 0.12    -         characters in repeated runs of 8 words
repetition same-9-grams         <= 0.11    -         characters in repeated runs of 9 words
repetition same-10-grams        <= 0.1     -         characters in repeated runs of 10 words
"""
ROWS = [line.split(maxsplit=5) for line in TABLE.strip().splitlines()]
# {reason: its text in the report}
RULES = {name: f"{says} ({source})" for source, name, *_, says in ROWS}
# {rule: (set, sign, limit)}
HEURISTICS = {name: (source, sign, float(limit)) for source, name, sign, limit, *_ in ROWS if sign != "-"}
FINEWEB2 = {name: theirs for _, name, _, _, theirs, _ in ROWS if theirs != "-"}


# ----------------------------------------------------------------------------------------------------------------------
# columns


def broken(doc, licenses=None, languages=None, min_chars=0, max_chars=0, top=None, below=None, rate=None, seed=42):
    """
    The reason of the first rule about columns that a document breaks, or None. Only rules that you ask for apply.

    licenses, languages: allowlists. min_chars, max_chars: bounds on the text; 0 means no bound. top = (field,
    thresholds): keep field >= threshold. below = (field, thresholds): keep field < threshold. rate: the share to keep
    at random. thresholds and rate: a number, or {language: number, "*": any other}; a language without an entry has no
    rule. A null breaks top and not below, NaN breaks both. ValueError if a column is missing.
    """
    if licenses is not None and column(doc, "license") not in licenses:
        return "license"
    if languages is not None and column(doc, "language or lang") not in languages:
        return "language"
    if (min_chars or max_chars) and not min_chars <= len(doc["text"]) <= (max_chars or math.inf):
        return "length"
    if top and not meets(doc, as_number(doc, top[0]), ge, top[1]):
        return "score"
    if below and not meets(doc, as_number(doc, below[0]), lt, below[1]):
        return "above"
    if rate is not None and not meets(doc, uniform(doc["id"], seed), lt, rate):
        return "rate"
    return None


def meets(doc, value, compare, limit):
    """Whether the value of a document is ge or lt its limit, a number or {language: number}; true without a limit."""
    if isinstance(limit, dict):
        limit = limit.get(column(doc, "language or lang") or "", limit.get("*"))
    # Every comparison with NaN is false, so NaN breaks both rules.
    return limit is None or compare(-math.inf if value is None else value, limit)


def column(doc, names):
    """The value of a column of a document. names: "this or that", the first counts. ValueError if all are missing."""
    for name in names.split(" or "):
        if name in doc:
            return doc[name]
    raise ValueError(f"no column {names} in the data; it has {', '.join(doc)}; --default_language and "
                     "--default_license fill in missing ones")


def uniform(key, seed):
    """A number in [0, 1) that depends on key and seed alone, so the order of the documents does not matter."""
    return int.from_bytes(blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()) / 2**64


def as_number(doc, field):
    """The value of a column as a float; null and "" are None. ValueError if it is not a number."""
    value = column(doc, field)
    try:
        return None if value in (None, "") else float(value)
    except Exception:                                      # also of 10**400
        raise ValueError(f"column {field}: {str(value)[:60]!r} where a number was expected") from None


def listed(text):
    """'mit,cc0' -> a set; '' -> None, no rule."""
    return {part.strip() for part in text.split(",")} - {""} if text else None


# A part of a list, without the slash that a shell adds to a folder.
PART = re.compile(r"([^,\s](?:[^,]*[^,\s/])?)/*")


def by_language(name, text, share=False):
    """'0.3' -> 0.3; 'deu_Latn:1,*:0.3' -> a dict; '' -> None, no rule. ValueError with the setting's name otherwise."""
    try:
        pairs = [part.rpartition(":") for part in PART.findall(text)]
        values = {language.strip(): float(value) for language, _, value in pairs}
        if "" in values and len(pairs) > 1 or share and not all(0 <= value <= 1 for value in values.values()):
            raise ValueError
    except ValueError:
        raise ValueError(f"{name}={text!r}: want a number{', 0 to 1' * share}, or numbers by language: "
                         "deu_Latn:0.9,*:0.3") from None
    return values.get("", values) if values else None


# Remove P(toxic) at or above these, about 5 % of each language (report sec. 3; the numbers: swiss-ai/pretrain-data).
# Languages as in FineWeb-2.
TOXICITY = {
    "eng_Latn": 0.99944, "deu_Latn": 0.9977, "fra_Latn": 0.9994, "pol_Latn": 0.9867, "por_Latn": 0.9476,
    "spa_Latn": 0.9953, "ita_Latn": 0.9985, "cmn_Hani": 0.5954, "nld_Latn": 0.9883,
}


def top_thresholds(rows, share):
    """
    {language: threshold}: the top share of a language has scores >= its threshold (report sec. 3).

    rows: (language, score), 8 bytes each in memory. Shares are rounded up and ties stay, so no language is lost.
    ValueError for a share that is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share {share}: want the part to keep, above 0 and at most 1 (Apertus: 0.33, then 0.10)")
    scores_of = {}
    for language, score in rows:
        scores_of.setdefault(language, array("d")).append(score)
    # 1e-9: 0.07 of 100 documents are 7, although the product is 7.000000000000001.
    return {language: float(np.sort(scores)[-math.ceil(share * len(scores) - 1e-9)])
            for language, scores in scores_of.items()}


def score_function(path):
    """
    The function score(text) -> float of a user's file, for --score=FILE.py. This runs the file.

    ValueError if the file is missing; score(text) raises one if there is no such function, or its result is no number.
    """
    def run(work, *args):
        # Any error in the user's file becomes one line.
        try:
            return work(*args)
        except (Exception, SystemExit) as e:
            raise ValueError(f"--score={path}: {type(e).__name__}: {e}") from None

    score = run(runpy.run_path, path).get("score")
    return lambda text: run(float, run(score, text))


# ----------------------------------------------------------------------------------------------------------------------
# heuristics: which limits apply to a document


STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
NUMBER = re.compile(r"[-+]?[\d._]+(e[-+]?\d+)?|inf", re.I)
LONG = 1_000_000            # characters of a text that count
ENGLISH = re.compile(r"en(g|glish)?([_-]|$)", re.I)


def beyond(spec, doc):
    """
    The first rule that a document breaks, or None: fast sets first, each in datatrove's order.

    spec: sets, rules, rules with a limit, and a folder of FineWeb-2's limits: 'gopher,long-words:14,fineweb-2/configs'.
    ValueError for an unknown name or limit, or a damaged file in the folder.

    Most removed pages break an early rule, so that the later values are never computed. Only the first million
    characters of a text count. Documents of language "code" break no rule.
    """
    language = str(doc.get("language") or "")
    limits, stops = limits_of(spec, language)
    if not limits or language == "code":
        return None
    text = doc["text"][:LONG]
    words, begin = text.split(), text[:1000]
    # If a fifth of the characters are of a script without spaces, more than half of the words are.
    if 5 * len(UNSPACED.findall(begin)) > len(begin):
        limits = {name: limit for name, limit in limits.items() if name not in OF_WORDS}
    sources = {HEURISTICS[name][0] for name in limits} if words else ()
    for source, measures in SETS.items():
        for name, value in measures(text, words, stops) if source in sources else ():
            low = HEURISTICS[name][1] == ">="
            if name in limits and (value < limits[name] if low else value > limits[name]):
                return name
    return None


@lru_cache(2_000)           # about the number of languages of FineWeb-2
def limits_of(spec, language):
    """({rule: limit}, stop words) for documents of a language, "" if it is unknown. ValueError: see beyond()."""
    limits, own, theirs = {}, {}, None
    for part in PART.findall(spec):
        name, _, number = part.partition(":")
        rules = {rule: limit for rule, (source, _, limit) in HEURISTICS.items() if part in (rule, source)}
        limits |= rules
        if name in HEURISTICS and NUMBER.fullmatch(number):
            own[name] = float(number)
        elif files := limit_files(part):
            path = f"{part}/{language}.yml"
            theirs = path in files and fineweb2(path)
        elif not rules:
            raise ValueError(f"heuristics: there is no {part!r}; want {', '.join([*SETS, *HEURISTICS])}, one of these "
                             "with a limit, like few-words:20, or a folder of FineWeb-2's limits, LANGUAGE.yml")
    limits, stops = theirs or (limits, STOP_WORDS)
    limits |= own
    if not theirs and not ENGLISH.match(language):
        limits.pop("stop-words", None)
    return limits, stops


def limit_files(spec):
    """The files of FineWeb-2's limits, such as deu_Latn.yml, in the folders that a setting names."""
    patterns = [f"{glob.escape(part)}/*_*.yml" for part in PART.findall(spec)]
    return [file for pattern in patterns for file in sorted(glob.glob(pattern))]


def fineweb2(path):
    """({rule: limit}, stop words) in a file of FineWeb-2's limits. ValueError if it has another form."""
    import yaml
    with in_one_line(path):
        said = dict(yaml.safe_load(read_text(path)))
        # As in datatrove, 0 means no limit.
        limits = {name: float(said.get(key, key)) for name, key in FINEWEB2.items() if said.get(key, key)}
        for n, share in said["top_n_grams"] + said["dup_n_grams"]:
            limits[f"top-{n}-gram" if n < 5 else f"same-{n}-grams"] = float(share)
        return limits, frozenset(map(str, said["stopwords"]))


# ----------------------------------------------------------------------------------------------------------------------
# heuristics: the statistics of a text


UNSPACED = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]")
# Rules about words, which do not apply to a script without spaces.
OF_WORDS = {name for name in HEURISTICS if re.search("-words|-gram|hashes|ellipses|letters|line-breaks", name)}


def fineweb(text, words, stops):
    lines = [line for line in text.split("\n") if line.strip()]
    breaks = text.count("\n")
    yield "punctuation", len(TERMINAL.findall("".join(line[-1] for line in lines))) / len(lines)
    yield "short-lines", sum(len(line) <= 30 for line in lines) / len(lines)
    yield "same-chars", repeated(lines)[1] / (len(text) - breaks)
    yield "line-breaks", breaks / len(words)


def gopher(text, words, stops):
    # A dash between two words is not a word.
    plain = [word for word in words if word.isalnum() or any(map(str.isalnum, word))]
    yield "few-words", len(plain)
    yield "many-words", len(plain)
    length = sum(map(len, plain)) / max(len(plain), 1)
    yield "short-words", length
    yield "long-words", length
    yield "hashes", text.count("#") / len(words)
    yield "ellipses", (text.count("...") + text.count("\u2026")) / len(words)
    lines = text.splitlines()
    yield "bullets", sum(line.lstrip().startswith(("\u2022", "-")) for line in lines) / len(lines)
    yield "cut-lines", sum(line.rstrip().endswith(("...", "\u2026")) for line in lines) / len(lines)
    yield "letters", sum(word.isalpha() or any(map(str.isalpha, word)) for word in words) / len(words)
    yield "stop-words", len(stops.intersection(words))


# Lines about the site itself: C4 does not count their sentences.
POLICY = re.compile("terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")
# Unicode's sentence terminals of all scripts: re has no such property.
TERMINAL = regex.compile(r"\p{Sentence_Terminal}")
# A period after a capital is part of an abbreviation: U.S.A., J. S. Bach.
SENTENCE = regex.compile(r"(?!(?<=\p{Lu})\.)\p{Sentence_Terminal}+")


def c4(text, words, stops):
    lorem = curly = sentences = 0
    for line in text.splitlines():
        words = line.split()
        # Lines of fewer than three words, or with a word of more than a thousand characters, do not count.
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


def repetition(text, words, stops):
    for name, parts in (("paragraph", re.split(r"\n{2,}", text.strip())), ("line", re.split(r"\n+", text))):
        n, characters = repeated(parts)
        yield f"same-{name}s", n / len(parts)
        yield f"same-{name}-chars", characters / len(text)
    for name, characters in runs(words):
        yield name, characters / len(text)


def repeated(parts):
    """How many parts of a text are equal to an earlier part, and their characters."""
    once = set(parts)
    characters = sum(map(len, parts)) - sum(map(len, once))
    return len(parts) - len(once), characters


def runs(words):
    """
    Yield (rule, characters) for runs of n words. n = 2, 3, 4: the characters of the most frequent run, each time it
    occurs, spaces included. n = 5 to 10: those of all repeated runs, none counted twice.
    """
    table = {}
    size = len(words)
    ids = np.array([*map(table.setdefault, words, range(size))])    # (N,) where each word occurs first
    ends = np.cumsum([0, *map(len, words)])                         # (N + 1,) characters before each word
    equal = ids                                                     # (N - n + 1,) where each run begins first
    for n in range(2, min(size, 10) + 1):
        # The run of n - 1 words and the word after it, as one number.
        keys = equal[:size - n + 1] * size + ids[n - 1:]
        _, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        equal = first[inverse]
        if n < 5:
            # Like datatrove, take the first of equally frequent runs.
            most = counts.max()
            begin = first[counts == most].min()
            length = ends[begin + n] - ends[begin] + n - 1
            yield f"top-{n}-gram", most * length
            continue
        # From left to right; a run that overlaps a repeated one does not count.
        seen = set()
        free = characters = 0
        again = np.flatnonzero(counts[inverse] > 1)
        for i, run in zip(again.tolist(), equal[again].tolist()):
            if i < free:
                continue
            if run in seen:
                characters += ends[i + n] - ends[i]
                free = i + n
            seen.add(run)
        yield f"same-{n}-grams", characters


SETS = dict(fineweb=fineweb, gopher=gopher, c4=c4, repetition=repetition)
