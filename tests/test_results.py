"""results/: studies write each committed page from the committed rows, and the recipe asks for the committed runs."""

import importlib
import json
import shlex
import shutil
import types
from pathlib import Path

import pytest
from conftest import ROOT
from lab import run

from configurator import configure
from posttrain import attach
from studies import kit, recipe
from studies.ablate import STUDIES

ABLATIONS = {f"{study.get('out', 'results/ablations')}/{name}": name for name, study in STUDIES.items()}


@pytest.mark.parametrize(
    "folder, command, page",
    [
        *[(folder, f"studies.ablate {name} --report --out=NEW/..", "table.md") for folder, name in ABLATIONS.items()],
        ("results/ablations", "studies.ablate --overview --out=NEW", "overview.md"),
        ("results/align", "studies.align --report --results=NEW", "table.md"),
        ("results/length", "studies.length --report --results=NEW", "table.md"),
        ("results/memorize", "studies.memorize --report --out=NEW", "table.md"),
        ("results/micro_combat", "papers.smacv2 --results=NEW", "table.md"),
        ("results/ppo_collapse", "papers.ppo_collapse --results=NEW", "table.md"),
        ("results/recipe", "studies.recipe --report --results=NEW", "report.md"),
    ],
)
def test_a_committed_page_is_what_the_committed_rows_give(folder, command, page, tmp_path):
    """Byte for byte, and its plots are drawn, in a copy of the folder without the page and its plots."""
    new = tmp_path / Path(folder).name
    wanted = Path(ROOT, folder, page)
    shutil.copytree(wanted.parent, new, ignore=shutil.ignore_patterns("*.png", page))
    run(*command.replace("NEW", str(new)).split())
    assert (new / page).read_text() == wanted.read_text()
    for picture in wanted.parent.glob("*.png"):
        assert (new / picture.name).stat().st_size > 9000


def settings_of(script, args):
    """The settings of a script for a command line, read by configurator.py as the script does."""
    module = importlib.import_module(script)
    more = [module.shape, attach] if script == "train" else []
    return configure(dict(vars(module)), args, *(dict(vars(space)) for space in more))


class Scripts(list):
    """
    Replaces subprocess for a study and records (script, settings) of each command. leave(script, name, asked) returns
    the files {name: content} that the step NAME would write.
    """

    def run(self, command, stdout, **_):
        script, *args = command[2:]
        asked = settings_of(script, args)
        self.append((script, asked))
        folder = asked.get("out") or asked["init_from"]
        for name, content in self.leave(script, Path(stdout.name).stem, asked).items():
            kit.write(f"{folder}/{name}", content if isinstance(content, str) else json.dumps(content))
        return types.SimpleNamespace(returncode=0)


@pytest.fixture
def scripts(monkeypatch, tmp_path):
    found = Scripts()
    monkeypatch.setattr(kit, "subprocess", found)
    monkeypatch.setattr(recipe, "out", f"{tmp_path}/out")
    monkeypatch.setattr(recipe, "results", str(tmp_path))
    return found


def lines(rows):
    return "\n".join(map(json.dumps, rows))


def test_the_recipe_runs_the_committed_commands_and_collects_their_numbers(scripts, tmp_path, monkeypatch):
    """Steps that write a committed row's numbers give that row, and their commands have its settings."""
    row = kit.read_rows("results/recipe/rows.jsonl")[0]
    links = row["links"]

    def leave(script, name, asked):
        step = links.get(name.partition("-")[2], {})
        return {
            "prepare": {
                "meta.json": dict(sources=dict(probes=dict(train=dict(tokens=424 * 256 + 10)))),
                "report.json": dict(total=row["total"]),
                "probes.json": dict(probes=[dict(repetitions=n, ids=[*range(n, 999)]) for n in (0, 128)]),
            },
            "evaluate": {"evaluation.json": dict(rows=[dict(score=step.get("old")), *step.get("positions", [])])},
            "studies.exam": {"exam.jsonl": lines(step.get("exam", []))},
            "studies.memorize": {"rows.jsonl": lines(step.get("letters", [])), "table.md": ""},
            "studies.world": {"questions.jsonl": ""},
        }.get(script, {"summary.json": {}})

    scripts.leave = leave
    monkeypatch.setattr(recipe, "load_for", lambda folder: types.SimpleNamespace(decode=list))
    monkeypatch.setattr(recipe, "workers", 1)
    recipe.main()
    (found,) = kit.read_rows(f"{tmp_path}/rows.jsonl")
    assert found["total"] == row["total"]
    assert len(found["links"]) == len(scripts) == 26
    assert found["letter"]["asked"] == [*range(128, 178)]
    assert found["letter"]["true"] == [*range(178, 228)]
    for name, link in found["links"].items():
        want = links[name]
        assert all(link[key] == want[key] for key in {"exam", "old", "positions", "letters"} & {*want, *link}), name
        words = shlex.split(want["command"].replace("out/recipe", recipe.out))
        _, script, *args = (word for word in words if word != "-m")
        script = script.removesuffix(".py")
        assert (script, settings_of(script, args)) in scripts, name
