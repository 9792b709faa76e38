"""
When PPO collapses: the longer it trains on each rollout, the larger its features grow, until the clip cannot hold it.

    L = - E min(r A, clip(r, 1 - e, 1 + e) A)  -  c_H H  +  c E (phi - phi_old)^2            r = pi(a|s) / pi_old(a|s)

The clip takes a sample's gradient away once its ratio r has left 1 ± e. It does not hold r there: where the features
of two states point the same way, the gradient of one goes on to move the other. `two_states` is that argument in one
parameter, twenty steps of SGD, after which a ratio is 1.25 that was clipped at 1.10. The last term, the proximal
feature loss (PFO), asks the pre-activations phi of the last hidden layer to stay near what they were when the rollout
was played.

This is not Apertus. It is "No Representation, No Trust" (arXiv 2405.00662), by authors of QRPO, who play Atari for
100M frames. Here two games are played that fit a laptop: CartPole, and Breakout on 10 x 10 pixels (the rules are
MinAtar's). Both networks, actor and critic, are two layers of 128 ReLUs. Epochs on each rollout are 4 or 20,
c is 0, 1 or 10. posttrain/collapse.py defines ranks and dead units, and watches QRPO by the same functions.

$ python -m studies.ppo_collapse                        # both games, five seeds; goes on where it was stopped
$ python -m studies.ppo_collapse --only=cartpole-20-1-2 # one run: game, epochs, c, seed
$ python -m studies.ppo_collapse --report               # results/ppo_collapse again, from rows.jsonl
"""

import sys

if __name__ == "__main__" and not __package__:
    print("ppo_collapse.py: start it from the project's root, python -m studies.ppo_collapse", file=sys.stderr)
    sys.exit(2)

import copy
import itertools
import json
import statistics
from collections import deque

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from configurator import run
from engine.plot import finish, pyplot
from posttrain.collapse import RANKS, dead_units, spectrum
from studies import kit

only = ""                       # one run alone, GAME-EPOCHS-C-SEED
seeds = 5                       # of networks, actions and games
first_seed = 2                  # with 1 the settings were chosen
scale = 1.0                     # of the number of rollouts; to try whether it runs
jobs = 0                        # runs at a time, a thread each; 0 = one for each core
out = "out/ppo_collapse"        # a folder for each run
results = "results/ppo_collapse"    # rows.jsonl, table.md, two_states.png, collapse.png
report = False                  # run nothing: tables and pictures again from rows.jsonl

EPOCHS = 4, 20
COEFFICIENTS = 0, 1, 10
PLAYERS = 16            # a rollout is 128 steps of each
STEPS = 128
BATCH = 256
GAMMA = 0.99            # a point a step later counts so much
LAMBDA = 0.95
CLIP = 0.2
ENTROPY = 0.01
CLIP_NORM = 0.5         # of the gradient, of each network for itself
WIDTH = 128
POINTS = 20             # of a curve: means of as many stretches of the run


# ----------------------------------------------------------------------------------------------------------------------
# the argument in one parameter


def two_states(feature, weight, alpha=3.0, lr=1.5, epsilon=0.1, steps=20):
    """
    The ratios of two states, clipped at 1 + epsilon, when one feature carries both: (of x, of y), steps + 1 each.

    Two actions; the first is good, A = 1, in both states. Their logits are weight (2,) times the feature, which is
    `feature` in x and alpha times that in y. SGD takes x and y by turns. At alpha = 1 both stop at the clip, at
    alpha = -1 they undo each other, and at 3 y is driven past its clip by x, whose own ratio is not there yet.
    The published toy problem (its toy_problem.py), number for number.
    """
    weight = weight.clone().requires_grad_()
    states = feature * torch.tensor([1.0, alpha])

    def good():
        """The probability of the good action in each state."""
        logits = torch.outer(states, weight)
        return logits.log_softmax(-1)[:, 0].exp()

    before = good().detach()
    ratios = [torch.ones(2)]
    for step in range(steps):
        ratio = good() / before
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        gain = torch.minimum(ratio, clipped)
        grad, = torch.autograd.grad(gain[step % 2], weight)
        with torch.no_grad():
            weight += lr * grad
            ratios.append(good() / before)
    return torch.stack(ratios).T.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# two games, many at a time. step(actions) -> rewards, whether each game is over; what is over begins again


