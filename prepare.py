"""
Files -> token shards for train.py, and a report of all kept and removed documents.

    read         text, HTML, lists, tables, parquet; here, on the hub, in a store; packed or not (engine/readers.py)
    sift         may one train on it: robots.txt, licence (corpus/robots.py); is it worth it (corpus/rules.py)
    judge        was the same text, or nearly the same, there before (corpus/dedup.py)
    order        by a hash of the id; train or validation by a hash of the text, so that each text is on one side in
                 whatever is joined later, and a new file moves no other document
    tokenize     <s> text </s>, personal data as <email-pii>, <ip-pii>, <iban-pii> (corpus/pii.py)
    account      documents in = kept + removed for a reason: documents.parquet, report.md (corpus/ledger.py)

$ python prepare.py                       # the source of this Python's standard library -> data/stdlib, in seconds
$ python prepare.py my_texts/ notes.md book.jsonl.gz --out=data/mine
$ python prepare.py new/ --known=data/mine --tokenizer=data/mine/tokenizer.json --out=data/more    # data.py --join
$ python prepare.py --out=data/mine --remove=opted_out.txt     # delete documents; all other bytes stay the same
$ python prepare.py pages.parquet --robots=robots.jsonl.gz --near_dedup=0.72 --tokenizer=apertus
$ python prepare.py "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet" --max_bytes=4e9 --out=data/edu
$ python prepare.py "hf://datasets/epfml/FineWeb2-HQ/deu_Latn/*.parquet" --max_bytes=4e9 --out=data/deu-hq

The last one is, by its card, the best tenth of FineWeb-2. On files with a column of scores (FineWeb-Edu: score)
--score_field=score --keep_top=0.33 keeps the best third of each language. The stages are in corpus/stages.py.

Memory does not grow with the text: 52 bytes a document, 164 with near-duplicates; on disk it takes three times the
text while it runs. After a kill the same command resumes. The bytes do not depend on the number of workers.
"""

import codecs
import glob
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tqdm import tqdm

from configurator import ROOT, run, settings
from corpus import stages
from corpus.folder import building, clear, empty, publish
from corpus.language import identifier
from corpus.ledger import counted
from corpus.rules import limit_files
from corpus.withdraw import withdraw, withdrawn_entries
from engine.files import read_json, read_text, sha256_of, write_json
from engine.readers import CONVERTERS, files_of, find, matches

paths = []                  # files, folders, globs, hf:// s3://: text, .html, .json(l), tables, .parquet; none: stdlib
out = "data/stdlib"         # the folder to write; default data/stdlib, data/mine when paths are given
tokenizer = ""              # byte | apertus | apertus:K | a tokenizer.json | a model's folder; "" = train_bpe
train_bpe = 4096            # size of a BPE vocabulary trained on the documents, where no tokenizer is named
val_share = 0.04            # of the documents, by a hash of...
split_by = ""               # ...their text | id; "" = text, and id for the stdlib, whose published figures are by id
shard_tokens = 100_000_000  # tokens a shard at most
# the input
text_field = "text"         # the column or field that holds the text
encoding = ""               # of the files, like latin-1 or utf-16; "" = UTF-8
source_by = ""              # a set of shards for each value of this column (language, license) or each "file"; "" = one
detect_language = 0.0       # of documents that do not say, by py3langid, from this probability on, like 0.9; 0 = off
default_language = ""       # of documents that do not say (columns language or lang)
default_license = ""        # of documents that do not say (column license)
max_bytes = 0.0             # stop reading when this much text is kept; 0 = read all. A token is 3 to 5 bytes
# may one train on it (corpus/robots.py); reservations on the page itself always count
robots = ""                 # store of robots.txt: a folder, .jsonl(.gz .zst) or .parquet of domain, content
blocked = ""                # list of blocked domains
reservations = ""           # store of tdmrep.json and ai.txt: a folder, .jsonl, .parquet
missing = "allow"           # a host without robots.txt: allow (Apertus) | deny
agents = ""                 # file of agents, one a line; "" = the 15 of Apertus
agents_no_star = False      # only opt-outs that name an AI agent, not those for everybody
keep_licenses = ""          # only these, with commas between
pii = True                  # replace e-mail and IP addresses and IBANs...
pii_in_code = False         # ...in .py files and documents of language "code" too; Apertus left code as it is
# is it worth it (corpus/rules.py)
heuristics = ""             # rules about text: gopher,repetition,c4,fineweb, few-words:20, a folder of FineWeb-2's
keep_languages = ""         # only these, with commas between
min_chars = 0               # of a document
max_chars = 0               # 0 = any
min_tokens = 0              # of a document, its begin and end included: needs a --tokenizer
max_tokens = 0              # 0 = any
score = ""                  # FILE.py with a function score(text) -> number
score_field = ""            # column of a quality score (with --score: its own), of which...
keep_top = 0.33             # ...this share of each language is kept
max_field = ""              # column of a score like toxicity, which must be below...
max_value = "apertus"       # ...this: a number, deu_Latn:0.9977,*:0.99 by language, or apertus = its thresholds
keep_rate = ""              # keep this share at random: a number, or deu_Latn:1,*:0.3135 by language
seed = 42                   # of that choice
dedup = True                # of equal texts keep the first
known = ""                  # another data folder, to --join later: its texts are duplicates here
near_dedup = 0.0            # of similar ones too: from this similarity on (FineWeb: 0.72); 0 = off
decontaminate = ""          # evaluation prompts: .jsonl with prompt, question or text, or one a line
# documents to delete (corpus/withdraw.py)
remove = ""                 # ids, URLs, hosts, one a line; .jsonl; a newer robots store
# memorisation probes
probes = ""                 # passages to plant: .jsonl with text, or one a line
repetitions = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # how often: passages are dealt out to these; 0 = never, to compare
# how
workers = 0                 # processes; 0 = one a core
dry_run = False             # print the report, write nothing
strict = False              # stop at the first file, line or URL that cannot be read

