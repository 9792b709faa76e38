"""
The audit of a data folder: every document that came in is kept or removed for a reason, and the numbers add up.

    in = kept + sum over reasons of removed            documents and bytes, for each source, language and licence, exactly

Tokens are counted for what was kept. What was removed is never tokenized: its tokens are estimated from its bytes, at the rate of
what was kept of the same source, language and licence, and every name of such a number says "about".

prepare.py fills an Audit and writes report.json (all numbers), report.md (for people), flow.png (documents from input to kept)
and removed.jsonl.gz (id, URL, reason of each document that is not there; never its text). The last section of report.md is the
text for the boxes of the EU's public summary of training content: see eu_summary.

$ python -m corpus.audit data/mine                # the invariants once more, from the files: counts, hashes of the shards
"""

import sys

if __name__ == "__main__" and not __package__:
    print("audit.py: start it from the project's root, python -m corpus.audit", file=sys.stderr)
    sys.exit(2)

import gzip
import hashlib
import json
import os

import numpy as np

paths = []                          # data folders whose audit is to be checked

# Reasons in the order in which the rules stand, and what each says. "robots" is followed by agent and rule in removed.jsonl.gz.
REASONS = {
    "unreadable": "no text: not UTF-8, no JSON, binary, torn file",
    "empty": "nothing but white space",
    "blocked-domain": "the host is on a list of blocked domains",
    "robots": "robots.txt refuses the URL to an agent",
    "no-robots": "the host has no robots.txt (--missing=deny)",
    "unparsable": "what the host serves as robots.txt is none (--missing=deny)",
    "bad-url": "the URL is none (--missing=deny)",
    "license": "licence not on the list",
    "language": "language not on the list",
    "length": "too short or too long",
    "score": "below the top share of its language",
    "above": "above the threshold of its language (toxicity)",
    "rate": "not drawn (random share)",
    "contaminated": "contains an evaluation prompt",
    "duplicate": "the same text was kept before",
    "near-duplicate": "nearly the same text was kept before",
}


class Audit:
    """Documents and bytes by (source, language, license): in, removed by reason, kept; and what hosts and files said."""

    def __init__(self):
        self.groups, self.order, self.hosts, self.columns, self.dates = {}, {}, {}, [], [None, None]
        self.outcomes, self.blocked, self.agents = {}, {}, {}

    def group(self, key):
        self.order.setdefault(tuple(key), len(self.order))
        return self.groups.setdefault(tuple(key), empty())

    def remove(self, key, reason, size, documents=1):
        """Documents that came in and go."""
        group = self.group(key)
        row = group["removed"].setdefault(short(reason), [0, 0])
        row[0] += documents
        row[1] += size
        group["documents_in"] += documents
        group["bytes_in"] += size

    def keep(self, key, documents, size, written, pii):
        """Documents that came in and stay: bytes before and after personal data was replaced, {kind: replaced}."""
        group = self.group(key)
        for name, n in dict(documents_in=documents, bytes_in=size, documents=documents, bytes=size, bytes_written=written).items():
            group[name] += n
        for kind, n in pii.items():
            group["pii"][kind] = group["pii"].get(kind, 0) + n

    def hear(self, info):
        """What a batch saw of hosts, dates and columns."""
        robots = info["robots"]
        self.hosts.update({hashlib.blake2b(host.encode(), digest_size=6).digest(): known for host, known in robots["hosts"].items()})
        for mine, theirs in ((self.outcomes, robots["outcomes"]), (self.blocked, robots["blocked"]), (self.agents, robots["agents"])):
            for name, (n, size) in theirs.items():
                row = mine.setdefault(name, [0, 0])
                row[0], row[1] = row[0] + n, row[1] + size
        self.columns = self.columns or info["columns"]
        dates = [d for d in (*self.dates, *info["dates"]) if d]
        self.dates = [min(dates), max(dates)] if dates else [None, None]

    def number(self, key):
        """Groups are numbered as they come: the column "group" of prepare.py."""
        self.group(key)
        return self.order[tuple(key)]

    def about(self):
        """{source: documents kept by language and by licence}, for meta.json."""
        out = {}
        for (source, language, license), group in sorted(self.groups.items()):
            if group["documents"]:
                mine = out.setdefault(source, dict(languages={}, licenses={}))
                for table, name in ((mine["languages"], language), (mine["licenses"], license)):
                    table[name or "?"] = table.get(name or "?", 0) + group["documents"]
        return out


