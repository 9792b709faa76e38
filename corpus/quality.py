"""
Quality: which of the documents that one may train on are worth it, by scores of classifiers and other columns.

Apertus selected by the scores of classifiers (report sec. 3), small heads on the embeddings of a language model.
Published corpora carry such scores as columns, and these are the rules that were applied to them:

    quality    keep the top 33 % (later 10 %) of a language by a classifier's score, threshold estimated on 1M documents
    toxicity   drop the top 5 % of a language by another score; where no such score exists, drop 5 % at random
    the rest   lists of licences and languages, bounds on length, a random share per language

Each rule looks at one document alone, so the order of the input and the number of workers change nothing.
"""

import math
from array import array
from collections import defaultdict
from hashlib import blake2b

import numpy as np

# Report sec. 3: drop P(toxic) at or above, about 5 % of each language. Codes as in FineWeb-2.
TOXICITY = {"eng_Latn": .99944, "deu_Latn": .9977, "fra_Latn": .9994,
            "pol_Latn": .9867, "por_Latn": .9476, "spa_Latn": .9953,
            "ita_Latn": .9985, "cmn_Hani": .5954, "nld_Latn": .9883}


def uniform(key, seed=42):
    """A number in [0, 1) by key and seed alone, so that a document meets the same fate in any order."""
    digest = blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class TopShare:
    """
    First pass of "keep the top share of a language by score": add() every document, then thresholds().

    Keeps per language the scores of the `sample` documents whose ids hash lowest: exact up to that many, the same in
    any order. 16 bytes a document. Source: report sec. 3.
    ValueError for a share that is not above 0 and at most 1.
    """

    def __init__(self, share, sample=1_000_000):
        if not 0 < share <= 1:
            raise ValueError(f"share {share}: want the part to keep, above 0 and at most 1 (Apertus: 0.33, then 0.10)")
        self.share = share
        self.sample = sample
        # language: (hashes of the ids, scores)
        self.scores = defaultdict(lambda: (array("d"), array("d")))

    def add(self, doc_id, language, score):
        hashes, scores = self.scores[language]
        hashes.append(uniform(doc_id, seed=0))
        scores.append(score)
        if len(hashes) >= 2 * self.sample:
            self._trim(language)

    def _trim(self, language):
        """Forget all but the sample. The columns are arrays of doubles, which can be appended to, for their size."""
        columns = np.array(self.scores[language])  # (2, n)
        lowest = np.argsort(columns[0], kind="stable")[:self.sample]
        columns = columns[:, lowest]
        self.scores[language] = tuple(array("d", column.tobytes()) for column in columns)

    def thresholds(self):
        """{language: score}, keep score >= it. Shares are rounded up and ties stay, so that no language is lost."""
        out = {}
        for language in self.scores:
            self._trim(language)
            _, scores = self.scores[language]
            best = np.sort(scores)[::-1]  # (n,) highest first
            # 1e-9: a share of 0.1 times 10 documents is 1, whatever the last bit of the product says.
            kept = math.ceil(self.share * len(best) - 1e-9)
            out[language] = float(best[kept - 1])
        return out


def as_number(field, value):
    """A value of the column `field` as a float; null and nothing are None. ValueError for what is no number."""
    try:
        return None if value in (None, "") else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"column {field}: {str(value)[:60]!r} where a number was expected") from None


def column_reason(doc, licenses=None, languages=None, min_chars=0, max_chars=None,
                  top=None, below=None, rate=None, seed=42):
    """
    Why a document goes, by its columns: "license", "language", "length", "score", "above", "rate"; None = it stays.

    doc: dict with text, and license, language (or lang), id where a rule needs them. licenses, languages: allow-lists.
    top = (field, thresholds): keep field >= threshold. below = (field, thresholds): keep field < threshold. rate: the
    share to keep at random. thresholds and rate: a number, or {language: number, "*": any other}; a language without
    entry has no rule. A null fails top and passes below. ValueError, with the columns there are, if one is missing.
    """
    def column(*names):
        for name in names:
            if name in doc:
                return doc[name]
        raise ValueError(f"no column {' or '.join(names)} in the data; it has {', '.join(doc)}")

    def score_of(field):
        return as_number(field, column(field))

    def of_language(table):
        if not isinstance(table, dict):
            return table
        language = column("language", "lang")
        return table.get(language, table.get("*"))

    if licenses is not None and column("license") not in licenses:
        return "license"
    if languages is not None and column("language", "lang") not in languages:
        return "language"
    length = len(doc["text"])
    if not min_chars <= length <= (max_chars or length):
        return "length"
    # The comparisons are written so that a score that is not a number fails both rules.
    if top is not None:
        field, thresholds = top
        score = score_of(field)
        threshold = of_language(thresholds)
        if threshold is not None and (score is None or not score >= threshold):
            return "score"
    if below is not None:
        field, thresholds = below
        score = score_of(field)
        threshold = of_language(thresholds)
        if threshold is not None and score is not None and not score < threshold:
            return "above"
    share = of_language(rate)
    key = doc.get("id") or doc["text"]
    if share is not None and uniform(key, seed) >= share:
        return "rate"
    return None