class CartPole:
    """
    A pole is to stay upright on a cart: a push to the left (0) or to the right (1), 1 point a step, 500 at most.

    The equations of gymnasium's CartPole-v1, by Euler's rule in fp64.
    """
    inputs = 4
    actions = 2
    limit = 500
    rollouts = 60
    lr = 2.5e-3

    def __init__(self, n, rng):
        self.rng = rng
        self.state = rng.uniform(-0.05, 0.05, (n, 4))      # place, speed, angle, its speed
        self.age = np.zeros(n, int)

    def seen(self):
        return self.state.astype(np.float32)

    def step(self, actions):
        _, v, angle, w = self.state.T
        push = np.where(actions == 1, 10.0, -10.0)
        cos = np.cos(angle)
        sin = np.sin(angle)
        # Masses 1 and .1, half of the pole's length .5.
        whole = (push + 0.05 * w**2 * sin) / 1.1
        inertia = 0.5 * (4 / 3 - 0.1 * cos**2 / 1.1)
        turn = (9.8 * sin - cos * whole) / inertia
        drive = whole - 0.05 * turn * cos / 1.1
        self.state += 0.02 * np.stack([v, drive, w, turn], axis=1)
        self.age += 1
        outside = abs(self.state[:, 0]) > 2.4
        fallen = abs(self.state[:, 2]) > np.radians(12)
        late = self.age == self.limit
        over = outside | fallen | late
        self.state[over] = self.rng.uniform(-0.05, 0.05, (over.sum(), 4))
        self.age[over] = 0
        return np.ones(len(over)), over


class Breakout:
    """
    A ball, a paddle (0 stays, 1 to the left, 2 to the right) and three rows of bricks, a point for each.

    The rules are those of MinAtar's Breakout (arXiv 1903.03176) without sticky actions. Four images of 10 x 10: paddle,
    ball, where the ball was, bricks. A game is cut off after 1,000 steps.
    """
    inputs = 400
    actions = 3
    limit = 1000
    rollouts = 200
    lr = 1e-2

    def __init__(self, n, rng):
        self.rng = rng
        self.each = np.arange(n)
        self.x, self.y, self.dx, self.dy = np.zeros((4, n), int)       # of the ball: place, direction
        self.last_x, self.last_y, self.paddle, self.age = np.zeros((4, n), int)
        self.bricks = np.zeros((n, 10, 10), bool)
        self.struck = np.zeros(n, bool)         # a brick, at the step before
        self.begin(np.ones(n, bool))

    def begin(self, over):
        right = self.rng.integers(2, size=over.sum()) == 1
        self.x[over] = np.where(right, 9, 0)
        self.dx[over] = np.where(right, -1, 1)
        self.y[over] = 3
        self.dy[over] = 1
        self.paddle[over] = 4
        self.last_x[over] = self.x[over]
        self.last_y[over] = self.y[over]
        self.bricks[over] = False
        self.bricks[over, 1:4] = True
        self.struck[over] = False
        self.age[over] = 0

    def seen(self):
        images = np.zeros((len(self.each), 4, 10, 10), np.float32)
        images[self.each, 0, 9, self.paddle] = 1
        images[self.each, 1, self.y, self.x] = 1
        images[self.each, 2, self.last_y, self.last_x] = 1
        images[:, 3] = self.bricks
        return images.reshape(len(images), -1)

    def step(self, actions):
        self.paddle = self.paddle + (actions == 2) - (actions == 1)
        self.paddle = np.clip(self.paddle, 0, 9)
        self.last_x = self.x
        self.last_y = self.y
        x = self.x + self.dx
        y = self.y + self.dy
        wall = (x < 0) | (x > 9)
        self.dx = np.where(wall, -self.dx, self.dx)
        x = np.clip(x, 0, 9)
        ceiling = y < 0
        y = np.maximum(y, 0)
        brick = self.bricks[self.each, y, x] & ~ceiling
        # Only the first of several bricks in a row counts: a ball that has turned around passes through the next.
        point = brick & ~self.struck
        hit = self.each[point]
        self.bricks[hit, y[point], x[point]] = False
        floor = (y == 9) & ~brick
        cleared = ~self.bricks.any((1, 2))
        self.bricks[floor & cleared, 1:4] = True
        caught = floor & (self.x == self.paddle)
        edge = floor & ~caught & (x == self.paddle)
        back = ceiling | point | caught | edge
        self.dy = np.where(back, -self.dy, self.dy)
        self.dx = np.where(edge, -self.dx, self.dx)
        self.x = x
        self.y = np.where(back & ~ceiling, self.last_y, y)
        self.struck = brick
        self.age += 1
        lost = floor & ~caught & ~edge
        late = self.age == self.limit
        over = lost | late
        self.begin(over)
        return point.astype(float), over


