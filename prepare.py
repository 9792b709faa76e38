"""
Documents -> token shards that train.py reads.

    every document:  <s> text </s>, in an order given by a hash of its id; a hash of the id also says train or val,
    so that adding a file moves no other document, and the same input gives the same bytes

$ python prepare.py                                    # the source of this Python's standard library -> data/stdlib, in seconds
$ python prepare.py my_texts/ notes.md book.jsonl.gz --out=data/mine
"""

import glob
import gzip
import hashlib
import json
import os
import shutil
import sysconfig

import numpy as np
from tqdm import tqdm

import tokenizer as tokenizers

paths = []                          # files, folders, globs: .txt .md .py .jsonl .jsonl.gz; nothing = the standard library
out = "data/stdlib"                 # the folder to write; default data/stdlib, data/mine when paths are given
tokenizer = ""                      # byte | apertus | apertus:K | a tokenizer.json; "" = train_bpe
train_bpe = 4096                    # size of a BPE vocabulary trained on the documents, where no tokenizer is named
val_share = 0.04                    # of the documents, by hash of their id
shard_tokens = 100_000_000          # tokens a shard at most

ENDINGS = (".txt", ".md", ".py", ".jsonl", ".jsonl.gz")
# Left out of the default corpus: tests, and tables of characters and of documentation that would dominate a small validation set.
NOT_PROSE = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "__pycache__"}


def inputs():
    """The files to read, as (id, path): ids are relative to what the user named, so that moving a folder changes nothing."""
    if not paths:
        root = sysconfig.get_path("stdlib")
        found = [os.path.relpath(f, root) for f in glob.glob(os.path.join(root, "**", "*.py"), recursive=True)]
        return [(f.replace(os.sep, "/"), os.path.join(root, f)) for f in sorted(found) if not NOT_PROSE & set(f.split(os.sep))]
    files = {}
    for path in paths:
        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            raise ValueError(f"no such file, folder or pattern: {path!r}")
        for match in matches:
            if os.path.isdir(match):
                inside = sorted(glob.glob(os.path.join(match, "**", "*"), recursive=True))
                files.update({os.path.relpath(f, match).replace(os.sep, "/"): f for f in inside if f.endswith(ENDINGS)})
            else:
                files[os.path.basename(match)] = match
    return list(files.items())


def documents(name, path, skipped):
    """Yield (id, text) of one file; count in `skipped` what is not text, by reason."""
    def skip(why):
        skipped[why] = skipped.get(why, 0) + 1

    if not path.endswith(ENDINGS):
        return skip("unknown kind of file")
    try:
        opener = gzip.open if path.endswith(".gz") else open
        with opener(path, "rb") as f:
            raw = f.read()
    except (OSError, EOFError):
        return skip("unreadable")
    if b"\0" in raw:
        return skip("binary")
    rows = raw.split(b"\n") if ".jsonl" in name else [raw]
    for i, row in enumerate(rows):
        if not row.strip():
            continue
        try:
            text = row.decode("utf-8-sig")
        except UnicodeDecodeError:
            skip("not UTF-8")
            continue
        if ".jsonl" not in name:
            yield name, text
            continue
        try:
            record = json.loads(text)
            yield f"{name}:{record.get('id', i)}", record["text"]
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError):
            skip("a line without JSON text")


def share(doc_id):
    """A number in [0, 1) that depends on the id alone: below val_share is validation, and documents stand in its order."""
    return int.from_bytes(hashlib.sha256(doc_id.encode()).digest()[:8], "big") / 2**64


def main():
    global out
    if paths and out == "data/stdlib":
        out = "data/mine"
    skipped, docs = {}, {}
    for name, path in tqdm(inputs(), "reading", unit="file"):
        docs.update(documents(name, path, skipped))
    docs = sorted(((i, t) for i, t in docs.items() if t.strip()), key=lambda d: share(d[0]))
    for why, n in skipped.items():
        print(f"skipped {n}: {why}")
    if not docs:
        raise ValueError(f"no text found in {paths}: .txt, .md, .py are documents, .jsonl needs a field \"text\" in each line")

    half_done = out + ".tmp"
    shutil.rmtree(half_done, ignore_errors=True)
    os.makedirs(half_done)
    splits = {"train": [d for d in docs if share(d[0]) >= val_share], "val": [d for d in docs if share(d[0]) < val_share]}
    if not splits["val"]:                                                  # a handful of documents: the first by hash validates
        splits = {"train": docs[1:] or docs, "val": docs[:1]}
    name = tokenizer
    if not name:
        name = os.path.join(half_done, "tokenizer.json")
        tokenizers.train_bpe([text for _, text in splits["train"]], train_bpe, name)
    tok = tokenizers.load(name)
    meta = dict(tokenizer=tok.name if tokenizer else "tokenizer.json", tokenizer_hash=tok.hash, vocab_size=tok.vocab_size, bos=tok.bos, eos=tok.eos)
    dtype = np.uint16 if tok.vocab_size <= 2**16 else np.uint32
    source = {}
    for split, chosen in splits.items():
        ids = [np.array([tok.bos, *tok.encode(text), tok.eos], dtype) for _, text in tqdm(chosen, f"tokenizing {split}", unit="doc")]
        stream, shards = np.concatenate(ids), []
        for i in range(0, len(stream), shard_tokens):
            file = f"{split}_{i // shard_tokens:05d}.npy"
            shards.append(dict(file=file, **write_shard(os.path.join(half_done, file), stream[i:i + shard_tokens])))
        source[split] = dict(documents=len(chosen), tokens=len(stream), bytes=sum(len(t.encode()) for _, t in chosen), shards=shards)
    meta["sources"] = {os.path.basename(os.path.normpath(out)): source}
    with open(os.path.join(half_done, "meta.json"), "w", encoding="utf-8") as f:
        json.dump(meta, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    shutil.rmtree(out, ignore_errors=True)
    os.replace(half_done, out)
    t = source["train"]
    print(f"{out}: {t['documents']:,} documents, {t['tokens']:,} tokens to train on ({t['bytes'] / t['tokens']:.2f} bytes each), "
          f"{source['val']['tokens']:,} to validate; tokenizer {meta['tokenizer']} of {tok.vocab_size:,}")


def write_shard(path, tokens):
    """Write a 1-D .npy, flushed to disk. Returns its line for meta.json."""
    with open(path, "wb") as f:
        np.lib.format.write_array_header_1_0(f, np.lib.format.header_data_from_array_1_0(tokens))
        f.write(tokens.tobytes())                          # np.save hides a full disk behind "requested and written"
        f.flush()
        os.fsync(f.fileno())
    with open(path, "rb") as f:
        return dict(tokens=len(tokens), sha256=hashlib.file_digest(f, "sha256").hexdigest())


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
