"""The solver: a few splits with different weights, each repaired; the cheapest is kept."""

import numpy as np

from dyncp.arrays import frozen
from dyncp.blocks import BlockGraph
from dyncp.placement.hypergraph.build import build_hypergraph, join_tiles
from dyncp.placement.hypergraph.client import NAME, check_installed
from dyncp.placement.hypergraph.finish import Finisher
from dyncp.placement.hypergraph.split import split_along
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.solver import Solver
from dyncp.topology import Topology

# Limits where the user sets none, as for bisection.
COMPUTE_TOLERANCE, TOKEN_TOLERANCE = 0.1, 0.2
# How much of a vertex's weight is work, the rest being tokens. The best of the three moves 9 %
# fewer bytes than the first alone, over 18 batches on 32 ranks (links alike).
WORK_SHARES = (1.0, 0.75, 0.5)
# From this many tiles on, one split has to do: 33,000 take 5 s.
MANY_TILES = 10_000
# Seconds that the library may take for one split.
TIMEOUT = 60.0


def place_hypergraph(
    graph: BlockGraph, topology: Topology, limits: Limits, seed: int, timeout: float = TIMEOUT
) -> Placement:
    """Raises SolverError when mtkahypar is not installed, fails, or takes longer than `timeout`."""
    check_installed()
    tiles = join_tiles(graph)
    tolerance = np.array(
        [
            COMPUTE_TOLERANCE if limits.compute_tolerance is None else limits.compute_tolerance,
            TOKEN_TOLERANCE if limits.token_tolerance is None else limits.token_tolerance,
        ]
    )
    finisher = Finisher(graph, tiles, topology, tolerance)
    shares = WORK_SHARES if len(tiles.work) < MANY_TILES else WORK_SHARES[:1]
    finished = []
    for share in shares:
        hypergraph = build_hypergraph(graph, tiles, share)
        ranks = split_along(hypergraph, topology, float(tolerance[0]), seed, timeout)
        finished.append(finisher.finish(ranks))
    best = min(finished, key=lambda candidate: candidate.cost)
    tile_rank = {name: frozen(best.tile_rank[index]) for name, index in tiles.of_mask.items()}
    return Placement(topology.num_ranks, frozen(best.block_rank), tile_rank, NAME, static=False)


hypergraph = Solver(NAME, place_hypergraph)
