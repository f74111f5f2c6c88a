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


class CallBlocks(NamedTuple):
    """Blocks whose rows calls work by (forward those of queries, backward of keys), one entry for
    every call and block, ordered by call: numbers[entries]. `first` is one of their tiles, and
    `of_tile`, numbers[tiles], the entry of each tile."""

    cell: Int64
    group: Int64
    block: Int64
    first: Int64
    of_tile: Int64

    @staticmethod
    def of(tiles: CallTiles, direction: Direction) -> "CallBlocks":
        block = tiles.k_block if direction is Direction.BACKWARD else tiles.q_block
        num_groups, num_blocks = (int(x.max(initial=0)) + 1 for x in (tiles.group, block))
        key = (tiles.cell * num_groups + tiles.group) * num_blocks + block
        keys, first, of_tile = np.unique(key, return_index=True, return_inverse=True)
        call, number = np.divmod(keys, num_blocks)
        return CallBlocks(call // num_groups, call % num_groups, number, first, of_tile)


def more_seconds(
    tiles: CallTiles,
    blocks: CallBlocks,
    tile_seconds: Float64,
    num_cells: int,
    direction: Direction,
    cost: CostModel,
) -> Float64:
    """What calls take on top of `tile_seconds`, float64[cells]."""
    work = call_work(tiles, blocks, direction, cost)
    calls = np.bincount(work.cell, cost.work_seconds(*work[1:], direction), num_cells)
    return np.asarray(calls - np.bincount(tiles.cell, tile_seconds, num_cells), np.float64)


def call_work(
    tiles: CallTiles, blocks: CallBlocks, direction: Direction, cost: CostModel
) -> CallWork:
    """The calls that tiles make, ordered by cell.

    Forward, a row of kernel tiles covers what its query block attends in the call, the mean of its
    rows; backward works by key blocks. A query block of 256 rows that attends 300 keys of one block
    and 500 of another in the same call has two rows of kernel tiles, of 800 keys.
    """
    sides = tiles.pairs, tiles.rows, tiles.keys
    area, edge = cost.kernel_area(*sides), cost.edge_area(*sides)
    side = tiles.keys if direction is Direction.BACKWARD else tiles.rows
    length = np.bincount(blocks.of_tile, area / side, len(blocks.cell))
    new = (np.diff(blocks.cell, prepend=-1) != 0) | (np.diff(blocks.group, prepend=-1) != 0)
    start, of_call = np.flatnonzero(new), np.cumsum(new) - 1
    calls = blocks.cell[start]
    rows = (side * tiles.heads)[blocks.first] / cost.profile.kernel_tile
    by_call = of_call[blocks.of_tile]
    return CallWork(
        calls,
        np.bincount(by_call, area * tiles.heads, len(calls)).astype(np.float64),
        np.bincount(by_call, edge * tiles.heads, len(calls)).astype(np.float64),
        np.bincount(of_call, rows, len(calls)).astype(np.float64),
        np.asarray(np.maximum.reduceat(length, start) if len(start) else length, np.float64),
    )
