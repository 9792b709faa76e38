"""
Selection against numpy quantiles, a classifier against scikit-learn, duplicates against Jaccard and the LSH formula,
contamination against difflib.
"""
import gzip
import json
import random
import re
import subprocess
import sys
from difflib import SequenceMatcher

import numpy as np
import pytest

from conftest import ROOT, script
from corpus import dedup, quality
from corpus.quality import BITS, Classifier, TopShare, column_reason, features, learn, uniform
from corpus.quality import area, roc, standard_error
from engine.files import sha256
from corpus.dedup import Contamination, NearDuplicates, minhash, minhash_numpy, ngrams, text_key


@pytest.mark.parametrize("share", [0.1, 0.33, 0.5, 1.0])
def test_the_top_share_of_each_language_is_kept(share):
    rng = np.random.default_rng(0)
    docs = [(f"d{i}", rng.choice(["de", "fr"]), rng.normal()) for i in range(3000)]
    first = TopShare(share)
    for doc in docs:
        first.add(*doc)
    for language, threshold in first.thresholds().items():
        scores = np.array([s for _, l, s in docs if l == language])
        assert (scores >= threshold).sum() == int(np.ceil(share * len(scores)))
        assert threshold == -np.quantile(-scores, share, method="inverted_cdf")


def test_a_sample_is_the_same_in_any_order_and_split_over_workers():
    rng = random.Random(0)
    docs = [(f"d{i}", "de", rng.gauss(0, 1)) for i in range(5000)]
    whole, shuffled, a, b = (TopShare(0.33, sample=400) for _ in range(4))
    for doc in docs:
        whole.add(*doc)
    for i, doc in enumerate(rng.sample(docs, len(docs))):
        shuffled.add(*doc)
        (a, b)[i % 2].add(*doc)
    a.merge(b)
    assert whole.thresholds() == shuffled.thresholds() == a.thresholds()
    kept = np.mean([s >= whole.thresholds()["de"] for _, _, s in docs])
    # Four standard errors of 400 drawn.
    assert abs(kept - 0.33) < 4 * (0.33 * 0.67 / 400) ** 0.5


def test_equal_scores_lose_no_language():
    first = TopShare(0.33)
    for i in range(10):
        first.add(f"d{i}", "rm", 3)
    assert first.thresholds() == {"rm": 3.0}
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        TopShare(33)


DOC = {"id": "7", "text": "x" * 100, "lang": "deu_Latn", "license": "cc-by-4.0", "score": 2.5, "toxic": 0.9977,
       "gap": None}


@pytest.mark.parametrize("rules, reason", [
    ({}, None), ({"licenses": {"cc-by-4.0"}}, None), ({"licenses": {"mit"}}, "license"),
    ({"languages": ["fra_Latn"]}, "language"),
    ({"min_chars": 101}, "length"), ({"max_chars": 99}, "length"), ({"min_chars": 100, "max_chars": 100}, None),
    ({"top": ("score", 2.5)}, None), ({"top": ("score", {"deu_Latn": 2.6})}, "score"),
    ({"top": ("score", {"fra_Latn": 9})}, None),
    ({"top": ("gap", 0)}, "score"), ({"below": ("gap", 0)}, None), ({"below": ("toxic", quality.TOXICITY)}, "above"),
    ({"below": ("toxic", 0.9978)}, None), ({"rate": 1}, None), ({"rate": {"*": 0}}, "rate"),
    ({"rate": {"deu_Latn": 1, "*": 0}}, None)])
def test_rules_on_columns(rules, reason):
    assert column_reason(DOC, **rules) == reason


def test_the_language_is_the_column_of_that_name_and_lang_where_there_is_none():
    doc = dict(text="x", lang="de", language="deu_Latn", score=1)
    assert column_reason(doc, languages=["deu_Latn"], top=("score", {"deu_Latn": 1, "*": 2})) is None
    assert column_reason(doc, languages=["de"]) == "language"


def test_a_missing_column_lists_those_there_are():
    with pytest.raises(ValueError, match="no column quality in the data; it has id, text, lang"):
        column_reason(DOC, top=("quality", 1))


def drawn(rate, **seed):
    """Which of 500 documents a random rate keeps."""
    return {i for i in range(500) if column_reason({"id": str(i), "text": ""}, rate=rate, **seed) is None}


