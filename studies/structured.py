"""
Structured feed-forward layers: each matrix of the MLP as a product of two small ones. Not Apertus, and off by default.

    y = W x with W (M, N) becomes                               parameters               63 % of the MLP, M = 4N
    lowrank         U (V x)          V (R, N),   U (M, R)       R (N + M)                R = N/2
    blockdense      U (V_b x)        V_b in B blocks            R (N/B + M)              R = 2N/3, B = 2
    blockshuffle    S' U_b S V_b x   both in B blocks           min(N, M) (N + M) / B    B = 2 (Monarch)

V_b keeps B slices of x apart; S deals its output out like cards, so that each block of U_b sees a share of every slice.
Everything is linear: the product is one dense matrix, merge(). Apertus' MLP has no gate, so two matrices are all there
is; the first layer stays dense, as published.

Self-guided training: factors start slowly (the gradient of U needs a good V, and the reverse), so a dense guide W,
which starts as their product, does the work at first and fades out,

    o = a W x + (1 - a) U V x,      a = (1 + cos(pi step / last)) / 2,      and at step `last` W is gone.

Source: Wei et al., "Building on Efficient Foundations" (arXiv 2406.16450, NeurIPS 2024) and 2407.09835; code:
CLAIRE-Labo/StructuredFFN. Monarch: Dao et al., arXiv 2204.00595.

$ python train.py configs/laptop.py --ffn=lowrank --ffn_rank=96 --self_guided=0.5
$ python -m studies.structured                      # the published table, counted again
$ python convert.py --load=out/run --save=out/hf --merge
"""

import sys

if __name__ == "__main__" and not __package__:
    print("structured.py: start it from the project's root, python -m studies.structured", file=sys.stderr)
    sys.exit(2)

import hashlib
import math
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import literal
from schedule import steps_in

# Letters: N inputs, M outputs, R rank, B blocks.

KINDS = ("lowrank", "blockdense", "blockshuffle")


def factor_shapes(kind, n_in, n_out, rank=0, blocks=0):
    """
    The shapes of V and U for a matrix (n_out, n_in).

    kind: one of KINDS; lowrank does not use blocks, blockshuffle does not use rank. ValueError, one line that says what
    to try, if they do not fit. Source: arXiv 2406.16450 sec. 3.1.
    """
    if kind not in KINDS:
        raise ValueError(f"ffn={kind!r} is not one of dense, {', '.join(KINDS)}")
    most = min(n_in, n_out)
    if kind != "blockshuffle" and not 0 < rank <= most:
        raise ValueError(f"ffn={kind!r} wants ffn_rank between 1 and {most}, got {rank}: try {most // 2} "
                         "(about 60 % of the parameters)")
    if kind == "lowrank":
        return (rank, n_in), (n_out, rank)
    # The number of blocks must divide both sides of V, and in blockshuffle also the outputs of U.
    width = n_out
    what = "outputs"
    if kind == "blockdense":
        width, what = rank, "ffn_rank"
    if blocks < 1 or n_in % blocks or width % blocks:
        fits = [
            b for b in range(2, blocks)
            if n_in % b == width % b == 0]
        raise ValueError(f"ffn={kind!r}: {n_in} inputs and {width} {what} do not divide into ffn_blocks={blocks}: "
                         f"try ffn_blocks={max(fits, default=2)}")
    if kind == "blockdense":
        v = blocks, rank // blocks, n_in // blocks
        return v, (n_out, rank)
    # Of the two block-diagonal matrices, the one at the narrow side has square blocks.
    small = most // blocks
    v = blocks, small, n_in // blocks
    u = blocks, n_out // blocks, small
    return v, u


def block_diagonal(x, w):
    """Slice b of x times block b. x (..., N), w (B, N'/B, N/B) -> (..., N')."""
    slices = x.unflatten(-1, (len(w), -1))                 # (..., B, N/B)
    y = torch.einsum("...bi,boi->...bo", slices, w)        # (..., B, N'/B)
    return y.flatten(-2)


def dealt_block_diagonal(x, w):
    """The same between two shuffles: block b reads x[b], x[b + B], x[b + 2B], ... and writes to y as far apart."""
    dealt = x.unflatten(-1, (-1, len(w)))                  # (..., N/B, B)
    y = torch.einsum("...ib,boi->...ob", dealt, w)         # (..., N'/B, B)
    return y.flatten(-2)


