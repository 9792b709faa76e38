"""corpus/readers.py: each file is read once or listed with a reason, and each format and part gives the same rows."""

import gzip
import io
import itertools
import json
import os
import random
import re
import sys
import tracemalloc
import types

import fsspec
import pyarrow.csv
import pyarrow.parquet
import pytest
from conftest import table
from corpora import put
from fsspec.implementations.memory import MemoryFileSystem

from corpus import readers
from corpus.readers import check, documents, find


def read(path, encoding="", text_field="text"):
    """The documents of files but for order_id, read part by part as workers do: parts pass through JSON."""
    files = [json.loads(json.dumps(check(file, text_field, encoding))) for file in find([str(path)])[0]]
    parts = [documents(file, part, text_field, ("score",)) for file in files for part in file["parts"]]
    return [{key: doc[key] for key in doc if key != "order_id"} for part in parts for doc in part]


def problem(path, encoding=""):
    """Why a file cannot be read. It counts as one document, which the report names."""
    file = check(dict(name="a", path=str(path)), encoding=encoding)
    (doc,) = documents(file, *file["parts"])
    assert (doc["id"], doc["text"], doc["problem"]) == ("a", None, file["problem"])
    return doc["problem"]


def names(*paths):
    return [file["name"] for file in find(map(str, paths))[0]]


# ----------------------------------------------------------------------------------------------------------------------
# each format gives the same rows


def random_rows(seed, n=600):
    """Rows that each format can hold, with characters that are special in one of them."""
    rng = random.Random(seed)
    signs = "ab\",';\t\n\r\\{}[]# ä苏🏔\u2028\x85"
    texts = ["".join(rng.choices(signs, k=rng.choice([1, 9, 99]))) for _ in range(n)]
    return [dict(id=f"d{i}", text=text, language="deu_Latn", score=f"{i / 8}") for i, text in enumerate(texts)]


DELIMITERS = {"a.csv": ",", "b.csv": ";", "a.tsv": "\t"}


def written(rows, name):
    """The bytes of a file of these rows, written by json or pyarrow."""
    sink, columns = io.BytesIO(), pyarrow.Table.from_pylist(rows)
    if name == "a.parquet":
        pyarrow.parquet.write_table(columns, sink, row_group_size=550)
    elif name in DELIMITERS:
        pyarrow.csv.write_csv(columns, sink, pyarrow.csv.WriteOptions(delimiter=DELIMITERS[name]))
    else:
        lines = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(rows)]
        sink.write((f"[{','.join(lines)}]" if name == "list.json" else "\n\n".join(lines)).encode())
    return sink.getvalue()


PACK = {".gz": gzip.compress, ".ZST": lambda raw: pyarrow.compress(raw, "zstd", asbytes=True)}
LINES = ("a.jsonl", "A.NDJSON")
NAMES = [*LINES, "list.json", "b.json", *DELIMITERS]
HOW = ["", *PACK, "utf-16", "memory:/"]
BOTH = [*itertools.product(NAMES, HOW), ("a.parquet", ""), ("a.parquet", "memory:/")]


@pytest.mark.parametrize("name, how", BOTH)
@pytest.mark.parametrize("size", [97, 1000, 16 << 20])
def test_each_format_gives_the_rows_that_were_written_in_whatever_parts(tmp_path, monkeypatch, name, how, size):
    monkeypatch.setattr(readers, "PART", size)
    rows, encoding, url = random_rows(size), "", f"{tmp_path}/{name}"
    raw = written(rows, name)
    if how == "utf-16":
        raw, encoding = raw.decode().encode(how), how
    elif how == "memory:/":
        url = how + url
    else:
        url += how
    with fsspec.open(url, "wb") as f:
        f.write(PACK.get(how, bytes)(raw))
    file = os.path.basename(url)
    assert read(url, encoding) == [dict(row, id=f"{file}:{row['id']}", file=file) for row in rows]
    parts = check(dict(path=url), encoding=encoding)["parts"]
    # Uncompressed lines, and row groups, are split into parts for several processes.
    assert (len(parts) > 1) == (name == "a.parquet" or name in LINES and how in ("", "memory:/") and size < 5000)
    if not encoding:
        numbers = [n for part in parts for n, _ in readers.rows(dict(path=url), part)]
        # The numbers are those of lines, also empty ones and those inside of a text.
        breaks = [0] + [len(re.findall("\r\n?|\n", row["text"])) * (name in DELIMITERS) for row in rows[:-1]]
        begins = enumerate(itertools.accumulate(breaks), name in DELIMITERS)
        assert numbers == [(i + n) * (1 + (name in LINES)) for i, n in begins]
        assert list(readers.records(url)) == rows
        assert list(readers.rows_of(url, ("no", "id"), ("score",))) == [[row["id"], row["score"]] for row in rows]


