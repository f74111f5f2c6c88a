"""Workspaces: where blocks lie, which rows kernel calls touch, and what they add to each block.

A call contributes to the rows of every block that it touches. Results received for the same rows
are added after the last call, when the sum leaves the rank or the call ends. A single contribution
needs no adding up.
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.blocks import IS_INPUT, OF_KEYS
from dyncp.plan.format import MaskPlan, Messages, Op, Program, RankPlan, Space


def places_of(part: RankPlan, program: Program) -> Int64:
    """First row of every block in each workspace, [spaces, head groups, blocks]; -1: absent."""
    place = np.tile(part.block_row, (len(Space), len(part.head_groups), 1))
    slots = program.slots
    place[slots.space, slots.head_group, slots.block] = slots.row
    return place


def call_rows(
    part: RankPlan, mask: MaskPlan, program: Program, place: Int64, multiple: int
) -> dict[tuple[int, int], tuple[slice, slice]]:
    """Query rows and key rows of every kernel call, by division and head group: from the first
    kernel tile of `multiple` rows that it touches to the last, at least two where there are two."""
    tiles, tokens = mask.tiles, part.blocks.tokens
    groups = len(part.head_groups)
    key = program.tile_division.astype(np.int64) * groups + tiles.head_group
    calls, of_call = np.unique(key, return_inverse=True)
    hulls = []
    for space, block in ((Space.Q, tiles.q_block), (Space.KV, tiles.k_block)):
        first = place[space, tiles.head_group, block]
        low = np.full(len(calls), np.iinfo(np.int64).max)
        high = np.zeros(len(calls), np.int64)
        np.minimum.at(low, of_call, first)
        np.maximum.at(high, of_call, first + tokens[block])
        rows = program.workspace_rows[space][calls % groups]
        hulls.append(_whole_tiles(low, high, rows.astype(np.int64), multiple))
    return {
        (call // groups, call % groups): (slice(*q), slice(*k))
        for call, q, k in zip(calls.tolist(), *(h.tolist() for h in hulls), strict=True)
    }


def _whole_tiles(low: Int64, high: Int64, rows: Int64, multiple: int) -> Int64:
    """[first, end) of each hull. A single tile gets a neighbour, the one before it if there is."""
    first, end = low // multiple, -(-high // multiple)
    single = (end - first == 1) & (rows > multiple)
    before = single & (first > 0)
    first, end = first - before, end + (single & ~before)
    return np.stack([first * multiple, np.minimum(end * multiple, rows)], axis=1)


@dataclass(frozen=True, slots=True)
class KernelStyle:
    """What the memory of a call depends on, in a kernel and in how it is run.

    `merges`: forward calls add up what they compute; otherwise each leaves an output of its own,
    for all rows of the kernel tiles that it touches.
    `collects`: gradients collect in fp32 sums of the kernel's own order, over all calls of a
    program, with rows padded to `row_multiple` and head dims to `dim_multiple`. The only call of a
    rank without messages may be up to `most_sequences` whole sequences, each of which begins on
    such a border.
    `fixed`: where there are messages, inputs are copied to and results from the executor's own
    memory, so that everything between can be replayed as graphs.
    """

    merges: bool = True
    collects: bool = False
    fixed: bool = False
    row_multiple: int = 1
    dim_multiple: int = 1
    most_sequences: int = 0


@dataclass(frozen=True, eq=False)
class Contributions:
    """Ordered by space, head group, block and `time`, the index of the call's instruction. `wide`
    says whether the sum is left in the accumulator dtype: it is rounded to the final one when the
    last contribution is added."""

    time: Int64
    space: Int64
    head_group: Int64
    block: Int64
    first: Bool
    wide: Bool

    def __len__(self) -> int:
        return len(self.time)


def sends_wide(part: RankPlan) -> bool:
    """Whether partial results travel in another dtype than q's, and so from the wide sums."""
    return part.shape.partial_dtype not in (None, part.shape.dtype)


def find_contributions(part: RankPlan, mask: MaskPlan, program: Program) -> Contributions:
    """One contribution of every call to every block that it touches."""
    at, tiles = times_of(program, Op.COMPUTE)[program.tile_division], mask.tiles
    backward = program is mask.backward
    sides = [(Space.Q, tiles.q_block)] + [(Space.KV, tiles.k_block)] * backward
    columns = [_touched(at, space, tiles.head_group, block) for space, block in sides]
    time, space, group, block = np.concatenate(columns, axis=1)
    order = np.lexsort((time, block, group, space))
    time, space, group, block = (column[order] for column in (time, space, group, block))
    changes = (np.diff(space) != 0) | (np.diff(group) != 0) | (np.diff(block) != 0)
    some = np.ones(min(1, len(time)), np.bool_)
    first, last = np.concatenate([some, changes]), np.concatenate([changes, some])
    num_blocks = len(part.blocks)
    goes_on = result_keys(program.receives, num_blocks)
    if sends_wide(part):
        goes_on = np.concatenate([goes_on, result_keys(program.sends, num_blocks)])
    wide = ~last | np.isin(block_keys(space, group, block, num_blocks), goes_on)
    return Contributions(time, space, group, block, first, wide)


def _touched(at: Int64, space: int, group: Int32, block: Int32) -> Int64:
    blocks, groups = int(block.max(initial=0)) + 1, int(group.max(initial=0)) + 1
    key, block64 = np.divmod(np.unique((at * groups + group) * blocks + block), blocks)
    at, group64 = np.divmod(key, groups)
    return np.stack([at, np.full_like(at, space), group64, block64])


def times_of(program: Program, op: Op) -> Int64:
    """Index of each instruction of a kind by its argument; -1 where there is none."""
    ops, arguments = program.instructions[:, 0], program.instructions[:, 1]
    at = np.flatnonzero(ops == op)
    times = np.full(int(arguments.max(initial=-1)) + 1, -1, np.int64)
    times[arguments[at]] = at
    return times


def result_keys(messages: Messages, num_blocks: int) -> Int64:
    """`block_keys` of the results among these payloads."""
    at = np.flatnonzero(~IS_INPUT[messages.kind])
    space = OF_KEYS[messages.kind[at]].astype(np.int64)
    return block_keys(space, messages.head_group[at], messages.block[at], num_blocks)


def block_keys(space: Int64, group: Int64 | Int32, block: Int64 | Int32, num_blocks: int) -> Int64:
    """One number for a block of a head group in a workspace."""
    return (group.astype(np.int64) * len(Space) + space) * num_blocks + block
