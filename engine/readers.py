"""
Files to rows: what the command line names -> batches of raw rows -> documents, or the rows as they are.

    .txt .md .py           a document a file                    id = its path below what was named
    .jsonl (.gz, .zst)     a document a line, field "text"      id = file:id, or file:number of the line
    .parquet               a document a row, column "text"      the same; read row group by row group
    hf://datasets/...      parquet on the hub, streamed the same way, nothing else is downloaded

prepare.py makes documents of them, {"id", "text", url, language, license, ...}; posttrain/sft.py conversations.

The main process cuts files into batches of about 4 MB of whole lines, so that neither a long file nor a long list of
files is ever in memory; worker processes parse them. What cannot be read (bytes that are no UTF-8, lines that are no
JSON, a torn archive) is a row with a problem instead of a text: it is counted and named, never silently lost.
"""

import glob
import gzip
import hashlib
import io
import json
import os
import time
import zlib
from functools import lru_cache

from tqdm import tqdm

from engine.files import sha256

ENDINGS = (".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
# Bytes of raw text in a batch, about. A worker needs some ten times as much memory.
BATCH = 4 << 20
# Bytes of a parquet row group that are read at once. Larger row groups are cut by rows.
SLICE = 64 << 20


def id_hash(doc_id):
    """
    A 64-bit integer that depends on the id alone.

    Documents are trained on in its order.
    """
    digest = hashlib.sha256(doc_id.encode()).digest()
    return int.from_bytes(digest[:8], "big")


# ----------------------------------------------------------------------------------------------------------------------
# what the command line names


def find(paths, endings=ENDINGS):
    """
    [(name, path)] of all files that the command line names: files, folders, globs, hf://. endings: what is taken of a
    folder.

    A name is relative to what the user named, so that moving a folder changes no id. Where two files would share one,
    the later gets the folder that the user named in front. ValueError: nothing matches, or even then two share a name.
    """
    files = {}
    for path in paths:
        if path.startswith("hf://"):
            files.update(hub_files(path))
            continue
        matches = sorted(glob.glob(path, recursive=True))
        # A file whose own name reads like a pattern, as notes[1].txt does, matches no glob.
        if not matches and os.path.exists(path):
            matches = [path]
        if not matches:
            raise ValueError(f"no such file, folder or pattern: {path!r}")
        for match in matches:
            root, inside = files_of(match, endings)
            for file in inside:
                name = os.path.relpath(file, root).replace(os.sep, "/")
                if files.get(name, file) != file:
                    name = f"{os.path.basename(os.path.abspath(root))}/{name}"
                if files.setdefault(name, file) != file:
                    raise ValueError(
                        f"{file} and {files[name]} would both be called {name!r}: name a folder above both instead"
                    )
    return list(files.items())


def files_of(path, endings):
    """(the folder that names are relative to, the files): of a folder those that can be read, at any depth."""
    if not os.path.isdir(path):
        return os.path.dirname(path), [path]
    inside = sorted(glob.glob(os.path.join(path, "**", "*"), recursive=True))
    return path, [file for file in inside if file.endswith(endings) and os.path.isfile(file)]


def check(name, path, text_field="text"):
    """
    Read a file once from end to end: {"name", "path", "bytes", "sha256", "problem"}, problem None if it can be used.

    Compressed files are unpacked to their end, since a torn one shows only there, and half a file must not be used.
    "unpacked" is then their size in bytes. ValueError if a parquet file has no text column (text_field "": none is
    wanted); OSError if the hub cannot be reached.
    """
    file = dict(name=name, path=path, bytes=0, sha256=None, problem=None)
    if path.startswith("hf://"):
        return hub_info(file, text_field)
    if not path.endswith(ENDINGS):
        return dict(file, problem="unknown kind of file")
    parquet = None
    try:
        file["bytes"] = os.path.getsize(path)
        file["sha256"] = sha256(path)
        if path.endswith(".parquet"):
            parquet = open_parquet(path)
            file["unpacked"] = sum(size for _, size in row_groups(parquet))
        elif has_lines(path):
            with open_lines(path) as f:
                if b"\0" in f.read(1 << 16):
                    file["problem"] = "binary"
                while path.endswith((".gz", ".zst")) and f.read(1 << 20):
                    file["unpacked"] = f.tell()
    except (OSError, EOFError, zlib.error, ValueError):
        file["problem"] = "unreadable"
    if parquet and text_field:
        want_column(parquet, path, text_field)
    return file


class NoColumn(ValueError):
    """The data are sound, but lack a column that the user named."""


def want_column(parquet, path, text_field):
    """NoColumn, with the columns there are, if a parquet file has none of that name."""
    columns = parquet.schema_arrow.names
    if text_field not in columns:
        have = ", ".join(columns) or "none"
        raise NoColumn(f"{path}: no column {text_field!r}; it has {have}. Choose one with --text_field")


def has_lines(path):
    """Is every line of the file a document?"""
    return ".jsonl" in os.path.basename(path)


def open_lines(path):
    """A binary stream of a .jsonl, .jsonl.gz or .jsonl.zst. Reading a torn one raises."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        # The reader of the package zstandard ends a torn stream in silence.
        import pyarrow
        return pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd")
    return open(path, "rb")


# ----------------------------------------------------------------------------------------------------------------------
# lists that decide about documents: robots.txt of hosts, domains, agents, prompts


def rows_of(path, *columns, comments=False, errors="strict"):
    """
    Yield a list for each row of a file: one value per entry of columns, a tuple of names of which the first that exists
    is taken. path: .parquet, .jsonl(.gz, .zst), or text, whose lines, but for empty ones, are the only column.

    comments: does a # begin a comment in a line of text? errors: what becomes of bytes that are no UTF-8, as in open().
    ValueError if the file is damaged or lacks a column.
    """
    try:
        if path.endswith(".parquet"):
            table = open_parquet(path)
            names = present(path, columns, table.schema_arrow.names)
            for batch in table.iter_batches(1024, columns=names):
                for row in batch.to_pylist():
                    yield [row[name] for name in names]
            return
        lines = io.TextIOWrapper(open_lines(path), encoding="utf-8", errors=errors)
        plain = not has_lines(path)
        for number, line in enumerate(lines, 1):
            if plain and comments:
                line = line.partition("#")[0]
            line = line.strip()
            if line and plain:
                yield [line]
            elif line:
                row = json.loads(line)
                row = row if isinstance(row, dict) else {}
                yield [row[name] for name in present(f"{path} line {number}", columns, row)]
    # These two say in one line what is wrong.
    except (NoColumn, FileNotFoundError):
        raise
    except (ValueError, OSError, EOFError, zlib.error) as e:
        reason = " ".join(str(e).split())
        raise ValueError(f"{path}: damaged, or not what its name says ({reason})") from None


def present(where, columns, names):
    """Of each tuple of columns the first that is among names. NoColumn if none of them is."""
    found = [next(filter(names.__contains__, keys), None) for keys in columns]
    if None in found:
        keys = columns[found.index(None)]
        raise NoColumn(f"{where}: no column {' or '.join(keys)}; it has {', '.join(names) or 'none'}")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# files to batches: a batch is a list of pieces (number of the file, first row, raw bytes or rows of a row group)


def batches(files, most=None):
    """
    Yield (number, pieces, bytes of input so far). most: bytes of a batch, BATCH if None.

    Which rows form a batch depends on the files alone, so that a run that was killed finds its batches again.
    """
    number = size = seen = 0
    pieces = []
    for i, file in enumerate(files):
        if file["problem"]:
            continue
        for piece, n in pieces_of(i, file):
            if pieces and size + n > (most or BATCH):
                seen += size
                yield number, pieces, seen
                number += 1
                pieces, size = [], 0
            pieces.append(piece)
            size += n
    if pieces:
        yield number, pieces, seen + size


def pieces_of(i, file):
    """Yield ((i, first row, raw), its bytes in memory) for all rows of file number i."""
    path = file["path"]
    if path.endswith(".parquet"):
        yield from row_ranges(i, file.get("groups") or row_groups(open_parquet(path)))
    elif has_lines(path):
        yield from line_blocks(i, path)
    else:
        with open(path, "rb") as f:
            raw = f.read()
        yield (i, 0, raw), len(raw)


def row_ranges(i, groups):
    """Pieces of a parquet file: raw is (row group, first row in it, end row in it), and the worker reads the rows."""
    row = 0
    for group, (rows, size) in enumerate(groups):
        step = max(1, -(-rows * SLICE // max(size, 1)))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            share = size * (end - begin) // rows
            yield (i, row + begin, (group, begin, end)), share
        row += rows


def line_blocks(i, path):
    """Pieces of a file of lines: raw is whole lines, of about BATCH bytes. The last line may lack its line break."""
    row, rest = 0, []
    with open_lines(path) as f:
        while block := f.read(BATCH):
            cut = block.rfind(b"\n") + 1
            # A line longer than a block is collected, and joined only once.
            if not cut:
                rest.append(block)
                continue
            raw = b"".join([*rest, block[:cut]])
            yield (i, row, raw), len(raw)
            row += raw.count(b"\n")
            rest = [block[cut:]]
    raw = b"".join(rest)
    if raw:
        yield (i, row, raw), len(raw)


# ----------------------------------------------------------------------------------------------------------------------
# batches to documents, in a worker process


def documents(files, pieces, text_field="text", columns=()):
    """
    Yield a dict for each row of a batch: its own columns, "file", "id", "text", and "language" where it is known.

    columns: those of parquet files that are read beside the usual ones. A row that cannot be used has text None and a
    "problem". FineWeb-2's language and script are joined: deu_Latn.
    """
    for i, first, raw in pieces:
        name, path = files[i]["name"], files[i]["path"]
        if path.endswith(".parquet"):
            yield from parquet_documents(name, path, first, raw, text_field, columns)
        elif has_lines(path):
            for row, line in enumerate(raw.split(b"\n"), first):
                if line and not line.isspace():
                    yield json_document(name, row, line, text_field)
        else:
            doc = file_document(name, raw)
            yield dict(doc, language="code") if path.endswith(".py") else doc


def broken(name, doc_id, problem, columns=()):
    """A document without text. columns: what its row has instead."""
    return dict(file=name, id=doc_id, text=None, problem=problem, columns=list(columns))


def file_document(name, raw):
    if b"\0" in raw:
        return broken(name, name, "binary")
    try:
        return dict(file=name, id=name, text=raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return broken(name, name, "not UTF-8")


def json_document(name, row, line, text_field):
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return broken(name, f"{name}:{row}", "not UTF-8")
    except (ValueError, RecursionError):
        # RecursionError: a line of a million brackets.
        record = None
    record = record if isinstance(record, dict) else {}
    return document(name, row, record, text_field, "a line without JSON text")


def document(name, row, record, text_field, problem):
    """A row of named columns as a document; one with `problem` if it has no text."""
    text = record.get(text_field)
    if not isinstance(text, str):
        return broken(name, f"{name}:{row}", problem, record)
    own = record.get("id")
    own_id = row if own is None else own
    doc = dict(record, file=name, text=writable(text), id=writable(f"{name}:{own_id}"))
    language = record.get("language") or record.get("lang")
    script = record.get("language_script")
    if language:
        doc["language"] = f"{language}_{script}" if script and "_" not in language else language
    return doc


def writable(text):
    """JSON may hold half a surrogate pair ("\\ud800"), which no UTF-8 can: it becomes a question mark."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()


def parquet_documents(name, path, first, rows, text_field, columns):
    """Documents of rows = (row group, begin, end) of a parquet file; one broken document if they cannot be read."""
    wanted = {text_field, "id", "url", "language", "lang", "language_script", "license", "date", *columns}
    try:
        for row, record in enumerate(parquet_records(path, rows, wanted), first):
            yield document(name, row, record, text_field, "a row without text")
    # What pyarrow says of damaged contents is a ValueError.
    except ValueError:
        yield broken(name, f"{name}:row group {rows[0]}", "unreadable")


def parquet_records(path, rows, wanted):
    """The wanted columns of rows = (row group, begin, end) of a parquet file, here or on the hub, as dicts."""
    if path.startswith("hf://"):
        # Where the network fails half-way, all rows are read once more, so that none is yielded twice.
        return hub_try(path, lambda fs: list(parquet_rows(hub_parquet(fs, path), *rows, wanted)))
    return parquet_rows(open_parquet(path), *rows, wanted)


def parquet_rows(parquet, group, begin, end, wanted):
    """Yield rows begin to end of a row group as dicts of the wanted columns that exist; other columns are not read."""
    columns = [name for name in parquet.schema_arrow.names if name in wanted]
    at = 0
    for batch in parquet.iter_batches(512, row_groups=[group], columns=columns):
        low = max(begin - at, 0)
        high = min(end - at, len(batch))
        if low < high:
            yield from batch.slice(low, high - low).to_pylist()
        at += len(batch)
        if at >= end:
            return


def open_parquet(path):
    if path.startswith("hf://"):
        return hub_try(path, lambda fs: hub_parquet(fs, path))
    import pyarrow.parquet
    return pyarrow.parquet.ParquetFile(path)


def row_groups(parquet):
    """[(rows, bytes unpacked)] of a parquet file, from its footer."""
    groups = map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups))
    return [(group.num_rows, group.total_byte_size) for group in groups]


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


