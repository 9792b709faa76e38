"""
What a model recites: passages that it read 0 to 128 times, their beginnings as prompts, and how much of the rest it continues verbatim.

    Rouge-L = 2 P R / (P + R),   P = LCS(generated, truth) / |generated|,   R = LCS / |truth|     LCS: longest common subsequence of ids

Beside it the longest common contiguous span, the type-token ratio (a model that repeats itself is no reciter), and the teacher-forced
accuracy on the labels that Goldfish kept and dropped: reciting stops, knowing does not. Unseen passages (0 repetitions) are the baseline.
Protocol: Apertus report (arXiv 2509.14233) sec. 5.4, app. E: prefixes of 50 to 5,000 tokens, 500 tokens of suffix, BOS before the prompt.

$ python -m studies.memorize speeches.jsonl shakespeare.txt austen.txt      # trains small models with and without Goldfish and tests them
$ python -m studies.memorize --init_from=out/mine --probes=data/mine/probes.json    # the protocol on any model, probes as prepare.py writes them
$ python -m studies.memorize --report                                       # table and pictures again from rows.jsonl

The small models. 1.25M parameters, windows of 256: passages of 150 tokens out of the last 40 % of the last text, everything else as
background that is read once. Two things differ from Apertus' scale. A suffix of 100 tokens has only two labels that
k = 50 drops, so k is 10 or 4 here. And scope 'window' never drops the first h - 1 labels of a window: a dropped label of a passage read r
times is trained r (h - 1) / T times after all, 12 of 128 at T = 512 and h = 50, but 1.5 at Apertus' 4096. Hence the last three models:
k = h = 50, windows of 512, suffixes of 250 tokens, with the mask computed on the stream (what long windows amount to) and on each window.

A seed draws the passages, the documents, their order and the initial weights. The settings above and the learning rate were found in trials
whose seeds were all below 10; the seeds that are reported, from 11 on, chose nothing. Intervals are Student's t over the seeds.

What is asked is in the names of the folders under `runs`. A study that was killed goes on with the same command: finished models are
neither trained nor tested again, and the rows so far are in rows.jsonl after every model.
"""

import sys

if __name__ == "__main__" and not __package__:
    print("memorize.py: start it from the project's root, python -m studies.memorize", file=sys.stderr)
    sys.exit(2)

import glob
import gzip
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sysconfig

import numpy as np
import torch
from tqdm import tqdm

from configurator import ROOT
from engine.checkpoint import write_flushed
from engine.intervals import t_quantile
from generate import generate

paths = []                        # texts for the small models (.txt .md .py .jsonl), probes from the last; nothing = the standard library
models = "none k10 k4 none-512 k50-stream k50-window"    # which of the small models below
seeds = 5                         # of passages, order and weights
first_seed = 11                   # those below have chosen the settings
n_passages = 8                    # of each repetition count, at windows of 256; at 512 three quarters of it
background = 1_000_000            # tokens read once, at windows of 256; at 512 seven tenths of it
tokenizer = "apertus:2048"
jobs = 0                          # models trained at a time; 0 = one a CPU core, one on a GPU
init_from = ""                    # instead: test this model (run folder, Hugging Face folder, hub name) ...
probes = ""                       # ... with these: a JSON list, or a line each, of {"repetitions": n, "text" or "ids": ...}
prefixes = (50, 100, 250, 500, 1000, 2000, 3000, 4000, 5000)
offsets = (0,)                    # where in the passage the prompt begins
suffix = 500                      # tokens to continue
min_ttr = 0.4                     # passages with a lower type-token ratio are left out, as in the report
batch = 16                        # prompts at once
out = ""                          # folder of rows.jsonl, table.md, pictures; "" = results/memorize, or <init_from>/memorize
runs = "out/memorize"             # data and run folders of the small models
report = False                    # run nothing: write table and pictures from rows.jsonl

