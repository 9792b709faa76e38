"""
Speed, measured so that one can believe it: ours against transformers' Apertus, against torch's optimizers, against the machine.

    MFU = (6 matrix parameters + 12 L H D attended) tokens / seconds / GEMM peak          attended: positions a token sees, on average

Every contestant has the same weights and must first give the same loss (ids, mask, parameters): nobody races with wrong maths. Then
they run in turns, A B C, B C A, ..., so that a neighbour's load hits all alike; what is reported is the median of the ratios *within*
a round, with a 95 % interval by bootstrap. A GEMM and a bandwidth probe run in the same turns: each figure is also a share of what
this machine could do at that moment. The head counts as FLOPs, the embedding does not, causal attention counts once, a recompute or a
masked pair never (PaLM, arXiv 2204.02311, app. B). The clock on a CPU is the process's own time on one thread: others' load stays out.

$ python -m tools.bench train --preset=cpu            # a training step against Hugging Face, eager and compiled
$ python -m tools.bench train --preset=packed         # the same on documents of 100 tokens, masked
$ python -m tools.bench optim                         # AdEMAMix against AdamW (fused), a per-tensor loop, and the memory's bandwidth
$ python -m tools.bench goldfish | loader | tokenize | prepare | decode | memory
$ python -m tools.bench cold                          # seconds from `python train.py` to the end of its first step, eager and compiled
$ python -m tools.bench ffn                           # structured feed-forward layers (studies/structured.py) against dense ones, by width
$ python -m tools.bench records/*/*.json              # committed results again, as the README's table
"""

import sys

if __name__ == "__main__" and not __package__:
    print("bench.py: start it from the project's root, python -m tools.bench", file=sys.stderr)
    sys.exit(2)

import copy
import dataclasses
import functools
import glob
import json
import os
import platform
import resource
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
from engine.hardware import can_compile
from configurator import ROOT
from engine.hardware import linear
from data import TokenDataset
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig, Linear
from engine.hardware import keep_freed_memory
from generate import generate, lay_out_for_decoding
from tools.peers import NanoGPT, hugging_face, loop_ademamix, published_mask

paths = []              # a mode (train optim goldfish loader tokenize prepare decode memory cold ffn), or results (*.json) to print as a table
preset = "cpu"          # cpu | packed | laptop | 124m | 1b5 | 8b-stack | tiny: the model and batch, below
impls = ""              # contestants, comma-separated; "" = all of the mode. ours is always among them
device = "auto"         # cuda | cpu
dtype = "auto"          # float32 | bfloat16, of activations and GEMMs; weights and states are fp32. auto: bfloat16 on CUDA
optimizer = "ademamix"  # ademamix | adamw (fused): of every contestant in `train`
rounds = 7              # that count
warmup = 1              # rounds before them; the agreement check has run, and compiled, everyone once already
clock = "auto"          # cpu = time of this process, for noisy machines and one thread; wall; auto: cpu on a CPU, wall on CUDA
threads = 1             # of the CPU; 0 = torch's choice
tokens = 64             # to generate in `decode`, after a prompt of 32
widths = (512, 1024, 2048)          # of the model, in `ffn`; the MLP is four times as wide
data = "data/stdlib"    # what prepare.py wrote, for `cold`
seed = 28
out = "out/bench"       # folder for <mode>-<preset>-<dtype>.json and .png
readme = ""             # with results: write the table into this file, between its two <!-- bench --> lines

CPU = dict(batch=4, block_size=512, n_layer=6, n_head=6, n_kv_head=2, n_embd=384, ffn_dim=2048, vocab_size=16384)
BIG = dict(block_size=4096, n_head=32, n_kv_head=8, vocab_size=131072)
PRESETS = {                                                # documents: their mean length in tokens; none = plain causal windows
    "cpu": CPU,
    "packed": dict(CPU, documents=100),
    "laptop": dict(batch=4, block_size=256, n_layer=4, n_head=2, n_kv_head=1, n_embd=128, ffn_dim=672, vocab_size=4096),
    "124m": dict(batch=16, block_size=1024, n_layer=12, n_head=12, n_kv_head=4, n_embd=768, ffn_dim=3584, vocab_size=50304,
                 tie_embeddings=True),
    "1b5": dict(BIG, batch=2, n_layer=16, n_embd=2048, ffn_dim=12288, documents=1000),
    "8b-stack": dict(BIG, batch=1, n_layer=(4, 8, 16), n_embd=4096, ffn_dim=21504, documents=1000),   # exact 8B layers, slope per layer
    "tiny": dict(batch=2, block_size=64, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=160, vocab_size=320, documents=20)}
BF16_PEAK = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12}             # dense, the vendor's number


def place():
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def compiles():
    """Whether torch.compile has what it needs here; without it the compiled contestants stay out, and ours runs eagerly."""
    return can_compile(torch.device(place()))


def work_dtype():
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: there is auto, float32 and bfloat16")
    return getattr(torch, ("bfloat16" if place() == "cuda" else "float32") if dtype == "auto" else dtype)


def now():
    if place() == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if clock == "cpu" or clock == "auto" and place() == "cpu" else time.perf_counter()


# ----------------------------------------------------------------------------------------------------------------------
# the race


def race(contestants, title):
    """
    Time {name: f(round)} in turns; an f that returns a float has timed itself. The order moves on by one each round: who runs after whom
    does not decide. Returns {name: dict(seconds=[one a round], first=wall seconds of the first call)}.
    """
    names = list(contestants)
    result = {name: dict(seconds=[]) for name in names}
    for n in tqdm(range(-max(warmup, 1), rounds), desc=title, unit="round", leave=False, dynamic_ncols=True):
        for name in names[n % len(names):] + names[:n % len(names)]:
            wall, start = time.perf_counter(), now()
            own = contestants[name](n + max(warmup, 1))
            seconds = own if isinstance(own, float) else now() - start
            result[name].setdefault("first", time.perf_counter() - wall)
            if n >= 0:
                result[name]["seconds"].append(seconds)
    return result


