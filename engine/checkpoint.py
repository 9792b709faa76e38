"""
Checkpoints that survive being killed, and that nobody has to trust.

    out/run/ckpt/step-00001000/
        shard-*.safetensors    weights and optimizer states, by torch.distributed.checkpoint (DCP)
        manifest.json          step, settings, and the sha256 of every file, of itself too

All or nothing. A checkpoint is written under a temporary name, flushed to disk, and then renamed. Under its final name
    it is whole, or it is not there.
Every file is hashed. torch.save, DCP and safetensors all load a flipped bit without a word. The newest checkpoint whose
    hashes hold is the one that is used.
Nothing here can execute: safetensors and JSON, no pickle. (DCP's own .metadata is a pickle, and torch.load of an
    untrusted file runs code.)

Each process writes, hashes and reads its own part, and any number of processes can read what any other number wrote.
`group` is a gloo process group for this file alone (engine/parallel.py makes it), or None for one process. A Saver
writes while training goes on.
"""

import functools
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from engine.files import NO_LOCKS, flush, lock_file, make_folder, sha256, write_flushed
from engine.hardware import free_on_host
from engine.parallel import launched

# DCP warns where there is no process group, which one process does not need.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def base_of(model):
    """{name: parameter} of a model without its adapters (posttrain/lora.py): what a file of the whole model holds."""
    return {name: p for name, p in model.named_parameters() if ".lora_" not in name}


def fingerprint(model):
    """
    Which weights these are, on whatever device and in fp32, bf16, 8 or 4 bits: sha256 over the first 64 values of every
    tensor, rounded to bf16. Adapters are not part of it.

    A matrix in 8 or 4 bits has kept those that it had before, so that the hash is the same.
    """
    digest = hashlib.sha256()
    seen = set()  # a tied head is the embedding, and counts once
    for path, module in model.named_modules():
        if ".lora_" in path:
            continue
        own = {"weight": module.first} if hasattr(module, "first") else dict(module.named_parameters(recurse=False))
        for leaf, p in own.items():
            if p in seen:
                continue
            seen.add(p)
            # A sharded tensor is gathered, one at a time.
            p = p.full_tensor() if hasattr(p, "full_tensor") else p
            first = p.detach().flatten()[:64].bfloat16().float()
            digest.update(f"{path}.{leaf}".removeprefix(".").encode())
            digest.update(first.cpu().numpy().tobytes())
    return digest.hexdigest()


def everyone(value, group):
    """The values of all ranks, in order of rank; [value] for one process. Every rank of the group must call it."""
    if not group:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def is_first(group):
    return not group or dist.get_rank(group) == 0


# -----------------------------------------------------------------------------
# write


def tensors_of(model, optimizer):
    """
    Everything that training changes, as one flat dict: {"model/NAME": weight, "exp_avg/NAME": state, ...}.

    The frozen base of adapters is not in it: it is where the run found it.
    """
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    tensors = {f"model/{name}": p.detach() for p, name in names.items()}
    for p, state in optimizer.state.items():
        for kind, value in state.items():
            tensors[f"{kind}/{names[p]}"] = value.detach()
    return tensors


def save(folder, step, model, optimizer, info, keep=2, group=None):
    """
    Write folder/step-N, all or nothing, and delete all but the `keep` newest (0: delete none).

    info: what else to know of the run, as JSON (settings, counters). Returns the path. OSError (disk full, read-only),
    on every rank alike, leaves what was there untouched and nothing under the new name.
    """
    return write(folder, step, tensors_of(model, optimizer), info, keep, group)


