"""
The inverse of data.py: which samples of a run contain a document.

The order of samples is a permutation keyed by (seed, epoch). So nothing needs to be logged during the run: the order is
computed again, for any number of ranks and of resumes. That takes 0.15 s for each million samples: 9 minutes for the
15T tokens of Apertus.
"""

import os

import numpy as np

from data import TokenDataset, started_stages
from stages import StagedDataset

# Samples whose windows are computed at once.
CHUNK = 1 << 20


def samples_of(data, path, offset, n, until):
    """
    The samples below `until` of a TokenDataset or StagedDataset that hold one of the tokens offset .. offset + n - 1 of
    the shard at `path`; tokens beyond its end are those of the next shard. int64, sorted.

    A window has T + 1 tokens, so the token at the border of two windows is in both.
    """
    if isinstance(data, StagedDataset):
        stages = zip(data.begins, data.ends, data.parts)
        parts = [begin + samples_of(part, path, offset, n, min(until, end) - begin) for begin, end, part in stages]
        return np.concatenate(parts)
    path, parts = os.path.realpath(path), [np.zeros(0, np.int64)]
    places = [(s, begin + offset) for s, stream in enumerate(data.streams)
              for (file, _), begin in zip(stream.files, stream.begins) if os.path.realpath(file) == path]
    for at in range(0, until, CHUNK):
        samples = np.arange(at, min(at + CHUNK, until))
        stream, window = data.where(samples)
        for s, begin in places:
            # Window w has the tokens w * T to w * T + T.
            ahead = begin - window * data.T
            parts.append(samples[(stream == s) & (ahead <= data.T) & (ahead + n > 0)])
    return np.unique(np.concatenate(parts))


def data_of_run(config, samples):
    """
    The data set of a run of train.py with these settings (its config.json), which has read this number of samples.

    ValueError: the folder no longer holds the data that the run has read.
    """
    folder, T = config["data"], config["block_size"]
    if config["stage"]:
        data = StagedDataset(folder, config["stages"], T, stage=config["stage"].removeprefix("all"))
    else:
        data = TokenDataset(folder, "train", T, config["seed"])
    if started_stages(data.fingerprint, samples) != started_stages(config["data_hash"], samples):
        raise ValueError(f"{folder} has changed since the run began: it is version {data.fingerprint:.16}, the run has "
                         f"read {config['data_hash']:.16}")
    return data
