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
import json
import os
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
from tokenizer import read_json

only = ""                       # one run alone, GAME-EPOCHS-C-SEED
seeds = 5                       # of networks, actions and games
first_seed = 2                  # with 1 the settings were chosen
scale = 1.0                     # of the number of rollouts; to try whether it runs
jobs = 0                        # runs at a time, a thread each; 0 = one for each core
out = "out/ppo_collapse"        # a folder for each run
results = "results/ppo_collapse"    # rows.jsonl, table.md, two_states.png, collapse.png
report = False                  # run nothing: tables and pictures again from rows.jsonl

EPOCHS, COEFFICIENTS = (4, 20), (0, 1, 10)
PLAYERS, STEPS, BATCH = 16, 128, 256        # a rollout is 16 games, 128 steps of each
GAMMA, LAMBDA, CLIP, ENTROPY, CLIP_NORM = 0.99, 0.95, 0.2, 0.01, 0.5
WIDTH = 128
POINTS = 20                                 # of a curve: means of as many stretches of the run


# ----------------------------------------------------------------------------------------------------------------------
# the argument in one parameter


def two_states(feature, weight, alpha=3.0, lr=1.5, epsilon=0.1, steps=20):
    """
    The ratios of two states, clipped at 1 + epsilon, when one scalar feature carries both: (of x, of y), steps + 1 each.

    Two actions; the first is good, A = 1, in both states. Their logits are weight (2,) times the feature, which is
    `feature` in x and alpha times that in y. SGD takes x and y by turns. At alpha = 1 both stop at the clip, at
    alpha = -1 they undo each other, and at 3 y is driven past its clip by x, whose own ratio is not there yet.
    The published toy problem (its toy_problem.py), number for number.
    """
    weight = weight.clone().requires_grad_()
    states = feature * torch.tensor([1.0, alpha])

    def good():
        return torch.outer(states, weight).log_softmax(-1)[:, 0].exp()
    before = good().detach()
    ratios = [torch.ones(2)]
    for step in range(steps):
        ratio = good() / before
        loss = -torch.minimum(ratio, ratio.clamp(1 - epsilon, 1 + epsilon))
        grad, = torch.autograd.grad(loss[step % 2], weight)
        with torch.no_grad():
            weight -= lr * grad
            ratios.append(good() / before)
    return torch.stack(ratios).T.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# two games, many at a time. step(actions) -> rewards, whether each game is over; what is over begins again


class CartPole:
    """
    A pole is to stay upright on a cart: a push to the left (0) or to the right (1), 1 point a step, 500 at most.

    The equations of gymnasium's CartPole-v1, by Euler's rule in fp64.
    """
    inputs, actions, limit = 4, 2, 500
    rollouts, lr = 60, 2.5e-3

    def __init__(self, n, rng):
        self.rng = rng
        self.state = rng.uniform(-0.05, 0.05, (n, 4))      # place, speed, angle, its speed
        self.age = np.zeros(n, int)

    def seen(self):
        return self.state.astype(np.float32)

    def step(self, actions):
        x, v, angle, w = self.state.T
        push = np.where(actions == 1, 10.0, -10.0)
        cos, sin = np.cos(angle), np.sin(angle)
        # Masses 1 and .1, half of the pole's length .5.
        whole = (push + 0.05 * w**2 * sin) / 1.1
        turn = (9.8 * sin - cos * whole) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        drive = whole - 0.05 * turn * cos / 1.1
        self.state += 0.02 * np.stack([v, drive, w, turn], axis=1)
        self.age += 1
        fallen = (abs(self.state[:, 0]) > 2.4) | (abs(self.state[:, 2]) > np.radians(12))
        over = fallen | (self.age == self.limit)
        self.state[over] = self.rng.uniform(-0.05, 0.05, (over.sum(), 4))
        self.age[over] = 0
        return np.ones(len(over)), over


