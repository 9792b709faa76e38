"""
One run of a training script: all that is not its method. train.py, posttrain/sft.py and posttrain/qrpo.py have a loop
of their own each, and use this class for the rest. It calls nothing of theirs.

    with Run(config, ranks, device) as run:                 lock the folder, meet the other ranks, catch signals
        run.open(end, found)                                log, clock and bar, after the checkpoint `found`, if any
        for step in run.steps():                            until run.end, or until somebody asks to stop
            for part in run.micro_batches(model, parts):    between them too: then the step is dropped (interrupted)
                ...
            loss, norm = run.reduce(model, loss)            over all ranks
            if run.is_finite(step, loss, norm):
                ...
            run.log_step(...)
            run.save_if_due(step + 1, model, optimizer)
        run.close(model, optimizer)                         the last save; True if the run is at its end
        run.leave(complete)                                 let the other ranks go, write summary.json and loss.png

Files by which a user asks, in the run folder: stop, cooldown, profile (engine/runs.py). What one rank sees, all ranks
obey in the same step: they agree before each step and, to stop, between its micro-batches.
"""

import contextlib
import math
import os
import statistics
import time

import torch
from tqdm import tqdm

from engine import checkpoint, parallel, runs
from engine.files import write_json
from engine.hardware import keep_freed_memory

NEVER = 2**62           # as in schedule.py


# Of settings that a script does not have. timeout: a rank may sample references while another waits.
DEFAULTS = dict(timeout=7200, minutes=0.0, eval_minutes=0.0, checkpoint_minutes=30.0, save_failures=3, skip_nonfinite=0)


