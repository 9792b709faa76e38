"""
A data folder whose windows hold several borders between documents: the documents of another folder, cut into pieces.

Each piece is a document, <s> ... </s>. Lengths are uniform between the two of --pieces. The pieces of a document are
spread evenly over the stream, so that neighbours in a window seldom belong together; the rest of a document, shorter
than a piece, is left out. Training and validation stay apart as they were. For the study `borders` of
configs/ablations.toml; no table of settings can make data, so this is a script.

$ python -m studies.borders data/stdlib --out=data/borders
"""

import sys

if __name__ == "__main__" and not __package__:
    print("borders.py: start it from the project's root, python -m studies.borders", file=sys.stderr)
    sys.exit(2)

import json
import os
import shutil

import numpy as np

import tokenizer as tokenizers
from configurator import run
from corpus.folder import SPLITS, write_shard
from data import meta_of
from studies import kit

paths = []                  # a data folder of prepare.py; none = data/stdlib
pieces = (40, 80)           # tokens of the shortest and of the longest piece
out = "data/borders"        # the new data folder


def cut(documents, rng):
    """Pieces of documents, lists of ids without <s> and </s>, in the order of the new stream."""
    shortest, longest = pieces
    placed = []
    for ids in documents:
        ends = np.cumsum(rng.integers(shortest, longest + 1, len(ids) // shortest + 1))
        parts = np.split(ids, ends[ends < len(ids)])
        parts = [part for part in parts if len(part) >= shortest]
        offset = rng.random()
        placed += [((i + offset) / len(parts), part) for i, part in enumerate(parts)]
    return [part for _, part in sorted(placed, key=lambda pair: pair[0])]


def documents_of(meta, split, folder):
    """The documents of a split, arrays of ids without <s> and </s>."""
    shards = [shard for source in meta["sources"].values() for shard in source[split]["shards"]]
    stream = np.concatenate([np.load(f"{folder}/{shard['file']}", allow_pickle=False) for shard in shards])
    documents = np.split(stream, np.flatnonzero(stream == meta["bos"]))
    return [ids[(ids != meta["bos"]) & (ids != meta["eos"])] for ids in documents if len(ids)]


def write_folder(out, folder, source, **splits):
    """
    Write documents as the data folder `out`, with one source. splits: train and val, lists of ids without <s> and </s>.
    folder: their data folder, whose vocabulary is copied. ValueError if `out` holds files already.
    """
    if os.path.isdir(out) and os.listdir(out):
        raise ValueError(f"--out={out} holds files: name a new folder, or delete it first")
    meta, tok, entries = meta_of(folder), tokenizers.load_for(folder), {}
    for split, documents in splits.items():
        name = f"{split}_00000.npy"
        kit.write(f"{out}/{name}", "")
        stream = np.concatenate([[tok.bos, *ids, tok.eos] for ids in documents]).astype(np.uint16)
        entries[split] = dict(
            documents=len(documents),
            tokens=len(stream),
            bytes=sum(len(tok.decode_bytes(ids)) for ids in documents),
            shards=[dict(file=name) | write_shard(f"{out}/{name}", [stream])])
        print(f"{split}: {len(documents):,} documents, {len(stream):,} tokens")
    if os.path.exists(f"{folder}/tokenizer.json"):          # other vocabularies have names
        shutil.copy(f"{folder}/tokenizer.json", out)
    # meta.json is written last and marks the folder as complete.
    vocabulary = {key: meta[key] for key in ("tokenizer", "tokenizer_hash", "vocab_size", "bos", "eos")}
    kit.write(f"{out}/meta.json", json.dumps(vocabulary | dict(sources={source: entries})))


def main():
    """Write the folder. ValueError if several folders are named, or the lengths of the pieces are invalid."""
    if len(paths) > 1:
        raise ValueError(f"name one data folder, not {len(paths)}: python -m studies.borders data/stdlib")
    if len(pieces) != 2 or not 1 <= pieces[0] <= pieces[1]:
        raise ValueError(f"--pieces={pieces}: want the shortest and the longest in tokens, such as --pieces=40,80")
    folder = (paths or ["data/stdlib"])[0]
    meta, rng = meta_of(folder), np.random.default_rng(0)
    write_folder(out, folder, "borders", **{split: cut(documents_of(meta, split, folder), rng) for split in SPLITS})


if __name__ == "__main__":
    run(main, globals())
