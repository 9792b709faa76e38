"""posttrain/conversations.py: rows of any form, files of any kind, mixtures of them, and what is left out of them."""
import collections
import gzip
import hashlib
import json
import os

import pyarrow
import pyarrow.parquet
import pytest

import chat
import tokenizer
from conftest import script
from engine import inputs, readers
from engine.parallel import Ranks
from posttrain import common, conversations
from test_prepare import Hub
from test_sft import SYSTEM, TOK, assistant, chat_row, user, write_rows

# -----------------------------------------------------------------------------
# the forms


def ids_of(row):
    return chat.learnable(TOK, row, 10_000, "2025-01-01")


SAME = chat_row(SYSTEM, user("2+2?"), assistant("4"))


@pytest.mark.parametrize("row", [
    dict(conversations=[
        {"from": "system", "value": "s"}, {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]),
    dict(conversations=[{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], system="s"),
    dict(conversations=SAME["messages"]),
    dict(prompt="2+2?", completion="4", system="s"),
    chat_row(*SAME["messages"][1:], system="s"),
    dict(SAME, system="another"),
    dict(prompt=SAME["messages"][:2], completion=SAME["messages"][2:]),
    # What has messages and more, as ultrachat_200k, is read by its messages.
    dict(SAME, prompt="another", completion="text"),
    dict(SAME, tools="[]"),
])
def test_a_row_of_any_form_is_the_conversation_that_it_says(row):
    assert ids_of(row) == ids_of(SAME)


# Source: PROMPT_DICT of tatsu-lab/stanford_alpaca, train.py, as it stands there.
PROMPT_DICT = {
    "prompt_input": (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
    ),
    "prompt_no_input": (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:"
    ),
}


@pytest.mark.parametrize("given", ["3 and {4}", ""])
def test_alpacas_row_is_asked_as_alpaca_was(given):
    row = dict(instruction="Add {them}.", input=given, output="7")
    layout = PROMPT_DICT["prompt_input" if given else "prompt_no_input"]
    assert ids_of(row) == ids_of(chat_row(user(layout.format_map(row)), assistant("7")))


def test_sharegpts_calls_of_tools_are_openais():
    tool = dict(name="f", description="a tool", parameters=dict(type="object", properties=dict(x=dict(type="number"))))
    turns = [("human", "go"), ("function_call", '{"name": "f", "arguments": {"x": 1}}'), ("observation", "OUT"),
             ("gpt", "ok")]
    row = dict(conversations=[{"from": who, "value": text} for who, text in turns], tools=json.dumps([tool]))
    call = dict(type="function", function=dict(name="f", arguments='{"x": 1}'))
    openai = [user("go"), dict(role="assistant", content=None, tool_calls=[call]), dict(role="tool", content="OUT"),
              assistant("ok")]
    ids, said = ids_of(row)
    assert (ids, said) == ids_of(chat_row(*openai, tools=[tool]))
    learnt = TOK.decode([i for i, mine in zip(ids, said) if mine])
    assert learnt == '<|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|>ok<|assistant_end|>'


@pytest.mark.parametrize("row, why", [
    (dict(text="words"), "no known form of a conversation"),
    (dict(instruction="no output"), "no known form of a conversation"),
    (dict(messages=None), chat.ODD),
    (dict(messages="text"), chat.ODD),
    (dict(conversations=[5]), chat.ODD),
    (dict(conversations=[{"from": "bing", "value": "x"}]), chat.ODD),
    (dict(conversations=[{"from": "human"}]), chat.ODD),
    (dict(conversations=[{"from": "human", "value": "a"}, {"from": "function_call", "value": "no JSON"}]), chat.ODD),
    (dict(instruction=5, output="x"), chat.ODD),
    (dict(instruction="a", input=5, output="x"), chat.ODD),
    (dict(instruction="a", output=""), "an empty turn"),
    (dict(prompt="a", completion=["b"]), chat.ODD),
    (dict(prompt=["a"], completion=["b"]), chat.ODD),
    (dict(prompt="a", completion="b", tools="no JSON"), chat.ODD),
])
def test_a_row_that_fits_no_form_is_left_out_by_its_kind(row, why):
    assert ids_of(row) == why


# -----------------------------------------------------------------------------
# conversations on disk


def rows_like(n):
    """n conversations of different lengths, every second one with a system message."""
    pairs = [(user(f"{i}?" * (1 + i % 5)), assistant("é" * (1 + i % 7))) for i in range(n)]
    return [chat_row(*[SYSTEM] * (i % 2), *pair) for i, pair in enumerate(pairs)]


def tokenized(tmp_path, folder, tok=TOK, longest=512, date="2025-01-01"):
    """What posttrain/sft.py makes of chats.jsonl on one rank."""
    data = str(tmp_path / "chats.jsonl")
    return conversations.tokenized(str(tmp_path / folder), tok, data, longest, date, Ranks())


def test_conversations_on_disk_are_what_render_gives_whatever_the_parts(tmp_path, monkeypatch):
    """Four bytes a token; parts of 300 bytes, so that conversations begin before, at and behind their borders."""
    rows = rows_like(40)
    rows[7] = rows[31] = chat_row(user("?"))
    write_rows(tmp_path / "chats.jsonl", rows, between="\n\n")
    want = [chat.render(TOK, row, "2025-01-01") for row in rows if len(row["messages"]) > 1]
    for part in (300, len(json.dumps(rows[0])) + 2, 2**26):
        monkeypatch.setattr(conversations, "PART", part)
        monkeypatch.setattr(readers, "BATCH", min(part, 2**22))
        found, bad, _ = tokenized(tmp_path, str(part))
        assert bad == {"no assistant turn": (2, "line 15 of chats.jsonl")} and len(found) == 38
        assert [(ids.tolist(), said.tolist()) for ids, said in map(found.__getitem__, range(38))] == want
        assert found.tokens == sum(len(ids) for ids, _ in want) and found.learnt == sum(sum(said) for _, said in want)
        sizes = [f.stat().st_size for f in (tmp_path / str(part)).glob("*.ids")]
        assert sum(sizes) == 4 * found.tokens and (len(sizes) > 10) == (part < 2**20)


def test_half_a_part_is_made_again_a_whole_one_is_not_and_a_stale_one_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "PART", 2000)
    monkeypatch.setattr(readers, "BATCH", 2000)
    write_rows(tmp_path / "chats.jsonl", rows_like(40))

    def ids(**how):
        found = tokenized(tmp_path, "tokens", **how)[0]
        return [found[k][0].tolist() for k in range(len(found))]

    whole, made = ids(), []
    first, *others = sorted((tmp_path / "tokens").glob("*.ids"))
    # Killed between the two files.
    os.remove(first.with_suffix(".json"))
    first.write_bytes(b"half")
    conversations.mapped.cache_clear()
    tokenize = conversations.tokenize
    monkeypatch.setattr(conversations, "tokenize", lambda name, *args: (made.append(name), tokenize(name, *args)))
    assert ids() == whole and made == [str(first.with_suffix(""))] and len(others) > 1
    assert ids(date="2026-01-01") != whole
    assert ids(tok=tokenizer.load("apertus:300")) != whole
    assert ids(longest=75) == [conversation for conversation in whole if len(conversation) <= 75]
    write_rows(tmp_path / "chats.jsonl", rows_like(2)[1:])
    assert ids() == [chat.render(TOK, rows_like(2)[1], "2025-01-01")[0]]


def test_a_line_that_is_none_is_named_wherever_it_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BATCH", 500)
    (tmp_path / "chats.jsonl").write_text("\n".join([*map(json.dumps, rows_like(20)), "", "[1, 2]"]))
    with pytest.raises(ValueError, match=r"chats.jsonl, line 22: want a JSON object with .*, got '\[1, 2\]'"):
        tokenized(tmp_path, "tokens", date=None)


PARTS = """
import sys
import tokenizer
from posttrain import conversations
from engine import readers
from engine.parallel import Ranks, orderly_exit
conversations.PART = readers.BATCH = 300
with orderly_exit():
    ranks = Ranks("ddp")
    ranks.join("cpu", 60)
    found, *_ = conversations.tokenized(sys.argv[2], tokenizer.load("byte"), sys.argv[1], 512, "2025-01-01", ranks)
    print(f"rank {ranks.rank}", [found[k][0].tolist() for k in range(len(found))], flush=True)
    ranks.leave()
"""


def test_two_processes_tokenize_a_share_each_and_both_read_all_of_it(launch, tmp_path):
    write_rows(tmp_path / "chats.jsonl", rows_like(12))
    program = tmp_path / "parts.py"
    program.write_text(PARTS)
    codes, text = launch(2, tmp_path / "chats.jsonl", tmp_path / "tokens", script=program, logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    want = [chat.render(TOK, row, "2025-01-01")[0] for row in rows_like(12)]
    assert f"rank 0 {want}\n" in text and f"rank 1 {want}\n" in text


# -----------------------------------------------------------------------------
# files of any kind


def write_parquet(path, rows, **how):
    os.makedirs(path.parent, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **how)


def read(tmp_path, data, longest=512, **rules):
    """(the conversations, what was left out, the hash) of a --data, made anew."""
    folder = str(tmp_path / f"ids-{len(os.listdir(tmp_path))}")
    return conversations.tokenized(folder, TOK, str(data), longest, "2025-01-01", Ranks(), **rules)


def everything(found):
    return [found[k][0].tolist() for k in range(len(found))]


def test_parquet_gzip_and_a_folder_of_both_are_read_as_the_lines_would_be(tmp_path):
    rows = rows_like(9)
    want = [chat.render(TOK, row, "2025-01-01")[0] for row in rows]
    # Four row groups; a column that is not read, and one that is null.
    wide = [dict(row, embedding=[0.5] * 9, tools=None) for row in rows[:7]]
    write_parquet(tmp_path / "in" / "a.parquet", wide, row_group_size=2)
    os.makedirs(tmp_path / "in" / "deeper")
    with gzip.open(tmp_path / "in" / "deeper" / "b.jsonl.gz", "wt") as f:
        f.write("\n".join(map(json.dumps, rows[7:])))
    (tmp_path / "in" / "README.md").write_text("# A data set")
    assert everything(read(tmp_path, tmp_path / "in" / "a.parquet")[0]) == want[:7]
    assert everything(read(tmp_path, tmp_path / "in")[0]) == want
    assert everything(read(tmp_path, tmp_path / "in" / "**" / "*.gz")[0]) == want[7:]


def test_the_nulls_that_parquet_puts_into_calls_and_tools_are_no_content(tmp_path):
    """As TRL's remove_none_values: each struct of a column has the keys of all others."""
    call = dict(type="function", function=dict(name="f", arguments='{"x": 1}'))
    number, text = dict(type="number"), dict(type="string", description="d")
    tools = [dict(name=name, description="a tool", parameters=dict(type="object", properties={key: spec}))
             for name, key, spec in (("f", "x", number), ("g", "y", text))]
    row = chat_row(user("go"), dict(role="assistant", content="", tool_calls=[call]), dict(role="tool", content="OUT"),
                   assistant("ok"), tools=tools)
    write_parquet(tmp_path / "a.parquet", [row, rows_like(1)[0]])
    stored = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()[0]
    assert stored != row and stored["messages"][0]["tool_calls"] is None
    assert everything(read(tmp_path, tmp_path / "a.parquet")[0])[0] == chat.render(TOK, row, "2025-01-01")[0]


def test_a_data_set_on_the_hub_is_read_by_its_name_without_its_tests(tmp_path, monkeypatch):
    rows = rows_like(12)
    for k, split in enumerate(("train", "train", "test")):
        write_parquet(tmp_path / "hub" / "data" / f"{split}-{k}.parquet", rows[4 * k:4 * k + 4])
    hub = Hub(str(tmp_path / "hub"))
    monkeypatch.setattr(inputs, "hub", lambda: hub)
    want = [chat.render(TOK, row, "2025-01-01")[0] for row in rows]
    name = "hf://datasets/org/name"
    found, _, identity = read(tmp_path, name)
    assert everything(found) == want[:8]
    assert everything(read(tmp_path, f"{name}/data")[0]) == want[8:] + want[:8]
    assert everything(read(tmp_path, f"{name}/data/test*.parquet")[0]) == want[8:]
    shown = [place for place, _ in conversations.first_rows(name, 5)]
    assert shown == ["row 1", "row 2", "row 3", "row 4", "row 1"]
    assert identity != read(tmp_path, f"{name}/data")[2]


@pytest.mark.parametrize("data, says", [
    ("{'a.jsonl': -1}", "want a positive number for each source"),
    ("{'a.jsonl': '1'}", "want a path, or weights by path"),
    ("{1: 1}", "want a path, or weights by path"),
    ("{}", "want a positive number for each source"),
    ("{'a.jsonl': 1, 'none.jsonl': 1}", "no such file, folder or pattern: 'none.jsonl'"),
    ("notes.txt", "notes.txt: want .jsonl, .json or .parquet"),
    ("empty", "empty: want .jsonl, .json or .parquet"),
    ("hf://datasets/one", "want hf://datasets/OWNER/NAME"),
    ("torn.jsonl.gz", "torn.jsonl.gz: damaged, or not what its name says"),
    ("torn.parquet", "torn.parquet: damaged, or not what its name says"),
    ("none.jsonl.parquet", "row 1: want a JSON object with a list `messages`"),
])
def test_data_that_cannot_be_read_are_told_in_one_line(tmp_path, monkeypatch, data, says):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a.jsonl", rows_like(3))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("What was said.")
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(os.urandom(3000))[:-1000])
    (tmp_path / "torn.parquet").write_bytes(b"PAR1, and no more")
    write_parquet(tmp_path / "none.jsonl.parquet", [dict(text="words")])
    with pytest.raises(ValueError, match="^[^\n]*$") as told:
        conversations.look(data)
        conversations.survey(data, Ranks())
    assert says in str(told.value)


def test_of_a_mixture_the_source_with_nothing_to_learn_is_named(tmp_path):
    write_rows(tmp_path / "a.jsonl", rows_like(3))
    write_rows(tmp_path / "b.jsonl", [chat_row(user("?")), dict(text="words")])
    with pytest.raises(ValueError, match=r"b.jsonl: none of 2 .*: 1 no assistant turn \(first in line 1 of b.jsonl\)"):
        read(tmp_path, {str(tmp_path / name): 1 for name in ("a.jsonl", "b.jsonl")})


# -----------------------------------------------------------------------------
# mixtures


SIZES, WEIGHTS = (40, 7, 300), (3, 1.5, 0.5)


def taken(sizes, weights, epochs, batch_size=8, seed=28):
    steps = -(-epochs * sum(sizes) // batch_size)
    return [conversations.chosen(step, batch_size, sizes, weights, epochs, seed).tolist() for step in range(steps)]


def test_one_source_is_taken_as_before_there_were_several():
    for step in range(4):
        want = common.items(step, 4, 10, 2, 28).tolist()
        assert conversations.chosen(step, 4, [10], [0.3], 2, 28).tolist() == want


def test_at_any_place_of_a_run_each_source_has_its_share_to_a_conversation_or_two():
    """Weights 6 : 3 : 1, counted over more samples than there are slots."""
    numbers = sum(taken(SIZES, WEIGHTS, 40), [])
    assert len(numbers) == 40 * sum(SIZES) > 10_000
    of_source = [0 if k < 40 else 1 if k < 47 else 2 for k in numbers]
    for end in (10, 11, 57, 1000, 9_999, 10_001, len(numbers)):
        counts = collections.Counter(of_source[:end])
        for source, share in enumerate((0.6, 0.3, 0.1)):
            assert abs(counts[source] - share * end) < 2


def test_each_source_is_taken_to_its_end_before_it_begins_anew_in_another_order():
    """Also across the end of the slots: 3,000 of them are the small source's, and 7 does not divide that."""
    numbers = sum(taken(SIZES, WEIGHTS, 40), [])
    small = [k for k in numbers if 40 <= k < 47]
    rounds = [small[i:i + 7] for i in range(0, len(small) - 6, 7)]
    assert len(rounds) > 500 and all(sorted(once) == list(range(40, 47)) for once in rounds)
    assert len(set(map(tuple, rounds))) > 300
    large = [k for k in numbers if k >= 47]
    assert sorted(large[:300]) == list(range(47, 347))


def test_what_a_step_takes_follows_from_its_number_and_not_from_the_size_of_the_steps():
    assert sum(taken(SIZES, WEIGHTS, 2, 8), []) == sum(taken(SIZES, WEIGHTS, 2, 5), [])
    assert taken(SIZES, WEIGHTS, 2) != taken(SIZES, WEIGHTS, 2, seed=29)


def test_the_hash_of_a_mixture_has_all_contents_and_weights_in_it_and_that_of_a_file_is_its_own(tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_rows(a, rows_like(3))
    write_rows(b, rows_like(4))
    own = hashlib.sha256(a.read_bytes()).hexdigest()
    assert read(tmp_path, a)[2] == own == read(tmp_path, {str(a): 2})[2]
    mixture = read(tmp_path, {str(a): 1, str(b): 2})[2]
    assert mixture == read(tmp_path, {str(a): 1, str(b): 2})[2]
    others = [read(tmp_path, data)[2] for data in ({str(a): 1, str(b): 1}, {str(b): 1, str(a): 2})]
    b.write_text(b.read_text() + "\n")
    others.append(read(tmp_path, {str(a): 1, str(b): 2})[2])
    assert len({own, mixture, *others}) == 5
    sizes = read(tmp_path, {str(a): 1, str(b): 2})[0].sizes
    assert sizes == [3, 4]


# -----------------------------------------------------------------------------
# what may not be trained on


QUESTION = "How many of the seven bridges of the old town can one cross in a single walk?"


def test_licences_and_evaluation_prompts_are_judged_as_prepare_judges_documents(tmp_path):
    """The same texts as documents: the same ones stay, for the same reasons, in the report of prepare.py."""
    long = "A river runs through the town, and there are bridges over it, of which one has fallen down. " * 3
    texts = [("mit", long), ("mit", f"{long} {QUESTION} {long}"), ("secret", "Dull prose of no interest."),
             ("cc0", "Quite another thing."), ("mit", QUESTION[: len(QUESTION) // 3])]
    documents = [dict(text=text, license=license, id=str(n)) for n, (license, text) in enumerate(texts)]
    write_rows(tmp_path / "documents.jsonl", documents)
    rows = [chat_row(user(row["text"]), assistant("yes"), license=row["license"]) for row in documents]
    write_rows(tmp_path / "chats.jsonl", rows)
    (tmp_path / "prompts.txt").write_text(QUESTION)
    rules = dict(keep_licenses="mit, cc0", decontaminate=str(tmp_path / "prompts.txt"))
    done = script("prepare.py", tmp_path / "documents.jsonl", f"--out={tmp_path / 'data'}", "--tokenizer=byte",
                  "--val_share=0", *[f"--{name}={value}" for name, value in rules.items()])
    assert done.returncode == 0, done.stderr
    with gzip.open(tmp_path / "data" / "removed.jsonl.gz", "rt") as f:
        removed = {row["id"].rpartition(":")[2]: row["reason"].partition(":")[0] for row in map(json.loads, f)}
    found, bad, identity = read(tmp_path, tmp_path / "chats.jsonl", longest=2000, **rules)
    kept = [row for n, row in enumerate(rows) if str(n) not in removed]
    assert everything(found) == [chat.render(TOK, row, "2025-01-01")[0] for row in kept]
    assert bad == {reason: (1, f"line {int(n) + 1} of chats.jsonl") for n, reason in removed.items()}
    assert set(removed.values()) == {"license", "contaminated"}
    # Another rule is another run, and its conversations are not those on disk.
    others = [dict(rules, keep_licenses="mit"), dict(decontaminate=rules["decontaminate"]), {}]
    assert len({identity, *(read(tmp_path, tmp_path / "chats.jsonl", 2000, **other)[2] for other in others)}) == 4


def test_a_licence_that_is_null_is_none_that_was_asked_for(tmp_path):
    rows = [dict(row, license=license) for row, license in zip(rows_like(3), ("mit", None, "cc0"))]
    write_parquet(tmp_path / "a.parquet", rows)
    found, bad, _ = read(tmp_path, tmp_path / "a.parquet", keep_licenses="mit")
    assert len(found) == 1 and bad == {"license": (2, "row 2 of a.parquet")}


def test_a_licence_that_is_asked_for_and_not_there_is_told(tmp_path):
    write_rows(tmp_path / "chats.jsonl", rows_like(2))
    with pytest.raises(ValueError, match="no column license in the data; it has messages"):
        read(tmp_path, tmp_path / "chats.jsonl", keep_licenses="mit")


def test_sources_take_turns_as_in_fair_queueing():
    """By hand: of slots 1 and 3 the first stands at 1/2 of the way and the others at 1/6, 3/6 and 5/6."""
    source, before = conversations.spread((1, 3))
    assert source.tolist() == [1, 0, 1, 1] and before.tolist() == [0, 0, 1, 2]


def test_a_hash_begins_a_comment_only_where_comments_are_asked_for(tmp_path):
    """In a list of agents it does; in a prompt, or inside a row of JSON, it is text."""
    prompts, rows = tmp_path / "prompts.txt", tmp_path / "rows.jsonl"
    prompts.write_text("Who is #1?\n")
    rows.write_text(json.dumps(dict(domain="a.org/#top")) + "\n")
    assert list(readers.rows_of(str(prompts), ("prompt",))) == [["Who is #1?"]]
    assert list(readers.rows_of(str(prompts), ("prompt",), comments=True)) == [["Who is"]]
    assert list(readers.rows_of(str(rows), ("domain",), comments=True)) == [["a.org/#top"]]
