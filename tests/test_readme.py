"""
README.md, docs/ and the other pages: their commands run, and their names and numbers are true.

More arguments make a command small; they follow its own, and later ones win.
"""
import json
import os
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
import torch

from conftest import ROOT, script
from engine.runs import settings_of


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as f:
        return f.read()


PAGES = ["README.md", "CONTRIBUTING.md", "tests/README.md"]
PAGES += sorted(f"docs/{name}" for name in os.listdir(os.path.join(ROOT, "docs")))
README = read("README.md")
SCALE, POSTTRAINING, STUDIES = (read("docs", f"{name}.md") for name in ("scale", "posttraining", "studies"))
BLOCKS = re.findall(r"```sh\n(.*?)```", "".join(map(read, PAGES)), re.S)


def commands(blocks):
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return list(dict.fromkeys(filter(None, lines)))


# Lines that go on from each other's files begin with a variable: they are run in order, the others each by itself.
CHAIN = commands(block for block in BLOCKS if block.startswith("START="))
LOOP = commands(block for block in BLOCKS if block.startswith("FROM="))
COMMANDS = commands(block for block in BLOCKS if not block.startswith(("START=", "FROM=")))
TINY = "configs/tiny.py --total_samples=32 --decay_samples=8 --block_size=256".split()


def message(role, content):
    return dict(role=role, content=content)


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def write_files(root):
    """The files that the README's reader would have: texts, pages, robots, conversations, prompts, rewards."""
    (root / "my_texts").mkdir()
    for i in range(12):
        text = f"The text number {i} is about nothing. " * 40
        (root / "my_texts" / f"{i}.txt").write_text(text, encoding="utf-8")
    pages = [dict(text=page(i), url=f"https://site{i % 3}.org/{i}") for i in range(12)]
    robots = [dict(domain="site1.org", content="User-agent: GPTBot\nDisallow: /")]
    chats, prompts = [], []
    for i in range(8):
        prompt = [message("system", "s"), message("user", f"{i}?")]
        chats.append(dict(messages=[*prompt, message("assistant", "yes")]))
        prompts.append(dict(messages=prompt, completions=["yes", "no"]))
    write_rows(root / "pages.jsonl", pages)
    write_rows(root / "robots.jsonl", robots)
    (root / "opted_out.txt").write_text("1.txt\n", encoding="utf-8")
    write_rows(root / "conversations.jsonl", chats)
    write_rows(root / "prompts.jsonl", prompts)
    turns = [[("system", "s"), ("human", f"{i}?"), ("gpt", "yes")] for i in range(4)]
    rows = [dict(conversations=[{"from": who, "value": text} for who, text in three]) for three in turns]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / "sharegpt.parquet")
    reward = "def reward(prompt, completion):\n    return float(len(completion))\n"
    (root / "reward.py").write_text(reward, encoding="utf-8")


def page(seed):
    """Prose that the rules of Gopher, C4 and FineWeb keep: sentences, each a line, of words that do not come again."""
    words = [f"{a}{b}{c}" for a in "bdfgkl" for b in ("ar", "en", "il", "om") for c in "aeiou"]
    some = iter(random.Random(seed).sample(words, 108))
    line = "{} {} the {} of {} {} and {} {} with {} {}."
    return "\n".join(line.format(*(next(some) for _ in range(9))) for _ in range(12))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small corpus, a run in bytes, its export, and the files that the README's reader would have."""
    root = tmp_path_factory.mktemp("readme")
    write_files(root)
    data = f"{root}/data"
    done = script("prepare.py", root / "my_texts", f"--out={data}", "--tokenizer=byte", "--val_share=0.2")
    assert done.returncode == 0, done.stderr
    # A run goes on from before its decay, which is the last step here.
    done = script("train.py", *TINY, "--checkpoint_every=1", f"--data={data}", f"--out={root}/run")
    assert done.returncode == 0, done.stderr
    return root


