"""
Speed: ours against transformers' Apertus, nanoGPT, torch's optimizers, and what this machine can do at all.

    MFU = (6 matrix parameters + 12 L H D attended) tokens / seconds / GEMM peak

attended is the number of positions that a token sees, on average. The head counts, the embedding is a look-up and does
not; causal attention counts once, a recomputed or a masked pair never (PaLM, arXiv 2204.02311, app. B).

A race is believable only if three things hold, and the code below sees to them:
- All contestants compute the same. They have the same weights, and must give the same loss, ids, mask or parameters.
  Otherwise there is an error and no record.
- A neighbour's load hits all of them alike. They run in turns, A B C, B C A, ..., and what is reported is the median of
  the ratios within a round, with a 95 % interval by bootstrap. On a CPU the clock is the process's own time on one
  thread, which others' load does not enter.
- The machine is measured at the same moment. A GEMM or a bandwidth probe runs in the same turns, so that a rate can be
  given as a share of what was possible.

$ python -m tools.bench train --preset=cpu      # a training step against Hugging Face, eager and compiled
$ python -m tools.bench train --preset=packed   # the same on documents of 100 tokens, masked
$ python -m tools.bench finetune --preset=wide  # a step of all weights against one of adapters beside frozen ones
$ python -m tools.bench optim                   # AdEMAMix against AdamW (fused) and a loop over tensors
$ python -m tools.bench goldfish                # the mask against the published expression
$ python -m tools.bench loader                  # batches from disk, with and without Goldfish, against nanoGPT's
$ python -m tools.bench tokenize                # Apertus' tokenizer against Hugging Face's
$ python -m tools.bench prepare --peers         # prepare.py with every filter and with none; datatrove
$ python -m tools.bench decode                  # greedy generation at batch 1
$ python -m tools.bench memory                  # peak memory of a pass with a vocabulary of 131,072
$ python -m tools.bench cold                    # seconds from `python train.py` to the end of its first step
$ python -m tools.bench whole                   # three steps of train.py on the whole 8B, by its own log
$ python -m tools.bench probes                  # what the machine can do: matrix products, memory
$ python -m tools.bench ffn                     # structured feed-forward layers against dense ones, by width
$ python -m tools.bench records/*/*.json        # committed results again, as the README's table
"""

import sys

if __name__ == "__main__" and not __package__:
    print("bench.py: start it from the project's root, python -m tools.bench", file=sys.stderr)
    sys.exit(2)

import collections
import copy
import functools
import glob
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from ademamix import AdEMAMix, param_groups
from data import TokenDataset
from engine import routes as ways_of_a_cpu
from engine.hardware import ROUTES, can_compile, keep_freed_memory, linear, memory_of, vendor_flops
from engine.memory import SHARE, of_step
from engine.parallel import Ranks
from engine.plot import entries, finish, has_log, pyplot, read_json
from generate import generate, lay_out_for_decoding
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig, ChunkedCrossEntropy, Linear, chunk_loss, chunk_rows
from posttrain import lora
from posttrain.quantised import quantise
from studies.kit import flags, run_script, write, write_rows
from studies.kit import table as markdown
from studies.structured import StructuredLinear, forms
from tools.peers import NanoGPT, hugging_face, loop_ademamix, nanogpt_batch, published_mask

paths = []              # one of the modes above, or results (*.json) to print as a table
preset = "auto"         # cpu | packed | laptop | wide | 124m | 1b5 | 8b-stack | tiny: the model and batch, below.
                        # auto: cpu on a CPU; 1b5 on CUDA, where a small one measures how fast kernels are launched
impls = ""              # contestants, comma-separated; "" = those of the mode that fit. ours is always among them
micro_batch = 0         # windows of a step; 0 = the preset's
device = "auto"         # cuda | cpu
dtype = "auto"          # float32 | bfloat16, of activations and GEMMs; weights and states: fp32. auto: bfloat16 on CUDA
routes = ""             # ours' ways on a CPU, as of train.py; "" = timed once (engine/routes.py)
rounds = 7              # that are counted
warmup = 1              # rounds before them, at least one: what compiles at its first call has compiled then
clock = "auto"          # cpu = time of this process, on one thread; wall; auto: cpu on a CPU, wall on CUDA
threads = 1             # of the CPU; 0 = torch's choice
tokens = 64             # to generate in `decode`, after a prompt of 32
widths = (512, 1024, 2048)  # of the model, in `ffn`; the MLP is four times as wide
data = "data/stdlib"    # what prepare.py wrote, for `cold`
started = ("configs/8b.py", "configs/8b_one_gpu.py")    # with what `whole` starts train.py: configs and flags
peers = False           # `prepare`: datatrove and Hugging Face too
seed = 28               # of weights, batches and documents
out = "out/bench"       # folder for <mode>-<preset>-<dtype>.json and .png
readme = ""             # with results: write the table into this file, between its two <!-- bench --> lines

# documents is their mean length in tokens; 0 makes plain causal windows, without Goldfish. 8b-stack has the exact
# layers of the 8B, but eight of them, because no GPU holds all 32 with their optimizer, and two windows, because the
# optimizer's time is the same for any number.
SHAPES = """
preset    batch  block_size  n_layer  n_head  n_kv_head  n_embd  ffn_dim  vocab_size  tie_embeddings  documents
cpu           4         512        6       6          2     384     2048       16384           false          0
packed        4         512        6       6          2     384     2048       16384           false        100
laptop        4         256        2       2          1     128      672        4096            true          0
wide          1         512        4      16          4    1024     5376       16384           false          0
124m         16        1024       12      12          4     768     3584       50304            true          0
1b5           2        4096       16      32          8    2048    12288      131072           false       1000
8b-stack      2        4096        8      32          8    4096    21504      131072           false       1000
tiny          2          64        2       4          2      64      160         320           false         20
"""
HEAD, *ROWS = [line.split() for line in SHAPES.strip().splitlines()]
PRESETS = {
    name: dict(zip(HEAD[1:], map(json.loads, values)))
    for name, *values in ROWS}

CHOICES = dict(
    preset=("auto", *PRESETS),
    dtype=("auto", "float32", "bfloat16"),
    clock=("auto", "cpu", "wall"))


def resolve_settings():
    """
    Refuse what cannot be measured, then put what "auto" stands for into preset, device, dtype and clock.

    ValueError, one line, that names the setting and what there is.
    """
    global preset, device, dtype, clock
    for name, choices in CHOICES.items():
        if globals()[name] not in choices:
            raise ValueError(f"{name}={globals()[name]!r}: there is {', '.join(choices)}")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: want at least 1")
    if micro_batch < 0:
        raise ValueError(f"micro_batch={micro_batch}: want how many windows a step has, or 0 for the preset's")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if preset == "auto":
        preset = "1b5" if device == "cuda" else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    if clock == "auto":
        clock = "cpu" if device == "cpu" else "wall"
    if clock == "cpu" and threads != 1:
        raise ValueError(f"threads={threads}: the CPU clock adds up the time of all; take --threads=1 or --clock=wall")


def work_dtype():
    """The torch.dtype of activations and GEMMs."""
    return getattr(torch, dtype)


def compiles():
    """Whether torch.compile has what it needs here; without it everyone runs eagerly."""
    return can_compile(torch.device(device))


def full_or_tiny(full, tiny):
    """A size, or that of --preset=tiny, with which the tests run everything."""
    return tiny if preset == "tiny" else full


