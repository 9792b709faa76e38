"""
QRPO, quantile reward policy optimisation (arXiv 2507.08068; Apertus report sec. 4), and DPO, REBEL, SimPO on the same data.

Alignment wants the policy that maximises reward but stays near the reference: pi*(y|x) = pi_ref(y|x) exp(r(x,y) / beta) / Z(x). Taking
logs, every single completion has a known right answer - if only Z(x), a sum over all completions, were known. QRPO makes it known.
Replace the reward by its quantile among the reference model's own completions: that is uniform on (0, 1) whatever the reward was, so

    R_q(x, y) = Pr_{y' ~ ref}( r(x, y') <= r(x, y) )                        quantile(): the share of n references that are no better
    beta log Z = beta log( beta (e^(1/beta) - 1) )                          beta_log_z(): one number for every prompt
    loss = ( R_q - beta log Z - beta log pi(y|x)/pi_ref(y|x) )^2            losses["qrpo"]: a regression, no pairs, any data

    beta .1: the target falls for 77 % of the reference's completions (beta log Z = .77), the mean quantile rises to .90, KL to 1.30 nats

Pairwise methods never meet Z, it cancels between a better completion c and a worse one r of the same prompt, g = log pi / pi_ref:

    DPO    -log sigmoid(beta (g_c - g_r))                                   only who won counts, and there is no target: g may go anywhere
    REBEL  ((r_c - r_r) / beta - (g_c - g_r))^2                             the reward difference is the target
    SimPO  -log sigmoid(beta (l_c/|y_c| - l_r/|y_r|) - beta gamma)          l = log pi: no reference at all

With --length_norm every log-ratio counts per token: beta becomes beta/|y| (Apertus: beta 5, clamped to at most 0.1).

The steps: n completions per prompt sampled from the start model, scored once, their log-probs under the start model stored (so that no
second model is held); then a plain loop. All is cached in out/<run>/references: kill it anywhere, --resume goes on.
SIGTERM, SIGUSR2, or a file named `stop` in the run folder: a checkpoint after the step it is in, before it leaves.

$ python -m posttrain.qrpo --init_from=out/sft --data=prompts.jsonl --rewards=my_reward.py            # def reward(prompt, completion): return float
$ python -m posttrain.qrpo configs/qrpo_8b.py --data=prompts.jsonl --rewards=hf:reward-model --resume
$ torchrun --nproc_per_node=8 -m posttrain.qrpo configs/qrpo_8b.py --parallel=fsdp                     # the same numbers on more processes
"""

import sys

if __name__ == "__main__" and not __package__:
    print("qrpo.py: start it from the project's root, python -m posttrain.qrpo", file=sys.stderr)
    sys.exit(2)

import functools
import hashlib
import json
import math
import os

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from ademamix import build_optimizer
from chat import count, left_out, numbered_rows, prompt_ids
from configurator import run, settings
from engine import checkpoint, runs
from engine.hardware import pick_device, pick_dtype
from engine.parallel import Ranks, drop_gathered, gradients, orderly_exit, stop_signals
from generate import generate
from posttrain import collapse
from posttrain.common import WAIT, collect, describe_run, finish, go_on, items, linear, shares, start_model, too_short, update, window
from posttrain.losses import (BETA, TRANSFORMS, better_minus_worse, beta_log_z, correlation, discrete_beta_log_z, effective_beta, losses,
                              quantile, tie_report)
from posttrain.references import (cached, column, fingerprint, load_reward, padded, reward_hash, same_or_refuse, scored, sequence_logp,
                                  words)

