"""memorize.py: measures against brute force, data against the stream, the protocol on a model that surely recites."""
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
import tokenizer
from studies import kit, memorize
from conftest import script
from engine import plot
from generate import generate
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig


def read_json(path):
    return json.load(open(path))


def load_ids(folder, split="train"):
    """The only shard of a split of a data folder."""
    return np.load(os.path.join(folder, f"{split}_00000.npy"), allow_pickle=False)


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
    starts = itertools.product(range(len(a)), range(len(b)))
    return max(len(os.path.commonprefix([a[i:], b[j:]])) for i, j in starts)


@pytest.mark.parametrize("seed", range(20))
def test_longest_span_is_that_of_every_pair_of_places(seed):
    rng = random.Random(seed)
    a, b = ([rng.randrange(2 + seed) for _ in range(60)] for _ in "ab")
    assert memorize.longest_span(a, b) == slow_span(a, b)


def test_rouge_l_is_the_f1_of_its_definition():
    assert memorize.rouge_l([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert memorize.rouge_l([1, 2], [3, 4]) == memorize.rouge_l([], [1]) == 0
    assert memorize.rouge_l([1, 9, 2], [1, 2, 3, 4]) == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))


def test_rouge_l_is_that_of_googles_package():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    rng = random.Random(0)
    for _ in range(20):
        a, b = ([rng.randrange(30) for _ in range(rng.randrange(1, 80))] for _ in "ab")
        generated, truth = (" ".join(map(str, ids)) for ids in (a, b))
        assert memorize.rouge_l(a, b) == pytest.approx(scorer.score(truth, generated)["rougeL"].fmeasure)


def test_type_token_ratio_and_common_start():
    assert memorize.type_token_ratio([5, 5, 5, 6]) == 0.5
    assert memorize.common_start([1, 2, 9, 4], [1, 2, 3, 4]) == memorize.common_start([1, 2], [1, 2]) == 2


class Reciter(Apertus):
    """Knows one passage by heart: asked by BOS and a piece of it, it gives what follows, whatever the weights say."""

    def learn(self, passage):
        self.passage = passage
        return self

    def generate(self, prompts, n, **how):
        def answer(bos, piece):
            for end in range(len(piece), len(self.passage)):
                if bos == 1 and self.passage[:end][-len(piece):] == piece:
                    return self.passage[end : end + n]
            return [0] * n

        return torch.tensor([prompt + answer(prompt[0], prompt[1:]) for prompt in prompts.tolist()])


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(64, 320, n).tolist()


CONFIG = ApertusConfig(
    block_size=64, vocab_size=320, n_layer=1, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=48, init_std=0.3)


@pytest.fixture(scope="module")
def model():
    return Reciter(CONFIG).eval()


@pytest.mark.parametrize("offset", [0, 7])
def test_the_protocol_scores_one_for_a_passage_known_by_heart_and_nothing_for_others(model, monkeypatch, offset):
    """Five passages in batches of two. The reciter answers to BOS and the tokens from the offset on alone."""
    monkeypatch.setattr(memorize, "batch", 2)
    monkeypatch.setattr(memorize, "generate", lambda model, *args, **how: model.generate(*args, **how))
    passages = [tokens(67, seed) for seed in range(5)]
    found = memorize.recall(model.learn(passages[3]), passages, 1, offset, 20, 40)
    assert [r["rouge"] for r in found] == [0, 0, 0, 1, 0]
    assert [r["span"] for r in found] == [r["start"] for r in found] == [0, 0, 0, 40, 0]
    truth = passages[3][offset + 20 : offset + 60]
    assert found[3]["ttr"] == found[3]["truth_ttr"] == len(set(truth)) / 40
    assert found[0]["ttr"] == 1 / 40


@pytest.mark.parametrize("nucleus", [False, True])
def test_continuations_are_greedy_or_from_the_nucleus_of_nine_tenths_at_temperature_one(nucleus):
    """Against the model asked directly, and the passages' own next tokens. The seed decides samples, and only those."""
    real, passages = Apertus(CONFIG).eval(), [tokens(40, seed) for seed in range(3)]
    how = dict(temperature=0)
    if nucleus:
        how = dict(temperature=1.0, top_p=0.9, generator=torch.Generator().manual_seed(5))
    new = generate(real, torch.tensor([[1, *p[2:12]] for p in passages]), 20, **how)[:, 11:].tolist()
    found, again, other_seed = (
        memorize.recall(real, passages, 1, 2, 10, 20, nucleus, seed=seed) for seed in (5, 5, 6))
    for row, generated, passage in zip(found, new, passages, strict=True):
        pair = generated, passage[12:32]
        assert row["ttr"] == len(set(generated)) / 20 and row["rouge"] == memorize.rouge_l(*pair)
        assert row["start"] == memorize.common_start(*pair) and row["span"] == memorize.longest_span(*pair)
    assert again == found and (other_seed != found) == nucleus


