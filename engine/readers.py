"""
Read files of documents: find them, check them, cut them into parts, and yield their rows.

    .txt .md .markdown .rst .py      one document a file
    .html .htm                       one document a file: the main text of the page, by trafilatura
    .jsonl .ndjson                   one document a line
    .json                            one document a value of a list, or of values one after the other
    .csv .tsv                        one document a row (RFC 4180); the first line has the names
    .parquet                         one document a row

All but parquet may be packed, as .gz or .zst. A path is a file, a folder, a glob, or a URL that fsspec can open:
hf://datasets/OWNER/NAME, s3://, https://.

    files, ignored = find(["notes/", "hf://datasets/OWNER/NAME"])
    file = check(files[0])                  # size, sha256, problem, and the parts into which the file can be cut
    for part in file["parts"]:              # each worker process takes some of the parts
        for document in documents(file, part):
            ...

Memory does not depend on the size of a file of rows. A line that is not UTF-8 or not JSON becomes a document with a
problem in place of a text, so that prepare.py counts it. Files of the hub are streamed, and not read before.
"""

import contextlib
import csv
import glob
import hashlib
import io
import itertools
import json
import logging
import os
import re
import stat

import fsspec

KINDS = dict(pair.split(":") for pair in """
.txt:text .md:text .markdown:text .rst:text .py:text .html:html .htm:html
.jsonl:lines .ndjson:lines .json:json .csv:table .tsv:table .parquet:parquet
""".split())
# Files that hold no text, and the command that extracts it.
CONVERTERS = dict(line.split(": ") for line in """
.pdf: pdftotext FILE.pdf
.epub: pandoc FILE.epub -t plain -o FILE.txt
.docx: pandoc FILE.docx -t plain -o FILE.txt
.odt: pandoc FILE.odt -t plain -o FILE.txt
.warc: datatrove's WarcReader and Trafilatura
.zip: unzip
.tar: tar -x
.tgz: tar -xz
.bz2: bunzip2
.xz: unxz
""".strip().splitlines())
PART = 4 << 20              # bytes of lines in a part
SLICE = 64 << 20            # bytes of a parquet row group in a part, unpacked

BINARY = "binary, or a text that wants --encoding=utf-16"
NOT_UTF8 = "not UTF-8: name the encoding, like --encoding=latin-1, cp1252 or utf-16"
# A wrong row of a table. The problem quotes nothing of the row, because that may be personal data.
NO_ROW = "a row of more fields than names, or with a quote inside a field"
# Columns whose values are names.
NAMED = ("language", "lang", "language_script", "license")


def id_hash(doc_id):
    """A 64-bit integer that depends on the id alone. Training reads documents in its order."""
    digest = hashlib.sha256(doc_id.encode()).digest()
    return int.from_bytes(digest[:8])


