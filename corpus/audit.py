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

import os
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from tqdm import tqdm

from corpus.dedup import LONG, fingerprint, signatures, words
from corpus.ledger import counted, described, ledger, rows_of, sums, total
from corpus.shards import shards_of
from engine.files import read_json, sha256
from engine.plot import entries
from engine.runs import settings_of

paths = []                          # data folders; none: data/stdlib
find = ""                           # an id, a URL, a text, or a file that holds one: is it in there?
similarity = 0.72                   # from which another text counts as nearly the same (as near_dedup)
when = ""                           # with find: a run folder of train.py


# ----------------------------------------------------------------------------------------------------------------------
# verify


def verify(folder):
    """
    Count again from the files: the sha256 and the begins of documents in each shard against the ledger, the ledger
    against the report. ValueError, one line, at the first difference. Returns the total of report.json.
    """
    meta, report = described(folder)
    begins, tokens, listed = {}, 0, 0
    for shard in tqdm(shards_of(meta), "shards", unit="shard", disable=None, leave=False):
        path = os.path.join(folder, shard["file"])
        if sha256(path) != shard["sha256"]:
            raise ValueError(f"{path} is not what prepare.py wrote: another sha256")
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        begins[shard["file"]] = np.flatnonzero(ids == meta["bos"])
        tokens += len(ids)
    for table in ledger(folder, ["reason", "shard", "offset", "tokens"]):
        table = table.filter(pc.field("reason") == "")
        names, offsets = table["shard"].to_numpy(), table["offset"].to_numpy()
        tokens -= table["tokens"].to_numpy().sum()
        listed += len(table)
        for name in set(names):
            if not np.isin(offsets[names == name], begins[name]).all():
                raise ValueError(f"{folder}: a document of {name} does not begin where documents.parquet says")
    if tokens or listed != sum(map(len, begins.values())):
        raise ValueError(f"{folder}: the shards hold other documents than documents.parquet: {tokens:+,} tokens")
    for name, value in total(sums(folder)).items():
        if report["total"][name] != value:
            raise ValueError(f"{folder}: documents.parquet and report.json differ in {name}")
    return report["total"]


# ----------------------------------------------------------------------------------------------------------------------
# find


def find_rows(folder):
    """
    [(how, row)] of all documents of a folder with this id, URL or text. If no id and no URL is called so, texts of at
    least five words are compared by MinHash too (+- 0.04 at 0.8).
    """
    text = Path(find).read_bytes().decode("utf-8-sig", "replace") if os.path.isfile(find) else find
    if not text.strip():
        raise ValueError(f"find={find!r} is empty: want an id, a URL, a text, or a file with one")
    wanted, found = dict(id=find, url=find, text=fingerprint(text)), []
    for row in rows_of(folder):
        same = [key for key in wanted if row[key] == wanted[key]]
        if same:
            found.append((f"this {same[0].replace('url', 'URL')}", row))
    named = any(how != "this text" for how, _ in found)
    ids, ends = words([text[:LONG]])
    if not named and "://" not in text[:10] and len(ids) >= 5:
        known = {row["id"] for _, row in found}
        found += [one for one in nearly(folder, signatures(ids, ends)) if one[1]["id"] not in known]
    return found


def nearly(folder, signature):
    """Yield (how, row) of the kept documents with a signature like this one. All tokens are read, at some MB/s."""
    import tokenizer
    from data import Stream

    tok, begins, size = tokenizer.load_for(folder), {}, 0
    for source in read_json(f"{folder}/meta.json")["sources"].values():
        for part in source.values():
            stream = Stream(folder, part["shards"], 1)
            begins |= {shard["file"]: (stream, begin) for shard, begin in zip(part["shards"], stream.begins)}
            size += stream.n_tokens
    with tqdm(desc="near-duplicates", total=size, unit="tok", unit_scale=True, disable=None, leave=False) as progress:
        for row in rows_of(folder):
            if row["reason"]:
                continue
            stream, begin = begins[row["shard"]]
            ids = stream.read(begin + row["offset"], np.empty(row["tokens"], np.int64))
            text = tok.decode(ids[1:-1].tolist())
            like = (signatures(*words([text[:LONG]])) == signature).mean()
            progress.update(row["tokens"])
            if like >= similarity:
                yield f"nearly this text, similarity {like:.2f}", row


def ask(folder):
    """Print whether `find` is in a data folder, and with `when` at which steps a run read it."""
    described(folder)
    found = find_rows(folder)
    steps = list(steps_of([row for _, row in found if not row["reason"]], folder)) if when else []
    for how, row in found:
        about = "".join(f", {row[name]}" for name in ("url", "license", "language") if row[name])
        if row["reason"]:
            print(f"{row['id']} came in and was removed: {row['reason']}{about} {row['withdrawn'] or ''}")
            continue
        print(f"{row['id']} is in {folder}, by {how}: {counted(row['tokens'], 'token')} of source {row['source']}, "
              f"{row['split']}, from token {row['offset']:,} of {row['shard']}{about}")
        if when:
            print(f"    {steps.pop(0)}")
    if not found:
        print(f"{find[:60]!r} is no id, URL or text of a document in {folder}")


def steps_of(rows, folder):
    """
    Yield for each row of the ledger a sentence with the steps at which the run `when` has read that document.

    ValueError: not a run of train.py, or its data have changed since.
    """
    from corpus.when import data_of_run, samples_of
    from schedule import samples_at, steps_in

    config = settings_of(when) if os.path.isfile(f"{when}/log.jsonl") else {}
    if not {"data_hash", "block_size", "batch_size"} <= config.keys():
        raise ValueError(f"{when} is not a run of train.py: name its folder, with config.json and log.jsonl")
    T, batch = config["block_size"], (config["batch_size"], config["batch_ramp_at"] or None)
    done = 1 + max((entry["step"] for entry in entries(when) if "lr" in entry), default=-1)
    until = samples_at(done, *batch)
    data = data_of_run(config, until)
    theirs = {os.path.realpath(f"{config['data']}/{shard['file']}") for shard in shards_of(data.meta)}
    for row in rows:
        path = os.path.realpath(f"{folder}/{row['shard']}")
        if row["split"] != "train":
            yield f"for validation: no step of {when} was trained on it"
            continue
        if path not in theirs:
            raise ValueError(f"{when} has read {config['data']}, not {folder}: ask that folder")
        samples = samples_of(data, path, row["offset"], row["tokens"], until)
        steps = sorted({steps_in(int(sample), *batch) for sample in samples})
        said = ", ".join(f"{step} (tokens {samples_at(step, *batch) * T:,} to {samples_at(step + 1, *batch) * T:,})"
                         for step in steps[:10])
        more = f" and {len(steps) - 10:,} more" if len(steps) > 10 else ""
        begins = f"; it started from {config['init_from']}, which is another run" if config.get("init_from") else ""
        yield (f"read at {len(steps):,} of the {done:,} steps of {when}: {said}{more}{begins}" if steps else
               f"none of the {done:,} steps of {when} has read it")


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