def write(folder, step, tensors, info, keep, group):
    """save(), of tensors that nothing changes until it returns."""
    import torch.distributed.checkpoint as dcp  # here, since it takes a second that --help need not wait for

    check_keep(keep)
    rank = dist.get_rank(group) if group else 0
    final = f"{folder}/step-{step:08d}"
    tmp = f"{final}.tmp"

    def together(do):
        """[What do() returned on each rank]. If it fails on any rank, it raises OSError on all."""
        result, problem = None, ""
        try:
            result = do()
        # torch wraps what a full disk raises in a CheckpointException, which is a BaseException.
        except (OSError, RuntimeError, ValueError, dcp.CheckpointException) as e:
            problem = f"{type(e).__name__}: {e}".strip().splitlines()[-1]
        results, problems = zip(*everyone((result, problem), group))
        if any(problems):
            if rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)
            problem = next(filter(None, problems))
            raise OSError(f"checkpoint of step {step} was not written to {folder}: {problem}")
        return results

    def begin():
        if rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)
            make_folder(folder)
            os.mkdir(tmp)

    def write_my_part():
        writer = dcp.HuggingFaceStorageWriter(tmp, save_distributed=True, fqn_to_index_mapping=into_files(tensors))
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)

    def hash_my_part():
        hashes = {}
        for file in sorted(os.listdir(tmp)):
            if file.startswith(f"shard-{rank + 1:05d}-"):
                flush(f"{tmp}/{file}")
                hashes[file] = sha256(f"{tmp}/{file}")
        return hashes

    def publish():
        if rank == 0:
            # write_flushed flushes the folder as well, and with it the names of all shards.
            write_flushed(f"{tmp}/manifest.json", sealed(dict(step=step, files=files, **info)))
            shutil.rmtree(final, ignore_errors=True)
            os.rename(tmp, final)
            flush(folder)

    together(begin)
    together(write_my_part)
    files = {}
    for part in together(hash_my_part):
        files.update(part)
    together(publish)
    if rank == 0:
        delete_old(folder, step, keep)
    return final


# A file of a checkpoint has at most so many bytes, or a single tensor.
FILE = 2**28


def into_files(tensors):
    """
    {name: the number of the file of this rank that it goes to, from 1 on}, in their order.

    DCP makes a string of bytes of a whole file, and a copy of that, before it writes. One file for all tensors of the
    8B and its states would take 258 GB beside their own 129; so it takes twice the largest of them, 4 GB.
    """
    sizes = {name: local(t).nbytes for name, t in tensors.items()}
    most = max(FILE, *sizes.values())
    files, number, taken = {}, 1, 0
    for name, size in sizes.items():
        if taken and taken + size > most:
            number, taken = number + 1, 0
        files[name] = number
        taken += size
    return files


def local(t):
    """The tensor, or this rank's shard of a DTensor."""
    return t.to_local() if hasattr(t, "to_local") else t


def delete_old(folder, step, keep):
    """
    Delete all checkpoints but the `keep` newest (0: none). Those after `step` do not count: a resumed run has passed
    them over because they are damaged.
    """
    until_now = [s for s in steps_in(folder) if s <= step]
    for old in until_now[:-keep]:  # [:-0] is empty
        shutil.rmtree(f"{folder}/step-{old:08d}", ignore_errors=True)


class Saver:
    """
    Saves while training goes on: save() copies the tensors to the CPU and returns, and a thread writes them. Where the
    host has no memory for the copy (97 GB of the 8B on one GPU), training waits until they are written instead.

    A save that fails (disk full) is reported, and training goes on to the next. OSError after `patience` failures in a
    row. One save at a time: the next waits for the last.
    """

    def __init__(self, folder, keep, group, patience):
        check_keep(keep)
        self.folder = folder
        self.keep = keep
        self.group = group
        self.patience = patience
        self.failures = 0
        self.pending = None
        self.told = False
        self.thread = ThreadPoolExecutor(1, initializer=on_the_device_of_the_caller())

    def save(self, step, model, optimizer, info):
        # Imported here because in the thread the import could run at the same time as one of torch.compile's.
        import torch.distributed.checkpoint

        self.wait()
        tensors = tensors_of(model, optimizer)
        behind = self.has_room(tensors)
        if behind:
            tensors = {name: copy_to_cpu(t) for name, t in tensors.items()}
        self.pending = self.thread.submit(write, self.folder, step, tensors, info, self.keep, self.group)
        if not behind:
            self.wait()

    def has_room(self, tensors):
        """Whether the host has memory for a copy of them, for each rank of this node; if not, it is said once."""
        _, _, _, ranks_here = launched() or (0, 1, 0, 1)
        need = ranks_here * sum(local(t).nbytes for t in tensors.values())
        free = free_on_host()
        if free is None or need < 0.9 * free:
            return True
        if is_first(self.group) and not self.told:
            print(f"a copy of what is saved takes {need / 1e9:.1f} GB, and the host has {free / 1e9:.1f} free: "
                  "training waits while a checkpoint is written")
        self.told = True
        return False

    def wait(self):
        """Until the last save is on disk, or has failed."""
        try:
            if self.pending:
                self.pending.result()
                self.failures = 0
        except OSError as e:
            self.failures += 1
            if self.failures >= self.patience:
                raise OSError(f"{e} (failed {self.failures} times in a row; "
                              "free some space, then --resume goes on)") from None
            if is_first(self.group):
                print(f"{e} (failure {self.failures} of {self.patience}; the training goes on to the next checkpoint)")
        finally:
            self.pending = None

    def finish(self):
        """Wait for the last save, of which no failure is forgiven: OSError if it is not on disk."""
        self.patience = 1
        self.wait()
        self.thread.shutdown()


