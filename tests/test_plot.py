"""plot.py, explain.py: curves are those of the code and the specification; runs without a common unit are refused."""
import json
import os

import numpy as np
import pytest
import torch

from engine import plot
from studies import explain
from ademamix import AdEMAMix
from conftest import script


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would have been written, by file name."""
    figures = {}

    def keep(figure, picture):
        figures[picture] = figure

    for file in (plot, explain):
        monkeypatch.setattr(file, "finish", keep)
    yield figures
    for figure in figures.values():
        plot.pyplot().close(figure)


def write_log(folder, entries):
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def run(folder, data_hash="a", data="nowhere"):
    """A run folder of ten steps and one validation after them."""
    os.makedirs(folder)
    (folder / "config.json").write_text(json.dumps(dict(data_hash=data_hash, data=str(data))))
    rest = dict(grad_norm=1.0, lr=1e-3, tok_s=100)
    steps = [dict(rest, step=i, tokens=64 * (i + 1), loss=3 - i / 10) for i in range(10)]
    write_log(folder, [*steps, dict(step=9, tokens=640, val_bpb=1.5, val_loss=2.0, seconds=60.0)])
    return str(folder)


def run_on(folder, name, size):
    """A run with a vocabulary of its own, on data whose validation text has `size` bytes."""
    data = folder / f"data{name}"
    data.mkdir()
    (data / "meta.json").write_text(json.dumps(dict(sources=dict(x=dict(val=dict(documents=2, bytes=size))))))
    return run(folder / name, name, data)


def append(folder, text):
    with open(os.path.join(folder, "log.jsonl"), "a", encoding="utf-8", errors="surrogateescape") as f:
        f.write(text)


def test_a_torn_last_line_is_left_out(tmp_path):
    folder = run(tmp_path / "a")
    append(folder, '{"step": 10, "tok')
    assert len(plot.read_log(folder)) == 11


TORN = ['{"step": 3, "lo{"step": 4}\n', "\0\0\0\n", "null\n", "17\n", "{}\n", "[" * 100_000 + "\n", "\udcff{\n"]


@pytest.mark.parametrize("torn", TORN)
def test_a_line_torn_by_a_full_disk_or_a_power_cut_is_left_out_wherever_it_stands(tmp_path, torn):
    folder = run(tmp_path / "a")
    append(folder, torn + '{"step": 10, "tokens": 704, "loss": 1.5}\n')
    entries = plot.read_log(folder)
    assert len(entries) == 12 and entries[-1]["loss"] == 1.5


def test_a_config_cut_by_a_full_disk_is_told_in_one_line(tmp_path):
    folder = run(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text('{"data_ha')
    done = script("engine.plot", folder, f"--out={tmp_path / 'c.png'}")
    assert done.returncode == 2 and "config.json is damaged" in done.stderr and done.stderr.count("\n") == 1


def test_a_long_log_is_read_once_and_drawn_with_as_many_points_as_a_picture_has_columns(tmp_path, drawn, monkeypatch):
    """
    Work by counting: 60,000 steps are 60,000 lines parsed, and no more than 2,000 points per curve reach what comes
    after. The 8B has 2.6 million steps, and sums over 2 % of all steps, for each step, took 26 minutes there.
    """
    n = 60_000
    losses = [2.0 + i / n for i in range(n)]
    losses[34_567] = 9.0
    steps = (dict(step=i, tokens=i + 1, loss=loss, grad_norm=1.0, lr=0.1) for i, loss in enumerate(losses))
    write_log(tmp_path, steps)
    parsed = []
    loads = json.loads
    monkeypatch.setattr(plot.json, "loads", lambda text: parsed.append(1) or loads(text))
    plot.curves([tmp_path], "long.png")
    assert len(parsed) == n
    panel = drawn["long.png"].axes[0]
    thin, bold = panel.lines
    assert len(thin.get_xdata()) == len(bold.get_xdata()) == 2_000
    assert thin.get_ydata().mean() == pytest.approx(2.5 + 7 / n, rel=1e-4)
    # A spike of one step among the thirty of a column is seen.
    band = panel.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == 9.0 and band[:, 1].min() == 2.0


def test_a_short_log_is_drawn_step_by_step(tmp_path, drawn):
    plot.curves([run(tmp_path / "a")], "short.png")
    thin, bold = drawn["short.png"].axes[0].lines
    assert thin.get_xdata().tolist() == pytest.approx([64 * (i + 1) / 1e6 for i in range(10)])
    assert thin.get_ydata().tolist() == pytest.approx([3 - i / 10 for i in range(10)])


def test_the_running_mean_is_over_a_value_and_those_before_it():
    y = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    assert plot.running_mean(y, 2).tolist() == pytest.approx([3, 2, 8 / 3, 2, 10 / 3, 5])


def test_the_number_beside_the_curve_is_the_last_validation(tmp_path, drawn):
    write_log(tmp_path, (dict(step=i, tokens=i, val_bpb=2 - i / 10_000) for i in range(5_001)))
    plot.curves([tmp_path], "v.png")
    assert [t.get_text() for t in drawn["v.png"].axes[0].texts] == ["1.500"]


def test_runs_are_compared_in_six_panels_and_two_more_where_old_text_was_measured(tmp_path):
    folders = [run(tmp_path / n) for n in "ab"]
    keys = [key for key, _ in plot.comparable(folders)]
    assert keys == ["loss", "val_bpb", "old_bpb", "old_kl", "task", "grad_norm", "lr", "tok_s", "minutes"]
    picture = tmp_path / "new" / "c.png"
    assert script("engine.plot", *folders, f"--out={picture}").returncode == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_other_tokenizers_on_the_same_text_leave_only_bits_per_byte(tmp_path, drawn):
    folders = [run_on(tmp_path, name, 100) for name in "ab"]
    panels = plot.comparable(folders)
    assert [key for key, _ in panels] == ["val_bpb"]
    plot.curves(folders, "c.png", panels)
    (axis,) = drawn["c.png"].axes
    assert [line.get_ydata().tolist() for line in axis.lines] == [[1.5], [1.5]]


def test_other_validation_text_is_refused(tmp_path):
    folders = [run_on(tmp_path, "a", 100), run_on(tmp_path, "b", 101)]
    done = script("engine.plot", *folders, f"--out={tmp_path / 'c.png'}")
    assert done.returncode == 2 and "validated on different text" in done.stderr
    assert not (tmp_path / "c.png").exists()


def test_data_that_is_gone_is_told_since_its_text_cannot_be_compared(tmp_path):
    folders = [run_on(tmp_path, "a", 100), run(tmp_path / "c", "c", tmp_path / "gone")]
    assert "is not here to see" in script("engine.plot", *folders).stderr


@pytest.mark.parametrize("log, says", [
    (None, "has no log.jsonl"), ("", "no whole line yet"), ('{"step', "no whole line yet")])
def test_missing_and_half_written_logs_are_told(tmp_path, log, says):
    if log is not None:
        (tmp_path / "log.jsonl").write_text(log)
    done = script("engine.plot", tmp_path, f"--out={tmp_path / 'c.png'}")
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


# -----------------------------------------------------------------------------
# the explanatory pictures


def at(line, x):
    return float(np.interp(x, line.get_xdata(), line.get_ydata()))


def test_the_xielu_drawn_has_the_published_values(drawn):
    """The specification: f(-3), f(-1), f(1); the derivative is beta = 0.5 at 0, and 2 * 0.8 x + 0.5 right of it."""
    explain.explain_activations("x.png")
    value, slope = drawn["x.png"].axes[:2]
    assert value.get_title().startswith("value: ") and slope.get_title().startswith("derivative: ")
    xielu, _, gelu, relu2, _ = value.lines
    assert [at(xielu, x) for x in (-3, -1, 1)] == pytest.approx([0.139830, -0.205696, 1.3], abs=1e-5)
    assert [at(slope.lines[0], x) for x in (0, 1)] == pytest.approx([0.5, 2.1], abs=1e-5)
    assert [at(relu2, 2), at(gelu, 1)] == pytest.approx([4, 0.841345], abs=1e-5)


def test_the_slow_weights_drawn_are_adem_amixs_response_to_one_gradient():
    """The optimizer sees a gradient of 1 in one step only; the weight is what is left of it in m2 at the end."""
    t, at_step, warm = 30, 12, 20
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = AdEMAMix([p], betas=(0.9, 0.999, 0.99), alpha=8.0, beta3_warmup=warm, alpha_warmup=warm,
                   compile=False, state_dtype=torch.float32)
    for step in range(1, t + 1):
        p.grad = torch.full_like(p, float(step == at_step))
        opt.step()
    left = opt.state[p]["exp_avg_slow"].item() * 8.0  # Alpha is fully warm by then.
    assert explain.slow_weight(t, 0.9, 0.99, 8.0, warm)[t - at_step] == pytest.approx(left, rel=1e-5)


def test_the_slow_memory_weighs_eight_when_it_is_warm():
    assert explain.slow_weight(400_000).sum() == pytest.approx(8.0, rel=1e-4)
    assert explain.slow_weight(1000).sum() == pytest.approx(0.08, rel=1e-3)


def test_each_picture_of_the_readme_is_drawn_under_its_name(tmp_path, monkeypatch):
    names = dict(activations="xielu", goldfish="goldfish", schedule="wsd", ademamix="ademamix",
                 document_mask="document_mask")
    pictures = []
    for what in names:
        monkeypatch.setattr(explain, f"explain_{what}", lambda picture, what=what: pictures.append((what, picture)))
    monkeypatch.setattr(explain, "out", str(tmp_path))
    explain.main()
    assert dict(pictures) == {what: f"{tmp_path}/{name}.png" for what, name in names.items()}


def test_the_schedule_drawn_is_the_8bs(drawn):
    explain.explain_schedule("s.png")
    lr, batch = drawn["s.png"].axes
    assert at(lr.lines[0], 10) == pytest.approx(1.1e-4)
    assert at(lr.lines[0], 15) == pytest.approx(1.1e-5, rel=1e-2)
    assert {round(y, 2) for y in batch.lines[0].get_ydata()} == {4.19, 8.39}


def test_the_goldfish_drawn_has_the_same_holes_after_the_first_labels(drawn):
    """Holes are compared from the second line of text on, which is beyond the first h - 1 = 12 labels."""
    pytest.importorskip("mistral_common")
    explain.explain_goldfish("g.png")
    one, other = ([(t.get_position(), t.get_text()) for t in axis.texts if t.get_color() == "white"]
                  for axis in drawn["g.png"].axes)
    late_one, late_other = ([hole for hole in holes if hole[0][1] < 0] for holes in (one, other))
    assert late_one == late_other and len(late_one) >= 5 and one != other


def test_the_document_mask_drawn_counts_its_pairs(drawn):
    """n tokens have n (n + 1) / 2 pairs: 24 tokens across, documents of 9, 5 and 10 inside."""
    explain.explain_document_mask("d.png")
    titles = [axis.get_title() for axis in drawn["d.png"].axes]
    assert titles == ["across: causal only: 300 pairs", f"inside documents: {45 + 15 + 55} pairs"]


def test_all_five_are_written_by_one_command(tmp_path):
    pytest.importorskip("mistral_common")
    done = script("studies.explain", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["ademamix.png", "document_mask.png", "goldfish.png", "wsd.png", "xielu.png"]
