"""
engine/checkpoint.py, alone in this process: saves behind the training, failures, locks, foreign files. tests/faults
does it to whole runs.
"""
import errno
import fcntl
import hashlib
import os
import runpy
import struct
import subprocess
import sys
import threading
import types
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from engine import checkpoint
from ademamix import AdEMAMix, build_optimizer
from conftest import ROOT
from faults import suite
from model import Apertus, ApertusConfig


def fails_with(number):
    """A function that raises the OSError of this number, whatever it is given."""
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))
    return fail


def linear(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(7, 5)


def optimizer_of(model):
    """AdamW after one step, so that it has states."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return optimizer


def loaded(folder):
    path, manifest = checkpoint.newest_intact(folder)
    model = linear(9)
    checkpoint.load(path, model)
    return model, manifest


def test_a_save_behind_the_training_holds_the_weights_of_its_step(tmp_path, monkeypatch):
    model, go = linear(), threading.Event()
    optimizer, write = optimizer_of(model), checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *args: (go.wait(10), write(*args))[1])
    saver, before = checkpoint.Saver(str(tmp_path), 2, None, 3), model.weight.detach().clone()
    saver.save(1, model, optimizer, {})
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()                                       # in place, before a byte is on disk
    go.set()
    saver.finish()
    assert torch.equal(loaded(tmp_path)[0].weight, before) and not torch.equal(model.weight, before)


def test_a_failed_save_is_told_and_tried_again_and_the_third_in_a_row_stops(tmp_path, monkeypatch, capsys):
    model, full = linear(), [True]
    optimizer, true = optimizer_of(model), dcp.save

    def save(*args, **kwargs):
        if full[0]:
            raise OSError(28, "No space left on device")
        return true(*args, **kwargs)
    monkeypatch.setattr(dcp, "save", save)
    saver = checkpoint.Saver(str(tmp_path), 2, None, patience=3)
    saver.save(1, model, optimizer, {})
    saver.save(2, model, optimizer, {})
    saver.wait()
    assert "No space left" in capsys.readouterr().out
    full[0] = False                                        # the third try goes well, so the count begins again
    saver.save(3, model, optimizer, {})
    saver.wait()
    assert checkpoint.steps_in(tmp_path) == [3] and saver.failures == 0
    full[0] = True
    with pytest.raises(OSError, match="failed 3 times in a row"):
        for step in range(4, 9):
            saver.save(step, model, optimizer, {})
    assert step == 7 and os.listdir(tmp_path) == ["step-00000003"]
    assert torch.equal(loaded(tmp_path)[0].weight, model.weight)


def test_without_room_for_a_copy_training_waits_until_its_weights_are_on_disk(tmp_path, monkeypatch, capsys):
    """140 bytes of a weight, as many of two states, and biases: the host has 300 free, and then more than enough."""
    model = linear()
    optimizer = optimizer_of(model)
    saver = checkpoint.Saver(str(tmp_path), 0, None, 3)
    copied = []
    monkeypatch.setattr(checkpoint, "copy_to_cpu", lambda t: copied.append(t) or t.clone())
    monkeypatch.setattr(checkpoint, "free_on_host", lambda: 300)
    for step in (1, 2):
        saver.save(step, model, optimizer, {})
        assert checkpoint.steps_in(tmp_path)[-1] == step and not copied        # before save() has returned
    assert capsys.readouterr().out.count("training waits while a checkpoint is written") == 1
    monkeypatch.setattr(checkpoint, "free_on_host", lambda: 10_000)
    saver.save(3, model, optimizer, {})
    saver.finish()
    assert len(copied) == len(checkpoint.tensors_of(model, optimizer))
    for name, value in dict(RANK="0", WORLD_SIZE="64", LOCAL_WORLD_SIZE="32").items():
        monkeypatch.setenv(name, value)
    assert not saver.has_room(checkpoint.tensors_of(model, optimizer))         # 32 ranks of this node copy at once


def test_the_thread_that_writes_has_the_gpu_of_its_rank(tmp_path, monkeypatch):
    """A new thread has GPU 0, where each rank would open a context as soon as DCP asks for a stream."""
    taken = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.append((threading.get_ident(), device)))
    model = linear()
    saver = checkpoint.Saver(str(tmp_path), 2, None, 3)
    saver.save(1, model, optimizer_of(model), {})
    saver.finish()
    [(thread, device)] = taken
    assert device == 3 and thread != threading.get_ident()


# 64 MiB of weights in tensors of 4. The first save imports what a save needs.
PEAK = """
import resource, sys
sys.path.insert(0, {root!r})
from types import SimpleNamespace
import torch
from engine import checkpoint
checkpoint.FILE = 2**20
def save(step, n, size):
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(size)) for _ in range(n))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint.save({folder!r}, step, model, SimpleNamespace(state={{}}), {{}})
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
save(1, 1, 4)
print(save(2, 16, 2**20))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux")
def test_writing_takes_twice_the_largest_tensor_and_not_twice_the_model(tmp_path):
    """The kernel's own count of the most memory that the process has had: 8 MiB more, where one file would add 128."""
    program = PEAK.format(root=ROOT, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert int(done.stdout) < 20 * 1024, done.stderr[-2000:]


def test_several_files_of_a_rank_hold_at_most_its_largest_tensor_and_are_one_checkpoint(tmp_path, monkeypatch):
    """The sizes are those of the safetensors format: a length of 8 bytes, the header, the numbers."""
    monkeypatch.setattr(checkpoint, "FILE", 100)
    model = linear()
    optimizer = optimizer_of(model)
    path = checkpoint.save(str(tmp_path), 1, model, optimizer, {})
    sizes = []
    for name in checkpoint.verified(path)["files"]:
        with open(os.path.join(path, name), "rb") as f:
            [header] = struct.unpack("<Q", f.read(8))
            sizes.append(os.fstat(f.fileno()).st_size - 8 - header)
    tensors = checkpoint.tensors_of(model, optimizer)
    assert sum(sizes) == sum(t.nbytes for t in tensors.values())
    assert max(sizes) == max(t.nbytes for t in tensors.values()) == 140 and len(sizes) > 3
    again = linear(9)
    other = torch.optim.AdamW(again.parameters())
    checkpoint.load(path, again, other)
    for name, tensor in checkpoint.tensors_of(again, other).items():
        assert torch.equal(tensor, tensors[name]), name


def test_the_last_save_must_be_on_disk(tmp_path, monkeypatch):
    model = linear()
    saver = checkpoint.Saver(str(tmp_path), 2, None, patience=99)
    monkeypatch.setattr(dcp, "save", fails_with(errno.ENOSPC))
    saver.save(1, model, optimizer_of(model), {})
    with pytest.raises(OSError, match="checkpoint of step 1 was not written"):
        saver.finish()


def test_damaged_checkpoints_of_later_steps_do_not_push_a_good_one_out(tmp_path):
    model = linear()
    optimizer = optimizer_of(model)
    for step in (20, 30):
        checkpoint.save(str(tmp_path), step, model, optimizer, {}, keep=1)
        checkpoint.save(str(tmp_path), step + 1, model, optimizer, {}, keep=2)
    os.truncate(tmp_path / "step-00000031" / "manifest.json", 3)
    checkpoint.save(str(tmp_path), 25, model, optimizer, {}, keep=1)
    assert 25 in checkpoint.steps_in(tmp_path)


def test_a_file_that_the_manifest_does_not_name_is_not_read(tmp_path):
    model = linear()
    path = checkpoint.save(str(tmp_path), 1, model, optimizer_of(model), {})
    (tmp_path / "step-00000001" / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"foreign")
    with pytest.raises(ValueError, match="is not of this checkpoint"):
        checkpoint.verified(path)


def test_nothing_intact_stops_unless_a_restart_is_allowed(tmp_path):
    model = linear()
    optimizer = optimizer_of(model)
    for step in (1, 2):
        path = checkpoint.save(str(tmp_path), step, model, optimizer, {})
        os.remove(os.path.join(path, "manifest.json"))
    with pytest.raises(ValueError, match="is intact .2 damaged.*--allow_restart"):
        checkpoint.newest_intact(tmp_path)
    assert checkpoint.newest_intact(tmp_path, allow_restart=True) is None
    assert checkpoint.newest_intact(tmp_path / "nowhere") is None


def test_one_run_a_folder_and_the_lock_goes_with_its_owner(tmp_path):
    lock = checkpoint.claim(str(tmp_path / "run"))
    with pytest.raises(ValueError, match=f"another run is writing there .process {os.getpid()} on"):
        checkpoint.claim(str(tmp_path / "run"))
    lock.close()
    checkpoint.claim(str(tmp_path / "run")).close()


def test_a_claim_clears_what_a_killed_save_left_and_nothing_else(tmp_path):
    for name in ("step-00000007.tmp", "step-00000006", "notes.tmp"):
        os.makedirs(tmp_path / "ckpt" / name)
    checkpoint.claim(str(tmp_path)).close()
    assert sorted(os.listdir(tmp_path / "ckpt")) == ["notes.tmp", "step-00000006"]


def test_a_folder_that_cannot_be_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="cannot be written there .Not a directory"):
        checkpoint.claim(str(tmp_path / "file" / "run"))


