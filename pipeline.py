"""
The two things that every process of prepare.py does: a batch of rows through the rules, and a bucket of documents into tokens.

    sift       rows -> documents -> robots, licence, language, length, scores, contamination -> without personal data -> spool
    tokenize   documents of one stretch of the final order -> <s> ids </s>, one after the other

A result is a file under its final name or it is not there: after kill -9 the work that is missing is done again, nothing else.
All that a document meets here depends on the document alone; duplicates, which depend on others, are judged by prepare.py in
the order of the input, on the keys that sift computed. So any number of processes gives the same bytes.
"""

import json
import multiprocessing
import os
import re
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from compliance import TAGS, host_key, scrub_pii, verdict
from documents import documents, place
from filters import column_reason, minhash, pieces, text_key, word_ids

KINDS = tuple(TAGS)                                      # email, ip, iban: the columns of what was scrubbed


class Rules:
    """
    What decides about one document. A plain record of settings: files (documents.check), folder of the spool, robots
    (a store or None) with agents, missing, explicit and blocked; columns (arguments of filters.column_reason);
    contamination and near (filters.Contamination, NearDuplicates, or None); pii, pii_in_code; text_field, wanted (columns), name,
    source_by, language, license; strict.
    """

    def __init__(self, **settings):
        self.__dict__.update(settings)

    def reason(self, doc, ids, size, robots):
        """Why this document goes, or None. Counts in `robots` what its host said."""
        if not doc["text"].strip():
            return "empty"
        if self.robots is not None or self.blocked:
            outcome = verdict(doc.get("url") or None, self.robots, self.agents, self.missing, self.blocked, self.explicit)
            self.count(robots, outcome, doc, size)
            if outcome.startswith("drop:"):
                return outcome[5:]
        if reason := column_reason(doc, **self.columns):
            return reason
        if self.contamination:
            for part in pieces(doc["text"], overlap=20_000):
                prompt = self.contamination.check(part, ids if len(part) == len(doc["text"]) else None)
                if prompt is not None:
                    return f"contaminated:prompt {prompt}"

    def count(self, robots, outcome, doc, size):
        kind, host = ":".join(outcome.split(":")[:2]), host_key(doc.get("url"))
        add(robots["outcomes"], kind, size)
        if host:
            known = "unparsable" if kind.endswith("unparsable") else "without" if kind.endswith("no-robots") else "with"
            robots["hosts"][host] = known
        if kind in ("drop:robots", "drop:blocked-domain"):
            add(robots["blocked"], host, size)
            if kind == "drop:robots":
                add(robots["agents"], outcome.split(":")[2], size)


def add(table, key, size, documents=1):
    """table[key] += (documents, bytes)"""
    row = table.setdefault(key, [0, 0])
    row[0] += documents
    row[1] += size