# -----------------------------------------------------------------------------
# a race: who takes part, that they agree, their times in turn, the ratios


def chosen(*names):
    """
    The contestants that take part: ours, first, and those that --impls asks for, or else all.

    Without a compiler the compiled ones stay out, and so does "ours eager", because "ours" is then the same.
    """
    if not compiles():
        names = [
            name for name in names
            if name != "ours eager" and not name.endswith("compile")]
    asked = [name.strip() for name in impls.split(",")] if impls else names
    if not set(asked) <= set(names):
        raise ValueError(f"impls={impls!r}: this mode and preset have {', '.join(names)}")
    return list(dict.fromkeys(["ours", *asked]))


def fitting(names, takes):
    """
    Those of the contestants that the device holds together, in the order of the names; who is left out is said.

    takes: {name: (bytes that it holds throughout, bytes that its turn takes besides)}. ValueError if the device does
    not hold ours, or one that --impls asks for.
    """
    total = memory_of(device)
    if not total:
        return names

    def needs(some):
        held, turn = zip(*(takes[name] for name in some))
        return sum(held) + max(turn)

    room = SHARE * total
    kept, left = [], []
    for name in names:
        if needs([*kept, name]) <= room:
            kept.append(name)
        else:
            left.append(name)
    if not left:
        return names
    wanted = names if impls else ["ours"]
    sums = f"{needs(wanted) / 1e9:.1f} GB, and {device} has {total / 1e9:.1f}"
    if "ours" in left or impls:
        raise ValueError(f"preset={preset}: {', '.join(wanted)} would take about {sums}: take a smaller --preset"
                         + ", or fewer --impls" * (len(wanted) > 1))
    print(f"left out, because {device} has {total / 1e9:.1f} GB and all would take {needs(names) / 1e9:.1f}: "
          f"{', '.join(left)} (--impls races one of them with ours, if both fit)")
    return kept


def agree(what, values, tolerance, base="ours"):
    """ValueError unless all of {name: number} lie within a relative tolerance of the base's. A NaN never does."""
    expected = values[base]
    for name, value in values.items():
        if not abs(value - expected) <= tolerance * abs(expected):
            raise ValueError(f"{what}: {name} has {value:.8g} and {base} {expected:.8g}, further apart than "
                             f"{tolerance:g}: they do not compute the same, so their times mean nothing")


def agree_on_gradients(found, tolerance):
    """
    agree() on {name: (loss, norm of its gradient)}.

    tolerance: of the loss in fp32; the norm may differ by ten times as much. bf16 keeps 8 bits, with which two orders
    of summation come no closer than 2e-3.
    """
    if dtype == "bfloat16":
        tolerance = 2e-3
    losses, norms = zip(*found.values())
    agree("loss of the first batch", dict(zip(found, losses)), tolerance)
    agree("norm of its gradient", dict(zip(found, norms)), 10 * tolerance)


def now():
    """Seconds by the chosen clock, after everything that was given to the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if clock == "cpu" else time.perf_counter()


def race(contestants):
    """
    Time {name: f(round)} in turns. An f that returns a float has timed itself.

    The order moves on by one in each round: who runs after whom decides nothing. Returns {name: row} with
    seconds, a list with one entry per round, and first, the wall seconds of the first call.
    """
    names = list(contestants)
    rows = {name: dict(seconds=[]) for name in names}
    uncounted = max(warmup, 1)
    turns = range(uncounted + rounds)
    for n in tqdm(turns, f"{len(names)} contestants", unit="round", leave=False):
        turn = n % len(names)
        for name in names[turn:] + names[:turn]:
            wall = time.perf_counter()
            start = now()
            own = contestants[name](n)
            seconds = own if isinstance(own, float) else now() - start
            rows[name].setdefault("first", time.perf_counter() - wall)
            if n >= uncounted:
                rows[name]["seconds"].append(seconds)
    return rows


def judge(rows, base="ours"):
    """
    Add to each row of race() its median, min, spread and ratio. Returns the rows.

    spread: interquartile range as a share of the median. ratio: the time as a multiple of the base's in the same
    round, [median, low, high], where low and high are the 95 % interval of a bootstrap over rounds.
    """
    generator = np.random.default_rng(0)
    draws = generator.integers(0, rounds, (2000, rounds))
    base_seconds = np.array(rows[base]["seconds"])
    for row in rows.values():
        seconds = np.array(row["seconds"])
        ratios = seconds / base_seconds
        medians = np.median(ratios[draws], axis=1)
        low, high = np.percentile(medians, [2.5, 97.5])
        quarter, median, three_quarters = np.percentile(seconds, [25, 50, 75])
        row["median"] = median
        row["min"] = seconds.min()
        row["spread"] = (three_quarters - quarter) / median
        row["ratio"] = [np.median(ratios), low, high]
    return rows


def compete(names, run, rates=None, probe=None, base="ours"):
    """
    race(), judge(), and what a time means: the rows of a mode. run(name, round) is what is timed.

    rates: f(name, median seconds, speed of the probe or None) -> {unit: number}, added to a row.
    probe: (name, unit of its speed, f(round), work of one call), a contestant more.
    """
    contestants = {name: functools.partial(run, name) for name in names}
    speed = None
    if probe:
        prober, unit, f, work = probe
        contestants[prober] = f
    rows = judge(race(contestants), base)
    if probe:
        speed = rows[prober][unit] = work / rows[prober]["median"]
    if rates:
        for name in names:
            rows[name] |= rates(name, rows[name]["median"], speed)
    return rows


def gemm_probe():
    """
    A matrix product in the working dtype, (rows, inner) by (inner, rows), four times.

    The numbers are random, because zeros are faster on a GPU.
    """
    full = (2048, 512) if device == "cpu" else (8192, 8192)
    rows, inner = full_or_tiny(full, (256, 256))
    a, b = torch.randn(
        (2, rows, inner),
        device=device,
        dtype=work_dtype())
    tflop = 4 * 2 * rows**2 * inner / 1e12

    def multiply(n):
        for _ in range(4):
            linear(a, b)

    return "GEMM probe", "TFLOP/s", multiply, tflop


def bandwidth_probe(read_only=False):
    """An array, far larger than any cache, that is updated in place, or only read and summed up."""
    millions = full_or_tiny(64 if device == "cpu" else 512, 1)
    x = torch.ones(millions * 2**20, device=device)
    gb = x.nbytes / 1e9
    if read_only:
        return "bandwidth probe", "GB/s", lambda n: x.sum(), gb
    return "bandwidth probe", "GB/s", lambda n: x.mul_(1.0), 2 * gb


# -----------------------------------------------------------------------------
# models and batches
#
# Letters: B batch, T time, V words of the vocabulary, C width, N tokens of a step.

Batch = collections.namedtuple("Batch", "idx targets keep doc mask", defaults=(None, None, None))


def shape(**changes):
    """
    The preset as (ApertusConfig, batch, documents). changes: other values for fields of the config.

    Unlike the published models these begin with weights of one size, init_std = 0.02.
    """
    values = dict(init_std=0.02, **PRESETS[preset])
    of_preset = values.pop("batch")
    batch = micro_batch or of_preset
    documents = values.pop("documents")
    config = ApertusConfig(**values | changes)
    return config, batch, documents


def new_model(config):
    """
    An Apertus with the initial weights of `seed`, fp32, on the device. All contestants get copies of one.

    On a GPU they are its own random numbers, all of one size: a CPU draws 8 billion in two minutes.
    """
    if device == "cpu":
        return Apertus(config, seed)
    with torch.device("meta"):
        model = Apertus(config, seed)
    model.to_empty(device=device)
    if config.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.initial = lambda name, shape, config, seed: torch.randn(shape, device=device).mul_(config.init_std)
    model.init_weights(seed)
    return model


def make_batch(n, config, batch, documents):
    """
    Batch n: idx, targets, keep, doc (B, T), and for Hugging Face the document mask as a tensor (B, 1, T, T).

    Documents have exponential lengths, so that every batch is cut elsewhere. Ids are uniform from 4 on, because
    transformers gives the padding id 3 no gradient. In plain windows keep, doc and mask are None.
    """
    T = config.block_size
    generator = np.random.default_rng([seed, n])
    ids = generator.integers(4, config.vocab_size, (batch, T + 1))
    stream = torch.from_numpy(ids)
    idx = stream[:, :-1].contiguous()
    targets = stream[:, 1:].contiguous()
    parts = [idx, targets]
    if documents:
        begins = generator.random((batch, T)) < 1 / documents
        doc = torch.from_numpy(begins).cumsum(1)
        same = doc[:, :, None] == doc[:, None]                              # (B, T, T)
        mask = same.tril()[:, None]
        parts += [goldfish_mask(targets), doc, mask]
    return Batch(*(part.to(device) for part in parts))


def make_batches():
    """The preset's batches: one for each round where documents are cut anew, otherwise one for all rounds."""
    config, batch, documents = shape()
    count = max(warmup, 1) + rounds if documents else 1
    return [make_batch(n, config, batch, documents) for n in range(count)]


