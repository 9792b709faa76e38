"""
Replace a data folder as a whole: made as OUT.tmp, flushed to disk, and renamed.

The old folder stands until the new one does. Nothing that prepare.py did not write is replaced.
"""

import contextlib
import os
import shutil
from pathlib import Path

from corpus.shards import shards_of
from engine.files import flush, lock, read_json

LOCK = ".prepare.lock"
# The last three are of an older prepare.py, whose folders may be replaced.
WRITTEN = set("""meta.json documents.parquet report.json report.md tokenizer.json probes.json
    kept.parquet removed.jsonl.gz flow.png""".split())


@contextlib.contextmanager
def building(out, inputs, joined=None):
    """
    Lock a data folder for this process, as a context: (final, tmp), the folder without links, and the folder OUT.tmp
    where work/ and data/ are made. A mistake of the user leaves no tmp, a full disk one to resume from.

    inputs: paths that are read. joined: whether the old folder must be one of data.py --join; None: it may be either.
    ValueError, with nothing written, if something of the user's would be lost or another process is writing there.
    """
    final = Path(os.path.realpath(out))
    tmp = Path(f"{final}.tmp")
    with locked(out, final, tmp, inputs, joined):
        before = (tmp / "work").exists()
        # A kill between the two renames of publish().
        if (tmp / "old").is_dir() and not final.exists():
            os.rename(tmp / "old", final)
        try:
            yield final, tmp
        except (ValueError, ImportError, FileNotFoundError, IsADirectoryError, BrokenPipeError):
            if not before:
                clear(tmp)
            raise
        except OSError as e:
            raise OSError(f"{e}. {out} is as it was; the same command resumes from {tmp}") from None


def locked(out, final, tmp, inputs, joined):
    """The lock of the folder `tmp`, an open file. ValueError: see building()."""
    try:
        refuse(out, final, tmp, inputs, joined)
        tmp.mkdir(parents=True, exist_ok=True)
        file = lock(tmp / LOCK, "wait for it, or choose another folder")
    except OSError as e:
        raise ValueError(f"{out} cannot be written ({e.strerror}): choose another folder") from None
    # A process that has just finished there may have removed the file that we opened.
    if not os.path.exists(file.name):
        raise ValueError(f"{out}: another process has just finished there: run the command again")
    # A worker inherits the open file, and would hold the lock after the main process has died.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=file.close)
    return file


def refuse(out, final, tmp, inputs, joined):
    """ValueError if `final` cannot be made or replaced without touching files of the user."""
    if Path(os.path.realpath("")).is_relative_to(final):
        raise ValueError(f"{out} is or holds the working directory: choose another folder")
    for path in inputs:
        real = Path(os.path.realpath(path))
        if real.is_relative_to(final) or real.is_relative_to(tmp):
            raise ValueError(f"{out} is or holds {path}, an input, and would be replaced: choose another folder")
        if final.is_relative_to(real):
            raise ValueError(f"{out} lies in {path}, an input: choose a folder outside it")
    if os.path.ismount(final):
        raise ValueError(f"{out} is a mount point, which cannot be replaced: choose a folder in it")
    if os.path.lexists(tmp) and not (tmp.is_dir() and (LOCK in os.listdir(tmp) or not os.listdir(tmp))):
        raise ValueError(f"{tmp} exists and prepare.py did not write it: move it, or choose another folder")
    stranger = not_ours(final, joined)
    if stranger:
        raise ValueError(f"{out} holds {stranger}, which prepare.py did not write: choose another folder, or an empty "
                         "one")


def not_ours(folder, joined):
    """The name of something in a folder that prepare.py (or data.py --join) did not write there, or None."""
    if not folder.is_dir():
        return folder.name if os.path.lexists(folder) else None
    entries, ours = sorted(os.listdir(folder)), set()
    with contextlib.suppress(Exception):
        files = {shard["file"] for shard in shards_of(read_json(folder / "meta.json"))}
        # The shards of a joined folder lie in others.
        if "report.json" in entries and joined in (None, any(map(os.path.dirname, files))):
            ours = WRITTEN | files
    return next((name for name in entries if name not in ours), None)


def publish(final, tmp):
    """
    Put tmp/data in the place of `final`, whose old data are removed when the new ones stand.

    OSError, with `final` as it was, if a file of the user has come to it since building().
    """
    data, old = tmp / "data", tmp / "old"
    stranger = not_ours(final, None)
    if stranger:
        raise OSError(f"{final}/{stranger} has appeared: move it")
    for path in (*data.iterdir(), data):
        flush(path)
    # The work is done: after a kill from here on the same command starts again.
    (tmp / "work" / "plan.json").unlink(missing_ok=True)
    if final.is_dir():
        os.rename(final, old)
    try:
        os.rename(data, final)
    except BaseException:
        if old.is_dir():
            os.rename(old, final)
        raise
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def empty(tmp):
    """Remove the files of a run from its tmp folder, but not the lock."""
    for name in ("work", "data", "old"):
        shutil.rmtree(tmp / name, ignore_errors=True)


def clear(tmp):
    """Remove the files of a run and its tmp folder, the lock last: a kill in between leaves a folder that is ours."""
    empty(tmp)
    # A file that the user put there keeps the folder.
    with contextlib.suppress(OSError):
        os.remove(tmp / LOCK)
        os.rmdir(tmp)
