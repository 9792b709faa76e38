"""
The conversations of SFT, from files of several forms to ids on disk.

    --data=chats.jsonl | chats.json | chats.parquet | FOLDER | "GLOB" | hf://datasets/OWNER/NAME[/FOLDER | /FILES]
    --data="{'a.jsonl': 2, 'hf://datasets/OWNER/NAME': 1}"        two of three conversations in a run are from a.jsonl

Rows become ids once, in out/<run>/tokens. Each rank tokenizes its share of the parts, and a resumed run reads the parts
that exist: the name of a part is a hash of the content and of all settings that decide an id. Each source of a mixture
is shuffled and repeated separately. The position in the run alone decides which conversation comes (chosen() of
common.py), so the order is the same on any number of ranks and after a restart.

Rows are left out by licence or evaluation prompt as documents are (corpus/rules.py, corpus/dedup.py).

$ python -m posttrain.sft --data="{'chats/': 2, 'hf://datasets/OWNER/NAME': 1}" --keep_licenses=mit,cc0
"""

import io
import itertools
import os

import numpy as np

from chat import FORMS, describe_dropped, learnable
from configurator import literal
from corpus import dedup, readers, rules as selection
from data import Stream, mix_weights
from engine import checkpoint
from engine.files import sha256, sha256_of, write_flushed
from posttrain import common

COLUMNS = {"input", "system", "tools", "thinking", "license"}.union(*FORMS)
SAID = np.uint32(1 << 31)       # the top bit of an id: set if the assistant produces the token, so that it is learnt


# -----------------------------------------------------------------------------
# rows


def weights_of(data):
    """The setting `data` as {source: weight}; a path alone has the weight 1. ValueError: a dict of another form."""
    weights = literal(data)
    if not isinstance(weights, dict):
        return {data: 1}
    if not all(isinstance(source, str) and type(weight) in (int, float) for source, weight in weights.items()):
        raise ValueError(f"data={data}: want a path, or weights by path like {{'a.jsonl': 2, 'b.parquet': 1}}")
    mix_weights(weights)
    return weights


def files_of(source):
    """[{"name", "path"}] of the files of conversations of a source. ValueError: no such file."""
    found, _ = readers.find([source])
    files = [file for file in found if readers.kind_of(file["path"]) in ("lines", "json", "parquet")]
    if not files:
        raise ValueError(f"{source}: want .jsonl, .json or .parquet")
    return files


def numbered(file, part, columns=COLUMNS):
    """
    Yield (place, row) of each row of a part of a file; place: "line 3" or "row 3". columns: of parquet; () = all.

    ValueError: a line is not a JSON object, or the file is damaged. A null in parquet is a missing key.
    """
    parquet = readers.kind_of(file["path"]) == "parquet"
    for n, row in readers.rows(file, part, columns):
        place = f"{'row' if parquet else 'line'} {n + 1}"
        if isinstance(row, str):
            raise ValueError(f"{file['path']}, {place}: want a JSON object in UTF-8, the line is incomplete "
                             "or in another encoding (iconv converts it)")
        yield place, without_nulls(row) if parquet else row


def without_nulls(value):
    """
    Remove the keys whose value is null: parquet gives each struct of a column the keys of all others, with null.

    A null licence stays, because such a row is left out, whereas a row without the column is an error.
    """
    if isinstance(value, list):
        return list(map(without_nulls, value))
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None or key == "license"}
    return value


def first_rows(source, n, *how):
    """(place, row) of the first n rows of a source, or of all if n is None; how: as in numbered()."""
    rows = (row for file in files_of(source) for part in readers.parts_of(file) for row in numbered(file, part, *how))
    return itertools.islice(rows, n)


# -----------------------------------------------------------------------------
# ids on disk, four bytes a token


