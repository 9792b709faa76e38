"""
Shared by SFT and QRPO: train.py's loop over items, which are conversations or pairs of completions.

A run goes `epochs` times over its items, batch_size of them per step, in micro-batches that the ranks divide among
themselves. Both scripts keep their settings as globals, copy them to train.py, and replace the functions of its loop
that read the data and compute the loss.
"""

import json
import math
import os
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

import convert
import train
from ademamix import build_optimizer
from configurator import settings
from data import by_epoch
from engine.checkpoint import gather, steps_in
from engine.files import read_text, write_flushed
from engine.memory import check_run
from engine.mixture import SLOTS, mix_weights
from engine.parallel import drop_gathered
from engine.restore import refuse_another
from engine.runs import asked, settings_of
from posttrain import start

# A resumed run may change these settings, because they change no number by more than rounding. The hashes of the data
# (with keep_licenses and decontaminate) and of the rewards must be the same; references have a folder of their own.
FREE = """out data keep_licenses decontaminate rewards references show resume device parallel compile micro_batch pack
rank_every checkpoint_every keep_checkpoints recompute old old_every old_windows"""


# -----------------------------------------------------------------------------
# the run


def tune(script, what, prepare, batches, forward_backward):
    """
    Run SFT or QRPO with the loop of train.py.

    script: the globals of sft.py or qrpo.py, with the settings; what: "conversations" or "pairs".
    prepare(run) reads the data after the ranks have met. It sets run.items, their number; run.notes, lines for the
    user; run.hashes, {name: hash} of all else that decides the numbers; and run.val.T, the tokens of the longest row.
    batches(run, step), forward_backward(run, batch, step): as in train.py.
    """
    shape, tok, path = convert.start_of(script["init_from"])
    tok.check_chat()
    if not 0 <= script["warmup"] <= 1:
        raise ValueError(f"warmup={script['warmup']} is a share of the steps: want 0 to 1")
    for name in ("epochs", "batch_size", "micro_batch"):
        if script[name] < 1:
            raise ValueError(f"{name}={script[name]} must be at least 1")
    if script["max_length"] > shape.block_size:
        raise ValueError(f"max_length={script['max_length']} is beyond the window of the start model, "
                         f"{shape.block_size} tokens: take --max_length={shape.block_size}; longer {what} are "
                         "left out")
    longest = script["max_length"] or shape.block_size
    mine = settings(script) | dict(max_length=longest)
    for name in mine.keys() & settings(vars(train)).keys():
        setattr(train, name, mine[name])
    vars(train.shape).update(vars(shape), doc_mask=True)
    train.timeout = 7200                                   # a rank may sample references while another waits
    train.sample_every = 0
    train.eval_every = script["old_every"] if script["old"] else 0
    # The rate rises, then falls (lr_at). To train.py all of that is decay, so the file `cooldown` has no effect.
    train.warmup_samples, train.decay_samples = 0, train.total_samples

    def lr_at(samples, decay_at=None):
        steps = train.steps_until(train.total_samples)
        return script["lr"] * linear(samples // script["batch_size"], steps, script["warmup"])

    def open_data(ranks):
        # The length of the rows is not known yet: prepare_items() repeats the memory check.
        meta = dict(vocab_size=shape.vocab_size, tokenizer=tok.hash[:16])
        items = SimpleNamespace(meta=meta, fingerprint="", stop=None, T=0)
        return items, items, script["micro_batch"]

    def prepare_items(run):
        run.tok, run.longest, run.path = tok, longest, path
        # The settings of a resumed run are compared before data are read and references sampled.
        if train.resume and steps_in(f"{train.out}/ckpt"):
            refuse_another(train.out, settings_of(train.out), {name: mine[name] for name in sorted(run.decides)})
        prepare(run)
        # The memory check again, now with the length of the rows.
        check_run(run, start.build, True)
        steps = -(-script["epochs"] * run.items // script["batch_size"])
        train.total_samples = train.decay_samples = steps * script["batch_size"]
        run.decides |= run.hashes.keys()
        run.config |= run.hashes | dict(total_samples=train.total_samples, decay_samples=train.decay_samples)
        run.validate_first = bool(script["old"])

    def introduce(run, end):
        more = dict(chat=True, start_hash=run.config.get("start_hash"))
        convert.describe(train.out, vars(run.shape) | mine | run.hashes | more, run.shape, tok)
        print(*run.notes, f"{run.items} {what}, {end} step{'s' * (end != 1)}", sep="\n")

    def finish(run, last):
        if entry := train.validate(run, 0):
            run.log(step=last - 1, **entry)
        run.summary = dict(steps=last)
        if run.ranks.first:
            print(f"{train.out}: talk to it with python sample.py --chat --init_from={train.out}")

    def forward_backward_or_stop(run, batch, step):
        try:
            return forward_backward(run, batch, step)
        except Stop:
            drop_gathered(run.model)

    train.lr_at, train.open_data, train.introduce, train.finish = lr_at, open_data, introduce, finish
    train.batches, train.forward_backward = batches, forward_backward_or_stop
    train.tokens_seen = lambda step: {}
    train.validate = lambda run, windows: {}
    train.eval_minutes = 0
    # Without `compile`, AdEMAMix decides: its update of a large model is compiled even if the model is not.
    train.build_optimizer = lambda *args, compile, **how: build_optimizer(*args, **how)
    start.wrap(script["old"], script["old_windows"], tok)
    # Without adapters, their settings decide nothing.
    free = FREE.split() + ([] if script["lora_r"] else start.ADAPTERS)
    mine["vocab_size"] = max(shape.vocab_size, tok.vocab_size)
    train.main(start.build, mine, mine.keys() - free, prepare_items)


def cached(files, ranks, what, compute, together=False):
    """
    The contents of JSON files. The k-th of them, if it is missing, is written first, with the value of compute(k).

    The ranks share the missing files, and each rank returns all contents. together: all ranks compute equally often,
    because they gather each other's weights; a rank that is done computes the first file again. what: label of the bar.
    """
    mine = [k for k in range(len(files))[ranks.rank::ranks.size] if not os.path.exists(files[k])]
    if together:
        most = max(gather(len(mine), ranks.files))
        mine += [0] * (most - len(mine))
    for k in tqdm(mine, what, delay=2, leave=False, disable=not ranks.first):
        write_flushed(files[k], json.dumps(compute(k)), shared=True)
    ranks.add(0)        # Barrier: no rank reads before every rank has written.
    return list(map(contents, files))


def contents(file):
    """The value in a JSON file. ValueError, one line, if it is damaged."""
    try:
        return json.loads(read_text(file))
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is damaged: delete it, and it will be made again") from None


# -----------------------------------------------------------------------------
# the order of the data and the learning rate, as pure functions of the step


def interleave(slots):
    """
    An even order of SLOTS samples, in which each source has its number of slots. Returns the source of each sample, and
    how many samples of that source come before it, both (SLOTS,).

    Sample k of a source with n slots is placed at (k + 1/2) / n of the order, like packets in fair queueing. So each
    source also has its share, to within a sample or two, of the first few samples.
    """
    source = np.repeat(np.arange(len(slots)), slots)
    before = np.concatenate(list(map(np.arange, slots)))
    order = np.argsort((before + 0.5) / np.repeat(slots, slots), kind="stable")
    return source[order], before[order]


def chosen(step, batch_size, sizes, weights, epochs, seed):
    """
    The items of a step, numbers (at most batch_size,); those of a source follow on those of the source before it.

    sizes, weights: of each source. A run takes epochs * sum(sizes) items, of which each source supplies its share. A
    source is repeated if need be, each time in another order; with one source, each epoch takes every item once. A
    pure function of the step, so that a resumed run and any number of ranks see the same batches.
    """
    slots = mix_weights(dict(enumerate(weights)))
    source, before = interleave([*slots.values()])
    end = min((step + 1) * batch_size, epochs * sum(sizes))
    position = np.arange(step * batch_size, end)
    block, j = np.divmod(position, SLOTS)
    numbers = np.empty_like(position)
    for s, n in enumerate(sizes):
        mine = source[j] == s
        epoch, i = np.divmod(block[mine] * slots[s] + before[j[mine]], n)
        numbers[mine] = sum(sizes[:s]) + by_epoch(epoch, i, n, seed)
    return numbers


def linear(step, steps, warmup):
    """
    The learning rate as a share of its peak: linear up over a share `warmup` of the steps, then linear down.

    This is transformers' "linear" schedule with its zeros just outside the run, at step -1 and at step `steps`, so that
    every step learns, even if the run has only one.
    """
    up = max(1, math.ceil(warmup * steps))
    return min((step + 1) / up, (steps - step) / (steps - up + 1))


class Stop(Exception):
    """A rank was asked to stop within a step."""


def slices(n, run):
    """
    Yield this rank's micro-batches of n items: (slice, whether it is the rank's last). Raises Stop if, between two of
    them, any rank is asked to stop.

    All ranks get the same number of slices, because sharded ranks gather each other's weights. A slice beyond n is
    empty: the caller then runs a micro-batch that adds nothing.
    """
    ranks = run.ranks
    each = -(-n // (run.rows * ranks.size))
    for k in range(each):
        if k and ranks.agree(asked(train.out, run, "stop")):
            raise Stop
        begin = (k * ranks.size + ranks.rank) * run.rows
        yield slice(begin, begin + run.rows), k + 1 == each


def diagnosed(step, every):
    """Whether posttrain/collapse.py measures this step: a multiple of `every`, or the last step. every=0: no step."""
    return every and (step % every == 0 or step + 1 == train.steps_until(train.total_samples))
