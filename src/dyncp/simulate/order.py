"""The instruction order of all ranks, by the rule of `dyncp.plan.instructions`."""

import numba
import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.plan import Op

LAUNCH, WAIT, COMPUTE = int(Op.LAUNCH), int(Op.WAIT), int(Op.COMPUTE)


@numba.njit(cache=True, nogil=True)
def _wait_for(
    steps: Int64, count: int, waiting: Bool, feeds: Int32, division: int, phase: int
) -> int:
    """Waits for `phase`, and for what feeds divisions up to `division`."""
    for p in range(len(waiting)):
        if waiting[p] and (p == phase or feeds[p] <= division):
            steps[count, 0], steps[count, 1] = WAIT, p
            waiting[p] = False
            count += 1
    return count


@numba.njit(cache=True, nogil=True)
def _finish(
    steps: Int64, count: int, waiting: Bool, feeds: Int32, computes: Bool, division: int
) -> int:
    """Waits for what feeds a division and computes it; without tiles only waits."""
    count = _wait_for(steps, count, waiting, feeds, division, -1)
    if computes[division]:
        steps[count, 0], steps[count, 1] = COMPUTE, division
        count += 1
    return count


@numba.njit(cache=True, nogil=True)
def order_programs(
    takes_part: Bool,
    receives: Bool,
    computes: Bool,
    after_division: Int32,
    after_phase: Int32,
    feeds: Int32,
) -> tuple[Int64, Int64]:
    """Instructions (op, argument) of all ranks below each other, and where each rank's start.

    `takes_part` and `receives` are bool[ranks, phases], `computes` is bool[ranks, divisions].
    """
    num_ranks, num_phases = takes_part.shape
    num_divisions = computes.shape[1]
    steps = np.empty((num_ranks * (2 * num_phases + num_divisions), 2), np.int64)
    first = np.zeros(num_ranks + 1, np.int64)
    count = 0
    for rank in range(num_ranks):
        waiting = receives[rank].copy()
        computed = 0
        for phase in range(num_phases):
            if not takes_part[rank, phase]:
                continue
            while computed <= min(after_division[phase], num_divisions - 1):
                count = _finish(steps, count, waiting, feeds, computes[rank], computed)
                computed += 1
            count = _wait_for(steps, count, waiting, feeds, -1, after_phase[phase])
            steps[count, 0], steps[count, 1] = LAUNCH, phase
            count += 1
        for division in range(computed, num_divisions):
            count = _finish(steps, count, waiting, feeds, computes[rank], division)
        count = _wait_for(steps, count, waiting, feeds, num_divisions, -1)
        first[rank + 1] = count
    return steps[:count].copy(), first
