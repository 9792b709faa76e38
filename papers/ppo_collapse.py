"""
PPO collapse: the more epochs PPO trains on each rollout, the larger its features grow, until the clip fails.

    L = -E min(r A, clip(r, 1 - e, 1 + e) A) - c_H H + c E (phi - phi_old)^2            r = pi(a|s) / pi_old(a|s)

Another paper, not Apertus: "No Representation, No Trust" (arXiv 2405.00662), by authors of QRPO.

Claim           The clip removes the gradient of a sample whose ratio r has left 1 ± e, but it does not hold r there.
                Where two states share a feature, the gradient of one moves the other. So norms grow, and ranks and
                return collapse. The last term of L, the proximal feature loss (PFO), prevents this: it keeps phi, the
                pre-activations of the last hidden layer, near those of the rollout.
Reproduced      The published functions: loss and gradient, ranks, dead units and the toy problem
                (tests/test_ppo_collapse.py). In CartPole, norms grow with the number of epochs, more ratios end beyond
                the clip and farther beyond, and PFO holds the norm.
Not reproduced  The collapse of rank and return, and a gain by PFO. The paper plays Atari for 100M frames, this file
                plays CartPole for 0.1M steps. Breakout of 10 x 10 pixels (commit ac03345) did not collapse either.

$ python -m papers.ppo_collapse     # the runs that rows.jsonl lacks, up to a minute each, then table.md and plots
"""

import math
import os
import sys

if __name__ == "__main__" and not __package__:
    print("ppo_collapse.py: start it from the project's root, python -m papers.ppo_collapse", file=sys.stderr)
    sys.exit(2)

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from configurator import run
from studies import kit

seeds = 5                           # number of seeds, from seed 2 on: the settings were chosen with seed 1
results = "results/ppo_collapse"    # rows.jsonl, table.md, plots

PLAYERS = 16            # games at a time; a rollout is STEPS steps of each
STEPS = 128
ROLLOUTS = 60
BATCH = 256
LR = 2.5e-3
GAMMA = 0.99            # discount per step
LAMBDA = 0.95
CLIP = 0.2
ENTROPY = 0.01
CLIP_NORM = 0.5         # largest gradient norm of each network
WIDTH = 128
POINTS = 20             # of a curve: means over 20 parts of the run
# Each with the number of epochs and the weight of PFO.
ARMS = ["cartpole-4-0", "cartpole-4-1", "cartpole-4-10", "cartpole-20-0", "cartpole-20-1", "cartpole-20-10"]


# ----------------------------------------------------------------------------------------------------------------------
# the toy problem


def two_states(feature, weight, alpha):
    """
    The ratios of two states that share one feature, over twenty steps of SGD with a clip at 1.1: (of x, of y).

    Two actions; the first is good, A = 1, in both states. Their logits are weight (2,) times the feature, which is
    `feature` in x and alpha times that in y. SGD takes x and y by turns. At alpha = 1 both stop at the clip, at -1 they
    undo each other. At 3, x drives y past its clip, because the ratio of x has not reached the clip yet.
    Source: the paper's toy_problem.py, number for number.
    """
    weight = weight.clone().requires_grad_()
    states = feature * torch.tensor([1.0, alpha])
    probabilities = []
    for i in range(21):
        good = torch.outer(states, weight).softmax(-1)[:, 0]    # the probability of the good action in each state
        probabilities.append(good.detach())
        ratio = good / probabilities[0]
        gain = torch.minimum(ratio, ratio.clamp(0.9, 1.1))
        grad, = torch.autograd.grad(gain[i % 2], weight)
        weight.data += 1.5 * grad
    return (torch.stack(probabilities) / probabilities[0]).T.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# the game


