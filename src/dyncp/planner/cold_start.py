"""A cold start: helper processes compile parts of the planner in parallel with the first plan.

The first plan in a new install mostly waits for compilation, and one process compiles one function
at a time. Compiled code is cached on disk, and a function is compiled by one process only
(`dyncp.compiled`): while this process places blocks, others compile what it needs next.
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

# What the search needs last, in reverse order: it places blocks in the meantime.
PARTS = ("moves", "plan")
# Compiles the given parts. Exits with this process, which closes the pipe to its stdin.
CODE = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
sys.path[:] = sys.argv[2:]
from dyncp import Batch, PlannerConfig, Topology, masks, plan_batch
from dyncp.placement import find_solver
from dyncp.planner import Task
batch = Batch.of([masks.causal(900), masks.lambda_shaped(500), masks.causal(60)])
if "plan" in sys.argv[1]:
    plan_batch(batch, Topology(2, 2), planner=PlannerConfig("zigzag"))
if "moves" in sys.argv[1]:
    task = Task.of(batch, Topology(2, 2))
    task.improve(task.place(find_solver("zigzag")))
os._exit(0)
"""

_planned: list[bool] = []  # not empty after the first plan of this process


def is_cold() -> bool:
    """Whether the planner was never compiled in this installation."""
    return not is_compiled(split_tree)


@contextmanager
def compile_in_parallel() -> Iterator[None]:
    """If the planner was never compiled, helper processes compile it while the block runs."""
    task = None
    if not _planned and is_cold():
        task = take_task(split_tree, "compile_in_parallel")
    _planned.append(True)
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
    cores, nowhere, started = usable_cores(), subprocess.DEVNULL, list[Any]()
    if not sys.executable or getattr(sys, "frozen", False):  # no interpreter to start
        return started
    for parts in PARTS if cores > len(PARTS) else [" ".join(PARTS)][: cores - 1]:
        words = [sys.executable, "-c", CODE, parts, *sys.path]
        try:
            started.append(
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)
            )
        except OSError as error:  # this process compiles alone
            logger.debug("could not start a process to compile in parallel: %s", error)
    return started
