"""
QRPO, quantile reward policy optimisation (arXiv 2507.08068; Apertus report sec. 4), and DPO, REBEL, SimPO on the same
data.

Alignment wants the policy that maximises reward but stays near the reference: pi*(y|x) = pi_ref(y|x) exp(r(x,y) / beta)
/ Z(x). Its log would give a target for every single completion, if Z(x), a sum over all completions, were known. QRPO
makes it known: it replaces the reward by its quantile among the reference model's own completions, which is uniform on
(0, 1) whatever the reward was, so

    R_q(x, y) = Pr_{y' ~ ref}( r(x, y') <= r(x, y) )              quantile(): share of n references that are no better
    beta log Z = beta log( beta (e^(1/beta) - 1) )                beta_log_z(): one number for every prompt
    loss = ( R_q - beta log Z - beta log pi(y|x)/pi_ref(y|x) )^2  LOSSES["qrpo"]: a regression that needs no pairs

At beta .1 the log-probs of 77 % of the reference's completions must fall (beta log Z = .77); at the optimum the mean
quantile is .90, and KL 1.30 nats.

Pairwise methods need no Z: it cancels between a better completion c and a worse one r of the same prompt. With
g = log pi / pi_ref and l = log pi:

    DPO    -log sigmoid(beta (g_c - g_r))                         only the order counts; g has no target
    REBEL  ((r_c - r_r) / beta - (g_c - g_r))^2                   the reward difference is the target
    SimPO  -log sigmoid(beta (l_c/|y_c| - l_r/|y_r|) - beta gamma)     no reference at all

With --length_norm every log-ratio counts per token: beta becomes beta/|y| (Apertus: beta 5; in QRPO at most 0.1).

First, n completions per prompt are sampled from the start model and scored, and their log-probs under it are stored, so
that training holds no second model. With adapters (--lora_r) the reference is the same model with the adapters off.
Then the loop, train(), follows. out/<run>/references caches every stage: a run can be killed anywhere, and --resume
continues it. In the loop, all ranks stop after the current micro-batch and save on SIGTERM, SIGUSR2, or `touch
out/<run>/stop`; before it, a signal ends them at once.
In the log, `tokens` are those of the step's completions, without prompts.

$ python -m posttrain.qrpo --init_from=out/sft --data=prompts.jsonl --rewards=my_reward.py
      # my_reward.py: def reward(prompt, completion): return float, or
      # def rewards(row, completions): return list, which sees all completions of a prompt
$ python -m posttrain.qrpo configs/qrpo_8b.py --data=prompts.jsonl --rewards=my_reward.py --resume
$ python -m posttrain.qrpo --data=prompts.jsonl --rewards=charter:JUDGE,charter.md     # posttrain/judge.py
$ torchrun --nproc_per_node=8 --shutdown-timeout=600 --max-restarts=3 --signals-to-handle=SIGTERM,SIGINT,SIGUSR2 \\
  -m posttrain.qrpo configs/qrpo_8b.py --parallel=fsdp --resume     # the same numbers on more ranks
"""

import sys

if __name__ == "__main__" and not __package__:
    print("qrpo.py: start it from the project's root, python -m posttrain.qrpo", file=sys.stderr)
    sys.exit(2)

import itertools
import math
from contextlib import suppress
from dataclasses import dataclass, replace

# Before torch: engine.hardware sets environment variables that torch reads when it loads.
from engine.hardware import parts_to_compile, pick_device, pick_dtype

# isort: split
import numpy as np
import torch

import convert
from ademamix import build_optimizer, optimizer_step
from chat import describe_dropped
from configurator import run as run_script, settings as read_settings
from engine import memory, restore
from engine.parallel import Ranks, check_finite, distribute, drop_gathered, orderly_exit, reduce_step
from engine.run import Run, StepInterrupted
from posttrain import common
from posttrain.judge import reward_hash
from posttrain.lora import without_lora
from posttrain.losses import (
    BETA,
    BETA_MAX,
    LOSSES,
    Known,
    beta_log_z,
    better_minus_worse,
    correlation,
    discrete_beta_log_z,
    effective_beta,
    quantile,
)
from posttrain.references import END, References, load_reward, read_prompts, sequence_logp
from posttrain.start import frozen_hash
from train import build_model, conclude