def judge(result, base="ours"):
    """Add to each contestant: median, min, spread (interquartile range / median), and ratio = its time / base's as [median, low, high]."""
    draw = np.random.default_rng(0).integers(0, rounds, (2000, rounds))                     # bootstrap over rounds
    for name, r in result.items():
        s, b = np.array(r["seconds"]), np.array(result[base]["seconds"])
        low, high = np.percentile(np.median((s / b)[draw], axis=1), [2.5, 97.5])
        r.update(median=float(np.median(s)), min=float(s.min()), spread=float(np.subtract(*np.percentile(s, [75, 25])) / np.median(s)),
                 ratio=[float(np.median(s / b)), float(low), float(high)])
    return result


def gemm_probe():
    """(f, FLOPs): one square-ish matrix product in the working dtype, random data (zeros are faster on a GPU)."""
    M, N, K = (256, 256, 256) if preset == "tiny" else (2048, 2048, 512) if place() == "cpu" else (8192, 8192, 8192)
    a, b = (torch.randn(n, K, device=place(), dtype=work_dtype()) for n in (M, N))
    repeat = 4
    return (lambda n: [linear(a, b) for _ in range(repeat)]), repeat * 2 * M * N * K


def bandwidth_probe(kind="update"):
    """(f, bytes): 'update' reads and writes an array in place, 'read' sums it; far larger than any cache."""
    x = torch.ones(2**20 if preset == "tiny" else 64 * 2**20 if place() == "cpu" else 512 * 2**20, device=place())
    return ((lambda n: x.mul_(1.0)), 8 * x.numel()) if kind == "update" else ((lambda n: x.sum()), 4 * x.numel())


def race_beside_bandwidth(contestants, title, kind="update"):
    """race() with the bandwidth probe in it, judged. Returns (result, the probe's bytes a second)."""
    probe, moved = bandwidth_probe(kind)
    result = judge(race({**contestants, "bandwidth probe": probe}, title))
    speed = moved / result["bandwidth probe"]["median"]
    result["bandwidth probe"]["GB/s"] = speed / 1e9
    return result, speed


def agree(what, values, tolerance):
    """Refuse to race unless all values (name: number) lie within a relative tolerance of ours."""
    for name, value in values.items():
        if not abs(value - values["ours"]) <= tolerance * abs(values["ours"]):
            raise ValueError(f"{what}: {name} has {value:.8g} and ours {values['ours']:.8g}, further apart than {tolerance:g}: "
                             "they do not compute the same, so their times mean nothing")


def chosen(all_names):
    names = [n.strip() for n in impls.split(",")] if impls else all_names
    if set(names) - set(all_names):
        raise ValueError(f"impls={impls!r}: this mode and preset have {', '.join(all_names)}")
    return ["ours"] + [n for n in names if n != "ours"]


# ----------------------------------------------------------------------------------------------------------------------
# the models


def shape(**changes):
    """The preset's ApertusConfig and what is not of the model: (config, batch, documents)."""
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r}: there is {', '.join(PRESETS)}")
    p = {**PRESETS[preset], **changes}
    extra = dict(batch=p.pop("batch"), documents=p.pop("documents", None))
    return ApertusConfig(**p, init_std=0.02), extra["batch"], extra["documents"]


def make_batch(n, config, batch, documents):
    """
    Batch n: idx, targets, keep, doc, and for Hugging Face the same document mask as a tensor (B, 1, T, T), made outside of the race.
    Documents have exponential lengths, so that every batch is cut elsewhere; ids are uniform from 4 on (transformers gives the padding
    id 3 no gradient). Plain windows have no Goldfish either: keep, doc and mask are None.
    """
    T, g = config.block_size, np.random.default_rng([seed, n])
    stream = torch.from_numpy(g.integers(4, config.vocab_size, (batch, T + 1)))
    idx, targets = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
    if not documents:
        return [idx.to(place()), targets.to(place()), None, None, None]
    doc = torch.from_numpy(g.random((batch, T)) < 1 / documents).cumsum(1)                 # (B, T)
    keep = goldfish_mask(targets, 50, 50)
    i = torch.arange(T)
    mask = ((i[:, None] >= i) & (doc[:, None, :, None] == doc[:, None, None, :]))           # (B, 1, T, T)
    return [t.to(place()) for t in (idx, targets, keep, doc, mask)]


def attended(doc, T):
    """Mean number of positions that a token attends to: half the window, or of its document. Without the +1/2 of the diagonal."""
    if doc is None:
        return T / 2
    _, lengths = torch.unique_consecutive((doc + torch.arange(len(doc), device=doc.device)[:, None] * T).flatten(), return_counts=True)
    return (lengths.double() ** 2 / 2).sum().item() / doc.numel()


def contestant(name, ours):
    """(model, loss(idx, targets, keep, doc, mask)) of one implementation, with a copy of the weights of `ours`."""
    if name.startswith("ours"):
        model = Apertus(ours.config)
        model.load_state_dict(ours.state_dict())
        model.to(place()).dtype = work_dtype()
        if name != "ours eager" and compiles():
            model.compile_blocks()

        def loss(idx, targets, keep, doc, mask):
            return model(idx, targets, keep, None if name == "ours plain" else doc)[1]
        return model, loss
    if name == "nanoGPT compile":
        with torch.device(place()):
            model = NanoGPT(ours.config)
        forward = torch.compile(model)

        def loss(idx, targets, keep, doc, mask):
            with torch.autocast(place(), torch.bfloat16, enabled=work_dtype() == torch.bfloat16):
                return forward(idx, targets)
        return model, loss
    model = hugging_face(ours)

    def loss(idx, targets, mask):
        with torch.autocast(place(), torch.bfloat16, enabled=work_dtype() == torch.bfloat16):
            logits = model(idx, attention_mask=mask, use_cache=False).logits               # (B, T, V)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)
    compiled = torch.compile(loss) if name == "hf compile" else loss
    return model, lambda idx, targets, keep, doc, mask: compiled(idx, targets if keep is None else targets.masked_fill(~keep, -100), mask)


