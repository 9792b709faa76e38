"""
The checkpoint from which a run resumes, also one that was planned shorter.

    the same plan                              the newest intact checkpoint
    more minutes or samples, before the decay  the same, and the decay begins later
    more minutes or samples, in the decay      the newest from before the decay; renames the decayed ones
"""

import contextlib
import json
import os
import shutil

from engine import restore
from engine.checkpoint import steps_in
from engine.files import read_json
from engine.runs import forget


def find_checkpoint(run, begun, samples_before, steps_until):
    """
    (path, manifest) of the checkpoint to resume from, or None if the folder has no checkpoint. Sets run.decay_at,
    run.spent and run.decayed, the steps of the checkpoints that set_aside() renames once the run has loaded.

    begun: as in data.py; samples_before(step), steps_until(samples): as in train.py. ValueError: the checkpoint is of a
    run with other settings, which it names; or no checkpoint is left from before the decay.
    """
    now = run.config
    folder = f"{now['out']}/ckpt"
    found = restore.newest_intact(folder, run.ranks.files, now["allow_restart"])
    if not found:
        return None
    path, manifest = found
    before, samples = manifest["config"], samples_before(manifest["step"])
    names = "tokenizer batch_size batch_ramp_at seed optimizer state_dtype".split()

    def decisive(config):
        """The settings of a run; of its data and stages only the part that counts at this checkpoint."""
        same = {name: config.get(name) for name in [*vars(run.shape), *names, *sorted(run.decides)]}
        # Of the data, only stages that have begun count: those of later stages may still come.
        return same | dict(stage=bool(config.get("stage")), data_hash=begun(config["data_hash"], samples))

    refuse_another(path, decisive(before), decisive(now))
    decay_at = manifest["decay_at"]
    run.decayed = []
    if all(before[name] == now[name] for name in ("total_samples", "decay_samples", "minutes", "schedule")):
        run.decay_at = decay_at
    elif before["schedule"] == "wsd" and samples > decay_at:
        # The rate has begun to fall towards an end that is no longer the run's.
        seconds, last = manifest["seconds"], steps_until(decay_at)
        if 60 * now["minutes"] <= seconds if now["minutes"] else now["total_samples"] <= samples:
            raise ValueError(f"{path} has {samples} samples and {seconds / 60:.1f} minutes behind it, and its rate has "
                             "begun to fall: resume with its own total_samples and minutes, or with more")
        found = restore.newest_intact(folder, run.ranks.files, until=last)
        if not found:
            raise ValueError(f"{path}: its rate falls since step {last}, and no checkpoint from before that is left to "
                             f"train longer from: start from these weights, --init_from={now['out']} --out=ANOTHER")
        run.decayed = [step for step in steps_in(folder) if step > found[1]["step"]]
    run.spent = found[1]["seconds"]
    return found


def refuse_another(path, before, now):
    """ValueError naming the differences, if the checkpoint at `path` was made with other settings: {name: value}."""
    # As JSON, in which a checkpoint keeps its settings: there a tuple has become a list.
    changed = [f"{name} {before.get(name)!r} -> {value!r}" for name, value in now.items()
               if json.dumps(before.get(name)) != json.dumps(value)]
    if changed:
        raise ValueError(f"{path} is of another run: {'; '.join(changed)}. Take its settings and data (if documents "
                         "were removed, windows are numbered anew), or another --out, from these weights with "
                         "--init_from")


def refuse_finished(out, end):
    """
    ValueError if summary.json says that the run has done `end` steps. If it is absent, or torn by a full disk, the run
    was killed before it had written it, and writes it again.
    """
    try:
        finished = read_json(f"{out}/summary.json")["steps"] >= end
    except (OSError, ValueError, KeyError):
        return
    if finished:
        raise ValueError(f"{out} is finished: all {end} steps are done; train longer, or talk to "
                         f"it: python sample.py --init_from={out}")


def set_aside(out, decayed):
    """
    Rename the checkpoints of these steps to ckpt/decayed-N, with the log and the summary so far in the last of them,
    because the resumed run will write other ones. Deletes nothing; nothing else reads that name.
    """
    for step in decayed:
        aside = f"{out}/ckpt/decayed-{step:08d}"
        # A run that is extended twice may decay to the same step twice.
        while os.path.exists(aside):
            aside += "-again"
        os.rename(f"{out}/ckpt/step-{step:08d}", aside)
    shutil.copy(f"{out}/log.jsonl", aside)
    with contextlib.suppress(FileNotFoundError):
        os.replace(f"{out}/summary.json", f"{aside}/summary.json")
    forget(out, "cooldown")                                # it asked for the decay that this run repeats later
    print(f"{out} continues from before its decay; the decayed checkpoints are now {out}/ckpt/decayed-*")
