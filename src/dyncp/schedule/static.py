"""Schedules of static methods: every rank of a ring gets every block of it, needed or not.

**ring**: keys and values go round, their gradients follow one step behind. Three ranks; `a` is what
rank A owns. Every rank passes on what it got in the hop before:

    division        0   1   2           backward, after division   1   2
    rank A holds    a   c   b           rank A sends dKV of        c   b     (c: A's share alone)
    rank B holds    b   a   c           rank B sends dKV of        a   c     (c: A's and B's)
    rank C holds    c   b   a           rank C sends dKV of        b   a

KV makes N − 1 hops in either direction. dKV makes N − 1 as well: it starts at the first rank that
is not the owner, every rank adds its share, and the last hop brings it home. Where homes are not
owners (heads × context), an all-to-all brings Q and KV home before the first hop, and results and
dKV go back to the owners in a last phase of their own.

**all_gather**: straight from the owner, in as many divisions as asked for, the nearest ranks behind
it first; dKV goes straight back when its division is computed. By node (two nodes of two ranks,
A B | C D, a block of A):

    division 1   A → B, A → C            dKV   B → A after division 1
    division 2   C → D                         D → C after division 2, then C → A the sum of both

so that a block crosses to each node once, and its gradient comes back once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.blocks import K_KINDS, Q_KINDS, BlockGraph, Direction, Payload
from dyncp.placement import Placement
from dyncp.schedule.schedule import Launches, PhaseKind, Schedule, number_phases


@dataclass(frozen=True, eq=False)
class Rings:
    """Rings as tables, and per (block, head group) its owner, home, ring and place there,
    int64[blocks × head groups] each, in that order."""

    ranks: Int64  # [rings, longest ring], -1 behind the end
    place_of_rank: Int64  # [rings, ranks], -1 for ranks that are not in the ring
    length: Int64  # [rings]
    block: Int64
    head_group: Int64
    owner: Int64
    home: Int64
    ring: Int64
    place: Int64

    @staticmethod
    def of(graph: BlockGraph, placement: Placement) -> "Rings":
        traffic = placement.traffic
        assert traffic is not None, f"solver {placement.solver!r} says nothing about its rings"
        length = np.asarray([len(ring) for ring in traffic.rings], np.int64)
        ranks = np.full((len(length), length.max()), -1, np.int64)
        place_of_rank = np.full((len(length), placement.num_ranks), -1, np.int64)
        for number, members in enumerate(traffic.rings):
            ranks[number, : len(members)] = members
            place_of_rank[number, list(members)] = np.arange(len(members))
        block, group = np.indices((len(graph.blocks), len(graph.head_groups))).reshape(2, -1)
        home, ring = (x.reshape(-1).astype(np.int64) for x in (traffic.home, traffic.ring))
        place = place_of_rank[ring, home]
        assert (place >= 0).all(), f"solver {placement.solver!r}: homes must lie in their rings"
        owner = placement.block_rank[block].astype(np.int64)
        return Rings(ranks, place_of_rank, length, block, group, owner, home, ring, place)

    def visits(self) -> tuple[Int64, Int64]:
        """Every (block, head group) with every other place of its ring: its index here, and the
        hops from home, 1 to length - 1. Two blocks in a ring of 3: 0 0 1 1 and 1 2 1 2."""
        others = self.length[self.ring] - 1
        index = np.repeat(np.arange(len(others)), others)
        hop = np.arange(len(index)) - np.repeat(np.cumsum(others) - others, others) + 1
        return index, hop

    def rank_at(self, index: Int64, hop: Int64) -> Int64:
        """The rank that many hops behind the home of each of the (block, head group)s."""
        ring = self.ring[index]
        ranks: Int64 = self.ranks[ring, (self.place[index] + hop) % self.length[ring]]
        return ranks

    def tiles(self, graph: BlockGraph, placement: Placement, name: str) -> tuple[Int64, Int64]:
        """The (block, head group) of each tile's keys, and the hops from its home to the rank that
        computes the tile."""
        tiles = graph.tiles[name]
        index = tiles.k_block.astype(np.int64) * len(graph.head_groups) + tiles.head_group
        ring = self.ring[index]
        place = self.place_of_rank[ring, placement.tile_rank[name]]
        assert (place >= 0).all(), f"solver {placement.solver!r}: tiles must lie in their rings"
        return index, (place - self.place[index]) % self.length[ring]


class Visit(NamedTuple):
    """How blocks come to ranks of their rings: the rank that sends each, the rank that its gradient
    goes to, the division that it arrives for, and the one after which the gradient leaves."""

    source: Int64
    gradient_target: Int64
    arrives: Int64
    leaves: Int64


# From (block, head group) and hops to the visit.
Route = Callable[[Int64, Int64], Visit]


def build_static_schedule(
    graph: BlockGraph, placement: Placement, name: str, direction: Direction, num_divisions: int
) -> Schedule:
    """Schedule of one mask and direction: rings have one division per hop, all-gathers at most
    `num_divisions` (at least 2), by node at most 3."""
    rings, traffic = Rings.of(graph, placement), placement.traffic
    assert traffic is not None
    away = np.flatnonzero(rings.owner != rings.home)
    first = 2 if len(away) else 1  # division of the first hop
    results = PhaseKind.RELAYED_RESULT
    if traffic.pattern == "ring":
        assert not len(away) or len(set(rings.length.tolist())) == 1, "all-to-all: rings differ"
        route = _hop_by_hop(rings, first)
    elif traffic.node is not None:
        route = _by_node(rings, traffic.node)
    else:
        route, results = _straight(rings, num_divisions), PhaseKind.NEAR_RESULT
    index, hop = rings.visits()
    visit, here = route(index, hop), rings.rank_at(index, hop)
    launches = [_inputs(rings, index, visit.arrives, visit.source, here, Payload.KV)]
    if direction is Direction.BACKWARD:
        ends = here, visit.gradient_target
        launches.append(_results(rings, index, visit.leaves, *ends, Payload.DKV, results))
    num_divisions = 1 + max(first - 1, int(visit.arrives.max(initial=0)))
    launches += _all_to_all(rings, away, direction, num_divisions)
    is_local = _is_local(graph, placement, name)
    arrives = route(*rings.tiles(graph, placement, name)).arrives
    return number_phases(np.where(is_local, 0, arrives), num_divisions, launches)


def _is_local(graph: BlockGraph, placement: Placement, name: str) -> Bool:
    tiles, rank = graph.tiles[name], placement.tile_rank[name]
    owner = placement.block_rank
    local: Bool = (owner[tiles.q_block] == rank) & (owner[tiles.k_block] == rank)
    return local


def _inputs(
    rings: Rings, index: Int64, division: Int64, source: Int64, target: Int64, kind: Payload
) -> Launches:
    """What must be there when `division` (from 1 on) computes: it travels while the one before
    does."""
    what = rings.head_group[index], rings.block[index]
    return Launches(PhaseKind.NEXT_INPUT, division - 2, source, target, kind, *what)


def _results(
    rings: Rings,
    index: Int64,
    division: Int64,
    source: Int64,
    target: Int64,
    kind: Payload,
    phase_kind: PhaseKind,
) -> Launches:
    """What is complete when `division` is computed."""
    what = rings.head_group[index], rings.block[index]
    return Launches(phase_kind, division, source, target, kind, *what)


def _all_to_all(
    rings: Rings, away: Int64, direction: Direction, num_divisions: int
) -> list[Launches]:
    """Inputs of the first division that is not local, and results behind the last phase."""
    if not len(away):
        return []
    owner, home = rings.owner[away], rings.home[away]
    begin, end = np.ones_like(owner), np.full_like(owner, num_divisions)
    q_kinds, k_kinds = Q_KINDS[direction], K_KINDS[direction]
    there, back = (q_kinds[0], k_kinds[0]), (*q_kinds[1:], *k_kinds[1:])
    relayed = PhaseKind.RELAYED_RESULT
    return [
        *(_inputs(rings, away, begin, owner, home, kind) for kind in there),
        *(_results(rings, away, end, home, owner, kind, relayed) for kind in back),
    ]


def _hop_by_hop(rings: Rings, first: int) -> Route:
    def route(index: Int64, hop: Int64) -> Visit:
        source, onward = (rings.rank_at(index, hop + step) for step in (-1, 1))
        return Visit(source, onward, hop + first - 1, hop + first - 1)

    return route


def _straight(rings: Rings, num_divisions: int) -> Route:
    """Straight from home, in divisions 1 to num_divisions - 1 of equal shares."""

    def route(index: Int64, hop: Int64) -> Visit:
        others = np.maximum(rings.length[rings.ring[index]] - 1, 1)
        division = np.where(hop > 0, 1 + (hop - 1) * (num_divisions - 1) // others, 0)
        return Visit(rings.home[index], rings.home[index], division, division)

    return route


def _by_node(rings: Rings, node: Int32) -> Route:
    """To the own node straight from home, to another one through the rank that stands there where
    home stands among its mates."""
    num_rings, longest = rings.ranks.shape
    at, turn = np.zeros((2, num_rings, longest), np.int64)  # node, and place among its mates
    mates = np.zeros((num_rings, int(node.max()) + 1), np.int64)
    mate = np.zeros((*mates.shape, longest), np.int64)
    for ring, place in np.argwhere(rings.ranks >= 0).tolist():
        there = node[rings.ranks[ring, place]]
        at[ring, place], turn[ring, place] = there, mates[ring, there]
        mate[ring, there, mates[ring, there]] = place
        mates[ring, there] += 1

    def route(index: Int64, hop: Int64) -> Visit:
        ring, home = rings.ring[index], rings.place[index]
        here = (home + hop) % rings.length[ring]
        there = at[ring, here]
        relay = mate[ring, there, turn[ring, home] % mates[ring, there]]
        near, is_relay = at[ring, home] == there, relay == here
        source = rings.ranks[ring, np.where(near | is_relay, home, relay)]
        arrives = np.where(hop > 0, np.where(near | is_relay, 1, 2), 0)
        leaves = np.where(near, 1, np.where(is_relay, 3, 2))
        return Visit(source, source, arrives, leaves)

    return route
