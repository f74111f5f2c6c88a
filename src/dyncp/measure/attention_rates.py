"""Rates and call overhead of the attention kernel: many calls, small and large, fitted together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

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
    with one overhead for both directions and the rest for each."""
    both = [[s for s in samples if s.direction == d.name.lower()] for d in Direction]
    apart = [_fit(part) for part in both]
    none = [0.0] * 3
    columns = [[*_work(s), *none, s.calls] for s in both[0]] + [
        [*none, *_work(s), s.calls] for s in both[1]
    ]
    fit = fit_seconds(np.asarray(columns), np.asarray([s.seconds for s in both[0] + both[1]]))
    *found, call = fit.coefficients.tolist()
    (forward, *more_forward), (backward, *more_backward) = found[:3], found[3:]
    if not (forward and backward):
        raise ValueError(
            "the attention kernel's time does not grow with its work: too short or too noisy; "
            "measure larger sizes or more repeats"
        )
    return AttentionRates(
        1 / forward,
        1 / backward,
        1 + more_forward[0] / forward,
        1 + more_backward[0] / backward,
        more_forward[1] / forward,
        more_backward[1] / backward,
        call,
        float(apart[0].coefficients[-1]),
        float(apart[1].coefficients[-1]),
        fit.mean_error,
        fit.worst_error,
        float(np.median([s.host_seconds for s in samples])),
    )


def _work(sample: CallSample) -> list[float]:
    return [sample.flops, sample.edge_flops, sample.row_flops]


def _fit(samples: Sequence[CallSample]) -> Fit:
    columns = np.asarray([[*_work(s), s.calls] for s in samples], np.float64)
    return fit_seconds(columns, np.asarray([s.seconds for s in samples]))