def train_step(model, loss, batches):
    """f(round): forward, backward, clip, update: what train.py does in a step."""
    if optimizer not in ("ademamix", "adamw"):
        raise ValueError(f"optimizer={optimizer!r}: there is ademamix and adamw")
    groups = param_groups(model)
    opt = (AdEMAMix(groups, lr=1e-5, alpha_warmup=1000, beta3_warmup=1000) if optimizer == "ademamix"
           else torch.optim.AdamW(groups, lr=1e-5, fused=True))

    def step(n):
        loss(*batches[n % len(batches)]).backward()
        grads = [p.grad for p in model.parameters()]
        scale = (0.1 / (torch.nn.utils.get_total_norm(grads) + 1e-6)).clamp(max=1.0)
        if optimizer == "ademamix":
            opt.step(grad_scale=scale)
        else:
            torch._foreach_mul_(grads, scale)
            opt.step()
        opt.zero_grad()
    return step


# ----------------------------------------------------------------------------------------------------------------------
# the modes: each returns (rows {name: what judge() made, and its rates}, facts)


def train():
    """A whole training step: forward, backward, clipping, optimizer."""
    if place() == "cpu":
        keep_freed_memory()                                # as train.py does; of the process, so every contestant has it
    layers = PRESETS[preset]["n_layer"] if preset in PRESETS else 0                         # shape() says what there is
    if not isinstance(layers, tuple):
        return train_at()
    rows, facts, seconds = {}, {}, []
    for n_layer in layers:                                                                 # Hugging Face at the smallest only
        some, facts = train_at(n_layer=n_layer, names=None if n_layer == layers[0] else ["ours"])
        rows.update({f"{name}, {n_layer} layers": r for name, r in some.items()})
        seconds.append(some["ours"]["median"])
    slope, rest = np.polyfit(layers, seconds, 1)                                           # a step's time is affine in depth
    whole, batch, _ = shape(n_layer=32)
    with torch.device("meta"):
        flops = Apertus(whole).flops_per_token(2 * facts["attended"]) * batch * whole.block_size
    seconds = slope * 32 + rest
    return rows, {**facts, "seconds a layer": slope, "seconds of 32 layers": seconds, "TFLOP/s at 32 layers": flops / seconds / 1e12}


def train_at(names=None, **changes):
    config, batch, documents = shape(**changes)
    names = names or chosen(["ours"] + ["ours eager"] * compiles() + ["ours plain"] * bool(documents) + ["hf"] + ["hf compile"] * compiles()
                            + ["nanoGPT compile"] * (compiles() and not documents))
    batches = [make_batch(n, config, batch, documents) for n in range(warmup + rounds if documents else 1)]
    with torch.device(place()):
        ours = Apertus(config, seed)
    losses, norms, steps = {}, {}, {}
    for name in names:
        model, loss = contestant(name, ours)
        if name not in ("ours plain", "nanoGPT compile"):  # without the document mask it is another function
            value = loss(*batches[0])
            value.backward()
            losses[name], norms[name] = value.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
            model.zero_grad()
        steps[name] = train_step(model, loss, batches)
    low = work_dtype() == torch.bfloat16
    agree("loss of the first batch", losses, 2e-3 if low else 1e-5)
    agree("norm of its gradient", norms, 2e-2 if low else 1e-4)

    gemm, gemm_flops = gemm_probe()
    result = judge(race({**steps, "GEMM probe": gemm}, "train"))
    peak = gemm_flops / result["GEMM probe"]["median"]
    N, T = batch * config.block_size, config.block_size
    seen = {name: np.mean([attended(None if name == "ours plain" else b[3], T) for b in batches]) for name in steps}
    for name in steps:
        flops = ours.flops_per_token(2 * seen[name]) if name != "nanoGPT compile" else NanoGPT(config).flops_per_token(config)
        flops *= N / result[name]["median"]                # 6 L H D T is 12 L H D (T / 2)
        result[name].update({"tok/s": N / result[name]["median"], "TFLOP/s": flops / 1e12, "of GEMM peak": flops / peak})
        if (vendor := vendor_peak()):
            result[name]["MFU"] = flops / vendor
    result["GEMM probe"].update({"TFLOP/s": peak / 1e12})
    return result, dict(loss=losses["ours"], parameters=ours.num_params(), attended=seen["ours"], **memory_peak())


def vendor_peak():
    return next((v for k, v in BF16_PEAK.items() if place() == "cuda" and k in torch.cuda.get_device_name()), None)


def memory_peak():
    return {"GPU memory GiB": torch.cuda.max_memory_allocated() / 2**30} if place() == "cuda" else {}


