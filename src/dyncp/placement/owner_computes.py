"""The solver `owner_computes`: every tile runs where its home block lives.

First nodes: whole sequences, then the fewest bytes over their borders that meet the limits. Then
the ranks of each node, whose links are fast: they are levelled further than the limits ask for.
Where nothing crosses a node's border, its sequences are cut into bands, so that little travels
inside; otherwise its blocks are dealt out over all ranks, so that all of its NICs share what
crosses. Only where a limit is missed do blocks move between nodes again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from dyncp.arrays import Bool, Float64, Int32, Int64, frozen
from dyncp.blocks import BLOCK_MULTIPLE, BlockGraph, choose_sizes_by_work
from dyncp.placement.owner_levelling import (
    Homes,
    Needs,
    Rows,
    find_homes,
    find_needs,
    fold,
    level,
    make_rows,
)
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.problem import (
    Problem,
    Region,
    level_all,
    make_problem,
    region_of_rows,
    whole_batch,
)
from dyncp.placement.solver import Solver
from dyncp.placement.split import Budget, Way, split_rows
from dyncp.topology import Topology

# Pieces have at most this share of a node.
PIECES = (1.0, 0.93, 0.85, 0.5)
NODE_MOVES = 100
# Up to so many nodes are also split off one by one.
PEELED = 32
# The best ways before levelling are levelled.
LEVELLED = 5


@dataclass(frozen=True, eq=False)
class NodeCut:
    """`whole` is the whole batch, `load` the work and tokens of every block, and `caps` what a
    node may have of them."""

    problem: Problem
    needs: Needs
    whole: Region
    load: Float64
    topology: Topology  # one rank per node
    caps: Float64

    def rows(self, node: Int64) -> Rows:
        return make_rows(self.problem, self.needs, self.topology, self.caps, node)


def place_nodes(nodes: NodeCut) -> Int64:
    sequence = np.repeat(
        np.arange(len(nodes.problem.first_block) - 1), np.diff(nodes.problem.first_block)
    )
    best = nodes.rows(_level_nodes(nodes, sequence))
    if (best.used <= best.aim * (1 + 1e-9)).all():
        return best.rank
    ways = {way.tobytes(): way for way in (best.rank, *_ways(nodes, sequence))}
    options = sorted(map(nodes.rows, ways.values()), key=_border_cost)
    for rows in options[:LEVELLED]:
        level(rows, NODE_MOVES, True)
    return min(options[:LEVELLED], key=_border_cost).rank


def _ways(nodes: NodeCut, sequence: Int64) -> Iterator[Int64]:
    for cut, most in product((_from_the_end, _evenly, _zigzag), PIECES):
        yield _level_nodes(nodes, cut(nodes, sequence, most))
    mean = np.maximum(nodes.load.sum(axis=0) / nodes.topology.num_ranks, 1e-9)
    budget = Budget(mean, nodes.caps / mean - 1, 8.0)
    for peel in (False, True) if nodes.topology.num_ranks <= PEELED else (False,):
        way = Way(rows_only=True, peel=peel)
        yield split_rows(nodes.problem, nodes.whole, nodes.topology, budget, way)


def _level_nodes(nodes: NodeCut, piece: Int64) -> Int64:
    """Levels pieces over nodes; `piece` is the number of every block's piece."""
    load = np.stack([np.bincount(piece, column) for column in nodes.load.T], axis=1)
    place = level_all(load.astype(np.float64), nodes.caps, nodes.topology.num_ranks)
    return place[piece]


def _from_the_end(nodes: NodeCut, sequence: Int64, most: float) -> Int64:
    """Pieces that fill a share of a node, counted from the end of a sequence: what is left over
    is its beginning, whose keys alone cross the border."""
    share = nodes.needs.work / nodes.caps[0]
    total = np.bincount(sequence, share)
    after = total[sequence] - (np.cumsum(share) - (np.cumsum(total) - total)[sequence])
    part = np.floor((after + share / 2) / most).astype(np.int64)
    return _number(sequence, part)


def _evenly(nodes: NodeCut, sequence: Int64, most: float) -> Int64:
    """Pieces of equal work."""
    share = nodes.needs.work / nodes.caps[0]
    total = np.bincount(sequence, share)
    pieces = np.ceil(total / most)
    middle = np.cumsum(share) - (np.cumsum(total) - total)[sequence] - share / 2
    part = np.floor(middle / np.maximum(total, 1e-12)[sequence] * pieces[sequence])
    return _number(sequence, part.astype(np.int64))


def _zigzag(nodes: NodeCut, sequence: Int64, most: float) -> Int64:
    """Pieces of one band from the beginning and one from the end, equal in tokens."""
    pieces = np.ceil(np.bincount(sequence, nodes.needs.work / nodes.caps[0]) / most)
    tokens = nodes.problem.tokens
    total = np.bincount(sequence, tokens)
    middle = np.cumsum(tokens) - (np.cumsum(total) - total)[sequence] - tokens / 2
    band = np.floor(middle / total[sequence] * 2 * pieces[sequence])
    return _number(sequence, np.minimum(band, 2 * pieces[sequence] - 1 - band).astype(np.int64))


def _number(sequence: Int64, part: Int64) -> Int64:
    _, piece = np.unique(sequence * (part.max() + 1) + part, return_inverse=True)
    return piece.reshape(-1)


def _border_cost(rows: Rows) -> float:
    """Bytes over the busiest border (a node's, one way), and a penalty where aims are missed."""
    owner = np.tile(rows.rank, 2)
    comes = np.where(rows.users > 0, rows.size[:, None], 0.0)
    comes[np.arange(len(owner)), owner] = 0.0
    leaves = np.bincount(owner, comes.sum(axis=1), comes.shape[1])
    busiest = max(comes.sum(axis=0).max(), leaves.max())
    missed = np.maximum(rows.used / rows.aim - 1 - 1e-9, 0).sum()
    return float(busiest + 0.1 * comes.sum() + 1e3 * missed * rows.size.sum())


# Share of the compute tolerance that nodes may use; the rest is left to their ranks.
NODE_SHARE = 0.6
# Ranks of a node are levelled to its mean work within this share.
INSIDE = 0.01
MAX_MOVES = 400
# Blocks per rank where they are fine.
FINE = 16


def place_owner_computes(
    graph: BlockGraph, topology: Topology, limits: Limits, _seed: int
) -> Placement:
    ranks, tolerance = topology.num_ranks, limits.tolerances
    homes, problem, needs, whole = _prepare(graph, ranks)
    load = np.stack([needs.work, problem.tokens], axis=1)
    mean = np.maximum(load.sum(axis=0) / ranks, 1e-9)
    slack = np.array([NODE_SHARE * tolerance[0], _token_slack(problem, mean[1], tolerance[1])])
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
    return Placement(ranks, frozen(rows.rank), tile_rank, "owner_computes", static=False)


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


owner_computes = Solver("owner_computes", place_owner_computes, choose_sizes_by_work)
owner_computes_fine = Solver("owner_computes_fine", place_owner_computes, fine_block_sizes)
