"""
The audit of a data folder: every document that came in is kept or removed for a reason, and the numbers add up.

    in = kept + sum over reasons of removed      documents and bytes, for each source, language and licence, exactly

Tokens are counted for what was kept. What was removed is never tokenized: its tokens are estimated from its bytes, at
the rate of what was kept of the same source, language and licence, and every name of such a number says "about".

prepare.py fills an Audit and writes report.json (all numbers), report.md (for people) and removed.jsonl.gz (id, URL,
reason of each document that is not there; never its text).

$ python -m corpus.audit data/mine           # the invariants once more, from the files: counts, hashes of the shards
$ python -m corpus.audit data/mine --find=https://example.org/page    # was it trained on? an id, a URL, or a text
$ python -m corpus.audit data/mine --find=letter.txt --when=out/mine  # ... also nearly; and at which steps of a run

The second and third read kept.parquet (corpus/kept.py). The order of training is a pure function of seed and step
(data.py), so that nothing need have been written down for the third: not how often a run was stopped, nor on how many
ranks it was, nor over how many of them a window was split.
"""

import sys

if __name__ == "__main__" and not __package__:
    print("audit.py: start it from the project's root, python -m corpus.audit", file=sys.stderr)
    sys.exit(2)

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np

from corpus.heuristics import RULES
from corpus.reservations import RESERVED
from engine.files import read_json, sha256, version
from engine.plot import entry_of

paths = []                          # data folders whose audit is to be checked, or asked
find = ""                           # an id, a URL, a text or a file that holds one: is it in there?
similarity = 0.72                   # from which on another text is nearly the same (0.72: as near_dedup)
when = ""                           # with find: a run folder of train.py; the steps that have read what was found

# Reasons in the order of the rules, and what each says. "robots" is followed by agent and rule in removed.jsonl.gz.
REASONS = {
    "unreadable": "no text: not UTF-8, no JSON, binary, torn file",
    "empty": "nothing but white space",
    "blocked-domain": "the host is on a list of blocked domains",
    "robots": "robots.txt refuses the URL to an agent",
    "no-robots": "the host has no robots.txt (--missing=deny)",
    "unparsable": "what the host serves as robots.txt is none (--missing=deny)",
    "bad-url": "the URL is none (--missing=deny)",
    **RESERVED,
    "license": "licence not on the list",
    "language": "language not on the list",
    "length": "too short or too long",
    "score": "below the top share of its language",
    "above": "above the threshold of its language (toxicity)",
    "rate": "not drawn (random share)",
    **{name: f"{rule.says} ({rule.source})" for name, rule in RULES.items()},
    "contaminated": "contains an evaluation prompt",
    "tokens": "too few or too many tokens",
    "duplicate": "the same text was kept before",
    "near-duplicate": "nearly the same text was kept before",
    "withdrawn": "asked for or refused after the data were made (--remove)",
}


# ----------------------------------------------------------------------------------------------------------------------
# counting


class Audit:
    """
    Documents and bytes by (source, language, license): in, removed by reason, kept; and what hosts and files said.

    groups: {key: a table like empty()}, in the order in which they came. hosts: {hash of a host: "with", "without" or
    "unparsable" robots.txt}. robots: what corpus/sift.py counts of them, {name: [documents, bytes]}. columns: those of
    a row without text.
    """

    def __init__(self):
        self.groups = {}
        self.hosts = {}
        self.robots = dict(outcomes={}, blocked={}, agents={})
        self.columns = []

    def group(self, key):
        """The counts of (source, language, license), at first all zero. Groups are numbered as they come."""
        fresh = dict(empty(), number=len(self.groups))
        return self.groups.setdefault(tuple(key), fresh)

    def remove(self, key, reason, size):
        """A document of so many bytes that came in and goes."""
        add(self.group(key), dict(documents_in=1, bytes_in=size, removed={short(reason): [1, size]}))

    def keep(self, key, documents, size, written, pii):
        """Documents that came in and stay: bytes before and after personal data was replaced, {kind: replaced}."""
        add(self.group(key), dict(
            documents_in=documents,
            bytes_in=size,
            documents=documents,
            bytes=size,
            bytes_written=written,
            pii=pii))

    def hear(self, info):
        """What a batch saw of hosts and columns."""
        add(self.robots, info["robots"])
        # Six bytes stand for a host, because there may be millions of them.
        for host, known in info["hosts"].items():
            digest = hashlib.blake2b(host.encode(), digest_size=6).digest()
            self.hosts[digest] = known
        self.columns = self.columns or info["columns"]


