"""Derives from a rank's plan what running it needs: kernel calls and the rows of payloads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dyncp.arrays import Int32, Int64
from dyncp.kernels import Kernel, KernelCall
from dyncp.plan import (
    INPUT_SPACE,
    RESULT_SPACE,
    Direction,
    MaskPlan,
    Messages,
    Op,
    Payload,
    Program,
    RankPlan,
    Space,
)

_SPACE = INPUT_SPACE | RESULT_SPACE


@dataclass(frozen=True, slots=True)
class Entry:
    """One payload of a message and its rows in the workspace of its head group."""

    kind: Payload
    head_group: int
    row: int
    tokens: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.tokens)


# phase → peer → payloads of that message, in the plan's order
Mail = Mapping[int, Mapping[int, list[Entry]]]


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """One direction of one mask on one rank, ready to run."""

    rank: int
    direction: Direction
    local_rows: int
    workspace_rows: Int32  # [spaces, head groups]
    instructions: list[tuple[Op, int]]
    calls: Mapping[int, list[tuple[int, Any]]]  # division → (head group, the kernel's lowered call)
    sends: Mail
    receives: Mail


def lower_program(
    part: RankPlan, mask: MaskPlan, direction: Direction, kernel: Kernel, device: torch.device
) -> LoweredProgram:
    program = mask.program(direction)
    place = _places(part, program)
    calls = {
        int(division): [
            (call.head_group, kernel.lower(call, device))
            for call in kernel_calls(part, mask, program, int(division))
        ]
        for division in np.unique(program.tile_division)
    }
    return LoweredProgram(
        rank=part.rank,
        direction=direction,
        local_rows=part.local_rows,
        workspace_rows=program.workspace_rows,
        instructions=[(Op(op), arg) for op, arg in program.instructions.tolist()],
        calls=calls,
        sends=_mail(part, program.sends, place),
        receives=_mail(part, program.receives, place),
    )


def _places(part: RankPlan, program: Program) -> Int64:
    """First row of every block in each workspace, [spaces, head groups, blocks]; -1: absent."""
    place = np.tile(part.block_row, (len(Space), len(part.head_groups), 1))
    slots = program.slots
    place[slots.space, slots.head_group, slots.block] = slots.row
    return place


def _mail(part: RankPlan, messages: Messages, place: Int64) -> Mail:
    mail: dict[int, dict[int, list[Entry]]] = {}
    columns = (messages.phase, messages.peer, messages.kind, messages.head_group, messages.block)
    for phase, peer, kind, group, block in zip(*(c.tolist() for c in columns), strict=True):
        payload = Payload(kind)
        row = int(place[_SPACE[payload], group, block])
        entry = Entry(payload, group, row, int(part.blocks.tokens[block]))
        mail.setdefault(phase, {}).setdefault(peer, []).append(entry)
    return mail


def kernel_calls(
    part: RankPlan, mask: MaskPlan, program: Program, division: int
) -> list[KernelCall]:
    """The kernel calls of a division, one per head group that has tiles in it."""
    place, tiles = _places(part, program), mask.tiles
    at = np.flatnonzero((program.instructions == (Op.COMPUTE, division)).all(axis=1))
    assert len(at) == 1, f"division {division} is computed {len(at)} times"
    calls = []
    for group in np.unique(tiles.head_group[program.tile_division == division]):
        chosen = (program.tile_division == division) & (tiles.head_group == group)
        q_block, k_block = tiles.q_block[chosen], tiles.k_block[chosen]
        q_row, k_row = place[Space.Q, group, q_block], place[Space.KV, group, k_block]
        tokens = part.blocks.tokens
        rectangles = np.stack([q_row, q_row + tokens[q_block], k_row, k_row + tokens[k_block]], 1)
        q_coordinates, k_coordinates = (
            _coordinates(part, program, space, int(group), int(at[0])) for space in Space
        )
        ranges = _row_ranges(part, mask, place[Space.Q, group], q_block, len(q_coordinates))
        fresh = np.ones(len(q_coordinates), np.bool_)
        used = _merged_before(mask, program, int(group), int(at[0]))
        for q0, q1 in rectangles[np.isin(q_block, used), :2]:
            fresh[q0:q1] = False
        call = KernelCall(int(group), rectangles, q_coordinates, k_coordinates, ranges, fresh)
        calls.append(call)
    return calls


def _merged_before(mask: MaskPlan, program: Program, group: int, at: int) -> Int32:
    """Query blocks whose accumulators hold something when instruction `at` starts."""
    before = program.instructions[:at]
    computed = before[before[:, 0] == Op.COMPUTE, 1]
    waited = before[before[:, 0] == Op.WAIT, 1]
    tiles, received = mask.tiles, program.receives
    of_tiles = np.isin(program.tile_division, computed) & (tiles.head_group == group)
    of_results = np.isin(received.phase, waited) & (received.head_group == group)
    of_results &= received.kind == Payload.OUT
    return np.concatenate([tiles.q_block[of_tiles], received.block[of_results]])


def _coordinates(part: RankPlan, program: Program, space: Space, group: int, at: int) -> Int64:
    """Coordinate of every row of a workspace while instruction `at` runs; -1 for unused rows."""
    coordinates = np.full(program.workspace_rows[space, group], -1, np.int64)
    coordinates[: part.local_tokens] = part.local_coordinates
    slots = program.slots
    held = (slots.space == space) & (slots.head_group == group)
    held &= (slots.first <= at) & (at <= slots.last)
    for block, row in zip(slots.block[held], slots.row[held], strict=True):
        tokens = part.blocks.tokens[block]
        coordinates[row : row + tokens] = part.block_coordinate[block] + np.arange(tokens)
    return coordinates


def _row_ranges(
    part: RankPlan, mask: MaskPlan, place: Int64, q_blocks: Int32, num_rows: int
) -> Int32:
    """Key ranges of the rows of `q_blocks` as coordinates; other rows keep empty ranges."""
    ranges = np.zeros((num_rows, mask.rows.num_ranges, 2), np.int32)
    for block in np.unique(q_blocks):
        start, end = int(part.blocks.start[block]), int(part.blocks.end[block])
        offset = part.block_coordinate[block] - start
        rows = slice(place[block], place[block] + end - start)
        ranges[rows] = mask.rows.expand(int(block), start, end) + offset
    return ranges