# -----------------------------------------------------------------------------
# how many stay


def test_a_negative_number_of_checkpoints_to_keep_is_refused_and_deletes_nothing(tmp_path):
    """-1 deleted each checkpoint as soon as it was written."""
    model = linear()
    optimizer = optimizer_of(model)
    checkpoint.save(str(tmp_path), 1, model, optimizer, {})
    with pytest.raises(ValueError, match="keep_checkpoints=-1: want how many of the newest to keep, or 0 to keep all"):
        checkpoint.save(str(tmp_path), 2, model, optimizer, {}, keep=-1)
    with pytest.raises(ValueError, match="keep_checkpoints=-3"):
        checkpoint.Saver(str(tmp_path), -3, None, 3)
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("keep, stay", [(0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4])])
def test_so_many_of_the_newest_stay_and_zero_keeps_all(tmp_path, keep, stay):
    model = linear()
    optimizer = optimizer_of(model)
    for step in range(1, 5):
        checkpoint.save(str(tmp_path), step, model, optimizer, {}, keep=keep)
    assert checkpoint.steps_in(tmp_path) == stay


@pytest.mark.parametrize("spare, stay", [(None, [5]), (0, [5]), (1, [1, 5]), (3, [3, 5]), (9, [5])])
def test_the_newest_until_a_step_stays_beside_them(tmp_path, spare, stay):
    """The last one from before the decay: those after it come and go. 9 is still to come: the newest is the last."""
    model = linear()
    saver = checkpoint.Saver(str(tmp_path), 1, None, 3)
    for step in range(1, 6):
        saver.save(step, model, optimizer_of(model), {}, spare=spare)
    saver.finish()
    assert checkpoint.steps_in(tmp_path) == stay


