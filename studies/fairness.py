"""
What a language pays: tokens for the same text, by vocabulary (Apertus report sec. 2.2).

    gini = sum_i (2i - n - 1) c_i / (n sum c)      of the costs c_1 <= ... <= c_n; 0 = all languages pay alike

$ python -m studies.fairness texts.jsonl --names=byte,apertus,apertus:32768      # table and picture
"""

import sys

if __name__ == "__main__" and not __package__:
    print("fairness.py: start it from the project's root, python -m studies.fairness", file=sys.stderr)
    sys.exit(2)

import json
import os

from tqdm import tqdm

from configurator import run
from tokenizer import load

names = "apertus"                    # vocabularies to compare, with commas between
rows = 20                            # languages in the table, evenly from the cheapest to the dearest; 0 = all
out = "out/tokenizers.png"           # where the picture goes
paths = []                           # .jsonl with text and lang, or .txt, one language each


def gini(costs):
    """Inequality of costs c_1 <= … <= c_n: sum_i (2i - n - 1) c_i / (n sum c). 0 = all alike, 1 - 1/n = one pays."""
    costs = sorted(costs)
    n = len(costs)
    return sum((2 * i - n - 1) * c for i, c in enumerate(costs, 1)) / (n * sum(costs))


def fairness(tokenizer, documents, bar=None):
    """
    What one vocabulary costs on [(language, text)]. Languages compare on parallel text only: the same content in each.

    Returns bytes_per_token, used (share of the vocabulary that occurs), gini (over languages, of tokens per document),
    gini_bytes (of tokens per byte) and cost ({language: tokens per document}). Source: Apertus report sec. 2.2.
    """
    tokens, sizes, count, seen = {}, {}, {}, set()
    for lang, text in documents:
        ids = tokenizer.encode(text)
        seen.update(ids)
        tokens[lang] = tokens.get(lang, 0) + len(ids)
        sizes[lang] = sizes.get(lang, 0) + len(text.encode())
        count[lang] = count.get(lang, 0) + 1
        if bar is not None:
            bar.update()
    cost = {lang: tokens[lang] / count[lang] for lang in tokens}
    return {"bytes_per_token": sum(sizes.values()) / sum(tokens.values()), "used": len(seen) / tokenizer.vocab_size,
            "gini": gini(cost.values()), "gini_bytes": gini(tokens[k] / sizes[k] for k in tokens), "cost": cost}


def read_documents(files):
    """[(language, text)] of .jsonl files with text and lang, or of text files, one language each, named like it."""
    documents = []
    for file in files:
        try:
            with open(file, encoding="utf-8") as f:
                content = f.read()
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not UTF-8 text") from None
        if not file.endswith(".jsonl"):
            documents.append((os.path.splitext(os.path.basename(file))[0], content))
            continue
        for n, line in enumerate(content.rstrip("\n").split("\n"), 1):
            try:
                row = json.loads(line)
                documents.append((row["lang"] + "", row["text"] + ""))
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{file}, line {n}: want a JSON object with the strings text and lang") from None
    documents = [(lang, text) for lang, text in documents if text]
    if not documents:
        raise ValueError("nothing to compare on: name .jsonl files with text and lang, or .txt files")
    return documents


def compare_tokenizers(names, documents):
    """Print the tables, draw the picture. Costs are relative to English, or to the first language if there is none."""
    langs = {lang: None for lang, _ in documents}
    unit = next((lang for lang in langs if lang == "en" or lang.startswith("eng")), next(iter(langs)))
    vocabularies = [load(n) for n in names]
    with tqdm(total=len(documents) * len(names), desc="tokenize", unit="doc", leave=False) as bar:
        results = [fairness(t, documents, bar) for t in vocabularies]
    relative = [{lang: c / r["cost"][unit] for lang, c in r["cost"].items()} for r in results]
    order = sorted(langs, key=relative[-1].get)

    width = max(14, *map(len, names))
    print(f"{len(documents)} documents in {len(langs)} languages; Gini: 0 = every language pays the same\n")
    print(f"{'':{width}} {'vocabulary':>10} {'used':>6} {'bytes/token':>11} {'Gini/document':>13} {'Gini/byte':>9} "
          f"  dearest language")
    for t, r, cost in zip(vocabularies, results, relative):
        worst = max(cost, key=cost.get)
        print(f"{t.name:{width}} {t.vocab_size:10,} {r['used']:6.1%} {r['bytes_per_token']:11.3f} {r['gini']:13.3f} "
              f"{r['gini_bytes']:9.3f}   {worst} {cost[worst]:.1f}x")
    print(f"\n{'tokens / ' + unit:{width}} " + " ".join(f"{n:>{width}}" for n in names))
    steps = min(rows, len(order)) or len(order)
    for k in sorted({round(i * (len(order) - 1) / max(1, steps - 1)) for i in range(steps)}):
        print(f"{order[k]:{width}} " + " ".join(f"{cost[order[k]]:{width}.2f}" for cost in relative))
    draw(names, results, relative, unit)


def draw(names, results, relative, unit):
    """One curve per vocabulary: the languages from the cheapest to the dearest, tokens per document on a log scale."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(9, 5))
    for n, r, cost in zip(names, results, relative):
        worst = max(cost, key=cost.get)
        ax.plot(sorted(cost.values()), label=f"{n}: {r['bytes_per_token']:.2f} bytes per token, Gini {r['gini']:.2f}, "
                                             f"dearest {worst} {cost[worst]:.1f}x")
    ax.axhline(1, color="grey", lw=0.8, ls=":")
    ax.set(yscale="log", xlabel="languages, cheapest to dearest for each vocabulary",
           ylabel=f"tokens per document, {unit} = 1")
    ax.set_title("What a language pays for the same text")
    ax.legend()
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    fig.savefig(out, dpi=150, bbox_inches="tight")
    print(f"\npicture: {out}")


def main():
    compare_tokenizers(names.split(","), read_documents(paths))


if __name__ == "__main__":
    run(main, globals())
