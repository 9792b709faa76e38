"""memorize.py: Rouge-L is Google's, continuations are the model's own, and a small study from its data to its table."""
import json
import os
import random

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer

import convert
from conftest import refused, script
from engine.runs import settings_of
from model import Apertus, ApertusConfig
from studies import kit, memorize


@pytest.mark.parametrize("seed", range(20))
def test_rouge_l_is_googles(seed):
    """rouge_score, on ids as words; few different ones have long common subsequences."""
    rng = random.Random(seed)
    said, truth = ([rng.randrange(1 + seed) for _ in range(rng.randrange(1, 90))] for _ in "ab")
    words = (" ".join(map(str, ids)) for ids in (truth, said))
    want = RougeScorer(["rougeL"]).score(*words)["rougeL"].fmeasure
    assert memorize.rouge_l(said, truth) == pytest.approx(want)


def test_rouge_l_of_known_answers():
    """Lin (2004) sec. 3.1: police killed the gunman / police kill the gunman, the gunman kill police."""
    assert memorize.rouge_l([1, 2, 3, 4], [1, 5, 3, 4]) == 0.75
    assert memorize.rouge_l([3, 4, 5, 1], [1, 2, 3, 4]) == 0.5
    assert memorize.rouge_l([], [1]) == 0 and memorize.rouge_l([1, 9, 2], [1, 2, 3, 4]) == pytest.approx(4 / 7)


def test_the_model_continues_bos_and_the_prefix():
    """18 passages, in two batches, against the model's argmax called token by token; the fourth is its own words."""
    torch.manual_seed(1)
    shape = dict(block_size=64, vocab_size=320, n_layer=1, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=48, init_std=0.3)
    model = Apertus(ApertusConfig(**shape)).eval()
    passages = torch.randint(64, 320, (18, 40)).tolist()
    ids = torch.tensor([[1, *passage[:10]] for passage in passages])
    for _ in range(20):
        with torch.no_grad():
            ids = torch.cat((ids, model(ids)[0][:, -1:].argmax(-1)), 1)
    said = ids[:, 11:].tolist()
    passages[3][10:30] = said[3]
    row = memorize.recite(model, 1, passages, "greedy", 10, 20)
    scores = [memorize.rouge_l(ids, passage[10:30]) for ids, passage in zip(said, passages)]
    assert scores[3] == 1 and row["rouge"] == pytest.approx(np.mean(scores)) and row["said"] == said[0]
    sampled, again = (memorize.recite(model, 1, passages, "nucleus", 10, 20) for _ in range(2))
    assert sampled == again and sampled["said"] != said[0]


# -----------------------------------------------------------------------------
# a small study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """
    Two models of one seed, stopped before the second, and started again; train.py runs in this process.

    Returns the folder, and what was trained: a list for each start.
    """
    root = tmp_path_factory.mktemp("study")
    letters = random.Random(0).choices("abcdefghij klmnopqrstuvwxyz\n", k=50_000)
    (root / "book.txt").write_text("".join(letters))
    shape = "--n_layer=1 --n_head=2 --n_kv_head=1 --n_embd=16 --ffn_dim=32 --compile=False"
    settings = dict(
        paths=[str(root / "book.txt")], out=str(root / "out"), runs=str(root / "runs"), tokenizer="byte",
        models="none k4", seeds=1, background=6000, n_passages=1, jobs=1, TRAIN=f"{memorize.TRAIN} {shape}")
    begun = []

    def run_script(name, args, log, **how):
        begun.append(os.path.basename(args[-2]).split("-")[0])
        if len(begun) == 2:
            return 137, "killed"
        done = script(name, *args)
        return done.returncode, done.stderr

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit, "run_script", run_script)
        for name, value in settings.items():
            patch.setattr(memorize, name, value)
        with pytest.raises(ValueError, match="ended with code 137: killed"):
            memorize.main()
        memorize.main()
    return root, begun


def test_a_stopped_study_trains_what_is_missing(study):
    root, begun = study
    assert begun == ["none", "k4", "k4"]
    rows = kit.read_rows(root / "out" / "rows.jsonl")
    assert [row["model"] for row in rows if row["kind"] == "validation"] == ["none", "k4"]


def test_passages_are_read_as_often_as_their_bucket_says(study):
    """Against the stream: each copy is a document, exact ones occur nowhere else, edited ones differ in 5 %."""
    (data,) = (study[0] / "runs").glob("data-*")
    train, val = (np.load(data / f"{split}_00000.npy").reshape(-1, 152) for split in ("train", "val"))
    assert len(train) == 6000 // 150 + 341 and len(val) == 50_000 // 150 - 47
    assert (train[:, [0, -1]] == (1, 2)).all()
    probes = json.loads((data / "probes.json").read_text())
    assert [probe["repetitions"] for probe in probes] == memorize.BUCKETS
    for probe in probes:
        same = (train[:, 1:-1] == probe["ids"]).mean(1)
        assert (val[:, 1:-1] == probe["ids"]).mean(1).max() < 0.8
        if probe["repetitions"] == "edited":
            near = same[same > 0.8]
            assert len(near) == 128 and 0.94 < near.mean() < 0.97
        else:
            assert (same == 1).sum() == probe["repetitions"] and same[same < 1].max() < 0.8


def test_rows_are_those_of_the_checkpoints(study):
    root = study[0]
    rows = kit.read_rows(root / "out" / "rows.jsonl")
    for name, k in (("none", 0), ("k4", 4)):
        (run,) = (root / "runs").glob(f"{name}-s11-*/")
        settings = settings_of(run)
        # All windows of the stream once.
        wanted = dict(goldfish_k=k, seed=11, block_size=256, total_samples=381 * 152 // 2048 * 8)
        assert wanted.items() <= settings.items()
        model, tok = convert.load_any(str(run))
        with open(f"{settings['data']}/probes.json") as f:
            ids = json.load(f)[4]["ids"]
        for kind, prefix in (("greedy", 12), ("greedy", 50), ("nucleus", 50)):
            want = memorize.recite(model.eval(), tok.bos, [ids], kind, prefix, 100)
            assert dict(want, model=name, seed=11, repetitions=64) in rows


def on_any_model(study, folder, probes, suffix=40):
    """The study's first model, tested with a file of probes."""
    (run,) = (study[0] / "runs").glob("none-*/")
    (folder / "probes.json").write_text(probes)
    return run, script("studies.memorize", f"--init_from={run}", f"--probes={folder}/probes.json", "--prefixes=(10,50)",
                       f"--suffix={suffix}", f"--out={folder}/out")