REPETITIONS = (0, 1, 4, 16, 64, 128)
WANT = 'a JSON list, or a line each, of {"repetitions": n, "text" or "ids": ...}'
EDIT = 0.05                       # of the tokens of a near-duplicate are another token, fresh in every copy

# The small models: window, passage, suffix; flags of train.py; the mask (k, h, hash) whose dropped labels are looked at,
# for `none` as a control.
SHORT, LONG = dict(T=256, passage=150, suffix=100), dict(T=512, passage=300, suffix=250)
MODELS = {
    "none": dict(SHORT, train=dict(goldfish_k=0), mask=(10, 13, "product")),
    "k10": dict(SHORT, train=dict(goldfish_k=10, goldfish_h=13, goldfish_scope="window"), mask=(10, 13, "product")),
    "k4": dict(SHORT, train=dict(goldfish_k=4, goldfish_h=13, goldfish_scope="window"), mask=(4, 13, "product")),
    "none-512": dict(LONG, train=dict(goldfish_k=0), mask=(50, 50, "mix")),
    "k50-stream": dict(LONG, train=dict(goldfish_k=50, goldfish_h=50, goldfish_hash="mix", goldfish_scope="stream"), mask=(50, 50, "mix")),
    "k50-window": dict(LONG, train=dict(goldfish_k=50, goldfish_h=50, goldfish_hash="mix", goldfish_scope="window"), mask=(50, 50, "mix")),
}
PAIRS = (("k10", "none"), ("k4", "none"), ("k4", "k10"), ("k50-stream", "none-512"), ("k50-window", "none-512"), ("k50-window", "k50-stream"))
PREFIX = 50                       # of the small models' prompts: at least h - 1, before which the mask depends on what stood to the left
# AdamW, as the numbers above were found with; 2,048 tokens a step.
TRAIN = dict(n_layer=4, n_head=4, n_kv_head=2, n_embd=128, ffn_dim=512, init_std=0.02, rope_scaling=0.0,
             optimizer="adamw", betas=(0.9, 0.95, 0.9999),
             grad_clip=1.0, lr=3e-3, lr_floor=3e-5, eval_every=10**6, sample_every=0, checkpoint_every=10**6, keep_checkpoints=1)


# -----------------------------------------------------------------------------
# measures, on token ids


def lcs(a, b):
    """Length of the longest common subsequence, a bit a token of `a`: O(|b|) operations on integers of |a| bits (Hyyro 2004)."""
    full, where = (1 << len(a)) - 1, {}
    for i, x in enumerate(a):
        where[x] = where.get(x, 0) | 1 << i
    row = full
    for y in b:
        match = row & where.get(y, 0)
        row = (row + match | row - match) & full
    return len(a) - row.bit_count()


def rouge_l(generated, truth):
    """F1 of the longest common subsequence, in [0, 1]; 0 if either is empty. Lists of ids."""
    return 2 * lcs(generated, truth) / (len(generated) + len(truth)) if generated and truth else 0.0


def longest_span(generated, truth):
    """Length of the longest run of tokens that both contain."""
    truth, row, best = np.asarray(truth), np.zeros(len(truth) + 1, dtype=np.int64), 0
    for x in generated:
        row[1:] = np.where(truth == x, row[:-1] + 1, 0)
        best = max(best, int(row.max()))
    return best


def type_token_ratio(ids):
    return len(set(ids)) / max(len(ids), 1)


def common_start(generated, truth):
    """Tokens that are right before the first that is wrong."""
    return next((i for i, (x, y) in enumerate(zip(generated, truth)) if x != y), min(len(generated), len(truth)))


# -----------------------------------------------------------------------------
# the protocol


