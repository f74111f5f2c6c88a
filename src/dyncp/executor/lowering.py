"""Derives from a rank's plan what running it needs, for any attention shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dyncp.arrays import Int64
from dyncp.executor.kernel_calls import CallBuilder, places_of
from dyncp.executor.streams import START
from dyncp.kernels import IndexArrays, Kernel
from dyncp.plan import (
    INPUT_SPACE,
    RESULT_SPACE,
    Contributions,
    Direction,
    KernelStyle,
    MaskPlan,
    Op,
    Payload,
    Program,
    RankPlan,
    Space,
    find_contributions,
)

SETTLE = "SETTLE"  # beside the plan's instructions


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """One direction of one mask on one rank."""

    part: RankPlan
    mask: MaskPlan
    direction: Direction
    style: KernelStyle
    found: Contributions
    place: Int64  # first row of every block, [spaces, head groups, blocks]
    steps: list[tuple[int, Op | str, int]]  # time, what, its argument
    calls: Mapping[int, list[tuple[int, Any]]]  # division → (head group, the kernel's lowered call)
    ready: Mapping[int, int]  # phase → time at which what it sends is there
    marked: frozenset[int]  # times that some phase waits for
    empty_rows: Mapping[tuple[Space, int], list[slice]]  # own rows that nothing is added to
    # phase → rows of results that are sent though nothing was added to them (rings pass all on)
    empty_sends: Mapping[int, list[tuple[Space, int, slice]]]
    refilled: Mapping[int, list[tuple[Space, int, slice]]]  # phase → slots to clear, if settling

    @property
    def program(self) -> Program:
        return self.mask.program(self.direction)

    @cached_property
    def local_rows(self) -> int:
        return self.part.local_rows

    @cached_property
    def has_messages(self) -> bool:
        return any(op is Op.LAUNCH for _, op, _ in self.steps)

    @property
    def num_groups(self) -> int:
        return len(self.part.head_groups)

    def rows(self, space: Space, group: int) -> int:
        return int(self.program.workspace_rows[space, group])

    def has_slots(self, space: Space, group: int) -> bool:
        return self.rows(space, group) > self.local_rows


def style_of(kernel: Kernel) -> KernelStyle:
    multiples = (getattr(kernel, name, 1) for name in ("row_multiple", "dim_multiple"))
    return KernelStyle(kernel.rounds_partials, kernel.settles, *multiples)


def lower_program(
    part: RankPlan, mask: MaskPlan, direction: Direction, kernel: Kernel, arrays: IndexArrays
) -> LoweredProgram:
    program, style = mask.program(direction), style_of(kernel)
    _check_alignment(part, kernel, style)
    found = find_contributions(part, mask, program, style)
    builder, backward = CallBuilder(part, mask, program, found), direction is Direction.BACKWARD
    calls = {
        division: [
            (call.head_group, kernel.lower(call, arrays, backward=backward))
            for call in builder.calls(division)
        ]
        for division in np.unique(program.tile_division).tolist()
    }
    ready = _ready_times(part, program, found)
    place = places_of(part, program)
    return LoweredProgram(
        part=part,
        mask=mask,
        direction=direction,
        style=style,
        found=found,
        place=place,
        steps=_steps(program, found),
        calls=calls,
        ready=ready,
        marked=frozenset(ready.values()),
        empty_rows=_empty_rows(part, program, found, direction),
        empty_sends=_empty_sends(part, program, found, place),
        refilled=_refilled_slots(part, program) if style.settles and backward else {},
    )


def _check_alignment(part: RankPlan, kernel: Kernel, style: KernelStyle) -> None:
    if part.slot_alignment % style.row_multiple:
        raise ValueError(
            f"the plan aligns slots to {part.slot_alignment} rows, but kernel {kernel.name!r} "
            f"needs multiples of {style.row_multiple}: plan with Layout(slot_alignment="
            f"{style.row_multiple}), or choose another kernel"
        )


def _steps(program: Program, found: Contributions) -> list[tuple[int, Op | str, int]]:
    """The instructions, with settling between them."""
    steps: list[tuple[int, Op | str, int]] = [
        (2 * i, Op(op), argument) for i, (op, argument) in enumerate(program.instructions.tolist())
    ]
    settled = np.unique(found.time[found.time % 2 == 1]).tolist()
    return sorted(steps + [(time, SETTLE, time) for time in settled], key=lambda step: step[0])


def _ready_times(part: RankPlan, program: Program, found: Contributions) -> dict[int, int]:
    """When everything that a phase sends is there: own inputs from the start, received ones once
    they are in their slots, results with their last contribution."""
    sends, slots = program.sends, program.slots
    shape = (len(Space), len(part.head_groups), len(part.blocks))
    arrives, done = np.full(shape, START, np.int64), np.full(shape, START, np.int64)
    arrives[slots.space, slots.head_group, slots.block] = 2 * slots.first
    np.maximum.at(done, (found.space, found.head_group, found.block), found.time)
    ready: dict[int, int] = dict.fromkeys(np.unique(sends.phase).tolist(), START)
    for spaces, times in ((INPUT_SPACE, arrives), (RESULT_SPACE, done)):
        space = _space_table(spaces)[sends.kind]
        chosen = space >= 0
        time = times[space, sends.head_group, sends.block][chosen]
        for phase, at in zip(sends.phase[chosen].tolist(), time.tolist(), strict=True):
            ready[phase] = max(ready[phase], at)
    return ready


def _space_table(spaces: Mapping[Payload, Space]) -> Int64:
    return np.asarray([spaces.get(kind, -1) for kind in Payload])


def _empty_sends(
    part: RankPlan, program: Program, found: Contributions, place: Int64
) -> dict[int, list[tuple[Space, int, slice]]]:
    sends, empty = program.sends, dict[int, list[tuple[Space, int, slice]]]()
    touched = np.zeros(place.shape, np.bool_)
    touched[found.space, found.head_group, found.block] = True
    space = _space_table(RESULT_SPACE)[sends.kind]
    for i in np.flatnonzero((space >= 0) & ~touched[space, sends.head_group, sends.block]).tolist():
        group, block = int(sends.head_group[i]), int(sends.block[i])
        first = int(place[space[i], group, block])
        rows = slice(first, first + int(part.blocks.tokens[block]))
        empty.setdefault(int(sends.phase[i]), []).append((Space(space[i]), group, rows))
    return empty


def _empty_rows(
    part: RankPlan, program: Program, found: Contributions, direction: Direction
) -> dict[tuple[Space, int], list[slice]]:
    empty = {}
    spaces = (Space.Q,) if direction is Direction.FORWARD else tuple(Space)
    for space in spaces:
        for group in range(program.workspace_rows.shape[1]):
            mine = (found.space == space) & (found.head_group == group)
            without = np.setdiff1d(part.local_blocks, found.block[mine])
            runs = _joined(part.block_row[without], part.blocks.tokens[without].astype(np.int64))
            if part.local_tokens < part.local_rows:
                runs.append(slice(part.local_tokens, part.local_rows))
            if runs:
                empty[space, group] = runs
    return empty


def _joined(row: Int64, tokens: Int64) -> list[slice]:
    """Neighbouring rows as one slice."""
    runs: list[slice] = []
    for first, count in zip(row.tolist(), tokens.tolist(), strict=True):
        if runs and runs[-1].stop == first:
            runs[-1] = slice(runs[-1].start, first + count)
        else:
            runs.append(slice(first, first + count))
    return runs


def _refilled_slots(part: RankPlan, program: Program) -> dict[int, list[tuple[Space, int, slice]]]:
    """Slots whose rows held other blocks before, by the phase that fills them."""
    slots, refilled = program.slots, dict[int, list[tuple[Space, int, slice]]]()
    end = slots.row + part.blocks.tokens[slots.block]
    for i in range(len(slots)):
        before = (slots.space == slots.space[i]) & (slots.head_group == slots.head_group[i])
        before &= (slots.first < slots.first[i]) & (slots.row < end[i]) & (end > slots.row[i])
        if before.any():
            phase = int(program.instructions[slots.first[i], 1])
            rows = slice(int(slots.row[i]), int(end[i]))
            entry = (Space(slots.space[i]), int(slots.head_group[i]), rows)
            refilled.setdefault(phase, []).append(entry)
    return {
        phase: _joined_slots(entries, part.slot_alignment) for phase, entries in refilled.items()
    }


def _joined_slots(
    entries: list[tuple[Space, int, slice]], alignment: int
) -> list[tuple[Space, int, slice]]:
    """Neighbours as one; rows behind a slot's last up to the alignment belong to nobody."""
    joined: list[tuple[Space, int, slice]] = []
    for space, group, rows in sorted(entries, key=lambda e: (e[0], e[1], e[2].start)):
        if joined and joined[-1][:2] == (space, group):
            last = joined[-1][2]
            if rows.start <= -(-last.stop // alignment) * alignment:
                joined[-1] = (space, group, slice(last.start, rows.stop))
                continue
        joined.append((space, group, rows))
    return joined
