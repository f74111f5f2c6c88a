"""The short versions of benchmarks/soak.py and soak_resume.py: training while things go wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = ("--ranks", "2", "--batches", "20", "--samples", "120", "--every", "10", "--json")

# A rank of 4 reads other tokens; then one of 2 is killed; planners are killed and stopped.
RESUMES = ("--batches", "16", "--samples", "60", "--seed", "245", "--only", "stream")


def run_module(*words):
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_kills_slow_plans_and_planner_errors_change_no_loss_and_leave_nothing_behind():
    soak = run_module("benchmarks.soak", *WORDS)
    assert soak.stdout, soak.stderr
    summary = json.loads(soak.stdout)
    assert summary["wrong"] == []
    plain, killed, failed = summary["runs"].values()
    assert plain["batches"] == killed["batches"] == failed["batches"] >= 20
    assert killed["batches_of_equal_bits"] == plain["batches"]
    # One that is killed when all batches are planned is not replaced.
    assert all(1 <= run["processes_replaced"] <= 2 for run in (killed, failed))
    assert failed["static_plans"] > 0
    assert (
        soak.stderr.count("gets a static plan: the planner raised RuntimeError: inj")
        == (failed["static_plans"])
    )
    for table in (killed["table"], failed["table"]):
        keys = [keys for _, _, keys in table]
        assert max(keys) < 40


def test_runs_that_resume_on_other_ranks_after_faults_lose_nothing_and_leave_nothing_behind():
    run = run_module("benchmarks.soak_resume", *RESUMES)
    assert "All is well." in run.stdout, run.stdout + run.stderr
    assert run.returncode == 0
    counts = dict(re.findall(r"^  (\S.*?) +(\d+)$", run.stdout, re.MULTILINE))
    for fault in ("other tokens", "killed", "kill planner", "stop planner"):
        assert int(counts[fault]) >= 1
    assert int(counts["losses"]) >= 15
