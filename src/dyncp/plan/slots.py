"""Assigns slots: workspace rows for received blocks, reused once a block is no longer needed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dyncp.arrays import (
    Bool,
    Int32,
    Int64,
    bounds_of_ranks,
    frozen,
    sorted_order,
    split_by_rank,
    starts_of,
)
from dyncp.compiled import compiled, inner
from dyncp.plan.format import Op, Slots, Space


class BlockUses(NamedTuple):
    """Uses of blocks: rank, workspace, block and head group, and the index of the instruction."""

    rank: Int64
    space: Bool | int
    block: Int32
    head_group: Int32
    instruction: Int64

    def keys(self, num_blocks: int, num_groups: int) -> Int64:
        """A sort key for (rank, space, block, head group)."""
        place = (self.rank * len(Space) + self.space) * num_blocks + self.block
        keys: Int64 = place * num_groups + self.head_group
        return keys


def build_slots(
    received: BlockUses,
    uses: Sequence[BlockUses],
    steps: Int64,
    first_step: Int64,
    tokens: Int32,
    local_rows: Int64,
    num_groups: int,
    alignment: int,
) -> tuple[list[Slots], Int64]:
    """Slots of every rank, and the rows of every workspace [ranks, spaces, head groups].

    A slot lasts from the WAIT that receives its block (`received`) to the block's last use on that
    rank: a COMPUTE that reads it, or a LAUNCH that relays it or sends its result. Its rows are
    reused only after the rank's next COMPUTE, so that received blocks can be unpacked while the
    last use is still running. `steps` has the instructions of all ranks, those of rank r from
    first_step[r] on; `tokens` is by block, `local_rows` by rank."""
    sizes = len(tokens), num_groups
    shape = (len(local_rows), len(Space), num_groups)
    key = received.keys(*sizes)
    order = np.argsort(key)
    key, first = key[order], received.instruction[order]
    last, padded = first.copy(), np.append(key, -1)  # -1 equals no key
    for use in uses:
        used = use.keys(*sizes)
        slot = np.searchsorted(key, used)
        remote = padded[slot] == used
        np.maximum.at(last, slot[remote], use.instruction[remote])
    place, group = np.divmod(key, num_groups)
    place, block = np.divmod(place, len(tokens))
    rank, space = np.divmod(place, len(Space))
    until = _next_compute(steps, first_step, rank, last)
    workspace, size = place * num_groups + group, tokens[block].astype(np.int64)
    row, rows = place_slots(workspace, shape, first, until, size, local_rows, alignment)
    columns = [frozen(column) for column in (space, group, block, row, first, last)]
    return split_by_rank(Slots, columns, bounds_of_ranks(rank, len(local_rows))), rows


def _next_compute(steps: Int64, first_step: Int64, rank: Int64, instruction: Int64) -> Int64:
    """Index of a rank's next COMPUTE after each instruction, or of the instruction if none."""
    computes = np.append(np.flatnonzero(steps[:, 0] == Op.COMPUTE), len(steps))
    place = first_step[rank] + instruction
    after = computes[np.searchsorted(computes, place, "right")]
    found: Int64 = np.where(after < first_step[rank + 1], after, place) - first_step[rank]
    return found


def place_slots(
    workspace: Int64,
    shape: tuple[int, int, int],
    first: Int64,
    last: Int64,
    tokens: Int64,
    local_rows: Int64,
    alignment: int,
) -> tuple[Int64, Int64]:
    """First row of every slot, and the number of rows of each workspace, int64[shape]; `shape` is
    (ranks, spaces, head groups). First fit by first instruction, larger slots first on a tie."""
    num_workspaces, latest = shape[0] * shape[1] * shape[2], 1 + int(last.max(initial=0))
    size = -(-tokens // alignment) * alignment
    largest_first = np.argsort(-size, kind="stable")
    order = largest_first[
        sorted_order((first[largest_first], latest), (workspace[largest_first], num_workspaces))
    ]
    by_last = sorted_order((last, latest), (workspace, num_workspaces))
    bounds = starts_of(np.bincount(workspace, minlength=num_workspaces))
    rows = np.repeat(local_rows, num_workspaces // len(local_rows))
    end = -(-rows // alignment) * alignment
    row = _first_fit(end, bounds, order, by_last, first, last, size)
    return row, np.where(np.diff(bounds) > 0, end, rows).reshape(shape)


@compiled
def _first_fit(
    end: Int64,
    bounds: Int64,
    order: Int64,
    by_last: Int64,
    first: Int64,
    last: Int64,
    size: Int64,
) -> Int64:
    """Returns the first row of every slot, and raises `end`, the rows of every workspace. `order`
    and `by_last` sort the slots by workspace, then by first or last instruction. If no gap is large
    enough, the workspace grows; a gap at its end is used first."""
    row = np.empty_like(first)
    gaps = np.empty((len(first), 2), np.int64)  # (row, size) of free rows
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
    return row


@inner
def _give_back(gaps: Int64, num_gaps: int, row: int, size: int) -> int:
    """Inserts a gap, sorted by row; returns the new number of gaps."""
    place = num_gaps
    while place > 0 and gaps[place - 1, 0] > row:
        gaps[place, 0], gaps[place, 1] = gaps[place - 1, 0], gaps[place - 1, 1]
        place -= 1
    gaps[place, 0], gaps[place, 1] = row, size
    return num_gaps + 1


@inner
def _join_gaps(gaps: Int64, num_gaps: int) -> int:
    """Joins adjacent gaps and drops empty ones; returns the new number of gaps."""
    kept = 0
    for gap in range(num_gaps):
        if kept > 0 and gaps[kept - 1, 0] + gaps[kept - 1, 1] == gaps[gap, 0]:
            gaps[kept - 1, 1] += gaps[gap, 1]
        elif gaps[gap, 1] > 0:
            gaps[kept, 0], gaps[kept, 1] = gaps[gap, 0], gaps[gap, 1]
            kept += 1
    return kept
