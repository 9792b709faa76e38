"""data.py against loops over the tokens, a cipher in Python's integers, and Apertus' published tables."""

import hashlib
import os
import runpy
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, script, table
from lab import run
from tiny import GOLDEN
from trained import corpus

import train
from configurator import config_file, configure, read_config
from data import StagedDataset, TokenDataset, hash_of_data, mapped, open_data, permute, read_meta
from engine.files import read_json
from engine.restore import started_stages
from goldfish import goldfish_mask
from schedule import Plan, wsd

A, B = "a.jsonl", "b.jsonl"
BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources A and B of 4,408 and 5,073 tokens, in shards of 700."""
    return corpus(tmp_path_factory.mktemp("data"), "--shard_tokens=700")


def stream_of(folder, *names, split="train"):
    """All tokens of some sources, read from the files."""
    sources = read_meta(folder)["sources"]
    files = [shard["file"] for name in names for shard in sources[name][split]["shards"]]
    return np.concatenate([np.load(f"{folder}/{file}") for file in files]).tolist()


# -----------------------------------------------------------------------------
# The order of samples


def plain_permute(i, n, seed, epoch):
    """The cipher in Python's integers: six Feistel rounds with MurmurHash3's finalizer, repeated until below n."""
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


# Samples, seed, epoch.
ORDERS = """
1          | 0             | 0
2          | 28            | 0
999        | 28            | 0
4096       | 28            | 1
4097       | -29           | 5
3662109375 | 1099511627776 | 3
"""


@pytest.mark.parametrize("row", table(ORDERS), ids=str)
def test_permute_is_the_cipher_that_runs_began_with(row):
    """A run resumes by its number of samples alone, so a changed order would repeat some texts and skip others."""
    n, seed, epoch = map(int, row)
    numbers = np.arange(n) if n < 5000 else np.random.default_rng(n).integers(0, n, 50)
    found = permute(numbers, n, seed, epoch).tolist()
    assert found[-50:] == [plain_permute(int(i), n, seed, epoch) for i in numbers[-50:]]
    assert n > 5000 or sorted(found) == list(range(n))


@pytest.mark.parametrize(
    "sources, goldfish", [(None, ()), ((B, A, B), (4, 13, "product", "window")), (None, (4, 13, "mix", "stream"))]
)
def test_a_batch_is_what_a_loop_over_the_tokens_gives_wherever_it_begins(folder, sources, goldfish):
    """
    Batches of a whole epoch, backwards, across the border of precomputed samples, and far ahead. A source named twice
    counts twice. With scope 'stream' Goldfish sees the tokens before a window; the stream wraps around.
    """
    data = TokenDataset(folder, "train", 64, 28, *goldfish, sources=sources)
    stream = stream_of(folder, *sources or (A, B))
    n = (len(stream) - 1) // 64
    assert (data.n_tokens, data.n_windows) == (len(stream), n)
    for first, size in ((0, n), (1021, 5), (3, 5), (10**6, 5)):
        begins = [64 * plain_permute(g % n, n, 28, g // n) for g in range(first, first + size)]
        idx, targets, keep, doc = data.batch(first, size)
        ids = torch.tensor([stream[begin : begin + 65] for begin in begins])
        assert idx.equal(ids[:, :-1])
        assert targets.equal(ids[:, 1:])
        assert doc.equal((idx == BOS).cumsum(1))
        # The end of a document is trained on; the begin of the next one is not, because it follows every end.
        wanted = idx != EOS
        if goldfish:
            k, h, hash, scope = goldfish
            before = torch.tensor([[stream[begin + i] for i in range(2 - h, 1)] for begin in begins])
            wanted &= goldfish_mask(targets, k, h, hash, before if scope == "stream" else None)
        assert keep.equal(wanted)


# -----------------------------------------------------------------------------
# Weights and stages


@pytest.mark.parametrize("weights, slots", [({A: 1, B: 6}, [1429, 8571]), ({B: 0.5, A: 0.25}, [6667, 3333])])
def test_a_weighted_sample_is_the_one_that_arithmetic_gives(folder, weights, slots):
    """
    Largest remainders give each source its slots among 10,000, which each block of 10,000 samples permutes: weights are
    exact in every block. A source continues where the last block left it.
    """
    data = TokenDataset(folder, "train", 16, sources=weights)
    streams = [stream_of(folder, name) for name in weights]
    samples = np.random.default_rng(0).integers(0, 10**6, 40)
    for g, source, window in zip(samples.tolist(), *data.locate(samples)):
        block, j = divmod(g, 10_000)
        slot = plain_permute(j, 10_000, ~28, block)
        assert source == (slot >= slots[0])
        n = (len(streams[source]) - 1) // 16
        epoch, i = divmod(block * slots[source] + slot - source * slots[0], n)
        assert window == plain_permute(int(i), n, 28, int(epoch))
    assert data.batch(g, 1)[0][0].tolist() == streams[source][16 * window : 16 * window + 16]
    stream, _ = data.locate(np.arange(20_000, 30_000))
    assert np.bincount(stream).tolist() == slots


ONE = "1", (A,), 40, 28
TABLE = ONE, ("2", {A: 1, B: 1}, 70, 29), ("3", (B,), 100, 30)


def test_stages_change_sources_and_seed_where_the_table_says(folder):
    """Later stages need no data yet. After the last stage that is read, samples continue from its data."""
    goldfish = 4, 13, "mix"
    data = StagedDataset(folder, TABLE, 16, *goldfish)
    parts = [TokenDataset(folder, "train", 16, seed, *goldfish, sources=sources) for _, sources, _, seed in TABLE]
    batches = (part.batch(0, n) for part, n in zip(parts, (40, 30, 60)))
    want = [torch.cat(tensors) for tensors in zip(*batches)]
    for first, n in ((0, 130), (35, 80), (40, 30)):
        torch.testing.assert_close(data.batch(first, n), tuple(t[first : first + n] for t in want))
    assert data.n_tokens == sum(part.n_tokens for part in parts)
    early = StagedDataset(folder, [ONE, ("2", ("not yet",), 70, 29)], 16, *goldfish, stage="1")
    torch.testing.assert_close(early.batch(0, 90), parts[0].batch(0, 90))
    assert (data.stage_end, early.stage_end) == (None, 40)


def test_a_source_without_a_sample_is_an_error(folder):
    """refusals.txt has a source that is shorter than a window."""
    with pytest.raises(ValueError, match="below one sample in 10,000"):
        TokenDataset(folder, "train", 16, sources={A: 1, B: 1e-6})


def test_bits_per_byte_are_over_all_sources_that_are_read(folder):
    """The nats of all tokens but the documents' begins, divided by log 2 and by the bytes of both sources together."""
    data = TokenDataset(folder, "val", 16, sources=[B, A])
    tokens = stream_of(folder, B, A, split="val")
    n = tokens.count(BOS)
    # A token is a byte, except for a begin and an end per document.
    n_bytes = len(tokens) - 2 * n
    nats = 3 * (len(tokens) - n)
    assert data.bits_per_byte(3.0) == pytest.approx(nats / np.log(2) / n_bytes)


