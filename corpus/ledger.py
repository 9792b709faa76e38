"""
The ledger, documents.parquet: a row for each document that came in, and never its text. Every number of a report is a
group-by over it.

    id, source, url, language, license    as the document came in
    bytes, written                        UTF-8 bytes of its text, before and after personal data was replaced
    email, ip, iban                       how many of each were replaced
    text                                  64 bits of a hash of its text (corpus/dedup.py: fingerprint)
    reason                                why it is not in the shards, such as "robots:GPTBot:/x"; "" = it is
    split, shard, offset, tokens          where its tokens are: from `offset` in that shard, and on into the next ones
    withdrawn                             the time at which --remove took it out

    in = kept + removed, in documents and in bytes, by source, language, license and reason

Two kinds of rows are in the shards and did not come in: they have 0 bytes and no reason. One is the end of a document
that is alone in its folder, which is cut in two for validation; the other is the copies of planted passages.

Rows stand in the order of the input. Tokens of removed documents are estimated from their bytes, at the rate of what
was kept of the same source and language, because they are never tokenized.
"""

import os
from collections import Counter

import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet

from corpus.robots import RESERVED, host_key, known
from corpus.rules import RULES
from corpus.shards import shards_of
from engine.files import read_json, sha256, version, write_flushed, write_json

FILE = "documents.parquet"
# Rows that are in memory at a time, some megabytes.
ROWS = 5_000
# In front of an estimate.
ABOUT = "\u2248 "
TEXTS = ("id", "source", "url", "language", "license", "reason", "split", "shard", "withdrawn")
NUMBERS = ("bytes", "written", "email", "ip", "iban", "tokens", "offset")
# Reasons in the order of the rules. Two of them have particulars behind a colon.
REASONS = {
    "unreadable": "no text: not UTF-8, no JSON, binary, torn file",
    "empty": "nothing but white space",
    "blocked-domain": "the host is on a list of blocked domains",
    "robots": "robots.txt disallows the URL for an agent",
    "no-robots": "the host has no robots.txt (--missing=deny)",
    "unparsable": "the host serves something else as robots.txt (--missing=deny)",
    "bad-url": "not a URL (--missing=deny)",
    **RESERVED,
    **{reason: f"{says} ({source})" if source else says for reason, (says, source) in RULES.items()},
    "contaminated": "contains an evaluation prompt",
    "tokens": "too few or too many tokens",
    "duplicate": "the same text was kept before",
    "near-duplicate": "nearly the same text was kept before",
    "withdrawn": "taken out after the data were made (--remove)",
}


def schema():
    texts = [(name, pyarrow.string()) for name in TEXTS]
    numbers = [(name, pyarrow.int64()) for name in NUMBERS]
    return pyarrow.schema([*texts, *numbers, ("text", pyarrow.uint64())])


def write_ledger(path, tables):
    """Write tables of rows, an iterable. The bytes do not depend on where one table ends and the next begins."""
    rest = schema().empty_table()
    with pyarrow.parquet.ParquetWriter(path, schema(), compression="zstd") as writer:
        for table in tables:
            rest = pyarrow.concat_tables([rest, table.select(schema().names).cast(schema())])
            while len(rest) >= ROWS:
                writer.write_table(rest.slice(0, ROWS).combine_chunks())
                rest = rest.slice(ROWS)
        writer.write_table(rest.combine_chunks())


def ledger(folder, columns=None):
    """Yield the rows of a data folder as pyarrow tables of at most ROWS. ValueError for a folder without a ledger."""
    path = os.path.join(folder, FILE)
    if not os.path.isfile(path):
        older = os.path.isfile(os.path.join(folder, "meta.json"))
        what = "an older prepare.py wrote it. Prepare its files again" if older else "not a data folder. Make one"
        raise ValueError(f"{folder} has no {FILE}: {what}: python prepare.py FILES --out={folder}")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS, columns=columns):
                yield pyarrow.Table.from_batches([batch])
    except pyarrow.ArrowException as e:
        raise ValueError(f"{path} is damaged ({' '.join(str(e).split())[:120]}): prepare the data again") from None


def read_meta(folder):
    """meta.json of a data folder."""
    path = os.path.join(folder, "meta.json")
    if not os.path.isfile(path):
        raise ValueError(f"{folder} has no meta.json: name a folder that prepare.py wrote")
    return read_json(path)


# ----------------------------------------------------------------------------------------------------------------------
# sums