# Left out of the default corpus: tests, and tables of characters and documentation that would dominate validation.
NOT_PROSE = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "__pycache__"}
# Bytes of input up to which starting processes costs more than it saves.
SMALL = 1 << 24


def main():
    check_settings()
    if remove and (paths or dry_run):
        raise ValueError(f"--remove deletes documents of --out={out} and reads no other file: leave "
                         f"{paths[0] if paths else '--dry_run'} out")
    # withdraw() has better words for a joined folder.
    with building(choose_out(), [remove] if remove else inputs(), None if remove else False) as (final, tmp):
        if remove:
            withdraw(remove, out, final, tmp)
        else:
            prepare(final, tmp)


def choose_out():
    """The folder to write: files of the user go to data/mine, if they do not say."""
    global out
    if paths and not remove and "out" not in globals().get("_asked", ()):
        out = "data/mine"
    return out


def inputs():
    """The files and folders on this machine that are read."""
    return [match for path in [*paths, robots, reservations, known] for match in matches(path)]


def prepare(final, tmp):
    """From files to the data folder `final`. tmp: its work folder, as building() gives it."""
    began = time.time()
    work = begin(tmp / "work", began)
    for name in stages.STAGES:
        local_stage(name, work)
    report = read_json(work.data / "report.json")
    if dry_run:
        print(read_text(work.data / "report.md"))
    else:
        publish(final, tmp)
        say(report, time.time() - began)
    clear(tmp)


def begin(folder, began):
    """Write work/plan.json, or find it as a killed run left it. Another run's work is removed. Returns the Work."""
    if not dry_run and os.path.exists(f"{out}/documents.parquet") and withdrawn_entries(out)[0]:
        raise ValueError(f"{out} has withdrawn documents, which its files may bring back: choose another --out, and "
                         "--remove them there too")
    found, ignored = find(paths) if paths else standard_library()
    for kind, names in ignored.items():
        how = f": {CONVERTERS[kind]} makes text of it" if kind in CONVERTERS else ""
        print(f"not read: {len(names):,} ({kind}), such as {names[0]}{how}")
    asked = settings(globals()) | dict(
        name=os.path.basename(os.path.normpath(out)),
        out=os.path.normpath(out),
        repetitions=list(repetitions),
        by_id=(split_by or ("text" if paths else "id")) == "id",
        default_language=default_language or ("" if paths else "code"),
        default_license=default_license or ("" if paths else "PSF-2.0"),
        score_field="score" if score else score_field
    )
    key, path = key_of(asked, found), folder / "plan.json"
    if path.exists() and read_json(path).get("key") == key:
        print(f"resuming from {folder}")
    else:
        empty(folder.parent)
        folder.mkdir()
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    # Written anew: the rest of a --dry_run may be a run.
    write_json(path, dict(asked, key=key, files=found, ignored=ignored, began=began, command=command))
    stages.work_of.cache_clear()
    work = stages.work_of(folder)
    work.data.mkdir(exist_ok=True)
    # Loaded here, tables are shared by all workers, and a setting that makes no sense ends the run before it starts.
    work.rules
    return work


def key_of(asked, files):
    """
    A hash of the settings, and of the sizes and times of all files that decide about documents: inputs, lists, code. A
    run resumes only if it is equal.
    """
    decides = {name: value for name, value in asked.items() if name not in ("workers", "dry_run")}
    vocabulary = f"{tokenizer}/tokenizer.json" if os.path.isdir(tokenizer) else tokenizer.removeprefix("bpe:")
    named = [robots, reservations, blocked, agents, decontaminate, probes, score, vocabulary, f"{known}/meta.json"]
    named += [
        *limit_files(heuristics),
        *glob.glob(f"{ROOT}/corpus/*.py"),
        f"{ROOT}/engine/readers.py",
        f"{ROOT}/tokenizer.py",
        *(file["path"] for file in files),
    ]
    # Without names that are no file on this machine: s3://, or a setting that is off.
    local = [path for name in named for path in files_of(name) if os.path.isfile(path)]
    return sha256_of([decides, files, [(path, os.path.getsize(path), os.path.getmtime(path)) for path in local]])


