"""
Documents in the spool of prepare.py -> token shards: 1-D .npy arrays, uint16 where the vocabulary fits, else uint32.

    bucket     documents of one stretch of the final order, tokenized by one process: <s> ids </s>, one after the other
    stream     all documents of one source and split, from all buckets in order
    shard      shard_tokens of a stream at most, its sha256 in meta.json
    folder     made beside its place as OUT.tmp, whole and on disk before it gets its name; what prepare.py did not
               write is never replaced

Arrays describe themselves, and data.py maps them into memory without a pickle. A bucket is done when the file that is
written last stands under its final name, so a run that was killed does only what is missing.
"""

import contextlib
import json
import os
import re
import shutil
from functools import lru_cache
from pathlib import Path

import numpy as np

from engine.files import flush, lock_file, sha256

# A document that stays: 44 bytes in memory, however long its text.
DOCUMENT = np.dtype([
    ("id_hash", np.uint64),         # the final order
    ("text_hash", np.uint64),       # train or val; the same for equal texts
    ("batch", np.int32),            # its text lies in {batch}.text of the spool...
    ("offset", np.int64),           # ...from this byte on...
    ("length", np.int64),           # ...and has so many bytes
    ("group", np.int32),            # number of (source, language, license) in the audit, -1 for a probe
    ("stream", np.int32),           # 2 * number of the source, and 1 more for validation
])


def texts(documents, spool):
    """Yield the texts of an array of DOCUMENT, in order. spool: the folder that sift() wrote to."""
    for file, length in places(documents, spool):
        yield file.read(length).decode()


def abouts(documents, spool):
    """Yield what sift() wrote behind each text: {"id", "url", "sha256", "bytes", what was replaced by kind}."""
    for file, length in places(documents, spool):
        file.seek(length, os.SEEK_CUR)
        yield json.loads(file.readline())


def places(documents, spool):
    """Yield (file of the spool, at the begin of the text; bytes of the text) of each document."""
    # Batches are many, and the files that a process may have open are few. Mapped, they would count as its memory.
    opened = lru_cache(100)(lambda batch: open(spool / f"{batch}.text", "rb"))
    for batch, offset, length in documents[["batch", "offset", "length"]].tolist():
        file = opened(batch)
        file.seek(offset)
        yield file, length


def handfuls(things, most, size):
    """
    Things as lists of about so much by size(thing), whose words are hashed together: of a page alone the calls would
    take longer than the work, of a whole batch the arrays would take many times its memory.
    """
    some, n = [], 0
    for thing in things:
        some.append(thing)
        n += size(thing)
        if n >= most:
            yield some
            some, n = [], 0
    if some:
        yield some


def dtype_of(tok):
    """The smaller of two types that holds every id of a vocabulary."""
    small = tok.vocab_size <= 2**16
    return np.dtype(np.uint16 if small else np.uint32)


def tokenize(tok, work, number, documents):
    """
    Tokenize bucket `number`, an array of DOCUMENT, in a worker process.

    work/{number}.tokens holds the streams in rising order, one after the other; work/{number}.counts, which is renamed
    when both are whole, the tokens of each document.
    """
    done = work / f"{number}.counts"
    if done.exists():
        return
    counts = np.zeros(len(documents), np.int64)
    order = np.argsort(documents["stream"], kind="stable")
    with open(work / f"{number}.tokens", "wb") as f:
        for i, text in zip(order, texts(documents[order], work)):
            for part in ids_of(tok, text):
                f.write(part)
                counts[i] += len(part)
    # Not tofile or np.save, which say "requested and written" where the disk is full.
    half_done = Path(f"{done}.tmp")
    half_done.write_bytes(counts.tobytes())
    half_done.replace(done)


def ids_of(tok, text):
    """The ids of a document in the type of the shards, begin and end included, as a list of arrays."""
    dtype = dtype_of(tok)
    bos, eos = np.array([[tok.bos], [tok.eos]], dtype)
    # Part by part, since four bytes an id are too many for all of a long text.
    ids = [tok.encode_array(part).astype(dtype) for part in long_parts(text)]
    return [bos, *ids, eos]


def counts_of(work, number):
    """The tokens of each document of a bucket: int64 (n,)."""
    return np.fromfile(work / f"{number}.counts", np.int64)


# No token of Apertus' expression crosses these places: after a line break before a letter, before a space between
# letters.
_BORDER = re.compile(r"(?<=\n)(?=[^\W\d_])|(?<=[^\W\d_])(?= [^\W\d_])")


