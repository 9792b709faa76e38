"""
Learn Apertus by building it: the lessons of docs/learn.md. A lesson gives you a file of the project in which the bodies
of a few functions are missing. You write them, and the project's own tests check them.

$ python -m tools.lesson                        # the lessons
$ python -m tools.lesson goldfish               # makes lessons/goldfish/, and prints what to read and what to write
$ python -m tools.lesson goldfish --hint        # the next of three hints
$ python -m tools.lesson goldfish --check       # the tests of the lesson, with your file in place of the project's
$ python -m tools.lesson goldfish --solution    # the difference between your file and the project's

If tests fail, --check runs them again on the project's file with each of the typical mistakes in tools/lessons.toml,
and names the mistake with which they fail as they do on your file.
"""

import inspect
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from configurator import ROOT

paths = []  # name of a lesson; none lists all
hint = False  # print the next of its hints
check = False  # run its tests on your file
solution = False  # print the difference between your file and the project's
out = "lessons"  # folder of your files


def emptied(source, module, names):
    """The source of a module without the bodies of some functions, NAME or CLASS.NAME. Their docstrings stay."""
    for name in names:
        block = inspect.getsource(pkgutil.resolve_name(f"{module}:{name}"))
        # From the signature, which is indented like its decorators, to the docstring, if there is one.
        head = re.match(r'(?s)( *).*?\):\n( +""".*?"""\n)?', block)
        source = source.replace(block, f"{head[0]}{head[1]}    raise NotImplementedError('write {name}')\n")
    return source


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tested(folder, lesson):
    """
    Run the tests of a lesson with the file in a folder in place of the project's.

    Returns pytest's exit code, its output, and the set of its failures and error lines, by which two files compare.
    """
    # As a plugin the file is imported before the tests are; with -P Python finds it in PYTHONPATH, not in the root.
    command = f"'{sys.executable}' -P -m pytest -q --tb=short -rpf -p {lesson['module']} {lesson['tests']}"
    env = os.environ | dict(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    done = subprocess.run(shlex.split(command), env=env, capture_output=True, text=True)
    output = done.stdout + done.stderr
    return done.returncode, output, set(re.findall(r"(?m)^(?:FAILED \S+|E .{,42})", output))


def main():
    lessons = tomllib.loads(Path(ROOT, "tools/lessons.toml").read_text())
    name = " ".join(paths)
    if not name:
        for name, lesson in lessons.items():
            print(f"{name:10} {lesson['title']}")
        return
    if name not in lessons:
        raise ValueError(f"{name}: no such lesson; there is {', '.join(lessons)}")
    lesson = lessons[name]
    file = lesson["file"]
    source = Path(ROOT, file).read_text()
    folder = Path(out, name)
    mine, sheet = folder / file, folder / "README.md"
    if (hint or check or solution) and not mine.exists():
        raise ValueError(f"{folder} is not there yet: python -m tools.lesson {name} makes it")
    if solution:
        subprocess.run(["git", "diff", "--no-index", mine, f"{ROOT}/{file}"])
    elif hint:
        text = sheet.read_text()
        given = text.count("\nHint ")
        if given == 3:
            return print("That was the last hint: --solution shows the project's file")
        words = f"Hint {given + 1} of 3: {lesson['hints'][given]}"
        sheet.write_text(f"{text}\n{words}\n")
        print(words)
    elif check:
        code, output, ours = tested(folder, lesson)
        print(*output.splitlines()[-30:], sep="\n")
        says = "No typical mistake fails like this: --hint has more"
        for mistake in tqdm(lesson["mistakes"], "typical mistakes", leave=False) if ours else ():
            with TemporaryDirectory() as wrong:
                write(Path(wrong, file), source.replace(mistake["old"], mistake["new"]))
                *_, theirs = tested(wrong, lesson)
            if len(ours & theirs) > 4 * len(ours ^ theirs):
                says = f"This looks like a typical mistake: {mistake['says']}"
                break
        print(says if code else f"Passed. The experiment is in {sheet}; --solution shows the project's file")
        sys.exit(code)
    else:
        if not mine.exists():
            write(mine, emptied(source, lesson["module"], lesson["write"]))
            write(sheet, lesson["sheet"])
        print(lesson["sheet"])
