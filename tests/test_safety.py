"""Nothing on a load path unpickles, evaluates or executes: read off the syntax tree of every file outside tests/."""
import ast
import glob
import os
import re
import subprocess

import pytest

from conftest import ROOT


def read(file):
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        return f.read()


# What git knows of, and what is new: runs, data and environments are ignored.
LIST = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
LISTED = subprocess.run(LIST, cwd=ROOT, capture_output=True, text=True).stdout.split()
PATHS = LISTED or glob.glob("**/*.py", root_dir=ROOT, recursive=True)
OURS = [path for path in PATHS if not path.startswith(("tests/", "out/", "data/"))]
FILES = [path for path in OURS if os.path.exists(f"{ROOT}/{path}")]
WAYS_IN = set(
    """
    torch.load torch.save torch.jit.load torch.hub.load torch.package numpy.load builtins.eval builtins.exec os.system
    yaml.load yaml.full_load yaml.unsafe_load
    """.split()
)
# DCP's own format, which the readers and writers of file systems use, has a pickle in it.
PICKLED = {"read_pickle", "trust_remote_code", "FileSystemReader", "FileSystemWriter"}
UNPICKLE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}


def offences(source):
    """What a file must not contain, as a set of words."""
    return {word for node in ast.walk(ast.parse(source)) for word in offences_of(node)}


def offences_of(node):
    """The offences of one node of the syntax tree, those below it aside."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names} & UNPICKLE
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        names = {alias.name for alias in node.names}
        in_full = {f"{module}.{name}" for name in names}
        return {module.split(".")[0]} & UNPICKLE | in_full & WAYS_IN | names & PICKLED
    if isinstance(node, ast.Name):
        return {node.id} & {"eval", "exec", "__import__"}
    if isinstance(node, ast.Attribute):
        # numpy.load is harmless without pickles: below, as a call.
        return {ast.unparse(node)} & WAYS_IN - {"numpy.load"} | {node.attr} & PICKLED
    if isinstance(node, ast.keyword):
        pickles = node.arg == "allow_pickle" and ast.unparse(node.value) != "False"
        return {node.arg} & {"trust_remote_code", "shell"} | ({"allow_pickle"} if pickles else set())
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
        said = any(keyword.arg == "allow_pickle" for keyword in node.keywords)
        return set() if said else {"np.load without allow_pickle=False"}
    # As a dict's key or an index; a list of keys to be ignored may name it.
    keys = node.keys if isinstance(node, ast.Dict) else []
    if isinstance(node, ast.Subscript):
        keys = [node.slice]
    return {key.value for key in keys if isinstance(key, ast.Constant)} & {"trust_remote_code"}


def test_no_file_can_run_what_it_reads():
    assert {"train.py", "engine/checkpoint.py", "configs/ablations.py"} <= set(FILES)
    assert not {file: found for file in FILES if (found := offences(read(file)))}


BAD = """
    import pickle
    from dill import loads
    torch.load(f)
    from torch import load
    x = eval
    exec(s)
    np.load(f)
    np.load(f, allow_pickle=True)
    m(x, trust_remote_code=False)
    m(**{'trust_remote_code': 1})
    how['trust_remote_code'] = True
    from numpy import load
    read_array(f, allow_pickle=x)
    torch.jit.load(f)
    from os import system
    yaml.unsafe_load(f)
    run(s, shell=True)
    dcp.FileSystemReader(f)
    from torch.distributed.checkpoint import FileSystemReader
""".strip().splitlines()


@pytest.mark.parametrize("bad", BAD)
def test_the_check_sees_each_way_in(bad):
    assert offences(bad.strip())


def test_only_configs_rewards_and_scores_that_the_user_names_are_run():
    """Found by file name, so that a moved file keeps its leave and no other file gets it."""
    runs = {os.path.basename(file) for file in FILES if re.search("run_path|run_module|exec_module", read(file))}
    assert "configurator.py" in runs and runs <= {"configurator.py", "references.py", "rules.py"}
