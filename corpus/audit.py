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
# find


def find_rows(folder, meta):
    """
    [(how it matches, row)] of all documents of a folder whose id, URL, host or text is `find`, and for removed ones of
    the kept ones that have their text. If no id, URL or host matches, the shards are searched (search_shards).
    """
    is_file = os.path.isfile(find)
    text = read_text(find).removeprefix("\ufeff") if is_file else find
    if not text.strip():
        raise ValueError(f"find={find!r} is empty: want an id, a URL, a host, a text, or a text file")
    # A file is found by its text alone.
    wanted, matches = set() if is_file else set().union(*names_in(find)), []
    wanted.add(("text", fingerprint(text)))
    for row in ledger_rows(folder):
        same = names_of(row) & wanted
        if same:
            matches.append((f"this {first_kind(same).replace('url', 'URL')}", row))
    searches = all(match == "this text" for match, _ in matches)
    matches += copies_of([row for _, row in matches], folder)
    if not searches or is_short(text):
        return matches
    equal = {row["id"] for _, row in matches}
    similar = search_shards(folder, meta, text)
    return matches + [(match, row) for match, row in similar if row["id"] not in equal]


def is_short(text):
    """Whether a text has too few bytes to be searched inside of documents."""
    return len(text.encode("utf-8", "replace")) < SHORTEST


def copies_of(rows, folder):
    """
    [(how it matches, row)] of the documents, not among these rows, that have the text of a removed one among them: they
    are kept, or were until --remove.
    """
    known = {row["id"] for row in rows}
    removed = {row["text"]: row["id"] for row in rows if row["reason"]}
    return [(f"the text of {removed[row['text']]}", row) for row in (ledger_rows(folder) if removed else ())
            if row["text"] in removed and was_kept(row) and row["id"] not in known]


def search_shards(folder, meta, text):
    """
    Yield (how it matches, row) of kept documents with a similar MinHash signature (+- 0.04 at 0.8), or that hold the
    text, but for white space. Reads all tokens, at a few MB/s.
    """
    ids, ends = words([text[:LONG]])
    signature = signatures(ids, ends) if len(ids) >= 5 else None
    passages = {normalized(text)}
    # Personal data in the shards is replaced, but not in code.
    if len(ids) >= PASSAGE:
        passages.add(normalized(scrub_pii(text)[0]))
    tok, shards = load_for(folder), shards_of(meta)
    stream = Stream(folder, shards, 1)
    begins = {shard["file"]: begin for shard, begin in zip(shards, stream.begins)}
    with tqdm(desc="texts", total=stream.n_tokens, unit="tok", unit_scale=True, disable=None,
              leave=False) as progress:
        whole = ""
        for row in ledger_rows(folder):
            if row["reason"]:
                continue
            ids = stream.read(begins[row["shard"]] + row["offset"], np.empty(row["tokens"], np.int64))
            # A passage may begin before the cut of a document and end behind it.
            whole = whole * is_last_part(row) + tok.decode(ids[1:-1].tolist())
            document = whole
            # A text of fewer words is one shingle, which is no document's.
            agreement = 0 if signature is None else (signatures(*words([document[:LONG]])) == signature).mean()
            progress.update(row["tokens"])
            if agreement >= similarity:
                yield f"nearly this text, similarity {agreement:.2f}", row
                continue
            document = normalized(document)
            if any(passage in document for passage in passages):
                yield "this passage", row


def print_matches(folder):
    """
    Print whether `find` is in a data folder, and with `when` at which steps a run read it. Returns how many documents
    match.
    """
    meta, report = described(folder)
    matches = find_rows(folder, meta)
    steps = steps_of([row for _, row in matches if was_kept(row)], folder)
    originals = {row["text"]: row["id"] for _, row in matches if was_kept(row)}
    reasons = [row["reason"] for match, row in matches if match == "this host" and came_in(row)]
    if reasons:
        print(f"{find} is the host of {counted(len(reasons), 'document')} that came in; kept: {reasons.count(''):,}")
    for match, row in matches:
        print(answer(match, row, originals, folder))
        if when and was_kept(row):
            print(f"    {next(steps)}")
    if not matches:
        print(no_answer(folder, report))
    return len(matches)