def aggregate(folder, keys, values, prepared):
    """[{*keys, *values, documents}] of the rows of a folder: the sums of the values, and the number of rows."""
    parts = [prepared(table).group_by(keys).aggregate([*((value, "sum") for value in values), ([], "count_all")])
             for table in ledger(folder)]
    names = [*keys, *values, "documents"]
    table = pyarrow.concat_tables(parts).rename_columns(names).group_by(keys)
    table = table.aggregate([(value, "sum") for value in names[len(keys):]]).rename_columns(names)
    return table.sort_by([(key, "ascending") for key in keys]).to_pylist()


def sums(folder):
    """[{source, language, license, reason, documents, bytes, written, tokens, email, ip, iban}] of all that came in."""
    def came_in(table):
        reasons = pc.replace_substring_regex(table["reason"], ":(?s:.*)", "")
        table = table.set_column(table.column_names.index("reason"), "reason", reasons)
        return table.filter(pc.or_(pc.greater(table["bytes"], 0), pc.not_equal(reasons, "")))

    keys, values = ["source", "language", "license", "reason"], ["bytes", "written", "tokens", "email", "ip", "iban"]
    return aggregate(folder, keys, values, came_in)


def total(rows):
    """
    The sums of rows as one: documents_in, bytes_in, documents, bytes, written, tokens, pii, and of each reason
    removed: [documents, bytes] and tokens_removed_about.
    """
    kept = [row for row in rows if not row["reason"]]
    out = dict(documents_in=sum(row["documents"] for row in rows), bytes_in=sum(row["bytes"] for row in rows))
    out |= {name: sum(row[name] for row in kept) for name in ("documents", "bytes", "written", "tokens")}
    out["pii"] = {kind: sum(row[kind] for row in kept) for kind in ("email", "ip", "iban")}
    out["removed"], out["tokens_removed_about"] = {}, {}
    for reason in REASONS:
        gone = [row for row in rows if row["reason"] == reason]
        if gone:
            out["removed"][reason] = [sum(row["documents"] for row in gone), sum(row["bytes"] for row in gone)]
            out["tokens_removed_about"][reason] = sum(row["about"] for row in gone)
    return out


def by(rows, *keys):
    """[{key: value, ..., **total}] of the rows with equal values."""
    members = {}
    for row in rows:
        members.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [dict(zip(keys, values), **total(mine)) for values, mine in sorted(members.items())]


def estimated(rows):
    """The rows with "about": the tokens of removed ones, at the rate of the kept ones of the same language."""
    kept = {}
    for row in rows:
        for key in (row["source"], row["language"]), None:
            tokens, size = kept.get(key, (0, 0))
            kept[key] = (tokens, size) if row["reason"] else (tokens + row["tokens"], size + row["bytes"])
    for row in rows:
        tokens, size = kept[row["source"], row["language"]]
        tokens, size = (tokens, size) if size else kept[None]
        # A withdrawn document has been tokenized.
        row["about"] = row["tokens"] or round(row["bytes"] * tokens / max(size, 1))
    return rows


def opt_outs(folder, store):
    """What the report says of robots.txt and reservations: hosts, the agents that are disallowed, who lost most."""
    hosts, agents, lost = {}, {}, {}
    for table in ledger(folder, ["url", "reason", "bytes"]):
        for url, reason, size in zip(*(table[name].to_pylist() for name in ("url", "reason", "bytes"))):
            host = host_key(url) if url else None
            if host and host not in hosts:
                hosts[host] = known(host, store)
            name, _, particulars = reason.partition(":")
            if name == "robots":
                add(agents, particulars.partition(":")[0], size)
            if host and name in ("robots", "blocked-domain", *RESERVED):
                add(lost, host, size)
    count = Counter(hosts.values())
    most = sorted(lost.items(), key=lambda one: (-one[1][1], one[0]))
    return dict(removed_by_agent=dict(sorted(agents.items())), top_blocked_hosts=dict(most[:20]), hosts=dict(
        seen=len(hosts), with_file=count["with"], without=count["without"], unparsable=count["unparsable"],
        blocked=len(lost)))


def add(counts, key, size):
    """Count a document of so many bytes: counts[key] = [documents, bytes]."""
    one = counts.setdefault(key, [0, 0])
    one[0] += 1
    one[1] += size


