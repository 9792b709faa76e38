"""
What a model recites: passages that it read 0 to 128 times, their beginnings as prompts, how much of the rest it says.

    Rouge-L = 2 P R / (P + R),   P = LCS / |generated|,   R = LCS / |truth|      LCS: longest common subsequence of ids

Beside it stand the longest common contiguous span, the type-token ratio (a model that repeats itself does not recite),
and the teacher-forced accuracy on the labels that Goldfish kept and dropped, because a model that cannot recite a
passage may still know it. Passages that were never read, 0 repetitions, are the baseline.
Protocol: Apertus report (arXiv 2509.14233) sec. 5.4, app. E: prefixes of 50 to 5,000 tokens, 500 tokens of suffix, BOS
before the prompt.

$ python -m studies.memorize speeches.jsonl shakespeare.txt austen.txt   # trains small models on these, and tests them
$ python -m studies.memorize --init_from=out/mine --probes=data/mine/probes.json    # any model; prepare.py's probes
$ python -m studies.memorize --report                                    # table and picture again from rows.jsonl

The small models have 1.25M parameters and windows of 256. They read passages of 150 tokens out of the last 40 % of the
last text, each as often as its repetitions say, and everything else once, as background. Two things cannot be as at
Apertus' scale. A suffix of 100 tokens has only two labels that k = 50 drops, so k is 10 or 4 here. And scope 'window'
never drops the first h - 1 labels of a window, so a dropped label of a passage that is read r times is trained
r (h - 1) / T times after all: 12 of 128 at T = 512 and h = 50, but 1.5 at Apertus' 4096. Hence the last three models:
k = h = 50, windows of 512 and suffixes of 250 tokens, with the mask computed on the stream, which is what long windows
amount to, and on each window.

A seed draws the passages, the documents, their order and the initial weights. The settings above and the learning rate
were found in trials with seeds below 10; the seeds that are reported, from 11 on, chose nothing. Intervals are
Student's t over the seeds. What is asked is in the names of the folders under `runs`, and rows.jsonl is written after
every model, so the same command goes on with a study that was killed.
"""

import sys

if __name__ == "__main__" and not __package__:
    print("memorize.py: start it from the project's root, python -m studies.memorize", file=sys.stderr)
    sys.exit(2)

import difflib
import glob
import hashlib
import itertools
import json
import operator
import os
import random
import statistics
import sysconfig

import numpy as np
import torch
from tqdm import tqdm

import convert
import tokenizer as tokenizers
from corpus.shards import write_shard
from engine import plot
from generate import generate
from goldfish import goldfish_mask
from studies import kit
from tokenizer import read_json

paths = []              # texts for the small models (.txt .md .py .jsonl), passages from the last; none = Python's own
models = "none k10 k4 none-512 k50-stream k50-window"    # which of the small models below
seeds = 5               # of passages, order and weights
first_seed = 11         # those below have chosen the settings
n_passages = 8          # of each repetition count, at windows of 256; at 512 three quarters of it
background = 1_000_000  # tokens read once, at windows of 256; at 512 seven tenths of it
tokenizer = "apertus:2048"
jobs = 0                # models trained at a time; 0 = one for each GPU, or for each CPU core without one
init_from = ""          # instead: test this model (run folder, Hugging Face folder, hub name) ...
probes = ""             # ... with these: a JSON list of {"repetitions": n, "text" or "ids": ...}
prefixes = (50, 100, 250, 500, 1000, 2000, 3000, 4000, 5000)
offsets = (0,)          # where in the passage the prompt begins
suffix = 500            # tokens to continue
min_ttr = 0.4           # passages with a lower type-token ratio are left out, as in the report
batch = 16              # prompts at once
out = ""                # folder of rows.jsonl, table.md, maps.png; "" = results/memorize, or <init_from>/memorize
runs = "out/memorize"   # data and run folders of the small models
report = False          # run nothing: write table and picture from rows.jsonl

REPETITIONS = (0, 1, 4, 16, 64, 128)
EDIT = 0.05     # share of an edited copy's tokens that are replaced, drawn afresh for every copy
WANT = 'a JSON list of {"repetitions": n, "text" or "ids": ...}'

