"""
The stages of corpus/cluster.py as steps of datatrove: each task writes files of its own, and writes them again if it is
done again. Between the stages the documents are in OUT/work, at first as prepare.py spools them, then as lines of JSON.

    judge      judged/RANK/, keys/, removed/, audit/                Judge
    deal       parts/PART/RANK.jsonl.gz                             Judged, MinhashDedupFilter, Deal
    tokens     shards in OUT, kept/PART.parquet, audit/             Tokens
    account    meta.json, kept.parquet, the report                  Account
"""

import gzip
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig

import prepare
from corpus import audit as reports
from corpus import kept
from corpus.shards import abouts, ids_of, safe, texts, write_shard
from corpus.sift import KINDS, sift, sifted
from engine.files import read_json, sha256, write_flushed
from engine.readers import batches, check, id_hash


class Folder:
    """The data folder that is made, and in it work/, which all tasks see."""

    def __init__(self, out):
        super().__init__()
        self.out = Path(out)
        self.work = self.out / "work"

    def plan(self):
        """What begin() wrote; prepare.py's settings are as asked."""
        plan = SimpleNamespace(**read_json(self.work / "cluster.json"))
        vars(prepare).update({**plan.asked, "repetitions": tuple(plan.asked["repetitions"])})
        return plan

    def folder(self, name):
        path = self.work / name
        path.mkdir(parents=True, exist_ok=True)
        return path


class Step(Folder, PipelineStep):
    """A stage of ours. A task that is done again writes the same files again."""

    type = "Apertus"
    name = "prepare"


class Judge(Step):
    """Stage 1: the files of a task -> its spool, as sift() writes it, keys, what was removed, a part of the audit."""

    def run(self, data=None, rank=0, world_size=1):
        plan = self.plan()
        text_field, encoding = plan.asked["text_field"], plan.asked["encoding"]
        files = [check(name, path, text_field, encoding) for name, path in share_of(plan, rank, world_size)]
        spool = self.folder(f"judged/{rank:05d}")
        rules = prepare.read_rules(files, spool)
        audit = reports.Audit()
        removed = prepare.Removed(self.folder("removed") / f"{rank:05d}.gz", audit)
        removed.add_files(rules)
        bands = rules.near.bands if rules.near else 0
        keys = [np.zeros((0, 1 + bands), np.uint64)]
        for number, pieces, _ in batches(files):
            # A batch that is there already is not done again.
            sift(rules, number, pieces)
            documents, info = sifted(spool, number)
            keys.append(np.column_stack([documents["text_hash"], documents["bands"]]))
            audit.hear(vars(info))
            removed.add_batch(info)
        removed.close()
        write_keys(self.folder("keys"), rank, np.concatenate(keys))
        write_part(self.folder("audit") / f"judge-{rank:05d}.json", audit, files=files)


def share_of(plan, rank, world_size):
    """The files of a task: neighbours, so that the order of the tasks is that of the input, of about equal bytes."""
    # An empty file is somebody's too.
    sizes = np.maximum(plan.sizes, 1)
    ends = np.cumsum(sizes)
    middles = ends - sizes / 2
    mine = middles * world_size // ends[-1] == rank
    return [file for file, one in zip(plan.files, mine) if one]


def keys_of(bands):
    """A document's keys for datatrove: that of its text, then those of near-duplicates, 64 bits each as two halves."""
    return MinhashConfig(num_buckets=1 + bands, hashes_per_bucket=2, hash_config=HashConfig(precision=32))


def write_keys(folder, rank, keys):
    """keys: uint64 (documents, 1 + bands) -> a file for each column, as datatrove's second stage reads it."""
    for number, column in enumerate(keys.T):
        rows = np.zeros(len(column), [("high", "<u4"), ("low", "<u4"), ("document", "<u4")])
        rows["high"] = column >> np.uint64(32)
        rows["low"] = column
        rows["document"] = np.arange(len(column))
        # It merges the files of all tasks, each of which must be in order.
        rows.sort(order=rows.dtype.names)
        path = folder / f"bucket_{number:03d}" / f"{rank:05d}.minhash.sig"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rows.tobytes())


