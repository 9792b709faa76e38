"""studies/context.py: bits by position against whole logits, and its rows. test_length.py tests the look-up."""

import math

import torch
import torch.nn.functional as F
from lab import run
from pytest import approx

import convert
from scoring import text_ids
from studies import context, kit


def test_bits_by_position_are_those_of_whole_logits(lab):
    """A letter is a token. A text that fills no window is left out."""
    model, tok = convert.load_any(lab / "hf")
    text = "".join(chr(97 + i * i % 23) for i in range(400))
    rows = context.position_scores(model, tok, [text, "short"], 32, 12)
    windows = torch.tensor(text_ids(tok, text))[:-1].unfold(0, 33, 32)
    with torch.no_grad():
        nats = F.cross_entropy(model(windows[:, :-1]).mT, windows[:, 1:], reduction="none")
    assert [(row["begin"], row["end"]) for row in rows] == [(0, 12), (12, 24), (24, 32)]
    for row in rows:
        part = nats[:, row["begin"] : row["end"]]
        assert row["n"] == len(windows)
        assert row["bytes"] == part.numel()
        assert row["score"] == row["bits_per_byte"] == approx(part.mean().item() / math.log(2), rel=1e-5)


def test_both_measures_of_a_run_are_rows_of_one_file(lab, tmp_path):
    """On the run's own validation documents."""
    flags = "--by_position=64 --window=128 --lookup=1".split()
    run("studies.context", f"--init_from={lab}/pretrained", *flags, f"--out={tmp_path}/context.jsonl")
    rows = kit.read_rows(tmp_path / "context.jsonl")
    names = ["0 to 63", "64 to 127", "32 tokens back", "64 tokens back", "112 tokens back"]
    assert [row["name"] for row in rows] == names
    assert all(row["low"] <= row["score"] <= row["high"] for row in rows)
