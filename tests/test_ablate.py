"""ablate.py: statistics against tables of Student's t and closed cases, whole studies at the size of seconds, the committed results again."""
import csv
import glob
import json
import math
import os
import runpy
import subprocess
import sys
import types

import pytest

from studies import ablate, kit
from conftest import ROOT, script
from engine.intervals import p_value, t_quantile

STUDIES = sorted(os.path.dirname(p) for p in glob.glob(os.path.join(ROOT, "results", "**", "runs.jsonl"), recursive=True))


def run(arm, seed, final, lr=1e-3, curve=None):
    curve = curve or [final + 1, final]
    return dict(arm=arm, lr=lr, seed=seed, size="s", parameters=10, steps=2, batch_tokens=100, flops=1e6, seconds=1.0, tokens=[100 * (i + 1) for i in range(len(curve))],
                val_bpb=curve, train_loss=final, grad_norm_median=1.0, grad_norm_max=2.0, data_hash="a")


@pytest.mark.parametrize("df, t, p", [                                       # critical values as printed in tables of Student's t
    (1, 12.7062, 0.05), (2, 4.30265, 0.05), (3, 3.18245, 0.05), (4, 2.77645, 0.05), (9, 2.26216, 0.05), (30, 2.04227, 0.05), (2, 9.92484, 0.01), (5, 4.03214, 0.01)])
def test_p_values_are_those_of_the_tables(df, t, p):
    assert p_value(t, df) == pytest.approx(p, abs=2e-6)
    assert p_value(-t, df) == p_value(t, df)
    assert t_quantile(df, p) == pytest.approx(t, abs=1e-4)


def test_a_paired_difference_ignores_what_both_arms_share():                # a seed that is worse by 10 for both says nothing about the arms
    base = [run("a", s, 2.0 + 10 * s) for s in (1, 2, 3)]
    ours = [run("b", s, 2.0 + 10 * s - d) for s, d in ((1, 0.1), (2, 0.2), (3, 0.3))]
    mean, half, p, n = ablate.paired(ours, base)
    error = 0.1 / math.sqrt(3)                                               # sd 0.1, three seeds
    assert (mean, half, n) == (pytest.approx(-0.2), pytest.approx(4.302653 * error, rel=1e-6), 3)      # t of the table, two degrees
    t = 0.2 / error
    assert p == pytest.approx(1 - t / math.sqrt(t * t + 2))                  # the closed form at two degrees of freedom


def test_only_seeds_that_both_arms_have_are_paired():
    assert ablate.differences([run("b", 2, 1.5), run("b", 3, 9.0)], [run("a", 1, 7.0), run("a", 2, 2.0)]) == [-0.5]


def test_holms_p_values_are_those_of_the_textbook():
    """Holm 1979: sorted, times n, n - 1, ... 1, never decreasing; the numbers are R's p.adjust(c(.01, .04, .03, .005), "holm")."""
    assert ablate.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert ablate.holm([0.5, 0.9]) == [1.0, 1.0]


def test_one_seed_has_no_p_value():
    mean, half, p, n = ablate.paired([run("b", 1, 1.5)], [run("a", 1, 2.0)])
    assert mean == -0.5 and math.isnan(half) and math.isnan(p) and n == 1


def test_each_arm_is_compared_at_its_own_best_rate_and_never_by_the_seed_that_chose_it():
    """The search seed's 1.0 and 0.5 would make a difference of -0.5; the reported seeds say +0.2."""
    search = [run("a", 0, 2.0, 1e-3), run("a", 0, 1.0, 2e-3), run("a", 0, 2.1, 4e-3), run("b", 0, 0.5, 1e-3), run("b", 0, 1.85, 2e-3)]
    assert ablate.best_lrs(search) == {"a": 2e-3, "b": 1e-3}
    a, b = ablate.summary([*search, run("a", 1, 1.9, 2e-3), run("b", 1, 2.2, 1e-3), run("a", 2, 1.7, 2e-3), run("b", 2, 1.8, 1e-3)], "a")
    assert (a["lr"], b["lr"]) == (2e-3, 1e-3) and b["difference"] == pytest.approx(0.2) and a["seeds"] == b["seeds"] == 2
    assert a["bpb"] == pytest.approx(1.8) and not a["lr_at_edge"] and b["lr_at_edge"]


def test_tokens_to_the_baselines_loss_are_read_off_the_curve():
    assert ablate.share_of_tokens([(100, 3.0), (200, 2.0), (400, 1.0)], 1.5) == 300 / 400     # half-way between two evaluations
    assert ablate.share_of_tokens([(100, 3.0), (200, 2.0)], 1.9) is None
    assert ablate.share_of_tokens([(100, 3.0), (200, 2.0)], 2.0) == 1.0


