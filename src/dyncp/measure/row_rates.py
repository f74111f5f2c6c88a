"""What calls take besides their attention kernels, fitted to timings of whole calls."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dyncp.blocks import DEFAULT_MASK, Direction
from dyncp.cost import CostModel
from dyncp.measure.fit import fit_seconds
from dyncp.measure.rank_times import CallTimes
from dyncp.plan import Op, Plan
from dyncp.simulate.flow import row_bytes_of_plan

# Below, bytes are not told from launches: timings, and the share of the seconds that are bytes.
LEAST_TIMINGS, LEAST_SHARE = 8, 0.01
# Seconds between kernels that a profile gets at least: 0 would leave row work out.
LEAST_LAUNCH = 1e-7


@dataclass(frozen=True, slots=True)
class WholeCall:
    """One rank's attention call: bytes that its row work reads and writes, launches of row work and
    of kernels, instructions with start and end; what was measured of the whole call and of its
    attention kernels, and the host's seconds."""

    mask: str
    tokens: int
    direction: str
    moved_bytes: float
    launches: int
    instructions: int
    seconds: float
    kernel_seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class RowRates:
    """Bytes copied per second, the gap between kernels, the host's seconds per instruction, and
    relative errors of all that is not kernels."""

    copy: float
    launch_seconds: float
    host_seconds: float
    mean_error: float
    worst_error: float


def whole_calls(
    plan: Plan,
    times: dict[int, dict[Direction, CallTimes]],
    direction: Direction,
    cost: CostModel,
    mask: str,
) -> list[WholeCall]:
    """Of the ranks that were timed."""
    moved = row_bytes_of_plan(plan, DEFAULT_MASK, direction, cost)
    found = []
    for rank, measured in times.items():
        program = plan.parts[rank].mask_plan(DEFAULT_MASK).program(direction)
        groups = len(plan.parts[rank].groups_for(cost.shape))
        kernels = groups * int((program.instructions[:, 0] == Op.COMPUTE).sum())
        own = measured[direction]
        found.append(
            WholeCall(
                mask=mask,
                tokens=int(plan.parts[0].tokens_per_rank.sum()),
                direction=direction.name.lower(),
                moved_bytes=float(moved.bytes_per_rank[rank]),
                launches=int(moved.launches_per_rank[rank]) + kernels,
                instructions=len(program.instructions) + 2,
                seconds=own.seconds,
                kernel_seconds=own.kernel_seconds,
                host_seconds=own.host_seconds,
            )
        )
    return found


def fit_rows(calls: Sequence[WholeCall]) -> RowRates | None:
    """Seconds besides kernels as bytes and launches; None where there is too little to fit, or the
    timings say nothing of bytes."""
    some = [c for c in calls if c.seconds > c.kernel_seconds and c.moved_bytes]
    if len(some) < LEAST_TIMINGS:
        return None
    columns = np.asarray([(c.moved_bytes / 2, c.launches) for c in some], np.float64)
    seconds = np.asarray([c.seconds - c.kernel_seconds for c in some])
    fit = fit_seconds(columns, seconds)
    per_byte, per_launch = fit.coefficients.tolist()
    if np.median(per_byte * columns[:, 0] / seconds) < LEAST_SHARE:
        return None
    host = float(np.median([c.host_seconds / c.instructions for c in calls]))
    launch = max(per_launch, LEAST_LAUNCH)
    return RowRates(1 / per_byte, launch, host, fit.mean_error, fit.worst_error)
