"""Nothing on a load path unpickles, evaluates or executes: read off the syntax tree of every file outside tests/."""
import ast
import os

import pytest

from conftest import ROOT

FILES = sorted(os.path.relpath(os.path.join(folder, f), ROOT) for folder, _, files in os.walk(ROOT) for f in files
               if f.endswith(".py") and os.path.relpath(folder, ROOT).split(os.sep)[0] in (".", "configs"))
UNPICKLE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}


def offences(source):
    """What a file must not contain, as a set of words."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names} & UNPICKLE
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & UNPICKLE
            if node.module == "torch" and any(a.name == "load" for a in node.names):
                found.add("torch.load")
        elif isinstance(node, ast.Name) and node.id in ("eval", "exec", "__import__"):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else None
            if (owner, node.attr) in {("torch", "load"), ("torch", "save"), ("builtins", "eval"), ("builtins", "exec"), ("yaml", "load")}:
                found.add(f"{owner}.{node.attr}")
            found |= {node.attr} & {"read_pickle", "trust_remote_code"}
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found.add("trust_remote_code")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
            if not any(k.arg == "allow_pickle" and isinstance(k.value, ast.Constant) and k.value.value is False for k in node.keywords):
                found.add("np.load without allow_pickle=False")
        if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
            found.add("trust_remote_code")
    return found


@pytest.mark.parametrize("file", FILES)
def test_no_file_can_run_what_it_reads(file):
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        assert offences(f.read()) == set()


@pytest.mark.parametrize("bad", ["import pickle", "from dill import loads", "torch.load(f)", "from torch import load", "x = eval", "exec(s)",
                                 "np.load(f)", "np.load(f, allow_pickle=True)", "m(x, trust_remote_code=False)", "m(**{'trust_remote_code': 1})"])
def test_the_check_sees_each_way_in(bad):
    assert offences(bad)


def test_only_configs_and_reward_files_that_the_user_names_are_run():
    runs = set()
    for file in FILES:
        with open(os.path.join(ROOT, file), encoding="utf-8") as f:
            if {n.attr for n in ast.walk(ast.parse(f.read())) if isinstance(n, ast.Attribute)} & {"run_path", "run_module", "exec_module"}:
                runs.add(file)
    assert "configurator.py" in runs and runs <= {"configurator.py", "ablate.py", "qrpo.py"}
