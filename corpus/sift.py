"""
What every process of prepare.py does first: a batch of rows through the rules that look at one document alone.

    rows -> documents -> robots, licence, language, length, scores, heuristics, contamination -> personal data replaced

A result is a file under its final name, or it is not there: after kill -9 the missing work is done again, and nothing
else. All that a document meets here depends on the document alone. Duplicates depend on others, so prepare.py judges
them, in the order of the input, by the keys that are computed here. Hence any number of processes gives the same bytes.
"""

import hashlib
import json
import multiprocessing
import os
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import numpy as np

from corpus.audit import add
from corpus.dedup import LONG, fingerprint, pieces, signatures, words
from corpus.heuristics import reason as broken_rule
from corpus.language import detect
from corpus.pii import TAGS, scrub_pii
from corpus.quality import as_number, column_reason
from corpus.reservations import RESERVED, reservation
from corpus.robots import host_key, verdict
from corpus.shards import DOCUMENT, handfuls, long_parts
from engine.help import how_to_install
from engine.readers import documents, id_hash

# Kinds of personal data: email, ip, iban.
KINDS = tuple(TAGS)


class Rules(SimpleNamespace):
    """
    What decides about one document: the settings of prepare.py, for every process.

        files, text_field, wanted       where documents come from: readers.check of each file, columns to read
        spool                           the folder that batches are written to
        name, source_by                 the name of the only source, or the column that names it
        defaults                        {"language", "license"} of documents that do not say
        sure                            probability from which a language is believed that no column says; 0: none is
        robots                          arguments of robots.verdict, or None
        reservations                    reservations.open_reservations(path), or None
        columns                         arguments of quality.column_reason
        limits                          heuristics.Limits, of code they ask nothing; or None
        contamination, near             dedup.Contamination and dedup.NearDuplicates, or None
        tok, min_tokens, max_tokens     the vocabulary by which a document is too short or too long, or None
        pii, pii_in_code                is personal data replaced, and in code too?
        strict                          raise where a URL is none
    """

    def documents(self, rows):
        """The documents of a batch, with a language where no column says one."""
        for doc in documents(self.files, rows, self.text_field, self.wanted):
            if self.sure and doc["text"] is not None:
                language = doc.get("language") or detect(doc["text"], self.sure)
                if language:
                    doc["language"] = language
            yield doc


# ----------------------------------------------------------------------------------------------------------------------
# the spool


def sift(rules, number, rows):
    """
    Rows of a batch -> two files in the spool, which sifted() reads again.

        {number}.text    UTF-8 of the documents that pass, in the order of the input, each with a line of JSON behind it
        {number}.npz     an array of spool_type; and as JSON their ids and URLs, the groups, what was removed and why,
                         what the hosts said

    The second is renamed when both are whole, so where it stands the batch is done.
    """
    done = rules.spool / f"{number}.npz"
    if done.exists():
        return
    info = SimpleNamespace(ids=[], urls=[], groups={}, removed=[], columns=[], hosts={})
    info.robots = dict(outcomes={}, blocked={}, agents={})
    spooled = []
    with open(rules.spool / f"{number}.text", "wb") as f:
        for some in handfuls(enumerate(rules.documents(rows)), 300_000, lambda one: len(one[1]["text"] or "")):
            candidates = by_columns(rules, some, info)
            for one in by_words(rules, candidates, info):
                begin = f.tell()
                replaced, tokens, digest = write_scrubbed(f, rules, one.doc)
                end = f.tell()
                if rules.tok and not rules.min_tokens <= tokens <= (rules.max_tokens or tokens):
                    f.seek(begin)
                    remove(one, "tokens", info)
                    continue
                # In the order of spool_type. The stream, 0, is not known before all batches are.
                spooled.append((
                    id_hash(one.id),
                    # Of the text as it was: two that differ in an address alone are two.
                    fingerprint(one.doc["text"]),
                    number,
                    begin,
                    end - begin,
                    one.group,
                    0,
                    one.row,
                    one.size,
                    one.bands,
                    replaced,
                ))
                # For kept.parquet, which is written in another order: a line behind the text.
                about = dict(id=one.id, url=one.url, sha256=digest, bytes=one.size)
                about.update(zip(KINDS, replaced.tolist()))
                f.write(json.dumps(about).encode() + b"\n")
                info.ids.append(one.id)
                info.urls.append(one.url)
    info.groups = list(info.groups)
    said = json.dumps(vars(info)).encode()
    with open(f"{done}.tmp", "wb") as f:
        np.savez(f, documents=np.array(spooled, spool_type(rules)), info=np.array(said))
    os.replace(f.name, done)


