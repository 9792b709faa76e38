"""configurator.py: what a user may type, and what the answer is. The authority is the user's intention."""
import glob
import importlib
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from configurator import configure, settings

SCRIPT = '''"""A script."""
from configurator import run
lr = 0.1             # how fast
steps = 10           # how long
name = "a"           # called
top_k = None         # or a number
fast = False         # or slow
betas = (0.9, 0.99)  # two
def main():
    print(lr, steps, name, top_k, fast, betas)
if __name__ == "__main__":
    run(main, globals())
'''


def defaults():
    return dict(lr=0.1, steps=10, name="a", top_k=None, fast=False, betas=(0.9, 0.99), __file__=__file__)


def after(*argv, **more):
    namespace = {**defaults(), **more}
    configure(namespace, list(argv))
    return namespace


@pytest.mark.parametrize("arg, key, want", [
    ("--lr=1", "lr", 1.0), ("--lr=3e-4", "lr", 3e-4), ("--steps=1_000", "steps", 1000),
    ("--name=a=b", "name", "a=b"), ("--name=5", "name", "5"), ("--name=", "name", ""),
    ("--top_k=5", "top_k", 5), ("--top_k=None", "top_k", None),
    ("--fast", "fast", True), ("--fast=False", "fast", False),
    ("--betas=[0.8,0.9]", "betas", (0.8, 0.9)), ("--betas=0.8,0.9", "betas", (0.8, 0.9))])
def test_a_flag_sets_its_value_in_the_kind_of_the_default(arg, key, want):
    got = after(arg)[key]
    assert got == want and type(got) is type(want)


@pytest.mark.parametrize("arg, says", [
    ("--learning=1", "no setting 'learning'; --help lists them"),
    ("--step=1", "did you mean 'steps'"),
    ("--lr=fast", "lr wants float like 0.1, got 'fast'"),
    ("--steps=1.5", "steps wants int like 10, got 1.5"),
    ("--fast=1", "True or False"),
    ("--steps=True", "steps wants int"), ("--steps=None", "steps wants int"),
    ("--steps=__import__('os').getcwd()", "steps wants int"),
    ("--lr", "lr wants float like 0.1, got True"),
    ("nonsense", "no config file 'nonsense'")])
def test_what_cannot_be_used_is_refused_in_one_line(arg, says):
    with pytest.raises(ValueError, match=".*".join(says.split("'"))) as e:
        after(arg)
    assert "\n" not in str(e.value)


def lengthy(*argv):
    """As after(), of a script that has the settings of train.py."""
    import train
    return configure({**vars(train)}, ["tiny", *argv])


@pytest.mark.parametrize("arg, want", [
    ("--learning_rate=1", "lr"), ("--min_lr=1", "lr_floor"), ("--batch=3", "batch_size"),
    ("--warmup_steps=3", "warmup_samples"), ("--eval_interval=3", "eval_every"), ("--clip=1", "grad_clip"),
    ("--out_dir=x", "out"), ("--n_layers=2", "n_layer"), ("--alpha_warm_up=2", "alpha_warmup"),
    ("--compiled", "compile")])
def test_the_name_that_others_give_a_setting_proposes_ours(arg, want):
    with pytest.raises(ValueError, match=f"did you mean '{want}'"):
        lengthy(arg)


def test_a_name_that_shares_a_whole_word_proposes_those_that_have_it():
    with pytest.raises(ValueError, match="did you mean 'total_samples' or 'warmup_samples' or 'decay_samples'"):
        lengthy("--samples=3")


def test_steps_is_never_taken_for_eps():
    """They share three letters of five: --steps=20 was answered with 'eps'."""
    with pytest.raises(ValueError) as e:
        lengthy("--steps")
    assert "'eps'" not in str(e.value) and "total_samples = steps * batch_size" in str(e.value)


@pytest.mark.parametrize("argv", [
    ["--steps=20"],
    ["--max_iters", "20"],
    ["--max_steps=20", "--batch_size=4"],
    ["--batch_size=4", "--iters=20"]])
def test_a_number_of_steps_is_answered_with_the_flags_that_make_it(argv):
    """The batch is that of the command line, wherever it stands, and the proposed flags can be used as they are."""
    batch = 4 if "--batch_size=4" in argv else 8
    with pytest.raises(ValueError, match=f"20 steps of batch_size={batch} are --total_samples={20 * batch} ") as e:
        lengthy(*argv)
    flags = str(e.value).split(" are ")[1].split()
    got = lengthy(*flags, f"--batch_size={batch}")
    assert got["warmup_samples"] + got["decay_samples"] <= got["total_samples"] == 20 * batch


