"""
Pictures of five ideas, drawn by the code that implements them.

    xielu.png          the activation, its derivative and its rivals (model.py)
    goldfish.png       which tokens of a passage have no loss when it is read twice (goldfish.py)
    wsd.png            learning rate and batch of the 8B run, and a cosine (schedule.py)
    ademamix.png       how old the gradients in an update are (ademamix.py)
    document_mask.png  which tokens a token attends to (data.py)

$ python -m studies.explain        # into assets/
"""

import sys

if __name__ == "__main__" and not __package__:
    print("explain.py: start it from the project's root, python -m studies.explain", file=sys.stderr)
    sys.exit(2)

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

import schedule
from ademamix import alpha_at, beta3_at
from configurator import read_config, run
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig
from studies import kit
from tokenizer import load

out = "assets"         # folder of the pictures

# The beginning of Pride and Prejudice (Jane Austen, 1813), and the words before it at each of two readings.
PASSAGE = """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in \
want of a wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, \
this truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful property \
of some one or other of their daughters."""
BEFORE = (
    "He began to read aloud from the first page of the old book: ",
    "Nobody in the room remembered who had said, so many years ago, ",
)


# -----------------------------------------------------------------------------
# curves: each function returns x, {label: y}, and the labels of the axes


def xielu():
    """
    xIELU as initialised, and its rivals.

    Right of 0 it is a parabola, so its slope grows without bound, as ReLU²'s does. Left of 0 it falls and then rises
    again, so a unit there still has a gradient.
    """
    tiny = Apertus(ApertusConfig.from_settings(read_config("configs/tiny.py"))).model
    x = torch.linspace(-4, 2, 601)
    ours = tiny.layers[0].mlp.act_fn(x).detach()
    return x, {
        "xIELU": ours,
        "slope of xIELU": np.gradient(ours, x),
        "SiLU, the gate of SwiGLU": F.silu(x),
        "GELU": F.gelu(x),
        "ReLU²": F.relu(x).square(),
    }, "input", "output"


def wsd():
    """
    Learning rate and batch of the 8B run over its 15T tokens, and the cosine that a run of known length would have.

    WSD holds its peak for as long as you like: only the decay needs to know where the run ends.
    """
    big = SimpleNamespace(**read_config("configs/8b.py"))
    rates = big.lr, big.min_lr, big.warmup_samples, big.total_samples
    plan = schedule.Plan(big.batch_size, big.batch_ramp_at)
    samples = np.linspace(0, big.total_samples, 10_000)
    return samples * 4096 / 1e12, {
        "learning rate: WSD": [1e4 * schedule.wsd(s, *rates, big.decay_samples) for s in samples],
        "learning rate: cosine": [1e4 * schedule.cosine(s, *rates) for s in samples],
        "batch": np.array([plan.samples_of(plan.steps_in(int(s)))[1] for s in samples]) * 4096 / 1e7,
    }, "trillion tokens", "learning rate (1e-4), batch (10 million tokens)"


def slow_weight(t):
    """
    Weights (t,) of the gradients of age 1 .. t in AdEMAMix's alpha(t) m2 after step t, with Apertus' warm-ups.

        weight = alpha(t) (1 - b3(its step)) prod of b3(s) over the later steps s

    They sum to alpha(t) (1 - prod of all b3).
    """
    b3 = np.array([beta3_at(step, 0.9, 0.9999, 100_000) for step in range(t, 0, -1)])
    return alpha_at(t, 8, 100_000) * (1 - b3) * np.cumprod([1, *b3[:-1]])


def ademamix():
    """
    The weight of a gradient in the update by its age: Adam's average, and the slow one as it warms up.

    Adam forgets a gradient within tens of steps. AdEMAMix's second average still uses those of 10,000 steps ago, and
    begins with a short memory, since the gradients of an untrained model are not worth remembering.
    """
    age = np.arange(1, 100_001)
    weights = {"fast average, as in Adam": 0.1 * 0.9 ** (age - 1)}
    for t in (1_000, 10_000, 100_000):
        weights[f"slow average at step {t:,}"] = slow_weight(t)
    return age, {
        label: np.log10(w[w > 1e-8]) for label, w in weights.items()
    }, "age of the gradient (steps)", "weight in the update (log10)", "log"


# -----------------------------------------------------------------------------
# images: each function returns cells from 0 (white) to 2 (dark), and labels


def goldfish():
    """
    One passage read twice, after different sentences.

    Only the first h - 1 = 12 labels can differ, because their hash sees words before the passage. The later labels that
    are dropped are always the same, so the model is never trained on them, however often it reads the passage.
    """
    tok = load("apertus")
    ids = tok.encode(PASSAGE)
    keep = goldfish_mask(
        torch.tensor([ids, ids]),
        10,
        13,
        context=torch.tensor([tok.encode(text)[-12:] for text in BEFORE]))
    cells = 2 - 2.0 * keep.numpy()
    cells[:, :12] = cells[:, :12].clip(min=0.3)
    return cells, dict(
        title="One passage, read twice. Dark: labels without loss. Shaded: the hash also sees the text before",
        xticks=range(len(ids)),
        xticklabels=[tok.decode([i]) for i in ids],
        yticks=[],
        ylabel="second reading     first reading")


def document_mask():
    """Which tokens a token attends to, for three documents in a window."""
    # The number of each token's document (T,), as data.py gives them.
    doc = np.repeat([1, 2, 3], (9, 5, 10))
    causal = np.tri(24, dtype=int)                              # (T, T)
    inside = causal * (doc[:, None] == doc)                     # (T, T)
    return causal + inside, dict(
        title=f"{inside.sum()} pairs inside three documents (dark) of {causal.sum()} without a mask",
        xlabel="attended token",
        ylabel="attending token")


def main():
    for explain in (xielu, wsd, ademamix):
        kit.plot_curves(f"{out}/{explain.__name__}.png", *explain())
    for explain in (goldfish, document_mask):
        cells, labels = explain()
        with kit.picture(f"{out}/{explain.__name__}.png", 10, 4) as axis:
            axis.imshow(cells, cmap="Blues", aspect="auto", vmax=2)
            axis.set(**labels)
            axis.tick_params("x", rotation=90)


if __name__ == "__main__":
    run(main, globals())