def empty():
    """
    What is counted of a group: what came in, what of it was removed ({reason: [documents, bytes]}) and kept.

    bytes_written: after personal data was replaced. pii: {kind: replaced}. tokens_removed_about: {reason: estimate}.
    """
    return dict(
        documents_in=0,
        bytes_in=0,
        removed={},
        documents=0,
        bytes=0,
        bytes_written=0,
        tokens=0,
        pii={},
        tokens_removed_about={})


def add(table, more):
    """Add the numbers of `more` to those of a table, key by key: a number, a row of two numbers, or a table again."""
    for key, value in more.items():
        if isinstance(value, dict):
            add(table.setdefault(key, {}), value)
        elif isinstance(value, list):
            before = table.get(key, (0, 0))
            table[key] = [a + b for a, b in zip(before, value)]
        else:
            table[key] = table.get(key, 0) + value


def short(reason):
    """The reason without its particulars: robots:GPTBot:/x -> robots."""
    return reason.split(":")[0]


def total(groups):
    """The sum of groups. ValueError where in != kept + removed: a bug of prepare.py, whose numbers are then wrong."""
    out = empty()
    for group in groups:
        add(out, {name: group[name] for name in out})
    removed = out["removed"]
    for i, name in enumerate(("documents", "bytes")):
        came = out[f"{name}_in"]
        kept = out[name]
        gone = sum(row[i] for row in removed.values())
        if came != kept + gone:
            raise ValueError(f"the audit does not add up: {came} {name} in, {kept} kept, {gone} removed")
    out["removed"] = {reason: removed[reason] for reason in REASONS if reason in removed}
    return out


def totals(groups, part):
    """{part(key): the total of the groups with that part of their key}, in order."""
    members = {}
    for key in sorted(groups):
        members.setdefault(part(key), []).append(groups[key])
    return {name: total(members[name]) for name in sorted(members)}


def estimate(groups):
    """
    Set tokens_removed_about of each group: the bytes of what was removed times the tokens per byte of what was kept.

    Where nothing of a group was kept, the tokens per byte are those of all groups.
    """
    everything = total(groups)
    for group in groups:
        like = group if group["bytes_written"] else everything
        for reason, (_, size) in group["removed"].items():
            tokens = size * like["tokens"] / like["bytes_written"]
            group["tokens_removed_about"][reason] = round(tokens)


def build(audit, run, inputs, ignored, outputs, robots, pii, probes):
    """
    report.json as a dict; see the module docstring.

    run, inputs, ignored, outputs, pii, probes: what prepare.py knows of them. robots: the same, None if no store was
    asked. Something was kept, or there is nothing to report.
    """
    groups = audit.groups
    estimate(groups.values())
    everything = total(groups.values())
    languages = totals(groups, lambda key: key[:2])
    licenses = totals(groups, lambda key: key[2])
    short_of = ("documents", "bytes", "tokens")
    return dict(
        run=run,
        inputs=inputs,
        ignored=ignored,
        total=everything,
        robots=robots and {**robots, **opt_outs(audit, everything)},
        probes=probes,
        pii={**pii, **everything["pii"]},
        table=[dict(source=source, language=language, **t) for (source, language), t in languages.items()],
        licenses={name: {key: t[key] for key in short_of} for name, t in licenses.items()},
        outputs=outputs)


def opt_outs(audit, everything):
    """What is known of the hosts, and what their robots.txt and the list of blocked domains removed."""
    known = Counter(audit.hosts.values())
    outcomes, blocked, agents = audit.robots.values()
    # The hosts that lost the most bytes come first.
    top = sorted(blocked.items(), key=lambda host: (-host[1][1], host[0]))
    removed = everything["removed"]
    gone = sum(removed[reason][1] for reason in ("robots", "blocked-domain", *RESERVED) if reason in removed)
    return dict(
        hosts=dict(
            seen=len(audit.hosts),
            with_file=known["with"],
            without=known["without"],
            unparsable=known["unparsable"],
            blocked=len(blocked)),
        outcomes=dict(sorted(outcomes.items())),
        removed_by_agent=dict(sorted(agents.items())),
        top_blocked_hosts=dict(top[:20]),
        share_of_bytes_removed=gone / everything["bytes_in"])


