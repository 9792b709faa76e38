"""
Schedules: what the learning rate and the batch are after so many samples.

    warm-up          s <= warmup              lr = peak * s / warmup
    stable                                    lr = peak
    decay            s > total - decay        lr = floor + (peak - floor) * (1 - sqrt((s - total + decay) / decay))
    after the end    s >= total               lr = floor

The clock counts samples (windows of block_size tokens), not steps, so doubling the batch does not
bend the curve. WSD (warm-up, stable, decay; Hu et al., arXiv 2404.06395; 1-sqrt: Haegele et al.,
arXiv 2405.18392) needs no end in advance: Apertus held the peak until 13.35T tokens, then cooled
down for 1.65T. All are pure functions: the step number is the only state, so a resumed run replays
nothing.

Source: Apertus report (arXiv 2509.14233) sec. 2.3, and the launch scripts, which warm up from 0
(the report says 0.1 * peak).

$ python schedule.py               # learning rate, batch and step of the 8B and 70B runs at their milestones
"""

import math


def wsd(samples_seen, peak, floor, warmup, total, decay):
    """
    Learning rate by warm-up, stable phase and 1-sqrt decay.

    samples_seen: samples consumed before this step, so the first step of a warm-up has lr 0. warmup,
    total, decay in samples: warmup = 0 starts at the peak, decay = 0 stays there until total. Returns
    a float, floor from total on. ValueError if warmup + decay > total. Source: report sec. 2.3.
    """
    check(warmup, total, decay)
    if samples_seen >= total:
        return floor
    if samples_seen < warmup:
        return peak * samples_seen / warmup
    decay_begins = total - decay
    r = max(0, samples_seen - decay_begins) / max(decay, 1)
    return floor + (peak - floor) * (1 - math.sqrt(r))


def cosine(samples_seen, peak, floor, warmup, total):
    """
    Learning rate by warm-up and half a cosine from peak to floor, the ablations' baseline.

    Arguments and errors as in wsd. Source: Loshchilov and Hutter, arXiv 1608.03983.
    """
    check(warmup, total)
    if samples_seen >= total:
        return floor
    if samples_seen < warmup:
        return peak * samples_seen / warmup
    r = (samples_seen - warmup) / (total - warmup)
    half_wave = 1 + math.cos(math.pi * r)
    return floor + (peak - floor) * half_wave / 2


def check(warmup, total, decay=0):
    """ValueError if warm-up and decay do not fit into the run."""
    if warmup < 0 or decay < 0 or warmup + decay > total:
        raise ValueError(
            f"warmup={warmup} and decay={decay} samples do not fit into total={total}: "
            "want neither negative and their sum <= total"
        )


# -----------------------------------------------------------------------------
# The batch ramp. The batch doubles once, at 7.04T (8B) or 4.39T tokens (70B): the gradient's noise
# grows as the loss falls, so a larger batch still pays (McCandlish et al., arXiv 1812.06162), and
# spreads over more GPUs. Everywhere: `start` is the batch in windows at the beginning of the run,
# `ramp_at` the number of samples from which it is twice as large, None for no ramp.


def batch_size(samples_seen, start, ramp_at=None):
    """Windows in the step that begins after samples_seen samples."""
    if ramp_at is None or samples_seen < ramp_at:
        return start
    return 2 * start


def steps_before_ramp(start, ramp_at):
    """Steps with the small batch: rounded up, since the step that crosses ramp_at begins before it."""
    return math.inf if ramp_at is None else -(-ramp_at // start)


def samples_at(step, start, ramp_at=None):
    """Samples consumed before step (0-based): start for each small step, 2 * start for each large one."""
    small = min(step, steps_before_ramp(start, ramp_at))
    return start * small + 2 * start * (step - small)


def steps_in(samples, start, ramp_at=None):
    """Whole steps in so many samples, the inverse of samples_at: a run has steps_in(total, ...) steps."""
    small = min(samples // start, steps_before_ramp(start, ramp_at))
    left = samples - start * small
    return small + left // (2 * start)


# -----------------------------------------------------------------------------
# The command


def print_milestones(size, peak, start, ramp_at):
    """One size of Apertus as published: a line for each corner of its curves. A sample is 4,096 tokens."""
    warmup, total, decay = 4_096_000, 3_662_109_375, 403_905_806
    milestones = dict(
        begin=0,
        warm=warmup,
        ramp=ramp_at,
        decay=total - decay,
        half=total - decay // 2,
        end=total,
    )
    print(f"\n{size:5} {'step':>12} {'samples':>15} {'tokens':>9} {'batch':>6} {'lr':>11}")
    for name, samples in milestones.items():
        step = steps_in(samples, start, ramp_at)
        batch = batch_size(samples, start, ramp_at)
        lr = wsd(samples, peak, peak / 10, warmup, total, decay)
        print(f"{name:5} {step:12,} {samples:15,} {samples * 4096 / 1e12:8.3f}T {batch:6} {lr:11.4e}")


if __name__ == "__main__":
    print_milestones("8B", peak=1.1e-4, start=1024, ramp_at=1_718_272_000)
    print_milestones("70B", peak=1e-5, start=2048, ramp_at=1_072_164_864)
