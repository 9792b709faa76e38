"""
The command of data.py: the sources of a data folder and one window, or several folders joined to one.

$ python data.py data/stdlib                              # its sources, and one window as the model sees it
$ python data.py data/edu data/german --join=data/both    # a folder with the sources of both; copies no tokens
"""

import json
import os
import shutil

import tokenizer
from configurator import run
from corpus.kept import join_audits
from corpus.shards import claim, publish
from data import VOCABULARY, TokenDataset, read_meta
from engine.files import version

paths = []           # the data folder (default data/stdlib), or several with --join
join = ""            # a folder to make of them
block_size = 256     # tokens a window
seed = 28            # of the order of windows


def joined_meta(folders, final):
    """
    meta.json of several folders in one, for a folder that will stand at `final`.

    ValueError for folders of different vocabularies, and for a source that is there twice.
    """
    metas = [read_meta(folder) for folder in folders]
    joined = {key: metas[0][key] for key in ("tokenizer", *VOCABULARY)}
    joined["sources"] = {}
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
    joined["version"] = version(joined)
    return joined


def join_folders(folders, out):
    """
    Write out/meta.json with the sources of all folders, whose shards stay where they are, and one audit. Prints how
    many texts are there more than once. `out` may be one of the folders, to which the others are added.

    ValueError as joined_meta, and if `out` holds anything but the result of an earlier --join.
    """
    final = os.path.realpath(out)
    joined = joined_meta(folders, final)
    others = [folder for folder in folders if os.path.realpath(folder) != final]
    final, tmp, lock = claim(out, others, joined=True)
    with lock:
        data = os.path.join(tmp, "data")
        shutil.rmtree(data, ignore_errors=True)
        os.makedirs(data)
        tokenizer_file = os.path.join(folders[0], "tokenizer.json")
        if os.path.isfile(tokenizer_file):
            shutil.copy(tokenizer_file, data)
        with open(os.path.join(data, "meta.json"), "w", encoding="utf-8") as f:
            json.dump(joined, f, indent=1)
        print(join_audits(folders, joined, final, data))
        publish(final, tmp)


def main():
    if join:
        if len(paths) < 2:
            raise ValueError("--join wants the folders to join: python data.py data/a data/b --join=data/both")
        join_folders(paths, join)
    folder = join or (paths[0] if paths else "data/stdlib")
    data = TokenDataset(folder, "train", block_size, seed)
    for name, source in data.meta["sources"].items():
        for split in ("train", "val"):
            s = source[split]
            size = f"{s['documents']:8,} documents {s['tokens']:14,} tokens {s['bytes'] / 1e6:10.2f} MB"
            print(f"{name:20} {split:5} {size}")
    idx, _, _, doc = data.batch(0, 1)
    n_documents = doc.max() - doc.min() + 1
    print(f"{data.n_windows:,} windows of {block_size}; the first of seed {seed} has {n_documents} documents:\n")
    print(tokenizer.load_for(folder).decode(idx[0].tolist()))


def start():
    """Run the command for data.py."""
    run(main, globals())
