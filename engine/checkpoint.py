"""
Checkpoints that survive a kill and are safe to load.

    out/run/ckpt/step-00001000/
        shard-*.safetensors    weights and optimizer states, by torch.distributed.checkpoint (DCP)
        manifest.json          step, settings, and the sha256 of every file, itself included

All or nothing. A checkpoint is written under a temporary name, flushed to disk, and then renamed. Under its final name
    it is whole, or it does not exist.
Every file is hashed, because torch.save, DCP and safetensors all load a flipped bit without an error. A run resumes
    from the newest checkpoint whose hashes all match.
Loading runs no code of the file: safetensors and JSON, no pickle. (DCP's own .metadata is a pickle, and torch.load of
    an untrusted file runs code.)

Each process writes and hashes its own part, and any number of processes can read it (engine/restore.py). `group` is a
gloo process group for this file alone (engine/parallel.py makes it), or None for one process. A Saver writes while
training continues.
"""

import glob
import json
import math
import os
import shutil
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from ademamix import local
from engine import hardware
from engine.files import flush, make_folder, sha256, sha256_of, write_flushed
from engine.placement import launched

# DCP warns if there is no process group, but a single process needs none.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def gather(value, group):
    """The values of all ranks, in order of rank; [value] for one process. Every rank of the group must call it."""
    if not group:
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def rank_in(group):
    """The rank of this process in the group; 0 for one process."""
    return group.rank() if group else 0


def on_all_ranks(function, group):
    """
    Run function() on every rank, and return the list of their results. If it fails on any rank, all raise OSError with
    the first error. Every rank of the group must call this.
    """
    from torch.distributed.checkpoint import CheckpointException  # here, since it takes a second

    try:
        result = function()
    # Any error, since the other ranks would wait for this one. torch wraps that of a full disk in a
    # CheckpointException, which is a BaseException.
    except (Exception, CheckpointException) as error:
        result = OSError((str(error) or repr(error)).splitlines()[-1])
    results = gather(result, group)
    for error in results:
        if isinstance(error, OSError):
            raise error
    return results


def from_first_rank(function, group):
    """
    The result of function() on the first rank, for every rank: it alone calls it. If it fails there, all raise OSError.
    Every rank of the group must call this.
    """
    results = [None]
    if rank_in(group) == 0:
        try:
            results = [function()]
        except Exception as error:                         # of any kind, since the other ranks wait
            results = [OSError((str(error) or repr(error)).splitlines()[-1])]
    if group:
        dist.broadcast_object_list(results, src=0, group=group)
    if isinstance(results[0], OSError):
        raise results[0]
    return results[0]


def steps_in(folder):
    """The steps of all checkpoints that have their final name, in ascending order. OSError: it cannot be listed."""
    # Not by glob, which finds nothing in a folder that cannot be listed: --resume would begin anew and cut the log.
    try:
        return sorted(int(name[5:]) for name in os.listdir(folder) if "step-" in name and name[5:].isdecimal())
    except FileNotFoundError:
        return []


def seal_manifest(manifest):
    """Return the manifest as text with its own sha256. To check one, seal it again and compare all of the text."""
    return json.dumps(dict(sha256=sha256_of(manifest), manifest=manifest), sort_keys=True, indent=1)


# -----------------------------------------------------------------------------
# write


def tensors_of(model, optimizer=None):
    """
    Everything that training changes, as one flat dict: {"model/NAME": weight, "exp_avg/NAME": state, ...}. It leaves
    out frozen weights, which a run reads again from its start model.
    """
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    tensors = {f"model/{name}": p.detach() for p, name in names.items()}
    for p, state in optimizer.state.items() if optimizer else ():
        tensors |= {f"{moment}/{names[p]}": value.detach() for moment, value in state.items()}
    return tensors


def write(folder, step, tensors, info, keep, keep_until, group):
    """
    Write folder/step-N, all or nothing, and delete old checkpoints (delete_old).

    tensors: {name: tensor}, which must not change until this returns. info: further entries of the manifest (settings,
    counters), as JSON values. OSError (disk full, read-only, a rank that takes too long) on every rank leaves the old
    files untouched.
    """
    import torch.distributed.checkpoint as dcp  # here, since it takes a second that --help need not wait for

    rank = rank_in(group)
    final = f"{folder}/step-{step:08d}"
    tmp = f"{final}.tmp"
    files = {}

    def write_shards():
        """Write the files of this rank to disk, and return {file: sha256}."""
        writer = dcp.HuggingFaceStorageWriter(tmp, save_distributed=True, fqn_to_index_mapping=assign_files(tensors))
        # One copy of the model writes all. Else each writes a part of each file: eight copies of the 70B, each over
        # 64 ranks, 34,800 files instead of 4,350.
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
        shards = glob.glob(f"shard-{rank + 1:05d}-*", root_dir=tmp)
        for file in shards:
            flush(f"{tmp}/{file}")
        return {file: sha256(f"{tmp}/{file}") for file in shards}

    def publish():
        """Write the manifest, and give the folder its final name."""
        if rank == 0:
            # write_flushed flushes the folder as well, and with it the names of all shards.
            write_flushed(f"{tmp}/manifest.json", seal_manifest(dict(step=step, files=files, **info)))
            shutil.rmtree(final, ignore_errors=True)
            os.rename(tmp, final)
            flush(folder)
            delete_old(folder, step, keep, keep_until)

    try:
        # By itself, since DCP's own messages would wait for a rank that fails before them.
        on_all_ranks(lambda: make_folder(tmp), group)
        for hashes in on_all_ranks(write_shards, group):
            files |= hashes
        on_all_ranks(publish, group)
    except (OSError, RuntimeError) as error:               # RuntimeError: gloo's, after a timeout
        if rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)
        raise OSError(f"checkpoint of step {step} was not written to {folder}: {error}") from None


