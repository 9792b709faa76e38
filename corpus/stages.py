"""
The stages from files to a data folder. prepare.py runs them on this machine, corpus/cluster.py on many.

    stage         a piece of work
    check         some of the files: can each be read to its end, its sha256, where it can be cut into parts
    scores        a group of parts, with --score_field: the scores of the documents
    thresholds    all scores, with --score_field: the lowest score of the best share of each language
    sift          a group of parts: the rules about single documents; personal data is replaced
    judge         all documents, in the order of the input: duplicates, train or validation, the order of training
    vocabulary    the training split, if no tokenizer is named: a BPE vocabulary
    tokens        a bucket of documents, which are neighbours in the order of training: their tokens
    cut           a shard, which is written to its file
    account       meta.json, documents.parquet, report.json, report.md; all files are checked

A row of STAGES says how many pieces of work a stage has, and has a function of (number, work) that does one of them.
Its result is written to OUT.tmp/work/STAGE/NUMBER.json, after all its other files. A piece depends on nothing but the
plan and the stages before, so any number of processes writes the same bytes, and a resumed run does only the pieces
that are missing.
"""

import json
import os
import re
import subprocess
import time
from collections import Counter
from functools import cached_property, lru_cache, partial
from itertools import cycle, islice
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.compute as pc
from pyarrow.parquet import ParquetFile, read_table, write_table

import tokenizer as tokenizers
from configurator import ROOT
from corpus import dedup, ledger
from corpus.folder import dtype_of, publish, safe, write_shard, write_tokens
from corpus.hosts import write_hosts
from corpus.pii import TAGS, scrub_pii
from corpus.readers import check, documents, files_of, id_hash, rows, writable
from corpus.report import verify, write_report
from corpus.reservations import MARKS, judge_document
from corpus.robots import agents_of
from corpus.rules import TOXICITY, as_number, broken, by_language, listed, top_thresholds
from corpus.statements import COLUMNS
from corpus.stores import FILES, blocked_domains, open_reservations, open_robots
from corpus.urls import host_key, site_key
from engine.files import read_json, sha256, sha256_of, write_json

# Bytes of text in a group, and in a bucket.
GROUP, BUCKET = 4 << 20, 16 << 20
# A vocabulary is trained on at most about this many characters.
BPE_CHARS = 200_000_000
# Characters of documents whose words are hashed together: one page at a time takes four times as long.
BATCH = 300_000
# Where the text of a row is: `written` bytes of sift/{group}.text from `offset` on; and its place in the order.
PLACE = ("group", "offset", "written", "id_hash")
# A document that stays: 40 bytes in memory, however long its text. row: its number among all rows; stream: 2 * number
# of its source, + 1 for validation.
DOCUMENT = [("row", "i8"), ("group", "i4"), ("offset", "i8"), ("written", "i8"), ("id_hash", "u8"), ("stream", "i4")]
SPLITS = ("train", "val")
# The group of the planted passages, which did not come in.
PLANTED = -1
# The day at the start of a date as ISO 8601 writes it, or nothing.
DAY = re.compile(r"(?:\d{4}-\d\d-\d\d)?")
LINE = re.compile(b"\n")
# A document is cut if its last part has at least this many bytes, some words.
LAST = 8
# The settings that name files with the opt-outs of hosts.
STORES = ("robots", "reservations", "blocked")


