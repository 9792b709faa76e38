"""
What posttrain/qrpo.py knows of its reference model, on disk: samples, their rewards, their log-probs. Each batch is a file, written whole under its
final name, so that a run can be killed anywhere, and runs with the same references share them; what exists is not done again. JSON alone.

    references/settings.json                what they were made from; another start model, data set or seed is refused
               samples-N-0000000.json       N prompts a file: [[ids, ...] of each]
               rewards-HASH-0000000.json    HASH: of the reward's file and function, or of its model's files
               logp-DTYPE-N-0000000.json    N completions a file
"""

import hashlib
import json
import math
import os

import torch.distributed as dist
from tqdm import tqdm

from engine import checkpoint


def fingerprint(model):
    """Which weights these are, wherever they lie: sha256 over the first 64 values of every tensor, in fp32."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        p = p.full_tensor() if hasattr(p, "full_tensor") else p                # one at a time
        digest.update(name.encode() + p.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def same_or_refuse(path, what, ranks):
    """
    References made for one start model, data set and seed are not for another: ValueError names the difference. One
    process looks or writes, and tells the others.
    """
    problem = ""
    if ranks.first and os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            have = json.load(f)
        changed = [f"{k} {have.get(k)!r} -> {v!r}" for k, v in what.items() if have.get(k) != v]
        if changed:
            problem = (f"{os.path.dirname(path)} holds references of other settings: {'; '.join(changed)}. "
                       "Name another --references or --out")
    elif ranks.first:
        written(path, what)
    problem = checkpoint.everyone(problem, ranks.files)[0]
    if problem:
        raise ValueError(problem)


def written(path, content):
    """A JSON file, whole or not at all. Runs that share the folder may write it at once: each under a name of its own."""
    mine = f"{path}.{os.urandom(4).hex()}"
    checkpoint.write_flushed(mine, json.dumps(content))
    os.replace(mine, path)


def cached(folder, stage, total, batch, compute, ranks, together=False):
    """
    compute(first, last) -> a JSON list of last - first entries, for all of range(total); split over processes; returns all entries.
    together: all processes must compute as often, because they gather each other's weights for it; a superfluous result is thrown away.
    """
    files = [(os.path.join(folder, f"{stage}-{first:07d}.json"), first, min(first + batch, total)) for first in range(0, total, batch)]
    mine = [f for k, f in enumerate(files) if k % ranks.size == ranks.rank and not os.path.exists(f[0])]
    rounds = max(checkpoint.everyone(len(mine), ranks.files)) if together else len(mine)
    for k in tqdm(range(rounds), stage, disable=not rounds or not ranks.first, leave=False):
        path, first, last = mine[k] if k < len(mine) else files[0]
        entries = compute(first, last)
        if k < len(mine):
            written(path, entries)
    if ranks.size > 1:
        dist.barrier()
    entries = []
    for path, _, _ in files:
        with open(path, encoding="utf-8") as f:
            entries += json.load(f)
    return entries


def said(error):
    """An exception of the user's code in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def scored(row, texts, score, where):
    """Rewards of completions of a row's prompt, floats. ValueError says where, if the function raises or returns no finite number."""
    values = []
    for text in texts:
        try:
            values.append(float(score(row, text)))
        except Exception as e:                                              # the user's code: anything may come
            raise ValueError(f"{where} failed on completion {text[:60]!r} ({said(e)}). What was sampled is kept: repair it "
                             "and --resume") from None
        if not math.isfinite(values[-1]):
            raise ValueError(f"{where} gave {values[-1]} for completion {text[:60]!r}: want a finite number")
    return values


def column(row, name, want, where):
    """The first `want` of a row's list of numbers. ValueError if it has fewer, or one that is not finite."""
    values = row.get(name, []) if not want else row.get(name)
    if not isinstance(values, list) or len(values) < want or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values):
        less = "or a lower --n_refs" if name == "ref_rewards" else "one for each completion"
        raise ValueError(f"{where}: {name} is {str(values)[:60]}; want {want} finite numbers, {less}; or --rewards to compute them")
    return [float(v) for v in values[:want]]
