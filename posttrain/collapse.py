"""
Is the representation collapsing? Numbers of the last hidden states and of the last activation, to be watched while
preferences are trained: reward can rise while the features that carry it fall into ever fewer directions, and from
there nothing is learnt any more.

    s = singular values of H (N tokens, C features), not centred       p = s / sum(s)
    effective rank    exp(-sum p log p)                                 Roy & Vetterli 2007
    PCA-99 % rank     the fewest directions that hold 99 % of sum(s^2)
    srank             the fewest directions that hold 99 % of sum(s)    Kumar et al. 2021
    feature rank      how many s / sqrt(N) are above .01                Lyle et al. 2022
    torch rank        how many s are above rounding, as torch.linalg.matrix_rank counts
    stable rank       sum(s^2) / max(s)^2
    dead units        xIELU inputs of the last layer that are above 0 for no token; the share of all
    pre-activation    the mean L2 norm of those inputs over tokens: it grows before the rank falls

Source: arXiv 2405.00662 and its code, whose first five ranks and dead units these are (papers/ppo_collapse.py watches
PPO by the same functions). The last hidden states are normalised here (RMSNorm), so that their own norm says nothing:
the norm is taken where the last feed-forward layer decides.

$ python -m posttrain.collapse --init_from=out/sft            # of a model, on the text given by --text
"""

import sys

if __name__ == "__main__" and not __package__:
    print("collapse.py: start it from the project's root, python -m posttrain.collapse", file=sys.stderr)
    sys.exit(2)

import math

import torch

from engine.parallel import drop_gathered

init_from = "out/laptop"       # run folder, Hugging Face folder or hub name
text = "FILE:README.md"        # what it reads; FILE:path takes a file


RANKS = "effective pca99 srank feature torch stable".split()


def spectrum(h):
    """
    The ranks of h (N, C) by the definitions above, computed in fp32 at least: {name: rank}.

    All lie in [0, min(N, C)]; they are 0 if h is zero, and nan if h is not finite.
    """
    if not h.isfinite().all():
        return dict.fromkeys(RANKS, math.nan)
    precise = torch.promote_types(h.dtype, torch.float32)
    h = h.detach().to(precise)
    s = torch.linalg.svdvals(h)         # descending
    if not len(s) or s[0] == 0:
        return dict.fromkeys(RANKS, 0)
    p = s / s.sum()
    energy = s.square()
    rounding = max(h.shape) * torch.finfo(precise).eps * s[0]
    return dict(
        effective=torch.special.entr(p).sum().exp().item(),
        pca99=fewest(energy),
        srank=fewest(s),
        feature=int((s / len(h) ** 0.5 > 0.01).sum()),
        torch=int((s > rounding).sum()),
        stable=(energy.sum() / energy[0]).item(),
    )


def fewest(values):
    """How many of the values, which descend, make 99 % of their sum."""
    too_few = values.cumsum(0) < 0.99 * values.sum()
    return int(too_few.sum()) + 1


def dead_units(h):
    """(units,) bool: which columns of h (samples, units) are above 0 for no sample. Before or behind a ReLU alike."""
    return (h <= 0).all(0)


def saturated_units(h):
    """(units,) bool: the same for tanh, which are stuck rather than 0: a standard deviation below .001."""
    return h.std(0) < 0.001


@torch.no_grad()
def diagnose(model, idx, keep=None, doc=None):
    """
    The numbers above for token ids idx (B, T), as a dict of Python numbers.

    keep (B, T) bool: the positions that count, default all; doc (B, T): documents, where rows are packed. rank_tokens
    is the number N of positions: with fewer than C of them the rank measures the batch, not the model.
    """
    activations = []

    def keep_output(module, inputs, output):
        activations.append(output)

    up = model.model.layers[-1].mlp.up_proj
    hook = up.register_forward_hook(keep_output)
    try:
        # Eager: what was compiled before has no hook in it, or that of an earlier call.
        with torch.compiler.set_stance("force_eager"):
            h = model.hidden(idx, doc)                      # (B, T, C)
    finally:
        hook.remove()
    drop_gathered(model)
    if keep is None:
        keep = torch.ones_like(idx, dtype=torch.bool)
    z = activations[0][keep].float()                        # (N, ffn_dim)
    found = dict(rank_tokens=len(z))
    for name, rank in spectrum(h[keep]).items():
        found[f"rank_{name}"] = rank
    found["dead_units"] = dead_units(z).float().mean().item()
    norms = z.norm(dim=-1)
    found["preactivation"] = norms.mean().item()
    return found


def main():
    import convert

    model, tok = convert.load_any(init_from)
    words = text
    if text.startswith("FILE:"):
        with open(text.removeprefix("FILE:"), encoding="utf-8") as f:
            words = f.read()
    ids = [tok.bos, *tok.encode(words)]
    n = min(model.config.block_size, len(ids))
    rows = torch.tensor(ids).split(n)
    idx = torch.stack([row for row in rows if len(row) == n])
    found = diagnose(model, idx[:64])
    for name, value in found.items():
        print(f"{name:16} {value:.4g}")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
