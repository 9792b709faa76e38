"""
Forgetting: a second validation set during fine-tuning, with text like the training data of the start model.

    lost = sum over documents of (bits after - bits before)  /  bytes      paired by document, with its 95 % interval

The loss on the new data does not show it. Of 46 LoRA runs on Apertus-8B, those with the lowest loss, at a rate of 1e-3,
gave hardly a readable answer in another test; those at 1e-5 still did well there (github.com/davmels/peft_apertus).

The old text is fixed: of evenly spaced documents the first windows, then the second windows, and so on. old.json in
the run folder keeps the bits of the start model, so that a resumed run compares with the same start. Measuring draws no
random number and computes no gradient, so it does not change the run.

$ python -m posttrain.sft --init_from=out/laptop --data=conversations.jsonl --old=data/stdlib --old_every=50
$ python train.py --init_from=out/laptop --data=data/mine --out=out/mine --old=data/stdlib      # at every validation
"""

import math

import numpy as np
import torch

import evaluate
from engine.files import read_json, sha256_of, write_json
from engine.parallel import drop_gathered
from tokenizer import load_for


class Old:
    """
    Old text in windows of T tokens, at most `most` of them (0: all). before, bits: the bits of each document under the
    start model, and at the last measurement.

    tok: the tokenizer, or the folder that has it; path: a data folder (its validation documents), .txt, or .jsonl with
    "text"; out: the run folder. ValueError if there is no text.
    """

    def __init__(self, path, tok, T, most, out):
        tok = load_for(tok) if isinstance(tok, str) else tok
        self.path, self.file, self.before = path, f"{out}/old.json", None
        rows = [(turn, n, window)
                for n, text in enumerate(texts(path, most))
                for turn, window in enumerate(evaluate.windows_of(evaluate.text_ids(tok, text), T))]
        # All first windows come first, so that each document keeps one.
        rows.sort(key=lambda row: row[:2])
        _, self.owner, self.windows = zip(*rows[:most or None])
        self.sizes = self.per_document([evaluate.text_bytes(tok, ids[first:]) for ids, first in self.windows])
        self.hash = sha256_of(self.windows)[:16]

    def per_document(self, numbers):
        """Numbers of the windows, added up for each document."""
        return np.bincount(self.owner, numbers)

    def measure(self, model, ranks):
        """
        Bits per byte for the log, old_bpb. Each rank measures all windows, since shards gather each other's weights.

        The first measurement of a run is that of the start model; the first rank writes it to old.json.
        """
        model.eval()
        # Eager, because these windows have shapes that training has not compiled.
        with torch.compiler.set_stance("force_eager"):
            nats = [nll.sum() for nll in evaluate.token_nats(model, self.windows)]
        model.train()
        drop_gathered(model)
        self.bits = self.per_document(nats) / math.log(2)
        if self.before is None:
            self.before = self.bits
            if ranks.is_main:
                write_json(self.file, dict(old=self.path, hash=self.hash, bits=self.bits.tolist()))
        return dict(old_bpb=self.bits.sum() / self.sizes.sum())

    def recall(self):
        """For a resumed run: read the start model's bits. ValueError: they are of other windows."""
        found = read_json(self.file)
        if found["hash"] != self.hash:
            raise ValueError(f"{self.file} has other windows than {self.path} today: use the same --old as when this "
                             "run began, unchanged, or leave --old out")
        self.before = np.array(found["bits"])

    def summary(self, first):
        """For summary.json: bits per byte before and after, and lost ± half of its 95 % interval. first: print."""
        lost, half = evaluate.ratio(self.bits - self.before, self.sizes)
        before, after = (bits.sum() / self.sizes.sum() for bits in (self.before, self.bits))
        n = len(self.sizes)
        half = None if n == 1 else half                     # one document has no interval
        if first:
            interval = "" if half is None else f" ± {half:.3f}"
            print(f"lost {lost:+.3f}{interval} bits/byte of {self.path} ({before:.3f} -> {after:.3f}, {n} documents)")
        return dict(old=self.path, old_documents=n, old_before=before, old_after=after, old_lost=lost,
                    old_plus_minus=half)


def texts(path, most):
    """The texts at `path`, at most `most` of them (0: all), evenly spaced. ValueError: no text there."""
    documents = evaluate.contents(path)[0]
    every = -(-len(documents) // most) if most else 1
    found = [text for _, text in documents[::every or 1] if text.strip()]
    if not found:
        raise ValueError(f'old={path}: no text there: want a data folder of prepare.py, .txt, or .jsonl with "text"')
    return found
