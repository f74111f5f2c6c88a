"""The input of solvers: one matrix of work per sequence. Also levelling of pieces over bins."""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int32, Int64, starts_of
from dyncp.blocks import K_KINDS, Q_KINDS, BlockGraph
from dyncp.compiled import compiled, inner
from dyncp.topology import Topology

# Payload kinds of query blocks and of key blocks, in both directions.
BOTH = [[kind for kinds in side.values() for kind in kinds] for side in (Q_KINDS, K_KINDS)]


class Problem(NamedTuple):
    """Work, tokens and bytes of a batch; blocks are numbered over the whole batch.

    `work` concatenates the blocks × blocks matrices of all sequences (sequence s starts at
    `work_start[s]`), summed over masks and head groups. `q_bytes` and `kv_bytes` are the bytes sent
    for each further rank that uses a block's queries or its keys, in both directions together. Head
    group g has the share `group_end[g + 1] - group_end[g]` of work and bytes."""

    work: Float64
    work_start: Int64
    first_block: Int64
    tokens: Float64
    q_bytes: Float64
    kv_bytes: Float64
    group_end: Float64

    @property
    def num_groups(self) -> int:
        return len(self.group_end) - 1

    @property
    def sequence(self) -> Int64:
        """The sequence of every block."""
        return np.repeat(np.arange(len(self.first_block) - 1), np.diff(self.first_block))

    def mean(self, num_ranks: int) -> Float64:
        """Mean work and tokens of a rank. At least 1e-9, because shares are divided by it and a
        batch may have no pairs at all."""
        return np.maximum([self.work.sum() / num_ranks, self.tokens.sum() / num_ranks], 1e-9)


class Cells(NamedTuple):
    """Some cells of `Problem.work`: index, query block and key block."""

    cell: Int64
    q_block: Int64
    k_block: Int64


def make_problem(graph: BlockGraph) -> Problem:
    sequences = np.arange(len(graph.batch.lengths) + 1)
    first = np.searchsorted(graph.blocks.sequence, sequences).astype(np.int64)
    work_start = starts_of(np.diff(first) ** 2)
    work = np.zeros(work_start[-1])
    per_token = graph.payload_bytes.sum(axis=1)
    tokens = graph.blocks.tokens.astype(np.float64)
    q_bytes, kv_bytes = (tokens * per_token[kinds].sum() for kinds in BOTH)
    heads = np.array([0, *(group.num_kv_heads for group in graph.head_groups)])
    group_end = np.cumsum(heads) / heads.sum()
    problem = Problem(work, work_start, first, tokens, q_bytes, kv_bytes, group_end)
    for name, tiles in graph.tiles.items():
        cell = cell_of(problem, tiles.q_block, tiles.k_block)
        work += np.bincount(cell, graph.tile_work(name), len(work))
    return problem


def cell_of(problem: Problem, q_block: Int64 | Int32, k_block: Int64 | Int32) -> Int64:
    """Index in `Problem.work` of each (query block, key block) pair."""
    sequence = problem.sequence[q_block]
    first, stride = problem.first_block[sequence], np.diff(problem.first_block)[sequence]
    cell: Int64 = problem.work_start[sequence] + (q_block - first) * stride + k_block - first
    return cell


def diagonal(problem: Problem) -> Int64:
    """The diagonal cell of every block."""
    blocks = np.arange(len(problem.tokens))
    return cell_of(problem, blocks, blocks)


def find_cells(problem: Problem) -> Cells:
    """All cells that have work, sorted."""
    cell = np.flatnonzero(problem.work)
    sequence = np.searchsorted(problem.work_start, cell, side="right") - 1
    stride, first = np.diff(problem.first_block)[sequence], problem.first_block[sequence]
    row, column = np.divmod(cell - problem.work_start[sequence], stride)
    return Cells(cell, first + row, first + column)


# Heavy rows have so many pairs that one rank could hardly compute them alone.
#
# The last rows of causal blockwise attend everything. No band of rows or columns suits both them
# and the other rows, so their tiles run on the owners of their keys: their work is added to the
# diagonal tiles of their key blocks. Sending the queries to all ranks costs less than sending all
# keys to one rank.

# A heavy row has more than this share of a rank's mean work.
HEAVY = 0.5


def heavy_cells(problem: Problem, cells: Cells, num_ranks: int, unusual: float = 0.0) -> Cells:
    """The off-diagonal cells of heavy rows. A heavy row also has more than `unusual` times the work
    of its sequence's mean row."""
    row = np.bincount(cells.q_block, problem.work[cells.cell], len(problem.tokens))
    blocks, sequence = np.diff(problem.first_block), problem.sequence
    mean_row = (np.bincount(sequence, row, len(blocks)) / np.maximum(blocks, 1))[sequence]
    heavy = (row > HEAVY * problem.work.sum() / num_ranks) & (row > unusual * mean_row)
    chosen = heavy[cells.q_block] & (cells.q_block != cells.k_block)
    return Cells(*(column[chosen] for column in cells))


