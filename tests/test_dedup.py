"""
Duplicates against Python's re and set, Jaccard similarity and the formula of LSH, contamination against difflib, hashes
against those of the first corpora.
"""

import random
import re
import unicodedata
from difflib import SequenceMatcher
from hashlib import blake2b

import numpy as np
import pytest

from corpus import dedup

CHINESE = "\u4eba\u4eba\u751f\u800c\u81ea\u7531\uff0c"


def test_hashes_do_not_change_between_versions():
    """The hashes are those of the first corpora. The last texts are too short for a shingle of 5 words."""
    pytest.importorskip("rensa")
    english = "All human beings are born free and equal in dignity and rights."
    ids, ends = dedup.words([english, CHINESE, "a b c d", "a b c", "a b", "a", ""])
    signatures = dedup.signatures(ids, ends)
    assert dedup.fingerprint(english) == 11080551895044264074
    assert ids[0] == 17883861470632752357
    assert np.diff(ends).tolist() == [6, 4, 3, 2, 1, 0]
    assert " ".join(map(str, signatures[:, 0])) == (
        "1910524470 2184832521 4126655661 3861305381 3891752666 3863047082 4294967295"
    )
    assert dedup.band_keys(signatures, 14, 8)[:2, 0].tolist() == [17867989160535214360, 6370679387961258329]


def test_a_fingerprint_is_the_hash_of_normal_text_whatever_its_white_space():
    """Normal text is NFC, not NFKC: \u00b2 is not 2. The text is longer than the piece that is hashed at a time."""
    text = "".join(random.Random(0).choices(["a", "b\u0301", "\u00e9", "\u00b2", " ", "\n\n", "\u3000"], k=5000)) * 500
    normal = " ".join(unicodedata.normalize("NFC", text).split()).encode()
    digest = blake2b(normal, digest_size=16).digest()
    for same in (text, unicodedata.normalize("NFD", f"  {text}\n").replace(" ", " \t")):
        assert dedup.fingerprint(same) == int.from_bytes(digest[:8], "little")
    assert dedup.fingerprint("\u0301\u0327" * 500_000)  # in linear time


def test_a_row_that_shares_a_key_with_an_earlier_one_that_stays_was_seen_before():
    """Against a Python set. Keys of different bands differ, as in band_keys()."""
    keys = np.random.default_rng(0).integers(0, 3000, (1800, 3), dtype=np.uint64) * 3 + np.arange(3, dtype=np.uint64)
    seen = set()
    # update() returns None: a row that shares no key is not in the list, and its keys are seen from there on.
    assert list(dedup.seen_before(keys.T)) == [
        i for i, row in enumerate(keys) if not seen.isdisjoint(row) or seen.update(row)
    ]


def test_equal_words_have_equal_hashes_and_no_others():
    """Words are what Python's re finds. \uff11 and \uff54 are full-width."""
    text = (
        "Die K\u00fcche, die KU\u0308CHE \u201cquoted\u201d \u00abTexte\u00bb a_b x-y 3.14\tnew\nline, abba baab "
        "the THE The; \u2014 1\u20442 caf\u00e9caf\u00e9 "
        "\uff11\uff12\uff0c \uff54\uff48\uff45 \uff34\uff28\uff25\uff1a "
    ) * 3 + 300 * "x"
    words, ids = re.findall(r"[\w\u0308]+", text.lower()), dedup.words([text])[0].tolist()
    assert len(set(words)) == len(set(ids)) == len(set(zip(words, ids, strict=True)))


@pytest.mark.parametrize("text", [CHINESE, "\u0e21\u0e21\u0e38\u0e29\u0e22\u0e4c"])
def test_each_character_is_a_word_in_chinese_and_thai(text):
    ids, ends = dedup.words(["", text * 8, "a"])
    assert ends.tolist() == [0, 48, 49]
    assert ids[0] == ids[1] != ids[2]
    assert ids[:48].tolist() == ids[:6].tolist() * 8
    # Also if an English text follows.
    mixed, _ = dedup.words([text * 8 + " which an English sentence explains" * 20])
    assert mixed[:48].tolist() == ids[:48].tolist()


@pytest.mark.parametrize("shift", [50, 29, 16])
def test_near_duplicates_are_found_as_often_as_the_formula_says(shift):
    """Two texts have 200 shingles each, and all but the first or last `shift` of them in common."""
    pytest.importorskip("rensa")
    ids = np.random.default_rng(0).integers(0, 2**63, (400, 204 + shift), dtype=np.uint64)
    pair = [dedup.signatures(part.ravel(), np.arange(1, 401) * 204) for part in (ids[:, :204], ids[:, shift:])]
    one, two = (dedup.band_keys(signatures, *dedup.bands_of(0.72)) for signatures in pair)
    p = 1 - (1 - ((200 - shift) / (200 + shift)) ** 8) ** 14
    assert (one == two).any(1).mean() == pytest.approx(p, abs=4 * (p * (1 - p) / 400) ** 0.5)


@pytest.mark.parametrize("size", [8, 20, 33])
def test_contamination_is_half_of_the_prompt_in_runs_of_five(size):
    """By difflib's matching blocks: one has at least 8 words, and those of at least 5 cover half of the prompt."""
    rng, want = random.Random(0), {}
    prompt, rest = [f"p{i}" for i in range(size)], [f"d{i}" for i in range(20)]
    docs = [rest + [rng.choice([word] * 7 + ["changed"]) for word in prompt] + rest for _ in range(200)]
    for i, doc in enumerate(docs):
        sizes = [block.size for block in SequenceMatcher(None, doc, prompt, autojunk=False).get_matching_blocks()]
        if max(sizes) >= 8 and 2 * sum(n for n in sizes if n >= 5) >= size:
            want[i] = 0
    texts = list(map(" ".join, docs))
    assert dedup.Contamination([" ".join(prompt)]).find(texts, *dedup.words(texts)) == want != {}


def test_each_of_several_prompts_is_looked_for_with_twice_its_length_around():
    """Prompts begin in each other; the changed words of the last text are more than half of the prompt."""
    first, second = [f"p{i}" for i in range(20)], [f"p{i}" for i in range(8)] + [f"q{i}" for i in range(12)]
    wide = second[:8] + ["x"] * 19 + second[8:]
    texts = [" ".join(words) for words in (second, wide, first[:8] + ["x"] * 19 + second[8:14])]
    check = dedup.Contamination([" ".join(first), " ".join(second)])
    assert check.find(texts, *dedup.words(texts)) == {0: 1, 1: 1, 2: 1}


def test_a_prompt_is_found_anywhere_in_a_long_text_and_not_across_two_texts():
    """The prompt has exactly 8 words. The official code misses such prompts by an off-by-one error."""
    prompt = "How many legs does a healthy spider have?"
    halves = ["Quiz! HOW many legs does a healthy", "spider have... Eight."]
    texts = [*halves, " ".join(halves), prompt.replace("spider", "insect")]
    texts += ["a " * n + prompt + " b" * 500_000 for n in (499_990, 999_995)]
    check = dedup.Contamination(["too short", prompt])
    assert check.find(texts, *dedup.words([text[: dedup.LONG] for text in texts])) == {2: 1, 4: 1, 5: 1}