class Work:
    """
    A run of prepare.py, and the results of its finished stages, read once per process.

    plan: the settings of prepare.py as attributes, with files, ignored, by_id, name, command and began. folder:
    OUT.tmp/work. data: OUT.tmp/data, the new data folder.
    """

    def __init__(self, folder):
        self.folder = folder
        self.data = folder.parent / "data"
        self.plan = SimpleNamespace(**read_json(folder / "plan.json"))

    def load_tables(self):
        """Load all tables, so that forked workers share them, and an invalid setting is an error before the start."""
        return self.rules, self.passages

    def ignored_of_stores(self):
        """{setting: {reason: [names]}} of the files and rows of the stores that were not read."""
        stores = dict(robots=self.robots["store"], reservations=(self.rules.reservations or {}).get(FILES[0]))
        return {setting: store.ignored for setting, store in stores.items() if store is not None}

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

    @cached_property
    def checked(self):
        """All files, as readers.check describes them."""
        return [file for some in self.results("check") for file in some["files"]]

    @cached_property
    def groups(self):
        """[[(file, part)]]: groups of parts, of about 4 MB of text each."""
        groups, size = [[]], 0
        for file in self.checked:
            for part in file["parts"]:
                size += part[3]
                if groups[-1] and size > GROUP:
                    groups.append([])
                    size = part[3]
                groups[-1].append((file, part))
        return groups

    @cached_property
    def bytes_until(self):
        """Bytes of text in each group and all before it, int64 (groups,)."""
        return np.cumsum([sum(part[3] for _, part in group) for group in self.groups])

    @cached_property
    def robots(self):
        """The arguments of robots.verdict()."""
        return dict(
            store=self.plan.robots and open_robots(self.plan.robots, self.plan.snapshots) or None,
            agents=agents_of(self.plan.agents),
            missing=self.plan.missing,
            blocked=given(blocked_domains, self.plan.blocked) or (),
        )

    @cached_property
    def rules(self):
        """The settings as functions and tables. ValueError for one that is not valid."""
        plan = self.plan
        top_thresholds([], plan.keep_top)                  # an error if keep_top is no share
        below = TOXICITY if plan.max_value == "apertus" else by_language("max_value", plan.max_value)
        near = given(dedup.bands_of, plan.near_dedup) or (0, 0)
        return SimpleNamespace(
            robots=self.robots,
            reservations=plan.reservations and open_reservations(plan.reservations, plan.snapshots) or None,
            # sift() adds the thresholds of --score_field.
            columns=partial(
                broken,
                licenses=listed(plan.keep_licenses),
                languages=listed(plan.keep_languages),
                below=plan.max_field and (plan.max_field, below),
            ),
            near=near,
            # The columns of the keys for near-duplicates, one for each band.
            bands=[f"band {i}" for i in range(near[0])],
            contamination=plan.decontaminate and dedup.Contamination(dedup.read_passages(plan.decontaminate)),
            tok=given(tokenizers.load, plan.tokenizer),
        )

    @cached_property
    def passages(self):
        """[{id, repetitions, text}] of the passages to plant: the repetitions are dealt out in the order of a hash."""
        texts = given(dedup.read_passages, self.plan.probes) or []
        dealt = sorted(enumerate(texts), key=lambda passage: id_hash(f"probe/{passage[0]}{passage[1]}"))
        return [dict(id=f"probe/{i}", repetitions=times, text=text)
                for (i, text), times in zip(dealt, cycle(self.plan.repetitions))]

    @cached_property
    def documents(self):
        """The documents that stay, in the order of training, one stream after the other: DOCUMENT (n,)."""
        return np.load(self.folder / "documents.npy", mmap_mode="r", allow_pickle=False)

    @cached_property
    def buckets(self):
        return buckets_of(self.documents)

    @cached_property
    def tok(self):
        return tokenizers.load(self.result("vocabulary")["name"])

    @cached_property
    def shards(self):
        """[{source, split, file, begin, end}] of all shards. begin, end: in the tokens of all buckets, concatenated."""
        sources, sizes, shards, end = self.result("judge")["sources"], Counter(), [], 0
        for bucket in self.results("tokens"):
            sizes.update(bucket)
        names = list(map(safe, sources))
        lower = list(map(str.lower, names))
        for stream in range(2 * len(names)):
            i, split = stream // 2, SPLITS[stream % 2]
            begin, end = end, end + sizes[str(stream)]
            # Two sources may differ only in characters that a file name cannot have, or in case, which macOS ignores.
            name = names[i] + f"+{i}" * (lower.index(lower[i]) < i)
            for k, at in enumerate(range(begin, end, self.plan.shard_tokens)):
                file = f"{name}_" * (len(names) > 1) + f"{split}_{k:05d}.npy"
                shards.append(dict(source=sources[i], split=split, file=file, begin=at,
                                   end=min(at + self.plan.shard_tokens, end)))
        return shards


