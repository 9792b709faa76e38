"""Every command of the README is run: as it stands there, with more arguments behind it that make it small (later ones win)."""
import glob
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, script

with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
    README = f.read()
LINES = [line.partition("#")[0].strip() for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]
COMMANDS = [line for line in LINES if line]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small corpus, a run in bytes, its export, and the files that the README's reader would have."""
    root = tmp_path_factory.mktemp("readme")
    (root / "my_texts").mkdir()
    for i in range(12):
        (root / "my_texts" / f"{i}.txt").write_text(f"The text number {i} is about nothing. " * 40, encoding="utf-8")
    pages = [dict(text=f"Page {i}. " + "All of it is text. " * 40, url=f"https://site{i % 3}.org/{i}") for i in range(12)]
    chats = [dict(messages=[dict(role="system", content="s"), dict(role="user", content=f"{i}?"), dict(role="assistant", content="yes")]) for i in range(8)]
    prompts = [dict(messages=row["messages"][:2], completions=["yes", "no"]) for row in chats]
    robots = [dict(domain="site1.org", content="User-agent: GPTBot\nDisallow: /")]
    for name, rows in dict(pages=pages, conversations=chats, prompts=prompts, robots=robots).items():
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (root / "reward.py").write_text("def reward(prompt, completion):\n    return float(len(completion))\n", encoding="utf-8")
    assert script("prepare.py", root / "my_texts", f"--out={root / 'data'}", "--tokenizer=byte", "--val_share=0.2").returncode == 0
    done = script("train.py", "configs/tiny.py", f"--data={root / 'data'}", f"--out={root / 'run'}", "--total_samples=32", "--decay_samples=8", "--block_size=256")
    assert done.returncode == 0, done.stderr
    return root


def script_of(words):
    """python X.py ... or python -m ROOM.X ... -> X.py or ROOM.X."""
    return words[2] if words[1] == "-m" else words[1]


def small(command, root):
    """The arguments that make a README command small; they stand behind its own."""
    tiny = ["configs/tiny.py", f"--data={root}/data", "--total_samples=32", "--decay_samples=8", "--block_size=256"]
    align = ["--micro_batch=2", "--batch_size=4", "--max_length=250", "--dtype=float32"]
    if "train.py" in command:
        out = f"{root}/run" if command.endswith("laptop.py --resume") else f"{root}/{abs(hash(command))}"
        return [*tiny, *(["--vocab_size=0", "--batch_ramp_at=0"] if "8b.py" in command else []), f"--out={out}", *(["--total_samples=40"] if "--resume" in command else []), *(["--ffn_rank=16"] if "--ffn" in command else [])]
    script_name = script_of(command.split())
    return {"prepare.py": [f"--out={root}/{abs(hash(command))}"],
            "sample.py": [f"--init_from={root}/run", "--max_new_tokens=8", "--dtype=float32"],
            "convert.py": [f"--load={root}/run", f"--save={root}/hf"],
            "engine.plot": [f"--out={root}/plot.png"],
            "studies.explain": [f"--out={root}"],
            "tools.plan": ["configs/tiny.py", "--vocab_size=320", "--gpus=2", f"--picture={root}/plan.png"],
            "posttrain.sft": [f"--init_from={root}/run", f"--out={root}/sft", *align],
            "posttrain.qrpo": [f"--init_from={root}/run", f"--out={root}/qrpo", "--n_refs=2", "--max_new_tokens=8", *align],
            "studies.ablate": ["--report", f"--out={root}/results/ablations"],
            "evaluate.py": [f"--init_from={root}/run", "--limit=2", f"--out={root}/evaluate"],
            "tools.bench": ["--preset=tiny", "--impls=hf", "--rounds=2", "--warmup=1", f"--out={root}/bench"]}.get(script_name, [])