class Breakout:
    """
    A ball, a paddle (0 stays, 1 to the left, 2 to the right) and three rows of bricks, a point for each.

    The rules are those of MinAtar's Breakout (arXiv 1903.03176) without sticky actions. Four images of 10 x 10: paddle,
    ball, where the ball was, bricks. A game is cut off after 1,000 steps.
    """
    inputs, actions, limit = 400, 3, 1000
    rollouts, lr = 200, 1e-2

    def __init__(self, n, rng):
        self.rng = rng
        self.each = np.arange(n)
        self.x, self.y, self.dx, self.dy, self.last_x, self.last_y, self.paddle, self.age = np.zeros((8, n), int)
        self.bricks = np.zeros((n, 10, 10), bool)
        self.struck = np.zeros(n, bool)         # a brick, at the step before
        self.begin(np.ones(n, bool))

    def begin(self, over):
        right = self.rng.integers(2, size=over.sum()) == 1
        self.x[over] = np.where(right, 9, 0)
        self.dx[over] = np.where(right, -1, 1)
        self.y[over], self.dy[over] = 3, 1
        self.paddle[over] = 4
        self.last_x[over], self.last_y[over] = self.x[over], self.y[over]
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
        self.paddle = np.clip(self.paddle + (actions == 2) - (actions == 1), 0, 9)
        self.last_x, self.last_y = self.x, self.y
        x, y = self.x + self.dx, self.y + self.dy
        wall = (x < 0) | (x > 9)
        self.dx = np.where(wall, -self.dx, self.dx)
        x = np.clip(x, 0, 9)
        ceiling = y < 0
        y = np.maximum(y, 0)
        brick = self.bricks[self.each, y, x] & ~ceiling
        # Only the first of several bricks in a row counts: a ball that has turned around passes through the next.
        point = brick & ~self.struck
        self.bricks[self.each[point], y[point], x[point]] = False
        floor = (y == 9) & ~brick
        self.bricks[floor & ~self.bricks.any((1, 2)), 1:4] = True
        caught = floor & (self.x == self.paddle)
        edge = floor & ~caught & (x == self.paddle)
        back = ceiling | point | caught | edge
        self.dy = np.where(back, -self.dy, self.dy)
        self.dx = np.where(edge, -self.dx, self.dx)
        self.x, self.y = x, np.where(back & ~ceiling, self.last_y, y)
        self.struck = brick
        self.age += 1
        over = (floor & ~caught & ~edge) | (self.age == self.limit)
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
    taken = log_probs.gather(1, action[:, None])[:, 0]
    ratio = (taken - old_log_prob).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    surprise = -(log_probs.exp() * log_probs).sum(-1)
    return -gain.mean() - entropy * surprise.mean()


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
        action = torch.multinomial(log_probs.exp(), 1, generator=generator)
        value = critic(seen)[0][:, 0]
        reward, over = game.step(action[:, 0].numpy())
        scores += reward
        ended.extend(scores[over])
        scores[over] = 0
        taken = log_probs.gather(1, action)[:, 0]
        rows.append((seen, action[:, 0], taken, phi, value, torch.from_numpy(reward).float(), torch.from_numpy(over)))
    seen, action, taken, phi, values, rewards, over = map(torch.stack, zip(*rows))
    next_value = critic(torch.from_numpy(game.seen()))[0][:, 0]
    advantage = advantages(rewards, values, over, next_value)
    rollout = dict(seen=seen, action=action, log_prob=taken, phi=phi, advantage=advantage, target=advantage + values)
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
    log_probs = logits.log_softmax(-1)
    taken = log_probs.gather(1, rollout["action"][:, None])[:, 0]
    ratio = (taken - rollout["log_prob"]).exp()
    low = ratio[ratio < 1 - CLIP]
    found = {f"rank_{name}": rank for name, rank in spectrum(phi.relu()).items()}
    found["critic_rank"] = spectrum(critic(rollout["seen"])[1][1].relu())["pca99"]
    found["dead"] = dead_units(phi).sum().item()
    found["norm"] = phi.norm(dim=-1).mean().item()
    found["beyond"] = ((ratio - 1).abs() > CLIP).float().mean().item()
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
    return [f"{game}-{epochs}-{c}-{seed}" for seed in every for game in GAMES for epochs in EPOCHS for c in COEFFICIENTS]


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
    actor, critic = Net(game.inputs, game.actions), Net(game.inputs, 1)
    optimizers = [torch.optim.Adam(net.parameters(), game.lr) for net in (actor, critic)]
    scores, ended = np.zeros(PLAYERS), deque([0.0], maxlen=64)
    history = []
    bar = tqdm(range(rollouts_of(game_name)), name, unit="rollout", disable=None)
    for _ in bar:
        rollout = play(game, actor, critic, generator, scores, ended)
        learn(actor, critic, optimizers, rollout, epochs, c, generator)
        seen = diagnose(actor, critic, rollout)
        history.append(dict(points=statistics.fmean(ended), **seen))
        bar.set_postfix_str(f"{history[-1]['points']:.1f} points, rank {seen['rank_pca99']}, norm {seen['norm']:.1f}")
    stretches = np.array_split(np.arange(len(history)), POINTS)
    curves = {key: [round(statistics.fmean(history[i][key] for i in stretch), 4) for stretch in stretches]
              for key in history[0]}
    row = dict(name=name, game=game_name, epochs=epochs, c=c, seed=seed, rollouts=len(history), curves=curves)
    return row | dict(plasticity=plasticity(actor, critic, rollout["seen"], generator))