# -----------------------------------------------------------------------------
# the run
out = "out/qrpo"                # its folder
init_from = "out/sft"           # the start model, which is the reference too: run folder, Hugging Face folder or hub name
data = "prompts.jsonl"          # a line a prompt: {"messages": [..., user]}; if there are, lists "completions", "rewards", "ref_rewards"
rewards = ""                    # FILE.py[:function] | hf:FOLDER, a reward model with a score head | "": the columns rewards and ref_rewards
references = ""                 # folder of sampled and scored references, to share between runs; "" = out/references
resume = False
device = "auto"                 # cuda | mps | cpu
dtype = "auto"                  # float32 | bfloat16, of activations; weights and states are fp32, and so are sums of log-probs
parallel = "none"               # none | ddp | fsdp | hsdp, under torchrun (engine/parallel.py); only to sample, each rank loads the whole model
seed = 28
date = "2025-09-02"             # "Current date" where a prompt has no system message, as in SFT; fixed: samples are of one prompt
# references and pairs
n_refs = 10                     # sampled per prompt at temperature 1: report 10, released configurations 30
use_references = True           # train on the references too (off-policy data), not only on "completions" (offline data)
loo = 1                         # a reference is not among its own references; 0 = as the released scripts: bias (1 - R_q) / n
pairs = "random"                # random | best: the best of a prompt against one of quantile <= max(.2, 1/n), as Apertus
pairs_per_prompt = 1            # 0 = as many as there are
max_length = 0                  # tokens; 0 = the model's window. What is longer is dropped and counted: half a completion has no log-prob
max_new_tokens = 2048           # of a reference
sample_batch = 64               # completions sampled at once
# the loss
loss = "qrpo"                   # qrpo | dpo | rebel | simpo
beta = 0.0                      # 0 = 5 with length_norm (Apertus), else BETA below
length_norm = True              # beta / |y|
beta_max = 0.1                  # qrpo: beta / |y| is at most this (released code, not the report: matters below 50 tokens); 0 = no limit
transform = "identity"          # identity | log (the optimum is best-of-(1/beta + 1)) | normal (quantiles of a normal distribution)
ties = "le"                     # le: exact for rewards without ties | discrete: Z from the prompt's own references, for pass or fail
gamma = 0.5                     # simpo: the margin, in units of beta
# the schedule
epochs = 1
batch_size = 512                # pairs a step
micro_batch = 4                 # pairs in memory at once
warmup = 0.1                    # share of the steps; linear up, then linear down to the end
optimizer = "ademamix"          # ademamix | adamw
lr = 5e-7
betas = (0.9, 0.999, 0.999)
alpha = 8.0                     # it and beta3 warm up over the whole run
eps = 1e-8
weight_decay = 0.0
grad_clip = 20.0                # practically none, as published; the norm before clipping is in the log
rank_every = 50                 # steps between rank diagnostics (posttrain/collapse.py); 0 = never
checkpoint_every = 200          # steps; 0 = at the end only
keep_checkpoints = 2            # of the newest; 0 = all
# -----------------------------------------------------------------------------


# pi, ref: log-probs of whole completions (nats); q: f(R_q); reward: raw. All (..., 2): the better completion, the worse one. length: their
# tokens, or 1 for no normalisation. Each returns a loss per pair (...).


# -----------------------------------------------------------------------------
# data: prompts -> references -> rewards -> reference log-probs; what is on disk is not done again (posttrain/references.py)


