"""engine/plot.py: plotted curves have the numbers of the log."""

import numpy as np
import pytest
from conftest import refused, script
from corpora import write_lines

from engine import plot
from studies import kit

STEPS = [dict(step=i, tokens=10**6 * i, loss=3 - i / 10, grad_norm=None if i == 4 else 1.0) for i in range(10)]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would have been written."""
    figures = []
    monkeypatch.setattr(plot, "finish", lambda figure, path: figures.append(figure))
    yield figures
    plot.pyplot().close("all")


def run(folder, entries=STEPS, data_hash="same", size=100, bpb=1.5, tokens=9 * 10**6):
    """A run folder with these log entries and a validation. size: bytes of its data's validation text."""
    entries = [*entries, dict(step=9, tokens=tokens, val_bpb=bpb, seconds=120.0)]
    folder.mkdir()
    write_lines(folder / "log.jsonl", entries)
    write_lines(folder / "config.json", [dict(data_hash=data_hash, data=str(folder))])
    write_lines(folder / "meta.json", [dict(sources=dict(x=dict(val=dict(documents=2, bytes=size))))])
    return str(folder)


def test_each_panel_has_the_numbers_of_the_logs_and_names_the_last_beside_the_colour_of_its_run(tmp_path, drawn):
    """A gradient norm that was not finite is null in the log; panels without numbers are left out."""
    plot.curves([run(tmp_path / str(n), bpb=bpb) for n, bpb in enumerate([1.5, None, 1.1])], "a.png")
    loss, bpb, norm, minutes = drawn[0].axes
    shown = [axis.lines[0].get_xydata().tolist() for axis in (bpb, norm, minutes)]
    assert shown == [[[9, 1.5]], [[i, 1.0] for i in range(10) if i != 4], [[2, 1.5]]]
    assert loss.lines[2].get_xydata() == pytest.approx(np.array([[i, 3 - i / 10] for i in range(10)]))
    assert [axis.get_xlabel() for axis in drawn[0].axes] == 3 * ["million tokens"] + ["minutes"]
    assert {line.get_label(): line.get_color() for line in bpb.lines} == {"0 1.5": "C0", "2 1.1": "C2"}


def test_a_run_of_less_than_a_million_tokens_is_drawn_over_thousands(tmp_path, drawn):
    plot.curves([run(tmp_path / "a", [], tokens=9_000)], "a.png", dict(val_bpb="bpb"))
    (axis,) = drawn[0].axes
    assert (axis.get_xlabel(), axis.lines[0].get_xdata()) == ("thousand tokens", [9])


def test_the_curves_of_a_study_have_a_band_from_the_lowest_to_the_highest_seed(drawn):
    kit.plot_curves("a.png", [10, 20], dict(one=[1, 2], three=[[1, 2], [2, 4], [6, 3]]), "x", "y")
    (axis,) = drawn[0].axes
    assert [line.get_ydata().tolist() for line in axis.lines] == [[1, 2], [3, 3]]
    (band,) = axis.collections
    assert {*map(tuple, band.get_paths()[0].vertices)} == {(10, 1), (10, 6), (20, 2), (20, 4)}


def test_a_long_log_is_drawn_in_100_groups_whose_band_shows_a_spike_of_one_step(tmp_path, drawn):
    losses = [9.0 if i == 34_567 else 2 + i / 60_000 for i in range(60_000)]
    log = [dict(step=i, loss=loss) for i, loss in enumerate(losses)]
    folder = run(tmp_path / "a", log)
    # In a chat run's log `tokens` counts those of one step, so the x axis is steps.
    write_lines(tmp_path / "a" / "config.json", [dict(chat=True)])
    plot.curves([folder], "a.png", dict(loss="loss"))
    (axis,) = drawn[0].axes
    x, y = axis.lines[0].get_data()
    assert len(x) == 100
    assert (x.mean(), y.mean()) == pytest.approx((29_999.5, np.mean(losses)))
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max(), axis.get_xlabel()) == (2.0, 9.0, "step")


def test_a_preference_run_shows_its_loss_reward_and_divergence(tmp_path, drawn):
    folder = run(tmp_path / "a", [dict(step=0, loss=0.1, reward_policy=1.0, kl=0.2)])
    write_lines(tmp_path / "a" / "config.json", [dict(chat=True, loss="qrpo")])
    plot.curves([folder], "a.png")
    titles = "qrpo loss (squared error)", "mean reward (estimated)", "KL to the start model (nats)"
    assert {axis.get_title() for axis in drawn[0].axes} >= {*titles}


def test_runs_of_one_data_folder_share_all_panels_other_tokenizers_bits_per_byte_and_other_texts_none(tmp_path):
    a, b, c = (run(tmp_path / name, data_hash=name, size=size) for name, size in dict(a=100, b=100, c=101).items())
    assert plot.shared_panels([a, a]) == plot.PANELS
    assert list(plot.shared_panels([a, b])) == ["val_bpb"]
    picture = tmp_path / "new" / "c.png"
    script("engine.plot", a, f"--out={picture}", pictures=True)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    refused(script("engine.plot", a, c), "validated on different text")