# The small models: tokens of a window T, of a passage and of a suffix; the Goldfish mask (k, h, hash) whose kept and
# dropped labels are compared; and the scope of that mask in training. A model without a scope is trained without it.
SHORT = dict(T=256, passage=150, suffix=100)
LONG = dict(T=512, passage=300, suffix=250)
MODELS = {
    "none": dict(SHORT, mask=(10, 13, "product"), scope=""),
    "k10": dict(SHORT, mask=(10, 13, "product"), scope="window"),
    "k4": dict(SHORT, mask=(4, 13, "product"), scope="window"),
    "none-512": dict(LONG, mask=(50, 50, "mix"), scope=""),
    "k50-stream": dict(LONG, mask=(50, 50, "mix"), scope="stream"),
    "k50-window": dict(LONG, mask=(50, 50, "mix"), scope="window"),
}

# What table.md compares, seed by seed.
PAIRS = (
    ("k10", "none"),
    ("k4", "none"),
    ("k4", "k10"),
    ("k50-stream", "none-512"),
    ("k50-window", "none-512"),
    ("k50-window", "k50-stream"),
)

# Tokens of the small models' prompts: at least h - 1, since the mask of earlier labels depends on the text before them.
PREFIX = 50

# AdamW, with which the settings were found.
TRAIN = dict(
    n_layer=4, n_head=4, n_kv_head=2, n_embd=128, ffn_dim=512,
    init_std=0.02, rope_scaling=0.0,
    optimizer="adamw", betas=(0.9, 0.95, 0.9999), grad_clip=1.0,
    lr=3e-3, lr_floor=3e-5,
    eval_every=10**6, sample_every=0,
    checkpoint_every=10**6, keep_checkpoints=1,
)


# -----------------------------------------------------------------------------
# measures, on lists of token ids


def lcs(a, b):
    """Length of the longest common subsequence, by the textbook's table: a row for each token of b."""
    a = np.array(a)
    row = np.zeros(len(a) + 1, dtype=int)
    for y in b:
        # A match goes on from what was common before both tokens, and the running maximum carries it to the right.
        matched = row[:-1] + (a == y)
        row[1:] = np.maximum.accumulate(np.maximum(row[1:], matched))
    return int(row[-1])


def rouge_l(generated, truth):
    """
    F1 of the longest common subsequence, in [0, 1]; 0 if one of the two is empty.

    Precision and recall of the formula above, put into 2 P R / (P + R), leave this.
    """
    return 2 * lcs(generated, truth) / (len(generated) + len(truth))


def longest_span(generated, truth):
    """Length of the longest run of tokens that both contain."""
    return difflib.SequenceMatcher(None, generated, truth, autojunk=False).find_longest_match().size


def type_token_ratio(ids):
    """
    Different tokens per token, in (0, 1].

    Low values are text that repeats itself: easy to recite, and no sign of memory.
    """
    return len(set(ids)) / len(ids)


def common_start(generated, truth):
    """Number of tokens that are right before the first that is wrong."""
    return len(os.path.commonprefix([generated, truth]))     # It takes lists of anything.


# -----------------------------------------------------------------------------
# the protocol


# A probe is a passage with the number of times that the model has read it. Its beginning is the prompt, `prefix` tokens
# from `offset` on, and the `suffix` tokens after that are what the model would say if it knew the passage by heart.


def check_lengths(window, shortest, offset, prefix, suffix):
    """ValueError if a prompt and its suffix do not fit into the model's window, or into the shortest passage."""
    if 1 + prefix + suffix > window:
        raise ValueError(f"prefix {prefix} + suffix {suffix} do not fit into the model's window of {window}: "
                         "lower --prefixes or --suffix")
    if shortest < offset + prefix + suffix:
        raise ValueError(f"a probe has {shortest} tokens; offset {offset} + prefix {prefix} + suffix {suffix} "
                         f"need {offset + prefix + suffix}: lower one of them")


