"""
Verbatim memorisation: how much of a passage does a model recite after it has read the passage 0 to 128 times?

    Rouge-L = 2 P R / (P + R),   P = LCS / |generated|,   R = LCS / |truth|      LCS: longest common subsequence of ids

The prompt is BOS and the first tokens of a passage, the prefix. The continuation is compared with the tokens that
follow in the passage, the suffix. Passages that the model has never read are the baseline.
Source: Apertus report (arXiv 2509.14233) sec. 5.4 and app. F; Rouge-L: Lin (2004).

$ python -m studies.memorize speeches.jsonl austen.txt    # train small models with and without Goldfish, and test them
$ python -m studies.memorize --init_from=out/mine --probes=data/mine/probes.json    # any model; prepare.py's probes
$ python -m studies.memorize --report                     # write table.md and maps.png again, from rows.jsonl

The small models have 1.25M parameters. Their text is cut into passages, and each bucket of passages is read 0 to 128
times. The bucket "edited" is read 128 times, each time with 5 % of the tokens replaced: a limit of Goldfish, whose mask
differs between such copies. All other passages are read once.

Two things differ from Apertus' scale. A suffix of 100 tokens has only two labels that k = 50 drops, so k is 10 or 4 at
windows of T = 256. And the scope "window" (Apertus) never drops the first h - 1 labels of a window, so a label that is
dropped elsewhere is still trained in r (h - 1) / T of r copies: 12 of 128 at h = 50 and T = 512, but 1.5 at Apertus'
4096. So k = h = 50 is tested with T = 512 and suffixes of 250 tokens, and also with the scope "stream", which behaves
like long windows. "k50" has the hash "mix", which drops one label in k; "product" is the published hash, which drops
fewer. To see which of them recites more:

$ python -m studies.memorize '--models=k50-stream product-stream' --background=200_000 --out=results/product

The same command resumes a study that was stopped. results/memorize has five seeds; there the passages read once are
documents of a book and of speeches, and "map" and "first49" are greedy continuations of other lengths.
"""

import sys

if __name__ == "__main__" and not __package__:
    print("memorize.py: start it from the project's root, python -m studies.memorize", file=sys.stderr)
    sys.exit(2)

import itertools
import json
import math
import os
import sysconfig
from operator import itemgetter, sub
from statistics import fmean

import numpy as np
import torch
from tqdm import tqdm

import tokenizer as tokenizers
from configurator import run
from corpus import readers
from corpus.folder import write_shard
from engine.files import read_json, read_text, sha256_of
from engine.hardware import pick_device
from engine.intervals import student
from generate import generate
from studies import kit
from weights.read import load_any

paths = []              # texts for the small models, as prepare.py reads them; none = Python's standard library
models = "none k10 k4 none-512 k50-stream k50-window"    # the small models to train
seeds = 5               # from FIRST_SEED on; each has its passages, order and weights
n_passages = 8          # passages of each bucket
background = 1_000_000  # tokens that are read once
tokenizer = "apertus:2048"
jobs = 0                # models trained at a time; 0 = one for each GPU, or for each CPU core without a GPU
init_from = ""          # test this model instead (run folder, Hugging Face folder, hub name) ...
probes = ""             # ... with these passages: a JSON list of {"repetitions": n, "text" or "ids": ...}
prefixes = (50, 100, 250, 500, 1000, 2000, 3000, 4000, 5000)
suffix = 500            # tokens to continue
min_ttr = 0.4           # suffixes with a lower ratio of distinct tokens to tokens are left out, as in the report
out = ""                # folder of rows.jsonl, table.md, maps.png; "" = results/memorize, or <init_from>/memorize
runs = "out/memorize"   # data and run folders of the small models
report = False          # run nothing: write table.md and maps.png from rows.jsonl

