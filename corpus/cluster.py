"""
prepare.py on many machines: datatrove's executors (local, Slurm, Ray) run the same stages (corpus/stages.py). Texts may
be anywhere that fsspec reads (s3://, gs://, hf://); --out must be on a disk that all machines share.

$ pip install datatrove==0.10.1
$ python -m corpus.cluster texts/ --out=data/mine --tokenizer=apertus --tasks=4
$ python -m corpus.cluster "hf://datasets/HuggingFaceFW/fineweb-edu/sample/*/*.parquet" --out=data/edu \\
      --tokenizer=apertus --near_dedup=0.72 --tasks=2000 --executor=slurm --partition=cpu

All settings of prepare.py are settings here, and the result is byte-identical. --workers is the number of tasks that
run at a time; 0 = one per core with the local executor, all tasks with the others. Many tasks share checking, sifting,
tokenizing and cutting. A single task finds duplicates, with about 180 bytes of memory per document, 230 with
near-duplicates: 1 TB of web pages (300 million documents) needs 54 or 70 GB on one machine.

After a kill the same command resumes with the unfinished tasks; datatrove's logs are in OUT.tmp/work/logs.
"""

import sys

if not __package__:
    print("cluster.py: start it from the project's root, python -m corpus.cluster", file=sys.stderr)
    sys.exit(2)

import os
import time
from functools import partial

import prepare
from configurator import ROOT, run
from corpus import stages
from corpus.folder import building, clear, publish
from engine.files import read_json

tasks = 4                   # tasks that share checking and sifting: a few GB of text each
parts = 4                   # tasks that share tokenizing and writing shards
executor = "local"          # local | slurm | ray
partition = ""              # Slurm: the partition
hours = 20                  # Slurm: time limit of a task
gb = 8                      # Slurm and Ray: memory of a task


def main(requested):
    """requested: the names of the settings that the user has set."""
    if executor not in ("local", "slurm", "ray") or executor == "slurm" and not partition:
        raise ValueError(f"executor={executor!r}: want local, ray, or slurm with --partition=NAME")
    if min(tasks, parts) < 1 or prepare.remove or prepare.dry_run:
        raise ValueError("want --tasks and --parts of 1 or more, and neither --remove nor --dry_run")
    config, began, last = prepare.configuration(requested), time.time(), None
    with building(config.out, prepare.inputs(config)) as (final, tmp):
        prepare.start_work(config, tmp / "work", began)
        for name in stages.STAGES:
            last = executor_of(name, final, tmp, last)
        try:
            last.run()
        except ValueError as e:
            raise ValueError(*e.args) from None             # a user's mistake: one line, no traceback
        except Exception as e:
            raise OSError(f"{e}; {tmp}/work/logs say more") from None
        if executor != "slurm":
            publish(final, tmp)
            clear(tmp)
    if executor == "slurm":
        print(f"submitted: {config.out} is complete when it has a meta.json; {tmp}/work/logs show the progress")
    else:
        prepare.print_summary(read_json(final / "report.json"), time.time() - began)


def executor_of(name, final, tmp, previous):
    """datatrove's executor for a stage. previous: the executor of the stage before, which must finish first."""
    n = dict(check=tasks, scores=tasks, sift=tasks, tokens=parts, cut=parts).get(name, 1)
    # Slurm's jobs outlive this process, so the last job publishes the folder.
    publishes = executor == "slurm" and name == "account"
    step = partial(stages.do_share, name, final if publishes else None, tmp)
    options = dict(pipeline=[step], tasks=n, logging_dir=f"{tmp}/work/logs/{name}", depends=previous)
    if executor == "local":
        from datatrove.executor import LocalPipelineExecutor

        workers = min(prepare.processes(prepare.workers), n)
        return LocalPipelineExecutor(**options, workers=workers, start_method="spawn")
    options.update(workers=prepare.workers or -1, mem_per_cpu_gb=gb)
    if executor == "ray":
        from datatrove.executor.ray import RayPipelineExecutor

        return RayPipelineExecutor(**options)
    from datatrove.executor import SlurmPipelineExecutor

    return SlurmPipelineExecutor(
        **options, job_name=name, time=f"{hours}:00:00", partition=partition,
        env_command=f"export PYTHONPATH={ROOT} PATH={os.path.dirname(sys.executable)}:$PATH")


if __name__ == "__main__":
    run(main, globals(), vars(prepare))
