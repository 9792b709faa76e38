"""
Rules that select documents by their columns. A document is removed by the first rule that it breaks.

Published corpora come with columns of scores, made by classifiers on the embeddings of a language model. Apertus
selected by them (report, arXiv 2509.14233, sec. 3):

    quality    keep the top 33 % (later 10 %) of a language (Apertus estimates the threshold on 1M documents)
    toxicity   remove the top 5 % of a language
    others     lists of licences and languages

Rules about the text itself (Gopher, C4, FineWeb) are datatrove's: docs/data.md shows how to run them first.

$ python prepare.py pages.parquet --keep_licenses=cc0,mit --keep_languages=deu_Latn,fra_Latn --out=data/mine
$ python prepare.py pages.parquet --score_field=score --keep_top=0.1 --max_field=toxicity --out=data/mine
"""

import math
from array import array
from operator import ge, lt

import numpy as np

# {reason: its text in the report}
RULES = {
    "license": "licence not on the list",
    "language": "language not on the list",
    "score": "below the top share of its language",
    "above": "above the threshold of its language (toxicity)",
}
# Remove P(toxic) at or above these, about 5 % of each language (report sec. 3; the numbers: swiss-ai/pretrain-data).
# Languages as in FineWeb-2.
TOXICITY = {
    "eng_Latn": 0.99944, "deu_Latn": 0.9977, "fra_Latn": 0.9994, "pol_Latn": 0.9867, "por_Latn": 0.9476,
    "spa_Latn": 0.9953, "ita_Latn": 0.9985, "cmn_Hani": 0.5954, "nld_Latn": 0.9883,
}


def broken(doc, licenses=None, languages=None, top=None, below=None):
    """
    The reason of the first rule that a document breaks, or None. Only rules that you ask for apply.

    licenses, languages: allowlists; the case of licences does not matter. A null, or no licence, is on no list. top =
    (field, thresholds): keep field >= threshold. below = (field, thresholds): keep field < threshold. thresholds: a
    number, or {language: number, "*": any other}; a language without an entry has no rule. A null breaks top and not
    below, NaN breaks both. ValueError if another column is missing.
    """
    if licenses is not None and (doc.get("license") or "").casefold() not in map(str.casefold, licenses):
        return "license"
    if languages is not None and column(doc, "language or lang") not in languages:
        return "language"
    if top and not meets(doc, as_number(doc, top[0]), ge, top[1]):
        return "score"
    if below and not meets(doc, as_number(doc, below[0]), lt, below[1]):
        return "above"
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
    raise ValueError(f"no column {names} in the data; it has {', '.join(doc)} (document {doc.get('id')})")


def as_number(doc, field):
    """The value of a column as a float; None for null and "". ValueError if it is not a number."""
    value = column(doc, field)
    try:
        return None if value in (None, "") else float(value)
    except Exception:                                      # also of 10**400
        raise ValueError(f"column {field}: {str(value)[:60]!r} where a number was expected") from None


def listed(text):
    """'mit,cc0' -> a set; '' -> None, no rule."""
    return {part.strip() for part in text.split(",")} - {""} if text else None


def by_language(name, text):
    """'0.3' -> 0.3; 'deu_Latn:1,*:0.3' -> a dict; '' -> None, no rule. ValueError with the setting's name otherwise."""
    try:
        pairs = [part.rpartition(":") for part in text.split(",") if part.strip()]
        values = {language.strip(): float(value) for language, _, value in pairs}
        if "" in values and len(pairs) > 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"{name}={text!r}: want a number, or numbers by language: deu_Latn:0.9,*:0.3") from None
    return values.get("", values) if values else None


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