class Judged(Step):
    """Reads the spool of a task, in the order of the input, so that a document has the number that its keys have."""

    def run(self, data=None, rank=0, world_size=1):
        spool = self.work / "judged" / f"{rank:05d}"
        for number in range(len(list(spool.glob("*.npz")))):
            documents, info = sifted(spool, number)
            for document, text, about in zip(documents, texts(documents, spool), abouts(documents, spool)):
                source, language, license = info.groups[document["group"]]
                about.update(source=source, language=language, license=license, text_hash=int(document["text_hash"]))
                yield Document(text, about["id"], metadata=about)


class Duplicates(Folder):
    """What datatrove's fourth stage leaves out: lines of removed/, and a part of the audit."""

    def __enter__(self):
        self.plan()
        self.audit = reports.Audit()
        self.removed = None
        # Where near-duplicates are looked for, a document is in a cluster for either reason.
        self.reason = "near-duplicate" if prepare.near_dedup else "duplicate"
        return self

    def write(self, doc, rank):
        if not self.removed:
            self.rank = rank
            self.removed = prepare.Removed(self.folder("removed") / f"again-{rank:05d}.gz", self.audit)
        row = doc.metadata
        key = row["source"], row["language"], row["license"]
        self.removed.add(key, row["id"], row["url"], self.reason, row["bytes"])

    def __exit__(self, *_):
        if self.removed:
            self.removed.close()
            write_part(self.folder("audit") / f"again-{self.rank:05d}.json", self.audit)


class Deal(Step):
    """Stage 4: what stays goes to the part of its id's hash, with its place in the input; what does not is told."""

    def run(self, data=None, rank=0, world_size=1):
        n = self.plan().asked["parts"]
        files = []
        for part in range(n):
            folder = self.folder(f"parts/{part:05d}")
            files.append(gzip.open(folder / f"{rank:05d}.jsonl.gz", "wt", 1))
        for doc in data:
            number = id_hash(doc.id)
            row = dict(doc.metadata, id_hash=number, text=doc.text)
            files[number * n >> 64].write(json.dumps(row) + "\n")
        for file in files:
            file.close()


class Tokens(Step):
    """Stage 5: a part of the documents, in the order of their ids' hashes -> shards, rows of kept.parquet, counts."""

    def run(self, data=None, rank=0, world_size=1):
        import pyarrow
        import pyarrow.parquet
        plan = self.plan()
        copy = self.folder(f"tokenizer/{rank:05d}")
        tok, _ = prepare.vocabulary((), copy, copy)
        rows = []
        for path in sorted((self.work / "parts" / f"{rank:05d}").iterdir()):
            with gzip.open(path, "rt") as lines:
                rows += map(json.loads, lines)
        # Stable: of equal ids the first in the input comes first.
        rows.sort(key=lambda row: row["id_hash"])
        audit = reports.Audit()
        for row in rows:
            row["split"] = "val" if prepare.validates(row) else "train"
            text = row.pop("text")
            row["ids"] = np.concatenate(ids_of(tok, text), axis=None)
            row["tokens"] = len(row["ids"])
            row["bytes_written"] = len(text.encode())
            count(audit, row)
        shards = {}
        for source, split in sorted({(row["source"], row["split"]) for row in rows}):
            mine = [row for row in rows if (row["source"], row["split"]) == (source, split)]
            shards[f"{source}\n{split}"] = cut(self.out, source, split, rank, mine, plan.asked["shard_tokens"])
        schema = kept.schema()
        listed = [{name: row[name] for name in schema.names} for row in rows]
        table = pyarrow.Table.from_pylist(listed, schema)
        pyarrow.parquet.write_table(table, self.folder("kept") / f"{rank:05d}.parquet", compression="zstd")
        write_part(self.folder("audit") / f"tokens-{rank:05d}.json", audit, shards=shards)


def count(audit, row):
    """Tell an Audit of a document that stays."""
    key = row["source"], row["language"], row["license"]
    audit.keep(key, 1, row["bytes"], row["bytes_written"], {kind: row[kind] for kind in KINDS})
    reports.add(audit.group(key), dict(tokens=row["tokens"]))


