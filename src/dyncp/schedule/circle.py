"""Circle: who is whose neighbour in the rings of a static placement."""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import BlockGraph
from dyncp.placement import Placement


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
