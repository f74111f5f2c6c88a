"""The solver `rows`: every tile runs where its home block lives.

First nodes: whole sequences, then the fewest bytes over their borders that meet the limits (see
nodes.py). Then the ranks of each node, whose links are fast: they are levelled further than
the limits ask for. Where nothing crosses a node's border, its sequences are cut into bands, so
that little travels inside; otherwise its blocks are dealt out over all ranks, so that all of its
NICs share what crosses. Only where a limit is missed do blocks move between nodes again.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dyncp.arrays import Bool, Float64, Int32, Int64, frozen
from dyncp.blocks import BLOCK_MULTIPLE, BlockGraph, choose_sizes_by_work
from dyncp.placement.bisection.leveling import level_all
from dyncp.placement.bisection.regions import (
    Problem,
    Region,
    make_problem,
    region_of_rows,
    whole_batch,
)
from dyncp.placement.bisection.split import Budget, Way, split_rows
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.rows.level import (
    Homes,
    Needs,
    Rows,
    find_homes,
    find_needs,
    fold,
    level,
    make_rows,
)
from dyncp.placement.rows.nodes import NodeCut, place_nodes
from dyncp.placement.solver import Solver
from dyncp.topology import Topology

# Share of the compute tolerance that nodes may use; the rest is left to their ranks.
MACHINE_SHARE = 0.6
# Ranks of a node are levelled to its mean work within this share.
INSIDE = 0.01
MAX_MOVES = 400
# Blocks per rank where they are fine.
FINE = 16


def place_rows(graph: BlockGraph, topology: Topology, limits: Limits, _seed: int) -> Placement:
    ranks, tolerance = topology.num_ranks, limits.tolerances
    homes, problem, needs, whole = _prepare(graph, ranks)
    load = np.stack([needs.work, problem.tokens], axis=1)
    mean = np.maximum(load.sum(axis=0) / ranks, 1e-9)
    slack = np.array([MACHINE_SHARE * tolerance[0], _token_slack(problem, mean[1], tolerance[1])])
    caps = mean * topology.ranks_per_node * (1 + slack)
    nodes = NodeCut(problem, needs, whole, load, Topology(topology.nodes, 1), caps)
    node = place_nodes(nodes)
    dealt = _crossed(nodes.rows(node))
    rank = np.zeros(len(node), np.int64)
    for m in range(topology.nodes):
        place = _deal if dealt[m] else _cut_bands
        own = node == m
        rank[own] = m * topology.ranks_per_node + place(nodes, own, topology, mean, tolerance)
    rows = make_rows(problem, needs, topology, mean * (1 + tolerance), rank)
    speed = topology.rank_speeds / topology.rank_speeds.mean()
    rows.limit[:, 0] *= speed
    rows.aim[:, 0] *= speed
    level(rows, MAX_MOVES, True)
    _aim_at_node_means(rows, speed)
    level(rows, MAX_MOVES, False)
    tile_rank = _tile_ranks(graph, homes, rows.rank)
    return Placement(ranks, frozen(rows.rank), tile_rank, "rows", static=False)


@lru_cache(maxsize=1)  # several tolerances are tried one after the other
def _prepare(graph: BlockGraph, num_ranks: int) -> tuple[Homes, Problem, Needs, Region]:
    """What does not depend on limits: homes, the problem folded by them, and the whole batch."""
    problem = make_problem(graph)
    homes = find_homes(problem, num_ranks)
    folded = fold(problem, homes)
    return homes, folded, find_needs(problem, homes), whole_batch(folded)


def _token_slack(problem: Problem, mean: float, tolerance: float) -> float:
    """What nodes may use of the tolerance when ranks hold whole blocks of cut sequences: with
    limit 1.2 and blocks of 1/8 of the mean, 9 blocks, that is 1.125."""
    cut = np.repeat(np.diff(problem.first_block) > 1, np.diff(problem.first_block))
    block = float(problem.tokens[cut].max(initial=0))
    usable = np.floor(mean * (1 + tolerance) / block) * block / mean - 1 if block else tolerance
    return float(np.clip(0.95 * usable, 0.3 * tolerance, 0.8 * tolerance))


def _crossed(rows: Rows) -> Bool:
    """Nodes that send or receive anything; `rows` has one rank per node."""
    crossing = np.flatnonzero((rows.users > 0).sum(axis=1) > 1)
    return np.asarray((rows.users[crossing] > 0).any(axis=0))


def _cut_bands(
    nodes: NodeCut, own: Bool, topology: Topology, mean: Float64, tolerance: Float64
) -> Int64:
    """Rank within the node of its own blocks: recursive bisection with row cuts only."""
    if not own.any():
        return np.zeros(0, np.int64)
    inside = Topology(1, topology.ranks_per_node)
    region = region_of_rows(nodes.problem, nodes.whole, nodes.load, own)
    share = np.maximum(region.load.sum(axis=0) / inside.num_ranks, 1e-9 * mean)
    slack = np.clip(mean * (1 + tolerance) / share - 1, INSIDE, tolerance)
    budget, way = Budget(share, slack, 1.7), Way(rows_only=True)
    return split_rows(nodes.problem, region, inside, budget, way)[own]


def _deal(
    nodes: NodeCut, own: Bool, topology: Topology, mean: Float64, tolerance: Float64
) -> Int64:
    """Rank within the node of its own blocks: heaviest first, each to the emptiest rank."""
    load = nodes.load[own]
    share = np.maximum(load.sum(axis=0) / topology.ranks_per_node, 1e-9 * mean)
    return level_all(load, share * (1 + 0.5 * tolerance), topology.ranks_per_node)


def _tile_ranks(graph: BlockGraph, homes: Homes, block_rank: Int64) -> dict[str, Int32]:
    heavy = np.zeros(len(block_rank), np.bool_)
    heavy[homes.q_block[homes.by_key]] = True
    return {
        name: frozen(block_rank[np.where(heavy[t.q_block], t.k_block, t.q_block)])
        for name, t in graph.tiles.items()
    }


def _aim_at_node_means(rows: Rows, speed: Float64) -> None:
    """Each rank's share of what its node has, by its speed."""
    work, speed = (own.reshape(-1, rows.per_node) for own in (rows.used[:, 0], speed))
    aim = work.sum(axis=1, keepdims=True) * speed / speed.sum(axis=1, keepdims=True)
    aim = np.maximum(aim.ravel() * (1 + INSIDE), 1e-9)
    rows.aim[:, 0] = np.minimum(rows.limit[:, 0], aim)


def fine_block_sizes(lengths: Sequence[int], num_ranks: int) -> Int64:
    """Like `choose_sizes_by_work`, but no block has more than about 1/16 of a rank's tokens, so
    that tokens can be levelled where they cost time."""
    most = max(BLOCK_MULTIPLE, sum(lengths) // num_ranks // FINE // BLOCK_MULTIPLE * BLOCK_MULTIPLE)
    return np.minimum(choose_sizes_by_work(lengths, num_ranks), most)


rows = Solver("rows", place_rows, choose_sizes_by_work)
rows_fine = Solver("rows_fine", place_rows, fine_block_sizes)
