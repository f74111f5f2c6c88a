"""All-gather schedules: every rank of a group gets every block, needed or not.

Straight from the owner, in as many divisions as asked for, the nearest ranks behind it first; dKV
goes straight back when its division is computed. By node (two nodes of two ranks, A B | C D,
a block of A):

    division 1   A → B, A → C            dKV   B → A after division 1
    division 2   C → D                         D → C after division 2, then C → A the sum of both

so that a block crosses to each node once, and its gradient comes back once.
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.blocks import BlockGraph, Direction, Payload
from dyncp.placement import Placement
from dyncp.schedule.pace import Pace
from dyncp.schedule.phases import Entries, input_entries, number_phases, result_entries
from dyncp.schedule.ring import Circle
from dyncp.schedule.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Routes:
    """How a block gets from each place of a ring to each other, int64[rings, from, to] tables: the
    place that sends it, the division it arrives for (0 at home), and the division after which its
    gradient goes back the same way."""

    via: Int64
    arrives: Int64
    leaves: Int64


def build_all_gather_schedule(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    direction: Direction,
    num_divisions: int,
    _pace: Pace | None = None,
) -> Schedule:
    """Schedule of one mask and direction with at most `num_divisions` divisions (at least 2); by
    node always with 3."""
    circle, traffic, tiles = Circle.of(graph, placement), placement.traffic, graph.tiles[name]
    relayed = traffic is not None and traffic.node is not None
    if traffic is not None and traffic.node is not None:
        routes = _by_node(circle, traffic.node)
    else:
        routes = _by_distance(circle, num_divisions)
    of_tile = tiles.k_block.astype(np.int64) * len(graph.head_groups) + tiles.head_group
    hops = circle.hops_of_tiles(graph, placement, name)
    tile_division = _look_up(circle, routes.arrives, of_tile, hops)
    entries = _entries(circle, routes, direction is Direction.BACKWARD)
    used = int(routes.arrives.max()) + 1
    return number_phases(tile_division, used, entries, relayed_results=relayed)


def _entries(circle: Circle, routes: Routes, backward: bool) -> list[Entries]:
    index, hop = circle.visits()
    what = (circle.head_group[index], circle.block[index])
    here = circle.rank_at(index, hop)
    source = circle.ranks[circle.ring[index], _look_up(circle, routes.via, index, hop)]
    arrives = _look_up(circle, routes.arrives, index, hop)
    entries = [input_entries(arrives, source, here, Payload.KV, *what)]
    if backward:
        leaves = _look_up(circle, routes.leaves, index, hop)
        entries.append(result_entries(leaves, here, source, Payload.DKV, *what))
    return entries


def _look_up(circle: Circle, table: Int64, index: Int64, hop: Int64) -> Int64:
    """Entry [ring, place of the home, place that many hops behind it]."""
    ring, place = circle.ring[index], circle.place[index]
    found: Int64 = table[ring, place, (place + hop) % circle.length[ring]]
    return found


def _by_distance(circle: Circle, num_divisions: int) -> Routes:
    """Straight from home, in divisions 1 to num_divisions - 1 of equal shares."""
    place, length = np.arange(circle.ranks.shape[1]), circle.length[:, None, None]
    distance = (place[None, None, :] - place[None, :, None]) % length
    later = 1 + (distance - 1) * (num_divisions - 1) // np.maximum(length - 1, 1)
    division = np.where(distance > 0, later, 0)
    return Routes(np.broadcast_to(place[None, :, None], division.shape), division, division)


def _by_node(circle: Circle, node: Int32) -> Routes:
    """To the own node straight from home, to another one through the rank that stands there
    where home stands among its mates."""
    rings, longest = circle.ranks.shape
    via, arrives, leaves = np.zeros((3, rings, longest, longest), np.int64)
    for ring, length in enumerate(circle.length.tolist()):
        own, place = (ring, slice(length), slice(length)), np.arange(length)
        _, at = np.unique(node[circle.ranks[ring, :length]], return_inverse=True)
        mates = np.bincount(at)
        order = np.argsort(at, kind="stable")
        first = np.cumsum(mates) - mates
        turn = np.empty(length, np.int64)
        turn[order] = place - first[at[order]]  # where a place stands among its mates
        relay = order[first + turn[:, None] % mates][:, at]
        is_relay, near = relay == place, at[:, None] == at
        via[own] = np.where(is_relay | near, place[:, None], relay)
        arrives[own] = np.where(is_relay | near, 1, 2)
        leaves[own] = np.where(near, 1, np.where(is_relay, 3, 2))
        arrives[ring, place, place] = 0
    return Routes(via, arrives, leaves)
