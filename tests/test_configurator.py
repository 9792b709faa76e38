"""configurator.py: flags, config files, errors and --help. The authority is the user's intention."""

import glob
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, script

import configurator
from configurator import configure, settings

SCRIPT = '''"""A script."""
from configurator import run
lr = 0.1             # how fast
steps = 10           # how long
NOT_ONE = 3
_nor = 3
def main(requested):
    if steps < 1:
        raise ValueError("a bug") if steps else KeyboardInterrupt
    print(lr, steps, shape.rank, *requested)
def faster(lr):
    lr = 2 * lr
if __name__ == "__main__":
    import shape
    run(main, globals(), vars(shape))
'''
SHAPE = '''"""More settings for the script."""
# no heading, since no setting follows

# the adapters
rank = 0             # of adapters
'''


def after(*argv, **more):
    """The globals of a script with these arguments."""
    namespace = dict(lr=0.1, steps=10, name="a", top_k=None, fast=False, betas=(0.9, 0.99), **more)
    configure([namespace], list(argv))
    return namespace


SET = """
    --lr=1             | lr    | 1.0
    --lr 3e-4          | lr    | 0.0003
    --steps=1_000      | steps | 1000
    --name=a=b         | name  | 'a=b'
    --name=5           | name  | '5'
    --name=            | name  | ''
    --top_k -1         | top_k | -1
    --top_k=None       | top_k | None
    --fast --name b    | fast  | True
    --fast=False       | fast  | False
    --betas=0.8,0.9    | betas | (0.8, 0.9)
    --betas=[0.8,0.9]  | betas | (0.8, 0.9)
"""


@pytest.mark.parametrize("row", SET.strip().splitlines())
def test_a_flag_sets_its_value_in_the_type_of_the_default(row):
    args, key, want = map(str.strip, row.split("|"))
    assert repr(after(*args.split())[key]) == want


