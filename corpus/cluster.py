"""
prepare.py on many machines, by datatrove, on which Apertus' own pipeline runs: its executors (this machine, Slurm,
Ray), its markers of finished tasks, its duplicates over all machines. Texts may lie anywhere that fsspec reads (s3://,
gs://, hf://), --out on a disk that all machines see.

    judge      TASKS        texts -> the rules about one document, personal data replaced; the keys of duplicates
    pairs      KEYS         documents that share a key, over all machines       (datatrove's second stage of MinHash)
    clusters   1            which of them goes                                  (the third)
    deal       TASKS        what stays, dealt to PARTS by the hash of its id    (the fourth)
    tokens     PARTS        in the order of the hash: shards, and the rows of kept.parquet
    account    1            meta.json, kept.parquet, the audit

The rules are those of prepare.py, all its settings that look at one document alone (corpus/steps.py); what looks at all
of them at once (a vocabulary that is learnt, top shares, --max_bytes, --known, probes) is refused by name.
Without near-duplicates the tokens are prepare.py's, in its order, and only the cuts between shards are others. With
them the pairs are the same, but not always what stays of three: MinHash joins pairs to a cluster, of which one stays,
and prepare.py keeps what is like nothing that it kept before.

On paper, for 10 TB of 3 billion documents, from rates on one core: judge 200 core-hours, half a GB a task and the
robots.txt; pairs 90, some MB; clusters one process, 170 bytes for each document that has a duplicate; deal 50; tokens
350, five times a part. With 2,000 tasks of 5 GB and 10,000 parts that is some 20 minutes of 2,000 cores.

Killed at any moment, the same command goes on with the tasks that are not done. A worker that the system kills for want
of memory leaves datatrove's local executor waiting: stop it, and start again with fewer --workers.

$ python -m corpus.cluster texts/ --out=data/mine --tokenizer=apertus --tasks=4
$ python -m corpus.cluster "hf://datasets/HuggingFaceFW/fineweb-edu/sample/*/*.parquet" --out=data/edu \\
      --tokenizer=apertus --near_dedup=0.72 --tasks=2000 --parts=500 --executor=slurm --partition=cpu
"""

import sys

if __name__ == "__main__" and not __package__:
    print("cluster.py: start it from the project's root, python -m corpus.cluster", file=sys.stderr)
    sys.exit(2)

import json
import math
import os
import time
from importlib.util import find_spec
from pathlib import Path

import prepare
from configurator import ROOT, run, settings
from corpus.audit import Audit
from corpus.dedup import NearDuplicates
from engine.files import lock_file, read_json, sha256, write_flushed
from engine.inputs import find, ignored

# All settings of prepare.py are settings here too.
globals().update(settings(vars(prepare)))
out = "data/mine"           # the folder to write, on a disk that all machines see
tasks = 4                   # parts of the input: some GB each
parts = 4                   # parts of the output: 1 GB of text each, which a task holds in memory
executor = "local"          # local | slurm | ray
workers = 0                 # tasks at a time; 0 = a core each on this machine, all elsewhere
partition = ""              # of Slurm
hours = 20                  # of Slurm, for a task at most
gb = 8                      # memory of a task, for Slurm and Ray

# What a rule that looks at all documents at once would need.
ALONE = dict(score_field="", max_bytes=0.0, probes="", known="", remove="", dry_run=False)


def main():
    global out
    out = os.path.normpath(out)
    if not find_spec("datatrove"):
        raise ValueError("corpus.cluster runs on datatrove: pip install datatrove==0.10.1")
    if executor not in ("local", "slurm", "ray"):
        raise ValueError(f"executor={executor!r}: want local, slurm or ray")
    if tasks < 1 or parts < 1:
        raise ValueError(f"tasks={tasks}, parts={parts}: want at least one of each")
    if executor == "slurm" and not partition:
        raise ValueError("executor=slurm wants --partition=NAME")
    asked = {name: value for name, value in settings(globals()).items() if name in settings(vars(prepare))}
    for name, value in ALONE.items():
        if asked[name] != value:
            raise ValueError(f"--{name} looks at all documents at once: prepare.py has it, on one machine")
    if not tokenizer or not paths:
        raise ValueError("name the texts and a --tokenizer: one that is learnt from them has seen all of them")
    begin(asked)
    last = None
    for name, pipeline, n in stages(asked):
        last = executor_of(name, pipeline, n, last)
    with open(f"{out}/work/lock", "a") as lock:
        if not lock_file(lock):
            raise ValueError(f"another run is at work in {out}: wait for it, or name another --out")
        # Two that began at once have both written the list: this one goes on if that is its own.
        begin(asked)
        try:
            last.run()
        except (ValueError, OSError) as e:
            raise ValueError(f"{e}. {out}/work/logs say more; the same command goes on with what is not done") from None
    if executor == "slurm":
        print(f"submitted: {out} is finished when it has a meta.json; {out}/work/logs say how far it is")
    else:
        prepare.out = out
        account = read_json(f"{out}/report.json")
        prepare.say(read_json(f"{out}/meta.json"), account, account["run"]["seconds"])


