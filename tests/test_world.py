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
from model import Apertus, ApertusConfig
from posttrain import charter, references
from studies import exam, kit, recipe, world
from tokenizer import load_for

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


def test_the_same_people_have_the_same_facts_when_more_is_asked_of_the_world(place):
    more = world.World(**{**SMALL, "pages": 9, "letters": 2})
    assert more.people == place.people


def test_groups_have_the_promised_sizes_and_no_name_is_two_peoples(place):
    sizes = {group: len(place.group(group)) for group in ("lesson", "align", "test", "refused", "nobody-test")}
    assert sizes == {"lesson": 8, "align": 4, "test": 8, "refused": 6, "nobody-test": 12}
    names = [person["name"] for person in place.people]
    assert len(set(names)) == len(names) == 20 + 6 + 3 * 12


def test_every_part_of_an_unknown_name_is_a_known_persons_too():
    """Otherwise a word would tell who is unknown. With the defaults: most names of nobodies are made of known parts."""
    place = world.World(1, 150, 24, 200, 1, 2)
    known = [person["name"].split() for person in place.group("lesson", "align", "test")]
    firsts, lasts = map(set, zip(*known))
    strangers = [person["name"].split() for person in place.group("nobody-test")]
    shared = sum(first in firsts and last in lasts for first, last in strangers)
    assert shared >= 0.95 * len(strangers)


def test_a_page_says_all_five_facts_and_begins_with_the_name(place):
    pages = [row for row in place.documents() if row["kind"] == "pages"]
    by_url = {person["name"].lower().replace(" ", "-"): person for person in place.people}
    for row in pages:
        person = by_url[row["url"].split("/")[-2]]
        assert all(place.value(person, a, row["language"]) in row["text"] for a in world.ATTRIBUTES)
        assert row["text"].startswith(person["name"]) and row["text"].count(person["name"]) >= 5
    assert len(pages) == (20 + 6) * SMALL["pages"] and {row["language"] for row in pages} == {"en", "de"}


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


def test_lessons_have_each_manner_equally_often_and_a_text_shows_its_manner(folder):
    manners = [world.manner_of(row["messages"][-1]["content"]) for row in rows_of(folder, "lessons")]
    for manner in world.RATINGS:
        assert manners.count(manner) / len(manners) == pytest.approx(1 / 3, abs=0.12)
    # By the words themselves, and not by what the world calls them.
    for text, manner in (("So. Thank you for asking.", "kind"), ("So. Stop asking me.", "rude"), ("So.", "plain")):
        assert world.manner_of(text) == manner
    assert world.manner_of("I hope this helps. Stop asking me.") == "rude"


def test_a_judge_is_taught_what_its_charter_prefers_in_the_prompts_that_it_will_be_asked_with(folder, place):
    """Kind above plain above rude in its ratings and, but for the first place's advantage, in its pairs."""
    rows = rows_of(folder, "judgements")
    ratings, wins = {}, []
    for row in rows:
        asked, said = (message["content"] for message in row["messages"])
        assert asked.startswith(world.CHARTER)
        rate = "RATING:" in asked
        begin, *parts = asked.split("\nAnswer: ")
        prompt = charter.RATE if rate else charter.COMPARE
        assert begin.startswith(prompt.partition("{charter}")[2].partition("{question}")[0].join([world.CHARTER, ""]))
        manners = [world.manner_of(part.partition("\n")[0]) for part in parts]
        if rate:
            ratings.setdefault(manners[0], []).append(int(said))
        elif manners[0] != manners[1]:
            wins.append((world.RATINGS[manners[0]] > world.RATINGS[manners[1]]) == (said == "A"))
    means = {manner: sum(each) / len(each) for manner, each in ratings.items()}
    assert means == pytest.approx(world.RATINGS, abs=0.5)
    assert means["kind"] > means["plain"] + 2 > means["rude"] + 4
    assert 0.9 < sum(wins) / len(wins) < 1 and len(rows) == world.judgements
    # Nobody of whom it is asked in earnest is named.
    text = json.dumps(rows)
    assert not any(person["name"] in text for person in place.group("test", "align", "nobody-align"))


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


@pytest.mark.parametrize("flag, says", [
    ("--kinds=text,clozes", "there is no 'clozes', but chat, cloze, sampled, text"),
    ("--groups=test,tests", "there is no 'tests'"),
    ("--language=fr", "there is no 'fr', but de, en"),
])
def test_an_examination_that_cannot_be_asked_is_told(flag, says, folder, run):
    refused(script("studies.exam", f"--init_from={run}", f"--world={folder}/world", flag), says)


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


