"""
Read the checkpoints that engine/checkpoint.py has written: the newest whose hashes all match.

Each process reads its own part, whatever the number of processes that wrote it. `group`: as in engine/checkpoint.py.

A run may resume with another plan than before:

    the same plan                              the newest intact checkpoint
    more minutes or samples, before the decay  the same, and the decay begins later
    more minutes or samples, in the decay      the newest from before the decay; renames the decayed ones
"""

import contextlib
import json
import math
import os
import shutil

import torch

from engine.checkpoint import gather, on_all_ranks, rank_in, sealed, steps_in, tensors_of
from engine.files import read_json, read_text, sha256
from engine.runs import forget


def newest_intact(folder, group=None, allow_restart=False, until=math.inf):
    """
    (path, manifest) of the newest checkpoint in `folder`, of those until step `until`, whose hashes all match, or None
    if there is no checkpoint.

    Prints the names of damaged ones and passes over them. ValueError if all are damaged, since a silent restart would
    throw the run away; allow_restart=True returns None instead.
    """
    # Rank 0 lists the folder for all: on a network file system two ranks may see different files.
    steps = [step for step in gather(steps_in(folder), group)[0] if step <= until]
    for step in reversed(steps):
        path = f"{folder}/step-{step:08d}"
        try:
            return path, verified(path, group)
        except OSError as e:
            if rank_in(group) == 0:
                print(f"passed over: {e}")
    if steps and not allow_restart:
        raise ValueError(f"no checkpoint in {folder} is intact ({len(steps)} damaged): restore one from a backup, "
                         "start over with another --out, or throw this run's steps away with --allow_restart")


def verified(path, group=None):
    """The manifest of a checkpoint. OSError names the first file whose hash differs from the manifest's."""
    def check():
        manifest = read_manifest(path)
        # Each rank hashes its share of the files: a checkpoint of the 70B has 1.1 TB, too much for one process.
        for file in sorted(manifest["files"])[rank_in(group)::group.size() if group else 1]:
            if sha256(f"{path}/{file}") != manifest["files"][file]:
                raise ValueError(f"{path}: {file} is not as it was written (sha256)")
        return manifest

    return on_all_ranks(check, group)[0]


def read_manifest(path):
    """
    The manifest of a checkpoint. ValueError if its own hash does not match, or if it does not name the safetensors
    files of this folder and no others.
    """
    text = manifest = None
    # Of any kind: the file may come from anybody.
    with contextlib.suppress(Exception):
        text = read_text(f"{path}/manifest.json")
        manifest = json.loads(text)["manifest"]
    if sealed(manifest) != text:
        raise ValueError(f"{path}: manifest.json is missing, damaged, or not of this project")
    # DCP reads every safetensors file of the folder, so a foreign one is an error. Other files are never opened, since
    # file systems leave some of their own (.DS_Store, .nfs0001).
    there = {file for file in os.listdir(path) if file.endswith(".safetensors")}
    for file in sorted(there ^ manifest["files"].keys()):
        raise ValueError(f"{path}: {file!r} is missing in this folder, or manifest.json does not name it: "
                         "restore it or remove it")
    return manifest


@torch.no_grad()
def load(path, model, optimizer=None):
    """
    Fill the trained weights of a model (and its optimizer) from a verified checkpoint, written by any number of
    processes. Each rank reads the shards that it holds, and nothing else.

    ValueError names the first parameter whose name or shape is not the model's.
    """
    import torch.distributed.checkpoint as dcp

    reader, saved = reader_for(path, tensors_of(model))
    for key, entry in saved.items():
        kind, _, name = key.partition("/")
        if optimizer and kind != "model":
            p = model.get_parameter(name)
            optimizer.state[p][kind] = empty_state(optimizer, p, entry.size, entry.properties.dtype)
    dcp.load(tensors_of(model, optimizer), storage_reader=reader, no_dist=True)


