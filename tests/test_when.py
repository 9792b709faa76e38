"""corpus/audit.py: the samples of a document, against all batches of a run longer than a block of a mixture."""

import json

import numpy as np
import pytest

from corpus import audit
from corpus.audit import data_of_run, samples_of
from data import StagedDataset, TokenDataset

EDGES = 0, 3220, 14020, 21550
STAGES = [("1", ("a",), 5_000, 1), ("2", dict(b=1, a=2), 30_000, 2)]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A folder with tokens 0, 1, 2, ...: two shards of source a, one of b; and in it the folder `other`."""
    folder = tmp_path_factory.mktemp("counted")
    write(folder, ("a0", "a1", "b0"), EDGES)
    write(folder / "other", ["a2"], (30_000, 33_000))
    return str(folder)


def write(folder, names, edges):
    """Write a data folder whose shards have these names and the tokens from edge to edge."""
    folder.mkdir(exist_ok=True)
    sources = {}
    for name, begin, end in zip(names, edges, edges[1:]):
        np.save(folder / f"{name}.npy", np.arange(begin, end, dtype=np.uint16))
        shards = sources.setdefault(name[0], dict(train=dict(shards=[])))["train"]["shards"]
        # The paths of older folders may lead outside.
        shards.append(dict(file=f"../{folder.name}/{name}.npy", tokens=end - begin, sha256=name))
    meta = dict(tokenizer="", bos=60_001, eos=60_002, vocab_size=60_003, tokenizer_hash="", sources=sources)
    (folder / "meta.json").write_text(json.dumps(meta))


DATA = {
    "natural": lambda folder: TokenDataset(folder, "train", 16),
    "mixed": lambda folder: TokenDataset(folder, "train", 16, sources=dict(a=1, b=3)),
    "twice": lambda folder: TokenDataset(folder, "train", 16, 28, sources=("b", "a", "b")),
    "stages": lambda folder: StagedDataset(folder, STAGES, 16),
    "folders": lambda folder: TokenDataset(f"{folder},{folder}/other", "train", 16),
    "weights": lambda folder: TokenDataset(f"{{{folder}/other: 1, {folder}: 2}}", "train", 16),
}


@pytest.mark.parametrize("kind", DATA)
def test_the_samples_of_a_document_are_exact_to_the_sample(counted, monkeypatch, kind):
    """Documents: one token at the begin of a window; across shards, up to the end of a window; the end of a stream."""
    monkeypatch.setattr(audit, "CHUNK", 4_000)
    data = DATA[kind](counted)
    idx, targets, *_ = data.batch(0, 10_077)
    for file, begin, first, n in (
        ("a0", 0, 0, 1),
        ("a0", 0, 3200, 32),
        ("a1", 3220, 14010, 10),
        ("b0", 14020, 15012, 500),
        ("other/a2", 30_000, 31_600, 17),
    ):
        inside = [(tokens >= first) & (tokens < first + n) for tokens in (idx, targets)]
        found = samples_of(data, f"{counted}/{file}.npy", first - begin, n, 10_077)
        assert found.tolist() == np.flatnonzero((inside[0] | inside[1]).any(1).numpy()).tolist()


def test_the_data_of_a_run_are_those_that_it_has_read(counted):
    """For a run in stages, and for one without."""
    config = dict(data=counted, block_size=16, stage="all", stages=STAGES)
    data = data_of_run(dict(config, data_hash=DATA["stages"](counted).data_hash), 10**4)
    assert data.begins == [0, 5_000]
    whole = dict(config, data_hash=DATA["natural"](counted).data_hash, stage="", seed=3)
    assert data_of_run(whole, 10).seed == 3
    with pytest.raises(ValueError, match="has changed since the run began"):
        data_of_run(dict(config, data_hash="another"), 10)
