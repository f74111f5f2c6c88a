"""Solvers `bisection` (bytes cost as much as their link is slow) and `bisection_bytes` (all equal).

Recursive bisection with several strategies, then repair and local passes for the best results:

    problem ─► split (with cuts) ─► refine (repair, then moves that save bytes) ─► the fewest bytes

Whole sequences are distributed first. A sequence that must be cut is cut into bands of rows or
columns, or between head groups, where both sides need the fewest bytes of the same blocks. Then
tiles and blocks are moved until both limits hold, and while that saves bytes. `bisection_quality`
and `bisection_bytes_quality` also draw random strategies, refine more results, and anneal the best.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from dyncp.arrays import Int32, Int64, frozen
from dyncp.blocks import BlockGraph, choose_sizes_by_work
from dyncp.placement.anneal import anneal_best
from dyncp.placement.cuts import SplitStrategy
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.problem import (
    Cells,
    Problem,
    border_price,
    cell_of,
    diagonal,
    find_cells,
    fold,
    heavy_cells,
    make_problem,
)
from dyncp.placement.refine import Solution, make_state, refine, start_from
from dyncp.placement.solver import Solver
from dyncp.placement.split import split_cells
from dyncp.topology import Topology

# The best come first. They were chosen greedily: each lowers the bytes of 48 cases the most.
STRATEGIES = (
    SplitStrategy(spend=1.0, sizes=4),
    SplitStrategy(spend=2.5, sizes=4, left=0.45),
    SplitStrategy(spend=1.7, row_bias=0.7),
    SplitStrategy(spend=1.0, sizes=4, left=0.45, row_bias=0.7),
    SplitStrategy(spend=1.7, left=0.4, row_bias=0.7),
    SplitStrategy(spend=2.5, left=0.4, row_bias=0.7),
)
# Random strategies (fewer if there are many tiles), and what they are drawn from. NOISE is the
# standard deviation of the logarithm of the factors on the costs of cuts, DRAWN their number.
# Without random strategies 0.3 % more bytes move, and steps of effort "quality" take 1.006 times as
# long.
RANDOM_STRATEGIES, RANDOM_TILES = 24, 100_000
SPENDS, LEFT, SIZES, ROW_BIAS = (1.0, 1.7, 2.5, 8.0), (0.5, 0.45, 0.4, 0.34), (1, 4), (0.7, 1.0)
NOISE, DRAWN = 0.2, 499
# How many of the cheapest results are refined. With 1, 1 % more bytes move (quality: 0.4 %).
REFINED, REFINED_FOR_QUALITY = 2, 6
# A folded row has more than this many times the work of its sequence's mean row; the last row of a
# causal sequence has twice. With 0 nothing changes in 36 cases, but bisection takes 1.3 times as
# long.
UNUSUAL = 4.0


def place_bisection(
    name: str,
    priced: bool,
    quality: bool,
    graph: BlockGraph,
    topology: Topology,
    limits: Limits,
    seed: int,
) -> Placement:
    """With `priced`, bytes between nodes cost as much more as their links are slower."""
    problem, rng = make_problem(graph), np.random.default_rng(seed)
    cells, strategies = find_cells(problem), list(STRATEGIES)
    if quality:
        strategies += _random_strategies(len(cells.cell) * problem.num_groups, rng)
    starts = sorted(_starts(problem, cells, topology, limits, priced, strategies), key=_cost)
    refined = starts[: REFINED_FOR_QUALITY if quality else REFINED]
    best = min((refine(start.state) for start in refined), key=_cost)
    if quality:
        best = anneal_best(best, rng)
    tile_rank = tile_ranks(graph, problem, cells, best.state.tile_rank)
    ranks, block_rank = topology.num_ranks, frozen(best.state.block_rank)
    return Placement(ranks, block_rank, tile_rank, name, static=False)


def _random_strategies(num_tiles: int, rng: np.random.Generator) -> Iterator[SplitStrategy]:
    for _ in range(min(RANDOM_STRATEGIES, RANDOM_TILES // max(num_tiles, 1))):
        noise = np.exp(NOISE * rng.standard_normal(DRAWN))
        left, sizes, bias = rng.choice(LEFT), rng.choice(SIZES), rng.choice(ROW_BIAS)
        spend = float(rng.choice(SPENDS))
        yield SplitStrategy(spend, float(left), sizes=int(sizes), row_bias=float(bias), noise=noise)


def _cost(solution: Solution) -> float:
    return solution.cost


def _starts(
    problem: Problem,
    cells: Cells,
    topology: Topology,
    limits: Limits,
    priced: bool,
    strategies: Sequence[SplitStrategy],
) -> Iterator[Solution]:
    """Placements of all strategies with estimates of their cost; stops after one that is free."""
    ranks, tolerance = topology.num_ranks, limits.tolerances
    mean, extra = problem.mean(ranks), max(border_price(topology) - 1, 0.0) if priced else 0.0
    state = make_state(problem, cells, topology, mean * (1 + tolerance), extra)
    along = topology if priced else Topology(1, ranks)
    heavy, on_diagonal = heavy_cells(problem, cells, ranks, UNUSUAL), diagonal(problem)
    folded = fold(problem, heavy)
    for strategy in strategies:
        for given in (problem, folded) if len(heavy.cell) else (problem,):
            cell_rank = split_cells(given, along, mean, tolerance, strategy)
            if given is folded:
                cell_rank[:, heavy.cell] = cell_rank[:, on_diagonal[heavy.k_block]]
            tile_rank = cell_rank[:, cells.cell].ravel().astype(np.int64)
            start = start_from(state, tile_rank, _owners(problem, cell_rank[:, on_diagonal], ranks))
            yield start
            if start.cost == 0:
                return


def _owners(problem: Problem, candidates: Int32, ranks: int) -> Int64:
    """A block's owner is the rank of its diagonal tile. If its head groups have several ranks, it
    is the one with the fewest tokens so far."""
    owner: Int64 = candidates[0].astype(np.int64)
    several = (candidates != owner).any(axis=0)
    if not several.any():
        return owner
    held = np.bincount(owner[~several], problem.tokens[~several], ranks)
    for b in np.flatnonzero(several):
        owner[b] = candidates[np.argmin(held[candidates[:, b]]), b]
        held[owner[b]] += problem.tokens[b]
    return owner


def tile_ranks(graph: BlockGraph, problem: Problem, cells: Cells, rank: Int64) -> dict[str, Int32]:
    """Ranks of tiles by mask name; `rank` has those of head groups × cells."""
    rank_of_cell = np.zeros((problem.num_groups, len(problem.work)), np.int32)
    rank_of_cell[:, cells.cell] = rank.reshape(problem.num_groups, -1)
    group_of = np.arange(len(graph.head_groups)) * (problem.num_groups > 1)
    return {
        name: frozen(
            rank_of_cell[group_of[tiles.head_group], cell_of(problem, tiles.q_block, tiles.k_block)]
        )
        for name, tiles in graph.tiles.items()
    }


def _solver(name: str, *, priced: bool, quality: bool) -> Solver:
    return Solver(name, partial(place_bisection, name, priced, quality), choose_sizes_by_work)


bisection = _solver("bisection", priced=True, quality=False)
bisection_bytes = _solver("bisection_bytes", priced=False, quality=False)
bisection_quality = _solver("bisection_quality", priced=True, quality=True)
bisection_bytes_quality = _solver("bisection_bytes_quality", priced=False, quality=True)
