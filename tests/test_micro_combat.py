"""
studies/micro_combat.py against SMACv2 (tests/golden/smacv2.json: oxwhirl/smacv2, its own code on given units): starts,
teams, rewards, who sees whom; and the fight, which is our own, against its rules.
"""
import json
import os
from collections import Counter

import numpy as np
import pytest

from conftest import ROOT, refused, script
from studies import kit
from studies import micro_combat as mc

with open(os.path.join(ROOT, "tests", "golden", "smacv2.json"), encoding="utf-8") as f:
    WANT = json.load(f)


# --- what SMACv2 says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", WANT["m1"])
def test_starts_are_the_published_ones_on_the_same_stream(case):
    want, rng = WANT["m1"][case], np.random.default_rng(0)
    starts = [mc.starts_of(rng, want["n"], want["m"]) for _ in range(2000)]
    for (allies, enemies), drawn in zip(starts, want["draws"]):
        np.testing.assert_allclose(enemies, drawn["enemies"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(allies, drawn.get("allies", [[16, 16]] * want["n"]), rtol=0, atol=1e-12)
    assert sum((allies == 16).all() for allies, _ in starts) == want["surrounded"]


@pytest.mark.parametrize("case", WANT["m2"])
def test_teams_are_drawn_as_published(case):
    """Type for type on the same stream, those drawn again too, and their counts in 4,000 teams."""
    want, rng = WANT["m2"][case], np.random.default_rng(0)
    teams = [mc.team_of(rng, want["unit_types"], want["n"], want["weights"]) for _ in range(4000)]
    assert teams[:len(want["first"])] == [drawn[-1] for drawn in want["first"]]
    assert Counter(kind for team in teams for kind in team) == want["count"]
    race = mc.RACES[case.split("_")[0]]
    assert sorted(race) == sorted(want["unit_types"])
    assert dict(zip(race, mc.SHARES)) == dict(zip(want["unit_types"], want["weights"]))


def test_sight_and_reach_are_the_published_ones():
    for unit in WANT["ranges"]:
        if unit["min_attack_range"] == 2:
            assert mc.KINDS[unit["unit"]][1:] == (unit["sight"], unit["attack"])
    assert (mc.SIGHT, mc.REACH) == (WANT["without"]["sight"], WANT["without"]["attack"])


@pytest.mark.parametrize("case", WANT["rewards"], ids=lambda case: case["name"])
def test_reward_and_end_of_a_fight_are_the_published_ones(case):
    sides = dict(ally=case["allies"], enemy=case["enemies"])
    health = {side: np.array([[unit[1], unit[2]] for unit in units], float) for side, units in sides.items()}
    fights = {side: np.array([unit[0] != "medivac" for unit in units]) for side, units in sides.items()}
    most = health["enemy"].sum()
    for step in case["steps"]:
        before = health["enemy"].sum(1)
        for side, i, new in step["changes"]:
            for name, value in new.items():
                health[side][i, ("health", "shield").index(name)] = value
            if new.get("health") == 0:
                health[side][i] = 0
        now = {side: both.sum(1) for side, both in health.items()}
        over, won = mc.outcome(now["ally"][fights["ally"]], now["enemy"][fights["enemy"]])
        assert (bool(over), bool(won)) == (step["done"], step["battle_won"])
        assert mc.reward_of(before, now["enemy"], won, most) == pytest.approx(step["reward"], abs=1e-12)


def look(case):
    """The rows that ours give when a golden script asks, and what the released code makes of them."""
    kinds = WANT["m4"]["columns"][5:]
    sides = {side: [dict(zip(("name", "x", "y", "health"), unit)) for unit in case[f"{word}"]]
             for side, word in (("ally", "allies"), ("enemy", "enemies"))}
    for units in sides.values():
        for unit in units:
            unit.setdefault("health", mc.KINDS[unit["name"]][0])
    allies, enemies = sides["ally"], sides["enemy"]
    sight = mc.Sight(1, len(enemies), len(allies), case["prob_obs_enemy"], np.random.default_rng(0))
    found = []
    for asked in case["script"]:
        if isinstance(asked, list):
            for side, i, new in asked:
                sides[side][i].update(new)
            continue
        _, far, reach = mc.KINDS[allies[asked]["name"]]
        place = np.array([[allies[asked]["x"], allies[asked]["y"]]], float)
        places = np.array([[[enemy["x"], enemy["y"]] for enemy in enemies]], float)
        share = np.array([[enemy["health"] / mc.KINDS[enemy["name"]][0] for enemy in enemies]])
        types = np.array([[[float(enemy["name"] == kind) for kind in kinds] for enemy in enemies]])
        within = np.linalg.norm(places - place[:, None], axis=-1) < far
        shown = sight.shown(asked, within)
        rows = mc.rows_of(place, np.array([far]), np.array([reach]), places, share, types, shown)
        found.append((rows[0], mc.as_released(rows, sight.revealed[:, asked] & (within | (share > 0)))[0]))
    return found


@pytest.mark.parametrize("case", WANT["m4"]["cases"], ids=lambda case: case["name"])
def test_an_unseen_enemy_hides_no_other_and_in_the_released_code_it_does(case):
    for (ours, released), fixed, published in zip(look(case), case["one_row_cleared"], case["published"]):
        np.testing.assert_allclose(ours, fixed["block"], atol=1e-6)
        np.testing.assert_allclose(released, published["block"], atol=1e-6)


# --- the fight ----------------------------------------------------------------------------------------------------


def fight(n=1, random=(), **places):
    """Fights in which allies and enemies stand where they are put."""
    game = mc.Skirmish(n, random, 1.0, False, np.random.default_rng(0))
    for side, name in enumerate(("allies", "enemies")):
        if name in places:
            game.place[:, side] = places[name]
    return game


FAR = [[2, 30], [2, 31], [2, 29]]       # where no one is met


def test_an_attack_costs_the_enemy_within_reach_and_no_other():
    """6 away is within reach, 6.1 is not; who attacks the dead or the far waits."""
    game = fight(allies=[[10, 10], [10, 11], [2, 30]], enemies=[[16, 10], [16.2, 11], [30, 2]])
    before = game.health.copy()
    reward, over, won = game.step(np.array([[5, 6, 5]]))
    lost = before - game.health
    assert lost[0, 1].tolist() == [mc.STRIKE["stalker"], 0, 0] and not over[0] and not won[0]
    most = 0.9 * (160 + 150 + 350)
    assert reward[0] == pytest.approx(14 * 20 / (most + 230))


def test_a_fight_ends_when_a_side_is_beaten_or_the_time_is_over_and_begins_anew(monkeypatch):
    monkeypatch.setattr(mc, "LIMIT", 4)
    game = fight(3)
    game.health[0, 1], game.health[1, 0] = 0, 0
    reward, over, won = game.step(np.zeros((3, 3), int))
    assert over.tolist() == [True, True, False] and won.tolist() == [True, False, False]
    assert (game.health == game.full).all() and game.age.tolist() == [0, 0, 1]
    overs = [game.step(np.zeros((3, 3), int))[1].tolist() for _ in range(3)]
    assert overs == [[False] * 3, [False] * 3, [False, False, True]]


# --- the study ----------------------------------------------------------------------------------------------------


def test_a_blind_plan_is_learnt_where_nothing_is_random(tmp_path, monkeypatch):
    """The claim of the file, made small: it wins, and by the same actions each time; a second run has the same bits."""
    monkeypatch.setattr(mc, "FIGHTS", 32)
    monkeypatch.setattr(mc, "ROLLOUTS", 3)
    monkeypatch.setattr(mc, "TESTED", 20)
    rows = [mc.trained("fixed-open-2") for _ in range(2)]
    assert rows[0] == rows[1] and len(rows[0]["fights"]) == 2 and 0 <= rows[0]["won"] <= 1


def test_the_committed_table_is_that_of_the_committed_rows():
    folder = os.path.join(ROOT, "results", "micro_combat")
    rows = kit.read_rows(f"{folder}/rows.jsonl")
    with open(f"{folder}/table.md", encoding="utf-8") as f:
        assert f.read() == mc.table_md(rows)
    assert [row["name"] for row in rows] == mc.arms()


@pytest.mark.parametrize("args, words", [
    (["--only=maps-open-2"], "want GAME-POLICY-SEED"),
    (["--seeds=0"], "want at least one seed"),
    (["--seeds=1"], "holds runs of other settings, like all-none-3: name another --results"),
])
def test_bad_input_is_one_line_and_no_result_is_lost(args, words, tmp_path):
    kept = json.dumps(dict(name="all-none-3", game="all", policy="none", rollouts=mc.ROLLOUTS)) + "\n"
    (tmp_path / "rows.jsonl").write_text(kept)
    refused(script("studies.micro_combat", f"--results={tmp_path}", f"--out={tmp_path}/out", *args), words)
    assert (tmp_path / "rows.jsonl").read_text() == kept
