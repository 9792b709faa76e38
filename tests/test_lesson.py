"""tools/lesson.py: --check passes the project's file, tells an empty one at once, and names each planted mistake."""

import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import ROOT, refused, script
from transformers import AutoTokenizer  # noqa: F401  import it once, not in each fork

import ademamix
import goldfish
import model
import plain
import schedule
import tokenizer_json
import tools.cases
import tools.lesson
from corpus import robots
from engine.plot import entries
from posttrain import losses

LESSONS = tomllib.loads(Path(ROOT, "tools", "lessons.toml").read_text())
WRITTEN = [name for name in LESSONS if name != "plain"]
MISTAKES = tomllib.loads(Path(ROOT, "tests", "mistakes.toml").read_text())
pytestmark = pytest.mark.alone


def child(folder, main, argv):
    """Start like a new process: drop the project's modules that earlier tests have imported."""
    for name, module in [*sys.modules.items()]:
        # A folder is a module too, and keeps its files as attributes.
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "")
        if file.startswith(ROOT) and "site-packages" not in file and name != "tools.cases":
            del sys.modules[name]
    sys.path[:0] = [str(folder), ROOT]
    sys.argv = [*argv]
    sys.stdout = sys.stderr = open(folder / "log", "w")
    sys.exit(main())


def forked(folder, main, *argv):
    """(whether main() exits with 0, its output), in a fork of this process: importing torch takes seconds."""
    process = multiprocessing.get_context("fork").Process(target=child, args=(folder, main, argv))
    process.start()
    process.join(20)  # some mistakes never end
    process.kill()
    process.join()
    return process.exitcode == 0, (folder / "log").read_text()


@pytest.fixture
def lesson(tmp_path):
    return lambda *args: script("tools.lesson", f"--out={tmp_path}", *args)


def test_a_body_goes_with_its_comments_and_its_docstring_stays():
    source = "class A:\n    @property\n    def f(self):\n        # why\n        return 1\n\n\n"
    source += 'def g(\n    x,\n):\n    """Give x."""\n    # how\n    return x  # end\n\n\nh = 2\n'
    empty = source.replace("        # why\n        return 1\n", "        raise NotImplementedError('write A.f')\n")
    empty = empty.replace("    # how\n    return x  # end\n", "    raise NotImplementedError('write g')\n")
    assert tools.lesson.empty_functions(source, ["A.f", "g"]) == empty


@pytest.mark.parametrize("name", WRITTEN)
def test_the_cases_pass_our_file_and_name_each_mistake(tmp_path, name):
    row = LESSONS[name]
    source = Path(ROOT, row["file"]).read_text()
    file = tmp_path / row["file"]
    tools.lesson.write(file, source)
    assert forked(tmp_path, tools.cases.main, "", name)[0]
    assert forked(tmp_path, pytest.main, "", "--collect-only", *tools.lesson.shlex.split(row["tests"]))[0]
    assert row["mistakes"].keys() == {mistake["mistake"] for mistake in MISTAKES[name]}
    for mistake in MISTAKES[name]:
        text = source
        for old, new in mistake["changes"]:
            assert source.count(old) == 1
            text = text.replace(old, new)
        file.write_text(text)
        passed, log = forked(tmp_path, tools.cases.main, "", name)
        named = [name for name, message in row["mistakes"].items() if message in log]
        assert not passed and named == [mistake["mistake"]]


@pytest.mark.parametrize(
    "name, wrong, old, new",
    [
        ("goldfish", "kept_keys", "torch.Generator().manual_seed(SEED)\n", "torch.Generator().manual_seed(0)\n"),
        ("goldfish", "window_product", "lambda left, right, n: left * right)", "lambda left, right, n: left - right)"),
        ("feistel", "hash32", "* 0x85EBCA6B", "* 0x85EBCA6D"),
    ],
)
def test_a_function_is_not_blamed_for_one_that_it_calls(tmp_path, name, wrong, old, new):
    source = Path(ROOT, LESSONS[name]["file"]).read_text()
    assert old in source
    tools.lesson.write(tmp_path / LESSONS[name]["file"], source.replace(old, new))
    passed, log = forked(tmp_path, tools.cases.main, "", name)
    assert not passed and f"First mend {wrong} above" in log
    assert "typical mistake" not in log


