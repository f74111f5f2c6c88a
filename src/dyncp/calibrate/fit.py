"""Rates of a device, fitted to timings by least squares.

`fit_seconds` solves for non-negative coefficients by relative error; `fit_rates` explains attention
kernels with it, `fit_rows` what calls take besides their kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Float64
from dyncp.blocks import Direction
from dyncp.cost import CostModel

# With fewer timings per coefficient, or columns of a larger condition number, edges and rows would
# be fitted to noise.
TIMINGS_PER_COEFFICIENT, MOST_ALIKE = 4, 30.0
MOST_FITS = 20
# With fewer whole calls, or a smaller share of their time spent on bytes, bytes cannot be told from
# launches.
LEAST_TIMINGS, LEAST_SHARE = 8, 0.01
# Least seconds between kernels in a profile: 0 would make row work free.
LEAST_LAUNCH = 1e-7


@dataclass(frozen=True, eq=False)
class Fit:
    """One coefficient per column. `errors` are fitted over measured − 1, by row."""

    coefficients: Float64
    errors: Float64

    @property
    def mean_error(self) -> float:
        return float(np.abs(self.errors).mean())

    @property
    def worst_error(self) -> float:
        return float(np.abs(self.errors).max())


def fit_seconds(columns: Float64, seconds: Float64) -> Fit:
    """Coefficients c ≥ 0 with columns @ c ≈ seconds, where 10 % too much counts the same at 20 µs
    and at 20 ms.

    Rows (calls, work) of 1, 10 and 1, 30 with 7 and 17 seconds give 2 seconds a call and 0.5 per
    unit of work."""
    needed = int(columns.any(axis=0).sum())  # a column of zeros has coefficient 0
    if len(columns) < needed:
        raise ValueError(
            f"{len(columns)} measurements cannot determine {needed} coefficients; measure more "
            "sizes"
        )
    if not (seconds > 0).all():
        raise ValueError("measured seconds must be positive")
    relative = columns / seconds[:, None]
    size = np.abs(relative).max(axis=0)  # work in FLOPs and calls differ by many powers of ten
    scaled = relative / np.where(size > 0, size, 1.0)
    free, found = size > 0, np.zeros(columns.shape[1])
    while free.any():
        solved = np.linalg.lstsq(scaled[:, free], np.ones(len(seconds)), rcond=None)[0]
        if (solved >= 0).all():
            found[free] = solved
            break
        free[np.flatnonzero(free)[solved.argmin()]] = False  # negative: noise around 0
    coefficients = found / np.where(size > 0, size, 1.0)
    errors: Float64 = relative @ coefficients - 1
    return Fit(coefficients, errors)


@dataclass(frozen=True, slots=True)
class CallSample:
    """Kernel calls of one division in one direction: their work in the cost model's terms (see
    `CallWork`; summed over several calls), and what was measured."""

    mask: str
    tokens: int
    direction: str
    area: float
    edge: float
    rows: float
    longest: float
    pairs: int
    calls: int
    seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """What a profile says about kernels: FLOP/s on full kernel tiles, the factor of partial ones,
    the keys that a row of kernel tiles costs on top, rows that run at a time, and seconds per call
    (both directions fitted together, and each on its own); relative errors of the fit, and the
    host's seconds per attention call."""

    forward: float
    backward: float
    edge_forward: float
    edge_backward: float
    row_forward: float
    row_backward: float
    lanes: int
    call_seconds: float
    forward_call_seconds: float
    backward_call_seconds: float
    mean_error: float
    worst_error: float
    host_seconds: float


def fit_rates(samples: Sequence[CallSample], cost: CostModel, lanes: int) -> AttentionRates:
    """Rates that bring the cost model's seconds near the measured ones: one overhead per call for
    both directions, everything else per direction. Rows and lanes, and then edges, are left out
    where the timings cannot tell them from full tiles."""
    for terms in (3, 2, 1):
        model = KernelModel(samples, terms, lanes if terms == 3 else 0, cost.profile.kernel_tile)
        if terms > 1 and not model.tells_apart():
            continue
        fit = model.fit(np.ones(len(samples), np.bool_))
        work = np.zeros((2, 3))
        work[:, :terms] = fit.coefficients[:-1].reshape(2, terms)
        if work[:, 0].all():
            return _rates(work, fit, model, cost)
    raise ValueError(
        "the attention kernel's time does not grow with its work: too short or too noisy; "
        "measure larger sizes or more repeats"
    )