# The Work of a folder, cached in each process.
work_of = lru_cache(1)(Work)


def given(function, setting):
    """function(setting), or None for a setting that is off."""
    return function(setting) if setting else None


# ----------------------------------------------------------------------------------------------------------------------
# files


def check_files(number, work):
    """Some of the files, as readers.check describes them."""
    files = np.array_split(work.plan.files, work.pieces("check"))[number]
    return dict(files=[check(file, work.plan.text_field, work.plan.encoding) for file in files])


def documents_of(number, work):
    """Yield the documents of a group."""
    plan = work.plan
    columns = [*COLUMNS, "date", plan.score_field, plan.max_field, plan.source_by, plan.url_field]
    for file, part in work.groups[number]:
        for doc in documents(file, part, plan.text_field, columns):
            if plan.url_field != "url":
                doc["url"] = doc.get(plan.url_field)
            # The default corpus has a licence and a language for all of its files.
            yield file.get("columns", {}) | doc


# ----------------------------------------------------------------------------------------------------------------------
# the rules about one document


def score_group(number, work):
    """The first pass of "keep the best": language and score of each document."""
    field, rows = work.plan.score_field, []
    for doc in documents_of(number, work):
        score = None if doc["text"] is None else as_number(doc, field)
        # NaN would be sorted as the best score.
        if score is not None and score == score:
            rows.append((doc.get("language") or "", score))
    return dict(rows=rows)


def find_thresholds(number, work):
    """{language: the lowest score of its best share} (report sec. 3)."""
    rows = (row for result in work.results("scores") for row in result["rows"])
    # No document is kept of a language without any score.
    return {"*": np.inf} | top_thresholds(rows, work.plan.keep_top)


def sift(number, work):
    """
    A group -> sift/{number}.text, the texts that pass, and sift/{number}.parquet: a row of the ledger for each of its
    documents, with the place of its text and its keys for near-duplicates. Returns marks, {mark: [documents, hosts]}
    for MARKS and for "known", the documents with headers or <meta>; and the first and last day of their column "date".
    """
    tables, field, marked, dates = [], work.plan.score_field, {}, set()
    columns = partial(work.rules.columns, top=field and (field, work.result("thresholds")))
    with open(sifted(work, number).with_suffix(".text"), "wb") as f:
        for docs in batches(documents_of(number, work)):
            dates |= {day for doc in docs if (day := DAY.match(str(doc.get("date")))[0])}
            for doc in docs:
                reason, marks = reason_alone(doc, work, columns)
                doc.update(reason=reason, bands={})
                for mark in marks:
                    marked.setdefault(mark, []).append(site_key(doc.get("url")) or "")
            compare_words([doc for doc in docs if not doc["reason"]], work.rules)
            tables.append(table_of([dict(row_of(doc, f, work), group=number) for doc in docs], work))
    write_table(pyarrow.concat_tables(tables), sifted(work, number))
    marks = {mark: [len(sites), sorted({*sites} - {""})] for mark, sites in marked.items()}
    return dict(marks=marks, days=[min(dates), max(dates)] if dates else [])


def batches(docs):
    """Documents as lists of about BATCH characters."""
    batch, n = [], 0
    for doc in docs:
        batch.append(doc)
        n += len(doc["text"] or "")
        if n >= BATCH:
            yield batch
            batch, n = [], 0
    yield batch


def reason_alone(doc, work, columns):
    """
    (why the rules about single documents remove this one, "" if they do not; its marks of judge_document()). columns:
    broken() with its settings.
    """
    if doc["text"] is None:
        return f"unreadable:{doc['problem']}", ()
    if not doc["text"].strip():
        return "empty", ()
    reason, marks = judge_document(doc, work.rules.robots, work.rules.reservations)
    return reason or columns(doc) or "", marks


