"""
Find duplicates of documents, and documents that contain an evaluation prompt.

    exact duplicates     equal 64-bit hashes of the text after Unicode NFC, with white space collapsed
    near-duplicates      MinHash over 5-word shingles: two signatures agree at a place with a probability of
                         |A and B| / |A or B|, the Jaccard similarity of the two sets of shingles
    contamination        a document shares an 8-gram with an evaluation prompt, and around it half of the prompt

A hash depends on the text alone and must not change between versions, because a corpus is compared with older ones.
Which duplicate stays depends on the order of the input, never on the number of workers. Sources: Apertus report (arXiv
2509.14233) sec. 3 and 4; MinHash: Broder 1997; bands: FineWeb (arXiv 2406.17557). prepare.py applies all three:

$ python prepare.py docs.jsonl --near_dedup=0.72 --decontaminate=prompts.txt
"""

import re
import unicodedata
from difflib import SequenceMatcher
from hashlib import blake2b
from itertools import chain, islice

import numpy as np
import regex

from corpus.readers import rows_of

# Only this many characters at the start of a document count for near-duplicates.
LONG = 1_000_000
# Longer texts are read in pieces, to bound the memory. A piece ends before white space if there is any near.
PIECE = re.compile(r".{1,1000000}(\S{0,999}(?=\s))?", re.DOTALL)
# More accents on a letter than any text has. The time of normalize() is quadratic in their number, so the rest is left
# out. Looked for at the first accent of a run alone, since at each of 998 it would be quadratic too.
ACCENTS = regex.compile(r"(?<!\p{M})(\p{M}{999})\p{M}+")

# Letters: n texts; N bytes or words of all texts, concatenated.


# ----------------------------------------------------------------------------------------------------------------------
# exact duplicates


def normalized(text):
    """A text in Unicode form NFC, with white space collapsed."""
    return " ".join(unicodedata.normalize("NFC", ACCENTS.sub(r"\1", text)).split())


def fingerprint(text):
    """
    A 64-bit integer, the same for texts that differ only in Unicode form and white space.

    It also decides which documents are for validation, so equal texts are on the same side of that split.
    """
    digest = blake2b(digest_size=16)
    for match in PIECE.finditer(text):
        normal = normalized(match[0])
        # Restore the white space before a later piece, which split() has removed.
        if match.start() and normal:
            normal = " " + normal
        digest.update(normal.encode("utf-8", "replace"))
    return int.from_bytes(digest.digest()[:8], "little")


# ----------------------------------------------------------------------------------------------------------------------
# words and n-grams as numbers

# These draws must never change. The generator skips 224 draws, which an older implementation of MinHash used.
_rng = np.random.default_rng(np.random.PCG64(0).advance(224))
# The hash of a word is a sum over its bytes: a random number for the byte times another for its place in the word.
# Bytes that are never part of a word have the number 0.
_BYTE = _rng.integers(1, 2**32, 256, dtype=np.uint32)
_BYTE[list(re.sub(rb"\w", b"", bytes(range(128))) + b"\xff")] = 0
_PLACE = _rng.integers(0, 2**32, 256, dtype=np.uint32) | 1
_GOLDEN = 0x9E3779B97F4A7C15
# Punctuation beyond ASCII as UTF-8: U+0080 to 00BF (Latin signs), 2000 to 207F (quotes, dashes), 3000 to 303F (Chinese
# marks), FF00 to FF0F and FF1A to FF20 (full-width). Patterns that begin with one byte are searched at memchr's speed.
_PUNCTUATION = b"\xc2.", b"\xe2[\x80\x81].", b"\xe3\x80.", b"\xef\xbc[\x80-\x8f\x9a-\xa0]"


