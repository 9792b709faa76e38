"""
The first half hour on a GPU: does it compute what a CPU computes, and how fast is it?

    equal-*    tests/test_cuda.py: loss, gradients, documents, recomputation, decoding, the optimizer, resuming, --exact
    the rest   tools/bench.py: what the device can do, layers of the 8B, against Hugging Face, AdEMAMix, decoding, the
               whole 8B by train.py

Each step is a process with a time limit of its own, and useful alone. One that fails, or takes too long, does not stop
the others. What came of it lies in records/DATE-GPU/: a JSON of each step with its command and versions, as
tools/bench.py writes it, and a summary of all. records/README.md is written anew from them. What the steps print is in
out/gpu/.

$ python -m tools.gpu                       # all: at most 25 minutes; nothing slows down one H200 meanwhile
$ python -m tools.gpu equal decode          # these alone; equal stands for all whose name begins so
$ python -m tools.gpu --small --device=cpu    # a rehearsal: the same steps on tiny models, into out/rehearsal
"""

import sys

if __name__ == "__main__" and not __package__:
    print("gpu.py: start it from the project's root, python -m tools.gpu", file=sys.stderr)
    sys.exit(2)

import collections
import contextlib
import glob
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time

import torch
from tqdm import tqdm

from engine.hardware import can_compile, free_on_host
from engine.plot import read_json
from model import Apertus, ApertusConfig
from studies.kit import run_script, write
from studies.kit import table as markdown
from tools import bench

paths = []              # steps to run, by name or its beginning; nothing: all
device = "cuda"         # cuda, or cpu to rehearse
small = False           # tiny models, two rounds: every step runs, and no speed means anything
patience = 1.0          # by which all time limits are multiplied: 3 on two cores
out = ""                # folder of the results; "" = records/DATE-GPU, and records/README.md is written anew
logs = "out/gpu"        # folder of what the steps print
look = False            # print what is here as a line of JSON, and stop

# The order is that of trust: no speed means anything before the numbers are right.
STEPS = """
step            seconds  command
equal-loss          120  pytest -q tests/test_cuda.py -k loss_and_all
equal-documents     110  pytest -q tests/test_cuda.py -k documents
equal-recompute     140  pytest -q tests/test_cuda.py -k recomputation
equal-decode         60  pytest -q tests/test_cuda.py -k greedy
equal-optimizer      40  pytest -q tests/test_cuda.py -k optimizer
equal-resume        100  pytest -q tests/test_cuda.py -k resumed
equal-exact          90  pytest -q tests/test_cuda.py -k exact
probes               40  tools.bench probes
train-2             120  tools.bench train --preset=8b-stack --micro_batch=2 --impls=ours
train-4             100  tools.bench train --preset=8b-stack --micro_batch=4 --impls=ours
optimizer            80  tools.bench optim --preset=1b5 '--impls=AdamW fused'
decode               90  tools.bench decode --preset=8b-stack --tokens=256 --impls=ours
whole               300  tools.bench whole
peers               110  tools.bench train --preset=1b5 --micro_batch=1 '--impls=hf,hf compile'
"""

# What a step is for: the rate of ours that counts, and what it should be. A peak should be less, all else more.
TARGETS = {
    "train-2": ("MFU", 0.55),
    "train-4": ("MFU", 0.55),
    "optimizer": ("of bandwidth", 0.85),
    "decode": ("of weight-read bound", 0.80),
    "whole": ("peak GB", 140.0),
}

# What may be said of a step that has no result.
FAILURES = "failed", "took too long", "compared nothing"

Step = collections.namedtuple("Step", "name seconds command")


# -----------------------------------------------------------------------------
# what there is


def look_around():
    """What the device and the host are, as a dict: of a process of its own, since a context takes half a GB."""
    found = dict(cuda=torch.version.cuda, gpus=torch.cuda.device_count(), host_free=free_on_host())
    if device == "cuda" and not found["gpus"]:
        return found
    bench.device = device
    bench.clock = "wall" if device == "cuda" else "cpu"
    found["where"] = bench.circumstances()
    if device == "cpu":
        return found
    about = torch.cuda.get_device_properties(0)
    found |= dict(
        capability=[about.major, about.minor],
        compiles=can_compile(torch.device("cuda")),
        total=about.total_memory)
    try:
        found["free"] = torch.cuda.mem_get_info()[0]
    except RuntimeError as error:
        found["broken"] = str(error).splitlines()[0]
    return found


