"""
Delete documents from a data folder: prepare.py --remove=FILE --out=FOLDER.

    FILE         ids, URLs or hosts, one a line (# begins a comment); rows with an id, url, host or text; or a newer
                 store of robots.txt
    shards       lose the tokens of these documents; a shard that holds none of them stays the same file
    ledger       the rows stay, with "withdrawn:..." as the reason, and the time
    report       gains an entry in "removals"
    unmatched    entries that name no kept document are named at the end, with exit code 2; the documents of all other
                 entries are removed

The new folder is made in OUT.tmp, checked, and renamed: after a kill at any moment the old or the new one is intact.
Windows are numbered anew, so train.py does not resume a run that has read the old data. prepare.py does not build the
folder again, since its files may bring the documents back.
"""

import os
import shutil
import time

import numpy as np

from corpus import readers
from corpus.dedup import fingerprint
from corpus.folder import clear, empty, publish, shards_of, write_shard
from corpus.ledger import FILE, changed, names_in, names_of, normalized_host, normalized_url, rows_of, write_ledger
from corpus.report import added, counted, verify, write_report
from corpus.reservations import refusal
from corpus.stages import sha256_of_store
from corpus.stores import open_robots

# Entries of a list that one line of the terminal names, and characters of each.
LISTED, LENGTH = 10, 100


def withdraw(path, out, final, tmp):
    """
    Delete the documents that the file `path` names from the data folder `final`, which the user calls `out`.
    tmp: as building() gives it.

    ValueError, with the folder unchanged: it has none of these documents, or a source would become empty. ValueError,
    after the other documents have been deleted: an entry names no kept document.
    """
    meta, report = verify(final)
    if any(os.path.dirname(shard["file"]) for shard in shards_of(meta)):
        raise ValueError(f"{out} was joined from other folders: remove from these, and train on them: --data=A,B")
    rows, unmatched = choose(final, out, read_list(path, report["robots"]))
    message = unmatched_message(unmatched, out)
    if not rows:
        raise ValueError(f"{path}: {message or f'none of it is in {out}'}. Nothing was removed")
    removal = dict(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        file=path,
        sha256=sha256_of_store(path),
        documents=len(rows),
        tokens=added(rows.values(), "tokens"),
        unmatched=unmatched)
    # A killed run may have left the work of other data.
    empty(tmp)
    new = tmp / "data"
    new.mkdir()
    streams = cut(final, new, meta, rows, removal["date"])
    for name in {"tokenizer.json", "probes.json"} & {*os.listdir(final)}:
        shutil.copy(final / name, new)
    # Older folders have no removals.
    report = write_report(new, meta, streams, dict(report, removals=[*report.get("removals", []), removal]))
    verify(new)
    publish(final, tmp)
    clear(tmp)
    print(f"{out}: {counted(len(rows), 'document')} ({counted(removal['tokens'], 'token')}) removed, "
          f"{report['total']['documents']:,} stay; version {meta['version'][:16]} is now {report['version'][:16]}")
    if unmatched:
        raise ValueError(f"{path}: {message}. The documents of all other entries were removed: see removals in {out}/"
                         "report.json")


# ----------------------------------------------------------------------------------------------------------------------
# the list


def read_list(path, robots):
    """
    The entries of a list: ({entry as written: its names}, {}), or of a store of robots.txt: ({}, the arguments of
    robots.verdict()).

    robots: the "robots" of report.json, whose agents and rules a new store is read with; or None.
    """
    store = None
    if os.path.isdir(path):
        entries, store = {}, open_robots(path)
    elif readers.kind_of(path) in (None, "text"):
        entries = {line: names_in(line) for line, in readers.rows_of(path, comments=True)}
    else:
        entries, store = entries_of_rows(path)
    if not store:
        return entries, {}
    verdict = dict(store=store)
    if robots:
        # Older folders may have counted only the rules that name an agent.
        explicit = robots.get("only_explicit", False)
        verdict |= dict(agents=robots["agents"], missing=robots["missing"], explicit=explicit)
    return entries, verdict


