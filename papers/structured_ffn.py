"""
Structured feed-forward layers: each matrix of the MLP as a product of two smaller ones.

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
$ python -m papers.structured_ffn --merge=out/laptop --save=out/hf     # the equivalent dense model, for transformers
"""

import sys

if __name__ == "__main__" and not __package__:
    print("structured_ffn.py: start it from the project's root, python -m papers.structured_ffn", file=sys.stderr)
    sys.exit(2)

import hashlib
import math
from contextlib import suppress

# Before torch: engine.hardware sets environment variables that torch reads when it loads.
from engine.hardware import can_compile, pick_device, pick_dtype

# isort: split
import torch
import torch.nn.functional as F
from torch import nn

import configurator
import convert
import train
from ademamix import build_optimizer, optimizer_step
from data import prefetch, started_stages
from engine import memory, restore
from engine.checks import check_settings
from engine.clock import DecayClock, decay_state
from engine.parallel import Ranks, check_finite, distribute, orderly_exit, reduce_step
from engine.run import Run, StepInterrupted
from engine.sharding import draw
from model import Apertus, ApertusConfig
from sample import sample_of
from schedule import Plan
from tokenizer import load_for

# Settings of this script, next to those of train.py. A resumed run has the same.
ffn = "lowrank"                 # lowrank | blockdense | blockshuffle
ffn_rank = 0                    # rank of lowrank and blockdense
ffn_blocks = 0                  # number of blocks of blockdense and blockshuffle
self_guided = 0.0               # share of the run in which a fading dense guide helps the structured layers
guide_saving = False            # compute a guide only with the probability of its weight: saves half of its FLOPs
# Instead of training:
merge = ""                      # export the dense model that equals this run folder's
save = ""                       # the Hugging Face folder to write

MUST_MATCH = ["ffn", "ffn_rank", "ffn_blocks", "self_guided", "guide_saving"]
# Settings of train.py for which this script has no code, and their defaults.
UNUSED = dict(init_from="", teacher="", fp8=False, sequence_parallel=1)

# -----------------------------------------------------------------------------
# one layer
# Letters: N inputs, M outputs, R rank, B blocks.

FORMS = "lowrank", "blockdense", "blockshuffle"


def factor_shapes(form, n_out, n_in, rank, blocks):
    """
    The shapes of V and U for a matrix (n_out, n_in). Source: arXiv 2406.16450 sec. 3.1.

    form: one of FORMS. lowrank ignores blocks, blockshuffle ignores rank. ValueError: they do not fit the matrix.
    """
    if form not in FORMS:
        raise ValueError(f"ffn={form!r} is not one of {', '.join(FORMS)}")
    most = min(n_in, n_out)
    if form != "blockshuffle" and not 0 < rank <= most:
        raise ValueError(f"ffn={form!r} wants ffn_rank between 1 and {most}, got {rank}: try {most // 2} "
                         "(about 60 % of the parameters)")
    if form == "lowrank":
        return (rank, n_in), (n_out, rank)
    # The number of blocks must divide both sides of V, and in blockshuffle also the outputs of U.
    width = rank if form == "blockdense" else n_out
    if blocks < 1 or n_in % blocks or width % blocks:
        raise ValueError(f"ffn={form!r}: ffn_blocks={blocks} must divide {n_in} and {width}: "
                         f"try ffn_blocks={math.gcd(n_in, width, 4)}")
    if form == "blockdense":
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
    """
    x (..., N) -> (..., M) by factors of the shapes v and u, without bias. Computes in x's dtype.

    guide: the shape (M, N) of a dense guide, or None. While training is guided, the layer computes
    alpha * guide + (1 - alpha) * factors. alpha is a tensor (), because a number would be compiled in.
    """

    def __init__(self, v, u, guide=None):
        super().__init__()
        self.v = nn.Parameter(torch.empty(v))
        self.u = nn.Parameter(torch.empty(u))
        self.register_parameter("guide", nn.Parameter(torch.empty(guide)) if guide else None)
        self.register_buffer("alpha", torch.ones(()) if guide else None, persistent=False)
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

    def set_guide(self, alpha, use_guide):
        """Set the guide's weight, and whether the layer uses it at all in the next micro-batch."""
        self.alpha.fill_(alpha)
        self.use_guide = use_guide

    def drop_guide(self):
        """Keep the factors alone."""
        self.guide = self.alpha = None

    @torch.no_grad()
    def merge(self):
        """The dense matrix (M, N) that equals the two factors, in their dtype."""
        return product(self.v, self.u)


