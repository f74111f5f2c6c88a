"""Repair and local moves: the one place that uses the machinery of the bisection solver."""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import BlockGraph
from dyncp.placement.bisection.polish import Links, inter_price, make_pins, polish, start_from
from dyncp.placement.bisection.problem import Problem, make_problem
from dyncp.placement.hypergraph.build import JoinedTiles
from dyncp.topology import Topology

# One round of repair makes a limited number of moves; thousands of tiles may need more.
MAX_ROUNDS = 8


@dataclass(frozen=True, eq=False)
class Finished:
    """Ranks of blocks and of joined tiles. `cost` has bytes priced by their links, and a penalty
    that dwarfs them where a limit is missed."""

    block_rank: Int64
    tile_rank: Int64
    cost: float


class Finisher:
    """Makes the ranks of one batch's vertices meet both limits, at few bytes.

    `tolerance` is [compute, tokens]."""

    def __init__(
        self, graph: BlockGraph, tiles: JoinedTiles, topology: Topology, tolerance: Float64
    ) -> None:
        # Head groups are placed together, as one.
        self._problem = make_problem(graph)._replace(group_end=np.array([0.0, 1.0]))
        ranks = topology.num_ranks
        self._pins = make_pins(self._problem)
        blocks = np.arange(len(graph.blocks))
        self._diagonal = _cells(self._problem, graph, blocks, blocks)
        self._cell = _cells(self._problem, graph, tiles.q_block, tiles.k_block)
        self._vertex = tiles.vertices(len(blocks))
        load = np.array([self._problem.work.sum(), self._problem.tokens.sum()])
        self._caps = np.maximum(load / ranks, 1e-9) * (1 + tolerance)
        machine = np.arange(ranks) // topology.ranks_per_machine
        self._links = Links(machine, inter_price(topology))

    def finish(self, vertex_rank: Int64) -> Finished:
        tile_rank, block_rank = vertex_rank[self._vertex], vertex_rank[: len(self._diagonal)]
        rounds = []
        for _ in range(MAX_ROUNDS):
            rounds.append(self._round(block_rank, tile_rank))
            block_rank, tile_rank = rounds[-1].block_rank, rounds[-1].tile_rank
            if self._meets_limits(rounds[-1]):
                break
        return min(rounds, key=lambda finished: finished.cost)

    def _round(self, block_rank: Int64, tile_rank: Int64) -> Finished:
        """Starts with every diagonal tile where its block is."""
        cell_rank = np.zeros((1, len(self._problem.work)), np.int32)
        cell_rank[0, self._cell] = tile_rank
        cell_rank[0, self._diagonal] = block_rank
        start = start_from(self._pins, self._problem, cell_rank, self._caps, self._links)
        solution = polish(start)
        cell_rank[0, self._pins.cells.cell] = solution.state.tile_rank
        tiles = cell_rank[0, self._cell].astype(np.int64)
        return Finished(solution.state.block_rank, tiles, solution.cost)

    def _meets_limits(self, finished: Finished) -> bool:
        ranks = len(self._links.machine)
        work = np.bincount(finished.tile_rank, self._problem.work[self._cell], ranks)
        tokens = np.bincount(finished.block_rank, self._problem.tokens, ranks)
        return bool((np.array([work.max(), tokens.max()]) <= self._caps * (1 + 1e-9)).all())


def _cells(problem: Problem, graph: BlockGraph, q_block: Int64, k_block: Int64) -> Int64:
    """Indices into `problem.work`."""
    sequence, first = graph.blocks.sequence[q_block], problem.first_block
    row, column = q_block - first[sequence], k_block - first[sequence]
    cells: Int64 = problem.work_start[sequence] + row * np.diff(first)[sequence] + column
    return cells