def recall(model, passages, bos, offset, prefix, suffix, nucleus=False, seed=0):
    """
    Prompt with BOS + passage[offset : offset + prefix], continue by `suffix` tokens, compare with what follows in the passage.

    passages: lists of ids. Greedy, or nucleus sampling (temperature 1, top-p 0.9). Returns one dict a passage. ValueError if a passage is
    too short or prompt and suffix do not fit into the model's window.
    """
    need, window = offset + prefix + suffix, model.config.block_size
    if 1 + prefix + suffix > window:
        raise ValueError(f"prefix {prefix} + suffix {suffix} do not fit into the model's window of {window}: lower --prefixes or --suffix")
    if min(map(len, passages)) < need:
        raise ValueError(f"a probe has {min(map(len, passages))} tokens; offset {offset} + prefix {prefix} + suffix {suffix} need {need}: "
                         "lower one of them")
    device, rows = model.lm_head.weight.device, []
    how = dict(temperature=1.0, top_p=0.9, generator=torch.Generator(device).manual_seed(seed)) if nucleus else dict(temperature=0)
    for i in range(0, len(passages), batch):
        some = passages[i:i + batch]
        prompts = torch.tensor([[bos, *p[offset:offset + prefix]] for p in some], device=device)
        new = generate(model, prompts, suffix, **how)[:, 1 + prefix:].tolist()
        for p, g in zip(some, new):
            truth = p[offset + prefix:need]
            rows.append(dict(rouge=rouge_l(g, truth), span=longest_span(g, truth), start=common_start(g, truth),
                             ttr=type_token_ratio(g), truth_ttr=type_token_ratio(truth)))
    return rows


@torch.no_grad()
def forced(model, passages, bos, prefix, mask):
    """
    Teacher-forced top-1 accuracy on the labels after the prefix that the mask (k, h, hash) keeps and drops, computed on the passage, so
    prefix >= h - 1. Returns (right kept, kept, right dropped, dropped) summed over the passages.
    """
    from goldfish import goldfish_mask
    counts = np.zeros(4, dtype=int)
    for p in passages:
        labels = torch.tensor(p)                                            # (T,)
        logits, _ = model(torch.tensor([[bos, *p[:-1]]], device=model.lm_head.weight.device))
        right = (logits[0].argmax(-1).cpu() == labels)[prefix:]
        keep = goldfish_mask(labels, *mask)[prefix:]
        counts += [int((right & keep).sum()), int(keep.sum()), int((right & ~keep).sum()), int((~keep).sum())]
    return counts.tolist()


def cell(rows, **names):
    """Means over the passages of one cell, with the best and worst Rouge-L: a line of rows.jsonl."""
    mean = {k: round(statistics.fmean(r[k] for r in rows), 4) for k in rows[0]}
    scores = [r["rouge"] for r in rows]
    return dict(names, n=len(rows), **mean, rouge_min=round(min(scores), 4), rouge_max=round(max(scores), 4))


def read_probes(path, tok):
    """{repetitions: [ids]} of a probe file."""
    if not os.path.isfile(path):
        raise ValueError(f"no probe file {path!r}: make one with prepare.py --probes, or {WANT}")
    with open(path, encoding="utf-8") as f:
        text = f.read()
    try:
        try:
            found = json.loads(text)                                        # a list, or prepare.py's object around one
        except json.JSONDecodeError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        same = not isinstance(found, dict) or found["tokenizer_hash"] == tok.hash              # ids of another vocabulary mean other words
        buckets = {}
        for p in found["probes"] if isinstance(found, dict) else found:
            buckets.setdefault(int(p["repetitions"]), []).append(p["ids"] if "ids" in p and same else tok.encode(p["text"]))
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: not probes ({type(e).__name__}: {e}): want {WANT}") from None
    return dict(sorted(buckets.items()))


