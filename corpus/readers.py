"""
Read files of documents: find them, check them, cut them into parts, and yield their rows.

    .txt .md .markdown .rst .py      one document a file
    .jsonl .ndjson                   one document a line
    .json                            one document a value of a list, or of values one after the other
    .csv .tsv                        one document a row (RFC 4180); the first line has the names
    .parquet                         one document a row

All but parquet may be compressed, as .gz or .zst. A path is a file, a folder, a glob, or a URL that fsspec can open:
hf://datasets/OWNER/NAME, s3://, https://. Files of other kinds are not read: trafilatura makes text of .html, datatrove
of .warc (docs/data.md), pdftotext of .pdf, pandoc of .epub, .docx and .odt.

    files, ignored = find(["notes/", "hf://datasets/OWNER/NAME"])
    file = check(files[0])                  # size, sha256, problem, and the parts into which the file can be cut
    for part in file["parts"]:              # each worker process takes some of the parts
        for document in documents(file, part):
            ...

Memory does not depend on the size of a file of rows, except .json, which is read whole. A line that is not UTF-8 or not
JSON becomes a document with a problem in place of a text, so that prepare.py counts it. Files of the hub are streamed,
and not checked before.
Several processes share a file only if it is parquet (its row groups) or uncompressed JSON lines. A few large compressed
files are therefore read more slowly than many of about 100 MB.
"""

import codecs
import contextlib
import csv
import functools
import glob
import hashlib
import heapq
import io
import itertools
import json
import os
import re

import fsspec
import pyarrow
from pyarrow.parquet import ParquetFile

from engine.files import in_one_line, read_text

# In order of preference: of a folder on the hub, only files of the first of these kinds that it has are read.
KINDS = {
    ".parquet": "parquet", ".jsonl": "lines", ".ndjson": "lines", ".csv": "table", ".tsv": "table", ".json": "json",
    ".txt": "text", ".md": "text", ".markdown": "text", ".rst": "text", ".py": "text",
}
PART = 4 << 20              # bytes of lines in a part

BINARY = "binary, or a text that wants --encoding=utf-16"
NOT_UTF8 = "not UTF-8 (name the encoding, like --encoding=latin-1, cp1252 or utf-16)"
DAMAGED = "torn or damaged, not what its name says, or out of reach"
# A wrong row of a table. The problem does not quote the row, because it may hold personal data.
NO_ROW = "a row of more fields than names, or with a quote inside a field"
# Columns whose values are names.
NAMED = ("language", "lang", "language_script", "license")


def plain(name):
    """The name of a column in lower case, with _ for -."""
    return name.strip().lower().replace("-", "_")


def id_hash(doc_id):
    """A 64-bit integer that depends on the text alone. Shards hold documents in the order of that of their order_id."""
    return int.from_bytes(hashlib.sha256(doc_id.encode()).digest()[:8])


