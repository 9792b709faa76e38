"""
Text from a model: sampling, and the cache of keys and values that makes a new token cost one position instead of all.

    generate(model, ids, n)        the whole continuation
    stream(model, ids, n)          the same, one token of each row at a time

A token is drawn from softmax(logits / temperature), less the tail that top_k or top_p cuts off. Keys and
values of the past never change, so they are kept: the prompt is read once, and each further step reads
one token a row. The cache grows with the text; or it is *fixed*: every step then has one shape, which
torch.compile and CUDA graphs need, at the price of attention over the whole buffer.

Sources: nanoGPT's sample.py for the interface; top_p: Holtzman et al., arXiv 1904.09751.
"""

import functools
import math

import torch
from torch.nn.utils.rnn import pad_sequence

from engine.hardware import at_least_fp32
from model import Linear, library_attention, masked_attention

# Letters: B batch, T new positions, S positions in the cache, H query heads, K kv heads, D head dim, V vocab.


def generate(
    model,
    idx,
    max_new_tokens,
    stop=(),
    compile=False,
    **sampling,
):
    """
    Continue token ids by sampling.

    idx: (B, T) tensor, or a list of B id sequences of any lengths. A row ends at an id of `stop`, and
    repeats it until all rows have ended. compile: one compiled step of a fixed shape, a CUDA graph on a
    GPU; pays for long outputs, whereas eager starts at once. sampling: temperature, top_k, top_p and
    generator of sample_token.

    Returns (B, T + n) for a tensor (prompt included, as nanoGPT does), and for a list a list of B id
    lists, each cut after its stop token. ValueError for an empty prompt.
    """
    steps = list(stream(model, idx, max_new_tokens, stop, compile, **sampling))
    new = torch.stack(steps, dim=1)  # (B, n)
    if isinstance(idx, torch.Tensor):
        return torch.cat((idx, new), dim=1)
    texts = []
    for prompt, row in zip(idx, new.tolist()):
        texts.append([*prompt, *cut(row, stop)])
    return texts


def cut(row, stop):
    """The ids of a row up to its first stop token, which is included."""
    for n, token in enumerate(row, start=1):
        if token in stop:
            return row[:n]
    return row


@torch.no_grad()
def stream(model, idx, max_new_tokens, stop=(), compile=False, **sampling):
    """generate(), one step at a time: yields the (B,) next tokens. Ends early when all rows have ended."""
    prompts = [torch.as_tensor(row) for row in idx]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    if lengths.min() == 0:
        raise ValueError("a prompt is empty: begin it with the tokenizer's bos")
    device = model.lm_head.weight.device
    # Aligned to the right, so that the next token of every row stands in the same column.
    x = pad_sequence(prompts, batch_first=True, padding_side="left")
    x = x.to(device, torch.long)  # (B, T)
    B, T = x.shape
    start = (T - lengths).to(device) if lengths.min() < T else None
    size = T + max_new_tokens
    # Few sizes of the cache mean few compilations.
    if compile:
        size += -size % 256
    cache = KVCache(model, B, size, start)
    ended = torch.zeros_like(cache.start, dtype=torch.bool)
    stop = torch.tensor(list(stop), dtype=torch.long, device=device)
    step = next_logits
    for _ in range(max_new_tokens):
        logits = step(model, x, cache) if cache.fixed else read(model, x, cache)  # (B, V)
        token = sample_token(logits, **sampling)  # (B,)
        token = torch.where(ended, x[:, -1], token)
        yield token
        ended |= torch.isin(token, stop)
        if ended.all():
            return
        x = token[:, None]
        # The prompt is read eagerly, since prompts differ in length; from here on every step has one shape.
        if compile and not cache.fixed:
            cache.fix()
            step = compiled_step(device.type)


