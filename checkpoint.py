"""
Checkpoints that survive being killed, and that nobody has to trust.

    out/run/ckpt/step-00001000/    shard-*.safetensors    weights and optimizer states, written by torch.distributed.checkpoint
                                   manifest.json          step, settings, and the sha256 of every file, of itself too

Three rules. A checkpoint is written under a temporary name, flushed to disk and then renamed: under its final name it is whole, or it
is not there. No format notices a flipped bit (torch.save, DCP and safetensors all load it silently), so every file is hashed, and the
newest checkpoint whose hashes hold is the one that is used. And nothing here can execute: safetensors and JSON, no pickle (DCP's own
.metadata is one, and torch.load of an untrusted file runs code).
"""

import hashlib
import json
import os
import re
import shutil
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

warnings.filterwarnings("ignore", message="torch.distributed is disabled")     # one process needs no process group


def tensors_of(model, optimizer):
    """Everything that training changes, flat: {"model/NAME": weight, "exp_avg/NAME": state, ...}."""
    names = {p: name for name, p in model.named_parameters()}
    flat = {f"model/{name}": p.detach() for p, name in names.items()}
    for p, state in optimizer.state.items():
        flat.update({f"{key}/{names[p]}": value.detach() for key, value in state.items()})
    return flat


def save(folder, step, model, optimizer, info, keep=2):
    """
    Write folder/step-N, all or nothing, and delete all but the `keep` newest. info: what else to know, JSON (settings, counters).
    Returns the path. OSError (disk full, read-only) leaves what was there before untouched and nothing under the new name.
    """
    final = os.path.join(folder, f"step-{step:08d}")
    tmp = final + ".tmp"
    shutil.rmtree(tmp, ignore_errors=True)
    try:
        os.makedirs(tmp)
        dcp.save(tensors_of(model, optimizer), storage_writer=HuggingFaceStorageWriter(tmp, save_distributed=True), no_dist=True)
        files = {file: sha256(os.path.join(tmp, file)) for file in sorted(os.listdir(tmp))}
        write_flushed(os.path.join(tmp, "manifest.json"), sealed(dict(step=step, files=files, **info)))
        for file in files:
            flush(os.path.join(tmp, file))
        flush(tmp)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(tmp, final)
        flush(folder)
    except (OSError, RuntimeError, dcp.CheckpointException) as e:             # torch wraps a full disk in either of the last two
        shutil.rmtree(tmp, ignore_errors=True)
        raise OSError(f"checkpoint of step {step} was not written to {folder}: {str(e).strip().splitlines()[-1]}") from None
    for old in steps_in(folder)[:-keep]:
        shutil.rmtree(os.path.join(folder, f"step-{old:08d}"))
    return final


def newest_intact(folder):
    """
    (path, manifest) of the newest checkpoint in `folder` whose every hash holds, or None if there is none at all. Damaged ones are
    named and passed over; if all are damaged: ValueError, because starting over in silence would throw a run away.
    """
    damaged = []
    for step in reversed(steps_in(folder)):
        path = os.path.join(folder, f"step-{step:08d}")
        try:
            return path, verified(path)
        except ValueError as e:
            damaged.append(str(e))
            print(f"passed over: {e}")
    if damaged:
        raise ValueError(f"no checkpoint in {folder} is intact ({len(damaged)} damaged): restore one from a backup, or start over with another --out")
    return None


def verified(path):
    """The manifest of a checkpoint whose every file has the hash that it promises; else ValueError with the first that has not."""
    try:
        with open(os.path.join(path, "manifest.json"), encoding="utf-8") as f:
            text = f.read()
        manifest = json.loads(text)["manifest"]
        sound = sealed(manifest) == text
    except (OSError, ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise ValueError(f"{path}: manifest.json is missing, damaged, or not of this project")
    for file, want in manifest["files"].items():
        if file != os.path.basename(file):
            raise ValueError(f"{path}: manifest.json names {file!r}, which is not a file in this folder")
        if not os.path.isfile(os.path.join(path, file)) or sha256(os.path.join(path, file)) != want:
            raise ValueError(f"{path}: {file} is missing or not as it was written (sha256)")
    return manifest


@torch.no_grad()
def load(path, model, optimizer=None):
    """
    Fill model (and optimizer) from a verified checkpoint, whatever the number of processes that wrote it. Names and shapes must be
    the model's: ValueError names the difference.
    """
    try:
        saved = HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
    except Exception as e:                                                     # a foreign file in a folder with our manifest
        raise ValueError(f"{path}: not readable as safetensors ({type(e).__name__}: {e})") from None
    params = dict(model.named_parameters())
    stored = {k[len("model/"):]: tuple(v.size) for k, v in saved.items() if k.startswith("model/")}
    for name in sorted(stored.keys() | params.keys()):
        have, want = stored.get(name), tuple(params[name].shape) if name in params else None
        if have != want:
            raise ValueError(f"{path} is of another model: {name} is {have} there and {want} here (None: absent); use the settings of its run")
    flat = {f"model/{name}": p.detach() for name, p in params.items()}
    if optimizer is not None:
        for key, entry in saved.items():
            kind, _, name = key.partition("/")
            if kind != "model":                                                # like its parameter, or a scalar such as the step
                like = params[name] if tuple(entry.size) == tuple(params[name].shape) else torch.empty(())
                optimizer.state[params[name]][kind] = flat[key] = torch.empty_like(like, dtype=entry.properties.dtype)
    dcp.load(flat, storage_reader=HuggingFaceStorageReader(path), no_dist=True)


def steps_in(folder):
    """The steps of the checkpoints that stand under a final name, in order."""
    found = (re.fullmatch(r"step-(\d+)", name) for name in (os.listdir(folder) if os.path.isdir(folder) else []))
    return sorted(int(m[1]) for m in found if m)


def sealed(manifest):
    """The manifest as text that carries its own sha256: verified() writes it again and compares, so that no bit of it may flip."""
    body = json.dumps(manifest, sort_keys=True)
    return json.dumps(dict(sha256=hashlib.sha256(body.encode()).hexdigest(), manifest=manifest), sort_keys=True, indent=1)


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_flushed(path, text):
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def flush(path):
    """fsync a file or folder that is written already: a rename may reach the disk before the data it names."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
