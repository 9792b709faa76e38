"""
Take documents out of a data folder: prepare.py --remove=FILE --out=FOLDER.

    asked for    ids, URLs or hosts, one a line; rows with an id, url, host or text; or a newer store of robots.txt
    shards       lose the tokens of these documents; a shard that held none of them is the same file as before
    ledger       the rows stay, with "withdrawn:..." as the reason and the time
    unknown      an entry of the list that never was in the folder is named at the end, with exit code 2; all others
                 are removed

The new folder is made as OUT.tmp, checked, and takes the place of the old one: after a kill at any moment one of the
two is there, whole. Windows are numbered anew, so train.py does not resume a run that has read the old data. Later
files do not bring a withdrawn document back by --known.
"""

import os
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow

from corpus.audit import verify
from corpus.dedup import fingerprint
from corpus.folder import clear, empty, publish
from corpus.ledger import FILE, added, counted, described, grouped, ledger, rows_of, write_account, write_ledger
from corpus.robots import AGENTS, host_key, open_robots, verdict
from corpus.shards import shards_of, write_shard
from engine.readers import kind_of, records


def withdraw(path, out, final, tmp):
    """
    Take the documents that the file `path` names out of the data folder `final`, which the user calls `out`.
    tmp: as building() gives it.

    ValueError, with the folder as it was: none of it is there, or a source would be empty. ValueError, after the others
    have been removed: an entry was never there.
    """
    meta, report = described(final)
    if any(os.path.dirname(shard["file"]) for shard in shards_of(meta)):
        raise ValueError(f"{out} was joined from other folders: remove from these, and join them again")
    verify(final)
    rows, absent = choose(final, out, read_list(path, report["robots"]))
    if not rows:
        raise ValueError(f"{path}: {absent or f'none of it is in {out}'}. Nothing was removed")
    # A killed run may have left the work of other data.
    empty(tmp)
    new = tmp / "data"
    new.mkdir()
    streams, moved = cut_shards(final, new, meta, rows)
    write_ledger(new / FILE, marked(final, rows, moved))
    for name in ("tokenizer.json", "probes.json"):
        if (final / name).is_file():
            shutil.copy(final / name, new / name)
    report = write_account(new, meta, streams, report)
    verify(new)
    publish(final, tmp)
    clear(tmp)
    print(f"{out}: {counted(len(rows), 'document')} ({counted(added(rows.values(), 'tokens'), 'token')}) removed, "
          f"{report['total']['documents']:,} stay; version {meta['version'][:16]} is now {report['version'][:16]}")
    if absent:
        raise ValueError(f"{path}: {absent}. The documents of all other entries were removed")


# ----------------------------------------------------------------------------------------------------------------------
# the list


def read_list(path, robots):
    """
    The entries of a list, as reason_of() takes them: sets of id, url, host and text (fingerprints); robots, the
    arguments of verdict(). robots: what report.json says of the agents that were asked before, or None.
    """
    asked, store = dict(id=set(), url=set(), host=set(), text=set()), None
    if not os.path.exists(path):
        raise ValueError(f"--remove={path}: no such file")
    if os.path.isdir(path):
        store = open_robots(path)
    elif kind_of(path) in (None, "text", "html"):
        lines = Path(path).read_bytes().decode("utf-8-sig", "replace").splitlines()
        asked["id"] = asked["url"] = {line.strip() for line in lines} - {""}
        # What could be a host may be one.
        asked["host"] = {name for name in asked["id"] if "." in name and not set("/: ") & set(name)}
    else:
        for number, row in enumerate(records(path), 1):
            if "domain" in row and {"content", "robots"} & row.keys():
                store = open_robots(path)
                break
            key = next((key for key in asked if row.get(key)), None)
            if not key or not isinstance(row[key], str):
                raise ValueError(f"{path} row {number}: want an id, url, host or text, or domain and content of a "
                                 "robots.txt")
            asked[key].add(fingerprint(row[key]) if key == "text" else row[key])
    if not store and not any(asked.values()):
        raise ValueError(f"{path} asks for nothing: want an id, a URL or a host in each line")
    then = robots or dict(agents=AGENTS, missing="allow", only_explicit=False)
    asked["robots"] = dict(store=store, agents=tuple(then["agents"]), missing=then["missing"] if store else "allow",
                           explicit=then["only_explicit"], blocked=frozenset(map(bare, asked["host"])))
    return asked


def bare(host):
    """A host as robots.verdict compares it, without www."""
    return (host_key(f"https://{host}") or host).removeprefix("www.")