GAMES = dict(cartpole=CartPole, breakout=Breakout)


# ----------------------------------------------------------------------------------------------------------------------
# PPO


class Net(nn.Module):
    """x (N, inputs) -> outputs (N, outputs), and the pre-activations of both hidden layers, (N, width) each."""

    def __init__(self, inputs, outputs, width=WIDTH):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        phi1 = self.first(x)
        phi2 = self.second(phi1.relu())
        return self.head(phi2.relu()), (phi1, phi2)


def policy_loss(log_probs, action, old_log_prob, advantage, clip=CLIP, entropy=ENTROPY):
    """
    PPO-Clip with a bonus for entropy, a mean over samples.

    log_probs (N, actions) of the network in training; old_log_prob (N,) of the action that was taken, as the rollout
    had it; advantage (N,), normalised here over the minibatch.
    """
    spread = advantage.std(correction=0).clamp(min=1e-6)
    advantage = (advantage - advantage.mean()) / spread
    ratio = (log_prob_of(log_probs, action) - old_log_prob).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    surprise = -(log_probs.exp() * log_probs).sum(-1)
    return -gain.mean() - entropy * surprise.mean()


def log_prob_of(log_probs, action):
    """(..., actions) and the actions that were taken (...) -> their log-probabilities (...)."""
    return log_probs.gather(-1, action[..., None])[..., 0]


def feature_loss(phi, phi_old):
    """PFO: the squared drift of pre-activations since the rollout, a mean over samples and over units."""
    return (phi - phi_old).square().mean()


def advantages(rewards, values, over, next_value):
    """
    Generalised advantage estimation; rewards, values, over: (steps, players), next_value (players,).

    A game that was cut off counts as one that ended, as in the published code.
    """
    found = torch.zeros_like(rewards)
    later = torch.zeros_like(next_value)
    for t in reversed(range(len(rewards))):
        goes_on = (~over[t]).float()
        surprise = rewards[t] + GAMMA * next_value * goes_on - values[t]
        later = surprise + GAMMA * LAMBDA * goes_on * later
        found[t] = later
        next_value = values[t]
    return found


@torch.no_grad()
def play(game, actor, critic, generator, scores, ended):
    """
    A rollout of STEPS: {name: tensor of (STEPS * players, ...)}. Adds what each finished game scored to `ended`.

    scores (players,): points of the games that are going on.
    """
    rows = []
    for _ in range(STEPS):
        seen = torch.from_numpy(game.seen())
        logits, (_, phi) = actor(seen)
        log_probs = logits.log_softmax(-1)
        action = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
        value = critic(seen)[0][:, 0]
        reward, over = game.step(action.numpy())
        scores += reward
        ended.extend(scores[over])
        scores[over] = 0
        log_prob = log_prob_of(log_probs, action)
        reward = torch.from_numpy(reward).float()
        rows.append((seen, action, log_prob, phi, value, reward, torch.from_numpy(over)))
    seen, action, log_prob, phi, values, rewards, over = map(torch.stack, zip(*rows))
    next_value = critic(torch.from_numpy(game.seen()))[0][:, 0]
    advantage = advantages(rewards, values, over, next_value)
    rollout = dict(
        seen=seen,
        action=action,
        log_prob=log_prob,
        phi=phi,
        advantage=advantage,
        target=advantage + values,
    )
    return {name: tensor.flatten(0, 1) for name, tensor in rollout.items()}


