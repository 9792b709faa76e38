"""
Pictures: of runs, from their log.jsonl, and of the five ideas, from the code that does them.

$ python -m engine.plot out/a out/b --out=compare.png          # loss, bits per byte, gradient norm, learning rate, speed of any runs
$ python -m engine.plot --explain=assets                       # xIELU, the Goldfish mask, WSD, AdEMAMix's two memories, the document mask
$ python -m engine.plot --explain=assets out/laptop            # xIELU with the shapes that this run's layers have learnt
"""

import sys

if not __package__:
    print("plot.py: start it from the project's root, python -m engine.plot", file=sys.stderr)
    sys.exit(2)

import json
import math
import os
from array import array

paths = []             # run folders
out = "out/plot.png"   # the picture of runs
explain = ""           # folder for the explanatory pictures

PANELS = (("loss", "training loss (nats/token)"), ("val_bpb", "validation (bits/byte)"),
          ("grad_norm", "gradient norm"), ("lr", "learning rate"))
SPEED = (("tok_s", "tokens a second"), ("minutes", "validation (bits/byte) over minutes"))

# The beginning of Pride and Prejudice (Jane Austen, 1813): what the Goldfish picture masks.
PASSAGE = ("It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. However "
           "little known "
           "the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so well fixed in the minds of "
           "the surrounding "
           "families, that he is considered as the rightful property of some one or other of their daughters.")


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


# -----------------------------------------------------------------------------
# ideas


