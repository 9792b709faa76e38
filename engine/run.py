"""
One run of a training script: everything but its method. The scripts have a loop of their own each and call this class.

    with Run(settings, ranks, device) as run:               lock the folder, meet the other ranks, catch signals
        run.begin(settings, end, checkpoint, flops_per_token)    begin, or continue after the checkpoint
        for step in run.steps():                            to the end, or until the user asks to stop
            for part in run.micro_batches(model, parts):    StepInterrupted if the user asks to stop between two
                ...
            run.log.step(...)
            run.save_if_due(step + 1, model, optimizer)
        run.close(model, optimizer)                         the last save, on disk; the script validates after it
        ranks.leave()                                       no rank waits for another any more
        run.log.conclude(summary)                           summary.json and loss.png

The user asks by a signal or by a file in the run folder: stop, cooldown (the decay), profile. Before each step all
ranks agree on what is asked of any of them, so that all do it in the same step.
"""

import contextlib
import os
import time

import torch

from engine import parallel
from engine.checkpoint import Saver
from engine.hardware import keep_freed_memory
from engine.log import Log
from engine.runs import claim, forget


class StepInterrupted(Exception):
    """
    The user has asked to stop between two micro-batches of a step. Its gradients are not those of the whole step, so
    the exception leaves the loop before the update. The step does not count.
    """