def orthogonal(w):
    """Each block of w (..., m, n) with its singular values set to 1: the orthogonal factor of its polar form."""
    U, _, Vh = torch.linalg.svd(w.double(), full_matrices=False)
    return U @ Vh


# -----------------------------------------------------------------------------
# a model of such layers


class StructuredApertus(Apertus):
    """
    An Apertus without weights whose MLPs, but the first, have structured layers.

    settings: of a run, a dict with ffn, ffn_rank and ffn_blocks; guided: whether each has a dense guide. ValueError:
    the sizes do not allow such layers.
    """

    def __init__(self, config, settings, guided=False):
        super().__init__(config, seed=None)
        if config.n_layer < 2:
            raise ValueError("structured layers with n_layer=1 would change nothing: the first layer stays dense, "
                             "use --n_layer=2 or more")
        form, rank, blocks = (settings[name] for name in ("ffn", "ffn_rank", "ffn_blocks"))
        for block in self.model.layers[1:]:
            for name, dense in list(block.mlp.named_children()):
                if isinstance(dense, nn.Linear):
                    shape = dense.weight.shape
                    factors = factor_shapes(form, *shape, rank, blocks)
                    block.mlp.set_submodule(name, StructuredLinear(*factors, shape if guided else None))

    def structured_layers(self):
        """{name: StructuredLinear}, in order."""
        return {name: module for name, module in self.named_modules() if isinstance(module, StructuredLinear)}

    def initial(self, name, shape, seed):
        """
        The initial values of the parameter `name`, fp64 if a structured layer owns it; of all others as in Apertus.

        lowrank: the best approximation of rank R of the matrix that the dense model of this seed starts with, its
        singular values split evenly between the factors. Blocks: noise made orthogonal, all singular values 1. Guide:
        the product, so that the first loss stays the same. (The released BlockShuffle guide is not the product: it
        omits the shuffles, and is as far from it as an unrelated matrix.) Source: post_init of the released code.
        """
        owner, _, leaf = name.rpartition(".")
        layer = self.get_submodule(owner)
        if not isinstance(layer, StructuredLinear):
            return super().initial(name, shape, seed)
        v = layer.v.shape
        u = layer.u.shape
        if len(v) == 2:
            R, n_in = v
            dense = super().initial(owner + ".weight", (u[0], n_in), seed).double()
            U, S, Vh = torch.linalg.svd(dense, full_matrices=False)
            root = S[:R].sqrt()
            v = root[:, None] * Vh[:R]
            u = U[:, :R] * root
        else:
            v = orthogonal(super().initial(owner + ".v", v, seed))
            u = orthogonal(super().initial(owner + ".u", u, seed))
        return dict(v=v, u=u, guide=product(v, u))[leaf]

    @torch.no_grad()
    def to_dense(self):
        """The Apertus that equals this model: each pair of factors becomes its product, guides do not count."""
        layers = self.structured_layers()
        dense = Apertus(self.config, seed=None)
        for name, p in dense.named_parameters():
            owner = name.removesuffix(".weight")
            p.copy_(layers[owner].merge() if owner in layers else self.get_parameter(name))
        return dense


def load(folder):
    """The trained StructuredApertus of a run folder, on the CPU in fp32, without guides."""
    checkpoint = restore.newest_intact(f"{folder}/ckpt")
    if not checkpoint or "ffn" not in checkpoint[1]["config"]:
        raise ValueError(f"{folder} is not a run of papers.structured_ffn, or has no checkpoint")
    path, manifest = checkpoint
    settings = manifest["config"]
    model = StructuredApertus(ApertusConfig.from_settings(settings), settings, has_guides(checkpoint, settings))
    restore.load(path, model)
    drop_guides(model)
    return model


def export(folder, out):
    """Write the dense equivalent of a run as a Hugging Face folder."""
    if not out:
        raise ValueError(f"merge={folder}: name the folder to write with --save")
    convert.save_hf(load(folder).to_dense(), out, load_for(folder), source=folder)
    print(f"wrote {out}: transformers.AutoModelForCausalLM.from_pretrained({out!r}) reads it")


# -----------------------------------------------------------------------------
# self-guided training


def guided_steps(settings):
    """The number of guided steps of a run: the share self_guided of all. ValueError: it is no share."""
    share = settings["self_guided"]
    if not 0 <= share <= 1:
        raise ValueError(f"self_guided={share}: want a share of the run, from 0 to 1")
    return int(share * Plan.from_settings(settings).steps_in(settings["total_samples"]))


