"""The first plan of a new install has help with compiling, which ends with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists() or len(os.sched_getaffinity(0)) < 2,
    reason="needs /proc and two cores",
)

FIRST_PLAN = """
import sys, time
from pathlib import Path
from dyncp.planner.cold_start import compile_in_parallel

def children():
    return [pid for task in Path("/proc/self/task").iterdir()
            for pid in (task / "children").read_text().split()]

for _ in range(2):
    with compile_in_parallel():
        print(*children(), flush=True)
        sys.stdin.readline()
    print(*children(), flush=True)
"""


class FirstPlan:
    """A process that stops inside its first plan, then inside its second one."""

    def __init__(self, cache: Path) -> None:
        env = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", FIRST_PLAN], env=env, **pipes)

    def helpers(self) -> list[int]:
        return [int(pid) for pid in self.process.stdout.readline().split()]

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self) -> "FirstPlan":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_first_plan_has_help_while_it_lasts_and_later_ones_have_none(tmp_path):
    with FirstPlan(tmp_path) as plan, FirstPlan(tmp_path / "other") as elsewhere:
        found = plan.helpers()
        assert found
        assert elsewhere.helpers()
        with FirstPlan(tmp_path) as other:  # shares the cache
            assert not other.helpers()
        plan.go_on()
        assert not plan.helpers()
        assert not any(Path(f"/proc/{pid}").exists() for pid in found)
        assert not plan.helpers()  # in the second plan


def test_help_ends_with_a_process_that_is_killed(tmp_path):
    with FirstPlan(tmp_path) as plan:
        found = plan.helpers()
        assert found
        plan.process.send_signal(signal.SIGKILL)
        end = time.monotonic() + 60
        while any(_runs(pid) for pid in found) and time.monotonic() < end:
            time.sleep(0.1)
        assert not any(_runs(pid) for pid in found)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