def long_parts(text, size=1_000_000):
    """
    A text in parts of about `size` characters, so that memory stays bounded.

    The tokens of the parts, one after the other, are those of the text. Only a stretch of 100,000 characters without a
    border is cut anywhere.
    """
    begin = 0
    while len(text) - begin > size:
        border = _BORDER.search(text, begin + size, begin + size + 100_000)
        end = border.start() if border else begin + size
        yield text[begin:end]
        begin = end
    yield text[begin:] if begin else text


# ----------------------------------------------------------------------------------------------------------------------
# tokens to shards


def write_shards(tok, documents, tokens, buckets, sources, shard_tokens, work, folder):
    """
    Cut the streams of all sources into shards of at most shard_tokens. Returns meta.json's "sources".

    documents: an array of DOCUMENT in the final order; tokens: how many each of them has, int64 (n,). buckets: the
    same documents, a part for each number that was tokenized. sources: names, by number.
    """
    dtype = dtype_of(tok)
    written = {}
    for number, name in enumerate(sources):
        prefix = f"{safe(name)}_" if len(sources) > 1 else ""
        written[name] = {}
        for is_val, split in enumerate(("train", "val")):
            stream = 2 * number + is_val
            mine = documents["stream"] == stream
            total = int(tokens[mine].sum())
            shards = []
            pieces = stream_of(stream, buckets, dtype, shard_tokens, work)
            for begin in range(0, total, shard_tokens):
                file = f"{prefix}{split}_{len(shards):05d}.npy"
                n = min(shard_tokens, total - begin)
                shard = write_shard(folder / file, pieces, n, dtype)
                shards.append(dict(file=file, **shard))
            written[name][split] = dict(
                documents=int(mine.sum()),
                tokens=total,
                bytes=int(documents["length"][mine].sum(dtype=np.int64)),
                shards=shards,
            )
    return written


def shards_of(meta):
    """What meta.json says of each shard, of all sources and splits."""
    splits = [split for source in meta["sources"].values() for split in source.values()]
    return [shard for split in splits for shard in split["shards"]]


def stream_of(stream, buckets, dtype, shard_tokens, work):
    """Yield the tokens of one stream as arrays, in order; none of them crosses a multiple of shard_tokens."""
    at = 0
    for number, documents in enumerate(buckets):
        tokens = counts_of(work, number)
        begin = tokens[documents["stream"] < stream].sum()
        end = begin + tokens[documents["stream"] == stream].sum()
        rest = np.memmap(work / f"{number}.tokens", dtype, "r")[begin:end]
        while len(rest):
            room = shard_tokens - at % shard_tokens
            piece, rest = rest[:room], rest[room:]
            yield piece
            at += len(piece)


def write_shard(path, tokens, n=None, dtype=None):
    """
    Write a 1-D .npy. Returns what meta.json says of it: tokens, sha256.

    tokens: an array, or an iterator of arrays with a dtype, of which the next ones are taken until they are n tokens.
    """
    if isinstance(tokens, np.ndarray):
        tokens, n, dtype = iter([tokens]), len(tokens), tokens.dtype
    header = dict(descr=dtype.str, fortran_order=False, shape=(n,))
    with open(path, "wb") as f:
        np.lib.format.write_array_header_1_0(f, header)
        left = n
        while left:
            piece = next(tokens)
            f.write(piece)
            left -= len(piece)
    return dict(tokens=n, sha256=sha256(path))


def safe(name):
    """A source's name as part of a file name."""
    return re.sub(r"[^\w.-]", "-", name)[:80]


# ----------------------------------------------------------------------------------------------------------------------
# the folder


# Marks OUT.tmp as ours.
LOCK = ".prepare.lock"
# The files of a data folder, beside its shards.
WRITTEN = {
    "meta.json",
    "report.json",
    "report.md",
    "removed.jsonl.gz",
    "kept.parquet",
    "flow.png",             # in older folders
    "tokenizer.json",
    "probes.json",
}


def claim(out, inputs, joined=False):
    """
    Lock a data folder for this process, before anything is written. Returns (final, tmp, lock).

    final is the folder itself, without links; tmp the one beside it for work/ and data/, which publish() puts in its
    place; lock what to close at the end, although the kernel frees it too when its process dies.

    inputs: paths that are read. joined: the folder is data.py's, of --join, and not prepare.py's. ValueError if
    something would be lost there that we did not write, or if another process writes there.
    """
    final = Path(os.path.realpath(out))
    tmp = Path(f"{final}.tmp")
    refuse(out, final, tmp, inputs)
    try:
        tmp.mkdir(parents=True, exist_ok=True)
        lock = open(tmp / LOCK, "a+", encoding="utf-8")
    except OSError as e:
        raise ValueError(f"{out} cannot be written ({e.strerror}): choose another folder") from None
    hold(lock, out)
    stranger = not_ours(final, joined)
    if stranger:
        clear(tmp)
        lock.close()
        raise ValueError(
            f"{out} holds {stranger}, which is not of a data folder that may be replaced: "
            "choose another folder, or an empty one"
        )
    # A run was killed just as the new data took the place of the old.
    old = tmp / "old"
    if old.is_dir() and not final.exists():
        os.rename(old, final)
    shutil.rmtree(old, ignore_errors=True)
    return final, tmp, lock