def test_the_random_rate_is_the_rate_and_a_smaller_one_keeps_a_subset():
    us = np.array([uniform(str(i)) for i in range(20_000)])
    assert abs((us < 0.3135).mean() - 0.3135) < 4 * (0.3135 * 0.6865 / 20_000) ** 0.5
    assert drawn(0.095) < drawn(0.3135)


def test_another_seed_draws_others():
    for seed in (42, 1):
        assert drawn(0.3135, seed=seed) == {i for i in range(500) if uniform(str(i), seed=seed) < 0.3135}
    assert drawn(0.3135, seed=42) == drawn(0.3135) != drawn(0.3135, seed=1)


# ----------------------------------------------------------------------------------------------------------------------
# a classifier of one's own

GOOD = "river mountain because therefore theorem history chapter between explain".split()
BAD = "click here buy cheap now free offer subscribe best".split()


def lines(n, seed=0, of_the_other=0.35):
    """(texts, labels) of two kinds, whose words are mixed: a third of each is of the other kind."""
    rng = random.Random(seed)
    texts, labels = [], []
    for i in range(n):
        label = i % 2
        kinds = (BAD, GOOD) if label else (GOOD, BAD)
        words = [rng.choice(kinds[rng.random() > of_the_other]) for _ in range(rng.randrange(3, 25))]
        texts.append(" ".join(words))
        labels.append(label)
    return texts, np.array(labels, np.float64)


def test_features_are_the_words_and_their_pairs_each_once():
    """Counted from the words, with Python's sets. 20 bits tell so few apart."""
    texts = ["a b a b c", "", "One, two.", "two one", "a"]
    keys, counts = features(texts)
    for text, own in zip(texts, np.split(keys, np.cumsum(counts)[:-1])):
        words = re.findall(r"\w+", text.lower())
        assert len(own) == len(set(words) | set(zip(words, words[1:])))
        assert own.tolist() == sorted(features([text])[0].tolist())
    # The words of "One, two." are those of "two one", its pair is not.
    assert len(set(features(["One, two."])[0]) & set(features(["two one"])[0])) == 2


def test_what_is_learnt_is_what_scikit_learn_finds():
    linear_model = pytest.importorskip("sklearn.linear_model")
    sparse = pytest.importorskip("scipy.sparse")
    texts, labels = lines(300)
    weights, bias = learn(texts, labels, decay=0.5)
    keys, counts = features(texts)
    values = np.repeat(1 / np.sqrt(counts), counts)
    seen, keys = np.unique(keys, return_inverse=True)
    matrix = sparse.csr_matrix((values, keys, [0, *np.cumsum(counts)]))
    theirs = linear_model.LogisticRegression(C=2, tol=1e-8, max_iter=1000).fit(matrix, labels)
    assert np.abs(theirs.coef_[0] - weights[seen]).max() < 1e-3 and np.abs(weights).max() > 1
    assert abs(theirs.intercept_[0] - bias) < 1e-3
    scores = Classifier(weights, bias, {}).scores(texts)
    np.testing.assert_allclose(scores, theirs.predict_proba(matrix)[:, 1], rtol=0, atol=1e-4)


def test_at_the_minimum_the_gradient_is_nothing():
    """The gradient in closed form: sum of (score - label) x + decay w = 0, and sum of (score - label) = 0."""
    texts, labels = lines(200)
    weights, bias = learn(texts, labels, decay=0.1)
    keys, counts = features(texts)
    wrong = Classifier(weights, bias, {}).scores(texts) - labels
    pull = np.bincount(keys, np.repeat(wrong / np.sqrt(counts), counts), 1 << BITS)
    assert np.abs(pull + 0.1 * weights).max() < 1e-3 < 0.1 * np.abs(weights).max()
    assert abs(wrong.sum()) < 1e-3


def test_the_score_of_a_text_is_its_own():
    texts, labels = lines(100)
    classifier = Classifier(*learn(texts, labels, 0.1), {})
    alone = [float(classifier.scores([text])[0]) for text in texts]
    assert classifier.scores(texts[::-1]).tolist() == alone[::-1]
    # Of a text without words nothing is known but how frequent the kinds are.
    assert classifier.scores(["", "..."]).tolist() == [1 / (1 + np.exp(-classifier.bias))] * 2