# The columns of the second table: which number of a row, and the rows that it is from.
COLUMNS = {
    "Rouge-L, 128": ("rouge", dict(kind="greedy", prefix=50, repetitions=128)),
    "Rouge-L, edited": ("rouge", dict(kind="greedy", prefix=50, repetitions="edited")),
    "validation loss": ("val_loss", dict(kind="validation")),
}
BUCKETS = [0, 1, 4, 16, 64, 128, "edited"]
FIRST_SEED = 11         # seeds below 11 chose the settings
PREFIX = 50             # tokens of the longest prompt of a small model
PASSAGE = 150           # tokens of a passage for a window of 256; twice that for one of 512

# By name: the window and the Goldfish mask.
MODELS = {
    "none": (256, ["--goldfish_k=0"]),
    "k10": (256, ["--goldfish_k=10", "--goldfish_h=13"]),
    "k4": (256, ["--goldfish_k=4", "--goldfish_h=13"]),
    "none-512": (512, ["--goldfish_k=0"]),
    "k50-stream": (512, ["--goldfish_k=50", "--goldfish_hash=mix", "--goldfish_scope=stream"]),
    "k50-window": (512, ["--goldfish_k=50", "--goldfish_hash=mix", "--goldfish_scope=window"]),
    "product-stream": (512, ["--goldfish_k=50", "--goldfish_hash=product", "--goldfish_scope=stream"]),
    "product-window": (512, ["--goldfish_k=50", "--goldfish_hash=product", "--goldfish_scope=window"]),
}
# The published hash against ours. Of these pages --report says which recites more, by the rule.
PRODUCT = {"product-stream": "k50-stream", "product-window": "k50-window"}
RULE = """
Rule, written before the runs: Rouge-L after 128 readings (greedy, 250 tokens after 50), product minus mix, paired by \
seed. The product recites more or less if the 95 % interval excludes 0, both are level if it lies within ±0.05, and \
otherwise it is not decided.
"""
TRAIN = [
    "--n_layer=4", "--n_head=4", "--n_kv_head=2", "--n_embd=128", "--ffn_dim=512", "--init_std=0.02",
    "--rope_scaling=0.0", "--optimizer=adamw", "--betas=(0.9,0.95,0.9999)", "--grad_clip=1.0", "--lr=3e-3",
    "--min_lr=3e-5", "--eval_every=0", "--last_eval_windows=300", "--sample_every=0", "--checkpoint_every=0"]
RECITATION = """# Recitation

{finding}

Rouge-L by the number of repetitions, mean ± half of its 95 % interval (Student's t over seeds). Prefix and suffix \
are in tokens. `nucleus` samples with temperature 1 and top-p 0.9, every other continuation is greedy. Intervals are \
over seeds, each of which has passages, an order and initial weights of its own.

"""
DIFFERENCES = """
Greedy continuations at 128 repetitions and of edited copies, and validation loss (nats per token); below each model \
its differences from its baseline, paired by seed.

"""


# -----------------------------------------------------------------------------
# measures, on lists of token ids


def rouge_l(generated, truth):
    """
    F1 of the longest common subsequence, in [0, 1]: the formula above with P and R put in.

    The LCS by dynamic programming, one row of the table for each token of the truth.
    """
    row = np.zeros(len(generated) + 1)
    for token in truth:
        # A match extends the best pair before both tokens; the running maximum carries it to the right.
        longest = np.maximum(row[1:], row[:-1] + np.equal(generated, token))
        row[1:] = np.maximum.accumulate(longest)
    return 2 * row[-1] / (len(generated) + len(truth))


# -----------------------------------------------------------------------------
# the protocol


def recite(model, bos, passages, kind, prefix, suffix):
    """
    Continue BOS and the first `prefix` tokens of passages by `suffix` tokens, and compare them with the passages.

    passages: lists of ids. kind: greedy, or nucleus (temperature 1, top-p 0.9). Returns a row with the means over
    passages; its `said` is the first continuation, in ids.
    """
    torch.manual_seed(0)
    continuations = []
    # 16 prompts at once. At temperature 0, top_p changes nothing.
    for i in range(0, len(passages), 16):
        prompts = [[bos, *passage[:prefix]] for passage in passages[i:i + 16]]
        texts = generate(model, prompts, suffix, temperature=float(kind == "nucleus"), top_p=0.9)
        continuations += [ids[1 + prefix:] for ids in texts]
    truths = [passage[prefix:prefix + suffix] for passage in passages]
    return dict(
        kind=kind,
        prefix=prefix,
        suffix=suffix,
        rouge=fmean(map(rouge_l, continuations, truths)),
        said=continuations[0])


