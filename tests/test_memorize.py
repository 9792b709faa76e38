"""memorize.py: Rouge-L against Google's, continuations against generate(), and a small study from data to rows."""

import json
import random

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from conftest import script

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


def test_a_passage_whose_suffix_repeats_itself_is_left_out(tmp_path):
    """What follows the suffix does not count."""
    probes = [dict(repetitions=1, ids=[9] * 4 + tail) for tail in ([5, 6, 5, 5, 5, 7, 8], [5, 6, 7, 5, 5, 5, 5])]
    (tmp_path / "probes.json").write_text(json.dumps(probes))
    groups, shortest = memorize.read_passages(tmp_path / "probes.json", None, [4], 4, 0.75)
    assert (groups, shortest) == ({(1, 4): [probes[1]["ids"]]}, 11)


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


def test_a_small_study_plants_its_passages_and_its_rows_are_those_of_the_trained_model(tmp_path, monkeypatch):
    """
    Passages are counted in the stream: as often as their bucket says, and edited copies differ in 5 % of their tokens.
    The data have a committed hash. train.py runs in this process.
    """
    letters = random.Random(0).choices("abcdefghij klmnopqrstuvwxyz\n", k=50_000)
    (tmp_path / "book.txt").write_text("".join(letters))
    shape = ["--n_layer=1", "--n_head=2", "--n_kv_head=1", "--n_embd=16", "--ffn_dim=32", "--compile=False"]
    settings = dict(
        paths=[str(tmp_path / "book.txt")],
        out=f"{tmp_path}/out",
        runs=f"{tmp_path}/runs",
        tokenizer="byte",
        models="k4",
        seeds=1,
        background=6000,
        n_passages=1,
        jobs=1,
        TRAIN=[*memorize.TRAIN, *shape],
        BUCKETS=[0, 1, 16, "edited"],
        PASSAGE=100,
    )
    for name, value in settings.items():
        monkeypatch.setattr(memorize, name, value)
    monkeypatch.setattr(kit, "run_process", lambda command, *_: (script(*command[2:]).returncode, 0.0))
    memorize.main()

    (data,) = (tmp_path / "runs").glob("data-*")
    probes = json.loads((data / "probes.json").read_text())
    train = np.load(data / "train_00000.npy").reshape(-1, 102)[:, 1:-1]
    shares = [(train == probe["ids"]).mean(1) for probe in probes]
    assert [(share > 0.8).sum() for share in shares] == [0, 1, 16, 128]
    assert 0.94 < shares[-1][shares[-1] > 0.8].mean() < 0.97
    assert sha256_of(read_json(f"{data}/meta.json"))[:12] == "1c32e4373bf4"

    (run,) = (tmp_path / "runs").glob("k4-s11-*/")
    # The run reads all windows of the stream once, with its own k.
    assert dict(goldfish_k=4, block_size=256, total_samples=80).items() <= settings_of(run).items()
    model, _ = convert.load_any(str(run))
    rows = kit.read_rows(tmp_path / "out" / "rows.jsonl")
    for kind, prefix in (("greedy", 12), ("nucleus", 50)):
        row = memorize.recite(model, 1, [probes[2]["ids"]], kind, prefix, 50)
        assert dict(row, model="k4", seed=11, repetitions=16) in rows


def test_the_product_is_judged_by_the_rule():
    """Paired by seed, against the mixing hash of the same scope."""

    def rows(model, scores):
        return [
            dict(model=model, seed=11 + i, kind="greedy", prefix=50, suffix=250, repetitions=128, rouge=score)
            for i, score in enumerate(scores)
        ]

    mix = [0.2, 0.5, 0.8]
    for change, verdict in (
        ([0.2, 0.21, 0.22], "the product recites more."),
        ([-0.2, -0.21, -0.22], "the product recites less."),
        ([0.01, 0.0, -0.01], "level."),
        ([0.3, -0.2, 0.1], "not decided."),
    ):
        product = [a + b for a, b in zip(mix, change)]
        page = memorize.table_md(rows("k50-stream", mix) + rows("product-stream", product))
        assert page.endswith(f" of Rouge-L against the mixing hash: {verdict}\n")
    assert "Rule" not in memorize.table_md(rows("k50-stream", mix))
