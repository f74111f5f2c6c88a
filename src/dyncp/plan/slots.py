"""Slots: workspace rows for received blocks, reused once their block is no longer needed."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dyncp.arrays import Int64, frozen, sorted_order, split_by_rank, starts_of
from dyncp.compiled import compiled, inner
from dyncp.plan.format import Slots, Space


class BlockUses(NamedTuple):
    """Blocks that instruction `at` of a rank needs; rank r's are at `of_rank[r]:of_rank[r + 1]`.

    `key` is (space × blocks + block) × head groups + head group."""

    key: Int64
    at: Int64
    of_rank: Int64


def build_slots(
    received: BlockUses,
    uses: Sequence[BlockUses],
    next_compute: Callable[[Int64, Int64], Int64],
    tokens: Int64,
    local_rows: Int64,
    num_groups: int,
    alignment: int,
) -> tuple[list[Slots], Int64]:
    """Slots of every rank, and the rows of every workspace [ranks, spaces, head groups].

    A block stays from the WAIT that brings it to the last of its uses on that rank: a COMPUTE that
    reads it, or a LAUNCH that sends its result or relays it. Its rows stay free until the next
    COMPUTE after that (`next_compute`), so that they can be filled while the use is still under
    way. `tokens` has one entry per block, `local_rows` one per rank."""
    num_ranks, num_keys = len(local_rows), len(Space) * len(tokens) * num_groups
    rank = np.repeat(np.arange(num_ranks), np.diff(received.of_rank))
    order = sorted_order((received.key, num_keys), (rank, num_ranks))
    key, first, rank = received.key[order], received.at[order], rank[order]
    last, slot_of = first.copy(), np.full(num_keys, -1, np.int64)
    for side in uses:
        _extend(last, key, received.of_rank, side.key, side.at, side.of_rank, slot_of)
    place, group = np.divmod(key, num_groups)
    space, block = np.divmod(place, len(tokens))
    shape = (num_ranks, len(Space), num_groups)
    workspace = (rank * len(Space) + space) * num_groups + group
    until = next_compute(rank, last)
    row, rows = place_slots(workspace, shape, first, until, tokens[block], local_rows, alignment)
    columns = [frozen(column) for column in (space, group, block, row, first, last)]
    return split_by_rank(Slots, columns, received.of_rank), rows


@compiled
def _extend(
    last: Int64,
    key: Int64,
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
            slot_of[key[slot]] = slot
        for use in range(uses_of_rank[rank], uses_of_rank[rank + 1]):
            slot = slot_of[used[use]]
            if slot >= 0:
                last[slot] = max(last[slot], used_at[use])
        for slot in range(of_rank[rank], of_rank[rank + 1]):
            slot_of[key[slot]] = -1


def place_slots(
    workspace: Int64,
    shape: tuple[int, int, int],
    first: Int64,
    last: Int64,
    tokens: Int64,
    local_rows: Int64,
    alignment: int,
) -> tuple[Int64, Int64]:
    """First row of every slot, and the rows of all workspaces, which have `shape` [ranks, spaces,
    head groups]. By first fit; of slots that begin together the largest goes first."""
    num_workspaces, latest = shape[0] * shape[1] * shape[2], 1 + int(last.max(initial=0))
    size = -(-tokens // alignment) * alignment
    largest_first = np.argsort(-size, kind="stable")
    order = largest_first[
        sorted_order((first[largest_first], latest), (workspace[largest_first], num_workspaces))
    ]
    by_last = sorted_order((last, latest), (workspace, num_workspaces))
    bounds = starts_of(np.bincount(workspace, minlength=num_workspaces))
    rows = np.repeat(local_rows, num_workspaces // len(local_rows))
    row, end = np.empty_like(first), -(-rows // alignment) * alignment
    gaps = np.empty((len(first), 2), np.int64)
    _first_fit(row, end, bounds, order, by_last, first, last, size, gaps)
    return row, np.where(np.diff(bounds) > 0, end, rows).reshape(shape)


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
