"""Rates and call overhead of the attention kernel: many calls, small and large, fitted together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dyncp.arrays import Float64
from dyncp.blocks import Direction
from dyncp.cost import CostModel
from dyncp.measure.fit import Fit, fit_seconds
from dyncp.measure.loads import Load, plan_loads
from dyncp.measure.mask_cases import MaskCase, mask_case
from dyncp.measure.ours import KernelChoice
from dyncp.measure.rank_times import CallTimes, time_part
from dyncp.measure.timing import Repeats
from dyncp.planner import plan_batch
from dyncp.topology import Topology

# From so many tokens on, plans for so many ranks: kernels have faster paths for whole sequences,
# which cut ones seldom take. Shorter ones are mostly overhead.
CUT_TOKENS, CUT_RANKS = 1024, 4
# Below, edges and tails would be fitted to noise: timings for each coefficient, and the condition
# number of their columns (2 to 5 with the default masks, 128 to 16,384 tokens).
TIMINGS_PER_COEFFICIENT, MOST_ALIKE = 4, 30.0


@dataclass(frozen=True, slots=True)
class CallSample:
    """Kernel calls of one division in one direction, and what they took: FLOPs of the cost model's
    area, of its part that is not full, and of the longest rows of kernel tiles, one head."""

    mask: str
    tokens: int
    direction: str
    flops: float
    edge_flops: float
    row_flops: float
    pairs: int
    calls: int
    seconds: float
    host_seconds: float

    @property
    def work(self) -> tuple[float, float, float]:
        return self.flops, self.edge_flops, self.row_flops


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """FLOP/s on full kernel tiles, factors of those that are not full and of the longest rows (see
    Profile), seconds per call (both directions fitted together, and each alone), relative errors
    of the fit, and the host's seconds per attention call."""

    forward: float
    backward: float
    edge_forward: float
    edge_backward: float
    tail_forward: float
    tail_backward: float
    call_seconds: float
    forward_call_seconds: float
    backward_call_seconds: float
    mean_error: float
    worst_error: float
    host_seconds: float


def sample_attention(
    masks: Sequence[str],
    sizes: Sequence[int],
    cost: CostModel,
    choice: KernelChoice,
    device: torch.device,
    repeats: Repeats,
    tell: Callable[[str], None] = lambda _: None,
) -> list[CallSample]:
    """Times plans of all masks and sizes, forward and backward, division by division. From
    `CUT_TOKENS` on they are cut for `CUT_RANKS` ranks."""
    samples = []
    for mask in masks:
        for tokens in sizes:
            tell(f"attention kernel: {mask}, {tokens:,} tokens ...")
            case = mask_case(mask, tokens)
            topology = Topology(1, CUT_RANKS if tokens >= CUT_TOKENS else 1)
            plan = plan_batch(case.batch, topology, cost.shape, cost=cost)
            times = [time_part(part, cost.shape, choice, device, repeats) for part in plan.parts]
            for direction in times[0]:
                for load in plan_loads(plan, case.batch, direction, cost):
                    measured = times[load.rank][direction]
                    samples.append(_sample(load, measured, case, direction, cost))
    return samples


def _sample(
    load: Load, measured: CallTimes, case: MaskCase, direction: Direction, cost: CostModel
) -> CallSample:
    work = np.asarray([load.area, load.edge, cost.profile.kernel_tile * load.longest])
    flops, edge_flops, row_flops = cost.flops(work, 1, direction).tolist()
    return CallSample(
        mask=case.name,
        tokens=case.tokens,
        direction=direction.name.lower(),
        flops=flops,
        edge_flops=edge_flops,
        row_flops=row_flops,
        pairs=load.pairs,
        calls=load.calls,
        seconds=float(measured.division_seconds[load.division]),
        host_seconds=measured.host_seconds,
    )


def fit_rates(samples: Sequence[CallSample]) -> AttentionRates:
    """seconds = calls × overhead + (FLOPs + (edge − 1) × edge FLOPs + tail × row FLOPs) / rate,
    with one overhead for both directions and the rest for each. Tails, and then edges, are left
    out where the timings cannot tell them from plain work."""
    both = [[s for s in samples if s.direction == d.name.lower()] for d in Direction]
    seconds = np.asarray([s.seconds for s in both[0] + both[1]])
    for terms in (3, 2, 1):
        columns = _columns(both, terms)
        if terms > 1 and not _tells_apart(columns, seconds):
            continue
        fit = fit_seconds(columns, seconds)
        work = np.zeros((2, 3))
        work[:, :terms] = fit.coefficients[:-1].reshape(2, terms)
        if work[:, 0].all():
            return _rates(work, fit, both, terms)
    raise ValueError(
        "the attention kernel's time does not grow with its work: too short or too noisy; "
        "measure larger sizes or more repeats"
    )


def _columns(both: list[list[CallSample]], terms: int) -> Float64:
    """Work of each direction in columns of its own, then calls: float64[samples, 2 × terms + 1]."""
    columns = np.zeros((sum(map(len, both)), 2 * terms + 1))
    row = 0
    for index, part in enumerate(both):
        for sample in part:
            columns[row, index * terms : (index + 1) * terms] = sample.work[:terms]
            columns[row, -1] = sample.calls
            row += 1
    return columns


def _tells_apart(columns: Float64, seconds: Float64) -> bool:
    """Whether there are enough timings, of works that differ enough."""
    if len(columns) < TIMINGS_PER_COEFFICIENT * columns.shape[1]:
        return False
    relative = columns / seconds[:, None]
    size = np.linalg.norm(relative, axis=0)
    return bool(size.all() and np.linalg.cond(relative / size) < MOST_ALIKE)


def _rates(work: Float64, fit: Fit, both: list[list[CallSample]], terms: int) -> AttentionRates:
    (forward, edge_forward, tail_forward), (backward, edge_backward, tail_backward) = work.tolist()
    apart = [_call_seconds(part, terms) for part in both]
    return AttentionRates(
        forward=1 / forward,
        backward=1 / backward,
        edge_forward=1 + edge_forward / forward,
        edge_backward=1 + edge_backward / backward,
        tail_forward=tail_forward / forward,
        tail_backward=tail_backward / backward,
        call_seconds=float(fit.coefficients[-1]),
        forward_call_seconds=apart[0],
        backward_call_seconds=apart[1],
        mean_error=fit.mean_error,
        worst_error=fit.worst_error,
        host_seconds=float(np.median([s.host_seconds for part in both for s in part])),
    )


def _call_seconds(samples: Sequence[CallSample], terms: int) -> float:
    """Of one direction alone."""
    columns = np.asarray([[*s.work[:terms], s.calls] for s in samples], np.float64)
    return float(fit_seconds(columns, np.asarray([s.seconds for s in samples])).coefficients[-1])