def test_model():
    """The report's protocol on one model: every prefix length, offset and repetition count, greedy and nucleus. Returns rows."""
    import convert
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model, tok = convert.load_any(init_from, place)
    model.eval()
    buckets, rows = read_probes(probes, tok), []
    longest = max(prefixes)
    shortest = min(len(p) for b in buckets.values() for p in b)
    if shortest < max(offsets) + longest + suffix or longest + suffix + 1 > model.config.block_size:
        recall(model, [min((p for b in buckets.values() for p in b), key=len)], tok.bos, max(offsets), longest, suffix)   # says which
    dull = 0
    for n, passages in buckets.items():
        varied = [p for p in passages if type_token_ratio(p[max(offsets) + longest:][:suffix]) >= min_ttr]
        dull, buckets[n] = dull + len(passages) - len(varied), varied
    if dull:
        print(f"{dull} probes with a type-token ratio below {min_ttr} are left out")
    todo = [(n, p, offset, nucleus) for n in buckets if buckets[n] for p in prefixes for offset in offsets for nucleus in (False, True)]
    for n, prefix, offset, nucleus in tqdm(todo, "reciting", unit="cell"):
        found = recall(model, buckets[n], tok.bos, offset, prefix, suffix, nucleus)
        rows.append(cell(found, model=os.path.basename(os.path.normpath(init_from)), seed=0, repetitions=n,
                         kind="nucleus" if nucleus else "greedy", prefix=prefix, suffix=suffix, offset=offset))
    return rows


# -----------------------------------------------------------------------------
# the small models


def read_texts():
    """The texts in the order given, each one string."""
    library = os.path.join(sysconfig.get_path("stdlib"), "*.py")
    files = [f for p in paths or [library] for f in sorted(glob.glob(p))]
    texts = []
    for file in files:
        with (gzip.open if file.endswith(".gz") else open)(file, "rt", encoding="utf-8", errors="replace") as f:
            text = f.read()
        if ".jsonl" in file:
            text = "\n\n".join(json.loads(line)["text"] for line in text.splitlines() if line.strip())
        texts.append(text)
    if not texts:
        raise ValueError(f"no text in {paths}: name .txt, .md, .py or .jsonl files")
    return texts if paths else ["\n\n".join(texts)]


def documents(text, characters=900):
    """A text as documents of about so many characters, cut between paragraphs."""
    found, now = [], ""
    for paragraph in text.split("\n\n"):
        now += paragraph + "\n\n"
        if len(now) >= characters:
            found, now = found + [now.strip()], ""
    return found + [now.strip()] if now.strip() else found


