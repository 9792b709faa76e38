"""
What comes later: the documents of two data folders in one, as if they had been prepared together.

    prepare.py new_texts/ --add --out=data/mine

reads the new files alone, against the texts that are known already, and then merges both folders by the order of the
documents, a hash of their ids. Shards, kept.parquet and meta.json are, byte for byte, those of one run over all files,
the old ones first. In the report counts are added up; a host that both have seen counts twice there.

Not so where a document depends on all others: near_dedup, score_field, max_bytes, probes, a vocabulary that is learnt
from the documents. These are refused. Memory: some 400 bytes a document, since its row of kept.parquet is held.
"""

import gzip
import json
import os
import shutil

import numpy as np

from corpus import audit, kept
from corpus.reservations import RESERVED
from corpus.shards import safe, shards_of, version, write_shard
from engine.files import read_json, sha256, write_flushed
from engine.readers import id_hash

# What a run over all files would judge anew, with the value that leaves it out.
ALONE = dict(near_dedup=0.0, score_field="", max_bytes=0.0, probes="")
# Settings that decide nothing about a document, or are looked at elsewhere.
FREE = {"workers", "strict", "dry_run", "add", "known", "remove", "out", "paths", "encoding", "tokenizer",
        "train_bpe", *ALONE}


def can_grow(out, now):
    """ValueError if the data folder `out` was made with other settings than `now`, or cannot be added to."""
    for _ in kept.tables(out, ["id"]):
        break
    report = read_json(os.path.join(out, "report.json"))
    if "parts" in report:
        raise ValueError(f"{out} was joined: add to one of its parts, and join them again")
    then = report["run"]["settings"]
    for name, value in ALONE.items():
        if value not in (then.get(name), None) or now[name] != value:
            raise ValueError(f"--add: {name} looks at all documents at once: prepare all files together")
    for name in sorted(now.keys() - FREE):
        # As JSON, in which the report has kept them.
        if json.dumps(then.get(name)) != json.dumps(now[name]):
            raise ValueError(f"--add: {out} was made with {name}={then.get(name)!r}, not {now[name]!r}: say the same")
    if not then["tokenizer"] and not now["tokenizer"]:
        raise ValueError(f"--add: the vocabulary of {out} was learnt from its documents, and all of them would make "
                         f"another: go on with it, --tokenizer={out}/tokenizer.json")
    if report["outputs"]["halved"]:
        raise ValueError(f"--add: the only document of {out} was cut in two: prepare all files together")


def merge(old, new, into, shard_tokens, side):
    """
    Write the folder `into` from the data folders `old` and `new`. side: row of kept.parquet -> is it for validation?

    ValueError: other vocabularies, or a document of `old` that would now train.
    """
    import pyarrow
    import pyarrow.parquet
    metas = [kept.read_meta(folder) for folder in (old, new)]
    if metas[0]["tokenizer_hash"] != metas[1]["tokenizer_hash"]:
        raise ValueError(f"--add: {old} was made by another tokenizer: name it, --tokenizer={metas[0]['tokenizer']}")
    tables = [pyarrow.concat_tables([table for _, table in kept.tables(folder)]) for folder in (old, new)]
    table = pyarrow.concat_tables(tables)
    hashes = np.array([id_hash(name) for name in table["id"].to_pylist()], np.uint64)
    order = np.argsort(hashes, kind="stable")
    rows = table.take(pyarrow.array(order)).to_pylist()
    for row, i in zip(rows, order.tolist()):
        row["folder"] = i >= len(tables[0])
    if any(side(row) != (row["split"] == "val") for row in rows):
        raise ValueError(f"--add: {old} had so few documents that one had to validate: prepare all files together")
    into.mkdir()
    meta = dict(metas[0], sources=shards_of_both(rows, (old, new), into, shard_tokens))
    audit.add(meta["about"], metas[1]["about"])
    meta["about"] = {name: {key: dict(sorted(counts.items())) for key, counts in said.items()}
                     for name, said in sorted(meta["about"].items())}
    del meta["version"]
    meta["version"] = version(meta)
    path = into / kept.FILE
    with pyarrow.parquet.ParquetWriter(path, kept.schema(), compression="zstd") as writer:
        for first in range(0, len(rows), kept.ROWS):
            writer.write_table(pyarrow.Table.from_pylist(rows[first:first + kept.ROWS], kept.schema()))
    account = sum_of(read_json(old / "report.json"), read_json(new / "report.json"))
    account["outputs"].update(version=meta["version"], shards=shards_of(meta),
                              kept=dict(file=kept.FILE, sha256=sha256(path), documents=len(rows)))
    with gzip.GzipFile(into / "removed.jsonl.gz", "wb", mtime=0) as f:
        for folder in (old, new):
            with gzip.open(folder / "removed.jsonl.gz") as lines:
                shutil.copyfileobj(lines, f)
    if (old / "tokenizer.json").is_file():
        shutil.copy(old / "tokenizer.json", into)
    for name, content in (("meta.json", meta), ("report.json", account)):
        write_flushed(into / name, json.dumps(content, indent=1, ensure_ascii=False))
    write_flushed(into / "report.md", audit.markdown(account))
    audit.picture(account, into / "flow.png")
    audit.verify(into)
    return meta, account


