"""data.py and prepare.py: every window once an epoch, in any order of asking; documents whole; files as promised."""
import contextlib
import gc
import gzip
import hashlib
import json
import os
import shutil
import subprocess

import numpy as np
import pytest
import torch

import tokenizer
import train
from configurator import configure
from conftest import ROOT, script
from data import Shard, StagedDataset, TokenDataset, begun, permute, share_of_one
from goldfish import goldfish_mask
from schedule import steps_in, wsd


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """120 documents of known text, in bytes."""
    root = tmp_path_factory.mktemp("texts")
    with open(root / "docs.jsonl", "w") as f:
        for i in range(120):
            f.write(json.dumps(dict(id=i, text=document(i))) + "\n")
    return prepared(root / "data", root / "docs.jsonl", "--shard_tokens=1500")


def document(i):
    return f"Document {i} says: " + "la " * (i % 17) + "end."


def prepared(out, *args):
    """The folder that prepare.py makes of bytes, or, where args say so, of other tokens."""
    done = script("prepare.py", f"--out={out}", "--tokenizer=byte", *args)
    assert done.returncode == 0, done.stderr
    return str(out)


def refused(done, says=""):
    """Exit code 2, and one line of stderr that holds these words."""
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr, done.stderr


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 199, 1000, 4097])
def test_permute_is_a_bijection(n):
    assert sorted(permute(np.arange(n), n, 28, 0)) == list(range(n))


def plain_permute(i, n, seed, epoch):
    """In Python's own integers: six Feistel rounds with MurmurHash3's finalizer, again until below n."""
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
def test_permute_is_the_cipher_that_a_run_began_with(n, seed, epoch):
    """
    A run goes on by the number of its samples alone: another order, however good, would show it some texts twice and
    others never.
    """
    numbers = np.random.default_rng(n).integers(0, n, 50)
    assert permute(numbers, n, seed, epoch).tolist() == [plain_permute(int(i), n, seed, epoch) for i in numbers]


def test_permute_has_the_order_of_nothing():
    """Lag-1 correlation and agreement with another epoch are those of chance."""
    a, b = permute(np.arange(50_000), 50_000, 1, 0), permute(np.arange(50_000), 50_000, 1, 1)
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.02 and abs(np.corrcoef(a, b)[0, 1]) < 0.02
    assert not np.array_equal(a, permute(np.arange(50_000), 50_000, 2, 0))


def test_permute_reaches_the_size_of_15T_tokens():
    n = 3_662_109_375
    x = permute(np.arange(10_000) * 366_210, n, 28, 3)
    assert x.min() >= 0 and x.max() < n and len(np.unique(x)) == 10_000


def test_any_slicing_of_the_run_gives_the_same_samples(folder):
    """1, 2 and 4 processes: each takes a part of the same global batch."""
    data = TokenDataset(folder, "train", 32)
    whole = data.batch(0, 24)
    for sizes in ([12] * 2, [6] * 4, [1, 2, 3, 18]):
        parts, first = [], 0
        for n in sizes:
            parts.append(data.batch(first, n))
            first += n
        assert all(torch.equal(torch.cat(p), w) for p, w in zip(zip(*parts), whole))


def test_an_epoch_has_every_window_exactly_once(folder):
    data = TokenDataset(folder, "train", 32)
    idx, targets, _, _ = data.batch(0, data.n_windows)
    stream = data.tokens(0, data.n_tokens)
    want = {tuple(stream[i * 32:i * 32 + 33]) for i in range(data.n_windows)}
    rows = torch.cat((idx, targets[:, -1:]), 1).tolist()
    assert len(data.shards) > 1 and len(rows) == data.n_windows and {tuple(r) for r in rows} == want


def test_labels_are_the_next_tokens_and_the_next_documents_begin_has_no_loss(folder):
    data = TokenDataset(folder, "train", 64)
    idx, targets, keep, doc = data.batch(0, 8)
    assert torch.equal(idx[:, 1:], targets[:, :-1])
    assert torch.equal(keep, idx != data.eos) and (~keep).any()              # the end itself (target == eos) is learnt
    assert torch.equal(doc[:, 1:] - doc[:, :-1], (idx[:, 1:] == data.bos).long())


