"""
Duplicates against Unicode, Python's re, a Python set, Jaccard and the formula of LSH; contamination against difflib; the
hashes against those of the first corpora.
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
ENGLISH = "All human beings are born free and equal in dignity and rights."


def test_hashes_do_not_change_between_versions():
    """The numbers are those of the first corpora. The texts have 12, 6, 2 and 0 words."""
    pytest.importorskip("rensa")
    ids, ends = dedup.words([ENGLISH, CHINESE, "two words", ""])
    signatures = dedup.signatures(ids, ends)
    assert dedup.fingerprint(ENGLISH) == 11080551895044264074
    assert ids[0] == 17883861470632752357 and ends.tolist() == [12, 18, 20, 20]
    assert signatures[:, 0].tolist() == [1910524470, 2184832521, 4011549978, 2**32 - 1]
    assert dedup.band_keys(signatures, 14, 8)[:, 0].tolist() == [
        17867989160535214360, 6370679387961258329, 12073698018685633628, 1941401436665816965]


def test_a_fingerprint_ignores_unicode_form_and_white_space_also_in_pieces(monkeypatch):
    rng = random.Random(0)
    text = "".join(rng.choices(["a", "b\u0301", "\u00e9", " ", "\n\n", "\u3000"], k=5000))
    whole = dedup.fingerprint(text)
    monkeypatch.setattr(dedup, "PIECE", re.compile(dedup.PIECE.pattern.replace("1000000", "100"), re.DOTALL))
    assert "".join(match[0] for match in dedup.PIECE.finditer(text)) == text
    other = unicodedata.normalize("NFD", text).replace(" ", " \t")
    assert dedup.fingerprint(text) == dedup.fingerprint(f"  {other}\n") == whole != dedup.fingerprint(text + "a")


def test_seen_is_a_set_that_remembers_in_order():
    rng, seen, reference = np.random.default_rng(0), dedup.Seen(), set()
    for _ in range(60):
        keys = rng.integers(0, 3000, (rng.integers(0, 40), 3), dtype=np.uint64) << 52
        want = []
        for row in keys.tolist():
            want.append(reference.isdisjoint(row))
            if want[-1]:
                reference.update(row)
        assert seen.first(keys).tolist() == want
    assert len(seen.newest) < 100 and len(seen.sorted) + len(seen.newest) == len(reference)


def test_equal_words_have_equal_hashes_and_no_others():
    """The words are those of Python's re. \uff11 and \uff54 are full-width."""
    text = ("Die K\u00fcche, die KU\u0308CHE \u201cquoted\u201d \u00abTexte\u00bb a_b x-y 3.14\tnew\nline, abba baab "
            "the THE The; \u2014 caf\u00e9caf\u00e9 \uff11\uff12\uff0c \uff54\uff48\uff45 \uff34\uff28\uff25\uff1a ") * 3
    words, ids = re.findall(r"[\w\u0308]+", text.lower()), dedup.words([text])[0].tolist()
    assert len(words) == len(ids)
    assert len(set(words)) == len(set(ids)) == len(set(zip(words, ids)))
    for text in (CHINESE, THAI):
        ids = dedup.words([text * 8])[0]
        assert len(ids) == 8 * 6 and ids[0] == ids[1] != ids[2] and (ids[:6] == ids[6:12]).all()


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_equal_runs_of_words_have_equal_hashes_and_no_others(n):
    ids = np.random.default_rng(0).integers(0, 3, 2000).astype(np.uint64)
    hashes, runs = dedup.ngrams(ids, n).tolist(), [tuple(ids[i:i + n]) for i in range(2001 - n)]
    assert len(hashes) == len(runs) and len(set(hashes)) == len(set(runs)) == len(set(zip(hashes, runs)))
    assert len(dedup.ngrams(ids[:n], n)) == 1 and len(dedup.ngrams(ids[:n - 1], n)) == 0


