"""
What a language pays: tokens for the same text, by vocabulary (Apertus report, arXiv 2509.14233, sec. 2.2).

    cost_i = tokens per document of language i
    gini   = sum_i (2i - n - 1) c_i / (n sum c)      of the costs c_1 <= ... <= c_n of n languages

Zero means that all languages pay alike, 1 - 1/n that one pays everything. Costs per document compare languages on
parallel text only, where every language says the same; costs per byte need no parallel text, but count a script of
three bytes per letter as cheap.

$ python -m studies.fairness texts.jsonl --names=byte,apertus,apertus:32768      # two tables
"""

import sys

if __name__ == "__main__" and not __package__:
    print("fairness.py: start it from the project's root, python -m studies.fairness", file=sys.stderr)
    sys.exit(2)

import os
from collections import Counter

import numpy as np
from tqdm import tqdm

from configurator import run
from chat import read_rows
from engine.files import read_text
from tokenizer import load

names = "apertus"                    # vocabularies to compare, with commas between
rows = 20                            # languages in the table, evenly from the cheapest to the dearest; 0 = all
paths = []                           # .jsonl with text and lang, or .txt, one language each


def read_documents(files):
    """
    [(language, text)] from .jsonl files with text and lang, and from text files named after their language.

    Empty texts are left out. ValueError, one line, for any other row, or if nothing is left.
    """
    documents = []
    for file in files:
        if file.endswith(".jsonl"):
            rows = read_rows(file, has_text, "the strings text and lang")
            documents += [(row["lang"], row["text"]) for row in rows if row["text"]]
        elif text := read_text(file):
            documents.append((os.path.splitext(os.path.basename(file))[0], text))
    if not documents:
        raise ValueError("no text in there: name .jsonl files with text and lang, or .txt files")
    return documents


def has_text(row):
    return isinstance(row.get("lang"), str) and isinstance(row.get("text"), str)


def gini(costs):
    """Inequality of n costs, in any order: 0 if all are alike, 1 - 1/n if one pays everything."""
    costs = sorted(costs)
    n = len(costs)
    return sum((2 * i - n - 1) * c for i, c in enumerate(costs, 1)) / (n * sum(costs))


def fairness(tokenizer, documents):
    """
    What one vocabulary costs on documents, (language, text) each.

    Returns a dict: cost, {language: tokens per document}; gini, of these costs; gini_bytes, of tokens per byte;
    bytes_per_token; used, the share of the vocabulary that occurs. Source: Apertus report sec. 2.2.
    """
    tokens = Counter()
    sizes = Counter()
    count = Counter()
    seen = set()
    for lang, text in documents:
        ids = tokenizer.encode(text)
        seen.update(ids)
        tokens[lang] += len(ids)
        sizes[lang] += len(text.encode())
        count[lang] += 1
    cost = {lang: tokens[lang] / count[lang] for lang in tokens}
    return dict(
        cost=cost,
        gini=gini(cost.values()),
        gini_bytes=gini(tokens[lang] / sizes[lang] for lang in tokens),
        bytes_per_token=sizes.total() / tokens.total(),
        used=len(seen) / tokenizer.vocab_size)


def main():
    """
    Print a table of vocabularies and one of languages.

    Costs are relative to English, or to the first language if there is no English text.
    """
    documents = read_documents(paths)
    vocabularies = names.split(",")
    langs = list(dict.fromkeys(lang for lang, _ in documents))
    english = [lang for lang in langs if lang == "en" or lang.startswith("eng")]
    unit = (english or langs)[0]
    width = max(14, *map(len, vocabularies))

    print(f"{len(documents)} documents in {len(langs)} languages; Gini: 0 = every language pays the same\n")
    print(f"{'':{width}} vocabulary   used bytes/token Gini/document Gini/byte   dearest language")
    costs = {}
    for name in vocabularies:
        t = load(name)
        r = fairness(t, tqdm(documents, desc=name, unit="doc", leave=False))
        cost = {lang: c / r["cost"][unit] for lang, c in r["cost"].items()}
        worst = max(cost, key=cost.get)
        dearest = f"{worst} {cost[worst]:.1f}x"
        print(f"{t.name:{width}} {t.vocab_size:10,} {r['used']:6.1%} {r['bytes_per_token']:11.3f} {r['gini']:13.3f} "
              f"{r['gini_bytes']:9.3f}   {dearest}")
        label = f"{name}: {r['bytes_per_token']:.2f} bytes per token, Gini {r['gini']:.2f}, dearest {dearest}"
        costs[label] = cost

    print(f"\n{'tokens / ' + unit:{width}}", *(f"{name:>{width}}" for name in vocabularies))
    # Cheapest first, by the last vocabulary.
    order = sorted(langs, key=cost.get)
    n = len(order)
    for i in np.linspace(0, n - 1, min(rows, n) or n).round().astype(int):
        lang = order[i]
        print(f"{lang:{width}}", *(f"{cost[lang]:{width}.2f}" for cost in costs.values()))


if __name__ == "__main__":
    run(main, globals())
