"""
Files to rows: what engine/inputs.py finds -> batches of raw rows -> documents, or the rows as they are.

    text, html            a document a file            id = its path below what was named
    lines, json, table    a document a row             id = file:id, or file:number of the row
    parquet               the same; read row group by row group

prepare.py makes documents of them, {"id", "text", url, language, license, ...}; posttrain/sft.py conversations.

The main process cuts files into batches of about 4 MB of whole lines, so that neither a long file nor a long list of
files is ever in memory; worker processes parse them. A list or a table becomes lines of JSON on the way. What cannot be
read (bytes that are no UTF-8, lines that are no JSON, a torn archive) is a row with a problem instead of a text: it is
counted and named, never silently lost.
"""

import codecs
import csv
import gzip
import hashlib
import io
import json
import logging
import os
import re
import zlib
from functools import lru_cache
from importlib.util import find_spec

from tqdm import tqdm

from engine.inputs import ending, find, hub_try, kind_of, unreadable

# Bytes of raw text in a batch, about. A worker needs some ten times as much memory.
BATCH = 4 << 20
# Bytes of a parquet row group that are read at once. Larger row groups are cut by rows.
SLICE = 64 << 20
# Of rows, which become lines of JSON where they are not.
ROWS = ("lines", "json", "table")


def id_hash(doc_id):
    """
    A 64-bit integer that depends on the id alone.

    Documents are trained on in its order.
    """
    digest = hashlib.sha256(doc_id.encode()).digest()
    return int.from_bytes(digest[:8], "big")


# ----------------------------------------------------------------------------------------------------------------------
# one look at each file


def check(name, path, text_field="text", encoding=""):
    """
    Read a file once from end to end: {"name", "path", "bytes", "sha256", "problem"}, problem None if it can be used.

    Compressed files are unpacked to their end, since a torn one shows only there, and half a file must not be used.
    "unpacked" is then their size in bytes. encoding: of text, "" = UTF-8. ValueError if a parquet file has no text
    column (text_field "": none is wanted); OSError if the hub cannot be reached.
    """
    file = dict(name=name, path=path, bytes=0, sha256=None, problem=None)
    kind = kind_of(path)
    if encoding and kind != "parquet":
        try:
            "".encode(encoding)
        except LookupError:
            raise ValueError(f"encoding={encoding}: want a name that Python knows, like latin-1 or utf-16") from None
        file["encoding"] = encoding
    if path.startswith("hf://"):
        return hub_info(file, text_field)
    if not kind:
        return dict(file, problem=unreadable(path))
    if kind == "html" and not find_spec("trafilatura"):
        return dict(file, problem="HTML needs `pip install trafilatura lxml_html_clean`")
    parquet = None
    try:
        with open_raw(path) as f:
            file["sha256"] = hashlib.file_digest(f, "sha256").hexdigest()
            file["bytes"] = f.tell()
        if kind == "parquet":
            parquet = open_parquet(path)
            file["unpacked"] = sum(size for _, size in row_groups(parquet))
        elif kind in ROWS:
            with open_bytes(path, encoding) as f:
                file["problem"] = problem_of(f.read(1 << 16))
        if kind != "parquet" and not file["problem"]:
            file.update(unpacked_size(path, kind, encoding))
    except UnicodeError:
        file["problem"] = f"not {encoding}"
    except (OSError, EOFError, zlib.error, ValueError):
        file["problem"] = "unreadable"
    if parquet and text_field:
        want_column(parquet, path, text_field)
    return file


def unpacked_size(path, kind, encoding):
    """{"unpacked": bytes} of a file that is not read as it lies on the disk, read to its end; {} of another."""
    if ending(path) == os.path.splitext(path)[1].lower() and not encoding and kind not in ("json", "table"):
        return {}
    with open_lines(path, encoding) if kind in ROWS else open_bytes(path, encoding) as f:
        return dict(unpacked=sum(map(len, iter(lambda: f.read(1 << 20), b""))))


def problem_of(raw):
    """What is wrong with the first bytes of a text, None if nothing is."""
    return "binary, or a text that wants --encoding=utf-16" if 0 in raw else None


NOT_UTF8 = "not UTF-8: name what it is, like --encoding=latin-1, cp1252 or utf-16"