class KernelModel:
    """The cost model's seconds as a linear function: `terms` coefficients per direction (of pairs,
    pairs of edges, pairs of rows) and one per call. `lanes` rows of `side` tokens run at a time."""

    def __init__(self, samples: Sequence[CallSample], terms: int, lanes: int, side: int) -> None:
        self.lanes = lanes
        self.seconds = np.asarray([s.seconds for s in samples])
        self.host_seconds = float(np.median([s.host_seconds for s in samples]))
        self.backward = np.asarray(
            [s.direction == Direction.BACKWARD.name.lower() for s in samples]
        )
        fields = ("area", "edge", "rows", "longest", "calls")
        area, edge, rows, longest, calls = (
            np.asarray([getattr(s, field) for s in samples], np.float64) for field in fields
        )
        idle = 1 + lanes * calls / (2 * np.maximum(rows, calls))
        spread = idle * np.stack([area, edge, side * rows])
        row = lanes * side * np.stack([longest, np.zeros(len(samples)), calls])
        # Columns where calls are as long as all of their work, and as their longest row.
        self.spread, self.row = (self._columns(work[:terms].T, calls) for work in (spread, row))

    def _columns(self, work: Float64, calls: Float64) -> Float64:
        """Work of each direction in columns of its own, then calls: float64[samples, 2 × terms +
        1]."""
        forward, back = (work * own[:, None] for own in (~self.backward, self.backward))
        return np.column_stack([forward, back, calls])

    def tells_apart(self) -> bool:
        """Whether there are enough timings, of work that differs enough."""
        if len(self.spread) < TIMINGS_PER_COEFFICIENT * self.spread.shape[1]:
            return False
        relative = self.spread / self.seconds[:, None]
        size = np.linalg.norm(relative, axis=0)
        return bool(size.all() and np.linalg.cond(relative / size) < MOST_ALIKE)

    def fit(self, chosen: Bool) -> Fit:
        """Fits the samples chosen. Whether a call is as long as its longest row depends on the
        result, so this repeats until that no longer changes (`MOST_FITS` times at most)."""
        seconds, spread, row = (x[chosen] for x in (self.seconds, self.spread, self.row))
        alone: Bool = np.zeros(len(seconds), np.bool_)
        for _ in range(MOST_FITS):
            fit = fit_seconds(np.where(alone[:, None], row, spread), seconds)
            longer = row @ fit.coefficients > spread @ fit.coefficients
            if (alone == longer).all():
                break
            alone = longer
        fitted = np.maximum(spread @ fit.coefficients, row @ fit.coefficients)
        return Fit(fit.coefficients, fitted / seconds - 1)


def _rates(work: Float64, fit: Fit, model: KernelModel, cost: CostModel) -> AttentionRates:
    (forward, edge_forward, row_forward), (backward, edge_backward, row_backward) = work.tolist()
    flops = [float(cost.flops(np.ones(1), 1, direction)[0]) for direction in Direction]
    apart = [model.fit(own).coefficients[-1] for own in (~model.backward, model.backward)]
    return AttentionRates(
        forward=flops[0] / forward,
        backward=flops[1] / backward,
        edge_forward=1 + edge_forward / forward,
        edge_backward=1 + edge_backward / backward,
        row_forward=row_forward / forward,
        row_backward=row_backward / backward,
        lanes=model.lanes,
        call_seconds=float(fit.coefficients[-1]),
        forward_call_seconds=float(apart[0]),
        backward_call_seconds=float(apart[1]),
        mean_error=fit.mean_error,
        worst_error=fit.worst_error,
        host_seconds=model.host_seconds,
    )


@dataclass(frozen=True, slots=True)
class WholeCall:
    """One rank's attention call: bytes that its row work reads and writes, launches of row work and
    kernels, instructions (start and end included); seconds of the whole call, of its attention
    kernels, and of the host."""

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
    """Bytes copied per second, seconds between kernels, the host's seconds per instruction, and
    relative errors of the time besides kernels."""

    copy: float
    launch_seconds: float
    host_seconds: float
    mean_error: float
    worst_error: float


def fit_rows(calls: Sequence[WholeCall]) -> RowRates | None:
    """Explains the time besides kernels by bytes and launches; None where there are too few calls,
    or their times do not depend on bytes."""
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
