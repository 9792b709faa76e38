"""
papers/ppo_collapse.py against the published functions (arXiv 2405.00662) and gymnasium's CartPole.

tests/golden/ppo.*: networks of 5 inputs, two layers of 16 ReLUs and 3 actions or a value, as flat vectors.
"""
import filecmp
import json
import os
import shutil

import numpy as np
import pytest
import torch

from conftest import ROOT
from papers import ppo_collapse
from posttrain import collapse
from studies import kit

GOLDEN = os.path.join(ROOT, "tests", "golden", "ppo")
RESULTS = os.path.join(ROOT, "results", "ppo_collapse")
with open(f"{GOLDEN}.json", encoding="utf-8") as f:
    WANT = json.load(f)
DATA = np.load(f"{GOLDEN}.npz")


def golden(name):
    return torch.from_numpy(DATA[name])


def net(name, outputs=3):
    """A stored network, in fp64."""
    found = ppo_collapse.network(5, outputs, 16).double()
    torch.nn.utils.vector_to_parameters(golden(name), found.parameters())
    return found


@pytest.fixture
def seen(monkeypatch):
    """The stored observations. The published functions were run with a clip of 0.1."""
    monkeypatch.setattr(ppo_collapse, "CLIP", 0.1)
    return golden("p3_observation")


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
    for ours, theirs in NAMES.items():
        assert found[ours] == pytest.approx(want[theirs][i], rel=close if ours == "effective" else 0)


@pytest.mark.parametrize("kind, count", [
    ("relu", collapse.dead_units),
    ("tanh", collapse.saturated_units),
])
def test_dead_units_are_the_published_ones(kind, count):
    assert [count(matrix).sum().item() for matrix in golden(f"p2_{kind}")] == WANT["p2"][kind]


@pytest.mark.parametrize("case", WANT["p3"])
def test_loss_and_gradient_of_ppo_are_the_published_ones(case, seen, monkeypatch):
    options, actor = WANT["p3"][case]["options"], net("p3_actor")
    monkeypatch.setattr(ppo_collapse, "ENTROPY", options["entropy_coef"])
    sample = [golden(f"p3_{name}") for name in ("action", "old_log_prob", "advantage")]
    loss = ppo_collapse.policy_loss(actor(seen).log_softmax(-1), *sample)
    phi = torch.cat([actor[:1](seen), actor[:3](seen)], 1)
    part = slice(0 if options.get("feature_trust_all_layers") else 16, None)
    drift = ppo_collapse.F.mse_loss(phi[:, part], golden("p3_old_preactivations_actor")[:, part])
    total = loss + options.get("feature_trust_region_coef", 0) * drift
    total.backward()
    assert total.item() == pytest.approx(WANT["p3"][case]["total"], rel=1e-12)
    gradient = torch.cat([p.grad.flatten() for p in actor.parameters()])
    torch.testing.assert_close(gradient, golden(f"p3_grad_{case}"), rtol=1e-10, atol=1e-12)


def test_norm_low_ratios_and_policy_variance_are_the_published_ones(seen):
    sample = golden("p3_action"), golden("p3_old_log_prob")
    found = ppo_collapse.diagnose(net("p3_actor"), net("p3_critic", 1), seen, *sample)
    for name in ("norm", "low_ratio", "policy_variance"):
        assert found[name] == pytest.approx(WANT[name], rel=1e-12)


@pytest.mark.parametrize("which, outputs, distance, losses, left", [
    ("actor", 3, ppo_collapse.divergence, "cap_loss_policy", "kl_after"),
    ("critic", 1, ppo_collapse.F.mse_loss, "cap_loss_value", "value_mse_after"),
])
def test_plasticity_is_fitted_as_published(which, outputs, distance, losses, left, seen):
    fit, goal = net(f"p3_{which}", outputs), net(f"cap_target_{which}", outputs)
    found = ppo_collapse.refit(fit, goal, seen, golden("cap_minibatches"), WANT["capacity"]["lr"], distance)
    assert found == pytest.approx(golden(losses).tolist(), rel=1e-10)
    after = torch.nn.utils.parameters_to_vector(fit.parameters())
    torch.testing.assert_close(after, golden(f"cap_{which}_after"), rtol=1e-9, atol=1e-11)
    assert distance(fit(seen), goal(seen)).item() == pytest.approx(WANT["capacity"][left], rel=1e-9)


