"""RankLayout: where everything of one call lies on one rank, for one attention shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dyncp.executor.combining import list_combinations
from dyncp.executor.copying import list_copies, list_row_sums
from dyncp.executor.kernel_calls import LoweredProgram
from dyncp.executor.order import ready_times
from dyncp.executor.rooms import Fields, RoomMap, Widths, lay_out_messages, lay_out_sends
from dyncp.kernels import Dtypes, IndexArrays, Kernel, RowOps
from dyncp.plan import DTYPE_NAMES, AttentionShape, list_buffers

DTYPES: dict[torch.dtype, str] = {getattr(torch, x): name for x, name in DTYPE_NAMES.items()}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def dtypes_of(shape: AttentionShape) -> Dtypes:
    return Dtypes(_BY_NAME[shape.dtype], _BY_NAME[shape.partial_dtype or shape.dtype])


@dataclass(frozen=True, eq=False)
class RankLayout:
    """`copies` and `combinations` are tables by the time at which they are due: after instruction
    i, or at the START. `row_sums` comes before all of them (backward)."""

    lowered: LoweredProgram
    rooms: RoomMap
    sends: Fields
    receives: Fields
    copies: Mapping[int, Any]
    combinations: Mapping[int, Any]
    row_sums: Any
    ready: Mapping[int, int]  # phase → time after which it may be launched
    first_row: int  # of the rank among the rows of this process

    @cached_property
    def num_bytes(self) -> int:
        return self.rooms.num_bytes


def lay_out(
    lowered: LoweredProgram,
    shape: AttentionShape,
    kernel: Kernel,
    row_ops: RowOps,
    arrays: IndexArrays,
    base: int = 0,
    first_row: int = 0,
) -> RankLayout:
    """`base` is the first byte of the rank's rooms, `first_row` the first of its rows among those
    of this process."""
    dtypes = dtypes_of(shape)
    mask, direction, style = lowered.mask, lowered.direction, lowered.style
    listed = list_buffers(lowered.part, mask, direction, shape, style, lowered.found)
    rooms, widths = RoomMap(lowered, shape, listed, base), Widths.of(lowered, shape)
    sends = lay_out_sends(lowered, widths)
    receives = lay_out_messages(lowered, lowered.program.receives, widths)
    ready = ready_times(lowered)
    copies = list_copies(lowered, rooms, widths, sends, receives, first_row)
    combinations = list_combinations(
        lowered, rooms, widths, sends, receives, ready, first_row, kernel
    )
    return RankLayout(
        lowered,
        rooms,
        sends,
        receives,
        {time: row_ops.copy_table(x, shape.head_dim, dtypes, arrays) for time, x in copies.items()},
        {
            time: row_ops.combine_table(*x, dtypes, arrays, has_lse=not lowered.backward)
            for time, x in combinations.items()
        },
        row_ops.row_sum_table(list_row_sums(lowered, rooms, first_row, kernel), dtypes, arrays)
        if lowered.backward
        else None,
        ready,
        first_row,
    )