def small_align(root):
    """Arguments for `make align`: two of its losses, from a model that some seconds of SFT have taught to say digits."""
    import numpy as np
    from studies import digits as align
    rng, rows = np.random.default_rng(0), []
    for _ in range(400):
        total, first = int(rng.integers(10, 50)), int(rng.integers(1, 10))
        rows.append(dict(messages=[*align.question(total, first), dict(role="assistant", content=align.teacher(rng, total, first))]))
    (root / "digits.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (root / "tuning.json").write_text(json.dumps(dict(chosen={"qrpo": dict(lr=1e-3, beta=0.3), "dpo": dict(lr=3e-4, beta=1.0)})), encoding="utf-8")
    done = script("posttrain.sft", f"--init_from={root}/run", f"--data={root}/digits.jsonl", f"--out={root}/digits", "--batch_size=32", "--micro_batch=32",
                  "--lr=1e-2", "--optimizer=adamw", "--epochs=2")
    assert done.returncode == 0, done.stderr
    return (f"--start={root}/digits --methods=qrpo,dpo --seeds=1 --n_conversations=128 --n_refs=3 --test_prompts=160 --samples=1 "
            f"--out={root}/align --results={root}/results/align --tuning={root}/tuning.json")


def made(words, root):
    """make with variables that make the target small. -o: the environment that these tests run in is ready."""
    if words[1] == "train":
        small = "configs/laptop.py configs/tiny.py --total_samples=32 --decay_samples=8 --compile"          # test_parallel.py's shapes: compiled once
        target = [f"RUN={root}/made", f"DATA={root}/data", f"CONFIG={small}"]
    elif words[1] == "align":
        target = [f"ALIGN={small_align(root)}"]
    else:
        target = [f"BOOKS=--report --out={root}/results/memorize"]          # test_memorize.py runs the demonstration itself, small
    return subprocess.run([*words, "-o", ".venv/ready", f"PY={sys.executable}", *target], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, place, monkeypatch):
    """It runs, and nothing of it goes outside the test's own folder."""
    words = shlex.split(command)
    if "tools.bench" in words or words[0] == "torchrun":      # compiling changes no claim here: test_parallel.py does it, and `make train`
        monkeypatch.setenv("CXX", "no-such-compiler")
    mine = {"notes.md": os.path.join(ROOT, "README.md"), "book.jsonl.gz": f"{place}/my_texts/1.txt", "my_texts/": f"{place}/my_texts/",
            "pages.jsonl": f"{place}/pages.jsonl", "data/stdlib": f"{place}/data", **dict.fromkeys(("out/laptop", "out/swiglu", "out/adamw"), f"{place}/run"),
            **{f"--{k}={f}": f"--{k}={place}/{f}" for k, f in (("robots", "robots.jsonl"), ("data", "conversations.jsonl"), ("data", "prompts.jsonl"),
                                                                ("rewards", "reward.py"))}, "--nproc_per_node=8": "--nproc_per_node=2"}
    words = [mine.get(word, word) for word in words]
    if words[0] == "make" and words[1] == "test":          # this very suite: what would be run is shown, not run again
        done = subprocess.run([*words, "-n", "-o", ".venv/ready"], cwd=ROOT, capture_output=True, text=True)
        assert "-m pytest" in done.stdout
    elif words[0] == "make":
        if not os.path.isdir(place / "results"):
            shutil.copytree(os.path.join(ROOT, "results"), place / "results")
        done = made(words, place)
    elif words[0] == "python":
        if "studies.ablate" in words and not os.path.isdir(place / "results"):
            shutil.copytree(os.path.join(ROOT, "results"), place / "results")
        name = script_of(words)
        done = script(name, *words[words.index(name) + 1:], *small(command, place), pictures=True)
    elif words[0] == "torchrun":
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", *words[1:], *small(command, place)], cwd=ROOT, capture_output=True, text=True,
                              env=dict(os.environ, OMP_NUM_THREADS="1"))
    else:                                                  # pip: everything is there already, so nothing is fetched nor resolved
        done = subprocess.run([sys.executable, "-m", *words, "--quiet", "--disable-pip-version-check", "--no-deps"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TESTS = {f: open(os.path.join(ROOT, "tests", f), encoding="utf-8").read() for f in os.listdir(os.path.join(ROOT, "tests")) if f.endswith(".py")}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "tests/README.md"])
def test_every_local_file_and_test_that_a_page_names_exists(page):
    with open(os.path.join(ROOT, page), encoding="utf-8") as f:
        text = f.read()
    files = re.findall(r"`([\w/]+\.(?:py|md|txt|png))`", text) + re.findall(r"\]\(([\w/]+\.\w+)\)|src=\"([^\"]+)\"", text)
    for name in files:
        name = name if isinstance(name, str) else name[0] or name[1]
        assert name in ("X.py", "test_X.py", "report.md") or any(os.path.exists(os.path.join(ROOT, folder, name)) for folder in ("", "tests")), name
    for file, test, another in re.findall(r"`(test_\w+\.py)::(test_\w+)`(?:, `::(test_\w+)`)?", text):
        assert all(f"def {name}(" in TESTS[file] for name in (test, another) if name), (file, test, another)


def test_the_table_of_speeds_is_made_from_the_records(place):
    path = os.path.join(ROOT, "records", "README.md")
    records = sorted(glob.glob(os.path.join(ROOT, "records", "*", "*.json")))
    shutil.copy(path, place / "speeds.md")
    assert records and script("tools.bench", *records, f"--readme={place / 'speeds.md'}").returncode == 0
    with open(path, encoding="utf-8") as f:
        assert (place / "speeds.md").read_text(encoding="utf-8") == f.read()


