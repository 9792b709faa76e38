"""
Quality: which of the documents that one may train on are worth it, by scores of classifiers and other columns.

Apertus selected by the scores of classifiers (report sec. 3), small heads on the embeddings of a language model.
Published corpora carry such scores as columns, and these are the rules that were applied to them:

    quality    keep the top 33 % (later 10 %) of a language by a classifier's score, threshold estimated on 1M documents
    toxicity   drop the top 5 % of a language by another score; where no such score exists, drop 5 % at random
    the rest   lists of licences and languages, bounds on length, a random share per language

Each rule looks at one document alone, so the order of the input and the number of workers change nothing.

Where there is no such column, a classifier is learnt here from labelled lines, small enough to be read. It sees the
words x of a document and its pairs of neighbours, each once, by a hash of 20 bits, as a vector of length 1:

    score = sigmoid(bias + sum of their weights / sqrt(how many they are))        logistic regression with weight decay

$ python -m corpus.quality --train=labelled.jsonl --out=out/good.npz     # {"text": ..., "label": 1 or 0}; draws its ROC
$ python -m corpus.quality docs.jsonl --out=out/good.npz                 # a line for each document: score, id, begin
$ python prepare.py docs.jsonl --score_field=out/good.npz --keep_top=0.33 --out=data/good
$ python prepare.py docs.jsonl --max_field=out/toxic.npz --max_value=0.9 --out=data/mild
"""

import sys

if __name__ == "__main__" and not __package__:
    print("quality.py: start it from the project's root, python -m corpus.quality", file=sys.stderr)
    sys.exit(2)

import io
import json
import math
import os
import zipfile
from array import array
from collections import defaultdict
from hashlib import blake2b
from itertools import compress

import numpy as np
from tqdm import tqdm

from corpus.dedup import LONG, fingerprint, ngrams, words
from engine.files import sha256, write_flushed
from engine.plot import finish, pyplot
from engine.readers import rows_of

paths = []                  # documents to score, files as prepare.py reads them
train = ""                  # labelled lines to learn from, .jsonl(.gz .zst) or .parquet with text and label
out = "out/quality.npz"     # the classifier; what --train writes, with its ROC as .png beside it
positive = "1"              # the label that a high score stands for; every other label is against it
text_field = "text"         # the column or field that holds the text
label_field = "label"       # and the label
decay = 0.1                 # of the weights: 1/C of scikit-learn; more for few lines

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
    any order, and merge() joins the passes of several workers. 16 bytes a document. Source: report sec. 3.
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

    def merge(self, other):
        for language, theirs in other.scores.items():
            for column, more in zip(self.scores[language], theirs):
                column.extend(more)
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


# ----------------------------------------------------------------------------------------------------------------------
# a classifier of one's own

# n: texts; M: their n-grams, one text after the other; features are hashes of BITS bits.
BITS = 20
# What Apertus kept of the highest by quality, a third, then a tenth; and what it dropped by toxicity.
SHARES = (0.05, 0.1, 0.33)


def features(texts):
    """
    The features of n texts, each of a text once: int64 (M,); and how many each text has: int64 (n,).

    A million characters of a text count.
    """
    ids, ends = words([text[:LONG] for text in texts])  # (N,), (n,)
    sizes = np.diff(ends, prepend=0)
    owners = np.repeat(np.arange(len(texts)), sizes)  # (N,)
    # The last word of a text and the first of the next are no pair.
    inside = owners[1:] == owners[:-1]
    pairs = ngrams(ids, 2)[inside]
    hashes = np.concatenate([ids, pairs])
    owners = np.concatenate([owners, owners[1:][inside]])
    keys = hashes >> np.uint64(64 - BITS)
    both = owners << BITS | keys.astype(np.int64)
    both = np.unique(both)  # (M,) by text, then by feature
    counts = np.bincount(both >> BITS, minlength=len(texts))
    return both & (1 << BITS) - 1, counts


