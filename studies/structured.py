"""
Structured feed-forward layers: each of the MLP's two large matrices as a product of two small ones. Not Apertus, and off by default.

    y = W x with W (M, N) becomes                               parameters               63 % of the MLP, M = 4N
    lowrank         U (V x)          V (R, N),   U (M, R)       R (N + M)                R = N/2
    blockdense      U (V_b x)        V_b in B blocks            R (N/B + M)              R = 2N/3, B = 2
    blockshuffle    S' U_b S V_b x   both in B blocks           min(N, M) (N + M) / B    B = 2       (Monarch, arXiv 2204.00595)

V_b keeps B slices of x apart; S deals its output out like cards, so that each block of U_b sees a share of every slice. Everything
is linear: the product is one dense matrix, merge(). Apertus' MLP has no gate, so two matrices are all there is; the first layer stays
dense, as published. Two tricks come with it. Self-guided training: factors start slowly (the gradient of U needs a good V, and the
reverse), so a dense guide W, born as their product, does the work at first and fades out,

    o = a W x + (1 - a) U V x,      a = (1 + cos(pi step / last)) / 2,      and at step `last` W is gone.

Pre-merge: where decoding is bound by latency (a GPU, small matrices) one matrix beats two, so below a measured number of tokens merge()
is used. Where it is bound by reading weights the factors stay ahead: on one CPU thread 0.9 to 2.0 times as fast as dense at width 1024, 1.3 to 2.4
at 2048, 1.5 to 2.9 at 4096 (tools/bench.py ffn).
Source: Wei et al., "Building on Efficient Foundations" (arXiv 2406.16450, NeurIPS 2024) and 2407.09835; code: CLAIRE-Labo/StructuredFFN.

$ python train.py configs/laptop.py --ffn=lowrank --ffn_rank=96 --self_guided=0.5
$ python -m studies.structured                                  # the published table, counted again
$ python -m tools.bench ffn                                   # where it pays on this machine, widths 512 to 2048; --widths=(4096,)
$ python convert.py --load=out/run --save=out/hf --merge
"""

import sys

if __name__ == "__main__" and not __package__:
    print("structured.py: start it from the project's root, python -m studies.structured", file=sys.stderr)
    sys.exit(2)

import hashlib
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from engine.hardware import linear

# Letters: N inputs, M outputs, R rank, B blocks, K = min(N, M) / B.