def test_an_empty_file_is_told_at_once_then_cases_run_then_tests(lesson, tmp_path, capfd):
    lesson("goldfish")
    mine = tmp_path / "goldfish" / "goldfish.py"
    source = Path(ROOT, "goldfish.py").read_text()
    began = time.time()
    assert lesson("goldfish", "--check").stdout == "Not written yet: goldfish_mask, window_product, kept_keys\n"
    assert time.time() - began < 1
    mine.write_text(source)
    assert lesson("goldfish", "--check").stdout.startswith("Passed.")
    assert "passed" in capfd.readouterr().out
    # By hand, in other words than the project's, and with another function that is not there.
    mine.write_text(
        tools.lesson.empty_functions(source, ["window_product", "kept_keys"]).replace(
            "    raise NotImplementedError('write window_product')",
            "    return np.stack([x[i : i + h - 1].prod() for i in range(len(x) - h + 1)])",
        )
    )
    done = lesson("goldfish", "--check")
    assert done.returncode == 1 and done.stdout.startswith("Not written yet: kept_keys\n")
    assert "typical mistake: The hash ends before the label" in capfd.readouterr().out
    mine.write_text(source.replace('for bit in f"{h:b}"[1:]:', "while"))
    assert lesson("goldfish", "--check").returncode == 1
    assert "SyntaxError" in capfd.readouterr().err


def answers():
    """{lesson: the answer to its question}, by the project's own code."""
    with torch.device("meta"):
        whole = model.Apertus(model.ApertusConfig(n_layer=1), seed=None)
        [block] = whole.model.layers
    document = torch.arange(4096) // 512
    text = "User-agent: *\nDisallow: /\nAllow: /a\nDisallow: /a/b/"
    paths = "/", "/a", "/ab", "/a/b/c", "/a/b.pdf"
    with torch.device("meta"):
        three_layers = plain.initial_weights(256, 64, 336, (3, 4, 2))
    return {
        "plain": sum(p.numel() for p in three_layers.values()),
        "rope": 8192 * model.rope_frequencies(model.ApertusConfig(rope_scaling=0.0))[-1].item() / math.tau,
        "attention": 32 * 2 * 2 * block.self_attn.k_proj.weight.numel() // 4096,
        "xielu": sum(p.numel() for p in block.mlp.parameters()),
        "mask": (document[:, None] == document).tril().sum().item() / sum(range(4097)),
        "loss": 6 * whole.lm_head.weight.numel(),
        "goldfish": 0.06 * (1 - goldfish.kept_keys(4)[0]) + 0.94 * (1 - goldfish.kept_keys(4).mean()),
        "ademamix": ademamix.half_life(0.9999),
        "schedule": schedule.wsd(85, 1, 0.1, 20, 100, 30),
        "feistel": next(4**half for half in range(40) if 4**half > 2**32),
        "bpe": len(tokenizer_json.merges_of(["a", "aa", "aaa", "aaaa"])),
        "qrpo": losses.beta_log_z(0.2),
        "robots": sum(robots.may_train_on(f"https://a.example{path}", text)[0] for path in paths),
    }


def test_lesson_zero_is_the_whole_file(lesson, tmp_path):
    lesson("plain")
    assert (tmp_path / "plain" / "plain.py").read_text() == Path(ROOT, "plain.py").read_text()
    refused(lesson("plain", "--check"), "plain has nothing to check: change a line, predict, run, and --answer=NUMBER")
    for line in re.findall(r"(?m)^    (\S.*?) +->", LESSONS["plain"]["sheet"]):
        assert line in Path(ROOT, "plain.py").read_text()


def test_each_question_has_an_answer_that_the_code_confirms(lesson):
    right = answers()
    assert right.keys() == LESSONS.keys()
    for name, value in right.items():
        done = lesson(name, f"--answer={value}")
        assert (done.returncode, done.stdout) == (0, f"Right. {LESSONS[name]['because']}\n"), name
        assert lesson(name, f"--answer={1.02 * value}").stdout.endswith("is too large\n")
        assert lesson(name, f"--answer={0.5 * value}").returncode == 1


