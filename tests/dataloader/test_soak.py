"""Short versions of benchmarks/soak.py and soak_resume.py: training while things go wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from benchmarks.soak import RUNS, Options, Run, summarise, verdict

from processes import run_ranks
from sizes import pick

ROOT = Path(__file__).parents[2]
OPTIONS = Options(ranks=2, batches=20, samples=120, every=10)
WORDS = [x for name, n in OPTIONS._asdict().items() for x in (f"--{name}", str(n))]
# A rank is killed, then a planner. In a full run also a rank reads other tokens, and planners are
# stopped.
RESUMES = pick(
    ("--batches", "11", "--seed", "12468", "--hurry"), ("--batches", "16", "--seed", "245")
)
FAULTS = {"killed", "kill planner"}
MORE_FAULTS = {"other tokens", "stop planner"}


def runs_of_rank(rank):
    found = []
    for name in RUNS:
        found.append(Run(name, rank, OPTIONS).run())
        dist.barrier()
    return found


def check(summary, wrong):
    assert wrong == []
    plain, killed, failed = summary.values()
    assert plain["batches"] == killed["batches"] == failed["batches"] >= 20
    assert killed["batches_of_equal_bits"] == plain["batches"]
    # One that is killed when all batches are planned is not replaced.
    assert all(1 <= run["processes_replaced"] <= 2 for run in (killed, failed))
    assert failed["static_plans"] > 0
    for table in (killed["table"], failed["table"]):
        keys = [keys for _, _, keys in table]
        assert max(keys) < 40


def test_kills_slow_plans_and_planner_errors_change_no_loss_and_leave_nothing_behind():
    by_rank = run_ranks(runs_of_rank, OPTIONS.ranks, planners=True)
    summary = summarise(dict(zip(RUNS, zip(*by_rank, strict=True), strict=True)))
    check(summary, verdict(summary))


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


@pytest.mark.full
def test_the_command_finds_the_same_and_every_static_plan_has_a_warning():
    soak = run_module("benchmarks.soak", *WORDS, "--json")
    assert soak.stdout, soak.stderr
    found = json.loads(soak.stdout)
    check(found["runs"], found["wrong"])
    warnings = soak.stderr.count("gets a static plan: the planner raised RuntimeError: inj")
    assert warnings == found["runs"][RUNS[2]]["static_plans"]


def test_runs_that_resume_on_other_ranks_after_faults_lose_nothing_and_leave_nothing_behind():
    run = run_module("benchmarks.soak_resume", *RESUMES, "--samples", "60", "--only", "stream")
    assert "All is well." in run.stdout, run.stdout + run.stderr
    assert run.returncode == 0
    counts = dict(re.findall(r"^  (\S.*?) +(\d+)$", run.stdout, re.MULTILINE))
    for fault in pick(FAULTS, FAULTS | MORE_FAULTS):
        assert int(counts[fault]) >= 1
    assert int(counts["losses"]) >= pick(11, 15)
