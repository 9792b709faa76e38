"""data.py and stages.py against loops over the tokens, a cipher in Python's integers, and Apertus' published tables."""

import contextlib
import gc
import glob
import hashlib
import json
import os
import runpy
import shutil

import numpy as np
import pytest
import torch

from configurator import config_file, read_config
from conftest import script
from data import TokenDataset, begun, mapped, permute, read_meta
from goldfish import goldfish_mask
from schedule import steps_in, wsd
from stages import StagedDataset

BOS, EOS = 1, 2


def documents(letter, n):
    """Documents of growing length, each of one id; their tokens in a row."""
    return [i for length in range(n) for i in (BOS, *[letter] * (3 + length % 40), EOS)]


def write(folder, size, **sources):
    """A data folder of these sources {name: tokens}, a fifth of each for validation, in shards of `size` tokens."""
    os.makedirs(folder)
    meta = dict(tokenizer="none", tokenizer_hash="t", vocab_size=100, bos=BOS, eos=EOS, about={}, sources={})
    for name, tokens in sources.items():
        cut = len(tokens) * 4 // 5
        meta["sources"][name] = {}
        for split, part in dict(train=tokens[:cut], val=tokens[cut:]).items():
            about = dict(documents=part.count(BOS), bytes=3 * len(part), tokens=len(part), shards=[])
            for begin in range(0, len(part), size):
                piece = np.array(part[begin : begin + size], np.uint16)
                file, content = f"{name}_{split}_{begin}.npy", hashlib.sha256(piece.tobytes()).hexdigest()
                np.save(f"{folder}/{file}", piece)
                about["shards"].append(dict(file=file, tokens=len(piece), sha256=content))
            meta["sources"][name][split] = about
    with open(f"{folder}/meta.json", "w") as f:
        json.dump(meta, f)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources a, b, c of one letter each, in proportions 6 : 3 : 1, in shards of 700 tokens."""
    sources = dict(a=documents(10, 240), b=documents(11, 120), c=documents(12, 40))
    return write(tmp_path_factory.mktemp("data") / "abc", 700, **sources)


def stream_of(folder, names, split="train"):
    """All tokens of some sources, from the files."""
    sources = read_meta(folder)["sources"]
    files = [shard["file"] for name in names for shard in sources[name][split]["shards"]]
    return np.concatenate([np.load(f"{folder}/{file}") for file in files]).tolist()


# -----------------------------------------------------------------------------
# The order of samples


def plain_permute(i, n, seed, epoch):
    """In Python's integers: six Feistel rounds with MurmurHash3's finalizer, again until below n."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    while True:
        left, right = i >> half, i % 2**half
        for r in range(6):
            key = hashlib.sha256(f"{seed}:{epoch}:{r}".encode()).digest()[:4]
            x = right ^ int.from_bytes(key, "little")
            x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
            x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
            left, right = right, left ^ (x ^ x >> 16) % 2**half
        i = left << half | right
        if i < n:
            return i


@pytest.mark.parametrize("n, seed, epoch", [
    (1, 0, 0), (2, 28, 0), (999, 28, 0), (4096, 28, 1), (4097, ~28, 5), (3_662_109_375, 2**40, 3)])
def test_permute_is_the_cipher_that_runs_began_with(n, seed, epoch):
    """A run resumes by the number of its samples alone, so another order would repeat some texts and skip others."""
    numbers = np.random.default_rng(n).integers(0, n, 50)
    assert permute(numbers, n, seed, epoch).tolist() == [plain_permute(int(i), n, seed, epoch) for i in numbers]
    if n < 5000:
        assert sorted(permute(np.arange(n), n, seed, epoch)) == list(range(n))


@pytest.mark.parametrize("names, goldfish", [
    (None, ()), (("c", "b", "c"), (50,)), (None, (4, 13, "product")), (None, (4, 13, "mix", "stream"))])