# ----------------------------------------------------------------------------------------------------------------------
# for people: report.md is a list of blocks, each a heading, a paragraph or a table, with an empty line in between


def percent(part, whole):
    """One decimal, but what is not nothing never reads 0.0 %, and what is not all never 100.0 %."""
    if not whole:
        return "-"
    share = 100 * part / whole
    if 0 < share < 0.05:
        return "< 0.1 %"
    if 99.95 <= share < 100:
        return "> 99.9 %"
    return f"{share:.1f} %"


def table(names, rows, at_most=None):
    """
    A table of Markdown, of which report.json has the rows after the first at_most.

    rows: a tuple each, as long as names. Whole numbers get commas, floats (MB) two decimals, text stays.
    """
    def cell(value):
        if isinstance(value, int):
            return f"{value:,}"
        return f"{value:,.2f}" if isinstance(value, float) else value

    def line(values):
        return "| " + " | ".join(map(cell, values)) + " |"

    lines = [line(names), "|" + "---|" * len(names)]
    lines += map(line, rows[:at_most])
    if at_most and len(rows) > at_most:
        lines.append(f"\nand {len(rows) - at_most} more in report.json")
    return "\n".join(lines)


def about(estimate, exact=0):
    """The sum of two numbers of tokens, with the sign of an estimate if the first is not 0."""
    tokens = exact + estimate
    return f"\u2248 {tokens:,}" if estimate else f"{tokens:,}"


def markdown(report):
    """
    report.md: the numbers of report.json as sentences and tables, as one str.

    report: what build() returned. Each section below is a function of its part of the report, and returns a block or a
    list of blocks.
    """
    run = report["run"]
    return "\n\n".join([
        f"# What is in {run['out']}, and what is not",
        *flow(report["total"], run["tokenizer"]),
        "## Opt-outs",
        *opt_out_blocks(report["robots"]),
        *reservation_blocks(report["total"]["removed"]),
        "## Personal data",
        personal_data(report["pii"]),
        *probe_blocks(report["probes"]),
        "## By source and language",
        by_language(report["table"]),
        "## Licences of what was kept",
        by_license(report["licenses"]),
        "## Inputs and outputs",
        *files(report["inputs"], report.get("ignored"), report["outputs"]["shards"]),
        report["outputs"]["rule"],
        *([f"Version {report['outputs']['version']}."] if "version" in report["outputs"] else []),
        f"```\n{run['command']}\n```"]) + "\n"


def flow(t, tokenizer):
    """
    From what came in to what was kept, rule by rule, with the share that each rule took.

    t: a total(). tokenizer: its name, which says what a token is.
    """
    vocabulary = "the vocabulary in tokenizer.json" if tokenizer == "tokenizer.json" else tokenizer
    came = t["documents_in"]
    kept = t["documents"]
    estimates = t["tokens_removed_about"]
    tokens = about(sum(estimates.values()), t["tokens"])
    rows = [("came in", came, "", t["bytes_in"] / 1e6, tokens)]
    for reason, (n, size) in t["removed"].items():
        tokens = about(estimates[reason])
        rows.append((f"{reason}: {REASONS[reason]}", n, percent(n, came), size / 1e6, tokens))
    share = percent(kept, came)
    rows.append(("**kept**", f"**{kept:,}**", share, t["bytes"] / 1e6, f"**{t['tokens']:,}**"))
    removed = "Every other document was removed, each for one reason:" if t["removed"] else "Nothing was removed."
    return [f"{came:,} documents ({t['bytes_in'] / 1e6:,.1f} MB) came in; {kept:,} stayed, "
            f"{percent(t['bytes'], t['bytes_in'])} of the bytes: {t['tokens']:,} tokens of {vocabulary}. {removed}",
            table(("", "documents", "of all", "MB", "tokens"), rows),
            "in = kept + removed, to the document and to the byte. Numbers with \u2248 are estimates from bytes: what "
            "is removed is never tokenized."]


