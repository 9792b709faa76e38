"""posttrain/forgetting.py: the loss on old text is the one that evaluate.py finds, and measuring changes no weight."""

import pytest
from conftest import refused, same, script, weights
from lab import run, tuning
from tiny import write_rows
from trained import killed_after, log

import tokenizer
from engine.files import read_json
from posttrain import forgetting

TOK = tokenizer.load("byte")
TEXTS = ["All human beings are born free. " * 30, "Würde und Rechte", "Tous les êtres humains naissent libres. " * 15]


@pytest.fixture(scope="module")
def watched(lab, tmp_path_factory):
    """The folder of a run of SFT with --old=old.jsonl. Without --old it would be the lab's run sft/."""
    root = tmp_path_factory.mktemp("forgetting")
    write_rows(root / "old.jsonl", [dict(text=text) for one in TEXTS for text in (one, "x")])
    done = run(*tuning(lab, root / "run", f"--old={root}/old.jsonl", "--old_every=8", "--old_windows=0"))
    (root / "said").write_text(done.stdout)
    return root


def test_a_run_measures_before_on_the_way_and_after_and_ends_in_the_same_bits(lab, watched):
    assert same(weights(watched / "run"), weights(lab / "sft"))
    found = {entry["step"]: entry["old_bpb"] for entry in log(watched / "run", "old_bpb")}
    assert [*found] == [0, 7, 15, 19]
    told = read_json(watched / "run" / "summary.json")
    assert (told["old_before"], told["old_after"]) == pytest.approx((found[0], found[19]))


def test_what_was_lost_is_what_evaluate_finds_against_the_start(lab, watched, tmp_path):
    """evaluate.py --against computes mean and interval of the paired differences from both models' files."""
    models = [f"--init_from={watched}/run", f"--against={lab}/hf"]
    run("evaluate.py", watched / "old.jsonl", *models, f"--out={tmp_path}")
    after, above, *_ = read_json(tmp_path / "evaluation.json")["rows"]
    told = read_json(watched / "run" / "summary.json")
    lost, half = told["old_lost"], told["old_plus_minus"]
    assert (lost, half) == pytest.approx((above["score"], (above["high"] - above["low"]) / 2), rel=1e-4)
    assert told["old_after"] == pytest.approx(after["score"], rel=1e-6)
    assert abs(lost) > 0.01
    assert f"lost {lost:+.3f} ± {half:.3f} bits/byte of" in (watched / "said").read_text()


def test_killed_and_resumed_it_compares_with_the_same_start(lab, watched, tmp_path):
    killed, late = (killed_after(done, tmp_path / done.name, 10) for done in (watched / "run", lab / "sft"))
    old = [f"--old={watched}/old.jsonl", "--old_every=8", "--resume"]
    refused(script(*tuning(lab, killed, *old, "--old_windows=2")), "old.json has other windows")
    refused(script(*tuning(lab, late, *old)), "No such file", "old.json")
    run(*tuning(lab, killed, *old, "--old_windows=0"))
    assert read_json(killed / "summary.json") == read_json(watched / "run" / "summary.json")
    # The first comparison is not made again.
    assert len(log(killed, "old_bpb")) == len(log(watched / "run", "old_bpb"))


def test_every_document_has_its_beginning_among_the_windows_before_any_has_more(watched, tmp_path):
    """
    In windows of 96 tokens, which are bytes, the first text has 20 windows, the second one, the third 12. Five windows
    come from every second of the six documents.
    """
    text = forgetting.Old(str(watched / "old.jsonl"), TOK, 96, 5, tmp_path)
    assert text.owner == (0, 1, 2, 0, 2)
    scored = [len(ids) - first for ids, first in text.windows]
    assert text.sizes.tolist() == [scored[0] + scored[3], len(TEXTS[1].encode()), scored[2] + scored[4]]
