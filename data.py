"""
Token shards -> batches. The order of samples is a pure function of (seed, number of the sample): the loader has no state.

    sample g of the run:   epoch, i = divmod(g, N)           N windows in the data
                           window   = permute(i, N, seed, epoch)
                           tokens   = stream[window * T : window * T + T + 1]

Several sources (shard sets of one folder) are one stream, in proportion to their sizes, as Apertus mixed them; or each is a stream
of its own and a weight says its part of the samples. Stages change sources and order at given numbers of tokens. All of it is
arithmetic on g, so it costs nothing and needs no state.

Windows are block_size + 1 tokens and overlap by one, as in Megatron's loader, which Apertus used (sec. 3): inputs are the first T,
labels the last T. Instead of a table of shuffled indices (29 GB for 15T tokens) a four-line cipher permutes the window numbers:
a Feistel network is a bijection whatever its round function is. Any process can compute any sample, so 1 and 512 ranks see the same
data, and resuming needs no replay: the step counter says it all.

$ python data.py data/stdlib                               # what is in there, and one window as the model sees it
$ python data.py data/edu data/german --join=data/both     # several folders of prepare.py as one with all their sources, nothing is copied
"""

import errno
import hashlib
import json
import os
import shutil
import weakref
import zipfile
from bisect import bisect_right
from itertools import accumulate

import numpy as np
import torch

from goldfish import goldfish_mask


