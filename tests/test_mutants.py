"""The runner of mutants: each kind of edit on ten lines, and what it says of a project whose tests hold half of it."""
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
        # Other lines keep their numbers.
        assert m.source.count(b"\n") == SOURCE.count(b"\n")
    return found


def test_every_kind_of_edit_and_nothing_that_nobody_claims():
    assert lines_after_edits() == {
        4: {"def f(a, b: int = 1, *, deep=True):", "def f(a, b: int = 0, *, deep=False):"},
        6: {"if a <= b and not deep:", "if a < b or not deep:", "if a < b and deep:"},
        7: {"a += 1", "a -= 0", "pass"},
        9: {"pass", "seen.append(min(a, b))"},
        10: {
            "return g(b, a, order=2) if a is None else -a ** 2",
            "return g(a, b) if a is None else -a ** 2",
            "return g(a, b, order=3) if a is None else -a ** 2",
            "return g(a, b, order=2) if a is not None else -a ** 2",
            "return g(a, b, order=2) if not (a is None) else -a ** 2",
            "return g(a, b, order=2) if a is None else a ** 2",
            "return g(a, b, order=2) if a is None else -a * 2",
            "return g(a, b, order=2) if a is None else -a ** 3",
        },
    }


def test_the_choice_is_a_function_of_what_the_lines_say():
    with open(os.path.join(os.path.dirname(HERE), "schedule.py"), "rb") as f:
        source = f.read()
    one = mutate.generated("schedule.py", source)
    moved = mutate.generated("schedule.py", b"\n\n# moved\n" + source)
    assert len(one) >= 4
    # Three lines more may be one mutant more, behind the same ones.
    assert [(m.old, m.new) for m in one] == [(m.old, m.new) for m in moved[:len(one)]]


def test_no_line_has_two_generated_mistakes():
    with open(os.path.join(os.path.dirname(HERE), "schedule.py"), "rb") as f:
        chosen = mutate.generated("schedule.py", f.read())
    lines = [line for m in chosen for line in m.lines]
    assert lines and len(set(lines)) == len(lines)


def test_mistakes_by_hand_are_read_with_their_spaces_and_line_ends(tmp_path):
    text = "# for the reader\n\nf.py: left out\n-     x = 1\n-\n\nb/g.py: a: b\n- a\n-   b\n+ c\n"
    (tmp_path / "some.txt").write_text(text)
    assert mutate.read(tmp_path / "some.txt") == [
        ("f.py", "    x = 1\n", "", "left out"),
        ("b/g.py", "a\n  b", "c", "a: b"),
    ]


def test_a_mistake_by_hand_must_be_found_once():
    mistakes = [
        ("f.py", "a < b", "a > b", ""),
        ("f.py", "no such text", "", ""),
        ("f.py", "a, b", "b, a", ""),
        ("other.py", "x", "y", ""),
    ]
    found, stale = mutate.by_hand("f.py", SOURCE, mistakes)
    assert [m.new for m in found] == ["if a > b and not deep:"]
    assert [old for _, old in stale] == ["no such text", "a, b"]


FILES = {
    "a.py": """\
def double(x):
    return 2 * x


def half(x):
    while x > 9:
        x -= 1
    return x / 2
""",
    "tests/conftest.py": """\
import os, sys
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
""",
    "tests/test_a.py": """\
import a
def test_broken(): assert False
def test_half(): a.half(10)
def test_double(): assert a.double(3) == 6
""",
    "tests/mutants_by_hand.txt": """\
# What went wrong.

a.py: too much
- 2 * x
+ 3 * x

a.py: too little
- x / 2
+ x / 3

a.py: one too far
- x > 9
+ x > 10

a.py: stale
- gone
""",
    "tests/mutants_harmless.txt": """\
a.py: who cares
- while x > 9:
+ while x > 10:
""",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose tests hold one of its two functions; asked once."""
    root = tmp_path_factory.mktemp("project")
    os.mkdir(root / "tests")
    for file in ("mutants.py", "mutate.py"):
        shutil.copy(os.path.join(HERE, file), root / "tests")
    for file, text in FILES.items():
        (root / file).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


def ask(root, *args):
    """What the runner says of the project, and the table that it writes. It imports nothing beforehand."""
    set_up = "import sys; sys.path.insert(0, 'tests')"
    code = f"{set_up}; import mutants; mutants.warm_up = lambda: None; mutants.main()"
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
    assert before.count(b"\n") == 3
    _, again = ask(project)
    assert again == table
    assert answers.read_bytes() == before
    # The tree itself is never touched.
    assert (project / "a.py").read_text() == FILES["a.py"]

    # A changed file is asked again.
    (project / "a.py").write_text(FILES["a.py"] + "\n")
    ask(project, "--files=a.py")
    assert answers.read_bytes().count(b"\n") == 6