def read_by_numpy(data):
    """All tokens of a split, from the files."""
    files = [s["file"] for source in data.meta["sources"].values() for s in source[data.split]["shards"]]
    shards = [np.load(os.path.join(data.folder, file), allow_pickle=False) for file in files]
    return np.concatenate(shards).tolist()


def test_a_batch_is_what_a_loop_over_the_tokens_says_wherever_it_begins(folder):
    data = TokenDataset(folder, "train", 32)
    stream = read_by_numpy(data)
    assert len(data.shards) > 1 and data.dtype == np.uint16
    # Forwards, backwards, and across the 1,024 samples whose order is computed ahead.
    for first in (0, 7, 1021, 3, 5000, 1024, 10**6):
        idx, targets, keep, doc = data.batch(first, 5)
        assert [t.dtype for t in (idx, targets, keep, doc)] == [torch.int64, torch.int64, torch.bool, torch.int64]
        for row in range(5):
            epoch, i = divmod(first + row, data.n_windows)
            window, number = permute(np.array([i]), data.n_windows, 28, epoch)[0], 0
            for t in range(32):
                token, label = stream[window * 32 + t:window * 32 + t + 2]
                number += token == data.bos
                found = idx[row, t], targets[row, t], keep[row, t], doc[row, t]
                assert found == (token, label, token != data.eos, number)


@pytest.mark.parametrize("hash", ["product", "mix"])
def test_stream_scope_is_the_mask_of_the_uncut_stream(folder, hash):
    goldfish = dict(goldfish_k=4, goldfish_h=13, goldfish_hash=hash, goldfish_scope="stream")
    data = TokenDataset(folder, "train", 32, **goldfish)
    idx, targets, keep, _ = data.batch(0, data.n_windows)
    stream = torch.from_numpy(data.tokens(0, data.n_tokens))
    whole = goldfish_mask(stream, 4, 13, hash)
    starts = permute(np.arange(data.n_windows), data.n_windows, 28, 0) * 32
    for row, start in enumerate(starts):
        if start > 13:                                     # before the stream's begin it goes round to its end
            assert torch.equal(keep[row], whole[start + 1:start + 33] & (idx[row] != data.eos))


def test_window_scope_keeps_the_first_labels(folder):
    data = TokenDataset(folder, "train", 64, goldfish_k=2, goldfish_h=13)
    idx, _, keep, _ = data.batch(0, 20)
    assert torch.equal(keep[:, :12], (idx != data.eos)[:, :12]) and not keep[:, 12:].all()


@pytest.mark.parametrize("T", [16, 48, 400])
def test_the_share_of_windows_with_one_document_is_that_of_windows_without_a_begin_inside(mixed, T):
    """A window holds one document if none begins behind its first token: counted on the tokens, over an epoch."""
    data = TokenDataset(mixed, "train", T)
    stream = read_by_numpy(data)
    starts = range(0, data.n_windows * T, T)
    whole = sum(data.bos not in stream[start + 1:start + T] for start in starts)
    assert share_of_one(data, data.n_windows, data.n_windows) == whole / data.n_windows


