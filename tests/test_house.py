"""The rooms: who may import whom, and what a script in a room says to someone who starts it from the wrong place."""
import ast
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from test_safety import FILES, offences, python_files

PRODUCT = [file for file in FILES if not file.startswith("configs")]


def read(file):
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        return f.read()


def module(file):
    return file.removesuffix(".py").replace(os.sep, ".")


def imported(file):
    """The project's modules that a file imports, at its top or anywhere in it."""
    ours = set(map(module, PRODUCT))
    found = set()
    for node in ast.walk(ast.parse(read(file))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
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


def test_the_graph_of_imports_has_edges():
    assert "engine.checkpoint" in GRAPH["train"]


# What each room may import besides itself. The root ("") is the lesson: it knows structured layers and the conversation
# only where a setting asks for them, and the corpus only where text becomes data.
MAY = {
    "": {"engine"},
    "engine": set(),
    "corpus": {"engine"},
    "posttrain": {"", "engine"},
    "studies": {"", "engine", "corpus", "posttrain"},
    "tools": {"", "engine", "posttrain", "studies"},
}
# Single modules that one module may use all the same.
LEAVE = {("sample", "posttrain.talk"), ("engine.plot", "configurator")}
LEAVE |= {(name, "studies.structured") for name in ("model", "train", "convert", "sample")}
LEAVE |= {("evaluate", "studies.length")}
LEAVE |= {("convert", f"posttrain.{name}") for name in ("lora", "quantised")}
# Which conversations may be trained on is decided by the rules for documents.
LEAVE |= {("posttrain.conversations", f"corpus.{name}") for name in ("dedup", "quality")}
LEAVE |= {("train", f"posttrain.{name}") for name in ("start", "forgetting")}
# At which steps a run has read a document follows from the order of samples; its tokens become text again.
LEAVE |= {("corpus.cluster", "prepare"), ("corpus.steps", "prepare")}
LEAVE |= {("corpus.audit", "data"), ("corpus.audit", "schedule"), ("corpus.kept", "tokenizer")}
SCRIPTS = ("audit", "cluster", "dedup", "heuristics", "pii", "quality", "robots")
LEAVE |= {(f"corpus.{name}", "configurator") for name in SCRIPTS}


def room(name):
    return name.rpartition(".")[0]


@pytest.mark.parametrize("name", GRAPH)
def test_imports_go_one_way(name):
    rooms = MAY[room(name)] | {room(name)}
    if name in ("prepare", "data"):
        rooms.add("corpus")
    foreign = {used for used in GRAPH[name] if room(used) not in rooms}
    assert {used for used in foreign if (name, used) not in LEAVE} == set()


def test_a_newcomer_finds_fourteen_scripts_at_the_root():
    """The card of the project is among them: model, goldfish, ademamix, train, sample, prepare."""
    root = {name for name in GRAPH if not room(name)}
    pretraining = "model generate goldfish ademamix schedule data train"
    text_and_models = "tokenizer chat prepare sample evaluate convert configurator"
    assert root == {*pretraining.split(), *text_and_models.split()}


@pytest.mark.parametrize("where", sorted(MAY))
def test_a_planted_pickle_is_seen_in_every_room(where, tmp_path):
    """The safety test reads the whole tree: a copy of it with one more file, which must be found and named."""
    for file in PRODUCT:
        os.makedirs(tmp_path / os.path.dirname(file), exist_ok=True)
        (tmp_path / file).write_text("", encoding="utf-8")
    planted = os.path.join(where, "planted.py")
    (tmp_path / planted).write_text("import pickle\npickle.load(open('x', 'rb'))\n", encoding="utf-8")
    seen = [file for file in python_files(str(tmp_path)) if offences((tmp_path / file).read_text(encoding="utf-8"))]
    assert seen == [planted]


@pytest.mark.parametrize("file", FILES)
def test_no_line_is_wider_than_a_screen(file):
    lines = enumerate(read(file).splitlines(), 1)
    assert [number for number, line in lines if len(line) > 120] == []


def scripts():
    return [file for file in PRODUCT if os.sep in file and '__name__ == "__main__"' in read(file)]


@pytest.mark.parametrize("file", scripts())
def test_a_script_started_by_its_path_says_from_where_to_start_it(file, tmp_path):
    command = [sys.executable, os.path.join(ROOT, file), "--help"]
    for folder in (ROOT, tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 2
        assert done.stdout == "" and done.stderr.count("\n") == 1
        assert f"from the project's root, python -m {module(file)}" in done.stderr