def spool_type(rules):
    """The numpy type of a document in {number}.npz: what stays in memory to the end, and what its copies need."""
    bands = rules.near.bands if rules.near else 0
    return np.dtype([
        *DOCUMENT.descr,                    # group: number of (source, language, license) in info.groups
        ("row", np.int64),                  # of the batch: the order of the input
        ("size", np.int64),                 # bytes before personal data was replaced
        ("bands", np.uint64, (bands,)),     # near-duplicates share one
        ("pii", np.int64, (len(KINDS),)),   # what was replaced, by kind
    ])


def sifted(spool, number):
    """What sift wrote: (array of spool_type, info)."""
    with np.load(spool / f"{number}.npz", allow_pickle=False) as saved:
        return saved["documents"], SimpleNamespace(**json.loads(saved["info"].item()))


def write_scrubbed(f, rules, doc):
    """
    Write a document without personal data as UTF-8. Returns how much was replaced, by kind: int64 (kinds,); where they
    are asked for, its tokens with begin and end; and the sha256 of the text as it was.

    Part by part, since of a document of 100 MB one copy is enough. Apertus left code as it is.
    """
    scrub = rules.pii and (rules.pii_in_code or doc.get("language") != "code")
    replaced = np.zeros(len(KINDS), np.int64)
    tokens = 2
    digest = hashlib.sha256()
    for part in long_parts(doc["text"]):
        digest.update(part.encode())
        if scrub:
            part, counts = scrub_pii(part)
            replaced += [counts[kind] for kind in KINDS]
        f.write(part.encode())
        if rules.tok:
            tokens += len(rules.tok.encode_array(part))
    return replaced, tokens, digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# the rules about one document


def by_columns(rules, docs, info):
    """Candidates: what stays of [(row, document)] by its URL and columns. The others go to info.removed."""
    staying = []
    for row, doc in docs:
        for column, value in rules.defaults.items():
            if value and doc.get(column) is None:
                doc[column] = value
        source = str(doc.get(rules.source_by) or "none") if rules.source_by else rules.name
        language, license = (str(doc.get(column) or "") for column in ("language", "license"))
        group = info.groups.setdefault((source, language, license), len(info.groups))
        url = doc.get("url")
        one = SimpleNamespace(
            doc=doc,
            id=doc["id"],
            row=row,
            group=group,
            url=url if isinstance(url, str) else None,
            size=len((doc["text"] or "").encode()),
            bands=(),
        )
        reason = reason_by_columns(rules, one, info)
        if reason:
            remove(one, reason, info)
        else:
            staying.append(one)
    return staying


def reason_by_columns(rules, one, info):
    """Why a candidate goes by its URL and its columns, or None. ValueError in a strict run, for a URL that is none."""
    doc = one.doc
    if doc["text"] is None:
        info.columns = info.columns or doc["columns"]
        return "unreadable:" + doc["problem"]
    url = doc.get("url")
    if rules.strict and url and not host_key(url):
        raise ValueError(f"{one.id}: {url!r} is not a URL (--strict)")
    if not doc["text"].strip():
        return "empty"
    outcome = verdict(url, **rules.robots) if rules.robots else "kept:"
    reserved = reservation(doc, rules.reservations) if outcome.startswith("kept:") else None
    if reserved:
        outcome = f"drop:{reserved}"
    if rules.robots:
        note_outcome(info, outcome, host_key(url), one.size)
    if outcome.startswith("drop:"):
        return outcome.removeprefix("drop:")
    # A token has at least one byte: most texts that are too short need not be tokenized.
    few = rules.tok and one.size + 2 < rules.min_tokens
    reason = column_reason(doc, **rules.columns) or ("tokens" if few else None)
    language = str(doc.get("language") or "")
    if not reason and rules.limits and language != "code":
        reason = broken_rule(doc["text"], language, rules.limits)
    return reason