def attended(doc, T):
    """
    Mean number of positions that a token sees, half of itself left out.

    doc (B, T): ids that rise along a row; None: plain windows, T / 2.
    """
    if doc is None:
        return T / 2
    lengths = torch.cat([row.bincount() for row in doc])                    # of all documents, and zeros
    pairs = (lengths.double() ** 2 / 2).sum()
    return pairs.item() / doc.numel()


def contestant(name, ours):
    """
    An implementation with a copy of the weights of `ours`: (model, loss(batch)).

    name: ours, ours eager, ours plain (without the document mask), ours full logits, hf, hf compile,
    nanoGPT compile (which has weights of its own).
    """
    if name.startswith("ours"):
        model = copy.deepcopy(ours)
        model.dtype = work_dtype()
        if name in ("ours", "ours plain") and compiles():
            model.compile_blocks()

        def loss(batch):
            if name == "ours full logits":
                logits, _ = model(batch.idx)
                return loss_of_logits(logits, batch.targets)
            doc = None if name == "ours plain" else batch.doc
            return model(batch.idx, batch.targets, batch.keep, doc)[1]
        return model, loss

    if name == "nanoGPT compile":
        with torch.device(device):
            model = NanoGPT(ours.config)
        forward = lambda idx, targets, mask: model(idx, targets)
    else:
        model = hugging_face(ours)

        def forward(idx, targets, mask):
            logits = model(idx, attention_mask=mask, use_cache=False).logits
            return loss_of_logits(logits, targets)
    if name.endswith("compile"):
        forward = torch.compile(forward)

    def loss(batch):
        targets = batch.targets
        if batch.keep is not None:
            targets = targets.masked_fill(~batch.keep, -100)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            return forward(batch.idx, targets, batch.mask)
    return model, loss


def bytes_of_weights(config):
    """Bytes of a model in fp32."""
    with torch.device("meta"):
        return 4 * Apertus(config).num_params()


def bytes_of(name, config, batch):
    """
    What a contestant takes, by engine/memory.py: (bytes of weights and states, bytes that a step takes besides).

    A rough sum for others than ours: eager torch keeps three times the activations (465 kB a token and layer of the 8B
    for 150) and its weights as it casts them; who forms all logits keeps three copies of them in fp32.
    """
    with torch.device("meta"):
        model = Apertus(config)
    V, T = config.vocab_size, config.block_size
    how = dict(optimizer="ademamix", state_dtype="float32", recompute="none")
    size = work_dtype().itemsize
    kinds = of_step(model, how, batch, T, Ranks("none"), size)
    held = kinds["weights"] + kinds["states"]
    step = kinds["gradients"] + kinds["activations"] + kinds["temporary"]
    if name in ("ours eager", "hf"):
        step += 2 * kinds["activations"] + size * model.num_params()
    if not name.startswith("ours"):
        step += 12 * batch * T * V
    return held, step


def loss_of_logits(logits, targets):
    """Mean loss in fp32. logits (B, T, V); targets (B, T), -100 where there is none."""
    rows = logits.float().flatten(0, 1)
    return F.cross_entropy(rows, targets.flatten())


def gradient_norm(model):
    """L2 norm of all gradients, a 0-d tensor: no waiting for the GPU within a step."""
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return torch.nn.utils.get_total_norm(gradients)


def loss_and_norm(model, loss, batch):
    """The loss of a batch and the norm of its gradient, which stays in the model."""
    value = loss(batch)
    value.backward()
    return value.item(), gradient_norm(model).item()


def train_step(model, loss, batches):
    """f(round): forward, backward, clip, update, which is what train.py does in a step."""
    optimizer = AdEMAMix(
        param_groups(model),
        lr=1e-5,
        alpha_warmup=1000,
        beta3_warmup=1000)

    def step(n):
        loss(batches[n % len(batches)]).backward()
        scale = 0.1 / (gradient_norm(model) + 1e-6)
        optimizer.step(grad_scale=scale.clamp(max=1.0))
        optimizer.zero_grad()
    return step


# -----------------------------------------------------------------------------
# training: the step, the optimizer, memory, the cold start
#
# Each mode returns ({name: row}, facts {name: number or text}).


def train():
    """
    A whole training step: forward, backward, clipping, optimizer.

    FLOPs are counted from what each contestant has to compute: with documents masked, only the pairs inside them, also
    where an implementation computes all pairs and throws most away.
    """
    if device == "cpu":
        keep_freed_memory()                                # as train.py does; it holds for every contestant
    config, batch, documents = shape()
    T, N = config.block_size, batch * config.block_size
    other = "ours plain" if documents else "nanoGPT compile"
    # The most telling first, where not all of them fit.
    names = chosen("ours", "hf compile", "hf", other, "ours eager")
    names = fitting(names, {name: bytes_of(name, config, batch) for name in names})
    batches = make_batches()
    seen = np.mean([attended(made.doc, T) for made in batches])
    taken = take_routes(config, batch, batches[0].doc)
    ours = new_model(config)
    steps, found, flops = {}, {}, {}
    for name in names:
        model, loss = contestant(name, ours)
        steps[name] = train_step(model, loss, batches)
        # Without the document mask, or as another model, it is another loss.
        if name != other:
            found[name] = loss_and_norm(model, loss, batches[0])
            model.zero_grad()
        counted = model if name == "nanoGPT compile" else ours
        length = T if name == "ours plain" else 2 * seen
        flops[name] = N * counted.flops_per_token(length)
    agree_on_gradients(found, 1e-5)
    parameters = ours.num_params()
    # All have copies of it, and the averages of the optimizers are yet to come.
    del ours, counted
    peak = vendor_flops(device)

    def run(name, n):
        steps[name](n)

    def rates(name, seconds, gemm):
        speed = flops[name] / seconds
        shares = {"of GEMM peak": speed / 1e12 / gemm}
        if peak:
            shares["MFU"] = speed / peak
        return {"tok/s": N / seconds, "TFLOP/s": speed / 1e12, **shares}

    rows = compete(names, run, rates, gemm_probe())
    loss, _ = found["ours"]
    facts = dict(loss=loss, parameters=parameters, attended=seen, routes=taken)
    return rows, facts