def folder_of(name, seed, asked):
    """Where the run or the data of a seed lie. What is asked decides the name, so finished work of other settings is never taken for it."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return os.path.join(runs, f"{name}-s{seed}-{digest[:10]}")


def data_of(seed, T, passage):
    """The data folder of a seed at a window length, made if it is not there."""
    texts = [hashlib.sha256(text.encode()).hexdigest() for text in read_texts()]
    folder = folder_of(f"data-{T}", seed, [seed, passage, n_passages, background, tokenizer, REPETITIONS, EDIT, texts])
    make_data(folder, seed, T, passage)
    return folder


def make_data(folder, seed, T, passage):
    """
    Write a data folder as train.py reads it, with its probes.json. Stream: BOS document EOS; background documents once and passages as
    often as their bucket says, shuffled, so that every copy has another left context and another place in its window.
    """
    import tokenizer as tokenizers
    from corpus.shards import write_shard
    if os.path.exists(os.path.join(folder, "meta.json")):
        return
    os.makedirs(folder, exist_ok=True)
    n = n_passages if T == 256 else max(n_passages * 3 // 4, 1)
    tok, rng, texts = tokenizers.load(tokenizer), random.Random(seed), read_texts()
    cut = int(len(texts[-1]) * 0.6)
    source, texts = tok.encode(texts[-1][cut:]), [*texts[:-1], texts[-1][:cut]]
    docs = [d for t in texts for d in documents(t)]
    rng.shuffle(docs)
    val, docs = docs[:len(docs) // 12], docs[len(docs) // 12:]
    slots = rng.sample(range(len(source) // passage), min(n * (len(REPETITIONS) + 1), len(source) // passage))
    if len(slots) < n * (len(REPETITIONS) + 1):
        raise ValueError(f"the last 40 % of the last text have {len(source):,} tokens: want "
                         f"{n * (len(REPETITIONS) + 1)} passages of {passage}; give a longer text")
    buckets = [*REPETITIONS, "edited"]
    pieces = [dict(repetitions=buckets[i // n], ids=source[s * passage:(s + 1) * passage]) for i, s in enumerate(slots)]
    stream, budget = [], background if T == 256 else background * 7 // 10
    for d in docs:
        stream.append((None, tok.encode(d)))
        budget -= len(stream[-1][1]) + 2
        if budget < 0:
            break
    else:
        raise ValueError(f"the texts lack {budget:,} tokens of background={background:,}: give more text, or lower it")
    for i, p in enumerate(pieces):
        for _ in range(REPETITIONS[-1] if p["repetitions"] == "edited" else p["repetitions"]):
            edited = [rng.choice(source) if rng.random() < EDIT else x for x in p["ids"]]
            stream.append((i, edited if p["repetitions"] == "edited" else p["ids"]))
    rng.shuffle(stream)
    train, begins = [], {}
    for i, ids in stream:
        if i is not None:
            begins.setdefault(i, []).append(len(train) + 1)                 # where the copy's first token stands in the stream
        train += [tok.bos, *ids, tok.eos]
    for i, p in enumerate(pieces):
        p["begins"] = begins.get(i, [])
    val_ids = [[tok.bos, *tok.encode(d), tok.eos] for d in val]
    while sum(map(len, val_ids)) > 82_000:
        val_ids.pop(), val.pop()
    split = {}
    for name, ids, texts_of, count in (("train", train, None, len(stream)), ("val", sum(val_ids, []), val, len(val))):
        shard = dict(file=f"{name}_00000.npy", **write_shard(os.path.join(folder, f"{name}_00000.npy"), np.array(ids, np.uint16)))
        plain = [x for x in ids if x not in (tok.bos, tok.eos)]
        size = sum(len(d.encode()) for d in texts_of) if texts_of else len(tok.decode_bytes(plain))
        split[name] = dict(documents=count, tokens=len(ids), bytes=size, shards=[shard])
    with open(os.path.join(folder, "probes.json"), "w", encoding="utf-8") as f:
        json.dump(pieces, f)
    meta = dict(tokenizer=tok.name, tokenizer_hash=tok.hash, vocab_size=tok.vocab_size, bos=tok.bos, eos=tok.eos)
    meta["sources"] = dict(memorize=split)
    with open(os.path.join(folder, "meta.json"), "w", encoding="utf-8") as f:
        json.dump(meta, f, indent=1)


def flags_of(name, seed, data):
    """The settings of train.py for one small model: once over its data."""
    m = MODELS[name]
    with open(os.path.join(data, "meta.json"), encoding="utf-8") as f:
        windows = (json.load(f)["sources"]["memorize"]["train"]["tokens"] - 1) // m["T"]
    size = 2048 // m["T"]
    steps = windows // size
    return dict(TRAIN, **m["train"], block_size=m["T"], batch_size=size, micro_batch=size, total_samples=steps * size,
                warmup_samples=min(40, steps // 10) * size, decay_samples=steps * 3 // 10 * size, eval_windows=0, seed=seed, data=data)


def train_small(folder, flags):
    """Train one small model; skipped if finished. ValueError with train.py's last line if it fails."""
    if os.path.exists(os.path.join(folder, "summary.json")):
        return
    os.makedirs(folder, exist_ok=True)
    output = os.path.join(folder, "output.txt")
    env = dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    command = [sys.executable, os.path.join(ROOT, "train.py"), "--resume", f"--out={folder}", *(f"--{k}={v}" for k, v in flags.items())]
    with open(output, "w", encoding="utf-8") as f:
        code = subprocess.run(command, stdout=f, stderr=f, env=env).returncode
    if code:
        with open(output, encoding="utf-8") as f:
            last = (f.read().strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"training {folder} ended with code {code}: {last}. The same command tries again where it stopped")


