"""
papers/ppo_collapse.py against the published functions (arXiv 2405.00662), gymnasium's
CartPole and scipy.

tests/golden/ppo.*: networks of 5 inputs, two layers of 16 ReLUs and 3 actions or a value, as flat vectors.
"""

import json

import numpy as np
import pytest
import torch
from conftest import ROOT

from papers import ppo_collapse
from studies import kit

GOLDEN = f"{ROOT}/tests/golden/ppo"
with open(f"{GOLDEN}.json") as f:
    WANT = json.load(f)
DATA = {name: torch.from_numpy(array) for name, array in np.load(f"{GOLDEN}.npz").items()}
SEEN, *TAKEN, ADVANTAGE = [DATA[f"p3_{name}"] for name in ("observation", "action", "old_log_prob", "advantage")]


def net(name, outputs=3):
    """A stored network, in fp64."""
    found = ppo_collapse.network(5, outputs, 16).double()
    torch.nn.utils.vector_to_parameters(DATA[name].clone(), found.parameters())
    return found


# --- the published functions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("want, dtype, rel", [("p1", torch.float64, 1e-10), ("p1_float32", torch.float32, 1e-4)])
def test_the_five_ranks_are_the_published_ones(want, dtype, rel):
    for matrix, ranks in zip(DATA["p1_features"].to(dtype), WANT[want], strict=True):
        assert [*ppo_collapse.spectrum(matrix).values()][:5] == pytest.approx(ranks, rel=rel)


def test_dead_units_are_the_published_ones():
    assert [ppo_collapse.dead_units(matrix).sum() for matrix in DATA["p2_relu"]] == WANT["p2"]["relu"]


@pytest.mark.parametrize("case", ["ppo", "entropy", "pfo_last"])
def test_steps_of_actor_and_critic_are_the_published_gradients(case, monkeypatch):
    """One step of SGD without clipping. The published functions were run with a clip of 0.1."""
    options = WANT["p3"][case]["options"]
    nets = [net("p3_actor"), net("p3_critic", 1)]
    for name, value in dict(CLIP=0.1, CLIP_NORM=1e9, ENTROPY=options["entropy_coef"]).items():
        monkeypatch.setattr(ppo_collapse, name, value)
    told = SEEN, *TAKEN, DATA["p3_old_preactivations_actor"][:, 16:], ADVANTAGE
    optimizer = torch.optim.SGD([p for found in nets for p in found.parameters()], 1)
    every, c = [slice(None)], options.get("feature_trust_region_coef", 0)
    ppo_collapse.learn(*nets, optimizer, (told, (SEEN, DATA["p3_value_target"])), every, every, c)
    for found, start, gradient in zip(nets, ("p3_actor", "p3_critic"), (f"p3_grad_{case}", "p3_grad_value")):
        moved = DATA[start] - torch.nn.utils.parameters_to_vector(found.parameters())
        torch.testing.assert_close(moved, DATA[gradient], rtol=1e-10, atol=1e-12)


def test_norm_low_ratios_and_policy_variance_are_the_published_ones(monkeypatch):
    monkeypatch.setattr(ppo_collapse, "CLIP", 0.1)
    found = ppo_collapse.diagnose(net("p3_actor"), net("p3_critic", 1), SEEN, *TAKEN)
    for name in ("norm", "low_ratio", "policy_variance"):
        assert found[name] == pytest.approx(WANT[name], rel=1e-12)


@pytest.mark.parametrize("case", WANT["p4"]["cases"])
def test_two_states_are_the_published_toy_problem(case):
    want = WANT["p4"]["cases"][case]
    ratios = ppo_collapse.two_states(want["x"], torch.tensor(want["weight"]), want["alpha"])
    np.testing.assert_allclose(ratios, [want["ratio_x"], want["ratio_y"]], rtol=1e-6)


# --- the game, advantages, the runs -----------------------------------------------------------------------


@pytest.mark.parametrize("start, actions, states, fell", [*zip(*WANT["cartpole"].values())])
def test_cartpole_moves_as_gymnasiums(start, actions, states, fell):
    """Compares every tenth state, and the step at which the pole falls."""
    game = ppo_collapse.CartPole(1, np.random.default_rng(0))
    game.cart[0] = start
    found, over = [], []
    for action in actions:
        over += game.step(np.array([[action]]))[1].tolist()
        found.append(game.cart[0].copy())
    np.testing.assert_allclose(found[9::10], states, rtol=1e-9, atol=1e-11)
    assert over == [False] * (len(actions) - 1) + [fell]


def test_a_run_begins_as_the_committed_one(monkeypatch):
    """Its first three rollouts are the first of the committed curve's 20 points, to 2 % on any CPU."""
    monkeypatch.setattr(ppo_collapse, "ROLLOUTS", 3)
    monkeypatch.setattr(ppo_collapse, "POINTS", 1)
    want = kit.read_rows("results/ppo_collapse/rows.jsonl")[2]
    found = ppo_collapse.train(want["name"])["curves"]
    assert found == {key: pytest.approx(curve[:1], rel=0.02) for key, curve in want["curves"].items()}