def take_routes(config, batch, doc):
    """Take the ways of ours on this CPU, said or timed, as train.py does. Returns their text."""
    if device != "cpu":
        return ""
    ways = ways_of_a_cpu.parse(routes)
    if not ways and preset != "tiny":
        ways = ways_of_a_cpu.race_all(config, batch, work_dtype(), doc, compiles())
    ways_of_a_cpu.take(ways)
    return ways_of_a_cpu.written(ways)


def finetune():
    """
    A whole training step of all weights, and of adapters on all matrices of the blocks: 4 FLOPs a frozen weight and
    token, and not 6.

    B is zero at first, so that both have the same loss.
    """
    if device == "cpu":
        keep_freed_memory()
    config, batch, _ = shape()
    N = batch * config.block_size
    held, step = bytes_of("ours", config, batch)
    # Adapters have states and gradients of less than a hundredth of the weights.
    adapted = bytes_of_weights(config), step
    names = fitting(chosen("ours", "LoRA 16"), {"ours": (held, step), "LoRA 16": adapted})
    batches = make_batches()
    whole = new_model(config)
    steps, losses, flops = {}, {}, {}
    for name in names:
        model, loss = contestant("ours", whole)
        if name != "ours":
            lora.adapt(model, lora.settings_of(16, 32, "all"), seed)
        losses[name] = loss(batches[0]).item()
        steps[name] = train_step(model, loss, batches)
        flops[name] = N * model.flops_per_token(config.block_size)
    agree("loss of the first batch", losses, 1e-5)
    del whole

    def run(name, n):
        steps[name](n)

    def rates(name, seconds, gemm):
        speed = flops[name] / seconds / 1e12
        return {"tok/s": N / seconds, "TFLOP/s": speed, "of GEMM peak": speed / gemm}

    rows = compete(steps, run, rates, gemm_probe())
    return rows, {f"FLOPs of {name}": count / flops["ours"] for name, count in flops.items()}


def optim():
    """
    One step of an optimizer over the preset's parameters, with gradients that are there.

    `first` is with nothing compiled before. Bytes in fp32: read p, g, v and the averages, write all of them but g.
    """
    from torch._inductor.utils import fresh_cache
    how = dict(
        lr=1e-3,
        betas=(0.9, 0.999, 0.9999),
        alpha=8.0,
        eps=1e-8,
        weight_decay=0.1)

    def stepper(name, params):
        if name == "per-tensor loop":
            return loop_ademamix(params, **how)
        if name == "AdamW fused":
            return torch.optim.AdamW(params, weight_decay=0.1, fused=True).step
        return AdEMAMix(params, **how, compile=name == "ours" and compiles()).step

    config, _, _ = shape()
    names = chosen("ours", "AdamW fused", "per-tensor loop", "ours eager")
    weights = bytes_of_weights(config)
    # Weights, gradients and two or three states; the loop has two results of the size of a tensor besides.
    of_states = {name: 3 if name == "AdamW fused" else 4 for name in names}
    takes = {name: ((1 + n) * weights, 8 * config.vocab_size * config.n_embd) for name, n in of_states.items()}
    names = fitting(names, takes)
    model = new_model(config)
    N = model.num_params()
    params, steps = {}, {}
    for name in names:
        torch.manual_seed(seed)                            # the same gradients for all
        params[name] = [p.detach().clone().requires_grad_() for p in model.parameters()]
        for p in params[name]:
            p.grad = torch.randn_like(p)
        steps[name] = stepper(name, params[name])
    del model

    def run(name, n):
        steps[name]()

    def rates(name, seconds, bandwidth):
        bytes_moved = 28 * N if name == "AdamW fused" else 36 * N
        speed = bytes_moved / seconds / 1e9
        return {"GB/s": speed, "of bandwidth": speed / bandwidth}

    with fresh_cache():
        rows = compete(names, run, rates, bandwidth_probe())

    # After as many steps all have the same parameters, but for AdamW, which computes something else.
    facts = dict(parameters=N)
    for name in names:
        if name in ("ours", "AdamW fused"):
            continue
        distances = []
        for p, q in zip(params[name], params["ours"]):
            distance = (p - q).abs().max()
            distances.append(distance / q.abs().max())
        apart = torch.stack(distances).max().item()
        facts[f"{name}: furthest from ours"] = apart
        if not apart <= 1e-5:
            raise ValueError(f"{name} ended {apart:.2g} (relative) away from ours: they do not compute the same")
    return rows, facts


def memory():
    """
    Peak memory of a pass over 4096 tokens with 131,072 words, and what the loss in chunks costs in time.

    A peak does not go down again, so each contestant has a process of its own: this mode with --impls="only NAME",
    which prints what it found.
    """
    T, V = full_or_tiny((4096, 131072), (256, 16384))
    config = ApertusConfig(
        block_size=T,
        vocab_size=V,
        n_layer=2,
        n_head=4,
        n_kv_head=1,
        n_embd=256,
        ffn_dim=1344,
        init_std=0.02)
    if impls.startswith("only "):
        row = peak_of(impls.removeprefix("only "), config)
        print(json.dumps(row))
        raise SystemExit(0)
    settings = dict(preset=preset, device=device, dtype=dtype, threads=threads, seed=seed)
    rows, found = {}, {}
    names = chosen("ours", "ours full logits", "hf", "hf compile")
    for name in tqdm(names, "memory", leave=False):
        said = finished("tools.bench", "memory", f"--impls=only {name}", *flags(settings))
        row = rows[name] = json.loads(said)
        ratio = row["peak MiB"] / rows["ours"]["peak MiB"]
        row["ratio"] = [ratio, ratio, ratio]
        found[name] = row["loss"], row["gradient norm"]
    agree_on_gradients(found, 1e-6)
    rows |= head_race(V, full_or_tiny(384, 64))
    return rows, dict(T=T, vocab_size=V, n_embd=256, n_layer=2)


