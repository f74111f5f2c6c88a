"""Random: any block and any tile on any rank. It is what makes the tests strong."""

import numpy as np

from dyncp.arrays import frozen
from dyncp.blocks import BlockGraph
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.solver import Solver
from dyncp.topology import Topology


def place_random(graph: BlockGraph, topology: Topology, _limits: Limits, seed: int) -> Placement:
    draw, num_ranks = np.random.default_rng(seed), topology.num_ranks
    block_rank = frozen(draw.integers(num_ranks, size=len(graph.blocks)))
    tile_rank = {
        name: frozen(draw.integers(num_ranks, size=len(graph.tiles[name])))
        for name in sorted(graph.tiles)
    }
    return Placement(num_ranks, block_rank, tile_rank, "random", static=False)


random = Solver("random", place_random)
