"""memorize.py: its measures against brute force and closed cases, its data against the stream, the protocol on a model that recites by construction."""
import glob
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import convert
from studies import kit, memorize
from conftest import ROOT, script
from generate import generate
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig

COMMITTED = os.path.join(ROOT, "results", "memorize")


def slow_lcs(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@pytest.mark.parametrize("seed", range(20))
def test_lcs_is_the_textbook_one(seed):
    rng = random.Random(seed)
    a, b = ([rng.randrange(1 + seed) for _ in range(rng.randrange(90))] for _ in "ab")
    assert memorize.lcs(a, b) == memorize.lcs(b, a) == slow_lcs(a, b)


def slow_span(a, b):
    runs = [0]
    for i, j in itertools.product(range(len(a)), range(len(b))):
        runs.append(next((n for n, (x, y) in enumerate(zip(a[i:], b[j:])) if x != y), min(len(a) - i, len(b) - j)))
    return max(runs)


@pytest.mark.parametrize("seed", range(20))
def test_longest_span_is_that_of_every_pair_of_places(seed):
    rng = random.Random(seed)
    a, b = ([rng.randrange(2 + seed) for _ in range(60)] for _ in "ab")
    assert memorize.longest_span(a, b) == slow_span(a, b)


def test_rouge_l_is_the_f1_of_its_definition():
    assert memorize.rouge_l([1, 2, 3, 4], [1, 2, 3, 4]) == 1 and memorize.rouge_l([1, 2], [3, 4]) == 0 and memorize.rouge_l([], [1]) == 0
    assert memorize.rouge_l([1, 9, 2], [1, 2, 3, 4]) == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))


def test_rouge_l_is_that_of_googles_package():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    rng = random.Random(0)
    for _ in range(20):
        a, b = ([rng.randrange(30) for _ in range(rng.randrange(1, 80))] for _ in "ab")
        assert memorize.rouge_l(a, b) == pytest.approx(scorer.score(" ".join(map(str, b)), " ".join(map(str, a)))["rougeL"].fmeasure)


def test_type_token_ratio_and_common_start():
    assert memorize.type_token_ratio([5, 5, 5, 6]) == 0.5 and memorize.common_start([1, 2, 9, 4], [1, 2, 3, 4]) == 2 and memorize.common_start([1, 2], [1, 2]) == 2


class Reciter(Apertus):
    """Knows one passage by heart: where BOS and a piece of it are the prompt, it gives what follows, whatever the weights say."""

    def learn(self, passage):
        self.passage = passage
        return self

    def generate(self, prompts, n, **how):
        rows = []
        for bos, *piece in prompts.tolist():
            ends = [i for i in range(len(piece), len(self.passage)) if bos == 1 and self.passage[i - len(piece):i] == piece]
            rows.append([bos, *piece, *(self.passage[ends[0]:ends[0] + n] if ends else [0] * n)])
        return torch.tensor(rows)


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(64, 320, n).tolist()


CONFIG = ApertusConfig(block_size=64, vocab_size=320, n_layer=1, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=48, init_std=0.3)


@pytest.fixture(scope="module")
def model():
    return Reciter(CONFIG).eval()


@pytest.mark.parametrize("offset", [0, 7])
def test_the_protocol_scores_one_for_a_passage_known_by_heart_and_nothing_for_others(model, monkeypatch, offset):
    """Five passages in batches of two. The reciter answers to BOS and the very tokens from the offset on, and to nothing else."""
    monkeypatch.setattr(memorize, "batch", 2)
    monkeypatch.setattr(memorize, "generate", lambda model, *args, **how: model.generate(*args, **how))
    passages = [tokens(67, seed) for seed in range(5)]
    found = memorize.recall(model.learn(passages[3]), passages, 1, offset, 20, 40)
    assert [r["rouge"] for r in found] == [0, 0, 0, 1, 0] and [r["span"] for r in found] == [r["start"] for r in found] == [0, 0, 0, 40, 0]
    truth = passages[3][offset + 20:offset + 60]
    assert found[3]["ttr"] == found[3]["truth_ttr"] == len(set(truth)) / 40 and found[0]["ttr"] == 1 / 40