def finished(name, *arguments):
    """
    The last line that a script prints, run to its end in a process of its own.

    ValueError with that line, if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        code, last_line = run_script(name, arguments, log, threads or os.cpu_count())
    if code:
        raise ValueError(f"python -m {name} {shlex.join(arguments)} failed: {last_line}")
    return last_line


def peak_of(name, config):
    """
    What a forward and backward pass of one window needs beyond weights and gradients, in this process.

    Returns the row of a contestant: peak in MiB, and the loss and the norm of its gradient to compare.
    """
    if name == "ours":
        name = "ours eager"
    model, loss = contestant(name, new_model(config))
    batch = make_batch(0, config, 1, 0)
    # A short pass first, so that gradients exist and libraries have their buffers; hf compile would compile for it.
    if name != "hf compile":
        idx, targets = batch.idx[:, :32], batch.targets[:, :32]
        loss(Batch(idx, targets)).backward()
        model.zero_grad(set_to_none=False)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, _ = memory_and_peak()
    value, norm = loss_and_norm(model, loss, batch)
    _, peak = memory_and_peak()
    return {
        "peak MiB": (peak - before) / 2**20,
        "loss": value,
        "gradient norm": norm}


def memory_and_peak():
    """
    Bytes that tensors take on the GPU, or on a CPU this process: now, and at most so far.

    OSError on a CPU without /proc.
    """
    if device == "cuda":
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as f:
        kib = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+)", f.read()))
    return int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024


def head_race(V, C):
    """
    The loss alone, forward and backward at 1024 positions: in chunks, and with all logits, both compiled.

    V words, hidden states of width C. Returns the rows of both.
    """
    N = 1024
    with torch.device(device):
        h = torch.randn(N, C, dtype=work_dtype(), requires_grad=True)
        head = torch.randn(V, C, requires_grad=True)
        targets = torch.randint(0, V, (N,))
        weights = torch.full((N,), 1 / N)
    compiled = torch.compile if compiles() else lambda f: f
    one_chunk = compiled(chunk_loss)
    rows = chunk_rows(V, device)

    @compiled
    def full():
        logits = h @ head.T.to(h.dtype)                                     # (N, V)
        return F.cross_entropy(logits.float(), targets)

    def in_chunks():
        loss, _ = ChunkedCrossEntropy.apply(h, head, targets, weights, rows, one_chunk)
        return loss

    base = "loss in chunks"
    losses = {base: in_chunks, "loss with full logits": full}
    values = {name: loss().item() for name, loss in losses.items()}
    tolerance = 2e-3 if dtype == "bfloat16" else 1e-6
    agree("loss of the head alone", values, tolerance, base)

    def run(name, n):
        torch.autograd.grad(losses[name](), (h, head))

    return compete(losses, run, base=base)


def cold():
    """
    Wall seconds from `python train.py configs/laptop.py` to the end of its first step, with nothing compiled before.

    Also with two and four times the layers, which should cost no more: blocks share one compilation.
    """
    global clock
    clock = "wall"
    config, depth = full_or_tiny(("laptop", 2), ("tiny", 2))
    ways = {
        "ours": (True, depth),
        f"ours, {2 * depth} layers": (True, 2 * depth),
        f"ours, {4 * depth} layers": (True, 4 * depth),
        "ours eager": (False, depth),
        f"ours eager, {4 * depth} layers": (False, 4 * depth)}

    def run(name, n):
        compile, layers = ways[name]
        return first_step(f"configs/{config}.py", f"--compile={compile}", f"--n_layer={layers}", f"--data={data}")

    def rates(name, seconds, _):
        return {"s to the first step": seconds}

    rows = compete(chosen(*ways), run, rates)
    return rows, dict(config=config, layers=depth)


def first_step(*arguments):
    """Wall seconds of train.py from its start to the line that it logs of its first step, with nothing compiled."""
    with tempfile.TemporaryDirectory() as folder:
        cache = os.path.join(folder, "cache")
        began = time.perf_counter()
        steps_of_train(1, os.path.join(folder, "run"), *arguments, TORCHINDUCTOR_CACHE_DIR=cache)
        return time.perf_counter() - began


def steps_of_train(count, run_folder, *arguments, **environment):
    """
    Start train.py, and kill it when it has logged `count` steps. Returns their lines in its log, as dicts.

    environment: more variables of it. ValueError with the last line that it said, if it ends before.
    """
    command = [sys.executable, "train.py", *arguments]
    command += flags(dict(device=device, out=run_folder))
    environment = dict(
        os.environ,
        OMP_NUM_THREADS=str(threads or os.cpu_count()),
        **environment)
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True)
    with process as run:
        try:
            while len(lines := logged(run_folder)) < count:
                if run.poll() is not None:
                    last_line = run.stderr.read().strip().splitlines()[-1:]
                    which = "its first step" if count == 1 else f"step {count}"
                    raise ValueError(f"{shlex.join(command)} ended before {which}: {last_line}")
                time.sleep(0.02)
            return lines
        finally:
            # All of its session, because torch.compile has processes that would outlive the run.
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)


def logged(run_folder):
    """The lines of steps in a run's log so far, as dicts."""
    lines = entries(run_folder) if has_log(run_folder) else []
    return [line for line in lines if "tok_s" in line]


def whole():
    """
    The third step of train.py, which is what a user would start: the whole 8B on one GPU, by its own log.

    A step has 16 windows, where a real one has 1,024: what comes once a step, such as the optimizer, counts as much
    more. Nothing is saved, since train.py is killed before. The peak is that of torch's allocator.
    """
    global preset
    arguments = full_or_tiny(started, ("configs/tiny.py",))
    files = [argument for argument in arguments if argument.endswith(".py")]
    preset = os.path.basename(files[-1]).removesuffix(".py")
    n = 16
    flags_of_run = flags(dict(
        batch_size=n,
        batch_ramp_at=0,
        total_samples=100 * n,
        warmup_samples=n,
        decay_samples=n,
        eval_every=0,
        sample_every=0,
        checkpoint_every=0))
    with tempfile.TemporaryDirectory() as folder:
        synthetic_shard(folder, 2**20, 131072)
        run_folder = os.path.join(folder, "run")
        lines = steps_of_train(3, run_folder, *arguments, f"--data={folder}", *flags_of_run)
    last = lines[-1]
    row = {"tok/s": last["tok_s"]}
    if last["mfu"]:
        row["MFU"] = last["mfu"]
    if last["memory_gib"]:
        size = last["memory_gib"] * 2**30
        row["peak GB"] = size / 1e9
        row["of memory"] = size / memory_of(device)
    return dict(ours=row), dict(losses=[line["loss"] for line in lines], windows=n)


def probes():
    """What this machine can do at most: a matrix product, memory that is read and written, and memory that is read."""
    ways = {
        "GEMM probe": gemm_probe(),
        "bandwidth probe, update": bandwidth_probe(),
        "bandwidth probe, read": bandwidth_probe(read_only=True)}
    peak = vendor_flops(device)

    def run(name, n):
        _, _, f, _ = ways[name]
        f(n)

    def rates(name, seconds, _):
        _, unit, _, work = ways[name]
        found = {unit: work / seconds}
        if peak and unit == "TFLOP/s":
            found["of the vendor's peak"] = work * 1e12 / seconds / peak
        return found

    return compete(ways, run, rates, base="GEMM probe"), dict(base="GEMM probe")


# -----------------------------------------------------------------------------
# data: the mask, the loader, the tokenizer, prepare.py


def goldfish():
    """
    The Goldfish mask of 64 windows of 4096 labels, k = h = 50: the published expression, ours, and our other hash.

    Four windows at a time, which is how the loader asks for it.
    """
    B, T = full_or_tiny((64, 4096), (2, 256))
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 131072, (B, T))
    labels = torch.from_numpy(ids)
    masks = {
        "ours": goldfish_mask,
        "published": published_mask,
        "ours, hash=mix": functools.partial(goldfish_mask, hash="mix")}
    if not torch.equal(goldfish_mask(labels), published_mask(labels)):
        raise ValueError("our Goldfish mask is not the published one")

    def run(name, n):
        for four in labels.split(4):
            masks[name](four)

    def rates(name, seconds, _):
        return {"ns/token": seconds / (B * T) * 1e9}

    rows = compete(chosen(*masks), run, rates, bandwidth_probe())
    return rows, dict(tokens=B * T)


