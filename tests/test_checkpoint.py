"""
engine/checkpoint.py, engine/restore.py, engine/files.py and the lock of engine/runs.py, alone in this process:
saves in the background, failures, damage, foreign files. tests/faults tests whole runs.
"""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ademamix import build_optimizer
from engine import checkpoint, files, hardware, restore, runs


def full(*args, **kwargs):
    raise OSError(28, "No space left on device")


def trained(seed=0, steps=1, name="adamw", dtype="float32"):
    """A model and its optimizer after some steps: 488 bytes of weights and states with AdamW."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(7, 5)
    optimizer = build_optimizer(
        model,
        name,
        lr=0.1,
        betas=(0.9, 0.99, 0.999),
        alpha=8.0,
        weight_decay=0.1,
        warmup=5,
        compile=False,
        state_dtype=dtype,
    )
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def train(model, optimizer, step):
    model(torch.arange(14.0).view(2, 7) + step).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(folder, step, pair, keep=2):
    """A checkpoint of a model and its optimizer, as a run writes it."""
    checkpoint.write(folder, step, checkpoint.tensors_of(*pair), dict(note="x"), keep, 0, None)


@pytest.fixture
def path(tmp_path):
    """The newest of two checkpoints."""
    for step in (1, 2):
        save(f"{tmp_path}/ckpt", step, trained(step))
    return tmp_path / "ckpt" / "step-00000002"


def bits(pair):
    return {name: (t.dtype, t.device, t.tolist()) for name, t in checkpoint.tensors_of(*pair).items()}


def loaded(path, *how):
    pair = trained(9, 0, *how)
    restore.load_checkpoint(str(path), *pair)
    return pair


# -----------------------------------------------------------------------------
# saving and loading


@pytest.mark.parametrize("how", [("adamw", "float32"), ("ademamix", "bfloat16")])
def test_what_was_saved_is_loaded_bit_for_bit_from_files_of_bounded_size_and_trains_on(tmp_path, monkeypatch, how):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 160)
    pair = trained(0, 3, *how)
    save(str(tmp_path), 3, pair)
    path, manifest = restore.newest_intact(str(tmp_path))
    assert (manifest["step"], manifest["note"]) == (3, "x")
    sizes = [sum(t.nbytes for t in load_file(f"{path}/{file}").values()) for file in manifest["files"]]
    assert sum(sizes) == sum(t.nbytes for t in checkpoint.tensors_of(*pair).values())
    assert max(sizes) <= 160 and len(sizes) == 4
    again = loaded(path, *how)
    assert bits(again) == bits(pair)
    train(*pair, 3)
    train(*again, 3)
    assert bits(again) == bits(pair)


def test_a_checkpoint_of_another_model_names_the_difference(path):
    with pytest.raises(ValueError, match=r"bias is \(5,\) there and None here"):
        restore.load_checkpoint(str(path), torch.nn.Linear(7, 5, bias=False))


@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_a_step_is_loaded_to_the_device_where_torch_would_load_it(how):
    """Against torch's own load_state_dict. The parameter is on meta, the only second device that every machine has."""
    param = torch.nn.Parameter(torch.empty(3, 2, device="meta"))
    optimizer = torch.optim.AdamW([param], **{how: True})
    states = {0: dict(step=torch.tensor(4.0))}
    optimizer.load_state_dict(dict(optimizer.state_dict(), state=states))
    want = optimizer.state[param]["step"]
    assert restore.empty_state(optimizer, param, want.shape, want.dtype).device == want.device


# -----------------------------------------------------------------------------
# saves in the background


@pytest.fixture
def saver(tmp_path):
    return checkpoint.Saver(f"{tmp_path}/ckpt", keep=0, group=None, patience=3)


def test_a_save_behind_the_training_holds_the_weights_of_its_step(saver, monkeypatch):
    """Training changes the weights in place before the first byte is written."""
    go, write = threading.Event(), checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *args: (go.wait(10), write(*args)))
    pair = trained()
    before = bits(pair)
    saver.save(1, *pair, {})
    train(*pair, 1)
    go.set()
    saver.finish()
    assert bits(loaded(f"{saver.folder}/step-00000001")) == before != bits(pair)