def test_the_share_of_windows_is_of_the_stages_that_a_run_reads(tmp_path):
    """The first stage reads documents longer than any window, the second ones of a few tokens: half, all or none."""
    rows = [dict(source="long", text=f"{i}" * 3000) for i in range(100, 140)]
    rows += [dict(source="short", text=f"{i} ab") for i in range(4000)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = prepared(tmp_path / "data", tmp_path / "d.jsonl", "--source_by=source")
    stages = (("one", ["long"], 1000, 1), ("two", ["short"], 2000, 2))
    data = StagedDataset(folder, stages, 64)
    for until, share in ((1000, 1), (2000, 0.5)):
        assert share_of_one(data, until) == pytest.approx(share, abs=0.05)


def test_bits_per_byte_are_over_all_sources_that_are_read(mixed):
    """Nats of what is predicted, all but each document's begin, over log 2 and the bytes of both texts together."""
    data = TokenDataset(mixed, "val", 16, sources=["b", "a"])
    parts = [data.meta["sources"][name]["val"] for name in "ab"]
    predicted = sum(p["tokens"] - p["documents"] for p in parts)
    size = sum(p["bytes"] for p in parts)
    assert predicted == size + sum(p["documents"] for p in parts)            # bytes, and an end each
    assert data.bits_per_byte(3.0) == pytest.approx(3.0 / np.log(2) * predicted / size, rel=1e-12)


def test_bits_per_byte_of_a_uniform_model_over_bytes(folder):
    """Every byte costs log2(256) = 8 bits, and each document's end 8 more."""
    data = TokenDataset(folder, "val", 32)
    source = next(iter(data.meta["sources"].values()))["val"]
    symbols = source["bytes"] + source["documents"]
    assert data.bits_per_byte(np.log(256)) == pytest.approx(8 * symbols / source["bytes"])


def test_documents_come_out_whole_between_their_marks(folder):
    data = TokenDataset(folder, "train", 32)
    stream = data.tokens(0, data.n_tokens)
    starts, ends = np.flatnonzero(stream == data.bos), np.flatnonzero(stream == data.eos)
    letters = (stream - 64).astype(np.uint8)                                 # byte ids follow 64 special ones
    texts = {bytes(letters[a + 1:b]).decode() for a, b in zip(starts, ends)}
    assert len(texts) == len(starts) == len(ends) > 100
    assert texts <= set(map(document, range(120)))


def digest(folder):
    return {f: open(os.path.join(folder, f), "rb").read() for f in sorted(os.listdir(folder))}


def test_same_input_same_bytes_and_a_new_file_moves_no_document(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(60):
        (texts / f"{i}.txt").write_text(f"number {i}")
    for out in ("a", "b"):
        prepared(tmp_path / out, texts, "--val_share=0.3")
    a, b = ({f: c for f, c in digest(tmp_path / out).items() if f.endswith(".npy")} for out in ("a", "b"))
    assert a == b
    (texts / "new.txt").write_text("number 60")
    prepared(tmp_path / "c", texts, "--val_share=0.3")
    split = lambda name: {s: texts_of(TokenDataset(str(tmp_path / name), s, 4)) for s in ("train", "val")}
    before, after = split("a"), split("c")
    assert all(before[s] <= after[s] for s in before) and sum(map(len, after.values())) == 61


def texts_of(data):
    stream = data.tokens(0, data.n_tokens)
    return {tuple(part) for part in np.split(stream, np.flatnonzero(stream == data.bos))[1:]}


def test_what_is_not_text_is_skipped_and_counted(tmp_path):
    (texts := tmp_path / "texts").mkdir()
    (texts / "good.txt").write_text("good")
    (texts / "also.md").write_text("also good")
    (texts / "latin.txt").write_bytes("Grüezi".encode("latin-1"))
    (texts / "binary.txt").write_bytes(b"a\0b")
    (texts / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-20])
    (texts / "half.jsonl").write_text('{"text": "fine"}\n{"text": \n{"other": 1}\n')
    done = script("prepare.py", texts, f"--out={tmp_path / 'out'}", "--tokenizer=byte")
    assert done.returncode == 0, done.stderr
    for line in ("not UTF-8", "binary", "unreadable"):
        assert f"skipped 1: {line}" in done.stdout
    meta = json.load(open(tmp_path / "out" / "meta.json"))
    assert sum(s["documents"] for s in meta["sources"]["out"].values()) == 3


def test_no_text_at_all_is_one_line(tmp_path):
    (texts := tmp_path / "texts").mkdir()
    (texts / "binary.txt").write_bytes(b"a\0b")
    for args, says in (([texts], "no text"), ([tmp_path / "nowhere"], "no such file")):
        done = script("prepare.py", *args, f"--out={tmp_path / 'out'}", "--tokenizer=byte")
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 2 and says in done.stderr and last.startswith("prepare.py: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage, says", [
    (lambda f: os.truncate(f, 100), "prepare the data again"),
    (lambda f: open(f, "wb").close(), "prepare the data again"),
    (lambda f: np.save(f, np.zeros(10, np.float32)), "float32"),
    (lambda f: np.save(f, np.array([{"a": 1}], dtype=object), allow_pickle=True), "prepare the data again"),
])
def test_a_damaged_shard_is_refused_before_the_first_step(folder, tmp_path, damage, says):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy / "train_00000.npy")
    with pytest.raises(ValueError, match=says):
        TokenDataset(str(copy), "train", 32)