def script_of(words):
    """python X.py ... or python -m ROOM.X ... -> X.py or ROOM.X."""
    return words[2] if words[1] == "-m" else words[1]


def small_training(command, root):
    """The arguments that make a pretraining command small."""
    goes_on = command.endswith("laptop.py --resume")
    out = "run" if goes_on else abs(hash(command))
    args = [*TINY, f"--data={root}/data", f"--out={root}/{out}"]
    if "8b.py" in command:
        args += ["--vocab_size=0", "--batch_ramp_at=0"]
    if goes_on:
        args += ["--tie_embeddings=False"]
    if "continue" in command:
        args += [f"--init_from={root}/run", "--alpha_warmup=0"]
    if "--lora_r" in command:
        args += ["--lora_r=4"]
    if "--resume" in command:
        args += ["--total_samples=40"]
    if "--ffn" in command:
        args += ["--ffn_rank=16"]
    return args


def small(command, root):
    """The arguments that make a README command small; they stand behind its own."""
    if "train.py" in command:
        return small_training(command, root)
    if "--remove" in command:
        shutil.copytree(f"{root}/data", f"{root}/less")
        return [f"--out={root}/less"]
    model = f"--init_from={root}/run"
    tuning = "--micro_batch=2 --batch_size=4 --max_length=250 --dtype=float32"
    arguments = {
        "prepare.py": f"--out={root}/{abs(hash(command))}",
        "sample.py": f"{model} --max_new_tokens=8 --dtype=float32",
        "convert.py": f"--load={root}/run --save={root}/hf",
        "engine.plot": f"--out={root}/plot.png",
        "studies.explain": f"--out={root}",
        "tools.plan": f"configs/tiny.py --vocab_size=320 --gpus=2",
        "posttrain.sft": f"{model} --out={root}/{abs(hash(command))} {tuning}",
        "posttrain.qrpo": f"{model} --out={root}/qrpo --n_refs=2 --max_new_tokens=8 {tuning}",
        "studies.ablate": f"--report --out={root}/results/ablations" if "activations" in command else
        f"--size=configs/tiny.py --seeds=2 --lrs=1e-3,2e-3 --data={root}/data --out={root} --runs={root}/runs",
        "evaluate.py": f"{model} --limit=2 --out={root}/evaluate",
        "tools.bench": f"--preset=tiny --impls=hf --rounds=2 --out={root}/bench",
    }
    name = script_of(command.split())
    if name == "corpus.cluster":
        return [f"--out={root}/many", "--tokenizer=byte", "--tasks=2", "--parts=1"]
    return arguments.get(name, "").split()


def small_align(root):
    """Arguments for `make align`: two of its losses, from a model that seconds of SFT have taught to say digits."""
    import numpy as np
    from studies import align

    rng = np.random.default_rng(0)
    rows = []
    for _ in range(400):
        total, first = int(rng.integers(10, 50)), int(rng.integers(1, 10))
        answer = message("assistant", align.teacher(rng, total, first))
        rows.append(dict(messages=[*align.question(total, first), answer]))
    write_rows(root / "digits.jsonl", rows)
    chosen = dict(qrpo=dict(lr=1e-3, beta=0.3), dpo=dict(lr=3e-4, beta=1.0))
    write_rows(root / "tuning.json", [dict(chosen=chosen)])
    how = "--batch_size=32 --micro_batch=32 --lr=1e-2 --optimizer=adamw --epochs=2".split()
    files = [f"--init_from={root}/run", f"--data={root}/digits.jsonl", f"--out={root}/digits"]
    done = script("posttrain.sft", *files, *how)
    assert done.returncode == 0, done.stderr
    sizes = "--seeds=1 --n_conversations=64 --n_refs=3 --test_prompts=64 --samples=1"
    results = f"--out={root}/align --results={root}/results/align --tuning={root}/tuning.json"
    return f"--start={root}/digits {sizes} {results}"


def ran(*words, **how):
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, **how)