def empty():
    return dict(documents_in=0, bytes_in=0, removed={}, documents=0, bytes=0, bytes_written=0, tokens=0, pii={}, tokens_removed_about={})


def short(reason):
    """The reason without its particulars: robots:GPTBot:/x -> robots."""
    return reason.split(":")[0]


def total(groups):
    """The sum of rows. ValueError where in != kept + removed: then prepare.py has a bug, and its numbers are not to be believed."""
    out = empty()
    for group in groups:
        for name in out:
            if name == "removed":
                for reason, (n, size) in group["removed"].items():
                    row = out["removed"].setdefault(reason, [0, 0])
                    row[0], row[1] = row[0] + n, row[1] + size
            elif isinstance(out[name], dict):
                for kind, n in group.get(name, {}).items():
                    out[name][kind] = out[name].get(kind, 0) + n
            else:
                out[name] += group[name]
    for i, name in enumerate(("documents", "bytes")):
        gone = sum(row[i] for row in out["removed"].values())
        if out[f"{name}_in"] != out[name] + gone:
            raise ValueError(f"the audit does not add up: {out[f'{name}_in']} {name} in, {out[name]} kept, {gone} removed")
    out["removed"] = {reason: out["removed"][reason] for reason in REASONS if reason in out["removed"]}
    return out


def estimate(groups):
    """tokens_removed_about of each group, by its tokens per byte, or by those of all groups where nothing of it was kept."""
    kept = total(groups)
    for group in groups:
        tokens, size = (group["tokens"], group["bytes_written"]) if group["bytes_written"] else (kept["tokens"], kept["bytes_written"])
        group["tokens_removed_about"] = {reason: round(n * tokens / max(size, 1)) for reason, (_, n) in group["removed"].items()}


def build(audit, run, inputs, outputs, robots, pii, probes):
    """report.json as a dict; see the module docstring. run, inputs, outputs: what prepare.py knows of them."""
    estimate(audit.groups.values())
    everything = total(audit.groups.values())
    table = {}
    for (source, language, _), group in sorted(audit.groups.items()):
        table.setdefault((source, language), []).append(group)
    licences = {}
    for (_, _, license), group in audit.groups.items():
        licences.setdefault(license, []).append(group)
    known = list(audit.hosts.values())
    hosts = dict(seen=len(known), with_file=known.count("with"), without=known.count("without"), unparsable=known.count("unparsable"))
    block = None
    if robots:
        gone = sum(everything["removed"].get(r, (0, 0))[1] for r in ("robots", "blocked-domain"))
        top = sorted(audit.blocked.items(), key=lambda kv: (-kv[1][1], kv[0]))
        block = dict(robots, hosts=dict(hosts, blocked=len(audit.blocked)), outcomes=dict(sorted(audit.outcomes.items())),
                     removed_by_agent=dict(sorted(audit.agents.items())), top_blocked_hosts=dict(top[:20]),
                     share_of_bytes_removed=gone / max(everything["bytes_in"], 1), published_share=dict(english=0.08, multilingual=0.04))
    return dict(run=run, inputs=inputs, total=everything, dates=audit.dates, robots=block, probes=probes,
                pii=dict(pii, **everything["pii"]), table=[dict(source=s, language=l, **total(g)) for (s, l), g in table.items()],
                licenses={name: {k: total(g)[k] for k in ("documents", "bytes", "tokens")} for name, g in sorted(licences.items())},
                outputs=outputs)


# ----------------------------------------------------------------------------------------------------------------------
# for people


def percent(part, whole):
    """One decimal, but what is not nothing never reads 0.0 %, and what is not all never 100.0 %."""
    if not whole:
        return "-"
    share = 100 * part / whole
    return "< 0.1 %" if 0 < share < 0.05 else "> 99.9 %" if 99.95 <= share < 100 else f"{share:.1f} %"


def cells(*values):
    """A row of a table: numbers with commas, bytes as MB are floats."""
    return "| " + " | ".join(f"{v:,}" if isinstance(v, int) else f"{v:,.2f}" if isinstance(v, float) else str(v) for v in values) + " |"


def header(*names):
    return [cells(*names), "|" + "---|" * len(names)]


def about(*estimates, exact=0):
    """A sum of tokens, with the sign of what is estimated if anything is."""
    return f"\u2248 {exact + sum(estimates):,}" if any(estimates) else f"{exact:,}"


