"""
Duplicates and contamination: what stands in the corpus already, and what stands in an evaluation.

    exact          the same text up to Unicode form and white space, by a hash of 16 bytes
    near           MinHash: the minimum of a random hash over two sets A, B of n-grams agrees with probability |A and B| / |A or B|
    contaminated   a shared 8-gram with an evaluation prompt, then half of the prompt

All depend on the document and on what came before it in input order, never on the number of workers (report sec. 3).

$ python -m corpus.dedup docs.jsonl more.jsonl                # duplicates and near-duplicates in them, MB/s
$ python -m corpus.dedup docs.jsonl --prompts=prompts.txt     # and documents that contain these prompts
"""

import sys

if __name__ == "__main__" and not __package__:
    print("dedup.py: start it from the project's root, python -m corpus.dedup", file=sys.stderr)
    sys.exit(2)

import json
import re
import time
import unicodedata
from difflib import SequenceMatcher
from hashlib import blake2b

import numpy as np
from tqdm import tqdm

from configurator import run

try:
    from rensa import RMinHash
except ImportError:
    RMinHash = None

paths = []           # .jsonl files with a text in each line
prompts = ""         # evaluation prompts: text, one per line, or .jsonl; "" = none are looked for


BACKEND = "rensa" if RMinHash else "numpy"   # for the audit: signatures of the two do not mix


def text_key(text):
    """16 bytes, the same for the same text up to Unicode form and white space. A Seen of them finds exact duplicates."""
    digest = blake2b(digest_size=16)
    for n, piece in enumerate(pieces(text)):
        piece = piece if piece.isascii() else unicodedata.normalize("NFC", piece)
        normal = " ".join(piece.split())
        if normal:
            digest.update((" " + normal if n else normal).encode("utf-8", "replace"))
    return digest.digest()


def pieces(text, size=1_000_000, overlap=0):
    """A long text in pieces of about `size` characters, cut before white space where there is any, so that memory stays bounded."""
    if len(text) <= size:
        yield text
        return
    at = 0
    while at < len(text):
        end = min(at + size, len(text))
        space = _SPACE.search(text, end, end + 1000) if end < len(text) else None
        end = space.start() if space else end
        yield text[max(0, at - overlap):end]
        at = end


class Seen:
    """
    A set of uint64 keys at 8 bytes each: sorted runs, of which equally long ones are merged, as in a log-structured store
    (a Python set takes 60 bytes and more). first(keys) says which rows are new, in order, and remembers them.
    """

    def __init__(self):
        self.runs = []                                                        # sorted, each at least twice as long as the next

    def first(self, keys):
        """keys: uint64 (n, k). bool (n,): True where no key of the row has been there, in a row before or a call before."""
        new, fresh = np.ones(len(keys), bool), set()
        for run in self.runs:
            at = np.searchsorted(run, keys).clip(max=len(run) - 1)            # (n, k)
            new &= ~(run[at] == keys).any(1)
        for i in np.flatnonzero(new).tolist():
            row = keys[i].tolist()
            if fresh.isdisjoint(row):
                fresh.update(row)
            else:
                new[i] = False
        if fresh:
            self.runs.append(np.sort(np.fromiter(fresh, np.uint64, len(fresh))))
        while len(self.runs) > 1 and len(self.runs[-2]) < 2 * len(self.runs[-1]):
            last = self.runs.pop()
            self.runs[-1] = np.sort(np.concatenate((self.runs[-1], last)), kind="stable")
        return new


# 112 hash functions h -> the upper 32 bits of (a h + b) mod 2^64, a odd (Dietzfelbinger 1997).
_rng = np.random.default_rng(0)
_A, _B = (_rng.integers(0, 2**64, 112, dtype=np.uint64, endpoint=False) for _ in range(2))
_A |= np.uint64(1)
# Words are hashed by a random number for each byte times one for its place. 0 marks the bytes that are in no word.
_BYTE = _rng.integers(1, 2**32, 256, dtype=np.uint32, endpoint=False)
_BYTE[[b for b in range(128) if not (chr(b).isalnum() or chr(b) == "_")]] = 0
_MARKS = np.isin(np.arange(256), (0xC2, 0xE2, 0xE3, 0xEF))                    # the first bytes of what may be punctuation beyond ASCII
_PLACE = _rng.integers(0, 2**32, 256, dtype=np.uint32, endpoint=False) | np.uint32(1)
_SPACE = re.compile(r"\s")