def made(words, root):
    """make with variables that make the target small. -o: the environment that these tests run in is ready."""
    if words[1] == "train":
        # The shapes of test_parallel.py, so that they are compiled once.
        config = "configs/laptop.py configs/tiny.py --total_samples=32 --decay_samples=8 --compile"
        target = [f"RUN={root}/made", f"DATA={root}/data", f"CONFIG={config}"]
    elif words[1] == "align":
        target = [f"ALIGN={small_align(root)}"]
    elif words[1] == "recipe":
        # test_world.py holds its links one by one.
        target = [f"SEEDS=1 --report --results={root}/results/recipe"]
    else:
        # test_memorize.py runs the demonstration itself, small.
        target = [f"BOOKS=--report --out={root}/results/memorize"]
    return ran(*words, "-o", ".venv/ready", f"PY={sys.executable}", *target)


def replacements(place):
    """{word of the README: the word for this place}, the reader's own files among them."""
    run = f"{place}/run"
    found = {
        "notes.md": os.path.join(ROOT, "README.md"),
        "book.jsonl.gz": f"{place}/my_texts/1.txt",
        "data/stdlib": f"{place}/data",
        "data/mine": f"{place}/data",
        "--old=data/stdlib": f"--old={place}/data",
        "out/laptop": run,
        "out/swiglu": run,
        "out/adamw": run,
        "--teacher=out/laptop": f"--teacher={run}",
        "--find=notes.md": f"--find={os.path.join(ROOT, 'README.md')}",
        "--when=out/laptop": f"--when={run}",
        "--remove=opted_out.txt": f"--remove={place}/opted_out.txt",
        "--nproc_per_node=8": "--nproc_per_node=2",
    }
    for name in ("my_texts/", "pages.jsonl"):
        found[name] = f"{place}/{name}"
    settings = "robots=robots.jsonl data=conversations.jsonl data=prompts.jsonl rewards=reward.py"
    for setting in settings.split():
        name, file = setting.split("=")
        found["--" + setting] = f"--{name}={place}/{file}"
    mixture = "--data={'conversations.jsonl': 2, 'sharegpt.parquet': 1}"
    found[mixture] = mixture.replace("{'", f"{{'{place}/").replace(", '", f", '{place}/")
    return found


def copy_results(place):
    """The committed results, which some commands add to."""
    if not os.path.isdir(place / "results"):
        shutil.copytree(os.path.join(ROOT, "results"), place / "results")


SLOW = "python -m studies.ablate swiglu xielu", "make align"
ALL = [pytest.param(command, marks=[pytest.mark.slow] * (command in SLOW)) for command in COMMANDS]


@pytest.mark.parametrize("command", ALL)
def test_command(command, place, monkeypatch):
    """It runs, and nothing of it goes outside the test's own folder."""
    words = shlex.split(command)
    # Compiling changes no claim here: test_parallel.py does it, and `make train`.
    if "tools.bench" in words or words[0] == "torchrun":
        monkeypatch.setenv("CXX", "no-such-compiler")
    mine = replacements(place)
    words = [mine.get(word, word) for word in words]
    program = words[0]
    if words[:2] == ["make", "test"]:
        # This very suite: what would be run is shown, not run again.
        done = ran(*words, "-n", "-o", ".venv/ready")
        assert "-m pytest" in done.stdout
    elif program == "make":
        copy_results(place)
        done = made(words, place)
    elif program == "python":
        if "studies.ablate" in words:
            copy_results(place)
        name = script_of(words)
        own = words[words.index(name) + 1 :]
        done = script(name, *own, *small(command, place), pictures=True)
    elif program == "torchrun":
        env = dict(os.environ, OMP_NUM_THREADS="1")
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        done = ran(*launcher, *words[1:], *small(command, place), env=env)
    else:
        # pip: everything is there already, so nothing is fetched nor resolved. Another torch would be replaced.
        if "torch==" + torch.__version__.split("+")[0] not in read("requirements.txt"):
            pytest.skip("this environment has another torch than requirements.txt")
        quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
        done = ran(sys.executable, "-m", *words, *quiet)
    assert done.returncode == 0, done.stderr


