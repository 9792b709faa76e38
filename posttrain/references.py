"""
What posttrain/qrpo.py knows of its reference model, on disk: sampled completions, their rewards, their log-probs.

Each batch is a JSON file, written whole under its final name, and what exists is not done again: a run can be killed
anywhere, and runs that start from the same model share the folder.

    references/settings.json                what they were made from; another start model, data set or seed is refused
               samples-N-0000000.json       N prompts per file: [[ids, ...] of each prompt]
               rewards-HASH-0000000.json    HASH: of the reward's file and function, or of its judge and charter
               logp-DTYPE-N-0000000.json    N completions per file
"""

import inspect
import json
import math
import os
import runpy

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm

from chat import content_of
from engine import checkpoint
from engine.files import write_flushed
from loss import at_least_fp32, chunk_rows
from posttrain.judge import Charter, hash_of, of_spec, version
from tokenizer import IN_TEXT, read_json


# -----------------------------------------------------------------------------
# the folder


def same_or_refuse(folder, made_from, ranks):
    """
    References made for one start model, data set and seed are not for another: ValueError names the difference.

    Only the first rank reads or writes settings.json, since another could meet it half written; it tells the others.
    """
    path = f"{folder}/settings.json"
    problem = ""
    if ranks.first and os.path.exists(path):
        have = read_json(path)
        changed = [f"another {name}" if len(str(value)) == 64 else f"{name} {have.get(name)!r} -> {value!r}"
                   for name, value in made_from.items() if have.get(name) != value]
        if changed:
            problem = (f"{folder} holds references of other settings: {', '.join(changed)}. "
                       "Name another --references or --out")
    elif ranks.first:
        os.makedirs(folder, exist_ok=True)
        write_flushed(path, json.dumps(made_from), shared=True)
    problem = checkpoint.everyone(problem, ranks.files)[0]
    if problem:
        raise ValueError(problem)


def on_disk(folder, stage, k):
    """Whether the file of a stage that begins with its k-th entry is there."""
    return os.path.exists(f"{folder}/{stage}-{k:07d}.json")


def cached(folder, ranks, stage, inputs, per_file, compute, together=False):
    """
    A list with an entry for each of the inputs, per_file of them in a file: compute(k, part) for part = inputs[k:...].

    The files that are missing are divided among the ranks, and every rank returns all entries. together: all ranks must
    compute equally often, because they gather each other's weights for it; superfluous results are thrown away.
    """
    def file(k):
        return os.path.join(folder, f"{stage}-{k:07d}.json")

    starts = range(0, len(inputs), per_file)
    mine = [k for k in starts[ranks.rank::ranks.size] if not os.path.exists(file(k))]
    rounds = len(mine)
    if together:
        rounds = max(checkpoint.everyone(rounds, ranks.files))
    quiet = not rounds or not ranks.first
    for n in tqdm(range(rounds), stage, disable=quiet, leave=False):
        superfluous = n >= len(mine)
        k = 0 if superfluous else mine[n]
        entries = compute(k, inputs[k:k + per_file])
        if not superfluous:
            write_flushed(file(k), json.dumps(entries), shared=True)
    ranks.add(0)        # Barrier: no rank reads before every rank has written.
    entries = []
    for k in starts:
        with open(file(k), encoding="utf-8") as f:
            entries += json.load(f)
    return entries


# -----------------------------------------------------------------------------
# log-probs


def token_logp(h, head, targets):
    """log p of each target: h (n, C), head (V, C), targets (n,) -> (n,), in fp32."""
    head = head.to(h.dtype)
    logits = at_least_fp32(h @ head.T)
    return -F.cross_entropy(logits, targets, reduction="none")


def padded(sequences):
    """
    B pairs of ids (prompt, completion) -> idx (B, T), and keep (B, T) bool, where the completions are.

    Rows are padded on the right, which causal attention never sees.
    """
    idx, keep = [], []
    for prompt, completion in sequences:
        ids = torch.tensor([*prompt, *completion])
        position = torch.arange(len(ids))
        idx.append(ids)
        keep.append(position >= len(prompt))
    idx = pad_sequence(idx, batch_first=True)
    keep = pad_sequence(keep, batch_first=True)
    return idx, keep


def sequence_logp(model, sequences):
    """
    log pi(completion | prompt) in nats, summed over the completion's tokens in fp32, with gradient.

    sequences: B pairs of ids (prompt, completion) -> (B,). Logits exist for the tokens of completions only, a chunk at
    a time, and are computed again in the backward pass: 2,048 tokens of 131,072 logits would be 1.1 GB per sequence.
    """
    device = model.lm_head.weight.device
    idx, keep = padded(sequences)
    # Where they stand is known here. A GPU that looked for it would have to be waited for.
    where = keep[:, 1:].flatten().nonzero()[:, 0]
    targets = idx[:, 1:].flatten()[where]           # (n,)
    idx, where, targets = (t.to(device, non_blocking=True) for t in (idx, where, targets))
    h = model.hidden(idx[:, :-1]).flatten(0, 1)     # (B (T - 1), C)
    h = h[where]                                    # (n, C), at the position before each token
    rows = chunk_rows(model.config.vocab_size, h.device)
    head = model.lm_head.weight                     # (V, C); sharded ranks have gathered it in hidden()
    logp = []
    for part, wanted in zip(h.split(rows), targets.split(rows)):
        logp.append(recompute(token_logp, part, head, wanted, use_reentrant=False))
    lengths = [len(completion) for _, completion in sequences]
    completions = torch.cat(logp).split(lengths)
    return torch.stack([part.sum() for part in completions])


