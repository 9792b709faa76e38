"""
Pictures of runs, from their log.jsonl: loss, bits per byte, gradient norm, learning rate and speed.

    bold line    mean over the 2 % of all steps before each
    thin line    every step; of a long run the mean of neighbouring steps, since a picture has no more columns
    band         least and largest of those neighbours, so that a spike of one step among thousands is still seen

train.py draws loss.png of its own run at the end, as SFT and QRPO do, over steps. What no log has gets no panel. Runs
are drawn together only where their numbers can be compared: on the same data, or, if only the tokenizers differ, in
bits per byte.

$ python -m engine.plot out/a out/b --out=compare.png
"""

import sys

if __name__ == "__main__" and not __package__:
    print("plot.py: start it from the project's root, python -m engine.plot", file=sys.stderr)
    sys.exit(2)

import json
import os
from array import array

import numpy as np

from engine.files import read_json

paths = []             # run folders
out = "out/plot.png"   # the picture of runs

# (key of the log, title); "minutes" stands for val_bpb over minutes instead of tokens
PANELS = (
    ("loss", "training loss (nats/token)"),
    ("val_bpb", "validation (bits/byte)"),
    ("old_bpb", "old text (bits/byte)"),
    ("old_kl", "KL to the base on old text (nats/token)"),
    ("task", "task (share of right answers)"),
    ("grad_norm", "gradient norm"),
    ("lr", "learning rate"),
)
SPEED = (
    ("tok_s", "tokens per second"),
    ("minutes", "validation (bits/byte) over minutes"),
)


# -----------------------------------------------------------------------------
# log.jsonl


def parsed(text):
    """The JSON object in a text (str or bytes); None if there is none, since a kill or a full disk has torn it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def entry_of(line):
    """A line of log.jsonl as a dict; None for one that a kill, a full disk or a power cut has torn."""
    entry = parsed(line) if line.endswith("\n") else None
    return entry if entry and type(entry.get("step")) is int else None


def has_log(folder):
    path = f"{folder}/log.jsonl"
    return os.path.isfile(path) and os.path.getsize(path) > 0


def entries(folder):
    """
    The entries of a run's log.jsonl in order, torn lines left out. ValueError if there is no such file.

    They come one at a time, because the 2.6 million of the 8B would be gigabytes of dicts.
    """
    path = f"{folder}/log.jsonl"
    if not os.path.isfile(path):
        raise ValueError(f"{folder} has no log.jsonl: give a folder that train.py wrote")
    with open(path, encoding="utf-8", errors="replace") as f:
        yield from filter(None, map(entry_of, f))


def read_log(folder):
    """All entries of a run's log.jsonl (a list of dicts), in order; torn lines are left out."""
    return list(entries(folder))


# -----------------------------------------------------------------------------
# any picture


