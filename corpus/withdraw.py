"""
Delete documents from a data folder: prepare.py --remove=FILE --out=FOLDER.

    FILE         ids, URLs or hosts, one a line; rows with an id, url, host or text; or a newer store of robots.txt
    shards       lose the tokens of these documents; a shard that holds none of them stays the same file
    ledger       the rows stay, with "withdrawn:..." as the reason, and the time
    unknown      an id that never was in the folder is reported at the end, with exit code 2; the documents of all other
                 entries are removed

The new folder is made in OUT.tmp, checked, and renamed: after a kill at any moment the old or the new one is intact.
Windows are numbered anew, so train.py does not resume a run that has read the old data. prepare.py does not build the
folder again, since its files may bring the documents back.
"""

import os
import re
import shutil
import time

import numpy as np

from corpus import readers
from corpus.dedup import fingerprint
from corpus.folder import clear, empty, publish, shards_of, write_shard
from corpus.ledger import FILE, changed, names_of, rows_of, write_ledger
from corpus.report import added, counted, verify, write_report
from corpus.robots import host_key, open_robots, refusal


def withdraw(path, out, final, tmp):
    """
    Delete the documents that the file `path` names from the data folder `final`, which the user calls `out`.
    tmp: as building() gives it.

    ValueError, with the folder unchanged: it has none of these documents, or a source would become empty. ValueError,
    after the other documents have been deleted: an id was never there.
    """
    meta, report = verify(final)
    if any(os.path.dirname(shard["file"]) for shard in shards_of(meta)):
        raise ValueError(f"{out} was joined from other folders: remove from these, and train on them: --data=A,B")
    rows, unknown = choose(final, out, read_list(path, report["robots"]))
    if not rows:
        raise ValueError(f"{path}: {unknown or f'none of it is in {out}'}. Nothing was removed")
    # A killed run may have left the work of other data.
    empty(tmp)
    new = tmp / "data"
    new.mkdir()
    streams = cut(final, new, meta, rows)
    for name in {"tokenizer.json", "probes.json"} & {*os.listdir(final)}:
        shutil.copy(final / name, new)
    report = write_report(new, meta, streams, report)
    verify(new)
    publish(final, tmp)
    clear(tmp)
    print(f"{out}: {counted(len(rows), 'document')} ({counted(added(rows.values(), 'tokens'), 'token')}) removed, "
          f"{report['total']['documents']:,} stay; version {meta['version'][:16]} is now {report['version'][:16]}")
    if unknown:
        raise ValueError(f"{path}: {unknown}. The documents of all other entries were removed")


# ----------------------------------------------------------------------------------------------------------------------
# the list


def read_list(path, robots):
    """
    The entries of a list, as reason_of() takes them: (a set of entries, the arguments of robots.verdict()).

    robots: the "robots" of report.json, whose agents and rules a new store is read with; or None.
    """
    if os.path.isdir(path):
        entries, store = set(), open_robots(path)
    elif readers.kind_of(path) in (None, "text"):
        entries, store = entries_of_lines(path), None
    else:
        entries, store = entries_of_rows(path)
    verdict = dict(blocked={bare(value) for key, value in entries if key == "host"})
    if store and robots:
        # Older folders may have counted only the rules that name an agent.
        explicit = robots.get("only_explicit", False)
        verdict |= dict(agents=robots["agents"], missing=robots["missing"], explicit=explicit)
    return entries, dict(verdict, store=store)


def entries_of_lines(path):
    """The entries of a text file: a line may be an id or a URL, and a host if it looks like one."""
    entries = set()
    for line, in readers.rows_of(path):
        entries |= {("id", line), ("url", line.rstrip("/"))}
        if re.fullmatch(r"[^/: ]*\.[^/: ]*", line):
            entries.add(("host", line))
    return entries


def entries_of_rows(path):
    """(entries, store) of a file of rows: ids, URLs, hosts and texts, and no store; or a store of robots.txt."""
    entries = set()
    for number, row in enumerate(readers.records(path), 1):
        if "domain" in row and {"content", "robots"} & row.keys():
            return set(), open_robots(path)
        key = next((key for key in ("id", "url", "host", "text") if row.get(key)), None)
        if not key or not isinstance(row[key], str):
            raise ValueError(f"{path} row {number}: want an id, url, host or text, or domain and content of a "
                             "robots.txt")
        entry = fingerprint(row[key]) if key == "text" else row[key]
        entries.add((key, entry.rstrip("/") if key == "url" else entry))
    return entries, None


def bare(host):
    """A host as robots.verdict() compares it, without www."""
    return (host_key(f"//{host}") or host).removeprefix("www.")


