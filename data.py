"""
Token shards -> batches. The order of samples is a pure function of (seed, number of the sample): no state.

    sample g of the run:   epoch, i = divmod(g, N)           N windows in the data
                           window   = permute(i, N, seed, epoch)
                           tokens   = stream[window * T : window * T + T + 1]

Windows are block_size + 1 tokens and overlap by one, as in Megatron's loader, which Apertus used (report
sec. 3): inputs are the first T, labels the last T. Instead of a table of shuffled indices (29 GB for 15T
tokens) a four-line cipher permutes the window numbers: a Feistel network is a bijection whatever its
round function is. Any process can compute any sample, so 1 and 512 ranks see the same data, and resuming
needs no replay: the step counter says it all.

Several sources (shard sets of one folder) are one stream, in proportion to their sizes, as Apertus mixed
them; or each is a stream of its own, and a weight says its part of the samples. Stages change sources and
order at given numbers of samples. All of it is arithmetic on g.

$ python data.py data/stdlib                              # what is in there, and one window as the model sees it
$ python data.py data/edu data/german --join=data/both    # a folder with all their sources, nothing is copied
"""

import hashlib
import json
import math
import os
import shutil
import weakref
from bisect import bisect_right
from itertools import accumulate

import numpy as np
import torch

from corpus.shards import version
from goldfish import goldfish_mask

# Letters: T block_size, the length of a window; g number of a sample in the run.

paths = []           # the data folder (default data/stdlib), or several with --join
join = ""            # a folder to make of them
block_size = 256     # tokens a window
seed = 28            # of the order of windows

# -----------------------------------------------------------------------------
# The order of samples


