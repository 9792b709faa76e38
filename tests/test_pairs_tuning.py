"""Pairs of features of posttrain/sft.py: whole runs against plain.py, with the log and the files that they leave."""

import json
import math
import os

import pytest
import torch
from lab import run, tuning
from oracle import Plain
from pairs import covering
from pytest import approx
from safetensors.torch import load_file
from test_oracles_tuning import batches
from test_pairs import names_in, stop_after
from test_sft import TOK, assistant, chat_row, user
from tiny import write_rows
from trained import log, steps

import chat
import convert
from configurator import settings
from engine.runs import settings_of
from posttrain import common, sft
from posttrain.conversations import row_hash
from tokenizer_json import hf_files
from weights import lora
from weights.hashes import WRITTEN

SFT = dict(
    start=["whole", "adapters", "nf4"],
    too_long=["drop", "cut"],
    max_length=[0, 72],
    val_data=[False, True],
    pack=[False, True],
    micro_batch=[1, 3],
    epochs=[2, 3],
    warmup=[0.0, 0.5],
    recompute=["none", "full"],
    optimizer=["ademamix", "adamw"],
    state_dtype=["float32", "bfloat16"],
    grad_clip=[0.0, 0.1],
    weight_decay=[0.0, 0.5],
    eval_every=[0, 2],
    eval_conversations=[0, 2],
    checkpoint_every=[0, 1],
    keep_checkpoints=[0, 1],
    stopped=[False, True],
)
NEVER = [(("state_dtype", "bfloat16"), ("optimizer", "adamw"))]
STANDS_FOR = dict(start="init_from lora_r lora_alpha base", stopped="resume out")
WITHOUT_PAIRS = {
    "the sizes of a run, which all rows share": "data seed batch_size lr betas alpha",
    "ranks: test_matrix.py": "parallel",
    "hardware, which a row cannot choose: test_hardware.py, test_speed.py": "device dtype compile",
    "it prints and trains nothing: test_sft.py": "show",
    "a share needs 200 conversations: test_held_out.py": "val_share",
}
# The last message of one conversation is read and not learnt; some are longer than 72 tokens and one is in both files.
SYSTEM = dict(role="system", content="s")
ROWS = [chat_row(SYSTEM, user("q" * n), assistant("yes" * (n % 4 + 1))) for n in range(1, 9)]
ROWS[2]["messages"] += [user("and?"), assistant("no") | dict(weight=0)]
ROWS[5]["messages"] += [user("x" * 20), assistant("word " * 6)]
HELD_OUT = [*ROWS[1:2], *[chat_row(SYSTEM, user("h" * n), assistant("ab" * n)) for n in range(1, 5)]]


def test_each_setting_of_sft_is_a_feature_or_has_a_reason_to_be_none():
    assert names_in(SFT, STANDS_FOR, WITHOUT_PAIRS) == settings(vars(sft)).keys()


def rendered(rows, row):
    """[(ids, mask)] of the conversations that a run learns from or is validated on, as its settings ask."""
    longest, results = row["max_length"] or 256, []
    for ids, mask in (chat.render(TOK, conversation, chat.DATE) for conversation in rows):
        if len(ids) <= longest or row["too_long"] == "cut" and any(mask[:longest]):
            results.append((ids[:longest], mask[:longest]))
    return results


def mean_loss(oracle, conversations):
    losses = [-oracle.logp(ids)[torch.tensor(mask[1:], dtype=torch.bool)] for ids, mask in conversations]
    return torch.cat(losses).mean()


def first_model(row, start):
    model = convert.load_any(str(start), base="nf4" if row["start"] == "nf4" else "")[0]
    if row["start"] != "whole":
        lora.add_lora(model, dict(r=4, lora_alpha=8.0, target_modules=lora.MATRICES))
        lora.init_lora(model, 28)
    return model


