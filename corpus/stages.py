"""
The stages from files to a data folder. prepare.py runs them on this machine, corpus/cluster.py on many.

    check         some of the files: can each be read to its end, its sha256, where it can be cut into parts
    scores        with --score_field: the scores of all documents...
    thresholds    ...and the score that the best of each language reach
    sift          a group of parts: the rules about one document alone; personal data replaced
    judge         all documents, in the order of the input: duplicates, train or validation, the order of training
    vocabulary    a BPE vocabulary of the training split, if no tokenizer is named
    tokens        a bucket of documents, neighbours in the order of training
    cut           a shard
    account       meta.json, documents.parquet, report.json, report.md; everything checked from the files

A stage is a row of STAGES: how many pieces of work there are, and a function of (number, work) that does one of them.
Its result is written to OUT.tmp/work/STAGE/NUMBER.json, after all its other files. A piece depends on nothing but the
plan and the stages before, so any number of processes writes the same bytes, and a killed run repeats only the pieces
that are missing.
"""

import hashlib
import json
import os
import subprocess
import time
from collections import Counter
from functools import lru_cache
from importlib import metadata
from itertools import chain, product
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.compute as pc
from pyarrow.parquet import read_table, write_table

import tokenizer as tokenizers
from configurator import ROOT
from corpus import dedup, ledger
from corpus.audit import verify
from corpus.folder import publish
from corpus.language import detect
from corpus.pii import TAGS, scrub_pii
from corpus.robots import AGENTS, COLUMNS, blocked_domains, host_key, open_reservations, open_robots, refusal
from corpus.rules import TOXICITY, as_number, broken, by_language, column, column_rules, listed, score_function
from corpus.rules import text_rules, top_thresholds
from corpus.shards import cut, dtype_of, long_parts, safe, write_tokens
from corpus.withdraw import reason_of, stays_out
from engine.files import read_json, sha256, write_json
from engine.readers import check, documents, files_of, id_hash, rows_of, writable

# Bytes of text in a group, and in a bucket.
GROUP, BUCKET = 4 << 20, 16 << 20
# Characters that a vocabulary is trained on at most.
BPE_CHARS = 200_000_000
# Characters of documents whose words are hashed together: one page at a time takes four times as long.
HANDFUL = 300_000
# Where the text of a row is: written bytes of sift/{group}.text, from an offset on; and its place in the order.
PLACE = ("group", "offset", "written", "id_hash")
# A document that stays: 40 bytes in memory, however long its text. row: its number among all rows; stream: 2 * number
# of its source, + 1 for validation.
DOCUMENT = [("row", "i8"), ("group", "i4"), ("offset", "i8"), ("written", "i8"), ("id_hash", "u8"), ("stream", "i4")]
SPLITS = ("train", "val")
# The group of the rows that did not come in: planted passages, and the end of a document that is alone.
EXTRA = -1
NOTHING = dict.fromkeys(("bytes", "text", *TAGS), 0)

CACHES = []


def cached(function):
    """A function of the work folder, computed once in a process."""
    CACHES.append(lru_cache(1)(function))
    return CACHES[-1]


@cached
def plan(work):
    """The settings of prepare.py, and files, ignored, by_id, name, command and began."""
    return SimpleNamespace(**read_json(work / "plan.json"))


def result(stage, work, number=0):
    """The result of a piece of a stage."""
    return read_json(work / stage / f"{number}.json")


def results(stage, work):
    """The results of all pieces of a stage, in order."""
    return (result(stage, work, number) for number in range(pieces(stage, work)))


def is_done(stage, number, work):
    return (work / stage / f"{number}.json").exists()


# ----------------------------------------------------------------------------------------------------------------------
# files


def check_files(number, work):
    """A part of the files, as readers.check describes them."""
    asked = plan(work)
    files = np.array_split(asked.files, pieces("check", work))[number]
    return dict(files=[check(file, asked.text_field, asked.encoding) for file in files])


@cached
def groups(work):
    """[[(file, part)]]: parts of about 4 MB of text together. A file that cannot be read has one part, of no bytes."""
    found, size = [[]], 0
    for file in chain.from_iterable(some["files"] for some in results("check", work)):
        for part in [[0] * 4] if file["problem"] else file["parts"]:
            size += part[3]
            if found[-1] and size > GROUP:
                found.append([])
                size = part[3]
            found[-1].append((file, part))
    return found