@pytest.mark.parametrize("offset, prefix, suffix, says", [
    (0, 30, 40, "do not fit into the model's window of 64"), (30, 20, 20, "need 70")])
def test_probes_longer_than_the_context_are_told(model, offset, prefix, suffix, says):
    with pytest.raises(ValueError, match=says):
        memorize.recall(model, [tokens(69)], 1, offset, prefix, suffix)


def test_teacher_forced_accuracy_is_that_of_the_model_called_label_by_label():
    """The model half knows the passages: its own greedy words, every third token exchanged. The mask sees all of it."""
    real, prefix, mask = Apertus(CONFIG).eval(), 12, (4, 13, "product")
    passages, want = [], np.zeros(4, dtype=int)
    for seed in range(4):
        said = generate(real, [[1, 70 + seed]], 58, temperature=0)[0][1:]
        p = [x if i % 3 else (x + 17) % 320 for i, x in enumerate(said)]
        passages.append(p)
        keep = goldfish_mask(torch.tensor(p), *mask).tolist()
        for i in range(prefix, len(p)):
            with torch.no_grad():
                logits, _ = real(torch.tensor([[1, *p[:i]]]))
            right = logits[0, -1].argmax().item() == p[i]
            want += [right and keep[i], keep[i], right and not keep[i], not keep[i]]
    found = memorize.forced(real, passages, 1, prefix, mask)
    assert found == want.tolist()
    right_kept, kept, right_dropped, dropped = found
    assert kept + dropped == sum(len(p) - prefix for p in passages)
    assert 0 < right_kept < kept and 0 < right_dropped < dropped
    assert right_kept / kept != right_dropped / dropped


def test_a_cell_has_means_and_the_worst_and_best_passage():
    rows = [dict(rouge=r, span=n, said=[n]) for r, n in ((0.25, 1), (1.0, 2), (0.5, 30))]
    want = dict(model="m", prefix=5, n=3, rouge=0.5833, span=11, rouge_min=0.25, rouge_max=1.0, said=[1])
    assert memorize.cell(rows, model="m", prefix=5) == want


# -----------------------------------------------------------------------------
# the small models' data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("memorize") / "data")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(tokenizer="byte", background=20_000, n_passages=2).items():
            patch.setattr(memorize, name, value)
        memorize.make_data(folder, 7, 256, 150)
    return folder


def read_probes(folder):
    return read_json(os.path.join(folder, "probes.json"))


def test_passages_stand_in_the_stream_as_often_as_their_bucket_says(data):
    """Each copy is a document, and an exact one stands nowhere else."""
    stream = load_ids(data)
    text = stream.tobytes()
    for p in read_probes(data):
        edited = p["repetitions"] == "edited"
        copies = [stream[b : b + 150] for b in p["begins"]]
        assert len(copies) == (128 if edited else p["repetitions"])
        assert all(stream[b - 1] == 1 and stream[b + 150] == 2 for b in p["begins"])
        same = np.mean([(c == p["ids"]).mean() for c in copies]) if copies else 1.0
        assert 0.93 < same < 0.97 if edited else same == 1.0
        if not edited:
            assert text.count(np.array(p["ids"], np.uint16).tobytes()) == p["repetitions"]


def test_a_repeated_passage_loses_the_same_labels_wherever_it_is_cut(data):
    """On the stream, after the passage's first h - 1 labels."""
    keep = goldfish_mask(torch.from_numpy(load_ids(data).astype(np.int64)), 10, 13)
    for p in read_probes(data):
        if p["repetitions"] == 128:
            assert len({tuple(keep[b + 12 : b + 150].tolist()) for b in p["begins"]}) == 1