def test_the_roc_and_its_area_are_those_of_every_pair():
    """By definition: the share of pairs of one of each kind in which that of kind 1 has the higher score; ties half."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 150).astype(np.float64)
    scores = np.round(rng.normal(labels), 1)
    ones, zeros = scores[labels == 1], scores[labels == 0]
    pairs = np.sign(ones[:, None] - zeros)
    thresholds, wrong, right = roc(scores, labels)
    assert area(wrong, right) == pytest.approx((1 + pairs.mean()) / 2, abs=1e-12)
    for threshold, x, y in zip(thresholds, wrong, right):
        assert (x, y) == ((zeros >= threshold).mean(), (ones >= threshold).mean())


@pytest.mark.parametrize("zeros, ones", [(20, 60), (60, 20)])
def test_the_standard_error_of_an_area_is_its_spread(zeros, ones):
    """For exponential scores the formula of Hanley and McNeil is exact: against 2,000 draws, +- 1.6 %."""
    rng = np.random.default_rng(0)
    low, high = rng.exponential(1, (2000, zeros, 1)), rng.exponential(5, (2000, 1, ones))
    areas = (high > low).mean((1, 2))
    assert areas.std() == pytest.approx(standard_error(5 / 6, zeros, ones), rel=0.05)


def write_labelled(path, texts, labels, names=("spam", "prose")):
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(dict(text=text, label=names[int(label)])) + "\n" for text, label in zip(texts, labels))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The command on 600 lines: (folder, what it said, the lines)."""
    folder = tmp_path_factory.mktemp("classifier")
    texts, labels = lines(600)
    write_labelled(folder / "lines.jsonl", texts, labels)
    args = f"--train={folder / 'lines.jsonl'}", "--positive=prose", f"--out={folder / 'c.npz'}"
    done = script("corpus.quality", *args)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, texts, labels


def test_the_command_holds_lines_out_and_draws_their_roc(trained):
    """AUC by scikit-learn, on the fifth of the lines that the hashes of their texts choose."""
    metrics = pytest.importorskip("sklearn.metrics")
    folder, said, texts, labels = trained
    held = np.array([dedup.fingerprint(text) / 2**64 < 0.2 for text in texts])
    classifier = Classifier.load(folder / "c.npz")
    scores = classifier.scores([text for text, out in zip(texts, held) if out])
    auc = metrics.roc_auc_score(labels[held], scores)
    assert f"{held.sum()} lines held out, {int(labels[held].sum())} of them 'prose': AUC {auc:.3f} +- " in said
    assert 0.8 < auc < 1 and classifier.about["auc"] == pytest.approx(auc, abs=1e-12)
    assert (folder / "c.png").stat().st_size > 5_000
    # What was held out was not learnt from.
    learnt = learn([text for text, out in zip(texts, held) if not out], labels[~held], 0.1)
    assert (learnt[0] == classifier.weights).all()
    row = next(line.split() for line in said.splitlines() if line.split()[:1] == ["33%"])
    best = scores >= np.quantile(scores, 1 - 0.33)
    assert float(row[2].rstrip("%")) == pytest.approx(100 * best[labels[held] == 1].mean(), abs=0.06)


def test_documents_are_scored_a_line_each(trained, tmp_path):
    (tmp_path / "a.txt").write_text("buy cheap\nnow")
    done = script("corpus.quality", tmp_path / "a.txt", f"--out={trained[0] / 'c.npz'}")
    score, = Classifier.load(trained[0] / "c.npz").scores(["buy cheap now"])
    assert done.stdout == f"{score:.4f} a.txt  buy cheap now\n" and score < 0.2


def kept_by(tmp_path, records, *args):
    """The texts that prepare.py keeps of these documents."""
    with open(tmp_path / "d.jsonl", "w", encoding="utf-8") as f:
        f.writelines(json.dumps(record) + "\n" for record in records)
    done = script("prepare.py", tmp_path / "d.jsonl", f"--out={tmp_path / 'out'}", "--tokenizer=byte", "--dedup=False",
                  *args)
    assert done.returncode == 0, done.stderr
    with gzip.open(tmp_path / "out" / "removed.jsonl.gz", "rt") as removed:
        gone = {row["id"]: row["reason"] for row in map(json.loads, removed)}
    return {i: gone.get(f"d.jsonl:{i}") for i in range(len(records))}


