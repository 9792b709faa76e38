"""
Tokens on disk: texts that wait in the work folder, tokenized bucket by bucket, and cut into shards.

    bucket    about 16 MB of text, neighbours in the final order, tokenized by one process
    stream    the documents of one source and one split, from all buckets, in order
    shard     at most shard_tokens of a stream: a 1-D .npy of uint16, or of uint32 if the vocabulary needs it

data.py maps shards into memory without unpickling. A file is complete when it has its final name, so a killed run
repeats only the missing ones.
"""

import os
import re
from functools import lru_cache

import numpy as np

from engine.files import sha256

# A document that stays: 44 bytes in memory, however long its text.
DOCUMENT = np.dtype([
    ("id_hash", np.uint64),      # the final order
    ("text_hash", np.uint64),    # train or val; equal for equal texts
    ("group", np.int32),         # its text is in spool/{group}.text, -1 for a probe,
    ("begin", np.int64),         # from this byte
    ("length", np.int64),        # with this many bytes
    ("stream", np.int32),        # 2 * number of the source, + 1 for validation
])


def texts(documents, spool):
    """Yield the texts of an array of DOCUMENT, in order. spool: the folder of the .text files."""
    # There are more groups than files that a process may open.
    opened = lru_cache(100)(lambda group: open(spool / f"{group}.text", "rb"))
    for group, begin, length in documents[["group", "begin", "length"]].tolist():
        file = opened(group)
        file.seek(begin)
        yield file.read(length).decode()


def dtype_of(tok):
    """The smaller of two types that holds every id of a vocabulary."""
    return np.dtype(np.uint16 if tok.vocab_size <= 2**16 else np.uint32)


def tokenize(tok, documents, spool, path):
    """
    Tokenize a bucket, if {path}.counts is not there: {path}.STREAM gets the tokens of each stream, {path}.counts how
    many each document has, int64 (n,).
    """
    if os.path.exists(f"{path}.counts"):
        return
    dtype = dtype_of(tok)
    bos, eos = np.array([[tok.bos], [tok.eos]], dtype)
    counts = np.zeros(len(documents), np.int64)
    for stream in np.unique(documents["stream"]):
        mine = np.flatnonzero(documents["stream"] == stream)
        with open(f"{path}.{stream}", "wb") as f:
            for i, text in zip(mine, texts(documents[mine], spool)):
                # In parts: all ids of a long text at once, four bytes each, would take too much memory.
                for ids in [bos, *(tok.encode_array(part).astype(dtype) for part in long_parts(text)), eos]:
                    f.write(ids)
                    counts[i] += ids.size
    # np.save hides the error of a full disk.
    with open(f"{path}.tmp", "wb") as f:
        f.write(counts.tobytes())
    os.replace(f"{path}.tmp", f"{path}.counts")


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
    yield text[begin:] if begin else text


def stretch(files, sizes, dtype, begin, end):
    """Yield the tokens begin to end of a stream, which is in files of these sizes, as arrays."""
    at = 0
    for file, size in zip(files, sizes):
        low, high = max(begin - at, 0), min(end - at, size)
        if low < high:
            yield np.memmap(file, dtype, "r")[low:high]
        at += size


def write_shard(path, pieces, n, dtype):
    """Write n tokens, an iterable of arrays, as a 1-D .npy. Returns what meta.json says of it: tokens and sha256."""
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
    return re.sub(r"[^\w.-]", "-", name)[:80]
