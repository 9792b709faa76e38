"""
Checkpoints that survive being killed, and that nobody has to trust.

    out/run/ckpt/step-00001000/    shard-*.safetensors    weights and optimizer states, written by torch.distributed.checkpoint (DCP)
                                   manifest.json          step, settings, and the sha256 of every file, of itself too

Three rules. A checkpoint is written under a temporary name, flushed to disk and then renamed: under its final name it is whole, or it
is not there. No format notices a flipped bit (torch.save, DCP and safetensors all load it silently), so every file is hashed, and the
newest checkpoint whose hashes hold is the one that is used. And nothing here can execute: safetensors and JSON, no pickle (DCP's own
.metadata is one, and torch.load of an untrusted file runs code).

With several processes each writes, hashes and reads its own part, and any number of processes can read what any other number wrote.
`group` is then a gloo group for this file alone (engine/parallel.py); None is one process. Training goes on while a Saver writes.
"""

import contextlib
import errno
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

warnings.filterwarnings("ignore", message="torch.distributed is disabled")     # one process needs no process group


def tensors_of(model, optimizer):
    """Everything that training changes, flat: {"model/NAME": weight, "exp_avg/NAME": state, ...}."""
    names = {p: name for name, p in model.named_parameters()}
    flat = {f"model/{name}": p.detach() for p, name in names.items()}
    for p, state in optimizer.state.items():
        flat.update({f"{key}/{names[p]}": value.detach() for key, value in state.items()})
    return flat


def save(folder, step, model, optimizer, info, keep=2, group=None):
    """
    Write folder/step-N, all or nothing, and delete all but the `keep` newest (0: delete none). info: what else to know, JSON (settings,
    counters). Returns the path. OSError (disk full, read-only), on every rank alike, leaves what was there untouched and nothing under the new name.
    """
    return write(folder, step, tensors_of(model, optimizer), info, keep, group)


def write(folder, step, tensors, info, keep, group):
    """save(), from tensors that hold still."""
    import torch.distributed.checkpoint as dcp                              # a second, which --help need not wait
    check_keep(keep)
    rank = dist.get_rank(group) if group else 0
    final = os.path.join(folder, f"step-{step:08d}")
    tmp = final + ".tmp"

    def together(do):
        """Do it here, and go on only if it went well on every rank: what they return."""
        value, problem = None, ""
        try:
            value = do()
        except (OSError, RuntimeError, ValueError, dcp.CheckpointException) as e:     # torch wraps a full disk; the last is no Exception
            problem = f"{type(e).__name__}: {e}".strip().splitlines()[-1]
        values = everyone((value, problem), group)
        problem = next((p for _, p in values if p), "")
        if problem:
            if rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)
            raise OSError(f"checkpoint of step {step} was not written to {folder}: {problem}")
        return [value for value, _ in values]

    def begin():
        if rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)
            make_folder(folder)
            os.mkdir(tmp)

    def write_my_part():
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(tmp, save_distributed=True), process_group=group, no_dist=group is None)

    def hash_my_part():
        mine = [file for file in sorted(os.listdir(tmp)) if file.startswith(f"shard-{rank + 1:05d}-")]
        for file in mine:
            flush(os.path.join(tmp, file))
        return {file: sha256(os.path.join(tmp, file)) for file in mine}

    def publish():
        if rank == 0:
            write_flushed(os.path.join(tmp, "manifest.json"), sealed(dict(step=step, files=files, **info)))     # flushes the names of the shards too
            shutil.rmtree(final, ignore_errors=True)
            os.rename(tmp, final)
            flush(folder)

    together(begin)
    together(write_my_part)
    files = {file: digest for part in together(hash_my_part) for file, digest in part.items()}
    together(publish)
    if rank == 0:
        for old in [s for s in steps_in(folder) if s <= step][:-keep]:         # a damaged one of a later step does not count; [:-0]: none
            shutil.rmtree(os.path.join(folder, f"step-{old:08d}"), ignore_errors=True)
    return final