def replaced(report):
    names = dict(email="e-mail addresses", ip="IP addresses", iban="IBANs")
    return ", ".join(f"{report['pii'].get(kind, 0):,} {name}" for kind, name in names.items())


def markdown(report):
    """report.md: the same numbers as sentences and tables."""
    t, run, robots = report["total"], report["run"], report["robots"]
    vocabulary = "the vocabulary in tokenizer.json" if run["tokenizer"] == "tokenizer.json" else run["tokenizer"]
    lines = [f"# What is in {run['out']}, and what is not", "",
             f"{t['documents_in']:,} documents ({t['bytes_in'] / 1e6:,.1f} MB) came in; {t['documents']:,} stayed, "
             f"{percent(t['bytes'], t['bytes_in'])} of the bytes: {t['tokens']:,} tokens of {vocabulary}. "
             + ("Every other document was removed, each for one reason:" if t["removed"] else "Nothing was removed."), "",
             *header("", "documents", "of all", "MB", "tokens"),
             cells("came in", t["documents_in"], "", t["bytes_in"] / 1e6, about(*t["tokens_removed_about"].values(), exact=t["tokens"]))]
    for reason, (n, size) in t["removed"].items():
        tokens = about(t["tokens_removed_about"][reason])
        lines.append(cells(f"{reason}: {REASONS[reason]}", n, percent(n, t["documents_in"]), size / 1e6, tokens))
    share = percent(t["documents"], t["documents_in"])
    lines += [cells("**kept**", f"**{t['documents']:,}**", share, t["bytes"] / 1e6, f"**{t['tokens']:,}**"), "",
              "in = kept + removed, to the document and to the byte. Numbers with \u2248 are estimates from bytes: what is removed is "
              "never tokenized.", "", "## Opt-outs", ""]
    if robots:
        h, denied = robots["hosts"], "consent missing" if robots["missing"] == "deny" else "no opt-out"
        lines += [f"{h['seen']:,} hosts: {h['with_file']:,} with a robots.txt in the store, {h['without']:,} without (read as {denied}), "
                  f"{h['unparsable']:,} that serve something else. {h['blocked']:,} hosts lost documents, "
                  f"{percent(robots['share_of_bytes_removed'], 1)} of the bytes; Apertus lost about 8 % of its English "
                  "and 4 % of its other tokens.", ""]
        if h["seen"] and not h["with_file"] + h["unparsable"]:
            lines += ["**The store knows none of these hosts**: nothing is said here on whether their authors have opted out.", ""]
        if robots["removed_by_agent"]:
            by_agent = ", ".join(f"{agent} {n:,}" for agent, (n, _) in robots["removed_by_agent"].items())
            lines += [f"Documents by the agent whose rules say no (`*`: the rules for every agent that is not named): {by_agent}.", ""]
        if robots["top_blocked_hosts"]:
            rows = [cells(host, n, size / 1e6) for host, (n, size) in robots["top_blocked_hosts"].items()]
            lines += [*header("host", "documents", "MB"), *rows, ""]
    else:
        lines += ["No robots.txt was consulted (`--robots`): nothing is said here on whether the authors have opted out.", ""]
    lines += ["## Personal data", ""]
    if report["pii"]["scrubbed"]:
        lines.append(f"Replaced by tokens of their own: {replaced(report)}."
                     + ("" if report["pii"]["in_code"] else " Code was left as it is, as Apertus left it (`--pii_in_code`)."))
    else:
        lines.append("Personal data was not replaced (`--pii=False`).")
    if report["probes"]:
        p = report["probes"]
        times = ", ".join(map(str, p["repetitions"]))
        lines += ["", "## Memorisation probes", "",
                  f"{p['passages']:,} passages of {p['file']} stand {times} times in the training split, as {p['documents']:,} documents "
                  f"of {p['tokens']:,} tokens that are not counted above (probes.json)."]
    rows = sorted(report["table"], key=lambda r: -r["bytes_in"])
    lines += ["", "## By source and language", "",
              *header("source", "language", "documents in", "removed", "kept", "MB kept", "tokens", "bytes/token")]
    for r in rows[:60]:
        gone = ", ".join(f"{reason} {n:,}" for reason, (n, _) in r["removed"].items()) or "-"
        each = r["bytes_written"] / r["tokens"] if r["tokens"] else 0.0
        lines.append(cells(r["source"], r["language"] or "?", r["documents_in"], gone, r["documents"], r["bytes"] / 1e6, r["tokens"], each))
    if len(rows) > 60:
        lines.append(f"\nand {len(rows) - 60} more in report.json")
    by_size = sorted(report["licenses"].items(), key=lambda kv: -kv[1]["bytes"])
    lines += ["", "## Licences of what was kept", "", *header("licence", "documents", "MB", "tokens")]
    lines += [cells(name or "not stated", r["documents"], r["bytes"] / 1e6, r["tokens"]) for name, r in by_size[:40] if r["documents"]]
    lines += ["", "## Inputs and outputs", "", *header("input", "bytes", "sha256")]
    for file in report["inputs"][:40]:
        problem = f" ({file['problem']})" if file["problem"] else ""
        lines.append(cells(file["name"] + problem, file["bytes"], (file["sha256"] or "?")[:16]))
    if len(report["inputs"]) > 40:
        lines.append(f"\nand {len(report['inputs']) - 40} more in report.json")
    lines += ["", *header("shard", "tokens", "sha256")]
    shards = [cells(s["file"], s["tokens"], s["sha256"][:16]) for s in report["outputs"]["shards"]]
    lines += shards or [cells("none: this was a dry run", "", "")]
    lines += ["", report["outputs"]["rule"], "", "```", run["command"], "```", "", *eu_summary(report)]
    return "\n".join(lines) + "\n"


