"""The solver `owner_computes`: every tile runs on the owner of one of its blocks.

Usually that is its query block, so only keys and values are sent. A row that is too heavy for one
rank (the last rows of causal blockwise attend everything) is computed by the owners of its keys;
they receive its queries and send partial outputs back.

Nodes come first: whole sequences, then the cuts that keep the limits with the fewest bytes over the
node borders. Then the ranks of each node, whose links are fast: they are balanced more tightly than
the limits require. If nothing crosses a node's border, its sequences are cut into bands, so that
little is sent inside the node. Otherwise its blocks are dealt to all of its ranks, so that all of
its NICs share the traffic. Blocks change nodes again only if a limit is missed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int64, frozen
from dyncp.blocks import BLOCK_MULTIPLE, BlockGraph, choose_sizes_by_work
from dyncp.placement.cuts import SplitStrategy
from dyncp.placement.owner_levelling import BlockOwners, level, own_blocks
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.problem import (
    Cells,
    Problem,
    find_cells,
    fold,
    heavy_cells,
    level_all,
    make_problem,
)
from dyncp.placement.solver import Solver
from dyncp.placement.split import Region, region_of_rows, split_rows, whole_batch
from dyncp.topology import Topology

# docs/planner.md says what these constants and the cuts below are worth.
#
# Share of the compute tolerance that nodes may use; the rest is left to their ranks.
NODE_SHARE = 0.6
# Ranks of a node are levelled to within this share of its mean work.
INSIDE = 0.01
# Maximum number of moves and swaps between nodes, and then between ranks.
NODE_MOVES, RANK_MOVES = 100, 400
# Blocks per rank of `owner_computes_fine`.
FINE = 16


class TileNeeds(NamedTuple):
    """Every off-diagonal tile's home block, which it runs with, and the edge that it needs besides.
    Edges 0 to B - 1 are the key sides of blocks, B to 2B - 1 their query sides."""

    home: Int64
    edge: Int64
    size: Float64  # [2 × blocks] bytes that an edge costs per rank
    load: Float64  # [blocks, 2] work of the tiles at home there, tokens of the block

    def users(self, rank: Int64, num_ranks: int) -> Bool:
        """Which ranks need which edges if blocks have these ranks, [edges, ranks]."""
        users = np.zeros((len(self.size), num_ranks), np.bool_)
        users[self.edge, rank[self.home]] = True
        users[np.arange(len(users)), np.tile(rank, 2)] = True
        return users


@dataclass(frozen=True, eq=False)
class NodeCuts:
    """Input for choosing the nodes of blocks: the batch without heavy rows, the same as a region,
    what tiles need, and the work and tokens that a node may have."""

    problem: Problem
    needs: TileNeeds
    whole: Region
    topology: Topology  # one rank per node
    caps: Float64

    def own(self, node: Int64) -> BlockOwners:
        return own_blocks(self.needs.load, self.topology, self.caps, node)

    def border_cost(self, owned: BlockOwners) -> float:
        """Bytes over the busiest border of a node, one way, plus a penalty for missed aims."""
        owner, users = np.tile(owned.rank, 2), self.needs.users(owned.rank, len(owned.used))
        received = np.where(users, self.needs.size[:, None], 0.0)
        received[np.arange(len(owner)), owner] = 0.0
        sent = np.bincount(owner, received.sum(axis=1), received.shape[1])
        busiest = max(received.sum(axis=0).max(), sent.max())
        missed = np.maximum(owned.used / owned.aim - 1 - 1e-9, 0).sum()
        return float(busiest + 0.1 * received.sum() + 1e3 * missed * self.needs.size.sum())


def place_owner_computes(
    graph: BlockGraph, topology: Topology, limits: Limits, _seed: int
) -> Placement:
    ranks, tolerance = topology.num_ranks, limits.tolerances
    # The planner tries several tolerances with the same graph.
    prepared = graph.remember(("owner_computes", ranks), lambda: _prepare(graph, ranks))
    heavy, problem, needs, whole = prepared
    mean = problem.mean(ranks)
    slack = np.array([NODE_SHARE * tolerance[0], _token_slack(problem, mean[1], tolerance[1])])
    caps = mean * topology.ranks_per_node * (1 + slack)
    nodes = NodeCuts(problem, needs, whole, Topology(topology.nodes, 1), caps)
    node = _place_nodes(nodes)
    crossed = _crossed(needs.users(node, topology.nodes))
    rank = np.zeros(len(node), np.int64)
    for m in range(topology.nodes):
        place = _deal if crossed[m] else _cut_bands
        own = node == m
        rank[own] = m * topology.ranks_per_node + place(nodes, own, topology, mean, tolerance)
    owned = own_blocks(needs.load, topology, mean * (1 + tolerance), rank)
    speed = topology.rank_speeds / topology.rank_speeds.mean()
    owned.limit[:, 0] *= speed
    owned.aim[:, 0] *= speed
    level(owned, RANK_MOVES, True)
    _aim_at_node_means(owned, speed)
    level(owned, RANK_MOVES, False)
    tile_rank = {
        name: frozen(owned.rank[np.where(heavy[t.q_block], t.k_block, t.q_block)])
        for name, t in graph.tiles.items()
    }
    return Placement(ranks, frozen(owned.rank), tile_rank, "owner_computes", static=False)


def _prepare(graph: BlockGraph, num_ranks: int) -> tuple[Bool, Problem, TileNeeds, Region]:
    """Everything that does not depend on limits: which query blocks are heavy, the problem with
    their work folded into other rows, what tiles need, and the whole batch as a region."""
    problem = make_problem(graph)
    cells = find_cells(problem)
    chosen = heavy_cells(problem, cells, num_ranks)
    heavy = np.zeros(len(problem.tokens), np.bool_)
    heavy[chosen.q_block] = True
    folded = fold(problem, chosen)
    return heavy, folded, _find_needs(problem, cells, heavy), whole_batch(folded)


def _find_needs(problem: Problem, cells: Cells, heavy: Bool) -> TileNeeds:
    """Tiles run with their query block, tiles of `heavy` query blocks with their key block."""
    blocks, by_key = len(problem.tokens), heavy[cells.q_block]
    home = np.where(by_key, cells.k_block, cells.q_block)
    edge = np.where(by_key, cells.q_block + blocks, cells.k_block)
    off_diagonal = cells.q_block != cells.k_block
    work = np.bincount(home, problem.work[cells.cell], blocks)
    size = np.concatenate([problem.kv_bytes, problem.q_bytes])
    load = np.stack([work, problem.tokens], axis=1)
    return TileNeeds(home[off_diagonal], edge[off_diagonal], size, load)


def _token_slack(problem: Problem, mean: float, tolerance: float) -> float:
    """How much of the token tolerance nodes may use. Ranks hold whole blocks of cut sequences: with
    limit 1.2 and blocks of 1/8 of the mean, a rank holds at most 9 blocks, 1.125 of the mean."""
    cut = np.repeat(np.diff(problem.first_block) > 1, np.diff(problem.first_block))
    block = float(problem.tokens[cut].max(initial=0))
    usable = np.floor(mean * (1 + tolerance) / block) * block / mean - 1 if block else tolerance
    return float(np.clip(0.95 * usable, 0.3 * tolerance, 0.8 * tolerance))


def _crossed(users: Bool) -> Bool:
    """Which nodes send or receive anything; `users` is [edges, nodes]."""
    return np.asarray(users[users.sum(axis=1) > 1].any(axis=0))


def _cut_bands(
    nodes: NodeCuts, own: Bool, topology: Topology, mean: Float64, tolerance: Float64
) -> Int64:
    """Rank inside the node of each of its blocks, by recursive bisection that cuts rows only."""
    if not own.any():
        return np.zeros(0, np.int64)
    inside = Topology(1, topology.ranks_per_node)
    region = region_of_rows(nodes.problem, nodes.whole, nodes.needs.load, own)
    share = np.maximum(region.load.sum(axis=0) / inside.num_ranks, 1e-9 * mean)
    slack = np.clip(mean * (1 + tolerance) / share - 1, INSIDE, tolerance)
    strategy = SplitStrategy(spend=1.7, rows_only=True)
    return split_rows(nodes.problem, region, inside, share, slack, strategy)[own]


def _deal(
    nodes: NodeCuts, own: Bool, topology: Topology, mean: Float64, tolerance: Float64
) -> Int64:
    """Rank inside the node of each of its blocks: heaviest first, each to the least loaded rank."""
    load = nodes.needs.load[own]
    share = np.maximum(load.sum(axis=0) / topology.ranks_per_node, 1e-9 * mean)
    return level_all(load, share * (1 + 0.5 * tolerance), topology.ranks_per_node)


def _aim_at_node_means(owned: BlockOwners, speed: Float64) -> None:
    """Sets each rank's aim to its share, by speed, of the work that its node has."""
    work, speed = (own.reshape(-1, owned.per_node) for own in (owned.used[:, 0], speed))
    aim = work.sum(axis=1, keepdims=True) * speed / speed.sum(axis=1, keepdims=True)
    aim = np.maximum(aim.ravel() * (1 + INSIDE), 1e-9)
    owned.aim[:, 0] = np.minimum(owned.limit[:, 0], aim)