# -----------------------------------------------------------------------------
# what a checkpoint says, and to whom


def rounded(value):
    """To bf16, the upper half of an fp32, to nearest and in a tie to even: by its bits."""
    [bits] = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


def test_a_fingerprint_is_the_sha256_of_names_and_first_values():
    """Adapters carry it for years, so that how it is made is held here, by hand. It outlives a copy in bf16."""
    model = linear()
    weight, bias = (list(map(rounded, p.detach().flatten().tolist())) for p in (model.weight, model.bias))
    text = b"weight" + struct.pack("<35f", *weight) + b"bias" + struct.pack("<5f", *bias)
    want = hashlib.sha256(text).hexdigest()
    assert checkpoint.fingerprint(model) == want == checkpoint.fingerprint(model.bfloat16())


def test_a_tied_weight_is_in_the_fingerprint_once_where_it_stands_first():
    """The order and the names of torch's named_parameters, which leaves out what it has named before."""
    model = torch.nn.ModuleDict(dict(embedding=linear(), head=linear()))
    model.head.weight = model.embedding.weight
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        digest.update(name.encode() + p.detach().bfloat16().float().flatten()[:64].numpy().tobytes())
    assert checkpoint.fingerprint(model) == digest.hexdigest()


def test_a_seal_is_the_same_for_the_same_settings_in_any_order():
    """A checkpoint is sealed again to be checked, by whatever version wrote it: the text is held by hand."""
    want = """{
 "manifest": {
  "files": {},
  "step": 1
 },
 "sha256": "%s"
}""" % hashlib.sha256(b'{"files": {}, "step": 1}').hexdigest()
    assert checkpoint.sealed(dict(step=1, files={})) == checkpoint.sealed(dict(files={}, step=1)) == want


@pytest.mark.parametrize("saved, wanted", [(True, False), (False, True)])
def test_a_parameter_that_only_one_side_has_is_named(tmp_path, saved, wanted):
    model, other = torch.nn.Linear(7, 5, bias=saved), torch.nn.Linear(7, 5, bias=wanted)
    path = checkpoint.save(str(tmp_path), 1, model, optimizer_of(model), {})
    says = {True: r"bias is \(5,\) there and None here", False: r"bias is None there and \(5,\) here"}
    with pytest.raises(ValueError, match=says[saved]):
        checkpoint.load(path, other)


def test_only_the_warning_of_torch_about_one_process_is_silenced():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        runpy.run_path(checkpoint.__file__)
        warnings.warn("torch.distributed is disabled, unavailable or uninitialized")
        warnings.warn("something that a user should know")
    assert [str(w.message) for w in seen] == ["something that a user should know"]


