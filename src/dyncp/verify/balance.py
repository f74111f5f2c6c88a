"""Invariant 5: the declared balance is the true one, and limits hold or the plan says why not."""

import math

import numpy as np

from dyncp.arrays import Int64
from dyncp.plan import Plan
from dyncp.verify.violation import Findings


def check_balance(plan: Plan, findings: Findings) -> None:
    measured = {"compute": _fullest(_work(plan)), "tokens": _fullest(_tokens(plan))}
    for part in plan.parts:
        declared = part.balance
        limits = declared.limits
        for what, given, tolerance in (
            ("compute", declared.compute_max_over_mean, limits.compute_tolerance),
            ("tokens", declared.tokens_max_over_mean, limits.token_tolerance),
        ):
            true = measured[what]
            if not math.isclose(given, true, rel_tol=1e-9):
                findings.add(
                    5,
                    f"rank {part.rank}: declares {what} max/mean {given:.6g}; the tiles and blocks "
                    f"give {true:.6g}",
                )
            if (
                tolerance is not None
                and true > (1 + tolerance) * (1 + 1e-12)
                and not declared.reason
            ):
                findings.add(
                    5,
                    f"rank {part.rank}: {what} max/mean is {true:.6g}, over the limit of "
                    f"{1 + tolerance:.6g}, and the plan gives no reason",
                )


def _work(plan: Plan) -> Int64:
    """Pairs × q heads of all masks, per rank."""
    work = np.zeros(len(plan.parts), np.int64)
    for rank, part in enumerate(plan.parts):
        heads = np.asarray([g.num_kv_heads for g in part.head_groups], np.int64)
        heads *= part.shape.q_heads // part.shape.kv_heads
        for mask in part.masks.values():
            work[rank] += int((mask.tiles.pairs * heads[mask.tiles.head_group]).sum())
    return work


def _tokens(plan: Plan) -> Int64:
    blocks = plan.parts[0].blocks
    tokens = np.zeros(len(plan.parts), np.int64)
    np.add.at(tokens, blocks.owner, blocks.end - blocks.start)
    return tokens


def _fullest(load: Int64) -> float:
    total = int(load.sum())
    return int(load.max()) * len(load) / total if total else 1.0
