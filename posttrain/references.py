"""
The references of posttrain/qrpo.py on disk: sampled completions, their rewards, their log-probs.

Each batch is a JSON file, written whole under its final name, and an existing file is not made again: a run can be
killed anywhere, and runs with the same start model share the folder.

    references/HASH/                             HASH: of the start model, the data, the seed and the lengths
                    samples-N-0000000.json       N prompts per file: [[ids, ...] of each prompt]
                    rewards-HASH-0000000.json    HASH: of the reward's file and function, or of its judge and charter
                    logp-DTYPE-N-of-M-0000000.json    N of the M completions per file
"""

import inspect
import itertools
import math
import runpy

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recompute

import evaluate
from chat import content_of
from loss import at_least_fp32, chunk_rows
from posttrain.common import cached
from posttrain.judge import Charter, of_spec

# -----------------------------------------------------------------------------
# the folder


def file_of(folder, stage, k):
    """The file of a stage that begins with its k-th entry."""
    return f"{folder}/{stage}-{k:07d}.json"


def of_stage(folder, ranks, stage, inputs, per_file, compute, **how):
    """
    A list with an entry for each of the inputs, per_file of them in a file: compute(k, part) for part = inputs[k:...].

    how: as in common.cached.
    """
    starts = range(0, len(inputs), per_file)
    files = [file_of(folder, stage, k) for k in starts]
    parts = [inputs[k:k + per_file] for k in starts]
    found = cached(files, ranks, stage, lambda n: compute(starts[n], parts[n]), **how)
    return list(itertools.chain(*found))


# -----------------------------------------------------------------------------
# log-probs


def token_logp(h, targets, head):
    """log p of each target: h (n, C), targets (n,), head (V, C) -> (n,), in fp32."""
    logits = at_least_fp32(h @ head.to(h.dtype).T)
    return -F.cross_entropy(logits, targets, reduction="none")


def laid_out(sequences):
    """B pairs of ids (prompt, completion) -> idx and targets, (B, T) each on the CPU; -1: not of the completion."""
    return evaluate.padded_batch([([*prompt, *completion], len(prompt)) for prompt, completion in sequences], "cpu")


def sequence_logp(model, sequences):
    """
    log pi(completion | prompt) in nats, summed over the completion's tokens in fp32, with gradient.

    sequences: B pairs of ids (prompt, completion) -> (B,). Logits exist for the tokens of completions only, a chunk at
    a time, and are computed again in the backward pass: 2,048 tokens of 131,072 logits would be 1.1 GB per sequence.
    """
    head = model.lm_head.weight                     # (V, C)
    idx, targets = laid_out(sequences)
    # The completions are located on the CPU, because nonzero() on a GPU would wait for it.
    where = (targets >= 0).flatten().nonzero()[:, 0]
    targets = targets.flatten()[where]              # (n,)
    # Not on MPS, which may read a tensor after it is freed (pytorch issue 189690).
    idx, where, targets = (t.to(head.device, non_blocking=head.is_cuda) for t in (idx, where, targets))
    h = model.hidden(idx).flatten(0, 1)[where]      # (n, C), at the position before each token
    head = model.lm_head.weight                     # again, since sharded ranks have gathered it in hidden()
    rows = chunk_rows(len(head), h.device)
    logp = [recompute(token_logp, *chunk, head, use_reentrant=False)
            for chunk in zip(h.split(rows), targets.split(rows))]
    each = torch.cat(logp).split([len(completion) for _, completion in sequences])
    return torch.stack([part.sum() for part in each])


# -----------------------------------------------------------------------------
# rewards


def in_one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())


def numbers(row, name, n, where):
    """The numbers row[name] as floats, of ref_rewards the first n. ValueError if they are not n finite numbers."""
    values = row.get(name, [])
    if isinstance(values, list) and name == "ref_rewards":
        values = values[:n]
    fits = isinstance(values, list) and len(values) == n
    if not fits or not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        raise ValueError(f"{where} {name}={str(values)[:60]}: want {n} finite numbers")
    return list(map(float, values))


def load_reward(spec, device):
    """
    --rewards -> a function (row, completions) -> a number for each of the completions of one prompt.

    FILE.py[:name]: its function reward(prompt, completion), where prompt is the text of the last user message; a third
    argument gets the whole row of the data, which may hold a gold answer. Or its function rewards(row, completions),
    recognised by its argument `completions`. charter:MODEL[,FILE]: posttrain/judge.py. ValueError: no such function.
    """
    path, _, name = spec.partition(":")
    if path == "charter":
        return Charter(*of_spec(name), device)
    try:
        found = runpy.run_path(path)
    except Exception as e:          # anything may come from the user's code
        raise ValueError(f"--rewards={spec}: {path} cannot be read ({in_one_line(e)}); want FILE.py with "
                         "reward(prompt, completion), or charter:MODEL,FILE") from None
    wanted = [name] if name else ["reward", "rewards"]
    functions = [found[name] for name in wanted if callable(found.get(name))]
    if len(functions) != 1:
        raise ValueError(f"--rewards={spec}: {path} has {len(functions)} functions named {' or '.join(wanted)}: want "
                         "one, reward(prompt, completion) or rewards(row, completions); FILE.py:NAME picks it")
    [function] = functions
    signature = inspect.signature(function)
    if "completions" in signature.parameters:
        return function
    try:
        signature.bind("prompt", "completion", "row")
        most = 3
    except TypeError:
        most = 2

    def one_by_one(row, completions):
        question = content_of(row["messages"][-1])
        return [function(*(question, completion, row)[:most]) for completion in completions]
    return one_by_one