def optim():
    """One optimizer step over the preset's parameters, with gradients that are there. `first` is with nothing compiled before."""
    from torch._inductor.utils import fresh_cache
    config, _, _ = shape()
    with torch.device(place()):
        first = Apertus(config, seed)
    names = chosen(["ours"] + ["ours eager"] * compiles() + ["AdamW fused", "per-tensor loop"])
    how = dict(lr=1e-3, betas=(0.9, 0.999, 0.9999), alpha=8.0, eps=1e-8, weight_decay=0.1)
    steps, ends, apart = {}, {}, {}
    for name in names:
        params = [torch.nn.Parameter(p.detach().clone()) for p in first.parameters()]
        g = torch.Generator(place()).manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=g, device=place())
        if name == "per-tensor loop":
            states, count = [[torch.zeros_like(p) for _ in range(3)] for p in params], [0]
            def step(n, params=params, states=states, count=count):
                count[0] += 1
                with torch.no_grad():
                    loop_ademamix(params, states, count[0], **how)
        elif name == "AdamW fused":
            opt = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, fused=True)
            step = lambda n, opt=opt: opt.step()
        else:
            opt = AdEMAMix(params, **how, compile=name == "ours" and compiles())
            step = lambda n, opt=opt: opt.step()
        steps[name], ends[name] = step, params
    with fresh_cache():
        result, speed = race_beside_bandwidth(steps, "optim")
    for name, params in ends.items():                      # after as many steps each: the same parameters, but for AdamW's
        apart[name] = max(((p - q).abs().max() / q.abs().max()).item() for p, q in zip(params, ends["ours"]))
        if name != "AdamW fused" and not apart[name] <= 1e-5:
            raise ValueError(f"{name} ended {apart[name]:.2g} (relative) away from ours after {warmup + rounds} steps: "
                             "they do not compute the same")
    N = first.num_params()
    for name in steps:
        moves = (28 if name == "AdamW fused" else 36) * N                                  # fp32: read p, g, m1, m2, v; write p, m1, m2, v
        result[name].update({"GB/s": moves / result[name]["median"] / 1e9, "of bandwidth": moves / result[name]["median"] / speed})
    return result, dict(parameters=N, tensors=len(ends["ours"]),
                        **{f"{name}: furthest from ours": d for name, d in apart.items() if "loop" in name or "eager" in name})


def goldfish():
    """The Goldfish mask of 64 windows of 4096 labels, k = h = 50."""
    B, T = (64, 4096) if preset != "tiny" else (2, 256)
    batches = torch.from_numpy(np.random.default_rng(seed).integers(0, 131072, (B, T))).split(4)                   # as the loader calls it
    ways = {"ours": lambda x: goldfish_mask(x, 50, 50), "published": lambda x: published_mask(x, 50, 50),
            "ours, hash=mix": lambda x: goldfish_mask(x, 50, 50, "mix")}
    names = chosen(list(ways))
    if "published" in names and not all(torch.equal(ways["ours"](x), ways["published"](x)) for x in batches):
        raise ValueError("our Goldfish mask is not the published one")
    result, _ = race_beside_bandwidth({name: lambda n, f=ways[name]: [f(x) for x in batches] for name in names}, "goldfish")
    for name in names:
        result[name]["ns/token"] = result[name]["median"] / (B * T) * 1e9
    return result, dict(tokens=B * T)


def synthetic_shard(folder, n, vocab_size, documents):
    """What prepare.py writes, from random ids: one shard of n tokens."""
    g = np.random.default_rng(seed)
    stream = g.integers(4, vocab_size, n).astype(np.uint32)
    ends = np.flatnonzero(g.random(n - 1) < 1 / documents)
    stream[ends], stream[ends + 1] = 2, 1                  # </s> <s>
    np.save(os.path.join(folder, "shard.npy"), stream)
    split = dict(shards=[dict(file="shard.npy", tokens=n)], tokens=n, documents=len(ends), bytes=4 * n)
    with open(os.path.join(folder, "meta.json"), "w") as f:
        json.dump(dict(bos=1, eos=2, vocab_size=vocab_size, tokenizer="synthetic", sources=dict(a=dict(train=split, val=split))), f)
    return stream


def loader():
    """Batches of 8 windows of 4096 tokens from a shard on disk, documents of 800 tokens; and the preset's training step beside them."""
    with tempfile.TemporaryDirectory() as folder:
        n, B, T, vocab = (2**24, 8, 4096, 131072) if preset != "tiny" else (2**16, 4, 256, 4096)
        stream = synthetic_shard(folder, n, vocab, 800)
        plain, fish = TokenDataset(folder, "train", T, seed), TokenDataset(folder, "train", T, seed, goldfish_k=50)
        idx, targets, keep, doc = plain.batch(0, B)
        for b in range(B):                                 # what a loop over the tokens says
            number = torch.tensor([t == 1 for t in idx[b].tolist()]).cumsum(0)
            if not all(map(torch.equal, (doc[b], targets[b, :-1], keep[b]), (number, idx[b, 1:], idx[b] != 2))):
                raise ValueError("the loader's documents, masks or targets are not those of a loop over its tokens")

        def nanogpt(n):                                    # get_batch of nanoGPT's train.py, without masks and document ids
            data = np.load(os.path.join(folder, "shard.npy"), mmap_mode="r", allow_pickle=False)
            ix = np.random.default_rng(n).integers(0, len(data) - T, B)
            x = torch.stack([torch.from_numpy(data[i:i + T].astype(np.int64)) for i in ix])
            return x, torch.stack([torch.from_numpy(data[i + 1:i + 1 + T].astype(np.int64)) for i in ix])

        ways = {"ours": lambda n: plain.batch(n * B, B), "ours, Goldfish": lambda n: fish.batch(n * B, B), "nanoGPT": nanogpt}
        names = chosen(list(ways) + ["train step"])
        repeat = 32
        runs = {name: lambda n, f=ways[name]: [f(n * repeat + i) for i in range(repeat)] for name in names if name in ways}
        if "train step" in names:
            config, batch, documents = shape()
            with torch.device(place()):
                model, loss = contestant("ours", Apertus(config, seed))
            runs["train step"] = train_step(model, loss, [make_batch(n, config, batch, documents) for n in range(warmup + rounds)])
        result, _ = race_beside_bandwidth(runs, "loader")
    for name in names:
        count = batch * config.block_size if name == "train step" else repeat * B * T
        result[name]["ms/M tokens"] = result[name]["median"] / count * 1e9
        result[name]["ratio"] = [x * repeat * B * T / count for x in result[name]["ratio"]]  # a token of it against a token of ours
    if "train step" in names:
        for name in names[:-1]:
            result[name]["of a step"] = result[name]["ms/M tokens"] / result["train step"]["ms/M tokens"]
    return result, dict(shard_tokens=len(stream))