def test_six_lines_from_a_model_to_a_chat_with_ones_own_adapter(place):
    """In order, on the laptop's model: each line goes on from what the one before has left."""
    small = {"posttrain.sft": "--micro_batch=2 --batch_size=4 --max_length=250 --dtype=float32",
             "sample.py": "--max_new_tokens=8 --dtype=float32", "tools.plan": "--batch_size=2"}
    assert CHAIN[0].startswith("START=") and len(CHAIN) == 6
    said = []
    for line in CHAIN[1:]:
        for theirs, ours in (("$START", f"{place}/run"), ("out/", f"{place}/"), ("conv", f"{place}/conv")):
            line = line.replace("=" + theirs, "=" + ours)
        words = line.split()
        name = script_of(words)
        own = words[words.index(name) + 1:]
        done = script(name, *own, *small.get(name, "").split(), stdin="hello\n")
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert "adapters on a base in int8" in said[0] and "tokens are learnt" in said[1]
    left = {"mine-chat/adapter/adapter_config.json", "mine-merged/model.safetensors"}
    assert all((place / file).exists() for file in left)


def test_the_loop_goes_through_the_four_long_context_stages(place):
    """Its training line for each word of the loop, every stage from the weights of the one before."""
    head, train, goes_on, end = LOOP
    assert end == "done" and goes_on == "FROM=out/8b-$L" and train.startswith("torchrun")
    begin, words = re.fullmatch(r"FROM=(\S+); for L in (.*); do", head).groups()
    start, thetas = f"{place}/run", []
    assert begin == "out/8b" and words == "8k 16k 32k 64k"
    for L in words.split():
        line = train.replace("$FROM", start).replace("$L", L).replace("=out/", f"={place}/")
        words_of = line.replace(f"--data=data/long-{L}", f"--data={place}/data").split()
        own = words_of[words_of.index("train.py") + 1:]
        small = [*TINY, "--vocab_size=0", "--alpha_warmup=0", "--warmup_samples=0", "--stage="]
        done = script("train.py", *own, *small, "--parallel=none", "--sequence_parallel=1")
        assert done.returncode == 0, done.stderr
        start = f"{place}/8b-{L}"
        config = settings_of(place / f"8b-{L}")
        thetas.append(config["rope_theta"])
        assert config["init_from"] == line.partition("--init_from=")[2].split()[0]
    assert thetas == [1e6, 2e6, 4e6, 12e6]


EXAMPLES = ("X.py", "test_X.py", "report.md", "reward.py", "FILE.py")  # names that stand for others


@pytest.mark.parametrize("page", PAGES)
def test_every_local_file_and_test_that_a_page_names_exists(page):
    text = read(page)
    files = []
    for pattern in (r"`([\w/]+\.(?:py|md|txt|png))`", r"\]\(([\w/.]+\.\w+)\)", r"src=\"([^\"]+)\""):
        files += re.findall(pattern, text)
    for name in files:
        places = [os.path.join(ROOT, folder, name) for folder in ("", "tests", "docs")]
        assert name in EXAMPLES or any(map(os.path.exists, places)), name
    for file, *tests in re.findall(r"`(test_\w+\.py)::(test_\w+)`(?:, `::(test_\w+)`)?", text):
        source = read("tests", file)
        for test in filter(None, tests):
            assert f"def {test}(" in source, (file, test)


def test_the_speeds_that_the_readme_picks_stand_in_that_table():
    table = read("records", "README.md")
    picked = README.split("## Speed")[1].split("## ")[0]
    _, *rows = [line for line in picked.splitlines() if line.startswith("| ") and "|---" not in line]
    assert len(rows) == 3
    for row in rows:
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        _, ours, theirs, machine = cells
        line = next(line for line in table.splitlines() if f"| {ours} |" in line)
        hugging_face = "hf compile" if "compiled" in theirs else "hf"
        number = theirs.removeprefix("compiled ")
        assert not theirs or f"{hugging_face} {number}" in line, (row, line)
        assert machine in line or not machine


