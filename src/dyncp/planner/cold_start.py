"""A cold start: helper processes compile parts of the planner in parallel with the first plan.

Most of the first plan in a new install is compiling, which one process can only do one function
after the other. Compiled code is kept on disk, and processes that want the same function take turns
(`dyncp.compiled`): while this process places blocks, others compile what it will need next.
"""

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dyncp.checks import usable_cores
from dyncp.compiled import is_compiled, take_task
from dyncp.placement.split import split_tree

logger = logging.getLogger(__name__)

# What the search needs last, from the end on; it places blocks meanwhile.
PARTS = ("moves", "plan")
# Compiles some parts, and ends if this process does: its end of the pipe closes then.
CODE = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
sys.path[:] = sys.argv[2:]
from dyncp import Batch, PlannerConfig, Topology, masks, plan_batch
from dyncp.placement import find_solver
from dyncp.planner import Task
batch = Batch.of([masks.causal(900), masks.lambda_shaped(500), masks.causal(60)])
if "plan" in sys.argv[1]:
    plan_batch(batch, Topology(2, 2), config=PlannerConfig("zigzag"))
if "moves" in sys.argv[1]:
    task = Task.of(batch, Topology(2, 2))
    task.improve(task.place(find_solver("zigzag")))
os._exit(0)
"""


_asked: list[bool] = []  # by the first plan of this process


@contextmanager
def compiling_beside() -> Iterator[None]:
    """If the planner was never compiled, helper processes compile while the block runs."""
    task = None
    if not _asked and not is_compiled(split_tree):
        task = take_task(split_tree, "compiling_beside")
    _asked.append(True)
    if task is None:
        yield
        return
    with task:
        started = _start()
        try:
            yield
        finally:
            for process in started:
                process.kill()
                process.communicate()


def _start() -> list[Any]:
    cores = usable_cores()
    started: list[Any] = []
    if not sys.executable or getattr(sys, "frozen", False):  # no interpreter to start
        return started
    for parts in PARTS if cores > len(PARTS) else [" ".join(PARTS)][: cores - 1]:
        words = [sys.executable, "-c", CODE, parts, *sys.path]
        nowhere = subprocess.DEVNULL
        try:
            started.append(
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)
            )
        except OSError as error:  # then this process compiles alone
            logger.debug("could not start a process to compile in parallel: %s", error)
    return started
