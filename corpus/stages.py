"""
The stages from files to a data folder. prepare.py runs them on this machine, corpus/cluster.py on many.

    check         each file: can it be read to its end, its sha256, where it can be cut into parts
    scores        with --score_field: the scores of all documents...
    thresholds    ...and which of them the best of each language reach
    sift          each group of parts: the rules about one document alone; personal data replaced
    judge         in the order of the input: was this text, or nearly this text, there before? train or validation?
    vocabulary    a BPE vocabulary of the training split, if no tokenizer is named
    tokens        each bucket of documents, in the final order
    cut           each shard
    account       meta.json, documents.parquet, report.json, report.md; everything checked from the files

A stage is a row of STAGES: a name, how many pieces of work there are, and a function of (number, work) that does one of
them. run_stage() does a share of them. A piece writes files of its own under OUT.tmp/work, the last one by a rename,
and depends on nothing but the plan and the stages before: any number of processes writes the same bytes, and a killed
run repeats only the pieces that are missing.
"""

import hashlib
import os
import shutil
import subprocess
import time
from collections import Counter
from functools import lru_cache
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet

import tokenizer as tokenizers
from configurator import ROOT
from corpus import ledger
from corpus.audit import verify
from corpus.dedup import LONG, Contamination, Seen, band_keys, bands_of, fingerprint, read_prompts, signatures, words
from corpus.language import detect
from corpus.pii import TAGS, scrub_pii
from corpus.robots import AGENTS, COLUMNS, blocked_domains, host_key, open_reservations, open_robots, refusal
from corpus.rules import TOXICITY, as_number, broken, by_language, column_rules, listed, score_function, text_rules
from corpus.rules import top_thresholds
from corpus.shards import DOCUMENT, dtype_of, long_parts, safe, stretch, texts, tokenize, write_shard
from corpus.withdraw import reason_of, stays_out
from engine.files import read_json, sha256, write_json
from engine.readers import check, documents, files_of, id_hash, rows_of, writable

# Bytes of text in a group, and in a bucket.
GROUP, BUCKET = 4 << 20, 16 << 20
# Characters that a vocabulary is trained on at most.
BPE_CHARS = 200_000_000
# Characters of documents whose words are hashed together: one page at a time takes four times as long.
HANDFUL = 300_000


def cached(function):
    """A function of the work folder, computed once in a process."""
    CACHES.append(lru_cache(1)(function))
    return CACHES[-1]


CACHES = []


@cached
def plan(work):
    """The settings of prepare.py, and files, ignored, by_id, name, command and began."""
    return SimpleNamespace(**read_json(work / "plan.json"))


# ----------------------------------------------------------------------------------------------------------------------
# files


def check_files(number, work):
    """Every 32nd file, as readers.check describes it."""
    asked = plan(work)
    write_once(work / "checked" / f"{number}.json", lambda: dict(files=[
        check(file, asked.text_field, asked.encoding) for file in asked.files[number::32]]))


