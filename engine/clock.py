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
        self.marks = []                                    # (seconds, samples) before the first two steps

    def decay_is_due(self, step):
        """Whether the decay begins after this step. All ranks get the same answer."""
        if self.plan.decay_at is not None:
            return self.run.requests["cooldown"]
        samples = self.foresee(self.plan.samples_before(step))
        if samples < math.inf:
            self.run.log.show_end(self.plan.steps_in(int(samples)))
        # A decay that begins later would end when the time is up, or after that. The clock of the first rank counts.
        is_late = self.run.ranks.is_main and self.plan.end_if_decay_follows(step) >= samples
        return self.run.requests["cooldown"] or self.run.ranks.any_rank(late=is_late)["late"]

    def foresee(self, samples):
        """
        How many samples the run will have seen when its minutes are over, at the pace of this process; inf if that is
        not known yet. Call it once in each step, before which the run has seen `samples`.
        """
        now = self.run.seconds()
        # The first step compiles. The pace, validations and saves included, counts from the second on.
        if len(self.marks) < 2:
            self.marks.append((now, samples))
        then, before = self.marks[-1]
        left = max(0, self.limit - now)
        if samples == before:
            return math.inf if left else samples
        return samples + left * (samples - before) / (now - then)

    def begin_decay(self, steps, model, optimizer):
        """
        Begin the decay after this number of steps, unless the rate is falling already, and wait until that is on disk:
        a run that is killed in the first step of its decay begins it at the same step again.
        """
        if self.limit and steps < 3:                       # these compile, so they say nothing of the pace
            raise ValueError(f"minutes={self.limit / 60:g}: a decay is due within two steps: take more, or remove the "
                             "file cooldown")
        run, plan = self.run, self.plan
        if plan.begin_decay(steps):
            run.move_end(plan.end)
            run.log.say(f"step {steps:6}   the decay begins, {run.end - steps:,} steps")
        else:
            run.log.say(f"step {steps:6}   asked for its decay, but the rate falls already")
        run.save(steps, model, optimizer, **plan_state(plan))
        run.saver.wait()
        run.forget_request("cooldown")


def plan_state(plan):
    """For Run.save: where the decay begins, and that the newest checkpoint from before it is kept."""
    decay_at = plan.decay_at
    return dict(decay_at=decay_at, keep_until=math.inf if decay_at is None else plan.steps_in(decay_at))
