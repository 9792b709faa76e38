"""
Token shards -> batches. The order of samples is a pure function of (seed, number of the sample): no state.

    sample g of the run:   epoch, i = divmod(g, N)           N windows in the data
                           window   = permute(i, N, seed, epoch)
                           tokens   = stream[window * T : window * T + T + 1]

Windows are block_size + 1 tokens and overlap by one, as in Megatron's loader, which Apertus used (report sec. 3):
inputs are the first T, labels the last T. Instead of a table of shuffled indices (29 GB for 15T tokens) a small
cipher permutes the window numbers: a Feistel network is a bijection whatever its round function is. Every process can
compute every sample, so 1 and 512 ranks see the same data, and a resumed run needs only its step number.

Several sources (sets of shards in one folder) are one stream, in proportion to their sizes, as Apertus mixed them. Or
each source is a stream of its own, and a weight gives its share of the samples. Both are arithmetic on g.

$ python data.py data/stdlib                              # its sources, and one window as the model sees it
$ python data.py data/edu data/german --join=data/both    # a folder with the sources of both; copies no tokens
"""

import functools
import hashlib
import itertools
import os
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from engine.files import read_json, sha256_of, version
from engine.mixture import mix_weights
from goldfish import goldfish_mask

# Letters: T block_size, the labels of a window; g number of a sample in the run.

# -----------------------------------------------------------------------------
# The order of samples


def feistel(x, half, keys):
    """Encrypt an array of uint64 of 2 * half bits: each round swaps the halves, XORing one with a hash of the other."""
    mask = (1 << half) - 1
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ mix(right ^ key) & mask
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


def mix(x):
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
            path = f"{folder}/{entry['file']}"
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


def read_meta(folder):
    """meta.json of a data folder. ValueError with the command that makes it, if it is missing or a stranger's."""
    path = f"{folder}/meta.json"
    if not os.path.isfile(path) or "sources" not in (meta := read_json(path)):
        raise ValueError(f"no prepared data in {folder!r}: run `python prepare.py [FILES] --out={folder}`")
    return meta


def part_of(meta, folder, name, split):
    """The entry of a source's split in meta.json: documents, tokens, bytes, shards. ValueError: no such source."""
    if name not in meta["sources"]:
        raise ValueError(f"{folder} has no source {name!r}; it has {', '.join(meta['sources'])}")
    return meta["sources"][name][split]


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


class TokenDataset:
    """
    The windows of one split ("train" or "val") of a folder that prepare.py wrote.

    sources: names in meta.json, None = all. They are one stream, in proportion to their sizes, as in Apertus; a name
    given twice counts twice. Or {name: weight}: each source is a stream of its own, shuffled and repeated separately,
    with its share of the samples.

    goldfish_k > 0 drops 1/k of the targets. goldfish_scope 'stream' hashes across the window's start, 'window'
    (Apertus) does not: goldfish.py explains why it matters.

    ValueError: a source is missing, or has less text than one window; wrong settings of Goldfish.
    """

    # A StagedDataset has a number of samples here, after which the run ends.
    stage_end = None

    def __init__(
        self,
        folder,
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
        self.folder = folder
        self.T = block_size
        self.seed = seed
        self.goldfish = goldfish_k, goldfish_h, goldfish_hash
        if goldfish_k:
            # A mask of no labels, so that a wrong setting is an error before the run begins.
            goldfish_mask(torch.empty(0, dtype=torch.int64), *self.goldfish)
        self.n_context = goldfish_h - 1 if goldfish_k and goldfish_scope == "stream" else 0
        # The last few blocks, since the samples of a step are neighbours.
        self.cached_block = functools.lru_cache(maxsize=8)(self.block)
        self.meta = read_meta(folder)
        names = list(sources or self.meta["sources"])
        self.parts = [part_of(self.meta, folder, name, split) for name in names]
        shards = [part["shards"] for part in self.parts]
        if isinstance(sources, dict):
            # Stream s has the slots slots[s] to slots[s + 1] - 1.
            self.slots = np.cumsum([0, *mix_weights(sources).values()])
        else:
            self.slots = None
            shards = [sum(shards, [])]
        self.streams = [Stream(folder, entries, block_size) for entries in shards]
        self.n_tokens = sum(stream.n_tokens for stream in self.streams)
        self.n_windows = sum(stream.n_windows for stream in self.streams)
        if min(stream.n_windows for stream in self.streams) < 1:
            raise ValueError(
                f"{folder}: the {split} split of {' or '.join(names)} has fewer tokens than one window of "
                f"block_size={block_size} + 1: prepare more text or lower block_size"
            )
        self.fingerprint = fingerprint(self.meta, sources)

    def where(self, samples):
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

    def block(self, number):
        """where() for 1,024 samples at once: a few of them would take almost the same time."""
        stream, window = self.where(np.arange(number * 1024, (number + 1) * 1024))
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
            stream, window = self.cached_block(g // 1024)[g % 1024]
            self.streams[stream].read((window + 1) * self.T + 1 - length, row)
        ids = torch.from_numpy(rows)
        if rows.max() >= self.meta["vocab_size"]:
            raise ValueError(
                f"{self.folder}: token id {rows.max()} >= vocab_size {self.meta['vocab_size']} in samples {first} to "
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

# The keys of meta.json that define the meaning of token ids.
VOCABULARY = ("tokenizer_hash", "vocab_size", "bos", "eos")


def fingerprint(meta, sources=None):
    """
    sha256 of the data that a run reads, which must be the same when it is resumed.

    sources: as in TokenDataset. If they are named, the hash covers the vocabulary and these sources, with their order
    and weights: other sources may be added to the folder. If not, it covers all of meta.json.
    """
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


if __name__ == "__main__":
    from corpus.join import start

    start()