def read_passages(probe_file, tok, prefixes, suffix, min_ttr):
    """
    The passages of a file as {(repetitions, prefix): [ids]}, and the length of the shortest in tokens.

    Left out are passages whose suffix has too few distinct tokens. ValueError if the file holds no probes.
    """
    groups = {}
    shortest = math.inf
    try:
        content = json.loads(read_text(probe_file))
        # prepare.py writes an object around the list.
        for probe in content["probes"] if isinstance(content, dict) else content:
            # Text is preferred, because the ids may be those of another vocabulary.
            ids = tok.encode(probe["text"]) if "text" in probe else probe["ids"]
            shortest = min(shortest, len(ids))
            for prefix in prefixes:
                group = groups.setdefault((probe["repetitions"], prefix), [])
                if len({*ids[prefix:prefix + suffix]}) >= min_ttr * suffix:
                    group.append(ids)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{probe_file}: no probes ({error!r}): want "
                         'a JSON list of {"repetitions": n, "text" or "ids": ...}') from None
    return groups, shortest


def test(folder, probe_file, prefixes, suffix, min_ttr, names):
    """
    Rows of a model: recite() for each number of repetitions, greedy and nucleus, and each prefix.

    names: first entries of each row. ValueError if the file holds no probes, or if a probe or the model's window is too
    short.
    """
    model, tok = load_any(folder, pick_device("auto"))
    groups, shortest = read_passages(probe_file, tok, prefixes, suffix, min_ttr)
    longest = max(prefixes) + suffix
    room = min(shortest, model.config.block_size - 1)
    # Checked now, because the longest prompts come only after hours.
    if room < longest or suffix < 1:
        raise ValueError(f"prefix + suffix = {longest}, but the model's window or a probe of {probe_file} has only "
                         f"{room} tokens: lower --prefixes or --suffix")
    if not groups or not all(groups.values()):
        raise ValueError(f"{probe_file}: no probe has a type-token ratio of {min_ttr} behind each of {prefixes} tokens"
                         ": lower --min_ttr")
    return [dict(names, repetitions=n, **recite(model, tok.bos, passages, kind, prefix, suffix))
            for (n, prefix), passages in tqdm(groups.items(), folder, leave=False)
            for kind in ("greedy", "nucleus")]


# -----------------------------------------------------------------------------
# the small models


