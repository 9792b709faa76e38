"""
Files -> token shards for train.py, and a report of all kept and removed documents.

    read         text, HTML, JSON, tables, parquet; local, hf://, s3://; compressed or not (engine/readers.py)
    sift         opt-outs (corpus/robots.py), licences and quality (corpus/rules.py)
    judge        duplicates and near-duplicates of earlier documents (corpus/dedup.py)
    order        by a hash of the id; train or validation by a hash of the text, so that equal texts are on one side in
                 all data folders, and a new file moves no other document
    tokenize     <s> text </s>, personal data as <email-pii>, <ip-pii>, <iban-pii> (corpus/pii.py)
    account      documents in = kept + removed for a reason: documents.parquet, report.md (corpus/ledger.py)

$ python prepare.py                       # the source of this Python's standard library -> data/stdlib, in seconds
$ python prepare.py my_texts/ notes.md book.jsonl.gz --out=data/mine
$ python prepare.py new/ --known=data/mine --tokenizer=data/mine/tokenizer.json --out=data/more    # to --join
$ python prepare.py --out=data/mine --remove=opted_out.txt     # delete documents; all other bytes stay the same
$ python prepare.py pages.parquet --robots=robots.jsonl.gz --near_dedup=0.72 --tokenizer=apertus
$ python prepare.py "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet" --max_bytes=4e9 --out=data/edu
$ python prepare.py "hf://datasets/epfml/FineWeb2-HQ/deu_Latn/*.parquet" --max_bytes=4e9 --out=data/deu-hq

FineWeb2-HQ is, by its card, the best tenth of FineWeb-2. On files with a column of scores (FineWeb-Edu: score)
--score_field=score --keep_top=0.33 keeps the best third of each language. The stages are in corpus/stages.py.

Memory does not grow with the length of the texts: about 180 bytes per document, 230 with near-duplicates. A run needs
disk space for three times the text. After a kill the same command resumes. The output is byte-identical for any
--workers.
"""

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
from itertools import repeat
from pathlib import Path

from tqdm import tqdm

from configurator import ROOT, run, settings
from corpus import stages
from corpus.folder import building, clear, empty, publish
from corpus.ledger import counted
from corpus.rules import limit_files
from corpus.withdraw import withdraw, withdrawn_entries
from engine.files import read_json, read_text, sha256_of, write_json
from engine.readers import files_of, find, matches

paths = []                  # files, folders, globs, hf:// s3://: text, .html, .json(l), tables, .parquet; none: stdlib
out = "data/stdlib"         # the folder to write; default data/stdlib, data/mine when paths are given
tokenizer = ""              # byte | apertus | apertus:K | a tokenizer.json | a model's folder; "" = train one
train_bpe = 4096            # ids of the BPE vocabulary that is trained on the documents if no tokenizer is named
val_share = 0.04            # share of the documents for validation, chosen by a hash (split_by)
split_by = ""               # hash for that: text | id; "" = text, but id for the stdlib, as its published figures need
shard_tokens = 100_000_000  # maximum tokens per shard
# the input
text_field = "text"         # the column or field that holds the text
encoding = ""               # encoding of the files, like latin-1 or utf-16; "" = UTF-8
source_by = ""              # a set of shards for each value of this column (language, license) or each "file"; "" = one
detect_language = 0.0       # set missing languages by py3langid if the probability is at least this, like 0.9; 0 = off
default_language = ""       # language of documents without one (columns language or lang)
default_license = ""        # licence of documents without one (column license)
max_bytes = 0.0             # stop reading when this much text is kept; 0 = read all. A token is 3 to 5 bytes
# opt-outs (corpus/robots.py); those on the page itself always count
robots = ""                 # store of robots.txt: a folder, .jsonl(.gz .zst) or .parquet of domain, content
blocked = ""                # file of blocked domains: one a line, or .jsonl or .parquet with a column domain
reservations = ""           # store of tdmrep.json and ai.txt: a folder, .jsonl or .parquet of domain, file, content
missing = "allow"           # a host without robots.txt: allow (Apertus) | deny
agents = ""                 # file of the user agents whose opt-outs count, one a line; "" = the 15 of Apertus
agents_no_star = False      # count only opt-outs that name an AI agent, not those for all agents (*)
keep_licenses = ""          # keep only these licences, separated by commas
pii = True                  # replace e-mail addresses, IP addresses and IBANs by tokens
pii_in_code = False         # replace them also in documents of language "code", such as .py files; Apertus did not
# quality (corpus/rules.py)
heuristics = ""             # rules about text: gopher,repetition,c4,fineweb,few-words:20,FOLDER of FineWeb-2's limits
keep_languages = ""         # keep only these languages, separated by commas
min_chars = 0               # minimum characters of a document
max_chars = 0               # maximum characters of a document; 0 = no limit
min_tokens = 0              # minimum tokens of a document, <s> and </s> included; needs a --tokenizer
max_tokens = 0              # maximum tokens of a document; 0 = no limit
score = ""                  # FILE.py with a function score(text) -> number, for keep_top
score_field = ""            # column of a quality score, for keep_top; ignored with score
keep_top = 0.33             # with score or score_field: keep this best share of each language
max_field = ""              # column of a score like toxicity, which must be below max_value
max_value = "apertus"       # threshold of max_field: a number, deu_Latn:0.9977,*:0.99, or apertus (toxicity)
keep_rate = ""              # keep this share at random: a number, or deu_Latn:1,*:0.3135 by language
seed = 42                   # seed of keep_rate
dedup = True                # keep only the first of equal texts
known = ""                  # a data folder to --join later: texts that it has are removed here, as duplicates
near_dedup = 0.0            # keep only the first of similar texts, from this similarity on (FineWeb: 0.72); 0 = off
decontaminate = ""          # remove documents with these prompts: .jsonl with prompt, question or text, or one a line
# documents to delete (corpus/withdraw.py)
remove = ""                 # file of documents to delete from --out: ids, URLs, hosts; .jsonl; a newer robots store
# memorisation probes
probes = ""                 # file of passages to plant: .jsonl with text, or one a line
repetitions = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # copies: each passage gets one of these numbers; 0 = none, to compare
# the run
workers = 0                 # worker processes; 0 = one per core
dry_run = False             # print the report, write nothing
strict = False              # stop at the first file, line or URL that cannot be read