class CartPole:
    """
    n games of gymnasium's CartPole-v1, by Euler's rule in fp64: keep a pole upright on a cart.

    Actions: push to the left (0) or right (1). Each step is 1 point; a game ends after 500. `ended` holds the points of
    the games so far.
    """

    def __init__(self, n, rng):
        self.rng = rng
        self.cart = rng.uniform(-0.05, 0.05, (n, 4))       # place, speed, angle, angular speed
        self.age = np.zeros(n, int)
        self.ended = [0]

    def state(self):
        return torch.from_numpy(self.cart).float()

    def observed(self):
        """As play() needs it: the observations (n, 1, 4) of the one unit of each game, and that it is alive (n, 1)."""
        return self.state()[:, None], torch.ones(len(self.age), 1, dtype=bool)

    def step(self, actions):
        """actions (n, 1) -> rewards (n,) and which games are over (n,) bool. Those begin again."""
        _, v, angle, w = self.cart.T
        sin = np.sin(angle)
        cos = np.cos(angle)
        # The masses are 1 and 0.1, half of the pole's length is 0.5.
        push = (20.0 * actions[:, 0] - 10 + 0.05 * w**2 * sin) / 1.1
        inertia = 0.5 * (4 / 3 - 0.1 * cos**2 / 1.1)
        turn = (9.8 * sin - cos * push) / inertia
        drive = push - 0.05 * turn * cos / 1.1
        self.cart += 0.02 * np.stack([v, drive, w, turn], axis=1)
        self.age += 1
        lost = abs(self.cart[:, [0, 2]]) > [2.4, np.radians(12)]
        over = lost.any(1) | (self.age == 500)
        self.ended.extend(self.age[over])
        self.cart[over] = self.rng.uniform(-0.05, 0.05, (over.sum(), 4))
        self.age[over] = 0
        return np.ones(len(over)), over


# ----------------------------------------------------------------------------------------------------------------------
# PPO


def network(inputs, outputs, width=WIDTH, activation=nn.ReLU):
    """Two hidden layers. net[:3](x) are the pre-activations phi of the second, (N, width); net[3:](phi) the outputs."""
    return nn.Sequential(
        nn.Linear(inputs, width), activation(),
        nn.Linear(width, width), activation(),
        nn.Linear(width, outputs),
    )


def log_prob_of(log_probs, action):
    """(..., actions) and the chosen actions (...) -> their log-probabilities (...)."""
    return log_probs.gather(-1, action[..., None])[..., 0]


def sampled(logits, generator):
    """logits (..., actions) -> random actions (...) and their log-probabilities (...)."""
    log_probs = logits.log_softmax(-1)
    action = torch.multinomial(log_probs.exp().flatten(0, -2), 1, generator=generator).view(log_probs.shape[:-1])
    return action, log_prob_of(log_probs, action)


def policy_loss(logits, action, old_log_prob, advantage):
    """
    PPO-Clip with an entropy bonus, a mean over samples.

    logits (N, actions) of the network in training; old_log_prob (N,) of the chosen action in the rollout; advantage
    (N,), normalised here over the minibatch.
    """
    log_probs = logits.log_softmax(-1)
    advantage = (advantage - advantage.mean()) / advantage.std(correction=0).clamp(min=1e-6)
    ratio = (log_prob_of(log_probs, action) - old_log_prob).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return -gain.mean() - ENTROPY * entropy.mean()


def advantages(rewards, values, over, next_value):
    """
    Generalised advantage estimation. rewards, values, over: (steps, players), next_value (players,).

    A game that was cut off counts as one that ended, as in the published code.
    """
    result = torch.zeros_like(rewards)
    later = 0
    for t in reversed(range(len(rewards))):
        surprise = rewards[t] + GAMMA * next_value * ~over[t] - values[t]
        later = surprise + GAMMA * LAMBDA * later * ~over[t]
        result[t] = later
        next_value = values[t]
    return result


@torch.no_grad()
def play(game, steps, actor, critic, generator):
    """
    A rollout: observations, actions, log-probabilities, phi and advantages of the N units alive, (N, ...) each, and
    states and returns for the critic. A game's units share rewards and advantages.
    """
    rows = []
    for _ in range(steps):
        state = game.state()
        seen, alive = game.observed()
        phi = actor[:3](seen)
        action, log_prob = sampled(actor[3:](phi), generator)
        reward, over, *_ = map(torch.from_numpy, game.step(action.numpy()))
        rows.append((seen, action, log_prob, phi, alive, state, reward.float(), over))
    *of_units, alive, state, reward, over = map(torch.stack, zip(*rows))
    value = critic(state)[..., 0]
    advantage = advantages(reward, value, over, critic(game.state())[..., 0])
    of_units.append(advantage[..., None].expand(alive.shape))
    return [tensor[alive] for tensor in of_units], (state.flatten(0, 1), (advantage + value).flatten())


def minibatches(n, epochs, size, generator):
    """Yield the row numbers of minibatches, shuffled anew in each epoch."""
    for _ in range(epochs):
        yield from torch.randperm(n, generator=generator).split(size)