def writable(text):
    """The text with "?" for each lone surrogate. JSON can hold one ("\\ud800"), UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


# Cached because each file is asked about several times in a row.
@functools.lru_cache
def ending(path):
    """
    The ending of a file name in lower case, without .gz or .zst, or "no ending": X.TXT.gz -> .txt. But .parquet.gz ->
    .gz, because no parquet file is read as an archive.
    """
    return os.path.splitext(re.sub(r"(?<!\.parquet)\.(gz|zst)$", "", path.lower()))[1] or "no ending"


def kind_of(path):
    """The kind of a file by its ending, a value of KINDS. None if files of that kind cannot be read."""
    return KINDS.get(ending(path))


# ----------------------------------------------------------------------------------------------------------------------
# find files


def matches(path):
    """The files and folders that a path or a glob names, in order. An existing path is not a pattern: notes[1]."""
    return [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))


def files_of(path, skip=()):
    """
    All files of the folder `path` at any depth, sorted. A file that links lead to as well is listed once, by its own
    name if it has one in the folder. skip: names of files and folders inside to leave out. OSError if a folder cannot
    be read.
    """
    # (links in the path, path, where it leads): fewest links come first. A loop of links leads to a folder seen before.
    heap, seen = [(0, path, os.path.realpath(path))], {}
    while heap:
        links, inner, real = heapq.heappop(heap)
        if seen.setdefault(real, inner) == inner and os.path.isdir(inner):
            for entry in os.scandir(inner):
                if entry.name in skip:
                    continue
                # realpath() looks at each part of a path, which takes long for thousands of files.
                plain = entry.is_file(follow_symlinks=False)
                leads = os.path.join(real, entry.name) if plain else os.path.realpath(entry.path)
                heapq.heappush(heap, (links + entry.is_symlink(), entry.path, leads))
    return sorted(inner for inner in seen.values() if not os.path.isdir(inner))


def reason_to_ignore(file, name):
    """Why a file of a folder is not read: "hidden", its ending, ... None if it is read."""
    if "/." in f"/{name}":
        return "hidden"
    # Opening a FIFO would wait for its writer.
    if not os.path.isfile(file):
        return "not a file" if os.path.exists(file) else "broken link"
    if writable(file) != file:
        return "name not UTF-8"
    return None if kind_of(file) else ending(file)


def local_files(path):
    """Yield (name, path, why it is not read) of the files that a local path or glob names."""
    for match in matches(path):
        if os.path.isfile(match):
            yield os.path.basename(match), match, None
        elif os.path.isdir(match):
            for file in files_of(match):
                name = file[len(match):].replace(os.sep, "/").lstrip("/")
                yield name, file, reason_to_ignore(file, name)
        else:
            raise ValueError(f"{match}: a broken link, or not a file")


def remote(url):
    """
    Yield (name, URL, why it is not read) of the files that a URL names: a file, a folder or a glob.

    Of a folder on the hub only the files of one kind are read, the first in KINDS; and of a whole data set those with
    "train" in their path, if there are any, because the others are for tests.
    """
    fs, root = fsspec.url_to_fs(url)
    commit = ""
    if url.startswith("hf://"):
        commit, root = pinned(fs, url)
    for pattern in (root, root.rstrip("/") + "/**/*"):
        files = sorted(filter(fs.isfile, fs.glob(pattern)))
        readable = set(filter(kind_of, files))
        if readable:
            break
    folder = "datasets" if commit else os.path.dirname(re.split(r"[*?[]", pattern)[0])
    if commit:
        readable = training_files(readable, commit, whole=root.endswith(f"{commit}/"))
    for file in files:
        name = file[len(folder):].lstrip("/").replace(commit, "", 1)
        yield name, fs.unstrip_protocol(file), None if file in readable else ending(file)


def pinned(fs, url):
    """("@COMMIT", path) of a URL of the hub: one commit, so that a push during the run does not mix two versions."""
    match = re.fullmatch(r"hf://datasets/([^/]+/[^/@]+)@?([^/]*)/?(.*)", url)
    if not match:
        raise ValueError(f"{url}: want hf://datasets/OWNER/NAME, with /FOLDER, /FILES.parquet or a pattern")
    repo, revision, inside = match.groups()
    commit = "@" + fs._api.dataset_info(repo, revision=revision or None).sha
    return commit, f"datasets/{repo}{commit}/{inside}"


def training_files(files, commit, whole):
    """Of files of the hub: those of the first kind in KINDS; of a whole data set only those for training, if any."""
    best = min(map(kind_of, files), key=list(KINDS.values()).index, default=None)
    files = {file for file in files if kind_of(file) == best}
    train = {file for file in files if "train" in file.partition(commit)[2]}
    return whole and train or files


def find(paths):
    """
    (files, ignored) of paths, globs and URLs. files: [{"name", "path"}]; ignored: {reason: [names]} of the other files
    of the folders.

    A name is relative to the path that the user named, so that ids survive a move of the folder. If two files would
    share a name, the second gets the name of its folder in front. ValueError: nothing matches or can be read, or two
    files still share a name.
    """
    candidates = []
    for path in paths:
        with in_one_line(path):
            matching = list(remote(path) if "://" in path else local_files(path))
        if not matching:
            raise ValueError(f"no such file, folder or pattern: {path!r}, or an empty folder")
        candidates += matching
    # Files to read come first: a file that one path ignores may be named by another.
    files, ignored, seen = {}, {}, set()
    for name, file, reason in sorted(candidates, key=lambda candidate: candidate[2] is not None):
        real = os.path.realpath(file)
        if real in seen:
            continue
        seen.add(real)
        if reason:
            ignored.setdefault(reason, []).append(writable(name))
            continue
        if name in files:
            name = f"{os.path.basename(os.path.abspath(file.removesuffix(name)))}/{name}"
        if name in files or writable(file) != file:
            raise ValueError(f"{file!r}: another file has its name, or its name is not UTF-8. Rename it")
        files[name] = file
    if not files:
        raise ValueError(f"{', '.join(paths)}: no file to read; not read: {'; '.join(counts_of(ignored))}. Want "
                         f"{', '.join(KINDS)}")
    return [dict(name=name, path=path) for name, path in files.items()], ignored


def counts_of(ignored):
    """The files that find() ignored, as texts: "2 (.pdf), such as a.pdf"."""
    return [f"{len(names):,} ({reason}), such as {names[0]}" for reason, names in ignored.items()]


# ----------------------------------------------------------------------------------------------------------------------
# open files, check them, and cut them into parts


def open_raw(path):
    """A binary stream of a file as it is stored, on this disk or at a URL."""
    return fsspec.open(path).open() if "://" in path else open(path, "rb")


def open_bytes(file):
    """A binary stream of a file, decompressed; with an encoding, as UTF-8. Reading a torn file raises an error."""
    path = file["path"]
    # fsspec would stop at the end of the first frame of a .zst.
    stream = pyarrow.input_stream(open_raw(path), dict(gz="gzip", zst="zstd").get(path.lower().rpartition(".")[2]))
    if file.get("encoding"):
        stream = pyarrow.transcoding_input_stream(stream, file["encoding"], "utf-8")
    return io.BufferedReader(stream, 1 << 20)


def check(file, text_field="text", encoding=""):
    """
    Read a file once to its end: half a file must not be used, and only the end shows that an archive is torn.

    Returns the file with "bytes" and "sha256" as stored, "problem" (None if it can be used), "encoding" (`encoding` if
    the file is not UTF-8, else ""), and "parts": [[begin, lines, first row, bytes decompressed]], which hold all rows
    in order. A file of the hub has no sha256, because its path names a commit, and is read only to know its encoding.
    ValueError: a parquet file has no column text_field ("": not checked), or a URL cannot be read.
    """
    path = file["path"]
    kind = kind_of(path)
    file = dict(file, bytes=0, sha256=None, problem=None, encoding="", parts=[[0, None, 0, 0]])
    if not kind:
        return dict(file, problem="unknown kind of file")
    try:
        with in_one_line(path), open_raw(path) as f:
            if not path.startswith("hf://"):
                file["sha256"] = hashlib.file_digest(f, "sha256").hexdigest()
            file["bytes"] = f.seek(0, os.SEEK_END)
            if encoding and kind != "parquet" and not is_utf8(file):
                file["encoding"] = encoding
            file["parts"] = list(parts_of(file))
            names = names_of_columns(file)
    except ValueError:
        if "://" in path:
            raise
        return dict(file, problem=f"unreadable as {encoding}" if file["encoding"] else DAMAGED)
    if not names or text_field in ("", *names):
        return file
    no_column = f"no column {text_field!r}; it has {', '.join(names)}. Choose one with --text_field"
    if kind == "parquet":
        raise ValueError(f"{path}: {no_column}")
    # A folder of texts may hold a table of something else.
    return dict(file, problem=no_column)


def is_utf8(file):
    """Whether a file is UTF-8 without the character NUL, which UTF-16 has."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_bytes(file) as f, contextlib.suppress(UnicodeDecodeError):
        blocks = itertools.chain(iter(lambda: f.read(PART), b""), [b""])
        return not any("\0" in decoder.decode(block, final=not block) for block in blocks)
    return False