def note_outcome(info, outcome, host, size):
    """Count an outcome of robots.verdict, what its host has, and whose rule it was that refused."""
    fate, reason, *particulars = outcome.split(":")
    if host:
        has = {"unparsable": "unparsable", "no-robots": "without"}
        info.hosts[host] = has.get(reason, "with")
    one = [1, size]
    add(info.robots["outcomes"], {f"{fate}:{reason}": one})
    # A document without a URL has no host, and may be reserved by its columns.
    if host and reason in ("robots", "blocked-domain", *RESERVED):
        add(info.robots["blocked"], {host: one})
    if reason == "robots":
        add(info.robots["agents"], {particulars[0]: one})


def by_words(rules, candidates, info):
    """What stays of the candidates by its words. Gives each its keys for near-duplicates; the others are removed."""
    if not candidates or not (rules.near or rules.contamination):
        return candidates
    texts = [one.doc["text"] for one in candidates]
    ids, ends = words([text[:LONG] for text in texts])
    if rules.near:
        keys = rules.near.keys(signatures(ids, ends))
        for one, bands in zip(candidates, keys):
            one.bands = bands
    gone = contaminated(rules.contamination, texts, ids, ends) if rules.contamination else {}
    for i, prompt in gone.items():
        remove(candidates[i], f"contaminated:prompt {prompt}", info)
    return [one for i, one in enumerate(candidates) if i not in gone]


def contaminated(contamination, texts, ids, ends):
    """
    {number of a text: number of the evaluation prompt in it}. ids, ends: those of dedup.words(texts).

    One look at all ids rules nearly every text out. A long one, whose ids are not all there, is always read.
    """
    hits = contamination.candidates(ids)
    hit = np.searchsorted(ends, hits, side="right").tolist()
    long = [i for i, text in enumerate(texts) if len(text) > LONG]
    gone = {}
    for i in {*hit, *long}:
        prompts = (contamination.check(part) for part in pieces(texts[i], overlap=20_000))
        prompt = next((prompt for prompt in prompts if prompt is not None), None)
        if prompt is not None:
            gone[i] = prompt
    return gone


def remove(one, reason, info):
    """A candidate goes: prepare.judge writes it down."""
    info.removed.append((one.row, one.group, one.id, one.url, reason, one.size))


def scores(rules, number, rows, field):
    """First pass of "keep the top share": [(id, language, score)] of a batch."""
    found = []
    for doc in rules.documents(rows):
        if doc["text"] is None:
            continue
        if field not in doc:
            raise ValueError(f"no column {field!r} for --score_field; the data has {', '.join(doc)}")
        score = as_number(field, doc[field])
        if score is not None:
            language = doc.get("language") or rules.defaults["language"]
            found.append((doc["id"], str(language), score))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# processes


# What every worker has: set once in each by start().
_shared = None


def start(shared):
    """In a new worker: keep what all tasks share, and end when the main process does."""
    global _shared
    _shared = shared
    threading.Thread(target=end_with_the_main_process, daemon=True).start()


def end_with_the_main_process():
    """After kill -9 the main process cannot tell its workers to end: they would wait for a batch for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def call(work, args):
    """
    In a worker: (result, None) or (None, message).

    A raised error would come back with two tracebacks, and what the user did wrong is told in one line.
    """
    try:
        return work(*_shared, *args), None
    except (ValueError, OSError, ModuleNotFoundError) as e:
        return None, f"{e}{how_to_install(e)}"


def ordered(work, shared, tasks, workers):
    """
    Yield (task, work(*shared, *args)) in the order of tasks, an iterable of (task, args), done by so many processes.

    At most two tasks a process are on their way, so memory does not grow with their number. workers=1: in this
    process. ValueError: what a worker could not do, or that one was killed.
    """
    if workers == 1:
        for task, args in tasks:
            yield task, work(*shared, *args)
        return
    # A forked process shares what is there already, where a spawned one would get a copy.
    kind = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    context = multiprocessing.get_context(kind)
    with ProcessPoolExecutor(workers, context, start, (shared,)) as pool:
        waiting = deque()
        try:
            for task, args in tasks:
                waiting.append((task, pool.submit(call, work, args)))
                if len(waiting) >= 2 * workers:
                    yield result(*waiting.popleft())
            while waiting:
                yield result(*waiting.popleft())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def result(task, future):
    """(task, its result), when it is there."""
    try:
        value, error = future.result()
    except BrokenProcessPool:
        raise ValueError(
            "a worker process was killed, most likely for want of memory: try fewer --workers; "
            "the same command goes on where it stopped"
        ) from None
    if error:
        raise ValueError(error)
    return task, value
