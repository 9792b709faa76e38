"""
What SFT and QRPO share besides their lesson: the start model, the order of the data, a step on several ranks, the run.

A run goes `epochs` times over its items, the conversations of SFT or the pairs of completions of QRPO, batch_size of
them per step, in micro-batches that the ranks divide among themselves. posttrain/sft.py and posttrain/qrpo.py keep
their settings as globals; what is here takes them as arguments, or all of them as the dict `config`.
"""

import contextlib
import dataclasses
import json
import math
import os

import numpy as np
import torch
from tqdm import tqdm

import convert
import tokenizer
from ademamix import check_states
from data import by_epoch
from engine import checkpoint, memory, plot, restore, runs
from engine.files import write_flushed
from engine.gpus import memory_of
from engine.hardware import keep_freed_memory, pick_device
from engine.parallel import Ranks, add_gradients, square_norm
from engine.resume import refuse_another
from model import Apertus
from posttrain import forgetting, lora
from posttrain.quantised import quantise

WAIT = 7200     # seconds that a rank waits for another one: sampling the references may take long

# A resumed run may change these settings, because they change no number but by rounding. data, with the rules that some
# of it is left out by, and rewards are compared by the hash of their content, references by their own settings.json.
FREE = {
    "out", "data", "keep_licenses", "decontaminate", "rewards", "references", "show", "resume", "device", "parallel",
    "compile", "micro_batch", "pack", "rank_every", "checkpoint_every", "keep_checkpoints", "recompute",
    "old", "old_every", "old_windows",
}
# Settings of adapters, which decide nothing where all weights are trained.
OF_ADAPTERS = {"lora_r", "lora_alpha", "lora_on", "lora_rs", "base", "start_hash"}


# -----------------------------------------------------------------------------
# the start model


def adapters_of(config):
    """What --lora_r and its like ask for, under PEFT's names (posttrain/lora.py); None: all weights are trained."""
    if not config.get("lora_r"):
        return None
    return lora.settings_of(config["lora_r"], config["lora_alpha"], config["lora_on"], config["lora_rs"])


def start_model(name, device, dtype, ranks=None, base="fp32", adapters=None, seed=28):
    """
    The start model, with activations in dtype, and its tokenizer. model.start says which weights lie below adapters.

    base: what the weights are held in: fp32, or if adapters are trained beside them bf16, int8 or nf4
    (posttrain/quantised.py). adapters: as adapters_of returns them; seed: of their initial values.
    With sharded ranks (fsdp, hsdp) each rank reads its own shards from the files, and none ever holds the whole model
    (70B: 282 GB). ValueError if model and tokenizer do not belong together, or if the tokenizer cannot write a chat.
    """
    model, tok = load_start(name, device, dtype, ranks, base, adapters, seed, chat=True)
    tok.check_chat()
    return model, tok


def load_start(name, device, dtype, ranks, base, adapters, seed, chat=False):
    """The same for text of any kind, without a chat."""
    def spread(model):
        # The model arrives on the meta device, without memory: only the shards of this rank are allocated.
        model.to(DTYPES[base])
        if adapters:
            lora.adapt(model, adapters)
        from engine.fsdp import shard                      # slow to import, seldom needed
        shard(model, ranks.mesh, dtype, ranks.sum_dtype)
        model.to_empty(device=device)
        from torch.distributed.fsdp import register_fsdp_forward_method
        register_fsdp_forward_method(model, "hidden")

    sharded = ranks and ranks.sharded
    check_base(base, adapters)
    if sharded and base in ("int8", "nf4"):
        raise ValueError(f"parallel={ranks.mode} shards weights, and {base} keeps bits beside their scales: "
                         "--parallel=ddp holds them whole on each rank, or take --base=bf16")
    if sharded:
        model, tok = convert.load_any(name, device, spread=spread, chat=chat)
    else:
        bits = base if base in ("int8", "nf4") else ""
        model, tok = convert.load_any(name, device, DTYPES[base], base=bits, chat=chat)
    # Those that spread has put there lie in shards, which can reshard.
    if lora.adapted(model) and not hasattr(model, "reshard"):
        raise ValueError(f"{name} holds adapters: make one model of them first, "
                         f"python convert.py --load={name} --save=FOLDER --merge")
    model.dtype = dtype
    model.start = convert.fingerprint(model) if adapters else ""
    if adapters and sharded:
        lora.draw(model, seed)
    elif adapters:
        lora.adapt(model, adapters, seed)
    return model, tok


