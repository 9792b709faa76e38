"""
What every process of prepare.py does first: a batch of rows through the rules that look at one document alone.

    sift       rows -> documents -> robots, licence, language, length, scores, contamination -> without personal data -> spool

A result is a file under its final name or it is not there: after kill -9 the work that is missing is done again, nothing else.
All that a document meets here depends on the document alone; duplicates, which depend on others, are judged by prepare.py in
the order of the input, on the keys that sift computed. So any number of processes gives the same bytes.
"""

import json
import multiprocessing
import os
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from corpus.pii import TAGS, scrub_pii
from corpus.robots import host_key, verdict
from corpus.readers import documents, place
from corpus.dedup import pieces, signatures, text_key, words
from corpus.quality import column_reason
from corpus.shards import long_parts

KINDS = tuple(TAGS)                                      # email, ip, iban: the columns of what was scrubbed
LONG = 1_000_000                                         # characters of a document that near-duplicates are judged by


class Rules:
    """
    What decides about one document. A plain record of settings: files (documents.check), folder of the spool, robots
    (a store or None) with agents, missing, explicit and blocked; columns (arguments of filters.column_reason);
    contamination and near (filters.Contamination, NearDuplicates, or None); pii, pii_in_code; text_field, wanted (columns), name,
    source_by, language, license; strict.
    """

    def __init__(self, **settings):
        self.__dict__.update(settings)

    def reason(self, doc, size, robots):
        """Why this document goes, by its URL and its columns, or None. Counts in `robots` what its host said."""
        if not doc["text"].strip():
            return "empty"
        if self.robots is not None or self.blocked:
            outcome = verdict(doc.get("url") or None, self.robots, self.agents, self.missing, self.blocked, self.explicit)
            self.count(robots, outcome, doc, size)
            if outcome.startswith("drop:"):
                return outcome[5:]
        return column_reason(doc, **self.columns)

    def contaminated(self, texts, ids, ends):
        """{number of a text: why it goes}. ids, ends: filters.words(texts); one look at all of them rules nearly every text out."""
        found = np.searchsorted(ends, self.contamination.candidates(ids), side="right").tolist()
        reasons = {}
        for i in {*found, *(i for i, text in enumerate(texts) if len(text) > LONG)}:
            for part in pieces(texts[i], overlap=20_000):
                prompt = self.contamination.check(part)
                if prompt is not None:
                    reasons[i] = f"contaminated:prompt {prompt}"
                    break
        return reasons

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
    info = dict(files=sorted({i for i, _, _ in rows}), rows=0, ids=[], urls=[], groups=[], removed=[], columns=[], dates=[None, None],
                robots=dict(outcomes={}, hosts={}, blocked={}, agents={}))
    groups, places, sizes, keys, bands, found, texts = {}, [], [], [], [], [], []
    for docs in handfuls(documents(rules.files, rows, rules.text_field, rules.wanted)):
        staying = by_columns(rules, docs, info, groups)
        if staying and (rules.near or rules.contamination):
            staying, some = by_words(rules, staying, info)
            bands.append(some)
        for doc, row, group, url, size in staying:
            date = doc.get("date")
            if isinstance(date, str) and date[:4].isdigit():
                low, high = info["dates"]
                info["dates"] = [min(low or date, date), max(high or date, date)]
            scrub = rules.pii and (rules.pii_in_code or doc.get("language") != "code")
            counts, parts = dict.fromkeys(KINDS, 0), []
            for part in long_parts(doc["text"]):                                 # of a document of 100 MB one copy is enough
                part, hits = scrub_pii(part) if scrub else (part, {})
                parts.append(part.encode())
                for kind, n in hits.items():
                    counts[kind] += n
            keys.append(text_key(doc["text"])[:8])
            info["ids"].append(doc["id"])
            info["urls"].append(url)
            places.append(place(doc["id"]))
            found.append(list(counts.values()))
            texts.append(parts)
            sizes.append((group, size, sum(map(len, parts)), row))
    info["groups"] = list(groups)
    order = sorted(range(len(texts)), key=places.__getitem__)
    offsets, at = np.zeros(len(texts), np.int64), 0
    with open(os.path.join(rules.folder, f"{number}.text.tmp"), "wb") as f:
        for i in order:
            offsets[i], at = at, at + sizes[i][2]
            f.writelines(texts[i])
    sizes = np.array(sizes, np.int64).reshape(-1, 4)
    with open(os.path.join(rules.folder, f"{number}.npz.tmp"), "wb") as f:
        np.savez(f, place=np.array(places, np.uint64), offset=offsets, key=np.frombuffer(b"".join(keys), np.uint64),
                 bands=np.concatenate(bands) if bands else np.zeros((len(texts), 0), np.uint64),
                 group=sizes[:, 0], size=sizes[:, 1], length=sizes[:, 2], row=sizes[:, 3],
                 found=np.array(found, np.int64).reshape(-1, len(KINDS)), info=np.frombuffer(json.dumps(info).encode(), np.uint8))
    for ending in ("text", "npz"):
        path = os.path.join(rules.folder, f"{number}.{ending}")
        os.replace(path + ".tmp", path)


def handfuls(docs, size=300_000):
    """Documents in lists of about so many characters: what numpy does to one page costs mostly the call, and to megabytes the memory."""
    some, n = [], 0
    for doc in docs:
        some.append(doc)
        n += len(doc["text"] or "")
        if n >= size:
            yield some
            some, n = [], 0
    if some:
        yield some


def by_columns(rules, docs, info, groups):
    """[(document, row, group, URL, bytes)] of those that stay by what their URLs and columns say; the others go to info["removed"]."""
    staying = []
    for doc in docs:
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
        size = len(doc["text"].encode())
        reason = rules.reason(doc, size, info["robots"])
        if reason:
            info["removed"].append((info["rows"], group, doc["id"], url, reason, size))
        else:
            staying.append((doc, info["rows"], group, url, size))
    return staying


def by_words(rules, staying, info):
    """Those that stay by their words (evaluation prompts), and their keys for near-duplicates: uint64 (n, bands)."""
    texts = [doc["text"] for doc, *_ in staying]
    ids, ends = words([text[:LONG] for text in texts])
    gone = rules.contaminated(texts, ids, ends) if rules.contamination else {}
    info["removed"] += [(row, group, doc["id"], url, gone[i], size) for i, (doc, row, group, url, size) in enumerate(staying) if i in gone]
    stays = [i for i in range(len(staying)) if i not in gone]
    bands = rules.near.keys(signatures(ids, ends)) if rules.near else np.zeros((len(staying), 0), np.uint64)
    return [staying[i] for i in stays], bands[stays]


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
# processes


_shared = None                                           # what every process has: set once in each by start()


def start(shared):
    global _shared
    _shared = shared
    threading.Thread(target=leave_with_the_main_process, daemon=True).start()


def leave_with_the_main_process():
    """After a kill -9 of it nobody tells the workers to end: they would wait for the next batch for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


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
