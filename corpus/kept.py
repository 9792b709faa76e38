"""
kept.parquet, beside the shards: what is in a data folder, document by document, and never its text.

    id, url, source, license, language      as the document came in
    sha256, text_hash                       of its text, before personal data was replaced; dedup.fingerprint of it
    split, shard, offset, tokens            where its tokens stand: from `offset` of that shard on, and over its end
    bytes, bytes_written, email, ip, iban   its size before and after personal data was replaced, and what was replaced

Rows stand in the order of the documents in the shards. A folder that `data.py --join` made has none of its own: the
files beside its shards are read. Those who ask are `python -m corpus.audit` and `prepare.py --remove`.
"""

import difflib
import gzip
import hashlib
import json
import os
from functools import lru_cache
from operator import itemgetter

import numpy as np
from tqdm import tqdm

import tokenizer
from corpus.dedup import LONG, fingerprint, signatures, words
from corpus.pii import TAGS
from corpus.robots import host_key
from corpus.shards import abouts, handfuls, shards_of
from engine.files import read_json, read_text, sha256, write_flushed

FILE = "kept.parquet"
# Documents of a row group: some megabytes of memory.
ROWS = 5_000
TEXT = ("id", "url", "source", "license", "language", "sha256", "split", "shard")
NUMBERS = ("offset", "tokens", "bytes", "bytes_written", *TAGS)


def schema():
    import pyarrow
    text = [(name, pyarrow.string()) for name in TEXT]
    numbers = [(name, pyarrow.int64()) for name in NUMBERS]
    return pyarrow.schema([*text, *numbers, ("text_hash", pyarrow.uint64())])


# ----------------------------------------------------------------------------------------------------------------------
# write


def write_kept(folder, documents, tokens, groups, shards, shard_tokens, spool):
    """
    Write folder/kept.parquet. Returns what report.json says of it.

    documents: an array of DOCUMENT in the final order; tokens: how many each of them has, int64 (n,). groups: (source,
    language, license) by number. shards: meta.json's "sources".
    """
    import pyarrow.parquet
    streams = [(name, split, part["shards"]) for name, parts in shards.items() for split, part in parts.items()]
    at = np.zeros(len(streams), np.int64)
    path = folder / FILE
    with pyarrow.parquet.ParquetWriter(path, schema(), compression="zstd") as writer:
        for first in tqdm(range(0, len(documents), ROWS), "what is in", unit="rows", disable=None, leave=False):
            part = documents[first:first + ROWS]
            rows = []
            for document, n, about in zip(part, tokens[first:first + ROWS].tolist(), abouts(part, spool)):
                name, split, files = streams[document["stream"]]
                source, language, license = groups[document["group"]] if document["group"] >= 0 else (name, "", "")
                shard, offset = divmod(int(at[document["stream"]]), shard_tokens)
                at[document["stream"]] += n
                rows.append(dict(
                    about,
                    source=source,
                    language=language,
                    license=license,
                    split=split,
                    shard=files[shard]["file"],
                    offset=offset,
                    tokens=n,
                    bytes_written=int(document["length"]),
                    text_hash=int(document["text_hash"]),
                ))
            writer.write_table(pyarrow.Table.from_pylist(rows, schema()))
    return dict(file=FILE, sha256=sha256(path), documents=len(documents))


# ----------------------------------------------------------------------------------------------------------------------
# read


def folders_of(folder):
    """{folder of shards: names of those of its shards that belong to a data folder}: itself, or what --join joined."""
    found = {}
    for shard in shards_of(read_meta(folder)):
        path = os.path.realpath(os.path.join(folder, shard["file"]))
        found.setdefault(os.path.dirname(path), set()).add(os.path.basename(path))
    return found


def read_meta(folder):
    path = os.path.join(folder, "meta.json")
    if not os.path.isfile(path):
        raise ValueError(f"{folder} has no meta.json: want a folder that prepare.py wrote")
    return read_json(path)