def sample_token(
    logits,
    temperature=1.0,
    top_k=None,
    top_p=None,
    generator=None,
):
    """
    Logits (B, V) -> token ids (B,).

    temperature 0 takes the largest; top_k keeps that many tokens, top_p the smallest set with that much
    probability; None or 0 keeps all. generator: the torch.Generator to draw from, None = torch's own.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = at_least_fp32(logits) / temperature
    if top_k:
        k = min(top_k, logits.shape[-1])
        largest = logits.topk(k).values  # (B, k)
        outside = logits < largest[:, -1:]
        logits = logits.masked_fill(outside, -math.inf)
    if top_p:
        p = logits.softmax(-1)  # (B, V)
        p, order = p.sort(descending=True)
        # Outside are the tokens before which the larger ones have enough probability already.
        outside = p.cumsum(-1) - p >= top_p
        outside = outside.scatter(1, order, outside)
        logits = logits.masked_fill(outside, -math.inf)
    p = logits.softmax(-1)
    token = torch.multinomial(p, 1, generator=generator)  # (B, 1)
    return token[:, 0]


# -----------------------------------------------------------------------------
# One step, eager or compiled


# Positions that are read at once. The mask and the scores of attention are of this many rows, whatever the length.
CHUNK = 512


def read(model, x, cache):
    """next_logits() of a prompt of any length, in chunks: by the cache each sees what was before, nothing changes."""
    for part in x.split(CHUNK, dim=1):
        logits = next_logits(model, part, cache)
    return logits


def next_logits(model, x, cache):
    """The newest tokens (B, T) -> logits of the next (B, V)."""
    logits, _ = model(x, cache=cache)
    # What a compiled step leaves behind in the cache, it would have to return.
    cache.here = cache.mask = None
    return logits


@functools.cache
def compiled_step(device):
    """next_logits for a fixed cache, compiled for a type of device."""
    # A CUDA graph: one launch a step instead of hundreds.
    how = dict(mode="reduce-overhead")
    if device != "cuda":
        # xIELU counts as many operations. Above this threshold it is stored, and not computed anew for every output.
        how = dict(options={"realize_opcount_threshold": 12})
    return torch.compile(next_logits, fullgraph=True, **how)


# -----------------------------------------------------------------------------
# The cache


class KVCache:
    """
    Keys and values of the past: for each layer two preallocated buffers (B, K, size, D).

    Prompts of different lengths stand aligned to the right: row b begins at start[b], and nothing looks
    at the padding before it. start (B,) int64, None = no padding. The model calls `begin` once a forward
    pass and `attend` once a layer.
    """

    def __init__(self, model, batch, size, start=None):
        config = model.config
        weight = model.lm_head.weight
        device = weight.device
        dtype = model.dtype or weight.dtype
        shape = batch, config.n_kv_head, size, config.head_dim
        self.kv = []
        # A single buffer for all layers would be copied at every layer by a compiled step.
        for _ in range(config.n_layer):
            keys = torch.zeros(shape, dtype=dtype, device=device)
            values = torch.zeros_like(keys)
            self.kv.append((keys, values))
        self.padded = start is not None
        if start is None:
            start = torch.zeros(batch, dtype=torch.long, device=device)
        self.start = start
        self.size = size
        self.length = 0
        self.fixed = False

    def fix(self):
        """
        From here on every step has the same shapes and addresses: the length is a tensor, and attention
        spans the whole buffer. Nothing checks any more whether there is room.
        """
        self.fixed = True
        self.length = torch.tensor(self.length, device=self.start.device)
        if self.start.device.type == "cuda":
            buffers = [buffer for pair in self.kv for buffer in pair]
            # CUDA graphs update what has a static address in place, and copy everything else.
            for t in (*buffers, self.start, self.length):
                torch._dynamo.mark_static_address(t)

    def begin(self, T):
        """
        Make room for T more positions and set their mask (B, 1, T, S). Returns their RoPE positions
        (B, T), counted from each row's start. ValueError if the buffers are full.
        """
        device = self.start.device
        new = torch.arange(T, device=device) + self.length  # columns of the buffer, (T,)
        if self.fixed:
            self.here = new
            self.span = self.size
        else:
            self.span = self.length + T
            self.here = slice(self.length, self.span)
        if self.span > self.size:
            raise ValueError(
                f"the KV cache holds {self.size} positions, {self.span} were asked for: "
                "make it larger or the prompt shorter"
            )
        self.length += T
        self.layer = 0
        query = new[:, None]  # (T, 1)
        key = torch.arange(self.span, device=device)  # (S,)
        text = key >= self.start[:, None, None]  # (B, 1, S)
        # Padding sees at least itself: softmax over nothing would be NaN.
        seen = (key <= query) & (text | (key == query))
        self.mask = seen[:, None]
        positions = new - self.start[:, None]
        return positions.clamp(min=0)

    def attend(self, q, k, v):
        """Store this layer's k and v (B, K, T, D) and attend to all that is stored. q (B, H, T, D) -> (B, H, T, D)."""
        keys, values = self.kv[self.layer]
        self.layer += 1
        keys[:, :, self.here] = k
        values[:, :, self.here] = v
        k = keys[:, :, : self.span]  # (B, K, S, D)
        v = values[:, :, : self.span]
        T = q.shape[2]
        S = k.shape[2]
        way = way_to_attend(q.device.type, T, S, self.fixed, self.padded)
        if way == "formula":
            return masked_attention(q, k, v, self.mask)
        return library_attention(q, k, v, None if way == "causal" else self.mask)


def way_to_attend(device, T, S, fixed, padded):
    """
    How the T newest of S positions attend: by the "formula", or by torch's kernels, "causal" or with a "mask".

    One token is one row of scores: on CUDA the formula reads k and v once, whereas kernels that take a mask
    want their heads repeated first. Compiled on a CPU it is faster than the kernel there. A whole prompt that
    nothing is padded in needs no mask, and flash attention takes none.
    """
    if device == "cuda" and T == 1 or device == "cpu" and fixed:
        return "formula"
    if fixed or padded or T < S:
        return "mask"
    return "causal"


# -----------------------------------------------------------------------------
# The layout of the weights


@torch.no_grad()
def lay_out_for_decoding(model):
    """
    Store fp32 matrices with more outputs than inputs by columns: same values and shape, other strides.

    On a CPU (MKL, one thread) a matrix times one vector reads along its long side 1.2 to 2 times as fast.
    For a model that only generates: checkpoints want rows. On other devices and in bf16 nothing changes.
    """
    embedding = model.model.embed_tokens.weight  # rows of it are looked up
    for module in model.modules():
        dense = isinstance(module, Linear) and "weight" in module._parameters
        if not dense or module.weight is embedding:
            continue
        weight = module.weight
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        if on_cpu and module.out_features > module.in_features:
            weight.data = weight.data.T.contiguous().T
