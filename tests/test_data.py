"""data.py against loops over the tokens, a cipher in Python's integers, and Apertus' published stages."""

import contextlib
import gc
import glob
import hashlib
import json
import os
import shutil

import numpy as np
import pytest
import torch

from configurator import config_file, read_config
from conftest import ROOT, script
from data import TokenDataset, begun, mapped, permute
from stages import StagedDataset
from goldfish import goldfish_mask
from schedule import steps_in, wsd

BOS, EOS = 1, 2


def documents(letter, n):
    """Documents of growing length, each of one id; their tokens in a row."""
    return [i for length in range(n) for i in (BOS, *[letter] * (3 + length % 40), EOS)]


def write(folder, shard_tokens, **sources):
    """A data folder of these sources {name: tokens}, a fifth of each for validation. Returns its path."""
    os.makedirs(folder)
    meta = dict(tokenizer="none", tokenizer_hash="t", vocab_size=100, bos=BOS, eos=EOS)
    meta.update(about={}, version="v", sources={})
    for name, tokens in sources.items():
        cut = len(tokens) * 4 // 5
        meta["sources"][name] = {}
        for split, part in (("train", tokens[:cut]), ("val", tokens[cut:])):
            shards = []
            for begin in range(0, len(part), shard_tokens):
                piece = np.array(part[begin : begin + shard_tokens], np.uint16)
                np.save(f"{folder}/{name}_{split}_{begin}.npy", piece)
                content = hashlib.sha256(piece.tobytes()).hexdigest()
                shards.append(dict(file=f"{name}_{split}_{begin}.npy", tokens=len(piece), sha256=content))
            about = dict(documents=part.count(BOS), bytes=3 * len(part), tokens=len(part))
            meta["sources"][name][split] = dict(about, shards=shards)
    with open(f"{folder}/meta.json", "w") as f:
        json.dump(meta, f)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources a, b, c of one letter each, in proportions 6 : 3 : 1, in shards of 700 tokens."""
    sources = {name: documents(10 + i, n) for i, (name, n) in enumerate(dict(a=240, b=120, c=40).items())}
    return write(tmp_path_factory.mktemp("data") / "abc", 700, **sources)


def stream_of(folder, names, split="train"):
    """All tokens of some sources, from the files."""
    with open(f"{folder}/meta.json") as f:
        sources = json.load(f)["sources"]
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
    (1, 0, 0), (2, 28, 0), (3, 1, 1), (999, 28, 0), (4096, 28, 1), (4097, ~28, 5), (3_662_109_375, 2**40, 3)])
def test_permute_is_the_cipher_that_runs_began_with(n, seed, epoch):
    """A run resumes by the number of its samples alone, so another order would repeat some texts and skip others."""
    numbers = np.random.default_rng(n).integers(0, n, 50)
    assert permute(numbers, n, seed, epoch).tolist() == [plain_permute(int(i), n, seed, epoch) for i in numbers]
    if n < 5000:
        assert sorted(permute(np.arange(n), n, seed, epoch)) == list(range(n))


def test_permute_has_no_order_of_its_own():
    """Lag-1 correlation and agreement with another epoch are those of chance."""
    a, b = (permute(np.arange(50_000), 50_000, 1, epoch) for epoch in (0, 1))
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.02 and abs(np.corrcoef(a, b)[0, 1]) < 0.02


@pytest.mark.parametrize("names", [None, ("c", "b", "c")])
def test_a_batch_is_what_a_loop_over_the_tokens_gives_wherever_it_begins(folder, names):
    """Forwards, backwards, across epochs, across the samples computed ahead; a source twice counts twice."""
    data = TokenDataset(folder, "train", 16, sources=names)
    stream = stream_of(folder, names or "abc")
    assert data.n_tokens == len(stream) and data.n_windows == (len(stream) - 1) // 16
    for first in (0, 7, 1021, 3, 5000, 10**6):
        batch = data.batch(first, 5)
        assert [t.dtype for t in batch] == [torch.int64, torch.int64, torch.bool, torch.int64]
        for g, idx, targets, keep, doc in zip(range(first, first + 5), *batch):
            epoch, i = divmod(g, data.n_windows)
            begin = 16 * plain_permute(i, data.n_windows, 28, epoch)
            window = stream[begin : begin + 17]
            assert (idx.tolist(), targets.tolist()) == (window[:-1], window[1:])
            # The end of a document is learnt, the next one's begin cannot be predicted.
            assert keep.tolist() == [token != EOS for token in window[:-1]]
            assert doc.tolist() == [window[: t + 1].count(BOS) for t in range(16)]


def test_any_slicing_of_the_run_gives_the_same_samples(folder):
    """1, 2 and 4 processes: each takes a part of the same global batch."""
    data = TokenDataset(folder, "train", 32, sources=dict(a=1, b=2))
    whole = data.batch(0, 24)
    for sizes in ([12] * 2, [6] * 4, [1, 2, 3, 18]):
        firsts = np.cumsum([0, *sizes])
        parts = [data.batch(int(first), n) for first, n in zip(firsts, sizes)]
        assert all(torch.equal(torch.cat(part), w) for part, w in zip(zip(*parts), whole))


@pytest.mark.parametrize("hash", ["product", "mix"])
def test_goldfish_in_the_scope_of_the_stream_is_the_mask_of_the_uncut_stream(folder, hash):
    """In the scope of the window the first h-1 labels are kept. Before its begin the stream goes round to its end."""
    stream = torch.tensor(stream_of(folder, "abc"))
    ring = goldfish_mask(torch.cat([stream[-13:], stream]), 4, 13, hash)[13:]
    for scope in ("stream", "window"):
        data = TokenDataset(folder, "train", 32, 28, 4, 13, hash, scope)
        idx, _, keep, _ = data.batch(0, data.n_windows)
        for g in range(data.n_windows):
            begin = 32 * plain_permute(g, data.n_windows, 28, 0) + 1
            want = ring[begin : begin + 32].clone()
            if scope == "window":
                want[:12] = True
            assert torch.equal(keep[g], want & (idx[g] != EOS))


def test_by_default_no_label_is_forgotten_and_goldfish_is_that_of_apertus(folder):
    goldfish = (), (50,), (50, 50, "product", "window")
    plain, apertus, full = (TokenDataset(folder, "train", 64, 28, *how).batch(0, 90) for how in goldfish)
    assert torch.equal(plain[2], plain[0] != EOS)
    assert torch.equal(apertus[2], full[2]) and not torch.equal(apertus[2], plain[2])


# -----------------------------------------------------------------------------
# Weights and stages


@pytest.mark.parametrize("weights, slots", [
    (dict(a=1, b=1, c=1), [3334, 3333, 3333]), (dict(a=1, b=2, c=4), [1429, 2857, 5714]),
    (dict(c=0.5, a=0.25), [6667, 3333]), (dict(a=1e4 - 1, b=1), [9999, 1])])
def test_a_weighted_sample_is_the_one_that_arithmetic_gives(folder, weights, slots):
    """
    Slots by largest remainders; a block of 10,000 samples is a permutation of them, and a source continues where the
    last block left it.
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