# -----------------------------------------------------------------------------
# Several folders


@pytest.fixture(scope="module")
def apart(folder, tmp_path_factory):
    """The sources A and B, each in a folder of its own."""
    root = tmp_path_factory.mktemp("apart")
    for name in "ab":
        flags = f"--source_by=file --tokenizer=byte --val_share=0.2 --shard_tokens=700 --out={root}/{name}"
        run("prepare.py", f"{os.path.dirname(folder)}/{name}.jsonl", *flags.split())
    return f"{root}/a", f"{root}/b"


FORMS = {"{0},{1}": None, "{{{0}: 1, {1}: 6}}": {A: 1, B: 6}, "{{'{1}':0.5,\"{0}\":.25}}": {B: 0.5, A: 0.25}}


def test_stages_name_the_sources_of_all_folders(folder, apart, tmp_path):
    """Of two sources with one name the second is called FOLDER/SOURCE."""
    staged = StagedDataset(",".join(apart), TABLE, 16)
    assert all(map(torch.equal, staged.batch(35, 80), StagedDataset(folder, TABLE, 16).batch(35, 80)))
    shutil.copytree(apart[0], tmp_path / "again")
    twice = TokenDataset(f"{apart[0]},{tmp_path}/again", "train", 16, sources=[f"again/{A}"])
    assert twice.batch(0, 9).idx.equal(TokenDataset(apart[0], "train", 16).batch(0, 9).idx)


