"""
What tools/bench.py races against: transformers' Apertus with our weights, nanoGPT's model, AdEMAMix tensor by tensor, the published Goldfish mask.

What people would otherwise run: nothing here is tuned by us, and tools/bench.py first checks that it computes the same.
"""

import functools

import torch
import torch.nn.functional as F


def hugging_face(ours):
    """transformers' ApertusForCausalLM with the weights of ours, on the same device."""
    import transformers
    import convert
    transformers.logging.set_verbosity_error()
    config = transformers.ApertusConfig(**convert.config_to_hf(ours.config), attn_implementation="sdpa", pad_token_id=3)
    with ours.lm_head.weight.device:
        theirs = transformers.ApertusForCausalLM(config).float()
    theirs.load_state_dict({**theirs.state_dict(), **ours.state_dict()})
    theirs.generation_config.eos_token_id = None           # or generate may stop early
    return theirs


class GPTBlock(torch.nn.Module):
    """A block of nanoGPT's model.py (GPT-2): layer norms without bias, one matrix for q, k and v, GELU, 4 C wide."""

    def __init__(self, C, H):
        super().__init__()
        self.H, linear = H, lambda n, m: torch.nn.Linear(n, m, bias=False)
        self.ln_1, self.c_attn, self.attn_proj = torch.nn.LayerNorm(C, bias=False), linear(C, 3 * C), linear(C, C)
        self.ln_2, self.c_fc, self.c_proj = torch.nn.LayerNorm(C, bias=False), linear(C, 4 * C), linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.H, C // self.H).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(torch.nn.Module):
    """nanoGPT of the same width, depth and vocabulary: another model, so its loss is not compared, and it has fewer FLOPs a token."""

    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(c.vocab_size, c.n_embd), torch.nn.Embedding(c.block_size, c.n_embd)
        self.h = torch.nn.ModuleList(GPTBlock(c.n_embd, c.n_head) for _ in range(c.n_layer))
        self.ln_f = torch.nn.LayerNorm(c.n_embd, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight[:idx.shape[1]]
        for block in self.h:
            x = block(x)
        return F.cross_entropy((self.ln_f(x) @ self.wte.weight.T).flatten(0, 1), targets.flatten())

    def flops_per_token(self, c):
        matrices = sum(p.numel() for p in self.parameters() if p.ndim > 1) - self.wpe.weight.numel()   # wte is the head as well
        return 6 * matrices + 6 * c.n_layer * c.n_embd * c.block_size


def loop_ademamix(params, states, t, lr, betas, alpha, eps, weight_decay):
    """AdEMAMix tensor by tensor and operation by operation, as its authors' reference does it (apple/ml-ademamix), warm-ups done."""
    b1, b2, b3 = betas
    for p, (m1, m2, v) in zip(params, states):
        g = p.grad
        m1.mul_(b1).add_(g, alpha=1 - b1)
        m2.mul_(b3).add_(g, alpha=1 - b3)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        denominator = (v.sqrt() / (1 - b2**t) ** 0.5).add_(eps)
        update = (m1 / (1 - b1**t) + alpha * m2) / denominator
        update.add_(p, alpha=weight_decay)
        p.add_(-lr * update)


@functools.cache
def published_table():
    return torch.rand(1_000_003, generator=torch.Generator().manual_seed(2971215073))


def published_mask(labels, k, h):
    """The mask by the expression that Apertus ran (swiss-ai/Megatron-LM, apply_goldfish), a row at a time."""
    table = published_table()
    keep = torch.ones(labels.shape, dtype=torch.bool)
    keep[:, h - 1:] = ~(table[labels.unfold(-1, h, 1).prod(dim=-1) % 1_000_003] < 1 / k)
    return keep
