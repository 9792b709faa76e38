"""
Duplicates and contamination: what stands in the corpus already, and what stands in an evaluation.

    exact          the same text up to Unicode form and white space, by a hash of 16 bytes
    near           MinHash: for two sets A, B of n-grams, P(minimum of a random hash agrees) = |A and B| / |A or B|
    contaminated   a shared 8-gram with an evaluation prompt, then half of the prompt

All depend on the document and on what came before it in input order, never on the number of workers. Source: Apertus
report (arXiv 2509.14233) sec. 3 and 4; MinHash: Broder 1997.

$ python -m corpus.dedup docs.jsonl more.jsonl                # duplicates and near-duplicates in them, MB/s
$ python -m corpus.dedup docs.jsonl --prompts=prompts.txt     # and documents that contain these prompts
"""

import sys

if __name__ == "__main__" and not __package__:
    print("dedup.py: start it from the project's root, python -m corpus.dedup", file=sys.stderr)
    sys.exit(2)

import re
import time
import unicodedata
from collections import Counter
from difflib import SequenceMatcher
from hashlib import blake2b

import numpy as np

from engine.readers import each_document, rows_of

try:
    from rensa import RMinHash
except ImportError:
    RMinHash = None

paths = []           # files and folders of documents, as prepare.py reads them
prompts = ""         # evaluation prompts: text, one per line, or .jsonl; "" = none are looked for

# For the audit, because signatures of the two do not mix.
BACKEND = "rensa" if RMinHash else "numpy"
# Characters of a document by which near-duplicates are judged.
LONG = 1_000_000

# Letters: n texts; N bytes, words or shingles of all of them, one after the other.


# ----------------------------------------------------------------------------------------------------------------------
# exact duplicates


def text_key(text):
    """16 bytes, the same for the same text up to Unicode form and white space. A Seen of them finds duplicates."""
    digest = blake2b(digest_size=16)
    for n, piece in enumerate(pieces(text)):
        if not piece.isascii():
            piece = unicodedata.normalize("NFC", piece)
        normal = " ".join(piece.split())
        # pieces() cuts before white space, which the split has taken away.
        if normal and n:
            normal = " " + normal
        digest.update(normal.encode("utf-8", "replace"))
    return digest.digest()


def fingerprint(text):
    """
    An integer of 64 bits, the same for texts that are equal up to Unicode form and white space.

    It finds exact duplicates, and where it is below val_share * 2^64 a document is for validation: whatever file or
    folder a text comes from, it is on one side.
    """
    return int.from_bytes(text_key(text)[:8], "little")


def pieces(text, size=1_000_000, overlap=0):
    """
    A long text in pieces of about `size` characters, so that memory stays bounded; from the second on, each begins with
    the last `overlap` characters before it. Cuts are before white space where there is any.
    """
    if len(text) <= size:
        yield text
        return
    white_space = re.compile(r"\s")
    at = 0
    while at < len(text):
        end = at + size
        space = white_space.search(text, end, end + 1000)
        if space:
            end = space.start()
        begin = max(0, at - overlap)
        yield text[begin:end]
        at = end


class Seen:
    """
    A set of uint64 keys at 8 bytes each (a Python set takes 60 and more): sorted runs, of which equally long ones are
    merged, as in a log-structured store. first(keys) says which rows are new, in order, and remembers them.
    """

    def __init__(self):
        # Sorted arrays, each at least twice as long as the next.
        self.runs = []

    def first(self, keys):
        """keys uint64 (n, k) -> bool (n,): True where no key of the row was there, in a row or in a call before."""
        new = np.ones(len(keys), bool)
        for run in self.runs:
            at = np.searchsorted(run, keys)  # (n, k)
            nearest = run.take(at, mode="clip")
            found = nearest == keys
            new &= ~found.any(1)
        fresh = set()
        for i in np.flatnonzero(new).tolist():
            row = keys[i].tolist()
            if fresh.isdisjoint(row):
                fresh.update(row)
            else:
                new[i] = False
        if fresh:
            run = np.fromiter(fresh, np.uint64, len(fresh))
            self._merge(run)
        return new

    def _merge(self, run):
        run.sort()
        while self.runs and len(self.runs[-1]) < 2 * len(run):
            last = self.runs.pop()
            run = np.concatenate((last, run))
            run.sort(kind="stable")
        self.runs.append(run)


# ----------------------------------------------------------------------------------------------------------------------
# words and n-grams as numbers