class Conversations:
    """
    conversations[k] -> (ids, said), arrays (T,), int64 and bool; said: the tokens that are learnt. sizes: conversations
    of each source; tokens, learnt: totals. sources: for each, the parts that tokenize() wrote to the folder.

    Ids are read from disk when needed. In memory a rank holds 8 bytes a conversation.
    """

    def __init__(self, folder, sources):
        parts = list(itertools.chain(*sources))
        self.sizes = [sum(len(part["lengths"]) for part in some) for some in sources]
        self.learnt = sum(part["learnt"] for part in parts)
        self.stream = Stream(folder, parts, 1)
        self.tokens = self.stream.n_tokens
        # Where each conversation begins, and the end of the last one.
        self.starts = np.cumsum([0, *itertools.chain(*(part["lengths"] for part in parts))])

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, k):
        begin, end = self.starts[k:k + 2]
        tokens = self.stream.read(begin, np.empty(end - begin, np.uint32))
        return (tokens & ~SAID).astype(np.int64), tokens >= SAID


def tokenized(folder, tok, data, max_length, date, ranks, keep_licenses="", decontaminate=""):
    """
    Conversations of --data; [[reason, place]] of the rows that are left out; a hash of everything that decides the
    conversations and their ids.

    ValueError: a line that is not a JSON object, a file that cannot be read, or a source with nothing to learn from.
    """
    weights = weights_of(data)
    # The first rank reads each file to its end, to find damage before the run.
    sources = [[readers.check(file, "") for file in files_of(source)] for source in weights] if ranks.is_main else []
    sources = checkpoint.gather(sources, ranks.files)[0]
    licenses = {name.strip() for name in keep_licenses.split(",")} if keep_licenses else None
    contamination = dedup.Contamination(dedup.read_prompts(decontaminate)) if decontaminate else None

    def judge(row):
        """A row -> (ids, said), or why it is left out: licence, a reason of learnable(), or an evaluation prompt."""
        if reason := selection.broken(row, licenses):
            return reason
        found = learnable(tok, row, max_length, date)
        if isinstance(found, str) or not contamination:
            return found
        texts = [tok.decode(found[0])]
        return "contaminated" if contamination.find(texts, *dedup.words(texts)) else found

    decisive = [tok.hash, max_length, date, keep_licenses, decontaminate and sha256(decontaminate)]
    os.makedirs(folder, exist_ok=True)
    names, found, bad = [], [], []
    for source, files in zip(weights, sources):
        todo = []
        for file in files:
            if file["problem"]:
                raise ValueError(f"{file['path']}: {file['problem']}")
            # The hub has no sha256 of small files, but their path names the commit.
            key = sha256_of([file["sha256"] or file["path"], file["parts"], decisive])
            todo += [(f"{key[:16]}-{n:05d}", file, part) for n, part in enumerate(file["parts"])]
        names.append([name for name, *_ in todo])
        written = [f"{folder}/{name}.npy.json" for name in names[-1]]
        parts = common.cached(written, ranks, "tokenizing", lambda k: tokenize(folder, judge, *todo[k]))
        odd = [row for part in parts for row in part.pop("bad")]
        if not any(part["lengths"] for part in parts):
            raise ValueError(f"{source}: {describe_dropped(odd, 0, 'conversations')}")
        found.append(parts)
        bad += odd
    return Conversations(folder, found), bad, sha256_of([names, [*weights.values()]])


def tokenize(folder, judge, name, file, part):
    """
    Write the ids of the conversations in a part of a file to folder/name.npy. Returns the file's entry for data.Stream,
    the lengths of the conversations, and the rows that are left out. judge(row): ids and said, or why it is left out.

    ValueError: a line is not a JSON object.
    """
    tokens, lengths, bad = [], [], []
    for place, row in numbered(file, part):
        found = judge(row)
        if isinstance(found, str):
            bad.append((found, f"{place} of {file['name']}"))
            continue
        ids, said = np.array(found, np.uint32)
        tokens.append(ids | SAID * said)
        lengths.append(len(ids))
    tokens = np.concatenate([np.zeros(0, np.uint32), *tokens])
    content = io.BytesIO()
    np.save(content, tokens)
    write_flushed(f"{folder}/{name}.npy", content.getvalue(), shared=True)
    learnt = int((tokens >= SAID).sum())
    return dict(file=f"{name}.npy", tokens=len(tokens), lengths=lengths, learnt=learnt, bad=bad)
