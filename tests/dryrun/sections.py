"""
The sections of the dry run: what is done on the device that phantom.c pretends, and what of it can be known.

Each section runs in a process of its own, which dryrun.py starts, and returns (facts, what is wrong). Kernels are
compiled and not run, so no number means anything. Where a script would stop for that reason, `unreal` says what it is
told instead; all else is the script's own main(), with its own flags.
"""

import contextlib
import ctypes
import glob
import json
import math
import os
import re
import sys
import time
import warnings
from collections import Counter

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, ROOT)

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.optim.optimizer import register_optimizer_step_post_hook

import convert
import model as models
import tokenizer
from ademamix import AdEMAMix
from configurator import configure
from engine import checkpoint, parallel
from model import Apertus, ApertusConfig
from tools.plan import published

GIB = 2**30
# The layers of the 8B.
WIDE = dict(vocab_size=131072, n_embd=4096, n_head=32, n_kv_head=8, ffn_dim=21504)


# -----------------------------------------------------------------------------
# what can be observed


def seen(name):
    """One of phantom.c's counts."""
    return ctypes.c_ulonglong.in_dll(ctypes.CDLL("libcuda.so.1"), f"phantom_{name}").value


def counts():
    """What has been done so far: graphs that were compiled, and the calls of the device."""
    found = {name: seen(name) for name in ("launches", "triton", "products", "collectives", "syncs", "replays")}
    return Counter(found, graphs=counters["stats"]["unique_graphs"])


def since(before):
    """{what: how often} from then on."""
    now = counts()
    return {name: now[name] - before[name] for name in now}


def memory():
    """GiB at the peak: of torch's allocator, and of the device, where the allocator's gaps count as well."""
    allocated = torch.cuda.max_memory_allocated() / GIB
    return dict(gib=round(allocated, 2), device_gib=round(seen("peak") / GIB, 2))


def breaks():
    """[a line about graph breaks], [] without any."""
    found = counters["graph_break"]
    return [f"graph breaks: {', '.join(found)}"[:300]] if found else []


KERNELS = {}                # {name: {its configuration: (registers, bytes of stack, bytes of shared memory)}}


