"""
Token shards -> batches. The order of samples is a pure function of (seed, number of the sample): the loader has no state.

    sample g of the run:   epoch, i = divmod(g, N)           N windows in the data
                           window   = permute(i, N, seed, epoch)
                           tokens   = stream[window * T : window * T + T + 1]

Windows are block_size + 1 tokens and overlap by one, as in Megatron's loader, which Apertus used (sec. 3): inputs are the first T,
labels the last T. Instead of a table of shuffled indices (29 GB for 15T tokens) a four-line cipher permutes the window numbers:
a Feistel network is a bijection whatever its round function is. Any process can compute any sample, so 1 and 512 ranks see the same
data, and resuming needs no replay: the step counter says it all.

$ python data.py data/stdlib          # what is in there, and one window as the model sees it
"""

import hashlib
import json
import os

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


class TokenDataset:
    """
    The windows of one split of a folder that prepare.py wrote.

    batch(first, n) -> idx, targets (n, T) int64; keep, doc (n, T): which targets have a loss, and the number of the document that
    each input token stands in. Goldfish (goldfish_k > 0) drops 1/k of the targets; a target whose *input* is the end of a document
    never has a loss (the next document's begin cannot be predicted), the end itself is learnt (sec. 3 of the report).
    goldfish_scope 'stream' hashes across the window's start, 'window' (Apertus) does not: goldfish.py says why it matters.
    """

    def __init__(self, folder, split, block_size, seed=28, goldfish_k=0, goldfish_h=50, goldfish_hash="product", goldfish_scope="window"):
        self.folder, self.T, self.seed = folder, block_size, seed
        self.k, self.h, self.hash, self.scope = goldfish_k, goldfish_h, goldfish_hash, goldfish_scope
        self.meta = read_meta(folder)
        self.bos, self.eos = self.meta["bos"], self.meta["eos"]
        self.shards = [open_shard(folder, s) for source in self.meta["sources"].values() for s in source[split]["shards"]]
        self.begins = np.cumsum([0] + [len(s) for s in self.shards])       # of each shard in the stream
        self.n_tokens = int(self.begins[-1])
        self.n_windows = (self.n_tokens - 1) // block_size
        self.fingerprint = hashlib.sha256(json.dumps(self.meta, sort_keys=True).encode()).hexdigest()   # of every shard's hash and the vocabulary's
        if self.n_windows < 1:
            raise ValueError(f"{folder}: the {split} split has {self.n_tokens} tokens, less than one window of block_size={block_size} "
                             f"+ 1: prepare more text or lower block_size")

    def tokens(self, begin, end):
        """stream[begin:end] as int64, across shards; before its begin the stream goes round to its end."""
        if begin < 0:
            return np.concatenate((self.tokens(begin % self.n_tokens, self.n_tokens), self.tokens(0, end)))
        out, shard = np.empty(end - begin, dtype=np.int64), np.searchsorted(self.begins, begin, side="right") - 1
        at = begin
        while at < end:
            piece = self.shards[shard][at - self.begins[shard]:end - self.begins[shard]]
            out[at - begin:at - begin + len(piece)] = piece
            at, shard = at + len(piece), shard + 1
        return out

    def batch(self, first, n):
        """Samples first .. first + n - 1 of the run, as tensors on CPU: idx, targets, keep, doc, each (n, T)."""
        epoch, i = np.divmod(np.arange(first, first + n), self.n_windows)
        windows = np.concatenate([permute(i[epoch == e], self.n_windows, self.seed, e) for e in np.unique(epoch)])
        before = self.h - 1 if self.k and self.scope == "stream" else 0
        rows = np.stack([self.tokens(w * self.T - before + 1 if before else w * self.T, (w + 1) * self.T + 1) for w in windows])
        rows = torch.from_numpy(rows)
        if rows.max() >= self.meta["vocab_size"]:
            bad = windows[rows.max(1).values.argmax()]
            raise ValueError(f"{self.folder}: token id {rows.max()} >= vocab_size {self.meta['vocab_size']} in window {bad}: "
                             "the shard is damaged, prepare the data again")
        window = rows[:, -(self.T + 1):]                                   # (n, T + 1)
        idx, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        keep = idx != self.eos
        if self.k:
            context = rows[:, :before] if before else None                 # (n, h - 1) labels before the window's
            keep &= goldfish_mask(targets, self.k, self.h, self.hash, context)
        return idx, targets, keep, (idx == self.bos).cumsum(1)

    def bits_per_byte(self, nats_per_token):
        """Mean loss per predicted token (nats) -> bits per byte of text: comparable across tokenizers."""
        splits = [source["val"] for source in self.meta["sources"].values()]
        predicted = sum(s["tokens"] - s["documents"] for s in splits)      # all but each document's begin
        return nats_per_token / np.log(2) * predicted / sum(s["bytes"] for s in splits)


def read_meta(folder):
    """meta.json of a data folder, or one line that says how to make one."""
    path = os.path.join(folder, "meta.json")
    if not os.path.isfile(path):
        hint = "python prepare.py" if os.path.normpath(folder) == os.path.normpath("data/stdlib") else f"python prepare.py YOUR_FILES --out={folder}"
        raise ValueError(f"no data in {folder!r} (no meta.json there): make it with `{hint}`")
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def open_shard(folder, entry):
    """Memory-map one shard, a 1-D .npy of uint16 or uint32, and hold it against its line of meta.json."""
    path = os.path.join(folder, entry["file"])
    try:
        shard = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise ValueError(f"{path}: not a readable token shard ({e}): prepare the data again") from None
    if shard.ndim != 1 or shard.dtype not in (np.uint16, np.uint32) or len(shard) != entry["tokens"]:
        raise ValueError(f"{path}: {shard.dtype}{list(shard.shape)} where meta.json promises {entry['tokens']} tokens: prepare the data again")
    return shard


def main():
    import tokenizer
    data = TokenDataset(paths[0] if paths else "data/stdlib", "train", block_size, seed)
    for name, source in data.meta["sources"].items():
        for split in ("train", "val"):
            s = source[split]
            print(f"{name:20} {split:5} {s['documents']:8,} documents {s['tokens']:14,} tokens {s['bytes'] / 1e6:10.2f} MB")
    idx, _, keep, doc = data.batch(0, 1)
    print(f"{data.n_windows:,} windows of {block_size}; the first of seed {seed} has {doc.max() - doc.min() + 1} documents:\n")
    print(tokenizer.load_for(data.folder).decode(idx[0].tolist()))


paths = []           # the data folder (default data/stdlib)
block_size = 256     # tokens a window
seed = 28            # of the order of windows

if __name__ == "__main__":
    from configurator import run
    run(main, globals())