# A file, its bytes, and id=text of each row by RFC 8259, RFC 4180 and the first reader; an id without = is a row that
# cannot be read. L1 is the first line and R1 the first row, without an id of its own. In open.tsv one row reaches from
# one quote to the next.
GOLDEN = r"""
a.jsonl     | {"text":\r"a"}\n\n{"text": "\xff"}\n[1]\n{"te\n\xef\xbb\xbf{"text": "b", "id": 7} | L1=a L3 L4 L5 7=b
b.jsonl     | {"text": 1}\n"\0"                                                                 | L1 L2
torn.json   |  [{"text": "a"}, 5, {"text": "\\ud800b"}, {"tex                                   | R1=a R2 R3=?b R4
open.json   | [{"text": "a"}, {"text": "b"}                                                     | R1=a R2=b R3
id.json     | {"text": "a", "id": "\\ud800"}                                                    | ?=a
bytes.json  | \xef\xbb\xbf[{"text": "a"}, {"text": "\xff"}, {"text": "b"}]                      | R1=a R2 R3=b
names.jsonl | {"text": "a", "language": ["deu"]}\n{"text": "b", "license": {}, "id": 5}         | L1=a 5
several.json | {"text": "a", "license": ["cc0", "mit"], "id": 5}                                 | 5
deep.json   | [{"text": "a"}, DEEP                                                              | R1=a R2
mac.csv     | id,text\r1,a\r2,b                                                                 | 1=a 2=b
comma.csv   | \xef\xbb\xbfid, text\n1,a\n2,well, well\n\n3\n4,\xff\n5,b\n                       | 1=a L3 L5 L6 5=b
long.csv    | id,text,page\n1,a,DEEPDEEP\n                                                       | 1=a
quote.csv   | id,text\n,a\n3,b\n4,"c\n                                                         | L2=a 3=b L4
open.tsv    | id\ttext\n1\ta\n2\t"Yes\n2\tgone\n2\t"No" she said\n3\tb\n                        | 1=a L3 3=b
empty.csv   |                                                                                   |
empty.jsonl |                                                                                   |
empty.txt   |                                                                                   | empty.txt=
windows.txt | \xef\xbb\xbfhi\r\n                                                                | windows.txt=hi\r\n
"""


@pytest.mark.parametrize("name, content, want", table(GOLDEN))
def test_a_row_that_cannot_be_read_is_counted_and_the_others_keep_their_ids(tmp_path, name, content, want):
    raw = content.encode().decode("unicode_escape").encode("latin-1")
    (tmp_path / name).write_bytes(raw.replace(b"DEEP", b"[" * 100_000))
    docs = read(tmp_path / name)
    said = [doc["id"] if doc["text"] is None and doc["problem"] else f"{doc['id']}={doc['text']}" for doc in docs]
    for form, short in ((f"{name}:", ""), (f"{name} line ", "L"), (f"{name} row ", "R"), ("\r\n", r"\r\n")):
        said = [one.replace(form, short) for one in said]
    assert " ".join(said) == want
    # Each file has a part; without one no report would name it.
    assert len(check(dict(name=name, path=f"{tmp_path}/{name}"))["parts"]) == 1