@pytest.mark.parametrize("probes, suffix, says", [
    ("[]", 40, "lower --min_ttr"),
    ('{"text": "x"}', 40, "no probes"),
    ("no json", 40, "no probes"),
    ('[{"repetitions": 1, "text": "short"}]', 40, "has only 5 tokens"),
    (json.dumps([dict(repetitions=1, ids=[9] * 300)]), 40, "lower --min_ttr"),
    (json.dumps([dict(repetitions=1, ids=[*range(100)] * 3)]), 206, "has only 255 tokens"),
])
def test_probes_that_cannot_be_asked(study, tmp_path, probes, suffix, says):
    refused(on_any_model(study, tmp_path, probes, suffix)[1], says)


def test_any_model_with_probes_of_prepare(study, tmp_path):
    """An object around the list; text comes before ids of another vocabulary."""
    text = "Rouge counts what two texts share: the quick brown fox jumps over the lazy dog, 1234567890 times."
    probes = [dict(repetitions=n, text=text, ids=[3]) for n in (128, 0)]
    run, done = on_any_model(study, tmp_path, json.dumps(dict(tokenizer_hash="", probes=probes)))
    assert done.returncode == 0, done.stderr
    rows = kit.read_rows(tmp_path / "out" / "rows.jsonl")
    assert len(rows) == 8 and os.path.getsize(tmp_path / "out" / "maps.png")
    model, tok = convert.load_any(str(run))
    want = memorize.recite(model.eval(), tok.bos, [tok.encode(text)], "greedy", 10, 40)
    assert dict(want, model=str(run), seed=0, repetitions=128) == rows[0]


@pytest.mark.parametrize("args, says", [
    (["--init_from=out/x"], "go together"),
    (["--models=none k7"], "there is no k7"),
    (["LICENSE", "--models=none"], "want more than 1,008,300"),
    (["/nowhere.txt"], "/nowhere.txt"),
    (["--report", "--out=/nowhere"], "run studies/memorize.py first"),
])
def test_mistakes(tmp_path, args, says):
    refused(script("studies.memorize", f"--runs={tmp_path}", f"--out={tmp_path}/out", *args), says)


def test_the_table_has_the_means_and_paired_differences_of_the_rows():
    """Of two values that differ by d, half of the interval is t(1) d / 2, and t(1) = 12.7062 in printed tables."""
    rows = []
    for name, base, step in (("none", 0.8, 0.02), ("k10", 0.2, 0.04)):
        for seed, more in ((11, 0.0), (12, step)):
            names = dict(model=name, seed=seed)
            rows.append(dict(names, kind="validation", val_loss=3 + base + more))
            rows += [dict(names, kind="greedy", prefix=50, suffix=100, repetitions=n, rouge=(base + more) * share)
                     for n, share in ((0, 0.5), (128, 1.0), ("edited", 0.9))]
    lines = memorize.table_md(rows).splitlines()
    a, b = (12.7062 * d / 2 for d in (0.02, 0.04))
    assert f"| none | greedy | 50 | 100 | 0.41 ± {a / 2:.2f} | 0.81 ± {a:.2f} | 0.73 ± {a * 0.9:.2f} |" in lines
    k10 = lines.index(f"| k10 | 0.220 ± {b:.3f} | 0.198 ± {b * 0.9:.3f} | 3.220 ± {b:.3f} |")
    assert lines[k10 + 1] == f"| above the baseline | -0.590 ± {a:.3f} | -0.531 ± {a * 0.9:.3f} | -0.590 ± {a:.3f} |"