def compare_words(docs, rules):
    """Set "bands", the keys for near-duplicates, {band: key}, and the reason of contaminated documents."""
    if not docs or not (rules.bands or rules.contamination):
        return
    texts = [doc["text"] for doc in docs]
    ids, ends = dedup.words([text[:dedup.LONG] for text in texts])
    if rules.bands:
        for doc, keys in zip(docs, dedup.band_keys(dedup.signatures(ids, ends), *rules.near)):
            doc["bands"] = dict(zip(rules.bands, keys))
    if rules.contamination:
        for i, prompt in rules.contamination.find(texts, ids, ends).items():
            docs[i]["reason"] = f"contaminated:prompt {prompt}"


def row_of(doc, f, work):
    """The row of a document. If it passes, its text goes to the file f, without personal data."""
    original = doc["text"] or ""
    text, counts, reason = original, {}, doc["reason"]
    if not reason:
        text, counts = without_personal_data(doc, work.plan)
        reason = "" if has_allowed_length(text, work) else "tokens"
    url, offset = doc.get("url"), f.tell()
    return dict(
        id=doc["id"],
        source=source_of(doc, work.plan),
        url=writable(url) if isinstance(url, str) else None,
        language=doc.get("language") or "",
        license=doc.get("license") or "",
        reason=reason,
        bytes=len(original.encode()),
        written=0 if reason else f.write(text.encode()),
        **{tag: counts.get(tag, 0) for tag in TAGS},
        offset=offset,
        # Of the text before personal data is replaced: two texts that differ only in an address are no duplicates.
        text=dedup.fingerprint(original),
        id_hash=id_hash(doc["order_id"]),
        **doc["bands"],
    )


def without_personal_data(doc, plan):
    """(text, {tag: number of replacements}) of a document. Code keeps its addresses, as in Apertus."""
    if not plan.pii or doc.get("language") == "code":
        return doc["text"], {}
    return scrub_pii(doc["text"])


def has_allowed_length(text, work):
    """Whether a text has --min_tokens to --max_tokens tokens, <s> and </s> included."""
    least, most = work.plan.min_tokens, work.plan.max_tokens
    if not least and not most:
        return True
    tokens = 2 + len(work.rules.tok.encode_array(text))
    return least <= tokens <= (most or tokens)


def source_of(doc, plan):
    """The source of a document: its column --source_by, "none" if that is empty; without --source_by the folder."""
    source = doc.get(plan.source_by) if plan.source_by else plan.name
    return "none" if source in (None, "") else writable(str(source))


@lru_cache
def sifted(work, number):
    """The file with the rows of a group; its texts are next to it."""
    return work.folder / "sift" / f"{number}.parquet"


def table_of(rows, work):
    """Rows of the ledger as a table, with null where a later stage fills in, and with more columns for judge()."""
    columns = [("group", pyarrow.int32()), *((name, pyarrow.uint64()) for name in ("id_hash", *work.rules.bands))]
    return pyarrow.Table.from_pylist(rows, pyarrow.schema([*ledger.schema(), *columns]))


# ----------------------------------------------------------------------------------------------------------------------
# the rules about all documents


def find_duplicates(work, n):
    """
    Find duplicates among the first n groups. Returns the rows of these groups, a table with the columns that are needed
    here, and their reasons, an object array.

    Memory: about 180 bytes per document, 230 with near-duplicates.
    """
    rows = read(["reason", "source", "text", *PLACE], work, n)
    reason, text = rows["reason"].to_numpy(), rows["text"].to_numpy()
    # If the corpus had a copy of a planted passage, training would see it more often than planned.
    planted = np.array([dedup.fingerprint(passage["text"]) for passage in work.passages], np.uint64)
    reason[(reason == "") & np.isin(text, planted)] = "duplicate"
    left = np.flatnonzero(reason == "")
    reason[np.delete(left, np.unique(text[left], return_index=True)[1])] = "duplicate"
    if work.plan.near_dedup:
        left = np.flatnonzero(reason == "")
        keys = (read([band], work, n)[band].take(left).to_numpy() for band in work.rules.bands)
        reason[left[list(dedup.seen_before(keys))]] = "near-duplicate"
    return rows, reason


