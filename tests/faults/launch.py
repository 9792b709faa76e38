"""
Start train.py, or another script, on n ranks in half a second instead of five: a server that has imported torch forks
each rank, with the environment that torchrun would give it.

fault="module.function:a,b" calls that function of a module in tests/, with these texts, in each rank before the script
begins, which injects a fault. The product has no code for it.
"""
import hashlib
import json
import multiprocessing
import os
import pkgutil
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
server = multiprocessing.get_context("forkserver")
PRELOAD = "train torch.distributed.checkpoint torch.distributed.fsdp torch._inductor.config engine.plot"
server.set_forkserver_preload(PRELOAD.split())


class Launcher:
    """codes, text = Launcher()(2, "configs/tiny.py", "--parallel=fsdp", logs=path): the ranks write to path.RANK."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def start(self, ranks, *args, script="train.py", fault="", logs):
        """The Trial of one process for each rank (0 ranks: one process without a launcher's environment)."""
        return Trial(ranks, [str(script), *map(str, args)], fault, str(logs))

    def __call__(self, ranks, *args, limit=300, **how):
        """Run to the end: (exit code of each rank, output of all)."""
        trial = self.start(ranks, *args, **how)
        return trial.wait(limit), trial.text()


class Trial:
    """The processes of one launch."""

    def __init__(self, ranks, command, fault, logs):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        self.logs = [f"{logs}.{rank}" for rank in range(max(1, ranks))]
        self.processes = []
        # A child imports the main module of its parent anew: this one, instead of pytest's.
        main, sys.modules["__main__"] = sys.modules["__main__"], sys.modules[__name__]
        for rank, log in enumerate(self.logs):
            Path(log).unlink(missing_ok=True)
            here = env | dict(RANK=rank, LOCAL_RANK=rank) if ranks else {}
            process = server.Process(target=child, args=(command, fault, log, here), daemon=True)
            process.start()
            self.processes.append(process)
        sys.modules["__main__"] = main
        self.pids = [process.pid for process in self.processes]

    def text(self):
        """The output of all ranks so far."""
        return "".join(Path(log).read_text(encoding="utf-8") for log in self.logs if os.path.exists(log))

    def codes(self):
        """Exit code of each rank, None while it runs."""
        return [process.exitcode for process in self.processes]

    def kill(self, victims=None, number=signal.SIGKILL):
        """Send a signal to these processes, or all, if they still run."""
        for process in self.processes:
            if process.exitcode is None and process.pid in (victims or self.pids):
                os.kill(process.pid, number)

    def wait(self, limit=300, grace=10):
        """The exit codes. As under torchrun, a rank that fails takes the others down, `grace` seconds later."""
        end = time.monotonic() + limit
        while None in (codes := self.codes()):
            if any(codes):
                end = min(end, time.monotonic() + grace)
                grace = limit
            if time.monotonic() > end:
                self.kill()
            time.sleep(0.02)
        return codes


def child(command, fault, log, env):
    """A rank, in a process of its own."""
    import torch

    from engine import plot
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    os.environ.update({key: str(value) for key, value in env.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1             # more would be a pool of processes in each rank
    if hasattr(os, "SCHED_BATCH"):
        # Where ranks outnumber cores, the thread of gloo that is woken would interrupt the one that woke it.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    plot.curves = lambda *args, **how: None                # not needed, and it takes time
    if fault:
        name, _, args = fault.partition(":")
        pkgutil.resolve_name(name)(*filter(None, args.split(",")))
    sys.argv = command
    folder, script = os.path.split(os.path.join(ROOT, command[0]))
    sys.path.insert(0, folder)
    code = 1
    try:
        runpy.run_module(script.removesuffix(".py"), run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def sha_of(run):
    """(sha256 of all weights by name, step) of a run folder's newest checkpoint. Equal hashes are equal models."""
    from conftest import weights
    from engine import checkpoint

    digest = hashlib.sha256()
    for name, p in sorted(weights(run).items()):
        digest.update(name.encode() + p.detach().float().numpy().tobytes())
    return digest.hexdigest()[:16], checkpoint.steps_in(f"{run}/ckpt")[-1]


def losses(run):
    """{step: loss} of a run folder's log; a torn last line is passed over."""
    log = Path(run, "log.jsonl")
    lines = log.read_text(encoding="utf-8").splitlines(True) if log.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}