def test_prepare_keeps_the_top_share_of_each_language_by_a_classifier(trained, tmp_path):
    """The share by numpy's quantile; an empty document is removed as such."""
    texts, _ = lines(120, seed=1)
    records = [dict(text=text, lang=("de", "fr")[i % 3 == 0]) for i, text in enumerate(texts)]
    path = trained[0] / "c.npz"
    fates = kept_by(tmp_path, [*records, dict(text=" ", lang="it")], f"--score_field={path}", "--keep_top=0.25")
    scores = Classifier.load(path).scores(texts)
    assert fates.pop(120) == "empty"
    for language in ("de", "fr"):
        mine = [i for i in range(120) if records[i]["lang"] == language]
        threshold = -np.quantile(-scores[mine], 0.25, method="inverted_cdf")
        assert {i: fates[i] for i in mine} == {i: None if scores[i] >= threshold else "score" for i in mine}


def test_prepare_removes_what_a_classifier_puts_above(trained, tmp_path):
    texts, _ = lines(60, seed=2)
    path = trained[0] / "c.npz"
    fates = kept_by(tmp_path, [dict(text=text) for text in texts], f"--max_field={path}", "--max_value=0.6")
    scores = Classifier.load(path).scores(texts)
    assert fates == {i: None if score < 0.6 else "above" for i, score in enumerate(scores)}
    assert set(fates.values()) == {None, "above"}
    # The report says what it was learnt from.
    run = json.loads((tmp_path / "out" / "report.json").read_text())["run"]
    assert run["classifiers"][str(path)]["sha256"] == sha256(trained[0] / "lines.jsonl")


@pytest.mark.parametrize("name, args, says", [
    ("corpus.quality", [], "name labelled lines"),
    ("corpus.quality", ["--train=lines.jsonl", "--out=b.npz"], "0 of 600 lines have label '1'"),
    ("corpus.quality", ["--train=lines.jsonl", "--out=c.npz", "--positive=prose"], "is there already"),
    ("corpus.quality", ["--train=lines.jsonl", "--out=b", "--positive=prose"], "is a file.npz"),
    ("corpus.quality", ["--train=lines.jsonl", "--out=b.npz", "--label_field=kind"], "no column kind"),
    ("corpus.quality", ["--train=nulls.jsonl", "--out=b.npz"], "line 1 is no text"),
    ("corpus.quality", ["lines.jsonl", "--out=b.npz"], "there is no classifier"),
    ("corpus.quality", ["lines.jsonl", "--out=lines.jsonl"], "is damaged, or no classifier"),
    ("corpus.quality", ["lines.jsonl", "--out=torn.npz"], "is damaged, or no classifier"),
    ("prepare.py", ["lines.jsonl", "--score_field=b.npz", "--out=out"], "there is no classifier"),
    ("prepare.py", ["lines.jsonl", "--max_field=c.npz", "--out=out"], "want --max_value"),
])
def test_what_cannot_be_learnt_or_used_is_one_line(trained, name, args, says):
    folder = trained[0]
    (folder / "nulls.jsonl").write_text('{"text": null, "label": 1}\n')
    (folder / "torn.npz").write_bytes((folder / "c.npz").read_bytes()[:-9])
    there = {path.name for path in folder.iterdir()}
    args = [re.sub(r"^(--(train|out|score_field|max_field)=)?(\S+\.(jsonl|npz)|b|out)$",
                   lambda m: (m[1] or "") + str(folder / m[3]), arg) for arg in args]
    done = script(name, *args)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr, done.stderr
    # prepare.py goes on from out.tmp.
    assert {path.name for path in folder.iterdir()} <= there | {"out.tmp"}


def test_exact_duplicates_are_equal_up_to_unicode_form_and_white_space():
    assert text_key("e\u0301t\u00e9  a\n") == text_key("\u00e9te\u0301 a") != text_key("\u00e9t\u00e9 A")


def sets(similarity, size, seed):
    """Two sets of random hashes with that Jaccard similarity, to within rounding."""
    both = int(size * 2 * similarity / (1 + similarity))
    ids = np.random.default_rng(seed).integers(0, 2**63, 2 * size - both, dtype=np.uint64)
    return ids[:size], ids[size - both:]


@pytest.mark.parametrize("s", [0.2, 0.5, 0.8])
def test_signatures_agree_as_often_as_the_sets_are_similar(s):
    agree = [np.mean(minhash_numpy(a) == minhash_numpy(b)) for a, b in (sets(s, 300, seed) for seed in range(60))]
    assert abs(np.mean(agree) - s) < 4 * (s * (1 - s) / (112 * 60)) ** 0.5


