"""memorize.py: Rouge-L against Google's, continuations against generate(), and a small study from data to rows."""

import json
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from conftest import script
from lab import run

import convert
from engine.files import read_json, sha256_of
from engine.runs import settings_of
from generate import generate
from studies import kit, memorize


def test_rouge_l_is_googles():
    """rouge_score reads ids as words. Few different ids give long common subsequences."""
    from rouge_score.rouge_scorer import RougeScorer  # here: it imports scikit-learn and pandas

    rng = random.Random(0)
    scorer = RougeScorer(["rougeL"])
    for n in range(20):
        said, truth = (rng.choices(range(1 + n), k=rng.randrange(1, 90)) for _ in "ab")
        words = (" ".join(map(str, ids)) for ids in (truth, said))
        assert memorize.rouge_l(said, truth) == pytest.approx(scorer.score(*words)["rougeL"].fmeasure)


def test_the_model_continues_bos_and_the_prefix():
    """
    18 passages, in two batches, against generate() on whole prompts. Two passages are the model's own continuations.
    """
    model = tiny.small(init_std=0.5)
    passages = tiny.ids(18, 40)
    prompts = F.pad(passages[:, :10], (1, 0), value=1)
    said = torch.tensor(generate(model, prompts.tolist(), 20, temperature=0))[:, 11:]
    passages[[3, 17], 10:30] = said[[3, 17]]
    row = memorize.recite(model, 1, passages.tolist(), "greedy", 10, 20)
    scores = map(memorize.rouge_l, said.tolist(), passages[:, 10:30].tolist())
    assert row["rouge"] == pytest.approx(np.mean(list(scores)))
    assert row["said"] == said[0].tolist()
    assert memorize.recite(model, 1, passages.tolist(), "nucleus", 10, 20)["said"] != row["said"]


# -----------------------------------------------------------------------------
# a small study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """
    A study of two models with one seed, stopped before the second and started again; train.py runs in this process.

    Returns the folder, and the names of the models in the order of their training.
    """
    root = tmp_path_factory.mktemp("study")
    letters = random.Random(0).choices("abcdefghij klmnopqrstuvwxyz\n", k=50_000)
    (root / "book.txt").write_text("".join(letters))
    shape = ["--n_layer=1", "--n_head=2", "--n_kv_head=1", "--n_embd=16", "--ffn_dim=32", "--compile=False"]
    settings = dict(
        paths=[str(root / "book.txt")],
        out=f"{root}/out",
        runs=f"{root}/runs",
        tokenizer="byte",
        models="none k4",
        seeds=1,
        background=6000,
        n_passages=1,
        jobs=1,
        TRAIN=[*memorize.TRAIN, *shape],
        BUCKETS=[0, 1, 16, "edited"],
        PASSAGE=100,
    )
    begun = []

    def run(command, stdout, **_):
        begun.append(os.path.basename(stdout.name).split("-")[0])
        if len(begun) == 2:
            stdout.write("begun\nstopped by its user")
            return SimpleNamespace(returncode=0)
        return script(*command[2:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit, "subprocess", SimpleNamespace(run=run))
        for name, value in settings.items():
            patch.setattr(memorize, name, value)
        with pytest.raises(ValueError, match="ended with code 0: stopped"):
            memorize.main()
        memorize.main()
    return root, begun


def test_passages_are_read_as_often_as_their_bucket_says(study):
    """Counted in the stream. Edited copies differ in 5 % of their tokens. The data have a committed hash."""
    (data,) = (study[0] / "runs").glob("data-*")
    probes = json.loads((data / "probes.json").read_text())
    train = np.load(data / "train_00000.npy").reshape(-1, 102)[:, 1:-1]
    shares = [(train == probe["ids"]).mean(1) for probe in probes]
    assert [(share > 0.8).sum() for share in shares] == [0, 1, 16, 128]
    assert 0.94 < shares[-1][shares[-1] > 0.8].mean() < 0.97
    assert sha256_of(read_json(f"{data}/meta.json"))[:12] == "1c32e4373bf4"


def test_a_stopped_study_trains_what_is_missing_and_its_rows_are_those_of_the_checkpoint(study):
    root, begun = study
    assert begun == ["none", "k4", "k4"]
    rows = kit.read_rows(root / "out" / "rows.jsonl")
    assert [row["model"] for row in rows if row["kind"] == "validation"] == ["none", "k4"]
    (run,) = (root / "runs").glob("k4-s11-*/")
    settings = settings_of(run)
    # The run reads all windows of the stream once.
    wanted = dict(
        goldfish_k=4,
        seed=11,
        block_size=256,
        batch_size=8,
        total_samples=80,
        warmup_samples=8,
        decay_samples=24,
        resume=True,
    )
    assert wanted.items() <= settings.items()
    ids = json.loads(open(f"{settings['data']}/probes.json").read())[2]["ids"]
    model, _ = convert.load_any(str(run))
    for kind, prefix in (("greedy", 12), ("nucleus", 50)):
        row = memorize.recite(model, 1, [ids], kind, prefix, 50)
        assert dict(row, model="k4", seed=11, repetitions=16) in rows


def test_any_model_is_tested_with_probes_of_prepare(lab, tmp_path):
    """The file is an object around the list. A probe's text overrides its ids. Bytes start at id 64."""
    text = "Rouge counts what two texts share: the quick brown fox jumps over the lazy dog, 1234567890 times."
    ids = [64 + byte for byte in text.encode()]
    found = []
    for probe in (dict(ids=ids), dict(text=text, ids=[3])):
        probes = [dict(probe, repetitions=n) for n in (128, 0)]
        (tmp_path / "probes.json").write_text(json.dumps(dict(probes=probes)))
        files = f"--init_from={lab}/hf", f"--probes={tmp_path}/probes.json", f"--out={tmp_path}"
        run("studies.memorize", *files, "--prefixes=(10,50)", "--suffix=40")
        found.append(kit.read_rows(tmp_path / "rows.jsonl"))
    assert found[0] == found[1]
    assert len(found[0]) == 8
