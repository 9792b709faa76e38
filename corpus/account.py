"""
The account of a run of prepare.py, its last stage (corpus/stages.py): documents.parquet, meta.json and the report, from
the results of the other stages. ValueError if a file has changed while it was read.
"""

import os
import subprocess
import time

import numpy as np
import pyarrow
import pyarrow.compute as pc
from pyarrow.parquet import read_table

from configurator import ROOT
from corpus import ledger
from corpus.folder import SPLITS
from corpus.hosts import write_hosts
from corpus.pii import TAGS
from corpus.report import verify, write_report
from corpus.reservations import MARKS
from corpus.sift import PLANTED
from corpus.stores import FILES, SETTINGS, check_stores
from corpus.urls import site_key
from engine.files import sha256, write_json

# The first web page is of 1990.
FIRST_DAY = "1990-01-01"


def account(number, work):
    """Write meta.json, documents.parquet and the report of a Work, and probes.json; verify() the folder."""
    check_inputs(work)
    check_stores(work.plan.stores)
    ledger.write_ledger(work.data / ledger.FILE, ledger_tables(work))
    tok, name = work.tok, work.tok.name
    if (work.data / "tokenizer.json").exists():
        name = "tokenizer.json"
    vocabulary = dict(tokenizer=name, tokenizer_hash=tok.hash, vocab_size=tok.vocab_size, bos=tok.bos, eos=tok.eos)
    if work.passages:
        # studies/memorize.py reads it.
        passages = [dict(passage, ids=tok.encode(passage["text"])) for passage in work.passages]
        write_json(work.data / "probes.json", dict(tokenizer_hash=tok.hash, probes=passages))
    shards = {source: {split: [] for split in SPLITS} for source in work.result("judge")["sources"]}
    for shard, entry in zip(work.shards, work.results("cut")):
        shards[shard["source"]][shard["split"]].append(entry)
    write_report(work.data, vocabulary, shards, provenance_of(work, name))
    if not work.plan.dry_run:
        verify(work.data)


def check_inputs(work):
    """ValueError: an input has changed since its sha256 was taken."""
    for file in work.files():
        path, recorded = file["path"], file["sha256"]
        if os.path.isfile(path) and os.path.getmtime(path) > work.plan.began and recorded not in (None, sha256(path)):
            raise ValueError(f"{path} has changed while it was read: run the command again")


def groups_read(work):
    """The numbers of the groups whose documents came in: all, or those until --max_bytes was reached."""
    return range(work.result("judge")["groups"])


# ----------------------------------------------------------------------------------------------------------------------
# the ledger


def ledger_tables(work):
    """Yield the rows of all groups as tables of the ledger."""
    documents, reasons = work.documents(), read_table(work.folder / "reasons.parquet")["reason"]
    places = places_of(documents, work)
    # The documents in the order of the input; of a cut one the first part, which is for training, comes first.
    order = np.lexsort((documents["stream"], documents["row"]))
    # How many documents each row is in the shards: 0 = it was removed, 2 = it was cut.
    n_parts = np.bincount(documents["row"], minlength=len(reasons))
    row = part = 0
    for number in [*groups_read(work), PLANTED]:
        rows = read_table(work.sifted(number)).drop_columns("reason")
        rows = rows.append_column("reason", reasons[row:row + len(rows)])
        n = n_parts[row:row + len(rows)]
        yield placed_rows(rows, n, places.take(order[part:part + n.sum()]))
        row += len(rows)
        part += n.sum()


def places_of(documents, work):
    """A table of split, shard, offset, tokens, written: where the tokens of documents are, in the order of training."""
    shards = pyarrow.Table.from_pylist(work.shards)
    paths = [work.folder / "tokens" / f"{number}.counts" for number in range(len(work.buckets))]
    tokens = np.concatenate([np.fromfile(path, np.int64) for path in paths])
    begins, at = shards["begin"].to_numpy(), np.cumsum(tokens) - tokens
    shard = np.searchsorted(begins, at, "right") - 1
    split, file = (shards[name].dictionary_encode().take(shard) for name in ("split", "file"))
    return pyarrow.table(dict(
        split=split, shard=file, offset=at - begins[shard], tokens=tokens, written=documents["written"]))


def placed_rows(rows, n_parts, parts):
    """
    The rows of a group as rows of the ledger: one for each part of a document, and one for each removed document.

    n_parts: how many parts each row has, (n,). parts: the rows of places_of() of all these parts, in order. Bytes and
    personal data are counted in the row of the first part.
    """
    repeats = np.maximum(n_parts, 1)
    index, is_kept = np.repeat(np.arange(len(rows)), repeats), np.repeat(n_parts > 0, repeats)
    is_first = np.diff(index, prepend=-1) > 0
    placed = parts.take(pyarrow.array(np.cumsum(is_kept) - 1, mask=~is_kept))
    columns = {name: table[name] for table in (rows.take(index), placed) for name in table.column_names}
    columns["bytes"] = pc.if_else(is_first, columns["bytes"], 0)
    for name in ("tokens", "written"):
        columns[name] = pc.if_else(is_kept, columns[name], 0)
    for name in TAGS:
        columns[name] = pc.if_else(is_kept & is_first, columns[name], 0)
    return pyarrow.table(columns)


