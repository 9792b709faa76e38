"""
Documents -> token shards that train.py reads, and an audit of what is in them and what is not.

    sift       every document: may one train on it (robots.txt, licence), is it worth it (scores, rules, contamination)
    judge      has the same text, or nearly the same, been there before: in the order of the input
    order      by a hash of the document's id; train or val by one of its text, so that whatever is joined later, and
               however files are called, each text is on one side. Adding a file moves no other document
    tokenize   <s> text </s>, personal data replaced by <email-pii>, <ip-pii>, <iban-pii>
    report     documents in = kept + removed for a reason: report.md, report.json, removed.jsonl.gz

$ python prepare.py                       # the source of this Python's standard library -> data/stdlib, in seconds
$ python prepare.py my_texts/ notes.md book.jsonl.gz --out=data/mine
$ python prepare.py new/ --known=data/mine --tokenizer=data/mine/tokenizer.json --out=data/more    # data.py --join
$ python prepare.py --out=data/mine --remove=opted_out.txt     # documents that must go; the rest keeps its bytes
$ python prepare.py pages.parquet --robots=robots.jsonl.gz --near_dedup=0.72 --tokenizer=apertus
$ python prepare.py "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet" --max_bytes=4e9 --out=data/edu
$ python prepare.py "hf://datasets/HuggingFaceFW/fineweb-2/data/deu_Latn/train/*.parquet" --max_bytes=4e9 --out=data/deu
$ python prepare.py "hf://datasets/epfml/FineWeb2-HQ/deu_Latn/*.parquet" --max_bytes=4e9 --out=data/deu-hq

The last one is, by its card, the best tenth of FineWeb-2 by the column quality_score. On files with such a column
(FineWeb-Edu: score) --score_field=quality_score --keep_top=0.33 keeps the best third of each language, after a first
pass over the scores of all files.

Batches of a few megabytes go to all cores and come back through files, so memory does not grow with the text: 52 bytes
a document stay, 164 with near-duplicates, and on disk three times the text while it runs. Killed at any moment, the
same command goes on, and the result is the same to the byte, whatever the number of workers.
"""

import glob
import gzip
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import closing
from importlib import metadata
from pathlib import Path

import numpy as np
from tqdm import tqdm

import tokenizer as tokenizers
from configurator import ROOT, run, settings
from corpus import audit as reports
from corpus.dedup import BACKEND, Contamination, NearDuplicates, Seen, fingerprint, read_prompts
from corpus.heuristics import Limits, limit_files
from corpus.kept import schema, tables, write_kept
from corpus.language import identifier
from corpus.quality import TOXICITY, TopShare
from corpus.reservations import COLUMNS, open_reservations
from corpus.robots import AGENTS, blocked_domains, open_robots, verdict
from corpus.shards import DOCUMENT, counts_of, long_parts, shards_of, texts, tokenize, write_shards
from corpus.shards import claim, clear, publish
from corpus.sift import KINDS, Rules, ordered, scores, sift, sifted
from corpus.withdraw import reason_of, stays_out, withdraw
from engine.files import sha256, version, write_flushed
from engine.inputs import CONVERTERS, files_of, find, ignored, matches
from engine.readers import batches, check, id_hash, rows_of

