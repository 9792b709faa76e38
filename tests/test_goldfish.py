"""goldfish.py against the published implementation (values and expression), big integers, SplitMix64, real text."""

import glob
import math
import os

import numpy as np
import pytest
import torch

from conftest import ROOT, script
from goldfish import A, goldfish_mask, table, window_mix, window_product

GOLDEN = np.load(os.path.join(ROOT, "tests", "golden", "goldfish.npz"), allow_pickle=False)
WRAP = 2**64


def ids(*shape, high=131072, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator)


def published(labels, k, h):
    """Which labels are kept, by the expression that Apertus ran (swiss-ai/Megatron-LM, apply_goldfish)."""
    uniform = torch.rand(1_000_003, generator=torch.Generator().manual_seed(2971215073))
    products = labels.unfold(0, h, 1).prod(dim=-1)
    forgotten = uniform[products % 1_000_003] < 1 / k
    return torch.cat([torch.ones(h - 1, dtype=torch.bool), ~forgotten])


@pytest.mark.parametrize("case", range(6))
def test_identical_to_the_published_mask(case):
    k, h = GOLDEN[f"kh_{case}"].tolist()
    labels = torch.from_numpy(GOLDEN[f"tokens_{case}"])
    kept = ~torch.from_numpy(GOLDEN[f"dropped_{case}"])
    assert torch.equal(goldfish_mask(labels, k, h), kept)
    assert torch.equal(goldfish_mask(labels.expand(3, -1), k, h), kept.expand(3, -1))


@pytest.mark.parametrize("k, h", [(50, 50), (2, 1), (3, 2), (7.5, 13), (50, 32), (4, 63), (2, 64)])
def test_identical_to_the_published_expression_for_any_int64(k, h):
    """Ids that make the product 0, that wrap around, and negative ones."""
    for labels in (ids(5000), ids(5000, high=40), ids(5000, high=2**62) * 4 + 1, -ids(5000)):
        assert torch.equal(goldfish_mask(labels, k, h), published(labels, k, h))


def test_the_table_is_the_published_one():
    for i, value in enumerate((0.23368388, 0.44126403, 0.74114770, 0.90927190)):
        assert table(1 / (value - 1e-6))[i] and not table(1 / (value + 1e-6))[i]
    assert (~table(50)).sum() == 19_901


