"""What the longest rows of kernel tiles add to the calls that they are in."""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import Direction
from dyncp.cost.cost_model import CostModel, Numbers


class CallTiles(NamedTuple):
    """Tiles of many kernel calls, integers[tiles] each. Those with the same `cell` (a division of a
    rank) and `group` are one call."""

    cell: Int64
    group: Int64
    q_block: Int64
    k_block: Int64
    pairs: Numbers
    rows: Numbers
    keys: Numbers


def tail_seconds(
    tiles: CallTiles, num_cells: int, direction: Direction, cost: CostModel
) -> Float64 | None:
    """float64[cells]; None where the profile says nothing of tails."""
    if not cost.has_tail(direction):
        return None
    return cost.tail_seconds(longest_rows(tiles, num_cells, direction, cost), direction)


def longest_rows(
    tiles: CallTiles, num_cells: int, direction: Direction, cost: CostModel
) -> Float64:
    """Keys of the longest row of kernel tiles of every call, added up by cell: float64[cells].

    Forward, a row of kernel tiles covers what its query block attends in the call, the mean of its
    rows; backward works by key blocks. A query block that attends 300 keys of one block and 500 of
    another in the same call has a row of 800.
    """
    area = cost.kernel_area(tiles.pairs, tiles.rows, tiles.keys)
    backward = direction is Direction.BACKWARD
    block, side = (tiles.k_block, tiles.keys) if backward else (tiles.q_block, tiles.rows)
    num_groups, num_blocks = (int(x.max(initial=0)) + 1 for x in (tiles.group, block))
    key = (tiles.cell * num_groups + tiles.group) * num_blocks + block
    rows, of_row = np.unique(key, return_inverse=True)
    length = np.bincount(of_row, area / side, len(rows))
    calls, first = np.unique(rows // num_blocks, return_index=True)
    longest = np.maximum.reduceat(length, first) if len(first) else length
    found: Float64 = np.bincount(calls // num_groups, longest, num_cells).astype(np.float64)
    return found
