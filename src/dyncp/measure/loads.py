"""What every rank computes in every division, in the units that cost models are fitted with."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import DEFAULT_MASK, Batch, Direction
from dyncp.cost import CostModel
from dyncp.cost.cost_model import CallBlocks, CallTiles, call_work
from dyncp.masks import Mask
from dyncp.plan import Plan, RankPlan

# sequence → (query block, key block) → kernel tiles, so that each is counted once
Touched = dict[int, dict[tuple[int, int], int]]


@dataclass(frozen=True, slots=True)
class Load:
    """One division of one rank. `pairs`, `area`, `edge` and `tile_rows` (of the cost model) and
    `kernel_tiles` count every q head; `rows` and `keys` are those of the blocks that it reads,
    `calls` its kernel calls, `longest` the keys of their longest rows of kernel tiles."""

    rank: int
    division: int
    pairs: int
    area: float
    edge: float
    tile_rows: float
    longest: float
    kernel_tiles: int
    tiles: int
    rows: int
    keys: int
    calls: int
    predicted_seconds: float


def plan_loads(plan: Plan, batch: Batch, direction: Direction, cost: CostModel) -> list[Load]:
    """All divisions of all ranks that have tiles, in the order of ranks and divisions."""
    touched: Touched = {index: {} for index in range(len(batch.lengths))}
    return [
        load for part in plan.parts for load in _rank_loads(part, batch, direction, cost, touched)
    ]


def _rank_loads(
    part: RankPlan,
    batch: Batch,
    direction: Direction,
    cost: CostModel,
    touched: Touched,
) -> Iterator[Load]:
    mask = part.mask_plan(DEFAULT_MASK)
    tiles, division = mask.tiles, mask.program(direction).tile_division
    tokens = part.blocks.tokens.astype(np.int64)
    heads = cost.heads_of(part.groups_for(cost.shape))[tiles.head_group]
    pairs = tiles.pairs.astype(np.int64)
    sides = pairs, tokens[tiles.q_block], tokens[tiles.k_block]
    cell, group, q_block, k_block = (
        x.astype(np.int64) for x in (division, tiles.head_group, tiles.q_block, tiles.k_block)
    )
    called = CallTiles(cell, group, q_block, k_block, *sides, heads)
    calls = call_work(called, CallBlocks.of(called, direction), direction, cost)
    num_divisions = int(division.max(initial=-1)) + 1
    work = calls.by_cell(num_divisions)
    seconds = np.bincount(calls.cell, cost.work_seconds(*calls[1:], direction), num_divisions)
    listed = heads * _kernel_tiles(part, batch, cost.profile.kernel_tile, touched)
    for number in np.unique(division).tolist():
        own = division == number
        num_calls = len(np.unique(tiles.head_group[own]))
        yield Load(
            rank=part.rank,
            division=number,
            pairs=int((pairs * heads)[own].sum()),
            area=float(work.area[number]),
            edge=float(work.edge[number]),
            tile_rows=float(work.rows[number]),
            longest=float(work.longest[number]),
            kernel_tiles=int(listed[own].sum()),
            tiles=int(own.sum()),
            rows=int(tokens[np.unique(tiles.q_block[own])].sum()),
            keys=int(tokens[np.unique(tiles.k_block[own])].sum()),
            calls=num_calls,
            predicted_seconds=float(seconds[number] + cost.call_seconds(num_calls)),
        )


def _kernel_tiles(part: RankPlan, batch: Batch, side: int, touched: Touched) -> Int64:
    """Kernel tiles that each tile touches, one head, if its blocks start on their borders."""
    tiles, blocks = part.mask_plan(DEFAULT_MASK).tiles, part.blocks
    counts = np.zeros(len(tiles.q_block), np.int64)
    for i, (q, k) in enumerate(zip(tiles.q_block.tolist(), tiles.k_block.tolist(), strict=True)):
        sequence = int(blocks.sequence[q])
        known = touched[sequence]
        if (q, k) not in known:
            mask = batch.masks[DEFAULT_MASK][sequence]
            rows, keys = ((int(blocks.start[b]), int(blocks.end[b])) for b in (q, k))
            known[q, k] = count_kernel_tiles(mask, rows, keys, side)
        counts[i] = known[q, k]
    return counts


def count_kernel_tiles(mask: Mask, rows: tuple[int, int], keys: tuple[int, int], side: int) -> int:
    """Kernel tiles of a query block × key block with an allowed pair, counted from its corner.

    A causal 1024 × 1024 block has 36 of side 128."""
    ranges = mask.ranges[slice(*rows)].clip(*keys).astype(np.int64) - keys[0]
    first = np.arange(0, len(ranges), side)
    width = -(-(keys[1] - keys[0]) // side)
    hit = np.zeros((len(first), width + 1), np.int64)
    for column in range(ranges.shape[1]):
        start, end = ranges[:, column, 0], ranges[:, column, 1]
        some = end > start
        # Rows of a kernel tile attend overlapping stretches in all masks but the wildest.
        low = np.minimum.reduceat(np.where(some, start // side, width), first)
        high = np.maximum.reduceat(np.where(some, -(-end // side), 0), first)
        filled = np.flatnonzero(high > low)
        np.add.at(hit, (filled, low[filled]), 1)
        np.add.at(hit, (filled, high[filled]), -1)
    return int((hit.cumsum(axis=1)[:, :width] > 0).sum())


def rank_pairs(plan: Plan, cost: CostModel) -> Float64:
    """Pairs × q heads that each rank computes."""
    found = []
    for part in plan.parts:
        tiles = part.mask_plan(DEFAULT_MASK).tiles
        heads = cost.heads_of(part.groups_for(cost.shape))[tiles.head_group]
        found.append(float((tiles.pairs.astype(np.int64) * heads).sum()))
    return np.asarray(found, np.float64)