def test_columns_of_bytes_are_text_and_columns_that_are_asked_for_may_be_in_upper_case(tmp_path):
    """A text that is not UTF-8 is counted, as in other files."""
    columns = {"text": ["Grüezi".encode(), b"Gr\xfcezi"], "id": [b"a", b"b"], "license": [b"cc0", None]}
    columns |= {"X-Robots-Tag": [b"noai", None], "other": [b"x", b"y"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    file = check(dict(name="a", path=str(tmp_path / "a.parquet")))
    one, two = documents(file, file["parts"][0], columns=("x_robots_tag",))
    assert (one["id"], one["text"], one["license"], one["X-Robots-Tag"]) == ("a:a", "Grüezi", "cc0", "noai")
    assert two["text"] is None and two["problem"] == readers.NOT_UTF8
    assert "other" not in one


def test_an_encoding_is_asked_for_and_code_and_fineweb_name_the_language(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes("élève\x85".encode("latin-1"))
    (tmp_path / "d.jsonl").write_text(
        '{"text": "x", "language": "deu", "language_script": "Latn"}\n'
        '{"text": "y", "language": "deu_Latn", "language_script": "Latn"}'
    )
    assert "--encoding=" in read(path)[0]["problem"]
    (tmp_path / "utf-8.py").write_text("Grüezi")
    found = [(doc["text"], doc["language"]) for doc in read(tmp_path, "latin-1")]
    assert found == [("élève\x85", "code"), ("x", "deu_Latn"), ("y", "deu_Latn"), ("Grüezi", "code")]
    assert problem(path, "utf-16") == "unreadable as utf-16"
    path.write_bytes(b"\xef\xbb\xbfa # b\n# c\n \n d#e ")
    assert list(readers.rows_of(f"{tmp_path}/a.py", ("x",), comments=True)) == [["a"], ["d#e"]]


# ----------------------------------------------------------------------------------------------------------------------
# damage


@pytest.mark.parametrize(
    "ending, between",
    [
        # RFC 1952 section 2.2 and RFC 8878 section 3.1: a file may have several members or frames, also skippable ones.
        (".gz", b""),
        (".ZST", bytes.fromhex("502a4d1804000000") + b"\xff" * 4),
    ],
)
def test_a_torn_or_damaged_archive_is_unreadable_and_several_frames_are_one_file(tmp_path, ending, between):
    path = tmp_path / f"a.jsonl{ending}"
    first = PACK[ending](written(random_rows(1, 2000), "a.jsonl") + b"\n")
    path.write_bytes(first + between + first)
    assert len(read(path)) == 4000
    for bad in (first + first[:-1], first + b"more of it", b"no archive" * 10):
        path.write_bytes(bad)
        assert problem(path) == readers.DAMAGED
    for url in (str(path), f"file://{path}"):
        with pytest.raises(ValueError, match="a.jsonl.*damaged, or not what its name says[^\n]*$"):
            list(readers.rows_of(url, ("text",)))


def test_damage_of_parquet_and_a_missing_column(tmp_path):
    path = tmp_path / "a.parquet"
    raw = written(random_rows(1), path.name)
    path.write_bytes(raw[:-9])
    assert problem(path) == readers.DAMAGED
    path.write_bytes(raw[:10] + bytes(900) + raw[910:])
    docs = read(path)
    assert [doc["id"] for doc in docs] == ["a.parquet row group 0", *(f"a.parquet:d{i}" for i in range(550, 600))]
    assert docs[0]["problem"] == readers.DAMAGED
    with pytest.raises(ValueError, match="no column 'body'; it has id, text, language, score"):
        read(path, text_field="body")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, name):
    """A file of 8 MB, read in blocks and parts of 256 kB."""
    monkeypatch.setattr(readers, "PART", 1 << 18)
    path = tmp_path / name
    path.write_bytes(gzip.compress(written([dict(text="x" * 2000)] * 4000, path.stem), 1))
    tracemalloc.start()
    file = check(dict(name="a", path=str(path)))
    assert sum(1 for part in file["parts"] for _ in documents(file, part)) == 4000
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


# ----------------------------------------------------------------------------------------------------------------------
# no file is lost silently


def test_each_file_of_a_folder_is_found_or_listed_with_a_reason(tmp_path):
    taken = "a.TXT b.markdown c.txt.gz notes[1]/g.md sub/f.json"
    others = {
        ".htm": "e.htm",
        ".pdf": "sub/y.PDF x.pdf",
        "hidden": ".git/c.txt .h.txt",
        ".gz": "old.parquet.gz",
        "no ending": "LICENSE",
    }
    put(tmp_path, dict.fromkeys(" ".join([taken, *others.values(), "Z\udcfcrich.txt"]).split(), ""))
    os.symlink("nowhere", tmp_path / "dangling.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    others |= {"broken link": "dangling.txt", "not a file": "pipe.txt", "name not UTF-8": "Z?rich.txt"}
    files, ignored = find([str(tmp_path)])
    assert " ".join(file["name"] for file in files) == taken
    assert {why: " ".join(sorted(found)) for why, found in ignored.items()} == others
    # A file counts once, however often its folder is named; an ignored file that is then named is read, not ignored.
    files, ignored = find([str(tmp_path), f"{tmp_path}/sub/..", f"{tmp_path}/*.pdf"])
    assert len(files) == 6
    assert ignored[".pdf"] == ["sub/y.PDF"]
    assert len(ignored["broken link"]) == 1
    assert names(tmp_path / "notes[1]") == ["g.md"]
    for name, says in (("Z*", "udcfcrich.*UTF-8"), ("pipe.txt", "not a file")):
        with pytest.raises(ValueError, match=says):
            names(tmp_path / name)


LINKS = """
..     | b/deep/loop
ROOT   | b/whole
b/deep | a_link
y.txt  | a.txt
me     | me
"""


def test_loops_of_links_end_and_a_file_with_several_links_is_listed_once(tmp_path):
    put(tmp_path, {"b/deep/x.txt": "", "y.txt": ""})
    for target, link in table(LINKS):
        os.symlink(target.replace("ROOT", str(tmp_path)), tmp_path / link)
    assert names(tmp_path) == ["b/deep/x.txt", "y.txt"]
    assert names(tmp_path / "b") == ["deep/x.txt", "whole/y.txt"]
    assert names(tmp_path / "b/deep/x.txt", tmp_path) == ["x.txt", "y.txt"]


def test_names_that_clash_get_their_folder_or_are_an_error(tmp_path):
    a, b, c = (put(tmp_path / folder, {"x.txt": ""}) for folder in ("a", "b", "c/b"))
    assert names(a, b, a / "x.txt") == ["x.txt", "b/x.txt"]
    with pytest.raises(ValueError, match="c/b/x.txt.*another file has its name"):
        names(a, b, c)


class Hub(MemoryFileSystem):
    """The hub as a file system in memory: its API names the newest commit."""

    protocol = "hf"
    store = {}
    pseudo_dirs = [""]
    _api = types.SimpleNamespace(dataset_info=lambda repo, revision: types.SimpleNamespace(sha="c0ffee"))

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("hf://").strip("/")

    def glob(self, path, **options):
        return [name.strip("/") for name in super().glob(path, **options)]


def test_a_data_set_is_pinned_to_a_commit_and_read_by_one_kind_of_its_training_files(monkeypatch):
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", Hub)
    rows = random_rows(3)
    Hub().pipe("/datasets/o/n@c0ffee/README.md", b"")
    for name in ("train/a.parquet", "test/a.parquet", "train/a.jsonl", "x/a.csv"):
        Hub().pipe(f"/datasets/o/n@c0ffee/{name}", written(rows, os.path.basename(name)))
    files, ignored = find(["hf://datasets/o/n@main"])
    assert files == [dict(name="o/n/train/a.parquet", path="hf://datasets/o/n@c0ffee/train/a.parquet")]
    assert sum(map(len, ignored.values())) == 4
    assert not check(*files)["sha256"]
    assert names("hf://datasets/o/n/test") == ["o/n/test/a.parquet"]
    for inside in ("train/a.parquet", "train/*.jsonl", "x"):
        assert [doc["text"] for doc in read(f"hf://datasets/o/n/{inside}")] == [row["text"] for row in rows]
    # Other file systems work too.
    fsspec.filesystem("memory").pipe("memory://place/sub/a.jsonl", written(rows, "a.jsonl"))
    assert names("memory://place") == names("memory://place/*/a*") == ["sub/a.jsonl"]
