"""
What SFT and QRPO share besides their lesson: the start model, a step on several processes, the schedule, the end of a run.
"""

import dataclasses
import json
import math
import os

import numpy as np
import torch
import torch.distributed as dist

import convert
import tokenizer
from data import permute
from engine import checkpoint, runs
from engine.parallel import shard, square_norm


WAIT = 7200             # seconds that a rank waits for another: sampling takes as long as it takes


def shares(n, ranks):
    """
    The micro-batches of a step that are this rank's, of n: (number, last). Sharded ranks gather each other's weights and must all run as
    often, so the number may lie beyond n: an empty one.
    """
    rounds = range(ranks.rank, -(-n // ranks.size) * ranks.size if ranks.sharded else n, ranks.size)
    return [(k, k + ranks.size >= rounds.stop) for k in rounds]


def collect(model, ranks, clip):
    """
    Sum gradients over ranks (FSDP has done so), then clip them by their global norm, which is returned as it was before. Losses were
    divided by the count of the whole step; a rank that had no micro-batch adds zeros.
    """
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if ranks.size > 1 and not ranks.sharded:
            dist.all_reduce(p.grad)
    norm = math.sqrt(ranks.add(square_norm(model, ranks))[0])
    scale = min(1.0, clip / (norm + 1e-6))
    if scale < 1:
        for p in model.parameters():
            p.grad.mul_(scale)
    return norm


def finish(out, model, tok, ranks, done, steps):
    """
    After the last step: out/hf for transformers. Shards are read back from the last checkpoint, whole, by one process.
    After another, when a signal or `stop` has ended the run: only say so.
    """
    if not ranks.first:
        return
    runs.forget_stop(out)
    if done < steps:
        print(f"{out}: stopped as asked after step {done} of {steps}, saved; --resume goes on")
    else:
        tok.eos = tok.special["<|assistant_end|>"]                          # a chat model's text ends where its turn does
        convert.save_hf(convert.load_run(out)[0] if ranks.sharded else model, os.path.join(out, "hf"), tok)
        print(f"{out}: talk to it with python sample.py --chat --init_from={out}; for transformers: {out}/hf")


def start_model(name, device, dtype, ranks=None):
    """
    The start model with fp32 weights, its tokenizer. With sharded ranks (fsdp, hsdp) each of them reads its shards from the files, and none
    ever holds the model (70B: 282 GB). ValueError if model and tokenizer do not belong together or cannot chat.
    """
    def spread(model):                                                      # comes on the meta device, without memory
        shard(model, ranks.mesh, dtype)
        model.to_empty(device=device)
        from torch.distributed.fsdp import register_fsdp_forward_method
        register_fsdp_forward_method(model, "hidden")

    model, tok = convert.load_any(name, device, torch.float32, spread if ranks and ranks.sharded else None)
    missing = [t for t in ("<|user_start|>", "<|assistant_start|>", "<|assistant_end|>") if t not in tok.special]
    if missing:
        raise ValueError(f"{name}: its tokenizer has no {', '.join(missing)}: chat needs Apertus' special tokens")
    model.dtype = dtype
    return model, tok


def window(max_length, model):
    """max_length, or the model's window for 0. ValueError for more than the model has ever seen at once."""
    limit = model.config.block_size
    if max_length > limit:
        raise ValueError(f"max_length={max_length} is beyond the window of the start model, {limit} tokens: "
                         f"take --max_length={limit}, and what is longer is left out")
    return max_length or limit


def describe_run(out, config, model, tok, ranks):
    """config.json of a run folder: all settings, the model's shape, the vocabulary by name, or as a file beside it if it was trained."""
    if not ranks.first:
        return
    config = {**config, **dataclasses.asdict(model.config), "chat": True, "tokenizer": tokenizer.keep_for(tok, out)}
    checkpoint.write_flushed(os.path.join(out, "config.json"), json.dumps(config, indent=1))


# Settings that a resumed run may change, because they change no number but by rounding. (data and rewards are compared
# by the hash of their content, references by their own settings.json.)
FREE = {"out", "data", "rewards", "references", "show", "resume", "device", "parallel", "compile", "micro_batch", "pack",
        "rank_every", "checkpoint_every", "keep_checkpoints"}


def go_on(out, model, opt, config, ranks):
    """
    Load the newest intact checkpoint. Returns the step to go on with; 0 if there is none. ValueError if its run had
    other settings, FREE ones excepted: names them.
    """
    found = checkpoint.newest_intact(os.path.join(out, "ckpt"), ranks.files)
    if not found:
        return 0
    path, manifest = found
    runs.refuse_another(path, manifest["config"], {name: value for name, value in config.items() if name not in FREE})
    checkpoint.load(path, model, opt)
    return manifest["step"]


def items(step, batch_size, n, epochs, seed):
    """Which of n items a step takes, each epoch in an order of its own: a pure function of its number, for any number of processes."""
    g = np.arange(step * batch_size, min((step + 1) * batch_size, epochs * n))
    epoch, i = np.divmod(g, n)
    return np.concatenate([permute(i[epoch == e], n, seed, int(e)) for e in np.unique(epoch)])


def update(opt, step, rate, loss, norm):
    """One step of the optimizer at this learning rate. ValueError, before anything changes, if the loss or the gradient is not finite."""
    if not math.isfinite(loss + norm):
        raise ValueError(f"step {step}: loss {loss}, gradient norm {norm}. Stopped before the update; try a lower --lr and --resume")
    for group in opt.param_groups:
        group["lr"] = rate
    opt.step()
    opt.zero_grad(set_to_none=True)


def linear(step, steps, warmup):
    """
    Share of the peak learning rate: linear up over the first `warmup` of the steps, then linear down (transformers' "linear").

    The zeros lie just outside the run, at step -1 and at step `steps`: every step learns, also the only one of a run.
    """
    up = max(1, math.ceil(warmup * steps))
    return min((step + 1) / up, (steps - step) / (steps - up + 1))


def too_short(what, n, epochs, batch_size):
    """A warning if the schedule has fewer than ten steps, with values that give it ten; otherwise an empty string."""
    steps = -(-epochs * n // batch_size)
    if steps >= 10:
        return ""
    fits = f"--batch_size={epochs * n // 10}" if epochs * n >= 10 else f"--batch_size=1 --epochs={-(-10 // n)}"
    return (f"warning: {epochs * n} {what} in batches of {batch_size} make a run of {steps} step{'s' * (steps > 1)}, "
            f"too short for a warm-up and a decay: try {fits}")
