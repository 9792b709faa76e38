"""
Delete documents from a data folder: prepare.py --remove=FILE --out=FOLDER. With --dry_run it only prints them.

    FILE         ids, URLs or hosts, one a line (# begins a comment; names_in() in corpus/ledger.py has their
                 meanings); rows with an id, url, host or text; or a newer store of robots.txt. Of a store only refusals
                 count: a host that is not in it, or was not fetched, withdraws nothing
    shards       lose the tokens of these documents; a shard that holds none of them stays the same file
    ledger       the rows stay, with "withdrawn:..." as the reason, and the time
    report       gains an entry in "removals": documents by reason and by entry of the list. Reports are published, so
                 they have the number and the sha256 of an entry; only the screen shows its text
    unmatched    entries that name no kept document are named at the end, with exit code 2; the documents of all other
                 entries are removed

A source may lose all its documents for validation, or for training: the will of their authors comes first. The last
document of a folder stays, because the user can delete the folder instead.

The new folder is made in OUT.tmp, checked, and renamed: after a kill at any moment the old or the new one is intact.
Windows are numbered anew, so train.py does not resume a run that has read the old data. prepare.py does not build the
folder again, since its files may bring the documents back.
"""

import hashlib
import os
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from corpus import readers
from corpus.dedup import fingerprint
from corpus.folder import clear, empty, publish, shards_of, write_shard
from corpus.hosts import HOST_FILES
from corpus.ledger import (
    FILE,
    came_in,
    changed,
    first_kind,
    is_email,
    is_last_part,
    ledger_rows,
    names_in,
    names_of,
    normalized_host,
    was_kept,
    write_ledger,
)
from corpus.report import added, counted, verify, write_report
from corpus.robots import verdict
from corpus.stores import open_robots, sha256_of_store

# Entries of a list that the error names, and characters of each that the screen shows.
LISTED, LENGTH = 10, 100


@dataclass
class Entry:
    """An entry of a list, and how many documents it names."""
    number: int                                         # of its line or row, from 1
    text: str                                           # for the screen
    sha256: str                                         # of its text, for the report
    meanings: list                                      # as names_in() gives them
    names: set = field(default_factory=set)             # the first meaning that a document of the folder has
    reasons: Counter = field(default_factory=Counter)   # {kind: kept documents}
    withdrawn: int = 0                                  # documents that an earlier removal has deleted


def withdraw(path, out, final, tmp=None):
    """
    Delete the documents that the file `path` names from the data folder `final`, which the user calls `out`.
    tmp: as building() gives it; without it nothing is written, and the screen says what would be deleted.

    ValueError, with the folder unchanged: it has none of these documents, or no others. ValueError, after the other
    documents have been deleted: an entry names no kept document.
    """
    meta, report = verify(final)
    if any(os.path.dirname(shard["file"]) for shard in shards_of(meta)):
        raise ValueError(f"{out} was joined from other folders: remove from these, and train on them: --data=A,B")
    entries, store = read_list(path, report["robots"])
    sizes = choose_meanings(entries, final)
    rows, copied = choose_rows(entries, store, final)
    print_choice(entries, rows, sizes)
    print_kept(rows, copied, store, final)
    unmatched = unmatched_message(entries, out)
    if not rows:
        nothing = f"it forbids no kept document of {out}" if store else f"none of it is in {out}"
        raise ValueError(f"{path}: {unmatched or nothing}. Nothing was removed")
    documents = documents_of(rows)
    if len(documents) == report["total"]["documents"]:
        raise ValueError(f"{path}: {out} would keep no document. Delete the folder instead. Nothing was removed")
    removed = f"{counted(len(documents), 'document')} ({counted(added(rows.values(), 'tokens'), 'token')})"
    if tmp:
        new = delete(rows, final, tmp, meta, report, record_of(path, entries, rows))
        print(f"{out}: {removed} removed, {new['total']['documents']:,} stay; version {meta['version'][:16]} is now "
              f"{new['version'][:16]}")
    else:
        print(f"{out}: {removed} would be removed; nothing was written (--dry_run)")
    if unmatched:
        others = f"were removed: see removals in {out}/report.json" if tmp else "would be removed"
        raise ValueError(f"{path}: {unmatched}. The documents of all other entries {others}")


# ----------------------------------------------------------------------------------------------------------------------
# the list


