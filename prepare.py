"""
Documents -> token shards that train.py reads, and an audit of what is in them and what is not.

    sift       every document: may one train on it (robots.txt, licence), is it worth it (scores, length, contamination)
    judge      has the same text, or nearly, been there before: in the order of the input
    order      by a hash of the document's id; the hash also says train or val, so that adding a file moves no other document
    tokenize   <s> text </s>, personal data replaced by <email-pii>, <ip-pii>, <iban-pii>
    report     documents in = kept + removed for a reason: report.md, report.json, flow.png, removed.jsonl.gz

$ python prepare.py                                    # the source of this Python's standard library -> data/stdlib, in seconds
$ python prepare.py my_texts/ notes.md book.jsonl.gz --out=data/mine
$ python prepare.py pages.parquet --robots=robots.jsonl.gz --near_dedup=0.72 --tokenizer=apertus
$ python prepare.py "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet" --max_bytes=4e9 --out=data/edu
$ python prepare.py "hf://datasets/HuggingFaceFW/fineweb-2/data/deu_Latn/train/*.parquet" --max_bytes=4e9 --out=data/german
$ python prepare.py "hf://datasets/epfml/FineWeb2-HQ/deu_Latn/*.parquet" --max_bytes=4e9 --out=data/german-hq

The last one is, by its card, the best tenth of FineWeb-2 by the column quality_score. On files with such a column (FineWeb-Edu: score)
--score_field=quality_score --keep_top=0.33 keeps the best third of each language, after a first pass over the scores of all files.

Batches of a few megabytes go to all cores and come back through files, so memory does not grow with the text (40 bytes a document
stay, 152 with near-duplicates; on disk three times the text while it runs). Killed at any moment, the same command goes on, and
the result is the same to the byte, whatever the number of workers.
"""

import glob
import gzip
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from tqdm import tqdm

from corpus import audit as reports
import tokenizer as tokenizers
from corpus.robots import AGENTS, blocked_domains, open_robots
from configurator import ROOT, run, settings
from corpus.readers import batches, check, find, place, sha256
from corpus.dedup import BACKEND, Contamination, NearDuplicates, Seen, read_prompts, text_key
from corpus.quality import TOXICITY, TopShare
from corpus.sift import KINDS, Rules, ordered, scores, sift, sifted
from corpus.shards import Bucket, claim, clear, long_parts, publish, tokenize, write_shards
from corpus.shards import write_shard      # noqa: F401 (studies/memorize.py takes it from here)

paths = []                          # files, folders, globs, hf://: .txt .md .py .jsonl(.gz .zst) .parquet; nothing = the standard library
out = "data/stdlib"                 # the folder to write; default data/stdlib, data/mine when paths are given
tokenizer = ""                      # byte | apertus | apertus:K | a tokenizer.json; "" = train_bpe
train_bpe = 4096                    # size of a BPE vocabulary trained on the documents, where no tokenizer is named
val_share = 0.04                    # of the documents, by hash of their id
shard_tokens = 100_000_000          # tokens a shard at most
# what is in the data
text_field = "text"                 # the column or field that holds the text
source_by = ""                      # a set of shards for each value of this column, like language or license, or each "file"; "" = one
default_language = ""               # of documents that do not say (columns language or lang)
default_license = ""                # of documents that do not say (column license)
max_bytes = 0.0                     # stop reading when so much text is kept; 0 = read all. A token is 3 to 5 bytes
# may one train on it (corpus/robots.py)
robots = ""                         # store of robots.txt: a folder, .jsonl(.gz .zst) or .parquet of domain, content
blocked = ""                        # list of blocked domains
missing = "allow"                   # a host without robots.txt: allow (Apertus) | deny
agents = ""                         # file of agents, one a line; "" = the 15 of Apertus
agents_no_star = False              # only opt-outs that name an AI agent, not those for everybody
keep_licenses = ""                  # only these, with commas between
pii = True                          # replace e-mail and IP addresses and IBANs...
pii_in_code = False                 # ...in .py files and documents of language "code" too; Apertus left code as it is
# is it worth it (corpus/quality.py)
keep_languages = ""                 # only these, with commas between
min_chars = 0                       # of a document
max_chars = 0                       # 0 = any
score_field = ""                    # column of a quality score, of which...
keep_top = 0.33                     # ...this share of each language is kept
max_field = ""                      # column of a score like toxicity, which must be below...
max_value = "apertus"               # ...this: a number, deu_Latn:0.9977,*:0.99 by language, or apertus = its thresholds
keep_rate = ""                      # keep this share at random: a number, or deu_Latn:1,*:0.3135 by language
seed = 42                           # of that choice
dedup = True                        # of equal texts keep the first
near_dedup = 0.0                    # of similar ones too: from this similarity on (FineWeb: 0.72); 0 = off
decontaminate = ""                  # evaluation prompts: .jsonl with prompt, question or text, or one a line
# memorisation probes
probes = ""                         # passages to plant: .jsonl with text, or one a line
repetitions = (0, 1, 2, 4, 8, 16, 32, 64, 128)   # how often: passages are dealt out to these; 0 = never seen, for comparison
# how
workers = 0                         # processes; 0 = one a core
dry_run = False                     # print the report, write nothing
strict = False                      # stop at the first file, line or URL that cannot be read