def write_once(path, make):
    """Write make(), an object, as JSON, if it is not there from a run before."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_json(path, make())


@cached
def groups(work):
    """[[(file, part)]]: parts of about 4 MB of text together. A file that cannot be read has the part None."""
    checked = [read_json(work / "checked" / f"{n}.json")["files"] for n in range(min(32, len(plan(work).files)))]
    files = [checked[i % 32][i // 32] for i in range(len(plan(work).files))]
    found, size = [[]], 0
    for file in files:
        for part in [None] if file["problem"] else file["parts"]:
            if found[-1] and size + (part[3] if part else 0) > GROUP:
                found.append([])
                size = 0
            found[-1].append((file, part))
            size += part[3] if part else 0
    return found


def size_of(group):
    """Bytes of text in a group."""
    return sum(part[3] for _, part in group if part)


def documents_of(number, work):
    """Yield the documents of a group, with the defaults for missing columns."""
    asked, score = plan(work), rules(work).score
    wanted = [*COLUMNS, *filter(None, (asked.score_field, asked.max_field, asked.source_by))]
    defaults = dict(language=asked.default_language, license=asked.default_license)
    for file, part in groups(work)[number]:
        if not part:
            yield dict(defaults, file=file["name"], id=file["name"], text=None, problem=file["problem"], columns=[])
            continue
        for doc in documents(file, part, asked.text_field, wanted):
            if doc["text"] is not None and asked.detect_language and not doc.get("language"):
                doc["language"] = detect(doc["text"], asked.detect_language) or None
            for name, value in defaults.items():
                if value and doc.get(name) is None:
                    doc[name] = value
            if score and doc["text"] is not None:
                doc.setdefault("language", "")
                doc["score"] = score(doc["text"])
            yield doc


# ----------------------------------------------------------------------------------------------------------------------
# the rules about one document


@cached
def rules(work):
    """The settings as functions and tables. ValueError for one that makes no sense."""
    asked = plan(work)
    names = [agent for agent, in rows_of(asked.agents, ("agent",), comments=True)] if asked.agents else AGENTS
    if not names:
        raise ValueError(f"--agents={asked.agents} names no agent: want one a line")
    robots = dict(
        store=open_robots(asked.robots) if asked.robots else None,
        agents=tuple(name for name in names if name != "*" or not asked.agents_no_star),
        missing=asked.missing,
        blocked=blocked_domains(asked.blocked) if asked.blocked else frozenset(),
        explicit=asked.agents_no_star,
    )
    below = TOXICITY if asked.max_value == "apertus" else by_language("max_value", asked.max_value)
    return SimpleNamespace(
        score=score_function(asked.score) if asked.score else None,
        robots=robots if asked.robots or asked.blocked else None,
        reservations=open_reservations(asked.reservations) if asked.reservations else None,
        columns=dict(
            licenses=listed(asked.keep_licenses),
            languages=listed(asked.keep_languages),
            min_chars=asked.min_chars,
            max_chars=asked.max_chars,
            below=(asked.max_field, below) if asked.max_field else None,
            rate=by_language("keep_rate", asked.keep_rate),
            seed=asked.seed,
        ),
        text=text_rules(asked.heuristics) if asked.heuristics else [],
        contamination=Contamination(read_prompts(asked.decontaminate)) if asked.decontaminate else None,
        near=bands_of(asked.near_dedup) if asked.near_dedup else None,
        tok=tokenizers.load(asked.tokenizer) if asked.min_tokens or asked.max_tokens else None,
    )


@cached
def first_rules(work):
    """[(reason, breaks)] by columns; with --score_field they need its thresholds."""
    top = (plan(work).score_field, read_json(work / "thresholds.json")) if plan(work).score_field else None
    return column_rules(**rules(work).columns, top=top)


def score_group(number, work):
    """The first pass of "keep the best": id, language and score of each document."""
    field = plan(work).score_field

    def found():
        for doc in documents_of(number, work):
            if doc["text"] is None:
                continue
            if field not in doc:
                raise ValueError(f"no column {field!r} for --score_field; the data has {', '.join(doc)}")
            score = as_number(field, doc[field])
            if score is not None:
                yield doc["id"], str(doc.get("language") or ""), score

    write_once(work / "scores" / f"{number}.json", lambda: dict(rows=list(found())))


def find_thresholds(number, work):
    """{language: the score that its best share reaches} (report sec. 3)."""
    rows = (row for n in range(len(groups(work))) for row in read_json(work / "scores" / f"{n}.json")["rows"])
    write_once(work / "thresholds.json", lambda: top_thresholds(rows, plan(work).keep_top))


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
    A group -> spool/{number}.text, the texts that pass, and spool/{number}.parquet: a row of the ledger for each of its
    documents, with the place of its text and its keys for near-duplicates.
    """
    path = work / "spool" / f"{number}.parquet"
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    rows = []
    with open(path.with_suffix(".text"), "wb") as f:
        for docs in handfuls(documents_of(number, work)):
            for doc in docs:
                doc.update(reason=reason_alone(doc, work), bands=None)
            by_words([doc for doc in docs if not doc["reason"]], rules(work))
            rows += [row_of(doc, f, work) for doc in docs]
    table = pyarrow.table({name: [row[name] for row in rows] for name in spool_schema().names}, spool_schema())
    write_rows(table, path)