class Run:
    """
    The folder, signals and checkpoints of a run. Of the settings, a dict, this class reads out, resume,
    checkpoint_every, checkpoint_minutes, keep_checkpoints and timeout (train.py).
    """

    def __init__(self, settings, ranks, device):
        self.settings, self.ranks, self.device = settings, ranks, device
        self.out = os.path.normpath(settings["out"])
        self.log = Log(self.out, ranks.is_main)
        self.done = 0                                      # finished steps
        self.end = 0                                       # steps of the whole run
        self.saved = 0                                     # steps of the newest checkpoint, on disk or being written
        self.requests = {}                                 # what all ranks have agreed to do, by name
        self.signals = {}                                  # of this process: {name: list of received signals}
        self.saver = None
        self.trace = None                                  # of the current step
        self.started_at = self.saved_at = self.step_started_at = 0.0
        self.step_times = []                               # seconds of this rank's steps, up to 20
        self.on_exit = contextlib.ExitStack()              # frees the lock

    # -----------------------------------------------------------------------------
    # begin and end

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(claim(self.out, self.settings["resume"], self.ranks.is_main))
            self.ranks.join(self.device, self.settings["timeout"])
            self.on_exit = stack.pop_all()
        if self.device == "cpu":
            keep_freed_memory()
        if self.device.startswith("cuda"):
            # Record where held memory was allocated, for the snapshot below. Frees are not recorded: torch 2.11 then
            # loses the exception by which its checkpoint() ends a recomputation.
            torch.cuda.memory._record_memory_history("state", "state", "python")
        return self

    def __exit__(self, kind, error, traceback):
        self.log.close_bar()                               # so that an error starts on a new line
        # Let a save end that all ranks have begun. A RuntimeError may be a lost rank, without which it cannot.
        interrupted = isinstance(error, KeyboardInterrupt)
        if self.saver and (interrupted or isinstance(error, Exception) and not isinstance(error, RuntimeError)):
            self.saver.wait()
        if interrupted and self.ranks.is_main:
            print(f"{self.out}: interrupted after {self.done} steps, {self.saved} of them on disk; --resume continues")
        self.on_exit.close()
        if isinstance(error, torch.OutOfMemoryError):      # on GPUs only
            torch.cuda.memory._dump_snapshot(f"{self.out}/memory-{self.ranks.rank}.pickle")
            raise ValueError(f"{error}: a smaller --micro_batch and --recompute=cheap take less; "
                             f"{self.out}/memory-*.pickle (pytorch.org/memory_viz) shows what held it") from None

    def begin(self, settings, end, checkpoint, flops_per_token):
        """
        Begin, or continue after a checkpoint (path, manifest). settings: those of each checkpoint, hashes of data and
        models included; end: steps of the whole run; flops_per_token: of training, on all ranks, for the log of a GPU.
        """
        path, manifest = checkpoint or ("", dict(step=0, seconds=0.0))
        self.settings = settings
        # Not before: until now nothing is lost if a signal ends the process at once. On GPUs NCCL uses SIGUSR1 itself.
        self.signals = dict(
            stop=parallel.catch_signals("SIGTERM", "SIGUSR2"),
            cooldown=parallel.catch_signals("SIGUSR1") if self.device == "cpu" else [])
        self.end = end
        self.done = self.saved = manifest["step"]
        self.started_at = time.perf_counter() - manifest["seconds"]
        self.saved_at = time.perf_counter()
        self.saver = Saver(f"{self.out}/ckpt", self.settings["keep_checkpoints"], self.ranks.save_group)
        if path and self.ranks.is_main:
            print(f"resumed from {path}")
        is_gpu = self.device.startswith("cuda")
        self.log.open(self.done, end, flops_per_token / self.ranks.size if is_gpu else None)

    def close(self, model, optimizer, **state):
        """Save what is not saved, and wait until it is on disk. Returns whether the run is at its end."""
        if self.saved < self.done:
            self.save(self.done, model, optimizer, **state)
        self.log.close_bar()
        # Once the weights are on disk, the rest can be repeated.
        self.saver.finish()
        times = self.saver.take_times()
        self.log.attach(**times)
        finished = self.done >= self.end
        if self.ranks.is_main:
            forget(self.out, "stop", *["cooldown"] * finished)
            if not finished:
                size = f" ({times['save_gb']:.1f} GB in {times['save_seconds']:.1f} s)" if times else ""
                saved = f", saved{size}" if self.done else ""
                print(f"{self.out}: stopped as asked after step {self.done}{saved}; --resume continues")
        return finished

    # -----------------------------------------------------------------------------
    # the loop

    def steps(self):
        """Yield the number of each step, and count it when the loop comes back for the next one."""
        while self.done < self.end:
            self.requests = self.ranks.any_rank(
                stop=self.is_requested("stop"),
                cooldown=self.is_requested("cooldown"),
                save=self.save_is_overdue())
            if self.requests["stop"]:
                return
            self.log.attach(**self.saver.take_times())
            self.step_started_at = time.perf_counter()
            with StepTrace(self.out, wanted=self.ranks.is_main and self.is_requested("profile")) as self.trace:
                yield self.done
            self.done += 1
            self.log.advance()
            self.compare_ranks()

    def micro_batches(self, model, parts):
        """
        Yield the parts of a step, and say before each whether its gradients are added over ranks after it.
        StepInterrupted if the user asks any rank to stop: a step of the 8B takes a minute on one node, and Slurm kills
        30 seconds after SIGTERM.
        """
        for i, part in enumerate(parts):
            if i and self.ranks.any_rank(stop=self.is_requested("stop"))["stop"]:
                parallel.drop_gathered(model)
                raise StepInterrupted
            if i == 4:
                self.trace.stop()                          # a long step would make a file of gigabytes
            if time.perf_counter() - self.step_started_at > 10:
                self.log.show(f"micro-batch {i + 1} of {len(parts)}")
            parallel.set_gradient_sync(model, self.ranks, is_last=i + 1 == len(parts))
            yield part

    def is_requested(self, name):
        """Whether the user has asked this process: by a signal, or the first rank by a file of this name."""
        return bool(self.signals.get(name)) or self.ranks.is_main and os.path.exists(f"{self.out}/{name}")

    def forget_request(self, name):
        """Do not obey a request a second time."""
        self.signals[name].clear()
        if self.ranks.is_main:
            forget(self.out, name)

    def move_end(self, end):
        """Let the run end after this number of steps."""
        self.end = end
        self.log.show_end(end)

    def seconds(self):
        """Seconds of training, those of earlier processes included."""
        return time.perf_counter() - self.started_at

    def compare_ranks(self):
        """
        After each 20 steps add to the log the least and the largest mean time of a step over ranks. Ranks wait for each
        other in the sums of a step, so a rank stands out that is slow outside of them: in its log, saves or data.
        """
        self.step_times.append(self.step_seconds())
        if self.ranks.size == 1 or len(self.step_times) < 20:
            return
        own = [0.0] * self.ranks.size
        own[self.ranks.rank] = sum(self.step_times) / 20
        of_ranks = self.ranks.all_reduce(*own)
        self.log.attach(rank_seconds_min=round(min(of_ranks), 4), rank_seconds_max=round(max(of_ranks), 4))
        self.step_times = []

    def step_seconds(self):
        """Seconds since the current step began."""
        return time.perf_counter() - self.step_started_at

    # -----------------------------------------------------------------------------
    # checkpoints

    def save_is_overdue(self):
        """Whether the last checkpoint is older than checkpoint_minutes, if these are not 0."""
        return 0 < 60 * self.settings["checkpoint_minutes"] < time.perf_counter() - self.saved_at

    def save_if_due(self, steps, model, optimizer, **state):
        """Save a checkpoint after this number of steps, if one is due. The last one is saved by close()."""
        every = self.settings["checkpoint_every"]
        if self.saved < steps < self.end and (self.requests["save"] or every and steps % every == 0):
            self.save(steps, model, optimizer, **state)

    def save(self, steps, model, optimizer, keep_until=0, **state):
        """
        Save a checkpoint in the background. keep_until: the newest checkpoint until this step is never deleted. state:
        further entries of the manifest.
        """
        self.saver.wait()
        if self.ranks.any_rank(failed=bool(self.saver.error))["failed"]:
            self.ranks.renew_save_group()
            self.saver.use(self.ranks.save_group)
        manifest = state | dict(config=self.settings, seconds=self.seconds())
        self.saver.save(steps, model, optimizer, manifest, keep_until=keep_until)
        self.saved, self.saved_at = steps, time.perf_counter()


class StepTrace:
    """
    Trace what runs in a `with` block into OUT/trace.json, for chrome://tracing or ui.perfetto.dev, and remove the file
    OUT/profile that has asked for it.
    """

    def __init__(self, out, wanted):
        self.out = out
        self.profiler = torch.profiler.profile() if wanted else None

    def __enter__(self):
        if self.profiler:
            self.profiler.start()
        return self

    def __exit__(self, *error):
        self.stop()

    def stop(self):
        """End the trace before the block ends. The second call does nothing."""
        profiler, self.profiler = self.profiler, None
        if profiler:
            profiler.stop()
            profiler.export_chrome_trace(f"{self.out}/trace.json")
            forget(self.out, "profile")
