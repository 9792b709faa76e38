"""
A run in stages, like the five of Apertus (report sec. 3): sources and their order change at given numbers of samples.
Which stage a sample belongs to is arithmetic on its number, as all of data.py is.

$ python train.py configs/8b.py --stage=1    # to the end of the first stage; then --resume --stage=3
"""

import math
from bisect import bisect_right

import torch

from data import TokenDataset
from engine.files import sha256_of


class StagedDataset:
    """
    A run in stages, like the five of Apertus: sample g belongs to the stage in whose part of the run it
    lies, and is sample g - begin of that stage's own TokenDataset. (Apertus' loader restarted at each
    stage, with another seed; report sec. 3.)

    stages: rows of (name, sources, until in samples, seed), as in configs/8b.py; sources as in
    TokenDataset. stage: the name of the last one to run, "" = all; later ones need no data yet. After the
    last stage its data continue.

    stop: the number of samples at the end of the stage called `stage`, None if none is named.
    fingerprint: HASH@BEGIN of each stage, so that the data of later stages may still change or be added: see
    started_stages(). ValueError: no such stage, or stages that do not follow each other.
    """

    def __init__(self, folder, stages, block_size, *goldfish, stage=""):
        names = [name for name, *_ in stages]
        untils = [until for _, _, until, _ in stages]
        if not stages or stage and stage not in names:
            raise ValueError(f"there is no stage {stage!r}: the table of stages has {', '.join(names) or 'none'}")
        if sorted({0, *untils}) != [0, *untils]:
            raise ValueError(f"stages end after {untils} samples: want each later than the one before")
        last = names.index(stage) if stage else len(names) - 1
        self.stop = untils[last] if stage else None
        self.begins = [0, *untils[:last]]
        self.ends = [*untils[:last], math.inf]
        self.parts = []
        words = []
        for begin, row in zip(self.begins, stages):
            _, sources, _, seed = row
            part = TokenDataset(folder, "train", block_size, seed, *goldfish, sources=sources)
            words.append(f"{sha256_of([part.fingerprint, row])}@{begin}")
            self.parts.append(part)
        self.fingerprint = " ".join(words)
        self.meta = self.parts[0].meta
        self.n_tokens = sum(part.n_tokens for part in self.parts)

    def batch(self, first, n):
        """As TokenDataset.batch; a batch across the border of two stages has samples of both."""
        batches = []
        at = first
        while at < first + n:
            s = bisect_right(self.begins, at) - 1
            begin = self.begins[s]
            end = min(first + n, self.ends[s])
            batches.append(self.parts[s].batch(at - begin, end - at))
            at = end
        return tuple(map(torch.cat, zip(*batches)))
