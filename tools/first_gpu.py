"""
The parts of tools/first_gpu.sh that no other script has. Each appends its numbers to OUT/log.jsonl.

    machine    versions; TFLOP/s of a matrix product and GB/s of a copy, ten seconds each
    steps      steps on random tokens, from random weights: tokens/s, MFU, and GiB of memory next to those of
               engine/memory.py; after the last step a trace, OUT/trace.json, and the kernels that take longest
    weights    random weights of a model in bf16 and the vocabulary of --data, as a Hugging Face folder OUT

All settings of train.py are settings here too.

$ python -m tools.first_gpu machine --out=out/first_gpu/machine
$ python -m tools.first_gpu steps configs/8b.py --n_layer=4 --micro_batch=2 --out=out/first_gpu/layers
"""

import sys

if __name__ == "__main__" and not __package__:
    print("first_gpu.py: start it from the project's root, python -m tools.first_gpu", file=sys.stderr)
    sys.exit(2)

import json
import os
import shutil
import statistics
import sysconfig
from types import SimpleNamespace

import torch

import convert
import train
from ademamix import build_optimizer, optimizer_step
from configurator import run as run_script, settings
from engine.files import make_folder
from engine.hardware import can_compile, pick_device, pick_dtype, usage
from engine.memory import step_memory
from engine.parallel import Ranks, check_finite, reduce_step
from model import ApertusConfig
from tokenizer import load_for
from tools.bench import large_array, make_batch, make_clock
from tools.plan import copy_settings

paths = []                  # machine | steps | weights
seconds = 10.0              # of each measurement of `machine`
n_steps = 15                # of `steps`; the first three compile and do not count

OF_RUN = [ApertusConfig(**vars(train.shape)), *copy_settings(train)]


def write_entry(out, **entry):
    """Print an entry, and append it to the log of a part."""
    make_folder(out)
    line = json.dumps(entry)
    print(line, flush=True)
    with open(f"{out}/log.jsonl", "a") as file:
        file.write(f"{line}\n")


# -----------------------------------------------------------------------------
# the machine


def calls_per_second(call, device):
    """How often a second a call ends, over `seconds`."""
    now = make_clock("wall", device)
    call()
    start, n = now(), 0
    while now() - start < seconds:
        for _ in range(10):                                # the queue of a GPU stays full
            call()
        n += 10
    return n / (now() - start)


def measure_machine(device, out):
    """Write the versions, and how fast the device multiplies and copies."""
    on_gpu = device == "cuda"
    entry = dict(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        python=sys.version,
        compiler=shutil.which("g++"),
        python_h=os.path.exists(f"{sysconfig.get_path('include')}/Python.h"),      # Triton compiles with it
        device=torch.cuda.get_device_name() if on_gpu else device)
    write_entry(out, **entry)
    rows = 8192 if on_gpu else 512
    # Random numbers, because zeros are faster on a GPU.
    a, b = torch.randn(2, rows, rows, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    entry["product_tflops"] = calls_per_second(lambda: a @ b.T, device) * 2 * rows**3 / 1e12
    x = large_array(device)
    y = torch.empty_like(x)
    entry["copy_gbs"] = calls_per_second(lambda: y.copy_(x), device) * 2 * x.nbytes / 1e9
    write_entry(out, **entry)


# -----------------------------------------------------------------------------
# steps, and weights


@torch.no_grad()
def draw(model):
    """Random weights, drawn on the model's device: a CPU would take minutes."""
    for p in model.parameters():
        if p.ndim > 1:
            p.normal_(std=model.config.init_std)
        else:
            p.fill_(1.0)


def make_step(run, shape, device, compiled):
    """(f(step) -> loss: two micro-batches and an update, as a step of train.py; the model; the tokens of a step)."""
    model = train.build_model(shape, run, Ranks(), device, compiled, fresh=False)
    draw(model)
    optimizer = build_optimizer(model, run["optimizer"], run["lr"], run["betas"], run["alpha"], run["weight_decay"],
                                warmup=100, compile=compiled, state_dtype=run["state_dtype"])
    batch = SimpleNamespace(documents=1000, batch=run["micro_batch"], block_size=shape.block_size,
                            vocab_size=shape.vocab_size)
    parts = [make_batch(batch, device)[:4] for _ in range(2)]

    def step(n):
        losses = 0.0
        for part in parts:
            loss = model.loss(*part) / len(parts)
            loss.backward()
            losses += loss.detach()
        losses, norm = reduce_step(model, Ranks(), losses)
        check_finite(n, losses, norm)
        optimizer_step(optimizer, run["lr"], norm, run["grad_clip"])
        return losses[0]
    return step, model, 2 * parts[0][0].numel()


def time_steps(run):
    """Time steps, and trace one more."""
    device, out = pick_device(run["device"]), run["out"]
    shape = ApertusConfig.from_settings(run)
    outline, size = train.build_model(shape, run, Ranks(), "meta"), pick_dtype(run["dtype"], device).itemsize
    memory = step_memory(outline, run, shape.block_size, size)
    # The allocator counts neither CUDA itself nor gaps.
    formula = dict(formula_gib=(memory["total"] - memory["beyond"]) / 2**30, device_formula_gib=memory["total"] / 2**30)
    step, model, tokens = make_step(run, shape, device, run["compile"] and can_compile(device))
    now = make_clock("wall", device)
    times = []
    for n in range(n_steps):
        start = now()
        loss = step(n)
        times.append(now() - start)
        tok_s = tokens / statistics.median(times[3:] or times)
        entry = dict(step=n, loss=loss, seconds=times[-1], tok_s=round(tok_s), **formula)
        if device == "cuda":
            free, total = torch.cuda.mem_get_info()
            entry |= usage(model.flops_per_token(shape.block_size) * tok_s) | dict(device_gib=(total - free) / 2**30)
        write_entry(out, **entry)
    with torch.profiler.profile() as profiler:
        step(n_steps)
    profiler.export_chrome_trace(f"{out}/trace.json")
    print(profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=30))


def write_weights(run):
    """Write the folder of a model of random weights."""
    device, tok = pick_device(run["device"]), load_for(run["data"])
    shape = ApertusConfig.from_settings(run | dict(vocab_size=tok.vocab_size))
    model = convert.meta_model(shape).bfloat16().to_empty(device=device)
    draw(model)
    convert.save_hf(model, run["out"], tok, "bfloat16")


def main():
    run = settings(*OF_RUN)
    if paths == ["machine"]:
        measure_machine(pick_device(run["device"]), run["out"])
    elif paths == ["steps"]:
        time_steps(run)
    elif paths == ["weights"]:
        write_weights(run)
    else:
        raise ValueError(f"got {' '.join(paths) or 'nothing'}: want machine, steps or weights")


if __name__ == "__main__":
    run_script(main, globals(), *OF_RUN)
