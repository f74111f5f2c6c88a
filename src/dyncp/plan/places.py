"""Where blocks lie in a rank's workspaces, and which rows a kernel call touches."""

import numpy as np

from dyncp.arrays import Int64
from dyncp.plan.rank_plan import MaskPlan, Program, RankPlan, Space


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
