"""ablate.py: statistics against tables and closed cases, whole studies of seconds, the committed results again."""
import csv
import glob
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
import types

import pytest

from studies import ablate, kit
from conftest import ROOT, script
from engine.intervals import p_value, t_quantile

RUNS = glob.glob(os.path.join(ROOT, "results", "**", "runs.jsonl"), recursive=True)
STUDIES = sorted(map(os.path.dirname, RUNS))
CONFIGS = sorted(glob.glob(os.path.join(ROOT, "configs", "ablations", "*.py")))


def run(arm, seed, final, lr=1e-3):
    """A line of runs.jsonl: two validations, the last of them `final`."""
    asked = dict(arm=arm, lr=lr, seed=seed, size="s", parameters=10, steps=2, batch_tokens=100, data_hash="a")
    curve = dict(tokens=[100, 200], val_bpb=[final + 1, final], train_loss=final)
    return dict(asked, **curve, grad_norm_median=1.0, grad_norm_max=2.0, flops=1e6, seconds=1.0)


def read_lines(path):
    return [json.loads(line) for line in open(path)]


@pytest.mark.parametrize("df, t, p", [
    (1, 12.7062, 0.05), (2, 4.30265, 0.05), (3, 3.18245, 0.05), (4, 2.77645, 0.05), (9, 2.26216, 0.05),
    (30, 2.04227, 0.05), (2, 9.92484, 0.01), (5, 4.03214, 0.01)])
def test_p_values_are_those_of_the_tables(df, t, p):
    """Critical values as they are printed in tables of Student's t."""
    assert p_value(t, df) == pytest.approx(p, abs=2e-6)
    assert p_value(-t, df) == p_value(t, df)
    assert p != 0.05 or t_quantile(df) == pytest.approx(t, abs=1e-4)


def test_a_paired_difference_ignores_what_both_arms_share():
    """
    A seed that is worse by 10 for both says nothing about the arms.

    At two degrees of freedom the table's t is 4.302653, and the p-value has the closed form 1 - t / sqrt(t^2 + 2).
    """
    base = [run("a", s, 2.0 + 10 * s) for s in (1, 2, 3)]
    ours = [run("b", s, 2.0 + 10 * s - d) for s, d in ((1, 0.1), (2, 0.2), (3, 0.3))]
    mean, half, p, n = ablate.paired(ours, base)
    error = 0.1 / math.sqrt(3)  # Three differences with a standard deviation of 0.1.
    assert (mean, half, n) == (pytest.approx(-0.2), pytest.approx(4.302653 * error, rel=1e-6), 3)
    t = 0.2 / error
    assert p == pytest.approx(1 - t / math.sqrt(t * t + 2))


def test_holms_p_values_are_those_of_the_textbook():
    """Holm 1979, as in R's p.adjust(c(.01, .04, .03, .005), "holm"): sorted, times n, ... 1, never decreasing."""
    assert ablate.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert ablate.holm([0.5, 0.9]) == [1.0, 1.0]


def test_each_arm_is_compared_at_its_own_best_rate_and_never_by_the_seed_that_chose_it():
    """The search seed's 1.0 and 0.5 would make a difference of -0.5; the reported seeds say +0.2."""
    search = [run("a", 0, final, lr) for final, lr in ((2.0, 1e-3), (1.0, 2e-3), (2.1, 4e-3))]
    search += [run("b", 0, final, lr) for final, lr in ((0.5, 1e-3), (1.85, 2e-3))]
    assert ablate.best_lrs(search) == {"a": 2e-3, "b": 1e-3}
    reported = [run("a", 1, 1.9, 2e-3), run("b", 1, 2.2, 1e-3), run("a", 2, 1.7, 2e-3), run("b", 2, 1.8, 1e-3)]
    a, b = ablate.summary(search + reported, "a")
    assert (a["lr"], b["lr"]) == (2e-3, 1e-3) and a["seeds"] == b["seeds"] == 2
    assert a["bpb"] == pytest.approx(1.8) and b["difference"] == pytest.approx(0.2)
    assert not a["lr_at_edge"] and b["lr_at_edge"]