def permute(i, n, seed, epoch):
    """
    Bijection of [0, n) onto itself, keyed by (seed, epoch). i: array of int64 -> array of int64.

    Six Feistel rounds on the next even number of bits; results >= n are permuted again until they fall inside ("cycle-walking", fewer
    than 4 rounds expected). About 0.14 us a window, no memory.
    """
    half = max(1, (int(n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = [int.from_bytes(hashlib.sha256(f"{seed}:{epoch}:{r}".encode()).digest()[:4], "little") for r in range(6)]
    x = np.atleast_1d(np.asarray(i)).astype(np.uint64)
    todo = np.ones(x.shape, dtype=bool)
    while todo.any():
        left, right = x[todo] >> np.uint64(half), x[todo] & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ np.uint64(key)) & mask)
        x[todo] = (left << np.uint64(half)) | right
        todo = x >= np.uint64(n)
    return x.astype(np.int64)


def mix(x):
    """A 32-bit integer hash (the finalizer of MurmurHash3) on uint64 arrays."""
    low = np.uint64(0xFFFFFFFF)
    x = x & low
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & low
    x = ((x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & low
    return x ^ (x >> np.uint64(16))


SLOTS = 10_000                      # a weight is a whole number of these: every 10,000 samples have exactly the mixture


def mix_weights(weights):
    """{source: weight} -> {source: slots of SLOTS}, by largest remainders. ValueError for weights that are none, or below 1/SLOTS."""
    total = sum(weights.values())
    if not weights or not all(w > 0 for w in weights.values()):
        raise ValueError(f"weights {weights}: want a positive number for each source")
    exact = {name: SLOTS * w / total for name, w in weights.items()}
    slots = {name: int(x) for name, x in exact.items()}
    for name in sorted(exact, key=lambda n: slots[n] - exact[n])[:SLOTS - sum(slots.values())]:
        slots[name] += 1
    if min(slots.values()) < 1:
        raise ValueError(f"weights {weights}: the smallest is below one sample in {SLOTS:,}")
    return slots


class TokenDataset:
    """
    The windows of one split of a folder that prepare.py wrote.

    batch(first, n) -> idx, targets (n, T) int64; keep, doc (n, T): which targets have a loss, and the number of the document that
    each input token stands in. Goldfish (goldfish_k > 0) drops 1/k of the targets; a target whose *input* is the end of a document
    never has a loss (the next document's begin cannot be predicted), the end itself is learnt (sec. 3 of the report).
    goldfish_scope 'stream' hashes across the window's start, 'window' (Apertus) does not: goldfish.py says why it matters.

    sources: names in meta.json, None = all. A name given twice counts twice. They are one stream: natural proportions, as Apertus.
    weights: {source: part of the samples}, instead: each source is a stream of its own, shuffled and repeated by itself.
    ValueError: a source that is not there, a source shorter than a window, too little text for one window.
    """

    stop = None                     # after so many samples train.py stops: StagedDataset

    def __init__(self, folder, split, block_size, seed=28, goldfish_k=0, goldfish_h=50, goldfish_hash="product", goldfish_scope="window",
                 sources=None, weights=None):
        self.folder, self.T, self.seed, self.split = folder, block_size, seed, split
        self.k, self.h, self.hash, self.scope = goldfish_k, goldfish_h, goldfish_hash, goldfish_scope
        self.meta = read_meta(folder)
        self.bos, self.eos = self.meta["bos"], self.meta["eos"]
        self.sources = list(sources or weights or self.meta["sources"])
        absent = [name for name in [*self.sources, *(weights or ())] if name not in self.meta["sources"]]
        if absent:
            raise ValueError(f"{folder} has no source {absent[0]!r}; it has {', '.join(self.meta['sources'])}")
        groups = [self.sources] if weights is None else [[name] for name in weights]
        entries = [[s for name in group for s in self.meta["sources"][name][split]["shards"]] for group in groups]
        self.streams = [Stream(folder, shards, block_size) for shards in entries]
        self.shards = [shard for stream in self.streams for shard in stream.shards]
        self.n_tokens = sum(s.n_tokens for s in self.streams)
        self.n_windows = sum(max(s.n_windows, 0) for s in self.streams)
        self.slots, self.ahead = None, (0, (), ())
        if weights is not None:
            self.slots = np.cumsum([0, *mix_weights(weights).values()])        # source s has the slots from slots[s] to slots[s + 1]
        self.fingerprint = fingerprint(self.meta, sources or weights, weights)
        for stream, group in zip(self.streams, groups):
            if stream.n_windows < 1:
                what = "split" if len(groups) == 1 and sources is None else f"split of {' + '.join(group)}"
                raise ValueError(f"{folder}: the {split} {what} has {stream.n_tokens} tokens, less than one window of "
                                 f"block_size={block_size} + 1: prepare more text or lower block_size")
        self.dtype = np.result_type(*{shard.dtype for shard in self.shards})

    def tokens(self, begin, end, stream=0):
        """stream[begin:end] as int64, across shards; before its begin the stream goes round to its end."""
        return self.streams[stream].tokens(begin, end)

    def where(self, samples):
        """Samples of the run, int64 (n,) -> (stream, window), each (n,). Pure arithmetic: no state, no table."""
        if self.slots is None:
            stream, number = np.zeros_like(samples), samples
        else:                                              # SLOTS samples in a row are a permutation of the slots: exact proportions
            block, j = np.divmod(samples, SLOTS)
            slot = by_epoch(block, j, SLOTS, ~self.seed)
            stream = np.searchsorted(self.slots, slot, side="right") - 1
            number = block * np.diff(self.slots)[stream] + slot - self.slots[stream]
        window = np.empty_like(number)
        for s in np.unique(stream):
            mine, n = stream == s, self.streams[s].n_windows
            window[mine] = by_epoch(*np.divmod(number[mine], n), n, self.seed)
        return stream, window

    def where_ahead(self, first, n):
        """where(first .. first + n - 1), computed for 1,024 samples or an epoch at once: 8 take 140 us, 1,024 take 450."""
        begin, streams, windows = self.ahead
        if not begin <= first <= first + n <= begin + len(windows):
            begin, (streams, windows) = first, self.where(np.arange(first, first + max(n, min(1024, self.n_windows))))
            self.ahead = begin, streams, windows
        return streams[first - begin:first - begin + n], windows[first - begin:first - begin + n]

    def batch(self, first, n):
        """Samples first .. first + n - 1 of the run, as tensors on CPU: idx, targets, keep, doc, each (n, T)."""
        streams, windows = self.where_ahead(first, n)
        before = self.h - 1 if self.k and self.scope == "stream" else 0
        rows = np.empty((n, max(before - 1, 0) + self.T + 1), self.dtype)  # as in the file: 2 or 4 bytes a token compare faster than 8
        for row, s, w in zip(rows, streams.tolist(), windows.tolist()):
            end = (w + 1) * self.T + 1
            self.streams[s].read(end - len(row), row)
        if rows.max() >= self.meta["vocab_size"]:
            bad = windows[rows.max(1).argmax()]
            raise ValueError(f"{self.folder}: token id {rows.max()} >= vocab_size {self.meta['vocab_size']} in window {bad}: "
                             "the shard is damaged, prepare the data again")
        inputs = rows[:, -(self.T + 1):-1]                                 # (n, T)
        both = torch.from_numpy(rows[:, -(self.T + 1):].astype(np.int64))
        idx, targets = both[:, :-1], both[:, 1:]                           # two views of it: half the memory to fill
        keep = torch.from_numpy(inputs != self.eos)
        if self.k:
            context = torch.from_numpy(rows[:, :before].astype(np.int64)) if before else None   # (n, h - 1) labels before the window's
            keep &= goldfish_mask(targets, self.k, self.h, self.hash, context)
        return idx, targets, keep, torch.from_numpy((inputs == self.bos).cumsum(1))

    def bits_per_byte(self, nats_per_token):
        """Mean loss per predicted token (nats) -> bits per byte of text: comparable across tokenizers."""
        splits = [self.meta["sources"][name]["val"] for name in self.sources]
        predicted = sum(s["tokens"] - s["documents"] for s in splits)      # all but each document's begin
        return nats_per_token / np.log(2) * predicted / sum(s["bytes"] for s in splits)


def by_epoch(epoch, i, n, seed):
    """permute(i, n, seed, epoch) where each i has an epoch of its own, in the order of i."""
    out = np.empty_like(i)
    for e in np.unique(epoch):
        out[epoch == e] = permute(i[epoch == e], n, seed, int(e))
    return out


class Stream:
    """Shards one after the other as one sequence of tokens, cut into windows of T + 1 that overlap by one."""

    def __init__(self, folder, entries, T):
        self.shards = [Shard(folder, entry) for entry in entries]
        self.begins = [0, *accumulate(entry["tokens"] for entry in entries)]   # of each shard in the stream
        self.n_tokens = self.begins[-1]
        self.n_windows = (self.n_tokens - 1) // T

    def tokens(self, begin, end):
        """stream[begin:end] as int64, across shards; before its begin the stream goes round to its end."""
        return self.read(begin, np.empty(end - begin, np.int64))

    def read(self, begin, out):
        """Fill out (n,) with stream[begin:begin + n] and return it."""
        at = 0
        while at < len(out):
            token = (begin + at) % self.n_tokens
            shard = bisect_right(self.begins, token) - 1
            n = min(len(out) - at, self.begins[shard + 1] - token)
            piece = self.shards[shard].read(token - self.begins[shard], n)
            out[at:at + len(piece)] = piece
            at += len(piece)
        return out


MAPS = 128                          # of the 256 (macOS) or 1,024 files that a process may have open; 15T tokens are 150,000 shards


class Shard:
    """
    A 1-D .npy of uint16 or uint32, held against its line of meta.json when it is opened. The first MAPS of a process stay mapped into
    memory; of the others a window is read from the file, which takes 10 us longer, so that no number of shards reaches a limit.
    ValueError: not the shard that meta.json promises. OSError: it cannot be opened.
    """

    __slots__ = "path", "dtype", "map", "offset", "stamp", "__weakref__"
    mapped = weakref.WeakSet()

    def __init__(self, folder, entry):
        self.path = os.path.join(folder, entry["file"])
        try:
            tokens = np.load(self.path, mmap_mode="r", allow_pickle=False)
            self.stamp = self.stamp_of(os.stat(self.path))
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:   # numpy takes what begins like a zip for one
            if isinstance(e, OSError) and e.errno not in (None, errno.ENOENT):
                raise OSError(f"{self.path} cannot be opened: {e.strerror}. That says nothing against the data: look at limits "
                              "(ulimit -n), rights and the disk") from None
            raise ValueError(f"{self.path}: not a readable token shard ({e}): prepare the data again") from None
        found = f"{getattr(tokens, 'dtype', 'an archive')}{list(getattr(tokens, 'shape', ()))}"
        if found not in (f"uint16[{entry['tokens']}]", f"uint32[{entry['tokens']}]"):
            raise ValueError(f"{self.path}: {found} where meta.json promises {entry['tokens']} tokens: prepare the data again")
        self.dtype, self.offset, self.map = tokens.dtype, tokens.offset, None
        if len(Shard.mapped) < MAPS:
            self.map = np.asarray(tokens)                  # still the mapped file, but a slice of it does not cost 3 us
            Shard.mapped.add(self)

    def read(self, begin, n):
        """Tokens begin .. begin + n - 1 of the shard; fewer where the system reads fewer at once."""
        if self.map is not None:
            return self.map[begin:begin + n]
        with open(self.path, "rb", buffering=0) as f:
            if self.stamp_of(os.fstat(f.fileno())) != self.stamp:
                raise ValueError(f"{self.path} is not the file that this run began with: --resume looks whether the data are the same")
            f.seek(self.offset + begin * self.dtype.itemsize)
            return np.frombuffer(f.read(n * self.dtype.itemsize), self.dtype)

    @staticmethod
    def stamp_of(stat):
        return stat.st_mtime_ns, stat.st_size


class StagedDataset:
    """
    A run in stages, like the five of Apertus: sample g belongs to the stage in whose stretch of the run it lies, and is sample
    g - begin of that stage's own TokenDataset (the loader began anew at each stage, with another seed; report sec. 3).

    stages: rows of (name, sources, until in samples, seed), as in configs/8b.py; sources are a list of names (natural proportions)
    or {name: weight}. stop: the number of samples at the end of the stage called `stage`, None if none is named. Beyond the last
    stage its data go on. fingerprint: a word for each stage, so that the data of a later one may still change, or come: begun().
    """

    def __init__(self, folder, stages, block_size, *goldfish, stage=""):
        names = [name for name, *_ in stages]
        untils = [until for _, _, until, _ in stages]
        if stage and stage not in names:
            raise ValueError(f"there is no stage {stage!r}: the table has {', '.join(names)}")
        if untils != sorted(set(untils)) or min(untils) <= 0:
            raise ValueError(f"stages end after {untils} samples: want each later than the one before")
        last = names.index(stage) if stage else len(names) - 1             # later stages need no data yet
        self.begins, self.stop = [0, *untils[:last]], untils[last] if stage else None
        self.parts = [TokenDataset(folder, "train", block_size, seed, *goldfish,
                                   **(dict(weights=sources) if isinstance(sources, dict) else dict(sources=sources)))
                      for _, sources, _, seed in stages[:last + 1]]
        self.meta = self.parts[0].meta
        self.fingerprint = " ".join(f"{sha256_of([part.fingerprint, row])}@{begin}"
                                    for part, row, begin in zip(self.parts, stages, self.begins))
        self.n_tokens, self.n_windows = sum(p.n_tokens for p in self.parts), sum(p.n_windows for p in self.parts)

    def batch(self, first, n):
        """As TokenDataset.batch; a batch across the border of two stages has samples of both."""
        parts, at = [], first
        while at < first + n:
            s = int(np.searchsorted(self.begins, at, side="right")) - 1
            end = min(first + n, self.begins[s + 1] if s + 1 < len(self.begins) else first + n)
            parts.append(self.parts[s].batch(at - self.begins[s], end - at))
            at = end
        return tuple(torch.cat(tensors) for tensors in zip(*parts)) if len(parts) > 1 else parts[0]


def fingerprint(meta, sources=None, weights=None):
    """
    sha256 of what a run reads, which it must not find changed when it goes on: the vocabulary and, in their order, the sources with
    their weights. Where sources are named, others may come to the folder and it may move; where none are, all of meta.json counts.
    """
    if not sources:
        names = list(meta["sources"])
        return sha256_of(meta) if names == sorted(names) else sha256_of([meta, names])      # JSON is sorted: it does not say their order
    vocabulary = [meta.get(key) for key in ("tokenizer_hash", "vocab_size", "bos", "eos")]
    shards = lambda name: [[split, shard["tokens"], shard.get("sha256")]
                           for split, part in meta["sources"][name].items() for shard in part["shards"]]
    return sha256_of([vocabulary, [[name, weights and weights[name], shards(name)] for name in sources]])


def sha256_of(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def begun(fingerprint, samples):
    """What of a fingerprint counts after so many samples: of a StagedDataset's, HASH@BEGIN of each stage, those that have begun."""
    return [word for word in fingerprint.split() if int(word.partition("@")[2] or -1) < samples]


def read_meta(folder):
    """meta.json of a data folder, or one line that says how to make one."""
    path = os.path.join(folder, "meta.json")
    if not os.path.isfile(path):
        default = os.path.normpath(folder) == os.path.normpath("data/stdlib")
        hint = "python prepare.py" if default else f"python prepare.py YOUR_FILES --out={folder}"
        raise ValueError(f"no data in {folder!r} (no meta.json there): make it with `{hint}`")
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def join_folders(folders, folder):
    """
    Write folder/meta.json with the sources of all folders, whose shards stay where they are. The folder may be one of them, to which
    the others come. ValueError: other vocabularies, or something in the folder that is not of an earlier --join.
    """
    from corpus.shards import claim, publish                      # text and archives, which a loader need not import
    joined = joined_meta(folders, os.path.realpath(folder))
    others = [f for f in folders if os.path.realpath(f) != os.path.realpath(folder)]
    final, tmp, lock = claim(folder, others, joined=True)
    with lock:
        data = os.path.join(tmp, "data")
        shutil.rmtree(data, ignore_errors=True)
        os.makedirs(data)
        if os.path.isfile(os.path.join(folders[0], "tokenizer.json")):
            shutil.copy(os.path.join(folders[0], "tokenizer.json"), data)
        with open(os.path.join(data, "meta.json"), "w", encoding="utf-8") as f:
            json.dump(joined, f, indent=1)
        publish(final, tmp)


def joined_meta(folders, final):
    """meta.json of several folders, for one that will stand in `final`."""
    metas = [read_meta(f) for f in folders]
    joined = {k: metas[0][k] for k in ("tokenizer", "tokenizer_hash", "vocab_size", "bos", "eos")}
    joined.update(sources={}, about={})
    for path, meta in zip(folders, metas):
        if meta["tokenizer_hash"] != joined["tokenizer_hash"]:
            raise ValueError(f"{path} was made by the tokenizer {meta['tokenizer']} and {folders[0]} by {joined['tokenizer']}, another "
                             "one: prepare both with the same --tokenizer")
        for name, source in meta["sources"].items():
            new = name if name not in joined["sources"] else f"{os.path.basename(os.path.normpath(path))}/{name}"
            if new in joined["sources"]:
                raise ValueError(f"{path} has a source {name!r} again, already there as {new!r}")
            moved = lambda s: dict(s, file=os.path.relpath(os.path.realpath(os.path.join(path, s["file"])), final))
            joined["sources"][new] = {split: dict(part, shards=[moved(s) for s in part["shards"]]) for split, part in source.items()}
            joined["about"][new] = meta.get("about", {}).get(name)
    return joined


def main():
    import tokenizer
    if join:
        if len(paths) < 2:
            raise ValueError("--join wants the folders to join: python data.py data/a data/b --join=data/both")
        join_folders(paths, join)
    data = TokenDataset(join or (paths[0] if paths else "data/stdlib"), "train", block_size, seed)
    for name, source in data.meta["sources"].items():
        for split in ("train", "val"):
            s = source[split]
            print(f"{name:20} {split:5} {s['documents']:8,} documents {s['tokens']:14,} tokens {s['bytes'] / 1e6:10.2f} MB")
    idx, _, keep, doc = data.batch(0, 1)
    print(f"{data.n_windows:,} windows of {block_size}; the first of seed {seed} has {doc.max() - doc.min() + 1} documents:\n")
    print(tokenizer.load_for(data.folder).decode(idx[0].tolist()))


paths = []           # the data folder (default data/stdlib), or several with --join
join = ""            # a folder to make of them
block_size = 256     # tokens a window
seed = 28            # of the order of windows

if __name__ == "__main__":
    from configurator import run
    run(main, globals())