class NoColumn(ValueError):
    """The data are sound, but lack a column that the user named."""


def want_column(parquet, path, text_field):
    """NoColumn, with the columns there are, if a parquet file has none of that name."""
    columns = parquet.schema_arrow.names
    if text_field not in columns:
        have = ", ".join(columns) or "none"
        raise NoColumn(f"{path}: no column {text_field!r}; it has {have}. Choose one with --text_field")


# ----------------------------------------------------------------------------------------------------------------------
# bytes, and lines of them


def open_raw(path):
    """A binary stream of a file as it lies there: on this disk, on the hub, or where else fsspec reads."""
    if path.startswith("hf://"):
        return Pieces(hub_pieces(path))
    if "://" in path:
        import fsspec
        return fsspec.open(path, "rb").open()
    return open(path, "rb")


def open_bytes(path, encoding=""):
    """A binary stream of a file, here or on the hub, unpacked, and as UTF-8. Reading a torn one raises."""
    f = open_raw(path)
    if path.lower().endswith(".gz"):
        f = gzip.open(f, "rb")
    elif path.lower().endswith(".zst"):
        f = Pieces(unzstd(f))
    return Pieces(as_utf8(f, encoding)) if encoding else f


def unzstd(f):
    """
    Yield a zstd stream unpacked, of any number of frames and any window: `zstd --long=31` has one of 2 GiB.

    EOFError where it is torn: stream_reader() of the package ends there in silence.
    """
    import zstandard
    unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    # Small blocks, since a byte may stand for thousands.
    while block := f.read(1 << 14):
        while block:
            frame = frame or unpacker.decompressobj()
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as e:
                raise ValueError(f"no zstd: {e}") from None
            block = frame.unused_data
            frame = None if frame.eof else frame
    if frame:
        raise EOFError("the last frame has no end")


def as_utf8(f, encoding):
    """Yield a stream of another encoding as UTF-8."""
    decoder = codecs.getincrementaldecoder(encoding)()
    while block := f.read(1 << 20):
        yield decoder.decode(block).encode()
    yield decoder.decode(b"", final=True).encode()


def has_lines(path):
    """Is every row of the file a document?"""
    return kind_of(path) in ROWS


def open_lines(path, encoding=""):
    """A binary stream of lines, which are JSON but in a text: a list and a table become so."""
    f = open_bytes(path, encoding)
    kind = kind_of(path)
    if kind == "json":
        return Pieces(json_lines(f))
    return Pieces(table_lines(f, ending(path) == ".tsv")) if kind == "table" else f


class Pieces(io.BufferedReader):
    """A binary stream of the pieces that an iterator yields."""

    def __init__(self, pieces):
        super().__init__(RawPieces(pieces), 1 << 20)


class RawPieces(io.RawIOBase):
    def __init__(self, pieces):
        self.pieces = pieces
        self.rest = memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.rest:
            piece = next(self.pieces, None)
            if piece is None:
                return 0
            self.rest = memoryview(piece)
        n = min(len(buffer), len(self.rest))
        buffer[:n] = self.rest[:n]
        self.rest = self.rest[n:]
        return n


def json_lines(f):
    """
    Yield the values of a JSON list, or values one after the other, each as a line. What is no JSON, from there to the
    end, is one line as it is, which json_document() will not read.
    """
    # Bytes that are no UTF-8 come back as they were, in the line that they stand in.
    text = io.TextIOWrapper(f, "utf-8-sig", "surrogateescape")
    rest = ""
    size = BATCH
    begun = False
    more = True
    while more:
        block = text.read(size)
        more = bool(block)
        rest += block
        if not begun:
            rest = rest.lstrip().removeprefix("[")
            begun = bool(rest)
        at = 0
        for begin, end in values_in(rest):
            yield one_line(rest[begin:end])
            at = end
        rest = rest[at:]
        # A value that is longer than a block is tried again when there is twice as much.
        size = max(BATCH, len(rest))
    if rest.strip(" \t\r\n,]"):
        yield one_line(rest)


def values_in(text):
    """Yield (begin, end) of the JSON values that a text begins with; white space, commas and ] may stand between."""
    decode = json.JSONDecoder().raw_decode
    end = 0
    while True:
        begin = _BETWEEN.match(text, end).end()
        try:
            _, end = decode(text, begin)
        # RecursionError: a million brackets.
        except (ValueError, RecursionError):
            return
        yield begin, end


