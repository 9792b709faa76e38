"""
The invented world, its examination and the recipe (studies/world.py, exam.py, recipe.py): against urllib's robots.txt,
against prepare.py's own account, against counts by hand.
"""

import importlib
import json
import math
import os
import urllib.robotparser
from itertools import chain, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import configurator
import convert
import evaluate
from conftest import ROOT, refused, script
from posttrain import attach
from studies import exam, kit, recipe, world

SMALL = dict(seed=3, people=20, refused=6, nobodies=12, pages=4, letters=4)
FLAGS = [*kit.flags(SMALL), "--corpus_bytes=9000", "--unread_bytes=9000", "--guest_books=5"]


@pytest.fixture(scope="module")
def place():
    return world.World(**SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small world on disk, and what prepare.py made of it."""
    root = tmp_path_factory.mktemp("world")
    done = script("studies.world", *FLAGS, f"--out={root}/world")
    assert done.returncode == 0, done.stderr
    done = script(
        "prepare.py", f"{root}/world/documents.jsonl", f"--robots={root}/world/robots.jsonl",
        "--keep_licenses=CC-BY-4.0,PSF-2.0", f"--probes={root}/world/letters.jsonl", "--repetitions=0,3",
        "--source_by=kind", "--train_bpe=700", "--workers=1", f"--out={root}/data")
    assert done.returncode == 0, done.stderr
    return root


def rows_of(folder, name):
    return kit.read_rows(f"{folder}/world/{name}.jsonl")


# -----------------------------------------------------------------------------
# the world


def test_the_seed_decides_every_byte(folder, tmp_path):
    for seed, same in ((3, True), (4, False)):
        assert script("studies.world", *FLAGS, f"--seed={seed}", f"--out={tmp_path}/{seed}").returncode == 0
        for name in ("documents", "letters", "lessons", "prompts", "questions"):
            one, other = (open(f"{root}/{name}.jsonl").read() for root in (f"{folder}/world", f"{tmp_path}/{seed}"))
            assert (one == other) == same, name


def test_hosts_refuse_by_the_rules_of_robots_txt(place):
    """Read by Python's own parser: the first two hosts refuse GPTBot and nobody else's agent, the others nobody."""
    for number, row in enumerate(place.robots()):
        rules = urllib.robotparser.RobotFileParser()
        rules.parse(row["content"].splitlines())
        url = f"https://{row['domain']}/people/x/1"
        assert rules.can_fetch("GPTBot", url) == (number >= 2) and rules.can_fetch("Mozilla", url)


def test_what_is_refused_is_not_in_the_data_to_the_page(folder, place):
    total = json.load(open(f"{folder}/data/report.json"))["total"]
    pages = {person["name"]: SMALL["pages"] for person in place.group("refused")}
    hosts = {person["name"]: place.hosts.index(person["host"]) for person in place.group("refused")}
    by_robots = sum(n for name, n in pages.items() if hosts[name] < 2)
    assert total["removed"]["robots"][0] == by_robots
    assert total["removed"]["license"][0] == sum(pages.values()) - by_robots > 0
    # And read back from the shards: their sentences stand nowhere, those of others do.
    tok = evaluate.tokenizers.load_for(f"{folder}/data")
    text = ""
    meta = json.load(open(f"{folder}/data/meta.json"))
    for split in ("train", "val"):
        for shard in meta["sources"]["pages"][split]["shards"]:
            text += tok.decode(np.load(f"{folder}/data/{shard['file']}"))
    assert not any(person["name"] in text for person in place.group("refused", "nobody-test"))
    assert all(person["name"] in text for person in place.group("lesson", "align", "test"))
    assert "@" not in text and "<email-pii>" in text


def test_who_is_examined_was_never_asked_about_in_training(folder, place):
    """Lessons are about the lesson's people and nobodies, prompts about align's; pages retold ask nothing."""
    held_out = {person["name"] for person in place.group("test", "refused", "nobody-test")}
    taught = json.dumps(rows_of(folder, "lessons") + rows_of(folder, "prompts"), ensure_ascii=False)
    assert not any(name in taught for name in held_out)
    asked = [row for row in place.documents() if row["kind"] == "questions"]
    assert asked and not any(name in row["text"] for row in asked for name in held_out)
    assert not any("?" in json.dumps(row) for row in rows_of(folder, "replay"))
    examined = {row["person"] for row in rows_of(folder, "questions") if row["group"] != "lesson"}
    assert examined == held_out


def test_a_right_answer_names_one_value_and_no_other():
    row = dict(gold="Gemvik", values=["Gemvik", "Tovburg"], group="test")
    for text, verdict, points in [
        ("Answer: N was born in Gemvik.", "right", 1.0),
        ("N comes from Tovburg.", "wrong", -1.0),
        ("Gemvik or Tovburg", "wrong", -1.0),
        ("", "wrong", -1.0),
        ("N was born in a town I do not know.", "unknown", 0.0),
        ("N wurde in einer Stadt, die ich nicht kenne, geboren.", "unknown", 0.0),
    ]:
        assert world.judge(text, row) == verdict and world.reward("?", text, row) == points
    # Of a nobody nothing can be right, whatever value was drawn for him.
    assert world.reward("?", "N was born in Gemvik.", {**row, "group": "nobody-align"}) == -1.0


def test_lessons_answer_right_about_people_and_unknown_about_nobodies(folder, place):
    """By the judge that marks the examination."""
    people = {person["name"]: person for person in place.people}
    verdicts = {}
    for row in rows_of(folder, "lessons"):
        question, answer = (message["content"] for message in row["messages"][1:])
        (name,) = [name for name in people if name in question]
        for language, attribute in product(world.LANGUAGES, world.ATTRIBUTES):
            values = place.values[attribute][language]
            marked = world.judge(answer, dict(gold=place.value(people[name], attribute, language), values=values))
            if marked != "wrong":
                verdicts.setdefault(people[name]["group"], set()).add(marked)
    assert verdicts == {"lesson": {"right"}, "nobody-lesson": {"unknown"}}


@pytest.mark.parametrize("args, says", [
    (["--corpus_bytes=1000000000000"], "the corpus ends"),
    (["--names=2"], "6 names for 62 people"),
])
def test_a_world_that_cannot_be_is_told(args, says, tmp_path):
    refused(script("studies.world", *FLAGS, *args, f"--out={tmp_path}"), says)


# -----------------------------------------------------------------------------
# the examination


def test_apart_is_the_share_of_pairs_in_the_right_order():
    assert exam.apart([3, 2], [1, 2]) == (1 + 1 + 1 + 0.5) / 4
    assert exam.apart([1], [2]) == 0 and exam.apart([5, 5], [5]) == 0.5


def test_marks_count_and_have_wilsons_interval():
    """3 of 4 right: (3 + 1.92) / (4 + 3.84) +- ..., 0.301 to 0.954 (Newcombe 1998's formula by hand)."""
    row = dict(gold="a", values=["a", "b"], group="test")
    said = [("a", 1.0, "kind"), ("a", 1.0, "kind"), ("a", 1.0, "plain"), ("I do not know", 1.0, "rude")]
    found = exam.marks([row] * 4, said)
    assert (found["n"], found["right"], found["unknown"], found["kind_ones"], found["rude_ones"]) == (4, 3, 1, 2, 1)
    assert found["right_interval"] == pytest.approx([0.3006, 0.9544], abs=1e-3)


@pytest.fixture(scope="module")
def run(folder):
    """A small untrained run with the world's vocabulary."""
    out = f"{folder}/run"
    done = script(
        "train.py", f"--data={folder}/data", f"--out={out}", "--total_samples=2", "--warmup_samples=1",
        "--decay_samples=1", "--batch_size=1", "--micro_batch=1", "--block_size=32", "--n_layer=1", "--n_head=2",
        "--n_kv_head=1", "--n_embd=16", "--ffn_dim=24", "--dtype=float32", "--compile=False", "--sample_every=0",
        "--eval_windows=2")
    assert done.returncode == 0, done.stderr
    return out


def test_the_examination_asks_everyone_and_writes_what_it_found(folder, run, place):
    done = script(
        "studies.exam", f"--init_from={run}", f"--world={folder}/world", "--kinds=cloze,text,chat,sampled",
        f"--probes={folder}/data/probes.json", "--show=1")
    assert done.returncode == 0, done.stderr
    found = kit.read_rows(f"{run}/exam.jsonl")
    n = {(row["kind"], row["group"]): row["n"] for row in found}
    read = [probe for probe in json.load(open(f"{folder}/data/probes.json"))["probes"] if probe["repetitions"]]
    for kind in ("cloze", "text", "chat", "sampled"):
        want = {"lesson": 40, "test": 40, "refused": 30, "nobody-test": 12, "letters": 5 * len(read)}
        for group, number in want.items():
            assert n.get((kind, group)) == (None if kind == "cloze" and "nobody" in group else number)
    # What two steps have learnt is nothing.
    assert all(row["right"] <= row["n"] / 4 and row["answers"] for row in found)


def test_the_probability_of_an_answer_is_that_of_its_tokens(folder, run, place):
    """Against the product of the softmax of every token, from whole logits."""
    model, tok = convert.load_any(run)
    rows = list(place.questions("test"))[:3]
    for row, (_, p, _) in zip(rows, exam.answers(model, tok, rows, "text")):
        prompt = exam.prompt_of(tok, row, "text")
        assert tok.decode(prompt[1:]) == f"Question: {row['messages'][1]['content']}\nAnswer:"
        ids = [*prompt]
        logp, said = 0.0, []
        while len(said) < exam.TOKENS:
            logits, _ = model(torch.tensor([ids]))
            token = logits[0, -1].argmax().item()
            logp += logits[0, -1].log_softmax(-1)[token].item()
            ids.append(token)
            said.append(token)
            ends = (tok.eos, tok.id_of("</s>"), tok.id_of("<|assistant_end|>"))
            if token in ends or set(tok.decode([token])) & {".", "\n"}:
                break
        assert logp == pytest.approx(p, rel=1e-4)


# -----------------------------------------------------------------------------
# bits per byte by position (evaluate.py)


def test_bits_by_position_are_those_of_whole_logits(run):
    model, tok = convert.load_any(run)
    text = "".join(chr(97 + i * i % 23) + " " * (i % 5 == 0) for i in range(400))
    T, step = 32, 12
    rows = evaluate.position_scores(model, tok, [("x", text), ("y", "short")], T, step)
    ids = evaluate.text_ids(tok, text)
    windows = [ids[i:i + T + 1] for i in range(0, len(ids) - T, T)]
    assert [(row["begin"], row["end"], row["n"]) for row in rows] == [
        (0, 12, len(windows)), (12, 24, len(windows)), (24, 32, len(windows))]
    with torch.no_grad():
        logits, _ = model(torch.tensor([window[:-1] for window in windows]))
    nats = F.cross_entropy(logits.flatten(0, 1), torch.tensor([w[1:] for w in windows]).flatten(), reduction="none")
    nats = nats.view(len(windows), T)
    second = rows[1]
    cells = [f"{second[key]:.3f}" for key in ("score", "low", "high")]
    assert f"| 12 to 23 | bits/byte by position |  | {len(windows)} | {second['bytes']} | {' | '.join(cells)} |  |" in (
        evaluate.table_md(rows))
    for row in rows:
        part = slice(row["begin"], row["end"])
        size = sum(len(tok.decode(window[1:][part]).encode()) for window in windows)
        assert row["bytes"] == size
        assert row["score"] == pytest.approx(nats[:, part].sum().item() / math.log(2) / size, rel=1e-5)


# -----------------------------------------------------------------------------
# the recipe


@pytest.fixture
def small_recipe(folder, tmp_path, monkeypatch):
    """The recipe in a folder of its own, whose links are written down instead of run. -> (recipe, calls)"""
    calls = []

    def run_script(name, args, log, threads=None):
        calls.append((name, args))
        for flag in args:
            if flag.startswith("--out="):
                os.makedirs(flag[6:], exist_ok=True)
        return (2, "sft.py: no room") if name == "posttrain.sft" else (0, "")
    monkeypatch.setattr(kit, "run_script", run_script)
    monkeypatch.setattr(recipe, "out", str(tmp_path))
    os.makedirs(tmp_path / "seed-1")
    os.symlink(f"{folder}/data", tmp_path / "seed-1" / "data")
    return recipe, calls


def test_the_recipe_has_as_many_links_as_its_bar_and_each_is_a_command_that_its_script_takes(small_recipe):
    """Flags and config files are read by configurator.py, as the scripts do; their own checks come when they run."""
    links = []
    for part in chain(*recipe.PARTS):
        links += recipe.links(f"{recipe.out}/seed-1", 1, part)
    assert len(links) == recipe.LINKS == len({name for name, *_ in links})
    for name, done, name_of_script, args in links:
        module = importlib.import_module(name_of_script)
        more = [dict(vars(module.shape)), dict(vars(attach))] if name_of_script == "train" else []
        given = configurator.configure(dict(vars(module)), args, *more)
        assert os.path.dirname(done).startswith(given["out"] if "out" in given else recipe.out), name


def test_every_copy_of_a_letter_is_read_once(folder):
    """By train.py's own table: the share of the probes times the windows of the stage is their tokens."""
    (_, mixture, reading, _), (_, later, end, _) = recipe.stages(f"{folder}/data", 7)
    tokens = json.load(open(f"{folder}/data/meta.json"))["sources"]["probes"]["train"]["tokens"]
    assert mixture["probes"] * reading == pytest.approx(tokens // recipe.WINDOW, abs=0.3) and "probes" not in later
    assert sum(mixture.values()) == pytest.approx(1) == sum(later.values()) and (reading, end) == (5120, 8000)


COMMITTED = os.path.join(ROOT, "results", "recipe")


def test_the_committed_report_is_what_the_committed_numbers_give():
    rows = kit.read_rows(f"{COMMITTED}/rows.jsonl")
    assert recipe.report_md(rows) == open(f"{COMMITTED}/report.md").read()
    assert len(rows) >= 3 and all(len(row["links"]) == recipe.LINKS for row in rows)