def shapes_of(shape, adapters=None, base="fp32"):
    """
    The model on the meta device: shapes, dtypes and what is trained.

    adapters: what posttrain/lora.py is asked for, None = all weights are trained; base: fp32, bf16, int8 or nf4, what
    the weights are held in.
    """
    with torch.device("meta"):
        model = Apertus(shape, seed=None)
    if base != "fp32":
        model.bfloat16()
    if base in ("int8", "nf4"):
        quantise(model, base)
    if adapters:
        lora.adapt(model, adapters)
    return model


def check_room(config, device, ranks):
    """
    ValueError, with the sum, if weights, gradients and optimizer alone are more than the device has. config: all
    settings. Only config.json of the start model is read for it.
    """
    shape = convert.shape_of(config["init_from"])
    room = memory_of(device)
    if not shape or not room:
        return

    def takes(adapters, base):
        """GB on each rank."""
        kinds = memory.held(shapes_of(shape, adapters, base), config["optimizer"], config["state_dtype"])
        return sum(kinds.values()) / 1e9 / (ranks.shard if ranks.sharded else 1)

    adapters, room = adapters_of(config), room / 1e9
    needed = takes(adapters, config["base"])
    if needed <= room:
        return
    instead = "take a larger device, or shard the model over several (--parallel=fsdp)"
    for base in ("bf16", "int8", "nf4"):
        less = takes(lora.settings_of(16, 32, "all"), base)
        # Activations take a few GB more.
        if less <= 0.8 * room:
            instead = f"--lora_r=16 --base={base} takes {less:.1f} and its activations (python -m tools.plan)"
            break
    raise ValueError(f"{config['init_from']}: weights, gradients and {config['optimizer']} take {needed:.1f} GB, and "
                     f"{device} has {room:.1f}: {instead}")


# What a base is loaded in; None: as its file has it, before its matrices are quantised.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": None, "nf4": None}


def check_base(base, adapters):
    """ValueError for a base that there is not, and for one that is to be trained in few bits."""
    if base not in DTYPES:
        raise ValueError(f"base={base!r}: there is {', '.join(DTYPES)}")
    if base != "fp32" and not adapters:
        raise ValueError(f"base={base}: weights that are trained are held in fp32; "
                         f"--lora_r=16 trains adapters beside frozen weights in {base}")


def window(max_length, model):
    """max_length, or the model's window for 0. ValueError for more than the model has ever seen at once."""
    limit = model.config.block_size
    if max_length > limit:
        raise ValueError(f"max_length={max_length} is beyond the window of the start model, {limit} tokens: "
                         f"take --max_length={limit}, and what is longer is left out")
    return max_length or limit


# -----------------------------------------------------------------------------
# the order of the data and the learning rate, as pure functions of the step


def items(step, batch_size, n, epochs, seed):
    """
    Which of n items a step takes: (at most batch_size,) numbers in [0, n), each epoch in an order of its own.

    A pure function of the step, so that a resumed run and any number of ranks see the same batches.
    """
    position = np.arange(step * batch_size, min((step + 1) * batch_size, epochs * n))
    epoch, i = np.divmod(position, n)
    return by_epoch(epoch, i, n, seed)


def linear(step, steps, warmup):
    """
    Share of the peak learning rate: linear up over the first `warmup` of the steps, then linear down.

    This is transformers' "linear" schedule with its zeros just outside the run, at step -1 and at step `steps`: every
    step learns, also the only step of a run.
    """
    up = max(1, math.ceil(warmup * steps))
    return min((step + 1) / up, (steps - step) / (steps - up + 1))


