"""RankProgram: one rank's program for one mask and direction, with its kernel calls: rows,
coordinates, key ranges and row states. LoweredProgram: the same with calls lowered by a kernel."""

from functools import cached_property
from typing import Any

import numpy as np

from dyncp.arrays import Int32, Int64, ranges_of
from dyncp.compiled import compiled
from dyncp.kernels import IndexArrays, Kernel, KernelCall, RowState, RowStates
from dyncp.kernels.kernel import SequenceRows
from dyncp.plan import (
    IS_INPUT,
    Direction,
    KernelStyle,
    MaskPlan,
    Messages,
    Op,
    RankPlan,
    Space,
    StyledProgram,
)
from dyncp.plan.buffers import times_of

WHOLE_TILE = 128  # rows: a multiple of every kernel's tile


class RankProgram(StyledProgram):
    """One direction of one mask on one rank, for kernels of one style."""

    @cached_property
    def instructions(self) -> list[tuple[Op, int]]:
        return [(Op(op), argument) for op, argument in self.program.instructions.tolist()]

    @cached_property
    def relayed_from(self) -> Int64:
        """For each payload that is sent: the index of the received payload that it relays, or -1 if
        it is this rank's own."""
        part, sends, receives = self.part, self.program.sends, self.program.receives
        relayed = IS_INPUT[sends.kind] & (part.blocks.owner[sends.block] != part.rank)
        inputs = np.flatnonzero(IS_INPUT[receives.kind])
        known = self._payload_keys(receives)[inputs]
        order = np.argsort(known)
        at = np.searchsorted(known[order], self._payload_keys(sends)[relayed])
        origin = np.full(len(sends), -1, np.int64)
        origin[relayed] = inputs[order][at]
        return origin

    def _payload_keys(self, messages: Messages) -> Int64:
        payload = messages.kind.astype(np.int64) * len(self.part.head_groups) + messages.head_group
        return payload * len(self.part.blocks) + messages.block

    @property
    def calls_depend(self) -> bool:
        """Whether a kernel call reads results of the previous call, to add to them."""
        return not self.style.collects if self.backward else self.style.merges

    @cached_property
    def refills(self) -> tuple[Int64, Int64]:
        """Indices of all pairs (earlier, later) of slots that share rows, counted in whole kernel
        tiles."""
        slots, side = self.program.slots, self.part.slot_alignment
        start = slots.row.astype(np.int64)
        end = -(-(start + self.part.blocks.tokens[slots.block]) // side) * side
        same = (slots.space == slots.space[:, None]) & (
            slots.head_group == slots.head_group[:, None]
        )
        overlap = (start < end[:, None]) & (end > start[:, None])
        earlier, later = np.nonzero(same & overlap & (slots.first > slots.first[:, None]))
        return earlier, later

    def refilled_blocks(self, space: Space, group: int) -> Int64:
        """Blocks whose slots are later filled with another block, in part or in whole."""
        slots, (earlier, _) = self.program.slots, self.refills
        mine = (slots.space[earlier] == space) & (slots.head_group[earlier] == group)
        blocks: Int64 = slots.block[earlier[mine]].astype(np.int64)
        return blocks

    def unused_rows(self, space: Space, group: int) -> tuple[Int64, Int64]:
        """First rows and ends of the padding in kernel tiles: after the last local row, and after
        the last row of every slot."""
        slots, part = self.program.slots, self.part
        rows, side = int(self.program.workspace_rows[space, group]), max(part.slot_alignment, 1)
        if side % WHOLE_TILE:  # a kernel tile may hold rows of slots that are not filled yet
            return np.asarray([part.local_tokens]), np.asarray([rows])
        mine = (slots.space == space) & (slots.head_group == group)
        end = slots.row[mine].astype(np.int64) + part.blocks.tokens[slots.block[mine]]
        first = np.unique(np.append(end, part.local_tokens))
        return first, np.minimum(-(-first // side) * side, rows)

    def kernel_calls(self) -> dict[int, list[KernelCall]]:
        """Kernel calls by division: one for each head group that has tiles in it."""
        builder = _CallBuilder(self)
        calls: dict[int, list[KernelCall]] = {}
        for division, group in self.call_rows:
            calls.setdefault(division, []).append(builder.call(division, group))
        return calls


class _CallBuilder:
    def __init__(self, program: RankProgram) -> None:
        self._program, self._part, self._mask = program, program.part, program.mask
        self._slots, self._place = program.program.slots, program.place
        self._run_bounds = np.searchsorted(
            self._mask.rows.block, np.arange(len(self._part.blocks) + 1)
        )
        contributions = program.contributions
        wide = contributions.wide
        self._after = np.where(wide, RowState.WIDE, RowState.FINAL).astype(np.uint8)
        # The state before a contribution is the state after the previous one to the same rows.
        self._before = np.roll(self._after, 1)
        self._before[contributions.first] = RowState.NOTHING

    def call(self, division: int, group: int) -> KernelCall:
        program, tiles, tokens = self._program, self._mask.tiles, self._part.blocks.tokens
        mine = (program.program.tile_division == division) & (tiles.head_group == group)
        q_block, k_block = tiles.q_block[mine], tiles.k_block[mine]
        q_row, k_row = self._place[Space.Q, group, q_block], self._place[Space.KV, group, k_block]
        at = int(times_of(program.program, Op.COMPUTE)[division])
        calls_of_group = sum(g == group for _, g in program.call_rows)
        return KernelCall(
            group,
            np.stack([q_row, q_row + tokens[q_block], k_row, k_row + tokens[k_block]], 1),
            self._coordinates(Space.Q, group, at),
            self._coordinates(Space.KV, group, at),
            self._ranges(group, np.unique(q_block)),
            self._states(Space.Q, group, at),
            self._states(Space.KV, group, at),
            *program.call_rows[division, group],
            alone=calls_of_group == 1 and not program.has_messages,
        )

    def _num_rows(self, space: Space, group: int) -> int:
        return int(self._program.program.workspace_rows[space, group])

    def _coordinates(self, space: Space, group: int, at: int) -> Int64:
        """Coordinate of every row of a workspace during instruction `at`; -1 for unused rows."""
        coordinates = np.full(self._num_rows(space, group), -1, np.int64)
        coordinates[: self._part.local_tokens] = self._part.local_coordinates
        slots = self._slots
        held = (slots.space == space) & (slots.head_group == group)
        held &= (slots.first <= at) & (at <= slots.last)
        block = slots.block[held]
        first, tokens = self._part.block_coordinate[block], self._part.blocks.tokens[block]
        coordinates[ranges_of(slots.row[held], tokens)] = ranges_of(first, tokens)
        return coordinates

    def _ranges(self, group: int, blocks: Int32) -> Int32:
        """Key ranges of the blocks' rows, in coordinates. Other rows get empty ranges."""
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
        """States of all rows of a workspace before and after instruction `at`."""
        rows, added = self._num_rows(space, group), self._program.contributions
        before, after = np.zeros(rows, np.uint8), np.full(rows, RowState.UNTOUCHED, np.uint8)
        mine = (added.time == at) & (added.space == space) & (added.head_group == group)
        block = added.block[mine]
        tokens = self._part.blocks.tokens[block]
        touched = ranges_of(self._place[space, group, block], tokens)
        before[touched] = np.repeat(self._before[mine], tokens)
        after[touched] = np.repeat(self._after[mine], tokens)
        return RowStates(before, after)


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
    """Writes the key ranges of each block's rows: the run's base, plus its slope times the distance
    from the run's start, plus the block's offset in coordinates."""
    for i in range(len(place)):
        for run in range(first_run[i], end_run[i]):
            run_end = run_start[run + 1] if run + 1 < end_run[i] else end[i]
            for row in range(run_start[run], run_end):
                step = row - run_start[run]
                for column in range(ranges.shape[1]):
                    value = base[run, column] + slope[run, column] * step + offset[i]
                    ranges[place[i] + row - start[i], column] = value


def style_of(kernel: Kernel, *, fixed: bool = False) -> KernelStyle:
    """The style of a kernel; `fixed` as in `KernelStyle`."""
    return KernelStyle(
        kernel.merges,
        kernel.collects,
        fixed,
        kernel.row_multiple,
        kernel.dim_multiple,
        kernel.most_sequences,
    )


class LoweredProgram(RankProgram):
    """A program whose calls are lowered: `calls[division]` lists (head group, what `kernel.lower`
    returned)."""

    def __init__(
        self,
        part: RankPlan,
        mask: MaskPlan,
        direction: Direction,
        kernel: Kernel,
        arrays: IndexArrays,
        *,
        fixed: bool = False,
    ) -> None:
        super().__init__(part, mask, direction, style_of(kernel, fixed=fixed))
        multiple = kernel.row_multiple
        if part.slot_alignment % multiple:
            raise ValueError(
                f"the plan aligns slots to {part.slot_alignment} rows, but kernel {kernel.name!r} "
                f"needs multiples of {multiple}: plan with Layout(slot_alignment={multiple}), or "
                "choose another kernel"
            )
        self.kernel = kernel
        self.calls: dict[int, list[tuple[int, Any]]] = {
            division: [
                (call.head_group, kernel.lower(call, arrays, backward=self.backward))
                for call in calls
            ]
            for division, calls in self.kernel_calls().items()
        }

    def sequence_rows(self, space: Space, group: int, dim: int) -> list[SequenceRows]:
        """The rows of each sequence, if the kernel collects gradients of whole sequences, each
        aligned to kernel tiles; empty if rows are stored in their usual order."""
        calls = [call for calls in self.calls.values() for g, call in calls if g == group]
        if not self.backward or not self.style.most_sequences or len(calls) != 1:
            return []
        return self.kernel.sequence_rows(calls[0], dim)[space]