# The node of every block: few bytes over the node borders, within the caps of the nodes.
#
# Several cuts are tried and the best is kept: whole sequences; pieces of sequences that are too
# long for a node, levelled like sequences; and recursive bisection.

# Most of a node's share that a piece may have.
PIECES = (1.0, 0.93, 0.85, 0.5)
# With at most this many nodes, bisection also splits nodes off one by one.
PEELED = 32
# How many of the cheapest cuts are levelled.
LEVELLED = 5


def _place_nodes(nodes: NodeCuts) -> Int64:
    sequence = nodes.problem.sequence
    best = nodes.own(_level_pieces(nodes, sequence))
    if (best.used <= best.aim * (1 + 1e-9)).all():
        return best.rank
    cuts = {cut.tobytes(): cut for cut in (best.rank, *_cuts(nodes, sequence))}
    options = sorted(map(nodes.own, cuts.values()), key=nodes.border_cost)[:LEVELLED]
    for owned in options:
        level(owned, NODE_MOVES, True)
    return min(options, key=nodes.border_cost).rank


def _cuts(nodes: NodeCuts, sequence: Int64) -> Iterator[Int64]:
    for cut, most in product((_from_the_end, _evenly, _zigzag), PIECES):
        yield _level_pieces(nodes, cut(nodes, sequence, most))
    mean = nodes.problem.mean(nodes.topology.num_ranks)
    slack = nodes.caps / mean - 1
    for peel in (False, True) if nodes.topology.num_ranks <= PEELED else (False,):
        strategy = SplitStrategy(spend=8.0, rows_only=True, peel=peel)
        yield split_rows(nodes.problem, nodes.whole, nodes.topology, mean, slack, strategy)


