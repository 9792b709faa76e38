"""
QRPO, quantile reward policy optimisation (arXiv 2507.08068; Apertus report sec. 4), and DPO, REBEL, SimPO on the same
data.

Alignment wants the policy that maximises reward but stays near the reference: pi*(y|x) = pi_ref(y|x) exp(r(x,y) / beta)
/ Z(x). Taking logs, every single completion has a known right answer, if only Z(x), a sum over all completions, were
known. QRPO makes it known. Replace the reward by its quantile among the reference model's own completions: that is
uniform on (0, 1) whatever the reward was, so

    R_q(x, y) = Pr_{y' ~ ref}( r(x, y') <= r(x, y) )              quantile(): the share of n references no better
    beta log Z = beta log( beta (e^(1/beta) - 1) )                beta_log_z(): one number for every prompt
    loss = ( R_q - beta log Z - beta log pi(y|x)/pi_ref(y|x) )^2  losses["qrpo"]: a regression, no pairs, any data

At beta .1 the target falls for 77 % of the reference's completions (beta log Z = .77), the mean quantile rises to .90,
and KL to 1.30 nats.

Pairwise methods never meet Z: it cancels between a better completion c and a worse one r of the same prompt. With
g = log pi / pi_ref and l = log pi:

    DPO    -log sigmoid(beta (g_c - g_r))                         only who won counts; no target, g may go anywhere
    REBEL  ((r_c - r_r) / beta - (g_c - g_r))^2                   the reward difference is the target
    SimPO  -log sigmoid(beta (l_c/|y_c| - l_r/|y_r|) - beta gamma)     no reference at all

With --length_norm every log-ratio counts per token: beta becomes beta/|y| (Apertus: beta 5, clamped to at most 0.1).

First n completions per prompt are sampled from the start model and scored once, and their log-probs under it are
stored, so that no second model is held; beside adapters (--lora_r) it is the same model with the adapters off. Then
comes a plain loop. All is cached in out/<run>/references: kill it anywhere, --resume goes on. After SIGTERM, SIGUSR2,
or a file named `stop` in the run folder, all ranks save at the end of the step and leave.

$ python -m posttrain.qrpo --init_from=out/sft --data=prompts.jsonl --rewards=my_reward.py
      # my_reward.py: def reward(prompt, completion): return float, or
      # def rewards(row, completions): return list, which sees all completions of a prompt
$ python -m posttrain.qrpo configs/qrpo_8b.py --data=prompts.jsonl --rewards=my_reward.py --resume
$ python -m posttrain.qrpo --data=prompts.jsonl --rewards=charter:JUDGE,charter.md     # posttrain/judge.py
$ torchrun --nproc_per_node=8 -m posttrain.qrpo configs/qrpo_8b.py --parallel=fsdp     # the same numbers on more ranks
"""

import sys

if __name__ == "__main__" and not __package__:
    print("qrpo.py: start it from the project's root, python -m posttrain.qrpo", file=sys.stderr)
    sys.exit(2)

import functools
import itertools
import math
import os
from types import SimpleNamespace

import numpy as np
import train                        # before torch: it sets the environment that torch reads
import torch

from chat import count, left_out, numbered_rows, prompt_ids
from configurator import run as run_script
from convert import fingerprint
from engine import checkpoint
from engine.files import sha256_of
from engine.parallel import drop_gathered, orderly_exit, reduce_after
from generate import generate
from posttrain import collapse, common, lora, start
from posttrain.judge import Charter
from posttrain.losses import (
    BETA, LOG_Z, TRANSFORMS, better_minus_worse, beta_log_z, correlation, discrete_beta_log_z, effective_beta, losses,
    quantile, tie_report,
)
from posttrain.references import (
    cached, file_of, load_reward, numbers, padded, reward_hash, same_or_refuse, scored, sequence_logp, words,
)

