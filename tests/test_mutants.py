"""The runner of mutants: each kind of edit on ten lines, and what it says of a tiny project with tests that hold half of it."""
import os
import shutil
import subprocess
import sys

import pytest

import mutate

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = b'''"""A file. 1 < 2"""
setting = 3

def f(a, b: int = 0, *, deep=True):
    """min(a, b)"""
    if a < b and not deep:
        a -= 1
    print("never 1 here", a + b)
    seen.append(max(a, b))
    return g(a, b, order=2) if a is None else -a ** 2
'''


def lines_after_edits():
    found = {}
    for start, end, new in mutate.edits(mutate.ast.parse(SOURCE), SOURCE):
        m = mutate.planted("f.py", SOURCE, start, end, new)
        found.setdefault(m.lines[0], set()).add(m.new)
        assert m.source.count(b"\n") == SOURCE.count(b"\n")                      # other lines keep their numbers
    return found


def test_every_kind_of_edit_and_nothing_that_nobody_claims():
    assert lines_after_edits() == {
        4: {"def f(a, b: int = 1, *, deep=True):", "def f(a, b: int = 0, *, deep=False):"},
        6: {"if a <= b and not deep:", "if a < b or not deep:", "if a < b and deep:"},
        7: {"a += 1", "a -= 0", "pass"},
        9: {"pass", "seen.append(min(a, b))"},
        10: {"return g(b, a, order=2) if a is None else -a ** 2", "return g(a, b) if a is None else -a ** 2",
             "return g(a, b, order=3) if a is None else -a ** 2", "return g(a, b, order=2) if a is not None else -a ** 2",
             "return g(a, b, order=2) if not (a is None) else -a ** 2", "return g(a, b, order=2) if a is None else a ** 2",
             "return g(a, b, order=2) if a is None else -a * 2", "return g(a, b, order=2) if a is None else -a ** 3"}}


def test_the_choice_is_a_function_of_what_the_lines_say():
    with open(os.path.join(os.path.dirname(HERE), "schedule.py"), "rb") as f:
        source = f.read()
    one, moved = (mutate.generated("schedule.py", text) for text in (source, b"\n\n# moved\n" + source))
    assert len(one) >= 4 and [(m.old, m.new) for m in one] == [(m.old, m.new) for m in moved]
    assert len({line for m in one for line in m.lines}) == sum(len(m.lines) for m in one)       # one a line


def test_a_mistake_by_hand_must_be_found_once():
    mistakes = [("f.py", "a < b", "a > b", ""), ("f.py", "no such text", "", ""), ("f.py", "a, b", "b, a", ""), ("other.py", "x", "y", "")]
    found, stale = mutate.by_hand("f.py", SOURCE, mistakes)
    assert [m.new for m in found] == ["if a > b and not deep:"]
    assert [old for _, old in stale] == ["no such text", "a, b"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose tests hold one of its two functions; asked once."""
    root = tmp_path_factory.mktemp("project")
    os.mkdir(root / "tests")
    for file in ("mutants.py", "mutate.py"):
        shutil.copy(os.path.join(HERE, file), root / "tests")
    (root / "a.py").write_text("def double(x):\n    return 2 * x\n\n\ndef half(x):\n    while x > 9:\n        x -= 1\n    return x / 2\n")
    (root / "tests" / "conftest.py").write_text("import os, sys\nsys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))\n")
    (root / "tests" / "test_a.py").write_text(
        "import a\ndef test_broken(): assert False\ndef test_half(): a.half(10)\ndef test_double(): assert a.double(3) == 6\n")
    (root / "tests" / "mutants_by_hand.py").write_text(
        "MISTAKES = [('a.py', '2 * x', '3 * x', ''), ('a.py', 'x / 2', 'x / 3', ''), ('a.py', 'x > 9', 'x > 10', ''), ('a.py', 'gone', '', '')]\n"
        "HARMLESS = [('a.py', 'while x > 9:', 'while x > 10:', 'who cares')]\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


def ask(root, *args):
    code = "import sys; sys.path.insert(0, 'tests'); import mutants; mutants.warm_up = lambda: None; mutants.main()"
    command = [sys.executable, "-c", code, "--rate=0", "--jobs=2", "--table=table.md", *args]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, (root / "table.md").read_text()


def test_what_no_test_notices_is_printed_and_a_second_run_asks_nothing_again(project):
    said, table = ask(project)
    assert "stale, to be found exactly once in a.py: 'gone'" in said
    assert "left out, fails without a mistake: tests/test_a.py::test_broken" in said
    assert "| a.py | 2 | 1 | 1 | 50 | 1 |" in table
    assert "- a.py:8 `return x / 2` -> `return x / 3`" in table
    assert "- a.py:6 `while x > 9:` -> `while x > 10:`: who cares" in table
    answers = project / "out" / "mutants" / "answers.jsonl"
    before = answers.read_bytes()
    assert before.count(b"\n") == 3 and ask(project)[1] == table and answers.read_bytes() == before
    assert (project / "a.py").read_text().startswith("def double(x):\n    return 2 * x")        # the tree itself is never touched

    (project / "a.py").write_text((project / "a.py").read_text() + "\n")
    ask(project, "--files=a.py")
    assert answers.read_bytes().count(b"\n") == 6          # a changed file is asked again