WRONG = """
    --learning=1         | --learning: there is no setting 'learning'; --help lists them
    --step=1             | --step: there is no setting 'step', did you mean 'steps'?
    --learning_rate=1    | --learning_rate: there is no setting 'learning_rate', did you mean 'lr'?
    --lr=fast            | --lr=fast: want a number, such as 0.1
    --lr                 | --lr=True: want a number, such as 0.1
    --steps=1.5          | --steps=1.5: want a whole number, such as 10
    --steps=True         | --steps=True: want a whole number, such as 10
    --steps=open('.')    | --steps=open('.'): want a whole number, such as 10
    --fast=1             | --fast=1: want True or False, such as False
    --betas=1            | --betas=1: want a list, such as (0.9, 0.99)
    9b.py                | no config file '9b.py' here or in configs/, did you mean 8b, 3b?
    typo.py              | typo.py: there is no setting 'stepps', did you mean 'steps'?
    type.py              | type.py: steps=many: want a whole number, such as 10
    set.py               | set.py: betas={0.9}: want a list, such as (0.9, 0.99)
    annotated.py         | annotated.py, line 2: `lr: 0.001` sets nothing: want NAME = VALUE
    torn.py              | torn.py, line 2: SyntaxError: '(' was never closed
    name.py              | name.py, line 1: NameError: name 'x' is not defined
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_what_cannot_be_used_is_an_error_of_one_line(tmp_path, monkeypatch, row):
    """On the command line, or in a config file, which the error names."""
    monkeypatch.chdir(tmp_path)
    files = dict(typo="stepps = 3", type="steps = 'many'", set="betas = {0.9}", annotated="lr: float = 2\nlr: 1e-3")
    files |= dict(torn="\nlr = (1", name="lr = x")
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    arg, says = map(str.strip, row.split(" | "))
    with pytest.raises(ValueError) as error:
        after(arg)
    assert str(error.value) == says


def test_files_stack_and_flags_win_and_the_names_are_kept(tmp_path):
    (tmp_path / "one.py").write_text("import math\nlr = 1e-3\nsteps = int(math.exp(3))\ntop_k = 5\n_nor = 3\n")
    (tmp_path / "two.py").write_text("lr = 2\nname = 'c'\n")
    got = dict(lr=0.1, steps=10, name="a", top_k=None)
    requested = configure([got], ["--name=z", str(tmp_path / "one.py"), str(tmp_path / "two.py"), "--steps=7"])
    assert got == dict(lr=2.0, steps=7, name="z", top_k=5)
    assert set(requested) == {"top_k", "lr", "name", "steps"}


def test_every_config_file_fits_its_script_and_has_several_spellings():
    paths = glob.glob(f"{ROOT}/configs/**/*.py", recursive=True)
    assert len(paths) > 10
    for path in paths:
        begin, *_ = Path(path).name.split("_")
        script = importlib.import_module(dict(sft="posttrain.sft", qrpo="posttrain.qrpo").get(begin, "train"))
        more = [script.shape] if script.__name__ == "train" else []
        configure([dict(vars(space)) for space in (script, *more)], [path])
    for arg in ("8b", "configs/8b.py", "configs/8b"):
        assert os.path.samefile(configurator.config_file(arg), f"{ROOT}/configs/8b.py")
    assert configurator.config_file("configs/nowhere.py") is configurator.config_file("README.md") is None


def test_where_a_script_takes_paths_all_but_configs_are_paths():
    assert after("mine.py", "*.md", "--lr=1", paths=["a"])["paths"] == ["a", "mine.py", "*.md"]
    with pytest.raises(ValueError, match="configs/tiny.py: there is no setting 'out'"):
        after("configs/tiny.py", paths=[])


def test_a_flag_sets_its_setting_in_every_namespace_that_has_it():
    script, other, shape = dict(lr=1.0), dict(lr=2.0), SimpleNamespace(n_layer=4)
    configure([script, shape, other], ["--lr=3", "--n_layer=5"])
    assert script == other == dict(lr=3.0)
    assert settings(script, shape, other) == dict(lr=3.0, n_layer=5)


def test_a_script_that_builds_on_another_has_its_paths():
    script, other = dict(lr=1.0), dict(paths=["a"])
    configure([script, other], ["b", "c"])
    assert script == dict(lr=1.0) and other["paths"] == ["a", "b", "c"]


# -----------------------------------------------------------------------------
# run


@pytest.fixture
def call(tmp_path):
    """call(ARGS): the exit code, stdout and stderr of `python script.py ARGS`."""
    for name, text in dict(script=SCRIPT, shape=SHAPE, config="rank = 4\nsteps = 3\n").items():
        (tmp_path / f"{name}.py").write_text(text)

    def call(*args):
        command = [sys.executable, "script.py", *args]
        env = os.environ | dict(PYTHONPATH=ROOT)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    return call


def test_a_script_runs_with_its_flags_and_says_its_errors_in_one_line_with_code_2(call):
    """
    main() gets the names that the user has set. Only the project's files raise such errors: one from another file, like
    this script, keeps its traceback.
    """
    assert call("--lr=1") == (0, "1.0 10 0 lr\n", "")
    assert call("--lr=1", "config.py") == (0, "1.0 3 4 rank steps lr\n", "")
    assert call("--steps=many") == (2, "", "script.py: --steps=many: want a whole number, such as 10\n")
    assert call("--steps=0") == (130, "", "")
    code, _, said = call("--steps=-1")
    assert code == 1 and said.startswith("Traceback") and said.endswith("ValueError: a bug\n")


def test_help_is_the_docstring_the_headings_and_a_line_for_each_setting(call):
    code, shown, _ = call("--steps=3", "--help")
    assert code == 0 and shown == call("-h")[1]
    assert [" ".join(line.split()) for line in shown.splitlines()] == [
        "A script.",
        "",
        "settings:",
        "--lr=0.1 how fast",
        "--steps=10 how long",
        "the adapters",
        "--rank=0 of adapters",
    ]


def test_help_of_an_object_has_the_comments_of_its_class():
    assert re.search(r"\n  --activation='xielu' .*swiglu", script("train.py", "--help").stdout)


def test_help_whose_reader_has_left_ends_quietly():
    """As in `--help | head -1`, where stdout is a pipe without a reader."""
    command = f"{sys.executable} goldfish.py --help | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")
