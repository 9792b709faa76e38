"""
Check a data folder: do its files match its report, is a document in it, and at which steps did a run read it?

$ python -m corpus.audit data/mine                                    # recompute hashes, documents and tokens
$ python -m corpus.audit data/mine --find=https://example.org/page    # an id, a URL, a host, a text, a part of one, or
                                                                      # a text file
$ python -m corpus.audit data/mine --find=letter.txt --when=out/mine  # the steps at which a run read it

All answers come from documents.parquet (corpus/ledger.py) and the shards. --when needs no log of the samples: the order
of training is a function of seed and step (data.py), for any number of ranks and of resumes. That takes 0.15 s for each
million samples: 9 minutes for the 15T tokens of Apertus. It needs the data that the run has read: --remove changes
them, so the steps of a run cannot be counted after it.
"""

import sys

if not __package__:
    print("audit.py: start it from the project's root, python -m corpus.audit", file=sys.stderr)
    sys.exit(2)

import os
import re
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from configurator import run
from corpus.dedup import LONG, fingerprint, normalized, signatures, words
from corpus.folder import shards_of
from corpus.ledger import came_in, first_kind, is_email, is_last_part, ledger_rows, names_in, names_of, was_kept
from corpus.pii import scrub_pii
from corpus.readers import kind_of
from corpus.report import counted, described, verify
from data import StagedDataset, Stream, TokenDataset, first_folder
from engine.files import in_one_line, read_text
from engine.plot import entries
from engine.restore import started_stages
from engine.runs import settings_of
from schedule import Plan
from tokenizer import load_for

paths = []                          # data folders; none: data/stdlib
find = ""                           # what to find in them: an id, a URL, a host, a text, a part of one, or a text file
similarity = 0.72                   # MinHash similarity from which a document is a near-duplicate of find
when = ""                           # with find: a run folder of train.py; prints the steps that read the document

# Samples whose windows are computed at once.
CHUNK = 1 << 20
# Words from which a text with its personal data replaced is searched inside of documents: an address alone becomes the
# token that replaces all of them.
PASSAGE = 8
# Bytes of UTF-8 from which a text is searched inside of documents: a name in Chinese has 6.
SHORTEST = 5


# ----------------------------------------------------------------------------------------------------------------------
# what to find


@dataclass
class Query:
    """A user's search: an id, a URL, a host or a text."""
    asked: str          # as the user wrote it: the text itself, or the name of a file
    is_file: bool
    text: str           # the content of the file, or `asked`
    names: set          # as names_of() has them

    @property
    def is_short(self):
        """Whether the text has too few bytes to be searched inside of documents."""
        return len(self.text.encode("utf-8", "replace")) < SHORTEST


def read_query(asked):
    """The Query of --find. ValueError: nothing is asked, or the file has no text."""
    is_file = os.path.isfile(asked)
    text = read_text(asked).removeprefix("\ufeff") if is_file else asked
    if not text.strip():
        raise ValueError(f"find={asked!r} is empty: want an id, a URL, a host, a text, or a text file")
    if not re.sub(r"^\w+:(?=//)", "", text).strip("/ \r\n"):
        raise ValueError(f"find={asked!r} names nothing: want an id, a URL, a host, a text, or a text file")
    # A file is found by its text alone.
    names = set() if is_file else set().union(*names_in(asked))
    return Query(asked, is_file, text, names | {("text", fingerprint(text))})


def looks_like_a_file(name):
    """Whether a name that is no file is more likely a mistyped one than an id, a URL, an e-mail address or a text."""
    n = len(name.split())
    if os.path.exists(name) or ":" in name or "@" in name or n >= PASSAGE:
        return False
    return bool(kind_of(name)) or n == 1 and bool(re.search(r"/|\.[A-Za-z]\w{1,4}$", name))


# ----------------------------------------------------------------------------------------------------------------------
# find: all functions give a list of (how a document matches, its row of the ledger)


def find_rows(query, folder, meta, similarity):
    """
    The documents of a folder whose id, URL, host or text is asked for, and for removed ones the kept ones that have
    their text. If no id, URL or host matches, the texts in the shards are searched.
    """
    matches = match_names(query, folder)
    by_text = all(how == "this text" for how, _ in matches)
    matches += copies_of([row for _, row in matches], folder)
    if not by_text or query.is_short:
        return matches
    equal = {row["id"] for _, row in matches}
    similar = search_texts(query.text, folder, meta, similarity)
    return matches + [(how, row) for how, row in similar if row["id"] not in equal]


def match_names(query, folder):
    """The documents with one of the names of a query, kept or removed."""
    matches = []
    for row in ledger_rows(folder):
        kind = first_kind(names_of(row) & query.names)
        if kind:
            matches.append((f"this {'URL' if kind == 'url' else kind}", row))
    return matches


def copies_of(rows, folder):
    """
    The documents, not among these rows, that have the text of a removed one among them: they are kept, or were until
    --remove.
    """
    known = {row["id"] for row in rows}
    removed = {row["text"]: row["id"] for row in rows if row["reason"]}
    return [(f"the text of {removed[row['text']]}", row) for row in (ledger_rows(folder) if removed else ())
            if row["text"] in removed and was_kept(row) and row["id"] not in known]


