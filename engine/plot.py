"""
Plots of runs, from their log.jsonl: loss, bits per byte, gradient norm, learning rate and speed.

    line      every step; of a long run the means of 100 groups of neighbouring steps
    band      least and largest of each group, so that a spike of one step among thousands stays visible
    number    the last value of a validation, to the right of its panel

train.py, SFT and QRPO draw loss.png of their own run at the end. A panel without data is left out. Runs can be plotted
together if they have the same data or, in bits per byte only, the same validation text.

$ python -m engine.plot out/a out/b --out=compare.png
"""

import sys

if __name__ == "__main__" and not __package__:
    print("plot.py: start it from the project's root, python -m engine.plot", file=sys.stderr)
    sys.exit(2)

import os
from array import array

import numpy as np

from engine.files import read_json
from engine.runs import entry_of

paths = []             # run folders
out = "out/plot.png"   # the plot

# (key of the log, title); "minutes" is val_bpb over minutes instead of tokens
PANELS = (
    ("loss", "training loss (nats/token)"),
    ("val_bpb", "validation (bits/byte)"),
    ("old_bpb", "old text (bits/byte)"),
    ("old_kl", "KL to the base on old text (nats/token)"),
    ("task", "task (share of right answers)"),
    ("grad_norm", "gradient norm"),
    ("lr", "learning rate"),
    ("tok_s", "tokens per second"),
    ("minutes", "validation (bits/byte) over minutes"),
)
MEASURED = "val_bpb", "old_bpb", "old_kl", "task", "minutes"
UNITS = dict(tokens=(1e6, "million tokens"), step=(1, "step"), minutes=(60, "minutes"))


# -----------------------------------------------------------------------------
# log.jsonl


def entries(folder):
    """
    Yield the entries of a run's log.jsonl in order, without torn lines. ValueError if there is no such file.

    All at once, the 2.6 million entries of the 8B would take gigabytes.
    """
    path = f"{folder}/log.jsonl"
    if not os.path.isfile(path):
        raise ValueError(f"{folder} has no log.jsonl: give a folder that train.py wrote")
    with open(path, encoding="utf-8", errors="replace") as f:
        yield from filter(None, map(entry_of, f))


def read_log(folder):
    return list(entries(folder))


# -----------------------------------------------------------------------------
# any plot


def pyplot():
    """matplotlib.pyplot without a display, in our style. Imported here, since most users of this file draw nothing."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({
        "figure.titlesize": 11,
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.h_pad": 0.1,
        "axes.titlesize": 10,
        "axes.labelsize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.fontsize": 8,
        "legend.frameon": False})
    return plt


def finish(figure, picture):
    """Write a figure to a file, whose folder is made if need be, and free it."""
    os.makedirs(os.path.dirname(picture) or ".", exist_ok=True)
    figure.savefig(picture, dpi=110)
    pyplot().close(figure)


# -----------------------------------------------------------------------------
# runs


def points(folder, keys, x_axis):
    """
    {key: (x, y)} of a run's log, arrays of float64, empty for a key that the log does not have. Reads the log once.

    x: entry[x_axis], or seconds for "minutes". ValueError if the log has no whole line.
    """
    found = {key: (array("d"), array("d")) for key in keys}
    entry = None
    for entry in entries(folder):
        entry["minutes"] = entry.get("val_bpb")
        for key, (x, y) in found.items():
            at = entry.get("seconds" if key == "minutes" else x_axis)
            # A step whose loss is not finite has null.
            if at is not None and entry.get(key) is not None:
                x.append(at)
                y.append(entry[key])
    if entry is None:
        raise ValueError(f"{folder}/log.jsonl has no whole line yet: wait for the run's first step")
    return found


def draw_run(axis, x, y, colour, **line):
    """All points x, y (n,) of a run in one panel, in at most 100 groups of neighbours."""
    groups = min(len(y), 100)
    x = [part.mean() for part in np.array_split(x, groups)]
    parts = np.array_split(y, groups)
    low, high = ([extreme(part) for part in parts] for extreme in (np.min, np.max))
    axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.plot(x, [part.mean() for part in parts], color=colour, **line)


def print_values(axis, values):
    """Print values, (y, colour) each, to the right of a panel: each near its height, and a line apart."""
    low, high = axis.get_ylim()
    heights = []
    for y, _ in values:
        lowest = heights[-1] + 0.07 if heights else 0.0
        heights.append(max(lowest, (y - low) / (high - low)))
    above = max(0, heights[-1] - 1)
    for height, (y, colour) in zip(heights, values):
        axis.text(1.01, height - above, f"{y:.3f}", color=colour, fontsize=9, va="center", transform=axis.transAxes)


def curves(folders, picture, panels=PANELS, x_axis="tokens"):
    """Plot `panels`, (key of the log, title) each, of runs over "tokens" or "step", with a colour per run."""
    runs = [points(folder, [key for key, _ in panels], x_axis) for folder in folders]
    panels = [(key, title) for key, title in panels if any(found[key][0] for found in runs)]
    columns = (len(panels) + 1) // 2
    size = max(5 * columns, 7), 6
    figure, axes = pyplot().subplots(min(2, len(panels)), columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.remove()
    for axis, (key, title) in zip(axes.flat, panels):
        unit, label = UNITS["minutes" if key == "minutes" else x_axis]
        axis.set(title=title, xlabel=label)
        axis.grid(alpha=0.2)
        marker = "." if key in MEASURED else ""
        last = []
        for n, (folder, found) in enumerate(zip(folders, runs)):
            name = os.path.basename(os.path.normpath(folder))
            x, y = found[key]
            if y:
                draw_run(axis, np.array(x) / unit, y, f"C{n}", marker=marker, label=name)
                last.append((y[-1], f"C{n}"))
        if marker:
            print_values(axis, sorted(last))
    axes[0, 0].legend()
    finish(figure, picture)


def comparable(folders):
    """
    The panels in which runs can be compared: all if they have the same data, bits per byte if only the tokenizer
    differs. ValueError if the validation texts differ or cannot be seen, since then no number has a common unit.
    """
    paths = {folder: f"{folder}/config.json" for folder in folders}
    configs = {folder: read_json(path) for folder, path in paths.items() if os.path.isfile(path)}
    if len({config.get("data_hash") for config in configs.values()}) <= 1:
        return PANELS
    texts = set()
    for folder, config in configs.items():
        path = f"{config.get('data')}/meta.json"
        if not os.path.isfile(path):
            raise ValueError(f"the runs have different data, and {path} of {folder} is not here to see whether the "
                             "text is the same: compare runs of one data folder")
        splits = [source["val"] for source in read_json(path)["sources"].values()]
        texts.add(str(sorted((split["documents"], split["bytes"]) for split in splits)))
    if len(texts) > 1:
        raise ValueError(f"{', '.join(configs)} are validated on different text: compare runs of one data folder")
    print("other tokenizers on the same text: bits per byte only")
    return PANELS[1:2]


def main():
    if not paths:
        raise ValueError("name one or more run folders: python -m engine.plot out/laptop")
    curves(paths, out, comparable(paths))
    print(f"wrote {out}")


if __name__ == "__main__":
    # Only this command needs the root, for its flags.
    from configurator import run
    run(main, globals())
