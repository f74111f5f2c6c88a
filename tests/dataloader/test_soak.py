"""The short version of benchmarks/soak.py: training while planning goes wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("processes")

ROOT = Path(__file__).parents[2]
WORDS = ("--ranks", "2", "--batches", "20", "--samples", "120", "--every", "10", "--json")


def test_kills_slow_plans_and_planner_errors_change_no_loss_and_leave_nothing_behind():
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *WORDS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.stdout, run.stderr
    summary = json.loads(run.stdout)
    assert summary["wrong"] == []
    plain, killed, failed = summary["runs"].values()
    assert plain["batches"] == killed["batches"] == failed["batches"] >= 20
    assert killed["batches_of_equal_bits"] == plain["batches"]
    assert killed["processes_replaced"] == failed["processes_replaced"] == 2
    assert failed["static_plans"] > 0
    assert (
        run.stderr.count("gets a static plan: the planner raised RuntimeError: inj")
        == (failed["static_plans"])
    )
    for table in (killed["table"], failed["table"]):
        keys = [keys for _, _, keys in table]
        assert max(keys) < 40