# -----------------------------------------------------------------------------
# the run
out = "out/qrpo"                # the run folder
init_from = "out/sft"           # the start model, and the reference: run folder, Hugging Face folder or hub name
data = "prompts.jsonl"          # rows of "messages", the last a user's; maybe "completions", "rewards", "ref_rewards"
rewards = ""                    # FILE.py[:name] | charter:JUDGE[,FILE] | "" = those in the data
references = ""                 # folder of sampled and scored references, to share between runs; "" = out/references
resume = False                  # continue from the newest intact checkpoint of this folder
device = "auto"                 # cuda | mps | cpu
dtype = "auto"                  # float32 | bfloat16, of activations; weights, states and sums of log-probs are fp32
parallel = "auto"               # none | ddp | fsdp | hsdp | auto, as in train.py; each rank samples with a whole model
compile = False                 # torch.compile of the blocks, in training steps; else of xIELU alone, on CUDA
seed = 28                       # of the sampled references, the pairs and their order, and initial adapters
# adapters (posttrain/lora.py)
lora_r = 0                      # rank of the adapters; 0 = no adapters, all weights are trained
lora_alpha = 32.0               # scale of their update: alpha / r
base = "fp32"                   # how frozen weights are stored: fp32 | bf16 | int8 | nf4
recompute = "none"              # activations that backward computes again: none | cheap | selective | full
# references and pairs
n_refs = 10                     # references per prompt, sampled at temperature 1; report 10, released configurations 30
pairs = "random"                # one of each prompt: random | best (Apertus): see pairs_of(); all: as many as there are
max_length = 0                  # tokens of prompt and completion; 0 = the model's window; longer ones are left out
max_new_tokens = 2048           # tokens of a reference, at most
sample_batch = 64               # completions sampled at once
# the loss
loss = "qrpo"                   # qrpo | dpo | rebel | simpo
beta = 0.0                      # 0 = 5 with length_norm (Apertus), else BETA of posttrain/losses.py
length_norm = True              # beta / |y|; qrpo: at most BETA_MAX of posttrain/losses.py
ties = "le"                     # le: for rewards without ties | discrete: Z from the references, for pass or fail
gamma = 0.5                     # simpo: the margin, in units of beta
# the schedule
epochs = 1                      # passes over all pairs, each in an order of its own
batch_size = 512                # pairs per step
micro_batch = 4                 # pairs in memory at once
warmup = 0.1                    # share of the steps in which the rate rises linearly; then it falls linearly to the end
# the optimizer
optimizer = "ademamix"          # ademamix | adamw
state_dtype = "float32"         # of AdEMAMix's two moments; bfloat16: 4 bytes a parameter less, one rounded at random
lr = 5e-7                       # peak learning rate
betas = (0.9, 0.999, 0.999)     # fast moment, squares, slow moment; AdamW uses the first two
alpha = 8.0                     # weight of the slow moment; alpha and beta3 warm up over the run, at most 100,000 steps
weight_decay = 0.0              # on matrices; never on norm weights and xIELU scalars
grad_clip = 20.0                # hardly ever clips, as published; the norm before clipping is in the log
# checkpoints
checkpoint_every = 200          # steps; 0 = at the end only
keep_checkpoints = 2            # how many of the newest to keep; 0 = all
# -----------------------------------------------------------------------------

CHOICES = dict(loss=[*LOSSES], ties=["le", "discrete"], pairs=["random", "best", "all"])
LEAST = dict(sample_batch=1, max_new_tokens=1, beta=0)


# -----------------------------------------------------------------------------
# scored completions -> pairs


@dataclass
class Candidate:
    """A finished completion of a prompt, which may become a part of a pair."""
    sequence: tuple                 # ids of the prompt, ids of the completion
    reward: float
    q: float                        # the quantile of the reward among the prompt's references
    ref_quantiles: torch.Tensor     # of these references, (n_refs,)
    ref: float = 0.0                # log-prob under the start model; with adapters reference_logp() computes it

    @property
    def length(self):
        return float(len(self.sequence[1]))


@dataclass
class Pairs:
    """
    What the loop learns from. sequences: of each pair, (ids of the prompt, ids of the completion) twice, the better one
    first; beta: of the loss.
    """
    sequences: list
    known: Known
    beta: float

    @property
    def window(self):
        """Room of a pair, in tokens: twice its longest sequence, since both are padded to it."""
        return 2 * max(len(prompt + completion) for pair in self.sequences for prompt, completion in pair)