# Left out of the default corpus: tests, and tables of characters and of documentation that would dominate a small validation set.
NOT_PROSE = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "__pycache__"}
BUCKET = 16 << 20                   # bytes of text that a process tokenizes at once
BPE_BYTES = 200_000_000             # text that a vocabulary is trained on at most


def main():
    global out
    if paths and out == "data/stdlib":
        out = "data/mine"
    local = inputs() if not paths else find([p for p in paths if not p.startswith("hf://")])
    named = [path for pattern in [*paths, robots] for path in glob.glob(pattern, recursive=True)]
    final, tmp, lock = claim(out, [*named, *(path for _, path in local)])
    out = os.path.normpath(out)
    try:
        with lock:
            prepare(local, final, tmp)
    except OSError as e:
        if e.errno is None:                                # one of ours
            raise
        raise OSError(f"{e}. {out} is as it was; the same command goes on from {tmp}") from None   # a full disk shows in any library


def prepare(local, final, tmp):
    began, half_done, work = time.time(), os.path.join(tmp, "data"), os.path.join(tmp, "work")
    files = survey(local, work, half_done)
    os.makedirs(half_done, exist_ok=True)
    audit, skipped = reports.Audit(), {}
    rules = read_rules(files, work)
    with gzip.GzipFile(os.path.join(half_done, "removed.jsonl.gz"), "wb", mtime=0) as removed:
        kept = judge(files, rules, audit, removed, skipped)
    for why, (n, first) in skipped.items():
        print(f"skipped {n}: {why} (the first: {first})")
    if not len(kept["place"]):
        clear(tmp)
        raise ValueError(f"no text left of {paths}: .txt, .md, .py are documents, .jsonl and .parquet need a field {text_field!r}"
                         + (f"; they have {', '.join(audit.columns)}" if audit.columns else "") + explain(audit))
    planted = plant(kept, work)
    buckets = in_order(kept)
    tok, name = vocabulary(buckets, work, half_done)
    tokens = tokenize_all(tok, buckets, rules, work)
    meta = dict(tokenizer=name, tokenizer_hash=tok.hash, vocab_size=tok.vocab_size, bos=tok.bos, eos=tok.eos)
    meta["sources"] = {} if dry_run else write_shards(tok, buckets, kept, tokens, shard_tokens, work, half_done)
    count_tokens(audit, kept, tokens)
    if planted:
        planted = write_probes(planted, tok, tokens, kept, half_done)
    account = reports.build(audit, describe(name, tok, began), files, outputs(meta, tok, kept), describe_robots(rules),
                            dict(scrubbed=pii, in_code=pii_in_code), planted)
    if dry_run:
        clear(tmp)
        return print(reports.markdown(account))
    meta["about"] = audit.about()
    write_json(os.path.join(half_done, "meta.json"), meta)
    write_json(os.path.join(half_done, "report.json"), account)
    with open(os.path.join(half_done, "report.md"), "w", encoding="utf-8") as f:
        f.write(reports.markdown(account))
    reports.picture(account, os.path.join(half_done, "flow.png"))
    reports.verify(half_done)                              # once more, from the files: in = kept + removed, hashes, tokens
    publish(final, tmp)
    say(meta, account, time.time() - began)


# ----------------------------------------------------------------------------------------------------------------------
# before the first document


def inputs():
    """The files to read, as (name, path)."""
    if paths:
        return find(paths)
    root = sysconfig.get_path("stdlib")
    found = [os.path.relpath(f, root) for f in glob.glob(os.path.join(root, "**", "*.py"), recursive=True)]
    return [(f.replace(os.sep, "/"), os.path.join(root, f)) for f in sorted(found) if not NOT_PROSE & set(f.split(os.sep))]


