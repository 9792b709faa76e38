"""ablate.py and kit.py: statistics against scipy, R and closed forms, a small study, and the committed studies."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, script
from scipy import stats
from trained import data  # noqa: F401

import convert
from engine.files import read_text
from engine.intervals import p_value, t_quantile
from studies import ablate, kit
from studies.ablate import STUDIES


def run(arm, seed, final):
    """A row of runs.jsonl with two validations, the last of which is `final`."""
    curve = dict(tokens=[100, 200], val_bpb=[final + 1, final])
    return dict(arm=arm, lr=1e-3, seed=seed, parameters=10, seconds=1.0, **curve)


# -----------------------------------------------------------------------------
# statistics


def test_p_values_and_quantiles_are_scipys():
    for df in (1, 2, 4, 9, 30):
        assert p_value(-2.5, df) == pytest.approx(2 * stats.t.sf(2.5, df), rel=1e-9)
        assert t_quantile(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-6)


def test_holms_p_values_are_those_of_the_textbook():
    """Holm 1979, as in R's p.adjust(c(.01, .04, .03, .005), "holm")."""
    assert kit.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


CONCLUSIONS = {
    "b is higher than a by 0.085 to 0.135": [0.11, 0.10, 0.12],
    "b is lower than a by 0.085 to 0.135": [-0.11, -0.10, -0.12],
    "no significant difference between b and a: the 95 % interval is -0.265 to +0.352": [0.11, -0.10, 0.12],
}


def test_the_conclusion_is_the_interval_of_the_differences_by_seed():
    """
    A seed that is worse by 10 for both arms does not change their difference. Seed 0, of the search, is not reported.
    Authority: scipy.stats.t.interval(0.95, 2, mean, sem).
    """
    for conclusion, values in CONCLUSIONS.items():
        rows = [run(arm, 0, 5.0) for arm in "ab"]
        for seed, difference in enumerate(values, 1):
            rows.append(run("a", seed, 10 * seed))
            rows.append(run("b", seed, 10 * seed + difference))
        table = ablate.summarise(rows)
        ablate.table_md(table)
        assert f"200 tokens: {conclusion} bits per byte." in table[1]["conclusion"]


def test_runs_take_the_visible_gpus_in_turn_and_keep_their_order(monkeypatch):
    monkeypatch.setattr(kit.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [*kit.in_parallel(0, lambda n, device: n + device, "abc")] == ["a5", "b7", "c5"]
    with pytest.raises(ValueError, match="jobs=-1"):
        kit.in_parallel(-1, print)


# -----------------------------------------------------------------------------
# a whole study


def small_model_parameters(runs):
    """The parameters of the first of the runs, which all have the same shape, as the model counts them."""
    first = next(path for path in sorted(runs.iterdir()) if path.is_dir())
    return convert.load_any(str(first))[0].num_params()


def test_a_folder_that_other_code_has_made_is_not_reused(tmp_path):
    old = dict(args=[f"--out={tmp_path}/run", "--resume"], sources={})
    kit.write(f"{tmp_path}/run.json", json.dumps(old))
    kit.write(f"{tmp_path}/run/summary.json", "")
    with pytest.raises(ValueError, match=r"before a change of ademamix.py, .* more: delete it"):
        kit.train(f"{tmp_path}/run", ["train"])


def test_two_arms_make_a_table_a_plot_and_a_sentence(data, tmp_path, monkeypatch):
    """
    Two arms, two seeds, two rates and 4 steps: reported seeds use the rate with the lower loss in their arm's search.

    Then the sources change: a comment trains nothing, a formula all runs, and one amid the study ends it. train.py runs
    in this process, which saves twelve imports of torch.
    """
    shorter = "total_samples = 32\nwarmup_samples = 8\ndecay_samples = 8\neval_every = 2\n"
    (tmp_path / "size.py").write_text(read_text(f"{ROOT}/configs/tiny.py") + shorter)
    flags = (
        f"--size={tmp_path}/size.py",
        f"--data={data}",
        f"--out={tmp_path}",
        f"--runs={tmp_path}/runs",
        "--seeds=2",
        "--jobs=1",
        "--lrs=1e-3,3e-3",
    )
    calls = []
    model = tmp_path / "code" / "model.py"
    for file in kit.read_sources("papers.structured_ffn"):
        (model.parent / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(ROOT, file), model.parent / file)
    monkeypatch.setattr(kit, "ROOT", str(model.parent))

    def in_process(command, stdout, **_):
        calls.append(command[2])
        if len(calls) == 10:
            model.write_text(model.read_text() + "c = 3\n")
        done = script("train", *command[3:])
        stdout.write(done.stderr)
        return done

    monkeypatch.setattr(kit, "subprocess", SimpleNamespace(run=in_process))
    done = script("studies.ablate", "gelu", "relu2", *flags)
    assert done.returncode == 0, done.stderr
    assert calls == ["train"] * 8
    results = tmp_path / "gelu-relu2"
    assert set(os.listdir(results)) == {"runs.jsonl", "table.md", "plot.png", "curves.png"}
    assert "2 seeds, " in done.stdout and "8/8" in done.stderr
    assert "learning rate that was tried, so a better one may lie beyond" in done.stdout
    assert done.stdout.endswith(f"wrote {results}/table.md, plot.png and curves.png\n")
    for arm in ("gelu", "relu2"):
        low, high, *reported = [row for row in kit.read_rows(results / "runs.jsonl") if row["arm"] == arm]
        best = min(low, high, key=ablate.final_bpb)["lr"]
        assert [(row["seed"], row["lr"]) for row in reported] == [(1, best), (2, best)]
        assert {row["parameters"] for row in reported} == {small_model_parameters(tmp_path / "runs")}
    model.write_text(model.read_text() + "# a comment\n")
    assert script("studies.ablate", "gelu", "relu2", *flags).returncode == 0 and len(calls) == 8
    model.write_text(model.read_text() + "b = 2\n")
    done = script("studies.ablate", "gelu", "relu2", *flags)
    assert "model.py changed after 4 of these runs: they are trained again" in done.stdout and len(calls) == 12
    assert done.returncode == 2 and "model.py changed while the study ran" in done.stderr


def test_each_arm_of_each_committed_study_is_a_run_of_its_own(data, monkeypatch):
    """
    plan_run() raises for a setting that the script lacks. Structured layers have a script of their own. On other data a
    study shows no committed conclusion.
    """
    monkeypatch.setattr(ablate, "data", data)
    monkeypatch.setattr(ablate, "paths", ["tying"])
    other = ablate.choose_study()
    assert (other["folder"], other["reading"]) == ("out/ablations/tying", "")
    assert f"--data={data}" in other["command"]
    for name, study in STUDIES.items():
        study = ablate.STUDY | study
        plans = {arm: ablate.plan_run(study, dict.fromkeys(ablate.SCRIPTS), arm, 1e-3, 1) for arm in study["arms"]}
        assert len(dict(plans.values())) == len(plans)
        structured = {arm for arm, (_, command) in plans.items() if command[0] == "papers.structured_ffn"}
        assert structured == (plans.keys() - {"dense"} if name == "structured" else set())
