"""Ranks of a plan that stand for all: those that differ most, and one in the middle."""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from dyncp.arrays import Float64
from dyncp.blocks import DEFAULT_MASK, Direction
from dyncp.plan import Plan, RankPlan

logger = logging.getLogger(__name__)


def num_messages(part: RankPlan) -> int:
    """Messages that a rank sends and receives in one attention layer, forward and backward."""
    mask, count = part.mask_plan(DEFAULT_MASK), 0
    for direction in Direction:
        program = mask.program(direction)
        for way in (program.sends, program.receives):
            count += len(np.unique(np.stack([way.phase, way.peer]), axis=1).T)
    return count


def spread_ranks(plan: Plan, pairs: Float64) -> dict[int, str]:
    """Up to four ranks with tokens, and why each was taken; `pairs` are the plan's by rank. A rank
    that two reasons speak for is taken for the first, the next best one for the second."""
    messages = [num_messages(part) for part in plan.parts]
    held = plan.parts[0].tokens_per_rank
    ranks = [rank for rank in range(plan.num_ranks) if held[rank]]
    middle = float(np.median(pairs[ranks]))
    orders: dict[str, Callable[[int], float]] = {
        "most pairs": lambda rank: -pairs[rank],
        "fewest pairs": lambda rank: pairs[rank],
        "most messages": lambda rank: -messages[rank],
        "middle": lambda rank: abs(pairs[rank] - middle),
    }
    found: dict[int, str] = {}
    for why, order in orders.items():
        left = [rank for rank in ranks if rank not in found]
        if left:
            found[min(left, key=order)] = why
    return found


def named_ranks(plan: Plan, ranks: Sequence[int]) -> dict[int, str]:
    """Ranks that were asked for; those without tokens are left out."""
    found = {}
    for rank in ranks:
        if not 0 <= rank < plan.num_ranks:
            raise ValueError(f"rank is {rank}; the plan has ranks 0 to {plan.num_ranks - 1}")
        if plan.parts[rank].local_tokens:
            found[rank] = "asked for"
        else:
            logger.warning("rank %d has no tokens in the plan by %s", rank, plan.parts[0].solver)
    return found
