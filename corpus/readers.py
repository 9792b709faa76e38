"""
Files to documents: what the command line names -> batches of raw rows -> {"id", "text", url, language, license, ...}.

    .txt .md .py           a document a file                    id = its path below what was named
    .jsonl (.gz, .zst)     a document a line, field "text"      id = file:id, or file:number of the line
    .parquet               a document a row, column "text"      the same; read row group by row group
    hf://datasets/...      parquet on the hub, streamed the same way, nothing else is downloaded

The main process cuts files into batches of about 4 MB of whole lines, so that neither a long file nor a long list of files is
ever in memory; worker processes parse them. What cannot be read (bytes that are no UTF-8, lines that are no JSON, a torn
archive) is a row with a problem instead of a text: it is counted and named, never silently lost.
"""

import glob
import gzip
import hashlib
import json
import os
import time
import zlib
from functools import lru_cache

from tqdm import tqdm

ENDINGS = (".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
BATCH = 4 << 20                     # bytes of raw text a batch, about: a process holds some ten times as much
SLICE = 64 << 20                    # bytes of a parquet row group that are taken at once; larger groups are cut by rows


def sha256(path):
    """Of a file, or of all files of a folder with their names."""
    if os.path.isdir(path):
        inside = sorted(f for f in glob.glob(os.path.join(path, "**", "*"), recursive=True) if os.path.isfile(f))
        return hashlib.sha256("\n".join(f"{os.path.relpath(f, path)} {sha256(f)}" for f in inside).encode()).hexdigest()
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def place(doc_id):
    """An integer of 64 bits that depends on the id alone: documents stand in its order, and over 2^64 below val_share is validation."""
    return int.from_bytes(hashlib.sha256(doc_id.encode()).digest()[:8], "big")


# ----------------------------------------------------------------------------------------------------------------------
# what the command line names


def find(paths):
    """
    Files, folders, globs, hf:// -> [(name, path)]. A name is relative to what the user named, so that moving a folder changes
    nothing; where two files would share one, the later gets the folder that the user named in front.
    """
    files = {}
    for path in paths:
        if path.startswith("hf://"):
            files.update(hub_files(path))
            continue
        matches = sorted(glob.glob(path, recursive=True)) or ([path] if os.path.exists(path) else [])
        if not matches:
            raise ValueError(f"no such file, folder or pattern: {path!r}")
        for match in matches:
            inside, root = [match], os.path.dirname(match)
            if os.path.isdir(match):
                inside, root = sorted(glob.glob(os.path.join(match, "**", "*"), recursive=True)), match
                inside = [f for f in inside if f.endswith(ENDINGS) and os.path.isfile(f)]
            for file in inside:
                name = os.path.relpath(file, root).replace(os.sep, "/")
                if files.get(name, file) != file:
                    name = f"{os.path.basename(os.path.abspath(root))}/{name}"
                if files.get(name, file) != file:
                    raise ValueError(f"{file} and {files[name]} would both be called {name!r}: name a folder above both instead")
                files[name] = file
    return list(files.items())


def check(name, path, text_field="text"):
    """
    Read a file once from end to end: {"name", "path", "bytes", "sha256", "problem"}, problem None if it can be used.

    A torn .gz or .zst shows only at its end, so they are unpacked here (130 MB/s and more) rather than used by half.
    ValueError if a parquet file has no text column; OSError if the hub cannot be reached.
    """
    file = dict(name=name, path=path, bytes=0, sha256=None, problem=None)
    if path.startswith("hf://"):
        return hub_info(file, text_field)
    if not path.endswith(ENDINGS):
        return dict(file, problem="unknown kind of file")
    try:
        with open(path, "rb") as f:
            file["bytes"] = os.fstat(f.fileno()).st_size
            file["sha256"] = hashlib.file_digest(f, "sha256").hexdigest()
        if path.endswith(".parquet"):
            parquet = open_parquet(path)
            columns, file["unpacked"] = parquet.schema_arrow.names, sum(size for _, size in row_groups(parquet))
            if text_field not in columns:
                raise NoColumn(f"{path}: no column {text_field!r}; it has {', '.join(columns) or 'none'}. Choose one with --text_field")
        elif ".jsonl" in os.path.basename(path):
            with open_lines(path) as f:
                if b"\0" in f.read(1 << 16):
                    file["problem"] = "binary"
                while path.endswith((".gz", ".zst")) and f.read(1 << 20):
                    file["unpacked"] = f.tell()
    except NoColumn:
        raise
    except (OSError, EOFError, zlib.error, ValueError):
        file["problem"] = "unreadable"
    return file


class NoColumn(ValueError):
    pass


def open_lines(path):
    """A binary stream of a .jsonl, .jsonl.gz or .jsonl.zst."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        import pyarrow
        return pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd")      # tells a torn stream; zstandard's reader does not
    return open(path, "rb")


# ----------------------------------------------------------------------------------------------------------------------
# files to batches: a batch is a list of pieces (number of the file, first row, raw bytes or rows of a row group)


def batches(files, done=lambda number: False):
    """
    Yield (number, pieces, bytes of input so far). Where done(number) the pieces of a parquet file are not even looked at.

    Which rows form a batch depends on the files alone, so that a run that was killed finds its batches again.
    """
    number, pieces, size, seen = 0, [], 0, 0
    for i, file in enumerate(files):
        if file["problem"]:
            continue
        for piece, n in pieces_of(i, file):
            if pieces and size + n > BATCH:
                yield number, pieces, seen + size
                number, pieces, seen, size = number + 1, [], seen + size, 0
            pieces.append(piece)
            size += n
    if pieces:
        yield number, pieces, seen + size


def pieces_of(i, file):
    """Yield ((i, first row, raw), size in memory) of one file; for parquet raw is (row group, first row in it, end row in it)."""
    path = file["path"]
    if path.endswith(".parquet"):
        row = 0
        for group, (rows, size) in enumerate(file.get("groups") or row_groups(open_parquet(path))):
            step = max(1, -(-rows * SLICE // max(size, 1)))
            for begin in range(0, rows, step):
                end = min(begin + step, rows)
                yield (i, row + begin, (group, begin, end)), size * (end - begin) // max(rows, 1)
            row += rows
    elif ".jsonl" not in os.path.basename(path):
        with open(path, "rb") as f:
            raw = f.read()
        yield (i, 0, raw), len(raw)
    else:
        row, rest = 0, []
        with open_lines(path) as f:
            while block := f.read(BATCH):
                cut = block.rfind(b"\n") + 1
                rest.append(block[:cut] if cut else block)
                if cut:
                    raw = b"".join(rest)
                    yield (i, row, raw), len(raw)
                    row, rest = row + raw.count(b"\n"), [block[cut:]]
        if raw := b"".join(rest):
            yield (i, row, raw), len(raw)


# ----------------------------------------------------------------------------------------------------------------------
# batches to documents, in a worker process


def documents(files, pieces, text_field="text", columns=()):
    """
    Yield a dict for each row of a batch: its own columns, "file", "id", "text", and "language" where it is known (FineWeb-2's
    language and script are joined: deu_Latn). A row that cannot be used has text None and a "problem".
    """
    for i, first, raw in pieces:
        name, path = files[i]["name"], files[i]["path"]
        if path.endswith(".parquet"):
            yield from parquet_documents(name, path, first, raw, text_field, columns)
        elif ".jsonl" in os.path.basename(path):
            for row, line in enumerate(raw.split(b"\n"), first):
                if line and not line.isspace():
                    yield json_document(name, row, line, text_field)
        else:
            try:
                doc = dict(file=name, id=name, text=raw.decode("utf-8-sig")) if b"\0" not in raw else broken(name, name, "binary")
                yield dict(doc, language="code") if path.endswith(".py") else doc
            except UnicodeDecodeError:
                yield broken(name, name, "not UTF-8")


def broken(name, row_id, problem, columns=()):
    return dict(file=name, id=row_id, text=None, problem=problem, columns=list(columns))


def json_document(name, row, line, text_field):
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return broken(name, f"{name}:{row}", "not UTF-8")
    except (ValueError, RecursionError):
        return broken(name, f"{name}:{row}", "a line without JSON text")
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        return broken(name, f"{name}:{row}", "a line without JSON text", record if isinstance(record, dict) else ())
    return document(name, row, record, text_field)


def document(name, row, record, text_field):
    """A row of named columns as a document."""
    own = record.get("id")
    doc = dict(record, file=name, text=writable(record[text_field]), id=writable(f"{name}:{row if own is None else own}"))
    language = record.get("language") or record.get("lang")
    if language:
        script = record.get("language_script")
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
    group, begin, end = rows
    wanted = {text_field, "id", "url", "language", "lang", "language_script", "license", "date", *columns}
    try:
        if path.startswith("hf://"):                                            # the network may fail in the middle: all rows, or once more
            records = hub_try(path, lambda fs: list(parquet_rows(hub_parquet(fs, path), group, begin, end, wanted)))
        else:
            records = parquet_rows(open_parquet(path), group, begin, end, wanted)
        for row, record in enumerate(records, first):
            if isinstance(record[text_field], str):
                yield document(name, row, record, text_field)
            else:
                yield broken(name, f"{name}:{row}", "a row without text")
    except ValueError:                                                          # pyarrow's errors of content are ValueErrors
        yield broken(name, f"{name}:row group {group}", "unreadable")


def parquet_rows(file, group, begin, end, wanted):
    """Yield rows begin to end of a row group as dicts of the wanted columns that exist; other columns are not read."""
    at = 0
    for batch in file.iter_batches(512, row_groups=[group], columns=[c for c in file.schema_arrow.names if c in wanted]):
        low, high = max(begin - at, 0), min(end - at, len(batch))
        if low < high:
            yield from batch.slice(low, high - low).to_pylist()
        at += len(batch)
        if at >= end:
            return


def open_parquet(path):
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError("parquet needs pyarrow: pip install pyarrow") from None
    if path.startswith("hf://"):
        return hub_try(path, lambda fs: hub_parquet(fs, path))
    return pyarrow.parquet.ParquetFile(path)


def row_groups(file):
    """[(rows, bytes unpacked)] of a parquet file, from its footer."""
    groups = (file.metadata.row_group(k) for k in range(file.metadata.num_row_groups))
    return [(g.num_rows, g.total_byte_size) for g in groups]


# ----------------------------------------------------------------------------------------------------------------------
# the hub


def hub():
    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise ValueError("hf:// needs huggingface_hub: pip install huggingface_hub") from None
    return HfFileSystem()


def hub_try(path, ask, tries=4):
    """ask(file system), again after 1, 4 and 16 seconds where the network fails. OSError, one line, if it stays away."""
    for n in range(tries):
        try:
            return ask(hub())
        except (ValueError, FileNotFoundError):
            raise
        except Exception as e:                                                  # httpx, requests and the hub have a dozen kinds
            kind, why = type(e).__name__, " ".join(str(e).split())[:200]
            if kind in ("OfflineModeIsEnabled", "GatedRepoError", "RepositoryNotFoundError") or n + 1 == tries:
                break
            tqdm.write(f"{path}: {kind}; again in {4**n} s")
            time.sleep(4**n)
    raise OSError(f"{path} could not be read from the hub ({kind}: {why}). Nothing is lost: the same command goes on where it stopped")


@lru_cache(maxsize=2)                                                           # a footer holds all row groups: read once, not for each
def hub_parquet(fs, path):
    import pyarrow.parquet
    return pyarrow.parquet.ParquetFile(fs.open(path.removeprefix("hf://"), "rb"))


def hub_files(path):
    """hf://datasets/OWNER/NAME[@revision]/GLOB -> {name: path at the revision of now}. Only parquet."""
    parts = path.removeprefix("hf://").split("/")
    if len(parts) < 4 or parts[0] != "datasets" or not path.endswith(".parquet"):
        raise ValueError(f"{path!r}: want hf://datasets/OWNER/NAME/FILES.parquet, where FILES may be a pattern like data/*/train/*")
    repo, _, revision = parts[2].partition("@")
    if not revision:
        revision = hub_try(path, lambda fs: fs._api.dataset_info(f"{parts[1]}/{repo}").sha)
    root = f"datasets/{parts[1]}/{repo}@{revision}/"
    found = hub_try(path, lambda fs: fs.glob(root + "/".join(parts[3:])))
    if not found:
        raise ValueError(f"no file on the hub matches {path!r}")
    short = [f.split("/", 3)[3] for f in found]
    return {f"{parts[1]}/{repo}/{name}": f"hf://{root}{name}" for name in sorted(short)}


def hub_info(file, text_field):
    """What is known of a file on the hub without downloading it: size, sha256 of its LFS object, row groups from the footer."""
    info = hub_try(file["path"], lambda fs: fs.info(file["path"].removeprefix("hf://")))
    parquet = open_parquet(file["path"])
    columns = parquet.schema_arrow.names
    if text_field not in columns:
        raise NoColumn(f"{file['path']}: no column {text_field!r}; it has {', '.join(columns)}. Choose one with --text_field")
    lfs = info.get("lfs") or {}
    sha = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    return dict(file, bytes=info["size"], sha256=sha, groups=row_groups(parquet))