def names_of_columns(file):
    """The columns of a parquet file or a table; [] for other files, whose rows may differ."""
    kind = kind_of(file["path"])
    if kind == "parquet":
        return ParquetFile(open_raw(file["path"])).schema_arrow.names
    if kind != "table":
        return []
    with open_bytes(file) as f:
        return header_of(text_of(f), ending(file["path"]) == ".tsv")[1]


def parts_of(file):
    """
    Yield the parts of a file, as check() returns them: parquet by row groups, uncompressed JSON lines by about 4 MB.
    Other files are one part. Files on the hub, and those that were not checked, are not read here.
    """
    path, size = file["path"], file.get("bytes", 0)
    kind = kind_of(path)
    begin = first = 0
    if kind == "parquet":
        with in_one_line(path):
            metadata = ParquetFile(open_raw(path)).metadata
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            yield [begin, None, first, group.total_byte_size]
            begin += 1
            first += group.num_rows
        return
    if file.get("sha256"):
        with open_bytes(file) as f:
            while kind == "lines" and f.seekable() and (lines := f.readlines(PART)):
                size = sum(map(len, lines))
                yield [begin, len(lines), first, size]
                begin += size
                first += len(lines)
            size = sum(map(len, iter(lambda: f.read(PART), b"")))
    if not first:
        yield [0, None, 0, size]


# ----------------------------------------------------------------------------------------------------------------------
# rows