def run_of(name):
    """A run in a process of its own, unless it has been run: its row."""
    folder = f"{out}/{kit.digest([name, rollouts_of(parsed(name)[0])])}"
    done = f"{folder}/row.json"
    kit.call(folder, "run", done, "studies.ppo_collapse", f"--only={name}", f"--scale={scale}", f"--out={folder}")
    return read_json(done)


# ----------------------------------------------------------------------------------------------------------------------
# what came of it

COLUMNS = dict(points="points", norm="pre-activation norm", dead=f"dead of {WIDTH}", rank_pca99="PCA rank",
               low_ratio="ratios below .8", policy_variance="policy variance")


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
    lines = [
        "# When PPO collapses, at the size of a laptop", "",
        "What `python -m studies.ppo_collapse` came to; the code is `studies/ppo_collapse.py`. "
        f"{len({row['seed'] for row in rows})} seeds; ± is half of the 95 % interval by Student's t, of the mean of "
        "the last fifth of each run.", "",
        "![one feature, two states](two_states.png)", "", "![over the runs](collapse.png)", ""]
    for game in GAMES:
        groups = groups_of(rows, game)
        if not groups:
            continue
        count = next(iter(groups.values()))[0]["rollouts"]
        lines += [f"## {game}: {count} rollouts, {count * PLAYERS * STEPS:,} steps", ""]
        body, ranks = [], []
        for (epochs, c), group in groups.items():
            arm = f"| {epochs} epochs, c = {c} | "
            cells = [kit.interval([last(row, key) for row in group], 3 if "_" in key and key != "rank_pca99" else 1)
                     for key in COLUMNS]
            left = [kit.interval([row["plasticity"][part] for row in group], 4) for part in ("policy", "value")]
            body.append(arm + " | ".join([*cells, *left]) + " |")
            kinds = [kit.interval([last(row, f"rank_{name}") for row in group], 1) for name in RANKS]
            ranks.append(arm + " | ".join([*kinds, kit.interval([last(row, "critic_rank") for row in group], 1)]) + " |")
        lines += kit.table(f"| arm | {' | '.join(COLUMNS.values())} | refit: KL | refit: error |", body)
        lines += ["", "The actor's rank by each definition, and the critic's (PCA):", ""]
        lines += kit.table(f"| arm | {' | '.join(RANKS)} | critic |", ranks) + [""]
    return "\n".join([*lines, NOTES])


NOTES = ""


def draw_two_states(path):
    """The argument in one parameter: what the clip does and does not hold."""
    figure, axes = pyplot().subplots(1, 3, figsize=(11, 3.4), sharey=True)
    for axis, alpha in zip(axes, (-1, 1, 3)):
        for ratios, name in zip(two_states(0.1163, torch.tensor([0.5153, -0.4414]), alpha), "xy"):
            axis.plot(ratios, marker=".", label=f"state {name}")
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
            for i, ((epochs, c), group) in enumerate(groups_of(rows, game).items()):
                curves = np.array([row["curves"][key] for row in group])
                rollouts = (np.arange(POINTS) + 0.5) * group[0]["rollouts"] / POINTS
                style = "-" if epochs == max(EPOCHS) else "--"
                colour = f"C{i % len(COEFFICIENTS)}"
                axis.plot(rollouts, curves.mean(0), style, color=colour, label=f"{epochs} epochs, c = {c}")
                axis.fill_between(rollouts, curves.min(0), curves.max(0), color=colour, alpha=0.1)
            axis.set(title=f"{game}: {COLUMNS[key]}", xlabel="rollouts")
            axis.grid(alpha=0.2)
    axes[0][0].legend(fontsize=7)
    finish(figure, path)


def refuse_others(lines, asked):
    """ValueError if rows.jsonl holds runs that this command would not make again: they would be lost."""
    if not os.path.exists(lines):
        return
    foreign = [row["name"] for row in kit.read_rows(lines)
               if row["name"] not in asked or row["rollouts"] != rollouts_of(row["game"])]
    if foreign:
        raise ValueError(f"{lines} holds runs of other settings, like {foreign[0]}: name another --results")


def main():
    if only:
        kit.write(f"{out}/row.json", json.dumps(trained(only)))
        return
    lines = f"{results}/rows.jsonl"
    if not report:
        if seeds < 1 or scale <= 0:
            raise ValueError(f"seeds={seeds}, scale={scale}: want at least one seed, and a share of the rollouts")
        asked = arms()
        refuse_others(lines, asked)
        runs = kit.in_parallel(jobs, lambda name, device: run_of(name), asked)
        kit.write_rows(lines, list(tqdm(runs, "runs", len(asked), unit="run")))
    rows = kit.rows_to_report(lines, "studies.ppo_collapse")
    kit.write(f"{results}/table.md", table_md(rows))
    draw_two_states(f"{results}/two_states.png")
    draw(rows, f"{results}/collapse.png")
    print(table_md(rows))


if __name__ == "__main__":
    run(main, globals())
