"""Ring schedules: keys and values go round, their gradients follow one step behind.

Three ranks; `a` is what rank A owns. Every rank passes on what it got in the hop before:

    division        0   1   2           backward, after division   1   2
    rank A holds    a   c   b           rank A sends dKV of        c   b     (c: A's share alone)
    rank B holds    b   a   c           rank B sends dKV of        a   c     (c: A's and B's)
    rank C holds    c   b   a           rank C sends dKV of        b   a

KV makes N − 1 hops in either direction, needed or not. dKV makes N − 1 as well: it starts at the
first rank that is not the owner, every rank adds its share, and the last hop brings it home.

Where homes are not owners (heads × context), an all-to-all brings Q and KV home before the first
hop, and results and dKV go back to the owners in a last phase of their own.
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Int64
from dyncp.blocks import Q_INPUT, Q_RESULT, BlockGraph, Direction, Payload
from dyncp.placement import Placement
from dyncp.schedule.pace import Pace
from dyncp.schedule.phases import Entries, input_entries, number_phases, result_entries
from dyncp.schedule.schedule import Schedule

# Circle: who is whose neighbour in the rings of a static placement.


@dataclass(frozen=True, eq=False)
class Circle:
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
    def of(graph: BlockGraph, placement: Placement) -> "Circle":
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
        numbers = (block, group, owner, home, ring, place)
        return Circle(ranks, place_of_rank, length, *numbers)

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

    def hops_of_tiles(self, graph: BlockGraph, placement: Placement, name: str) -> Int64:
        """Hops from the home of each tile's key block to the rank that computes it."""
        tiles = graph.tiles[name]
        index = tiles.k_block.astype(np.int64) * len(graph.head_groups) + tiles.head_group
        ring = self.ring[index]
        place = self.place_of_rank[ring, placement.tile_rank[name]]
        assert (place >= 0).all(), f"solver {placement.solver!r}: tiles must lie in their rings"
        hops: Int64 = (place - self.place[index]) % self.length[ring]
        return hops


def build_ring_schedule(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    direction: Direction,
    _divisions: int,
    _pace: Pace | None = None,
) -> Schedule:
    """One division per hop, as many as the longest ring has; `_divisions` does not change that."""
    circle = Circle.of(graph, placement)
    away = np.flatnonzero(circle.owner != circle.home)
    assert not len(away) or len(set(circle.length.tolist())) == 1, "all-to-all: rings differ"
    first = 2 if len(away) else 1  # division of the first hop
    num_divisions = int(circle.length.max()) + first - 1
    hops = circle.hops_of_tiles(graph, placement, name)
    tile_division = np.where(_is_local(graph, placement, name), 0, hops + first - 1)
    backward = direction is Direction.BACKWARD
    entries = _hops(circle, first, backward)
    if len(away):
        entries += _all_to_all(circle, away, direction, num_divisions)
    return number_phases(tile_division, num_divisions, entries, relayed_results=True)


def _is_local(graph: BlockGraph, placement: Placement, name: str) -> Bool:
    tiles, rank = graph.tiles[name], placement.tile_rank[name]
    owner = placement.block_rank
    local: Bool = (owner[tiles.q_block] == rank) & (owner[tiles.k_block] == rank)
    return local


def _hops(circle: Circle, first: int, backward: bool) -> list[Entries]:
    index, hop = circle.visits()
    what = (circle.head_group[index], circle.block[index])
    here = circle.rank_at(index, hop)
    division = hop + first - 1
    entries = [input_entries(division, circle.rank_at(index, hop - 1), here, Payload.KV, *what)]
    if backward:
        onward = circle.rank_at(index, hop + 1)
        entries.append(result_entries(division, here, onward, Payload.DKV, *what))
    return entries


def _all_to_all(
    circle: Circle, away: Int64, direction: Direction, num_divisions: int
) -> list[Entries]:
    """Inputs of the first division that is not local, and results behind the last phase."""
    owner, home = circle.owner[away], circle.home[away]
    what = (circle.head_group[away], circle.block[away])
    begin, end = np.ones_like(owner), np.full_like(owner, num_divisions)
    backward = direction is Direction.BACKWARD
    there = [Q_INPUT[direction], Payload.KV]
    back = [Q_RESULT[direction], Payload.DKV] if backward else [Q_RESULT[direction]]
    return [
        *(input_entries(begin, owner, home, kind, *what) for kind in there),
        *(result_entries(end, home, owner, kind, *what) for kind in back),
    ]
