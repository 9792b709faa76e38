"""tools/lesson.py: --check passes the project's file, fails the empty one, and names a planted mistake."""

import multiprocessing
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, script
from transformers import AutoTokenizer  # noqa: F401  import it once, not in each fork

LESSONS = tomllib.loads(Path(ROOT, "tools", "lessons.toml").read_text())
KEPT = {}
pytestmark = pytest.mark.alone
RUN = subprocess.run


def judged(command, env, **_):
    """Like subprocess.run of pytest, once per text, in a fork of this process: importing torch takes seconds."""
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
    """Start like a new process: drop the project's modules that earlier tests have imported."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if file.startswith(ROOT) and "site-packages" not in file:
            del sys.modules[name]
    subprocess.run = RUN
    os.environ.update(env)
    sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
    sys.stdout = sys.stderr = open(log, "w")
    sys.exit(pytest.main(command[4:]))


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", judged)
    return lambda *args: script("tools.lesson", f"--out={tmp_path}", *args)


@pytest.mark.parametrize("name", LESSONS)
def test_a_judge_passes_our_file_fails_the_empty_one_and_names_each_mistake(lesson, tmp_path, name):
    row = LESSONS[name]
    assert len(row["hints"]) == 3 <= len(row["mistakes"])
    assert lesson(name).stdout.strip() == row["sheet"].strip()
    mine = tmp_path / name / row["file"]
    source = Path(ROOT, row["file"]).read_text()

    def check(text):
        """(whether the text passes, the mistakes that --check names)"""
        mine.write_text(text)
        done = lesson(name, "--check")
        assert done.returncode == any(word in done.stdout for word in (" failed", " error"))
        return not done.returncode, [row["says"] for row in row["mistakes"] if row["says"] in done.stdout]

    empty = mine.read_text()
    assert all(f"raise NotImplementedError('write {path}')\n" in empty for path in row["write"])
    assert check(empty) == (False, [])
    assert check(source) == (True, [])
    for mistake in row["mistakes"]:
        assert source.count(mistake["old"]) == 1
        assert check(source.replace(mistake["old"], mistake["new"])) == (False, [mistake["says"]])


def test_hints_come_one_by_one_and_the_solution_is_a_difference(lesson, tmp_path, monkeypatch, capfd):
    sheet = LESSONS["rope"]["sheet"]
    lesson("rope")
    for n, hint in enumerate(LESSONS["rope"]["hints"], 1):
        assert lesson("rope", "--hint").stdout == f"Hint {n} of 3: {hint}\n"
        sheet += f"\nHint {n} of 3: {hint}\n"
    assert "the last hint" in lesson("rope", "--hint").stdout
    assert (tmp_path / "rope" / "README.md").read_text() == sheet
    monkeypatch.undo()
    script("tools.lesson", "rope", f"--out={tmp_path}", "--solution")
    assert "+    turned = torch.cat((-b, a), dim=-1)" in capfd.readouterr().out.splitlines()