def test_a_batch_is_what_a_loop_over_the_tokens_gives_wherever_it_begins(folder, names, goldfish):
    """
    Forwards, backwards, across epochs, across the samples computed ahead; a source twice counts twice. Goldfish in the
    scope of the stream is the mask of the uncut stream, which goes round at its begin; in that of the window, by
    default, the first h-1 labels are kept.
    """
    data = TokenDataset(folder, "train", 64, 28, *goldfish, sources=names)
    stream = stream_of(folder, names or "abc")
    assert data.n_tokens == len(stream) and data.n_windows == (len(stream) - 1) // 64
    k, h, hash, scope = (*goldfish, *(0, 50, "product", "window")[len(goldfish):])
    ring = torch.tensor(stream[-h:] + stream)
    ring = goldfish_mask(ring, k, h, hash) if k else torch.ones_like(ring, dtype=torch.bool)
    for first in (0, 7, 1021, 3, 5000, 10**6):
        batch = data.batch(first, 5)
        assert [t.dtype for t in batch] == [torch.int64, torch.int64, torch.bool, torch.int64]
        for g, idx, targets, keep, doc in zip(range(first, first + 5), *batch):
            epoch, i = divmod(g, data.n_windows)
            begin = 64 * plain_permute(i, data.n_windows, 28, epoch)
            window = stream[begin : begin + 65]
            assert (idx.tolist(), targets.tolist()) == (window[:-1], window[1:])
            want = ring[h + begin + 1 :][:64].clone()
            if scope == "window":
                want[: h - 1] = True
            # The end of a document is learnt, the next one's begin cannot be predicted.
            assert torch.equal(keep, want & (idx != EOS))
            assert doc.tolist() == [window[: t + 1].count(BOS) for t in range(64)]


# -----------------------------------------------------------------------------
# Weights and stages


@pytest.mark.parametrize("weights, slots", [
    (dict(a=1, b=2, c=4), [1429, 2857, 5714]), (dict(c=0.5, a=0.25), [6667, 3333])])
def test_a_weighted_sample_is_the_one_that_arithmetic_gives(folder, weights, slots):
    """
    Slots by largest remainders; a block of 10,000 samples is a permutation of them, and a source continues where the
    last block left it: so weights are exact in every block.
    """
    data = TokenDataset(folder, "train", 16, sources=weights)
    ends = np.cumsum(slots).tolist()
    streams = [stream_of(folder, name) for name in weights]
    samples = np.random.default_rng(0).integers(0, 10**6, 40)
    for g, stream, window in zip(samples.tolist(), *data.where(samples)):
        block, j = divmod(g, 10_000)
        slot = plain_permute(j, 10_000, ~28, block)
        source = next(s for s, end in enumerate(ends) if slot < end)
        n = (len(streams[source]) - 1) // 16
        epoch, i = divmod(block * slots[source] + slot - (ends[source] - slots[source]), n)
        assert (stream, window) == (source, plain_permute(i, n, 28, epoch))
    assert data.batch(g, 1)[0][0].tolist() == streams[source][16 * window : 16 * window + 16]
    stream, _ = data.where(np.arange(20_000, 30_000))
    assert np.bincount(stream).tolist() == slots


TABLE = ONE, TWO, _ = (("1", ("a",), 40, 28), ("2", dict(b=1, c=1), 70, 29), ("3", ("c",), 100, 30))


def test_stages_change_sources_and_seed_where_the_table_says(folder):
    """Later stages need no data yet. After the last stage that is read, its data continue."""
    data = StagedDataset(folder, TABLE, 16, 4, 13, "mix")
    parts = [TokenDataset(folder, "train", 16, seed, 4, 13, "mix", sources=sources) for _, sources, _, seed in TABLE]
    batches = [part.batch(0, n) for part, n in zip(parts, (40, 30, 60))]
    want = [torch.cat(tensors) for tensors in zip(*batches)]
    for first, n in ((0, 130), (35, 80), (40, 30)):
        assert all(torch.equal(x, y[first : first + n]) for x, y in zip(data.batch(first, n), want))
    for name in ("n_tokens", "n_windows"):
        assert getattr(data, name) == sum(getattr(part, name) for part in parts)
    early = StagedDataset(folder, [ONE, ("2", ("not yet",), 70, 29)], 16, 4, 13, "mix", stage="1")
    assert all(map(torch.equal, early.batch(0, 90), parts[0].batch(0, 90)))
    assert (data.stop, early.stop) == (None, 40)


@pytest.mark.parametrize("make, says", [
    (lambda d: TokenDataset(d, "train", 16, sources=["a", "z"]), "no source 'z'; it has a, b, c"),
    (lambda d: TokenDataset(d, "train", 16, sources=dict(a=1, b=0)), "positive number"),
    (lambda d: TokenDataset(d, "train", 16, sources=dict(a=1, b=1e-6)), "below one sample in 10,000"),
    (lambda d: TokenDataset(d, "train", 4000, sources=dict(a=1, c=1)), "block_size=4000 .* lower block_size"),
    (lambda d: TokenDataset(os.path.dirname(d), "train", 16), "python prepare.py"),
    (lambda d: StagedDataset(d, TABLE, 16, stage="9"), "no stage '9': the table has 1, 2, 3"),
    (lambda d: StagedDataset(d, (TWO, ONE), 16), "each later than the one before")])
