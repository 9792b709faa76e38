"""
The command of data.py: the sources of a data folder and one window, or several folders joined to one.

$ python data.py data/stdlib                              # its sources, and one window as the model sees it
$ python data.py data/edu data/german --join=data/both    # a folder with the sources of both; copies no tokens
"""

import os
import shutil

import pyarrow
import pyarrow.compute as pc

import tokenizer
from configurator import run
from corpus.folder import building, clear, empty, publish
from corpus.ledger import FILE, add, ledger, write_account, write_ledger
from data import VOCABULARY, TokenDataset, read_meta
from engine.files import read_json, version

paths = []           # the data folder (default data/stdlib), or several with --join
join = ""            # a folder to make of them
block_size = 256     # tokens a window
seed = 28            # of the order of windows


def joined_meta(folders, final):
    """
    (meta.json of several folders in one, for a folder that will be at `final`; {folder: {source: its new name}}).

    ValueError for folders of different vocabularies, and for a source that is there twice.
    """
    if len(set(map(os.path.realpath, folders))) < len(folders):
        raise ValueError(f"{', '.join(folders)}: a folder is named twice")
    metas = [read_meta(folder) for folder in folders]
    joined = {key: metas[0][key] for key in ("tokenizer", *VOCABULARY)}
    joined["sources"], renamed = {}, {folder: {} for folder in folders}
    for folder, meta in zip(folders, metas):
        if meta["tokenizer_hash"] != joined["tokenizer_hash"]:
            raise ValueError(
                f"{folder} was made by the tokenizer {meta['tokenizer']} and {folders[0]} by "
                f"{joined['tokenizer']}, another one: prepare both with the same --tokenizer"
            )
        for name, source in meta["sources"].items():
            new = name
            if new in joined["sources"]:
                new = f"{os.path.basename(os.path.normpath(folder))}/{name}"
            if new in joined["sources"]:
                raise ValueError(f"{folder} has a source {name!r} again, already there as {new!r}")
            # The shards stay where they are, named by their path from the new folder.
            for part in source.values():
                for shard in part["shards"]:
                    path = os.path.join(folder, shard["file"])
                    shard["file"] = os.path.relpath(os.path.realpath(path), final)
            joined["sources"][new] = source
            renamed[folder][name] = new
    joined["version"] = version(joined)
    return joined, renamed


def join_folders(folders, out):
    """
    Write a data folder with the sources of all folders, whose shards stay where they are, and one ledger. `out` may be
    one of the folders, to which the others are added.

    ValueError as joined_meta, and if `out` holds anything but the result of an earlier --join.
    """
    final = os.path.realpath(out)
    meta, renamed = joined_meta(folders, final)
    others = [folder for folder in folders if os.path.realpath(folder) != final]
    with building(out, others, joined=True) as (final, tmp):
        empty(tmp)
        data = tmp / "data"
        data.mkdir()
        tokenizer_file = os.path.join(folders[0], "tokenizer.json")
        if os.path.isfile(tokenizer_file):
            shutil.copy(tokenizer_file, data)
        write_ledger(data / FILE, rows_of_all(folders, renamed, final))
        streams = {name: {split: part["shards"] for split, part in source.items()}
                   for name, source in meta["sources"].items()}
        reports = [read_json(f"{folder}/report.json") for folder in folders]
        write_account(data, meta, streams, joined_report(reports, out))
        print(texts_again(data))
        publish(final, tmp)
        clear(tmp)


def rows_of_all(folders, renamed, final):
    """Yield the rows of all ledgers, with the names of sources and shards in the new folder."""
    for folder in folders:
        for rows in ledger(folder):
            listed = rows.to_pylist()
            for row in listed:
                row["source"] = renamed[folder].get(row["source"], row["source"])
                if row["shard"]:
                    row["shard"] = os.path.relpath(os.path.realpath(os.path.join(folder, row["shard"])), final)
            yield pyarrow.Table.from_pylist(listed, rows.schema)


def joined_report(parts, out):
    """The reports of all parts as one, for write_account()."""
    ignored, asked = {}, [part["robots"] for part in parts if part["robots"]]
    for part in parts:
        for kind, names in part["ignored"].items():
            ignored.setdefault(kind, []).extend(names)
    run = dict(parts[0]["run"], out=os.path.normpath(out), command="\n".join(part["run"]["command"] for part in parts))
    return dict(
        run=run,
        inputs=[file for part in parts for file in part["inputs"]],
        ignored=ignored,
        rule=" ".join(sorted({part["rule"] for part in parts})),
        pii={name: all(part["pii"][name] for part in parts) for name in ("scrubbed", "in_code")},
        probes=None,
        robots=joined_robots(asked, len(parts)) if asked else None,
    )


def joined_robots(asked, n):
    """The sums of what the parts say of robots.txt. asked: of the parts that have consulted one, n: of all parts."""
    hosts, lost = {}, {}
    for robots in asked:
        hosts = {name: hosts.get(name, 0) + count for name, count in robots["hosts"].items()}
        for host, row in robots["top_blocked_hosts"].items():
            add(lost, host, dict(enumerate(row)), 0, 1)
    store = " ".join([*(robots["store"] for robots in asked), *["none"] * (n - len(asked))])
    return dict(asked[0], store=store, hosts=hosts, top_blocked_hosts=lost)


def texts_again(folder):
    """A sentence: the documents whose text is there before them, and the texts on both sides of the split."""
    rows = pyarrow.concat_tables(ledger(folder, ["text", "split", "reason", "bytes"]))
    rows = rows.filter(pc.and_(pc.equal(rows["reason"], ""), pc.greater(rows["bytes"], 0)))
    texts = rows.group_by("text").aggregate([("split", "count_distinct")])
    both = int((texts["split_count_distinct"].to_numpy() > 1).sum())
    how = ": prepare the folders with one --val_share and --split_by=text, or --remove them from one" if both else ""
    return (f"documents with a text that is there before: {len(rows) - len(texts):,}; texts for training and for "
            f"validation: {both:,}{how}")


def main():
    if join:
        if len(paths) < 2:
            raise ValueError("--join wants the folders to join: python data.py data/a data/b --join=data/both")
        join_folders(paths, join)
    folder = join or (paths[0] if paths else "data/stdlib")
    for name, source in read_meta(folder)["sources"].items():
        for split, part in source.items():
            size = f"{part['tokens']:14,} tokens {part['bytes'] / 1e6:10.2f} MB"
            print(f"{name:20} {split:5} {part['documents']:8,} documents {size}")
    if join:
        return
    data = TokenDataset(folder, "train", block_size, seed)
    idx, _, _, doc = data.batch(0, 1)
    n = doc.max() - doc.min() + 1
    print(f"{data.n_windows:,} windows of {block_size}; the first of seed {seed} has {n} documents:\n")
    print(tokenizer.load_for(folder).decode(idx[0].tolist()))


def start():
    """Run the command for data.py."""
    run(main, globals())