def learn(actor, critic, optimizer, rollout, for_actor, for_critic, c=0):
    """Train the actor, then the critic, on a rollout. for_actor, for_critic: minibatches; c: weight of PFO."""
    of_units, (states, returns) = rollout
    for rows in for_actor:
        seen, action, log_prob, phi_old, advantage = [tensor[rows] for tensor in of_units]
        phi = actor[:3](seen)
        loss = policy_loss(actor[3:](phi), action, log_prob, advantage)
        step(actor, optimizer, loss + c * F.mse_loss(phi, phi_old))
    for rows in for_critic:
        step(critic, optimizer, 0.5 * F.mse_loss(critic(states[rows])[:, 0], returns[rows]))


def step(net, optimizer, loss):
    """One step of the optimizer for one network, with its gradient clipped."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
    optimizer.step()


# ----------------------------------------------------------------------------------------------------------------------
# diagnosis

RANKS = "effective", "pca99", "srank", "feature", "torch", "stable"


def spectrum(h):
    """
    {name: rank} of features h (N samples, C), fp32 or fp64, not centred: is the representation collapsing?

        s = singular values of h        p = s / sum(s)
        effective    exp(-sum p log p)                                 Roy & Vetterli 2007
        pca99        the fewest directions that hold 99 % of sum(s^2)
        srank        the fewest directions that hold 99 % of sum(s)    Kumar et al. 2021
        feature      the number of s / sqrt(N) above .01               Lyle et al. 2022
        torch        the number of s above rounding errors, as torch.linalg.matrix_rank counts
        stable       sum(s^2) / max(s)^2

    All lie in [0, min(N, C)]. They are 0 if h is zero, and nan if h is not finite. The paper's code has the first five.
    """
    finite = h.isfinite().all()
    if not finite or not h.any():
        return dict.fromkeys(RANKS, 0 if finite else math.nan)
    s = torch.linalg.svdvals(h.cpu() if h.is_mps else h)                # descending; torch 2.13 has no kernel for MPS
    energy = s.square()
    ranks = (
        torch.special.entr(s / s.sum()).sum().exp(),
        fewest(energy),
        fewest(s),
        (s / len(h) ** 0.5 > 0.01).sum(),
        (s > max(h.shape) * torch.finfo(h.dtype).eps * s[0]).sum(),
        energy.sum() / energy[0],
    )
    return {name: rank.item() for name, rank in zip(RANKS, ranks)}


def fewest(values):
    """The number of leading values, sorted from large to small, that make up 99 % of their sum."""
    return (values.cumsum(0) < 0.99 * values.sum()).sum() + 1


def dead_units(h):
    """(units,) bool: the columns of h (samples, units) that are never above 0. The same before and after ReLU."""
    return (h <= 0).all(0)


@torch.no_grad()
def diagnose(actor, critic, seen, action, log_prob):
    """Features, ratios and policy after training on a rollout: {name: number}."""
    phi = actor[:3](seen)
    log_probs = actor[3:](phi).log_softmax(-1)
    ratio = (log_prob_of(log_probs, action) - log_prob).exp()
    low = ratio[ratio < 1 - CLIP]
    return dict(
        **{f"rank_{name}": rank for name, rank in spectrum(phi.relu()).items()},
        critic_rank=spectrum(critic[:4](seen))["pca99"],
        dead=dead_units(phi).sum().item(),
        norm=phi.norm(dim=-1).mean().item(),
        beyond=((ratio - 1).abs() > CLIP).float().mean().item(),
        # The mean of the ratios below the clip, or the clip itself if all are above it.
        low_ratio=low.mean().item() if len(low) else 1 - CLIP,
        # The variance over states, a mean over actions: does the policy tell states apart?
        policy_variance=log_probs.exp().var(0).mean().item(),
    )


# ----------------------------------------------------------------------------------------------------------------------
# runs


def train(name):
    """Train the run cartpole-EPOCHS-C-SEED. Returns its line of rows.jsonl."""
    epochs, c, seed = map(int, name.split("-")[1:])
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    game = CartPole(PLAYERS, np.random.default_rng(seed))
    nets = network(4, 2), network(4, 1)
    optimizer = torch.optim.Adam([*nets[0].parameters(), *nets[1].parameters()], LR)
    history = []
    for _ in range(ROLLOUTS):
        rollout = play(game, STEPS, *nets, generator)
        order = list(minibatches(STEPS * PLAYERS, epochs, BATCH, generator))
        learn(*nets, optimizer, rollout, order, order, c)
        history.append(dict(points=np.mean(game.ended[-64:]), **diagnose(*nets, *rollout[0][:3])))
    curves = {
        key: np.reshape([point[key] for point in history], (POINTS, -1)).mean(1).round(4).tolist()
        for key in history[0]}
    return dict(name=name, curves=curves)


def run_missing(path, arms, seeds, train):
    """
    Make the runs that the file at `path` lacks, one for each ARM-SEED: train(name) -> row. Returns all of its rows.

    Each row is written when its run ends. ValueError if the file has no rows and no run is wanted.
    """
    rows = kit.read_rows(path) if os.path.exists(path) else []
    done = [row["name"] for row in rows]
    names = [f"{arm}-{seed}" for seed in range(2, 2 + seeds) for arm in arms]
    torch.set_num_threads(1)        # the bits of a run must not depend on the number of cores
    for name in tqdm([name for name in names if name not in done], unit="run", disable=None):
        rows.append(train(name))
        kit.write_rows(path, rows)
    return kit.read_rows(path)


def last_fifths(rows):
    """Triples (measure, arm, mean of the last fifth of its curve), for kit.group()."""
    for row in rows:
        _, epochs, c, _ = row["name"].split("-")
        for key, curve in row["curves"].items():
            yield key, f"{epochs} epochs, c = {c}", np.mean(curve[-POINTS // 5:])


HEAD = """# When PPO collapses, at the size of a laptop

