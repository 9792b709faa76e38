"""
The conversations of SFT, from files of several forms to ids on disk.

    --data=chats.jsonl | chats.json | chats.parquet | FOLDER | "GLOB" | hf://datasets/OWNER/NAME[/FOLDER | /FILES]
    --data=A,B                  several of these, one after the other; --data=A,A,B reads A twice in each epoch
    --too_long=cut              conversations of more than max_length tokens lose their end; else they are left out

Rows become ids once, in out/<run>/tokens. Each rank tokenizes its share of the parts, and a resumed run reads the parts
that exist: the name of a part is a hash of the content and of all settings that decide an id. The position in the run
alone decides which conversation comes (common.item_indices), so the order is the same on any number of ranks and after
a restart.

$ python -m posttrain.sft --data=chats/,hf://datasets/OWNER/NAME
"""

import io
import itertools
import math
import os

import numpy as np

from chat import ALPACA, BESIDE, DATE, FORMS, conversation, describe_dropped, learnable, unread_keys
from corpus import readers
from data import Stream
from engine import checkpoint
from engine.files import sha256_of, write_flushed
from posttrain import common

# Those of a parquet file that are read. Others may be large, or of types that Python lacks.
COLUMNS = (BESIDE | ALPACA).union(*FORMS)
LEARNT = np.uint32(1 << 31)     # the top bit of an id: set if the assistant produces the token, so that it is learnt


# -----------------------------------------------------------------------------
# rows


def sources_of(data):
    """The paths in the setting `data`. ValueError for weights, which it had until they were removed."""
    if data.startswith("{"):
        raise ValueError(f"data={data}: weights of sources were removed: --data=A,B reads A and B, and --data=A,A,B "
                         "reads A twice in each epoch")
    return data.split(",")


def source_files(source):
    """[{"name", "path"}] of the files of conversations of a source. ValueError: no such file."""
    named, _ = readers.find([source])
    files = [file for file in named if readers.kind_of(file["path"]) in ("lines", "json", "parquet")]
    if not files:
        raise ValueError(f"{source}: want .jsonl, .json or .parquet")
    return files


def numbered_rows(file, part, columns=COLUMNS):
    """
    Yield (place, row) of each row of a part of a file; place: "line 3" or "row 3". columns: of parquet; () = all.

    ValueError: a line is not a JSON object, or the file is damaged. A null in parquet is a missing key.
    """
    is_parquet = readers.kind_of(file["path"]) == "parquet"
    for n, row in readers.rows(file, part, columns):
        place = f"{'row' if is_parquet else 'line'} {n + 1}"
        if isinstance(row, str):
            raise ValueError(f"{file['path']}, {place}: want a JSON object in UTF-8, the line is incomplete "
                             "or in another encoding (iconv converts it)")
        yield place, without_nulls(row) if is_parquet else row


def without_nulls(value):
    """Remove the keys whose value is null: parquet gives each struct of a column the keys of all others, with null."""
    if isinstance(value, list):
        return list(map(without_nulls, value))
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value


def unread_columns(file):
    """The columns of a parquet file that are not read, in phrases for the user: a list."""
    if readers.kind_of(file["path"]) != "parquet":
        return []
    return [f"the column {name!r}" for name in readers.names_of_columns(file) if name not in COLUMNS]


def first_rows(source, n, columns=COLUMNS):
    """(place, row) of the first n rows of a source, or of all with n=None; columns: as in numbered_rows()."""
    rows = (row
            for file in source_files(source)
            for part in readers.parts_of(file)
            for row in numbered_rows(file, part, columns))
    return itertools.islice(rows, n)


# -----------------------------------------------------------------------------
# ids on disk, four bytes a token


class Conversations:
    """
    conversations[k] -> (ids, loss_mask), arrays (T,), int64 and bool; loss_mask: the tokens that are learnt. tokens,
    learnt: totals; longest: tokens of the longest; hashes: row_hash() of each, (n,) uint64, or None if an earlier
    version has tokenized a part; notes: lines for the user about cut, repeated and unread content. parts: entries that
    tokenize_part() returned, of files in `folder`.

    Ids are read from disk when needed. In memory a rank holds 8 bytes a conversation.
    """

    def __init__(self, folder, parts):
        self.learnt = sum(part["learnt"] for part in parts)
        self.stream = Stream(folder, parts, 1)
        self.tokens = self.stream.n_tokens
        # Where each conversation begins, and the end of the last one.
        self.starts = np.cumsum([0, *itertools.chain(*(part["lengths"] for part in parts))])
        self.longest = np.diff(self.starts).max()
        self.hashes = None
        if all("row_hashes" in part for part in parts):
            self.hashes = np.array([number for part in parts for number in part["row_hashes"]], np.uint64)
        self.notes = notes_of(parts)

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, k):
        begin, end = self.starts[k:k + 2]
        tokens = self.stream.read(begin, np.empty(end - begin, np.uint32))
        return (tokens & ~LEARNT).astype(np.int64), tokens >= LEARNT


def checked_files(data, ranks):
    """The files of --data, as readers.check() returns them. ValueError: one of them cannot be read."""
    sources = sources_of(data)
    # The first rank reads each file to its end, to find damage before the run.
    checked = []
    if ranks.is_main:
        checked = [readers.check(file, "") for source in sources for file in source_files(source)]
    checked = checkpoint.gather(checked, ranks.save_group)[0]
    for file in checked:
        if file["problem"]:
            raise ValueError(f"{file['path']}: {file['problem']}")
    if not any(file["bytes"] for file in checked):
        raise ValueError(f"{data}: {describe_dropped([], 0, 'conversations')}")
    return checked


