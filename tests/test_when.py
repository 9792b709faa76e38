"""corpus/when.py: the samples of a document, against all batches of a run of more than two blocks of a mixture."""

import json

import numpy as np
import pytest

from corpus.when import data_of_run, samples_of
from data import TokenDataset
from engine.mixture import SLOTS
from stages import StagedDataset

STAGES = [("1", ("a",), 5_000, 1), ("2", dict(b=1, c=2), 30_000, 2)]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A folder whose tokens are 0, 1, 2, ...: two shards of source a, one each of b and c."""
    folder, token, sources = tmp_path_factory.mktemp("counted"), 0, dict(a=[], b=[], c=[])
    for name, n in dict(a0=3220, a1=10800, b0=3330, c0=4200).items():
        np.save(folder / f"{name}.npy", np.arange(token, token + n, dtype=np.uint16))
        sources[name[0]].append(dict(file=f"{name}.npy", tokens=n, sha256=name))
        token += n
    sources = {name: dict(train=dict(shards=shards)) for name, shards in sources.items()}
    meta = dict(bos=60_001, eos=60_002, vocab_size=60_003, tokenizer_hash="", sources=sources)
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


DATA = {
    "natural": lambda folder: TokenDataset(folder, "train", 16),
    "mixed": lambda folder: TokenDataset(folder, "train", 16, sources=dict(a=1, b=3, c=1)),
    "twice": lambda folder: TokenDataset(folder, "train", 16, 28, sources=("b", "a", "b")),
    "stages": lambda folder: StagedDataset(folder, STAGES, 16)}


# Shard, offset, first token, tokens, and the end of the stream where sources are streams of their own: there the tokens
# beyond the end of a shard are not those of the next source.
PLACES = [("a0", 0, 0, 1, 14020), ("a0", 3200, 3200, 40, 14020), ("a1", 10790, 14010, 25, 14020),
          ("c0", 1000, 18350, 500, 21550)]


@pytest.mark.parametrize("kind", DATA)
def test_the_samples_of_a_document_are_exact_to_the_sample(counted, kind):
    """A run of its first token; across the end of a shard; at the end of its stream, where tokens have no window."""
    data, until = DATA[kind](counted), 2 * SLOTS + 77
    idx, targets, *_ = data.batch(0, until)
    for file, offset, first, n, end in PLACES:
        last = first + n if kind == "natural" else min(first + n, end)
        inside = ((idx >= first) & (idx < last) | (targets >= first) & (targets < last)).any(1)
        found = samples_of(data, f"{counted}/{file}.npy", offset, last - first, until)
        assert found.dtype == np.int64 and found.tolist() == np.flatnonzero(inside.numpy()).tolist()


def test_the_data_of_a_run_are_those_that_it_has_read(counted):
    config = dict(data=counted, block_size=16, seed=3, stage="all", stages=STAGES)
    fingerprint = DATA["stages"](counted).fingerprint
    assert data_of_run(dict(config, data_hash=fingerprint), 10**4).begins == [0, 5_000]
    one = dict(config, stage="", data_hash=DATA["natural"](counted).fingerprint)
    assert data_of_run(one, 10).seed == 3
    for stage in ("", "all"):
        with pytest.raises(ValueError, match="has changed since the run began"):
            data_of_run(dict(config, stage=stage, data_hash="another"), 10)