def write_account(folder, meta, streams, about):
    """
    Write meta.json, report.json and report.md beside a ledger. Returns the report.

    meta: tokenizer, tokenizer_hash, vocab_size, bos and eos. streams: {source: {split: entries of its shards}}. about:
    run, inputs, ignored, rule, pii, probes and robots, as prepare.py knows them.
    """
    counts = in_shards(folder)
    meta = {key: meta[key] for key in ("tokenizer", "tokenizer_hash", "vocab_size", "bos", "eos")}
    meta["sources"] = {source: {} for source in streams}
    for source, splits in streams.items():
        for split, entries in splits.items():
            found = counts.get((source, split), (0, 0, 0))
            meta["sources"][source][split] = dict(zip(("documents", "tokens", "bytes"), found), shards=entries)
    meta["version"] = version(meta)
    rows = estimated(sums(folder))
    licenses = {}
    for one in by(rows, "license"):
        licenses[one["license"]] = {name: one[name] for name in ("documents", "bytes", "tokens")}
    report = dict(about, total=total(rows), table=by(rows, "source", "language"), licenses=licenses)
    report["version"] = meta["version"]
    report["pii"] = dict(about["pii"], **report["total"]["pii"])
    report["unreadable"] = unreadable(folder)
    report["outputs"] = dict(shards=shards_of(meta), ledger=sha256(os.path.join(folder, FILE)))
    write_json(os.path.join(folder, "meta.json"), meta)
    write_json(os.path.join(folder, "report.json"), report)
    write_flushed(os.path.join(folder, "report.md"), markdown(report))
    return report


def unreadable(folder):
    """{problem: [number of files and rows, the first of them]}"""
    found = {}
    for rows in ledger(folder, ["id", "reason"]):
        for name, reason in zip(rows["id"].to_pylist(), rows["reason"].to_pylist()):
            if reason.startswith("unreadable:"):
                found.setdefault(reason.partition(":")[2], [0, name])[0] += 1
    return found


def in_shards(folder):
    """{(source, split): (documents, tokens, bytes)} of all rows that have tokens."""
    keys, values = ["source", "split"], ["tokens", "written"]
    found = aggregate(folder, keys, values, lambda table: table)
    return {(row["source"], row["split"]): (row["documents"], row["tokens"], row["written"]) for row in found}


# ----------------------------------------------------------------------------------------------------------------------
# for people


def percent(part, whole):
    """One decimal; a share above nothing never reads 0.0 %, and one below all never 100.0 %."""
    if not whole:
        return "-"
    share = 100 * part / whole
    if 0 < share < 0.05:
        return "< 0.1 %"
    return "> 99.9 %" if 99.95 <= share < 100 else f"{share:.1f} %"


def table(names, rows, at_most=60):
    """A Markdown table: whole numbers with commas, floats (MB) with two decimals."""
    def line(values):
        cells = [f"{v:,}" if isinstance(v, int) else f"{v:,.2f}" if isinstance(v, float) else str(v) for v in values]
        return f"| {' | '.join(cells)} |"

    more = [f"\nand {len(rows) - at_most:,} more in report.json"] if len(rows) > at_most else []
    return "\n".join([line(names), "|" + "---|" * len(names), *map(line, rows[:at_most]), *more])