_rng = np.random.default_rng(0)
# 112 hash functions h -> the upper 32 bits of (a h + b) mod 2^64, a odd (Dietzfelbinger 1997). Fixed draws in a fixed
# order, because signatures, and so what is a duplicate, must not change between versions.
_A, _B = _rng.integers(0, 2**64, (2, 112), dtype=np.uint64)
_A |= 1
# A word's hash is a sum over its bytes: a random number for the byte times one for its place in the word. A byte that
# is in no word has the number 0.
_BYTE = _rng.integers(1, 2**32, 256, dtype=np.uint32)
_BYTE[list(re.sub(rb"\w", b"", bytes(range(128))))] = 0
_PLACE = _rng.integers(0, 2**32, 256, dtype=np.uint32) | 1
# Punctuation beyond ASCII is in no word either. The first three bytes of its UTF-8, read as a number, lie between these
# pairs: Latin signs; quotes and dashes; Chinese marks; full-width forms, without their letters and digits.
_MARKS = (0xC20000, 0xC30000,
          0xE28000, 0xE28200,
          0xE38000, 0xE38100,
          0xEFBC00, 0xEFBC90, 0xEFBC9A, 0xEFBCA1)
# The bytes that these begin with.
_LEADS = np.isin(np.arange(256), (0xC2, 0xE2, 0xE3, 0xEF))
_GOLDEN = 0x9E3779B97F4A7C15


def word_ids(text):
    """
    The words of a text, without case, punctuation and spaces, as hashes: uint64 (N,), in order. Equal words have equal
    ids. Chinese and Japanese are taken by character, and what else has no spaces (over 20 characters a word).
    """
    return words([text])[0]


def words(texts):
    """
    word_ids of n texts, one after the other, and where each ends: uint64 (N,), int64 (n,).

    Numpy works on the bytes and no word is ever made. What it costs is mostly the number of calls, so some 300 kB of
    text should be taken at a time: one page alone takes four times as long per byte.
    """
    encoded = [text.lower().encode("utf-8", "replace") for text in texts]
    ends = np.cumsum([len(part) + 1 for part in encoded])  # (n,) bytes
    # A line break behind each text, so that no word goes on in the next one.
    joined = b"\n".join([*encoded, b""])
    raw = np.frombuffer(joined, np.uint8)  # (N,)
    hashes = _BYTE.take(raw)  # (N,)
    if not all(map(str.isascii, texts)):
        hashes[_punctuation(raw)] = 0
    inside = hashes != 0
    begin = inside.copy()
    begin[1:] &= ~inside[:-1]
    # U+3000 to U+9FFF, kana and Chinese characters: each is a word.
    east_asian = (raw >= 0xE3) & (raw <= 0xE9)
    begin |= inside & east_asian
    starts = np.flatnonzero(begin)
    last = np.searchsorted(starts, ends)
    counts = np.diff(last, prepend=0)  # (n,) words
    characters = np.array(list(map(len, texts)))
    for i in np.flatnonzero(characters > 20 * counts):
        # A script without spaces: the first byte of each character begins a word.
        part = slice(ends[i] - len(encoded[i]) - 1, ends[i])
        continues = raw[part] & 0xC0 == 0x80
        begin[part] = inside[part] & ~continues
    starts = np.flatnonzero(begin)  # (words,)
    ends = np.searchsorted(starts, ends)  # (n,) words
    if not len(starts):
        return np.zeros(0, np.uint64), ends
    first = starts[0]
    place = np.arange(first, len(raw))
    lengths = np.diff(starts, append=len(raw))
    place -= np.repeat(starts, lengths)
    place &= 255
    # Sums of 32 bits are twice as fast as sums of 64; the product spreads them over 64.
    products = hashes[first:]
    products *= _PLACE.take(place)
    sums = np.add.reduceat(products, starts - first, dtype=np.uint32)
    sums ^= sums >> 15
    return sums.astype(np.uint64) * _GOLDEN, ends


def _punctuation(raw):
    """The positions in UTF-8, a uint8 array that ends with ASCII, of the bytes of punctuation beyond ASCII."""
    at = np.flatnonzero(_LEADS.take(raw))
    triples = raw.take(at[:, None] + np.arange(3), mode="clip")  # (len(at), 3)
    codes = triples @ (1 << 16, 1 << 8, 1)
    # An odd number of bounds lies at or below a code that is in one of the ranges.
    below = np.searchsorted(_MARKS, codes, side="right")
    at = at[below % 2 == 1]
    wide = at[raw[at] > 0xC2]
    return np.concatenate((at, at + 1, wide + 2))


