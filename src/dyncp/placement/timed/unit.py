"""Units: blocks of one sequence on one rank, with the tiles that run there because of them."""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.compiled import inner
from dyncp.placement.timed.estimate import StepEstimate, own, pin


class Unit(NamedTuple):
    """Room for one unit; `sizes` says how many tiles, blocks and edges it has now."""

    tiles: Int64
    blocks: Int64
    edges: Int64
    counts: Int64  # tiles of the unit that each of these edges has
    place: Int64  # [all edges] where an edge stands here, -1: nowhere
    sizes: Int64  # [3]
    load: Float64  # [rows of busy] seconds
    held: Float64  # [2] tokens and work


def make_unit(step: StepEstimate) -> Unit:
    tiles, edges = len(step.tile_rank), len(step.size)
    return Unit(
        np.empty(tiles + 1, np.int64),
        np.empty(len(step.block_rank), np.int64),
        np.empty(edges, np.int64),
        np.zeros(edges, np.int64),
        np.full(edges, -1),
        np.zeros(3, np.int64),
        np.zeros(len(step.busy)),
        np.zeros(2),
    )


@inner
def list_unit(step: StepEstimate, unit: Unit, first: int, end: int, r: int) -> None:
    """Blocks [first, end) of rank r, with their queries' tiles there, and with their keys' tiles
    that run there away from their queries."""
    groups, masks = step.sizes[2], step.sizes[3]
    for i in range(unit.sizes[2]):
        unit.place[unit.edges[i]] = -1
    for i in range(3):
        unit.sizes[i] = 0
    for i in range(len(unit.load)):
        unit.load[i] = 0.0
    for i in range(2):
        unit.held[i] = 0.0
    last = len(step.busy) - 1
    for b in range(first, end):
        if step.block_rank[b] == r:
            unit.blocks[unit.sizes[1]] = b
            unit.sizes[1] += 1
            unit.held[0] += step.tokens[b, 0]
            unit.load[last] += step.tokens[b, 1]
    for side in range(2):
        for j in range(unit.sizes[1]):
            for mask in range(masks):
                for g in range(groups):
                    e = ((2 * mask + side) * step.sizes[1] + unit.blocks[j]) * groups + g
                    _list_tiles(step, unit, e, r, side)


@inner
def _list_tiles(step: StepEstimate, unit: Unit, e: int, r: int, side: int) -> None:
    for i in range(step.start[e], step.start[e + 1]):
        t = step.members[i]
        if step.tile_rank[t] != r:
            continue
        if side == 1 and step.block_rank[step.edge[step.tile[t, 0], 0]] == r:
            continue
        unit.tiles[unit.sizes[0]] = t
        unit.sizes[0] += 1
        unit.held[1] += step.cost[t, 2]
        for d in range(2):
            unit.load[2 * step.tile[t, 2] + d] += step.cost[t, d]
        for k in range(2):
            f = step.tile[t, k]
            at = unit.place[f]
            if at < 0:
                at = unit.sizes[2]
                unit.place[f], unit.edges[at], unit.counts[at] = at, f, 0
                unit.sizes[2] += 1
            unit.counts[at] += 1


@inner
def put_unit(step: StepEstimate, unit: Unit, r: int, s: int) -> None:
    """Moves a unit from rank r to rank s, all but `tile_rank`, which `write_tiles` does."""
    size, machine = step.size, step.machine
    pins, users, busy = step.pins, step.users, step.busy
    edge, block_rank = step.edge, step.block_rank
    for row in range(len(unit.load)):
        busy[row, r] -= unit.load[row] * step.slow[r]
        busy[row, s] += unit.load[row] * step.slow[s]
    for what in range(2):
        step.held[r, what] -= unit.held[what]
        step.held[s, what] += unit.held[what]
    for i in range(unit.sizes[2]):
        e, n = unit.edges[i], unit.counts[i]
        row, o = edge[e, 1], block_rank[edge[e, 0]]
        pin(size, machine, pins, users, busy, row, e, s, o, n)
        pin(size, machine, pins, users, busy, row, e, r, o, -n)
    blocks, groups, masks = step.sizes[1], step.sizes[2], step.sizes[3]
    for j in range(unit.sizes[1]):
        b = unit.blocks[j]
        for side in range(2 * masks):
            for g in range(groups):
                e = (side * blocks + b) * groups + g
                own(size, machine, pins, users, busy, edge[e, 1], e, r, s)
        block_rank[b] = s
