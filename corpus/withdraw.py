"""
Take documents out of a data folder: prepare.py --remove=FILE --out=FOLDER.

    asked for    ids, URLs or hosts, one a line; rows with an id, url, host or text; or a newer store of robots.txt
    shards       lose the tokens of these documents; a shard that held none of them is the same file as before
    ledger       the rows stay, with "withdrawn:..." as the reason and the time

The new folder is made as OUT.tmp, checked, and takes the place of the old one: after a kill at any moment one of the
two is there, whole. Windows are numbered anew, so train.py does not resume a run that has read the old data. Later
files do not bring a withdrawn document back by --known.
"""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow

from corpus.audit import Tokens, near_names, verify
from corpus.dedup import fingerprint
from corpus.folder import clear, empty, publish
from corpus.ledger import FILE, counted, ledger, read_meta, write_account, write_ledger
from corpus.robots import AGENTS, host_key, open_robots, verdict
from corpus.shards import shards_of, write_shard
from engine.files import read_json
from engine.readers import kind_of, records


def withdraw(path, out, final, tmp):
    """
    Take the documents that the file `path` names out of the data folder `final`, which the user calls `out`.
    tmp: as claim() gives it.

    ValueError, with the folder as it was: none of it is there, an id is not, or a source would be empty.
    """
    meta = read_meta(final)
    if any(os.path.dirname(shard["file"]) for shard in shards_of(meta)):
        raise ValueError(f"{out} was joined from other folders: remove from these, and join them again")
    verify(final)
    report = read_json(final / "report.json")
    asked = read_list(path, report["robots"])
    rows = choose(final, out, asked, path)
    # A killed run may have left the work of other data.
    empty(tmp)
    new = tmp / "data"
    new.mkdir()
    tokens, spans = Tokens(final), {}
    for row in rows:
        for file, begin, end in tokens.pieces(row):
            spans.setdefault(file, []).append((begin, end))
    streams = {}
    for name, source in meta["sources"].items():
        for split, part in source.items():
            entries = [without(final, new, shard, sorted(spans.get(shard["file"], []))) for shard in part["shards"]]
            streams.setdefault(name, {})[split] = [entry for entry in entries if entry["tokens"]]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_ledger(new / FILE, marked(final, rows, spans, now))
    for name in ("tokenizer.json", "probes.json"):
        if (final / name).is_file():
            shutil.copy(final / name, new / name)
    report = write_account(new, meta, streams, report)
    verify(new)
    publish(final, tmp)
    clear(tmp)
    print(f"{out}: {counted(len(rows), 'document')} ({counted(sum(row['tokens'] for row in rows), 'token')}) removed, "
          f"{report['total']['documents']:,} stay; version {meta['version'][:16]} is now {report['version'][:16]}")


def read_list(path, robots):
    """
    The entries of a list: names (ids, URLs or hosts), ids, urls, hosts, texts (fingerprints), and the arguments of
    robots.verdict. robots: what report.json says of the agents that were asked before, or None.
    """
    asked = SimpleNamespace(names=set(), ids=set(), urls=set(), hosts=set(), texts=set())
    store = None
    if not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"--remove={path}: no such file")
    if os.path.isdir(path):
        store = open_robots(path)
    elif kind_of(path) in (None, "text", "html"):
        lines = Path(path).read_bytes().decode("utf-8-sig", "replace").splitlines()
        asked.names = {line.strip() for line in lines} - {""}
    else:
        for number, row in enumerate(records(path), 1):
            if "domain" in row and {"content", "robots"} & row.keys():
                store = open_robots(path)
                break
            key = next((key for key in ("id", "url", "host", "text") if row.get(key)), None)
            if not key or not isinstance(row[key], str):
                raise ValueError(f"{path} row {number}: want an id, url, host or text, or domain and content of a "
                                 "robots.txt")
            getattr(asked, key + "s").add(fingerprint(row[key]) if key == "text" else row[key])
    if not store and not any(vars(asked).values()):
        raise ValueError(f"{path} asks for nothing: want an id, a URL or a host in each line")
    then = robots or dict(agents=AGENTS, missing="allow", only_explicit=False)
    # A name may be a host if it could be one.
    hosts = asked.hosts | {name for name in asked.names if "." in name and not set("/: ") & set(name)}
    asked.robots = dict(store=store, agents=tuple(then["agents"]), missing=then["missing"] if store else "allow",
                        explicit=then["only_explicit"], blocked=frozenset(map(bare, hosts)))
    return asked


def bare(host):
    """A host as robots.verdict compares it, without www."""
    return (host_key(f"https://{host}") or host).removeprefix("www.")


