"""
papers/smacv2.py against SMACv2 (tests/golden/smacv2.json: results of oxwhirl/smacv2's code on stored units, with
their health and places for each step and look), and our battle against the code of commit ac03345, which made the
committed rows.
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from papers import smacv2

WANT = json.loads(Path(ROOT, "tests", "golden", "smacv2.json").read_text())


@pytest.mark.parametrize("case", WANT["m1"])
def test_starts_are_the_published_ones_on_the_same_stream(case):
    want, rng = WANT["m1"][case], np.random.default_rng(0)
    starts = [smacv2.starts_of(rng, want["n"], want["m"]) for _ in range(2000)]
    for (allies, enemies), drawn in zip(starts, want["draws"]):
        np.testing.assert_allclose(enemies, drawn["enemies"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(allies, drawn["allies"], rtol=0, atol=1e-12)
    assert sum((allies == 16).all() for allies, _ in starts) == want["surrounded"]


@pytest.mark.parametrize("case", WANT["m2"])
def test_teams_are_drawn_as_published(case):
    """Unit by unit with the same random stream, also in redrawn teams, and the counts in 4,000 teams."""
    want, rng = WANT["m2"][case], np.random.default_rng(0)
    teams = [smacv2.team_of(rng, want["unit_types"], want["n"], want["weights"]) for _ in range(4000)]
    assert teams[: len(want["first"])] == want["first"]
    assert Counter(sum(teams, [])) == want["count"]


@pytest.mark.parametrize("case", WANT["rewards"], ids=lambda case: case["name"])
def test_reward_and_end_of_a_fight_are_the_published_ones(case):
    """Medivacs do not count as units that can fight."""
    before = np.array(case["enemies"])
    most = before.sum()
    for step in case["steps"]:
        over, won = smacv2.outcome(*map(np.array, step["fighting"]))
        after = np.array(step["enemies"])
        assert (over, won) == (step["done"], step["battle_won"])
        assert smacv2.reward_of(before, after, won, most) == pytest.approx(step["reward"], abs=1e-12)
        before = after


@pytest.mark.parametrize("case", WANT["m4"]["cases"], ids=lambda case: case["name"])
def test_an_unseen_enemy_hides_no_other_and_in_the_released_code_it_does(case):
    kinds = np.array(case["kinds"], bool)
    revealed = np.zeros((1, case["allies"], kinds.shape[1]), bool)
    for look in case["looks"]:
        (sight, reach), away, health = look["ranges"], np.array(look["away"]), np.array(look["health"])
        within = np.linalg.norm(away, axis=-1) < sight
        shown = smacv2.shown_to(look["ally"], within, revealed, case["prob_obs_enemy"], np.random.default_rng(0))
        kept = smacv2.not_cleared(revealed[:, look["ally"]] & (within | (health > 0)))
        for want, which in ((look["one_row_cleared"], shown), (look["published"], shown & kept)):
            found = smacv2.result_rows(away, sight, reach, health, kinds, which)
            np.testing.assert_allclose(found[0], want, atol=1e-6)


@pytest.mark.parametrize("setting", WANT["battle"])
def test_the_battle_is_that_of_the_committed_rows(setting):
    """100 steps of 16 fights: rewards, ends, wins, observations and states of commit ac03345 for the same actions."""
    battle = smacv2.Skirmish(16, *setting.split(), 0)
    rng = np.random.default_rng(1)
    found = np.zeros(5)
    for _ in range(100):
        views, _ = battle.observed()
        numbers = [views.numpy(), battle.state().numpy()]
        actions = np.where(rng.random((16, 3)) < 0.5, 3, rng.integers(8, size=(16, 3)))
        found[:3] += [part.sum() for part in battle.step(actions)]
        found[3:] += [part.ravel() @ np.linspace(1, 2, part.size) for part in numbers]
    assert found == pytest.approx(WANT["battle"][setting], rel=1e-9)