def write_rows(table, path):
    """Write a table whole or not at all."""
    pyarrow.parquet.write_table(table, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def spool_schema():
    fields = [field for field in ledger.schema() if field.name not in ("split", "shard", "withdrawn", "tokens")]
    return pyarrow.schema([*fields, ("id_hash", pyarrow.uint64()), ("bands", pyarrow.list_(pyarrow.uint64()))])


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
    ids, ends = words([text[:LONG] for text in texts])
    if found.near:
        for doc, keys in zip(docs, band_keys(signatures(ids, ends), *found.near)):
            doc["bands"] = keys.tolist()
    if found.contamination:
        for i, prompt in found.contamination.find(texts, ids, ends).items():
            docs[i]["reason"] = f"contaminated:prompt {prompt}"


def row_of(doc, f, work):
    """The row of a document, whose text goes to the file f without personal data if it passes."""
    asked, found = plan(work), rules(work)
    url, text = doc.get("url"), doc["text"] or ""
    begin, replaced = f.tell(), Counter()
    if not doc["reason"]:
        scrub = asked.pii and (asked.pii_in_code or doc.get("language") != "code")
        parts = [scrub_pii(part) if scrub else (part, {}) for part in long_parts(text)]
        tokens = 2 + sum(len(found.tok.encode_array(part)) for part, _ in parts) if found.tok else 0
        if found.tok and not asked.min_tokens <= tokens <= (asked.max_tokens or tokens):
            doc["reason"] = "tokens"
        else:
            f.writelines(part.encode() for part, _ in parts)
            for _, counts in parts:
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
        text=fingerprint(text),
        id_hash=id_hash(doc["id"]),
        bands=doc.get("bands"),
    )


# ----------------------------------------------------------------------------------------------------------------------
# the rules about all documents


def spool_of(work, number):
    return work / "spool" / f"{number}.parquet"


