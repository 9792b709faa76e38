"""ablate.py and kit.py: statistics against scipy, R and closed forms, a small study, and the committed studies."""

import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from conftest import ROOT, script
from scipy import stats
from trained import data  # noqa: F401

import convert
from engine.files import read_text
from engine.intervals import p_value, t_quantile
from studies import ablate, compare, kit
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
        table = compare.summarise(rows)
        compare.table_md(table)
        assert f"200 tokens: {conclusion} bits per byte." in table[1]["conclusion"]


def test_differences_are_of_runs_with_one_seed_in_whatever_order():
    """b is 0.1 above a for each seed, and 0, 10 and 20 above it if rows are paired by their place."""
    rows = [run("a", seed, 10 * seed) for seed in (1, 2, 3)] + [run("b", seed, 10 * seed + 0.1) for seed in (3, 1, 2)]
    _, b = compare.summarise(rows)
    assert b["differences"] == pytest.approx([0.1, 0.1, 0.1])


def test_contrasts_are_sums_of_arms_by_seed():
    """
    A difference of differences of four arms, whatever the seeds add to all of them. Authority: scipy's t-test of one
    sample and its interval. An arm that failed takes its contrasts with it.
    """
    finals = dict(a=[0.1, 0.2, 0.4], b=[0.3, 0.3, 0.9], c=[0.0, 0.1, 0.2], d=[0.05, 0.1, 0.4])
    rows = [run(arm, seed, 10 * seed + end) for arm in finals for seed, end in enumerate(finals[arm], 1)]
    contrasts = {"b - a": [["b"], ["a"]], "change": [["d", "a"], ["c", "b"]]}
    values = [finals["d"][i] + finals["a"][i] - finals["c"][i] - finals["b"][i] for i in range(3)]
    difference, change = compare.contrasts_of(compare.summarise(rows), contrasts)
    assert change["differences"] == pytest.approx(values)
    mean, half, p = change["student"]
    assert p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    low, high = stats.t.interval(0.95, 2, mean, stats.sem(values))
    assert (mean - half, mean + half) == pytest.approx((low, high))
    ps = [stats.ttest_1samp(row["differences"], 0).pvalue for row in (difference, change)]
    assert [difference["p_holm"], change["p_holm"]] == pytest.approx(kit.holm(ps))
    page = compare.contrasts_md([difference, change])
    assert f"| change | {mean:+.4f} ± {half:.4f} |" in page and compare.contrasts_md([]) == ""
    sure = [row | dict(val_bpb=[9.0, row["val_bpb"][-1] - (row["arm"] == "d")]) for row in rows]
    assert compare.contrasts_of(compare.summarise(sure), contrasts)[1]["verdict"] == "Below zero."
    rows[-1] |= dict(error="out of memory")
    assert [row["name"] for row in compare.contrasts_of(compare.summarise(rows), contrasts)] == ["b - a"]


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(seed=4), r"b has seeds \[1, 4\], a \[1, 2\]"),
        (dict(tokens=[200, 400]), "b was validated after other numbers of tokens than a"),
    ],
)
def test_arms_of_other_seeds_or_another_length_are_not_compared(change, says):
    rows = [run(arm, seed, 1.0) for arm in "ab" for seed in (1, 2)]
    rows[-1] |= change
    with pytest.raises(ValueError, match=says):
        compare.summarise(rows)


def test_a_rate_that_failed_is_never_the_best_and_a_failed_arm_is_left_out():
    failed = run("a", 0, 1.0) | dict(lr=1.0, error="step 3: loss nan")
    assert ablate.best_rates([failed, run("a", 0, 9.0)]) == dict(a=1e-3)
    rows = [run(arm, seed, 1.0) for arm in "abc" for seed in (1, 2)]
    rows[3] |= dict(error="out of memory", val_bpb=[])
    assert [row["arm"] for row in compare.summarise(rows)] == ["a", "c"]
    assert compare.list_failures(rows) == ["b failed at lr 0.001, seed 2: out of memory"]
    rows[0] |= dict(error="out of memory")
    with pytest.raises(ValueError, match="a failed at lr 0.001, seed 1"):
        compare.summarise(rows)


