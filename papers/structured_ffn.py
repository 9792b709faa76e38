"""
Structured feed-forward layers: each matrix of the MLP as a product of two smaller ones. Off by default.

    y = W x with W (M, N) becomes                               parameters               63 % of the MLP, M = 4N
    lowrank         U (V x)          V (R, N),   U (M, R)       R (N + M)                R = N/2
    blockdense      U (V_b x)        V_b in B blocks            R (N/B + M)              R = 2N/3, B = 2
    blockshuffle    S' U_b S V_b x   both in B blocks           min(N, M) (N + M) / B    B = 2 (Monarch)

V_b multiplies B slices of x separately. S deals the result out like cards, so that each block of U_b reads a share of
every slice. Everything is linear, so the product is one dense matrix, merge().

Self-guided training: factors learn slowly at first, because the gradient of U needs a good V and vice versa. A dense
guide W starts as their product, does the work at first and fades out:

    o = a W x + (1 - a) U V x,      a = (1 + cos(pi step / last)) / 2,      and at step `last` W is removed.

Another paper, not Apertus: Wei et al., "Building on Efficient Foundations" (arXiv 2406.16450, NeurIPS 2024). Code:
CLAIRE-Labo/StructuredFFN. Monarch: Dao et al., arXiv 2204.00595.

Claim           With self-guided training and equal FLOPs, a 1.3B model with 32 % of the parameters of its MLPs comes
                within 0.4 perplexity of the dense model.
Reproduced      The layers, initial values, guide and its schedule, and the parameter and FLOP counts of Tables 1 and 2
                (tests/test_structured_ffn.py). The MLP of Apertus has no gate: its two matrices are the paper's.
Not reproduced  The perplexities, which took 25.5B tokens. In 0.3M tokens low rank beats dense, and self-guided training
                does not help (results/structured/table.md).

$ python -m papers.structured_ffn configs/laptop.py --ffn=lowrank --ffn_rank=96 --self_guided=0.5
$ python -m papers.structured_ffn --merge=out/run --out=out/hf         # the equivalent dense model, for transformers
"""

import hashlib
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import convert
import train
from ademamix import build_optimizer
from configurator import run as run_script, settings
from data import ahead, started_stages
from engine.checks import check_settings

# Before torch: engine.hardware sets environment variables that torch reads when it loads.
from engine.hardware import can_compile, pick_device, pick_dtype
from engine.parallel import Ranks, distribute, orderly_exit
from engine.restore import find_checkpoint, load as load_checkpoint, read_manifest
from engine.run import Run
from engine.runs import settings_of
from engine.sharding import draw
from model import Apertus, ApertusConfig
from schedule import Plan, steps_in
from tokenizer import load_for

# The settings of train.py, and these.
ffn = "lowrank"                 # lowrank | blockdense | blockshuffle
ffn_rank = 0                    # rank of lowrank and blockdense
ffn_blocks = 0                  # number of blocks of blockdense and blockshuffle
self_guided = 0.0               # share of the run in which a fading dense guide helps the structured layers
guide_saving = False            # compute a guide only with the probability of its weight: saves half of its FLOPs
merge = ""                      # a run folder: export its dense equivalent to --out, instead of training

# Letters: N inputs, M outputs, R rank, B blocks.

KINDS = "lowrank", "blockdense", "blockshuffle"


