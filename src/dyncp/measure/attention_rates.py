"""Rates and call overhead of the attention kernel: many calls, small and large, fitted together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dyncp.blocks import Direction
from dyncp.cost import CostModel
from dyncp.measure.fit import Fit, fit_seconds
from dyncp.measure.loads import plan_loads
from dyncp.measure.mask_cases import mask_case
from dyncp.measure.ours import KernelChoice
from dyncp.measure.rank_times import time_part
from dyncp.measure.timing import Repeats
from dyncp.planner import plan_batch
from dyncp.topology import Topology


@dataclass(frozen=True, slots=True)
class CallSample:
    """Kernel calls of one attention layer in one direction: FLOPs of the cost model's area, and
    what they took."""

    mask: str
    tokens: int
    direction: str
    flops: float
    pairs: int
    calls: int
    seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """FLOP/s on full kernel tiles, seconds per call (both directions fitted together, and each
    alone), relative errors of the fit, and the host's seconds per attention call."""

    forward: float
    backward: float
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
    """Times one-rank plans of all masks and sizes, forward and backward."""
    samples = []
    for mask in masks:
        for tokens in sizes:
            tell(f"attention kernel: {mask}, {tokens:,} tokens ...")
            case = mask_case(mask, tokens)
            plan = plan_batch(case.batch, Topology(), cost.shape, cost=cost)
            times = time_part(plan.parts[0], cost.shape, choice, device, repeats)
            for direction, measured in times.items():
                loads = plan_loads(plan, case.batch, direction, cost)
                area = np.asarray([load.area for load in loads])
                samples.append(
                    CallSample(
                        mask=mask,
                        tokens=tokens,
                        direction=direction.name.lower(),
                        flops=float(cost.flops(area, 1, direction).sum()),
                        pairs=sum(load.pairs for load in loads),
                        calls=sum(load.calls for load in loads),
                        seconds=measured.kernel_seconds,
                        host_seconds=measured.host_seconds,
                    )
                )
    return samples


def fit_rates(samples: Sequence[CallSample]) -> AttentionRates:
    """seconds = calls × overhead + FLOPs / rate, with one overhead and two rates."""
    both = [[s for s in samples if s.direction == d.name.lower()] for d in Direction]
    apart = [_fit(part) for part in both]
    columns = [[s.flops, 0.0, s.calls] for s in both[0]] + [
        [0.0, s.flops, s.calls] for s in both[1]
    ]
    fit = fit_seconds(np.asarray(columns), np.asarray([s.seconds for s in both[0] + both[1]]))
    forward, backward, call = fit.coefficients.tolist()
    if not (forward and backward):
        raise ValueError(
            "the attention kernel's time does not grow with its work: too short or too noisy; "
            "measure larger sizes or more repeats"
        )
    return AttentionRates(
        1 / forward,
        1 / backward,
        call,
        float(apart[0].coefficients[1]),
        float(apart[1].coefficients[1]),
        fit.mean_error,
        fit.worst_error,
        float(np.median([s.host_seconds for s in samples])),
    )


def _fit(samples: Sequence[CallSample]) -> Fit:
    columns = np.asarray([[s.flops, s.calls] for s in samples], np.float64)
    return fit_seconds(columns, np.asarray([s.seconds for s in samples]))
