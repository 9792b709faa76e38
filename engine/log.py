"""What a run says: log.jsonl, the progress bar, Weights & Biases, and at the end summary.json and loss.png."""

import json
import os
import statistics

import torch
from tqdm import tqdm

from engine.files import write_flushed, write_json


class Log:
    """
    The log of a run. On other ranks than the first it writes and prints nothing.

    out: the run folder. An entry of log.jsonl is a line {"step": ..., ...}: one for each step, one for each validation.
    """

    def __init__(self, out, is_main):
        self.out, self.is_main = out, is_main
        self.writers = []                                  # functions that take an entry, a dict
        self.bar = tqdm(disable=True)
        self.speeds = []                                   # tokens/s of each step of this process
        self.flops_per_token = None
        self.attached = {}                                 # values of the next entry

    def open(self, start, end, flops_per_token=None):
        """
        Begin with step `start` of `end`. Lines of steps from there on, which will be repeated, are removed.
        flops_per_token: of training, on this rank, if it is a GPU: then each entry says how well it is used.
        """
        self.flops_per_token = flops_per_token
        if not self.is_main:
            return
        path = f"{self.out}/log.jsonl"
        remove_entries(path, start, repeat_validation=start >= end)
        file = open(path, "a", encoding="utf-8", buffering=1)
        self.writers.append(lambda entry: file.write(json.dumps(entry) + "\n"))
        self.bar = tqdm(initial=start, total=end, unit="step", dynamic_ncols=True)

    def send_to_wandb(self, settings):
        """Send each entry to Weights & Biases too. settings: shown there with the run."""
        if self.is_main:
            import wandb
            wandb.init(project="nanoapertus", name=os.path.basename(self.out), config=settings)
            self.writers.append(lambda entry: wandb.log(entry, step=entry["step"]))

    # -----------------------------------------------------------------------------
    # entries

    def attach(self, **values):
        """Add values to the next entry."""
        self.attached |= values

    def write(self, step, **values):
        """Append an entry."""
        for write in self.writers:
            write(dict(step=step, **values, **self.attached))
        self.attached = {}

    def step(self, step, loss, seconds, tokens_in_step, **values):
        """Log a finished step. tokens_in_step: of all ranks, padding included, from which the speed follows."""
        speed = tokens_in_step / seconds
        self.speeds.append(speed)
        usage = self.gpu_usage(speed)
        reserved = f", {usage['reserved_gib']:.1f} GiB" if usage else ""
        self.show(f"loss {loss:.3f}, {speed / 1e3:.1f}k tok/s{reserved}", refresh=False)
        self.write(step, loss=loss, **values, tok_s=round(speed), **usage)

    def validation(self, step, **values):
        """Log and print a validation after a step."""
        self.write(step, **values)
        numbers = (f"{name} {value:.3f}" for name, value in values.items() if name != "tokens")
        self.say(f"step {step + 1:6}   " + "   ".join(numbers))

    def gpu_usage(self, speed):
        """Entries about the GPU: {} without one."""
        if self.flops_per_token is None:
            return {}
        from engine.hardware import usage
        return usage(self.flops_per_token * speed)

    # -----------------------------------------------------------------------------
    # the bar

    def advance(self):
        """Count a step."""
        self.bar.update()

    def show(self, text, refresh=True):
        """Show a text behind the bar."""
        self.bar.set_postfix_str(text, refresh=refresh)

    def show_end(self, end):
        """Let the bar end at this number of steps."""
        self.bar.total = end

    def say(self, text):
        """Print a line above the bar."""
        if self.is_main:
            self.bar.write(text)

    def close_bar(self):
        """End the bar. What is printed next starts on a new line."""
        self.bar.close()

    # -----------------------------------------------------------------------------
    # the end

    def summary(self, steps, **values):
        """The content of summary.json for a finished run. The speed is without the first steps, which compile."""
        speed = statistics.median(self.speeds[3:] or self.speeds or [0])
        return values | dict(steps=steps, tok_s=round(speed), torch=torch.__version__) | self.gpu_usage(speed)

    def conclude(self, summary):
        """Write summary.json, which says that the run is finished, and draw loss.png. None: it was stopped."""
        if not self.is_main:
            return
        if summary:
            write_json(f"{self.out}/summary.json", summary)
        if summary or self.speeds:
            from engine import plot  # here, since matplotlib takes a second
            plot.curves([self.out], f"{self.out}/loss.png")
            print(f"the curve: {self.out}/loss.png")


def read_entry(line):
    """The entry of a line of log.jsonl; None if a kill or a full disk has torn it."""
    try:
        entry = json.loads(line)
        return entry if line.endswith("\n") and type(entry["step"]) is int else None
    except Exception:                                      # of any kind, as damage has
        return None


def remove_entries(path, start, repeat_validation):
    """
    Remove from log.jsonl the lines of steps from `start` on, which will be repeated, and torn ones. repeat_validation:
    also the validation after the last step before `start`, which a run that is at its end repeats.
    """
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        entries = [(line, read_entry(line)) for line in file]

    def is_kept(entry):
        is_validation = "loss" not in entry
        return entry["step"] < (start - 1 if repeat_validation and is_validation else start)

    write_flushed(path, "".join(line for line, entry in entries if entry and is_kept(entry)))