@pytest.mark.parametrize("row", covering(SFT, NEVER))
def test_a_run_of_sft_is_that_of_the_plain_formulas(lab, tmp_path, large_eps, row):
    """Losses, norms, rates, counts, validations and weights; the log and the files."""
    large_eps(1e-3)
    out = tmp_path / "run"
    write_rows(tmp_path / "rows.jsonl", ROWS)
    write_rows(tmp_path / "held_out.jsonl", HELD_OUT)
    flags = {name: value for name, value in row.items() if name not in STANDS_FOR}
    flags |= dict(data=f"{tmp_path}/rows.jsonl", batch_size=3, val_data="")
    flags["val_data"] = f"{tmp_path}/held_out.jsonl" if row["val_data"] else ""
    if row["start"] != "whole":
        flags |= dict(lora_r=4, lora_alpha=8.0, base="nf4" if row["start"] == "nf4" else "fp32")
    command = tuning(lab, out, *(f"--{name}={value}" for name, value in flags.items()), start="sft")

    held_out = rendered(sorted(HELD_OUT, key=row_hash), row) if row["val_data"] else []
    learnt = rendered([one for one in ROWS if not held_out or one not in HELD_OUT], row)
    plan = batches(len(learnt), 3, row["epochs"])
    stopped_at = 0
    if row["stopped"]:
        stopped_at = 1 + (n_parts_of(row, learnt, plan[1]) == 1)
        with stop_after(n_parts_of(row, learnt, plan[0])):
            run(*command)
        assert not os.path.exists(out / "summary.json") and steps(out)[-1] == stopped_at
    printed = run(*command, *["--resume"] * row["stopped"]).stdout
    compare_lines(printed, row, learnt, held_out, len(plan), out, stopped_at)

    oracle, entries = Plain(model=first_model(row, lab / "sft")), []

    def validate(step, n):
        with torch.no_grad():
            entries.append(dict(step=step, val_loss=mean_loss(oracle, held_out[: n or None]).item()))

    if held_out and row["eval_every"]:
        validate(0, row["eval_conversations"])
    for step, batch in enumerate(plan):
        conversations = [learnt[k] for k in batch]
        loss = mean_loss(oracle, conversations)
        loss.backward()
        rate = 1e-2 * common.linear(step, len(plan), row["warmup"])
        how = rate, row["grad_clip"], 1e-3, row["weight_decay"], row["optimizer"] == "adamw"
        norm = oracle.update(step + 1, len(plan), *how)
        counts = dict(tokens=sum(len(ids) for ids, _ in conversations), learnt=sum(sum(m) for _, m in conversations))
        entries.append(dict(step=step, loss=loss.item(), grad_norm=norm, lr=rate) | counts)
        is_last = step + 1 == len(plan)
        if held_out and (is_last or row["eval_every"] and (step + 1) % row["eval_every"] == 0):
            validate(step, row["eval_conversations"])
    tolerance = 1e-3 if row["state_dtype"] == "float32" else 2e-2
    assert log(out) == [approx(entry, rel=tolerance) for entry in entries]
    trained = convert.load_any(str(out))[0]
    assert oracle.distance(trained) < 2 * tolerance
    compare_files(row, flags, out, trained, len(plan), stopped_at, entries[-1])


def compare_lines(printed, row, learnt, held_out, n_steps, out, stopped_at):
    """The numbers of conversations, tokens and steps that a run prints."""
    whole = rendered(ROWS, row)
    tokens, n_learnt = sum(len(ids) for ids, _ in whole), sum(sum(mask) for _, mask in whole)
    lines = [f"{tokens:,} tokens, {n_learnt:,} of them learnt", f"{len(learnt)} conversations, {n_steps} steps"]
    if len(whole) < len(ROWS):
        lines.append(f"left out {len(ROWS) - len(whole)} of {len(ROWS)} conversations: ")
    if held_out:
        lines.append(f"{len(held_out)} conversations of --val_data for validation; {len(whole) - len(learnt)} of")
    if row["stopped"]:
        lines.append(f"resumed from {out}/ckpt/step-{stopped_at:08d}")
    assert all(line in printed for line in lines), printed


def n_parts_of(row, learnt, batch):
    """The micro-batches of a step: of rows that are packed, first-fit, from the longest conversation on."""
    lengths, rows = sorted((len(learnt[k][0]) for k in batch), reverse=True), []
    for length in lengths:
        fitting = [i for i, taken in enumerate(rows) if row["pack"] and taken + length <= (row["max_length"] or 256)]
        if fitting:
            rows[fitting[0]] += length
        else:
            rows.append(length)
    return math.ceil(len(rows) / row["micro_batch"])


def compare_files(row, flags, out, trained, end, stopped_at, last):
    saved = sorted({end, *range(1, end * row["checkpoint_every"]), *[stopped_at] * row["stopped"]})
    assert steps(out) == saved[-row["keep_checkpoints"] :]
    files = {".lock", "ckpt", "config.json", "log.jsonl", "summary.json", "tokens", "generation_config.json"}
    files |= {*hf_files(TOK)} | ({"model.safetensors", WRITTEN} if row["start"] == "whole" else {"adapter"})
    assert {*os.listdir(out)} == files
    name = "model.safetensors" if row["start"] == "whole" else "adapter/adapter_model.safetensors"
    wanted = {
        name if row["start"] == "whole" else lora.PREFIX + name: p
        for name, p in trained.named_parameters()
        if row["start"] == "whole" or ".lora_" in name
    }
    tensors = load_file(out / name)
    assert all(tensors[name].equal(p) for name, p in wanted.items())
    found = settings_of(out)
    assert {name: found[name] for name in flags} == flags | dict(max_length=row["max_length"] or 256)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary.get("val_loss", 0)) == (end, approx(last.get("val_loss", 0), rel=2e-2))