def tokenize():
    """Apertus' tokenizer on the standard library's source, in documents of 4 kB, against Hugging Face's tokenizers with the same ids."""
    import tokenizers
    import convert
    import tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    name = "apertus" if preset != "tiny" else "apertus:2048"
    ours = tokenizer.load(name)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(convert.hf_files(ours)["tokenizer.json"]))
    stdlib, text = sysconfig.get_path("stdlib"), ""
    for file in sorted(f for f in os.listdir(stdlib) if f.endswith(".py")):
        with open(os.path.join(stdlib, file), encoding="utf-8") as f:
            text += f.read()
    size = 3_000_000 if preset != "tiny" else 20_000
    documents = [text[i:i + 4000] for i in range(0, min(size, len(text)), 4000)]
    ways = {"ours": lambda: [ours.encode(d) for d in documents],
            "hf batch": lambda: [e.ids for e in theirs.encode_batch_fast(documents, add_special_tokens=False)],
            "hf": lambda: [theirs.encode(d, add_special_tokens=False).ids for d in documents]}
    names = chosen(list(ways))
    ids = {n: ways[n]() for n in names}
    if any(ids[n] != ids["ours"] for n in names):
        raise ValueError("Hugging Face's tokenizers give other ids than ours")
    size, count = sum(len(d.encode()) for d in documents), sum(map(len, ids["ours"]))
    result, _ = race_beside_bandwidth({n: lambda _, f=ways[n]: f() for n in names}, "tokenize")
    for n in names:
        result[n].update({"MB/s": size / result[n]["median"] / 1e6, "M tok/s": count / result[n]["median"] / 1e6})
    return result, dict(bytes=size, tokens=count)


