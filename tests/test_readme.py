"""
README.md, docs/ and other pages: their commands run, their files exist, and their numbers are in committed tables.

commands.txt has words and arguments that make a command small; quotes.txt has numbers and their sources.
"""

import glob
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyarrow.json
import pyarrow.parquet
import pytest
from conftest import ROOT, refused, script
from corpora import rows as rows_of_a_corpus, write_lines

import tokenizer
from chat import learnable, prompt_ids
from engine.runs import settings_of


def read(*path):
    return Path(ROOT, *path).read_text()


PAGES = ["README.md", "CONTRIBUTING.md", "tests/README.md", *sorted(glob.glob("docs/*.md", root_dir=ROOT))]
BLOCKS = re.findall(r"```sh\n(.*?)```", "".join(map(read, PAGES)), re.S)


def commands(blocks):
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return list(dict.fromkeys(filter(None, lines)))


# Blocks whose commands need each other's files begin with a variable. They run in order; other commands run alone.
# Make installs packages for some targets: a test reads the commands it would run. Other tests run docs/*.py.
CHAIN = commands(block for block in BLOCKS if block.startswith("START="))
LOOP = commands(block for block in BLOCKS if block.startswith("FROM="))
COMMANDS = [
    command
    for command in commands(block for block in BLOCKS if not block.startswith(("START=", "FROM=")))
    if not re.match("NODE=|make (train|test|node)|python docs/", command)
]
[NODE] = re.findall('^NODE="(.*)"$', read("docs", "scale.md"), re.M)


def rows(section):
    """The pairs of one section of commands.txt."""
    _, text = read("tests", "commands.txt").split(f"[{section}]")
    _, *lines = text.split("\n\n")[0].splitlines()
    return [map(str.strip, line.split(" | ")) for line in lines]


@pytest.fixture
def small(lab, tmp_path, monkeypatch):
    """small(COMMAND): run a small form of it, next to files that its reader would have. Returns its output."""
    shutil.copytree(lab / "data", tmp_path / "data")
    shutil.copytree(f"{ROOT}/results", tmp_path / "results")
    robots = dict(domain="example.org", content="User-agent: GPTBot\nDisallow: /b")
    (tmp_path / "robots.jsonl").write_text(json.dumps(robots))
    (tmp_path / "opted_out.txt").write_text("pages.jsonl line 1\n")
    write_lines(tmp_path / "pages.jsonl", [row | dict(toxicity=0.5) for row in rows_of_a_corpus(60)])
    ai_txt = dict(domain="example.org", file="ai.txt", content="User-agent: *\nDisallow: *.html")
    (tmp_path / "reservations.jsonl").write_text(json.dumps(ai_txt))
    (tmp_path / "agents.txt").write_text("GPTBot\nCCBot\n")
    (tmp_path / "blocked.txt").write_text("example.com\n")
    (tmp_path / "exam.txt").write_text("How many legs does a healthy spider have?\n")
    (tmp_path / "letters.csv").write_bytes("body\nGr\xfc\xdfe\nBis bald\n".encode("latin-1"))
    write_lines(tmp_path / "pairs.jsonl", [dict(prompt=f"say {i}", chosen="a", rejected="b") for i in range(8)])
    heldout = [dict(prompt=f"ask {i}", completion="c") for i in range(3)]
    write_lines(tmp_path / "heldout.jsonl", heldout)
    chats = pyarrow.json.read_json(lab / "chats.jsonl")
    pyarrow.parquet.write_table(chats, tmp_path / "sharegpt.parquet")
    folders = dict(LAB=lab, NEW=tmp_path, ROOT=ROOT, PYTHON=sys.executable)
    # These tests need no compiler; other tests compile.
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))

    def run(command):
        line = command.replace("$NODE", NODE)
        for theirs, ours in rows("words"):
            line = line.replace(theirs, ours)
        more = [arguments for words, arguments in rows("arguments") if re.search(words, command)]
        line = " ".join([line, *more])
        for name, folder in folders.items():
            line = line.replace(name, str(folder))
        program, *args = shlex.split(line)
        if program == "make":
            # make -n prints the command of the target. It runs here, where torch is imported.
            program, *args = shlex.split(subprocess.check_output([program, *args], cwd=ROOT, text=True))
        if program == "python":
            name, *own = args[1:] if args[0] == "-m" else args
            # test_train.py draws the loss of train.py.
            done = script(name, *own, stdin="hello\n", pictures=name != "train.py")
        else:
            done = subprocess.run([program, *args], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


# The slow commands start many processes or many runs.
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] * bool(re.search(r"\$NODE|cluster|lm_eval", command)))
        for command in COMMANDS
    ],
)
def test_command(command, small):
    """The command runs, and writes only into the test's own folder."""
    small(command)


