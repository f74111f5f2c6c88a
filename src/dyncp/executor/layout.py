"""RankLayout: where everything of one call lies on one rank, for one attention shape. PlanLowering:
all that preparing a plan takes on the host, in any thread, ahead of time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dyncp.executor.combining import list_combinations
from dyncp.executor.copying import list_copies, list_row_sums
from dyncp.executor.engine import Engine
from dyncp.executor.kernel_calls import LoweredProgram, lower_program
from dyncp.executor.order import ready_times
from dyncp.executor.rooms import Fields, RoomMap, Widths, lay_out_messages, lay_out_sends
from dyncp.kernels import Dtypes, IndexArrays, Kernel, RowOps
from dyncp.plan import DTYPE_NAMES, AttentionShape, Direction, RankPlan, list_buffers

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


class PlanLowering:
    """Kernel calls and layouts of the ranks of this process, by mask and direction. `arrays` are
    their index arrays, which have not been sent to the device yet."""

    @torch.inference_mode(False)
    def __init__(self, parts: tuple[RankPlan, ...], engine: Engine) -> None:
        self.parts, self.engine, self.arrays = parts, engine, IndexArrays(engine.device)
        self.programs = {key: self._lower(*key) for key in self._keys()}
        self.layouts: dict[tuple[str, Direction, AttentionShape], tuple[RankLayout, ...]] = {}
        self.lay_out()

    def lay_out(self) -> None:
        """For the plan's attention shape, or that of the latest call where the plan fits any."""
        planned = self.parts[0].shape
        shape = planned if planned.exact else self.engine.shape
        for key, programs in self.programs.items():
            if shape is not None and (*key, shape) not in self.layouts:
                self.layouts[*key, shape] = lay_out_ranks(programs, shape, self.engine, self.arrays)

    def _keys(self) -> Iterator[tuple[str, Direction]]:
        for name, mask in self.parts[0].masks.items():
            yield name, Direction.FORWARD
            if mask.backward is not None:
                yield name, Direction.BACKWARD

    def _lower(self, name: str, direction: Direction) -> tuple[LoweredProgram, ...]:
        kernel, fixed = self.engine.kernel, self.engine.graphs.wanted
        return tuple(
            lower_program(part, part.masks[name], direction, kernel, self.arrays, fixed=fixed)
            for part in self.parts
        )


def lay_out_ranks(
    programs: tuple[LoweredProgram, ...],
    shape: AttentionShape,
    engine: Engine,
    arrays: IndexArrays,
) -> tuple[RankLayout, ...]:
    """Ranks of this process one after the other, in memory and in rows."""
    ranks: list[RankLayout] = []
    base = first_row = 0
    for program in programs:
        rank = lay_out(program, shape, engine.kernel, engine.row_ops, arrays, base, first_row)
        ranks.append(rank)
        base, first_row = base + rank.num_bytes, first_row + program.local_rows
    return tuple(ranks)
