"""Every command of the README is run: as it stands there, with more arguments behind it that make it small (later ones win)."""
import os
import re
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT, script

with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
    README = f.read()
LINES = [line.partition("#")[0].strip() for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]
COMMANDS = [line for line in LINES if line]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small corpus, a run in bytes, its export, and the files that the README's reader would have."""
    root = tmp_path_factory.mktemp("readme")
    (root / "my_texts").mkdir()
    for i in range(12):
        (root / "my_texts" / f"{i}.txt").write_text(f"The text number {i} is about nothing. " * 40, encoding="utf-8")
    assert script("prepare.py", root / "my_texts", f"--out={root / 'data'}", "--tokenizer=byte", "--val_share=0.2").returncode == 0
    done = script("train.py", "configs/tiny.py", f"--data={root / 'data'}", f"--out={root / 'run'}", "--total_samples=32", "--decay_samples=8")
    assert done.returncode == 0, done.stderr
    return root


def small(command, root):
    """The arguments that make a README command small, or None for a command that needs none."""
    tiny = ["configs/tiny.py", f"--data={root}/data", "--total_samples=32", "--decay_samples=8"]
    if command.startswith("python train.py"):
        if "--resume" in command:
            return [*tiny, f"--out={root}/run", "--total_samples=40"]
        return [*tiny, f"--out={root}/{abs(hash(command))}"]
    if command.startswith("python prepare.py"):
        return [f"--out={root}/{abs(hash(command))}"]
    if command.startswith("python sample.py"):
        return [f"--init_from={root}/run", "--max_new_tokens=8", "--dtype=float32"]
    if command.startswith("python convert.py"):
        return [f"--load={root}/run", f"--save={root}/hf"]
    if command.startswith("python plot.py"):
        return [f"--out={root}/plot.png"]
    return []


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, place):
    """It runs, and nothing of it goes outside the test's own folder."""
    words = shlex.split(command)
    if words[0] == "python":
        args = [{"my_texts/": f"{place}/my_texts/", "notes.md": os.path.join(ROOT, "README.md"), "book.jsonl.gz": f"{place}/my_texts/1.txt",
                 "out/laptop": f"{place}/run", "out/swiglu": f"{place}/run", "out/adamw": f"{place}/run", "data/stdlib": f"{place}/data"}.get(w, w)
                for w in words[2:]]
        done = script(words[1], *args, *small(command, place), stdin="")
    elif words[0] == "make" and words[1] != "test":        # -o: take the environment that these tests run in for ready
        more = [f"PY={sys.executable}", f"RUN={place}/made", f"DATA={place}/data", "CONFIG=configs/laptop.py configs/tiny.py --total_samples=32 --decay_samples=8"]
        done = subprocess.run([*words, "-o", ".venv/ready", *more], cwd=ROOT, capture_output=True, text=True)
    elif words[0] == "make":                               # this very suite: what would be run is shown, not run again
        done = subprocess.run([*words, "-n", "-o", ".venv/ready"], cwd=ROOT, capture_output=True, text=True)
        assert "-m pytest" in done.stdout
    else:                                                  # pip: everything is there already, so nothing is fetched
        done = subprocess.run([sys.executable, "-m", *words, "--quiet", "--disable-pip-version-check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_local_file_and_test_that_the_readme_names_exists():
    for name in re.findall(r"`([\w/]+\.(?:py|md|txt|png))`|\]\(([\w/]+\.\w+)\)", README):
        name = name[0] or name[1]
        assert any(os.path.exists(os.path.join(ROOT, folder, name)) for folder in ("", "tests")), name
    tests = {f: open(os.path.join(ROOT, "tests", f), encoding="utf-8").read() for f in os.listdir(os.path.join(ROOT, "tests")) if f.endswith(".py")}
    for file, test, another in re.findall(r"`(test_\w+\.py)::(test_\w+)`(?:, `::(test_\w+)`)?", README):
        assert all(f"def {name}(" in tests[file] for name in (test, another) if name), (file, test, another)


def test_the_readme_is_short_enough_to_be_read():
    assert README.count("\n") <= 250
