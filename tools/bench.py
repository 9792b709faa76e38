"""
Speed: ours against transformers' Apertus and torch's fused AdamW, and as a share of what this machine can do.

    train     a whole step: forward, backward, clipping, update               share of a matrix product's FLOP/s
    decode    greedy generation at batch 1, after a prompt of 32 tokens       share of the weights' bytes / bandwidth
    optim     one update by AdEMAMix, and by AdamW, which moves 28 / 36       share of the bandwidth
              of the bytes

    FLOPs of a step = (6 matrix parameters + 12 L C attended) tokens, where attended is the number of positions that a
    token sees on average. Recomputed and masked pairs do not count (PaLM, arXiv 2204.02311, appendix B).

Two rules make a ratio believable. All contestants compute the same: they have the same weights, and the race ends with
an error unless they have the same gradient, or the same tokens. And all meet the same load: they run in turns,
A B, B A, ..., the probe of the machine too, and the result is the median of the ratios within a round. On a CPU the
clock is this process's own time on one thread, so other processes hardly matter.

$ python -m tools.bench train --preset=cpu              # against transformers, eager and compiled
$ python -m tools.bench train --preset=packed           # the same on documents of 100 tokens, masked
$ python -m tools.bench decode --dtype=bfloat16
$ python -m tools.bench optim --preset=124m
"""

import sys

if __name__ == "__main__" and not __package__:
    print("bench.py: start it from the project's root, python -m tools.bench", file=sys.stderr)
    sys.exit(2)

import json
import os
import shlex
import subprocess
import time

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from ademamix import AdEMAMix
from engine.hardware import can_compile, keep_freed_memory, pick_device
from generate import generate
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig

paths = []                  # train | decode | optim
preset = "auto"             # a row of SHAPES; auto: cpu on a CPU, 1b5 on CUDA, where a small one measures launches
impls = ""                  # contestants of `train` beside ours, like "hf" or "hf compile"; "" = both
device = "auto"             # cuda | cpu
dtype = "auto"              # float32 | bfloat16, of activations and products; auto: bfloat16 on CUDA
rounds = 7                  # that are counted, after one that is not: the first call compiles
clock = "auto"              # cpu = time of this process, on one thread; wall. auto: cpu on a CPU
threads = 1                 # of the CPU; 0 = torch's choice
tokens = 64                 # to generate in `decode`
seed = 28                   # of weights and batches
out = "out/bench"           # folder of the record, MODE-PRESET-DTYPE.json

# documents: their mean length in tokens, with Goldfish; 0 = plain causal windows. 8b-stack has eight layers of the 8B,
# because no GPU holds all 32 with their optimizer.
SHAPES = """
preset    documents  batch  block_size  n_layer  n_head  n_kv_head  n_embd  ffn_dim  vocab_size  tie_embeddings
cpu               0      4         512        6       6          2     384     2048       16384           false
packed          100      4         512        6       6          2     384     2048       16384           false
laptop            0      4         256        2       2          1     128      672        4096            true
124m              0     16        1024       12      12          4     768     3584       50304            true
1b5            1000      2        4096       16      32          8    2048    12288      131072           false
8b-stack       1000      2        4096        8      32          8    4096    21504      131072           false
tiny             20      2          64        2       4          2      64      160         320           false
"""
HEAD, *ROWS = [line.split() for line in SHAPES.strip().splitlines()]
PRESETS = {name: dict(zip(HEAD[1:], map(json.loads, values))) for name, *values in ROWS}

# Letters: B batch, T time, N parameters.


def resolve_settings():
    """Replace what "auto" stands for. ValueError, one line, for what cannot be measured."""
    global device, preset, dtype, clock
    device = pick_device(device)
    on_gpu = device == "cuda"
    if preset == "auto":
        preset = "1b5" if on_gpu else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if on_gpu else "float32"
    if clock == "auto":
        clock = "wall" if on_gpu else "cpu"
    if preset not in PRESETS:
        raise ValueError(f"preset={preset}: there is {', '.join(PRESETS)}")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: want at least 1")
    if not set(filter(None, impls.split(","))) <= {"hf", "hf compile"}:
        raise ValueError(f"impls={impls}: there is hf and hf compile")
    if clock == "cpu" and (threads != 1 or on_gpu):
        raise ValueError(f"threads={threads} device={device}: the CPU clock adds up threads and does not see a GPU: "
                         "take --threads=1 on a CPU, or --clock=wall")


def work_dtype():
    return getattr(torch, dtype)


def compiles():
    """Whether torch.compile has the compiler that it needs; without one everybody runs eagerly."""
    return can_compile(torch.device(device))


# -----------------------------------------------------------------------------
# a race