def prepare_pairs(store, score):
    """
    The Pairs of a run, and lines about them for the user.

    store: References; score: as load_reward() returns it, None for the rewards in the data.
    ValueError: no pair of completions has different rewards.
    """
    prompts = store.sample_and_score(score) if score else store.prompts
    longest = store.settings["max_length"]
    pools = [candidates_of(prompt, store.tok.special[END], longest) for prompt in prompts]
    if not lora_r:
        pools = with_log_probs(store, pools)
    pairs_by_prompt = [pairs_of(i, pool) for i, pool in enumerate(pools)]
    candidate_pairs = list(itertools.chain(*pairs_by_prompt))
    unfinished = sum(len(prompt.references) + len(prompt.given) - len(pool) for prompt, pool in zip(prompts, pools))
    left_out = (f"{pairs_by_prompt.count([])} without two completions to compare (--pairs={pairs}), and {unfinished} "
                f"completions unfinished or over {longest} tokens")
    if not candidate_pairs:
        raise ValueError(f"{data}: no pair of completions with different rewards among {len(prompts)} prompts (left "
                         f"out: {left_out}): nothing to learn from")
    strength = beta or (5.0 if length_norm else BETA[loss])
    known = known_values(candidate_pairs, strength)
    notes = [f"{len(prompts)} prompts; left out: {left_out}; {known.tokens.mean():.1f} tokens each",
             *warn_of_ties(prompts)]
    return Pairs([(better.sequence, worse.sequence) for better, worse in candidate_pairs], known, strength), notes


def with_log_probs(store, pools):
    """The candidates of each prompt with .ref. It does not depend on rewards, so runs with other rewards share it."""
    log_probs = iter(store.log_probs([candidate.sequence for pool in pools for candidate in pool]))
    return [[replace(candidate, ref=next(log_probs)) for candidate in pool] for pool in pools]


def warn_of_ties(prompts):
    """A list with a warning if rewards tie so often that their quantiles are not uniform; else empty."""
    tied = 1 - np.mean([len({*prompt.ref_rewards}) / len(prompt.ref_rewards) for prompt in prompts])
    if loss != "qrpo" or ties != "le" or tied <= 0.1:
        return []
    return [f"warning: {tied:.0%} of the references repeat the reward of another, so quantiles are not uniform: grade "
            "the reward more finely, or use --ties=discrete"]


def candidates_of(prompt, end, max_length):
    """The completions of a Prompt that end in the id `end` and have, with the prompt, at most max_length tokens."""
    ref_rewards = torch.tensor(prompt.ref_rewards, dtype=torch.float64)
    # A reference that is trained on is compared with the other references, a given completion with all. Counting
    # itself, as the released code does, would make a quantile (1 - R_q) / n too large on average.
    ref_quantiles = quantile(ref_rewards, ref_rewards, loo=bool(prompt.references))
    given_quantiles = quantile(prompt.given_rewards, ref_rewards)
    completions = [*zip(prompt.references, prompt.ref_rewards, ref_quantiles.tolist()),
                   *zip(prompt.given, prompt.given_rewards, given_quantiles.tolist())]
    return [Candidate((prompt.ids, ids), reward, q, ref_quantiles)
            for ids, reward, q in completions if ids[-1] == end and len(prompt.ids + ids) <= max_length]


def pairs_of(i, pool):
    """
    [(better, worse)] of the candidates of prompt i, with different rewards.

    all: disjoint pairs, in an order drawn for each prompt from the seed; random: the first of them. best: the largest
    quantile against the largest that is at most max(.2, 1/n), with n references; ties go to the first in that order.
    """
    order = [pool[k] for k in np.random.default_rng((seed, i)).permutation(len(pool))]
    candidate_pairs = zip(order[::2], order[1::2])
    if pairs == "best":
        order.sort(key=lambda candidate: -candidate.q)
        candidate_pairs = [(order[0], worse) for worse in order if worse.q <= max(0.2, 1 / n_refs)]
    candidate_pairs = [sorted(pair, key=lambda candidate: -candidate.reward) for pair in candidate_pairs]
    unequal = [(better, worse) for better, worse in candidate_pairs if better.reward > worse.reward]
    return unequal if pairs == "all" else unequal[:1]