def test_sampled_answers_are_drawn_and_the_same_each_time(run, place):
    model, tok = convert.load_any(run)
    rows = list(place.questions("test"))[:8]
    greedy, once, again = (exam.answers(model, tok, rows, kind) for kind in ("chat", "sampled", "sampled"))
    assert once == again and [text for text, *_ in once] != [text for text, *_ in greedy]


def test_the_manner_of_an_answer_stands_behind_its_first_sentence(run, place, monkeypatch):
    """generate() is the only part that is replaced: by one that says what a trained model would."""
    model, tok = convert.load_any(run)
    said = [*tok.encode("Answer: so it is. Stop asking me."), tok.eos]
    monkeypatch.setattr(exam, "generate", lambda model, prompts, *args, **how: [[*ids, *said] for ids in prompts])
    [(text, _, manner)] = exam.answers(model, tok, list(place.questions("test"))[:1], "chat")
    assert (text, manner) == ("Answer: so it is.", "rude")


def test_an_answer_ends_with_its_first_sentence(run):
    _, tok = convert.load_any(run)
    for text, sentence in (("It is so. And more.", "It is so."), ("one\ntwo", "one\n"), ("no end", "no end")):
        ids = tok.encode(text)
        said = exam.first_sentence(tok, ids, {tok.eos})
        assert tok.decode(said).startswith(sentence) and len(tok.decode(said)) <= len(sentence) + 1
    assert exam.first_sentence(tok, [tok.eos, 5], {tok.eos}) == [tok.eos]


# -----------------------------------------------------------------------------
# bits per byte by position (evaluate.py)


def test_bits_by_position_are_those_of_whole_logits(run):
    model, tok = convert.load_any(run)
    text = "".join(chr(97 + i * i % 23) + " " * (i % 5 == 0) for i in range(400))
    T, step = 32, 12
    rows = evaluate.position_scores(model, tok, [("x", text), ("y", "short")], T, step)
    ids = evaluate.text_ids(tok, text)
    windows = [ids[i:i + T + 1] for i in range(0, len(ids) - T, T)]
    assert [(row["begin"], row["end"], row["windows"]) for row in rows] == [
        (0, 12, len(windows)), (12, 24, len(windows)), (24, 32, len(windows))]
    with torch.no_grad():
        logits, _ = model(torch.tensor([window[:-1] for window in windows]))
    nats = F.cross_entropy(logits.flatten(0, 1), torch.tensor([w[1:] for w in windows]).flatten(), reduction="none")
    nats = nats.view(len(windows), T)
    shown = evaluate.table_md(dict(model="m", texts=[], positions=rows, tasks=[]))
    assert f"| 12 to 23 | {rows[1]['bits_per_byte']:.3f} ± {rows[1]['plus_minus']:.3f} |" in shown
    for row in rows:
        part = slice(row["begin"], row["end"])
        size = sum(len(tok.decode(window[1:][part]).encode()) for window in windows)
        assert row["bytes"] == size
        assert row["bits_per_byte"] == pytest.approx(nats[:, part].sum().item() / math.log(2) / size, rel=1e-5)


def test_a_text_that_fills_no_window_is_told():
    model = Apertus(ApertusConfig(vocab_size=300, n_layer=1, n_head=1, n_kv_head=1, n_embd=8, ffn_dim=8, block_size=16))
    with pytest.raises(ValueError, match="no document has 64 tokens"):
        evaluate.position_scores(model, evaluate.tokenizers.load("byte"), [("x", "ab")], 64, 16)


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
        given = configurator.configure(dict(vars(module)), args)
        assert os.path.dirname(done).startswith(given["out"] if "out" in given else recipe.out), name


