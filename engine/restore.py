"""
Read the checkpoints that engine/checkpoint.py has written: the newest whose every hash holds.

Each process reads its own part, whatever the number of processes that wrote it. `group` as there.
"""

import contextlib
import json
import math
import os

import torch

from engine.checkpoint import everyone, rank_in, sealed, steps_in, tensors_of, together
from engine.files import read_text, sha256


def newest_intact(folder, group=None, allow_restart=False, until=math.inf):
    """
    (path, manifest) of the newest checkpoint in `folder`, of those until step `until`, whose every hash holds, or None
    if there is no checkpoint.

    Names damaged ones and passes over them. ValueError if all are damaged: to start over silently would throw the run
    away. allow_restart=True returns None instead.
    """
    # Rank 0 lists the folder for all: on a network file system two ranks may see different files.
    steps = [step for step in everyone(steps_in(folder), group)[0] if step <= until]
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

    return together(check, group)[0]


def read_manifest(path):
    """
    The manifest of a checkpoint. ValueError if its own hash does not hold, or if it does not name the safetensors files
    of this folder and no others.
    """
    text = manifest = None
    # RecursionError: a million brackets.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        text = read_text(f"{path}/manifest.json")
        manifest = json.loads(text)["manifest"]
    if sealed(manifest) != text:
        raise ValueError(f"{path}: manifest.json is missing, damaged, or not of this project")
    # DCP reads every safetensors file of the folder, so a foreign one is an error. Other files are never opened: file
    # systems leave some of their own (.DS_Store, .nfs0001).
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
    An uninitialised state, on the device where the optimizer would have made it: of the parameter's shape, or a scalar,
    the step. That stays on the CPU, where counting launches no kernel, unless fused AdamW reads it on the device.
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
