"""
The stages from files to a data folder. prepare.py runs them on this machine, corpus/cluster.py on many.

    stage         a piece of work
    check         some of the files: can each be read to its end, its sha256, where it can be cut into parts
    scores        a group of parts, with --score_field: the scores of the documents
    thresholds    all scores, with --score_field: the lowest score of the best share of each language
    sift          a group of parts: each document walks through the rules about single ones (corpus/sift.py: walk)
    judge         all documents: duplicates, training or validation, the order of training (corpus/judge.py)
    vocabulary    the training split, if no tokenizer is named: a BPE vocabulary
    tokens        a bucket of documents, which are neighbours in the order of training: their tokens
    cut           a shard, which is written to its file
    account       meta.json, documents.parquet and the report; all files are checked (corpus/account.py)

A row of STAGES, at the end of this file, says how many pieces of work a stage has, and has a function of (number, work)
that does one of them. Its result is written to OUT.tmp/work/STAGE/NUMBER.json, after all its other files. A piece
depends on nothing but the plan and the stages before, so any number of processes writes the same bytes, and a resumed
run does only the pieces that are missing.
"""

import json
from collections import Counter
from functools import cached_property, lru_cache
from itertools import accumulate, cycle
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

import tokenizer as tokenizers
from corpus import dedup, readers
from corpus.account import account
from corpus.folder import SPLITS, dtype_of, publish, safe, write_shard, write_tokens
from corpus.judge import groups_needed, groups_sifted, judge
from corpus.rules import top_thresholds
from corpus.sift import Rules, scores_of, sift
from engine.files import read_json

# Bytes of text in a group, and in a bucket.
GROUP, BUCKET = 4 << 20, 16 << 20
# A vocabulary is trained on at most about this many characters.
BPE_CHARS = 200_000_000


class Group(NamedTuple):
    """Neighbouring parts of the files, [(file, part)], and how many bytes of text there are until their end."""
    parts: list
    until: int


class Work:
    """
    A run of prepare.py as each process sees it: its plan, and the results of the stages that are finished.

    plan: the settings of prepare.py as attributes, with files, ignored, stores, by_id, name, command and began. folder:
    OUT.tmp/work. data: OUT.tmp/data, the new data folder.
    """

    def __init__(self, folder):
        self.folder = folder
        self.data = folder.parent / "data"
        self.plan = SimpleNamespace(**read_json(folder / "plan.json"))

    def load_tables(self):
        """Load the files of all settings. Forked workers share them, and a wrong one is an error before the start."""
        return self.rules, self.passages

    @cached_property
    def rules(self):
        return Rules(self.plan)

    @cached_property
    def passages(self):
        """[{id, repetitions, text}] of the passages to plant: the repetitions are dealt out in the order of a hash."""
        texts = dedup.read_passages(self.plan.probes) if self.plan.probes else []
        dealt = sorted(enumerate(texts), key=lambda passage: readers.id_hash(f"probe/{passage[0]}{passage[1]}"))
        return [dict(id=f"probe/{i}", repetitions=times, text=text)
                for (i, text), times in zip(dealt, cycle(self.plan.repetitions))]

    # The results of stages.

    def pieces(self, stage):
        """How many pieces of work a stage has."""
        return STAGES[stage][0](self)

    def is_done(self, stage, number):
        return (self.folder / stage / f"{number}.json").exists()

    def result(self, stage, number=0):
        """The result of a piece of a stage."""
        return read_json(self.folder / stage / f"{number}.json")

    def results(self, stage):
        """The results of all pieces of a stage, in order."""
        return (self.result(stage, number) for number in range(self.pieces(stage)))

    def files(self):
        """All files, as readers.check describes them."""
        return [file for some in self.results("check") for file in some["files"]]

    @cached_property
    def groups(self):
        return groups_of(self.files())

    def sifted(self, number):
        """The file with the rows of a group. Its texts are in a .text of the same name."""
        return self.folder / "sift" / f"{number}.parquet"

    def documents(self):
        """The documents that stay, in the order of training, one stream after the other: DOCUMENT (n,)."""
        return np.load(self.folder / "documents.npy", mmap_mode="r", allow_pickle=False)

    def texts_of(self, documents):
        """Yield the texts of an array of DOCUMENT, in order."""
        for group, offset, written in documents[["group", "offset", "written"]].tolist():
            with open(self.sifted(group).with_suffix(".text"), "rb") as texts:
                texts.seek(offset)
                yield texts.read(written).decode()

    @cached_property
    def buckets(self):
        return buckets_of(self.documents())

    @cached_property
    def tok(self):
        return tokenizers.load(self.result("vocabulary")["name"])

    @cached_property
    def shards(self):
        return shards_of_sources(self.result("judge")["sources"], self.results("tokens"), self.plan.shard_tokens)


