"""posttrain/conversations.py: rows of any form, files of any kind, mixtures of them, and what is left out of them."""

import collections
import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest

import chat
import tokenizer
from engine import readers
from engine.files import sha256
from engine.parallel import Ranks
from posttrain import conversations
from test_sft import SYSTEM, TOK, assistant, chat_row, user, write_rows

# -----------------------------------------------------------------------------
# the forms


def ids_of(row):
    return chat.learnable(TOK, row, 10_000, "2025-01-01")


SAME = chat_row(SYSTEM, user("2+2?"), assistant("4"))


@pytest.mark.parametrize(
    "row",
    [
        dict(
            conversations=[
                {"from": "system", "value": "s"},
                {"from": "human", "value": "2+2?"},
                {"from": "gpt", "value": "4"},
            ]
        ),
        dict(
            conversations=[
                {"from": "human", "value": "2+2?"},
                {"from": "gpt", "value": "4"},
            ],
            system="s",
        ),
        dict(conversations=SAME["messages"]),
        dict(prompt="2+2?", completion="4", system="s"),
        chat_row(*SAME["messages"][1:], system="s"),
        dict(SAME, system="another"),
        dict(prompt=SAME["messages"][:2], completion=SAME["messages"][2:]),
        # What has messages and more, as ultrachat_200k, is read by its messages.
        dict(SAME, prompt="another", completion="text"),
        dict(SAME, tools="[]"),
    ],
)
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
    tool = dict(name="f", description="a tool")
    turns = [
        ("human", "go"),
        ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
        ("observation", "OUT"),
        ("gpt", "ok"),
    ]
    row = dict(
        conversations=[{"from": who, "value": text} for who, text in turns],
        tools=json.dumps([tool]),
    )
    call = dict(type="function", function=dict(name="f", arguments='{"x": 1}'))
    asked = dict(role="assistant", content=None, tool_calls=[call])
    openai = chat_row(
        user("go"), asked, dict(role="tool", content="OUT"), assistant("ok"), tools=[tool]
    )
    assert ids_of(row) == ids_of(openai)
    assert isinstance(ids_of(row), tuple)


HUMAN = {"from": "human", "value": "a"}


@pytest.mark.parametrize(
    "row, why",
    [
        (dict(instruction="no output"), "no known form of a conversation"),
        (dict(messages=None), chat.ODD),
        (dict(conversations=[5]), chat.ODD),
        (dict(conversations=[{"from": "bing", "value": "x"}]), chat.ODD),
        (
            dict(conversations=[HUMAN, {"from": "function_call", "value": "no JSON"}]),
            chat.ODD,
        ),
        (dict(instruction=5, output="x"), chat.ODD),
        (dict(instruction="a", output=""), "an empty turn"),
        (dict(prompt=["a"], completion=["b"]), chat.ODD),
        (dict(prompt="a", completion="b", tools="no JSON"), chat.ODD),
    ],
)
def test_a_row_that_fits_no_form_is_left_out_by_its_kind(row, why):
    assert ids_of(row) == why


# -----------------------------------------------------------------------------
# conversations on disk


def rows_like(n):
    """n conversations of different lengths, every second one with a system message."""
    pairs = [
        (user(f"{i}?" * (1 + i % 5)), assistant("é" * (1 + i % 7))) for i in range(n)
    ]
    return [chat_row(*[SYSTEM] * (i % 2), *pair) for i, pair in enumerate(pairs)]


def rendered(rows):
    return [chat.render(TOK, row, "2025-01-01")[0] for row in rows]


def everything(found):
    return [found[k][0].tolist() for k in range(len(found))]


def tokenized(tmp_path, folder, tok=TOK, longest=512, date="2025-01-01"):
    """What posttrain/sft.py makes of chats.jsonl on one rank."""
    data = str(tmp_path / "chats.jsonl")
    return conversations.tokenized(
        str(tmp_path / folder), tok, data, longest, date, Ranks()
    )


