"""
The stages of corpus/cluster.py as steps of datatrove: each task writes files of its own, and writes them again if it is
done again. Between the stages the documents are lines of JSON in OUT/work.

    judge      judged/RANK.jsonl.gz, keys/, removed/, audit/        Judge
    deal       parts/PART/RANK.jsonl.gz                             Judged, MinhashDedupFilter, Deal
    tokens     shards in OUT, kept/PART.parquet, audit/             Tokens
    account    meta.json, kept.parquet, the report                  Account
"""

import gzip
import io
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
from corpus.dedup import fingerprint
from corpus.shards import dtype_of, long_parts, safe, version, write_shard
from corpus.sift import KINDS, by_columns, by_words, handfuls, write_scrubbed
from engine.files import read_json, sha256, write_flushed
from engine.readers import batches, check, documents, id_hash


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
    """Stage 1: the files of a task -> judged/{rank}.jsonl.gz, its keys, what was removed, and a part of the audit."""

    def run(self, data=None, rank=0, world_size=1):
        plan = self.plan()
        text_field, encoding = plan.asked["text_field"], plan.asked["encoding"]
        files = [check(name, path, text_field, encoding) for name, path in share_of(plan, rank, world_size)]
        rules = prepare.read_rules(files, self.work)
        audit = reports.Audit()
        removed = prepare.Removed(self.folder("removed") / f"{rank:05d}.gz", audit)
        for file in files:
            if file["problem"]:
                key = (rules.name, *rules.defaults.values())
                removed.add(key, file["name"], None, f"unreadable:{file['problem']}", 0)
        keys = []
        with gzip.open(self.folder("judged") / f"{rank:05d}.jsonl.gz", "wt", 1) as f:
            for _, pieces, _ in batches(files):
                info = SimpleNamespace(groups={}, removed=[], columns=[], hosts={}, dates=[])
                info.robots = dict(outcomes={}, blocked={}, agents={})
                for row in judged(rules, rules.documents(pieces), info):
                    keys.append((row["text_hash"], *row.pop("bands")))
                    f.write(json.dumps(row) + "\n")
                tell(info, audit, removed)
        removed.close()
        width = 1 + (rules.near.bands if rules.near else 0)
        write_keys(self.folder("keys"), rank, np.array(keys, np.uint64).reshape(len(keys), width))
        write_part(self.folder("audit") / f"judge-{rank:05d}.json", audit, files=files)


def tell(info, audit, removed):
    """Tell the audit, and the list of what was removed, what a batch heard."""
    info.dates = [min(info.dates, default=None), max(info.dates, default=None)]
    audit.hear(vars(info))
    groups = list(info.groups)
    for _, group, *what in sorted(info.removed, key=lambda one: one[0]):
        removed.add(groups[group], *what)


def share_of(plan, rank, world_size):
    """The files of a task: neighbours, so that the order of the tasks is that of the input, of about equal bytes."""
    ends = np.cumsum(np.maximum(plan.sizes, 1))
    middles = ends - np.maximum(plan.sizes, 1) / 2
    mine = middles * world_size // ends[-1] == rank
    return [file for file, one in zip(plan.files, mine) if one]


def judged(rules, docs, info):
    """Yield what passes the rules about one document, as dicts: text without personal data, and what is known of it."""
    for some in handfuls(docs):
        for one in by_words(rules, by_columns(rules, some, info), info):
            text = io.BytesIO()
            replaced, tokens, digest = write_scrubbed(text, rules, one.doc)
            if rules.tok and not rules.min_tokens <= tokens <= (rules.max_tokens or tokens):
                info.removed.append((one.row, one.group, one.id, one.url, "tokens", one.size))
                continue
            source, language, license = list(info.groups)[one.group]
            date = one.doc.get("date")
            if isinstance(date, str) and date[:4].isdigit():
                info.dates.append(date)
            yield dict(
                id=one.id,
                url=one.url,
                source=source,
                language=language,
                license=license,
                sha256=digest,
                text_hash=fingerprint(one.doc["text"]),
                bytes=one.size,
                bands=[int(key) for key in one.bands],
                text=text.getvalue().decode(),
                **dict(zip(KINDS, replaced.tolist())),
            )