def test_data_that_cannot_be_read_are_an_error_that_says_why(folder, make, says):
    with pytest.raises(ValueError, match=says):
        make(folder)


def test_bits_per_byte_are_over_all_sources_that_are_read(folder):
    """Nats of the predicted tokens, all but each document's begin, over log 2 and the bytes of both texts together."""
    data = TokenDataset(folder, "val", 16, sources=["b", "a"])
    tokens = stream_of(folder, "ba", "val")
    predicted = len(tokens) - tokens.count(BOS)
    assert data.bits_per_byte(3.0) == pytest.approx(3.0 / np.log(2) * predicted / (3 * len(tokens)), rel=1e-12)


# -----------------------------------------------------------------------------
# Files


@pytest.fixture
def copied(folder, tmp_path):
    """(A copy of the folder, its first shard, of 700 tokens)."""
    copy = str(shutil.copytree(folder, tmp_path / "copy"))
    return copy, f"{copy}/a_train_0.npy"


@pytest.mark.parametrize("damage", [
    lambda f: os.truncate(f, 100), lambda f: np.save(f, np.zeros(700, np.float32)),
    lambda f: np.save(f, np.zeros(699, np.uint16)),
    lambda f: np.save(f, np.array([{"a": 1}] * 700, dtype=object), allow_pickle=True)])
def test_a_damaged_shard_is_an_error_before_the_first_step(copied, damage):
    damage(copied[1])
    with pytest.raises(ValueError, match="where meta.json has 700 tokens: prepare the data again"):
        TokenDataset(copied[0], "train", 32)


def test_a_token_id_beyond_the_vocabulary_is_an_error(copied):
    """The 100 ids of this one are 0 to 99."""
    beyond = pytest.raises(ValueError, match="id 100 >= vocab_size 100")
    for token, error in ((99, contextlib.nullcontext()), (100, beyond)):
        np.save(copied[1], np.full(700, token, np.uint16))
        data = TokenDataset(copied[0], "train", 32)
        with error:
            data.batch(0, data.n_windows)


