"""
Speed: ours against transformers' Apertus and torch's fused AdamW, and as a share of what this machine can do.

    train     a whole step: forward, backward, clipping, update               share of a matrix product's FLOP/s
    decode    greedy generation at batch 1, after a prompt of 32 tokens       share of the weights' bytes / bandwidth
    optim     one update by AdEMAMix, and by AdamW, which moves 28 / 36       share of the bandwidth
              of the bytes

    FLOPs of a step = (6 matrix parameters + 12 L C attended) tokens, where attended is the number of positions that a
    token sees on average. Recomputed and masked pairs do not count (PaLM, arXiv 2204.02311, appendix B).

Two rules make a ratio believable. All contestants compute the same: they have the same weights, and the race ends with
an error unless they have the same gradient, or the same tokens. And all meet the same load: they alternate, A B, B A,
..., the probe of the machine too, and the result is the median of the ratios within a round. The range is its
interval: the smallest and the largest of 7 ratios enclose the true median with 98 % (1 - 2 / 2^7). On a CPU the clock
is this process's own time on one thread, so other processes hardly matter.

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
import shlex
import subprocess
import time

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from ademamix import AdEMAMix
from engine.hardware import can_compile, keep_freed_memory, pick_device
from engine.parallel import Ranks, distribute
from generate import generate
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig
from studies import kit

paths = []                  # train | decode | optim
preset = "auto"             # a row of SHAPES; auto: cpu on a CPU, 1b5 on CUDA, where small ones time kernel launches
impls = "hf compile,hf"     # contestants of `train` next to ours; without a compiler both are eager
device = "auto"             # cuda | cpu
dtype = "auto"              # float32 | bfloat16, of activations and products; auto: bfloat16 on CUDA
rounds = 7                  # rounds that count, after one that does not: the first call compiles
clock = "auto"              # cpu = time of this process, on one thread; wall. auto: cpu on a CPU
threads = 1                 # threads of the CPU; 0 = torch's choice
tokens = 64                 # tokens to generate in `decode`
seed = 28                   # of weights and batches
out = "out/bench"           # folder of the record, MODE-PRESET-DTYPE.json

# documents: their mean length in tokens; 0 = plain causal windows. 8b-stack has eight layers of the 8B, because no GPU
# holds all 32 with their optimizer.
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

# Letters: B batch, T time.


def resolve_settings():
    """Replace "auto" by the values for this device. ValueError, one line, for settings that cannot be measured."""
    global device, preset, dtype, clock
    device = pick_device(device)
    if preset == "auto":
        preset = "cpu" if device == "cpu" else "1b5"
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if clock == "auto":
        clock = "cpu" if device == "cpu" else "wall"
    if preset not in PRESETS:
        raise ValueError(f"preset={preset}: there is {', '.join(PRESETS)}")
    if min(rounds, tokens) < 1:
        raise ValueError(f"rounds={rounds}, tokens={tokens}: want at least 1 of each")
    if clock == "cpu" and (threads != 1 or device != "cpu"):
        raise ValueError(f"threads={threads} device={device}: the CPU clock adds up threads and does not see a GPU: "
                         "take --threads=1 on a CPU, or --clock=wall")


# -----------------------------------------------------------------------------
# a race


def now():
    """Seconds by the chosen clock, after the GPU has finished all queued work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if clock == "cpu" else time.perf_counter()


def race(contestants, work, probe, per):
    """
    Time {name: f()} alternately, together with the probe of the machine. Returns {name: row}.

    work: {name: FLOPs or bytes of a call}; probe: (that of its own call, f()); per: tokens or GB per unit of work.
    A row has the seconds of each round, rate (tokens or GB per second), ratio (the time as a multiple of ours within a
    round: median, smallest, largest) and share (the speed as a share of the probe's), all of medians.
    """
    work["probe"], contestants["probe"] = probe
    seconds = {name: [] for name in contestants}
    for n in tqdm(range(rounds + 1), "rounds", leave=False):
        for name in list(contestants)[::1 if n % 2 else -1]:
            start = now()
            contestants[name]()
            seconds[name].append(now() - start)
    # The first round compiles, and does not count.
    times = {name: np.array(found[1:]) for name, found in seconds.items()}
    speeds = {name: work[name] / np.median(times[name]) for name in contestants}
    best = speeds.pop("probe")
    rows = {}
    for name, speed in speeds.items():
        ratios = times[name] / times["ours"]
        spread = [np.median(ratios), ratios.min(), ratios.max()]
        rows[name] = dict(seconds=times[name].tolist(), rate=speed * per, ratio=spread, share=speed / best)
    return rows