def read(columns, work, n):
    """Columns of the rows of the first n groups, as a table."""
    return pyarrow.concat_tables(ParquetFile(sifted(work, number)).read(columns) for number in range(n))


def groups_sifted(work):
    """How many of the first groups are sifted, without a gap."""
    n = len(work.groups)
    return next((number for number in range(n) if not work.is_done("sift", number)), n)


def groups_needed(work, n):
    """How many of the first n groups it takes to keep --max_bytes of text; 0 if n are not enough."""
    rows, reason = find_duplicates(work, n)
    size = np.cumsum(np.bincount(rows["group"], rows["written"].to_numpy() * (reason == ""), n))
    return int(np.searchsorted(size, work.plan.max_bytes)) + 1 if size[-1] >= work.plan.max_bytes else 0


def count_reasons(reason, work, n):
    """The commonest reasons for removal, as text, with the languages, whose names may differ from --keep_languages."""
    languages = read(["language"], work, n)["language"].to_pylist()
    reasons = (f"{why}:{name or 'none'}" if why == "language" else why for why, name in zip(reason, languages))
    return ", ".join(f"{count:,} {why}" for why, count in Counter(reasons).most_common(5))


def check_urls(work, n):
    """ValueError if opt-outs of hosts or --url_field are asked for and no document of the first n groups has a URL."""
    plan, readable = work.plan, False
    needs = [f"--{name}" for name in STORES if getattr(plan, name)] + ["--url_field"] * (plan.url_field != "url")
    for number in range(n if needs else 0):
        for row in ParquetFile(sifted(work, number)).read(["url", "reason"]).to_pylist():
            if host_key(row["url"]):
                return
            readable = readable or not row["reason"].startswith("unreadable")
    if readable:
        columns = ", ".join(columns_like_urls(work)) or "none"
        raise ValueError(f"{needs[0]}: no document has a URL in its column {plan.url_field!r}. Choose one with "
                         f"--url_field; columns that look like URLs: {columns}")


def columns_like_urls(work):
    """The names of the columns that hold a URL in one of the first rows of the files, sorted."""
    first = (row for file in work.checked for row in islice(rows(file, file["parts"][0]), 20))
    names = {name for _, row in islice(first, 1000) if isinstance(row, dict)
             for name, value in row.items() if isinstance(value, str) and re.match(r"https?://\S+$", value)}
    return sorted(names - {work.plan.url_field})


def judge(number, work):
    """
    All groups -> reasons.parquet, why each row is removed, and documents.npy, the others as DOCUMENT, in the order of
    training, one stream after the other. Returns the names of the sources and how many groups were read.
    """
    n = len(work.groups)
    if work.plan.max_bytes:
        n = groups_needed(work, groups_sifted(work)) or n
    check_urls(work, n)
    rows, reason = find_duplicates(work, n)
    left = np.flatnonzero(reason == "")
    if not len(left):
        raise ValueError(f"no document is left ({count_reasons(reason, work, n) or 'the files are empty'})")
    copies = table_of(planted_rows(work), work)
    write_table(copies, sifted(work, PLANTED))
    reason = np.append(reason, copies["reason"])
    kept = np.flatnonzero(reason == "")
    rows = pyarrow.concat_tables(table.select(["source", "text", *PLACE]) for table in (rows, copies))
    # Removed documents have sources too. The planted passages' source is the last.
    sources = sorted(rows["source"].unique().to_pylist(), key=lambda name: (name == "probes" and len(copies) > 0, name))
    if work.plan.source_by not in ("", "file") and sources == ["none"]:
        raise ValueError(f"source_by={work.plan.source_by}: no document has such a column")
    rows = rows.take(kept)
    documents = np.zeros(len(kept), DOCUMENT)
    for name in PLACE:
        documents[name] = rows[name]
    source = pc.index_in(rows["source"], pyarrow.array(sources)).to_numpy()
    documents["row"], documents["stream"] = kept, 2 * source
    documents = split_off_validation(documents, rows["text"].to_numpy(), work)
    np.save(work.folder / "documents.npy", documents[np.lexsort((documents["id_hash"], documents["stream"]))])
    write_table(pyarrow.table(dict(reason=reason)), work.folder / "reasons.parquet")
    return dict(sources=sources, groups=n)