# ----------------------------------------------------------------------------------------------------------------------
# the report


def provenance_of(work, tokenizer):
    """The part of the report about the run, its files and its settings. tokenizer: the name of the vocabulary."""
    plan = work.plan
    commit = subprocess.getoutput(f"git -C '{ROOT}' rev-parse HEAD")
    hashed = "sha256 of its id" if plan.by_id else "BLAKE2b of its text, in Unicode form NFC with single spaces,"
    ignored = ignored_of_stores(work.rules)
    return dict(
        run=dict(
            out=plan.out,
            command=plan.command,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(plan.began)),
            code=commit if len(commit) == 40 else None,
            tokenizer=tokenizer),
        inputs=described_inputs(work),
        ignored=plan.ignored,
        stores=[dict(store, ignored=ignored.get(store["setting"], {})) for store in plan.stores],
        robots=opt_outs_of(work),
        **period_of(work),
        rule=f"A document is for validation where 64 bits of the {hashed} over 2^64 are below {plan.val_share}; if "
        "none is, the one with the least. The only document of a source is cut: its last part is for validation.",
        pii=dict(scrubbed=plan.pii),
        probes=dict(
            file=plan.probes, passages=len(work.passages), repetitions=plan.repetitions,
            documents=sum(passage["repetitions"] for passage in work.passages)) if work.passages else None,
    )


def period_of(work):
    """
    period: the first and the last day of the column "date" of kept documents; without_date: how many of dated_of have
    none, or one before the web or after today, which is no day of a fetch.
    """
    days = []
    for rows in sifted_rows(work, "day"):
        days += rows.filter(pc.equal(rows["reason"], ""))["day"].to_pylist()
    today = time.strftime("%Y-%m-%d", time.gmtime(work.plan.began))
    dated = [day for day in days if FIRST_DAY <= day <= today]
    return dict(
        period=[min(dated), max(dated)] if dated else [],
        without_date=len(days) - len(dated),
        dated_of=len(days))


def sifted_rows(work, *columns):
    """Yield these columns of the rows of each group that was read, with their final reasons, as tables."""
    reasons, begin = read_table(work.folder / "reasons.parquet")["reason"], 0
    for number in groups_read(work):
        rows = read_table(work.sifted(number), columns=[*columns])
        yield rows.append_column("reason", reasons[begin:begin + len(rows)])
        begin += len(rows)


def described_inputs(work):
    """[{name, path, bytes, sha256, problem, encoding}] of all files."""
    read = {file["name"] for number in groups_read(work) for file, _ in work.groups[number].parts}
    keys = "name", "path", "bytes", "sha256", "problem", "encoding"
    inputs = [{key: file[key] for key in keys} for file in work.files()]
    for file in inputs:
        if work.plan.max_bytes and file["name"] not in read:
            file["problem"] = file["problem"] or "not read: --max_bytes was reached"
    return inputs


def ignored_of_stores(rules):
    """{setting: {reason: [names]}} of the files and rows of the stores that were not read."""
    stores = dict(robots=rules.robots["store"], reservations=(rules.reservations or {}).get(FILES[0]))
    return {setting: store.ignored for setting, store in stores.items() if store is not None}


def opt_outs_of(work):
    """The part of the report about opt-outs; None if nothing was consulted and no document has a URL."""
    plan, robots = work.plan, work.rules.robots
    hosts = write_hosts(work.data, robots["store"], work.rules.reservations)
    if not hosts["hosts"]["seen"] and not any(getattr(plan, name) for name in SETTINGS):
        return None
    marks = counted_marks(work)
    return dict(
        store=plan.robots or None,
        agents=robots["agents"],
        missing=plan.missing,
        snapshots=plan.snapshots,
        statements=marks.pop("known")["documents"],
        marks=marks,
        **hosts)


def counted_marks(work):
    """{mark: its documents, how many of them are kept, their hosts} for MARKS and "known", headers or <meta>."""
    marks = {mark: dict(documents=0, kept=0, hosts=set()) for mark in ("known", *MARKS)}
    for rows in sifted_rows(work, "url", "marks"):
        for row in rows.filter(pc.not_equal(rows["marks"], "")).to_pylist():
            for mark in row["marks"].split():
                marks[mark]["documents"] += 1
                marks[mark]["kept"] += not row["reason"]
                marks[mark]["hosts"].add(site_key(row["url"]))
    return {mark: dict(counts, hosts=sorted(counts["hosts"] - {None})) for mark, counts in marks.items()}
