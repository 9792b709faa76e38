"""
What may leave: documents go from the shards, kept.parquet and the report, and the rest keeps its bytes and its order.

    asked      ids, URLs and hosts, one a line; rows with an id, url, host or text; or a newer store of robots.txt
    shards     without the tokens of those documents; a shard that held none of them is the same file as before
    report     in = kept + removed as before: what goes now counts as "withdrawn", and removed.jsonl.gz says why

`prepare.py --remove=FILE --out=FOLDER` makes the new folder beside the old one, checks it from its files, and puts it
in its place. Killed at any moment, there is the old data or the new, whole. Texts are told by a hash of them and stand
in no file of the result. The windows of the new data are numbered anew, so train.py does not resume a run that has read
the old ones. What has gone does not come back by --known: its text, its URL, and its id or host if it was asked for by
that. Memory: a byte a document, and about a kilobyte for each that goes.
"""

import gzip
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

from corpus import audit, kept
from corpus.dedup import fingerprint
from corpus.pii import TAGS
from corpus.robots import AGENTS, host_key, open_robots, verdict
from corpus.shards import publish, shards_of, write_shard
from engine.files import sha256, version, write_flushed
from engine.inputs import kind_of
from engine.readers import has_lines, open_lines, open_parquet


def withdraw(path, out, final, tmp):
    """
    Take what the file `path` asks for out of the data folder `final`, called `out`. tmp: as shards.claim returns it.

    ValueError, one line, with the folder as it was: nothing of it is there, an id is not, a source would be empty, or
    the data are of the older format or joined of others.
    """
    report, meta = read(final, out)
    asked = read_list(path, report)
    gone, rows = choose(final, out, asked, path)
    # What a killed run has left there is not built upon: it may be of other data.
    for name in ("work", "data"):
        shutil.rmtree(tmp / name, ignore_errors=True)
    new = tmp / "data"
    new.mkdir()
    spans = spans_of(final, rows)
    shards = {shard["file"]: shard for shard in shards_of(meta)}
    for file in tqdm(shards, "shards", unit="shard", disable=None, leave=False):
        shards[file] = without(final / file, new / file, shards[file], spans.get(file, []))
    before = meta["version"]
    recount_meta(meta, rows, shards)
    meta["version"] = version(meta)
    recount_report(report, rows)
    outputs = report["outputs"]
    outputs["version"] = meta["version"]
    outputs["shards"] = shards_of(meta)
    outputs["kept"].update(rewrite_kept(final, new, gone, spans))
    report.setdefault("removals", []).append(dict(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        list=os.path.basename(os.path.normpath(path)),
        sha256=sha256(path) if os.path.isfile(path) else None,
        documents=len(rows),
        tokens=sum(row["tokens"] for row in rows),
        before=before,
        after=meta["version"]))
    add_removed(final, new, rows)
    for name in ("tokenizer.json", "probes.json"):
        if (final / name).is_file():
            shutil.copy(final / name, new / name)
    for name, content in (("meta.json", meta), ("report.json", report)):
        write_flushed(new / name, json.dumps(content, indent=1, ensure_ascii=False))
    write_flushed(new / "report.md", audit.markdown(report))
    audit.verify(new)
    publish(final, tmp)
    print(f"{out}: {len(rows):,} documents ({sum(row['tokens'] for row in rows):,} tokens) went, "
          f"{report['total']['documents']:,} stay; version {before[:16]} is now {meta['version'][:16]}")


def read(final, out):
    """(report.json, meta.json) of a folder from which documents can be taken."""
    meta = kept.read_meta(final)
    if any(os.path.dirname(shard["file"]) for shard in shards_of(meta)):
        parts = ", ".join(kept.folders_of(final))
        raise ValueError(f"{out} was joined of {parts}: remove from these, and join them again")
    if not (final / kept.FILE).is_file():
        raise ValueError(f"{out} has no {kept.FILE}, being of the older format: prepare its files anew without those "
                         "documents")
    return audit.verify(final), meta


# ----------------------------------------------------------------------------------------------------------------------
# who goes


