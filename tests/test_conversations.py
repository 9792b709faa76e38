"""posttrain/conversations.py: rows of any form, files of any kind, mixtures of them, and the rows that are left out."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT
from tiny import write_rows

import chat
import tokenizer
from corpus import readers
from engine.parallel import Ranks
from posttrain import common, conversations

TOK = tokenizer.load("byte")
DATE = "2025-01-01"


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
    want = why.replace("ODD", chat.ODD)
    if why[0] == "{":
        want = chat.render(TOK, json.loads(why), DATE)
    assert chat.learnable(TOK, json.loads(row), 600, DATE) == want


# -----------------------------------------------------------------------------
# files of any kind, and ids on disk


def rows_like(n):
    """n conversations of different lengths, every second one without a system message."""
    rows = [chat_row(f"{i}?" * (1 + i % 5), "é" * (1 + i % 7)) for i in range(n)]
    return [dict(messages=row["messages"][i % 2 :]) for i, row in enumerate(rows)]


def rendered(rows):
    return [chat.render(TOK, row, DATE) for row in rows]


def everything(found):
    return [(ids.tolist(), said.tolist()) for ids, said in map(found.__getitem__, range(len(found)))]


def read(tmp_path, data, folder="", tok=TOK, longest=512, date=DATE, **rules):
    """(conversations, reasons, hash) of a --data. Without a named folder they are tokenized anew."""
    folder = str(tmp_path / (folder or f"ids-{len(os.listdir(tmp_path))}"))
    return conversations.tokenized(folder, tok, str(data), longest, date, Ranks(), **rules)


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
        assert found.learnt == sum(sum(said) for _, said in want)


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
    for change in dict(date="2026-01-01"), dict(tok=tokenizer.load("apertus:300")), dict(longest=75):
        assert everything(read(tmp_path, data, "tokens", **change)[0]) != whole


# -----------------------------------------------------------------------------
# mixtures


def test_each_source_has_its_share_at_any_place_of_a_run_and_is_taken_to_its_end_before_it_starts_anew():
    """Weights 6 : 3 : 1, over more samples than there are slots; 3,000 slots are not a multiple of 7."""
    sizes = 40, 7, 300
    numbers = np.concatenate([common.chosen(step, 1000, sizes, (3, 1.5, 0.5), 40, 28) for step in range(14)])
    assert len(numbers) == 40 * sum(sizes)
    of_source = np.digitize(numbers, [40, 47])
    for end in (10, 11, 57, 1000, 9_999, 10_001, len(numbers)):
        counts = np.bincount(of_source[:end], minlength=3)
        assert (abs(counts - np.array([0.6, 0.3, 0.1]) * end) < 2).all()
    small = numbers[of_source == 1]
    rounds = small[: len(small) // 7 * 7].reshape(-1, 7)
    assert (np.sort(rounds) == range(40, 47)).all()
    assert len(np.unique(rounds, axis=0)) > 300
    assert sorted(numbers[of_source == 0][:40]) == list(range(40))
    assert sorted(numbers[of_source == 2][:300]) == list(range(47, 347))


def test_the_hash_of_a_mixture_has_all_contents_and_weights(tmp_path):
    a, b = (str(tmp_path / f"{name}.jsonl") for name in "ab")
    write_rows(tmp_path / "a.jsonl", rows_like(3))
    hashes = set()
    for n, weights in ((4, {a: 1, b: 2}), (4, {a: 1, b: 1}), (4, {b: 1, a: 2}), (5, {a: 1, b: 2})):
        write_rows(tmp_path / "b.jsonl", rows_like(n))
        found, _, sha = read(tmp_path, weights)
        hashes.add(sha)
    assert len(hashes) == 4 and found.sizes == [3, 5]


# -----------------------------------------------------------------------------
# rows that may not be trained on

QUESTION = "How many of the seven bridges of the old town can one cross in a single walk?"


def test_rows_without_an_allowed_licence_and_with_an_evaluation_prompt_are_left_out(tmp_path):
    """In a parquet file, which has null where a row lacks a key. A null licence is not in the allowlist."""
    rows = [
        dict(row, license=license, prompt=None, completion=None)
        for row, license in zip(rows_like(4), ("mit", None, "secret", "cc0"))
    ]
    rows.append(dict(prompt=f"Tell me. {QUESTION} Think.", completion="yes", license="mit"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    (tmp_path / "prompts.txt").write_text(QUESTION)
    rules = dict(keep_licenses="mit, cc0", decontaminate=str(tmp_path / "prompts.txt"))
    found, bad, identity = read(tmp_path, tmp_path / "a.parquet", **rules)
    assert everything(found) == rendered([rows[0], rows[3]])
    assert bad == [[*why, f"row {n} of a.parquet"] for n, *why in ((2, "license"), (3, "license"), (5, "contaminated"))]
    assert identity != read(tmp_path, tmp_path / "a.parquet", keep_licenses="mit, cc0")[2]
    with pytest.raises(ValueError, match="a.parquet: none of 5 conversations can be learnt from: 5 license"):
        read(tmp_path, tmp_path / "a.parquet", keep_licenses="gpl")
