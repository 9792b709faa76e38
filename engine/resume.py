"""
From which checkpoint a run resumes, and how much of it was planned otherwise.

    the same plan                              the newest intact checkpoint
    more minutes or samples, before the decay  the same, and the decay begins later
    more minutes or samples, in the decay      the newest from before the decay; the decayed ones are set aside
"""

import contextlib
import glob
import json
import os
import shutil

from engine import restore, runs
from engine.files import read_json


def find_checkpoint(run, begun, samples_before, steps_until):
    """
    (path, manifest) of the checkpoint to resume from, or None if there is none. Sets run.decay_at and run.spent.

    begun: as in data.py; samples_before(step), steps_until(samples): as in train.py. ValueError: the checkpoint is of a
    run with other settings, which are named; or none is left from before the decay.
    """
    now = run.config
    folder = f"{now['out']}/ckpt"
    found = restore.newest_intact(folder, run.ranks.files, now["allow_restart"])
    if not found:
        return None
    path, manifest = found
    before, samples = manifest["config"], samples_before(manifest["step"])
    # Of the data, only stages that have begun count: those of later stages may still come.
    names = [*vars(run.shape), "tokenizer", "batch_size", "batch_ramp_at", "seed", "optimizer", "state_dtype", "stage"]
    same = decisive(now, begun, samples)
    names += ["data_hash", *run.decides]
    refuse_another(path, decisive(before, begun, samples), {name: same[name] for name in names})
    decay_at = manifest.get("decay_at", before["total_samples"] - before["decay_samples"])
    planned_by = "total_samples", "decay_samples", "minutes", "schedule"
    if all((before.get(name) or 0) == now[name] for name in planned_by):
        run.decay_at = decay_at
    elif before["schedule"] == "wsd" and samples > decay_at:
        # The rate has begun to fall towards an end that is no longer the run's.
        seconds = manifest["seconds"]
        if not (60 * now["minutes"] > seconds if now["minutes"] else now["total_samples"] > samples):
            raise ValueError(f"{path} has {samples} samples and {seconds / 60:.1f} minutes behind it, and its rate has "
                             "begun to fall: resume with its own total_samples and minutes, or with more")
        found = before_decay(run, path, folder, steps_until(decay_at))
    run.spent = found[1].get("seconds", 0.0)
    return found


def decisive(config, begun, samples):
    """The settings of a run, by name; of its data and stages only what counts after so many samples."""
    parts = dict(data_hash=begun(config["data_hash"], samples), stage=bool(config.get("stage")))
    return dict(state_dtype="float32") | config | parts


def refuse_another(path, before, now):
    """ValueError naming the differences, if the checkpoint at `path` was made with other settings: {name: value}."""
    # As JSON, in which a checkpoint keeps its settings: there a tuple has become a list.
    changed = [f"{name} {before.get(name)!r} -> {value!r}" for name, value in now.items()
               if json.dumps(before.get(name)) != json.dumps(value)]
    if changed:
        raise ValueError(f"{path} is of another run: {'; '.join(changed)}. Take its settings and data (if documents "
                         "were removed, windows are numbered anew), or another --out, from these weights with "
                         "--init_from")


def refuse_finished(out, end, tokens):
    """
    ValueError if summary.json is of a run of so many tokens. If it is not there, or a full disk has torn it, the run
    was killed before it had written it, and writes it again.
    """
    try:
        finished = read_json(f"{out}/summary.json")["tokens"] >= tokens
    except (OSError, ValueError, KeyError):
        return
    if finished:
        raise ValueError(f"{out} is finished: all {end} steps are done; raise total_samples or minutes, name a later "
                         f"--stage, or sample it: python sample.py --init_from={out}")


def before_decay(run, path, folder, last):
    """The newest checkpoint until step `last`; those after it, of which `path` is the newest, are set aside."""
    out = run.config["out"]
    found = restore.newest_intact(folder, run.ranks.files, until=last)
    if not found:
        raise ValueError(f"{path}: its rate falls since step {last}, and no checkpoint from before that is left to "
                         f"train longer from: start from these weights, --init_from={out} --out=ANOTHER")
    if run.ranks.first:
        set_aside(out, found[1]["step"])
        runs.forget(out, "cooldown")                       # it was for the decay that is now given up
        print(f"{out} continues from before its decay; the decayed checkpoints are now {out}/ckpt/decayed-*")
    return found


def set_aside(out, step):
    """
    Rename the checkpoints after `step` to ckpt/decayed-N, with the log and the summary so far in the last of them.

    A run that resumes from `step` will write other ones. Nothing is deleted, and nothing else reads that name.
    """
    for path in sorted(glob.glob(f"{out}/ckpt/step-????????")):
        if int(path[-8:]) > step:
            aside = f"{out}/ckpt/decayed-{path[-8:]}"
            os.rename(path, aside)
    shutil.copy(f"{out}/log.jsonl", aside)
    with contextlib.suppress(FileNotFoundError):
        os.replace(f"{out}/summary.json", f"{aside}/summary.json")
