"""
Ways to the same numbers, to rounding: one CPU wants this and another that. They are timed, once.

    products     who multiplies fp32 matrices: the library that "torch" takes by itself (MKL if it has it), or "onednn"
    attention    by its "formula"; by torch's "kernel"; "wide": by it in fp32, though q is bf16
    rows         how many rows of logits the loss holds at a time
    decoding     one row times a matrix, compiled: as fused "sums", or by the "library", large matrices by columns

What a way is stands in engine/hardware.py, engine/attention.py and model.py; here they race, in turns, forward and
backward, at the shapes of the run. The winner is kept in the user's cache by CPU, version of torch, threads and shape,
and in the run's config.json, so that the run repeats its bits wherever it is resumed. --routes=products=onednn,rows=256
says so instead.

A way must be faster by a twentieth to be taken in the place of the usual one: who is ahead by less changes with the
load.
"""

import functools
import itertools
import json
import math
import os
import platform
import sys
import time

import torch
import torch.nn.functional as F

import model
from engine.files import write_flushed
from engine.hardware import ROUTES, Routes, linear, onednn_linear

WORTH = 3e12                # FLOPs: a run of fewer is over before the timing has paid
CLEARLY = 0.95              # of the usual way's time
CHOICES = dict(
    products=("torch", "onednn"),
    attention=("auto", "formula", "kernel", "wide"),
    decoding=("sums", "library"))


# -----------------------------------------------------------------------------
# what is said, and what is remembered


def parse(text):
    """
    {name: way} of "products=onednn,rows=256". ValueError for what is none.
    """
    said = {}
    for part in filter(None, text.split(",")):
        name, _, way = part.partition("=")
        if name == "rows" and way.isdecimal():
            said[name] = int(way)
        elif way in CHOICES.get(name, ()):
            said[name] = way
        else:
            there = "; ".join(f"{name}={'|'.join(ways)}" for name, ways in CHOICES.items())
            raise ValueError(f"routes={text!r}: {part!r} is none of {there}; rows=NUMBER, with commas between them")
    if said.get("products") == "onednn" and not torch.backends.mkldnn.is_available():
        raise ValueError(f"routes={text!r}: this build of torch has no oneDNN: say --routes=products=torch")
    return said


def written(ways):
    """The text that parse() reads."""
    return ",".join(f"{name}={way}" for name, way in ways.items())


def take(ways):
    """From here on these ways are taken; what is not among them is the usual."""
    for name, way in (vars(Routes()) | ways).items():
        setattr(ROUTES, name, way)


def cpu_name():
    """What the system calls this CPU; its architecture where it says nothing."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            of_first, *_ = f.read().split("\n\n")
    except OSError:
        of_first = ""
    said = {}
    for line in of_first.splitlines():
        name, _, value = line.partition(":")
        said[name.strip()] = value.strip()
    parts = [said[name] for name in ("model name", "cpu family", "model", "stepping") if name in said]
    return " ".join(parts) or platform.processor() or platform.machine()


def cache_file():
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "nanoapertus", "routes.json")


def remembered():
    """{key: way} of this user's earlier races; {} if there are none, or the file is no such."""
    try:
        with open(cache_file(), encoding="utf-8") as f:
            found = json.load(f)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(key, way):
    """A cache that cannot be written is none, and no reason to stop."""
    try:
        os.makedirs(os.path.dirname(cache_file()), exist_ok=True)
        write_flushed(cache_file(), json.dumps(remembered() | {key: way}, indent=1))
    except OSError:
        pass


# -----------------------------------------------------------------------------
# the race


def seconds_of(contestants, limit=1.0):
    """
    {way: seconds of a call, the least of several rounds in turns}, for about `limit` seconds, and two rounds at least.
    Short calls are repeated within a round: 2 ms are the least that a clock can be trusted with.
    """
    calls, least = {}, dict.fromkeys(contestants, math.inf)
    for way, call in contestants.items():
        call()                                             # compiles, or fills its buffers
        began = time.perf_counter()
        call()
        calls[way] = 1 + int(0.002 / (time.perf_counter() - began))
    start = time.perf_counter()
    for n in itertools.count(1):
        for way, call in contestants.items():
            began = time.perf_counter()
            for _ in range(calls[way]):
                call()
            least[way] = min(least[way], (time.perf_counter() - began) / calls[way])
        if n >= 2 and time.perf_counter() - start > limit:
            return least


