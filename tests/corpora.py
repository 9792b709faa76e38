"""Corpora for the tests of prepare.py and corpus/: texts, commands, and readers of a data folder's files."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
from conftest import refused, script
from lab import run

import tokenizer
from data import read_meta

BYTE = tokenizer.load("byte")
WORDS = (
    "the of and to in is that for with as on was by it from are this be or an at which not have has were but "
    "their all one we can there been if more when will would who so no out up into them then she he do "
    "its"
).split()


def text(seed, n=120):
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, n)).capitalize() + f".\nNumber {seed}."


def rows(n, first=0):
    """n documents with the columns that rules ask for."""
    return [
        dict(
            id=f"d{i}",
            text=text(i),
            url=f"https://host{i % 7}.example/page/{i}",
            lang=("deu_Latn", "roh_Latn")[i % 2],
            license=("cc0", "mit", "none")[i % 3],
            score=i * 37 % 101 / 100,
        )
        for i in range(first, first + n)
    ]


def write_lines(path, records):
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_form(path, rows):
    """Write rows as the ending of the path says."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict.fromkeys(names) | row for row in rows]), path)
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as f:
            table = csv.DictWriter(f, names)
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_lines(path, rows)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def put(root, files):
    """Write files {name: bytes or str} below a folder, and their parent folders. Returns the folder."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def fill(out, *args):
    """Run prepare.py ARGS into the folder `out`, with bytes as tokens. Returns its output."""
    return run("prepare.py", "--tokenizer=byte", *args, f"--out={out}").stdout


def refuse(says, *args, name="prepare.py"):
    """Assert that the command ends with exit code 2 and one line that holds `says`."""
    refused(script(name, *args), says)


def ledger(folder):
    return pyarrow.parquet.read_table(Path(folder) / "documents.parquet").to_pylist()


def kept(folder):
    return [row for row in ledger(folder) if not row["reason"]]


def report(folder):
    return json.loads((Path(folder) / "report.json").read_text())


def written(folder):
    """{file: bytes} of a folder without its reports, which differ between equal runs."""
    files = sorted(Path(folder).iterdir())
    return {file.name: file.read_bytes() for file in files if not file.name.startswith("report")}


def streams(folder):
    """{(source, split): its tokens}"""
    found = {}
    for name, source in read_meta(str(folder))["sources"].items():
        for split, part in source.items():
            shards = [np.load(Path(folder) / shard["file"]) for shard in part["shards"]]
            found[name, split] = np.hstack([np.uint16([]), *shards])
    return found


def texts_of(folder):
    """{split: the texts in order} of a folder whose tokens are bytes, read from the shards alone."""
    found = dict(train=[], val=[])
    for (_, split), stream in streams(folder).items():
        documents = np.split(stream, np.flatnonzero(stream == BYTE.bos))[1:]
        found[split] += [BYTE.decode(document[1:-1].tolist()) for document in documents]
    return found