# A footer describes all row groups: it is downloaded once, not once for each of them.
@lru_cache(maxsize=2)
def hub_parquet(fs, path):
    import pyarrow.parquet
    return pyarrow.parquet.ParquetFile(fs.open(path.removeprefix("hf://"), "rb"))


def hub_files(path):
    """
    hf://datasets/OWNER/NAME[@revision][/FOLDER | /GLOB.parquet] -> {name: path at the revision of now}. Only parquet.

    Of a whole data set those files are taken that have "train" in their name, if there are any: the others are tests.
    """
    parts = path.removeprefix("hf://").rstrip("/").split("/", 3)
    if len(parts) < 3 or parts[0] != "datasets":
        raise ValueError(
            f"{path!r}: want hf://datasets/OWNER/NAME, and behind it /FOLDER or /FILES.parquet, where FILES may be a "
            "pattern like data/*/train/*"
        )
    _, owner, name, *inside = parts
    pattern = "".join(inside)
    if not pattern.endswith(".parquet"):
        pattern = "/".join([*inside, "**/*.parquet"])
    # One commit for the whole run, so that a push to the repository in between mixes nothing.
    name, _, revision = name.partition("@")
    if not revision:
        revision = hub_try(path, lambda fs: fs._api.dataset_info(f"{owner}/{name}").sha)
    root = f"datasets/{owner}/{name}@{revision}/"
    found = hub_try(path, lambda fs: fs.glob(root + pattern))
    if not found:
        raise ValueError(f"no file on the hub matches {path!r} ({pattern}); only parquet is read there")
    files = sorted(file.split("/", 3)[3] for file in found)
    if not inside:
        files = [file for file in files if "train" in file] or files
    return {f"{owner}/{name}/{file}": f"hf://{root}{file}" for file in files}


def hub_info(file, text_field):
    """What is known of a file on the hub without a download: size, sha256 of its LFS object, row groups (footer)."""
    path = file["path"]
    info = hub_try(path, lambda fs: fs.info(path.removeprefix("hf://")))
    parquet = open_parquet(path)
    if text_field:
        want_column(parquet, path, text_field)
    lfs = info.get("lfs") or {}
    return dict(file, bytes=info["size"], sha256=lfs.get("sha256"), groups=row_groups(parquet))