def shards_of_both(rows, folders, into, shard_tokens):
    """Write the shards of all rows, which get their new places. Returns meta.json's "sources"."""
    readers = [kept.Tokens(folder) for folder in folders]
    dtype = readers[0].shard(next(row["shard"] for row in rows if not row["folder"])).dtype
    names = sorted({row["source"] for row in rows})
    sources = {}
    for name in names:
        prefix = f"{safe(name)}_" if len(names) > 1 else ""
        sources[name] = {}
        for split in ("train", "val"):
            mine = [row for row in rows if (row["source"], row["split"]) == (name, split)]
            total = sum(row["tokens"] for row in mine)
            pieces = stream(mine, readers, shard_tokens)
            shards = []
            for begin in range(0, total, shard_tokens):
                file = f"{prefix}{split}_{len(shards):05d}.npy"
                n = min(shard_tokens, total - begin)
                shards.append(dict(file=file, **write_shard(into / file, pieces, n, dtype)))
            at = 0
            for row in mine:
                shard, row["offset"] = divmod(at, shard_tokens)
                row["shard"] = shards[shard]["file"]
                at += row["tokens"]
            size = sum(row["bytes_written"] for row in mine)
            sources[name][split] = dict(documents=len(mine), tokens=total, bytes=size, shards=shards)
    return sources


def stream(rows, readers, shard_tokens):
    """Yield the tokens of rows in order, as arrays of which none crosses a multiple of shard_tokens."""
    at = 0
    # The places of the old folders are used up before the rows get new ones.
    for row in [dict(row) for row in rows]:
        reader = readers[row["folder"]]
        for file, begin, end in reader.pieces(row):
            rest = reader.shard(file)[begin:end]
            while len(rest):
                room = shard_tokens - at % shard_tokens
                piece, rest = rest[:room], rest[room:]
                yield piece
                at += len(piece)


def sum_of(old, new):
    """report.json of two runs, of which the second added to the first."""
    table = {}
    for row in (*old["table"], *new["table"]):
        key = row["source"], row["language"]
        zero = dict(source=row["source"], language=row["language"], **audit.empty())
        audit.add(table.setdefault(key, zero), {name: row[name] for name in audit.empty()})
    account = dict(new, inputs=old["inputs"] + new["inputs"], table=[table[key] for key in sorted(table)])
    # All that the folders of both runs hold besides; of one folder twice, the files that it holds now.
    account["ignored"] = dict(old.get("ignored") or {}, **new["ignored"])
    account["total"] = audit.total(account["table"])
    for key in ("licenses", "pii"):
        both = json.loads(json.dumps(old[key]))
        audit.add(both, {name: value for name, value in new[key].items() if not isinstance(value, bool)})
        account[key] = both
    dates = [date for date in (*old["dates"], *new["dates"]) if date]
    account["dates"] = [min(dates), max(dates)] if dates else [None, None]
    if old["robots"]:
        for key in ("hosts", "outcomes", "removed_by_agent", "top_blocked_hosts"):
            audit.add(account["robots"][key], old["robots"][key])
        gone = sum(account["total"]["removed"].get(key, (0, 0))[1] for key in ("robots", "blocked-domain", *RESERVED))
        account["robots"]["share_of_bytes_removed"] = gone / account["total"]["bytes_in"]
    account["additions"] = [*old.get("additions", ()), dict(
        date=new["run"]["date"], documents=new["total"]["documents"], before=old["outputs"]["version"])]
    account["removals"] = old.get("removals", [])
    return account
