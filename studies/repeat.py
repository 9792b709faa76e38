"""
A data folder with a small part of another one's training text, so that a run of usual length reads it many times.

The part is whole documents in a random order, up to a number of tokens; the last one is cut there. The validation text
stays as it was. For the study `repeated` of configs/ablations.toml; no table of settings can make data, so this is a
script. 92,161 tokens are 360 windows of 256, which 5,760 samples read sixteen times.

$ python -m studies.repeat data/stdlib --out=data/repeated
"""

import sys

if __name__ == "__main__" and not __package__:
    print("repeat.py: start it from the project's root, python -m studies.repeat", file=sys.stderr)
    sys.exit(2)

import numpy as np

from configurator import run
from data import meta_of
from studies.borders import documents_of, write_folder

paths = []                  # a data folder of prepare.py; none = data/stdlib
tokens = 92_161             # of the part
out = "data/repeated"       # the new data folder


def first_tokens(documents, rng):
    """`tokens` tokens of documents in a random order, each with its <s> and </s>, as documents without them."""
    kept, left = [], tokens
    for i in rng.permutation(len(documents)):
        ids = documents[i][:left - 2]
        kept.append(ids)
        left -= len(ids) + 2
        if left <= 2:
            break
    return kept


def main():
    """Write the folder. ValueError if no one folder is named, or if it has fewer tokens than are asked for."""
    if len(paths) > 1:
        raise ValueError(f"name one data folder, not {len(paths)}: python -m studies.repeat data/stdlib")
    folder = (paths or ["data/stdlib"])[0]
    meta = meta_of(folder)
    documents = documents_of(meta, "train", folder)
    in_all = sum(len(ids) + 2 for ids in documents)
    if not 2 < tokens <= in_all:
        raise ValueError(f"--tokens={tokens}: want more than 2, and at most the {in_all:,} of {folder}")
    train = first_tokens(documents, np.random.default_rng(0))
    write_folder(out, folder, "repeated", train=train, val=documents_of(meta, "val", folder))


if __name__ == "__main__":
    run(main, globals())