def test_weights_are_exact_in_every_ten_thousand_samples_and_windows_come_equally_often(folder):
    data = TokenDataset(folder, "train", 16, sources=dict(a=9, c=1))
    stream, window = data.where(np.arange(30_000))
    for begin in (0, 10_000, 20_000):
        assert np.bincount(stream[begin : begin + 10_000]).tolist() == [9000, 1000]
    for s, part in enumerate(data.streams):
        counts = np.bincount(window[stream == s], minlength=part.n_windows)
        assert counts.max() - counts.min() <= 1


TABLE = (("1", ("a",), 40, 28), ("2", dict(b=1, c=1), 70, 29), ("3", ("c",), 100, 30))


def test_stages_change_sources_and_seed_where_the_table_says(folder):
    data = StagedDataset(folder, TABLE, 16, 4, 13, "mix")
    whole = data.batch(0, 130)
    for (_, sources, until, seed), begin in zip(TABLE, (0, 40, 70)):
        n = until - begin if until < 100 else 60
        part = TokenDataset(folder, "train", 16, seed, 4, 13, "mix", sources=sources)
        assert all(torch.equal(x[begin : begin + n], y) for x, y in zip(whole, part.batch(0, n)))
    # A batch across two borders.
    assert all(torch.equal(x[35:115], y) for x, y in zip(whole, data.batch(35, 80)))
    parts = [TokenDataset(folder, "train", 16, sources=sources) for _, sources, _, _ in TABLE]
    assert data.stop is None and data.n_tokens == sum(part.n_tokens for part in parts)
    assert data.n_windows == sum(part.n_windows for part in parts)