@pytest.mark.parametrize("h", [1, 2, 7, 13, 50, 64])
def test_both_hashes_are_their_formula_in_big_integers(h):
    x = ids(160).tolist()
    windows = [x[i : i + h] for i in range(len(x) - h + 1)]
    signed = [(math.prod(w) + WRAP // 2) % WRAP - WRAP // 2 for w in windows]
    assert window_product(np.array(x), h).tolist() == signed
    polynomial = [sum(v * A ** (h - 1 - j) for j, v in enumerate(w)) % WRAP for w in windows]
    # With h = 1 the mix is the finalizer alone.
    finalized = window_mix(np.array(polynomial, np.uint64).view(np.int64), 1)
    assert np.array_equal(window_mix(np.array(x), h), finalized)


def test_the_finalizer_is_that_of_splitmix64():
    """First outputs for the seeds 0 and 1234567, from the reference C code (Vigna); A is Knuth's, of MMIX."""
    gamma = 0x9E3779B97F4A7C15
    states = [gamma, 1234567 + gamma, 1234567 + 2 * gamma]
    x = np.array([s % WRAP for s in states], np.uint64).view(np.int64)
    assert window_mix(x, 1).tolist() == [0xE220A8397B1DCDAF, 6457827717110365317, 3203168211198807973]
    assert A == 6364136223846793005


@pytest.mark.parametrize("hash", ["product", "mix"])
@pytest.mark.parametrize("h", [1, 13, 50])
def test_with_context_the_masks_of_windows_are_that_of_the_stream(hash, h):
    stream, T = ids(h - 1 + 8 * 64), 64
    windows = stream[h - 1 :].view(8, T)
    context = torch.stack([stream[i * T : i * T + h - 1] for i in range(8)])
    want = goldfish_mask(stream, 4, h, hash)[h - 1 :].view(8, T)
    assert torch.equal(goldfish_mask(windows, 4, h, hash, context), want)
    assert torch.equal(goldfish_mask(windows[3], 4, h, hash, context[3]), want[3])
    # Without it, the scope 'window', the first h-1 labels are kept.
    alone = goldfish_mask(windows, 4, h, hash)
    assert alone[:, : h - 1].all() and torch.equal(alone[:, h - 1 :], want[:, h - 1 :])


@pytest.mark.parametrize("name", ["apertus", "byte"])
def test_mix_drops_one_in_k_of_real_text_and_product_does_not(name):
    """Source code: a product of 0 reads table[0] = 0.23368, which is kept at k = 50 and forgotten at k = 4."""
    import tokenizer
    text = "".join(open(path, encoding="utf-8").read() for path in sorted(glob.glob(f"{ROOT}/*.py")))
    labels = torch.tensor(tokenizer.load(name).encode(text))
    n = len(labels) - 49
    for k in (50, 4):
        dropped = 1 - goldfish_mask(labels, k, 50, "mix")[49:].double().mean().item()
        assert abs(dropped - 1 / k) < 5 * (1 / k / n) ** 0.5
    zero = torch.from_numpy(window_product(labels.numpy(), 50) == 0)
    k50, k4 = (goldfish_mask(labels, k)[49:] for k in (50, 4))
    assert zero.double().mean() > 0.1 and k50[zero].all() and not k4[zero].any()


def test_windows_that_differ_in_one_or_two_labels_never_collide():
    """a A^i + b A^j = 0 mod 2^64 means a A^(i-j) = -b, as A is odd: no |a|, |b| < 2^17 do. The finalizer is 1:1."""
    a = np.arange(1, 2**17, dtype=np.uint64)
    for n in range(1, 50):
        b = (a * np.uint64(pow(A, n, WRAP))).view(np.int64)
        assert np.abs(b).min() >= 2**17


def test_by_default_it_is_what_apertus_trained_with():
    """k = h = 50 and the product (report sec. 2.3)."""
    labels = ids(20_000, seed=4)
    default = goldfish_mask(labels)
    assert torch.equal(default, goldfish_mask(labels, 50, 50, "product"))
    for k, h in ((51, 50), (50, 51)):
        assert not torch.equal(default, goldfish_mask(labels, k, h))


@pytest.mark.parametrize("hash", ["product", "mix"])
def test_what_is_shorter_than_a_window_is_kept_and_the_labels_stay_as_they_are(hash):
    for T in (0, 1, 49):
        assert goldfish_mask(ids(2, T), 2, 50, hash).tolist() == [[True] * T] * 2
    labels = ids(50)
    before = labels.clone()
    mask = goldfish_mask(labels, 1.0001, 50, hash)
    assert mask.tolist() == [True] * 49 + [False] and torch.equal(labels, before)


@pytest.mark.parametrize("args", [(ids(4).int(),), (ids(4), 1), (ids(4), 50, 0), (ids(4), 50, 50, "sha")])
def test_a_wrong_argument_is_an_error_that_names_what_it_wants(args):
    with pytest.raises(ValueError, match="want "):
        goldfish_mask(*args)


def test_the_command_prints_the_rates_of_a_text_and_a_passage_with_its_holes(tmp_path):
    text = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 20
    (tmp_path / "austen.txt").write_text(text)
    done = script("goldfish.py", tmp_path / "austen.txt", "--tokenizer=byte", "--k=3", "--h=13", "--show=100")
    first, passage, _, second, *_ = done.stdout.split("\n")
    labels = torch.tensor([1, *(64 + b for b in text.encode()), 2])
    for line, hash in ((first, "product"), (second, "mix")):
        keep = goldfish_mask(labels, 3, 13, hash)[12:]
        rate = f"{1 - keep.float().mean():.2%}"
        assert line == f"{hash}, k = 3, h = 13: forgets {rate} of {len(keep):,} labels"
    marks = [letter if keep else f"[{letter}]" for letter, keep in zip(text[11:], published(labels, 3, 13)[12:])]
    assert passage == "".join(marks[:100])
