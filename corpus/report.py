"""
meta.json, report.json and report.md of a data folder. All their numbers come from one list, the sums over its ledger.

Removed documents are never tokenized: the report estimates their tokens from their bytes, at the rate of the kept
documents of the same source and language.
"""

import os
from collections import Counter
from operator import itemgetter

import jinja2
import numpy as np
import pyarrow
import pyarrow.compute as pc
from numpy.lib.format import open_memmap
from tqdm import tqdm

from corpus.folder import shards_of
from corpus.hosts import HOST_FILES, OPT_OUTS, write_domains
from corpus.ledger import FILE, NUMBERS, PII, ledger
from corpus.readers import counts_of
from corpus.reservations import MARKS, RESERVED, UNKNOWN
from corpus.rules import RULES
from corpus.stores import FILES
from engine.files import read_json, read_text, sha256, version, write_flushed, write_json

# Reasons in the order of the rules. Some have details behind a colon: robots:AGENT:RULE, unreadable:PROBLEM.
REASONS = {
    "unreadable": "no text: not UTF-8, no JSON, binary, torn file",
    "empty": "nothing but white space",
    "blocked-domain": "the host is on a list of blocked domains",
    "robots": "robots.txt disallows the URL for an agent",
    "no-robots": "the store has no robots.txt of the host (--missing=deny)",
    "unparsable": "the host serves something else as robots.txt (--missing=deny)",
    "bad-url": "not a URL (--missing=deny)",
    "no-url": "has no URL (--missing=deny)",
    **RESERVED,
    **{reason: f"{text} (--missing=deny)" for reason, text in UNKNOWN.items()},
    **RULES,
    "contaminated": "contains an evaluation prompt",
    "tokens": "too few or too many tokens",
    "duplicate": "the same text was kept before",
    "near-duplicate": "nearly the same text was kept before",
    "withdrawn": "taken out after the data were made (--remove)",
}
# Tokens of a shard that are in memory at a time.
PIECE = 1 << 20


# ----------------------------------------------------------------------------------------------------------------------
# sums over the ledger


def sums(folder):
    """
    A list of dicts, one for each source, language, license, split and reason, with the sums of NUMBERS and

        rule, detail        the reason's first two parts: robots, GPTBot (withdrawn, robots:GPTBot); "" for kept ones
        documents           how many came in
        rows                how many rows there are: copies of planted passages and last parts of documents included
        id                  the first one in the alphabet
        tokens_about        tokens, estimated where the documents were not tokenized
    """
    keys = ["source", "language", "license", "split", "rule", "detail"]
    aggregates = dict.fromkeys(("documents", "rows", *NUMBERS), "sum") | dict(id="min")

    def summed(rows):
        return rows.group_by(keys).aggregate(list(aggregates.items())).rename_columns([*keys, *aggregates])

    parts = []
    for rows in ledger(folder):
        # The detail of withdrawn:robots:GPTBot:/x is robots:GPTBot.
        parts_of_reason = pc.extract_regex(rows["reason"], "(?s)^(?P<rule>[^:]*):?(?P<detail>(?:robots:)?[^:]*)")
        rule, detail = parts_of_reason.combine_chunks().flatten()
        # As ledger.came_in() has it.
        documents = pc.or_(pc.greater(rows["bytes"], 0), pc.equal(rows["tokens"], 0)).cast("int64")
        columns = dict(rule=rule, detail=detail, documents=documents, rows=documents.is_valid().cast("int64"))
        for name, column in columns.items():
            rows = rows.append_column(name, column)
        parts.append(summed(rows))
    rows = summed(pyarrow.concat_tables(parts)).to_pylist()
    kept = [row for row in rows if not row["rule"]]
    similar = grouped(kept, "source", "language")
    for row in rows:
        # At the rate of kept documents of the same source and language or, if no such document is kept, of all.
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
    """The totals of rows of sums(); for each reason, the removed [documents, bytes] and their estimated tokens."""
    by_rule = grouped(rows, "rule")
    kept = by_rule.get("", [])
    # The last ones are of older versions, which had more rules.
    reasons = [*REASONS, *sorted(by_rule.keys() - REASONS.keys() - {""})]
    removed = {reason: by_rule[reason] for reason in reasons if reason in by_rule}
    return dict(
        documents_in=added(rows, "documents"),
        bytes_in=added(rows, "bytes"),
        **{name: added(kept, name) for name in ("documents", "bytes", "written", "tokens")},
        pii={name: added(kept, name) for name in PII},
        removed={reason: size_of(group) for reason, group in removed.items()},
        tokens_removed_about={reason: added(group, "tokens_about") for reason, group in removed.items()},
    )