@pytest.mark.parametrize("name", ["goldfish", "xielu", "ademamix", "qrpo"])
def test_an_experiment_trains_with_the_readers_file_beside_ours(lesson, tmp_path, lab, name):
    """Its commands, with a few steps, in a folder of their own; on the lab's data, where no others are named."""
    lesson(name)
    row = LESSONS[name]
    mine = tmp_path / name / row["file"]
    mine.write_text(Path(ROOT, row["file"]).read_text() + "\nprint('by the reader')\n")
    sheet = (
        row["sheet"].replace("PYTHONPATH=lessons", f"PYTHONPATH={tmp_path}").replace("out/lessons", f"{tmp_path}/out")
    )
    blocks = re.findall(r"(?m)^    .*\n(?:(?:    .*)?\n)*", sheet[sheet.index("Experiment") :])
    commands = "set -e\n" + "".join(line[4:] + "\n" for block in blocks for line in block.splitlines())
    tiny = "configs/tiny.py"
    for old, new in ((tiny, f"{tiny} --data={lab}/data"), ("3200", "80"), ("=160 ", "=8 "), ("=960", "=24")):
        commands = commands.replace(old, new)
    (tmp_path / "out").mkdir()
    env = os.environ | dict(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-c", commands], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "by the reader" in done.stdout, done.stderr
    ours = dict(goldfish="forgets", xielu="xielu", ademamix="warm_ups", qrpo="qrpo")[name]
    losses = [[entry.get("loss") for entry in entries(tmp_path / "out" / run)] for run in (ours, f"my_{ours}")]
    assert losses[0] == losses[1] and len({*losses[0]}) > 2


def test_an_answer_that_forgets_something_is_told_what(lesson):
    """Who takes the key 0 for one like the others, and who takes it for one that keeps its label as at k = 50."""
    for answer, says in ((0.25, "Does the key 0 keep its label?"), (0.94 / 4, "as at k = 50")):
        done = lesson("goldfish", f"--answer={answer}")
        assert done.returncode == 1 and "is too small" in done.stdout and says in done.stdout
    assert lesson("goldfish", "--answer=0.2").stdout == "0.2 is too small\n"


def test_a_loop_that_does_not_end_is_told(tmp_path, capfd):
    assert tools.lesson.run_python(["-c", "while True: pass"], tmp_path, seconds=0.1) == 1
    assert "does a loop in your file end?" in capfd.readouterr().out


@pytest.mark.parametrize("name", LESSONS)
def test_no_hint_is_a_line_of_the_solution(name):
    row = LESSONS[name]
    source = Path(ROOT, row["file"]).read_text()
    empty = tools.lesson.empty_functions(source, row["write"])
    assert len(row["hints"]) == 3
    # Half a line would give it away too.
    for line in {*source.splitlines()} - {*empty.splitlines()}:
        expression = line.partition("#")[0].partition(" = ")[2].replace(" ", "") or line.strip()
        assert len(expression) < 16 or expression not in "".join(row["hints"]).replace(" ", "")


def test_hints_come_one_by_one_and_the_solution_is_a_difference(lesson, tmp_path, capfd):
    sheet = lesson("rope").stdout[:-1]
    assert LESSONS["rope"]["sheet"].strip() in sheet and "--answer=NUMBER" in sheet
    for n, step, hint in zip((1, 2, 3), ("where to look", "the idea", "the formula"), LESSONS["rope"]["hints"]):
        assert lesson("rope", "--hint").stdout == f"Hint {n} of 3, {step}: {hint}\n"
        sheet += f"\nHint {n} of 3, {step}: {hint}\n"
    assert LESSONS["robots"]["question"] in lesson("robots").stdout
    assert f"All three are at the end of {tmp_path}/rope/README.md" in lesson("rope", "--hint").stdout
    assert (tmp_path / "rope" / "README.md").read_text() == sheet
    mine = tmp_path / "rope" / "model.py"
    before = mine.read_text()
    mine.write_text(f"{before}# begun")
    lesson("rope")
    assert mine.read_text() == f"{before}# begun"
    assert (tmp_path / "rope" / "README.md").read_text() == sheet
    script("tools.lesson", "rope", f"--out={tmp_path}", "--solution")
    lines = capfd.readouterr().out.splitlines()
    assert "+    turned = torch.cat((-b, a), dim=-1)" in lines
    assert "-    raise NotImplementedError('write rotate')" in lines