def now():
    """Seconds by the chosen clock, after all work that was given to the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if clock == "cpu" else time.perf_counter()


def race(ways, work, probe):
    """
    Time {name: f()} in turns, together with the probe of the machine.

    work: {name: FLOPs or bytes of a call}; probe: (the same of its call, f()). Returns {name: row}: seconds of each
    round, their median, ratio, the time as a multiple of ours within a round, [median, smallest, largest], and share,
    the speed as a share of the probe's.
    """
    most, ways = probe[0], ways | dict(probe=probe[1])
    names = list(ways)
    seconds = {name: [] for name in names}
    for n in tqdm(range(rounds + 1), "rounds", leave=False):
        for name in names if n % 2 else names[::-1]:
            start = now()
            ways[name]()
            seconds[name].append(now() - start)
    # The first round compiles, and does not count.
    times = {name: np.array(found[1:]) for name, found in seconds.items()}
    rows = {}
    for name, amount in work.items():
        median = np.median(times[name])
        ratios = times[name] / times["ours"]
        rows[name] = dict(
            seconds=times[name].tolist(),
            median=median,
            ratio=[np.median(ratios), ratios.min(), ratios.max()],
            share=amount / median / (most / np.median(times["probe"])),
        )
    return rows


def agree(what, values, tolerance):
    """ValueError unless all of {name: number} lie within a relative tolerance of ours. A NaN never does."""
    ours = values["ours"]
    for name, value in values.items():
        if not abs(value - ours) <= tolerance * abs(ours):
            raise ValueError(f"{what}: {name} has {value:.8g} and ours {ours:.8g}: they do not compute the same, so "
                             "their times mean nothing")


def gemm_probe():
    """(FLOPs, f()): a matrix product in the working dtype, of random numbers because zeros are faster on a GPU."""
    rows, inner = (8192, 8192) if device == "cuda" else (2048, 512)
    a, b = torch.randn(2, rows, inner, device=device, dtype=work_dtype())
    return 2 * rows**2 * inner, lambda: a @ b.T


def bandwidth_probe(read_only=False):
    """(bytes, f()): an array of 256 MB, on a GPU of 2 GB, far larger than any cache: updated in place, or only read."""
    x = torch.ones(2**29 if device == "cuda" else 2**26, device=device)
    if read_only:
        return x.nbytes, x.sum
    return 2 * x.nbytes, lambda: x.mul_(1.0)


# -----------------------------------------------------------------------------
# models and batches


def built(config, compiled=False):
    """Our model of a config, the same weights each time, in fp32; compiled: as train.py compiles it."""
    with torch.device(device):
        model = Apertus(config, seed)
    if compiled:
        for block in model.model.layers:
            block.compile()
        model.chunk_loss = torch.compile(model.chunk_loss)
    return model


def hugging_face(ours):
    """transformers' ApertusForCausalLM with our weights, in fp32. It has no end-of-text id, so that it never stops."""
    import transformers
    import convert
    transformers.logging.set_verbosity_error()
    settings = convert.config_to_hf(ours.config)
    config = transformers.ApertusConfig(**settings, attn_implementation="sdpa", pad_token_id=3)
    with torch.device(device):
        theirs = transformers.ApertusForCausalLM(config).float()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    theirs.generation_config.eos_token_id = None
    return theirs


def shape(init_std=0.02):
    """The preset as (ApertusConfig, windows of a step, mean length of documents)."""
    values = dict(PRESETS[preset])
    documents = values.pop("documents")
    batch = values.pop("batch")
    return ApertusConfig(**values, init_std=init_std), batch, documents


def make_batch(config, B, documents):
    """
    idx, targets, keep, doc, each (B, T); in plain windows all are kept and the last is None.

    Ids are uniform from 4 on, because transformers gives the padding id 3 no gradient.
    """
    T = config.block_size
    generator = np.random.default_rng(seed)
    stream = torch.from_numpy(generator.integers(4, config.vocab_size, (B, T + 1)))
    idx = stream[:, :-1].contiguous().to(device)
    targets = stream[:, 1:].contiguous().to(device)
    if not documents:
        return idx, targets, torch.ones_like(idx, dtype=torch.bool), None
    begins = torch.from_numpy(generator.random((B, T)) < 1 / documents)
    doc = begins.cumsum(1).to(device)
    return idx, targets, goldfish_mask(targets), doc


def attended(doc, T):
    """Mean number of positions that a token sees, half of itself left out. doc (B, T) rises along a row, or None."""
    if doc is None:
        return T / 2
    lengths = torch.cat([row.bincount() for row in doc]).double()
    return (lengths**2 / 2).sum().item() / doc.numel()


def contestant(name, config, batch):
    """(model, f() -> its loss of the batch) of ours, hf or hf compile."""
    idx, targets, keep, doc = batch
    if name == "ours":
        model = built(config, compiles())
        model.dtype = work_dtype()
        return model, lambda: model(idx, targets, keep, doc)[1]
    model = hugging_face(built(config))
    labels = targets.masked_fill(~keep, -100).flatten()
    mask = doc if doc is None else (doc[:, :, None] == doc[:, None]).tril()[:, None]      # (B, 1, T, T)

    def loss():
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(idx, attention_mask=mask, use_cache=False).logits
            return F.cross_entropy(logits.float().flatten(0, 1), labels)
    return model, torch.compile(loss) if name == "hf compile" else loss