def counted(n, noun):
    """1 document, 2 documents."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def markdown(report):
    """report.md: the numbers of report.json in sentences and tables."""
    t, run = report["total"], report["run"]
    vocabulary = run["tokenizer"]
    about = sum(t["tokens_removed_about"].values())
    came = ("came in", t["documents_in"], "", t["bytes_in"] / 1e6, ABOUT * (about > 0) + f"{t['tokens'] + about:,}")
    kept = ("**kept**", t["documents"], percent(t["documents"], t["documents_in"]), t["bytes"] / 1e6, t["tokens"])
    removed = [(f"{reason}: {REASONS[reason]}", n, percent(n, t["documents_in"]), size / 1e6,
                f"{ABOUT}{t['tokens_removed_about'][reason]:,}") for reason, (n, size) in t["removed"].items()]
    unreadable = [f"{n:,} could not be read: {problem}, such as {first}."
                  for problem, (n, first) in report["unreadable"].items()]
    languages = []
    for row in sorted(report["table"], key=lambda row: -row["bytes_in"]):
        gone = ", ".join(f"{reason} {n:,}" for reason, (n, _) in row["removed"].items())
        rate = row["written"] / row["tokens"] if row["tokens"] else 0.0
        languages.append((row["source"], row["language"] or "?", row["documents_in"], gone or "-", row["documents"],
                          row["bytes"] / 1e6, row["tokens"], rate))
    licenses = [(name or "not stated", one["documents"], one["bytes"] / 1e6, one["tokens"])
                for name, one in report["licenses"].items() if one["documents"]]
    files = [(file["name"] + (f" ({file['problem']})" if file["problem"] else ""), file["bytes"],
              (file["sha256"] or "?")[:16]) for file in report["inputs"]]
    ignored = [(kind, len(names), ", ".join([*names[:5], *["..."] * (len(names) > 5)]))
               for kind, names in report["ignored"].items()]
    shards = [(shard["file"], shard["tokens"], shard["sha256"][:16]) for shard in report["outputs"]["shards"]]
    return "\n\n".join([
        f"# What is in {run['out']}, and what is not",
        f"{counted(t['documents_in'], 'document')} ({t['bytes_in'] / 1e6:,.1f} MB) came in; {t['documents']:,} were "
        f"kept, {percent(t['bytes'], t['bytes_in'])} of the bytes that could be read: {counted(t['tokens'], 'token')} "
        f"of {vocabulary}.",
        *unreadable,
        table(("", "documents", "of all", "MB", "tokens"), [came, *removed, kept]),
        f"In = kept + removed, in documents and in bytes. {ABOUT}marks an estimate from bytes: removed documents are "
        "not tokenized.",
        "## Opt-outs",
        *opt_out_blocks(report["robots"], t),
        "## Personal data",
        personal_data(report["pii"]),
        *probe_blocks(report["probes"]),
        "## By source and language",
        table(("source", "language", "documents in", "removed", "kept", "MB kept", "tokens", "bytes/token"), languages),
        "## Licences of the kept documents",
        table(("licence", "documents", "MB", "tokens"), sorted(licenses, key=lambda row: -row[2])),
        "## Inputs and outputs",
        table(("input", "bytes", "sha256"), files, 40),
        table(("not read", "files", "names"), ignored or [("-", 0, "")]),
        table(("shard", "tokens", "sha256"), shards or [("none: this was a dry run", "", "")]),
        f"{report['rule']} Version {report['version']}.",
        f"```\n{run['command']}\n```",
    ]) + "\n"


def opt_out_blocks(robots, t):
    """Whose robots.txt was asked, and what it and other reservations removed."""
    removed = t["removed"]
    gone = [f"{reason} {removed[reason][0]:,}" for reason in RESERVED if reason in removed]
    said = ["Removed because the page, its headers or a file of its host reserve it (corpus/robots.py): "
            f"{', '.join(gone)}."] if gone else []
    if not robots:
        return ["No robots.txt was consulted (`--robots`): whether the authors have opted out is not known.", *said]
    hosts = robots["hosts"]
    silent = "no consent" if robots["missing"] == "deny" else "no opt-out"
    size = sum(removed[reason][1] for reason in ("robots", "blocked-domain", *RESERVED) if reason in removed)
    blocks = [f"{counted(hosts['seen'], 'host')}: {hosts['with_file']:,} with a robots.txt in the store, "
              f"{hosts['without']:,} without (read as {silent}), {hosts['unparsable']:,} that serve something else. "
              f"{counted(hosts['blocked'], 'host')} lost documents, {percent(size, t['bytes_in'])} of the bytes; "
              "Apertus lost about 8 % of its English and 4 % of its other tokens."]
    if hosts["seen"] and not hosts["with_file"] + hosts["unparsable"]:
        blocks.append("**The store knows none of these hosts**: whether their authors have opted out is not known.")
    agents = ", ".join(f"{agent} {n:,}" for agent, (n, _) in robots["removed_by_agent"].items())
    if agents:
        blocks.append(f"Documents by the agent that is disallowed (`*`: every agent that is not named): {agents}.")
    rows = [(host, n, size / 1e6) for host, (n, size) in robots["top_blocked_hosts"].items()]
    return [*blocks, *([table(("host", "documents", "MB"), rows)] if rows else []), *said]


def personal_data(pii):
    """Whether personal data was replaced, how much, and whether in code."""
    if not pii["scrubbed"]:
        return "Personal data was not replaced (`--pii=False`)."
    code = "" if pii["in_code"] else " Code was left as it is, as Apertus left it (`--pii_in_code`)."
    return (f"Replaced by single tokens: {pii['email']:,} e-mail addresses, {pii['ip']:,} IP addresses, "
            f"{pii['iban']:,} IBANs.{code}")


def probe_blocks(probes):
    """The passages that --probes planted, which no other number of the report counts."""
    if not probes:
        return []
    times = ", ".join(map(str, probes["repetitions"]))
    return ["## Memorisation probes",
            f"{probes['passages']:,} passages of {probes['file']} are planted {times} times in the training split, as "
            f"{counted(probes['documents'], 'document')} that are not counted above."]