def factor_shapes(kind, n_out, n_in, rank, blocks):
    """
    The shapes of V and U for a matrix (n_out, n_in). Source: arXiv 2406.16450 sec. 3.1.

    kind: one of KINDS. lowrank ignores blocks, blockshuffle ignores rank. ValueError: they do not fit the matrix.
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
    width = rank if kind == "blockdense" else n_out
    if blocks < 1 or n_in % blocks or width % blocks:
        raise ValueError(f"ffn={kind!r}: ffn_blocks={blocks} must divide {n_in} and {width}: "
                         f"try ffn_blocks={math.gcd(n_in, width, 4)}")
    if kind == "blockdense":
        return (blocks, rank // blocks, n_in // blocks), (n_out, rank)
    # Of the two block-diagonal matrices, the one at the narrow side has square blocks.
    small = most // blocks
    return (blocks, small, n_in // blocks), (blocks, n_out // blocks, small)


def multiply(x, v, u):
    """x (..., N) -> (..., M) through both factors, each a matrix or block-diagonal."""
    if v.ndim == 2:
        h = F.linear(x, v)                                         # (..., R)
    else:
        slices = x.unflatten(-1, (len(v), -1))                     # (..., B, N/B)
        h = torch.einsum("...bi,boi->...bo", slices, v).flatten(-2)
    if u.ndim == 2:
        return F.linear(h, u)                                      # (..., M)
    # Block b reads h[b], h[b + B], h[b + 2B], ... and writes to y at the same distances.
    dealt = h.unflatten(-1, (-1, len(u)))                          # (..., min(N, M)/B, B)
    return torch.einsum("...ib,boi->...ob", dealt, u).flatten(-2)  # (..., M/B, B) -> (..., M)


def product(v, u):
    """The dense matrix (M, N) of a pair of factors, in their dtype: the identity multiplied by both."""
    identity = torch.eye(v[..., 0, :].numel(), dtype=v.dtype, device=v.device)
    return multiply(identity, v, u).T.contiguous()


class StructuredLinear(nn.Module):
    """x (..., N) -> (..., M) by factors of the shapes v and u, without bias. Computes in x's dtype."""

    def __init__(self, v, u):
        super().__init__()
        self.v = nn.Parameter(torch.empty(v))
        self.u = nn.Parameter(torch.empty(u))
        # While training is guided: the guide (M, N) and its weight, a tensor () because a number would be compiled in.
        self.register_parameter("guide", None)
        self.register_buffer("alpha", None, persistent=False)
        # Stochastic saving. It is decided outside of forward(), so that a recomputed forward pass decides the same.
        self.use_guide = True

    def forward(self, x):
        v = self.v.to(x.dtype)
        u = self.u.to(x.dtype)
        # Validation uses the factors alone. The released code guides it too, at random, which adds noise.
        if self.guide is None or not self.training:
            return multiply(x, v, u)
        guide = self.guide.to(x.dtype)
        if not self.use_guide:
            # With ddp all ranks must add up the same gradients, and another rank may use this guide. So its gradient
            # here is zero and not absent.
            return multiply(x, v + 0 * guide[0, 0], u)
        # In fp32: 1 - alpha is the factors' share of the gradient, and bf16 would round it to nothing at first.
        return self.alpha * F.linear(x, guide) + (1 - self.alpha) * multiply(x, v, u)

    @torch.no_grad()
    def merge(self):
        """The dense matrix (M, N) that equals the two factors, in their dtype."""
        return product(self.v, self.u)


# -----------------------------------------------------------------------------
# in a model


def build(model, settings):
    """
    Replace the MLP's matrices by structured layers in every block but the first, with initial values of their own.

    settings: the run's; it uses ffn, ffn_rank and ffn_blocks. ValueError: the model's sizes do not allow them.
    """
    if model.config.n_layer < 2:
        raise ValueError("structured layers with n_layer=1 would change nothing: the first layer stays dense, "
                         "use --n_layer=2 or more")
    model.structured = settings["ffn"]
    for block in model.model.layers[1:]:
        for name, dense in list(block.mlp.named_children()):
            if isinstance(dense, nn.Linear):
                shapes = factor_shapes(
                    model.structured,
                    *dense.weight.shape,
                    settings["ffn_rank"],
                    settings["ffn_blocks"])
                setattr(block.mlp, name, StructuredLinear(*shapes))
    model.initial = partial(initial, model.initial, structured_layers(model))