def multiply(x, v, u, kind):
    """x (..., N) -> (..., M) through both factors."""
    if kind == "lowrank":
        return F.linear(F.linear(x, v), u)                     # (..., R) -> (..., M)
    h = block_diagonal(x, v)
    if kind == "blockdense":
        return F.linear(h, u)                                # (..., R) -> (..., M)
    return dealt_block_diagonal(h, u)                      # (..., min(N, M)) -> (..., M)


def product(v, u, kind):
    """The dense matrix (M, N) of a pair of factors, in their dtype: what they make of the identity."""
    n_in = v.shape[-1]
    if kind != "lowrank":
        n_in *= len(v)
    identity = torch.eye(n_in, dtype=v.dtype, device=v.device)
    return multiply(identity, v, u, kind).T.contiguous()


class StructuredLinear(nn.Module):
    """
    x (..., N) -> (..., M) by two factors, without bias; computes in x's dtype.

    add_guides() gives it a guide for training. ValueError if rank and blocks do not fit the sizes (factor_shapes).
    """

    def __init__(self, n_in, n_out, kind, rank=0, blocks=0):
        super().__init__()
        self.n_in = n_in
        self.n_out = n_out
        self.kind = kind
        v, u = factor_shapes(kind, n_in, n_out, rank, blocks)
        self.v = nn.Parameter(torch.empty(v))
        self.u = nn.Parameter(torch.empty(u))
        # While training is guided: the guide (M, N) and its weight, a tensor (), because a number would be compiled in.
        self.register_parameter("guide", None)
        self.register_buffer("alpha", None, persistent=False)
        # Stochastic saving. Decided outside of forward(), so that a forward pass that is recomputed takes the same way.
        self.use_guide = True

    def forward(self, x):
        v = self.v.to(x.dtype)
        u = self.u.to(x.dtype)
        # Validation is that of the factors alone; the released code guides it too, which adds noise to it.
        if self.guide is None or not self.training:
            return multiply(x, v, u, self.kind)
        guide = self.guide.to(x.dtype)
        if not self.use_guide:
            # DDP waits for the gradient of every parameter, so that of the guide is zero, not absent.
            return multiply(x, v + 0 * guide[0, 0], u, self.kind)
        a = self.alpha.to(x.dtype)
        y = multiply(x, v, u, self.kind)
        return a * F.linear(x, guide) + (1 - a) * y

    @torch.no_grad()
    def merge(self):
        """The dense matrix (M, N) that this layer multiplies by, in the factors' dtype."""
        return product(self.v, self.u, self.kind)


# -----------------------------------------------------------------------------
# in a model


def check(config):
    """ValueError, one line, if an ApertusConfig asks for structured layers that its sizes do not allow."""
    up = config.n_embd, config.ffn_width
    down = config.ffn_width, config.n_embd
    for sizes in (up, down):
        factor_shapes(config.ffn, *sizes, config.ffn_rank, config.ffn_blocks)
    if config.n_layer < 2:
        raise ValueError(f"ffn={config.ffn!r} with n_layer=1 would change nothing: the first layer stays dense")


def build(model, settings):
    """
    Put structured layers in place of the MLP's matrices in every block but the first, with initial values of their own.

    settings: ffn, ffn_rank and ffn_blocks of the run, by name. ValueError: see check.
    """
    c = SimpleNamespace(**vars(model.config), ffn_width=model.config.ffn_width, head_dim=model.config.head_dim,
                        ffn=settings["ffn"], ffn_rank=settings["ffn_rank"], ffn_blocks=settings["ffn_blocks"])
    check(c)
    model.structured = c.ffn
    noise = model.initial
    model.initial = lambda name, shape, seed: initial(name, shape, c, seed, noise)
    for block in model.model.layers[1:]:
        for name, dense in list(block.mlp.named_children()):
            if isinstance(dense, nn.Linear):
                n_out, n_in = dense.weight.shape
                layer = StructuredLinear(n_in, n_out, c.ffn, c.ffn_rank, c.ffn_blocks)
                setattr(block.mlp, name, layer)


