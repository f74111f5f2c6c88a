"""Seconds of kernel calls: what their rows of kernel tiles add to the tiles themselves."""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import Direction
from dyncp.cost.cost_model import CostModel, Numbers


class CallTiles(NamedTuple):
    """Tiles of many kernel calls, numbers[tiles] each. Those with the same `cell` (a division of a
    rank) and `group` are one call; `heads` are the q heads of the group."""

    cell: Int64
    group: Int64
    q_block: Int64
    k_block: Int64
    pairs: Numbers
    rows: Numbers
    keys: Numbers
    heads: Int64


class CallWork(NamedTuple):
    """Kernel calls, numbers[calls] each: `area` and `edge` of the cost model, and `rows` of kernel
    tiles, all times q heads; `longest` are the keys of the longest row."""

    cell: Int64
    area: Float64
    edge: Float64
    rows: Float64
    longest: Float64

    def by_cell(self, num_cells: int) -> "CallWork":
        """Calls of a cell added up."""
        sums = [np.bincount(self.cell, column, num_cells) for column in self[1:]]
        return CallWork(np.arange(num_cells), *(x.astype(np.float64) for x in sums))


def more_seconds(
    tiles: CallTiles, tile_seconds: Float64, num_cells: int, direction: Direction, cost: CostModel
) -> Float64 | None:
    """What calls take on top of `tile_seconds`, float64[cells]; None where the profile says nothing
    of rows."""
    if not cost.knows_rows(direction):
        return None
    work = call_work(tiles, direction, cost)
    calls = np.bincount(work.cell, cost.work_seconds(*work[1:], direction), num_cells)
    return np.asarray(calls - np.bincount(tiles.cell, tile_seconds, num_cells), np.float64)


def call_work(tiles: CallTiles, direction: Direction, cost: CostModel) -> CallWork:
    """The calls that tiles make, ordered by cell.

    Forward, a row of kernel tiles covers what its query block attends in the call, the mean of its
    rows; backward works by key blocks. A query block of 256 rows that attends 300 keys of one block
    and 500 of another in the same call has two rows of kernel tiles, of 800 keys.
    """
    sides = tiles.pairs, tiles.rows, tiles.keys
    area, edge = cost.kernel_area(*sides), cost.edge_area(*sides)
    backward = direction is Direction.BACKWARD
    block, side = (tiles.k_block, tiles.keys) if backward else (tiles.q_block, tiles.rows)
    num_groups, num_blocks = (int(x.max(initial=0)) + 1 for x in (tiles.group, block))
    key = (tiles.cell * num_groups + tiles.group) * num_blocks + block
    blocks, first, of_block = np.unique(key, return_index=True, return_inverse=True)
    length = np.bincount(of_block, area / side, len(blocks))
    calls, start, of_call = np.unique(blocks // num_blocks, return_index=True, return_inverse=True)
    rows = (side * tiles.heads)[first] / cost.profile.kernel_tile
    by_call = of_call[of_block]
    return CallWork(
        calls // num_groups,
        np.bincount(by_call, area * tiles.heads, len(calls)).astype(np.float64),
        np.bincount(by_call, edge * tiles.heads, len(calls)).astype(np.float64),
        np.bincount(of_call, rows, len(calls)).astype(np.float64),
        np.asarray(np.maximum.reduceat(length, start) if len(start) else length, np.float64),
    )
