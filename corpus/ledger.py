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

Rows are in the order of the input. Tokens of removed documents are estimated from their bytes, at the rate of what
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
    meta = read_json(path)
    if not {"sources", "version", "bos"} <= meta.keys():
        raise ValueError(f"{path} is damaged, or not of prepare.py: prepare the data again")
    return meta


# ----------------------------------------------------------------------------------------------------------------------
# sums


def sums(folder):
    """
    A dict for each source, language, license, split and reason (with its first particular, as in robots:GPTBot): the
    sums of NUMBERS; documents, the rows that came in; rows, all of them; id, the first in the alphabet.
    """
    keys = ["source", "language", "license", "split", "reason"]
    how = [*((name, "sum") for name in ("documents", "rows", *NUMBERS)), ("id", "min")]

    def summed(rows):
        return rows.group_by(keys).aggregate(how).rename_columns([*keys, *(name for name, _ in how)])

    parts = []
    for rows in ledger(folder):
        reason = pc.replace_substring_regex(rows["reason"], "^([^:]*:[^:]*):(?s:.*)", r"\1")
        came = pc.or_(pc.greater(rows["bytes"], 0), pc.not_equal(reason, ""))
        rows = rows.set_column(rows.column_names.index("reason"), "reason", reason)
        for name, column in dict(documents=came, rows=pc.is_valid(came)).items():
            rows = rows.append_column(name, pc.cast(column, "int64"))
        parts.append(summed(rows))
    return summed(pyarrow.concat_tables(parts)).to_pylist()


def add(counts, key, row, *names):
    """Add numbers of a row: counts[key] = [sum of each name]."""
    counts[key] = [n + row[name] for n, name in zip(counts.get(key, [0] * len(names)), names)]


def total(rows):
    """
    The sums of rows as one: documents_in, bytes_in, documents, bytes, written, tokens, pii, and of each reason
    removed: [documents, bytes] and tokens_removed_about.
    """
    counts, reasons, about = {}, {}, {}
    for row in rows:
        reason = row["reason"].partition(":")[0]
        add(counts, "in", row, "documents", "bytes")
        add(reasons, reason, row, "documents", "bytes")
        add(about, reason, row, "about")
        if not reason:
            add(counts, "kept", row, "documents", "bytes", "written", "tokens", "email", "ip", "iban")
    documents, size, written, tokens, *pii = counts.get("kept", [0] * 7)
    return dict(
        documents_in=counts["in"][0],
        bytes_in=counts["in"][1],
        documents=documents,
        bytes=size,
        written=written,
        tokens=tokens,
        pii=dict(zip(("email", "ip", "iban"), pii)),
        removed={reason: reasons[reason] for reason in REASONS if reason in reasons},
        tokens_removed_about={reason: about[reason][0] for reason in REASONS if reason in reasons},
    )


def by(rows, *keys):
    """[{key: value, ..., **total}] of the rows with equal values."""
    members = {}
    for row in rows:
        members.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [dict(zip(keys, values), **total(members[values])) for values in sorted(members)]


def estimate(rows):
    """Set "about" of each row: its tokens, or those at the rate of the kept rows of its language, or of all."""
    kept = {}
    for row in rows:
        for key in (row["source"], row["language"]), None:
            if not row["reason"]:
                add(kept, key, row, "tokens", "bytes")
    for row in rows:
        tokens, size = kept.get((row["source"], row["language"])) or kept.get(None, (0, 1))
        # A withdrawn document has been tokenized.
        row["about"] = row["tokens"] or round(row["bytes"] * tokens / max(size, 1))


def opt_outs(folder, store):
    """The hosts by what the store has for them, and those that lost the most bytes to opt-outs."""
    hosts, lost = {}, {}
    for rows in ledger(folder, ["url", "reason", "bytes"]):
        for row in rows.to_pylist():
            host = host_key(row["url"]) if row["url"] else None
            if host and host not in hosts:
                hosts[host] = known(host, store)
            if host and row["reason"].partition(":")[0] in ("robots", "blocked-domain", *RESERVED):
                add(lost, host, dict(row, documents=1), "documents", "bytes")
    count = Counter(hosts.values())
    most = sorted(lost.items(), key=lambda one: (-one[1][1], one[0]))
    return dict(top_blocked_hosts=dict(most[:20]), hosts=dict(
        seen=len(hosts), with_file=count["with"], without=count["without"], unparsable=count["unparsable"],
        blocked=len(lost)))


def write_account(folder, meta, streams, about):
    """
    Write meta.json, report.json and report.md next to a ledger. Returns the report.

    meta: tokenizer, tokenizer_hash, vocab_size, bos and eos. streams: {source: {split: entries of its shards}}. about:
    run, inputs, ignored, rule, pii, probes and robots, as prepare.py knows them.
    """
    rows = sums(folder)
    estimate(rows)
    meta = {key: meta[key] for key in ("tokenizer", "tokenizer_hash", "vocab_size", "bos", "eos")}
    in_shards, unreadable, agents = {}, {}, {}
    for row in rows:
        reason, _, what = row["reason"].partition(":")
        if not reason:
            add(in_shards, (row["source"], row["split"]), row, "rows", "tokens", "written")
        if reason == "unreadable":
            unreadable[what] = [unreadable.get(what, [0])[0] + row["documents"], row["id"]]
        if reason == "robots":
            add(agents, what, row, "documents", "bytes")
    meta["sources"] = {source: {} for source in streams}
    for source, splits in streams.items():
        for split, entries in splits.items():
            sizes = zip(("documents", "tokens", "bytes"), in_shards.get((source, split), (0, 0, 0)))
            meta["sources"][source][split] = dict(sizes, shards=entries)
    meta["version"] = version(meta)
    report = dict(
        about,
        version=meta["version"],
        total=total(rows),
        table=by(rows, "source", "language"),
        licenses={one.pop("license"): one for one in by(rows, "license")},
        unreadable=unreadable,
        outputs=dict(shards=shards_of(meta), ledger=sha256(os.path.join(folder, FILE))),
    )
    report["pii"] = dict(about["pii"], **report["total"]["pii"])
    report["robots"] = about["robots"] and dict(about["robots"], removed_by_agent=agents)
    write_json(os.path.join(folder, "meta.json"), meta)
    write_json(os.path.join(folder, "report.json"), report)
    write_flushed(os.path.join(folder, "report.md"), markdown(report))
    return report


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
        f"# The documents of {run['out']}: kept and removed",
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
    """The hosts in the store of robots.txt, and the documents that it and other reservations removed."""
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
