"""Puts tiles into divisions and transfers into phases.

Remote inputs are paced (see pace.py): blocks of the own node in the order of their owners'
distance, so that ranks do not all ask the same owner first; blocks of other nodes in equal
shares of every pair of rank and node (see routes.py for their ways). That gives every tile the
earliest division in which its inputs are there; tiles that wait for nothing slow then fill the gaps
(see fill.py). A block's partial result goes back as soon as its last tile on that rank is done.
"""

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.blocks import BlockGraph, Direction
from dyncp.placement import Placement
from dyncp.schedule.launch import Launches, number_launches
from dyncp.schedule.pace import Load, Needs, Pace, fill, find_turns, share_phases
from dyncp.schedule.routes import Crossings, Routes, find_crossings, find_routes, travel_seconds
from dyncp.schedule.schedule import Schedule
from dyncp.schedule.uses import Uses, Work, find_uses, payloads

# Results over node borders that take less than this share of the computation leave together.
SMALL = 0.2


def build_schedule(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    direction: Direction,
    num_divisions: int,
    pace: Pace | None = None,
) -> Schedule:
    """Schedule of one mask and direction. Slow inputs come in at most `num_divisions` - 1 phases;
    one more division follows where blocks are passed on inside a node, and one or two more where
    other tiles hide the last results."""
    pace = pace or Pace.assumed(graph, placement.num_ranks)
    seconds = pace.cost.graph_tile_seconds(graph, name, direction)
    uses, work = find_uses(graph, placement, name, direction, seconds)
    # Static methods send straight from the owner, as their originals do.
    crossings = find_crossings(uses, pace.topology, joined=not placement.static)
    load = _load(uses, work, crossings, pace)
    results = bool(uses.result_bytes.any())
    rows = float(graph.blocks.tokens.sum()) / placement.num_ranks
    least = pace.least_seconds(rows, direction)
    worth = pace.cost.division_seconds(rows, direction)
    shares = share_phases(load, num_divisions, least, results=results)
    routes, arrives = _route(uses, crossings, shares, pace)
    earliest = np.append(arrives, 0)[work.use].max(axis=0)
    slow = _slow_tiles(work, routes)
    together = load.result_travel < SMALL * (load.local + load.near + load.far)
    needs = Needs(
        _slow_arrivals(uses, routes, load, shares, pace),
        _result_seconds(uses, routes, work, earliest, slow, together, pace, worth),
    )
    turn = find_turns(pace.cost, graph, name, direction)
    tile_division = fill(earliest, slow, work, needs, placement.num_ranks, turn)
    first, last = work.first_and_last(tile_division, len(uses))
    arrives = np.where(routes.straight, first, arrives)
    leaves = _departures(last, routes, int(earliest.max(initial=0)) if together else 0)
    return number_launches(
        tile_division, Launches(uses, routes, arrives, leaves), payloads(direction)
    )