def test_runs_on_different_data_are_not_compared():
    with pytest.raises(ValueError, match="runs on different data"):
        ablate.summary([run("a", 1, 2.0), dict(run("b", 1, 2.0), data_hash="b")], "a")


# -----------------------------------------------------------------------------
# whole studies


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """
    A study of two arms, two seeds and 4 steps, with one rate, so that nothing is searched; train.py runs in this process, which spares
    four imports of torch.
    """
    root = tmp_path_factory.mktemp("study")
    assert script("prepare.py", os.path.join(ROOT, "*.py"), f"--out={root / 'own'}", "--tokenizer=byte", "--val_share=0.02").returncode == 0
    (root / "size.py").write_text(open(os.path.join(ROOT, "configs", "tiny.py")).read() + "total_samples = 32\nwarmup_samples = 8\ndecay_samples = 8\neval_every = 2\n")
    (root / "mini.py").write_text('study, question, baseline = "mini", "does it run?", "with_norm"\narms = dict(with_norm={}, without=dict(qk_norm=False))\nlrs = (3e-3,)\n')
    calls, run = [], subprocess.run

    def in_process(command, **how):
        if command[0] != sys.executable:                                     # matplotlib looks for fonts, on a machine where it never did
            return run(command, **how)
        calls.append(command)
        done = script("train.py", *command[3:])
        how["stdout"].write(done.stderr)
        return types.SimpleNamespace(returncode=done.returncode)

    args = (f"--size={root / 'size.py'}", f"--data={root / 'own'}", f"--out={root / 'results'}", f"--runs={root / 'runs'}", "--seeds=2", "--jobs=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", in_process)
        yield root, args, calls, script("studies.ablate", root / "mini.py", *args)


def test_a_study_runs_from_a_config_to_its_three_files(study):
    root, _, calls, done = study
    assert done.returncode == 0, done.stderr
    assert len(calls) == 4 and set(os.listdir(root / "results" / "mini")) == {"runs.jsonl", "results.csv", "table.md", "plot.png"}
    rows = list(csv.DictReader(open(root / "results" / "mini" / "results.csv")))
    assert [r["arm"] for r in rows] == ["with_norm", "without"] and rows[0]["tokens"] == "2048"
    runs = [json.loads(line) for line in open(root / "results" / "mini" / "runs.jsonl")]
    assert all(len(r["val_bpb"]) == 2 and r["flops"] > 0 for r in runs) and len({r["val_bpb"][-1] for r in runs}) == 4


def test_runs_of_one_seed_see_the_same_data_and_start_from_the_same_weights(study):
    root, _, _, _ = study
    steps = {}
    for folder in glob.glob(str(root / "runs" / "*")):
        config = json.load(open(os.path.join(folder, "config.json")))
        steps[config["seed"], config["qk_norm"]] = [e for e in map(json.loads, open(os.path.join(folder, "log.jsonl"))) if "loss" in e]
    assert all(abs(steps[s, True][0]["loss"] - steps[s, False][0]["loss"]) < 1e-2 for s in (1, 2))      # fresh weights: QK-norm hardly shows
    kept = {run: [e["kept"] for e in entries] for run, entries in steps.items()}
    assert kept[1, True] == kept[1, False] != kept[2, True]                      # the Goldfish mask is that of the same windows


def test_a_study_of_several_rates_searches_with_seed_0_and_reports_the_others(study):
    root, args, calls, _ = study
    (root / "search.py").write_text((root / "mini.py").read_text().replace('"mini"', '"search"').replace("(3e-3,)", "(3e-3, 1e-7)"))
    before = len(calls)
    assert script("studies.ablate", root / "search.py", *args).returncode == 0
    asked = [{flag.split("=")[0]: flag.split("=")[1] for flag in call if "=" in flag} for call in calls[before:]]
    assert sorted((float(a["--lr"]), a["--seed"]) for a in asked) == [(1e-7, "0")] * 2 + [(3e-3, "0")] * 2     # the others: as in `mini`
    runs = [json.loads(line) for line in open(root / "results" / "search" / "runs.jsonl")]
    assert sorted((r["lr"], r["seed"]) for r in runs if r["seed"]) == [(3e-3, 1), (3e-3, 1), (3e-3, 2), (3e-3, 2)]
    csv_of = {name: (root / "results" / name / "results.csv").read_text() for name in ("mini", "search")}
    assert csv_of["search"] == csv_of["mini"].replace(",False,", ",True,")   # the same runs; the larger of two rates is at the edge
    assert "best of 1e-07, 0.003 with seed 0, which is not reported" in (root / "results" / "search" / "table.md").read_text()


