"""studies/align.py: the reward, the teacher, and the measures of two models."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import small

import convert
from studies import align
from tokenizer import load

CASES = {"4986": 0, "49860": 0, "4": -23, "9864": -30, "4986\n": -30}


def test_the_reward_is_the_distance_to_the_sum_and_30_for_what_is_no_answer():
    assert {answer: align.reward("Sum 27, first 4", answer) for answer in CASES} == CASES


def test_the_teacher_answers_all_tasks_well_formed():
    """It answers with 4 to 8 digits, enough to reach the sum, and misses the sum by less than 24."""
    rng = np.random.default_rng(2)
    for total, first in itertools.product(range(10, 50), range(1, 10)):
        answer = align.teacher(rng, total, first)
        assert 4 <= len(answer) <= 8
        assert total - first <= 9 * (len(answer) - 1)
        assert -24 < align.reward(f"Sum {total}, first {first}", answer)


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A reference model and another model on disk, and test prompts. Each reward is larger than the one before."""
    count = itertools.count(1)
    (tmp_path / "tuning.json").write_text('{"chosen": {"qrpo": {"beta": 0.3}}}')
    settings = dict(
        out=str(tmp_path),
        tuning=f"{tmp_path}/tuning.json",
        seeds=1,
        test_prompts=3,
        n_refs=4,
        samples=2,
        reward=lambda prompt, completion: next(count),
    )
    for name, value in settings.items():
        monkeypatch.setattr(align, name, value)
    align.write_data()
    models = [small(seed, vocab_size=320, block_size=256) for seed in (1, 2)]
    for model, name in zip(models, ("sft", "qrpo-s0")):
        convert.save_hf(model, f"{tmp_path}/{name}", load("byte"))
    return models


def test_what_is_measured_is_the_kl_of_the_logits_and_the_distance_to_the_closed_form(models):
    """The quantiles of a prompt's four references are 0, 1/3, 2/3, 1."""
    rows = align.measure()
    targets = (np.arange(4) / 3 - 0.3 * math.log(0.3 * math.expm1(1 / 0.3))) / 0.3
    want = dict(exact=0, quantile=1, kl=0, error=np.sqrt(np.mean(targets**2)))
    assert rows["sft"] | want == pytest.approx(rows["sft"])
    theirs, ours = models
    completions, _ = align.complete(ours, load("byte"), 2, 2000)
    kl = 0
    for prompt, completion in completions:
        ids = torch.tensor([prompt + completion])
        p, q = (F.cross_entropy(model(ids)[0, len(prompt) - 1 : -1], ids[0, len(prompt) :]) for model in (ours, theirs))
        kl += len(completion) * (q - p).item() / 6
    assert rows["qrpo-s0"]["kl"] == pytest.approx(kl, rel=1e-4)