def recall(model, passages, bos, offset, prefix, suffix, nucleus=False, seed=0):
    """
    Prompt with BOS + passage[offset : offset + prefix], continue by `suffix` tokens, compare with the passage.

    passages: lists of ids. Greedy, or nucleus sampling (temperature 1, top-p 0.9) by the seed.

    Returns one dict for each passage: rouge, span, start and ttr of the continuation, truth_ttr of what follows in the
    passage, and the ids that were said. ValueError if a passage or the model's window is too short.
    """
    shortest = min(map(len, passages))
    check_lengths(model.config.block_size, shortest, offset, prefix, suffix)
    device = model.lm_head.weight.device
    how = dict(temperature=0)
    if nucleus:
        generator = torch.Generator(device).manual_seed(seed)
        how = dict(temperature=1.0, top_p=0.9, generator=generator)
    begin = offset + prefix
    rows = []
    for i in range(0, len(passages), batch):
        some = passages[i : i + batch]
        prompts = [[bos, *p[offset:begin]] for p in some]
        ids = generate(model, torch.tensor(prompts, device=device), suffix, **how)
        new = ids[:, 1 + prefix :].tolist()
        for passage, generated in zip(some, new):
            truth = passage[begin : begin + suffix]
            rows.append(dict(
                rouge=rouge_l(generated, truth),
                span=longest_span(generated, truth),
                start=common_start(generated, truth),
                ttr=type_token_ratio(generated),
                truth_ttr=type_token_ratio(truth),
                said=generated,
            ))
    return rows


@torch.no_grad()
def forced(model, passages, bos, prefix, mask):
    """
    Teacher-forced top-1 accuracy on the labels after the prefix, apart for those that a Goldfish mask keeps and drops.

    mask: (k, h, hash). It is computed on the passage alone, hence prefix >= h - 1. Returns the numbers of labels
    [right and kept, kept, right and dropped, dropped], summed over the passages.
    """
    device = model.lm_head.weight.device
    counts = np.zeros(4, dtype=int)
    for passage in passages:
        labels = torch.tensor(passage)                         # (T,)
        inputs = [bos, *passage[:-1]]
        logits, _ = model(torch.tensor([inputs], device=device))
        answers = logits[0].argmax(-1).cpu()                   # (T,)
        right = (answers == labels)[prefix:]
        keep = goldfish_mask(labels, *mask)[prefix:]
        kinds = (right & keep, keep, right & ~keep, ~keep)
        counts += [int(kind.sum()) for kind in kinds]
    return counts.tolist()


def recite(model, bos, passages, asked, names):
    """
    What the model says of some passages, as lines of rows.jsonl that begin with `names`: model, seed, repetitions.

    asked: (kind, prefix, suffix, offset) of each line. Kind "nucleus" is sampled by the seed, all others are greedy.
    """
    title = f"{names['repetitions']} repetitions"
    lines = []
    for kind, prefix, suffix, offset in tqdm(asked, title, unit="cell", leave=False):
        nucleus = kind == "nucleus"
        found = recall(model, passages, bos, offset, prefix, suffix, nucleus, names["seed"])
        lines.append(cell(found, **names, kind=kind, prefix=prefix, suffix=suffix, offset=offset))
    return lines


def cell(rows, **names):
    """
    A line of rows.jsonl: means of recall's measures over passages.

    The worst and the best Rouge-L show whether a mean is that of all passages, or of a few that are recited whole; what
    was said of the first passage can be read.
    """
    mean = {key: round(statistics.fmean(r[key] for r in rows), 4) for key in rows[0] if key != "said"}
    scores = [round(r["rouge"], 4) for r in rows]
    return dict(
        names,
        n=len(rows),
        **mean,
        rouge_min=min(scores),
        rouge_max=max(scores),
        said=rows[0]["said"],
    )


