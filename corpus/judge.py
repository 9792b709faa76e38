"""
All documents together, in the order of the input: duplicates, training or validation, the order of training. One task
does it for all machines (corpus/stages.py), since each document is compared with all others.

    work      a run of prepare.py (corpus/stages.py: Work); group: parts of files that are sifted as one piece
    row       of the ledger, a document; its reason is "" if it is kept, its column text a fingerprint of the text
    stream    of documents in the order of training: 2 * number of the source, + 1 for validation
    band      a key of near-duplicates: equal keys, similar texts

Memory: about 180 bytes per document, 230 with near-duplicates.
"""

import re
from collections import Counter
from itertools import islice

import numpy as np
import pyarrow
import pyarrow.compute as pc
from pyarrow.parquet import ParquetFile, write_table

from corpus import dedup, readers
from corpus.pii import TAGS
from corpus.sift import PLACE, PLANTED, table_of
from corpus.stores import SETTINGS
from corpus.urls import host_key

# A document that stays: 40 bytes in memory, however long its text. row: its number among all rows; the others as in
# PLACE; stream: 2 * number of its source, + 1 for validation. A cut document is two of them.
DOCUMENT = [("row", "i8"), ("group", "i4"), ("offset", "i8"), ("written", "i8"), ("id_hash", "u8"), ("stream", "i4")]
# The last part of a cut document has at least this many bytes, some words.
SHORTEST_PART = 8
NEWLINE = re.compile(b"\n")


def judge(number, work):
    """
    All groups -> reasons.parquet, why each row is removed, and documents.npy, the others as DOCUMENT, in the order of
    training, one stream after the other. Returns the names of the sources and how many groups were read. number: 0,
    the only piece of this stage.
    """
    n = len(work.groups)
    if work.plan.max_bytes:
        n = groups_needed(work, groups_sifted(work)) or n
    check_urls(work, n)
    rows, reason = find_duplicates(work, n)
    if not (reason == "").any():
        raise ValueError(f"no document is left ({count_reasons(reason, work, n) or 'the files are empty'})")
    planted = plant(work)
    rows = pyarrow.concat_tables(table.select(["source", "text", *PLACE]) for table in (rows, planted))
    reason = np.append(reason, planted["reason"])
    write_table(pyarrow.table(dict(reason=reason)), work.folder / "reasons.parquet")
    sources = names_of_sources(rows, work.plan.source_by, len(planted) > 0)
    kept = np.flatnonzero(reason == "")
    rows = rows.take(kept)
    documents = np.zeros(len(kept), DOCUMENT)
    documents["row"] = kept
    documents["stream"] = 2 * pc.index_in(rows["source"], pyarrow.array(sources)).to_numpy()
    for name in PLACE:
        documents[name] = rows[name]
    documents = choose_validation(documents, rows["text"].to_numpy(), work)
    np.save(work.folder / "documents.npy", documents[np.lexsort((documents["id_hash"], documents["stream"]))])
    return dict(sources=sources, groups=n)


def names_of_sources(rows, source_by, planted):
    """
    The names of all sources in order, those of removed documents included. planted: whether there are planted passages,
    whose source is the last. ValueError: no document has the column source_by.
    """
    names = sorted(rows["source"].unique().to_pylist(), key=lambda name: (planted and name == "probes", name))
    if source_by not in ("", "file") and names == ["none"]:
        raise ValueError(f"source_by={source_by}: no document has such a column")
    return names


def plant(work):
    """
    Write each planted passage once, as a group of its own. Returns a row for each of its copies, which have the same
    text and places of their own in the order of training, so that they are spread.
    """
    rows, same = [], dict(source="probes", language="", license="", reason="", group=PLANTED, bytes=0, text=0)
    path = work.sifted(PLANTED)
    with open(path.with_suffix(".text"), "wb") as texts:
        for passage in work.passages:
            row = dict(same, id=passage["id"], offset=texts.tell(), written=texts.write(passage["text"].encode()))
            row |= dict.fromkeys(TAGS, 0)
            rows += [dict(row, id_hash=readers.id_hash(f"{row['id']}#{k}")) for k in range(passage["repetitions"])]
    table = table_of(rows, work.rules.bands)
    write_table(table, path)
    return table


# ----------------------------------------------------------------------------------------------------------------------
# duplicates


def find_duplicates(work, n):
    """
    Find duplicates among the first n groups. Returns the rows of these groups, a table with the columns that are needed
    here, and their reasons, an object array.
    """
    rows = read_columns(["reason", "source", "text", *PLACE], work, n)
    reason, fingerprints = rows["reason"].to_numpy(), rows["text"].to_numpy()
    # If the corpus had a copy of a planted passage, training would see it more often than planned.
    planted = np.array([dedup.fingerprint(passage["text"]) for passage in work.passages], np.uint64)
    reason[(reason == "") & np.isin(fingerprints, planted)] = "duplicate"
    left = np.flatnonzero(reason == "")
    first = np.unique(fingerprints[left], return_index=True)[1]
    reason[np.delete(left, first)] = "duplicate"           # all but the first row of each fingerprint
    if work.plan.near_dedup:
        left = np.flatnonzero(reason == "")
        keys = (read_columns([band], work, n)[band].take(left).to_numpy() for band in work.rules.bands)
        reason[left[list(dedup.seen_before(keys))]] = "near-duplicate"
    return rows, reason