def test_later_stages_need_no_data_yet(folder):
    first = StagedDataset(folder, [TABLE[0], ("2", ("not yet",), 70, 29)], 16, stage="1")
    assert first.stop == 40
    # After the last stage that is read, its data continue.
    alone = TokenDataset(folder, "train", 16, sources=("a",))
    assert all(map(torch.equal, first.batch(0, 90), alone.batch(0, 90)))
    assert StagedDataset(folder, TABLE, 16, stage="2").stop == 70


@pytest.mark.parametrize("make, says", [
    (lambda d: TokenDataset(d, "train", 16, sources=["a", "z"]), "no source 'z'; it has a, b, c"),
    (lambda d: TokenDataset(d, "train", 16, sources=dict(a=1, b=0)), "positive number"),
    (lambda d: TokenDataset(d, "train", 16, sources=dict(a=1, b=1e-6)), "below one sample in 10,000"),
    (lambda d: TokenDataset(d, "train", 4000, sources=dict(a=1, c=1)), "block_size=4000 .* lower block_size"),
    (lambda d: TokenDataset(os.path.dirname(d), "train", 16), "python prepare.py"),
    (lambda d: StagedDataset(d, TABLE, 16, stage="9"), "no stage '9': the table has 1, 2, 3"),
    (lambda d: StagedDataset(d, (TABLE[1], TABLE[0]), 16), "each later than the one before")])
def test_data_that_cannot_be_read_are_an_error_that_says_why(folder, make, says):
    with pytest.raises(ValueError, match=says):
        make(folder)


def test_a_stream_of_one_window_is_enough(tmp_path):
    """17 tokens make a window of 16, and 16 none."""
    path = write(tmp_path / "one", 700, a=[9] * 20)
    data = TokenDataset(path, "train", 15)
    assert data.n_windows == 1 and data.batch(3, 1)[0].tolist() == [[9] * 15]
    with pytest.raises(ValueError, match="less tokens than one window"):
        TokenDataset(path, "train", 16)


# -----------------------------------------------------------------------------
# Numbers about the data


def test_bits_per_byte_are_over_all_sources_that_are_read(folder):
    """Nats of the predicted tokens, all but each document's begin, over log 2 and the bytes of both texts together."""
    data = TokenDataset(folder, "val", 16, sources=["b", "a"])
    tokens = stream_of(folder, "ba", "val")
    predicted = len(tokens) - tokens.count(BOS)
    assert data.bits_per_byte(3.0) == pytest.approx(3.0 / np.log(2) * predicted / (3 * len(tokens)), rel=1e-12)


# -----------------------------------------------------------------------------
# Files


def entries_of(path):
    return sorted(glob.glob(f"{path}/a_train_*.npy"))


@pytest.mark.parametrize("damage", [
    lambda f: os.truncate(f, 100), lambda f: os.truncate(f, 0), lambda f: np.save(f, np.zeros(700, np.float32)),
    lambda f: np.save(f, np.zeros(699, np.uint16)),
    lambda f: np.save(f, np.array([{"a": 1}] * 700, dtype=object), allow_pickle=True)])
def test_a_damaged_shard_is_an_error_before_the_first_step(folder, tmp_path, damage):
    copy = shutil.copytree(folder, tmp_path / "copy")
    damage(entries_of(copy)[0])
    with pytest.raises(ValueError, match="where meta.json has 700 tokens: prepare the data again"):
        TokenDataset(str(copy), "train", 32)


