"""results/: studies write each committed page from the committed rows; the recipe's commands and numbers."""

import importlib
import json
import re
import shutil
import types
from pathlib import Path

import pytest
from conftest import ROOT, script as script_in_process
from lab import run
from shell import run_shell

import tokenizer
from configurator import configure, settings
from studies import kit
from studies.ablate import STUDIES

ABLATIONS = {f"{study.get('out', 'results/ablations')}/{name}": name for name, study in STUDIES.items()}
# The others have no results yet.
FINISHED = {folder: name for folder, name in ABLATIONS.items() if Path(ROOT, folder).exists()}


@pytest.mark.parametrize(
    "folder, command, page",
    [
        *[(folder, f"studies.ablate {name} --report --out=NEW/..", "table.md") for folder, name in FINISHED.items()],
        ("results/ablations", "studies.ablate --overview --out=NEW", "overview.md"),
        ("results/align", "studies.align --report --results=NEW", "table.md"),
        ("results/decay", "studies.decay --report --results=NEW", "table.md"),
        ("results/length", "studies.length --report --results=NEW", "table.md"),
        ("results/memorize", "studies.memorize --report --out=NEW", "table.md"),
        ("results/product", "studies.memorize --report --out=NEW", "table.md"),
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


@pytest.mark.parametrize("folder, name", FINISHED.items())
def test_the_numbers_of_a_finding_are_in_its_table(folder, name):
    """The mean and half of the interval, as rounded from those of the table, whose sign words may replace."""
    study = STUDIES[name]
    intervals = r"([+-]?\d\.\d+) ± (\d\.\d+)"
    table = [
        (abs(float(mean)), float(half))
        for mean, half in re.findall(intervals, Path(ROOT, folder, "table.md").read_text())
    ]
    quoted = re.findall(intervals, study["finding"])
    assert quoted and re.search(r"\d seeds", study["finding"])
    for mean, half in quoted:
        near = [pair for pair in table if abs(pair[0] - abs(float(mean))) < 6e-4 and abs(pair[1] - float(half)) < 6e-4]
        assert near, f"{mean} ± {half}"


# -----------------------------------------------------------------------------
# the recipe


def settings_of(script, args):
    """The settings of a script for a command line, read by configurator.py as the script does."""
    module = importlib.import_module(script)
    spaces = [dict(vars(space)) for space in (module, *([module.shape] if script == "train" else []))]
    configure(spaces, args)
    return settings(*spaces)


def content_of(script, link, total):
    """The files {name: content} that a script would write for these results of a model."""

    def lines(key):
        return "\n".join(map(json.dumps, link.get(key, [])))

    return {
        "prepare": {
            "meta.json": "",
            "report.json": json.dumps(dict(total=total)),
            "probes.json": json.dumps(dict(probes=[dict(repetitions=n, ids=[*range(n, 999)]) for n in (0, 128)])),
        },
        "evaluate": {"evaluation.json": json.dumps(dict(rows=[dict(score=link.get("old"))]))},
        "studies.context": {"context.jsonl": lines("positions")},
        "studies.exam": {"exam.jsonl": lines("exam")},
        "studies.memorize": {"rows.jsonl": lines("letters"), "table.md": ""},
        "studies.world": {"questions.jsonl": "", "lessons.jsonl": "", "replay.jsonl": ""},
    }.get(script, {"summary.json": ""})


def test_the_recipe_collects_the_numbers_of_its_steps_and_repeats_none(tmp_path, monkeypatch):
    """Steps that write a committed row's numbers give that row. The scripts have all settings of the commands."""
    row = kit.read_rows("results/recipe/rows.jsonl")[0]
    out = f"{tmp_path}/out"
    monkeypatch.setattr(tokenizer, "load_for", lambda folder: types.SimpleNamespace(decode=list))
    commands = []

    def call(script, *args):
        if script == "studies.recipe":
            return script_in_process(script, *args).returncode
        commands.append(script)
        settings = settings_of(script, args)
        folder = settings.get("out") or settings["init_from"]
        model = Path(settings.get("init_from", "") if script.startswith(("studies", "evaluate")) else folder).name
        for name, content in content_of(script, row["links"].get(model, {}), row["total"]).items():
            kit.write(f"{folder}/{name}", content)
        return 0

    assert run_shell("studies/recipe.sh", call=call, OUT=out) == 0
    (found,) = kit.read_rows(f"{out}/rows.jsonl")
    assert found["total"] == row["total"]
    assert found["letter"]["asked"] == [*range(128, 178)]
    assert found["letter"]["true"] == [*range(178, 228)]
    for model in ("plain", "base"):
        _, _, greedy, _ = row["links"][model]["letters"]
        assert found["letter"][model] == greedy["said"] and greedy["repetitions"] == 128
    for model, link in found["links"].items():
        assert link == {key: row["links"][model][key] for key in ("exam", "old", "positions", "letters") if key in link}
    commands.clear()
    assert run_shell("studies/recipe.sh", call=call, OUT=out) == 0
    assert not commands
