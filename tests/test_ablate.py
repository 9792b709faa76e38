"""ablate.py and kit.py: statistics against scipy, R and closed cases, a study of seconds, the committed results."""
import os
import shutil
import subprocess
import sys
import types

import pytest
from scipy import stats

from configs.ablations import STUDIES
from conftest import ROOT, script
from engine import plot
from engine.intervals import p_value, t_quantile
from studies import ablate, kit


def run(arm, seed, final, lr=1e-3):
    """A row of runs.jsonl: two validations, the last of them `final`."""
    return dict(arm=arm, lr=lr, seed=seed, tokens=[100, 200], val_bpb=[final + 1, final], parameters=10, seconds=1.0)


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
    rows += [run("b", s, y, 1e-3) for s, y in enumerate(ours, 1)]
    rows += [run("a", s, y, 2e-3) for s, y in enumerate(base, 1)]
    a, b = ablate.summary(rows, "a")
    want = stats.ttest_rel(ours, base)
    low, high = want.confidence_interval()
    found = b["p"], b["difference"] - b["half_interval"], b["difference"] + b["half_interval"]
    assert found == pytest.approx((want.pvalue, low, high))
    assert (a["lr"], b["lr"], b["seeds"], a["bits_per_byte"][:7]) == ("0.002", "0.001*", 3, "22.0333")


@pytest.mark.parametrize("values, said", [
    ([0.11, 0.10, 0.12], "b is higher than a by 0.085 to 0.135 bits per byte"),
    ([-0.11, -0.10, -0.12], "b is lower than a by 0.085 to 0.135 bits per byte"),
    ([0.11, -0.10, 0.12], "no difference between b and a can be seen: it is -0.265 to +0.352 bits per byte")])
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


def test_runs_take_the_visible_gpus_in_turn_and_keep_their_order(monkeypatch):
    monkeypatch.setattr(kit.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [*kit.in_parallel(0, lambda n, device: (n, device), "abc")] == [("a", "5"), ("b", "7"), ("c", "5")]
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
    assert set(os.listdir(root / "gelu-relu2")) == {"runs.jsonl", "table.md", "plot.png"}
    assert "2 seeds, " in done.stdout and "4/4" in done.stderr
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


def test_each_arm_of_each_committed_study_is_a_run_of_its_own(data, monkeypatch):
    """Their settings are train.py's, or planned() would raise."""
    monkeypatch.setattr(ablate, "data", data)
    for study in STUDIES.values():
        runs = {ablate.planned(ablate.STUDY | study, arm, 1e-3, 1)[0] for arm in study["arms"]}
        assert len(runs) == len(study["arms"])
