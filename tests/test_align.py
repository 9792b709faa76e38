"""studies/align.py: the reward, the teacher, and the measures of two models."""
import itertools
import json
import math

import numpy as np
import pytest
import torch

import convert
from studies import align
from tiny import small
from tokenizer import load

CASES = {"4986": 0, "49860": 0, "4": -23, "9864": -30, "4986\n": -30}


def test_the_reward_is_the_distance_to_the_sum_and_30_for_what_is_no_answer():
    assert {answer: align.reward("Sum 27, first 4", answer) for answer in CASES} == CASES


def test_the_teacher_answers_all_tasks_well_formed():
    """4 to 8 digits, enough for the sum; each is off by 2 or so, and their sum by less than 24."""
    rng = np.random.default_rng(2)
    for total, first in itertools.product(range(10, 50), range(1, 10)):
        answer = align.teacher(rng, total, first)
        assert 4 <= len(answer) <= 8 and total - first <= 9 * (len(answer) - 1)
        assert -24 < align.reward(f"Sum {total}, first {first}", answer)


def test_what_is_measured_is_the_kl_of_the_logits_and_the_distance_to_the_closed_form(tmp_path, monkeypatch):
    """Each reward is above those before it, so the quantiles of a prompt's four references are 0, 1/3, 2/3, 1."""
    count = itertools.count(1)
    settings = dict(out=str(tmp_path), tuning=f"{tmp_path}/tuning.json", seeds=1, test_prompts=3, n_refs=4, samples=2,
                    reward=lambda *asked: next(count))
    for name, value in settings.items():
        monkeypatch.setattr(align, name, value)
    (tmp_path / "tuning.json").write_text(json.dumps(dict(chosen=dict(qrpo=dict(beta=0.3)))))
    align.write_data()
    tok = load("byte")
    theirs, ours = (small(seed, vocab_size=320, block_size=256) for seed in (1, 2))
    convert.save_hf(theirs, f"{tmp_path}/sft", tok)
    convert.save_hf(ours, f"{tmp_path}/qrpo-s0", tok)
    rows = align.measure()
    targets = (np.arange(4) / 3 - 0.3 * math.log(0.3 * math.expm1(1 / 0.3))) / 0.3
    want = dict(exact=0, quantile=1, kl=0, error=np.sqrt(np.mean(targets**2)))
    assert rows["sft"] | want == pytest.approx(rows["sft"])
    kl = 0
    for prompt, completion in align.complete(ours, tok, 2, 2000)[0]:
        ids = torch.tensor([*prompt, *completion])
        p, q = (model(ids[None])[0][0].log_softmax(-1) for model in (ours, theirs))
        kl += sum((p - q)[t - 1, ids[t]].item() for t in range(len(prompt), len(ids))) / 6
    assert rows["qrpo-s0"]["kl"] == pytest.approx(kl, rel=1e-4)