def sift(rules, number, rows):
    """
    Documents of a batch -> {number}.text, the UTF-8 of those that pass, sorted by the hash of their ids; and {number}.npz: in the
    order of the input, for each of them its row, its place (the hash), where its text lies, its size before and after scrubbing,
    its group, keys for finding duplicates, personal data by kind; and as JSON the ids, the groups, and all that was removed.
    """
    if os.path.exists(os.path.join(rules.folder, f"{number}.npz")):             # done before a kill
        return
    info = dict(rows=0, ids=[], urls=[], groups=[], removed=[], columns=[], dates=[None, None],
                robots=dict(outcomes={}, hosts={}, blocked={}, agents={}))
    groups, places, sizes, keys, bands, found, texts = {}, [], [], [], [], [], []
    for doc in documents(rules.files, rows, rules.text_field, rules.wanted):
        if rules.license:
            doc.setdefault("license", rules.license)
        if rules.language:
            doc.setdefault("language", rules.language)
        key = (str(doc.get(rules.source_by) or "none") if rules.source_by else rules.name,
               str(doc.get("language") or ""), str(doc.get("license") or ""))
        group = groups.setdefault(key, len(groups))
        url = doc["url"] if isinstance(doc.get("url"), str) else None
        info["rows"] += 1
        if rules.strict and doc.get("url") and not host_key(doc["url"]):
            raise ValueError(f"{doc['id']}: {doc['url']!r} is not a URL (--strict)")
        if doc["text"] is None:
            info["columns"] = info["columns"] or doc["columns"]
            info["removed"].append((info["rows"], group, doc["id"], None, "unreadable:" + doc["problem"], 0))
            continue
        raw = doc["text"]
        size = len(raw.encode())
        ids = word_ids(raw[:1_000_000]) if rules.near or rules.contamination else None
        reason = rules.reason(doc, ids, size, info["robots"])
        if reason:
            info["removed"].append((info["rows"], group, doc["id"], url, reason, size))
            continue
        date = doc.get("date")
        if isinstance(date, str) and date[:4].isdigit():
            low, high = info["dates"]
            info["dates"] = [min(low or date, date), max(high or date, date)]
        keys.append(text_key(raw)[:8])
        if rules.near:
            bands.append(rules.near.keys(minhash(raw, ids)))
        scrub = rules.pii and (rules.pii_in_code or doc.get("language") != "code")
        counts, parts = dict.fromkeys(KINDS, 0), []
        for part in long_parts(raw):                                             # of a document of 100 MB one copy is enough
            part, hits = scrub_pii(part) if scrub else (part, {})
            parts.append(part.encode())
            for kind, n in hits.items():
                counts[kind] += n
        info["ids"].append(doc["id"])
        info["urls"].append(url)
        places.append(place(doc["id"]))
        del raw, doc
        found.append(list(counts.values()))
        texts.append(b"".join(parts))
        sizes.append((group, size, len(texts[-1]), info["rows"]))
    info["groups"] = list(groups)
    order = sorted(range(len(texts)), key=places.__getitem__)
    offsets, at = np.zeros(len(texts), np.int64), 0
    with open(os.path.join(rules.folder, f"{number}.text.tmp"), "wb") as f:
        for i in order:
            offsets[i], at = at, at + len(texts[i])
            f.write(texts[i])
    sizes = np.array(sizes, np.int64).reshape(-1, 4)
    with open(os.path.join(rules.folder, f"{number}.npz.tmp"), "wb") as f:
        np.savez(f, place=np.array(places, np.uint64), offset=offsets, key=np.frombuffer(b"".join(keys), np.uint64),
                 bands=np.array(bands, np.uint64) if bands else np.zeros((len(texts), 0), np.uint64),
                 group=sizes[:, 0], size=sizes[:, 1], length=sizes[:, 2], row=sizes[:, 3],
                 found=np.array(found, np.int64).reshape(-1, len(KINDS)), info=np.frombuffer(json.dumps(info).encode(), np.uint8))
    for ending in ("text", "npz"):
        path = os.path.join(rules.folder, f"{number}.{ending}")
        os.replace(path + ".tmp", path)


def sifted(folder, number):
    """What sift wrote: (arrays, info)."""
    with np.load(os.path.join(folder, f"{number}.npz"), allow_pickle=False) as saved:
        arrays = {name: saved[name] for name in saved.files}
    return arrays, json.loads(arrays.pop("info").tobytes())


def scores(rules, number, rows, field):
    """First pass of "keep the top share": [(id, language, score)] of a batch."""
    found = []
    for doc in documents(rules.files, rows, rules.text_field, rules.wanted):
        if doc["text"] is not None:
            if field not in doc:
                raise ValueError(f"no column {field!r} for --score_field; the data has {', '.join(doc)}")
            if doc[field] is not None:
                found.append((doc["id"], str(doc.get("language") or rules.language or ""), float(doc[field])))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# spool to tokens