# The Work of a folder, cached in each process.
work_of = lru_cache(1)(Work)


# ----------------------------------------------------------------------------------------------------------------------
# check, scores, thresholds, sift: the files of the user, group by group


def check_files(number, work):
    """Some of the files, as readers.check describes them."""
    plan, files = work.plan, np.array_split(work.plan.files, work.pieces("check"))[number]
    return dict(files=[readers.check(file, plan.text_field, plan.encoding) for file in files])


def groups_of(files):
    """The parts of checked files as a list of Group, of about GROUP bytes of text each."""
    groups, size = [[]], 0
    for file in files:
        for part in file["parts"]:
            n_bytes = part[3]
            size += n_bytes
            if groups[-1] and size > GROUP:
                groups.append([])
                size = n_bytes
            groups[-1].append((file, part))
    return list(map(Group, groups, accumulate(sum(part[3] for _, part in parts) for parts in groups)))


def score_group(number, work):
    """The first pass of "keep the best": language and score of each document."""
    return dict(rows=scores_of(work.groups[number].parts, work.plan))


def find_thresholds(number, work):
    """{language: the lowest score of its best share} (report sec. 3)."""
    scores = (row for result in work.results("scores") for row in result["rows"])
    # No document is kept of a language without any score.
    return {"*": np.inf} | top_thresholds(scores, work.plan.keep_top)


def sift_group(number, work):
    """A group -> sift/{number}.text and sift/{number}.parquet (corpus/sift.py)."""
    field = work.plan.score_field
    top = (field, work.result("thresholds")) if field else None
    return sift(number, work.groups[number].parts, work.rules, top, work.sifted(number))


# ----------------------------------------------------------------------------------------------------------------------
# vocabulary, tokens, cut: the documents in the order of training