In 122,880 steps of CartPole, twenty epochs instead of four raise the norm of the pre-activations from 4.16 ± 0.58 to
9.10 ± 3.40, and the rank of the features does not collapse (five seeds).

`python -m papers.ppo_collapse` writes this page: CartPole, 60 rollouts (122,880 steps) per run, five seeds. ± is half
of the 95 % interval by Student's t, over seeds, of the mean of the last fifth of each run.

![ratios of two states that share one feature](two_states.png)

The toy problem: of two states that share one feature, x ends at a ratio of 1.10, its clip, and its gradient pushes the
ratio of y to 1.25. Below: the norm in CartPole; c is the weight of PFO.

![norm of the pre-activations](norm.png)
"""

NOTES = """
`rank_*`: ranks of the actor's last hidden layer. `critic_rank`: the critic's `pca99`. `dead`:
units of 128 that are 0 in all states. `norm`: of the pre-activations. `beyond`: the share of ratios beyond the clip.
`low_ratio`: the mean of those below 0.8.

## Findings

Paired by seed. Reproduced: with twenty epochs instead of four and without PFO, the norm doubles (4.94 ± 3.31 more),
more ratios end beyond the clip, and farther beyond, and 13 ± 8 more units are dead, in five seeds of five. PFO holds
the norm between 1.8 and 2.7. At twenty epochs it keeps 108 to 110 of 128 units alive, against 50 without it, and
doubles two ranks (`srank`, `torch`).

Not reproduced: a collapse of the rank. Without PFO, three of the six ranks (`effective`, `pca99`, `feature`) are
*higher* with twenty epochs than with four, in five seeds of five; `torch` is lower (by 11 ± 8); `srank` and `stable` do
not differ significantly. PFO gains no points either. Twenty epochs cost CartPole 44 ± 19 of its 493 points at c = 10;
the loss without PFO (30 ± 31) and at c = 1 (33 ± 61) is not significant. Two seeds of an earlier trial had promised a
gain.

Published (Phoenix, 100M frames, four to eight epochs): PCA rank from 250 to 1, norm from 100 to 8,000, ratios far
beyond the clip, and the return lost; with PFO a rank of 240, a norm of 80 and three times the return. Our 0.1M steps of
a game that two layers solve are too short and too easy for that. We compared six arms by thirteen numbers each.
"""


def main():
    x, y = two_states(0.1163, torch.tensor([0.5153, -0.4414]), 3)
    curves = {"state x": x, "state y = 3 x": y}
    kit.plot_curves(f"{results}/two_states.png", range(21), curves, "step of SGD", "ratio, clipped at 1.1")
    rows = run_missing(f"{results}/rows.jsonl", ARMS, seeds, train)
    measures = kit.group(last_fifths(rows))
    kit.plot_intervals(f"{results}/norm.png", measures["norm"], "norm of the pre-activations (c: weight of PFO)")
    kit.write(f"{results}/table.md", f"{HEAD}\n{kit.pivot('|', measures.items())}{NOTES}")


if __name__ == "__main__":
    run(main, globals())