def too_short(what, n, epochs, batch_size):
    """A warning if the run has fewer than ten steps, with values that give it ten; otherwise an empty string."""
    total = epochs * n
    steps = -(-total // batch_size)
    if steps >= 10:
        return ""
    fits = f"--batch_size={total // 10}" if total >= 10 else f"--batch_size=1 --epochs={-(-10 // n)}"
    return (f"warning: {total} {what} in batches of {batch_size} make a run of {steps} step{'s' * (steps > 1)}, "
            f"too short for a warm-up and a decay: try {fits}")


# -----------------------------------------------------------------------------
# one step on several ranks


def slices(n, micro_batch, ranks):
    """
    The micro-batches of n items that this rank takes: yields (slice, whether it is this rank's last one).

    Sharded ranks gather each other's weights, so all of them must run equally often: a slice may lie beyond n. It is
    then empty, and the rank runs something that adds nothing.
    """
    count = -(-n // micro_batch)
    if ranks.sharded:
        count = -(-count // ranks.size) * ranks.size
    mine = range(ranks.rank, count, ranks.size)
    for k in mine:
        begin = k * micro_batch
        yield slice(begin, begin + micro_batch), k == mine[-1]


def collect(model, ranks, clip):
    """
    Sum the gradients over ranks, then clip them by their global norm. Returns the norm before clipping.

    A sum is the gradient of the step, since each loss was divided by the count of the whole step. FSDP has summed its
    shards already. A rank that had no micro-batch adds zeros.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    add_gradients(model, ranks)
    [square] = ranks.add(square_norm(model, ranks))
    norm = math.sqrt(square)
    scale = min(1.0, clip / (norm + 1e-6))
    if scale < 1:
        for p in trained:
            p.grad.mul_(scale)
    return norm


def update(opt, step, rate, loss, norm):
    """One step of the optimizer at this learning rate. ValueError, before any change, if loss or norm is not finite."""
    if not math.isfinite(loss + norm):
        raise ValueError(f"step {step}: loss {loss}, gradient norm {norm}. "
                         "Stopped before the update; try a lower --lr and --resume")
    for group in opt.param_groups:
        group["lr"] = rate
    opt.step()
    opt.zero_grad(set_to_none=True)


# -----------------------------------------------------------------------------
# the run and its folder


@contextlib.contextmanager
def joined(config, look):
    """
    Around a run: claim its folder and meet the other ranks. Yields (ranks, the device of this rank).

    config: all settings. What can be seen to be wrong at once is a ValueError before anything is written; look(data)
    raises it for data whose first row is no conversation.
    """
    if config["keep_checkpoints"] < 0:
        raise ValueError(f"keep_checkpoints={config['keep_checkpoints']}: want how many of the newest to keep, or 0 "
                         "for all")
    look(config["data"])
    ranks = Ranks(config["parallel"])
    device = ranks.place(pick_device(config["device"]))
    check_states(config["optimizer"], config["state_dtype"])
    check_room(config, device, ranks)
    with runs.claim(config["out"], config["resume"], ranks):
        ranks.join(device, WAIT)
        if device == "cpu":
            keep_freed_memory()
        yield ranks, device
        ranks.leave()
        # The picture comes last, when no rank waits for this one any more.
        if ranks.first:
            picture = os.path.join(config["out"], "loss.png")
            plot.curves([config["out"]], picture, plot.PANELS | dict(loss="loss"), "step")
            print(f"the curve: {picture}")


def begin(config, model, tok, opt, notes, what, n, steps, ranks, old=None):
    """
    Resume if the settings say so, describe the run in its folder, print the notes. Returns (steps done, the log), in
    which what the start model knows of `old`, a forgetting.Old, comes first.

    config: all settings, with max_length resolved and hashes of what else decides a number. what, n: the items' name
    and number. ValueError if no step is left, or if the folder's run had other settings.
    """
    out = config["out"]
    start = go_on(out, model, opt, config, ranks) if config["resume"] else 0
    if start >= steps:
        raise ValueError(f"{out} is finished: all {steps} steps are done; "
                         f"talk to it: python sample.py --chat --init_from={out}")
    if ranks.first:
        describe_run(out, config, model, tok)
        print(*notes, f"{n} {what}, {steps} steps", sep="\n")
        if warning := too_short(what, n, config["epochs"], config["batch_size"]):
            print(warning)
    model.train()
    log = runs.open_log(out, start, ranks)
    if old and not start:
        log(step=0, **old.measure(model, ranks))
    if old:
        old.remember(start, ranks.first)
    return start, log


def progress(start, steps, ranks):
    """The steps that are left, with a bar on the first rank."""
    return tqdm(
        range(start, steps), initial=start, total=steps, unit="step",
        disable=not ranks.first, dynamic_ncols=True,
    )


def save_if_due(config, done, last, model, opt, ranks):
    """A checkpoint after the last step, and every checkpoint_every steps before it."""
    every = config["checkpoint_every"]
    if last or every and done % every == 0:
        folder = os.path.join(config["out"], "ckpt")
        tensors = checkpoint.tensors_of(model, opt)
        checkpoint.write(folder, done, tensors, dict(config=config), config["keep_checkpoints"], None, ranks.files)


def end(config, model, tok, done, steps, ranks, old=None):
    """After the loop: the model for transformers and summary.json, or how a stopped run goes on."""
    out = config["out"]
    if ranks.first:
        runs.forget(out, "stop")
    if done == steps:
        export(config, model, tok, ranks)
        if ranks.first:
            forgetting.conclude(out, steps, old)
    elif ranks.first:
        print(f"{out}: stopped as asked after step {done} of {steps}, saved; --resume goes on")


def describe_run(out, config, model, tok):
    """config.json of a run folder: settings, the model's shape, the vocabulary by name or as a file beside it."""
    vocabulary = tokenizer.keep_for(tok, out)
    content = {**config, **dataclasses.asdict(model.config), "chat": True, "tokenizer": vocabulary}
    write_flushed(os.path.join(out, "config.json"), json.dumps(content, indent=1))


def export(config, model, tok, ranks):
    """
    Adapters in out/adapter, for PEFT, or the model in out/hf, for transformers.

    All ranks gather shards of adapters; those of a model are read back from the last checkpoint, whole, by one.
    """
    out = config["out"]
    if adapters := adapters_of(config):
        lora.save(model, adapters, f"{out}/adapter", config["init_from"], model.start, ranks.first)
    if not ranks.first:
        return
    if adapters:
        print(f"{out}: talk to it with python sample.py --chat --init_from={out}; for PEFT: {out}/adapter; "
              f"as one model: python convert.py --load={out} --save={out}/hf --merge")
        return
    tok.eos = tok.special["<|assistant_end|>"]      # the text of a chat model ends where its turn does
    model = convert.load_run(out)[0] if ranks.sharded else model
    convert.save_hf(model, os.path.join(out, "hf"), tok)
    print(f"{out}: talk to it with python sample.py --chat --init_from={out}; for transformers: {out}/hf")


def go_on(out, model, opt, config, ranks):
    """
    Load the newest intact checkpoint. Returns the steps it has done; 0 if there is none.

    ValueError names the settings that differ from those of its run, FREE ones excepted.
    """
    found = restore.newest_intact(os.path.join(out, "ckpt"), ranks.files)
    if not found:
        return 0
    path, manifest = found
    free = FREE if config["lora_r"] or manifest["config"].get("lora_r") else FREE | OF_ADAPTERS
    compared = {name: value for name, value in config.items() if name not in free}
    # Runs from before that setting had fp32.
    refuse_another(path, dict(state_dtype="float32") | manifest["config"], compared)
    restore.load(path, model, opt)
    return manifest["step"]