def buckets_of(documents):
    """Documents as arrays of neighbours, with about 16 MB of text each."""
    begins = np.cumsum(documents["written"]) - documents["written"]
    return np.split(documents, np.flatnonzero(np.diff(begins // BUCKET)) + 1)


def find_vocabulary(number, work):
    """Returns the name that tokenizers.load takes. A vocabulary that is not built in becomes data/tokenizer.json."""
    path = str(work.data / "tokenizer.json")
    if work.plan.tokenizer:
        tok = work.rules.tok
        if not tok.name.startswith("bpe:"):
            return dict(name=tok.name)
        # A document ends with </s>, also if the vocabulary is of a chat model, whose eos ends a turn.
        tok.eos = tok.special.get("</s>", tok.eos)
        tokenizers.write_vocabulary(tok, path)
    else:
        tokenizers.train_bpe(text_for_vocabulary(work), work.plan.train_bpe, path)
    return dict(name=path)


def text_for_vocabulary(work):
    """Yield texts of the training split, of all sources alike, until there are BPE_CHARS characters."""
    documents, size = work.documents(), 0
    for bucket in buckets_of(documents[np.argsort(documents["id_hash"], kind="stable")]):
        for text in work.texts_of(bucket[bucket["stream"] % 2 == 0]):
            yield text
            size += len(text)
        if size > BPE_CHARS:
            return


def tokenize_bucket(number, work):
    """A bucket -> tokens/{number}.ids, and tokens/{number}.counts of each document, int64. Returns {stream: tokens}."""
    documents, path = work.buckets[number], work.folder / "tokens" / f"{number}.ids"
    counts = write_tokens(work.tok, work.texts_of(documents), path)
    # np.save hides the error of a full disk.
    path.with_suffix(".counts").write_bytes(counts)
    return {str(stream): int(counts[documents["stream"] == stream].sum()) for stream in np.unique(documents["stream"])}


def shards_of_sources(sources, buckets, shard_tokens):
    """
    [{source, split, file, begin, end}] of all shards. begin, end: in the tokens of all buckets, one after the other.
    buckets: {stream: tokens} of each.
    """
    sizes, shards, end = Counter(), [], 0
    for bucket in buckets:
        sizes.update(bucket)
    names = list(map(safe, sources))
    lower = list(map(str.lower, names))
    for stream in range(2 * len(names)):
        i, split = stream // 2, SPLITS[stream % 2]
        begin, end = end, end + sizes[str(stream)]
        # Two sources may differ only in characters that a file name cannot have, or in case, which macOS ignores.
        name = names[i] + f"+{i}" * (lower.index(lower[i]) < i)
        for k, at in enumerate(range(begin, end, shard_tokens)):
            file = f"{name}_" * (len(names) > 1) + f"{split}_{k:05d}.npy"
            shards.append(dict(source=sources[i], split=split, file=file, begin=at, end=min(at + shard_tokens, end)))
    return shards


def cut_shard(number, work):
    """Write a shard. Returns its entry for meta.json."""
    shard, pieces = work.shards[number], []
    file, begin, end = shard["file"], shard["begin"], shard["end"]
    for bucket in range(len(work.buckets)):
        ids = np.memmap(work.folder / "tokens" / f"{bucket}.ids", dtype_of(work.tok), "r")
        if begin < len(ids) and end > 0:
            pieces.append(ids[max(begin, 0):end])
        begin, end = begin - len(ids), end - len(ids)
    return dict(file=file, **write_shard(work.data / file, pieces))


# ----------------------------------------------------------------------------------------------------------------------
# all of them

# {stage: (how many pieces it has, the function that does one)}
STAGES = dict(
    check=(lambda work: min(32, len(work.plan.files)), check_files),
    scores=(lambda work: len(work.groups) * bool(work.plan.score_field), score_group),
    thresholds=(lambda work: bool(work.plan.score_field), find_thresholds),
    sift=(lambda work: len(work.groups), sift_group),
    judge=(lambda work: 1, judge),
    vocabulary=(lambda work: 1, find_vocabulary),
    tokens=(lambda work: len(work.buckets), tokenize_bucket),
    cut=(lambda work: len(work.shards) * (not work.plan.dry_run), cut_shard),
    account=(lambda work: 1, account),
)


def do(stage, number, folder):
    """Do a piece of a stage, unless its result exists. A piece that returns nothing is always done again."""
    work = work_of(folder)
    if work.is_done(stage, number):
        return
    (folder / stage).mkdir(exist_ok=True)
    result = STAGES[stage][1](number, work)
    if result is not None:
        # No fsync: it would wait for all text of the piece, and a killed process loses nothing without it.
        path = folder / stage / f"{number}.tmp"
        path.write_text(json.dumps(result))
        path.replace(path.with_suffix(".json"))


def do_share(stage, final, tmp, _, rank, world_size):
    """A step of datatrove: do every world_size-th piece of a stage. final: the folder to publish after it, or None."""
    folder = tmp / "work"
    work = work_of(folder)
    enough = work.plan.max_bytes
    for number in range(rank, work.pieces(stage), world_size):
        n = groups_sifted(work) if stage == "sift" and enough else 0
        # Of all tasks together; part of it may be duplicates, so count without them.
        if n and work.groups[n - 1].until >= enough:
            if groups_needed(work, n):
                break
            enough = work.groups[n - 1].until + work.plan.max_bytes / 10
        do(stage, number, folder)
    if final:
        publish(final, tmp)