class Saver:
    """
    Saves behind the training: save() copies the tensors to the CPU and returns, a thread writes them. A save that fails (disk full) is
    told and the training goes on to the next; OSError after `patience` failures in a row. One save at a time: the next waits for the last.
    """

    def __init__(self, folder, keep=2, group=None, patience=3):
        check_keep(keep)
        self.folder, self.keep, self.group, self.patience = folder, keep, group, patience
        self.thread, self.pending, self.failures = ThreadPoolExecutor(1), None, 0

    def save(self, step, model, optimizer, info):
        import torch.distributed.checkpoint                     # here and not in the thread, where it could meet torch.compile's imports
        self.wait()
        tensors = {name: copy_to_cpu(t) for name, t in tensors_of(model, optimizer).items()}
        self.pending = self.thread.submit(write, self.folder, step, tensors, info, self.keep, self.group)

    def wait(self):
        """Until the last save is on disk, or has failed."""
        try:
            if self.pending:
                self.pending.result()
                self.failures = 0
        except OSError as e:
            self.failures += 1
            if self.failures >= self.patience:
                raise OSError(f"{e} (failed {self.failures} times in a row; free some space, then --resume goes on)") from None
            if not self.group or dist.get_rank(self.group) == 0:
                print(f"{e} (failure {self.failures} of {self.patience}; the training goes on to the next checkpoint)")
        finally:
            self.pending = None

    def finish(self):
        """The last save must be on disk: OSError if it is not."""
        self.patience = 1
        self.wait()
        self.thread.shutdown()


def check_keep(keep):
    """ValueError unless the number of checkpoints to keep is 0 (all of them) or more: -1 would delete each as soon as it is written."""
    if keep < 0:
        raise ValueError(f"keep_checkpoints={keep}: want how many of the newest to keep, or 0 to keep all of them")


def copy_to_cpu(t):
    """A copy that later steps do not change; of a DTensor, of the part that is here."""
    if hasattr(t, "to_local"):                                             # a DTensor
        return type(t)(t.to_local().to("cpu", copy=True), t._spec, requires_grad=False)
    return t.to("cpu", copy=True)


def everyone(value, group):
    """What each rank says, in order of rank; [value] for one process."""
    if not group:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def newest_intact(folder, group=None, allow_restart=False):
    """
    (path, manifest) of the newest checkpoint in `folder` whose every hash holds, or None if there is none at all. Damaged ones are
    named and passed over; if all are damaged: ValueError, because starting over in silence would throw a run away (allow_restart: None).
    """
    damaged = []
    for step in reversed(everyone(steps_in(folder), group)[0]):
        path = os.path.join(folder, f"step-{step:08d}")
        try:
            return path, verified(path, group)
        except ValueError as e:
            damaged.append(str(e))
            if not group or dist.get_rank(group) == 0:
                print(f"passed over: {e}")
    if damaged and not allow_restart:
        raise ValueError(f"no checkpoint in {folder} is intact ({len(damaged)} damaged): restore one from a backup, start over with "
                         "another --out, or throw this run's steps away with --allow_restart")
    return None