def fold(problem: Problem, heavy: Cells) -> Problem:
    """The problem with the work of `heavy` cells moved to the diagonals of their key blocks."""
    work = problem.work.copy()
    work[heavy.cell] = 0.0
    np.add.at(work, diagonal(problem)[heavy.k_block], problem.work[heavy.cell])
    return problem._replace(work=work)


def border_price(topology: Topology) -> float:
    """Time of a byte between nodes, on a rank's share of the NICs, over that of a byte inside a
    node; 0 if there is one node."""
    if topology.nodes == 1:
        return 0.0
    return topology.intra.bandwidth * topology.ranks_per_node / topology.inter.bandwidth


# Levelling distributes whole pieces over bins: largest first, then moves and swaps that relieve the
# fullest bin.

# Limits on how many of the largest pieces are swapped, and on the number of swaps.
SWAPPED_PIECES, MAX_SWAPS = 96, 60
_EPSILON = 1e-9


def level_all(load: Float64, caps: Float64, bins: int, max_swaps: int = MAX_SWAPS) -> Int64:
    """The bin of every piece; `caps` is the work and tokens of a bin."""
    order = np.argsort(-(load / caps).max(axis=1), kind="stable")
    place, used = np.zeros(len(load), np.int64), np.zeros((bins, 2))
    level_pieces(load, order, len(order), -1, used, np.tile(caps, (bins, 1)), place, max_swaps)
    return place


@compiled
def level_pieces(
    load: Float64,
    order: Int64,
    count: int,
    skip: int,
    used: Float64,
    caps: Float64,
    place: Int64,
    max_swaps: int,
) -> float:
    """Puts each of the first `count` pieces of `order`, except piece `skip`, into the bin that it
    leaves least full, then moves and swaps pieces. Writes `place` and adds to `used`. Returns the
    sum of the excesses over the caps, as shares of them.

    `load` is [pieces, 2]: work and tokens; `used` and `caps` are [bins, 2]."""
    for i in range(count):
        piece = order[i]
        if piece == skip:
            continue
        best, least = 0, 1e300
        for b in range(len(caps)):
            share = _share(used, caps, b, load[piece, 0], load[piece, 1])
            if share < least:
                best, least = b, share
        place[piece] = best
        used[best, 0] += load[piece, 0]
        used[best, 1] += load[piece, 1]
    for _ in range(max_swaps):
        if not _relieve(load, order, min(count, SWAPPED_PIECES), skip, used, caps, place):
            break
    missed = 0.0
    for b in range(len(caps)):
        for what in range(2):
            missed += max(0.0, used[b, what] / caps[b, what] - 1.0 - _EPSILON)
    return missed


@inner
def _share(used: Float64, caps: Float64, b: int, work: float, tokens: float) -> float:
    return float(max((used[b, 0] + work) / caps[b, 0], (used[b, 1] + tokens) / caps[b, 1]))


@inner
def _fullest(used: Float64, caps: Float64) -> int:
    full = 0
    for b in range(len(caps)):
        if _share(used, caps, b, 0.0, 0.0) > _share(used, caps, full, 0.0, 0.0):
            full = b
    return full


@inner
def _relieve(
    load: Float64, order: Int64, count: int, skip: int, used: Float64, caps: Float64, place: Int64
) -> bool:
    """If the fullest bin exceeds its caps, makes the move or swap that leaves it and its partner
    least full. Returns whether there was one."""
    full = _fullest(used, caps)
    best = _share(used, caps, full, 0.0, 0.0)
    if best <= 1.0 + _EPSILON:
        return False
    best, best_p, best_q, best_b = best - _EPSILON, -1, -1, -1
    for i in range(count):
        p = order[i]
        if p == skip or place[p] != full:
            continue
        for j in range(count):  # q == p means a move without a swap
            q = order[j]
            if q == skip or (place[q] == full and q != p):
                continue
            work = load[p, 0] - (load[q, 0] if q != p else 0.0)
            tokens = load[p, 1] - (load[q, 1] if q != p else 0.0)
            left = _share(used, caps, full, -work, -tokens)
            if left >= best:
                continue
            first, last = (place[q], place[q] + 1) if q != p else (0, len(caps))
            for b in range(first, last):
                if b == full:
                    continue
                worse = max(left, _share(used, caps, b, work, tokens))
                if worse < best:
                    best, best_p, best_q, best_b = worse, p, q, b
    if best_p < 0:
        return False
    _move(load, used, place, best_p, best_b)
    if best_q != best_p:
        _move(load, used, place, best_q, full)
    return True


@inner
def _move(load: Float64, used: Float64, place: Int64, p: int, b: int) -> None:
    for what in range(2):
        used[place[p], what] -= load[p, what]
        used[b, what] += load[p, what]
    place[p] = b