def stays_out(folder):
    """The withdrawn documents of a data folder, for reason_of(): new files must not bring them back."""
    asked = dict(id=set(), url={None}, text=set(), host=set())
    for row in rows_of(folder, ["id", "url", "text", "reason"]):
        kind, _, why = row["reason"].partition(":")
        if kind == "withdrawn":
            row["host"] = bare(host_key(row["url"]) or "")
            for key in {"text", "url", why} & asked.keys():
                asked[key].add(row[key])
    asked["url"].remove(None)
    asked["robots"] = asked["host"] and dict(blocked=frozenset(asked["host"]))
    return asked


def reason_of(row, asked):
    """(why a row is removed, the entry of the list); ("", None) if it is not."""
    for key in ("id", "url", "text"):
        if row[key] in asked[key]:
            return f"withdrawn:{key}", row[key]
    if row["url"] and asked["robots"]:
        fate, _, why = verdict(row["url"], **asked["robots"]).partition(":")
        if fate == "drop":
            kind, _, entry = why.partition(":")
            return f"withdrawn:{'host' if kind == 'blocked-domain' else why}", entry
    return "", None


def choose(final, out, asked):
    """
    ({number in the ledger: row to remove, with its reason}, a sentence about entries that were never there, or "").

    An id belongs to one folder, and so may a line of text that is no URL. A list of URLs may cover several folders.
    """
    rows, used, left = {}, set(), Counter()
    for number, row in enumerate(rows_of(final)):
        if row["withdrawn"]:
            # An entry that was withdrawn before is no mistake.
            used |= {row["id"], row["url"], bare(host_key(row["url"]) or "")}
        # Planted passages stay.
        if row["reason"] or row["source"] == "probes" and not row["bytes"]:
            continue
        why, entry = reason_of(row, asked)
        left[row["source"], row["split"]] += not why
        if why:
            rows[number] = dict(row, reason=why)
            used.add(entry)
    for (source, split), n in left.items():
        if not n:
            raise ValueError(f"{out} would have no document of source {source!r} for {split}: prepare the files again "
                             "without these. Nothing was removed")
    absent = sorted(name for name in asked["id"] if "://" not in name and not {name, bare(name)} & used)
    if not absent:
        return rows, ""
    more = f" (and {len(absent) - 1:,} more)" if len(absent) > 1 else ""
    return rows, f"{absent[0]!r}{more} is not among the kept documents of {out}"


# ----------------------------------------------------------------------------------------------------------------------
# the files


def cut_shards(final, new, meta, rows):
    """
    Write the shards without the tokens of these rows: {source: {split: entries for meta.json}}, and {shard: (begins of
    its documents, where these are now)} of the shards that have changed.
    """
    by_shard, streams, moved = grouped(rows.values(), "shard"), {}, {}
    for source, splits in meta["sources"].items():
        streams[source] = {}
        for split, part in splits.items():
            streams[source][split] = entries = []
            # The first tokens of a shard may be of the last document of the shard before.
            before = False
            for entry in part["shards"]:
                file = entry["file"]
                if not before and file not in by_shard:
                    link(final / file, new / file)
                    entries.append(entry)
                    continue
                ids = np.load(final / file, mmap_mode="r", allow_pickle=False)
                begins = np.flatnonzero(ids == meta["bos"])
                stays = np.append(not before, ~np.isin(begins, [row["offset"] for row in by_shard.get(file, [])]))
                sizes = np.diff(begins, prepend=0, append=len(ids))
                moved[file] = begins, np.cumsum(sizes * stays)
                before = not stays[-1]
                left = ids[np.repeat(stays, sizes)]
                if len(left):
                    entries.append(dict(entry, **write_shard(new / file, [left], len(left), ids.dtype)))
    return streams, moved


def link(old, new):
    """The same file under a second name, which takes neither time nor room; a copy where there are no links."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)


def marked(final, rows, moved):
    """Yield the tables of the ledger with these rows withdrawn, and the offsets of the new shards."""
    number, now = 0, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for table in ledger(final):
        listed = table.to_pylist()
        for row in listed:
            if number in rows:
                row.update(reason=rows[number]["reason"], withdrawn=now, split=None, shard=None, offset=None)
            elif row["shard"] in moved:
                begins, places = moved[row["shard"]]
                row["offset"] = int(places[np.searchsorted(begins, row["offset"])])
            number += 1
        yield pyarrow.Table.from_pylist(listed, table.schema)
