"""ablate.py and kit.py: statistics against scipy, R and closed cases, a study of seconds, the committed results."""
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from studies.ablate import STUDIES
from conftest import ROOT, script
from engine import plot
from engine.files import read_text
from engine.intervals import p_value, t_quantile
from studies import ablate, kit


def run(arm, seed, final, lr=1e-3):
    """A row of runs.jsonl: two validations, the last of them `final`."""
    curve = dict(tokens=[100, 200], val_bpb=[final + 1, final])
    return dict(arm=arm, lr=lr, seed=seed, parameters=10, seconds=1.0, **curve)


# -----------------------------------------------------------------------------
# statistics


def test_p_values_and_quantiles_are_scipys():
    for df in (1, 2, 4, 9, 30):
        assert p_value(-2.5, df) == pytest.approx(2 * stats.t.sf(2.5, df), rel=1e-9)
        assert t_quantile(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-6)


def test_holms_p_values_are_those_of_the_textbook():
    """Holm 1979, as in R's p.adjust(c(.01, .04, .03, .005), "holm")."""
    assert kit.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_differences_are_scipys_of_the_reported_seeds_at_the_best_rate():
    """
    A seed that is worse by 10 for both arms says nothing about them. Authority: scipy's paired t-test.

    The runs of the search, seed 0, are not among them; a rate at the edge of the search has a star.
    """
    base, ours = [12.0, 22.1, 32.0], [11.9, 21.8, 31.9]
    rows = [run(arm, 0, 5.0, lr) for arm in "ba" for lr in (1e-3, 2e-3, 4e-3)]
    for seed in (1, 2, 3):
        rows.append(run("b", seed, ours[seed - 1], 1e-3))
        rows.append(run("a", seed, base[seed - 1], 2e-3))
    a, b = ablate.summary(rows, "a")
    want = stats.ttest_rel(ours, base)
    low, high = want.confidence_interval()
    difference, half, p = b["student"]
    assert (p, difference - half, difference + half) == pytest.approx((want.pvalue, low, high))
    assert (a["lr"], b["lr"], b["seeds"]) == ("0.002", "0.001*", 3)
    assert a["bits_per_byte"] == f"22.0333 ± {np.std(base, ddof=1):.4f}"


CONCLUSIONS = {
    "b is higher than a by 0.085 to 0.135": [0.11, 0.10, 0.12],
    "b is lower than a by 0.085 to 0.135": [-0.11, -0.10, -0.12],
    "no difference between b and a can be seen: it is -0.265 to +0.352": [0.11, -0.10, 0.12],
}


def test_the_conclusion_is_the_interval():
    """Authority: scipy.stats.t.interval(0.95, 2, mean, sem)."""
    for said, values in CONCLUSIONS.items():
        rows = [run("a", seed, 2) for seed in (1, 2, 3)]
        rows += [run("b", seed, 2 + d) for seed, d in enumerate(values, 1)]
        table = ablate.summary(rows, "a")
        ablate.table_md(table)
        assert f"200 tokens: {said} bits per byte." in ablate.conclusion(table[1], "a")


def test_the_bar_of_a_plot_is_scipys_interval(monkeypatch):
    figures, values = [], [0.1, 0.3, 0.2, 0.7]
    monkeypatch.setattr(plot, "finish", lambda figure, path: figures.append(figure))
    kit.plot_intervals("a.png", {"one": [0.5], "four": values}, "bits per byte", zero=0)
    bar = figures[0].axes[0].collections[-1].get_segments()[0]
    want = stats.t.interval(0.95, 3, 0.325, stats.sem(values))
    assert bar[:, 0] == pytest.approx(want)


def test_runs_take_the_visible_gpus_in_turn_and_keep_their_order(monkeypatch):
    monkeypatch.setattr(kit.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    found = kit.in_parallel(0, lambda n, device: n + device, "abc")
    assert [*found] == ["a5", "b7", "c5"]
    with pytest.raises(ValueError, match="jobs=-1"):
        kit.in_parallel(-1, print)


# -----------------------------------------------------------------------------
# a whole study


@pytest.fixture(scope="module")
def study(data, tmp_path_factory):
    """
    Two arms, two seeds, two rates and 4 steps: the folder, the arguments, the commands so far, the output.

    train.py runs in this process, which spares eight imports of torch.
    """
    root = tmp_path_factory.mktemp("study")
    shorter = "total_samples = 32\nwarmup_samples = 8\ndecay_samples = 8\neval_every = 2\n"
    (root / "size.py").write_text(read_text(f"{ROOT}/configs/tiny.py") + shorter)
    flags = dict(
        size=root / "size.py",
        data=data,
        out=root,
        runs=root / "runs",
        seeds=2,
        jobs=1,
        lrs="1e-3,3e-3",
    )
    args = ["gelu", "relu2", *kit.flags(flags)]
    calls, real = [], subprocess.run

    def in_process(command, **how):
        if command[0] != sys.executable:  # matplotlib looks for fonts, on a machine where it never did
            return real(command, **how)
        calls.append(command)
        done = script("train.py", *command[3:])
        how["stdout"].write(done.stderr)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", in_process)
        yield root, args, calls, script("studies.ablate", *args)


def results(root):
    return kit.read_rows(root / "gelu-relu2" / "runs.jsonl")


def test_two_arms_make_a_table_a_plot_and_a_sentence(study):
    """Each reported seed has the rate of the lower search run of its arm."""
    root, _, calls, done = study
    assert done.returncode == 0, done.stderr
    assert len(calls) == 8
    assert set(os.listdir(root / "gelu-relu2")) == {"runs.jsonl", "table.md", "plot.png", "curves.png"}
    assert "2 seeds, " in done.stdout and "4/4" in done.stderr
    for arm in ("gelu", "relu2"):
        low, high, *reported = [row for row in results(root) if row["arm"] == arm]
        best = min(low, high, key=ablate.final)["lr"]
        assert [(row["seed"], row["lr"]) for row in reported] == [(1, best), (2, best)]


def test_finished_runs_are_skipped_and_a_killed_one_resumes_to_the_same_bits(study):
    """A run that was killed in its third step, before any checkpoint."""
    root, args, calls, _ = study
    before = [row["val_bpb"] for row in results(root)]
    assert script("studies.ablate", *args).returncode == 0
    assert len(calls) == 8
    broken = next((root / "runs").glob("*/summary.json")).parent
    (broken / "summary.json").unlink()
    shutil.rmtree(broken / "ckpt")
    with open(broken / "log.jsonl", "r+") as f:
        f.truncate(300)
    assert script("studies.ablate", *args).returncode == 0
    assert len(calls) == 9
    assert [row["val_bpb"] for row in results(root)] == before


def test_each_arm_of_each_committed_study_is_a_run_of_its_own(data, monkeypatch):
    """Their settings are train.py's, or planned() would raise."""
    monkeypatch.setattr(ablate, "data", data)
    for study in STUDIES.values():
        asked = ablate.STUDY | study
        runs = {ablate.planned(asked, arm, 1e-3, 1)[0] for arm in study["arms"]}
        assert len(runs) == len(study["arms"])