def opt_out_blocks(robots):
    """Whose robots.txt was asked, and what that removed, by agent and by host."""
    if not robots:
        return ["No robots.txt was consulted (`--robots`): nothing is said here on whether the authors have opted out."]
    hosts = robots["hosts"]
    # Without a robots.txt a host may mean either; --missing says which it is taken for.
    silent = "consent missing" if robots["missing"] == "deny" else "no opt-out"
    blocks = [f"{hosts['seen']:,} hosts: {hosts['with_file']:,} with a robots.txt in the store, "
              f"{hosts['without']:,} without (read as {silent}), {hosts['unparsable']:,} that serve something else. "
              f"{hosts['blocked']:,} hosts lost documents, {percent(robots['share_of_bytes_removed'], 1)} of the "
              "bytes; Apertus lost about 8 % of its English and 4 % of its other tokens."]
    if hosts["seen"] and not hosts["with_file"] + hosts["unparsable"]:
        blocks.append("**The store knows none of these hosts**: nothing is said here on whether their authors have "
                      "opted out.")
    agents = ", ".join(f"{agent} {n:,}" for agent, (n, _) in robots["removed_by_agent"].items())
    if agents:
        blocks.append("Documents by the agent whose rules say no (`*`: the rules for every agent that is not named): "
                      f"{agents}.")
    rows = [(host, n, size / 1e6) for host, (n, size) in robots["top_blocked_hosts"].items()]
    if rows:
        blocks.append(table(("host", "documents", "MB"), rows))
    return blocks


def reservation_blocks(removed):
    """What was removed for opt-outs beyond robots.txt."""
    found = ", ".join(f"{reason} {removed[reason][0]:,}" for reason in RESERVED if reason in removed)
    return [f"Documents removed because the page, its headers or a file of its host reserve it "
            f"(corpus/reservations.py): {found}."] if found else []


def personal_data(pii):
    """Whether personal data was replaced, how much, and whether code was left alone."""
    if not pii["scrubbed"]:
        return "Personal data was not replaced (`--pii=False`)."
    code = "" if pii["in_code"] else " Code was left as it is, as Apertus left it (`--pii_in_code`)."
    names = dict(email="e-mail addresses", ip="IP addresses", iban="IBANs")
    replaced = ", ".join(f"{pii.get(kind, 0):,} {name}" for kind, name in names.items())
    return f"Replaced by tokens of their own: {replaced}.{code}"


def probe_blocks(probes):
    """The passages that --probes planted, which no other number of the report counts."""
    if not probes:
        return []
    times = ", ".join(map(str, probes["repetitions"]))
    return ["## Memorisation probes",
            f"{probes['passages']:,} passages of {probes['file']} stand {times} times in the training split, as "
            f"{probes['documents']:,} documents of {probes['tokens']:,} tokens that are not counted above "
            "(probes.json)."]


def by_language(groups):
    """One row for each source and language, the largest first."""
    rows = []
    for group in sorted(groups, key=lambda group: -group["bytes_in"]):
        gone = ", ".join(f"{reason} {n:,}" for reason, (n, _) in group["removed"].items())
        tokens = group["tokens"]
        rows.append((
            group["source"],
            group["language"] or "?",
            group["documents_in"],
            gone or "-",
            group["documents"],
            group["bytes"] / 1e6,
            tokens,
            group["bytes_written"] / tokens if tokens else 0.0))
    names = ("source", "language", "documents in", "removed", "kept", "MB kept", "tokens", "bytes/token")
    return table(names, rows, at_most=60)


def by_license(licenses):
    """One row for each licence of which something was kept, the largest first."""
    by_size = sorted(licenses.items(), key=lambda license: -license[1]["bytes"])
    rows = []
    for name, t in by_size[:40]:
        if t["documents"]:
            rows.append((name or "not stated", t["documents"], t["bytes"] / 1e6, t["tokens"]))
    return table(("licence", "documents", "MB", "tokens"), rows)


