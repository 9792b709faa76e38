"""tools/lesson.py: a judge passes the project's file, fails the empty one, and names the mistake that was planted."""
import ast
import multiprocessing
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers  # noqa: F401  here once, and not in each fork

from conftest import ROOT, script

LESSONS = tomllib.loads(Path(ROOT, "tools", "lessons.toml").read_text())
KEPT = {}


def judged(command, env, **_):
    """subprocess.run of a pytest, once for each text: in a fork of this process, which has imported torch."""
    folder = Path(env["PYTHONPATH"].split(os.pathsep)[0])
    [file] = folder.rglob("*.py")
    key = file.read_text(), *command
    if key not in KEPT:
        log = folder / "log"
        process = multiprocessing.get_context("fork").Process(target=child, args=(command, env, log))
        process.start()
        process.join()
        KEPT[key] = SimpleNamespace(returncode=process.exitcode, stdout=log.read_text(), stderr="")
    return KEPT[key]


def child(command, env, log):
    """Begin like a new process, without the project's modules, whatever the tests before have imported."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if file.startswith(ROOT) and "site-packages" not in file:
            del sys.modules[name]
    os.environ.update(env)
    sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
    sys.stdout = sys.stderr = open(log, "w")
    code = pytest.main(command[4:])
    sys.stdout.flush()
    os._exit(code)


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", judged)
    return lambda *args: script("tools.lesson", f"--out={tmp_path}", *args)


@pytest.mark.parametrize("name", LESSONS)
def test_a_judge_passes_our_file_fails_the_empty_one_and_names_each_mistake(lesson, tmp_path, name):
    row = LESSONS[name]
    assert lesson(name).stdout.strip() == row["sheet"].strip()
    assert len(row["hints"]) == 3 <= len(row["mistakes"])
    for word in row["sheet"].split():
        assert not word.startswith("assets/") or Path(ROOT, word.rstrip(".:;,")).exists(), word
    source = Path(ROOT, row["file"]).read_text()
    mine = tmp_path / name / row["file"]
    # What is left has the names and docstrings of the whole.
    names = [[(x.name, ast.get_docstring(x)) for x in ast.walk(ast.parse(text)) if hasattr(x, "name") and hasattr(x, "body")]
             for text in (mine.read_text(), source)]
    assert set(names[0]) <= set(names[1])

    def check(text):
        mine.write_text(text)
        done = lesson(name, "--check")
        return done, [mistake["says"] for mistake in row["mistakes"] if mistake["says"] in done.stdout]
    done, named = check(mine.read_text())
    assert done.returncode == 1 and named == [] and f"NotImplementedError: write {row['write'][0]}" in done.stdout
    done, named = check(source)
    assert done.returncode == 0 and named == [] and " passed" in done.stdout
    for mistake in row["mistakes"]:
        assert source.count(mistake["old"]) == 1
        done, named = check(source.replace(mistake["old"], mistake["new"]))
        assert done.returncode == 1 and named == [mistake["says"]]


OWN = """
def wsd(seen, peak, floor, warmup, total, decay, decay_at=None):
    fits(warmup, decay, total)
    begin = total - decay if decay_at is None else decay_at
    end, decay = (total, decay) if decay_at is None else begun_at(begin, total, decay)
    reached = min(1, begin / warmup) * peak if warmup else peak
    if seen >= end:
        return floor
    if seen <= begin:
        return min(reached, peak * seen / warmup) if warmup else peak
    passed = (seen - begin) / decay
    return (1 - passed) * reached + passed * min(floor, reached)


def fits(warmup, decay, total):
    if min(warmup, decay, total - warmup - decay) < 0:
        raise ValueError(f"these do not fit into total={total}")
"""


@pytest.mark.parametrize("own, named", [(OWN, True), (OWN.replace("passed =", "passed = 1 * ").replace(
    "/ decay\n", "/ decay\n    passed = passed**0.5\n"), False)])
def test_code_of_ones_own_is_judged_by_what_it_does(lesson, tmp_path, own, named):
    """With helpers of its own; a linear decay is named, and 1 - sqrt passes."""
    lesson("schedule")
    mine = tmp_path / "schedule" / "schedule.py"
    mine.write_text(mine.read_text() + own)
    done = lesson("schedule", "--check")
    assert (done.returncode, "The decay is linear" in done.stdout) == (int(named), named)


def test_hints_come_one_by_one_and_the_solution_is_a_difference(lesson, tmp_path, monkeypatch, capfd):
    hints = LESSONS["rope"]["hints"]
    lesson("rope")
    for hint in [*hints, hints[0]]:
        assert lesson("rope", "--hint").stdout == f"{hint}\n"
    assert (tmp_path / "rope" / "README.md").read_text().count("\nHint: ") == 4
    monkeypatch.undo()
    script("tools.lesson", "rope", f"--out={tmp_path}", "--solution")
    lines = capfd.readouterr().out.splitlines()
    assert "+    turned = torch.cat((-b, a), dim=-1)" in lines
    assert "-    raise NotImplementedError('write rotate')" in lines


def test_without_a_name_the_lessons_are_listed_in_the_order_of_the_course(lesson):
    listed = [line.split()[0] for line in lesson().stdout.splitlines()]
    page = Path(ROOT, "docs", "learn.md").read_text()
    assert listed == [*LESSONS] == sorted(listed, key=lambda name: page.index(f"| `{name}` |"))