def test_a_text_in_a_batch_has_the_words_and_the_signature_that_it_has_alone():
    pytest.importorskip("rensa")
    texts = [ENGLISH, "", "a b", CHINESE, THAI * 9, "\u201cquoted\u201d", "...", "five words are one shingle", ""]
    ids, ends = dedup.words(texts)
    signatures = dedup.signatures(ids, ends)
    for own, signature, text in zip(np.split(ids, ends), signatures, texts):
        alone = dedup.words([text])
        assert own.tolist() == alone[0].tolist()
        assert (dedup.signatures(*alone) == signature).all()


@pytest.mark.parametrize("shift, size", [(50, 204), (29, 204), (16, 204)])
def test_near_duplicates_are_found_as_often_as_the_formula_says(shift, size):
    """Two texts of `size` words, one `shift` words behind the other, have that Jaccard similarity."""
    pytest.importorskip("rensa")
    s = (size - 4 - shift) / (size - 4 + shift)
    ids = np.random.default_rng(0).integers(0, 2**63, (400, size + shift), dtype=np.uint64)
    ends = np.arange(1, 401) * size
    first, second = (dedup.signatures(part.ravel(), ends) for part in (ids[:, :size], ids[:, shift:]))
    assert abs(np.mean(first == second) - s) < 4 * (s * (1 - s) / (112 * 400)) ** 0.5
    bands, rows = dedup.bands_of(0.72)
    assert (bands, rows) == (14, 8)
    found = (dedup.band_keys(first, bands, rows) == dedup.band_keys(second, bands, rows)).any(1).mean()
    p = 1 - (1 - s**rows) ** bands
    assert abs(found - p) < 4 * (p * (1 - p) / 400) ** 0.5


def test_contamination_is_half_of_the_prompt_in_runs_of_five():
    """difflib's matching blocks of the whole text: one of at least 8, and those of at least 5 half of the prompt."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10**6) for _ in range(n)] for n in (8, 20, 33, 60)]
    texts, want = [], {}
    for trial in range(200):
        prompt = rng.choice(prompts)
        length = rng.randint(1, len(prompt))
        at = rng.randint(0, len(prompt) - length)
        doc = [rng.randrange(10**6, 10**7) for _ in range(rng.choice([0, 40]))]
        place = rng.randint(0, len(doc))
        doc[place:place] = prompt[at:at + length]
        if trial % 3 == 0 and length > 12:
            doc[place + 10] = -1
        sizes = [block.size for block in SequenceMatcher(None, doc, prompt, autojunk=False).get_matching_blocks()]
        if max(sizes) >= 8 and 2 * sum(size for size in sizes if size >= 5) >= len(prompt):
            want[trial] = prompts.index(prompt)
        texts.append(" ".join(map(str, doc)))
    check = dedup.Contamination([" ".join(map(str, prompt)) for prompt in prompts])
    assert check.find(texts, *dedup.words(texts)) == want and 50 < len(want) < 150


SPIDER = "How many legs does a healthy spider have?"


def test_a_prompt_is_found_anywhere_in_a_long_text_and_not_across_two_texts(monkeypatch):
    """It has exactly 8 words: the official code misses it by one."""
    check = dedup.Contamination(["too short", SPIDER])
    halves = ["Quiz! HOW many legs does a healthy", "spider have... Eight."]
    texts = [*halves, " ".join(halves), SPIDER.replace("spider", "insect")]
    for at in (0, 999_980, 1_000_000, 1_999_990):
        texts.append("a " * (at // 2) + SPIDER + " b" * 500_000)
    assert set(check.find(texts, *dedup.words([text[:dedup.LONG] for text in texts])).items()) == {
        (2, 1), (4, 1), (5, 1), (6, 1), (7, 1)}
    with pytest.raises(ValueError, match="has 8 words"):
        dedup.Contamination(["too short"])


def test_prompts_of_a_file_of_text_may_hold_a_number_sign(tmp_path):
    prompts = ["Is C# an open standard, and of which body?", "# 7 is what in hexadecimal?"]
    (tmp_path / "p.txt").write_text("\n\n".join(prompts))
    assert dedup.read_prompts(str(tmp_path / "p.txt")) == prompts