def files(inputs, ignored, shards):
    """What was read, what was passed over, by its ending, and what was written, by the first half of a hash."""
    read = []
    for file in inputs:
        problem = f" ({file['problem']})" if file["problem"] else ""
        sha = file["sha256"] or "?"
        read.append((file["name"] + problem, file["bytes"], sha[:16]))
    written = [(shard["file"], shard["tokens"], shard["sha256"][:16]) for shard in shards]
    nothing = [("none: this was a dry run", "", "")]
    others = ", ".join(f"{kind} {n:,}" for kind, n in (ignored or {}).items())
    return [table(("input", "bytes", "sha256"), read, at_most=40),
            *([f"Files in these folders that are of no kind that can be read: {others}."] if others else []),
            table(("shard", "tokens", "sha256"), written or nothing)]


# ----------------------------------------------------------------------------------------------------------------------
# the check


def verify(folder):
    """
    Count again, from the files themselves: the lines of removed.jsonl.gz, the documents and the sha256 of each shard,
    the sums of the table. ValueError, one line, at the first that is not what report.json says. Returns the report.
    """
    folder = Path(folder)
    path = folder / "report.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no report.json: want a folder that prepare.py wrote")
    report = json.loads(path.read_bytes())
    t = total(report["table"])
    if t != report["total"]:
        raise ValueError(f"{path}: the rows of the table are not the total")
    with gzip.open(folder / "removed.jsonl.gz") as lines:
        removed = dict(Counter(short(json.loads(line)["reason"]) for line in lines))
    if removed != {reason: n for reason, (n, _) in t["removed"].items()}:
        raise ValueError(f"{folder}: removed.jsonl.gz has {removed}, report.json {t['removed']}")
    outputs = report["outputs"]
    documents = tokens = 0
    begins_of = {}
    for shard in outputs["shards"]:
        file = folder / shard["file"]
        if sha256(file) != shard["sha256"]:
            raise ValueError(f"{file} is not what prepare.py wrote: another sha256")
        length, places = begins_in(file, outputs["bos"])
        tokens += length
        documents += len(places)
        begins_of[shard["file"]] = places
    probes = report["probes"] or dict(documents=0, tokens=0)
    # A document that is alone is cut in two, for training and for validation, and then begins twice.
    begins = t["documents"] + outputs["halved"] + probes["documents"]
    if (documents, tokens) != (begins, t["tokens"] + probes["tokens"]):
        raise ValueError(f"{folder}: {documents} documents and {tokens} tokens in the shards, {t['documents']} and "
                         f"{t['tokens']} kept and {probes['documents']} and {probes['tokens']} of probes in the report")
    verify_kept(folder, outputs, begins_of, tokens)
    return report


def begins_in(file, bos):
    """(tokens of a shard, where documents begin in it: int64). Eight million tokens are in memory at a time."""
    found, at = [np.zeros(0, np.int64)], 0
    with open(file, "rb") as f:
        np.lib.format.read_magic(f)
        _, _, dtype = np.lib.format.read_array_header_1_0(f)
        while raw := f.read(dtype.itemsize << 23):
            piece = np.frombuffer(raw, dtype)
            found.append(at + np.flatnonzero(piece == bos))
            at += len(piece)
    return at, np.concatenate(found)


def verify_kept(folder, outputs, begins_of, tokens):
    """
    The same of kept.parquet: its sha256, a row for each begin in the shards, in sum all of their tokens.

    begins_of: {shard: where documents begin in it}.
    """
    from corpus.kept import tables
    said = outputs.get("kept")
    # Data of the older format have none.
    if not said:
        return
    path = folder / said["file"]
    if not path.is_file() or sha256(path) != said["sha256"]:
        raise ValueError(f"{path} is not what prepare.py wrote: another sha256")
    meta = json.loads((folder / "meta.json").read_bytes())
    if not version(meta) == meta["version"] == outputs["version"]:
        raise ValueError(f"{folder}: meta.json and report.json are of two versions of the data")
    n = total = 0
    for _, table in tables(folder):
        n += len(table)
        total += int(table["tokens"].to_numpy().sum())
        names, offsets = table["shard"].to_numpy(), table["offset"].to_numpy()
        for name in np.unique(names):
            if not np.isin(offsets[names == name], begins_of[name]).all():
                raise ValueError(f"{path}: a document of {name} does not begin where it says")
    begins = sum(map(len, begins_of.values()))
    if (n, total) != (begins, tokens):
        raise ValueError(f"{path} has {n} documents and {total} tokens, the shards {begins} and {tokens}")


