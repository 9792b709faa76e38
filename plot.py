"""
Pictures of runs, from their log.jsonl.

$ python plot.py out/a out/b --out=compare.png          # loss, bits per byte, gradient norm, learning rate of any runs
"""

import json
import os

paths = []             # run folders
out = "out/plot.png"   # the picture


def has_log(folder):
    path = os.path.join(folder, "log.jsonl")
    return os.path.isfile(path) and os.path.getsize(path) > 0


def read_log(folder):
    """The entries of a run's log.jsonl, in order; a last line torn by a kill is left out."""
    path = os.path.join(folder, "log.jsonl")
    if not os.path.isfile(path):
        raise ValueError(f"{folder} has no log.jsonl: give a folder that train.py wrote")
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


def curves(folders, picture):
    """Draw training loss, validation bits per byte, gradient norm and learning rate over tokens; one colour a run."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [("loss", "training loss (nats/token)"), ("val_bpb", "validation (bits/byte)"), ("grad_norm", "gradient norm"), ("lr", "learning rate")]
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    for n, folder in enumerate(folders):
        entries = read_log(folder)
        for axis, (key, title) in zip(axes.flat, panels):
            points = [(e["tokens"] / 1e6, e[key]) for e in entries if e.get(key) is not None]
            if not points:
                continue
            x, y = zip(*points)
            if key == "loss":                                   # every step thin, a running mean of 2 % bold
                axis.plot(x, y, color=f"C{n}", alpha=0.25, linewidth=0.7)
                width = max(1, len(y) // 50)
                y = [sum(y[max(0, i - width):i + 1]) / (i - max(0, i - width) + 1) for i in range(len(y))]
            axis.plot(x, y, color=f"C{n}", linewidth=1.6, marker="." if key == "val_bpb" else None, label=os.path.basename(os.path.normpath(folder)))
            axis.set_title(title, fontsize=10)
            if key == "val_bpb":
                axis.annotate(f"{y[-1]:.3f}", (x[-1], y[-1]), textcoords="offset points", xytext=(0, 6), ha="right", fontsize=9)
    for axis in axes.flat:
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(fontsize=8, frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("million tokens")
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main():
    if not paths:
        raise ValueError("name one or more run folders: python plot.py out/laptop")
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    curves(paths, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
