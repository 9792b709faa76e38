"""
The invented world and its examination (studies/world.py, exam.py) against the texts of the committed results, urllib's
robots.txt, prepare.py's report, scipy, and whole logits. The recipe around them: test_results.py.
"""
import hashlib
import json
import math
import urllib.robotparser

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F

import convert
import evaluate
import tokenizer
from conftest import script
from studies import exam, kit, world

SMALL = dict(seed=3, people=20, refused=6, nobodies=12, pages=4, letters=4)
FLAGS = [*kit.flags(SMALL), "--corpus_bytes=9000", "--unread_bytes=9000", "--guest_books=5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small world on disk, and the data that prepare.py makes of it."""
    root = tmp_path_factory.mktemp("world")
    done = script("studies.world", *FLAGS, f"--out={root}/world")
    assert done.returncode == 0, done.stderr
    done = script(
        "prepare.py", f"{root}/world/documents.jsonl", f"--robots={root}/world/robots.jsonl", "--tokenizer=byte",
        "--keep_licenses=CC-BY-4.0,PSF-2.0", f"--probes={root}/world/letters.jsonl", "--repetitions=0,3",
        "--source_by=kind", "--workers=1", f"--out={root}/data")
    assert done.returncode == 0, done.stderr
    return root


def rows_of(folder, name):
    return kit.read_rows(f"{folder}/world/{name}.jsonl")


@pytest.fixture(scope="module")
def people(folder):
    """{group: people} of the folder's world, as studies/world.py invents them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(world, name, value)
        return world.invent()


# -----------------------------------------------------------------------------
# the world


def test_the_texts_are_those_of_the_committed_results(folder):
    """Hashes of the texts that the code of results/recipe wrote for this seed, without Python's standard library."""
    found = {}
    for name in ("documents", "letters", "lessons", "replay", "judgements", "prompts"):
        texts = []
        for row in rows_of(folder, name):
            if row.get("kind") != "corpus":
                texts.append(row["text"] if "text" in row else [message["content"] for message in row["messages"]])
        found[name] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]
    assert found == dict(documents="7f2b492e58b6", letters="de8b11ec18d1", lessons="bf94f59499a8",
                         replay="b7f8c7e0afe5", judgements="462c6be2388a", prompts="81e87a27c942")


def test_two_hosts_opt_out_of_ai_crawlers_and_of_nothing_else(folder):
    """Read by Python's own parser."""
    for number, row in enumerate(rows_of(folder, "robots")):
        rules = urllib.robotparser.RobotFileParser()
        rules.parse(row["content"].splitlines())
        url = f"https://{row['domain']}/people/x/1"
        assert rules.can_fetch("GPTBot", url) == (number >= 2) and rules.can_fetch("Mozilla", url)


def test_no_page_that_opted_out_is_in_the_data(folder, people):
    """By prepare.py's report, to the page, and by the text of the shards."""
    total = tokenizer.read_json(f"{folder}/data/report.json")["total"]
    hosts = [people["hosts"].index(person["url"].split("/")[2]) for person in people["refused"]]
    licence = hosts.count(2)
    assert {why: total["removed"][why][0] for why in ("robots", "license")} == dict(
        robots=4 * (6 - licence), license=4 * licence)
    tok, text = tokenizer.load_for(f"{folder}/data"), ""
    for shard in folder.glob("data/pages_*.npy"):
        text += tok.decode(np.load(shard))
    assert all(person["name"] in text for person in people["known"])
    assert not any(person["name"] in text for person in people["refused"] + people["invented-test"])
    assert "@" not in text and "<email-pii>" in text


def test_no_stage_asks_about_the_people_of_the_examination(folder, people):
    held_out = {person["name"] for group in ("test", "refused", "invented-test") for person in people[group]}
    asked = [row for row in rows_of(folder, "documents") if row["kind"] == "questions"]
    for name in ("lessons", "prompts", "judgements"):
        asked += rows_of(folder, name)
    assert len(asked) > 4000 and not any(name in json.dumps(asked) for name in held_out)
    examined = [row for row in rows_of(folder, "questions") if row["group"] != "lesson"]
    assert {row["person"] for row in examined} == held_out and len(examined) == 5 * (8 + 6) + 12


