"""
Documents in the spool of prepare.py -> token shards: 1-D .npy arrays, uint16 where the vocabulary fits, else uint32.

    bucket     documents of one stretch of the final order, tokenized by one process: <s> ids </s>, one after the other
    stream     all documents of one source and split, from all buckets in order
    shard      shard_tokens of a stream at most, flushed to disk, its sha256 in meta.json

Arrays describe themselves and are memory-mapped by data.py without a pickle. A bucket's tokens are a file under its final name or
not there, so that a run which was killed does only what is missing.
"""

import json
import os
import re

import numpy as np

from documents import sha256


class Bucket:
    """A stretch of the final order: for each document the batch it is in, where, how long, its stream (of a source and split)."""

    def __init__(self, number, batch, offset, length, stream):
        self.number, self.batch, self.offset, self.length, self.stream = number, batch, offset, length, stream

    def texts(self, folder):
        """Yield the documents' texts, in order."""
        files = {}
        try:
            for batch, offset, length in zip(self.batch.tolist(), self.offset.tolist(), self.length.tolist()):
                if batch not in files:
                    if len(files) > 200:                                         # of the open files that a process may have
                        files.pop(next(iter(files))).close()
                    files[batch] = open(os.path.join(folder, f"{batch}.text"), "rb")
                files[batch].seek(offset)
                yield files[batch].read(length).decode()
        finally:
            for f in files.values():
                f.close()


def tokenize(tok, folder, bucket):
    """
    Documents of a bucket -> {number}.tokens, the streams one after the other, and {number}.json: [stream, tokens] in that order,
    and the number of tokens of each document.
    """
    path = os.path.join(folder, f"{bucket.number}.tokens")
    if os.path.exists(path.replace(".tokens", ".json")):
        return 0
    dtype = np.uint16 if tok.vocab_size <= 2**16 else np.uint32
    streams, counts = {}, []
    encode = lambda part: tok.encode_array(part).astype(dtype)
    for text, stream in zip(bucket.texts(folder), bucket.stream.tolist()):
        before = len(streams.setdefault(stream, []))
        streams[stream] += [np.array([tok.bos], dtype), *(encode(part) for part in long_parts(text)), np.array([tok.eos], dtype)]
        counts.append(sum(len(part) for part in streams[stream][before:]))
    with open(path, "wb") as f:
        for stream in sorted(streams):
            for part in streams[stream]:
                f.write(part.tobytes())
    sizes = [[stream, sum(len(part) for part in streams[stream])] for stream in sorted(streams)]
    with open(os.path.join(folder, f"{bucket.number}.json.tmp"), "w", encoding="utf-8") as f:
        json.dump(dict(streams=sizes, counts=counts), f)
    os.replace(f.name, f.name.removesuffix(".tmp"))
    return sum(counts)


# No token of Apertus' expression crosses these places: after a line break before a letter, before a space between letters.
_BORDER = re.compile(r"(?<=\n)(?=[^\W\d_])|(?<=[^\W\d_])(?= [^\W\d_])")


def long_parts(text, size=1_000_000):
    """A text in parts of about a million characters whose tokens, one after the other, are those of the text: memory stays bounded."""
    begin = 0
    while len(text) - begin > size:
        border = _BORDER.search(text, begin + size, begin + size + 100_000)
        end = border.start() if border else begin + size                         # 100,000 characters without a border: cut anywhere
        yield text[begin:end]
        begin = end
    yield text[begin:] if begin else text


# ----------------------------------------------------------------------------------------------------------------------
# tokens to shards


def write_shards(tok, buckets, kept, tokens, shard_tokens, work, folder):
    """The streams of each source and split, from all buckets in order, cut into shards. Returns meta.json's "sources"."""
    dtype, sources = np.dtype(np.uint16 if tok.vocab_size <= 2**16 else np.uint32), {}
    sizes = []
    for b in buckets:
        with open(os.path.join(work, f"{b.number}.json"), encoding="utf-8") as f:
            sizes.append(json.load(f)["streams"])
    for s, name in enumerate(kept["sources"]):
        sources[name] = {}
        for split, stream in (("train", 2 * s), ("val", 2 * s + 1)):
            mine = kept["stream"] == stream
            left, shards, prefix = int(tokens[mine].sum()), [], "" if len(kept["sources"]) == 1 else f"{safe(name)}_"
            pieces, rest = stream_of(buckets, sizes, stream, dtype, work), []
            while left:
                n, file = min(left, shard_tokens), f"{prefix}{split}_{len(shards):05d}.npy"
                shards.append(dict(file=file, **write_shard(os.path.join(folder, file), take(pieces, n, rest), n, dtype)))
                left -= n
            size = int(kept["length"][mine].astype(np.int64).sum())
            sources[name][split] = dict(documents=int(mine.sum()), tokens=int(tokens[mine].sum()), bytes=size, shards=shards)
    return sources


def stream_of(buckets, sizes, stream, dtype, work):
    """Yield the tokens of one stream, a million at a time."""
    for b, streams in zip(buckets, sizes):
        at = 0
        for s, n in streams:
            if s == stream:
                with open(os.path.join(work, f"{b.number}.tokens"), "rb") as f:
                    f.seek(at * dtype.itemsize)
                    for begin in range(0, n, 1 << 20):
                        yield np.fromfile(f, dtype, min(1 << 20, n - begin))
            at += n


def take(pieces, n, rest):
    """Yield n tokens of an iterator of arrays; what is over of the last array waits in the list `rest`."""
    while n:
        piece = rest.pop() if rest else next(pieces)
        if len(piece) > n:
            rest.append(piece[n:])
        yield piece[:n]
        n -= len(piece[:n])


def write_shard(path, tokens, n=0, dtype=None):
    """Write a 1-D .npy, flushed to disk, from an array or from an iterator of arrays of n tokens in all. Returns its line for meta.json."""
    pieces, n, dtype = ([tokens], len(tokens), tokens.dtype) if isinstance(tokens, np.ndarray) else (tokens, n, dtype)
    with open(path, "wb") as f:
        np.lib.format.write_array_header_1_0(f, dict(descr=dtype.str, fortran_order=False, shape=(n,)))
        for piece in pieces:
            f.write(piece.tobytes())                       # np.save hides a full disk behind "requested and written"
        f.flush()
        os.fsync(f.fileno())
    return dict(tokens=n, sha256=sha256(path))


def safe(name):
    """A source's name as part of a file name."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:80]
