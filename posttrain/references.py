"""
What posttrain/qrpo.py knows of its reference model, on disk: samples, their rewards, their log-probs. Each batch is a file, written whole under its
final name, so that a run can be killed anywhere, and runs with the same references share them; what exists is not done again. JSON alone.

    references/settings.json                what they were made from; another start model, data set or seed is refused
               samples-N-0000000.json       N prompts a file: [[ids, ...] of each]
               rewards-HASH-0000000.json    HASH: of the reward's file and function, or of its model's files
               logp-DTYPE-N-0000000.json    N completions a file
"""

import functools
import hashlib
import inspect
import json
import math
import os
import runpy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm

from chat import content_of, normal
from engine import checkpoint
from engine.hardware import at_least_fp32
from model import chunk_rows
from tokenizer import IN_TEXT


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


def token_logp(h, head, targets):
    """log p of each target: h (n, C), head (V, C), targets (n,) -> (n,), in fp32."""
    return -F.cross_entropy(at_least_fp32(h @ head.T.to(h.dtype)), targets, reduction="none")


def padded(sequences, device):
    """Pairs of ids (prompt, completion) -> idx (B, T), padded on the right (causal attention never sees it); keep (B, T): completions."""
    T = max(len(p) + len(y) for p, y in sequences)
    idx, keep = torch.zeros(len(sequences), T, dtype=torch.long), torch.zeros(len(sequences), T, dtype=torch.bool)
    for row, on, (p, y) in zip(idx, keep, sequences):
        row[:len(p) + len(y)] = torch.tensor([*p, *y])
        on[len(p):len(p) + len(y)] = True
    return idx.to(device), keep.to(device)


def sequence_logp(model, sequences):
    """
    log pi(completion | prompt), summed over the completion's tokens in fp32, with gradient. sequences: B pairs of ids (prompt, completion).
    -> (B,) nats. Logits exist for completion tokens only, a chunk at a time, and are made again in the backward pass: 2,048 tokens of
    131,072 logits would be 1.1 GB a sequence.
    """
    idx, keep = padded(sequences, model.lm_head.weight.device)
    h = model.hidden(idx[:, :-1])[keep[:, 1:]]             # (n, C)     the position before a token predicts it
    targets = idx[:, 1:][keep[:, 1:]]                      # (n,)
    head, rows = model.lm_head.weight, chunk_rows(model.config.vocab_size, h.device)
    logp = [recompute(token_logp, h[i:i + rows], head, targets[i:i + rows], use_reentrant=False) for i in range(0, len(targets), rows)]
    return torch.stack([part.sum() for part in torch.cat(logp).split([len(y) for _, y in sequences])])


@functools.cache
def control_ids(tok):
    return {i for name, i in tok.special.items() if name not in IN_TEXT}


def words(tok, ids):
    """What a completion says, without the control tokens: its end, the brackets of thoughts, and whatever was sampled astray."""
    return tok.decode([i for i in ids if i not in control_ids(tok)])


def load_reward(spec, device):
    """
    --rewards -> a function (row, completion text) -> number.

    FILE.py[:name]: its function reward(prompt, completion), prompt being the text of the last user message; if it takes
    three arguments, the whole line of the data comes third (a gold answer may stand there). hf:FOLDER: transformers'
    sequence classifier with one output, read by its own tokenizer's chat template. ValueError: what is wrong with it.
    """
    if spec.startswith("hf:"):
        try:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ImportError:
            raise ValueError("--rewards=hf:... needs transformers: pip install transformers") from None
        judge = AutoModelForSequenceClassification.from_pretrained(spec[3:], use_safetensors=True).to(device).eval()
        tok = AutoTokenizer.from_pretrained(spec[3:])
        if judge.config.num_labels != 1:
            raise ValueError(f"{spec[3:]} has {judge.config.num_labels} outputs: a reward model has one")

        @torch.no_grad()
        def by_model(row, completion):
            messages = [*map(normal, row["messages"]), dict(role="assistant", content=completion)]
            text = tok.apply_chat_template(messages, tokenize=False)
            ids = tok(text, add_special_tokens=False, return_tensors="pt").to(device)            # the template writes <s> itself
            return judge(input_ids=ids.input_ids).logits[0, 0].item()
        return by_model
    path, name = file_and_function(spec)
    if not os.path.isfile(path):
        raise ValueError(f"--rewards={spec}: there is no file {path}; want FILE.py with reward(prompt, completion), or hf:FOLDER")
    try:
        function = runpy.run_path(path).get(name)
    except Exception as e:                                                  # the user's code: anything may come
        raise ValueError(f"--rewards={spec}: {path} cannot be read ({said(e)})") from None
    if not callable(function):
        raise ValueError(f"--rewards={spec}: {path} has no function {name}(prompt, completion)")
    takes_row = fits(function, "prompt", "completion", {})

    def by_function(row, completion):
        prompt = content_of(normal(next(m for m in reversed(row["messages"]) if m["role"] == "user")))
        return function(prompt, completion, row) if takes_row else function(prompt, completion)
    return by_function


def file_and_function(spec):
    path, _, name = spec.partition(":")
    return path, name or "reward"


def reward_hash(spec):
    """
    Of all that decides the numbers of --rewards: the function's name and its file, or all files of a reward model,
    wherever they lie (a folder, or what transformers has just taken from the hub).
    """
    if not spec:
        return ""
    name, folder = "", spec[3:]
    if not spec.startswith("hf:"):
        file, name = file_and_function(spec)
        files = [file]
    else:
        if not os.path.isdir(folder):
            import huggingface_hub
            folder = huggingface_hub.snapshot_download(folder, local_files_only=True)
        files = [os.path.join(folder, file) for file in sorted(os.listdir(folder))]
    digests = [(os.path.basename(file), checkpoint.sha256(file)) for file in files if os.path.isfile(file)]
    return hashlib.sha256(repr((name, digests)).encode()).hexdigest()[:16]


def fits(function, *arguments):
    """Can it be called with these? Of one that does not say so (written in C): no."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True