def read_list(path, robots):
    """
    (entries, None) of a list; ([], the arguments of robots.verdict()) of a store of robots.txt.

    robots: the "robots" of report.json, whose agents a new store is read with; or None.
    """
    if os.path.isdir(path):
        return [], arguments_of(path, robots)
    if readers.kind_of(path) in (None, "text"):
        lines = readers.lines_of(path, comments=True)
        return [Entry(number, line, digest(line), names_in(line)) for number, line in lines], None
    entries = []
    for number, row in enumerate(readers.records(path), 1):
        if "domain" in row and {"content", "robots"} & row.keys():
            return [], arguments_of(path, robots)
        entries.append(entry_of_row(number, row, path))
    return entries, None


def entry_of_row(number, row, path):
    """The Entry of a row with an id, url, host or text."""
    key = next((key for key in ("id", "url", "host", "text") if row.get(key)), None)
    if not key or not isinstance(row[key], str):
        raise ValueError(f"{path} row {number}: want an id, url, host or text, or domain and content of a robots.txt")
    value = text = row[key]
    if key == "id":
        meanings = [{("id", value)}]
    elif key == "url":
        meanings = [names - {("id", value)} for names in names_in(value)]
    elif key == "host":
        meanings = [{("host", normalized_host(value))}]
    else:
        text, meanings = f"the text of row {number}", [{("text", fingerprint(value))}]
    return Entry(number, text, digest(value), meanings)


def arguments_of(path, robots):
    """The arguments of robots.verdict() for a newer store."""
    # Not "deny": absence from a newer store, a failed fetch or a web page in place of the file withdraws nothing.
    arguments = dict(store=open_robots(path), missing="allow")
    if robots:
        # Older folders may have counted only the rules that name an agent.
        arguments |= dict(agents=robots["agents"], explicit=robots.get("only_explicit", False))
    return arguments


