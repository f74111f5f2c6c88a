"""The protocol that all placement solvers share, and the two simplest of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int64, frozen
from dyncp.blocks import AttentionShape, BlockGraph, choose_block_sizes
from dyncp.placement.placement import Limits, Placement
from dyncp.topology import Topology


@dataclass(frozen=True, slots=True)
class Degrees:
    """Of a static method: ranks in a group and how many of them split heads (None: all, and as the
    method says), or the tokens of one document that a rank may have."""

    method: str
    ranks: int | None = None
    heads: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Solver:
    """A function of its arguments and nothing else: same batch, same seed, same placement.

    `block_sizes` cuts the sequences the way the method needs, and `head_groups` is how many groups
    it needs the heads in (None: the planner's config decides). A method whose degrees depend on
    model and ranks is fitted to them first; degrees that are not possible raise ValueError there.
    Static methods say which `degrees` they have.
    """

    name: str
    place: Callable[[BlockGraph, Topology, Limits, int], Placement]
    block_sizes: Callable[[Sequence[int], int], Int64] = choose_block_sizes
    head_groups: int | None = None
    fit: "Callable[[AttentionShape, Topology], Solver] | None" = None
    degrees: Degrees | None = None

    def fitted(self, shape: AttentionShape, topology: Topology) -> "Solver":
        """This solver for one attention shape and topology."""
        return self if self.fit is None else self.fit(shape, topology)


def place_random(graph: BlockGraph, topology: Topology, _limits: Limits, seed: int) -> Placement:
    """Any block and any tile on any rank, for plans that use everything a plan can have."""
    draw, num_ranks = np.random.default_rng(seed), topology.num_ranks
    block_rank = frozen(draw.integers(num_ranks, size=len(graph.blocks)))
    tile_rank = {
        name: frozen(draw.integers(num_ranks, size=len(graph.tiles[name])))
        for name in sorted(graph.tiles)
    }
    return Placement(num_ranks, block_rank, tile_rank, "random", static=False)


random = Solver("random", place_random)