def test_small(name, seed, folder, data):
    """All that is measured of one small model. Returns rows."""
    import convert
    from engine import plot
    m = MODELS[name]
    model, tok = convert.load_run(folder)
    model.eval()
    with open(os.path.join(data, "probes.json"), encoding="utf-8") as f:
        pieces = json.load(f)
    log = [e for e in plot.read_log(folder) if "val_loss" in e][-1]
    who, rows = dict(model=name, seed=seed), []
    rows.append(dict(who, kind="validation", val_loss=round(log["val_loss"], 4), val_bpb=round(log["val_bpb"], 4),
                     seconds=log["seconds"], tokens=log["tokens"]))
    k, h, _ = m["mask"]
    for bucket in (*REPETITIONS, "edited"):
        group = [p for p in pieces if p["repetitions"] == bucket]
        passages = [p["ids"] for p in group]
        at = dict(who, repetitions=bucket)
        for kind in ("greedy", "nucleus"):
            found = recall(model, passages, tok.bos, 0, PREFIX, m["suffix"], kind == "nucleus", seed)
            rows.append(cell(found, **at, kind=kind, prefix=PREFIX, suffix=m["suffix"], offset=0))
        for prefix in (12, 25, 50, 100):                                    # the heat map: the same suffix length for all prefixes
            rows.append(cell(recall(model, passages, tok.bos, 0, prefix, 50), **at, kind="map", prefix=prefix, suffix=50, offset=0))
        rows.append(cell(recall(model, passages, tok.bos, 0, 12, 37), **at, kind="first49", prefix=12, suffix=37, offset=0))
        right_kept, kept, right_dropped, dropped = forced(model, passages, tok.bos, PREFIX, m["mask"])
        in_window = [(b + i - 1) % m["T"] for p in group for b in p["begins"] for i in range(PREFIX, m["passage"])]    # places of labels
        early = sum(w < h - 1 for w in in_window) / (len(group) * (m["passage"] - PREFIX))
        rows.append(dict(at, kind="forced", acc_keep=round(right_kept / kept, 4), keep=kept,
                         acc_drop=round(right_dropped / max(dropped, 1), 4), drop=dropped,
                         trained_anyway=round(early, 2) if m["train"].get("goldfish_scope") == "window" else 0.0))
    return rows


def demonstrate(names):
    """Train and test small models. Yields the rows of one model at a time, seed by seed."""
    from concurrent.futures import ThreadPoolExecutor
    todo = []
    for seed in range(first_seed, first_seed + seeds):
        for name in names:
            data = data_of(seed, MODELS[name]["T"], MODELS[name]["passage"])
            flags = flags_of(name, seed, data)
            todo.append((folder_of(name, seed, flags), flags, name, seed, data))
    pool = ThreadPoolExecutor(jobs or (1 if torch.cuda.is_available() else os.cpu_count()))
    try:
        trained = pool.map(lambda job: train_small(*job[:2]), todo)
        for (folder, _, name, seed, data), _ in tqdm(zip(todo, trained), "models", total=len(todo), unit="model"):
            found = os.path.join(folder, "rows.jsonl")
            if not os.path.isfile(found):
                write_rows(found, test_small(name, seed, folder, data))
            yield read_rows(found)
    finally:
        pool.shutdown(cancel_futures=True)                                  # after an error or Ctrl-C the models not begun stay so


# -----------------------------------------------------------------------------
# what is written


def pick(rows, **want):
    return [r for r in rows if all(r.get(k) == v for k, v in want.items())]