def initial(name, shape, config, seed, draw):
    """
    The initial values of the matrix `name`, fp64 where it is LAYER.v, LAYER.u or LAYER.guide; all others are draw's.

    lowrank: the best approximation of rank R of the matrix that the dense model of this seed starts from, its singular
    values split evenly between the factors. Blocks: normal noise made orthogonal, all singular values 1. Guide: the
    product. draw(name, shape, seed): the noise. Source: post_init of the released code.
    """
    noise = partial(draw, seed=seed)
    owner, _, leaf = name.rpartition(".")
    if leaf not in ("v", "u", "guide"):
        return noise(name, shape)
    n_in, n_out = config.n_embd, config.ffn_width
    if owner.endswith("down_proj"):
        n_in, n_out = n_out, n_in
    if config.ffn == "lowrank":
        dense = noise(owner + ".weight", (n_out, n_in)).double()
        U, S, Vh = torch.linalg.svd(dense, full_matrices=False)
        R = config.ffn_rank
        root = S[:R].sqrt()
        v = root[:, None] * Vh[:R]
        u = U[:, :R] * root
    else:
        v, u = factor_shapes(config.ffn, n_in, n_out, config.ffn_rank, config.ffn_blocks)
        v = orthogonal(noise(owner + ".v", v))
        u = orthogonal(noise(owner + ".u", u))
    if leaf == "guide":
        return product(v, u, config.ffn)
    return v if leaf == "v" else u


def orthogonal(w):
    """Each block of w (..., m, n), its singular values set to 1: the orthogonal factor of its polar decomposition."""
    U, _, Vh = torch.linalg.svd(w.double(), full_matrices=False)
    return U @ Vh


def structured_layers(model):
    """{name: StructuredLinear} of a model, in order."""
    return {
        name: module for name, module in model.named_modules()
        if isinstance(module, StructuredLinear)}


def restore(model, settings, step):
    """Give a model the layers that a checkpoint of this step holds, by the settings of its run: guides too, if any."""
    build(model, settings)
    if step < guided_steps(settings):
        add_guides(model)


def dense_parameters(model):
    """(name, tensor) of the equivalent dense model, one at a time: factors as their product, guides left out."""
    layers = structured_layers(model)
    for name, p in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner not in layers:
            yield name, p.detach()
        elif leaf == "u":
            yield owner + ".weight", layers[owner].merge()


# -----------------------------------------------------------------------------
# self-guided training


class Guides:
    """
    The guided steps of a run with structured layers, for train.py.

    config: the run's settings (dict), as in config.json; shape: its ApertusConfig. ValueError: sizes that structured
    layers do not have, or a share of the run that there is not.
    """

    def __init__(self, config):
        self.config = config
        self.last = guided_steps(config)

    def join(self, model):
        """Take part in a model, before it is wrapped or sharded."""
        self.model = model
        if self.last:
            add_guides(model)

    def set(self, step, micro):
        """Before each micro-batch. micro: its number within the step, over all ranks."""
        if step < self.last:
            stochastic = self.config["guide_saving"]
            seed = self.config["seed"]
            set_guides(self.model, step, self.last, stochastic, micro, seed)

    def end(self, done, optimizer, config=None):
        """
        Whether the guides have just been removed, since `done` steps are all the guided ones.

        Called after each update, and before a checkpoint is loaded: then config is that of the checkpoint, whose run
        may have been planned shorter. DDP does not forget a parameter: wrap the model again if this returns True.
        """
        if not self.last or done < guided_steps(config or self.config):
            return False
        drop_guides(self.model, optimizer)
        self.last = 0
        return True


class Guided:
    """A mixin of Apertus that sets its `guides`, in a tuple, before each forward pass in training."""

    def forward(self, *args, **how):
        if self.training:
            self.guides[0].set(*self.now)
        return super().forward(*args, **how)


def guided_steps(config):
    """How many steps of a run are guided: the share self_guided of all. config: its settings, as in config.json."""
    share = config.get("self_guided", 0.0)
    if not share:
        return 0
    if not 0 < share <= 1 or config["ffn"] == "dense":
        raise ValueError(f"self_guided={share} with ffn={config['ffn']!r}: want a share of the run in [0, 1], and a "
                         "structured --ffn")
    return int(share * steps_in(
        config["total_samples"],
        config["batch_size"],
        config["batch_ramp_at"] or None))


def guide_weight(step, last):
    """a at `step`: half a cosine from 1 at step 0 to 0 at `last` and after (CosineTempDecay of the released code)."""
    faded = min(step / last, 1)
    return (1 + math.cos(math.pi * faded)) / 2


def add_guides(model):
    """
    Give each structured layer a dense guide that starts as its product, so that the first loss is the same with it.

    (The released BlockShuffle guide is not the product: it forgets the shuffles, and is as far from it as an unrelated
    matrix, sqrt(2) of its norm.) To be called before the optimizer is built and the model is wrapped or sharded.
    """
    for layer in structured_layers(model).values():
        layer.guide = nn.Parameter(layer.merge())
        layer.alpha = torch.ones((), device=layer.guide.device)
    # Blocks share their compiled code, in more variants than torch allows by default: dense or not, training or not,
    # and each of their layers guided or not.
    torch._dynamo.config.recompile_limit = 16


