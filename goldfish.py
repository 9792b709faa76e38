"""
Goldfish loss: which tokens the loss forgets, so that the model cannot recite what it has read a hundred times.

    loss = - sum_i keep_i log p(x_i | x_<i) / sum_i keep_i      keep_i = 0  if  hash(x_{i-h+1}, ..., x_i) < 1/k,  else 1

The hash sees the last h labels and nothing else, so a passage that comes back loses the same tokens every time: they
are never trained on, must be guessed, and recitation breaks at the first wrong guess. A mask drawn at random would have
its holes elsewhere each time, and in the end none.
Source: Hans et al. (arXiv 2406.10209) sec. 3; Apertus report (arXiv 2509.14233) sec. 2.3, k = h = 50.

hash='product', what Apertus trained with, bit for bit:  table[(x_{i-h+1} ... x_i  mod 2^64)  mod 1,000,003]
    An even id brings factors of two, and 64 of them (or one id 0) make the product 0, which reads table[0] = 0.23368
    whatever the text says. The table is uniform in [0, 1) and below 1/k is forgotten, so these windows are *never*
    forgotten at k = 50 and *always* at k <= 4. Apertus dropped not 2 % of its labels but fewer, and how many depends on
    the text:

        h = 50, Apertus' ids            product = 0    dropped at k = 50    at k = 4
        Python's standard library           19 %            1.44 %            40 %
        Pride and Prejudice                  6 %            1.77 %            30 %
        tables (encodings/*.py)             84 %            0.20 %            89 %        At h <= 24 almost no window
        the library as bytes                92 %            0.10 %            94 %        collapses, and 1/k is dropped.

hash='mix', ours:  finalizer(x_{i-h+1} A^{h-1} + ... + x_{i-1} A + x_i  mod 2^64) / 2^64
    drops 1/k for any ids and any h, and sees the order of the labels, which the product does not.

Scope. Apertus hashes each window of block_size labels by itself (context=None): the first h-1 labels have no full hash
and are kept. At 4096 that hardly matters. At 256, a passage read 128 times at random offsets has each of its holes
filled 128 * 49 / 256 = 24 times. With context = the h-1 tokens before: same passage, same mask, wherever it is cut.

$ python goldfish.py [FILE] [--tokenizer=byte] [--k=4] [--h=13]     # drop rates of any text, a passage with its holes
"""

import functools, itertools, os, sys, sysconfig

import numpy as np
import torch

# Letters: B batch, T time, h labels in a window, 1/k the share to forget.

tokenizer = "apertus"   # whose ids are hashed: apertus, apertus:K, byte, bpe:FILE (tokenizer.py)
k = 50                  # forget one label in k
h = 50                  # labels that the hash sees, the forgotten one included
show = 200              # tokens of the text to print with the forgotten ones marked
paths = []              # text files; default: the top-level modules of the running Python's standard library

TABLE_SIZE = 1_000_003
A = 6364136223846793005  # Knuth's MMIX multiplier: s <- A s + x is his random generator, fed with labels


def goldfish_mask(labels, k=50, h=50, hash="product", context=None):
    """
    True where the loss keeps a label, False where it forgets it.

    labels (T,) or (B, T) int64 on the CPU. k > 1: one label in k is forgotten. h >= 1: labels that the hash sees, the
    forgotten one included. hash 'product' (Apertus, bit-exact) or 'mix'. context (c,) or (B, c) int64: the tokens
    before the labels, c = h-1 to hash them all; with fewer or None (c = 0) the first h-1-c labels are kept. Returns a
    bool tensor of labels' shape. ValueError for other shapes, kinds or values. Source: swiss-ai/Megatron-LM,
    apply_goldfish: 41 ns per token on one core (AMD EPYC); this takes 6 in batches of 4 x 4096, 'mix' 14.
    """
    context = labels[..., :0] if context is None else context
    check(labels, k, h, hash, context)
    x = np.concatenate([context.numpy(), labels.numpy()], -1)        # (B, c+T)
    keep = np.ones(x.shape, bool)
    if x.shape[-1] >= h:
        if hash == "product":
            p = window_product(x, h)                                 # (B, c+T-h+1)
            kept = table(k)[p - p // TABLE_SIZE * TABLE_SIZE]  # p % TABLE_SIZE; % branches on p's sign: 11 ns, not 6
        else:
            kept = window_mix(x, h) >= np.uint64(int(2**64 / k))
        keep[..., h - 1 :] = kept
    return torch.from_numpy(keep[..., context.shape[-1] :])          # (B, T)


def check(labels, k, h, hash, context):
    if labels.ndim not in (1, 2) or context.shape[:-1] != labels.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} and context {tuple(context.shape)} do not fit: "
                         "want (T,) and (c,) or (B, T) and (B, c)")
    for x in (labels, context):
        if x.dtype != torch.int64 or x.device.type != "cpu":
            raise ValueError(f"labels and context are {x.dtype} on {x.device}: want int64 on the CPU (x.long().cpu())")
    if not k > 1 or not isinstance(h, int) or h < 1:
        raise ValueError(f"k={k}, h={h}: want k > 1 (one label in k is forgotten) and a whole h >= 1")
    if hash not in ("product", "mix"):
        raise ValueError(f"hash={hash!r}: there is 'product' (Apertus) and 'mix'")