def test_the_copy_of_a_save_lies_where_the_one_before_lay(saver, monkeypatch):
    """New memory is eight times as slow: the kernel fills it with zeros, and a GPU cannot copy to it directly."""
    saved = []
    monkeypatch.setattr(checkpoint, "write", lambda folder, step, tensors, *_: saved.append(tensors))
    pair = trained()
    for step in (1, 2):
        saver.save(step, *pair, {})
        train(*pair, step)
    saver.finish()
    one, other, own = ({t.data_ptr() for t in tensors.values()} for tensors in (*saved, checkpoint.tensors_of(*pair)))
    assert one == other and not one & own


def test_a_failed_save_is_told_and_tried_again_and_the_third_in_a_row_stops(saver, monkeypatch, capsys):
    """The disk is full for saves 1 and 2. Save 3 succeeds, which resets the count; saves 4, 5 and 6 fail."""
    saves = iter([full, full, dcp.save, full, full, full, full, full])
    monkeypatch.setattr(dcp, "save", lambda *args, **how: next(saves)(*args, **how))
    with pytest.raises(OSError, match="failed 3 times in a row"):
        for step in range(1, 9):
            saver.save(step, *trained(), {})
    assert step == 7
    assert os.listdir(saver.folder) == ["step-00000003"]
    said = capsys.readouterr().out
    assert "No space left" in said and said.count("(failure 2 of 3; training continues") == 2
    for free in (9**9, 1):  # bytes: the last save runs in the background, or training waits for it
        monkeypatch.setattr(hardware, "free_on_host", lambda free=free: free)
        saver.failures, saver.patience = 0, 3
        saver.save(9, *trained(), {})
        with pytest.raises(OSError, match="checkpoint of step 9 was not written"):
            saver.finish()


@pytest.mark.parametrize(
    "free, ranks, other, waits",
    [(500, 1, True, True), (560, 1, True, False), (560, 1, False, True), (560, 2, True, True)],
)
def test_without_room_for_a_copy_training_waits(saver, monkeypatch, capsys, free, ranks, other, waits):
    """
    A copy takes 488 bytes, a tenth of the free memory stays free, and two ranks on a node copy at once. `other`:
    whether a rank of another node has room.
    """
    monkeypatch.setattr(checkpoint, "gather", lambda value, _: [value, other] if value is True else [value])
    monkeypatch.setattr(hardware, "free_on_host", lambda: free)
    monkeypatch.setattr(checkpoint, "launched", lambda: (0, ranks, 0, ranks))
    saver.save(7, *trained(), {})
    assert (saver.pending is None) == waits
    assert ("training waits while a checkpoint is written" in capsys.readouterr().out) == waits
    saver.finish()


# How many of the newest are kept, the step until which one more is kept, and the steps that stay.
KEPT = [(0, 0, [1, 2, 3, 4, 5]), (3, 0, [3, 4, 5]), (1, 3, [3, 5]), (1, 9, [5])]


@pytest.mark.parametrize("keep, keep_until, stay", KEPT)
def test_so_many_of_the_newest_stay_and_the_last_from_before_the_decay(saver, keep, keep_until, stay):
    """Step 9 is later than the saves, so it does not count: the resumed run has passed it over as damaged."""
    saver.keep = keep
    os.makedirs(f"{saver.folder}/step-00000009")
    for step in range(1, 6):
        saver.save(step, *trained(), {}, keep_until=keep_until)
    saver.finish()
    assert checkpoint.steps_in(saver.folder) == [*stay, 9]


# -----------------------------------------------------------------------------
# damage


def shard(path):
    return min(path.glob("*.safetensors"))


def names(path, *found):
    """Give a checkpoint a valid manifest that names only these files, with correct hashes."""
    manifest = restore.read_manifest(path) | dict(files={name: files.sha256(path / name) for name in found})
    (path / "manifest.json").write_text(checkpoint.seal_manifest(manifest))


