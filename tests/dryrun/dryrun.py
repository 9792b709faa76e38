"""
What CUDA would do with this project, found out on a machine without a GPU.

    phantom.c     stands in for CUDA's libraries: torch sees GPUs, compiles its kernels for sm_90, and hands out their
                  memory; nothing is computed
    sections.py   what is done there, each section in a process of its own
    this file     starts them, two at a time, and says of each whether it compiles, fits, breaks its graph, compiles
                  again or waits for the device

$ make gpu-dry                                   # makes the environment (6 GB), then all sections: eight minutes
$ make gpu-dry ONLY="blocks decode"              # those whose names begin so
$ make gpu-dry CONFIG="configs/mine.py --parallel=fsdp --gpus=8"    # one run of train.py

It cannot know numbers, nor times of the device, nor what cuDNN would do, which is absent. Written for torch 2.11 with
CUDA 13. Nothing else needs this folder: who has a GPU may throw it away.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
TORCH = "2.11"
H200 = 143_771                  # MiB, as nvidia-smi has it
H100 = 81_559
LIMIT = 480                     # seconds of one section
AT_ONCE = 2


@dataclass
class Section:
    """One process. what: a function of sections.py; ranks, mib: of the machine that is pretended; args: its own."""
    name: str
    what: str
    args: tuple = ()
    ranks: int = 1
    mib: int = H200


def script(name, what, flags, ranks=1, mib=H200):
    return Section(name, what, tuple(flags.split()), ranks, mib)


SCRIPTS = "train", "sft", "qrpo", "sample"
SECTIONS = [
    # Those that take longest begin first.
    script("8b-one-gpu", "train", "configs/8b.py configs/8b_one_gpu.py"),
    script("8b-8xh200", "train", "configs/8b.py --parallel=fsdp", 8),
    script("8b-8xh100", "train", "configs/8b.py --parallel=fsdp --micro_batch=2", 8, H100),
    script("sft-8b-8xh200", "sft", "configs/sft_8b.py --parallel=fsdp", 8),
    script("qrpo-8b-8xh200", "qrpo", "configs/qrpo_8b.py --parallel=fsdp --micro_batch=1", 8),
    script("lora-8b", "train", "configs/continue_8b.py --lora_r=64 --base=bf16 --recompute=full --micro_batch=1"),
    script("1b5", "train", "configs/1b5.py"),
    script("1b5-ddp", "train", "configs/1b5.py --parallel=ddp", 8),
    script("8b-hsdp", "train", "configs/8b.py --parallel=hsdp --n_layer=4", 16),
    script("64k-split", "train", "configs/8b.py configs/long/64k.py --parallel=fsdp --sequence_parallel=8 --n_layer=4 "
           "--init_from=", 8),
    script("exact", "train", "configs/8b.py --exact --n_layer=2 --micro_batch=1"),
    script("structured", "train", "configs/1b5.py --ffn=lowrank --ffn_rank=512 --n_layer=4"),
    script("sample-8b", "sample", ""),
    Section("blocks", "blocks", ("none",)),
    Section("blocks-selective", "blocks", ("selective",)),
    Section("blocks-full", "blocks", ("full",)),
    Section("sizes", "sizes"),
    Section("optimizer", "optimizer", ("float32",)),
    Section("optimizer-bf16", "optimizer", ("bfloat16",)),
    Section("decode", "decode"),
    Section("attention", "attention"),
]


# -----------------------------------------------------------------------------
# one section


def refuse(line):
    print(f"dryrun.py: {line}", file=sys.stderr)
    sys.exit(2)


def check_machine():
    """Leave with one line if the stand-in cannot work here."""
    if not sys.platform.startswith("linux"):
        refuse("wants Linux, whose loader puts one library before another")
    if not shutil.which("gcc"):
        refuse("wants gcc, for phantom.c and for Triton: install it")
    try:
        import torch
    except ImportError:
        refuse("wants a torch with CUDA: say make gpu-dry, which installs one")
    if not torch.version.cuda or not torch.__version__.startswith(TORCH):
        refuse(f"is written for torch {TORCH} with CUDA, and this is {torch.__version__}: say make gpu-dry")


def build(folder):
    """Compile the stand-in into a folder. CalledProcessError with gcc's words if that fails."""
    library = os.path.join(folder, "libcuda.so.1")
    options = "-std=gnu11 -shared -fPIC -O1 -w -Wl,-soname,libcuda.so.1".split()
    source = os.path.join(HERE, "phantom.c")
    subprocess.run(["gcc", *options, "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


def environment(folder, section):
    """Of the section's process. Kernels that were compiled for one section serve the others."""
    library = os.path.join(folder, "libcuda.so.1")
    own = section.name if section.what == "optimizer" else "all"
    return os.environ | dict(
        LD_PRELOAD=library,
        LD_LIBRARY_PATH=f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        TRITON_LIBCUDA_PATH=folder,
        TRITON_CACHE_DIR=os.path.join(folder, own, "triton"),
        TORCHINDUCTOR_CACHE_DIR=os.path.join(folder, own, "inductor"),
        TORCHINDUCTOR_COMPILE_THREADS="1",
        OMP_NUM_THREADS="1",
        PHANTOM_MIB=str(section.mib),
        PHANTOM_GPUS=str(min(section.ranks, 8)))


def perform(section, folder):
    """Run it in a process: {facts, wrong, seconds}."""
    began = time.perf_counter()
    own = os.path.join(folder, "runs", section.name)
    os.makedirs(own)
    result, log = os.path.join(own, "result.json"), os.path.join(own, "log.txt")
    args = [section.what, *section.args]
    if section.what in SCRIPTS:
        args[1:1] = own, str(section.ranks)
    command = [sys.executable, os.path.join(HERE, "sections.py"), result, *args]
    said = ""
    with open(log, "w") as file:
        try:
            subprocess.run(command, cwd=ROOT, env=environment(folder, section), stdout=file, stderr=file,
                           timeout=LIMIT)
        except subprocess.TimeoutExpired:
            said = f"took longer than {LIMIT} s"
    if os.path.exists(result):
        with open(result) as file:
            found = json.load(file)
    else:
        with open(log, errors="replace") as file:
            lines = file.read().strip().splitlines()
        found = dict(facts={}, wrong=[said or (lines or ["left without a word"])[-1][:300]])
    found["seconds"] = round(time.perf_counter() - began)
    keep = os.environ.get("DRYRUN_KEEP")
    if keep:
        shutil.copy(log, os.path.join(keep, f"{section.name}.log"))
    shutil.rmtree(own, ignore_errors=True)
    return found


# -----------------------------------------------------------------------------
# all of them


def chosen(args):
    """The sections that the command line asks for."""
    config = [arg.partition("=")[2] for arg in args if arg.startswith("--config=")]
    names = [arg for arg in args if not arg.startswith("-")]
    unknown = [arg for arg in args if arg.startswith("-") and not arg.startswith("--config=")]
    if unknown:
        refuse(f"does not know {unknown[0]}: there is --config=, and the names {', '.join(s.name for s in SECTIONS)}")
    if config:
        return [of_config(config[0].split())]
    for name in names:
        if not any(section.name.startswith(name) for section in SECTIONS):
            refuse(f"has no section {name!r}: there is {', '.join(s.name for s in SECTIONS)}")
    return [s for s in SECTIONS if not names or any(s.name.startswith(name) for name in names)]


def of_config(flags):
    """A section of train.py with these configs and flags; --gpus=8 and --mib=81559 are of the machine."""
    ours = dict(gpus="1", mib=str(H200))
    theirs = []
    for flag in flags:
        key, _, value = flag.removeprefix("--").partition("=")
        if flag.startswith("--") and key in ours:
            ours[key] = value
        else:
            theirs.append(flag)
    if not all(value.isdigit() and int(value) for value in ours.values()):
        refuse(f"--gpus={ours['gpus']} --mib={ours['mib']}: want positive numbers")
    return Section("config", "train", tuple(theirs), int(ours["gpus"]), int(ours["mib"]))


def told(value):
    """A fact in a word or a few."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {x}" for key, x in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def summary(results):
    """The lines of summary.md. results: {name: {facts, wrong, seconds, command, GPUs}}."""
    yield "| section | GPUs | what is seen | what is wrong |"
    yield "|---|---|---|---|"
    for name, found in results.items():
        facts = "; ".join(f"{key}: {told(value)}" for key, value in found["facts"].items())
        yield f"| {name} | {found['on']} | {facts} | {'; '.join(found['wrong']) or 'nothing'} |"


def keep(results, out):
    """Write summary.json and summary.md into a folder."""
    import torch
    import triton
    os.makedirs(out, exist_ok=True)
    versions = dict(torch=torch.__version__, cuda=torch.version.cuda, triton=triton.__version__)
    with open(os.path.join(out, "summary.json"), "w") as file:
        json.dump(dict(versions=versions, sections=results), file, indent=1)
        file.write("\n")
    with open(os.path.join(out, "summary.md"), "w") as file:
        file.write("\n".join(summary(results)) + "\n")


def main():
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__.strip())
        return
    sections = chosen(sys.argv[1:])
    check_machine()
    from tqdm import tqdm
    results = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        build(folder)
        running = {pool.submit(perform, section, folder): section for section in sections}
        bar = tqdm(as_completed(running), total=len(running), desc="dry run", unit="section", leave=False)
        for done in bar:
            section = running[done]
            found = done.result()
            card = "H200" if section.mib == H200 else "H100" if section.mib == H100 else f"{section.mib:,} MiB"
            on = dict(on=f"{section.ranks} x {card}", command=" ".join([section.what, *section.args]))
            results[section.name] = on | found
            bar.write(f"{'WRONG' if found['wrong'] else 'ok':6}{section.name:18}{found['seconds']:4} s  "
                      f"{'; '.join(found['wrong'])}", file=sys.stdout)
            sys.stdout.flush()
    results = {section.name: results[section.name] for section in sections}
    keep(results, os.path.join(ROOT, "out", "dryrun"))
    failed = [name for name, found in results.items() if found["wrong"]]
    print("out/dryrun/summary.md has the facts. Not known here: numbers, times of the device, cuDNN")
    print(f"wrong: {', '.join(failed)}" if failed else f"all {len(results)} sections as they should be")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
