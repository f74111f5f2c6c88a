"""Timings of the attention kernel: many calls, small and large, division by division."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dyncp.blocks import Direction
from dyncp.cost import CostModel
from dyncp.measure.loads import Load, plan_loads
from dyncp.measure.mask_cases import MaskCase, mask_case
from dyncp.measure.ours import KernelChoice
from dyncp.measure.rank_times import CallTimes, time_part
from dyncp.measure.row_rates import WholeCall, whole_calls
from dyncp.measure.timing import Repeats
from dyncp.planner import plan_batch
from dyncp.topology import Topology

# From so many tokens on, plans for several ranks, with at most so many tokens each: kernels have
# faster paths for whole sequences, which cut ones seldom take. Some of the ranks are timed.
CUT_TOKENS, TOKENS_PER_RANK, TIMED_RANKS = 1024, 4096, 4


@dataclass(frozen=True, slots=True)
class CallSample:
    """Kernel calls of one division in one direction, what they do in the cost model's terms (see
    `CallWork`; several calls added up), and what they took."""

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


def sample_attention(
    masks: Sequence[str],
    sizes: Sequence[int],
    cost: CostModel,
    choice: KernelChoice,
    device: torch.device,
    repeats: Repeats,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[list[CallSample], list[WholeCall]]:
    """Times plans of all masks and sizes, forward and backward, division by division and as whole
    calls. From `CUT_TOKENS` on they are cut for several ranks, of which `TIMED_RANKS` are timed."""
    samples, whole = list[CallSample](), list[WholeCall]()
    for mask in masks:
        for tokens in sizes:
            tell(f"attention kernel: {mask}, {tokens:,} tokens ...")
            case = mask_case(mask, tokens)
            plan = plan_batch(case.batch, Topology(1, _num_ranks(tokens)), cost.shape, cost=cost)
            every = -(-plan.num_ranks // TIMED_RANKS)
            times = {
                part.rank: time_part(part, cost.shape, choice, device, repeats)
                for part in plan.parts[::every]
            }
            for direction in times[0]:
                whole += whole_calls(plan, times, direction, cost, mask)
                for load in plan_loads(plan, case.batch, direction, cost):
                    if load.rank in times:
                        measured = times[load.rank][direction]
                        samples.append(_sample(load, measured, case, direction))
    return samples, whole


def _num_ranks(tokens: int) -> int:
    """16,384 tokens are cut for 4 ranks, 65,536 for 16."""
    return max(TIMED_RANKS, tokens // TOKENS_PER_RANK) if tokens >= CUT_TOKENS else 1


def _sample(load: Load, measured: CallTimes, case: MaskCase, direction: Direction) -> CallSample:
    return CallSample(
        mask=case.name,
        tokens=case.tokens,
        direction=direction.name.lower(),
        area=load.area,
        edge=load.edge,
        rows=load.tile_rows,
        longest=load.longest,
        pairs=load.pairs,
        calls=load.calls,
        seconds=float(measured.division_seconds[load.division]),
        host_seconds=measured.host_seconds,
    )
