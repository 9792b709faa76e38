"""posttrain/conversations.py: rows of any form, files of any kind, several of them, and the rows that are left out."""

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT
from tiny import write_rows

import chat
import tokenizer
from corpus import readers
from engine.parallel import Ranks
from posttrain import conversations, pairs

TOK = tokenizer.load("byte")


def chat_row(*texts, **more):
    """A row of system, user, assistant, user, ..."""
    roles = ["system", *["user", "assistant"] * 9]
    return dict(messages=[dict(role=role, content=text) for role, text in zip(roles, ("s", *texts))], **more)


# -----------------------------------------------------------------------------
# the forms

ROWS = [line for line in Path(ROOT, "tests", "rows.txt").read_text().splitlines() if line[0] != "#"]


@pytest.mark.parametrize("line", ROWS)
def test_a_row_is_the_conversation_that_it_says_or_left_out_for_a_reason(line):
    """A row with messages and more, as in ultrachat_200k, is read by its messages."""
    why, _, row = line.partition(" | ")
    want = why
    if why[0] == "{":
        want = chat.render(TOK, json.loads(why), chat.DATE)
    assert chat.learnable(TOK, json.loads(row), 600) == want


ASKED = dict(role="user", content="a")
SYSTEM = dict(role="system", content="s")
UNREAD = [
    ({}, []),
    (dict(system="s", tools=[], label=True, id=3, functions=None, thinking=False), []),
    (dict(functions=[dict(name="f")], reasoning="r", weight=0), ["functions", "reasoning", "weight"]),
    (dict(label=3, train=False, input="i", prompt="p"), ["input", "label", "prompt", "train"]),
    (
        dict(messages=[SYSTEM, ASKED, dict(role="assistant", content="b")], system="t"),
        ["system' next to a system message"],
    ),
    (dict(messages=[SYSTEM, ASKED, dict(role="assistant", content="b")], system="s"), []),
    (
        dict(messages=[ASKED, dict(role="assistant", content="b", mood="glad", name="x", tags=[])]),
        ["mood' in a message"],
    ),
]


@pytest.mark.parametrize("more, keys", UNREAD)
def test_what_a_row_holds_and_nobody_reads_is_named(more, keys):
    row = dict(messages=[ASKED, dict(role="assistant", content="b")]) | more
    assert sorted(chat.unread_keys(row)) == [f"the key '{key}" if " " in key else f"the key '{key}'" for key in keys]


def test_history_and_input_are_read_in_alpacas_form_alone():
    row = dict(instruction="a", output="b", input="c", history=[["d", "e"]], topic="t")
    assert chat.unread_keys(row) == {"the key 'topic'"}


def with_odd_values(value):
    """The value (a copy of JSON) with an odd value in one place, for each of its places and some odd values."""
    yield from (5, "\ud83d", ["x"], {"a": 1})
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for odd in with_odd_values(value[key]):
            copy = value.copy()
            copy[key] = odd
            yield copy


def test_an_odd_value_anywhere_is_a_reason_and_no_exception():
    short = [json.loads(line.partition(" | ")[2]) for line in ROWS if len(line) < 900]
    for row in [
        *short,
        *(
            dict(chosen=row["messages"], rejected=row["messages"][:1])
            for row in short
            if "messages" in row and row["messages"]
        ),
    ]:
        for odd in with_odd_values(row):
            if isinstance(odd, dict):
                assert type(chat.learnable(TOK, odd, 600)) in (str, tuple), odd
                assert type(chat.prompt_ids(TOK, odd)) in (str, list), odd
                assert type(pairs.pair_ids(TOK, odd)) in (str, tuple), odd


# -----------------------------------------------------------------------------
# files of any kind, and ids on disk


def rows_like(n):
    """n conversations of different lengths, every second one without a system message."""
    rows = [chat_row(f"{i}?" * (1 + i % 5), "é" * (1 + i % 7)) for i in range(n)]
    return [dict(messages=row["messages"][i % 2 :]) for i, row in enumerate(rows)]


def rendered(rows):
    return [chat.render(TOK, row, chat.DATE) for row in rows]


def everything(found):
    return [(ids.tolist(), loss_mask.tolist()) for ids, loss_mask in map(found.__getitem__, range(len(found)))]


def read(tmp_path, data, folder="", tok=TOK, longest=512, **how):
    """(conversations, reasons, hash) of a --data. Without a named folder they are tokenized anew."""
    folder = str(tmp_path / (folder or f"ids-{len(os.listdir(tmp_path))}"))
    return conversations.tokenize_data(folder, tok, str(data), longest, Ranks(), **how)


def test_conversations_on_disk_are_the_rendered_ones_whatever_the_parts(tmp_path, monkeypatch):
    """In parts of 300 bytes conversations begin before, at and after a border. The longest conversation just fits."""
    rows = rows_like(40)
    rows[7] = rows[31] = chat_row("?")
    write_rows(tmp_path / "chats.jsonl", rows)
    want = rendered(row for row in rows if row is not rows[7])
    for part in (300, len(json.dumps(rows[0])) + 1, 2**26):
        monkeypatch.setattr(readers, "PART", part)
        found, bad, _ = read(tmp_path, tmp_path / "chats.jsonl", longest=max(len(ids) for ids, _ in want))
        assert bad == [["no assistant turn", f"line {n} of chats.jsonl"] for n in (8, 32)]
        assert everything(found) == want
        assert found.tokens == sum(len(ids) for ids, _ in want)
        assert found.learnt == sum(sum(loss_mask) for _, loss_mask in want)
        assert found.longest == max(len(ids) for ids, _ in want)


