"""
What the command line names -> files: files, folders, globs, hf://; each file once, and none lost silently.

    .txt .md .markdown .rst .py      a document a file
    .html .htm                       a document a file: its main text, by trafilatura
    .jsonl .ndjson                   a document a line
    .json                            a list of documents, or documents one after the other
    .csv .tsv                        a document a row, under a line of names
    .parquet                         a document a row
    hf://datasets/...                the same on the hub, streamed: nothing is kept on this disk
    s3://, gs://, https://...        the same, by what fsspec has installed for it (s3fs, gcsfs, ...)

All but parquet may be packed, .gz or .zst, and endings may be written in capitals. Of a folder, what has another ending
is counted by it: ignored(). engine/readers.py reads what is found here.
"""

import glob
import os
import re
import time
from collections import Counter, deque

from tqdm import tqdm

KINDS = {
    ".txt": "text",
    ".md": "text",
    ".markdown": "text",
    ".rst": "text",
    ".py": "text",
    ".html": "html",
    ".htm": "html",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "table",
    ".tsv": "table",
    ".parquet": "parquet",
}
PACKED = (".gz", ".zst")
# What is no text, and what makes text of it.
CONVERTERS = {
    ".pdf": "pdftotext FILE.pdf",
    ".epub": "pandoc FILE.epub -t plain -o FILE.txt",
    ".docx": "pandoc FILE.docx -t plain -o FILE.txt",
    ".odt": "pandoc FILE.odt -t plain -o FILE.txt",
    ".warc": "datatrove's WarcReader and Trafilatura",
    ".zip": "unzip",
    ".tar": "tar -x",
    ".tgz": "tar -xz",
    ".bz2": "bunzip2",
    ".xz": "unxz",
}


def ending(path):
    """The ending of a file's name in small letters, without that of its packing: X.TXT.gz -> .txt."""
    name = os.path.basename(path).lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return os.path.splitext(name)[1]


def kind_of(path):
    """The kind of a file by the ending of its name, one of KINDS; None where it cannot be read."""
    kind = KINDS.get(ending(path))
    if kind == "parquet" and path.lower().endswith(PACKED):
        return None
    return kind


def unreadable(path):
    """Why a file of no known kind cannot be read, and what could be done about it."""
    how = CONVERTERS.get(ending(path))
    return f"unknown kind of file; {how} makes text of it" if how else "unknown kind of file"


# ----------------------------------------------------------------------------------------------------------------------
# on this machine


def matches(path):
    """The files and folders that a path or a glob names, in order. What is really called so is no pattern: notes[1]."""
    return [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))


def find(paths, wanted=kind_of):
    """
    [(name, path)] of all files that the command line names. wanted: is a file of a folder taken, by its path?

    A name is relative to what the user named, so that moving a folder changes no id. Where two files would share one,
    the later gets the folder that the user named in front. Of several links to a file one counts. ValueError: nothing
    matches, or even then two files share a name.
    """
    files, known = {}, set()
    for path in paths:
        if path.startswith("hf://"):
            files.update(hub_files(path))
            continue
        if "://" in path:
            files.update(store_files(path))
            continue
        found = matches(path)
        if not found:
            raise ValueError(f"no such file, folder or pattern: {path!r}")
        for match in found:
            root, inside = files_of(match)
            for file in inside:
                if file == match and not_utf8(file):
                    raise ValueError(f"{file!r}: rename it, its name is not UTF-8")
                if file != match and why_not(file, root, wanted) or identity(file) in known:
                    continue
                known.add(identity(file))
                name = below(root, file)
                if name in files:
                    name = f"{os.path.basename(os.path.abspath(root))}/{name}"
                if files.setdefault(name, file) != file:
                    raise ValueError(
                        f"{file} and {files[name]} would both be called {name!r}: name a folder above both instead"
                    )
    return list(files.items())


def store_files(path):
    """{name: URL} of the files that a URL of fsspec names: a file, a folder or a glob."""
    import fsspec
    try:
        fs, root = fsspec.core.url_to_fs(path)
    # s3fs and its like are packages of their own, and a name that none has is an error of fsspec.
    except (ImportError, ValueError) as e:
        raise ValueError(f"{path}: {e}") from None
    folder = root.rstrip("/") if fs.isdir(root) else os.path.dirname(re.split(r"[*?[]", root)[0])
    found = fs.find(root) if fs.isdir(root) else fs.glob(root)
    files = sorted(file for file in found if kind_of(file))
    if not files:
        raise ValueError(f"no such file, folder or pattern: {path!r}")
    return {file[len(folder):].lstrip("/"): fs.unstrip_protocol(file) for file in files}


def ignored(paths):
    """
    What find() takes no notice of in the folders that are named, here or on the hub: {ending: number of files}, the
    most first. What is read under another of the paths, or stands in two of them, is not counted again.
    """
    others, read = {}, set()
    for path in paths:
        if path.startswith("hf://"):
            _, root, files, rest = hub_listing(path)
            read.update(root + file for file in files)
            others.update((root + file, reason) for file, reason in rest.items())
            continue
        for match in matches(path):
            root, inside = files_of(match)
            here = os.path.abspath(root)
            for file in inside:
                reason = None if file == match else why_not(file, root, kind_of)
                file = f"{here}/{below(root, file)}"
                if reason:
                    others[file] = reason
                else:
                    read.add(file)
    counts = Counter(others[file] for file in others.keys() - read)
    return dict(sorted(counts.items(), key=lambda one: (-one[1], one[0])))


