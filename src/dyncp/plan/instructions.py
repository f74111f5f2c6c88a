"""Orders every rank's launches, waits and computations."""

import numba
import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.plan.rank_plan import Op

LAUNCH, WAIT, COMPUTE = int(Op.LAUNCH), int(Op.WAIT), int(Op.COMPUTE)


def order_programs(
    takes_part: Bool,
    receives: Bool,
    computes: Bool,
    after_division: Int32,
    after_phase: Int32,
    feeds: Int32,
) -> tuple[Int64, Int64]:
    """Instructions (op, argument) of all ranks below each other, and where each rank's start.

    Every phase is launched as early as the schedule allows and waited for as late as it allows.
    `takes_part` and `receives` are bool[ranks, phases], `computes` is bool[ranks, divisions].
    """
    total = sum(int(np.count_nonzero(table)) for table in (takes_part, receives, computes))
    steps = np.empty((total, 2), np.int64)
    by_feeds = np.argsort(feeds, kind="stable")
    first = _order(
        steps, takes_part, receives, computes, after_division, after_phase, feeds, by_feeds
    )
    return steps, first


def index_instructions(steps: Int64, first: Int64, width: int) -> Int64:
    """Place of each instruction in its rank's program, int64[op, ranks, arguments below width]; -1
    where a rank has no such instruction."""
    counts = np.diff(first)
    rank = np.repeat(np.arange(len(counts)), counts)
    at = np.full((len(Op), len(counts), width), -1, np.int64)
    at[steps[:, 0], rank, steps[:, 1]] = np.arange(len(steps)) - first[rank]
    return at


@numba.njit(cache=True, nogil=True)
def _order(
    steps: Int64,
    takes_part: Bool,
    receives: Bool,
    computes: Bool,
    after_division: Int32,
    after_phase: Int32,
    feeds: Int32,
    by_feeds: Int64,
) -> Int64:
    num_ranks, num_phases = takes_part.shape
    num_divisions = computes.shape[1]
    first = np.zeros(num_ranks + 1, np.int64)
    count = 0
    for rank in range(num_ranks):
        waiting = receives[rank].copy()
        computed = fed = 0  # divisions, and phases in the order of what they feed, that are done
        for phase in range(num_phases):
            if not takes_part[rank, phase]:
                continue
            while computed <= min(after_division[phase], num_divisions - 1):
                count, fed = _wait(steps, count, waiting, feeds, by_feeds, fed, computed)
                count = _compute(steps, count, computes[rank], computed)
                computed += 1
            awaited = after_phase[phase]
            if awaited >= 0 and waiting[awaited]:
                steps[count, 0], steps[count, 1] = WAIT, awaited
                waiting[awaited] = False
                count += 1
            steps[count, 0], steps[count, 1] = LAUNCH, phase
            count += 1
        for division in range(computed, num_divisions):
            count, fed = _wait(steps, count, waiting, feeds, by_feeds, fed, division)
            count = _compute(steps, count, computes[rank], division)
        count, fed = _wait(steps, count, waiting, feeds, by_feeds, fed, num_divisions)
        first[rank + 1] = count
    return first


@numba.njit(cache=True, nogil=True)
def _wait(
    steps: Int64,
    count: int,
    waiting: Bool,
    feeds: Int32,
    by_feeds: Int64,
    fed: int,
    division: int,
) -> tuple[int, int]:
    """Waits for what feeds divisions up to `division`, also where a rank has no tiles in it: blocks
    that are only passed on must be there for what follows."""
    while fed < len(by_feeds) and feeds[by_feeds[fed]] <= division:
        phase = by_feeds[fed]
        if waiting[phase]:
            steps[count, 0], steps[count, 1] = WAIT, phase
            waiting[phase] = False
            count += 1
        fed += 1
    return count, fed


@numba.njit(cache=True, nogil=True)
def _compute(steps: Int64, count: int, computes: Bool, division: int) -> int:
    if computes[division]:
        steps[count, 0], steps[count, 1] = COMPUTE, division
        count += 1
    return count