def tables(folder, columns=None):
    """
    Yield (folder of the shards, pyarrow.Table) of the documents of a data folder, ROWS of them at most at a time.

    ValueError for a folder that an older prepare.py wrote.
    """
    import pyarrow
    import pyarrow.parquet
    for place, shards in folders_of(folder).items():
        path = os.path.join(place, FILE)
        if not os.path.isfile(path):
            raise ValueError(
                f"{place} has no {FILE}, which data of the older format lack: "
                "prepare.py of the same files writes both anew"
            )
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(ROWS, columns=columns and [*columns, "shard"]):
                    table = pyarrow.Table.from_batches([batch])
                    mine = np.isin(table["shard"].to_numpy(), list(shards))
                    yield place, table.filter(pyarrow.array(mine))
        except pyarrow.ArrowInvalid as e:
            raise ValueError(f"{path} is damaged ({' '.join(str(e).split())[:120]}): prepare the data again") from None


class Tokens:
    """The tokens of documents, read from the shards of a folder of prepare.py. corpus.audit and --remove read them."""

    def __init__(self, folder):
        self.folder = folder
        meta = read_meta(folder)
        self.next = {}
        for source in meta["sources"].values():
            for split in source.values():
                files = [shard["file"] for shard in split["shards"]]
                self.next.update(zip(files, files[1:]))
        self.shard = lru_cache(100)(lambda file: np.load(os.path.join(folder, file), mmap_mode="r", allow_pickle=False))

    def pieces(self, row):
        """Yield (shard, begin, end): where the tokens of a row of kept.parquet stand."""
        file, begin, left = row["shard"], row["offset"], row["tokens"]
        while left:
            end = min(begin + left, len(self.shard(file)))
            yield file, begin, end
            left -= end - begin
            file, begin = self.next.get(file), 0

    def of(self, row):
        return np.concatenate([self.shard(file)[begin:end] for file, begin, end in self.pieces(row)])


# ----------------------------------------------------------------------------------------------------------------------
# join


def join_audits(folders, meta, final, data):
    """
    Write report.json and report.md of joined folders into `data`, a folder that will stand at `final`: the reports of
    all parts, and which texts stand in them more than once. Returns that as a sentence.

    meta: meta.json of all of them. 18 bytes of memory a document.
    """
    parts, pages, older = {}, [], []
    for folder in folders:
        name = os.path.relpath(os.path.realpath(folder), final)
        path = os.path.join(folder, "report.json")
        report = read_json(path) if os.path.isfile(path) else {}
        # Of a folder that was joined before, the parts.
        parts.update(report.get("parts") or {name: report or None})
        page = os.path.join(folder, "report.md")
        if os.path.isfile(page):
            pages.append(read_text(page))
        older += [place for place in folders_of(folder) if not os.path.isfile(os.path.join(place, FILE))]
    twice = None if older else texts_again(folders)
    if older:
        said = (f"{older[0]} has no {FILE}, being of the older format: whether its texts stand in the others too is "
                "not known. prepare.py of the same files writes it anew")
    else:
        said = (f"{twice['documents']:,} documents ({twice['tokens']:,} tokens) have a text that stood there already, "
                f"{twice['on_both_sides']:,} of the texts for training and for validation")
        if twice["on_both_sides"]:
            said += ": prepare the folders with one --val_share and --split_by=text, or --remove them from one"
    report = dict(version=meta["version"], parts=parts, twice=twice)
    write_flushed(os.path.join(data, "report.json"), json.dumps(report, indent=1, ensure_ascii=False))
    head = f"# {len(parts)} folders in one\n\nVersion {meta['version']}. {said}.\n"
    write_flushed(os.path.join(data, "report.md"), "\n".join([head, *pages]))
    return said


def texts_again(folders):
    """What stands in folders more than once: {"documents", "tokens", "on_both_sides": texts in train and in val}."""
    import pyarrow
    columns = [], [], []
    for folder in folders:
        for _, table in tables(folder, ["text_hash", "tokens", "split"]):
            # A planted passage is meant to stand there many times: its hash is 0.
            table = table.filter(pyarrow.array(table["text_hash"].to_numpy() != 0))
            for column, name in zip(columns, ("text_hash", "tokens", "split")):
                values = table[name].to_numpy()
                column.append(values == "val" if name == "split" else values)
    hashes, tokens, val = map(np.concatenate, columns)  # (documents,)
    order = np.argsort(hashes, kind="stable")
    hashes, val = hashes[order], val[order]
    first = np.flatnonzero(np.diff(hashes, prepend=hashes[:1] + np.uint64(1)))
    again = np.ones(len(hashes), bool)
    again[first] = False
    both = np.logical_or.reduceat(val, first) & ~np.logical_and.reduceat(val, first)
    sums = dict(documents=again.sum(), tokens=tokens[order][again].sum(), on_both_sides=both.sum())
    return {name: int(n) for name, n in sums.items()}


