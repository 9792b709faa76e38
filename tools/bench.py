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
$ python -m tools.bench train --impls=none              # ours alone, without transformers
"""

import sys

if __name__ == "__main__" and not __package__:
    print("bench.py: start it from the project's root, python -m tools.bench", file=sys.stderr)
    sys.exit(2)

import json
import shlex
import subprocess
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from ademamix import AdEMAMix
from engine.files import make_folder, write_flushed
from engine.hardware import can_compile, keep_freed_memory, pick_device
from engine.parallel import compile_model
from generate import generate
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig

paths = []                  # train | decode | optim
preset = "auto"             # a row of PRESETS; auto: cpu on a CPU, 1b5-stack on CUDA, where small ones time launches
impls = "hf compile,hf"     # contestants of `train` next to ours; without a compiler both are eager. none = ours alone
device = "auto"             # cuda | cpu
dtype = "auto"              # float32 | bfloat16, of activations and products; auto: bfloat16 on CUDA
rounds = 7                  # rounds that count, after one that does not: the first call compiles
clock = "auto"              # cpu = time of this process, on one thread; wall. auto: cpu on a CPU
threads = 1                 # threads of the CPU; 0 = torch's choice
tokens = 64                 # tokens to generate in `decode`
seed = 28                   # of weights and batches
out = "out/bench"           # folder of the record, MODE-PRESET-DTYPE.json


class Shape(NamedTuple):
    """A batch and a model."""
    documents: int            # mean length of documents in tokens; 0 = plain causal windows
    batch: int
    block_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    ffn_dim: int
    vocab_size: int
    tie_embeddings: bool = False


# 1b5-stack has 12 of the 16 layers of the 1.5B: with one optimizer, 25 GB, transformers' eager step takes about 70 GB.
# 8b-stack has eight layers of the 8B, because no GPU holds all 32 with their optimizer.
PRESETS = {
    "cpu":       Shape(0, 4, 512, 6, 6, 2, 384, 2048, 16384),
    "packed":    Shape(100, 4, 512, 6, 6, 2, 384, 2048, 16384),
    "laptop":    Shape(0, 4, 256, 2, 2, 1, 128, 672, 4096, tie_embeddings=True),
    "124m":      Shape(0, 16, 1024, 12, 12, 4, 768, 3584, 50304, tie_embeddings=True),
    "1b5-stack": Shape(1000, 2, 4096, 12, 32, 8, 2048, 12288, 131072),
    "8b-stack":  Shape(1000, 2, 4096, 8, 32, 8, 4096, 21504, 131072),
    "tiny":      Shape(20, 2, 64, 2, 4, 2, 64, 160, 320),
}


class Setup(NamedTuple):
    """What all contestants of a race have in common."""
    shape: Shape
    device: str
    dtype: torch.dtype
    seed: int


class Race(NamedTuple):
    """Contestants that compute the same, {name: f()}, and the probe of the machine, another f()."""
    contestants: dict
    work: dict                # {name: FLOPs or bytes of a call}
    probe: object
    probe_work: float         # FLOPs or bytes of a call of the probe
    per: float                # tokens or GB per unit of work
    unit: str


# Letters: B batch, T time.


# -----------------------------------------------------------------------------
# a race


def make_clock(clock, device):
    """A function that returns seconds by the chosen clock, after the GPU has finished all queued work."""
    seconds = time.process_time if clock == "cpu" else time.perf_counter

    def now():
        if device == "cuda":
            torch.cuda.synchronize()
        return seconds()
    return now


def run_race(race, rounds, now):
    """
    Time the contestants alternately, together with the probe. Returns {name: row}. now(): seconds.

    A row has the seconds of each round, rate (tokens or GB per second), ratio (the time as a multiple of ours within a
    round: median, smallest, largest) and share (the speed as a share of the probe's), all of medians.
    """
    contestants = race.contestants | dict(probe=race.probe)
    seconds = {name: [] for name in contestants}
    for n in tqdm(range(rounds + 1), "rounds", leave=False):
        for name in list(contestants)[::1 if n % 2 else -1]:
            start = now()
            contestants[name]()
            seconds[name].append(now() - start)
    # The first round compiles, and does not count.
    times = {name: np.array(values[1:]) for name, values in seconds.items()}
    best = race.probe_work / np.median(times["probe"])
    rows = {}
    for name in race.contestants:
        ratios = times[name] / times["ours"]
        speed = race.work[name] / np.median(times[name])
        rows[name] = dict(
            seconds=times[name].tolist(), rate=speed * race.per,
            ratio=[np.median(ratios), ratios.min(), ratios.max()], share=speed / best)
    return rows


def check_equal(quantity, values, tolerance):
    """ValueError unless all of {name: number} lie within a relative tolerance of ours. A NaN never does."""
    ours = values["ours"]
    for name, value in values.items():
        if not abs(value - ours) <= tolerance * abs(ours):
            raise ValueError(f"{quantity}: {name} has {value:.8g} and ours {ours:.8g}: they do not compute the same, "
                             "so their times mean nothing")


# -----------------------------------------------------------------------------
# models and batches


def build_model(setup, init_std=0.02):
    """Our model, the same weights each time, in fp32."""
    with torch.device(setup.device):
        return Apertus(ApertusConfig.from_settings(setup.shape._asdict() | dict(init_std=init_std)), setup.seed)


def to_hugging_face(ours, device):
    """
    transformers' ApertusForCausalLM, whose parameters are those of ours, so that memory holds them and their gradients
    once. It has no end-of-text id, so that it never stops.
    """
    import transformers

    from weights.config import config_to_hf
    transformers.logging.set_verbosity_error()
    values = config_to_hf(ours.config)
    config = transformers.ApertusConfig(**values, attn_implementation="sdpa", pad_token_id=3)
    with torch.device(device):
        theirs = transformers.ApertusForCausalLM(config).float()
    theirs.load_state_dict(ours.state_dict(keep_vars=True), strict=False, assign=True)
    theirs.generation_config.eos_token_id = None
    return theirs


def make_batch(shape, device):
    """
    idx, targets, keep by Goldfish, ids of documents, each (B, T), and the mask (B, T, T), True where a token sees
    another. In plain windows there are no ids of documents.

    Ids are uniform from 4 on, because transformers gives the padding id 3 no gradient.
    """
    B, T = shape.batch, shape.block_size
    stream = torch.randint(4, shape.vocab_size, (B, T + 1), device=device)
    idx, targets = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
    keep = goldfish_mask(targets.cpu()).to(device)
    mask = torch.ones(B, T, T, dtype=torch.bool, device=device).tril()
    if not shape.documents:
        return idx, targets, keep, None, mask
    doc = (torch.rand(B, T, device=device) < 1 / shape.documents).cumsum(1)
    return idx, targets, keep, doc, mask & (doc[:, :, None] == doc[:, None])


def make_loss(name, model, batch, setup):
    """f() -> the loss of the batch by ours, hf or hf compile."""
    idx, targets, keep, doc, mask = batch
    if name == "ours":
        return lambda: model.loss(idx, targets, keep, doc)
    labels = targets.masked_fill(~keep, -100).flatten()
    visible = None if doc is None else mask[:, None]       # (B, 1, T, T)

    def loss():
        with torch.autocast(setup.device, torch.bfloat16, enabled=setup.dtype == torch.bfloat16):
            logits = model(idx, attention_mask=visible, use_cache=False).logits
            return F.cross_entropy(logits.float().flatten(0, 1), labels)
    return torch.compile(loss) if name == "hf compile" and can_compile(setup.device) else loss


def make_step(name, ours, optimizer, batch, setup):
    """
    f() -> norm of the gradient: forward, backward, clip, update, as a step of train.py; f(update=False): no update. All
    contestants update the weights of ours, with its optimizer: two copies of it would not fit in 80 GB.
    """
    model = ours if name == "ours" else to_hugging_face(ours, setup.device)
    loss = make_loss(name, model, batch, setup)

    def step(update=True):
        optimizer.zero_grad()
        loss().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()])
        if update:
            optimizer.step(grad_scale=(0.1 / (norm + 1e-6)).clamp(max=1.0))
        return norm
    return step


def large_array(device):
    """An array of 256 MB (2 GB on a GPU), far larger than any cache."""
    return torch.ones(2**29 if device == "cuda" else 2**26, device=device)


# -----------------------------------------------------------------------------
# the races


def train_race(setup, impls):
    """Whole steps of training, by ours and by impls; the probe is a product of two matrices."""
    device = setup.device
    if device == "cpu":
        keep_freed_memory()                                # as train.py does, for all contestants
    batch = make_batch(setup.shape, device)
    ours = build_model(setup)
    ours.dtype = setup.dtype
    compile_model(ours, compiled=can_compile(device))
    optimizer = AdEMAMix(ours.parameters(), 1e-5, alpha_warmup=1000, beta3_warmup=1000)
    steps = {name: make_step(name, ours, optimizer, batch, setup) for name in ["ours", *impls]}
    norms = {name: step(update=False).item() for name, step in steps.items()}
    check_equal("norm of the gradient", norms, 2e-2 if setup.dtype == torch.bfloat16 else 1e-4)
    n_tokens = batch[0].numel()
    # Minus 0.5, so that plain windows give T / 2, as in flops_per_token().
    attended = batch[-1].sum().item() / n_tokens - 0.5
    flops = ours.flops_per_token(2 * attended)
    rows, inner = (8192, 8192) if device == "cuda" else (2048, 512)
    # Random numbers, because zeros are faster on a GPU.
    a, b = torch.randn(2, rows, inner, device=device, dtype=setup.dtype)
    return Race(steps, dict.fromkeys(steps, n_tokens * flops), lambda: a @ b.T, 2 * rows**2 * inner, 1 / flops, "tok/s")


def decode_race(setup, n_tokens):
    """Greedy generation of n_tokens by ours and by transformers; the probe reads an array."""
    # Weights five times as large as in training: no two logits are close, so rounding decides no token.
    ours = build_model(setup, init_std=0.1).to(setup.dtype).eval()
    theirs = to_hugging_face(ours, setup.device).to(setup.dtype).eval()
    prompt = make_batch(setup.shape, setup.device)[0][:1, :32]
    contestants = dict(
        ours=lambda: generate(ours, prompt, n_tokens, temperature=0, compile=can_compile(setup.device)),
        hf=lambda: theirs.generate(prompt, max_new_tokens=n_tokens, do_sample=False))
    if setup.dtype == torch.float32:
        text = contestants["ours"]()
        equal = {name: (decode() == text).sum().item() for name, decode in contestants.items()}
        check_equal("tokens that are ours", equal, 0)
    # Each token reads all weights but the embedding, of which it reads one row.
    read = sum(p.nbytes for name, p in ours.named_parameters() if ours.config.tie_embeddings or "embed" not in name)
    # As large as the weights, so that caches help both, and read at four places at once, as engine/decoding.py does.
    x = torch.ones(4, read // 16, device=setup.device)
    probe = torch.compile(sum_of_rows) if can_compile(setup.device) else sum_of_rows
    return Race(contestants, dict.fromkeys(contestants, n_tokens * read), lambda: probe(x), x.nbytes, 1 / read, "tok/s")


def sum_of_rows(x):
    """The sum of four rows, (). Compiled, it reads all four at once."""
    a, b, c, d = x
    return (a + b + c + d).sum()


def optim_race(setup):
    """One update by AdEMAMix and by torch's fused AdamW; the probe reads and writes an array."""
    params = list(build_model(setup).parameters())
    for p in params:
        p.grad = torch.randn_like(p)
    contestants = {
        "ours": AdEMAMix(params, compile=can_compile(setup.device)).step,
        "AdamW fused": torch.optim.AdamW(params, weight_decay=0.1, fused=True).step}
    # In fp32: weight, gradient and two or three averages are read, and all but the gradient written.
    size = sum(p.numel() for p in params)
    work = {"ours": 36 * size, "AdamW fused": 28 * size}
    x = large_array(setup.device)
    return Race(contestants, work, lambda: x.mul_(1.0), 2 * x.nbytes, 1e-9, "GB/s")


# -----------------------------------------------------------------------------
# from the settings to the record


def check_bench(device, preset, clock):
    """ValueError, one line, for settings that cannot be measured. device, preset, clock: without "auto"."""
    if len(paths) != 1 or paths[0] not in ("train", "decode", "optim"):
        raise ValueError(f"got {' '.join(paths) or 'nothing'}: want one of train, decode, optim, as in "
                         "python -m tools.bench train --preset=cpu")
    if impls != "none" and not {*impls.split(",")} <= {"hf", "hf compile"}:
        raise ValueError(f"impls={impls}: there is hf and hf compile, or none")
    if preset not in PRESETS:
        raise ValueError(f"preset={preset}: there is {', '.join(PRESETS)}")
    if min(rounds, tokens) < 1:
        raise ValueError(f"rounds={rounds}, tokens={tokens}: want at least 1 of each")
    if clock == "cpu" and (threads != 1 or device != "cpu"):
        raise ValueError(f"threads={threads} device={device}: the CPU clock adds up threads and does not see a GPU: "
                         "take --threads=1 on a CPU, or --clock=wall")


def print_rows(title, unit, rows):
    print(f"| {title} | {unit} | of the machine's limit | ours is faster (range) |\n|---|---:|---:|---|")
    for name, row in rows.items():
        middle, low, high = row["ratio"]
        print(f"| {name} | {row['rate']:,.4g} | {row['share']:.0%} | {middle:.2f}x ({low:.2f}-{high:.2f}) |")


def write_record(path, device, rows):
    record = dict(
        date=time.strftime("%Y-%m-%d"),
        command=f"python -m tools.bench {shlex.join(sys.argv[1:])}",
        machine=torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability(),
        torch=torch.__version__,
        commit=subprocess.getoutput("git describe --always --dirty 2>/dev/null"),
        rows=rows)
    make_folder(out)
    write_flushed(path, json.dumps(record, indent=1))
    print(f"wrote {path}")


def main():
    # The meaning of "auto" on this machine.
    used_device = pick_device(device)
    on_cpu = used_device == "cpu"
    used_preset = ("cpu" if on_cpu else "1b5-stack") if preset == "auto" else preset
    used_dtype = ("float32" if on_cpu else "bfloat16") if dtype == "auto" else dtype
    used_clock = ("cpu" if on_cpu else "wall") if clock == "auto" else clock
    check_bench(used_device, used_preset, used_clock)
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    setup = Setup(PRESETS[used_preset], used_device, getattr(torch, used_dtype), seed)
    [mode] = paths
    if mode == "train":
        race = train_race(setup, [] if impls == "none" else impls.split(","))
    elif mode == "decode":
        race = decode_race(setup, tokens)
    else:
        race = optim_race(setup)
    rows = run_race(race, rounds, make_clock(used_clock, used_device))
    title = f"{mode}-{used_preset}-{used_dtype}"
    print_rows(title, race.unit, rows)
    write_record(f"{out}/{title}.json", used_device, rows)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