def interval(values, digits=2):
    """The mean and half its 95 % interval by Student's t over the seeds, as text."""
    if not values:
        return ""
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return f"{mean:.{digits}f}"
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def spread(rows, key, digits=2):
    return interval([r[key] for r in rows], digits)


def paired(rows, others, key, digits=2):
    """Model minus model seed by seed: both saw the same passages and background in the same order, from the same initial weights."""
    theirs = {r["seed"]: r[key] for r in others}
    return interval([r[key] - theirs[r["seed"]] for r in rows if r["seed"] in theirs], digits)


def table_md(rows):
    """The rows as Markdown: a pure function, so that a test writes it again from the committed rows and compares."""
    names = list(dict.fromkeys(r["model"] for r in rows))
    buckets = list(dict.fromkeys(r["repetitions"] for r in rows if "repetitions" in r))
    lines = ["# What is recited", ""]
    greedy = pick(rows, kind="greedy")
    prefix, tail = greedy[0]["prefix"], {r["model"]: r["suffix"] for r in greedy}
    for kind, title in (("greedy", "greedy"), ("nucleus", "nucleus sampling, temperature 1, top-p 0.9"),
                        ("first49", "the first 49 tokens: 12 given, 37 to recite")):
        if not pick(rows, kind=kind):
            continue
        start = "" if kind == "first49" else f" after a prefix of {prefix} tokens"
        lines += [f"Rouge-L{start}, {title}; mean ± half its 95 % interval by Student's t over seeds; {greedy[0]['n']} or fewer passages a cell", "",
                  "| model | seeds | suffix | " + " | ".join(map(str, buckets)) + " |", "|---|---|---|" + "---|" * len(buckets)]
        for name in names:
            here = [r for r in pick(rows, model=name, kind=kind) if kind == "first49" or (r["prefix"], r["offset"]) == (prefix, 0)]
            cells = [spread(pick(here, repetitions=b), "rouge") for b in buckets]
            seen = len({r["seed"] for r in pick(rows, model=name)})
            lines.append(f"| {name} | {seen} | {37 if kind == 'first49' else tail[name]} | " + " | ".join(cells) + " |")
        lines.append("")
    if pick(rows, kind="forced"):
        lines += ["At 128 repetitions: longest common span (tokens), type-token ratio (the passage's own beside it), teacher-forced "
                  "accuracy on the labels after the prefix that the mask keeps and drops (for `none` a control: the labels a mask would "
                  "drop), times that a dropped label was trained after all (scope 'window'), validation loss in nats, minutes.", "",
                  "| model | span | ttr | accuracy kept | accuracy dropped (labels) | unseen, dropped | trained anyway | validation loss "
                  "| min |",
                  "|---|---|---|---|---|---|---|---|---|"]
        for name in names:
            most, told = (pick(rows, model=name, kind=kind, repetitions=128) for kind in ("greedy", "forced"))
            unseen, val = pick(rows, model=name, kind="forced", repetitions=0), pick(rows, model=name, kind="validation")
            lines.append(f"| {name} | {spread(most, 'span', 0)} of {tail[name]} | {spread(most, 'ttr')} ({spread(most, 'truth_ttr')}) | "
                         f"{spread(told, 'acc_keep')} | "
                         f"{spread(told, 'acc_drop')} ({sum(r['drop'] for r in told)}) | {spread(unseen, 'acc_drop')} | "
                         f"{spread(told, 'trained_anyway', 1)} | "
                         f"{spread(val, 'val_loss', 3)} | {statistics.fmean(r['seconds'] for r in val) / 60:.1f} |")
        lines.append("")
    return "\n".join(lines + differences_md(rows))


