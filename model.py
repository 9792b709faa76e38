"""
Apertus (Swiss AI, arXiv 2509.14233), 8B and 70B, in one file: a pre-norm decoder

    x = x + Attention(RMSNorm(x))          x = x + W_down xIELU(W_up RMSNorm(x))

that differs from Llama in three places: the feed-forward has no gate and a learned activation, xIELU (sec. 2.1); queries and keys
are normalised before they are rotated (QK-norm); and attention stops at document borders. Parameters carry the names of the
published checkpoints, so a safetensors file loads without a mapping table (convert.py), and the logits are the published ones:

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

from engine.hardware import at_least_fp32, by_onednn, linear, segment_attention

# Letters: B batch, T time, C channels, H query heads, K kv heads, D head dim, V vocab, N = B*T positions.


@dataclass
class ApertusConfig:
    """The defaults are the 8B model in pretraining (Table 1); configs/*.py set the same names."""
    block_size: int = 4096
    vocab_size: int = 131072
    n_layer: int = 32
    n_head: int = 32
    n_kv_head: int = 8              # grouped-query attention; n_head = multi-head, 1 = multi-query
    n_embd: int = 4096
    ffn_dim: int = 21504            # 5.25 C; without a gate 1.5 times Llama's width costs the same parameters
    activation: str = "xielu"       # xielu | swiglu | gelu | relu2; swiglu takes 2/3 of ffn_dim for its three matrices
    qk_norm: bool = True
    doc_mask: bool = True           # attention stays inside the document (sec. 2.3); False is what the released runs most likely did
    tie_embeddings: bool = False
    rope_theta: float = 500_000.0   # 12e6 after the long-context stages
    rope_scaling: float = 8.0       # llama3 factor, on from the first step of pretraining; 0 = plain RoPE
    rope_original: int = 8192       # hard-coded in the official code although pretraining windows are 4096
    rope_low: float = 1.0
    rope_high: float = 4.0
    norm_eps: float = 1e-5
    init_std: float = 0.008944      # 0.02/sqrt(5) for both sizes; too small for a 200-wide model (configs/laptop.py)
    ffn: str = "dense"              # dense | lowrank | blockdense | blockshuffle: not Apertus (studies/structured.py); the first layer stays dense
    ffn_rank: int = 0               # of lowrank and blockdense
    ffn_blocks: int = 0             # of blockdense and blockshuffle

    def __post_init__(self):
        for big, small in (("n_embd", "n_head"), ("n_head", "n_kv_head")):
            a, b = getattr(self, big), getattr(self, small)
            if b < 1 or a % b:
                raise ValueError(f"{big}={a} is not divisible by {small}={b}: try {small}={max(d for d in range(1, max(b, 2)) if a % d == 0)}")
        if self.head_dim % 2:
            raise ValueError(f"head dim {self.n_embd}/{self.n_head} = {self.head_dim} is odd, and RoPE turns pairs: try another n_head")
        if self.activation not in ("xielu", "swiglu", "gelu", "relu2"):
            raise ValueError(f"activation={self.activation!r} is not one of xielu, swiglu, gelu, relu2")
        if self.ffn != "dense":
            from studies import structured
            structured.check(self)

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def ffn_width(self):
        """Hidden width. SwiGLU has three matrices instead of two: 2/3 of the width, to a multiple of 8 (8B: 21504 -> 14336)."""
        return max(8, round(self.ffn_dim * 2 / 3 / 8) * 8) if self.activation == "swiglu" else self.ffn_dim


# our config name: Hugging Face's (convert.py); what is not here has no name there
HF_NAMES = dict(block_size="max_position_embeddings", vocab_size="vocab_size", n_layer="num_hidden_layers",
                n_head="num_attention_heads", n_kv_head="num_key_value_heads", n_embd="hidden_size", ffn_dim="intermediate_size",
                tie_embeddings="tie_word_embeddings", norm_eps="rms_norm_eps", init_std="initializer_range")


class Linear(nn.Linear):
    """No bias; fp32 master weights are cast to the activations' dtype where they are used: no autocast, no second copy kept."""

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def reset_parameters(self):
        pass                                               # Apertus.init_weights does it, once

    def forward(self, x):
        return linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; F.rms_norm takes the mean square in fp32 for half types."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class XIELU(nn.Module):
    """
    xIELU (arXiv 2411.13010; sec. 2.1): a parabola to the right, an integrated ELU to the left, both slopes learned per layer.

        x > 0:   alpha_p x^2 + beta x                            alpha_p = softplus(a_p)
        x <= 0:  alpha_n (exp(x) - 1) - alpha_n x + beta x       alpha_n = beta + softplus(a_n),  beta = 0.5

    Value and slope are continuous at 0 (0 and beta). Both alphas start at 0.8. The two scalars are stored raw, with shape (1,):
    that is how the checkpoints have them, and fully_shard refuses 0-d parameters.
    """
    BETA, EPS = 0.5, -1e-6                                 # exp(min(x, EPS)) - 1 keeps the unused branch finite: x = 1e4 would give inf * 0

    def __init__(self):
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))

    def forward(self, x):
        z = at_least_fp32(x)                               # fused away by torch.compile; the scalars would promote bf16 to fp32 anyway
        alpha_p = F.softplus(self.alpha_p.to(z.dtype))
        alpha_n = self.BETA + F.softplus(self.alpha_n.to(z.dtype))
        left = alpha_n * (torch.expm1(z.clamp(max=self.EPS)) - z)
        return (torch.where(z > 0, alpha_p * z * z, left) + self.BETA * z).to(x.dtype)


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
    The D/2 angular frequencies (D/2,) fp32, scaled "by parts" like Llama 3 (sec. 2.1): with wavelength w = 2 pi / f,
    w < original/high: unchanged; w > original/low: f / factor; a linear blend between. At theta 500k: 29 / 29 / 6 of 64.
    """
    D = config.head_dim
    f = 1.0 / config.rope_theta ** (torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)
    if not config.rope_scaling:
        return f
    turns = config.rope_original * f / (2 * math.pi)       # full turns within the original context
    keep = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
    return (1 - keep) * f / config.rope_scaling + keep * f


def rotate(x, cos, sin):
    """Rotate (B, heads, T, D) by position; halves are paired (i with i + D/2), not neighbours. cos, sin: (T, D) or (B, 1, T, D)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with QK-norm: RMSNorm over the head dim of q and k, one gain for all heads, before RoPE."""

    def __init__(self, config):
        super().__init__()
        C, self.H, self.K, self.D = config.n_embd, config.n_head, config.n_kv_head, config.head_dim
        self.q_proj = Linear(C, self.H * self.D)
        self.k_proj = Linear(C, self.K * self.D)
        self.v_proj = Linear(C, self.K * self.D)
        self.o_proj = Linear(self.H * self.D, C)
        self.q_norm = RMSNorm(self.D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.D, config.norm_eps) if config.qk_norm else nn.Identity()

    def qkv(self, x, cos, sin):
        B, T, C = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, self.H, self.D)).transpose(1, 2)   # (B, H, T, D)
        k = self.k_norm(self.k_proj(x).view(B, T, self.K, self.D)).transpose(1, 2)   # (B, K, T, D)
        v = self.v_proj(x).view(B, T, self.K, self.D).transpose(1, 2)                # (B, K, T, D)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


def causal_attention(q, k, v, doc=None):
    """
    Causal softmax attention, inside documents if `doc` says which. q (B, H, T, D), k and v (B, K, T, D) -> (B, H, T, D).
    doc: None; or (B, T) document ids on CPU; or the BlockMask made from them on CUDA (document_mask).
    """
    if doc is not None and not isinstance(doc, torch.Tensor):
        return flex_attention(q, k, v, block_mask=doc, enable_gqa=True)
    on_cpu, T = q.device.type == "cpu", q.shape[2]
    by_formula = on_cpu and torch.compiler.is_compiling() and q.dtype == torch.bfloat16 and T <= 512      # 1.2x a step of SDPA's
    if doc is None and not by_formula:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if on_cpu and not by_formula:
        return segment_attention(q, k, v, doc)[0]
    i = torch.arange(T, device=q.device)
    mask = i[:, None] >= i                                 # (T, T)
    return masked_attention(q, k, v, mask if doc is None else mask & (doc[:, None, :, None] == doc[:, None, None, :]))


def masked_attention(q, k, v, mask):
    """
    Attention by its formula, softmax(q k^T / sqrt(D)) v over the pairs of `mask` (B, 1, T, S). q (B, H, T, D), k and v (B, K, S, D) ->
    (B, H, T, D). Compiled it fuses, and beats a library's kernel where T x S is small.
    """
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    z = q.reshape(B, K, H // K * T, D) @ k.transpose(-1, -2)                                   # (B, K, H/K T, S): a kv head serves H/K query heads
    z = at_least_fp32(z.view(B, H, T, S)) * D ** -0.5
    p = z.masked_fill(~mask, -math.inf).softmax(-1).to(v.dtype)
    return (p.view(B, K, H // K * T, S) @ v).view(B, H, T, D)


def document_mask(doc):
    """What attention needs to stay inside documents: the ids themselves on CPU, a flex_attention BlockMask on CUDA. doc (B, T)."""
    if doc is None or doc.device.type != "cuda":
        return doc
    B, T = doc.shape
    return create_block_mask(causal_in_documents(doc), B, None, T, T, device=doc.device)


def causal_in_documents(doc):
    """flex_attention's way to say it: may position i of row b look at position j?"""
    return lambda b, h, i, j: (i >= j) & (doc[b, i] == doc[b, j])


if torch.cuda.is_available():                              # flex_attention has no backward on CPU, and needs compiling on CUDA
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    create_block_mask, flex_attention = torch.compile(create_block_mask), torch.compile(flex_attention)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.feedforward_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, doc=None, cache=None):
        q, k, v = self.self_attn.qkv(self.attention_layernorm(x), cos, sin)
        # Called here and not from within Attention: where torch.compile must stay out, a block is two graphs instead of four.
        y = causal_attention(q, k, v, doc) if cache is None else cache.attend(q, k, v)         # (B, H, T, D)
        x = x + self.self_attn.o_proj(y.transpose(1, 2).flatten(2))                            # (B, T, C)
        return x + self.mlp(self.feedforward_layernorm(x))


def chunk_loss(h, w, targets, weights, train):
    """One chunk: nll (rows,) and, if train, d loss / d logits (rows, V)."""
    z = at_least_fp32(linear(h, w))                        # (rows, V)
    log_z = z.logsumexp(-1)                                # (rows,)
    nll = log_z - z.gather(1, targets[:, None])[:, 0]      # (rows,)
    if not train:
        return nll, None
    p = z.sub_(log_z[:, None]).exp_().mul_(weights[:, None])                          # (rows, V)   in place: one such tensor is 268 MB at 8B
    return nll, p.scatter_add_(1, targets[:, None], -weights[:, None]).to(h.dtype)


def chunk_rows(V, device):
    """
    Rows of logits (rows, V) that the loss holds at a time: 512 of 131,072 are 268 MB in fp32. Of a small vocabulary on a CPU 16 MB: they
    stay in its cache, and malloc does not map them anew for each chunk (2,048 x 16,384 forward and backward: 735 ms; as one chunk 833).
    A power of two, as batches are: what remained would be another shape to compile.
    """
    most = 2**22 if V <= 2**14 and torch.device(device).type == "cpu" else 2**26
    return max(128, 2 ** int(math.log2(most / V)))


class ChunkedCrossEntropy(torch.autograd.Function):
    """
    sum_n weights[n] * -log softmax(h[n] @ head.T)[targets[n]], without the N x V logits.

    At V = 131,072 the fp32 logits of one 4,096-token window are 2.1 GB, and the usual loss keeps three copies. Here a chunk of rows
    lives at a time, and its gradient, softmax minus one-hot, is formed at once, in the forward pass: three GEMMs as always, no recompute.
    h (N, C), head (V, C), targets (N,) int64, weights (N,) fp32 -> loss (), nll (N,) fp32 without gradient. rows: of a chunk;
    chunk_loss: the function above, or the same, compiled.
    """

    @staticmethod
    def forward(ctx, h, head, targets, weights, rows, chunk_loss):
        w = head.to(h.dtype)
        nll = torch.empty_like(weights)
        train = any(ctx.needs_input_grad[:2])
        grad_h, grad_head = (torch.empty_like(h), at_least_fp32(torch.zeros_like(head))) if train else (None, None)
        for i in range(0, len(h), rows):
            s = slice(i, i + rows)
            nll[s], dz = chunk_loss(h[s], w, targets[s], weights[s], train)
            if train:
                grad_h[s] = linear(dz, w.T)                # (rows, C)
                if dz.dtype == grad_head.dtype and not by_onednn(dz):
                    grad_head.addmm_(dz.T, h[s])           # (V, C)   added up in the GEMM; a temporary of that size: 40 % more (256 rows)
                else:
                    grad_head += linear(dz.T, h[s].T)      # bf16 products, added up in fp32
        ctx.head_dtype = head.dtype                        # FSDP hands over a bf16 head: its chunks still add up in fp32
        ctx.save_for_backward(grad_h, grad_head)
        ctx.mark_non_differentiable(nll)
        return (nll * weights).sum(), nll

    @staticmethod
    def backward(ctx, grad, _):
        grad_h, grad_head = ctx.saved_tensors
        return grad_h * grad.to(grad_h.dtype), (grad_head * grad).to(ctx.head_dtype), None, None, None, None


def draw(name, shape, config, seed):
    """The initial values of the matrix `name`: see Apertus.init_weights."""
    std = config.init_std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * config.n_layer)
    # The CPU's generator keeps the low 32 bits of its seed and drops the rest, so the seed has to be in those: a hash of both.
    bits = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4]
    generator = torch.Generator().manual_seed(int.from_bytes(bits, "little"))
    return torch.randn(shape, generator=generator, device="cpu").mul_(std)


class Apertus(nn.Module):
    """model(idx) -> (logits, None); model(idx, targets, keep, doc) -> (None, loss); model.generate(idx, n) -> tokens."""

    def __init__(self, config, seed=28):
        super().__init__()
        self.config = config
        self.dtype = None                                  # of the activations; None: the parameters' own
        self.chunk_loss = chunk_loss                       # or the same, compiled (compile_blocks)
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(config.vocab_size, config.n_embd, _weight=torch.empty(config.vocab_size, config.n_embd)),
            layers=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            norm=RMSNorm(config.n_embd, config.norm_eps)))
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        if config.ffn != "dense":
            from studies import structured
            structured.replace_linears(self)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """
        N(0, init_std); the matrices that write to the residual stream, o_proj and down_proj, by 1/sqrt(2L) of that; gains 1.
        Each parameter has a generator of its own, seeded by (seed, name): its values do not depend on the order of creation, nor on
        who else exists, so that ablations share what they have in common and every world size starts alike. Meta tensors stay meta.
        """
        for name, p in self.named_parameters():
            if p.is_meta:
                continue
            if name.endswith(("alpha_p", "alpha_n")):      # softplus^-1 of 0.8, and of 0.8 - beta
                p.fill_(math.log(math.expm1(0.8 - (XIELU.BETA if name.endswith("alpha_n") else 0))))
            elif p.ndim == 1:
                p.fill_(1.0)
            elif name.endswith((".v", ".u", ".guide")):    # a structured layer's
                from studies import structured
                p.copy_(structured.initial(name, self.config, lambda name, shape: draw(name, shape, self.config, seed)))
            else:
                p.copy_(draw(name, p.shape, self.config, seed))

    def compile_blocks(self, **how):
        """torch.compile(..., **how) each block and the loss of a chunk. Blocks share their code, so the time does not grow with depth."""
        for block in self.model.layers:
            block.compile(**how)
        self.chunk_loss = torch.compile(chunk_loss, **how)

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T):
        """
        Training FLOPs a token at window length T: 6 a matrix parameter (the head counts, the embedding is a look-up) and 6 L H D T for
        attention, causal pairs counted once. No recompute, no masked pairs: what MFU is measured by (PaLM, app. B, causal).
        """
        c = self.config
        matrices = sum(p.numel() for m in self.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False) if p.ndim > 1)
        return 6 * matrices + 6 * c.n_layer * c.n_head * c.head_dim * T

    def hidden(self, idx, doc=None, cache=None):
        """Token ids (B, T) -> normalised last hidden states (B, T, C)."""
        x = self.model.embed_tokens(idx)                   # (B, T, C)
        x = x if self.dtype is None else x.to(self.dtype)
        positions = torch.arange(idx.shape[1], device=idx.device) if cache is None else cache.begin(idx.shape[1])
        angles = positions[..., None].float() * rope_frequencies(self.config, idx.device)   # (T, D/2) or (B, T, D/2)
        angles = torch.cat((angles, angles), dim=-1)       # (..., T, D)
        cos, sin = (t.to(x.dtype) if t.ndim == 2 else t[:, None].to(x.dtype) for t in (angles.cos(), angles.sin()))
        doc = document_mask(doc) if self.config.doc_mask else None
        for block in self.model.layers:
            x = block(x, cos, sin, doc, cache)
        return self.model.norm(x)

    def forward(self, idx, targets=None, keep=None, doc=None, n_tokens=None, per_token=False, cache=None):
        """
        idx (B, T) int64. Without targets: logits (B, T, V), None; with a cache (generate.py) those of the last position alone, (B, V).
        With targets (B, T): None, loss, the mean over kept positions.

        keep (B, T) bool: which positions have a loss (goldfish.py); targets below 0 never have. doc (B, T): document ids for attention.
        n_tokens: divide by this, the kept tokens of the whole step, instead of by those of this batch; then gradients of several
        batches and ranks add up. per_token: return the negative log-likelihoods (B, T) in nats, fp32, without gradient, not their mean.
        """
        x, head = self.hidden(idx, doc, cache), self.lm_head.weight
        if targets is None:
            return self.lm_head(x if cache is None else x[:, -1]), None
        if per_token:
            x, head = x.detach(), head.detach()
        keep = targets >= 0 if keep is None else keep & (targets >= 0)
        n_tokens = keep.sum().clamp(min=1) if n_tokens is None else n_tokens
        weights = (at_least_fp32(keep.to(x.dtype)) / n_tokens).flatten()
        targets, rows = targets.clamp(min=0), chunk_rows(self.config.vocab_size, x.device)
        loss, nll = ChunkedCrossEntropy.apply(x.flatten(0, 1), head, targets.flatten(), weights, rows, self.chunk_loss)
        return None, nll.view(targets.shape) if per_token else loss