def json_values(text):
    """
    Yield the values of a JSON list, or values one after the other, as text.

    From the first error on, the rest of the file is one value, which parsed() reports.
    """
    decode = json.JSONDecoder().raw_decode
    whole = text.read().lstrip()
    rest = whole.removeprefix("[")
    end = 0
    # RecursionError: a million brackets.
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            begin = re.compile(r"[\s,\]]*").match(rest, end).end()
            _, end = decode(rest, begin)
            yield rest[begin:end]
    tail = rest[end:].strip(" \t\r\n,")
    # A list without its closing bracket is torn.
    yield tail.rstrip("]") if tail or rest is whole else "["


def text_of(f, errors="surrogateescape", newline=""):
    """A stream of bytes as one of text. errors, newline: as in open()."""
    return io.TextIOWrapper(f, "utf-8-sig", errors, newline=newline)


def header_of(text, tabs):
    """(delimiter, names of the columns) of a .csv or .tsv (tabs), from its first line, which is read."""
    # A field holds a whole document. This is the largest limit that the C code takes on every system.
    csv.field_size_limit(2**31 - 1)
    first = text.readline()
    # Countries with a decimal comma separate fields by semicolons.
    delimiter = "\t" if tabs else max(",;\t", key=first.count)
    return delimiter, [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]


def table_rows(text, tabs):
    """
    Yield the rows of a .csv or .tsv (tabs): the number of the line where it begins, from 0, and the row as JSON, all
    values text.

    A row with too many fields, or with a quote that does not end at the end of a field, becomes NO_ROW: a comma or a
    quote that belongs to the text would otherwise cut the text or join rows.
    """
    delimiter, names = header_of(text, tabs)
    table = csv.reader(text, delimiter=delimiter, strict=True)
    row = names
    while row is not None:
        line = 1 + table.line_num
        try:
            row = next(table, None)
        except csv.Error:
            # A wrong quote. The next line is a row again.
            row = [*names, ""]
        if row:
            yield line, json.dumps(dict(zip(names, row)) if len(row) <= len(names) else NO_ROW, ensure_ascii=False)


def problem_of(text):
    """Why a text cannot be used; None if it can. Bytes in it that are not UTF-8 are surrogates."""
    if "\0" in text:
        return BINARY
    return NOT_UTF8 if writable(text) != text else None


def parsed(line):
    """The JSON object of a line, a dict; or the problem of the line, a str."""
    try:
        row = json.loads(line.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) and row != NO_ROW:
        row = "a line that is no JSON object"
    return problem_of(line) or row


def file_row(path, raw):
    """A text file as a row, or its problem, a str."""
    text = raw.decode("utf-8-sig", "surrogateescape")
    row = dict(text=text)
    if ending(path) == ".py":
        row["language"] = "code"
    return problem_of(text) or row


def rows(file, part, columns=(), errors="surrogateescape"):
    """
    Yield (number, row) of a part of a file. number: from 0 in the file, of the line if it has lines; row: a dict, or
    its problem, a str.

    columns: those of a parquet file to read; all, if it has none of these. x_robots_tag is also X-Robots-Tag. errors:
    for bytes that are not UTF-8, as in open(). ValueError, one line, if the file is damaged.
    """
    path = file["path"]
    kind = kind_of(path)
    begin, lines, number, _ = part
    if file.get("problem"):
        yield 0, file["problem"]
        return
    if not kind:
        raise ValueError(f"{path}: unknown kind of file: name .txt, .md, .jsonl, .parquet and so on")
    with in_one_line(path):
        if kind == "parquet":
            parquet = ParquetFile(open_raw(path))
            for batch in parquet.iter_batches(512, row_groups=[begin], columns=[
                    name for name in parquet.schema_arrow.names if name in columns or plain(name) in columns] or None):
                yield from enumerate(batch.to_pylist(), number)
                number += len(batch)
            return
        with open_bytes(file) as f:
            if kind == "text":
                yield 0, file_row(path, f.read())
                return
            if begin:
                f.seek(begin)
            text = text_of(f, errors, "\n" if kind == "lines" else "")
            values = dict(lines=enumerate(text, number), json=enumerate(json_values(text)),
                          table=table_rows(text, ending(path) == ".tsv"))
            for n, value in itertools.islice(values[kind], lines):
                if value.strip():
                    yield n, parsed(value)


def records(path, columns=(), errors="surrogateescape"):
    """Yield the rows of a .parquet, .jsonl, .json, .csv or .tsv as dicts. ValueError: damaged, or a row is no dict."""
    for part in parts_of(dict(path=path)):
        for number, row in rows(dict(path=path), part, columns, errors):
            if isinstance(row, str):
                raise ValueError(f"{path}, line {number + 1}: not JSON, or no columns: {row}")
            yield row