def test_the_speeds_that_the_readme_picks_stand_in_that_table():
    with open(os.path.join(ROOT, "records", "README.md"), encoding="utf-8") as f:
        table = f.read()
    picked = README.split("## How fast")[1].split("## ")[0]
    rows = [line for line in picked.splitlines() if line.startswith("| ") and "|---" not in line][1:]
    assert len(rows) == 4
    for row in rows:
        _, ours, theirs, nanogpt, machine = (cell.strip() for cell in row.split("|")[1:-1])
        line = next(line for line in table.splitlines() if f"| {ours} |" in line)
        for name, times in (("hf compile" if "compiled" in theirs else "hf", theirs), ("nanoGPT compile", nanogpt)):
            assert not times or f"{name} {times.removeprefix('compiled ')}" in line, (row, line)
        assert machine in line or not machine


def test_the_days_that_the_readme_names_follow_from_the_tokens():
    """Held by arithmetic: tokens, tokens a second, days. tests/test_plan.py holds what the plan computes."""
    rows = re.findall(r"^\| [\d.]+B, ([\d.]+)T \|.* \| ([\d,]+) \| ([\d,.]+) \|$", README, re.M)
    assert len(rows) == 4
    for tokens, speed, days in rows:
        assert float(tokens) * 1e12 / int(speed.replace(",", "")) / 86400 == pytest.approx(float(days.replace(",", "")), rel=0.02)


def test_the_table_of_faults_is_the_record_of_those_that_were_done():
    with open(os.path.join(ROOT, "results", "faults", "table.md"), encoding="utf-8") as f:
        table = f.read()
    with open(os.path.join(ROOT, "results", "faults", "faults.json"), encoding="utf-8") as f:
        rows = [row[:4] for fault in json.load(f).values() for row in fault["rows"]]
    shown = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert sorted(map(str, shown)) == sorted(str([str(cell) for cell in row]) for row in rows)
    done = f"{sum(row[1] for row in rows):,} faults"
    assert done in table and done in README


def test_what_is_said_of_the_studies_stands_in_their_overview():
    said = README.split("## Does it help?")[1].split("After 128")[0]
    with open(os.path.join(ROOT, "results", "ablations", "overview.md"), encoding="utf-8") as f:
        overview = f.read()
    found = [abs(float(x)) for x in re.findall(r"\| ([+-]\d\.\d+) ±", overview)]
    numbers = [float(x) for x in re.findall(r"0\.\d{3}", said)]
    assert len(numbers) == 3 and all(min(abs(x - y) for y in found) <= 0.00051 for x in numbers)
    assert "70 %" in said and "| 70% |" in overview


def on_meta(config):
    """The model of a config file, without memory for its weights."""
    import dataclasses
    import torch
    from model import Apertus, ApertusConfig
    found = runpy.run_path(os.path.join(ROOT, "configs", config + ".py"))
    names = {field.name for field in dataclasses.fields(ApertusConfig)}
    with torch.device("meta"):
        return Apertus(ApertusConfig(**{name: value for name, value in found.items() if name in names})), found


def test_the_flops_of_the_70b_are_the_reports():
    """
    6.74e24 for 15T tokens (arXiv 2509.14233, sec. 6): the products of the forward pass, two operations a multiplication, three times over;
    of attention all T x T pairs. Counted here layer by layer in whole numbers; the model's own count leaves out the masked half.
    """
    L, H, K, D, C, F, V, T = 80, 64, 8, 128, 8192, 43008, 131072, 4096
    layer = C * H * D + 2 * C * K * D + H * D * C + 2 * C * F               # q, k and v, o, up and down
    pairs = 2 * T * H * D                                                   # q k^T and p v
    report = 3 * 2 * (L * (layer + pairs) + V * C)
    model, config = on_meta("70b")
    assert model.flops_per_token(T) == report - 6 * L * pairs // 2
    assert f"{report * config['total_samples'] * T:.2e}" == "6.74e+24" and "6.74e24 FLOPs for the 70B's 15T tokens" in README


def test_the_sizes_that_the_readme_names_follow_from_the_configs():
    model, config = on_meta("8b")
    assert "downloads 16 GB" in README and round(model.num_params() * 2 / 1e9) == 16                         # bf16
    assert "a 29 GB table" in README and round(config["total_samples"] * 8 / 1e9) == 29                      # an int64 a window
    laptop = runpy.run_path(os.path.join(ROOT, "configs", "laptop.py"))
    assert "1.5M tokens" in README and round(laptop["total_samples"] * laptop["block_size"] / 1e6, 1) == 1.5


def test_the_readme_is_short_enough_to_be_read():
    words = re.sub(r"```.*?```", "", README, flags=re.S).split()
    assert len(words) <= 1_600


def test_what_is_said_of_recitation_stands_in_the_table_of_results():
    said = next(part for part in README.split("\n\n") if part.startswith("After 128 repetitions"))
    with open(os.path.join(ROOT, "results", "memorize", "table.md"), encoding="utf-8") as f:
        table = f.read()
    pairs = re.findall(r"(\d?\.\d+) \+- (\d?\.\d+)", said)
    assert len(pairs) >= 5
    for mean, half in pairs:
        assert f"{float(mean):.2f} ± {float(half):.2f}" in table, (mean, half)