def agree(what, values, tolerance):
    """ValueError unless all of {name: number} lie within a relative tolerance of ours. A NaN never does."""
    ours = values["ours"]
    for name, value in values.items():
        if not abs(value - ours) <= tolerance * abs(ours):
            raise ValueError(f"{what}: {name} has {value:.8g} and ours {ours:.8g}: they do not compute the same, so "
                             "their times mean nothing")


def large():
    """An array of 256 MB (2 GB on a GPU), far larger than any cache."""
    return torch.ones(2**29 if device == "cuda" else 2**26, device=device)


# -----------------------------------------------------------------------------
# models and batches


def built(init_std=0.02):
    """Our model of the preset, the same weights each time, in fp32."""
    with torch.device(device):
        return Apertus(ApertusConfig.from_settings(PRESETS[preset] | dict(init_std=init_std)), seed)


def hugging_face(ours):
    """transformers' ApertusForCausalLM with our weights, in fp32. It has no end-of-text id, so that it never stops."""
    import transformers

    import convert
    transformers.logging.set_verbosity_error()
    values = convert.config_to_hf(ours.config)
    config = transformers.ApertusConfig(**values, attn_implementation="sdpa", pad_token_id=3)
    with torch.device(device):
        theirs = transformers.ApertusForCausalLM(config).float()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    theirs.generation_config.eos_token_id = None
    return theirs


def make_batch():
    """
    idx, targets, keep by Goldfish, ids of documents, each (B, T), and the mask (B, T, T), True where a token sees
    another. In plain windows there are no ids of documents.

    Ids are uniform from 4 on, because transformers gives the padding id 3 no gradient.
    """
    documents, B, T, *_, V, _ = PRESETS[preset].values()
    stream = torch.randint(4, V, (B, T + 1), device=device)
    idx, targets = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
    keep = goldfish_mask(targets.cpu()).to(device)
    mask = torch.ones(B, T, T, dtype=torch.bool, device=device).tril()
    if not documents:
        return idx, targets, keep, None, mask
    doc = (torch.rand(B, T, device=device) < 1 / documents).cumsum(1)
    return idx, targets, keep, doc, mask & (doc[:, :, None] == doc[:, None])


def loss_of(name, model, batch):
    """f() -> the loss of the batch by ours, hf or hf compile."""
    idx, targets, keep, doc, mask = batch
    if name == "ours":
        return lambda: model(idx, targets, keep, doc)[1]
    labels = targets.masked_fill(~keep, -100).flatten()
    seen = None if doc is None else mask[:, None]          # (B, 1, T, T)

    def loss():
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(idx, attention_mask=seen, use_cache=False).logits
            return F.cross_entropy(logits.float().flatten(0, 1), labels)
    return torch.compile(loss) if name == "hf compile" and can_compile(device) else loss


def contestant(name, batch):
    """f() -> norm of the gradient: forward, backward, clip, update, as a step of train.py."""
    model = built()
    if name == "ours":
        model.dtype = getattr(torch, dtype)
        distribute(model, Ranks(), device, compiled=can_compile(device))
    else:
        model = hugging_face(model)
    loss = loss_of(name, model, batch)
    optimizer = AdEMAMix(model.parameters(), 1e-5, alpha_warmup=1000, beta3_warmup=1000)

    def step():
        optimizer.zero_grad()
        loss().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step(grad_scale=(0.1 / (norm + 1e-6)).clamp(max=1.0))
        return norm
    return step


