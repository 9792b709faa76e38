"""A trace of one step, for chrome://tracing or ui.perfetto.dev."""

import torch

from engine.runs import forget


class StepTrace:
    """Trace what runs in a `with` block into OUT/trace.json, and remove the file OUT/profile that has asked for it."""

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