def search_texts(text, folder, meta, similarity):
    """
    The kept documents with a similar MinHash signature (+- 0.04 at 0.8), or that hold the text, but for white space.
    Reads all tokens, at a few MB/s.
    """
    ids, ends = words([text[:LONG]])
    # A text of fewer words is one shingle, which is no document's.
    signature = signatures(ids, ends) if len(ids) >= 5 else None
    passages = {normalized(text)}
    # Personal data in the shards is replaced, but not in code.
    if len(ids) >= PASSAGE:
        passages.add(normalized(scrub_pii(text)[0]))
    matches = []
    for row, document in texts_of(folder, meta):
        agreement = 0
        if signature is not None:
            agreement = (signatures(*words([document[:LONG]])) == signature).mean()
        if agreement >= similarity:
            matches.append((f"nearly this text, similarity {agreement:.2f}", row))
        elif any(passage in normalized(document) for passage in passages):
            matches.append(("this passage", row))
    return matches


def texts_of(folder, meta):
    """
    Yield (row, text) of all kept documents, decoded from the shards, with a progress bar. The last part of a cut
    document comes with the part before it.
    """
    tok, shards = load_for(folder), shards_of(meta)
    stream = Stream(folder, shards, 1)
    begins = {shard["file"]: begin for shard, begin in zip(shards, stream.begins)}
    with tqdm(desc="texts", total=stream.n_tokens, unit="tok", unit_scale=True, disable=None,
              leave=False) as progress:
        text = ""
        for row in ledger_rows(folder):
            if not row["reason"]:
                ids = stream.read(begins[row["shard"]] + row["offset"], np.empty(row["tokens"], np.int64))
                # A passage may begin before the cut of a document and end behind it.
                before = text if is_last_part(row) else ""
                text = before + tok.decode(ids[1:-1].tolist())
                yield row, text
                progress.update(row["tokens"])


# ----------------------------------------------------------------------------------------------------------------------
# the answer


def print_matches(query, folder, similarity, when):
    """
    Print whether a document is in a data folder, and at which steps the run `when` has read it, unless that is "".
    Returns how many documents match.
    """
    meta, report = described(folder)
    matches = find_rows(query, folder, meta, similarity)
    documents = [row for _, row in matches if came_in(row)]
    of_host = [row for row in documents if any(kind == "host" for kind, _ in names_of(row) & query.names)]
    if of_host:
        kept = sum(not row["reason"] for row in of_host)
        print(f"{query.asked} is the host of {counted(len(of_host), 'document')} that came in; kept: {kept:,}")
    originals = {row["text"]: row["id"] for _, row in matches if was_kept(row)}
    training_run = None
    for how, row in matches:
        print(answer(how, row, originals, folder))
        if when and was_kept(row):
            training_run = training_run or TrainingRun(when)
            print(f"    {training_run.steps_with(row, folder)}")
    if not matches:
        print(no_answer(query, folder, report))
    return len(matches)


def answer(how, row, originals, folder):
    """A sentence about a row that find_rows() has found. originals: {text: id} of the rows that duplicates may copy."""
    origin = "".join(f", {row[name]}" for name in ("url", "license", "language") if row[name])
    if not row["reason"]:
        part = " (its last part)" if is_last_part(row) else ""
        return (f"{row['id']}{part} is in {folder}, by {how}: {counted(row['tokens'], 'token')} of source "
                f"{row['source']}, {row['split']}, from token {row['offset']:,} of {row['shard']}{origin}")
    of = ""
    if row["reason"] == "duplicate":
        of = f" of {originals.get(row['text'], 'a planted passage')}"
    elif row["reason"] == "near-duplicate":
        of = " of a document that --find=FILE with this text names"
    return f"{row['id']} came in and was removed: {row['reason']}{of}{origin} {row['withdrawn'] or ''}"


def no_answer(query, folder, report):
    """A sentence for a query without a match, with the limits of the search."""
    if query.is_file:
        return f"the text of {query.asked} is not in {folder}, nor a text like it"
    part = ", nor a part of one"
    if query.is_short:
        part = f". Inside of texts it was not searched: it has fewer than {SHORTEST} bytes"
    elif is_email(query.asked) and report["pii"]["scrubbed"]:
        part += ". prepare.py has replaced e-mail addresses in all texts but code"
    return f"{query.asked[:60]!r} is no id, URL, host or text of a document in {folder}{part}"


# ----------------------------------------------------------------------------------------------------------------------
# when: the inverse of data.py