def read_probes(path, tok):
    """
    {repetitions: [ids]} of a probe file, by number of repetitions.

    prepare.py writes an object around a list, with the hash of its vocabulary; a list alone will do as well. tok
    encodes what has only text. ValueError if the file is something else.
    """
    if not os.path.isfile(path):
        raise ValueError(f"no probe file {path!r}: make one with prepare.py --probes, or {WANT}")
    buckets = {}
    try:
        with open(path, encoding="utf-8") as f:
            found = json.load(f)
        if isinstance(found, list):
            found = dict(probes=found, tokenizer_hash=tok.hash)
        # The ids of prepare.py's file mean other words in another vocabulary, but its text is still good.
        same = found["tokenizer_hash"] == tok.hash
        for probe in found["probes"]:
            ids = probe["ids"] if same and "ids" in probe else tok.encode(probe["text"])
            buckets.setdefault(int(probe["repetitions"]), []).append(ids)
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: not probes ({type(e).__name__}: {e}): want {WANT}") from None
    return dict(sorted(buckets.items()))


def test_model():
    """
    The report's protocol on one model, with probes that it has read. Returns rows.

    Every repetition count is asked with every prefix and offset, greedily and by nucleus sampling.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tok = convert.load_any(init_from, device)
    model.eval()
    buckets = read_probes(probes, tok)
    # The longest of all that is asked, before the first hour rather than after it.
    offset, prefix = max(offsets), max(prefixes)
    shortest = min(len(passage) for bucket in buckets.values() for passage in bucket)
    check_lengths(model.config.block_size, shortest, offset, prefix, suffix)
    cells = itertools.product(prefixes, offsets, ("greedy", "nucleus"))
    asked = [
        (kind, prefix, suffix, offset)
        for prefix, offset, kind in cells
    ]
    name = os.path.basename(os.path.normpath(init_from))
    dull = 0
    rows = []
    for repetitions, bucket in buckets.items():
        varied = [
            passage for passage in bucket
            if type_token_ratio(passage[offset + prefix :][:suffix]) >= min_ttr
        ]
        dull += len(bucket) - len(varied)
        if varied:
            names = dict(model=name, seed=0, repetitions=repetitions)
            rows += recite(model, tok.bos, varied, asked, names)
    if dull:
        print(f"{dull} probes with a type-token ratio below {min_ttr} were left out")
    return rows


# -----------------------------------------------------------------------------
# the small models' data


def read_texts():
    """The texts in the order given, each one string; by default the standard library as one text."""
    library = sysconfig.get_path("stdlib") + "/*.py"
    texts = []
    for pattern in paths or [library]:
        for file in sorted(glob.glob(pattern)):
            if file.endswith(".jsonl"):
                texts.append("\n\n".join(row["text"] for row in kit.read_rows(file)))
            else:
                with open(file, encoding="utf-8", errors="replace") as f:
                    texts.append(f.read())
    if not texts:
        raise ValueError(f"no text in {paths}: name .txt, .md, .py or .jsonl files")
    return texts if paths else ["\n\n".join(texts)]


def documents(text):
    """
    A text as documents of 900 characters or somewhat more, cut between paragraphs.

    A book is one text, and the stream needs documents, among which the copies of passages are shuffled.
    """
    found = [""]
    for paragraph in text.split("\n\n"):
        if len(found[-1]) >= 900:
            found.append("")
        found[-1] += paragraph + "\n\n"
    return [document.strip() for document in found if document.strip()]


def folder_of(name, seed, asked):
    """The folder of a run or of data. What is asked is in its name, so work of other settings is never taken for it."""
    return f"{runs}/{name}-s{seed}-{kit.digest(asked)}"


def data_of(seed, T, passage):
    """
    The data folder of a seed at a window length T, with passages of so many tokens; made if it is not there.

    The texts are in its name by their hashes: a changed file makes other data.
    """
    texts = [hashlib.sha256(text.encode()).hexdigest() for text in read_texts()]
    asked = [seed, passage, n_passages, background, tokenizer, REPETITIONS, EDIT, texts]
    folder = folder_of(f"data-{T}", seed, asked)
    make_data(folder, seed, T, passage)
    return folder


def make_data(folder, seed, T, passage):
    """
    Write a data folder as train.py reads it, with its probes.json, unless it is there. T, passage: in tokens.

    Passages come from the last 40 % of the last text. All other text is cut into documents: a twelfth of them is for
    validation, and of the rest as many as `background` allows are read once.
    """
    if os.path.exists(f"{folder}/meta.json"):
        return
    os.makedirs(folder, exist_ok=True)
    n, budget = n_passages, background
    if T != 256:
        n = max(n * 3 // 4, 1)
        budget = budget * 7 // 10
    tok = tokenizers.load(tokenizer)
    rng = random.Random(seed)
    *texts, last = read_texts()
    cut = int(len(last) * 0.6)
    source = tok.encode(last[cut:])
    texts.append(last[:cut])
    docs = [document for text in texts for document in documents(text)]
    rng.shuffle(docs)
    n_val = len(docs) // 12
    probes = choose_passages(source, n, passage, rng)
    once = read_once(docs[n_val:], budget, tok)
    train = plant(probes, once, source, tok, rng)
    val = []
    for document in docs[:n_val]:
        ids = [tok.bos, *tok.encode(document), tok.eos]
        if len(val) + len(ids) > 82_000:
            break
        val += ids
    splits = dict(
        train=write_split(folder, "train", train, tok),
        val=write_split(folder, "val", val, tok),
    )
    kit.write(f"{folder}/probes.json", json.dumps(probes))
    meta = dict(
        tokenizer=tok.name,
        tokenizer_hash=tok.hash,
        vocab_size=tok.vocab_size,
        bos=tok.bos,
        eos=tok.eos,
        sources=dict(memorize=splits),
    )
    # Last, since it says that the folder is whole.
    kit.write(f"{folder}/meta.json", json.dumps(meta, indent=1))


def choose_passages(source, n, passage, rng):
    """n passages for each repetition count and for edited copies, which do not overlap: the dicts of probes.json."""
    buckets = [bucket for bucket in (*REPETITIONS, "edited") for _ in range(n)]
    slots = range(len(source) // passage)
    if len(slots) < len(buckets):
        raise ValueError(f"the last 40 % of the last text have {len(source):,} tokens: want "
                         f"{len(buckets)} passages of {passage}; give a longer text")
    probes = []
    for bucket, slot in zip(buckets, rng.sample(slots, len(buckets))):
        begin = slot * passage
        probes.append(dict(repetitions=bucket, ids=source[begin : begin + passage]))
    return probes


def read_once(docs, budget, tok):
    """The ids of as many documents as it takes to exceed a budget of tokens, BOS and EOS of each included."""
    found = []
    for document in docs:
        ids = tok.encode(document)
        found.append(ids)
        budget -= len(ids) + 2
        if budget < 0:
            return found
    raise ValueError(f"the texts lack {budget:,} tokens of background={background:,}: give more text, or lower it")


def plant(probes, once, source, tok, rng):
    """
    The training stream, a list of ids: BOS document EOS, shuffled; passages as often as their bucket says, others once.

    Every copy of a passage is a document: it has another left context and another place in its window. Each probe gets
    "begins": where the first tokens of its copies stand in the stream.
    """
    stream = [(None, ids) for ids in once]
    for probe in probes:
        probe["begins"] = []
        copies = probe["repetitions"]
        exact = copies != "edited"
        if not exact:
            copies = REPETITIONS[-1]
        for _ in range(copies):
            # Drawn for exact copies too: without these draws the same seed would give another stream.
            edited = [rng.choice(source) if rng.random() < EDIT else x for x in probe["ids"]]
            stream.append((probe, probe["ids"] if exact else edited))
    rng.shuffle(stream)
    train = []
    for probe, ids in stream:
        if probe:
            probe["begins"].append(len(train) + 1)
        train += [tok.bos, *ids, tok.eos]
    return train


def write_split(folder, name, ids, tok):
    """
    Write a split, a list of ids, as one shard. Returns what meta.json says of it.

    Its bytes are those of the text without BOS and EOS, which bits per byte are divided by.
    """
    file = f"{name}_00000.npy"
    shard = write_shard(f"{folder}/{file}", [np.array(ids, np.uint16)], len(ids), np.uint16)
    text_ids = [x for x in ids if x not in (tok.bos, tok.eos)]
    return dict(
        documents=ids.count(tok.bos),
        tokens=len(ids),
        bytes=len(tok.decode_bytes(text_ids)),
        shards=[dict(file=file, **shard)],
    )


# -----------------------------------------------------------------------------
# the small models


def flags_of(name, seed, data):
    """{setting: value} of train.py for one small model, which reads its data once."""
    m = MODELS[name]
    splits = read_json(f"{data}/meta.json")["sources"]["memorize"]
    windows = (splits["train"]["tokens"] - 1) // m["T"]
    size = 2048 // m["T"]
    steps = windows // size
    k, h, hash = m["mask"]
    goldfish = dict(goldfish_k=0)
    if m["scope"]:
        goldfish = dict(goldfish_k=k, goldfish_h=h, goldfish_scope=m["scope"])
        if hash != "product":
            # train.py's default is left out: the flags name the folder, and such runs have been made without it.
            goldfish["goldfish_hash"] = hash
    return dict(
        TRAIN,
        **goldfish,
        block_size=m["T"],
        batch_size=size,
        micro_batch=size,
        total_samples=steps * size,
        warmup_samples=min(40, steps // 10) * size,
        decay_samples=steps * 3 // 10 * size,
        eval_windows=0,
        seed=seed,
        data=data,
    )


def test_small(name, seed, folder, data):
    """All that is measured of one small model. Returns rows."""
    m = MODELS[name]
    model, tok = convert.load_run(folder)
    model.eval()
    with open(f"{data}/probes.json", encoding="utf-8") as f:
        probes = json.load(f)
    log = [e for e in plot.read_log(folder) if "val_loss" in e][-1]
    rows = [dict(
        model=name,
        seed=seed,
        kind="validation",
        val_loss=round(log["val_loss"], 4),
        val_bpb=round(log["val_bpb"], 4),
        seconds=log["seconds"],
        tokens=log["tokens"],
    )]
    # The picture's cells differ in the prefix alone, so their suffixes have one length.
    asked = [
        ("greedy", PREFIX, m["suffix"], 0),
        ("nucleus", PREFIX, m["suffix"], 0),
        *(("map", prefix, 50, 0) for prefix in (12, 25, 50, 100)),
        ("first49", 12, 37, 0),
    ]
    for bucket in (*REPETITIONS, "edited"):
        group = [p for p in probes if p["repetitions"] == bucket]
        passages = [p["ids"] for p in group]
        names = dict(model=name, seed=seed, repetitions=bucket)
        rows += recite(model, tok.bos, passages, asked, names)
        right_kept, kept, right_dropped, dropped = forced(
            model, passages, tok.bos, PREFIX, m["mask"])
        rows.append(dict(
            names,
            kind="forced",
            acc_keep=round(right_kept / kept, 4),
            keep=kept,
            acc_drop=round(right_dropped / max(dropped, 1), 4),
            drop=dropped,
            trained_anyway=trained_anyway(m, group),
        ))
    return rows


def trained_anyway(m, group):
    """
    How often a label after the prefix was trained although the mask drops it, on average over passages and labels.

    A mask on each window keeps the first h - 1 labels there, and every copy has another place in its window.
    """
    if m["scope"] != "window":
        return 0.0
    _, h, _ = m["mask"]
    labels = range(PREFIX, m["passage"])
    begins = [begin for p in group for begin in p["begins"]]
    places = [(begin + i - 1) % m["T"] for begin in begins for i in labels]
    early = sum(place < h - 1 for place in places)
    return round(early / (len(group) * len(labels)), 2)


def demonstrate(names):
    """
    Train and test small models. Yields the rows of one model at a time, seed by seed.

    All models of the first seed come first, so that a study that is stopped early can be compared as far as it went.
    """
    commands = {}
    todo = {}
    for seed in range(first_seed, first_seed + seeds):
        for name in names:
            m = MODELS[name]
            data = data_of(seed, m["T"], m["passage"])
            flags = flags_of(name, seed, data)
            folder = folder_of(name, seed, flags)
            commands[folder] = kit.flags(flags)
            todo[folder] = (name, seed, data)
    trained = kit.in_parallel(jobs, kit.train, commands, commands.values())
    # A model is tested while the next ones are trained.
    for folder, _ in tqdm(zip(todo, trained), "models", len(todo), unit="model"):
        name, seed, data = todo[folder]
        path = f"{folder}/rows.jsonl"
        if not os.path.isfile(path):
            kit.write_rows(path, test_small(name, seed, folder, data))
        yield kit.read_rows(path)


# -----------------------------------------------------------------------------
# what is written


def pick(rows, **want):
    """The rows that have these values."""
    return [r for r in rows if want.items() <= r.items()]


def distinct(rows, key):
    """The values that rows have under a key, in the order of the rows."""
    return list(dict.fromkeys(r[key] for r in rows if key in r))


def spread(rows, key, digits=2):
    """Mean ± half of its 95 % interval over the rows, one for each seed, as text; nothing of no rows."""
    return kit.interval([r[key] for r in rows], digits)


def table_md(rows):
    """The rows as Markdown: a pure function, so that a test can write it again from the committed rows and compare."""
    lines = ["# What is recited", ""]
    lines += recited_md(rows)
    lines += forced_md(rows)
    lines += differences_md(rows)
    return "\n".join(lines)


def section(title, head, body):
    """A table under a line that says what it holds, as lines of Markdown; nothing if it has no rows."""
    return [title, "", *kit.table(head, body), ""] if body else []


def recited_md(rows):
    """Rouge-L of every model by repetitions, as lines of Markdown: greedy, nucleus sampling, the first 49 tokens."""
    first = pick(rows, kind="greedy")[0]
    prefix = first["prefix"]
    buckets = distinct(rows, "repetitions")
    head = f"| model | seeds | suffix | {' | '.join(map(str, buckets))} |"
    lines = []
    for kind, given, title in (
        ("greedy", prefix, f" after a prefix of {prefix} tokens, greedy"),
        ("nucleus", prefix, f" after a prefix of {prefix} tokens, nucleus sampling, temperature 1, top-p 0.9"),
        ("first49", 12, ", the first 49 tokens: 12 given, 37 to recite"),
    ):
        found = pick(rows, kind=kind, prefix=given, offset=first["offset"])
        body = []
        for name in distinct(found, "model"):
            mine = pick(found, model=name)
            scores = " | ".join(spread(pick(mine, repetitions=bucket), "rouge") for bucket in buckets)
            body.append(f"| {name} | {len(distinct(mine, 'seed'))} | {mine[0]['suffix']} | {scores} |")
        lines += section(
            f"Rouge-L{title}; mean ± half its 95 % interval by Student's t over seeds; "
            f"{first['n']} or fewer passages a cell",
            head, body)
    return lines


def forced_md(rows):
    """The other measures at 128 repetitions, and what training cost, as lines of Markdown."""
    body = []
    for name in distinct(pick(rows, kind="forced"), "model"):
        mine = pick(rows, model=name)
        recited = pick(mine, kind="greedy", repetitions=128)
        told = pick(mine, kind="forced", repetitions=128)
        unseen = pick(mine, kind="forced", repetitions=0)
        validation = pick(mine, kind="validation")
        body.append(
            f"| {name} "
            f"| {spread(recited, 'span', 0)} of {recited[0]['suffix']} "
            f"| {spread(recited, 'ttr')} ({spread(recited, 'truth_ttr')}) "
            f"| {spread(told, 'acc_keep')} "
            f"| {spread(told, 'acc_drop')} ({sum(r['drop'] for r in told)}) "
            f"| {spread(unseen, 'acc_drop')} "
            f"| {spread(told, 'trained_anyway', 1)} "
            f"| {spread(validation, 'val_loss', 3)} "
            f"| {statistics.fmean(r['seconds'] for r in validation) / 60:.1f} |")
    return section(
        "At 128 repetitions: longest common span (tokens), type-token ratio (the passage's own beside it), "
        "teacher-forced accuracy on the labels after the prefix that the mask keeps and drops "
        "(for `none` a control: the labels a mask would drop), "
        "times that a dropped label was trained after all (scope 'window'), validation loss in nats, minutes.",
        "| model | span | ttr | accuracy kept | accuracy dropped (labels) | unseen, dropped | trained anyway "
        "| validation loss | min |",
        body)


def differences_md(rows):
    """
    What a mask changes, pair by pair of models, as lines of Markdown.

    Models of one seed saw the same data in the same order, from the same initial weights.
    """
    body = []
    for one, other in PAIRS:
        def change(key, **want):
            ours = pick(rows, model=one, **want)
            theirs = pick(rows, model=other, **want)
            return kit.differences(ours, theirs, operator.itemgetter(key))

        recited = change("rouge", kind="greedy", repetitions=128)
        edited = change("rouge", kind="greedy", repetitions="edited")
        loss = change("val_loss", kind="validation")
        if loss:
            body.append(f"| {one} - {other} | {len(loss)} "
                        f"| {kit.interval(recited)} | {kit.interval(edited)} | {kit.interval(loss, 3)} |")
    return section(
        "Differences, paired by seed; mean ± half its 95 % interval by Student's t: Rouge-L of the greedy "
        "continuation at 128 repetitions and of edited copies, validation loss in nats.",
        "| difference | seeds | Rouge-L, 128 | Rouge-L, edited | validation loss |",
        body)


def draw_maps(rows, picture):
    """
    A heat map for each model, repetitions x prefix: Rouge-L of greedy continuations.

    Each cell is a mean over passages, seeds and offsets.
    """
    rows = pick(rows, kind="map") or pick(rows, kind="greedy")
    names = distinct(rows, "model")
    buckets = distinct(rows, "repetitions")
    lengths = sorted(distinct(rows, "prefix"))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    size = (1.2 + 3.1 * columns, 3.4 * lines)
    figure, axes = plot.pyplot().subplots(lines, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names):
        grid = np.empty((len(buckets), len(lengths)))
        for i, j in np.ndindex(grid.shape):
            found = pick(rows, model=name, repetitions=buckets[i], prefix=lengths[j])
            grid[i, j] = statistics.fmean(r["rouge"] for r in found)
            axis.text(j, i, f"{grid[i, j]:.2f}", ha="center", va="center", fontsize=8,
                      color="white" if grid[i, j] < 0.6 else "black")
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(buckets)), buckets)
        axis.set(title=name, xlabel="prefix (tokens)", ylabel="repetitions")
    figure.colorbar(image, ax=axes, shrink=0.6, label="Rouge-L of the greedy continuation")
    plot.finish(figure, picture)


def merged(kept, rows):
    """
    The rows of a study after a model has been tested: `rows` are new and `kept` were there.

    Of the same model and seed the new ones stay. Models are in the order of MODELS, and then of their seeds.
    """
    again = {(r["model"], r["seed"]) for r in rows}
    others = [r for r in kept if (r["model"], r["seed"]) not in again]
    order = [*MODELS, *distinct(rows, "model")]

    def place(row):
        return order.index(row["model"]), row["seed"]

    return sorted(others + rows, key=place)


def main():
    default = f"{init_from}/memorize" if init_from else "results/memorize"
    folder = out or default
    path = f"{folder}/rows.jsonl"
    if bool(init_from) != bool(probes):
        raise ValueError("--init_from=MODEL and --probes=FILE go together; "
                         "without both, small models are trained and tested")
    if not report:
        names = models.split()
        unknown = [name for name in names if name not in MODELS]
        if unknown:
            raise ValueError(f"no small model {unknown[0]!r}: there is {', '.join(MODELS)}")
        kept = []
        if not init_from and os.path.isfile(path):
            kept = kit.read_rows(path)
        for rows in [test_model()] if init_from else demonstrate(names):
            kept = merged(kept, rows)
            kit.write_rows(path, kept)
    rows = kit.rows_to_report(path, "studies/memorize.py")
    text = table_md(rows)
    kit.write(f"{folder}/table.md", text)
    draw_maps(rows, f"{folder}/maps.png")
    print(text)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