def read_list(path, report):
    """
    What is asked for: names, which may be ids, URLs or hosts; ids, urls, hosts and texts (hashes) that are called so;
    and robots, arguments of robots.verdict with the agents that were asked when the data were made.
    """
    asked = SimpleNamespace(names=set(), ids=set(), urls=set(), hosts=set(), texts=set(), store=None)
    if not os.path.exists(path):
        raise ValueError(f"--remove={path}: there is no such file")
    if os.path.isdir(path):
        asked.store = open_robots(path)
    elif not has_lines(path) and kind_of(path) != "parquet":
        with open(path, encoding="utf-8-sig", errors="replace") as lines:
            asked.names = {line.strip() for line in lines} - {""}
    else:
        for number, row in enumerate(records(path), 1):
            if isinstance(row, dict) and "domain" in row and {"content", "robots"} & row.keys():
                asked.store = open_robots(path)
                break
            key = next((key for key in ("id", "url", "host", "text") if isinstance(row, dict) and row.get(key)), None)
            if not key or not isinstance(row[key], str):
                raise ValueError(f"{path} row {number}: want an id, url, host or text, or domain and content of a "
                                 "robots.txt")
            getattr(asked, key + "s").add(fingerprint(row[key]) if key == "text" else row[key])
    if not any((asked.names, asked.ids, asked.urls, asked.hosts, asked.texts, asked.store)):
        raise ValueError(f"{path} asks for nothing: want an id, a URL or a host in each line")
    then = report["robots"] or dict(agents=AGENTS, missing="allow", only_explicit=False)
    # A name that may be a host is one, if no document has it as its id.
    hosts = asked.hosts | {name for name in asked.names if "." in name and not set("/: ") & set(name)}
    keys = set(map(bare, hosts))
    asked.robots = dict(store=asked.store, agents=then["agents"], missing=then["missing"] if asked.store else "allow",
                        explicit=then["only_explicit"], blocked=frozenset(keys))
    return asked


def bare(host):
    """A host as robots.verdict compares it, without its www."""
    return (host_key(f"https://{host}") or host).removeprefix("www.")