def stays_out(folder):
    """The withdrawn documents of a data folder, for reason_of(): new files must not bring them back."""
    asked = SimpleNamespace(names=set(), ids=set(), urls=set(), texts=set())
    hosts = set()
    for table in ledger(folder, ["id", "url", "text", "reason"]):
        for row in table.to_pylist():
            gone, _, why = row["reason"].partition(":")
            if gone == "withdrawn":
                asked.texts.add(row["text"])
                asked.urls |= {row["url"]} - {None}
                asked.ids |= {row["id"]} if why == "id" else set()
                hosts |= {bare(host_key(row["url"]))} if why == "host" else set()
    asked.robots = dict(store=None, agents=AGENTS, missing="allow", explicit=False, blocked=frozenset(hosts))
    return asked


def reason_of(row, asked):
    """(why a row is removed, the entry of the list); ("", None) if it is not."""
    for key, names in (("id", asked.ids), ("url", asked.urls)):
        if row[key] in names or row[key] in asked.names:
            return f"withdrawn:{key}", row[key]
    if row["text"] in asked.texts:
        return "withdrawn:text", row["text"]
    if row["url"] and (asked.robots["store"] or asked.robots["blocked"]):
        fate, _, why = verdict(row["url"], **asked.robots).partition(":")
        if fate == "drop":
            host = why.startswith("blocked-domain:")
            return ("withdrawn:host" if host else f"withdrawn:{why}"), why.partition(":")[2]
    return "", None


def choose(final, out, asked, path):
    """The rows that go, each with its reason and its number in the ledger."""
    rows, used, left, number = [], set(), {}, -1
    for table in ledger(final):
        for row in table.to_pylist():
            number += 1
            if row["reason"]:
                # An entry that was withdrawn before is no mistake.
                used |= {row["id"], row["url"]} if row["withdrawn"] else set()
                continue
            # Planted passages stay.
            why, entry = reason_of(row, asked) if row["source"] != "probes" or row["bytes"] else ("", None)
            stream = row["source"], row["split"]
            left[stream] = left.get(stream, 0) + (not why)
            if why:
                rows.append(dict(row, reason=why, number=number))
                used.add(entry)
    # A list of URLs or hosts may cover several folders; an id belongs to this one.
    hosts = {bare(name): name for name in asked.names}
    used |= {hosts[entry] for entry in used if entry in hosts}
    absent = sorted(name for name in asked.ids | asked.names if name not in used and "://" not in name)
    if absent:
        more = f" (and {len(absent) - 1:,} more)" if len(absent) > 1 else ""
        raise ValueError(f"{path}: {absent[0]!r} is not in {out}{more}: {near_names(final, absent[0])}. Nothing was "
                         "removed")
    if not rows:
        raise ValueError(f"{path}: none of it is in {out}. Nothing was removed")
    empty = next((stream for stream, n in left.items() if not n), None)
    if empty:
        raise ValueError(f"{path} would leave no document of source {empty[0]!r} for {empty[1]}: prepare the files "
                         "again without it. Nothing was removed")
    return rows


def without(final, new, entry, spans):
    """Write a shard without stretches of tokens. Returns its entry for meta.json, of 0 tokens if nothing is left."""
    old, path = final / entry["file"], new / entry["file"]
    if not spans:
        # The same file under a second name takes neither time nor room.
        try:
            os.link(old, path)
        except OSError:
            shutil.copyfile(old, path)
        return entry
    tokens = np.load(old, mmap_mode="r", allow_pickle=False)
    begins, ends = [0, *(end for _, end in spans)], [*(begin for begin, _ in spans), len(tokens)]
    n = sum(ends) - sum(begins)
    if not n:
        return dict(tokens=0)
    return dict(entry, **write_shard(path, (tokens[begin:end] for begin, end in zip(begins, ends)), n, tokens.dtype))


def marked(final, rows, spans, now):
    """Yield the tables of the ledger with these rows withdrawn, and the offsets of the new shards."""
    # Of each shard where the stretches begin, and how many tokens are gone before each of them and before its end.
    gone = {}
    for file, cut in spans.items():
        begins, ends = np.array(sorted(cut)).T
        gone[file] = begins, np.cumsum([0, *(ends - begins)])
    reasons, at = {row["number"]: row["reason"] for row in rows}, 0
    for table in ledger(final):
        listed = table.to_pylist()
        for number, row in enumerate(listed, at):
            if number in reasons:
                row.update(reason=reasons[number], withdrawn=now, split=None, shard=None, offset=None)
            elif row["shard"] in gone:
                begins, before = gone[row["shard"]]
                row["offset"] -= int(before[np.searchsorted(begins, row["offset"])])
        at += len(listed)
        yield pyarrow.Table.from_pylist(listed, table.schema)