def notes_of(parts):
    """Lines for the user: how many conversations are cut, repeat another, or have keys that are not read."""
    # A part that --data names twice repeats nothing. Entries of older versions have no counts.
    distinct = {part["file"]: part for part in parts}.values()
    n = sum(len(part["lengths"]) for part in distinct)
    hashes = [number for part in distinct for number in part.get("row_hashes", [])]
    counts = {}
    for part in distinct:
        for words, (count, place) in part.get("counts", {}).items():
            add_count(counts, words, count, place)
    notes = describe_counts(counts, n, "conversations")
    repeated = len(hashes) - len(np.unique(np.array(hashes, np.uint64)))
    return notes + [f"{repeated} of {n} conversations repeat another"] * (repeated > 0)


def describe_counts(counts, n, items):
    """A line for each entry of counts, {words: (how many, the place of the first)}. n: of all items; items: plural."""
    return [f"{count} of {n} {items} {words} (first in {place})" for words, (count, place) in counts.items()]


def add_count(counts, words, count, place):
    """Add to counts, {words: (how many conversations, the place of the first)}."""
    before, first = counts.get(words, (0, place))
    counts[words] = before + count, first


def tokenize_data(folder, tok, data, max_length, ranks, too_long="drop"):
    """
    Conversations of --data; [[reason, place]] of the rows that are left out; a hash of everything that decides the
    conversations and their ids. folder: for the ids; too_long: as in conversation_ids().

    ValueError: a line that is not a JSON object, a file that cannot be read, or no row to learn from.
    """
    parts = []
    for file in checked_files(data, ranks):
        # The hub has no sha256 of small files, but their path names the commit.
        decisive = [file["sha256"] or file["path"], file["parts"], tok.hash, max_length, DATE]
        key = sha256_of(decisive if too_long == "drop" else [*decisive, too_long])
        parts += [(f"{key[:16]}-{n:05d}", file, part) for n, part in enumerate(file["parts"])]
    os.makedirs(folder, exist_ok=True)
    names = [name for name, *_ in parts]
    entries = common.cached([f"{folder}/{name}.npy.json" for name in names], ranks, "tokenizing",
                            lambda k: tokenize_part(folder, tok, max_length, too_long, *parts[k]))
    if ranks.is_main:
        print_empty([file for _, file, _ in parts], entries)
    dropped = [row for entry in entries for row in entry.pop("bad")]
    if not any(entry["lengths"] for entry in entries):
        raise ValueError(f"{data}: {describe_dropped(dropped, 0, 'conversations')}")
    return Conversations(folder, entries), dropped, sha256_of(names)


def print_empty(files, entries):
    """Print which of the files have no row. files: of each entry that tokenize_part() returned."""
    for file, entry in zip(files, entries):
        if not entry["lengths"] and not entry["bad"]:
            print(f"{file['path']} is empty")


def row_hash(row):
    """64 bits of a hash of a conversation's words, an int: equal for all forms of a row, and for all tokenizers."""
    row = conversation(row)
    words = [{key: message.get(key) for key in ("role", "content", "tool_calls")} for message in row["messages"]]
    return int(sha256_of([words, row["tools"]])[:16], 16)


def conversation_ids(tok, row, max_length, too_long):
    """
    (ids, mask, is_cut) of a row of any form, or the reason why a model cannot learn from it (str).

    too_long: what becomes of more than max_length tokens. drop: the row is left out; cut: its first ones are learnt.
    """
    result = learnable(tok, row, max_length if too_long == "drop" else math.inf)
    if isinstance(result, str):
        return result
    ids, mask = result
    if not any(mask[:max_length]):
        return f"no word to learn in its first max_length={max_length} tokens"
    return ids[:max_length], mask[:max_length], len(ids) > max_length


def tokenize_part(folder, tok, max_length, too_long, name, file, part):
    """
    Write the ids of the conversations in a part of a file to folder/name.npy. Returns the file's entry for data.Stream,
    with the lengths of the conversations, a hash of each, the counts of add_count(), and the rows that are left out,
    each with its reason.

    ValueError: a line is not a JSON object.
    """
    tokens, lengths, hashes, counts, dropped = [], [], [], {}, []
    columns = unread_columns(file)
    for place, row in numbered_rows(file, part):
        place = f"{place} of {file['name']}"
        result = conversation_ids(tok, row, max_length, too_long)
        if isinstance(result, str):
            dropped.append((result, place))
            continue
        *ids_and_mask, is_cut = result
        ids, loss_mask = np.array(ids_and_mask, np.uint32)
        tokens.append(ids | LEARNT * loss_mask)
        lengths.append(len(ids))
        hashes.append(row_hash(row))
        if is_cut:
            add_count(counts, f"are cut at max_length={max_length} tokens", 1, place)
        for phrase in [*sorted(unread_keys(row)), *columns]:
            add_count(counts, f"have {phrase}, which is not read", 1, place)
    tokens = np.concatenate([np.zeros(0, np.uint32), *tokens])
    content = io.BytesIO()
    np.save(content, tokens)
    write_flushed(f"{folder}/{name}.npy", content.getvalue(), shared=True)
    learnt = int((tokens >= LEARNT).sum())
    return dict(file=f"{name}.npy", tokens=len(tokens), lengths=lengths, learnt=learnt, row_hashes=hashes,
                counts=counts, bad=dropped)