def permute(i, n, seed, epoch, back=False):
    """
    Bijection of [0, n) onto itself, keyed by (seed, epoch). i: array of int64 -> array of int64.

    Six Feistel rounds on the next even number of bits. Results >= n are permuted again until they fall
    inside ("cycle-walking", fewer than 4 rounds expected). back: the inverse, which is the same rounds with
    the keys in reverse and the halves swapped, before and after.
    """
    bits = int(n - 1).bit_length()
    half = max(1, (bits + 1) // 2)
    mask = (1 << half) - 1
    keys = [round_key(f"{seed}:{epoch}:{r}") for r in range(6)]
    if back:
        keys.reverse()
    x = np.atleast_1d(i).astype(np.uint64)
    todo = np.ones(x.shape, dtype=bool)
    while todo.any():
        left = x[todo] >> half
        right = x[todo] & mask
        if back:
            left, right = right, left
        for key in keys:
            noise = mix(right ^ key) & mask
            left, right = right, left ^ noise
        if back:
            left, right = right, left
        x[todo] = left << half | right
        todo = x >= n
    return x.astype(np.int64)


def round_key(text):
    """32 bits of a text's sha256."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little")


def mix(x):
    """A 32-bit integer hash (the finalizer of MurmurHash3) on uint64 arrays."""
    x = x & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def by_epoch(epoch, i, n, seed, back=False):
    """permute(i, n, seed, epoch, back) where each i has an epoch of its own, in the order of i."""
    out = np.empty_like(i)
    for e in np.unique(epoch):
        mine = epoch == e
        out[mine] = permute(i[mine], n, seed, int(e), back)
    return out


# A weight is a whole number of slots, so that every 10,000 samples have exactly the mixture.
SLOTS = 10_000


def mix_weights(weights):
    """
    {source: weight} -> {source: slots of SLOTS}, by largest remainders.

    ValueError if there is no weight, or one is not positive or below 1/SLOTS of their sum.
    """
    if not weights or not all(w > 0 for w in weights.values()):
        raise ValueError(f"weights {weights}: want a positive number for each source")
    total = sum(weights.values())
    slots = {}
    remainders = {}
    for name, weight in weights.items():
        exact = SLOTS * weight / total
        slots[name] = int(exact)
        remainders[name] = exact - slots[name]
    left = SLOTS - sum(slots.values())
    largest_first = sorted(remainders, key=remainders.get, reverse=True)
    for name in largest_first[:left]:
        slots[name] += 1
    if min(slots.values()) < 1:
        raise ValueError(f"weights {weights}: the smallest is below one sample in {SLOTS:,}")
    return slots


# -----------------------------------------------------------------------------
# Files of tokens

# A process may have 256 (macOS) or 1,024 files open, but 15T tokens are 150,000 shards. The first MAPS shards
# of a process stay mapped into memory; the file of another is opened for each window, which is a little slower.
MAPS = 128


class Shard:
    """
    A 1-D .npy of uint16 or uint32, compared with its entry in meta.json when it is opened.

    ValueError: not the shard that meta.json promises. OSError: the system refuses to open it.
    """

    mapped = weakref.WeakSet()

    def __init__(self, folder, entry):
        self.path = os.path.join(folder, entry["file"])
        tokens = self.load()
        self.stamp = stamp(self.path)
        n = entry["tokens"]
        found = f"{tokens.dtype}{list(tokens.shape)}"
        if found not in (f"uint16[{n}]", f"uint32[{n}]"):
            raise ValueError(f"{self.path}: {found} where meta.json promises {n} tokens: prepare the data again")
        self.dtype = tokens.dtype
        self.offset = tokens.offset
        self.map = None
        if len(Shard.mapped) < MAPS:
            # Still the mapped file, but a slice of a plain array costs less than one of np.memmap.
            self.map = np.asarray(tokens)
            Shard.mapped.add(self)

    def load(self):
        """The file as numpy maps it. The two errors tell damaged data from limits of the system."""
        try:
            return np.lib.format.open_memmap(self.path, mode="r")
        except (ValueError, FileNotFoundError) as e:
            raise ValueError(f"{self.path}: not a readable token shard ({e}): prepare the data again") from None
        except OSError as e:
            raise OSError(
                f"{self.path} cannot be opened: {e.strerror}. That says nothing against the data: "
                "look at limits (ulimit -n), rights and the disk"
            ) from None

    def read(self, begin, n):
        """Tokens begin .. begin + n - 1 of the shard; fewer where the system reads fewer at once."""
        if self.map is not None:
            return self.map[begin : begin + n]
        size = self.dtype.itemsize
        with open(self.path, "rb", buffering=0) as f:
            if stamp(f.fileno()) != self.stamp:
                raise ValueError(
                    f"{self.path} is not the file that this run began with: "
                    "--resume looks whether the data are the same"
                )
            f.seek(self.offset + begin * size)
            return np.frombuffer(f.read(n * size), self.dtype)


def stamp(file):
    """What changes when a file is replaced. file: a path or a descriptor."""
    stat = os.stat(file)
    return stat.st_mtime_ns, stat.st_size


class Stream:
    """
    Shards one after the other as one sequence of tokens, cut into windows of T + 1 that overlap by one.

    entries: of the shards in meta.json. begins: of each shard in the stream, and the stream's end.
    """

    def __init__(self, folder, entries, T):
        self.shards = [Shard(folder, entry) for entry in entries]
        sizes = [entry["tokens"] for entry in entries]
        self.begins = [0, *accumulate(sizes)]
        self.n_tokens = self.begins[-1]
        self.n_windows = (self.n_tokens - 1) // T

    def read(self, begin, out):
        """
        Fill out (n,) with stream[begin : begin + n], across shards, and return it. Before its begin and
        after its end the stream goes round.
        """
        at = 0
        while at < len(out):
            token = (begin + at) % self.n_tokens
            shard = bisect_right(self.begins, token) - 1
            left = self.begins[shard + 1] - token
            n = min(len(out) - at, left)
            offset = token - self.begins[shard]
            piece = self.shards[shard].read(offset, n)
            out[at : at + len(piece)] = piece
            at += len(piece)
        return out


# -----------------------------------------------------------------------------
# Samples


class TokenDataset:
    """
    The windows of one split of a folder that prepare.py wrote.

    sources: names in meta.json, None = all. They are one stream, in natural proportions, as Apertus; a
    name given twice counts twice. Or {name: weight}: each source is a stream of its own, shuffled and
    repeated by itself, with its part of the samples.

    goldfish_k > 0 drops 1/k of the targets (goldfish.py). goldfish_scope 'stream' hashes across the
    window's start, 'window' (Apertus) does not: goldfish.py says why it matters.

    ValueError: a source that is not there, or with less text than one window.
    """

    # Samples after which the run ends, where a StagedDataset says so.
    stop = None

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
        sources=None,
    ):
        self.folder = folder
        self.T = block_size
        self.seed = seed
        self.k = goldfish_k
        self.h = goldfish_h
        self.hash = goldfish_hash
        self.n_context = goldfish_h - 1 if goldfish_k and goldfish_scope == "stream" else 0
        self.split = split
        meta = read_meta(folder)
        self.meta = meta
        self.bos = meta["bos"]
        self.eos = meta["eos"]
        self.sources = list(sources or meta["sources"])
        groups = [self.sources]
        self.slots = None
        if isinstance(sources, dict):
            groups = [[name] for name in sources]
            slots = mix_weights(sources).values()
            # Stream s has the slots from slots[s] to slots[s + 1].
            self.slots = np.cumsum([0, *slots])
        self.streams = [self._stream(names) for names in groups]
        self.fingerprint = fingerprint(meta, sources)
        self.shards = [shard for stream in self.streams for shard in stream.shards]
        dtypes = {shard.dtype for shard in self.shards}
        self.dtype = np.result_type(*dtypes)
        self.n_tokens = sum(stream.n_tokens for stream in self.streams)
        self.n_windows = sum(stream.n_windows for stream in self.streams)
        # What _windows_of has computed ahead: the first sample, streams and windows.
        self.ahead = 0, (), ()

    def _stream(self, names):
        """The shards of some sources as one stream."""
        found = self.meta["sources"]
        entries = []
        for name in names:
            if name not in found:
                raise ValueError(f"{self.folder} has no source {name!r}; it has {', '.join(found)}")
            entries += found[name][self.split]["shards"]
        stream = Stream(self.folder, entries, self.T)
        if stream.n_windows < 1:
            raise ValueError(
                f"{self.folder}: the {self.split} split of {' + '.join(names)} has {stream.n_tokens} tokens, "
                f"less than one window of block_size={self.T} + 1: prepare more text or lower block_size"
            )
        return stream

    def tokens(self, begin, end):
        """stream[begin:end] of the first stream as int64; before its begin it goes round to its end."""
        out = np.empty(end - begin, np.int64)
        return self.streams[0].read(begin, out)

    def where(self, samples):
        """Samples of the run, int64 (n,) -> (stream, window), each (n,)."""
        if self.slots is None:
            stream = np.zeros_like(samples)
            number = samples
        else:
            # SLOTS samples in a row are a permutation of the slots, so proportions are exact, and each
            # source goes on counting its samples where the last block left it.
            block, j = np.divmod(samples, SLOTS)
            slot = by_epoch(block, j, SLOTS, ~self.seed)
            stream = np.searchsorted(self.slots, slot, side="right") - 1
            slots_of = np.diff(self.slots)[stream]
            number = block * slots_of + slot - self.slots[stream]
        window = np.empty_like(number)
        for s in np.unique(stream):
            mine = stream == s
            n = self.streams[s].n_windows
            epoch, i = np.divmod(number[mine], n)
            window[mine] = by_epoch(epoch, i, n, self.seed)
        return stream, window

    def samples_of(self, path, offset, n, until):
        """
        The inverse of where(): the samples below `until` whose window holds one of the tokens offset .. offset
        + n - 1 of the shard at `path`, and those after it if the shard ends before. int64, rising.

        A window is T + 1 tokens, so the one that two windows share is in both.
        """
        path = os.path.realpath(path)
        found = [np.zeros(0, np.int64)]
        for s, stream in enumerate(self.streams):
            for shard, start in zip(stream.shards, stream.begins):
                if os.path.realpath(shard.path) != path:
                    continue
                begin = start + offset
                first = max(0, -(-(begin - self.T) // self.T))
                last = min((begin + n - 1) // self.T, stream.n_windows - 1)
                found += self._samples_with(s, np.arange(first, last + 1), until)
        return np.unique(np.concatenate(found))

    def _samples_with(self, s, windows, until):
        """Yield, epoch by epoch, the samples below `until` that are one of these windows of stream s."""
        N = self.streams[s].n_windows
        epoch = 0
        while True:
            number = epoch * N + permute(windows, N, self.seed, epoch, back=True)
            sample = number
            if self.slots is not None:
                block, slot = np.divmod(number, self.slots[s + 1] - self.slots[s])
                slot += self.slots[s]
                sample = block * SLOTS + by_epoch(block, slot, SLOTS, ~self.seed, back=True)
            mine = sample < until
            yield sample[mine]
            # The least sample that the next epoch can have: with weights, the first of its block.
            epoch += 1
            least = epoch * N
            if self.slots is not None:
                least = least // (self.slots[s + 1] - self.slots[s]) * SLOTS
            if least >= until:
                return

    def _windows_of(self, first, n):
        """
        where(first .. first + n - 1). Few samples cost almost as much as many, so 1,024 of them (or an
        epoch, if that is less) are computed at once and kept for the next batches.
        """
        begin, streams, windows = self.ahead
        if not begin <= first <= first + n <= begin + len(windows):
            begin = first
            ahead = max(n, min(1024, self.n_windows))
            samples = np.arange(begin, begin + ahead)
            streams, windows = self.where(samples)
            streams = streams.tolist()
            windows = windows.tolist()
            self.ahead = begin, streams, windows
        asked = slice(first - begin, first - begin + n)
        return streams[asked], windows[asked]

    def batch(self, first, n):
        """
        Samples first .. first + n - 1 of the run, as tensors on the CPU, each (n, T).

        Returns idx and targets, int64; keep, bool: which targets have a loss; doc, int64: the number of
        the document that each input token stands in. Besides what Goldfish drops, a target whose *input*
        ends a document never has a loss, since the next document's begin cannot be predicted; the end
        itself is learnt (report sec. 3). ValueError for a token id outside the vocabulary.
        """
        streams, windows = self._windows_of(first, n)
        # A row holds T labels, and before them the tokens that Goldfish hashes, at least the first input. It
        # keeps the shards' dtype, since 2 or 4 bytes a token compare faster than 8.
        length = max(self.n_context, 1) + self.T
        rows = np.empty((n, length), self.dtype)
        for row, stream, window in zip(rows, streams, windows):
            end = (window + 1) * self.T + 1
            self.streams[stream].read(end - length, row)
        self._check_ids(rows, windows)
        inputs = rows[:, -self.T - 1 : -1]
        keep = torch.from_numpy(inputs != self.eos)
        is_begin = inputs == self.bos
        doc = torch.from_numpy(is_begin.cumsum(1))
        # Inputs and targets are views of one tensor: half the memory to fill.
        ids = torch.from_numpy(rows.astype(np.int64))
        idx = ids[:, -self.T - 1 : -1]
        targets = ids[:, -self.T :]
        if self.k:
            context = ids[:, : self.n_context]
            keep &= goldfish_mask(
                targets,
                self.k,
                self.h,
                self.hash,
                context,
            )
        return idx, targets, keep, doc

    def _check_ids(self, rows, windows):
        """ValueError for an id outside the vocabulary, with the number of its window."""
        vocab_size = self.meta["vocab_size"]
        largest = rows.max()
        if largest >= vocab_size:
            bad = windows[rows.max(1).argmax()]
            raise ValueError(
                f"{self.folder}: token id {largest} >= vocab_size {vocab_size} in window {bad}: "
                "the shard is damaged, prepare the data again"
            )

    def bits_per_byte(self, nats_per_token):
        """Mean loss per predicted token (nats) -> bits per byte of text: comparable across tokenizers."""
        n_predicted = n_bytes = 0
        for name in self.sources:
            val = self.meta["sources"][name]["val"]
            # All tokens are predicted but each document's begin.
            n_predicted += val["tokens"] - val["documents"]
            n_bytes += val["bytes"]
        return nats_per_token / np.log(2) * n_predicted / n_bytes


class StagedDataset:
    """
    A run in stages, like the five of Apertus: sample g belongs to the stage in whose stretch of the run it
    lies, and is sample g - begin of that stage's own TokenDataset. (The loader began anew at each stage,
    with another seed; report sec. 3.)

    stages: rows of (name, sources, until in samples, seed), as in configs/8b.py; sources as in
    TokenDataset. stage: the name of the last one to run, "" = all; later ones need no data yet. Beyond the
    last stage its data go on.

    stop: the number of samples at the end of the stage called `stage`, None if none is named.
    fingerprint: HASH@BEGIN of each stage, so that the data of a later one may still change, or come: see
    begun(). ValueError: no such stage, or stages that do not follow each other.
    """

    def __init__(
        self,
        folder,
        stages,
        block_size,
        *goldfish,
        stage="",
    ):
        names, _, untils, _ = zip(*stages)
        if stage and stage not in names:
            raise ValueError(f"there is no stage {stage!r}: the table has {', '.join(names)}")
        if sorted({0, *untils}) != [0, *untils]:
            raise ValueError(f"stages end after {untils} samples: want each later than the one before")
        last = names.index(stage) if stage else len(names) - 1
        self.stop = untils[last] if stage else None
        self.begins = [0, *untils[:last]]
        self.ends = [*untils[:last], math.inf]
        self.parts = []
        words = []
        for begin, row in zip(self.begins, stages):
            _, sources, _, seed = row
            part = TokenDataset(
                folder,
                "train",
                block_size,
                seed,
                *goldfish,
                sources=sources,
            )
            words.append(f"{sha256_of([part.fingerprint, row])}@{begin}")
            self.parts.append(part)
        self.fingerprint = " ".join(words)
        self.meta = self.parts[0].meta
        self.n_tokens = sum(part.n_tokens for part in self.parts)
        self.n_windows = sum(part.n_windows for part in self.parts)

    def batch(self, first, n):
        """As TokenDataset.batch; a batch across the border of two stages has samples of both."""
        batches = []
        at = first
        while at < first + n:
            s = bisect_right(self.begins, at) - 1
            begin = self.begins[s]
            end = min(first + n, self.ends[s])
            batch = self.parts[s].batch(at - begin, end - at)
            batches.append(batch)
            at = end
        return tuple(map(torch.cat, zip(*batches)))

    def samples_of(self, path, offset, n, until):
        """As TokenDataset.samples_of."""
        found = []
        for begin, end, part in zip(self.begins, self.ends, self.parts):
            if begin < until:
                found.append(begin + part.samples_of(path, offset, n, min(until, end) - begin))
        return np.concatenate(found)


def share_of_one(data, until, n=64):
    """
    The share of windows that hold a single document, of n samples spread evenly over the first `until` of a run on
    these data (of either class). What is longer than most documents teaches little that a shorter window would not.
    """
    samples = sorted({i * until // n for i in range(n)})
    single = 0
    for sample in samples:
        doc = data.batch(sample, 1)[3]    # (1, T)
        single += bool(doc.min() == doc.max())
    return single / len(samples)


def data_of_run(config, samples):
    """
    The windows that a run of train.py with these settings (its config.json) has read in so many samples.

    ValueError: the folder no longer holds the data that it read.
    """
    folder, T = config["data"], config["block_size"]
    if config["stage"]:
        data = StagedDataset(folder, config["stages"], T, stage=config["stage"].removeprefix("all"))
    else:
        data = TokenDataset(folder, "train", T, config["seed"])
    if begun(data.fingerprint, samples) != begun(config["data_hash"], samples):
        raise ValueError(
            f"{folder} is no longer what the run has read: it is version {data.meta.get('version', '?')[:16]}, "
            f"the run began with {config.get('data_version') or config['data_hash']:.16}"
        )
    return data


# -----------------------------------------------------------------------------
# meta.json: what a folder holds, and what of it a run depends on


def read_meta(folder):
    """meta.json of a data folder. ValueError if there is none: says how to make it."""
    path = os.path.join(folder, "meta.json")
    if not os.path.isfile(path):
        hint = "python prepare.py"
        if os.path.normpath(folder) != os.path.normpath("data/stdlib"):
            hint += f" YOUR_FILES --out={folder}"
        raise ValueError(f"no data in {folder!r} (no meta.json there): make it with `{hint}`")
    with open(path, encoding="utf-8") as f:
        return json.load(f)


# What says which token an id is.
VOCABULARY = ("tokenizer_hash", "vocab_size", "bos", "eos")


def sha256_of(content):
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(meta, sources=None):
    """
    sha256 of what a run reads, and must find unchanged when it is resumed.

    sources: as in TokenDataset. Where they are named, the vocabulary counts and, in their order, the sources
    with their weights: others may come to the folder, and it may move. Where none are, all of meta.json counts.
    """
    if not sources:
        return version(meta)
    vocabulary = [meta.get(key) for key in VOCABULARY]
    rows = []
    for name in sources:
        weight = sources[name] if isinstance(sources, dict) else None
        shards = []
        for split, part in meta["sources"][name].items():
            for shard in part["shards"]:
                content = shard.get("sha256")
                shards.append([split, shard["tokens"], content])
        rows.append([name, weight, shards])
    return sha256_of([vocabulary, rows])


def first_changed(before, now, samples):
    """
    The first of so many samples that a run would read otherwise on data with another fingerprint; None if none.

    A stage's own fingerprint says whether its windows are the same; without stages all of them count.
    """
    now = begun(now, samples)
    for i, word in enumerate(begun(before, samples)):
        if now[i:i + 1] != [word]:
            _, _, begin = word.partition("@")
            return int(begin or 0)
    return None


def since(folder, version):
    """
    What `prepare.py --remove` has taken out of a folder since it was of this version (meta.json), as a sentence; "" if
    that is not how it became what it is.
    """
    report = os.path.join(folder, "report.json")
    if not version or not os.path.isfile(report):
        return ""
    with open(report, encoding="utf-8") as f:
        removals = json.load(f).get("removals", [])
    gone, at = [], version
    for removal in removals:
        # Each names the version that it found.
        if removal["before"] == at:
            at = removal["after"]
            gone.append(f"{removal['documents']:,} documents ({removal['tokens']:,} tokens) on {removal['date'][:10]}")
    if not gone:
        return ""
    return f"from {folder} were removed, since this run began with version {version[:16]}, {', '.join(gone)}"


def begun(fingerprint, samples):
    """
    The words of a fingerprint that count after so many samples: of a StagedDataset's, HASH@BEGIN of each
    stage, those of the stages that have begun. A TokenDataset's has no BEGIN, and counts from the start.
    """
    words = []
    for word in fingerprint.split():
        _, _, begin = word.partition("@")
        if int(begin or -1) < samples:
            words.append(word)
    return words


# -----------------------------------------------------------------------------
# The command


def joined_meta(folders, final):
    """
    meta.json of several folders in one, for a folder that will stand at `final`.

    ValueError for folders of different vocabularies, and for a source that is there twice.
    """
    first = read_meta(folders[0])
    keys = ("tokenizer", *VOCABULARY)
    joined = {key: first[key] for key in keys}
    joined.update(sources={}, about={})
    for folder in folders:
        meta = read_meta(folder)
        about = meta.get("about", {})
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
            # The shards stay where they are: they are named as seen from the new folder.
            for part in source.values():
                for shard in part["shards"]:
                    path = os.path.join(folder, shard["file"])
                    shard["file"] = os.path.relpath(os.path.realpath(path), final)
            joined["sources"][new] = source
            joined["about"][new] = about.get(name)
    joined["version"] = version(joined)
    return joined


def join_folders(folders, out):
    """
    Write out/meta.json with the sources of all folders, whose shards stay where they are, and their audits
    in one. Texts that stand there more than once are counted, and told. `out` may be one of them, to which
    the others come.

    ValueError as joined_meta, and if `out` holds something that is not of an earlier --join.
    """
    # Imported here, since training does not need what can write a data folder.
    from corpus.kept import join_audits
    from corpus.shards import claim, publish

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
        meta_file = os.path.join(data, "meta.json")
        with open(meta_file, "w", encoding="utf-8") as f:
            json.dump(joined, f, indent=1)
        print(join_audits(folders, joined, final, data))
        publish(final, tmp)


def main():
    import tokenizer

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
    tok = tokenizer.load_for(folder)
    print(tok.decode(idx[0].tolist()))


if __name__ == "__main__":
    from configurator import run

    run(main, globals())