def writable(text):
    """The text with "?" for each lone surrogate. JSON can hold one ("\\ud800"), UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def ending(path):
    """The ending of a file name in lower case, without the packing: X.TXT.gz -> .txt. Parquet packs itself."""
    name = re.sub(r"(?<!\.parquet)\.(gz|zst)$", "", path.lower())
    return os.path.splitext(name)[1]


def kind_of(path):
    """The kind of a file by its ending, a value of KINDS. None if it cannot be read."""
    return KINDS.get(ending(path))


@contextlib.contextmanager
def in_one_line(path):
    """Raise an error about a file as a ValueError of one line. The errors of the libraries share no class."""
    try:
        yield
    except (FileNotFoundError, ModuleNotFoundError):
        raise
    except Exception as error:
        # Ours is one line already.
        if str(error).startswith(path):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{path}: damaged, or not what its name says, or out of reach ({reason})") from None


# ----------------------------------------------------------------------------------------------------------------------
# find files


def matches(path):
    """The files and folders that a path or a glob names, in order. An existing path is no pattern: notes[1]."""
    return [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))


def identity(path):
    """Inode and device of a file or folder, which all links to it share. A URL or a broken link: its path."""
    try:
        return os.stat(path)[1:3]
    except OSError:
        return os.path.abspath(path)


def files_of(path):
    """
    (the folder that names are relative to, all files of the folder `path` at any depth, sorted by path).

    A file that links lead to as well is listed once, by its own name if it has one in the folder. OSError if a folder
    cannot be read.
    """
    if not os.path.isdir(path):
        return os.path.dirname(path), [path]

    def stop(error):
        raise error

    found, links = [], False
    for follow in (False, True):
        if follow and not links:
            break
        # A loop of links ends because each folder is entered once.
        entered = set()
        for folder, inner, names in os.walk(path, onerror=stop, followlinks=follow):
            if identity(folder) in entered:
                inner.clear()
                continue
            entered.add(identity(folder))
            inner.sort()
            links = links or any(os.path.islink(os.path.join(folder, name)) for name in inner)
            files = [os.path.join(folder, name) for name in names]
            found += [(os.path.islink(file), follow, file) for file in files]
    unique = {}
    for *_, file in sorted(found):
        unique.setdefault(identity(file), file)
    return path, sorted(unique.values())


def why_not(file, name):
    """Why a file of a folder is not read: "hidden", its ending, ... None if it is read."""
    if "/." in f"/{name}":
        return "hidden"
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return "broken link"
    # Opening a FIFO would wait for its writer.
    if not stat.S_ISREG(mode):
        return "not a file"
    if writable(file) != file:
        return "name not UTF-8"
    return None if kind_of(file) else ending(file) or "no ending"


def local(path):
    """Yield (name, path, why it is not read) of the files that a local path or glob names."""
    for match in matches(path):
        if not os.path.isfile(match) and not os.path.isdir(match):
            raise ValueError(f"{match}: a broken link, or not a file")
        root, files = files_of(match)
        for file in files:
            name = file[len(root):].replace(os.sep, "/").lstrip("/")
            yield name, file, why_not(file, name) if file != match else None


def remote(url):
    """
    Yield (name, URL, why it is not read) of the files that a URL names: a file, a folder or a glob.

    Of a folder on the hub only the files of one kind are read: parquet, else lines, tables or lists; and of a whole
    data set those with "train" in their path, if there are any, because the others are for tests.
    """
    fs, root = fsspec.url_to_fs(url)
    hub = re.fullmatch(r"hf://datasets/([^/]+/[^/@]+)(@[^/]+)?/?(.*)", url)
    if url.startswith("hf://"):
        if not hub:
            raise ValueError(f"{url}: want hf://datasets/OWNER/NAME, with /FOLDER, /FILES.parquet or a pattern")
        repo, revision, inside = hub.groups()
        # Pin one commit, so that a push during the run does not mix two versions.
        revision = revision or "@" + fs._api.dataset_info(repo).sha
        root = f"datasets/{repo}{revision}/{inside}"
    for pattern in (root, root.rstrip("/") + "/**/*"):
        found = [file for file, info in fs.glob(pattern, detail=True).items() if info["type"] == "file"]
        if any(map(kind_of, found)):
            break
    read = set(filter(kind_of, found))
    folder = os.path.dirname(re.split(r"[*?[]", pattern)[0])
    if hub:
        folder = "datasets"
        kinds = set(map(kind_of, read))
        order = [kind for kind in (kind_of(root), "parquet", "lines", "table", "json") if kind in kinds]
        read = {file for file in read if kind_of(file) in order[:1]}
        if not inside:
            read = {file for file in read if "train" in file.partition(revision)[2]} or read
    for file in sorted(found):
        name = file[len(folder):].lstrip("/")
        why = None if file in read else ending(file) or "no ending"
        yield name.replace(revision, "", 1) if hub else name, fs.unstrip_protocol(file), why


def find(paths):
    """
    (files, ignored) of paths, globs and URLs. files: [{"name", "path"}]; ignored: {reason: [names]} of the other files
    of the folders, the most frequent reason first.

    A name is relative to the path that the user named, so that ids survive a move of the folder. If two files would
    share a name, the second gets the name of its folder in front. ValueError: nothing matches, or two files still share
    a name.
    """
    files, passed, read = {}, {}, set()
    for path in paths:
        with in_one_line(path):
            found = list(remote(path) if "://" in path else local(path))
        if not found:
            raise ValueError(f"no such file, folder or pattern: {path!r}, or an empty folder")
        for name, file, why in found:
            key = identity(file)
            if why:
                passed[key] = why, name
            elif key not in read:
                read.add(key)
                if name in files:
                    name = f"{os.path.basename(os.path.abspath(file.removesuffix(name)))}/{name}"
                if name in files or writable(file) != file:
                    raise ValueError(f"{file!r}: another file has its name, or its name is not UTF-8. Rename it")
                files[name] = file
    ignored = {}
    for key in passed.keys() - read:
        why, name = passed[key]
        ignored.setdefault(why, []).append(writable(name))
    most_first = sorted(ignored.items(), key=lambda item: (-len(item[1]), item[0]))
    return [dict(name=name, path=path) for name, path in files.items()], dict(most_first)


# ----------------------------------------------------------------------------------------------------------------------
# open files


def open_raw(path):
    """A binary stream of a file as it is stored, on this disk or at a URL."""
    if "://" not in path:
        return open(path, "rb")
    fs, inside = fsspec.url_to_fs(path)
    return fs.open(inside)


def open_bytes(path, encoding=""):
    """A binary stream of a file, unpacked; with an encoding, as UTF-8. Reading a torn file raises an error."""
    import pyarrow
    f = open_raw(path)
    packing = dict(gz="gzip", zst="zstd").get(path.lower().rpartition(".")[2])
    if packing:
        f = pyarrow.CompressedInputStream(f, packing)
    if encoding:
        f = pyarrow.transcoding_input_stream(pyarrow.input_stream(f), encoding, "utf-8")
    return io.BufferedReader(f, 1 << 20)


def open_parquet(path):
    import pyarrow.parquet
    with in_one_line(path):
        return pyarrow.parquet.ParquetFile(open_raw(path))


# ----------------------------------------------------------------------------------------------------------------------
# check files, and cut them into parts


def check(file, text_field="text", encoding=""):
    """
    Read a file once to its end: half a file must not be used, and a torn archive shows only there.

    Returns the file with "bytes" and "sha256" as stored, "problem" (None if it can be used), "encoding" if one is
    given, and "parts": [[begin, end, first row, bytes unpacked]], which hold all rows in order. The hub is not read:
    sha256 is that of its LFS object, if it has one.
    ValueError: a parquet file has no column text_field ("": none is wanted), or a URL cannot be read.
    ModuleNotFoundError: a package is missing.
    """
    path = file["path"]
    kind = kind_of(path)
    file = dict(file, bytes=0, sha256=None, problem=None, parts=[])
    if encoding and kind != "parquet":
        file["encoding"] = encoding
    if not kind:
        how = CONVERTERS.get(ending(path))
        return dict(file, problem="unknown kind of file" + (f"; {how} makes text of it" if how else ""))
    if kind == "html":
        import trafilatura  # noqa: F401. An error now is better than one in a worker process.
    try:
        with in_one_line(path):
            if path.startswith("hf://"):
                fs, inside = fsspec.url_to_fs(path)
                info = fs.info(inside)
                file.update(bytes=info["size"], sha256=(info.get("lfs") or {}).get("sha256"))
            else:
                with open_raw(path) as f:
                    file["sha256"] = hashlib.file_digest(f, "sha256").hexdigest()
                    file["bytes"] = f.seek(0, os.SEEK_END)
            names = open_parquet(path).schema_arrow.names if kind == "parquet" else [text_field]
            file["parts"] = list(parts_of(file))
    except ValueError:
        if "://" in path:
            raise
        return dict(file, problem=f"unreadable as {encoding}" if encoding else "unreadable")
    if text_field and text_field not in names:
        raise ValueError(f"{path}: no column {text_field!r}; it has {', '.join(names)}. Choose one with --text_field")
    return file


def parts_of(file):
    """
    Yield the parts of a file, as check() returns them. A part of parquet begins and ends at a row of a row group:
    [[group, row], end, first row, bytes]; a part of lines after a line break.

    Other files than parquet are one part, and are not read here, if they are on the hub or were not checked (they have
    no "bytes").
    """
    path = file["path"]
    encoding = file.get("encoding", "")
    if kind_of(path) == "parquet":
        metadata = open_parquet(path).metadata
        first = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            step = max(1, group.num_rows * SLICE // max(1, group.total_byte_size))
            for begin in range(0, group.num_rows, step):
                end = min(begin + step, group.num_rows)
                size = group.total_byte_size * (end - begin) // group.num_rows
                yield [[number, begin], end, first + begin, size]
            first += group.num_rows
        return
    if path.startswith("hf://") or "bytes" not in file:
        yield [0, None, 0, file.get("bytes", 0)]
        return
    lines = kind_of(path) == "lines" and not encoding
    edges = [(0, 0)]                                    # (bytes, rows) before each place where it can be cut
    at = row = 0
    with open_bytes(path, encoding) as f:
        while block := f.read(PART):
            cut = block.rfind(b"\n") + 1
            if cut:
                edges.append((at + cut, row + block.count(b"\n")))
            at += len(block)
            row += block.count(b"\n")
    # A last line without its end belongs to the part before it.
    edges = [*(edges[:-1] or edges), (at, row)]
    most = len(edges) if lines else 1
    # A worker unpacks a file from its beginning to its part, so there are at most four parts.
    if path.lower().endswith((".gz", ".zst")):
        most = min(most, 4)
    starts = edges[:-1:-(-len(edges) // most)] or edges
    for (begin, row), (end, _) in zip(starts, [*starts[1:], edges[-1]]):
        yield [begin, end if lines else None, row, end - begin]


# ----------------------------------------------------------------------------------------------------------------------
# rows


def json_values(f):
    """
    Yield the values of a JSON list, or values one after the other, as bytes.

    From the first error on, the rest of the file is one value, which parsed() reports.
    """
    # Bytes that are not UTF-8 survive as surrogates, and are reported with the value that they are in.
    text = io.TextIOWrapper(f, "utf-8-sig", "surrogateescape")
    decode = json.JSONDecoder().raw_decode
    rest = text.read(PART).lstrip().removeprefix("[")
    more = True
    while more:
        end = 0
        # RecursionError: a million brackets.
        with contextlib.suppress(ValueError, RecursionError):
            while True:
                begin = re.compile(r"[\s,\]]*").match(rest, end).end()
                _, end = decode(rest, begin)
                yield rest[begin:end].encode(errors="surrogateescape")
        # A value that is longer than a block is tried again with twice the text.
        more = text.read(max(PART, len(rest)))
        rest = rest[end:] + more
    if rest.strip(" \t\r\n,]"):
        yield rest.encode(errors="surrogateescape")


def table_rows(f, tabs):
    """
    Yield the rows of a .csv or .tsv (tabs) as JSON, all values text.

    A row with too many fields, or with a quote that does not end at the end of a field, becomes NO_ROW: a comma or a
    quote that belongs to the text would otherwise cut the text or join rows.
    """
    # A document is a field. This is the largest limit that the C code takes on every system.
    csv.field_size_limit(2**31 - 1)
    text = io.TextIOWrapper(f, "utf-8-sig", "surrogateescape", newline="")
    first = text.readline()
    # Countries with a decimal comma separate fields by semicolons.
    delimiter = "\t" if tabs else max(",;\t", key=first.count)
    names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
    table = csv.reader(text, delimiter=delimiter, strict=True)
    row = first
    while row is not None:
        try:
            row = next(table, None)
            value = dict(zip(names, row or [])) if len(row or []) <= len(names) else NO_ROW
        except csv.Error:
            # A wrong quote. The next line is a row again.
            value = NO_ROW
        if value:
            yield json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")


def parsed(line, errors="strict"):
    """The JSON object of a line of bytes, a dict; or the problem of the line, a str."""
    if 0 in line:
        return BINARY
    try:
        row = json.loads(line.decode("utf-8-sig", errors))
    except UnicodeDecodeError:
        return NOT_UTF8
    except (ValueError, RecursionError):
        row = None
    return row if isinstance(row, dict) or row == NO_ROW else "a line that is no JSON object"


def file_row(path, raw):
    """The text of a file as a row, or its problem, a str. A page: its main text, and the name and content of <meta>."""
    if kind_of(path) == "html":
        import trafilatura
        # trafilatura logs each page without a text. We count them.
        logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
        text = trafilatura.extract(raw, include_comments=False)
        if not text:
            return "HTML without a main text"
        metas = trafilatura.load_html(raw).iter("meta")
        return dict(text=text, metas=[(meta.get("name", ""), meta.get("content", "")) for meta in metas])
    if 0 in raw:
        return BINARY
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return NOT_UTF8
    return dict(text=text, language="code") if ending(path) == ".py" else dict(text=text)


def rows(file, part, columns=(), errors="strict"):
    """
    Yield (number, row) of a part of a file. number: from 0 in the file; row: a dict, or its problem, a str.

    columns: those of a parquet file to read; if it has none of them, all are. errors: for bytes that are not UTF-8, as
    in open(). ValueError, one line, if the file is damaged.
    """
    path = file["path"]
    kind = kind_of(path)
    begin, end, number, _ = part
    with in_one_line(path):
        if kind == "parquet":
            group, skip = begin
            parquet = open_parquet(path)
            names = [name for name in parquet.schema_arrow.names if name in columns]
            for batch in parquet.iter_batches(512, row_groups=[group], columns=names or None):
                some = batch.slice(skip, max(0, end - skip)).to_pylist()
                yield from enumerate(some, number)
                number += len(some)
                skip, end = max(0, skip - len(batch)), end - len(batch)
            return
        with open_bytes(path, file.get("encoding", "")) as lines:
            if kind == "json":
                lines = json_values(lines)
            elif kind == "table":
                lines = table_rows(lines, ending(path) == ".tsv")
            elif kind != "lines":
                yield 0, file_row(path, lines.read())
                return
            elif lines.seekable():
                lines.seek(begin)
            else:
                next(itertools.islice(lines, number, number), None)
            for number, line in enumerate(lines, number):
                if line.strip():
                    yield number, parsed(line, errors)
                begin += len(line)
                if begin == end:
                    return


def records(path, columns=(), errors="strict"):
    """Yield the rows of a .parquet, .jsonl, .json, .csv or .tsv as dicts. ValueError: damaged, or no dict."""
    for part in parts_of(dict(path=path)):
        for number, row in rows(dict(path=path), part, columns, errors):
            if isinstance(row, str):
                raise ValueError(f"{path}, line {number + 1}: not JSON, or no columns: {row}")
            yield row


def rows_of(path, *columns, comments=False, errors="strict"):
    """
    Yield a list for each row of a file: for each entry of columns, a tuple of names, the value of the first that the
    row has. In a file of text each line that is not empty is a row of one column.

    comments: # begins a comment in a line of text. errors: for bytes that are not UTF-8, as in open().
    ValueError, one line: the file is damaged, or a row lacks a column.
    """
    if kind_of(path) in (None, "text", "html"):
        with in_one_line(path), open_bytes(path) as f:
            for line in io.TextIOWrapper(f, "utf-8", errors):
                text = line.split("#")[0] if comments else line
                if text.strip():
                    yield [text.strip()]
        return
    for row in records(path, set(itertools.chain(*columns)), errors):
        names = [next(filter(row.__contains__, keys), None) for keys in columns]
        if None in names:
            missing = " or ".join(columns[names.index(None)])
            raise ValueError(f"{path}: a row has no column {missing}; it has {', '.join(row) or 'none'}")
        yield [row[name] for name in names]


# ----------------------------------------------------------------------------------------------------------------------
# documents


def document(own, row, text_field):
    """The document of a row or a problem; own: its "file" and "id". Language and script are joined: deu_Latn."""
    if isinstance(row, str):
        return dict(own, text=None, problem=row, columns=[])
    problem = None
    if not isinstance(row.get(text_field), str):
        problem = f"a row without text in its column {text_field!r}"
    elif row.get("id") is not None:
        own["id"] = writable(f"{own['file']}:{row['id']}")
    doc = dict(row, **own)
    for column in filter(row.__contains__, NAMED):
        value = row[column]
        # A list of one name is that name. Of several names we cannot know which one decides.
        if isinstance(value, list) and len(value) == 1:
            (value,) = value
        if isinstance(value, (list, dict)):
            problem = problem or f"a {column} that is a {type(value).__name__}, not a name"
        doc[column] = None if value is None else writable(str(value))
    if problem:
        return dict(own, text=None, problem=problem, columns=list(row))
    language = doc.get("language") or doc.get("lang")
    script = doc.get("language_script")
    if language:
        doc["language"] = f"{language}_{script}" if script and "_" not in language else language
    return dict(doc, text=writable(row[text_field]))


def documents(file, part, text_field="text", columns=()):
    """
    Yield the documents of a part of a file that check() returned: dicts of the row's own columns, "file", "id", "text"
    and, if it is known, "language". A row that cannot be used has no text but a "problem", and the names of
    its "columns". The id is the name of the file, and for a row ":" and its own id or its number.

    columns: of a parquet file, those to read in addition to the usual ones. ValueError, one line: the file is damaged.
    """
    name, path = file["name"], file["path"]
    single = kind_of(path) in ("text", "html")
    wanted = {text_field, "id", "url", *NAMED, *columns}
    try:
        for number, row in rows(file, part, wanted):
            own = dict(file=name, id=name if single else f"{name}:{number}")
            yield document(own, row, "text" if single else text_field)
    except ValueError:
        # check() reads only the footer of a parquet file. Damage of a row group shows here.
        if kind_of(path) != "parquet" or "://" in path:
            raise
        yield document(dict(file=name, id=f"{name}:row group {part[0][0]}"), "unreadable", text_field)