def size_of(group):
    """Bytes of text in a group."""
    return sum(part[3] for _, part in group)


def documents_of(number, work):
    """Yield the documents of a group, with the defaults for missing columns."""
    asked, score = plan(work), rules(work).score
    wanted = [*COLUMNS, *filter(None, (asked.score_field, asked.max_field, asked.source_by))]
    defaults = dict(language=asked.default_language, license=asked.default_license)
    for file, part in groups(work)[number]:
        damaged = dict(id=file["name"], file=file["name"], text=None, problem=file["problem"])
        for doc in [damaged] if file["problem"] else documents(file, part, asked.text_field, wanted):
            text = doc["text"]
            if text is not None and asked.detect_language and not doc.get("language"):
                doc["language"] = detect(text, asked.detect_language) or None
            doc |= {name: value for name, value in defaults.items() if value and doc.get(name) is None}
            if text is not None and score:
                doc["score"] = score(text)
            yield doc


# ----------------------------------------------------------------------------------------------------------------------
# the rules about one document


@cached
def rules(work):
    """The settings as functions and tables. ValueError for one that makes no sense."""
    asked = plan(work)
    agents = [agent for agent, in rows_of(asked.agents, ("agent",), comments=True)] if asked.agents else AGENTS
    if not agents:
        raise ValueError(f"--agents={asked.agents} names no agent: want one a line")
    robots = dict(
        store=given(open_robots, asked.robots),
        agents=[agent for agent in agents if agent != "*" or not asked.agents_no_star],
        missing=asked.missing,
        blocked=given(blocked_domains, asked.blocked) or (),
        explicit=asked.agents_no_star,
    )
    below = TOXICITY if asked.max_value == "apertus" else by_language("max_value", asked.max_value)
    return SimpleNamespace(
        score=given(score_function, asked.score),
        robots=robots if asked.robots or asked.blocked else None,
        reservations=given(open_reservations, asked.reservations),
        columns=dict(
            licenses=listed(asked.keep_licenses),
            languages=listed(asked.keep_languages),
            min_chars=asked.min_chars,
            max_chars=asked.max_chars,
            below=asked.max_field and (asked.max_field, below),
            rate=by_language("keep_rate", asked.keep_rate),
            seed=asked.seed,
        ),
        text=given(text_rules, asked.heuristics) or (),
        contamination=asked.decontaminate and dedup.Contamination(dedup.read_prompts(asked.decontaminate)),
        near=given(dedup.bands_of, asked.near_dedup),
        tok=tokenizers.load(asked.tokenizer) if asked.min_tokens or asked.max_tokens else None,
    )


def given(function, setting):
    """function(setting), or None for a setting that is off."""
    return function(setting) if setting else None


@cached
def first_rules(work):
    """[(reason, breaks)] by columns; with --score_field they need its thresholds."""
    field = plan(work).score_field
    return column_rules(**rules(work).columns, top=field and (field, result("thresholds", work)))


def score_group(number, work):
    """The first pass of "keep the best": id, language and score of each document."""
    field, rows = plan(work).score_field, []
    for doc in documents_of(number, work):
        score = None if doc["text"] is None else as_number(field, column(doc, field))
        if score is not None:
            rows.append((doc["id"], doc.get("language") or "", score))
    return dict(rows=rows)


def find_thresholds(number, work):
    """{language: the score that its best share reaches} (report sec. 3)."""
    rows = chain.from_iterable(some["rows"] for some in results("scores", work))
    return top_thresholds(rows, plan(work).keep_top)


def reason_alone(doc, work):
    """Why a document is removed, by itself; "" if it is not."""
    asked, found = plan(work), rules(work)
    if doc["text"] is None:
        if asked.strict:
            raise ValueError(f"{doc['id']}: {doc['problem']} (--strict)")
        return f"unreadable:{doc['problem']}"
    if asked.strict and doc.get("url") and not host_key(doc["url"]):
        raise ValueError(f"{doc['id']}: {doc['url']!r} is not a URL (--strict)")
    if not doc["text"].strip():
        return "empty"
    # A token has at least one byte: most short texts need not be tokenized.
    few = found.tok and len(doc["text"].encode()) + 2 < asked.min_tokens
    return (refusal(doc, found.robots, found.reservations) or broken(doc, first_rules(work)) or few and "tokens"
            or broken(doc, found.text) or "")