# -----------------------------------------------------------------------------
# the run
out = "out/qrpo"                # its folder
init_from = "out/sft"           # the start model, and the reference: run folder, Hugging Face folder or hub name
data = "prompts.jsonl"          # per line {"messages": [..., user]}, and if any "completions", "rewards", "ref_rewards"
rewards = ""                    # FILE.py[:name] | charter:JUDGE[,FILE] | "": those in the data
references = ""                 # folder of sampled and scored references, to share between runs; "" = out/references
resume = False                  # go on from the newest intact checkpoint of this folder
device = "auto"                 # cuda | mps | cpu
dtype = "auto"                  # float32 | bfloat16, of activations; weights, states and sums of log-probs are fp32
parallel = "none"               # none | ddp | fsdp | hsdp, under torchrun; to sample, each rank loads the whole model
compile = False                 # torch.compile, block by block, of the steps; references are made eagerly
seed = 28
date = "2025-09-02"             # "Current date" without a system message, as in SFT; fixed: samples are of one prompt
# what is trained (posttrain/lora.py)
lora_r = 0                      # rank of the adapters; 0 = no adapters, all weights are trained
lora_alpha = 32.0               # their update counts alpha / r
lora_on = "all"                 # or some of q_proj,k_proj,v_proj,o_proj,up_proj,down_proj
lora_rs = False                 # rank-stabilised: alpha / sqrt(r)
base = "fp32"                   # what frozen weights are held in: fp32 | bf16 | int8 | nf4
recompute = "none"              # activations that backward computes again: none | selective | full
# references and pairs
n_refs = 10                     # sampled per prompt at temperature 1: report 10, released configurations 30
use_references = True           # train on the references too (off-policy data), not only on "completions" (offline)
loo = 1                         # a reference is not among its own references; 0 = as released: bias (1 - R_q) / n
pairs = "random"                # random | best: the best against one of quantile <= max(.2, 1/n), as Apertus
pairs_per_prompt = 1            # 0 = as many as there are
max_length = 0                  # tokens; 0 = the model's window. What is longer is dropped and counted, never cut
max_new_tokens = 2048           # of a reference
sample_batch = 64               # completions sampled at once
# the loss
loss = "qrpo"                   # qrpo | dpo | rebel | simpo
beta = 0.0                      # 0 = 5 with length_norm (Apertus), else BETA of posttrain/losses.py
length_norm = True              # beta / |y|
beta_max = 0.1                  # qrpo: limit of beta / |y|, of the released code; matters below 50 tokens; 0 = none
transform = "identity"          # identity | log (optimum: best-of-(1/beta + 1)) | normal (quantiles of a normal)
ties = "le"                     # le: rewards without ties | discrete: Z from a prompt's references, for pass or fail
gamma = 0.5                     # simpo: the margin, in units of beta
# the schedule
epochs = 1
batch_size = 512                # pairs per step
micro_batch = 4                 # pairs in memory at once
warmup = 0.1                    # share of the steps; linear up, then linear down to the end
# the optimizer
optimizer = "ademamix"          # ademamix | adamw
state_dtype = "float32"         # of AdEMAMix's two averages; bfloat16: 4 bytes a parameter less, rounded at random
lr = 5e-7
betas = (0.9, 0.999, 0.999)     # AdamW uses the first two
alpha = 8.0                     # it and beta3 warm up over the whole run
eps = 1e-8
weight_decay = 0.0
grad_clip = 20.0                # practically none, as published; the norm before clipping is in the log
rank_every = 50                 # steps between diagnoses of collapse (posttrain/collapse.py); 0 = never
# what is forgotten (posttrain/forgetting.py)
old = ""                        # text like the start's: a data folder (what validates there), .txt or .jsonl; "" = none
old_every = 0                   # steps between measurements; 0 = before the first and after the last step only
old_windows = 64                # of the model's window, at most, from as many documents as there are; 0 = all
# what is saved
checkpoint_every = 200          # steps; 0 = at the end only
keep_checkpoints = 2            # of the newest; 0 = all
# -----------------------------------------------------------------------------


# -----------------------------------------------------------------------------
# data: prompts -> references -> rewards -> quantiles -> log-probs, each cached on disk (posttrain/references.py)