def eu_summary(report):
    """
    The boxes of the form that this data can fill, as text to paste and to correct.

    The form: European Commission, Template for the Public Summary of Training Content for general-purpose AI models, C(2025) 8311
    final of 5 December 2025 (first published on 24 July 2025), for art. 53(1)(d) of the AI Act. Its section numbers, the three ranges
    of tokens and the titles of the boxes are those of the forms that Apertus (1 September 2025, swiss-ai/apertus-data-transparency)
    and Cohere (Command A+, 10 September 2026) filled in, which agree; the Commission's own file was not at hand. The form counts the
    data of a model after filtering, from all its folders and for each modality.
    """
    t, robots, tokens = report["total"], report["robots"], report["total"]["tokens"]
    bracket = "Less than 1 billion" if tokens < 1e9 else "1 billion to 10 trillion" if tokens <= 1e13 else "More than 10 trillion"
    languages = {}
    for r in report["table"]:
        languages[r["language"] or "not stated"] = languages.get(r["language"] or "not stated", 0) + r["bytes"]
    common = [name for name in sorted(languages, key=languages.get, reverse=True) if languages[name]]
    files = [f["name"] for f in report["inputs"] if not f["problem"]]
    latest = (report["dates"][1] or "")[:10] or "not stated in the data; write it here"
    lines = ["## For the EU public summary of training content", "",
             "Text to paste, and to correct, for the boxes of the Commission's template C(2025) 8311 (AI Act, art. 53(1)(d)) that these "
             "files can fill; section numbers are the template's. A model trained on more than this folder adds up all of them. Check the "
             "wording against the current template: it was taken from published forms, not from the Commission's file.", "",
             f"- 1.3 Modality: Text. Training data size: {bracket} tokens ({tokens:,} tokens of {report['run']['tokenizer']}, "
             f"{t['bytes_written'] / 1e9:,.3f} GB).",
             f"- 1.3 Latest date of data acquisition/collection for model training: {latest}.",
             f"- 1.3 Linguistic characteristics: {len(common):,} language{'s' * (len(common) != 1)}, by size: {', '.join(common[:10])}"
             f"{f' and {len(common) - 10:,} more' if len(common) > 10 else ''}.",
             f"- 2 Data sources: {', '.join(files[:10])}{f' and {len(files) - 10:,} more files' if len(files) > 10 else ''}. "
             "(2.1 if public, 2.2 if licensed or private, 2.3 if crawled by you: that is not in the files.)"]
    if robots:
        gone = sum(t["removed"].get(reason, (0, 0))[0] for reason in ("robots", "blocked-domain", "no-robots", "unparsable", "bad-url"))
        silent = "left out" if robots["missing"] == "deny" else "taken as not having opted out"
        lines.append(f"- 3.1 Reservations of rights: robots.txt of {robots['hosts']['with_file']:,} hosts, applied to documents of any "
                     f"date, for {len(robots['agents']):,} agents ({', '.join(robots['agents'][:4])}, ...); {gone:,} documents removed. "
                     f"A host without a file was {silent}.")
    else:
        lines.append("- 3.1 Reservations of rights: none was looked up.")
    lines.append(f"- 3.3 Personal data: {'replaced: ' + replaced(report) if report['pii']['scrubbed'] else 'not replaced'}.")
    others = ("license", "score", "above", "contaminated", "duplicate", "near-duplicate")
    measures = ", ".join(f"{reason} {t['removed'][reason][0]:,}" for reason in others if reason in t["removed"])
    lines.append(f"- 3.2, 3.3 Other measures (documents removed): {measures or 'none'}.")
    return lines