def test_more_shards_than_files_may_be_open_give_the_same_batches(folder, tmp_path):
    resource = pytest.importorskip("resource")
    tokens = documents(10, 240)
    many, one = (TokenDataset(write(tmp_path / str(size), size, a=tokens), "train", 32) for size in (15, 10**6))
    gc.collect()
    mapped.cache_clear()
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 150, hard))
    try:
        assert len(many.streams[0].files) > 300
        assert all(map(torch.equal, one.batch(0, one.n_windows), many.batch(0, one.n_windows)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def test_shards_are_mapped_for_reading_alone_and_one_that_is_replaced_is_noticed(copied):
    """Of those that are not mapped any more: a mapped file stays as it was."""
    data = TokenDataset(copied[0], "train", 32)
    assert not mapped(*data.streams[0].files[0]).flags.writeable
    data.batch(0, data.n_windows)
    mapped.cache_clear()
    for file in glob.glob(f"{copied[0]}/a_train_*.npy"):
        tokens = np.load(file)[::-1]
        os.remove(file)
        np.save(file, tokens)
        os.utime(file, ns=(0, 0))
    with pytest.raises(ValueError, match="was replaced during the run"):
        data.batch(0, data.n_windows)


# -----------------------------------------------------------------------------
# What may have changed when a run is resumed: data that it has not read yet


@pytest.mark.parametrize("second, until, same", [
    (("2", ("c",), 99, 7), 40, True), (("2", ("c",), 99, 7), 41, False), (("2", dict(c=1, b=1), 70, 29), 41, False)])
def test_a_row_of_the_table_counts_from_the_first_sample_of_its_stage_on(folder, second, until, same):
    before, after = (begun(StagedDataset(folder, t, 16).fingerprint, until) for t in (TABLE, (ONE, second)))
    assert (after == before) == same


def test_fingerprints_are_those_that_runs_have_recorded(tmp_path):
    """
    Computed by the code of commit ac03345: a run that began with it can be resumed. Without names all of meta.json
    counts, with names the vocabulary and the shards of these sources, in their order, with their weights.
    """
    path = write(tmp_path / "fixed", 700, b=documents(11, 60), a=documents(10, 60))
    whole = TokenDataset(path, "train", 16).fingerprint
    assert whole == "80f653d58486cb51978b34a2c41def982fe1bae34f9de1702c824df5e45065dc"
    named = [TokenDataset(path, "train", 16, sources=s).fingerprint for s in (["a"], dict(b=2, a=1))]
    assert named == [
        "ae0003e84069463dda424223d72a54a6d4885b33aad6bcef74dc0c03e88103d1",
        "ded5835546c82137314725f07ea092aa3c05fb7a04b8599b3ff369b9c793a818"]
    staged = StagedDataset(path, (("1", ("a",), 40, 28), ("2", dict(b=1), 70, 29)), 16)
    assert staged.fingerprint == (
        "7eba8b7cba41d9e1b339c73b7b6b027ef9697898885a30ba17a9282cbffa03d5@0 "
        "eacdc0ce364c1242d77b962e0eb053f37be9d6cc003f344aa4299f5e9dcd5d15@40")


# -----------------------------------------------------------------------------
# The published tables

# Report Tables 5 and 8: theta; billions of tokens; steps of the 8B and of the 70B; windows a step of the 8B, and the
# 70B has twice as many; billions of tokens of stage 5, long documents and books.
LONG = {
    "8k": (1e6, 78.4, (9350, 4680), 1024, (55.80, 15.87, 6.88)),
    "16k": (2e6, 58.1, (6930, 3470), 512, (41.31, 11.83, 5.15)),
    "32k": (4e6, 58.7, (7000, 3500), 256, (41.62, 12.09, 5.16)),
    "64k": (12e6, 29.2, (3480, 1742), 128, (20.74, 5.58, 2.96))}


@pytest.mark.parametrize("name", LONG)
def test_the_long_context_stages_have_the_published_steps_and_tokens(name):
    """With 1.2B tokens of warm-up, and then the floor of pretraining's rate to the end."""
    theta, billions, steps, windows, mixture = LONG[name]
    T = 1024 * int(name.removesuffix("k"))
    for i, size in enumerate(("8b", "70b")):
        before = dict(n_layer=32, lr_floor=1.1e-5, batch_size=1024, block_size=4096) | read_config(config_file(size))
        config = read_config(config_file(f"long/{name}"), before)
        batch, total, warmup = config["batch_size"], config["total_samples"], config["warmup_samples"]
        assert (config["block_size"], config["rope_theta"], batch) == (T, theta, windows * 2**i)
        assert steps_in(total, batch, config["batch_ramp_at"] or None) == steps[i]
        assert total * T / 1e9 == pytest.approx(billions, abs=0.16)
        assert warmup * T / 1e9 == pytest.approx(1.26, abs=0.01)
        # A step has the tokens of pretraining after its ramp.
        assert batch * T == 2 * before["batch_size"] * before["block_size"]
        rates = {wsd(at, config["lr"], 0, warmup, total, config["decay_samples"]) for at in (warmup, total - 1)}
        assert rates == {before["lr_floor"]}
        (_, sources, until, _), = config["stages"]
        assert tuple(sources.values()) == mixture and until == total


# First step and tokens consumed before it, in billions, rounded down: report Table F.7.
PUBLISHED = {
    "8b": {"1": 7038, "3": 12_000, "4": 13_345, "5": 15_000},
    "70b": {"1": 5165, "2": 8845, "3": 12_209, "4": 13_431, "5": 15_000}}


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_stages_of_the_published_runs_end_at_the_published_tokens(size):
    """No stage reads its pool twice."""
    config = runpy.run_path(config_file(size))
    stages, begin = config["stages"], 0
    assert {name: until * 4096 // 10**9 for name, _, until, _ in stages} == PUBLISHED[size]
    assert stages[-1][2] * 4096 == config["total_samples"] * 4096 == 15 * 10**12
    for _, sources, until, _ in stages:
        assert (until - begin) * 4096 / 1e9 < sum(config["POOLS"][s] for s in sources)
        begin = until
    assert len({seed for *_, seed in stages}) == len(stages) and stages[0][3] == 28


def test_the_command_shows_the_sources_and_a_window_of_them(data):
    """One window of all tokens has all documents."""
    (source,) = TokenDataset(str(data), "train", 16).parts
    done = script("data.py", data, f"--block_size={source['tokens'] - 1}")
    assert done.returncode == 0, done.stderr
    assert f"{source['documents']:8,} documents {source['tokens']:14,} tokens" in done.stdout
    assert f"the first of seed 28 has {source['documents']} documents:\n\n<s>" in done.stdout