def words(texts):
    """
    Hash the words of n texts, without case and punctuation: uint64 (N,), and where each text ends, int64 (n,).

    Equal words have equal hashes. Each Chinese or Japanese character is a word, and so is each character beyond ASCII
    of a run of over 60 bytes without spaces, as in Thai. Call it with about 300 kB of text: a single page takes four
    times as long per byte, because the overhead of the numpy calls dominates.
    """
    # The byte 255, which UTF-8 never uses, ends each text and is in no word.
    joined = b"".join(text.lower().encode("utf-8", "replace") + b"\xff" for text in texts)
    for mark in _PUNCTUATION:
        joined = re.sub(mark, b" ", joined, flags=re.DOTALL)
    raw = np.frombuffer(joined, np.uint8)  # (N,)
    ends = np.flatnonzero(raw == 255) + 1  # (n,) bytes
    hashes = _BYTE.take(raw)  # (N,)
    inside = hashes != 0
    # U+3000 to U+9FFF are kana and Chinese characters: each is a word.
    edge = np.diff(inside, prepend=False)
    begin = inside & (edge | (raw >= 0xE3) & (raw <= 0xE9))
    # In a run of over 60 bytes, the first byte of each character beyond ASCII begins a word.
    runs = np.diff(np.flatnonzero(edge), prepend=0, append=len(raw))
    begin |= np.repeat(runs > 60, runs) & inside & (raw >= 0xC0)
    starts = np.flatnonzero(begin)  # (words,)
    # The place of each byte in its word, modulo 256.
    at = np.arange(len(raw), dtype=np.int32)
    place = at - np.maximum.accumulate(at * begin) & 255
    # 32-bit sums are twice as fast as 64-bit sums; the multiplication spreads them over 64 bits.
    sums = np.add.reduceat(hashes * _PLACE.take(place), starts, dtype=np.uint32)
    sums ^= sums >> 15
    return sums.astype(np.uint64) * _GOLDEN, np.searchsorted(starts, ends)


def ngrams(ids, n):
    """Hash the runs of n ids, in order: uint64 (max(N - n + 1, 0),). n: 8 or at most 5; the ids themselves if n < 2."""
    if n < 2:
        return ids
    # 2 = 1 + 1, 3 = 1 + 2, 4 = 2 + 2, 5 = 1 + 4, 8 = 4 + 4
    first = n % 2 or n // 2
    runs = ngrams(ids, n - first)
    right = runs[first:]
    left = (ids if n % 2 else runs)[:len(right)]
    # The constant makes the hash depend on the order of the two.
    return _mix(left * 0xD6E8FEB86659FD93 ^ right)


def _mix(h):
    """Scramble uint64 in place: the product carries low bits up, the shift brings high bits down."""
    h *= _GOLDEN
    h ^= h >> 29
    return h


# ----------------------------------------------------------------------------------------------------------------------
# near-duplicates


def signatures(ids, ends):
    """
    MinHash signatures of the n texts of words(), over their sets of 5-word shingles: uint32 (n, 112).

    The share of places where two signatures agree estimates the Jaccard similarity of the sets, +- 0.04 at 0.8. A text
    of fewer than 5 words is one shingle. It needs the package rensa.
    """
    from rensa import RMinHash

    shingles = [ngrams(text, min(5, len(text))) for text in np.split(ids, ends[:-1])]
    offsets = np.cumsum([0, *map(len, shingles)], dtype=np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(shingles), offsets, 112, 42)
    return np.array(matrix.to_rows(), np.uint32)