def make_data(folder, tok, ids, seed, T):
    """
    Write a data folder for windows of T tokens, with its probes.json, from the ids of the texts, an array.

    They are cut into passages of one length: some are read as often as their bucket says, others once, the rest is
    for validation. Each copy is a document, so copies differ in left context and in their place in the window.
    ValueError if there are too few ids.
    """
    rng = np.random.default_rng(seed)
    length = PASSAGE * T // 256
    # Without the last ids, which are no whole passage.
    passages = rng.permutation(np.resize(ids, (len(ids) // length, length)))
    buckets = BUCKETS * n_passages
    n_train = len(buckets) + background // length
    if len(passages) <= n_train:
        raise ValueError(f"the texts have {len(ids):,} tokens, want more than {n_train * length:,}: name more files, "
                         "or lower --background or --n_passages")
    train = [*passages[len(buckets) : n_train]]
    probes = []
    for bucket, passage in zip(buckets, passages):
        probes.append(dict(repetitions=bucket, ids=passage.tolist()))
        edited = bucket == "edited"
        for _ in range(128 if edited else bucket):
            train.append(np.where(rng.random(length) < 0.05 * edited, rng.choice(ids, length), passage))
    rng.shuffle(train)

    kit.write(f"{folder}/probes.json", json.dumps(probes))
    splits = dict(train=train, val=passages[n_train:])
    for split, documents in splits.items():
        stream = np.insert(documents, [0, length], [tok.bos, tok.eos], axis=1).ravel()
        shard = write_shard(f"{folder}/{split}_00000.npy", [stream])
        splits[split] = dict(
            documents=len(documents),
            tokens=len(stream),
            bytes=len(tok.decode_bytes(np.ravel(documents))),
            shards=[shard | dict(file=f"{split}_00000.npy")])
    # meta.json is written last and marks the folder as complete.
    kit.write(f"{folder}/meta.json", json.dumps(dict(
        tokenizer=tok.name,
        tokenizer_hash=tok.hash,
        vocab_size=tok.vocab_size,
        bos=tok.bos,
        eos=tok.eos,
        sources=dict(memorize=splits))))


def read_texts():
    """The texts on the command line, or those of the standard library, as one text."""
    files, _ = readers.find(paths or [f"{sysconfig.get_path('stdlib')}/*.py"])
    return "\n\n".join(document["text"] or "" for file in files for part in readers.parts_of(file)
                       for document in readers.documents(file, part))


def train_command(name, seed, data):
    """The command of a small model for kit.train(), all but its folder. It reads all windows of the data once."""
    T, goldfish = MODELS[name]
    batch = 2048 // T
    steps = (len(np.load(f"{data}/train_00000.npy", allow_pickle=False)) - 1) // 2048
    return [
        "train", *TRAIN, *goldfish, f"--block_size={T}", f"--batch_size={batch}", f"--micro_batch={batch}",
        f"--seed={seed}", f"--total_samples={steps * batch}", f"--warmup_samples={min(40, steps // 10) * batch}",
        f"--decay_samples={steps * 3 // 10 * batch}", f"--data={data}"]


def demonstrate():
    """Train and test the small models, all models of the first seed first. Yields the rows."""
    for name in models.split():
        if name not in MODELS:
            raise ValueError(f"--models: there is no {name}, only {', '.join(MODELS)}")
    text = read_texts()
    tok = tokenizers.load(tokenizer)
    ids = tok.encode_array(text)
    commands, tests = {}, []
    for seed, name in itertools.product(range(FIRST_SEED, FIRST_SEED + seeds), models.split()):
        T, _ = MODELS[name]
        # The folders' names contain a hash of all settings, so they are never reused by other settings.
        data = f"{runs}/data-{sha256_of([text, tokenizer, seed, T, n_passages, background])[:10]}"
        if not os.path.exists(f"{data}/meta.json"):
            make_data(data, tok, ids, seed, T)
        command = train_command(name, seed, data)
        commands[f"{runs}/{name}-s{seed}-{sha256_of(command)[:10]}"] = command
        tests.append((f"{data}/probes.json", PASSAGE * T // 256 - PREFIX, dict(model=name, seed=seed)))
    trained = kit.in_parallel(jobs, kit.train, commands, commands.values())
    # A model is tested while the next ones are trained.
    for folder, (probe_file, suffix, names), _ in zip(tqdm(commands, "models"), tests, trained):
        yield dict(names, kind="validation", val_loss=read_json(f"{folder}/summary.json")["val_loss"])
        yield from test(folder, probe_file, (12, 25, PREFIX), suffix, 0, names)


# -----------------------------------------------------------------------------
# tables and plot


def scores_of(rows, label):
    """{label of a row: {repetitions: [Rouge-L of each seed]}}. label: a format for the values of the row."""
    return kit.group((label.format_map(row), row["repetitions"], row["rouge"]) for row in rows)


def table_md(rows):
    """The rows as Markdown. It depends on the rows alone, so a test can compare it with the committed table."""
    recited = sorted((row for row in rows if "rouge" in row), key=itemgetter("kind", "prefix", "suffix"))
    text = RECITATION.format(finding=find(rows)) + kit.pivot(
        "| model | continuation | prefix | suffix",
        scores_of(recited, "{model} | {kind} | {prefix} | {suffix}").items())
    numbers = kit.group((row["model"], title, row[key]) for title, (key, wanted) in COLUMNS.items()
                        for row in rows if wanted.items() <= row.items())
    lines = []
    for name in filter(MODELS.get, list(numbers)):
        baseline = baseline_of(name)
        lines.append((name, numbers[name]))
        if baseline in numbers:
            lines.append((f"above {baseline}", subtract(numbers[name], numbers[baseline])))
    if not lines:
        return text
    text += DIFFERENCES + kit.pivot("| model", lines, 3)
    verdicts = [f"\n{name}: {decide(subtract(numbers[name], numbers[mix]))}\n" for name, mix in PRODUCT.items()
                if {name, mix} <= numbers.keys()]
    return text + "".join([RULE, *verdicts] if verdicts else "")


def baseline_of(name):
    """The model from which another differs in its mask: the same without Goldfish, or of a product that with "mix"."""
    T, _ = MODELS[name]
    return PRODUCT.get(name, "none" if T == 256 else "none-512")


def subtract(columns, others):
    """{title: differences by seed} of two lines of the second table."""
    return {title: list(map(sub, values, others[title])) for title, values in columns.items()}


def find(rows):
    """One sentence to quote, on texts that the models recite after 128 readings. rows: of rows.jsonl."""
    wanted = dict(kind="greedy", prefix=50, repetitions=128)
    scores = kit.group((row["suffix"], row["model"], row["rouge"]) for row in rows if wanted.items() <= row.items())
    parts = []
    for suffix, by_model in scores.items():
        listed = ", ".join(f"{kit.interval(values)} ({model})" for model, values in by_model.items())
        parts.append(f"over {suffix} tokens {listed}")
    seeds = len({row["seed"] for row in rows})
    size = "1.25M parameters, " if {row["model"] for row in rows} <= MODELS.keys() else ""
    return (f"After 128 readings of a passage, its greedy continuation from 50 tokens has this Rouge-L: "
            f"{'; '.join(parts)} ({size}{seeds} seeds, ± half of the 95 % interval; 1 = recited in full).")


def decide(differences):
    """The verdict of RULE in words. differences: of subtract()."""
    mean, half, _ = student(differences["Rouge-L, 128"])
    text = f"{mean:+.2f} ± {half:.2f} of Rouge-L against the mixing hash: "
    if abs(mean) > half:
        return text + f"the product recites {'more' if mean > 0 else 'less'}."
    return text + ("level." if abs(mean) + half <= 0.05 else "not decided.")


def main():
    """Write table.md, and maps.png: mean Rouge-L of greedy continuations, models and prefixes x repetitions."""
    folder = out or f"{init_from or 'results'}/memorize"
    path = f"{folder}/rows.jsonl"
    if bool(init_from) != bool(probes):
        raise ValueError("--init_from=MODEL and --probes=FILE go together; without both, small models are trained")
    if not report:
        kit.write_rows(
            path,
            test(init_from, probes, prefixes, suffix, min_ttr, dict(model=init_from, seed=0))
            if init_from else demonstrate())
    rows = kit.read_rows(path)
    scores = scores_of((row for row in rows if row["kind"] in ("greedy", "map")), "{model}, {prefix} + {suffix}")
    grid = [list(map(fmean, by_repetitions.values())) for by_repetitions in scores.values()]
    repetitions, *_ = scores.values()
    with kit.picture(f"{folder}/maps.png", 6, 1 + 0.25 * len(grid)) as axis:
        image = axis.pcolormesh([*map(str, repetitions)], [*scores], grid, vmin=0, vmax=1)
        axis.invert_yaxis()
        axis.set(
            xlabel="times that the model has read the passage\n(edited: 128 times, 5 % of tokens replaced each time)",
            ylabel="Goldfish (none; k: one label in k dropped), tokens of prefix + suffix")
        axis.figure.colorbar(image, label="Rouge-L of the greedy continuation")
    kit.publish(f"{folder}/table.md", table_md(rows))


if __name__ == "__main__":
    run(main, globals())