def structured_layers(model):
    """{name: StructuredLinear} of a model, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, StructuredLinear)}


def initial(draw, layers, name, shape, seed):
    """
    The initial values of the parameter `name`, fp64 if a structured layer owns it. All others come from draw.

    lowrank: the best approximation of rank R of the matrix that the dense model of this seed starts with, its singular
    values split evenly between the factors. Blocks: noise made orthogonal, all singular values 1. Guide: the product.
    draw(name, shape, seed): the noise. layers: {name: StructuredLinear}. Source: post_init of the released code.
    """
    owner, _, leaf = name.rpartition(".")
    if owner not in layers:
        return draw(name, shape, seed)
    v = layers[owner].v.shape
    u = layers[owner].u.shape
    if len(v) == 2:
        R, n_in = v
        dense = draw(owner + ".weight", (u[0], n_in), seed).double()
        U, S, Vh = torch.linalg.svd(dense, full_matrices=False)
        root = S[:R].sqrt()
        v = root[:, None] * Vh[:R]
        u = U[:, :R] * root
    else:
        v = orthogonal(draw(owner + ".v", v, seed))
        u = orthogonal(draw(owner + ".u", u, seed))
    if leaf == "guide":
        return product(v, u)
    return v if leaf == "v" else u


def orthogonal(w):
    """Each block of w (..., m, n) with its singular values set to 1: the orthogonal factor of its polar form."""
    U, _, Vh = torch.linalg.svd(w.double(), full_matrices=False)
    return U @ Vh


def restore(model, settings, step):
    """Give a model the structured layers, and guides if any, of a checkpoint at `step`. settings: of its run."""
    build(model, settings)
    guides = Guides(settings)
    if step < guides.last:
        guides.join(model)


def load(folder):
    """The trained Apertus with structured layers of a run folder, without guides."""
    settings = settings_of(folder)
    path = convert.weights_in(folder)
    model = Apertus(ApertusConfig.of(settings), seed=None)
    restore(model, settings, read_manifest(path)["step"])
    convert.fill(model, path)
    drop_guides(model)
    return model


@torch.no_grad()
def dense(model):
    """The Apertus that equals a model with structured layers: each pair of factors becomes its product."""
    layers = structured_layers(model)
    equivalent = Apertus(model.config, seed=None)
    for name, p in equivalent.named_parameters():
        owner = name.removesuffix(".weight")
        p.copy_(layers[owner].merge() if owner in layers else model.get_parameter(name))
    return equivalent


def export(folder, out):
    """Write the dense equivalent of a run as a Hugging Face folder."""
    convert.save_hf(dense(load(folder)), out, load_for(folder))
    print(f"wrote {out}: transformers.AutoModelForCausalLM.from_pretrained({out!r}) reads it")


# -----------------------------------------------------------------------------
# self-guided training


def guided_steps(config):
    """The number of guided steps: the share self_guided of all. config: the run's settings, as in config.json."""
    share = config.get("self_guided")
    if not share:
        return 0
    if not 0 < share <= 1 or config["ffn"] == "dense":
        raise ValueError(f"self_guided={share} with ffn={config['ffn']!r}: want a share of the run in [0, 1], and a "
                         "structured --ffn")
    return int(share * steps_in(config["total_samples"], config["batch_size"], config["batch_ramp_at"] or None))


def drop_guides(model, optimizer=None):
    """Remove the guides, their optimizer states and FSDP2's shards."""
    for layer in structured_layers(model).values():
        if optimizer:
            optimizer.state.pop(layer.guide, None)
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not layer.guide]
        layer.guide = layer.alpha = None
    # FSDP2 has no public function to remove a parameter. Its groups are a list in torch 2.13; in 2.11 there is one, or
    # None.
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            state = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                if group:
                    group.fsdp_params = [p for p in group.fsdp_params if p._module_info.param_name != "guide"]


class Guides:
    """
    The guided steps of a run with structured layers. config: its settings (dict), as in config.json.

    ValueError: self_guided is not a share of the run, or the layers are dense.
    """

    def __init__(self, config):
        self.config = config
        self.last = guided_steps(config)

    def join(self, model):
        """
        Give each structured layer a dense guide that starts as its product, so that the first loss stays the same.

        (The released BlockShuffle guide is not the product: it omits the shuffles, and is as far from it as an
        unrelated matrix.) Call this before the model is sharded and the optimizer is built.
        """
        self.model = model
        if self.last:
            for layer in structured_layers(model).values():
                layer.guide = nn.Parameter(layer.merge())
                layer.alpha = torch.ones((), device=layer.guide.device)
            # Blocks share compiled code, in more variants than torch allows by default: dense or not, training or not,
            # and each layer guided or not.
            torch._dynamo.config.recompile_limit = 16

    def set(self, step, micro):
        """
        Set the guides before a micro-batch: a pure function of the step, so there is nothing to save.

        guide_saving: each layer uses the mixture with probability a and the factors alone otherwise, which saves half
        of the guide's FLOPs over a cosine. The coins are hashes of (seed, step, micro, layer), so that a recomputed
        forward pass meets the same ones. micro: number of the micro-batch within the step, over all ranks.
        """
        if step >= self.last:
            return
        # CosineTempDecay of the released code.
        a = (1 + math.cos(math.pi * step / self.last)) / 2
        for i, layer in enumerate(structured_layers(self.model).values()):
            key = f"{self.config['seed']}/{step}/{micro}/{i}".encode()
            coin = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
            layer.alpha.fill_(a)
            layer.use_guide = not self.config["guide_saving"] or coin < a

    def end(self, done, optimizer, config=None):
        """
        Remove the guides after the last guided step; done: steps so far. Returns whether this call removed them.

        Called after each update, and before a checkpoint is loaded, then with the checkpoint's config: its run may have
        been planned shorter.
        """
        if not self.last or done < guided_steps(config or self.config):
            return False
        drop_guides(self.model, optimizer)
        self.last = 0
        return True