@pytest.mark.parametrize("case", WANT["p4"]["cases"])
def test_two_states_are_the_published_toy_problem(case):
    want = WANT["p4"]["cases"][case]
    ratios = ppo_collapse.two_states(want["x"], torch.tensor(want["weight"]), want["alpha"])
    np.testing.assert_allclose(ratios, [want["ratio_x"], want["ratio_y"]], rtol=1e-6)


# --- the game, advantages, the runs -------------------------------------------------------------------------------


def test_cartpole_moves_as_gymnasiums():
    """Each tenth state, and the step at which the pole falls."""
    stored = WANT["cartpole"]
    for start, actions, states, fell in zip(stored["start"], stored["actions"], stored["states"], stored["fell"]):
        game = ppo_collapse.CartPole(1, np.random.default_rng(0))
        game.state[0] = start
        for t, action in enumerate(actions, 1):
            over = game.step(np.array([action]))[0]
            assert over == (fell and t == len(actions))
            if t % 10 == 0 and not over:
                np.testing.assert_allclose(game.state[0], states[t // 10 - 1], rtol=1e-9, atol=1e-11)
        assert not over or game.ended[-1] == len(actions)


def test_advantages_are_discounted_sums_of_surprises_up_to_the_end_of_a_game():
    """Against the definition, term by term, in fp64."""
    rng = torch.Generator().manual_seed(0)
    rewards, values = torch.rand(2, 12, 3, generator=rng, dtype=torch.float64)
    next_value = torch.rand(3, generator=rng, dtype=torch.float64)
    over = torch.rand(12, 3, generator=rng) < 0.2
    found = ppo_collapse.advantages(rewards, values, over, next_value)
    following = torch.cat([values[1:], next_value[None]])
    surprise = rewards + 0.99 * following * ~over - values
    for t, player in np.ndindex(12, 3):
        ends = [s for s in range(t, 12) if over[s, player]]
        last = min(ends, default=11)
        want = sum((0.99 * 0.95) ** (s - t) * surprise[s, player] for s in range(t, last + 1))
        assert found[t, player].item() == pytest.approx(want.item(), rel=1e-6)


def test_a_run_begins_as_the_committed_one(monkeypatch):
    """Its first three rollouts are the first of the twenty stretches of the committed row, to 2 % on any CPU."""
    monkeypatch.setattr(ppo_collapse, "ROLLOUTS", 3)
    monkeypatch.setattr(ppo_collapse, "POINTS", 1)
    want = kit.read_rows(f"{RESULTS}/rows.jsonl")[0]
    found = ppo_collapse.trained(want["name"])
    assert found["curves"].keys() == want["curves"].keys()
    for key, curve in found["curves"].items():
        assert curve == pytest.approx(want["curves"][key][:1], rel=0.02)


def test_a_command_with_nothing_left_to_run_writes_the_committed_table(tmp_path, monkeypatch):
    shutil.copy(f"{RESULTS}/rows.jsonl", tmp_path)
    monkeypatch.setattr(ppo_collapse, "results", str(tmp_path))
    ppo_collapse.main()
    for name in ("rows.jsonl", "table.md"):
        assert filecmp.cmp(tmp_path / name, f"{RESULTS}/{name}", shallow=False)


def test_no_rows_and_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="want --seeds=1 or more"):
        kit.completed(f"{tmp_path}/rows.jsonl", [], None)