class Bucket:
    """A stretch of the final order: for each document the batch it is in, where, how long, its stream (of a source and split)."""

    def __init__(self, number, batch, offset, length, stream):
        self.number, self.batch, self.offset, self.length, self.stream = number, batch, offset, length, stream

    def texts(self, folder):
        """Yield the documents' texts, in order."""
        files = {}
        try:
            for batch, offset, length in zip(self.batch.tolist(), self.offset.tolist(), self.length.tolist()):
                if batch not in files:
                    if len(files) > 200:                                         # of the open files that a process may have
                        files.pop(next(iter(files))).close()
                    files[batch] = open(os.path.join(folder, f"{batch}.text"), "rb")
                files[batch].seek(offset)
                yield files[batch].read(length).decode()
        finally:
            for f in files.values():
                f.close()


def tokenize(tok, folder, bucket):
    """
    Documents of a bucket -> {number}.tokens, the streams one after the other, and {number}.json: [stream, tokens] in that order,
    and the number of tokens of each document.
    """
    path = os.path.join(folder, f"{bucket.number}.tokens")
    if os.path.exists(path.replace(".tokens", ".json")):
        return 0
    dtype = np.uint16 if tok.vocab_size <= 2**16 else np.uint32
    streams, counts = {}, []
    encode = lambda part: tok.encode_array(part).astype(dtype)
    for text, stream in zip(bucket.texts(folder), bucket.stream.tolist()):
        before = len(streams.setdefault(stream, []))
        streams[stream] += [np.array([tok.bos], dtype), *(encode(part) for part in long_parts(text)), np.array([tok.eos], dtype)]
        counts.append(sum(len(part) for part in streams[stream][before:]))
    with open(path, "wb") as f:
        for stream in sorted(streams):
            for part in streams[stream]:
                f.write(part.tobytes())
    sizes = [[stream, sum(len(part) for part in streams[stream])] for stream in sorted(streams)]
    with open(os.path.join(folder, f"{bucket.number}.json.tmp"), "w", encoding="utf-8") as f:
        json.dump(dict(streams=sizes, counts=counts), f)
    os.replace(f.name, f.name.removesuffix(".tmp"))
    return sum(counts)


# No token of Apertus' expression crosses these places: after a line break before a letter, before a space between letters.
_BORDER = re.compile(r"(?<=\n)(?=[^\W\d_])|(?<=[^\W\d_])(?= [^\W\d_])")


def long_parts(text, size=1_000_000):
    """A text in parts of about a million characters whose tokens, one after the other, are those of the text: memory stays bounded."""
    begin = 0
    while len(text) - begin > size:
        border = _BORDER.search(text, begin + size, begin + size + 100_000)
        end = border.start() if border else begin + size                         # 100,000 characters without a border: cut anywhere
        yield text[begin:end]
        begin = end
    yield text[begin:] if begin else text


# ----------------------------------------------------------------------------------------------------------------------
# processes


_shared = None                                           # what every process has: set once in each by start()


def start(shared):
    global _shared
    _shared = shared


def call(work, args):
    """In a worker. What the user did wrong comes back as a value, so that it is told in one line and not as two tracebacks."""
    try:
        return work(*_shared, *args), None
    except (ValueError, OSError) as e:
        return None, str(e)


def ordered(work, shared, tasks, workers):
    """
    Yield (task, work(*shared, *args of the task)) in the order of tasks [(task, args)], done by so many processes.

    At most two tasks a process are on their way, so memory does not grow with their number. workers=1: in this process.
    """
    if workers == 1:
        for task, args in tasks:
            yield task, work(*shared, *args)
        return
    kind = "fork" if "fork" in multiprocessing.get_all_start_methods() and os.name == "posix" else None    # what is shared is not copied
    with ProcessPoolExecutor(workers, multiprocessing.get_context(kind), start, (shared,)) as pool:
        waiting = deque()

        def result():
            task, future = waiting.popleft()
            try:
                value, error = future.result()
            except BrokenProcessPool:
                raise ValueError("a worker process was killed, most likely for want of memory: try fewer --workers; the same command "
                                 "goes on where it stopped") from None
            if error:
                raise ValueError(error)
            return task, value

        try:
            for task, args in tasks:
                waiting.append((task, pool.submit(call, work, args)))
                if len(waiting) >= 2 * workers:
                    yield result()
            while waiting:
                yield result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