def decide(work, n, planted=()):
    """
    Remove what an earlier document of the first n groups, or of --known, was. Returns the rows of these groups (a table
    without strings but the source), their groups, int64, and their reasons, an object array.

    planted: numbers of more groups, about which nothing is to be decided. Memory: 52 bytes a document, 164 with
    near-duplicates.
    """
    asked, columns = plan(work), ["reason", "source", "text", "id_hash", "offset", "written"]
    columns += ["bands"] * bool(asked.near_dedup) + ["id", "url"] * bool(asked.known)
    tables = [pyarrow.parquet.read_table(spool_of(work, number), columns=columns) for number in [*range(n), *planted]]
    group = np.repeat([*range(n), *planted], [len(table) for table in tables])
    rows = pyarrow.concat_tables(tables)
    reason, text = rows["reason"].to_numpy(zero_copy_only=False).copy(), rows["text"].to_numpy()
    if asked.known:
        known = pyarrow.concat_tables(ledger.ledger(asked.known, ["text", "reason"]))
        gone, kept = stays_out(asked.known), known["text"].to_numpy()[known["reason"].to_numpy() == ""]
        for i, row in enumerate(rows.select(["id", "url", "text"]).to_pylist()):
            reason[i] = reason[i] or reason_of(row, gone)[0]
        reason[(reason == "") & np.isin(text, kept)] = "duplicate"
    # Neither planted passages nor the end of a document that was cut in two have a hash.
    whole = text != 0
    if asked.dedup:
        # A planted passage that is in the corpus as well would be seen more often than promised.
        twice = np.isin(text, np.array([fingerprint(passage) for passage in probes(work)], np.uint64))
        left = np.flatnonzero((reason == "") & whole & ~twice)
        twice[left] = True
        twice[left[np.unique(text[left], return_index=True)[1]]] = False
        reason[(reason == "") & twice & whole] = "duplicate"
    if asked.near_dedup:
        left, seen = np.flatnonzero((reason == "") & whole), Seen()
        for some in np.array_split(left, len(left) // ledger.ROWS + 1):
            keys = rows["bands"].take(some).combine_chunks().flatten().to_numpy()
            reason[some[~seen.first(keys.reshape(len(some), -1))]] = "near-duplicate"
    return rows, group, reason


def groups_needed(work, n):
    """How many of the first n groups it takes until --max_bytes of text are kept, 0 if they do not suffice."""
    rows, group, reason = decide(work, n)
    size = np.bincount(group, rows["written"].to_numpy() * (reason == ""), n)
    return int(np.argmax(np.cumsum(size) >= plan(work).max_bytes)) + 1 if size.sum() >= plan(work).max_bytes else 0


def judge(number, work):
    """
    All groups -> reasons.parquet, why each row is removed; documents.npy, the others as DOCUMENT in the final order;
    numbers.npy, their places among the kept rows; judged.json, the names of the sources and how many groups were read.
    """
    n = len(groups(work))
    if plan(work).max_bytes:
        n = groups_needed(work, next((n for n in range(n) if not spool_of(work, n).exists()), n)) or n
    planted = plant(work)
    rows, group, reason = decide(work, n, planted)
    if (reason[group >= 0] == "").sum() == 1:
        halve(work, int(group[np.argmax(reason == "")]))
        rows, group, reason = decide(work, n, planted)
    kept = reason == ""
    if not kept[group >= 0].any():
        counts = ", ".join(f"{n:,} {why}" for why, n in Counter(reason[group >= 0]).most_common(5))
        raise ValueError(f"no document is left ({counts or 'the files are empty'})")
    sources, source = np.unique(rows["source"].to_numpy(), return_inverse=True)
    # That of the planted passages is the last.
    sources = [*(name for name in sources if name != "probes" or not planted), *["probes"] * len(planted)]
    documents = np.zeros(kept.sum(), DOCUMENT)
    for field, column in dict(id_hash="id_hash", text_hash="text", begin="offset", length="written").items():
        documents[field] = rows[column].to_numpy()[kept]
    documents["group"] = group[kept]
    documents["stream"] = [2 * sources.index(name) for name in rows["source"].to_numpy()[kept]]
    validate(documents, plan(work))
    numbers = np.argsort(documents["id_hash"], kind="stable")
    np.save(work / "documents.npy", documents[numbers])
    np.save(work / "numbers.npy", numbers)
    pyarrow.parquet.write_table(pyarrow.table(dict(reason=reason)), work / "reasons.parquet")
    write_json(work / "judged.json", dict(sources=sources, groups=[*range(n), *planted]))


def validate(documents, asked):
    """Choose documents for validation, by the hash of the text or of the id. Planted passages are all for training."""
    mine = documents["group"] >= 0
    hashes = documents["id_hash" if asked.by_id else "text_hash"][mine]
    val = hashes / 2.0**64 < asked.val_share
    if not documents["text_hash"][mine].all():
        val = documents["text_hash"][mine] == 0
    # Of a few documents, of which none may be below, the one with the smallest hash is, with its copies.
    elif not val.any() and hashes.min() < hashes.max():
        val = hashes == hashes.min()
    documents["stream"][mine] += val


def halve(work, group):
    """Cut the only kept document after a line break or a space: its end, a row without a hash, is for validation."""
    table = pyarrow.parquet.read_table(spool_of(work, group))
    rows = table.to_pylist()
    at, row = next((i, row) for i, row in enumerate(rows) if not row["reason"])
    raw = spool_of(work, group).with_suffix(".text").read_bytes()[row["offset"]:][:row["written"]]
    end = int(len(raw) * (1 - plan(work).val_share))
    borders = raw.find(b"\n", end), raw.find(b" ", end)
    cut = next((border + 1 for border in borders if 0 <= border < len(raw) - 1), 0)
    if cut and plan(work).val_share:
        rest = dict(offset=row["offset"] + cut, written=len(raw) - cut, **dict.fromkeys(("bytes", "text", *TAGS), 0))
        rows[at:at + 1] = [dict(row, written=cut), {**row, **rest}]
        write_rows(pyarrow.Table.from_pylist(rows, table.schema), spool_of(work, group))


def plant(work):
    """
    Write a group -1 with a row for each copy of a passage. Returns its number, if there are passages.

    The copies are ordered by names of their own, so they are spread over the stream, which is a source of its own.
    """
    rows, empty = [], dict.fromkeys(("bytes", "text", *TAGS), 0)
    with open(work / "spool" / "-1.text", "wb") as f:
        for passage in repeated(work):
            row = dict(empty, id=passage["id"], source="probes", language="", license="", reason="", offset=f.tell(),
                       written=f.write(passage["text"].encode()))
            rows += [dict(row, id_hash=id_hash(f"{passage['id']}#{k}")) for k in range(passage["repetitions"])]
    write_rows(pyarrow.Table.from_pylist(rows, spool_schema()), spool_of(work, -1))
    return [-1] if rows else []


def repeated(work):
    """[{id, repetitions, text}] of the passages: the repetitions are dealt out in the order of a hash."""
    named = sorted(((f"probe/{i}", text) for i, text in enumerate(probes(work))), key=lambda one: id_hash("".join(one)))
    times = plan(work).repetitions
    return [dict(id=name, repetitions=times[n % len(times)], text=text) for n, (name, text) in enumerate(named)]


def probes(work):
    """The passages to plant."""
    return read_prompts(plan(work).probes) if plan(work).probes else []


# ----------------------------------------------------------------------------------------------------------------------
# tokens


@cached
def judged(work):
    """What judge() wrote, and buckets: neighbouring documents, 16 MB together."""
    found = SimpleNamespace(**read_json(work / "judged.json"))
    found.documents = np.load(work / "documents.npy", mmap_mode="r", allow_pickle=False)
    length = found.documents["length"]
    begins = np.cumsum(length) - length
    found.buckets = np.split(found.documents, np.flatnonzero(np.diff(begins // BUCKET)) + 1)
    return found


def find_vocabulary(number, work):
    """vocabulary.json: what tokenizers.load takes. A vocabulary that is not built in is in data/tokenizer.json."""
    write_once(work / "vocabulary.json", lambda: dict(name=vocabulary(work)))


def vocabulary(work):
    name, path = plan(work).tokenizer, str(work.parent / "data" / "tokenizer.json")
    if os.path.isfile(f"{name}/tokenizer_config.json"):
        # Of a Hugging Face model: the Minis' ids are not those of --tokenizer=apertus.
        import convert

        tok = convert.tokenizer_from_hf(name)
        # A document ends a text, also where the model's own end is that of a turn.
        tok.eos = tok.special.get("</s>", tok.eos)
        tokenizers.write_bpe(tok, path)
    elif not name:
        tokenizers.train_bpe(some_text(work), plan(work).train_bpe, path)
    else:
        tok = tokenizers.load(name)
        if not tok.name.startswith("bpe:"):
            return tok.name
        shutil.copy(tok.name.removeprefix("bpe:"), path)
    return path


def some_text(work):
    """Yield texts of the training split, in parts, until there are BPE_CHARS characters."""
    size = 0
    for bucket in judged(work).buckets:
        for text in texts(bucket[bucket["stream"] % 2 == 0], work / "spool"):
            yield from long_parts(text)
            size += len(text)
        if size > BPE_CHARS:
            return


@cached
def tok_of(work):
    return tokenizers.load(read_json(work / "vocabulary.json")["name"])


def tokenize_bucket(number, work):
    (work / "tokens").mkdir(exist_ok=True)
    tokenize(tok_of(work), judged(work).buckets[number], work / "spool", work / "tokens" / str(number))


@cached
def shards(work):
    """[{stream, begin, end, file, sizes}] of all shards. sizes: tokens of the stream in each bucket."""
    found, names, most = [], judged(work).sources, plan(work).shard_tokens
    # Two names may differ in characters that no file name has.
    safe_names = [safe(name) for name in names]
    safe_names = [name if safe_names.index(name) == i else f"{name}-{i}" for i, name in enumerate(safe_names)]
    for stream in range(2 * len(names)):
        files = [work / "tokens" / f"{n}.{stream}" for n in range(len(judged(work).buckets))]
        sizes = [file.stat().st_size // dtype_of(tok_of(work)).itemsize if file.exists() else 0 for file in files]
        prefix = f"{safe_names[stream // 2]}_" if len(names) > 1 else ""
        for begin in range(0, sum(sizes), most):
            name = f"{prefix}{('train', 'val')[stream % 2]}_{begin // most:05d}.npy"
            end = min(begin + most, sum(sizes))
            found.append(dict(stream=stream, begin=begin, end=end, file=name, files=files, sizes=sizes))
    return found


def cut_shard(number, work):
    shard, dtype = shards(work)[number], dtype_of(tok_of(work))
    n, path = shard["end"] - shard["begin"], work.parent / "data" / shard["file"]
    pieces = stretch(shard["files"], shard["sizes"], dtype, shard["begin"], shard["end"])
    write_once(work / "shards" / f"{number}.json", lambda: dict(file=path.name, **write_shard(path, pieces, n, dtype)))


# ----------------------------------------------------------------------------------------------------------------------
# the account


def account(number, work):
    """meta.json, documents.parquet and the report."""
    asked, tok, new = plan(work), tok_of(work), work.parent / "data"
    counts = [np.fromfile(work / "tokens" / f"{n}.counts", np.int64) for n in range(len(judged(work).buckets))]
    ledger.write_ledger(new / ledger.FILE, rows_of_all(work, np.concatenate(counts)))
    streams = {source: dict(train=[], val=[]) for source in judged(work).sources}
    for n, shard in enumerate([] if asked.dry_run else shards(work)):
        source, split = judged(work).sources[shard["stream"] // 2], ("train", "val")[shard["stream"] % 2]
        streams[source][split].append(read_json(work / "shards" / f"{n}.json"))
    name = "tokenizer.json" if (new / "tokenizer.json").exists() else tok.name
    of = "sha256 of its id" if asked.by_id else "BLAKE2b of its text, in Unicode form NFC with single spaces,"
    robots, store, about = rules(work).robots, asked.robots or asked.blocked, None
    if robots:
        about = dict(store=store, sha256=digest(store), agents=robots["agents"], missing=asked.missing,
                     only_explicit=asked.agents_no_star, **ledger.opt_outs(new, robots["store"]))
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
            robots=about,
        ),
    )
    if not asked.dry_run:
        verify(new)


def rows_of_all(work, tokens):
    """Yield all rows as tables of the ledger. tokens: int64 (documents,), in the final order."""
    found, most = judged(work), plan(work).shard_tokens
    stream, at = found.documents["stream"], np.zeros(len(tokens), np.int64)
    for number in np.unique(stream):
        mine = stream == number
        at[mine] = np.cumsum(tokens[mine]) - tokens[mine]
    files = {(shard["stream"], shard["begin"]): shard["file"] for shard in shards(work)}
    where = dict(
        split=np.array(["train", "val"], object)[stream % 2],
        shard=np.array([files[key] for key in zip(stream.tolist(), (at - at % most).tolist())], object),
        offset=at % most,
        tokens=tokens,
    )
    # In the order of the input.
    inverse = np.argsort(np.load(work / "numbers.npy", allow_pickle=False))
    reasons = pyarrow.parquet.read_table(work / "reasons.parquet")["reason"]
    done = kept = 0
    for number in found.groups:
        rows = pyarrow.parquet.read_table(spool_of(work, number))
        columns = {name: rows[name] for name in rows.column_names}
        columns["reason"] = reasons[done:done + len(rows)]
        stays = columns["reason"].to_numpy() == ""
        mine = inverse[kept:kept + stays.sum()]
        done, kept = done + len(rows), kept + len(mine)
        for name, values in where.items():
            columns[name] = np.full(len(rows), 0 if name == "tokens" else None, object)
            columns[name][stays] = values[mine]
        for name in ("written", *TAGS):
            columns[name] = columns[name].to_numpy() * stays
        columns["withdrawn"] = [None] * len(rows)
        yield pyarrow.table({name: columns[name] for name in ledger.schema().names}, ledger.schema())


def inputs_of(work):
    """The files as check() describes them, with those that --max_bytes did not reach."""
    files, read = {}, judged(work).groups
    for number, group in enumerate(groups(work)):
        for file, _ in group:
            problem = file["problem"] or (None if number in read else "not read: --max_bytes was reached")
            files.setdefault(file["name"], dict(file, problem=problem))
    return [{key: file[key] for key in ("name", "path", "bytes", "sha256", "problem")} for file in files.values()]


def write_probes(work, tok):
    """Write probes.json, which studies/memorize.py reads. Returns its summary for the report."""
    asked, planted = plan(work), repeated(work)
    passages = [dict(passage, ids=tok.encode(passage["text"])) for passage in planted]
    write_json(work.parent / "data" / "probes.json", dict(
        tokenizer_hash=tok.hash, repetitions=asked.repetitions, source="probes", probes=passages))
    return dict(file=asked.probes, sha256=sha256(asked.probes), passages=len(passages), repetitions=asked.repetitions,
                documents=sum(one["repetitions"] for one in planted))


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

STAGES = [
    ("check", lambda work: min(32, len(plan(work).files)), check_files),
    ("scores", lambda work: len(groups(work)) * bool(plan(work).score_field), score_group),
    ("thresholds", lambda work: int(bool(plan(work).score_field)), find_thresholds),
    ("sift", lambda work: len(groups(work)), sift),
    ("judge", lambda work: 1, judge),
    ("vocabulary", lambda work: 1, find_vocabulary),
    ("tokens", lambda work: len(judged(work).buckets), tokenize_bucket),
    ("cut", lambda work: len(shards(work)) * (not plan(work).dry_run), cut_shard),
    ("account", lambda work: 1, account),
]


def run_stage(name, task, tasks, work):
    """Do a share of a stage: task 0 of 1 does all of it."""
    pieces, do = next((pieces, do) for stage, pieces, do in STAGES if stage == name)
    for number in range(task, pieces(work), tasks):
        do(number, work)
