"""
The run folder of train.py, posttrain/sft.py and posttrain/qrpo.py: who may write there, and how a run resumes.

    config.json    all settings, the model's shape and the vocabulary: what sample.py and convert.py need
    log.jsonl      one line per step; a resumed run first removes the lines of steps that it repeats
    ckpt/          the checkpoints (engine/checkpoint.py)
    .lock          held by the process that writes here; the kernel frees it when that process ends, however it ends
    stop           `touch` it, and all ranks leave the current step, save, and exit
    profile        `touch` it, and the next step is traced: trace.json, for chrome://tracing
    cooldown       `touch` it, and train.py begins the decay of its learning rate after the current step
"""

import contextlib
import glob
import os
import shutil

from engine.files import lock, make_folder, read_json


def config_of(folder):
    """config.json of a run folder or a Hugging Face folder, a dict. ValueError if there is none."""
    path = f"{folder}/config.json"
    if not os.path.exists(path):
        holds = " (it holds data, written by prepare.py)" if os.path.exists(f"{folder}/meta.json") else ""
        raise ValueError(f"{folder} is no run folder and no Hugging Face folder: it has no config.json{holds}")
    return read_json(path)


def settings_of(folder):
    """The settings of a run folder, from its config.json. ValueError if it is no run folder."""
    config = config_of(folder)
    return config.get("nanoapertus", config)


def note_unfinished(folder):
    """A clause for the first lines of a run that starts with this model: "", unless it is a run that has not ended."""
    if not os.path.isdir(f"{folder}/ckpt") or os.path.exists(f"{folder}/summary.json"):
        return ""
    return f"; {folder} has not ended, and its newest checkpoint is the start"


def claim(out, resume, is_main):
    """
    The lock of the run folder, as a context; only the first rank takes it. Nothing else is written yet.

    ValueError: another run writes there, or the folder holds a run and resume is off, or files of another kind.
    """
    if not is_main:
        return contextlib.nullcontext()
    files = set(os.listdir(out)) if os.path.isdir(out) else set()
    if "meta.json" in files or files - {"stop", "cooldown", "profile"} and ".lock" not in files:
        raise ValueError(f"{out} holds files that are not of a run ({min(files)}): name another folder with --out")
    if not files & {"log.jsonl", "ckpt"}:
        # The file `cooldown` was meant for an earlier run.
        forget(out, "cooldown")
    elif not resume:
        raise ValueError(f"{out} already holds a run: --resume continues it, --out=ANOTHER starts a new one")
    return lock_run(out)


def lock_run(out):
    """
    Make the run folder and lock it for this process. Closing the returned file unlocks it.

    OSError: the folder cannot be written; ValueError: another process has locked it.
    """
    make_folder(out)
    file = lock(f"{out}/.lock", f"stop it (touch {out}/stop) or name another --out")
    for killed_save in glob.glob("ckpt/step-[0-9]*.tmp", root_dir=out):
        shutil.rmtree(f"{out}/{killed_save}", ignore_errors=True)
    return file


def forget(out, *names):
    """Remove the files `stop`, `cooldown` or `profile`: the next start must not obey them again."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{out}/{name}")
