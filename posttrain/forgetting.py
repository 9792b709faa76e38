"""
What fine-tuning forgets: bits per byte of old text before, on the way and after, beside what the run has gained.

    lost    = sum over documents of their bits, after - before  /  bytes       paired by document, 95 % interval
    gained  = the run's own loss, its end against its beginning                in one epoch of SFT a held-out loss
    KL      = mean over old tokens of sum_v p(v) log(p(v) / base(v))           with adapters: the base lies below them
    change  = |dW| / |W|, by kind of matrix                                    the same
    task    = share of a task's questions that are answered right              as evaluate.py asks, Wilson's interval

The loss of the new data says nothing of this. Of 46 LoRA runs on Apertus-8B those with the lowest loss, at a rate of
1e-3, gave hardly an answer any more that could be read on another test (github.com/davmels/peft_apertus); at 1e-5 they
kept it. So every fine-tuning run can watch text of the kind that its start model was made from.

The old text is fixed: the first windows of as many documents as there are windows, evenly spaced, then their second
windows, and so on. What the start model knows of it is written to old.json in the run folder with the hash of the
windows, and a resumed run goes on with it. Measuring draws nothing and needs no gradient: the run ends in the same bits
with and without it, and any number of processes measures the same.

$ python -m posttrain.sft --init_from=out/laptop --data=conversations.jsonl --old=data/stdlib --old_every=50
$ python train.py --init_from=out/laptop --data=data/mine --out=out/mine --old=data/stdlib      # at every validation
$ python -m posttrain.sft --data=conversations.jsonl --old=data/stdlib --task=quiz.jsonl        # and its answers
"""

import hashlib
import json
import math
import os
import statistics

import numpy as np
import torch
from tqdm import tqdm

import evaluate
from engine import plot
from engine.files import read_json, write_flushed
from engine.parallel import drop_gathered
from loss import chunk_rows
from posttrain import lora

LETTERS = 8     # of a text for each token that could be asked for at most: the rest of a huge text is not encoded


