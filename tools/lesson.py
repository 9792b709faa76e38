"""
Learn Apertus by building it: the lessons of docs/learn.md. A lesson gives you a file of the project in which the bodies
of a few functions are missing. You write them, and the project's own tests check them. Lesson zero, plain, is to read.

$ python -m tools.lesson                        # the lessons
$ python -m tools.lesson goldfish               # makes lessons/goldfish/, and prints what to read and what to write
$ python -m tools.lesson goldfish --hint        # the next of three: where to look, the idea, the formula
$ python -m tools.lesson goldfish --check       # telling inputs, then the project's tests, both with your file
$ python -m tools.lesson goldfish --answer=0.3  # your answer to the question at its end
$ python -m tools.lesson goldfish --solution    # the difference between your file and the project's

tools/lessons.toml has the telling inputs, what each of them tests, the right results, and those of typical mistakes: by
them --check names a mistake, however you have written it.
"""

import sys

if __name__ == "__main__" and not __package__:
    print("lesson.py: start it from the project's root, python -m tools.lesson", file=sys.stderr)
    sys.exit(2)

import ast
import os
import shlex
import subprocess
import textwrap
import tomllib
from pathlib import Path

from configurator import ROOT

paths = []                  # name of a lesson; none lists all
hint = False                # print the next of its hints
check = False               # run its tests on your file
solution = False            # print the difference between your file and the project's
answer = None               # a number: your answer to the question on its sheet
out = "lessons"             # folder of your files

HINTS = ("where to look", "the idea", "the formula")


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


def run_python(arguments, folder, seconds=None):
    """
    Run Python with the file in a folder in place of the project's, print its output, and return its exit code.

    Without a result after that many seconds the exit code is 1: a loop in the file may not end.
    """
    # With -P Python finds modules in PYTHONPATH and not in the root, so those of the folder come first.
    env = os.environ | dict(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    try:
        return subprocess.run([sys.executable, "-P", *arguments], env=env, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        print(f"The next case has no result after {seconds} seconds: does a loop in your file end?")
        return 1


def begin(name, lesson):
    """Print what to read and write; on the first call make the folder, with the file to fill."""
    folder = Path(out, name)
    file = folder / lesson["file"]
    question = "\n".join(textwrap.fill(line, 118) for line in f"Question: {lesson['question']}".split("\n"))
    sheet = f"{lesson['sheet']}\n{question}\n\n    python -m tools.lesson {name} --answer=NUMBER\n"
    if not file.exists():
        write(file, empty_functions(Path(ROOT, lesson["file"]).read_text(), lesson["write"]))
        write(folder / "README.md", sheet)
    print(sheet)


def give_hint(lesson, sheet):
    """Print the next hint, and add it to the sheet, which thus counts them."""
    text = sheet.read_text()
    n = text.count("\nHint ")
    if n == 3:
        print(f"That was the last hint. All three are at the end of {sheet}; --solution shows the project's file")
        return
    line = f"Hint {n + 1} of 3, {HINTS[n]}: {lesson['hints'][n]}"
    sheet.write_text(f"{text}\n{line}\n")
    print(line)


def check_answer(lesson):
    """Print whether the answer is right, to 1 %, and return the exit code. ValueError: it is no number."""
    if type(answer) not in (int, float):
        raise ValueError(f"answer={answer}: want a number, such as --answer=0.25")
    if abs(answer - lesson["answer"]) > abs(lesson["answer"]) / 100:
        print(f"{answer:,} is too {'large' if answer > lesson['answer'] else 'small'}")
        for value, reason in lesson.get("mistaken", []):
            if abs(answer - value) <= value / 100:
                print(reason)
        return 1
    print(f"Right. {lesson['because']}")
    return 0


def check_file(name, lesson, folder):
    """Try the user's file on the cases of a lesson, then in the project's tests, and return the exit code."""
    source = Path(folder, lesson["file"]).read_text()
    missing = [function for function in lesson["write"] if f"NotImplementedError('write {function}')" in source]
    if missing:
        print(f"Not written yet: {', '.join(missing)}")
    if len(missing) == len(lesson["write"]):
        return 1
    code = run_python(["-c", "from tools.cases import main; main()", name], folder, seconds=60)
    if code or missing:
        print("Each line above says what its case tests. --hint has more")
        return 1
    # As a plugin the file is imported before the tests are.
    tests = shlex.split(lesson["tests"])
    code = run_python(["-m", "pytest", "-q", "--tb=short", "-p", lesson["module"], *tests], folder)
    if code:
        print("All cases are right, but a test of the project fails. Lines with E compare your result with the right "
              "one. If its name ends in [a row of a table], the comment above that table explains the rows")
    else:
        print(f"Passed. The experiment is in {folder}/README.md; --solution shows the project's file")
    return code


def main():
    lessons = tomllib.loads(Path(ROOT, "tools/lessons.toml").read_text())
    name = " ".join(paths)
    if not name:
        for name, lesson in lessons.items():
            print(f"{name:10} {lesson['title']}")
        print("\nBegin: python -m tools.lesson plain")
        return
    if name not in lessons:
        raise ValueError(f"{name}: no such lesson; there is {', '.join(lessons)}")
    lesson, folder = lessons[name], Path(out, name)
    if check and not lesson["write"]:
        raise ValueError(f"{name} has nothing to check: change a line, predict, run, and --answer=NUMBER")
    if (hint or check or solution) and not (folder / lesson["file"]).exists():
        raise ValueError(f"{folder} is not there yet: python -m tools.lesson {name} makes it")
    if answer is not None:
        sys.exit(check_answer(lesson))
    if solution:
        subprocess.run(["git", "diff", "--no-index", folder / lesson["file"], f"{ROOT}/{lesson['file']}"])
    elif hint:
        give_hint(lesson, folder / "README.md")
    elif check:
        sys.exit(check_file(name, lesson, folder))
    else:
        begin(name, lesson)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