def on_the_device_of_the_caller():
    """
    What a new thread runs first: it takes the current GPU of this one, or None without CUDA.

    A thread begins with GPU 0, and DCP asks for its stream: each rank would open a context there, half a GB.
    """
    if torch.cuda.is_initialized():
        return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


def check_keep(keep):
    """ValueError unless keep is 0 (all checkpoints) or more: -1 would delete each as soon as it is written."""
    if keep < 0:
        raise ValueError(f"keep_checkpoints={keep}: want how many of the newest to keep, or 0 to keep all of them")


def copy_to_cpu(t):
    """A copy on the CPU that later steps do not change. Of a DTensor, the shard of this rank is copied."""
    if hasattr(t, "to_local"):
        return type(t)(local(t).to("cpu", copy=True), t._spec, requires_grad=False)
    return t.to("cpu", copy=True)


# -----------------------------------------------------------------------------
# read


def newest_intact(folder, group=None, allow_restart=False):
    """
    (path, manifest) of the newest checkpoint in `folder` whose every hash holds, or None if there is no checkpoint.

    Damaged ones are named and passed over. ValueError if all are damaged: to start over silently would throw the run
    away. allow_restart=True returns None instead.
    """
    damaged = 0
    # Rank 0 lists the folder for all: on a network file system two ranks may see different files.
    for step in reversed(everyone(steps_in(folder), group)[0]):
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
    """The manifest of a checkpoint. ValueError names the first file that has not the hash that the manifest gives."""
    rank, size = 0, 1
    if group:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
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
    # DCP reads every safetensors file of the folder, so a foreign one is an error. Other files are never opened and
    # damage nothing: file systems leave some of their own (.DS_Store; .nfs0001 for a file that was deleted while
    # another machine had it open).
    for file in sorted(os.listdir(path)):
        if file.endswith(".safetensors") and file not in files:
            raise ValueError(f"{path}: {file} is not of this checkpoint (the manifest does not name it): "
                             "remove that file")
    return manifest


@torch.no_grad()
def load(path, model, optimizer=None, base=False, instead=None):
    """
    Fill what is trained of a model (and optimizer) from a verified checkpoint, whatever the number of processes that
    wrote it. base: fill all but its adapters.

    Each rank reads the shards that it holds, and nothing else. instead: {name: a tensor to be filled in place of that
    parameter}. ValueError names the first parameter whose name or shape is not the model's.
    """
    import torch.distributed.checkpoint as dcp

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    params = base_of(model) if base else trained
    tensors = {f"model/{name}": p.detach() for name, p in params.items()}
    tensors.update({f"model/{name}": t for name, t in (instead or {}).items()})
    reader = reader_for(path, tensors)
    if optimizer is not None:
        for key, entry in reader.read_metadata().state_dict_metadata.items():
            kind, _, name = key.partition("/")
            if kind != "model":
                param = params[name]
                tensors[key] = empty_state(optimizer, param, entry.size, entry.properties.dtype)
                optimizer.state[param][kind] = tensors[key]
    dcp.load(tensors, storage_reader=reader, no_dist=True)