def test_conversations_on_disk_are_what_render_gives_whatever_the_parts(
    tmp_path, monkeypatch
):
    """Four bytes a token; parts of 300 bytes, so that conversations begin before, at and behind their borders."""
    rows = rows_like(40)
    rows[7] = rows[31] = chat_row(user("?"))
    write_rows(tmp_path / "chats.jsonl", rows, between="\n\n")
    want = [
        chat.render(TOK, row, "2025-01-01") for row in rows if len(row["messages"]) > 1
    ]
    for part in (300, len(json.dumps(rows[0])) + 2, 2**26):
        monkeypatch.setattr(readers, "PART", part)
        found, bad, _ = tokenized(tmp_path, str(part))
        assert (
            bad == {"no assistant turn": (2, "line 15 of chats.jsonl")}
            and len(found) == 38
        )
        assert [
            (ids.tolist(), said.tolist())
            for ids, said in map(found.__getitem__, range(38))
        ] == want
        assert found.tokens == sum(len(ids) for ids, _ in want) and found.learnt == sum(
            sum(said) for _, said in want
        )
        sizes = [f.stat().st_size for f in (tmp_path / str(part)).glob("*.ids")]
        assert sum(sizes) == 4 * found.tokens and (len(sizes) > 10) == (part < 2**20)


def test_what_a_killed_process_left_is_made_again_and_what_is_stale_is_not_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(readers, "PART", 2000)
    write_rows(tmp_path / "chats.jsonl", rows_like(40))
    whole = everything(tokenized(tmp_path, "tokens")[0])
    first, *others = sorted((tmp_path / "tokens").glob("*.ids"))
    os.remove(first.with_suffix(".json"))  # killed between the two files
    first.write_bytes(b"half")
    before = [other.stat().st_mtime_ns for other in others]
    conversations.mapped.cache_clear()
    assert everything(tokenized(tmp_path, "tokens")[0]) == whole
    assert [other.stat().st_mtime_ns for other in others] == before != []
    assert everything(tokenized(tmp_path, "tokens", date="2026-01-01")[0]) != whole
    assert (
        everything(tokenized(tmp_path, "tokens", tok=tokenizer.load("apertus:300"))[0])
        != whole
    )
    assert everything(tokenized(tmp_path, "tokens", longest=75)[0]) == [
        ids for ids in whole if len(ids) <= 75
    ]


