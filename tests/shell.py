"""Run a shell script whose Python commands run in this process, where torch is imported."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading

from conftest import ROOT

# It hands over its arguments, one a line, and ends with the code that it reads.
SHIM = """#!/bin/sh
printf '%s\\n' "$@" "" > {folder}/command
read -r code < {folder}/code
exit "$code"
"""


def run_shell(script, *args, call, **env):
    """
    Run `bash SCRIPT ARGS` in ROOT, with more variables of its environment. Returns the exit code.

    For each `python NAME.py ARGUMENTS` or `python -m NAME ARGUMENTS` in it, call(NAME, *ARGUMENTS) -> exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/python", "w") as shim:
            shim.write(SHIM.format(folder=folder))
        os.chmod(f"{folder}/python", 0o755)
        env = os.environ | env | dict(PATH=f"{folder}:{os.environ['PATH']}")
        with open_pipe(f"{folder}/command", "r") as command, open_pipe(f"{folder}/code", "w") as code:
            shell = subprocess.Popen(["bash", script, *args], cwd=ROOT, env=env, start_new_session=True)
            end = threading.Thread(target=lambda: (shell.wait(), os.write(command.fileno(), b"end\n\n")))
            end.start()
            try:
                while (words := read_paragraph(command)) != ["end"]:
                    program = words.pop(0)
                    name = words.pop(0) if program == "-m" else program.removesuffix(".py")
                    print(call(name, *words), file=code, flush=True)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
                end.join()
            return shell.wait()


def open_pipe(path, mode):
    """Make a pipe, and open it to read and write, so that neither side sees its end between two commands."""
    os.mkfifo(path)
    return open(os.open(path, os.O_RDWR), mode)


def read_paragraph(file):
    """The lines of a file up to an empty one."""
    return list(iter(lambda: file.readline().strip("\n"), ""))
