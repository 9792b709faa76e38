"""
Text from a model: sampling, and the cache of keys and values that makes a new token cost one position instead of all.

    generate(model, ids, n)        the whole continuation
    stream(model, ids, n)          the same, one token of each row at a time

A token is drawn from softmax(logits / temperature), without the tail that top_k or top_p cuts off. Keys and values of
the past never change, so they are kept: the prompt is read once, and each further step reads one token per row. The
model does not know of the cache, which replaces Attention.attend in each layer while text is generated. The cache
grows with the text, or it is *fixed*: each step then has the same shapes, as torch.compile and CUDA graphs need, and
attention spans the whole buffer.

Sources: nanoGPT's sample.py for the interface; top_p: Holtzman et al., arXiv 1904.09751.
"""

import contextlib
import functools
import math

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from engine.decoding import one_row_products
from engine.parallel import local
from loss import at_least_fp32
from model import masked_attention

# Letters: B batch, T new positions, S positions in the cache, H query heads, K kv heads, D head dim, V vocabulary.

CHUNK = 512                        # positions of a prompt read at once: scores and mask have at most this many rows


def generate(model, idx, max_new_tokens, stop=(), compile=False, **sampling):
    """
    Continue token ids by sampling.

    idx: (B, T) tensor, or a list of B id sequences of any lengths. A row ends at an id of `stop`, and repeats it until
    all rows have ended. compile: one compiled step of a fixed shape, a CUDA graph on a GPU; it pays for long outputs,
    whereas eager starts at once. sampling: temperature, top_k, top_p and generator of sample_token.

    Returns (B, T + n) for a tensor (prompt included, as in nanoGPT), and for a list a list of B id lists, each cut
    after its stop token. ValueError for an empty prompt.
    """
    steps = list(stream(model, idx, max_new_tokens, stop, compile, **sampling))
    new = torch.stack(steps, dim=1)                        # (B, n)
    if isinstance(idx, torch.Tensor):
        return torch.cat((idx, new), dim=1)
    rows = []
    for prompt, row in zip(idx, new.tolist()):
        end = next((n for n, token in enumerate(row, 1) if token in stop), None)
        rows.append([*prompt, *row[:end]])
    return rows


