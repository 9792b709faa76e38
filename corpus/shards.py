"""
Documents in the spool of prepare.py -> token shards: 1-D .npy arrays, uint16 where the vocabulary fits, else uint32.

    bucket     documents of one stretch of the final order, tokenized by one process: <s> ids </s>, one after the other
    stream     all documents of one source and split, from all buckets in order
    shard      shard_tokens of a stream at most, flushed to disk, its sha256 in meta.json
    folder     made beside its place as OUT.tmp, whole before it gets its name; nothing is replaced that prepare.py did not write

Arrays describe themselves and are memory-mapped by data.py without a pickle. A bucket's tokens are a file under its final name or
not there, so that a run which was killed does only what is missing.
"""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np

from corpus.readers import sha256

try:
    import fcntl
except ImportError:                                      # Windows: two runs in one folder are not told apart there
    fcntl = None


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


# ----------------------------------------------------------------------------------------------------------------------
# the folder


LOCK = ".prepare.lock"              # marks OUT.tmp as ours
WRITTEN = {"meta.json", "report.json", "report.md", "removed.jsonl.gz", "flow.png", "tokenizer.json", "probes.json"}   # and shards


def claim(out, inputs, joined=False):
    """
    Lock a data folder for this process, before anything is written. Returns (final, tmp, lock): the folder itself, without links; the
    one beside it for work/ and data/, which publish() puts in its place; what to close at the end. The kernel frees the lock of a
    process that was killed.

    inputs: paths that are read. joined: the folder is data.py's, of --join, and not prepare.py's.
    ValueError if something would be lost there that we did not write, or if another process writes there.
    """
    final = os.path.realpath(out)
    tmp = final + ".tmp"
    if lies_in(os.getcwd(), final):
        raise ValueError(f"{out} is or holds the working directory, and would be replaced by the new data: choose another folder")
    for folder in {path if os.path.isdir(path) else os.path.dirname(path) for path in inputs}:
        if lies_in(folder, final):
            raise ValueError(f"{out} is or holds {folder}, which is to be read, and would be replaced: choose another folder")
    for path in inputs:
        if os.path.isdir(path) and lies_in(final, path):
            raise ValueError(f"{out} lies in {path}, which is to be read: choose a folder beside it")
    if os.path.ismount(final):
        raise ValueError(f"{out} is a mount point, which cannot be replaced: choose a folder in it")
    if os.path.lexists(tmp) and (not os.path.isdir(tmp) or os.listdir(tmp) and not os.path.exists(os.path.join(tmp, LOCK))):
        raise ValueError(f"{tmp} is in the way, and not of prepare.py: move it, or choose another folder")
    try:
        os.makedirs(tmp, exist_ok=True)
        lock = open(os.path.join(tmp, LOCK), "a+", encoding="utf-8")
    except OSError as e:
        raise ValueError(f"{out} cannot be written ({e.strerror}): choose another folder") from None
    hold(lock, out)
    stranger = not_ours(final, joined)
    if stranger:
        clear(tmp)
        lock.close()
        raise ValueError(f"{out} holds {stranger}, which is not of a data folder that may be replaced: choose another folder, or an empty one")
    old = os.path.join(tmp, "old")
    if os.path.isdir(old) and not os.path.exists(final):                         # killed just as the new data took its place
        os.rename(old, final)
    shutil.rmtree(old, ignore_errors=True)
    return final, tmp, lock


def lies_in(path, folder):
    """Whether a path is this folder or is in it, however the two are spelled."""
    if not os.path.exists(folder):
        return False
    path = Path(os.path.realpath(path))
    return any(p.exists() and p.samefile(folder) for p in (path, *path.parents))


def hold(lock, out):
    """Lock an open file for this process alone, until it is closed. ValueError: another process has it."""
    try:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read()
        lock.close()
        raise ValueError(f"{out}: another prepare.py is writing there (process {owner}): wait for it, or choose another folder") from None
    except OSError as e:                                                         # Lustre and some network disks
        print(f"{out}: its file system has no locks ({e.strerror}). See to it that no other prepare.py writes there")
    if not os.path.exists(lock.name) or not os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
        lock.close()                                                             # its owner finished between the two lines above
        raise ValueError(f"{out}: another prepare.py has just finished there: start again if it is to be done once more")
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock.close)                           # or it would be held until the last worker is gone
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def not_ours(folder, joined):
    """The name of something in a folder that prepare.py (or data.py --join) did not write there; None if there is nothing of the kind."""
    if not os.path.isdir(folder):
        return os.path.basename(folder) if os.path.lexists(folder) else None
    entries, own = sorted(os.listdir(folder)), set()
    try:
        with open(os.path.join(folder, "meta.json"), encoding="utf-8") as f:
            sources = json.load(f)["sources"].values()
        if joined:
            own = {"meta.json", "tokenizer.json"}
        elif "report.json" in entries:
            own = WRITTEN | {shard["file"] for source in sources for split in source.values() for shard in split["shards"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):           # no meta.json, or another program's
        pass
    return next((name for name in entries if name not in own), None)


def publish(final, tmp):
    """Put tmp/data in the place of `final`, whose old data go only when the new ones stand, and remove tmp."""
    data, old = os.path.join(tmp, "data"), os.path.join(tmp, "old")
    for name in os.listdir(data):
        flush(os.path.join(data, name))
    flush(data)
    if os.path.isdir(final):
        os.rename(final, old)
    try:
        os.rename(data, final)
    except OSError:
        if os.path.isdir(old):
            os.rename(old, final)
        raise
    flush(os.path.dirname(final))
    clear(tmp)


def clear(tmp):
    """Remove what a run made in its tmp folder; the lock last, so that a kill in between leaves no folder that nobody owns."""
    for name in ("work", "data", "old"):
        shutil.rmtree(os.path.join(tmp, name), ignore_errors=True)
    try:
        os.remove(os.path.join(tmp, LOCK))
        os.rmdir(tmp)
    except OSError:                                                              # the user has put something there
        pass


def flush(path):
    """To disk: a rename may reach it before the data that it names."""
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