def refuse(found):
    """ValueError, one line with the next step, if the GPU steps cannot run on what look_around() found."""
    if not found["cuda"]:
        raise ValueError("this build of torch has no CUDA: make gpu takes one that has, .gpuenv; or pip install "
                         "torch from the default index")
    if not found["gpus"]:
        raise ValueError(f"torch finds no GPU: nvidia-smi should list one, with a driver for CUDA {found['cuda']} or "
                         "later; in a container, pass it in (--gpus=all)")
    if found["capability"] < [8, 0]:
        raise ValueError("this GPU has compute capability {}.{}, and bf16 and flex attention want 8.0, an A100 or "
                         "later: take --dtype=float32 --compile=False --doc_mask=False with train.py there"
                         .format(*found["capability"]))
    if not found["compiles"]:
        raise ValueError("no C compiler, which Triton needs: apt-get install gcc, or name one by $CC")
    if "broken" in found:
        raise ValueError(f"the GPU does not answer, {found['broken']}: nvidia-smi says who has it")
    taken = found["total"] - found["free"]
    if taken > 0.05 * found["total"]:
        raise ValueError(f"another process holds {gb(taken)} of the GPU's {gb(found['total'])} GB, so no speed would "
                         "mean anything: end it (nvidia-smi names it), or take another GPU, CUDA_VISIBLE_DEVICES=1")
    # A save holds its largest tensor twice (engine/checkpoint.py); Python and the compiler take eight GB.
    with torch.device("meta"):
        largest = max(p.nbytes for p in Apertus(ApertusConfig()).parameters())
    want = 4e9 if small else 2 * largest + 8e9
    free = found["host_free"]
    if free is not None and free < want:
        raise ValueError(f"the host has {gb(free)} GB of memory free, and drawing and saving an 8B take {gb(want)}: "
                         "end something, or ask the scheduler for more")


def gb(size):
    return f"{size / 1e9:.1f}"


def check_device():
    """bench.circumstances() of the device. ValueError if the steps cannot run on it."""
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r}: there is cuda, and cpu to rehearse")
    if device == "cpu" and not small:
        raise ValueError("device=cpu is a rehearsal, and layers of the 8B take days there: say --small as well")
    code, last = run_script("tools.gpu", ["--look", f"--device={device}"], f"{logs}/look.log")
    if code:
        raise ValueError(f"{device} cannot be asked: {last} ({logs}/look.log)")
    found = json.loads(last)
    if device == "cuda":
        refuse(found)
    return found["where"]


# -----------------------------------------------------------------------------
# the steps


def all_steps():
    """The rows of STEPS, in order; limits in seconds, times `patience`."""
    _, *rows = STEPS.strip().splitlines()
    steps = []
    for row in rows:
        name, seconds, command = row.split(maxsplit=2)
        steps.append(Step(name, patience * int(seconds), shlex.split(command)))
    return steps


def chosen():
    """The steps that were asked for. ValueError for a name that no step has or begins with."""
    if not patience > 0:
        raise ValueError(f"patience={patience}: want by how much to multiply the time limits, like 1 or 3")
    steps = all_steps()
    for name in paths:
        if not any(is_asked(step, name) for step in steps):
            names = ", ".join(step.name for step in steps)
            raise ValueError(f"there is no step {name!r}, but {names}")
    return [step for step in steps if not paths or any(is_asked(step, name) for name in paths)]


def is_asked(step, name):
    return step.name == name or step.name.startswith(f"{name}-")


def arguments(step, folder):
    """The step as arguments of Python. folder: where tools/bench.py puts its record."""
    module, *rest = step.command
    if module == "tools.bench":
        threads = 1 if device == "cpu" else 0
        rest += [f"--device={device}", f"--threads={threads}", f"--out={folder}"]
        if small:
            sizes = "--preset", "--micro_batch", "--tokens"
            rest = [flag for flag in rest if not flag.startswith(sizes)]
            rest += ["--preset=tiny", "--tokens=16", "--rounds=2"]
    return ["-m", module, *rest]


def perform(step, bar):
    """
    Run a step, to its end or the end of its time. Returns (exit code, seconds, record of tools/bench.py or None).

    The code is None if its time was over: then all that it has started is killed.
    """
    env = dict(os.environ, APERTUS_TEST_DEVICE=device)
    began, before = time.perf_counter(), bar.n
    with tempfile.TemporaryDirectory() as folder, open(f"{logs}/{step.name}.log", "w", encoding="utf-8") as log:
        command = [sys.executable, *arguments(step, folder)]
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            while process.poll() is None and time.perf_counter() < began + step.seconds:
                time.sleep(0.1)
                bar.n = before + min(step.seconds, time.perf_counter() - began)
                bar.refresh()
            code = process.returncode
        finally:
            # Also on Control-C. All of its session: train.py and the compiler's processes are in it.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.perf_counter() - began
        found = glob.glob(f"{folder}/*.json")
        record = read_json(found[0]) if found and code == 0 else None
    bar.n = before + step.seconds
    bar.refresh()
    return code, seconds, record


def last_lines(step):
    """What a step has printed, as a list of lines; one at least."""
    with open(f"{logs}/{step.name}.log", encoding="utf-8", errors="replace") as f:
        lines = f.read().strip().splitlines()
    return lines or ["it said nothing"]


def tests_of(lines):
    """What pytest's last lines say: {passed, failed, ...: how many}, and the lines of those that failed."""
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    wrong = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return dict(counts, wrong=wrong)


