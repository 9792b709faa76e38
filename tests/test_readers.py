"""engine/inputs.py and engine/readers.py: every file is read once, or counted and named; every format says the same."""
import csv
import gzip
import io
import json
import os
import random
import sys

import fsspec
import pytest

from conftest import refused, script
from engine import inputs, readers
from engine.inputs import find, ignored
from engine.readers import batches, check, documents

TEXTS = ["plain", 'says "so", twice', "two\nlines\r\nand more", "Zürich, 苏黎世; 🏔", " a\ttab ", "x" * 3000, "[1, {2}]"]
ROWS = [dict(id=f"d{i}", text=text, language="deu_Latn", score=f"{i / 8}") for i, text in enumerate(TEXTS * 3)]


def read(*paths, encoding="", **options):
    """The documents of some files, as a worker gives them."""
    files = [check(name, path, encoding=encoding) for name, path in find(list(map(str, paths)))]
    assert all(not file["problem"] or options.get("bad") for file in files), files
    return [doc for _, pieces, _ in batches(files) for doc in documents(files, pieces, columns=("score",))]


def columns(docs):
    return [(doc["text"], doc["language"], doc["score"]) for doc in docs]


WANT = [(row["text"], row["language"], row["score"]) for row in ROWS]


def table(delimiter):
    """A table by Python's own writer of RFC 4180."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(ROWS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return out.getvalue()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
FORMATS = {
    "a.jsonl": LINES,
    "a.json": json.dumps(ROWS),
    "wide.json": json.dumps(ROWS, indent=4, ensure_ascii=False),
    "after.json": LINES.replace("}\n", "}\n\n"),
    "a.csv": table(","),
    "semicolons.csv": table(";"),
    "a.TSV": table("\t"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_same_in_each_format_packed_or_not_wherever_a_block_ends(tmp_path, monkeypatch, name):
    zstd = pytest.importorskip("zstandard")
    raw = FORMATS[name].encode("utf-8-sig" if name == "a.csv" else "utf-8")
    for packed, pack in {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}.items():
        (tmp_path / (name + packed)).write_bytes(pack(raw))
        for size in (97, 4 << 20):
            monkeypatch.setattr(readers, "BATCH", size)
            docs = read(tmp_path / (name + packed))
            assert columns(docs) == WANT
            assert [doc["id"] for doc in docs] == [f"{name}{packed}:{row['id']}" for row in ROWS]


GERMAN = "Grüezi – im Dörfli"


@pytest.mark.parametrize("encoding, text", [
    ("latin-1", "Grüezi, élève"), ("cp1252", GERMAN), ("utf-16", GERMAN), ("utf-16-be", GERMAN), ("utf-16", "自然言語処理"),
    ("shift_jis", "自然言語処理"), ("koi8-r", "и равными")])
def test_another_encoding_is_read_by_its_name_and_else_asked_for(tmp_path, encoding, text):
    row = json.dumps(dict(text=text), ensure_ascii=False)
    for ending, content in dict(txt=text, jsonl=row + "\n", csv=f'text\r\n"{text}"\r\n', json=f"[{row}]").items():
        path = tmp_path / f"a.{ending}"
        path.write_bytes(content.encode(encoding))
        (doc,) = read(path, encoding=encoding)
        assert doc["text"] == text
    file = check("a", f"{tmp_path}/a.txt")
    problem = file["problem"] or read(tmp_path / "a.txt", bad=True)[0]["problem"]
    assert "--encoding=" in problem and (encoding[:6] != "utf-16" or "utf-16" in problem)


def test_text_in_another_encoding_than_was_said_is_no_text(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"\xff\xfe odd"))
    assert check("a", f"{tmp_path}/a.txt.gz", encoding="ascii")["problem"] == "not ascii"
    with pytest.raises(ValueError, match="encoding=utf-7000: want a name"):
        check("a", f"{tmp_path}/a.txt.gz", encoding="utf-7000")


def packed_frames(window_log):
    """(two frames of 30 kB with one to be skipped between them, as RFC 8878 has it; where the first ends; the texts)"""
    zstd = pytest.importorskip("zstandard")
    rng = random.Random(2)
    texts = ["%030x" % rng.getrandbits(120) for _ in range(2_000)]
    options = zstd.ZstdCompressionParameters.from_level(3, window_log=window_log, enable_ldm=True)
    frames = []
    for part in texts[:1000], texts[1000:]:
        packer = zstd.ZstdCompressor(compression_params=options).compressobj()
        lines = "".join(json.dumps(dict(text=text)) + "\n" for text in part)
        frames.append(packer.compress(lines.encode()) + packer.flush())
    skipped = bytes.fromhex("502a4d18" "04000000") + b"\xff" * 4
    return skipped.join(frames), len(frames[0]), texts


@pytest.mark.parametrize("window_log", [20, 31])
def test_a_zst_of_several_frames_and_a_long_window_is_read_and_a_torn_one_is_unreadable(tmp_path, window_log):
    """Large archives have windows of 2^27 bytes and more."""
    raw, first, texts = packed_frames(window_log)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(raw)
    assert [doc["text"] for doc in read(path)] == texts
    for bad in (raw[:-1], raw[:-20_000], raw[:first - 5], raw + b"more", b"no zstd" * 10):
        path.write_bytes(bad)
        assert check("a", str(path))["problem"] == "unreadable"
    path.write_bytes(raw[:first])
    assert check("a", str(path))["problem"] is None


# ----------------------------------------------------------------------------------------------------------------------
# nothing lost silently


def fill(folder):
    """A folder of files that are read, and of others. Returns the names of the first."""
    taken = ["a.TXT", "b.markdown", "c.txt.gz", "d.csv", "e.htm", "sub/f.json", "notes[1]/g.md"]
    others = ["x.pdf", "y.PDF", "z.docx", "LICENSE", ".hidden", ".git/config.txt", "old.parquet.gz"]
    for name in [*taken, *others]:
        os.makedirs(os.path.dirname(folder / name), exist_ok=True)
        (folder / name).write_bytes(b"")
    os.symlink("nowhere.txt", folder / "dangling.txt")
    os.symlink("itself", folder / "itself")
    with open(os.fsencode(folder) + b"/Z\xfcrich.txt", "w") as latin:
        latin.write("a name of an old archive")
    return taken


def test_every_file_of_a_folder_is_found_or_counted_by_its_ending(tmp_path):
    taken = fill(tmp_path)
    assert sorted(name for name, _ in find([str(tmp_path)])) == sorted(taken)
    want = {".pdf": 2, "hidden": 2, "broken link": 2, ".docx": 1, ".parquet": 1, "no ending": 1}
    want["name not UTF-8"] = 1
    assert ignored([str(tmp_path)]) == want
    # However often a folder is named, a file counts once; and not at all where another path names it alone.
    assert ignored([str(tmp_path), f"{tmp_path}/sub/..", f"{tmp_path}/*.pdf"]) == want | {".pdf": 1}
    with pytest.raises(ValueError, match=r"Z.udcfcrich.*rename it"):
        find([f"{tmp_path}/Z*"])
    every = sum(len(files) for _, _, files in os.walk(tmp_path))
    assert every == len(taken) + sum(want.values())


def test_a_folder_whose_name_reads_like_a_pattern_is_a_folder(tmp_path):
    fill(tmp_path)
    assert [name for name, _ in find([f"{tmp_path}/notes[1]"])] == ["g.md"]
    assert [name for name, _ in find([f"{tmp_path}/*.TXT"])] == ["a.TXT"]


def test_loops_of_links_end_and_a_file_with_several_links_is_there_once(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "x.txt").write_text("x")
    (tmp_path / "y.txt").write_text("y")
    os.symlink("..", tmp_path / "b" / "deep" / "loop")
    os.symlink(tmp_path, tmp_path / "b" / "whole")
    # In the order of names the links would come first.
    os.symlink("b/deep", tmp_path / "a_link")
    os.symlink("y.txt", tmp_path / "a.txt")
    os.link(tmp_path / "y.txt", tmp_path / "z.txt")
    assert [name for name, _ in find([str(tmp_path)])] == ["b/deep/x.txt", "y.txt"]
    # What links alone lead to is read too, once, wherever it was named.
    (tmp_path / "c").mkdir()
    os.symlink(tmp_path / "b", tmp_path / "c" / "outside")
    assert [name for name, _ in find([f"{tmp_path}/c"])] == ["outside/deep/x.txt", "outside/whole/y.txt"]
    assert [name for name, _ in find([f"{tmp_path}/b/deep/x.txt", str(tmp_path)])] == ["x.txt", "y.txt"]


@pytest.mark.parametrize("name, says", [
    ("a.pdf", "pdftotext"), ("a.warc.gz", "WarcReader"), ("a.docx", "pandoc"), ("a.bin", "unknown kind of file")])
def test_a_named_file_of_another_kind_says_what_to_convert_it_with(tmp_path, name, says):
    (tmp_path / name).write_bytes(b"x")
    assert says in check(name, f"{tmp_path}/{name}")["problem"]


@pytest.mark.parametrize("name, raw, bad", [
    ("torn.json", b'[{"text": "a"}, {"text": "b"}, {"tex', 1),
    ("no.json", b"what is this?", 1),
    ("deep.json", b'[{"text": "a"}, {"text": "b"}, ' + b"[" * 100_000, 1),
    ("bytes.json", b'[{"text": "a"}, {"text": "\xff"}, {"text": "b"}]', 1),
    ("bytes.csv", b"id,text\n1,a\n2,\xff\n3,b\n", 1),
    ("short.csv", b"id, text\n1,a\n2\n\n3,b\n", 1),
    ("comma.csv", b"id,text\n1,a\n2,well, well\n3,b\n", 1),
    ("quote.csv", b'id,text\n1,a\n3,b\n4,"c\n', 1),
    ("quoted.tsv", b'id\ttext\n1\ta\n2\t"Yes" she said\n3\tb\n', 1),
    # From one quote to the next is one row, which is counted.
    ("open.tsv", b'id\ttext\n1\ta\n2\t"Yes\n2\tgone\n2\t"No" she said\n3\tb\n', 1),
    ("commas.tsv", b"text\na\nb\nwell, well; well\n", 0),
    ("empty.csv", b"", 0),
    ("empty.json", b"", 0)])
def test_what_cannot_be_read_of_a_list_or_a_table_is_counted_and_the_rest_is_read(tmp_path, name, raw, bad):
    (tmp_path / name).write_bytes(raw)
    docs = read(tmp_path / name)
    texts = [doc["text"] for doc in docs]
    assert texts.count(None) == bad
    if len(raw) > 20:
        assert {"a", "b"} <= set(texts) <= {"a", "b", "well, well; well", None}


# ----------------------------------------------------------------------------------------------------------------------
# pages


PAGE = """<html><head><title>On lakes</title><meta charset="utf-8"></head><body>
<nav><ul><li><a href="/">Home</a></li><li><a href="/about">About us</a></li></ul></nav>
<article><h1>On lakes</h1><p>The lake of Zürich is forty kilometres long, and its water leaves it through the
Limmat, in the middle of the city, where swans are fed by everybody.</p>
<p>In the winter of 1963 it froze over, and for some weeks people walked across it, from one side to the other.</p>
</article><footer>All rights reserved. <a href="/imprint">Imprint</a></footer></body></html>"""


def test_of_a_page_the_main_text_is_read_as_trafilatura_gives_it(tmp_path, monkeypatch):
    trafilatura = pytest.importorskip("trafilatura")
    for encoding in ("utf-8", "latin-1"):
        (tmp_path / "a.html").write_bytes(PAGE.replace("utf-8", encoding).encode(encoding))
        (doc,) = read(tmp_path / "a.html")
        assert doc["text"] == trafilatura.extract(PAGE, include_comments=False)
        assert "forty kilometres" in doc["text"] and "Zürich" in doc["text"] and "Imprint" not in doc["text"]
    monkeypatch.setattr(readers, "find_spec", lambda name: None)
    assert "pip install trafilatura" in check("a", f"{tmp_path}/a.html")["problem"]


# ----------------------------------------------------------------------------------------------------------------------
# columns


@pytest.mark.parametrize("value, want", [
    (None, None), (5, "5"), (["deu_Latn"], "deu_Latn"), ([], "list"), ({"deu": 1}, "dict"), ("deu_Latn", "deu_Latn")])
def test_a_language_or_licence_that_is_no_text_is_its_name_or_a_problem(tmp_path, value, want):
    for column in ("language", "license"):
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x", column: value}))
        (doc,) = read(tmp_path / "a.jsonl")
        if want in ("list", "dict"):
            assert doc["text"] is None and doc["problem"] == f"a {column} that is a {want}, not a name"
        else:
            assert doc["text"] == "x" and doc[column] == want


# ----------------------------------------------------------------------------------------------------------------------
# the hub


class File(fsspec.spec.AbstractBufferedFile):
    """A file of HfFileSystem but for the network: the class that its own files are of."""

    def _fetch_range(self, start, end):
        self.fs.asked += 1
        if self.fs.asked % 3 == 0:
            raise RuntimeError("connection reset by peer")
        raw = (self.fs.folder / self.path.partition("@c0ffee/")[2]).read_bytes()[start:end]
        self.fs.sent += len(raw)
        return raw


class Hub(fsspec.AbstractFileSystem):
    """A data set on the hub, from a folder of this machine; every third answer is that the network fails."""

    cachable = False

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.asked = self.sent = 0
        self._api = self

    def dataset_info(self, repo):
        return type("Info", (), dict(sha="c0ffee"))

    def ls(self, path, detail=True):
        root, _, inside = f"{path}/".partition("@c0ffee/")
        return [dict(name=f"{root}@c0ffee/{file.relative_to(self.folder)}", size=file.stat().st_size,
                     type="directory" if file.is_dir() else "file") for file in (self.folder / inside).iterdir()]

    def _open(self, path, mode, block_size=None, **options):
        return File(self, path, mode, block_size or "default", **options)


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("# What it is")
    monkeypatch.setattr(inputs, "hub", lambda: hub)
    monkeypatch.setattr(inputs.time, "sleep", lambda seconds: None)
    return hub


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "wide.json"])
def test_lines_tables_and_lists_on_the_hub_are_streamed_as_they_are_here(data_set, monkeypatch, name):
    raw = FORMATS[name.removesuffix(".gz")].encode()
    file = data_set.folder / "data" / name
    file.write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    monkeypatch.setattr(readers, "BATCH", 1000)
    assert columns(read(f"hf://datasets/org/name/data/{name}")) == WANT
    # Each byte is sent once, although the network fails.
    assert data_set.sent == file.stat().st_size


def test_a_torn_file_on_the_hub_is_one_line_with_its_name(data_set):
    for bad in (gzip.compress(LINES.encode())[:-9], b"other" * 20):
        (data_set.folder / "data" / "a.jsonl.gz").write_bytes(bad)
        with pytest.raises(ValueError, match=r"a.jsonl.gz is damaged \(.*name the other files"):
            read("hf://datasets/org/name")


@pytest.mark.parametrize("name", ["a.jsonl", "rows.parquet"])
def test_what_lies_where_fsspec_reads_is_read_as_it_is_here(tmp_path, name):
    """By fsspec's own name for this disk; s3:// differs in the package that answers."""
    file = tmp_path / "sub" / name
    file.parent.mkdir()
    if name == "rows.parquet":
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    else:
        file.write_text(FORMATS[name])
    (file.parent / "x.pdf").write_bytes(b"")
    here = check(f"sub/{name}", str(file))
    for path in (f"file://{tmp_path}", f"file://{tmp_path}/*/{name[0]}*", f"file://{tmp_path}/**/{name}"):
        ((found, url),) = find([path])
        assert url == f"file://{file}" and found in (name, f"sub/{name}")
        there = check(found, url)
        assert (there["bytes"], there["sha256"], there["problem"]) == (here["bytes"], here["sha256"], None)
        assert columns(read(path)) == WANT


@pytest.mark.parametrize("name, package", [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow"), ("a.txt", "pyarrow")])
def test_a_package_that_is_missing_is_one_line_with_the_command_that_installs_it(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"A text.")
    monkeypatch.setitem(sys.modules, package, None)
    for workers in (1, 2):
        done = script("prepare.py", tmp_path / name, f"--out={tmp_path / 'data'}", f"--workers={workers}")
        refused(done, f"pip install {package}")