def fastest(name, shape, contestants):
    """
    The way that is clearly faster than the first of {way: call}, else that one; remembered if it was timed before.

    name, shape: what is timed, and with how many of what.
    """
    key = " | ".join([cpu_name(), torch.__version__, f"{torch.get_num_threads()} threads", name, shape])
    known = remembered().get(key)
    if known in contestants:
        return known
    seconds = seconds_of(contestants)
    usual, *_ = contestants
    best = min(seconds, key=seconds.get)
    if seconds[best] > CLEARLY * seconds[usual]:
        best = usual
    times = ", ".join(f"{way} {1000 * s:.2f} ms" for way, s in seconds.items())
    print(f"timed once on this CPU, {name}: {times} for {shape}; taken: {best}", file=sys.stderr)
    remember(key, best)
    return best


def numbers(*shape, dtype=torch.float32):
    """The same normal numbers for the same shape, with a gradient."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return values.to(dtype).requires_grad_()


def there_and_back(function, inputs):
    """A call of function(*inputs) and of its gradients. function returns a tensor; of ones is the gradient of it."""
    inside = [x for x in inputs if x is not None and x.requires_grad]

    def call():
        y = function(*inputs)
        return torch.autograd.grad(y, inside, torch.ones_like(y))
    return call


def race_products(rows, n_in, n_out):
    """Who multiplies fp32 matrices (rows, n_in) and (n_out, n_in).T; of so few rows that it has 17 GFLOPs at most."""
    rows = min(rows, max(1, 2**33 // (n_in * n_out)))
    inputs = numbers(rows, n_in), numbers(n_out, n_in)
    contestants = dict(torch=there_and_back(torch.nn.functional.linear, inputs))
    if torch.backends.mkldnn.is_available():
        contestants["onednn"] = there_and_back(onednn_linear, inputs)
    return fastest("products", f"{rows} x {n_in} x {n_out}", contestants)


def race_attention(B, shape, dtype, doc):
    """How B windows of this shape attend in training, inside documents if doc (B, T) says which."""
    T, D = shape.block_size, shape.head_dim
    q = numbers(B, shape.n_head, T, D, dtype=dtype)
    k = numbers(B, shape.n_kv_head, T, D, dtype=dtype)
    usual = model.way_on_cpu(q, doc is not None)
    others = dict.fromkeys(("formula", "kernel", "wide"))
    if dtype != torch.bfloat16:
        del others["wide" if usual == "kernel" else "kernel"]           # they are one
    if T > 1024:
        del others["formula"]                              # model.way_on_cpu does not take it
    contestants = {}
    for way in dict.fromkeys((usual, *others)):
        f = functools.partial(model.causal_attention, way=way)
        contestants[way] = there_and_back(f, (q, k, k, doc))
    what = f"{B} x {shape.n_head} / {shape.n_kv_head} x {T} x {D} in {str(dtype)[6:]}"
    if doc is not None:
        borders = (doc[:, 1:] != doc[:, :-1]).sum().item()
        length = B * T / (B + borders)
        what += f", documents of about {2 ** round(math.log2(length))}"
    return fastest("attention", what, contestants)


def race_rows(N, shape, dtype):
    """How many rows of logits at a time, of N: as many as usual, half of that, twice and four times as many."""
    usual = model.chunk_rows(shape.vocab_size, "cpu")
    N = min(N, 4 * usual)
    # Seconds a call: the head of a published model.
    if shape.vocab_size * shape.n_embd > 2**26:
        return min(usual, N)
    h = numbers(N, shape.n_embd, dtype=dtype)
    head = numbers(shape.vocab_size, shape.n_embd)
    targets = torch.arange(N) % shape.vocab_size
    weights = torch.full((N,), 1 / N)
    chunk_loss = torch.compile(model.chunk_loss, dynamic=True)

    def loss(h, head, rows):
        return model.ChunkedCrossEntropy.apply(h, head, targets, weights, rows, chunk_loss)[0]

    contestants = {}
    for rows in (usual, usual // 2, usual * 2, usual * 4):
        if 64 <= rows <= N:
            f = functools.partial(loss, rows=rows)
            contestants[rows] = there_and_back(f, (h, head))
    if len(contestants) < 2:
        return min(usual, N)
    return fastest("rows", f"{N} x {shape.n_embd} x {shape.vocab_size} in {str(dtype)[6:]}", contestants)


@torch.no_grad()
def race_decoding(shape, dtype):
    """
    How compiled decoding multiplies one row: by the matrices of feed-forward layers, more than a cache holds. Each
    reads what the one before has written, as in a model: products of the same row would become one loop.
    """
    n_in, n_out = shape.n_embd, shape.ffn_width
    pairs = 1 + int(64e6 / (8 * n_in * n_out))
    wide = [torch.full((n_out, n_in), 1 / n_in, dtype=dtype) for _ in range(pairs)]
    narrow = [torch.full((n_in, n_out), 1 / n_out, dtype=dtype) for _ in range(pairs)]
    by_columns = [w.T.contiguous().T for w in wide] if dtype == torch.float32 else wide
    x = torch.ones(1, n_in, dtype=dtype)

    def chain(multiply, wide):
        y = x
        for up, down in zip(wide, narrow):
            y = multiply(multiply(y, up), down)
        return y

    sums = torch.compile(functools.partial(chain, linear), dynamic=False)
    before, ROUTES.decoding = ROUTES.decoding, "sums"
    contestants = dict(sums=lambda: sums(wide), library=lambda: chain(F.linear, by_columns))
    best = fastest("decoding", f"1 x {n_in} x {n_out} x {n_in} in {str(dtype)[6:]}", contestants)
    ROUTES.decoding = before
    return best


# -----------------------------------------------------------------------------
# the ways of a run


def race_all(shape, rows, dtype, doc, compiled):
    """{name: way}: the fastest for micro-batches of so many windows of this shape, doc (rows, T) or None."""
    N = rows * shape.block_size
    ways = {}
    if dtype == torch.float32:
        ways["products"] = race_products(N, shape.n_embd, shape.ffn_width)
        take(ways)                                         # the others multiply as the run will
    ways["attention"] = race_attention(rows, shape, dtype, doc)
    if compiled:
        ways["rows"] = race_rows(N, shape, dtype)
        # torch.compile remembers that the loss had several shapes, and would compile the run's for any: not the bits of
        # a run that finds the answer in the cache.
        torch.compiler.reset()
    return ways


def shared(ways, ranks):
    """The first rank's ways, on all ranks."""
    ways = vars(Routes()) | ways
    numbers = [CHOICES[name].index(way) if name in CHOICES else way for name, way in ways.items()]
    if not ranks.first:
        numbers = [0] * len(numbers)
    numbers = map(int, ranks.add(*numbers))
    return {name: CHOICES[name][n] if name in CHOICES else n for name, n in zip(ways, numbers)}


def take_products(model):
    """For a model that is only asked, of at least 20 million parameters in fp32: who multiplies its matrices."""
    weight = model.lm_head.weight
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and model.num_params() >= 20e6:
        take(dict(products=race_products(512, model.config.n_embd, model.config.ffn_width)))


def choose(said, before, flops, ranks, device, shapes):
    """
    Take the ways of a run, and return them as the text that parse() reads; "" on another device than a CPU.

    said: what --routes says; before: what the run had taken when it was saved; without either they are timed, if the
    run has so many `flops` that it pays. In exact mode, and where ranks share windows, they are the usual ones.
    shapes: a function that returns the arguments of race_all. ValueError: `said` says nothing that there is.
    """
    if device != "cpu":
        return ""
    ways = parse(said or before)
    timed = not ways and flops >= WORTH and not ranks.exact and not ranks.split
    if timed and ranks.first:
        ways = race_all(*shapes())
    ways = shared(ways, ranks)
    take(ways)
    return written(ways)
