"""The house: how large it may be, who may import whom, and where its scripts start."""
import ast
import io
import json
import os
import subprocess
import sys
import tokenize

import pytest

from conftest import ROOT
from test_safety import FILES

PRODUCT = [file for file in FILES if not file.startswith("configs")]
LIMITS = "tests/limits.json"
# What the files of each room may import besides those of their own: "" is the root.
MAY = {
    "": {"engine"},
    "engine": {"model"},
    "corpus": {"", "engine"},
    "posttrain": {"", "engine"},
    "studies": {"", "engine", "corpus", "posttrain", "papers", "tools"},
    "papers": {"", "engine", "corpus", "posttrain", "studies", "tools"},
    "tools": {"", "engine", "corpus", "posttrain", "studies", "papers"},
}


def read(file):
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        return f.read()


def module(file):
    return file.removesuffix(".py").replace(os.sep, ".")


def room(name):
    return name.rpartition(".")[0]


def is_start(node):
    """Whether a node is `if __name__ == "__main__":`, which belongs to the command and not to the module."""
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)


def imports(file, lazy=True):
    """The project's modules that a file imports; lazy: those that its functions import as well."""
    body = [node for node in ast.parse(read(file)).body if not is_start(node)]
    found = set()
    while body:
        node = body.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif lazy or not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            body.extend(ast.iter_child_nodes(node))
    return found & set(map(module, PRODUCT))


GRAPH = {module(file): imports(file) for file in PRODUCT}


# -----------------------------------------------------------------------------
# size


def tokens(file):
    """Names, operators, numbers and strings of a file: what a reader reads. A docstring counts one."""
    kinds = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
    return sum(t.type in kinds for t in tokenize.generate_tokens(io.StringIO(read(file)).readline))


def sizes():
    """{room, product, tests, closure and settings of train.py: their size}."""
    found = {}
    for folder, _, files in os.walk(os.path.join(ROOT, "tests")):
        tests = [os.path.relpath(os.path.join(folder, file), ROOT) for file in files if file.endswith(".py")]
        found["tests"] = found.get("tests", 0) + sum(map(tokens, tests))
    for file in FILES:
        where = file.split(os.sep)[0] if os.sep in file else "root"
        found[where] = found.get(where, 0) + tokens(file)
        found["product"] = found.get("product", 0) + tokens(file)
    pulled, todo = set(), ["train"]
    while todo:
        name = todo.pop()
        if name not in pulled:
            pulled.add(name)
            todo.extend(imports(f"{name.replace('.', os.sep)}.py", lazy=False))
    found["closure of train.py"] = sum(tokens(f"{name.replace('.', os.sep)}.py") for name in pulled)
    values = (node for node in ast.parse(read("train.py")).body if isinstance(node, ast.Assign))
    found["settings of train.py"] = sum(node.targets[0].id.islower() for node in values)
    return found


def test_nothing_is_larger_than_its_limit():
    """A feature pays with tokens elsewhere."""
    found, limits = sizes(), json.loads(read(LIMITS))
    assert found.keys() == limits.keys()
    assert {name: size for name, size in found.items() if size > limits[name]} == {}


def test_limits_only_fall():
    """Each committed version of the limits, and the one in the tree, is at most the one before it."""
    git = ["git", "-C", ROOT]
    if subprocess.run([*git, "rev-parse", "--git-dir"], capture_output=True).returncode:
        pytest.skip("not a git checkout")
    log = subprocess.run([*git, "log", "--reverse", "--format=%H", "--", LIMITS], capture_output=True, text=True)
    texts = [subprocess.run([*git, "show", f"{commit}:{LIMITS}"], capture_output=True, text=True).stdout
             for commit in log.stdout.split()]
    versions = [json.loads(text) for text in [*texts, read(LIMITS)]]
    for before, after in zip(versions, versions[1:]):
        assert {name for name in before.keys() & after.keys() if after[name] > before[name]} == set()


@pytest.mark.parametrize("file", FILES)
def test_no_line_is_wider_than_a_screen(file):
    lines = enumerate(read(file).splitlines(), 1)
    assert [number for number, line in lines if len(line) > 120] == []


# -----------------------------------------------------------------------------
# imports


def test_no_circle_of_imports():
    """Kahn's algorithm: modules that import nothing that is left are taken away, until nothing is left."""
    assert "engine.checkpoint" in GRAPH["train"]
    left = {name: set(uses) for name, uses in GRAPH.items()}
    while left:
        free = [name for name, uses in left.items() if not uses & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for name in free:
            del left[name]


@pytest.mark.parametrize("name", GRAPH)
def test_imports_go_one_way(name):
    """At the top of a file or inside a function. The root reaches a room above it by configurator.attached alone."""
    may = MAY[room(name)] | {room(name)}
    if name == "prepare":
        may.add("corpus")
    assert {used for used in GRAPH[name] if room(used) not in may and used not in may} == set()


def test_the_core_names_nothing_that_attaches_to_it():
    """Adapters, quantised bases, teachers, structured layers, judges and studies are words of other rooms."""
    core = "model loss goldfish ademamix schedule data train generate sample configurator".split()
    foreign = {"lora", "fp8", "quantised", "teacher", "distill", "structured", "charter", "studies", "guides"}
    for name in core:
        words = {t.string for t in tokenize.generate_tokens(io.StringIO(read(f"{name}.py")).readline)
                 if t.type == tokenize.NAME}
        assert words & foreign == set(), name


# -----------------------------------------------------------------------------
# scripts


def scripts():
    return [file for file in PRODUCT if os.sep in file and '__name__ == "__main__"' in read(file)]


@pytest.mark.parametrize("file", scripts())
def test_a_script_started_by_its_path_says_from_where_to_start_it(file, tmp_path):
    command = [sys.executable, os.path.join(ROOT, file), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert f"from the project's root, python -m {module(file)}" in done.stderr