def test_a_token_id_beyond_the_vocabulary_is_an_error(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    tokens = np.load(entries_of(copy)[0])
    for token in (99, 100, 60_000):
        tokens[77] = token
        np.save(entries_of(copy)[0], tokens)
        data = TokenDataset(str(copy), "train", 32)
        error = pytest.raises(ValueError, match=f"token id {token} >= vocab_size 100")
        with error if token > 99 else contextlib.nullcontext():
            data.batch(0, data.n_windows)


def test_more_shards_than_files_may_be_open_give_the_same_batches(folder, tmp_path):
    resource = pytest.importorskip("resource")
    tokens = {name: stream_of(folder, name, "train") + stream_of(folder, name, "val") for name in "abc"}
    many = write(tmp_path / "many", 17, **tokens)
    one = TokenDataset(folder, "train", 32)
    gc.collect()
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = set(map(int, os.listdir("/dev/fd")))
    free = [number for number in range(10_000) if number not in open_now]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[150], hard))
    try:
        data = TokenDataset(many, "train", 32)
        assert len(os.listdir(many)) > 500
        for first in (0, 5, one.n_windows):
            assert all(map(torch.equal, one.batch(first, 40), data.batch(first, 40)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def test_a_shard_that_is_replaced_during_the_run_is_noticed(folder, tmp_path):
    """Of those that are not mapped any more: a mapped file stays as it was."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    data = TokenDataset(str(copy), "train", 32)
    data.batch(0, data.n_windows)
    mapped.cache_clear()
    for file in entries_of(copy):
        tokens = np.load(file)[::-1]
        os.remove(file)
        np.save(file, tokens)
        os.utime(file, ns=(0, 0))
    with pytest.raises(ValueError, match="was replaced during the run"):
        data.batch(0, data.n_windows)


def test_the_shards_are_mapped_for_reading_alone(folder):
    """A slip in a caller cannot change the data on the disk, and a folder without write permission can be read."""
    file, stamped = TokenDataset(folder, "train", 16).streams[0].files[0]
    assert not mapped(file, stamped).flags.writeable


# -----------------------------------------------------------------------------
# What may have changed when a run is resumed: data that it has not read yet


def changed(folder, path, change):
    """The folder with another meta.json; its shards stay where they are."""
    with open(f"{folder}/meta.json") as f:
        meta = json.load(f)
    for source in meta["sources"].values():
        for part in source.values():
            for entry in part["shards"]:
                entry["file"] = os.path.join(folder, entry["file"])
    change(meta)
    path.mkdir()
    (path / "meta.json").write_text(json.dumps(meta))
    return str(path)


def shard(meta, name, split="train"):
    return meta["sources"][name][split]["shards"][0]


def reversed_sources(meta):
    meta["sources"] = dict(reversed(meta["sources"].items()))


# Changes of meta.json that a run in its first stage, which reads source a alone, does not see, and those that it does.
NOT_READ = [
    lambda m: None, lambda m: m["sources"].pop("c"), lambda m: m["sources"].update(d=m["sources"]["a"]),
    lambda m: m.pop("about"), lambda m: shard(m, "b").update(sha256="other"), reversed_sources]
READ = [
    lambda m: shard(m, "a").update(sha256="other"), lambda m: shard(m, "a", "val").update(sha256="other"),
    lambda m: m.update(tokenizer_hash="other"), lambda m: m["sources"].update(a=m["sources"]["b"]),
    lambda m: m.update(eos=3), lambda m: m.update(bos=3), lambda m: m.update(vocab_size=321)]


def test_a_run_in_its_first_stage_sees_changes_of_the_data_that_it_reads_and_no_others(folder, tmp_path):
    """Without stages all of meta.json counts, the order of its sources too."""
    before = StagedDataset(folder, TABLE, 16, stage="1").fingerprint
    whole = set()
    for i, change in enumerate([*NOT_READ, *READ]):
        other = changed(folder, tmp_path / str(i), change)
        after = StagedDataset(other, TABLE, 16, stage="1").fingerprint
        assert (begun(after, 40) == begun(before, 40)) == (change in NOT_READ)
        whole.add(*begun(TokenDataset(other, "train", 16).fingerprint, 0))
    assert len(whole) == len(NOT_READ) + len(READ)


ONE, TWO, _ = TABLE


@pytest.mark.parametrize("table, until, same", [
    ((ONE, ("2", ("c",), 99, 7)), 40, True),
    ((ONE, ("2", ("c",), 99, 7)), 41, False),
    ((ONE, ("2", dict(b=1, c=2), 70, 29)), 41, False),
    ((ONE, ("2", dict(c=1, b=1), 70, 29)), 41, False),
    ((ONE, ("2", dict(b=1, c=1), 70, 30)), 41, False),
    ((("1", ("a",), 39, 28), TWO), 20, False),
    ((("1", ("a", "a"), 40, 28), TWO), 20, False),
    ((ONE, TWO, ("3", ("a",), 80, 1)), 70, True)])
def test_a_row_of_the_table_counts_from_the_first_sample_of_its_stage_on(folder, table, until, same):
    before, after = (StagedDataset(folder, t, 16).fingerprint for t in (TABLE, table))
    assert (begun(after, until) == begun(before, until)) == same


def test_fingerprints_are_those_that_runs_have_recorded(tmp_path):
    """Computed by the code of commit ac03345: a run that began with it can be resumed."""
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

# Report Tables 5 and 8: theta; steps, windows a step and billions of tokens of the 8B and of the 70B; billions of
# tokens of stage 5, long documents and books.
LONG = {
    "8k": (1e6, (9350, 1024, 78.4), (4680, 2048, 78.5), (55.80, 15.87, 6.88)),
    "16k": (2e6, (6930, 512, 58.1), (3470, 1024, 58.2), (41.31, 11.83, 5.15)),
    "32k": (4e6, (7000, 256, 58.7), (3500, 512, 58.7), (41.62, 12.09, 5.16)),
    "64k": (12e6, (3480, 128, 29.2), (1742, 256, 29.2), (20.74, 5.58, 2.96))}


@pytest.mark.parametrize("name", LONG)
def test_the_long_context_stages_have_the_published_steps_and_tokens(name):
    """With 1.2B tokens of warm-up, and then the floor of pretraining's rate to the end."""
    theta, *sizes, mixture = LONG[name]
    T = 1024 * int(name.removesuffix("k"))
    for size, (steps, windows, billions) in zip(("8b", "70b"), sizes):
        before = dict(n_layer=32, lr_floor=1.1e-5, batch_size=1024, block_size=4096) | read_config(config_file(size))
        config = read_config(config_file(f"long/{name}"), before)
        batch, total, warmup = config["batch_size"], config["total_samples"], config["warmup_samples"]
        assert (config["block_size"], config["rope_theta"], batch) == (T, theta, windows)
        assert steps_in(total, batch, config["batch_ramp_at"] or None) == steps
        assert total * T / 1e9 == pytest.approx(billions, abs=0.051)
        assert warmup * T / 1e9 == pytest.approx(1.26, abs=0.01)
        # A step has the tokens of pretraining after its ramp.
        assert batch * T == 2 * before["batch_size"] * before["block_size"]
        rates = {wsd(at, config["lr"], 0, warmup, total, config["decay_samples"]) for at in (warmup, total - 1)}
        assert rates == {before["lr_floor"]}
        (_, sources, until, _), = config["stages"]
        assert tuple(sources.values()) == mixture and until == total
        assert config.keys().isdisjoint("rope_scaling rope_original goldfish_k grad_clip weight_decay".split())


# First step and tokens consumed before it, in billions, rounded down: report Table F.7.
PUBLISHED = {
    "8b": {"1": 7038, "3": 12_000, "4": 13_345, "5": 15_000},
    "70b": {"1": 5165, "2": 8845, "3": 12_209, "4": 13_431, "5": 15_000}}


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_stages_of_the_published_runs_end_at_the_published_tokens(size):
    import runpy
    config = runpy.run_path(os.path.join(ROOT, "configs", f"{size}.py"))
    stages = config["stages"]
    assert {name: until * 4096 // 10**9 for name, _, until, _ in stages} == PUBLISHED[size]
    assert stages[-1][2] == config["total_samples"] and stages[-1][2] * 4096 == 15 * 10**12
    begins = [0, *(until for _, _, until, _ in stages)]
    # No stage reads its pool twice.
    for (name, sources, until, _), begin in zip(stages, begins):
        assert (until - begin) * 4096 / 1e9 < sum(config["POOLS"][s] for s in sources)
    assert len({seed for *_, seed in stages}) == len(stages) and stages[0][3] == 28


def test_the_command_shows_the_sources_and_a_window_of_them(data):
    """One window of all tokens has all documents."""
    (source,) = TokenDataset(str(data), "train", 16).parts
    done = script("data.py", data, f"--block_size={source['tokens'] - 1}")
    assert done.returncode == 0, done.stderr
    assert f"{source['documents']:8,} documents {source['tokens']:14,} tokens" in done.stdout
    assert f"the first of seed 28 has {source['documents']} documents:\n\n<s>" in done.stdout
