"""checkpoint.py, alone in this process: saves behind the training, failures, locks, foreign files. tests/faults does it to whole runs."""
import os
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

import checkpoint


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
    saver, before = checkpoint.Saver(str(tmp_path)), model.weight.detach().clone()
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
    saver = checkpoint.Saver(str(tmp_path), patience=3)
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


def test_the_last_save_must_be_on_disk(tmp_path, monkeypatch):
    model = linear()
    saver = checkpoint.Saver(str(tmp_path), patience=99)
    monkeypatch.setattr(dcp, "save", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "No space left on device")))
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
    path = checkpoint.save(str(tmp_path), 1, model, optimizer_of(model), {})
    os.remove(os.path.join(path, "manifest.json"))
    with pytest.raises(ValueError, match="--allow_restart"):
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