def survey(local, work, half_done):
    """
    The files with their hashes, as documents.check says; local: those that are here, as (name, path). A run that was killed left them
    in work/plan.json; where settings, files and these scripts are still the same its results are used, and otherwise removed.
    """
    decides = {k: v for k, v in settings(globals()).items() if k not in ("workers", "strict", "dry_run")}
    stats = [(name, path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for name, path in local]
    code = ["prepare.py", "tokenizer.py", *(f"corpus/{name}.py" for name in ("sift", "shards", "readers", "quality", "dedup", "robots", "pii"))]
    code = [os.path.join(ROOT, file) for file in code]
    others = [robots, blocked, agents, decontaminate, probes, tokenizer.removeprefix("bpe:")]
    key = json.loads(json.dumps([decides, stats, BACKEND, [sha256(p) for p in others if os.path.exists(p)], [sha256(p) for p in code]]))
    try:
        with open(os.path.join(work, "plan.json"), encoding="utf-8") as f:
            plan = json.load(f)
        if plan["key"] == key:
            print(f"going on with what the run before left in {work}")
            return plan["files"]
    except (OSError, ValueError, KeyError):
        pass
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(half_done, ignore_errors=True)
    tasks = [(name, (name, path, text_field)) for name, path in inputs()]
    many = sum(size for _, _, size, _ in stats) > SMALL or len(tasks) > len(stats)       # a footer on the hub takes a second
    found = ordered(check, (), tasks, processes() if many else 1)
    files = [file for _, file in tqdm(found, "looking at the files", total=len(tasks), unit="file", disable=None if many else True)]
    bad = next((f for f in files if f["problem"]), None)
    if strict and bad:
        raise ValueError(f"{bad['path']}: {bad['problem']} (--strict)")
    os.makedirs(work)
    write_json(os.path.join(work, "plan.json"), dict(key=key, files=files))
    return files


def read_rules(files, work):
    """The settings above as pipeline.Rules. ValueError for one that makes no sense, before any work is done."""
    if missing not in ("allow", "deny"):
        raise ValueError(f"missing={missing!r}: want 'allow' (no file = no opt-out) or 'deny' (no file = no consent)")
    if not 0 <= val_share < 1:
        raise ValueError(f"val_share={val_share}: want a part of 1, like 0.04")
    who = AGENTS
    if agents:
        with open(agents, encoding="utf-8") as f:
            who = tuple(line.split("#")[0].strip() for line in f if line.split("#")[0].strip())
    if agents_no_star:
        who = tuple(a for a in who if a != "*")
    columns = dict(licenses=listed(keep_licenses), languages=listed(keep_languages), min_chars=min_chars, max_chars=max_chars or None,
                   rate=table("keep_rate", keep_rate), seed=seed)
    if max_field:
        columns["below"] = (max_field, TOXICITY if max_value == "apertus" else table("max_value", max_value))
    rules = Rules(files=files, folder=work, strict=strict, text_field=text_field,
                  robots=open_robots(robots) if robots else None, blocked=blocked_domains(blocked) if blocked else frozenset(),
                  agents=who, missing=missing, explicit=agents_no_star, columns=columns, pii=pii, pii_in_code=pii_in_code,
                  wanted=tuple(c for c in (score_field, max_field, source_by) if c), source_by=source_by,
                  near=NearDuplicates(near_dedup) if near_dedup else None,
                  contamination=Contamination(read_prompts(decontaminate)) if decontaminate else None,
                  name=os.path.basename(os.path.normpath(out)), language=default_language or ("" if paths else "code"),
                  license=default_license or ("" if paths else "PSF-2.0"))
    if score_field:
        columns["top"] = (score_field, top_thresholds(rules, files, work))
    return rules


def listed(text):
    return {part.strip() for part in text.split(",")} if text else None


def table(name, text):
    """'0.3' -> 0.3; 'deu_Latn:1,*:0.3' -> a dict by language."""
    try:
        pairs = [part.rpartition(":") for part in text.split(",") if part.strip()]
        values = {language.strip(): float(value) for language, _, value in pairs}
    except ValueError:
        raise ValueError(f"{name}={text!r}: want a number, or numbers by language like deu_Latn:0.9,*:0.3") from None
    return values.get("", values) if values else None


def top_thresholds(rules, files, work):
    """First pass over the scores alone: {language: the score that the top share reaches} (report sec. 3)."""
    path = os.path.join(work, "thresholds.json")
    if not os.path.exists(path):
        top = TopShare(keep_top)
        tasks = ((seen, (number, rows, score_field)) for number, rows, seen in batches(files))
        with bar(files, "scores") as progress:
            for seen, found in ordered(scores, (rules,), tasks, processes(files)):
                for one in found:
                    top.add(*one)
                progress.update(seen - progress.n)
        write_json(path, top.thresholds())
    with open(path, encoding="utf-8") as f:
        return json.load(f)


# ----------------------------------------------------------------------------------------------------------------------
# what stays


def judge(files, rules, audit, removed, skipped):
    """
    Sift all batches, and remove what was there before, in the order of the input. Returns what stays as arrays, in that order:
    place (hash of the id), batch, offset, length (where the text lies in the spool), stream (source and split), group.
    """
    exact, near, columns, written, read = Seen() if dedup else None, rules.near.seen if rules.near else None, [], 0, set()
    if probes and dedup:
        exact.first(np.array([fingerprint(text) for text in read_prompts(probes)], np.uint64)[:, None])
    have = lambda number: os.path.exists(os.path.join(rules.folder, f"{number}.npz"))
    tasks = (((number, seen), (number, [] if have(number) else rows)) for number, rows, seen in batches(files))
    for file in files:
        if file["problem"]:
            group = (rules.name, rules.language, rules.license)
            tell(audit, removed, skipped, group, file["name"], None, "unreadable:" + file["problem"], 0)
    with bar(files, "sifting") as progress:
        for (number, seen), _ in ordered(sift, (rules,), tasks, processes(files)):
            arrays, info = sifted(rules.folder, number)
            audit.hear(info)
            gone = info["removed"]                                               # (row, group, id, url, reason, size)
            stays = np.ones(len(arrays["place"]), bool)                          # (n,) documents of the batch
            for reason, seen_before, keys in (("duplicate", exact, arrays["key"][:, None]), ("near-duplicate", near, arrays["bands"])):
                if seen_before is not None:
                    left = np.flatnonzero(stays)
                    again = left[~seen_before.first(keys[left])]
                    stays[again] = False
                    for i in again.tolist():
                        gone.append([arrays["row"][i], arrays["group"][i], info["ids"][i], info["urls"][i], reason, int(arrays["size"][i])])
            for _, group, *what in sorted(gone, key=lambda row: row[0]):
                tell(audit, removed, skipped, info["groups"][group], *what)
            arrays = {k: v[stays] for k, v in arrays.items() if k not in ("key", "bands")}
            groups = [audit.number(key) for key in info["groups"]]
            for g, key in enumerate(info["groups"]):
                mine = arrays["group"] == g
                if mine.any():
                    audit.keep(key, int(mine.sum()), int(arrays["size"][mine].sum()), int(arrays["length"][mine].sum()),
                               dict(zip(KINDS, arrays["found"][mine].sum(0).tolist())))
            group = np.array(groups, np.int32)[arrays["group"]]
            length = arrays["length"].astype(np.int32)
            columns.append((arrays["place"], np.full(len(group), number, np.int32), arrays["offset"], length, group))
            written += int(arrays["length"].sum())
            progress.update(seen - progress.n)
            read.update(info["files"])
            if max_bytes and written >= max_bytes:
                for i, file in enumerate(files):
                    file["problem"] = file["problem"] or (None if i in read else "not read: --max_bytes was reached")
                break
    names = ("place", "batch", "offset", "length", "group")
    kept = {name: np.concatenate([c[i] for c in columns]) if columns else np.zeros(0, np.int64) for i, name in enumerate(names)}
    val = kept["place"] / 2.0**64 < val_share
    if not val.any() and len(val) > 1:                                           # a handful of documents: the first by hash validates
        val[kept["place"].argmin()] = True
    kept["halved"] = len(val) == 1 and halve(kept, rules.folder)
    if kept["halved"]:
        val = np.array([False, True])
    sources = sorted({key[0] for key in audit.groups})
    kept["sources"] = sources
    source = np.array([sources.index(key[0]) for key in audit.groups] or [0])[kept["group"]]
    kept["stream"] = (2 * source + val).astype(np.int32)
    return kept


def halve(kept, folder):
    """A single document, like a book: its end, from a line break or a space on, validates. False if there is none."""
    with open(os.path.join(folder, f"{kept['batch'][0]}.text"), "rb") as f:
        raw = f.read()
    at = int(len(raw) * (1 - val_share))
    cut = next((n + 1 for n in (raw.find(b"\n", at), raw.find(b" ", at)) if 0 <= n < len(raw) - 1), 0)
    if not cut or not val_share:
        return False
    for name in ("place", "batch", "offset", "length", "group"):
        kept[name] = np.repeat(kept[name], 2)
    kept["offset"][1], kept["length"][:] = cut, (cut, len(raw) - cut)
    return True


def tell(audit, removed, skipped, key, doc_id, url, reason, size):
    """A document goes: a line in removed.jsonl.gz, a count in the audit."""
    removed.write((json.dumps(dict(id=doc_id, **(dict(url=url) if url else {}), reason=reason), ensure_ascii=False) + "\n").encode())
    audit.remove(key, reason, size)
    if reason.startswith("unreadable:"):
        if strict:
            raise ValueError(f"{doc_id}: {reason[11:]} (--strict)")
        n, first = skipped.get(reason[11:], (0, doc_id))
        skipped[reason[11:]] = n + 1, first


def fingerprint(text):
    return int.from_bytes(text_key(text)[:8], "little")


def plant(kept, work):
    """Add the passages of --probes to what stays, each as often as its repetitions say: a source of its own, in an order of its own."""
    if not probes:
        return None
    passages = [dict(id=f"probe/{i}", text=text) for i, text in enumerate(read_prompts(probes))]
    passages.sort(key=lambda p: place(p["id"] + p["text"]))
    source, at, added = len(kept["sources"]), 0, []
    with open(os.path.join(work, "-1.text"), "wb") as f:
        for n, passage in enumerate(passages):
            raw = passage["text"].encode()
            passage["repetitions"] = repetitions[n % len(repetitions)]
            for k in range(passage["repetitions"]):
                added.append((place(f"{passage['id']}#{k}"), -1, at, len(raw), -1, 2 * source))
            at += f.write(raw)
    kept["sources"] = [*kept["sources"], "probes"]
    for i, name in enumerate(("place", "batch", "offset", "length", "group", "stream")):
        kept[name] = np.concatenate((kept[name], np.array([row[i] for row in added], kept[name].dtype)))
    return passages


def in_order(kept):
    """What stays, in the order of its hashes, in buckets of BUCKET bytes. Sorts the arrays of `kept` in place."""
    order = np.argsort(kept["place"], kind="stable")
    for name in ("place", "batch", "offset", "length", "group", "stream"):
        kept[name] = kept[name][order]
    ends = np.cumsum(kept["length"].astype(np.int64))
    cuts = np.flatnonzero(np.diff((ends - kept["length"]) // BUCKET)) + 1
    parts = (np.split(kept[name], cuts) for name in ("batch", "offset", "length", "stream"))
    return [Bucket(number, *part) for number, part in enumerate(zip(*parts))]


# ----------------------------------------------------------------------------------------------------------------------
# tokens


def vocabulary(buckets, work, half_done):
    """(the Tokenizer, its name in meta.json). Trained on the training split where none is named."""
    if tokenizer:
        tok = tokenizers.load(tokenizer)
        if not tok.name.startswith("bpe:"):
            return tok, tok.name
        shutil.copy(tok.name.removeprefix("bpe:"), os.path.join(half_done, "tokenizer.json"))   # the folder is complete in itself
        return tok, "tokenizer.json"
    path = os.path.join(half_done, "tokenizer.json")
    if os.path.exists(path):
        return tokenizers.load(path), "tokenizer.json"

    def texts():
        size = 0
        for bucket in buckets:
            train = bucket.stream % 2 == 0
            for text in Bucket(0, *(x[train] for x in (bucket.batch, bucket.offset, bucket.length, bucket.stream))).texts(work):
                yield from long_parts(text)
                size += len(text)
            if size > BPE_BYTES:
                return
    return tokenizers.train_bpe(texts(), train_bpe, path), "tokenizer.json"


def tokenize_all(tok, buckets, rules, work):
    """All buckets into work/{number}.tokens. Returns the number of tokens of each document, in the final order."""
    size, began, done, counts = sum(int(b.length.sum()) for b in buckets), time.time(), 0, []
    with tqdm(desc="tokenizing", total=size, unit="B", unit_scale=True) as progress:
        tasks = ((b, (b,)) for b in buckets)
        for b, tokens in ordered(tokenize, (tok, work), tasks, processes(rules.files)):
            done += tokens
            progress.set_postfix_str(f"{done / max(time.time() - began, 1e-3) / 1e6:.2f}M tokens/s", refresh=False)
            progress.update(int(b.length.sum()))
    for b in buckets:
        with open(os.path.join(work, f"{b.number}.json"), encoding="utf-8") as f:
            counts.append(np.array(json.load(f)["counts"], np.int64))
    return np.concatenate(counts)


# ----------------------------------------------------------------------------------------------------------------------
# the account


def count_tokens(audit, kept, tokens):
    """The tokens of what was kept, by group."""
    mine = kept["group"] >= 0                                                    # not the probes
    for key, n in zip(list(audit.groups), np.bincount(kept["group"][mine], tokens[mine], len(audit.groups))):
        audit.groups[key]["tokens"] = int(n)


def write_probes(passages, tok, tokens, kept, half_done):
    """probes.json for memorize.py: each passage, its ids, how often it stands in the training split. Returns the audit's line."""
    planted = kept["group"] < 0
    write_json(os.path.join(half_done, "probes.json"), dict(
        tokenizer_hash=tok.hash, repetitions=list(repetitions), source="probes",
        probes=[dict(id=p["id"], repetitions=p["repetitions"], text=p["text"], ids=tok.encode(p["text"])) for p in passages]))
    return dict(file=probes, sha256=sha256(probes), passages=len(passages), repetitions=list(repetitions),
                documents=int(planted.sum()), tokens=int(tokens[planted].sum()))


def describe(name, tok, began):
    """Who made this, when, with what."""
    def of(package):
        try:
            return version(package)
        except PackageNotFoundError:
            return None
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        git = ""
    command = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    return dict(out=out, command=command, date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
                minhash=BACKEND if near_dedup else None, code=git or None, python=sys.version.split()[0],
                settings={k: v for k, v in settings(globals()).items() if k != "paths"},
                packages={p: of(p) for p in ("numpy", "tiktoken", "pyarrow", "rensa", "huggingface_hub")},
                tokenizer=name, tokenizer_sha256=tok.hash)


def outputs(meta, tok, kept):
    shards = [shard for source in meta["sources"].values() for split in source.values() for shard in split["shards"]]
    return dict(shards=shards, bos=tok.bos, eos=tok.eos, halved=kept["halved"],
                rule="The only document was cut in two: its end is for validation." if kept["halved"] else
                f"A document is for validation where the first 64 bits of the sha256 of its id, over 2^64, are below {val_share}.")


def describe_robots(rules):
    if not robots and not blocked:
        return None
    where = robots or blocked
    return dict(store=where, sha256=sha256(where), date=time.strftime("%Y-%m-%d", time.gmtime(os.stat(where).st_mtime)),
                agents=list(rules.agents), missing=missing, only_explicit=agents_no_star)


def explain(audit):
    """Why nothing was left, for the error."""
    gone = reports.total(audit.groups.values())["removed"]
    return f" (removed: {', '.join(f'{n} {reason}' for reason, (n, _) in gone.items())})" if gone else ""


def say(meta, account, seconds):
    t = account["total"]
    sources = meta["sources"].values()
    documents, tokens, size = (sum(s["train"][k] for s in sources) for k in ("documents", "tokens", "bytes"))
    if t["documents"] < t["documents_in"]:
        gone = " + ".join(f"{n:,} {reason}" for reason, (n, _) in t["removed"].items())
        print(f"{t['documents_in']:,} documents in = {t['documents']:,} kept + {gone}")
    print(f"{out}: {documents:,} documents, {tokens:,} tokens to train on ({size / max(tokens, 1):.2f} bytes each), "
          f"{sum(s['val']['tokens'] for s in sources):,} to validate; tokenizer {meta['tokenizer']} of {meta['vocab_size']:,}")
    print(f"the audit: {out}/report.md, flow.png   {seconds:.0f} s, {t['bytes_in'] / 1e6 / seconds:.1f} MB/s")


# ----------------------------------------------------------------------------------------------------------------------
# helpers that are not the lesson


SMALL = 1 << 24                     # bytes of input up to which starting processes costs more than it saves


def processes(files=None):
    if files is not None and sum(f.get("unpacked") or f["bytes"] for f in files) <= SMALL and not workers:
        return 1
    return workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def bar(files, what):
    return tqdm(desc=what, total=sum(f.get("unpacked") or f["bytes"] for f in files if not f["problem"]), unit="B", unit_scale=True)


def write_json(path, content):
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump(content, f, indent=1, ensure_ascii=False)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)


if __name__ == "__main__":
    run(main, globals())
