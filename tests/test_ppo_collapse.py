"""
studies/ppo_collapse.py against the published functions (arXiv 2405.00662), gymnasium's CartPole and MinAtar's Breakout.

tests/golden/ppo.*: networks of 5 inputs, two layers of 16 ReLUs and 3 actions or a value, as flat vectors.
"""
import json
import os

import numpy as np
import pytest
import torch

from conftest import ROOT, refused, script
from posttrain import collapse
from studies import kit, ppo_collapse

GOLDEN = os.path.join(ROOT, "tests", "golden", "ppo")
with open(f"{GOLDEN}.json", encoding="utf-8") as f:
    WANT = json.load(f)
DATA = np.load(f"{GOLDEN}.npz")


def golden(name):
    return torch.from_numpy(DATA[name])


def net(name, outputs=3):
    """A stored network, in fp64."""
    found = ppo_collapse.Net(5, outputs, 16).double()
    torch.nn.utils.vector_to_parameters(golden(name), found.parameters())
    return found


def gradient(found):
    return torch.cat([p.grad.flatten() for p in found.parameters()])


# --- what the paper published -------------------------------------------------------------------------------------

NAMES = dict(effective="effective_rank_vetterli", pca99="approximate_rank_pca", srank="srank_kumar",
             feature="feature_rank_lyle", torch="pytorch_rank")


@pytest.mark.parametrize("dtype, want, close", [
    (torch.float64, WANT["p1"], 1e-10),
    (torch.float32, WANT["p1_float32"], 1e-4),
])
@pytest.mark.parametrize("i", range(4))
def test_the_five_ranks_are_the_published_ones(dtype, want, close, i):
    found = collapse.spectrum(golden("p1_features")[i].to(dtype))
    assert found["effective"] == pytest.approx(want["effective_rank_vetterli"][i], rel=close)
    for ours, theirs in list(NAMES.items())[1:]:
        assert found[ours] == want[theirs][i]


@pytest.mark.parametrize("kind, count", [
    ("relu", collapse.dead_units),
    ("tanh", collapse.saturated_units),
])
def test_dead_units_are_the_published_ones(kind, count):
    assert [count(matrix).sum().item() for matrix in golden(f"p2_{kind}")] == WANT["p2"][kind]


@pytest.mark.parametrize("case", WANT["p3"])
def test_loss_and_gradient_of_ppo_are_the_published_ones(case):
    options, actor = WANT["p3"][case]["options"], net("p3_actor")
    logits, layers = actor(golden("p3_observation"))
    loss = ppo_collapse.policy_loss(logits.log_softmax(-1), golden("p3_action"), golden("p3_old_log_prob"),
                                    golden("p3_advantage"), clip=0.1, entropy=options["entropy_coef"])
    old = golden("p3_old_preactivations_actor")
    if options.get("feature_trust_all_layers"):
        drift = ppo_collapse.feature_loss(torch.cat(layers, 1), old)
    else:
        drift = ppo_collapse.feature_loss(layers[1], old[:, 16:])
    total = loss + options.get("feature_trust_region_coef", 0) * drift
    total.backward()
    assert total.item() == pytest.approx(WANT["p3"][case]["total"], rel=1e-12)
    torch.testing.assert_close(gradient(actor), golden(f"p3_grad_{case}"), rtol=1e-10, atol=1e-12)


def test_norm_low_ratios_and_policy_variance_are_the_published_ones(monkeypatch):
    rollout = dict(seen=golden("p3_observation"), action=golden("p3_action"), log_prob=golden("p3_old_log_prob"))
    monkeypatch.setattr(ppo_collapse, "CLIP", 0.1)
    found = ppo_collapse.diagnose(net("p3_actor"), net("p3_critic", 1), rollout)
    assert found["norm"] == pytest.approx(WANT["norm"], rel=1e-12)
    assert found["low_ratio"] == pytest.approx(WANT["low_ratio"], rel=1e-12)
    assert found["policy_variance"] == pytest.approx(WANT["policy_variance"], rel=1e-12)


@pytest.mark.parametrize("name, outputs, distance, left", [
    ("policy", 3, ppo_collapse.divergence, "kl_after"),
    ("value", 1, ppo_collapse.squared_error, "value_mse_after"),
])
def test_plasticity_is_fitted_as_published(name, outputs, distance, left):
    which = dict(policy="actor", value="critic")[name]
    fit, goal = net(f"p3_{which}", outputs), net(f"cap_target_{which}", outputs)
    seen = golden("p3_observation")
    losses = ppo_collapse.refit(fit, goal, seen, golden("cap_minibatches"), WANT["capacity"]["lr"], distance)
    torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), golden(f"cap_loss_{name}"),
                               rtol=1e-10, atol=1e-12)
    after = torch.nn.utils.parameters_to_vector(fit.parameters())
    torch.testing.assert_close(after, golden(f"cap_{which}_after"), rtol=1e-9, atol=1e-11)
    assert distance(fit(seen)[0], goal(seen)[0]).item() == pytest.approx(WANT["capacity"][left], rel=1e-9)