def keys_of(bands):
    """A document's keys for datatrove: that of its text, then those of near-duplicates, 64 bits each as two halves."""
    return MinhashConfig(num_buckets=1 + bands, hashes_per_bucket=2, hash_config=HashConfig(precision=32))


def write_keys(folder, rank, keys):
    """keys: uint64 (documents, 1 + bands) -> a file for each column, as datatrove's second stage reads it."""
    for number, column in enumerate(keys.T):
        rows = np.zeros(len(column), [("high", "<u4"), ("low", "<u4"), ("document", "<u4")])
        rows["high"], rows["low"], rows["document"] = column >> np.uint64(32), column, np.arange(len(column))
        path = folder / f"bucket_{number:03d}" / f"{rank:05d}.minhash.sig"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(np.sort(rows, order=rows.dtype.names).tobytes())


class Judged(Step):
    """Reads judged/{rank}.jsonl.gz, so that a document has the number that its keys have."""

    def run(self, data=None, rank=0, world_size=1):
        with gzip.open(self.work / "judged" / f"{rank:05d}.jsonl.gz", "rt") as lines:
            for line in lines:
                row = json.loads(line)
                yield Document(row.pop("text"), row["id"], metadata=row)


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
        plan = self.plan()
        n = plan.asked["parts"]
        for part in range(n):
            self.folder(f"parts/{part:05d}")
        paths = [self.work / "parts" / f"{part:05d}" / f"{rank:05d}.jsonl.gz" for part in range(n)]
        files = [gzip.open(path, "wt", 1) for path in paths]
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
            row["ids"] = tokens_of(tok, text)
            row["tokens"] = len(row["ids"])
            row["bytes_written"] = len(text.encode())
            count(audit, row)
        shards = {}
        for source, split in sorted({(row["source"], row["split"]) for row in rows}):
            mine = [row for row in rows if (row["source"], row["split"]) == (source, split)]
            shards[f"{source}\n{split}"] = cut(self.out, source, split, rank, mine, plan.asked["shard_tokens"])
        schema = kept.schema()
        table = pyarrow.Table.from_pylist([{name: row[name] for name in schema.names} for row in rows], schema)
        pyarrow.parquet.write_table(table, self.folder("kept") / f"{rank:05d}.parquet", compression="zstd")
        write_part(self.folder("audit") / f"tokens-{rank:05d}.json", audit, shards=shards)


def count(audit, row):
    """Tell an Audit of a document that stays."""
    key = row["source"], row["language"], row["license"]
    audit.keep(key, 1, row["bytes"], row["bytes_written"], {kind: row[kind] for kind in KINDS})
    reports.add(audit.group(key), dict(tokens=row["tokens"]))


def tokens_of(tok, text):
    """Ids of a text between begin and end, in the type of the shards: (n,)."""
    dtype = dtype_of(tok)
    ids = [tok.encode_array(part).astype(dtype) for part in long_parts(text)]
    return np.concatenate([np.array([tok.bos], dtype), *ids, np.array([tok.eos], dtype)])


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
        meta = dict(
            tokenizer=name,
            tokenizer_hash=tok.hash,
            vocab_size=tok.vocab_size,
            bos=tok.bos,
            eos=tok.eos,
            sources=sources_of(audit, streams),
            about=audit.about(),
        )
        meta["version"] = version(meta)
        said = prepare.describe(name, tok, plan.began)
        account = reports.build(
            audit,
            dict(said, seconds=time.time() - plan.began),
            files,
            plan.ignored,
            prepare.outputs(meta, tok, False, self.join_kept()),
            prepare.describe_robots(prepare.read_rules([], self.work)),
            dict(scrubbed=plan.asked["pii"], in_code=plan.asked["pii_in_code"]),
            None,
        )
        prepare.write_json(self.out / "report.json", account)
        write_flushed(self.out / "report.md", reports.markdown(account))
        reports.picture(account, self.out / "flow.png")
        # Last, since with it the folder is data.
        prepare.write_json(self.out / "meta.json", meta)
        reports.verify(self.out)
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
    names = sorted({source for source, _, _ in audit.groups})
    return {name: {split: streams.get(f"{name}\n{split}", empty) for split in ("train", "val")} for name in names}


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
    dates = [date for date in (*audit.dates, *part["dates"]) if date]
    audit.dates = [min(dates), max(dates)] if dates else [None, None]
