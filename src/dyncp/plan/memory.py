"""Memory: the bytes of a plan's workspaces, known before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int64, frozen
from dyncp.blocks import AttentionShape, Direction, HeadGroup
from dyncp.plan.rank_plan import Program, RankPlan, Space


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of every rank's workspaces in one attention call, int64[ranks] per direction.

    Accumulators, log-sum-exps and copies of inputs that get room for received blocks count; q, kv,
    out and their gradients themselves, message buffers and a kernel's own scratch do not. With
    several masks, each rank's largest call counts. `backward` is 0 in plans for evaluation.
    """

    forward: Int64
    backward: Int64

    @property
    def per_rank(self) -> Int64:
        """The larger direction of every rank."""
        return np.maximum(self.forward, self.backward)

    @property
    def peak(self) -> int:
        """Most bytes on any rank in either direction."""
        return int(self.per_rank.max())


def measure_memory(parts: Sequence[RankPlan], shape: AttentionShape | None = None) -> Memory:
    """Memory of these ranks' parts; `shape` is that of the call (default: the plan's own)."""
    both = [[_rank_bytes(part, direction, shape) for part in parts] for direction in Direction]
    return Memory(*(frozen(column, np.int64) for column in both))


def _rank_bytes(part: RankPlan, direction: Direction, shape: AttentionShape | None) -> int:
    forward = direction is Direction.FORWARD
    programs = [mask.forward if forward else mask.backward for mask in part.masks.values()]
    needed = [_program_bytes(part, p, direction, shape) for p in programs if p is not None]
    return max(needed, default=0)


def _program_bytes(
    part: RankPlan, program: Program, direction: Direction, shape: AttentionShape | None
) -> int:
    shape = part.shape if shape is None else shape
    return sum(
        _group_bytes(part.local_rows, program.workspace_rows[:, g].tolist(), group, shape)[
            direction
        ]
        for g, group in enumerate(part.groups_for(shape))
    )


def _group_bytes(
    local_rows: int, workspace_rows: list[int], group: HeadGroup, shape: AttentionShape
) -> tuple[int, int]:
    """Forward and backward bytes of one head group.

    A tensor of inputs is copied to get room behind the own rows only where blocks are received;
    otherwise the caller's is read. Forward: q, k, v | out, lse. Backward: q, dO, k, v, lse, delta |
    dq, dk, dv, with the accumulators behind the bar always made anew.
    """
    q_rows, k_rows = workspace_rows[Space.Q], workspace_rows[Space.KV]
    q_copied = q_rows if q_rows > local_rows else 0
    k_copied = k_rows if k_rows > local_rows else 0
    heads = group.num_kv_heads * shape.q_heads_per_kv_head
    q_width, k_width = heads * shape.head_dim, 2 * group.num_kv_heads * shape.head_dim
    item, wide = shape.item_bytes, shape.accumulator_bytes
    forward = (q_copied * q_width + k_copied * k_width) * item + q_rows * (q_width + heads) * wide
    backward = (2 * q_copied * q_width + k_copied * k_width) * item
    backward += (2 * q_copied * heads + q_rows * q_width + k_rows * k_width) * wide
    return forward, backward