def note_kernels():
    """Have Inductor tell of every kernel that it has compiled and loaded."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    make = CachingAutotuner._make_launchers

    def make_launchers(self):
        make(self)
        for one in self.launchers:
            name = getattr(self.fn, "__name__", "?")
            KERNELS.setdefault(name, {})[str(one.config)] = one.n_regs, 4 * (one.n_spills or 0), one.shared
    CachingAutotuner._make_launchers = make_launchers


def kernels():
    """How many were compiled, the most registers of any, and those that keep registers in memory, by name."""
    # Of the configurations of a kernel, that with the smallest stack: tuning would take the fastest.
    best = {name: min(found.values(), key=lambda numbers: numbers[1]) for name, found in KERNELS.items()}
    spilled = {name[:60]: stack for name, (_, stack, _) in best.items() if stack}
    most = max((registers for registers, _, _ in best.values()), default=0)
    return dict(kernels=len(best), registers=most, stack=spilled)


def waits():
    """A list that names the line of each wait for the device from now on, as file:line."""
    found = []

    def note(message, category, filename, lineno, *_):
        if "synchroniz" in str(message):
            found.append(f"{os.path.relpath(filename, ROOT)}:{lineno}")
    warnings.simplefilter("always")
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")
    return found


# -----------------------------------------------------------------------------
# a model without memory, and its batches


def undrawn(n_layer=2, block_size=4096, recompute="none", compiled=True):
    """So many layers of the 8B on the device; the weights are whatever memory holds."""
    no_drawing()
    with torch.device("cuda"):
        model = Apertus(ApertusConfig(**WIDE, n_layer=n_layer, block_size=block_size))
    model.dtype = torch.bfloat16
    parallel.recompute_activations(model, recompute)
    if compiled:
        model.compile_blocks()
    return model


def no_drawing():
    models.draw = lambda name, shape, config, seed: torch.zeros(())


def batch(n, rows, T):
    """idx, targets, keep and doc of batch n, (rows, T) each, as train.py moves them; documents of some 1,000 tokens."""
    rng = torch.Generator().manual_seed(n)
    stream = torch.randint(0, WIDE["vocab_size"], (rows, T + 1), generator=rng)
    doc = (torch.rand(rows, T, generator=rng) < 1e-3).cumsum(1)
    keep = torch.rand(rows, T, generator=rng) > 0.02
    return [t.to("cuda", non_blocking=True) for t in (stream[:, :-1], stream[:, 1:], keep, doc)]


def train_on(model, n, rows=1, T=4096):
    """Forward and backward of batch n: {what the device saw: how often}."""
    before = counts()
    loss = model(*batch(n, rows, T), n_tokens=1.0)[1]
    loss.backward()
    model.zero_grad()
    return since(before)


# -----------------------------------------------------------------------------
# the parts


def attention():
    """Whom scaled_dot_product_attention asks, for the calls that the project makes."""
    kernels_of_torch = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}

    def made(H, T, dtype=torch.bfloat16):
        return torch.empty(1, H, T, 128, device="cuda", dtype=dtype)

    def asked(q, k, **how):
        choice = torch._fused_sdp_choice(q, k, k, enable_gqa=q.shape[1] != k.shape[1], **how)
        return kernels_of_torch[choice]

    mask = torch.ones(1, 1, 512, 512, device="cuda", dtype=torch.bool)
    fp32 = torch.float32
    facts = {
        "causal, bf16": asked(made(32, 512), made(8, 512), is_causal=True),
        "causal, fp32": asked(made(32, 512, fp32), made(8, 512, fp32), is_causal=True),
        "causal, fp32, a kv head for each": asked(made(32, 512, fp32), made(32, 512, fp32), is_causal=True),
        "a prompt with a mask, bf16": asked(made(32, 512), made(8, 512), attn_mask=mask),
        "one token with a mask, bf16": asked(made(32, 1), made(8, 512), attn_mask=mask[:, :, :1]),
    }
    wrong = []
    if "cuDNN" in facts.values():
        wrong.append("cuDNN is asked, which makes a plan for each new length")
    return facts, wrong


def blocks(mode):
    """Two layers of the 8B and the loss: graphs, kernels, and whether other documents compile or wait."""
    model = undrawn(recompute=mode)
    facts = dict(graphs=train_on(model, 0)["graphs"])
    compiled = any("rms_norm" in name for name in KERNELS)
    wrong = [] if compiled else ["the blocks run eagerly: no kernel of theirs was compiled"]
    for n in (1, 2):
        did = train_on(model, n)
        facts |= {name: did[name] for name in ("launches", "triton", "products")}
        if did["graphs"]:
            wrong.append(f"{did['graphs']} graphs more for other documents")
        if did["syncs"]:
            wrong.append(f"forward and backward wait {did['syncs']} times")
    return facts | kernels() | memory(), wrong + breaks()


def sizes():
    """What is compiled again for another micro-batch and another length, also of no multiple of 128."""
    model = undrawn()
    train_on(model, 0)
    facts = {}
    for rows, T in ((2, 4096), (3, 4096), (1, 1000), (1, 1100), (1, 4096)):
        facts[f"graphs for {rows} x {T}"] = train_on(model, 1, rows, T)["graphs"]
    wrong = []
    for rows, T in ((4, 4096), (1, 1200)):
        if again := train_on(model, 2, rows, T)["graphs"]:
            wrong.append(f"{again} graphs more for {rows} x {T}, after sizes on both sides of it")
    return facts, wrong + breaks()


def optimizer(states):
    """AdEMAMix over tensors of other sizes: graphs, waits, and how many bytes a load takes."""
    shapes = (131072, 4096), (4096, 4096), (1024, 4096), (21504, 4096), (4096, 21504), (4096,), (128,), (1,)
    params = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
    opt = AdEMAMix(params, state_dtype=getattr(torch, states), alpha_warmup=10, beta3_warmup=10, compile=True)
    wrong = []
    for step in range(4):
        for p in params:
            p.grad = torch.empty_like(p)
        before = counts()
        opt.param_groups[0]["lr"] = 1e-3 * (step + 1)
        opt.step(grad_scale=1 / (step + 1))
        did = since(before)
        if did["graphs"] and step:
            wrong.append(f"{did['graphs']} graphs more in step {step + 1}")
    if did["syncs"]:
        wrong.append(f"the update waits {did['syncs']} times")
    loads = loads_in(os.environ["TRITON_CACHE_DIR"])
    if not any(load.startswith("v4") for load in loads):
        wrong.append("no load takes 16 bytes")
    return dict(triton=did["triton"], launches=did["launches"], loads=" ".join(sorted(loads))) | kernels(), wrong


def loads_in(folder):
    """The kinds of loads from the device's memory in all PTX of a folder, like v4.b32, 16 bytes at once."""
    found = set()
    for path in glob.glob(f"{folder}/*/*.ptx"):
        with open(path, encoding="utf-8") as file:
            found.update(re.findall(r"ld\.global\S*?((?:\.v\d)?\.b\d+) ", file.read()))
    return {load.lstrip(".") for load in found}