PARTS = """
import sys
import tokenizer
from posttrain import conversations
from engine import readers
from engine.parallel import Ranks, orderly_exit
readers.PART = 300
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
    codes, text = launch(
        2,
        tmp_path / "chats.jsonl",
        tmp_path / "tokens",
        script=program,
        logs=tmp_path / "log",
    )
    assert codes == [0, 0], text[-2000:]
    want = rendered(rows_like(12))
    assert f"rank 0 {want}\n" in text and f"rank 1 {want}\n" in text


# -----------------------------------------------------------------------------
# files of any kind


def write_parquet(path, rows, **how):
    os.makedirs(path.parent, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **how)


def read(tmp_path, data, longest=512, **rules):
    """(the conversations, what was left out, the hash) of a --data, made anew."""
    folder = str(tmp_path / f"ids-{len(os.listdir(tmp_path))}")
    return conversations.tokenized(
        folder, TOK, str(data), longest, "2025-01-01", Ranks(), **rules
    )


def test_parquet_gzip_and_a_folder_of_both_are_read_as_the_lines_would_be(tmp_path):
    rows = rows_like(9)
    want = rendered(rows)
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


@pytest.mark.parametrize(
    "data, says",
    [
        ("{'a.jsonl': -1}", "want a positive number for each source"),
        ("{'a.jsonl': '1'}", "want a path, or weights by path"),
        (
            "{'a.jsonl': 1, 'none.jsonl': 1}",
            "no such file, folder or pattern: 'none.jsonl'",
        ),
        (
            "{'a.jsonl': 1, 'b.jsonl': 1}",
            "b.jsonl: none of 1 conversations can be learnt from: 1 no assistant turn",
        ),
        ("c.jsonl", "c.jsonl, line 5: want a JSON object with"),
        ("notes.txt", "notes.txt: want .jsonl, .json or .parquet"),
        ("hf://datasets/one", "want hf://datasets/OWNER/NAME"),
        ("torn.jsonl.gz", "torn.jsonl.gz: damaged, or not what its name says"),
        ("torn.parquet", "torn.parquet: damaged, or not what its name says"),
    ],
)
def test_data_that_cannot_be_read_are_told_in_one_line(tmp_path, monkeypatch, data, says):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a.jsonl", rows_like(3))
    write_rows(tmp_path / "b.jsonl", [chat_row(user("?"))])
    write_rows(tmp_path / "c.jsonl", [*rows_like(4), [1, 2]])
    (tmp_path / "notes.txt").write_text("What was said.")
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(os.urandom(3000))[:-1000])
    (tmp_path / "torn.parquet").write_bytes(b"PAR1, and no more")
    with pytest.raises(ValueError, match="^[^\n]*$") as told:
        conversations.look(data)
        read(tmp_path, data)
    assert says in str(told.value)


# -----------------------------------------------------------------------------
# mixtures


SIZES, WEIGHTS = (40, 7, 300), (3, 1.5, 0.5)


def taken(sizes, weights, epochs, batch_size=1000, seed=28):
    steps = -(-epochs * sum(sizes) // batch_size)
    return [
        conversations.chosen(step, batch_size, sizes, weights, epochs, seed).tolist()
        for step in range(steps)
    ]


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
    rounds = [small[i : i + 7] for i in range(0, len(small) - 6, 7)]
    assert len(rounds) > 500 and all(
        sorted(once) == list(range(40, 47)) for once in rounds
    )
    assert len(set(map(tuple, rounds))) > 300
    large = [k for k in numbers if k >= 47]
    assert sorted(large[:300]) == list(range(47, 347))


# -----------------------------------------------------------------------------
# what may not be trained on


def test_the_hash_of_a_mixture_has_all_contents_and_weights_and_rules_in_it(tmp_path):
    a, b = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
    write_rows(tmp_path / "a.jsonl", rows_like(3))
    write_rows(tmp_path / "b.jsonl", rows_like(4))
    assert read(tmp_path, a)[2] == sha256(a) == read(tmp_path, {a: 2})[2]
    found = [
        read(tmp_path, data)[2]
        for data in (a, {a: 1, b: 2}, {a: 1, b: 2}, {a: 1, b: 1}, {b: 1, a: 2})
    ]
    write_rows(tmp_path / "b.jsonl", rows_like(5))
    conversations_of_both, _, changed = read(tmp_path, {a: 1, b: 2})
    assert (
        found[1] == found[2]
        and len({*found, changed}) == 5
        and conversations_of_both.sizes == [3, 5]
    )


# -----------------------------------------------------------------------------
# what may not be trained on

QUESTION = "How many of the seven bridges of the old town can one cross in a single walk?"


def test_rows_without_an_allowed_licence_and_with_an_evaluation_prompt_are_left_out(
    tmp_path,
):
    """A licence that is null is none that was asked for; one without a column is an error."""
    rows = [
        dict(row, license=license)
        for row, license in zip(rows_like(4), ("mit", None, "secret", "cc0"))
    ]
    rows.append(
        chat_row(user(f"Tell me. {QUESTION} Think."), assistant("yes"), license="mit")
    )
    write_parquet(tmp_path / "a.parquet", rows)
    (tmp_path / "prompts.txt").write_text(QUESTION)
    rules = dict(keep_licenses="mit, cc0", decontaminate=str(tmp_path / "prompts.txt"))
    found, bad, identity = read(tmp_path, tmp_path / "a.parquet", **rules)
    assert everything(found) == rendered([rows[0], rows[3]])
    assert bad == {
        "license": (2, "row 2 of a.parquet"),
        "contaminated": (1, "row 5 of a.parquet"),
    }
    assert identity != read(tmp_path, tmp_path / "a.parquet", keep_licenses="mit, cc0")[2]
    write_rows(tmp_path / "b.jsonl", rows_like(2))
    with pytest.raises(
        ValueError, match="no column license in the data; it has messages"
    ):
        read(tmp_path, tmp_path / "b.jsonl", keep_licenses="mit")