@pytest.mark.parametrize("case", WANT["p4"]["cases"])
def test_two_states_are_the_published_toy_problem(case):
    want = WANT["p4"]["cases"][case]
    of_x, of_y = ppo_collapse.two_states(want["x"], torch.tensor(want["weight"]), want["alpha"])
    assert of_x == pytest.approx(want["ratio_x"], rel=1e-6)
    assert of_y == pytest.approx(want["ratio_y"], rel=1e-6)


# --- the games ----------------------------------------------------------------------------------------------------


class Given:
    """A generator that draws what is given, in order."""

    def __init__(self, values):
        self.values = list(values)

    def integers(self, high, size):
        return np.array([self.values.pop(0) for _ in range(size)])

    def uniform(self, low, high, size):
        return np.array([self.values.pop(0) for _ in range(size[0])]).reshape(size)


def test_cartpole_moves_as_gymnasiums():
    stored = WANT["cartpole"]
    for start, actions, states, fell in zip(stored["start"], stored["actions"], stored["states"], stored["fell"]):
        game = ppo_collapse.CartPole(1, Given([start, [0.0] * 4]))
        for t, action in enumerate(actions, 1):
            reward, over = game.step(np.array([action]))
            assert reward == 1 and bool(over[0]) == (fell and t == len(actions))
            if t % 10 == 0:
                want = np.zeros(4) if over[0] else states[t // 10 - 1]
                np.testing.assert_allclose(game.state[0], want, rtol=1e-9, atol=1e-11)


def test_breakout_plays_as_minatars():
    """6,000 steps, 58 games, the longest through the whole wall and into the next: every picture, point and end."""
    game = ppo_collapse.Breakout(1, Given(DATA["breakout_starts"]))
    pictures = np.unpackbits(DATA["breakout_states"], axis=1).astype(bool)
    for t, action in enumerate(DATA["breakout_actions"]):
        reward, over = game.step(np.array([action]))
        assert reward[0] == DATA["breakout_rewards"][t] and over[0] == DATA["breakout_ends"][t], t
        if not over[0]:
            assert (game.seen()[0].astype(bool) == pictures[t, :400]).all(), t


# --- PPO ----------------------------------------------------------------------------------------------------------


def test_advantages_are_discounted_sums_of_surprises_up_to_the_end_of_a_game():
    """Against the definition, term by term, in fp64."""
    rng = torch.Generator().manual_seed(0)
    rewards, values = torch.rand(2, 12, 3, generator=rng, dtype=torch.float64)
    next_value = torch.rand(3, generator=rng, dtype=torch.float64)
    over = torch.rand(12, 3, generator=rng) < 0.2
    found = ppo_collapse.advantages(rewards, values, over, next_value)
    following = torch.cat([values[1:], next_value[None]])
    for t in range(12):
        for player in range(3):
            want, weight = 0.0, 1.0
            for s in range(t, 12):
                ends = over[s, player].item()
                to_come = 0.0 if ends else 0.99 * following[s, player]
                want += weight * (rewards[s, player] + to_come - values[s, player])
                weight *= 0.99 * 0.95
                if ends:
                    break
            assert found[t, player].item() == pytest.approx(want.item(), rel=1e-6)


# --- the study ----------------------------------------------------------------------------------------------------


def test_the_committed_table_is_that_of_the_committed_rows():
    folder = os.path.join(ROOT, "results", "ppo_collapse")
    rows = kit.read_rows(f"{folder}/rows.jsonl")
    with open(f"{folder}/table.md", encoding="utf-8") as f:
        assert f.read() == ppo_collapse.table_md(rows)
    assert [row["name"] for row in rows] == ppo_collapse.arms()


@pytest.mark.parametrize("args, words", [
    (["--only=tetris-4-1-2"], "want GAME-EPOCHS-C-SEED"),
    (["--seeds=0"], "want at least one seed"),
    (["--report", "--results=nowhere"], "run studies.ppo_collapse first"),
    (["--jobs=-1"], "jobs=-1: want how many runs at a time"),
])
def test_bad_input_is_one_line(args, words, tmp_path):
    refused(script("studies.ppo_collapse", f"--results={tmp_path}", f"--out={tmp_path}/out", *args), words)