def stays_out(folder):
    """What has gone from a data folder, as reason_of() wants it, so that new files do not bring it back."""
    asked = SimpleNamespace(names=set(), ids=set(), urls=set(), texts=set())
    hosts = set()
    for place in kept.folders_of(folder):
        with gzip.open(os.path.join(place, "removed.jsonl.gz"), "rt", encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                gone, _, why = row["reason"].partition(":")
                by, _, what = why.partition(":")
                if gone != "withdrawn":
                    continue
                asked.texts.add(row.get("text_hash"))
                asked.urls |= {row.get("url")} - {None}
                asked.ids |= {row["id"]} if by == "id" else set()
                hosts |= {what} if by == "blocked-domain" else set()
    asked.robots = dict(store=None, agents=AGENTS, missing="allow", explicit=False, blocked=frozenset(hosts))
    return asked


def records(path):
    """The rows of a .parquet, .jsonl, .json or .csv as they are."""
    if kind_of(path) == "parquet":
        for batch in open_parquet(path).iter_batches(1024):
            yield from batch.to_pylist()
        return
    with open_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield json.loads(line)
            except ValueError:
                raise ValueError(f"{path} line {number}: not JSON") from None


def reason_of(row, asked):
    """(why a row of kept.parquet goes, the entry that says so), or None."""
    for key, names in (("id", asked.ids | asked.names), ("url", asked.urls | asked.names)):
        if row[key] in names:
            return f"withdrawn:{key}", row[key]
    if row["text_hash"] in asked.texts:
        return "withdrawn:text", row["text_hash"]
    if asked.robots["store"] or asked.robots["blocked"]:
        fate, _, why = verdict(row["url"], **asked.robots).partition(":")
        if fate == "drop":
            return f"withdrawn:{why}", why.partition(":")[2]
    return None


def choose(final, out, asked, path):
    """
    (which documents go, in the order of kept.parquet: bool (n,); their rows, with a reason).

    Planted probes stay. ValueError: nothing goes, an id is not there, or a source would be left without documents.
    """
    asked.ids, asked.urls = frozenset(asked.ids), frozenset(asked.urls)
    gone, rows, used, left = bytearray(), [], set(), {}
    for _, table in tqdm(kept.tables(final), "who goes", unit="tables", disable=None, leave=False):
        for row in table.to_pylist():
            why = None if row["text_hash"] == 0 and row["source"] == "probes" else reason_of(row, asked)
            gone.append(bool(why))
            stream = row["source"], row["split"]
            left[stream] = left.get(stream, 0) + (not why)
            if why:
                rows.append(dict(row, reason=why[0]))
                used.add(why[1])
    # Lists of URLs and of hosts cover more than one folder; an id is of this one.
    hosts = {bare(name): name for name in asked.names}
    used |= {hosts[entry] for entry in used if entry in hosts}
    absent = sorted(name for name in asked.ids | asked.names if name not in used and "://" not in name)
    if absent:
        more = f" (and {len(absent) - 1:,} more)" if len(absent) > 1 else ""
        raise ValueError(f"{path}: {absent[0]!r} is not in {out}{more}: {kept.near_names(final, absent[0])}. "
                         "Nothing was removed")
    if not rows:
        raise ValueError(f"{path}: nothing of it is in {out}, which stays as it is")
    for (source, split), n in left.items():
        if not n:
            raise ValueError(f"{path} would leave no document of source {source!r} for {split}: prepare the files anew "
                             f"without it. {out} stays as it is")
    return np.frombuffer(gone, bool), rows


# ----------------------------------------------------------------------------------------------------------------------
# what stays


def spans_of(final, rows):
    """{shard: rising [begin, end) of the tokens that go}."""
    tokens = kept.Tokens(final)
    spans = {}
    for row in rows:
        for file, begin, end in tokens.pieces(row):
            spans.setdefault(file, []).append((begin, end))
    return {file: sorted(pieces) for file, pieces in spans.items()}


def without(old, new, entry, spans):
    """
    Write a shard without some stretches of tokens. Returns its entry for meta.json, None if nothing is left.

    Where nothing goes it is the same file under a second name, so that it takes neither time nor room.
    """
    if not spans:
        try:
            os.link(old, new)
        except OSError:
            shutil.copyfile(old, new)
        return entry
    tokens = np.load(old, mmap_mode="r", allow_pickle=False)
    begins = [0, *(end for _, end in spans)]
    ends = [*(begin for begin, _ in spans), len(tokens)]
    n = sum(ends) - sum(begins)
    if not n:
        return None
    pieces = (tokens[begin:end] for begin, end in zip(begins, ends) if begin < end)
    return dict(entry, **write_shard(new, pieces, n, tokens.dtype))


def rewrite_kept(final, new, gone, spans):
    """kept.parquet without the rows that go, and with the offsets of the new shards. What report.json says of it."""
    import pyarrow
    import pyarrow.parquet
    # Of each shard where the stretches begin, and how many tokens go before each and before the end.
    before = {file: (np.array([begin for begin, _ in pieces]),
                     np.cumsum([0, *(end - begin for begin, end in pieces)])) for file, pieces in spans.items()}
    at = 0
    path = new / kept.FILE
    with pyarrow.parquet.ParquetWriter(path, kept.schema(), compression="zstd") as writer:
        for _, table in kept.tables(final):
            stay = ~gone[at:at + len(table)]
            at += len(table)
            table = table.filter(pyarrow.array(stay))
            names, offsets = table["shard"].to_numpy(), table["offset"].to_numpy().copy()
            for name in np.unique(names):
                if name in before:
                    begins, sums = before[name]
                    mine = names == name
                    offsets[mine] -= sums[np.searchsorted(begins, offsets[mine])]
            column = table.schema.get_field_index("offset")
            writer.write_table(table.set_column(column, table.schema.field(column), pyarrow.array(offsets)))
    return dict(sha256=sha256(path), documents=int((~gone).sum()))


def recount_meta(meta, rows, shards):
    """meta.json without these rows. shards: the new entry of each file, None where nothing is left."""
    for source in meta["sources"].values():
        for split in source.values():
            split["shards"] = [shards[shard["file"]] for shard in split["shards"] if shards[shard["file"]]]
    for row in rows:
        split = meta["sources"][row["source"]][row["split"]]
        audit.add(split, dict(documents=-1, tokens=-row["tokens"], bytes=-row["bytes_written"]))
    # Older folders count documents by language here.
    meta.pop("about", None)


def recount_report(report, rows):
    """report.json with these rows as withdrawn: what came in stays, and is kept + removed as before."""
    table = {(row["source"], row["language"]): row for row in report["table"]}
    for row in rows:
        replaced = {kind: -row[kind] for kind in TAGS}
        group = table[row["source"], row["language"]]
        audit.add(group, dict(
            documents=-1,
            bytes=-row["bytes"],
            bytes_written=-row["bytes_written"],
            tokens=-row["tokens"],
            pii=replaced,
            removed=dict(withdrawn=[1, row["bytes"]]),
            # Not about: these were counted.
            tokens_removed_about=dict(withdrawn=row["tokens"])))
        audit.add(report["licenses"][row["license"]], dict(documents=-1, bytes=-row["bytes"], tokens=-row["tokens"]))
        audit.add(report["pii"], replaced)
    report["total"] = audit.total(report["table"])


def add_removed(final, new, rows):
    """removed.jsonl.gz with a line more for each row: id, URL, reason, a hash of the text, and never a text."""
    path = Path(new, "removed.jsonl.gz")
    with gzip.open(final / path.name) as old, gzip.GzipFile(path, "wb", mtime=0) as f:
        shutil.copyfileobj(old, f)
        for row in rows:
            line = {name: row[name] for name in ("id", "url", "reason", "text_hash") if row[name]}
            f.write(f"{json.dumps(line, ensure_ascii=False)}\n".encode())
