"""The short form of suite.py: every fault a few times. `make faults` does it in earnest."""
import collections
import json
import os

import pytest

from conftest import ROOT
from faults import suite


@pytest.fixture(scope="module")
def lab(launch, tmp_path_factory):
    return suite.Lab(launch, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault, times", [(name, dict(kill=10, flip_bits=1000).get(name, 1)) for name in suite.FAULTS
                                          if name not in ("torchrun", "power_loss")])      # the latter: test_checkpoint.py, it needs no run
def test_fault(lab, fault, times):
    rows = suite.FAULTS[fault](lab, times, **(dict(worlds=(2,)) if fault == "signals" else {}))
    assert rows and all(row[1] > 0 for row in rows)


def test_the_committed_tables_are_those_of_the_record():
    with open(os.path.join(ROOT, "results", "faults", "faults.json"), encoding="utf-8") as f:
        table = suite.table(json.load(f))
    with open(os.path.join(ROOT, "results", "faults", "table.md"), encoding="utf-8") as f:
        assert f.read().endswith("\n\n" + table)
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        parts = f.read().split("<!-- faults -->\n")
    assert len(parts) == 1 or len(parts) == 3 and parts[1] == table


def test_kills_add_up_in_the_record_and_of_the_other_faults_the_newest_try_stands():
    first, second = (suite.kill_row(collections.Counter(kills=k, ends=e, **{"on 1": 2, "on 4": k})) for k, e in ((200, 40), (60, 9)))
    before = json.loads(json.dumps(dict(kill=dict(rows=[first], seconds=500.0), hang=dict(rows=[["a rank hangs", 1, 0, "old"]], seconds=9.0))))
    both = suite.merged(before, "kill", [second], 100.0)
    assert both["seconds"] == 600.0 and both["rows"][0][1] == 260 and "(4 on 1, 0 on 2, 260 on 4)" in both["rows"][0][0]
    assert both["rows"][0][3].startswith("49 runs ended in identical weights")
    assert suite.merged(before, "hang", [["a rank hangs", 1, 0, "new"]], 8.0) == dict(rows=[["a rank hangs", 1, 0, "new"]], seconds=8.0)
