"""KernelCall: the tiles of one division and head group, over one Q and one KV workspace."""

from dataclasses import dataclass

from dyncp.arrays import Bool, Int32, Int64


@dataclass(frozen=True, eq=False)
class KernelCall:
    """What a kernel is asked to compute, in rows of the workspaces.

    A row's coordinate is its sequence's offset in the batch plus its position there; unused rows
    have -1. A query row attends the keys whose coordinates lie in its ranges *and* whose
    (query, key) pair lies in one of the rectangles. Rows that no rectangle touches keep empty
    ranges.
    """

    head_group: int
    rectangles: Int64  # [tiles, 4]: query rows [q0, q1) × key rows [k0, k1)
    q_coordinates: Int64  # [query rows]
    k_coordinates: Int64  # [key rows]
    ranges: Int32  # [query rows, R, 2], coordinates
    fresh: Bool  # [query rows]: nothing was merged into this row's accumulators before this call