def cut(folder, source, split, rank, rows, most):
    """
    Write the tokens of documents, in order, as shards of at most so many; each row learns its place. Returns what
    meta.json says of them.
    """
    stream = np.concatenate([row.pop("ids") for row in rows])
    shards = []
    for number, begin in enumerate(range(0, len(stream), most)):
        file = f"{safe(source)}_{split}_{rank:05d}_{number:03d}.npy"
        shards.append(dict(file=file, **write_shard(folder / file, stream[begin:begin + most])))
    at = 0
    for row in rows:
        number, row["offset"] = divmod(at, most)
        row["shard"] = shards[number]["file"]
        at += row["tokens"]
    sizes = dict(documents=len(rows), tokens=len(stream), bytes=sum(row["bytes_written"] for row in rows))
    return dict(sizes, shards=shards)


class Account(Step):
    """Stage 6: meta.json, kept.parquet, removed.jsonl.gz and the audit, of what all tasks have written."""

    def run(self, data=None, rank=0, world_size=1):
        plan = self.plan()
        prepare.out = str(self.out)
        audit, files, streams = self.gathered()
        if not streams:
            raise ValueError(prepare.nothing_left(audit))
        with open(self.out / "removed.jsonl.gz", "wb") as f:
            for path in sorted((self.work / "removed").iterdir()):
                f.write(path.read_bytes())
        tok, name = prepare.vocabulary((), self.work, self.out)
        meta = prepare.meta_of(tok, name, sources_of(audit, streams))
        account = reports.build(
            audit,
            dict(prepare.describe(name, tok, plan.began), seconds=time.time() - plan.began),
            files,
            plan.ignored,
            prepare.outputs(meta, tok, False, self.join_kept()),
            prepare.describe_robots(prepare.read_rules([], self.work)),
            dict(scrubbed=plan.asked["pii"], in_code=plan.asked["pii_in_code"]),
            None,
        )
        try:
            prepare.write_account(self.out, meta, account)
        except ValueError:
            # With it the folder would be data.
            (self.out / "meta.json").unlink(missing_ok=True)
            raise
        for name in ("judged", "keys", "pairs", "gone", "parts", "kept", "tokenizer"):
            shutil.rmtree(self.work / name, ignore_errors=True)

    def gathered(self):
        """(the audit of all tasks, what they say of their files, of their shards by source and split)"""
        audit, files, streams = reports.Audit(), [], {}
        for path in sorted((self.work / "audit").iterdir()):
            part = read_json(path)
            files += part.get("files", [])
            take_in(audit, part)
            for name, said in part.get("shards", {}).items():
                stream = streams.setdefault(name, dict(documents=0, tokens=0, bytes=0, shards=[]))
                for key, value in said.items():
                    stream[key] += value
        return audit, files, streams

    def join_kept(self):
        """The parts of kept.parquet as one. Returns what report.json says of it."""
        import pyarrow.parquet
        n, path = 0, self.out / kept.FILE
        with pyarrow.parquet.ParquetWriter(path, kept.schema(), compression="zstd") as writer:
            for part in sorted((self.work / "kept").iterdir()):
                table = pyarrow.parquet.read_table(part)
                writer.write_table(table, kept.ROWS)
                n += len(table)
        return dict(file=kept.FILE, sha256=sha256(path), documents=n)


def sources_of(audit, streams):
    """meta.json's "sources": of each all shards, in the order of the parts."""
    empty = dict(documents=0, tokens=0, bytes=0, shards=[])
    sources = {}
    # In the order of prepare.py, and also those of which nothing stayed.
    for name in sorted({source for source, _, _ in audit.groups}):
        sources[name] = {split: streams.get(f"{name}\n{split}", empty) for split in ("train", "val")}
    return sources


# ----------------------------------------------------------------------------------------------------------------------
# parts of the audit


def write_part(path, audit, **more):
    """An Audit as JSON."""
    groups = [[key, counts] for key, counts in audit.groups.items()]
    hosts = {host.hex(): known for host, known in audit.hosts.items()}
    write_flushed(path, json.dumps(dict(vars(audit), groups=groups, hosts=hosts, **more)))


def take_in(audit, part):
    """Add what write_part() wrote to an Audit."""
    for key, counts in part["groups"]:
        del counts["number"]
        reports.add(audit.group(key), counts)
    reports.add(audit.robots, part["robots"])
    audit.hosts.update({bytes.fromhex(host): known for host, known in part["hosts"].items()})
    audit.columns = audit.columns or part["columns"]