def test_the_fingerprint_of_several_folders_is_that_of_their_texts_order_and_weights(apart, tmp_path):
    """Not of the places where they are. A document that is removed from one of them changes it."""
    moved = tuple(shutil.copytree(path, tmp_path / os.path.basename(path)) for path in apart)
    hashes = [TokenDataset(form.format(*moved), "train", 16).data_hash for form in ("{1},{0}", *FORMS)]
    assert hashes[1:] == [TokenDataset(form.format(*apart), "train", 16).data_hash for form in FORMS]
    assert len(set(hashes)) == 4
    (tmp_path / "list").write_text("b.jsonl line 4\n")
    run("prepare.py", f"--remove={tmp_path}/list", f"--out={moved[1]}")
    assert TokenDataset(",".join(map(str, moved)), "train", 16).data_hash not in hashes


# -----------------------------------------------------------------------------
# Files


@pytest.fixture
def copied(folder, tmp_path):
    """(a copy of the folder, the path of its first shard, which has 700 tokens)"""
    copy = str(shutil.copytree(folder, tmp_path / "copy"))
    return copy, f"{copy}/{A}_train_00000.npy"


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda path: os.truncate(path, 100), "where meta.json has 700 tokens: prepare the data again"),
        (lambda path: np.save(path, np.zeros(700, np.float32)), "where meta.json has 700 tokens"),
        (lambda path: np.save(path, np.full(700, 320, np.uint16)), "id 320 >= vocab_size 320 in samples 0 to 299"),
    ],
)
def test_a_damaged_shard_is_an_error(copied, damage, says):
    """The vocabulary has ids 0 to 319."""
    damage(copied[1])
    with pytest.raises(ValueError, match=says):
        TokenDataset(copied[0], "train", 32).batch(0, 300)


def test_a_shard_is_opened_when_it_is_first_read(copied):
    """The last window is in the last shard, and in the one before if it begins there."""
    mapped.cache_clear()
    data = TokenDataset(copied[0], "train", 32)
    stream = data.streams[0]
    assert len(stream.files) > 5 and mapped.cache_info().misses == 0
    stream.read(stream.n_tokens - 33, np.empty(33, np.int64))
    assert mapped.cache_info().misses <= 2


@pytest.mark.parametrize("damage", [os.remove, lambda path: os.truncate(path, 1000)])
def test_a_shard_that_is_missing_or_cut_is_an_error_before_it_is_read(copied, damage):
    """By its size: the first rank raises before the run begins."""
    settings = dict(data=copied[0], seed=28, stage="", goldfish_k=0, goldfish_h=1, goldfish_hash="mix")
    settings["goldfish_scope"] = "window"
    open_data(settings, 32, check=True)
    damage(copied[1])
    open_data(settings, 32, check=False)
    with pytest.raises((OSError, ValueError), match=os.path.basename(copied[1])):
        open_data(settings, 32, check=True)


def test_shards_are_mapped_for_reading_alone_and_one_that_is_replaced_is_noticed(copied):
    """It is noticed when the shard is mapped again; until then the old file stays mapped."""
    data = TokenDataset(copied[0], "train", 32)
    stream = data.streams[0]
    assert not stream.tokens_of(0).flags.writeable
    os.utime(copied[1], ns=(0, 0))
    data.batch(0, data.n_windows)
    mapped.cache_clear()
    with pytest.raises(ValueError, match="was replaced during the run"):
        data.batch(0, data.n_windows)


