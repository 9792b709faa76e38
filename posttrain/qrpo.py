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

With --length_norm every log-ratio counts per token: beta becomes beta/|y| (Apertus: beta 5, clamped to at most 0.1).

First, n completions per prompt are sampled from the start model and scored, and their log-probs under it are stored, so
that training holds no second model. With adapters (--lora_r) the reference is the same model with the adapters off.
Then the loop, train(), follows. out/<run>/references caches every stage: a run can be killed anywhere, and --resume
continues it. After SIGTERM, SIGUSR2, or `touch out/<run>/stop`, all ranks stop after the current micro-batch and save.

$ python -m posttrain.qrpo --init_from=out/sft --data=prompts.jsonl --rewards=my_reward.py
      # my_reward.py: def reward(prompt, completion): return float, or
      # def rewards(row, completions): return list, which sees all completions of a prompt
$ python -m posttrain.qrpo configs/qrpo_8b.py --data=prompts.jsonl --rewards=my_reward.py --resume
$ python -m posttrain.qrpo --data=prompts.jsonl --rewards=charter:JUDGE,charter.md     # posttrain/judge.py
$ torchrun --nproc_per_node=8 -m posttrain.qrpo configs/qrpo_8b.py --parallel=fsdp     # the same numbers on more ranks
"""

import itertools
import math
import os
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

import convert
from ademamix import build_optimizer
from chat import describe_dropped, prompt_ids
from configurator import run as run_script, settings
from engine import restore
from engine.files import sha256_of

# Before torch: engine.hardware sets environment variables that torch reads when it loads.
from engine.hardware import can_compile, pick_device, pick_dtype
from engine.parallel import Ranks, distribute, drop_gathered, orderly_exit
from engine.run import Run
from generate import generate
from model import Apertus
from posttrain import (
    collapse,
    common,  # first: a script started by its path gets posttrain/posttrain.py here
    lora,
    start,
)
from posttrain.conversations import first_rows
from posttrain.forgetting import Old
from posttrain.judge import Charter, reward_hash
from posttrain.losses import (
    BETA,
    LOG_Z,
    LOSSES,
    TRANSFORMS,
    beta_log_z,
    better_minus_worse,
    correlation,
    discrete_beta_log_z,
    effective_beta,
    quantile,
)
from posttrain.references import file_of, in_one_line, laid_out, load_reward, numbers, of_stage, sequence_logp

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
compile = False                 # torch.compile of the training steps, block by block; references are sampled eagerly
seed = 28
date = "2025-09-02"             # "Current date" of the default system message; fixed, because it is part of the prompt
# adapters (posttrain/lora.py)
lora_r = 0                      # rank of the adapters; 0 = no adapters, all weights are trained
lora_alpha = 32.0               # scale of their update: alpha / r
lora_on = "all"                 # matrices with adapters: all, or some of q_proj,k_proj,v_proj,o_proj,up_proj,down_proj
lora_rs = False                 # rank-stabilised: scale by alpha / sqrt(r)
base = "fp32"                   # how frozen weights are stored: fp32 | bf16 | int8 | nf4
recompute = "none"              # activations that backward computes again: none | cheap | selective | full
# references and pairs
n_refs = 10                     # references per prompt, sampled at temperature 1; report 10, released configurations 30
use_references = True           # train on the references too (off-policy data), not only on "completions" (offline)
loo = 1                         # leave a reference out of its own quantile; 0 = as released: bias (1 - R_q) / n
pairs = "random"                # random | best (Apertus): the best against one with a quantile <= max(.2, 1/n)
pairs_per_prompt = 1            # at most; 0 = all
max_length = 0                  # tokens of prompt and completion; 0 = the model's window; longer ones are left out
max_new_tokens = 2048           # tokens of a reference, at most
sample_batch = 64               # completions sampled at once
# the loss
loss = "qrpo"                   # qrpo | dpo | rebel | simpo
beta = 0.0                      # 0 = 5 with length_norm (Apertus), else BETA of posttrain/losses.py
length_norm = True              # beta / |y|
beta_max = 0.1                  # qrpo: limit of beta / |y|, as in the released code; matters below 50 tokens; 0 = none
transform = "identity"          # identity | log (optimum: best-of-(1/beta + 1)) | normal (quantiles of a normal)
ties = "le"                     # le: for rewards without ties | discrete: Z from the references, for pass or fail
gamma = 0.5                     # simpo: the margin, in units of beta
# the schedule
epochs = 1
batch_size = 512                # pairs per step
micro_batch = 4                 # pairs in memory at once
warmup = 0.1                    # share of the steps in which the rate rises linearly; then it falls linearly to the end
# the optimizer
optimizer = "ademamix"          # ademamix | adamw
state_dtype = "float32"         # of AdEMAMix's two averages; bfloat16: 4 bytes a parameter less, one rounded at random
lr = 5e-7
betas = (0.9, 0.999, 0.999)     # fast average, squares, slow average; AdamW uses the first two
alpha = 8.0                     # the slow average's weight; alpha and beta3 warm up over the run, at most 100,000 steps
eps = 1e-8
weight_decay = 0.0
grad_clip = 20.0                # hardly ever clips, as published; the norm before clipping is in the log
rank_every = 50                 # steps between diagnoses of collapse (posttrain/collapse.py); 0 = never
# forgetting (posttrain/forgetting.py)
old = ""                        # text like the start model's data: .txt, .jsonl, or a data folder's validation split
old_every = 0                   # steps between measurements; 0 = before the first and after the last step only
old_windows = 64                # windows of that text, at most, spread over its documents; 0 = all
# checkpoints
checkpoint_every = 200          # steps; 0 = at the end only
keep_checkpoints = 2            # how many of the newest to keep; 0 = all
# -----------------------------------------------------------------------------


END = "<|assistant_end|>"         # the token that ends a completion


# -----------------------------------------------------------------------------
# data: prompts -> references -> rewards -> quantiles -> log-probs, each cached on disk (posttrain/references.py)


def prompts_of(tok, path):
    """
    The prompts that can be used, and [(reason, place)] of the others.

    A prompt has place, row, ids; refs, given: ids of the sampled completions and of those in the data; rated: [rewards
    of refs, rewards of given]. refs are set later, and with --rewards rated too.
    """
    asked, bad = [], []
    for place, row in first_rows(path, None, ()):
        found = prompt_ids(tok, row, date)
        texts = row.get("completions", [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            found = "completions that are not a list of texts"
        if isinstance(found, str):
            bad.append((found, place))
            continue
        given = [[*tok.encode(text), tok.special[END]] for text in texts]
        asked.append(SimpleNamespace(place=place, row=row, ids=found, given=given, refs=[]))
        if not rewards:
            where = f"{path}, {place}: without --rewards,"
            asked[-1].rated = numbers(row, "ref_rewards", n_refs, where), numbers(row, "rewards", len(texts), where)
    if not asked:
        raise ValueError(f"{path}: {describe_dropped(bad, 0, 'prompts')}")
    return asked, bad


@dataclass
class Start:
    """The start model, and all that sampling and scoring with it takes."""
    model: Apertus
    tok: object
    longest: int            # tokens of prompt and completion
    ranks: Ranks
    device: str
    dtype: torch.dtype
    config: dict            # all settings
    folder: str = ""        # of the references, from find_folder() on

    def cache(self, stage, *what, **how):
        return of_stage(self.folder, self.ranks, stage, *what, **how)

    def find_folder(self, asked):
        """Find or make the folder of the references. Returns the hash of the data."""
        made_from = dict(
            start=convert.fingerprint(self.model),
            tokenizer=self.tok.hash,
            data=sha256_of([p.row for p in asked]),
            prompts=sha256_of([p.ids for p in asked]))
        for name in "date seed base n_refs sample_batch max_new_tokens max_length use_references".split():
            made_from[name] = self.config[name]
        self.folder = f"{references or f'{out}/references'}/{sha256_of(made_from)[:16]}"
        os.makedirs(self.folder, exist_ok=True)
        return made_from["data"]


@dataclass
class Pairs:
    """What the loop learns from. texts: ids of each pair, ((prompt, better), (prompt, worse)); known: of known_of()."""
    texts: list
    known: SimpleNamespace
    beta: float
    notes: list
    hashes: dict

    @property
    def window(self):
        """Tokens of the longest pair."""
        return 2 * max(len(p + c) for pair in self.texts for p, c in pair)


def score_all(first, asked):
    """Set `rated` of each prompt by --rewards, and with it `refs`."""
    score = load_reward(rewards, first.device)
    version = reward_hash(rewards)
    # A judge that cannot read these prompts is an error before sampling. If rewards are on disk, it is not loaded.
    if isinstance(score, Charter) and not os.path.exists(file_of(first.folder, f"rewards-{version}", 0)):
        score.check([p.row for p in asked], room_for(first, [p.ids for p in asked]))
    sample(first, asked, score)
    stage = f"rewards-{version}"
    rated = first.cache(stage, asked, 64, lambda k, some: [rewards_of(first.tok, p, score) for p in some])
    for p, values in zip(asked, rated):
        p.rated = values
        if not use_references:
            p.refs = []


def prepare(first):
    """The Pairs of a run, from a Start."""
    asked, bad = prompts_of(first.tok, data)
    data_hash = first.find_folder(asked)
    if rewards:
        score_all(first, asked)
    pools = [candidates(first, p) for p in asked]
    # Log-probs do not depend on the rewards, so runs with other rewards share them. With adapters none are stored.
    if not lora_r:
        store_logp(first, list(itertools.chain(*pools)))
    first.model.train()

    each = [pairs_of(i, pool) for i, pool in enumerate(pools)]
    couples = list(itertools.chain(*each))
    dropped = sum(len(p.refs + p.given) - len(pool) for p, pool in zip(asked, pools))
    left = (f"{each.count([])} without two completions to compare (--pairs={pairs}), and {dropped} completions "
            f"unfinished or over {first.longest} tokens")
    if not couples:
        raise ValueError(f"{data}: no pair of completions with different rewards among {len(asked)} prompts (left out: "
                         f"{left}): nothing to learn from")
    strength = beta or (5.0 if length_norm else BETA[loss])
    known = known_of(couples, strength)
    notes = [describe_dropped(bad, len(asked), "prompts")] if bad else []
    notes.append(f"{len(asked)} prompts; left out: {left}; {known.tokens.mean():.1f} tokens each")
    tied = 1 - np.mean([len({*p.rated[0]}) / len(p.rated[0]) for p in asked])
    if loss == "qrpo" and ties == "le" and tied > 0.1:
        notes.append(f"warning: {tied:.0%} of the references repeat the reward of another, so quantiles are not "
                     "uniform: grade the reward more finely, or use --ties=discrete")
    return Pairs([(better.text, worse.text) for better, worse in couples], known, strength, notes, dict(
        data_hash=data_hash[:16], rewards_hash=reward_hash(rewards), tokenizer_hash=first.tok.hash[:16]))


def room_for(first, prompts):
    """How many tokens a completion of these prompts may have: a longer one would be dropped."""
    return max(1, min(max_new_tokens, first.longest - min(map(len, prompts))))


def sample(first, asked, score):
    """
    Set .refs of each prompt: n_refs completions, as ids, from the model that training starts from.

    A sharded model would gather all weights for every token: so each rank loads the whole model, and frees it when this
    function returns. The 70B is too large for that. Its data come with "completions" and "ref_rewards" from an
    inference engine, and no rank ever holds the whole model.
    """
    tok = first.tok
    prompts = [p.ids for p in asked]
    per_file = max(1, sample_batch // n_refs)
    stage = f"samples-{per_file}"

    missing = [k for k in range(0, len(prompts), per_file) if not os.path.exists(file_of(first.folder, stage, k))]
    model = first.model
    if first.ranks.sharded and missing:
        # In the dtype of the activations, or every token would convert all weights to it.
        model = start.load_whole(first.config, first.device).to(first.dtype)

    def draw(k, some):
        # Seeded by the batch and not by the run, so that a resumed run draws the same.
        generator = torch.Generator(first.device).manual_seed(seed * 1_000_003 + k)
        each = [ids for ids in some for _ in range(n_refs)]
        # Stop at a tool call too: the model would invent the tool's output. Unfinished completions are left out.
        stop = {tok.special[END], tok.special.get("<|tools_suffix|>", tok.special[END])}
        # Temperature 1, without top-k or top-p, samples from pi_ref itself.
        done = generate(model, each, room_for(first, some), stop, generator=generator)
        new = [full[len(ids):] for full, ids in zip(done, each)]
        return [new[i:i + n_refs] for i in range(0, len(new), n_refs)]

    # The first prompt is scored at once, so that an error in the reward function comes before hours of sampling.
    [asked[0].refs, *_] = first.cache(stage, prompts[:per_file], per_file, draw)
    if any(missing):                                       # a file other than the first, whose number is 0
        rewards_of(tok, asked[0], score)
    for p, refs in zip(asked, first.cache(stage, prompts, per_file, draw)):
        p.refs = refs


def rewards_of(tok, p, score):
    """
    [rewards of a prompt's references, those of the given completions], from one call, because a reward may compare all.

    ValueError if the function raises, or does not return one finite number for each.
    """
    texts = [tok.words(ids) for ids in p.refs + p.given]
    where = f"{data}, {p.place}: --rewards={rewards}"
    try:
        values = [float(value) for value in score(p.row, texts)]
    except Exception as e:      # anything may come from the user's code
        raise ValueError(f"{where} failed ({in_one_line(e)}). The samples are kept: repair it and "
                         "--resume") from None
    numbers(dict(rewards=values), "rewards", len(texts), where)
    return [values[:len(p.refs)], values[len(p.refs):]]


def candidates(first, p):
    """
    A prompt's finished completions: text, the pair of ids (prompt, completion), reward, q, length, and `own`, the
    quantiles of the prompt's references (n_refs,).
    """
    of_refs, of_given = p.rated
    group = torch.tensor(of_refs, dtype=torch.float64)
    # A reference that is trained on is compared with the other references (loo), a given completion with all.
    own = quantile(group, group, loo and p.refs)
    found = [*zip(p.refs, of_refs, own.tolist()), *zip(p.given, of_given, quantile(of_given, group).tolist())]
    return [SimpleNamespace(text=(p.ids, ids), reward=reward, q=q, length=float(len(ids)), own=own, ref=0.0)
            for ids, reward, q in found if ids[-1] == first.tok.special[END] and len(p.ids + ids) <= first.longest]


@torch.no_grad()
def store_logp(first, pool):
    """Set .ref of candidates, their log-probs under the start model, in batches as large as in training."""
    size = 2 * micro_batch
    per_file = 64 * size

    def logp(k, some):
        # Sharded ranks gather each other's weights, so each of them runs the forward passes of a full file.
        end = per_file if first.ranks.sharded else len(some)
        parts = [sequence_logp(first.model, some[k:k + size] or some[:1]) for k in range(0, end, size)]
        return torch.cat(parts).tolist()[:len(some)]

    first.model.eval()
    stage = f"logp-{str(first.dtype).removeprefix('torch.')}-{per_file}-of-{len(pool)}"
    found = first.cache(stage, [c.text for c in pool], per_file, logp, together=first.ranks.sharded)
    drop_gathered(first.model)
    for c, value in zip(pool, found):
        c.ref = value


def pairs_of(i, pool):
    """
    [(better, worse)] of the candidates of prompt i, with different rewards; at most pairs_per_prompt.

    random: disjoint pairs, in an order drawn for each prompt from the seed. best: the largest quantile against the
    largest that is at most max(.2, 1/n), with n references; ties go to the first in that order.
    """
    order = [pool[k] for k in np.random.default_rng((seed, i)).permutation(len(pool))]
    couples = zip(order[::2], order[1::2])
    if pairs == "best":
        order.sort(key=lambda c: -c.q)
        couples = [(order[0], c) for c in order if c.q <= max(0.2, 1 / n_refs)]
    couples = [sorted(couple, key=lambda c: -c.reward) for couple in couples]
    found = [(better, worse) for better, worse in couples if better.reward > worse.reward]
    return found[:pairs_per_prompt or None]


def known_of(couples, beta):
    """
    The numbers of all pairs that do not depend on the policy: each a tensor (pairs, 2), the better completion first.

    ref, reward, q, length, beta and log_z are those of posttrain/losses.py; tokens: the completions' lengths.
    """
    ref, reward, q, tokens = torch.tensor(
        [[(c.ref, c.reward, c.q, c.length) for c in couple] for couple in couples]).unbind(-1)
    length = tokens if length_norm else torch.ones_like(tokens)
    b = effective_beta(length, beta, beta_max if length_norm else 0.0)
    log_z = beta_log_z(b, transform)
    if ties == "discrete":
        own = torch.stack([better.own for better, _ in couples]).float()    # (pairs, n_refs)
        log_z = discrete_beta_log_z(own[:, None], b)
    q = TRANSFORMS[transform](q, n_refs)
    return SimpleNamespace(ref=ref, reward=reward, q=q, tokens=tokens, length=length, beta=b, log_z=log_z)


# -----------------------------------------------------------------------------
# the loop


def train(run, model, optimizer, pairs, rows, text):
    """
    Train on all pairs, `epochs` times. Every rank knows all pairs of a step, and takes its share of them.

    The loss of a step is the mean over its pairs.
    """
    for step in run.steps():
        batch = common.chosen(step, batch_size, [len(pairs.texts)], [1], epochs, seed)
        texts, known = [pairs.texts[k] for k in batch], part_of(pairs.known, batch)
        facts = diagnosis(model, texts, step, run)
        if lora_r:                                         # the reference is the model without its adapters
            with torch.no_grad(), lora.off(model):
                known.ref = gather(run, len(texts), (
                    (part, logp_of(model, texts, part)) for part in shares(run, model, texts, rows)))
            drop_gathered(model)
        found = []
        for part in shares(run, model, texts, rows):
            logp = logp_of(model, texts, part)             # (pairs of this micro-batch, 2)
            part_loss = LOSSES[loss](logp, part_of(known, part), pairs.beta, gamma).sum() / len(batch)
            part_loss.backward()
            found.append((part, logp.detach()))
        if run.interrupted:                                # asked to stop between two micro-batches: drop this step
            break

        logp = gather(run, len(texts), found)
        [norm] = run.reduce(model)
        value = LOSSES[loss](logp, known, pairs.beta, gamma).mean().item()
        rate = lr * common.linear(step, run.end, warmup)
        if run.is_finite(step, value, norm):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step(grad_scale=min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0)
        optimizer.zero_grad()

        facts |= watched(logp - known.ref, known)
        tokens = facts.pop("tokens")
        run.log_step(step, tokens, tokens, dict(loss=value), norm, lr=rate, **facts)
        if text and run.validation_due(step + 1, old_every):
            run.log(step=step, **text.measure(model, run.ranks))
        run.save_if_due(step + 1, model, optimizer)


def shares(run, model, texts, rows):
    """This rank's micro-batches of a step's pairs, as lists of their numbers."""
    return run.micro_batches(model, common.shared(range(len(texts)), rows, run.ranks))


def part_of(known, part):
    """`known` for some of the pairs."""
    return SimpleNamespace(**{name: values[list(part)] for name, values in vars(known).items()})


def logp_of(model, texts, part):
    """
    Log-probs of pairs under the model, (pairs, 2), on the CPU. An empty part runs with the first pair of the step, so
    that sharded ranks gather each other's weights equally often, and drops its log-probs.
    """
    mine = [texts[k] for k in part] or texts[:1]
    return sequence_logp(model, list(itertools.chain(*mine))).view(-1, 2)[:len(part)].cpu()


def gather(run, n, found):
    """Log-probs of all n pairs, (n, 2), on every rank. found: (numbers of pairs, log-probs) of its micro-batches."""
    logp = torch.zeros(n, 2)
    for part, values in found:
        logp[list(part)] = values
    # Each rank knows the log-probs of its own pairs, and has zeros for the others.
    return torch.tensor(run.ranks.all_reduce(*logp.flatten())).view_as(logp)


def diagnosis(model, texts, step, run):
    """For the log, now and then: is the representation collapsing?"""
    if not rank_every or step % rank_every and step + 1 < run.end:
        return {}
    idx, targets = laid_out([better for better, _ in texts[:4 * micro_batch]])
    return collapse.diagnose(model, idx.to(run.device), targets.to(run.device) >= 0)


def watched(ratio, known):
    """
    Means of a step for the log, from its log-ratios log pi / pi_ref (pairs, 2), their targets, rewards and lengths.

    The samples are the reference's, so the policy's own values (kl, reward_policy) are estimated by weighting them with
    pi / pi_ref. The weights are normalised, so kl cannot exceed the log of the number of samples.
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


# -----------------------------------------------------------------------------
# from the settings to the run folder


def check_choices():
    for name, choices in dict(loss=LOSSES, ties=("le", "discrete"), pairs=("random", "best"), transform=LOG_Z).items():
        if globals()[name] not in choices:
            raise ValueError(f"{name}={globals()[name]!r}: there is {', '.join(choices)}")
    for name, least in dict(sample_batch=1, max_new_tokens=1, pairs_per_prompt=0, beta=0).items():
        if globals()[name] < least:
            raise ValueError(f"{name}={globals()[name]}: want {least} or more")
    if ties == "discrete" and transform != "identity":
        raise ValueError(f"ties=discrete is for transform=identity, not {transform!r}")
    # With fewer references, log and normal would clamp all quantiles to one value.
    least = dict(log=2, normal=3).get(transform, 1 + (loo and use_references))
    if n_refs < least:
        raise ValueError(f"n_refs={n_refs}: transform={transform} with loo={loo} wants at least {least}, so that each "
                         "completion is compared with another")


def main():
    check_choices()
    shape, tok, path = convert.start_of(init_from)
    longest = common.check_settings(globals(), shape, tok, "pairs")
    shape.doc_mask, shape.vocab_size = True, max(shape.vocab_size, tok.vocab_size)
    config = settings(globals(), shape) | dict(max_length=longest)
    ranks = Ranks(parallel)
    where = ranks.place(pick_device(device))
    kind, compiled = pick_dtype(dtype, where), compile and can_compile(where)
    text = Old(old, tok, shape.block_size, old_windows, out) if old else None
    start.check_memory(shape, config, ranks, where, kind, 0)                        # before data are read and sampled

    with Run(config, ranks, where) as run:
        if resume:
            restore.compare_with_folder(out, common.decisive(config))
        model = start.build(shape, config | dict(recompute="none"), ranks, where, kind, path)
        found_pairs = prepare(Start(model, tok, longest, ranks, where, kind, config))
        config |= found_pairs.hashes
        steps = -(-epochs * len(found_pairs.texts) // batch_size)
        rows = start.check_memory(shape, config, ranks, where, kind, found_pairs.window)
        distribute(model, ranks, where, recompute, compiled)                        # references are sampled eagerly
        found = restore.find_same(run, common.decisive(config), steps) if resume else None
        warm = min(steps, 100_000)
        opt = build_optimizer(model, optimizer, lr, betas, alpha, eps, weight_decay, warm, warm, None, state_dtype)
        if found:
            restore.load(found[0], model, opt)
        if text and found:
            text.recall()
        config |= start.hash_of(model, config, found)
        if ranks.is_main:
            convert.describe(out, config | dict(chat=True), shape, tok)
            print(*found_pairs.notes, f"{len(found_pairs.texts)} pairs, {steps} step{'s' * (steps != 1)}", sep="\n")
        run.open(steps, found, model.flops_per_token(found_pairs.window) / ranks.size)
        if text and not found:
            run.log(step=0, **text.measure(model, ranks))
        train(run, model, opt, found_pairs, rows, text)
        if run.close(model, opt):
            start.finish(run, model, config, text)
        run.leave(convert.complete)


if __name__ == "__main__":
    with orderly_exit():
        run_script(main, globals())