def split_documents(folder, split, tok):
    """[(begin of its text in the stream, text)] of the documents of a split."""
    ids = load_ids(folder, split)
    begins = np.flatnonzero(ids == tok.bos).tolist()
    ends = [*begins[1:], len(ids)]
    assert all(ids[end - 1] == tok.eos for end in begins[1:])
    return [(a + 1, tok.decode(ids[a + 1 : b - 1].tolist())) for a, b in zip(begins, ends)]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """
    Data of two books whose every paragraph says where it is from, at both window lengths.

    A paragraph has some 630 characters, so two are a document of at least 900, and no two words are the same. Returns
    the second book, and {T: (meta, probes, splits)}, the splits as in split_documents.
    """
    root = tmp_path_factory.mktemp("planted")
    for book in "ab":
        words = [[f"{book.upper()}{90 * i + j:05}" for j in range(90)] for i in range(220)]
        paragraphs = (" ".join([f"{book}{i:04}", *some]) for i, some in enumerate(words))
        (root / f"{book}.txt").write_text("\n\n".join(paragraphs))
    tok, found, books = tokenizer.load("byte"), {}, [str(root / "a.txt"), str(root / "b.txt")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(paths=books, tokenizer="byte", background=60_000, n_passages=4).items():
            patch.setattr(memorize, name, value)
        for T, passage in ((256, 150), (512, 300)):
            folder = str(root / str(T))
            memorize.make_data(folder, 7, T, passage)
            splits = {split: split_documents(folder, split, tok) for split in ("train", "val")}
            found[T] = read_json(os.path.join(folder, "meta.json")), read_probes(folder), splits
    return (root / "b.txt").read_text(), found


def background_of(probes, documents):
    copies = {b for p in probes for b in p["begins"]}
    return [text for begin, text in documents if begin not in copies]


@pytest.mark.parametrize("T, n, budget", [(256, 4, 60_000), (512, 3, 42_000)])
def test_the_background_is_read_once_and_holds_no_passage_and_no_validation(planted, T, n, budget):
    """Every paragraph begins with its mark. The last 40 % of the last book are the passages'."""
    _, probes, splits = planted[1][T]
    assert [p["repetitions"] for p in probes] == [b for b in (0, 1, 4, 16, 64, 128, "edited") for _ in range(n)]
    train = background_of(probes, splits["train"])
    val = [text for _, text in splits["val"]]
    marks = [re.findall(r"\b[ab]\d{4}(?= )", text.replace("\n", " ")) for text in (*train, *val)]
    seen = sum(marks, [])
    assert len(set(seen)) == len(seen) and all(marks)
    assert {mark[0] for mark in seen} == {"a", "b"} and max(seen) <= "b0132"
    assert sum(len(text.encode()) + 2 for text in train) == pytest.approx(budget, abs=1200)
    assert [m[0] for m in marks] != sorted(m[0] for m in marks)  # They are shuffled.


@pytest.mark.parametrize("T", [256, 512])
def test_meta_json_counts_documents_tokens_and_bytes(planted, T):
    meta, _, splits = planted[1][T]
    for split, documents in splits.items():
        counts = meta["sources"]["memorize"][split]
        n, size = len(documents), sum(len(text.encode()) for _, text in documents)
        assert (counts["documents"], counts["bytes"], counts["tokens"]) == (n, size, size + 2 * n)


@pytest.mark.parametrize("T, length", [(256, 150), (512, 300)])
def test_passages_do_not_overlap_and_come_from_the_last_40_percent_of_the_last_book(planted, T, length):
    book, (_, probes, _) = planted[0], planted[1][T]
    places = sorted(book.index(tokenizer.load("byte").decode(p["ids"])) for p in probes)
    assert all(b - a >= length for a, b in itertools.pairwise(places))
    assert places[0] >= int(0.6 * len(book)) and places[-1] > 0.9 * len(book)


def test_copies_are_spread_over_the_stream(planted):
    """Of 128 copies some 64 stand in its first half, give or take five standard deviations."""
    _, probes, splits = planted[1][256]
    end, _ = splits["train"][-1]
    for p in probes:
        if p["repetitions"] in (128, "edited"):
            assert len(p["begins"]) == 128
            assert sum(b < end / 2 for b in p["begins"]) in range(40, 89)


def test_each_edit_is_a_fresh_one(planted):
    """A token drawn from the passages' book is the same one again in about one case of ten."""
    _, probes, splits = planted[1][256]
    stream, edits = dict(splits["train"]), []
    for p in probes:
        text = tokenizer.load("byte").decode(p["ids"])
        for copy in (stream[b] for b in p["begins"] if p["repetitions"] == "edited"):
            edits.append(tuple(i for i, (x, y) in enumerate(zip(text, copy, strict=True)) if x != y))
    assert np.mean([len(places) / 150 for places in edits]) == pytest.approx(0.05 * 0.9, abs=0.0035)
    assert len(set(edits)) > 0.9 * len(edits)


def flags_for(folder, name, tokens):
    """The flags of a small model for data of so many tokens."""
    meta = dict(sources=dict(memorize=dict(train=dict(tokens=tokens))))
    (folder / "meta.json").write_text(json.dumps(meta))
    return memorize.flags_of(name, 13, str(folder))


@pytest.mark.parametrize("name, k, h, hash, scope, T", [
    ("none", 0, 13, "product", None, 256), ("none-512", 0, 50, "mix", None, 512),
    ("k10", 10, 13, "product", "window", 256), ("k4", 4, 13, "product", "window", 256),
    ("k50-stream", 50, 50, "mix", "stream", 512), ("k50-window", 50, 50, "mix", "window", 512)])
def test_the_six_models_are_trained_with_the_masks_that_are_measured(tmp_path, name, k, h, hash, scope, T):
    """By the docstring: k, h, hash, scope; one pass, a tenth or 40 steps of warm-up, three tenths of decay."""
    flags, model = flags_for(tmp_path, name, 2048 * 100 + 5), memorize.MODELS[name]
    assert (flags["goldfish_k"], flags.get("goldfish_scope"), flags["block_size"]) == (k, scope, T)
    assert model["mask"] == (k or model["mask"][0], h, hash)
    if k:
        assert (flags["goldfish_h"], flags.get("goldfish_hash", "product")) == (h, hash)
    size = flags["batch_size"]
    assert size * T == 2048 and flags["micro_batch"] == size
    # Validated at the end alone, so that the seconds are those of training.
    assert flags["eval_every"] > flags["total_samples"] // size
    assert [flags[f"{key}_samples"] // size for key in ("total", "warmup", "decay")] == [100, 10, 30]
    assert (flags["seed"], flags["lr"], flags["lr_floor"], flags["optimizer"]) == (13, 3e-3, 3e-5, "adamw")
    assert h - 1 <= memorize.PREFIX and memorize.PREFIX + model["suffix"] <= model["passage"] < T
    shape = {name: flags[name] for name in ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_dim")}
    with torch.device("meta"):
        small = Apertus(ApertusConfig(vocab_size=2048, tie_embeddings=False, **shape))
    assert round(small.num_params() / 1e6, 2) == 1.25
    assert flags_for(tmp_path, name, 2048 * 1000 + 5)["warmup_samples"] == 40 * size


@pytest.mark.parametrize("args, says", [
    (["--init_from=out/x"], "go together"), (["--models=none k7"], "no small model 'k7'"),
    (["/nowhere.txt", "--models=none"], "no text in"),
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
    """Two probes that repeat one token are left out, also after a varied prompt."""
    run, file = tmp_path / "run", tmp_path / "probes.json"
    flags = dict(data=data, out=run, total_samples=16, warmup_samples=0, decay_samples=0, dtype="float32")
    done = script("train.py", "configs/tiny.py", *kit.flags(flags), "--checkpoint_every=2")
    assert done.returncode == 0, done.stderr
    dull = [70] * 150, [*range(64, 84), *[70] * 130]
    probes = [p for p in read_probes(data) if p["repetitions"] in (0, 128)]
    file.write_text(json.dumps(probes + [dict(repetitions=0, ids=ids) for ids in dull]))
    asked = ["--prefixes=(10, 20)", "--offsets=(0, 5)", "--suffix=30", "--min_ttr=0.1"]
    done = script("studies.memorize", f"--init_from={run}", f"--probes={file}", *asked)
    assert done.returncode == 0, done.stderr
    assert "2 probes with a type-token ratio" in done.stdout
    rows = kit.read_rows(run / "memorize" / "rows.jsonl")
    assert len(rows) == 2 * 2 * 2 * 2 and {r["kind"] for r in rows} == {"greedy", "nucleus"}
    assert all(0 <= r["rouge"] <= 1 and r["n"] == 2 for r in rows) and os.path.exists(run / "memorize" / "maps.png")


def test_the_probes_that_prepare_plants_are_read_and_stand_in_the_data(tmp_path):
    """With another vocabulary the probes' text counts, and not their ids."""
    rng = random.Random(0)
    passages = [" ".join(f"w{rng.randrange(10**6)}" for _ in range(60)) for _ in range(4)]
    kit.write_rows(tmp_path / "passages.jsonl", [dict(text=p) for p in passages])
    files = [tmp_path / f"{i}.txt" for i in range(12)]
    for i, file in enumerate(files):
        file.write_text(f"The text number {i} speaks of nothing at all, and says so in many words. " * 40)
    flags = dict(out=tmp_path / "own", tokenizer="byte", val_share=0.2, probes=tmp_path / "passages.jsonl")
    done = script("prepare.py", *files, *kit.flags(flags), "--repetitions=(0, 2)")
    assert done.returncode == 0, done.stderr
    probes, tok = str(tmp_path / "own" / "probes.json"), tokenizer.load("byte")
    buckets = memorize.read_probes(probes, tok)
    assert list(buckets) == [0, 2]
    assert sorted(buckets[0] + buckets[2]) == sorted(tok.encode(p) for p in passages)
    other = tokenizer.load("apertus:300")
    assert all(other.decode(ids) in passages for ids in memorize.read_probes(probes, other)[2])


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """
    Two models of two seeds with a learning rate of zero, killed when the third was to be trained, and started again.

    train.py runs in this process, which spares imports of torch. Returns the folder, the two lists of what was trained,
    and the rows that the killed study left.
    """
    root = tmp_path_factory.mktemp("study")
    words = [str(random.Random(i).randrange(10**4)) for i in range(4000)]
    (root / "book.txt").write_text(" ".join(word + " and\n\n" for word in words))
    shape = dict(n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=32)
    tiny = memorize.TRAIN | shape | dict(lr=0.0, lr_floor=0.0, compile=False)
    folders = dict(paths=[str(root / "book.txt")], out=str(root / "out"), runs=str(root / "runs"))
    small = dict(models="none k4", seeds=2, background=3000, n_passages=1, REPETITIONS=(0, 128), TRAIN=tiny)
    trained, run = [], subprocess.run

    def in_process(command, **how):
        if command[0] != sys.executable:  # A compiler, or matplotlib that looks for fonts.
            return run(command, **how)
        trained.append(next(arg for arg in command if arg.startswith("--out=")))
        if killed_at == len(trained):
            return types.SimpleNamespace(returncode=137)
        done = script("train.py", *command[3:])
        how["stderr"].write(done.stderr)
        return types.SimpleNamespace(returncode=done.returncode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", in_process)
        for name, value in dict(folders, **small, tokenizer="byte", jobs=1).items():
            patch.setattr(memorize, name, value)
        killed_at = 3
        with pytest.raises(ValueError, match="ended with code 137"):
            memorize.main()
        before, left = list(trained), kit.read_rows(root / "out" / "rows.jsonl")
        trained.clear()
        killed_at = 0
        memorize.main()
        yield root, before, trained, left


def folder_of(root, name, seed=11):
    """The only run or data folder of a name and a seed."""
    (folder,) = glob.glob(str(root / "runs" / f"{name}-s{seed}-*"))
    return folder


def final_weights(folder):
    return {name: value.detach() for name, value in convert.load_run(folder)[0].named_parameters()}


def test_a_seed_draws_other_passages_another_order_and_other_weights(study):
    """With a learning rate of zero the last checkpoint holds the initial weights. The seed orders the windows too."""
    root = study[0]
    data = [folder_of(root, "data-256", seed) for seed in (11, 12)]
    one, other = ({tuple(p["ids"]) for p in read_probes(folder)} for folder in data)
    assert one != other
    assert not np.array_equal(*(load_ids(folder)[:2000] for folder in data))
    runs = [folder_of(root, "none", seed) for seed in (11, 12)]
    assert [read_json(os.path.join(run, "config.json"))["seed"] for run in runs] == [11, 12]
    none, other = map(final_weights, runs)
    drawn = [name for name, value in none.items() if value.ndim == 2]
    assert len(drawn) == 8 and not any(torch.equal(none[name], other[name]) for name in drawn)
    # Models of one seed differ in the mask alone.
    k4 = final_weights(folder_of(root, "k4"))
    assert all(torch.equal(none[name], k4[name]) for name in none)


def test_a_killed_study_keeps_what_it_found_and_goes_on(study):
    root, before, after, left = study
    found = kit.read_rows(root / "out" / "rows.jsonl")
    tested = [(r["model"], r["seed"]) for r in found if r["kind"] == "validation"]
    assert tested == [("none", 11), ("none", 12), ("k4", 11), ("k4", 12)]
    assert {(r["model"], r["seed"]) for r in left} == {("none", 11), ("k4", 11)} and all(row in found for row in left)
    assert not set(before[:2]) & set(after) and before[2] in after


def test_a_study_gives_every_measure_of_every_bucket_and_its_files(study):
    folder = study[0] / "out"
    rows = kit.read_rows(folder / "rows.jsonl")
    found = {(r["kind"], r["repetitions"]) for r in rows if r["kind"] != "validation"}
    kinds = ("greedy", "nucleus", "map", "first49", "forced")
    assert found == set(itertools.product(kinds, (0, 128, "edited")))
    assert "| k4 | 2 | 100 |" in (folder / "table.md").read_text() and os.path.exists(folder / "maps.png")


@pytest.fixture(scope="module")
def k4(study):
    """Of k4, seed 11: its rows, its checkpoint and vocabulary, its run folder and its data folder."""
    root = study[0]
    run, data = folder_of(root, "k4"), folder_of(root, "data-256")
    rows = [r for r in kit.read_rows(root / "out" / "rows.jsonl") if (r["model"], r["seed"]) == ("k4", 11)]
    model, tok = convert.load_run(run)
    return rows, model.eval(), tok, run, data


def test_the_validation_of_a_small_model_is_that_of_its_log(k4):
    rows, _, _, run, _ = k4
    last = kit.read_rows(os.path.join(run, "log.jsonl"))[-1]
    for key in ("val_loss", "val_bpb", "tokens"):
        assert rows[0][key] == round(last[key], 4)


# Kind, prefix and suffix of what a small model is asked in every bucket.
ASKED = [("greedy", 50, 100), ("nucleus", 50, 100), ("first49", 12, 37), *(("map", n, 50) for n in (12, 25, 50, 100))]


@pytest.mark.parametrize("bucket", [0, 128, "edited"])
def test_what_is_measured_of_a_small_model_is_what_its_checkpoint_says(k4, bucket):
    """The rows against the checkpoint asked again, and against windows of the stream counted one by one."""
    rows, model, tok, _, data = k4
    probes = [p for p in read_probes(data) if p["repetitions"] == bucket]
    ids = [p["ids"] for p in probes]
    here = {(r["kind"], r.get("prefix")): r for r in rows[1:] if r["repetitions"] == bucket}
    for kind, prefix, suffix in ASKED:
        row = here[kind, prefix]
        found = memorize.recall(model, ids, tok.bos, 0, prefix, suffix, kind == "nucleus", 11)
        assert row["rouge"] == round(np.mean([r["rouge"] for r in found]), 4), kind
        assert (row["suffix"], row["offset"], row["n"]) == (suffix, 0, len(probes))
    told = here["forced", None]
    right_kept, kept, right_dropped, dropped = memorize.forced(model, ids, tok.bos, 50, (4, 13, "product"))
    assert (told["keep"], told["drop"]) == (kept, dropped)
    assert (told["acc_keep"], told["acc_drop"]) == (round(right_kept / kept, 4), round(right_dropped / dropped, 4))
    windows = (len(load_ids(data)) - 1) // 256 + 1
    never_dropped = {w * 256 + 1 + i for w in range(windows) for i in range(12)}
    begins = [b for p in probes for b in p["begins"]]
    anyway = sum(b + i in never_dropped for b in begins for i in range(50, 150)) / (len(probes) * 100)
    assert told["trained_anyway"] == round(anyway, 2) and (anyway > 0) == (bucket != 0)


def test_without_a_mask_no_label_is_trained_anyway(study):
    rows = kit.read_rows(study[0] / "out" / "rows.jsonl")
    assert {r["trained_anyway"] for r in rows if r["model"] == "none" and r["kind"] == "forced"} == {0}


def rows_by_hand():
    """Two models of two seeds, which differ from one another by 0.02 and 0.04."""
    rows = []
    for name, base, loss, step in (("none", 0.8, 3.0, 0.02), ("k10", 0.2, 3.5, 0.04)):
        for seed, more in ((11, 0.0), (12, step)):
            who = dict(model=name, seed=seed)
            cost = dict(seconds=60 + 600 * more, tokens=5)
            rows.append(dict(who, kind="validation", val_loss=loss + more, val_bpb=1.0, **cost))
            for bucket, factor in ((0, 0.5), (128, 1.0), ("edited", 0.9)):
                at = dict(who, repetitions=bucket)
                rest = dict(offset=0, n=8, span=40 * factor, ttr=0.5, truth_ttr=0.75)
                for (kind, prefix, suffix), worth in zip(ASKED[:3], (1.0, 0.5, 0.25)):
                    rouge = (base + more) * factor * worth
                    rows.append(dict(at, kind=kind, prefix=prefix, suffix=suffix, rouge=rouge, **rest))
                right = dict(acc_keep=0.9, keep=10, acc_drop=base * factor, drop=3)
                rows.append(dict(at, kind="forced", **right, trained_anyway=6 * factor))
    return rows


def test_the_table_says_what_the_rows_say():
    """Numbers by hand: of two values that differ by d, half of the interval is t(1) d / 2, and t(1) = 12.7062."""
    lines = memorize.table_md(rows_by_hand()).splitlines()
    a, b = (12.7062 * d / 2 for d in (0.02, 0.04))
    assert f"| none | 2 | 100 | 0.41 ± {a / 2:.2f} | 0.81 ± {a:.2f} | 0.73 ± {a * 0.9:.2f} |" in lines
    assert f"| k10 | 2 | 37 | 0.03 ± {b / 8:.2f} | 0.06 ± {b / 4:.2f} | 0.05 ± {b * 0.225:.2f} |" in lines
    (told,) = [line for line in lines if line.startswith("| k10 | 40 ")]
    assert told == ("| k10 | 40 ± 0 of 100 | 0.50 ± 0.00 (0.75 ± 0.00) | 0.90 ± 0.00 | 0.20 ± 0.00 (6) "
                    f"| 0.10 ± 0.00 | 6.0 ± 0.0 | 3.520 ± {b:.3f} | 1.2 |")
    (pair,) = [line for line in lines if " - " in line and line.startswith("|")]
    assert pair == f"| k10 - none | 2 | -0.59 ± {a:.2f} | -0.53 ± {a * 0.9:.2f} | 0.510 ± {a:.3f} |"


def test_each_map_is_that_of_its_model(monkeypatch):
    """Lines for 0, 128 and edited. Seeds differ by 0.02 or 0.04: their mean is half of that above the first."""
    drawn = []
    monkeypatch.setattr(plot, "finish", lambda figure, picture: drawn.append(figure))
    memorize.draw_maps(rows_by_hand(), "")
    for axis, name, known in zip(drawn[0].axes, ("none", "k10"), (0.81, 0.22)):
        assert axis.get_title() == name
        (image,) = axis.images
        assert image.get_array().ravel().tolist() == pytest.approx([known * 0.5, known, known * 0.9])
    plot.pyplot().close(drawn[0])


def test_another_setting_is_never_taken_for_finished_work(study, monkeypatch):
    root = study[0]
    monkeypatch.setattr(memorize, "runs", str(root / "runs"))
    flags = dict(lr=0.1, seed=11)
    assert memorize.folder_of("none", 11, flags) == memorize.folder_of("none", 11, dict(seed=11, lr=0.1))
    assert memorize.folder_of("none", 11, flags) != memorize.folder_of("none", 11, dict(flags, lr=0.2))


def test_new_rows_replace_those_of_their_model_and_seed_alone():
    old, new = dict(model="k4", seed=1, n=0), dict(model="k4", seed=1, n=3)
    other_model, other_seed = dict(model="none", seed=2, n=1), dict(model="k4", seed=2, n=2)
    assert memorize.merged([old, other_model, other_seed], [new]) == [other_model, new, other_seed]


def test_intervals_are_students_over_the_seeds():
    """t(4, 95 %) = 2.776 and t(1, 95 %) = 12.706, as printed in tables."""
    assert kit.interval([]) == "" and kit.interval([0.5]) == "0.50"
    assert kit.interval([1.0, 2.0], 3) == f"1.500 ± {12.7062 * 0.5:.3f}"
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert kit.interval(values, 3) == f"3.000 ± {2.776445 * math.sqrt(2.5 / 5):.3f}"
    ours, theirs = [[dict(seed=s, x=10 * s + d) for s in range(1, 4)] for d in (0.5, 0.25)]
    paired = kit.differences(ours, theirs[::-1], lambda row: row["x"])
    assert kit.interval(paired, 3) == "0.250 ± 0.000"  # What a seed does to both says nothing.