def decode():
    """The compiled step of generate(): one graph for every prompt, replayed as a CUDA graph for each token."""
    from generate import generate
    model = undrawn(n_layer=4, compiled=False).bfloat16().eval()
    model.dtype = None
    facts, wrong = {}, []
    for i, (prompt, n) in enumerate((([5, 6, 7], 24), ([9] * 40, 30), ([9], 200))):
        before, began = counts(), time.perf_counter()
        generate(model, [prompt], n, temperature=0, compile=True)
        did = since(before)
        facts[f"{len(prompt)} + {n} tokens"] = f"{did['graphs']} graphs, {did['replays']} replays, {did['syncs']} waits"
        if i and did["graphs"]:
            wrong.append(f"{did['graphs']} graphs more for another prompt")
        if did["replays"] < n - 2:
            wrong.append(f"{did['replays']} replays of a CUDA graph for {n} tokens")
    facts["ms of the host a token"] = round(1e3 * (time.perf_counter() - began) / n, 2)
    return facts | kernels(), wrong


# -----------------------------------------------------------------------------
# the scripts


def finite(numbers):
    return [x if math.isfinite(x) else 1.0 for x in numbers]


def unreal(ranks):
    """
    What scripts are told because nothing is computed here: weights are not drawn, sums over ranks are finite, nothing
    is saved. And this process is rank 0 of so many, of which the others do not exist: NCCL is phantom.c's, and gloo's
    group, which would wait for them, is left out.
    """
    no_drawing()
    checkpoint.Saver.save = lambda *_, **__: None
    add = parallel.Ranks.add
    parallel.Ranks.add = lambda self, *numbers: finite(add(self, *numbers))
    if ranks == 1:
        return
    os.environ.update(RANK="0", WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(min(ranks, 8)))
    init, new_group = dist.init_process_group, dist.new_group
    dist.init_process_group = lambda *a, **how: init(*a, **how | dict(store=dist.HashStore()))
    dist.new_group = lambda *a, **how: None if how.get("backend") == "gloo" else new_group(*a, **how)


def watched(main):
    """
    Run a script's main() and look at its steps: (facts, what is wrong). What compiles or waits in the first two is not
    held against it; of the last, `waits` says where it waits for the device.
    """
    steps = [counts()]
    found = waits()
    places = []

    def step_done(*_):
        steps.append(counts())
        places.append(Counter(found))
        found.clear()
    register_optimizer_step_post_hook(step_done)
    began = time.perf_counter()
    wrong = []
    try:
        with open(os.devnull, "w") as nobody, contextlib.redirect_stdout(nobody), contextlib.redirect_stderr(nobody):
            main()
    except torch.OutOfMemoryError as error:
        wrong.append(f"does not fit: {str(error).split('. GPU')[0]}")
    facts = dict(steps=len(steps) - 1, graphs=counts()["graphs"], seconds=round(time.perf_counter() - began))
    if len(steps) > 2:
        last = steps[-1] - steps[-2]
        facts |= {name: last[name] for name in ("launches", "triton", "products", "collectives")}
        facts["waits"] = dict(places[-1])
    for n, (before, after) in enumerate(zip(steps[1:], steps[2:]), 2):
        if again := after["graphs"] - before["graphs"]:
            wrong.append(f"{again} graphs more in step {n}")
    others = seen("devices") & ~1
    if others:
        wrong.append(f"uses devices {bin(others)[2:]}, which other ranks have")
    return facts | kernels() | memory(), wrong + breaks()


def synthetic(folder):
    """A data folder as prepare.py writes it, of half a million random tokens of Apertus' vocabulary."""
    os.makedirs(folder)
    tokens = np.random.default_rng(0).integers(4, 131072, 2**19).astype(np.uint32)
    np.save(f"{folder}/shard.npy", tokens)
    split = dict(shards=[dict(file="shard.npy", tokens=2**19)], tokens=2**19, documents=100, bytes=2**21)
    meta = dict(bos=1, eos=2, vocab_size=131072, tokenizer="apertus")
    with open(f"{folder}/meta.json", "w") as file:
        json.dump(meta | dict(sources=dict(a=dict(train=split, val=split))), file)


def train(folder, ranks, *args):
    """train.py: three steps of two micro-batches, as the flags have it."""
    import train as script
    ranks = int(ranks)
    unreal(ranks)
    synthetic(f"{folder}/data")
    evaluate = script.evaluate

    def no_number(*args):
        # No label was counted, since nothing is.
        with contextlib.suppress(ZeroDivisionError):
            evaluate(*args)
        return 1.0
    script.evaluate = no_number
    script.plot.curves = lambda *_: None
    config = configure(vars(script), args)
    if config["init_from"]:
        start_of(0)
    batch_size = 2 * config["micro_batch"] * ranks // config["sequence_parallel"]
    short = dict(data=f"{folder}/data", out=f"{folder}/run", device="cuda", stage="", minutes=0.0, batch_ramp_at=0,
                 batch_size=batch_size, total_samples=3 * batch_size, warmup_samples=batch_size,
                 decay_samples=batch_size, eval_every=0, last_eval_windows=1, sample_every=0, checkpoint_every=0)
    vars(script).update(short)
    return watched(script.main)