FILE_BYTES = 2**28      # at most in a file of a checkpoint, unless a single tensor is larger


def assign_files(tensors):
    """
    {name: the number of its file, from 1}: in order, files of at most FILE_BYTES, or of the largest tensor's bytes.

    Before it writes a file, DCP copies its bytes twice in memory. With one file for all tensors of the 8B
    and its states that would be 258 GB; with these files it is twice the largest tensor, 4 GB.
    """
    sizes = {name: local(t).nbytes for name, t in tensors.items()}
    limit = max(FILE_BYTES, *sizes.values())
    files, number, room = {}, 1, limit
    for name, size in sizes.items():
        if size > room:
            number, room = number + 1, limit
        room -= size
        files[name] = number
    return files


def delete_old(folder, step, keep, keep_until):
    """
    Delete all checkpoints but the `keep` newest (0: delete none) and the newest of those until step `keep_until`. Those
    after `step` are left alone: a resumed run has passed them over because they are damaged.
    """
    if not keep:
        return
    until_now = [s for s in steps_in(folder) if s <= step]
    for old, after in zip(until_now[:-keep], until_now[1:]):
        if not old <= keep_until < after:
            shutil.rmtree(f"{folder}/step-{old:08d}", ignore_errors=True)


class Saver:
    """
    Saves while training continues: save() copies the tensors to the CPU and returns, and a thread writes them. If the
    host lacks memory for the copy (97 GB for the 8B on one GPU), training waits until they are written. The copy keeps
    its memory for the next save, pinned if the tensors are on a GPU: new memory takes eight times as long on a CPU.

    Prints the error of a failed save (disk full, a slow rank), and training continues. OSError after `patience`
    failures in a row.
    """

    def __init__(self, folder, keep, group, patience=3):
        self.folder, self.keep, self.group = folder, keep, group
        self.patience = patience                           # a full disk is often emptied within two saves
        self.failures = 0                                  # in a row
        self.error = None                                  # of the last save, if it has failed
        self.times = {}                                    # of the last save, once it is on disk: seconds and GB
        self.pending = None
        self.stager = None                                 # holds the copy of the last save
        self.thread = ThreadPoolExecutor(1)
        # A thread begins with GPU 0, where each rank would open a context, half a GB.
        if torch.cuda.is_initialized():
            self.thread.submit(torch.cuda.set_device, torch.cuda.current_device())

    def use(self, group):
        """Write the next checkpoints with this process group."""
        self.group = group

    def save(self, step, model, optimizer, info, keep_until=0):
        """Save, or begin to save, a checkpoint after the last save has ended. info, keep_until: as in write()."""
        # Not in the thread alone, since torch.compile may import modules meanwhile.
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.wait()
        tensors = tensors_of(model, optimizer)
        # All ranks of this node copy their tensors to the same host.
        ranks_here = launched()[-1] if launched() else 1
        size = ranks_here * sum(local(t).nbytes for t in tensors.values())
        has_room = bool(self.stager) or size < 0.9 * (hardware.free_on_host() or math.inf)
        # All ranks or none: the others would train on, and wait in a collective for one that writes first.
        in_background = all(gather(has_room, self.group))
        if in_background:
            on_gpu = torch.cuda.is_initialized()
            self.stager = self.stager or DefaultStager(StagingOptions(
                use_pinned_memory=on_gpu, use_non_blocking_copy=on_gpu, use_shared_memory=False,
                use_async_staging=False))
            tensors = self.stager.stage(tensors)           # of a DTensor, each rank copies its shard
        self.pending = self.thread.submit(
            self.write_timed, self.folder, step, tensors, info, self.keep, keep_until, self.group)
        if not in_background:
            self.print_once(f"the host has no room for a copy of the tensors to save, {size / 1e9:.1f} GB: "
                            "training waits while a checkpoint is written")
            self.wait()

    def write_timed(self, folder, step, tensors, *args):
        """write(), in the thread."""
        start = time.perf_counter()
        write(folder, step, tensors, *args)
        size = sum(t.numel() * t.element_size() for t in tensors.values())      # of all shards
        self.times = dict(save_seconds=round(time.perf_counter() - start, 3), save_gb=round(size / 1e9, 6))

    def take_times(self):
        """{save_seconds, save_gb} of a save that has ended since the last call, else {}."""
        times, self.times = self.times, {}
        return times

    def wait(self):
        """Wait until the last save is on disk, or has failed."""
        last, self.pending = self.pending, None
        if not last:
            return
        try:
            last.result()
            self.failures, self.error = 0, None
        except OSError as error:
            self.failures, self.error = self.failures + 1, error
            if self.failures >= self.patience:
                raise OSError(f"{error} (failed {self.failures} times in a row; "
                              "free some space, then --resume continues)") from None
            self.print_once(f"{error} (failure {self.failures} of {self.patience}; "
                            "training continues until the next checkpoint)")

    def finish(self):
        """Wait for the last save. OSError if it is not on disk, even if an earlier wait() has said so."""
        self.patience = 1
        self.wait()
        if self.error:
            raise OSError(f"{self.error} (free some space, then --resume continues)")

    def print_once(self, text):
        """Print a line on the first rank."""
        if rank_in(self.group) == 0:
            print(text)