def explain_activations(picture, run=""):
    """xIELU and its derivative beside its rivals; with a run folder, the shapes that its layers have learnt."""
    import torch
    import torch.nn.functional as F

    from model import XIELU
    plt = pyplot()
    x = torch.linspace(-4, 3, 701, requires_grad=True)
    fresh, learnt = XIELU(), []
    fresh.alpha_p.data.fill_(math.log(math.expm1(0.8)))                     # as model.py starts them
    fresh.alpha_n.data.fill_(math.log(math.expm1(0.8 - XIELU.BETA)))
    if run:
        import convert
        model, _ = convert.load_run(run)
        learnt = [block.mlp.act_fn for block in model.model.layers if isinstance(getattr(block.mlp, "act_fn", None), XIELU)]
        if not learnt:
            raise ValueError(f"{run} has no xIELU layers: give a run with activation=xielu")
    rivals = {"xIELU as initialised": (fresh, "C3"), "SiLU, SwiGLU's gate": (F.silu, "C0"), "GELU": (F.gelu, "C1"),
              "ReLU²": (lambda t: F.relu(t).square(), "C2")}
    figure, axes = plt.subplots(1, 3 if learnt else 2, figsize=(13 if learnt else 9, 3.8), layout="constrained")
    for name, (f, colour) in rivals.items():
        y = f(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        for axis, values in zip(axes, (y, slope)):
            axis.plot(x.detach(), values.detach(), color=colour, linewidth=2.4 if "xIELU" in name else 1.4, label=name)
    axes[0].set_title("value: $0.8x^2 + 0.5x$ right of 0, and left of it\nit rises again, so that no unit dies", fontsize=10)
    axes[1].set_title("derivative: unbounded on the right,\nnegative on the left", fontsize=10)
    for layer, f in enumerate(learnt):
        axes[2].plot(x.detach(), f(x).detach(), color=plt.get_cmap("viridis")(layer / max(len(learnt) - 1, 1)), label=f"layer {layer}")
    if learnt:
        axes[2].set_title(f"learnt by {os.path.basename(os.path.normpath(run))}", fontsize=10)
    for axis in axes:
        axis.set_ylim(-1.5, 4)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.grid(alpha=0.2)
    for axis in (axes[0], *axes[2:]):
        axis.legend(fontsize=8, frameon=False, loc="upper left", ncols=1 if len(learnt) < 9 else 4)
    finish(figure, picture)


def explain_goldfish(picture, k=10, h=13):
    """One passage read twice, after other words: the holes are in the same places, but for the first h - 1 labels."""
    import torch

    import tokenizer
    from goldfish import goldfish_mask
    plt = pyplot()
    tok = tokenizer.load("apertus")
    ids = tok.encode(PASSAGE)
    figure, axes = plt.subplots(2, 1, figsize=(10, 5.6), layout="constrained")
    contexts = ("He began to read aloud from the first page of the old book: ",
                "Nobody in the room remembered who had said, so many years ago, ")
    for axis, before in zip(axes, contexts):
        context = tok.encode(before)[-(h - 1):]
        keep = goldfish_mask(torch.tensor(ids), k, h, context=torch.tensor(context)).tolist()
        x, line = 0.0, 0
        for n, (i, kept) in enumerate(zip(ids, keep)):
            text = tok.decode([i])
            if x + len(text) > 118:
                x, line = 0.0, line + 1
            colour = "white" if not kept else "black" if n >= h - 1 else "grey"
            axis.text(x, -line, text.replace("$", r"\$"), family="monospace", fontsize=9, color=colour,
                      bbox=dict(boxstyle="square,pad=0.12", facecolor="C3", edgecolor="none") if not kept else None)
            x += len(text)
        axis.set_xlim(0, 119)
        axis.set_ylim(-line - 0.7, 0.9)
        axis.axis("off")
        axis.set_title(f"after “{before.strip()}”: {keep.count(False)} of {len(keep)} labels forgotten", fontsize=10, loc="left")
    title = f"Goldfish, k = {k}, h = {h}: red has no loss. Grey: the first h - 1 labels, whose hash sees what stood before"
    figure.suptitle(title, fontsize=11)
    finish(figure, picture)


def explain_schedule(picture):
    """Learning rate and batch of the 8B run over its 15T tokens, and the cosine that a run of known length would have."""
    from schedule import batch_size, cosine, wsd
    plt = pyplot()
    peak, floor, warmup, total, decay, ramp = 1.1e-4, 1.1e-5, 4_096_000, 3_662_109_375, 403_905_806, 1_718_272_000      # configs/8b.py
    samples = sorted([int(total * i / 2000) for i in range(2001)] + [warmup * i // 20 for i in range(21)])
    tokens = [s * 4096 / 1e12 for s in samples]
    figure, axis = plt.subplots(figsize=(9, 3.8), layout="constrained")
    axis.plot(tokens, [wsd(s, peak, floor, warmup, total, decay) for s in samples], color="C3", linewidth=2,
              label="WSD: warm-up, stable, 1-sqrt decay over the last 11 %")
    axis.plot(tokens, [cosine(s, peak, floor, warmup, total) for s in samples], color="grey", linewidth=1, linestyle="--",
              label="cosine: must know its end in advance")
    axis.set_xlabel("trillion tokens")
    axis.set_ylabel("learning rate", color="C3")
    axis.set_ylim(0, 1.35e-4)
    batch = axis.twinx()
    batch.plot(tokens, [batch_size(s, 1024, ramp) * 4096 / 1e6 for s in samples], color="C0", drawstyle="steps-post")
    batch.set_ylabel("batch, million tokens", color="C0")
    batch.set_ylim(0, 12)
    axis.legend(fontsize=9, frameon=False, loc="upper center")
    axis.set_title("Apertus 8B: the batch doubles once, the learning rate does not notice", fontsize=10)
    finish(figure, picture)


def slow_weight(t, beta1=0.9, beta3=0.9999, alpha=8.0, warmup=100_000):
    """
    Weights (t,) of the gradients of age 0 .. t - 1 in AdEMAMix's alpha(t) m2 after step t, warm-ups included:
    alpha(t) (1 - b3(t - age)) prod of b3(s) over the steps s since. They sum to alpha(t) (1 - prod of all b3).
    """
    import numpy as np

    from ademamix import alpha_at, beta3_at
    b3 = np.array([beta3_at(s, beta1, beta3, warmup) for s in range(t, 0, -1)])        # by age
    since = np.concatenate(([1.0], np.cumprod(b3)[:-1]))
    return alpha_at(t, alpha, warmup) * (1 - b3) * since


def explain_ademamix(picture):
    """The weight of a gradient in the update by its age: Adam's average, and the slow one at four moments of its warm-up."""
    import numpy as np
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    age = np.arange(200)
    axis.loglog(age + 1, 0.1 * 0.9**age, color="C0", linewidth=2, label="fast average, as in Adam: forgets in tens of steps")
    for n, t in enumerate((1_000, 10_000, 100_000, 400_000)):
        w = slow_weight(t)
        pick = np.unique(np.geomspace(1, t, 400).astype(int)) - 1
        axis.loglog(pick + 1, w[pick], color=plt.get_cmap("Reds")(0.35 + 0.2 * n), linewidth=1.8,
                    label=f"slow average, step {t:,}: {w.sum():.2f} of weight in all")
    axis.set_ylim(1e-8, 0.3)
    axis.set_xlabel("age of a gradient (steps)")
    axis.set_ylabel("its weight in the update")
    axis.legend(fontsize=9, frameon=False)
    axis.set_title("AdEMAMix with Apertus' values: the slow memory warms up over 100,000 steps", fontsize=10)
    axis.grid(alpha=0.2)
    finish(figure, picture)


def explain_document_mask(picture):
    """Which tokens a token may look at: across documents and inside, for three documents in one window."""
    import numpy as np
    plt = pyplot()
    doc = np.repeat([1, 2, 3], (9, 5, 10))                      # (T,) as data.py numbers them
    causal = np.tril(np.ones((len(doc), len(doc)), dtype=bool))
    inside = causal & (doc[:, None] == doc[None])
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.2), layout="constrained")
    for axis, mask, title in zip(axes, (causal, inside), ("across: causal only", "inside documents")):
        colours = plt.matplotlib.colors.ListedColormap(["white", "#f2b8a8", "C0"])
        axis.imshow(np.where(mask, np.where(doc[:, None] == doc[None], 2, 1), 0), cmap=colours, vmin=0, vmax=2)
        axis.set_title(f"{title}: {mask.sum()} pairs", fontsize=10)
        axis.set_xlabel("looked at")
        axis.set_ylabel("token")
        axis.set_xticks([]), axis.set_yticks([])
    figure.suptitle("Three documents in a window. Red: attention to another document", fontsize=11)
    finish(figure, picture)


def main():
    if explain:
        os.makedirs(explain, exist_ok=True)
        explain_activations(os.path.join(explain, "xielu.png"), paths[0] if paths else "")
        explain_goldfish(os.path.join(explain, "goldfish.png"))
        explain_schedule(os.path.join(explain, "wsd.png"))
        explain_ademamix(os.path.join(explain, "ademamix.png"))
        explain_document_mask(os.path.join(explain, "document_mask.png"))
        print(f"wrote {explain}/xielu.png, goldfish.png, wsd.png, ademamix.png and document_mask.png")
        return
    if not paths:
        raise ValueError("name one or more run folders: python -m engine.plot out/laptop; or --explain=FOLDER")
    panels = comparable(paths)
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    curves(paths, out, panels)
    print(f"wrote {out}")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
