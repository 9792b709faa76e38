"""How a process ends: signals that the loop obeys between micro-batches, and exit codes that survive a launcher."""

import contextlib
import os
import re
import signal
import sys
import threading
import traceback

import torch.distributed as dist

from engine.placement import launched


def catch_signals(*names):
    """
    A list that fills when one of these signals arrives. The loop reads it between micro-batches; the handler must do no
    more, since it may interrupt an all-reduce.

    A signal to one rank ends all of them, and torchrun, with exit code 0. torchrun passes a SIGTERM on to its ranks,
    and kills them after --shutdown-timeout, 30 seconds by default: too few to save the 8B. It passes SIGUSR2 on only
    with --signals-to-handle; without that, it dies and the ranks continue.
    """
    caught = []
    # Windows has no SIGUSR1 and SIGUSR2. Only the main thread may set handlers, not a notebook's worker.
    for name in names:
        if hasattr(signal, name) and threading.current_thread() is threading.main_thread():
            signal.signal(getattr(signal, name), lambda received, frame: caught.append(received))
    return caught


# What gloo and NCCL say in the RuntimeError of a rank whose peer is gone.
LOST = re.compile(
    ".{0,90}(gloo|remote process|was aborted|Connection closed by peer|Connection reset|[Tt]ime(d |)out).{0,90}")


@contextlib.contextmanager
def orderly_exit():
    """
    Around a script's run(): its exit code survives, and a rank that has lost another prints one line.

    A process that a launcher started leaves by os._exit, because gloo's threads may abort a normal shutdown of the
    interpreter with exit code -6.
    """
    process, code = launched(), 1
    try:
        yield
        code = 0
    except BaseException as e:
        if not process:
            raise
        if isinstance(e, SystemExit):
            code = e.code or 0
        elif isinstance(e, RuntimeError) and (lost := LOST.search(str(e))):
            print(f"rank {process[0]}: lost another rank ({lost[0]}). It died, or did not answer within --timeout. Its "
                  "message is the cause; --resume continues from the last checkpoint", file=sys.stderr)
        else:
            traceback.print_exc()
    finally:
        if process:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        if dist.is_initialized():
            dist.destroy_process_group()