def synthetic_shard(folder, n_tokens, vocab_size):
    """
    Write a data folder such as prepare.py's, for TokenDataset: one shard of random ids. Returns the shard's path.

    Documents have 800 tokens in the mean and stand between <s>, 1, and </s>, 2.
    """
    generator = np.random.default_rng(seed)
    ids = generator.integers(4, vocab_size, n_tokens)
    stream = ids.astype(np.uint32)
    ends = np.flatnonzero(generator.random(n_tokens - 1) < 1 / 800)
    stream[ends] = 2
    stream[ends + 1] = 1
    path = os.path.join(folder, "shard.npy")
    np.save(path, stream)
    shards = [dict(file="shard.npy", tokens=n_tokens)]
    split = dict(
        shards=shards,
        tokens=n_tokens,
        documents=len(ends),
        bytes=4 * n_tokens)
    sources = dict(a=dict(train=split, val=split))
    meta = dict(
        bos=1,
        eos=2,
        vocab_size=vocab_size,
        tokenizer="apertus",
        sources=sources)
    write(os.path.join(folder, "meta.json"), json.dumps(meta))
    return path


def loader():
    """
    Batches of 8 windows of 4096 tokens from a shard with documents of 800 tokens, and the preset's training step.

    All seconds are those of as many tokens, 32 batches; a training step's are scaled.
    """
    full = 2**24, 8, 4096, 131072
    tiny = 2**16, 4, 256, 4096
    n_tokens, B, T, V = full_or_tiny(full, tiny)
    repeat = 32
    N = repeat * B * T
    config, batch, _ = shape()
    # The training step is ours. Loaders take next to nothing.
    fitting(["ours"], dict(ours=bytes_of("ours", config, batch)))
    model, loss = contestant("ours", new_model(config))
    step = train_step(model, loss, make_batches())
    with tempfile.TemporaryDirectory() as folder:
        path = synthetic_shard(folder, n_tokens, V)
        plain = TokenDataset(folder, "train", T, seed)
        fish = TokenDataset(folder, "train", T, seed, goldfish_k=50)
        batches = {
            "ours": lambda i: plain.batch(i * B, B),
            "ours, Goldfish": lambda i: fish.batch(i * B, B),
            "nanoGPT": lambda i: nanogpt_batch(path, B, T, i)}

        def run(name, n):
            if name == "train step":
                start = now()
                step(n)
                seconds_per_token = (now() - start) / (batch * config.block_size)
                return seconds_per_token * N
            for i in range(repeat):
                batches[name](n * repeat + i)

        def rates(name, seconds, _):
            return {"ms/M tokens": seconds / N * 1e9}

        names = chosen(*batches)
        rows = compete([*names, "train step"], run, rates, bandwidth_probe())
    for name in names:
        rows[name]["of a step"] = rows[name]["median"] / rows["train step"]["median"]
    return rows, dict(shard_tokens=n_tokens)


def python_sources(kind, pattern):
    """
    The texts of this Python's files, one at a time and sorted by path: text that is on every machine.

    kind: of sysconfig's folders, stdlib or purelib (installed packages). pattern: a glob below it.
    """
    folder = sysconfig.get_path(kind)
    files = glob.glob(os.path.join(folder, pattern), recursive=True)
    for path in sorted(files):
        with open(path, encoding="utf-8", errors="replace") as f:
            yield f.read()