# Left out of the default corpus: tests, and tables of characters and documentation that would dominate validation.
NOT_PROSE = set("test tests idle_test encodings pydoc_data site-packages __pycache__".split())
# Bytes of input up to which starting processes costs more than it saves.
SMALL = 1 << 24


def main():
    check_settings()
    if remove and (paths or dry_run):
        raise ValueError(f"--remove deletes documents of --out={out} and reads no other file: leave "
                         f"{paths[0] if paths else '--dry_run'} out")
    # With --remove any folder is accepted here: withdraw() has the better message for a joined one.
    with building(choose_out(), [remove] if remove else inputs(), None if remove else False) as (final, tmp):
        if remove:
            withdraw(remove, out, final, tmp)
        else:
            prepare(final, tmp)


def choose_out():
    """The folder to write. Without --out the user's files go to data/mine."""
    global out
    if paths and not remove and "out" not in globals().get("_asked", ()):
        out = "data/mine"
    out = os.path.normpath(out)
    return out


def inputs():
    """The files and folders on this machine that are read."""
    return [match for path in [*paths, robots, reservations, known] for match in matches(path)]


def prepare(final, tmp):
    """Make the data folder `final` from the files. tmp: its work folder, as building() gives it."""
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
    """Write work/plan.json, and keep a killed run's work if it has the same key. Returns the Work."""
    if not dry_run and os.path.exists(f"{out}/documents.parquet") and withdrawn_entries(out)[0]:
        raise ValueError(f"{out} has withdrawn documents, which its files may bring back: choose another --out, and "
                         "--remove them there too")
    found, ignored = find(paths) if paths else standard_library()
    for kind, names in ignored.items():
        print(f"not read: {len(names):,} ({kind}), such as {names[0]}")
    asked = settings(globals()) | dict(
        name=os.path.basename(out),
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
    # Written anew, since a run may resume the work of a killed --dry_run.
    write_json(path, dict(
        asked,
        key=key,
        files=found,
        ignored=ignored,
        began=began,
        command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]])))
    stages.work_of.cache_clear()
    work = stages.work_of(folder)
    work.data.mkdir(exist_ok=True)
    # Loaded here, so that all workers share the tables, and an invalid setting ends the run before it starts.
    work.rules
    work.passages
    return work


def key_of(asked, files):
    """
    A hash of the settings, and of the sizes and times of all files that decide about documents: inputs, lists, code. A
    run resumes only if it is equal.
    """
    decides = {name: value for name, value in asked.items() if name not in ("workers", "dry_run")}
    named = [
        robots, reservations, blocked, agents, decontaminate, probes, score, tokenizer.removeprefix("bpe:"),
        f"{known}/meta.json",
        *limit_files(heuristics),
        *glob.glob(f"{ROOT}/corpus/*.py"),
        f"{ROOT}/engine/readers.py",
        f"{ROOT}/tokenizer.py",
    ]
    read = [path for name in named for path in files_of(name)] + [file["path"] for file in files]
    # Skip names that are no file on this machine: s3://, or a setting that is off.
    return sha256_of([decides, files, [
        (path, os.path.getsize(path), os.path.getmtime(path)) for path in read if os.path.isfile(path)]])


