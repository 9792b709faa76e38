"""
Ask a data folder: do its files hold what its report says, is a document in it, and at which steps did a run read it?

$ python -m corpus.audit data/mine                                    # hashes, documents and tokens, from the files
$ python -m corpus.audit data/mine --find=https://example.org/page    # an id, a URL, a text, or a file with one
$ python -m corpus.audit data/mine --find=letter.txt --when=out/mine  # the steps at which a run read it

All answers come from documents.parquet (corpus/ledger.py) and the shards. --when needs no record of the run: the order
of training is a function of seed and step (data.py), whatever the number of ranks and however often it was resumed.
"""

import sys

if __name__ == "__main__" and not __package__:
    print("audit.py: start it from the project's root, python -m corpus.audit", file=sys.stderr)
    sys.exit(2)

import difflib
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from tqdm import tqdm

import tokenizer
from corpus.dedup import LONG, fingerprint, signatures, words
from corpus.ledger import FILE, counted, ledger, read_meta, sums, total
from corpus.robots import host_key
from corpus.shards import shards_of
from engine.files import read_json, sha256, version
from engine.plot import entry_of

paths = []                          # data folders; none: data/stdlib
find = ""                           # an id, a URL, a text, or a file that holds one: is it in there?
similarity = 0.72                   # from which another text counts as nearly the same (as near_dedup)
when = ""                           # with find: a run folder of train.py


# Tokens of a shard that are in memory at a time.
STRETCH = 1 << 22


# ----------------------------------------------------------------------------------------------------------------------
# verify


def verify(folder):
    """
    Count again from the files: the sha256 and the begins of documents in each shard against the ledger, the ledger
    against the report. ValueError, one line, at the first difference. Returns the total of report.json.
    """
    folder, meta = Path(folder), read_meta(folder)
    report = read_report(folder)
    if not version(meta) == meta["version"] == report["version"]:
        raise ValueError(f"{folder}: meta.json and report.json are of two versions of the data")
    begins, tokens = {}, 0
    for shard in tqdm(shards_of(meta), "shards", unit="shard", disable=None, leave=False):
        path = folder / shard["file"]
        if sha256(path) != shard["sha256"]:
            raise ValueError(f"{path} is not what prepare.py wrote: another sha256")
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        dtype, found = ids.dtype, []
        # Read, not mapped, so that one stretch at a time is in memory.
        for at in range(0, len(ids), STRETCH):
            part = np.fromfile(path, dtype, min(STRETCH, len(ids) - at), offset=ids.offset + at * dtype.itemsize)
            found.append(at + np.flatnonzero(part == meta["bos"]))
        begins[shard["file"]] = np.concatenate(found)
        tokens += len(ids)
    listed = 0
    for table in ledger(folder, ["reason", "shard", "offset", "tokens"]):
        kept = table["reason"].to_numpy() == ""
        names, offsets = (table[name].to_numpy()[kept] for name in ("shard", "offset"))
        tokens -= table["tokens"].to_numpy()[kept].sum()
        listed += kept.sum()
        for name in set(names):
            if not np.isin(offsets[names == name], begins[name]).all():
                raise ValueError(f"{folder}: a document of {name} does not begin where documents.parquet says")
    if tokens or listed != sum(map(len, begins.values())):
        raise ValueError(f"{folder}: the shards hold other documents than documents.parquet: {tokens:+,} tokens")
    found = total([dict(row, about=0) for row in sums(folder)])
    said = report["total"]
    for name in found.keys() - {"tokens_removed_about"}:
        if found[name] != said[name]:
            raise ValueError(f"{folder}: documents.parquet and report.json differ in {name}")
    return said


def read_report(folder):
    """report.json of a data folder. ValueError for an older or damaged one."""
    path = Path(folder, "report.json")
    next(ledger(folder, ["id"]), None)
    if not path.is_file():
        raise ValueError(f"{folder} has no report.json: name a folder that prepare.py wrote")
    report = read_json(path)
    if not {"version", "outputs", "total", "inputs"} <= report.keys():
        raise ValueError(f"{path} is damaged: prepare the data again")
    if sha256(Path(folder, FILE)) != report["outputs"]["ledger"]:
        raise ValueError(f"{folder}/{FILE} is not what prepare.py wrote: another sha256")
    return report


# ----------------------------------------------------------------------------------------------------------------------
# find


class Tokens:
    """The tokens of the documents of a folder, from its shards."""

    def __init__(self, folder):
        self.folder = folder
        self.shard = lru_cache(100)(self.open)
        self.next = {}
        for source in read_meta(folder)["sources"].values():
            for split in source.values():
                files = [shard["file"] for shard in split["shards"]]
                self.next.update(zip(files, files[1:]))

    def open(self, file):
        path = os.path.join(self.folder, file)
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as e:
            raise ValueError(f"{path} is damaged or missing ({e}): prepare the data again") from None

    def pieces(self, row):
        """Yield (shard, begin, end): where the tokens of a row of the ledger are."""
        file, begin, left = row["shard"], row["offset"], row["tokens"]
        while left:
            end = min(begin + left, len(self.shard(file)))
            yield file, begin, end
            left -= end - begin
            file, begin = self.next.get(file), 0

    def of(self, row):
        return np.concatenate([self.shard(file)[begin:end] for file, begin, end in self.pieces(row)])


