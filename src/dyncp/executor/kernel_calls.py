"""Derives the kernel calls of a rank's program: rows, coordinates, key ranges and row states."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dyncp.arrays import Int32, Int64, UInt8
from dyncp.compiled import compiled
from dyncp.kernels import IndexArrays, Kernel, KernelCall, RowState, RowStates
from dyncp.plan import (
    Contributions,
    Direction,
    KernelStyle,
    MaskPlan,
    Op,
    Program,
    RankPlan,
    Space,
    call_rows,
    find_contributions,
    has_messages,
    places_of,
)


def kernel_calls(
    part: RankPlan, mask: MaskPlan, program: Program, division: int
) -> list[KernelCall]:
    """The kernel calls of a division, one per head group that has tiles in it."""
    return CallBuilder(part, mask, program).calls(division)


class CallBuilder:
    """Builds the calls of one program, for kernel tiles of `multiple` rows."""

    def __init__(
        self,
        part: RankPlan,
        mask: MaskPlan,
        program: Program,
        found: Contributions | None = None,
        multiple: int = 1,
    ) -> None:
        self._part, self._mask, self._program = part, mask, program
        self._place = places_of(part, program)
        if found is None:
            found = find_contributions(part, mask, program)
        self._found, self._before, self._after = found, before_of(found), after_of(found)
        self._rows = call_rows(part, mask, program, self._place, multiple)
        tiles = mask.tiles
        # Tiles by division and head group: every call's are one slice of this order.
        self._order = np.lexsort((tiles.head_group, program.tile_division))
        self._run_bounds = np.searchsorted(mask.rows.block, np.arange(len(part.blocks) + 1))

    def calls(self, division: int) -> list[KernelCall]:
        divisions = self._program.tile_division[self._order]
        mine = self._order[slice(*np.searchsorted(divisions, [division, division + 1]))]
        groups, firsts = np.unique(self._mask.tiles.head_group[mine], return_index=True)
        at = np.flatnonzero((self._program.instructions == (Op.COMPUTE, division)).all(axis=1))
        assert len(at) == 1, f"division {division} is computed {len(at)} times"
        bounds = [*firsts.tolist(), len(mine)]
        return [
            self._call(int(group), mine[first:end], division, int(at[0]))
            for group, first, end in zip(groups, bounds[:-1], bounds[1:], strict=True)
        ]

    def _call(self, group: int, tiles: Int64, division: int, at: int) -> KernelCall:
        q_block, k_block = self._mask.tiles.q_block[tiles], self._mask.tiles.k_block[tiles]
        tokens = self._part.blocks.tokens
        q_row, k_row = self._place[Space.Q, group, q_block], self._place[Space.KV, group, k_block]
        rectangles = np.stack([q_row, q_row + tokens[q_block], k_row, k_row + tokens[k_block]], 1)
        return KernelCall(
            group,
            rectangles,
            self._coordinates(Space.Q, group, at),
            self._coordinates(Space.KV, group, at),
            self._ranges(group, np.unique(q_block)),
            self._states(Space.Q, group, at),
            self._states(Space.KV, group, at),
            *self._rows[division, group],
            alone=self._is_alone(group),
        )

    def _is_alone(self, group: int) -> bool:
        calls = [g for _, g in self._rows if g == group]
        return len(calls) == 1 and not has_messages(self._program)

    def _num_rows(self, space: Space, group: int) -> int:
        return int(self._program.workspace_rows[space, group])

    def _coordinates(self, space: Space, group: int, at: int) -> Int64:
        """Coordinate of every row of a workspace while instruction `at` runs; -1: unused."""
        coordinates = np.full(self._num_rows(space, group), -1, np.int64)
        coordinates[: self._part.local_tokens] = self._part.local_coordinates
        slots = self._program.slots
        held = (slots.space == space) & (slots.head_group == group)
        held &= (slots.first <= at) & (at <= slots.last)
        block = slots.block[held]
        first, tokens = self._part.block_coordinate[block], self._part.blocks.tokens[block]
        _count_up(coordinates, slots.row[held].astype(np.int64), tokens.astype(np.int64), first)
        return coordinates

    def _ranges(self, group: int, blocks: Int32) -> Int32:
        """Key ranges of the blocks' rows as coordinates; other rows keep empty ranges."""
        runs, part = self._mask.rows, self._part
        ranges = np.zeros((self._num_rows(Space.Q, group), runs.num_ranges, 2), np.int32)
        start = part.blocks.start[blocks].astype(np.int64)
        _expand_runs(
            ranges.reshape(len(ranges), -1),
            self._place[Space.Q, group, blocks],
            start,
            part.blocks.end[blocks].astype(np.int64),
            part.block_coordinate[blocks] - start,
            self._run_bounds[blocks],
            self._run_bounds[blocks + 1],
            runs.start,
            runs.base.reshape(len(runs), -1),
            runs.slope.reshape(len(runs), -1),
        )
        return ranges

    def _states(self, space: Space, group: int, at: int) -> RowStates:
        rows = self._num_rows(space, group)
        before, after = np.zeros(rows, np.uint8), np.full(rows, RowState.UNTOUCHED, np.uint8)
        found = self._found
        mine = (found.time == at) & (found.space == space) & (found.head_group == group)
        block = found.block[mine]
        place = self._place[space, group, block]
        tokens = self._part.blocks.tokens[block].astype(np.int64)
        _fill(before, place, tokens, self._before[mine])
        _fill(after, place, tokens, self._after[mine])
        return RowStates(before, after)


