"""
The command of data.py: print the sources of a data folder and one window, or join several folders to one.

$ python data.py data/stdlib                              # its sources, and one window as the model sees it
$ python data.py data/edu data/german --join=data/both    # a folder with the sources of both; copies no tokens
"""

import os
import shutil
from collections import Counter
from itertools import permutations

import numpy as np

import data
import tokenizer
from configurator import run
from corpus.folder import building, clear, empty, publish
from corpus.ledger import FILE, changed, rows_of, write_ledger, write_report
from corpus.shards import shards_of
from corpus.withdraw import reason_of, withdrawn_entries
from engine.files import read_json

paths = []           # the data folder (default data/stdlib), or several with --join
join = ""            # the folder to write, with the sources of all of them
block_size = 256     # tokens per window
seed = 28            # seed of the order of windows


def join_folders(folders, out):
    """
    Write a data folder with one ledger and the sources of all folders; their shards stay where they are.

    ValueError: two folders have the same shards, the vocabularies differ, two sources have one name even as
    FOLDER/SOURCE, a document was withdrawn from another of the folders, or `out` holds anything but the result of an
    earlier --join.
    """
    metas = {folder: data.read_meta(folder) for folder in folders}
    files = [os.path.realpath(f"{folder}/{shard['file']}") for folder in folders for shard in shards_of(metas[folder])]
    if len(set(files)) < len(files):
        raise ValueError(f"{', '.join(folders)}: a folder is named twice, or is a part of another already")
    names = new_names(metas)
    for folder, other in permutations(folders, 2):
        withdrawn = withdrawn_entries(folder)
        # Most folders have no withdrawn documents and need no comparison.
        for row in rows_of(other) if withdrawn[0] else []:
            if not row["reason"] and reason_of(row, withdrawn)[0]:
                raise ValueError(f"{other} holds {row['id']}, which was withdrawn from {folder}: remove it there too, "
                                 f"python prepare.py --out={other} --remove=LIST")
    with building(out, folders, joined=True) as (final, tmp):
        empty(tmp)
        new = tmp / "data"
        new.mkdir()
        if os.path.isfile(f"{folders[0]}/tokenizer.json"):
            shutil.copy(f"{folders[0]}/tokenizer.json", new)
        tables = (table for folder in folders for table in changed(folder, renamed, folder, names, final))
        write_ledger(new / FILE, tables)
        streams = {
            name: {
                split: [dict(shard, file=seen_from(final, folder, shard["file"])) for shard in part["shards"]]
                for split, part in metas[folder]["sources"][source].items()}
            for (folder, source), name in names.items()}
        report = joined_report([read_json(f"{folder}/report.json") for folder in folders], out)
        write_report(new, metas[folders[0]], streams, report)
        publish(final, tmp)
        clear(tmp)


def new_names(metas):
    """{(folder, source): its name in the joined folder}. metas: {folder: its meta.json}."""
    names, first = {}, next(iter(metas))
    for folder, meta in metas.items():
        if meta["tokenizer_hash"] != metas[first]["tokenizer_hash"]:
            raise ValueError(f"{folder} was made by the tokenizer {meta['tokenizer']} and {first} by "
                             f"{metas[first]['tokenizer']}, another one: prepare both with the same --tokenizer")
        for source in meta["sources"]:
            longer = f"{os.path.basename(os.path.normpath(folder))}/{source}"
            name = longer if source in names.values() else source
            if name in names.values():
                raise ValueError(f"{folder} has a source {source!r} again, already there as {name!r}")
            names[folder, source] = name
    return names


def seen_from(final, folder, file):
    """The path of a shard relative to the folder `final`."""
    return os.path.relpath(os.path.realpath(f"{folder}/{file}"), final)


def renamed(row, folder, names, final):
    """Give a row of a ledger the names of its source and shard in the new folder."""
    row["source"] = names.get((folder, row["source"]), row["source"])
    row["shard"] = row["shard"] and seen_from(final, folder, row["shard"])


def joined_report(parts, out):
    """The reports of all parts as one, for write_report()."""
    ignored, consulted = {}, [part["robots"] for part in parts if part["robots"]]
    for part in parts:
        for kind, names in part["ignored"].items():
            ignored.setdefault(kind, []).extend(names)
    return dict(
        run=dict(
            parts[0]["run"],
            out=out,
            command="\n".join(part["run"]["command"] for part in parts)),
        inputs=[file for part in parts for file in part["inputs"]],
        ignored=ignored,
        rule=" ".join(sorted({part["rule"] for part in parts})),
        pii={name: all(part["pii"][name] for part in parts) for name in ("scrubbed", "in_code")},
        probes=None,
        robots=joined_robots(consulted, len(parts)) if consulted else None,
    )


def joined_robots(consulted, n):
    """
    The opt-outs of several folders, added up.

    consulted: the opt-outs of each folder that consulted a store. n: the number of all folders.
    """
    hosts, lost = Counter(), {}
    for robots in consulted:
        hosts.update(robots["hosts"])
        for host, sizes in robots["top_blocked_hosts"].items():
            lost[host] = np.add(sizes, lost.get(host, 0)).tolist()
    stores = [robots["store"] for robots in consulted] + ["none"] * (n - len(consulted))
    return dict(consulted[0], store=" ".join(stores), hosts=hosts, top_blocked_hosts=lost)


def main():
    if bool(join) != (len(paths) > 1):
        raise ValueError("--join wants the folders to join, and several folders want --join: "
                         "python data.py data/a data/b --join=data/both")
    if join:
        join_folders(paths, join)
    folder = join or (paths or ["data/stdlib"])[0]
    for name, source in data.read_meta(folder)["sources"].items():
        for split, part in source.items():
            print(f"{name:20} {split:5} {part['documents']:8,} documents {part['tokens']:14,} tokens "
                  f"{part['bytes'] / 1e6:10.2f} MB")
    if join:
        return
    windows = data.TokenDataset(folder, "train", block_size, seed)
    idx, _, _, doc = windows.batch(0, 1)
    n = doc.max() - doc.min() + 1
    print(f"{windows.n_windows:,} windows of {block_size}; the first of seed {seed} has {n} documents:\n")
    print(tokenizer.load_for(folder).decode(idx[0].tolist()))


def start():
    """Run this command as data.py: its name stands in front of the errors."""
    run(main, globals(), dict(__doc__=__doc__, __file__=data.__file__))