def bands_of(threshold):
    """
    (bands, rows) for this similarity: how many keys a signature has, and how many of its places each key covers.

    Texts of similarity s share a key with probability 1 - (1 - s^rows)^bands, which is two thirds at the threshold
    (1/bands)^(1/rows). 0.72 gives FineWeb's 14 bands of 8: 65 % at 0.72, 77 % at 0.75, 92 % at 0.80. ValueError for a
    threshold that 112 places cannot resolve.
    """
    if not 0.3 <= threshold <= 0.95:
        raise ValueError(f"near-duplicate threshold {threshold}: want a similarity of 0.3 to 0.95 (FineWeb: 0.72)")
    rows = min(range(2, 29), key=lambda rows: abs((112 // rows) ** (-1 / rows) - threshold))
    return 112 // rows, rows


def band_keys(signatures, bands, rows):
    """One key for each band of `rows` places, uint64 (n, bands): near-duplicates share at least one."""
    keys = np.arange(1, bands + 1, dtype=np.uint64)
    for row in range(rows):
        keys = _mix(keys ^ signatures[:, row:bands * rows:rows])
    return keys


def seen_before(bands):
    """
    Find near-duplicates: yield the number of each row that shares a key with an earlier row that stays.

    bands: yields the keys of each band, uint64 (n,). A million documents take 4 s.
    """
    shared, seen = {}, set()
    for keys in bands:
        order = np.argsort(keys)
        same = np.flatnonzero(np.diff(keys[order]) == 0)
        # Most documents share no key. A Python set of all keys would take 1.4 kB a document.
        for row in np.unique(order[[same, same + 1]]).tolist():
            shared.setdefault(row, []).append(int(keys[row]))
    for row, keys in sorted(shared.items()):
        if seen.isdisjoint(keys):
            seen.update(keys)
        else:
            yield row


# ----------------------------------------------------------------------------------------------------------------------
# contamination


class Contamination:
    """
    Find evaluation prompts in texts. A text is contaminated if it shares an 8-gram of words with a prompt, and shared
    runs of at least 5 words (difflib) cover half of the prompt.

    prompts: iterable of str. Prompts of fewer than 8 words cannot match; ValueError if all are so short. The official
    code compares tokens, and an off-by-one error makes it miss prompts of exactly 8 tokens and the last 8-gram of each
    prompt. Source: Apertus report sec. 4.
    """

    def __init__(self, prompts):
        # 8-gram -> [(number, words) of each prompt that contains it]
        self.where = {}
        for number, prompt in enumerate(prompts):
            ids, _ = words([prompt])
            for gram in ngrams(ids, 8).tolist():
                self.where.setdefault(gram, []).append((number, ids))
        if not self.where:
            raise ValueError("none of the evaluation prompts has 8 words: nothing can be checked")
        # Whether a prompt has an 8-gram with these upper 22 bits: a table of 4 MB that rules out nearly all of a text.
        self.maybe = np.zeros(1 << 22, bool)
        self.maybe[np.fromiter(self.where, np.uint64) >> 42] = True

    def find(self, texts, ids, ends):
        """
        {number of a text: number of the first prompt that is found in it}. ids, ends: words() of the first LONG
        characters of each text. The rest of a longer text is read in pieces that overlap.
        """
        contaminated = {}
        for i, (text, begin) in enumerate(zip(texts, np.split(ids, ends[:-1]))):
            rest = (words([text[match.start() - 20_000:match.end()]])[0] for match in PIECE.finditer(text, LONG))
            for number in islice(chain.from_iterable(map(self.prompts_in, chain([begin], rest))), 1):
                contaminated[i] = number
        return contaminated

    def prompts_in(self, ids):
        """Yield the numbers of the prompts that are found in words of a text, uint64 (N,)."""
        grams, compared = ngrams(ids, 8), {}
        for hit in np.flatnonzero(self.maybe[grams >> 42]).tolist():
            for number, prompt in self.where.get(int(grams[hit]), ()):
                size = len(prompt)
                # Skip neighbouring 8-grams, which find the same passage.
                if hit < compared.get(number, 0):
                    continue
                compared[number] = hit + size
                near = ids[max(hit - size, 0):hit + 2 * size].tolist()
                blocks = SequenceMatcher(None, near, prompt.tolist(), autojunk=False).get_matching_blocks()
                if 2 * sum(block.size for block in blocks if block.size >= 5) >= size:
                    yield number


def read_passages(path):
    """
    Evaluation prompts of a file: column prompt, question or text of .jsonl(.gz, .zst) or .parquet; the lines of any
    other file. A value that is no text, like null, is left out. ValueError for a row without such a column.
    """
    prompts = rows_of(path, ("prompt", "question", "text"))
    return [prompt.strip() for prompt, in prompts if isinstance(prompt, str) and prompt.strip()]