def known_values(candidate_pairs, strength):
    """The Known values of [(better, worse)]. strength: beta of the loss."""
    ref, reward, q, tokens = torch.tensor(
        [[(c.ref, c.reward, c.q, c.length) for c in pair] for pair in candidate_pairs]).unbind(-1)
    length = tokens if length_norm else torch.ones_like(tokens)
    own_beta = effective_beta(length, strength, BETA_MAX if length_norm else 0.0)
    if ties == "discrete":
        ref_quantiles = torch.stack([better.ref_quantiles for better, _ in candidate_pairs]).float()
        own_beta_log_z = discrete_beta_log_z(ref_quantiles[:, None], own_beta)      # (pairs, 1, n_refs), (pairs, 2)
    else:
        own_beta_log_z = beta_log_z(own_beta)
    return Known(ref, reward, q, length, own_beta, own_beta_log_z, tokens)


# -----------------------------------------------------------------------------
# the loop


def train(run, model, optimizer, all_pairs, micro_batch_size):
    """
    Train on all pairs, `epochs` times, or until the user asks to stop.

    The loss of a step is the mean over its pairs. Every rank knows all pairs of a step, and takes its share of them.
    """
    ranks = run.ranks
    for step in run.steps():
        indices = common.item_indices(step, batch_size, len(all_pairs.sequences), epochs, seed)
        sequences, known = [all_pairs.sequences[k] for k in indices], all_pairs.known.select(indices)
        parts = common.rank_micro_batches(range(len(sequences)), micro_batch_size, ranks)
        if lora_r:
            known = replace(known, ref=reference_logp(run, model, sequences, parts))
        logp = torch.zeros(len(sequences), 2)              # of this rank's pairs, 0 for the others
        for part in run.micro_batches(model, parts):
            part_logp = logp_of(model, sequences, part)    # (pairs of this micro-batch, 2)
            part_loss = LOSSES[loss](part_logp, known.select(part), all_pairs.beta, gamma).sum() / len(sequences)
            part_loss.backward()
            logp[list(part)] = part_logp.detach()
        logp, norm = reduce_step(model, ranks, logp)       # of all pairs
        logp = torch.tensor(logp).view(-1, 2)
        step_loss = LOSSES[loss](logp, known, all_pairs.beta, gamma).mean().item()
        check_finite(step, [step_loss], norm)
        lr_now = lr * common.linear(step, run.end, warmup)
        optimizer_step(optimizer, lr_now, norm, grad_clip)

        n_positions = sum(len(prompt) + len(completion) for pair in sequences for prompt, completion in pair)
        run.log.step(step, loss=step_loss, seconds=run.step_seconds(), tokens_in_step=n_positions, grad_norm=norm,
                     lr=lr_now, tokens=int(known.tokens.sum()), **step_stats(logp - known.ref, known))
        run.save_if_due(step + 1, model, optimizer)


def logp_of(model, sequences, part):
    """
    Log-probs of some pairs under the model, (pairs, 2), on the CPU. part: their numbers; an empty part runs with the
    first pair of the step, so that sharded ranks gather each other's weights equally often, and drops its log-probs.
    """
    taken = [sequences[k] for k in part] or sequences[:1]
    return sequence_logp(model, list(itertools.chain(*taken))).view(-1, 2)[:len(part)].cpu()


@torch.no_grad()
def reference_logp(run, model, sequences, parts):
    """With adapters: log-probs of a step's pairs under the model without them, (pairs, 2), on every rank."""
    logp = torch.zeros(len(sequences), 2)
    with without_lora(model):
        for part in run.micro_batches(model, parts):
            logp[list(part)] = logp_of(model, sequences, part)
    drop_gathered(model)
    return torch.tensor(run.ranks.all_reduce(*logp.flatten())).view_as(logp)


def step_stats(ratio, known):
    """
    Means of a step for the log, from its log-ratios log pi / pi_ref (pairs, 2), their targets, rewards and lengths.

    The samples are the reference's, so the policy's own values (kl, reward_policy) are estimated by weighting them with
    pi / pi_ref. The weights are normalised, so kl cannot exceed the log of the number of samples.
    """
    margin = better_minus_worse(ratio).mean()
    target = (known.q - known.beta_log_z) / known.beta
    ratio, target, reward = (x.flatten() for x in (ratio, target, known.reward))
    weight = ratio.softmax(0)
    means = dict(
        target=target.mean(),
        log_ratio=ratio.mean(),
        correlation=correlation(target, ratio),
        kl=(weight * ratio).sum() - ratio.logsumexp(0) + math.log(len(ratio)),
        reward=reward.mean(),
        reward_policy=(weight * reward).sum(),
        margin=margin,
        length=known.tokens.mean(),
    )
    return {name: float(value) for name, value in means.items()}