def gradient_norm(model):
    """L2 norm of all gradients, (), without waiting for the GPU."""
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])


# -----------------------------------------------------------------------------
# the races: each returns {name: row}, and (unit, how many of it a call does, by name)


def train():
    if device == "cpu":
        keep_freed_memory()                                # as train.py does, for all contestants
    config, B, documents = shape()
    batch = make_batch(config, B, documents)
    peers = ("hf compile", "hf") if compiles() else ("hf",)
    steps, norms = {}, {}
    for name in ("ours", *(impls.split(",") if impls else peers)):
        model, loss = contestant(name, config, batch)
        loss().backward()
        norms[name] = gradient_norm(model).item()
        steps[name] = stepper(model, loss)
    agree("norm of the gradient", norms, 2e-2 if dtype == "bfloat16" else 1e-4)
    N = B * config.block_size
    seen = attended(batch[3], config.block_size)
    flops = N * Apertus(config, None).flops_per_token(2 * seen)
    rows = race(steps, dict.fromkeys(steps, flops), gemm_probe())
    return rows, ("tok/s", dict.fromkeys(steps, N))


def stepper(model, loss):
    """f(): forward, backward, clip, update, as a step of train.py."""
    optimizer = AdEMAMix(model.parameters(), lr=1e-5, alpha_warmup=1000, beta3_warmup=1000)

    def step():
        optimizer.zero_grad()
        loss().backward()
        scale = 0.1 / (gradient_norm(model) + 1e-6)
        optimizer.step(grad_scale=scale.clamp(max=1.0))
    return step


def decode():
    # Weights five times as large as in training: no two logits are close, so rounding decides no token.
    config, _, _ = shape(init_std=0.1)
    ours = built(config).to(work_dtype()).eval()
    prompt = make_batch(config, 1, 0)[0][:, :32]
    ways = dict(ours=lambda: generate(ours, prompt, tokens, temperature=0, compile=compiles()))
    theirs = hugging_face(ours).to(work_dtype()).eval()
    ways["hf"] = lambda: theirs.generate(prompt, max_new_tokens=tokens, do_sample=False)
    if dtype == "float32":
        said = ways["ours"]()
        same = {name: (way() == said).sum().item() for name, way in ways.items()}
        agree("tokens that are ours", same, 0)
    # Each token reads all weights but the embedding, of which it reads one row.
    read = sum(p.nbytes for name, p in ours.named_parameters() if config.tie_embeddings or "embed" not in name)
    rows = race(ways, dict.fromkeys(ways, tokens * read), bandwidth_probe(read_only=True))
    return rows, ("tok/s", dict.fromkeys(ways, tokens))


def optim():
    model = built(shape()[0])
    # In fp32: weight, gradient and two or three averages are read, and all but the gradient written.
    moved = dict(ours=36 * model.num_params())
    steps = {}
    for name in ("ours", "AdamW fused"):
        params = [p.detach().clone().requires_grad_() for p in model.parameters()]
        for p in params:
            p.grad = torch.randn_like(p)
        if name == "ours":
            steps[name] = AdEMAMix(params, compile=compiles()).step
        else:
            steps[name] = torch.optim.AdamW(params, weight_decay=0.1, fused=True).step
            moved[name] = 28 * model.num_params()
    rows = race(steps, moved, bandwidth_probe())
    return rows, ("GB/s", {name: amount / 1e9 for name, amount in moved.items()})


# -----------------------------------------------------------------------------
# the command


def circumstances():
    """Where and with what the numbers were taken, and the command that takes them again."""
    describe = ["git", "describe", "--always", "--dirty= + changes"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    machine = f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    return dict(
        date=time.strftime("%Y-%m-%d"),
        command=f"python -m tools.bench {shlex.join(sys.argv[1:])}",
        machine=torch.cuda.get_device_name() if device == "cuda" else machine,
        threads=torch.get_num_threads(),
        clock=clock,
        torch=torch.__version__,
        commit=commit,
    )


def main():
    races = dict(train=train, decode=decode, optim=optim)
    if len(paths) != 1 or paths[0] not in races:
        raise ValueError(f"got {' '.join(paths) or 'nothing'}: want one of {', '.join(races)}, as in "
                         "python -m tools.bench train --preset=cpu")
    resolve_settings()
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    [mode] = paths
    rows, (unit, counts) = races[mode]()
    what = f"{mode}-{preset}-{dtype}"
    print(f"| {what} | {unit} | of what the machine can do | ours is faster (range) |")
    print("|---|---:|---:|---|")
    for name, row in rows.items():
        row[unit] = counts[name] / row["median"]
        middle, low, high = row["ratio"]
        print(f"| {name} | {row[unit]:,.4g} | {row['share']:.0%} | {middle:.2f}x ({low:.2f}-{high:.2f}) |")
    os.makedirs(out, exist_ok=True)
    path = os.path.join(out, f"{what}.json")
    with open(path, "w", encoding="utf-8") as f:
        json.dump(dict(mode=mode, preset=preset, dtype=dtype, **circumstances(), rows=rows), f, indent=1)
    print(f"wrote {path}")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