def judge(step, code, record, lines):
    """What came of a step: one of SAYS, and its value, None without any. lines: what it has printed."""
    if code is None:
        return "took too long", None
    if step.command[0] == "pytest":
        counts = tests_of(lines)
        value = counts.get("passed", 0)
        # Without a GPU all are skipped, and pytest is content.
        if code == 0 and (not value or "skipped" in counts):
            return "compared nothing", value
        return ("failed" if code else "as it should be"), value
    if code or not record:
        return "failed", None
    if step.name not in TARGETS:
        return "done", None
    key, target = TARGETS[step.name]
    value = record["rows"]["ours"].get(key)
    if value is None or small:
        return "done", value
    good = value <= target if key.startswith("peak") else value >= target
    return ("as it should be" if good else "short of it"), value


# -----------------------------------------------------------------------------
# what came of them


def note(step, code, seconds, record, where):
    """
    The JSON of a step: tools/bench.py's record, or one without rows that says where and with what it was run.

    where: bench.circumstances(). Under "step" is what came of it.
    """
    lines = last_lines(step)
    says, value = judge(step, code, record, lines)
    module, *rest = step.command
    if record is None:
        facts = tests_of(lines) if module == "pytest" else {}
        record = dict(mode=step.name, preset="", dtype="", **where, rounds=0, facts=facts, rows={})
        record["command"] = shlex.join(["python", *arguments(step, f"{logs}/{step.name}")])
    key, target = TARGETS.get(step.name, ("", None))
    record["step"] = dict(
        name=step.name,
        says=says,
        code=code,
        seconds=round(seconds, 1),
        limit=step.seconds,
        small=small,
        key=key,
        value=value,
        target=target,
        last_line=lines[-1])
    return record


def in_words(about):
    """What came of a step, in a line. about: the "step" of its JSON."""
    says = about["says"]
    if about["key"] and about["value"] is not None:
        most = "at most" if about["key"].startswith("peak") else "at least"
        value, target = (bench.number(about["key"], about[name]) for name in ("value", "target"))
        # Of a rehearsal no more is known than that it ran.
        return f"{says}: {value}" if says == "done" else f"{says}: {value}, of {most} {target}"
    if says in ("done", "as it should be"):
        return says
    if says == "took too long":
        return f"{says}: killed after {about['limit']:.0f} s"
    if (about["code"] or 0) < 0:
        return f"{says}: ended by {signal.Signals(-about['code']).name}"
    return f"{says}: {about['last_line'][:200]}"


def summarise(folder):
    """
    Write summary.json and summary.md from the JSON of all steps that lie in the folder, also those of earlier runs.
    """
    notes, lines = {}, []
    for step in all_steps():
        path = f"{folder}/{step.name}.json"
        if os.path.exists(path):
            notes[step.name] = read_json(path)
    for name, record in notes.items():
        about = record["step"]
        words = in_words(about).replace("|", "/")
        lines.append(f"| {name} | {words} | {about['seconds']:.0f} | `{record['command']}` |")
    machines = set()
    for r in notes.values():
        machines.add(f"{r['gpu'] or r['cpu']}, torch {r['torch']}, commit {r['commit']}, {r['date']}")
    steps = {name: record["step"] for name, record in notes.items()}
    tiny = any(about["small"] for about in steps.values())
    warning = ["", "A rehearsal on tiny models: no speed and no size means anything."] if tiny else []
    text = [*markdown("| step | what came of it | seconds | command |", lines), *warning, "", *sorted(machines)]
    write(f"{folder}/summary.json", json.dumps(dict(machines=sorted(machines), steps=steps), indent=1))
    write(f"{folder}/summary.md", "\n".join(text) + "\n")


def folder_of(where):
    """Where the results lie: a rehearsal's not among the records."""
    if out or small:
        return out or "out/rehearsal"
    name = where["gpu"].lower().removeprefix("nvidia ")
    name = re.sub("[^a-z0-9]+", "-", name)
    return f"records/{where['date']}-{name}"


def into_readme():
    """The table of records/README.md anew, from all records."""
    records = sorted(glob.glob("records/*/*.json"))
    code, last = run_script("tools.bench", [*records, "--readme=records/README.md"], f"{logs}/readme.log")
    if code:
        raise ValueError(f"records/README.md is as it was: {last}")


def main():
    if look:
        print(json.dumps(look_around()))
        return
    steps = chosen()
    where = check_device()
    folder = folder_of(where)
    os.makedirs(folder, exist_ok=True)
    os.makedirs(logs, exist_ok=True)
    most = sum(step.seconds for step in steps)
    failed = []
    print(f"{len(steps)} steps, at most {most / 60:.0f} minutes, into {folder}; what they print: {logs}")
    with tqdm(total=most, bar_format="{desc:15} {percentage:3.0f}%|{bar}| {elapsed}") as bar:
        for step in steps:
            bar.set_description_str(step.name)
            code, seconds, record = perform(step, bar)
            record = note(step, code, seconds, record, where)
            write(f"{folder}/{step.name}.json", json.dumps(record, indent=1))
            bar.write(f"{step.name:15} {seconds:4.0f} s   {in_words(record['step'])}")
            if record["step"]["says"] in FAILURES:
                failed.append(step.name)
    summarise(folder)
    if folder.startswith("records/"):
        into_readme()
    print(f"{len(steps) - len(failed)} of {len(steps)} steps came to their end: {folder}/summary.md")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