def stored(path, model):
    """
    The values of each parameter in a verified checkpoint: yields (name, parameter, a new tensor on the CPU).

    The model may be on the meta device, without memory: no more than one tensor is held here. ValueError as in load().
    """
    import torch.distributed.checkpoint as dcp

    params = base_of(model)
    reader = reader_for(path, {f"model/{name}": p for name, p in params.items()})
    for name, p in params.items():
        tensor = torch.empty(p.shape, dtype=p.dtype)
        dcp.load({f"model/{name}": tensor}, storage_reader=reader, no_dist=True)
        yield name, p, tensor


def reader_for(path, tensors):
    """
    What reads a checkpoint into {"model/NAME": tensor}. ValueError names the first one that it has not, or has in
    another shape, or that only it has.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(path)
    # The names of all shards are read once, however often the reader is used.
    reader.read_metadata = functools.cache(reader.read_metadata)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as e:  # of any kind: a foreign file in a folder with our manifest
        raise ValueError(f"{path}: not readable as safetensors ({type(e).__name__}: {e})") from None
    want = {key: tuple(t.shape) for key, t in tensors.items()}
    have = {key: tuple(entry.size) for key, entry in saved.items() if key.startswith("model/")}
    for key in sorted(have.keys() | want.keys()):
        if have.get(key) != want.get(key):
            raise ValueError(f"{path} is of another model: {key.removeprefix('model/')} is {have.get(key)} there and "
                             f"{want.get(key)} here (None: absent); use the settings of its run")
    return reader


def empty_state(optimizer, param, shape, dtype):
    """
    An uninitialised state, on the device where the optimizer itself would have made it.

    A state has the shape of its parameter, or it is a scalar: the step. torch keeps the step on the CPU, where counting
    launches no kernel, unless the update reads it on the device, as fused and capturable optimizers do.
    """
    if tuple(shape) == tuple(param.shape):
        return torch.empty_like(param, dtype=dtype)
    group = next(group for group in optimizer.param_groups if any(p is param for p in group["params"]))
    on_device = group.get("fused") or group.get("capturable")
    return torch.empty((), dtype=dtype, device=param.device if on_device else "cpu")


# -----------------------------------------------------------------------------
# the run folder


def claim(out):
    """
    Make the run folder and lock it for this process. Returns the lock: closing it gives the folder up.

    The kernel releases the lock when its owner dies, even by kill -9, so that none is ever left behind. ValueError: the
    folder cannot be written, or another run is writing there.
    """
    try:
        make_folder(out)
        lock = open(f"{out}/.lock", "a+", encoding="utf-8")
    except OSError as e:
        raise ValueError(f"{out}: a run folder cannot be written there ({e.strerror}): "
                         "choose another with --out") from None
    try:
        locked = lock_file(lock)
    except OSError as e:
        if e.errno not in NO_LOCKS:
            lock.close()
            raise ValueError(f"{out}: its lock cannot be taken ({e.strerror}): "
                             "try again, or choose another --out") from None
        print(f"{out}: this file system has no locks ({e.strerror}): make sure yourself that no other run writes there")
        locked = True
    if not locked:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        raise ValueError(f"{out}: another run is writing there ({owner}): "
                         f"stop it (touch {out}/stop) or choose another --out")
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}")
    lock.flush()
    for killed_save in glob.glob("ckpt/step-[0-9]*.tmp", root_dir=out):
        shutil.rmtree(f"{out}/{killed_save}", ignore_errors=True)
    return lock


def steps_in(folder):
    """The steps of all checkpoints that have their final name, rising."""
    if not os.path.isdir(folder):
        return []
    found = (re.fullmatch(r"step-(\d+)", name) for name in os.listdir(folder))
    return sorted(int(m[1]) for m in found if m)


def sealed(manifest):
    """The manifest as a text that carries its own sha256. To check one, seal it again and compare: no bit may flip."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps(dict(sha256=digest, manifest=manifest), sort_keys=True, indent=1)