def pyplot():
    """matplotlib.pyplot without a display and in our style. Imported here: most users of this file draw nothing."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rc("figure", titlesize=11)
    plt.rc("figure.constrained_layout", use=True, h_pad=0.1)
    plt.rc("axes", titlesize=10, labelsize=9)
    plt.rc("axes.spines", top=False, right=False)
    plt.rc("legend", fontsize=8, frameon=False)
    return plt


def finish(figure, picture):
    """Write a figure as a file, and free it. The folder is made if it is not there."""
    os.makedirs(os.path.dirname(picture) or ".", exist_ok=True)
    figure.savefig(picture, dpi=110)
    pyplot().close(figure)


# -----------------------------------------------------------------------------
# runs


def points(folder, keys, x_axis="tokens"):
    """
    {key: (x, y)} of a run's log, arrays of float64, empty for a key that the log never has. The log is read once.

    x_axis: tokens, in millions, or step; "minutes" has its own. ValueError if the log has no whole line.
    """
    found = {key: (array("d"), array("d")) for key in keys}
    entry = None
    for entry in entries(folder):
        for key, (x, y) in found.items():
            over, unit = x_axis, 1e6 if x_axis == "tokens" else 1
            if key == "minutes":
                key, over, unit = "val_bpb", "seconds", 60
            # A step whose loss was no number has null there.
            if over in entry and entry.get(key) is not None:
                x.append(entry[over] / unit)
                y.append(entry[key])
    if entry is None:
        raise ValueError(f"{folder}/log.jsonl has no whole line yet: wait for the run's first step")
    return found


def thinned(values):
    """values (n,) in at most 2,000 groups of neighbours: mean, least and largest of each, (3, groups)."""
    groups = np.array_split(values, min(len(values), 2_000))
    return np.array([(group.mean(), group.min(), group.max()) for group in groups]).T


def running_mean(y, width):
    """The mean of each value of y (n,) and the `width` before it, fewer at the beginning; (n,)."""
    window = np.ones(width + 1)
    counts = np.convolve(np.ones(len(y)), window)
    return (np.convolve(y, window) / counts)[:len(y)]


def draw_run(axis, key, x, y, colour, name):
    """All points x, y (n,) of a run in one panel."""
    last = y[-1]
    x, *_ = thinned(x)
    y, low, high = thinned(y)
    if key in ("loss", "tok_s"):
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.plot(x, y, colour, alpha=0.25, linewidth=0.7)
        width = max(1, len(y) // 50)
        y = running_mean(y, width)
    measured = key in ("val_bpb", "old_bpb", "old_kl", "task")
    marker = "." if measured or key == "minutes" else None
    axis.plot(x, y, colour, linewidth=1.6, marker=marker, label=name)
    if measured:
        axis.annotate(
            f"{last:.3f}",
            (x[-1], last),
            xytext=(0, 6),
            textcoords="offset points",
            horizontalalignment="right",
            fontsize=9,
            color=colour)


def curves(folders, picture, panels=PANELS, x_axis="tokens"):
    """Draw the `panels` of runs, pairs of a key of the log and a title, over tokens or steps; one colour per run."""
    runs = [points(folder, [key for key, _ in panels], x_axis) for folder in folders]
    panels = [(key, title) for key, title in panels if any(found[key][0] for found in runs)]
    columns = (len(panels) + 1) // 2
    figure, axes = pyplot().subplots(
        min(2, len(panels)),
        columns,
        figsize=(max(5 * columns, 7), 6),
        squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.remove()
    for axis, (key, title) in zip(axes.flat, panels):
        label = "million tokens" if x_axis == "tokens" else x_axis
        axis.set(title=title, xlabel="minutes" if key == "minutes" else label)
        axis.grid(alpha=0.2)
    for n, (folder, found) in enumerate(zip(folders, runs)):
        name = os.path.basename(os.path.normpath(folder))
        for axis, (key, _) in zip(axes.flat, panels):
            x, y = found[key]
            if y:
                draw_run(axis, key, x, y, f"C{n}", name)
    first = axes[0, 0]
    if first.lines:
        first.legend()
    finish(figure, picture)


def comparable(folders):
    """
    Which panels may be drawn for these runs together.

    Runs of the same data share all. If other tokenizers have cut the same validation text, only bits per byte has a
    common unit. ValueError if the texts differ, since no number can then be compared.
    """
    configs = {}
    for folder in folders:
        path = f"{folder}/config.json"
        if os.path.isfile(path):
            configs[folder] = read_json(path)
    hashes = {config.get("data_hash") for config in configs.values()}
    if len(hashes) <= 1:
        return PANELS + SPEED
    texts = {}
    for folder, config in configs.items():
        data = config.get("data")
        path = f"{data}/meta.json"
        if not os.path.isfile(path):
            raise ValueError(f"the runs have different data, and that of {folder} ({data}) is not here "
                             "to see whether its text is the same: compare runs of one data folder")
        splits = [source["val"] for source in read_json(path)["sources"].values()]
        texts[folder] = sorted((split["documents"], split["bytes"]) for split in splits)
    if len({str(text) for text in texts.values()}) > 1:
        sizes = [f"{folder}: {sum(size for _, size in text):,} bytes" for folder, text in texts.items()]
        raise ValueError(f"the runs are validated on different text ({', '.join(sizes)}): "
                         "nothing of theirs can be compared")
    print("other tokenizers on the same text: bits per byte only")
    return PANELS[1:2]


def main():
    if not paths:
        raise ValueError("name one or more run folders: python -m engine.plot out/laptop")
    panels = comparable(paths)
    curves(paths, out, panels)
    print(f"wrote {out}")


if __name__ == "__main__":
    # A library here imports nothing of the root; only this command does, for its flags.
    from configurator import run
    run(main, globals())