# -----------------------------------------------------------------------------
# whole studies


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """
    A study of two arms, two seeds and 4 steps, with one rate, so that nothing is searched.

    train.py runs in this process, which spares four imports of torch. Returns the folder, the flags, the commands that
    were called (the list grows), and what the study's script said.
    """
    root = tmp_path_factory.mktemp("study")
    folders = dict(size=root / "size.py", data=root / "own", out=root / "results", runs=root / "runs")
    args = [*kit.flags(folders), "--seeds=2", "--jobs=1"]
    prepare = [os.path.join(ROOT, "*.py"), f"--out={root / 'own'}", "--tokenizer=byte", "--val_share=0.02"]
    assert script("prepare.py", *prepare).returncode == 0
    tiny = open(os.path.join(ROOT, "configs", "tiny.py")).read()
    shorter = "total_samples = 32\nwarmup_samples = 8\ndecay_samples = 8\neval_every = 2\n"
    (root / "size.py").write_text(tiny + shorter)
    (root / "mini.py").write_text('study, question, baseline = "mini", "does it run?", "with_norm"\n'
                                  "arms = dict(with_norm={}, without=dict(qk_norm=False))\nlrs = (3e-3,)\n")
    calls, run = [], subprocess.run

    def in_process(command, **how):
        if command[0] != sys.executable:  # matplotlib looks for fonts, on a machine where it never did.
            return run(command, **how)
        calls.append(command)
        done = script("train.py", *command[3:])
        how["stdout"].write(done.stderr)
        return types.SimpleNamespace(returncode=done.returncode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", in_process)
        yield root, args, calls, script("studies.ablate", root / "mini.py", *args)


def test_a_study_runs_from_a_config_to_its_three_files(study):
    root, _, calls, done = study
    folder = root / "results" / "mini"
    assert done.returncode == 0 and len(calls) == 4, done.stderr
    assert set(os.listdir(folder)) == {"runs.jsonl", "results.csv", "table.md", "plot.png"}
    rows = list(csv.DictReader(open(folder / "results.csv")))
    assert [r["arm"] for r in rows] == ["with_norm", "without"] and rows[0]["tokens"] == "2048"
    runs = read_lines(folder / "runs.jsonl")
    assert all(len(r["val_bpb"]) == 2 and r["flops"] > 0 for r in runs)
    assert len({r["val_bpb"][-1] for r in runs}) == 4


def test_a_finished_run_is_not_done_again_and_a_broken_one_is_gone_on_with(study):
    """A run that was killed in its third step, before any checkpoint, gives the same bits in the end."""
    root, args, calls, _ = study

    def results():
        rows = csv.DictReader(open(root / "results" / "mini" / "results.csv"))
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    def seed(folder):
        return json.load(open(folder / "config.json"))["seed"]

    before, n = results(), len(calls)
    assert script("studies.ablate", root / "mini.py", *args).returncode == 0 and len(calls) == n
    broken = next(folder for folder in (root / "runs").iterdir() if folder.is_dir() and seed(folder) == 1)
    lines = (broken / "log.jsonl").read_text().splitlines(keepends=True)
    (broken / "log.jsonl").write_text("".join(lines[:3]) + '{"step": 2, "lo')
    os.remove(broken / "summary.json")
    for folder in glob.glob(str(broken / "ckpt" / "*")):
        os.rename(folder, folder + ".lost")
    assert script("studies.ablate", root / "mini.py", *args).returncode == 0 and len(calls) == n + 1
    assert results() == before


def bad_study(folder, arms):
    (folder / "bad.py").write_text(f'study, baseline = "bad", "a"\narms = {arms}\nlrs = (3e-3,)\n')
    return folder / "bad.py"


@pytest.mark.parametrize("arms, says", [
    ("dict(a={}, b=dict(activtion='gelu'))", "did you mean 'activation'"),
    ("dict(a={}, b=dict(n_layer='many'))", "--n_layer=many: want a whole number"),
    ("dict(a={}, b='configs/nowhere.py')", "no config file"),
    ("dict(a={})", "name a study"),
    ("dict(b={}, c={})", "name a study")])
def test_an_override_that_does_not_exist_is_told_before_the_first_run(study, tmp_path, arms, says):
    _, args, calls, _ = study
    before = len(calls)
    done = script("studies.ablate", bad_study(tmp_path, arms), *args)
    assert done.returncode == 2 and says in done.stderr and len(calls) == before


# -----------------------------------------------------------------------------
# what is committed


@pytest.mark.parametrize("path", CONFIGS, ids=os.path.basename)
def test_every_study_that_is_shipped_asks_for_settings_that_exist(path, monkeypatch):
    found = runpy.run_path(path)
    monkeypatch.chdir(ROOT)
    if "study" not in found:
        # A config of train.py: a size, or the Llama-style recipe.
        assert ablate.check_arguments([path, "--lr=0.001"])
        return
    assert found["study"] + ".py" == os.path.basename(path) and found["published"]
    assert found["baseline"] in found["arms"]
    for arm in found["arms"].values():
        assert ablate.check_arguments(ablate.arguments(arm, found["lrs"][0], 1))["seed"] == 1


@pytest.mark.parametrize("folder", STUDIES, ids=os.path.basename)
def test_committed_tables_are_what_the_committed_runs_give(folder, tmp_path):
    name = os.path.basename(folder)
    os.makedirs(tmp_path / name)
    shutil.copy(os.path.join(folder, "runs.jsonl"), tmp_path / name)
    done = script("studies.ablate", f"configs/ablations/{name}.py", "--report", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    for file in ("results.csv", "table.md"):
        assert (tmp_path / name / file).read_text() == open(os.path.join(folder, file)).read(), file


@pytest.mark.skipif(not STUDIES, reason="no committed results")
def test_the_committed_overview_is_what_the_committed_runs_give():
    out = os.path.join(ROOT, "results", "ablations")
    before = open(os.path.join(out, "overview.md")).read()
    assert before == ablate.overview_md() and before.count("\n") > len(STUDIES)