# ----------------------------------------------------------------------------------------------------------------------
# the questions


def ask(folder):
    """Print whether what `find` names is in a data folder, and with `when` at which steps of that run it was read."""
    from corpus import kept
    read_by = reader(when) if when else None
    found = kept.find(folder, find, similarity)
    short_name = repr(find if len(find) <= 60 else find[:57] + "...")
    for how, row in found:
        about = ", ".join(filter(None, (row["url"], row["license"], row["language"])))
        print(f"{row['id']} is in {folder}, by {how}: {row['tokens']:,} tokens of source {row['source']}, "
              f"{row['split']}, from token {row['offset']:,} of {row['shard']} on" + (f" ({about})" if about else ""))
        if read_by:
            print(f"    {read_by(row)}")
    for line in kept.removed_of(folder, find):
        print(f"{line['id']} came in and was removed: {line['reason']}")
        found.append(line)
    if not found:
        print(f"{short_name} is not in {folder}: {kept.near_names(folder, find)}")


def reader(run):
    """
    A function: a row of kept.parquet -> a sentence that says at which steps the run has read that document.

    ValueError: not a run of train.py, or its data are no longer what it read.
    """
    from corpus.when import data_of_run, samples_of
    from schedule import samples_at, steps_in
    path = Path(run, "config.json")
    config = read_json(path) if path.is_file() else {}
    if not {"data_hash", "block_size", "batch_size"} <= config.keys():
        raise ValueError(f"{run} is not a run of train.py: want its folder, with config.json and log.jsonl")
    batch = config["batch_size"], config["batch_ramp_at"] or None
    done = steps_done(Path(run, "log.jsonl"))
    until = samples_at(done, *batch)
    data = data_of_run(config, until)

    def said(row):
        if row["split"] != "train":
            return f"for validation: no step of {run} has learnt from it"
        shard = Path(row["folder"], row["shard"])
        samples = samples_of(data, shard, row["offset"], row["tokens"], until)
        steps = Counter(steps_in(int(sample), *batch) for sample in samples)
        # Tokens of the run, from its begin to that of the step and to its end.
        spans = [[samples_at(step + more, *batch) * config["block_size"] for more in (0, 1)] for step in sorted(steps)]
        rows = [f"{step} (tokens {begin:,} to {end:,})" for step, (begin, end) in zip(sorted(steps), spans)]
        if not rows:
            return f"none of the {done:,} steps of {run} has read it"
        begins = f"; it began from {config['init_from']}, which is another run" if config.get("init_from") else ""
        rest = f" and {len(rows) - 10:,} more" if len(rows) > 10 else ""
        return f"read at {len(rows):,} of the {done:,} steps of {run}: {', '.join(rows[:10])}{rest}{begins}"
    return said


def steps_done(path):
    """The steps in the log of a run: numbered from 0, so one more than the last. ValueError if there is none."""
    if not path.is_file():
        raise ValueError(f"{path} is not there: it says how many steps the run has done")
    with open(path, encoding="utf-8", errors="replace") as lines:
        entries = filter(None, map(entry_of, lines))
        return 1 + max((entry["step"] for entry in entries if "lr" in entry), default=-1)


def main():
    from corpus.kept import folders_of
    if when and not find:
        raise ValueError(f"when={when}: say which document, --find=ID, URL, text or file")
    if find:
        for folder in paths or ["data/stdlib"]:
            ask(folder)
        return
    places = []
    for folder in paths or ["data/stdlib"]:
        # What --join joined is checked where it lies.
        joined = "parts" in read_json(Path(folder, "report.json")) if Path(folder, "report.json").is_file() else False
        places += folders_of(folder) if joined else [folder]
    for folder in places:
        t = verify(folder)["total"]
        gone = sum(n for n, _ in t["removed"].values())
        print(f"{folder}: {t['documents_in']:,} in = {t['documents']:,} kept + {gone:,} removed; "
              f"{t['tokens']:,} tokens in the shards; all hashes as written")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
