"""A user's mistake (refusals.txt) gives exit code 2 and one line that says what to do, and changes no folder."""

import shlex
from pathlib import Path

import pytest
from conftest import ROOT, refused, script


def sections():
    """{heading: rows} of refusals.txt."""
    found = {}
    for line in Path(ROOT, "tests", "refusals.txt").read_text().splitlines():
        if line.startswith("["):
            rows = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            rows.append(line)
    return found


TABLE = sections()
FILES = TABLE.pop("files")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for row in FILES:
        name, _, content = row.partition(" ")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.strip().encode().decode("unicode_escape").encode("latin-1"))
    return folder


def state(*folders):
    """All files below these folders except locks, with size and time of the last change."""
    paths = [path for folder in folders for path in folder.rglob("*")]
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns)
        for path in paths
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("command, row", [(command, row) for command, rows in TABLE.items() for row in rows])
def test_a_mistake_is_one_line_and_changes_nothing(lab, files, tmp_path, command, row):
    args, *words = map(str.strip, row.split(" | "))
    before = state(lab, files)
    line = f"{command} {args}"
    for name, folder in dict(LAB=lab, FILES=files, NEW=tmp_path / "new").items():
        line = line.replace(name, str(folder))
    refused(script(*shlex.split(line)), *words)
    assert state(lab, files) == before and not state(tmp_path)
