"""
Plots of runs, from their log.jsonl: loss, bits per byte, gradient norm, learning rate and speed.

    line      every step; of a long run the means of 100 groups of neighbouring steps
    band      least and largest of each group, so that a spike of one step among thousands stays visible
    number    the last value, in the legend of each panel

train.py, SFT and QRPO draw loss.png of their own run at the end. A panel without data is left out. Runs can be plotted
together if they have the same data or, in bits per byte only, the same validation text.

$ python -m engine.plot out/a out/b --out=compare.png
"""

import sys

if __name__ == "__main__" and not __package__:
    print("plot.py: start it from the project's root, python -m engine.plot", file=sys.stderr)
    sys.exit(2)

from collections import defaultdict
from pathlib import Path

import numpy as np

from engine.files import make_folder
from engine.log import read_entry
from engine.runs import settings_of

paths = []             # run folders
out = "out/plot.png"   # the plot

# {key of the log: title}; "minutes" is val_bpb over minutes instead of tokens
PANELS = dict(
    loss="training loss (nats/token)",
    val_bpb="validation (bits/byte)",
    grad_norm="gradient norm",
    lr="learning rate",
    tok_s="tokens per second",
    minutes="validation (bits/byte) over minutes")
# What posttrain/qrpo.py logs besides, and the unit of each of its losses.
ALIGNMENT = dict(
    reward_policy="mean reward (estimated)",
    kl="KL to the start model (nats)")
LOSS_UNITS = dict(qrpo="squared error", rebel="squared error", dpo="-log sigmoid", simpo="-log sigmoid")
# {key of the log: (label of the x-axis, units of the log per unit of the axis)}; tokens: unit_of_tokens()
UNITS = dict(step=("step", 1), seconds=("minutes", 60))


def entries(folder):
    """Yield the entries of a run's log.jsonl in order, without torn lines. OSError if there is no such file."""
    with open(f"{folder}/log.jsonl", encoding="utf-8", errors="replace") as f:
        yield from filter(None, map(read_entry, f))


def unit_of_tokens(most):
    """(label of an x-axis that ends at `most` tokens, tokens per unit of the axis)."""
    return ("million tokens", 1e6) if most >= 1e6 else ("thousand tokens", 1e3)


def read_points(folder, panels, x_axis):
    """{key of a panel: x and y, (2, n)} of a run, without empty panels. ValueError if all are empty."""
    points = defaultdict(list)
    for entry in entries(folder):
        entry["minutes"] = entry.get("val_bpb")
        for key in panels:
            point = entry.get("seconds" if key == "minutes" else x_axis), entry.get(key)
            # A loss that is not finite is null in the log.
            if {*map(type, point)} <= {int, float}:
                points[key].append(point)
    if not points:
        raise ValueError(f"{folder}/log.jsonl has no numbers yet: wait for the run's first step")
    return {key: np.transpose(pairs) for key, pairs in points.items()}


def pyplot():
    """matplotlib.pyplot without a display, in our style. Imported here, since most users of this file draw nothing."""
    import matplotlib.pyplot as plt
    plt.switch_backend("Agg")
    plt.rcParams.update({
        "font.size": 9,
        "figure.constrained_layout.use": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False})
    return plt


def finish(figure, path):
    """Write a figure to a file, whose folder is made if need be, and free it. Replaces an older file."""
    make_folder(Path(path).parent)
    # In a downloaded folder it may be a link, whose target must stay as it is.
    Path(path).unlink(missing_ok=True)
    figure.savefig(path, dpi=110)
    pyplot().close(figure)


def draw_curve(axis, points, unit, colour, name):
    """Draw x and y, (2, n), of one run: a line, a band, and the last value in the legend. unit: x of the log per x."""
    # At most 100 groups of neighbouring points.
    groups = np.array_split(points, min(points.shape[1], 100), axis=1)
    x, low, mean, high = np.transpose([(x.mean() / unit, y.min(), y.mean(), y.max()) for x, y in groups])
    axis.fill_between(x, low, high, color=colour, alpha=0.2)
    axis.plot(x, mean, color=colour, marker="." if len(x) < 100 else "", label=f"{name} {points[1, -1]:.5g}")


def panels_of(folders):
    """The panels of runs, {key of the log: title}."""
    losses = LOSS_UNITS.keys() & {settings_of(folder).get("loss") for folder in folders}
    if not losses:
        return PANELS
    titles = [f"{loss} loss ({LOSS_UNITS[loss]})" for loss in sorted(losses)]
    return PANELS | ALIGNMENT | dict(loss=", ".join(titles))


def curves(folders, path, panels=None):
    """
    Plot `panels`, {key of the log: title}, of runs over tokens, or steps if one is of posttrain/. A colour a run.
    panels: None = those of panels_of().
    """
    panels = panels or panels_of(folders)
    x_axis = "step" if any("chat" in settings_of(folder) for folder in folders) else "tokens"
    runs = [read_points(folder, panels, x_axis) for folder in folders]
    shown = [key for key in panels if any(key in points for points in runs)]
    columns = (len(shown) + 1) // 2
    most = max((points[key][0, -1] for points in runs for key in points if key != "minutes"), default=0)
    units = UNITS | dict(tokens=unit_of_tokens(most))
    figure = pyplot().figure(figsize=(5 * columns + 2, 6))
    for place, key in enumerate(shown, 1):
        label, unit = units["seconds" if key == "minutes" else x_axis]
        axis = figure.add_subplot(min(2, len(shown)), columns, place, title=panels[key], xlabel=label)
        axis.grid(alpha=0.2)
        for n, points in enumerate(runs):
            if key in points:
                draw_curve(axis, points[key], unit, f"C{n}", Path(folders[n]).name)
        axis.legend()
    finish(figure, path)


def shared_panels(folders):
    """
    The panels in which runs can be compared: all if they have the same data, bits per byte if only the tokenizer
    differs. ValueError if the validation texts differ, since then no number has a common unit, or if a run's data
    folder is gone, since then nothing says whether they do.
    """
    configs = [settings_of(folder) for folder in folders]
    if len({config.get("data_hash") for config in configs}) == 1:
        return panels_of(folders)
    from data import read_meta  # here, since the rest of this file needs nothing of the root
    metas = [read_meta(config["data"]) for config in configs]
    # Bytes of each validation text.
    sizes = {sum(source["val"]["bytes"] for source in meta["sources"].values()) for meta in metas}
    if len(sizes) > 1:
        raise ValueError(f"{', '.join(folders)} are validated on different text: compare runs of one data folder")
    print("other tokenizers on the same text: bits per byte only")
    return dict(val_bpb=PANELS["val_bpb"])


def main():
    if not paths:
        raise ValueError("name one or more run folders: python -m engine.plot out/laptop")
    if not out.endswith((".png", ".pdf", ".svg")):
        raise ValueError(f"--out={out}: want a .png, .pdf or .svg")
    curves(paths, out, shared_panels(paths))
    print(f"wrote {out}")


if __name__ == "__main__":
    # Only this command needs the root, for its flags.
    from configurator import run
    run(main, globals())
