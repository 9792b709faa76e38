"""
Token shards -> batches. The order of samples is a pure function of (seed, number of the sample): no state.

    sample g of the run:   epoch, i = divmod(g, N)           N windows in the data
                           window   = permute(i, N, seed, epoch)
                           tokens   = stream[window * T : window * T + T + 1]

Windows are block_size + 1 tokens and overlap by one, as in Megatron's loader, which Apertus used (report sec. 3):
inputs are the first T, targets the last T. Instead of a table of shuffled indices (29 GB for 15T tokens) a small
cipher permutes the window numbers: a Feistel network is a bijection whatever its round function is. Every process can
compute every sample, so 1 and 512 ranks see the same data, and a resumed run needs only its step number.

Several sources (sets of shards) are one stream, in proportion to their sizes, as Apertus mixed them. Or each source is
a stream of its own, and a weight gives its share of the samples. Both are arithmetic on g. Several folders of one
vocabulary are read like one: --data=A,B mixes them by size, --data="{A: 2, B: 1}" by weights.

$ python data.py data/stdlib                # its sources, and one window as the model sees it
$ python data.py data/edu data/german       # the same for both together, as train.py reads --data=data/edu,data/german

A run in stages, like the five of Apertus (report sec. 3), changes its sources and their order at given numbers of
samples: a table in a config, such as configs/8b.py, and --stage.
"""

import functools
import hashlib
import itertools
import math
import os
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from configurator import run
from engine.files import read_json, sha256_of, version
from goldfish import goldfish_mask

# Settings of this file as a command.
paths = []           # data folders; none: data/stdlib
block_size = 256     # tokens per window
seed = 28            # seed of the order of windows

# Letters: T block_size, the targets of a window; g number of a sample in the run.

# -----------------------------------------------------------------------------
# The order of samples


def feistel(x, half, keys):
    """Encrypt an array of uint64 of 2 * half bits: each round swaps the halves, XORing one with a hash of the other."""
    mask = (1 << half) - 1
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ hash32(right ^ key) & mask
    return left << half | right