def refuse(out, final, tmp, inputs):
    """ValueError if writing or replacing `final` would touch the working directory, the inputs or a user's folder."""
    if lies_in(os.getcwd(), final):
        raise ValueError(
            f"{out} is or holds the working directory, and would be replaced by the new data: choose another folder"
        )
    # Folders and not files: a glob may name a hundred thousand files of one folder.
    holders = {path if os.path.isdir(path) else os.path.dirname(path) for path in inputs}
    for folder in holders:
        if lies_in(folder, final):
            raise ValueError(
                f"{out} is or holds {folder}, which is to be read, and would be replaced: choose another folder"
            )
    for path in inputs:
        if os.path.isdir(path) and lies_in(final, path):
            raise ValueError(f"{out} lies in {path}, which is to be read: choose a folder beside it")
    if os.path.ismount(final):
        raise ValueError(f"{out} is a mount point, which cannot be replaced: choose a folder in it")
    ours = tmp.is_dir() and (LOCK in os.listdir(tmp) or not os.listdir(tmp))
    if os.path.lexists(tmp) and not ours:
        raise ValueError(f"{tmp} is in the way, and not of prepare.py: move it, or choose another folder")


def lies_in(path, folder):
    """Whether a path is this folder or is in it, however the two are spelled."""
    path = Path(os.path.realpath(path))
    return os.path.exists(folder) and any(p.exists() and p.samefile(folder) for p in (path, *path.parents))


def hold(lock, out):
    """Lock an open file for this process alone, until it is closed. ValueError: another process has it."""
    try:
        held = lock_file(lock)
    except OSError as e:
        # Lustre and some network disks.
        print(f"{out}: its file system has no locks ({e.strerror}). See to it that no other prepare.py writes there")
        held = True
    if not held:
        lock.seek(0)
        owner = lock.read()
        lock.close()
        raise ValueError(
            f"{out}: another prepare.py is writing there (process {owner}): wait for it, or choose another folder"
        )
    # Its owner may have finished, and removed it, after it was opened here and before it was locked.
    mine = os.fstat(lock.fileno())
    if not os.path.exists(lock.name) or not os.path.samestat(mine, os.stat(lock.name)):
        lock.close()
        raise ValueError(
            f"{out}: another prepare.py has just finished there: start again if it is to be done once more"
        )
    # A worker inherits the open file, and with it the lock, which would last until the last worker is gone.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock.close)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def not_ours(folder, joined):
    """The name of something in a folder that prepare.py (or data.py --join) did not write there, or None."""
    if not folder.is_dir():
        return folder.name if os.path.lexists(folder) else None
    entries = sorted(os.listdir(folder))
    ours = set()
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        files = {shard["file"] for shard in shards_of(meta)}
        # The shards of a joined folder lie in others.
        elsewhere = any(map(os.path.dirname, files))
        if joined:
            ours = {"meta.json", "tokenizer.json", "report.json", "report.md"}
        elif "report.json" in entries and not elsewhere:
            ours = WRITTEN | files
    # There is no meta.json, or it is another program's.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return next((name for name in entries if name not in ours), None)


def publish(final, tmp):
    """Put tmp/data in the place of `final`, whose old data go only when the new ones stand, and remove tmp."""
    data, old = tmp / "data", tmp / "old"
    for file in data.iterdir():
        flush(file)
    flush(data)
    if final.is_dir():
        os.rename(final, old)
    try:
        os.rename(data, final)
    except OSError:
        if old.is_dir():
            os.rename(old, final)
        raise
    flush(final.parent)
    clear(tmp)


def clear(tmp):
    """Remove what a run made in its tmp folder; the lock last, so that a kill in between leaves a folder of ours."""
    for name in ("work", "data", "old"):
        shutil.rmtree(tmp / name, ignore_errors=True)
    # What the user has put there keeps the folder.
    with contextlib.suppress(OSError):
        os.remove(tmp / LOCK)
        os.rmdir(tmp)
