"""Solvers `bisection` (bytes priced by their links) and `bisection_bytes` (all bytes alike).

`bisection_quality` and `bisection_bytes_quality` try more.

Geometric recursive bisection in several ways, then repair and local passes for the best of them:

    problem ─► recurse (split, cuts, bands, heavy) ─► polish (repair, refine, anneal) ─► solve

Whole sequences are shared out first; one that must be cut is cut into bands of rows or columns, or
between head groups, at the fewest bytes of data blocks that both sides need. Then tiles and blocks
are moved until both balance limits hold, and while moves gain bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from dyncp.arrays import Float64, Int32, frozen
from dyncp.blocks import BlockGraph, choose_sizes_by_work
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.problem import Problem, fold, heavy_cells, make_problem, unfold
from dyncp.placement.refine import (
    Annealing,
    Links,
    Pins,
    Solution,
    anneal_solution,
    inter_price,
    make_pins,
    polish,
    start_from,
)
from dyncp.placement.solver import Solver
from dyncp.placement.split import Budget, Way, bisect
from dyncp.topology import Topology

# (share of the tolerance that the first levels may spend, way to split); the best come first. The
# six starts were chosen one after the other, each to lower the bytes of 48 cases most.
STARTS = (
    (1.0, Way(sizes=4)),
    (2.5, Way(sizes=4, left=0.45)),
    (1.7, Way(row_bias=0.7)),
    (1.0, Way(sizes=4, left=0.45, row_bias=0.7)),
    (1.7, Way(left=0.4, row_bias=0.7)),
    (2.5, Way(left=0.4, row_bias=0.7)),
)
SPENDS, LEFT, SIZES, ROW_BIAS = (1.0, 1.7, 2.5, 8.0), (0.5, 0.45, 0.4, 0.34), (1, 4), (0.7, 1.0)
# Noise on cut costs: standard deviation of its logarithm, and how many factors are drawn.
NOISE, DRAWN = 0.2, 499


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried: random starts besides STARTS (fewer where there are many tiles, at most
    `start_tiles` in all of them), the starts of the lowest estimates that are polished, and the
    annealings, each of the best solution so far."""

    suffix: str
    random_starts: int
    start_tiles: int
    polished: int
    annealings: tuple[Annealing, ...] = ()

    def num_random_starts(self, num_tiles: int) -> int:
        return min(self.random_starts, self.start_tiles // max(num_tiles, 1))


FAST = Effort("", 0, 0, 2)
QUALITY = Effort(
    "_quality", 24, 100_000, 6, (Annealing(80_000, 0.3, 0.01), Annealing(60_000, 0.1, 0.01))
)


@dataclass(frozen=True, eq=False)
class Task:
    """What all starts share."""

    problem: Problem
    pins: Pins
    topology: Topology  # flat where all bytes cost alike
    mean: Float64
    tolerance: Float64
    links: Links

    def budget(self, spend: float) -> Budget:
        return Budget(self.mean, self.tolerance, spend)


def place_bisection(
    effort: Effort, priced: bool, graph: BlockGraph, topology: Topology, limits: Limits, seed: int
) -> Placement:
    """`priced` counts bytes by the speed of their links, otherwise all alike."""
    task = _make_task(graph, topology, limits, priced)
    rng = np.random.default_rng(seed)
    starts = sorted(_starts(task, effort, rng), key=_cost)
    best = sorted(map(polish, starts[: effort.polished]), key=_cost)
    for annealing in effort.annealings:
        if best[0].cost > 0:
            best.append(anneal_solution(best[0], annealing, int(rng.integers(2**31))))
            best.sort(key=_cost)
    return Placement(
        topology.num_ranks,
        frozen(best[0].state.block_rank),
        _tile_ranks(graph, task, best[0]),
        ("bisection" if priced else "bisection_bytes") + effort.suffix,
        static=False,
    )


def _make_task(graph: BlockGraph, topology: Topology, limits: Limits, priced: bool) -> Task:
    problem, ranks = make_problem(graph), topology.num_ranks
    # A batch may have no pairs at all; a mean of 0 would be no unit to measure shares with.
    mean = np.maximum([problem.work.sum() / ranks, problem.tokens.sum() / ranks], 1e-9)
    node = np.arange(ranks) // topology.ranks_per_node
    links = Links(node, inter_price(topology) if priced else 1.0)
    order = topology if priced else Topology(1, ranks)
    return Task(problem, make_pins(problem), order, mean, limits.tolerances, links)


def _cost(solution: Solution) -> float:
    return solution.cost


def _starts(task: Task, effort: Effort, rng: np.random.Generator) -> Iterator[Solution]:
    """Bisected placements with estimates of their cost; only the first where that costs nothing."""
    heavy = heavy_cells(task.problem, task.pins.cells, task.topology.num_ranks)
    folded = fold(task.problem, task.pins.cells, heavy) if heavy.any() else None
    count = effort.num_random_starts(len(task.pins.work))
    for spend, way in (*STARTS, *_random_ways(count, rng)):
        budget = task.budget(spend)
        cell_rank = bisect(task.problem, task.topology, budget, way)
        start = start_from(task.pins, task.problem, cell_rank, budget.caps, task.links)
        yield start
        if start.cost == 0:
            return
        if folded is not None:
            cell_rank = bisect(folded, task.topology, budget, way)
            unfold(task.problem, task.pins.cells, heavy, cell_rank)
            yield start_from(task.pins, task.problem, cell_rank, budget.caps, task.links)


def _random_ways(count: int, rng: np.random.Generator) -> Iterator[tuple[float, Way]]:
    for _ in range(count):
        noise = np.exp(NOISE * rng.standard_normal(DRAWN))
        left, sizes, bias = rng.choice(LEFT), int(rng.choice(SIZES)), rng.choice(ROW_BIAS)
        yield (
            float(rng.choice(SPENDS)),
            Way(left=float(left), sizes=sizes, row_bias=float(bias), noise=noise),
        )


def _tile_ranks(graph: BlockGraph, task: Task, solution: Solution) -> dict[str, Int32]:
    """Each mask's tiles take the rank of their cell and head group."""
    problem, first = task.problem, task.problem.first_block
    rank_of_cell = np.zeros((problem.num_groups, len(problem.work)), np.int32)
    tile_rank = solution.state.tile_rank.reshape(problem.num_groups, -1)
    rank_of_cell[:, task.pins.cells.cell] = tile_rank
    ranks: dict[str, Int32] = {}
    for name, tiles in graph.tiles.items():
        sequence = graph.blocks.sequence[tiles.q_block]
        row, column = tiles.q_block - first[sequence], tiles.k_block - first[sequence]
        at = problem.work_start[sequence] + row * np.diff(first)[sequence] + column
        ranks[name] = frozen(rank_of_cell[tiles.head_group, at])
    return ranks


def _solver(priced: bool, effort: Effort) -> Solver:
    name = ("bisection" if priced else "bisection_bytes") + effort.suffix
    return Solver(name, partial(place_bisection, effort, priced), choose_sizes_by_work)


bisection, bisection_quality = _solver(True, FAST), _solver(True, QUALITY)
bisection_bytes, bisection_bytes_quality = _solver(False, FAST), _solver(False, QUALITY)
