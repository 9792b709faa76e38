"""The rooms: who may import whom, and what a script in a room says to someone who starts it from the wrong place."""
import ast
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from test_safety import FILES

PRODUCT = [file for file in FILES if not file.startswith("configs")]


def read(file):
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        return f.read()


def module(file):
    return file.removesuffix(".py").replace(os.sep, ".")


def imported(file):
    """The project's modules that a file imports, at its top or anywhere in it."""
    found, ours = set(), set(map(module, PRODUCT))
    for node in ast.walk(ast.parse(read(file))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & ours


GRAPH = {module(file): imported(file) for file in PRODUCT}


def test_no_circle_of_imports():
    """Kahn's algorithm: what imports nothing that is left is taken away, until nothing is left."""
    left = {name: set(uses) for name, uses in GRAPH.items()}
    while left:
        free = [name for name, uses in left.items() if not uses & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for name in free:
            del left[name]
    assert "engine.checkpoint" in GRAPH["train"]                            # the graph has edges


def scripts():
    return [file for file in PRODUCT if os.sep in file and '__name__ == "__main__"' in read(file)]


@pytest.mark.parametrize("file", scripts())
def test_a_script_started_by_its_path_says_from_where_to_start_it(file, tmp_path):
    for place in (ROOT, tmp_path):
        done = subprocess.run([sys.executable, os.path.join(ROOT, file), "--help"], capture_output=True, text=True, cwd=place)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert f"from the project's root, python -m {module(file)}" in done.stderr
