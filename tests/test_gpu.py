"""
tools/gpu.py on a CPU: what it refuses, and its table of steps with real processes. Speeds and numbers are the business
of tests/test_cuda.py and tools/bench.py.
"""
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from conftest import ROOT, refused, script
from tools import gpu

# What a process says of an H200 with everything that is wanted.
GOOD = dict(cuda="13.0", gpus=1, host_free=64e9, capability=[9, 0], compiles=True, total=150.7e9, free=150.1e9)


def test_a_gpu_with_all_that_is_wanted_is_taken():
    gpu.refuse(GOOD)
    gpu.refuse(GOOD | dict(capability=[8, 0], host_free=None))


@pytest.mark.parametrize("lacks, says", [
    (dict(cuda=None), "no CUDA: make gpu takes one"),
    (dict(gpus=0), "nvidia-smi should list one, with a driver for CUDA 13.0"),
    (dict(capability=[7, 5]), "capability 7.5, and bf16 and flex attention want 8.0"),
    (dict(compiles=False), "apt-get install gcc"),
    (dict(broken="CUDA error: busy"), "does not answer, CUDA error: busy"),
    (dict(free=120.7e9), "another process holds 30.0 of the GPU's 150.7 GB"),
    # Twice the head, 131,072 x 4,096 in fp32, and eight.
    (dict(host_free=10e9), "the host has 10.0 GB of memory free, and drawing and saving an 8B take 12.3")])
def test_what_a_gpu_lacks_is_one_line_with_the_next_step(lacks, says):
    with pytest.raises(ValueError) as error:
        gpu.refuse(GOOD | lacks)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_begun(tmp_path):
    done = script("tools.gpu", f"--out={tmp_path / 'out'}", f"--logs={tmp_path}")
    refused(done, "torch finds no GPU" if torch.version.cuda else "no CUDA")
    assert not os.path.exists(tmp_path / "out")


@pytest.mark.parametrize("args, says", [
    (["dekode"], "no step 'dekode', but equal-loss"), (["equ"], "no step 'equ'"),
    (["--device=tpu"], "there is cuda, and cpu"), (["--device=cpu"], "say --small"),
    (["--patience=0"], "patience=0")])
def test_what_cannot_be_asked_for_is_told_in_one_line(args, says):
    refused(script("tools.gpu", *args), says)


def test_all_steps_together_take_at_most_25_minutes():
    steps = gpu.all_steps()
    assert sum(step.seconds for step in steps) <= 25 * 60
    assert gpu.TARGETS.keys() <= {step.name for step in steps}


def test_the_order_is_equality_probes_and_then_speed():
    names = [step.name for step in gpu.all_steps()]
    equal = [name for name in names if name.startswith("equal-")]
    assert names[:len(equal)] == equal and names[len(equal)] == "probes"


def test_a_name_stands_for_its_step_and_for_all_that_begin_so(monkeypatch):
    monkeypatch.setattr(gpu, "paths", ["whole", "train"])
    assert [step.name for step in gpu.chosen()] == ["train-2", "train-4", "whole"]


def test_each_test_on_cuda_is_in_exactly_one_step_of_equality():
    """-k selects by a part of the name, as pytest's manual has it."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/test_cuda.py"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    tests = [line.partition("::")[2] for line in said.splitlines() if "::" in line]
    words = []
    for step in gpu.all_steps():
        if step.command[0] == "pytest":
            *how, word = step.command
            assert how == ["pytest", "-q", "tests/test_cuda.py", "-k"]
            words.append(word)
    assert tests
    for test in tests:
        assert sum(word in test for word in words) == 1, test


# -----------------------------------------------------------------------------
# a table of steps with real processes


STEPS = """
step         seconds  command
equal              60  pytest -q -p no:cacheprovider {folder}/test_equal.py
skipped            60  pytest -q -p no:cacheprovider {folder}/test_skipped.py
apart              60  pytest -q -p no:cacheprovider {folder}/test_apart.py
broken             60  broken
silent             60  silent
hanging             4  hanging
speed              60  tools.bench goldfish --rounds=1
"""

FILES = dict(
    test_equal="def test_one(): pass\ndef test_two(): pass",
    test_skipped="import pytest\ndef test_one(): pytest.skip('no GPU')",
    test_apart="def test_one(): pass\ndef test_two(): assert 1 == 2",
    broken="print('so far so good')\nraise ValueError('it broke')",
    silent="raise SystemExit(3)",
    # A child that would outlive it, as the compiler's do.
    hanging="""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