def why_not(file, root, wanted):
    """Why a file of the folder `root` is not taken: its ending, "hidden", "broken link", ...; None if it is."""
    if any(part.startswith(".") for part in below(root, file).split("/")):
        return "hidden"
    if not os.path.isfile(file):
        return "broken link"
    if not_utf8(file):
        return "name not UTF-8"
    return None if wanted(file) else ending(file) or "no ending"


def below(root, file):
    """The name of a file of files_of() relative to its root. os.path.relpath takes thirty times as long."""
    return file[len(root):].replace(os.sep, "/").lstrip("/")


def not_utf8(path):
    """Is a name of other bytes than UTF-8, as old archives have? It could be written into no report."""
    try:
        path.encode()
        return False
    except UnicodeEncodeError:
        return True


def identity(path):
    """What a file or folder is known by, whatever links lead to it."""
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino


def files_of(path):
    """
    (the folder that names are relative to, the files): of a folder all of them, at any depth, in the order of their
    names.

    Links are followed, after all that is there without one. A folder is entered once, so that a loop of links ends, and
    a file that is there under several names has the first.
    """
    if not os.path.isdir(path):
        return os.path.dirname(path), [path]
    here, linked, entered = [], [], set()
    folders = deque([path])
    while folders:
        folder = folders.popleft()
        if identity(folder) in entered:
            continue
        entered.add(identity(folder))
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            # entry.is_dir() asks the disk for links alone, but raises where one leads to itself.
            if os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
                later = folders.append if entry.is_symlink() else folders.appendleft
                later(entry.path)
            else:
                (linked if entry.is_symlink() else here).append(entry.path)
    files = {}
    for file in [*sorted(here), *sorted(linked)]:
        files.setdefault(identity(file) if os.path.exists(file) else file, file)
    return path, sorted(files.values())


# ----------------------------------------------------------------------------------------------------------------------
# the hub


def hub():
    """The hub as a file system. Imported here, since most runs do not need it."""
    from huggingface_hub import HfFileSystem
    return HfFileSystem()


def hub_try(path, ask):
    """
    ask(file system), again after 1, 4 and 16 seconds where the network fails.

    OSError, one line, if it stays away. ValueError and FileNotFoundError are answers, and are raised at once.
    """
    for pause in (1, 4, 16, None):
        try:
            return ask(hub())
        except (ValueError, FileNotFoundError):
            raise
        # Errors of the network come from httpx, requests and the hub, and share no class.
        except Exception as e:
            kind = type(e).__name__
            why = " ".join(str(e).split())[:200]
            hopeless = ("OfflineModeIsEnabled", "GatedRepoError", "RepositoryNotFoundError")
            if kind in hopeless or not pause:
                break
            tqdm.write(f"{path}: {kind}; again in {pause} s")
            time.sleep(pause)
    raise OSError(
        f"{path} could not be read from the hub ({kind}: {why}). "
        "Nothing is lost: the same command goes on where it stopped"
    )


def hub_files(path):
    """
    hf://datasets/OWNER/NAME[@revision][/FOLDER | /GLOB.ENDING] -> {name: path at the revision of now}.

    Of a folder the files of one kind are taken: parquet, else lines, tables or lists. Of a whole data set those that
    have "train" in their name, if there are any: the others are tests.
    """
    data_set, root, files, _ = hub_listing(path)
    return {f"{data_set}/{file}": f"hf://{root}{file}" for file in files}


def hub_listing(path):
    """
    (OWNER/NAME, what stands before the names, the files that hub_files() takes, {other file: why it is not taken}).
    """
    parts = path.removeprefix("hf://").rstrip("/").split("/", 3)
    if len(parts) < 3 or parts[0] != "datasets":
        raise ValueError(
            f"{path!r}: want hf://datasets/OWNER/NAME, and behind it /FOLDER or /FILES.parquet, where FILES may be a "
            "pattern like data/*/train/*"
        )
    _, owner, name, *inside = parts
    pattern = "".join(inside)
    kinds = [kind_of(pattern)]
    if not kinds[0]:
        pattern = "/".join([*inside, "**/*"])
        kinds = ["parquet", "lines", "table", "json"]
    # One commit for the whole run, so that a push to the repository in between mixes nothing.
    name, _, revision = name.partition("@")
    if not revision:
        revision = hub_try(path, lambda fs: fs._api.dataset_info(f"{owner}/{name}").sha)
    root = f"datasets/{owner}/{name}@{revision}/"
    found = hub_try(path, lambda fs: fs.glob(root + pattern, detail=True))
    every = sorted(file.split("/", 3)[3] for file, info in found.items() if info["type"] == "file")
    for kind in kinds:
        files = [file for file in every if kind_of(file) == kind]
        if files:
            break
    else:
        raise ValueError(f"no file on the hub matches {path!r} ({pattern}); of a folder {', '.join(kinds)} are read")
    others = {file: ending(file) or "no ending" for file in every}
    others.update((file, f"{ending(file)} without train in its name") for file in files)
    if not inside:
        files = [file for file in files if "train" in file] or files
    for file in files:
        del others[file]
    return f"{owner}/{name}", root, files, others
