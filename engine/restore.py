"""
Read the checkpoints that engine/checkpoint.py has written: the newest whose every hash holds.

Each process reads its own part, whatever the number of processes that wrote it. `group` as there.
"""

import json
import math
import os

import torch
import torch.distributed as dist

from engine.checkpoint import everyone, is_first, sealed, steps_in
from engine.files import sha256


def newest_intact(folder, group=None, allow_restart=False, until=math.inf):
    """
    (path, manifest) of the newest checkpoint in `folder`, of those until step `until`, whose every hash holds, or None
    if there is no checkpoint.

    Damaged ones are named and passed over. ValueError if all are damaged: to start over silently would throw the run
    away. allow_restart=True returns None instead.
    """
    damaged = 0
    # Rank 0 lists the folder for all: on a network file system two ranks may see different files.
    for step in reversed(everyone(steps_in(folder), group)[0]):
        if step > until:
            continue
        path = f"{folder}/step-{step:08d}"
        try:
            return path, verified(path, group)
        except ValueError as e:
            damaged += 1
            if is_first(group):
                print(f"passed over: {e}")
    if damaged and not allow_restart:
        raise ValueError(f"no checkpoint in {folder} is intact ({damaged} damaged): restore one from a backup, "
                         "start over with another --out, or throw this run's steps away with --allow_restart")
    return None


def verified(path, group=None):
    """The manifest of a checkpoint. ValueError names the first file whose hash differs from the manifest's."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    manifest, problem = {}, ""
    try:
        manifest = read_manifest(path)
        # Each rank hashes its share of the files: a checkpoint of the 70B has 1.1 TB, too much for one process.
        for file, want in sorted(manifest["files"].items())[rank::size]:
            if not os.path.isfile(f"{path}/{file}") or sha256(f"{path}/{file}") != want:
                raise ValueError(f"{path}: {file} is missing or not as it was written (sha256)")
    except (OSError, ValueError) as e:
        problem = str(e)
    problems = everyone(problem, group)
    if any(problems):
        raise ValueError(next(filter(None, problems)))
    return manifest


def read_manifest(path):
    """The manifest of a checkpoint, whose own hash holds and whose files lie in this folder; else ValueError."""
    try:
        with open(f"{path}/manifest.json", encoding="utf-8") as f:
            text = f.read()
        manifest = json.loads(text)["manifest"]
        files = manifest["files"]
        sound = sealed(manifest) == text and isinstance(files, dict) and isinstance(manifest["step"], int)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # RecursionError: a million brackets
        sound = False
    if not sound:
        raise ValueError(f"{path}: manifest.json is missing, damaged, or not of this project")
    for file in files:
        if file != os.path.basename(file) or file in ("", ".", ".."):
            raise ValueError(f"{path}: manifest.json names {file!r}, which is not a file in this folder")
    # DCP reads every safetensors file of the folder, so a foreign one is an error. Other files are never opened: file
    # systems leave some of their own (.DS_Store, .nfs0001).
    for file in sorted(os.listdir(path)):
        if file.endswith(".safetensors") and file not in files:
            raise ValueError(f"{path}: {file} is not of this checkpoint (the manifest does not name it): "
                             "remove that file")
    return manifest


@torch.no_grad()
def load(path, model, optimizer=None):
    """
    Fill the trained weights of a model (and its optimizer) from a verified checkpoint, written by any number of
    processes. Each rank reads the shards that it holds, and nothing else.

    ValueError names the first parameter whose name or shape is not the model's.
    """
    import torch.distributed.checkpoint as dcp

    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = {f"model/{name}": p.detach() for name, p in params.items()}
    reader, saved = reader_for(path, tensors)
    if optimizer is not None:
        for key, entry in saved.items():
            kind, _, name = key.partition("/")
            if kind != "model":
                p = params[name]
                tensors[key] = empty_state(optimizer, p, entry.size, entry.properties.dtype)
                optimizer.state[p][kind] = tensors[key]
    dcp.load(tensors, storage_reader=reader, no_dist=True)


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
    for key in sorted(have.keys() | want.keys()):
        if have.get(key) != want.get(key):
            raise ValueError(f"{path} is of another model: {key.removeprefix('model/')} is {have.get(key)} there and "
                             f"{want.get(key)} here (None: absent); use the settings of its run")
    return reader, saved


def empty_state(optimizer, p, shape, dtype):
    """
    An uninitialised state, on the device where the optimizer would have made it: of the parameter's shape, or a scalar,
    the step. That stays on the CPU, where counting launches no kernel, unless fused AdamW reads it on the device.
    """
    if tuple(shape) == tuple(p.shape):
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
