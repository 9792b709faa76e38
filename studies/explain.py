"""
Pictures of five ideas, drawn by the code that does them.

    xielu.png          the activation and its derivative beside its rivals (model.py)
    goldfish.png       which tokens of a passage have no loss, read twice (goldfish.py)
    wsd.png            learning rate and batch of the 8B run, and a cosine (schedule.py)
    ademamix.png       what a gradient weighs in the update as it ages (ademamix.py)
    document_mask.png  which tokens a token may attend to, across documents and inside (data.py)

$ python -m studies.explain        # into assets/
"""

import sys

if __name__ == "__main__" and not __package__:
    print("explain.py: start it from the project's root, python -m studies.explain", file=sys.stderr)
    sys.exit(2)

import numpy as np
import torch
import torch.nn.functional as F

import tokenizer
from ademamix import alpha_at, beta3_at
from engine.plot import finish, pyplot
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig
from schedule import batch_size, cosine, wsd

out = "assets"         # folder for the pictures


def explain_activations(picture):
    """
    xIELU as it is initialised, and its derivative, beside its rivals.

    Right of 0 xIELU is a parabola, so its slope grows without bound, as ReLU²'s does. Left of 0 it falls and then rises
    again, so a unit there still has a gradient.
    """
    tiny = Apertus(ApertusConfig(vocab_size=2, n_layer=1, n_head=1, n_kv_head=1, n_embd=2, ffn_dim=2))
    curves = [
        ("xIELU as initialised", tiny.model.layers[0].mlp.act_fn, "C3"),
        ("SiLU, SwiGLU's gate", F.silu, "C0"),
        ("GELU", F.gelu, "C1"),
        ("ReLU²", lambda x: F.relu(x).square(), "C2")]
    figure, (value, derivative) = pyplot().subplots(1, 2, figsize=(8.8, 3.8))
    x = torch.linspace(-4, 3, 701, requires_grad=True)
    for name, f, colour in curves:
        y = f(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        value.plot(x.detach(), y.detach(), colour, label=name)
        derivative.plot(x.detach(), slope, colour, label=name)
    value.set_title("value: $0.8x^2 + 0.5x$ right of 0, and left of it\nit rises again, so that no unit dies")
    derivative.set_title("derivative: unbounded on the right,\nnegative on the left")
    for axis in (value, derivative):
        axis.set_ylim(-1.5, 4)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.grid(alpha=0.2)
        axis.legend(loc="upper left")
    finish(figure, picture)


# The beginning of Pride and Prejudice (Jane Austen, 1813).
PASSAGE = """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in \
want of a wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, \
this truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful property \
of some one or other of their daughters."""


def explain_goldfish(picture, k=10, h=13):
    """
    One passage read twice, after other words, with the forgotten labels in red.

    The holes are in the same places, but for the first h - 1 labels: their hash sees the words before the passage. So
    the model is never trained on what stands in a hole, however often it reads the passage.
    """
    tok = tokenizer.load("apertus")
    ids = tok.encode(PASSAGE)
    figure, axes = pyplot().subplots(2, 1, figsize=(10, 5.6))
    hole = dict(boxstyle="square,pad=0.12", facecolor="C3", edgecolor="none")
    contexts = (
        "He began to read aloud from the first page of the old book: ",
        "Nobody in the room remembered who had said, so many years ago, ")
    for axis, before in zip(axes, contexts):
        context = torch.tensor(tok.encode(before)[1 - h:])
        keep = goldfish_mask(torch.tensor(ids), k, h, context=context).tolist()
        # x counts the characters of a line of text, whose letters are all as wide.
        x = line = 0
        for n, (i, kept) in enumerate(zip(ids, keep)):
            text = tok.decode([i])
            if x + len(text) > 118:
                x, line = 0, line + 1
            colour = "grey" if n < h - 1 else "black"
            if not kept:
                colour = "white"
            style = dict(family="monospace", fontsize=9, color=colour)
            axis.text(x, -line, text, bbox=None if kept else hole, **style)
            x += len(text)
        axis.set(xlim=(0, 119), ylim=(-line - 0.7, 0.9))
        axis.axis("off")
        axis.set_title(f"after “{before.strip()}”: {keep.count(False)} of {len(keep)} labels forgotten", loc="left")
    figure.suptitle(
        f"Goldfish, k = {k}, h = {h}: red has no loss. Grey: the first h - 1 labels, whose hash sees what stood before")
    finish(figure, picture)


def explain_schedule(picture):
    """
    Learning rate and batch of the 8B run over its 15T tokens, and the cosine that a run of known length would have.

    WSD holds its peak for as long as one likes: only the decay has to know where the run ends.
    """
    # configs/8b.py, in samples of 4,096 tokens
    peak, floor = 1.1e-4, 1.1e-5
    warmup = 4_096_000
    ramp_at = 1_718_272_000
    total = 3_662_109_375
    decay = 403_905_806
    # The warm-up is a thousandth of the run and wants points of its own.
    samples = [*np.linspace(0, warmup, 20), *np.linspace(warmup, total, 2000)]
    tokens = [s * 4096 / 1e12 for s in samples]
    figure, axis = pyplot().subplots(figsize=(9, 3.8))
    axis.plot(
        tokens,
        [wsd(s, peak, floor, warmup, total, decay) for s in samples],
        "C3",
        linewidth=2,
        label="WSD: warm-up, stable, 1-sqrt decay over the last 11 %")
    axis.plot(
        tokens,
        [cosine(s, peak, floor, warmup, total) for s in samples],
        "C7--",
        linewidth=1,
        label="cosine: must know its end in advance")
    axis.set(
        title="Apertus 8B: the batch doubles once, the learning rate does not notice",
        xlabel="trillion tokens",
        ylim=(0, 1.35e-4))
    axis.set_ylabel("learning rate", color="C3")
    axis.legend(loc="upper center")
    batch = axis.twinx()
    sizes = [batch_size(s, 1024, ramp_at) * 4096 / 1e6 for s in samples]
    batch.plot(tokens, sizes, "C0", drawstyle="steps-post")
    batch.set_ylabel("batch, million tokens", color="C0")
    batch.set_ylim(0, 12)
    finish(figure, picture)


def slow_weight(t, beta1=0.9, beta3=0.9999, alpha=8.0, warmup=100_000):
    """
    Weights (t,) of the gradients of age 0 .. t - 1 in AdEMAMix's alpha(t) m2 after step t, warm-ups included.

        weight = alpha(t) (1 - b3(t - age)) prod of b3(s) over the steps s since

    They sum to alpha(t) (1 - prod of all b3).
    """
    by_age = range(t, 0, -1)
    b3 = np.array([beta3_at(step, beta1, beta3, warmup) for step in by_age])
    since = np.cumprod([1.0, *b3[:-1]])
    return alpha_at(t, alpha, warmup) * (1 - b3) * since


def explain_ademamix(picture):
    """
    The weight of a gradient in the update by its age: Adam's average, and the slow one as it warms up.

    Adam forgets a gradient within tens of steps. AdEMAMix's second average still uses those of 10,000 steps ago, and
    begins with a short memory, since the gradients of an untrained model are not worth remembering.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 4))
    age = np.arange(1, 201)
    axis.loglog(
        age,
        0.1 * 0.9 ** (age - 1),
        "C0",
        linewidth=2,
        label="fast average, as in Adam: forgets in tens of steps")
    for n, t in enumerate((1_000, 10_000, 100_000, 400_000)):
        weight = slow_weight(t)
        # Ages at equal distances on the logarithmic axis; 1 is the newest gradient.
        age = np.unique(np.geomspace(1, t, 400).astype(int))
        axis.loglog(
            age,
            weight[age - 1],
            color=plt.get_cmap("Reds")(0.35 + 0.2 * n),
            linewidth=1.8,
            label=f"slow average, step {t:,}: {weight.sum():.2f} of weight in all")
    axis.set(
        title="AdEMAMix with Apertus' values: the slow memory warms up over 100,000 steps",
        xlabel="age of a gradient (steps)",
        ylabel="its weight in the update",
        ylim=(1e-8, 0.3))
    axis.legend()
    axis.grid(alpha=0.2)
    finish(figure, picture)


def explain_document_mask(picture):
    """Which tokens a token may attend to, across documents and inside them, for three documents in one window."""
    plt = pyplot()
    # Numbers of documents (T,), as data.py gives them.
    doc = np.repeat([1, 2, 3], (9, 5, 10))
    causal = np.tri(len(doc), dtype=bool)                       # (T, T)
    same = doc[:, None] == doc                                  # (T, T)
    masks = {"across: causal only": causal, "inside documents": causal & same}
    # 0: may not look, 1: looks at another document, 2: looks at its own
    colours = plt.matplotlib.colors.ListedColormap(["white", "#f2b8a8", "C0"])
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.2))
    for axis, (title, mask) in zip(axes, masks.items()):
        axis.imshow(mask * (1 + same), cmap=colours, vmin=0, vmax=2)
        axis.set(
            title=f"{title}: {mask.sum()} pairs",
            xlabel="looked at",
            ylabel="token",
            xticks=[],
            yticks=[])
    figure.suptitle("Three documents in a window. Red: attention to another document")
    finish(figure, picture)


def main():
    pictures = dict(
        xielu=explain_activations,
        goldfish=explain_goldfish,
        wsd=explain_schedule,
        ademamix=explain_ademamix,
        document_mask=explain_document_mask)
    for name, explain in pictures.items():
        explain(f"{out}/{name}.png")
    print(f"wrote {', '.join(pictures)} (.png) into {out}/")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