DAMAGE = {
    "of another step": lambda path: shutil.copy(shard(path.with_name("step-00000001")), shard(path)),
    "foreign": lambda path: (path / "shard-00009-model-00001-of-00001.safetensors").touch(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "brackets": lambda path: (path / "manifest.json").write_text("[" * 100_000),
    "outside": lambda path: names(path, shard(path).name, "../step-00000001/manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(path, capsys, damage):
    """tests/faults does the same with flipped bits."""
    (path / ".nfs00000123").write_text("of a file system, which damages nothing")
    assert restore.newest_intact(path.parent, until=2)[1]["step"] == 2
    DAMAGE[damage](path)
    assert restore.newest_intact(path.parent)[1]["step"] == 1
    assert f"passed over: {path}: " in capsys.readouterr().out
    assert restore.newest_intact(path.parent, until=0) is None


def test_without_an_intact_checkpoint_a_run_does_not_start_over(path):
    folder = path.parent
    shutil.rmtree(path)
    shard(folder / "step-00000001").unlink()
    with pytest.raises(ValueError, match=r"is intact \(1 damaged\).*start over with another --out"):
        restore.newest_intact(folder)
    assert restore.newest_intact(path) is None
    with pytest.raises(OSError):  # a folder that cannot be listed is not an empty one
        restore.newest_intact(__file__)


class Marker:
    def __reduce__(self):
        return open, ("executed", "w")


def test_a_pickle_behind_hashes_that_hold_is_refused_and_leaves_no_mark(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    torch.save(Marker(), shard(path))
    names(path, shard(path).name)
    restore.verified(path)
    with pytest.raises(ValueError, match="not readable as safetensors"):
        restore.load_checkpoint(path, trained()[0])
    assert not os.path.exists("executed")


# -----------------------------------------------------------------------------
# a full disk, a power cut


def test_a_full_disk_leaves_the_old_file_and_names_it(tmp_path, monkeypatch):
    path, opened = tmp_path / "config.json", os.listdir("/proc/self/fd")
    (tmp_path / "config.json.tmp").symlink_to("elsewhere")
    files.write_flushed(path, "0\n1\n2\n")
    assert os.listdir("/proc/self/fd") == opened
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device.*config.json'$"):
        files.write_flushed(path, "new and longer")
    assert path.read_text() == "0\n1\n2\n"
    assert os.listdir(tmp_path) == ["config.json"]


def test_all_is_flushed_before_a_checkpoint_has_its_name_and_before_the_old_one_goes(tmp_path, monkeypatch):
    """
    A power cut may lose all that was not flushed: contents of files, and their names in a folder. DCP flushes its files
    too, but does not promise it, so its flushes do not count.
    """
    done, fsync, rename, rmtree = [], os.fsync, os.rename, shutil.rmtree

    def flushed(fd):
        if "torch" not in sys._getframe(1).f_code.co_filename:
            done.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", lambda a, b: done.append("renamed") or rename(a, b))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: done.append(f"no {path[-1]}") or rmtree(path, **how))
    run = f"{tmp_path}/out/run"
    runs.lock_run(run).close()
    save(f"{run}/ckpt", 1, trained(), keep=1)
    assert {tmp_path.name, "out", "run"} <= set(done)
    done.clear()
    save(f"{run}/ckpt", 2, trained(), keep=1)
    [shard] = Path(run).glob("ckpt/*/*.safetensors")
    assert done == ["ckpt", shard.name, "manifest.json.tmp", "step-00000002.tmp", "no 2", "renamed", "ckpt", "no 1"]


# -----------------------------------------------------------------------------
# the lock


def test_one_run_a_folder_and_the_lock_goes_with_its_owner(tmp_path):
    """It clears the files of a killed save, and nothing else."""
    for name in ("step-00000007.tmp", "step-00000006", "notes.tmp"):
        os.makedirs(tmp_path / "ckpt" / name)
    # It may be a link in a downloaded folder.
    (tmp_path / ".lock").write_text("their thesis")
    lock = runs.lock_run(str(tmp_path))
    assert sorted(os.listdir(tmp_path / "ckpt")) == ["notes.tmp", "step-00000006"]
    with pytest.raises(ValueError, match="another process is writing there"):
        runs.lock_run(str(tmp_path))
    lock.close()
    runs.lock_run(str(tmp_path)).close()
    assert (tmp_path / ".lock").read_text()


def test_a_child_that_was_given_the_file_keeps_its_lock(tmp_path):
    """As a run does whose study was killed: the next study waits for it."""
    path = str(tmp_path / "run.txt")
    with files.lock(path, "") as file:
        child = subprocess.Popen(["sleep", "60"], stdout=file)
    with pytest.raises(ValueError, match="another process is writing there: stop it"):
        files.lock(path, "stop it")
    child.kill()
    files.lock(path, "", wait=True).close()
    child.wait()
