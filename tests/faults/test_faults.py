"""The short form of suite.py: every fault a few times. `make faults` does it in earnest."""
import pytest

from faults import suite
from faults.launch import Launcher


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with Launcher() as launch:
        yield suite.Lab(launch, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault, times", [(name, dict(kill=10, flip_bits=1000).get(name, 1)) for name in suite.FAULTS if name != "torchrun"])
def test_fault(lab, fault, times):
    rows = suite.FAULTS[fault](lab, times, **(dict(worlds=(2,)) if fault == "signals" else {}))
    assert rows and all(row[1] > 0 for row in rows)