def sift(number, work):
    """
    A group -> sift/{number}.text, the texts that pass, and sift/{number}.parquet: a row of the ledger for each of its
    documents, with the place of its text and its keys for near-duplicates.
    """
    rows = []
    with open(work / "sift" / f"{number}.text", "wb") as f:
        for docs in handfuls(documents_of(number, work)):
            for doc in docs:
                doc.update(reason=reason_alone(doc, work), bands=None)
            by_words([doc for doc in docs if not doc["reason"]], rules(work))
            rows += [dict(row_of(doc, f, work), group=number) for doc in docs]
    write_rows(rows, work, number)
    return {}


def handfuls(docs):
    """Documents as lists of about HANDFUL characters."""
    some, n = [], 0
    for doc in docs:
        some.append(doc)
        n += len(doc["text"] or "")
        if n >= HANDFUL:
            yield some
            some, n = [], 0
    yield some


def by_words(docs, found):
    """Set the keys for near-duplicates, "bands", and the reason of contaminated documents."""
    if not docs or not (found.near or found.contamination):
        return
    texts = [doc["text"] for doc in docs]
    ids, ends = dedup.words([text[:dedup.LONG] for text in texts])
    if found.near:
        for doc, keys in zip(docs, dedup.band_keys(dedup.signatures(ids, ends), *found.near)):
            doc["bands"] = keys
    if found.contamination:
        for i, prompt in found.contamination.find(texts, ids, ends).items():
            docs[i]["reason"] = f"contaminated:prompt {prompt}"


def row_of(doc, f, work):
    """The row of a document. If it passes, its text goes to the file f, without personal data."""
    asked, tok = plan(work), rules(work).tok
    url, text, parts, replaced, begin = doc.get("url"), doc["text"] or "", [], Counter(), f.tell()
    if not doc["reason"]:
        scrub = asked.pii and (asked.pii_in_code or doc.get("language") != "code")
        parts = [scrub_pii(part) if scrub else (part, {}) for part in long_parts(text)]
        tokens = 2 + sum(len(tok.encode_array(part)) for part, _ in parts) if tok else 0
        if tok and not asked.min_tokens <= tokens <= (asked.max_tokens or tokens):
            doc["reason"], parts = "tokens", []
    for part, counts in parts:
        f.write(part.encode())
        replaced.update(counts)
    return dict(
        id=doc["id"],
        source=writable(str(doc.get(asked.source_by) or "none")) if asked.source_by else asked.name,
        url=writable(url) if isinstance(url, str) else None,
        language=doc.get("language") or "",
        license=doc.get("license") or "",
        reason=doc["reason"],
        bytes=len(text.encode()),
        written=f.tell() - begin,
        **{kind: replaced[kind] for kind in TAGS},
        offset=begin,
        # Of the text as it came: two that differ in an address alone are two.
        text=dedup.fingerprint(text),
        id_hash=id_hash(doc["id"]),
        bands=doc["bands"],
    )


def sifted(work, number):
    """The file with the rows of a group."""
    return work / "sift" / f"{number}.parquet"


def write_rows(rows, work, number):
    """Write rows of the ledger, null where a later stage fills in, with more columns for judge()."""
    more = [("group", pyarrow.int32()), ("id_hash", pyarrow.uint64()), ("bands", pyarrow.list_(pyarrow.uint64()))]
    table = pyarrow.Table.from_pylist(rows, pyarrow.schema([*ledger.schema(), *more]))
    write_table(table, sifted(work, number))


# ----------------------------------------------------------------------------------------------------------------------
# the rules about all documents