def prompts_of(tok, path):
    """[(line, row, ids)] of the prompts that can be used, and {reason: (count, first line)} of the others."""
    asked, bad = [], {}
    for line, row in numbered_rows(path):
        found = prompt_ids(tok, row, date)
        texts = row.get("completions", [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            found = "completions that are not a list of texts"
        if isinstance(found, str):
            count(bad, found, line)
        else:
            asked.append((line, row, found))
    if not asked:
        raise ValueError(f"{path}: {left_out(bad, 0, 'prompts')}" if bad else f"{path} is empty")
    return asked, bad


def prepare(model, tok, asked, score, version, longest, ranks, device):
    """
    asked: prompts as prompts_of returns them; score: load_reward's function, or None; version: its reward_hash.
    -> candidates: a list for each prompt of dict(ids, reward, q, ref_logp), with q_refs (n,) for the discrete Z.
    What cannot be trained on is dropped and counted: unfinished or over-long completions, prompts whose rewards are all alike.

    Shards do not sample: they would gather all weights for every token. Each rank loads the whole model for that, and lets it go. 70B is
    too large for it: its data come with "completions" and "ref_rewards" that an inference engine made, and no rank ever holds the model.
    """
    end = tok.special["<|assistant_end|>"]
    folder = references or os.path.join(out, "references")
    os.makedirs(folder, exist_ok=True)
    lines, rows, prompts = zip(*asked)

    # 1. references, sampled from the model that training starts from
    sampling = score or not all("ref_rewards" in row for row in rows)
    if sampling and not score:
        line = next(line for line, row, _ in asked if "ref_rewards" not in row)
        raise ValueError(f"{data}, line {line}: no ref_rewards there, and no --rewards=FILE.py to score sampled references with")
    what = dict(start=fingerprint(model), data=hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest(), tokenizer=tok.hash,
                date=date, prompts=hashlib.sha256(json.dumps(prompts).encode()).hexdigest(), n_refs=n_refs, seed=seed,
                max_new_tokens=max_new_tokens, max_length=longest, sample_batch=sample_batch, use_references=use_references)
    same_or_refuse(os.path.join(folder, "settings.json"), what, ranks)
    per_file = max(1, sample_batch // n_refs)

    whole = functools.cache(lambda: start_model(init_from, device, model.dtype)[0] if ranks.sharded else model)    # loaded if needed at all

    def sample(first, last):
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + first)   # of the batch, not of the run: resumes alike
        each = [prompts[i] for i in range(first, last) for _ in range(n_refs)]
        room = max(1, min(max_new_tokens, longest - min(map(len, each))))           # what is longer would be dropped
        done = generate(whole(), each, room, stop=(end,), generator=generator)       # temperature 1, no cut: pi_ref itself
        new = [full[len(p):] for full, p in zip(done, each)]
        return [new[k:k + n_refs] for k in range(0, len(new), n_refs)]

    where = lambda i: f"{data}, line {lines[i]}: --rewards={rewards if ':' in rewards else rewards + ':reward'}"
    refs = [[] for _ in rows]
    if sampling:
        stage = f"samples-{per_file}"
        first = cached(folder, stage, min(per_file, len(rows)), per_file, sample, ranks)
        scored(rows[0], [words(tok, first[0][0])], score, where(0))                 # an error comes before hours of sampling
        refs = cached(folder, stage, len(rows), per_file, sample, ranks)
    whole.cache_clear()

    # 2. rewards of the references and of the completions in the data; by another or a repaired function they are made anew
    given = [[[*tok.encode(text), end] for text in row.get("completions", [])] for row in rows]
    if score:
        def rate(first, last):
            return [[scored(rows[i], [words(tok, ids) for ids in ys], score, where(i)) for ys in (refs[i], given[i])]
                    for i in range(first, last)]
        rated = cached(folder, f"rewards-{version}", len(rows), 64, rate, ranks)
    else:
        rated = [[column(row, "ref_rewards", n_refs, f"{data}, line {line}"), column(row, "rewards", len(ys), f"{data}, line {line}")]
                 for line, row, ys in zip(lines, rows, given)]

    # 3. log-probs under the start model of all that may be trained on, once
    able = lambda p, y: y[-1] == end and len(p) + len(y) <= longest
    chosen = [(p, y) for i, p in enumerate(prompts) for y in [*(refs[i] if use_references else []), *given[i]] if able(p, y)]
    size, per_file = 2 * micro_batch, 64 * 2 * micro_batch                 # in memory as in training

    @torch.no_grad()
    def logp(first, last):
        many = range(first, first + per_file if ranks.sharded else last, size)      # as many forward passes on each rank
        parts = [sequence_logp(model, chosen[k:min(k + size, last)] or chosen[:1]) for k in many]
        return torch.cat(parts).tolist()[:last - first]
    model.eval()
    stage = f"logp-{str(model.dtype)[6:]}-{per_file}"
    ref_logp = iter(cached(folder, stage, len(chosen), per_file, logp, ranks, together=ranks.sharded))
    drop_gathered(model)

    # 4. quantiles
    candidates, q_refs, counts = [], [], dict(dropped=0, constant=0)
    for i, (p, (of_refs, of_given)) in enumerate(zip(prompts, rated)):
        r = torch.tensor(of_refs, dtype=torch.float64)
        inside = bool(loo and use_references and refs[i])                   # are the trained samples among the references?
        q_refs.append(quantile(r, r, inside).float())
        pool = [(y, v, quantile(v, r, inside).item()) for y, v in zip(refs[i] if use_references else [], of_refs)]
        pool += [(y, v, quantile(v, r).item()) for y, v in zip(given[i], of_given)]
        counts["dropped"] += sum(not able(p, y) for y, _, _ in pool)
        pool = [dict(ids=y, reward=v, q=q, ref_logp=next(ref_logp)) for y, v, q in pool if able(p, y)]
        constant = len({c["reward"] for c in pool}) < 2
        counts["constant"] += constant
        candidates.append([] if constant else pool)
    return candidates, q_refs, [torch.tensor(of_refs, dtype=torch.float64) for of_refs, _ in rated], counts


def make_pairs(candidates, n):
    """
    (prompt, better, worse) with different rewards. random: disjoint, in an order drawn per prompt from the seed; best: the largest reward
    against one whose quantile is at most max(.2, 1/n) (n references), drawn at random.
    """
    found = []
    for i, pool in enumerate(candidates):
        order = np.random.default_rng((seed, i)).permutation(len(pool))
        if pairs == "best" and len(pool):
            top = max(order, key=lambda k: pool[k]["reward"])
            low = [k for k in order if pool[k]["q"] <= max(0.2, 1 / n) and pool[k]["reward"] < pool[top]["reward"]]
            mine = [(i, int(top), int(k)) for k in low]
        else:
            couples = [sorted(c, key=lambda k: -pool[k]["reward"]) for c in zip(order[::2], order[1::2])]
            mine = [(i, int(a), int(b)) for a, b in couples if pool[a]["reward"] > pool[b]["reward"]]
        found += mine[:pairs_per_prompt or None]
    return found


# -----------------------------------------------------------------------------


def main():
    if loss not in losses:
        raise ValueError(f"loss={loss!r}: there is {', '.join(losses)}")
    if ties not in ("le", "discrete") or pairs not in ("random", "best"):
        raise ValueError(f"ties={ties!r}, pairs={pairs!r}: there is ties=le and discrete, pairs=random and best")
    if ties == "discrete" and transform != "identity":
        raise ValueError(f"ties=discrete is for transform=identity, not {transform!r}")
    if n_refs < 1 + bool(loo and use_references):
        raise ValueError(f"n_refs={n_refs} leaves nothing to compare a reference with: want at least 2 with loo=1")
    beta_log_z(1.0, transform)
    b0 = beta or (5.0 if length_norm else BETA[loss])
    checkpoint.check_keep(keep_checkpoints)
    for _ in numbered_rows(data):                                           # a file that is none is told at once
        break
    ranks = Ranks(parallel)
    where = ranks.place(pick_device(device))
    with runs.claim(out, resume, ranks):
        ranks.join(where, WAIT)
        align(ranks, where, b0)
        ranks.leave()


def align(ranks, where, b0):
    model, tok = start_model(init_from, where, pick_dtype(dtype, where), ranks)
    longest = window(max_length, model)
    asked, bad = prompts_of(tok, data)
    prompts = [ids for _, _, ids in asked]
    score = load_reward(rewards, where) if rewards else None
    version = checkpoint.everyone(reward_hash(rewards) if ranks.first else "", ranks.files)[0]
    candidates, q_refs, groups, counts = prepare(model, tok, asked, score, version, longest, ranks, where)
    del score                                                               # a reward model leaves the device
    couples = make_pairs(candidates, n_refs)
    if not couples:
        raise ValueError(f"{data}: no pair of completions with different rewards among {len(prompts)} prompts ({counts['constant']} "
                         f"with constant rewards, {counts['dropped']} completions unfinished or over {longest} tokens): "
                         "nothing to learn from")
    steps = -(-epochs * len(couples) // batch_size)
    mean_length = float(np.mean([len(candidates[i][k]["ids"]) for i, a, b in couples for k in (a, b)]))
    limit = beta_max if length_norm else 0.0
    tied, mass = tie_report(groups, min(b0 / mean_length, limit or math.inf) if length_norm else b0)
    if ranks.first:
        if bad:
            print(left_out(bad, len(prompts), "prompts"))
        print(f"{len(couples)} pairs from {len(prompts)} prompts; left out: {counts['constant']} prompts whose rewards are all alike, "
              f"{counts['dropped']} completions unfinished or over {longest} tokens; {mean_length:.1f} tokens each, {steps} steps")
        if warning := too_short("pairs", len(couples), epochs, batch_size):
            print(warning)
        if loss == "qrpo" and ties == "le" and tied > 0.1:
            print(f"warning: {tied:.0%} of reference pairs tie, so quantiles are not uniform and the targets ask for {mass:.2f} times the "
                  "probability there is: grade the reward more finely, or use --ties=discrete")

    opt = build_optimizer(model, optimizer, lr, betas, alpha, eps, weight_decay, alpha_warmup=steps, beta3_warmup=steps)
    content = hashlib.sha256(json.dumps([row for _, row, _ in asked], sort_keys=True).encode()).hexdigest()
    config = dict(settings(globals()), max_length=longest, data_hash=content[:16], rewards_hash=version, tokenizer_hash=tok.hash[:16])
    start = go_on(out, model, opt, config, ranks) if resume else 0
    if start >= steps:
        raise ValueError(f"{out} is finished: all {steps} steps are done; talk to it: python sample.py --chat --init_from={out}")
    describe_run(out, config, model, tok, ranks)
    log = runs.open_log(out, start, ranks)
    with stop_signals() as stop:                                            # before: what is on disk is not done again
        for step in tqdm(range(start, steps), initial=start, total=steps, unit="step", disable=not ranks.first,
                         dynamic_ncols=True):
            batch = [couples[k] for k in items(step, batch_size, len(couples), epochs, seed)]
            both = [(p, candidates[p][a], candidates[p][b]) for p, a, b in batch]
            ref, reward, q, length = (torch.tensor([[f(a), f(b)] for _, a, b in both]) for f in (      # each (pairs, 2)
                lambda c: c["ref_logp"], lambda c: c["reward"], lambda c: c["q"], lambda c: float(len(c["ids"]))))
            q = TRANSFORMS[transform](q, n_refs - bool(loo))
            per = length if length_norm else torch.ones_like(length)
            b = effective_beta(ref, per, b0, limit)
            log_z = beta_log_z(b, transform)
            if ties == "discrete":
                log_z = discrete_beta_log_z(torch.stack([q_refs[p] for p, _, _ in both])[:, None], b)

            def pair_loss(pi, s=slice(None)):
                return losses[loss](pi, ref[s], reward[s], q[s], per[s], b0, beta_max=limit, log_z=log_z[s], gamma=gamma,
                                    transform=transform)

            # every process takes its micro-batches; gradients and log-probs are summed over all
            logp = torch.zeros_like(ref)
            model.train()
            for k, last in shares(-(-len(both) // micro_batch), ranks):
                s = slice(k * micro_batch, (k + 1) * micro_batch)
                mine = both[s]
                texts = [(prompts[p], c["ids"]) for p, *pair in mine or both[:1] for c in pair]
                with gradients(model, ranks, last):
                    pi = sequence_logp(model, texts).view(-1, 2).cpu()
                    part = pair_loss(pi, s).sum() / len(both) if mine else pi.sum() * 0     # an empty one adds nothing
                    part.backward()
                if mine:
                    logp[s] = pi.detach()
            norm = collect(model, ranks, grad_clip)
            if ranks.size > 1:
                everywhere = logp.to(where)                                 # nccl talks between GPUs only
                dist.all_reduce(everywhere)
                logp = everywhere.cpu()
            value, ratio = pair_loss(logp).mean().item(), logp - ref
            off = (ratio / length).abs().mean()
            if step == 0 and off > 0.02:
                raise ValueError(f"at step 0 the model differs from its own reference log-probs by {off:.3f} nats a token: "
                                 "they were made with another dtype or model; delete "
                                 f"{references or out + '/references'}/logp-*")
            rate = lr * linear(step, steps, warmup)
            update(opt, step, rate, value, norm)
            stopping = ranks.add(runs.asked_to_stop(out, stop, ranks))[0]

            # what the numbers say. The samples are the reference's, the policy's own values are estimated by weighting
            # them with pi / pi_ref (normalised: bounded, but its KL cannot exceed the log of the number of samples)
            w = ratio.flatten().softmax(0)
            kl = (w * ratio.flatten()).sum() - ratio.flatten().logsumexp(0) + math.log(ratio.numel())
            target = ((q - log_z) / b).flatten()
            health = {}
            if rank_every and (step % rank_every == 0 or step + 1 == steps):
                texts = [(prompts[p], c["ids"]) for p, c, _ in both[:4 * micro_batch]]
                health = collapse.diagnose(model, *padded(texts, where))
                drop_gathered(model)
            log(step=step, loss=value, grad_norm=norm, lr=rate, target=target.mean().item(), log_ratio=ratio.mean().item(),
                correlation=correlation(target, ratio.flatten()), kl=kl.item(), reward=reward.mean().item(),
                reward_policy=(w * reward.flatten()).sum().item(), margin=better_minus_worse(ratio).mean().item(),
                length=length.mean().item(), tokens=int(length.sum()), **health)
            done = step + 1
            if done == steps or stopping or checkpoint_every and done % checkpoint_every == 0:
                checkpoint.save(os.path.join(out, "ckpt"), done, model, opt, dict(config=config), keep_checkpoints,
                                ranks.files)
            if stopping:
                break
    finish(out, model, tok, ranks, done, steps)


if __name__ == "__main__":
    with orderly_exit():
        run(main, globals())