def _level_pieces(nodes: NodeCuts, piece: Int64) -> Int64:
    """Node of every block after levelling pieces over nodes; `piece` is every block's piece."""
    load = np.stack([np.bincount(piece, column) for column in nodes.needs.load.T], axis=1)
    place = level_all(load.astype(np.float64), nodes.caps, nodes.topology.num_ranks)
    return place[piece]


def _from_the_end(nodes: NodeCuts, sequence: Int64, most: float) -> Int64:
    """Pieces that fill a share of a node, from the end of a sequence. The rest is its beginning,
    and only the keys of the beginning cross the border."""
    total, middle = _sum_up(nodes.needs.load[:, 0] / nodes.caps[0], sequence)
    return _number(sequence, np.floor((total[sequence] - middle) / most))


def _evenly(nodes: NodeCuts, sequence: Int64, most: float) -> Int64:
    """Pieces of equal work."""
    total, middle = _sum_up(nodes.needs.load[:, 0] / nodes.caps[0], sequence)
    pieces = np.ceil(total / most)
    part = np.floor(middle / np.maximum(total, 1e-12)[sequence] * pieces[sequence])
    return _number(sequence, part)


def _zigzag(nodes: NodeCuts, sequence: Int64, most: float) -> Int64:
    """Pieces of a band from the beginning and a band from the end, with equal tokens."""
    pieces = np.ceil(np.bincount(sequence, nodes.needs.load[:, 0] / nodes.caps[0]) / most)
    total, middle = _sum_up(nodes.needs.load[:, 1], sequence)
    band = np.floor(middle / total[sequence] * 2 * pieces[sequence])
    return _number(sequence, np.minimum(band, 2 * pieces[sequence] - 1 - band))


def _sum_up(load: Float64, sequence: Int64) -> tuple[Float64, Float64]:
    """The load of every sequence, and that of its blocks up to the middle of every block."""
    total = np.bincount(sequence, load).astype(np.float64)
    return total, np.cumsum(load) - (np.cumsum(total) - total)[sequence] - load / 2


def _number(sequence: Int64, part: Float64) -> Int64:
    """Numbers the pieces: blocks of one sequence with the same part."""
    _, piece = np.unique(sequence * (part.max() + 1) + part, return_inverse=True)
    return piece.reshape(-1)


def fine_block_sizes(lengths: Sequence[int], num_ranks: int) -> Int64:
    """Like `choose_sizes_by_work`, but no block has more than about 1/16 of a rank's tokens: small
    blocks balance tokens more tightly."""
    most = max(BLOCK_MULTIPLE, sum(lengths) // num_ranks // FINE // BLOCK_MULTIPLE * BLOCK_MULTIPLE)
    return np.minimum(choose_sizes_by_work(lengths, num_ranks), most)


owner_computes = Solver("owner_computes", place_owner_computes, choose_sizes_by_work)
owner_computes_fine = Solver("owner_computes_fine", place_owner_computes, fine_block_sizes)