_BETWEEN = re.compile(r"[\s,\]]*")


def one_line(text):
    """A JSON value as a line of bytes. Its line breaks stand between values, since in a string they are escaped."""
    flat = text.replace("\n", " ").replace("\r", " ")
    return flat.encode(errors="surrogateescape") + b"\n"


def table_lines(f, tabs):
    """
    Yield the rows of a .csv (RFC 4180) or .tsv, under a line of names, as lines of JSON; all values are text.

    A row of more fields than there are names, or with a quote that does not end where a field ends, is a JSON string,
    of which json_document() makes a row with a problem: a comma or a quote that was meant as text would else take a
    part of the text with it, or join rows. tabs: are they all that stands between fields?
    """
    # The largest that the C code takes on every system: a document is a field.
    csv.field_size_limit(2**31 - 1)
    text = io.TextIOWrapper(f, "utf-8-sig", "surrogateescape", newline="")
    first = text.readline()
    # Tables of countries with a decimal comma have semicolons.
    delimiter = "\t" if tabs else max(",;\t", key=first.count)
    (names,) = csv.reader([first], delimiter=delimiter) if first.strip() else [[]]
    names = [name.strip() for name in names]
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        # Of a wrong quote; the next line is a row again.
        except csv.Error:
            row = None
        if row != []:
            good = row is not None and len(row) <= len(names)
            line = json.dumps(dict(zip(names, row)) if good else NO_ROW, ensure_ascii=False)
            yield line.encode(errors="surrogateescape") + b"\n"


# Where a table has a row that is none. None of its text, which may be personal, goes to the report.
NO_ROW = "a row of more fields than names, or with a quote inside a field"


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
        if kind_of(path) == "parquet":
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
    """Yield ((i, first row, raw), its bytes in memory) for all rows of file number i. ValueError if it is damaged."""
    path, encoding = file["path"], file.get("encoding", "")
    try:
        if kind_of(path) == "parquet":
            yield from row_ranges(i, file.get("groups") or row_groups(open_parquet(path)))
        elif has_lines(path):
            yield from line_blocks(i, path, encoding)
        else:
            with open_bytes(path, encoding) as f:
                raw = f.read()
            yield (i, 0, raw), len(raw)
    # check() has read the files of this machine to their ends, but none of the hub.
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise ValueError(f"{path} is damaged ({e}): name the other files without it") from None


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


def line_blocks(i, path, encoding=""):
    """Pieces of a file of lines: raw is whole lines, of about BATCH bytes. The last line may lack its line break."""
    row, rest = 0, []
    with open_lines(path, encoding) as f:
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
        if kind_of(path) == "parquet":
            yield from parquet_documents(name, path, first, raw, text_field, columns)
        elif has_lines(path):
            for row, line in enumerate(raw.split(b"\n"), first):
                if line and not line.isspace():
                    yield json_document(name, row, line, text_field)
        elif kind_of(path) == "html":
            yield html_document(name, raw)
        else:
            doc = file_document(name, raw)
            yield dict(doc, language="code") if ending(path) == ".py" else doc


def each_document(paths, text_field="text"):
    """Yield the documents with a text of files and folders, as prepare.py reads them. The others are counted."""
    files = [check(name, path, text_field) for name, path in find(paths)]
    size = sum(file.get("unpacked") or file["bytes"] for file in files)
    bad = sum(bool(file["problem"]) for file in files)
    with tqdm(desc="reading", total=size, unit="B", unit_scale=True, disable=None, leave=False) as progress:
        for _, pieces, seen in batches(files):
            for doc in documents(files, pieces, text_field):
                if doc["text"] and not doc["text"].isspace():
                    yield doc
                else:
                    bad += 1
            progress.update(seen - progress.n)
    if bad:
        print(f"passed over {bad:,} files and rows without a text")


def broken(name, doc_id, problem, columns=()):
    """A document without text. columns: what its row has instead."""
    return dict(file=name, id=doc_id, text=None, problem=problem, columns=list(columns))


