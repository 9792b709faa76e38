"""memorize.py: Rouge-L is Google's, continuations are the model's own, and a small study from its data to its table."""
import json
import os
import random

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer

import convert
import tiny
from conftest import refused, script
from engine.runs import settings_of
from studies import kit, memorize


@pytest.mark.parametrize("seed", range(20))
def test_rouge_l_is_googles(seed):
    """rouge_score, on ids as words; few different ones have long common subsequences."""
    rng = random.Random(seed)
    said, truth = (rng.choices(range(1 + seed), k=rng.randrange(1, 90)) for _ in "ab")
    words = (" ".join(map(str, ids)) for ids in (truth, said))
    want = RougeScorer(["rougeL"]).score(*words)["rougeL"].fmeasure
    assert memorize.rouge_l(said, truth) == pytest.approx(want)


def test_rouge_l_of_known_answers():
    """Lin (2004) sec. 3.1: police killed the gunman / police kill the gunman, the gunman kill police."""
    assert memorize.rouge_l([1, 5, 3, 4], [1, 2, 3, 4]) == 0.75
    assert memorize.rouge_l([3, 4, 5, 1], [1, 2, 3, 4]) == 0.5


def test_the_model_continues_bos_and_the_prefix():
    """18 passages, in two batches, against the model's argmax called token by token; two of them are its own words."""
    model = tiny.small(init_std=0.5).eval()
    passages = tiny.ids(18, 40)
    ids = torch.nn.functional.pad(passages[:, :10], (1, 0), value=1)
    for _ in range(20):
        with torch.no_grad():
            ids = torch.cat((ids, model(ids)[0][:, -1:].argmax(-1)), 1)
    passages[[3, 17], 10:30] = ids[[3, 17], 11:]
    pairs = zip(ids[:, 11:].tolist(), passages[:, 10:30].tolist())
    row = memorize.recite(model, 1, passages.tolist(), "greedy", 10, 20)
    assert row["rouge"] == pytest.approx(np.mean([memorize.rouge_l(*pair) for pair in pairs]))
    assert row["said"] == ids[0, 11:].tolist()
    assert row["said"] != memorize.recite(model, 1, passages.tolist(), "nucleus", 10, 20)["said"]


# -----------------------------------------------------------------------------
# a small study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """
    Two models of one seed, stopped before the second, and started again; train.py runs in this process.

    Returns the folder, and the names of the models in the order of their training.
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
    """Against the stream: each copy is a document between BOS and EOS, and edited ones differ in 5 %."""
    (data,) = (study[0] / "runs").glob("data-*")
    train, val = (np.load(data / f"{split}_00000.npy").reshape(-1, 152) for split in ("train", "val"))
    assert len(train) == 6000 // 150 + 341 and len(val) == 50_000 // 150 - 47
    assert (train[:, [0, -1]] == (1, 2)).all()
    probes = json.loads((data / "probes.json").read_text())
    shares = [(np.vstack((train, val))[:, 1:-1] == probe["ids"]).mean(1) for probe in probes]
    assert [(share == 1).sum() for share in shares[:-1]] == [0, 1, 4, 16, 64, 128]
    assert [(share > 0.8).sum() for share in shares] == [0, 1, 4, 16, 64, 128, 128]
    assert 0.94 < shares[-1][shares[-1] > 0.8].mean() < 0.97


def test_rows_are_those_of_the_checkpoint(study):
    root = study[0]
    (run,) = (root / "runs").glob("k4-s11-*/")
    settings = settings_of(run)
    # All windows of the stream once.
    wanted = dict(goldfish_k=4, seed=11, block_size=256, total_samples=381 * 152 // 2048 * 8)
    assert wanted.items() <= settings.items()
    with open(f"{settings['data']}/probes.json") as f:
        ids = json.load(f)[4]["ids"]
    model, _ = convert.load_any(str(run))
    for kind, prefix in (("greedy", 12), ("nucleus", 50)):
        row = memorize.recite(model.eval(), 1, [ids], kind, prefix, 100)
        assert dict(row, model="k4", seed=11, repetitions=64) in kit.read_rows(root / "out" / "rows.jsonl")


def on_any_model(study, folder, probes, suffix=40):
    """The study's first model, tested with a file of probes."""
    (run,) = (study[0] / "runs").glob("none-*/")
    (folder / "probes.json").write_text(json.dumps(probes))
    return script("studies.memorize", f"--init_from={run}", f"--probes={folder}/probes.json", "--prefixes=(10,50)",
                  f"--suffix={suffix}", f"--out={folder}/out")


@pytest.mark.parametrize("probe, suffix, says", [
    (dict(ids=[*range(100)]), 40, "no probes"),
    (dict(repetitions=1, text="short"), 40, "has only 5 tokens"),
    (dict(repetitions=1, ids=[9] * 300), 40, "lower --min_ttr"),
    (dict(repetitions=1, ids=[*range(100)] * 3), 206, "has only 255 tokens"),
])
def test_probes_that_cannot_be_asked(study, tmp_path, probe, suffix, says):
    refused(on_any_model(study, tmp_path, [probe], suffix), says)


def test_any_model_with_probes_of_prepare(study, tmp_path):
    """An object around the list, whose text comes before ids of another vocabulary. A byte's id is 64 more."""
    text = "Rouge counts what two texts share: the quick brown fox jumps over the lazy dog, 1234567890 times."
    found = []
    for probe in (dict(ids=[64 + byte for byte in text.encode()]), dict(text=text, ids=[3])):
        done = on_any_model(study, tmp_path, dict(probes=[dict(probe, repetitions=n) for n in (128, 0)]))
        assert done.returncode == 0, done.stderr
        found.append(kit.read_rows(tmp_path / "out" / "rows.jsonl"))
    assert found[0] == found[1] and len(found[0]) == 8 and (tmp_path / "out" / "maps.png").exists()


@pytest.mark.parametrize("args, says", [
    (["--init_from=out/x"], "go together"),
    (["--models=none k7"], "there is no k7"),
    (["README.md", "--models=none"], "want more than 1,008,300"),
    (["LICENSE", "--models=none"], "LICENSE: unknown kind of file"),
    (["/nowhere.txt"], "/nowhere.txt"),
    (["--report", "--out=/nowhere"], "run studies/memorize.py first"),
])
def test_mistakes(tmp_path, args, says):
    refused(script("studies.memorize", f"--runs={tmp_path}", f"--out={tmp_path}/out", *args), says)


def test_the_table_has_the_means_and_paired_differences_of_the_rows():
    """Of two values that differ by d, half of the interval is t(1) d / 2, and t(1) = 12.7062 in printed tables."""
    rows = []
    for name, seed, rouge in (("none", 11, 0.8), ("none", 12, 0.82), ("k10", 12, 0.24), ("k10", 11, 0.2)):
        names = dict(model=name, seed=seed)
        rows.append(dict(names, kind="validation", val_loss=3 + rouge))
        for n in (128, "edited"):
            rows.append(dict(names, kind="greedy", prefix=50, suffix=100, repetitions=n, rouge=rouge))
    lines = memorize.table_md(rows).splitlines()
    a, b = (12.7062 * d / 2 for d in (0.02, 0.04))
    assert f"| none | greedy | 50 | 100 | 0.81 ± {a:.2f} | 0.81 ± {a:.2f} |" in lines
    k10 = lines.index(f"| k10 | 0.220 ± {b:.3f} | 0.220 ± {b:.3f} | 3.220 ± {b:.3f} |")
    assert lines[k10 + 1] == f"| above the baseline |{f' -0.590 ± {a:.3f} |' * 3}"