def has_guides(checkpoint, settings):
    """
    Whether a run has guides when it begins, or continues after a checkpoint (path, manifest). That depends on the
    checkpoint's own settings: its run may have been planned shorter.
    """
    if not checkpoint:
        return guided_steps(settings) > 0
    _, manifest = checkpoint
    return manifest["step"] < guided_steps(manifest["config"])


def drop_guides(model, optimizer=None):
    """Remove the guides, their optimizer states and FSDP2's shards."""
    for layer in model.structured_layers().values():
        if optimizer:
            optimizer.state.pop(layer.guide, None)
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not layer.guide]
        layer.drop_guide()
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
    Fades out the guides of a StructuredApertus in its first steps. settings: of the run, a dict.

    guide_saving: each layer uses the mixture with probability alpha and the factors alone otherwise, which saves half
    of the guide's FLOPs over a cosine.
    """

    def __init__(self, model, settings):
        self.model = model
        self.steps = guided_steps(settings)
        self.seed, self.saving = settings["seed"], settings["guide_saving"]
        self.layers = [layer for layer in model.structured_layers().values() if layer.guide is not None]

    def set(self, step, micro):
        """
        Set the guides before a micro-batch: a pure function of the step, so there is nothing to save.

        micro: number of the micro-batch within the step, over all ranks. The coins are hashes of (seed, step, micro,
        layer), so that a recomputed forward pass meets the same ones.
        """
        for i, layer in enumerate(self.layers):
            # CosineTempDecay of the released code.
            alpha = (1 + math.cos(math.pi * step / self.steps)) / 2
            key = f"{self.seed}/{step}/{micro}/{i}".encode()
            coin = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
            layer.set_guide(alpha, not self.saving or coin < alpha)

    def remove_if_over(self, done, optimizer):
        """Remove the guides after the last guided step. done: steps so far."""
        if self.layers and done >= self.steps:
            drop_guides(self.model, optimizer)
            self.layers = []


# -----------------------------------------------------------------------------
# the run: as train.py, with guides


def build_model(shape, settings, ranks, device, compiled=False, checkpoint=None):
    """
    The model of a run on this rank's device: modules, then shards and compiled blocks, then initial weights, unless a
    checkpoint (path, manifest) will fill them. On the device "meta": the modules alone, without memory.
    """
    with torch.device("meta" if ranks.sharded else device):        # distribute() gives shards their memory
        model = StructuredApertus(shape, settings, has_guides(checkpoint, settings))
    if device == "meta":
        return model
    model.dtype = pick_dtype(settings["dtype"], device)
    # Blocks share compiled code, in more variants than torch allows by default: dense or not, training or not, and each
    # layer guided or not.
    torch._dynamo.config.recompile_limit = 16
    distribute(model, ranks, device, settings["recompute"], compiled)
    if not checkpoint and ranks.sharded:
        draw(model, settings["seed"])
    elif not checkpoint:
        model.init_weights(settings["seed"])
    return model


def train_guided(run, plan, clock, model, guides, optimizer, train_data, val_data, micro_batch_size):
    """
    The loop of train.train(), without a teacher, sequence_parallel and init_from. It sets the guides before each
    micro-batch, and removes them after the last guided step.
    """
    ranks = run.ranks
    batches = prefetch(lambda step: train_data.batch(*plan.samples_of(step, ranks.group, ranks.groups)), run.done)
    for step in run.steps():
        batch = next(batches)                              # this rank's samples
        n_kept, n_tokens = ranks.all_reduce(batch.keep.sum(), batch.keep.numel())
        parts = batch.split(micro_batch_size, run.device)
        losses = 0.0
        for i, part in enumerate(run.micro_batches(model, parts)):
            guides.set(step, ranks.group * len(parts) + i)
            denominator = n_kept if train.loss_average == "step" else int(part.keep.sum()) * len(parts) * ranks.groups
            loss = model.loss(*part, n_tokens=max(denominator, 1))
            loss.backward()
            losses += loss.detach().double() if train.exact else loss.detach()
        losses, norm = reduce_step(model, ranks, losses)   # over all ranks
        check_finite(step, losses, norm)
        lr = plan.lr_at(step)
        optimizer_step(optimizer, lr, norm, train.grad_clip)
        guides.remove_if_over(step + 1, optimizer)

        run.log.step(step, loss=losses[0], seconds=run.step_seconds(), tokens_in_step=n_tokens,
                     tokens=plan.tokens_after(step), grad_norm=norm, lr=lr, kept=n_kept / n_tokens)
        if train.eval_every and (step + 1) % train.eval_every == 0 and step + 1 < run.end:
            entry = train.validate(run, model, val_data, train.eval_windows, micro_batch_size)
            run.log.validation(step, tokens=plan.tokens_after(step), **entry)
        if clock.decay_is_due(step):
            clock.begin_decay(step + 1, model, optimizer)
        if train.sample_every and (step + 1 == run.end or (step + 1) % train.sample_every == 0):
            run.log.say(sample_of(model, run.device, train.data, train.seed))
        run.save_if_due(step + 1, model, optimizer, **decay_state(plan))


def check_unused(settings):
    """ValueError for a setting of train.py that this script would ignore."""
    for name, default in UNUSED.items():
        if settings[name] != default:
            raise ValueError(f"{name}={settings[name]!r}: structured layers are trained from initial weights and "
                             f"without this: leave {name} out")


def find_checkpoint(settings, plan, ranks):
    """As restore.find_checkpoint(). ValueError if a setting of this script differs too."""
    checkpoint, decay_at, decayed = restore.find_checkpoint(train.out, settings, plan, started_stages, ranks.save_group)
    if checkpoint:
        path, manifest = checkpoint
        restore.refuse_another(path, manifest["config"], {name: settings[name] for name in MUST_MATCH})
    return checkpoint, decay_at, decayed


def main(requested):
    """requested: the names of the settings that the user has set, the latest last."""
    if merge:
        return export(merge, save)
    by_clock = train.minutes > 0 and configurator.is_set_later(requested, "minutes", "total_samples")
    check_settings(configurator.settings(vars(train)), by_clock)
    check_unused(configurator.settings(vars(train)))
    ranks = Ranks(train.parallel, train.exact, train.hsdp_shard)
    local_device = ranks.local_device(pick_device(train.device))
    compiled = train.compile and can_compile(local_device)
    model_shape = ApertusConfig(**vars(train.shape))
    train_data, val_data = train.open_data(model_shape)
    model_shape.vocab_size = max(model_shape.vocab_size, train_data.meta["vocab_size"])
    settings = configurator.settings(globals(), vars(train), model_shape) | dict(
        data_hash=train_data.fingerprint, tokenizer=train_data.meta["tokenizer"],
        minutes=train.minutes if by_clock else 0.0)
    plan = Plan.from_settings(settings, by_clock, stage_end=train_data.stage_end)
    outline = build_model(model_shape, settings, ranks, "meta")
    micro_batch_size, shards = memory.fit_to_memory(
        outline, settings, ranks, local_device, pick_dtype(train.dtype, local_device), val_data.T,
        ranks.micro_batch(train.batch_size, train.micro_batch))
    ranks.shard_over(shards)
    settings |= dict(micro_batch=micro_batch_size)         # checkpoints hold it, since results depend on it

    with Run(settings, ranks, local_device) as run:
        checkpoint, decayed = None, []
        if train.resume:
            checkpoint, plan.decay_at, decayed = find_checkpoint(settings, plan, ranks)
        model = build_model(model_shape, settings, ranks, local_device, compiled, checkpoint)
        warmup = train.alpha_warmup or min(plan.steps_in(train.total_samples), 100_000)
        opt = build_optimizer(model, train.optimizer, train.lr, train.betas, train.alpha, train.weight_decay, warmup,
                              compiled, train.state_dtype)
        guides = Guides(model, settings)
        if checkpoint:
            path, manifest = checkpoint
            restore.load(path, model, opt)
            guides.remove_if_over(manifest["step"], opt)   # the run may be planned shorter now
        if ranks.is_main:
            train.introduce(run, settings, plan, model, train_data)
            # Not an Apertus for transformers: config.json is written anew.
            convert.write_config(run.out, settings, model_shape, load_for(train.data), is_apertus=False)
            restore.set_aside(run.out, decayed)
        run.begin(settings, plan.end, checkpoint, model.flops_per_token(val_data.T))
        if train.wandb_log:
            run.log.send_to_wandb(settings)
        with suppress(StepInterrupted):                    # the steps before it are saved below
            train_guided(run, plan, DecayClock(run, plan, train.minutes * by_clock), model, guides, opt, train_data,
                         val_data, micro_batch_size)
        finished = run.close(model, opt, **decay_state(plan))
        summary = train.finish(run, plan, model, val_data, micro_batch_size) if finished else None
        ranks.leave()
        train.conclude(run, summary)


if __name__ == "__main__":
    with orderly_exit():
        configurator.run(main, globals(), vars(train), train.shape)