@pytest.mark.parametrize("s", [0.6, 0.75, 0.85])
def test_near_duplicates_are_found_as_often_as_the_formula_says(s):
    found = []
    for seed in range(150):
        near = NearDuplicates()
        assert (near.bands, near.rows) == (14, 8)                                 # FineWeb's
        a, b = sets(s, 200, seed)
        found.append(near.add(minhash_numpy(a)) or near.add(minhash_numpy(b)))
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


def test_many_texts_at_once_have_the_words_and_signatures_that_each_has_alone(backend):
    rng = random.Random(1)
    texts = [" ".join(f"w{rng.randrange(99)}" for _ in range(n)) for n in (0, 1, 4, 5, 6, 300, 2, 0, 40)]
    texts += ["\u201cquoted\u201d", CHINESE, THAI * 9, "ends in \u2014", "", "..."]
    for some in (texts, texts[::-1], texts[5:6], texts[7:8] + texts):
        ids, ends = dedup.words(some)
        alone = [dedup.word_ids(text) for text in some]
        assert ids.tolist() == [i for one in alone for i in one.tolist()]
        assert ends.tolist() == np.cumsum([len(one) for one in alone]).tolist()
        for text, own, signature in zip(some, alone, dedup.signatures(ids, ends)):
            want = minhash_numpy(shingles(own)) if backend == "numpy" else minhash(text)
            assert (signature == want).all()


def shingles(ids):
    """The hash of each run of 5 words, or of all where there are fewer, one by one."""
    runs = [ids[i:i + 5] for i in range(max(len(ids) - 4, 1))]
    return np.array([ngrams(run, len(run))[0] for run in runs if len(run)], np.uint64)


def test_ngrams_are_equal_where_the_runs_are():
    ids = np.random.default_rng(0).integers(0, 3, 2000)
    hashes, n = ngrams(ids, 8).tolist(), 8
    runs = [tuple(ids[i:i + n]) for i in range(len(ids) - n + 1)]
    assert len(hashes) == len(runs) and len(set(hashes)) == len(set(runs)) == len(set(zip(hashes, runs)))
    assert len(ngrams(ids[:8], 8)) == 1 and len(ngrams(ids[:7], 8)) == 0


def test_contamination_is_half_of_the_prompt_in_runs_of_five():
    def encode(text):
        return [int(w) for w in text.split()]
    rng = random.Random(0)
    prompts = [[rng.randrange(10**6) for _ in range(n)] for n in (8, 20, 33, 60)]
    check = Contamination([" ".join(map(str, p)) for p in prompts] + ["1 2 3"], encode)
    assert check.short == 1
    outcomes = set()
    for trial in range(300):
        prompt = rng.choice(prompts)
        length = rng.randint(1, len(prompt))
        at = rng.randint(0, len(prompt) - length)
        doc = [rng.randrange(10**6, 10**7) for _ in range(400)]
        place = rng.randrange(400)
        doc[place:place] = prompt[at:at + length]
        if trial % 3 == 0 and length > 12:
            doc[place + 10] = -1                                                  # one word changed
        blocks = SequenceMatcher(None, doc, prompt, autojunk=False).get_matching_blocks()  # over the whole document
        eight = any(b.size >= 8 for b in blocks)
        want = eight and 2 * sum(b.size for b in blocks if b.size >= 5) >= len(prompt)
        assert (check.check(" ".join(map(str, doc))) is not None) == want
        outcomes.add(want)
    assert outcomes == {True, False}


@pytest.mark.parametrize("runs, want", [
    # A run of 4 does not count, one of 5 does.
    ([(0, 8), (8, 12)], False), ([(0, 8), (8, 13)], True),
    # Also before the 8 that were found.
    ([(0, 5), (5, 13)], True), ([(0, 4), (4, 12)], False),
    # In another order; less than half, and half.
    ([(12, 20), (0, 5)], False), ([(0, 9)], False), ([(0, 10)], True)])
def test_runs_of_five_count_wherever_they_stand_in_the_order_of_the_prompt(runs, want):
    def encode(text):
        return [int.from_bytes(word.encode(), "big") for word in text.split()]
    prompt = [f"p{i}" for i in range(20)]
    check = Contamination([" ".join(prompt)], encode)
    parts = [" ".join(prompt[a:b]) for a, b in runs]
    assert (check.check("x1 x2 x3 " + " y1 y2 ".join(parts) + " z1 z2") is not None) == want


