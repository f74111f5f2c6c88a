"""Orders a rank's launches, waits and computations."""

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.plan.rank_plan import Messages, Op
from dyncp.schedule import Schedule


def order_instructions(
    schedule: Schedule, sends: Messages, receives: Messages, tile_division: Int32
) -> Int64:
    """Launches every phase as early as the schedule allows and waits as late as it allows."""
    program: list[tuple[int, int]] = []
    takes_part = np.union1d(sends.phase, receives.phase)
    waiting = [int(phase) for phase in np.unique(receives.phase)]
    computes = set(tile_division.tolist())

    def wait(needed: list[int]) -> None:
        program.extend((Op.WAIT, phase) for phase in needed)
        waiting[:] = [phase for phase in waiting if phase not in needed]

    def compute(division: int) -> None:
        # Also without tiles: blocks that are only passed on must be there for what follows.
        wait([phase for phase in waiting if schedule.phase_feeds[phase] <= division])
        if division in computes:
            program.append((Op.COMPUTE, division))

    computed = 0  # divisions before this one are done
    for phase in takes_part.tolist():
        while computed <= schedule.phase_after_division[phase]:
            compute(computed)
            computed += 1
        wait([p for p in waiting if p == schedule.phase_after_phase[phase]])
        program.append((Op.LAUNCH, phase))
    for division in range(computed, schedule.num_divisions):
        compute(division)
    wait(list(waiting))
    return np.asarray(program, np.int64).reshape(-1, 2)