paths = []                  # files, folders, globs, hf:// s3://: text, .html, .json(l), tables, .parquet; none: stdlib
out = "data/stdlib"         # the folder to write; default data/stdlib, data/mine when paths are given
tokenizer = ""              # byte | apertus | apertus:K | a tokenizer.json | a model's folder; "" = train_bpe
train_bpe = 4096            # size of a BPE vocabulary trained on the documents, where no tokenizer is named
val_share = 0.04            # of the documents, by a hash of...
split_by = ""               # ...their text | id; "" = text, and id for the stdlib, whose published figures are by id
shard_tokens = 100_000_000  # tokens a shard at most
# what is in the data
text_field = "text"         # the column or field that holds the text
encoding = ""               # of the files, like latin-1 or utf-16; "" = UTF-8
source_by = ""              # a set of shards for each value of this column (language, license) or each "file"; "" = one
detect_language = 0.0       # of documents that do not say, by py3langid, from this probability on, like 0.9; 0 = off
default_language = ""       # of documents that do not say (columns language or lang)
default_license = ""        # of documents that do not say (column license)
max_bytes = 0.0             # stop reading when so much text is kept; 0 = read all. A token is 3 to 5 bytes
# may one train on it (corpus/robots.py); what pages say themselves always counts (corpus/reservations.py)
robots = ""                 # store of robots.txt: a folder, .jsonl(.gz .zst) or .parquet of domain, content
blocked = ""                # list of blocked domains
reservations = ""           # store of tdmrep.json and ai.txt (corpus/reservations.py): a folder, .jsonl, .parquet
missing = "allow"           # a host without robots.txt: allow (Apertus) | deny
agents = ""                 # file of agents, one a line; "" = the 15 of Apertus
agents_no_star = False      # only opt-outs that name an AI agent, not those for everybody
keep_licenses = ""          # only these, with commas between
pii = True                  # replace e-mail and IP addresses and IBANs...
pii_in_code = False         # ...in .py files and documents of language "code" too; Apertus left code as it is
# is it worth it (corpus/quality.py, corpus/heuristics.py)
heuristics = ""             # rules about text: gopher,repetition,c4,fineweb, few-words:20, a folder of FineWeb-2's
keep_languages = ""         # only these, with commas between
min_chars = 0               # of a document
max_chars = 0               # 0 = any
min_tokens = 0              # of a document, its begin and end included: needs a --tokenizer
max_tokens = 0              # 0 = any
score_field = ""            # column of a quality score, of which...
keep_top = 0.33             # ...this share of each language is kept
max_field = ""              # column of a score like toxicity, which must be below...
max_value = "apertus"       # ...this: a number, deu_Latn:0.9977,*:0.99 by language, or apertus = its thresholds
keep_rate = ""              # keep this share at random: a number, or deu_Latn:1,*:0.3135 by language
seed = 42                   # of that choice
dedup = True                # of equal texts keep the first
known = ""                  # another data folder, to --join later: what it holds is a duplicate here
near_dedup = 0.0            # of similar ones too: from this similarity on (FineWeb: 0.72); 0 = off
decontaminate = ""          # evaluation prompts: .jsonl with prompt, question or text, or one a line
# documents to delete (corpus/withdraw.py)
remove = ""                 # take documents out of --out: ids, URLs, hosts, one a line; .jsonl; a newer robots store
# memorisation probes
probes = ""                 # passages to plant: .jsonl with text, or one a line
repetitions = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # how often: passages are dealt out to these; 0 = never, to compare
# how
workers = 0                 # processes; 0 = one a core
dry_run = False             # print the report, write nothing
strict = False              # stop at the first file, line or URL that cannot be read

# Left out of the default corpus: tests, and tables of characters and of documentation that would dominate a small
# validation set.
NOT_PROSE = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "__pycache__"}
# What a killed run has left depends on these files, and is used again only while they are the same.
CODE = ["prepare.py", "tokenizer.py", "engine/inputs.py", "engine/readers.py"]
CODE += sorted(glob.glob("corpus/*.py", root_dir=ROOT))
# Bytes of text that a process tokenizes at once.
BUCKET = 16 << 20
# Text that a vocabulary is trained on at most, in characters.
BPE_CHARS = 200_000_000
# Bytes of input up to which starting processes costs more than it saves.
SMALL = 1 << 24


def main():
    global out
    if remove:
        take_out()
        return
    if paths and out == "data/stdlib":
        out = "data/mine"
    # The hub is asked later, and by a new run alone: a push in between must not end one that was interrupted.
    local = [path for path in paths if "://" not in path]
    here = find(local) if paths else standard_library()
    read = [path for _, path in here]
    for pattern in [*paths, robots, reservations]:
        read += matches(pattern)
    final, tmp, lock = claim(out, read)
    out = os.path.normpath(out)
    try:
        with lock:
            prepare(here, final, tmp)
    except OSError as e:
        # One of ours has no number.
        if e.errno is None:
            raise
        # A full disk shows in any library. Raised here it is an error of ours, which is told without a traceback.
        raise OSError(f"{e}. {out} is as it was; the same command goes on from {tmp}") from None


def take_out():
    """What --remove names leaves the folder `out`, which is as it was if that cannot be."""
    if paths:
        raise ValueError(
            f"--remove={remove} takes documents out of --out={out} and reads no other file: leave {paths[0]} out"
        )
    final, tmp, lock = claim(out, [remove])
    with lock:
        try:
            withdraw(remove, out, final, tmp)
        finally:
            # Where a run of prepare.py was killed, its work stays for the same command to go on with.
            if not (tmp / "work").exists():
                clear(tmp)