def file_document(name, raw):
    if problem := problem_of(raw):
        return broken(name, name, problem)
    try:
        return dict(file=name, id=name, text=raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return broken(name, name, NOT_UTF8)


def html_document(name, raw):
    """The main text of a page, without menus and comments. It says itself what its encoding is."""
    import trafilatura
    # It tells of every empty page; here these are counted.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    text = trafilatura.extract(raw, include_comments=False)
    if not text:
        return broken(name, name, "HTML without a main text")
    return dict(file=name, id=name, text=writable(text), metas=metas(trafilatura.load_html(raw)))


def metas(tree):
    """[(name, content)] of the <meta> of a page, an lxml tree."""
    return [(meta.get("name") or "", meta.get("content") or "") for meta in tree.iter("meta")]


def json_document(name, row, line, text_field):
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return broken(name, f"{name}:{row}", NOT_UTF8)
    except (ValueError, RecursionError):
        # RecursionError: a line of a million brackets.
        record = None
    if record == NO_ROW:
        return broken(name, f"{name}:{row}", NO_ROW)
    if not isinstance(record, dict):
        return broken(name, f"{name}:{row}", "a line that is no JSON object")
    return document(name, row, record, text_field)


def document(name, row, record, text_field):
    """A row of named columns as a document."""
    text = record.get(text_field)
    if not isinstance(text, str):
        return broken(name, f"{name}:{row}", f"a row without text in its column {text_field!r}", record)
    own = record.get("id")
    own_id = row if own is None else own
    doc = dict(record, file=name, text=writable(text), id=writable(f"{name}:{own_id}"))
    for column in NAMED:
        value = doc.get(column)
        # A list of one is that one. Of several it is not known which of them says what may be done.
        if isinstance(value, list) and len(value) == 1:
            (value,) = value
        if isinstance(value, (list, dict)):
            return broken(name, doc["id"], f"a {column} that is a {type(value).__name__}, not a name", record)
        if column in doc:
            doc[column] = None if value is None else writable(str(value))
    language = doc.get("language") or doc.get("lang")
    script = doc.get("language_script")
    if language:
        doc["language"] = f"{language}_{script}" if script and "_" not in language else language
    return doc


# Columns whose values are names.
NAMED = ("language", "lang", "language_script", "license")


def writable(text):
    """JSON may hold half a surrogate pair ("\\ud800"), which no UTF-8 can: it becomes a question mark."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()


def parquet_documents(name, path, first, rows, text_field, columns):
    """Documents of rows = (row group, begin, end) of a parquet file; one broken document if they cannot be read."""
    wanted = {text_field, "id", "url", "language", "lang", "language_script", "license", *columns}
    try:
        for row, record in enumerate(parquet_records(path, rows, wanted), first):
            yield document(name, row, record, text_field)
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
    return pyarrow.parquet.ParquetFile(open_raw(path) if "://" in path else path)


def row_groups(parquet):
    """[(rows, bytes unpacked)] of a parquet file, from its footer."""
    groups = map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups))
    return [(group.num_rows, group.total_byte_size) for group in groups]


# ----------------------------------------------------------------------------------------------------------------------
# the hub


# A footer describes all row groups: it is downloaded once, not once for each of them.
@lru_cache(maxsize=2)
def hub_parquet(fs, path):
    import pyarrow.parquet
    return pyarrow.parquet.ParquetFile(fs.open(path.removeprefix("hf://"), "rb"))


def hub_pieces(path):
    """Yield the bytes of a file on the hub, in order, each piece asked for again where the network fails."""
    at = 0
    # The usual cache reads 5 MB ahead, and is thrown away after each piece: everything would be downloaded twice.
    while piece := hub_try(path, lambda fs: fs.cat_file(path.removeprefix("hf://"), at, at + BATCH, cache_type="none")):
        yield piece
        at += len(piece)


def hub_info(file, text_field):
    """What is known of a file on the hub without a download: size, sha256 of its LFS object, row groups (footer)."""
    path = file["path"]
    info = hub_try(path, lambda fs: fs.info(path.removeprefix("hf://")))
    lfs = info.get("lfs") or {}
    file = dict(file, bytes=info["size"], sha256=lfs.get("sha256"))
    if kind_of(path) != "parquet":
        return file
    parquet = open_parquet(path)
    if text_field:
        want_column(parquet, path, text_field)
    return dict(file, groups=row_groups(parquet))