def ngrams(ids, n):
    """
    Hashes of the runs of n ids: uint64 (max(N - n + 1, 0),), in order. A run of 4 ids in place 2 is entry 2.

    Runs of 2, 4, 8, ... are each made of two half as long, and n of those that its binary digits name: 8 or 5 takes 3
    steps.
    """
    count = len(ids) - n + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    runs = ids.astype(np.uint64)  # (N,)
    width = 1
    at = 0
    out = None
    while width <= n:
        if n & width:
            part = runs[at:at + count]
            out = part if out is None else _join(out, part)  # (count,)
            at += width
        runs = _join(runs[:-width], runs[width:])  # (N - 2 width + 1,)
        width *= 2
    return out


def _join(left, right):
    """The hash of two neighbouring runs from theirs. The constant makes their order count."""
    h = left * 0xD6E8FEB86659FD93
    h ^= right
    return _mix(h)


def _mix(h):
    """Scramble uint64 in place: the product carries low bits up, the shift brings high bits down."""
    h *= _GOLDEN
    h ^= h >> 29
    return h


# ----------------------------------------------------------------------------------------------------------------------
# near-duplicates


def minhash(text):
    """
    Signature of a text's set of 5-word shingles: uint32 (112,). The share of places where two signatures agree
    estimates the Jaccard similarity of the sets, +- 0.04 at 0.8. Fewer than 5 words are one shingle. Broder 1997.
    Of a long text the first million characters count.
    """
    ids, ends = words([text[:LONG]])
    return signatures(ids, ends)[0]


def signatures(ids, ends):
    """minhash of the n texts of words(): uint32 (n, 112)."""
    sizes = np.diff(ends, prepend=0)  # (n,) words
    counts = np.maximum(sizes - 4, 0)  # (n,) shingles
    shingles = ngrams(ids, 5)
    # The last 4 words of a text begin no shingle of its own.
    inside = np.ones(len(ids), bool)
    filled = sizes > 0
    tails = ends[filled, None] - np.arange(1, 5)
    inside[np.maximum(tails, 0)] = False
    shingles = shingles[inside[:len(shingles)]]
    # Fewer than 5 words are one shingle.
    few = np.flatnonzero(filled & (sizes < 5))
    if len(few):
        whole = []
        for i in few:
            own = ids[ends[i] - sizes[i]:ends[i]]
            whole.append(ngrams(own, len(own))[0])
        shingles = np.insert(shingles, np.cumsum(counts)[few], whole)
        counts[few] = 1
    ends = np.cumsum(counts)
    if not RMinHash:
        parts = np.split(shingles, ends[:-1])
        rows = [minhash_numpy(np.unique(part)) for part in parts]
        return np.array(rows)
    offsets = np.append(0, ends).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(shingles, offsets, 112, 42)
    rows = np.array(matrix.to_rows(), np.uint32)
    return rows.reshape(-1, 112)


def minhash_numpy(shingles):
    """shingles: uint64 (n,) hashes. Returns uint32 (112,), all ones if n = 0."""
    out = np.full(112, 2**32 - 1, np.uint32)
    # 4096 x 112 x 8 bytes = 3.7 MB at a time.
    for i in range(0, len(shingles), 4096):
        h = shingles[i:i + 4096, None] * _A + _B  # (n, 112)
        least = h.min(0) >> 32
        out = np.minimum(out, least.astype(np.uint32))
    return out


class NearDuplicates:
    """
    The documents that stayed, as `bands` keys each, of `rows` places of the signature; one that shares a key goes.

    At similarity s that has probability 1 - (1 - s^rows)^bands: two thirds at s = threshold = (1/bands)^(1/rows). The
    default is FineWeb's 14 bands of 8: 65 % at 0.72, 77 % at 0.75, 92 % at 0.80. 112 bytes a document.
    ValueError for a threshold that the 112 places cannot tell apart.
    """

    def __init__(self, threshold=0.72):
        if not 0.3 <= threshold <= 0.95:
            raise ValueError(f"near-duplicate threshold {threshold}: want a similarity of 0.3 to 0.95 (FineWeb: 0.72)")
        def gap(rows):
            bands = 112 // rows
            return abs((1 / bands) ** (1 / rows) - threshold)

        self.rows = min(range(2, 29), key=gap)
        self.bands = 112 // self.rows
        self.seen = Seen()

    def keys(self, signature):
        """One number for each band: uint64 (..., bands). signature: minhash(text), or signatures(...) of many."""
        end = self.bands * self.rows
        h = np.arange(1, self.bands + 1, dtype=np.uint64)  # (bands,)
        for row in range(self.rows):
            places = signature[..., row:end:self.rows]  # (..., bands)
            h = _mix(h ^ places)
        return h

    def add(self, signature):
        """True if a document before is a near-duplicate; else remembers this one."""
        keys = self.keys(signature)
        return not self.seen.first(keys[None])[0]


