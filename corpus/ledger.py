"""
The ledger, documents.parquet: a row for each document that came in, without its text. The sums of a report are
group-bys over it.

    id, source, url, language, license    as the document came in
    bytes, written                        UTF-8 bytes of its text, before and after personal data was replaced
    email, ip, iban                       how many of each were replaced
    text                                  64 bits of a hash of its text (corpus/dedup.py: fingerprint)
    reason                                why it is not in the shards, such as "robots:GPTBot:/x"; "" = it is in them
    split, shard, offset, tokens          where its tokens are: they begin at `offset` and may run into the next shards
    withdrawn                             the time (UTC) at which --remove took it out

    in = kept + removed, in documents and in bytes, by source, language, license and reason

Two kinds of rows have tokens in the shards but did not come in: they have 0 bytes and no reason. A document that is
alone in its folder is cut in two, and its end, for validation, has a row. So has each copy of a planted passage.

Rows are in the order of the input. Removed documents are never tokenized: a report estimates their tokens from their
bytes, at the rate of the kept documents of the same source and language.
"""

import os
from collections import Counter
from operator import itemgetter

import jinja2
import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet

from corpus.robots import FILE_STATES, RESERVED, file_state, host_key
from corpus.rules import RULES
from corpus.shards import shards_of
from engine.files import read_json, read_text, sha256, version, write_flushed, write_json
from engine.readers import in_one_line

FILE = "documents.parquet"
# Rows that are in memory at a time: a few megabytes.
ROWS = 5_000
PII = ("email", "ip", "iban")
TEXTS = ("id", "source", "url", "language", "license", "reason", "split", "shard", "withdrawn")
NUMBERS = ("bytes", "written", *PII, "tokens", "offset")
OPT_OUTS = ("robots", "blocked-domain", *RESERVED)
# Reasons in the order of the rules. Some have details behind a colon: robots:AGENT:RULE, unreadable:PROBLEM.
REASONS = {
    "unreadable": "no text: not UTF-8, no JSON, binary, torn file",
    "empty": "nothing but white space",
    "blocked-domain": "the host is on a list of blocked domains",
    "robots": "robots.txt disallows the URL for an agent",
    "no-robots": "the host has no robots.txt (--missing=deny)",
    "unparsable": "the host serves something else as robots.txt (--missing=deny)",
    "bad-url": "not a URL (--missing=deny)",
    **RESERVED,
    **RULES,
    "contaminated": "contains an evaluation prompt",
    "tokens": "too few or too many tokens",
    "duplicate": "the same text was kept before",
    "near-duplicate": "nearly the same text was kept before",
    "withdrawn": "taken out after the data were made (--remove)",
}


def schema():
    """The columns of the ledger, in order."""
    columns = dict.fromkeys(TEXTS, pyarrow.string()) | dict.fromkeys(NUMBERS, pyarrow.int64())
    return pyarrow.schema(columns | dict(text=pyarrow.uint64()))


def write_ledger(path, tables):
    """Write an iterable of tables of rows, each as a row group."""
    with pyarrow.parquet.ParquetWriter(path, schema(), compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.select(schema().names).cast(schema()))


def ledger(folder, columns=None):
    """Yield the rows of a data folder as pyarrow tables of at most ROWS. ValueError for a folder without a ledger."""
    path = f"{folder}/{FILE}"
    if not os.path.isfile(path):
        raise ValueError(f"{folder} has no {FILE}: it is not a data folder, or an older prepare.py wrote it. Prepare "
                         f"its files again: python prepare.py FILES --out={folder}")
    with in_one_line(path), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS, columns=columns):
            yield pyarrow.Table.from_batches([batch])


def rows_of(folder, columns=None):
    """Yield the rows of a data folder as dicts."""
    for table in ledger(folder, columns):
        yield from table.to_pylist()


def changed(folder, change, *args):
    """Yield the rows of a data folder as tables, after change(row, *args) has changed each row, a dict, in place."""
    for table in ledger(folder):
        rows = table.to_pylist()
        for row in rows:
            change(row, *args)
        yield pyarrow.Table.from_pylist(rows, table.schema)


def described(folder):
    """(meta.json, report.json) of a data folder. ValueError or OSError: one is missing or belongs to another ledger."""
    next(ledger(folder, ["id"]), None)
    meta, report = read_json(f"{folder}/meta.json"), read_json(f"{folder}/report.json")
    if "sources" not in meta or not version(meta) == meta.get("version") == report.get("version"):
        raise ValueError(f"{folder}: meta.json and report.json are of two versions of the data: prepare them again")
    if sha256(f"{folder}/{FILE}") != report["outputs"]["ledger"]:
        raise ValueError(f"{folder}/{FILE} has changed since prepare.py wrote it: another sha256")
    return meta, report


# ----------------------------------------------------------------------------------------------------------------------
# sums