def picture(report, path):
    """flow.png: the documents that are left after each rule, from all that came in down to what was kept."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    t = report["total"]
    left, bars = t["documents_in"], [("came in", t["documents_in"], 0)]
    for reason, (n, _) in t["removed"].items():
        left -= n
        bars.append((reason, left, n))
    bars.append(("kept", left, 0))
    figure, axis = plt.subplots(figsize=(9, 0.8 + 0.42 * len(bars)), layout="constrained")
    for y, (name, n, gone) in enumerate(bars):
        axis.barh(y, n, color="C0" if gone else "C2" if name == "kept" else "C7", height=0.7)
        axis.barh(y, gone, left=n, color="C3", height=0.7)
        number = f" \u2212{gone:,} ({percent(gone, t['documents_in'])})" if gone else f" {n:,}"
        axis.annotate(number, (n + gone, y), va="center", fontsize=9)
        if y:                                                          # the stream narrows from bar to bar
            axis.fill_between([0, n + gone], y - 0.65, y - 0.35, color="C0", alpha=0.12, linewidth=0)
    axis.set_yticks(range(len(bars)), [f"{name}\n{REASONS[name]}" if name in REASONS else name for name, _, _ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, max(t["documents_in"], 1) * 1.18)
    axis.set_xlabel("documents left (blue) and removed by each rule (red), in the order of the rules")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_title(f"{report['run']['out']}: {t['documents']:,} of {t['documents_in']:,} documents, {t['tokens']:,} tokens", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ----------------------------------------------------------------------------------------------------------------------
# check


def verify(folder):
    """
    Count again, from the files themselves: the lines of removed.jsonl.gz, the documents and the sha256 of each shard, the sums of
    the table. ValueError, one line, at the first that is not what report.json says. Returns the report.
    """
    path = os.path.join(folder, "report.json")
    if not os.path.isfile(path):
        raise ValueError(f"{folder} has no report.json: want a folder that prepare.py wrote")
    with open(path, encoding="utf-8") as f:
        report = json.load(f)
    t, removed = total(report["table"]), {}
    if any(t[name] != report["total"].get(name, {}) for name in t):
        raise ValueError(f"{path}: the rows of the table are not the total")
    with gzip.open(os.path.join(folder, "removed.jsonl.gz"), "rt", encoding="utf-8") as f:
        for line in f:
            reason = short(json.loads(line)["reason"])
            removed[reason] = removed.get(reason, 0) + 1
    if removed != {reason: n for reason, (n, _) in t["removed"].items()}:
        raise ValueError(f"{folder}: removed.jsonl.gz has {removed}, report.json {t['removed']}")
    documents = tokens = 0
    for shard in report["outputs"]["shards"]:
        file = os.path.join(folder, shard["file"])
        with open(file, "rb") as f:
            if hashlib.file_digest(f, "sha256").hexdigest() != shard["sha256"]:
                raise ValueError(f"{file} is not what prepare.py wrote: another sha256")
        stream = np.load(file, mmap_mode="r", allow_pickle=False)
        documents += int(sum(np.count_nonzero(stream[i:i + (1 << 24)] == report["outputs"]["bos"]) for i in range(0, len(stream), 1 << 24)))
        tokens += len(stream)
    probes = report["probes"] or dict(documents=0, tokens=0)
    if (documents, tokens) != (t["documents"] + report["outputs"]["halved"] + probes["documents"], t["tokens"] + probes["tokens"]):
        raise ValueError(f"{folder}: {documents} documents and {tokens} tokens in the shards, {t['documents']} and {t['tokens']} kept"
                         f" and {probes['documents']} and {probes['tokens']} of probes in the report")
    return report


def main():
    for folder in paths or ["data/stdlib"]:
        t = verify(folder)["total"]
        print(f"{folder}: {t['documents_in']:,} in = {t['documents']:,} kept + {sum(n for n, _ in t['removed'].values()):,} removed; "
              f"{t['tokens']:,} tokens in the shards; all hashes as written")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
