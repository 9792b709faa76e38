"""
papers/smacv2.py against SMACv2 (tests/golden/smacv2.json: what the code of oxwhirl/smacv2 gives on stored units), and our
battle against the code at commit ac03345, which made the committed rows.
"""
import filecmp
import json
import os
import shutil
from collections import Counter

import numpy as np
import pytest

from conftest import ROOT
from papers import smacv2

with open(os.path.join(ROOT, "tests", "golden", "smacv2.json"), encoding="utf-8") as f:
    WANT = json.load(f)
RANGES = {unit["unit"]: unit for unit in WANT["ranges"] if unit["min_attack_range"] == 2}
RESULTS = os.path.join(ROOT, "results", "micro_combat")


@pytest.mark.parametrize("case", WANT["m1"])
def test_starts_are_the_published_ones_on_the_same_stream(case):
    want, rng = WANT["m1"][case], np.random.default_rng(0)
    starts = [smacv2.starts_of(rng, want["n"], want["m"]) for _ in range(2000)]
    for (allies, enemies), drawn in zip(starts, want["draws"]):
        np.testing.assert_allclose(enemies, drawn["enemies"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(allies, drawn.get("allies", [[16, 16]] * want["n"]), rtol=0, atol=1e-12)
    assert sum((allies == 16).all() for allies, _ in starts) == want["surrounded"]


@pytest.mark.parametrize("case", WANT["m2"])
def test_teams_are_drawn_as_published(case):
    """Type for type on the same stream, redrawn teams too, and the counts in 4,000 teams."""
    want, rng = WANT["m2"][case], np.random.default_rng(0)
    teams = [smacv2.team_of(rng, want["unit_types"], want["n"], want["weights"]) for _ in range(4000)]
    assert teams[:len(want["first"])] == [drawn[-1] for drawn in want["first"]]
    assert Counter(kind for team in teams for kind in team) == want["count"]
    if case.startswith("protoss"):
        ours = dict(zip(smacv2.TEAM, smacv2.SHARES))
        assert ours == dict(zip(want["unit_types"], want["weights"]))


def test_sight_and_reach_are_the_published_ones():
    for kind, (_, *ranges, _) in smacv2.TEAM.items():
        assert ranges == [RANGES[kind]["sight"], RANGES[kind]["attack"]]
    assert smacv2.SIGHT_REACH == (WANT["without"]["sight"], WANT["without"]["attack"])


@pytest.mark.parametrize("case", WANT["rewards"], ids=lambda case: case["name"])
def test_reward_and_end_of_a_fight_are_the_published_ones(case):
    sides = dict(ally=case["allies"], enemy=case["enemies"])
    health = {side: np.array([unit[1:3] for unit in units], float) for side, units in sides.items()}
    fights = {side: [unit[0] != "medivac" for unit in units] for side, units in sides.items()}
    most = health["enemy"].sum()
    for step in case["steps"]:
        before = health["enemy"].sum(1)
        for side, i, new in step["changes"]:
            health[side][i] = [new.get("health", health[side][i, 0]), new.get("shield", health[side][i, 1])]
            if new.get("health") == 0:
                health[side][i] = 0
        ally, enemy = [health[side].sum(1) for side in ("ally", "enemy")]
        over, won = smacv2.outcome(ally[fights["ally"]], enemy[fights["enemy"]])
        assert (over, won) == (step["done"], step["battle_won"])
        assert smacv2.reward_of(before, enemy, won, most) == pytest.approx(step["reward"], abs=1e-12)


def looks(case):
    """For each look in a stored script: our rows, and ours as the released code gives them."""
    kinds = WANT["m4"]["columns"][5:]
    sides = dict(ally=case["allies"], enemy=case["enemies"])
    sides = {side: [dict(zip(("name", "x", "y", "health"), unit)) for unit in units] for side, units in sides.items()}
    enemies = sides["enemy"]
    revealed = np.zeros((1, len(sides["ally"]), len(enemies)), bool)
    rng = np.random.default_rng(0)
    for asked in case["script"]:
        if isinstance(asked, list):
            for side, i, new in asked:
                sides[side][i].update(new)
            continue
        ally = sides["ally"][asked]
        sight, reach = [np.array([RANGES[ally["name"]][key]]) for key in ("sight", "attack")]
        place, units = np.array([[ally["x"], ally["y"]]]), np.array([[[unit["x"], unit["y"]] for unit in enemies]])
        share = np.array([[unit.get("health", FULL[unit["name"]]) / FULL[unit["name"]] for unit in enemies]])
        types = np.array([[[unit["name"] == kind for kind in kinds] for unit in enemies]])
        within = np.linalg.norm(units - place[:, None], axis=-1) < sight
        shown = smacv2.shown_to(asked, within, revealed, case["prob_obs_enemy"], rng)
        kept = smacv2.not_cleared(revealed[:, asked] & (within | (share > 0)))
        yield [smacv2.rows_of(place, sight, reach, units, share, types, which)[0] for which in (shown, shown & kept)]


FULL = dict(marine=45, marauder=125, medivac=150, stalker=160, zealot=150, colossus=350, zergling=35, baneling=30,
            hydralisk=80)


@pytest.mark.parametrize("case", WANT["m4"]["cases"], ids=lambda case: case["name"])
def test_an_unseen_enemy_hides_no_other_and_in_the_released_code_it_does(case):
    for (ours, released), fixed, published in zip(looks(case), case["one_row_cleared"], case["published"]):
        np.testing.assert_allclose(ours, fixed["block"], atol=1e-6)
        np.testing.assert_allclose(released, published["block"], atol=1e-6)


# --- our battle ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game, policy, want", [
    ("all", "released", (34.31518164000352, 29, 0, 76502.5346869166, 47847.648911408796)),
    ("all", "half", (34.31518164000352, 29, 0, 73236.99042218967, 47847.648911408796)),
    ("fixed", "closed", (99.02912621359225, 59, 0, 88912.33011641496, 47090.87494004467)),
])
def test_the_battle_is_that_of_the_committed_rows(game, policy, want):
    """100 steps of 16 fights: rewards, ends, wins, observations and states of commit ac03345 for the same actions."""
    battle, rng, found = smacv2.Skirmish(16, game, policy, 0), np.random.default_rng(1), np.zeros(5)
    for _ in range(100):
        numbers = [battle.observed().numpy(), battle.state().numpy()]
        actions = np.where(rng.random((16, 3)) < 0.5, 3, rng.integers(8, size=(16, 3)))
        found[:3] += [part.sum() for part in battle.step(actions)]
        found[3:] += [(part * np.linspace(1, 2, part.size).reshape(part.shape)).sum() for part in numbers]
    assert found == pytest.approx(want, rel=1e-9)


def test_an_attack_costs_the_enemy_within_reach_and_no_other():
    """An enemy at 6 is within reach, one at 6.2 is not."""
    battle = smacv2.Skirmish(1, "fixed", "open", 0)
    battle.place[:] = [[[10, 10], [10, 11], [2, 30]], [[16, 10], [16.2, 11], [30, 2]]]
    before = battle.health.copy()
    reward, over, _ = battle.step(np.array([[5, 6, 5]]))
    assert (before - battle.health)[0, 1].tolist() == [14, 0, 0] and not over[0]
    assert reward[0] == pytest.approx(14 * 20 / (0.9 * (160 + 150 + 350) + 230))


def test_a_command_with_nothing_left_to_run_writes_the_committed_table(tmp_path, monkeypatch):
    shutil.copy(f"{RESULTS}/rows.jsonl", tmp_path)
    monkeypatch.setattr(smacv2, "results", str(tmp_path))
    smacv2.main()
    for name in ("rows.jsonl", "table.md"):
        assert filecmp.cmp(tmp_path / name, f"{RESULTS}/{name}", shallow=False)
