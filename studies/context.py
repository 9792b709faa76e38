"""
Does a model use what stands far back in its window? Two measures.

    by position     bits per byte of texts at positions 0 to 127 of a window, 128 to 255, and so on: they fall as long
                    as more context helps
    look-up         registers of keys and colours (studies/length.py): how many colours are named that stand 32, 64, ...
                    tokens back. A guess is right one time in ten

The window may be longer than that of the training.

$ python -m studies.context books/*.jsonl --by_position=1024 --init_from=out/8b-16k
$ python -m studies.context --lookup=100 --window=4096 --init_from=swiss-ai/Apertus-8B-2509
"""

import sys

if __name__ == "__main__" and not __package__:
    print("context.py: start it from the project's root, python -m studies.context", file=sys.stderr)
    sys.exit(2)

import math
import os

import numpy as np

import convert
from configurator import run
from corpus import readers
from data import folders_of
from engine.runs import settings_of
from evaluate import bits_row, text_ids, token_nats, validation_documents
from studies import kit
from studies.length import lookup_scores

paths = []                  # texts: .jsonl with "text"; none = the validation documents of the run's own data
init_from = "out/laptop"    # run folder, Hugging Face folder or hub name
by_position = 0             # width in tokens of the positions that are averaged; 0 = off
lookup = 0                  # keys to look up at each distance; 0 = off
window = 0                  # tokens; 0 = the model's window
out = ""                    # file of the results; "" = context.jsonl in the run folder


def read_texts():
    """The texts of the files, or of the run's validation documents."""
    if paths:
        return [row["text"] for file in paths for row in readers.records(file, {"text"})]
    if os.path.isdir(f"{init_from}/ckpt"):
        folders = folders_of(settings_of(init_from)["data"])
        return [text for folder in folders for _, text in validation_documents(folder)]
    raise ValueError(f"{init_from} has no data of its own: name texts")


def text_bytes(tok, ids):
    """The number of bytes of ids; the end of a text has none."""
    end = text_ids(tok, "")[-1]
    return len(tok.decode_bytes([i for i in ids if i != end]))


def position_scores(model, tok, texts, T, step):
    """
    Rows of the results: bits per byte at positions 0 to step - 1 of a window of T, at the next `step`, and so on.

    Texts are cut into windows one after the other. The rest, which fills no window, is left out, so that all positions
    have the same texts. The windows are the sample, so the interval is too narrow for a few long texts. ValueError if
    no text fills one.
    """
    documents = [text_ids(tok, text) for text in texts]
    windows = [(ids[i:i + T + 1], 1) for ids in documents for i in range(0, len(ids) - T, T)]
    if not windows:
        raise ValueError(f"no document has {T:,} tokens: name longer ones, or a shorter --window")
    bits = np.array(token_nats(model, windows)) / math.log(2)                       # (windows, T)
    rows = []
    for begin in range(0, T, step):
        end = min(begin + step, T)
        sizes = np.array([text_bytes(tok, ids[begin + 1:end + 1]) for ids, _ in windows])
        row = bits_row(f"{begin:,} to {end - 1:,}", "bits/byte by position", bits[:, begin:end].sum(1), sizes)
        rows.append(row | dict(begin=begin, end=end, bits_per_byte=row["score"]))      # as in the committed rows
    return rows


def main():
    if min(by_position, lookup, window) < 0 or not by_position + lookup:
        raise ValueError("want --by_position=128 or --lookup=100, and a --window of 0 or more")
    texts = read_texts() if by_position else []     # before the model, so that a mistake costs no time
    model, tok = convert.load_for_inference(init_from, "auto", "auto")
    T = window or model.config.block_size
    rows = position_scores(model, tok, texts, T, by_position) if by_position else []
    if lookup:
        rows += [row | dict(name=f"{row['distance']:,} tokens back", score=row["right"] / row["n"])
                 for row in lookup_scores(model, tok, T, lookup)]
    for row in rows:
        print(f"{row['name']:20} {row['score']:.3f} ({row['low']:.3f} to {row['high']:.3f})   n = {row['n']}")
    kit.write_rows(out or f"{init_from}/context.jsonl", rows)


if __name__ == "__main__":
    run(main, globals())
