"""
How many tokens each language needs for the same text, by vocabulary (Apertus report, arXiv 2509.14233, sec. 2.2).

    cost_i = tokens per document of language i
    gini   = sum_i (2i - n - 1) c_i / (n sum c)      of the costs c_1 <= ... <= c_n of n languages

A Gini of 0 means that all languages pay the same, 1 - 1/n that one pays everything. Costs per document can be compared
only on parallel text, where every language says the same. Costs per byte need no parallel text, but make a script of
three bytes per letter look cheap.

$ python -m studies.fairness texts.jsonl --names=byte,apertus,apertus:32768      # the most expensive languages first
"""

import sys

if __name__ == "__main__" and not __package__:
    print("fairness.py: start it from the project's root, python -m studies.fairness", file=sys.stderr)
    sys.exit(2)

from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import run
from corpus import readers
from engine.files import read_text
from tokenizer import load

names = "apertus"                    # vocabularies to compare, with commas between
paths = []                           # .jsonl with text and lang, or text files, one language each


def read_documents(files):
    """
    [(language, text)] from .jsonl files with text and lang, and from text files named after their language.

    ValueError: a line without these two, or no text at all. Empty texts are left out.
    """
    documents = []
    for file in files:
        rows = [(Path(file).stem, read_text(file))]
        if file.endswith(".jsonl"):
            rows = readers.rows_of(file, ("lang",), ("text",))
        documents += [(lang, text) for lang, text in rows if text]
    if not documents:
        raise ValueError("no text: name .jsonl files with text and lang, or .txt files")
    return documents


def gini(costs):
    """Inequality of an array of n costs: 0 if all are equal, 1 - 1/n if one pays everything."""
    n = len(costs)
    return np.arange(1 - n, n, 2) @ np.sort(costs) / (n * costs.sum())


def fairness(tokenizer, documents):
    """
    The cost of a vocabulary on documents, (language, text) each.

    Returns {language: tokens per document}, the Gini of these costs, that of tokens per byte, and bytes per token.
    """
    sums = Counter()
    for lang, text in documents:
        sums[lang] += np.array([len(tokenizer.encode(text)), len(text.encode()), 1])
    tokens, sizes, count = np.transpose([*sums.values()])
    cost = tokens / count
    return dict(zip(sums, cost)), gini(cost), gini(tokens / sizes), sizes.sum() / tokens.sum()


def main():
    """Print the costs of about twenty languages for each vocabulary, relative to English or to the first language."""
    documents = read_documents(paths)
    unit = min((lang for lang, _ in documents), key=lambda lang: not lang.startswith("en"))
    for name in names.split(","):
        cost, by_document, by_byte, bytes_per_token = fairness(load(name), tqdm(documents, name, leave=False))
        print(f"{name}: {bytes_per_token:.3f} bytes per token; Gini {by_document:.3f} of tokens per document, "
              f"{by_byte:.3f} of tokens per byte\ntokens per document, {unit} = 1:")
        order = sorted(cost, key=cost.get, reverse=True)
        for lang in order[::len(order) // 20 or 1]:
            print(f"    {lang:12} {cost[lang] / cost[unit]:.2f}")


if __name__ == "__main__":
    run(main, globals())