def typed_by_make(target):
    """What make would type for a target in a fresh clone, in one line."""
    printed = subprocess.check_output(["make", "-nB", target], cwd=ROOT, text=True)
    return " ".join(printed.replace("\\\n", " ").split())


def test_make_train_types_the_four_commands_of_readme_and_make_test_the_tests():
    typed = typed_by_make("train")
    parts = "pip install -q -r requirements.txt", "prepare.py", "train.py configs/laptop.py", "sample.py"
    places = [typed.index(part) for part in parts]
    assert places == sorted(places)
    assert "-m pytest" in typed_by_make("test")


def test_make_node_types_the_line_of_docs_scale():
    [line] = [command for command in commands(BLOCKS) if "configs/node.py" in command]
    assert line.replace("$NODE", f".venv/bin/{NODE}") in typed_by_make("node")


def test_five_lines_from_a_model_to_a_chat_with_ones_own_adapter(small, tmp_path):
    """In order, on a small model: each line uses the files of the one before."""
    assert CHAIN[0].startswith("START=") and len(CHAIN) == 5
    plan, *_ = map(small, CHAIN[1:])
    assert "adapters on a base in int8" in plan
    left = "mine-chat/adapter/adapter_config.json", "mine-merged/model.safetensors"
    assert all((tmp_path / file).exists() for file in left)


def test_the_loop_goes_through_the_four_long_context_stages(small, tmp_path):
    """Runs the training line for each word of the loop; each stage starts from the weights of the one before."""
    head, train, _, goes_on, _ = LOOP
    start, words = re.fullmatch(r"FROM=(.*); for L in (.*); do", head).groups()
    assert (start, goes_on) == ("out/8b", "FROM=out/8b-$L")
    start, thetas = "out/laptop", []
    for L in words.split():
        line = train.replace("$FROM", start).replace("$L", L)
        printed = re.search(r"\$\((.*?)\)", line)
        stage = subprocess.check_output(printed[1].split(), text=True, cwd=ROOT)
        small(line.replace(printed[0], shlex.join(stage.split())))
        start = f"out/8b-{L}"
        thetas.append(settings_of(tmp_path / f"8b-{L}")["rope_theta"])
    assert thetas == [1e6, 2e6, 4e6, 12e6]


def test_docstrings_become_conversations_and_prompts(tmp_path, monkeypatch):
    """By docs/conversations.py, which leaves what it finds."""
    monkeypatch.chdir(tmp_path)
    make = partial(subprocess.run, [sys.executable, f"{ROOT}/docs/conversations.py"], capture_output=True, text=True)
    make(check=True)
    tok = tokenizer.load("byte")
    readers = {"conversations": partial(learnable, max_length=10**6), "prompts": prompt_ids}
    kinds = [
        {type(ids_of(tok, json.loads(line))) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
        for name, ids_of in readers.items()
    ]
    assert kinds == [{tuple}, {list}]
    # One old file is enough to write none.
    (tmp_path / "conversations.jsonl").unlink()
    refused(make(), "heldout.jsonl: there is one already")
    assert not (tmp_path / "conversations.jsonl").exists()


def test_every_local_file_that_a_page_names_exists():
    examples = {"X.py", "test_X.py", "report.md", "reward.py", "FILE.py"}  # placeholders
    for page in PAGES:
        names = re.findall(r"`([\w/]+\.(?:py|md|txt|png))`|\]\(([\w/.]+\.\w+)\)|src=\"([^\"]+)\"", read(page))
        for name in {*map("".join, names)} - examples:
            places = [Path(ROOT, folder, name) for folder in ("", "tests", "docs")]
            assert any(map(Path.exists, places)), (page, name)


def test_the_numbers_that_pages_quote_stand_in_committed_tables():
    lines = read("tests", "quotes.txt").splitlines()
    for line in filter(None, lines[1:]):
        file, words = line.split(": ", 1)
        assert words in " ".join(read(file).split()), line


LONGER = {  # words
    "README.md": 900,
    "tests/README.md": 900,
    "docs/code.md": 800,
    "docs/data.md": 900,
    "docs/decisions.md": 2_400,
    "docs/learn.md": 750,
    "docs/posttraining.md": 800,
    "docs/studies.md": 750,
    "docs/scale.md": 900,
}


def test_pages_are_short_enough_to_be_read():
    for page, most in (dict.fromkeys(PAGES, 700) | LONGER).items():
        words = re.findall(r"\S*\w\S*", re.sub(r"```.*?```", "", read(page), flags=re.S))
        assert len(words) <= most, page


@pytest.mark.parametrize("page", ["report.md", "code.md"])
def test_pages_about_the_code_name_functions_that_exist(page):
    names = re.findall(r"`([\w/]+\.py): (\w+)`", read("docs", page))
    assert len(names) > 15
    for file, name in names:
        assert re.search(rf"^ *(def|class) {name}\b", read(file), re.M), (file, name)
