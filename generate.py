"""
Text from a model: sampling, and the cache of keys and values that makes a new token cost one position instead of all.

    generate(model, ids, n)   the whole continuation        stream(model, ids, n)   the same, a token at a time

Source: nanoGPT's sampling for the interface; top_p as in arXiv 1904.09751.
"""

import functools
import math

import torch
import torch.nn.functional as F

from engine.hardware import at_least_fp32
from model import Linear, masked_attention


class KVCache:
    """
    Keys and values of the past for `generate`: one preallocated buffer a layer. Prompts of different lengths stand
    right-aligned: row b begins at start[b], and nothing looks at the padding before it.
    """

    def __init__(self, model, batch, size, start=None):
        c, p, self.size = model.config, model.lm_head.weight, size
        buffer = lambda: torch.zeros(batch, c.n_kv_head, size, c.head_dim, dtype=model.dtype or p.dtype, device=p.device)
        self.kv = [(buffer(), buffer()) for _ in range(c.n_layer)]       # apart: compiled, one for all would be copied at every layer
        self.start = torch.zeros(batch, dtype=torch.long, device=p.device) if start is None else start
        self.length, self.fixed = 0, False

    def fix(self):
        """
        From here on the length is a tensor and attention spans the whole buffer: every step has one shape and runs the same kernels
        on the same addresses, which torch.compile and CUDA graphs need. Nobody checks for room any more.
        """
        self.length, self.fixed = torch.tensor(self.length, device=self.start.device), True
        if self.start.device.type == "cuda":
            for t in (*sum(self.kv, ()), self.start, self.length):
                torch._dynamo.mark_static_address(t)       # CUDA graphs: updated in place, not copied

    def begin(self, T):
        """Make room for T positions. Sets the mask (B, 1, T, S); returns the RoPE positions (B, T), counted from each row's start."""
        if not self.fixed and self.length + T > self.size:
            raise ValueError(f"the KV cache holds {self.size} positions, {self.length + T} were asked for: make it larger or the prompt shorter")
        i = torch.arange(T, device=self.start.device) + self.length
        self.here = i if self.fixed else slice(self.length, self.length + T)
        self.length += T
        self.span = self.size if self.fixed else self.length
        j = torch.arange(self.span, device=self.start.device)
        seen = (j <= i[:, None]) & ((j >= self.start[:, None, None]) | (j == i[:, None]))   # padding sees itself, or softmax is NaN
        self.mask = seen[:, None]                                                           # (B, 1, T, S)
        self.layer = 0
        return (i - self.start[:, None]).clamp(min=0)

    def attend(self, q, k, v):
        """Store this layer's k and v (B, K, T, D) and attend to all that is stored. q (B, H, T, D) -> (B, H, T, D)."""
        (keys, values), self.layer = self.kv[self.layer], self.layer + 1
        keys[:, :, self.here], values[:, :, self.here] = k, v
        k, v = keys[:, :, :self.span], values[:, :, :self.span]                             # (B, K, S, D)
        if self.fixed and q.device.type == "cpu":          # one token, compiled: 0.4 ms less of 7.8 than SDPA (6 layers)
            return masked_attention(q, k, v, self.mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)


def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop=(), generator=None, compile=False):
    """
    Continue token ids by sampling. idx: (B, T), or a list of B id sequences of any lengths.
    temperature 0 is greedy; top_k, top_p cut the tail (0 = off); a row ends at an id of `stop` and repeats it until all rows have ended.
    compile: one compiled step of a fixed shape, a CUDA graph on a GPU; pays for long outputs, eager starts at once.
    Returns (B, T + n) for a tensor (prompt included, as nanoGPT does), and a list of B id lists, cut at their stop token, for a list.
    """
    new = torch.stack(list(stream(model, idx, max_new_tokens, temperature, top_k, top_p, stop, generator, compile)), dim=1)   # (B, n)
    if isinstance(idx, torch.Tensor):
        return torch.cat((idx, new), dim=1)
    out = []
    for prompt, row in zip(idx, new.tolist()):
        end = next((i + 1 for i, t in enumerate(row) if t in set(stop)), len(row))
        out.append(list(prompt) + row[:end])
    return out


@torch.no_grad()
def stream(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop=(), generator=None, compile=False):
    """generate(), one step at a time: yields (B,) next tokens. Rows that met a stop token repeat it until all rows have."""
    prompts = [torch.as_tensor(row) for row in idx]
    T = max(map(len, prompts))
    if min(map(len, prompts)) == 0:
        raise ValueError("a prompt is empty: begin it with the tokenizer's bos")
    device = model.lm_head.weight.device
    x = torch.zeros(len(prompts), T, dtype=torch.long, device=device)
    for row, prompt in zip(x, prompts):
        row[T - len(prompt):] = prompt                 # right-aligned, so that all rows end together
    size = T + max_new_tokens
    size += -size % 256 * compile                      # few sizes, few compilations
    cache = KVCache(model, len(prompts), size, torch.tensor([T - len(p) for p in prompts], device=device))
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    stop = torch.tensor(list(stop), dtype=torch.long, device=device)
    step = next_logits
    for _ in range(max_new_tokens):
        logits = step(model, x, cache)                                                   # (B, V)
        token = sample_token(logits, temperature, top_k, top_p, generator)              # (B,)
        token = torch.where(ended, x[:, -1], token)
        yield token
        ended |= torch.isin(token, stop)
        if ended.all():
            return
        x = token[:, None]                             # the cache holds the rest
        if compile and step is next_logits:            # the prompt is read eagerly: its length is another each time
            cache.fix()
            step = compiled_step(device.type)


def next_logits(model, x, cache):
    """One step of decoding: the newest tokens (B, T) -> logits of the next (B, V)."""
    logits, _ = model(x, cache=cache)
    cache.here = cache.mask = None                         # or a compiled step would have to return them
    return logits


@functools.cache
def compiled_step(device):
    """next_logits for a cache of fixed shape. reduce-overhead records the kernels as one CUDA graph: a launch a token, not hundreds."""
    if device == "cuda":
        return torch.compile(next_logits, fullgraph=True, mode="reduce-overhead")
    return torch.compile(next_logits, fullgraph=True, options={"realize_opcount_threshold": 12})     # or xIELU is computed anew for every output


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """
    Logits (B, V) -> token ids (B,). temperature 0 takes the largest; top_k keeps that many tokens, top_p the smallest set with that
    much probability; None or 0 keeps all.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = at_least_fp32(logits) / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]                      # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p:
        value, order = logits.softmax(-1).sort(descending=True)                             # (B, V)
        outside = value.cumsum(-1) - value >= top_p                                         # the mass before it is enough already
        logits = logits.masked_fill(outside.scatter(1, order, outside), -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


@torch.no_grad()
def lay_out_for_decoding(model):
    """
    Store fp32 matrices with more outputs than inputs by columns: same values and shape, other strides. A matrix times one vector reads
    along its long side 1.2 to 2 times as fast on a CPU (MKL, one thread): the head of 16,384 x 384 takes 1.1 ms instead of 2.2.
    For a model that only generates: checkpoints want rows. On other devices and in bf16 nothing changes.
    """
    for m in model.modules():
        if isinstance(m, Linear) and m.out_features > m.in_features and m.weight is not model.model.embed_tokens.weight:
            if m.weight.device.type == "cpu" and m.weight.dtype == torch.float32:
                m.weight.data = m.weight.data.T.contiguous().T
