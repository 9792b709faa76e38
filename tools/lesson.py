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

import sys

if __name__ == "__main__" and not __package__:
    print("lesson.py: start it from the project's root, python -m tools.lesson", file=sys.stderr)
    sys.exit(2)

import ast
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from configurator import ROOT

paths = []                  # name of a lesson; none lists all
hint = False                # print the next of its hints
check = False               # run its tests on your file
solution = False            # print the difference between your file and the project's
out = "lessons"             # folder of your files


def find_function(tree, name):
    """The definition of a function, NAME or CLASS.NAME, in the syntax tree of a module."""
    for part in name.split("."):
        tree = next(node for node in tree.body if getattr(node, "name", None) == part)
    return tree


def empty_functions(source, names):
    """The source of a module without the bodies of some functions, NAME or CLASS.NAME. Their docstrings stay."""
    for name in names:
        function = find_function(ast.parse(source), name)
        first = function.body[0]
        lines = source.splitlines(keepends=True)
        begin = first.end_lineno if ast.get_docstring(function) else first.lineno - 1
        while lines[begin - 1].lstrip().startswith("#"):   # a comment about the body goes with it
            begin -= 1
        missing = f"{' ' * first.col_offset}raise NotImplementedError('write {name}')\n"
        source = "".join([*lines[:begin], missing, *lines[function.end_lineno:]])
    return source


def write(path, text):
    """Write a text file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def run_tests(folder, lesson):
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


def begin(name, lesson):
    """Print what to read and write; on the first call make the folder, with the file to fill."""
    folder = Path(out, name)
    file = folder / lesson["file"]
    if not file.exists():
        write(file, empty_functions(Path(ROOT, lesson["file"]).read_text(), lesson["write"]))
        write(folder / "README.md", lesson["sheet"])
    print(lesson["sheet"])


def give_hint(lesson, sheet):
    """Print the next hint, and add it to the sheet, which thus counts them."""
    text = sheet.read_text()
    n = text.count("\nHint ")
    if n == 3:
        print("That was the last hint: --solution shows the project's file")
        return
    line = f"Hint {n + 1} of 3: {lesson['hints'][n]}"
    sheet.write_text(f"{text}\n{line}\n")
    print(line)


def check_file(lesson, folder):
    """Run the tests of a lesson on the user's file, print their end and a verdict, and return their exit code."""
    code, output, failures = run_tests(folder, lesson)
    print(*output.splitlines()[-30:], sep="\n")
    if code == 0:
        print(f"Passed. The experiment is in {folder}/README.md; --solution shows the project's file")
    elif mistake := find_mistake(lesson, failures):
        print(f"This looks like a typical mistake: {mistake['says']}")
    else:
        print("No typical mistake fails like this: --hint has more")
    return code


def find_mistake(lesson, failures):
    """The first typical mistake with which the project's file fails as the user's does, or None."""
    source = Path(ROOT, lesson["file"]).read_text()
    for mistake in tqdm(lesson["mistakes"], "typical mistakes", leave=False) if failures else ():
        with TemporaryDirectory() as folder:
            write(Path(folder, lesson["file"]), source.replace(mistake["old"], mistake["new"]))
            *_, same = run_tests(folder, lesson)
        if len(failures & same) > 4 * len(failures ^ same):
            return mistake
    return None


def main():
    lessons = tomllib.loads(Path(ROOT, "tools/lessons.toml").read_text())
    name = " ".join(paths)
    if not name:
        for name, lesson in lessons.items():
            print(f"{name:10} {lesson['title']}")
        return
    if name not in lessons:
        raise ValueError(f"{name}: no such lesson; there is {', '.join(lessons)}")
    lesson, folder = lessons[name], Path(out, name)
    if (hint or check or solution) and not (folder / lesson["file"]).exists():
        raise ValueError(f"{folder} is not there yet: python -m tools.lesson {name} makes it")
    if solution:
        subprocess.run(["git", "diff", "--no-index", folder / lesson["file"], f"{ROOT}/{lesson['file']}"])
    elif hint:
        give_hint(lesson, folder / "README.md")
    elif check:
        sys.exit(check_file(lesson, folder))
    else:
        begin(name, lesson)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
