"""memorize.py: its measures against brute force and closed cases, its data against the stream, the protocol on a model that recites by construction."""
import difflib
import glob
import json
import math
import os
import random
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import convert
import memorize
from conftest import ROOT, script
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


@pytest.mark.parametrize("seed", range(20))
def test_longest_span_is_that_of_difflib(seed):
    rng = random.Random(seed)
    a, b = ([rng.randrange(2 + seed) for _ in range(60)] for _ in "ab")
    assert memorize.longest_span(a, b) == difflib.SequenceMatcher(None, a, b, autojunk=False).find_longest_match().size


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
    """Knows one passage by heart: after BOS + its first tokens it gives the next, whatever the weights say."""

    def learn(self, passage):
        self.passage = passage
        return self

    def generate(self, prompts, n, **how):
        at = prompts.shape[1] - 1
        return torch.cat((prompts, torch.tensor([self.passage[at:at + n]] * len(prompts))), dim=1)


@pytest.fixture(scope="module")
def model():
    return Reciter(ApertusConfig(block_size=64, vocab_size=320, n_layer=1, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=48, init_std=0.02)).eval()


def test_the_protocol_scores_one_for_a_passage_known_by_heart_and_little_for_another(model):
    known, other = [list(np.random.default_rng(s).integers(64, 320, 60)) for s in (0, 1)]
    known, other = [int(x) for x in known], [int(x) for x in other]
    a, b = memorize.recall(model.learn(known), [known, other], 1, 0, 20, 40)
    assert a["rouge"] == 1 and a["span"] == a["start"] == 40 and b["rouge"] < 0.3 and b["start"] <= 2


@pytest.mark.parametrize("offset, prefix, suffix, says", [(0, 30, 40, "do not fit into the model's window of 64"), (30, 20, 20, "need 70")])
def test_probes_longer_than_the_context_are_told(model, offset, prefix, suffix, says):
    with pytest.raises(ValueError, match=says):
        memorize.recall(model, [list(range(64, 132 if says[0] == "d" else 124))], 1, offset, prefix, suffix)


def test_teacher_forced_accuracy_counts_each_label_after_the_prefix_once(model):
    passages = [np.random.default_rng(s).integers(64, 320, 60).tolist() for s in range(3)]
    right_kept, kept, right_dropped, dropped = memorize.forced(model, passages, 1, 12, (4, 13, "product"))
    masks = [goldfish_mask(torch.tensor(p), 4, 13)[12:] for p in passages]
    assert (kept, dropped) == (sum(int(m.sum()) for m in masks), sum(int((~m).sum()) for m in masks)) and kept + dropped == 3 * 48
    assert 0 <= right_kept <= kept and 0 <= right_dropped <= dropped


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


@pytest.mark.parametrize("args, says", [
    (["--init_from=out/x"], "go together"), (["--models=none k7"], "no small model 'k7'"), (["/nowhere.txt", "--models=none"], "no text in"),
    (["--report", "--out=/nowhere"], "run memorize.py first")])
def test_what_cannot_work_is_told_in_one_line(tmp_path, args, says):
    done = script("memorize.py", f"--out={tmp_path / 'out'}", f"--runs={tmp_path / 'runs'}", *args)
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
    (tmp_path / "probes.json").write_text(json.dumps(probes + [dict(repetitions=0, ids=[70] * 150)]))
    done = script("memorize.py", f"--init_from={run}", f"--probes={tmp_path / 'probes.json'}", "--prefixes=(10, 20)", "--offsets=(0, 5)", "--suffix=30", "--min_ttr=0.1")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in open(run / "memorize" / "rows.jsonl")]
    assert len(rows) == 2 * 2 * 2 * 2 and {r["kind"] for r in rows} == {"greedy", "nucleus"} and "1 probes with a type-token ratio" in done.stdout
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
        done = script("train.py", *command[2:])
        how["stderr"].write(done.stderr)
        return types.SimpleNamespace(returncode=done.returncode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", in_process)
        for name, value in settings.items():
            patch.setattr(memorize, name, value)
        killed_at = 3
        with pytest.raises(ValueError, match="ended with code 137"):
            memorize.main()
        before, left = list(trained), memorize.read_rows(root / "out" / "rows.jsonl")
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
    found = memorize.read_rows(root / "out" / "rows.jsonl")
    assert [(r["model"], r["seed"]) for r in found if r["kind"] == "validation"] == [("none", 11), ("none", 12), ("k4", 11), ("k4", 12)]
    assert {(r["model"], r["seed"]) for r in left} == {("none", 11), ("k4", 11)} and all(row in found for row in left)
    assert not set(before[:2]) & set(after) and before[2] in after


def test_a_study_gives_every_measure_of_every_bucket_and_its_files(study):
    root = study[0]
    found = {(r["kind"], r["repetitions"]) for r in memorize.read_rows(root / "out" / "rows.jsonl") if r["kind"] != "validation"}
    assert found == {(k, b) for k in ("greedy", "nucleus", "map", "first49", "forced") for b in (0, 128, "edited")}
    assert "| k4 | 2 | 100 |" in (root / "out" / "table.md").read_text() and os.path.exists(root / "out" / "maps.png")


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
    assert memorize.interval([]) == "" and memorize.interval([0.5]) == "0.50"
    assert memorize.interval([1.0, 2.0], 3) == f"1.500 ± {12.7062 * 0.5:.3f}"
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert memorize.interval(values, 3) == f"3.000 ± {2.776445 * math.sqrt(2.5 / 5):.3f}"
    ours, theirs = [[dict(seed=s, x=10 * s + d) for s in range(1, 4)] for d in (0.5, 0.25)]
    assert memorize.paired(ours, theirs[::-1], "x", 3) == "0.250 ± 0.000"   # what a seed does to both says nothing


@pytest.mark.skipif(not os.path.exists(os.path.join(COMMITTED, "rows.jsonl")), reason="no committed results")
def test_the_committed_table_is_what_the_committed_rows_give():
    rows = [json.loads(line) for line in open(os.path.join(COMMITTED, "rows.jsonl"))]
    assert memorize.table_md(rows) == open(os.path.join(COMMITTED, "table.md")).read()