def word_ids(text):
    """
    The words of a text, without case, punctuation and spaces, as hashes: uint64 (n,), in order. Equal words have equal ids.

    Chinese and Japanese are taken by character, and what else has no spaces (over 20 characters a word).
    """
    return words([text])[0]


def words(texts):
    """
    word_ids of many texts, one after the other, and where each ends: uint64 (N,), int64 (n,). Numpy on bytes, no word is ever made:
    60 MB/s, but 17 for one page of 3 kB alone, so some 300 kB should be taken at a time.
    """
    parts = [text.lower().encode("utf-8", "replace") for text in texts]
    ends = np.cumsum([len(part) + 1 for part in parts])                       # (n,) in bytes, with a line break behind each
    firsts = np.append(0, ends[:-1])
    raw = np.frombuffer(b"\n".join([*parts, b""]), np.uint8)                  # (N,) bytes
    h = _BYTE.take(raw)                                                       # (N,)
    if not all(map(str.isascii, texts)):                                      # punctuation beyond ASCII: quotes, dashes, Chinese marks
        at = np.flatnonzero(_MARKS.take(raw))
        one, two, three = raw[at], raw[at + 1], raw.take(at + 2, mode="clip")
        mark = (one == 0xE2) & (two < 0x82) | (one == 0xE3) & (two == 0x80)
        mark |= (one == 0xEF) & (two == 0xBC) & ((three < 0x90) | (three - 0x9A < 7))               # full width, not letters and digits
        h[at[one == 0xC2]] = h[at[one == 0xC2] + 1] = 0
        h[at[mark]] = h[at[mark] + 1] = h[at[mark] + 2] = 0
    inside = h != 0
    begin = inside.copy()
    begin[1:] &= ~inside[:-1]
    begin |= inside & (raw >= 0xE3) & (raw <= 0xE9)                           # U+3000 to U+9FFF: kana, Chinese characters
    counts = np.add.reduceat(begin, firsts, dtype=np.int64)                   # (n,) words
    for i in np.flatnonzero(np.array([len(text) for text in texts]) > 20 * counts).tolist():
        part = slice(firsts[i], ends[i])
        begin[part] = inside[part] & (raw[part] & 0xC0 != 0x80)               # the first byte of each character
        counts[i] = np.count_nonzero(begin[part])
    starts = np.flatnonzero(begin)                                            # (N words,)
    if not len(starts):
        return np.zeros(0, np.uint64), np.cumsum(counts)
    place = np.arange(starts[0], len(raw), dtype=np.uint32) - np.repeat(starts.astype(np.uint32), np.diff(np.append(starts, len(raw))))
    h = np.add.reduceat(h[starts[0]:] * _PLACE.take(place & 255), starts - starts[0], dtype=np.uint32)    # 32 bits: twice as fast
    return (h ^ (h >> np.uint32(15))).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), np.cumsum(counts)


def ngrams(ids, n):
    """
    Hashes of the runs of n ids: uint64 (max(N - n + 1, 0),), in order. A run of 4 ids in place 2 is entry 2.

    Runs of 2, 4, 8, ... are each made of two half as long, and n of those that its binary digits name: 3 steps for 8 or 5.
    """
    count, width, at, out = len(ids) - n + 1, 1, 0, None
    if count < 1:
        return np.zeros(0, np.uint64)
    runs = np.asarray(ids).astype(np.uint64)                                  # (N,)
    while width <= n:
        if n & width:
            part, at = runs[at:at + count], at + width
            out = part if out is None else _join(out, part)                   # (N - n + 1,)
        runs, width = _join(runs[:-width], runs[width:]), 2 * width           # (N - 2 width + 1,)
    return out