def verified(path, group=None):
    """The manifest of a checkpoint whose every file has the hash that it promises; else ValueError with the first that has not."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    manifest, problem = {}, ""
    try:
        manifest = read_manifest(path)
        for file, want in sorted(manifest["files"].items())[rank::size]:       # each rank its share: 70B is 1.1 TB, ten minutes for one
            if not os.path.isfile(os.path.join(path, file)) or sha256(os.path.join(path, file)) != want:
                raise ValueError(f"{path}: {file} is missing or not as it was written (sha256)")
    except (OSError, ValueError) as e:
        problem = str(e)
    problem = next((p for p in everyone(problem, group) if p), "")
    if problem:
        raise ValueError(problem)
    return manifest


def read_manifest(path):
    try:
        with open(os.path.join(path, "manifest.json"), encoding="utf-8") as f:
            text = f.read()
        manifest = json.loads(text)["manifest"]
        sound = sealed(manifest) == text and isinstance(manifest["files"], dict) and isinstance(manifest["step"], int)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):         # RecursionError: a JSON of a million brackets
        sound = False
    if not sound:
        raise ValueError(f"{path}: manifest.json is missing, damaged, or not of this project")
    for file in manifest["files"]:
        if file != os.path.basename(file) or file in ("", ".", ".."):
            raise ValueError(f"{path}: manifest.json names {file!r}, which is not a file in this folder")
    # DCP reads every safetensors file of the folder. Whatever else lies there is never opened, and file systems leave files of their own
    # (.DS_Store; .nfs0001 for a file that was deleted while another machine had it open): they damage nothing.
    foreign = [file for file in sorted(os.listdir(path)) if file.endswith(".safetensors") and file not in manifest["files"]]
    if foreign:
        raise ValueError(f"{path}: {foreign[0]} is not of this checkpoint (the manifest does not name it): remove that file")
    return manifest


@torch.no_grad()
def load(path, model, optimizer=None):
    """
    Fill model (and optimizer) from a verified checkpoint, whatever the number of processes that wrote it. Names and shapes must be
    the model's: ValueError names the difference. Each rank reads what it holds, and nothing else.
    """
    import torch.distributed.checkpoint as dcp
    try:
        saved = dcp.HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
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
            if kind != "model":
                flat[key] = empty_state(optimizer, params[name], entry.size, entry.properties.dtype)
                optimizer.state[params[name]][kind] = flat[key]
    dcp.load(flat, storage_reader=dcp.HuggingFaceStorageReader(path), no_dist=True)


def empty_state(optimizer, param, shape, dtype):
    """
    A state to be filled, where the optimizer itself would have made it: like its parameter, or a scalar (the step). torch keeps the step
    on the CPU, where counting costs no kernel, unless the update reads it on the device: fused and capturable optimizers fail otherwise.
    """
    if tuple(shape) == tuple(param.shape):
        return torch.empty_like(param, dtype=dtype)
    group = next(group for group in optimizer.param_groups if any(p is param for p in group["params"]))
    on_device = group.get("fused") or group.get("capturable")
    return torch.empty((), dtype=dtype, device=param.device if on_device else "cpu")


def claim(out):
    """
    The run folder, made, and locked for this process: close what is returned to let it go. The kernel does that when the owner dies, even
    by kill -9, so no lock is ever left behind. ValueError: it cannot be written, or another run is writing there.
    """
    try:
        make_folder(out)
        lock = open(os.path.join(out, ".lock"), "a+", encoding="utf-8")
    except OSError as e:
        raise ValueError(f"{out}: a run folder cannot be written there ({e.strerror}): choose another with --out") from None
    try:
        held = not lock_file(lock)
    except OSError as e:
        if e.errno not in NO_LOCKS:
            lock.close()
            raise ValueError(f"{out}: its lock cannot be taken ({e.strerror}): try again, or choose another --out") from None
        print(f"{out}: this file system has no locks ({e.strerror}): make sure yourself that no other run writes there")
        held = False
    if held:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        raise ValueError(f"{out}: another run is writing there ({owner}): stop it (touch {out}/stop) or choose another --out")
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}")
    lock.flush()
    for name in os.listdir(os.path.join(out, "ckpt")) if os.path.isdir(os.path.join(out, "ckpt")) else []:
        if re.fullmatch(r"step-\d+\.tmp", name):                               # a save that was killed
            shutil.rmtree(os.path.join(out, "ckpt", name), ignore_errors=True)
    return lock


NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)     # Lustre mounted without flock, NFS without lockd


def lock_file(file):
    """
    Lock an open file for this process: False if another holds it, OSError if it cannot be locked at all. On Windows a lock of msvcrt,
    since that too goes with its owner, which a file made with O_EXCL would not; far beyond the text, since others cannot read what is locked.
    """
    try:
        import fcntl
    except ImportError:
        import msvcrt
        os.lseek(file.fileno(), 2**30, os.SEEK_SET)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
    """Write a file, all or nothing: a full disk or a power cut leaves the old one. text: a string, or an iterable of lines."""
    tmp = f"{path}.tmp"
    try:
        with open(tmp, "w", encoding="utf-8") as f:
            f.writelines([text] if isinstance(text, str) else text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.remove(tmp)
        e.filename, e.filename2 = str(path), None                              # or the line that the user sees would name no file
        raise
    flush(os.path.dirname(os.path.abspath(path)))


def make_folder(path):
    """os.makedirs, and each new name flushed into the folder that holds it: a power cut would take it with everything inside."""
    holders, at = [], os.path.abspath(path)
    while not os.path.lexists(at):
        at = os.path.dirname(at)
        holders.append(at)
    os.makedirs(path, exist_ok=True)
    for holder in holders:
        flush(holder)


def flush(path):
    """fsync a file or folder that is written already: a rename may reach the disk before the data it names."""
    windows = os.name == "nt"
    if windows and os.path.isdir(path):                                        # cannot be opened there: NTFS keeps a journal of names
        return
    fd = os.open(path, os.O_RDWR if windows else os.O_RDONLY)                  # Windows flushes only what is open for writing
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