def tokenize():
    """
    Apertus' tokenizer against Hugging Face's, which must give the same ids.

    The text is 3 MB of the standard library, in documents of 4 kB.
    """
    import convert
    import tokenizer
    import tokenizers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ours = tokenizer.load(full_or_tiny("apertus", "apertus:2048"))
    files = convert.hf_files(ours)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    most = full_or_tiny(3_000_000, 20_000)
    text = "".join(python_sources("stdlib", "*.py"))[:most]
    documents = [text[i:i + 4000] for i in range(0, len(text), 4000)]

    def run(name, n):
        if name == "ours":
            return [ours.encode(document) for document in documents]
        if name == "hf":
            found = [theirs.encode(document, add_special_tokens=False) for document in documents]
        else:
            found = theirs.encode_batch_fast(documents, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    names = chosen("ours", "hf batch", "hf")
    ids = run("ours", 0)
    if any(run(name, 0) != ids for name in names):
        raise ValueError("Hugging Face's tokenizers give other ids than ours")
    size = len(text.encode())
    count = sum(map(len, ids))

    def rates(name, seconds, _):
        return {"MB/s": size / seconds / 1e6, "M tok/s": count / seconds / 1e6}

    rows = compete(names, run, rates, bandwidth_probe())
    return rows, dict(bytes=size, tokens=count)


def prepare():
    """
    prepare.py from start to end, one process, on 200 MB of pages: with every filter on, and with none; with --peers,
    what datatrove and Hugging Face's tokenizers take to read and tokenize them, the ids being the same.

    By the CPU clock it is the child's time that counts. MB are those of the text that is kept.
    """
    import convert
    import tokenizer
    totals = {}
    with tempfile.TemporaryDirectory() as folder:
        at = functools.partial(os.path.join, folder)
        write_pages(folder, full_or_tiny(200e6, 2e5))
        every = [
            "--near_dedup=0.72",
            "--keep_licenses=MIT",
            "--keep_languages=eng_Latn",
            "--min_chars=20",
            "--score_field=score",
            "--keep_top=0.99",
            "--max_field=toxicity",
            f"--robots={at('robots.jsonl')}",
            f"--decontaminate={at('prompts.txt')}"]
        filters = {"ours": every, "tokenizing alone": ["--dedup=False", "--pii=False"]}
        always = [at("pages.jsonl"), "--workers=1"]
        with open(at("pages.jsonl"), encoding="utf-8") as lines:
            size = sum(len(json.loads(line)["text"].encode()) for line in lines)
        named = full_or_tiny("apertus", "apertus:2048")
        always += flags(dict(out=at("out"), tokenizer=named))
        with open(at("tokenizer.json"), "w") as f:
            json.dump(convert.hf_files(tokenizer.load(named))["tokenizer.json"], f)

        def run(name, n):
            before = os.times()
            if name in filters:
                finished("prepare", *always, *filters[name])
            else:
                count = finished("tools.prepare_peers", name, at("pages.jsonl"), at("tokenizer.json"), at("out"))
            after = os.times()
            if name in filters:
                totals[name] = read_json(at("out", "report.json"))["total"]
            else:
                totals[name] = dict(bytes=size, tokens=int(count))
            shutil.rmtree(at("out"))
            # On the wall clock race() takes the time; here it is user and system time of child processes.
            if clock == "cpu":
                return sum(after[2:4]) - sum(before[2:4])

        def rates(name, seconds, _):
            return {"MB/s": totals[name]["bytes"] / seconds / 1e6}

        names = [*filters, *(["datatrove", "hf"] if peers else [])]
        rows = compete(chosen(*names), run, rates)
    alone = totals.get("tokenizing alone")
    for name in {"datatrove", "hf"} & totals.keys() if alone else ():
        # Ours has a begin and an end around each document. What a text spells like a control token is one for others.
        inner = alone["tokens"] - 2 * alone["documents"]
        if abs(totals[name]["tokens"] - inner) > inner / 1000:
            raise ValueError(f"{name} makes {totals[name]['tokens']:,} tokens of what is {alone['tokens']:,} with ours")
    ours = totals["ours"]
    return rows, dict(bytes_in=ours["bytes_in"], bytes_kept=ours["bytes"])


def write_pages(folder, size):
    """
    `size` characters of pages for prepare.py, and what its filters read: robots.txt files and prompts.

    The pages are the sources of this Python and its packages. Nearly all of them pass every filter.
    """
    def pages():
        texts = itertools.chain(python_sources("stdlib", "**/*.py"), python_sources("purelib", "**/*.py"))
        written = 0
        for n, text in enumerate(texts):
            if written > size:
                break
            written += len(text)
            yield dict(
                id=str(n),
                url=f"https://site{n % 50}.org/{n}",
                text=text,
                language="eng_Latn",
                license="MIT",
                score=n * 0.618 % 1,
                toxicity=n * 0.414 % 0.99)

    rules = "User-agent: {}\nDisallow: /\n\nUser-agent: *\nDisallow: /private"
    robots = []
    for n in range(50):
        content = rules.format("Somebot" if n else "GPTBot")
        robots.append(dict(domain=f"site{n}.org", content=content))
    prompt = "Which of these {} numbers is the sum of the first {} primes, and which is not a prime at all?\n"
    prompts = [prompt.format(n, n + 1) for n in range(1000)]
    write_rows(os.path.join(folder, "pages.jsonl"), pages())
    write_rows(os.path.join(folder, "robots.jsonl"), robots)
    write(os.path.join(folder, "prompts.txt"), prompts)


# -----------------------------------------------------------------------------
# generation, and structured layers


def decode():
    """
    Greedy generation at batch 1 after a prompt of 32 tokens, with a KV cache.

    The bound is the memory's: all weights but the embedding are read once per token. They are five times as large as
    in training, so that no two logits are close and rounding decides over no token.
    """
    config, _, _ = shape(init_std=0.1)
    ours = new_model(config).to(work_dtype())
    prompt = make_batch(0, config, 1, 0).idx[:, :32]
    theirs = hugging_face(ours).to(work_dtype()).eval()
    # The layout for CPUs is what sample.py takes, unless it compiles; on a GPU it changes nothing.
    laid_out = copy.deepcopy(ours) if device == "cpu" else ours
    lay_out_for_decoding(laid_out)
    if device == "cpu" and compiles() and preset != "tiny":
        ROUTES.decoding = ways_of_a_cpu.race_decoding(config, work_dtype())
    compiled = laid_out if ROUTES.decoding == "library" else ours
    ways = {
        "ours": lambda: generate(compiled, prompt, tokens, temperature=0, compile=compiles()),
        "ours eager": lambda: generate(laid_out, prompt, tokens, temperature=0),
        "hf": lambda: theirs.generate(prompt, max_new_tokens=tokens, do_sample=False)}
    in_bits = {f"{base} eager": quantise(copy.deepcopy(ours), base) for base in ("int8", "nf4")}
    for name, model in in_bits.items():
        ways[name] = functools.partial(generate, model, prompt, tokens, temperature=0)
    said = {}

    def run(name, n):
        said[name] = ways[name]()[0]                                        # (32 + tokens,)

    def weight_bytes(model):
        return sum(
            t.nbytes for name, t in [*model.named_parameters(), *model.named_buffers()]
            if config.tie_embeddings or "embed" not in name)

    def rates(name, seconds, bandwidth):
        speed = tokens / seconds
        size = weight_bytes(in_bits.get(name, ours))
        return {"tok/s": speed, "of weight-read bound": size / 1e9 * speed / bandwidth}

    rows = compete(chosen(*ways), run, rates, bandwidth_probe(read_only=True))
    same = {}
    for name, ids in said.items():
        # Other weights say other things.
        if name in in_bits:
            continue
        agrees = ids == said["ours"]
        same[name] = agrees.cumprod(0).sum().item() - 32
    if dtype == "float32" and min(same.values()) < tokens:
        raise ValueError(f"greedy tokens that agree with ours: {same}, of {tokens}")
    return rows, dict(tokens=tokens, weight_bytes=weight_bytes(ours), agreeing_tokens=same)


def ffn():
    """
    One MLP, C -> 4 C -> C, dense and in each form of studies/structured.py, eager.

    training: forward and backward of 512 tokens. decoding: one token through so many copies (256 MB of them, at most
    100) that the weights come from memory, as in a whole model; seconds are those of one copy.
    """
    rows, fastest = {}, []
    for C in full_or_tiny(widths, (48,)):
        x = torch.randn(
            full_or_tiny(512, 8),
            C,
            device=device,
            dtype=work_dtype(),
            requires_grad=True)
        grad = torch.randn_like(x)
        one = x[:1].detach()
        copies, shares = {}, {}
        for kind, rank, blocks in forms(C):
            mlp = feed_forward(C, kind, rank, blocks)
            size = sum(p.numel() for p in mlp.parameters())
            share = size / (8 * C * C)
            name = kind if kind == "dense" else f"{kind} {share:.0%}"
            shares[name] = {"of dense parameters": share}
            count = math.ceil(2**28 / (size * x.itemsize))
            copies[name] = [copy.deepcopy(mlp) for _ in range(min(count, 100))]

        def training(name, n):
            copies[name][0](x).backward(grad)

        @torch.inference_mode()
        def decoding(name, n):
            start = now()
            for mlp in copies[name]:
                mlp(one)
            return (now() - start) / len(copies[name])

        for run in (training, decoding):
            found = compete(copies, run, base="dense")
            for name, row in found.items():
                rows[f"{run.__name__} {C}, {name}"] = row | shares[name]
            best = min(found, key=lambda name: found[name]["ratio"][0])
            speedup = 1 / found[best]["ratio"][0]
            fastest.append(f"dense {run.__name__} at {C} {speedup:.2f}x ({best})")
    return rows, {"base": "dense", "fastest": "; ".join(fastest)}


def feed_forward(C, kind, rank, blocks):
    """An MLP of width C with random weights. kind, rank and blocks: one of studies.structured.forms."""
    layer = Linear
    if kind != "dense":
        layer = functools.partial(StructuredLinear, kind=kind, rank=rank, blocks=blocks)
    layers = layer(C, 4 * C), layer(4 * C, C)
    mlp = torch.nn.Sequential(*layers).to(device, work_dtype())
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.02)
    return mlp


RACES = (train, finetune, optim, goldfish, loader, tokenize, prepare, decode, memory, cold, whole, probes, ffn)
MODES = {mode.__name__: mode for mode in RACES}


# -----------------------------------------------------------------------------
# records as tables and pictures
#
# A record is what main() writes: circumstances, facts, and a row per contestant. Those in records/ are committed, so
# keys that once were written must still be read.

# The first of these that a row has stands for the row where there is room for one.
RATES = ("tok/s", "GB/s", "ns/token", "ms/M tokens", "MB/s", "peak MiB", "s to the first step")
TIMES = ("seconds", "median", "min", "spread", "ratio", "first")


def is_share(key):
    """Whether a rate is a share of what was possible: of bandwidth, of GEMM peak, ..., MFU."""
    return key.startswith(("of ", "MFU"))


def number(key, value):
    """A number with its unit, or a share in percent with what it is a share of."""
    if is_share(key):
        text = f"{value * 100:.2g}%" if value < 0.01 else f"{value:.0%}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {key}"


def rate(row):
    """The one rate that stands for a row, as text; empty for a row without any."""
    found = [number(key, row[key]) for key in RATES if key in row]
    return found[0] if found else ""


def base_of(record):
    """Against whom the ratios are: ours, but in `ffn` the dense layers."""
    return record["facts"].get("base", "ours")


