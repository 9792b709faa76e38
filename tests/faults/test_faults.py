"""The short form of suite.py: fewer repetitions of each fault. `make faults` runs them all."""

import pytest
from faults import suite


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return suite.Lab(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
def test_killed_at_any_moment_a_run_ends_with_the_same_weights(lab):
    suite.kill(lab, 1)


def test_a_flipped_bit_is_noticed_and_the_checkpoint_before_is_used(lab):
    suite.flip_bits(lab, 200)


# SIGSTOP is slow: only the other ranks' timeouts notice a stopped rank.
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * ("SIGSTOP" in row)) for row in suite.DISTURBANCES]
)
def test_a_disturbed_run_ends_with_the_same_weights(lab, row):
    suite.disturbance(lab, *row)
