"""The interface of all placement solvers, and the solver `random`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int64, frozen
from dyncp.blocks import AttentionShape, BlockGraph, choose_block_sizes
from dyncp.placement.placement import Limits, Placement
from dyncp.topology import Topology


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of a static method: the ranks of a group (None: all ranks) and how many of them split
    the heads (None: the method chooses), or the most tokens of one document on a rank."""

    method: str
    ranks: int | None = None
    heads: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Solver:
    """A way to place a batch. `place` is deterministic: the same batch and seed give the same
    placement.

    `block_sizes` returns the block size of every sequence, from their lengths and the number of
    ranks. `head_groups` is the number of head groups that the method needs (None: the planner's
    config decides). If the degrees of a method depend on the model and the ranks, `fit` chooses
    them and raises ValueError if they are impossible. `degrees` is None unless the method is
    static.
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
    """Any block and any tile on any rank: plans that exercise every feature of a plan."""
    draw, num_ranks = np.random.default_rng(seed), topology.num_ranks
    block_rank = frozen(draw.integers(num_ranks, size=len(graph.blocks)))
    tile_rank = {
        name: frozen(draw.integers(num_ranks, size=len(graph.tiles[name])))
        for name in sorted(graph.tiles)
    }
    return Placement(num_ranks, block_rank, tile_rank, "random", static=False)


random = Solver("random", place_random)