def split_off_validation(documents, texts, work):
    """
    Move documents to validation by the hash of their text or id, and cut the only document of a source: its last part
    is for validation, the rest for training. texts: the fingerprints, uint64 (n,). Returns the documents with a second
    entry after that of each cut one.
    """
    hashes = documents["id_hash"] if work.plan.by_id else texts
    came_in = documents["group"] != PLANTED
    sizes = np.bincount(documents["stream"][came_in], minlength=documents["stream"].max() + 1)
    alone = came_in & (sizes[documents["stream"]] == 1)
    last = np.zeros(len(documents), np.int64)              # bytes of the last part
    last[alone] = [last_part(text.encode(), work.plan.val_share) for text in texts_of(documents[alone], work)]
    val = came_in & (last == 0) & (hashes / 2.0**64 < work.plan.val_share)
    if came_in.sum() == 1:
        val[:] = False                                     # training needs the only document
    elif not val.any() and not last.any():
        val = came_in & (hashes == hashes[came_in].min())
    documents["stream"] += val
    parts = np.repeat(documents, 1 + (last > 0))
    second = np.diff(parts["row"], prepend=-1) == 0
    parts["written"][np.flatnonzero(second) - 1] -= last[last > 0]
    parts["written"][second] = last[last > 0]
    parts["offset"][second] += (documents["written"] - last)[last > 0]
    parts["stream"][second] += 1
    return parts


def last_part(text, share):
    """
    How many bytes the last part of a text (UTF-8) has: about this share of it, from the begin of a line on if one is
    near, else from the begin of a character. 0 if one of the two parts would be too short.
    """
    ideal = round(len(text) * (1 - share))
    near = min(ideal, len(text) - ideal) // 2
    lines = [newline.end() for newline in LINE.finditer(text, ideal - near, ideal + near)]
    begin = min(lines, key=lambda at: abs(at - ideal), default=ideal)
    while begin < len(text) and text[begin] & 0xC0 == 0x80:
        begin -= 1
    return len(text) - begin if min(begin, len(text) - begin) >= LAST else 0


def planted_rows(work):
    """The rows of the planted copies. Each has its own place in the order of training, so that they are spread."""
    rows, row = [], dict(source="probes", language="", license="", reason="", group=PLANTED, bytes=0, text=0)
    row |= dict.fromkeys(TAGS, 0)
    with open(sifted(work, PLANTED).with_suffix(".text"), "wb") as f:
        for passage in work.passages:
            row = dict(row, id=passage["id"], offset=f.tell(), written=f.write(passage["text"].encode()))
            rows += [dict(row, id_hash=id_hash(f"{row['id']}#{k}")) for k in range(passage["repetitions"])]
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# tokens