def step(net, optimizer, loss):
    """One step of Adam, with the gradient of this network clipped for itself."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
    optimizer.step()


def learn(actor, critic, optimizers, rollout, epochs, c, generator):
    """So many epochs of minibatches over a rollout."""
    for_actor, for_critic = optimizers
    for _ in range(epochs):
        order = torch.randperm(len(rollout["seen"]), generator=generator)
        for rows in order.split(BATCH):
            batch = {name: tensor[rows] for name, tensor in rollout.items()}
            logits, (_, phi) = actor(batch["seen"])
            log_probs = logits.log_softmax(-1)
            loss = policy_loss(log_probs, batch["action"], batch["log_prob"], batch["advantage"])
            step(actor, for_actor, loss + c * feature_loss(phi, batch["phi"]))
            value = critic(batch["seen"])[0][:, 0]
            step(critic, for_critic, 0.5 * (value - batch["target"]).square().mean())


# ----------------------------------------------------------------------------------------------------------------------
# what is watched


@torch.no_grad()
def diagnose(actor, critic, rollout):
    """Numbers of both networks after the epochs on a rollout: features, ratios, policy."""
    logits, (_, phi) = actor(rollout["seen"])
    _, (_, phi_critic) = critic(rollout["seen"])
    log_probs = logits.log_softmax(-1)
    ratio = (log_prob_of(log_probs, rollout["action"]) - rollout["log_prob"]).exp()
    beyond = (ratio - 1).abs() > CLIP
    low = ratio[ratio < 1 - CLIP]
    found = {f"rank_{name}": rank for name, rank in spectrum(phi.relu()).items()}
    found["critic_rank"] = spectrum(phi_critic.relu())["pca99"]
    found["dead"] = dead_units(phi).sum().item()
    found["norm"] = phi.norm(dim=-1).mean().item()
    found["beyond"] = beyond.float().mean().item()
    # How far those are that fell below the clip, on average; the clip itself if none did.
    found["low_ratio"] = low.mean().item() if len(low) else 1 - CLIP
    found["policy_variance"] = policy_variance(log_probs)
    return found


def policy_variance(log_probs):
    """How differently a policy (N, actions) acts in different states: the variance over states, a mean over actions."""
    return log_probs.exp().var(0).mean().item()


def refit(net, goal, seen, rows, lr, distance):
    """
    Fit a network to another one's outputs, one step of Adam for each tensor of row numbers. The losses, step by step.

    Plasticity: a network whose features have collapsed cannot, where a fresh one can (the published capacity.py).
    """
    optimizer = torch.optim.Adam(net.parameters(), lr)
    losses = []
    for chosen in rows:
        with torch.no_grad():
            want = goal(seen[chosen])[0]
        loss = distance(net(seen[chosen])[0], want)
        step(net, optimizer, loss)
        losses.append(loss.item())
    return losses


def divergence(logits, goal):
    """KL(goal || logits), a mean over samples."""
    goal = goal.log_softmax(-1)
    return (goal.exp() * (goal - logits.log_softmax(-1))).sum(-1).mean()


def squared_error(value, goal):
    return (value - goal).square().mean()


def plasticity(actor, critic, seen, generator):
    """What is left of KL and squared error after an epoch of fitting random networks: {policy: .., value: ..}."""
    found = {}
    for name, net, distance in (("policy", actor, divergence), ("value", critic, squared_error)):
        fresh = Net(net.first.in_features, net.head.out_features)
        copied = copy.deepcopy(net)
        rows = torch.randperm(len(seen), generator=generator).split(BATCH)
        refit(copied, fresh, seen, rows, 2.5e-4, distance)
        with torch.no_grad():
            found[name] = distance(copied(seen)[0], fresh(seen)[0]).item()
    return found


# ----------------------------------------------------------------------------------------------------------------------
# the runs


def arms():
    """The names of all runs: game, epochs, c, seed."""
    every = range(first_seed, first_seed + seeds)
    every_arm = itertools.product(every, GAMES, EPOCHS, COEFFICIENTS)
    return [f"{game}-{epochs}-{c}-{seed}" for seed, game, epochs, c in every_arm]


def parsed(name):
    """GAME-EPOCHS-C-SEED as (game, epochs, c, seed). ValueError for anything else."""
    game, *numbers = name.split("-")
    if game not in GAMES or len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"only={name}: want GAME-EPOCHS-C-SEED, like cartpole-20-1-2; games: {', '.join(GAMES)}")
    return game, *map(int, numbers)


def rollouts_of(game):
    return max(POINTS, round(scale * GAMES[game].rollouts))


def trained(name):
    """One run, as a line of rows.jsonl. Curves are means of POINTS stretches of the run."""
    game_name, epochs, c, seed = parsed(name)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    game = GAMES[game_name](PLAYERS, np.random.default_rng(seed))
    actor = Net(game.inputs, game.actions)
    critic = Net(game.inputs, 1)
    optimizers = [torch.optim.Adam(net.parameters(), game.lr) for net in (actor, critic)]
    scores = np.zeros(PLAYERS)
    ended = deque([0.0], maxlen=64)         # scores of the last games
    history = []
    bar = tqdm(range(rollouts_of(game_name)), name, unit="rollout", disable=None)
    for _ in bar:
        rollout = play(game, actor, critic, generator, scores, ended)
        learn(actor, critic, optimizers, rollout, epochs, c, generator)
        found = dict(points=statistics.fmean(ended), **diagnose(actor, critic, rollout))
        history.append(found)
        bar.set_postfix_str("{points:.1f} points, rank {rank_pca99}, norm {norm:.1f}".format(**found))
    left = plasticity(actor, critic, rollout["seen"], generator)
    curves = {key: stretches([found[key] for found in history]) for key in found}
    return dict(
        name=name,
        game=game_name,
        epochs=epochs,
        c=c,
        seed=seed,
        rollouts=len(history),
        curves=curves,
        plasticity=left,
    )


def stretches(values):
    """The means of POINTS stretches of a list, of lengths as equal as can be."""
    return [round(statistics.fmean(part.tolist()), 4) for part in np.array_split(values, POINTS)]


# ----------------------------------------------------------------------------------------------------------------------
# what came of it

# key: its name, and digits behind the point.
COLUMNS = dict(
    points=("points", 1),
    norm=("pre-activation norm", 1),
    dead=(f"dead of {WIDTH}", 1),
    rank_pca99=("PCA rank", 1),
    beyond=("ratios beyond the clip", 2),
    low_ratio=("mean of those below .8", 2),
    policy_variance=("policy variance", 3),
)


def last(row, key):
    """A number of a run: the mean of its last fifth."""
    return statistics.fmean(row["curves"][key][-POINTS // 5:])


def groups_of(rows, game):
    """{(epochs, c): the runs of that arm} of a game."""
    found = {}
    for row in rows:
        if row["game"] == game:
            found.setdefault((row["epochs"], row["c"]), []).append(row)
    return found


def table_md(rows):
    """The tables: a pure function of the runs."""
    count = len({row["seed"] for row in rows})
    lines = [
        "# When PPO collapses, at the size of a laptop", "",
        f"What `python -m studies.ppo_collapse` came to; the code is `studies/ppo_collapse.py`. {count} seeds; ± is "
        "half of the 95 % interval by Student's t, of the mean of the last fifth of each run.", "",
        "![one feature, two states](two_states.png)", "",
        "![over the runs](collapse.png)", ""]
    for game in GAMES:
        lines += tables_of(game, groups_of(rows, game))
    return "\n".join([*lines, NOTES])


def tables_of(game, groups):
    """Both tables of a game as lines: what is watched, and the ranks by all definitions."""
    watched, ranks = [], []
    for (epochs, c), group in groups.items():
        arm = f"| {epochs} epochs, c = {c} |"

        def cell(key, digits=1):
            return kit.interval([last(row, key) for row in group], digits) + " |"
        cells = [cell(key, digits) for key, (_, digits) in COLUMNS.items()]
        for part, digits in (("policy", 2), ("value", 0)):
            cells.append(kit.interval([row["plasticity"][part] for row in group], digits) + " |")
        watched.append(" ".join([arm, *cells]))
        cells = [cell(f"rank_{name}") for name in RANKS]
        ranks.append(" ".join([arm, *cells, cell("critic_rank")]))
    names = [name for name, _ in COLUMNS.values()]
    count = group[0]["rollouts"]
    return [
        f"## {game}: {count} rollouts, {count * PLAYERS * STEPS:,} steps", "",
        *kit.table(f"| arm | {' | '.join(names)} | refit: KL | refit: error |", watched), "",
        "The actor's rank by each definition, and the critic's by PCA:", "",
        *kit.table(f"| arm | {' | '.join(RANKS)} | critic |", ranks), ""]


NOTES = """## What it shows, and what not