class Run:
    """
    The folder, ranks, clock, log and checkpoints of a run. config: all settings, which each checkpoint holds; of them
    this class obeys out, resume, checkpoint_every, keep_checkpoints and those of DEFAULTS (train.py explains them).
    """

    def __init__(self, config, ranks, device):
        self.config, self.ranks, self.device = config, ranks, device
        self.out = config["out"]
        self.how = DEFAULTS | config
        # from open() on
        self.done = self.end = self.saved = 0              # steps: finished, of the whole run, in the newest checkpoint
        self.clock = self.saver = None
        self.writers = []                                  # functions that get each entry of the log
        self.bar = tqdm(disable=True)
        self.flops = 0.0                                   # of a token on this rank, for the log of a GPU
        self.decayed = []                                  # steps of checkpoints that a longer run sets aside
        # in the loop
        self.asked = {}                                    # what all ranks have agreed on before this step
        self.interrupted = False                           # asked to stop within a step
        self.skipped = 0                                   # steps in a row that were not finite
        self.speeds = []                                   # tokens/s of each step
        self.began, self.latest, self.trace = 0.0, {}, None
        self.summary = None                                # of a finished run, for summary.json

    # -----------------------------------------------------------------------------
    # begin and end

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(runs.claim(self.out, self.how["resume"], self.ranks))
            self.ranks.join(self.device, self.how["timeout"])
            # On GPUs NCCL uses SIGUSR1 itself.
            of_cooldown = ["SIGUSR1"] * (self.device == "cpu")
            self.signals = dict(stop=parallel.stop_signals(), cooldown=parallel.stop_signals(of_cooldown))
            self.lock = stack.pop_all()
        if self.device == "cpu":
            keep_freed_memory()
        if self.device.startswith("cuda"):
            # Record where held memory was allocated, for the snapshot below. Frees are not recorded: torch 2.11 then
            # loses the exception by which its checkpoint() ends a recomputation.
            torch.cuda.memory._record_memory_history("state", "state", "python")
        return self

    def __exit__(self, kind, error, trace):
        self.bar.close()                                   # so that an error starts on a new line
        self.end_trace()
        self.lock.close()
        if isinstance(error, torch.OutOfMemoryError):      # on GPUs only
            torch.cuda.memory._dump_snapshot(f"{self.out}/memory-{self.ranks.rank}.pickle")
            raise ValueError(f"{error}: a smaller --micro_batch and --recompute=cheap take less; "
                             f"{self.out}/memory-*.pickle (pytorch.org/memory_viz) shows what held it") from None

    def open(self, end, found=None, flops=0.0):
        """
        Begin, or continue after the checkpoint `found` (path, manifest). end: steps of the run; flops: of a token, on
        this rank.
        """
        self.end, self.flops = end, flops
        self.done = self.saved = start = found[1]["step"] if found else 0
        if found and self.ranks.is_main:
            if self.decayed:
                from engine.restore import set_aside
                set_aside(self.out, self.decayed)
            print(f"resumed from {found[0]}")
        self.saver = checkpoint.Saver(f"{self.out}/ckpt", self.how["keep_checkpoints"], self.ranks.files,
                                      self.how["save_failures"])
        self.writers = [runs.open_log(self.out, start, self.ranks, validate=start >= end)]
        self.clock = runs.Clock(self.how["minutes"], found[1]["seconds"] if found else 0.0)
        self.latest = dict.fromkeys(("save", "validate"), time.perf_counter())
        self.bar = tqdm(initial=start, total=end, unit="step", dynamic_ncols=True, disable=not self.ranks.is_main)

    def close(self, model, optimizer, **about):
        """Save what is not saved, and wait until it is on disk. Returns whether the run is at its end."""
        if self.saved < self.done:
            self.save(model, optimizer, **about)
        self.bar.close()
        # Once the weights are on disk, the rest can be repeated.
        self.saver.finish()
        finished = self.done >= self.end
        if self.ranks.is_main:
            runs.forget(self.out, "stop", *["cooldown"] * finished)
            if not finished:
                print(f"{self.out}: stopped as asked after step {self.done}{', saved' if self.done else ''}; "
                      "--resume continues")
        return finished

    def leave(self, complete):
        """Let all ranks go. Then the first one writes the files of a finished run; complete(out): its weights."""
        self.ranks.leave()
        if not self.ranks.is_main:
            return
        if self.summary:
            complete(self.out)
            write_json(f"{self.out}/summary.json", self.summary)
        if self.speeds or self.summary:
            from engine import plot  # here, since matplotlib takes a second
            plot.curves([self.out], f"{self.out}/loss.png")
            print(f"the curve: {self.out}/loss.png")

    # -----------------------------------------------------------------------------
    # the loop

    def steps(self):
        """Yield the number of each step. Its body may `break` if `interrupted`: then the step does not count."""
        while self.done < self.end:
            self.asked = self.ranks.any_rank(
                stop=self.asks("stop"),
                cooldown=self.asks("cooldown"),
                save=self.overdue("save", "checkpoint_minutes"),
                validate=self.overdue("validate", "eval_minutes"))
            if self.asked["stop"]:
                return
            self.began = time.perf_counter()
            if self.ranks.is_main and os.path.exists(f"{self.out}/profile"):
                self.trace = torch.profiler.profile()
                self.trace.start()
            yield self.done
            self.done += 1
            self.bar.update()

    def micro_batches(self, model, parts):
        """
        Yield the parts of a step, and tell FSDP which is the last. Ends early, and sets `interrupted`, if any rank is
        asked to stop: a step of the 8B takes a minute on one node, and Slurm kills 30 seconds after SIGTERM.
        """
        for i, part in enumerate(parts if not self.interrupted else ()):
            if i and self.ranks.any_rank(stop=self.asks("stop"))["stop"]:
                self.interrupted = True
                parallel.drop_gathered(model)
                return
            if i == 4:
                self.end_trace()                           # a long step would make a file of gigabytes
            if time.perf_counter() - self.began > 10:
                self.bar.set_postfix_str(f"micro-batch {i + 1} of {len(parts)}")
            # FSDP adds gradients over ranks after each micro-batch, DDP and exact FSDP once, after the last.
            parallel.reduce_after(model, self.ranks, i + 1 == len(parts))
            yield part

    def reduce(self, model, *sums):
        """Sums over ranks of numbers, and the norm of the gradient, which with DDP is added over ranks here."""
        parallel.add_gradients(model, self.ranks)
        *sums, square = self.ranks.all_reduce(*sums, parallel.square_norm(model, self.ranks))
        return *sums, math.sqrt(square)

    def is_finite(self, step, loss, norm):
        """Whether to take this step. ValueError after skip_nonfinite steps in a row that are not finite."""
        if math.isfinite(loss + norm):
            self.skipped = 0
            return True
        if self.skipped >= self.how["skip_nonfinite"]:
            self.saver.finish()
            raise ValueError(f"step {step}: loss {loss}, gradient norm {norm}; skipped before: {self.skipped}. "
                             "Stopped before the update, so no checkpoint holds it. Try a lower --lr, a longer "
                             "warm-up, or --dtype=float32")
        self.skipped += 1
        return False

    def log(self, **entry):
        """Append an entry to log.jsonl."""
        for write in self.writers:
            write(**entry)

    def log_step(self, step, tokens, positions, losses, grad_norm, **entry):
        """Log a step. tokens: seen by the run; positions: computed by all ranks; losses: {"loss": ..., others}."""
        self.end_trace()
        speed = positions / (time.perf_counter() - self.began)
        self.speeds.append(speed)
        self.bar.set_postfix_str(f"loss {losses['loss']:.3f}, {speed / 1e3:.1f}k tok/s", refresh=False)
        if self.skipped:
            losses, grad_norm = dict.fromkeys(losses), None    # JSON has no nan
        self.log(step=step, tokens=tokens, **losses, grad_norm=grad_norm, **entry, tok_s=round(speed),
                 skipped=self.skipped, **self.usage(speed))

    def log_validation(self, step, tokens, entry):
        """Log a validation, and print it while the run goes on."""
        self.log(step=step, tokens=tokens, **entry)
        if self.done < self.end:
            self.say(f"step {step + 1:6}   " + "   ".join(f"{name} {value:.3f}" for name, value in entry.items()))

    def also_log_to_wandb(self, project):
        """Send each entry of the log to Weights & Biases too."""
        if self.ranks.is_main:
            import wandb
            wandb.init(project=project, name=os.path.basename(self.out), config=self.config)
            self.writers.append(lambda **entry: wandb.log(entry, step=entry["step"]))

    def seconds(self):
        """Seconds of training, those of earlier processes included."""
        return round(self.clock.seconds(), 1)

    def say(self, text):
        """Print a line above the bar, on the first rank."""
        if self.ranks.is_main:
            self.bar.write(text)

    def asks(self, name):
        """Whether this rank is asked to stop, or for the cooldown: by a signal, or the first rank by a file."""
        return bool(self.signals[name]) or self.ranks.is_main and os.path.exists(f"{self.out}/{name}")

    def overdue(self, what, setting):
        """Whether the latest validation or checkpoint is older than the minutes of this setting, if they are not 0."""
        return 0 < 60 * self.how[setting] < time.perf_counter() - self.latest[what]

    def validation_due(self, done, every):
        """Whether to validate after `done` steps. The last validation comes after the last save."""
        due = done < self.end and (self.asked["validate"] or every and done % every == 0)
        if due:
            self.latest["validate"] = time.perf_counter()
        return due

    # -----------------------------------------------------------------------------
    # the decay, by request or by the clock

    def decay_wanted(self, plan, step):
        """Whether the decay begins after this step, on request, or because it would end when the minutes are over."""
        if plan.decay_at != NEVER:
            return self.asked["cooldown"]
        total = self.clock.foresee(plan.samples(step))
        if total < math.inf:
            self.bar.total = plan.steps(int(total))
        # The clock of the first rank counts.
        late = self.ranks.is_main and plan.decay_due(step, total)
        return self.asked["cooldown"] or self.ranks.any_rank(late=late)["late"]

    def begin_decay(self, plan, done, model, optimizer):
        """
        Begin the decay after `done` steps, unless the rate is falling already, and wait until that is on disk: a run
        that is killed in its first step begins it at the same step.
        """
        if self.clock.limit and done < 3:                  # they compile, so they say nothing of the pace
            raise ValueError(f"minutes={self.how['minutes']:g}: a decay is due within two steps: take more, or remove "
                             "the file cooldown")
        begins = plan.begin_decay(done)
        self.end = self.bar.total = plan.end
        self.say(f"step {done:6}   " + (f"the decay begins, {self.end - done:,} steps" if begins else
                                        "asked for its decay, but the rate falls already"))
        self.save(model, optimizer, done, **plan.saved())
        self.saver.wait()
        self.signals["cooldown"].clear()
        if self.ranks.is_main:
            runs.forget(self.out, "cooldown")

    # -----------------------------------------------------------------------------
    # checkpoints

    def save_if_due(self, done, model, optimizer, **about):
        """After `done` steps, save a checkpoint if one is due. about: further entries of its manifest."""
        every = self.how["checkpoint_every"]
        if self.saved < done < self.end and (self.asked["save"] or every and done % every == 0):
            self.save(model, optimizer, done, **about)

    def save(self, model, optimizer, done=None, spare=0, **about):
        """Save in the background. spare: the newest checkpoint until this step is kept."""
        self.saved = self.done if done is None else done
        about |= dict(config=self.config, seconds=self.clock.seconds())
        self.saver.save(self.saved, model, optimizer, about, spare=spare)
        self.latest["save"] = time.perf_counter()

    # -----------------------------------------------------------------------------
    # speed

    def usage(self, speed):
        """Entries of the log about the GPU."""
        if not self.device.startswith("cuda"):
            return {}
        from engine.gpus import usage
        return usage(self.flops * speed)

    def summarise(self, tokens, entry):
        """The content of summary.json. The speed is without the first steps, which compile."""
        speed = statistics.median(self.speeds[3:] or self.speeds or [0])
        self.summary = entry | dict(steps=self.done, tokens=tokens, seconds=round(entry["seconds"]), tok_s=round(speed),
                                    torch=torch.__version__) | self.usage(speed)

    def end_trace(self):
        """Write trace.json, if the file `profile` has asked for a trace."""
        if self.trace:
            self.trace.stop()
            self.trace.export_chrome_trace(f"{self.out}/trace.json")
            runs.forget(self.out, "profile")
            self.trace = None