def standard_library():
    """The sources of this Python's standard library, as find() gives them."""
    found, _ = find([sysconfig.get_path("stdlib")])
    return [f for f in found if f["name"].endswith(".py") and NOT_PROSE.isdisjoint(f["name"].split("/"))], {}


def check_settings():
    """ValueError for a setting that makes no sense. Work.rules checks the others."""
    if not out:
        raise ValueError("--out is empty: name a folder")
    for name, least in dict(shard_tokens=1, workers=0, max_bytes=0, min_chars=0, max_chars=0, min_tokens=0,
                            max_tokens=0, train_bpe=320).items():
        if globals()[name] < least:
            raise ValueError(f"{name}={globals()[name]}: want {least} or more")
    if not repetitions or not all(type(n) is int and n >= 0 for n in repetitions):
        raise ValueError(f"repetitions={repetitions}: want whole numbers, such as (0,1,8)")
    if encoding:
        try:
            codecs.lookup(encoding)
        except LookupError:
            raise ValueError(f"encoding={encoding}: want a name that Python knows, like latin-1 or utf-16") from None
    if missing not in ("allow", "deny"):
        raise ValueError(f"missing={missing!r}: want allow or deny")
    if missing == "deny" and not robots:
        raise ValueError("missing=deny drops hosts without a robots.txt: name a store of them with --robots")
    if not 0 <= val_share < 1:
        raise ValueError(f"val_share={val_share}: want a part of 1, like 0.04")
    if split_by not in ("", "text", "id"):
        raise ValueError(f"split_by={split_by!r}: want text, id, or nothing")
    if known and not dedup:
        raise ValueError(f"--known={known} removes duplicates and --dedup=False keeps them: leave one of them out")
    if (min_tokens or max_tokens) and not tokenizer:
        raise ValueError(f"min_tokens={min_tokens}, max_tokens={max_tokens} need a vocabulary: name one, such as "
                         "--tokenizer=apertus")
    if not 0 <= detect_language <= 1:
        raise ValueError(f"detect_language={detect_language}: want a probability like 0.9, from which one is believed")
    if detect_language:
        identifier()


# ----------------------------------------------------------------------------------------------------------------------
# processes


def local_stage(name, work):
    """Do all pieces of a stage in processes of this machine. With --max_bytes sifting ends when these are kept."""
    pieces, enough = work.pieces(name), max_bytes
    alone = pieces == 1 or name != "check" and work.bytes_until[-1] <= SMALL
    done = each(name, range(pieces), work.folder, 1 if alone else processes())
    for number in tqdm(done, name, pieces, unit="piece", disable=None, leave=False):
        # The text that is sifted; a part of it may be duplicates.
        if name == "sift" and 0 < enough <= work.bytes_until[number]:
            if stages.groups_needed(work, number + 1):
                return
            enough = work.bytes_until[number] + max_bytes / 10


def processes():
    """How many: one for each core that this process may use."""
    return workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def each(name, numbers, folder, workers):
    """Yield the numbers of pieces, in order, as they are done. OSError if a worker was killed."""
    if workers == 1:
        for number in numbers:
            stages.do(name, number, folder)
            yield number
        return
    # A forked process shares the loaded tables; a spawned one would load them again.
    fork = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(fork), end_with_the_main_process)
    try:
        for number, future in [(number, pool.submit(stages.do, name, number, folder)) for number in numbers]:
            try:
                future.result()
            except (ValueError, OSError, ModuleNotFoundError) as error:
                raise error.with_traceback(None) from None     # as from here: the user's mistake, one line
            yield number
    except BrokenProcessPool:
        raise OSError("a worker process was killed, most likely for want of memory: try fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def end_with_the_main_process():
    """In a worker: end when the main process does. After kill -9 it would wait for work for ever."""
    # Ctrl-C is for the main process, which ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=wait, daemon=True).start()


def say(report, seconds):
    """Print the sums, what could not be read, and where the report is."""
    t, outputs = report["total"], report["outputs"]
    removed = "".join(f" + {n:,} {reason}" for reason, (n, _) in t["removed"].items())
    print(f"{counted(t['documents_in'], 'document')} in = {t['documents']:,} kept{removed}")
    for problem, (n, first) in report["unreadable"].items():
        print(f"{n:,} could not be read: {problem}, such as {first}")
    print(f"{out}: {counted(t['tokens'], 'token')}, {t['written'] / max(t['tokens'], 1):.2f} bytes each, of "
          f"{report['run']['tokenizer']}, in {counted(len(outputs['shards']), 'shard')}; report: {out}/report.md   "
          f"{seconds:.0f} s, {t['bytes_in'] / 1e6 / seconds:.1f} MB/s")


if __name__ == "__main__":
    run(main, globals())