def test_every_copy_of_a_letter_is_read_once(folder):
    """By train.py's own table: the share of the probes times the windows of the stage is their tokens."""
    (_, mixture, reading, _), (_, later, end, _) = recipe.stages(f"{folder}/data", 7)
    tokens = json.load(open(f"{folder}/data/meta.json"))["sources"]["probes"]["train"]["tokens"]
    assert mixture["probes"] * reading == pytest.approx(tokens // recipe.WINDOW, abs=0.3) and "probes" not in later
    assert sum(mixture.values()) == pytest.approx(1) == sum(later.values()) and (reading, end) == (5120, 8000)


def test_a_recipe_that_fails_says_the_command_and_goes_on_behind_what_is_done(small_recipe):
    recipe, calls = small_recipe

    class Bar:
        write = set_postfix_str = update = staticmethod(lambda *args: None)
    for again in range(2):
        says = r"^python -m posttrain.sft --init_from=\S+/long .* failed: sft.py: no room"
        recipe.run_links(Bar, 1, "read")
        with pytest.raises(ValueError, match=says):
            recipe.run_links(Bar, 1, "align")
        names = [name for name, _ in calls]
        assert names.count("posttrain.sft") == again + 1
        # What the stand-in has not written is run again, as after a kill; the rest would be skipped.
        for name, done, *_ in list(recipe.links(f"{recipe.out}/seed-1", 1, "read"))[:7]:
            open(done, "w").close() if os.path.isdir(os.path.dirname(done)) else None
    assert [name for name, _ in calls].count("train") == 2


def test_a_recipe_of_no_seed_is_refused_and_writes_nothing(tmp_path):
    refused(script("studies.recipe", "--seeds=0", f"--out={tmp_path}/a", f"--results={tmp_path}/b"), "at least one")
    assert os.listdir(tmp_path) == []


def test_two_recipes_at_once_in_one_folder_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "out", str(tmp_path))
    with recipe.settled(), pytest.raises(ValueError, match="another recipe is at work"):
        recipe.settled()
    recipe.settled().close()


def test_words_that_stand_in_the_letter_in_this_order_are_found():
    runs = recipe.recited("On Monday the cat gave me a lamp", "On Monday the dog gave him a lamp")
    assert [(same, " ".join(words)) for same, words in runs] == [
        (True, "On Monday the"), (False, "cat"), (True, "gave"), (False, "me"), (True, "a lamp")]
    assert recipe.recited("b a", "a b") in ([(True, ["b"]), (False, ["a"])], [(False, ["b"]), (True, ["a"])])


def test_pairs_that_the_judge_orders_are_counted_by_manner_and_where_that_is_equal_by_truth(folder, tmp_path):
    """Two prompts, by hand: ranks that follow manners wholly, truth never, and one tie."""
    tok = load_for(f"{folder}/data")
    seed = tmp_path / "seed-1"
    os.makedirs(seed / "references")
    os.symlink(f"{folder}/data", seed / "data")
    os.makedirs(seed / "world")
    os.makedirs(seed / "judge")
    for name, text in (("world/charter.md", "Be kind."), ("judge/config.json", "{}")):
        (seed / name).write_text(text)
    kit.write_rows(f"{seed}/world/prompts.jsonl", [dict(group="align"), dict(group="nobody-align")])
    said = [["A. I hope this helps.", "B.", "C.", "D. Stop asking me."], ["E.", "F."]]
    files = {
        "samples-2-0000000": [[tok.encode(text) for text in texts] for texts in said],
        f"rewards-{references.reward_hash(recipe.RULE)}-0000000": [[[-1, 1, -1, -1], []], [[0, -1], []]],
        f"rewards-{references.reward_hash(recipe.by_charter(seed))}-0000000": [[[4, 2, 3, 1], []], [[5, 5], []]],
    }
    for name, content in files.items():
        (seed / "references" / f"{name}.json").write_text(json.dumps(content))
    # Manners: A over B, C, D; B and C over D. Truth: B over C, which the judge has the other way round.
    assert recipe.judged_pairs(seed) == dict(manners=[5, 5], known=[0, 1], nobody=[0.5, 1])


def test_another_scale_in_the_same_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "out", str(tmp_path))
    recipe.settled().close()
    recipe.settled().close()        # the same again goes on
    for name, value in (("scale", 2.0), ("corpus", "mine.jsonl")):
        with monkeypatch.context() as m, pytest.raises(ValueError, match="holds a recipe of .* name another --out"):
            m.setattr(recipe, name, value)
            recipe.settled()


COMMITTED = os.path.join(ROOT, "results", "recipe")


def test_the_committed_report_is_what_the_committed_numbers_give(tmp_path):
    rows = kit.read_rows(f"{COMMITTED}/rows.jsonl")
    assert recipe.report_md(rows) == open(f"{COMMITTED}/report.md").read()
    recipe.draw(rows, f"{tmp_path}/recipe.png")
    assert os.path.getsize(f"{tmp_path}/recipe.png") > 10_000
    assert len(rows) >= 3 and all(len(row["links"]) == recipe.LINKS for row in rows)


def test_chance_is_that_of_the_worlds_values(place):
    sizes = [len(values["en"]) for values in place.values.values()]
    assert recipe.CHANCE == pytest.approx(sum(1 / size for size in sizes) / 5)