def sums(folder):
    """
    A list of dicts, one for each source, language, license, split and reason, with the sums of NUMBERS and

        documents           how many rows came in
        rows                how many rows there are
        id                  the first one in the alphabet
        kind, detail        the reason's first two parts: robots, GPTBot
        tokens_about        tokens, estimated where the documents were not tokenized
    """
    keys = ["source", "language", "license", "split", "kind", "detail"]
    aggregates = dict.fromkeys(("documents", "rows", *NUMBERS), "sum") | dict(id="min")

    def summed(rows):
        return rows.group_by(keys).aggregate(list(aggregates.items())).rename_columns([*keys, *aggregates])

    parts = []
    for rows in ledger(folder):
        reason = pc.extract_regex(rows["reason"], "(?s)^(?P<kind>[^:]*):?(?P<detail>[^:]*)").combine_chunks()
        came_in = pc.or_(pc.greater(rows["bytes"], 0), pc.not_equal(rows["reason"], ""))
        columns = [*reason.flatten(), came_in.cast("int64"), came_in.is_valid().cast("int64")]
        for name, column in zip(["kind", "detail", "documents", "rows"], columns):
            rows = rows.append_column(name, column)
        parts.append(summed(rows))
    rows = summed(pyarrow.concat_tables(parts)).to_pylist()
    kept = [row for row in rows if not row["kind"]]
    similar = grouped(kept, "source", "language")
    for row in rows:
        # At the rate of the kept documents of the same source and language or, if there are none, of all kept ones.
        reference = similar.get((row["source"], row["language"]), kept)
        estimate = round(row["bytes"] * added(reference, "tokens") / max(added(reference, "written"), 1))
        # Withdrawn documents were tokenized: their number of tokens is known.
        row["tokens_about"] = row["tokens"] or estimate
    return rows


def grouped(rows, *keys):
    """{value of the key, or tuple of values of several keys: the rows that have it}."""
    groups = {}
    for row in rows:
        groups.setdefault(itemgetter(*keys)(row), []).append(row)
    return groups


def added(rows, name):
    """The sum of a column of rows."""
    return sum(row[name] for row in rows)


def size_of(rows):
    """[documents, bytes] that came in."""
    return [added(rows, "documents"), added(rows, "bytes")]


def total(rows):
    """The totals of the rows of sums(); for each reason, the removed [documents, bytes] and their estimated tokens."""
    by_reason = grouped(rows, "kind")
    kept = by_reason.get("", [])
    removed = {reason: by_reason[reason] for reason in REASONS if reason in by_reason}
    return dict(
        documents_in=added(rows, "documents"),
        bytes_in=added(rows, "bytes"),
        **{name: added(kept, name) for name in ("documents", "bytes", "written", "tokens")},
        pii={name: added(kept, name) for name in PII},
        removed={reason: size_of(group) for reason, group in removed.items()},
        tokens_removed_about={reason: added(group, "tokens_about") for reason, group in removed.items()},
    )


def opt_outs(folder, store):
    """How many hosts have a file in the store, and the 20 hosts that lost the most bytes to opt-outs."""
    hosts, lost = set(), {}
    for row in rows_of(folder, ["url", "reason", "bytes"]):
        host = host_key(row["url"])
        hosts.add(host)
        if host and row["reason"].partition(":")[0] in OPT_OUTS:
            n, size = lost.get(host, (0, 0))
            lost[host] = [n + 1, size + row["bytes"]]
    count = Counter(file_state(host, store) for host in hosts - {None})
    # The most bytes first; equal ones by name.
    ordered = sorted(lost.items(), key=lambda entry: (-entry[1][1], entry[0]))
    hosts = dict(seen=count.total(), **{state: count[state] for state in FILE_STATES}, blocked=len(lost))
    return dict(top_blocked_hosts=dict(ordered[:20]), hosts=hosts)


def write_report(folder, meta, streams, facts):
    """
    Write meta.json, report.json and report.md next to a ledger. Returns the report.

    meta: tokenizer, tokenizer_hash, vocab_size, bos and eos, as in meta.json. streams: {source: {split: entries of its
    shards}}. facts: the report's run, inputs, ignored, rule, pii, probes and robots (stages.facts_of).
    """
    rows = sums(folder)
    by_split, by_detail = grouped(rows, "source", "split"), grouped(rows, "kind", "detail")
    sources = {source: {} for source in streams}
    for source, splits in streams.items():
        for split, entries in splits.items():
            group = by_split.get((source, split), [])
            sizes = dict(documents=added(group, "rows"), tokens=added(group, "tokens"), bytes=added(group, "written"))
            sources[source][split] = dict(sizes, shards=entries)
    meta = dict(meta, sources=sources)
    meta["version"] = version(meta)
    languages = sorted(grouped(rows, "source", "language").items())
    report = dict(
        facts,
        version=meta["version"],
        total=total(rows),
        table=[dict(source=source, language=language, **total(group)) for (source, language), group in languages],
        licenses={name: total(group) for name, group in sorted(grouped(rows, "license").items())},
        unreadable={problem: [added(group, "documents"), min(row["id"] for row in group)]
                    for (kind, problem), group in by_detail.items() if kind == "unreadable"},
        outputs=dict(shards=shards_of(meta), ledger=sha256(f"{folder}/{FILE}")),
    )
    report["pii"] = dict(facts["pii"], **report["total"]["pii"])
    if facts["robots"]:
        removed = {agent: size_of(group) for (kind, agent), group in by_detail.items() if kind == "robots"}
        report["robots"] = dict(facts["robots"], removed_by_agent=removed)
    write_json(f"{folder}/meta.json", meta)
    write_json(f"{folder}/report.json", report)
    write_flushed(f"{folder}/report.md", markdown(report))
    return report


# ----------------------------------------------------------------------------------------------------------------------
# for people

def counted(n, noun):
    """A number and a noun: 1 document, 2 documents."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def markdown(report):
    """report.md: the numbers of report.json in sentences and tables."""
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string(read_text(f"{os.path.dirname(__file__)}/report.md.jinja"))
    return template.render(report, reasons=REASONS, opt_outs=OPT_OUTS, reserved=RESERVED, counted=counted)
