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
import hashlib
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import train                        # before torch: it sets the environment that torch reads
import torch

from chat import count, left_out, numbered_rows, prompt_ids
from configurator import run as run_script
from convert import fingerprint
from engine import checkpoint
from engine.parallel import drop_gathered, orderly_exit, reduce_after
from generate import generate
from posttrain import collapse, common, lora, start
from posttrain.judge import Charter
from posttrain.losses import (
    BETA, TRANSFORMS, better_minus_worse, beta_log_z, correlation, discrete_beta_log_z, effective_beta, losses,
    quantile, tie_report,
)
from posttrain.references import (
    cached, column, load_reward, on_disk, padded, reward_hash, same_or_refuse, scored, sequence_logp, words,
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
# data: prompts -> references -> rewards -> quantiles -> log-probs. What is on disk is not done again
# (posttrain/references.py)


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
    """The pairs of a run: run.couples, [(prompt's number, better, worse)], completions as candidates_of has them."""
    asked, bad = prompts_of(run.tok, data)
    _, rows, prompts = zip(*asked)
    score = load_reward(rewards, run.device) if rewards else None
    version = checkpoint.everyone(reward_hash(rewards) if run.ranks.first else "", run.ranks.files)[0]
    lacking = [line for line, row, _ in asked if "ref_rewards" not in row]
    if lacking and not score:
        raise ValueError(f"{data}, line {lacking[0]}: no ref_rewards there, "
                         "and no --rewards=FILE.py to score sampled references with")
    folder = references or f"{out}/references"
    # A judge says what it cannot read before anything is sampled for it; one that has judged already is not loaded.
    if isinstance(score, Charter) and not on_disk(folder, f"rewards-{version}", 0):
        score.check(rows, min(max_new_tokens, run.longest - min(map(len, prompts))))

    run.policy = start.ready(run)
    made_from = dict(
        start=getattr(run, "start_hash", None) or fingerprint(run.policy),
        tokenizer=run.tok.hash,
        data=digest(rows),
        prompts=digest(prompts),
        date=date,
        seed=seed,
        n_refs=n_refs,
        sample_batch=sample_batch,
        max_new_tokens=max_new_tokens,
        max_length=run.longest,
        use_references=use_references,
    )
    same_or_refuse(folder, made_from, run.ranks)
    pools, run.q_refs, groups = candidates_of(run, asked, score, version, functools.partial(cached, folder, run.ranks))
    del score           # a reward model leaves the device
    run.policy.train()

    dropped = len(asked) * n_refs * bool(use_references and rewards)
    dropped += sum(len(row.get("completions", [])) for row in rows) - sum(map(len, pools))
    alike = [len({c["reward"] for c in pool}) < 2 for pool in pools]
    pools = [[] if same else pool for same, pool in zip(alike, pools)]
    run.couples = [(i, pools[i][better], pools[i][worse]) for i, better, worse in make_pairs(pools, n_refs)]
    left = (f"{sum(alike)} whose rewards are all alike, and {dropped} completions unfinished or over "
            f"{run.longest} tokens")
    if not run.couples:
        raise ValueError(f"{data}: no pair of completions with different rewards among {len(asked)} prompts (left out: "
                         f"{left}): nothing to learn from")
    mean_length = each("length", run.couples).mean().item()
    run.items = len(run.couples)
    run.notes = [left_out(bad, len(asked), "prompts")] if bad else []
    run.notes.append(f"{len(asked)} prompts; left out: {left}; {mean_length:.1f} tokens each")
    run.notes += warn_of_ties(groups, mean_length)
    if rewards.split(",")[0] == f"charter:{init_from}":
        run.notes.append("the judge is the policy itself: it rewards its own taste")
    run.hashes = dict(data_hash=made_from["data"][:16], rewards_hash=version, tokenizer_hash=run.tok.hash[:16])


def digest(content):
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def candidates_of(run, asked, score, version, cache):
    """
    What can be trained on: (pools, q_refs, groups).

    score: load_reward's function, or None; version: its reward_hash. pools: for each prompt its finished completions,
    dict(text, reward, q, length, ref_logp), where text is the pair of ids (prompt, completion); q_refs, groups:
    quantiles and rewards of each prompt's references, (n_refs,).
    """
    tok = run.tok
    end = tok.special["<|assistant_end|>"]
    given = [[[*tok.encode(text), end] for text in row.get("completions", [])] for _, row, _ in asked]
    refs = sample(run, asked, score, cache) if score else [[] for _ in asked]
    rated = rate(tok, asked, refs, given, score, version, cache)
    pools, q_refs, groups = [], [], []
    for (_, _, prompt), of_refs, of_given, (ref_rewards, rewards_given) in zip(asked, refs, given, rated):
        group = torch.tensor(ref_rewards, dtype=torch.float64)
        # A reference that is trained on is compared with the other references (loo), a given completion with all.
        q = quantile(group, group, loo and use_references and of_refs)
        trained = list(zip(of_given, rewards_given, quantile(rewards_given, group).tolist()))
        if use_references:
            trained = [*zip(of_refs, ref_rewards, q.tolist()), *trained]
        pools.append([dict(text=(prompt, ids), reward=reward, q=its_q, length=float(len(ids)))
                      for ids, reward, its_q in trained
                      if ids[-1] == end and len(prompt) + len(ids) <= run.longest])
        q_refs.append(q.float())
        groups.append(group)
    # log-probs of what may be trained on. They do not depend on the rewards, so that runs with others can share them.
    # Beside adapters nothing is stored, see reference_of.
    if not lora_r:
        kept = list(itertools.chain(*pools))
        for c, value in zip(kept, reference_logp(run, [c["text"] for c in kept], cache)):
            c["ref_logp"] = value
    return pools, q_refs, groups


def sample(run, asked, score, cache):
    """
    n_refs completions of each prompt, as ids, from the model that training starts from: [[ids, ...] of each prompt].

    Sharded ranks do not sample, because they would gather all weights for every token: each of them loads the whole
    model, which goes when this function returns. 70B is too large for that. Its data come with "completions" and
    "ref_rewards" that an inference engine has made, and no rank ever holds the model.
    """
    tok = run.tok

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
        # At a call of tools too, where the model would make up the output. What has not ended is left out.
        stop = [tok.special[name] for name in ("<|assistant_end|>", "<|tools_suffix|>") if name in tok.special]
        # Temperature 1 and no cut: this is pi_ref itself.
        done = generate(whole(), prompts, max(1, room), stop, generator=generator)
        new = [full[len(prompt):] for full, prompt in zip(done, prompts)]
        return [new[i:i + n_refs] for i in range(0, len(new), n_refs)]

    prompts = [ids for _, _, ids in asked]
    per_file = max(1, sample_batch // n_refs)
    stage = f"samples-{per_file}"
    # The first batch is scored at once: an error in the reward function is told before hours of sampling.
    first, *_ = cache(stage, prompts[:per_file], per_file, draw)
    if not on_disk(references or f"{out}/references", stage, (len(prompts) - 1) // per_file * per_file):
        scores(tok, asked[0], first, score)
    return cache(stage, prompts, per_file, draw)


def rate(tok, asked, refs, given, score, version, cache):
    """
    [rewards of the references, rewards of the given completions] for each prompt: by score, or from the data.

    Another or a repaired reward function has another version, and its rewards files of their own.
    """
    def by_score(k, some):
        found = []
        for prompt, of_refs, of_given in some:
            # Together: a reward may compare all completions of a prompt.
            values = scores(tok, prompt, of_refs + of_given, score)
            found.append([values[:len(of_refs)], values[len(of_refs):]])
        return found

    if score:
        return cache(f"rewards-{version}", list(zip(asked, refs, given)), 64, by_score)
    found = []
    for (line, row, _), completions in zip(asked, given):
        where = f"{data}, line {line}"
        found.append([column(row, "ref_rewards", n_refs, where), column(row, "rewards", len(completions), where)])
    return found


def scores(tok, prompt, completions, score):
    line, row, _ = prompt
    texts = [words(tok, ids) for ids in completions]
    return scored(row, texts, score, f"{data}, line {line}: --rewards={rewards}")


@torch.no_grad()
def reference_logp(run, texts, cache):
    """log-probs of (prompt, completion) pairs of ids under the start model, in batches as large as in training."""
    size = 2 * micro_batch
    per_file = 64 * size

    def logp(k, some):
        # Sharded ranks gather each other's weights, so each runs as many forward passes as a full file needs.
        end = per_file if run.ranks.sharded else len(some)
        parts = [sequence_logp(run.policy, some[k:k + size] or some[:1]) for k in range(0, end, size)]
        return torch.cat(parts).tolist()[:len(some)]

    run.policy.eval()
    stage = f"logp-{str(run.dtype).removeprefix('torch.')}-{per_file}"
    found = cache(stage, texts, per_file, logp, together=run.ranks.sharded)
    drop_gathered(run.policy)
    return found


def make_pairs(candidates, n):
    """
    (prompt, better, worse) with different rewards, as indices into candidates; at most pairs_per_prompt of each prompt.

    random: disjoint, in an order drawn per prompt from the seed. best: the largest reward against one whose quantile is
    at most max(.2, 1/n), n references, drawn at random.
    """
    found = []
    for i, pool in enumerate(candidates):
        reward = [c["reward"] for c in pool]
        order = np.random.default_rng((seed, i)).permutation(len(pool)).tolist()
        if pairs == "best":
            top = max(order, key=reward.__getitem__, default=None)
            couples = [(top, k) for k in order if pool[k]["q"] <= max(0.2, 1 / n)]
        else:
            couples = [sorted(couple, key=lambda k: -reward[k]) for couple in zip(order[::2], order[1::2])]
        mine = [(i, a, b) for a, b in couples if reward[a] > reward[b]]
        found += mine[:pairs_per_prompt or None]
    return found


# -----------------------------------------------------------------------------
# the run: what train.py's loop is given (posttrain/common.py)


def main():
    for name, choices in dict(loss=losses, ties=("le", "discrete"), pairs=("random", "best")).items():
        if globals()[name] not in choices:
            raise ValueError(f"{name}={globals()[name]!r}: there is {', '.join(choices)}")
    if ties == "discrete" and transform != "identity":
        raise ValueError(f"ties=discrete is for transform=identity, not {transform!r}")
    if n_refs < 1 + bool(loo and use_references):
        raise ValueError(f"n_refs={n_refs} leaves nothing to compare a reference with: want at least 2 with loo=1")
    beta_log_z(1.0, transform)      # ValueError for another transform
    next(numbered_rows(data), None)
    common.tune(globals(), "pairs", prepare, batches, forward_backward, build)


def build(run):
    """The policy, which prepare() has loaded; before that, for its shapes, the start model."""
    return run.policy if hasattr(run, "policy") else start.build(run)


def batches(run, step):
    """The pairs of this step and all later ones. Every rank has all of them."""
    for step in itertools.count(step):
        yield [run.couples[k] for k in common.items(step, batch_size, run.items, epochs, seed)]


def strength():
    """beta, and the limit of beta / |y|, 0 for none. A beta of 0 in the settings: what the loss is used with."""
    usual = 5.0 if length_norm else BETA[loss]
    return beta or usual, beta_max if length_norm else 0.0


def completions_of(couples):
    """The completions of (prompt, better, worse), one after the other."""
    return [c for _, *pair in couples for c in pair]


def each(name, couples):
    """A number of every completion of pairs, (pairs, 2), the better one first."""
    return torch.tensor([c[name] for c in completions_of(couples)]).view(-1, 2)


def added(ranks, values):
    """The sum over ranks of a tensor on the CPU."""
    return torch.tensor(ranks.add(*values.flatten())).view_as(values)


@torch.no_grad()
def reference_of(run, batch):
    """log pi_ref of a step's pairs, (pairs, 2): as stored, or from a model with adapters, while they are off."""
    if not lora_r:
        return each("ref_logp", batch)
    ref = torch.zeros(len(batch), 2)
    with lora.off(run.model):
        for part, _ in common.slices(len(batch), micro_batch, run.ranks):
            mine = batch[part]
            found = sequence_logp(run.model, [c["text"] for c in completions_of(mine or batch[:1])])
            if mine:
                ref[part] = found.view(-1, 2).cpu()
    drop_gathered(run.model)
    return added(run.ranks, ref)


def known_of(batch, q_refs, ref):
    """
    What the loss knows of a step's pairs before the policy is asked: each a tensor (pairs, 2), the better one first.

    ref, reward, q, length, beta and log_z as posttrain/losses.py wants them; tokens: the completions' lengths.
    """
    tokens = each("length", batch)
    length = tokens if length_norm else torch.ones_like(tokens)
    b = effective_beta(ref, length, *strength())
    log_z = beta_log_z(b, transform)
    if ties == "discrete":
        own = torch.stack([q_refs[i] for i, *_ in batch])                   # (pairs, n_refs)
        log_z = discrete_beta_log_z(own[:, None], b)
    q = TRANSFORMS[transform](each("q", batch), n_refs - bool(loo))
    reward = each("reward", batch)
    return SimpleNamespace(ref=ref, reward=reward, q=q, tokens=tokens, length=length, beta=b, log_z=log_z)


def pair_losses(logp, known, part=slice(None)):
    """The loss of each pair of a part of the step, from log pi (pairs of the part, 2)."""
    of_part = {name: values[part] for name, values in vars(known).items()}
    beta0, _ = strength()
    return losses[loss](logp, SimpleNamespace(**of_part), beta0, gamma)


def forward_backward(run, batch, step):
    """The gradients of a step, as in train.py."""
    facts = {}
    if rank_every and (step % rank_every == 0 or step + 1 == train.steps_until(train.total_samples)):
        idx, keep = padded([better["text"] for _, better, _ in batch[:4 * micro_batch]])
        facts = collapse.diagnose(run.model, idx.to(run.device), keep.to(run.device))
    known = known_of(batch, run.q_refs, reference_of(run, batch))
    logp = torch.zeros_like(known.ref)
    for part, last in common.slices(len(batch), micro_batch, run.ranks):
        mine = batch[part]
        # An empty micro-batch runs along with a pair of another rank, and adds nothing.
        texts = [c["text"] for c in completions_of(mine or batch[:1])]
        reduce_after(run.model, run.ranks, last)
        pi = sequence_logp(run.model, texts).view(-1, 2).cpu()
        part_loss = pair_losses(pi, known, part).sum() / len(batch) if mine else pi.sum() * 0
        part_loss.backward()
        if mine:
            logp[part] = pi.detach()
    common.add_gradients(run)
    # Each rank knows the log-probs of its own pairs, and has zeros for the others.
    logp = added(run.ranks, logp)
    ratio = logp - known.ref
    if step == 0:
        refuse_another_reference(ratio / known.tokens)
    value = pair_losses(logp, known).mean().item()
    facts |= watched(ratio, known)
    return dict(loss=value if run.ranks.first else 0.0), facts["tokens"], facts


def refuse_another_reference(ratio):
    """ValueError if the model is not the reference whose log-probs were stored. ratio: log pi / pi_ref a token."""
    off = ratio.abs().mean()
    if off > 0.02:
        raise ValueError(f"at step 0 the model differs from its own reference log-probs by {off:.3f} nats a token: "
                         "they were made with another dtype or model; delete "
                         f"{references or out + '/references'}/logp-*")


def warn_of_ties(groups, mean_length):
    """[a warning] if QRPO takes quantiles of rewards that tie for uniform ones, else []."""
    beta0, limit = strength()
    typical = min(beta0 / mean_length, limit or math.inf) if length_norm else beta0
    tied, mass = tie_report(groups, typical)
    if loss != "qrpo" or ties != "le" or tied <= 0.1:
        return []
    return [f"warning: {tied:.0%} of reference pairs tie, so quantiles are not uniform and the targets ask "
            f"for {mass:.2f} times the probability there is: grade the reward more finely, or use --ties=discrete"]


def watched(ratio, known):
    """
    What the log says of a step's log-ratios log pi / pi_ref (pairs, 2), their targets, rewards and lengths.

    The samples are the reference's, so the policy's own values (kl, reward_policy) are estimated by weighting them with
    pi / pi_ref. The weights are normalised: bounded, but kl cannot exceed the log of the number of samples.
    """
    margin = better_minus_worse(ratio).mean().item()
    target = (known.q - known.log_z) / known.beta
    ratio, target, reward = (x.flatten() for x in (ratio, target, known.reward))
    weight = ratio.softmax(0)
    kl = (weight * ratio).sum() - ratio.logsumexp(0)
    kl += math.log(len(ratio))
    return dict(
        target=target.mean().item(),
        log_ratio=ratio.mean().item(),
        correlation=correlation(target, ratio),
        kl=kl.item(),
        reward=reward.mean().item(),
        reward_policy=(weight * reward).sum().item(),
        margin=margin,
        length=known.tokens.mean().item(),
        tokens=int(known.tokens.sum()),
    )


if __name__ == "__main__":
    with orderly_exit():
        run_script(main, globals())
