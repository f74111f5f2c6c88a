"""Rates and overhead of the attention kernel, fitted to all its timings together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Float64
from dyncp.blocks import Direction
from dyncp.cost import CostModel
from dyncp.measure.call_samples import CallSample
from dyncp.measure.fit import Fit, fit_seconds

# Below, edges and rows would be fitted to noise: timings for each coefficient, and the condition
# number of their columns.
TIMINGS_PER_COEFFICIENT, MOST_ALIKE = 4, 30.0
MOST_FITS = 20


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """What a profile says of kernels: FLOP/s on full kernel tiles, the factor of those that are not
    full, keys that a row of kernel tiles costs on top, how many rows run at a time, seconds per
    call (both directions fitted together, and each alone); relative errors of the fit, and the
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


@dataclass(frozen=True, slots=True)
class Model:
    """The cost model's seconds as sums of `terms` coefficients per direction (a pair, an edge's
    pair, a row's pair) and one per call."""

    terms: int
    lanes: int
    side: int

    def fit(self, parts: list[list[CallSample]]) -> Fit:
        """Samples of each direction. Whether a call is as long as its longest row depends on the
        result, so it is fitted until that no longer changes, or for the last time."""
        seconds = np.asarray([s.seconds for part in parts for s in part])
        alone: Bool = np.zeros(len(seconds), np.bool_)
        for _ in range(MOST_FITS):
            fit = fit_seconds(self.columns(parts, alone), seconds)
            spread, row = (
                self.columns(parts, np.full(len(seconds), chosen)) @ fit.coefficients
                for chosen in (False, True)
            )
            if (alone == (row > spread)).all():
                break
            alone = row > spread
        errors = np.maximum(spread, row) / seconds - 1
        return Fit(fit.coefficients, errors)

    def columns(self, parts: list[list[CallSample]], alone: Bool) -> Float64:
        """Work of each direction in columns of its own, then calls: float64[samples, directions ×
        terms + 1]; `alone` says which samples are as long as their longest rows."""
        columns = np.zeros((sum(map(len, parts)), len(parts) * self.terms + 1))
        row = 0
        for index, part in enumerate(parts):
            own = slice(index * self.terms, (index + 1) * self.terms)
            for sample in part:
                columns[row, own] = self._work(sample, alone=bool(alone[row]))[: self.terms]
                columns[row, -1] = sample.calls
                row += 1
        return columns

    def _work(self, sample: CallSample, *, alone: bool) -> tuple[float, float, float]:
        if alone:
            lanes = self.lanes * self.side
            return lanes * sample.longest, 0.0, lanes * sample.calls
        idle = 1 + self.lanes * sample.calls / (2 * max(sample.rows, sample.calls))
        return idle * sample.area, idle * sample.edge, idle * self.side * sample.rows


def fit_rates(samples: Sequence[CallSample], cost: CostModel, lanes: int) -> AttentionRates:
    """Rates with which the cost model's seconds come near to the measured ones: one overhead per
    call for both directions, and the rest for each. Rows and lanes, and then edges, are left out
    where the timings cannot tell them from plain work."""
    both = [[s for s in samples if s.direction == d.name.lower()] for d in Direction]
    for terms in (3, 2, 1):
        model = Model(terms, lanes if terms == 3 else 0, cost.profile.kernel_tile)
        if terms > 1 and not _tells_apart(both, model):
            continue
        fit = model.fit(both)
        work = np.zeros((2, 3))
        work[:, :terms] = fit.coefficients[:-1].reshape(2, terms)
        if work[:, 0].all():
            return _rates(work, fit, both, model, cost)
    raise ValueError(
        "the attention kernel's time does not grow with its work: too short or too noisy; "
        "measure larger sizes or more repeats"
    )


def _tells_apart(both: list[list[CallSample]], model: Model) -> bool:
    """Whether there are enough timings, of works that differ enough."""
    seconds = np.asarray([s.seconds for part in both for s in part])
    columns = model.columns(both, np.zeros(len(seconds), np.bool_))
    if len(columns) < TIMINGS_PER_COEFFICIENT * columns.shape[1]:
        return False
    relative = columns / seconds[:, None]
    size = np.linalg.norm(relative, axis=0)
    return bool(size.all() and np.linalg.cond(relative / size) < MOST_ALIKE)


def _rates(
    work: Float64, fit: Fit, both: list[list[CallSample]], model: Model, cost: CostModel
) -> AttentionRates:
    (forward, edge_forward, row_forward), (backward, edge_backward, row_backward) = work.tolist()
    flops = [float(cost.flops(np.ones(1), 1, direction)[0]) for direction in Direction]
    apart = [float(model.fit([part]).coefficients[-1]) for part in both]
    return AttentionRates(
        forward=flops[0] / forward,
        backward=flops[1] / backward,
        edge_forward=1 + edge_forward / forward,
        edge_backward=1 + edge_backward / backward,
        row_forward=row_forward / forward,
        row_backward=row_backward / backward,
        lanes=model.lanes,
        call_seconds=float(fit.coefficients[-1]),
        forward_call_seconds=apart[0],
        backward_call_seconds=apart[1],
        mean_error=fit.mean_error,
        worst_error=fit.worst_error,
        host_seconds=float(np.median([s.host_seconds for part in both for s in part])),
    )