def decide(work, n):
    """
    Remove what an earlier document of the first n groups, or of --known, was. Returns the rows of these groups, a table
    without strings but the source, and their reasons, an object array.

    Memory: 52 bytes a document, 164 with near-duplicates.
    """
    asked, columns = plan(work), ["reason", "source", "text", *PLACE]
    columns += ["bands"] * bool(asked.near_dedup) + ["id", "url"] * bool(asked.known)
    rows = pyarrow.concat_tables(read_table(sifted(work, number), columns=columns) for number in range(n))
    reason, text = rows["reason"].to_numpy(), rows["text"].to_numpy()
    # A planted passage that is in the corpus as well would be seen more often than promised.
    before = np.array([dedup.fingerprint(passage["text"]) for passage in probes(work)], np.uint64)
    if asked.known:
        known, gone = pyarrow.concat_tables(ledger.ledger(asked.known, ["text", "reason"])), stays_out(asked.known)
        before = np.append(before, known.filter(pc.field("reason") == "")["text"])
        for i, row in enumerate(rows.select(["id", "url", "text"]).to_pylist()):
            reason[i] = reason[i] or reason_of(row, gone)[0]
    if asked.dedup:
        reason[(reason == "") & np.isin(text, before)] = "duplicate"
        left = np.flatnonzero(reason == "")
        reason[np.delete(left, np.unique(text[left], return_index=True)[1])] = "duplicate"
    if asked.near_dedup and (reason == "").any():
        left, seen = np.flatnonzero(reason == ""), dedup.Seen()
        for some in np.array_split(left, len(left) // ledger.ROWS + 1):
            keys = rows["bands"].take(some).combine_chunks().flatten().to_numpy()
            reason[some[~seen.first(keys.reshape(len(some), -1))]] = "near-duplicate"
    return rows, reason


def groups_needed(work, n):
    """How many of the first n groups it takes until --max_bytes of text are kept, 0 if they do not suffice."""
    rows, reason = decide(work, n)
    size = np.cumsum(np.bincount(rows["group"], rows["written"].to_numpy() * (reason == ""), n))
    return int(np.searchsorted(size, plan(work).max_bytes)) + 1 if size[-1] >= plan(work).max_bytes else 0


def judge(number, work):
    """
    All groups -> reasons.parquet, why each row is removed, and documents.npy, the others as DOCUMENT, in the order of
    training, one stream after the other. Returns the names of the sources and how many groups were read.
    """
    n = len(groups(work))
    if plan(work).max_bytes:
        n = groups_needed(work, next((n for n in range(n) if not is_done("sift", n, work)), n)) or n
    rows, reason = decide(work, n)
    left = np.flatnonzero(reason == "")
    if not len(left):
        counts = ", ".join(f"{n:,} {why}" for why, n in Counter(reason).most_common(5))
        raise ValueError(f"no document is left ({counts or 'the files are empty'})")
    copies, ends = planted(work), halve(work, *rows.take(left).to_pylist()) if len(left) == 1 else []
    write_rows(ends + copies, work, EXTRA)
    extra = read_table(sifted(work, EXTRA), columns=rows.column_names)
    reason = np.append(reason, extra["reason"])
    rows = pyarrow.concat_tables([rows, extra]).select(["source", "text", *PLACE])
    # The source of planted passages is the last.
    sources = sorted(rows["source"].unique().to_pylist(), key=lambda name: (name == "probes" and any(copies), name))
    kept = np.flatnonzero(reason == "")
    rows = rows.take(kept)
    documents = np.zeros(len(kept), DOCUMENT)
    for name in PLACE:
        documents[name] = rows[name]
    documents["written"][0] -= sum(row["written"] for row in ends)
    source = pc.index_in(rows["source"], pyarrow.array(sources)).to_numpy()
    documents["row"], documents["stream"] = kept, 2 * source + validation(rows, plan(work))
    np.save(work / "documents.npy", documents[np.lexsort((documents["id_hash"], documents["stream"]))])
    write_table(pyarrow.table(dict(reason=reason)), work / "reasons.parquet")
    return dict(sources=sources, groups=n)


def validation(rows, asked):
    """Whether a row is for validation, by the hash of its text or id: bool (n,). Of a single document its end is."""
    hashes, whole = rows["id_hash" if asked.by_id else "text"].to_numpy(), rows["text"].to_numpy() != 0
    if whole.sum() == 1:
        return ~whole & (rows["group"].to_numpy() != EXTRA)
    val, least = whole & (hashes / 2.0**64 < asked.val_share), hashes == hashes[whole].min()
    # Of a few documents, of which none may be below, the one with the smallest hash is, with its copies.
    return val if val.any() or least[whole].all() else whole & least


def halve(work, place):
    """Cut the only kept document after a line break or a space. Returns the row of its end, [] if it has none."""
    path = sifted(work, place["group"])
    row = read_table(path, filters=[("reason", "=", ""), ("offset", "=", place["offset"])]).to_pylist()[0]
    raw = path.with_suffix(".text").read_bytes()[:row["offset"] + row["written"]]
    end = raw[row["offset"] + int(row["written"] * (1 - plan(work).val_share)):]
    end = end.partition(b"\n")[2] or end.partition(b" ")[2]
    return [row | NOTHING | dict(offset=len(raw) - len(end), written=len(end))] * bool(end)


@cached
def probes(work):
    """[{id, repetitions, text}] of the passages to plant: the repetitions are dealt out in the order of a hash."""
    texts, times = given(dedup.read_prompts, plan(work).probes) or [], plan(work).repetitions
    named = sorted(((f"probe/{i}", text) for i, text in enumerate(texts)), key=lambda one: id_hash("".join(one)))
    return [dict(id=name, repetitions=times[n % len(times)], text=text) for n, (name, text) in enumerate(named)]


def planted(work):
    """The rows of the planted copies. Each has a place of its own in the order, so that they are spread."""
    rows, row = [], dict(NOTHING, source="probes", language="", license="", reason="", group=EXTRA)
    with open(sifted(work, EXTRA).with_suffix(".text"), "wb") as f:
        for passage in probes(work):
            row = dict(row, id=passage["id"], offset=f.tell(), written=f.write(passage["text"].encode()))
            rows += [dict(row, id_hash=id_hash(f"{row['id']}#{k}")) for k in range(passage["repetitions"])]
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# tokens


@cached
def judged(work):
    """The result of judge(), the documents, and their buckets."""
    documents = np.load(work / "documents.npy", mmap_mode="r", allow_pickle=False)
    return SimpleNamespace(**result("judge", work), documents=documents, buckets=buckets_of(documents))


def buckets_of(documents):
    """Documents as arrays of neighbours, 16 MB of text together."""
    begins = np.cumsum(documents["written"]) - documents["written"]
    return np.split(documents, np.flatnonzero(np.diff(begins // BUCKET)) + 1)


def texts_of(documents, work):
    """Yield the texts of an array of DOCUMENT, in order."""
    # There are more groups than files that a process may open.
    opened = lru_cache(100)(lambda group: open(work / "sift" / f"{group}.text", "rb"))
    for group, offset, written in documents[["group", "offset", "written"]].tolist():
        opened(group).seek(offset)
        yield opened(group).read(written).decode()


def find_vocabulary(number, work):
    """Returns the name that tokenizers.load takes. A vocabulary that is not built in becomes data/tokenizer.json."""
    name, path = plan(work).tokenizer, str(work.parent / "data" / "tokenizer.json")
    if not name:
        tokenizers.train_bpe(some_text(work), plan(work).train_bpe, path)
        return dict(name=path)
    tok = tokenizers.load(name)
    if not tok.name.startswith("bpe:"):
        return dict(name=tok.name)
    # A document ends a text, also where the end in a model's folder is that of a turn.
    tok.eos = tok.special.get("</s>", tok.eos)
    tokenizers.write_bpe(tok, path)
    return dict(name=path)


def some_text(work):
    """Yield texts of the training split, of all sources alike, in parts, until there are BPE_CHARS characters."""
    documents, size = judged(work).documents, 0
    for bucket in buckets_of(documents[np.argsort(documents["id_hash"], kind="stable")]):
        for text in texts_of(bucket[bucket["stream"] % 2 == 0], work):
            yield from long_parts(text)
            size += len(text)
        if size > BPE_CHARS:
            return


@cached
def tok_of(work):
    return tokenizers.load(result("vocabulary", work)["name"])


def tokenize_bucket(number, work):
    """A bucket -> tokens/{number}.ids, and tokens/{number}.counts of each document, int64. Returns {stream: tokens}."""
    documents, path = judged(work).buckets[number], work / "tokens" / f"{number}.ids"
    counts = write_tokens(tok_of(work), texts_of(documents, work), path)
    # np.save hides the error of a full disk.
    path.with_suffix(".counts").write_bytes(counts)
    return {str(stream): int(counts[documents["stream"] == stream].sum()) for stream in np.unique(documents["stream"])}


@cached
def shards(work):
    """[{source, split, file, begin, end}] of all shards, stretches of the tokens of all buckets in a row."""
    sources, found, sizes, end, most = judged(work).sources, [], Counter(), 0, plan(work).shard_tokens
    names = list(map(safe, sources))
    for bucket in results("tokens", work):
        sizes.update(bucket)
    for stream, ((i, source), split) in enumerate(product(enumerate(sources), SPLITS)):
        begin, end = end, end + sizes[str(stream)]
        # Two sources may differ in characters that no file name has.
        name = names[i] + f"-{i}" * (names.index(names[i]) < i)
        for k, at in enumerate(range(begin, end, most)):
            file = f"{name}_" * (len(names) > 1) + f"{split}_{k:05d}.npy"
            found.append(dict(source=source, split=split, file=file, begin=at, end=min(at + most, end)))
    return found


def cut_shard(number, work):
    """Write a shard. Returns its entry for meta.json."""
    file, begin, end = (shards(work)[number][key] for key in ("file", "begin", "end"))
    files = [(work / "tokens" / f"{n}.ids", sum(bucket.values())) for n, bucket in enumerate(results("tokens", work))]
    return dict(file=file, **cut(work.parent / "data" / file, files, dtype_of(tok_of(work)), begin, end))


# ----------------------------------------------------------------------------------------------------------------------
# the account


def account(number, work):
    """meta.json, documents.parquet and the report."""
    asked, tok, new = plan(work), tok_of(work), work.parent / "data"
    ledger.write_ledger(new / ledger.FILE, rows_of_all(work))
    streams = {source: {split: [] for split in SPLITS} for source in judged(work).sources}
    for shard, entry in zip(shards(work), results("cut", work)):
        streams[shard["source"]][shard["split"]].append(entry)
    name = "tokenizer.json" if (new / "tokenizer.json").exists() else tok.name
    meta = dict(tokenizer=name, tokenizer_hash=tok.hash, vocab_size=tok.vocab_size, bos=tok.bos, eos=tok.eos)
    ledger.write_account(new, meta, streams, about(work, tok, name))
    if not asked.dry_run:
        verify(new)


def about(work, tok, name):
    """The part of the report about the run, its files and its settings. Writes probes.json."""
    asked, new, robots, times = plan(work), work.parent / "data", rules(work).robots, plan(work).repetitions
    # rensa is an option's package: requirements.txt does not install it.
    used = ["numpy", "pyarrow", "tiktoken"] + ["rensa"] * bool(asked.near_dedup)
    commit = subprocess.getoutput(f"git -C '{ROOT}' rev-parse HEAD")
    run = dict(
        out=asked.out,
        command=asked.command,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(asked.began)),
        seconds=round(time.time() - asked.began),
        code=commit if len(commit) == 40 else None,
        packages={package: metadata.version(package) for package in used},
        tokenizer=name,
    )
    files = {}
    for n, group in enumerate(groups(work)):
        unread = None if n < judged(work).groups else "not read: --max_bytes was reached"
        for file, _ in group:
            files.setdefault(file["name"], {key: file[key] for key in ("name", "path", "bytes", "sha256")}
                             | dict(problem=file["problem"] or unread))
    if robots:
        store = asked.robots or asked.blocked
        robots = dict(store=store, sha256=digest(store), agents=robots["agents"], missing=asked.missing,
                      only_explicit=asked.agents_no_star, **ledger.opt_outs(new, robots["store"]))
    planted = [dict(passage, ids=tok.encode(passage["text"])) for passage in probes(work)]
    if planted:
        # studies/memorize.py reads it.
        write_json(new / "probes.json", dict(
            tokenizer_hash=tok.hash, repetitions=times, source="probes", probes=planted))
    of = "sha256 of its id" if asked.by_id else "BLAKE2b of its text, in Unicode form NFC with single spaces,"
    return dict(
        run=run,
        inputs=list(files.values()),
        ignored=asked.ignored,
        rule=f"A document is for validation where 64 bits of the {of} over 2^64 are below {asked.val_share}; of a "
        "single document it is the end.",
        pii=dict(scrubbed=asked.pii, in_code=asked.pii_in_code),
        probes=planted and dict(
            file=asked.probes, sha256=sha256(asked.probes), passages=len(planted), repetitions=times,
            documents=sum(passage["repetitions"] for passage in planted)) or None,
        robots=robots,
    )


def rows_of_all(work):
    """Yield the rows of all groups as tables of the ledger."""
    documents, found = judged(work).documents, shards(work)
    paths = [work / "tokens" / f"{n}.counts" for n in range(len(judged(work).buckets))]
    tokens = np.concatenate([np.fromfile(path, np.int64) for path in paths])
    begins, at = np.array([shard["begin"] for shard in found]), np.cumsum(tokens) - tokens
    shard = np.searchsorted(begins, at, "right") - 1
    names = {key: [one[key] for one in found] for key in ("split", "file")}
    split, file = (pyarrow.DictionaryArray.from_arrays(shard, names[key]) for key in names)
    where = pyarrow.table(dict(
        split=split, shard=file, offset=at - begins[shard], tokens=tokens, written=documents["written"]))
    reasons = read_table(work / "reasons.parquet")["reason"]
    # The place of each row among the documents.
    place = np.full(len(reasons), -1)
    place[documents["row"]] = np.arange(len(documents))
    done = 0
    for number in [*range(judged(work).groups), EXTRA]:
        rows = read_table(sifted(work, number))
        mine = place[done:done + len(rows)]
        kept = where.take(pyarrow.array(mine, mask=mine < 0))
        columns = {name: some[name] for some in (rows, kept) for name in some.column_names}
        for name in ("tokens", "written", *TAGS):
            columns[name] = pc.if_else(mine >= 0, columns[name], 0)
        columns["reason"] = reasons[done:done + len(rows)]
        done += len(rows)
        yield pyarrow.table(columns)


def digest(path):
    """The sha256 of a file, or of the names and the sha256 of all files in a folder."""
    if not os.path.isdir(path):
        return sha256(path)
    root, files = files_of(path)
    lines = [f"{os.path.relpath(file, root)} {sha256(file)}" for file in files if os.path.isfile(file)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# all of them

STAGES = dict(
    check=(lambda work: min(32, len(plan(work).files)), check_files),
    scores=(lambda work: len(groups(work)) * bool(plan(work).score_field), score_group),
    thresholds=(lambda work: bool(plan(work).score_field), find_thresholds),
    sift=(lambda work: len(groups(work)), sift),
    judge=(lambda work: 1, judge),
    vocabulary=(lambda work: 1, find_vocabulary),
    tokens=(lambda work: len(judged(work).buckets), tokenize_bucket),
    cut=(lambda work: len(shards(work)) * (not plan(work).dry_run), cut_shard),
    account=(lambda work: 1, account),
)


def pieces(stage, work):
    """How many pieces of work a stage has."""
    return STAGES[stage][0](work)


def do(stage, number, work):
    """Do a piece of a stage, unless its result is there. A piece that returns nothing is done again."""
    if is_done(stage, number, work):
        return
    (work / stage).mkdir(exist_ok=True)
    found = STAGES[stage][1](number, work)
    if found is not None:
        # No fsync: it would wait for all the text of the piece, and a kill does not need it.
        path = work / stage / f"{number}.tmp"
        path.write_text(json.dumps(found))
        path.replace(path.with_suffix(".json"))


def do_share(stage, final, tmp, _, rank, world_size):
    """A step of datatrove: do every world_size-th piece of a stage. final: the folder to publish then, or None."""
    for number in range(rank, pieces(stage, tmp / "work"), world_size):
        do(stage, number, tmp / "work")
    if final:
        publish(final, tmp)
