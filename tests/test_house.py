"""Structure of the project: its size, the direction of its imports, and how its scripts start."""

import ast
import collections
import graphlib
import io
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from conftest import ROOT, refused
from test_safety import FILES, read

import train
from configurator import settings

PRODUCT = [file for file in FILES if not file.startswith("configs")]
LIMITS = "tests/limits.json"
# For each room the rooms, or modules, that it may import; "" is the root.
ALL = {"", "engine", "corpus", "posttrain", "studies", "papers", "tools"}
MAY = {
    "": {"engine"},
    "engine": {"model"},
    "corpus": {"", "engine"},
    "posttrain": {"", "engine"},
    "studies": ALL,
    "papers": ALL,
    "tools": ALL | {"tests"},
}


def module(file):
    return file.removesuffix(".py").replace(os.sep, ".")


def room(name):
    return name.rpartition(".")[0]


def imports(file, lazy=True):
    """The project's modules that a file imports; lazy: those that its functions import as well."""
    body = ast.parse(read(file)).body
    found = set()
    while body:
        node = body.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            continue  # part of the command, not of the module
        elif lazy or not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            body.extend(ast.iter_child_nodes(node))
    return found & set(map(module, PRODUCT))


GRAPH = {module(file): imports(file) for file in PRODUCT}


# -----------------------------------------------------------------------------
# size


def words(file):
    """The names, operators, numbers and strings of a file; a docstring counts as one."""
    kinds = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
    return [t.string for t in tokenize.generate_tokens(io.StringIO(read(file)).readline) if t.type in kinds]


def sizes():
    """{room, product, tests, closure and settings of train.py: their size}."""
    found = collections.Counter(tests=sum(len(words(file)) for file in Path(ROOT, "tests").rglob("*.py")))
    for file in FILES:
        where = file.split(os.sep)[0] if os.sep in file else "root"
        # studies and papers share a limit, since a file has moved between them.
        found["studies and papers" if where in ("studies", "papers") else where] += len(words(file))
        found["product"] += len(words(file))
    pulled, todo = set(), {"train"}
    while todo:
        pulled |= todo
        todo = {used for name in todo for used in imports(path(name), lazy=False)} - pulled
    found["closure of train.py"] = sum(len(words(path(name))) for name in pulled)
    found["settings of train.py"] = len(settings(vars(train)))
    return found


def path(name):
    return f"{name.replace('.', os.sep)}.py"


def test_nothing_is_larger_than_its_limit():
    """So a new feature pays with tokens that are deleted elsewhere."""
    found, limits = sizes(), json.loads(read(LIMITS))
    assert found.keys() == limits.keys()
    # From Python 3.12 on, tokenize also counts what stands inside f-strings.
    assert sys.version_info > (3, 12) or not {name: size for name, size in found.items() if size > limits[name]}


def git(*args):
    return subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True).stdout


def test_limits_only_fall():
    """Each committed version of the limits, and the one in the tree, is at most the one before it."""
    commits = git("log", "--reverse", "--format=%H", "--", LIMITS).split()
    texts = [git("show", f"{commit}:{LIMITS}") for commit in commits]
    versions = list(map(json.loads, [*texts, read(LIMITS)]))
    for before, after in zip(versions, versions[1:]):
        assert {name for name in before.keys() & after.keys() if after[name] > before[name]} == set()


def test_no_line_is_wider_than_a_screen():
    wide = [f"{file}:{n}" for file in FILES for n, line in enumerate(read(file).splitlines(), 1) if len(line) > 120]
    assert not wide


# -----------------------------------------------------------------------------
# imports


def test_no_circle_of_imports():
    """A CycleError names the circle."""
    assert "engine.checkpoint" in GRAPH["train"]
    graphlib.TopologicalSorter(GRAPH).prepare()


@pytest.mark.parametrize("name", GRAPH)
def test_imports_go_one_way(name):
    """Imports at the top of a file and in functions. The root reaches rooms above it only by configurator.attached."""
    may = MAY[room(name)] | {room(name)} | ({"corpus"} if name == "prepare" else set())
    assert {used for used in GRAPH[name] if room(used) not in may and used not in may} == set()


def test_the_core_names_nothing_that_attaches_to_it():
    """Adapters, quantised bases, teachers, structured layers, judges and studies belong to other rooms."""
    core = "model loss goldfish ademamix schedule data train generate sample configurator".split()
    foreign = {"lora", "fp8", "quantised", "teacher", "distill", "structured", "charter", "studies", "guides"}
    for name in core:
        assert foreign.isdisjoint(words(f"{name}.py")), name


# -----------------------------------------------------------------------------
# scripts

SCRIPTS = [file for file in PRODUCT if os.sep in file and '__name__ == "__main__"' in read(file)]


@pytest.mark.parametrize("file", SCRIPTS)
def test_a_script_started_by_its_path_says_from_where_to_start_it(file, tmp_path):
    command = [sys.executable, os.path.join(ROOT, file), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    refused(done, f"from the project's root, python -m {module(file)}")
