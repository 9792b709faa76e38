"""
Goldfish loss: drop some labels from the loss, so that the model cannot recite a text that it has read a hundred times.

    loss = - sum_i keep_i log p(x_i | x_<i) / sum_i keep_i      keep_i = 0  if  hash(x_{i-h+1}, ..., x_i) < 1/k,  else 1

The hash sees the last h labels and nothing else, so a repeated passage drops the same labels every
time: they are never trained on, the model has to guess them, and recitation breaks at the first wrong
guess. A random mask would drop other labels each time, and in the end every label would be trained.
Two limits: the first h-1 labels of a window are kept, and one changed token changes the mask of h
labels. How much is recited, with and without: results/memorize/table.md.
Source: Hans et al. (arXiv 2406.10209) sec. 3; Apertus report (arXiv 2509.14233) sec. 2.3, k = h = 50.

hash='product', Apertus' own, bit-exact:  uniform[(x_{i-h+1} ... x_i) mod 1,000,003]
    The product wraps around in int64, and its remainder is not negative. An even id brings a factor of two,
    and 64 of them (or one id 0) make the product 0, which reads uniform[0] = 0.23368 whatever the text says.
    The table holds random numbers in [0, 1), and a label is dropped below 1/k. So labels of product 0 are *never*
    dropped at k = 50 and *always* at k <= 4. Products with 52 or more factors of two take few values, and
    1.2 to 1.6 % of their labels are dropped. Apertus therefore dropped not 2 % of its labels but fewer;
    how many depends on the text:

        h = 50, Apertus' ids            product = 0    dropped at k = 50    at k = 4
        Python's standard library           19 %            1.44 %            40 %
        Pride and Prejudice                  6 %            1.77 %            30 %
        tables (encodings/*.py)             84 %            0.20 %            89 %
        the library as bytes (their ids)    92 %            0.10 %            94 %

    At h <= 24 almost no product is 0, and 1/k of the labels are dropped.

hash='mix', ours:  finalizer(x_{i-h+1} A^{h-1} + ... + x_{i-1} A + x_i  mod 2^64) / 2^64
    drops 1/k for any ids and any h, and sees the order of the labels, which the product does not.

hash='coef', the Apertus 2 trainer's, bit-exact:  uniform[(c_1 x_{i-h+1} + ... + c_h x_i) mod 1,000,003]
    drops 1/k too: the c are fixed and odd, so one even id or one 0 does not make the sum 0.

Scope. Apertus hashes each window of block_size labels by itself (context=None): the first h-1 labels
have no full hash and are kept. At 4096 that hardly matters. At 256, reading a passage
128 times at random offsets trains each label that should be dropped 128 * 49 / 256 = 24 times.
With context = the h-1 tokens before the window, the same passage has the same mask wherever it is cut.

$ python goldfish.py                                          # drop rates of Python's standard library by three hashes
$ python goldfish.py FILES [--tokenizer=byte] [--k=4] [--h=13]     # of a text, and a passage with its dropped labels
"""

import functools
import glob
import sysconfig

import numpy as np
import torch

# Letters: B batch, T time, c labels of context, h labels in a hashed window, 1/k the share to drop.

tokenizer = "apertus"   # whose ids are hashed: apertus, apertus:K, byte, bpe:FILE (tokenizer.py)
k = 50                  # drop one label in k
h = 50                  # labels that the hash sees, the dropped one included
show = 200              # tokens of the text to print, the dropped ones in brackets
paths = []              # text files; default: the modules of Python's standard library

TABLE_SIZE = 1_000_003
SEED = 2971215073
A = 6364136223846793005  # multiplier of Knuth's MMIX generator s <- A s + c; here c is the label