def totals_by(rows, name):
    """{value of a column: total() of the rows of sums() that have it}, in alphabetical order."""
    return {value: total(group) for value, group in sorted(grouped(rows, name).items())}


# ----------------------------------------------------------------------------------------------------------------------
# the files


def write_report(folder, vocabulary, shards, provenance):
    """
    Write meta.json, report.json, report.md and domains.csv next to a ledger. Returns the report.

    vocabulary: tokenizer, tokenizer_hash, vocab_size, bos and eos, as in meta.json. shards: {source: {split: entries of
    its shards}}. provenance: the report's run, inputs, ignored, stores, rule, pii, probes and robots
    (account.provenance_of).
    """
    rows = sums(folder)
    meta = meta_of(rows, vocabulary, shards)
    by_detail = grouped(rows, "rule", "detail")
    languages = sorted(grouped(rows, "source", "language").items())
    report = dict(
        provenance,
        version=meta["version"],
        total=total(rows),
        table=[dict(source=source, language=language, **total(group)) for (source, language), group in languages],
        sources=totals_by(rows, "source"),
        languages=totals_by(rows, "language"),
        licenses=totals_by(rows, "license"),
        cut=cut_documents(grouped(rows, "source", "split")),
        unreadable={problem: [added(group, "documents"), min(row["id"] for row in group)]
                    for (rule, problem), group in by_detail.items() if rule == "unreadable"},
        outputs=dict(shards=shards_of(meta), ledger=sha256(f"{folder}/{FILE}")),
    )
    report["pii"] = dict(provenance["pii"], **report["total"]["pii"])
    report["domains"] = write_domains(folder)
    # Without a URL and a store there is nothing to check. Reports of older versions do not name the stores.
    consulted = provenance["robots"] or provenance.get("stores")
    for name in ("without_url", "unreadable_url"):
        report[name] = report["domains"][name] if consulted else 0
    if provenance["robots"]:
        report["robots"] = dict(provenance["robots"], removed_by_agent=removed_by_agent(rows))
    write_json(f"{folder}/meta.json", meta)
    write_json(f"{folder}/report.json", report)
    write_flushed(f"{folder}/report.md", markdown(report))
    return report


def removed_by_agent(rows):
    """{agent: [documents, bytes]} that robots.txt has removed, then or by --remove, from rows of sums()."""
    groups = {}
    for row in rows:
        agent = row["detail"].removeprefix("robots:")
        if row["rule"] == "robots" or row["rule"] == "withdrawn" and row["detail"].startswith("robots:"):
            groups.setdefault(agent, []).append(row)
    return {agent: size_of(group) for agent, group in groups.items()}


def meta_of(rows, vocabulary, shards):
    """meta.json: the vocabulary, and of each source and split its sums, from rows of sums(), and its shards."""
    by_split = grouped(rows, "source", "split")
    sources = {source: {} for source in shards}
    for source, splits in shards.items():
        for split, entries in splits.items():
            group = by_split.get((source, split), [])
            sizes = dict(documents=added(group, "rows"), tokens=added(group, "tokens"), bytes=added(group, "written"))
            sources[source][split] = dict(sizes, shards=entries)
    meta = dict(vocabulary, sources=sources)
    meta["version"] = version(meta)
    return meta