# ----------------------------------------------------------------------------------------------------------------------
# contamination


class Contamination:
    """
    Does a document contain an evaluation prompt? A candidate shares an 8-gram with it; it is contaminated if runs of at
    least 5 words that both have (difflib) cover half of the prompt.

    prompts: iterable of str, compared word by word without punctuation (the official code: by Apertus' tokens). A
    prompt of fewer than 8 words cannot match; the official code, off by one, also misses those of 8, and the last
    8-gram of each. ValueError if no prompt has 8 words. Source: report sec. 4.
    """

    def __init__(self, prompts):
        self.prompts = []
        # 8-gram -> numbers of the prompts that have it, in order.
        self.where = {}
        for number, prompt in enumerate(prompts):
            ids = word_ids(prompt)
            self.prompts.append(ids.tolist())
            grams = ngrams(ids, 8).tolist()
            for gram in set(grams):
                self.where.setdefault(gram, []).append(number)
        if not self.where:
            raise ValueError(f"none of the {len(self.prompts)} prompts has 8 words: nothing can be checked")
        self.grams = np.array(sorted(self.where), np.uint64)
        # Whether an 8-gram with these upper 20 bits exists: 1 MB that rules nearly all of a text out.
        self.maybe = np.zeros(1 << 20, bool)
        self.maybe[self.grams >> 44] = True

    def candidates(self, ids):
        """Where in ids (of one text, or of many one after the other) an 8-gram of a prompt begins."""
        grams = ngrams(ids, 8)
        upper = (grams >> 44).view(np.int64)
        hits = np.flatnonzero(self.maybe.take(upper))
        grams = grams[hits]
        places = np.searchsorted(self.grams, grams)
        nearest = self.grams.take(places, mode="clip")
        found = nearest == grams
        return hits[found]

    def check(self, text):
        """Index of the first prompt found in text, or None."""
        ids = word_ids(text)
        grams = ngrams(ids, 8)
        # Prompt -> end of what was compared with it, because neighbouring 8-grams find the same passage.
        compared = {}
        for hit in self.candidates(ids).tolist():
            gram = int(grams[hit])
            for number in self.where[gram]:
                if hit < compared.get(number, 0):
                    continue
                prompt = self.prompts[number]
                compared[number] = hit + len(prompt)
                start = max(0, hit - len(prompt))
                end = hit + 2 * len(prompt)
                part = ids[start:end].tolist()
                matcher = SequenceMatcher(None, part, prompt, autojunk=False)
                sizes = [block.size for block in matcher.get_matching_blocks()]
                common = [size for size in sizes if size >= 5]
                if 2 * sum(common) >= len(prompt):
                    return number
        return None


def read_prompts(path):
    """
    Evaluation prompts of a file: .jsonl(.gz, .zst) or .parquet with a column prompt, question or text; any other file,
    one per line. ValueError for a line of .jsonl that has none of these columns.
    """
    prompts = [prompt.strip() for prompt, in rows_of(path, ("prompt", "question", "text"))]
    return [prompt for prompt in prompts if prompt]


# ----------------------------------------------------------------------------------------------------------------------
# the command


def main():
    if not paths:
        raise ValueError("name files of documents: python -m corpus.dedup docs.jsonl")
    contamination = Contamination(read_prompts(prompts)) if prompts else None
    near = NearDuplicates()
    seen = set()
    counts = Counter()
    size = 0
    start = time.perf_counter()
    for doc in each_document(paths):
        text = doc["text"]
        key = text_key(text)
        if key in seen:
            fate = "duplicate"
        elif near.add(minhash(text)):
            fate = "near-duplicate"
        elif contamination and contamination.check(text) is not None:
            fate = "contaminated"
        else:
            fate = "kept"
        seen.add(key)
        counts[fate] += 1
        size += len(text.encode())
    seconds = time.perf_counter() - start
    speed = size / 1e6 / seconds
    print(dict(counts), f"{speed:.1f} MB/s, MinHash by {BACKEND}")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