def read_columns(columns, work, n):
    """Columns of the rows of the first n groups, as a table."""
    return pyarrow.concat_tables(ParquetFile(work.sifted(number)).read(columns) for number in range(n))


def groups_sifted(work):
    """How many of the first groups are sifted, without a gap."""
    n = len(work.groups)
    return next((number for number in range(n) if not work.is_done("sift", number)), n)


def groups_needed(work, n):
    """How many of the first n groups it takes to keep --max_bytes of text; 0 if n are not enough."""
    rows, reason = find_duplicates(work, n)
    size = np.cumsum(np.bincount(rows["group"], rows["written"].to_numpy() * (reason == ""), n))
    return int(np.searchsorted(size, work.plan.max_bytes)) + 1 if size[-1] >= work.plan.max_bytes else 0


# ----------------------------------------------------------------------------------------------------------------------
# training or validation


def choose_validation(documents, fingerprints, work):
    """
    Move documents to validation by a hash of their text or id. The only document of a source is cut instead, where it
    is long enough: its last part is for validation.

    documents: all in the streams of training. fingerprints: of their texts, uint64 (n,). Returns the documents, each
    cut one as two neighbours.
    """
    hashes, share = documents["id_hash"] if work.plan.by_id else fingerprints, work.plan.val_share
    came_in = documents["group"] != PLANTED
    sizes = np.bincount(documents["stream"][came_in], minlength=documents["stream"].max() + 1)
    alone = came_in & (sizes[documents["stream"]] == 1)
    last = np.zeros(len(documents), np.int64)              # bytes of its last part; 0: the document is not cut
    last[alone] = [bytes_for_validation(text.encode(), share) for text in work.texts_of(documents[alone])]
    val = came_in & (last == 0) & (hashes / 2.0**64 < share)
    if came_in.sum() == 1:
        val[:] = False                                     # training needs the only document
    elif not val.any() and not last.any():
        val = came_in & (hashes == hashes[came_in].min())  # validation needs one document
    documents["stream"] += val                             # the stream of validation follows that of training
    return cut_documents(documents, last)


def bytes_for_validation(text, share):
    """
    The length of the last part of a text, UTF-8: about this share of it, from the begin of a line on if one is near,
    else of the word or the character there. 0 if one of the two parts would be too short.
    """
    ideal = round(len(text) * (1 - share))
    near = min(ideal, len(text) - ideal) // 2
    lines = [newline.end() for newline in NEWLINE.finditer(text, ideal - near, ideal + near)]
    # From a word that begins before, at most so far that the part is twice as long as meant.
    word = text.rfind(b" ", max(2 * ideal - len(text), 0), ideal) + 1
    begin = min(lines, key=lambda at: abs(at - ideal), default=word or ideal)
    while begin < len(text) and text[begin] & 0xC0 == 0x80:
        begin -= 1
    return len(text) - begin if min(begin, len(text) - begin) >= SHORTEST_PART else 0


def cut_documents(documents, last):
    """Cut the last bytes, int64 (n,), off each document, as a document of its own for validation, right behind it."""
    parts = np.repeat(documents, 1 + (last > 0))
    second = np.flatnonzero(np.diff(parts["row"], prepend=-1) == 0)
    parts["written"][second - 1] -= last[last > 0]
    parts["offset"][second] += parts["written"][second - 1]
    parts["written"][second] = last[last > 0]
    parts["stream"][second] += 1
    return parts


# ----------------------------------------------------------------------------------------------------------------------
# errors of the user that only all documents show


def count_reasons(reason, work, n):
    """The commonest reasons for removal, as text, with the languages, whose names may differ from --keep_languages."""
    languages = read_columns(["language"], work, n)["language"].to_pylist()
    reasons = (f"{why}:{name or 'none'}" if why == "language" else why for why, name in zip(reason, languages))
    return ", ".join(f"{count:,} {why}" for why, count in Counter(reasons).most_common(5))


def check_urls(work, n):
    """ValueError if opt-outs of hosts or --url_field are asked for and no document of the first n groups has a URL."""
    plan, readable = work.plan, False
    needs = [f"--{name}" for name in SETTINGS if getattr(plan, name)] + ["--url_field"] * (plan.url_field != "url")
    for number in range(n if needs else 0):
        for row in ParquetFile(work.sifted(number)).read(["url", "reason"]).to_pylist():
            if host_key(row["url"]):
                return
            readable = readable or not row["reason"].startswith("unreadable")
    if readable:
        columns = ", ".join(columns_like_urls(work)) or "none"
        raise ValueError(f"{needs[0]}: no document has a URL in its column {plan.url_field!r}. Choose one with "
                         f"--url_field; columns that look like URLs: {columns}")


def columns_like_urls(work):
    """The names of the columns that hold a URL in one of the first rows of the files, sorted."""
    first = (row for file in work.files() for row in islice(readers.rows(file, file["parts"][0]), 20))
    names = {name for _, row in islice(first, 1000) if isinstance(row, dict)
             for name, value in row.items() if isinstance(value, str) and re.match(r"https?://\S+$", value)}
    return sorted(names - {work.plan.url_field})
