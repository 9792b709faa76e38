"""
Tokens on disk: tokenize texts into a file, cut files of tokens into shards.

A shard is a 1-D .npy of uint16, or of uint32 if the vocabulary has more than 65,536 ids. data.py maps it into memory
without unpickling.
"""

import re

import numpy as np

from engine.files import sha256


def dtype_of(tok):
    """The smaller of two types that holds every id of a vocabulary."""
    return np.dtype(np.uint16 if tok.vocab_size <= 2**16 else np.uint32)


def write_tokens(tok, texts, path):
    """Write the tokens of texts, <s> text </s> each. Returns how many tokens each text has, int64 (n,)."""
    dtype, ends = dtype_of(tok), [0]
    with open(path, "wb") as f:
        for text in texts:
            for ids in [tok.bos], tok.encode_array(text), [tok.eos]:
                f.write(np.asarray(ids, dtype))
            ends.append(f.tell() // dtype.itemsize)
    return np.diff(ends)


def write_shard(path, pieces):
    """Write a list of arrays of tokens as a 1-D .npy. Returns its entry for meta.json: tokens and sha256."""
    n = sum(map(len, pieces))
    header = dict(descr=pieces[0].dtype.str, fortran_order=False, shape=(n,))
    with open(path, "wb") as f:
        np.lib.format.write_array_header_1_0(f, header)
        # A mapped file stays in memory until its piece is released.
        while pieces:
            f.write(pieces.pop(0))
    return dict(tokens=n, sha256=sha256(path))


def shards_of(meta):
    """The entries of all shards in meta.json."""
    return [shard for source in meta["sources"].values() for split in source.values() for shard in split["shards"]]


def safe(name):
    """A source's name as part of a file name."""
    return re.sub(r"[^\w.-]", "-", name)[:50]