# -----------------------------------------------------------------------------
# the races, each returns the rows of race()


def train():
    if device == "cpu":
        keep_freed_memory()                                # as train.py does, for all contestants
    batch = make_batch()
    steps = {name: contestant(name, batch) for name in ["ours", *impls.split(",")]}
    norms = {name: step().item() for name, step in steps.items()}
    agree("norm of the gradient", norms, 2e-2 if dtype == "bfloat16" else 1e-4)
    tokens = batch[0].numel()
    # Minus 0.5, so that plain windows give T / 2, as in flops_per_token().
    attended = batch[-1].sum().item() / tokens - 0.5
    flops = built().flops_per_token(2 * attended)
    rows, inner = (8192, 8192) if device == "cuda" else (2048, 512)
    # Random numbers, because zeros are faster on a GPU.
    a, b = torch.randn(2, rows, inner, device=device, dtype=getattr(torch, dtype))
    probe = 2 * rows**2 * inner, lambda: a @ b.T
    return race(steps, dict.fromkeys(steps, tokens * flops), probe, 1 / flops)


def decode():
    # Weights five times as large as in training: no two logits are close, so rounding decides no token.
    ours = built(init_std=0.1).to(getattr(torch, dtype)).eval()
    theirs = hugging_face(ours).to(getattr(torch, dtype)).eval()
    prompt = make_batch()[0][:1, :32]
    contestants = dict(
        ours=lambda: generate(ours, prompt, tokens, temperature=0, compile=can_compile(device)),
        hf=lambda: theirs.generate(prompt, max_new_tokens=tokens, do_sample=False))
    if dtype == "float32":
        said = contestants["ours"]()
        agree("tokens that are ours", {name: (run() == said).sum().item() for name, run in contestants.items()}, 0)
    # Each token reads all weights but the embedding, of which it reads one row.
    read = sum(p.nbytes for name, p in ours.named_parameters() if ours.config.tie_embeddings or "embed" not in name)
    x = large()
    return race(contestants, dict.fromkeys(contestants, tokens * read), (x.nbytes, x.sum), 1 / read)


def optim():
    contestants, work = {}, {}
    # In fp32: weight, gradient and two or three averages are read, and all but the gradient written.
    for name, moved in {"ours": 36, "AdamW fused": 28}.items():
        params = list(built().parameters())
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = (AdEMAMix(params, compile=can_compile(device)) if name == "ours" else
                     torch.optim.AdamW(params, weight_decay=0.1, fused=True))
        contestants[name], work[name] = optimizer.step, moved * sum(p.numel() for p in params)
    x = large()
    return race(contestants, work, (2 * x.nbytes, lambda: x.mul_(1.0)), 1e-9)


def main():
    units = dict(train="tok/s", decode="tok/s", optim="GB/s")
    if len(paths) != 1 or paths[0] not in units:
        raise ValueError(f"got {' '.join(paths) or 'nothing'}: want one of {', '.join(units)}, as in "
                         "python -m tools.bench train --preset=cpu")
    if not {*impls.split(",")} <= {"hf", "hf compile"}:
        raise ValueError(f"impls={impls}: there is hf and hf compile")
    resolve_settings()
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    [mode] = paths
    rows = globals()[mode]()
    what = f"{mode}-{preset}-{dtype}"
    print(f"| {what} | {units[mode]} | of what the machine can do | ours is faster (range) |\n|---|---:|---:|---|")
    for name, row in rows.items():
        middle, low, high = row["ratio"]
        print(f"| {name} | {row['rate']:,.4g} | {row['share']:.0%} | {middle:.2f}x ({low:.2f}-{high:.2f}) |")

    record = dict(
        date=time.strftime("%Y-%m-%d"),
        command=f"python -m tools.bench {shlex.join(sys.argv[1:])}",
        machine=torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability(),
        torch=torch.__version__,
        commit=subprocess.getoutput("git describe --always --dirty 2>/dev/null"),
        rows=rows)
    kit.write(f"{out}/{what}.json", json.dumps(record, indent=1))
    print(f"wrote {out}/{what}.json")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
