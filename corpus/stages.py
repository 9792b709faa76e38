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
What it returns is written to OUT.tmp/work/STAGE/NUMBER.json when all its other files are there. A piece depends on
nothing but the plan and the stages before, so any number of processes writes the same bytes, and a killed run repeats
only the pieces that are missing.
"""

import hashlib
import os
import shutil
import subprocess
import time
from collections import Counter
from functools import lru_cache
from importlib import metadata
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.compute as pc
from pyarrow.parquet import read_table, write_table

import tokenizer as tokenizers
from configurator import ROOT
from corpus import dedup, ledger
from corpus.audit import verify
from corpus.language import detect
from corpus.pii import TAGS, scrub_pii
from corpus.robots import AGENTS, COLUMNS, blocked_domains, host_key, open_reservations, open_robots, refusal
from corpus.rules import TOXICITY, as_number, broken, by_language, column_rules, listed, score_function, text_rules
from corpus.rules import top_thresholds
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


def result(stage, number, work):
    """What a piece of a stage has returned."""
    return read_json(work / stage / f"{number}.json")


def results(stage, work):
    """What all pieces of a stage have returned, in order."""
    return (result(stage, number, work) for number in range(pieces(stage, work)))


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
    for file, part in groups(work)[number]:
        docs = [dict(id=file["name"], file=file["name"], text=None, problem=file["problem"])]
        for doc in docs if file["problem"] else documents(file, part, asked.text_field, wanted):
            if doc["text"] is not None and asked.detect_language and not doc.get("language"):
                doc["language"] = detect(doc["text"], asked.detect_language) or None
            for name, value in dict(language=asked.default_language, license=asked.default_license).items():
                if value and doc.get(name) is None:
                    doc[name] = value
            if doc["text"] is not None and score:
                doc["score"] = score(doc["text"])
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
        agents=tuple(agent for agent in agents if agent != "*" or not asked.agents_no_star),
        missing=asked.missing,
        blocked=given(blocked_domains, asked.blocked) or (),
        explicit=asked.agents_no_star,
    )
    below = TOXICITY if asked.max_value == "apertus" else by_language("max_value", asked.max_value)
    prompts = given(dedup.read_prompts, asked.decontaminate)
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
        contamination=None if prompts is None else dedup.Contamination(prompts),
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
    return column_rules(**rules(work).columns, top=field and (field, result("thresholds", 0, work)))


def score_group(number, work):
    """The first pass of "keep the best": id, language and score of each document."""
    field, rows = plan(work).score_field, []
    for doc in documents_of(number, work):
        if doc["text"] is None:
            continue
        if field not in doc:
            raise ValueError(f"no column {field!r} for --score_field; the data has {', '.join(doc)}")
        score = as_number(field, doc[field])
        if score is not None:
            rows.append((doc["id"], str(doc.get("language") or ""), score))
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
        language=str(doc.get("language") or ""),
        license=str(doc.get("license") or ""),
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
    """Write rows of the ledger, with nulls where no stage knows better yet, and what judge() needs in addition."""
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
    reason, text = rows["reason"].to_numpy().copy(), rows["text"].to_numpy()
    # A planted passage that is in the corpus as well would be seen more often than promised.
    before = np.array([dedup.fingerprint(passage["text"]) for passage in probes(work)], np.uint64)
    if asked.known:
        known, gone = pyarrow.concat_tables(ledger.ledger(asked.known, ["text", "reason"])), stays_out(asked.known)
        before = np.append(before, known.filter(pc.equal(known["reason"], ""))["text"])
        for i, row in enumerate(rows.select(["id", "url", "text"]).to_pylist()):
            reason[i] = reason[i] or reason_of(row, gone)[0]
    if asked.dedup:
        reason[(reason == "") & np.isin(text, before)] = "duplicate"
        left = np.flatnonzero(reason == "")
        reason[np.delete(left, np.unique(text[left], return_index=True)[1])] = "duplicate"
    if asked.near_dedup:
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
    left, copies = np.flatnonzero(reason == ""), planted(work)
    if not len(left):
        counts = ", ".join(f"{n:,} {why}" for why, n in Counter(reason).most_common(5))
        raise ValueError(f"no document is left ({counts or 'the files are empty'})")
    sources = [name for name in pc.unique(rows["source"]).to_pylist() if name != "probes" or not copies]
    sources = sorted(sources) + ["probes"] * bool(copies)
    ends = halve(work, *(rows[name][left[0]].as_py() for name in ("group", "offset"))) if len(left) == 1 else []
    write_rows(ends + copies, work, EXTRA)
    extra = read_table(sifted(work, EXTRA), columns=rows.column_names)
    reason = np.append(reason, extra["reason"])
    kept = np.flatnonzero(reason == "")
    rows = pyarrow.concat_tables([rows, extra]).select(["source", "text", *PLACE]).take(kept)
    documents = np.zeros(len(kept), DOCUMENT)
    documents["row"], documents["stream"] = kept, validation(rows, plan(work))
    documents["stream"] += 2 * pc.index_in(rows["source"], pyarrow.array(sources)).to_numpy()
    for name in PLACE:
        documents[name] = rows[name]
    documents["written"][0] -= sum(row["written"] for row in ends)
    np.save(work / "documents.npy", documents[np.lexsort((documents["id_hash"], documents["stream"]))])
    write_table(pyarrow.table(dict(reason=reason)), work / "reasons.parquet")
    return dict(sources=sources, groups=n)


def validation(rows, asked):
    """Whether a row is for validation, by the hash of its text or id: bool (n,). Of a single document its end is."""
    hashes, whole = rows["id_hash" if asked.by_id else "text"].to_numpy(), rows["text"].to_numpy() != 0
    if whole.sum() == 1:
        return ~whole & (rows["group"].to_numpy() != EXTRA)
    val = whole & (hashes / 2.0**64 < asked.val_share)
    least, most = hashes[whole].min(), hashes[whole].max()
    # Of a few documents, of which none may be below, the one with the smallest hash is, with its copies.
    return val if val.any() or least == most else whole & (hashes == least)


def halve(work, group, offset):
    """Cut the only kept document after a line break or a space. Returns the row of its end, [] if it has none."""
    row = next(row for row in read_table(sifted(work, group)).to_pylist() if (row["reason"], row["offset"]) == ("", offset))
    raw = sifted(work, group).with_suffix(".text").read_bytes()[offset:][:row["written"]]
    borders = [raw.find(mark, int(len(raw) * (1 - plan(work).val_share))) + 1 for mark in (b"\n", b" ")]
    cut = next((border for border in borders if 0 < border < len(raw)), len(raw))
    return [row | NOTHING | dict(offset=offset + cut, written=len(raw) - cut)] * (cut < len(raw))


@cached
def probes(work):
    """[{id, repetitions, text}] of the passages to plant: the repetitions are dealt out in the order of a hash."""
    texts, times = given(dedup.read_prompts, plan(work).probes) or [], plan(work).repetitions
    named = sorted(((f"probe/{i}", text) for i, text in enumerate(texts)), key=lambda one: id_hash("".join(one)))
    return [dict(id=name, repetitions=times[n % len(times)], text=text) for n, (name, text) in enumerate(named)]


def planted(work):
    """The rows of the planted copies. Each has a place of its own in the order, so that they are spread."""
    rows = []
    with open(sifted(work, EXTRA).with_suffix(".text"), "wb") as f:
        for passage in probes(work):
            row = dict(NOTHING, id=passage["id"], source="probes", language="", license="", reason="", group=EXTRA,
                       offset=f.tell(), written=f.write(passage["text"].encode()))
            rows += [dict(row, id_hash=id_hash(f"{passage['id']}#{k}")) for k in range(passage["repetitions"])]
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# tokens


@cached
def judged(work):
    """What judge() returned, the documents, and their buckets."""
    documents = np.load(work / "documents.npy", mmap_mode="r", allow_pickle=False)
    return SimpleNamespace(**result("judge", 0, work), documents=documents, buckets=buckets_of(documents))


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
    elif os.path.isfile(f"{name}/tokenizer_config.json"):
        # Of a Hugging Face model: the Minis' ids are not those of --tokenizer=apertus.
        import convert

        tok = convert.tokenizer_from_hf(name)
        # A document ends a text, also where the model's own end is that of a turn.
        tok.eos = tok.special.get("</s>", tok.eos)
        tokenizers.write_bpe(tok, path)
    else:
        tok = tokenizers.load(name)
        if not tok.name.startswith("bpe:"):
            return dict(name=tok.name)
        shutil.copy(tok.name.removeprefix("bpe:"), path)
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
    return tokenizers.load(result("vocabulary", 0, work)["name"])


def tokenize_bucket(number, work):
    """A bucket -> tokens/{number}.ids, and tokens/{number}.counts of each document, int64. Returns {stream: tokens}."""
    documents, path = judged(work).buckets[number], work / "tokens" / f"{number}.ids"
    counts = write_tokens(tok_of(work), texts_of(documents, work), path)
    # np.save hides the error of a full disk.
    path.with_suffix(".counts").write_bytes(counts)
    return {str(stream): int(counts[documents["stream"] == stream].sum()) for stream in np.unique(documents["stream"])}


@cached
def shards(work):
    """[{stream, file, begin, end}] of all shards. begin, end: a stretch of the tokens of all buckets in a row."""
    found, names, sizes, end, most = [], [safe(name) for name in judged(work).sources], Counter(), 0, plan(work).shard_tokens
    for bucket in results("tokens", work):
        sizes.update(bucket)
    for stream in range(2 * len(names)):
        begin, end, name = end, end + sizes[str(stream)], names[stream // 2]
        # Two sources may differ in characters that no file name has.
        name += f"-{stream // 2}" * (names.index(name) < stream // 2)
        for k, at in enumerate(range(begin, end, most)):
            file = f"{name}_" * (len(names) > 1) + f"{SPLITS[stream % 2]}_{k:05d}.npy"
            found.append(dict(stream=stream, file=file, begin=at, end=min(at + most, end)))
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
    streams = {source: dict(train=[], val=[]) for source in judged(work).sources}
    for shard, entry in zip(shards(work), results("cut", work)):
        streams[judged(work).sources[shard["stream"] // 2]][SPLITS[shard["stream"] % 2]].append(entry)
    name = "tokenizer.json" if (new / "tokenizer.json").exists() else tok.name
    of = "sha256 of its id" if asked.by_id else "BLAKE2b of its text, in Unicode form NFC with single spaces,"
    robots, store = rules(work).robots, asked.robots or asked.blocked
    ledger.write_account(
        new,
        dict(tokenizer=name, tokenizer_hash=tok.hash, vocab_size=tok.vocab_size, bos=tok.bos, eos=tok.eos),
        streams,
        dict(
            run=describe(name, asked),
            inputs=inputs_of(work),
            ignored=asked.ignored,
            rule=f"A document is for validation where 64 bits of the {of} over 2^64 are below {asked.val_share}; of a "
            "single document it is the end.",
            pii=dict(scrubbed=asked.pii, in_code=asked.pii_in_code),
            probes=write_probes(work, tok) if probes(work) else None,
            robots=robots and dict(
                store=store, sha256=digest(store), agents=robots["agents"], missing=asked.missing,
                only_explicit=asked.agents_no_star, **ledger.opt_outs(new, robots["store"])),
        ),
    )
    if not asked.dry_run:
        verify(new)


def rows_of_all(work):
    """Yield the rows of all groups as tables of the ledger."""
    documents, reasons = judged(work).documents, read_table(work / "reasons.parquet")["reason"]
    counts = [np.fromfile(work / "tokens" / f"{n}.counts", np.int64) for n in range(len(judged(work).buckets))]
    tokens = np.concatenate(counts)
    begins, files = np.array([shard["begin"] for shard in shards(work)]), [shard["file"] for shard in shards(work)]
    at = np.cumsum(tokens) - tokens
    shard = np.searchsorted(begins, at, "right") - 1
    # The number of each row among the documents.
    place, done = np.full(len(reasons), -1), 0
    place[documents["row"]] = np.arange(len(documents))
    for number in [*range(judged(work).groups), EXTRA]:
        rows = read_table(sifted(work, number))
        mine = place[done:done + len(rows)]
        kept, gone = documents[mine], mine < 0
        columns = dict(zip(rows.column_names, rows.columns), reason=reasons[done:done + len(rows)])
        columns["split"] = pyarrow.array(np.take(SPLITS, kept["stream"] % 2), mask=gone)
        columns["shard"] = pyarrow.array(np.take(files, shard[mine]), mask=gone)
        columns["offset"] = pyarrow.array((at - begins[shard])[mine], mask=gone)
        columns |= dict(tokens=tokens[mine] * ~gone, written=kept["written"] * ~gone)
        columns |= {kind: rows[kind].to_numpy() * ~gone for kind in TAGS}
        done += len(rows)
        yield pyarrow.table(columns)


def inputs_of(work):
    """The files as check() describes them, with those that --max_bytes did not reach."""
    files = {}
    for number, group in enumerate(groups(work)):
        unread = None if number < judged(work).groups else "not read: --max_bytes was reached"
        for file, _ in group:
            files.setdefault(file["name"], dict(file, problem=file["problem"] or unread))
    return [{key: file[key] for key in ("name", "path", "bytes", "sha256", "problem")} for file in files.values()]


def write_probes(work, tok):
    """Write probes.json, which studies/memorize.py reads. Returns its summary for the report."""
    file, times = plan(work).probes, plan(work).repetitions
    passages = [dict(passage, ids=tok.encode(passage["text"])) for passage in probes(work)]
    write_json(work.parent / "data" / "probes.json", dict(
        tokenizer_hash=tok.hash, repetitions=times, source="probes", probes=passages))
    return dict(file=file, sha256=sha256(file), passages=len(passages), repetitions=times,
                documents=sum(passage["repetitions"] for passage in passages))


def describe(name, asked):
    """The command, the time, and the versions that decide."""
    git = subprocess.getoutput(f"git -C '{ROOT}' rev-parse HEAD")
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(asked.began))
    packages = {package: metadata.version(package) for package in ("numpy", "pyarrow", "rensa", "tiktoken")}
    return dict(out=asked.out, command=asked.command, date=date, seconds=round(time.time() - asked.began),
                code=git if len(git) == 40 else None, packages=packages, tokenizer=name)


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
    thresholds=(lambda work: int(bool(plan(work).score_field)), find_thresholds),
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
        write_json(work / stage / f"{number}.json", found)
