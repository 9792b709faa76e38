"""
Duplicates against Python's re and set, Jaccard similarity and the formula of LSH, contamination against difflib, hashes
against those of the first corpora.
"""

import random
import re
import unicodedata
from difflib import SequenceMatcher

import numpy as np
import pytest

from corpus import dedup

THAI = "\u0e21\u0e21\u0e38\u0e29\u0e22\u0e4c"
CHINESE = "\u4eba\u4eba\u751f\u800c\u81ea\u7531\uff0c"


def test_hashes_do_not_change_between_versions():
    """The numbers are those of the first corpora. The last texts are too short for a shingle of 5 words."""
    pytest.importorskip("rensa")
    english = "All human beings are born free and equal in dignity and rights."
    ids, ends = dedup.words([english, CHINESE, "a b c d", "a b c", "a b", "a", ""])
    signatures = dedup.signatures(ids, ends)
    assert dedup.fingerprint(english) == 11080551895044264074
    assert ids[0] == 17883861470632752357 and ends.tolist() == [12, 18, 22, 25, 27, 28, 28]
    assert " ".join(map(str, signatures[:, 0])) == (
        "1910524470 2184832521 4126655661 3861305381 3891752666 3863047082 4294967295")
    assert dedup.band_keys(signatures, 14, 8)[:2, 0].tolist() == [17867989160535214360, 6370679387961258329]


def test_a_fingerprint_ignores_unicode_form_and_white_space_also_in_pieces(monkeypatch):
    text = "".join(random.Random(0).choices(["a", "b\u0301", "\u00e9", " ", "\n\n", "\u3000"], k=5000))
    whole = dedup.fingerprint(text)
    monkeypatch.setattr(dedup, "PIECE", re.compile(dedup.PIECE.pattern.replace("1000000", "100"), re.DOTALL))
    other = unicodedata.normalize("NFD", text).replace(" ", " \t")
    assert dedup.fingerprint(text) == dedup.fingerprint(f"  {other}\n") == whole
    assert dedup.fingerprint("\u00b2") != dedup.fingerprint("2")


def test_a_row_that_shares_a_key_with_an_earlier_one_that_stays_was_seen_before():
    """Against a Python set. A key belongs to a band, as in band_keys()."""
    keys = np.random.default_rng(0).integers(0, 3000, (1800, 3), dtype=np.uint64) * 3 + np.arange(3, dtype=np.uint64)
    seen = set()
    for row, again in zip(keys.tolist(), dedup.seen_before(keys)):
        assert again != seen.isdisjoint(row)
        seen.update([] if again else row)


def test_equal_words_have_equal_hashes_and_no_others():
    """The words are those of Python's re. \uff11 and \uff54 are full-width."""
    text = ("Die K\u00fcche, die KU\u0308CHE \u201cquoted\u201d \u00abTexte\u00bb a_b x-y 3.14\tnew\nline, abba baab "
            "the THE The; \u2014 1\u20442 caf\u00e9caf\u00e9 "
            "\uff11\uff12\uff0c \uff54\uff48\uff45 \uff34\uff28\uff25\uff1a ") * 3
    text += 300 * "x"
    words, ids = re.findall(r"[\w\u0308]+", text.lower()), dedup.words([text])[0].tolist()
    assert len(words) == len(ids)
    assert len(set(words)) == len(set(ids)) == len(set(zip(words, ids)))
    for text in (CHINESE, THAI):
        ids, ends = dedup.words(["", text * 8, "a"])
        assert ends.tolist() == [0, 48, 49]
        assert ids[0] == ids[1] != ids[2] and (ids[:6] == ids[6:12]).all()


@pytest.mark.parametrize("shift", [50, 29, 16])
def test_near_duplicates_are_found_as_often_as_the_formula_says(shift):
    """Two texts have 200 shingles each, and all but the first or last `shift` of them in common."""
    pytest.importorskip("rensa")
    s = (200 - shift) / (200 + shift)
    ids = np.random.default_rng(0).integers(0, 2**63, (400, 204 + shift), dtype=np.uint64)
    pair = [dedup.signatures(part.ravel(), np.arange(1, 401) * 204) for part in (ids[:, :204], ids[:, shift:])]
    one, two = (dedup.band_keys(signatures, *dedup.bands_of(0.72)) for signatures in pair)
    p = 1 - (1 - s**8) ** 14
    assert abs((one == two).any(1).mean() - p) < 4 * (p * (1 - p) / 400) ** 0.5


@pytest.mark.parametrize("size", [8, 20, 33])
def test_contamination_is_half_of_the_prompt_in_runs_of_five(size):
    """difflib's matching blocks of the whole text: one of at least 8, and those of at least 5 half of the prompt."""
    rng, want, texts = random.Random(0), {}, []
    prompt = [f"p{i}" for i in range(size)]
    for i in range(200):
        begin, end = sorted(rng.choices([0, *range(size), size], k=2))
        doc = [f"d{i}" for i in range(20)] + prompt[begin:end] + [f"d{i}" for i in range(20)]
        for at in rng.sample(range(len(doc)), 3):
            doc[at:at + 1] = ["changed"] * rng.choice([1, 4])
        sizes = [block.size for block in SequenceMatcher(None, doc, prompt, autojunk=False).get_matching_blocks()]
        if max(sizes) >= 8 and 2 * sum(n for n in sizes if n >= 5) >= size:
            want[i] = 0
        texts.append(" ".join(doc))
    check = dedup.Contamination([" ".join(prompt)])
    assert check.find(texts, *dedup.words(texts)) == want != {}


def test_a_prompt_is_found_anywhere_in_a_long_text_and_not_across_two_texts():
    """It has exactly 8 words: the official code misses it by one."""
    prompt = "How many legs does a healthy spider have?"
    halves = ["Quiz! HOW many legs does a healthy", "spider have... Eight."]
    texts = [*halves, " ".join(halves), prompt.replace("spider", "insect")]
    for at in (999_980, 1_999_990):
        texts.append("a " * (at // 2) + prompt + " b" * 500_000)
    check = dedup.Contamination(["too short", prompt])
    assert check.find(texts, *dedup.words([text[:dedup.LONG] for text in texts])) == {2: 1, 4: 1, 5: 1}
    with pytest.raises(ValueError, match="has 8 words"):
        dedup.Contamination(["too short"])