# -----------------------------------------------------------------------------
# rewards


def words(tok, ids):
    """The text of a completion without control tokens: its end, the brackets of thoughts, whatever else was sampled."""
    control = {i for name, i in tok.special.items() if name not in IN_TEXT}
    text = [i for i in ids if i not in control]
    return tok.decode(text)


def scored(row, texts, score, where):
    """
    Rewards of the completions of a row's prompt, as floats.

    ValueError begins with `where` if the function raises, or returns something else than finite numbers, one for each.
    """
    values = []
    try:
        for value in score(row, texts):
            values.append(float(value))
    except Exception as e:      # anything may come from the user's code
        [at, *_] = texts[len(values):] or [""]
        raise ValueError(f"{where} failed on completion {at[:60]!r} ({in_one_line(e)}). "
                         "What was sampled is kept: repair it and --resume") from None
    if len(values) != len(texts):
        raise ValueError(f"{where} gave {len(values)} rewards for {len(texts)} completions")
    for text, value in zip(texts, values):
        if not math.isfinite(value):
            raise ValueError(f"{where} gave {value} for completion {text[:60]!r}: want a finite number")
    return values


def in_one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())


def column(row, name, want, where):
    """The first `want` of a row's list of numbers. ValueError if it has fewer, or one that is not finite."""
    def finite(value):
        return isinstance(value, (int, float)) and math.isfinite(value)

    values = row.get(name, [])
    enough = isinstance(values, list) and len(values) >= want
    if not enough or not all(map(finite, values)):
        fewer = "or a lower --n_refs" if name == "ref_rewards" else "one for each completion"
        raise ValueError(f"{where}: {name} is {str(values)[:60]}; want {want} finite numbers, {fewer}; "
                         "or --rewards to compute them")
    return [float(v) for v in values[:want]]


def load_reward(spec, device):
    """
    --rewards -> a function (row, completions) -> a number for each: it sees all completions of a prompt together.

    FILE.py[:name]: its function reward(prompt, completion), prompt being the text of the last user message; if it takes
    three arguments, the whole line of the data comes third (a gold answer may stand there). Or its function
    rewards(row, completions), known by that argument's name. charter:MODEL[,FILE]: posttrain/judge.py. ValueError
    says what is wrong with it.
    """
    kind, _, rest = spec.partition(":")
    if kind == "charter":
        return Charter(*of_spec(rest), device)
    path, name = file_and_function(spec)
    if not os.path.isfile(path):
        raise ValueError(f"--rewards={spec}: there is no file {path}; want FILE.py with reward(prompt, completion), or "
                         "charter:MODEL,FILE")
    try:
        found = runpy.run_path(path)
    except Exception as e:          # anything may come from the user's code
        raise ValueError(f"--rewards={spec}: {path} cannot be read ({in_one_line(e)})") from None
    if ":" not in spec and callable(found.get("rewards")):
        if callable(found.get("reward")):
            raise ValueError(f"--rewards={spec}: {path} has reward and rewards: say which, --rewards={path}:rewards")
        name = "rewards"
    function = found.get(name)
    if not callable(function):
        raise ValueError(f"--rewards={spec}: {path} has no function {name}(prompt, completion), and no "
                         "rewards(row, completions)")
    if fits(function, {}, []) and "completions" in inspect.signature(function).parameters:
        return function
    takes_row = fits(function, "prompt", "completion", {})

    def by_function(row, completion):
        question = next(m for m in reversed(row["messages"]) if m["role"] == "user")
        arguments = [content_of(question), completion]
        if takes_row:
            arguments.append(row)
        return function(*arguments)
    return one_by_one(by_function)


def one_by_one(reward):
    """The function (row, completions) of one that sees a completion at a time. Lazy: what has failed can be named."""
    return lambda row, completions: (reward(row, text) for text in completions)


# -----------------------------------------------------------------------------
# what a reward is


def file_and_function(spec):
    path, _, name = spec.partition(":")
    return path, name or "reward"


def fits(function, *arguments):
    """Whether it can be called with these. A function written in C may not tell: then no."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def reward_hash(spec):
    """
    A hash of all that decides the numbers of --rewards, in whatever folder it is; "" for none.

    Of the function's name and its file, or of a judge, its charter and our prompts.
    """
    if not spec:
        return ""
    kind, _, rest = spec.partition(":")
    if kind == "charter":
        return version(*of_spec(rest))
    file, name = file_and_function(spec)
    return hash_of([file], name)
