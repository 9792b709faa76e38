"""The short form of suite.py: every fault a few times. `make faults` does it in earnest."""
import collections
import json
import os

import pytest
import torch
import torch._inductor.config

from conftest import ROOT
from faults import launch as launcher
from faults import suite


@pytest.fixture(scope="module")
def lab(launch, tmp_path_factory):
    return suite.Lab(launch, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("cuda, passes", [(None, 1), ("13.0", 0)])
def test_who_forks_the_ranks_has_run_no_backward_pass_in_a_build_for_cuda(monkeypatch, cuda, passes):
    """
    Where it finds a GPU, autograd refuses every backward pass of a child then: "Unable to handle autograd's threading
    in combination with fork-based multiprocessing". A build for CPUs does not, and compiles gradients for all ranks.
    """
    done = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda y: done.append(y) or backward(y))
    monkeypatch.setattr(torch, "compile", lambda f: f)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with torch._inductor.config.patch(compile_threads=1):
        launcher.compile_once()
    assert len(done) == passes


# A power cut needs no run, so test_checkpoint.py does it. torchrun is too slow for a suite that runs often.
SHORT = [name for name in suite.FAULTS if name not in ("torchrun", "power_loss")]
TIMES = dict(kill=5, flip_bits=1000)
FEWER = dict(signals=dict(worlds=(2,)), cooldown=dict(worlds=(2,)))


@pytest.mark.parametrize("fault, times", [(name, TIMES.get(name, 1)) for name in SHORT])
def test_fault(lab, fault, times):
    """Held by the run that nothing happens to: the fault's own assertions compare with its weights and losses."""
    how = FEWER.get(fault, {})
    rows = suite.FAULTS[fault](lab, times, **how)
    assert rows and all(row[1] > 0 for row in rows)


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as f:
        return f.read()


def test_the_committed_tables_are_those_of_the_record():
    record = json.loads(read("results", "faults", "faults.json"))
    table = suite.table(record)
    assert read("results", "faults", "table.md").endswith("\n\n" + table)
    parts = read("README.md").split("<!-- faults -->\n")
    assert len(parts) == 1 or len(parts) == 3 and parts[1] == table


def row_of_kills(kills, ends):
    counts = {"kills": kills, "ends": ends, "on 1": 2, "on 4": kills}
    return suite.kill_row(collections.Counter(counts))


def test_kills_add_up_in_the_record_and_of_the_other_faults_the_newest_try_stands():
    old_hang = ["a rank hangs", 1, 0, "old"]
    new_hang = ["a rank hangs", 1, 0, "new"]
    before = dict(
        kill=dict(rows=[row_of_kills(200, ends=40)], seconds=500.0),
        hang=dict(rows=[old_hang], seconds=9.0),
    )
    before = json.loads(json.dumps(before))
    both = suite.merged(before, "kill", [row_of_kills(60, ends=9)], 100.0)
    fault, times, _, outcome, *_ = both["rows"][0]
    assert both["seconds"] == 600.0 and times == 260
    assert "(4 on 1, 0 on 2, 260 on 4)" in fault
    assert outcome.startswith("49 runs ended in identical weights")
    assert suite.merged(before, "hang", [new_hang], 8.0) == dict(rows=[new_hang], seconds=8.0)