def after_of(found: Contributions) -> UInt8:
    return np.where(found.wide, RowState.WIDE, RowState.FINAL).astype(np.uint8)


def before_of(found: Contributions) -> UInt8:
    """What the contribution before left."""
    before = np.zeros(len(found), np.uint8)
    before[1:] = after_of(found)[:-1]
    before[found.first] = RowState.NOTHING
    return before


@compiled
def _count_up(values: Int64, row: Int64, tokens: Int64, first: Int64) -> None:
    for i in range(len(row)):
        for step in range(tokens[i]):
            values[row[i] + step] = first[i] + step


@compiled
def _fill(values: UInt8, row: Int64, tokens: Int64, value: UInt8) -> None:
    for i in range(len(row)):
        values[row[i] : row[i] + tokens[i]] = value[i]


@compiled
def _expand_runs(
    ranges: Int32,
    place: Int64,
    start: Int64,
    end: Int64,
    offset: Int64,
    first_run: Int64,
    end_run: Int64,
    run_start: Int32,
    base: Int32,
    slope: Int32,
) -> None:
    """Writes the rows of each block: a run's base plus its slope times the steps since its start,
    plus the block's offset in coordinates."""
    for i in range(len(place)):
        for run in range(first_run[i], end_run[i]):
            behind = run_start[run + 1] if run + 1 < end_run[i] else end[i]
            for row in range(run_start[run], behind):
                step = row - run_start[run]
                for column in range(ranges.shape[1]):
                    value = base[run, column] + slope[run, column] * step + offset[i]
                    ranges[place[i] + row - start[i], column] = value


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """One direction of one mask on one rank."""

    part: RankPlan
    mask: MaskPlan
    direction: Direction
    style: KernelStyle
    found: Contributions
    place: Int64  # first row of every block, [spaces, head groups, blocks]
    calls: Mapping[int, list[tuple[int, Any]]]  # division → (head group, the kernel's lowered call)

    @property
    def program(self) -> Program:
        return self.mask.program(self.direction)

    @property
    def backward(self) -> bool:
        return self.direction is Direction.BACKWARD

    @cached_property
    def instructions(self) -> list[tuple[Op, int]]:
        return [(Op(op), argument) for op, argument in self.program.instructions.tolist()]

    @cached_property
    def local_rows(self) -> int:
        return self.part.local_rows

    @cached_property
    def has_messages(self) -> bool:
        return has_messages(self.program)

    @property
    def calls_depend(self) -> bool:
        """Whether a kernel call reads what the one before wrote."""
        return not self.style.collects if self.backward else self.style.merges

    @cached_property
    def refills(self) -> tuple[Int64, Int64]:
        """Pairs of slots, numbers of the earlier and of the later: the later one has some of the
        earlier one's rows, counted in whole kernel tiles."""
        slots, side = self.program.slots, self.part.slot_alignment
        start = slots.row.astype(np.int64)
        end = -(-(start + self.part.blocks.tokens[slots.block]) // side) * side
        same = (slots.space == slots.space[:, None]) & (
            slots.head_group == slots.head_group[:, None]
        )
        overlap = (start < end[:, None]) & (end > start[:, None])
        earlier, later = np.nonzero(same & overlap & (slots.first > slots.first[:, None]))
        return earlier, later


def style_of(kernel: Kernel, *, fixed: bool = False) -> KernelStyle:
    return KernelStyle(
        kernel.merges,
        kernel.collects,
        fixed,
        kernel.row_multiple,
        kernel.dim_multiple,
        kernel.most_sequences,
    )


def lower_program(
    part: RankPlan,
    mask: MaskPlan,
    direction: Direction,
    kernel: Kernel,
    arrays: IndexArrays,
    *,
    fixed: bool = False,
) -> LoweredProgram:
    """`fixed` as in `KernelStyle`."""
    program, style = mask.program(direction), style_of(kernel, fixed=fixed)
    _check_alignment(part, kernel, style)
    found = find_contributions(part, mask, program)
    builder = CallBuilder(part, mask, program, found, style.row_multiple)
    calls = {
        division: [
            (
                call.head_group,
                kernel.lower(call, arrays, backward=direction is Direction.BACKWARD),
            )
            for call in builder.calls(division)
        ]
        for division in np.unique(program.tile_division).tolist()
    }
    return LoweredProgram(part, mask, direction, style, found, places_of(part, program), calls)


def _check_alignment(part: RankPlan, kernel: Kernel, style: KernelStyle) -> None:
    if part.slot_alignment % style.row_multiple:
        raise ValueError(
            f"the plan aligns slots to {part.slot_alignment} rows, but kernel {kernel.name!r} "
            f"needs multiples of {style.row_multiple}: plan with Layout(slot_alignment="
            f"{style.row_multiple}), or choose another kernel"
        )
