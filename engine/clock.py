"""When the decay of a run begins, if not as planned: on request, or in time to end with the clock."""

import math


class DecayClock:
    """
    Begins the decay of the learning rate on request (the file `cooldown`, or SIGUSR1), or, with minutes, so early that
    it ends when these are over.

    run: engine.run.Run; plan: schedule.Plan, whose decay_at is None as long as the clock decides; minutes: of training,
    decay included, 0 = no limit.
    """

    def __init__(self, run, plan, minutes):
        self.run, self.plan, self.limit = run, plan, 60 * minutes
        self.calls = 0                                     # of foresee(), one a step
        self.pace_from = 0.0, 0                            # (seconds, samples) from which the pace is measured

    def decay_is_due(self, step):
        """Whether the decay begins after this step. All ranks get the same answer."""
        if self.plan.decay_at is not None:
            return self.run.requests["cooldown"]
        samples = self.foresee(self.plan.samples_before(step))
        if samples < math.inf:
            self.run.log.show_end(self.plan.steps_in(int(samples)))
        # A decay that begins later would end when the time is up, or after that. The clock of the first rank counts.
        is_late = self.run.ranks.is_main and self.plan.samples_if_decay_follows(step) >= samples
        return self.run.requests["cooldown"] or self.run.ranks.any_rank(late=is_late)["late"]

    def foresee(self, samples):
        """
        How many samples the run will have seen when its minutes are over, at the pace of this process; inf if that is
        not known yet. To be called at the end of each step, before which the run had seen `samples`: so the forecast is
        a step short, on the safe side.
        """
        now = self.run.seconds()
        # The first two steps compile. The pace, validations and saves included, is that of the steps after them.
        if self.calls < 2:
            self.pace_from = now, samples
        self.calls += 1
        then, before = self.pace_from
        left = max(0, self.limit - now)
        if samples == before:
            return math.inf if left else samples
        return samples + left * (samples - before) / (now - then)

    def begin_decay(self, steps, model, optimizer):
        """
        Begin the decay after this number of steps, unless it has begun or the schedule has none, and wait until that is
        on disk: a run that is killed in the first step of its decay begins it at the same step again.
        """
        if self.limit and steps < 3:                       # these compile, so they say nothing of the pace
            raise ValueError(f"minutes={self.limit / 60:g}: a decay is due within two steps: take more, or remove the "
                             "file cooldown")
        run, plan = self.run, self.plan
        if plan.begin_decay(steps):
            run.move_end(plan.end)
            run.log.say(f"step {steps:6}   the decay begins, {run.end - steps:,} steps")
        else:
            run.log.say(f"step {steps:6}   asked for its decay, which this schedule has begun or plans itself")
        run.save(steps, model, optimizer, **decay_state(plan))
        run.saver.wait()
        run.forget_request("cooldown")


def decay_state(plan):
    """Arguments of Run.save: where the decay begins, and until which step the newest checkpoint is never deleted."""
    decay_at = plan.decay_at
    return dict(decay_at=decay_at, keep_until=math.inf if decay_at is None else plan.steps_in(decay_at))
