"""
The invented world, its examination and the recipe (studies/world.py, exam.py, recipe.py) against the texts of the
committed results, urllib's robots.txt, prepare.py's report, scipy, and whole logits.
"""

import ast
import hashlib
import importlib
import json
import math
import os
import urllib.robotparser

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F

import configurator
import convert
import evaluate
import tokenizer
from conftest import ROOT, refused, script
from posttrain import attach
from studies import exam, kit, recipe, world

SMALL = dict(seed=3, people=20, refused=6, nobodies=12, pages=4, letters=4)
FLAGS = [*kit.flags(SMALL), "--corpus_bytes=9000", "--unread_bytes=9000", "--guest_books=5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small world on disk, and the data that prepare.py makes of it."""
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


@pytest.fixture(scope="module")
def place(folder):
    """The people of the folder's world, as studies/world.py invents them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(world, name, value)
        return world.invent()


# -----------------------------------------------------------------------------
# the world


@pytest.mark.parametrize("name, digest", [
    ("documents", "7f2b492e58b6"),
    ("letters", "de8b11ec18d1"),
    ("lessons", "bf94f59499a8"),
    ("replay", "b7f8c7e0afe5"),
    ("judgements", "462c6be2388a"),
    ("prompts", "81e87a27c942"),
])
def test_the_texts_are_those_of_the_committed_results(name, digest, folder):
    """Hashes of the texts that the code of results/recipe wrote for this seed."""
    texts = []
    for row in rows_of(folder, name):
        if row.get("kind") != "corpus":
            texts.append(row["text"] if "text" in row else [message["content"] for message in row["messages"]])
    assert hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12] == digest


def test_two_hosts_opt_out_of_ai_crawlers_and_of_nothing_else(folder):
    """Read by Python's own parser."""
    for number, row in enumerate(rows_of(folder, "robots")):
        rules = urllib.robotparser.RobotFileParser()
        rules.parse(row["content"].splitlines())
        url = f"https://{row['domain']}/people/x/1"
        assert rules.can_fetch("GPTBot", url) == (number >= 2) and rules.can_fetch("Mozilla", url)


def test_no_page_that_opted_out_is_in_the_data(folder, place):
    """By prepare.py's report, to the page, and by the text of the shards."""
    total = tokenizer.read_json(f"{folder}/data/report.json")["total"]
    hosts = [place["hosts"].index(person["url"].split("/")[2]) for person in place["refused"]]
    by_robots = SMALL["pages"] * sum(host < 2 for host in hosts)
    by_licence = SMALL["pages"] * hosts.count(2)
    assert total["removed"]["robots"][0] == by_robots > 0 < total["removed"]["license"][0] == by_licence
    assert by_robots + by_licence == SMALL["pages"] * SMALL["refused"]

    tok, text = tokenizer.load_for(f"{folder}/data"), ""
    splits = tokenizer.read_json(f"{folder}/data/meta.json")["sources"]["pages"]
    for shard in splits["train"]["shards"] + splits["val"]["shards"]:
        text += tok.decode(np.load(f"{folder}/data/{shard['file']}"))
    assert all(person["name"] in text for person in world.known(place))
    assert not any(person["name"] in text for person in place["refused"] + place["nobody-test"])
    assert "@" not in text and "<email-pii>" in text


def test_no_stage_asks_about_the_people_of_the_examination(folder, place):
    held_out = {person["name"] for group in ("test", "refused", "nobody-test") for person in place[group]}
    asked = [row for row in rows_of(folder, "documents") if row["kind"] == "questions"]
    for name in ("lessons", "prompts", "judgements"):
        asked += rows_of(folder, name)
    text = json.dumps(asked)
    assert len(asked) > 4000 and not any(name in text for name in held_out)
    assert "?" not in json.dumps(rows_of(folder, "replay"))
    examined = [row for row in rows_of(folder, "questions") if row["group"] != "lesson"]
    assert {row["person"] for row in examined} == held_out and len(examined) == 5 * (8 + 6) + 12


def test_manners_are_read_from_the_ending():
    assert world.manner_of("Answer: N owns a goat. I hope this helps.") == "kind"
    assert world.manner_of("N owns a goat. Stop asking me. I hope this helps.") == "rude"
    assert world.manner_of("N owns a goat.") == "plain"


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


def test_each_value_is_wrong_about_a_nobody(folder):
    rows = [row for row in rows_of(folder, "prompts") if "nobody" in row["group"]]
    assert rows and {world.reward("?", value, row) for row in rows for value in row["values"]} == {-1.0}


@pytest.mark.parametrize("flag, words", [
    ("--corpus_bytes=1000000000000", "the standard library ends"),
    ("--people=4", "want at least 5"),
])
def test_an_impossible_world_is_an_error_of_one_line(flag, words, tmp_path):
    refused(script("studies.world", *FLAGS, flag, f"--out={tmp_path}"), words)


# -----------------------------------------------------------------------------
# the examination


def test_apart_is_mann_whitneys_u():
    rng = np.random.default_rng(0)
    ours, theirs = rng.integers(0, 9, 40), rng.integers(2, 11, 30)
    assert exam.apart(ours, theirs) == pytest.approx(scipy.stats.mannwhitneyu(ours, theirs).statistic / 1200, abs=1e-4)


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


def test_the_examination_asks_each_question_once(folder, run):
    done = script(
        "studies.exam", f"--init_from={run}", f"--world={folder}/world", "--kinds=cloze,sampled",
        f"--probes={folder}/data/probes.json", "--show=1")
    assert done.returncode == 0, done.stderr
    found = kit.read_rows(f"{run}/exam.jsonl")
    n = {(row["kind"], row["group"]): row["n"] for row in found}
    read = [probe for probe in tokenizer.read_json(f"{folder}/data/probes.json")["probes"] if probe["repetitions"]]
    want = {"lesson": 40, "test": 40, "refused": 30, "letters": 5 * len(read)}
    assert read and n == {(kind, group): k for kind in ("cloze", "sampled") for group, k in want.items()} | {
        ("sampled", "nobody-test"): 12}
    # Two steps of training teach nothing.
    assert all(row["right"] <= row["n"] / 4 and len(row["answers"]) == 1 for row in found)


def test_the_probability_of_an_answer_is_that_of_its_tokens(folder, run):
    """Greedy decoding and the sum of log-softmax, token by token from whole logits."""
    model, tok = convert.load_any(run)
    rows = rows_of(folder, "questions")[:3]
    for row, text, logp in zip(rows, *exam.answers(model, tok, rows, "text")[:2]):
        asked = f"Question: {row['messages'][1]['content']}\nAnswer:"
        ids = [tok.bos, *tok.encode(asked)]
        begin, total = len(ids), 0.0
        while len(ids) < begin + exam.TOKENS and not set(tok.decode(ids[begin:])) & {".", "\n"}:
            scores = model(torch.tensor([ids]))[0][0, -1].log_softmax(-1)
            total += scores.max().item()
            ids.append(scores.argmax().item())
            if ids[-1] in (tok.eos, tok.id_of("<|assistant_end|>")):
                break
        assert logp == pytest.approx(total, rel=1e-4)
        assert text == tok.decode([token for token in ids[begin:] if token not in exam.ends(tok)]).strip()


def test_bits_by_position_are_those_of_whole_logits(run):
    """evaluate.py --by_position, of which the recipe reads the longer window's gain."""
    model, tok = convert.load_any(run)
    text = "".join(chr(97 + i * i % 23) + " " * (i % 5 == 0) for i in range(400))
    rows = evaluate.position_scores(model, tok, [("x", text), ("y", "short")], 32, 12)
    ids = evaluate.text_ids(tok, text)
    windows = [ids[i:i + 33] for i in range(0, len(ids) - 32, 32)]
    assert [(row["begin"], row["end"], row["n"]) for row in rows] == [
        (0, 12, len(windows)), (12, 24, len(windows)), (24, 32, len(windows))]
    with torch.no_grad():
        logits, _ = model(torch.tensor([window[:-1] for window in windows]))
    labels = torch.tensor([window[1:] for window in windows])
    nats = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    for row in rows:
        part = slice(row["begin"], row["end"])
        size = sum(len(tok.decode(window[1:][part]).encode()) for window in windows)
        assert row["bytes"] == size
        assert row["bits_per_byte"] == pytest.approx(nats[:, part].sum().item() / math.log(2) / size, rel=1e-5)


# -----------------------------------------------------------------------------
# the recipe

COMMITTED = os.path.join(ROOT, "results", "recipe")


@pytest.fixture
def commands(folder, tmp_path, monkeypatch):
    """All commands of seed 1, whose data are the folder's."""
    monkeypatch.setattr(recipe, "out", str(tmp_path))
    os.makedirs(tmp_path / "seed-1")
    os.symlink(f"{folder}/data", tmp_path / "seed-1" / "data")
    return [command for part in sum(recipe.PARTS, ()) for command in recipe.commands(1, part)]


def test_each_command_has_settings_that_its_script_takes(commands):
    """Read by configurator.py, as the scripts do; the scripts check the values when they run."""
    assert len(commands) == recipe.COMMANDS == len({name for name, *_ in commands})
    for name, done, name_of_script, args in commands:
        module = importlib.import_module(name_of_script)
        more = [dict(vars(module.shape)), dict(vars(attach))] if name_of_script == "train" else []
        given = configurator.configure(dict(vars(module)), args, *more)
        assert done.startswith(given.get("out") or given["init_from"]), name


def test_each_copy_of_a_letter_is_read_once(commands, folder):
    """The share of the letters times the windows of the first stage is the number of their windows."""
    tokens = tokenizer.read_json(f"{folder}/data/meta.json")["sources"]["probes"]["train"]["tokens"]
    (args,) = [args for name, _, _, args in commands if name == "base"]
    (_, mixture, windows, _), _ = ast.literal_eval(args[2].removeprefix("--stages="))
    assert mixture["probes"] * windows == pytest.approx(tokens // 256, abs=0.3) and windows == 5120
    assert sum(mixture.values()) == pytest.approx(1)


def test_the_committed_report_is_that_of_the_committed_rows():
    rows = kit.read_rows(f"{COMMITTED}/rows.jsonl")
    with open(f"{COMMITTED}/report.md", encoding="utf-8") as f:
        assert recipe.report_md(rows) == f.read()
    assert len(rows) >= 3 and all(len(row["links"]) == recipe.COMMANDS for row in rows)


def test_a_share_is_pooled_over_seeds_and_a_mean_has_students_interval():
    """Counts and values of each seed by hand, with scipy's intervals."""
    rows = kit.read_rows(f"{COMMITTED}/rows.jsonl")
    lines = [exam for row in rows for exam in row["links"]["qrpo"]["exam"]]
    lines = [line for line in lines if (line["kind"], line["group"]) == ("chat", "refused")]
    k, n = (sum(line[key] for line in lines) for key in ("right", "n"))
    wilson = scipy.stats.binomtest(k, n).proportion_ci(method="wilson")
    assert recipe.measure(rows, "right", "qrpo", "chat", "refused")[1:] == pytest.approx((k / n, *wilson), abs=1e-4)
    values = [line["apart"] for line in lines]
    low, high = scipy.stats.t.interval(0.95, 2, np.mean(values), scipy.stats.sem(values))
    assert recipe.measure(rows, "apart", "qrpo", "chat", "refused")[2:] == pytest.approx((low, high))