def number(text):
    return float(text.replace(",", ""))


def test_the_days_that_the_readme_names_follow_from_the_tokens():
    """Held by arithmetic: tokens, tokens a second, days. tests/test_plan.py holds what the plan computes."""
    rows = re.findall(r"^\| [\d.]+B, ([\d.]+)T \|.* \| ([\d,]+) \| ([\d,.]+) \|$", SCALE, re.M)
    assert len(rows) == 3
    for tokens, speed, days in rows:
        seconds = number(tokens) * 1e12 / number(speed)
        assert seconds / 86400 == pytest.approx(number(days), rel=0.02)


def test_the_gpus_that_the_readme_names_for_long_windows_hold_them_and_half_of_them_do_not():
    """
    By arithmetic: 20 bytes a parameter over the GPUs, and with full recomputation the inputs of all blocks, in bf16,
    leave a twelfth of the card free; the 20 bytes over half as many do not.
    """
    lengths = [8192, 16384, 32768, 65536]
    sizes = {"8B": (8_053_338_176, 4096, 32), "70B": (70_599_864_480, 8192, 80)}
    rows = re.findall(r"^(8B|70B) +(80|141) GB each +(.*)$", SCALE, re.M)
    assert len(rows) == 4
    for name, card, cells in rows:
        parameters, C, L = sizes[name]
        room = 0.92e9 * int(card)
        cells = re.findall(r"(\d+) / (\d) (none|selective|full)", cells)
        for T, (gpus, P, mode) in zip(lengths, cells, strict=True):
            held = 20 * parameters / int(gpus)
            inputs = 2 * C * L * T / int(P) if mode == "full" else 0
            assert held + inputs < room and (gpus == "8" or 2 * held > room)


def test_the_table_of_faults_is_the_record_of_those_that_were_done():
    table = read("results", "faults", "table.md")
    record = json.loads(read("results", "faults", "faults.json"))
    rows = [row[:4] for fault in record.values() for row in fault["rows"]]
    _, *shown = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert sorted(shown) == sorted([str(cell) for cell in row] for row in rows)
    done = sum(times for _, times, *_ in rows)
    for text in (table, README):
        assert f"{done:,} faults" in text


def test_what_is_said_of_the_studies_stands_in_their_overview():
    said = STUDIES.split("After 128")[0]
    overview = read("results", "ablations", "overview.md")
    found = [abs(float(x)) for x in re.findall(r"\| ([+-]\d\.\d+) ±", overview)]
    numbers = [float(x) for x in re.findall(r"0\.\d{3}", said)]
    assert len(numbers) == 3
    for x in numbers:
        assert min(abs(x - y) for y in found) <= 0.00051
    assert "70 %" in said and "| 70% |" in overview


def config_of(name):
    return runpy.run_path(os.path.join(ROOT, "configs", name + ".py"))


def on_meta(config):
    """The model of a config, without memory for its weights."""
    import dataclasses
    import torch
    from model import Apertus, ApertusConfig

    names = {field.name for field in dataclasses.fields(ApertusConfig)}
    sizes = {name: value for name, value in config.items() if name in names}
    with torch.device("meta"):
        return Apertus(ApertusConfig(**sizes))


def test_the_flops_of_the_70b_are_the_reports():
    """
    6.74e24 for 15T tokens (arXiv 2509.14233, sec. 6): the products of the forward pass, two operations a
    multiplication, three times over; of attention all T x T pairs.

    Counted here layer by layer in whole numbers; the model's own count leaves out the masked half.
    """
    L, H, K, D, C, F, V, T = 80, 64, 8, 128, 8192, 43008, 131072, 4096
    q, k_and_v, o = C * H * D, 2 * C * K * D, H * D * C
    up_and_down = 2 * C * F
    layer = q + k_and_v + o + up_and_down
    pairs = 2 * T * H * D  # q k^T and p v
    report = 3 * 2 * (L * (layer + pairs) + V * C)
    config = config_of("70b")
    assert on_meta(config).flops_per_token(T) == report - 6 * L * pairs // 2
    tokens = config["total_samples"] * T
    assert f"{report * tokens:.2e}" == "6.74e+24"
    assert "6.74e24 FLOPs for the 70B's 15T tokens" in README


