"""
The inverse of data.py: at which samples a run has read a document.

A window's place in the order of samples is a permutation keyed by (seed, epoch), which can be inverted. So nothing need
be logged during the run: not how often it was stopped, nor on how many ranks it ran.
"""

import os

import numpy as np

from data import TokenDataset, begun, by_epoch, feistel, permute
from engine.mixture import SLOTS
from stages import StagedDataset


def inverse(x, half, keys):
    """The inverse of data.feistel: its rounds with the keys in reverse, the halves swapped before and after."""

    def swapped(x):
        return (x & (1 << half) - 1) << half | x >> half

    return swapped(feistel(swapped(x), half, keys[::-1]))


def samples_of(data, path, offset, n, until):
    """
    The samples below `until` of a TokenDataset or StagedDataset that hold one of the tokens offset .. offset + n - 1 of
    the shard at `path`; tokens beyond its end are those of the next shard. int64, sorted.

    A window is T + 1 tokens, so a token between two windows is in both.
    """
    found = [np.zeros(0, np.int64)]
    if isinstance(data, StagedDataset):
        for begin, end, part in zip(data.begins, data.ends, data.parts):
            found.append(begin + samples_of(part, path, offset, n, min(until, end) - begin))
        return np.concatenate(found)
    for s, stream in enumerate(data.streams):
        for (file, _), start in zip(stream.files, stream.begins):
            if os.path.realpath(file) == os.path.realpath(path):
                # Window w has the tokens w * T to w * T + T.
                first = max(0, (start + offset - 1) // data.T)
                end = min((start + offset + n - 1) // data.T + 1, stream.n_windows)
                found += samples_with(data, s, np.arange(first, end), until)
    return np.unique(np.concatenate(found))


def samples_with(data, s, windows, until):
    """Yield, epoch by epoch, the samples below `until` that are one of these windows of stream s."""
    N = data.streams[s].n_windows
    epoch = least = 0
    while least < until:
        sample = epoch * N + permute(windows, N, data.seed, epoch, inverse)
        epoch += 1
        # The least sample that the next epoch can have.
        least = epoch * N
        if data.slots is not None:
            # With weights the stream has some slots of each block of SLOTS samples, in an order of its own.
            first, end = data.slots[s:s + 2]
            block, slot = np.divmod(sample, end - first)
            sample = block * SLOTS + by_epoch(block, first + slot, SLOTS, ~data.seed, inverse)
            least = least // (end - first) * SLOTS
        yield sample[sample < until]


def data_of_run(config, samples):
    """
    The windows that a run of train.py with these settings (its config.json) has read in this number of samples.

    ValueError: the folder no longer holds the data that it read.
    """
    folder, T = config["data"], config["block_size"]
    if config["stage"]:
        data = StagedDataset(folder, config["stages"], T, stage=config["stage"].removeprefix("all"))
    else:
        data = TokenDataset(folder, "train", T, config["seed"])
    if begun(data.fingerprint, samples) != begun(config["data_hash"], samples):
        raise ValueError(f"{folder} has changed since the run began: it is version {data.fingerprint:.16}, the run has "
                         f"read {config['data_hash']:.16}")
    return data