@pytest.mark.parametrize("nucleus", [False, True])
def test_continuations_are_greedy_or_from_the_nucleus_of_nine_tenths_at_temperature_one(nucleus):
    """Against the model asked directly; what is compared is the passages' own next tokens."""
    real, passages = Apertus(CONFIG).eval(), [tokens(40, seed) for seed in range(3)]
    how = dict(temperature=1.0, top_p=0.9, generator=torch.Generator().manual_seed(5)) if nucleus else dict(temperature=0)
    new = generate(real, torch.tensor([[1, *p[2:12]] for p in passages]), 20, **how)[:, 11:].tolist()
    found = memorize.recall(real, passages, 1, 2, 10, 20, nucleus, seed=5)
    for row, g, p in zip(found, new, passages, strict=True):
        assert row["ttr"] == len(set(g)) / 20 and row["rouge"] == memorize.rouge_l(g, p[12:32])
        assert row["start"] == memorize.common_start(g, p[12:32]) and row["span"] == memorize.longest_span(g, p[12:32])
    again = [memorize.recall(real, passages, 1, 2, 10, 20, nucleus, seed=seed) for seed in (5, 6)]
    assert again[0] == found and (again[1] != found) == nucleus             # the seed decides samples, and only those


@pytest.mark.parametrize("offset, prefix, suffix, says", [(0, 30, 40, "do not fit into the model's window of 64"), (30, 20, 20, "need 70")])
def test_probes_longer_than_the_context_are_told(model, offset, prefix, suffix, says):
    with pytest.raises(ValueError, match=says):
        memorize.recall(model, [list(range(64, 132 if says[0] == "d" else 124))], 1, offset, prefix, suffix)


def test_teacher_forced_accuracy_is_that_of_the_model_called_label_by_label():
    """Passages that the model half knows: its own greedy words with every third token exchanged. The mask is that of the whole passage."""
    real, prefix, mask = Apertus(CONFIG).eval(), 12, (4, 13, "product")
    passages, want = [], np.zeros(4, dtype=int)
    for seed in range(4):
        p = generate(real, [[1, 70 + seed]], 58, temperature=0)[0][1:]
        p = [x if i % 3 else (x + 17) % 320 for i, x in enumerate(p)]
        passages.append(p)
        keep = goldfish_mask(torch.tensor(p), *mask).tolist()
        for i in range(prefix, len(p)):
            with torch.no_grad():
                right = real(torch.tensor([[1, *p[:i]]]))[0][0, -1].argmax().item() == p[i]
            want += [right and keep[i], keep[i], right and not keep[i], not keep[i]]
    found = memorize.forced(real, passages, 1, prefix, mask)
    assert found == want.tolist() and found[1] + found[3] == sum(len(p) - prefix for p in passages)
    assert 0 < found[0] < found[1] and 0 < found[2] < found[3] and found[0] / found[1] != found[2] / found[3]


def test_a_cell_has_means_and_the_worst_and_best_passage():
    rows = [dict(rouge=r, span=n) for r, n in ((0.25, 1), (1.0, 2), (0.5, 30))]
    assert memorize.cell(rows, model="m", prefix=5) == dict(model="m", prefix=5, n=3, rouge=0.5833, span=11, rouge_min=0.25, rouge_max=1.0)


# -----------------------------------------------------------------------------
# the small models' data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("memorize") / "data")
    before = memorize.tokenizer, memorize.background, memorize.n_passages
    memorize.tokenizer, memorize.background, memorize.n_passages = "byte", 20_000, 2
    memorize.make_data(folder, 7, 256, 150)
    memorize.tokenizer, memorize.background, memorize.n_passages = before
    return folder