# -----------------------------------------------------------------------------
# from the settings to the run folder


def check_settings(settings):
    """ValueError, one line, for a setting of QRPO alone that cannot work. settings: all, a dict."""
    for name, choices in CHOICES.items():
        if settings[name] not in choices:
            raise ValueError(f"{name}={settings[name]!r}: there is {', '.join(choices)}")
    for name, least in LEAST.items():
        if settings[name] < least:
            raise ValueError(f"{name}={settings[name]}: want {least} or more")
    if settings["n_refs"] < 2:
        raise ValueError(f"n_refs={settings['n_refs']}: want at least 2, so that each completion is compared with "
                         "another")


def main():
    settings = read_settings(globals())
    check_settings(settings)
    shape, tok, weights = convert.start_of(init_from)
    longest = common.check_settings(settings, shape, tok, "pairs")
    shape = replace(shape, doc_mask=True, vocab_size=max(shape.vocab_size, tok.vocab_size))
    settings |= read_settings(shape) | common.FIXED | dict(max_length=longest)
    ranks = Ranks(parallel)
    local_device = ranks.local_device(pick_device(device))
    activations, compiled = pick_dtype(dtype, local_device), parts_to_compile(compile, local_device)
    # Weights and states must fit; activations are counted below, when the length of the pairs is known.
    outline = build_model(shape, settings, ranks, "meta")
    _, shards = memory.fit_to_memory(outline, settings, ranks, local_device, activations, 0, micro_batch)
    ranks.shard_over(shards)
    score = load_reward(rewards, local_device) if rewards else None

    with Run(settings, ranks, local_device) as run:
        if resume:                                         # before completions are sampled, which takes hours
            restore.compare_with_folder(out, common.must_match(settings))
        prompts, dropped = read_prompts(tok, settings)
        model = build_model(shape, settings | dict(recompute="none"), ranks, local_device, weights=weights)
        store = References(model, tok, prompts, ranks, local_device, settings)
        all_pairs, notes = prepare_pairs(store, score)
        settings |= dict(data_hash=store.hash[:16], rewards_hash=reward_hash(rewards), tokenizer_hash=tok.hash[:16])
        steps = math.ceil(epochs * len(all_pairs.sequences) / batch_size)
        micro_batch_size, _ = memory.fit_to_memory(
            outline, settings, ranks, local_device, activations, all_pairs.window, micro_batch, ranks_have_met=True)
        settings |= dict(micro_batch=micro_batch_size)     # checkpoints hold it, since sums round by it
        checkpoint = restore.find_same(
            out, common.must_match(settings), micro_batch_size, steps, ranks.save_group) if resume else None
        distribute(model, ranks, local_device, recompute, compiled)       # not before: references are sampled eagerly
        # `compile` is about the blocks: AdEMAMix's update is compiled from a million parameters on in any case.
        opt = build_optimizer(model, optimizer, lr, betas, alpha, weight_decay, warmup=min(steps, 100_000),
                              state_dtype=state_dtype)
        if checkpoint:
            restore.load(checkpoint[0], model, opt)
        if lora_r:
            settings |= dict(start_hash=frozen_hash(model, checkpoint))
        if ranks.is_main:
            convert.remove_old_weights(out)
            convert.write_config(out, settings | dict(chat=True), shape, tok)
            if dropped:
                print(describe_dropped(dropped, len(prompts), "prompts"))
            print(*notes, sep="\n")
            common.announce(len(all_pairs.sequences), "pairs", steps)
        run.begin(settings, steps, checkpoint, model.flops_per_token(all_pairs.window))
        with suppress(StepInterrupted):                    # the steps before it are saved below
            train(run, model, opt, all_pairs, micro_batch_size)
        summary = common.finish(run, model) if run.close(model, opt) else None
        ranks.leave()
        conclude(run, summary)


if __name__ == "__main__":
    with orderly_exit():
        run_script(main, globals())