""")


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The steps above in place of the real ones, as a rehearsal on a CPU."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = dict(
        STEPS=STEPS.format(folder=tmp_path),
        device="cpu",
        small=True,
        out=str(tmp_path / "out"),
        logs=str(tmp_path / "logs"))
    for name, value in settings.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.chdir(ROOT)
    return tmp_path


@pytest.fixture
def known(monkeypatch):
    """What is here was asked already, which takes a process seconds."""
    where = dict(gpu=None, cpu="this one", torch=torch.__version__, commit="this", date="today")
    monkeypatch.setattr(gpu, "check_device", lambda: where)


def test_steps_that_fail_hang_or_compare_nothing_do_not_stop_the_others(table, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1 and "2 of 7 steps" in capsys.readouterr().out
    steps = json.loads((table / "out" / "summary.json").read_text())["steps"]
    assert {name: (about["says"], about["code"]) for name, about in steps.items()} == dict(
        equal=("as it should be", 0),
        skipped=("compared nothing", 0),
        apart=("failed", 1),
        broken=("failed", 1),
        silent=("failed", 3),
        hanging=("took too long", None),
        speed=("done", 0))
    assert steps["equal"]["value"] == 2 and steps["apart"]["value"] == 1
    assert steps["broken"]["last_line"] == "ValueError: it broke" and steps["silent"]["last_line"] == "it said nothing"
    # tools/bench.py reads all of them, and finds the one that is its own.
    files = sorted((table / "out").glob("*.json"))
    done = script("tools.bench", *files)
    assert len(files) == 8 and done.stdout.count("| goldfish, tiny, float32") == 1
    apart = json.loads((table / "out" / "apart.json").read_text())
    assert "test_two" in apart["facts"]["wrong"][0] and apart["torch"] == torch.__version__
    assert "took too long: killed after 4 s" in (table / "out" / "summary.md").read_text()


def test_what_a_step_has_started_is_killed_with_it(table, known, monkeypatch):
    monkeypatch.setattr(gpu, "paths", ["hanging"])
    with pytest.raises(SystemExit):
        gpu.main()
    child = int((table / "logs" / "hanging.log").read_text())
    # The kernel takes a moment.
    deadline = time.monotonic() + 30
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(child)


def test_a_step_that_is_run_again_replaces_its_result_and_leaves_the_others(table, known, monkeypatch):
    for name in ("broken", "silent"):
        monkeypatch.setattr(gpu, "paths", [name])
        with pytest.raises(SystemExit):
            gpu.main()
    (table / "broken.py").write_text("print('it broke otherwise'); raise SystemExit(4)")
    monkeypatch.setattr(gpu, "paths", ["broken"])
    with pytest.raises(SystemExit):
        gpu.main()
    steps = json.loads((table / "out" / "summary.json").read_text())["steps"]
    assert {name: about["code"] for name, about in steps.items()} == dict(broken=4, silent=3)


@pytest.mark.parametrize("name, key, value, says", [
    ("train-2", "MFU", 0.56, "as it should be: 56% MFU, of at least 55% MFU"),
    ("train-2", "MFU", 0.54, "short of it: 54% MFU, of at least 55% MFU"),
    ("whole", "peak GB", 139.9, "as it should be: 140 peak GB, of at most 140 peak GB"),
    ("whole", "peak GB", 150.2, "short of it: 150 peak GB, of at most 140 peak GB"),
    ("probes", "", None, "done"), ("decode", "tok/s", 3.0, "done")])
def test_a_target_is_held_against_the_rate_of_ours(tmp_path, monkeypatch, name, key, value, says):
    monkeypatch.setattr(gpu, "logs", str(tmp_path))
    (tmp_path / f"{name}.log").write_text("wrote it")
    step = next(step for step in gpu.all_steps() if step.name == name)
    record = dict(rows=dict(ours={key: value}), facts={})
    assert gpu.in_words(gpu.note(step, 0, 1.0, record, {})["step"]) == says


@pytest.mark.parametrize("where, folder", [
    (dict(gpu="NVIDIA H200", date="2026-01-02"), "records/2026-01-02-h200"),
    (dict(gpu="NVIDIA H100 80GB HBM3", date="2026-01-02"), "records/2026-01-02-h100-80gb-hbm3")])
def test_results_lie_under_the_day_and_the_name_of_the_gpu(monkeypatch, where, folder):
    assert gpu.folder_of(where) == folder
    monkeypatch.setattr(gpu, "small", True)
    assert not gpu.folder_of(where).startswith("records")


def test_the_rows_of_a_gpu_stand_in_the_table_of_the_records(tmp_path, monkeypatch):
    """A record of tools/bench.py as it would be there, beside a step that only compares and a summary."""
    row = dict(seconds=[1.0], median=1.0, min=1.0, spread=0.0, ratio=[1, 1, 1], first=2.0)
    row |= {"tok/s": 9876, "MFU": 0.57}
    where = dict(gpu="NVIDIA H200", cpu="x, 16 cores, AVX512", torch="2.11.0", transformers="5", threads=1,
                 clock="wall", date="2026-01-02", commit="c", command="python -m tools.bench train")
    what = dict(mode="train", preset="8b-stack", micro_batch=4, dtype="bfloat16")
    record = what | where | dict(facts={}, rows=dict(ours=row))
    folder = tmp_path / "records" / "2026-01-02-h200"
    os.makedirs(folder)
    for name, content in {"train-4": record, "equal-loss": record | dict(rows={}), "summary": dict(steps={})}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    page = tmp_path / "records" / "README.md"
    page.write_text("<!-- bench -->\n<!-- bench -->\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setattr(gpu, "logs", str(tmp_path / "logs"))
    gpu.into_readme()
    made = page.read_text()
    assert made.count("NVIDIA H200, 1 thread") == made.count("| train, ") == 1
    assert "| train, 8b-stack x 4, bfloat16, NVIDIA H200 | 9,876 tok/s | 57% MFU |" in made