@torch.no_grad()
def stream(model, idx, max_new_tokens, stop=(), compile=False, cache=None, **sampling):
    """
    generate(), one step at a time: yields the next tokens (B,). Ends early when all rows have ended.

    cache: a KVCache of the first tokens of idx, so that only the others are read. It grows; the last token yielded is
    not in it.
    """
    prompts = [*map(torch.as_tensor, idx)]
    lengths = torch.tensor([*map(len, prompts)])
    if lengths.min() == 0:
        raise ValueError("a prompt is empty: begin it with the tokenizer's bos")
    device = model.lm_head.weight.device
    # Aligned to the right, so that the next token of every row is in the same column.
    x = pad_sequence(prompts, True, padding_side="left").to(device, torch.long)
    B, T = x.shape
    padding = (T - lengths).to(device) if lengths.min() < T else None
    # A compiled step is compiled anew for each size of the cache: multiples of 256 keep them few.
    size = T + max_new_tokens
    cache = cache or KVCache(model, B, size + -size % 256 if compile else size, padding)
    cache.grow(size)
    x = x[:, cache.length:]
    step = next_logits
    if compile and device.type == "cpu":
        one_row_products(model)
    ended = torch.zeros(B, dtype=torch.bool, device=device)
    stop = torch.tensor(list(stop), dtype=torch.long, device=device)
    with cache.attached(model):
        for _ in range(max_new_tokens):
            logits = step(model, x, cache)                 # (B, V)
            token = sample_token(logits, **sampling)       # (B,)
            token = torch.where(ended, x[:, -1], token)
            yield token
            ended = torch.isin(token, stop)                # of an ended row too, which repeats its last token
            if ended.all():
                return
            x = token[:, None]
            # The prompt is read eagerly, since prompts differ in length; from here on each step has the same shape.
            if compile and not cache.fixed:
                cache.fix()
                step = compiled_step(device.type)


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """
    Logits (B, V) -> token ids (B,).

    temperature 0 takes the largest; top_k keeps that many tokens, top_p the smallest set with that much probability;
    None or 0 keeps all, as does top_p=1. generator: the torch.Generator to draw from, None = torch's own.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = at_least_fp32(logits) / temperature
    if top_k:
        largest = logits.topk(min(top_k, logits.shape[-1])).values  # (B, k)
        logits = logits.masked_fill(logits < largest[:, -1:], -math.inf)
    if top_p and top_p < 1:
        p, order = logits.softmax(-1).sort(descending=True)         # (B, V)
        # A token is outside if the more probable ones have enough probability already.
        outside = p.cumsum(-1) - p >= top_p
        logits = logits.masked_fill(outside.scatter(1, order, outside), -math.inf)
    # Without the 1e-30, which changes no other draw, torch 2.13 on MPS sometimes draws a token of probability 0: it
    # divides by random numbers, 0 among them, and 0/0 counts as the largest (pytorch issue 192577).
    token = torch.multinomial(logits.softmax(-1) + 1e-30, 1, generator=generator)  # (B, 1)
    return token[:, 0]


def next_logits(model, x, cache):
    """The newest tokens (B, T) -> logits of the next token (B, V). A long prompt is read in chunks."""
    for part in x.split(CHUNK, dim=1):
        positions = cache.begin(part.shape[1])
        logits, _ = model(part, positions=positions, last=True)
    # Cleared, since a compiled step would have to return them as outputs.
    cache.here = cache.mask = None
    return logits


@functools.cache
def compiled_step(device):
    """next_logits for a fixed cache, compiled for a type of device."""
    # A CUDA graph is one launch per step instead of hundreds. On a CPU xIELU has more operations than this
    # threshold, so its result is stored, and not computed anew for every output of the next matrix.
    how = dict(mode="reduce-overhead") if device == "cuda" else dict(options={"realize_opcount_threshold": 12})
    return torch.compile(next_logits, fullgraph=True, **how)


class KVCache:
    """
    Keys and values of the past: for each layer two preallocated buffers (B, K, size, D).

    Prompts of different lengths are aligned to the right: row b begins after padding[b] positions, which no position
    attends to. padding (B,) int64, None = none. next_logits() reads tokens into it, inside attached().
    """

    def __init__(self, model, batch, size, padding=None):
        config = model.config
        weight = local(model.model.embed_tokens.weight)    # new_zeros() of a DTensor would be one too
        shape = batch, config.n_kv_head, size, config.head_dim
        new = functools.partial(weight.new_zeros, shape, dtype=model.dtype or weight.dtype)
        # A single buffer for all layers would be copied at every layer by a compiled step.
        self.kv = [(new(), new()) for _ in range(config.n_layer)]
        self.padded = padding is not None
        self.padding = padding if self.padded else weight.new_zeros(batch, dtype=torch.long)
        self.size = size
        self.length = 0
        self.fixed = False

    def grow(self, size):
        """Make room for `size` positions in all, if there is less."""
        if size > self.size:
            more = 0, 0, 0, size - self.size
            self.kv = [tuple(F.pad(buffer, more) for buffer in buffers) for buffers in self.kv]
            self.size = size

    def fix(self):
        """
        Give each further step the same shapes and addresses: the length becomes a tensor, and attention spans the whole
        buffer. From then on nothing checks whether there is room.
        """
        self.fixed = True
        self.length = torch.tensor(self.length, device=self.padding.device)
        if self.length.is_cuda:
            # CUDA graphs update tensors with a static address in place, and copy all others.
            for t in (*sum(self.kv, ()), self.padding, self.length):
                torch._dynamo.mark_static_address(t)

    def begin(self, T):
        """
        Set the mask (B, 1, T, S) of T more positions, for which grow() has made room. Returns their RoPE positions
        (B, T), counted from the beginning of each row.
        """
        device = self.padding.device
        new = torch.arange(T, device=device) + self.length  # columns of the buffer, (T,)
        self.span = self.size if self.fixed else self.length + T
        self.here = new if self.fixed else slice(self.length, self.span)
        self.length += T
        # A whole prompt without padding needs no mask, and flash attention takes none.
        if T == self.span and not self.padded:
            self.mask = None
            return new[None]
        query = new[:, None]                               # (T, 1)
        key = torch.arange(self.span, device=device)       # (S,)
        text = key >= self.padding[:, None, None, None]    # (B, 1, 1, S)
        # Padding attends at least to itself: softmax over nothing would be NaN.
        self.mask = (key <= query) & (text | (key == query))
        return (new - self.padding[:, None]).clamp(min=0)

    @contextlib.contextmanager
    def attached(self, model):
        """A context in which the layers of the model attend through this cache; one at a time for each model."""
        layers = [block.self_attn for block in model.model.layers]
        before = layers[0].attend
        if isinstance(before, functools.partial):
            raise ValueError("this model is generating another text already: finish that one first")
        for layer, buffers in zip(layers, self.kv):
            layer.attend = functools.partial(self.attend, buffers)
        try:
            yield
        finally:
            for layer in layers:
                layer.attend = before

    def attend(self, buffers, q, k, v, doc=None):
        """Store a layer's k and v (B, K, T, D) and attend to all that is stored. q (B, H, T, D) -> (B, H, T, D)."""
        for buffer, new in zip(buffers, (k, v)):
            buffer[:, :, self.here] = new
        k, v = (buffer[:, :, :self.span] for buffer in buffers)  # (B, K, S, D)
        # One token is one row of scores. On CUDA the formula reads k and v once, whereas kernels with a mask want their
        # heads repeated first; compiled on a CPU it is faster than the kernel.
        if q.shape[2] == 1 and self.mask is not None and (q.is_cuda or self.fixed):
            return by_formula(q, k, v, self.mask)
        return masked_attention(q, k, v, self.mask)


def by_formula(q, k, v, mask):
    """softmax(q k^T / sqrt(D)) v for one position: q (B, H, 1, D), k, v (B, K, S, D), mask (B, 1, 1, S)."""
    rows = q.reshape(*k.shape[:2], -1, k.shape[3])         # (B, K, H/K, D): a key-value head serves H/K query heads
    z = at_least_fp32(rows @ k.mT) * k.shape[3] ** -0.5    # (B, K, H/K, S)
    p = z.masked_fill(~mask, -math.inf).softmax(-1)
    return (p.to(v.dtype) @ v).view_as(q)