# -----------------------------------------------------------------------------
# the run: as train.py, with guides


def train_guided(run, plan, model, optimizer, windows, val, rows, guides):
    """The loop of train.py; it sets the guides before each micro-batch, and removes them after the last guided step."""
    ranks = run.ranks
    batches = ahead(lambda step: windows.batch(*plan.samples_of(step, ranks.group, ranks.groups)), run.done)
    for step in run.steps():
        batch, loss = next(batches), 0
        n_kept, n_all = ranks.all_reduce(batch.keep.sum(), batch.keep.numel())
        parts = batch.split(rows, run.device)
        for i, part in enumerate(run.micro_batches(model, parts)):
            guides.set(step, ranks.group * len(parts) + i)
            part_loss = model.loss(*part, n_tokens=max(n_kept, 1))
            part_loss.backward()
            loss = loss + part_loss.detach()
        if run.interrupted:
            break

        loss, norm = run.reduce(model, loss)
        rate = plan.lr(step)
        if run.is_finite(step, loss, norm):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step(grad_scale=min(1.0, train.grad_clip / (norm + 1e-6)) if train.grad_clip else 1.0)
        guides.end(step + 1, optimizer)
        optimizer.zero_grad()

        run.log_step(step, plan.tokens(step), n_all, dict(loss=loss), norm, lr=rate, kept=n_kept / n_all)
        if run.validation_due(step + 1, train.eval_every):
            run.log_validation(step, plan.tokens(step), train.validate(run, model, val, train.eval_windows, rows, None))
        run.save_if_due(step + 1, model, optimizer, **plan.saved())


def main():
    t = train
    if merge:
        export(merge, t.out)
        return
    check_settings(settings(vars(t)), by_clock=False)
    ranks = Ranks(t.parallel, t.exact, t.hsdp_shard)
    where = ranks.place(pick_device(t.device))
    compiled = t.compile and can_compile(where)
    config = ApertusConfig(**vars(t.shape))
    windows, val = t.open_data(config)
    about = settings(globals(), vars(t), config) | dict(
        data_hash=windows.fingerprint, tokenizer=windows.meta["tokenizer"], minutes=0.0)
    guides = Guides(about)
    plan = Plan(t.schedule, t.lr, t.min_lr, t.warmup_samples, t.total_samples, t.decay_samples, t.batch_size,
                t.batch_ramp_at, config.block_size, windows.stop, t.total_samples - t.decay_samples)
    rows = ranks.micro_batch(t.batch_size, t.micro_batch)

    with Run(about, ranks, where) as run:
        found = find_checkpoint(run, plan, started_stages) if t.resume else None
        with torch.device("meta" if ranks.sharded else where):
            model = Apertus(config, seed=None)
            build(model, about)
            guides.join(model)
        model.dtype = pick_dtype(t.dtype, where)
        distribute(model, ranks, where, t.recompute, compiled)
        if not found:
            draw(model, t.seed) if ranks.sharded else model.init_weights(t.seed)
        warm = min(plan.steps(t.total_samples), 100_000)
        opt = build_optimizer(model, t.optimizer, t.lr, t.betas, t.alpha, t.eps, t.weight_decay, t.alpha_warmup or warm,
                              t.beta3_warmup or warm, compiled, t.state_dtype)
        if found:
            guides.end(found[1]["step"], opt, found[1]["config"])
            load_checkpoint(found[0], model, opt)
        if ranks.is_main:
            t.introduce(run, plan, model, windows)
            # transformers' Apertus has no such layers.
            convert.describe(t.out, about, config, load_for(t.data), is_apertus=False)
        run.open(plan.end, found, model.flops_per_token(val.T) / ranks.size)
        train_guided(run, plan, model, opt, windows, val, rows, guides)
        if run.close(model, opt, **plan.saved()):
            t.finish(run, plan, model, val, rows, None)
        run.leave(convert.complete)


if __name__ == "__main__":
    with orderly_exit():
        run_script(main, globals(), vars(train), train.shape)
