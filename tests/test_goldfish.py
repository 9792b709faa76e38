"""goldfish.py against the published implementation (values and expression), big integers, SplitMix64, real text."""
import math, os, sysconfig

import goldfish
import numpy as np
import pytest
import torch
from conftest import ROOT, script
from goldfish import A, goldfish_mask, marked, table, window_mix, window_product

GOLDEN = np.load(os.path.join(ROOT, "tests", "golden", "goldfish.npz"), allow_pickle=False)
M, WRAP = 1_000_003, 2**64


def ids(*shape, high=131072, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def published(labels, k, h):
    """Keep, by the expression that Apertus ran (swiss-ai/Megatron-LM, apply_goldfish)."""
    uniform = torch.rand(M, generator=torch.Generator().manual_seed(2971215073))
    forget = uniform[labels.unfold(0, h, 1).prod(dim=-1) % M] < 1 / k
    return torch.cat([torch.ones(h - 1, dtype=torch.bool), ~forget])


@pytest.mark.parametrize("case", range(6))
def test_identical_to_the_published_mask(case):
    k, h = GOLDEN[f"kh_{case}"].tolist()
    labels, dropped = (torch.from_numpy(GOLDEN[f"{name}_{case}"]) for name in ("tokens", "dropped"))
    assert torch.equal(goldfish_mask(labels, k, h), ~dropped)
    assert torch.equal(goldfish_mask(labels.expand(3, -1), k, h), ~dropped.expand(3, -1))


@pytest.mark.parametrize("k, h", [(50, 50), (2, 1), (3, 2), (4, 3), (7.5, 13), (50, 32), (4, 63), (2, 64), (3, 65)])
def test_identical_to_the_published_expression_for_any_int64(k, h):
    for labels in (ids(5000), ids(5000, high=40), ids(5000, high=2**62) * 4 + 1, -ids(5000)):  # 0s, wraps, < 0
        assert torch.equal(goldfish_mask(labels, k, h), published(labels, k, h))


def test_table_is_the_published_one():
    for i, value in enumerate((0.23368388, 0.44126403, 0.74114770, 0.90927190, 0.71132231)):
        assert table(1 / (value - 1e-6))[i] and not table(1 / (value + 1e-6))[i]
    assert (~table(50)).sum() == 19_901


@pytest.mark.parametrize("h, odd, count, first", [
    (4, 0, 81, [52, 87, 146, 270, 400, 504, 516, 523]),
    (13, 0, 81, [154, 173, 182, 204, 233, 244, 252, 292]),
    (50, 0, 81, [227, 235, 287, 347, 351, 432, 484, 503]), (50, 1, 80, [89, 103, 190, 250, 274])])
def test_vectors_computed_with_the_published_code(h, odd, count, first):
    forgotten = (~goldfish_mask((torch.arange(4096) * 7919 + 13) % 131072 | odd, 50, h)).nonzero()[:, 0].tolist()
    assert len(forgotten) == count and forgotten[: len(first)] == first


@pytest.mark.parametrize("h", [1, 2, 3, 7, 13, 32, 50, 63, 64, 100])
def test_both_hashes_are_their_formula_in_big_integers(h):
    x = ids(160).tolist()
    windows = [x[i : i + h] for i in range(len(x) - h + 1)]
    product = [(math.prod(w) + WRAP // 2) % WRAP - WRAP // 2 for w in windows]               # signed, as int64 wraps
    assert window_product(np.array(x), h).tolist() == product
    polynomial = np.array([sum(v * A ** (h - 1 - j) for j, v in enumerate(w)) % WRAP for w in windows], np.uint64)
    assert np.array_equal(window_mix(np.array(x), h), window_mix(polynomial.view(np.int64), 1))  # h = 1: finalizer


def test_finalizer_is_that_of_splitmix64():  # first outputs for the seeds 0 and 1234567, from the reference C code
    gamma = 0x9E3779B97F4A7C15
    states = [gamma, 1234567 + gamma, 1234567 + 2 * gamma, 1234567 + 3 * gamma]
    x = np.array([s % WRAP for s in states], np.uint64).view(np.int64)
    want = [0xE220A8397B1DCDAF, 6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert window_mix(x, 1).tolist() == want


@pytest.mark.parametrize("hash", ["product", "mix"])
def test_a_passage_has_the_same_mask_in_any_surrounding(hash):
    passage, h = ids(300), 50
    alone = goldfish_mask(passage, 4, h, hash)[h - 1 :]
    assert not alone.all()
    for seed, left in enumerate((0, 1, 49, 500)):
        around = torch.cat([ids(left, seed=seed), passage, ids(77, seed=9)])
        assert torch.equal(goldfish_mask(around, 4, h, hash)[left + h - 1 : left + 300], alone)


@pytest.mark.parametrize("hash", ["product", "mix"])
@pytest.mark.parametrize("h", [1, 13, 50])
def test_context_makes_the_mask_of_windows_that_of_the_stream(hash, h):
    stream, T = ids(h - 1 + 8 * 64), 64
    windows, context = stream[h - 1 :].view(8, T), torch.stack([stream[i * T : i * T + h - 1] for i in range(8)])
    want = goldfish_mask(stream, 4, h, hash)[h - 1 :].view(8, T)
    assert torch.equal(goldfish_mask(windows, 4, h, hash, context), want)
    assert torch.equal(goldfish_mask(windows[3], 4, h, hash, context[3]), want[3])
    cut = goldfish_mask(windows, 4, h, hash)                               # scope 'window': the first h-1 are kept
    assert cut[:, : h - 1].all() and torch.equal(cut[:, h - 1 :], want[:, h - 1 :])


@pytest.fixture(scope="module")
def source():
    """Some 5 MB of real text: the top-level modules of the running Python's standard library."""
    folder = sysconfig.get_path("stdlib")
    files = sorted(f for f in os.listdir(folder) if f.endswith(".py"))
    return "".join(open(os.path.join(folder, f), encoding="utf-8").read() for f in files)


@pytest.mark.parametrize("name", ["apertus", "byte"])
def test_mix_drops_one_in_k_of_real_text_and_product_does_not(name, source):
    import tokenizer
    labels = torch.tensor(tokenizer.load(name).encode(source))
    for k in (50, 4):
        dropped = 1 - goldfish_mask(labels, k, 50, "mix")[49:].double().mean().item()
        assert abs(dropped * k - 1) < 0.05
    zero = window_product(labels.numpy(), 50) == 0
    k50, k4 = goldfish_mask(labels, 50)[49:], goldfish_mask(labels, 4)[49:]
    assert zero.mean() > 0.1 and k50[zero].all() and not k4[zero].any()    # 1/50 < table[0] = 0.23368 < 1/4
    assert 1 - k50.double().mean() < 0.018 and 1 - k4.double().mean() > 0.3


def test_product_collapses_as_often_as_the_factors_of_two_say():
    """Uniform ids below 2^17 have j factors of two with probability 2^-(j+1); 50 must add up to 64, or one be 0."""
    one = np.append(0.5 ** np.arange(1, 18), 0.5**17)                      # j = 0 .. 16, and id 0
    some = np.zeros(64)
    some[0] = 1.0                                                          # P(sum of factors = j), no 0 seen
    for _ in range(50):
        some = np.convolve(some, one[:17])[:64]
    expected = 1 - some.sum()                                              # 9.6 %
    seen = np.mean(window_product(ids(20_000, 50, seed=1).numpy(), 50) == 0)
    assert abs(seen - expected) < 5 * math.sqrt(expected * (1 - expected) / 20_000)


def test_windows_that_differ_in_one_or_two_labels_never_collide():
    """a A^i + b A^j = 0 mod 2^64 means a A^(i-j) = -b, as A is odd: no |a|, |b| < 2^17 do. The finalizer is 1:1."""
    a = np.arange(1, 2**17, dtype=np.uint64)
    for n in range(1, 50):
        b = (a * np.uint64(pow(A, n, WRAP))).view(np.int64)
        assert np.abs(b).min() >= 2**17


def test_different_windows_collide_no_more_often_than_chance(source):
    x = np.frombuffer(source[:200_000].encode(), np.uint8).astype(np.int64)
    windows = np.unique(np.lib.stride_tricks.sliding_window_view(x.astype(np.uint8), 50), axis=0)
    permuted = np.random.default_rng(0).permuted(np.tile(np.arange(50), (50_000, 1)), axis=1)
    for distinct in (windows[:100_000], permuted):                         # text; 50,000 orders of the same labels
        hashes, n = window_mix(distinct.astype(np.int64), 50)[:, 0], len(distinct)
        assert len(np.unique(hashes)) == n                                 # 64 bits: chance is 3e-10
        for shift in (0, 20, 40):                                          # any 24 bits: about n^2 / 2^25 pairs
            pairs = n * (n - 1) / 2 / 2**24
            counts = np.unique(hashes >> np.uint64(shift) & np.uint64(2**24 - 1), return_counts=True)[1]
            assert (counts * (counts - 1) // 2).sum() < pairs + 5 * math.sqrt(pairs)
    assert len(np.unique(window_product(permuted, 50))) == 1               # the product sees no order


def test_unasked_it_is_what_apertus_trained_with():
    """k = h = 50 and the product (report, sec. 2.3)."""
    labels = ids(20_000, seed=4)
    unasked = goldfish_mask(labels)
    assert torch.equal(unasked, goldfish_mask(labels, 50, 50, "product"))
    for k, h in ((51, 50), (50, 51)):
        assert not torch.equal(unasked, goldfish_mask(labels, k, h))


@pytest.mark.parametrize("hash", ["product", "mix"])
def test_edges(hash):
    for T in (0, 1, 49):
        assert goldfish_mask(ids(T), 2, 50, hash).all() and goldfish_mask(ids(2, T), 2, 50, hash).shape == (2, T)
    labels = ids(50)
    assert goldfish_mask(labels, 1.0001, 50, hash).tolist() == [True] * 49 + [False]
    before = labels.clone()
    assert goldfish_mask(labels, 2, 1, hash).dtype == torch.bool and torch.equal(labels, before)


@pytest.mark.parametrize("args, message", [
    ((ids(2, 2, 2),), "do not fit"), ((ids(2, 4), 50, 50, "mix", ids(49)), "do not fit"),
    ((ids(4).int(),), "want int64"), ((ids(4), 1), "want k > 1"), ((ids(4), 50, 0), "whole h >= 1"),
    ((ids(4), 50, 2.5), "whole h >= 1"), ((ids(4), 50, 50, "sha"), "'product' .* 'mix'")])
def test_a_wrong_argument_is_named(args, message):
    with pytest.raises(ValueError, match=message):
        goldfish_mask(*args)


def test_marked_shows_the_text_with_the_forgotten_tokens_in_brackets():
    text, keep = "Grüezi mitenand".encode(), [i not in (1, 4, 5) for i in range(16)]       # ü is two tokens, 2 and 3
    assert marked(text, keep, lambda run: bytes(run).decode()) == "G[-r-]ü[-ez-]i mitenand"


def test_command_prints_the_rates_of_a_text(tmp_path, monkeypatch, capsys):
    import tokenizer
    text = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 20
    (tmp_path / "austen.txt").write_text(text)
    for name, value in dict(paths=[str(tmp_path / "austen.txt")], tokenizer="byte", k=3).items():
        monkeypatch.setattr(goldfish, name, value)
    goldfish.main()
    shown, tok = capsys.readouterr().out, tokenizer.load("byte")
    labels = torch.tensor([tok.bos, *tok.encode(text), tok.eos])
    rates = [f"{1 - goldfish_mask(labels, 3, 50, hash)[49:].float().mean():.2%}" for hash in ("product", "mix")]
    rows = [line.split() for line in shown.splitlines()[3:6]]
    assert [row[:2] for row in rows] == [["3", "50"], ["4", "50"], ["3", "13"]]
    assert [rows[0][3], rows[0][5]] == rates and "[-" in shown


def test_too_little_text_is_refused(tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_text("short")
    monkeypatch.setattr(goldfish, "paths", [str(tmp_path / "short.txt")])
    with pytest.raises(ValueError, match="want at least h=50"):
        goldfish.main()


def test_command_refuses_what_is_not_text_in_one_line(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"abc\xff")
    got = script("goldfish.py", tmp_path / "x.bin")
    assert got.returncode == 2 and "byte 3 is not UTF-8" in got.stderr and got.stderr.count("\n") == 1