def permute(i, n, seed, epoch):
    """
    Bijection of [0, n) onto itself, keyed by (seed, epoch). i: array of int64 -> array of int64.

    Six rounds on the next even number of bits. Results >= n are permuted again until they are smaller ("cycle-walking":
    fewer than 4 times on average).
    """
    bits = int(n - 1).bit_length()
    half = max(1, (bits + 1) // 2)
    keys = [round_key(f"{seed}:{epoch}:{r}") for r in range(6)]
    x = feistel(i.astype(np.uint64), half, keys)
    while (too_large := x >= n).any():
        x[too_large] = feistel(x[too_large], half, keys)
    return x.astype(np.int64)


def round_key(text):
    """32 bits of a text's sha256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def hash32(x):
    """A 32-bit integer hash (the finalizer of MurmurHash3) on arrays of uint64."""
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def by_epoch(epoch, i, n, seed):
    """permute() of each i in its own epoch. epoch, i: arrays of int64."""
    out = np.empty_like(i)
    for e in np.unique(epoch):
        inside = epoch == e
        out[inside] = permute(i[inside], n, seed, int(e))
    return out


# -----------------------------------------------------------------------------
# Files of tokens


def stamp(path):
    """The time and the size of a file, which change when it is replaced."""
    stat = os.stat(path)
    return stat.st_mtime_ns, stat.st_size


# A process may have 256 (macOS) or 1,024 files open, but 15T tokens are 150,000 shards: only 128 stay mapped.
@functools.lru_cache(maxsize=128)
def mapped(path, stamped):
    """The tokens of a shard, a 1-D .npy, mapped into memory. ValueError if it was replaced after stamp(path)."""
    if stamp(path) != stamped:
        raise ValueError(f"{path} was replaced during the run: --resume checks whether the data are the same")
    # This is still the mapped file, but slicing a plain array takes less time than slicing np.memmap.
    return np.asarray(np.lib.format.open_memmap(path, mode="r"))


class Stream:
    """
    Shards one after the other as one sequence of tokens, cut into windows of T + 1 that overlap by one.

    entries: the shards' entries in meta.json. begins: the positions of their first tokens, and the stream's length.
    ValueError: a file is not the shard that meta.json describes.
    """

    def __init__(self, folder, entries, T):
        self.files = []
        self.begins = [0]
        for entry in entries:
            path = os.path.join(folder, entry["file"])
            n = entry["tokens"]
            self.files.append((path, stamp(path)))
            self.begins.append(self.begins[-1] + n)
            try:
                tokens = mapped(*self.files[-1])
                content = f"{tokens.dtype}{list(tokens.shape)}"
            except OSError:                                # it may be whole, and not readable now
                raise
            # Of any kind: numpy parses the header of a file that may come from anybody.
            except Exception as e:
                content = e
            if content not in (f"uint16[{n}]", f"uint32[{n}]"):
                raise ValueError(f"{path}: {content} where meta.json has {n} tokens: prepare the data again")
        self.n_tokens = self.begins[-1]
        self.n_windows = (self.n_tokens - 1) // T

    def read(self, begin, out):
        """Fill out (n,) with stream[begin : begin + n] and return it. Both ends of the stream wrap around."""
        at = 0
        while at < len(out):
            token = (begin + at) % self.n_tokens
            shard = bisect_right(self.begins, token) - 1
            offset = token - self.begins[shard]
            piece = mapped(*self.files[shard])[offset : offset + len(out) - at]
            out[at : at + len(piece)] = piece
            at += len(piece)
        return out


# -----------------------------------------------------------------------------
# Data folders

# The keys of meta.json that define the meaning of token ids.
VOCABULARY = ("tokenizer_hash", "vocab_size", "bos", "eos")


def folders_of(data):
    """
    {folder: weight} of the setting --data: A; A,B; or {A: 2, B: 1}, as a text or a dict. Without weights they are None.

    ValueError: a weight is no number, or a folder is named twice.
    """
    if isinstance(data, dict):
        return data
    # The name of a folder may have a comma in it.
    if os.path.isdir(data):
        return {data: None}
    folders = {}
    for part in data.strip("{} ").split(","):
        folder, weight = part.strip(), None
        if data.startswith("{"):
            folder, _, number = part.rpartition(":")
            folder, weight = folder.strip(" '\""), as_weight(number, data)
        if os.path.realpath(folder) in map(os.path.realpath, folders):
            raise ValueError(f"--data={data}: {folder} is named twice")
        folders[folder] = weight
    return folders


def as_weight(text, data):
    """A weight in --data as a number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--data={data}: want folders, A,B, or folders and weights, {{A: 2, B: 1}}") from None


def first_folder(data):
    """The first folder of --data. Its tokenizer.json is that of all of them."""
    return next(iter(folders_of(data)))


def read_meta(data):
    """
    meta.json of a data folder, or of the folders that --data names as one, with a list `folders` of their paths,
    versions, weights and names of sources.

    A source whose name an earlier folder has is called FOLDER/SOURCE. ValueError: a meta.json is missing or a
    stranger's (with the command that makes it), two vocabularies differ, or two sources have the same name even so.
    """
    folders = folders_of(data)
    metas = {folder: meta_of(folder) for folder in folders}
    first = next(iter(metas))
    if len(metas) == 1:
        return metas[first]
    joined = {key: metas[first].get(key) for key in ("tokenizer", *VOCABULARY)} | dict(sources={}, folders=[])
    for folder, meta in metas.items():
        if any(meta.get(key) != joined[key] for key in VOCABULARY):
            raise ValueError(f"{folder} was made by the tokenizer {meta.get('tokenizer')} and {first} by "
                             f"{joined['tokenizer']}, another one: prepare both with the same --tokenizer")
        names = []
        for source, splits in meta["sources"].items():
            longer = f"{os.path.basename(os.path.normpath(folder))}/{source}"
            name = longer if source in joined["sources"] else source
            if name in joined["sources"]:
                raise ValueError(f"{folder} has a source {source!r} again, already there as {name!r}")
            joined["sources"][name] = {split: with_paths(part, folder) for split, part in splits.items()}
            names.append(name)
        joined["folders"].append(dict(path=folder, version=version(meta), weight=folders[folder], sources=names))
    return joined


def with_paths(part, folder):
    """The entry of a split in meta.json, with the whole paths of its shards."""
    shards = [shard | dict(file=os.path.abspath(f"{folder}/{shard['file']}")) for shard in part["shards"]]
    return part | dict(shards=shards)


def meta_of(folder):
    """meta.json of one data folder."""
    path = f"{folder}/meta.json"
    if not os.path.isfile(path) or "sources" not in (meta := read_json(path)):
        raise ValueError(f"no prepared data in {folder!r}: run `python prepare.py [FILES] --out={folder}`")
    return meta


# -----------------------------------------------------------------------------
# Samples


class Batch(NamedTuple):
    """Windows, each (n, T): inputs and targets, int64; keep, bool: which targets have a loss; doc: document numbers."""
    idx: torch.Tensor
    targets: torch.Tensor
    keep: torch.Tensor
    doc: torch.Tensor

    def split(self, micro_batch_size, device):
        """The batch on a device, as a list of micro-batches of so many windows."""
        # Copied once a step, since a GPU finishes all queued kernels before each copy from pageable memory.
        return [Batch(*part) for part in zip(*(t.to(device).split(micro_batch_size) for t in self))]


# A weight is a whole number of slots, so every 10,000 samples have exactly this mixture.
SLOTS = 10_000


def mix_weights(weights):
    """
    {source: weight} -> {source: slots of SLOTS}, by largest remainders.

    ValueError if there is no weight, or one is not positive or below 1/SLOTS of their sum.
    """
    if not weights or min(weights.values()) <= 0:
        raise ValueError(f"weights {weights}: want a positive number for each source")
    total = sum(weights.values())
    exact = {name: SLOTS * weight / total for name, weight in weights.items()}
    slots = {name: int(share) for name, share in exact.items()}
    # Largest remainder first.
    for name in sorted(exact, key=lambda name: slots[name] - exact[name])[: SLOTS - sum(slots.values())]:
        slots[name] += 1
    if min(slots.values()) < 1:
        raise ValueError(f"weights {weights}: the smallest is below one sample in {SLOTS:,}")
    return slots


def streams_of(meta, data, split, sources):
    """
    What a TokenDataset reads: ({stream: names of its sources}, {stream: weight}, or None for a single stream).

    ValueError: there is no such source.
    """
    names = list(sources or meta["sources"])
    for name in names:
        if name not in meta["sources"]:
            raise ValueError(f"{data} has no source {name!r}; it has {', '.join(meta['sources'])}")
    if isinstance(sources, dict):
        return {name: [name] for name in names}, sources
    weights = {folder["path"]: folder["weight"] for folder in meta.get("folders", ())}
    # All validation text is read in proportion to its size.
    if sources or split == "val" or None in weights.values() or not weights:
        return {0: names}, None
    return {folder["path"]: folder["sources"] for folder in meta["folders"]}, weights


class TokenDataset:
    """
    The windows of one split ("train" or "val") of a folder that prepare.py wrote, or of several: data is as in
    folders_of().

    sources: names in meta.json, None = all. They are one stream, in proportion to their sizes, as in Apertus; a name
    given twice counts twice. Or {name: weight}: each source is a stream of its own, shuffled and repeated separately,
    with its share of the samples; so is each folder that has a weight.

    goldfish_k > 0 drops 1/k of the targets. goldfish_scope 'stream' hashes across the window's start, 'window'
    (Apertus) does not: goldfish.py explains why it matters.

    ValueError: a source is missing, or has less text than one window; wrong settings of Goldfish.
    """

    # A StagedDataset has a number of samples here, after which the run ends.
    stage_end = None

    def __init__(
        self,
        data,
        split,
        block_size,
        seed=28,
        goldfish_k=0,
        goldfish_h=50,
        goldfish_hash="product",
        goldfish_scope="window",
        sources=None
    ):
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        self.data = data
        self.T = block_size
        self.seed = seed
        self.goldfish = goldfish_k, goldfish_h, goldfish_hash
        if goldfish_k:
            # A mask of no targets, so that a wrong setting is an error before the run begins.
            goldfish_mask(torch.empty(0, dtype=torch.int64), *self.goldfish)
        self.n_context = goldfish_h - 1 if goldfish_k and goldfish_scope == "stream" else 0
        # The last few pages, since the samples of a step are neighbours.
        self.cached_page = functools.lru_cache(maxsize=8)(self.page)
        self.meta = read_meta(data)
        names, weights = streams_of(self.meta, data, split, sources)
        # Stream s has the slots slots[s] to slots[s + 1] - 1.
        self.slots = None if weights is None else np.cumsum([0, *mix_weights(weights).values()])
        self.parts, self.streams = [], []
        for group in names.values():
            parts = [self.meta["sources"][name][split] for name in group]
            shards = [shard for part in parts for shard in part["shards"]]
            self.parts += parts
            self.streams.append(Stream(first_folder(data), shards, block_size))
        self.n_tokens = sum(stream.n_tokens for stream in self.streams)
        self.n_windows = sum(stream.n_windows for stream in self.streams)
        self.check_length(names.values(), split)
        self.fingerprint = fingerprint(self.meta, sources)

    def check_length(self, names, split):
        """ValueError if a stream has less text than one window. names: of its sources, a list for each stream."""
        for stream, group in zip(self.streams, names):
            if stream.n_windows < 1:
                raise ValueError(
                    f"{self.data}: the {split} split of {' or '.join(group)} has fewer tokens than one window of "
                    f"block_size={self.T} + 1: prepare more text or lower block_size"
                )

    def locate(self, samples):
        """Samples of the run, int64 (n,) -> (stream, window), each (n,)."""
        stream = np.zeros_like(samples)
        number = samples
        if self.slots is not None:
            # Each weight is a number of slots, 10,000 in all. Each cycle of 10,000 samples is a permutation of the
            # slots, so proportions are exact, and each source continues after its windows of the last cycle.
            cycle, j = np.divmod(samples, self.slots[-1])
            slot = by_epoch(cycle, j, int(self.slots[-1]), ~self.seed)
            stream = np.searchsorted(self.slots, slot, side="right") - 1
            slots_of = np.diff(self.slots)[stream]
            number = cycle * slots_of + slot - self.slots[stream]
        window = np.empty_like(number)
        for s in np.unique(stream):
            inside = stream == s
            n = self.streams[s].n_windows
            window[inside] = by_epoch(*np.divmod(number[inside], n), n, self.seed)
        return stream, window

    def page(self, number):
        """locate() for the 1,024 samples of a page: a few of them would take almost the same time."""
        stream, window = self.locate(np.arange(number * 1024, (number + 1) * 1024))
        return list(zip(stream.tolist(), window.tolist()))

    def batch(self, first, n):
        """
        Samples first to first + n - 1 of the run, as tensors on the CPU, each (n, T).

        Returns idx and targets, int64; keep, bool: which targets have a loss; doc, int64: the number of the document of
        each input token. Two kinds of targets have no loss: those that Goldfish drops, and those whose *input* ends a
        document, since the next document's first token cannot be predicted. The end itself is learnt, as in Apertus'
        trainer (report sec. 2.1 says that it is not).
        ValueError for a token id outside the vocabulary.
        """
        # A row holds T labels, and before them the tokens that Goldfish hashes, at least the first input.
        length = max(self.n_context, 1) + self.T
        rows = np.empty((n, length), np.int64)
        for row, g in zip(rows, range(first, first + n)):
            stream, window = self.cached_page(g // 1024)[g % 1024]
            self.streams[stream].read((window + 1) * self.T + 1 - length, row)
        ids = torch.from_numpy(rows)
        if rows.max() >= self.meta["vocab_size"]:
            raise ValueError(
                f"{self.data}: token id {rows.max()} >= vocab_size {self.meta['vocab_size']} in samples {first} to "
                f"{first + n - 1}: a shard is damaged, prepare the data again"
            )
        idx = ids[:, -self.T - 1 : -1]
        targets = ids[:, -self.T :]
        keep = idx != self.meta["eos"]
        doc = (idx == self.meta["bos"]).cumsum(1)
        if self.goldfish[0]:
            keep &= goldfish_mask(targets, *self.goldfish, ids[:, : self.n_context])
        return Batch(idx, targets, keep, doc)

    def bits_per_byte(self, nats_per_token):
        """
        Mean loss per predicted token (nats) -> bits per byte of text, which do not depend on the tokenizer.

        Tokens per byte are those of the whole split, so for a mean over some of its windows this is an estimate.
        """
        # All tokens are predicted except the first of each document.
        n_predicted = sum(part["tokens"] - part["documents"] for part in self.parts)
        n_bytes = sum(part["bytes"] for part in self.parts)
        return nats_per_token / np.log(2) * n_predicted / n_bytes


class StagedDataset:
    """
    A run in stages, like the five of Apertus: sample g belongs to the stage in whose part of the run it
    lies, and is sample g - begin of that stage's own TokenDataset. (Apertus' loader restarted at each
    stage, with another seed; report sec. 3.)

    stages: rows of (name, sources, until in samples, seed), as in configs/8b.py; sources as in
    TokenDataset. stage: the name of the last one to run, "" = all; later ones need no data yet. After the
    last stage its data continue.

    stage_end: the number of samples at the end of the stage called `stage`, None if none is named.
    fingerprint: HASH@BEGIN of each stage, so that the data of later stages may still change or be added: see
    started_stages(). ValueError: no such stage, or stages that do not follow each other.
    """

    def __init__(self, data, stages, block_size, *goldfish, stage=""):
        names = [name for name, *_ in stages]
        untils = [until for _, _, until, _ in stages]
        if not stages or stage and stage not in names:
            raise ValueError(f"there is no stage {stage!r}: the table of stages has {', '.join(names) or 'none'}")
        if sorted({0, *untils}) != [0, *untils]:
            raise ValueError(f"stages end after {untils} samples: want each later than the one before")
        if set(folders_of(data).values()) != {None}:
            raise ValueError(f"--data={data}: with stages the weights stand in the table of stages")
        last = names.index(stage) if stage else len(names) - 1
        self.stage_end = untils[last] if stage else None
        self.begins = [0, *untils[:last]]
        self.ends = [*untils[:last], math.inf]
        self.parts = []
        words = []
        for begin, row in zip(self.begins, stages):
            _, sources, _, seed = row
            part = TokenDataset(data, "train", block_size, seed, *goldfish, sources=sources)
            words.append(f"{sha256_of([part.fingerprint, row])}@{begin}")
            self.parts.append(part)
        self.fingerprint = " ".join(words)
        self.meta = self.parts[0].meta
        self.n_tokens = sum(part.n_tokens for part in self.parts)

    def batch(self, first, n):
        """As TokenDataset.batch; a batch across the border of two stages has samples of both."""
        batches = []
        at = first
        while at < first + n:
            s = bisect_right(self.begins, at) - 1
            begin = self.begins[s]
            end = min(first + n, self.ends[s])
            batches.append(self.parts[s].batch(at - begin, end - at))
            at = end
        return Batch(*map(torch.cat, zip(*batches)))


def prefetch(fetch, step):
    """
    Yield fetch(step), fetch(step + 1), ...: a thread fetches the next one while the caller works on this one.

    The thread has one OpenMP thread: a second pool would make libgomp count more threads than cores, and those of the
    training step would then sleep at every barrier instead of spinning.
    """
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as thread:
        coming = thread.submit(fetch, step)
        for following in itertools.count(step + 1):
            batch = coming.result()
            coming = thread.submit(fetch, following)
            yield batch


# -----------------------------------------------------------------------------
# The data that a run depends on


def fingerprint(meta, sources=None):
    """
    sha256 of the data that a run reads, which must be the same when it is resumed.

    sources: as in TokenDataset. If they are named, the hash covers the vocabulary and these sources, with their order
    and weights: other sources may be added to the folder. If not, it covers all of meta.json; of several folders, their
    versions, order and weights.
    """
    if not sources and "folders" in meta:
        return sha256_of([[folder["version"], folder["weight"]] for folder in meta["folders"]])
    if not sources:
        return version(meta)
    rows = []
    for name in sources:
        shards = [[split, shard["tokens"], shard.get("sha256")]
                  for split, part in meta["sources"][name].items() for shard in part["shards"]]
        rows.append([name, sources[name] if isinstance(sources, dict) else None, shards])
    return sha256_of([[meta.get(key) for key in VOCABULARY], rows])


def started_stages(fingerprint, samples):
    """
    The words of a fingerprint that a run depends on after this number of samples.

    A StagedDataset's fingerprint has a word HASH@BEGIN for each stage, which counts once the stage has begun. A
    TokenDataset's is one HASH, which always counts.
    """
    return [word for word in fingerprint.split() if int(word.partition("@")[2] or -1) < samples]


# -----------------------------------------------------------------------------
# The command


def main():
    """Print the sources of data folders, and one window of them as the model sees it."""
    from tokenizer import load_for  # here, since training itself needs no tokenizer

    data = ",".join(paths) or "data/stdlib"
    for name, source in read_meta(data)["sources"].items():
        for split, part in source.items():
            print(f"{name:20} {split:5} {part['documents']:8,} documents {part['tokens']:14,} tokens "
                  f"{part['bytes'] / 1e6:10.2f} MB")
    windows = TokenDataset(data, "train", block_size, seed)
    idx, _, _, doc = windows.batch(0, 1)
    n = doc.max() - doc.min() + 1
    print(f"{windows.n_windows:,} windows of {block_size}; the first of seed {seed} has {n} documents:\n")
    print(load_for(first_folder(data)).decode(idx[0].tolist()))


if __name__ == "__main__":
    run(main, globals())