def test_the_sizes_that_the_readme_names_follow_from_the_configs():
    config = config_of("8b")
    bytes_in_bf16 = 2 * on_meta(config).num_params()
    assert "downloads 16 GB" in README and round(bytes_in_bf16 / 1e9) == 16
    # The smallest Mini: 20 layers of 1,024, its tied head stored beside the embedding all the same.
    attention, feed_forward = 1024 * (2 * 1024 + 2 * 256), 2 * 1024 * 6144
    gains_and_slopes = 2 * 1024 + 2 * 64 + 2
    mini = 20 * (attention + feed_forward + gains_and_slopes) + 1024 + 2 * 131_072 * 1024
    assert "downloads 1.1 GB" in README and f"{2 * mini / 1e9:.1f}" == "1.1"
    # An int64 for each window.
    bytes_of_order = 8 * config["total_samples"]
    assert "a 29 GB table" in README and round(bytes_of_order / 1e9) == 29
    laptop = config_of("laptop") | dict(vocab_size=4096)   # of data/stdlib
    assert "1.0M parameters" in README and round(on_meta(laptop).num_params() / 1e6, 1) == 1.0
    assert "five minutes" in README and laptop["minutes"] == 5


def test_pages_are_short_enough_to_be_read():
    for page, most in ({page: 700 for page in PAGES} | {"README.md": 1_100, "docs/decisions.md": 2_500}).items():
        words = re.findall(r"\S*\w\S*", re.sub(r"```.*?```", "", read(page), flags=re.S))
        assert len(words) <= most, page


def test_what_is_said_of_recitation_stands_in_the_table_of_results():
    said = next(part for part in STUDIES.split("\n\n") if part.startswith("After 128 repetitions"))
    table = read("results", "memorize", "table.md")
    pairs = re.findall(r"(\d?\.\d+) ± (\d?\.\d+)", said)
    assert len(pairs) >= 4
    for mean, half in pairs:
        shown = f"{float(mean):.2f} ± {float(half):.2f}"
        assert shown in table, shown


def test_what_is_said_of_the_recipe_stands_in_its_report():
    """Shares and Rouge-L as the committed page has them."""
    said = next(part for part in POSTTRAINING.split("\n\n") if part.startswith("*An invented world")).replace("\n", " ")
    report = read("results", "recipe", "report.md")
    lines = report.splitlines()
    row = next(line for line in lines if line.startswith("| base | text |"))
    _, _, _, _, test, refused, *_ = row.split("|")
    goldfish = next(line for line in lines if line.startswith("| with Goldfish")).split("|")
    # The last table of both: as sampled.
    manners = lines[lines.index("## Aligned by a charter"):]
    sft, charter = (next(line for line in manners if line.startswith(f"| {link} |")).split("|")
                    for link in ("sft", "charter"))
    for words, figure, cell in (
        ("98.8 % of 900", "0.988", test),
        ("4.4 % (chance", "0.044", refused),
        ("(0.68 ± 0.14;", "0.68 ± 0.14", goldfish[2]),
        ("unseen letters: 0.45)", "0.45", goldfish[3]),
        ("writers (98 %)", "0.98", goldfish[4]),
        ("kinder (23 % to", "0.226", sft[2]),
        ("to 52 %)", "0.521", charter[2]),
        ("right (67 % to", "0.674", sft[4]),
        ("to 60 %)", "0.604", charter[4]),
    ):
        assert words in said and figure in cell, (words, cell)


def test_what_is_said_of_fine_tuning_stands_in_its_tables():
    assert "0.060 ± 0.004" in POSTTRAINING and "-0.0596 ± 0.0036" in read("results", "distill", "table.md")