def start_of(n_layer):
    """Have a start model be so many layers of the published 8B, undrawn, wherever it is asked for by name."""
    shape = published("8b")
    shape.n_layer = n_layer or shape.n_layer
    tok = tokenizer.load("apertus")
    convert.shape_of = lambda name: shape
    convert.start_of = lambda name: (shape, tok, "")
    convert.fill = lambda *_: None

    def load_any(name, device="cpu", dtype=None, spread=None, base="", chat=False):
        with torch.device("meta"):
            model = Apertus(shape)
        if spread:
            spread(model)
        else:
            model.to(dtype or torch.bfloat16).to_empty(device=device)
        return model, tok
    convert.load_any = load_any
    return tok


def conversations(folder, n):
    """n of a user who asks and an assistant who answers in up to 4,000 tokens, in a file."""
    rng = np.random.default_rng(0)
    path = f"{folder}/conversations.jsonl"
    with open(path, "w") as file:
        for _ in range(n):
            size = rng.integers(900, 1000)
            question, answer = (" ".join(map(str, rng.integers(100, 1000, size))) for size in (20, size))
            messages = [dict(role="user", content=question), dict(role="assistant", content=answer)]
            file.write(json.dumps(dict(messages=messages)) + "\n")
    return path


def sft(folder, ranks, *args):
    """posttrain/sft.py: three steps of the 8B."""
    from posttrain import common, sft as script
    ranks = int(ranks)
    unreal(ranks)
    start_of(0)
    config = configure(vars(script), args)
    batch_size = 2 * config["micro_batch"] * ranks
    short = dict(data=conversations(folder, 3 * batch_size), init_from="8b", out=f"{folder}/run", device="cuda",
                 batch_size=batch_size, checkpoint_every=0, rank_every=0)
    vars(script).update(short)
    script.save_if_due = script.end = common.plot.curves = lambda *_: None
    return watched(script.main)


def qrpo(folder, ranks, *args):
    """posttrain/qrpo.py: three steps, of completions and rewards that are there already."""
    from posttrain import common, qrpo as script
    ranks = int(ranks)
    unreal(ranks)
    start_of(0)
    config = configure(vars(script), args)
    batch_size = 2 * config["micro_batch"] * ranks
    path = conversations(folder, 3 * batch_size)
    with open(path) as file:
        rows = [json.loads(line)["messages"] for line in file]
    with open(path, "w") as file:
        for question, answer in rows:
            text = answer["content"]
            row = dict(messages=[question], completions=[text, text[:200]], rewards=[1.0, 0.0], ref_rewards=[0.1] * 10)
            file.write(json.dumps(row) + "\n")
    short = dict(data=path, init_from="8b", rewards="", use_references=False, out=f"{folder}/run", device="cuda",
                 batch_size=batch_size, checkpoint_every=0, rank_every=0)
    vars(script).update(short)
    script.refuse_another_reference = script.save_if_due = script.end = common.plot.curves = lambda *_: None
    script.watched = lambda *_: {}
    update = script.update
    script.update = lambda opt, step, rate, loss, norm: update(opt, step, rate, 0.0, 1.0)
    return watched(script.main)


def sample(folder, ranks, *args):
    """sample.py, 64 tokens of the 8B, eager and compiled. Tokens are garbage, so no text is made of them."""
    import sample as script
    tok = start_of(0)
    tok.stream = lambda: lambda token: ""
    facts, wrong = {}, []
    for way in ("False", "True"):
        configure(vars(script), ["--init_from=8b", "--device=cuda", f"--compile={way}", "--max_new_tokens=64", *args])
        before, began = counts(), time.perf_counter()
        with open(os.devnull, "w") as nobody, contextlib.redirect_stdout(nobody):
            script.main()
        did = since(before)
        name = "compiled" if way == "True" else "eager"
        facts[name] = f"{did['graphs']} graphs, {did['replays']} replays, {did['syncs']} waits"
    return facts | memory(), wrong + breaks()


# -----------------------------------------------------------------------------


def main():
    """sections.py RESULT NAME ARGS: the result, a JSON, goes into the file RESULT."""
    result, name, *args = sys.argv[1:]
    note_kernels()
    facts, wrong = globals()[name](*args)
    with open(result, "w") as file:
        json.dump(dict(facts=facts, wrong=wrong), file)
    sys.stdout.flush()
    # Without the last rites of process groups that nobody else is in.
    os._exit(0)


if __name__ == "__main__":
    main()