class TrainingRun:
    """
    A run of train.py in a folder, and the data that it has read.

    ValueError: train.py did not write the folder, or its data have changed since.
    """

    def __init__(self, folder):
        self.folder = folder
        self.config = settings_of(folder) if os.path.isfile(f"{folder}/log.jsonl") else {}
        if not {"data_hash", "block_size", "batch_ramp_at"} <= self.config.keys():
            raise ValueError(f"{folder} is not a run of train.py: name its folder, with config.json and log.jsonl")
        self.plan = Plan(self.config["batch_size"], self.config["batch_ramp_at"], self.config["block_size"])
        self.steps = 1 + max((entry["step"] for entry in entries(folder) if "lr" in entry), default=-1)
        self.samples = self.plan.samples_before(self.steps)
        self.data = data_of_run(self.config, self.samples)
        first = first_folder(self.config["data"])
        shards = {os.path.realpath(os.path.join(first, shard["file"])) for shard in shards_of(self.data.meta)}
        # A withdrawn document no longer has a shard, only a folder.
        self.places = {*shards, *map(os.path.dirname, shards)}

    def steps_with(self, row, folder):
        """
        A sentence with the steps that have read a document: its row, kept or withdrawn, in the ledger of a data folder.
        ValueError: the run has read another folder.
        """
        if row["split"] == "val":
            return f"for validation: {self.folder} was not trained on it"
        path = os.path.realpath(f"{folder}/{row['shard'] or ''}")
        if path not in self.places:
            raise ValueError(f"{self.folder} has read {self.config['data']}, not {folder}: ask that folder")
        samples = []
        # The run has read the data as they are now, so it has not read a withdrawn document.
        if not row["withdrawn"]:
            samples = samples_of(self.data, path, row["offset"], row["tokens"], self.samples).tolist()
        steps = sorted({self.plan.steps_in(sample) for sample in samples})
        if not steps:
            return f"none of the {self.steps:,} steps of {self.folder} has read it"
        start = self.config.get("init_from")
        begins = f"; it started from {start}, which is another run" if start else ""
        return (f"read at {len(steps):,} of the {self.steps:,} steps of {self.folder}: "
                f"{listed(steps, self.plan)}{begins}")


def listed(steps, plan):
    """The first 10 steps of a list, with the tokens that the run had read before and after each, as text."""
    spans = (f"{step} (tokens {plan.tokens_after(step - 1):,} to {plan.tokens_after(step):,})" for step in steps[:10])
    return ", ".join(spans) + (f" and {len(steps) - 10:,} more" if len(steps) > 10 else "")


def samples_of(data, path, offset, n, until):
    """
    The samples below `until` of a TokenDataset or StagedDataset that hold one of the tokens offset .. offset + n - 1 of
    the shard at `path`; tokens beyond its end are those of the next shard. int64, sorted.

    A window has T + 1 tokens, so the token at the border of two windows is in both.
    """
    if isinstance(data, StagedDataset):
        stages = zip(data.begins, data.ends, data.parts)
        parts = [begin + samples_of(part, path, offset, n, min(until, end) - begin) for begin, end, part in stages]
        return np.concatenate(parts)
    path, parts = os.path.realpath(path), [np.zeros(0, np.int64)]
    places = [(s, begin + offset) for s, stream in enumerate(data.streams)
              for (file, _), begin in zip(stream.files, stream.begins) if os.path.realpath(file) == path]
    for at in range(0, until, CHUNK):
        samples = np.arange(at, min(at + CHUNK, until))
        stream, window = data.locate(samples)
        for s, begin in places:
            # Window w has the tokens w * T to w * T + T.
            ahead = begin - window * data.T
            parts.append(samples[(stream == s) & (ahead <= data.T) & (ahead + n > 0)])
    return np.unique(np.concatenate(parts))


def data_of_run(config, samples):
    """
    The data set of a run of train.py with these settings (its config.json), which has read this number of samples.

    ValueError: its folders no longer hold the data that the run has read.
    """
    if config["stage"]:
        stage = config["stage"].removeprefix("all")
        data = StagedDataset(config["data"], config["stages"], config["block_size"], stage=stage)
    else:
        data = TokenDataset(config["data"], "train", config["block_size"], config["seed"])
    if started_stages(data.data_hash, samples) != started_stages(config["data_hash"], samples):
        raise ValueError(f"{config['data']} has changed since the run began, by a removal or a new build, so that its "
                         f"steps can no longer be counted: it is version {data.data_hash:.16}, the run has read "
                         f"{config['data_hash']:.16}")
    return data


def print_check(folder):
    """Recompute all hashes and sums of a data folder, and print the sums. ValueError: it is not as it was written."""
    sizes = verify(folder)[1]["total"]
    print(f"{folder}: {counted(sizes['documents_in'], 'document')} in = {sizes['documents']:,} kept + "
          f"{sizes['documents_in'] - sizes['documents']:,} removed; {counted(sizes['tokens'], 'token')}; "
          "all hashes as written")


def main():
    if when and not find:
        raise ValueError(f"when={when}: say which document: --find=ID, URL, text or file")
    query = read_query(find) if find else None
    matches = 0
    for folder in paths or ["data/stdlib"]:
        with in_one_line(folder, OSError, ValueError):
            if query:
                matches += print_matches(query, folder, similarity, when)
            else:
                print_check(folder)
    if find and not matches and looks_like_a_file(find):
        raise ValueError(f"--find={find}: no such file, and no document has this id, host or text")


if __name__ == "__main__":
    run(main, globals())
