"""
Duplicates against Jaccard and the formula of LSH, contamination against difflib.
"""
import json
import random
import re
from difflib import SequenceMatcher

import numpy as np
import pytest

from conftest import script
from corpus import dedup
from corpus.dedup import Contamination, NearDuplicates, minhash, minhash_numpy, ngrams, text_key


# ----------------------------------------------------------------------------------------------------------------------
# duplicates


def sets(similarity, size, seed):
    """Two sets of random hashes with that Jaccard similarity, to within rounding."""
    both = int(size * 2 * similarity / (1 + similarity))
    ids = np.random.default_rng(seed).integers(0, 2**63, 2 * size - both, dtype=np.uint64)
    return ids[:size], ids[size - both:]


@pytest.mark.parametrize("s", [0.6, 0.75, 0.85])
def test_near_duplicates_are_found_as_often_as_the_formula_says(s):
    """Signatures agree as often as the sets are similar; 14 bands of 8 are FineWeb's."""
    found, agree = [], []
    for seed in range(150):
        near = NearDuplicates()
        assert (near.bands, near.rows) == (14, 8)
        a, b = map(minhash_numpy, sets(s, 200, seed))
        agree.append(np.mean(a == b))
        found.append(near.add(a) or near.add(b))
    assert abs(np.mean(agree) - s) < 4 * (s * (1 - s) / (112 * 150)) ** 0.5
    p = 1 - (1 - s**8) ** 14
    assert abs(np.mean(found) - p) < 4 * (p * (1 - p) / 150) ** 0.5


@pytest.fixture(params=["rensa", "numpy"])
def backend(request, monkeypatch):
    """Both ways to a signature: the library where it is installed, and our own."""
    if request.param == "rensa":
        pytest.importorskip("rensa")
    else:
        monkeypatch.setattr(dedup, "RMinHash", None)
    return request.param


def test_an_edited_copy_is_found_and_another_text_is_not(backend):
    rng = random.Random(0)
    words = [f"w{rng.randrange(1000)}" for _ in range(600)]
    edited = words[:300] + ["new"] + words[301:]
    chinese = "".join(chr(0x4e00 + rng.randrange(3000)) for _ in range(600))
    english = " ".join(words), " ".join(edited)
    for text, copy in (english, (chinese, chinese[:300] + "\u65b0" + chinese[301:]), ("a b", "A  b")):
        near = NearDuplicates()
        assert not near.add(minhash(text)) and near.add(minhash(copy))
        assert not near.add(minhash(" ".join(reversed(words))))
    assert minhash("").shape == (112,) and minhash("").dtype == np.uint32


# In Thai and Chinese no spaces stand between words.
THAI = "\u0e21\u0e21\u0e38\u0e29\u0e22\u0e4c"
CHINESE = "\u4eba\u4eba\u751f\u800c\u81ea\u7531\uff0c"


def shingles(ids):
    """The hash of each run of 5 words, or of all where there are fewer, one by one."""
    runs = [ids[i:i + 5] for i in range(max(len(ids) - 4, 1))]
    return np.array([ngrams(run, len(run))[0] for run in runs if len(run)], np.uint64)


def test_many_texts_at_once_have_the_words_and_signatures_that_each_has_alone(backend):
    rng = random.Random(1)
    texts = [" ".join(f"w{rng.randrange(99)}" for _ in range(n)) for n in (0, 1, 4, 5, 6, 300, 2, 0, 40)]
    texts += ["\u201cquoted\u201d", CHINESE, THAI * 9, "ends in \u2014", "", "..."]
    for some in (texts, texts[::-1], texts[7:8] + texts):
        ids, ends = dedup.words(some)
        alone = [dedup.word_ids(text) for text in some]
        assert ids.tolist() == [i for one in alone for i in one.tolist()]
        assert ends.tolist() == np.cumsum([len(one) for one in alone]).tolist()
        for text, own, signature in zip(some, alone, dedup.signatures(ids, ends)):
            want = minhash_numpy(shingles(own)) if backend == "numpy" else minhash(text)
            assert (signature == want).all()


def test_hashes_of_words_and_of_runs_are_equal_where_those_are():
    """The words are those of Python's re; the letters from uff11 on are full-width: 12, the THE: 12!"""
    text = ("Die K\u00fcche, die KU\u0308CHE \u201cquoted\u201d \u00abTexte\u00bb a_b x-y 3.14\tnew\nline, abba baab "
            "the THE The; \u2014 caf\u00e9caf\u00e9 \uff11\uff12\uff0c \uff54\uff48\uff45 \uff34\uff28\uff25\uff1a ") * 3
    words, ids = re.findall(r"[\w\u0308]+", text.lower()), dedup.word_ids(text).tolist()
    assert len(words) == len(ids)
    assert len(set(words)) == len(set(ids)) == len(set(zip(words, ids)))
    ids = np.random.default_rng(0).integers(0, 3, 2000)
    hashes, runs = ngrams(ids, 8).tolist(), [tuple(ids[i:i + 8]) for i in range(1993)]
    assert len(hashes) == len(runs) and len(set(hashes)) == len(set(runs)) == len(set(zip(hashes, runs)))
    assert len(ngrams(ids[:8], 8)) == 1 and len(ngrams(ids[:7], 8)) == 0