def prepare(here, final, tmp):
    """
    From files to the data folder `final`. here: (name, path) of the inputs that are on this machine.

    tmp/work holds what a killed run goes on with; tmp/data is the new folder until it takes the place of the old one.
    """
    began = time.time()
    work, new = tmp / "work", tmp / "data"
    files, others = survey(here, work, new)
    if others:
        print(f"ignored {sum(others.values()):,} files: {', '.join(f'{kind} {n:,}' for kind, n in others.items())}")
    for kind in others:
        if kind in CONVERTERS:
            print(f"{kind}: {CONVERTERS[kind]} makes text of it")
    new.mkdir(exist_ok=True)
    rules = read_rules(files, work)
    audit = reports.Audit()
    passages = read_prompts(probes) if probes else []
    documents = judge(rules, audit, new / "removed.jsonl.gz", passages)
    if not len(documents):
        clear(tmp)
        raise ValueError(nothing_left(audit))

    sources, documents, halved = split(documents, audit, work)
    planted, copies = plant(passages, work, 2 * len(sources))
    if planted:
        sources.append("probes")
    documents, buckets = in_order(np.concatenate([documents, copies]))
    tok, name = vocabulary(buckets, work, new)
    tokens = tokenize_all(tok, buckets, files, work)

    shards, kept = {}, None
    if not dry_run:
        shards = write_shards(tok, documents, tokens, buckets, sources, shard_tokens, work, new)
        kept = write_kept(new, documents, tokens, list(audit.groups), shards, shard_tokens, work)
    meta = meta_of(tok, name, shards)
    count_tokens(audit, documents, tokens)
    account = reports.build(
        audit,
        describe(name, tok, began),
        files,
        others,
        outputs(meta, tok, halved, kept),
        describe_robots(rules),
        dict(scrubbed=pii, in_code=pii_in_code),
        write_probes(planted, tok, documents, tokens, new) if planted else None,
    )
    if dry_run:
        clear(tmp)
        print(reports.markdown(account))
        return
    write_account(new, meta, account)
    publish(final, tmp)
    say(meta, account, time.time() - began)


# ----------------------------------------------------------------------------------------------------------------------
# before the first document


def standard_library():
    """[(name, path)] of the sources of this Python's standard library."""
    found = find([sysconfig.get_path("stdlib")])
    return [
        (name, path)
        for name, path in found
        if name.endswith(".py") and NOT_PROSE.isdisjoint(name.split("/"))
    ]


def survey(here, work, new):
    """
    The files with their hashes, as readers.check says, and what is ignored(). here: (name, path) of the inputs on this
    machine.

    A run that was killed left them in work/plan.json. Where settings, inputs and code are still the same, all that it
    left is used; otherwise it is removed, since results of two different runs must not be mixed.
    """
    # The others change what is told and how fast, but no document.
    decides = settings(globals())
    for name in ("workers", "strict", "dry_run"):
        del decides[name]
    stats = [os.stat(path) for _, path in here]
    sizes = [stat.st_size for stat in stats]
    times = [stat.st_mtime_ns for stat in stats]
    vocabulary = f"{tokenizer}/tokenizer.json" if os.path.isdir(tokenizer) else tokenizer.removeprefix("bpe:")
    named = [robots, reservations, blocked, agents, decontaminate, probes, vocabulary, f"{known}/meta.json"]
    named += limit_files(heuristics)
    hashes = [digest(path) for path in named if os.path.exists(path)]
    hashes += [sha256(os.path.join(ROOT, file)) for file in CODE]
    key = json.dumps([decides, here, sizes, times, BACKEND, hashes])
    plan = Path(work, "plan.json")
    found = tokenizers.read_json(plan) if plan.exists() else {}
    if found.get("key") == key:
        print(f"going on with what the run before left in {work}")
        return found["files"], found["ignored"]
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(new, ignore_errors=True)

    inputs = find(paths) if paths else here
    tasks = [(None, (name, path, text_field, encoding)) for name, path in inputs]
    # A file on the hub takes a second, whatever its size.
    size = sum(sizes) if len(inputs) == len(here) else math.inf
    checked = ordered(check, (), tasks, processes(size))
    checked = tqdm(checked, "looking at the files", len(tasks), unit="file", disable=None, leave=False)
    files = [file for _, file in checked]
    os.makedirs(work)
    others = ignored(paths)
    write_json(plan, dict(key=key, files=files, ignored=others))
    return files, others