def test_a_prompt_of_exactly_eight_words_is_found():
    """The official code misses it by one."""
    check = Contamination(["How many legs does a healthy spider have?"])
    assert check.check("Quiz! HOW many legs does a healthy spider have... Eight.") == 0
    assert check.check("How many legs does a healthy insect have?") is None
    with pytest.raises(ValueError, match="has 8 tokens"):
        Contamination(["too short"])


def run(module, *args):
    """python -m MODULE ARGS, in a process of its own."""
    command = [sys.executable, "-m", module, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_the_command_of_the_first_screen(tmp_path):
    text = " ".join(f"word{i}" for i in range(50))
    docs = [text, text, text + " more", "How many legs does a healthy spider have? Eight.", "else"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in docs))
    (tmp_path / "p.txt").write_text("How many legs does a healthy spider have?\n")
    out = run("corpus.dedup", tmp_path / "d.jsonl", f"--prompts={tmp_path / 'p.txt'}").stdout
    assert out.startswith("{'kept': 2, 'duplicate': 1, 'near-duplicate': 1, 'contaminated': 1}")


def test_a_prompt_may_hold_a_number_sign(tmp_path):
    """It begins a comment only in lists of hosts and agents."""
    prompts = ["Is C# an open standard, and of which body?", "# 7 is what in hexadecimal?"]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    assert dedup.read_prompts(str(tmp_path / "p.txt")) == prompts


@pytest.mark.parametrize("line", ['{"messages": 3}', '{"text": 3}', "[1]", "no JSON"])
def test_a_line_without_a_text_is_told_in_one_line(tmp_path, line):
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    done = run("corpus.dedup", tmp_path / "d.jsonl")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith("d.jsonl, line 2: want a JSON object with a text")


def test_word_hashes_are_equal_where_the_words_are():
    """The words are those of Python's re."""
    text = ("Die K\u00fcche, die KU\u0308CHE \u201cquoted\u201d \u00abTexte\u00bb a_b x-y 3.14\tnew\nline, "
            "the THE The; \u2014 caf\u00e9caf\u00e9 "
            # Full-width: 12, the THE: 12!
            "\uff11\uff12\uff0c \uff54\uff48\uff45 \uff34\uff28\uff25\uff1a \uff11\uff12\uff01 ") * 3
    words, ids = re.findall(r"[\w\u0308]+", text.lower()), dedup.word_ids(text).tolist()
    assert len(words) == len(ids)
    assert len(set(words)) == len(set(ids)) == len(set(zip(words, ids)))


def test_what_is_a_duplicate_does_not_change_between_versions():
    """The numbers are those of the first corpora: another numpy that draws otherwise would show here too."""
    ids = dedup.word_ids("All human beings are born free and equal in dignity and rights.")
    signature = minhash_numpy(ngrams(ids, 5)).tolist()
    assert signature[:3] + signature[-2:] == [607687889, 166314809, 85959605, 253404593, 535919191]


def test_the_order_of_its_letters_counts_in_a_word_and_punctuation_is_none():
    assert dedup.word_ids("abba")[0] != dedup.word_ids("baab")[0]
    assert len(dedup.word_ids("")) == len(dedup.word_ids(" .,")) == 0


@pytest.mark.parametrize("text", [
    f"{CHINESE}\u5728\u5c0a\u4e25\u3002",
    THAI + "\u0e17\u0e31\u0e49\u0e07\u0e2b\u0e25\u0e32\u0e22\u0e40\u0e01\u0e34\u0e14\u0e21\u0e32\u0e21\u0e35"
    "\u0e2d\u0e34\u0e2a\u0e23\u0e30"])
def test_a_script_without_spaces_is_taken_by_character(text):
    ids = dedup.word_ids(text * 2)
    assert len(ids) == 2 * sum(c not in "\u3002\uff0c" for c in text) and ids[0] == ids[1] != ids[2]
    assert (ids[:len(ids) // 2] == ids[len(ids) // 2:]).all()


def test_a_text_in_pieces_has_the_same_key_as_whole():
    rng = random.Random(0)
    text = "".join(rng.choice(["a", "b\u0301", "\u00e9", " ", "\n\n", "\u3000"]) for _ in range(5000))
    whole = text_key(text)
    assert "".join(dedup.pieces(text, 100)) == text
    piecewise, dedup.pieces = dedup.pieces, lambda text: piecewise(text, 100)
    try:
        assert text_key(text) == whole == text_key("  " + text.replace(" ", " \t") + "\n")
    finally:
        dedup.pieces = piecewise


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
