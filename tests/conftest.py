"""Every test imports the project's files as a user's script would: by name, from the repository's root."""

import contextlib
import gc
import io
import logging
import os
import runpy
import sys
import types
from unittest.mock import patch

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
# With the default thresholds garbage collection takes 5 % of the tests' time, most of it on torch and transformers.
gc.set_threshold(50_000, 20, 20)
# torch writes a useless line for each tensor that it loads.
logging.disable(logging.DEBUG)


def pytest_collection_finish():
    """All modules are imported: exclude them from later garbage collections."""
    import torch._inductor.config  # noqa: F401  reads CXX once, so import it before a test sets CXX

    gc.collect()
    gc.freeze()


def refused(done, *says):
    """Assert that script() returned exit code 2 and one line of stderr that holds these words."""
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in says), done.stderr


def table(text):
    """The rows of a table in a string, whose cells are separated by |."""
    return [list(map(str.strip, line.split("|"))) for line in text.strip().splitlines()]


def weights(run):
    """{name: parameter} of a run folder."""
    import convert
    from engine.runs import settings_of
    from papers import structured_ffn

    if os.path.exists(f"{run}/config.json") and "ffn" in settings_of(run):
        return dict(structured_ffn.load_structured(str(run)).named_parameters())
    return dict(convert.load_any(str(run))[0].named_parameters())


def same(one, other):
    """Whether the parameters of two runs are bit-exact."""
    return all(one[name].equal(other[name]) for name in one)


def script(name, *args, stdin="", pictures=False):
    """
    Run `python NAME ARGS`, or `python -m NAME ARGS`, in this process (importing torch anew costs seconds): its
    .returncode, .stdout and .stderr. pictures: draw loss.png, which costs 0.4 s, more than most runs.
    """
    import torch  # here, since xdist's main process runs no test

    from engine import plot

    # A new process would import these modules anew: a script sets the settings in them.
    for configured in ("train", "prepare"):
        package, _, leaf = configured.rpartition(".")
        sys.modules.pop(configured, None)
        vars(sys.modules.get(package, types)).pop(leaf, None)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(ROOT),
        patch.object(sys, "argv", [name, *map(str, args)]),
        patch.object(sys, "stdin", io.StringIO(stdin)),
        patch.object(plot, "curves", plot.curves if pictures else lambda *args, **how: None),
    ):
        try:
            # Not run_path, which would compile the source anew.
            module = name.removesuffix(".py").replace("/", ".")
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as e:
            code = e.code or 0
    torch.use_deterministic_algorithms(False)  # as --exact leaves it
    torch._inductor.config.deterministic = False
    return types.SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


@pytest.fixture(scope="session")
def launch():
    """
    launch(2, *args, script="posttrain.sft", logs=path): run a script on two ranks, forked from one warm process
    (tests/faults/launch.py).
    """
    from faults.launch import Trial

    return lambda *args, **how: Trial(*args, **how).wait()


from lab import lab, large_eps, run  # noqa: E402,F401  it needs script()