def cut_documents(by_split):
    """
    How many documents are cut, the bytes of their last parts, and the first id; None if no document is cut. by_split:
    {(source, split): rows of sums()}.
    """
    # For validation there are no planted passages, so a row that counts no document is a last part.
    parts = [row for (_, split), rows in by_split.items() for row in rows
             if split == "val" and row["rows"] > row["documents"]]
    if not parts:
        return None
    documents = added(parts, "rows") - added(parts, "documents")
    return dict(documents=documents, bytes=added(parts, "written"), first=min(row["id"] for row in parts))


def note_on_cut(cut):
    """A sentence about cut documents, in a list; [] without any. cut: of cut_documents()."""
    if not cut:
        return []
    n, size = cut["documents"], sized(cut["bytes"])
    return [f"{counted(n, 'document')} {'is' if n == 1 else 'are'} cut, such as {cut['first']}, because the source has "
            f"no other: the last part ({size}) is for validation"]


def notes_on_urls(report):
    """Sentences about documents that were not checked for opt-outs of hosts."""
    # Reports of older versions count a URL that cannot be read as none.
    numbers = {"no URL": report["without_url"], "a URL that cannot be read": report.get("unreadable_url", 0)}
    return [f"{counted(n, 'document')} {'has' if n == 1 else 'have'} {lack}: not checked for opt-outs of hosts"
            for lack, n in numbers.items() if n]


def notes(report):
    """Sentences about documents that were not read, not as UTF-8, not checked, or cut; and about removed licences."""
    unreadable = report["unreadable"].items()
    sentences = [f"{n:,} could not be read: {problem}, such as {first}" for problem, (n, first) in unreadable]
    # Reports of older versions do not name encodings.
    decoded = [file for file in report["inputs"] if file.get("encoding") and not file["problem"]]
    if decoded:
        name, encoding = decoded[0]["name"], decoded[0]["encoding"]
        sentences.append(f"{counted(len(decoded), 'file')} read as {encoding}: not UTF-8, such as {name}")
    sentences += notes_on_urls(report)
    sentences += note_on_cut(report.get("cut"))
    # Reports of older versions do not count the statements of documents.
    if report["robots"] and "statements" in report["robots"]:
        sentences += opt_outs_consulted(report)
    removed = Counter({name or "not stated": group["removed"].get("license", [0])[0]
                       for name, group in report["licenses"].items()})
    if licenses := ", ".join(f"{name} {n:,}" for name, n in removed.most_common(8) if n):
        sentences.append(f"licences of the documents that --keep_licenses removed: {licenses}")
    return sentences


def opt_outs_consulted(report):
    """Sentences: which opt-outs were consulted for how many hosts and documents, and which were not."""
    robots, settings = report["robots"], [store["setting"] for store in report["stores"]]
    counts = robots["hosts"]
    hosts, several = counted(counts["seen"], "host"), counts["several"]
    parts = ["robots.txt not consulted (--robots)", f"{in_words(FILES)} not consulted (--reservations)"]
    if "robots" in settings:
        parts[0] = f"robots.txt of {counts['with_file']:,} of {hosts}{without_file(robots)}"
    if "reservations" in settings:
        parts[1] = in_words([f"{file} of {n:,}" for file, n in robots["reservations"].items()]) + f" of {hosts}"
    if "blocked" in settings:
        parts.append("the list of --blocked")
    of_documents = counted(report["total"]["documents_in"], "document")
    parts.append(f"headers or <meta> known for {robots['statements']:,} of {of_documents}")
    # Reports of older versions have neither snapshots nor marks.
    counts = "any of them may refuse" if robots.get("snapshots") == "any" else "the last one of each counts"
    differ = f"{counted(several, 'host')} with different files in a store: {counts}"
    marks = [f"{counted(mark['documents'], 'document')} of {counted(len(mark['hosts']), 'host')}: {MARKS[name]}"
             + (f"; kept: {mark['kept']:,}" if "kept" in mark else "")
             for name, mark in robots.get("marks", {}).items() if mark["documents"]]
    ignored = [f"--{store['setting']}: not read: {'; '.join(counts_of(store['ignored']))}"
               for store in report["stores"] if store.get("ignored")]
    return [f"opt-outs: {'; '.join(parts)}"] + [differ] * (several > 0) + marks + ignored