def goldfish_mask(labels, k=50, h=50, hash="product", context=None, exempt=()):
    """
    True where the loss keeps a label, False where it drops it.

    labels (T,) or (B, T) int32 or int64 on the CPU. k > 1: one label in k is dropped. h >= 1: labels
    that the hash sees, the dropped one included. hash 'product' (Apertus, bit-exact), 'mix', or 'coef'
    (Apertus 2, bit-exact). context (c,) or (B, c): the tokens before the labels, c = h-1 to hash every label;
    with fewer or None (c = 0) the first h-1-c labels are kept. exempt: ids that are never dropped. Returns
    a bool tensor of labels' shape. ValueError for a wrong type or value. Sources: apply_goldfish in
    swiss-ai/Megatron-LM and swiss-ai/Megatron-LM-MoE.
    """
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels are {labels.dtype}: want torch.int64 (labels.long())")
    if hash not in HASHES or k <= 1 or h < 1:
        raise ValueError(f"k={k}, h={h}, hash={hash!r}: want k > 1, h >= 1, and one of {', '.join(HASHES)}")
    if context is None:
        context = labels[..., :0]
    x = torch.cat((context, labels), -1).long().numpy()  # (B, c+T)
    keep = np.ones(x.shape, bool)
    key = HASHES[hash](x, h)
    if hash == "mix":
        keep[..., h - 1 :] = key >= int(2**64 / k)
    else:
        # key % TABLE_SIZE, written out: numpy's % branches on the sign, which takes twice as long.
        keep[..., h - 1 :] = kept_keys(k)[key - key // TABLE_SIZE * TABLE_SIZE]
    keep |= np.isin(x, exempt)
    return torch.from_numpy(keep[..., context.shape[-1] :])  # (B, T)


# -----------------------------------------------------------------------------
# Three hashes of h neighbouring labels


def fold(x, h, join):
    """
    join(... join(join(x_i, x_i+1), x_i+2) ..., x_i+h-1) for every i, by doubling: 7 joins instead of 49 at h = 50.

    x (..., T) array; join(left, right, n) combines neighbouring runs, n = length of the right one,
    and is associative. Returns (..., T-h+1), empty if T < h. The bits of h give the lengths: 50 = 0b110010 goes
    1, 2, 3, 6, 12, 24, 25, 50.
    """
    runs, n = x, 1  # runs[..., i] is the join of x_i ... x_{i+n-1}
    for bit in f"{h:b}"[1:]:
        left, right = runs[..., :-n], runs[..., n:]
        runs = join(left, right, n)
        n *= 2
        if bit == "1":
            runs = join(runs[..., :-1], x[..., n:], 1)
            n += 1
    return runs


def window_product(x, h):
    """x (..., T) int64 -> (..., T-h+1) int64: product of h neighbours, wrapping around, exact in any order."""
    return fold(x, h, lambda left, right, n: left * right)


def window_sum(x, h):
    """x (..., T) int64 -> (..., T-h+1) int64: sum of h neighbours times fixed odd numbers, wrapping around."""
    generator = torch.Generator().manual_seed(SEED + h)
    odd = torch.randint(2**62, (h,), generator=generator).numpy() | 1
    n = max(0, x.shape[-1] - h + 1)
    return sum(c * x[..., j : j + n] for j, c in enumerate(odd))


@functools.lru_cache(maxsize=4)
def kept_keys(k):
    """
    Whether each key keeps its label: a bool numpy array (1,000,003,).

    As bools it takes 1 MB and stays in the CPU's cache; the 4 MB of random numbers may not.
    """
    # The CPU's generator, in fp32: a GPU or fp64 would draw other numbers.
    generator = torch.Generator().manual_seed(SEED)
    uniform = torch.rand(TABLE_SIZE, generator=generator)
    return (uniform >= 1 / k).numpy()


def window_mix(x, h):
    """
    x (..., T) int64 -> (..., T-h+1) uint64, uniform: a polynomial in A, then the finalizer of SplitMix64.

    A is odd, so products with it lose no bits; A has a good spectrum (Knuth, TAOCP 3.3.4), so small
    differences of ids do not cancel: windows of 50 ids below 2^17 that differ in one or two labels
    never collide (tested, all pairs). The finalizer (Steele et al. 2014) turns a counter into random
    numbers, so all 64 bits depend on the last label too.
    """
    z = fold(x.view(np.uint64), h, lambda left, right, n: left * pow(A, n, 2**64) + right)
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
    z = (z ^ z >> 27) * 0x94D049BB133111EB
    return z ^ z >> 31


HASHES = dict(product=window_product, mix=window_mix, coef=window_sum)

# -----------------------------------------------------------------------------
# The command


def main():
    """Print the share of labels that each hash drops, and a passage with its dropped tokens in brackets."""
    from engine.files import read_text
    from tokenizer import load as load_tokenizer

    tok = load_tokenizer(tokenizer)
    ids = []
    for path in paths or sorted(glob.glob(f"{sysconfig.get_path('stdlib')}/*.py")):
        ids += [tok.bos, *tok.encode(read_text(path)), tok.eos]
    labels = torch.tensor(ids)
    if len(ids) < h:
        raise ValueError(f"a text of {len(ids)} tokens is shorter than h={h}: name a longer one, or take --h=13")
    n = len(ids) - h + 1
    zeros = (window_product(labels.numpy(), h) == 0).mean()
    whose = dict(product=f"Apertus; {zeros:.0%} of the products are 0", mix="ours", coef="Apertus 2")
    for hash in HASHES:
        keep = goldfish_mask(labels, k, h, hash)[h - 1 :].tolist()
        print(f"{hash}, k = {k}, h = {h}: drops {keep.count(False) / n:.2%} of {n:,} labels ({whose[hash]})")
    keep = goldfish_mask(labels, k, h)[h - 1 :].tolist()
    print(f"\nBy product, from label {h} on; the [dropped] ones have no loss:\n")
    print(*(tok.decode([i]) if kept else f"[{tok.decode([i])}]" for i, kept in zip(ids[h - 1 :], keep[:show])), sep="")


if __name__ == "__main__":
    from configurator import run

    run(main, globals())