def lines_of(path, comments=False):
    """Yield (number from 1, text) of each line of a file of text that is not empty. comments: as in rows_of()."""
    for number, line in enumerate(read_text(path).removeprefix("\ufeff").split("\n"), 1):
        text = (re.split(r"(?:^|\s)#", line)[0] if comments else line).strip()
        if text:
            yield number, text


def rows_of(path, *columns, comments=False, errors="surrogateescape", wrong=(), last=None):
    """
    Yield a list for each row of a file: for each entry of columns, a tuple of names, the value of the first that the
    row has. In a file of text each line that is not empty is a row of one column.

    comments: # begins a comment in a line of text, at its start or after white space. errors: as in rows().
    ValueError, one line: the file is damaged, or a row lacks a column.
    wrong: columns that only another kind of file has, an error too. last: a column that a row may lack, whose value, or
    None, ends the list.
    """
    if kind_of(path) in (None, "text"):
        yield from ([line] for _, line in lines_of(path, comments))
        return
    for row in records(path, {*wrong, last, *itertools.chain(*columns)}, errors):
        for key in filter(row.__contains__, wrong):
            raise ValueError(f"{path}: a row has the column {key}, so this is another kind of file: name it with the "
                             "setting that reads it (--robots: domain, content; --reservations: domain, file, content; "
                             "--blocked: domain)")
        values = []
        for keys in columns:
            key = next(filter(row.__contains__, keys), None)
            if key is None:
                raise ValueError(f"{path}: a row has no column {' or '.join(keys)}; it has {', '.join(row) or 'none'}")
            values.append(row[key])
        yield values + [row.get(last)] * (last is not None)


# ----------------------------------------------------------------------------------------------------------------------
# documents


def decoded(row):
    """A row with its bytes as text, as parquet may hold it; those that are not UTF-8 become surrogates."""
    return {name: value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
            for name, value in row.items()}


def document(row, file, doc_id, text_field):
    """The document of a row or a problem in a file. Language and script are joined: deu_Latn."""
    if isinstance(row, str):
        return dict(file=file, id=doc_id, text=None, problem=row)
    was_bytes, row = isinstance(row.get(text_field), bytes), decoded(row)
    text = row.get(text_field)
    if not isinstance(text, str):
        return dict(file=file, id=doc_id, text=None, problem=f"a row without text in its column {text_field!r}")
    if was_bytes and problem_of(text):
        return dict(file=file, id=doc_id, text=None, problem=problem_of(text))
    # An empty cell of a table is no id.
    if row.get("id") not in (None, ""):
        doc_id = writable(f"{file}:{row['id']}")
    doc = dict(row, file=file, id=doc_id, text=writable(text))
    for column in filter(row.__contains__, NAMED):
        value = row[column]
        # A list of one name is that name. Of several names we cannot know which one applies.
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, (list, dict)):
            problem = f"a {column} that is a {type(value).__name__}, not a name"
            return dict(file=file, id=doc_id, text=None, problem=problem)
        doc[column] = None if value is None else writable(str(value))
    return doc | language_of(doc)


def language_of(doc):
    """{"language": deu_Latn} of a document, from the columns that name language and script; {} if it has none."""
    language, script = doc.get("language") or doc.get("lang"), doc.get("language_script")
    if not language:
        return {}
    return dict(language=f"{language}_{script}" if script and "_" not in language else language)


def documents(file, part, text_field="text", columns=()):
    """
    Yield the documents of a part of a file that check() returned: dicts of the row's own columns, "file", "id", "text",
    "order_id", whose hash gives the place in training, and, if it is known, "language". A file or a row that cannot be
    used has no text but a "problem". The id is the name of the file; for a row followed by ":" and its own id, or by
    " line 3" or, in .json and .parquet, " row 3".

    columns: of a parquet file, those to read in addition to the usual ones. ValueError, one line: the file is damaged.
    """
    name, kind = file["name"], kind_of(file["path"])
    whole = kind == "text" or file.get("problem")
    try:
        for number, row in rows(file, part, {text_field, "id", "url", *NAMED, *columns}):
            doc_id = name if whole else f"{name} {'line' if kind in ('lines', 'table') else 'row'} {number + 1}"
            doc = document(row, name, doc_id, "text" if whole else text_field)
            # Rows without an id of their own are ordered by their number from 0, as they always were.
            yield dict(doc, order_id=doc["id"] if whole or doc["id"] != doc_id else f"{name}:{number}")
    except ValueError:
        # check() reads only the footer of a parquet file, so damage of a row group shows here.
        if kind != "parquet" or "://" in file["path"]:
            raise
        doc_id = f"{name} row group {part[0]}"
        yield dict(file=name, id=doc_id, order_id=doc_id, text=None, problem=DAMAGED)
