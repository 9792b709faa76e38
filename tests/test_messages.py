"""
Printed lines and figures of reports, each against a plain count of the things it names, if several settings affect it.
The lines of whole runs are compared in test_pairs*.py and test_histories.py.
"""

import itertools
from unittest.mock import patch

import pytest
from corpora import write_lines

import tokenizer
from engine import plot
from model import ApertusConfig
from tools import plan
from vocabulary import IN_TEXT


@pytest.mark.parametrize("n", [3, 99, 100, 101, 250])
def test_the_legend_names_the_last_value_of_a_log_of_any_length(tmp_path, n):
    losses = [3 - 2 * (i / n) ** 2 for i in range(n)]
    (tmp_path / "a").mkdir()
    write_lines(tmp_path / "a" / "log.jsonl", [dict(step=i, tokens=i, loss=loss) for i, loss in enumerate(losses)])
    write_lines(tmp_path / "a" / "config.json", [{}])
    figures = []
    with patch.object(plot, "finish", lambda figure, path: figures.append(figure)):
        plot.curves([str(tmp_path / "a")], "a.png", dict(loss="loss"))
    [axis] = figures[0].axes
    assert [line.get_label() for line in axis.lines] == [f"a {losses[-1]:.5g}"]
    plot.pyplot().close(figures[0])


START = ApertusConfig(512, 4096, 2, 4, 2, 64, 96)
OWN = "--block_size=256 --n_layer=2 --n_head=4 --n_kv_head=2 --n_embd=64 --ffn_dim=96 --vocab_size=4096"


@pytest.mark.parametrize(
    "start, window, minutes, gpus, adapters", itertools.product([False, True], [0, 128], [0, 3], [1, 2], [False, True])
)
def test_a_plan_counts_its_steps_and_days_in_windows_of_the_run(start, window, minutes, gpus, adapters):
    """Each pair of: a start model, a window of its own, --minutes, two GPUs, adapters."""
    if adapters and not start:
        return
    flags = f"--gpus={gpus} --gpu=h100 --batch_size=8 --total_samples=8000000 --minutes={minutes} --parallel=ddp"
    flags += f" --block_size={window}" * bool(window) + " --lora_r=4 --base=int8" * adapters
    with patch.object(plan.folders, "shape_of", lambda name: ApertusConfig(**vars(START))):
        run, config = plan.read_command(f"--init_from=out/a {flags}" if start else f"{OWN} {flags}")
    lines = list(plan.describe_plan(run, config))
    T = window or (512 if start else 256)
    assert lines[0].endswith(f"; 8 x {T} tokens per step")
    plans = {mode: plan.plan_run(run, plan.build_model(run, config), mode) for mode in plan.MODES}
    for found in plans.values():
        assert found["days"] == pytest.approx(8e6 * T / found["tokens_per_s"] / 86400)
        n_micro = 8 * T / gpus / found["tokens"]
        least = n_micro * (found["compute_s"] + found["copies_s"]) + found["step_s"]
        assert found["tokens_per_s"] <= 8 * T / least * (1 + 1e-9)
    if minutes:
        tokens = 180 * max(found["tokens_per_s"] for found in plans.values())
        assert f"-> in 3 minutes: {int(tokens // (8 * T)):,} steps, " in lines[-1]


@pytest.mark.parametrize("name", ["byte", "apertus:4096"])
def test_a_reward_reads_the_words_of_an_answer_with_all_that_is_text(name):
    """Also control tokens that ordinary text may have, such as those in the place of personal data."""
    tok = tokenizer.load(name)
    text = "é ".join(IN_TEXT) + "42}"
    control = [tok.id_of(name) for name in ("<|inner_prefix|>", "<|inner_suffix|>", "<|assistant_end|>", "</s>")]
    assert tok.words([*control[:2], *tok.encode(text), *control[2:]]) == text