class Classifier:
    """weights: float32 (2^BITS,). about: what it was learnt from, for whoever finds the file."""

    def __init__(self, weights, bias, about):
        self.weights = weights
        self.bias = bias
        self.about = about

    def scores(self, texts):
        """float64 (n,), above 0 and below 1. The score of a text does not depend on the others."""
        keys, counts = features(texts)
        owners = np.repeat(np.arange(len(texts)), counts)  # (M,)
        sums = np.bincount(owners, self.weights[keys], len(texts))
        lengths = np.sqrt(np.maximum(counts, 1))
        logits = self.bias + sums / lengths
        return 1 / (1 + np.exp(-logits))

    def save(self, path):
        raw = io.BytesIO()
        about = json.dumps(self.about, ensure_ascii=False)
        np.savez_compressed(raw, weights=self.weights, bias=self.bias, about=about)
        write_flushed(path, raw.getvalue())

    @classmethod
    def load(cls, path):
        """ValueError, one line, for a file that is none of ours or not there."""
        hint = "python -m corpus.quality --train=labelled.jsonl writes one"
        if not os.path.isfile(path):
            raise ValueError(f"there is no classifier {path}: {hint}")
        try:
            with np.load(path, allow_pickle=False) as saved:
                weights, bias = saved["weights"], float(saved["bias"])
                about = json.loads(saved["about"].item())
        except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile):
            weights = np.zeros(0)
        if weights.shape != (1 << BITS,) or weights.dtype != np.float32:
            raise ValueError(f"{path} is damaged, or no classifier: {hint}")
        return cls(weights, bias, about)


def learn(texts, labels, decay):
    """
    (weights float32 (2^BITS,), bias) where the sum of the cross-entropies + decay / 2 |weights|^2 is least.

    labels: float64 (n,), 0 or 1. There is one minimum, so neither order nor seed changes what is learnt, to a gradient
    of 1e-6 a line. sklearn.linear_model.LogisticRegression(C=1/decay) finds the same. 50 bytes of memory a feature.
    """
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag
    keys, counts = features(texts)
    # Only what occurs has a weight to learn.
    seen, keys = np.unique(keys, return_inverse=True)
    values = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts)
    begins = np.cumsum(counts) - counts
    keys, values, begins, labels = map(torch.from_numpy, (keys, values, begins, labels))
    weights = torch.zeros(len(seen), 1, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, bias],
        max_iter=1000,
        tolerance_grad=1e-6,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    progress = tqdm(desc="learning", unit=" evaluations", disable=None, leave=False)

    def objective():
        optimizer.zero_grad()
        sums = embedding_bag(keys, weights, begins, mode="sum", per_sample_weights=values)  # (n, 1)
        entropy = binary_cross_entropy_with_logits(sums[:, 0] + bias, labels)
        loss = entropy + decay / 2 * weights.square().sum() / len(labels)
        loss.backward()
        progress.update()
        return loss

    with progress:
        optimizer.step(objective)
    learnt = np.zeros(1 << BITS, np.float32)
    learnt[seen] = weights.detach()[:, 0]
    return learnt, bias.item()


def roc(scores, labels):
    """
    Thresholds from high to low, and which part of either kind has a score at or above: (thresholds, of 0, of 1).

    scores, labels: (n,), labels 0 or 1. Equal scores are one threshold, since no rule tells them apart.
    """
    order = np.argsort(-scores, kind="stable")
    scores, labels = scores[order], labels[order]
    last = np.flatnonzero(np.diff(scores, append=-np.inf))
    right = np.cumsum(labels)[last]
    wrong = last + 1 - right
    return scores[last], wrong / wrong[-1], right / right[-1]


def area(wrong, right):
    """The area under a ROC: how often a document of kind 1 has the higher score of two, ties being half."""
    return np.trapezoid([0, *right], [0, *wrong])


def standard_error(area, zeros, ones):
    """Of an area from so many of each kind: Hanley and McNeil 1982."""
    q1 = area / (2 - area)
    q2 = 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (ones - 1) * (q1 - area**2) + (zeros - 1) * (q2 - area**2)
    return math.sqrt(variance / zeros / ones)