def prepare():
    """
    prepare.py from start to end, one process, on 120 MB of pages (this Python's and its packages' sources): with every filter on, nearly all
    of them passing, and with none. MB of the text that is kept.
    """
    size, files = 120e6 if preset != "tiny" else 2e5, []
    for kind in ("stdlib", "purelib"):
        files += sorted(glob.iglob(os.path.join(sysconfig.get_path(kind), "**", "*.py"), recursive=True))
    with tempfile.TemporaryDirectory() as folder:
        at = functools.partial(os.path.join, folder)
        with open(at("pages.jsonl"), "w", encoding="utf-8") as f:
            for n, file in enumerate(files):
                if f.tell() > size:
                    break
                with open(file, encoding="utf-8", errors="replace") as source:
                    page = dict(id=str(n), url=f"https://site{n % 50}.org/{n}", text=source.read(), language="eng_Latn", license="MIT",
                                score=n * 0.618 % 1, toxicity=n * 0.414 % 0.99)
                f.write(json.dumps(page) + "\n")
        with open(at("robots.jsonl"), "w", encoding="utf-8") as f:
            for n in range(50):
                rule = f"User-agent: {'GPTBot' if n == 0 else 'Somebot'}\nDisallow: /\n\nUser-agent: *\nDisallow: /private"
                f.write(json.dumps(dict(domain=f"site{n}.org", content=rule)) + "\n")
        with open(at("prompts.txt"), "w", encoding="utf-8") as f:
            f.writelines(f"Which of these {n} numbers is the sum of the first {n + 1} primes, and which is not a prime at all?\n" for n in range(1000))
        every = ["--near_dedup=0.72", "--keep_licenses=MIT", "--keep_languages=eng_Latn", "--min_chars=20", "--score_field=score", "--keep_top=0.99",
                 "--max_field=toxicity", f"--robots={at('robots.jsonl')}", f"--decontaminate={at('prompts.txt')}"]
        kept = {}

        def run(n, name, flags):
            before = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = subprocess.run([sys.executable, os.path.join(ROOT, "prepare.py"), at("pages.jsonl"), f"--out={at('out')}", "--workers=1",
                                   "--tokenizer=apertus" if preset != "tiny" else "--tokenizer=byte", *flags], capture_output=True, text=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            if done.returncode:
                raise ValueError(f"prepare.py {' '.join(flags)} ended with exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
            with open(at("out", "report.json"), encoding="utf-8") as f:
                kept[name] = json.load(f)["total"]
            shutil.rmtree(at("out"))
            cpu = sum(getattr(after[0], k) - getattr(before[0], k) for k in ("ru_utime", "ru_stime"))
            return after[1] - before[1] if clock == "wall" else cpu

        ways = {"ours": every, "tokenizing alone": ["--dedup=False", "--pii=False"]}
        names = chosen(list(ways))
        result = judge(race({name: functools.partial(run, name=name, flags=ways[name]) for name in names}, "prepare"))
    for name in names:
        result[name]["MB/s"] = kept[name]["bytes"] / result[name]["median"] / 1e6
    return result, dict(bytes_in=kept["ours"]["bytes_in"], bytes_kept=kept["ours"]["bytes"])


def decode():
    """Greedy generation at batch 1 after a prompt of 32, KV cache. The bound: all weights but the embedding are read once a token."""
    config, _, _ = shape(**({} if not isinstance(PRESETS.get(preset, {}).get("n_layer"), tuple) else dict(n_layer=32)))
    with torch.device(place()):
        first = Apertus(dataclasses.replace(config, init_std=0.1), seed)                    # decided logits: greedy has no ties to break
    prompt = make_batch(0, config, 1, None)[0][:, :32]
    names = chosen(["ours"] + ["ours eager"] * compiles() + ["hf"])
    first.to(work_dtype())
    theirs = hugging_face(first).to(work_dtype()).eval() if "hf" in names else None
    laid_out = copy.deepcopy(first) if place() == "cpu" else first                          # elsewhere it changes nothing
    lay_out_for_decoding(laid_out)                        # as sample.py does, unless it compiles
    ways = {"ours": lambda: generate(first, prompt, tokens, temperature=0, compile=compiles()),
            "ours eager": lambda: generate(laid_out, prompt, tokens, temperature=0),
            "hf": lambda: theirs.generate(prompt, max_new_tokens=tokens, do_sample=False)}
    said, firsts = {}, {}
    for name in names:
        began = time.perf_counter()
        said[name], firsts[name] = ways[name]()[0].tolist(), time.perf_counter() - began
    same = {name: next((i for i, (a, b) in enumerate(zip(ids, said["ours"])) if a != b), len(ids)) - 32 for name, ids in said.items()}
    if work_dtype() == torch.float32 and min(same.values()) < tokens:
        raise ValueError(f"greedy tokens that agree with ours: {same}, of {tokens}")
    result, speed = race_beside_bandwidth({n: lambda _, f=ways[n]: f() for n in names}, "decode", "read")
    weights = sum(p.numel() * p.element_size() for n, p in first.named_parameters() if config.tie_embeddings or "embed_tokens" not in n)
    for name in names:
        rate = tokens / result[name]["median"]
        result[name].update({"tok/s": rate, "of weight-read bound": weights * rate / speed, "first": firsts[name]})
    return result, dict(tokens=tokens, weight_bytes=weights, agreeing_tokens=same)


def memory():
    """
    Peak memory of a forward and backward pass of 4096 tokens at 131,072 words, beyond weights and gradients; and what chunking the loss
    costs in time. Each contestant in a process of its own, since a peak does not go down again.
    """
    T, V = (4096, 131072) if preset != "tiny" else (256, 16384)
    config = ApertusConfig(block_size=T, vocab_size=V, n_layer=2, n_head=4, n_kv_head=1, n_embd=256, ffn_dim=1344, init_std=0.02)
    all_names = ["ours", "ours full logits", "hf"] + ["hf compile"] * compiles()
    if impls.startswith("only "):                          # it is this process that is measured
        return {impls[5:]: peak_of(impls[5:], config)}, {}
    names, rows = chosen(all_names), {}
    for name in tqdm(names, desc="memory", leave=False, dynamic_ncols=True):
        with tempfile.TemporaryDirectory() as folder:
            arguments = [f"--{k}={globals()[k]}" for k in ("preset", "device", "dtype", "threads", "seed")]
            command = [sys.executable, "-m", "tools.bench", "memory", f"--impls=only {name}", f"--out={folder}", *arguments]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"{name} did not finish (exit code {done.returncode}): {done.stderr.strip().splitlines()[-1:]}")
            with open(os.path.join(folder, f"{record_name()}.json"), encoding="utf-8") as f:
                rows[name] = json.load(f)["rows"][name]
    low = work_dtype() == torch.bfloat16
    agree("loss", {n: r["loss"] for n, r in rows.items()}, 2e-3 if low else 1e-6)
    agree("norm of the gradient", {n: r["gradient norm"] for n, r in rows.items()}, 2e-2 if low else 1e-5)
    for r in rows.values():
        r["ratio"] = [r["peak MiB"] / rows["ours"]["peak MiB"]] * 3
    return {**rows, **head_race(V, 384 if V > 20000 else 64)}, dict(T=T, vocab_size=V, n_embd=256, n_layer=2)


def peak_of(name, config):
    with torch.device(place()):
        ours = Apertus(config, seed)
    if name == "ours full logits":
        model = ours
        model.dtype = work_dtype()
        loss = lambda idx, targets, *_: F.cross_entropy(model(idx)[0].float().flatten(0, 1), targets.flatten())
    else:
        model, loss = contestant(name.replace("ours", "ours eager"), ours)
        del ours
    idx, targets = make_batch(0, config, 1, None)[:2]
    if name != "hf compile":                               # a short pass first: gradients exist, libraries have their buffers
        loss(idx[:, :32], targets[:, :32], None, None, None).backward()
        model.zero_grad(set_to_none=False)
    before = torch.cuda.memory_allocated() if place() == "cuda" else resident()
    if place() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    value = loss(idx, targets, None, None, None)
    value.backward()
    peak = torch.cuda.max_memory_allocated() if place() == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    return {"peak MiB": (peak - before) / 2**20, "before MiB": before / 2**20, "loss": value.item(), "gradient norm": norm}


def resident():
    """Bytes of this process in memory now; its peak so far where /proc is not there."""
    if not os.path.exists("/proc/self/statm"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def head_race(V, C):
    """The loss alone, forward and backward, in chunks and with all logits, both compiled: N = 1024 positions."""
    import model as model_file
    N = 1024
    h = torch.randn(N, C, device=place(), dtype=work_dtype(), requires_grad=True)
    head = torch.randn(V, C, device=place(), requires_grad=True)
    targets, weights = torch.randint(0, V, (N,), device=place()), torch.full((N,), 1 / N, device=place())
    full = lambda h, head: F.cross_entropy((h @ head.T.to(h.dtype)).float(), targets)
    chunk_loss = model_file.chunk_loss
    if compiles():
        full, chunk_loss = torch.compile(full), torch.compile(chunk_loss)
    rows = model_file.chunk_rows(V, place())
    ways = {"ours": lambda: model_file.ChunkedCrossEntropy.apply(h, head, targets, weights, rows, chunk_loss)[0], "full": lambda: full(h, head)}
    values = {name: f().item() for name, f in ways.items()}
    agree("loss of the head alone", values, 2e-3 if work_dtype() == torch.bfloat16 else 1e-6)
    result = judge(race({name: lambda _, f=f: torch.autograd.grad(f(), (h, head)) for name, f in ways.items()}, "loss"))
    return {f"loss {'in chunks' if name == 'ours' else 'with full logits'}": r for name, r in result.items()}


def cold():
    """
    Wall seconds from `python train.py configs/laptop.py` to the end of its first step, in a process of its own with nothing compiled
    before but torch's headers (8 s of g++, once a machine); and with two and four times the layers: blocks share one compilation.
    """
    global clock
    clock = "wall"
    config, depth = ("laptop", 4) if preset != "tiny" else ("tiny", 2)

    def first_step(compile, layers):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, os.path.join(ROOT, "train.py"), f"configs/{config}.py", f"--data={data}", f"--out={folder}/run",
                       f"--device={place()}", f"--compile={compile}", f"--n_layer={layers}"]
            environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=f"{folder}/cache", OMP_NUM_THREADS=str(threads or os.cpu_count()))
            log, began = os.path.join(folder, "run", "log.jsonl"), time.perf_counter()
            with open(os.path.join(folder, "said"), "w+") as said:
                run = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
                try:
                    while not (os.path.exists(log) and os.path.getsize(log)):
                        if run.poll() is not None:
                            said.seek(0)
                            raise ValueError(f"{' '.join(command)} ended before its first step: {said.read().strip().splitlines()[-1:]}")
                        time.sleep(0.02)
                    return time.perf_counter() - began
                finally:
                    if run.poll() is None:
                        os.killpg(run.pid, signal.SIGKILL)                               # and the processes that compile for it
                    run.wait()

    ways = {"ours": (compiles(), depth), **{f"ours, {n} layers": (True, n) for n in (2 * depth, 4 * depth) if compiles()},
            "ours eager": (False, depth), f"ours eager, {4 * depth} layers": (False, 4 * depth)}
    result = judge(race({name: lambda n, way=ways[name]: first_step(*way) for name in chosen(list(ways))}, "cold"))
    for r in result.values():
        r["s to the first step"] = r["median"]
    return result, dict(config=config, layers=depth)


