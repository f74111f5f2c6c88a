"""The default solver: geometric recursive bisection, then repair and local passes."""

from functools import partial

import numpy as np

from dyncp.arrays import Int32, frozen
from dyncp.blocks import BlockGraph
from dyncp.placement.bisection.polish import Links, Pins, Solution, make_pins, polish, start_from
from dyncp.placement.bisection.problem import Problem, make_problem
from dyncp.placement.bisection.recurse import Budget, bisect
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.solver import Solver
from dyncp.topology import Topology

# Shares of the tolerance that the first levels may spend; each is tried and the best result kept.
SPENDS = (1.0, 1.7, 2.5, 8.0)
# The starts that are polished, those of the lowest estimates.
POLISHED = 2


def place_bisection(
    priced: bool, graph: BlockGraph, topology: Topology, limits: Limits, _seed: int
) -> Placement:
    """`priced` counts bytes by the speed of their links, otherwise all alike."""
    problem, ranks = make_problem(graph), topology.num_ranks
    tolerance = limits.tolerances
    # A batch may have no pairs at all; a mean of 0 would be no unit to measure shares with.
    mean = np.maximum([problem.work.sum() / ranks, problem.tokens.sum() / ranks], 1e-9)
    pins = make_pins(problem)
    links = Links(
        np.arange(ranks) // topology.ranks_per_machine, _inter_price(topology) if priced else 1.0
    )
    starts = []
    for spend in SPENDS:
        budget = Budget(mean, tolerance, spend)
        cell_rank = bisect(problem, topology, budget)
        starts.append(start_from(pins, problem, cell_rank, budget.caps, links))
    starts.sort(key=lambda solution: solution.cost)
    best = min(map(polish, starts[:POLISHED]), key=lambda solution: solution.cost)
    return Placement(
        ranks,
        frozen(best.state.block_rank),
        _tile_ranks(graph, problem, pins, best),
        "bisection" if priced else "bisection_bytes",
        static=False,
    )


def _tile_ranks(
    graph: BlockGraph, problem: Problem, pins: Pins, solution: Solution
) -> dict[str, Int32]:
    """Each mask's tiles take the rank of their cell and head group."""
    cells, first = len(problem.work), problem.first_block
    rank_of_cell = np.zeros((problem.num_groups, cells), np.int32)
    rank_of_cell[:, pins.cells.cell] = solution.state.tile_rank.reshape(problem.num_groups, -1)
    ranks: dict[str, Int32] = {}
    for name, tiles in graph.tiles.items():
        sequence = graph.blocks.sequence[tiles.q_block]
        row, column = tiles.q_block - first[sequence], tiles.k_block - first[sequence]
        at = problem.work_start[sequence] + row * np.diff(first)[sequence] + column
        ranks[name] = frozen(rank_of_cell[tiles.head_group, at])
    return ranks


def _inter_price(topology: Topology) -> float:
    """How much longer a byte takes between machines than inside one."""
    if topology.machines == 1:
        return 1.0
    nic_share = topology.inter.bandwidth / topology.ranks_per_machine
    return max(1.0, topology.intra.bandwidth / nic_share)


bisection = Solver("bisection", partial(place_bisection, True))
bisection_bytes = Solver("bisection_bytes", partial(place_bisection, False))
