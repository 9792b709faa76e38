"""tools/restart.sh and configs/8b.sbatch: events that start a run again, and events that do not."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT, script
from shell import run_shell
from torch.distributed.run import parse_args


def test_a_mistake_in_the_settings_is_said_once(tmp_path):
    (tmp_path / "run/ckpt/step-00000010").mkdir(parents=True)
    starts = []

    def call(name, *args):
        starts.append(script(name, *args).returncode)
        return starts[-1]

    command = "python", "train.py", "configs/tiny.py", f"--out={tmp_path}/run", "--resume", "--micro_batch=3"
    assert run_shell("tools/restart.sh", str(tmp_path / "run"), *command, call=call) == 2
    assert starts == [2]


@pytest.mark.parametrize("attempts, code", [("new new same", 9), ("new new end", 0), ("end", 0), ("same", 9)])
def test_a_failed_run_starts_again_while_its_newest_checkpoint_moves(tmp_path, attempts, code):
    """Checkpoints are deleted too (--keep_checkpoints=1), and one that is being written does not count."""
    attempts, folder = attempts.split(), tmp_path / "ckpt"
    folder.mkdir()
    starts = iter(attempts)

    def call(name):
        attempt = next(starts)
        if attempt == "new":
            for old in folder.glob("step-*"):
                old.rmdir()
            (folder / f"step-{time.monotonic_ns():020}").mkdir()
        (folder / f"step-{time.monotonic_ns():020}.tmp").mkdir()
        return 0 if attempt == "end" else 9

    assert run_shell("tools/restart.sh", str(tmp_path), "python", "train.py", call=call) == code
    assert not list(starts)


# Each start takes the next line of `plan`: a crash after a new checkpoint, a crash without one, the end of the run, or
# a run that the file `stop` ends.
SRUN = """#!/bin/sh
echo "$@" >> srun
case $(sed -n "$(wc -l < srun)p" plan) in
    new) mkdir -p out/8b/ckpt/step-$(wc -l < srun); exit 1 ;;
    same) exit 1 ;;
    end) touch out/8b/summary.json; exit 0 ;;
    stop) touch running; while ! rm out/8b/stop 2> /dev/null; do sleep 0.05; done; exit 0 ;;
esac
"""


@pytest.mark.parametrize(
    "plan, sent, code, queued",
    [
        ("new same", 0, 1, False),
        ("new new end", 0, 0, False),
        ("new stop", signal.SIGUSR2, 0, True),
        ("stop", 0, 0, False),
    ],
)
def test_a_job_of_slurm_queues_itself_again_only_when_its_time_is_over(tmp_path, plan, sent, code, queued):
    """srun and scontrol are scripts here. Without the signal, the file `stop` is the user's, which ends the job."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/scontrol").write_text('#!/bin/sh\n[ $1 = show ] && echo first || echo "$@" > requeued\n')
    for program in (tmp_path / "bin").iterdir():
        program.chmod(0o755)
    (tmp_path / "tools").symlink_to(f"{ROOT}/tools")
    (tmp_path / "plan").write_text(plan.replace(" ", "\n") + "\n")
    (tmp_path / "out/8b").mkdir(parents=True)
    env = dict(PATH=f"{tmp_path}/bin:{os.environ['PATH']}", SLURM_JOB_ID="7", SLURM_NNODES="2", SLURM_CPUS_ON_NODE="64")
    job = subprocess.Popen(["bash", f"{ROOT}/configs/8b.sbatch"], cwd=tmp_path, env=env | dict(SLURM_JOB_NODELIST="x"))
    if "stop" in plan:
        while not (tmp_path / "running").exists():
            time.sleep(0.02)
        job.send_signal(sent) if sent else (tmp_path / "out/8b/stop").touch()
    assert job.wait(30) == code
    starts = (tmp_path / "srun").read_text().splitlines()
    assert len(starts) == len(plan.split())
    assert (tmp_path / "requeued").exists() == queued
    flags = parse_args(starts[0].partition("torchrun ")[2].split())
    assert (flags.nnodes, flags.nproc_per_node, flags.max_restarts, flags.rdzv_endpoint) == ("2", "8", 0, "first:29500")
    assert Path(flags.training_script).name == "train.py"
