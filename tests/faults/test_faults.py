"""The short form of suite.py: every fault a few times. `make faults` does it in earnest."""
import signal

import pytest

from faults import suite


@pytest.fixture(scope="module")
def lab(launch, tmp_path_factory):
    return suite.Lab(launch, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault, times, how", [
    (suite.kill, 2, dict(worlds=[2])),
    (suite.flip_bits, 200, {}),
    (suite.disk_full, 1, {}),
    (suite.not_a_number, 1, dict(values=["nan"])),
    (suite.signals, 1, dict(worlds=[2], ways=[signal.SIGTERM])),
    (suite.hang, 1, {})])
def test_a_run_survives(lab, fault, times, how):
    """The fault's own assertions compare with the weights and losses of an undisturbed run."""
    assert fault(lab, times, **how)