def differences_md(rows):
    """What a mask changes, pair by pair, as lines of Markdown."""
    lines = ["Differences, paired by seed; mean ± half its 95 % interval by Student's t: Rouge-L of the greedy continuation at 128 repetitions "
             "and of edited copies, validation loss in nats.", "",
             "| difference | seeds | Rouge-L, 128 | Rouge-L, edited | validation loss |", "|---|---|---|---|---|"]
    empty = len(lines)
    for one, other in PAIRS:
        ours, theirs = (pick(rows, model=name, kind="validation") for name in (one, other))
        both = {r["seed"] for r in ours} & {r["seed"] for r in theirs}
        if not both:
            continue
        most, edited = ([pick(rows, model=name, kind="greedy", repetitions=bucket) for name in (one, other)] for bucket in (128, "edited"))
        lines.append(f"| {one} - {other} | {len(both)} | {paired(*most, 'rouge')} | {paired(*edited, 'rouge')} | "
                     f"{paired(ours, theirs, 'val_loss', 3)} |")
    return [*lines, ""] if len(lines) > empty else []


def draw_maps(rows, picture):
    """Heat maps, repetitions x prefix, one a model: Rouge-L of greedy continuations, mean over passages, seeds and offsets."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kind = "map" if pick(rows, kind="map") else "greedy"
    names = list(dict.fromkeys(r["model"] for r in rows))
    buckets = [b for b in dict.fromkeys(r["repetitions"] for r in pick(rows, kind=kind))]
    lengths = sorted({r["prefix"] for r in pick(rows, kind=kind)})
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(1.2 + 3.1 * columns, 3.4 * lines), layout="constrained", squeeze=False)
    for axis, name in zip(axes.flat, names):
        grid = np.full((len(buckets), len(lengths)), np.nan)
        for i, b in enumerate(buckets):
            for j, p in enumerate(lengths):
                values = [r["rouge"] for r in pick(rows, model=name, kind=kind, repetitions=b, prefix=p)]
                grid[i, j] = statistics.fmean(values) if values else np.nan
                axis.text(j, i, f"{grid[i, j]:.2f}", ha="center", va="center", fontsize=8, color="white" if grid[i, j] < 0.6 else "black")
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(buckets)), buckets)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("prefix (tokens)")
    for axis in axes.flat[len(names):]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel("repetitions")
    figure.colorbar(image, ax=axes, shrink=0.6, label="Rouge-L of the greedy continuation")
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def read_rows(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def write_rows(path, rows):
    """Whole or not at all."""
    write_flushed(path, (json.dumps(row) + "\n" for row in rows))


def merged(kept, rows):
    """New rows in place of those of the same model and seed; other models and seeds keep what was measured before."""
    again = {(r["model"], r["seed"]) for r in rows}
    order = [*MODELS, *(r["model"] for r in rows)]
    rows = [r for r in kept if (r["model"], r["seed"]) not in again] + rows
    return sorted(rows, key=lambda r: (order.index(r["model"]), r["seed"]))


def write_report(folder):
    path = os.path.join(folder, "rows.jsonl")
    if not os.path.isfile(path):
        raise ValueError(f"no {path}: run studies/memorize.py first, without --report")
    rows = read_rows(path)
    text = table_md(rows)
    with open(os.path.join(folder, "table.md"), "w", encoding="utf-8") as f:
        f.write(text)
    draw_maps(rows, os.path.join(folder, "maps.png"))
    return text


def main():
    folder = out or (os.path.join(init_from, "memorize") if init_from else "results/memorize")
    if bool(init_from) != bool(probes):
        raise ValueError("--init_from=MODEL and --probes=FILE go together; without both, small models are trained and tested")
    if not report:
        unknown = [name for name in models.split() if name not in MODELS]
        if unknown:
            raise ValueError(f"no small model {unknown[0]!r}: there is {', '.join(MODELS)}")
        path = os.path.join(folder, "rows.jsonl")
        kept = [] if init_from or not os.path.isfile(path) else read_rows(path)
        os.makedirs(folder, exist_ok=True)
        for rows in [test_model()] if init_from else demonstrate(models.split()):
            kept = merged(kept, rows)
            write_rows(path, kept)
    print(write_report(folder))


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
