"""Slots: workspace rows for received blocks, reused once their block is no longer needed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int32, Int64, sorted_order
from dyncp.compiled import compiled, inner
from dyncp.plan.format import Space


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """Received blocks of all ranks, ordered by rank, space, block and head group, and the first and
    last instruction between which each must stay. Rank r's are at `of_rank[r]:of_rank[r + 1]`."""

    rank: Int64
    space: Int64
    block: Int64
    head_group: Int64
    first: Int64
    last: Int64
    of_rank: Int64


@dataclass(frozen=True, eq=False)
class BlockUses:
    """Blocks that instruction `at` of a rank needs, ordered by rank as `of_rank` says."""

    space: Int64
    block: Int64
    head_group: Int64
    at: Int64
    of_rank: Int64

    @staticmethod
    def of(
        space: npt.NDArray[Any], block: Int32, head_group: Int32, at: Int64, of_rank: Int64
    ) -> "BlockUses":
        space, block64, group = (x.astype(np.int64) for x in (space, block, head_group))
        return BlockUses(space, block64, group, at, of_rank)


def find_lifetimes(
    received: BlockUses, rank: Int64, uses: list[BlockUses], num_blocks: int
) -> Lifetimes:
    """A block stays from the WAIT that brings it (`received`, on `rank`) to the last of its uses on
    that rank: a COMPUTE that reads it, or a LAUNCH that sends its result or relays it."""
    num_groups = 1 + max(int(side.head_group.max(initial=0)) for side in (received, *uses))
    order = sorted_order(
        (received.head_group, num_groups),
        (received.block, num_blocks),
        (received.space, len(Space)),
        (rank, len(received.of_rank) - 1),
    )
    space, block, group, first, rank = (
        column[order]
        for column in (received.space, received.block, received.head_group, received.at, rank)
    )
    last, slot_of = first.copy(), np.full(len(Space) * num_blocks * num_groups, -1, np.int64)
    place = (space * num_blocks + block) * num_groups + group
    for side in uses:
        used = (side.space * num_blocks + side.block) * num_groups + side.head_group
        _extend(last, place, received.of_rank, used, side.at, side.of_rank, slot_of)
    return Lifetimes(rank, space, block, group, first, last, received.of_rank)


@compiled
def _extend(
    last: Int64,
    place: Int64,
    of_rank: Int64,
    used: Int64,
    used_at: Int64,
    uses_of_rank: Int64,
    slot_of: Int64,
) -> None:
    """Extends every slot to its last use. `slot_of` is -1 everywhere, before and after: own blocks
    have no slot."""
    for rank in range(len(of_rank) - 1):
        for slot in range(of_rank[rank], of_rank[rank + 1]):
            slot_of[place[slot]] = slot
        for use in range(uses_of_rank[rank], uses_of_rank[rank + 1]):
            slot = slot_of[used[use]]
            if slot >= 0:
                last[slot] = max(last[slot], used_at[use])
        for slot in range(of_rank[rank], of_rank[rank + 1]):
            slot_of[place[slot]] = -1


def place_slots(
    spans: Lifetimes, tokens: Int64, num_groups: int, local_rows: Int64, alignment: int
) -> tuple[Int64, Int64]:
    """First row of every slot, and the rows of every workspace [ranks, spaces, head groups].

    `local_rows` has one entry per rank."""
    num_workspaces = len(local_rows) * len(Space) * num_groups
    workspace = (spans.rank * len(Space) + spans.space) * num_groups + spans.head_group
    size = _aligned(tokens[spans.block], alignment)
    row, end = _fit_workspaces(
        workspace, num_workspaces, spans.first, spans.last, size, _aligned(local_rows, alignment)
    )
    rows = np.repeat(local_rows, len(Space) * num_groups)
    filled = np.bincount(workspace, minlength=num_workspaces) > 0
    rows[filled] = end[filled]
    return row, rows.reshape(len(local_rows), len(Space), num_groups)


def _aligned(rows: Int64, alignment: int) -> Int64:
    return -(-rows // alignment) * alignment


def _fit_workspaces(
    workspace: Int64,
    num_workspaces: int,
    first: Int64,
    last: Int64,
    size: Int64,
    first_row: Int64,
) -> tuple[Int64, Int64]:
    """First row of every slot and the end of every workspace, by first fit; of slots that begin
    together the largest goes first. `first_row` holds for equal shares of the workspaces."""
    latest = 1 + int(last.max(initial=0))
    largest_first = np.argsort(-size, kind="stable")
    order = largest_first[
        sorted_order((first[largest_first], latest), (workspace[largest_first], num_workspaces))
    ]
    by_last = sorted_order((last, latest), (workspace, num_workspaces))
    bounds = np.searchsorted(workspace[order], np.arange(num_workspaces + 1))
    row, end = np.empty_like(first), np.repeat(first_row, num_workspaces // len(first_row))
    gaps = np.empty((len(first), 2), np.int64)
    _first_fit(row, end, bounds, order, by_last, first, last, size, gaps)
    return row, end


@compiled
def _first_fit(
    row: Int64,
    end: Int64,
    bounds: Int64,
    order: Int64,
    by_last: Int64,
    first: Int64,
    last: Int64,
    size: Int64,
    gaps: Int64,
) -> None:
    """`order` and `by_last` sort the slots by workspace, then by first and by last instruction;
    `gaps` is scratch for the (row, size) of free rows. Where no gap is large enough, one that ends
    with the workspace grows."""
    for workspace in range(len(end)):
        num_gaps, freed = int(np.int64(0)), bounds[workspace]  # a literal 0 is a type of its own
        for place in range(bounds[workspace], bounds[workspace + 1]):
            slot = order[place]
            while last[by_last[freed]] < first[slot]:
                num_gaps = _give_back(gaps, num_gaps, row[by_last[freed]], size[by_last[freed]])
                freed += 1
            num_gaps = _join_gaps(gaps, num_gaps)
            row[slot] = end[workspace]
            for gap in range(num_gaps):
                free, space = gaps[gap, 0], gaps[gap, 1]
                if space >= size[slot] or free + space == end[workspace]:
                    row[slot] = free
                    gaps[gap, 0], gaps[gap, 1] = free + size[slot], max(space - size[slot], 0)
                    break
            end[workspace] = max(end[workspace], row[slot] + size[slot])


@inner
def _give_back(gaps: Int64, num_gaps: int, row: int, size: int) -> int:
    """Adds a gap where its row belongs; gives the number of gaps."""
    place = num_gaps
    while place > 0 and gaps[place - 1, 0] > row:
        gaps[place, 0], gaps[place, 1] = gaps[place - 1, 0], gaps[place - 1, 1]
        place -= 1
    gaps[place, 0], gaps[place, 1] = row, size
    return num_gaps + 1


@inner
def _join_gaps(gaps: Int64, num_gaps: int) -> int:
    """Joins gaps that touch and drops empty ones; gives the number that stays."""
    kept = 0
    for gap in range(num_gaps):
        if kept > 0 and gaps[kept - 1, 0] + gaps[kept - 1, 1] == gaps[gap, 0]:
            gaps[kept - 1, 1] += gaps[gap, 1]
        elif gaps[gap, 1] > 0:
            gaps[kept, 0], gaps[kept, 1] = gaps[gap, 0], gaps[gap, 1]
            kept += 1
    return kept