def buckets_of(documents):
    """Documents as arrays of neighbours, with about 16 MB of text each."""
    begins = np.cumsum(documents["written"]) - documents["written"]
    return np.split(documents, np.flatnonzero(np.diff(begins // BUCKET)) + 1)


def texts_of(documents, work):
    """Yield the texts of an array of DOCUMENT, in order."""
    for group, offset, written in documents[["group", "offset", "written"]].tolist():
        with open(sifted(work, group).with_suffix(".text"), "rb") as f:
            f.seek(offset)
            yield f.read(written).decode()


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
    size = 0
    for bucket in buckets_of(work.documents[np.argsort(work.documents["id_hash"], kind="stable")]):
        for text in texts_of(bucket[bucket["stream"] % 2 == 0], work):
            yield text
            size += len(text)
        if size > BPE_CHARS:
            return


def tokenize_bucket(number, work):
    """A bucket -> tokens/{number}.ids, and tokens/{number}.counts of each document, int64. Returns {stream: tokens}."""
    documents, path = work.buckets[number], work.folder / "tokens" / f"{number}.ids"
    counts = write_tokens(work.tok, texts_of(documents, work), path)
    # np.save hides the error of a full disk.
    path.with_suffix(".counts").write_bytes(counts)
    return {str(stream): int(counts[documents["stream"] == stream].sum()) for stream in np.unique(documents["stream"])}


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
# the account


def account(number, work):
    """meta.json, documents.parquet and the report. ValueError: an input has changed since its sha256 was taken."""
    for path, sha in [(file["path"], file["sha256"]) for file in work.checked]:
        if os.path.isfile(path) and os.path.getmtime(path) > work.plan.began and sha not in (None, sha256(path)):
            raise ValueError(f"{path} has changed while it was read: run the command again")
    check_stores(work.plan.stores)
    tok, name = work.tok, work.tok.name
    ledger.write_ledger(work.data / ledger.FILE, ledger_tables(work))
    shards = {source: {split: [] for split in SPLITS} for source in work.result("judge")["sources"]}
    for shard, entry in zip(work.shards, work.results("cut")):
        shards[shard["source"]][shard["split"]].append(entry)
    if (work.data / "tokenizer.json").exists():
        name = "tokenizer.json"
    meta = dict(tokenizer=name, tokenizer_hash=tok.hash, vocab_size=tok.vocab_size, bos=tok.bos, eos=tok.eos)
    if work.passages:
        # studies/memorize.py reads it.
        passages = [dict(passage, ids=tok.encode(passage["text"])) for passage in work.passages]
        write_json(work.data / "probes.json", dict(tokenizer_hash=tok.hash, probes=passages))
    write_report(work.data, meta, shards, provenance_of(work, name))
    if not work.plan.dry_run:
        verify(work.data)


def provenance_of(work, tokenizer):
    """The part of the report about the run, its files and its settings. tokenizer: the name of the vocabulary."""
    plan = work.plan
    commit = subprocess.getoutput(f"git -C '{ROOT}' rev-parse HEAD")
    hashed = "sha256 of its id" if plan.by_id else "BLAKE2b of its text, in Unicode form NFC with single spaces,"
    return dict(
        run=dict(
            out=plan.out,
            command=plan.command,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(plan.began)),
            code=commit if len(commit) == 40 else None,
            tokenizer=tokenizer),
        inputs=described_inputs(work),
        ignored=plan.ignored,
        stores=[dict(store, ignored=work.ignored_of_stores().get(store["setting"], {})) for store in plan.stores],
        robots=opt_outs_of(work),
        period=period_of(work),
        rule=f"A document is for validation where 64 bits of the {hashed} over 2^64 are below {plan.val_share}; if "
        "none is, the one with the least. The only document of a source is cut: its last part is for validation.",
        pii=dict(scrubbed=plan.pii),
        probes=dict(
            file=plan.probes, passages=len(work.passages), repetitions=plan.repetitions,
            documents=sum(passage["repetitions"] for passage in work.passages)) if work.passages else None,
    )


def opt_outs_of(work):
    """The part of the report about opt-outs; None if nothing was consulted and no document has a URL."""
    plan, robots = work.plan, work.robots
    hosts = write_hosts(work.data, robots["store"], work.rules.reservations)
    if not hosts["hosts"]["seen"] and not any(getattr(plan, name) for name in STORES):
        return None
    marked = {mark: [0, set()] for mark in ("known", *MARKS)}
    for number in range(work.result("judge")["groups"]):
        for mark, (n, sites) in work.result("sift", number)["marks"].items():
            marked[mark][0] += n
            marked[mark][1].update(sites)
    return dict(
        store=plan.robots or None,
        agents=robots["agents"],
        missing=plan.missing,
        snapshots=plan.snapshots,
        statements=marked.pop("known")[0],
        marks={mark: dict(documents=n, hosts=sorted(sites)) for mark, (n, sites) in marked.items()},
        **hosts)


def check_stores(stores):
    """ValueError if one of these stores, as described_stores() gives them, is not as it was when the run began."""
    for store in stores:
        if not os.path.exists(store["path"]) or sha256_of_store(store["path"]) != store["sha256"]:
            raise ValueError(f"--{store['setting']}={store['path']} has changed while it was read: run this again")


def described_stores(plan):
    """[{setting, path, sha256}] of the stores of a plan, a dict, that exist."""
    paths = {name: plan[name] for name in STORES if plan[name] and os.path.exists(plan[name])}
    return [dict(setting=name, path=path, sha256=sha256_of_store(path)) for name, path in paths.items()]


def period_of(work):
    """[first day, last day] of the column "date" of all documents that were read; [] without dates."""
    groups = range(work.result("judge")["groups"])
    days = [day for number in groups for day in work.result("sift", number)["days"]]
    return [min(days), max(days)] if days else []


def sha256_of_store(path):
    """The sha256 of a file; of a folder, that of the names and sha256 of its files."""
    if os.path.isfile(path):
        return sha256(path)
    return sha256_of([(os.path.relpath(file, path), sha256(file)) for file in files_of(path)])


def described_inputs(work):
    """[{name, path, bytes, sha256, problem, encoding}] of all files, for the report."""
    read = {file["name"] for group in work.groups[:work.result("judge")["groups"]] for file, _ in group}
    keys = "name", "path", "bytes", "sha256", "problem", "encoding"
    inputs = [{key: file[key] for key in keys} for file in work.checked]
    for file in inputs:
        if work.plan.max_bytes and file["name"] not in read:
            file["problem"] = file["problem"] or "not read: --max_bytes was reached"
    return inputs


def ledger_tables(work):
    """Yield the rows of all groups as tables of the ledger."""
    documents, shards = work.documents, pyarrow.Table.from_pylist(work.shards)
    paths = [work.folder / "tokens" / f"{n}.counts" for n in range(len(work.buckets))]
    tokens = np.concatenate([np.fromfile(path, np.int64) for path in paths])
    begins, at = shards["begin"].to_numpy(), np.cumsum(tokens) - tokens
    shard = np.searchsorted(begins, at, "right") - 1
    split, file = (shards[name].dictionary_encode().take(shard) for name in ("split", "file"))
    where = pyarrow.table(dict(
        split=split, shard=file, offset=at - begins[shard], tokens=tokens, written=documents["written"]))
    reasons = read_table(work.folder / "reasons.parquet")["reason"]
    # {row: its places among the documents}: none if it was removed, two if it was cut.
    order = np.lexsort((documents["stream"], documents["row"]))
    n_places = np.bincount(documents["row"], minlength=len(reasons))
    ends = np.cumsum(n_places)
    done = 0
    for number in [*range(work.result("judge")["groups"]), PLANTED]:
        rows = read_table(sifted(work, number))
        n = n_places[done:done + len(rows)]
        kept = np.repeat(n > 0, np.maximum(n, 1))
        index = np.repeat(np.arange(len(rows)), np.maximum(n, 1))
        places = np.zeros(len(index), np.int64)
        places[kept] = order[ends[done - 1] if done else 0:][:kept.sum()]
        taken, placed = rows.take(index), where.take(pyarrow.array(places, mask=~kept))
        columns = {name: table[name] for table in (taken, placed) for name in table.column_names}
        first = np.diff(index, prepend=-1) > 0
        columns["bytes"] = pc.if_else(first, columns["bytes"], 0)
        for name in TAGS:
            columns[name] = pc.if_else(kept & first, columns[name], 0)
        for name in ("tokens", "written"):
            columns[name] = pc.if_else(kept, columns[name], 0)
        columns["reason"] = reasons[done:done + len(rows)].take(index)
        done += len(rows)
        yield pyarrow.table(columns)


# ----------------------------------------------------------------------------------------------------------------------
# all of them

STAGES = dict(
    check=(lambda work: min(32, len(work.plan.files)), check_files),
    scores=(lambda work: len(work.groups) * bool(work.plan.score_field), score_group),
    thresholds=(lambda work: bool(work.plan.score_field), find_thresholds),
    sift=(lambda work: len(work.groups), sift),
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
        if n and work.bytes_until[n - 1] >= enough:
            if groups_needed(work, n):
                break
            enough = work.bytes_until[n - 1] + work.plan.max_bytes / 10
        do(stage, number, folder)
    if final:
        publish(final, tmp)