def has_withdrawn(folder):
    """Whether documents were withdrawn from a data folder."""
    return any(row["withdrawn"] for row in rows_of(folder, ["withdrawn"]))


def reason_of(row, removals):
    """
    (the reason for which a row is removed, the entries of the list that name it); ("", set()) if it is not.

    removals: (entries, verdict), a set of ("id", ...), ("url", ...), ("host", ...) and ("text", fingerprint), and the
    arguments of robots.verdict(), where hosts are blocked.
    """
    entries, verdict = removals
    named = (names_of(row) | {("text", row["text"])}) & entries
    for key in ("id", "url", "text"):
        if any(kind == key for kind, _ in named):
            return f"withdrawn:{key}", {name for _, name in named}
    reason = refusal(dict(url=row["url"]), verdict)
    if not reason:
        return "", set()
    rule, _, entry = reason.partition(":")
    return f"withdrawn:{'host' if rule == 'blocked-domain' else reason}", {entry}


def choose(final, out, removals):
    """
    ({(shard, offset): row to remove, with its reason}, a sentence about entries that were never there, or "").

    ValueError: a source would become empty.
    """
    removed, matched, copies, others = {}, set(), set(), set()
    for row in rows_of(final):
        reason, named = reason_of(row, removals)
        if reason and row["reason"] == "duplicate":
            copies.add(row["text"])
        # Planted passages stay.
        if row["reason"] and not row["withdrawn"] or row["source"] == "probes" and not row["bytes"]:
            continue
        if not reason:
            others.add((row["source"], row["split"]))
            continue
        # An entry that was withdrawn before is not unknown.
        matched |= named
        if not row["withdrawn"]:
            removed[row["shard"], row["offset"]] = dict(row, reason=reason)
    report_copies(final, copies, removed)
    for source, split in {(row["source"], row["split"]) for row in removed.values()} - others:
        raise ValueError(f"{out} would have no document of source {source!r} for {split}: prepare the files again "
                         "without these. Nothing was removed")
    return removed, unknown_entries(removals[0], matched, out)


def report_copies(final, copies, removed):
    """Print how many documents stay whose text is that of a removed duplicate: they have another id."""
    stay = [row["id"] for row in rows_of(final) if row["text"] in copies and not row["reason"]
            and (row["shard"], row["offset"]) not in removed]
    if stay:
        print(f"{counted(len(stay), 'text')} of the list kept under another id, such as {stay[0]}: "
              "name that id as well to remove it")


def unknown_entries(entries, matched, out):
    """
    A sentence about the entries that matched no document, or "". Only ids, and lines that are no URL, count: a list of
    URLs may cover several folders.
    """
    names = {name for key, name in entries if key == "id" and "://" not in name}
    unknown = sorted(name for name in names if not {name, bare(name)} & matched)
    if not unknown:
        return ""
    others = f" (and {len(unknown) - 1:,} more)" if len(unknown) > 1 else ""
    return f"{unknown[0]!r}{others} is not among the kept documents of {out}"


# ----------------------------------------------------------------------------------------------------------------------
# the files


def cut(final, new, meta, rows):
    """
    Write the shards and the ledger without the tokens of these rows. Returns {source: {split: entries for meta.json}}.
    """
    entries, moved, now = {}, {}, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    # Whether the tokens before a shard's first document stay: they belong to the last document of the shard before.
    before = True
    for entry in shards_of(meta):
        file = entry["file"]
        ids = np.load(final / file, mmap_mode="r", allow_pickle=False)
        begins = np.flatnonzero(ids == meta["bos"])
        stays = np.append(before, ~np.isin(begins, [offset for shard, offset in rows if shard == file]))
        before = stays[-1]
        sizes = np.diff(begins, prepend=0, append=len(ids))
        moved[file] = begins, np.cumsum(sizes * stays)
        left = ids[np.repeat(stays, sizes)]
        if len(left) == len(ids):
            link(final / file, new / file)
            entries[file] = entry
        elif len(left):
            entries[file] = dict(entry, **write_shard(new / file, [left]))

    def mark(row):
        place = row["shard"], row["offset"]
        if place in rows:
            row.update(reason=rows[place]["reason"], withdrawn=now, split=None, shard=None, offset=None)
        elif row["shard"]:
            begins, places = moved[row["shard"]]
            row["offset"] = int(places[np.searchsorted(begins, row["offset"])])

    write_ledger(new / FILE, changed(final, mark))
    return {source: {split: [entries[shard["file"]] for shard in part["shards"] if shard["file"] in entries]
                     for split, part in splits.items()} for source, splits in meta["sources"].items()}


def link(old, new):
    """Give a file a second name, which takes no time and no space; copy it where links are not possible."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