def compared(record):
    """The rows whose ratio means something, which a probe's does not."""
    return {
        name: row for name, row in record["rows"].items()
        if "ratio" in row and "probe" not in name}


def table(record):
    """A record as Markdown lines: for each contestant its times, the ratio with its interval, rates and shares."""
    lines = []
    for name, row in record["rows"].items():
        median = spread = first = ratio = ""
        if "median" in row:
            median = number("ms", row["median"] * 1e3)
            noisy = "noisy " if row["spread"] > 0.1 else ""
            spread = f"{noisy}{row['spread']:.0%}"
            first = f"{row['first']:.1f}"
        if name in compared(record):
            ratio = "{:.3g}x ({:.3g} - {:.3g})".format(*row["ratio"])
        rates = ", ".join(
            number(key, value) for key, value in row.items()
            if key not in TIMES)
        lines.append(f"| {name:32} | {median:>12} | {spread:>9} | {first:>7} | {ratio:>23} | {rates} |")
    head = f"| {'':32} | {'median':>12} | {'spread':>9} | {'first s':>7} | against {base_of(record)} (95 %) | rates |"
    return markdown(head, lines)


def picture(record, path):
    """
    Draw bars: time (or memory) as a multiple of the base's, with the interval of the ratio.

    The line at 1 is the base. Only rows with a ratio are drawn, so a probe is not.
    """
    rows = compared(record)
    middle, low, high = np.transpose([row["ratio"] for row in rows.values()])
    errors = np.maximum([middle - low, high - middle], 0)
    labels = [f"{row['ratio'][0]:.2f}x   {rate(row)}" for row in rows.values()]
    height = 0.6 + 0.42 * len(rows)
    figure, axis = pyplot().subplots(figsize=(7, height), layout="constrained")
    bars = axis.barh(list(rows), middle, xerr=errors)
    axis.bar_label(bars, labels, padding=4)
    axis.invert_yaxis()
    axis.margins(x=0.35)
    axis.axvline(1, color="black")
    what = "memory" if record["mode"] == "memory" else "time"
    title = f"{record['mode']}, {record['preset']}, {record['dtype']}"
    axis.set_title(f"{title}: {what} against {base_of(record)} (less is better)")
    finish(figure, path)


def summary_line(record):
    """
    A record as a line of the README's table.

    What ours does, as a share of what the machine could, how much faster than the others, and the command.
    """
    rows = record["rows"]
    # In `ffn` there is no row of ours.
    own = next((name for name in rows if name.split(",")[0] == "ours"), None)
    ours = rows.get(own, {})
    shares = [
        number(key, value) for key, value in ours.items()
        if is_share(key)]
    others = []
    for name, row in compared(record).items():
        if name in (own, "train step"):
            continue
        middle, low, high = row["ratio"]
        interval = f" ({low:.2f}-{high:.2f})" if "median" in row else ""
        others.append(f"{name} {middle:.2f}x{interval}")
    instructions = record["cpu"].rsplit(", ", 1)[-1]
    windows = f" x {record['micro_batch']}" if record.get("micro_batch") else ""
    what = f"{record['mode']}, {record['preset']}{windows}, {record['dtype']}, {record['gpu'] or instructions}"
    faster_than = record["facts"].get("fastest", "; ".join(others))
    return f"| {what} | {rate(ours)} | {'; '.join(shares)} | {faster_than} | `{record['command']}` |"


def of_ours(record):
    """Whether a record says anything of ours: probes do not, nor do tools/gpu.py's steps that fail or only compare."""
    return "ours" in record["rows"] or "fastest" in record["facts"]


def summary(records):
    """All records of ours as the README's table, and what they were measured on."""
    records = list(filter(of_ours, records))
    machines = set()
    for r in records:
        plural = "s" if r["threads"] > 1 else ""
        machines.add(
            f"{r['gpu'] or r['cpu']}, {r['threads']} thread{plural}, torch {r['torch']}, "
            f"transformers {r['transformers']}, {r['clock']} clock, {r['date']}")
    head = "| measured | ours | of the machine | ours is faster than | command |"
    lines = markdown(head, map(summary_line, records))
    return "\n".join([*lines, "", f"Measured on: {'; '.join(sorted(machines))}."])


def show(files):
    """Print records as tables and as the README's one, which also goes into the file `readme`, if that is set."""
    records = []
    for path in files:
        record = read_json(path)
        # The summary of tools/gpu.py lies among its steps.
        if "steps" in record:
            continue
        try:
            print(f"\n{path}: `{record['command']}`, {record['gpu'] or record['cpu']}\n", *table(record), sep="\n")
        except (KeyError, TypeError):
            raise ValueError(f"{path} is not a result of tools/bench.py: want the JSON that "
                             "`python -m tools.bench train` writes") from None
        records.append(record)
    print("\n" + summary(records))
    if readme:
        mark = "<!-- bench -->\n"
        with open(readme, encoding="utf-8") as f:
            parts = f.read().split(mark)
        if len(parts) != 3:
            raise ValueError(f"{readme} has {len(parts) - 1} lines '{mark.strip()}': "
                             "want two, with the table between them")
        parts[1] = summary(records) + "\n"
        write(readme, mark.join(parts))


# -----------------------------------------------------------------------------
# the command


def processor():
    """The processor's name."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            names = re.findall("model name.*: (.*)", f.read())
        if names:
            return names[0]
    return platform.processor()


def circumstances():
    """Where and with what the numbers were taken, and the command that takes them again."""
    import transformers
    arguments = [
        argument for argument in sys.argv[1:]
        if not argument.startswith("--out=")]
    describe = ["git", "describe", "--always", "--exclude=*", "--dirty= + changes"]
    commit = subprocess.run(describe, capture_output=True, text=True)
    return dict(
        date=time.strftime("%Y-%m-%d"),
        command=f"python -m tools.bench {shlex.join(arguments)}",
        cpu=f"{processor()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        gpu=torch.cuda.get_device_name() if device == "cuda" else None,
        threads=torch.get_num_threads(),
        clock=clock,
        load=os.getloadavg()[0],
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        seed=seed,
        commit=commit.stdout.strip())


def main():
    """Show results, or run a mode: its record as JSON, its picture, its table."""
    if paths and all(path.endswith(".json") for path in paths):
        return show(paths)
    if len(paths) != 1 or paths[0] not in MODES:
        raise ValueError(f"got {' '.join(paths) or 'nothing'}: want one of {', '.join(MODES)}, or results (*.json): "
                         "python -m tools.bench train --preset=cpu")
    resolve_settings()
    if threads:
        torch.set_num_threads(threads)
    if not compiles():
        print(f"no compiler found for {device} (on CPU: a C++ one, like g++): everyone runs eagerly")
    torch.manual_seed(seed)
    mode = paths[0]
    rows, facts = MODES[mode]()
    record = dict(
        mode=mode,
        preset=preset,
        dtype=dtype,
        micro_batch=micro_batch,
        **circumstances(),
        rounds=rounds,
        facts=facts,
        rows=rows)
    windows = f"-x{micro_batch}" if micro_batch else ""
    path = os.path.join(out, f"{mode}-{preset}{windows}-{dtype}")
    write(path + ".json", json.dumps(record, indent=1))
    print(*table(record), sep="\n")
    for fact, value in facts.items():
        print(f"{fact}: {value}")
    pictured = ""
    if compared(record):
        picture(record, path + ".png")
        pictured = " and .png"
    print(f"wrote {path}.json{pictured}")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
