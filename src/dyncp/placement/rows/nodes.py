"""The node of every block: few bytes over the borders of nodes, within their budgets.

Several ways are tried and the best kept: whole sequences; sequences too long for a node cut into
pieces, which are then levelled like sequences; and recursive bisection.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.placement.bisection.leveling import level_all
from dyncp.placement.bisection.regions import Problem, Region
from dyncp.placement.bisection.split import Budget, Way, split_rows
from dyncp.placement.rows.level import Needs, Rows, level, make_rows
from dyncp.topology import Topology

# Pieces have at most this share of a node.
PIECES = (1.0, 0.93, 0.85, 0.5)
MAX_MOVES = 100
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
    best = nodes.rows(_level(nodes, sequence))
    if (best.used <= best.aim * (1 + 1e-9)).all():
        return best.rank
    ways = {way.tobytes(): way for way in (best.rank, *_ways(nodes, sequence))}
    options = sorted(map(nodes.rows, ways.values()), key=cost)
    for rows in options[:LEVELLED]:
        level(rows, MAX_MOVES, True)
    return min(options[:LEVELLED], key=cost).rank


def _ways(nodes: NodeCut, sequence: Int64) -> Iterator[Int64]:
    for cut, most in product((_from_the_end, _evenly, _zigzag), PIECES):
        yield _level(nodes, cut(nodes, sequence, most))
    mean = np.maximum(nodes.load.sum(axis=0) / nodes.topology.num_ranks, 1e-9)
    budget = Budget(mean, nodes.caps / mean - 1, 8.0)
    for peel in (False, True) if nodes.topology.num_ranks <= PEELED else (False,):
        way = Way(rows_only=True, peel=peel)
        yield split_rows(nodes.problem, nodes.whole, nodes.topology, budget, way)


def _level(nodes: NodeCut, piece: Int64) -> Int64:
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


def cost(rows: Rows) -> float:
    """Bytes over the busiest border (a node's, one way), and a penalty where aims are missed."""
    owner = np.tile(rows.rank, 2)
    comes = np.where(rows.users > 0, rows.size[:, None], 0.0)
    comes[np.arange(len(owner)), owner] = 0.0
    leaves = np.bincount(owner, comes.sum(axis=1), comes.shape[1])
    busiest = max(comes.sum(axis=0).max(), leaves.max())
    missed = np.maximum(rows.used / rows.aim - 1 - 1e-9, 0).sum()
    return float(busiest + 0.1 * comes.sum() + 1e3 * missed * rows.size.sum())