def reader_for(path, tensors):
    """
    (DCP's reader of a checkpoint, {key: its metadata}), for {"model/NAME": tensor}. ValueError names the first tensor
    that is only there, only here, or of another shape.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(path)
    try:
        metadata = reader.read_metadata()
    except Exception as e:                                 # of any kind: a foreign file in a folder with our manifest
        raise ValueError(f"{path}: not readable as safetensors ({type(e).__name__}: {e})") from None
    # The names of all shards are read once, however often the reader is used.
    reader.read_metadata = lambda: metadata
    saved = metadata.state_dict_metadata
    want = {key: tuple(t.shape) for key, t in tensors.items()}
    have = {key: tuple(entry.size) for key, entry in saved.items() if key.startswith("model/")}
    for key, _ in sorted(have.items() ^ want.items()):
        raise ValueError(f"{path} is of another model: {key.removeprefix('model/')} is {have.get(key)} there and "
                         f"{want.get(key)} here (None: absent); use the settings of its run")
    return reader, saved


def empty_state(optimizer, p, shape, dtype):
    """
    An uninitialised state, on the device where the optimizer would have made it: of the parameter's shape, or the
    scalar `step`. The step stays on the CPU, where counting launches no kernel, unless fused AdamW reads it on the
    device.
    """
    if shape == p.shape:
        return torch.empty_like(p, dtype=dtype)
    return torch.empty((), dtype=dtype, device=p.device if optimizer.defaults.get("fused") else "cpu")


@torch.no_grad()
def place(p, rows):
    """
    Copy a whole tensor into a parameter, or this rank's rows into its shard of it. rows: the tensor, or a slice of a
    safetensors file, of which no other row is read.
    """
    if not hasattr(p, "to_local"):
        p.copy_(rows[:])
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    if shape[0]:
        p.to_local().copy_(rows[offset[0]:offset[0] + shape[0]])


# -----------------------------------------------------------------------------
# where a run resumes


def find_checkpoint(run, started_stages, samples_before, steps_until):
    """
    (path, manifest) of the checkpoint to resume from, or None if the folder has no checkpoint. Sets run.decay_at,
    run.spent and run.decayed, the steps of the checkpoints that set_aside() renames once the run has loaded.

    started_stages: as in data.py; samples_before(step), steps_until(samples): as in train.py. ValueError: the
    checkpoint is of a run with other settings, which it names; or no checkpoint is left from before the decay.
    """
    now = run.config
    folder = f"{now['out']}/ckpt"
    found = newest_intact(folder, run.ranks.files, now["allow_restart"])
    if not found:
        return None
    path, manifest = found
    before, samples = manifest["config"], samples_before(manifest["step"])
    names = "tokenizer batch_size batch_ramp_at seed optimizer state_dtype".split()

    def decisive(config):
        """The settings of a run; of its data and stages only the part that counts at this checkpoint."""
        same = {name: config.get(name) for name in [*vars(run.shape), *names, *sorted(run.decides)]}
        # Of the data, only stages that have begun count: those of later stages may still come.
        return same | dict(stage=bool(config.get("stage")), data_hash=started_stages(config["data_hash"], samples))

    refuse_another(path, decisive(before), decisive(now))
    decay_at = manifest["decay_at"]
    run.decayed = []
    if all(before[name] == now[name] for name in ("total_samples", "decay_samples", "minutes", "schedule")):
        run.decay_at = decay_at
    elif before["schedule"] == "wsd" and samples > decay_at:
        # The rate has begun to fall towards an end that is no longer the run's. Resume from before both decays, so that
        # the rate does not jump.
        seconds, last = manifest["seconds"], steps_until(min(decay_at, run.decay_at))
        if 60 * now["minutes"] <= seconds if now["minutes"] else now["total_samples"] <= samples:
            raise ValueError(f"{path} has {samples} samples and {seconds / 60:.1f} minutes behind it, and its rate has "
                             "begun to fall: resume with its own total_samples and minutes, or with more")
        found = newest_intact(folder, run.ranks.files, until=last)
        if not found:
            raise ValueError(f"{path}: its rate falls since step {last}, and no checkpoint from before that is left to "
                             f"train longer from: start from these weights, --init_from={now['out']} --out=ANOTHER")
        run.decayed = [step for step in steps_in(folder) if step > found[1]["step"]]
    elif now["schedule"] == "wsd" and samples > run.decay_at:
        raise ValueError(f"{path} has {samples} samples behind it, and total_samples={now['total_samples']} decays "
                         f"from {run.decay_at} on: resume with more, or touch {now['out']}/cooldown to decay now")
    run.spent = found[1]["seconds"]
    return found


def refuse_another(path, before, now):
    """ValueError naming the differences, if the checkpoint at `path` was made with other settings: {name: value}."""
    # Compared as JSON, as checkpoints hold them: there a tuple has become a list.
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
    except Exception:                                      # of any kind, as damage has
        return
    if finished:
        raise ValueError(f"{out} is finished: all {end} steps are done; train longer, or talk to "
                         f"it: python sample.py --init_from={out}")


def set_aside(out, decayed):
    """
    Rename the checkpoints of these steps to ckpt/decayed-N, with the log and the summary so far in the last of them,
    because the resumed run will write other ones. Deletes nothing; no other code reads these names.
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