def test_passages_stand_in_the_stream_as_often_as_their_bucket_says(data):
    stream = np.load(os.path.join(data, "train_00000.npy"), allow_pickle=False)
    text = stream.tobytes()
    for p in json.load(open(os.path.join(data, "probes.json"))):
        copies = [stream[b:b + 150] for b in p["begins"]]
        assert len(copies) == (128 if p["repetitions"] == "edited" else p["repetitions"])
        assert all(stream[b - 1] == 1 and stream[b + 150] == 2 for b in p["begins"])               # each is a document
        same = np.mean([(c == p["ids"]).mean() for c in copies]) if copies else 1.0
        assert 0.93 < same < 0.97 if p["repetitions"] == "edited" else same == 1.0
        if p["repetitions"] != "edited":
            assert text.count(np.array(p["ids"], np.uint16).tobytes()) == p["repetitions"]         # and nowhere else


def test_a_repeated_passage_loses_the_same_labels_wherever_it_is_cut(data):      # after its first h - 1 labels, on the stream
    stream = torch.from_numpy(np.load(os.path.join(data, "train_00000.npy"), allow_pickle=False).astype(np.int64))
    keep = goldfish_mask(stream, 10, 13)
    for p in json.load(open(os.path.join(data, "probes.json"))):
        if p["repetitions"] == 128:
            assert len({tuple(keep[b + 12:b + 150].tolist()) for b in p["begins"]}) == 1


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """
    Data of two books whose every paragraph says where it is from, at both window lengths. Returns the second book, and for each length
    {T: (meta, probes, splits)}, the splits as lists of (begin in the stream, text).
    """
    import tokenizer
    root = tmp_path_factory.mktemp("planted")
    for book in "ab":
        # Paragraphs of some 630 characters, two to a document of at least 900, and no two words the same.
        paragraphs = [" ".join([f"{book}{i:04}", *(f"{book.upper()}{90 * i + j:05}" for j in range(90))]) for i in range(220)]
        (root / f"{book}.txt").write_text("\n\n".join(paragraphs))
    tok, found = tokenizer.load("byte"), {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(paths=[str(root / "a.txt"), str(root / "b.txt")], tokenizer="byte", background=60_000, n_passages=4).items():
            patch.setattr(memorize, name, value)
        for T, passage in ((256, 150), (512, 300)):
            folder = str(root / str(T))
            memorize.make_data(folder, 7, T, passage)
            splits = {}
            for split in ("train", "val"):
                ids = np.load(os.path.join(folder, f"{split}_00000.npy"), allow_pickle=False)
                begins = np.flatnonzero(ids == tok.bos).tolist() + [len(ids)]
                assert all(ids[b - 1] == tok.eos for b in begins[1:])
                splits[split] = [(a + 1, tok.decode(ids[a + 1:b - 1].tolist())) for a, b in zip(begins, begins[1:])]
            probes = json.load(open(os.path.join(folder, "probes.json")))
            found[T] = json.load(open(os.path.join(folder, "meta.json"))), probes, splits
    return (root / "b.txt").read_text(), found


def background_of(probes, documents):
    copies = {b for p in probes for b in p["begins"]}
    return [text for begin, text in documents if begin not in copies]


@pytest.mark.parametrize("T, n, budget", [(256, 4, 60_000), (512, 3, 42_000)])
def test_the_background_is_read_once_and_holds_no_passage_and_no_validation(planted, T, n, budget):
    book, (meta, probes, splits) = planted[0], planted[1][T]
    assert [p["repetitions"] for p in probes] == [b for b in (0, 1, 4, 16, 64, 128, "edited") for _ in range(n)]
    train, val = background_of(probes, splits["train"]), [text for _, text in splits["val"]]
    marks = [re.findall(r"\b[ab]\d{4}(?= )", text.replace("\n", " ")) for text in (*train, *val)]
    seen = sum(marks, [])
    assert len(set(seen)) == len(seen) and all(marks)                       # none twice, neither here nor there
    assert {m[0] for m in seen} == {"a", "b"} and max(m for m in seen) <= "b0132"      # the last 40 % of the last book are the passages'
    assert sum(len(text.encode()) + 2 for text in train) == pytest.approx(budget, abs=1200)
    assert [m[0] for m in marks] != sorted(m[0] for m in marks)             # shuffled
    everything = meta["sources"]["memorize"]
    for split in ("train", "val"):
        texts = [text for _, text in splits[split]]
        assert (everything[split]["documents"], everything[split]["tokens"]) == (len(texts), sum(len(t.encode()) + 2 for t in texts))
        assert everything[split]["bytes"] == sum(len(text.encode()) for text in texts)
    import tokenizer
    places = sorted(book.index(tokenizer.load("byte").decode(p["ids"])) for p in probes)
    length = 150 if T == 256 else 300
    assert all(b - a >= length for a, b in zip(places, places[1:]))         # no two passages overlap
    assert places[0] >= int(0.6 * len(book)) and places[-1] > 0.9 * len(book)


def test_copies_are_spread_over_the_stream_and_each_edit_is_a_fresh_one(planted):
    _, probes, splits = planted[1][256]
    stream = dict(splits["train"])
    end = max(stream)
    for p in (p for p in probes if p["repetitions"] in (128, "edited")):
        assert sum(b < end / 2 for b in p["begins"]) in range(40, 89) and len(p["begins"]) == 128      # five standard deviations
    import tokenizer
    tok = tokenizer.load("byte")
    shares, places = [], set()
    for p in probes:
        text = tok.decode(p["ids"])
        for b in p["begins"] if p["repetitions"] == "edited" else []:
            different = tuple(i for i, (x, y) in enumerate(zip(text, stream[b])) if x != y)
            assert len(stream[b]) == 150
            shares.append(len(different) / 150)
            places.add(different)
    # A token drawn from the passages' book is the same one again in about one case of ten.
    assert np.mean(shares) == pytest.approx(0.05 * 0.9, abs=0.0035) and len(places) > 0.9 * len(shares)


@pytest.mark.parametrize("name, k, h, hash, scope, T", [
    ("none", 0, 13, "product", None, 256), ("k10", 10, 13, "product", "window", 256), ("k4", 4, 13, "product", "window", 256),
    ("none-512", 0, 50, "mix", None, 512), ("k50-stream", 50, 50, "mix", "stream", 512), ("k50-window", 50, 50, "mix", "window", 512)])
def test_the_six_models_are_trained_with_the_masks_that_are_measured(tmp_path, name, k, h, hash, scope, T):
    """k, h, hash and scope of the docstring; one pass over the data, a tenth or 40 steps of warm-up, three tenths of decay."""
    (tmp_path / "meta.json").write_text(json.dumps(dict(sources=dict(memorize=dict(train=dict(tokens=2048 * 100 + 5))))))
    flags, model = memorize.flags_of(name, 13, str(tmp_path)), memorize.MODELS[name]
    assert (flags["goldfish_k"], flags.get("goldfish_scope"), flags["block_size"]) == (k, scope, T)
    assert model["mask"] == (k or model["mask"][0], h, hash) and (not k or flags["goldfish_h"] == h)
    assert not k or flags.get("goldfish_hash", "product") == hash
    assert flags["batch_size"] * T == 2048 and flags["micro_batch"] == flags["batch_size"]
    size = flags["batch_size"]
    assert [flags[f"{key}_samples"] // size for key in ("total", "warmup", "decay")] == [100, 10, 30]
    assert (flags["seed"], flags["lr"], flags["lr_floor"], flags["optimizer"]) == (13, 3e-3, 3e-5, "adamw")
    assert h - 1 <= memorize.PREFIX and memorize.PREFIX + model["suffix"] <= model["passage"] < T
    shape = {name: flags[name] for name in ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_dim")}
    with torch.device("meta"):
        small = Apertus(ApertusConfig(vocab_size=2048, tie_embeddings=False, **shape))
    assert round(small.num_params() / 1e6, 2) == 1.25
    (tmp_path / "meta.json").write_text(json.dumps(dict(sources=dict(memorize=dict(train=dict(tokens=2048 * 1000 + 5))))))
    assert memorize.flags_of(name, 13, str(tmp_path))["warmup_samples"] == 40 * size


@pytest.mark.parametrize("args, says", [
    (["--init_from=out/x"], "go together"), (["--models=none k7"], "no small model 'k7'"), (["/nowhere.txt", "--models=none"], "no text in"),
    (["--report", "--out=/nowhere"], "run studies/memorize.py first")])
def test_what_cannot_work_is_told_in_one_line(tmp_path, args, says):
    done = script("studies.memorize", f"--out={tmp_path / 'out'}", f"--runs={tmp_path / 'runs'}", *args)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("content, says", [('{"text": "x"}', "not probes"), ("no json", "not probes")])
def test_a_file_without_probes_is_told(tmp_path, content, says):
    (tmp_path / "probes.json").write_text(content)
    with pytest.raises(ValueError, match=says):
        memorize.read_probes(str(tmp_path / "probes.json"), None)


def test_the_protocol_runs_on_a_run_folder_with_probes_of_ones_own(tmp_path, data):
    run = tmp_path / "run"
    done = script("train.py", "configs/tiny.py", f"--data={data}", f"--out={run}", "--total_samples=16", "--warmup_samples=0", "--decay_samples=0", "--dtype=float32", "--checkpoint_every=2")
    assert done.returncode == 0, done.stderr
    probes = [dict(repetitions=p["repetitions"], ids=p["ids"]) for p in json.load(open(os.path.join(data, "probes.json"))) if p["repetitions"] in (0, 128)]
    (tmp_path / "probes.json").write_text(json.dumps(probes + [dict(repetitions=0, ids=ids) for ids in ([70] * 150, [*range(64, 84), *[70] * 130])]))
    done = script("studies.memorize", f"--init_from={run}", f"--probes={tmp_path / 'probes.json'}", "--prefixes=(10, 20)", "--offsets=(0, 5)", "--suffix=30", "--min_ttr=0.1")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in open(run / "memorize" / "rows.jsonl")]
    assert len(rows) == 2 * 2 * 2 * 2 and {r["kind"] for r in rows} == {"greedy", "nucleus"} and "2 probes with a type-token ratio" in done.stdout
    assert all(0 <= r["rouge"] <= 1 and r["n"] == 2 for r in rows) and os.path.exists(run / "memorize" / "maps.png")


def test_the_probes_that_prepare_plants_are_read_and_stand_in_the_data(tmp_path):
    passages = [" ".join(f"w{random.Random(i).randrange(10**6)}" for _ in range(60)) + f" number {i}" for i in range(4)]
    (tmp_path / "passages.jsonl").write_text("".join(json.dumps(dict(text=p)) + "\n" for p in passages))
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"The text number {i} speaks of nothing at all, and says so in many words. " * 40)
    done = script("prepare.py", *(tmp_path / f"{i}.txt" for i in range(12)), f"--out={tmp_path / 'own'}", "--tokenizer=byte", "--val_share=0.2",
                  f"--probes={tmp_path / 'passages.jsonl'}", "--repetitions=(0, 2)")
    assert done.returncode == 0, done.stderr
    import tokenizer
    tok = tokenizer.load("byte")
    buckets = memorize.read_probes(str(tmp_path / "own" / "probes.json"), tok)
    assert list(buckets) == [0, 2] and sorted(map(tuple, sum(buckets.values(), []))) == sorted(tuple(tok.encode(p)) for p in passages)
    other = tokenizer.load("apertus:300")                                    # another vocabulary: the text counts, not the ids
    assert all(other.decode(ids) in passages for ids in memorize.read_probes(str(tmp_path / "own" / "probes.json"), other)[2])


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """
    Two models of two seeds with a learning rate of zero, killed when the third was to be trained, and then the same command again.

    train.py runs in this process, which spares imports of torch. Returns the folder, the two lists of what was trained, and the rows that
    the killed study left.
    """
    root = tmp_path_factory.mktemp("study")
    words = [str(random.Random(i).randrange(10**4)) for i in range(4000)]
    (root / "book.txt").write_text(" ".join(word + " and\n\n" for word in words))
    tiny = dict(memorize.TRAIN, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=32, lr=0.0, lr_floor=0.0, compile=False)
    settings = dict(paths=[str(root / "book.txt")], out=str(root / "out"), runs=str(root / "runs"), tokenizer="byte", jobs=1,
                    models="none k4", seeds=2, background=3000, n_passages=1, REPETITIONS=(0, 128), TRAIN=tiny)
    trained, run = [], subprocess.run

    def in_process(command, **how):
        if command[0] != sys.executable:                                    # a compiler, or matplotlib that looks for fonts
            return run(command, **how)
        trained.append(next(arg for arg in command if arg.startswith("--out=")))
        if killed_at == len(trained):
            return types.SimpleNamespace(returncode=137)
        done = script("train.py", *command[3:])
        how["stderr"].write(done.stderr)
        return types.SimpleNamespace(returncode=done.returncode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", in_process)
        for name, value in settings.items():
            patch.setattr(memorize, name, value)
        killed_at = 3
        with pytest.raises(ValueError, match="ended with code 137"):
            memorize.main()
        before, left = list(trained), kit.read_rows(root / "out" / "rows.jsonl")
        trained.clear()
        killed_at = 0
        memorize.main()
        yield root, before, trained, left


def final_weights(folder):
    return {name: value.detach() for name, value in convert.load_run(folder)[0].named_parameters()}


def test_a_seed_draws_other_passages_another_order_and_other_weights(study):
    """At a learning rate of zero the last checkpoint holds the initial weights."""
    root = study[0]
    data = [glob.glob(str(root / "runs" / f"data-256-s{seed}-*"))[0] for seed in (11, 12)]
    passages = [{tuple(p["ids"]) for p in json.load(open(os.path.join(d, "probes.json")))} for d in data]
    assert passages[0] != passages[1]
    streams = [np.load(os.path.join(d, "train_00000.npy"), allow_pickle=False)[:2000] for d in data]
    assert not np.array_equal(*streams)
    none, other = [final_weights(glob.glob(str(root / "runs" / f"none-s{seed}-*"))[0]) for seed in (11, 12)]
    drawn = [name for name, value in none.items() if value.ndim == 2]
    assert len(drawn) == 8 and not any(torch.equal(none[name], other[name]) for name in drawn)
    k4 = final_weights(glob.glob(str(root / "runs" / "k4-s11-*"))[0])
    assert all(torch.equal(none[name], k4[name]) for name in none)          # the models of one seed differ in the mask alone
    steps = [json.load(open(glob.glob(str(root / "runs" / f"none-s{seed}-*" / "config.json"))[0]))["seed"] for seed in (11, 12)]
    assert steps == [11, 12]                                                # train.py's own order of windows


def test_a_killed_study_keeps_what_it_found_and_goes_on(study):
    root, before, after, left = study
    found = kit.read_rows(root / "out" / "rows.jsonl")
    assert [(r["model"], r["seed"]) for r in found if r["kind"] == "validation"] == [("none", 11), ("none", 12), ("k4", 11), ("k4", 12)]
    assert {(r["model"], r["seed"]) for r in left} == {("none", 11), ("k4", 11)} and all(row in found for row in left)
    assert not set(before[:2]) & set(after) and before[2] in after


def test_a_study_gives_every_measure_of_every_bucket_and_its_files(study):
    root = study[0]
    found = {(r["kind"], r["repetitions"]) for r in kit.read_rows(root / "out" / "rows.jsonl") if r["kind"] != "validation"}
    assert found == {(k, b) for k in ("greedy", "nucleus", "map", "first49", "forced") for b in (0, 128, "edited")}
    assert "| k4 | 2 | 100 |" in (root / "out" / "table.md").read_text() and os.path.exists(root / "out" / "maps.png")


def test_what_is_measured_of_a_small_model_is_what_its_checkpoint_says(study):
    """The rows of k4, seed 11, against its checkpoint asked again, its log, and windows of the stream counted one by one."""
    root = study[0]
    folder, data = (glob.glob(str(root / "runs" / f"{name}-s11-*"))[0] for name in ("k4", "data-256"))
    rows = [r for r in kit.read_rows(root / "out" / "rows.jsonl") if (r["model"], r["seed"]) == ("k4", 11)]
    log = [json.loads(line) for line in open(os.path.join(folder, "log.jsonl"))]
    assert rows[0]["val_loss"] == round(log[-1]["val_loss"], 4) and rows[0]["val_bpb"] == round(log[-1]["val_bpb"], 4)
    assert rows[0]["tokens"] == log[-1]["tokens"]
    real, tok = convert.load_run(folder)
    real.eval()
    probes = json.load(open(os.path.join(data, "probes.json")))
    stream = np.load(os.path.join(data, "train_00000.npy"), allow_pickle=False)
    never_dropped = {w * 256 + 1 + i for w in range((len(stream) - 1) // 256 + 1) for i in range(12)}
    for bucket in (0, 128, "edited"):
        mine = [p for p in probes if p["repetitions"] == bucket]
        ids = [p["ids"] for p in mine]
        here = {(r["kind"], r.get("prefix")): r for r in rows[1:] if r["repetitions"] == bucket}
        asked = {("greedy", 50): (50, 100, False), ("nucleus", 50): (50, 100, True), ("first49", 12): (12, 37, False)}
        asked |= {("map", prefix): (prefix, 50, False) for prefix in (12, 25, 50, 100)}
        for name, (prefix, suffix, nucleus) in asked.items():
            found = memorize.recall(real, ids, tok.bos, 0, prefix, suffix, nucleus, 11)
            assert here[name]["rouge"] == round(np.mean([r["rouge"] for r in found]), 4), name
            assert (here[name]["suffix"], here[name]["offset"], here[name]["n"]) == (suffix, 0, len(mine))
        told = here["forced", None]
        right_kept, kept, right_dropped, dropped = memorize.forced(real, ids, tok.bos, 50, (4, 13, "product"))
        assert (told["keep"], told["drop"]) == (kept, dropped)
        assert (told["acc_keep"], told["acc_drop"]) == (round(right_kept / kept, 4), round(right_dropped / dropped, 4))
        anyway = sum(b + i in never_dropped for p in mine for b in p["begins"] for i in range(50, 150)) / (len(mine) * 100)
        assert told["trained_anyway"] == round(anyway, 2) and (anyway > 0) == (bucket != 0)
    free = [r for r in kit.read_rows(root / "out" / "rows.jsonl") if r["model"] == "none" and r["kind"] == "forced"]
    assert all(r["trained_anyway"] == 0 for r in free)                      # no mask, nothing dropped


def test_the_table_says_what_the_rows_say():
    """Numbers by hand: two models of two seeds; t(1) = 12.7062."""
    rows = []
    for name, base, loss in (("none", 0.8, 3.0), ("k10", 0.2, 3.5)):
        for seed, more in ((11, 0.0), (12, 0.02 if name == "none" else 0.04)):
            who = dict(model=name, seed=seed)
            rows.append(dict(who, kind="validation", val_loss=loss + more, val_bpb=1.0, seconds=60 + 600 * more, tokens=5))
            for bucket, factor in ((0, 0.5), (128, 1.0), ("edited", 0.9)):
                at = dict(who, repetitions=bucket)
                for kind, prefix, suffix, worth in (("greedy", 50, 100, 1.0), ("nucleus", 50, 100, 0.5), ("first49", 12, 37, 0.25)):
                    rows.append(dict(at, kind=kind, prefix=prefix, suffix=suffix, offset=0, n=8, rouge=(base + more) * factor * worth,
                                     span=40 * factor, ttr=0.5, truth_ttr=0.75))
                rows.append(dict(at, kind="forced", acc_keep=0.9, keep=10, acc_drop=base * factor, drop=3, trained_anyway=6 * factor))
    lines = memorize.table_md(rows).splitlines()
    half = [12.7062 * d / 2 for d in (0.02, 0.04)]
    assert f"| none | 2 | 100 | 0.41 ± {half[0] / 2:.2f} | 0.81 ± {half[0]:.2f} | 0.73 ± {half[0] * 0.9:.2f} |" in lines
    assert f"| k10 | 2 | 37 | 0.03 ± {half[1] / 8:.2f} | 0.06 ± {half[1] / 4:.2f} | 0.05 ± {half[1] * 0.225:.2f} |" in lines
    (told,) = [line for line in lines if line.startswith("| k10 | 40 ")]
    assert told == (f"| k10 | 40 ± 0 of 100 | 0.50 ± 0.00 (0.75 ± 0.00) | 0.90 ± 0.00 | 0.20 ± 0.00 (6) | 0.10 ± 0.00 | 6.0 ± 0.0 | "
                    f"3.520 ± {half[1]:.3f} | 1.2 |")
    (pair,) = [line for line in lines if " - " in line and line.startswith("|")]
    assert pair == f"| k10 - none | 2 | -0.59 ± {half[0]:.2f} | -0.53 ± {half[0] * 0.9:.2f} | 0.510 ± {half[0]:.3f} |"


def test_another_setting_is_never_taken_for_finished_work(study, monkeypatch):
    root = study[0]
    monkeypatch.setattr(memorize, "runs", str(root / "runs"))
    flags = dict(lr=0.1, seed=11)
    assert memorize.folder_of("none", 11, flags) == memorize.folder_of("none", 11, dict(seed=11, lr=0.1))
    assert memorize.folder_of("none", 11, flags) != memorize.folder_of("none", 11, dict(flags, lr=0.2))


def test_new_rows_replace_those_of_their_model_and_seed_alone():
    row = [dict(model=m, seed=s, n=n) for m, s, n in (("k4", 1, 0), ("none", 2, 1), ("k4", 2, 2), ("k4", 1, 3))]
    assert memorize.merged(row[:3], row[3:]) == [row[1], row[3], row[2]]


def test_intervals_are_students_over_the_seeds():
    """t(4, 95 %) = 2.776 and t(1, 95 %) = 12.706, as printed in tables."""
    assert kit.interval([]) == "" and kit.interval([0.5]) == "0.50"
    assert kit.interval([1.0, 2.0], 3) == f"1.500 ± {12.7062 * 0.5:.3f}"
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert kit.interval(values, 3) == f"3.000 ± {2.776445 * math.sqrt(2.5 / 5):.3f}"
    ours, theirs = [[dict(seed=s, x=10 * s + d) for s in range(1, 4)] for d in (0.5, 0.25)]
    paired = kit.differences(ours, theirs[::-1], lambda row: row["x"])
    assert kit.interval(paired, 3) == "0.250 ± 0.000"                       # what a seed does to both says nothing


@pytest.mark.skipif(not os.path.exists(os.path.join(COMMITTED, "rows.jsonl")), reason="no committed results")
def test_the_committed_table_is_what_the_committed_rows_give():
    rows = [json.loads(line) for line in open(os.path.join(COMMITTED, "rows.jsonl"))]
    assert memorize.table_md(rows) == open(os.path.join(COMMITTED, "table.md")).read()