What the paper's chain predicts and is seen here: with more epochs the pre-activations grow (twice in CartPole, seven
times in Breakout), more ratios end beyond the clip, and farther beyond. PFO holds the norm between 2 and 4, brings the
ratios of Breakout back, and in CartPole keeps 110 of 128 units alive where 50 live without it.

What is not seen: that the rank collapses. With twenty epochs it is *higher* than with four in both games, by four of
the six definitions, and PFO lowers it in Breakout. There, at ten times the usual rate, it fell from 33 to 11 over 360
rollouts of twenty epochs in the trial with seed 1, while the norm went from 7 to 250; but that is not what PFO mends.
Nor does PFO gain points: twenty epochs cost CartPole 30 to 45 of its 493, with PFO and without, and with c = 1 one seed
of five never learnt Breakout, at 4 epochs and at 20. Two seeds of an earlier trial had promised a gain in CartPole.

Published (Phoenix, 100M frames, four to eight epochs): PCA rank from 250 to 1, norm from 100 to 8,000, ratios out of
hand, and the return gone; with PFO a rank of 240, a norm of 80 and three times the return. Ours are 0.4M steps of two
games that two layers solve, too short and too easy for that. The rate of Breakout was chosen with seed 1 to provoke it:
at 2.5e-3 ranks only grew. Twelve arms and fifteen numbers of each were compared. A refit is eight steps of Adam.
"""


def draw_two_states(path):
    """The argument in one parameter: what the clip does and does not hold."""
    figure, axes = pyplot().subplots(1, 3, figsize=(11, 3.4), sharey=True)
    weight = torch.tensor([0.5153, -0.4414])
    for axis, alpha in zip(axes, (-1, 1, 3)):
        of_x, of_y = two_states(0.1163, weight, alpha)
        axis.plot(of_x, marker=".", label="state x")
        axis.plot(of_y, marker=".", label="state y")
        axis.axhline(1.1, color="black", linestyle=":", label="clip")
        axis.set(title=f"feature of y = {alpha} x", xlabel="step of SGD, x and y by turns")
        axis.grid(alpha=0.2)
    axes[0].set_ylabel("ratio to the old policy")
    axes[0].legend(fontsize=8)
    finish(figure, path)


def draw(rows, path):
    """Points, norm, dead units and rank over each game: means of the seeds, and the band of all of them."""
    figure, axes = pyplot().subplots(len(GAMES), 4, figsize=(14, 3.4 * len(GAMES)), squeeze=False)
    for line, game in zip(axes, GAMES):
        for axis, key in zip(line, ("points", "norm", "dead", "rank_pca99")):
            draw_arms(axis, key, groups_of(rows, game))
            axis.set(title=f"{game}: {COLUMNS[key][0]}", xlabel="rollouts")
            axis.grid(alpha=0.2)
    axes[0][0].legend(fontsize=7)
    finish(figure, path)


def draw_arms(axis, key, groups):
    """One panel: colours are c, dashed lines are few epochs."""
    for (epochs, c), group in groups.items():
        curves = np.array([row["curves"][key] for row in group])
        x = (np.arange(POINTS) + 0.5) * group[0]["rollouts"] / POINTS
        style = "-" if epochs == max(EPOCHS) else "--"
        colour = f"C{COEFFICIENTS.index(c)}"
        axis.plot(x, curves.mean(0), style, color=colour, label=f"{epochs} epochs, c = {c}")
        axis.fill_between(x, curves.min(0), curves.max(0), color=colour, alpha=0.1)


def main():
    if only:
        kit.write(f"{out}/row.json", json.dumps(trained(only)))
        return
    lines = f"{results}/rows.jsonl"
    if not report:
        if seeds < 1 or scale <= 0:
            raise ValueError(f"seeds={seeds}, scale={scale}: want at least one seed, and a share of the rollouts")
        asked = {name: rollouts_of(parsed(name)[0]) for name in arms()}
        kit.run_each("studies.ppo_collapse", asked, dict(scale=scale), out, lines, jobs)
    rows = kit.rows_to_report(lines, "studies.ppo_collapse")
    kit.write(f"{results}/table.md", table_md(rows))
    draw_two_states(f"{results}/two_states.png")
    draw(rows, f"{results}/collapse.png")
    print(table_md(rows))


if __name__ == "__main__":
    run(main, globals())