def test_a_finished_run_is_not_done_again_and_a_broken_one_is_gone_on_with(study):
    root, args, calls, _ = study
    before = open(root / "results" / "mini" / "results.csv").read()
    n = len(calls)
    assert script("studies.ablate", root / "mini.py", *args).returncode == 0 and len(calls) == n
    reported = lambda folder: json.load(open(os.path.join(folder, "config.json")))["seed"] == 1
    broken = next(folder for folder in glob.glob(str(root / "runs" / "*")) if reported(folder))
    lines = open(os.path.join(broken, "log.jsonl")).readlines()
    with open(os.path.join(broken, "log.jsonl"), "w") as f:                   # killed in its third step, before any checkpoint
        f.writelines([*lines[:3], '{"step": 2, "lo'])
    os.remove(os.path.join(broken, "summary.json"))
    for folder in glob.glob(os.path.join(broken, "ckpt", "*")):
        os.rename(folder, folder + ".lost")
    assert script("studies.ablate", root / "mini.py", *args).returncode == 0 and len(calls) == n + 1
    strip = lambda text: [{k: v for k, v in r.items() if k != "seconds"} for r in csv.DictReader(text.splitlines())]
    assert strip(open(root / "results" / "mini" / "results.csv").read()) == strip(before)         # the same bits again


def test_a_failing_run_stops_the_study_with_its_own_words(study, tmp_path):
    root, args, _, _ = study
    (tmp_path / "bad.py").write_text('study, baseline = "bad", "a"\narms = dict(a={}, b=dict(n_head=3))\nlrs = (3e-3,)\n')
    done = script("studies.ablate", tmp_path / "bad.py", *args)
    assert done.returncode == 2 and "not divisible by n_head=3" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arms, says", [
    ("dict(a={}, b=dict(activtion='gelu'))", "did you mean 'activation'"), ("dict(a={}, b=dict(n_layer='many'))", "n_layer wants int"),
    ("dict(a={}, b='configs/nowhere.py')", "no config file"), ("dict(a={})", "name a study"), ("dict(b={}, c={})", "name a study")])
def test_an_override_that_does_not_exist_is_told_before_the_first_run(study, tmp_path, arms, says):
    _, args, calls, _ = study
    (tmp_path / "bad.py").write_text(f'study, baseline = "bad", "a"\narms = {arms}\nlrs = (3e-3,)\n')
    before = len(calls)
    done = script("studies.ablate", tmp_path / "bad.py", *args)
    assert done.returncode == 2 and says in done.stderr and len(calls) == before


@pytest.mark.parametrize("log, says", [("", "does not end with a validation"), ('{"step": 0, "tokens": 1, "loss": 1.0}\n{"step', "does not end with a validation"), (None, "has no log.jsonl")])
def test_missing_and_half_written_logs_are_told(tmp_path, log, says):
    if log is not None:
        (tmp_path / "log.jsonl").write_text(log)
    with pytest.raises(ValueError, match=says):
        ablate.read_run(str(tmp_path), "a", 1e-3, 1)


# -----------------------------------------------------------------------------
# what is committed


@pytest.mark.parametrize("path", sorted(glob.glob(os.path.join(ROOT, "configs", "ablations", "*.py"))), ids=os.path.basename)
def test_every_study_that_is_shipped_asks_for_settings_that_exist(path, monkeypatch):
    found = runpy.run_path(path)
    monkeypatch.chdir(ROOT)
    if "study" not in found:
        assert ablate.check_arguments([path, "--lr=0.001"])                  # a config of train.py: a size, or the Llama-style recipe
        return
    assert found["study"] + ".py" == os.path.basename(path) and found["baseline"] in found["arms"] and found["published"]
    for arm in found["arms"].values():
        assert ablate.check_arguments(ablate.arguments(arm, found["lrs"][0], 1))["seed"] == 1


@pytest.mark.parametrize("folder", STUDIES, ids=os.path.basename)
def test_committed_tables_are_what_the_committed_runs_give(folder, tmp_path):
    name = os.path.basename(folder)
    os.makedirs(tmp_path / name)
    (tmp_path / name / "runs.jsonl").write_bytes(open(os.path.join(folder, "runs.jsonl"), "rb").read())
    done = script("studies.ablate", f"configs/ablations/{name}.py", "--report", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    for file in ("results.csv", "table.md"):
        assert (tmp_path / name / file).read_text() == open(os.path.join(folder, file)).read(), file


@pytest.mark.skipif(not STUDIES, reason="no committed results")
def test_the_committed_overview_is_what_the_committed_runs_give():
    out = os.path.join(ROOT, "results", "ablations")
    before = open(os.path.join(out, "overview.md")).read()
    assert before == ablate.overview_md() and before.count("\n") > len(STUDIES)


def test_a_real_run_of_train_py_goes_through_a_process_of_its_own(tmp_path):
    with pytest.raises(ValueError, match="ended with code 2: train.py: no data in"):
        kit.train(str(tmp_path / "run"), ["configs/tiny.py", "--data=/nowhere"])