def _join(left, right):
    h = (left * np.uint64(0xD6E8FEB86659FD93) ^ right) * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(29)                                                   # so that high bits reach low ones
    return h


def minhash(text):
    """
    Signature of a text's set of 5-word shingles: uint32 (112,). The share of places where two signatures agree
    estimates the Jaccard similarity of the sets, +- 0.04 at 0.8. Fewer than 5 words are one shingle. Broder 1997.
    Of a long text the first million characters count.
    """
    return signatures(*words([text[:1_000_000]]))[0]


def signatures(ids, ends):
    """minhash of the n texts of words(): uint32 (n, 112)."""
    sizes = np.diff(ends, prepend=0)                                          # (n,) words
    inside = np.ones(len(ids), bool)
    inside[np.maximum(ends[:, None] - np.arange(1, 5), 0)[sizes > 0]] = False   # the last 4 words of a text begin no shingle
    counts, shingles = np.maximum(sizes - 4, 0), ngrams(ids, 5)
    shingles = shingles[inside[:len(shingles)]]
    few = np.flatnonzero((0 < sizes) & (sizes < 5))
    if len(few):
        whole = [ngrams(ids[ends[i] - sizes[i]:ends[i]], sizes[i])[0] for i in few]
        shingles = np.insert(shingles, np.cumsum(counts)[few], whole)
        counts[few] = 1
    ends = np.cumsum(counts)
    if RMinHash:
        rows = RMinHash.digest_matrix_from_flat_token_hashes(shingles, np.append(0, ends).astype(np.uint64), 112, 42).to_rows()
        return np.array(rows, np.uint32).reshape(-1, 112)
    return np.array([minhash_numpy(np.unique(part)) for part in np.split(shingles, ends[:-1])])


def minhash_numpy(shingles):
    """shingles: uint64 (n,) hashes. Returns uint32 (112,), all ones if n = 0."""
    out = np.full(112, 2**32 - 1, np.uint32)
    for i in range(0, len(shingles), 4096):                                   # 4096 x 112 x 8 bytes = 3.7 MB at a time
        h = (shingles[i:i + 4096, None] * _A + _B) >> np.uint64(32)           # (n, 112)
        np.minimum(out, h.min(0).astype(np.uint32), out=out)                  # (112,)
    return out


