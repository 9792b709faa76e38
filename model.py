"""
Apertus (Swiss AI, arXiv 2509.14233), 8B and 70B, in one file: a pre-norm decoder

    x = x + Attention(RMSNorm(x))          x = x + W_down xIELU(W_up RMSNorm(x))

that differs from Llama 3 in two places. The feed-forward layer has no gate and a learned activation, xIELU (sec. 2.1).
Queries and keys are normalised before they are rotated (QK-norm). As in Llama 3, a few key-value heads serve all query
heads, RoPE is scaled, and attention stops at document borders. Parameters have the names of the published checkpoints,
so a safetensors file loads without a mapping table (convert.py), and the logits are those of transformers:

$ python -m pytest tests/test_model.py           # logits, loss, gradients and greedy tokens against transformers
$ python sample.py --init_from=swiss-ai/Apertus-8B-Instruct-2509 --chat

Each choice of architecture that the report ablates is a field of ApertusConfig. A cache, adapters and 8-bit weights
attach to a finished model from outside: they replace Attention.attend or Linear modules, or subclass Apertus.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from loss import ChunkedCrossEntropy, at_least_fp32, chunk_loss

# Shapes: B batch, T time, S keys, C channels, H query heads, K key-value heads, D head dim, L layers, V vocabulary.


@dataclass
class ApertusConfig:
    """The defaults are the 8B model in pretraining (Table 1); configs/*.py set the same names."""
    block_size: int = 4096          # T, the window in tokens
    vocab_size: int = 131072        # V, the vocabulary; train.py: 0 = that of the data
    n_layer: int = 32               # L, the layers
    n_head: int = 32                # H, query heads
    n_kv_head: int = 8              # grouped-query attention; n_head = multi-head, 1 = multi-query
    n_embd: int = 4096              # C, the width
    ffn_dim: int = 21504            # 5.25 C: without a gate, 1.5 times Llama 3's width costs the same parameters
    activation: str = "xielu"       # xielu | swiglu | gelu | relu2; swiglu takes 2/3 of ffn_dim for its three matrices
    qk_norm: bool = True            # RMSNorm of queries and keys
    doc_mask: bool = True           # attention inside documents (sec. 2.1); the released runs most likely had False
    tie_embeddings: bool = False    # one matrix for the embedding and the head
    rope_theta: float = 500_000.0   # 12e6 after the long-context stages
    rope_scaling: float = 8.0       # llama3 factor, on from the first step of pretraining; 0 = plain RoPE
    rope_original: int = 8192       # hard-coded in the official code, although pretraining windows are 4096
    rope_low: float = 1.0           # frequencies with fewer turns in rope_original tokens are divided by rope_scaling
    rope_high: float = 4.0          # those with more turns stay as they are; a blend between
    norm_eps: float = 1e-5          # added under the root in RMSNorm
    init_std: float = 0.008944      # 0.02 / sqrt(5) for both sizes; narrow models need more (configs/laptop.py)

    def __post_init__(self):
        if min(self.n_layer, self.n_embd, self.ffn_dim) < 1:
            raise ValueError("n_layer, n_embd and ffn_dim must be at least 1")
        for big, small in (("n_embd", "n_head"), ("n_head", "n_kv_head")):
            a, b = getattr(self, big), getattr(self, small)
            if b < 1 or a % b:
                raise ValueError(f"{big}={a} is not divisible by {small}={b}")
        if self.head_dim % 2:
            raise ValueError(f"head dim {self.n_embd}/{self.n_head} = {self.head_dim} is odd, and RoPE rotates pairs: "
                             "try another n_head")
        if self.activation not in ("xielu", "swiglu", "gelu", "relu2"):
            raise ValueError(f"activation={self.activation!r} is not one of xielu, swiglu, gelu, relu2")

    @classmethod
    def of(cls, settings):
        """The shape among the settings of a run, a dict as in train.py or config.json."""
        return cls(**{name: settings[name] for name in cls.__dataclass_fields__ if name in settings})

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def ffn_width(self):
        """Hidden width. SwiGLU has three matrices instead of two: 2/3 of the width, to a multiple of 8 (8B: 14336)."""
        if self.activation != "swiglu":
            return self.ffn_dim
        return 8 * max(1, round(self.ffn_dim * 2 / 3 / 8))


class Linear(nn.Linear):
    """
    A matrix without bias. Its fp32 weight is cast to the dtype of the activations where it is used.

    So autocast is not needed, and bf16 copies of the weights live for one micro-batch only.
    """

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def reset_parameters(self):
        pass                                               # once, in Apertus.init_weights

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; squares of bf16 are summed in fp32."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class XIELU(nn.Module):
    """
    xIELU (arXiv 2411.13010; sec. 2.1): a parabola on the right, an integrated ELU on the left; both curvatures learned.

        x > 0:   alpha_p x^2 + beta x                            alpha_p = softplus(a_p)
        x <= 0:  alpha_n (exp(x) - 1) - alpha_n x + beta x       alpha_n = beta + softplus(a_n),  beta = 0.5

    Value and slope at 0 are 0 and beta, except in -1e-6 < x <= 0, where exp is clamped (EPS). Both alphas start at 0.8.
    The parameters alpha_p and alpha_n hold a_p and a_n, as in the checkpoints. Their shape is (1,), because fully_shard
    rejects 0-d parameters.
    """
    BETA = 0.5
    EPS = -1e-6                                            # upper clamp of the argument of exp

    def __init__(self):
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))

    def forward(self, x):
        # Eager autograd would keep four fp32 tensors and a bool one, 366 kB per token and layer of the 8B, so they are
        # recomputed from x. torch.compile decides that by itself.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.formula(x)
        return checkpoint(self.formula, x, use_reentrant=False, preserve_rng_state=False)

    def formula(self, x):
        # In fp32, which costs nothing: torch.compile fuses the casts away. FSDP gathers the scalars in the dtype of x,
        # so they are rounded to it without FSDP too (torch.compile may drop that rounding).
        z = at_least_fp32(x)
        alpha_p = F.softplus(at_least_fp32(self.alpha_p.to(x.dtype)))
        alpha_n = self.BETA + F.softplus(at_least_fp32(self.alpha_n.to(x.dtype)))
        # Unclamped, exp of a large x is infinite, and its gradient inf * 0 = nan although the branch is not taken.
        exp_minus_1 = torch.expm1(z.clamp(max=self.EPS))
        left = alpha_n * (exp_minus_1 - z)
        right = alpha_p * z * z
        y = torch.where(z > 0, right, left) + self.BETA * z
        return y.to(x.dtype)


class MLP(nn.Module):
    """up -> activation -> down. SwiGLU, for the ablation, adds a gate and has 2/3 of the width."""

    def __init__(self, config):
        super().__init__()
        self.activation = config.activation
        if config.activation == "swiglu":
            self.gate_proj = Linear(config.n_embd, config.ffn_width)
        self.up_proj = Linear(config.n_embd, config.ffn_width)
        self.down_proj = Linear(config.ffn_width, config.n_embd)
        if config.activation == "xielu":
            self.act_fn = XIELU()

    def forward(self, x):
        h = self.up_proj(x)                                # (B, T, 5.25 C)
        if self.activation == "xielu":
            h = self.act_fn(h)
        elif self.activation == "swiglu":
            h = F.silu(self.gate_proj(x)) * h
        elif self.activation == "gelu":
            h = F.gelu(h)
        else:
            h = F.relu(h).square()
        return self.down_proj(h)                           # (B, T, C)


def rope_frequencies(config, device=None):
    """
    The D/2 angular frequencies (D/2,) fp32, scaled "by parts" as in Llama 3 (sec. 2.1).

    With the wavelength w = 2 pi / f: unchanged where w < original / high, f / factor where w > original / low, and a
    linear blend between. At theta 500k these are 29, 29 and 6 of the 64 frequencies.
    """
    even = torch.arange(0, config.head_dim, 2, device=device).float()
    f = 1.0 / config.rope_theta ** (even / config.head_dim)
    if not config.rope_scaling:
        return f
    turns = config.rope_original * f / (2 * math.pi)       # full turns within the original context
    keep = (turns - config.rope_low) / (config.rope_high - config.rope_low)
    keep = keep.clamp(0, 1)
    return (1 - keep) * f / config.rope_scaling + keep * f


def rotate(x, cos, sin):
    """Rotate (B, heads, T, D) by position. Halves are paired, i with i + D/2. cos, sin: (1, T, D) or (B, 1, T, D)."""
    a, b = x.chunk(2, dim=-1)
    turned = torch.cat((-b, a), dim=-1)
    return x * cos + turned * sin


def attend(q, k, v, doc=None):
    """
    Causal softmax attention, inside documents if `doc` is given. q (B, H, T, D), k and v (B, K, T, D) -> (B, H, T, D).

    doc: None, or the result of document_mask(): a BlockMask for flex_attention, or the ids (B, T).
    """
    if doc is None:
        return masked_attention(q, k, v)
    if not isinstance(doc, torch.Tensor):
        return flex_attention(q, k, v, block_mask=doc, enable_gqa=True)
    same = doc[:, None, :, None] == doc[:, None, None]     # (B, 1, T, T)
    return masked_attention(q, k, v, same.tril())


def masked_attention(q, k, v, mask=None):
    """torch's kernels: causal, or where `mask` (B, 1, T, S) is True. k, v (B, K, S, D) -> (B, H, T, D)."""
    # On CUDA only flash attention shares keys between heads, and it takes 16-bit types without a mask. Other cases
    # repeat the keys: torch would else store the T x S scores of all heads, 2.1 GB at 4,096 positions of the 8B.
    flash = q.dtype.itemsize == 2 and mask is None
    if q.is_cuda and not flash:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


def document_mask(doc, head_dim):
    """The mask for attention inside documents: a BlockMask for flex_attention on CUDA, else doc (B, T) itself."""
    # flex_attention's kernel needs a head dim of at least 16.
    if doc is None or not doc.is_cuda or head_dim < 16:
        return doc
    B, T = doc.shape

    def sees(b, h, i, j):
        return (i >= j) & (doc[b, i] == doc[b, j])
    return create_block_mask(sees, B, None, T, T, device=doc.device)


# On Hopper torch would choose cuDNN's kernel, which plans anew for each length (users report half a second).
torch.backends.cuda.enable_cudnn_sdp(False)
if torch.cuda.is_available():                              # flex_attention has no backward pass on CPUs
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    create_block_mask = torch.compile(create_block_mask)
    flex_attention = torch.compile(flex_attention)


class Attention(nn.Module):
    """Grouped-query attention with QK-norm: RMSNorm of q and k over the head dim, one gain for all heads."""
    attend = staticmethod(attend)                          # replaced from outside, by generate.py for example

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        D = config.head_dim
        self.q_proj = Linear(C, config.n_head * D)
        self.k_proj = Linear(C, config.n_kv_head * D)
        self.v_proj = Linear(C, config.n_kv_head * D)
        self.o_proj = Linear(config.n_head * D, C)
        norm = RMSNorm if config.qk_norm else nn.Identity
        self.q_norm = norm(D, config.norm_eps)
        self.k_norm = norm(D, config.norm_eps)
        self.heads = -1, D

    def forward(self, x, cos, sin, doc=None):
        q = self.q_proj(x).unflatten(-1, self.heads)       # (B, T, H, D)
        k = self.k_proj(x).unflatten(-1, self.heads)       # (B, T, K, D)
        v = self.v_proj(x).unflatten(-1, self.heads)
        q = self.q_norm(q).transpose(1, 2)                 # (B, H, T, D)
        k = self.k_norm(k).transpose(1, 2)                 # (B, K, T, D)
        v = v.transpose(1, 2)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        y = self.attend(q, k, v, doc)                      # (B, H, T, D)
        y = y.transpose(1, 2).flatten(2)                   # (B, T, H D)
        return self.o_proj(y)


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind an RMSNorm and added to the residual stream x (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.feedforward_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, doc=None):
        x = x + self.self_attn(self.attention_layernorm(x), cos, sin, doc)
        return x + self.mlp(self.feedforward_layernorm(x))


class Apertus(nn.Module):
    """
    model(idx) -> (logits, None); model(idx, targets, keep, doc) -> (None, loss). For text: generate.py.

    seed: for the initial weights; None leaves them uninitialised, to be loaded from a file.
    """

    def __init__(self, config, seed=28):
        super().__init__()
        self.config = config
        self.dtype = None                                  # of the activations; None: that of the parameters
        self.chunk_loss = chunk_loss                       # engine/parallel.py compiles it
        V, C = config.vocab_size, config.n_embd
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(V, C, _weight=torch.empty(V, C)),
            layers=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            norm=RMSNorm(C, config.norm_eps)))
        self.lm_head = Linear(C, V)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        if seed is not None:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """
        Draw the initial values of all parameters.

        Each parameter has its own generator, seeded by (seed, name). So its values depend neither on the order of
        creation nor on the other parameters: ablations share their common parameters, and any number of processes
        starts from the same weights. One core draws 45 million numbers a second, the 8B's in three minutes; ranks that
        share the model share the work (engine/sharding.py).
        """
        for name, p in self.named_parameters():
            if not p.is_meta:
                p.copy_(self.initial(name, p.shape, seed))

    def initial(self, name, shape, seed):
        """
        Matrices: N(0, init_std), times 1/sqrt(2L) for o_proj and down_proj, which write to the residual stream.
        Gains: 1. Both alphas of xIELU: 0.8.
        """
        if "alpha" in name:
            softplus = 0.8 - XIELU.BETA * name.endswith("alpha_n")
            return torch.full(shape, math.log(math.expm1(softplus)))
        if len(shape) == 1:
            return torch.ones(shape)
        std = self.config.init_std
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * self.config.n_layer)
        return torch.randn(shape, generator=generator_of(name, seed), device="cpu") * std

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T):
        """
        Training FLOPs per token at window length T: 6 per matrix parameter (4 if it is frozen and has no gradient of
        its own), and 6 L H D T for attention.

        The head counts; the embedding does not, since it is a look-up. Of the pairs of positions the causal ones count,
        whatever the document mask: half of the 12 L H D T of PaLM's appendix B. Recomputation does not count. MFU is
        computed from this.
        """
        c = self.config
        matrices = [p for p in self.parameters() if p.ndim > 1]
        # A tied embedding is also the head, so it counts.
        if not c.tie_embeddings:
            matrices = matrices[1:]
        products = sum(p.numel() * (6 if p.requires_grad else 4) for p in matrices)
        return products + 6 * c.n_layer * c.n_embd * T

    def hidden(self, idx, doc=None, positions=None):
        """
        Token ids (B, T) -> normalised last hidden states (B, T, C).

        doc (B, T): ids of documents. positions (T,) or (B, T); None: 0 to T - 1 over the whole window. They
        do not restart in each document, since RoPE depends on differences only.
        """
        x = self.model.embed_tokens(idx)                   # (B, T, C)
        x = x.to(self.dtype or x.dtype)
        if positions is None:
            positions = torch.arange(idx.shape[1], device=idx.device)
        # In fp32: bf16 has no odd numbers above 256.
        half = positions[..., None].float() * rope_frequencies(self.config, idx.device)
        angles = torch.cat((half, half), dim=-1)           # (T, D) or (B, T, D)
        angles = angles.unsqueeze(-3)                      # (1, T, D) or (B, 1, T, D), for all heads
        cos = angles.cos().to(x.dtype)
        sin = angles.sin().to(x.dtype)
        doc = document_mask(doc, self.config.head_dim) if self.config.doc_mask else None
        for block in self.model.layers:
            x = block(x, cos, sin, doc)
        return self.model.norm(x)

    def forward(
        self, idx, targets=None, keep=None, doc=None, n_tokens=None, positions=None, per_token=False, last=False
    ):
        """
        idx (B, T) int64. Without targets: logits (B, T, V), None; with `last` those of the last position, (B, V). With
        targets (B, T): None, loss, the mean over kept positions.

        keep (B, T) bool: which positions have a loss (goldfish.py); targets below 0 never do. n_tokens: divide by
        this, the kept tokens of the whole step, instead of by those of this batch, so that gradients of several batches
        and ranks add up. per_token: return the negative log-likelihoods (B, T) in nats instead of their mean, in fp32
        and without gradient; those of targets below 0 are meaningless. doc and positions: as in hidden().
        """
        x = self.hidden(idx, doc, positions)
        if targets is None:
            return self.lm_head(x[:, -1] if last else x), None
        head = self.lm_head.weight
        if per_token:
            x, head = x.detach(), head.detach()
        has_loss = targets >= 0
        if keep is not None:
            has_loss = has_loss & keep
        if n_tokens is None:
            n_tokens = has_loss.sum().clamp(min=1)
        weights = at_least_fp32(has_loss.to(x.dtype)) / n_tokens
        labels = targets.clamp(min=0)
        loss, nll = ChunkedCrossEntropy.apply(
            x.flatten(0, 1), head, labels.flatten(), weights.flatten(), self.chunk_loss
        )
        return None, nll.view(targets.shape) if per_token else loss


def generator_of(name, seed):
    """
    The generator of one parameter's random numbers. A CPU generator keeps only the low 32 bits of its seed, so they
    are a hash of (seed, name).
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
