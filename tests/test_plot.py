"""engine/plot.py: curves are those of the log."""
import json

import numpy as np
import pytest

from conftest import refused, script
from engine import plot


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would have been written, by file name."""
    figures = {}
    monkeypatch.setattr(plot, "finish", lambda figure, picture: figures.update({picture: figure}))
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
