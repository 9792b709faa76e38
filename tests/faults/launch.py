"""
Start train.py, or another script, on n ranks in half a second instead of five: a server that has imported torch forks
the ranks, with the environment variables that torchrun would set.
"""

import gc
import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path

server = multiprocessing.get_context("forkserver")
# Modules that the ranks would otherwise import themselves.
server.set_forkserver_preload(
    [
        "train",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch._inductor.config",
        "engine.memory",
        "engine.plot",
        "engine.recompute",
        "engine.restore",
        "engine.sharding",
        "posttrain.common",
        "posttrain.conversations",
        "posttrain.losses",
        "posttrain.references",
        "weights.read",
        "huggingface_hub.serialization",
        "jinja2.loaders",
        "numpy.ma",
        "numpy.ctypeslib",
    ]
)


class Trial:
    """
    The processes of one command, which write to the file `logs`. 0 ranks: one process without a launcher's environment.

    Each rank calls fault() before the script begins, so that the product needs no code for faults.
    """

    def __init__(self, ranks, *args, script="train.py", fault=bool, logs):
        self.log = Path(logs)
        self.log.write_text("")
        self.processes = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            _, port = free.getsockname()
        command = [str(script), *map(str, args)]
        for rank in range(max(1, ranks)):
            env = f"""RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={ranks} LOCAL_WORLD_SIZE={ranks} MASTER_PORT={port}
                MASTER_ADDR=127.0.0.1 """
            process = server.Process(target=child, args=(command, fault, self.log, env * (ranks > 0)), daemon=True)
            process.start()
            self.processes.append(process)

    def wait(self, grace=10):
        """Returns (exit codes, output). Like torchrun it kills the other ranks `grace` seconds after one has failed."""
        end = time.monotonic() + 300
        while None in (codes := [process.exitcode for process in self.processes]):
            if any(codes):
                end = min(end, time.monotonic() + grace)
            if time.monotonic() > end:
                for process in self.processes:
                    process.kill()
            time.sleep(0.02)
        return codes, self.log.read_text()


def child(command, fault, log, env):
    """Run one rank, in its own process."""
    import torch

    from engine import plot

    with open(log, "a") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    os.environ.update(word.split("=") for word in env.split())
    gc.freeze()  # the collector ignores the modules of the server
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # more would start a pool of processes in each rank
    if hasattr(os, "SCHED_BATCH"):
        # With more ranks than cores, a gloo thread that wakes up would otherwise interrupt the thread that woke it.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    plot.curves = lambda *args, **how: None  # plots are not needed and take time
    fault()
    sys.argv = command
    folder, script = os.path.split(command[0])
    sys.path.append(folder)
    runpy.run_module(script.removesuffix(".py"), run_name="__main__", alter_sys=True)