def entries_of_rows(path):
    """(entries, store) of a file of rows: ids, URLs, hosts and texts, and no store; or a store of robots.txt."""
    entries, normalize = {}, dict(id=str, url=normalized_url, host=normalized_host, text=fingerprint)
    for number, row in enumerate(readers.records(path), 1):
        if "domain" in row and {"content", "robots"} & row.keys():
            return {}, open_robots(path)
        key = next((key for key in ("id", "url", "host", "text") if row.get(key)), None)
        if not key or not isinstance(row[key], str):
            raise ValueError(f"{path} row {number}: want an id, url, host or text, or domain and content of a "
                             "robots.txt")
        # The report keeps the unmatched entries, but should not keep the text of a document to delete.
        entry = f"the text of row {number}" if key == "text" else row[key]
        entries.setdefault(entry, set()).add((key, normalize[key](row[key])))
    return entries, None


def has_withdrawn(folder):
    """Whether documents were withdrawn from a data folder."""
    return any(row["withdrawn"] for row in rows_of(folder, ["withdrawn"]))


def reason_of(row, names, verdict):
    """
    (the reason for which a row is removed, the names in the list that it has); ("", an empty set) if it is not.

    names: ("id", ...), ("url", ...), ("host", ...) and ("text", fingerprint), as names_of() has them. verdict: the
    arguments of robots.verdict().
    """
    matched = (names_of(row) | {("text", row["text"])}) & names
    for key in ("id", "url", "text", "host"):
        if any(kind == key for kind, _ in matched):
            return f"withdrawn:{key}", matched
    reason = refusal(dict(url=row["url"]), verdict)
    return f"withdrawn:{reason}" if reason else "", matched


def choose(final, out, removals):
    """
    ({(shard, offset): row to remove, with its reason}, the entries that name no kept document, in their order).

    removals: (entries, verdict) of read_list(). ValueError: a source would become empty.
    """
    entries, verdict = removals
    names = set().union(*entries.values())
    removed, matched, copies, others = {}, set(), set(), set()
    for row in rows_of(final):
        reason, names_of_row = reason_of(row, names, verdict)
        # The text of a page that was removed before may be in the shards by another id.
        if reason and row["reason"]:
            copies.add(row["text"])
        # Planted passages stay.
        if row["reason"] and not row["withdrawn"] or row["source"] == "probes" and not row["bytes"]:
            continue
        if not reason:
            others.add((row["source"], row["split"]))
            continue
        # An entry that was withdrawn before is not unknown.
        matched |= names_of_row
        if not row["withdrawn"]:
            removed[row["shard"], row["offset"]] = dict(row, reason=reason)
    report_copies(final, copies, removed)
    for source, split in {(row["source"], row["split"]) for row in removed.values()} - others:
        raise ValueError(f"{out} would have no document of source {source!r} for {split}: prepare the files again "
                         "without these. Nothing was removed")
    return removed, [entry for entry, names in entries.items() if not names & matched]


def report_copies(final, copies, removed):
    """Print how many documents stay that have one of these texts, those of removed rows: they have another id."""
    stay = [row["id"] for row in rows_of(final) if row["text"] in copies and not row["reason"]
            and (row["shard"], row["offset"]) not in removed]
    if stay:
        print(f"{counted(len(stay), 'text')} of the list kept under another id, such as {stay[0]}: "
              "name that id as well to remove it")


def unmatched_message(entries, out):
    """A sentence about the entries that name no kept document, the first LISTED by name; "" if there are none."""
    listed = ", ".join(repr(entry[:LENGTH]) for entry in entries[:LISTED])
    others = f" and {len(entries) - LISTED:,} more" if len(entries) > LISTED else ""
    return f"no kept document of {out} matches {listed}{others}" if entries else ""


# ----------------------------------------------------------------------------------------------------------------------
# the files


def cut(final, new, meta, rows, date):
    """
    Write the shards and the ledger without the tokens of these rows, which were withdrawn on this date. Returns
    {source: {split: entries for meta.json}}.
    """
    entries, moved = {}, {}
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
            row.update(reason=rows[place]["reason"], withdrawn=date, split=None, shard=None, offset=None)
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