def test_a_killed_process_makes_the_missing_parts_and_nothing_stale_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PART", 2000)
    data = tmp_path / "chats.jsonl"
    write_rows(data, rows_like(40))
    whole = everything(read(tmp_path, data, "tokens")[0])
    first, second, *_ = sorted((tmp_path / "tokens").glob("*.npy"))
    os.remove(f"{first}.json")  # killed between the two files
    first.write_bytes(b"half")
    before = second.stat().st_mtime_ns
    assert everything(read(tmp_path, data, "tokens")[0]) == whole
    assert second.stat().st_mtime_ns == before
    for change in dict(tok=tokenizer.load("apertus:300")), dict(longest=75):
        assert everything(read(tmp_path, data, "tokens", **change)[0]) != whole


def test_what_is_too_long_may_lose_its_end_and_is_then_other_data(tmp_path):
    """A conversation whose first tokens hold no word to learn is left out all the same."""
    rows = [chat_row("?", "é" * 40), chat_row("?" * 90, "é"), chat_row("?", "é")]
    write_rows(tmp_path / "chats.jsonl", rows)
    (first, mask), _, last = rendered(rows)
    longest = len(last[0])
    found, bad, cut_hash = read(tmp_path, tmp_path / "chats.jsonl", longest=longest, too_long="cut")
    assert everything(found) == [(first[:longest], mask[:longest]), last]
    assert bad == [[f"no word to learn in its first max_length={longest} tokens", "line 2 of chats.jsonl"]]
    found, bad, dropped_hash = read(tmp_path, tmp_path / "chats.jsonl", longest=longest)
    assert everything(found) == [last] and len(bad) == 2 and cut_hash != dropped_hash


def test_a_repeated_conversation_is_counted_but_not_one_that_data_names_twice(tmp_path):
    for name, rows in dict(a=rows_like(3), b=rows_like(3)[:2] * 2).items():
        write_rows(tmp_path / f"{name}.jsonl", rows)
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    notes = {data: read(tmp_path, data)[0].notes for data in (f"{a},{a}", f"{a},{b}")}
    assert notes == {f"{a},{a}": [], f"{a},{b}": ["4 of 7 conversations repeat another"]}


# -----------------------------------------------------------------------------
# several sources, and the order


def test_several_sources_are_one_after_the_other_and_one_may_come_twice(tmp_path):
    """The hash has all contents, in their order."""
    a, b = (tmp_path / f"{name}.jsonl" for name in "ab")
    write_rows(a, rows_like(3))
    hashes = set()
    for n, names in ((4, "ab"), (4, "ba"), (4, "a"), (5, "ab"), (5, "aab")):
        write_rows(b, rows_like(9)[-n:])
        data = ",".join(str(dict(a=a, b=b)[name]) for name in names)
        found, _, sha = read(tmp_path, data)
        hashes.add(sha)
    assert len(hashes) == 5
    assert everything(found) == rendered(rows_like(3) * 2 + rows_like(9)[-5:])


def test_an_empty_file_among_others_is_said(tmp_path, capsys):
    """Also one whose archive has bytes."""
    write_rows(tmp_path / "a.jsonl", rows_like(3))
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b""))
    found, *_ = read(tmp_path, ",".join(f"{tmp_path}/{name}" for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz")))
    assert len(found) == 3
    assert capsys.readouterr().out == f"{tmp_path}/b.jsonl is empty\n{tmp_path}/c.jsonl.gz is empty\n"


def test_a_column_of_parquet_that_is_not_read_is_named_and_needs_no_type_of_python(tmp_path):
    """Python has no year 33,658. The row has a key that is read in another form alone."""
    table = pyarrow.Table.from_pylist([row | dict(input="x") for row in rows_like(3)])
    table = table.append_column("born", pyarrow.array([10**12] * 3, pyarrow.timestamp("s")))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found, *_ = read(tmp_path, tmp_path / "a.parquet")
    assert found.notes == [
        f"3 of 3 conversations have the {words}, which is not read (first in row 1 of a.parquet)"
        for words in ("key 'input'", "column 'born'")
    ]


def test_a_null_of_parquet_is_a_missing_key(tmp_path):
    """Parquet gives each row the columns of all others. A source without any conversation is an error."""
    rows = [dict(row, prompt=None, completion=None) for row in rows_like(4)]
    rows.append(dict(prompt="Tell me.", completion="yes"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    found, bad, _ = read(tmp_path, tmp_path / "a.parquet")
    assert everything(found)[:4] == rendered(rows_like(4)) and len(found) == 5 and not bad
    with pytest.raises(
        ValueError, match="a.parquet: none of 5 conversations can be learnt from: 5 more than max_length"
    ):
        read(tmp_path, tmp_path / "a.parquet", longest=5)