def labelled(path):
    """(texts, labels float64 (n,)) of labelled lines. ValueError where a kind has fewer than 20."""
    texts, labels = [], []
    rows = rows_of(path, (text_field,), (label_field,))
    for text, label in tqdm(rows, path, unit=" lines", disable=None, leave=False):
        if not isinstance(text, str):
            raise ValueError(f"{path}: {text_field} of line {len(texts) + 1} is no text")
        texts.append(text)
        # JSON's true is 1.
        labels.append(str(int(label) if isinstance(label, bool) else label) == positive)
    labels = np.array(labels, np.float64)
    ones = int(labels.sum())
    if min(ones, len(labels) - ones) < 20:
        raise ValueError(f"{path}: {ones} of {len(labels)} lines have {label_field} {positive!r} (--positive); "
                         "want at least 20 of them, and 20 others")
    return texts, labels


def train_and_draw():
    """Learn from four fifths of the labelled lines, draw the ROC of the others, and write the classifier."""
    picture = out.removesuffix(".npz") + ".png"
    if not out.endswith(".npz"):
        raise ValueError(f"--out={out}: a classifier is a file.npz, by which prepare.py knows it")
    for path in (out, picture):
        if os.path.exists(path):
            raise ValueError(f"{path} is there already, and data may have been chosen by it: give another --out")
    texts, labels = labelled(train)
    # By the text, so that no line is on both sides.
    hashes = np.array([fingerprint(text) for text in texts], np.uint64)
    held = hashes / 2.0**64 < 0.2
    ones = int(labels[held].sum())
    zeros = int(held.sum()) - ones
    if not ones * zeros:
        raise ValueError(f"{train}: too few lines to hold some of both kinds out: want some hundreds")
    weights, bias = learn(list(compress(texts, ~held)), labels[~held], decay)
    classifier = Classifier(weights, bias, {})
    scores = classifier.scores(list(compress(texts, held)))
    thresholds, wrong, right = roc(scores, labels[held])
    auc = area(wrong, right)
    error = standard_error(auc, zeros, ones)
    classifier.about = dict(
        train=train,
        sha256=sha256(train),
        lines=len(texts),
        held_out=len(scores),
        positive=positive,
        decay=decay,
        auc=auc,
        error=error,
    )
    said = f"{len(scores):,} lines held out, {ones:,} of them {positive!r}: AUC {auc:.3f} +- {error:.3f}"
    print(said)
    print(f"{'share':>6}{'from score':>12}{'of ' + repr(positive):>12}{'of others':>12}")
    points = []
    for share in SHARES:
        at = np.flatnonzero(thresholds >= np.quantile(scores, 1 - share))[-1]
        points.append((share, wrong[at], right[at]))
        print(f"{share:6.0%}{thresholds[at]:12.4f}{right[at]:12.1%}{wrong[at]:12.1%}")
    draw_roc(picture, said, wrong, right, points)
    classifier.save(out)
    print(f"{out}, {picture}")


def draw_roc(picture, title, wrong, right, points):
    """points: (share of all lines, which parts of the others and of the positive ones are in it)."""
    figure, axis = pyplot().subplots(figsize=(6, 6))
    axis.plot([0, *wrong], [0, *right])
    axis.plot([0, 1], [0, 1], color="C7", linewidth=0.8)
    for share, x, y in points:
        axis.plot(x, y, "o", color="C3")
        axis.annotate(f"the highest {share:.0%}", (x, y), (8, -10), textcoords="offset points", fontsize=9)
    axis.set_xlabel("part of the others in it")
    axis.set_ylabel(f"part of label {positive!r} in it")
    axis.set_title(title)
    finish(figure, picture)


def main():
    from corpus.heuristics import each_document
    if not train and not paths:
        raise ValueError("name labelled lines, --train=labelled.jsonl, or documents to score")
    if train:
        train_and_draw()
        return
    classifier = Classifier.load(out)
    for doc in each_document(paths, text_field):
        score, = classifier.scores([doc["text"]])
        begin = " ".join(doc["text"][:80].split())
        print(f"{score:.4f} {doc['id']}  {begin}")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