def factor_shapes(kind, n_in, n_out, rank=0, blocks=0):
    """
    The shapes of V and U for a matrix (n_out, n_in). kind: lowrank | blockdense | blockshuffle; blocks is unused by the first, rank by
    the last. ValueError, one line, if they do not fit. Source: arXiv 2406.16450 sec. 3.1.
    """
    if kind not in ("lowrank", "blockdense", "blockshuffle"):
        raise ValueError(f"ffn={kind!r} is not one of dense, lowrank, blockdense, blockshuffle")
    small = min(n_in, n_out)
    if kind != "blockshuffle" and not 0 < rank <= small:
        raise ValueError(f"ffn={kind!r} wants ffn_rank between 1 and {small}, got {rank}: try {small // 2} (about 60 % of the parameters)")
    if kind == "lowrank":
        return (rank, n_in), (n_out, rank)
    a, b, what = (n_in, rank, "ffn_rank") if kind == "blockdense" else (n_in, n_out, "outputs")
    if blocks < 1 or a % blocks or b % blocks:
        fits = max(d for d in range(1, max(2, blocks + 1)) if a % d == b % d == 0)
        raise ValueError(f"ffn={kind!r}: {a} inputs and {b} {what} do not divide into ffn_blocks={blocks}: "
                         f"try ffn_blocks={fits if fits > 1 else 2}")
    if kind == "blockdense":
        return (blocks, rank // blocks, n_in // blocks), (n_out, rank)
    return (blocks, small // blocks, n_in // blocks), (blocks, n_out // blocks, small // blocks)   # the square block is the narrow side's


def block_diagonal(x, w):
    """Slice b of x times block b. x (..., N), w (B, N'/B, N/B) -> (..., N')."""
    return torch.einsum("...bi,boi->...bo", x.unflatten(-1, (len(w), -1)), w).flatten(-2)


def dealt_block_diagonal(x, w):
    """The same between two shuffles: block b reads x[b], x[b + B], x[b + 2B], ... and writes to the places of y dealt out alike."""
    return torch.einsum("...ib,boi->...ob", x.unflatten(-1, (-1, len(w))), w).flatten(-2)


def multiply(x, v, u, kind):
    """x (..., N) -> (..., M) through both factors."""
    if kind == "lowrank":
        return linear(linear(x, v), u)                     # (..., R) -> (..., M)
    if kind == "blockdense":
        return linear(block_diagonal(x, v), u)             # (..., R) -> (..., M)
    return dealt_block_diagonal(block_diagonal(x, v), u)   # (..., B K) -> (..., M)


def product(v, u, kind):
    """The dense matrix (M, N) of a pair of factors, in their dtype: what they make of the identity."""
    n_in = v.shape[-1] * (1 if v.ndim == 2 else len(v))
    return multiply(torch.eye(n_in, dtype=v.dtype, device=v.device), v, u, kind).T.contiguous()


class StructuredLinear(nn.Module):
    """
    x (..., N) -> (..., M) by two factors, without bias; computes in x's dtype. Training adds the guide, if add_guides() has given one.
    ValueError if rank and blocks do not fit the sizes (factor_shapes).
    """

    def __init__(self, n_in, n_out, kind, rank=0, blocks=0):
        super().__init__()
        self.n_in, self.n_out, self.kind = n_in, n_out, kind
        v, u = factor_shapes(kind, n_in, n_out, rank, blocks)
        self.v, self.u = nn.Parameter(torch.empty(v)), nn.Parameter(torch.empty(u))
        self.register_parameter("guide", None)             # (M, N) while training is guided
        self.register_buffer("alpha", None, persistent=False)                          # its weight, 0-d: a number would be compiled in
        self.use_guide = True                              # stochastic saving: decided outside, so that a recomputed forward agrees
        self.register_buffer("merged", None, persistent=False)                         # pre-merge, (M, N)
        self.merge_below = 0                               # up to how many tokens it is used

    def extra_repr(self):
        return f"{self.n_in} -> {self.n_out}, {self.kind}, v {tuple(self.v.shape)}, u {tuple(self.u.shape)}"

    def forward(self, x):
        if self.merged is not None and x.numel() <= self.merge_below * self.n_in:
            return linear(x, self.merged)                  # (..., M)
        v, u = self.v.to(x.dtype), self.u.to(x.dtype)
        if self.guide is None or not self.training:        # the released code guides validation too, with noise
            return multiply(x, v, u, self.kind)
        if not self.use_guide:                             # a zero gradient, not none: DDP waits for every parameter
            return multiply(x, v + 0 * self.guide[0, 0].to(x.dtype), u, self.kind)
        a = self.alpha.to(x.dtype)
        return a * linear(x, self.guide.to(x.dtype)) + (1 - a) * multiply(x, v, u, self.kind)

    @torch.no_grad()
    def merge(self):
        """The dense matrix (M, N) that this layer multiplies by, in the factors' dtype."""
        return product(self.v, self.u, self.kind)

    def train(self, mode=True):
        if mode:
            self.merged = None                             # it would be stale after the next update
        return super().train(mode)


# -----------------------------------------------------------------------------
# in a model


def replace_linears(model):
    """Put structured layers in place of the MLP's matrices, in every block but the first. Uninitialised, like those they replace."""
    c = model.config
    for block in model.model.layers[1:]:
        for name, linear in list(block.mlp.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(block.mlp, name, StructuredLinear(linear.in_features, linear.out_features, c.ffn, c.ffn_rank, c.ffn_blocks))


def check(config):
    """ValueError, one line, if an ApertusConfig asks for structured layers that its sizes do not allow."""
    for sizes in ((config.n_embd, config.ffn_width), (config.ffn_width, config.n_embd)):
        factor_shapes(config.ffn, *sizes, config.ffn_rank, config.ffn_blocks)
    if config.n_layer < 2:
        raise ValueError(f"ffn={config.ffn!r} with n_layer=1 would change nothing: the first layer stays dense")


def initial(name, config, draw):
    """
    The initial value, fp64, of the parameter `name` (LAYER.v, LAYER.u or LAYER.guide); like every other, a pure function of seed and name.

    lowrank: the best rank-R approximation of the matrix that the dense model of this seed starts from, its singular values split evenly
    between the factors. Blocks: normal noise made orthogonal, all singular values 1. Guide: the product. draw(name, shape): the noise.
    Source: post_init of the released code.
    """
    owner, _, leaf = name.rpartition(".")
    n_in, n_out = (config.ffn_width, config.n_embd) if owner.endswith("down_proj") else (config.n_embd, config.ffn_width)
    if config.ffn == "lowrank":
        U, S, Vh = torch.linalg.svd(draw(owner + ".weight", (n_out, n_in)).double(), full_matrices=False)
        root = S[:config.ffn_rank].sqrt()
        v, u = root[:, None] * Vh[:len(root)], U[:, :len(root)] * root
    else:
        shapes = factor_shapes(config.ffn, n_in, n_out, config.ffn_rank, config.ffn_blocks)
        v, u = (orthogonal(draw(f"{owner}.{leaf}", shape).double()) for leaf, shape in zip("vu", shapes))
    return v if leaf == "v" else u if leaf == "u" else product(v, u, config.ffn)


def orthogonal(w):
    """Each block of w (..., m, n) with all its singular values set to 1: the orthogonal factor of its polar decomposition."""
    U, _, Vh = torch.linalg.svd(w, full_matrices=False)
    return U @ Vh


def structured_layers(model):
    """{name: StructuredLinear} of a model, in order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, StructuredLinear)}


def dense_parameters(model):
    """(name, tensor) of the equivalent dense model, one at a time: factors as the matrix they multiply to, guides left out."""
    layers = structured_layers(model)
    for name, p in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner not in layers:
            yield name, p.detach()
        elif leaf == "u":
            yield owner + ".weight", layers[owner].merge()


# -----------------------------------------------------------------------------
# self-guided training


def guided_steps(config):
    """How many steps of a run are guided: the share self_guided of all. config: a run's settings (dict), as in config.json."""
    from schedule import steps_in
    share = config.get("self_guided", 0.0)
    if not share:
        return 0
    if not 0 < share <= 1 or config["ffn"] == "dense":
        raise ValueError(f"self_guided={share} with ffn={config['ffn']!r}: want a share of the run in [0, 1], and a structured --ffn")
    return int(share * steps_in(config["total_samples"], config["batch_size"], config["batch_ramp_at"] or None))


def guide_weight(step, last):
    """a at `step`: half a cosine from 1 at step 0 to 0 at `last` and after. Source: CosineTempDecay of the released code."""
    return (1 + math.cos(math.pi * step / last)) / 2 if step < last else 0.0


def add_guides(model):
    """
    Give each structured layer a dense guide that starts as its product, so that the first loss is the same with it. (The released
    BlockShuffle guide is not the product: it forgets the shuffles, and is as far from it as an unrelated matrix, sqrt(2) of its norm.)
    To be called before the optimizer is built and the model is wrapped or sharded.
    """
    for layer in structured_layers(model).values():
        layer.guide = nn.Parameter(layer.merge())
        layer.alpha = torch.ones((), device=layer.guide.device)
    torch._dynamo.config.recompile_limit = 16              # blocks share code: dense or not, guided or not by two coins, training or not


def set_guides(model, step, last, stochastic=False, micro=0, seed=28):
    """
    Set the guides for a forward and backward pass: a pure function of the step, so there is nothing to save or to replay.

    stochastic: use the mixture with probability a and the factors alone otherwise, each layer by its own coin: half the guide's FLOPs
    over a cosine. The coins are hashes of (seed, step, micro-batch, layer), flipped here and not in forward(): recomputing a forward
    pass for its activations meets the same ones. micro: number of the micro-batch within the step, over all ranks.
    """
    a = guide_weight(step, last)
    for i, layer in enumerate(structured_layers(model).values()):
        if layer.guide is not None:
            layer.alpha.fill_(a)
            coin = int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{micro}/{i}".encode(), digest_size=8).digest()) / 2**64
            layer.use_guide = not stochastic or coin < a


def drop_guides(model, optimizer=None):
    """
    Remove the guides, and what the optimizer keeps of them. Returns how many there were.
    FSDP2 forgets its shards of them too; DDP cannot: wrap the model again.
    """
    layers = [layer for layer in structured_layers(model).values() if layer.guide is not None]
    guides = {id(layer.guide) for layer in layers}
    if optimizer is not None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in guides:
                    optimizer.state.pop(p, None)
            group["params"] = [p for p in group["params"] if id(p) not in guides]
    for layer in layers:
        layer.guide = layer.alpha = None
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):             # private: torch has no way to take a parameter out of a sharded module
            for group in fsdp_groups(module._get_fsdp_state()):
                group.fsdp_params = [p for p in group.fsdp_params if not is_guide(p)]
    return len(layers)


def fsdp_groups(state):
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]     # torch 2.13, 2.11
    return [g for g in groups if g is not None]


def is_guide(fsdp_param):
    where = fsdp_param._module_info
    return isinstance(where.module, StructuredLinear) and where.param_name == "guide"


# -----------------------------------------------------------------------------
# decoding


def timed(f, device, seconds=0.1):
    """Seconds of one call of f: the median of at least five, after a warm-up. On one CPU thread its own time: others' load stays out."""
    cuda = torch.device(device).type == "cuda"
    clock = time.perf_counter if cuda or torch.get_num_threads() > 1 else time.process_time
    f()
    times, began = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < seconds:
        if cuda:
            torch.cuda.synchronize()
        start = clock()
        f()
        if cuda:
            torch.cuda.synchronize()
        times.append(clock() - start)
    return sorted(times)[len(times) // 2]


@torch.no_grad()
def premerge(model, below=None, counts=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)):
    """
    Let decoding use the merged matrices for inputs of up to `below` tokens. below None: measured, the largest of `counts` at which, and at
    all smaller ones, the merged matrices of the whole model are at least 5 % faster than its factors; 0 (nothing is kept) if none is.
    Costs the dense matrices' memory. Returns the count. Source: arXiv 2406.16450 sec. 3.2; the released code has no such function.
    """
    model.eval()
    layers = list(structured_layers(model).values())
    dtype = getattr(model, "dtype", None) or next(model.parameters()).dtype
    if below != 0:
        for layer in layers:
            layer.merged = layer.merge().to(dtype)

    def cost(n, limit):
        for layer in layers:
            layer.merge_below = limit
        inputs = {size: torch.ones(n, size, dtype=dtype, device=layers[0].v.device) for size in {layer.n_in for layer in layers}}
        return timed(lambda: [layer(inputs[layer.n_in]) for layer in layers], layers[0].v.device, 0.03)   # in turn: none stays in a cache

    if below is None:
        below = 0
        for n in counts if layers else ():
            if cost(n, n) > 0.95 * cost(n, 0):
                break
            below = n
    for layer in layers:
        layer.merge_below = below
        layer.merged = layer.merged if below else None
    return below


# -----------------------------------------------------------------------------
# counting and timing


def ffn_params(n_layer, width, ffn, kind, rank=0, blocks=0):
    """Parameters of all MLPs of a model whose first is dense: two matrices each, width -> ffn -> width."""
    dense = 2 * width * ffn
    if kind == "dense":
        return n_layer * dense
    shapes = factor_shapes(kind, width, ffn, rank, blocks) + factor_shapes(kind, ffn, width, rank, blocks)
    return dense + (n_layer - 1) * sum(map(math.prod, shapes))


def training_flops(n_layer, width, ffn, vocab, block_size, tokens):
    """Training FLOPs as the paper counts them: 3 x forward, attention without the causal half. ffn: parameters of all MLPs."""
    matrices = 4 * n_layer * width**2 + ffn + vocab * width
    return 3 * tokens * (2 * matrices + 4 * n_layer * block_size * width)


# arXiv 2406.16450, Tables 1 and 2: layers, width, tokens, form, rank, blocks; FFN parameters in millions (None: not given), FLOPs
PUBLISHED = [
    (24, 2048, 25.5e9, "dense", 0, 0, 805, "2.10e+20"),
    (24, 2048, 25.5e9, "lowrank", 1024, 0, 516, "1.66e+20"),
    (24, 2048, 25.5e9, "blockdense", 1536, 4, 486, "1.61e+20"),
    (24, 2048, 25.5e9, "blockshuffle", 0, 2, 516, "1.66e+20"),
    (24, 2048, 25.5e9, "lowrank", 512, 0, 275, "1.29e+20"),
    (24, 2048, 25.5e9, "blockdense", 768, 4, 260, "1.27e+20"),
    (24, 2048, 25.5e9, "blockshuffle", 0, 4, 275, "1.29e+20"),
    (24, 1024, 6.7e9, "dense", 0, 0, None, "1.55e+19"),
    (24, 1536, 14.58e9, "dense", 0, 0, None, "7.03e+19")]


def print_published():
    print("layers width  form          rank blocks    FFN M (published)       FLOPs (published)")
    for n_layer, width, n_tokens, kind, rank, blocks, millions, flops in PUBLISHED:
        ffn = ffn_params(n_layer, width, 4 * width, kind, rank, blocks)
        ours = training_flops(n_layer, width, ffn, 32000, 1024, n_tokens)
        row = f"{n_layer:6} {width:5}  {kind:12} {rank:5} {blocks:6} {ffn / 1e6:8.0f} ({millions or 'not given'})"
        print(row.ljust(62) + f"{ours:.2e} ({flops})")


def forms(width):
    """(form, rank, blocks) at 63 % and at 32 % of the MLP's parameters: 5/8 and 5/16 of an MLP of 4 x width, ranks rounded to even."""
    return [("dense", 0, 0),
            ("lowrank", width // 2, 0), ("blockdense", 2 * width // 3 // 2 * 2, 2), ("blockshuffle", 0, 2),
            ("lowrank", width // 4, 0), ("blockdense", width // 3 // 2 * 2, 2), ("blockshuffle", 0, 4)]


if __name__ == "__main__":
    from configurator import run
    run(print_published, globals())
