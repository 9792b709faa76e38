"""
Tokens on disk: tokenize texts into a file, cut files of tokens into shards.

A shard is a 1-D .npy of uint16, or of uint32 if the vocabulary has more than 65,536 ids. data.py maps it into memory
without unpickling.
"""

import re
from itertools import chain

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
            # In parts: all ids of a long text at once, four bytes each, would take too much memory.
            for ids in chain([[tok.bos]], map(tok.encode_array, long_parts(text)), [[tok.eos]]):
                f.write(np.asarray(ids, dtype))
            ends.append(f.tell() // dtype.itemsize)
    return np.diff(ends)


# No token of Apertus' expression crosses these places: after a line break before a letter, before a space between
# letters.
_BORDER = re.compile(r"(?<=\n)(?=[^\W\d_])|(?<=[^\W\d_])(?= [^\W\d_])")


def long_parts(text, size=1_000_000):
    """
    Yield a text in parts of about `size` characters. Their tokens, one after the other, are those of the text.

    Only a stretch of 100,000 characters without a border is cut anywhere.
    """
    begin = 0
    while len(text) - begin > size:
        border = _BORDER.search(text, begin + size, begin + size + 100_000)
        end = border.start() if border else begin + size
        yield text[begin:end]
        begin = end
    yield text[begin:]


def write_shard(path, pieces, n, dtype):
    """Write n tokens, an iterable of arrays, as a 1-D .npy. Returns its entry for meta.json: tokens and sha256."""
    header = dict(descr=np.dtype(dtype).str, fortran_order=False, shape=(n,))
    with open(path, "wb") as f:
        np.lib.format.write_array_header_1_0(f, header)
        for piece in pieces:
            f.write(np.ascontiguousarray(piece))
    return dict(tokens=n, sha256=sha256(path))


def shards_of(meta):
    """The entries of all shards in meta.json."""
    return [shard for source in meta["sources"].values() for split in source.values() for shard in split["shards"]]


def safe(name):
    """A source's name as part of a file name."""
    return re.sub(r"[^\w.-]", "-", name)[:50]