def begin(asked):
    """
    Make the folder, with the list of files and what was asked, or find it as it was left. ValueError: another run's, or
    a folder that is not ours.
    """
    path = f"{out}/work/cluster.json"
    asked = json.loads(json.dumps(dict(asked, tasks=tasks, parts=parts)))
    del asked["workers"]
    if os.path.exists(f"{out}/meta.json"):
        raise ValueError(f"{out} is finished: name another --out, or remove it")
    if os.path.exists(path):
        plan = read_json(path)
        if plan["asked"] != asked:
            raise ValueError(f"{out} holds another run, which is not finished: say the same, or name another --out")
        if plan["stamps"] != stamps(plan["files"]):
            raise ValueError(f"{out} was begun with other texts, or other code: name another --out, or remove it")
        return
    # A kill may have left the folder without the list of files.
    for folder, ours in ((out, "work"), (f"{out}/work", "cluster.json.tmp")):
        if os.path.isdir(folder) and set(os.listdir(folder)) - {ours}:
            raise ValueError(f"{folder} holds something else: name another --out")
    # A setting that makes no sense is told before anything is written.
    prepare.__dict__.update(asked)
    prepare.read_rules([], Path(out, "work"))
    files = find(paths)
    if not files:
        raise ValueError(prepare.nothing_left(Audit()))
    sizes = [0 if "://" in file else os.path.getsize(file) for _, file in files]
    plan = dict(
        asked=asked,
        files=files,
        sizes=sizes,
        stamps=stamps(files),
        ignored=ignored(paths),
        began=time.time(),
    )
    os.makedirs(f"{out}/work", exist_ok=True)
    write_flushed(path, json.dumps(plan))


def stamps(files):
    """What a run that goes on must find as it was: times and sizes of the texts on this machine, and the code."""
    times = [[os.stat(file).st_mtime_ns, os.stat(file).st_size] for _, file in files if "://" not in file]
    code = [sha256(os.path.join(ROOT, file)) for file in prepare.CODE]
    return [times, code]


# ----------------------------------------------------------------------------------------------------------------------
# the stages


def stages(asked):
    """Yield (name, pipeline of datatrove, tasks)."""
    from datatrove.pipeline.dedup.minhash import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter

    from corpus.steps import Account, Deal, Duplicates, Judge, Judged, Tokens, keys_of
    work = f"{out}/work"
    keys = keys_of(NearDuplicates(near_dedup).bands if near_dedup else 0)
    yield "judge", [Judge(out)], tasks
    if dedup or near_dedup:
        yield "pairs", [MinhashDedupBuckets(f"{work}/keys", f"{work}/pairs", config=keys)], keys.num_buckets
        yield "clusters", [MinhashDedupCluster(f"{work}/pairs", f"{work}/gone", config=keys)], 1
    without_copies = MinhashDedupFilter(f"{work}/gone", exclusion_writer=Duplicates(out))
    yield "deal", [Judged(out), without_copies, Deal(out)], tasks
    yield "tokens", [Tokens(out)], parts
    yield "account", [Account(out)], 1


def executor_of(name, pipeline, n, before):
    """One of datatrove's executors for a stage. before: that of the stage that must be done first."""
    options = dict(pipeline=pipeline, tasks=n, logging_dir=f"{out}/work/logs/{name}", depends=before)
    if executor == "local":
        from datatrove.executor import LocalPipelineExecutor
        prepare.workers = workers
        at_a_time = min(prepare.processes(math.inf), n)
        return LocalPipelineExecutor(**options, workers=at_a_time, start_method="spawn")
    options["workers"] = workers or -1
    options["mem_per_cpu_gb"] = gb
    if executor == "ray":
        from datatrove.executor.ray import RayPipelineExecutor
        return RayPipelineExecutor(**options)
    from datatrove.executor import SlurmPipelineExecutor
    return SlurmPipelineExecutor(
        **options,
        job_name=name,
        time=f"{hours}:00:00",
        partition=partition,
        env_command=f"export PYTHONPATH={ROOT} PATH={os.path.dirname(sys.executable)}:$PATH",
    )


if __name__ == "__main__":
    run(main, globals())