def without_file(robots):
    """How many hosts have no robots.txt in the store, or something else, in brackets; "" if all have one."""
    counts, kept = robots["hosts"], robots.get("kept", {})
    states = dict(unknown="unknown: not in the store or not fetched", unparsable="with something else in its place")
    parts = [f"{counts[state]:,} {text}" + (f", {counted(kept[state], 'document')} kept" if state in kept else "")
             for state, text in states.items() if counts[state]]
    verb = "keeps" if robots["missing"] == "allow" else "removes"
    return f" ({'; '.join(parts)}; --missing={robots['missing']} {verb} their pages)" if parts else ""


def in_words(names):
    """A list in a sentence: a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def counted(n, noun):
    """A number and a noun: 1 document, 2 documents."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def sized(n):
    """A number of bytes in the unit that fits: 5 B, 38.4 kB, 1.2 TB."""
    if n < 1000:
        return f"{n} B"
    size, units = n / 1000, ["TB", "GB", "MB", "kB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop()
    return f"{size:,.1f} {units[-1]}"


def markdown(report):
    """report.md: the numbers of report.json in sentences and tables."""
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string(read_text(f"{os.path.dirname(__file__)}/report.md.jinja"))
    return template.render(report, reasons=REASONS, opt_outs=OPT_OUTS, reserved=RESERVED, counted=counted,
                           sized=sized,
                           host_files=HOST_FILES, notes=notes(report))


# ----------------------------------------------------------------------------------------------------------------------
# do the files belong together?


def described(folder):
    """(meta.json, report.json) of a data folder. ValueError or OSError: one is missing or belongs to another ledger."""
    next(ledger(folder, ["id"]), None)
    meta, report = read_json(f"{folder}/meta.json"), read_json(f"{folder}/report.json")
    if "sources" not in meta or not version(meta) == meta.get("version") == report.get("version"):
        raise ValueError(f"{folder}: meta.json and report.json are of two versions of the data: prepare them again")
    if sha256(f"{folder}/{FILE}") != report["outputs"]["ledger"]:
        raise ValueError(f"{folder}/{FILE} has changed since prepare.py wrote it: another sha256")
    return meta, report


def verify(folder):
    """
    Compare the files: the sha256 of each shard with meta.json, the begins of its documents with the ledger, the sums of
    the ledger with report.json. ValueError at the first difference. Returns (meta.json, report.json).
    """
    meta, report = described(folder)
    rows = pyarrow.concat_tables(ledger(folder, ["shard", "offset", "tokens"])).drop_null()
    tokens = np.sum(rows["tokens"])
    begins_of = dict(zip(*map(np.asarray, rows.group_by("shard").aggregate([("offset", "list")]).columns)))
    for shard in tqdm(shards_of(meta), "shards", unit="shard", disable=None, leave=False):
        path = f"{folder}/{shard['file']}"
        if sha256(path) != shard["sha256"]:
            raise ValueError(f"{path} has changed since prepare.py wrote it: another sha256")
        tokens -= shard["tokens"]
        # Mapped anew for each piece, or the whole shard would stay in memory.
        begins = [at + np.flatnonzero(open_memmap(path, mode="r")[at:at + PIECE] == meta["bos"])
                  for at in range(0, shard["tokens"], PIECE)]
        # No document begins in a shard that lies inside a long document.
        if not np.array_equal(np.sort(begins_of.pop(shard["file"], [])), np.concatenate(begins)):
            raise ValueError(f"{path}: its documents do not begin where documents.parquet says")
    if tokens or begins_of:
        raise ValueError(f"{folder}: the shards hold other documents than documents.parquet: {-tokens:+,} tokens")
    for name, value in total(sums(folder)).items():
        if report["total"][name] != value:
            raise ValueError(f"{folder}: documents.parquet and report.json differ in {name}")
    return meta, report
