"""
Pictures of five ideas, drawn by the code that does them: xIELU, the Goldfish mask, WSD, AdEMAMix's two memories, the document mask.

$ python -m studies.explain                       # into assets/
$ python -m studies.explain --run=out/laptop      # xIELU with the shapes that this run's layers have learnt
"""

import sys

if __name__ == "__main__" and not __package__:
    print("explain.py: start it from the project's root, python -m studies.explain", file=sys.stderr)
    sys.exit(2)

import math
import os

from engine.plot import finish, pyplot

out = "assets"         # folder for the pictures
run = ""               # a run folder whose layers have xIELU; "" = as it is initialised


# The beginning of Pride and Prejudice (Jane Austen, 1813): what the Goldfish picture masks.
PASSAGE = ("It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. However "
           "little known "
           "the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so well fixed in the minds of "
           "the surrounding "
           "families, that he is considered as the rightful property of some one or other of their daughters.")


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
    os.makedirs(out, exist_ok=True)
    explain_activations(os.path.join(out, "xielu.png"), run)
    explain_goldfish(os.path.join(out, "goldfish.png"))
    explain_schedule(os.path.join(out, "wsd.png"))
    explain_ademamix(os.path.join(out, "ademamix.png"))
    explain_document_mask(os.path.join(out, "document_mask.png"))
    print(f"wrote {out}/xielu.png, goldfish.png, wsd.png, ademamix.png and document_mask.png")


if __name__ == "__main__":
    import configurator
    configurator.run(main, globals())
