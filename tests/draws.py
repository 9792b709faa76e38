"""Random settings, the same in every run: `hypothesis` without a seed of its own, a clock or a database."""

from hypothesis import HealthCheck, Phase, given, settings


def drawn(examples, **strategies):
    """Run a test with random settings, and print those that fail. Fewer than ten, of whole runs, do not shrink."""
    how = dict(max_examples=examples, derandomize=True, deadline=None, database=None)
    how["phases"] = [Phase.generate] + [Phase.shrink] * (examples >= 10)
    return lambda test: settings(suppress_health_check=list(HealthCheck), **how)(given(**strategies)(test))