@pytest.fixture
def group():
    """A gloo group for files beside the default one, of one process: what Ranks.join makes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend="gloo", timeout=timedelta(seconds=10))
    dist.destroy_process_group()


def test_a_save_speaks_in_the_group_for_files_and_rank_0_tells_of_damage(tmp_path, monkeypatch, capsys, group):
    """Messages of the thread that saves, in the group of the step, would mix with those of the step."""
    spoken, true = [], dcp.save

    def save(*args, **kwargs):
        spoken.append(kwargs.get("process_group"))
        return true(*args, **kwargs)
    monkeypatch.setattr(dcp, "save", save)
    model = linear()
    optimizer = optimizer_of(model)
    for step in (1, 2):
        checkpoint.save(str(tmp_path), step, model, optimizer, {}, group=group)
    assert len(spoken) == 2 and all(found is group for found in spoken)
    os.truncate(tmp_path / "step-00000002" / "manifest.json", 3)
    assert checkpoint.newest_intact(str(tmp_path), group)[1]["step"] == 1
    assert "passed over" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# where a state lies


@pytest.mark.parametrize("how", [dict(fused=True), dict(capturable=True), dict(fused=False), dict(foreach=True)])
def test_a_step_is_loaded_to_the_device_where_torch_would_load_it(how):
    """
    Fused and capturable updates read the step on the device. No CUDA ran here: the parameter lies on meta, the one
    other device that every machine has. The authority is torch's own load_state_dict, which moves a step that it finds
    on the CPU.
    """
    param = torch.nn.Parameter(torch.empty(3, 2, device="meta"))
    optimizer = torch.optim.AdamW([param], **how)
    saved = optimizer.state_dict()
    saved["state"] = {0: dict(step=torch.tensor(4.0), exp_avg=torch.zeros(3, 2), exp_avg_sq=torch.zeros(3, 2))}
    optimizer.load_state_dict(saved)
    for name, want in optimizer.state[param].items():
        got = checkpoint.empty_state(optimizer, param, want.shape, want.dtype)
        assert (name, got.device, got.shape, got.dtype) == (name, want.device, want.shape, want.dtype)


@pytest.mark.parametrize("name", ["adamw", "ademamix"])
def test_a_loaded_optimizer_counts_on_to_the_same_bits(tmp_path, name):
    """As train.py builds it: three steps, or one, a checkpoint, and two more, of which each divides by its count."""
    shape = ApertusConfig(block_size=8, vocab_size=33, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24)

    def built():
        model = Apertus(shape, seed=1)
        how = dict(betas=(0.9, 0.999, 0.9999), alpha=8.0, eps=1e-8, weight_decay=0.1)
        return model, build_optimizer(model, name, 1e-2, **how, alpha_warmup=5, beta3_warmup=5, compile=False)

    def step(model, optimizer, k):
        idx = torch.arange(16).view(2, 8) + k
        model(idx, idx + 1)[1].backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, resumed = built(), built()
    for k in range(3):
        step(*whole, k)
    step(*resumed, 0)
    path = checkpoint.save(str(tmp_path), 1, *resumed, {})
    again, optimizer = built()
    checkpoint.load(path, again, optimizer)
    for k in (1, 2):
        step(again, optimizer, k)
    for p, want in zip(again.parameters(), whole[0].parameters()):
        assert torch.equal(p, want)
        for kind, state in whole[1].state[want].items():
            assert torch.equal(optimizer.state[p][kind], state), kind
        assert optimizer.state[p]["step"].device.type == "cpu" and optimizer.state[p]["step"] == 3


def test_an_optimizer_of_ours_keeps_its_step_on_the_cpu():
    param = torch.nn.Parameter(torch.empty(3, 2, device="meta"))
    optimizer = AdEMAMix([dict(params=[param])])
    assert checkpoint.empty_state(optimizer, param, (), torch.float32).device.type == "cpu"
    assert checkpoint.empty_state(optimizer, param, (3, 2), torch.bfloat16).device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_step_keeps_the_kind_of_number_that_it_was_saved_as(dtype):
    """torch counts in fp64 where that is the default: fp32 would stop counting at 2^24."""
    param = torch.nn.Parameter(torch.empty(3, 2, device="meta"))
    assert checkpoint.empty_state(AdEMAMix([dict(params=[param])]), param, (), dtype).dtype == dtype


# -----------------------------------------------------------------------------
# files of others


@pytest.mark.parametrize("stray", [".DS_Store", ".nfs000000000123", "notes.txt", "Thumbs.db", ".shard.swp"])
def test_a_stray_file_does_not_damage_a_checkpoint(tmp_path, stray):
    model = linear()
    path = checkpoint.save(str(tmp_path), 1, model, optimizer_of(model), {})
    with open(os.path.join(path, stray), "wb") as f:
        f.write(b"\x80\x04 not ours")
    (tmp_path / stray).write_text("beside the checkpoints")
    assert torch.equal(loaded(tmp_path)[0].weight, model.weight)


@pytest.mark.parametrize("manifest", ["", "[" * 100_000, "[]", '{"manifest": {"step": 1}}', "null", "\0" * 50])
def test_a_manifest_that_is_none_is_told(tmp_path, manifest):
    model = linear()
    path = checkpoint.save(str(tmp_path), 1, model, optimizer_of(model), {})
    with open(os.path.join(path, "manifest.json"), "w", encoding="utf-8") as f:
        f.write(manifest)
    with pytest.raises(ValueError, match="manifest.json is missing, damaged, or not of this project"):
        checkpoint.verified(path)


# -----------------------------------------------------------------------------
# locks


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_said_and_the_run_goes_on(tmp_path, monkeypatch, capsys, number):
    """Lustre mounted without flock answers ENOSYS, NFS without lockd ENOLCK: no other run is writing there."""
    monkeypatch.setattr(fcntl, "flock", fails_with(number))
    checkpoint.claim(str(tmp_path / "run")).close()
    assert f"has no locks ({os.strerror(number)})" in capsys.readouterr().out


def test_an_error_of_the_lock_is_not_taken_for_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", fails_with(errno.EIO))
    with pytest.raises(ValueError, match="its lock cannot be taken .Input/output error") as e:
        checkpoint.claim(str(tmp_path / "run"))
    assert "another run" not in str(e.value)


def test_without_fcntl_the_lock_is_msvcrts(tmp_path, monkeypatch):
    """
    Windows: msvcrt.locking refuses with PermissionError what another process holds. Its stand-in grants the first and
    refuses the second.
    """
    asked = []

    def locking(fd, mode, nbytes):
        asked.append((os.lseek(fd, 0, os.SEEK_CUR), mode, nbytes))
        if len(asked) == 2:
            raise PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(LK_NBLCK=2, locking=locking))
    lock = checkpoint.claim(str(tmp_path))
    with pytest.raises(ValueError, match=f"another run is writing there .process {os.getpid()} on"):
        checkpoint.claim(str(tmp_path))
    lock.close()
    at, mode, nbytes = asked[0]
    assert (mode, nbytes) == (2, 1) and at > 1_000                           # not on the text, which others read


# -----------------------------------------------------------------------------
# a file is written whole, or not


def test_a_full_disk_leaves_the_old_file_and_names_it(tmp_path, monkeypatch):
    """config.json and summary.json were cut: opened for writing, and then there was no space."""
    path = tmp_path / "config.json"
    checkpoint.write_flushed(path, "old")
    monkeypatch.setattr(checkpoint.os, "fsync", fails_with(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left on device.*config.json"):
        checkpoint.write_flushed(path, "new and longer")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["config.json"]


def test_a_written_file_may_come_line_by_line(tmp_path):
    checkpoint.write_flushed(tmp_path / "log", (f"{i}\n" for i in range(3)))
    assert (tmp_path / "log").read_text() == "0\n1\n2\n"


def test_a_power_cut_at_any_moment_of_a_save_leaves_every_checkpoint_that_was_promised(tmp_path):
    """
    Simulated by tests/faults/suite.py: without any one flush of a file, of its folder or of a new run's folder, some
    moment loses one.
    """
    lab = types.SimpleNamespace(fresh=lambda name: str(tmp_path / name))
    (_, tried, lost, _), = suite.power_loss(lab)
    assert tried > 100 and lost == 0


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files by /proc")
def test_flushing_leaves_no_file_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        checkpoint.write_flushed(str(tmp_path / "x"), "text")
    assert len(os.listdir("/proc/self/fd")) == before


def test_new_folders_are_flushed_into_those_that_hold_them(tmp_path, monkeypatch):
    """A name that was not flushed may be gone after a power cut, with all that lies below."""
    flushed, true = [], os.fsync

    def fsync(fd):
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
        true(fd)
    monkeypatch.setattr(checkpoint.os, "fsync", fsync)
    run = tmp_path / "out" / "run"
    checkpoint.claim(str(run)).close()
    assert set(flushed) == {str(tmp_path), str(tmp_path / "out")}
    flushed.clear()
    model = linear()
    checkpoint.save(str(run / "ckpt"), 1, model, optimizer_of(model), {})
    assert {str(run), str(run / "ckpt")} <= set(flushed)