def digest(text):
    """The sha256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def has_withdrawn(folder):
    """Whether documents were withdrawn from a data folder."""
    return any(row["withdrawn"] for row in ledger_rows(folder, ["withdrawn"]))


# ----------------------------------------------------------------------------------------------------------------------
# the choice


def choose_meanings(entries, folder):
    """
    Set the names of each entry: its first meaning that a document of the folder has. Returns {name: kept documents} of
    the names of all meanings.
    """
    asked = {name for entry in entries for names in entry.meanings for name in names}
    sizes = Counter()
    for row in ledger_rows(folder) if asked else ():
        if is_removable(row) and came_in(row):
            # A document that was removed before counts 0, but its entry has a match.
            sizes.update(dict.fromkeys(names_of(row) & asked, not row["withdrawn"]))
    for entry in entries:
        entry.names = next((names for names in entry.meanings if names & sizes.keys()), entry.meanings[0])
    return sizes


def choose_rows(entries, store, folder):
    """
    ({(shard, offset): row to remove, with its reason}, the texts of rows that were removed before). Counts the
    documents of each entry. entries, store: of read_list().
    """
    entries_of = {}
    for entry in entries:
        for name in entry.names:
            entries_of.setdefault(name, []).append(entry)
    rows, copied = {}, set()
    for row in ledger_rows(folder):
        names = names_of(row) & entries_of.keys()
        reason = opt_out_of(row, store) if store else first_kind(names)
        if reason and row["reason"]:
            copied.add(row["text"])
        if not reason or not is_removable(row):
            continue
        if came_in(row):
            count_document(row, names, entries_of)
        if not row["withdrawn"]:
            rows[row["shard"], row["offset"]] = dict(row, reason=f"withdrawn:{reason}")
    return rows, copied


def count_document(row, names, entries_of):
    """Count a document in each entry that has one of these names of it. entries_of: {name: entries}."""
    for entry in {entry.number: entry for name in names for entry in entries_of[name]}.values():
        if row["withdrawn"]:
            entry.withdrawn += 1
        else:
            entry.reasons[first_kind(names & entry.names)] += 1


def is_removable(row):
    """Whether a row is of a document that was kept. A planted passage did not come in."""
    return was_kept(row) and (came_in(row) or is_last_part(row))


def documents_of(rows):
    """The rows that count a document, of those that choose_rows() has chosen: all but the last parts."""
    return [row for row in rows.values() if came_in(row)]


def opt_out_of(row, store):
    """The reason for which a newer store forbids the URL of a row, or None. store: the arguments of verdict()."""
    allowed, reason = verdict(row["url"], **store)
    return None if allowed else reason


def count_reasons(rows):
    """{reason: documents}, the commonest first. A reason is a kind of names, or robots:AGENT without the rule."""
    reasons = (row["reason"].removeprefix("withdrawn:") for row in documents_of(rows))
    return dict(Counter(sorted(":".join(reason.split(":")[:2]) for reason in reasons)).most_common())


# ----------------------------------------------------------------------------------------------------------------------
# the screen and the report


def print_choice(entries, rows, sizes):
    """Print how many documents each entry of a list removes and by what, and the sums. sizes: of choose_meanings()."""
    for entry in entries:
        counts = [f"{counted(n, 'document')} by {kind}" for kind, n in entry.reasons.items()]
        counts += [f"{entry.withdrawn:,} removed before"] * (entry.withdrawn > 0)
        print(f"{entry.number:>6}  {entry.text[:LENGTH]}: {', '.join(counts) or 'no document'}{hint(entry, sizes)}")
    if rows:
        print("removed by:", ", ".join(f"{reason} {n:,}" for reason, n in count_reasons(rows).items()))


def hint(entry, sizes):
    """The end of the line about an entry: which of its two meanings counts and how wide the other is, or why none."""
    if is_email(entry.text):
        return " (an e-mail address names no host; python -m corpus.audit FOLDER --find=ADDRESS searches the texts)"
    if len(entry.meanings) == 1:
        return ""
    (kind, name), = entry.meanings[1]
    wide = f"{counted(sizes[kind, name], 'document')} {'of host' if kind == 'host' else 'below'} {name}"
    if entry.names == entry.meanings[1]:
        return f" (no page has exactly this URL; {wide})"
    return f" (this page alone; {wide}: write {name}{'/' * (kind == 'path')} to remove all)"


def print_kept(rows, copied, store, folder):
    """
    Print what stays: documents with the text of a removed one, documents of hosts that a newer store does not know; and
    which source keeps nothing for training or validation.
    """
    copies, unknown, left = [], 0, set()
    for row in ledger_rows(folder):
        if row["reason"] or (row["shard"], row["offset"]) in rows:
            continue
        left.add((row["source"], row["split"]))
        if is_last_part(row):
            continue
        copies += [row["id"]] * (row["text"] in copied)
        unknown += bool(store) and verdict(row["url"], **store)[1] == "no-robots"
    if copies:
        print(f"{counted(len(copies), 'text')} of the list kept under another id, such as {copies[0]}: "
              "name that id as well to remove it")
    if unknown:
        print(f"kept: {counted(unknown, 'document')} of hosts that the store lacks or could not fetch, which is no "
              "withdrawal")
    for source, split in sorted({(row["source"], row["split"]) for row in rows.values()} - left):
        purpose = "validation" if split == "val" else "training"
        print(f"source {source} keeps no document for {purpose}; to choose others, prepare its files again without "
              "these documents, in another --out")


def unmatched_message(entries, out):
    """A sentence about the entries that name no kept document, the first LISTED by name; "" without such entries."""
    unmatched = [entry.text for entry in entries if not entry.reasons and not entry.withdrawn]
    listed = ", ".join(repr(text[:LENGTH]) for text in unmatched[:LISTED])
    others = f" and {len(unmatched) - LISTED:,} more" if len(unmatched) > LISTED else ""
    return f"no kept document of {out} matches {listed}{others}" if unmatched else ""


def record_of(path, entries, rows):
    """The removal as the report has it."""
    return dict(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        file=path,
        sha256=sha256_of_store(path),
        documents=len(documents_of(rows)),
        tokens=added(rows.values(), "tokens"),
        reasons=count_reasons(rows),
        entries=[dict(number=entry.number, sha256=entry.sha256, reasons=dict(entry.reasons), withdrawn=entry.withdrawn)
                 for entry in entries])


def without_text(removal):
    """A removal of a report. Older versions recorded the text of the entries that match nothing."""
    if "entries" in removal:
        return removal
    old = [dict(number=None, sha256=digest(text), reasons={}, withdrawn=0) for text in removal["unmatched"]]
    return {key: value for key, value in removal.items() if key != "unmatched"} | dict(reasons={}, entries=old)


# ----------------------------------------------------------------------------------------------------------------------
# the files


def delete(rows, final, tmp, meta, report, removal):
    """Replace the data folder `final` by one without these rows, with `removal` in its report. Returns the report."""
    # A killed run may have left the work of other data.
    empty(tmp)
    new = tmp / "data"
    new.mkdir()
    streams = cut(final, new, meta, rows, removal["date"])
    for name in {"tokenizer.json", "probes.json", *HOST_FILES} & {*os.listdir(final)}:
        shutil.copy(final / name, new)
    # Older folders have no removals.
    removals = [without_text(older) for older in report.get("removals", [])]
    report = write_report(new, meta, streams, dict(report, removals=[*removals, removal]))
    verify(new)
    publish(final, tmp)
    clear(tmp)
    return report


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