def test_epochs_are_answered_with_what_counts_instead():
    with pytest.raises(ValueError, match="length is counted in samples: total_samples = epochs . windows of the data"):
        lengthy("--epochs=3")


def test_a_value_may_follow_its_flag_after_a_space():
    got = after("--lr", "3e-4", "--fast", "--name", "b", "--top_k", "-1")
    assert (got["lr"], got["fast"], got["name"], got["top_k"]) == (3e-4, True, "b", -1)


def test_files_stack_and_flags_win(tmp_path):
    (tmp_path / "one.py").write_text("import math\nlr = 1e-3\nsteps = int(math.exp(3))\n_private = 3\n")
    (tmp_path / "two.py").write_text("lr = 2\n")
    got = after("--name=z", str(tmp_path / "one.py"), str(tmp_path / "two.py"), "--steps=7")
    assert (got["lr"], got["steps"], got["name"]) == (2.0, 7, "z")


def test_a_typo_in_a_file_is_an_error_with_a_suggestion(tmp_path):
    (tmp_path / "typo.py").write_text("stepps = 3\n")
    with pytest.raises(ValueError, match="typo.py: there is no setting 'stepps', did you mean 'steps'"):
        after(str(tmp_path / "typo.py"))


def test_a_wrong_kind_in_a_file_is_an_error(tmp_path):
    (tmp_path / "kind.py").write_text("steps = 'many'\n")
    with pytest.raises(ValueError, match="kind.py: steps wants int"):
        after(str(tmp_path / "kind.py"))


@pytest.mark.parametrize("arg", ["8b", "config/8b.py", "configs/8b.py", "configs/8b"])
def test_a_config_has_three_spellings(arg):
    import train
    namespace = {**vars(train)}
    assert configure(namespace, [arg])["n_layer"] == 32 and namespace["batch_ramp_at"] == 1_718_272_000


def test_a_file_is_told_the_settings_before_it_and_sets_none_of_them(tmp_path):
    """Those of the files before it, the defaults of the rest; flags come later."""
    (tmp_path / "one.py").write_text("lr = 2.0\n")
    (tmp_path / "two.py").write_text("steps = 3 if _before['lr'] == 2 and _before['steps'] == 10 else 4\n")
    got = after("--lr=5", str(tmp_path / "one.py"), str(tmp_path / "two.py"))
    # The flag is said last, although the first file had set it too.
    assert (got["steps"], got["lr"], list(got["_asked"])) == (3, 5.0, ["steps", "lr"])


def test_every_config_file_fits_its_script():
    paths = glob.glob(os.path.join(ROOT, "configs", "**", "*.py"), recursive=True)
    assert len(paths) > 10
    for path in paths:
        begin = os.path.basename(path).partition("_")[0]
        name = dict(sft="posttrain.sft", qrpo="posttrain.qrpo").get(begin, "train")
        with open(path, encoding="utf-8") as f:
            if "\nstudy = " in f.read():
                name = "studies.ablate"
        configure({**vars(importlib.import_module(name))}, [path])


def test_other_arguments_are_paths_where_a_script_takes_paths(tmp_path):
    (tmp_path / "text.py").write_text("nonsense = 1\n")
    got = after(str(tmp_path / "text.py"), "*.md", "--lr=1", paths=[])
    assert got["paths"] == [str(tmp_path / "text.py"), "*.md"]


@pytest.fixture
def call(tmp_path):
    """call(ARGS): `python script.py ARGS`, as a process of its own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": ROOT}

    def call(*args):
        return subprocess.run([sys.executable, tmp_path / "script.py", *args], capture_output=True, text=True, env=env)
    return call


def test_a_script_runs_with_its_flags(call):
    assert call("--lr=1").stdout == "1.0 10 a None False (0.9, 0.99)\n"


def test_a_script_says_its_errors_in_one_line_and_leaves_with_2(call):
    bad = call("--stepz=3")
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr == "script.py: --stepz: there is no setting 'stepz', did you mean 'steps'?\n"


def test_help_is_the_docstring_and_a_line_for_each_setting(call):
    done = call("--help")
    assert done.returncode == 0 and done.stdout.startswith("A script.\n")
    assert "--steps=10" in done.stdout and "how long" in done.stdout


def test_settings_are_plain_lower_case_globals():
    assert settings(dict(a=1, _b=2, C=3, d=print, e=sys, f=None)) == dict(a=1, f=None)