@functools.lru_cache(maxsize=4)
def table(k):
    """(1,000,003,) bool numpy array: is this key kept? 1 MB stays in the cache where the floats, 4 MB, may not."""
    generator = torch.Generator().manual_seed(2971215073)      # the CPU's: a GPU draws other numbers
    return (torch.rand(TABLE_SIZE, generator=generator) >= 1 / k).numpy()  # in fp32, where 1/50 is 0.01999999955


def fold(x, h, join):
    """
    join(... join(join(x_i, x_i+1), x_i+2) ..., x_i+h-1) for every i, by doubling: 7 joins instead of 49 at h = 50.

    x (..., T) array; join(left, right, n) combines neighbouring runs, n = length of the right one, and is associative.
    Returns (..., T-h+1). The bits of h say the lengths: 50 = 0b110010 goes 1, 2, 3, 6, 12, 24, 25, 50.
    """
    w, n = x, 1
    for bit in bin(h)[3:]:
        w, n = join(w[..., :-n], w[..., n:], n), 2 * n
        if bit == "1":
            w, n = join(w[..., :-1], x[..., n:], 1), n + 1
    return w


def window_product(x, h):
    """x (..., T) int64 -> (..., T-h+1) int64: product of h neighbours, modulo 2^64, exact in any order."""
    return fold(x, h, lambda left, right, n: left * right)


def window_mix(x, h):
    """
    x (..., T) int64 -> (..., T-h+1) uint64, uniform: a polynomial in A, then the finalizer of SplitMix64.

    A is odd, so a label is not lost as it ages; A has a good spectrum (Knuth, TAOCP 3.3.4), so small differences of
    ids do not cancel: windows of 50 ids below 2^17 that differ in one or two labels never collide (tested, all pairs).
    """
    def shift_and_add(left, right, n):
        left = left * np.uint64(pow(A, n, 2**64))
        left += right
        return left

    z = fold(x.view(np.uint64), h, shift_and_add)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)     # Steele et al. 2014: makes a counter random,
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)     # so the last label decides over all 64 bits
    return z ^ z >> np.uint64(31)


def read(path):
    with open(path, "rb") as f:
        data = f.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: byte {e.start} is not UTF-8; want a text file (iconv -t utf-8 converts)") from None


def marked(ids, keep, decode):
    """The text of ids, forgotten tokens struck through in red on a terminal, in wdiff's [-brackets-] elsewhere."""
    left, right = ("\x1b[9;31m", "\x1b[0m") if sys.stdout.isatty() else ("[-", "-]")
    runs = itertools.groupby(zip(ids, keep), key=lambda pair: pair[1])
    texts = ((kept, decode([i for i, _ in run])) for kept, run in runs)  # by run: characters span tokens
    return "".join(text if kept else left + text + right for kept, text in texts)


def main():
    import tokenizer as tokenizers

    tok = tokenizers.load(tokenizer)
    stdlib = sysconfig.get_path("stdlib")
    files = paths or [os.path.join(stdlib, f) for f in sorted(os.listdir(stdlib)) if f.endswith(".py")]
    documents = [[tok.bos, *tok.encode(read(path)), tok.eos] for path in files]
    labels = torch.tensor(list(itertools.chain(*documents)))         # (T,) one stream, as prepare.py writes it
    if len(labels) < h:
        raise ValueError(f"{len(labels)} tokens in {len(files)} files, want at least h={h}: give more, or lower --h")
    where = f"{len(files)} modules of the standard library" if not paths else ", ".join(paths)
    print(f"{where}: {len(labels):,} tokens of {tokenizer!r}\n")
    print("  k    h     1/k     product: dropped   windows = 0        mix: dropped   windows = 0")
    for kk, hh in dict.fromkeys([(k, h), (4, h), (k, 13)]):          # 4: collapsed windows are dropped; 13: none
        if len(labels) < hh:
            continue
        line = f"{kk:3} {hh:4} {1 / kk:8.2%}"
        for name, window in (("product", window_product), ("mix", window_mix)):
            dropped = 1 - goldfish_mask(labels, kk, hh, name)[hh - 1 :].float().mean()
            line += f"   {dropped:16.2%} {(window(labels.numpy(), hh) == 0).mean():13.2%}"
        print(line)
    for name in ("product", "mix"):
        passage = slice(h - 1, h - 1 + show)
        keep = goldfish_mask(labels, k, h, name)[passage].tolist()
        print(f"\n--- {name}, k = {k}, h = {h}: {keep.count(False)} of {len(keep)} labels forgotten")
        print(marked(labels[passage].tolist(), keep, tok.decode))


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
