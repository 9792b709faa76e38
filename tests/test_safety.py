"""Nothing on a load path unpickles, evaluates or executes: read off the syntax tree of every file outside tests/."""
import ast
import os

import pytest

from conftest import ROOT

def python_files(root):
    """Every Python file of the tree, wherever it may be moved: all but tests/, runs, data, hidden folders and environments."""
    found = []
    for folder, inner, files in os.walk(root):
        if folder == root:
            inner[:] = set(inner) - {"tests", "out", "data"}
        inner[:] = sorted(d for d in inner if not d.startswith(".") and not os.path.exists(os.path.join(folder, d, "pyvenv.cfg")))
        found += [os.path.relpath(os.path.join(folder, f), root) for f in files if f.endswith(".py")]
    return sorted(found)


FILES = python_files(ROOT)
WAYS_IN = {"torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.package", "numpy.load", "builtins.eval",
           "builtins.exec", "os.system", "yaml.load", "yaml.full_load", "yaml.unsafe_load"}
PICKLED = {"read_pickle", "trust_remote_code", "FileSystemReader", "FileSystemWriter"}              # DCP's own format has a pickle in it
UNPICKLE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}


def offences(source):
    """What a file must not contain, as a set of words."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names} & UNPICKLE
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & UNPICKLE
            found |= {f"{node.module}.{a.name}" for a in node.names} & WAYS_IN
            found |= {a.name for a in node.names} & PICKLED
        elif isinstance(node, ast.Name) and node.id in ("eval", "exec", "__import__"):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found |= {ast.unparse(node)} & WAYS_IN - {"numpy.load"}
            found |= {node.attr} & PICKLED
        elif isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "shell"):
            found.add(node.arg)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
            if not any(k.arg == "allow_pickle" for k in node.keywords):
                found.add("np.load without allow_pickle=False")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.add("allow_pickle")
        names = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
        if any(isinstance(name, ast.Constant) and name.value == "trust_remote_code" for name in names):
            found.add("trust_remote_code")                                  # a list of keys to be ignored may name it
    return found


@pytest.mark.parametrize("file", FILES)
def test_no_file_can_run_what_it_reads(file):
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        assert offences(f.read()) == set()


def test_a_file_is_read_wherever_it_lies(tmp_path):
    there = ["a.py", "room/b.py", "room/deep/c.py", "room/data/d.py"]
    for file in [*there, ".git/e.py", "tests/f.py", "out/run/g.py", "venv/lib/h.py", "room/i.txt"]:
        os.makedirs(tmp_path / os.path.dirname(file), exist_ok=True)
        (tmp_path / file).write_text("")
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    assert python_files(str(tmp_path)) == sorted(there)
    assert {"train.py", os.path.join("engine", "checkpoint.py"), os.path.join("configs", "ablations", "goldfish.py")} <= set(FILES)


@pytest.mark.parametrize("bad", ["import pickle", "from dill import loads", "torch.load(f)", "from torch import load", "x = eval", "exec(s)",
                                 "np.load(f)", "np.load(f, allow_pickle=True)", "m(x, trust_remote_code=False)", "m(**{'trust_remote_code': 1})",
                                 "how['trust_remote_code'] = True",
                                 "from numpy import load", "read_array(f, allow_pickle=x)",
                                 "torch.jit.load(f)", "from os import system", "yaml.unsafe_load(f)", "run(s, shell=True)",
                                 "dcp.FileSystemReader(f)", "from torch.distributed.checkpoint import FileSystemReader"])
def test_the_check_sees_each_way_in(bad):
    assert offences(bad)


def test_only_configs_and_reward_files_that_the_user_names_are_run():
    """Found by file name, so that a moved file keeps its leave and no other file gets it."""
    runs = set()
    for file in FILES:
        with open(os.path.join(ROOT, file), encoding="utf-8") as f:
            if {n.attr for n in ast.walk(ast.parse(f.read())) if isinstance(n, ast.Attribute)} & {"run_path", "run_module", "exec_module"}:
                runs.add(os.path.basename(file))
    assert "configurator.py" in runs and runs <= {"configurator.py", "references.py"}
