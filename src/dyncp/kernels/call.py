"""KernelCall: the tiles of one division and head group, over one Q and one KV workspace."""

from dataclasses import dataclass
from enum import IntEnum

from dyncp.arrays import Bool, Int32, Int64, UInt8


class Held(IntEnum):
    """Where the sum of a row's contributions is, before and after a contribution to it.

    A row with one contribution goes from NOTHING to FINAL, and nothing is ever added up. One with
    three goes NOTHING → WIDE → WIDE → FINAL: added up in the accumulator dtype, and rounded to the
    final one once; it stays WIDE where results are received for it, which are added later.
    """

    NOTHING = 0
    FINAL = 1  # in the tensor of the final dtype
    WIDE = 2  # in the tensor of the accumulator dtype
    UNTOUCHED = 3  # only as `after`: this contribution is not for this row


@dataclass(frozen=True, eq=False)
class RowStates:
    """Where each row's sum is before and after one contribution, uint8[rows] of `Held`."""

    before: UInt8
    after: UInt8

    @property
    def touched(self) -> Bool:
        touched: Bool = self.after != Held.UNTOUCHED
        return touched


@dataclass(frozen=True, eq=False)
class KernelCall:
    """What a kernel is asked to compute, in rows of the workspaces.

    A row's coordinate is its sequence's offset in the batch plus its position there; unused rows
    have -1. A query row attends the keys whose coordinates lie in its ranges *and* whose
    (query, key) pair lies in one of the rectangles. Rows that no rectangle touches keep empty
    ranges, and are UNTOUCHED.
    """

    head_group: int
    rectangles: Int64  # [tiles, 4]: query rows [q0, q1) × key rows [k0, k1)
    q_coordinates: Int64  # [query rows]
    k_coordinates: Int64  # [key rows]
    ranges: Int32  # [query rows, R, 2], coordinates
    q_states: RowStates  # of out (forward) or dq (backward)
    k_states: RowStates  # of dk and dv (backward)
    q_rows: slice  # whole kernel tiles that it touches
    k_rows: slice
    alone: bool = False  # the only call of its head group, on a rank without messages
