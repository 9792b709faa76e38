"""ablate.py and kit.py: statistics against scipy, R and closed cases, a study of seconds, the committed results."""
import os
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
from scipy import stats

from configs.ablations import STUDIES
from conftest import ROOT, refused, script
from engine import plot
from engine.intervals import p_value, t_quantile
from studies import ablate, kit


def folder_of(name):
    return f"{ROOT}/{STUDIES[name].get('out', 'results/ablations')}/{name}"


def run(arm, seed, final, lr=1e-3):
    """A row of runs.jsonl: two validations, the last of them `final`."""
    return dict(arm=arm, lr=lr, seed=seed, tokens=[100, 200], val_bpb=[final + 1, final], parameters=10, seconds=1.0)


# -----------------------------------------------------------------------------
# statistics


@pytest.mark.parametrize("df", [1, 2, 3, 4, 9, 30])
def test_p_values_and_quantiles_are_scipys(df):
    for t in (0.1, 2.0, -12.7):
        assert p_value(t, df) == pytest.approx(2 * stats.t.sf(abs(t), df), rel=1e-9)
    assert t_quantile(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-6)


def test_holms_p_values_are_those_of_the_textbook():
    """Holm 1979, as in R's p.adjust(c(.01, .04, .03, .005), "holm")."""
    assert kit.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert kit.holm([0.5, 0.9]) == [1.0, 1.0]


def test_a_difference_is_paired_by_seed_and_is_scipys():
    """A seed that is worse by 10 for both arms says nothing about them. Authority: scipy's paired t-test."""
    base, ours = [12.0, 22.1, 32.0], [11.9, 21.8, 31.9]
    rows = [run(arm, s, y) for arm, ys in (("a", base), ("b", ours)) for s, y in enumerate(ys, 1)]
    a, b = ablate.summary(rows[::-1], "a")
    want = stats.ttest_rel(ours, base)
    low, high = want.confidence_interval()
    assert (b["difference"], b["half_interval"]) == pytest.approx(((low + high) / 2, (high - low) / 2))
    assert (a["p"], b["p"]) == (None, pytest.approx(want.pvalue))


def test_the_search_seed_is_not_reported_and_a_rate_at_the_edge_has_a_star():
    """With the search's 1.0 and 0.5 the difference would be negative; the reported seeds say +0.2."""
    search = [run("a", 0, final, lr) for final, lr in ((2.0, 1e-3), (1.0, 2e-3), (2.1, 4e-3))]
    search += [run("b", 0, final, lr) for final, lr in ((0.5, 1e-3), (1.85, 2e-3))]
    reported = [run("a", 1, 1.9, 2e-3), run("b", 1, 2.2), run("a", 2, 1.7, 2e-3), run("b", 2, 1.8)]
    a, b = ablate.summary(search + reported, "a")
    assert (a["lr"], b["lr"], b["seeds"]) == ("0.002", "0.001*", 2)
    assert a["bits_per_byte"].startswith("1.8000") and b["difference"] == pytest.approx(0.2)


@pytest.mark.parametrize("curve, share", [([3, 2, 1], "50%"), ([3, 1, 1], "38%"), ([3, 3, 2.1], "never")])
def test_the_tokens_to_a_loss_of_2_lie_on_straight_lines(curve, share):
    assert ablate.share_of_tokens([2, 4, 8], np.array(curve), 2) == share


@pytest.mark.parametrize("values, said", [
    ([-0.11, -0.10, -0.12], "b is lower than a by 0.085 to 0.135 bits per byte"),
    ([0.11, 0.10, 0.12], "b is higher than a by 0.085 to 0.135 bits per byte"),
    ([0.11, -0.10, 0.12], "no difference between b and a can be seen, it is between -0.265 and +0.352 bits per byte")])
def test_the_conclusion_is_the_interval(values, said):
    """Authority: scipy.stats.t.interval(0.95, 2, mean, sem)."""
    rows = [run(arm, s, 2 + d * (arm == "b")) for s, d in enumerate(values, 1) for arm in "ab"]
    table = ablate.summary(rows, "a")
    ablate.table_md(table)
    assert f"200 tokens: {said}." in ablate.conclusion(table[1], "a")


def test_the_bar_of_a_plot_is_scipys_interval(monkeypatch):
    figures, values = [], [0.1, 0.3, 0.2, 0.7]
    monkeypatch.setattr(plot, "finish", lambda figure, path: figures.append(figure))
    kit.plot_intervals("a.png", {"one": [0.5], "four": values}, "bits per byte", zero=0)
    bar = figures[0].axes[0].collections[-1].get_segments()[0]
    assert bar[:, 0] == pytest.approx(stats.t.interval(0.95, 3, 0.325, stats.sem(values)))


