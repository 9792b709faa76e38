"""posttrain/held_out.py: which conversations SFT holds out, that it learns nothing from them, and their loss."""

import json
import random

import pytest
import torch
import transformers
from conftest import refused, same, script, weights
from lab import run, tuning
from test_evaluate import evaluated
from test_sft import TOK, assistant, chat_row, tune, user
from tiny import write_rows
from trained import log

import chat
import tokenizer
from engine import plot
from engine.parallel import Ranks
from engine.runs import settings_of
from posttrain.conversations import tokenize_data
from posttrain.held_out import hold_out

SYSTEM = dict(role="system", content="s")
ROWS = [chat_row(SYSTEM, user(f"say {i}"), assistant("ab"[i % 2] * (1 + i % 5))) for i in range(240)]
SHARE = 0.1


def sides(tmp_path, rows, tok=TOK, share=SHARE, val_rows=None):
    """The texts of the conversations to learn from, and of the held-out ones."""
    read = []
    for name, part in dict(rows=rows, val=val_rows).items():
        if part:
            file = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}.jsonl"
            write_rows(file, part)
            read.append(tokenize_data(str(tmp_path / "ids"), tok, str(file), 256, Ranks())[0])
    *parts, _ = hold_out(read[0], share, *read[1:])
    return [[tok.decode_bytes(part[k][0].tolist()) for k in range(len(part))] for part in parts]


def test_the_words_decide_not_the_place_the_form_or_the_tokenizer(tmp_path):
    """Copies are on the same side. 24 of 240 are expected, give or take 4.6."""
    learnt, held_out = sides(tmp_path, ROWS)
    assert len(learnt) + len(held_out) == 240 and 12 <= len(held_out) <= 36
    sharegpt = [
        dict(conversations=[dict(zip(("from", "value"), message.values())) for message in row["messages"]])
        for row in ROWS + ROWS
    ]
    random.Random(1).shuffle(sharegpt)
    again, same_ones = sides(tmp_path, sharegpt, tokenizer.load("apertus:300"))
    assert same_ones == held_out and sorted(again) == sorted(learnt * 2)


def test_fewer_than_200_different_conversations_a_share_of_0_and_files_for_validation(tmp_path):
    """With files for validation, equal conversations in the data are left out, in whatever form."""
    for rows, share in (ROWS[:199], SHARE), (ROWS[:199] * 2, SHARE), (ROWS, 0):
        assert sides(tmp_path, rows, share=share) == [*sides(tmp_path, rows, share=0)[:1], []]
    learnt, held_out = sides(tmp_path, ROWS[:30], val_rows=[*ROWS[20:25], ROWS[239], ROWS[20]])
    assert len(learnt) == 25 and len(held_out) == 6
    with pytest.raises(ValueError, match="nothing is left to learn from"):
        sides(tmp_path, ROWS[:30], val_rows=ROWS)


SHORT = "--epochs=1 --batch_size=24 --micro_batch=8".split()


@pytest.fixture(scope="module")
def held(lab, tmp_path_factory):
    """A run that has held out a tenth of ROWS; the rows of the two sides are next to it."""
    folder = tmp_path_factory.mktemp("held")
    write_rows(folder / "rows.jsonl", ROWS)
    run(*tuning(lab, folder / "run", *SHORT, f"--data={folder}/rows.jsonl", f"--val_share={SHARE}", "--eval_every=4"))
    _, held_out = sides(folder, ROWS)
    split = [[], []]
    for row in ROWS:
        split[TOK.decode_bytes(chat.render(TOK, row, chat.DATE)[0]) in held_out].append(row)
    for name, rows in zip(("learnt", "held_out"), split):
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def test_nothing_is_learnt_from_what_is_held_out(lab, held, tmp_path):
    """The weights are those of a run whose data do not have these conversations."""
    how = f"--data={held}/learnt.jsonl", "--val_share=0"
    tune(lab, tmp_path / "run", *SHORT, *how)
    assert same(weights(held / "run"), weights(tmp_path / "run"))
    tune(lab, tmp_path / "named", *SHORT, f"--data={held}/rows.jsonl", f"--val_data={held}/held_out.jsonl")
    assert same(weights(held / "run"), weights(tmp_path / "named"))
    others = f"--data={held}/rows.jsonl", f"--val_data={lab}/chats.jsonl"
    refused(
        script(*tuning(lab, tmp_path / "named", *SHORT, *others, "--resume")), "with other settings: ", "val_data_hash"
    )


def test_the_loss_is_transformers_at_the_start_and_evaluates_at_the_end_and_is_drawn(lab, held, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(lab / "hf", dtype=torch.float32)
    nats = tokens = 0
    for line in (held / "held_out.jsonl").read_text().splitlines():
        ids, mask = map(torch.tensor, chat.render(TOK, json.loads(line), chat.DATE))
        labels = torch.where(mask.bool(), ids, -100)[None]
        nats += model(ids[None], labels=labels).loss.item() * mask.sum().item()
        tokens += mask.sum().item()
    curve = plot.read_points(held / "run", plot.panels_of([held / "run"]), "step")["val_loss"]
    assert curve[0].tolist() == [0, 3, 7, 8]
    assert curve[1, 0] == pytest.approx(nats / tokens, rel=1e-5)
    _, rows = evaluated(tmp_path, f"--init_from={held / 'run'}")
    assert rows[0]["metric"] == "loss" and rows[0]["n"] == settings_of(held / "run")["held_out"]
    assert rows[0]["score"] == pytest.approx(curve[1, -1], rel=1e-5)
    summary = json.loads((held / "run" / "summary.json").read_text())
    assert summary["val_loss"] == curve[1, -1]


def test_conversations_that_were_cut_are_held_out_as_the_others(lab, tmp_path):
    """evaluate.py finds them again, and scores them whole."""
    rows = [chat_row(SYSTEM, user(f"say {i}"), assistant("ab" * (1 + i % 40))) for i in range(240)]
    write_rows(tmp_path / "rows.jsonl", rows)
    how = f"--data={tmp_path}/rows.jsonl", f"--val_share={SHARE}", "--too_long=cut", "--max_length=110"
    assert "cut" in run(*tuning(lab, tmp_path / "run", *SHORT, *how)).stdout
    _, found = evaluated(tmp_path, f"--init_from={tmp_path / 'run'}")
    assert found[0]["n"] == settings_of(tmp_path / "run")["held_out"] > 10


def test_two_ranks_hold_out_the_same_and_have_the_same_loss(lab, held, launch, tmp_path):
    """In micro-batches of 16 one of them has no conversation left."""
    how = f"--data={held}/rows.jsonl --val_share={SHARE} --eval_every=4 --micro_batch=16 --parallel=fsdp".split()
    args = tuning(lab, tmp_path / "run", *SHORT, *how)
    codes, text = launch(2, *args[1:], script="posttrain.sft", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    one, two = ([e["val_loss"] for e in log(f) if "val_loss" in e] for f in (held / "run", tmp_path / "run"))
    assert two == pytest.approx(one, rel=1e-4) and len(one) == 4