class Old:
    """
    Old text in windows, and what the start model knew of it, in bits for each document.

    path: a data folder (its validation documents), a .txt file, or .jsonl with "text". tok, T: the model's tokenizer
    and window. most: windows at most; 0 = all of the text, as evaluate.py has it. out: the run folder. task: questions
    to ask besides, .jsonl as for evaluate.py. ValueError if there is no text, or a question without a valid answer.
    """

    def __init__(self, path, tok, T, most, out, task=""):
        self.path = path
        self.tok = tok
        self.task = task
        self.questions = questions_of(task) if task else []
        self.asked = None
        self.file = f"{out}/old.json"
        self.kl = None
        letters = LETTERS * T * most or None
        rows = []
        for n, text in enumerate(texts(path, tok, most)):
            ids = evaluate.text_ids(tok, text[:letters])
            for turn, window in enumerate(evaluate.windows_of(ids, T)):
                rows.append((turn, n, window))
        # By their turn, so that every document has a part.
        rows.sort(key=lambda row: row[:2])
        _, owner, windows = zip(*rows[:most or None])
        self.windows = list(windows)
        self.owner = np.array(owner)
        self.tokens = sum(len(ids) - first for ids, first in windows)
        self.sizes = self.per_document(size_of(window, tok) for window in windows)
        content = json.dumps([self.windows, self.questions] if task else self.windows)
        self.hash = hashlib.sha256(content.encode()).hexdigest()[:16]
        # Windows at once.
        self.size = max(1, evaluate.batch_tokens // (T + 1))

    def per_document(self, numbers):
        """Numbers of the windows, added up for each document."""
        return np.bincount(self.owner, list(numbers))

    @torch.no_grad()
    def measure(self, model, ranks):
        """
        What the log says: old_bpb, with adapters old_kl, in nats per token, and task, the share of right answers. All
        ranks must call it together.

        Ranks take the same batches in turn, so that the numbers do not depend on how many there are. A rank with no
        batch left runs along with the first, because sharded ranks gather each other's weights.
        """
        device = model.lm_head.weight.device
        adapted = bool(lora.adapted(model))
        count = len(self.windows)
        bits = np.zeros(count)
        kl = 0.0
        # The first window of each of this rank's batches.
        mine = range(ranks.rank * self.size, count, ranks.size * self.size)
        rounds = -(-count // (ranks.size * self.size))
        bar = tqdm(
            range(rounds),
            "old text",
            unit="batch",
            delay=2,
            leave=False,
            disable=not ranks.first)
        # Eager, because these windows have shapes that training has not compiled.
        with torch.compiler.set_stance("force_eager"):
            for k in bar:
                begin = mine[k] if k < len(mine) else 0
                batch = self.windows[begin:begin + self.size]
                idx, targets = evaluate.laid_out(batch, device)
                _, nll = model(idx, targets, per_token=True)                # (B, T)
                scored = targets >= 0
                apart = divergence(model, idx, scored) if adapted else 0.0
                if k == len(mine):
                    break
                nats = (nll * scored).cpu().double().sum(1)
                bits[begin:begin + len(batch)] = nats / math.log(2)
                kl += apart
            if self.task:
                # Every rank asks everything: how long an answer is, is known when it ends, and shards want all ranks.
                self.asked = ask(model, self.tok, self.questions, os.path.basename(self.task))
        drop_gathered(model)
        *bits, kl = ranks.add(*self.per_document(bits), kl)
        self.bits = np.array(bits)
        found = dict(old_bpb=self.bits.sum() / self.sizes.sum())
        if adapted:
            self.kl = kl / self.tokens
            found["old_kl"] = self.kl
        if self.task:
            found["task"] = self.asked["score"]
        return found

    def remember(self, start, first):
        """
        Once, before the first step of this process: what the start model knew.

        At step 0 that is what was measured last, and the first rank writes it down. A resumed run reads it: ValueError
        if it is not there, or is of other windows.
        """
        if not start:
            self.before = self.bits
            self.asked_before = self.asked
            found = dict(
                old=self.path,
                task=self.task,
                asked=self.asked,
                hash=self.hash,
                bits=self.bits.tolist(),
                bytes=self.sizes.tolist())
            if first:
                write_flushed(self.file, json.dumps(found))
            return
        if not os.path.exists(self.file):
            raise ValueError(f"this run was begun without --old, and what its start model knew of {self.path} was not "
                             "measured: leave --old out, or name another --out")
        found = read_json(self.file)
        if found["hash"] != self.hash:
            raise ValueError(f"{self.file} is of other windows than those of {self.path}, or of another task: take "
                             f"--old={found['old']} as it was, with the same bound on windows and "
                             f"--task={found.get('task', '')}, or leave --old out")
        self.before = np.array(found["bits"])
        self.asked_before = found.get("asked")

    def summary(self):
        """What summary.json says: before, after, and what was lost in bits per byte with half of its 95 % interval."""
        lost, half = evaluate.ratio(self.bits - self.before, self.sizes)
        total = self.sizes.sum()
        asked = dict(task=self.task, task_before=self.asked_before, task_after=self.asked)
        return (asked if self.task else {}) | dict(
            old=self.path,
            old_hash=self.hash,
            old_documents=len(self.sizes),
            old_before=self.before.sum() / total,
            old_after=self.bits.sum() / total,
            old_lost=lost,
            old_plus_minus=None if math.isnan(half) else half,
            old_kl=self.kl)

    def line(self, out):
        """What the run in `out` has gained and lost, in one line."""
        name, first, last = gained(out)
        found = self.summary()
        how = f"{found['old_lost']:+.3f}"
        if found["old_plus_minus"] is not None:
            how += f" ± {found['old_plus_minus']:.3f}"
        n = len(self.sizes)
        how += f", {n} document{'s' * (n > 1)}"
        if self.kl is not None:
            how += f", KL to the base {self.kl:.3f} nats/token"
        if self.task:
            before = evaluate.with_interval(self.asked_before["score"], self.asked_before["interval"])
            after = evaluate.with_interval(self.asked["score"], self.asked["interval"])
            n = self.asked["n"]
            chance = self.asked["chance"]
            answers = f"; {self.task}: {before} -> {after} right of {n}, chance {chance:.3f}"
        else:
            answers = ""
        return (f"{out}: gained {name} {first:.3f} -> {last:.3f} ({last - first:+.3f}); "
                f"lost {found['old_before']:.3f} -> {found['old_after']:.3f} bits/byte of {self.path} ({how}){answers}")


def questions_of(task):
    """The questions of a .jsonl file. ValueError if it has none, or one without a valid answer."""
    _, rows = evaluate.contents(task)
    if not rows:
        raise ValueError(f'task={task}: no question there: want rows of "question" and "answer", perhaps "choices"')

    def answer(row, place):
        if "choices" in row:
            return evaluate.answer_of(row, place)
        return evaluate.accepted_answers(row, place)

    evaluate.with_answers(rows, task, answer)
    return rows


def ask(model, tok, questions, name):
    """
    n, the share of questions answered right (score) with its 95 % interval, and the chance level.

    Choices by their likelihood, other answers by greedy decoding: what evaluate.py says of the same file.
    """
    results = evaluate.task_scores(model, tok, questions, name)
    n = len(questions)
    right = 0
    chance = 0.0
    for result in results:
        right += round(result["score"] * result["n"])
        chance += result["chance"] * result["n"] / n
    return dict(n=n, score=right / n, interval=evaluate.wilson(right, n), chance=chance)


def old_of(path, tok, T, most, out, task):
    """An Old, or None if no old text is named. ValueError: a task needs one beside it."""
    if task and not path:
        raise ValueError(f"task={task} is asked beside old text: name some with --old, a data folder, .txt or .jsonl")
    return Old(path, tok, T, most, out, task) if path else None


def due(old, every, done, steps):
    """Whether `old`, an Old or None, is to be measured after so many of the steps."""
    return old and (done == steps or every and done % every == 0)


def size_of(window, tok):
    """The bytes that the scored ids of a window stand for; the end of a document stands for none."""
    ids, first = window
    end = evaluate.end_of_text(tok)
    words = [i for i in ids[first:] if i != end]
    return len(tok.decode_bytes(words))


def texts(path, tok, most):
    """The texts at `path`, or `most` of them, evenly spaced. ValueError if there are none."""
    if os.path.isdir(path):
        documents = evaluate.validation_documents(path, tok, most)
    else:
        documents, _ = evaluate.contents(path)
        every = -(-len(documents) // most) if most else 1
        documents = documents[::every or 1]
    found = [text for _, text in documents if text.strip()]
    if not found:
        raise ValueError(f'old={path}: no text there: want a data folder of prepare.py, .txt, or .jsonl with "text"')
    return found


def divergence(model, idx, scored):
    """
    KL(model || its base) in nats, summed over the positions that are scored; the adapters are off for a moment.

    idx, scored (B, T). Two logits of a chunk of positions exist at a time.
    """
    h = model.hidden(idx)[scored]                           # (N, C)
    with lora.off(model):
        below = model.hidden(idx)[scored]                   # (N, C)
    rows = chunk_rows(model.config.vocab_size, h.device)
    total = 0.0
    for part, base in zip(h.split(rows), below.split(rows)):
        p = model.lm_head(part).float().log_softmax(-1)     # (rows, V)
        q = model.lm_head(base).float().log_softmax(-1)
        total += (p.exp() * (p - q)).sum().item()
    return total


@torch.no_grad()
def change(model):
    """
    {kind of matrix: |dW| / |W|} of the adapters, Frobenius norms over all layers, in order; {} without adapters.

    |B A|^2 = sum (B'B * AA'), r x r numbers, so that no matrix of the update is built.
    """
    squares = {}
    for name, layer in lora.adapted(model).items():
        a = layer.lora_A.weight                             # (r, in)
        b = layer.lora_B.weight                             # (out, r)
        update = ((b.T @ b) * (a @ a.T)).sum()
        whole = layer.frozen().float().square().sum()
        kind = name.rpartition(".")[2]
        both = np.array([number(update) * layer.scale**2, number(whole)])
        squares[kind] = squares.get(kind, 0) + both
    return {
        kind: math.sqrt(update / whole)
        for kind, (update, whole) in squares.items()}


def number(x):
    """A tensor of one value, which may be spread over ranks, as a number."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).item()


def gained(out):
    """
    What the log of a run says of the new data at its beginning and its end: (name, first, last).

    Of train.py the first and the last validation, in bits per byte; else the mean loss over the first and the last
    tenth of the steps.
    """
    values = {"val_bpb": [], "loss": []}
    for entry in plot.entries(out):
        for key, found in values.items():
            if entry.get(key) is not None:
                found.append(entry[key])
    if values["val_bpb"]:
        return "val_bpb", values["val_bpb"][0], values["val_bpb"][-1]
    loss = values["loss"]
    tenth = max(1, len(loss) // 10)
    first = statistics.fmean(loss[:tenth])
    last = statistics.fmean(loss[-tenth:])
    return "loss", first, last


def conclude(out, steps, model, old, write=True):
    """
    summary.json of SFT and QRPO, and the one line that says what was gained and lost. old: an Old, or None.

    All ranks call it, for the shards of adapters; one of them writes.
    """
    adapters = change(model)
    if not write:
        return
    _, first, last = gained(out)
    summary = dict(steps=steps, loss_first=first, loss_last=last)
    if adapters:
        summary["change"] = adapters
        ratios = [f"{kind} {ratio:.3g}" for kind, ratio in adapters.items()]
        print(f"|dW| / |W|: {', '.join(ratios)}")
    if old:
        summary |= old.summary()
        print(old.line(out))
    write_flushed(f"{out}/summary.json", json.dumps(summary, indent=1))
