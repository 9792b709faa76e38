"""
Apertus (Swiss AI, arXiv 2509.14233), 8B and 70B, in one file: a pre-norm decoder

    x = x + Attention(RMSNorm(x))          x = x + W_down xIELU(W_up RMSNorm(x))

that differs from Llama in three places: the feed-forward layer has no gate and a learned
activation, xIELU (sec. 2.1); queries and keys are normalised before they are rotated
(QK-norm); and attention stops at document borders. Parameters carry the names of the
published checkpoints, so a safetensors file loads without a mapping table (convert.py), and
the logits are the published ones:

$ python -m pytest tests/test_model.py           # logits, loss, gradients and greedy tokens against transformers
$ python sample.py --init_from=swiss-ai/Apertus-8B-Instruct-2509 --chat

Every choice that the report ablates is one word of ApertusConfig.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from engine.attention import formula_attention, segment_attention
from engine.hardware import ROUTES, at_least_fp32, by_onednn, linear

# Shapes: B batch, T time, C channels, H query heads, K key-value heads, D head dim, V
# vocabulary, N = B*T positions.


@dataclass
class ApertusConfig:
    """The defaults are the 8B model in pretraining (Table 1); configs/*.py set the same names."""
    block_size: int = 4096
    vocab_size: int = 131072
    n_layer: int = 32
    n_head: int = 32
    n_kv_head: int = 8              # grouped-query attention; n_head = multi-head, 1 = multi-query
    n_embd: int = 4096
    ffn_dim: int = 21504            # 5.25 C: without a gate, 1.5 times Llama's width costs the same parameters
    activation: str = "xielu"       # xielu | swiglu | gelu | relu2; swiglu takes 2/3 of ffn_dim for its three matrices
    qk_norm: bool = True
    doc_mask: bool = True           # attention inside documents (sec. 2.3); the released runs most likely had False
    tie_embeddings: bool = False
    rope_theta: float = 500_000.0   # 12e6 after the long-context stages
    rope_scaling: float = 8.0       # llama3 factor, on from the first step of pretraining; 0 = plain RoPE
    rope_original: int = 8192       # hard-coded in the official code, although pretraining windows are 4096
    rope_low: float = 1.0
    rope_high: float = 4.0
    norm_eps: float = 1e-5
    init_std: float = 0.008944      # 0.02 / sqrt(5) for both sizes; a 200-wide model wants more (configs/laptop.py)
    ffn: str = "dense"              # dense | lowrank | blockdense | blockshuffle: not Apertus (studies/structured.py)
    ffn_rank: int = 0               # of lowrank and blockdense
    ffn_blocks: int = 0             # of blockdense and blockshuffle

    def __post_init__(self):
        self.check_division("n_embd", "n_head")
        self.check_division("n_head", "n_kv_head")
        if self.head_dim % 2:
            raise ValueError(f"head dim {self.n_embd}/{self.n_head} = {self.head_dim} is odd, and RoPE turns pairs: "
                             "try another n_head")
        if self.activation not in ("xielu", "swiglu", "gelu", "relu2"):
            raise ValueError(f"activation={self.activation!r} is not one of xielu, swiglu, gelu, relu2")

    def check_division(self, big, small):
        a = getattr(self, big)
        b = getattr(self, small)
        if b < 1 or a % b:
            divisors = (d for d in range(1, b) if a % d == 0)
            fits = max(divisors, default=1)
            raise ValueError(f"{big}={a} is not divisible by {small}={b}: try {small}={fits}")

    @classmethod
    def of(cls, settings):
        """The shape among the settings of a run, as its script or its config.json has them (a dict)."""
        names = cls.__dataclass_fields__
        return cls(**{name: settings[name] for name in names if name in settings})

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def ffn_width(self):
        """
        Hidden width. SwiGLU has three matrices, not two: 2/3 of the width, to a multiple of
        8 (8B: 14336).
        """
        if self.activation != "swiglu":
            return self.ffn_dim
        eights = round(self.ffn_dim * 2 / 3 / 8)
        return 8 * max(1, eights)


# Our name of a setting: its name in Hugging Face's config.json (convert.py translates the
# rest, RoPE's among it).
HF_NAMES = dict(
    block_size="max_position_embeddings",
    vocab_size="vocab_size",
    n_layer="num_hidden_layers",
    n_head="num_attention_heads",
    n_kv_head="num_key_value_heads",
    n_embd="hidden_size",
    ffn_dim="intermediate_size",
    tie_embeddings="tie_word_embeddings",
    norm_eps="rms_norm_eps",
    init_std="initializer_range",
)


class Linear(nn.Linear):
    """
    A matrix without bias. Its fp32 weight is cast to the dtype of the activations where it
    is used.

    So neither autocast nor a second copy of the weights is needed: torch.compile fuses the
    cast.
    """
    product = staticmethod(linear)                         # or engine/fp8.py's

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def reset_parameters(self):
        pass                                               # Apertus.init_weights does it, once

    def forward(self, x):
        w = self.weight.to(x.dtype)
        return self.product(x, w)


class RMSNorm(nn.Module):
    """
    x / sqrt(mean(x^2) + eps) * weight over the last dimension; F.rms_norm sums squares of
    half types in fp32.
    """

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x):
        weight = self.weight.to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps)


class XIELU(nn.Module):
    """
    xIELU (arXiv 2411.13010; sec. 2.1): a parabola to the right, an integrated ELU to the
    left, both slopes learned per layer.

        x > 0:   alpha_p x^2 + beta x                            alpha_p = softplus(a_p)
        x <= 0:  alpha_n (exp(x) - 1) - alpha_n x + beta x       alpha_n = beta + softplus(a_n),  beta = 0.5

    Value and slope are continuous at 0 (0 and beta). Both alphas start at 0.8. The two
    scalars are stored raw, as the checkpoints have them, with shape (1,): fully_shard
    refuses 0-d parameters.
    """
    BETA = 0.5
    EPS = -1e-6                                            # where the left branch is not used, x is at most this

    def __init__(self):
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))

    def forward(self, x):
        # Eagerly, backward would keep six intermediate results in fp32, 465 kB per token and layer of
        # the 8B: they are computed again instead, from x. torch.compile decides that by itself.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.formula(x)
        return checkpoint(self.formula, x, use_reentrant=False, preserve_rng_state=False)

    def formula(self, x):
        # In fp32: the scalars would promote bf16 anyway, and torch.compile fuses the casts
        # away.
        z = at_least_fp32(x)
        a_p = self.alpha_p.to(z.dtype)
        a_n = self.alpha_n.to(z.dtype)
        alpha_p = F.softplus(a_p)
        alpha_n = self.BETA + F.softplus(a_n)
        # Unclamped, exp of a large x is infinite, and its gradient inf * 0 = nan although
        # the branch is not taken.
        below_0 = z.clamp(max=self.EPS)
        exp_minus_1 = torch.expm1(below_0)
        left = alpha_n * (exp_minus_1 - z)
        right = alpha_p * z * z
        y = torch.where(z > 0, right, left)
        y = y + self.BETA * z
        return y.to(x.dtype)


class MLP(nn.Module):
    """up -> activation -> down. SwiGLU, for the ablation, adds a gate and is narrower by 2/3."""

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

    With the wavelength w = 2 pi / f: unchanged where w < original / high, f / factor where
    w > original / low, and a linear blend between. At theta 500k these are 29, 29 and 6 of
    the 64 frequencies.
    """
    D = config.head_dim
    even = torch.arange(0, D, 2, device=device).float()
    f = 1.0 / config.rope_theta ** (even / D)
    if not config.rope_scaling:
        return f
    turns = config.rope_original * f / (2 * math.pi)       # full turns within the original context
    blend = config.rope_high - config.rope_low
    keep = (turns - config.rope_low) / blend
    keep = keep.clamp(0, 1)
    return (1 - keep) * f / config.rope_scaling + keep * f


def rotate(x, cos, sin):
    """
    Rotate (B, heads, T, D) by position. Halves are paired, i with i + D/2. cos, sin: (T, D)
    or (B, 1, T, D).
    """
    a, b = x.chunk(2, dim=-1)
    turned = torch.cat((-b, a), dim=-1)
    return x * cos + turned * sin


class Attention(nn.Module):
    """
    Grouped-query attention with QK-norm: RMSNorm over the head dim of q and k, one gain for
    all heads, before RoPE.
    """

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        D = config.head_dim
        q_width = config.n_head * D
        kv_width = config.n_kv_head * D
        self.q_proj = Linear(C, q_width)
        self.k_proj = Linear(C, kv_width)
        self.v_proj = Linear(C, kv_width)
        self.o_proj = Linear(q_width, C)
        self.q_norm = self.k_norm = nn.Identity()
        if config.qk_norm:
            self.q_norm = RMSNorm(D, config.norm_eps)
            self.k_norm = RMSNorm(D, config.norm_eps)
        self.heads = -1, D

    def qkv(self, x, cos, sin):
        """x (B, T, C) -> q (B, H, T, D), k and v (B, K, T, D), q and k normalised and rotated."""
        q = self.q_proj(x).unflatten(-1, self.heads)       # (B, T, H, D)
        k = self.k_proj(x).unflatten(-1, self.heads)       # (B, T, K, D)
        v = self.v_proj(x).unflatten(-1, self.heads)
        q = self.q_norm(q).transpose(1, 2)                 # (B, H, T, D)
        k = self.k_norm(k).transpose(1, 2)                 # (B, K, T, D)
        v = v.transpose(1, 2)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        return q, k, v


def causal_attention(q, k, v, doc=None, way=None):
    """
    Causal softmax attention, inside documents if `doc` says which. q (B, H, T, D), k and v
    (B, K, T, D) -> (B, H, T, D).

    doc: None, or what document_mask returned: a BlockMask for flex_attention, or the ids (B, T).
    way: on a CPU, for who times them; None: way_on_cpu's.
    """
    if doc is not None and not isinstance(doc, torch.Tensor):
        return flex_attention(
            q, k, v,
            block_mask=doc,
            enable_gqa=True,
        )
    if q.device.type == "cpu":
        way = way or way_on_cpu(q, doc is not None)
        if way == "formula":
            return formula_attention(q, k, v, doc)[0]
        wide = way == "wide"
        if wide or doc is not None:
            return segment_attention(q, k, v, doc, wide)[0]
    if doc is None:
        return library_attention(q, k, v)
    # Where nothing knows documents: MPS, and heads that are too narrow for flex_attention.
    i = torch.arange(q.shape[2], device=q.device)
    same = doc[:, None, :, None] == doc[:, None, None]     # (B, 1, T, T)
    return masked_attention(q, k, v, same & (i[:, None] >= i))


def way_on_cpu(q, documents):
    """
    The way in which q (B, H, T, D) attends on a CPU, inside documents or not: by the "formula",
    by torch's "kernel", or "wide", by the kernel in fp32 where q is in bf16. ROUTES has what was
    timed; "auto" is what most CPUs want.
    """
    way = ROUTES.attention
    T = q.shape[2]
    kernel = "wide" if documents else "kernel"
    if way == "auto":
        short = q.dtype == torch.bfloat16 and T <= 512
        way = "formula" if short else kernel
    # Half of all scores would be kept for the backward pass.
    if way == "formula" and T > 1024:
        way = kernel
    return way


def library_attention(q, k, v, mask=None):
    """
    torch's own kernels, causal or over the pairs of `mask` (B, 1, T, S) bool. q (B, H, T, D), k and
    v (B, K, S, D) -> (B, H, T, D).
    """
    if not shares_heads(q.device.type, q.dtype, mask is not None):
        groups = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(groups, dim=1)             # (B, H, S, D)
        v = v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )


def shares_heads(device, dtype, masked):
    """
    Whether torch has a kernel in which query heads share k and v.

    On CUDA that is flash attention alone, in half types and without a mask. For anything else
    torch would fall back to the formula, with all T x S scores of all heads in memory: 2.1 GB
    at 4,096 positions of the 8B in fp32. Repeated heads have a kernel without them.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    return device != "cuda" or half and not masked


def masked_attention(q, k, v, mask):
    """
    Attention by its formula, softmax(q k^T / sqrt(D)) v over the pairs of `mask`
    (B, 1, T, S) bool.

    q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D). Compiled it fuses, which pays
    where T x S is small.
    """
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    rows = H // K * T                                      # one key-value head serves H/K query heads
    q = q.reshape(B, K, rows, D)
    z = q @ k.transpose(-1, -2)                            # (B, K, rows, S)
    z = z.view(B, H, T, S)
    z = at_least_fp32(z) * D ** -0.5
    # Added, where filling in would say the same: the gradient of a sum asks for no mask, so compiled none is kept.
    bias = torch.zeros_like(mask, dtype=z.dtype).masked_fill(~mask, -math.inf)
    z = z + bias
    p = z.softmax(-1).to(v.dtype)
    y = p.view(B, K, rows, S) @ v                          # (B, K, rows, D)
    return y.view(B, H, T, D)


def document_mask(doc, head_dim):
    """
    What attention needs to stay inside documents: a flex_attention BlockMask where that has a
    kernel, the ids elsewhere. doc (B, T) or None.
    """
    if doc is None or not has_flex(doc.device.type, head_dim):
        return doc
    B, T = doc.shape
    sees = causal_in_documents(doc)
    return create_block_mask(sees, B, None, T, T, device=doc.device)


def has_flex(device, head_dim):
    """
    Whether flex_attention can train there: on CUDA, and with no heads of toy models. Its matrix
    products have at least 16 numbers a side.
    """
    return device == "cuda" and head_dim >= 16


def causal_in_documents(doc):
    """flex_attention's form of the mask: may position i of row b look at position j?"""
    def sees(b, h, i, j):
        same = doc[b, i] == doc[b, j]
        return (i >= j) & same
    return sees


# On Hopper torch would take cuDNN's kernel, which makes a plan for each new length, half a second
# each: in text that grows token by token, or in batches of other lengths, that is every step.
torch.backends.cuda.enable_cudnn_sdp(False)
if torch.cuda.is_available():                              # flex_attention has no backward pass on CPUs
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    create_block_mask = torch.compile(create_block_mask)
    flex_attention = torch.compile(flex_attention)


class Block(nn.Module):
    """
    One layer: attention and feed-forward, each behind an RMSNorm and added to the residual
    stream x (B, T, C).
    """

    def __init__(self, config):
        super().__init__()
        self.attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.feedforward_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, doc=None, cache=None, split=None):
        h = self.attention_layernorm(x)
        attention = self.self_attn
        q, k, v = attention.qkv(h, cos, sin)
        # A window over P ranks is computed exactly. All but attention acts on each position by
        # itself, so a rank may hold T/P of them. Attention acts on each head by itself, so
        # around it ranks exchange positions for heads: each gets all T positions of H/P query
        # heads and of the K/P key-value heads that these share. The sums are those of one
        # process, and parameters collect gradients over ranks as over micro-batches.
        if split:
            q, k, v = map(split.by_heads, (q, k, v))       # (B, H/P, T, D), (B, K/P, T, D)
        # Attention is called here and not inside Attention, so that a block which
        # torch.compile must leave for a kernel becomes two graphs instead of four.
        if cache is None:
            y = causal_attention(q, k, v, doc)             # (B, H, T, D)
        else:
            y = cache.attend(q, k, v)
        if split:
            y = split.by_positions(y)                      # (B, H, T/P, D)
        y = y.transpose(1, 2).flatten(2)                   # (B, T, H D)
        x = x + attention.o_proj(y)
        h = self.feedforward_layernorm(x)
        return x + self.mlp(h)


def chunk_loss(h, w, targets, weights, train):
    """One chunk of rows: nll (rows,), and if train, weights times d nll / d logits (rows, V)."""
    z = at_least_fp32(linear(h, w))                        # (rows, V)
    targets = targets[:, None]
    own = z.gather(1, targets)[:, 0]                       # (rows,)  the logits of the targets
    largest = z.amax(-1)
    # In place: one such tensor of the 8B takes 268 MB. The sum and the gradient use the same exponentials, which
    # torch.compile on a CPU therefore computes once, row by row, while the row is in the cache.
    e = z.sub_(largest[:, None]).exp_()
    total = e.sum(-1)                                      # (rows,)
    nll = total.log() + (largest - own)
    if not train:
        return nll, None
    # softmax minus one-hot. Where the one is, p - 1 is written over p: compiled, no fp32 tensor is left to be filled,
    # added to and read again.
    share = weights / total
    dz = e.mul_(share[:, None]).to(h.dtype)
    own_dz = torch.expm1(-nll) * weights                   # (rows,)
    return nll, dz.scatter_(1, targets, own_dz[:, None].to(dz.dtype))


def chunk_rows(V, device, trained=True):
    """
    Rows of logits (rows, V) that the loss holds at a time: 512 of 131,072 take 268 MB in
    fp32.

    Of a small vocabulary on a CPU 16 MB, which stay in its cache and in malloc's hands. On a GPU
    0.5 GB where the head is trained: each chunk reads and writes the head's gradient. A power of
    two, as batches are: a remainder would be another shape to compile.
    """
    most = 2**26
    on = torch.device(device).type
    if on == "cpu" and ROUTES.rows:
        return ROUTES.rows                                 # engine/routes.py has timed it
    if on == "cpu" and V <= 2**14:
        most = 2**22
    if on == "cuda" and trained:
        most = 2**27
    power = int(math.log2(most / V))
    return max(128, 2**power)


def add_product(total, a, b):
    """
    total += a @ b, in total's dtype, which is fp32 where a and b are bf16: inside the product where
    that can be, since the 8B's head gradient is 2 GB to read and write for each chunk of the loss.
    """
    if a.dtype == total.dtype and not by_onednn(a):
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += linear(a, b.T)


class ChunkedCrossEntropy(torch.autograd.Function):
    """
    sum_n weights[n] * -log softmax(h[n] @ head.T)[targets[n]], without the N x V logits.

    At V = 131,072 the fp32 logits of one 4,096-token window are 2.1 GB, and the usual loss
    keeps three copies. Here one chunk of rows lives at a time, and its gradient, softmax
    minus one-hot, is formed at once, in the forward pass: three matrix products as always,
    and nothing is computed twice.

    h (N, C), head (V, C), targets (N,) int64, weights (N,) fp32 -> loss (), and nll (N,)
    fp32 without gradient. rows: of a chunk. chunk_loss: the function above, or the same
    compiled; with that of engine/distill.py, weights and nll have a column for each term.
    """

    @staticmethod
    def forward(ctx, h, head, targets, weights, rows, chunk_loss):
        w = head.to(h.dtype)
        nll = torch.empty_like(weights)
        grad_h = grad_head = None
        # A frozen head, as LoRA has it, needs no gradient: 2 GB of the 8B.
        train_h, train_head = ctx.needs_input_grad[:2]
        train = train_h or train_head
        if train_h:
            grad_h = torch.empty_like(h)
        if train_head:
            grad_head = at_least_fp32(torch.zeros_like(head))
        for i in range(0, len(h), rows):
            s = slice(i, i + rows)
            chunk = h[s]
            nll[s], dz = chunk_loss(
                chunk,
                w,
                targets[s],
                weights[s],
                train,
            )
            if train_h:
                grad_h[s] = linear(dz, w.T)                # (rows, C)
            if train_head:
                add_product(grad_head, dz.T, chunk)        # (V, C)
        # FSDP hands over the head in bf16; the sum over chunks is in fp32 all the same.
        ctx.head_dtype = head.dtype
        ctx.save_for_backward(grad_h, grad_head)
        ctx.mark_non_differentiable(nll)
        return (nll * weights).sum(), nll

    @staticmethod
    def backward(ctx, grad, _):
        grad_h, grad_head = ctx.saved_tensors
        if grad_h is not None:
            grad_h = grad_h * grad.to(grad_h.dtype)
        # In place: a copy takes 2 GB of the 8B. Autograd therefore refuses a second backward pass.
        if grad_head is not None:
            grad_head = grad_head.mul_(grad).to(ctx.head_dtype)
        return grad_h, grad_head, None, None, None, None


def inverse_softplus(y):
    return math.log(math.expm1(y))


def draw(name, shape, config, seed):
    """The initial values of the matrix `name`: see Apertus.init_weights."""
    std = config.init_std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * config.n_layer)
    values = torch.randn(shape, generator=generator_of(name, seed), device="cpu")
    return values.mul_(std)


def generator_of(name, seed):
    """
    The random numbers of one parameter.

    The CPU's generator keeps the low 32 bits of its seed and drops the rest, so these are a
    hash of seed and name.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    bits = int.from_bytes(digest[:4], "little")
    return torch.Generator().manual_seed(bits)


class Apertus(nn.Module):
    """
    model(idx) -> (logits, None); model(idx, targets, keep, doc) -> (None, loss). For text:
    generate.py.
    """

    def __init__(self, config, seed=28):
        super().__init__()
        self.config = config
        self.dtype = None                                  # of the activations; None: the parameters' own
        self.chunk_loss = chunk_loss                       # or the same, compiled (compile_blocks)
        V, C = config.vocab_size, config.n_embd
        blocks = [Block(config) for _ in range(config.n_layer)]
        unfilled = torch.empty(V, C)
        parts = dict(
            embed_tokens=nn.Embedding(V, C, _weight=unfilled),
            layers=nn.ModuleList(blocks),
            norm=RMSNorm(C, config.norm_eps),
        )
        self.model = nn.ModuleDict(parts)
        self.lm_head = Linear(C, V)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.in_bits = 0                                   # weights that posttrain/quantised.py keeps in 8 or 4 bits
        self.initial = draw                                # of a matrix; structured layers know their own
        if config.ffn != "dense":
            from studies import structured
            structured.build(self)
        # None: they come from a file. One core draws 45 million a second, the 8B's in three minutes.
        if seed is not None:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """
        N(0, init_std); the matrices that write to the residual stream, o_proj and
        down_proj, by 1/sqrt(2L) of that; gains 1.

        Each parameter has a generator of its own, seeded by (seed, name). Its values depend
        neither on the order of creation nor on what else is in the model, so that ablations
        share what they have in common and every number of processes starts alike. Tensors
        on the meta device stay there.
        """
        config = self.config
        for name, p in self.named_parameters():
            if p.is_meta:
                continue
            if name.endswith("alpha_p"):
                p.fill_(inverse_softplus(0.8))
            elif name.endswith("alpha_n"):
                p.fill_(inverse_softplus(0.8 - XIELU.BETA))
            elif p.ndim == 1:
                p.fill_(1.0)
            else:
                values = self.initial(name, p.shape, config, seed)
                p.copy_(values)

    def compile_blocks(self, **how):
        """
        torch.compile(..., **how) each block and the loss of a chunk. Blocks share their
        code: depth costs no time.
        """
        for block in self.model.layers:
            block.compile(**how)
        self.chunk_loss = torch.compile(chunk_loss, **how)

    def num_params(self):
        return sum(p.numel() for p in self.parameters()) + self.in_bits

    def flops_per_token(self, T):
        """
        Training FLOPs per token at window length T: 6 per matrix parameter, 4 if it is
        frozen and has no gradient of its own, and 6 L H D T for attention.

        The head counts, the embedding is a look-up. Causal pairs count once; neither
        recomputation nor masked pairs count. This is what MFU is measured by
        (PaLM, appendix B, causal).
        """
        c = self.config
        matrices = [p for p in self.parameters() if p.ndim > 1]
        # A tied embedding is the head too, and counts as that.
        if not c.tie_embeddings:
            matrices = matrices[1:]
        trained = sum(p.numel() for p in matrices if p.requires_grad)
        frozen = sum(p.numel() for p in matrices if not p.requires_grad) + self.in_bits
        attention = c.n_layer * c.n_head * c.head_dim * T
        return 6 * trained + 4 * frozen + 6 * attention

    def hidden(self, idx, doc=None, cache=None, split=None):
        """
        Token ids (B, T) -> normalised last hidden states (B, T, C). split: this rank's T/P
        positions of both.
        """
        x = self.model.embed_tokens(idx)                   # (B, T, C)
        if self.dtype is not None:
            x = x.to(self.dtype)
        cos, sin = self.rope(idx, cache, x.dtype, split)
        doc = document_mask(doc, self.config.head_dim) if self.config.doc_mask else None
        for block in self.model.layers:
            x = block(x, cos, sin, doc, cache, split)
        return self.model.norm(x)

    def rope(self, idx, cache, dtype, split=None):
        """
        cos and sin of the angles of ids (B, T): each (T, D), or with a cache, whose rows
        begin apart, (B, 1, T, D).
        """
        T = idx.shape[1]
        if cache is None:
            first = split.rank * T if split else 0
            positions = torch.arange(first, first + T, device=idx.device)  # (T,)
        else:
            positions = cache.begin(T)[:, None]            # (B, 1, T)
        # In fp32: bf16 has no room for positions.
        frequencies = rope_frequencies(self.config, idx.device)
        half = positions[..., None].float() * frequencies
        angles = torch.cat((half, half), dim=-1)           # (..., T, D)
        cos = angles.cos().to(dtype)
        sin = angles.sin().to(dtype)
        return cos, sin

    def forward(
        self,
        idx,
        targets=None,
        keep=None,
        doc=None,
        n_tokens=None,
        per_token=False,
        cache=None,
        teacher=None,
        split=None,
    ):
        """
        idx (B, T) int64. Without targets: logits (B, T, V), None; with a cache
        (generate.py) those of the last position alone, (B, V). With targets (B, T): None,
        loss, the mean over kept positions.

        keep (B, T) bool: which positions have a loss (goldfish.py); targets below 0 never
        have. doc (B, T): document ids for attention. n_tokens: divide by this, the kept
        tokens of the whole step, instead of by those of this batch; then gradients of
        several batches and ranks add up. per_token: return, not their mean, but the
        negative log-likelihoods (B, T) in nats, fp32, without gradient. teacher: learn from it as
        well (engine/distill.py), and return its two terms in place of None. split
        (engine/parallel.py): idx, targets and keep are this rank's T/P positions of windows
        that P ranks share, and doc is that of the whole windows.
        """
        x = self.hidden(idx, doc, cache, split)
        head = self.lm_head.weight
        if targets is None:
            if cache is not None:
                x = x[:, -1]
            return self.lm_head(x), None
        if per_token:
            x = x.detach()
            head = head.detach()
        has_loss = targets >= 0
        if keep is not None:
            has_loss = has_loss & keep
        if n_tokens is None:
            n_tokens = has_loss.sum().clamp(min=1)
        weights = at_least_fp32(has_loss.to(x.dtype)) / n_tokens
        labels = targets.clamp(min=0)
        rows = chunk_rows(self.config.vocab_size, x.device, head.requires_grad)
        flat = (
            x.flatten(0, 1),
            head,
            labels.flatten(),
            weights.flatten(),
            rows,
        )
        if teacher is not None:
            return teacher.loss(ChunkedCrossEntropy.apply, idx, doc, split, *flat)
        loss, nll = ChunkedCrossEntropy.apply(*flat, self.chunk_loss)
        if per_token:
            return None, nll.view(targets.shape)
        return None, loss
