"""
Start train.py, or another script, on n ranks in half a second instead of five: a server that has imported torch forks
each rank, with the environment that torchrun would give it.
"""
import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path

server = multiprocessing.get_context("forkserver")
PRELOAD = "train torch.distributed.checkpoint torch.distributed.fsdp torch._inductor.config engine.plot"
server.set_forkserver_preload(PRELOAD.split())


class Trial:
    """
    The processes of one command, which write to the file `logs`; 0 ranks: one, without a launcher's environment.

    fault() is called in each rank before the script begins. The product has no code for it.
    """

    def __init__(self, ranks, *args, script="train.py", fault=bool, logs):
        self.log = Path(logs)
        self.log.write_text("")
        self.processes = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            _, port = free.getsockname()
        command = [str(script), *map(str, args)]
        for rank in range(max(1, ranks)):
            env = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={ranks} LOCAL_WORLD_SIZE={ranks} MASTER_PORT={port}"
            process = server.Process(target=child, args=(command, fault, self.log, env * (ranks > 0)), daemon=True)
            process.start()
            self.processes.append(process)

    def wait(self, grace=10):
        """(exit codes, output). As under torchrun, a rank that fails takes the others down, `grace` seconds later."""
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
    """A rank, in a process of its own."""
    import torch

    from engine import plot

    with open(log, "a") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    env += " MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo"
    os.environ.update(
        word.split("=")
        for word in env.split()
    )
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1             # more would be a pool of processes in each rank
    if hasattr(os, "SCHED_BATCH"):
        # Where ranks outnumber cores, the thread of gloo that is woken would interrupt the one that woke it.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    plot.curves = lambda *args, **how: None                # not needed, and it takes time
    fault()
    sys.argv = command
    folder, script = os.path.split(command[0])
    sys.path.append(folder)
    runpy.run_module(script.removesuffix(".py"), run_name="__main__", alter_sys=True)
