"""tools/first_gpu.sh at tiny size on a CPU: a line for each part, whatever becomes of the others."""

import json
import os
import signal

import pytest
from conftest import script
from shell import run_shell

# Runs the rank in this process too, which then gets the signal.
TORCHRUN = f"""#!/bin/sh
trap 'kill -TERM {os.getpid()}' TERM
while [ "$1" != train.py ]; do shift; done
python "$@" &
wait $!
wait $!
"""


@pytest.mark.slow
def test_each_part_leaves_its_line_and_its_numbers(tmp_path, monkeypatch):
    """The tests fail here with code 3, which stops no other part."""
    (tmp_path / "torchrun").write_text(TORCHRUN)
    (tmp_path / "torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    folders = dict(OUT=str(tmp_path / "out"), DATA=str(tmp_path / "data"))

    def call(name, *args):
        if name == "pytest":
            return 3
        done = script(name, *args)
        with open(args[-1 - ("--resume" in args)].removeprefix("--out=") + ".log", "a") as log:
            log.write(done.stdout)
        return done.returncode

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # should the run have ended when the signal comes
    assert run_shell("tools/first_gpu.sh", "tiny", call=call, **folders) == 0
    signal.signal(signal.SIGTERM, before)
    lines = [json.loads(line) for line in (tmp_path / "out/record.jsonl").read_text().splitlines()]
    codes = dict.fromkeys(("machine", "data", "tests", "layers", "stop", "train", "fp8", "adapters"), 0) | dict(tests=3)
    assert {line["part"]: line["code"] for line in lines} == codes, lines
    results = {line["part"]: line["result"] for line in lines}
    assert results["machine"]["product_tflops"] > 0 and results["machine"]["copy_gbs"] > 0
    assert all(results[part]["tok_s"] > 0 for part in ("layers", "stop", "train", "fp8", "adapters"))
    assert all(results[part]["formula_gib"] > 0 for part in ("layers", "fp8"))
    assert results["stop"]["step"] == 49 and "stopped as asked" in (tmp_path / "out/stop.log").read_text()
    assert (tmp_path / "out/layers/trace.json").stat().st_size > 10_000 and not (tmp_path / "out/random").exists()
    assert run_shell("tools/first_gpu.sh", "tiny", call=call, **folders) == 2