def test_a_token_id_beyond_the_vocabulary_names_its_window(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shard = np.load(copy / "train_00000.npy")
    for token in (320, 60_000):
        shard[77] = token
        np.save(copy / "train_00000.npy", shard)
        data = TokenDataset(str(copy), "train", 32)
        with pytest.raises(ValueError, match=f"token id {token} >= vocab_size 320 in window 2"):
            data.batch(0, data.n_windows)


def test_windows_longer_than_the_data_and_missing_data_say_what_to_do(folder, tmp_path):
    with pytest.raises(ValueError, match="lower block_size"):
        TokenDataset(folder, "train", 10**6)
    with pytest.raises(ValueError, match="python prepare.py"):
        TokenDataset(str(tmp_path), "train", 32)


@pytest.mark.skipif(not hasattr(os, "mkfifo") or os.geteuid() != 0, reason="needs to mount a small tmpfs")
def test_a_full_disk_leaves_nothing_under_the_final_name(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    try:
        (tmp_path / "big.txt").write_text("words " * 50_000)
        done = script("prepare.py", tmp_path / "big.txt", f"--out={small / 'data'}", "--tokenizer=byte")
        assert done.returncode == 2 and "No space left" in done.stderr and "Traceback" not in done.stderr
        assert not (small / "data").exists()
    finally:
        subprocess.run(["umount", small])


# ----------------------------------------------------------------------------------------------------------------------
# sources, weights, stages


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Three sources whose every document is made of one letter: a, b, c, in proportions 6 : 3 : 1."""
    root = tmp_path_factory.mktemp("mixed")
    with open(root / "d.jsonl", "w") as f:
        for letter, n in (("a", 120), ("b", 60), ("c", 20)):
            for i in range(n):
                f.write(json.dumps(dict(id=f"{letter}{i}", source=letter, text=letter * (90 + i))) + "\n")
    return prepared(root / "data", root / "d.jsonl", "--source_by=source", "--val_share=0.1")


def letters(data, first, n):
    """Which source each of n samples is of, by the letter that its window is full of."""
    idx = data.batch(first, n)[0] - 64
    return ["abc"[int(np.argmax([(row == ord(c)).sum() for c in "abc"]))] for row in idx]


def test_without_weights_sources_are_mixed_by_their_sizes(mixed):
    data = TokenDataset(mixed, "train", 16)
    sizes = {name: s["train"]["tokens"] for name, s in data.meta["sources"].items()}
    got = letters(data, 0, data.n_windows)
    assert data.n_tokens == sum(sizes.values()) and all(abs(got.count(c) - sizes[c] / 16) <= 2 for c in "abc")


def test_weights_are_exact_in_every_ten_thousand_samples_and_any_slicing_gives_the_same(mixed):
    data = TokenDataset(mixed, "train", 16, sources=dict(a=1, b=1.5, c=7.5))
    for block in (0, 3):
        stream, _ = data.where(np.arange(block * 10_000, block * 10_000 + 10_000))
        assert np.bincount(stream).tolist() == [1000, 1500, 7500]
    got = letters(data, 0, 400)
    assert "".join(got) == "".join(letters(data, 0, 100) + letters(data, 100, 1) + letters(data, 101, 299))
    assert abs(got.count("c") - 300) < 4 * (400 * 0.75 * 0.25) ** 0.5        # spread evenly, as drawn by chance


@pytest.mark.parametrize("weights, slots", [
    (dict(a=1, b=1, c=1), [3334, 3333, 3333]), (dict(a=1, b=2, c=4), [1429, 2857, 5714]),
    (dict(c=0.5, a=0.25), [6667, 3333]), (dict(a=1e4 - 1, b=1), [9999, 1])])
def test_a_weighted_sample_is_the_one_that_arithmetic_says(mixed, weights, slots):
    """
    Slots by largest remainders; a block of 10,000 samples is a permutation of them, and a source goes on where the last
    block left it.
    """
    data = TokenDataset(mixed, "train", 16, sources=weights)
    ends, names = np.cumsum(slots).tolist(), list(weights)
    for g in np.random.default_rng(0).integers(0, 10**6, 40).tolist():
        block, j = divmod(g, 10_000)
        slot = plain_permute(j, 10_000, ~28, block)
        source = next(s for s, end in enumerate(ends) if slot < end)
        n = (data.meta["sources"][names[source]]["train"]["tokens"] - 1) // 16
        epoch, i = divmod(block * slots[source] + slot - (ends[source] - slots[source]), n)
        stream, window = data.where(np.array([g]))
        assert (stream.item(), window.item()) == (source, plain_permute(i, n, 28, epoch))


def test_a_weighted_source_shows_all_its_windows_equally_often(mixed):
    data = TokenDataset(mixed, "train", 16, sources=dict(a=9, c=1))
    stream, window = data.where(np.arange(30_000))                           # three blocks of slots
    for s, part in enumerate(data.streams):
        counts = np.bincount(window[stream == s], minlength=part.n_windows)
        assert counts.sum() == (27_000, 3_000)[s] and counts.max() - counts.min() <= 1


def test_a_source_named_twice_counts_twice(mixed):
    once, twice = (TokenDataset(mixed, "train", 16, sources=s) for s in (["a", "c"], ["a", "c", "c"]))
    c = once.meta["sources"]["c"]["train"]["tokens"]
    assert twice.n_tokens == once.n_tokens + c and set(letters(once, 0, 200)) == {"a", "c"}


def test_stages_change_sources_where_the_table_says(mixed):
    table = [("1", ("a",), 40, 28), ("2", dict(b=1, c=1), 70, 29), ("3", ("c",), 100, 30)]
    data = StagedDataset(mixed, table, 16)
    got = letters(data, 0, 130)
    assert set(got[:40]) == {"a"} and set(got[40:70]) == {"b", "c"} and set(got[70:]) == {"c"}
    assert letters(data, 35, 80) == got[35:115] and data.stop is None        # a batch across two borders
    third = TokenDataset(mixed, "train", 16, 30, sources=["c"])
    assert torch.equal(data.batch(70, 30)[0], third.batch(0, 30)[0])


def test_later_stages_need_no_data_yet(mixed):
    begin, known = ("1", ("a",), 40, 28), ("2", ("b",), 70, 29)
    first = StagedDataset(mixed, [begin, ("2", ("not yet",), 70, 29)], 16, stage="1")
    both = StagedDataset(mixed, [begin, known], 16)
    assert first.stop == 40 and torch.equal(first.batch(0, 40)[0], both.batch(0, 40)[0])


@pytest.mark.parametrize("make, says", [
    (lambda d: TokenDataset(d, "train", 16, sources=["a", "z"]), "no source 'z'; it has a, b, c"),
    (lambda d: TokenDataset(d, "train", 16, sources=dict(a=1, z=1)), "no source 'z'"),
    (lambda d: TokenDataset(d, "train", 16, sources=dict(a=1, b=0)), "positive number"),
    (lambda d: TokenDataset(d, "train", 16, sources=dict(a=1, b=1e-6)), "below one sample in 10,000"),
    (lambda d: TokenDataset(d, "train", 4000, sources=dict(a=1, c=1)), "train split of c has"),
    (lambda d: StagedDataset(d, [("1", ("a",), 40, 28)], 16, stage="9"), "no stage '9': the table has 1"),
    (lambda d: StagedDataset(d, [("1", ("a",), 40, 28), ("2", ("b",), 40, 28)], 16), "each later than the one before")])
def test_a_mixture_that_cannot_be_says_why(mixed, make, says):
    with pytest.raises(ValueError, match=says):
        make(mixed)


def test_the_command_counts_the_documents_of_the_window_that_it_shows(folder):
    """One window of all tokens has all documents."""
    whole = TokenDataset(folder, "train", 16).n_tokens - 1
    done = script("data.py", folder, f"--block_size={whole}")
    assert done.returncode == 0, done.stderr
    says, text = done.stdout.split(":\n\n")
    documents = text.count("Document ")
    assert documents > 100 and says.splitlines()[-1].endswith(f"has {documents} documents")


def test_the_shards_are_mapped_for_reading_alone(folder):
    """A slip in a caller cannot change the data on the disk, and a folder without write permission can be read."""
    with open(os.path.join(folder, "meta.json"), encoding="utf-8") as f:
        entry = json.load(f)["sources"]["data"]["train"]["shards"][0]
    tokens = Shard(folder, entry).load()
    assert not tokens.flags.writeable and tokens.mode == "r"


def test_joined_folders_have_the_sources_of_all_and_copy_nothing(mixed, folder, tmp_path):
    both = tmp_path / "both"
    assert script("data.py", mixed, folder, f"--join={both}", "--block_size=16").returncode == 0
    assert sorted(os.listdir(both)) == ["meta.json", "report.json", "report.md"]
    data = TokenDataset(str(both), "train", 16)
    assert list(data.meta["sources"]) == ["a", "b", "c", "data"]
    assert data.n_tokens == sum(TokenDataset(part, "train", 16).n_tokens for part in (mixed, folder))
    other = prepared(tmp_path / "other", os.path.join(mixed, "report.md"), "--tokenizer=apertus:300")
    before = digest(both)
    for into in (both, tmp_path / "new"):
        done = script("data.py", mixed, other, f"--join={into}")
        refused(done, "the same --tokenizer")
    assert digest(both) == before and sorted(os.listdir(tmp_path)) == ["both", "other"]


def test_joined_folders_have_the_vocabulary_that_their_ids_are_of(tmp_path):
    """Trained on the first folder and in it alone: without it nobody could read the joined one."""
    a, b, both = tmp_path / "a", tmp_path / "b", tmp_path / "both"
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"the text of {name}, the only text of it. " * 30)
    for out, vocabulary in ((a, "--train_bpe=330"), (b, f"--tokenizer={a / 'tokenizer.json'}")):
        assert script("prepare.py", f"{out}.txt", f"--out={out}", vocabulary).returncode == 0
    done = script("data.py", a, b, f"--join={both}", "--block_size=8")
    assert done.returncode == 0, done.stderr
    assert (both / "tokenizer.json").read_bytes() == (a / "tokenizer.json").read_bytes()
    data = TokenDataset(str(both), "train", 8, sources=["b"])
    ids = data.tokens(1, data.n_tokens - 1).tolist()
    assert tokenizer.load_for(data.folder).decode(ids).startswith("the text of b, the only")


def test_join_replaces_what_it_joined_before_and_nothing_else(mixed, folder, tmp_path):
    own, ours, both = tmp_path / "own", tmp_path / "ours", tmp_path / "both"
    own.mkdir()
    (own / "meta.json").write_text("years of work")
    shutil.copytree(folder, ours)
    before = digest(own), digest(ours)
    for into in (own, f"{own}/", ours, ours / "new"):
        refused(script("data.py", mixed, ours, f"--join={into}"))
        assert (digest(own), digest(ours)) == before
    more = prepared(tmp_path / "more", os.path.join(mixed, "report.md"))
    two = (mixed, ours), "a b c data"
    three = (both, more), "a b c data more"
    for folders, sources in (two, three, two):
        done = script("data.py", *folders, f"--join={both}/", "--block_size=16")
        assert done.returncode == 0, done.stderr
        assert " ".join(TokenDataset(str(both), "train", 16).meta["sources"]) == sources
    done = script("prepare.py", os.path.join(mixed, "report.md"), f"--out={both}", "--tokenizer=byte")
    refused(done, "meta.json")                                               # prepare.py did not write that


# ----------------------------------------------------------------------------------------------------------------------
# what a run may find changed when it goes on: what it has not read yet


TABLE = (("1", ("a",), 40, 28), ("2", dict(b=1, c=1), 70, 29))


def changed(mixed, path, change):
    """The folder with another meta.json; its shards stay where they are."""
    path.mkdir()
    with open(os.path.join(mixed, "meta.json")) as f:
        meta = json.load(f)
    for source in meta["sources"].values():
        for part in source.values():
            for shard in part["shards"]:
                shard["file"] = os.path.join(mixed, shard["file"])
    change(meta)
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


@pytest.mark.parametrize("change, same", [*((c, True) for c in NOT_READ), *((c, False) for c in READ)])
def test_a_run_in_its_first_stage_goes_on_whatever_becomes_of_data_that_it_has_not_read(mixed, tmp_path, change, same):
    before = StagedDataset(mixed, TABLE, 16, stage="1").fingerprint
    after = StagedDataset(changed(mixed, tmp_path / "new", change), TABLE, 16, stage="1").fingerprint
    assert (begun(after, 40) == begun(before, 40)) == same


ONE, TWO = TABLE


@pytest.mark.parametrize("table, until, same", [
    ((ONE, ("2", ("c",), 99, 7)), 40, True),
    ((ONE, ("2", ("c",), 99, 7)), 41, False),
    ((ONE, ("2", dict(b=1, c=2), 70, 29)), 41, False),
    ((ONE, ("2", dict(c=1, b=1), 70, 29)), 41, False),
    ((ONE, ("2", dict(b=1, c=1), 70, 30)), 41, False),
    ((ONE, ("2", dict(b=1, c=1), 71, 29)), 41, False),
    ((("1", ("a",), 39, 28), TWO), 20, False),
    ((("1", ("a",), 40, 29), TWO), 20, False),
    ((("1", ("a", "a"), 40, 28), TWO), 20, False),
    ((ONE, TWO, ("3", ("a",), 80, 1)), 70, True)])
def test_a_row_of_the_table_counts_from_the_sample_on_with_which_its_stage_begins(mixed, table, until, same):
    before, after = StagedDataset(mixed, TABLE, 16), StagedDataset(mixed, table, 16)
    assert (begun(after.fingerprint, until) == begun(before.fingerprint, until)) == same
    first = table[0][2]
    assert begun(StagedDataset(mixed, table, 16, stage="1").fingerprint, first) == begun(after.fingerprint, first)


def test_without_stages_all_of_the_folder_counts_and_the_order_of_its_sources_too(mixed, tmp_path):
    before = TokenDataset(mixed, "train", 16)
    # As runs know it that began long ago.
    said = dict(before.meta)
    assert said.pop("version") == before.fingerprint
    plain = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    assert before.fingerprint == plain == TokenDataset(mixed, "val", 16).fingerprint
    prints = set()
    for i, change in enumerate([*NOT_READ, *READ]):
        data = TokenDataset(changed(mixed, tmp_path / str(i), change), "train", 16)
        prints.add(str(begun(data.fingerprint, 1)))
    assert len(prints) == len(NOT_READ) + len(READ)
    two, one = (TokenDataset(mixed, "train", 16, sources=dict(a=1, b=b)).fingerprint for b in (2, 1))
    assert two != one


def test_a_run_that_stopped_after_its_first_stage_goes_on_when_the_data_of_the_second_have_come(
        mixed, folder, tmp_path):
    both, table = tmp_path / "both", tmp_path / "table.py"
    table.write_text('stages = (("one", ("a",), 80, 28), ("two", {"a": 1, "data": 3}, 160, 29))')
    def train(*args):
        run = f"--data={both}", f"--out={tmp_path / 'run'}", "--block_size=16"
        return script("train.py", "configs/tiny.py", table, *run, *args)

    assert script("data.py", mixed, mixed + "/", f"--join={both}", "--block_size=16").returncode == 0
    done = train("--stage=one")
    assert done.returncode == 0, done.stderr
    assert script("data.py", both, folder, f"--join={both}", "--block_size=16").returncode == 0
    meta = (both / "meta.json").read_text()
    for key in ("a", "tokenizer_hash"):
        other = json.loads(meta)
        other.update(tokenizer_hash="other") if key != "a" else shard(other, "a").update(sha256="other")
        (both / "meta.json").write_text(json.dumps(other))
        refused(train("--resume", "--stage=two"))
    (both / "meta.json").write_text(meta)
    done = train("--resume", "--stage=two")
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# limits of the system


@pytest.fixture(scope="module")
def shattered(folder, tmp_path_factory):
    """The documents of `folder` in some 300 shards."""
    documents = os.path.join(os.path.dirname(folder), "docs.jsonl")
    return prepared(tmp_path_factory.mktemp("shattered") / "data", documents, "--shard_tokens=17")


@contextlib.contextmanager
def few_files(more):
    """At most so many more files than now may be open."""
    resource = pytest.importorskip("resource")
    gc.collect()
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = set(range(10_000)) - set(map(int, os.listdir("/dev/fd")))         # the limit is one of their numbers
    resource.setrlimit(resource.RLIMIT_NOFILE, (sorted(free)[more], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def test_more_shards_than_files_may_be_open_give_the_same_batches(folder, shattered):
    one = TokenDataset(folder, "train", 32)
    with few_files(150):
        many = TokenDataset(shattered, "train", 32)
        assert len(many.shards) > 300 and many.n_windows == one.n_windows
        for first in (0, 5, one.n_windows):
            assert all(map(torch.equal, one.batch(first, 40), many.batch(first, 40)))


def test_a_limit_of_the_system_sends_nobody_to_prepare_the_data_again(shattered):
    with few_files(20), pytest.raises(OSError, match="Too many open files.*ulimit -n") as told:
        TokenDataset(shattered, "train", 32)
    assert "prepare" not in str(told.value).partition(" cannot be opened")[2]


def test_a_shard_that_is_replaced_under_a_run_is_noticed(shattered, tmp_path):
    copy = shutil.copytree(shattered, tmp_path / "copy")
    data = TokenDataset(str(copy), "train", 32)
    data.batch(0, data.n_windows)
    for file in copy.glob("train_*.npy"):
        tokens = np.load(file, allow_pickle=False)
        os.remove(file)
        np.save(file, tokens[::-1])
        os.utime(file, ns=(0, 0))
    with pytest.raises(ValueError, match="is not the file that this run began with"):
        data.batch(0, data.n_windows)


# Report Tables 5 and 8: theta; steps, windows a step and billions of tokens of the 8B and of the 70B; and those of stage
# 5, long documents and books.
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
        before = configure({**vars(train)}, [size])
        config = configure({**vars(train)}, [size, f"configs/long/{name}.py"])
        batch, total = config["batch_size"], config["total_samples"]
        assert (config["block_size"], config["rope_theta"], batch) == (T, theta, windows)
        assert steps_in(total, batch, config["batch_ramp_at"] or None) == steps
        assert total * T / 1e9 == pytest.approx(billions, abs=0.051)
        assert batch * T == 2 * before["batch_size"] * before["block_size"]      # after the ramp of pretraining
        warmup = config["warmup_samples"]
        assert warmup * T / 1e9 == pytest.approx(1.26, abs=0.01)
        rates = {wsd(at, config["lr"], 0, warmup, total, config["decay_samples"]) for at in (warmup, total - 1)}
        assert rates == {before["lr_floor"]}
        (_, sources, until, _), = config["stages"]
        assert tuple(sources.values()) == mixture and until == total
        same = "rope_scaling rope_original goldfish_k goldfish_h grad_clip weight_decay alpha_warmup".split()
        assert all(config[setting] == before[setting] for setting in same)


# First step and tokens consumed before it, in billions, rounded down: report Table F.7.
PUBLISHED = {
    "8b": {"1": 7038, "3": 12_000, "4": 13_345, "5": 15_000},
    "70b": {"1": 5165, "2": 8845, "3": 12_209, "4": 13_431, "5": 15_000}}


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_stages_of_the_published_runs_end_at_the_published_tokens(size):
    import runpy
    config = runpy.run_path(os.path.join(ROOT, "configs", f"{size}.py"))
    stages = config["stages"]
    assert {name: until * config["block_size"] // 10**9 for name, _, until, _ in stages} == PUBLISHED[size]
    assert stages[-1][2] == config["total_samples"] and stages[-1][2] * 4096 == 15 * 10**12
    begins = [0, *(until for _, _, until, _ in stages)]
    for (name, sources, until, _), begin in zip(stages, begins):             # no stage reads its pool twice
        assert (until - begin) * 4096 / 1e9 < sum(config["POOLS"][s] for s in sources)
    assert len({seed for *_, seed in stages}) == len(stages) and stages[0][3] == 28