class NearDuplicates:
    """
    The documents that stayed, as `bands` keys each, of `rows` places of the signature; one that shares a key goes.

    At similarity s that has probability 1 - (1 - s^rows)^bands: two thirds at s = threshold = (1/bands)^(1/rows). The
    default is FineWeb's 14 bands of 8: 65 % at 0.72, 77 % at 0.75, 92 % at 0.80. 112 bytes a document.
    """

    def __init__(self, threshold=0.72):
        if not 0.3 <= threshold <= 0.95:
            raise ValueError(f"near-duplicate threshold {threshold}: want a similarity of 0.3 to 0.95 (FineWeb: 0.72)")
        self.rows = min(range(2, 29), key=lambda rows: abs((1 / (112 // rows)) ** (1 / rows) - threshold))
        self.bands, self.seen = 112 // self.rows, Seen()

    def keys(self, signature):
        """One number for each band: uint64 (..., bands). signature: minhash(text), or signatures(...) of many."""
        bands = signature[..., :self.bands * self.rows].reshape(*signature.shape[:-1], self.bands, self.rows).astype(np.uint64)
        h = np.arange(1, self.bands + 1, dtype=np.uint64)                     # (bands,)
        for row in range(self.rows):
            h = (h ^ bands[..., row]) * np.uint64(0x9E3779B97F4A7C15)
            h ^= h >> np.uint64(29)
        return h

    def add(self, signature):
        """True if a document before is a near-duplicate; else remembers this one."""
        return not self.seen.first(self.keys(signature)[None])[0]


class Contamination:
    """
    Does a document contain an evaluation prompt? A candidate shares an 8-gram with it; it is contaminated if runs of at
    least 5 tokens that both have (difflib) cover half of the prompt.

    prompts: iterable of str. encode: text -> ids (official: the Apertus tokenizer; default: words without punctuation).
    A prompt of fewer than 8 tokens cannot match and is counted in `short`; the official code, off by one, also misses
    those of 8, and the last 8-gram of each. Source: report sec. 4.
    """

    def __init__(self, prompts, encode=None):
        self.encode = encode or word_ids
        self.prompts, self.short, where = [], 0, {}
        for prompt in prompts:
            ids = self.encode(prompt)
            self.short += len(ids) < 8
            for gram in ngrams(ids, 8).tolist():
                where.setdefault(gram, {})[len(self.prompts)] = None
            self.prompts.append([int(i) for i in ids])
        if not where:
            raise ValueError(f"none of the {len(self.prompts)} prompts has 8 tokens: nothing can be checked")
        self.where, self.grams = where, np.sort(np.fromiter(where, np.uint64, len(where)))
        self.maybe = np.zeros(1 << 20, bool)                                  # by the upper 20 bits: 1 MB rules nearly all of a text out
        self.maybe[self.grams >> np.uint64(44)] = True

    def candidates(self, ids):
        """Where in ids (of one text, or of many one after the other) an 8-gram of a prompt begins."""
        grams = ngrams(ids, 8)
        hits = np.flatnonzero(self.maybe.take((grams >> np.uint64(44)).view(np.int64)))
        return hits[self.grams.take(np.searchsorted(self.grams, grams[hits]), mode="clip") == grams[hits]]

    def check(self, text):
        """Index of the first prompt found in text, or None."""
        ids = self.encode(text)
        grams = ngrams(ids, 8)
        done = {}                                                             # prompt -> end of what was compared
        for hit in self.candidates(ids).tolist():
            for number in self.where.get(int(grams[hit]), ()):
                prompt = self.prompts[number]
                if hit < done.get(number, 0):
                    continue
                start, end = max(0, hit - len(prompt)), hit + 2 * len(prompt)
                done[number] = hit + len(prompt)
                part = [int(i) for i in ids[start:end]]
                blocks = SequenceMatcher(None, part, prompt, autojunk=False).get_matching_blocks()
                if 2 * sum(b.size for b in blocks if b.size >= 5) >= len(prompt):
                    return number
        return None


def read_prompts(path):
    """Evaluation prompts of a file: .jsonl with a column prompt, question or text; any other file, one per line."""
    prompts = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if path.endswith(".jsonl") and line.strip():
                row = json.loads(line)
                key = next((k for k in ("prompt", "question", "text") if k in row), None)
                if key is None:
                    raise ValueError(f"{path} line {number}: want prompt, question or text; it has {', '.join(row)}")
                line = row[key]
            if line.strip():
                prompts.append(line.strip())
    return prompts


def main():
    if not paths:
        raise ValueError("name one or more .jsonl files: python -m corpus.dedup docs.jsonl")
    contamination = Contamination(read_prompts(prompts)) if prompts else None
    seen, near, counts, size, start = set(), NearDuplicates(), {}, 0, time.perf_counter()
    for path in paths:
        with open(path, encoding="utf-8") as lines:
            for line in tqdm(lines, desc=path, unit=" docs", disable=None, leave=False):
                text = json.loads(line)["text"]
                key = text_key(text)
                fate = "duplicate" if key in seen else "near-duplicate" if near.add(minhash(text)) else "kept"
                if fate == "kept" and contamination and contamination.check(text) is not None:
                    fate = "contaminated"
                seen.add(key)
                counts[fate] = counts.get(fate, 0) + 1
                size += len(text.encode())
    print(counts, f"{size / 1e6 / (time.perf_counter() - start):.1f} MB/s, MinHash by {BACKEND}")


if __name__ == "__main__":
    run(main, globals())