def standard_library():
    """The sources of this Python's standard library, as find() gives them."""
    root = sysconfig.get_path("stdlib")
    # Left out unseen: site-packages may hold a hundred thousand files.
    found = [path for path in files_of(root, NOT_PROSE) if path.endswith(".py")]
    return [dict(name=Path(path).relative_to(root).as_posix(), path=path) for path in found], {}


def check_settings():
    """ValueError for a setting that is not valid. Work.rules checks the others."""
    if not out:
        raise ValueError("--out is empty: name a folder")
    for name, least in dict(shard_tokens=1, workers=0, max_bytes=0, train_bpe=320).items():
        if globals()[name] < least:
            raise ValueError(f"{name}={globals()[name]}: want {least} or more")
    if not repetitions or not all(type(n) is int and n >= 0 for n in repetitions):
        raise ValueError(f"repetitions={repetitions}: want whole numbers, such as (0,1,8)")
    if missing != "allow" and not robots:
        raise ValueError(f"missing={missing!r}: want allow; or deny, which drops hosts without a robots.txt: "
                         "name a store of them with --robots")
    if not 0 <= val_share < 1:
        raise ValueError(f"val_share={val_share}: want a share from 0 to below 1, like 0.04")
    if split_by not in ("", "text", "id"):
        raise ValueError(f"split_by={split_by!r}: want text, id, or nothing")
    if known and not dedup:
        raise ValueError(f"--known={known} removes duplicates and --dedup=False keeps them: leave one of them out")
    if (min_tokens or max_tokens) and not tokenizer:
        raise ValueError(f"min_tokens={min_tokens}, max_tokens={max_tokens} need a vocabulary: name one, such as "
                         "--tokenizer=apertus")
    if not 0 <= detect_language <= 1:
        raise ValueError(f"detect_language={detect_language}: want a probability from 0 to 1, such as 0.9")


# ----------------------------------------------------------------------------------------------------------------------
# processes


def local_stage(name, work):
    """Do all pieces of a stage in processes of this machine. Sifting ends when --max_bytes of text are kept."""
    pieces, enough = work.pieces(name), max_bytes
    alone = pieces == 1 or name != "check" and work.bytes_until[-1] <= SMALL
    done = each(name, range(pieces), work.folder, 1 if alone else processes())
    for number in tqdm(done, name, pieces, unit="piece", disable=None, leave=False):
        # Enough text is sifted, but part of it may be duplicates: count without them.
        if name == "sift" and 0 < enough <= work.bytes_until[number]:
            if stages.groups_needed(work, number + 1):
                return
            enough = work.bytes_until[number] + max_bytes / 10


def processes():
    """The number of worker processes: --workers, or one for each core that this process may use."""
    return workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def each(name, numbers, folder, workers):
    """Yield the numbers of pieces, in order, as they are done. OSError if a worker was killed."""
    if workers == 1:
        for number in numbers:
            stages.do(name, number, folder)
            yield number
        return
    # A forked process shares the loaded tables; a spawned one loads them again. macOS can fork too, but its libraries
    # have started threads, and the new process may crash or hang in them: None is Python's own choice, spawn.
    fork = "fork" if sys.platform == "linux" else None
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(fork), end_with_the_main_process)
    try:
        for number, _ in zip(numbers, pool.map(stages.do, repeat(name), numbers, repeat(folder))):
            yield number
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise error.with_traceback(None) from None     # as if raised here: a user's mistake is one line
    except BrokenProcessPool:
        raise OSError("a worker process was killed, most likely for want of memory: try fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def end_with_the_main_process():
    """In a worker: end when the main process does. After kill -9 of that one it would wait for work for ever."""
    # Ctrl-C is for the main process, which ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=wait, daemon=True).start()


def say(report, seconds):
    """Print the sums, what could not be read, and where the report is."""
    t = report["total"]
    removed = "".join(f" + {n:,} {reason}" for reason, (n, _) in t["removed"].items())
    print(f"{counted(t['documents_in'], 'document')} in = {t['documents']:,} kept{removed}")
    for problem, (n, first) in report["unreadable"].items():
        print(f"{n:,} could not be read: {problem}, such as {first}")
    print(f"{out}: {counted(t['tokens'], 'token')}, {t['written'] / max(t['tokens'], 1):.2f} bytes each, of "
          f"{report['run']['tokenizer']}, in {counted(len(report['outputs']['shards']), 'shard')}; "
          f"report: {out}/report.md   {seconds:.0f} s, {t['bytes_in'] / 1e6 / seconds:.1f} MB/s")


if __name__ == "__main__":
    run(main, globals())