# -----------------------------------------------------------------------------
# A resumed run depends only on the data that it has read


@pytest.mark.parametrize(
    "second, until, same",
    [(("2", (B,), 99, 7), 40, True), (("2", (B,), 99, 7), 41, False), (("2", {A: 1, B: 1}, 70, 30), 41, False)],
)
def test_a_row_of_the_table_counts_from_the_first_sample_of_its_stage_on(folder, second, until, same):
    before, after = (started_stages(StagedDataset(folder, t, 16).data_hash, until) for t in (TABLE, (ONE, second)))
    assert (after == before) == same
    whole = TokenDataset(folder, "train", 16).data_hash
    assert started_stages(whole, 0) == [whole]


def test_fingerprints_are_those_that_runs_have_recorded():
    """
    So a run with such a fingerprint can be resumed. Without named sources all of meta.json counts; with names, the
    vocabulary and the shards of these sources, in their order, with their weights.
    """
    stored = read_json(f"{GOLDEN}/fingerprints.json")
    for sources, recorded in stored["recorded"]:
        assert hash_of_data(stored["meta"], sources) == recorded


# -----------------------------------------------------------------------------
# The published tables

PUBLISHED = read_json(f"{GOLDEN}/stages.json")


@pytest.mark.parametrize("row", PUBLISHED["long"])
def test_the_long_context_stages_have_the_published_steps_and_tokens(row):
    """The rate warms up over 1.2B tokens and then stays at the floor of pretraining's rate to the end."""
    size, name, *want = row
    printed = subprocess.check_output([sys.executable, "configs/long.py", size, name], text=True, cwd=ROOT)
    config, shape = dict(vars(train)), dict(vars(train.shape))
    configure([config, shape], printed.split())
    config |= shape
    windows, theta, batch, total, warmup, decay, peak = (config[key] for key in KEYS.split())
    ((_, sources, until, _),) = config["stages"]
    steps = Plan(batch, config["batch_ramp_at"]).steps_in(total)
    assert [windows, theta, batch, steps, [*sources.values()]] == want
    assert warmup * windows / 1e9 == pytest.approx(1.26, abs=0.01)
    assert wsd(total - 1, peak, 0, warmup, total, decay) == read_config(config_file(size))["min_lr"]
    assert until == total
    assert (config["doc_mask"], config["micro_batch"]) == (name != "64k", 1)


KEYS = "block_size rope_theta batch_size total_samples warmup_samples decay_samples lr"


@pytest.mark.parametrize("file", PUBLISHED["billions"])
def test_the_stages_of_the_published_runs_end_at_the_published_tokens(file):
    """No stage reads its pool twice (1.5's pools are not published). Except for the 70B, only the last stage decays."""
    config = runpy.run_path(config_file(file))
    names, pools, ends, seeds = zip(*config["stages"])
    billions = np.multiply(ends, config.get("block_size", 4096) / 1e9)
    assert dict(zip(names, billions)) == pytest.approx(PUBLISHED["billions"][file], abs=0.05)
    assert ends[-1] == config["total_samples"]
    assert ends[-2] == pytest.approx(ends[-1] - config["decay_samples"], rel=1e-6) or file == "70b"
    assert seeds[0] == 28 and len(set(seeds)) == len(seeds)
    for read, pool in zip(np.diff(billions, prepend=0), pools):
        assert not pool or read < sum(config["POOLS"][source] for source in pool)


def test_the_command_shows_the_sources_and_a_window_of_them(lab):
    """A window that holds all tokens holds all documents."""
    (source,) = TokenDataset(f"{lab}/data", "train", 16).parts
    done = script("data.py", f"{lab}/data", f"--block_size={source['tokens'] - 1}")
    assert f"{source['documents']:8,} documents {source['tokens']:14,} tokens" in done.stdout
    assert f"the first of seed 28 has {source['documents']} documents:\n\n<s>" in done.stdout
