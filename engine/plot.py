"""
Pictures of runs, from their log.jsonl.

$ python -m engine.plot out/a out/b --out=compare.png          # loss, bits per byte, gradient norm, learning rate, speed of any runs
"""

import sys

if __name__ == "__main__" and not __package__:
    print("plot.py: start it from the project's root, python -m engine.plot", file=sys.stderr)
    sys.exit(2)

import json
import os
from array import array

paths = []             # run folders
out = "out/plot.png"   # the picture of runs

PANELS = (("loss", "training loss (nats/token)"), ("val_bpb", "validation (bits/byte)"),
          ("grad_norm", "gradient norm"), ("lr", "learning rate"))
SPEED = (("tok_s", "tokens a second"), ("minutes", "validation (bits/byte) over minutes"))


def has_log(folder):
    path = os.path.join(folder, "log.jsonl")
    return os.path.isfile(path) and os.path.getsize(path) > 0


def entry_of(line):
    """A line of log.jsonl as a dict; None for one that a kill, a full disk or a power cut has torn."""
    try:
        entry = json.loads(line) if line.endswith("\n") else None
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


def entries(folder):
    """The entries of a run's log.jsonl, in order and one at a time: 2.6 million steps, as the 8B has, would be gigabytes of dicts."""
    path = os.path.join(folder, "log.jsonl")
    if not os.path.isfile(path):
        raise ValueError(f"{folder} has no log.jsonl: give a folder that train.py wrote")
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            entry = entry_of(line)
            if entry:
                yield entry


def read_log(folder):
    """All entries of a run's log.jsonl, in order; torn lines are left out."""
    return list(entries(folder))


def pyplot():
    """matplotlib.pyplot without a display, imported only where something is drawn."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def finish(figure, picture):
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)
    pyplot().close(figure)


# -----------------------------------------------------------------------------
# runs


def points(folder, keys):
    """{key: (x, y)} of a run's log, as arrays, read once; keys that it never has: None. x is in million tokens, for "minutes" in minutes."""
    found = {key: (array("d"), array("d")) for key in keys}
    empty = True
    for entry in entries(folder):
        empty = False
        for key, (x, y) in found.items():
            over, unit = ("seconds", 60) if key == "minutes" else ("tokens", 1e6)
            value = entry.get("val_bpb" if key == "minutes" else key)
            if value is not None and over in entry:
                x.append(entry[over] / unit)
                y.append(value)
    if empty:
        raise ValueError(f"{folder}/log.jsonl has no whole line yet: wait for the run's first step")
    return {key: (x, y) if x else None for key, (x, y) in found.items()}


def thinned(x, y, at_most=2_000):
    """Neighbours in at most so many groups, as a picture has no more columns: mean x, and least, mean and largest y of each (n,)."""
    import numpy as np
    x, y = np.asarray(x), np.asarray(y)
    begins = np.unique(np.linspace(0, len(y), min(len(y), at_most), endpoint=False).astype(int))
    sizes = np.diff(begins, append=len(y))
    least, largest = np.minimum.reduceat(y, begins), np.maximum.reduceat(y, begins)
    return np.add.reduceat(x, begins) / sizes, least, np.add.reduceat(y, begins) / sizes, largest


def running_mean(y, width):
    """The mean of each value and the `width` before it, fewer at the begin."""
    import numpy as np
    total = np.cumsum(np.concatenate(([0.0], y)))
    end = np.arange(1, len(y) + 1)
    begin = np.maximum(0, end - 1 - width)
    return (total[end] - total[begin]) / (end - begin)


def curves(folders, picture, panels=PANELS):
    """Draw the `panels` of runs (key of the log, title) over tokens; one colour a run."""
    plt = pyplot()
    columns = (len(panels) + 1) // 2 if len(panels) > 1 else 1
    inches = max(5 * columns, 7)
    margins = dict(left=0.75 / inches, right=1 - 0.15 / inches, bottom=0.08, top=0.95, wspace=0.2, hspace=0.36)      # "constrained" takes as long again
    figure, axes = plt.subplots(-(-len(panels) // columns), columns, figsize=(inches, 6), gridspec_kw=margins, squeeze=False)
    for n, folder in enumerate(folders):
        drawn = points(folder, [key for key, _ in panels])
        for axis, (key, title) in zip(axes.flat, panels):
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("minutes" if key == "minutes" else "million tokens", fontsize=9)
            if not drawn[key]:
                continue
            x, low, y, high = thinned(*drawn[key])
            if key in ("loss", "tok_s"):                        # every step thin, a running mean of 2 % bold
                axis.fill_between(x, low, high, color=f"C{n}", alpha=0.15, linewidth=0)
                axis.plot(x, y, color=f"C{n}", alpha=0.25, linewidth=0.7)
                y = running_mean(y, max(1, len(y) // 50))
            name = os.path.basename(os.path.normpath(folder))
            axis.plot(x, y, color=f"C{n}", linewidth=1.6, marker="." if key in ("val_bpb", "minutes") else None, label=name)
            if key == "val_bpb":
                at = dict(textcoords="offset points", xytext=(0, 6), ha="right", fontsize=9, color=f"C{n}")
                last = drawn[key][1][-1]
                axis.annotate(f"{last:.3f}", (x[-1], last), **at)
    for axis in axes.flat:
        axis.grid(alpha=0.2)
    if axes[0, 0].get_legend_handles_labels()[0]:
        axes[0, 0].legend(fontsize=8, frameon=False)
    finish(figure, picture)


def comparable(folders):
    """
    Which panels may be drawn for these runs together: all, if they have the same data; bits per byte and what has no unit of text, if the
    same validation text was cut by other tokenizers. ValueError if the texts differ: no number of theirs can be compared.
    """
    from tokenizer import read_json
    configs = []
    for folder in folders:
        path = os.path.join(folder, "config.json")
        if os.path.isfile(path):
            configs.append((folder, read_json(path)))
    if len({c.get("data_hash") for _, c in configs}) <= 1:
        return PANELS + SPEED
    texts = {}
    for folder, c in configs:
        meta = os.path.join(c.get("data", ""), "meta.json")
        if not os.path.isfile(meta):
            raise ValueError(f"the runs have different data, and that of {folder} ({c.get('data')}) is not here to see whether "
                             "its text is the same: compare runs of one data folder")
        with open(meta, encoding="utf-8") as f:
            texts[folder] = sorted((s["val"]["documents"], s["val"]["bytes"]) for s in json.load(f)["sources"].values())
    if len({str(t) for t in texts.values()}) > 1:
        sizes = ", ".join(f"{folder}: {sum(b for _, b in t):,} bytes" for folder, t in texts.items())
        raise ValueError(f"the runs are validated on different text ({sizes}): nothing of theirs can be compared")
    print("other tokenizers on the same text: bits per byte only")
    return PANELS[1:2]


def main():
    if not paths:
        raise ValueError("name one or more run folders: python -m engine.plot out/laptop")
    panels = comparable(paths)
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    curves(paths, out, panels)
    print(f"wrote {out}")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