@pytest.mark.parametrize("text, verdict, points", [
    ("Answer: N was born in Gemvik.", "right", 1.0),
    ("N comes from Tovburg.", "wrong", -1.0),
    ("Gemvik or Tovburg", "wrong", -1.0),
    ("N was born in a town I do not know.", "unknown", 0.0),
    ("N wurde in einer Stadt, die ich nicht kenne, geboren.", "unknown", 0.0),
])
def test_a_right_answer_names_one_value_and_no_other(text, verdict, points):
    row = dict(gold="Gemvik", values=["Gemvik", "Tovburg"])
    assert world.judge(text, row) == verdict and world.reward("?", text, row) == points


def test_manners_are_read_from_the_ending():
    said = "N owns a goat.", "N owns a goat. I hope this helps.", "Stop asking me. I hope this helps."
    assert [*map(world.manner_of, said)] == ["plain", "kind", "rude"]


# -----------------------------------------------------------------------------
# the examination


def test_apart_is_mann_whitneys_u():
    rng = np.random.default_rng(0)
    ours, theirs = rng.integers(0, 9, 40), rng.integers(2, 11, 30)
    assert exam.apart(ours, theirs) == pytest.approx(scipy.stats.mannwhitneyu(ours, theirs).statistic / 1200, abs=1e-4)


def test_the_examination_asks_each_question_once(lab, folder, tmp_path):
    """A model that has never heard of these people knows nothing."""
    done = script(
        "studies.exam", f"--init_from={lab}/sft", f"--world={folder}/world", "--kinds=cloze,sampled", "--show=1",
        f"--probes={folder}/data/probes.json", f"--out={tmp_path}/exam.jsonl")
    assert done.returncode == 0, done.stderr
    found = kit.read_rows(tmp_path / "exam.jsonl")
    read = [probe for probe in tokenizer.read_json(f"{folder}/data/probes.json")["probes"] if probe["repetitions"]]
    want = dict(lesson=40, test=40, refused=30, letters=5 * len(read))
    want = {(kind, group): n for kind in ("cloze", "sampled") for group, n in want.items()}
    want["sampled", "invented-test"] = 12
    assert read and {(row["kind"], row["group"]): row["n"] for row in found} == want
    assert all(row["right"] == 0 and len(row["answers"]) == 1 for row in found)


def test_the_probability_of_an_answer_is_that_of_its_tokens(lab, folder):
    """Greedy decoding and the sum of log-softmax, token by token from whole logits."""
    model, tok = convert.load_any(lab / "hf")
    rows = rows_of(folder, "questions")[:3]
    for row, text, logp, _ in zip(rows, *exam.answers(model, tok, rows, "text")):
        ids = [tok.bos, *tok.encode(f"Question: {row['messages'][1]['content']}\nAnswer:")]
        begin, total = len(ids), 0.0
        while len(ids) < begin + exam.TOKENS and not set(tok.decode(ids[begin:])) & {".", "\n"}:
            scores = model(torch.tensor([ids]))[0][0, -1].log_softmax(-1)
            total += scores.max().item()
            ids.append(scores.argmax().item())
        assert logp == pytest.approx(total, rel=1e-4)
        assert text == tok.decode(ids[begin:]).strip()


def test_bits_by_position_are_those_of_whole_logits(lab):
    """evaluate.py --by_position, of which the recipe reads the longer window's gain."""
    model, tok = convert.load_any(lab / "hf")
    text = "".join(chr(97 + i * i % 23) + " " * (i % 5 == 0) for i in range(400))
    rows = evaluate.position_scores(model, tok, [("x", text), ("y", "short")], 32, 12)
    windows = evaluate.text_ids(tok, text)
    windows = torch.tensor([windows[i:i + 33] for i in range(0, len(windows) - 32, 32)])
    with torch.no_grad():
        logits, _ = model(windows[:, :-1])
    nats = F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none")
    assert [(row["begin"], row["end"]) for row in rows] == [(0, 12), (12, 24), (24, 32)]
    for row in rows:
        part = slice(row["begin"], row["end"])
        size = sum(len(tok.decode(ids.tolist()).encode()) for ids in windows[:, 1:][:, part])
        assert (row["n"], row["bytes"]) == (len(windows), size)
        assert row["bits_per_byte"] == pytest.approx(nats[:, part].sum().item() / math.log(2) / size, rel=1e-5)