def test_the_verdict_and_the_seeds_that_would_decide():
    """
    Of sd 0.02 and mean -0.01 an interval without 0 wants t(n - 1) 0.02 / sqrt(n) < 0.01: scipy's smallest n. The same
    interval around 0 wants to lie within 0.01.
    """
    wanted = next(n for n in range(4, 99) if stats.t.ppf(0.975, n - 1) * 0.02 / n**0.5 < 0.01)
    assert compare.judge([-0.03, -0.01, 0.01], 0.5) == (
        f"Not decided: if mean and spread stay as they are, {wanted} seeds decide it."
    )
    assert f" {wanted} seeds" in compare.judge([-0.02, 0.0, 0.02], 1.0)
    assert compare.judge([0.0, 0.0, 0.0], 1.0) == "Level: the interval lies within ±0.01 bits per byte."
    assert compare.judge([-0.3, -0.31, -0.3], 0.01) == "Better."
    assert compare.judge([0.3, 0.31, 0.3], 0.01) == "Worse."


def test_runs_take_the_visible_gpus_in_turn_and_keep_their_order(monkeypatch):
    monkeypatch.setattr(kit.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [*kit.in_parallel(0, lambda n, device: n + device, "abc")] == ["a5", "b7", "c5"]
    with pytest.raises(ValueError, match="jobs=-1"):
        kit.in_parallel(-1, print)


# -----------------------------------------------------------------------------
# a whole study

SHORTER = "compile = False\ntotal_samples = 32\nwarmup_samples = 8\ndecay_samples = 8\neval_every = 2\n"


def small_flags(folder, data):
    """Flags of a study of 4 steps a run, with two seeds and two rates, all in a folder that has a size.py."""
    return (
        f"--size={folder}/size.py",
        f"--data={data}",
        f"--out={folder}",
        f"--runs={folder}/runs",
        "--seeds=2",
        "--jobs=1",
        "--lrs=1e-3,3e-3",
    )


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


def test_the_seconds_of_a_run_that_was_stopped_are_those_of_all_its_processes(tmp_path, monkeypatch):
    seconds = iter([40.0, 1.25, 2.5])

    def process(command, file, env, folder):
        spent = next(seconds)
        kit.write(f"{tmp_path}/run/{'summary.json' if spent == 2.5 else 'half'}", "{}")
        return 0 if spent == 2.5 else -15, spent

    monkeypatch.setattr(kit, "run_process", process)
    for _ in range(2):
        with pytest.raises(ValueError, match="If it was stopped, give the same command again"):
            kit.train(f"{tmp_path}/run", ["train"])
    kit.train(f"{tmp_path}/run", ["train"])
    assert json.loads(read_text(f"{tmp_path}/run.json"))["cpu_seconds"] == pytest.approx(43.75, abs=0.1)
    kit.train(f"{tmp_path}/run", ["train"])
    assert next(seconds, "none is left") == "none is left"


def test_two_studies_that_share_a_run_train_it_once(tmp_path, monkeypatch):
    """The second waits for the first. If it started the run too, train.py would find the folder locked, and fail."""
    started = []

    def process(command, file, env, folder):
        started.append(command)
        time.sleep(0.3)
        kit.write(f"{tmp_path}/run/summary.json", "{}")
        return 0, 1.0

    monkeypatch.setattr(kit, "run_process", process)
    folders = [f"{tmp_path}/run"] * 3
    assert len([*kit.in_parallel(3, lambda folder, device: kit.train(folder, ["train"]), folders)]) == 3
    assert len(started) == 1
    assert json.loads(read_text(f"{tmp_path}/run.json"))["cpu_seconds"] == 1.0


def test_of_a_process_that_was_killed_with_its_study_the_seconds_are_not_known(tmp_path, monkeypatch):
    def process(command, file, env, folder):
        kit.write(f"{tmp_path}/run/summary.json", "{}")
        return 0, 2.5

    monkeypatch.setattr(kit, "run_process", process)
    args = [f"--out={tmp_path}/run", "--resume"]
    kit.write(f"{tmp_path}/run/log.jsonl", "")
    kit.write(f"{tmp_path}/run.json", json.dumps(dict(args=args, sources=kit.read_sources("train", *args))))
    kit.train(f"{tmp_path}/run", ["train"])
    assert json.loads(read_text(f"{tmp_path}/run.json"))["cpu_seconds"] is None


@pytest.mark.parametrize("last, error", [(1.5, None), (math.nan, "its last validation is not finite")])
def test_a_run_that_diverges_at_its_end_has_failed(tmp_path, monkeypatch, last, error):
    """Whatever its earlier validations were."""
    lines = [dict(step=n, tokens=n, val_bpb=bpb) for n, bpb in ((1, 2.0), (2, last))]
    kit.write(f"{tmp_path}/run/log.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    kit.write(f"{tmp_path}/run.json", json.dumps(dict(cpu_seconds=1)))
    monkeypatch.setattr(ablate, "count_parameters", lambda folder: 7)
    row = ablate.read_run(ablate.Run(f"{tmp_path}/run", [], {}), "")
    assert row.get("error") == error and row["val_bpb"] == [2.0, 1.5][: 1 + (error is None)]


def test_two_arms_make_a_table_a_plot_and_a_sentence(data, tmp_path, monkeypatch):
    """
    Two arms, two seeds, two rates and 4 steps: reported seeds use the rate with the lower loss in their arm's search.

    Then the sources change: a comment trains nothing, a formula all runs, and one amid the study ends it. train.py runs
    in this process, which saves twelve imports of torch.
    """
    (tmp_path / "size.py").write_text(read_text(f"{ROOT}/configs/tiny.py") + SHORTER)
    flags = small_flags(tmp_path, data)
    calls = []
    model = tmp_path / "code" / "model.py"
    for file in kit.read_sources("train") | kit.read_sources("papers.structured_ffn"):
        (model.parent / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(ROOT, file), model.parent / file)
    monkeypatch.setattr(kit, "ROOT", str(model.parent))

    def in_process(command, file, env, folder):
        calls.append(command[2])
        if len(calls) == 10:
            model.write_text(model.read_text() + "c = 3\n")
        done = script("train", *command[3:])
        file.write(done.stderr)
        return done.returncode, 1.5

    monkeypatch.setattr(kit, "run_process", in_process)
    done = script("studies.ablate", "gelu", "relu2", *flags)
    assert done.returncode == 0, done.stderr
    assert calls == ["train"] * 8
    [results] = tmp_path.glob("gelu-relu2-*")
    assert set(os.listdir(results)) == {"runs.jsonl", "table.md", "plot.png", "curves.png"}
    assert "2 seeds, " in done.stdout
    assert "learning rate that was tried, so a better one may lie beyond" in done.stdout
    assert done.stdout.endswith(f"wrote {results}/table.md, plot.png and curves.png\n")
    for arm in ("gelu", "relu2"):
        low, high, *reported = [row for row in kit.read_rows(results / "runs.jsonl") if row["arm"] == arm]
        best = min(low, high, key=compare.final_bpb)["lr"]
        assert [(row["seed"], row["lr"]) for row in reported] == [(1, best), (2, best)]
        assert {row["parameters"] for row in reported} == {small_model_parameters(tmp_path / "runs")}
        assert {row["cpu_seconds"] for row in reported} == {1.5}
    model.write_text(model.read_text() + "# a comment\n")
    assert script("studies.ablate", "gelu", "relu2", *flags).returncode == 0 and len(calls) == 8
    model.write_text(model.read_text() + "b = 2\n")
    done = script("studies.ablate", "gelu", "relu2", *flags)
    assert "model.py changed after 4 of these runs: they are trained again" in done.stdout and len(calls) == 12
    assert done.returncode == 2 and "model.py changed while the study ran" in done.stderr


def test_studies_that_write_the_same_settings_in_other_words_share_a_finished_run(data, tmp_path, monkeypatch):
    """
    A finished run is one whose record has its arguments. Of a start model or of another checkout a setting at our
    default may differ from theirs, so there it counts.
    """
    monkeypatch.setattr(ablate, "runs", str(tmp_path))
    sources = {script: kit.read_sources(script) for script in ablate.SCRIPTS} | {"../idea": {}}

    def plan(arm, size="configs/tiny.py", code=""):
        study = ablate.STUDY | dict(arms=dict(one=arm), size=size, code=code, data=data)
        return ablate.plan_run(study, sources, "one", 3e-3, 1)

    first = plan("--activation=xielu", "configs/tiny.py --dtype=float32")
    args = [*first.command[1:], f"--out={first.folder}", "--resume"]
    kit.write(f"{first.folder}.json", json.dumps(dict(args=args, sources=kit.read_sources("train"))))
    kit.write(f"{first.folder}/summary.json", "")
    for arm in ("", "--optimizer=ademamix --goldfish_k=50"):
        assert plan(arm).folder == first.folder
        kit.train(plan(arm).folder, plan(arm).command)
    assert plan("--activation=relu2").folder != first.folder
    for elsewhere in (dict(size="configs/tiny.py --init_from=x"), dict(code="../idea")):
        assert plan("--activation=xielu", **elsewhere).folder != plan("", **elsewhere).folder
        assert "--activation=xielu" in plan("--activation=xielu", **elsewhere).command


@pytest.mark.parametrize(
    "args, says",
    [
        ("--alpha=3.0 --lr=1e-2", "arm mine sets lr"),
        ("--seed 3 --data=x", "arm mine sets data, seed"),
        ("CONFIG", "arm mine sets data"),
        ("--total_samples=2400", r"arm mine trains on 614,400 tokens, base on 307,200"),
    ],
)
def test_an_arm_sets_neither_rate_nor_seed_nor_data_nor_length(data, tmp_path, args, says):
    """In its flags or in a config of its own. The baseline's config has a rate, which is a default and no error."""
    (tmp_path / "own.py").write_text(f"data = '{data}'\nlr = 1e-3\n")
    arms = dict(base="configs/ablations/llama.py", mine=args.replace("CONFIG", f"{tmp_path}/own.py"))
    with pytest.raises(ValueError, match=says):
        ablate.check_lengths(ablate.STUDY | dict(arms=arms, data=data), dict.fromkeys(ablate.SCRIPTS))


def test_size_sets_neither_rate_nor_seed(data):
    """The configs of --size have a rate and a folder, which are defaults and no error."""
    study = ablate.STUDY | dict(arms=dict(base=""), size="configs/laptop.py", data=data)
    ablate.check_lengths(study, dict.fromkeys(ablate.SCRIPTS))
    with pytest.raises(ValueError, match="--size sets lr, seed, which the study sets"):
        wrong = study | dict(size="configs/laptop.py --seed=7 --lr=1e-2")
        ablate.check_lengths(wrong, dict.fromkeys(ablate.SCRIPTS))


@pytest.mark.parametrize(
    "args, says",
    [
        ("xielu relu", "relu is neither a study nor an arm, did you mean relu2 "),
        ("xielu muon", "xielu is of activation, muon is of optimizer: want two or more values of one setting"),
        ("xielu", "xielu has nothing to be compared with: add swiglu or "),
        ("tying xielu", "tying is a study, which stands alone"),
        ("xielu relu2 --lrs=abc", "--lrs=abc: want one or more peak learning rates, such as --lrs=3e-3 or "),
        ("xielu relu2 --report --lrs=3e-3 --out=TMP", r"is TMP/xielu-relu2-123456 \(python OLD --out=TMP --report"),
    ],
)
def test_a_command_that_names_no_study_says_what_is_wrong(tmp_path, args, says):
    kit.write_rows(f"{tmp_path}/xielu-relu2-123456/runs.jsonl", [run("xielu", 1, 1.0) | dict(command="python OLD")])
    done = script("studies.ablate", *args.replace("TMP", str(tmp_path)).split())
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search(says.replace("TMP", str(tmp_path)), done.stderr), done.stderr


def test_one_learning_rate_needs_no_comma(monkeypatch):
    for lrs, rates in ((3e-3, (3e-3,)), ((1e-3, 3e-3), (1e-3, 3e-3)), ([1e-3], (1e-3,)), (None, ())):
        monkeypatch.setattr(ablate, "lrs", lrs)
        assert ablate.read_rates() == rates


def test_a_new_idea_is_no_change_of_this_folder(tmp_path, capsys):
    """A run of the same settings by other sources is there. It is named if this folder's sources have changed alone."""
    kit.write(f"{tmp_path}/a-1.json", json.dumps(dict(sources=dict(model="1"))))
    here = ablate.Run(f"{tmp_path}/a-2", ["train"], dict(model="2"))
    ablate.report_changes([here._replace(root="/idea")])
    assert capsys.readouterr().out == ""
    ablate.report_changes([here])
    assert "model changed after 1 of these runs" in capsys.readouterr().out


@pytest.mark.slow
def test_the_code_of_another_folder_is_judged_and_a_crash_loses_no_other_arm(data, tmp_path):
    """
    Real runs of 4 steps. A copy without a change is level with a difference of 0. In the next, ReLU squared takes the
    place of xIELU: its result is that of --activation=relu2 here. The last crashes: its page reports that, and the
    baseline keeps its row.
    """
    (tmp_path / "size.py").write_text(read_text(f"{ROOT}/configs/tiny.py") + SHORTER)
    flags = [flag for flag in small_flags(tmp_path, data) if "jobs" not in flag and "lrs" not in flag]
    copy = tmp_path / "idea"
    not_needed = (".*", "results", "records", "assets", "tests", "docs", "data", "out", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*not_needed))
    flags += [f"--code={copy}", "--lrs=[1e-3]"]

    done = script("studies.ablate", "same", *flags)
    assert done.returncode == 0, done.stderr
    assert "+0.0000 ± 0.0000" in done.stdout and "Level: " in done.stdout and "The code is the same" in done.stdout

    model = copy / "model.py"
    before = model.read_text()
    model.write_text(before.replace('activation: str = "xielu"', 'activation: str = "relu2"'))
    assert model.read_text() != before
    done = script("studies.ablate", "mine", *flags)
    assert done.returncode == 0, done.stderr
    assert '+    activation: str = "relu2"' in done.stdout and "CPU s |" in done.stdout
    [folder] = tmp_path.glob("mine-*")
    base, mine = (
        [row for row in kit.read_rows(folder / "runs.jsonl") if row["arm"] == arm] for arm in ("baseline", "mine")
    )
    assert [row["val_bpb"] for row in base] != [row["val_bpb"] for row in mine]
    assert all(row["cpu_seconds"] > 0 for row in base + mine)

    model.write_text(before.replace("class Apertus(", "raise RuntimeError('an idea too many')\n\n\nclass Apertus(", 1))
    done = script("studies.ablate", "mine", *flags)
    assert done.returncode == 2 and "no result for mine" in done.stderr
    assert "mine failed at lr 0.001, seed 1: RuntimeError: an idea too many" in done.stdout
    assert "| baseline | 0.001" in done.stdout


def test_the_worked_example_of_docs_seeds_is_in_the_committed_rows():
    page = read_text(f"{ROOT}/docs/seeds.md")
    rows = kit.read_rows(f"{ROOT}/results/ablations/activations/runs.jsonl")
    table = {row["arm"]: row for row in compare.summarise(rows)}
    compare.table_md([*table.values()])
    by_seed = " | ".join(f"{difference:+.4f}" for difference in table["swiglu"]["differences"])
    assert f"| SwiGLU - xIELU, bits per byte | {by_seed} |" in page
    assert "14 seeds decide" in table["swiglu"]["conclusion"] and "14 seeds would show" in page
    assert table["relu2"]["conclusion"].endswith("Better.")


def test_results_name_their_command_and_another_study_is_not_written_over_them(data, tmp_path, monkeypatch):
    """A shorter trial gets a folder of its own; the same command with another arm behind it is an error."""
    monkeypatch.setattr(ablate, "paths", ["gelu", "relu2"])
    monkeypatch.setattr(ablate, "out", str(tmp_path))
    long = ablate.choose_study()
    monkeypatch.setattr(ablate, "seeds", 2)
    short = ablate.choose_study()
    assert long["folder"] != short["folder"] and "--seeds=2" in short["command"]
    rows = [run(arm, seed, 1.0) for arm in ("gelu", "relu2") for seed in (1, 2)]
    about = {key: short[key] for key in ("command", "size", "data")}
    rows = [row | about | dict(args=short["arms"][row["arm"]]) for row in rows]
    kit.write_rows(f"{short['folder']}/runs.jsonl", rows)
    ablate.check_folder(short)
    for change in (dict(size="configs/tiny.py"), dict(seeds=3), dict(arms=short["arms"] | dict(relu2="--alpha=3.0"))):
        with pytest.raises(ValueError, match="holds another study .*: name another --out"):
            ablate.check_folder(short | change)
    # An arm that crashed by a mistake in its arguments, which are mended.
    mended = short | dict(arms=short["arms"] | dict(relu2="--alpha=3.0"))
    crashed = [row | dict(error="ValueError") if row["arm"] == "relu2" else row for row in rows]
    kit.write_rows(f"{short['folder']}/runs.jsonl", crashed)
    ablate.check_folder(mended)
    kit.write_rows(f"{short['folder']}/runs.jsonl", [row | dict(seed=0, error="ValueError") for row in rows])
    ablate.check_folder(mended)
    assert compare.describe_origin(rows, "other")["command"] == f"`{short['command']}`"
    assert compare.describe_origin([run("gelu", 1, 1.0)], "today's")["command"].startswith("not recorded")


def test_each_arm_of_each_committed_study_is_a_run_of_its_own(data, monkeypatch):
    """
    plan_run() raises for a setting that the script lacks. Structured layers have a script of their own. On other data a
    study shows no committed conclusion.
    """
    monkeypatch.setattr(ablate, "data", data)
    monkeypatch.setattr(ablate, "paths", ["tying"])
    other = ablate.choose_study()
    assert other["folder"].startswith("out/ablations/tying-") and other["reading"] == ""
    assert f"--data={data}" in other["command"]
    for name, study in STUDIES.items():
        study = ablate.STUDY | study | dict(data=data)
        plans = {arm: ablate.plan_run(study, dict.fromkeys(ablate.SCRIPTS), arm, 1e-3, 1) for arm in study["arms"]}
        assert len({run.folder for run in plans.values()}) == len(plans)
        structured = {arm for arm, run in plans.items() if run.command[0] == "papers.structured_ffn"}
        assert structured == (plans.keys() - {"dense"} if name == "structured" else set())
