"""Structure of the project: what runs is on the screen, imports go one way, style, sizes, how scripts start."""

import ast
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
from counts import count_hidden, hidden_places, product_files
from test_safety import FILES, read

import train
from configurator import settings

PRODUCT = product_files()
LIMITS = "tests/limits.json"


def module(file):
    return file.removesuffix(".py").replace(os.sep, ".")


def room(name):
    return name.rpartition(".")[0]


def imports(file, lazy=False):
    """The project's modules that a file imports when it is imported; lazy: those that its functions import as well."""
    body = ast.parse(read(file)).body
    names = set()
    while body:
        node = body.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            continue  # part of the command, not of the module
        elif lazy or not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            body.extend(ast.iter_child_nodes(node))
    return names & set(map(module, PRODUCT))


GRAPH = {module(file): imports(file) for file in PRODUCT}


# -----------------------------------------------------------------------------
# what may not grow


def tokens_of(files):
    """The names, operators, numbers and strings of some files; a docstring counts as one."""
    kinds = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
    tokens = (token for file in files for token in tokenize.generate_tokens(io.StringIO(read(file)).readline))
    return sum(token.type in kinds for token in tokens)


def measure():
    """{what tests/limits.json limits: its size today}."""
    tests = [str(path.relative_to(ROOT)) for path in Path(ROOT, "tests").rglob("*.py")]
    return {
        "product tokens": tokens_of(FILES),
        "test tokens": tokens_of(tests),
        "settings in train.py --help": len(settings(vars(train), train.shape)),
        "lines of train.py": len(read("train.py").splitlines()),
        "lines of README.md": len(read("README.md").splitlines()),
        **count_hidden(),
    }


def test_nothing_is_larger_than_its_limit():
    sizes, limits = measure(), json.loads(read(LIMITS))
    assert sizes.keys() == limits.keys()
    if sys.version_info > (3, 12):  # there tokenize also counts what stands inside f-strings
        sizes = {name: size for name, size in sizes.items() if not name.endswith("tokens")}
    larger = {name: f"{size}, limit {limits[name]}" for name, size in sizes.items() if size > limits[name]}
    assert not larger, f"{larger}\n" + "\n".join(map(str, hidden_places()))


def git(*args):
    return subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True).stdout


def test_limits_only_fall():
    """Today's are at most those of each committed version. Tokens are a ceiling that a new feature may raise."""
    commits = git("log", "--format=%H", "--", LIMITS).split()
    today = json.loads(read(LIMITS))
    for limits in (json.loads(git("show", f"{commit}:{LIMITS}")) for commit in commits):
        fixed = {name for name in limits.keys() & today.keys() if not name.endswith("tokens")}
        assert {name for name in fixed if today[name] > limits[name]} == set()


@pytest.mark.parametrize("command", [["check"], ["format", "--check", "tests"]], ids=" ".join)
def test_style(command):
    """ruff.toml says what is checked and why some rules are not."""
    done = subprocess.run([sys.executable, "-m", "ruff", *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


# -----------------------------------------------------------------------------
# imports


def test_no_circle_of_imports():
    """A CycleError names the circle."""
    assert "engine.run" in GRAPH["train"]
    graphlib.TopologicalSorter(GRAPH).prepare()


# For each room the rooms, or modules, that its files may import when they are imported; "" is the root. Inside a
# function, in the branch that needs it, a script may import from any room.
MAY = {
    "": {"engine"},
    "engine": {"model"},
    "corpus": {"", "engine"},
    "posttrain": {"", "engine", "corpus"},
    "studies": {"", "engine", "corpus", "posttrain", "papers", "tools"},
    "papers": {"", "engine", "corpus", "posttrain", "studies", "tools"},
    "tools": {"", "engine", "corpus", "posttrain", "studies", "papers", "tests"},
}


@pytest.mark.parametrize("name", GRAPH)
def test_imports_go_one_way(name):
    more = dict(prepare={"corpus"}, evaluate={"corpus", "posttrain"})
    may = MAY[room(name)] | {room(name)} | more.get(name, set())
    assert {used for used in GRAPH[name] if room(used) not in may and used not in may} == set()


def test_papers_attach_to_nothing():
    """The core does not know them, not even inside a function."""
    core = [file for file in PRODUCT if os.sep not in file or file.startswith(("engine", "posttrain", "corpus"))]
    assert [file for file in core if any(room(name) == "papers" for name in imports(file, lazy=True))] == []


# -----------------------------------------------------------------------------
# scripts

SCRIPTS = [file for file in PRODUCT if os.sep in file and '__name__ == "__main__"' in read(file)]


@pytest.mark.parametrize("file", SCRIPTS)
def test_a_script_started_by_its_path_says_from_where_to_start_it(file, tmp_path):
    command = [sys.executable, os.path.join(ROOT, file), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    refused(done, f"from the project's root, python -m {module(file)}")