def digest(path):
    """The sha256 of a file, or of the names and the sha256 of all files in a folder."""
    if not os.path.isdir(path):
        return sha256(path)
    root, files = files_of(path)
    lines = [f"{os.path.relpath(file, root)} {sha256(file)}" for file in files if os.path.isfile(file)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_settings():
    """ValueError for a setting that makes no sense."""
    # kept.parquet is written last, but it is said at once if pyarrow is missing.
    schema()
    # Raises for another value than allow and deny, although no document is asked about yet.
    verdict(None, missing=missing)
    if not 0 <= val_share < 1:
        raise ValueError(f"val_share={val_share}: want a part of 1, like 0.04")
    if split_by not in ("", "text", "id"):
        raise ValueError(f"split_by={split_by!r}: want text, id, or nothing")
    if known and not dedup:
        raise ValueError(f"known={known} says what is a duplicate, which dedup=False keeps: leave one of them out")
    if (min_tokens or max_tokens) and not tokenizer:
        raise ValueError(f"min_tokens={min_tokens}, max_tokens={max_tokens} are counted in a vocabulary that is there "
                         "already: name it, --tokenizer=apertus")
    if not 0 <= detect_language <= 1:
        raise ValueError(f"detect_language={detect_language}: want a probability like 0.9, from which one is believed")


def read_rules(files, work):
    """The settings as sift.Rules. ValueError for one that makes no sense, before any work is done."""
    check_settings()
    if detect_language:
        # Loaded before the workers are started, who then share it.
        identifier()
    asked = dict(
        store=open_robots(robots) if robots else None,
        agents=asked_agents(),
        missing=missing,
        blocked=blocked_domains(blocked) if blocked else frozenset(),
        explicit=agents_no_star,
    )
    columns = dict(
        licenses=listed(keep_licenses),
        languages=listed(keep_languages),
        min_chars=min_chars,
        max_chars=max_chars or None,
        rate=by_language("keep_rate", keep_rate),
        seed=seed,
    )
    if max_field:
        most = TOXICITY if max_value == "apertus" else by_language("max_value", max_value)
        columns["below"] = (max_field, most)
    rules = Rules(
        files=files,
        text_field=text_field,
        wanted=[*COLUMNS, *filter(None, (score_field, max_field, source_by))],
        spool=work,
        name=os.path.basename(os.path.normpath(out)),
        source_by=source_by,
        defaults=dict(
            language=default_language or ("" if paths else "code"),
            license=default_license or ("" if paths else "PSF-2.0"),
        ),
        sure=detect_language,
        robots=asked if robots or blocked else None,
        reservations=open_reservations(reservations) if reservations else None,
        columns=columns,
        limits=Limits(heuristics) if heuristics else None,
        contamination=Contamination(read_prompts(decontaminate)) if decontaminate else None,
        near=NearDuplicates(near_dedup) if near_dedup else None,
        tok=tokenizers.load(tokenizer) if min_tokens or max_tokens else None,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        pii=pii,
        pii_in_code=pii_in_code,
        strict=strict,
    )
    if score_field:
        columns["top"] = (score_field, top_thresholds(rules))
    return rules


def asked_agents():
    """The agents whose opt-outs count; without `*`, those that name an AI agent alone."""
    names = AGENTS
    if agents:
        names = [agent for agent, in rows_of(agents, ("agent",), comments=True)]
    return tuple(name for name in names if name != "*" or not agents_no_star)


def listed(text):
    """'mit,cc0' -> a set; nothing -> None, no rule."""
    return {part.strip() for part in text.split(",")} if text else None


def by_language(name, text):
    """'0.3' -> 0.3; 'deu_Latn:1,*:0.3' -> a dict by language; nothing -> None, no rule."""
    try:
        pairs = [part.rpartition(":") for part in text.split(",") if part.strip()]
        values = {language.strip(): float(value) for language, _, value in pairs}
    except ValueError:
        raise ValueError(
            f"{name}={text!r}: want a number, or numbers by language like deu_Latn:0.9,*:0.3"
        ) from None
    return values.get("", values) if values else None


def top_thresholds(rules):
    """First pass over the scores alone: {language: the score that the top share reaches} (report sec. 3)."""
    path = rules.spool / "thresholds.json"
    if not path.exists():
        top = TopShare(keep_top)
        for _, _, found in each_batch("scores", scores, rules, score_field):
            for doc_id, language, score in found:
                top.add(doc_id, language, score)
        write_json(path, top.thresholds())
    return tokenizers.read_json(path)


# ----------------------------------------------------------------------------------------------------------------------
# what stays


class Removed:
    """
    The documents that go, and why.

    Each is a line of removed.jsonl.gz, never with its text, and a number in the audit. What could not be read is
    printed at the end, one line for each kind of problem.
    """

    def __init__(self, path, audit):
        # A time in the header of the archive would make two equal runs differ.
        self.file = gzip.GzipFile(path, "wb", mtime=0)
        self.audit = audit
        self.skipped = {}

    def add(self, key, doc_id, url, reason, size):
        """key: (source, language, license). ValueError for an unreadable document in a strict run."""
        line = dict(id=doc_id, url=url, reason=reason)
        if not url:
            del line["url"]
        line = json.dumps(line, ensure_ascii=False)
        self.file.write(f"{line}\n".encode())
        self.audit.remove(key, reason, size)
        kind, _, problem = reason.partition(":")
        if kind == "unreadable":
            if strict:
                raise ValueError(f"{doc_id}: {problem} (--strict)")
            n, first = self.skipped.get(problem, (0, doc_id))
            self.skipped[problem] = n + 1, first

    def add_files(self, rules):
        """The files of the rules that cannot be read."""
        for file in rules.files:
            if file["problem"]:
                key = (rules.name, *rules.defaults.values())
                self.add(key, file["name"], None, f"unreadable:{file['problem']}", 0)

    def add_batch(self, info):
        """What goes from a batch, in the order of its rows. info: as sift.sifted() gives it."""
        for _, group, *what in sorted(info.removed, key=lambda row: row[0]):
            self.add(info.groups[group], *what)

    def close(self):
        self.file.close()
        for problem, (n, first) in self.skipped.items():
            print(f"skipped {n}: {problem} (the first: {first})")


def judge(rules, audit, path, passages):
    """
    Sift all batches, and remove what was there before, in the order of the input.

    Returns what stays, in that order: an array of DOCUMENT whose streams are not yet known. path: removed.jsonl.gz.
    passages: those of --probes, which the corpus must not hold: each would be seen more often than promised.
    """
    seen_texts = []
    if dedup:
        keys = np.array([fingerprint(text) for text in passages], np.uint64)
        exact = Seen()
        exact.first(keys.reshape(-1, 1))
        for _, table in tables(known, ["text_hash"]) if known else ():
            exact.first(table["text_hash"].to_numpy()[:, None])
        seen_texts.append(("duplicate", exact, "text_hash"))
    if rules.near:
        seen_texts.append(("near-duplicate", rules.near.seen, "bands"))
    gone = stays_out(known) if known else None
    kept, written = [np.zeros(0, DOCUMENT)], 0
    with closing(Removed(path, audit)) as removed:
        removed.add_files(rules)
        for number, last, _ in each_batch("sifting", sift, rules):
            documents, info = sifted(rules.spool, number)
            audit.hear(vars(info))
            if gone:
                documents = without_withdrawn(documents, info, gone)
            documents = without_copies(documents, info, seen_texts)
            removed.add_batch(info)
            kept.append(counted(documents, info.groups, audit))
            written += int(documents["length"].sum())
            if max_bytes and written >= max_bytes:
                for file in rules.files[last + 1:]:
                    file["problem"] = file["problem"] or "not read: --max_bytes was reached"
                break
    return np.concatenate(kept)


def without_withdrawn(documents, info, gone):
    """What stays of a batch because --remove has not taken it out of the data that are known."""
    reasons = {}
    for i, text_hash in enumerate(documents["text_hash"].tolist()):
        why = reason_of(dict(id=info.ids[i], url=info.urls[i], text_hash=text_hash), gone)
        if why:
            reasons[i] = why[0]
    return without(documents, info, reasons)


def without(documents, info, reasons):
    """What stays of a batch without the documents of these numbers. They go to info.removed for their reasons."""
    for i, reason in reasons.items():
        row, group, size = documents[["row", "group", "size"]][i].item()
        info.removed.append((row, group, info.ids[i], info.urls[i], reason, size))
    stays = [i for i in range(len(documents)) if i not in reasons]
    info.ids, info.urls = ([names[i] for i in stays] for names in (info.ids, info.urls))
    return documents[stays]


def without_copies(documents, info, seen_texts):
    """
    What stays of a batch because nothing before it has the same text, or nearly. The rest goes to info.removed.

    seen_texts: rows of (reason, dedup.Seen, name of the field with its keys). What one of them removes, the next one
    does not remember.
    """
    for reason, seen, field in seen_texts:
        keys = documents[field]
        if keys.ndim == 1:
            keys = keys[:, None]
        again = np.flatnonzero(~seen.first(keys))
        documents = without(documents, info, dict.fromkeys(again.tolist(), reason))
    return documents


def counted(documents, keys, audit):
    """
    The documents of a batch that stay as an array of DOCUMENT, with groups as the audit numbers them.

    keys: (source, language, license) of the batch's own groups. The audit counts the documents.
    """
    groups = np.array([audit.group(key)["number"] for key in keys], np.int32)
    for group, key in enumerate(keys):
        mine = documents[documents["group"] == group]
        if len(mine):
            size, written = (int(mine[name].sum()) for name in ("size", "length"))
            replaced = mine["pii"].sum(0).tolist()
            audit.keep(key, len(mine), size, written, dict(zip(KINDS, replaced)))
    documents["group"] = groups[documents["group"]]
    return documents[list(DOCUMENT.names)].astype(DOCUMENT)


def split(documents, audit, work):
    """
    Sources by name, and for each document its stream: the number of its source, and whether it is for validation.

    Returns (names, documents, whether the only document was cut in two).
    """
    names = [name for name, _, _ in audit.groups]
    sources, source_of = np.unique(names, return_inverse=True)
    halves = halve(documents, work) if len(documents) == 1 else documents
    halved = len(halves) > len(documents)
    if halved:
        val = np.array([False, True])
    else:
        hashes = documents["id_hash" if by_id() else "text_hash"]
        val = hashes / 2.0**64 < val_share
        # Of a handful of documents the one of the least hash validates, with its copies if they are kept.
        if not val.any() and hashes.min() < hashes.max():
            val = hashes == hashes.min()
    halves["stream"] = 2 * source_of[halves["group"]] + val
    return sources.tolist(), halves, halved


def validates(row):
    """Whether a row of kept.parquet is for validation, by the rule."""
    number = id_hash(row["id"]) if by_id() else row["text_hash"]
    return np.uint64(number) / 2.0**64 < val_share


def by_id():
    """Whether a hash of the id, and not of the text, says what validates."""
    return (split_by or ("text" if paths else "id")) == "id"


def halve(documents, work):
    """
    A single document, like a book, as two of the same id: its end validates, from a line break or a space on.

    As it is where there is neither, or where nothing is to validate.
    """
    (text,) = texts(documents, work)
    raw = text.encode()
    at = int(len(raw) * (1 - val_share))
    borders = raw.find(b"\n", at), raw.find(b" ", at)
    cut = next((border + 1 for border in borders if 0 <= border < len(raw) - 1), 0)
    if not cut or not val_share:
        return documents
    halves = np.repeat(documents, 2)
    halves["batch"] = -2
    # Its end is not the same text a second time.
    halves["text_hash"][1] = 0
    with open(work / f"{documents['batch'][0]}.text", "rb") as spooled:
        spooled.seek(int(documents["offset"][0]) + len(raw))
        about = json.loads(spooled.readline())
    with open(work / "-2.text", "wb") as f:
        for half, part, size in zip(halves, (raw[:cut], raw[cut:]), (about["bytes"], 0)):
            half["offset"], half["length"] = f.tell(), len(part)
            f.write(part)
            f.write(json.dumps(dict(about, bytes=size)).encode() + b"\n")
    return halves


def plant(passages, work, stream):
    """
    (planted, copies): what probes.json says of each passage, and an array of DOCUMENT with each as often as that says.

    The copies have ids of their own, so they are spread over the stream, which is a source of its own.
    """
    named = [(f"probe/{i}", text) for i, text in enumerate(passages)]
    named.sort(key=lambda one: id_hash("".join(one)))
    planted, copies = [], []
    with open(work / "-1.text", "wb") as f:
        for n, (name, text) in enumerate(named):
            times = repetitions[n % len(repetitions)]
            planted.append(dict(id=name, repetitions=times, text=text))
            begin = f.tell()
            length = f.write(text.encode())
            digest = hashlib.sha256(text.encode()).hexdigest()
            about = dict(id=name, url=None, sha256=digest, bytes=length, **dict.fromkeys(KINDS, 0))
            f.write(json.dumps(about).encode() + b"\n")
            for k in range(times):
                copies.append((id_hash(f"{name}#{k}"), 0, -1, begin, length, -1, stream))
    return planted, np.array(copies, DOCUMENT)


def in_order(documents):
    """
    (documents in the order of their hashes, buckets).

    Buckets are views of neighbouring documents, of about BUCKET bytes of text each, which are tokenized one by one.
    """
    documents = documents[np.argsort(documents["id_hash"], kind="stable")]
    begins = np.cumsum(documents["length"], dtype=np.int64) - documents["length"]
    cuts = np.flatnonzero(np.diff(begins // BUCKET)) + 1
    return documents, np.split(documents, cuts)


# ----------------------------------------------------------------------------------------------------------------------
# tokens


def vocabulary(buckets, work, new):
    """(the Tokenizer, its name in meta.json). Trained on the training split where none is named."""
    path = str(new / "tokenizer.json")
    if os.path.isfile(f"{tokenizer}/tokenizer_config.json"):
        # Of a Hugging Face model: the Minis' ids are not those of --tokenizer=apertus.
        import convert
        tok = convert.tokenizer_from_hf(tokenizer)
        # A document ends a text, also where the model's own end is that of a turn.
        tok.eos = tok.special.get("</s>", tok.eos)
        tokenizers.write_bpe(tok, path)
        return tokenizers.load(path), "tokenizer.json"
    if tokenizer:
        tok = tokenizers.load(tokenizer)
        if not tok.name.startswith("bpe:"):
            return tok, tok.name
        # A copy, so that the folder is complete in itself.
        shutil.copy(tok.name.removeprefix("bpe:"), path)
        return tok, "tokenizer.json"
    if os.path.exists(path):
        return tokenizers.load(path), "tokenizer.json"
    train = (bucket[bucket["stream"] % 2 == 0] for bucket in buckets)
    return tokenizers.train_bpe(some_text(train, work), train_bpe, path), "tokenizer.json"


def some_text(buckets, work):
    """Yield the texts of whole buckets, in parts, until there are BPE_CHARS characters."""
    size = 0
    for bucket in buckets:
        for text in texts(bucket, work):
            yield from long_parts(text)
            size += len(text)
        if size > BPE_CHARS:
            return


def tokenize_all(tok, buckets, files, work):
    """All buckets into work/{number}.tokens. Returns the tokens of each document: int64 (n,)."""
    tasks = ((number, (number, bucket)) for number, bucket in enumerate(buckets))
    done = ordered(tokenize, (tok, work), tasks, processes(volume(files)))
    done = tqdm(done, "tokenizing", total=len(buckets), unit="bucket")
    return np.concatenate([counts_of(work, number) for number, _ in done])


# ----------------------------------------------------------------------------------------------------------------------
# the account


def meta_of(tok, name, shards):
    """meta.json, which data.py reads."""
    meta = dict(
        tokenizer=name,
        tokenizer_hash=tok.hash,
        vocab_size=tok.vocab_size,
        bos=tok.bos,
        eos=tok.eos,
        sources=shards,
    )
    return dict(meta, version=version(meta))


def write_account(folder, meta, account):
    """meta.json and the report. ValueError if the files of the folder are not what they say."""
    write_json(folder / "meta.json", meta)
    write_json(folder / "report.json", account)
    write_flushed(folder / "report.md", reports.markdown(account))
    # Once more, from the files: in = kept + removed, hashes, tokens.
    reports.verify(folder)


def count_tokens(audit, documents, tokens):
    """Tell the audit the tokens of what was kept, by group. Probes have none."""
    mine = documents["group"] >= 0
    sums = np.bincount(documents["group"][mine], tokens[mine], len(audit.groups))
    for group, n in zip(audit.groups.values(), sums):
        group["tokens"] = int(n)


def write_probes(planted, tok, documents, tokens, new):
    """
    probes.json for studies/memorize.py: each passage, its ids, how often it stands in the training split.

    Returns what the audit says of them. Copies are the documents that belong to no group.
    """
    copies = documents["group"] < 0
    encoded = [dict(passage, ids=tok.encode(passage["text"])) for passage in planted]
    content = dict(
        tokenizer_hash=tok.hash,
        repetitions=list(repetitions),
        source="probes",
        probes=encoded,
    )
    write_json(new / "probes.json", content)
    return dict(
        file=probes,
        sha256=sha256(probes),
        passages=len(planted),
        repetitions=list(repetitions),
        documents=int(copies.sum()),
        tokens=int(tokens[copies].sum()),
    )


def describe(name, tok, began):
    """Who made this, when, with what."""
    try:
        asked = ["git", "rev-parse", "HEAD"]
        git = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        git = ""
    packages = ("numpy", "tiktoken", "pyarrow", "rensa", "huggingface_hub", "py3langid")
    return dict(
        out=out,
        command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        minhash=BACKEND if near_dedup else None,
        code=git or None,
        python=sys.version.split()[0],
        settings={name: value for name, value in settings(globals()).items() if name != "paths"},
        packages={package: version_of(package) for package in packages},
        tokenizer=name,
        tokenizer_sha256=tok.hash,
    )


def version_of(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def outputs(meta, tok, halved, kept):
    """The shards, and by which rule documents went to training or to validation."""
    of = "BLAKE2b of its text, without differences of white space and Unicode form,"
    rule = (
        f"A document is for validation where 64 bits of the {'sha256 of its id' if by_id() else of} over 2^64 are "
        f"below {val_share}. Of near-duplicates that were looked for one is here, and stands for all."
    )
    if halved:
        rule = "The only document was cut in two: its end is for validation."
    return dict(
        version=meta["version"],
        shards=shards_of(meta),
        kept=kept,
        bos=tok.bos,
        eos=tok.eos,
        halved=halved,
        rule=rule,
    )


def describe_robots(rules):
    """What was asked of whom, or None."""
    if not rules.robots:
        return None
    store = robots or blocked
    return dict(
        store=store,
        sha256=digest(store),
        date=time.strftime("%Y-%m-%d", time.gmtime(os.stat(store).st_mtime)),
        agents=list(rules.robots["agents"]),
        missing=missing,
        only_explicit=agents_no_star,
    )


def nothing_left(audit):
    """Why there is no document, for the error."""
    removed = reports.total(audit.groups.values())["removed"]
    have = f"; they have {', '.join(audit.columns)}" if audit.columns else ""
    why = f" (removed: {', '.join(f'{n} {reason}' for reason, (n, _) in removed.items())})" if removed else ""
    return (
        f"no text left of {paths}: .txt, .html and the like are documents, rows need a column {text_field!r}, or "
        f"another by --text_field{have}{why}"
    )


def say(meta, account, seconds):
    """What a user wants to know at once: the sums, the bytes a token, where the audit is."""
    total = account["total"]
    sources = meta["sources"].values()
    if total["removed"]:
        gone = " + ".join(f"{n:,} {reason}" for reason, (n, _) in total["removed"].items())
        print(f"{total['documents_in']:,} documents in = {total['documents']:,} kept + {gone}")
    counts = [sum(source["train"][name] for source in sources) for name in ("documents", "tokens", "bytes")]
    documents, tokens, size = counts
    val = sum(source["val"]["tokens"] for source in sources)
    print(
        f"{out}: {documents:,} documents, {tokens:,} tokens to train on ({size / max(tokens, 1):.2f} bytes each), "
        f"{val:,} to validate; tokenizer {meta['tokenizer']} of {meta['vocab_size']:,}"
    )
    print(f"the audit: {out}/report.md   {seconds:.0f} s, {total['bytes_in'] / 1e6 / seconds:.1f} MB/s")


# ----------------------------------------------------------------------------------------------------------------------
# helpers that are not the lesson


def volume(files):
    """The bytes of text in the files that can be used."""
    return sum(file.get("unpacked") or file["bytes"] for file in files if not file["problem"])


def processes(size):
    """How many processes to start for so many bytes of input: one a core that this process may use."""
    if workers:
        return workers
    if size <= SMALL:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each_batch(what, work, rules, *args):
    """
    Yield (number, number of its last file, work(rules, number, rows, *args)) for all batches, in their order.

    The bar counts bytes of input, and is called `what`.
    """
    tasks = (
        ((number, rows[-1][0], seen), (number, rows, *args))
        for number, rows, seen in batches(rules.files)
    )
    size = volume(rules.files)
    with tqdm(desc=what, total=size, unit="B", unit_scale=True) as progress:
        for (number, last, seen), value in ordered(work, (rules,), tasks, processes(size)):
            yield number, last, value
            progress.update(seen - progress.n)


def write_json(path, content):
    write_flushed(path, json.dumps(content, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    run(main, globals())
