"""engine/plot.py and studies/explain.py: curves are those of the log, of the specification and of the optimizer."""
import json

import numpy as np
import pytest
import torch

from ademamix import AdEMAMix
from conftest import refused, script
from engine import plot
from studies import explain


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would have been written, by file name."""
    figures = {}
    for file in (plot, explain):
        monkeypatch.setattr(file, "finish", lambda figure, picture: figures.update({picture: figure}))
    yield figures
    for figure in figures.values():
        plot.pyplot().close(figure)


@pytest.fixture
def run(tmp_path):
    """run("a"): the folder of a run of ten steps and a validation. size: bytes of its validation text; None: lost."""
    def write(name, data_hash="same", size=None, bpb=1.5):
        folder, data = tmp_path / name, tmp_path / f"data-{name}"
        folder.mkdir()
        steps = [dict(step=i, tokens=10**6 * i, loss=3 - i / 10, grad_norm=None if i == 4 else 1.0) for i in range(10)]
        steps.append(dict(step=9, tokens=9 * 10**6, val_bpb=bpb, seconds=120.0))
        (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in steps))
        (folder / "config.json").write_text(json.dumps(dict(data_hash=data_hash, data=str(data))))
        if size:
            data.mkdir()
            source = dict(val=dict(documents=2, bytes=size))
            (data / "meta.json").write_text(json.dumps(dict(sources=dict(x=source))))
        return str(folder)
    return write


TORN = ['{"step": 3, "lo{"step": 4}\n', "\0\0\n", "null\n", "17\n", "{}\n", "[" * 100_000 + "\n", '{"step": "3"}\n']


@pytest.mark.parametrize("torn", TORN)
def test_torn_lines_of_a_log_are_left_out(run, torn):
    folder = run("a")
    with open(f"{folder}/log.jsonl", "a", encoding="utf-8") as f:
        f.write(torn + '{"step": 10, "loss": 1.5}\n{"step": 11}')
    assert [entry["step"] for entry in plot.read_log(folder)] == [*range(10), 9, 10]


def test_each_panel_has_the_numbers_of_the_log(run, drawn):
    """A gradient norm that was not finite is null in the log; panels without numbers are left out."""
    plot.curves([run("a")], "a.png")
    panels = {axis.get_title(): axis for axis in drawn["a.png"].axes}
    loss, bpb, norm, minutes = (axis.lines[0].get_xydata().tolist() for axis in panels.values())
    assert list(panels)[2] == "gradient norm" and norm == [[i, 1.0] for i in range(10) if i != 4]
    assert sum(loss, []) == pytest.approx(sum(([i, 3 - i / 10] for i in range(10)), []))
    assert bpb == [[9, 1.5]] and minutes == [[2, 1.5]]
    assert {axis.get_xlabel() for axis in panels.values()} == {"million tokens", "minutes"}


def test_a_long_log_is_drawn_in_100_groups_whose_band_shows_a_spike_of_one_step(run, drawn):
    folder = run("a")
    losses = [9.0 if i == 34_567 else 2 + i / 60_000 for i in range(60_000)]
    with open(f"{folder}/log.jsonl", "w", encoding="utf-8") as f:
        f.writelines(json.dumps(dict(step=i, loss=loss)) + "\n" for i, loss in enumerate(losses))
    plot.curves([folder], "a.png", dict(loss="loss"), "step")
    axis, = drawn["a.png"].axes
    x, y = axis.lines[0].get_data()
    assert len(x) == 100 and x.mean() == pytest.approx(29_999.5) and y.mean() == pytest.approx(np.mean(losses))
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max(), axis.get_xlabel()) == (2.0, 9.0, "step")


def test_the_legend_of_the_first_panel_and_of_validations_has_the_last_values(run, drawn):
    """Each beside the colour of its run, also where a run has no such panel."""
    plot.curves([run(str(n), bpb=value) for n, value in enumerate([1.5, None, 1.1])], "a.png")
    panels = {axis.get_title(): axis.get_legend() for axis in drawn["a.png"].axes}
    assert [legend is None for legend in panels.values()] == [False, False, True, False]
    legend = list(panels.values())[1]
    assert [text.get_text() for text in legend.get_texts()] == ["0 1.500", "2 1.100"]
    assert [line.get_color() for line in legend.get_lines()] == ["C0", "C2"]
    assert [text.get_text() for text in list(panels.values())[0].get_texts()] == ["0 2.100", "1 2.100", "2 2.100"]


def test_runs_of_one_data_folder_are_compared_in_all_panels_and_other_tokenizers_in_bits_per_byte(run, tmp_path):
    assert plot.comparable([run("a"), run("b")]) == plot.PANELS
    assert list(plot.comparable([run("c", "x", 100), run("d", "y", 100)])) == ["val_bpb"]
    picture = tmp_path / "new" / "c.png"
    done = script("engine.plot", tmp_path / "a", tmp_path / "b", f"--out={picture}", pictures=True)
    assert done.returncode == 0 and picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_runs_that_cannot_be_plotted_are_an_error_of_one_line(run, tmp_path):
    (tmp_path / "empty").mkdir()
    ours, other, lost = run("a", "x", 100), run("b", "y", 101), run("c", "z")
    refused(script("engine.plot", ours, other), "validated on different text")
    refused(script("engine.plot", ours, lost), f"No such file or directory: '{tmp_path}/data-c/meta.json'")
    refused(script("engine.plot"), "name one or more run folders")
    refused(script("engine.plot", tmp_path / "empty"), f"No such file or directory: '{tmp_path}/empty/config.json'")
    (tmp_path / "c" / "log.jsonl").write_text('{"step')
    refused(script("engine.plot", lost, pictures=True), "has no numbers yet")
    (tmp_path / "a" / "config.json").write_text('{"data_ha')
    refused(script("engine.plot", ours), "config.json is damaged")


# -----------------------------------------------------------------------------
# the explanatory plots


def at(line, x):
    return float(np.interp(x, *line.get_data()))


def test_the_xielu_drawn_has_the_published_values(drawn):
    """The specification: f(-3), f(-1), f(1); the derivative is beta = 0.5 at 0, and 2 * 0.8 x + 0.5 right of it."""
    explain.explain_activations("x.png")
    value, slope = drawn["x.png"].axes[:2]
    xielu, _, gelu, relu2, _ = value.lines
    assert [at(xielu, x) for x in (-3, -1, 1)] == pytest.approx([0.139830, -0.205696, 1.3], abs=1e-5)
    assert [at(slope.lines[0], x) for x in (0, 1)] == pytest.approx([0.5, 2.1], abs=1e-5)
    assert [at(relu2, 2), at(gelu, 1)] == pytest.approx([4, 0.841345], abs=1e-5)


def test_the_slow_weights_drawn_are_ademamixs_response_to_one_gradient():
    t, at_step, warm = 30, 12, 20
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = AdEMAMix([p], betas=(0.9, 0.999, 0.99), alpha=8.0, beta3_warmup=warm, alpha_warmup=warm, compile=False,
                   state_dtype=torch.float32)
    for step in range(1, t + 1):
        p.grad = torch.full_like(p, float(step == at_step))
        opt.step()
    left = opt.state[p]["exp_avg_slow"].item() * 8.0  # Alpha is fully warm by then.
    assert explain.slow_weight(t, 0.9, 0.99, 8.0, warm)[t - at_step] == pytest.approx(left, rel=1e-5)
    assert explain.slow_weight(400_000).sum() == pytest.approx(8.0, rel=1e-4)


def test_the_schedule_drawn_is_the_8bs(drawn):
    explain.explain_schedule("s.png")
    lr, batch = drawn["s.png"].axes
    assert [at(lr.lines[0], x) for x in (10, 15)] == pytest.approx([1.1e-4, 1.1e-5], rel=1e-2)
    assert {round(y, 2) for y in batch.lines[0].get_ydata()} == {4.19, 8.39}


def test_the_goldfish_drawn_has_the_same_holes_after_the_first_labels(drawn):
    """Holes are compared from the second line of text on, which is beyond the first h - 1 = 12 labels."""
    pytest.importorskip("mistral_common")
    explain.explain_goldfish("g.png")
    one, other = ({(t.get_position(), t.get_text()) for t in axis.texts if t.get_color() == "white"}
                  for axis in drawn["g.png"].axes)
    late = {hole for hole in one if hole[0][1] < 0}
    assert late == {hole for hole in other if hole[0][1] < 0} and len(late) >= 5 and one != other


def test_the_document_mask_drawn_counts_its_pairs(drawn):
    """n tokens have n (n + 1) / 2 pairs: 24 tokens across, documents of 9, 5 and 10 inside."""
    explain.explain_document_mask("d.png")
    titles = [axis.get_title() for axis in drawn["d.png"].axes]
    assert titles == ["across: causal only: 300 pairs", f"inside documents: {45 + 15 + 55} pairs"]
