"""goldfish.py against the published implementation (values and expression), big integers, SplitMix64."""

import numpy as np
import pytest
import torch
from conftest import script
from tiny import tensors

from goldfish import A, goldfish_mask, window_mix

WRAP = 2**64


def ids(*shape, high=131072, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def published(labels, k, h):
    """Which labels are kept, by the expression that Apertus ran (swiss-ai/Megatron-LM, apply_goldfish)."""
    uniform = torch.rand(1_000_003, generator=torch.Generator().manual_seed(2971215073))
    forgotten = uniform[labels.unfold(0, h, 1).prod(dim=-1) % 1_000_003] < 1 / k
    return torch.cat([torch.ones(h - 1, dtype=torch.bool), ~forgotten])


@pytest.mark.parametrize("case", range(6))
def test_identical_to_the_published_mask(case):
    golden = tensors("goldfish.npz")
    labels, kept = golden[f"tokens_{case}"], ~golden[f"dropped_{case}"]
    assert torch.equal(goldfish_mask(labels, *golden[f"kh_{case}"].tolist()), kept)


@pytest.mark.parametrize("case", range(6))
def test_identical_to_the_coefficients_of_the_apertus_2_trainer(case):
    """
    swiss-ai/Megatron-LM-MoE, goldfish.py, which can exempt ids. int32, several rows, and context change nothing.
    """
    golden = tensors("goldfish_coef.npz")
    k, h = golden[f"kh_{case}"].tolist()
    labels, kept = golden[f"tokens_{case}"], ~golden[f"dropped_{case}"]
    exempt = torch.isin(labels, golden[f"exempt_{case}"])
    assert torch.equal(goldfish_mask(labels, k, h, "coef") | exempt, kept)
    rows = labels.int().expand(3, -1)
    c = h - 1
    mask = goldfish_mask(rows[:, c:], k, h, "coef", rows[:, :c])
    assert torch.equal(mask | exempt[c:], kept[c:].expand(3, -1))


@pytest.mark.parametrize("k, h", [(50, 50), (2, 1), (7.5, 13), (2, 64), (4.279285256079162, 50)])
def test_identical_to_the_published_expression_for_any_int64(k, h):
    """Ids whose product is 0, ids that wrap around, negative ids. The last 1/k is the table's first number."""
    rows = ids(4, 5000)
    rows[1] %= 40
    rows[2] = rows[2] * 2**46 + 1
    rows[3] *= -1
    before = rows.clone()
    assert torch.equal(goldfish_mask(rows, k, h), torch.stack([published(row, k, h) for row in rows]))
    assert torch.equal(goldfish_mask(rows[0]), published(rows[0], 50, 50))  # Apertus' k and h (report sec. 2.3)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("h", [1, 2, 7, 50, 64])
def test_the_mix_is_its_formula_in_big_integers(h):
    x = ids(160).tolist()
    polynomial = [sum(v * A ** (h - 1 - j) for j, v in enumerate(x[i : i + h])) % WRAP for i in range(161 - h)]
    # With h = 1 the mix is the finalizer alone.
    finalized = window_mix(np.array(polynomial, np.uint64), 1)
    assert np.array_equal(window_mix(np.array(x), h), finalized)


def test_the_finalizer_is_that_of_splitmix64():
    """First outputs for the seeds 0 and 1234567, from the reference C code (Vigna). A is Knuth's multiplier of MMIX."""
    gamma = 0x9E3779B97F4A7C15
    seeds = np.array([0, 1234567, 1234567 + gamma], np.uint64)
    states = seeds + np.uint64(gamma)
    assert window_mix(states, 1).tolist() == [0xE220A8397B1DCDAF, 6457827717110365317, 3203168211198807973]
    assert A == 6364136223846793005


@pytest.mark.parametrize("hash, h", [("product", 13), ("mix", 50), ("coef", 1)])
def test_with_context_the_masks_of_windows_are_that_of_the_stream(hash, h):
    stream = ids(h - 1 + 8 * 64)
    context, windows = stream.unfold(0, h - 1 + 64, 64).split([h - 1, 64], dim=1)
    whole = goldfish_mask(stream, 4, h, hash)
    want = whole[h - 1 :].view(8, 64)
    assert torch.equal(goldfish_mask(windows, 4, h, hash, context), want)
    # Without context, as with scope 'window', the first h-1 labels are kept.
    want[:, : h - 1] = True
    assert torch.equal(goldfish_mask(windows, 4, h, hash), want)


@pytest.mark.parametrize("hash", ["product", "mix", "coef"])
def test_labels_that_no_window_ends_in_are_kept(hash):
    """With h = 50 only the 50th of 50 labels can be dropped, and k = 1.0001 drops it."""
    for T in (0, 1, 7, 49, 50):
        kept = [[True] * min(T, 49) + [False] * (T == 50)] * 2
        assert goldfish_mask(ids(2, T), 1.0001, 50, hash).tolist() == kept


def test_the_command_prints_the_rates_of_a_text_and_a_passage_with_its_holes(tmp_path):
    text = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 20
    (tmp_path / "austen.txt").write_text(text)
    done = script("goldfish.py", tmp_path / "austen.txt", "--tokenizer=byte", "--k=3", "--h=13", "--show=100")
    kept = published(torch.tensor([1, *(64 + b for b in text.encode()), 2]), 3, 13)[12:].tolist()
    rate, mix, *_, holes, _ = done.stdout.split("\n")
    assert rate.startswith(f"product, k = 3, h = 13: drops {kept.count(False) / 1690:.2%} of 1,690 labels (Apertus; 0%")
    assert mix == "mix, k = 3, h = 13: drops 40.06% of 1,690 labels (ours)"
    assert holes == "".join(c if keep else f"[{c}]" for c, keep in zip(text[11:], kept[:100]))