def set_guides(model, step, last, stochastic=False, micro=0, seed=28):
    """
    Set the guides for a forward and backward pass: a pure function of the step, so there is nothing to save or replay.

    stochastic: each layer uses the mixture with probability a and the factors alone otherwise, which saves half of the
    guide's FLOPs over a cosine. The coins are hashes of (seed, step, micro, layer). They are flipped here, not in
    forward(), so that a recomputed forward pass meets the same ones. micro: number of the micro-batch within the step,
    over all ranks.
    """
    a = guide_weight(step, last)
    for i, layer in enumerate(structured_layers(model).values()):
        if layer.guide is not None:
            key = f"{seed}/{step}/{micro}/{i}".encode()
            digest = hashlib.blake2b(key, digest_size=8).digest()
            coin = int.from_bytes(digest) / 2**64
            layer.alpha.fill_(a)
            layer.use_guide = not stochastic or coin < a


def drop_guides(model, optimizer=None):
    """
    Remove the guides, and what the optimizer keeps of them. Returns how many there were.

    FSDP2 forgets its shards of them too; DDP cannot: wrap the model again.
    """
    layers = [
        layer for layer in structured_layers(model).values()
        if layer.guide is not None]
    for layer in layers:
        if optimizer:
            optimizer.state.pop(layer.guide, None)
            for group in optimizer.param_groups:
                group["params"] = [
                    p for p in group["params"]
                    if p is not layer.guide]
        layer.guide = None
        layer.alpha = None
    # A sharded module has no public way to give up a parameter.
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            for group in fsdp_groups(module._get_fsdp_state()):
                group.fsdp_params = [
                    p for p in group.fsdp_params
                    if p._module_info.param_name != "guide"]
    return len(layers)


def fsdp_groups(state):
    """The parameter groups of an FSDP2 state: a list in torch 2.13, one or None in 2.11."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


# -----------------------------------------------------------------------------
# counting


def ffn_params(n_layer, width, ffn, kind, rank=0, blocks=0):
    """Parameters of all MLPs of a model whose first is dense: two matrices each, width -> ffn -> width."""
    dense = 2 * width * ffn
    if kind == "dense":
        return n_layer * dense
    up = factor_shapes(kind, width, ffn, rank, blocks)
    down = factor_shapes(kind, ffn, width, rank, blocks)
    return dense + (n_layer - 1) * sum(map(math.prod, up + down))


def training_flops(n_layer, width, ffn, vocab, block_size, tokens):
    """Training FLOPs as the paper counts them: 3 x forward, all pairs in attention. ffn: parameters of all MLPs."""
    matrices = 4 * n_layer * width**2 + ffn + vocab * width
    attention = 4 * n_layer * block_size * width
    return 3 * tokens * (2 * matrices + attention)


# arXiv 2406.16450, Tables 1 and 2. FFN: parameters of all MLPs in millions, None where they are not given.
TABLES = """
layers  width   tokens  form          rank  blocks   FFN     FLOPs
    24   2048   25.5e9  dense            0       0   805  2.10e+20
    24   2048   25.5e9  lowrank       1024       0   516  1.66e+20
    24   2048   25.5e9  blockdense    1536       4   486  1.61e+20
    24   2048   25.5e9  blockshuffle     0       2   516  1.66e+20
    24   2048   25.5e9  lowrank        512       0   275  1.29e+20
    24   2048   25.5e9  blockdense     768       4   260  1.27e+20
    24   2048   25.5e9  blockshuffle     0       4   275  1.29e+20
    24   1024    6.7e9  dense            0       0  None  1.55e+19
    24   1536  14.58e9  dense            0       0  None  7.03e+19
"""
_, *ROWS = TABLES.strip().splitlines()
PUBLISHED = [[literal(cell) for cell in row.split()] for row in ROWS]


def print_published():
    print("layers width  form          rank blocks    FFN M (published)       FLOPs (published)")
    for n_layer, width, n_tokens, kind, rank, blocks, millions, flops in PUBLISHED:
        ffn = ffn_params(n_layer, width, 4 * width, kind, rank, blocks)
        ours = training_flops(n_layer, width, ffn, 32000, 1024, n_tokens)
        row = f"{n_layer:6} {width:5}  {kind:12} {rank:5} {blocks:6} {ffn / 1e6:8.0f} ({millions or 'not given'})"
        print(f"{row:62}{ours:.2e} ({flops:.2e})")


if __name__ == "__main__":
    from configurator import run
    run(print_published, globals())
