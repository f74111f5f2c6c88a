"""Improves a placement by moves while they shorten the estimated step."""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int64, frozen
from dyncp.blocks import BlockGraph
from dyncp.compiled import compiled, inner
from dyncp.placement.placement import Limits, Placement, measure_balance
from dyncp.placement.step_estimate import (
    HIGH,
    LOW,
    Prices,
    StepEstimate,
    change_owner,
    estimate,
    make_estimate,
    num_edges,
    pin,
    seconds,
)
from dyncp.topology import Topology

# Units: blocks of one sequence on one rank, with the tiles that run there because of them.


class Unit(NamedTuple):
    """Scratch arrays for one unit; `sizes` has its current numbers of tiles, blocks and edges."""

    tiles: Int64
    blocks: Int64
    edges: Int64
    counts: Int64  # number of the unit's tiles that each of these edges has
    place: Int64  # [all edges] index of an edge in `edges`, or -1
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
    """Fills `unit` with the blocks of [first, end) on rank r, the tiles of their query rows there,
    and the tiles of their keys there whose query block has another owner."""
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
    """Moves a unit from rank r to rank s, except for `tile_rank`, which `_move` updates."""
    size, node = step.size, step.node
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
        pin(size, node, pins, users, busy, row, e, s, o, n)
        pin(size, node, pins, users, busy, row, e, r, o, -n)
    blocks, groups, masks = step.sizes[1], step.sizes[2], step.sizes[3]
    for j in range(unit.sizes[1]):
        b = unit.blocks[j]
        for side in range(2 * masks):
            for g in range(groups):
                e = (side * blocks + b) * groups + g
                change_owner(size, node, pins, users, busy, edge[e, 1], e, r, s)
        block_rank[b] = s


# How many ranks are tried: owners of other blocks of the sequence, and the least busy ranks of the
# node and of all. Without RELATED steps take 1.06 times as long, without NEAR 1.001, without FAR
# 1.012 (24 cases).
RELATED, NEAR, FAR = 4, 3, 3
# A sweep that shortens the estimate by less than this share is the last one. With 0, steps are
# 0.3 % shorter, but planning takes 1.2 times as long.
WORTH_SWEEP = 0.01
# Sweeping ends after looking at this many edges and resources, which takes about 50 ms.
MOST_LOOKED_AT = 6_000_000
# A resource is busy if its load is at least this share of the busiest. With 0.95 steps take 1.016
# times as long, and with 0 1.13, since sweeps then end too early.
HOT = 0.8


# Functions that are called often take arrays rather than the whole estimate: numba takes long to
# compile functions whose arguments hold many arrays.
@inner
def _mark_hot(busy: Float64, weight: Float64, per_node: int, hot: Bool, load: Float64) -> None:
    """Marks ranks with a busy resource, their own or their node's, in `hot`, and writes the compute
    seconds of every rank to `load`."""
    ranks = len(hot)
    nodes = ranks // per_node
    for r in range(ranks):
        hot[r], load[r] = False, 0.0
    for row in range(len(busy)):
        for r in range(ranks):
            load[r] += weight[row] * busy[row, r]
        most = 0.0
        for at in range(busy.shape[1]):
            most = max(most, HOT * busy[row, at])
        if most == 0 or weight[row] == 0:
            continue
        for r in range(ranks):
            m = 3 * ranks + r // per_node
            for at in (r, ranks + r, 2 * ranks + r, m, m + nodes):
                if busy[row, at] >= most:
                    hot[r] = True


@inner
def _find_targets(
    load: Float64, span: Int64, block_rank: Int64,
    b: int, r: int, per_node: int, target: Int64, known: Bool,
) -> int:  # fmt: skip
    """Writes the ranks that a unit of block b's sequence on rank r may go to; returns how many.
    `known` is all False before and after."""
    size, known[r] = 0, True
    for way in (-1, 1):  # the nearest blocks on other ranks
        c = b + way
        while span[b, 0] <= c < span[b, 1] and size < (2 if way < 0 else RELATED):
            s = block_rank[c]
            if not known[s]:
                known[s] = True
                target[size] = s
                size += 1
            c += way
    home = r // per_node * per_node
    for far in range(2):
        for _ in range(FAR if far else NEAR):
            best, least = -1, np.inf
            for s in range(0 if far else home, len(load) if far else home + per_node):
                if load[s] < least and not known[s]:
                    best, least = s, load[s]
            if best < 0:
                break
            known[best] = True
            target[size] = best
            size += 1
    known[r] = False
    for i in range(size):
        known[target[i]] = False
    return size