# ----------------------------------------------------------------------------------------------------------------------
# find


def exactly(folder, wanted, text):
    """Yield (how, row) of the documents that have this id or URL, or this text."""
    import pyarrow
    import pyarrow.compute as compute
    whole = hashlib.sha256(text.encode()).hexdigest()
    key = pyarrow.scalar(fingerprint(text), pyarrow.uint64())
    for place, table in tables(folder):
        rules = [("this id", "id", wanted), ("this URL", "url", wanted), ("this text", "sha256", whole),
                 ("this text but for white space", "text_hash", key)]
        told = np.zeros(len(table), bool)
        for how, column, value in rules:
            hit = compute.equal(table[column], value).fill_null(False).to_numpy() & ~told
            told |= hit
            for row in table.filter(pyarrow.array(hit)).to_pylist():
                yield how, dict(row, folder=place)


def nearly(folder, text, similarity):
    """
    Yield (how, row) of the documents that are nearly this text: by MinHash, +- 0.04 at 0.8 (corpus/dedup.py).

    All tokens are read and decoded, since no signature is kept: some MB/s.
    """
    own = signature([text])[0]
    tok = tokenizer.load_for(folder)
    readers = {place: Tokens(place) for place in folders_of(folder)}
    total = sum(shard["tokens"] for shard in shards_of(read_meta(folder)))
    with tqdm(desc="near-duplicates", total=total, unit="tok", unit_scale=True, disable=None, leave=False) as progress:
        for place, table in tables(folder):
            for rows in handfuls(table.to_pylist(), 100_000, itemgetter("tokens")):
                texts = [tok.decode(readers[place].of(row)[1:-1].tolist()) for row in rows]
                like = (signature(texts) == own).mean(1)  # (rows,)
                progress.update(sum(row["tokens"] for row in rows))
                for i in np.flatnonzero(like >= similarity):
                    yield f"nearly this text, similarity {like[i]:.2f}", dict(rows[i], folder=place)


def signature(texts):
    """minhash of n texts: uint32 (n, 112)."""
    return signatures(*words([text[:LONG] for text in texts]))


def find(folder, wanted, similarity):
    """
    [(how, row)] of all documents of a data folder that are meant by `wanted`: an id, a URL, a file with a text, or a
    text. Text of at least five words is also looked for as a near-duplicate.
    """
    text = wanted
    if os.path.isfile(wanted):
        with open(wanted, encoding="utf-8-sig", errors="replace", newline="") as f:
            text = f.read()
    found = list(exactly(folder, wanted, text))
    is_name = any(how in ("this id", "this URL") for how, _ in found)
    if not is_name and "://" not in text[:10] and len(words([text])[0]) >= 5:
        known = {(row["folder"], row["id"], row["split"]) for _, row in found}
        for how, row in nearly(folder, text, similarity):
            if (row["folder"], row["id"], row["split"]) not in known:
                found.append((how, row))
    return found


def removed_of(folder, wanted):
    """Yield why documents of this id or URL are not there: lines of removed.jsonl.gz."""
    for place in folders_of(folder):
        path = os.path.join(place, "removed.jsonl.gz")
        if os.path.isfile(path):
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                for line in map(json.loads, lines):
                    if wanted in (line["id"], line.get("url")):
                        yield line


def near_names(folder, wanted):
    """The ids, URLs or hosts that are nearest to one that is not there, as the end of a sentence."""
    best = set()
    for _, table in tables(folder, ["id", "url"]):
        names = {*table["id"].to_pylist(), *filter(None, table["url"].to_pylist())}
        names |= {host_key(name) or name for name in names if "://" in name}
        best = set(difflib.get_close_matches(wanted, [*best, *sorted(names)], 3, 0.5))
    ordered = difflib.get_close_matches(wanted, sorted(best), 3, 0.5)
    return f"near it is {', '.join(map(repr, ordered))}" if ordered else "nothing is called like it"