def _load(uses: Uses, work: Work, crossings: Crossings, pace: Pace) -> Load:
    topology, ranks = pace.topology, pace.topology.num_ranks
    needs_far = np.append(crossings.mark(len(uses)), False)[work.use].any(axis=0)
    kinds = (work.local, ~work.local & ~needs_far, needs_far)
    local, close, distant = (float(work.seconds[kind].sum()) / ranks for kind in kinds)
    near, first = ~crossings.mark(len(uses)), crossings.firsts
    size = uses.num_bytes.astype(np.float64)
    busiest = max(np.bincount(end[near], size[near], 1).max() for end in (uses.rank, uses.owner))
    node = np.bincount(uses.rank[first] // topology.ranks_per_node, size[first], 1).max()
    nic = np.bincount(uses.owner[first] // topology.ranks_per_nic, size[first], 1).max()
    border = max(nic, node / topology.nics) / topology.nic_bandwidth
    back = uses.result_bytes[first].sum() / max(uses.num_bytes[first].sum(), 1)
    inside = float(busiest) / topology.intra.bandwidth
    return Load(local, close, distant, inside, float(border), float(border * back))


def _route(
    uses: Uses, crossings: Crossings, shares: tuple[Float64, Float64], pace: Pace
) -> tuple[Routes, Int64]:
    """How blocks travel, and the division that each use has its block for."""
    topology, first = pace.topology, crossings.firsts
    lane = uses.owner * topology.nodes + uses.rank // topology.ranks_per_node
    turn = _spread(lane[first], (uses.block, uses.head_group, uses.side), uses, first, shares[1])
    routes = find_routes(uses, crossings, turn, topology)
    arrives = np.zeros(len(uses), np.int64)
    arrives[crossings.order] = np.repeat(turn, np.diff(crossings.start))
    arrives[routes.passed_on] += 1
    near = np.flatnonzero(routes.straight)
    distance = (uses.owner - uses.rank) % topology.num_ranks
    order = (distance, uses.block, uses.head_group, uses.side)
    arrives[near] = _spread(uses.rank[near], order, uses, near, shares[0])
    return routes, arrives


def _spread(lane: Int64, order: tuple[Int64, ...], uses: Uses, at: Int64, shares: Float64) -> Int64:
    """Division of the uses `at`: those of every lane, in order, cut by cumulated shares. No two are
    alike in lane and order."""
    key = lane
    for column in order:
        key = key * (int(column.max(initial=0)) + 1) + column[at]
    by = np.argsort(key)
    size, lane = uses.num_bytes[at[by]].astype(np.float64), lane[by]
    total = np.bincount(lane, size)
    middle = np.cumsum(size) - (np.cumsum(total) - total)[lane] - size / 2
    division = np.empty(len(at), np.int64)
    division[by] = 1 + np.searchsorted(shares[:-1], middle / total[lane])
    return division


def _slow_tiles(work: Work, routes: Routes) -> Bool:
    """Tiles that need a block of another node; if there are none, those that need any."""
    if routes.crosses.any():
        return np.asarray(np.append(~routes.straight, False)[work.use].any(axis=0))
    return ~work.local


def _slow_arrivals(
    uses: Uses, routes: Routes, load: Load, shares: tuple[Float64, Float64], pace: Pace
) -> Float64:
    """When the slow inputs of divisions 1, 2, ... are there."""
    if not routes.crosses.any():
        return load.near_travel * shares[0]
    times = load.far_travel * shares[1]
    if len(routes.passed_on):
        hop, _ = travel_seconds(uses, routes, uses.num_bytes * (routes.relay >= 0), pace.topology)
        times = np.append(times, times[-1] + hop / len(times))
    return times


def _result_seconds(
    uses: Uses,
    routes: Routes,
    work: Work,
    division: Int64,
    slow: Bool,
    together: bool,
    pace: Pace,
    worth: float,
) -> Float64:
    """How long the last results of slow tiles travel: in one step, or in two where they are first
    summed inside a node; no step where they take less than a division is `worth`."""
    late = np.zeros(len(uses) + 1, np.bool_)
    late[work.use[:, slow & (division == division[slow].max(initial=0))]] = True
    late = late[:-1]
    late[routes.relay[late & (routes.relay >= 0)]] = True
    if together:
        late |= routes.crosses
    steps = np.array(travel_seconds(uses, routes, uses.result_bytes * late, pace.topology))
    if steps.sum() < worth:
        return np.zeros(0)
    return steps if len(routes.passed_on) else steps.sum(keepdims=True)


def _departures(last: Int64, routes: Routes, least: int) -> Int64:
    """Division after which the results of a use leave: its last tile's. Where results are summed on
    the way, those of all ranks leave together, not before division `least`, and the sum one
    division later."""
    at, leaves = routes.passed_on, last.copy()
    np.maximum.at(leaves, routes.relay[at], np.maximum(last[at], least) + 1)
    leaves[at] = leaves[routes.relay[at]] - 1
    return leaves