def test_a_script_without_spaces_is_taken_by_character_and_punctuation_is_no_word():
    for text in (CHINESE, THAI):
        ids = dedup.word_ids(text * 8)
        assert len(ids) == 8 * 6 and ids[0] == ids[1] != ids[2] and (ids[:6] == ids[6:12]).all()
    assert len(dedup.word_ids(" .,")) == 0


def test_what_is_a_duplicate_does_not_change_between_versions():
    """The numbers are those of the first corpora: another numpy that draws otherwise would show here too."""
    ids = dedup.word_ids("All human beings are born free and equal in dignity and rights.")
    signature = minhash_numpy(ngrams(ids, 5)).tolist()
    assert signature[:3] + signature[-2:] == [607687889, 166314809, 85959605, 253404593, 535919191]


def test_exact_duplicates_are_equal_up_to_unicode_form_and_white_space_whole_or_in_pieces(monkeypatch):
    assert text_key("e\u0301t\u00e9  a\n") == text_key("\u00e9te\u0301 a") != text_key("\u00e9t\u00e9 A")
    rng = random.Random(0)
    text = "".join(rng.choice(["a", "b\u0301", "\u00e9", " ", "\n\n", "\u3000"]) for _ in range(5000))
    whole, pieces = text_key(text), dedup.pieces
    assert "".join(pieces(text, 100)) == text
    monkeypatch.setattr(dedup, "pieces", lambda text: pieces(text, 100))
    assert text_key(text) == whole == text_key("  " + text.replace(" ", " \t") + "\n")


def test_seen_is_a_set_that_remembers_in_order():
    rng, seen, reference = np.random.default_rng(0), dedup.Seen(), set()
    for _ in range(60):
        keys = rng.integers(0, 3000, (rng.integers(0, 40), 3), dtype=np.uint64)
        want = []
        for row in keys.tolist():
            want.append(reference.isdisjoint(row))
            if want[-1]:
                reference.update(row)
        assert seen.first(keys).tolist() == want
    assert sum(map(len, seen.runs)) == len(reference) and len(seen.runs) < 12


# ----------------------------------------------------------------------------------------------------------------------
# contamination


def test_contamination_is_half_of_the_prompt_in_runs_of_five():
    """difflib's matching blocks of the whole document: one of at least 8, those of at least 5 half of the prompt."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10**6) for _ in range(n)] for n in (8, 20, 33, 60)]
    check = Contamination([" ".join(map(str, p)) for p in prompts] + ["1 2 3"])
    outcomes = set()
    for trial in range(200):
        prompt = rng.choice(prompts)
        length = rng.randint(1, len(prompt))
        at = rng.randint(0, len(prompt) - length)
        doc = [rng.randrange(10**6, 10**7) for _ in range(400)]
        place = rng.randrange(400)
        doc[place:place] = prompt[at:at + length]
        if trial % 3 == 0 and length > 12:
            # One word is changed.
            doc[place + 10] = -1
        blocks = SequenceMatcher(None, doc, prompt, autojunk=False).get_matching_blocks()
        eight = any(b.size >= 8 for b in blocks)
        want = eight and 2 * sum(b.size for b in blocks if b.size >= 5) >= len(prompt)
        assert (check.check(" ".join(map(str, doc))) is not None) == want
        outcomes.add(want)
    assert outcomes == {True, False}


def test_a_prompt_of_exactly_eight_words_is_found_and_may_hold_a_number_sign(tmp_path):
    """The official code misses it by one."""
    check = Contamination(["How many legs does a healthy spider have?"])
    assert check.check("Quiz! HOW many legs does a healthy spider have... Eight.") == 0
    assert check.check("How many legs does a healthy insect have?") is None
    with pytest.raises(ValueError, match="has 8 words"):
        Contamination(["too short"])
    prompts = ["Is C# an open standard, and of which body?", "# 7 is what in hexadecimal?"]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    assert dedup.read_prompts(str(tmp_path / "p.txt")) == prompts


def test_the_command_counts_what_goes_and_names_a_line_without_a_text(tmp_path):
    text = " ".join(f"word{i}" for i in range(50))
    docs = [text, text, text + " more", "How many legs does a healthy spider have? Eight.", "else"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in docs))
    (tmp_path / "p.txt").write_text("How many legs does a healthy spider have?\n")
    done = script("corpus.dedup", tmp_path / "d.jsonl", f"--prompts={tmp_path / 'p.txt'}")
    assert done.stdout.startswith("{'kept': 2, 'duplicate': 1, 'near-duplicate': 1, 'contaminated': 1}")
    for line in ('{"text": 3}', "[1]", "no JSON"):
        (tmp_path / "d.jsonl").write_text('{"text": "a"}\n' + line)
        done = script("corpus.dedup", tmp_path / "d.jsonl")
        assert done.stdout.startswith("passed over 1 files and rows without a text\n{'kept': 1}")