def prompts_of(tok, path):
    """[(line, row, ids)] of the prompts that can be used, and {reason: (count, first place)} of the others."""
    asked, bad = [], {}
    for line, row in numbered_rows(path):
        found = prompt_ids(tok, row, date)
        texts = row.get("completions", [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            found = "completions that are not a list of texts"
        if isinstance(found, str):
            count(bad, found, f"line {line}")
        else:
            asked.append((line, row, found))
    if not asked:
        raise ValueError(f"{path}: {left_out(bad, 0, 'prompts')}" if bad else f"{path} is empty")
    return asked, bad


def prepare(run):
    """The pairs of a run: run.texts, their ids, ((prompt, better), (prompt, worse)); run.known, what the loss knows."""
    asked, bad = prompts_of(run.tok, data)
    _, rows, prompts = zip(*asked)
    refs = [[] for _ in rows]
    given = [[[*run.tok.encode(text), end_of(run.tok)] for text in row.get("completions", [])] for row in rows]
    version = checkpoint.everyone(reward_hash(rewards) if run.ranks.first else "", run.ranks.files)[0]
    run.folder = references or f"{out}/references"
    run.cache = functools.partial(cached, run.folder, run.ranks)
    if rewards:
        score = load_reward(rewards, run.device)
        # A judge says what it cannot read before anything is sampled. One that has judged already is not loaded.
        if isinstance(score, Charter) and not os.path.exists(file_of(run.folder, f"rewards-{version}", 0)):
            score.check(rows, min(max_new_tokens, run.longest - min(map(len, prompts))))
    else:
        rated = rewards_given(asked, given)
    data_hash = load_policy(run, rows, prompts)
    if rewards:
        scores = functools.partial(scores_of, run.tok, score)
        refs = sample(run, asked, scores)
        inputs = list(zip(asked, refs, given))
        rated = run.cache(f"rewards-{version}", inputs, 64, lambda k, some: [scores(*prompt) for prompt in some])
        del score, scores           # a reward model leaves the device
    groups = [torch.tensor(of_refs, dtype=torch.float64) for of_refs, _ in rated]
    pools = [candidates(run, *prompt) for prompt in zip(prompts, refs, given, rated, groups)]
    # Log-probs do not depend on the rewards, so runs with other rewards share them. Adapters store none: log_ref().
    if not lora_r:
        store_logp(run, list(itertools.chain(*pools)))
    run.policy.train()

    couples = [couple for i, pool in enumerate(pools) for couple in pairs_of(i, pool)]
    alike = sum(len({c.reward for c in pool}) < 2 for pool in pools)
    dropped = len(asked) * n_refs * bool(use_references and rewards) + sum(map(len, given)) - sum(map(len, pools))
    left = f"{alike} whose rewards are all alike, and {dropped} completions unfinished or over {run.longest} tokens"
    if not couples:
        raise ValueError(f"{data}: no pair of completions with different rewards among {len(asked)} prompts (left out: "
                         f"{left}): nothing to learn from")
    run.texts = [(better.text, worse.text) for better, worse in couples]
    run.known = known_of(couples)
    run.items = len(couples)
    mean_length = run.known.tokens.mean().item()
    run.notes = [left_out(bad, len(asked), "prompts")] if bad else []
    run.notes.append(f"{len(asked)} prompts; left out: {left}; {mean_length:.1f} tokens each")
    run.notes += warn_of_ties(groups, mean_length)
    if rewards.split(",")[0] == f"charter:{init_from}":
        run.notes.append("the judge is the policy itself: it rewards its own taste")
    run.hashes = dict(data_hash=data_hash[:16], rewards_hash=version, tokenizer_hash=run.tok.hash[:16])


def load_policy(run, rows, prompts):
    """Load run.policy, the start model, and check that the folder's references are its own. Returns the data's hash."""
    run.policy = start.ready(run)
    made_from = dict(
        start=getattr(run, "start_hash", None) or fingerprint(run.policy),
        tokenizer=run.tok.hash,
        data=sha256_of(rows),
        prompts=sha256_of(prompts),
        date=date,
        seed=seed,
        n_refs=n_refs,
        sample_batch=sample_batch,
        max_new_tokens=max_new_tokens,
        max_length=run.longest,
        use_references=use_references,
    )
    same_or_refuse(run.folder, made_from, run.ranks)
    return made_from["data"]


def end_of(tok):
    """The token that ends a completion."""
    return tok.special["<|assistant_end|>"]


def sample(run, asked, scores):
    """
    n_refs completions of each prompt, as ids, from the model that training starts from: [[ids, ...] of each prompt].

    Sharded ranks do not sample, because they would gather all weights for every token: each of them loads the whole
    model, which goes when this function returns. 70B is too large for that. Its data come with "completions" and
    "ref_rewards" that an inference engine has made, and no rank ever holds the model.
    """
    tok = run.tok
    # At a call of tools too, where the model would make up the output. What has not ended is left out.
    stop = [tok.special[name] for name in ("<|assistant_end|>", "<|tools_suffix|>") if name in tok.special]

    @functools.cache
    def whole():
        if not run.ranks.sharded:
            return run.policy
        return start.load_adapted(run.config, run.device, run.dtype, start.adapters_of(run.config), seed)[0]

    def draw(k, some):
        # Seeded by the batch and not by the run, so that a resumed run draws the same.
        generator = torch.Generator(run.device).manual_seed(seed * 1_000_003 + k)
        prompts = [prompt for prompt in some for _ in range(n_refs)]
        # What is longer than the room would be dropped.
        room = min(max_new_tokens, run.longest - min(map(len, prompts)))
        # Temperature 1 and no cut: this is pi_ref itself.
        done = generate(whole(), prompts, max(1, room), stop, generator=generator)
        new = [full[len(prompt):] for full, prompt in zip(done, prompts)]
        return [new[i:i + n_refs] for i in range(0, len(new), n_refs)]

    prompts = [ids for _, _, ids in asked]
    per_file = max(1, sample_batch // n_refs)
    stage = f"samples-{per_file}"
    # The first prompt is scored at once, so that an error in the reward function comes before hours of sampling.
    first, *_ = run.cache(stage, prompts[:per_file], per_file, draw)
    last = (len(prompts) - 1) // per_file * per_file
    if not os.path.exists(file_of(run.folder, stage, last)):
        scores(asked[0], first, [])
    return run.cache(stage, prompts, per_file, draw)


def scores_of(tok, score, prompt, refs, given):
    """
    The rewards of a prompt, (line, row, ids): [those of its references, those of the given completions].

    They are scored together, because a reward may compare all completions of a prompt.
    """
    line, row, _ = prompt
    texts = [words(tok, ids) for ids in refs + given]
    values = scored(row, texts, score, f"{data}, line {line}: --rewards={rewards}")
    return [values[:len(refs)], values[len(refs):]]


def rewards_given(asked, given):
    """The same for each prompt, from the data's own numbers."""
    rated = []
    for (line, row, _), completions in zip(asked, given):
        want = dict(ref_rewards=n_refs, rewards=len(completions))
        where = f"{data}, line {line}: without --rewards,"
        rated.append([numbers(row.get(name, []), n, f"{where} {name} is") for name, n in want.items()])
    return rated


def candidates(run, prompt, refs, given, rated, group):
    """
    A prompt's finished completions: text, the pair of ids (prompt, completion), reward, q, length, and `own`, the
    quantiles of the prompt's references (n_refs,).

    rated: as scores_of returns it; group: rewards of the references (n_refs,).
    """
    # A reference that is trained on is compared with the other references (loo), a given completion with all.
    own = quantile(group, group, loo and use_references and refs)
    found = list(zip(given, rated[1], quantile(rated[1], group).tolist()))
    if use_references:
        found = [*zip(refs, rated[0], own.tolist()), *found]
    return [SimpleNamespace(text=(prompt, ids), reward=reward, q=q, length=float(len(ids)), own=own, ref=0.0)
            for ids, reward, q in found
            if ids[-1] == end_of(run.tok) and len(prompt) + len(ids) <= run.longest]


@torch.no_grad()
def store_logp(run, pool):
    """Set .ref of candidates, their log-probs under the start model, in batches as large as in training."""
    size = 2 * micro_batch
    per_file = 64 * size

    def logp(k, some):
        # Sharded ranks gather each other's weights, so each runs as many forward passes as a full file needs.
        end = per_file if run.ranks.sharded else len(some)
        parts = [sequence_logp(run.policy, some[k:k + size] or some[:1]) for k in range(0, end, size)]
        return torch.cat(parts).tolist()[:len(some)]

    run.policy.eval()
    stage = f"logp-{str(run.dtype).removeprefix('torch.')}-{per_file}"
    found = run.cache(stage, [c.text for c in pool], per_file, logp, together=run.ranks.sharded)
    drop_gathered(run.policy)
    for c, value in zip(pool, found):
        c.ref = value


def pairs_of(i, pool):
    """
    [(better, worse)] of the candidates of prompt i, with different rewards; at most pairs_per_prompt.

    random: disjoint, in an order drawn per prompt from the seed. best: the largest reward against one whose quantile is
    at most max(.2, 1/n), n references, drawn at random.
    """
    order = [pool[k] for k in np.random.default_rng((seed, i)).permutation(len(pool))]
    couples = zip(order[::2], order[1::2])
    if pairs == "best":
        top = max(order, key=lambda c: c.reward, default=None)
        couples = [(top, c) for c in order if c.q <= max(0.2, 1 / n_refs)]
    couples = [sorted(couple, key=lambda c: -c.reward) for couple in couples]
    found = [(better, worse) for better, worse in couples if better.reward > worse.reward]
    return found[:pairs_per_prompt or None]


def known_of(couples):
    """
    What the loss knows of all pairs before the policy is asked: each a tensor (pairs, 2), the better one first.

    ref, reward, q, length, beta and log_z as posttrain/losses.py wants them; tokens: the completions' lengths.
    """
    def column(name):
        return torch.tensor([[getattr(c, name) for c in couple] for couple in couples])

    tokens = column("length")
    length = tokens if length_norm else torch.ones_like(tokens)
    b = effective_beta(tokens, length, *strength())
    log_z = beta_log_z(b, transform)
    if ties == "discrete":
        own = torch.stack([better.own for better, _ in couples]).float()    # (pairs, n_refs)
        log_z = discrete_beta_log_z(own[:, None], b)
    q = TRANSFORMS[transform](column("q"), n_refs - bool(loo))
    return SimpleNamespace(ref=column("ref"), reward=column("reward"), q=q, tokens=tokens, length=length, beta=b,
                           log_z=log_z)


def strength():
    """beta, and the limit of beta / |y|, 0 for none. A beta of 0 in the settings: what the loss is used with."""
    usual = 5.0 if length_norm else BETA[loss]
    return beta or usual, beta_max if length_norm else 0.0


def warn_of_ties(groups, mean_length):
    """[a warning] if QRPO takes quantiles of rewards that tie for uniform ones, else []."""
    beta0, limit = strength()
    typical = min(beta0 / mean_length, limit or math.inf) if length_norm else beta0
    tied, mass = tie_report(groups, typical)
    if loss != "qrpo" or ties != "le" or tied <= 0.1:
        return []
    return [f"warning: {tied:.0%} of reference pairs tie, so quantiles are not uniform and the targets ask "
            f"for {mass:.2f} times the probability there is: grade the reward more finely, or use --ties=discrete"]


# -----------------------------------------------------------------------------
# the run: what train.py's loop is given (posttrain/common.py)


def main():
    for name, choices in dict(loss=losses, ties=("le", "discrete"), pairs=("random", "best"), transform=LOG_Z).items():
        if globals()[name] not in choices:
            raise ValueError(f"{name}={globals()[name]!r}: there is {', '.join(choices)}")
    if ties == "discrete" and transform != "identity":
        raise ValueError(f"ties=discrete is for transform=identity, not {transform!r}")
    if n_refs < 1 + bool(loo and use_references):
        raise ValueError(f"n_refs={n_refs} leaves nothing to compare a reference with: want at least 2 with loo=1")
    next(numbered_rows(data), None)
    common.tune(globals(), "pairs", prepare, batches, forward_backward, build)


def build(run):
    """The policy, which prepare() has loaded; before that, for its shapes, the start model."""
    return run.policy if hasattr(run, "policy") else start.build(run)


def batches(run, step):
    """The numbers of the pairs of this step and all later ones. Every rank has all of them."""
    for step in itertools.count(step):
        yield common.items(step, batch_size, run.items, epochs, seed)


def part_of(known, part):
    """Some pairs of what the loss knows."""
    return SimpleNamespace(**{name: values[part] for name, values in vars(known).items()})


def pair_losses(logp, known):
    """The loss of each pair, from log pi (pairs, 2)."""
    beta0, _ = strength()
    return losses[loss](logp, known, beta0, gamma)


def logp_of(run, texts):
    """
    Log-probs of pairs under the model, a micro-batch of this rank at a time: yields (slice, (pairs of the slice, 2)).

    An empty micro-batch runs along with the first pair of the step, of which nothing is left.
    """
    for part, last in common.slices(len(texts), micro_batch, run.ranks):
        mine = texts[part]
        reduce_after(run.model, run.ranks, last)
        logp = sequence_logp(run.model, list(itertools.chain(*mine or texts[:1])))
        yield part, logp.view(-1, 2)[:len(mine)].cpu()


def added(ranks, values):
    """The sum over ranks of a tensor on the CPU."""
    return torch.tensor(ranks.add(*values.flatten())).view_as(values)


def log_ref(run, texts):
    """log pi_ref of a step's pairs, (pairs, 2), from a model with adapters, while they are off."""
    ref = torch.zeros(len(texts), 2)
    with torch.no_grad(), lora.off(run.model):
        for part, logp in logp_of(run, texts):
            ref[part] = logp
    drop_gathered(run.model)
    return added(run.ranks, ref)


def forward_backward(run, batch, step):
    """The gradients of a step, as in train.py. batch: the numbers of its pairs."""
    texts = [run.texts[k] for k in batch]
    facts = {}
    if rank_every and (step % rank_every == 0 or step + 1 == train.steps_until(train.total_samples)):
        idx, keep = padded([better for better, _ in texts[:4 * micro_batch]])
        facts = collapse.diagnose(run.model, idx.to(run.device), keep.to(run.device))
    known = part_of(run.known, batch)
    if lora_r:
        known.ref = log_ref(run, texts)
    logp = torch.zeros_like(known.ref)
    for part, pi in logp_of(run, texts):
        part_loss = pair_losses(pi, part_of(known, part)).sum() / len(batch)
        part_loss.backward()
        logp[part] = pi.detach()
    common.add_gradients(run)
    # Each rank knows the log-probs of its own pairs, and has zeros for the others.
    logp = added(run.ranks, logp)
    ratio = logp - known.ref
    if step == 0:
        refuse_another_reference(run, ratio / known.tokens)
    value = pair_losses(logp, known).mean().item()
    facts |= watched(ratio, known)
    return dict(loss=value if run.ranks.first else 0.0), facts["tokens"], facts


def refuse_another_reference(run, ratio):
    """ValueError if the model is not the reference whose log-probs were stored. ratio: log pi / pi_ref a token."""
    off = ratio.abs().mean()
    if off > 0.02:
        raise ValueError(f"at step 0 the model differs from its own reference log-probs by {off:.3f} nats a token: "
                         f"they were made with another dtype or model; delete {run.folder}/logp-*")


def watched(ratio, known):
    """
    What the log says of a step's log-ratios log pi / pi_ref (pairs, 2), their targets, rewards and lengths.

    The samples are the reference's, so the policy's own values (kl, reward_policy) are estimated by weighting them with
    pi / pi_ref. The weights are normalised: bounded, but kl cannot exceed the log of the number of samples.
    """
    margin = better_minus_worse(ratio).mean()
    target = (known.q - known.log_z) / known.beta
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
    return {name: float(value) for name, value in means.items()} | dict(tokens=int(known.tokens.sum()))


if __name__ == "__main__":
    with orderly_exit():
        run_script(main, globals())