@inner
def _fits(held: Float64, most: Float64, more: Float64, s: int) -> bool:
    for what in range(2):
        if more[what] > 0 and held[s, what] + more[what] > most[s, what]:
            return False
    return True


@inner
def _move(
    step: StepEstimate, unit: Unit, r: int, target: Int64, size: int, now: float, power: int
) -> float:
    """Moves the unit to the rank with the least estimate; returns that estimate."""
    best, best_s, at = now, r, r
    for i in range(size):
        s = target[i]
        if not _fits(step.held, step.most, unit.held, s):
            continue
        put_unit(step, unit, at, s)
        at = s
        found = seconds(step.busy, step.weight, len(step.slow), power)
        if found < best:
            best, best_s = found, s
    if at != best_s:
        put_unit(step, unit, at, best_s)
    if best_s == r:
        return now
    for i in range(unit.sizes[0]):
        step.tile_rank[unit.tiles[i]] = best_s
    return best


@compiled
def sweep(step: StepEstimate, unit: Unit, most: int, power: int) -> float:
    """Makes at most `most` sweeps over units, with counts that are up to date; returns the final
    estimate. `unit` is scratch space for the unit that is tried."""
    ranks, spent = len(step.slow), 0
    target = np.empty(RELATED + NEAR + FAR, np.int64)
    hot, known = np.zeros(ranks, np.bool_), np.zeros(ranks, np.bool_)
    done, load, per_node = np.zeros(ranks, np.int64), np.zeros(ranks), step.sizes[0]
    now = seconds(step.busy, step.weight, ranks, power)
    for _ in range(most):
        before = now
        for single in range(2):
            for r in range(ranks):
                done[r] = -1  # first block of the last sequence tried on this rank
            _mark_hot(step.busy, step.weight, per_node, hot, load)
            for b in range(len(step.block_rank)):
                first, end, r = step.span[b, 0], step.span[b, 1], step.block_rank[b]
                alone = end - first == 1 if single else done[r] == first
                if alone or not hot[r] or spent > MOST_LOOKED_AT:
                    continue
                done[r] = first
                list_unit(step, unit, b if single else first, b + 1 if single else end, r)
                size = _find_targets(
                    load, step.span, step.block_rank, b, r, per_node, target, known
                )
                spent += size * (unit.sizes[2] + step.busy.shape[1])
                found = _move(step, unit, r, target, size, now, power)
                if found < now:
                    now = found
                    _mark_hot(step.busy, step.weight, per_node, hot, load)
        if now < before:
            now = estimate(step, power)  # counts again, since rounding errors add up
        if now > before * (1 - WORTH_SWEEP):
            break
    return now


# Maximum number of sweeps with a low and with a high power of means.
SWEEPS = ((LOW, 4), (HIGH, 3))
# Batches whose tables of edges × ranks would be larger are not improved.
MOST_COUNTS = 1 << 26


def improve(
    graph: BlockGraph,
    placement: Placement,
    topology: Topology,
    limits: Limits,
    prices: Prices,
    worth: float = 1.0,
) -> Placement | None:
    """A placement with a shorter estimated step, whose blocks are sent only where they are used. It
    keeps every limit that the given placement keeps. None if no move helps, or if the estimate is
    already below `worth` times the computation alone."""
    if num_edges(graph) * topology.num_ranks > MOST_COUNTS:
        return None
    step = make_estimate(graph, placement, topology, limits, prices)
    start = estimate(step, HIGH)
    if start < worth * _alone(step):
        return None
    unit = make_unit(step)
    _, end = (sweep(step, unit, most, power) for power, most in SWEEPS)
    if end >= start and not placement.static:
        return None
    found = _placement(graph, step)
    # With different speeds, moves change the mean, and so the shares of all ranks.
    after, before = (
        measure_balance(graph, own, limits, topology.rank_speeds) for own in (found, placement)
    )
    return found if after.missed <= before.missed else None


def _placement(graph: BlockGraph, step: StepEstimate) -> Placement:
    ends = np.cumsum([len(tiles) for tiles in graph.tiles.values()])[:-1]
    parts = np.split(step.tile_rank, ends)
    tile_rank = {name: frozen(own) for name, own in zip(graph.tiles, parts, strict=True)}
    return Placement(len(step.slow), frozen(step.block_rank), tile_rank, "improved", static=False)


def _alone(step: StepEstimate) -> float:
    """The estimate without communication and with perfect balance."""
    return float((step.weight * step.busy[:, : len(step.slow)].mean(axis=1)).sum())