# -----------------------------------------------------------------------------
# a whole study


@pytest.fixture(scope="module")
def study(data, tmp_path_factory):
    """
    Two arms, two seeds, two rates and 4 steps: the folder, the arguments, the commands so far, and what it said.

    train.py runs in this process, which spares eight imports of torch.
    """
    root = tmp_path_factory.mktemp("study")
    shorter = "total_samples = 32\nwarmup_samples = 8\ndecay_samples = 8\neval_every = 2\n"
    with open(f"{ROOT}/configs/tiny.py") as f:
        (root / "size.py").write_text(f.read() + shorter)
    flags = dict(size=root / "size.py", data=data, out=root, runs=root / "runs", seeds=2, jobs=1, lrs="1e-3,3e-3")
    args = ["gelu", "relu2", *kit.flags(flags)]
    calls, real = [], subprocess.run

    def in_process(command, **how):
        if command[0] != sys.executable:  # matplotlib looks for fonts, on a machine where it never did
            return real(command, **how)
        calls.append(command)
        done = script("train.py", *command[3:])
        how["stdout"].write(done.stderr)
        return types.SimpleNamespace(returncode=done.returncode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", in_process)
        yield root, args, calls, script("studies.ablate", *args)


def results(root):
    rows = kit.read_rows(root / "gelu-relu2" / "runs.jsonl")
    return [(row["arm"], row["seed"], row["lr"], row["val_bpb"]) for row in rows]


def test_two_arms_make_a_table_a_plot_and_a_sentence(study):
    """Each reported seed has the rate of the lower search run of its arm."""
    root, _, calls, done = study
    assert done.returncode == 0 and len(calls) == 8, done.stderr
    assert set(os.listdir(root / "gelu-relu2")) == {"runs.jsonl", "results.csv", "table.md", "plot.png"}
    assert "2 seeds, " in done.stdout and " bits per byte." in done.stdout and "8/8" in done.stderr
    for arm in ("gelu", "relu2"):
        low, high, *reported = sorted((row for row in results(root) if row[0] == arm), key=lambda row: row[1])
        best = min(low, high, key=lambda row: row[3][-1])[2]
        assert [row[1:3] for row in reported] == [(1, best), (2, best)]


def test_finished_runs_are_skipped_and_a_killed_one_resumes_to_the_same_bits(study):
    """A run that was killed in its third step, before any checkpoint."""
    root, args, calls, _ = study
    before = results(root)
    assert script("studies.ablate", *args).returncode == 0 and len(calls) == 8
    broken = next((root / "runs").glob("*/summary.json")).parent
    (broken / "summary.json").unlink()
    shutil.rmtree(broken / "ckpt")
    with open(broken / "log.jsonl", "r+") as f:
        f.truncate(300)
    assert script("studies.ablate", *args).returncode == 0 and len(calls) == 9
    assert results(root) == before


@pytest.mark.parametrize("args, says", [
    (["configs/ablations/tying.py"], "type python -m studies.ablate tying"),
    (["swiglu"], "swiglu: there is no such study"),
    (["swiglu", "adamw"], "two or more values of activation or optimizer"),
    (["wsd", "wsd"], "wsd wsd: there is no such study"),
    (["tying", "--seeds=-1"], "--seeds=-1: want"),
    (["tying", "--report", "--out=nowhere"], "without --report"),
    (["tying", "--data=nowhere"], "prepare.py"),
    (["--overview", "--out=nowhere"], "no studies in nowhere")])
def test_a_mistake_is_one_line(args, says):
    done = script("studies.ablate", *args)
    refused(done, says)


# -----------------------------------------------------------------------------
# what is committed


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_asks_for_settings_that_exist(name, data, monkeypatch):
    monkeypatch.setattr(ablate, "data", str(data))
    monkeypatch.chdir(ROOT)
    study = ablate.STUDY | STUDIES[name]
    folders = {ablate.planned(study, arm, 1e-3, 1)[0] for arm in study["arms"]}
    assert len(folders) == len(study["arms"]) and study["baseline"] in study["arms"] and study["published"]


@pytest.mark.parametrize("name", STUDIES)
def test_the_committed_tables_are_those_of_the_committed_runs(name, tmp_path):
    shutil.copytree(folder_of(name), tmp_path / name)
    done = script("studies.ablate", name, "--report", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    for file in ("results.csv", "table.md"):
        with open(f"{folder_of(name)}/{file}") as f:
            assert (tmp_path / name / file).read_text() == f.read(), file


def test_the_committed_overview_is_that_of_the_committed_runs():
    with open(f"{ROOT}/results/ablations/overview.md") as f:
        assert f.read() == ablate.overview_md(f"{ROOT}/results/ablations")
