"""Orders every rank's launches, waits and computations."""

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.compiled import compiled, inner
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
    steps, first = np.empty((total, 2), np.int64), np.zeros(len(receives) + 1, np.int64)
    by_feeds = np.argsort(feeds, kind="stable")
    _order(
        steps,
        first,
        takes_part,
        receives.copy(),
        computes,
        after_division,
        after_phase.astype(np.int64),
        feeds,
        by_feeds,
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


@compiled
def _order(
    steps: Int64,
    first: Int64,
    takes_part: Bool,
    waiting: Bool,
    computes: Bool,
    after_division: Int32,
    after_phase: Int64,
    feeds: Int32,
    by_feeds: Int64,
) -> None:
    """Fills `steps` and `first`; `waiting` has what a rank receives and did not wait for yet."""
    num_ranks, num_phases = takes_part.shape
    num_divisions = computes.shape[1]
    count = first[0]
    for rank in range(num_ranks):
        done = fed = 0  # divisions, and phases in the order of what they feed
        for phase in range(num_phases + 1):  # the one behind the last stands for the end
            at_end = phase == num_phases
            if not at_end and not takes_part[rank, phase]:
                continue
            until = num_divisions if at_end else min(after_division[phase], num_divisions - 1)
            while done <= until:
                # Also without tiles: blocks that are only passed on must be there for what follows.
                while fed < num_phases and feeds[by_feeds[fed]] <= done:
                    count = _wait(steps, count, waiting, rank, by_feeds[fed])
                    fed += 1
                if done < num_divisions and computes[rank, done]:
                    steps[count, 0], steps[count, 1] = COMPUTE, done
                    count += 1
                done += 1
            if not at_end:
                count = _wait(steps, count, waiting, rank, after_phase[phase])
                steps[count, 0], steps[count, 1] = LAUNCH, phase
                count += 1
        first[rank + 1] = count


@inner
def _wait(steps: Int64, count: int, waiting: Bool, rank: int, phase: int) -> int:
    if phase >= 0 and waiting[rank, phase]:
        steps[count, 0], steps[count, 1] = WAIT, phase
        waiting[rank, phase] = False
        count += 1
    return count