def answer(match, row, originals, folder):
    """A sentence about a row that find_rows() has found. originals: {text: id} of the rows that duplicates may copy."""
    origin = "".join(f", {row[name]}" for name in ("url", "license", "language") if row[name])
    if row["reason"]:
        of = {"duplicate": f" of {originals.get(row['text'], 'a planted passage')}",
              "near-duplicate": " of a document that --find=FILE with this text names"}.get(row["reason"], "")
        return f"{row['id']} came in and was removed: {row['reason']}{of}{origin} {row['withdrawn'] or ''}"
    part, tokens = " (its last part)" * is_last_part(row), counted(row["tokens"], "token")
    return (f"{row['id']}{part} is in {folder}, by {match}: {tokens} of source {row['source']}, "
            f"{row['split']}, from token {row['offset']:,} of {row['shard']}{origin}")


def no_answer(folder, report):
    """A sentence for `find` without a match. It says what the search could not see."""
    if os.path.isfile(find):
        return f"the text of {find} is not in {folder}, nor a text like it"
    part = ", nor a part of one"
    if is_short(find):
        part = f". Inside of texts it was not searched: it has fewer than {SHORTEST} bytes"
    elif is_email(find) and report["pii"]["scrubbed"]:
        part += ". prepare.py has replaced e-mail addresses in all texts but code"
    return f"{find[:60]!r} is no id, URL, host or text of a document in {folder}{part}"


def looks_like_a_file(name):
    """Whether a name that is no file is more likely a mistyped one than an id, a URL, an e-mail address or a text."""
    n = len(name.split())
    if os.path.exists(name) or ":" in name or "@" in name or n >= PASSAGE:
        return False
    return bool(kind_of(name)) or n == 1 and bool(re.search(r"/|\.[A-Za-z]\w{1,4}$", name))


# ----------------------------------------------------------------------------------------------------------------------
# when: the inverse of data.py


def steps_of(rows, folder):
    """
    For each row of the ledger, kept or withdrawn, yield a sentence with the steps at which the run `when` has read that
    document.

    ValueError: not a run of train.py, or its data have changed since.
    """
    from schedule import Plan

    config = settings_of(when) if os.path.isfile(f"{when}/log.jsonl") else {}
    if not {"data_hash", "block_size", "batch_ramp_at"} <= config.keys():
        raise ValueError(f"{when} is not a run of train.py: name its folder, with config.json and log.jsonl")
    plan = Plan(config["batch_size"], config["batch_ramp_at"], config["block_size"])
    done = 1 + max((entry["step"] for entry in entries(when) if "lr" in entry), default=-1)
    until = plan.samples_before(done)
    data = data_of_run(config, until)
    first = first_folder(config["data"])
    shards = {os.path.realpath(os.path.join(first, shard["file"])) for shard in shards_of(data.meta)}
    # A withdrawn document has no shard any more, only a folder.
    places = {*shards, *map(os.path.dirname, shards)}
    begins = f"; it started from {config['init_from']}, which is another run" if config.get("init_from") else ""
    for row in rows:
        path = os.path.realpath(f"{folder}/{row['shard'] or ''}")
        if row["split"] == "val":
            yield f"for validation: {when} was not trained on it"
            continue
        if path not in places:
            raise ValueError(f"{when} has read {config['data']}, not {folder}: ask that folder")
        # The run has read the data as they are now, so it has not read a withdrawn document.
        samples = [] if row["withdrawn"] else samples_of(data, path, row["offset"], row["tokens"], until).tolist()
        steps = sorted({plan.steps_in(sample) for sample in samples})
        yield (f"read at {len(steps):,} of the {done:,} steps of {when}: {listed(steps, plan)}{begins}" if steps else
               f"none of the {done:,} steps of {when} has read it")


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
                         f"steps cannot be counted any more: it is version {data.data_hash:.16}, the run has read "
                         f"{config['data_hash']:.16}")
    return data


def main():
    if when and not find:
        raise ValueError(f"when={when}: say which document: --find=ID, URL, text or file")
    matches = 0
    for folder in paths or ["data/stdlib"]:
        with in_one_line(folder, OSError, ValueError):
            if find:
                matches += print_matches(folder)
                continue
            sizes = verify(folder)[1]["total"]
        print(f"{folder}: {counted(sizes['documents_in'], 'document')} in = {sizes['documents']:,} kept + "
              f"{sizes['documents_in'] - sizes['documents']:,} removed; {counted(sizes['tokens'], 'token')}; "
              "all hashes as written")
    if find and not matches and looks_like_a_file(find):
        raise ValueError(f"--find={find}: no such file, and no document has this id, host or text")


if __name__ == "__main__":
    run(main, globals())