def ffn():
    """
    One MLP's two matrices, C -> 4 C -> C, dense and in each form of studies/structured.py, eager: forward and backward of 512 tokens, and one
    token through so many copies (256 MB or 100) that the weights come from memory, as in a whole model; seconds are those of one copy.
    """
    from studies.structured import StructuredLinear, forms
    rows, best = {}, ""
    for C in widths if preset != "tiny" else (48,):
        x = torch.randn(512 if preset != "tiny" else 8, C, device=place(), dtype=work_dtype(), requires_grad=True)
        training, decoding, share = {}, {}, {}
        for kind, *form in forms(C):
            def pair():
                made = [Linear(a, b) if kind == "dense" else StructuredLinear(a, b, kind, *form)
                        for a, b in ((C, 4 * C), (4 * C, C))]
                for p in (p for m in made for p in m.parameters()):
                    torch.nn.init.normal_(p, std=0.02)
                return torch.nn.Sequential(*made).to(place(), work_dtype())

            def train(n, mlp, grad):
                start = now()
                mlp(x).backward(grad)
                return now() - start

            @torch.inference_mode()
            def decode(n, mlps, one):
                start = now()
                for mlp in mlps:
                    mlp(one)
                return (now() - start) / len(mlps)

            mlp = pair()
            size = sum(p.numel() for p in mlp.parameters())
            name = "dense" if kind == "dense" else f"{kind} {size / (8 * C * C):.0%}"
            share[name] = size / (8 * C * C)
            mlps = [mlp] + [pair() for _ in range(min(100, -(-2**28 // (size * x.itemsize))) - 1)]
            training[name] = functools.partial(train, mlp=mlp, grad=torch.randn_like(x))
            decoding[name] = functools.partial(decode, mlps=mlps, one=x.detach()[:1])
        for what, ways in (("training", training), ("decoding", decoding)):
            result = judge(race(ways, f"{what}, width {C}"), base="dense")
            for name, r in result.items():
                r["of dense parameters"] = share[name]
            rows.update({f"{what} {C}, {name}": r for name, r in result.items()})
            name = min(result, key=lambda n: result[n]["ratio"][0])
            best += f"{'; ' * bool(best)}dense {what} at {C} {1 / result[name]['ratio'][0]:.2f}x ({name})"
    return rows, {"base": "dense", "fastest": best}


MODES = dict(train=train, optim=optim, goldfish=goldfish, loader=loader, tokenize=tokenize, prepare=prepare, decode=decode,
             memory=memory, cold=cold, ffn=ffn)


# ----------------------------------------------------------------------------------------------------------------------
# records, tables, the picture


def record_name():
    return "-".join([paths[0], preset, str(work_dtype())[6:]])


def circumstances():
    """Where and with what the numbers were taken."""
    import transformers
    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            cpu = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), cpu)

    def git(*args):
        return subprocess.run(["git", *args], capture_output=True, text=True, cwd=ROOT).stdout.strip()

    return dict(date=time.strftime("%Y-%m-%d"),
                command="python -m tools.bench " + shlex.join(a for a in sys.argv[1:] if not a.startswith("--out=")),
                cpu=f"{cpu}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
                gpu=torch.cuda.get_device_name() if place() == "cuda" else None, threads=torch.get_num_threads(),
                clock="cpu" if clock == "cpu" or clock == "auto" and place() == "cpu" else "wall", load=os.getloadavg()[0],
                python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__, seed=seed,
                commit=git("rev-parse", "--short", "HEAD") + " + changes" * bool(git("status", "--porcelain", "--", "*.py")))


RATES = ("tok/s", "GB/s", "ns/token", "ms/M tokens", "MB/s", "peak MiB", "s to the first step")   # the first that a row has stands for it


def cell(key, value):
    if value is None:
        return ""
    if key.startswith(("of ", "MFU")):
        return f"{value * 100:.2g}%" if value < 0.01 else f"{value:.0%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def base_of(record):
    """Against whom the ratios are: ours, but in `ffn` the dense layers."""
    return record["facts"].get("base", "ours")


def table(record):
    """A record as Markdown lines: a row a contestant, time, rates, shares, and how much faster ours is."""
    rows, rates = record["rows"], []
    for r in rows.values():
        rates += [k for k in r if k not in ("seconds", "median", "min", "spread", "ratio", "first", *rates)]
    times = ["ms", "min", "spread", "first s"] * any("median" in r for r in rows.values())
    head = ["", *times, *rates, f"against {base_of(record)}", "95 %"]
    lines = [head, ["---"] + ["--:"] * (len(head) - 1)]
    for name, r in rows.items():
        timed, ratio = [""] * 4, ["", ""]
        if "median" in r:
            ms = [f"{x * 1e3:,.1f}" if x > 0.01 else f"{x * 1e3:.3g}" for x in (r["median"], r["min"])]
            timed = [*ms, f"{r['spread']:.0%}" + " noisy" * (r["spread"] > 0.1), f"{r['first']:.1f}"]
        if "probe" not in name and "ratio" in r:
            ratio = [f"{r['ratio'][0]:.3g}x", f"{r['ratio'][1]:.3g} - {r['ratio'][2]:.3g}" * ("median" in r)]
        lines.append([name] + timed * bool(times) + [cell(k, r.get(k)) for k in rates] + ratio)
    width = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["| " + " | ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(line, width))) + " |" for line in lines]


def picture(record, path):
    """Bars: time (or memory) against ours, with the interval of the ratio."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows = {n: r for n, r in record["rows"].items() if "probe" not in n and "ratio" in r}
    figure, axis = plt.subplots(figsize=(7, 0.6 + 0.42 * len(rows)), layout="constrained")
    for i, (name, r) in enumerate(rows.items()):
        middle, low, high = r["ratio"]
        axis.barh(i, middle, color="C0" if name.startswith("ours") else "C7")
        axis.errorbar(middle, i, xerr=[[max(middle - low, 0)], [max(high - middle, 0)]], color="black", linewidth=1)
        rate = next((f"{cell(k, r[k])} {k}" for k in RATES if k in r), "")
        axis.text(high, i, f"  {middle:.2f}x   {rate}", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), rows, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, max(r["ratio"][2] for r in rows.values()) * 1.35)
    axis.axvline(1, color="black", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    what = "memory" if record["mode"] == "memory" else "time"
    title = ", ".join(record[k] for k in ("mode", "preset", "dtype"))
    axis.set_title(f"{title}: {what} against {base_of(record)} (less is better)", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def summary(records):
    """All records as one Markdown table, a line each: what ours does, of what the machine could, how much faster than whom, the command."""
    lines = ["| measured | ours | of the machine | ours is faster than | command |", "|---|---|---|---|---|"]
    for r in records:
        base = next((k for k in r["rows"] if k.split(",")[0] == "ours"), None)
        ours = r["rows"].get(base, {})                     # in `ffn` nobody
        rate = next((f"{cell(k, ours[k])} {k}" for k in RATES if k in ours), "")
        share = "; ".join(f"{cell(k, v)} {k}" for k, v in ours.items() if k.startswith(("of ", "MFU")))
        than = "; ".join(f"{n} {v['ratio'][0]:.2f}x" + (f" ({v['ratio'][1]:.2f}-{v['ratio'][2]:.2f})" if "median" in v else "")
                         for n, v in r["rows"].items() if n not in (base, "train step") and "probe" not in n and "ratio" in v)
        than = r["facts"].get("fastest", than)
        what = ", ".join([r["mode"], r["preset"], r["dtype"], r["gpu"] or r["cpu"].rsplit(", ", 1)[-1]])      # of a CPU: its instruction set
        lines.append(f"| {what} | {rate} | {share} | {than} | `{r['command']}` |")
    where = sorted({f"{r['gpu'] or r['cpu']}, {r['threads']} thread{'s' * (r['threads'] > 1)}, torch {r['torch']}, "
                    f"transformers {r['transformers']}, {r['clock']} clock, {r['date']}" for r in records})
    return "\n".join([*lines, "", "Measured on: " + "; ".join(where) + "."])


def show(files):
    records = []
    for path in files:
        try:
            with open(path, encoding="utf-8") as f:
                records.append(json.load(f))
            print(f"\n{path}: `{records[-1]['command']}`, {records[-1]['gpu'] or records[-1]['cpu']}\n")
            print("\n".join(table(records[-1])))
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError):
            raise ValueError(f"{path} is not a result of tools/bench.py: want the JSON that `python -m tools.bench train` writes") from None
    print("\n" + summary(records))
    if readme:
        mark = "<!-- bench -->\n"
        with open(readme, encoding="utf-8") as f:
            parts = f.read().split(mark)
        if len(parts) != 3:
            raise ValueError(f"{readme} has {len(parts) - 1} lines '{mark.strip()}': want two, with the table between them")
        with open(readme, "w", encoding="utf-8") as f:
            f.write(mark.join([parts[0], summary(records) + "\n", parts[2]]))


def main():
    if paths and all(p.endswith(".json") for p in paths):
        return show(paths)
    if len(paths) != 1 or paths[0] not in MODES:
        raise ValueError(f"got {' '.join(paths) or 'nothing'}: want one of {', '.join(MODES)}, or results (*.json): "
                         "python -m tools.bench train --preset=cpu")
    if clock not in ("auto", "cpu", "wall"):
        raise ValueError(f"clock={clock!r}: there is auto, cpu and wall")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: want at least 1")
    if place() == "cpu" and clock != "wall" and threads != 1:
        raise ValueError(f"threads={threads} with clock={clock}: the CPU clock adds up all threads' time; take --threads=1 or --clock=wall")
    if threads:
        torch.set_num_threads(threads)
    if not compiles():
        print(f"no compiler found for {place()} (on CPU: a C++ one, like g++): everyone runs eagerly")
    torch.manual_seed(seed)
    rows, facts = MODES[paths[0]]()
    record = dict(mode=paths[0], preset=preset, dtype=str(work_dtype())[6:], **circumstances(), rounds=rounds, facts=facts, rows=rows)
    os.makedirs(out, exist_ok=True)
    path = os.path.join(out, record_name())
    with open(path + ".json", "w", encoding="utf-8") as f:
        json.dump(record, f, indent=1)
    if any("ratio" in r for r in rows.values()):
        picture(record, path + ".png")
    print("\n".join(table(record)))
    print(f"\n{', '.join(f'{k} {v:.6g}' if isinstance(v, float) else f'{k} {v}' for k, v in facts.items())}\nwrote {path}.json and .png")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