def find_rows(folder, wanted, similarity):
    """
    [(how, row)] of all documents of a folder with this id, URL or text. wanted may be the path of a text. If no id and
    no URL is called so, texts of at least five words are compared by MinHash too (+- 0.04 at 0.8).
    """
    text = wanted
    if not wanted.strip() or os.path.isfile(wanted) and not Path(wanted).read_bytes().strip():
        raise ValueError(f"find={wanted!r} is empty: want an id, a URL, a text, or a file with one")
    if os.path.isfile(wanted):
        text = Path(wanted).read_bytes().decode("utf-8-sig", "replace")
    key, found = fingerprint(text), []
    for table in ledger(folder):
        for row in table.to_pylist():
            for how, value in (("this id", row["id"] == wanted), ("this URL", row["url"] == wanted),
                               ("this text", row["text"] == key)):
                if value:
                    found.append((how, row))
                    break
    ids, ends = words([text[:LONG]])
    if any(how != "this text" for how, _ in found) or "://" in text[:10] or len(ids) < 5:
        return found
    own, known = signatures(ids, ends)[0], [row["id"] for _, row in found]
    return found + [one for one in nearly(folder, own, similarity) if one[1]["id"] not in known]


def nearly(folder, own, similarity):
    """Yield (how, row) of the kept documents with a signature like this one. All tokens are read, at some MB/s."""
    tok, tokens = tokenizer.load_for(folder), Tokens(folder)
    size = sum(shard["tokens"] for shard in shards_of(read_meta(folder)))
    with tqdm(desc="near-duplicates", total=size, unit="tok", unit_scale=True, disable=None, leave=False) as progress:
        for table in ledger(folder):
            for row in table.to_pylist():
                if row["reason"]:
                    continue
                text = tok.decode(tokens.of(row)[1:-1].tolist())
                like = (signatures(*words([text[:LONG]]))[0] == own).mean()
                progress.update(row["tokens"])
                if like >= similarity:
                    yield f"nearly this text, similarity {like:.2f}", row


def near_names(folder, wanted):
    """The ids, URLs or hosts that are spelled most like one that is not there, as the end of a sentence."""
    best = []
    for table in ledger(folder, ["id", "url", "reason"]):
        table = table.filter(pc.equal(table["reason"], ""))
        names = {*table["id"].to_pylist(), *filter(None, table["url"].to_pylist())}
        names |= {host_key(name) or name for name in names if "://" in name}
        best = difflib.get_close_matches(wanted, [*best, *sorted(names)], 3, 0.5)
    return f"the nearest names are {', '.join(map(repr, best))}" if best else "no name is like it"


def ask(folder):
    """Print whether `find` is in a data folder, and with `when` at which steps a run read it."""
    read_report(folder)
    read_by = reader(folder, when) if when else None
    found = find_rows(folder, find, similarity)
    for how, row in found:
        about = "".join(f", {row[name]}" for name in ("url", "license", "language") if row[name])
        if row["reason"]:
            print(f"{row['id']} came in and was removed: {row['reason']}{about} {row['withdrawn'] or ''}")
            continue
        print(f"{row['id']} is in {folder}, by {how}: {counted(row['tokens'], 'token')} of source {row['source']}, "
              f"{row['split']}, from token {row['offset']:,} of {row['shard']}{about}")
        if read_by:
            print(f"    {read_by(row)}")
    if not found:
        print(f"{find[:60]!r} is not in {folder}: {near_names(folder, find)}")


def reader(folder, run):
    """
    A function: row of the ledger -> a sentence with the steps at which a run read that document.

    ValueError: not a run of train.py, or its data have changed since.
    """
    from corpus.when import data_of_run, samples_of
    from schedule import samples_at, steps_in

    config = read_json(f"{run}/config.json") if os.path.isfile(f"{run}/config.json") else {}
    if not {"data_hash", "block_size", "batch_size"} <= config.keys() or not os.path.isfile(f"{run}/log.jsonl"):
        raise ValueError(f"{run} is not a run of train.py: name its folder, with config.json and log.jsonl")
    batch = config["batch_size"], config["batch_ramp_at"] or None
    with open(f"{run}/log.jsonl", encoding="utf-8", errors="replace") as lines:
        done = 1 + max((entry["step"] for entry in filter(None, map(entry_of, lines)) if "lr" in entry), default=-1)
    until = samples_at(done, *batch)
    data = data_of_run(config, until)
    theirs = [os.path.join(config["data"], shard["file"]) for shard in shards_of(read_meta(config["data"]))]
    theirs = set(map(os.path.realpath, theirs))

    def said(row):
        if row["split"] != "train":
            return f"for validation: no step of {run} was trained on it"
        path = os.path.join(folder, row["shard"])
        if os.path.realpath(path) not in theirs:
            raise ValueError(f"{run} has read {config['data']}, not {folder}: ask that folder")
        samples = samples_of(data, path, row["offset"], row["tokens"], until)
        steps = sorted({steps_in(int(sample), *batch) for sample in samples})
        # Tokens of the run before the step and after it.
        spans = [[samples_at(step + more, *batch) * config["block_size"] for more in (0, 1)] for step in steps]
        rows = [f"{step} (tokens {begin:,} to {end:,})" for step, (begin, end) in zip(steps, spans)]
        if not rows:
            return f"none of the {done:,} steps of {run} has read it"
        more = f" and {len(rows) - 10:,} more" if len(rows) > 10 else ""
        begins = f"; it started from {config['init_from']}, which is another run" if config.get("init_from") else ""
        return f"read at {len(rows):,} of the {done:,} steps of {run}: {', '.join(rows[:10])}{more}{begins}"
    return said


def main():
    if when and not find:
        raise ValueError(f"when={when}: say which document: --find=ID, URL, text or file")
    for folder in paths or ["data/stdlib"]:
        if find:
            ask(folder)
            continue
        t = verify(folder)
        print(f"{folder}: {counted(t['documents_in'], 'document')} in = {t['documents']:,} kept + "
              f"{t['documents_in'] - t['documents']:,} removed; {counted(t['tokens'], 'token')}; all hashes as written")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
