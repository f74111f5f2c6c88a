"""Schedules of static methods: every rank of a ring receives every block of the ring, even if no
tile needs it.

**ring**: keys and values circulate, and their gradients follow one hop later. Three ranks; `a` are
the blocks that rank A owns. Every rank passes on the blocks that it received in the previous hop:

    division        0   1   2           backward, after division   1   2
    rank A holds    a   c   b           rank A sends dKV of        c   b     (c: A's share only)
    rank B holds    b   a   c           rank B sends dKV of        a   c     (c: A's and B's)
    rank C holds    c   b   a           rank C sends dKV of        b   a

KV makes N − 1 hops forward, and N − 1 hops backward. dKV makes N − 1 hops as well: it starts at the
first rank after the owner, every rank adds its share, and the last hop returns it to the owner. If
the home of a block is not its owner (heads × context), an all-to-all sends Q and KV to their homes
before the first hop, and a last phase returns results and dKV to the owners.

**all_gather**: the owner sends directly, in the requested number of divisions, to the next ranks of
the ring first. dKV goes back directly when its division is computed. By node (two nodes of two
ranks, A B | C D, a block of A):

    division 1   A → B, A → C            dKV   B → A after division 1
    division 2   C → D                         D → C after division 2, then C → A the sum of both

so a block crosses to each node once, and its gradient crosses back once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.blocks import K_KINDS, Q_KINDS, BlockGraph, Direction, Payload
from dyncp.placement import Placement
from dyncp.schedule.schedule import Launches, PhaseKind, Schedule, number_phases


@dataclass(frozen=True, eq=False)
class Rings:
    """Rings as tables. For every (block, head group), int64[blocks × head groups] each: its owner,
    home, ring, and the place of its home in the ring."""

    ranks: Int64  # [rings, longest ring], padded with -1
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
        assert traffic is not None, f"solver {placement.solver!r} has no `traffic` with rings"
        length = np.asarray([len(ring) for ring in traffic.rings], np.int64)
        ranks = np.full((len(length), length.max()), -1, np.int64)
        place_of_rank = np.full((len(length), placement.num_ranks), -1, np.int64)
        for number, members in enumerate(traffic.rings):
            ranks[number, : len(members)] = members
            place_of_rank[number, list(members)] = np.arange(len(members))
        block, group = np.indices((len(graph.blocks), len(graph.head_groups))).reshape(2, -1)
        home, ring = (x.reshape(-1).astype(np.int64) for x in (traffic.home, traffic.ring))
        place = place_of_rank[ring, home]
        assert (place >= 0).all(), (
            f"solver {placement.solver!r}: a block's home must be in its ring"
        )
        owner = placement.block_rank[block].astype(np.int64)
        return Rings(ranks, place_of_rank, length, block, group, owner, home, ring, place)

    def visits(self) -> tuple[Int64, Int64]:
        """Pairs of every (block, head group) with every other place of its ring: the index of the
        former, and the hops from its home, 1 to length - 1. Two blocks in a ring of 3 give 0 0 1 1
        and 1 2 1 2."""
        others = self.length[self.ring] - 1
        index = np.repeat(np.arange(len(others)), others)
        hop = np.arange(len(index)) - np.repeat(np.cumsum(others) - others, others) + 1
        return index, hop

    def rank_at(self, index: Int64, hop: Int64) -> Int64:
        """The rank that is `hop` hops after the home of each (block, head group)."""
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
        assert (place >= 0).all(), (
            f"solver {placement.solver!r}: a tile's rank must be in the ring of its keys"
        )
        return index, (place - self.place[index]) % self.length[ring]


class Visit(NamedTuple):
    """How a block visits a rank of its ring: the rank that sends it, the rank that its gradient is
    sent to, the division that it arrives for, and the division after which its gradient is sent."""

    source: Int64
    gradient_target: Int64
    arrives: Int64
    leaves: Int64


# Maps (block, head group) indices and hops to visits.
Route = Callable[[Int64, Int64], Visit]


def build_static_schedule(
    graph: BlockGraph, placement: Placement, name: str, direction: Direction, num_divisions: int
) -> Schedule:
    """Schedule of one mask and direction. Rings have one division per hop, all-gathers at most
    `num_divisions` (at least 2), all-gathers by node at most 3."""
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
    blocks, inputs = (rings.head_group[index], rings.block[index]), PhaseKind.NEXT_INPUT
    # An input for division d is launched after division d - 2: it travels while d - 1 computes.
    launches = [Launches(inputs, visit.arrives - 2, visit.source, here, Payload.KV, *blocks)]
    if direction is Direction.BACKWARD:
        ends = here, visit.gradient_target
        launches.append(Launches(results, visit.leaves, *ends, Payload.DKV, *blocks))
    num_divisions = 1 + max(first - 1, int(visit.arrives.max(initial=0)))
    if len(away):
        launches += _all_to_all(rings, away, direction, num_divisions)
    tiles, rank, owner = graph.tiles[name], placement.tile_rank[name], placement.block_rank
    is_local = (owner[tiles.q_block] == rank) & (owner[tiles.k_block] == rank)
    arrives = route(*rings.tiles(graph, placement, name)).arrives
    return number_phases(np.where(is_local, 0, arrives), num_divisions, launches)


def _all_to_all(
    rings: Rings, away: Int64, direction: Direction, num_divisions: int
) -> list[Launches]:
    """Inputs of division 1, from owners to homes, and results after the last division, back to the
    owners."""
    owner, home = rings.owner[away], rings.home[away]
    blocks = rings.head_group[away], rings.block[away]
    begin, end = np.full_like(owner, -1), np.full_like(owner, num_divisions)
    (q, *q_back), (kv, *k_back) = Q_KINDS[direction], K_KINDS[direction]
    inputs, results = PhaseKind.NEXT_INPUT, PhaseKind.RELAYED_RESULT
    return [
        *(Launches(inputs, begin, owner, home, kind, *blocks) for kind in (q, kv)),
        *(Launches(results, end, home, owner, kind, *blocks) for kind in (*q_back, *k_back)),
    ]


def _hop_by_hop(rings: Rings, first: int) -> Route:
    def route(index: Int64, hop: Int64) -> Visit:
        source, onward = (rings.rank_at(index, hop + step) for step in (-1, 1))
        return Visit(source, onward, hop + first - 1, hop + first - 1)

    return route


def _straight(rings: Rings, num_divisions: int) -> Route:
    """Sends directly from home, in equal shares for divisions 1 to num_divisions - 1."""

    def route(index: Int64, hop: Int64) -> Visit:
        others = np.maximum(rings.length[rings.ring[index]] - 1, 1)
        division = np.where(hop > 0, 1 + (hop - 1) * (num_divisions - 1) // others, 0)
        return Visit(rings.home[index], rings.home[index], division, division)

    return route


def _by_node(rings: Rings, node: Int32) -> Route:
    """Sends directly to ranks of the home's node, and to other nodes through the rank with the same
    local index there."""
    num_rings, longest = rings.ranks.shape
    at, turn = np.zeros(
        (2, num_rings, longest), np.int64
    )  # node of every place, and its index in that node
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
