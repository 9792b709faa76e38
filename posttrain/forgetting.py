"""
What fine-tuning forgets: a second validation set, text of the kind that the start model was made from.

    lost = sum over documents of their bits, after - before  /  bytes      paired by document, with its 95 % interval

The loss of the new data says nothing of this. Of 46 LoRA runs on Apertus-8B, those with the lowest loss, at a rate of
1e-3, gave hardly a readable answer on another test (github.com/davmels/peft_apertus); at 1e-5 they kept it.

The old text is fixed: the first windows of as many documents as there are windows, evenly spaced, then their second
windows, and so on. What the start model knew of it is in old.json of the run folder, so that a resumed run compares
with the same. Measuring draws no random number and needs no gradient: the run ends in the same bits without it.

$ python -m posttrain.sft --init_from=out/laptop --data=conversations.jsonl --old=data/stdlib --old_every=50
$ python train.py --init_from=out/laptop --data=data/mine --out=out/mine --old=data/stdlib      # at every validation
"""

import hashlib
import json
import math
import os

import numpy as np
import torch

import evaluate
from engine.files import read_json, write_flushed
from engine.parallel import drop_gathered


class Old:
    """
    Old text in windows of T tokens, `most` of them or, for 0, all; and what the start model knew of it, in bits of each
    document.

    path: a data folder (its validation documents), a .txt file, or .jsonl with "text"; out: the run folder. ValueError
    if there is no text.
    """

    def __init__(self, path, tok, T, most, out):
        self.path = path
        self.file = f"{out}/old.json"
        rows = []
        for n, text in enumerate(texts(path, tok, most)):
            windows = evaluate.windows_of(evaluate.text_ids(tok, text), T)
            rows += [(turn, n, window) for turn, window in enumerate(windows)]
        # By turn, so that each document has a part.
        rows.sort(key=lambda row: row[:2])
        _, owner, self.windows = zip(*rows[:most or None])
        self.owner = np.array(owner)
        self.sizes = self.per_document([evaluate.text_bytes(tok, ids[first:]) for ids, first in self.windows])
        self.hash = hashlib.sha256(json.dumps(self.windows).encode()).hexdigest()[:16]

    def per_document(self, numbers):
        """Numbers of the windows, added up for each document."""
        return np.bincount(self.owner, numbers)

    @torch.no_grad()
    def measure(self, model, ranks):
        """What the log says: old_bpb. Each rank measures all windows, since shards gather each other's weights."""
        nats = []
        # Eager, because these windows have shapes that training has not compiled.
        with torch.compiler.set_stance("force_eager"):
            for window in self.windows:
                idx, targets = evaluate.laid_out([window], model.lm_head.weight.device)
                _, nll = model(idx, targets, per_token=True)                # (1, T)
                nats.append(nll[targets >= 0].double().sum().item())
        drop_gathered(model)
        self.bits = self.per_document(nats) / math.log(2)
        return dict(old_bpb=self.bits.sum() / self.sizes.sum())

    def remember(self, start, first):
        """
        Before the first step of this process, after measure() if `start` is 0: keep what the start model knew.

        The first rank writes it down, and a resumed run reads it. ValueError if it is not there, or of other windows.
        """
        if not start:
            self.before = self.bits
            if first:
                write_flushed(self.file, json.dumps(dict(old=self.path, hash=self.hash, bits=self.bits.tolist())))
            return
        found = read_json(self.file) if os.path.exists(self.file) else {}
        if found.get("hash") != self.hash:
            raise ValueError(f"what the start model knew of {self.path} is not in {self.file}, which "
                             f"{'has other windows' if found else 'is not there'}: take the --old with which this run "
                             "was begun, as it was, or leave --old out")
        self.before = np.array(found["bits"])

    def summary(self):
        """What summary.json says: before, after, and what was lost in bits per byte with half of its 95 % interval."""
        lost, half = evaluate.ratio(self.bits - self.before, self.sizes)
        total = self.sizes.sum()
        return dict(
            old=self.path,
            old_documents=len(self.sizes),
            old_before=self.before.sum() / total,
            old_after=self.bits.sum() / total,
            old_lost=lost,
            old_plus_minus=None if math.isnan(half) else half,
        )

    def line(self, out):
        """What the run in `out` has lost, in one line."""
        found = self.summary()
        half = found["old_plus_minus"]
        interval = "" if half is None else f" ± {half:.3f}"
        change = f"{found['old_before']:.3f} -> {found['old_after']:.3f}"
        return (f"{out}: lost {found['old_lost']:+.3f}{interval} bits/byte of {self.path} ({change}, "
                f"{len(self.sizes)} documents)")


def old_of(old, tok, T, most, out):
    """An Old, or None if no old text is named."""
    return Old(old, tok, T, most, out) if old else None


def due(old, every, done, steps):
    """Whether `old`, an Old or None, is to be measured after so many of the steps."""
    return old and (done == steps or every and done % every == 0)


def texts(path, tok, most):
    """The texts at `path`, or `most` of them, evenly spaced. ValueError if there are none."""
    if os.path.isdir(path):
        documents = list(evaluate.validation_documents(path, tok))
    else:
        documents, *_ = evaluate.contents(path)
    every = -(-len(documents) // most) if most else 1
    documents = documents[::every or 1]
    found = [text for _, text in documents if text.strip()]
    if not found:
        raise ValueError(f'old={path}: no text there: want a data folder of prepare.py, .txt, or .jsonl with "text"')
    return found


def conclude(out, steps, old):
    """Write summary.json of SFT and QRPO, with what was lost. old: an Old or None."""
    summary = dict(steps=steps)
    if old:
        summary |= old.summary()
        print(old.line(out))
    write_flushed(f"{out}/summary.json", json.dumps(summary, indent=1))
