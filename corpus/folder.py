"""
The data folder OUT: tokens are written into files, files of tokens are cut into shards, and OUT is replaced as a whole.

A shard is a 1-D .npy of uint16, or of uint32 if the vocabulary has more than 65,536 ids. data.py maps it into memory
without unpickling.

The new OUT is made in OUT.tmp, and renamed when it is complete. A folder with files that prepare.py did not write is
not replaced.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

import numpy as np

from engine.files import lock, read_json, replace_folder, restore_folder, sha256

LOCK = ".prepare.lock"
# The last three were written by older versions of prepare.py, whose folders may be replaced too.
WRITTEN = {
    "meta.json", "documents.parquet", "report.json", "report.md", "tokenizer.json", "probes.json",
    "domains.csv", "hosts_refused.csv", "hosts_unknown.csv", "hosts_unparsable.csv", "hosts_several.csv",
    "kept.parquet", "removed.jsonl.gz", "flow.png",
}

SPLITS = ("train", "val")

# -----------------------------------------------------------------------------
# tokens and shards


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


# -----------------------------------------------------------------------------
# replacing the folder


@contextlib.contextmanager
def building(out, inputs):
    """
    Context manager that locks a data folder for this process. Yields (final, tmp): the folder with links resolved, and
    OUT.tmp, where work/ and data/ are made. After a user's mistake a tmp that is new is removed; after a full disk it
    stays, to resume from.

    inputs: paths that are read. ValueError, with nothing written, if files of the user would be lost or another process
    is writing there.
    """
    final = Path(os.path.realpath(out))
    tmp = Path(f"{final}.tmp")
    check_replaceable(out, final, tmp, inputs)
    tmp.mkdir(parents=True, exist_ok=True)
    with lock(tmp / LOCK, "wait for it, or choose another folder") as file:
        # Workers inherit the open file: they close it, or they would hold the lock after the main process has died.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=file.close)
        resumes = (tmp / "work").exists()
        restore_folder(final, tmp / "old")
        try:
            yield final, tmp
        except (ValueError, ImportError, FileNotFoundError, IsADirectoryError, BrokenPipeError):
            if not resumes:
                clear(tmp)
            raise
        except KeyboardInterrupt:
            print(f"interrupted: {out} is as it was; the same command resumes from {tmp}")
            raise
        except OSError as e:
            raise OSError(f"{e}. {out} is as it was; the same command resumes from {tmp}") from None


def check_replaceable(out, final, tmp, inputs):
    """ValueError if `final` cannot be made or replaced without touching files of the user."""
    for path in inputs:
        real = Path(os.path.realpath(path))
        if real.is_relative_to(final) or real.is_relative_to(tmp):
            raise ValueError(f"{out} is or holds {path}, an input, and would be replaced: choose another folder")
        if final.is_relative_to(real):
            raise ValueError(f"{out} lies in {path}, an input: choose a folder outside it")
    if os.path.lexists(final) and not final.is_dir():
        raise ValueError(f"{out} is a file: name a folder, which prepare.py makes")
    if os.path.ismount(final):
        raise ValueError(f"{out} is a mount point, which cannot be replaced: choose a folder in it")
    if os.path.lexists(tmp) and not (tmp.is_dir() and (LOCK in os.listdir(tmp) or not os.listdir(tmp))):
        raise ValueError(f"{tmp} exists and prepare.py did not write it: move it, or choose another folder")
    foreign = foreign_entry(final)
    if foreign:
        raise ValueError(f"{out} holds {foreign}, which prepare.py did not write: choose another folder, or an empty "
                         "one")


def foreign_entry(folder):
    """The name of something in a folder that prepare.py did not write there, or None."""
    if not folder.is_dir():
        return folder.name if os.path.lexists(folder) else None
    entries, written = sorted(os.listdir(folder)), set()
    # A damaged or missing meta.json makes every file a foreign one.
    with contextlib.suppress(Exception):
        shards = {shard["file"] for shard in shards_of(read_json(folder / "meta.json"))}
        if "report.json" in entries:
            written = WRITTEN | shards
    return next((name for name in entries if name not in written), None)


def is_prepared(folder):
    """Whether prepare.py wrote this folder."""
    return all(os.path.isfile(f"{folder}/{name}") for name in ("meta.json", "report.json", "documents.parquet"))


def publish(final, tmp):
    """
    Replace `final` by tmp/data. The old data are removed last.

    OSError, with `final` unchanged, if a file of the user has appeared in it since building().
    """
    foreign = foreign_entry(final)
    if foreign:
        raise OSError(f"{final}/{foreign} has appeared: move it")
    # Work without a plan is not resumed: after a kill from here on, the same command starts anew.
    (tmp / "work" / "plan.json").unlink(missing_ok=True)
    replace_folder(final, tmp / "data", tmp / "old")


def empty(tmp):
    """Remove the files of a run from its tmp folder, but not the lock."""
    for name in ("work", "data", "old"):
        shutil.rmtree(tmp / name, ignore_errors=True)


def clear(tmp):
    """Remove the files of a run and its tmp folder, the lock last: after a kill in between, building() accepts it."""
    empty(tmp)
    # The folder stays if the user has put a file there.
    with contextlib.suppress(OSError):
        os.remove(tmp / LOCK)
        os.rmdir(tmp)
