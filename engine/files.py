"""
Files that are whole or absent, whatever happens to the process or to the power.

    write_flushed    temporary name, fsync, rename, fsync of the folder: a reader finds the old file or the new one
    make_folder      a new folder whose own name is on disk too
    flush            fsync of a file that is written already; a rename may reach the disk before the data it names
    lock             one process at a time; the kernel frees the lock when its owner dies, even by kill -9
    sha256           shows later whether a bit has flipped
    read_json        the object in a JSON file, or an error of one line
    read_text        the text in a UTF-8 file, or an error of one line
    in_one_line      any error about a file as an error of one line
    replace_folder   a new folder takes the name of an old one

This file imports only the standard library, so that data workers and --help do not wait for torch.
"""

import contextlib
import hashlib
import json
import os
import shutil


def sha256(path):
    """The sha256 of a file, in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_of(content):
    """The sha256 of a JSON value, or of one with dates; the order of keys does not change it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def version(meta):
    """
    The hash that identifies a version of a data set. It covers all of meta.json, and so every token. meta.json, the
    report, and the config.json and checkpoints of every run without stages contain it.
    """
    rest = dict(meta)
    rest.pop("version", None)
    # Sorted keys hide the order of the sources, so an unsorted order is hashed with them.
    names = list(meta["sources"])
    return sha256_of(rest if names == sorted(names) else [rest, names])


def read_json(path):
    """The object in a JSON file. ValueError, one line, if it is damaged."""
    try:
        saved = json.loads(read_text(path))
    except (ValueError, RecursionError) as e:              # RecursionError: a million brackets
        raise ValueError(f"{path} is damaged, it is not JSON ({e}): fetch or write it again") from None
    if not isinstance(saved, dict):
        raise ValueError(f"{path} is damaged: want a JSON object, it holds a {type(saved).__name__}")
    return saved


def read_text(path):
    """The text of a UTF-8 file, with its own line ends. ValueError for other bytes, with the position of the first."""
    try:
        with open(path, encoding="utf-8", newline="") as f:
            return f.read()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: byte {e.start} is not UTF-8; want a text file (iconv -t utf-8 converts)") from None


@contextlib.contextmanager
def in_one_line(path, *passed):
    """
    Raise an error about a file as a ValueError of one line. The errors of the libraries share no class. passed: classes
    of errors that stay as they are.
    """
    try:
        yield
    except (FileNotFoundError, ModuleNotFoundError, *passed):
        raise
    except Exception as error:
        # Our own errors are one line already.
        if str(error).startswith(path):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{path}: damaged, or not what its name says, or out of reach ({reason})") from None


def write_flushed(path, content, shared=False):
    """
    Write a file, all or nothing: a full disk or a power cut leaves the old one.

    content: bytes, or a string, which becomes UTF-8. shared: other processes may write the same file at once, so the
    temporary file gets a random name. OSError names `path`, not the temporary file.
    """
    content = content.encode() if isinstance(content, str) else content
    tmp = f"{path}.{os.urandom(4).hex()}.tmp" if shared else f"{path}.tmp"
    # A killed process may have left it; or it is a link in a downloaded folder, whose target must stay as it is.
    with contextlib.suppress(OSError):
        os.remove(tmp)
    try:
        with open(tmp, "xb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.remove(tmp)
        raise OSError(e.errno, e.strerror, str(path)) from None
    flush(os.path.dirname(os.path.abspath(path)))


def write_json(path, content):
    """write_flushed() of an object, as JSON that people can read."""
    write_flushed(path, json.dumps(content, indent=1, ensure_ascii=False))


def make_folder(path):
    """os.makedirs, with each new name flushed into the folder that holds it: a power cut would take all inside."""
    if os.path.lexists(path):
        return
    holder = os.path.dirname(os.path.abspath(path))
    make_folder(holder)
    # Another process may make it at the same time.
    os.makedirs(path, exist_ok=True)
    flush(holder)


def flush(path):
    """fsync a file or folder that is written already. Windows cannot open a folder: there it does nothing."""
    if os.name != "nt":
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def lock(path, advice, wait=False):
    """
    Open a file and lock it until this process, and each child that was given the file, have closed it. advice: for the
    error if another process has it. wait: wait for that process instead.

    ValueError: another process has it. A file system without locks (NFS without lockd, Windows) is a warning.
    """
    # "a", not "w": the file may be a link in a downloaded folder, whose target must stay as it is.
    file = open(path, "a+", encoding="utf-8", errors="replace")
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise ValueError(f"{os.path.dirname(path)}: another process is writing there: {advice}") from None
        print(f"{path}: waiting for the process that is writing it")
        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError) as e:
        print(f"{path}: no locks here ({e}): make sure that no other process writes there")
    return file


def replace_folder(folder, new, old):
    """
    Rename the folder `new` to `folder`. A folder already there is called `old` in between, and removed last.

    After a kill between the two renames restore_folder() puts the old folder back. OSError: `folder` is as it was.
    """
    for name in os.listdir(new):
        flush(os.path.join(new, name))
    flush(new)
    if os.path.isdir(folder):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except BaseException:
        restore_folder(folder, old)
        raise
    flush(os.path.dirname(folder))
    shutil.rmtree(old, ignore_errors=True)


def restore_folder(folder, old):
    """Undo a replacement of `folder` that was killed between its two renames."""
    if os.path.isdir(old) and not os.path.lexists(folder):
        os.rename(old, folder)
